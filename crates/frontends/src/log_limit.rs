//! Keeps a guest from flooding the log.

use std::time::{Duration, Instant};

/// Messages that may come at once.
const BURST: u32 = 5;
/// After that, one in so long.
const INTERVAL: Duration = Duration::from_secs(10);

/// A budget of log messages.
#[derive(Debug)]
pub(crate) struct LogLimit {
    left: u32,
    suppressed: u64,
    refilled: Instant,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self { left: BURST, suppressed: 0, refilled: Instant::now() }
    }
}

impl LogLimit {
    /// Whether a message may be written now: with the number of those that were not since the last.
    pub(crate) fn admit(&mut self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&mut self, now: Instant) -> Option<u64> {
        let intervals = now.duration_since(self.refilled).as_nanos() / INTERVAL.as_nanos();
        if intervals > 0 {
            self.refilled = now;
            self.left = BURST.min(self.left.saturating_add(u32::try_from(intervals).unwrap_or(BURST)));
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_one_per_interval_with_the_count_of_the_rest() {
        let mut limit = LogLimit::default();
        let start = limit.refilled;
        assert!((0..BURST).all(|_| limit.admit_at(start) == Some(0)));
        assert_eq!(limit.admit_at(start), None);
        assert_eq!(limit.admit_at(start + INTERVAL / 2), None);
        assert_eq!(limit.admit_at(start + INTERVAL), Some(2));
        assert_eq!(limit.admit_at(start + INTERVAL), None);
    }
}
