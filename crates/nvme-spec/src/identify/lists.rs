//! Lists (Base 4.6, 5.1.13.2, 5.1.13.3): namespaces, controllers, namespace identifiers, virtualization resources, UUIDs.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::command::{ControllerId, NamespaceId};

/// Namespace List: identifiers in ascending order, unused entries zero (CNS 02h, 07h, 10h, 1Ah; Base 4.6.2).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct NamespaceList {
    /// The entries.
    pub ids: [NamespaceId; Self::CAPACITY],
}

impl NamespaceList {
    /// Identifiers that fit.
    pub const CAPACITY: usize = 1024;

    /// The first identifiers that `ids` yields, as many as fit; they must ascend and not be zero.
    #[must_use]
    pub fn new(ids: impl IntoIterator<Item = NamespaceId>) -> Self {
        let mut list = Self::new_zeroed();
        for (entry, id) in list.ids.iter_mut().zip(ids) {
            *entry = id;
        }
        list
    }

    /// The identifiers up to the first unused entry.
    pub fn iter(&self) -> impl Iterator<Item = NamespaceId> + '_ {
        self.ids.iter().copied().take_while(|id| *id != NamespaceId::NONE)
    }
}

/// Controller List: identifiers in ascending order (CNS 12h, 13h, Namespace Attachment; Base 4.6.1).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ControllerList {
    /// Number of Identifiers.
    pub count: u16,
    /// The entries; unused ones are zero.
    pub ids: [ControllerId; Self::CAPACITY],
}

impl ControllerList {
    /// Identifiers that fit.
    pub const CAPACITY: usize = 2047;

    /// The first identifiers that `ids` yields, as many as fit; they must ascend.
    #[must_use]
    pub fn new(ids: impl IntoIterator<Item = ControllerId>) -> Self {
        let mut list = Self::new_zeroed();
        for (entry, id) in list.ids.iter_mut().zip(ids) {
            *entry = id;
            list.count += 1;
        }
        list
    }

    /// The identifiers listed; `None` if the count is larger than the list.
    #[must_use]
    pub fn listed(&self) -> Option<&[ControllerId]> {
        self.ids.get(..usize::from(self.count))
    }
}

/// Namespace Identification Descriptor, header (CNS 03h; Base 5.1.13.2.3). The identifier follows, then the next
/// descriptor; a list ends with a header of zeroes or with the structure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct NamespaceDescriptor {
    /// Namespace Identifier Type (NIDT).
    pub nidt: NamespaceIdType,
    /// Namespace Identifier Length (NIDL) in bytes.
    pub nidl: u8,
    _rsvd2: [u8; 2],
}

impl NamespaceDescriptor {
    /// The header of an identifier of this type, with the length that the type has.
    #[must_use]
    pub const fn new(nidt: NamespaceIdType) -> Self {
        Self { nidt, nidl: nidt.length(), _rsvd2: [0; 2] }
    }
}

wire_values! {
    /// Namespace Identifier Type (NIDT; Base 5.1.13.2.3).
    NamespaceIdType(u8) {
        EUI64 = 1, "IEEE Extended Unique Identifier";
        NGUID = 2, "Namespace Globally Unique Identifier";
        UUID = 3, "Namespace UUID";
        CSI = 4, "Command Set Identifier";
    }
}

impl NamespaceIdType {
    /// Bytes of an identifier of this type; zero for a reserved type.
    #[must_use]
    pub const fn length(self) -> u8 {
        match self {
            Self::EUI64 => 8,
            Self::NGUID | Self::UUID => 16,
            Self::CSI => 1,
            _ => 0,
        }
    }
}

/// The descriptors in a Namespace Identification Descriptor list: type and identifier of each, up to the list's end or
/// the first one that does not fit in it (CNS 03h; Base 5.1.13.2.3).
pub fn namespace_descriptors(mut list: &[u8]) -> impl Iterator<Item = (NamespaceIdType, &[u8])> {
    core::iter::from_fn(move || {
        let (header, rest) = NamespaceDescriptor::read_from_prefix(list).ok()?;
        if header.nidl == 0 {
            return None;
        }
        let (identifier, rest) = rest.split_at_checked(usize::from(header.nidl))?;
        list = rest;
        Some((header.nidt, identifier))
    })
}

/// Primary Controller Capabilities data structure (CNS 14h; Base 5.1.13.3.1).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PrimaryControllerCapabilities {
    /// Controller Identifier (CNTLID).
    pub cntlid: ControllerId,
    /// Port Identifier (PORTID).
    pub portid: u16,
    /// Controller Resource Types (CRT).
    pub crt: ControllerResourceTypes,
    _rsvd5: [u8; 27],
    /// VQ Resources Flexible Total (VQFRT).
    pub vqfrt: u32,
    /// VQ Resources Flexible Assigned (VQRFA).
    pub vqrfa: u32,
    /// VQ Resources Flexible Allocated to Primary (VQRFAP).
    pub vqrfap: u16,
    /// VQ Resources Private Total (VQPRT).
    pub vqprt: u16,
    /// VQ Resources Flexible Secondary Maximum (VQFRSM).
    pub vqfrsm: u16,
    /// VQ Flexible Resource Preferred Granularity (VQGRAN).
    pub vqgran: u16,
    _rsvd48: [u8; 16],
    /// VI Resources Flexible Total (VIFRT).
    pub vifrt: u32,
    /// VI Resources Flexible Assigned (VIRFA).
    pub virfa: u32,
    /// VI Resources Flexible Allocated to Primary (VIRFAP).
    pub virfap: u16,
    /// VI Resources Private Total (VIPRT).
    pub viprt: u16,
    /// VI Resources Flexible Secondary Maximum (VIFRSM).
    pub vifrsm: u16,
    /// VI Flexible Resource Preferred Granularity (VIGRAN).
    pub vigran: u16,
    _rsvd80: [u8; 4016],
}

/// Controller Resource Types (CRT; Base 5.1.13.3.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ControllerResourceTypes {
    /// VQ Resources Supported.
    pub queues: bool,
    /// VI Resources Supported.
    pub interrupts: bool,
    #[bits(6)]
    __: u8,
}

/// Secondary Controller list (CNS 15h; Base 5.1.13.3.2).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SecondaryControllerList {
    /// Number of Identifiers.
    pub count: u8,
    _rsvd1: [u8; 31],
    /// The entries.
    pub entries: [SecondaryController; 127],
}

/// Secondary Controller Entry (Base 5.1.13.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SecondaryController {
    /// Secondary Controller Identifier (SCID).
    pub scid: ControllerId,
    /// Primary Controller Identifier (PCID).
    pub pcid: ControllerId,
    /// Secondary Controller State (SCS): bit 0 is set when it is online.
    pub scs: u8,
    _rsvd5: [u8; 3],
    /// Virtual Function Number (VFN).
    pub vfn: u16,
    /// Number of VQ Flexible Resources Assigned (NVQ).
    pub nvq: u16,
    /// Number of VI Flexible Resources Assigned (NVI).
    pub nvi: u16,
    _rsvd14: [u8; 18],
}

/// Namespace Granularity List (CNS 16h; Base 5.1.13.2.13).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct NamespaceGranularityList {
    /// Namespace Granularity Attributes.
    pub attributes: NamespaceGranularityAttributes,
    /// Number of Descriptors, 0's based.
    pub descriptors_z: u8,
    _rsvd5: [u8; 27],
    /// Namespace Granularity Descriptors.
    pub entries: [NamespaceGranularity; 16],
    _rsvd288: [u8; 3808],
}

/// Namespace Granularity Attributes (Base 5.1.13.2.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceGranularityAttributes {
    /// Granularity Descriptor Mapping: one descriptor per LBA format.
    pub per_format: bool,
    #[bits(31)]
    __: u32,
}

/// Namespace Granularity Descriptor (Base 5.1.13.2.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct NamespaceGranularity {
    /// Namespace Size Granularity in bytes; 0 is not reported.
    pub nsze: u64,
    /// Namespace Capacity Granularity in bytes; 0 is not reported.
    pub ncap: u64,
}

/// UUID List (CNS 17h; Base 5.1.13.2.14).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct UuidList {
    _rsvd0: [u8; 32],
    /// Entries of UUID Index 1 to 127; the first whose UUID is zero ends the list.
    pub entries: [UuidEntry; 127],
}

/// UUID List Entry (Base 5.1.13.2.14).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct UuidEntry {
    /// UUID List Entry Header: Identifier Association in bits 1:0 (0 none, 1 PCI Vendor ID, 2 PCI Subsystem Vendor ID).
    pub header: u8,
    _rsvd1: [u8; 15],
    /// The UUID, most significant byte first.
    pub uuid: [u8; 16],
}

/// Identify I/O Command Set data structure (CNS 1Ch; Base 5.1.13.2.19).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IoCommandSets {
    /// I/O Command Set Combinations; bit n of one stands for Command Set Identifier n.
    pub combinations: [u64; 512],
}

assert_size!(
    NamespaceList: 4096, ControllerList: 4096, NamespaceDescriptor: 4, PrimaryControllerCapabilities: 4096,
    SecondaryControllerList: 4096, SecondaryController: 32, NamespaceGranularityList: 4096, UuidList: 4096,
    IoCommandSets: 4096,
);
