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

/// How many of so many things are kept for those devices that have few, and how many each of them may have of those. One device may have all.
/// Several leave a quarter, in which each has a share of its own that no others can take, however long they keep what they have; as long as
/// there are no more devices than such things.
pub fn shares(of: usize, devices: usize) -> (usize, usize) {
    let spare = if devices > 1 { of / 4 } else { 0 };
    // What is no device's has one as well. Nobody's share is nothing: who has none must be able to get one.
    (spare, (spare / (devices + 1)).max(1))
}
