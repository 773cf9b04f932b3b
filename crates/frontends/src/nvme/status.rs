//! The one place where an internal error becomes an NVMe status.

use millrace_block::BlockError;
use millrace_memory::AccessError;
use millrace_nvme_spec::status::Status;

/// What a command ends with: the CQE's dword 0 and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Command specific result.
    pub(crate) dw0: u32,
    /// Successful, or what went wrong.
    pub(crate) status: Status,
}

impl Completion {
    /// Success, without a result.
    pub(crate) const SUCCESS: Self = Self { dw0: 0, status: Status::SUCCESS };

    /// Success with a result.
    pub(crate) const fn with_result(dw0: u32) -> Self {
        Self { dw0, status: Status::SUCCESS }
    }

    /// An error that repeating will not mend.
    pub(crate) const fn error(status: Status) -> Self {
        Self { dw0: 0, status: status.do_not_retry() }
    }
}

impl From<Result<(), Status>> for Completion {
    fn from(result: Result<(), Status>) -> Self {
        match result {
            Ok(()) => Self::SUCCESS,
            Err(status) => Self { dw0: 0, status },
        }
    }
}

/// The status for a failed request.
pub(crate) fn of_block_error(error: BlockError) -> Status {
    match error {
        BlockError::OutOfRange => Status::LBA_OUT_OF_RANGE.do_not_retry(),
        BlockError::ReadOnly => Status::WRITE_TO_READ_ONLY_RANGE.do_not_retry(),
        BlockError::ReadFault { .. } => Status::UNRECOVERED_READ_ERROR.do_not_retry(),
        BlockError::WriteFault { .. } => Status::WRITE_FAULT.do_not_retry(),
        BlockError::NoSpace => Status::CAPACITY_EXCEEDED.do_not_retry(),
        BlockError::Miscompare => Status::COMPARE_FAILURE.do_not_retry(),
        BlockError::Memory => Status::DATA_TRANSFER_ERROR.do_not_retry(),
        BlockError::Unsupported => Status::INVALID_OPCODE.do_not_retry(),
        // The one case in which the guest should try again: the volume comes back, or its detach is announced.
        BlockError::NotReady => Status::NAMESPACE_NOT_READY,
        // Where its queue goes on, `Controller::complete` tells its guest to try again.
        BlockError::CalledOff => Status::ABORTED_SQ_DELETION,
    }
}

/// The status for data or lists that cannot be reached in guest memory.
pub(crate) fn of_access_error(_: AccessError) -> Status {
    Status::DATA_TRANSFER_ERROR.do_not_retry()
}
