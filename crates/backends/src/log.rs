//! A limit on how often one object may complain.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const INTERVAL: Duration = Duration::from_secs(1);

/// Lets one message per second through and counts the others.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// Time of the next message, in milliseconds since the first use of any limit.
    next: AtomicU64,
    withheld: AtomicU64,
}

impl LogLimit {
    /// Whether to speak now; then, how many messages were withheld before.
    pub(crate) fn admit(&self) -> Option<u64> {
        static START: OnceLock<Instant> = OnceLock::new();
        self.admit_at(START.get_or_init(Instant::now).elapsed())
    }

    fn admit_at(&self, now: Duration) -> Option<u64> {
        let (now, after) = (now.as_millis() as u64, (now + INTERVAL).as_millis() as u64);
        let next = self.next.load(Ordering::Relaxed);
        // Of several threads at once, the one whose exchange succeeds speaks.
        if now < next || self.next.compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            self.withheld.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.withheld.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_per_interval_and_the_rest_counted() {
        let limit = LogLimit::default();
        assert_eq!(limit.admit_at(Duration::ZERO), Some(0));
        assert_eq!(limit.admit_at(Duration::from_millis(1)), None);
        assert_eq!(limit.admit_at(Duration::from_millis(999)), None);
        assert_eq!(limit.admit_at(Duration::from_secs(1)), Some(2));
        assert_eq!(limit.admit_at(Duration::from_millis(1001)), None);
        assert_eq!(limit.admit_at(Duration::from_secs(9)), Some(1));
    }
}
