//! The NVM command set (NVM Command Set specification 3).

use millrace_engine::{ShardContext, TaskSlot};
use millrace_nvme_spec::{command::Sqe, status::Status};

use super::{
    Config,
    controller::{CommandToken, Controller, Outcome},
    status::Completion,
};

/// What the I/O commands remember beside the state region.
pub(crate) struct IoState {}

impl IoState {
    pub(crate) fn new(_config: &Config) -> Self {
        Self {}
    }
}

/// Ranges of a volume that Write Uncorrectable marked (NVM 3.3.7). One look when there are none.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableRanges {}

impl Controller {
    /// Starts an I/O command. `slot` is the task it may wait in.
    pub(crate) fn io_command(
        &mut self,
        _cx: &mut ShardContext<'_>,
        _slot: TaskSlot<'_>,
        _token: CommandToken,
        _sqe: &Sqe,
    ) -> Outcome {
        Outcome::Done(Completion::error(Status::INVALID_OPCODE))
    }

    /// The controller is being reset: I/O commands that are held (the first of a fused pair) are forgotten. Returns their
    /// number.
    pub(crate) fn io_reset(&mut self) -> u32 {
        0
    }

    /// I/O commands held until the guest sends another one (the first of a fused pair): nothing waits for these, an unmap for
    /// instance, so they must not keep a segment.
    pub(crate) fn io_parked(&self) -> u32 {
        0
    }
}
