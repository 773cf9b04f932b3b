//! The two kinds of queue that the lean client drives: of an NVMe controller, or of a virtio disk.

use std::{path::Path, time::Duration};

use millrace_block::Lba;
use millrace_driver::{LeanQueue, SECTOR, VirtioOptions, VirtioQueue};

use super::{BenchArgs, BenchError, Rw};

/// Longest wait for a back end to answer while it is set up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A queue whose commands are all made.
#[expect(clippy::large_enum_variant, reason = "there is one for each client")]
pub(super) enum Ring {
    Nvme(LeanQueue),
    Virtio(VirtioQueue),
}

impl Ring {
    #[inline]
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Nvme(queue) => queue.depth(),
            Self::Virtio(queue) => queue.depth(),
        }
    }

    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Nvme(queue) => queue.in_flight(),
            Self::Virtio(queue) => queue.in_flight(),
        }
    }

    /// Begins a command at this block of the namespace, or at this sector of the disk.
    #[inline]
    pub(super) fn begin(&mut self, id: u16, block: u64) {
        match self {
            Self::Nvme(queue) => queue.begin(id, Lba(block)),
            Self::Virtio(queue) => queue.begin(id, block),
        }
    }

    #[inline]
    pub(super) fn ring(&mut self) -> Result<(), BenchError> {
        match self {
            Self::Nvme(queue) => Ok(queue.ring()?),
            Self::Virtio(queue) => Ok(queue.ring()?),
        }
    }

    #[inline]
    pub(super) fn take(&mut self, at_least: usize, taken: &mut Vec<u16>) -> Result<(), BenchError> {
        match self {
            Self::Nvme(queue) => Ok(queue.take(at_least, taken)?),
            Self::Virtio(queue) => Ok(queue.take(at_least, taken)?),
        }
    }

    /// Sleeps until the next interrupt; how many there were. Virtio queues have none.
    pub(super) fn wait_interrupt(&self, timeout: Duration) -> Result<u64, BenchError> {
        match self {
            Self::Nvme(queue) => Ok(queue.queue().wait_interrupt(timeout)?),
            Self::Virtio(_) => Ok(0),
        }
    }

    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self {
            Self::Nvme(queue) => Ok(queue.queue().check()?),
            Self::Virtio(queue) => Ok(queue.check()?),
        }
    }
}

/// A virtio disk's queue, and the units of `--bs` that it has.
pub(super) fn connect_virtio(args: &BenchArgs, socket: &Path) -> Result<(VirtioQueue, u64), BenchError> {
    let options = VirtioOptions {
        depth: args.qd,
        bytes: usize::try_from(args.bs).unwrap_or(usize::MAX),
        write: matches!(args.rw, Rw::Randwrite | Rw::Write),
        packed: args.lean.packed,
        pages: args.pages.into(),
        timeout: PATIENCE,
    };
    // More in one piece than this is for tests of limits, not for measuring.
    let limit = 16 << 20;
    if !args.bs.is_multiple_of(SECTOR) || args.bs > limit {
        return Err(BenchError::BlockSize { bs: args.bs, block_size: SECTOR as u32, limit });
    }
    let queue = VirtioQueue::connect(socket, &options)?;
    let units = queue.capacity().saturating_mul(SECTOR).min(args.range.unwrap_or(u64::MAX)) / args.bs;
    if units == 0 {
        return Err(BenchError::RangeTooSmall { units, bs: args.bs, queues: 1, qd: args.qd });
    }
    Ok((queue, units))
}
