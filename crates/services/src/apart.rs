//! Devices that a service tells apart: which of its places is whose.

use std::sync::atomic::{AtomicU32, Ordering};

use millrace_block::Asker;

/// Places of one service. The first is of who is no device, and of devices that are too many.
pub(crate) const PLACES: usize = 16;

/// Whose each place is. A device has one from its first request on; when it is gone, another one may have it.
#[derive(Debug, Default)]
pub(crate) struct Apart {
    /// The [number](Asker::number) of each place's device, from place 1 on; 0: nobody had it yet.
    askers: [AtomicU32; PLACES - 1],
    /// How many devices had [gone](Asker::gone) when all places were found taken.
    full: AtomicU32,
}

impl Apart {
    /// The calling thread's device's place, if it has one already; else `claim` is asked.
    #[inline]
    pub(crate) fn place(&self, claim: impl FnOnce(&Self, u32) -> Option<usize>) -> usize {
        let asker = Asker::current().number();
        if asker == 0 {
            return 0;
        }
        if let Some(at) = self.askers.iter().position(|of| of.load(Ordering::Relaxed) == asker) {
            return at + 1;
        }
        let is_full = self.full.load(Ordering::Relaxed) == Asker::gone();
        if is_full { 0 } else { claim(self, asker).unwrap_or(0) }
    }

    /// A place for a device, which lives on one shard: no other thread claims one for it.
    #[cold]
    pub(crate) fn claim(&self, asker: u32) -> Option<usize> {
        let gone = Asker::gone();
        for (at, of) in self.askers.iter().enumerate() {
            let was = of.load(Ordering::Relaxed);
            // Relaxed: what the place stands for is kept right by who asks.
            let is_free = was == 0 || !Asker::is_there(was);
            if is_free && of.compare_exchange(was, asker, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Some(at + 1);
            }
        }
        self.full.store(gone, Ordering::Relaxed);
        None
    }

    /// Places that have been taken, each with its device's number.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (usize, u32)> {
        let numbers = self.askers.iter().map(|of| of.load(Ordering::Relaxed)).enumerate();
        numbers.map(|(at, number)| (at + 1, number)).filter(|(_, number)| *number != 0)
    }
}
