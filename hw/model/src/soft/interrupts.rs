//! Interrupts of one function: once per entry it is decided whether one goes out, waits for more, or for its mask.

use crate::map::Coalescing;

/// Vectors of a function: as many as can be masked.
const VECTORS: usize = 32;
/// Cycles in a unit of the coalescing time.
const TIME: u64 = 256 * crate::map::CYCLES_PER_UNIT;

#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    /// Entries posted since the last interrupt.
    count: u32,
    since: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Interrupts {
    settings: Coalescing,
    waiting: [Waiting; VECTORS],
    pub(super) sent: u64,
}

impl Default for Interrupts {
    fn default() -> Self {
        Self { settings: Coalescing::new(), waiting: [Waiting::default(); VECTORS], sent: 0 }
    }
}

impl Interrupts {
    pub(super) fn set(&mut self, settings: Coalescing) {
        self.settings = settings;
    }

    /// An entry was posted.
    pub(super) fn pend(&mut self, vector: u8, now: u64) {
        let Some(waiting) = self.waiting.get_mut(usize::from(vector)) else { return };
        if waiting.count == 0 {
            waiting.since = now;
        }
        waiting.count += 1;
    }

    /// When a vector that waits is due; `None`: nothing waits for time.
    fn due(&self, vector: usize) -> Option<u64> {
        let waiting = &self.waiting[vector];
        if waiting.count == 0 || self.settings.mask() >> vector & 1 != 0 {
            return None;
        }
        // The first is the admin queue's as well, and never waits.
        let coalesced = self.settings.on() && vector != 0 && waiting.count <= u32::from(self.settings.threshold_z());
        Some(if coalesced { waiting.since + u64::from(self.settings.time()) * TIME } else { 0 })
    }

    /// When the first is due.
    pub(super) fn next_due(&self) -> Option<u64> {
        (0..VECTORS).filter_map(|vector| self.due(vector)).min()
    }

    /// The next vector whose interrupt goes out now.
    pub(super) fn take(&mut self, now: u64) -> Option<u8> {
        let vector = (0..VECTORS).find(|vector| self.due(*vector).is_some_and(|due| due <= now))?;
        self.waiting[vector].count = 0;
        self.sent += 1;
        Some(vector as u8)
    }
}
