//! What the Error Information log tells of a command that failed (Base 5.1.12.1.2): the namespace, the first block, and the
//! parameter that was wrong.
//!
//! Who refuses a command for the sake of one parameter says so by [`Controller::refuse`]; where the status alone tells which
//! it was, the table here knows.

use millrace_nvme_spec::{
    command::{CommandId, Csi, NamespaceId, QueueId, Sqe},
    log::{ErrorEntry, ParameterErrorLocation as Location},
    opcode::{AdminOpcode, NvmOpcode},
    status::{Status, StatusField},
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{
    controller::{CommandToken, Controller},
    state::{self, ERROR_ENTRIES},
};

/// Parameters of commands that have no better name than their place: [`Location::dword`].
pub(crate) mod parameter {
    use super::Location;

    pub(crate) const OPCODE: Location = Location::dword(0, 0);
    pub(crate) const FUSE: Location = Location::dword(0, 8);
    pub(crate) const PSDT: Location = Location::dword(0, 14);
    pub(crate) const CID: Location = Location::dword(0, 16);
    pub(crate) const NSID: Location = Location::dword(1, 0);
    pub(crate) const DPTR: Location = Location::dword(6, 0);
    /// Number of Logical Blocks, and Number of Ranges of a Copy.
    pub(crate) const NLB: Location = Location::dword(12, 0);
}

/// What is remembered of a command for the case that it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    nsid: u32,
    opcode: u8,
    /// Starting LBA, or whatever else Command Dwords 10 and 11 say.
    cdw10_11: u64,
}

impl Subject {
    #[inline]
    pub(crate) fn of(sqe: &Sqe) -> Self {
        Self { nsid: sqe.nsid.0, opcode: sqe.opcode, cdw10_11: sqe.cdw10_11() }
    }

    /// Of a read or write.
    #[inline]
    pub(crate) fn of_transfer(nsid: u32, opcode: NvmOpcode, lba: u64) -> Self {
        Self { nsid, opcode: opcode.0, cdw10_11: lba }
    }

    /// Of a command that names neither a namespace nor blocks.
    pub(crate) fn of_opcode(opcode: AdminOpcode) -> Self {
        Self { nsid: 0, opcode: opcode.0, cdw10_11: 0 }
    }

    /// Whether Command Dwords 10 and 11 of this I/O command are the first block of its range.
    fn has_range(self) -> bool {
        matches!(
            NvmOpcode(self.opcode),
            NvmOpcode::READ
                | NvmOpcode::WRITE
                | NvmOpcode::COMPARE
                | NvmOpcode::WRITE_ZEROES
                | NvmOpcode::WRITE_UNCORRECTABLE
                | NvmOpcode::VERIFY
        )
    }
}

impl Controller {
    /// Refuses the command that is being started because of one of its parameters.
    #[cold]
    pub(crate) fn refuse(&self, parameter: Location, status: Status) -> Status {
        self.admin.refused.set(parameter);
        status
    }

    /// Refuses it because of the field whose lowest bit is `bit` of Command Dword `dword`.
    #[cold]
    pub(crate) fn invalid(&self, dword: u8, bit: u8) -> Status {
        self.refuse(Location::dword(dword, bit), Status::INVALID_FIELD)
    }

    /// Remembers a failed command for the Error Information log.
    #[cold]
    pub(crate) fn note_error(&self, token: CommandToken, status: Status) {
        let subject = token.subject;
        let is_admin = QueueId(token.sqid).is_admin();
        let mut entry = ErrorEntry::new_zeroed();
        entry.sqid = QueueId(token.sqid);
        entry.cid = CommandId(token.cid);
        entry.status = StatusField::new(status, false);
        entry.nsid = NamespaceId(subject.nsid);
        if !is_admin && subject.has_range() {
            entry.lba = subject.cdw10_11;
        }
        entry.csi = Csi::NVM;
        entry.opc = subject.opcode;
        entry.lpver = 1;
        let refused = self.admin.refused.replace(Location::NONE);
        entry.pel = if refused == Location::NONE { of_status(is_admin, subject, status) } else { refused };
        self.log_error(entry);
    }

    /// A doorbell was written that should not have been.
    pub(super) fn log_doorbell_error(&self, qid: u16) {
        let mut entry = ErrorEntry::new_zeroed();
        entry.sqid = QueueId(qid);
        entry.cid = CommandId::NONE;
        entry.pel = Location::NONE;
        self.log_error(entry);
    }

    fn log_error(&self, mut entry: ErrorEntry) {
        let logs = &self.state.logs;
        let number = logs.error_count.get();
        entry.ecnt = number + 1;
        let words = <[u64; 8]>::read_from_bytes(entry.as_bytes()).expect("an entry is eight words");
        for (cell, word) in logs.errors[(number % ERROR_ENTRIES as u64) as usize].iter().zip(words) {
            cell.set(word);
        }
        state::commit();
        logs.error_count.set(number + 1);
    }
}

/// The parameter that a status speaks of, where it speaks of one.
fn of_status(is_admin: bool, subject: Subject, status: Status) -> Location {
    match status.code() {
        Status::INVALID_OPCODE => parameter::OPCODE,
        Status::CID_CONFLICT => parameter::CID,
        Status::ABORTED_MISSING_FUSED => parameter::FUSE,
        Status::INVALID_NAMESPACE_OR_FORMAT
        | Status::NAMESPACE_ALREADY_ATTACHED
        | Status::NAMESPACE_NOT_ATTACHED
        | Status::NAMESPACE_WRITE_PROTECTED
        | Status::FEATURE_NOT_NAMESPACE_SPECIFIC => parameter::NSID,
        Status::DATA_TRANSFER_ERROR
        | Status::PRP_OFFSET_INVALID
        | Status::INVALID_SGL_SEGMENT_DESCRIPTOR
        | Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS
        | Status::DATA_SGL_LENGTH_INVALID
        | Status::SGL_DESCRIPTOR_TYPE_INVALID => parameter::DPTR,
        Status::LBA_OUT_OF_RANGE if !is_admin && subject.has_range() => Location::dword(10, 0),
        // The queue's, the log page's, the feature's identifier, and the index of the format.
        Status::INVALID_QUEUE_IDENTIFIER
        | Status::INVALID_QUEUE_DELETION
        | Status::INVALID_LOG_PAGE
        | Status::FEATURE_NOT_CHANGEABLE
            if is_admin =>
        {
            Location::dword(10, 0)
        }
        Status::INVALID_FORMAT if is_admin && AdminOpcode(subject.opcode) == AdminOpcode::FORMAT_NVM => {
            Location::dword(10, 0)
        }
        Status::INVALID_QUEUE_SIZE => Location::dword(10, 16),
        Status::COMPLETION_QUEUE_INVALID | Status::INVALID_INTERRUPT_VECTOR if is_admin => Location::dword(11, 16),
        Status::FEATURE_NOT_SAVEABLE => Location::dword(10, 31),
        _ => Location::NONE,
    }
}
