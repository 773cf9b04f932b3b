//! The fixed parts of every message, as they lie on the wire: host byte order, no padding.
//!
//! Names and order follow the protocol document; sizes are checked below at compile time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

wire!(
    /// What precedes every message ("Header").
    Header, 16 {
        /// Chosen by the sender of the request, echoed in its reply.
        id: u16,
        /// A [`Command`](super::Command), as a number.
        command: u16,
        /// Bytes of the whole message, this header included.
        size: u32,
        /// Type (bits 0-3), no reply (bit 4), error (bit 5).
        flags: u32,
        /// An errno when the error bit of a reply is set.
        error: u32,
    }
);
wire!(
    /// Fixed part of VERSION; JSON with a final NUL may follow.
    Version, 4 {
        /// Must be equal on both sides.
        major: u16,
        /// The reply's is at most the request's.
        minor: u16,
    }
);
wire!(
    /// DMA_MAP.
    DmaMap, 32 {
        /// Bytes of this structure.
        argsz: u32,
        /// `DMA_READ`, `DMA_WRITE` …
        flags: u32,
        /// Byte in the file where the range starts.
        offset: u64,
        /// First device-visible address.
        address: u64,
        /// Bytes.
        size: u64,
    }
);
wire!(
    /// DMA_UNMAP, request and reply.
    DmaUnmap, 24 {
        /// Bytes the reply may take.
        argsz: u32,
        /// `UNMAP_*`.
        flags: u32,
        /// First device-visible address.
        address: u64,
        /// Bytes.
        size: u64,
    }
);
wire!(
    /// DEVICE_GET_INFO, request and reply.
    DeviceInfo, 16 {
        /// Bytes the reply may take; in the reply, bytes it needs.
        argsz: u32,
        /// `DEVICE_*`.
        flags: u32,
        /// How many regions.
        num_regions: u32,
        /// How many interrupt types.
        num_irqs: u32,
    }
);
wire!(
    /// DEVICE_GET_REGION_INFO, request and fixed part of the reply.
    RegionInfo, 32 {
        /// Bytes the reply may take; in the reply, bytes it needs.
        argsz: u32,
        /// `REGION_*`.
        flags: u32,
        /// Which region.
        index: u32,
        /// Where the first capability lies, from the start of this structure; 0 for none.
        cap_offset: u32,
        /// Bytes of the region.
        size: u64,
        /// Where the region starts in the file that came with the reply.
        offset: u64,
    }
);
wire!(
    /// Head of a region capability.
    CapabilityHeader, 8 {
        /// `CAP_SPARSE_MMAP` …
        id: u16,
        /// 1.
        version: u16,
        /// Next capability, from the start of [`RegionInfo`]; 0 for none.
        next: u32,
    }
);
wire!(
    /// Fixed part of the sparse-mmap capability, after its head.
    SparseMmap, 8 {
        /// How many areas follow.
        nr_areas: u32,
        /// 0.
        reserved: u32,
    }
);
wire!(
    /// One mappable part of a region.
    SparseArea, 16 {
        /// From the start of the region.
        offset: u64,
        /// Bytes.
        size: u64,
    }
);
wire!(
    /// DEVICE_GET_REGION_IO_FDS, request and fixed part of the reply.
    RegionIoFds, 16 {
        /// Bytes the reply may take; in the reply, bytes it needs.
        argsz: u32,
        /// 0.
        flags: u32,
        /// Which region.
        index: u32,
        /// How many sub-regions follow in the reply.
        count: u32,
    }
);
wire!(
    /// DEVICE_GET_IRQ_INFO, request and reply.
    IrqInfo, 16 {
        /// Bytes the reply may take; in the reply, bytes it needs.
        argsz: u32,
        /// `IRQ_*`.
        flags: u32,
        /// Which interrupt type.
        index: u32,
        /// How many interrupts of that type.
        count: u32,
    }
);
wire!(
    /// Fixed part of DEVICE_SET_IRQS; `count` booleans may follow.
    SetIrqs, 20 {
        /// Bytes of this structure and what follows it.
        argsz: u32,
        /// One data bit and one action bit.
        flags: u32,
        /// Which interrupt type.
        index: u32,
        /// First interrupt of the type.
        start: u32,
        /// How many.
        count: u32,
    }
);
wire!(
    /// REGION_READ and REGION_WRITE, request and reply; data may follow.
    RegionAccess, 16 {
        /// From the start of the region.
        offset: u64,
        /// Which region.
        region: u32,
        /// Bytes.
        count: u32,
    }
);
wire!(
    /// DMA_READ and DMA_WRITE, request and reply; data may follow.
    DmaAccess, 16 {
        /// Device-visible address.
        address: u64,
        /// Bytes.
        count: u64,
    }
);
wire!(
    /// One write of REGION_WRITE_MULTI.
    SingleWrite, 24 {
        /// From the start of the region.
        offset: u64,
        /// Which region.
        region: u32,
        /// Bytes of `data` that count, at most 8.
        count: u32,
        /// What to write.
        data: [u8; 8],
    }
);
wire!(
    /// Head of REGION_WRITE_MULTI (the writes follow) and its whole reply.
    WriteMulti, 8 {
        /// How many writes.
        count: u64,
    }
);

wire!(
    /// Head of DEVICE_FEATURE, request and reply; the feature's data follow.
    Feature, 8 {
        /// Bytes the reply may take; in the reply, bytes it needs.
        argsz: u32,
        /// The feature's number in [`FEATURE_MASK`], and what is asked of it (`FEATURE_*`).
        flags: u32,
    }
);
wire!(
    /// Data of the migration feature.
    MigrationFeature, 8 {
        /// `MIGRATION_*`.
        flags: u64,
    }
);
wire!(
    /// Data of the feature that is the device's migration state.
    DeviceState, 8 {
        /// A [`MigrationState`](crate::MigrationState), as a number.
        state: u32,
        /// Not used on a socket.
        data_fd: u32,
    }
);
wire!(
    /// Fixed part of the data that start the log of written pages; ranges may follow.
    LoggingControl, 16 {
        /// Bytes of a page; a hint.
        page_size: u64,
        /// How many ranges follow.
        num_ranges: u32,
        /// 0.
        reserved: u32,
    }
);
wire!(
    /// A range of [`LoggingControl`], and what is asked of the log.
    LoggingRange, 16 {
        /// First device-visible address.
        address: u64,
        /// Bytes.
        size: u64,
    }
);
wire!(
    /// Fixed part of the log's report, request and reply; in the reply a bit for each page follows.
    LoggingReport, 24 {
        /// First device-visible address.
        address: u64,
        /// Bytes.
        size: u64,
        /// Bytes that a bit stands for.
        page_size: u64,
    }
);
wire!(
    /// Head of MIG_DATA_READ and MIG_DATA_WRITE, request and reply; data may follow.
    MigrationData, 8 {
        /// Bytes the reply may take, or of the request; in the reply, bytes it has.
        argsz: u32,
        /// Bytes of data.
        size: u32,
    }
);

/// Header flags: the type's bits.
pub const TYPE_MASK: u32 = 0xf;
/// Header flags: this is a request.
pub const TYPE_REQUEST: u32 = 0;
/// Header flags: this is a reply.
pub const TYPE_REPLY: u32 = 1;
/// Header flags: the request wants no reply.
pub const NO_REPLY: u32 = 1 << 4;
/// Header flags: the reply reports an error.
pub const ERROR: u32 = 1 << 5;

/// DMA_MAP: the device may read the range.
pub const DMA_READ: u32 = 1 << 0;
/// DMA_MAP: the device may write the range.
pub const DMA_WRITE: u32 = 1 << 1;
/// DMA_MAP: the file is to be mapped (an extension of libvfio-user; the default when there is a file).
pub const DMA_MMAP: u32 = 1 << 2;

/// DMA_UNMAP: also return the dirty bitmap.
pub const UNMAP_DIRTY_BITMAP: u32 = 1 << 0;
/// DMA_UNMAP: unmap everything; address and size are 0.
pub const UNMAP_ALL: u32 = 1 << 1;

/// Device info: DEVICE_RESET works.
pub const DEVICE_RESET: u32 = 1 << 0;
/// Device info: a PCI device.
pub const DEVICE_PCI: u32 = 1 << 1;

/// Region info: mappable.
pub const REGION_MMAP: u32 = 1 << 2;
/// Region info: capabilities follow.
pub const REGION_CAPS: u32 = 1 << 3;
/// Region capability: only some areas are mappable.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// SET_IRQS: no data.
pub const IRQ_DATA_NONE: u32 = 1 << 0;
/// SET_IRQS: booleans follow.
pub const IRQ_DATA_BOOL: u32 = 1 << 1;
/// SET_IRQS: event fds came along.
pub const IRQ_DATA_EVENTFD: u32 = 1 << 2;
/// SET_IRQS: mask.
pub const IRQ_ACTION_MASK: u32 = 1 << 3;
/// SET_IRQS: unmask.
pub const IRQ_ACTION_UNMASK: u32 = 1 << 4;
/// SET_IRQS: trigger.
pub const IRQ_ACTION_TRIGGER: u32 = 1 << 5;

/// Feature flags: the feature's number.
pub const FEATURE_MASK: u32 = 0xffff;
/// Feature flags: tell its data.
pub const FEATURE_GET: u32 = 1 << 16;
/// Feature flags: set its data.
pub const FEATURE_SET: u32 = 1 << 17;
/// Feature flags: is it there, and does it know the other operations named?
pub const FEATURE_PROBE: u32 = 1 << 18;
/// Feature: how the device can be migrated.
pub const FEATURE_MIGRATION: u32 = 1;
/// Feature: the device's migration state.
pub const FEATURE_DEVICE_STATE: u32 = 2;
/// Feature: start the log of written pages.
pub const FEATURE_LOGGING_START: u32 = 6;
/// Feature: end it.
pub const FEATURE_LOGGING_STOP: u32 = 7;
/// Feature: tell what is in it, and forget that.
pub const FEATURE_LOGGING_REPORT: u32 = 8;

/// Migration feature: the state is copied while the device stands still.
pub const MIGRATION_STOP_COPY: u64 = 1 << 0;
/// Migration feature: the copy may begin while the device runs.
pub const MIGRATION_PRE_COPY: u64 = 1 << 2;
