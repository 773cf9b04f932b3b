//! Identify Controller (CNS 01h; Base 5.1.13.2.1) and the NVM command set's addition (CNS 06h; NVM 4.1.5.4).

use bitfield_struct::bitfield;
use zerocopy::little_endian::U128;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::ControllerId;
use crate::registers::Version;

/// Identify Controller data structure (CNS 01h; Base 5.1.13.2.1, Figure "Identify Controller Data Structure").
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IdentifyController {
    /// PCI Vendor ID (VID).
    pub vid: u16,
    /// PCI Subsystem Vendor ID (SSVID).
    pub ssvid: u16,
    /// Serial Number (SN), ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model Number (MN), ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware Revision (FR), ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst (RAB): 2^n commands.
    pub rab: u8,
    /// IEEE OUI Identifier (IEEE), least significant byte first.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities (CMIC).
    pub cmic: ControllerSharing,
    /// Maximum Data Transfer Size (MDTS): 2^n units of the minimum memory page size; 0 is no limit.
    pub mdts: u8,
    /// Controller ID (CNTLID).
    pub cntlid: ControllerId,
    /// Version (VER).
    pub ver: Version,
    /// RTD3 Resume Latency (RTD3R) in microseconds.
    pub rtd3r: u32,
    /// RTD3 Entry Latency (RTD3E) in microseconds.
    pub rtd3e: u32,
    /// Optional Asynchronous Events Supported (OAES).
    pub oaes: AsyncEventsSupported,
    /// Controller Attributes (CTRATT).
    pub ctratt: ControllerAttributes,
    /// Read Recovery Levels Supported (RRLS), bit n for level n.
    pub rrls: u16,
    /// Boot Partition Capabilities (BPCAP).
    pub bpcap: u8,
    _rsvd103: u8,
    /// NVM Subsystem Shutdown Latency (NSSL) in microseconds.
    pub nssl: u32,
    _rsvd108: [u8; 2],
    /// Power Loss Signaling Information (PLSI).
    pub plsi: u8,
    /// Controller Type (CNTRLTYPE).
    pub cntrltype: ControllerType,
    /// FRU Globally Unique Identifier (FGUID), most significant byte first.
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3 (CRDT1, CRDT2, CRDT3) in 100 ms.
    pub crdt: [u16; 3],
    /// Controller Reachability Capabilities (CRCAP).
    pub crcap: u8,
    _rsvd135: [u8; 118],
    /// NVM Subsystem Report (NVMSR).
    pub nvmsr: u8,
    /// VPD Write Cycle Information (VWCI).
    pub vwci: u8,
    /// Management Endpoint Capabilities (MEC).
    pub mec: u8,
    /// Optional Admin Command Support (OACS).
    pub oacs: AdminCommandSupport,
    /// Abort Command Limit (ACL), 0's based.
    pub acl_z: u8,
    /// Asynchronous Event Request Limit (AERL), 0's based.
    pub aerl_z: u8,
    /// Firmware Updates (FRMW).
    pub frmw: FirmwareUpdates,
    /// Log Page Attributes (LPA).
    pub lpa: LogPageAttributes,
    /// Error Log Page Entries (ELPE), 0's based.
    pub elpe_z: u8,
    /// Number of Power States Support (NPSS), 0's based.
    pub npss_z: u8,
    /// Admin Vendor Specific Command Configuration (AVSCC).
    pub avscc: u8,
    /// Autonomous Power State Transition Attributes (APSTA).
    pub apsta: u8,
    /// Warning Composite Temperature Threshold (WCTEMP) in kelvins.
    pub wctemp: u16,
    /// Critical Composite Temperature Threshold (CCTEMP) in kelvins.
    pub cctemp: u16,
    /// Maximum Time for Firmware Activation (MTFA) in 100 ms.
    pub mtfa: u16,
    /// Host Memory Buffer Preferred Size (HMPRE) in 4 KiB.
    pub hmpre: u32,
    /// Host Memory Buffer Minimum Size (HMMIN) in 4 KiB.
    pub hmmin: u32,
    /// Total NVM Capacity (TNVMCAP) in bytes.
    pub tnvmcap: U128,
    /// Unallocated NVM Capacity (UNVMCAP) in bytes.
    pub unvmcap: U128,
    /// Replay Protected Memory Block Support (RPMBS).
    pub rpmbs: u32,
    /// Extended Device Self-test Time (EDSTT) in minutes.
    pub edstt: u16,
    /// Device Self-test Options (DSTO).
    pub dsto: u8,
    /// Firmware Update Granularity (FWUG) in 4 KiB.
    pub fwug: u8,
    /// Keep Alive Support (KAS): granularity in 100 ms; 0 is no support.
    pub kas: u16,
    /// Host Controlled Thermal Management Attributes (HCTMA).
    pub hctma: u16,
    /// Minimum Thermal Management Temperature (MNTMT) in kelvins.
    pub mntmt: u16,
    /// Maximum Thermal Management Temperature (MXTMT) in kelvins.
    pub mxtmt: u16,
    /// Sanitize Capabilities (SANICAP).
    pub sanicap: SanitizeCapabilities,
    /// Host Memory Buffer Minimum Descriptor Entry Size (HMMINDS) in 4 KiB.
    pub hmminds: u32,
    /// Host Memory Maximum Descriptors Entries (HMMAXD).
    pub hmmaxd: u16,
    /// NVM Set Identifier Maximum (NSETIDMAX).
    pub nsetidmax: u16,
    /// Endurance Group Identifier Maximum (ENDGIDMAX).
    pub endgidmax: u16,
    /// ANA Transition Time (ANATT) in seconds.
    pub anatt: u8,
    /// Asymmetric Namespace Access Capabilities (ANACAP).
    pub anacap: AnaCapabilities,
    /// ANA Group Identifier Maximum (ANAGRPMAX).
    pub anagrpmax: u32,
    /// Number of ANA Group Identifiers (NANAGRPID).
    pub nanagrpid: u32,
    /// Persistent Event Log Size (PELS) in 64 KiB.
    pub pels: u32,
    /// Domain Identifier (DOMAINID).
    pub domainid: u16,
    /// Key Per I/O Capabilities (KPIOC).
    pub kpioc: u8,
    _rsvd359: u8,
    /// Maximum Processing Time for Firmware Activation Without Reset (MPTFAWR) in 100 ms.
    pub mptfawr: u16,
    _rsvd362: [u8; 6],
    /// Max Endurance Group Capacity (MEGCAP) in bytes.
    pub megcap: U128,
    /// Temperature Threshold Hysteresis Attributes (TMPTHHA).
    pub tmpthha: u8,
    _rsvd385: u8,
    /// Command Quiesce Time (CQT) in milliseconds.
    pub cqt: u16,
    _rsvd388: [u8; 124],
    /// Submission Queue Entry Size (SQES).
    pub sqes: EntrySize,
    /// Completion Queue Entry Size (CQES).
    pub cqes: EntrySize,
    /// Maximum Outstanding Commands (MAXCMD).
    pub maxcmd: u16,
    /// Number of Namespaces (NN): the largest valid NSID, unless MNAN limits the number.
    pub nn: u32,
    /// Optional NVM Command Support (ONCS).
    pub oncs: NvmCommandSupport,
    /// Fused Operation Support (FUSES).
    pub fuses: FusedSupport,
    /// Format NVM Attributes (FNA).
    pub fna: FormatAttributes,
    /// Volatile Write Cache (VWC).
    pub vwc: VolatileWriteCache,
    /// Atomic Write Unit Normal (AWUN) in logical blocks, 0's based.
    pub awun_z: u16,
    /// Atomic Write Unit Power Fail (AWUPF) in logical blocks, 0's based.
    pub awupf_z: u16,
    /// I/O Command Set Vendor Specific Command Configuration (ICSVSCC, once NVSCC).
    pub icsvscc: u8,
    /// Namespace Write Protection Capabilities (NWPC).
    pub nwpc: WriteProtectCapabilities,
    /// Atomic Compare & Write Unit (ACWU) in logical blocks, 0's based.
    pub acwu_z: u16,
    /// Copy Descriptor Formats Supported (CDFS, once OCFS), bit n for format n.
    pub cdfs: u16,
    /// SGL Support (SGLS).
    pub sgls: SglSupport,
    /// Maximum Number of Allowed Namespaces (MNAN); 0 is NN.
    pub mnan: u32,
    /// Maximum Domain Namespace Attachments (MAXDNA).
    pub maxdna: U128,
    /// Maximum I/O Controller Namespace Attachments (MAXCNA); 0 is no limit.
    pub maxcna: u32,
    /// Optimal Aggregated Queue Depth (OAQD).
    pub oaqd: u32,
    /// Recommended Host-Initiated Refresh Interval (RHIRI) in days.
    pub rhiri: u8,
    /// Host-Initiated Refresh Time (HIRT) in hours.
    pub hirt: u8,
    /// Controller Maximum Memory Range Tracking Descriptors (CMMRTD).
    pub cmmrtd: u16,
    /// NVM Subsystem Maximum Memory Range Tracking Descriptors (NMMRTD).
    pub nmmrtd: u16,
    /// Minimum Memory Range Tracking Granularity (MINMRTG): 2^n bytes.
    pub minmrtg: u8,
    /// Maximum Memory Range Tracking Granularity (MAXMRTG): 2^n bytes.
    pub maxmrtg: u8,
    /// Tracking Attributes (TRATTR).
    pub trattr: u8,
    _rsvd577: u8,
    /// Maximum Controller User Data Migration Queues (MCUDMQ).
    pub mcudmq: u16,
    /// Maximum NVM Subsystem User Data Migration Queues (MNSUDMQ).
    pub mnsudmq: u16,
    /// Maximum CDQ Memory Ranges (MCMR).
    pub mcmr: u16,
    /// NVM Subsystem Maximum CDQ Memory Ranges (NMCMR).
    pub nmcmr: u16,
    /// Maximum Controller Data Queue PRP Count (MCDQPC).
    pub mcdqpc: u16,
    _rsvd588: [u8; 180],
    /// NVM Subsystem NVMe Qualified Name (SUBNQN), null-terminated UTF-8.
    pub subnqn: [u8; 256],
    _rsvd1024: [u8; 768],
    /// Bytes 1792 to 2047, for NVMe over Fabrics.
    pub fabrics: FabricsAttributes,
    /// Power State Descriptors (PSD0 to PSD31).
    pub psd: [PowerState; 32],
    /// Vendor specific.
    pub vendor: [u8; 1024],
}

/// The part of Identify Controller that only NVMe over Fabrics uses (Base 5.1.13.2.1, bytes 1792 to 2047).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct FabricsAttributes {
    /// I/O Queue Command Capsule Supported Size (IOCCSZ) in 16 bytes.
    pub ioccsz: u32,
    /// I/O Queue Response Capsule Supported Size (IORCSZ) in 16 bytes.
    pub iorcsz: u32,
    /// In Capsule Data Offset (ICDOFF) in 16 bytes.
    pub icdoff: u16,
    /// Fabrics Controller Attributes (FCATT).
    pub fcatt: u8,
    /// Maximum SGL Data Block Descriptors (MSDBD); 0 is no limit.
    pub msdbd: u8,
    /// Optional Fabrics Commands Support (OFCS).
    pub ofcs: u16,
    /// Discovery Controller Type (DCTYPE).
    pub dctype: u8,
    _rsvd1807: [u8; 241],
}

wire_values! {
    /// Controller Type (CNTRLTYPE; Base 5.1.13.2.1).
    ControllerType(u8) {
        NOT_REPORTED = 0, "Controller type not reported";
        IO = 1, "I/O controller";
        DISCOVERY = 2, "Discovery controller";
        ADMINISTRATIVE = 3, "Administrative controller";
    }
}

/// Controller Multi-Path I/O and Namespace Sharing Capabilities (CMIC).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ControllerSharing {
    /// Multiple Ports (MPORTS): the NVM subsystem may have more than one port.
    pub multiple_ports: bool,
    /// Multiple Controllers (MCTRS): the NVM subsystem may have more than one controller.
    pub multiple_controllers: bool,
    /// Function Type (FT): the controller is of an SR-IOV virtual function.
    pub virtual_function: bool,
    /// Asymmetric Namespace Access Reporting Support (ANARS).
    pub ana: bool,
    #[bits(4)]
    __: u8,
}

/// Optional Asynchronous Events Supported (OAES); the bits are those of Asynchronous Event Configuration.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AsyncEventsSupported {
    __: u8,
    /// Namespace Attribute Notices.
    pub namespace_attribute: bool,
    /// Firmware Activation Notices.
    pub firmware_activation: bool,
    #[bits(1)]
    __: u8,
    /// Asymmetric Namespace Access Change Notices.
    pub ana_change: bool,
    /// Predictable Latency Event Aggregate Log Change Notices.
    pub predictable_latency: bool,
    /// LBA Status Information Alert Notices.
    pub lba_status: bool,
    /// Endurance Group Event Aggregate Log Page Change Notices.
    pub endurance_group: bool,
    /// Normal NVM Subsystem Shutdown Event.
    pub subsystem_shutdown: bool,
    /// Temperature Threshold Hysteresis Recovery.
    pub temperature_hysteresis: bool,
    /// Reachability Groups Change Notices.
    pub reachability_groups: bool,
    #[bits(1)]
    __: u8,
    /// Allocated Namespace Attribute Notices.
    pub allocated_namespace_attribute: bool,
    #[bits(7)]
    __: u8,
    /// Zone Descriptor Changed Notices.
    pub zone_descriptor: bool,
    #[bits(3)]
    __: u8,
    /// Discovery Log Page Change Notification.
    pub discovery_log: bool,
}

/// Controller Attributes (CTRATT).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ControllerAttributes {
    /// Host Identifier Support (HIDS): 128 bits.
    pub host_id_128: bool,
    /// Non-Operational Power State Permissive Mode (NOPSPM).
    pub nopspm: bool,
    /// NVM Sets (NSETS).
    pub nvm_sets: bool,
    /// Read Recovery Levels (RRLVLS).
    pub read_recovery_levels: bool,
    /// Endurance Groups (EGS).
    pub endurance_groups: bool,
    /// Predictable Latency Mode (PLM).
    pub predictable_latency: bool,
    /// Traffic Based Keep Alive Support (TBKAS).
    pub tbkas: bool,
    /// Namespace Granularity (NG).
    pub namespace_granularity: bool,
    /// SQ Associations (SQA).
    pub sq_associations: bool,
    /// UUID List (ULIST).
    pub uuid_list: bool,
    /// Multi-Domain Subsystem (MDS).
    pub multi_domain: bool,
    /// Fixed Capacity Management (FCM).
    pub fixed_capacity: bool,
    /// Variable Capacity Management (VCM).
    pub variable_capacity: bool,
    /// Delete Endurance Group (DEG).
    pub delete_endurance_group: bool,
    /// Delete NVM Set (DNVMS).
    pub delete_nvm_set: bool,
    /// Extended LBA Formats Supported (ELBAS).
    pub extended_lba_formats: bool,
    /// MDTS and Size Limits Exclude Metadata (MEM).
    pub mem: bool,
    /// HMB Restrict Non-Operational Power State Access (HMBR).
    pub hmbr: bool,
    /// Reservations and Host Identifier Interaction (RHII).
    pub rhii: bool,
    /// Flexible Data Placement Support (FDPS).
    pub fdps: bool,
    #[bits(12)]
    __: u16,
}

/// Optional Admin Command Support (OACS).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AdminCommandSupport {
    /// Security Send Receive Supported (SSRS).
    pub security: bool,
    /// Format NVM Supported (FNVMS).
    pub format: bool,
    /// Firmware Download Supported (FWDS).
    pub firmware: bool,
    /// Namespace Management Supported (NMS): management and attachment.
    pub namespace_management: bool,
    /// Device Self-test Supported (DSTS).
    pub self_test: bool,
    /// Directives Supported (DIRS).
    pub directives: bool,
    /// NVMe-MI Send Receive Supported (NSRS).
    pub nvme_mi: bool,
    /// Virtualization Management Supported (VMS).
    pub virtualization: bool,
    /// Doorbell Buffer Config Supported (DBCS).
    pub doorbell_buffer: bool,
    /// Get LBA Status Supported (GLSS).
    pub get_lba_status: bool,
    /// Command and Feature Lockdown Supported (CFLS).
    pub lockdown: bool,
    /// Host Managed Live Migration Support (HMLMS).
    pub live_migration: bool,
    #[bits(4)]
    __: u8,
}

/// Firmware Updates (FRMW).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FirmwareUpdates {
    /// First Firmware Slot Read Only (FFSRO).
    pub slot1_read_only: bool,
    /// Number of Firmware Slots (NOFS), 1 to 7.
    #[bits(3)]
    pub slots: u8,
    /// Firmware Activation Without Reset Support (FAWR).
    pub without_reset: bool,
    /// Support Multiple Update Detection (SMUD).
    pub smud: bool,
    #[bits(2)]
    __: u8,
}

/// Log Page Attributes (LPA).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct LogPageAttributes {
    /// SMART Support (SMARTS): the SMART / Health log page per namespace.
    pub smart_per_namespace: bool,
    /// Commands Supported and Effects Support (CSES).
    pub command_effects: bool,
    /// Log Page Extended Data Support (LPEDS): 32-bit Number of Dwords and a Log Page Offset.
    pub extended_data: bool,
    /// Telemetry Support (TS).
    pub telemetry: bool,
    /// Persistent Event log page Support (PES).
    pub persistent_event: bool,
    /// Miscellaneous Log Page Support (MLPS): log pages 00h, 05h's scope, 12h and 13h.
    pub miscellaneous: bool,
    /// Data Area 4 Support (DA4S) of telemetry.
    pub telemetry_area4: bool,
    #[bits(1)]
    __: u8,
}

/// Sanitize Capabilities (SANICAP).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SanitizeCapabilities {
    /// Crypto Erase Support (CES).
    pub crypto_erase: bool,
    /// Block Erase Support (BES).
    pub block_erase: bool,
    /// Overwrite Support (OWS).
    pub overwrite: bool,
    /// Verification Support (VERS).
    pub verification: bool,
    #[bits(25)]
    __: u32,
    /// No-Deallocate Inhibited (NDI).
    pub no_deallocate_inhibited: bool,
    /// No-Deallocate Modifies Media After Sanitize (NODMMAS).
    #[bits(2)]
    pub nodmmas: u8,
}

/// Asymmetric Namespace Access Capabilities (ANACAP).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AnaCapabilities {
    /// Reports the ANA Optimized state.
    pub optimized: bool,
    /// Reports the ANA Non-Optimized state.
    pub non_optimized: bool,
    /// Reports the ANA Inaccessible state.
    pub inaccessible: bool,
    /// Reports the ANA Persistent Loss state.
    pub persistent_loss: bool,
    /// Reports the ANA Change state.
    pub change: bool,
    #[bits(1)]
    __: u8,
    /// A namespace's ANAGRPID does not change while it is attached.
    pub group_fixed: bool,
    /// Namespace Management may set a non-zero ANAGRPID.
    pub group_settable: bool,
}

/// Submission (SQES) or Completion (CQES) Queue Entry Size, as powers of two.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct EntrySize {
    /// Minimum and required entry size: 2^n bytes.
    #[bits(4)]
    pub required: u8,
    /// Maximum entry size: 2^n bytes.
    #[bits(4)]
    pub maximum: u8,
}

/// Optional NVM Command Support (ONCS).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NvmCommandSupport {
    /// NVM Compare Support (NVMCMPS).
    pub compare: bool,
    /// NVM Write Uncorrectable Support Variants (NVMWUSV).
    pub write_uncorrectable: bool,
    /// NVM Dataset Management Support Variants (NVMDSMSV).
    pub dataset_management: bool,
    /// NVM Write Zeroes Support Variants (NVMWZSV).
    pub write_zeroes: bool,
    /// Save and Select Feature Support (SSFS).
    pub save_select: bool,
    /// Reservations Support (RESERVS).
    pub reservations: bool,
    /// Timestamp Support (TSS).
    pub timestamp: bool,
    /// NVM Verify Support (NVMVFYS).
    pub verify: bool,
    /// NVM Copy Support (NVMCPYS).
    pub copy: bool,
    /// NVM Copy Single Atomicity (NVMCSA).
    pub copy_single_atomicity: bool,
    /// NVM All Fast Copy (NVMAFC).
    pub all_fast_copy: bool,
    /// Maximum Write Zeroes with Deallocate (MAXWZD).
    pub max_write_zeroes_deallocate: bool,
    /// Namespace Zeroes Support (NSZS).
    pub namespace_zeroes: bool,
    #[bits(3)]
    __: u8,
}

/// Fused Operation Support (FUSES).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FusedSupport {
    /// Fused Compare and Write Supported (FCWS).
    pub compare_and_write: bool,
    #[bits(15)]
    __: u16,
}

/// Format NVM Attributes (FNA).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FormatAttributes {
    /// Format Namespace (FNS): a format applies to all namespaces.
    pub format_all: bool,
    /// Secure Erase Namespace (SENS): a secure erase applies to all namespaces.
    pub erase_all: bool,
    /// Cryptographic Erase (CRYES) is supported.
    pub cryptographic_erase: bool,
    /// Format NVM Broadcast (FNVMBS): FFFFFFFFh is not supported as NSID.
    pub no_broadcast: bool,
    #[bits(4)]
    __: u8,
}

/// Volatile Write Cache (VWC).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VolatileWriteCache {
    /// Volatile Write Cache Present (VWCP).
    pub present: bool,
    /// Flush Behavior (FB) with NSID FFFFFFFFh.
    #[bits(2)]
    pub flush: FlushBehavior,
    #[bits(5)]
    __: u8,
}

wire_values! {
    /// Flush Behavior (VWC.FB; Base 5.1.13.2.1).
    FlushBehavior(u8) {
        NOT_INDICATED = 0, "Support for the NSID field set to FFFFFFFFh is not indicated";
        NO_BROADCAST = 2, "Flush does not support the NSID field set to FFFFFFFFh";
        BROADCAST = 3, "Flush supports the NSID field set to FFFFFFFFh";
    }
}

/// Namespace Write Protection Capabilities (NWPC).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WriteProtectCapabilities {
    /// No Write Protect and Write Protect Support (NWPWPS).
    pub write_protect: bool,
    /// Write Protect Until Power Cycle Support (WPUPCS).
    pub until_power_cycle: bool,
    /// Permanent Write Protect Support (PWPS).
    pub permanent: bool,
    #[bits(5)]
    __: u8,
}

/// SGL Support (SGLS).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SglSupport {
    /// SGL Supported (SGLS).
    #[bits(2)]
    pub support: SglAlignment,
    /// Keyed SGL Data Block Descriptor (KSDB).
    pub keyed: bool,
    #[bits(5)]
    __: u8,
    /// SGL Descriptor Threshold (SDT): recommended largest number of descriptors; 0 is not reported.
    pub threshold: u8,
    /// SGL Bit Bucket Descriptor Support (SBBDS).
    pub bit_bucket: bool,
    /// A byte aligned contiguous metadata buffer is supported with SGLs (MSDS).
    pub metadata_contiguous: bool,
    /// SGLs longer than the data to transfer are supported (SDLL).
    pub longer_than_data: bool,
    /// MPTR may point to an SGL descriptor (MSGLS).
    pub metadata_sgl: bool,
    /// The Address field may hold an offset (SAOS).
    pub offset: bool,
    /// Transport SGL Data Block Descriptor Support (TSDBDS).
    pub transport: bool,
    #[bits(10)]
    __: u16,
}

wire_values! {
    /// Whether and with which alignment SGLs are supported (SGLS bits 1:0; Base 5.1.13.2.1).
    SglAlignment(u8) {
        NOT_SUPPORTED = 0, "SGLs are not supported";
        BYTE = 1, "SGLs are supported, without alignment or granularity requirement";
        DWORD = 2, "SGLs are supported, with dword alignment and granularity";
    }
}

/// Power State Descriptor (Base 5.1.13.2.1, Figure "Power State Descriptor Data Structure").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PowerState {
    /// Maximum Power (MP) in 10 mW, or 0.1 mW if MXPS is set.
    pub mp: u16,
    _rsvd2: u8,
    /// MXPS and NOPS.
    pub flags: PowerFlags,
    /// Entry Latency (ENLAT) in microseconds.
    pub enlat: u32,
    /// Exit Latency (EXLAT) in microseconds.
    pub exlat: u32,
    /// Relative Read Throughput (RRT), 0 is best.
    pub rrt: u8,
    /// Relative Read Latency (RRL), 0 is best.
    pub rrl: u8,
    /// Relative Write Throughput (RWT), 0 is best.
    pub rwt: u8,
    /// Relative Write Latency (RWL), 0 is best.
    pub rwl: u8,
    /// Idle Power (IDLP) in units of IPS.
    pub idlp: u16,
    /// Idle Power Scale (IPS), bits 7:6.
    pub ips: u8,
    _rsvd19: u8,
    /// Active Power (ACTP) in units of APS.
    pub actp: u16,
    /// Active Power Workload (APW), bits 2:0, and Active Power Scale (APS), bits 7:6.
    pub apws: u8,
    /// Emergency Power Fail Recovery Time (EPFRT).
    pub epfrt: u8,
    /// Forced Quiescence Vault Time (FQVT).
    pub fqvt: u8,
    /// Emergency Power Fail Vault Time (EPFVT).
    pub epfvt: u8,
    /// Scales of EPFRT (bits 3:0) and FQVT (bits 7:4).
    pub epfrts_fqvts: u8,
    /// Scale of EPFVT, bits 3:0.
    pub epfvts: u8,
    _rsvd28: [u8; 4],
}

/// Flags of a power state.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct PowerFlags {
    /// Max Power Scale (MXPS): MP is in 0.1 mW.
    pub mxps: bool,
    /// Non-Operational State (NOPS).
    pub nops: bool,
    #[bits(6)]
    __: u8,
}

/// I/O Command Set specific Identify Controller, NVM command set (CNS 06h, CSI 00h; NVM 4.1.5.4).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IdentifyControllerNvm {
    /// Verify Size Limit (VSL): 2^n units of the minimum memory page size; 0 is no limit.
    pub vsl: u8,
    /// Write Zeroes Size Limit (WZSL), as VSL.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit (WUSL), as VSL.
    pub wusl: u8,
    /// Dataset Management Ranges Limit (DMRL); 0 is no limit.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit (DMRSL) in logical blocks; 0 is no limit.
    pub dmrsl: u32,
    /// Dataset Management Size Limit (DMSL) in logical blocks; 0 is no limit.
    pub dmsl: u64,
    /// Key Per I/O Capabilities (KPIOCAP).
    pub kpiocap: u8,
    /// Write Zeroes With Deallocate Size Limit (WZDSL), as VSL.
    pub wzdsl: u8,
    /// Admin Optional Command Support (AOCS).
    pub aocs: u16,
    /// Version (VER) of the NVM command set.
    pub ver: Version,
    /// LBA Migration Queue Format (LBAMQF).
    pub lbamqf: u8,
    _rsvd25: [u8; 4071],
}

assert_size!(IdentifyController: 4096, FabricsAttributes: 256, PowerState: 32, IdentifyControllerNvm: 4096);
