//! Command dwords and data of admin commands that few controllers have: Directive Receive and Send (Base 5.1.6, 5.1.7), Lockdown (Base 5.1.15),
//! Virtualization Management (Base 5.2.6) and Get LBA Status (NVM 4.2.1).

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::ControllerId;

wire_values! {
    /// Directive Type (DTYPE).
    DirectiveType(u8) {
        IDENTIFY = 0, "Identify";
        STREAMS = 1, "Streams";
        DATA_PLACEMENT = 2, "Data Placement";
    }
}

wire_values! {
    /// Directive Operation (DOPER) of Directive Receive. Each type has its own.
    DirectiveQuery(u8) {
        PARAMETERS = 1, "Return Parameters";
        STREAMS_STATUS = 2, "Streams: Get Status";
        STREAMS_ALLOCATE = 3, "Streams: Allocate Resources";
    }
}

wire_values! {
    /// Directive Operation (DOPER) of Directive Send to the Identify directive.
    DirectiveOrder(u8) {
        ENABLE = 1, "Enable Directive";
    }
}

wire_values! {
    /// Directive Operation (DOPER) of Directive Send to the Streams directive.
    StreamOrder(u8) {
        RELEASE_IDENTIFIER = 1, "Release Identifier";
        RELEASE_RESOURCES = 2, "Release Resources";
    }
}

/// Directive Receive and Send, Command Dword 11. Command Dword 10 is the number of dwords that are moved, 0's based.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DirectiveCdw11 {
    /// Directive Operation (DOPER).
    pub doper: u8,
    /// Directive Type (DTYPE).
    #[bits(8)]
    pub dtype: DirectiveType,
    /// Directive Specific (DSPEC).
    pub dspec: u16,
}

/// Enable Directive, Command Dword 12.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct EnableDirectiveCdw12 {
    /// Enable Directive (ENDIR).
    pub endir: bool,
    #[bits(7)]
    __: u8,
    /// The directive that is enabled or disabled (DTYPE).
    #[bits(8)]
    pub dtype: DirectiveType,
    __: u16,
}

/// What the Identify directive returns: a bit for each type.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DirectiveParameters {
    /// Directives Supported.
    pub supported: [u8; 32],
    /// Directives Enabled.
    pub enabled: [u8; 32],
    /// Directive Persistent Across Controller Level Resets.
    pub persistent: [u8; 32],
    _rsvd96: [u8; 4000],
}

/// What the Streams directive returns as its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StreamParameters {
    /// Max Streams Limit (MSL), of the NVM subsystem.
    pub msl: u16,
    /// NVM Subsystem Streams Available (NSSA).
    pub nssa: u16,
    /// NVM Subsystem Streams Open (NSSO).
    pub nsso: u16,
    /// NVM Subsystem Stream Capability (NSSC).
    pub nssc: u8,
    _rsvd7: [u8; 9],
    /// Stream Write Size (SWS) in logical blocks.
    pub sws: u32,
    /// Stream Granularity Size (SGS) in units of that.
    pub sgs: u16,
    /// Namespace Streams Allocated (NSA).
    pub nsa: u16,
    /// Namespace Streams Open (NSO).
    pub nso: u16,
    _rsvd26: [u8; 6],
}

/// Lockdown, Command Dword 10.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct LockdownCdw10 {
    /// Scope (SCP).
    #[bits(4)]
    pub scp: LockdownScope,
    /// Prohibit (PRHBT); else it is allowed again.
    pub prhbt: bool,
    /// Interface (IFC).
    #[bits(2)]
    pub ifc: LockdownInterface,
    #[bits(1)]
    __: u8,
    /// Opcode or Feature Identifier (OFI).
    pub ofi: u8,
    __: u16,
}

wire_values! {
    /// What Lockdown's Opcode or Feature Identifier is (SCP).
    LockdownScope(u8) {
        ADMIN_OPCODE = 0, "Admin command set opcode";
        FEATURE = 2, "Set Features' feature identifier";
        MI_OPCODE = 3, "Management Interface command set opcode";
        PCIE_OPCODE = 4, "PCIe command set opcode";
    }
}

wire_values! {
    /// Where what Lockdown names is prohibited (IFC).
    LockdownInterface(u8) {
        ADMIN = 0, "Admin Submission Queue";
        BOTH = 1, "Admin Submission Queue and out-of-band on a Management Endpoint";
        OUT_OF_BAND = 2, "Out-of-band on a Management Endpoint";
    }
}

/// Virtualization Management, Command Dword 10. Command Dword 11 is the number of resources (NR).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VirtualizationCdw10 {
    /// Action (ACT).
    #[bits(4)]
    pub act: VirtualizationAction,
    #[bits(4)]
    __: u8,
    /// Resource Type (RT).
    #[bits(3)]
    pub rt: ResourceType,
    #[bits(5)]
    __: u8,
    /// Controller Identifier (CNTLID).
    #[bits(16)]
    pub cntlid: ControllerId,
}

wire_values! {
    /// Action (ACT) of Virtualization Management.
    VirtualizationAction(u8) {
        PRIMARY_FLEXIBLE = 1, "Primary Controller Flexible Allocation";
        SECONDARY_OFFLINE = 7, "Secondary Controller Offline";
        SECONDARY_ASSIGN = 8, "Secondary Controller Assign";
        SECONDARY_ONLINE = 9, "Secondary Controller Online";
    }
}

wire_values! {
    /// Resource Type (RT) of Virtualization Management.
    ResourceType(u8) {
        QUEUES = 0, "VQ Resources";
        INTERRUPTS = 1, "VI Resources";
    }
}

/// Get LBA Status, Command Dword 13. Command Dwords 10 and 11 are the first block, Command Dword 12 the dwords that are returned at most
/// (MNDW), 0's based.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct LbaStatusCdw13 {
    /// Range Length (RL) in blocks; 0: to the namespace's end.
    pub rl: u16,
    __: u8,
    /// Action Type (ATYPE).
    #[bits(8)]
    pub atype: LbaStatusAction,
}

wire_values! {
    /// Action Type (ATYPE) of Get LBA Status.
    LbaStatusAction(u8) {
        SCAN = 0x10, "Scan, and return untracked and tracked blocks";
        TRACKED = 0x11, "Return tracked blocks";
    }
}

/// How what Get LBA Status returns begins: LBA Status Descriptor List.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct LbaStatusList {
    /// Number of LBA Status Descriptors (NLSD).
    pub nlsd: u32,
    /// Completion Condition (CMPC).
    pub cmpc: u8,
    _rsvd5: [u8; 3],
}

/// Blocks that may not be readable: an LBA Status Descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct LbaStatusDescriptor {
    /// Descriptor Starting LBA (DSLBA).
    pub dslba: u64,
    /// Number of Logical Blocks (NLB).
    pub nlb: u32,
    _rsvd12: u8,
    /// Status.
    pub status: u8,
    _rsvd14: [u8; 2],
}

assert_size!(
    DirectiveParameters: 4096, StreamParameters: 32, LbaStatusList: 8, LbaStatusDescriptor: 16,
);
