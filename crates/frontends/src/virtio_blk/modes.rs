//! What is known of a volume's guests when one of them goes on at another disk: whether it may leave writes in a cache.
//!
//! A machine that migrates brings its rings and not its write cache mode: its monitor tells the new disk nothing, and a guest in
//! write-through sends no flush ever. So the volume remembers the mode of each disk that shows it. A guest that begins has the mode that
//! its monitor was told; one that goes on where another disk stopped is in write-through if one of the others was.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The write cache modes of the virtio disks that show one volume.
#[derive(Debug, Default)]
pub struct WriteModes {
    /// Per disk, whether its last guest may leave writes in a cache.
    write_back: Mutex<BTreeMap<String, bool>>,
}

impl WriteModes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.write_back.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mode of a disk's guest.
    pub(crate) fn note(&self, disk: &str, write_back: bool) {
        self.lock().insert(disk.to_owned(), write_back);
    }

    /// The disk shows the volume no more.
    pub(crate) fn forget(&self, disk: &str) {
        self.lock().remove(disk);
    }

    /// Whether a guest that comes from another disk than this one may leave writes in a cache.
    pub(crate) fn of_others(&self, disk: &str) -> bool {
        self.lock().iter().all(|(name, write_back)| name == disk || *write_back)
    }
}
