//! Waiting for what comes about by itself.

use std::time::{Duration, Instant};

/// The longest wait before a hang is called one: far longer than anything takes on a busy machine under emulation.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Waits until `reached` gives something.
///
/// # Panics
/// After [`PATIENCE`], with `what`.
pub fn eventually<T>(what: &str, reached: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, reached).unwrap_or_else(|| panic!("waited {PATIENCE:?} in vain for: {what}"))
}

/// As [`eventually`], with another limit; `None` after it.
pub fn within<T>(limit: Duration, mut reached: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = reached() {
            return Some(value);
        }
        if start.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
