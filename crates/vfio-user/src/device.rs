//! What a device is to this crate: the trait a server's device implements and the words it uses.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::{codec::MAX_DMA_MAPS, migration::Migration, received::Received, server::RequestId};

/// Indexes of a PCI device's regions and interrupt types, fixed by VFIO.
pub mod pci {
    /// BAR 0; the other BARs are 1 to 5.
    pub const REGION_BAR0: u32 = 0;
    /// Expansion ROM.
    pub const REGION_ROM: u32 = 6;
    /// Configuration space.
    pub const REGION_CONFIG: u32 = 7;
    /// Legacy VGA ranges.
    pub const REGION_VGA: u32 = 8;
    /// How many regions a PCI device reports.
    pub const REGIONS: u32 = 9;
    /// The legacy interrupt.
    pub const IRQ_INTX: u32 = 0;
    /// MSI.
    pub const IRQ_MSI: u32 = 1;
    /// MSI-X.
    pub const IRQ_MSIX: u32 = 2;
    /// Error notification.
    pub const IRQ_ERR: u32 = 3;
    /// Request to give the device back.
    pub const IRQ_REQ: u32 = 4;
    /// How many interrupt types a PCI device reports.
    pub const IRQS: u32 = 5;
}

/// The device behind a [`Connection`](crate::Connection). Every call is synchronous, on the connection's thread.
///
/// Nothing here may block. What cannot be done at once (an unmap that waits for commands in flight, a reset that
/// drains) answers [`Outcome::Later`].
pub trait Device {
    /// What the device is. Constant while a client is connected.
    fn info(&self) -> DeviceInfo;

    /// The region `index`, which is below `info().regions`. Also called before every access: keep it cheap.
    fn region(&self, index: u32) -> RegionInfo<'_>;

    /// The interrupt type `index`, which is below `info().irqs`.
    fn irq(&self, index: u32) -> IrqInfo;

    /// Reads `buf.len()` bytes (at least one) at `offset`. The range lies inside a readable region.
    fn region_read(&mut self, index: u32, offset: u64, buf: &mut [u8]) -> Result<(), Errno>;

    /// Writes `data` (at least one byte) at `offset`. The range lies inside a writable region.
    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno>;

    /// Pieces of memory that a client may have mapped at once: what it is told of them (at most 4096).
    fn max_dma_maps(&self) -> u32 {
        MAX_DMA_MAPS
    }

    /// Client memory becomes reachable. `EEXIST` if it overlaps memory that already is.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno>;

    /// Client memory goes away: all that was mapped there, which may be nothing. Once this is done nothing may touch it any more.
    /// `EINVAL` if the range begins or ends within memory that was mapped as one.
    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Outcome;

    /// Changes interrupts. Type and range exist.
    fn set_irqs(&mut self, set: IrqSet<'_>) -> Result<(), Errno>;

    /// Resets the device.
    fn reset(&mut self) -> Outcome;

    /// How it is moved to another server, if it can be. Constant while a client is connected.
    fn migration(&mut self) -> Option<&mut dyn Migration>;

    /// The answer to [`Connection::dma_read`](crate::Connection::dma_read) (the bytes, as many as were asked for) or
    /// [`Connection::dma_write`](crate::Connection::dma_write) (empty). Also called while a request is deferred.
    fn dma_reply(&mut self, id: RequestId, result: Result<&[u8], Errno>);
}

/// How a request ends that may take time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done; the client is answered now.
    Done(Result<(), Errno>),
    /// It goes on. No other request is handled until
    /// [`Connection::finish_deferred`](crate::Connection::finish_deferred).
    Later,
}

/// What DEVICE_GET_INFO tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// DEVICE_RESET works.
    pub reset: bool,
    /// How many regions; 9 for a PCI device.
    pub regions: u32,
    /// How many interrupt types; 5 for a PCI device.
    pub irqs: u32,
}

macro_rules! flags {
    ($(#[$doc:meta])* $name:ident { $($(#[$flag_doc:meta])* $flag:ident = $value:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u32);

        impl $name {
            $($(#[$flag_doc])* pub const $flag: Self = Self($value);)*

            /// As on the wire.
            pub const fn bits(self) -> u32 {
                self.0
            }

            pub(crate) const fn from_bits(bits: u32) -> Self {
                Self(bits)
            }

            /// True if all of `other`'s flags are set.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }
        }

        impl std::ops::BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }
    };
}

flags!(
    /// How a region may be accessed. That it is mappable follows from its file.
    RegionFlags {
        /// Not at all: the region does not exist.
        NONE = 0,
        /// It can be read.
        READ = 1,
        /// It can be written.
        WRITE = 2,
        /// Both.
        READ_WRITE = 3,
    }
);

flags!(
    /// What an interrupt type can do.
    IrqFlags {
        /// Nothing: the type does not exist.
        NONE = 0,
        /// It is signalled through event fds.
        EVENTFD = 1,
        /// It can be masked and unmasked.
        MASKABLE = 2,
        /// It masks itself when triggered.
        AUTOMASKED = 4,
        /// All its interrupts are set up at once.
        NORESIZE = 8,
    }
);

/// A region, as the server describes it.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// How it may be accessed by messages.
    pub flags: RegionFlags,
    /// Bytes.
    pub size: u64,
    /// Where the region starts in `fd`.
    pub offset: u64,
    /// The parts that may be mapped; empty with a file means all of it. Offsets from the start of the region, whole pages.
    pub areas: &'a [MmapArea],
    /// What the client maps, if it may. Sent with the reply.
    pub fd: Option<BorrowedFd<'a>>,
}

impl RegionInfo<'_> {
    /// A region that does not exist; VFIO wants every index described.
    pub const ABSENT: Self = Self { flags: RegionFlags::NONE, size: 0, offset: 0, areas: &[], fd: None };
}

/// A part of a region that may be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmapArea {
    /// From the start of the region, in bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// An interrupt type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// What it can do.
    pub flags: IrqFlags,
    /// How many interrupts.
    pub count: u32,
}

/// Client memory that becomes reachable. Not empty; neither the addresses nor the file offsets wrap.
#[derive(Debug)]
pub struct DmaMap {
    /// First device-visible address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Where the range starts in `fd`.
    pub offset: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The memory itself. Without it, it is reached by messages only; see the crate's page for what QEMU does then.
    pub fd: Option<Received>,
}

/// Client memory that goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaUnmap {
    /// Every range that was mapped within this one.
    Range {
        /// First device-visible address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// Everything.
    All,
}

/// A change of interrupts.
#[derive(Debug)]
pub struct IrqSet<'a> {
    /// Which type.
    pub index: u32,
    /// First interrupt of the type.
    pub start: u32,
    /// How many. 0 only with [`IrqData::None`] and [`IrqAction::Trigger`]: forget all event fds of the type.
    pub count: u32,
    /// What happens.
    pub action: IrqAction,
    /// To which of them, or with which event fds.
    pub data: IrqData<'a>,
}

/// What happens to interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Masked.
    Mask,
    /// Unmasked.
    Unmask,
    /// Triggered; with event fds: how the server signals them from now on.
    Trigger,
}

/// What came with a change of interrupts.
#[derive(Debug)]
pub enum IrqData<'a> {
    /// The action happens to the whole range.
    None,
    /// One byte for each; the action happens where it is not 0.
    Bool(&'a [u8]),
    /// One for each.
    Eventfds(Vec<Received>),
    /// The event fds of the range are taken away.
    Deassign,
}
