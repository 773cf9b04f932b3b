//! Controller properties in the first pages of BAR0 (Base 3.1.4) and the doorbells (PCIe 3.1.2).

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::QueueId;

/// Byte offsets of the properties in BAR0 (Base 3.1.4).
pub mod offset {
    /// Controller Capabilities (CAP), 8 bytes, read only.
    pub const CAP: u64 = 0x00;
    /// Version (VS), 4 bytes, read only.
    pub const VS: u64 = 0x08;
    /// Interrupt Mask Set (INTMS), 4 bytes.
    pub const INTMS: u64 = 0x0c;
    /// Interrupt Mask Clear (INTMC), 4 bytes.
    pub const INTMC: u64 = 0x10;
    /// Controller Configuration (CC), 4 bytes.
    pub const CC: u64 = 0x14;
    /// Controller Status (CSTS), 4 bytes.
    pub const CSTS: u64 = 0x1c;
    /// NVM Subsystem Reset (NSSR), 4 bytes.
    pub const NSSR: u64 = 0x20;
    /// Admin Queue Attributes (AQA), 4 bytes.
    pub const AQA: u64 = 0x24;
    /// Admin Submission Queue Base Address (ASQ), 8 bytes.
    pub const ASQ: u64 = 0x28;
    /// Admin Completion Queue Base Address (ACQ), 8 bytes.
    pub const ACQ: u64 = 0x30;
    /// Controller Memory Buffer Location (CMBLOC), 4 bytes, read only.
    pub const CMBLOC: u64 = 0x38;
    /// Controller Memory Buffer Size (CMBSZ), 4 bytes, read only.
    pub const CMBSZ: u64 = 0x3c;
    /// Boot Partition Information (BPINFO), 4 bytes, read only.
    pub const BPINFO: u64 = 0x40;
    /// Controller Memory Buffer Memory Space Control (CMBMSC), 8 bytes.
    pub const CMBMSC: u64 = 0x50;
    /// Controller Memory Buffer Status (CMBSTS), 4 bytes, read only.
    pub const CMBSTS: u64 = 0x58;
    /// NVM Subsystem Shutdown (NSSD), 4 bytes.
    pub const NSSD: u64 = 0x64;
    /// Controller Ready Timeouts (CRTO), 4 bytes, read only.
    pub const CRTO: u64 = 0x68;
    /// Persistent Memory Capabilities (PMRCAP), 4 bytes, read only.
    pub const PMRCAP: u64 = 0xe00;
    /// The first doorbell; properties end here.
    pub const DOORBELLS: u64 = 0x1000;
}

/// The value that, written to NSSR, resets the NVM subsystem: "NVMe" (Base 3.1.4.7).
pub const NSSR_RESET: u32 = 0x4e56_4d65;

/// Controller Capabilities (Base 3.1.4.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Capabilities {
    /// Maximum Queue Entries Supported (MQES), 0's based, at least 1.
    pub mqes_z: u16,
    /// Contiguous Queues Required (CQR).
    pub cqr: bool,
    /// Arbitration Mechanism Supported (AMS): weighted round robin with urgent priority class.
    pub ams_wrr: bool,
    /// Arbitration Mechanism Supported (AMS): vendor specific.
    pub ams_vendor: bool,
    #[bits(5)]
    __: u8,
    /// Timeout (TO), in 500 ms: the longest wait for CSTS.RDY to follow CC.EN.
    pub to: u8,
    /// Doorbell Stride (DSTRD): doorbells are 2^(2 + DSTRD) bytes apart.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM Subsystem Reset Supported (NSSRS).
    pub nssrs: bool,
    /// Command Sets Supported (CSS): NVM Command Set.
    pub css_nvm: bool,
    #[bits(5)]
    __: u8,
    /// Command Sets Supported (CSS): one or more I/O command sets (I/O Command Set Support, IOCSS).
    pub css_iocs: bool,
    /// Command Sets Supported (CSS): no I/O command set (NOIOCSS).
    pub css_admin_only: bool,
    /// Boot Partition Support (BPS).
    pub bps: bool,
    /// Controller Power Scope (CPS).
    #[bits(2)]
    pub cps: u8,
    /// Memory Page Size Minimum (MPSMIN): 2^(12 + MPSMIN) bytes.
    #[bits(4)]
    pub mpsmin: u8,
    /// Memory Page Size Maximum (MPSMAX): 2^(12 + MPSMAX) bytes.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent Memory Region Supported (PMRS).
    pub pmrs: bool,
    /// Controller Memory Buffer Supported (CMBS).
    pub cmbs: bool,
    /// NVM Subsystem Shutdown Supported (NSSS).
    pub nsss: bool,
    /// Controller Ready With Media Support (CRWMS).
    pub crwms: bool,
    /// Controller Ready Independent of Media Support (CRIMS).
    pub crims: bool,
    /// NVM Subsystem Shutdown Enhancements Supported (NSSES).
    pub nsses: bool,
    #[bits(2)]
    __: u8,
}

/// Version, also in Identify Controller's VER (Base 3.1.4.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Version {
    /// Tertiary Version Number (TER).
    pub tertiary: u8,
    /// Minor Version Number (MNR).
    pub minor: u8,
    /// Major Version Number (MJR).
    pub major: u16,
}

impl Version {
    /// NVM Express 1.2.0.
    pub const V1_2: Self = Self::new().with_major(1).with_minor(2);
    /// NVM Express 1.4.0.
    pub const V1_4: Self = Self::new().with_major(1).with_minor(4);
    /// NVM Express Base 2.0.0.
    pub const V2_0: Self = Self::new().with_major(2);
    /// NVM Express Base 2.1.0.
    pub const V2_1: Self = Self::new().with_major(2).with_minor(1);
}

/// Controller Configuration (Base 3.1.4.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Configuration {
    /// Enable (EN).
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// I/O Command Set Selected (CSS).
    #[bits(3)]
    pub css: CommandSetSelected,
    /// Memory Page Size (MPS): 2^(12 + MPS) bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration Mechanism Selected (AMS).
    #[bits(3)]
    pub ams: Arbitration,
    /// Shutdown Notification (SHN).
    #[bits(2)]
    pub shn: ShutdownNotification,
    /// I/O Submission Queue Entry Size (IOSQES): 2^n bytes.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O Completion Queue Entry Size (IOCQES): 2^n bytes.
    #[bits(4)]
    pub iocqes: u8,
    /// Controller Ready Independent of Media Enable (CRIME).
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

impl Configuration {
    /// The memory page size in bytes that MPS selects.
    #[must_use]
    pub const fn page_size(self) -> u64 {
        1 << (12 + self.mps())
    }
}

wire_values! {
    /// I/O Command Set Selected (CC.CSS; Base 3.1.4.5).
    CommandSetSelected(u8) {
        NVM = 0, "NVM Command Set";
        ALL = 6, "All supported I/O Command Sets";
        ADMIN_ONLY = 7, "Admin Command Set only";
    }
}

wire_values! {
    /// Arbitration Mechanism Selected (CC.AMS; Base 3.1.4.5).
    Arbitration(u8) {
        ROUND_ROBIN = 0, "Round Robin";
        WEIGHTED_ROUND_ROBIN = 1, "Weighted Round Robin with Urgent Priority Class";
        VENDOR_SPECIFIC = 7, "Vendor Specific";
    }
}

wire_values! {
    /// Shutdown Notification (CC.SHN; Base 3.1.4.5).
    ShutdownNotification(u8) {
        NONE = 0, "No notification; no effect";
        NORMAL = 1, "Normal shutdown notification";
        ABRUPT = 2, "Abrupt shutdown notification";
    }
}

wire_values! {
    /// Shutdown Status (CSTS.SHST; Base 3.1.4.6).
    ShutdownStatus(u8) {
        NORMAL = 0, "Normal operation (no shutdown has been requested)";
        OCCURRING = 1, "Shutdown processing occurring";
        COMPLETE = 2, "Shutdown processing complete";
    }
}

/// Controller Status (Base 3.1.4.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ControllerStatus {
    /// Ready (RDY).
    pub rdy: bool,
    /// Controller Fatal Status (CFS).
    pub cfs: bool,
    /// Shutdown Status (SHST).
    #[bits(2)]
    pub shst: ShutdownStatus,
    /// NVM Subsystem Reset Occurred (NSSRO); cleared by writing 1.
    pub nssro: bool,
    /// Processing Paused (PP).
    pub pp: bool,
    /// Shutdown Type (ST): the shutdown SHST reports is an NVM subsystem shutdown.
    pub st: bool,
    #[bits(25)]
    __: u32,
}

/// Admin Queue Attributes (Base 3.1.4.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AdminQueueAttributes {
    /// Admin Submission Queue Size (ASQS) in entries, 0's based, 1 to 4095.
    #[bits(12)]
    pub asqs_z: u16,
    #[bits(4)]
    __: u8,
    /// Admin Completion Queue Size (ACQS) in entries, 0's based, 1 to 4095.
    #[bits(12)]
    pub acqs_z: u16,
    #[bits(4)]
    __: u8,
}

/// Controller Memory Buffer Location (Base 3.1.4.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BufferLocation {
    /// Base Indicator Register (BIR): the Base Address Register.
    #[bits(3)]
    pub bir: u8,
    /// CMB Queue Mixed Memory Support (CQMMS).
    pub cqmms: bool,
    /// CMB Queue Physically Discontiguous Support (CQPDS).
    pub cqpds: bool,
    /// CMB Data Pointer Mixed Locations Support (CDPMLS).
    pub cdpmls: bool,
    /// CMB Data Pointer and Command Independent Locations Support (CDPCILS).
    pub cdpcils: bool,
    /// CMB Data Metadata Mixed Memory Support (CDMMMS).
    pub cdmmms: bool,
    /// CMB Queue Dword Alignment (CQDA).
    pub cqda: bool,
    #[bits(3)]
    __: u8,
    /// Offset (OFST) from the Base Address Register's start, in CMBSZ's units.
    #[bits(20)]
    pub ofst: u32,
}

/// Controller Memory Buffer Size (Base 3.1.4.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BufferSize {
    /// Submission Queue Support (SQS).
    pub sqs: bool,
    /// Completion Queue Support (CQS).
    pub cqs: bool,
    /// PRP SGL List Support (LISTS).
    pub lists: bool,
    /// Read Data Support (RDS).
    pub rds: bool,
    /// Write Data Support (WDS).
    pub wds: bool,
    #[bits(3)]
    __: u8,
    /// Size Units (SZU), as a power of 16 of 4 KiB.
    #[bits(4)]
    pub szu: u8,
    /// Size (SZ), in these units.
    #[bits(20)]
    pub sz: u32,
}

impl BufferSize {
    /// Bytes of a unit; `None`: SZU is reserved.
    #[must_use]
    pub const fn unit(self) -> Option<u64> {
        if self.szu() > 6 { None } else { Some(4096 << (4 * self.szu())) }
    }
}

/// Controller Memory Buffer Memory Space Control (Base 3.1.4.14).
#[bitfield(u64)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BufferControl {
    /// Capabilities Registers Enabled (CRE): CMBLOC and CMBSZ tell.
    pub cre: bool,
    /// Controller Memory Space Enable (CMSE): addresses from CBA on are the controller's memory.
    pub cmse: bool,
    #[bits(10)]
    __: u16,
    /// Controller Base Address (CBA), without its lowest 12 bits.
    #[bits(52)]
    pub cba: u64,
}

/// Controller Memory Buffer Status (Base 3.1.4.15).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct BufferStatus {
    /// Controller Base Address Invalid (CBAI).
    pub cbai: bool,
    #[bits(31)]
    __: u32,
}

/// Controller Ready Timeouts (Base 3.1.4.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReadyTimeouts {
    /// Controller Ready With Media Timeout (CRWMT), in 500 ms.
    pub crwmt: u16,
    /// Controller Ready Independent of Media Timeout (CRIMT), in 500 ms.
    pub crimt: u16,
}

/// What a doorbell tells the controller (PCIe 3.1.2.1, 3.1.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// Submission Queue y Tail Doorbell (SQyTDBL).
    SqTail(QueueId),
    /// Completion Queue y Head Doorbell (CQyHDBL).
    CqHead(QueueId),
}

/// Where doorbells are for one Doorbell Stride (CAP.DSTRD; PCIe 3.1.2). The shadow doorbell and event index buffers
/// have the same layout, starting at their own beginning (Base 5.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellLayout {
    dstrd: u8,
}

impl DoorbellLayout {
    /// The layout of CAP.DSTRD, four bits; `None` if it is larger.
    #[must_use]
    pub const fn new(dstrd: u8) -> Option<Self> {
        if dstrd < 16 { Some(Self { dstrd }) } else { None }
    }

    /// Bytes from one doorbell to the next.
    #[must_use]
    pub const fn stride(self) -> u64 {
        4 << self.dstrd
    }

    /// The doorbell's offset from the first doorbell, or in a shadow doorbell buffer.
    #[must_use]
    pub const fn index_offset(self, doorbell: Doorbell) -> u64 {
        let index = match doorbell {
            Doorbell::SqTail(queue) => 2 * queue.0 as u64,
            Doorbell::CqHead(queue) => 2 * queue.0 as u64 + 1,
        };
        index * self.stride()
    }

    /// The doorbell's offset in BAR0.
    #[must_use]
    pub const fn offset(self, doorbell: Doorbell) -> u64 {
        offset::DOORBELLS + self.index_offset(doorbell)
    }

    /// The doorbell at this offset in BAR0; `None` below the doorbells, between two, or beyond queue 65535's.
    #[must_use]
    pub const fn decode(self, bar_offset: u64) -> Option<Doorbell> {
        let Some(from_first) = bar_offset.checked_sub(offset::DOORBELLS) else { return None };
        let (index, rest) = (from_first / self.stride(), from_first % self.stride());
        if rest != 0 || index / 2 > u16::MAX as u64 {
            return None;
        }
        let queue = QueueId((index / 2) as u16);
        Some(if index % 2 == 0 { Doorbell::SqTail(queue) } else { Doorbell::CqHead(queue) })
    }

    /// Bytes that the doorbells of queues 0 to `last` take.
    #[must_use]
    pub const fn bytes(self, last: QueueId) -> u64 {
        (last.0 as u64 + 1) * 2 * self.stride()
    }
}

assert_size!(
    Capabilities: 8, Version: 4, Configuration: 4, ControllerStatus: 4, AdminQueueAttributes: 4, ReadyTimeouts: 4,
);
