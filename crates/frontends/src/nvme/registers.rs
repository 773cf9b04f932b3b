//! Controller registers (Base 3.1.4) and the way between disabled and ready (Base 3.5, 3.6).

use millrace_engine::ShardContext;

use super::controller::Controller;

/// Where the controller stands. Derived from CC and CSTS in the state region, and from whether commands are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// CC.EN is 0 and nothing is in flight.
    Disabled,
    /// Commands are taken.
    Ready,
    /// CC.EN went to 0, or a reset came: CSTS.RDY stays 1 until the commands in flight have finished with guest memory.
    Resetting,
    /// A shutdown was asked for: no commands are taken; CSTS.SHST says complete once volumes are flushed.
    ShuttingDown,
    /// CSTS.CFS is set: nothing but a reset helps.
    Failed,
}

impl Controller {
    /// Power-on values of registers, features and configuration space.
    pub(crate) fn power_on(&mut self) {}

    /// Reads a register of BAR0 below the doorbells.
    pub(crate) fn register_read(&self, _offset: u64, _out: &mut [u8]) {}

    /// Writes a register of BAR0 below the doorbells; widths and offsets that the specification does not allow are ignored.
    pub(crate) fn register_write(&mut self, _offset: u64, _data: &[u8]) {}

    /// A doorbell write that came as a message.
    pub(crate) fn doorbell_write(&mut self, _index: usize, _value: u32) {}

    /// Goes on with a reset, enable or shutdown that waits. Returns work done.
    pub(crate) fn advance_phase(&mut self, _cx: &mut ShardContext<'_>) -> usize {
        0
    }

    /// Nothing is in flight any more: whatever waits for that may go on (reset, unmap, reclaim).
    pub(crate) fn drained(&mut self, _cx: &mut ShardContext<'_>) {}

    /// Whether CSTS.CFS is set.
    pub(crate) fn has_failed(&self) -> bool {
        self.phase == Phase::Failed
    }

    /// Sets CSTS.CFS: the guest must reset the controller. Logged once per reset with the reason.
    pub(crate) fn fail(&mut self, _reason: &'static str) {
        self.phase = Phase::Failed;
    }
}
