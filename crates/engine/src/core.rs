//! What a shard's devices and tasks share.
#![forbid(unsafe_code)]

use std::{cell::Cell, time::Instant};

use millrace_memory::BufferPool;

use crate::{mailbox::ShardHandle, poller::Poller, remote::Remotes, ring::Ring, slots::Slots, stats::Counters};

/// Lies in an `Rc` for as long as the shard or a task lives, and never moves.
pub(crate) struct Core {
    // Field order is drop order: tasks go before the ring and the buffers they use. `slots` relies on it.
    pub(crate) slots: Slots,
    pub(crate) ring: Ring,
    pub(crate) buffers: BufferPool,
    pub(crate) poller: Poller,
    pub(crate) remotes: Remotes,
    pub(crate) handle: ShardHandle,
    pub(crate) counters: Counters,
    /// When the present turn began.
    pub(crate) now: Cell<Instant>,
    /// Slots that are kept for devices with fewer waiting tasks than [`Self::task_share`].
    pub(crate) tasks_spare: Cell<usize>,
    /// Tasks of one device that may wait whatever the others have. All shares together are what is spare.
    pub(crate) task_share: Cell<usize>,
    /// The last submission failed, and that has been logged.
    pub(crate) ring_failing: Cell<bool>,
}

impl Core {
    /// Whether a task, or a timer, may wait for a time to come: it is seen when the clock is looked at.
    #[inline]
    pub(crate) fn awaits_time(&self) -> bool {
        !self.ring.is_idle() || self.slots.waiting() > 0
    }
}
