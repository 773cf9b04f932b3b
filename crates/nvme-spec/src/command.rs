//! Submission and completion queue entries (Base 4.1, 4.2) and the identifiers in them.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::opcode::{AdminOpcode, NvmOpcode};
use crate::sgl::SglDescriptor;
use crate::status::{Status, StatusField};

wire_id! {
    /// Command Identifier (CID), unique among the commands outstanding on one submission queue (Base 4.1.1).
    CommandId(u16)
}

wire_id! {
    /// Queue Identifier (QID); submission and completion queues are numbered separately (Base 3.3.1).
    QueueId(u16)
}

wire_id! {
    /// Namespace Identifier (NSID; Base 3.2.1.2).
    NamespaceId(u32)
}

wire_id! {
    /// Controller Identifier (CNTLID), unique in the NVM subsystem (Base 3.1.1).
    ControllerId(u16)
}

impl CommandId {
    /// FFFFh: hosts should not use it, and the Error Information log page uses it for "no command" (Base 5.1.12.1.2).
    pub const NONE: Self = Self(0xffff);
}

impl QueueId {
    /// The Admin Submission and Completion Queue (Base 3.3.1).
    pub const ADMIN: Self = Self(0);

    /// Whether this is the admin queue.
    #[must_use]
    pub const fn is_admin(self) -> bool {
        self.0 == 0
    }
}

impl NamespaceId {
    /// 0h: the command does not use the NSID field (Base 3.2.1.2).
    pub const NONE: Self = Self(0);
    /// FFFFFFFFh: the broadcast value, all namespaces (Base 3.2.1.2).
    pub const BROADCAST: Self = Self(u32::MAX);
    /// FFFFFFFEh: the largest NSID a namespace may have (Base 3.2.1.2).
    pub const MAX: Self = Self(u32::MAX - 1);

    /// Whether this may name one namespace: neither 0h nor the broadcast value.
    #[must_use]
    pub const fn is_single(self) -> bool {
        self.0 != 0 && self.0 != u32::MAX
    }
}

wire_values! {
    /// Fused Operation (FUSE), two bits of Command Dword 0 (Base 4.1.1).
    Fuse(u8) {
        NORMAL = 0, "Normal operation";
        FIRST = 1, "Fused operation, first command";
        SECOND = 2, "Fused operation, second command";
    }
}

wire_values! {
    /// PRP or SGL for Data Transfer (PSDT), two bits of Command Dword 0 (Base 4.1.1).
    Psdt(u8) {
        PRP = 0, "PRPs are used for this transfer";
        SGL_MPTR_CONTIGUOUS = 1, "SGLs are used, MPTR is the address of one contiguous buffer";
        SGL_MPTR_SGL = 2, "SGLs are used, MPTR is the address of an SGL segment";
    }
}

wire_values! {
    /// Command Set Identifier (CSI; Base 3.1.3.4).
    Csi(u8) {
        NVM = 0x00, "NVM Command Set";
        KEY_VALUE = 0x01, "Key Value Command Set";
        ZONED = 0x02, "Zoned Namespace Command Set";
        SUBSYSTEM_LOCAL_MEMORY = 0x03, "Subsystem Local Memory Command Set";
        COMPUTATIONAL_PROGRAMS = 0x04, "Computational Programs Command Set";
    }
}

/// Byte 1 of Command Dword 0 (Base 4.1.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CommandFlags {
    /// Fused Operation (FUSE).
    #[bits(2)]
    pub fuse: Fuse,
    /// Reserved.
    #[bits(4)]
    pub reserved: u8,
    /// PRP or SGL for Data Transfer (PSDT).
    #[bits(2)]
    pub psdt: Psdt,
}

/// Data Pointer (DPTR): two PRP entries or one SGL descriptor (Base 4.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DataPointer {
    /// Bytes 7:0: PRP Entry 1, or the address of the SGL descriptor.
    pub prp1: u64,
    /// Bytes 15:8: PRP Entry 2, or the length and type of the SGL descriptor.
    pub prp2: u64,
}

impl DataPointer {
    /// A pointer of two PRP entries.
    #[must_use]
    pub const fn prps(prp1: u64, prp2: u64) -> Self {
        Self { prp1, prp2 }
    }

    /// The same 16 bytes as SGL Entry 1 (SGL1).
    #[must_use]
    pub fn sgl1(self) -> SglDescriptor {
        zerocopy::transmute!(self)
    }
}

impl From<SglDescriptor> for DataPointer {
    fn from(sgl1: SglDescriptor) -> Self {
        zerocopy::transmute!(sgl1)
    }
}

/// Submission Queue Entry (Base 4.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Sqe {
    /// Opcode (OPC); which table it is from depends on the queue.
    pub opcode: u8,
    /// Fused operation and data transfer kind.
    pub flags: CommandFlags,
    /// Command Identifier (CID).
    pub cid: CommandId,
    /// Namespace Identifier (NSID).
    pub nsid: NamespaceId,
    /// Command Dword 2.
    pub cdw2: u32,
    /// Command Dword 3.
    pub cdw3: u32,
    /// Metadata Pointer (MPTR).
    pub mptr: u64,
    /// Data Pointer (DPTR).
    pub dptr: DataPointer,
    /// Command Dword 10.
    pub cdw10: u32,
    /// Command Dword 11.
    pub cdw11: u32,
    /// Command Dword 12.
    pub cdw12: u32,
    /// Command Dword 13.
    pub cdw13: u32,
    /// Command Dword 14.
    pub cdw14: u32,
    /// Command Dword 15.
    pub cdw15: u32,
}

impl Sqe {
    /// Bytes of an entry of the NVM command set and of the admin queue.
    pub const SIZE: usize = 64;
    /// Its power of two, as CC.IOSQES and SQES report it.
    pub const SIZE_LOG2: u8 = 6;

    /// The opcode as one of the admin queue.
    #[must_use]
    pub const fn admin_opcode(&self) -> AdminOpcode {
        AdminOpcode(self.opcode)
    }

    /// The opcode as one of the NVM command set.
    #[must_use]
    pub const fn nvm_opcode(&self) -> NvmOpcode {
        NvmOpcode(self.opcode)
    }

    /// Command Dwords 10 (low) and 11 (high) as one number: the starting LBA of most I/O commands (NVM 3.3).
    #[must_use]
    pub const fn cdw10_11(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }

    /// Sets Command Dwords 10 (low) and 11 (high).
    pub fn set_cdw10_11(&mut self, value: u64) {
        self.cdw10 = value as u32;
        self.cdw11 = (value >> 32) as u32;
    }
}

/// Completion Queue Entry (Base 4.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Cqe {
    /// Dword 0, command specific.
    pub dw0: u32,
    /// Dword 1, command specific.
    pub dw1: u32,
    /// Submission Queue Head Pointer (SQHD) at the time the entry was made.
    pub sqhd: u16,
    /// Submission Queue Identifier (SQID).
    pub sqid: QueueId,
    /// Command Identifier (CID) of the command that is completed.
    pub cid: CommandId,
    /// Status and Phase Tag.
    pub status: StatusField,
}

impl Cqe {
    /// Bytes of an entry.
    pub const SIZE: usize = 16;
    /// Its power of two, as CC.IOCQES and CQES report it.
    pub const SIZE_LOG2: u8 = 4;

    /// The Phase Tag (P): inverted by the controller on every pass through the queue (Base 4.2.4).
    #[must_use]
    pub const fn phase(&self) -> bool {
        self.status.phase()
    }

    /// The status without the Phase Tag.
    #[must_use]
    pub const fn status(&self) -> Status {
        self.status.status()
    }
}

assert_size!(CommandFlags: 1, DataPointer: 16, Sqe: 64, Cqe: 16);
