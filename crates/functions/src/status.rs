//! Statuses that the functions give, as in bits 15:1 of a completion entry (Base 4.2.3): Do Not Retry, type, code.

const DO_NOT_RETRY: u16 = 1 << 14;

/// Nothing is wrong.
pub const SUCCESS: u16 = 0;
/// Invalid Field in Command: more data than MDTS.
pub const INVALID_FIELD: u16 = DO_NOT_RETRY | 0x002;
/// Internal Error: no disk is left.
pub const INTERNAL_ERROR: u16 = 0x006;
/// Invalid Namespace or Format.
pub const INVALID_NAMESPACE: u16 = DO_NOT_RETRY | 0x00b;
/// LBA Out of Range.
pub const LBA_OUT_OF_RANGE: u16 = DO_NOT_RETRY | 0x080;
/// Namespace is Write Protected.
pub const READ_ONLY: u16 = DO_NOT_RETRY | 0x020;
