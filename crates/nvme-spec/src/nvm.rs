//! Command dwords and data structures of the NVM command set (NVM 3.3).
//!
//! Starting LBAs are in Command Dwords 10 and 11: [`Sqe::cdw10_11`](crate::command::Sqe::cdw10_11).

use bitfield_struct::bitfield;
use zerocopy::byteorder::{BigEndian, U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::NamespaceId;

/// Protection Information Field (PRINFO): action and checks (NVM 3.3, 5.3).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ProtectionInfo {
    /// Protection Information Check (PRCHK): logical block reference tag.
    pub check_reference: bool,
    /// Protection Information Check (PRCHK): application tag.
    pub check_application: bool,
    /// Protection Information Check (PRCHK): guard.
    pub check_guard: bool,
    /// Protection Information Action (PRACT): strip on read, insert on write.
    pub pract: bool,
    #[bits(4)]
    __: u8,
}

/// Command Dword 12 of Read, Write, Compare, Verify and Write Uncorrectable (NVM 3.3.1, 3.3.4 to 3.3.7). Fields that a
/// command does not define are reserved in it.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReadWriteCdw12 {
    /// Number of Logical Blocks (NLB), 0's based.
    pub nlb_z: u16,
    /// Command Extension Type (CETYPE).
    #[bits(4)]
    pub cetype: u8,
    /// Directive Type (DTYPE), of Write and Write Uncorrectable only.
    #[bits(4)]
    pub dtype: u8,
    /// Storage Tag Check (STC).
    pub stc: bool,
    #[bits(1)]
    __: u8,
    /// Protection Information Field (PRINFO).
    #[bits(4)]
    pub prinfo: ProtectionInfo,
    /// Force Unit Access (FUA).
    pub fua: bool,
    /// Limited Retry (LR).
    pub lr: bool,
}

/// Command Dword 12 of Write Zeroes (NVM 3.3.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WriteZeroesCdw12 {
    /// Number of Logical Blocks (NLB), 0's based.
    pub nlb_z: u16,
    /// Command Extension Type (CETYPE).
    #[bits(4)]
    pub cetype: u8,
    /// Directive Type (DTYPE).
    #[bits(3)]
    pub dtype: u8,
    /// Namespace Zeroes (NSZ): zero the whole namespace.
    pub nsz: bool,
    /// Storage Tag Check (STC).
    pub stc: bool,
    /// Deallocate (DEAC): the blocks should be deallocated if that reads as zeroes.
    pub deac: bool,
    /// Protection Information Field (PRINFO).
    #[bits(4)]
    pub prinfo: ProtectionInfo,
    /// Force Unit Access (FUA).
    pub fua: bool,
    /// Limited Retry (LR).
    pub lr: bool,
}

/// Command Dword 13 of Read, Write and, above bit 15, Write Zeroes (NVM 3.3.4, 3.3.6, 3.3.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReadWriteCdw13 {
    /// Dataset Management (DSM): Access Frequency.
    #[bits(4)]
    pub access_frequency: u8,
    /// Dataset Management (DSM): Access Latency.
    #[bits(2)]
    pub access_latency: u8,
    /// Dataset Management (DSM): Sequential Request.
    pub sequential: bool,
    /// Dataset Management (DSM): Incompressible.
    pub incompressible: bool,
    __: u8,
    /// Directive Specific (DSPEC) of a Write, or Command Extension Value (CEV) if CETYPE is not zero.
    pub dspec: u16,
}

/// Command Dword 15 of commands with protection information (NVM 5.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ProtectionCdw15 {
    /// (Expected) Logical Block Application Tag (LBAT, ELBAT).
    pub lbat: u16,
    /// (Expected) Logical Block Application Tag Mask (LBATM, ELBATM).
    pub lbatm: u16,
}

/// Protection information with a 16-bit guard and no storage tag, as it lies in the metadata (NVM 5.3.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ProtectionTuple {
    /// Guard: CRC-16 of the block's data with the polynomial 8BB7h.
    pub guard: U16<BigEndian>,
    /// Application Tag.
    pub application: U16<BigEndian>,
    /// Reference Tag.
    pub reference: U32<BigEndian>,
}

impl ProtectionTuple {
    /// An Application Tag that disables checks; of type 3 together with a Reference Tag of [`Self::UNCHECKED_REFERENCE`].
    pub const UNCHECKED_APPLICATION: u16 = 0xffff;
    /// See [`Self::UNCHECKED_APPLICATION`].
    pub const UNCHECKED_REFERENCE: u32 = 0xffff_ffff;

    /// The three fields.
    #[must_use]
    pub const fn new(guard: u16, application: u16, reference: u32) -> Self {
        Self { guard: U16::new(guard), application: U16::new(application), reference: U32::new(reference) }
    }
}

/// Dataset Management, Command Dword 10 (NVM 3.3.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DatasetManagementCdw10 {
    /// Number of Ranges (NR), 0's based.
    pub nr_z: u8,
    #[bits(24)]
    __: u32,
}

/// Dataset Management, Command Dword 11 (NVM 3.3.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DatasetManagementCdw11 {
    /// Attribute – Integral Dataset for Read (IDR).
    pub idr: bool,
    /// Attribute – Integral Dataset for Write (IDW).
    pub idw: bool,
    /// Attribute – Deallocate (AD).
    pub ad: bool,
    #[bits(29)]
    __: u32,
}

/// Dataset Management range (NVM 3.3.3). A command carries up to 256.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DatasetRange {
    /// Context Attributes.
    pub context_attributes: u32,
    /// Length in logical blocks; not 0's based.
    pub length: u32,
    /// Starting LBA.
    pub slba: u64,
}

/// Copy, Command Dword 12 (NVM 3.3.2). Command Dwords 10 and 11 are the Starting Destination LBA (SDLBA).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CopyCdw12 {
    /// Number of Ranges (NR), 0's based.
    pub nr_z: u8,
    /// Copy Descriptor Format (CDFRMT).
    #[bits(4)]
    pub format: CopyFormat,
    /// Protection Information Field Read (PRINFOR).
    #[bits(4)]
    pub prinfor: ProtectionInfo,
    /// Command Extension Type (CETYPE).
    #[bits(4)]
    pub cetype: u8,
    /// Directive Type (DTYPE).
    #[bits(4)]
    pub dtype: u8,
    /// Storage Tag Check Write (STCW).
    pub stcw: bool,
    /// Storage Tag Check Read (STCR).
    pub stcr: bool,
    /// Protection Information Field Write (PRINFOW).
    #[bits(4)]
    pub prinfow: ProtectionInfo,
    /// Force Unit Access (FUA).
    pub fua: bool,
    /// Limited Retry (LR).
    pub lr: bool,
}

wire_values! {
    /// Copy Descriptor Format (NVM 3.3.2). Bit n of Identify Controller's CDFS and of Host Behavior Support's CDFE
    /// stands for format n.
    CopyFormat(u8) {
        SLBA_32 = 0, "Source LBA ranges, 32-byte descriptors";
        SLBA_40 = 1, "Source LBA ranges, 40-byte descriptors with extended protection information";
        NSID_SLBA_32 = 2, "Source namespaces and LBA ranges, 32-byte descriptors";
        NSID_SLBA_40 = 3, "Source namespaces and LBA ranges, 40-byte descriptors with extended protection information";
    }
}

/// Copy source range, formats 0h and 2h (NVM 3.3.2). A command carries up to Identify Namespace's MSRC + 1.
/// On failure, completion Dword 0 is the lowest number of a range that was not copied completely.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CopyRange {
    /// Source Namespace Identifier (SNSID); reserved in format 0h.
    pub snsid: NamespaceId,
    _rsvd4: [u8; 4],
    /// Starting LBA (SLBA).
    pub slba: u64,
    /// Number of Logical Blocks (NLB), 0's based.
    pub nlb_z: u16,
    _rsvd18: [u8; 4],
    /// Source Options (SOPT); reserved in format 0h.
    pub sopt: CopySourceOptions,
    /// Expected Initial Logical Block Reference Tag (EILBRT), or Expected Logical Block Tags.
    pub eilbrt: u32,
    /// Expected Logical Block Application Tag (ELBAT).
    pub elbat: u16,
    /// Expected Logical Block Application Tag Mask (ELBATM).
    pub elbatm: u16,
}

impl CopyRange {
    /// A range without protection information; `snsid` is [`NamespaceId::NONE`] in format 0h.
    #[must_use]
    pub const fn new(snsid: NamespaceId, slba: u64, nlb_z: u16) -> Self {
        Self {
            snsid,
            _rsvd4: [0; 4],
            slba,
            nlb_z,
            _rsvd18: [0; 4],
            sopt: CopySourceOptions::new(),
            eilbrt: 0,
            elbat: 0,
            elbatm: 0,
        }
    }
}

/// Source Options (SOPT) of a format 2h copy source range (NVM 3.3.2).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CopySourceOptions {
    #[bits(15)]
    __: u16,
    /// Fast Copy Only (FCO): fail rather than copy slowly.
    pub fco: bool,
}

assert_size!(DatasetRange: 16, CopyRange: 32, ProtectionTuple: 8);
