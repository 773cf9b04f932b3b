//! Log pages and Get Log Page's dwords (Base 5.1.12).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::{CommandId, Csi, NamespaceId, QueueId};
use crate::identify::NamespaceList;
use crate::status::StatusField;

wire_values! {
    /// Log Page Identifier (LID; Base 5.1.12.1, Figure "Log Page Identifiers").
    LogId(u8) {
        SUPPORTED = 0x00, "Supported Log Pages";
        ERROR = 0x01, "Error Information";
        SMART = 0x02, "SMART / Health Information";
        FIRMWARE_SLOT = 0x03, "Firmware Slot Information";
        CHANGED_NAMESPACES = 0x04, "Changed Attached Namespace List";
        COMMAND_EFFECTS = 0x05, "Commands Supported and Effects";
        SELF_TEST = 0x06, "Device Self-test";
        TELEMETRY_HOST = 0x07, "Telemetry Host-Initiated";
        TELEMETRY_CONTROLLER = 0x08, "Telemetry Controller-Initiated";
        ENDURANCE_GROUP = 0x09, "Endurance Group Information";
        PREDICTABLE_LATENCY_SET = 0x0a, "Predictable Latency Per NVM Set";
        PREDICTABLE_LATENCY_AGGREGATE = 0x0b, "Predictable Latency Event Aggregate";
        ANA = 0x0c, "Asymmetric Namespace Access";
        PERSISTENT_EVENT = 0x0d, "Persistent Event Log";
        LBA_STATUS = 0x0e, "LBA Status Information";
        ENDURANCE_GROUP_AGGREGATE = 0x0f, "Endurance Group Event Aggregate";
        MEDIA_UNIT_STATUS = 0x10, "Media Unit Status";
        CAPACITY_CONFIGURATIONS = 0x11, "Supported Capacity Configuration List";
        FEATURE_EFFECTS = 0x12, "Feature Identifiers Supported and Effects";
        MI_EFFECTS = 0x13, "NVMe-MI Commands Supported and Effects";
        LOCKDOWN = 0x14, "Command and Feature Lockdown";
        BOOT_PARTITION = 0x15, "Boot Partition";
        ROTATIONAL_MEDIA = 0x16, "Rotational Media Information";
        DISPERSED_NAMESPACE = 0x17, "Dispersed Namespace Participating NVM Subsystems";
        MANAGEMENT_ADDRESSES = 0x18, "Management Address List";
        PHY_RX_EOM = 0x19, "Physical Interface Receiver Eye Opening Measurement";
        REACHABILITY_GROUPS = 0x1a, "Reachability Groups";
        REACHABILITY_ASSOCIATIONS = 0x1b, "Reachability Associations";
        CHANGED_ALLOCATED_NAMESPACES = 0x1c, "Changed Allocated Namespace List";
        DISCOVERY = 0x70, "Discovery";
        RESERVATION = 0x80, "Reservation Notification";
        SANITIZE = 0x81, "Sanitize Status";
    }
}

/// Get Log Page, Command Dword 10 (Base 5.1.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct GetLogPageCdw10 {
    /// Log Page Identifier (LID).
    #[bits(8)]
    pub lid: LogId,
    /// Log Specific Parameter (LSP).
    #[bits(7)]
    pub lsp: u8,
    /// Retain Asynchronous Event (RAE).
    pub rae: bool,
    /// Number of Dwords Lower (NUMDL), of a 0's based number.
    pub numdl_z: u16,
}

/// Get Log Page, Command Dword 11 (Base 5.1.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct GetLogPageCdw11 {
    /// Number of Dwords Upper (NUMDU), of a 0's based number.
    pub numdu_z: u16,
    /// Log Specific Identifier (LSI).
    pub lsi: u16,
}

/// Get Log Page, Command Dword 14 (Base 5.1.12). Dwords 12 and 13 are the Log Page Offset.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct GetLogPageCdw14 {
    /// UUID Index (UIDX).
    #[bits(7)]
    pub uidx: u8,
    #[bits(16)]
    __: u16,
    /// Offset Type (OT): the offset is an index of data structures, not bytes.
    pub ot: bool,
    /// Command Set Identifier (CSI).
    #[bits(8)]
    pub csi: Csi,
}

/// The bytes that Get Log Page asks for (Base 5.1.12): at most 2^34.
#[must_use]
pub const fn log_page_bytes(cdw10: GetLogPageCdw10, cdw11: GetLogPageCdw11) -> u64 {
    ((cdw11.numdu_z() as u64) << 16 | cdw10.numdl_z() as u64) * 4 + 4
}

/// Supported Log Pages (LID 00h; Base 5.1.12.1.1).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SupportedLogPages {
    /// LID Supported and Effects of each log page identifier.
    pub lids: [LogPageSupport; 256],
}

/// LID Supported and Effects (Base 5.1.12.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct LogPageSupport {
    /// LID Supported (LSUPP).
    pub lsupp: bool,
    /// Index Offset Supported (IOS).
    pub ios: bool,
    #[bits(14)]
    __: u16,
    /// LID Specific Parameter (LIDSP).
    pub lidsp: u16,
}

/// Error Information Log Entry (LID 01h; Base 5.1.12.1.2). The newest entry comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ErrorEntry {
    /// Error Count (ECNT), unique and ascending; 0 is an invalid entry.
    pub ecnt: u64,
    /// Submission Queue ID (SQID); FFFFh if the error is not of one command.
    pub sqid: QueueId,
    /// Command ID (CID); FFFFh if the error is not of one command.
    pub cid: CommandId,
    /// Status Info (SI), with Phase Tag.
    pub status: StatusField,
    /// Parameter Error Location (PEL).
    pub pel: ParameterErrorLocation,
    /// First LBA with an error.
    pub lba: u64,
    /// Namespace (NSID).
    pub nsid: NamespaceId,
    /// Vendor Specific Information Available (VSIA): the log page that has it.
    pub vsia: u8,
    /// Transport Type (TRTYPE); 0 for PCIe.
    pub trtype: u8,
    /// Command Set Indicator (CSI), if the entry's version says so.
    pub csi: Csi,
    /// Opcode (OPC), if the entry's version says so.
    pub opc: u8,
    /// Command Specific Information (CSINFO).
    pub csinfo: u64,
    /// Transport Type Specific Information (TTSI).
    pub ttsi: u16,
    _rsvd42: [u8; 21],
    /// Log Page Version (LPVER): 1 if CSI and OPC are valid.
    pub lpver: u8,
}

/// Parameter Error Location (Base 5.1.12.1.2); FFFFh if the error is of no parameter.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ParameterErrorLocation {
    /// Byte in the command, 0 to 63.
    pub byte: u8,
    /// Bit in the byte.
    #[bits(3)]
    pub bit: u8,
    #[bits(5)]
    __: u8,
}

impl ParameterErrorLocation {
    /// The error is not specific to a parameter of the command.
    pub const NONE: Self = Self::from_bits(0xffff);

    /// The parameter whose lowest bit is `bit` of Command Dword `dword`.
    ///
    /// # Panics
    /// If a command has no such bit.
    #[must_use]
    pub const fn dword(dword: u8, bit: u8) -> Self {
        assert!(dword < 16 && bit < 32, "a command has 16 dwords");
        Self::new().with_byte(dword * 4 + bit / 8).with_bit(bit % 8)
    }
}

/// SMART / Health Information (LID 02h; Base 5.1.12.1.3).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SmartLog {
    /// Critical Warning (CW).
    pub critical_warning: CriticalWarning,
    /// Composite Temperature (CTEMP) in kelvins, at an odd offset.
    pub composite_temperature: U16,
    /// Available Spare (AVSP) in percent.
    pub available_spare: u8,
    /// Available Spare Threshold (AVSPT) in percent.
    pub available_spare_threshold: u8,
    /// Percentage Used (PUSED), up to 255.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary (EGCWS).
    pub endurance_group_warning: u8,
    _rsvd7: [u8; 25],
    /// Data Units Read (DUR) in 1000 units of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data Units Written (DUW) in 1000 units of 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Host Read Commands (HRC).
    pub host_reads: U128,
    /// Host Write Commands (HWC).
    pub host_writes: U128,
    /// Controller Busy Time (CBT) in minutes.
    pub controller_busy_minutes: U128,
    /// Power Cycles (PWRC).
    pub power_cycles: U128,
    /// Power On Hours (POH).
    pub power_on_hours: U128,
    /// Unexpected Power Losses (UPL, once Unsafe Shutdowns).
    pub unsafe_shutdowns: U128,
    /// Media and Data Integrity Errors (MDIE).
    pub media_errors: U128,
    /// Number of Error Information Log Entries (NEILE) over the controller's life.
    pub error_log_entries: U128,
    /// Warning Composite Temperature Time (WCTT) in minutes.
    pub warning_temperature_minutes: u32,
    /// Critical Composite Temperature Time (CCTT) in minutes.
    pub critical_temperature_minutes: u32,
    /// Temperature Sensors 1 to 8 (TSEN1 to TSEN8) in kelvins; 0 is no sensor.
    pub temperature_sensors: [u16; 8],
    /// Thermal Management Temperature 1 and 2 Transition Count.
    pub thermal_transitions: [u32; 2],
    /// Total Time For Thermal Management Temperature 1 and 2 in seconds.
    pub thermal_seconds: [u32; 2],
    _rsvd232: [u8; 280],
}

/// Critical Warning (Base 5.1.12.1.3).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CriticalWarning {
    /// Available Spare Capacity Below Threshold (ASCBT).
    pub spare: bool,
    /// Temperature Threshold Condition (TTC).
    pub temperature: bool,
    /// NVM Subsystem Degraded Reliability (NDR).
    pub degraded: bool,
    /// All Media Read-Only (AMRO).
    pub read_only: bool,
    /// Volatile Memory Backup Failed (VMBF).
    pub backup_failed: bool,
    /// Persistent Memory Region Read-Only (PMRRO).
    pub pmr_read_only: bool,
    #[bits(2)]
    __: u8,
}

/// Firmware Slot Information (LID 03h; Base 5.1.12.1.4).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct FirmwareSlotLog {
    /// Active Firmware Info (AFI).
    pub afi: ActiveFirmware,
    _rsvd1: [u8; 7],
    /// Firmware Revision for Slots 1 to 7 (FRS1 to FRS7), ASCII; zeroes if the slot is empty.
    pub frs: [[u8; 8]; 7],
    _rsvd64: [u8; 448],
}

/// Active Firmware Info (Base 5.1.12.1.4).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ActiveFirmware {
    /// Slot of the running firmware.
    #[bits(3)]
    pub active_slot: u8,
    #[bits(1)]
    __: u8,
    /// Slot to activate at the next controller level reset; 0 is none.
    #[bits(3)]
    pub next_slot: u8,
    #[bits(1)]
    __: u8,
}

/// Changed Attached Namespace List (LID 04h; Base 5.1.12.1.5): a namespace list, or one entry FFFFFFFFh if more than
/// 1024 changed.
pub type ChangedNamespaces = NamespaceList;

/// Commands Supported and Effects (LID 05h; Base 5.1.12.1.6).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CommandEffectsLog {
    /// Admin Command Supported (ACS), by opcode.
    pub admin: [CommandEffects; 256],
    /// I/O Command Supported (IOCS), by opcode.
    pub io: [CommandEffects; 256],
    _rsvd2048: [u8; 2048],
}

/// Commands Supported and Effects data structure (Base 5.1.12.1.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CommandEffects {
    /// Command Supported (CSUPP).
    pub csupp: bool,
    /// Logical Block Content Change (LBCC).
    pub lbcc: bool,
    /// Namespace Capability Change (NCC).
    pub ncc: bool,
    /// Namespace Inventory Change (NIC).
    pub nic: bool,
    /// Controller Capability Change (CCC).
    pub ccc: bool,
    #[bits(9)]
    __: u16,
    /// Command Submission and Execution Relaxations (CSER).
    #[bits(2)]
    pub cser: u8,
    /// Command Submission and Execution (CSE).
    #[bits(3)]
    pub cse: SubmissionRestriction,
    /// UUID Selection Supported (USS).
    pub uss: bool,
    /// Command Scope (CSP).
    #[bits(12)]
    pub scope: CommandScope,
}

wire_values! {
    /// Command Submission and Execution (CSE; Base 5.1.12.1.6).
    SubmissionRestriction(u8) {
        NONE = 0, "No command submission or execution restriction";
        NAMESPACE = 1, "No other command for the same namespace is outstanding";
        ANY = 2, "No other command for any namespace is outstanding";
    }
}

/// Command Scope (CSP; Base 5.1.12.1.6); zero is not reported.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CommandScope {
    /// Namespace Scope.
    pub namespace: bool,
    /// Controller Scope.
    pub controller: bool,
    /// NVM Set Scope.
    pub nvm_set: bool,
    /// Endurance Group Scope.
    pub endurance_group: bool,
    /// Domain Scope.
    pub domain: bool,
    /// NVM Subsystem Scope.
    pub subsystem: bool,
    #[bits(10)]
    __: u16,
}

/// Reservation Notification (LID 80h; Base 5.1.12.1.32).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ReservationNotification {
    /// Log Page Count (LPC): increments with every notification, skipping 0; 0 with an empty log page.
    pub lpc: u64,
    /// Reservation Notification Log Page Type (RNLPT).
    pub kind: ReservationNotificationType,
    /// Number of Available Log Pages (NALP) after this one.
    pub available: u8,
    _rsvd10: [u8; 2],
    /// Namespace ID (NSID).
    pub nsid: NamespaceId,
    _rsvd16: [u8; 48],
}

wire_values! {
    /// Reservation Notification Log Page Type (Base 5.1.12.1.32).
    ReservationNotificationType(u8) {
        EMPTY = 0, "Empty Log Page";
        REGISTRATION_PREEMPTED = 1, "Registration Preempted";
        RESERVATION_RELEASED = 2, "Reservation Released";
        RESERVATION_PREEMPTED = 3, "Reservation Preempted";
    }
}

assert_size!(
    SupportedLogPages: 1024, ErrorEntry: 64, SmartLog: 512, FirmwareSlotLog: 512, CommandEffectsLog: 4096,
    ReservationNotification: 64,
);
