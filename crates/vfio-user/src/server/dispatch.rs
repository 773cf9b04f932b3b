//! One request, one answer: checks it against the device, calls the device, replies.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{Connection, ConnectionError, Deferred, feature::migration};
use crate::codec::{
    self, Command, Header, MAX_TRANSFER, ProtocolError, Request, VersionError, WriteMulti, encode_region, wire,
};
use crate::device::{Device, DmaUnmap, IrqSet, Outcome, RegionFlags};
use crate::transport::{Frame, KEPT_TRANSFER};

/// A larger scratch buffer is given back after use, in bytes.
const KEEP_SCRATCH: usize = 64 * 1024;

/// What a handler wants to be done, besides a reply it has sent itself.
pub(super) enum Refusal {
    Protocol(ProtocolError),
    Device(Errno),
    Connection(ConnectionError),
}

impl From<ProtocolError> for Refusal {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Device(errno)
    }
}

impl From<ConnectionError> for Refusal {
    fn from(error: ConnectionError) -> Self {
        Self::Connection(error)
    }
}

impl Connection {
    /// Handles one request to its end, or to its deferral.
    pub(super) fn request(&mut self, frame: Frame, device: &mut dyn Device) -> Result<(), ConnectionError> {
        let Frame { header, payload, fds } = frame;
        if let Some(keep) = self.transport.keep() {
            keep.begin(header.id, header.command);
        }
        if self.capabilities.is_none() && header.command != Command::Version as u16 {
            self.reply_error(&header, Errno::INVAL)?;
            return Err(VersionError::NotFirst(header.command).into());
        }
        let result = Request::parse(header.command, &payload, fds)
            .map_err(Refusal::from)
            .and_then(|request| self.handle(&header, request, device));
        self.transport.recycle(payload);
        let mut held = false;
        match result {
            Ok(()) => held = matches!(Command::from_wire(header.command), Some(Command::DmaMap | Command::DeviceSetIrqs)),
            Err(Refusal::Connection(error)) => return Err(error),
            Err(Refusal::Device(errno)) => self.reply_error(&header, errno)?,
            Err(Refusal::Protocol(error)) => {
                let errno = error.errno();
                self.rejection = Some(error);
                self.reply_error(&header, errno)?;
            }
        }
        if self.deferred.is_some() { Ok(()) } else { self.finish_request(held) }
    }

    fn handle(&mut self, header: &Header, request: Request<'_>, device: &mut dyn Device) -> Result<(), Refusal> {
        match request {
            Request::Version { major, minor, data } => self.version(header, major, minor, data, device.max_dma_maps()),
            Request::DeviceInfo => self.device_info(header, device),
            Request::RegionInfo { argsz, index } => self.region_info(header, argsz, index, device),
            Request::RegionIoFds { index } => self.region_io_fds(header, index, device),
            Request::IrqInfo { index } => self.irq_info(header, index, device),
            Request::SetIrqs(set) => {
                check_irqs(&set, device)?;
                device.set_irqs(set)?;
                Ok(self.reply(header, [&[], &[]], &[])?)
            }
            Request::DmaMap(map) => {
                device.dma_map(map)?;
                Ok(self.reply(header, [&[], &[]], &[])?)
            }
            Request::DmaUnmap(unmap) => {
                let outcome = device.dma_unmap(unmap);
                let (flags, address, size) = match unmap {
                    DmaUnmap::Range { address, size } => (0, address, size),
                    DmaUnmap::All => (wire::UNMAP_ALL, 0, 0),
                };
                let argsz = size_of::<wire::DmaUnmap>() as u32;
                let echo = wire::DmaUnmap { argsz, flags, address, size };
                self.finish(header, outcome, echo.as_bytes())
            }
            Request::Reset => {
                if !device.info().reset {
                    return Err(ProtocolError::Unsupported(Command::DeviceReset).into());
                }
                let outcome = device.reset();
                self.finish(header, outcome, &[])
            }
            Request::RegionRead { region, offset, count } => self.region_read(header, region, offset, count, device),
            Request::RegionWrite { region, offset, data } => {
                write(device, Command::RegionWrite, region, offset, data)?;
                let access = wire::RegionAccess { offset, region, count: data.len() as u32 };
                Ok(self.reply(header, [access.as_bytes(), &[]], &[])?)
            }
            Request::RegionWriteMulti(writes) => self.write_multi(header, writes, device),
            Request::Feature(request) => self.feature(header, request, device),
            Request::MigrationRead { size } => self.migration_read(header, size, device),
            Request::MigrationWrite(data) => {
                migration(device, Command::MigDataWrite)?.write(data)?;
                Ok(self.reply(header, [&[], &[]], &[])?)
            }
        }
    }

    /// Replies, or remembers what to reply.
    pub(super) fn finish(&mut self, header: &Header, outcome: Outcome, payload: &[u8]) -> Result<(), Refusal> {
        match outcome {
            Outcome::Done(result) => {
                result?;
                Ok(self.reply(header, [payload, &[]], &[])?)
            }
            Outcome::Later => {
                self.deferred = Some(Deferred { header: *header, payload: payload.to_vec() });
                Ok(())
            }
        }
    }

    fn version(&mut self, header: &Header, major: u16, minor: u16, data: &[u8], maps: u32) -> Result<(), Refusal> {
        if self.capabilities.is_some() && !self.again {
            return Err(ProtocolError::VersionTwice.into());
        }
        let transfer = if self.transport.keep().is_some() { KEPT_TRANSFER } else { MAX_TRANSFER };
        match codec::negotiate(major, minor, data, transfer, maps) {
            Ok((capabilities, json)) => {
                if let Some(keep) = self.transport.keep() {
                    keep.negotiated(&capabilities);
                }
                self.capabilities = Some(capabilities);
                let version = codec::our_version();
                Ok(self.reply(header, [version.as_bytes(), json.as_bytes()], &[])?)
            }
            Err(error) => {
                self.reply_error(header, Errno::INVAL)?;
                Err(ConnectionError::from(error).into())
            }
        }
    }

    fn device_info(&mut self, header: &Header, device: &dyn Device) -> Result<(), Refusal> {
        let info = device.info();
        let reply = wire::DeviceInfo {
            argsz: size_of::<wire::DeviceInfo>() as u32,
            flags: wire::DEVICE_PCI | if info.reset { wire::DEVICE_RESET } else { 0 },
            num_regions: info.regions,
            num_irqs: info.irqs,
        };
        Ok(self.reply(header, [reply.as_bytes(), &[]], &[])?)
    }

    fn region_info(&mut self, header: &Header, argsz: u32, index: u32, device: &dyn Device) -> Result<(), Refusal> {
        check_region(device, Command::DeviceGetRegionInfo, index)?;
        let region = device.region(index);
        let mut scratch = std::mem::take(&mut self.scratch);
        let with_fd = encode_region(index, &region, argsz, &mut scratch);
        let fds: &[BorrowedFd<'_>] = match &region.fd {
            Some(fd) if with_fd => std::slice::from_ref(fd),
            _ => &[],
        };
        let result = self.reply(header, [&scratch, &[]], fds);
        self.scratch = scratch;
        Ok(result?)
    }

    /// No region of ours has event fds: clients poll the mapped pages' other side, or send messages.
    fn region_io_fds(&mut self, header: &Header, index: u32, device: &dyn Device) -> Result<(), Refusal> {
        check_region(device, Command::DeviceGetRegionIoFds, index)?;
        let argsz = size_of::<wire::RegionIoFds>() as u32;
        let reply = wire::RegionIoFds { argsz, flags: 0, index, count: 0 };
        Ok(self.reply(header, [reply.as_bytes(), &[]], &[])?)
    }

    fn irq_info(&mut self, header: &Header, index: u32, device: &dyn Device) -> Result<(), Refusal> {
        if index >= device.info().irqs {
            return Err(ProtocolError::IrqIndex { command: Command::DeviceGetIrqInfo, index }.into());
        }
        let irq = device.irq(index);
        let argsz = size_of::<wire::IrqInfo>() as u32;
        let reply = wire::IrqInfo { argsz, flags: irq.flags.bits(), index, count: irq.count };
        Ok(self.reply(header, [reply.as_bytes(), &[]], &[])?)
    }

    fn region_read(
        &mut self,
        header: &Header,
        region: u32,
        offset: u64,
        count: u32,
        device: &mut dyn Device,
    ) -> Result<(), Refusal> {
        check_access(device, Command::RegionRead, region, offset, count as usize, RegionFlags::READ)?;
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.resize(count as usize, 0);
        let read = if count == 0 { Ok(()) } else { device.region_read(region, offset, &mut scratch) };
        let access = wire::RegionAccess { offset, region, count };
        let result =
            read.map_err(Refusal::from).and_then(|()| Ok(self.reply(header, [access.as_bytes(), &scratch], &[])?));
        if scratch.capacity() <= KEEP_SCRATCH {
            self.scratch = scratch;
        }
        result
    }

    /// Stops at the first write that fails; the reply tells how many were done.
    fn write_multi(&mut self, header: &Header, writes: WriteMulti<'_>, device: &mut dyn Device) -> Result<(), Refusal> {
        let mut done = 0;
        for single in writes {
            let wire::SingleWrite { offset, region, count, data } = single;
            let data = data.get(..count as usize).unwrap_or_default();
            match write(device, Command::RegionWriteMulti, region, offset, data) {
                Ok(()) => done += 1,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(self.reply(header, [wire::WriteMulti { count: done }.as_bytes(), &[]], &[])?)
    }
}

fn write(device: &mut dyn Device, command: Command, region: u32, offset: u64, data: &[u8]) -> Result<(), Refusal> {
    check_access(device, command, region, offset, data.len(), RegionFlags::WRITE)?;
    if !data.is_empty() {
        device.region_write(region, offset, data)?;
    }
    Ok(())
}

fn check_region(device: &dyn Device, command: Command, index: u32) -> Result<(), ProtocolError> {
    if index < device.info().regions { Ok(()) } else { Err(ProtocolError::RegionIndex { command, index }) }
}

fn check_access(
    device: &dyn Device,
    command: Command,
    index: u32,
    offset: u64,
    count: usize,
    needed: RegionFlags,
) -> Result<(), ProtocolError> {
    check_region(device, command, index)?;
    let region = device.region(index);
    let size = region.size;
    if offset.checked_add(count as u64).is_none_or(|end| end > size) {
        return Err(ProtocolError::RegionRange { command, index, offset, count, size });
    }
    if !region.flags.contains(needed) {
        return Err(ProtocolError::RegionAccess { command, index });
    }
    Ok(())
}

fn check_irqs(set: &IrqSet<'_>, device: &dyn Device) -> Result<(), ProtocolError> {
    let &IrqSet { index, start, count, .. } = set;
    if index >= device.info().irqs {
        return Err(ProtocolError::IrqIndex { command: Command::DeviceSetIrqs, index });
    }
    let available = device.irq(index).count;
    if start.checked_add(count).is_none_or(|end| end > available) {
        return Err(ProtocolError::IrqRange { index, start, count, available });
    }
    Ok(())
}
