//! The PCI function as vfio-user clients see it: regions, interrupts, memory, reset.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use millrace_engine::ShardContext;
use millrace_memory::{GuestAddress, MapError, Protection};
use millrace_nvme_spec::registers::offset;
use millrace_vfio_user::{
    Connection, ConnectionError, Device, DeviceInfo, DmaMap, DmaUnmap, Errno, IrqInfo, IrqSet, LogRange, Migration,
    MigrationState, MmapArea, Outcome, Progress, Received, RegionFlags, RegionInfo, RequestId, pci,
};

use crate::log_limit::LogLimit;
use crate::nvme::{
    DoorbellMode,
    controller::Controller,
    pci::{BAR0_SIZE, BAR4_SIZE, CONFIG_SIZE},
    registers::{Phase, Reset},
};

const REGION_BAR4: u32 = 4;
/// What a client maps of BAR0.
const DOORBELL_AREAS: [MmapArea; 1] = [MmapArea { offset: offset::DOORBELLS, size: BAR0_SIZE - offset::DOORBELLS }];

/// How long commands in flight may hold an unmap up: longer than nearly all take, and well below the 5 s for which QEMU waits for an answer.
/// What they wait for (a throttle) may take far longer, and their guest's reset could not come to us meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
/// From then on, how often those are looked for that can be called off.
const IMPATIENCE: Duration = Duration::from_millis(50);
/// How long no command is taken after the first part of a guest's memory has gone: QEMU changes a memory map by one message for each part, and
/// its guest runs meanwhile. A command that names what is about to come again would fail. What goes or comes meanwhile does not prolong it:
/// a guest that gives memory back piece by piece would have no disk for as long.
const MAPS: Duration = Duration::from_millis(2);

/// What a client waits for until nothing is in flight.
#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    /// Memory shall go. It goes when the commands in flight have been completed into it, and no new ones are taken meanwhile:
    /// so that a client that only splits a region (as QEMU does when firmware changes the memory map) loses none of them. Those that take
    /// too long are called off, at this time.
    Unmap(DmaUnmap, Instant),
    Reset,
    /// The controller shall stand still.
    Migrate(MigrationState),
}

impl Waiting {
    /// Does what was waited for, if it can be done now.
    pub(super) fn finish(&mut self, controller: &mut Controller, cx: &ShardContext<'_>) -> Option<Result<(), Errno>> {
        match self {
            Self::Unmap(what, _) if controller.is_quiet() => Some(unmap(controller, *what)),
            Self::Unmap(_, due) => {
                if cx.now() >= *due {
                    *due = cx.now() + IMPATIENCE;
                    controller.hurry(cx);
                }
                None
            }
            Self::Reset => (controller.phase != Phase::Resetting).then_some(Ok(())),
            Self::Migrate(state) => controller.migrate(*state),
        }
    }

    /// When it is looked at again, whatever happens.
    pub(super) fn due(self) -> Option<Instant> {
        if let Self::Unmap(_, due) = self { Some(due) } else { None }
    }
}

/// Unmaps memory while nothing is in flight.
fn unmap(controller: &mut Controller, what: DmaUnmap) -> Result<(), Errno> {
    match what {
        DmaUnmap::Range { address, size } => {
            if let Some(client) = &controller.client {
                client.remove_range(address, size);
            }
            controller.memory.unmap(GuestAddress(address), size).map_err(|error| errno_of(&error))?;
            if let Some(port) = &mut controller.port {
                port.unmap(address, size);
            }
        }
        DmaUnmap::All => {
            if let Some(client) = &controller.client {
                client.remove_regions();
            }
            controller.memory.unmap_all();
            if let Some(port) = &mut controller.port {
                port.unmap_all();
            }
        }
    }
    controller.sink.hurry(false);
    controller.caches.forget_translations();
    controller.drained();
    // A program changes what it maps all the time, and knows itself which of its commands use it.
    if !controller.config.session {
        let (until, now) = (&mut controller.lifecycle.maps_until, Instant::now());
        if until.is_none_or(|until| until <= now) {
            *until = Some(now + MAPS);
        }
    }
    Ok(())
}

fn errno_of(error: &MapError) -> Errno {
    match error {
        MapError::BadRange { .. } | MapError::ShortFile { .. } | MapError::NotMemory { .. } | MapError::Cut { .. } => {
            Errno::INVAL
        }
        MapError::Overlap { .. } => Errno::EXIST,
        MapError::Missing { .. } => Errno::NOENT,
        MapError::TooMany(_) | MapError::TooLarge { .. } | MapError::Full { .. } => Errno::NOSPC,
        MapError::Kernel { source, .. } => Errno::from_io_error(source).unwrap_or(Errno::NOMEM),
    }
}

/// The controller during one call of the connection.
pub(super) struct Function<'a> {
    pub(super) controller: &'a mut Controller,
    pub(super) waiting: &'a mut Option<Waiting>,
    pub(super) log: &'a mut LogLimit,
    /// The request may have been handled before, by a worker that has ended.
    pub(super) again: bool,
}

impl Function<'_> {
    /// Handles what the client sent, within a budget of messages.
    pub(super) fn serve(&mut self, connection: &mut Connection, budget: usize) -> Result<Progress, ConnectionError> {
        for _ in 0..budget {
            let Some(message) = connection.receive()? else {
                return Ok(if connection.is_deferred() { Progress::Deferred } else { Progress::Idle });
            };
            self.again = connection.is_again();
            connection.dispatch(message, self)?;
        }
        Ok(Progress::More)
    }

    fn is_mapped(&self, address: u64, size: u64) -> bool {
        self.controller.memory.regions().any(|(at, len, ..)| (at.0, len) == (address, size))
    }
}

impl Device for Function<'_> {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { reset: true, regions: pci::REGIONS, irqs: pci::IRQS }
    }

    fn region(&self, index: u32) -> RegionInfo<'_> {
        let flags = RegionFlags::READ_WRITE;
        let plain = |size| RegionInfo { flags, size, ..RegionInfo::ABSENT };
        match index {
            pci::REGION_BAR0 if self.controller.config.doorbells == DoorbellMode::Shared => {
                let fd = Some(self.controller.doorbells.as_fd());
                RegionInfo { flags, size: BAR0_SIZE, offset: 0, areas: &DOORBELL_AREAS, fd }
            }
            pci::REGION_BAR0 => plain(BAR0_SIZE),
            REGION_BAR4 => plain(BAR4_SIZE),
            pci::REGION_CONFIG => plain(CONFIG_SIZE),
            _ => RegionInfo::ABSENT,
        }
    }

    fn irq(&self, index: u32) -> IrqInfo {
        self.controller.interrupts.info(index)
    }

    fn region_read(&mut self, index: u32, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        match index {
            // Doorbells read as zero (PCIe 3.1.2: their content is not to be read).
            pci::REGION_BAR0 => {
                let registers = offset::DOORBELLS.saturating_sub(offset).min(buf.len() as u64) as usize;
                let (registers, doorbells) = buf.split_at_mut(registers);
                self.controller.register_read(offset, registers);
                doorbells.fill(0);
            }
            REGION_BAR4 => self.controller.msix_read(offset, buf),
            pci::REGION_CONFIG => self.controller.config_read(offset, buf),
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        match index {
            pci::REGION_BAR0 => match offset.checked_sub(offset::DOORBELLS) {
                None => self.controller.register_write(offset, data),
                Some(at) => {
                    // As many as there are: a program sends a request's words in one message.
                    if let (0, (words, [])) = (at % 4, data.as_chunks::<4>()) {
                        for (index, word) in (at / 4..).zip(words) {
                            self.controller.doorbell_write(index as usize, u32::from_le_bytes(*word));
                        }
                    }
                }
            },
            REGION_BAR4 => self.controller.msix_write(offset, data),
            pci::REGION_CONFIG => self.controller.config_write(offset, data),
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    fn max_dma_maps(&self) -> u32 {
        u32::try_from(self.controller.memory.room()).unwrap_or(u32::MAX)
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let protection = Protection { read: map.readable, write: map.writable };
        if self.again && self.is_mapped(map.address, map.size) {
            self.controller.release();
            return Ok(());
        }
        let memory = &mut self.controller.memory;
        let backing = map.fd.as_deref().map(|fd| (fd.as_fd(), map.offset));
        let mut mapped = memory.map(GuestAddress(map.address), map.size, protection, backing);
        if let Some(port) = self.controller.port.as_mut().filter(|_| mapped.is_ok()) {
            mapped = port.map(&self.controller.memory, map.address, map.size);
            if mapped.is_err() {
                // What the card cannot map the controller has not, either: the client may try again.
                let _ = self.controller.memory.unmap(GuestAddress(map.address), map.size);
            }
        }
        if let Some(client) = self.controller.client.as_ref().filter(|_| mapped.is_ok()) {
            client.add_region(map.address, map.size, protection, map.fd.as_deref().map(|fd| (fd, map.offset)));
        }
        self.controller.caches.forget_translations();
        self.controller.release();
        if mapped.is_ok() {
            // The mapping has the file: this is not its end, and need not wait behind what others have handed in.
            drop(map.fd.map(Received::into_inner));
        }
        mapped.map_err(|error| {
            if let Some(suppressed) = self.log.admit() {
                let device = &self.controller.config.name;
                tracing::warn!(device, suppressed, error = &error as &dyn std::error::Error, "mapping guest memory");
            }
            errno_of(&error)
        })
    }

    fn dma_unmap(&mut self, what: DmaUnmap) -> Outcome {
        if let DmaUnmap::Range { address, size } = what {
            // As in VFIO: all that was mapped there, be it in one piece, in several or not at all.
            match self.controller.memory.has_regions(GuestAddress(address), size) {
                Ok(true) => {}
                Ok(false) => return Outcome::Done(Ok(())),
                Err(error) => return Outcome::Done(Err(errno_of(&error))),
            }
        }
        // Until what the client has sent behind it is handled: it may be about to map the same memory in other pieces.
        self.controller.lifecycle.paused = true;
        if self.controller.is_quiet() {
            return Outcome::Done(unmap(self.controller, what));
        }
        *self.waiting = Some(Waiting::Unmap(what, Instant::now() + PATIENCE));
        Outcome::Later
    }

    fn set_irqs(&mut self, set: IrqSet<'_>) -> Result<(), Errno> {
        self.controller.interrupts.set_irqs(set)
    }

    fn reset(&mut self) -> Outcome {
        if self.controller.awaits_guest() {
            // A machine that is restored resets its devices before it knows their states.
            return Outcome::Done(Ok(()));
        }
        self.controller.leave_migration();
        self.controller.reset(Reset::Function);
        if self.controller.phase == Phase::Resetting {
            *self.waiting = Some(Waiting::Reset);
            return Outcome::Later;
        }
        Outcome::Done(Ok(()))
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.controller.config.migration.then_some(self as &mut dyn Migration)
    }

    fn dma_reply(&mut self, _: RequestId, _: Result<&[u8], Errno>) {
        // The controller reaches mapped memory only, and never asks the client for other.
    }
}

impl Migration for Function<'_> {
    fn state(&self) -> MigrationState {
        self.controller.migration_state()
    }

    fn set_state(&mut self, state: MigrationState) -> Outcome {
        if let Some(result) = self.controller.migrate(state) {
            return Outcome::Done(result);
        }
        *self.waiting = Some(Waiting::Migrate(state));
        Outcome::Later
    }

    fn read(&mut self, most: usize) -> Result<Vec<u8>, Errno> {
        self.controller.read_saved(most)
    }

    fn write(&mut self, data: &[u8]) -> Result<(), Errno> {
        self.controller.write_saved(data)
    }

    fn start_logging(&mut self, _page_size: u64) -> Result<(), Errno> {
        match (self.controller.memory.logs_writes(), self.again) {
            (true, false) => return Err(Errno::BUSY),
            (true, true) => {}
            (false, _) => self.controller.start_logging(),
        }
        Ok(())
    }

    fn stop_logging(&mut self) {
        self.controller.stop_logging();
    }

    fn report(&mut self, range: LogRange, bitmap: &mut [u8]) -> Result<(), Errno> {
        self.controller.report(range, bitmap)
    }
}
