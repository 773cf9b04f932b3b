//! One thing to be done on a volume.

use millrace_memory::Segment;

use crate::{BlockCount, Geometry, Lba};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read blocks into the segments.
    Read,
    /// Write blocks from the segments.
    Write {
        /// Durable when completed (force unit access).
        fua: bool,
    },
    /// Make every write completed before this request durable. The range is ignored.
    Flush,
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Durable when completed.
        fua: bool,
        /// The space may be given back.
        deallocate: bool,
    },
    /// Give the range's space back. It reads as zeroes afterwards where the geometry says `deallocate`.
    Deallocate,
    /// Compare blocks with the segments' data; [`BlockError::Miscompare`](crate::BlockError::Miscompare) when they differ.
    Compare,
    /// Copy blocks from `source` on to the range, within one volume. Source and target do not overlap.
    Copy {
        /// First block to copy from.
        source: Lba,
    },
}

/// What nearly all requests of guests do: a read or a write. It is a byte, and stays in a register on its way: an [`Operation`] would be copied as a
/// whole from where its tag was stored an instant ago, and a processor holds up a load that is wider than the store it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// As [`Operation::Read`].
    Read,
    /// As [`Operation::Write`].
    Write {
        /// Durable when completed.
        fua: bool,
    },
}

impl Transfer {
    /// Whether it changes the volume's data.
    #[inline]
    pub fn is_write(self) -> bool {
        self != Self::Read
    }
}

impl From<Transfer> for Operation {
    #[inline]
    fn from(transfer: Transfer) -> Self {
        match transfer {
            Transfer::Read => Self::Read,
            Transfer::Write { fua } => Self::Write { fua },
        }
    }
}

/// A request: its operation, its range and the memory it moves.
///
/// It is not `Copy`: who passes a request on as it came passes on the place where it lies, and does not copy what was stored there an instant
/// ago, in narrower pieces than it would be loaded.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// What to do.
    pub operation: Operation,
    /// First block.
    pub lba: Lba,
    /// Number of blocks.
    pub count: BlockCount,
    /// Memory, in order. Its length is the range's in bytes for read, write and compare, and 0 for the others. Segments
    /// need not be aligned to anything.
    pub segments: &'a [Segment],
}

impl Operation {
    /// Whether the request changes the volume's data.
    #[inline]
    pub fn is_write(self) -> bool {
        match self {
            Self::Write { .. } | Self::WriteZeroes { .. } | Self::Deallocate | Self::Copy { .. } => true,
            Self::Read | Self::Flush | Self::Compare => false,
        }
    }

    /// Whether the request moves data through its segments.
    #[inline]
    pub fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. } | Self::Compare)
    }
}

impl Request<'_> {
    /// Checks the caller's side of the contract: the segments' length against the range.
    ///
    /// # Panics
    /// When they differ: a front end made the segments from the range, so a difference is a bug of ours.
    #[inline]
    pub fn assert_lengths(&self, geometry: &Geometry) {
        let expected = if self.operation.has_data() { self.count.0 << geometry.block_size.shift() } else { 0 };
        assert_eq!(millrace_memory::total_len(self.segments) as u64, expected, "segments match the range of {self:?}");
    }
}
