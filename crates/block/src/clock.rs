//! The time, for what is decided by it: caps, guarantees, latencies. Tests may bring their own.

use std::{sync::OnceLock, time::Instant};

/// What the clock shows at first: a history of so long lies before it.
const FIRST: u64 = 3_600_000_000_000;

static START: OnceLock<Instant> = OnceLock::new();

#[cfg(feature = "conformance")]
thread_local! {
    static SIMULATED: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Nanoseconds on a clock that never goes back. It shows an hour when it is first looked at.
#[inline]
pub fn now() -> u64 {
    #[cfg(feature = "conformance")]
    if let Some(now) = SIMULATED.get() {
        return now;
    }
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + FIRST
}

/// While it is there, this thread's clock stands still but for what it is told, and so do the sleeps of a
/// [`SyncIo`](crate::conformance::SyncIo).
#[cfg(feature = "conformance")]
#[derive(Debug)]
pub struct SimulatedTime(std::marker::PhantomData<*const ()>);

#[cfg(feature = "conformance")]
impl SimulatedTime {
    /// Stops this thread's clock.
    #[expect(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Self {
        SIMULATED.set(Some(FIRST));
        Self(std::marker::PhantomData)
    }

    /// Moves it on to a time, if that is still to come.
    pub fn advance_to(&self, time: u64) {
        SIMULATED.set(SIMULATED.get().map(|now| now.max(time)));
    }

    /// Whether this thread's clock is a simulated one.
    pub(crate) fn is_on() -> bool {
        SIMULATED.get().is_some()
    }
}

#[cfg(feature = "conformance")]
impl Drop for SimulatedTime {
    fn drop(&mut self) {
        SIMULATED.set(None);
    }
}
