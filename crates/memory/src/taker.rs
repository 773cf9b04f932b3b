//! On whose behalf the calling thread takes what there is little of.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

/// The number of who is worked for; 0 is nobody's.
#[inline]
pub fn current() -> u32 {
    CURRENT.get()
}

/// The calling thread works for this one from now on. Whom it worked for before.
#[inline]
pub fn enter(number: u32) -> u32 {
    CURRENT.replace(number)
}
