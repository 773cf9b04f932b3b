//! Interrupts of one function: once per entry it is decided whether one goes out, waits for more, or for its mask. Entries are counted by
//! queue, also where queues share a vector.

use crate::map::Coalescing;

/// Vectors of a function that can be masked.
const VECTORS: u8 = 32;
/// Cycles in a unit of the coalescing time.
const TIME: u64 = 256 * crate::map::CYCLES_PER_UNIT;

/// What a queue pair's next interrupt waits for.
#[derive(Clone, Copy, Debug, Default)]
struct Waiting {
    /// Entries posted since the last interrupt.
    count: u32,
    since: u64,
    /// It was due, and is masked.
    late: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Interrupts {
    settings: Coalescing,
    /// By queue pair.
    waiting: Vec<Waiting>,
    pub(super) sent: u64,
}

impl Interrupts {
    pub(super) fn new(pairs: u8) -> Self {
        Self { settings: Coalescing::new(), waiting: vec![Waiting::default(); pairs.into()], sent: 0 }
    }

    pub(super) fn set(&mut self, settings: Coalescing) {
        self.settings = settings;
    }

    /// A queue pair begins anew, or has no interrupts.
    pub(super) fn forget(&mut self, pair: usize) {
        self.waiting[pair] = Waiting::default();
    }

    /// An entry was posted.
    pub(super) fn pend(&mut self, pair: usize, now: u64) {
        let waiting = &mut self.waiting[pair];
        if waiting.count == 0 {
            waiting.since = now;
        }
        waiting.count += 1;
    }

    fn is_masked(&self, vector: u8) -> bool {
        vector < VECTORS && self.settings.mask() >> vector & 1 != 0
    }

    /// When what a queue pair waits with is due, but for its mask; `None`: nothing waits.
    fn due(&self, pair: usize, vector: u8) -> Option<u64> {
        let Waiting { count, since, late } = self.waiting[pair];
        if count == 0 && !late {
            return None;
        }
        // The first vector is the admin queue's as well, and never waits.
        let coalesced = self.settings.on() && vector != 0 && count <= u32::from(self.settings.threshold_z());
        Some(if coalesced && !late { since + u64::from(self.settings.time()) * TIME } else { 0 })
    }

    /// When the first is due. `vectors` has each pair's, `None` where there are no interrupts.
    pub(super) fn next_due(&self, vectors: impl Fn(usize) -> Option<u8>) -> Option<u64> {
        let due = |pair| vectors(pair).filter(|vector| !self.is_masked(*vector)).and_then(|vector| self.due(pair, vector));
        (0..self.waiting.len()).filter_map(due).min()
    }

    /// The next vector whose interrupt goes out now.
    pub(super) fn take(&mut self, now: u64, vectors: impl Fn(usize) -> Option<u8>) -> Option<u8> {
        for pair in 0..self.waiting.len() {
            let Some(vector) = vectors(pair) else {
                self.forget(pair);
                continue;
            };
            if self.due(pair, vector).is_none_or(|due| due > now) {
                continue;
            }
            self.forget(pair);
            if !self.is_masked(vector) {
                self.sent += 1;
                return Some(vector);
            }
            self.waiting[pair].late = true;
        }
        None
    }
}
