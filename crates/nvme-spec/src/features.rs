//! Features: identifiers, dwords of Get Features and Set Features, and data (Base 5.1.11, 5.1.25; NVM 4.1.3).

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

wire_values! {
    /// Feature Identifier (FID; Base 5.1.25, Figure "Feature Identifiers"; NVM 4.1.3).
    FeatureId(u8) {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIGURATION = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY_NORMAL = 0x0a, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIGURATION = 0x0b, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE_TRANSITION = 0x0c, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0d, "Host Memory Buffer";
        TIMESTAMP = 0x0e, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0f, "Keep Alive Timer";
        HOST_CONTROLLED_THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_INTERVAL = 0x15, "LBA Status Information Report Interval";
        HOST_BEHAVIOR_SUPPORT = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SPINUP_CONTROL = 0x1a, "Spinup Control";
        POWER_LOSS_SIGNALING = 0x1b, "Power Loss Signaling Config";
        PERFORMANCE_CHARACTERISTICS = 0x1c, "Performance Characteristics";
        FLEXIBLE_DATA_PLACEMENT = 0x1d, "Flexible Data Placement";
        FLEXIBLE_DATA_PLACEMENT_EVENTS = 0x1e, "Flexible Data Placement Events";
        NAMESPACE_ADMIN_LABEL = 0x1f, "Namespace Admin Label";
        CONTROLLER_DATA_QUEUE = 0x21, "Controller Data Queue";
        ENHANCED_CONTROLLER_METADATA = 0x7d, "Enhanced Controller Metadata";
        CONTROLLER_METADATA = 0x7e, "Controller Metadata";
        NAMESPACE_METADATA = 0x7f, "Namespace Metadata";
        SOFTWARE_PROGRESS_MARKER = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECTION = 0x84, "Namespace Write Protection Config";
        BOOT_PARTITION_WRITE_PROTECTION = 0x85, "Boot Partition Write Protection Config";
    }
}

wire_values! {
    /// Select (SEL) of Get Features (Base 5.1.11).
    FeatureSelect(u8) {
        CURRENT = 0, "Current";
        DEFAULT = 1, "Default";
        SAVED = 2, "Saved";
        SUPPORTED_CAPABILITIES = 3, "Supported Capabilities";
    }
}

/// Get Features, Command Dword 10 (Base 5.1.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct GetFeaturesCdw10 {
    /// Feature Identifier (FID).
    #[bits(8)]
    pub fid: FeatureId,
    /// Select (SEL).
    #[bits(3)]
    pub sel: FeatureSelect,
    #[bits(21)]
    __: u32,
}

/// Set Features, Command Dword 10 (Base 5.1.25).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SetFeaturesCdw10 {
    /// Feature Identifier (FID).
    #[bits(8)]
    pub fid: FeatureId,
    #[bits(23)]
    __: u32,
    /// Save (SV): keep the value across power states and resets.
    pub sv: bool,
}

/// Completion Dword 0 of Get Features with Select Supported Capabilities (Base 5.1.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FeatureCapabilities {
    /// The feature is saveable.
    pub saveable: bool,
    /// The feature is namespace specific.
    pub namespace_specific: bool,
    /// The feature is changeable.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

/// Arbitration (FID 01h), Command Dword 11 (Base 5.1.25.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ArbitrationFeature {
    /// Arbitration Burst (AB): 2^n commands; 7 is no limit.
    #[bits(3)]
    pub ab: u8,
    #[bits(5)]
    __: u8,
    /// Low Priority Weight (LPW), 0's based.
    pub lpw_z: u8,
    /// Medium Priority Weight (MPW), 0's based.
    pub mpw_z: u8,
    /// High Priority Weight (HPW), 0's based.
    pub hpw_z: u8,
}

/// Power Management (FID 02h), Command Dword 11 (Base 5.1.25.1.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct PowerManagementFeature {
    /// Power State (PS).
    #[bits(5)]
    pub ps: u8,
    /// Workload Hint (WH).
    #[bits(3)]
    pub wh: u8,
    #[bits(24)]
    __: u32,
}

/// Temperature Threshold (FID 04h), Command Dword 11 (Base 5.1.25.1.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct TemperatureThresholdFeature {
    /// Temperature Threshold (TMPTH) in kelvins.
    pub tmpth: u16,
    /// Threshold Temperature Select (TMPSEL): 0 composite, 1 to 8 sensor, Fh all (Set Features).
    #[bits(4)]
    pub tmpsel: u8,
    /// Threshold Type Select (THSEL).
    #[bits(2)]
    pub thsel: ThresholdType,
    /// Temperature Threshold Hysteresis (TMPTHH) in kelvins.
    #[bits(3)]
    pub tmpthh: u8,
    #[bits(7)]
    __: u8,
}

wire_values! {
    /// Threshold Type Select (THSEL; Base 5.1.25.1.3).
    ThresholdType(u8) {
        OVER = 0, "Over Temperature Threshold";
        UNDER = 1, "Under Temperature Threshold";
    }
}

/// Error Recovery (FID 05h), Command Dword 11 (NVM 4.1.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ErrorRecoveryFeature {
    /// Time Limited Error Recovery (TLER) in 100 ms; 0 is no limit.
    pub tler: u16,
    /// Deallocated or Unwritten Logical Block Error Enable (DULBE).
    pub dulbe: bool,
    #[bits(15)]
    __: u16,
}

/// Volatile Write Cache (FID 06h), Command Dword 11 (Base 5.1.25.1.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WriteCacheFeature {
    /// Volatile Write Cache Enable (WCE).
    pub wce: bool,
    #[bits(31)]
    __: u32,
}

/// Number of Queues (FID 07h): requested in Command Dword 11, allocated in completion Dword 0 (Base 5.1.25.2.1). FFFFh is
/// an invalid request.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NumberOfQueuesFeature {
    /// Number of I/O Submission Queues (NSQR, NSQA), 0's based.
    pub nsq_z: u16,
    /// Number of I/O Completion Queues (NCQR, NCQA), 0's based.
    pub ncq_z: u16,
}

/// Interrupt Coalescing (FID 08h), Command Dword 11 (Base 5.1.25.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct InterruptCoalescingFeature {
    /// Aggregation Threshold (THR) in completion queue entries, 0's based.
    pub thr_z: u8,
    /// Aggregation Time (TIME) in 100 µs; 0 is no delay.
    pub time: u8,
    __: u16,
}

/// Interrupt Vector Configuration (FID 09h), Command Dword 11 (Base 5.1.25.2.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct InterruptVectorFeature {
    /// Interrupt Vector (IV).
    pub iv: u16,
    /// Coalescing Disable (CD).
    pub cd: bool,
    #[bits(15)]
    __: u16,
}

/// Write Atomicity Normal (FID 0Ah), Command Dword 11 (NVM 4.1.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WriteAtomicityFeature {
    /// Disable Normal (DN): only AWUPF and NAWUPF are asked for.
    pub dn: bool,
    #[bits(31)]
    __: u32,
}

/// Asynchronous Event Configuration (FID 0Bh), Command Dword 11 (Base 5.1.25.1.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AsyncEventFeature {
    /// SMART / Health Critical Warnings (SHCW) to report.
    #[bits(8)]
    pub critical_warnings: crate::log::CriticalWarning,
    /// Attached Namespace Attribute Notices.
    pub namespace_attribute: bool,
    /// Firmware Activation Notices.
    pub firmware_activation: bool,
    /// Telemetry Log Notices.
    pub telemetry: bool,
    /// ANA Change Notices.
    pub ana_change: bool,
    /// Predictable Latency Event Aggregate Log Change Notices.
    pub predictable_latency: bool,
    /// LBA Status Information Alert Notices.
    pub lba_status: bool,
    /// Endurance Group Event Aggregate Log Change Notices.
    pub endurance_group: bool,
    /// Normal NVM Subsystem Shutdown.
    pub subsystem_shutdown: bool,
    /// Temperature Threshold Hysteresis Recovery.
    pub temperature_hysteresis: bool,
    /// Reachability Association.
    pub reachability_association: bool,
    /// Reachability Group.
    pub reachability_group: bool,
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

/// Timestamp (FID 0Eh), data (Base 5.1.25.1.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Timestamp {
    /// Milliseconds since 1970, or since the last controller level reset if nobody set them; 48 bits.
    pub millis: [u8; 6],
    /// Attributes.
    pub attributes: TimestampAttributes,
    _rsvd7: u8,
}

impl Timestamp {
    /// A timestamp of the low 48 bits of `millis`.
    #[must_use]
    pub const fn new(millis: u64, attributes: TimestampAttributes) -> Self {
        let (mut low, bytes) = ([0; 6], millis.to_le_bytes());
        low.copy_from_slice(bytes.split_at(6).0);
        Self { millis: low, attributes, _rsvd7: 0 }
    }

    /// The milliseconds as a number.
    #[must_use]
    pub const fn millis(self) -> u64 {
        let mut bytes = [0; 8];
        bytes.split_at_mut(6).0.copy_from_slice(&self.millis);
        u64::from_le_bytes(bytes)
    }
}

/// Attributes of a timestamp (Base 5.1.25.1.7).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct TimestampAttributes {
    /// Synch: the controller may have stopped counting during vendor specific intervals.
    pub stopped: bool,
    /// Timestamp Origin.
    #[bits(3)]
    pub origin: TimestampOrigin,
    #[bits(4)]
    __: u8,
}

wire_values! {
    /// Timestamp Origin (Base 5.1.25.1.7).
    TimestampOrigin(u8) {
        RESET = 0, "The Timestamp field was initialized to 0h by a Controller Level Reset";
        SET_FEATURES = 1, "The Timestamp field was initialized with a Set Features command";
    }
}

/// Keep Alive Timer (FID 0Fh), Command Dword 11 (Base 5.1.25.1.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub struct KeepAliveFeature {
    /// Keep Alive Timeout (KATO) in milliseconds; 0 is off.
    pub kato: u32,
}

/// Host Behavior Support (FID 16h), data (Base 5.1.25.1.14). Bytes are 0 or 1.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct HostBehavior {
    /// Advanced Command Retry Enable (ACRE).
    pub acre: u8,
    /// Extended Telemetry Data Area 4 Supported (ETDAS).
    pub etdas: u8,
    /// LBA Format Extension Enable (LBAFEE).
    pub lbafee: u8,
    /// Host Dispersed Namespace Support (HDISNS).
    pub hdisns: u8,
    /// Copy Descriptor Formats Enable (CDFE), bits 2 to 4 for formats 2h to 4h.
    pub cdfe: u16,
    _rsvd6: [u8; 506],
}

/// I/O Command Set Profile (FID 19h), Command Dword 11 (Base 5.1.25.1.17).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct IoCommandSetProfileFeature {
    /// I/O Command Set Combination Index (IOCSCI).
    #[bits(9)]
    pub iocsci: u16,
    #[bits(23)]
    __: u32,
}

/// Software Progress Marker (FID 80h), Command Dword 11 (Base 5.1.25.1.27).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SoftwareProgressFeature {
    /// Pre-boot Software Load Count (PBSLC).
    pub pbslc: u8,
    #[bits(24)]
    __: u32,
}

/// Host Identifier (FID 81h), Command Dword 11; data is 8 or 16 bytes (Base 5.1.25.1.28).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct HostIdentifierFeature {
    /// Enable Extended Host Identifier (EXHID): 128 bits.
    pub exhid: bool,
    #[bits(31)]
    __: u32,
}

/// Reservation Notification Mask (FID 82h), Command Dword 11; a set bit masks (Base 5.1.25.1.29).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReservationMaskFeature {
    #[bits(1)]
    __: u8,
    /// Mask Registration Preempted Notification (REGPRE).
    pub regpre: bool,
    /// Mask Reservation Released Notification (RESREL).
    pub resrel: bool,
    /// Mask Reservation Preempted Notification (RESPRE).
    pub respre: bool,
    #[bits(28)]
    __: u32,
}

/// Reservation Persistence (FID 83h), Command Dword 11 (Base 5.1.25.1.30).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReservationPersistenceFeature {
    /// Persist Through Power Loss (PTPL).
    pub ptpl: bool,
    #[bits(31)]
    __: u32,
}

/// Namespace Write Protection Config (FID 84h), Command Dword 11 (Base 5.1.25.1.31).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct WriteProtectionFeature {
    /// Write Protection State.
    #[bits(3)]
    pub state: WriteProtectionState,
    #[bits(29)]
    __: u32,
}

wire_values! {
    /// Write Protection State (Base 5.1.25.1.31, 8.1.16).
    WriteProtectionState(u8) {
        NONE = 0, "No Write Protect";
        WRITE_PROTECT = 1, "Write Protect";
        UNTIL_POWER_CYCLE = 2, "Write Protect Until Power Cycle";
        PERMANENT = 3, "Permanent Write Protect";
    }
}

assert_size!(Timestamp: 8, KeepAliveFeature: 4, HostBehavior: 512);
