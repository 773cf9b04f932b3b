//! Command dwords and data structures of admin commands (Base 5.1, 5.2). Identify's, Get Log Page's and the features'
//! data are in their own modules.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::{CommandId, ControllerId, Csi, QueueId};
use crate::identify::Cns;
use crate::log::LogId;

/// Create I/O Submission or Completion Queue, Command Dword 10 (Base 5.2.1, 5.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CreateQueueCdw10 {
    /// Queue Identifier (QID).
    #[bits(16)]
    pub qid: QueueId,
    /// Queue Size (QSIZE) in entries, 0's based; 0h is invalid.
    pub qsize_z: u16,
}

/// Create I/O Completion Queue, Command Dword 11 (Base 5.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CreateCqCdw11 {
    /// Physically Contiguous (PC).
    pub pc: bool,
    /// Interrupts Enabled (IEN).
    pub ien: bool,
    /// Reserved.
    #[bits(14)]
    pub reserved: u16,
    /// Interrupt Vector (IV).
    pub iv: u16,
}

/// Create I/O Submission Queue, Command Dword 11 (Base 5.2.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct CreateSqCdw11 {
    /// Physically Contiguous (PC).
    pub pc: bool,
    /// Queue Priority (QPRIO).
    #[bits(2)]
    pub qprio: QueuePriority,
    /// Reserved.
    #[bits(13)]
    pub reserved: u16,
    /// Completion Queue Identifier (CQID).
    #[bits(16)]
    pub cqid: QueueId,
}

wire_values! {
    /// Queue Priority (QPRIO; Base 5.2.2).
    QueuePriority(u8) {
        URGENT = 0, "Urgent";
        HIGH = 1, "High";
        MEDIUM = 2, "Medium";
        LOW = 3, "Low";
    }
}

/// Delete I/O Submission or Completion Queue, Command Dword 10 (Base 5.2.3, 5.2.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DeleteQueueCdw10 {
    /// Queue Identifier (QID).
    #[bits(16)]
    pub qid: QueueId,
    /// Reserved.
    pub reserved: u16,
}

/// Abort, Command Dword 10 (Base 5.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AbortCdw10 {
    /// Submission Queue Identifier (SQID).
    #[bits(16)]
    pub sqid: QueueId,
    /// Command Identifier (CID).
    #[bits(16)]
    pub cid: CommandId,
}

/// Abort, completion Dword 0 (Base 5.1.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AbortResult {
    /// Immediate Abort Not Performed (IANP): set when the command was not aborted before this completion.
    pub not_aborted: bool,
    #[bits(31)]
    __: u32,
}

/// Asynchronous Event Request, completion Dword 0 (Base 5.1.2). Dword 1 is the event specific parameter.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AsyncEventDw0 {
    /// Asynchronous Event Type (AET).
    #[bits(3)]
    pub kind: AsyncEventType,
    #[bits(5)]
    __: u8,
    /// Asynchronous Event Information (AEI); its meaning depends on the type.
    pub info: u8,
    /// Log Page Identifier (LID) to read, which clears the event.
    #[bits(8)]
    pub lid: LogId,
    __: u8,
}

wire_values! {
    /// Asynchronous Event Type (AET; Base 5.1.2.1).
    AsyncEventType(u8) {
        ERROR = 0, "Error status";
        SMART = 1, "SMART / Health status";
        NOTICE = 2, "Notice";
        IMMEDIATE = 3, "Immediate";
        ONE_SHOT = 4, "One-Shot";
        IO_COMMAND_SPECIFIC = 6, "I/O Command specific status";
        VENDOR_SPECIFIC = 7, "Vendor specific";
    }
}

/// One asynchronous event: its type, information and log page (Base 5.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type.
    pub kind: AsyncEventType,
    /// Asynchronous Event Information.
    pub info: u8,
    /// Log page with the details.
    pub lid: LogId,
}

impl AsyncEvent {
    /// Write to a doorbell of a queue that does not exist.
    pub const INVALID_DOORBELL_REGISTER: Self = Self::error(0x00);
    /// Write of an invalid value to a doorbell.
    pub const INVALID_DOORBELL_VALUE: Self = Self::error(0x01);
    /// Diagnostic failure.
    pub const DIAGNOSTIC_FAILURE: Self = Self::error(0x02);
    /// Persistent internal error.
    pub const PERSISTENT_INTERNAL_ERROR: Self = Self::error(0x03);
    /// Transient internal error.
    pub const TRANSIENT_INTERNAL_ERROR: Self = Self::error(0x04);
    /// NVM subsystem reliability.
    pub const NVM_SUBSYSTEM_RELIABILITY: Self = Self::smart(0x00);
    /// Temperature threshold.
    pub const TEMPERATURE_THRESHOLD: Self = Self::smart(0x01);
    /// Spare below threshold.
    pub const SPARE_BELOW_THRESHOLD: Self = Self::smart(0x02);
    /// Attached Namespace Attribute Changed.
    pub const NAMESPACE_ATTRIBUTE_CHANGED: Self = Self::notice(0x00, LogId::CHANGED_NAMESPACES);
    /// Firmware Activation Starting.
    pub const FIRMWARE_ACTIVATION_STARTING: Self = Self::notice(0x01, LogId::FIRMWARE_SLOT);
    /// Asymmetric Namespace Access Change.
    pub const ANA_CHANGE: Self = Self::notice(0x03, LogId::ANA);
    /// Normal NVM Subsystem Shutdown.
    pub const NORMAL_SUBSYSTEM_SHUTDOWN: Self = Self { kind: AsyncEventType::IMMEDIATE, info: 0x00, lid: LogId::SUPPORTED };
    /// Reservation Log Page Available.
    pub const RESERVATION_LOG_PAGE_AVAILABLE: Self =
        Self { kind: AsyncEventType::IO_COMMAND_SPECIFIC, info: 0x00, lid: LogId::RESERVATION };

    const fn error(info: u8) -> Self {
        Self { kind: AsyncEventType::ERROR, info, lid: LogId::ERROR }
    }

    const fn smart(info: u8) -> Self {
        Self { kind: AsyncEventType::SMART, info, lid: LogId::SMART }
    }

    const fn notice(info: u8, lid: LogId) -> Self {
        Self { kind: AsyncEventType::NOTICE, info, lid }
    }

    /// As completion Dword 0.
    #[must_use]
    pub const fn dw0(self) -> AsyncEventDw0 {
        AsyncEventDw0::new().with_kind(self.kind).with_info(self.info).with_lid(self.lid)
    }
}

impl From<AsyncEventDw0> for AsyncEvent {
    fn from(dw0: AsyncEventDw0) -> Self {
        Self { kind: dw0.kind(), info: dw0.info(), lid: dw0.lid() }
    }
}

/// Identify, Command Dword 10 (Base 5.1.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct IdentifyCdw10 {
    /// Controller or Namespace Structure (CNS).
    #[bits(8)]
    pub cns: Cns,
    __: u8,
    /// Controller Identifier (CNTID).
    #[bits(16)]
    pub cntid: ControllerId,
}

/// Identify, Command Dword 11 (Base 5.1.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct IdentifyCdw11 {
    /// CNS Specific Identifier (CNSSID).
    pub cnssid: u16,
    __: u8,
    /// Command Set Identifier (CSI).
    #[bits(8)]
    pub csi: Csi,
}

/// Command Dword 14 of Identify, Get Features and Set Features (Base 5.1.11, 5.1.13, 5.1.25).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct UuidCdw14 {
    /// UUID Index (UIDX).
    #[bits(7)]
    pub uidx: u8,
    #[bits(25)]
    __: u32,
}

/// Namespace Management, Command Dword 10 (Base 5.1.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceManagementCdw10 {
    /// Select (SEL).
    #[bits(4)]
    pub sel: NamespaceManagementSelect,
    #[bits(28)]
    __: u32,
}

/// Namespace Management, Command Dword 11 (Base 5.1.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceManagementCdw11 {
    #[bits(24)]
    __: u32,
    /// Command Set Identifier (CSI) of the namespace to create.
    #[bits(8)]
    pub csi: Csi,
}

wire_values! {
    /// Namespace Management's Select (Base 5.1.21).
    NamespaceManagementSelect(u8) {
        CREATE = 0, "Create";
        DELETE = 1, "Delete";
    }
}

/// Namespace Attachment, Command Dword 10 (Base 5.1.20). The data is a
/// [`ControllerList`](crate::identify::ControllerList).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct NamespaceAttachmentCdw10 {
    /// Select (SEL).
    #[bits(4)]
    pub sel: NamespaceAttachmentSelect,
    #[bits(28)]
    __: u32,
}

wire_values! {
    /// Namespace Attachment's Select (Base 5.1.20).
    NamespaceAttachmentSelect(u8) {
        ATTACH = 0, "Controller Attach";
        DETACH = 1, "Controller Detach";
    }
}

/// Namespace Management, Host Software Specified Fields: data of the create operation (Base 5.1.21, NVM 4.1.6).
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct NamespaceManagementData {
    /// Namespace Size (NSZE) in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity (NCAP) in logical blocks.
    pub ncap: u64,
    _rsvd16: [u8; 10],
    /// Formatted LBA Size (FLBAS).
    pub flbas: crate::identify::FormattedLbaSize,
    _rsvd27: [u8; 2],
    /// End-to-end Data Protection Type Settings (DPS).
    pub dps: crate::identify::ProtectionSettings,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities (NMIC).
    pub nmic: crate::identify::NamespaceSharing,
    _rsvd31: [u8; 61],
    /// ANA Group Identifier (ANAGRPID).
    pub anagrpid: u32,
    _rsvd96: [u8; 4],
    /// NVM Set Identifier (NVMSETID).
    pub nvmsetid: u16,
    /// Endurance Group Identifier (ENDGID).
    pub endgid: u16,
    _rsvd104: [u8; 280],
    /// Logical Block Storage Tag Mask (LBSTM).
    pub lbstm: u64,
    /// Number of Placement Handles (NPHNDLS).
    pub nphndls: u16,
    _rsvd394: [u8; 118],
    /// Placement Handle Associated RUH list.
    pub phndl: [u16; 128],
    _rsvd768: [u8; 3328],
}

/// Format NVM, Command Dword 10 (Base 5.1.10).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FormatCdw10 {
    /// User Data Format Index, lower four bits (UDFIL).
    #[bits(4)]
    pub lbaf_low: u8,
    /// Metadata Settings (MSET): metadata at the end of each block.
    pub mset: bool,
    /// Protection Information (PI).
    #[bits(3)]
    pub pi: u8,
    /// Protection Information Location (PIL): first bytes of the metadata.
    pub pil: bool,
    /// Secure Erase Settings (SES).
    #[bits(3)]
    pub ses: SecureErase,
    /// User Data Format Index, upper two bits (UDFIU).
    #[bits(2)]
    pub lbaf_high: u8,
    /// Reserved.
    #[bits(18)]
    pub reserved: u32,
}

impl FormatCdw10 {
    /// The index of the format to use, from both its parts.
    #[must_use]
    pub const fn lbaf(self) -> u8 {
        self.lbaf_low() | self.lbaf_high() << 4
    }
}

wire_values! {
    /// Secure Erase Settings (SES; Base 5.1.10).
    SecureErase(u8) {
        NONE = 0, "No secure erase operation requested";
        USER_DATA = 1, "User Data Erase";
        CRYPTOGRAPHIC = 2, "Cryptographic Erase";
    }
}

/// Firmware Commit, Command Dword 10 (Base 5.1.8). Firmware Image Download has plain numbers: dwords, 0's based, in Command Dword 10, and
/// the offset in dwords in Command Dword 11 (Base 5.1.9).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct FirmwareCommitCdw10 {
    /// Firmware Slot (FS); 0: the controller chooses.
    #[bits(3)]
    pub fs: u8,
    /// Commit Action (CA).
    #[bits(3)]
    pub ca: CommitAction,
    #[bits(25)]
    __: u32,
    /// Boot Partition ID (BPID).
    pub bpid: bool,
}

wire_values! {
    /// Commit Action (CA; Base 5.1.8).
    CommitAction(u8) {
        REPLACE = 0, "The downloaded image replaces the slot's and is not activated";
        REPLACE_AND_ACTIVATE = 1, "The downloaded image replaces the slot's and is activated at the next reset";
        ACTIVATE = 2, "The slot's image is activated at the next reset";
        ACTIVATE_NOW = 3, "The slot's image, replaced if one was downloaded, is activated immediately";
        REPLACE_BOOT_PARTITION = 6, "The downloaded image replaces the Boot Partition";
        ACTIVATE_BOOT_PARTITION = 7, "The Boot Partition is marked active";
    }
}

/// Security Send and Security Receive, Command Dword 10 (Base 5.1.23, 5.1.24). Command Dword 11 is the number of bytes.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SecurityCdw10 {
    /// NVMe Security Specific Field (NSSF), of protocol EAh alone.
    pub nssf: u8,
    /// SP Specific (SPSP0 and SPSP1).
    pub spsp: u16,
    /// Security Protocol (SECP).
    pub secp: u8,
}

/// Sanitize, Command Dword 10 (Base 5.1.22). Command Dword 11 is the Overwrite Pattern.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SanitizeCdw10 {
    /// Sanitize Action (SANACT).
    #[bits(3)]
    pub sanact: SanitizeAction,
    /// Allow Unrestricted Sanitize Exit (AUSE).
    pub ause: bool,
    /// Overwrite Pass Count (OWPASS); 0 is 16 passes.
    #[bits(4)]
    pub owpass: u8,
    /// Overwrite Invert Pattern Between Passes (OIPBP).
    pub oipbp: bool,
    /// No-Deallocate After Sanitize (NDAS).
    pub ndas: bool,
    /// Enter Media Verification State (EMVS).
    pub emvs: bool,
    #[bits(21)]
    __: u32,
}

wire_values! {
    /// Sanitize Action (SANACT; Base 5.1.22).
    SanitizeAction(u8) {
        EXIT_FAILURE = 1, "Exit Failure Mode";
        BLOCK_ERASE = 2, "Start a Block Erase sanitize operation";
        OVERWRITE = 3, "Start an Overwrite sanitize operation";
        CRYPTO_ERASE = 4, "Start a Crypto Erase sanitize operation";
        EXIT_VERIFICATION = 5, "Exit Media Verification State";
    }
}

/// Device Self-test, Command Dword 10 (Base 5.1.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SelfTestCdw10 {
    /// Self-test Code (STC).
    #[bits(4)]
    pub stc: SelfTest,
    #[bits(28)]
    __: u32,
}

wire_values! {
    /// Self-test Code (STC; Base 5.1.5).
    SelfTest(u8) {
        SHORT = 0x1, "Start a short device self-test operation";
        EXTENDED = 0x2, "Start an extended device self-test operation";
        ABORT = 0xf, "Abort the device self-test operation";
    }
}

assert_size!(NamespaceManagementData: 4096);
