//! What is remembered of a guest's function between its commands: 128 bits.
//!
//! ```text
//!   word   63        48 47  44 43                         0
//!   a     │   failed   │  0   │  iops: when the bucket is full again
//!   b     │    turn    │  0   │  bytes: when the bucket is full again
//! ```
//!
//! All zeroes is the state of a function that nobody used yet.

use crate::throttle::TIME_MASK;

/// See the module.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// First word.
    pub a: u64,
    /// Second word.
    pub b: u64,
}

impl State {
    /// The state with these parts.
    #[inline]
    pub fn new(iops: u64, bytes: u64, failed: u16, turn: u16) -> Self {
        Self { a: (u64::from(failed) << 48) | (iops & TIME_MASK), b: (u64::from(turn) << 48) | (bytes & TIME_MASK) }
    }

    /// When the bucket of commands is full again.
    #[inline]
    pub fn iops(&self) -> u64 {
        self.a & TIME_MASK
    }

    /// When the bucket of blocks is full again.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.b & TIME_MASK
    }

    /// Disks that are not used any more.
    #[inline]
    pub fn failed(&self) -> u16 {
        (self.a >> 48) as u16
    }

    /// The disk that was read last, a bit; 0: none yet.
    #[inline]
    pub fn turn(&self) -> u16 {
        (self.b >> 48) as u16
    }
}
