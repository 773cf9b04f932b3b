//! Identify data structures (Base 5.1.13, NVM 4.1.5).

mod controller;
mod lists;
mod namespace;

pub use controller::*;
pub use lists::*;
pub use namespace::*;

/// Bytes of every Identify data structure.
pub const IDENTIFY_SIZE: usize = 4096;

wire_values! {
    /// Controller or Namespace Structure (CNS; Base 5.1.13.1).
    Cns(u8) {
        NAMESPACE = 0x00, "Identify Namespace data structure";
        CONTROLLER = 0x01, "Identify Controller data structure";
        ACTIVE_NAMESPACES = 0x02, "Active Namespace ID list";
        NAMESPACE_DESCRIPTORS = 0x03, "Namespace Identification Descriptor list";
        NVM_SETS = 0x04, "NVM Set List";
        CSI_NAMESPACE = 0x05, "I/O Command Set specific Identify Namespace data structure";
        CSI_CONTROLLER = 0x06, "I/O Command Set specific Identify Controller data structure";
        CSI_ACTIVE_NAMESPACES = 0x07, "I/O Command Set specific Active Namespace ID list";
        INDEPENDENT_NAMESPACE = 0x08, "I/O Command Set Independent Identify Namespace data structure";
        NAMESPACE_USER_DATA_FORMAT = 0x09, "Identify Namespace data structure for a User Data Format";
        CSI_NAMESPACE_USER_DATA_FORMAT = 0x0a, "I/O Command Set specific Identify Namespace data structure for a User Data Format";
        ALLOCATED_NAMESPACES = 0x10, "Allocated Namespace ID list";
        ALLOCATED_NAMESPACE = 0x11, "Identify Namespace data structure for an allocated Namespace ID";
        NAMESPACE_CONTROLLERS = 0x12, "Namespace Attached Controller list";
        SUBSYSTEM_CONTROLLERS = 0x13, "Controller list";
        PRIMARY_CONTROLLER = 0x14, "Primary Controller Capabilities data structure";
        SECONDARY_CONTROLLERS = 0x15, "Secondary Controller list";
        NAMESPACE_GRANULARITY = 0x16, "Namespace Granularity List";
        UUIDS = 0x17, "UUID List";
        DOMAINS = 0x18, "Domain List";
        ENDURANCE_GROUPS = 0x19, "Endurance Group List";
        CSI_ALLOCATED_NAMESPACES = 0x1a, "I/O Command Set specific Allocated Namespace ID list";
        CSI_ALLOCATED_NAMESPACE = 0x1b, "I/O Command Set specific Identify Namespace data structure for an allocated Namespace ID";
        IO_COMMAND_SETS = 0x1c, "Identify I/O Command Set data structure";
        UNDERLYING_NAMESPACES = 0x1d, "Underlying Namespace List";
        PORTS = 0x1e, "Ports List";
        INDEPENDENT_ALLOCATED_NAMESPACE = 0x1f, "I/O Command Set Independent Identify Namespace data structure for an allocated Namespace ID";
    }
}

/// `text` in a fixed field: padded with spaces to the right, cut off at the end, and with `?` for what is not printable
/// ASCII (Base 1.4.2; SN, MN, FR).
#[must_use]
pub const fn padded<const N: usize>(text: &str) -> [u8; N] {
    let (bytes, mut field, mut i) = (text.as_bytes(), [b' '; N], 0);
    while i < N && i < bytes.len() {
        field[i] = if matches!(bytes[i], 0x20..=0x7e) { bytes[i] } else { b'?' };
        i += 1;
    }
    field
}

/// `text` in a null-terminated field (SUBNQN; Base 4.7); `None` if there is no room for it and a null byte.
#[must_use]
pub const fn null_terminated<const N: usize>(text: &str) -> Option<[u8; N]> {
    let (bytes, mut field, mut i) = (text.as_bytes(), [0; N], 0);
    if bytes.len() >= N {
        return None;
    }
    while i < bytes.len() {
        field[i] = bytes[i];
        i += 1;
    }
    Some(field)
}
