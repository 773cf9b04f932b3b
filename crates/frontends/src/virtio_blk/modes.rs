//! What is known of a volume's guests when one of them goes on at a disk in the middle of its rings: whether it may leave writes in a cache.
//!
//! A machine that migrates, or that was saved and goes on later, brings its rings and not its write cache mode: its monitor tells the disk
//! nothing, and a guest in write-through sends no flush ever. So the volume remembers the mode of each disk that shows it. A guest that begins
//! has the mode that its monitor was told. One that goes on is in write-through if one was, or may have been, where it may come from: at
//! another disk, or at this one, unless a guest has gone from there since.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The write cache modes of the virtio disks that show one volume.
#[derive(Debug, Default)]
pub struct WriteModes {
    /// Per disk, of its last guest.
    notes: Mutex<BTreeMap<String, Note>>,
}

#[derive(Debug)]
struct Note {
    /// It may leave writes in a cache.
    write_back: bool,
    /// It may have gone on at another disk since then.
    may_have_left: bool,
}

impl WriteModes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Note>> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mode of a disk's guest, which is there, or stops there.
    pub(crate) fn note(&self, disk: &str, write_back: bool) {
        self.lock().insert(disk.to_owned(), Note { write_back, may_have_left: false });
    }

    /// The disk shows the volume no more.
    pub(crate) fn forget(&self, disk: &str) {
        self.lock().remove(disk);
    }

    /// A guest goes on at a disk. Whether it may leave writes in a cache: where nothing is known of any, it may, as its monitor was told.
    pub(crate) fn take_up(&self, disk: &str) -> bool {
        let mut notes = self.lock();
        let sources = notes.iter().filter(|(name, note)| *name != disk || !note.may_have_left);
        let (count, write_back) = sources.fold((0, true), |(count, all), (_, note)| (count + 1, all && note.write_back));
        // Of several nobody knows which has gone.
        for (_, note) in notes.iter_mut().filter(|(name, _)| *name != disk && count == 1) {
            note.may_have_left = true;
        }
        write_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_goes_on_as_it_was_where_it_stopped() {
        let modes = WriteModes::default();
        assert!(modes.take_up("a"), "as its monitor was told");
        for write_back in [false, true] {
            modes.note("a", write_back);
            assert_eq!(modes.take_up("a"), write_back, "saved");
            assert_eq!(modes.take_up("b"), write_back, "migrated");
            modes.note("b", write_back);
            modes.forget("b");
        }
        // Whoever was at the first disk has gone from there.
        modes.note("a", false);
        assert!(!modes.take_up("b"));
        modes.note("b", true);
        assert!(modes.take_up("a"), "it has chosen another mode meanwhile");
        modes.forget("b");
        assert!(modes.take_up("a"), "where it has gone nobody knows");
    }

    /// Machines that share a volume.
    #[test]
    fn a_guest_that_was_saved_is_not_forgotten_for_others() {
        let modes = WriteModes::default();
        modes.note("a", false);
        // One begins, and stops.
        modes.note("b", true);
        assert!(!modes.take_up("a"));
        // One moves while this one is saved: it may have been this one, and has the mode of both.
        modes.note("a", false);
        let there = modes.take_up("c");
        modes.note("c", there);
        assert!(!modes.take_up("a"));
        modes.note("c", true);
        assert!(!modes.take_up("a"), "it was the other one");
    }
}
