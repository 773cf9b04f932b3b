//! The requests a client sends to a server, checked as far as is possible without knowing the device.

use zerocopy::{FromBytes, IntoBytes};

use super::{Command, FeatureRequest, MAX_TRANSFER, MAX_WRITES, ProtocolError, feature, fixed, wire};
use crate::device::{DmaMap, DmaUnmap, IrqAction, IrqData, IrqSet};
use crate::received::Received;

/// A request, its lengths and flags checked; indexes and ranges of the device are not yet.
#[derive(Debug)]
pub enum Request<'a> {
    /// VERSION.
    Version {
        /// Proposed major version.
        major: u16,
        /// Proposed minor version.
        minor: u16,
        /// JSON with its NUL; may be empty.
        data: &'a [u8],
    },
    /// DMA_MAP.
    DmaMap(DmaMap),
    /// DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// DEVICE_GET_INFO.
    DeviceInfo,
    /// DEVICE_GET_REGION_INFO.
    RegionInfo {
        /// Bytes the reply may take.
        argsz: u32,
        /// Which region.
        index: u32,
    },
    /// DEVICE_GET_REGION_IO_FDS.
    RegionIoFds {
        /// Which region.
        index: u32,
    },
    /// DEVICE_GET_IRQ_INFO.
    IrqInfo {
        /// Which interrupt type.
        index: u32,
    },
    /// DEVICE_SET_IRQS.
    SetIrqs(IrqSet<'a>),
    /// REGION_READ.
    RegionRead {
        /// Which region.
        region: u32,
        /// From the start of the region.
        offset: u64,
        /// Bytes, at most [`MAX_TRANSFER`].
        count: u32,
    },
    /// REGION_WRITE.
    RegionWrite {
        /// Which region.
        region: u32,
        /// From the start of the region.
        offset: u64,
        /// What to write, at most [`MAX_TRANSFER`] bytes.
        data: &'a [u8],
    },
    /// REGION_WRITE_MULTI.
    RegionWriteMulti(WriteMulti<'a>),
    /// DEVICE_RESET.
    Reset,
    /// DEVICE_FEATURE.
    Feature(FeatureRequest),
    /// MIG_DATA_READ.
    MigrationRead {
        /// The most bytes that are wanted, at most [`MAX_TRANSFER`].
        size: u32,
    },
    /// MIG_DATA_WRITE, at most [`MAX_TRANSFER`] bytes.
    MigrationWrite(&'a [u8]),
}

/// The writes of a REGION_WRITE_MULTI: an iterator over checked entries.
#[derive(Clone, Debug)]
pub struct WriteMulti<'a> {
    entries: &'a [u8],
}

impl Iterator for WriteMulti<'_> {
    type Item = wire::SingleWrite;

    fn next(&mut self) -> Option<wire::SingleWrite> {
        let (entry, rest) = wire::SingleWrite::read_from_prefix(self.entries).ok()?;
        self.entries = rest;
        Some(entry)
    }
}

impl<'a> Request<'a> {
    /// Checks a request's payload. File descriptors that the command does not take make it an error, but for
    /// `DMA_UNMAP`: SPDK's client sends the region's along. They are closed either way when dropped.
    pub fn parse(command: u16, payload: &'a [u8], mut fds: Vec<Received>) -> Result<Self, ProtocolError> {
        let command = Command::from_wire(command).ok_or(ProtocolError::UnknownCommand(command))?;
        match command {
            Command::DmaMap => return parse_dma_map(payload, fds),
            Command::DeviceSetIrqs => return parse_set_irqs(payload, fds),
            Command::DmaUnmap => fds.clear(),
            _ => no_fds(command, &mut fds)?,
        }
        match command {
            Command::Version => {
                let (head, data) = fixed::<wire::Version>(command, payload)?;
                Ok(Self::Version { major: head.major, minor: head.minor, data })
            }
            Command::DmaUnmap => parse_dma_unmap(payload),
            Command::DeviceGetInfo => {
                let (head, _) = fixed::<wire::DeviceInfo>(command, payload)?;
                argument_size(command, head.argsz, size_of::<wire::DeviceInfo>())?;
                Ok(Self::DeviceInfo)
            }
            Command::DeviceGetRegionInfo => {
                let (head, _) = fixed::<wire::RegionInfo>(command, payload)?;
                argument_size(command, head.argsz, size_of::<wire::RegionInfo>())?;
                Ok(Self::RegionInfo { argsz: head.argsz, index: head.index })
            }
            Command::DeviceGetRegionIoFds => {
                let (head, _) = fixed::<wire::RegionIoFds>(command, payload)?;
                argument_size(command, head.argsz, size_of::<wire::RegionIoFds>())?;
                if head.flags != 0 || head.count != 0 {
                    return Err(ProtocolError::Flags { command, flags: head.flags });
                }
                Ok(Self::RegionIoFds { index: head.index })
            }
            Command::DeviceGetIrqInfo => {
                let (head, _) = fixed::<wire::IrqInfo>(command, payload)?;
                argument_size(command, head.argsz, size_of::<wire::IrqInfo>())?;
                Ok(Self::IrqInfo { index: head.index })
            }
            Command::RegionRead => {
                let (head, _) = fixed::<wire::RegionAccess>(command, payload)?;
                transfer(command, head.count)?;
                Ok(Self::RegionRead { region: head.region, offset: head.offset, count: head.count })
            }
            Command::RegionWrite => {
                let (head, data) = fixed::<wire::RegionAccess>(command, payload)?;
                transfer(command, head.count)?;
                if data.len() != head.count as usize {
                    return Err(ProtocolError::DataLength { command, count: head.count.into(), length: data.len() });
                }
                Ok(Self::RegionWrite { region: head.region, offset: head.offset, data })
            }
            Command::RegionWriteMulti => parse_write_multi(payload),
            Command::DeviceReset => Ok(Self::Reset),
            Command::DeviceFeature => feature::parse(payload).map(Self::Feature),
            Command::MigDataRead => migration_data(command, payload).map(|(size, _)| Self::MigrationRead { size }),
            Command::MigDataWrite => {
                let (size, data) = migration_data(command, payload)?;
                if data.len() != size as usize {
                    return Err(ProtocolError::DataLength { command, count: size.into(), length: data.len() });
                }
                Ok(Self::MigrationWrite(data))
            }
            // The first migration protocol is gone, and memory is only asked for by servers. The two others were handled above.
            Command::DirtyPages | Command::DmaRead | Command::DmaWrite | Command::DmaMap | Command::DeviceSetIrqs => {
                Err(ProtocolError::Unsupported(command))
            }
        }
    }
}

/// The size that a MIG_DATA message says, and the data that follow.
fn migration_data(command: Command, payload: &[u8]) -> Result<(u32, &[u8]), ProtocolError> {
    let (wire::MigrationData { argsz, size }, data) = fixed(command, payload)?;
    transfer(command, size)?;
    argument_size(command, argsz, size_of::<wire::MigrationData>() + size as usize)?;
    Ok((size, data))
}

fn no_fds(command: Command, fds: &mut Vec<Received>) -> Result<(), ProtocolError> {
    let count = fds.len();
    fds.clear();
    if count == 0 { Ok(()) } else { Err(ProtocolError::FdCount { command, count, expected: 0 }) }
}

pub(super) fn argument_size(command: Command, argsz: u32, needed: usize) -> Result<(), ProtocolError> {
    let needed = needed as u32;
    if argsz >= needed { Ok(()) } else { Err(ProtocolError::ArgumentSize { command, argsz, needed }) }
}

fn transfer(command: Command, count: u32) -> Result<(), ProtocolError> {
    if count <= MAX_TRANSFER { Ok(()) } else { Err(ProtocolError::TooLarge { command, count: count.into() }) }
}

/// Whether a range has bytes and ends, at the latest, with the address space.
pub(super) fn is_range(address: u64, size: u64) -> bool {
    size.checked_sub(1).is_some_and(|rest| address.checked_add(rest).is_some())
}

fn parse_dma_map<'a>(payload: &[u8], mut fds: Vec<Received>) -> Result<Request<'a>, ProtocolError> {
    let command = Command::DmaMap;
    let (head, _) = fixed::<wire::DmaMap>(command, payload)?;
    let wire::DmaMap { argsz, flags, offset, address, size } = head;
    argument_size(command, argsz, size_of::<wire::DmaMap>())?;
    let known = wire::DMA_READ | wire::DMA_WRITE | wire::DMA_MMAP;
    if flags & !known != 0 {
        return Err(ProtocolError::UnsupportedFlags { command, flags });
    }
    let expected = usize::from(flags & wire::DMA_MMAP != 0 || !fds.is_empty());
    if fds.len() != expected {
        return Err(ProtocolError::FdCount { command, count: fds.len(), expected });
    }
    // A file offset is signed everywhere below us.
    let file_end = offset.checked_add(size).filter(|end| i64::try_from(*end).is_ok());
    if !is_range(address, size) || file_end.is_none() {
        return Err(ProtocolError::DmaRange { command, address, size, offset });
    }
    Ok(Request::DmaMap(DmaMap {
        address,
        size,
        offset,
        readable: flags & wire::DMA_READ != 0,
        writable: flags & wire::DMA_WRITE != 0,
        fd: fds.pop(),
    }))
}

fn parse_dma_unmap<'a>(payload: &[u8]) -> Result<Request<'a>, ProtocolError> {
    let command = Command::DmaUnmap;
    let (head, _) = fixed::<wire::DmaUnmap>(command, payload)?;
    let wire::DmaUnmap { argsz, flags, address, size } = head;
    argument_size(command, argsz, size_of::<wire::DmaUnmap>())?;
    let bad_range = ProtocolError::DmaRange { command, address, size, offset: 0 };
    match flags {
        0 if is_range(address, size) => Ok(Request::DmaUnmap(DmaUnmap::Range { address, size })),
        wire::UNMAP_ALL if address == 0 && size == 0 => Ok(Request::DmaUnmap(DmaUnmap::All)),
        0 | wire::UNMAP_ALL => Err(bad_range),
        wire::UNMAP_DIRTY_BITMAP => Err(ProtocolError::UnsupportedFlags { command, flags }),
        _ => Err(ProtocolError::Flags { command, flags }),
    }
}

fn parse_set_irqs(payload: &[u8], fds: Vec<Received>) -> Result<Request<'_>, ProtocolError> {
    let command = Command::DeviceSetIrqs;
    let (head, bools) = fixed::<wire::SetIrqs>(command, payload)?;
    let wire::SetIrqs { argsz, flags, index, start, count } = head;
    argument_size(command, argsz, size_of::<wire::SetIrqs>())?;
    let action_bits = wire::IRQ_ACTION_MASK | wire::IRQ_ACTION_UNMASK | wire::IRQ_ACTION_TRIGGER;
    let bad_flags = ProtocolError::Flags { command, flags };
    let action = match flags & action_bits {
        wire::IRQ_ACTION_MASK => IrqAction::Mask,
        wire::IRQ_ACTION_UNMASK => IrqAction::Unmask,
        wire::IRQ_ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(bad_flags),
    };
    let data_bits = flags & !action_bits;
    if data_bits != wire::IRQ_DATA_EVENTFD && !fds.is_empty() {
        return Err(ProtocolError::FdCount { command, count: fds.len(), expected: 0 });
    }
    let data = match data_bits {
        wire::IRQ_DATA_NONE => IrqData::None,
        wire::IRQ_DATA_BOOL => IrqData::Bool(bools.get(..count as usize).ok_or(ProtocolError::DataLength {
            command,
            count: count.into(),
            length: bools.len(),
        })?),
        // A client sends all descriptors of a range or none; none takes the old ones away.
        wire::IRQ_DATA_EVENTFD if fds.is_empty() => IrqData::Deassign,
        wire::IRQ_DATA_EVENTFD if fds.len() == count as usize => IrqData::Eventfds(fds),
        wire::IRQ_DATA_EVENTFD => {
            return Err(ProtocolError::FdCount { command, count: fds.len(), expected: count as usize });
        }
        _ => return Err(bad_flags),
    };
    let disable_all = action == IrqAction::Trigger && matches!(data, IrqData::None) && start == 0;
    if count == 0 && !disable_all {
        return Err(bad_flags);
    }
    Ok(Request::SetIrqs(IrqSet { index, start, count, action, data }))
}

fn parse_write_multi(payload: &[u8]) -> Result<Request<'_>, ProtocolError> {
    let command = Command::RegionWriteMulti;
    let (head, entries) = fixed::<wire::WriteMulti>(command, payload)?;
    let bad_length = ProtocolError::DataLength { command, count: head.count, length: entries.len() };
    let length = usize::try_from(head.count).ok().and_then(|n| n.checked_mul(size_of::<wire::SingleWrite>()));
    if length != Some(entries.len()) {
        return Err(bad_length);
    }
    if head.count > MAX_WRITES as u64 {
        return Err(ProtocolError::TooLarge { command, count: head.count });
    }
    let writes = WriteMulti { entries };
    for write in writes.clone() {
        if write.count as usize > write.data.as_bytes().len() {
            return Err(ProtocolError::TooLarge { command, count: write.count.into() });
        }
    }
    Ok(Request::RegionWriteMulti(writes))
}
