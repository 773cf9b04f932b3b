//! What a nap costs here, measured: it differs by a factor of ten between machines, and decides how often one may look.
#![forbid(unsafe_code)]

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Naps in a row that are measured together.
const MEASURED: u32 = 32;
/// Naps between two measurements.
const PAUSE: u32 = 4096;

/// See the module. A nap's cost is all that happens between two naps: waking, looking at the devices, going to sleep.
#[derive(Debug, Default)]
pub(crate) struct Naps {
    cost: Option<Duration>,
    /// Naps since the present measurement began; negative numbers are naps until the next begins.
    row: i64,
    began: Duration,
}

impl Naps {
    /// A nap has ended, and nothing but naps was since the last one.
    pub(crate) fn count(&mut self) {
        self.advance(thread_time);
    }

    fn advance(&mut self, clock: impl FnOnce() -> Duration) {
        match self.row {
            0 => self.began = clock(),
            row if row == i64::from(MEASURED) => {
                let cost = clock().saturating_sub(self.began) / MEASURED;
                self.cost = Some(cost);
                self.row = -i64::from(PAUSE);
            }
            _ => {}
        }
        self.row += 1;
    }

    /// Something else happened: what is being measured is no row of naps.
    pub(crate) fn interrupt(&mut self) {
        self.row = self.row.min(0);
    }

    /// The longest nap: so long that naps cost no more than `budget` thousandths of a core, but within the limits. Until the cost
    /// is known, the upper one.
    pub(crate) fn longest(&self, least: Duration, most: Duration, budget: u32) -> Duration {
        let within_budget = self.cost.map_or(most, |cost| cost.saturating_mul(1000) / budget.max(1));
        within_budget.min(most).max(least)
    }
}

/// Processor time that this thread has used.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROS: fn(u64) -> Duration = Duration::from_micros;

    fn longest(naps: &Naps) -> Duration {
        naps.longest(MICROS(45), MICROS(400), 40)
    }

    /// Naps that each take so long of the processor.
    fn nap(naps: &mut Naps, time: &mut Duration, count: u32, cost: Duration) {
        for _ in 0..count {
            *time += cost;
            naps.advance(|| *time);
        }
    }

    #[test]
    fn naps_are_as_short_as_the_budget_allows() {
        for (cost, expected) in [(1, 45), (2, 50), (10, 250), (13, 325), (50, 400)] {
            let (mut naps, mut time) = (Naps::default(), MICROS(7));
            assert_eq!(longest(&naps), MICROS(400), "not known yet");
            nap(&mut naps, &mut time, MEASURED + 1, MICROS(cost));
            assert_eq!(longest(&naps), MICROS(expected));
            // It is measured again and again.
            nap(&mut naps, &mut time, PAUSE + 2 * MEASURED, MICROS(2));
            assert_eq!(longest(&naps), MICROS(50));
        }
    }

    #[test]
    fn work_between_naps_is_not_their_cost() {
        let (mut naps, mut time) = (Naps::default(), MICROS(0));
        for _ in 0..100 {
            nap(&mut naps, &mut time, MEASURED, MICROS(2));
            time += MICROS(1000);
            naps.interrupt();
        }
        assert_eq!(longest(&naps), MICROS(400), "no row was long enough");
        nap(&mut naps, &mut time, MEASURED + 1, MICROS(2));
        assert_eq!(longest(&naps), MICROS(50));
    }
}
