//! How many guests run at once, whatever the number of test threads.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

static TAKEN: Mutex<usize> = Mutex::new(0);
static LEFT: Condvar = Condvar::new();

/// Room for guests, given back when dropped.
#[derive(Debug)]
pub struct Seats(usize);

/// Waits for room for `guests` guests at once: there are as many seats as processors, and two on a smaller machine. Take
/// what a test needs in one go, before its first guest.
pub fn seats(guests: usize) -> Seats {
    let all = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    assert!(guests <= all, "{guests} guests at once, and {all} seats");
    let mut taken = LEFT.wait_while(lock(), |taken| *taken + guests > all).unwrap_or_else(PoisonError::into_inner);
    *taken += guests;
    Seats(guests)
}

fn lock() -> MutexGuard<'static, usize> {
    // A test that failed with the lock held has left the number as it was.
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Seats {
    fn drop(&mut self) {
        *lock() -= self.0;
        LEFT.notify_all();
    }
}
