//! The PCI function of an NVMe controller: configuration space and capabilities (PCIe 3.8; layouts of the PCI
//! Local Bus 3.0 and PCI Express Base specifications, cited as "PCI").

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Base class: mass storage controller (PCIe 3.8.1).
pub const BASE_CLASS: u8 = 0x01;
/// Sub class: non-volatile memory controller (PCIe 3.8.1).
pub const SUB_CLASS: u8 = 0x08;
/// Programming interface: NVM Express I/O controller (PCIe 3.8.1).
pub const PROGRAMMING_INTERFACE: u8 = 0x02;

/// Bytes of conventional configuration space (PCI 6.1).
pub const CONFIG_SIZE: usize = 256;
/// Bytes of PCI Express extended configuration space (PCI 7.2).
pub const EXTENDED_CONFIG_SIZE: usize = 4096;

/// Byte offsets in the type 0 header (PCI 6.1).
pub mod offset {
    /// Vendor ID, 2 bytes.
    pub const VENDOR_ID: usize = 0x00;
    /// Device ID, 2 bytes.
    pub const DEVICE_ID: usize = 0x02;
    /// Command, 2 bytes.
    pub const COMMAND: usize = 0x04;
    /// Status, 2 bytes.
    pub const STATUS: usize = 0x06;
    /// Revision ID, 1 byte; class code follows.
    pub const REVISION_ID: usize = 0x08;
    /// Class code: programming interface, sub class, base class.
    pub const CLASS_CODE: usize = 0x09;
    /// Cache line size, 1 byte.
    pub const CACHE_LINE_SIZE: usize = 0x0c;
    /// Latency timer, 1 byte.
    pub const LATENCY_TIMER: usize = 0x0d;
    /// Header type, 1 byte.
    pub const HEADER_TYPE: usize = 0x0e;
    /// BAR0, 4 bytes; with BAR1 the controller's 64-bit memory range.
    pub const BAR0: usize = 0x10;
    /// BAR1, 4 bytes: the upper half of BAR0's address.
    pub const BAR1: usize = 0x14;
    /// BAR5, 4 bytes.
    pub const BAR5: usize = 0x24;
    /// Subsystem vendor ID, 2 bytes.
    pub const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
    /// Subsystem ID, 2 bytes.
    pub const SUBSYSTEM_ID: usize = 0x2e;
    /// Expansion ROM base address, 4 bytes.
    pub const EXPANSION_ROM: usize = 0x30;
    /// Offset of the first capability, 1 byte.
    pub const CAPABILITIES: usize = 0x34;
    /// Interrupt line, 1 byte, for software's use.
    pub const INTERRUPT_LINE: usize = 0x3c;
    /// Interrupt pin, 1 byte: 1 is INTA#.
    pub const INTERRUPT_PIN: usize = 0x3d;
    /// The first byte after the header.
    pub const HEADER_END: usize = 0x40;
}

wire_values! {
    /// Capability ID (PCI appendix H).
    CapabilityId(u8) {
        POWER_MANAGEMENT = 0x01, "Power Management";
        MSI = 0x05, "Message Signaled Interrupts";
        VENDOR_SPECIFIC = 0x09, "Vendor Specific";
        PCI_EXPRESS = 0x10, "PCI Express";
        MSI_X = 0x11, "MSI-X";
    }
}

/// Type 0 configuration header (PCI 6.1, PCIe 3.8.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// Vendor ID.
    pub vendor_id: u16,
    /// Device ID.
    pub device_id: u16,
    /// Command.
    pub command: Command,
    /// Status.
    pub status: DeviceStatus,
    /// Revision ID.
    pub revision_id: u8,
    /// Programming interface.
    pub programming_interface: u8,
    /// Sub class.
    pub sub_class: u8,
    /// Base class.
    pub base_class: u8,
    /// Cache line size in dwords.
    pub cache_line_size: u8,
    /// Latency timer; zero in PCI Express.
    pub latency_timer: u8,
    /// Header type: zero, or 80h with several functions.
    pub header_type: u8,
    /// Built-in self test.
    pub bist: u8,
    /// Base address registers.
    pub bars: [u32; 6],
    /// Cardbus CIS pointer.
    pub cardbus_cis: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor_id: u16,
    /// Subsystem ID.
    pub subsystem_id: u16,
    /// Expansion ROM base address.
    pub expansion_rom: u32,
    /// Offset of the first capability.
    pub capabilities: u8,
    _rsvd35: [u8; 7],
    /// Interrupt line.
    pub interrupt_line: u8,
    /// Interrupt pin: 1 is INTA#.
    pub interrupt_pin: u8,
    /// Minimum grant; zero in PCI Express.
    pub min_grant: u8,
    /// Maximum latency; zero in PCI Express.
    pub max_latency: u8,
}

/// Bits of a memory BAR's low dword: 64 bits wide, not prefetchable (PCI 6.2.5.1).
pub const BAR_MEMORY_64: u32 = 0b100;

/// Command register (PCI 6.2.2).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Command {
    /// I/O Space Enable.
    pub io_space: bool,
    /// Memory Space Enable.
    pub memory_space: bool,
    /// Bus Master Enable: the function may access memory and send MSI-X.
    pub bus_master: bool,
    #[bits(3)]
    __: u8,
    /// Parity Error Response.
    pub parity_error_response: bool,
    #[bits(1)]
    __: u8,
    /// SERR# Enable.
    pub serr: bool,
    #[bits(1)]
    __: u8,
    /// Interrupt Disable: no INTx.
    pub interrupt_disable: bool,
    #[bits(5)]
    __: u8,
}

/// Status register (PCI 6.2.3).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DeviceStatus {
    #[bits(3)]
    __: u8,
    /// Interrupt Status: INTx is pending.
    pub interrupt: bool,
    /// Capabilities List: the capabilities pointer is valid.
    pub capabilities_list: bool,
    #[bits(11)]
    __: u16,
}

/// Power Management capability (PCI Power Management 3.2; PCIe 3.8.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PowerManagementCapability {
    /// Capability ID.
    pub id: CapabilityId,
    /// Offset of the next capability; 0 is the end.
    pub next: u8,
    /// PM Capabilities: bits 2:0 are the version, 3.
    pub pmc: u16,
    /// PM Control and Status.
    pub pmcs: PowerControl,
    /// Bridge extensions and data.
    pub data: [u8; 2],
}

/// PM Control and Status (PCI Power Management 3.2.4).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct PowerControl {
    /// Power State: 0 is D0, 3 is D3hot.
    #[bits(2)]
    pub state: u8,
    #[bits(1)]
    __: u8,
    /// No Soft Reset: the function keeps its context from D3hot to D0.
    pub no_soft_reset: bool,
    #[bits(12)]
    __: u16,
}

/// MSI-X capability (PCI 6.8.2; PCIe 3.8.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MsixCapability {
    /// Capability ID.
    pub id: CapabilityId,
    /// Offset of the next capability; 0 is the end.
    pub next: u8,
    /// Message Control.
    pub control: MsixControl,
    /// Where the vector table is.
    pub table: MsixLocation,
    /// Where the pending bit array is.
    pub pba: MsixLocation,
}

/// MSI-X Message Control (PCI 6.8.2.3).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct MsixControl {
    /// Table Size in vectors, 0's based.
    #[bits(11)]
    pub table_size_z: u16,
    #[bits(3)]
    __: u8,
    /// Function Mask: all vectors are masked.
    pub function_mask: bool,
    /// MSI-X Enable.
    pub enable: bool,
}

/// BAR and offset of the MSI-X table or pending bit array (PCI 6.8.2.4, 6.8.2.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct MsixLocation {
    /// BAR Indicator (BIR).
    #[bits(3)]
    pub bir: u8,
    /// Offset in the BAR in 8 bytes.
    #[bits(29)]
    pub offset_8: u32,
}

impl MsixLocation {
    /// A place `offset` bytes into BAR `bir`, if the offset is a multiple of 8 and the BAR is one of six.
    #[must_use]
    pub const fn at(bir: u8, offset: u32) -> Option<Self> {
        if bir > 5 || !offset.is_multiple_of(8) {
            return None;
        }
        Some(Self::new().with_bir(bir).with_offset_8(offset / 8))
    }

    /// The offset in the BAR in bytes.
    #[must_use]
    pub const fn offset(self) -> u32 {
        self.offset_8() * 8
    }
}

/// MSI-X table entry (PCI 6.8.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MsixEntry {
    /// Message Address.
    pub address_low: u32,
    /// Message Upper Address.
    pub address_high: u32,
    /// Message Data.
    pub data: u32,
    /// Vector Control: bit 0 masks, and is set after a reset.
    pub control: u32,
}

impl MsixEntry {
    /// An entry as a reset leaves it: masked.
    pub const RESET: Self = Self { address_low: 0, address_high: 0, data: 0, control: 1 };

    /// Whether the vector is masked.
    #[must_use]
    pub const fn is_masked(self) -> bool {
        self.control & 1 != 0
    }
}

/// PCI Express capability, version 2 (PCI Express Base 7.5.3; PCIe 3.8.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PciExpressCapability {
    /// Capability ID.
    pub id: CapabilityId,
    /// Offset of the next capability; 0 is the end.
    pub next: u8,
    /// PCI Express Capabilities: bits 3:0 are the version, 2; bits 7:4 the port type, 0 for an endpoint.
    pub capabilities: u16,
    /// Device Capabilities.
    pub device_capabilities: DeviceCapabilities,
    /// Device Control.
    pub device_control: DeviceControl,
    /// Device Status.
    pub device_status: u16,
    /// Link Capabilities.
    pub link_capabilities: u32,
    /// Link Control.
    pub link_control: u16,
    /// Link Status: bits 3:0 are the speed, 9:4 the width.
    pub link_status: u16,
    _slot_and_root: [u8; 16],
    /// Device Capabilities 2.
    pub device_capabilities2: u32,
    /// Device Control 2.
    pub device_control2: u16,
    /// Device Status 2.
    pub device_status2: u16,
    /// Link Capabilities 2.
    pub link_capabilities2: u32,
    /// Link Control 2.
    pub link_control2: u16,
    /// Link Status 2.
    pub link_status2: u16,
    _slot2: [u8; 8],
}

/// PCI Express Device Capabilities (PCI Express Base 7.5.3.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DeviceCapabilities {
    /// Max_Payload_Size Supported: 128 · 2^n bytes.
    #[bits(3)]
    pub max_payload: u8,
    #[bits(2)]
    __: u8,
    /// Extended Tag Field Supported.
    pub extended_tag: bool,
    /// Endpoint L0s Acceptable Latency.
    #[bits(3)]
    pub l0s_latency: u8,
    /// Endpoint L1 Acceptable Latency.
    #[bits(3)]
    pub l1_latency: u8,
    #[bits(3)]
    __: u8,
    /// Role-Based Error Reporting; always set.
    pub role_based_error_reporting: bool,
    #[bits(12)]
    __: u16,
    /// Function Level Reset Capability; NVMe controllers have it (PCIe 3.8.5).
    pub function_level_reset: bool,
    #[bits(3)]
    __: u8,
}

/// PCI Express Device Control (PCI Express Base 7.5.3.4).
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DeviceControl {
    /// Enables of correctable, non-fatal, fatal and unsupported request reporting.
    #[bits(4)]
    pub error_reporting: u8,
    /// Enable Relaxed Ordering.
    pub relaxed_ordering: bool,
    /// Max_Payload_Size: 128 · 2^n bytes.
    #[bits(3)]
    pub max_payload: u8,
    /// Extended Tag Field Enable.
    pub extended_tag: bool,
    /// Phantom Functions Enable.
    pub phantom_functions: bool,
    /// Aux Power PM Enable.
    pub aux_power: bool,
    /// Enable No Snoop.
    pub no_snoop: bool,
    /// Max_Read_Request_Size: 128 · 2^n bytes.
    #[bits(3)]
    pub max_read_request: u8,
    /// Initiate Function Level Reset; reads as zero.
    pub initiate_function_level_reset: bool,
}

assert_size!(
    Header: 64, PowerManagementCapability: 8, MsixCapability: 12, MsixEntry: 16, PciExpressCapability: 60,
);
