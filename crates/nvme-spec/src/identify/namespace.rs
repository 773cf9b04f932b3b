//! Identify Namespace: NVM command set (CNS 00h, 05h, 11h; NVM 4.1.5) and independent of it (CNS 08h; Base 5.1.13.2.8).

use bitfield_struct::bitfield;
use zerocopy::little_endian::U128;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Identify Namespace data structure, NVM command set (CNS 00h, 09h, 11h; NVM 4.1.5.1).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// Namespace Size (NSZE) in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity (NCAP) in logical blocks.
    pub ncap: u64,
    /// Namespace Utilization (NUSE) in logical blocks.
    pub nuse: u64,
    /// Namespace Features (NSFEAT).
    pub nsfeat: NamespaceFeatures,
    /// Number of LBA Formats (NLBAF), 0's based.
    pub nlbaf_z: u8,
    /// Formatted LBA Size (FLBAS).
    pub flbas: FormattedLbaSize,
    /// Metadata Capabilities (MC).
    pub mc: MetadataCapabilities,
    /// End-to-end Data Protection Capabilities (DPC).
    pub dpc: ProtectionCapabilities,
    /// End-to-end Data Protection Type Settings (DPS).
    pub dps: ProtectionSettings,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities (NMIC).
    pub nmic: NamespaceSharing,
    /// Reservation Capabilities (RESCAP).
    pub rescap: ReservationCapabilities,
    /// Format Progress Indicator (FPI).
    pub fpi: FormatProgress,
    /// Deallocate Logical Block Features (DLFEAT).
    pub dlfeat: DeallocateFeatures,
    /// Namespace Atomic Write Unit Normal (NAWUN) in logical blocks, 0's based.
    pub nawun_z: u16,
    /// Namespace Atomic Write Unit Power Fail (NAWUPF) in logical blocks, 0's based.
    pub nawupf_z: u16,
    /// Namespace Atomic Compare & Write Unit (NACWU) in logical blocks, 0's based.
    pub nacwu_z: u16,
    /// Namespace Atomic Boundary Size Normal (NABSN) in logical blocks, 0's based; 0 is no boundary.
    pub nabsn_z: u16,
    /// Namespace Atomic Boundary Offset (NABO) in logical blocks.
    pub nabo: u16,
    /// Namespace Atomic Boundary Size Power Fail (NABSPF) in logical blocks, 0's based; 0 is no boundary.
    pub nabspf_z: u16,
    /// Namespace Optimal I/O Boundary (NOIOB) in logical blocks; 0 is not reported.
    pub noiob: u16,
    /// NVM Capacity (NVMCAP) in bytes.
    pub nvmcap: U128,
    /// Namespace Preferred Write Granularity (NPWG) in logical blocks, 0's based.
    pub npwg_z: u16,
    /// Namespace Preferred Write Alignment (NPWA) in logical blocks, 0's based.
    pub npwa_z: u16,
    /// Namespace Preferred Deallocate Granularity (NPDG) in logical blocks, 0's based.
    pub npdg_z: u16,
    /// Namespace Preferred Deallocate Alignment (NPDA) in logical blocks, 0's based.
    pub npda_z: u16,
    /// Namespace Optimal Write Size (NOWS) in logical blocks, 0's based.
    pub nows_z: u16,
    /// Maximum Single Source Range Length (MSSRL) in logical blocks.
    pub mssrl: u16,
    /// Maximum Copy Length (MCL) in logical blocks.
    pub mcl: u32,
    /// Maximum Source Range Count (MSRC), 0's based.
    pub msrc_z: u8,
    /// Key Per I/O Status (KPIOS).
    pub kpios: u8,
    /// Number of Unique Attribute LBA Formats (NULBAF).
    pub nulbaf: u8,
    _rsvd83: u8,
    /// Key Per I/O Data Access Alignment and Granularity (KPIODAAG) in logical blocks.
    pub kpiodaag: u32,
    _rsvd88: [u8; 4],
    /// ANA Group Identifier (ANAGRPID).
    pub anagrpid: u32,
    _rsvd96: [u8; 3],
    /// Namespace Attributes (NSATTR).
    pub nsattr: NamespaceAttributes,
    /// NVM Set Identifier (NVMSETID).
    pub nvmsetid: u16,
    /// Endurance Group Identifier (ENDGID).
    pub endgid: u16,
    /// Namespace Globally Unique Identifier (NGUID), most significant byte first.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier (EUI64), most significant byte first.
    pub eui64: [u8; 8],
    /// LBA Formats (LBAF0 to LBAF63).
    pub lbaf: [LbaFormat; 64],
    /// Vendor specific.
    pub vendor: [u8; 3712],
}

/// Namespace Features (NSFEAT; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceFeatures {
    /// Thin Provisioning (THINP).
    pub thin_provisioning: bool,
    /// Namespace Supported Atomic Boundary & Power (NSABP): NAWUN, NAWUPF and NACWU are valid.
    pub atomics: bool,
    /// Deallocated Error (DAE): deallocated or unwritten blocks can report an error.
    pub deallocated_error: bool,
    /// Unique ID Reuse (UIDREUSE): NGUID and EUI64 are never reused.
    pub uid_never_reused: bool,
    /// Optional Performance (OPTPERF): 1h, NPWG, NPWA, NPDG, NPDA and NOWS are valid; 2h and 3h, those of CNS 05h too.
    #[bits(2)]
    pub optperf: u8,
    /// Multiple Atomicity Mode (MAM).
    pub mam: bool,
    /// Optional Read Performance (OPTRPERF): NPRG, NPRA and NORS are valid.
    pub optrperf: bool,
}

/// Formatted LBA Size (FLBAS; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FormattedLbaSize {
    /// Format Index Lower (FIDXL), four bits.
    #[bits(4)]
    pub index_low: u8,
    /// Metadata Transferred at End of LBA (MTELBA).
    pub metadata_extended: bool,
    /// Format Index Upper (FIDXU), two bits; used only with more than 16 formats.
    #[bits(2)]
    pub index_high: u8,
    #[bits(1)]
    __: u8,
}

impl FormattedLbaSize {
    /// The index of the format in use, from both its parts.
    #[must_use]
    pub const fn index(self) -> u8 {
        self.index_low() | self.index_high() << 4
    }

    /// With this format index, below 64.
    #[must_use]
    pub const fn with_index(self, index: u8) -> Self {
        self.with_index_low(index & 0xf).with_index_high(index >> 4)
    }
}

/// Metadata Capabilities (MC; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct MetadataCapabilities {
    /// Metadata Transferred at End of LBA supported (MTELBA).
    pub extended: bool,
    /// Metadata Transferred in a Separate Buffer supported (MTSMB).
    pub separate: bool,
    #[bits(6)]
    __: u8,
}

/// End-to-end Data Protection Capabilities (DPC; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ProtectionCapabilities {
    /// Protection Information Type 1 Supported (PIT1S).
    pub type1: bool,
    /// Protection Information Type 2 Supported (PIT2S).
    pub type2: bool,
    /// Protection Information Type 3 Supported (PIT3S).
    pub type3: bool,
    /// Protection Information In First Bytes (PIIFB).
    pub first: bool,
    /// Protection Information In Last Bytes (PIILB).
    pub last: bool,
    #[bits(3)]
    __: u8,
}

/// End-to-end Data Protection Type Settings (DPS; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ProtectionSettings {
    /// Protection Information Type (PIT): 0 is none.
    #[bits(3)]
    pub pit: u8,
    /// Protection Information Position (PIP): first bytes of the metadata.
    pub first: bool,
    #[bits(4)]
    __: u8,
}

/// Namespace Multi-path I/O and Namespace Sharing Capabilities (NMIC; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceSharing {
    /// Shared Namespace (SHRNS): may be attached to two or more controllers.
    pub shared: bool,
    /// Dispersed Namespace (DISNS).
    pub dispersed: bool,
    #[bits(6)]
    __: u8,
}

/// Reservation Capabilities (RESCAP; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReservationCapabilities {
    /// Persist Through Power Loss.
    pub persist_through_power_loss: bool,
    /// Write Exclusive.
    pub write_exclusive: bool,
    /// Exclusive Access.
    pub exclusive_access: bool,
    /// Write Exclusive - Registrants Only.
    pub write_exclusive_registrants_only: bool,
    /// Exclusive Access - Registrants Only.
    pub exclusive_access_registrants_only: bool,
    /// Write Exclusive - All Registrants.
    pub write_exclusive_all_registrants: bool,
    /// Exclusive Access - All Registrants.
    pub exclusive_access_all_registrants: bool,
    /// Ignore Existing Key as revision 1.3 and later define it.
    pub ignore_existing_key_1_3: bool,
}

/// Format Progress Indicator (FPI; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FormatProgress {
    /// Percentage of the namespace that remains to be formatted.
    #[bits(7)]
    pub remaining_percent: u8,
    /// Format Progress Indicator Supported.
    pub supported: bool,
}

/// Deallocate Logical Block Features (DLFEAT; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DeallocateFeatures {
    /// Deallocation Read Behavior (DRB).
    #[bits(3)]
    pub read: DeallocatedRead,
    /// Write Zeroes Deallocation Support (WZDS): Write Zeroes honours its Deallocate bit.
    pub write_zeroes: bool,
    /// Guard Deallocation Status (GDS): the guard of a deallocated block is the CRC of what is read.
    pub guard_crc: bool,
    #[bits(3)]
    __: u8,
}

wire_values! {
    /// What a deallocated block reads as (DLFEAT.DRB; NVM 4.1.5.1).
    DeallocatedRead(u8) {
        NOT_REPORTED = 0, "The read behavior is not reported";
        ZEROES = 1, "A deallocated logical block returns all bytes cleared to 0h";
        ONES = 2, "A deallocated logical block returns all bytes set to FFh";
    }
}

/// Namespace Attributes (NSATTR; NVM 4.1.5.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceAttributes {
    /// Currently Write Protected (CWP).
    pub write_protected: bool,
    #[bits(7)]
    __: u8,
}

/// LBA Format (NVM 4.1.5.1, Figure "LBA Format Data Structure").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct LbaFormat {
    /// Metadata Size (MS) in bytes per block.
    pub ms: u16,
    /// LBA Data Size (LBADS): 2^n bytes, n at least 9; 0 if the format is not available.
    pub lbads: u8,
    /// Relative Performance (RP), bits 1:0.
    pub rp: RelativePerformance,
}

wire_values! {
    /// Relative Performance (RP) of an LBA format (NVM 4.1.5.1).
    RelativePerformance(u8) {
        BEST = 0, "Best performance";
        BETTER = 1, "Better performance";
        GOOD = 2, "Good performance";
        DEGRADED = 3, "Degraded performance";
    }
}

/// I/O Command Set specific Identify Namespace, NVM command set (CNS 05h and 1Bh, CSI 00h; NVM 4.1.5.3).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IdentifyNamespaceNvm {
    /// Logical Block Storage Tag Mask (LBSTM).
    pub lbstm: u64,
    /// Protection Information Capabilities (PIC).
    pub pic: u8,
    /// Protection Information Format Attributes (PIFA).
    pub pifa: u8,
    _rsvd10: [u8; 2],
    /// Extended LBA Formats (ELBAF0 to ELBAF63).
    pub elbaf: [ExtendedLbaFormat; 64],
    /// Namespace Preferred Deallocate Granularity Large (NPDGL) in logical blocks; 0 is not reported.
    pub npdgl: u32,
    /// Namespace Preferred Read Granularity (NPRG) in logical blocks.
    pub nprg: u32,
    /// Namespace Preferred Read Alignment (NPRA) in logical blocks.
    pub npra: u32,
    /// Namespace Optimal Read Size (NORS) in logical blocks.
    pub nors: u32,
    /// Namespace Preferred Deallocate Alignment Large (NPDAL) in logical blocks.
    pub npdal: u32,
    /// LBA Format Placement Shard Size (LBAPSS).
    pub lbapss: u32,
    /// Tracked LBA Allocation Granularity (TLBAAG).
    pub tlbaag: u32,
    _rsvd296: [u8; 3800],
}

/// Extended LBA Format (NVM 4.1.5.3, Figure "Extended LBA Format Data Structure").
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ExtendedLbaFormat {
    /// Storage Tag Size (STS) in bits.
    #[bits(7)]
    pub sts: u8,
    /// Protection Information Format (PIF): 0 is 16-bit guard.
    #[bits(2)]
    pub pif: u8,
    /// Qualified Protection Information Format (QPIF), if PIF is 3h.
    #[bits(4)]
    pub qpif: u8,
    #[bits(19)]
    __: u32,
}

/// I/O Command Set Independent Identify Namespace data structure (CNS 08h, 1Fh; Base 5.1.13.2.8).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IdentifyNamespaceIndependent {
    /// Common Namespace Features (NSFEAT).
    pub nsfeat: CommonNamespaceFeatures,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities (NMIC).
    pub nmic: NamespaceSharing,
    /// Reservation Capabilities (RESCAP).
    pub rescap: ReservationCapabilities,
    /// Format Progress Indicator (FPI).
    pub fpi: FormatProgress,
    /// ANA Group Identifier (ANAGRPID).
    pub anagrpid: u32,
    /// Namespace Attributes (NSATTR).
    pub nsattr: NamespaceAttributes,
    _rsvd9: u8,
    /// NVM Set Identifier (NVMSETID).
    pub nvmsetid: u16,
    /// Endurance Group Identifier (ENDGID).
    pub endgid: u16,
    /// Namespace Status (NSTAT).
    pub nstat: NamespaceStatus,
    /// Key Per I/O Status (KPIOS).
    pub kpios: u8,
    /// Maximum Key Tag (MAXKT).
    pub maxkt: u16,
    _rsvd18: [u8; 2],
    /// Reachability Group Identifier (RGRPID).
    pub rgrpid: u32,
    _rsvd24: [u8; 4072],
}

/// Common Namespace Features (NSFEAT of CNS 08h; Base 5.1.13.2.8).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CommonNamespaceFeatures {
    #[bits(3)]
    __: u8,
    /// Unique ID Reuse (UIDREUSE): NGUID and EUI64 are never reused.
    pub uid_never_reused: bool,
    /// Rotational Media (RMEDIA).
    pub rotational: bool,
    /// Volatile Write Cache Not Present (VWCNP).
    pub no_volatile_write_cache: bool,
    #[bits(2)]
    __: u8,
}

/// Namespace Status (NSTAT of CNS 08h; Base 5.1.13.2.8).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceStatus {
    /// Namespace Ready (NRDY).
    pub ready: bool,
    #[bits(7)]
    __: u8,
}

assert_size!(
    IdentifyNamespace: 4096, LbaFormat: 4, IdentifyNamespaceNvm: 4096, IdentifyNamespaceIndependent: 4096,
);
