//! How much of a volume a long request works on at a time.

use std::time::Duration;

/// Bytes of a volume that a long request works on without a break, at first.
pub(crate) const PIECE: u64 = 1 << 20;
/// And where the volume shows that it is quick at it.
pub(crate) const LARGEST_PIECE: u64 = 1 << 30;
/// A piece that takes less is followed by one of twice its size, one that takes more than four times that by one of half.
const QUICK: Duration = Duration::from_millis(5);

/// How large the next piece is: some volumes erase a gigabyte as easily as a block, others write zeroes.
pub(crate) struct Pace {
    pub(crate) bytes: u64,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { bytes: PIECE }
    }

    /// A piece of the present size took so long.
    pub(crate) fn adjust(&mut self, took: Duration) {
        if took < QUICK {
            self.bytes = (self.bytes * 2).min(LARGEST_PIECE);
        } else if took > QUICK * 4 {
            self.bytes = (self.bytes / 2).max(PIECE);
        }
    }
}
