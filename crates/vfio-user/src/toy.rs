//! A small device for the tests: one register region with a shared page, one interrupt type with many vectors.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use crate::device::{
    Device, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, IrqFlags, IrqInfo, IrqSet, MmapArea, Outcome, RegionFlags,
    RegionInfo, pci,
};
use crate::migration::{LogRange, Migration, MigrationState};
use crate::server::RequestId;

pub(crate) const BAR_SIZE: u64 = 0x20_0000;
pub(crate) const DOORBELLS: [MmapArea; 2] =
    [MmapArea { offset: 0x1000, size: 0x1000 }, MmapArea { offset: 0x4000, size: 0x2000 }];
pub(crate) const VECTORS: u32 = 40;
/// A write here fails with `EIO`.
pub(crate) const BROKEN: u64 = 0x800;

/// What happened to the device, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Write(u32, u64, Vec<u8>),
    /// Address, size, offset, inode of the file.
    Map(u64, u64, u64, Option<u64>),
    Unmap(DmaUnmap),
    /// Type, start, count, action, inodes of the event fds (`None`: other data).
    Irqs(u32, u32, u32, IrqAction, Option<usize>),
    Deassign(u32, u32, u32),
    Reset,
    DmaReply(RequestId, Result<Vec<u8>, Errno>),
}

pub(crate) struct Toy {
    pub(crate) bar: Vec<u8>,
    pub(crate) page: OwnedFd,
    pub(crate) calls: Vec<Call>,
    pub(crate) eventfds: Vec<Option<OwnedFd>>,
    /// Unmaps, resets and changes of the migration state take their time.
    pub(crate) slow: bool,
    /// Its migration state, if it can be migrated; its saved state is `bar`'s first bytes.
    pub(crate) moves: Option<MigrationState>,
    /// Saved state that was read or written.
    pub(crate) moved: Vec<u8>,
}

pub(crate) fn memfd(size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("toy", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    fd
}

/// What tells two files apart.
pub(crate) fn inode(fd: &impl AsFd) -> u64 {
    File::from(fd.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap().ino()
}

impl Toy {
    pub(crate) fn new() -> Self {
        Self {
            bar: (0..BAR_SIZE).map(|byte| byte as u8).collect(),
            page: memfd(BAR_SIZE),
            calls: Vec::new(),
            eventfds: (0..VECTORS).map(|_| None).collect(),
            slow: false,
            moves: None,
            moved: Vec::new(),
        }
    }

    fn outcome(&self) -> Outcome {
        if self.slow { Outcome::Later } else { Outcome::Done(Ok(())) }
    }
}

impl Device for Toy {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { reset: true, regions: pci::REGIONS, irqs: pci::IRQS }
    }

    fn region(&self, index: u32) -> RegionInfo<'_> {
        match index {
            pci::REGION_BAR0 => RegionInfo {
                flags: RegionFlags::READ_WRITE,
                size: BAR_SIZE,
                offset: 0,
                areas: &DOORBELLS,
                fd: Some(self.page.as_fd()),
            },
            pci::REGION_ROM => RegionInfo { flags: RegionFlags::READ, size: 0x1000, ..RegionInfo::ABSENT },
            _ => RegionInfo::ABSENT,
        }
    }

    fn irq(&self, index: u32) -> IrqInfo {
        let count = if index == pci::IRQ_MSIX { VECTORS } else { 0 };
        IrqInfo { flags: IrqFlags::EVENTFD | IrqFlags::NORESIZE, count }
    }

    fn region_read(&mut self, _index: u32, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let start = offset as usize;
        buf.copy_from_slice(&self.bar[start..start + buf.len()]);
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if offset == BROKEN {
            return Err(Errno::IO);
        }
        let start = offset as usize;
        self.bar[start..start + data.len()].copy_from_slice(data);
        self.calls.push(Call::Write(index, offset, data.to_vec()));
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        if self.calls.iter().any(|call| matches!(call, Call::Map(address, ..) if *address == map.address)) {
            return Err(Errno::EXIST);
        }
        self.calls.push(Call::Map(map.address, map.size, map.offset, map.fd.as_deref().map(inode)));
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Outcome {
        self.calls.push(Call::Unmap(unmap));
        self.outcome()
    }

    fn set_irqs(&mut self, set: IrqSet<'_>) -> Result<(), Errno> {
        let IrqSet { index, start, count, action, data } = set;
        self.calls.push(match data {
            IrqData::Eventfds(fds) => {
                let sent = fds.len();
                for (slot, fd) in self.eventfds[start as usize..].iter_mut().zip(fds) {
                    assert!(fd.as_raw_fd() >= 0);
                    *slot = Some(fd.into_inner());
                }
                Call::Irqs(index, start, count, action, Some(sent))
            }
            IrqData::Deassign => Call::Deassign(index, start, count),
            IrqData::None | IrqData::Bool(_) => Call::Irqs(index, start, count, action, None),
        });
        Ok(())
    }

    fn reset(&mut self) -> Outcome {
        self.calls.push(Call::Reset);
        self.outcome()
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.moves.is_some().then_some(self as &mut dyn Migration)
    }

    fn dma_reply(&mut self, id: RequestId, result: Result<&[u8], Errno>) {
        self.calls.push(Call::DmaReply(id, result.map(<[u8]>::to_vec)));
    }
}

impl Migration for Toy {
    fn state(&self) -> MigrationState {
        self.moves.expect("it can be migrated")
    }

    fn set_state(&mut self, state: MigrationState) -> Outcome {
        self.moves = Some(state);
        self.outcome()
    }

    fn read(&mut self, most: usize) -> Result<Vec<u8>, Errno> {
        Ok(self.bar.drain(..most.min(100)).collect())
    }

    fn write(&mut self, data: &[u8]) -> Result<(), Errno> {
        self.moved.extend_from_slice(data);
        Ok(())
    }

    fn start_logging(&mut self, page_size: u64) -> Result<(), Errno> {
        if page_size == 4096 { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn stop_logging(&mut self) {}

    fn report(&mut self, range: LogRange, bitmap: &mut [u8]) -> Result<(), Errno> {
        if range.address == 0 {
            return Err(Errno::NOENT);
        }
        bitmap.fill(0xa5);
        Ok(())
    }
}
