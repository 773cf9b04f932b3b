//! A command, as the functions see it.

/// NVM Express I/O opcodes that reach the functions (NVM Command Set 3).
pub mod opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
}

/// A command of a guest. Its opcode is one of [`opcode`]; everything else is as the guest wrote it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// First block, of the namespace.
    pub slba: u64,
    /// Namespace identifier.
    pub nsid: u32,
    /// The time at which it is asked, in units of 64 cycles. It wraps.
    pub now: u32,
    /// Blocks, 0's based.
    pub nlb_z: u16,
    /// Opcode.
    pub opcode: u8,
    /// The core's number of the guest's function.
    pub function: u8,
    /// The queue pair within the function, from 0.
    pub queue: u8,
}

impl Command {
    /// Moves no data and names no blocks.
    #[inline]
    pub fn is_flush(&self) -> bool {
        self.opcode == opcode::FLUSH
    }

    /// Leaves the disk as it is.
    #[inline]
    pub fn only_reads(&self) -> bool {
        (self.opcode == opcode::READ) | (self.opcode == opcode::COMPARE)
    }

    /// Changes blocks.
    #[inline]
    pub fn changes(&self) -> bool {
        !self.only_reads() & !self.is_flush()
    }

    /// Moves its blocks between guest and disk.
    #[inline]
    pub fn moves_data(&self) -> bool {
        self.only_reads() | (self.opcode == opcode::WRITE)
    }
}
