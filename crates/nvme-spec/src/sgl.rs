//! Scatter Gather List descriptors (Base 4.3.2).

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

wire_values! {
    /// SGL Descriptor Type (Base 4.3.2, SGL Descriptor Type values).
    SglType(u8) {
        DATA_BLOCK = 0x0, "SGL Data Block descriptor";
        BIT_BUCKET = 0x1, "SGL Bit Bucket descriptor";
        SEGMENT = 0x2, "SGL Segment descriptor";
        LAST_SEGMENT = 0x3, "SGL Last Segment descriptor";
        KEYED_DATA_BLOCK = 0x4, "Keyed SGL Data Block descriptor";
        TRANSPORT_DATA_BLOCK = 0x5, "Transport SGL Data Block descriptor";
        VENDOR_SPECIFIC = 0xf, "Vendor specific";
    }
}

wire_values! {
    /// SGL Descriptor Sub Type (Base 4.3.2, SGL Descriptor Sub Type values).
    SglSubtype(u8) {
        ADDRESS = 0x0, "Address";
        OFFSET = 0x1, "Offset";
        TRANSPORT = 0xa, "NVMe Transport Specific";
    }
}

/// SGL Identifier, the last byte of a descriptor (Base 4.3.2).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SglIdentifier {
    /// SGL Descriptor Sub Type.
    #[bits(4)]
    pub subtype: SglSubtype,
    /// SGL Descriptor Type.
    #[bits(4)]
    pub kind: SglType,
}

/// A data block, bit bucket, segment or last segment descriptor (Base 4.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address (ADDR) of the data or of the next segment; reserved in a bit bucket.
    pub address: u64,
    /// Length (LEN) in bytes; of a segment, a multiple of 16.
    pub length: u32,
    /// Reserved in the types named above; part of the key in a keyed data block.
    pub reserved: [u8; 3],
    /// Type and sub type.
    pub identifier: SglIdentifier,
}

impl SglDescriptor {
    /// Bytes of a descriptor.
    pub const SIZE: usize = 16;

    /// A descriptor of the given type with sub type Address.
    #[must_use]
    pub const fn new(kind: SglType, address: u64, length: u32) -> Self {
        Self { address, length, reserved: [0; 3], identifier: SglIdentifier::new().with_kind(kind) }
    }

    /// `length` bytes at `address`.
    #[must_use]
    pub const fn data_block(address: u64, length: u32) -> Self {
        Self::new(SglType::DATA_BLOCK, address, length)
    }

    /// `length` bytes of a read that the host does not want.
    #[must_use]
    pub const fn bit_bucket(length: u32) -> Self {
        Self::new(SglType::BIT_BUCKET, 0, length)
    }

    /// The next segment, whose own last descriptor points on; `length` is the segment's, in bytes.
    #[must_use]
    pub const fn segment(address: u64, length: u32) -> Self {
        Self::new(SglType::SEGMENT, address, length)
    }

    /// The next segment, which is the last; `length` is the segment's, in bytes.
    #[must_use]
    pub const fn last_segment(address: u64, length: u32) -> Self {
        Self::new(SglType::LAST_SEGMENT, address, length)
    }
}

assert_size!(SglIdentifier: 1, SglDescriptor: 16);
