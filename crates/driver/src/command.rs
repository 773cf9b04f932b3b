//! One command before it has an identifier and a place in a queue.

use millrace_nvme_spec::{AdminOpcode, NvmOpcode, Sqe};
use zerocopy::FromZeros;

use crate::dma::DmaRange;

/// A submission queue entry and the data it moves. The queue pair fills in the command identifier and the data pointer.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The entry; change it for fields that have no constructor.
    pub sqe: Sqe,
    /// The data to describe by PRPs; `None` leaves the entry's data pointer as it is.
    pub data: Option<DmaRange>,
}

impl Command {
    /// An admin command without data, all other fields zero.
    pub fn admin(opcode: AdminOpcode) -> Self {
        Self { sqe: Sqe { opcode: opcode.0, ..Sqe::new_zeroed() }, data: None }
    }

    /// A command of the NVM command set without data, all other fields zero.
    #[inline]
    pub fn nvm(opcode: NvmOpcode) -> Self {
        Self { sqe: Sqe { opcode: opcode.0, ..Sqe::new_zeroed() }, data: None }
    }

    /// The same command with data.
    #[inline]
    pub fn with_data(mut self, data: DmaRange) -> Self {
        self.data = Some(data);
        self
    }
}

impl From<Sqe> for Command {
    fn from(sqe: Sqe) -> Self {
        Self { sqe, data: None }
    }
}
