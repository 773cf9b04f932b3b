//! The log: what blocks are about to become, durable before any of them is written.
//!
//! ```text
//!   writers ─► queue ─► page of up to 72 changes, written by whoever has the turn, for all ─► their data
//!   epoch e:  half e % 2 of the log        a save: epoch e+1 begins ─► writers of e end ─► flush ─► tree ─► root says e+1
//! ```
//!
//! A page is written to the half of the epoch that it finds; so a change is logged in its writer's epoch or a later one, never in an
//! earlier one, whose half is given up with it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use millrace_cipher::Sealer;

use super::{
    layout::{LOG_PAGES, PAGE},
    page::{CHANGES, Change, Uuid, encode_log},
};
use crate::locks::Turn;

/// Changes that wait at most.
const QUEUE: usize = 4 * CHANGES;
/// Pages that are left when nobody new is let in: for what waits then, and for what is carried over.
const RESERVE: u64 = 24;
/// Changes that can be carried over.
const CARRIED: usize = 16 * CHANGES;

const _: () = assert!((QUEUE + CARRIED).div_ceil(CHANGES) as u64 + 2 < RESERVE);

struct Queue {
    epoch: u64,
    /// Pages written in this epoch.
    pages: u64,
    waiting: Vec<Change>,
    /// Changes that came so far.
    came: u64,
}

impl Queue {
    fn is_full(&self) -> bool {
        self.pages + RESERVE >= LOG_PAGES
    }
}

/// See the module.
pub(super) struct Log {
    queue: Mutex<Queue>,
    /// Changes that are durable.
    durable: AtomicU64,
    /// Writers that have not ended, of even and of odd epochs.
    writers: [AtomicU64; 2],
    /// Who writes a page.
    pub(super) turn: Turn,
}

/// Why changes were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Others wait: a page must be written first.
    Queue,
    /// The log of this epoch is full: a save must come first.
    Full(u64),
}

/// A writer whose changes were taken: it counts until this is dropped, which is when its data are on the leg, or will not be.
pub(super) struct Entered<'a> {
    writers: &'a AtomicU64,
    upto: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A page that is being written.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageOut {
    pub(super) epoch: u64,
    pub(super) number: u64,
    changes: usize,
}

impl Default for Log {
    fn default() -> Self {
        let queue = Queue { epoch: 0, pages: 0, waiting: Vec::with_capacity(QUEUE), came: 0 };
        Self { queue: Mutex::new(queue), durable: AtomicU64::new(0), writers: Default::default(), turn: Turn::default() }
    }
}

impl Log {
    /// It is held for some copies, beside ciphers and writes that take far longer.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins anew, with nobody there, behind so many pages.
    pub(super) fn reset(&self, epoch: u64, pages: u64) {
        let mut queue = self.queue();
        queue.waiting.clear();
        (queue.epoch, queue.pages) = (epoch, pages);
        self.durable.store(queue.came, Ordering::SeqCst);
    }

    /// The epoch, and how many pages were written in it.
    pub(super) fn epoch(&self) -> (u64, u64) {
        let queue = self.queue();
        (queue.epoch, queue.pages)
    }

    /// Whether a save should not be put off.
    pub(super) fn is_half_full(&self) -> bool {
        self.queue().pages > LOG_PAGES / 2
    }

    /// Whether nobody new is let in.
    pub(super) fn is_full(&self) -> bool {
        self.queue().is_full()
    }

    /// Takes changes, all or none.
    pub(super) fn enter(&self, count: usize, change: impl Fn(usize) -> Change) -> Result<Entered<'_>, Refused> {
        let mut queue = self.queue();
        if queue.is_full() {
            return Err(Refused::Full(queue.epoch));
        }
        if queue.waiting.len() + count > QUEUE {
            return Err(Refused::Queue);
        }
        Ok(self.take(&mut queue, count, change))
    }

    fn take(&self, queue: &mut Queue, count: usize, change: impl Fn(usize) -> Change) -> Entered<'_> {
        queue.waiting.extend((0..count).map(change));
        queue.came += count as u64;
        let writers = &self.writers[(queue.epoch % 2) as usize];
        writers.fetch_add(1, Ordering::SeqCst);
        Entered { writers, upto: queue.came }
    }

    /// Changes that can be carried over now: [`CARRIED`], unless a process that died had carried some over in this epoch.
    pub(super) fn room(&self) -> usize {
        let queue = self.queue();
        let pages = (LOG_PAGES - 2).saturating_sub(queue.pages) as usize;
        (pages * CHANGES).saturating_sub(queue.waiting.len()).min(CARRIED)
    }

    /// Takes changes of the epoch before, even when nobody else is let in; false when there is no [`Self::room`].
    pub(super) fn carry(&self, changes: &[Change]) -> bool {
        let mut queue = self.queue();
        let pages = (queue.waiting.len() + changes.len()).div_ceil(CHANGES) as u64;
        let fits = queue.pages + pages + 1 < LOG_PAGES;
        if fits {
            drop(self.take(&mut queue, changes.len(), |at| changes[at]));
        }
        fits
    }

    /// Comes as a writer without changes, behind all who wait.
    pub(super) fn behind_all(&self) -> Entered<'_> {
        self.take(&mut self.queue(), 0, |_| unreachable!("there are none"))
    }

    /// Whether a writer's changes are durable.
    pub(super) fn is_durable(&self, entered: &Entered<'_>) -> bool {
        self.durable.load(Ordering::SeqCst) >= entered.upto
    }

    /// Whether this many changes more could wait.
    pub(super) fn has_room(&self, count: usize) -> bool {
        self.queue().waiting.len() + count <= QUEUE
    }

    /// Fills the next page; `None` when nothing waits. Whoever calls this has the turn.
    pub(super) fn fill(&self, sealer: &Sealer, uuid: &Uuid) -> Option<(PageOut, [u8; PAGE])> {
        let queue = self.queue();
        let changes = queue.waiting.len().min(CHANGES);
        let out = PageOut { epoch: queue.epoch, number: queue.pages, changes };
        let some = queue.waiting.get(..changes).filter(|some| !some.is_empty())?;
        assert!(out.number < LOG_PAGES, "a half of the log has room for all that was taken");
        Some((out, encode_log(sealer, uuid, (out.epoch, out.number), some)))
    }

    /// A page is durable. One that is not is written again, in the same place: nobody whose changes were in it has gone on.
    pub(super) fn written(&self, out: PageOut) {
        let mut queue = self.queue();
        queue.waiting.drain(..out.changes);
        if queue.epoch == out.epoch {
            queue.pages += 1;
        }
        self.durable.fetch_add(out.changes as u64, Ordering::SeqCst);
    }

    /// The next epoch begins. The half that it uses must not be needed any more.
    pub(super) fn next_epoch(&self) -> u64 {
        let mut queue = self.queue();
        queue.epoch += 1;
        queue.pages = 0;
        queue.epoch
    }

    /// Whether all writers of an epoch have ended.
    pub(super) fn is_over(&self, epoch: u64) -> bool {
        self.writers[(epoch % 2) as usize].load(Ordering::SeqCst) == 0
    }
}

#[cfg(test)]
mod tests {
    use millrace_cipher::Secret;

    use super::{
        super::page::{Record, decode_log},
        *,
    };

    fn change(lba: u64) -> Change {
        Change { lba, old: Record::FRESH, new: Record { version: lba, tag: [7; 16] } }
    }

    #[test]
    fn changes_of_several_are_durable_together_and_a_page_that_failed_is_written_again() {
        let (log, sealer, uuid) = (Log::default(), Sealer::new(&Secret::generate().unwrap()).unwrap(), [3; 16]);
        log.reset(6, 0);
        let one = log.enter(2, |at| change(at as u64)).unwrap();
        let two = log.enter(CHANGES, |at| change(100 + at as u64)).unwrap();
        // Not durable: it failed. Then it comes to pass, and one more.
        let (out, _) = log.fill(&sealer, &uuid).unwrap();
        assert_eq!((out.epoch, out.number, log.is_durable(&one)), (6, 0, false));
        let (out, page) = log.fill(&sealer, &uuid).unwrap();
        let found = decode_log(&sealer, &uuid, (6, 0), &page).unwrap();
        assert_eq!((found.len(), found[0], found[2]), (CHANGES, change(0), change(100)));
        log.written(out);
        assert!(log.is_durable(&one) && !log.is_durable(&two));
        // What is written after the epoch's end is in the next one's half.
        assert_eq!(log.next_epoch(), 7);
        let (out, page) = log.fill(&sealer, &uuid).unwrap();
        assert_eq!(decode_log(&sealer, &uuid, (7, 0), &page).unwrap().len(), 2);
        log.written(out);
        assert!(log.is_durable(&two) && log.fill(&sealer, &uuid).is_none());
        assert!(log.is_over(7) && !log.is_over(6), "they are the writers of the epoch in which they came");
        drop((one, two));
        assert!(log.is_over(6));
    }

    #[test]
    fn a_log_that_is_nearly_full_lets_nobody_in_and_has_room_for_those_who_are() {
        let (log, sealer, uuid) = (Log::default(), Sealer::new(&Secret::generate().unwrap()).unwrap(), [3; 16]);
        let mut inside = Vec::new();
        let refused = loop {
            match log.enter(CHANGES, |at| change(at as u64)) {
                Ok(entered) => inside.push(entered),
                Err(Refused::Queue) => {
                    assert!(!log.has_room(CHANGES));
                    let (out, _) = log.fill(&sealer, &uuid).unwrap();
                    log.written(out);
                }
                Err(full) => break full,
            }
        };
        assert_eq!(refused, Refused::Full(0));
        while let Some((out, _)) = log.fill(&sealer, &uuid) {
            assert!(out.number < LOG_PAGES);
            log.written(out);
        }
        assert!(inside.iter().all(|entered| log.is_durable(entered)));
        // What is carried over has room all the same.
        assert_eq!(log.room(), CARRIED);
        let carried: Vec<_> = (0..CARRIED as u64).map(change).collect();
        assert!(log.carry(&carried));
        inside.push(log.behind_all());
        while let Some((out, _)) = log.fill(&sealer, &uuid) {
            log.written(out);
        }
        assert!(inside.iter().all(|entered| log.is_durable(entered)));
        assert!(!log.carry(&carried), "twice is too much");
        let (left, too_many) = (log.room(), log.room() + 1);
        assert!(left > 0 && left < CARRIED && !log.carry(&carried[..too_many]) && log.carry(&carried[..left]));
        while let Some((out, _)) = log.fill(&sealer, &uuid) {
            assert!(out.number < LOG_PAGES);
            log.written(out);
        }
        assert!(log.room() == 0 && log.carry(&[]));
        assert_eq!(log.next_epoch(), 1);
        assert!(log.enter(1, |_| change(1)).is_ok());
    }
}
