//! A controller: registers, bring-up, queue pairs.

use std::{
    os::fd::OwnedFd,
    path::Path,
    sync::MutexGuard,
    time::{Duration, Instant},
};

use millrace_nvme_spec::{
    CommandId, Cqe, QueueId, Sqe, Version,
    identify::{IdentifyController, SglSupport},
    registers::{
        AdminQueueAttributes, Capabilities, CommandSetSelected, Configuration, ControllerStatus, Doorbell, DoorbellLayout,
        ReadyTimeouts, ShutdownNotification, ShutdownStatus, offset,
    },
};

use crate::{
    cmb::ControllerMemory,
    dma::{DmaBuffer, DmaMemory, PAGE_SIZE, Pages},
    doorbell::{BAR0, Doorbells},
    error::{DriverError, during},
    queue::{Lists, QueueMemory, QueuePair, QueueParts},
    transport::{SharedTransport, Transport, VfioUser},
    vectors::VectorTable,
};

/// How to reach and use a controller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Longest wait for a message's answer and for a command that is waited for.
    pub timeout: Duration,
    /// Bytes of memory shared with the device, a multiple of [`Pages::granularity`]; backed on first use.
    pub memory_size: usize,
    /// What that memory consists of.
    pub pages: Pages,
    /// Device address of that memory.
    pub iova: u64,
    /// Entries of the admin queues, 2 to 4096.
    pub admin_entries: u16,
    /// I/O queue pairs to ask for; the controller may give fewer.
    pub io_queues: u16,
    /// The most bytes one command may move, which is room for its list in every queue; the controller's MDTS may be less.
    pub max_transfer: usize,
    /// Write doorbells into the shared page when there is one; otherwise by messages always.
    pub mapped_doorbells: bool,
    /// Configure shadow doorbells for the I/O queues.
    pub shadow_doorbells: bool,
    /// Put submission queues into the controller's memory, where it has some for them.
    pub controller_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            memory_size: 64 << 20,
            pages: Pages::Small,
            // Past 4 GiB, so that an address cut to 32 bits is noticed.
            iova: 1 << 32,
            admin_entries: 32,
            io_queues: 64,
            max_transfer: 1 << 20,
            mapped_doorbells: true,
            shadow_doorbells: false,
            controller_memory: true,
        }
    }
}

/// What an I/O queue pair should be.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Entries of each of its queues: one more than the commands it may have in flight.
    pub entries: u32,
    /// Its identifier; `None` takes the lowest free one.
    pub id: Option<QueueId>,
    /// The interrupt vector of its completion queue, enabled before by [`Controller::enable_vectors`]; `None` is polled.
    pub vector: Option<u16>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self { entries: 128, id: None, vector: None }
    }
}

/// A controller and its admin queue.
///
/// Dropping it ends the connection at once, as a crash of its host would; [`shutdown`](Self::shutdown) is the polite way.
pub struct Controller {
    pub(crate) transport: SharedTransport,
    pub(crate) options: Options,
    pub(crate) memory: DmaMemory,
    pub(crate) doorbells: Doorbells,
    /// Where submission queues go while there is room.
    pub(crate) cmb: Option<ControllerMemory>,
    capabilities: Capabilities,
    version: Version,
    /// What enabling made; gone when disabled.
    pub(crate) enabled: Option<Enabled>,
    /// Admin commands that were waited for in vain.
    pub(crate) late: Vec<Late>,
    pub(crate) vectors: Vec<OwnedFd>,
    /// Where these can be masked, if they can.
    pub(crate) vector_table: Option<VectorTable>,
}

/// An admin command that nobody waits for any more, and that has not completed.
pub(crate) struct Late {
    /// Its identifier in the admin queue; `None`: its completion cannot come any more, or not be known.
    pub(crate) cid: Option<CommandId>,
    /// It is an Abort.
    pub(crate) aborts: bool,
    /// Where the controller may still read or write.
    pub(crate) _buffer: Option<DmaBuffer>,
}

/// State of an enabled controller.
pub(crate) struct Enabled {
    pub(crate) admin: QueuePair,
    pub(crate) identify: Option<Box<IdentifyController>>,
    /// I/O queues granted; their identifiers are 1 to this.
    granted: u16,
    /// In use, by identifier.
    used: Vec<bool>,
}

impl Controller {
    /// Connects to a vfio-user socket and brings the controller up.
    pub fn connect(path: &Path, options: &Options) -> Result<Self, DriverError> {
        let mut controller = Self::open(path, options)?;
        controller.start()?;
        Ok(controller)
    }

    /// Connects to a vfio-user socket, reads the capabilities and announces memory, but does not touch CC.
    pub fn open(path: &Path, options: &Options) -> Result<Self, DriverError> {
        let transport = VfioUser::connect(path, options.timeout)
            .map_err(|source| DriverError::Connect { path: path.to_owned(), source })?;
        Self::attach(transport, options)
    }

    /// As [`open`](Self::open), over any transport.
    pub fn attach(transport: impl Transport + 'static, options: &Options) -> Result<Self, DriverError> {
        let transport = SharedTransport::new(transport);
        let memory = DmaMemory::of_pages(options.pages, options.iova, options.memory_size)?;
        transport.get().dma_map(memory.range(), memory.fd(), 0).map_err(during("announcing memory"))?;
        let mut cap = [0; 8];
        transport.get().region_read(BAR0, offset::CAP, &mut cap).map_err(during("reading CAP"))?;
        let capabilities = Capabilities::from_bits(u64::from_le_bytes(cap));
        let mut vs = [0; 4];
        transport.get().region_read(BAR0, offset::VS, &mut vs).map_err(during("reading VS"))?;
        let areas = if options.mapped_doorbells {
            transport.get().map_region(BAR0).map_err(during("mapping the doorbells"))?
        } else {
            Vec::new()
        };
        let layout = DoorbellLayout::new(capabilities.dstrd()).expect("DSTRD has four bits");
        let doorbells = Doorbells::new(layout, transport.clone(), areas);
        Ok(Self {
            transport,
            options: options.clone(),
            memory,
            doorbells,
            cmb: None,
            capabilities,
            version: Version::from_bits(u32::from_le_bytes(vs)),
            enabled: None,
            late: Vec::new(),
            vectors: Vec::new(),
            vector_table: None,
        })
    }

    /// All of bring-up on an opened controller: bus mastering, disable, enable, Identify Controller, the controller's memory, Number of
    /// Queues, shadow doorbells if asked for.
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.enable_bus_master()?;
        self.disable()?;
        self.enable()?;
        let identify = self.identify_controller()?;
        self.enabled_mut().identify = Some(identify);
        self.find_controller_memory()?;
        let granted = self.request_queues(self.options.io_queues.max(1))?;
        let enabled = self.enabled_mut();
        enabled.granted = granted;
        enabled.used = vec![false; usize::from(granted) + 1];
        if self.options.shadow_doorbells {
            self.configure_shadow_doorbells()?;
        }
        Ok(())
    }

    /// Controller Capabilities, as read when connecting.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Version, as read when connecting.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The memory shared with the device: buffers come from here.
    pub fn memory(&self) -> &DmaMemory {
        &self.memory
    }

    /// The transport itself, for messages of one's own. Give it back before calling anything else.
    pub fn transport(&self) -> MutexGuard<'_, dyn Transport + 'static> {
        self.transport.get()
    }

    /// Identify Controller, as read by [`start`](Self::start); `None` before.
    pub fn identity(&self) -> Option<&IdentifyController> {
        self.enabled.as_ref()?.identify.as_deref()
    }

    /// I/O queue pairs that the controller gave.
    pub fn io_queues(&self) -> u16 {
        self.enabled.as_ref().map_or(0, |enabled| enabled.granted)
    }

    /// The most entries a queue may have: CAP.MQES + 1.
    pub fn max_queue_entries(&self) -> u32 {
        u32::from(self.capabilities.mqes_z()) + 1
    }

    /// The most bytes one command may move: MDTS or the driver's own limit.
    pub fn max_transfer(&self) -> u64 {
        let own = self.options.max_transfer as u64;
        let unit = 12 + u32::from(self.capabilities.mpsmin());
        match self.identity().map_or(0, |identify| identify.mdts) {
            0 => own,
            mdts => 1u64.checked_shl(unit + u32::from(mdts)).unwrap_or(u64::MAX).min(own),
        }
    }

    /// Reads a 32-bit property at a byte offset in BAR0.
    pub fn read32(&self, offset: u64) -> Result<u32, DriverError> {
        let mut bytes = [0; 4];
        self.transport.get().region_read(BAR0, offset, &mut bytes).map_err(during("reading a property"))?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a 64-bit property at a byte offset in BAR0.
    pub fn read64(&self, offset: u64) -> Result<u64, DriverError> {
        let mut bytes = [0; 8];
        self.transport.get().region_read(BAR0, offset, &mut bytes).map_err(during("reading a property"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a 32-bit property at a byte offset in BAR0.
    pub fn write32(&self, offset: u64, value: u32) -> Result<(), DriverError> {
        let bytes = value.to_le_bytes();
        self.transport.get().region_write(BAR0, offset, &bytes).map_err(during("writing a property"))
    }

    /// Writes a 64-bit property at a byte offset in BAR0.
    pub fn write64(&self, offset: u64, value: u64) -> Result<(), DriverError> {
        let bytes = value.to_le_bytes();
        self.transport.get().region_write(BAR0, offset, &bytes).map_err(during("writing a property"))
    }

    /// Controller Status.
    pub fn status(&self) -> Result<ControllerStatus, DriverError> {
        Ok(ControllerStatus::from_bits(self.read32(offset::CSTS)?))
    }

    /// Writes any value to any doorbell, of queues that exist or not, through the shared page if it has it.
    pub fn write_doorbell(&self, doorbell: Doorbell, value: u32) -> Result<(), DriverError> {
        self.doorbells.bell(doorbell).write(value).map_err(during("writing a doorbell"))
    }

    /// Clears CC.EN and waits until CSTS.RDY is clear. All queue pairs are dead then.
    ///
    /// # Errors
    /// [`DriverError::NotReady`] after CAP.TO.
    pub fn disable(&mut self) -> Result<(), DriverError> {
        self.enabled = None;
        self.doorbells.shadow = None;
        let cc = Configuration::from_bits(self.read32(offset::CC)?);
        if cc.en() {
            self.write32(offset::CC, cc.with_en(false).with_shn(ShutdownNotification::NONE).into_bits())?;
        }
        self.wait_status("disabled", |csts| !csts.rdy())?;
        self.late.clear();
        Ok(())
    }

    /// Gives the controller fresh admin queues, sets CC.EN and waits until CSTS.RDY is set.
    ///
    /// # Errors
    /// [`DriverError::PageSize`], [`DriverError::NoNvmCommandSet`]; [`DriverError::Fatal`] when it reports CFS;
    /// [`DriverError::NotReady`] after CAP.TO.
    pub fn enable(&mut self) -> Result<(), DriverError> {
        if self.capabilities.mpsmin() != 0 {
            return Err(DriverError::PageSize(12 + u32::from(self.capabilities.mpsmin())));
        }
        if !self.capabilities.css_nvm() {
            return Err(DriverError::NoNvmCommandSet);
        }
        let entries = u32::from(self.options.admin_entries);
        if !(2..=4096).contains(&entries) {
            return Err(DriverError::QueueSize { wanted: entries, most: 4096 });
        }
        let admin = self.new_queue(QueueId::ADMIN, entries, None)?;
        let size_z = self.options.admin_entries - 1;
        let aqa = AdminQueueAttributes::new().with_asqs_z(size_z).with_acqs_z(size_z);
        self.write32(offset::AQA, aqa.into_bits())?;
        self.write64(offset::ASQ, admin.sq_range().iova)?;
        self.write64(offset::ACQ, admin.cq_range().iova)?;
        let cc = Configuration::new()
            .with_css(CommandSetSelected::NVM)
            .with_iosqes(Sqe::SIZE_LOG2)
            .with_iocqes(Cqe::SIZE_LOG2)
            .with_en(true);
        self.write32(offset::CC, cc.into_bits())?;
        self.wait_status("ready", |csts| csts.rdy())?;
        // Their identifiers are another queue's.
        self.late.iter_mut().for_each(|late| late.cid = None);
        self.enabled = Some(Enabled { admin, identify: None, granted: 0, used: vec![false] });
        Ok(())
    }

    /// Announces a normal shutdown and waits until it is complete: everything is durable then.
    pub fn shutdown(&mut self) -> Result<(), DriverError> {
        let cc = Configuration::from_bits(self.read32(offset::CC)?);
        self.write32(offset::CC, cc.with_shn(ShutdownNotification::NORMAL).into_bits())?;
        self.wait_status("shut down", |csts| csts.shst() == ShutdownStatus::COMPLETE)
    }

    /// Resets the PCI function. All queue pairs are dead then; [`start`](Self::start) brings it up again.
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.enabled = None;
        self.doorbells.shadow = None;
        self.transport.get().reset().map_err(during("resetting the function"))?;
        self.late.clear();
        Ok(())
    }

    fn wait_status(&self, state: &'static str, reached: impl Fn(ControllerStatus) -> bool) -> Result<(), DriverError> {
        let limit = self.ready_timeout()?;
        let start = Instant::now();
        loop {
            let csts = self.status()?;
            if csts.into_bits() == u32::MAX {
                return Err(DriverError::Gone);
            }
            if reached(csts) {
                return Ok(());
            }
            // A controller with a fatal error may still be disabled; that is how it is recovered.
            if csts.cfs() && state == "ready" {
                return Err(DriverError::Fatal { csts });
            }
            if start.elapsed() >= limit {
                return Err(DriverError::NotReady { state, waited: limit, csts });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// CAP.TO, or CRTO's where the controller has it (Base 3.1.4.1).
    fn ready_timeout(&self) -> Result<Duration, DriverError> {
        let mut units = u16::from(self.capabilities.to()).max(1);
        if self.capabilities.crwms() {
            units = units.max(ReadyTimeouts::from_bits(self.read32(offset::CRTO)?).crwmt());
        }
        Ok(Duration::from_millis(500) * u32::from(units))
    }

    fn new_queue(&self, id: QueueId, entries: u32, vector: Option<u16>) -> Result<QueuePair, DriverError> {
        let interrupt = match vector {
            None => None,
            Some(vector) => {
                let fd = self.vectors.get(usize::from(vector));
                let fd = fd.ok_or(DriverError::NoVector { vector, enabled: self.vectors.len() })?;
                Some(fd.try_clone().map_err(DriverError::EventFd)?)
            }
        };
        let max_transfer = if id.is_admin() { 2 * PAGE_SIZE } else { self.max_transfer() as usize };
        // Over PCI Express the admin queue takes none.
        let sgls = self.identity().filter(|_| !id.is_admin()).map_or(SglSupport::new(), |identify| identify.sgls);
        let lists = Lists::new(&self.memory, (entries - 1) as u16, max_transfer, sgls)?;
        Ok(QueuePair::new(QueueParts {
            id,
            entries,
            memory: QueueMemory::new(&self.memory, self.cmb.as_ref().filter(|_| !id.is_admin()), entries)?,
            lists,
            doorbells: &self.doorbells,
            interrupt,
            mask: vector.and_then(|vector| self.vector_table.as_ref()?.mask(vector)),
            transport: self.transport.clone(),
            timeout: self.options.timeout,
        }))
    }

    /// Creates an I/O completion queue and its submission queue.
    pub fn create_queue_pair(&mut self, options: &QueueOptions) -> Result<QueuePair, DriverError> {
        let most = self.max_queue_entries();
        if !(2..=most).contains(&options.entries) {
            return Err(DriverError::QueueSize { wanted: options.entries, most });
        }
        let granted = self.io_queues();
        let used = &self.enabled_mut().used;
        let free = |id: &u16| *id >= 1 && used.get(usize::from(*id)) == Some(&false);
        let wanted = options.id.map_or_else(|| (1..=granted).find(free), |id| Some(id.0).filter(free));
        let wanted = wanted.ok_or(DriverError::NoQueue { wanted: options.id.unwrap_or(QueueId(1)), granted })?;
        let mut queue = self.new_queue(QueueId(wanted), options.entries, options.vector)?;
        let created = self.create_queues(&queue, options.vector);
        if created.as_ref().is_err_and(|error| error.status().is_some()) && queue.is_in_controller() {
            self.cmb = None;
            queue = self.new_queue(QueueId(wanted), options.entries, options.vector)?;
            self.create_queues(&queue, options.vector)?;
        } else {
            created?;
        }
        self.enabled_mut().used[usize::from(wanted)] = true;
        Ok(queue)
    }

    /// Has queues that are created from now on, also after another [`start`](Self::start), in memory of ours.
    pub fn forgo_controller_memory(&mut self) {
        self.options.controller_memory = false;
        self.cmb = None;
    }

    /// Deletes a queue pair: submission queue first. Commands in flight are aborted by the controller.
    pub fn delete_queue_pair(&mut self, queue: QueuePair) -> Result<(), DriverError> {
        self.delete_queues(queue.id())?;
        if let Some(used) = self.enabled_mut().used.get_mut(usize::from(queue.id().0)) {
            *used = false;
        }
        drop(queue);
        Ok(())
    }

    /// # Panics
    /// When the controller is not enabled.
    pub(crate) fn enabled_mut(&mut self) -> &mut Enabled {
        self.enabled.as_mut().expect("the controller is enabled: start() or enable() came before")
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use super::*;
    use crate::{
        dma::DmaRange,
        queue::QueueError,
        transport::{MappedArea, TransportError},
    };

    /// A controller that comes up, and completes nothing by itself; or what is left of one that was pulled out: reads are ones.
    #[derive(Default)]
    struct Deaf {
        cc: u32,
        gone: bool,
    }

    impl Transport for Deaf {
        fn region_read(&mut self, _: u32, at: u64, buf: &mut [u8]) -> Result<(), TransportError> {
            let value = match at {
                _ if self.gone => u64::MAX,
                offset::CAP => Capabilities::new().with_mqes_z(63).with_to(1).with_css_nvm(true).into_bits(),
                offset::CC => self.cc.into(),
                offset::CSTS => u64::from(self.cc & 1),
                _ => 0,
            };
            buf.copy_from_slice(&value.to_le_bytes()[..buf.len()]);
            Ok(())
        }
        fn region_write(&mut self, _: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
            if at == offset::CC {
                self.cc = u32::from(data[0]);
            }
            Ok(())
        }
        fn region_write_posted(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), TransportError> {
            Ok(())
        }
        fn map_region(&mut self, _: u32) -> Result<Vec<MappedArea>, TransportError> {
            Ok(Vec::new())
        }
        fn dma_map(&mut self, _: DmaRange, _: BorrowedFd<'_>, _: u64) -> Result<(), TransportError> {
            Ok(())
        }
        fn dma_unmap(&mut self, _: DmaRange) -> Result<(), TransportError> {
            Ok(())
        }
        fn vectors(&mut self) -> Result<u32, TransportError> {
            Ok(0)
        }
        fn set_vectors(&mut self, _: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
            Ok(())
        }
        fn disable_vectors(&mut self) -> Result<(), TransportError> {
            Ok(())
        }
        fn reset(&mut self) -> Result<(), TransportError> {
            self.cc = 0;
            Ok(())
        }
        fn check(&mut self) -> Result<(), TransportError> {
            Ok(())
        }
    }

    /// What the controller completes late: command `cid`, by entry `at` of the admin completion queue.
    fn complete(controller: &mut Controller, at: usize, cid: u16) {
        let (_, completions) = controller.admin_queue().buffers();
        let cqe = u128::from(cid) << 96 | 1 << 112;
        completions.write_at(at * Cqe::SIZE, &cqe.to_le_bytes());
    }

    #[test]
    fn memory_of_a_command_that_is_late_is_nobody_elses_until_it_has_completed() {
        let options = Options { timeout: Duration::from_millis(20), memory_size: 1 << 20, ..Options::default() };
        let mut controller = Controller::attach(Deaf::default(), &options).unwrap();
        controller.enable().unwrap();
        // Every page that is free, and where the next identify would go: the first of them.
        let next = |controller: &Controller| controller.memory().alloc(PAGE_SIZE).unwrap().iova();
        let first = next(&controller);
        for _ in 0..2 {
            let late = controller.identify_controller().unwrap_err();
            assert!(matches!(late, DriverError::Queue(QueueError::Timeout { .. })), "{late}");
        }
        assert_eq!((next(&controller), controller.late.len()), (first + 2 * PAGE_SIZE as u64, 2));
        // The first completes: that is no event, and no answer to the next command, which has its identifier.
        complete(&mut controller, 0, 0);
        assert!(controller.poll_event().unwrap().is_none());
        assert_eq!((next(&controller), controller.late.len()), (first, 1));
        complete(&mut controller, 1, 1);
        assert!(controller.identify_controller().is_err());
        assert_eq!((next(&controller), controller.late.len()), (first + PAGE_SIZE as u64, 1));
        controller.disable().unwrap();
        assert_eq!(controller.late.len(), 0);
    }

    /// The controller completes a command that there is not: the one that is waited for then is not given up for it, or its own end would be
    /// taken for an event.
    #[test]
    fn a_completion_that_cannot_be_is_passed_over() {
        let options = Options { timeout: Duration::from_millis(20), memory_size: 1 << 20, ..Options::default() };
        let mut controller = Controller::attach(Deaf::default(), &options).unwrap();
        controller.enable().unwrap();
        complete(&mut controller, 0, 7);
        complete(&mut controller, 1, 0);
        controller.identify_controller().unwrap();
        assert!(controller.poll_event().unwrap().is_none());
        assert_eq!(controller.late.len(), 0);
        // And when its own does not come in time.
        complete(&mut controller, 2, 7);
        let late = controller.identify_controller().unwrap_err();
        assert!(matches!(late, DriverError::Queue(QueueError::Timeout { .. })), "{late}");
        assert_eq!(controller.late.len(), 1);
        complete(&mut controller, 3, 7);
        // Nor is the next command given up for one before it was submitted, while another is late.
        let aborted = controller.abort(QueueId(3), CommandId(1)).unwrap_err();
        assert!(matches!(aborted, DriverError::Queue(QueueError::Timeout { .. })), "{aborted}");
        complete(&mut controller, 4, 7);
        for (at, cid) in [(5, 1), (6, 0)] {
            complete(&mut controller, at, cid);
        }
        assert!(controller.poll_event().unwrap().is_none());
        assert_eq!(controller.late.len(), 0);
        assert_eq!(controller.admin_queue().take_passed_over().map(|(times, _)| times), Some(4));
        // Its own, of a queue that has no such command: it is told at once, and late until its end comes.
        controller.admin_queue().buffers().1.write_at(7 * Cqe::SIZE, &(5_u128 << 80 | 1 << 112).to_le_bytes());
        let bad = controller.identify_controller().unwrap_err();
        assert!(matches!(bad, DriverError::Queue(QueueError::BadCompletion { .. })), "{bad}");
        complete(&mut controller, 8, 0);
        assert!(controller.poll_event().unwrap().is_none());
        assert_eq!(controller.late.len(), 0);
    }

    /// An event that came while a command was waited for is kept, and its identifier with it: the next command's end is its own.
    #[test]
    fn an_event_that_is_kept_is_no_commands_end() {
        let options = Options { timeout: Duration::from_millis(20), memory_size: 1 << 20, ..Options::default() };
        let mut controller = Controller::attach(Deaf::default(), &options).unwrap();
        controller.enable().unwrap();
        controller.request_event().unwrap();
        complete(&mut controller, 0, 0);
        for _ in 0..3 {
            let late = controller.identify_controller().unwrap_err();
            assert!(matches!(late, DriverError::Queue(QueueError::Timeout { .. })), "{late}");
        }
        assert_eq!(controller.poll_event().unwrap().map(|cqe| cqe.cid), Some(CommandId(0)));
    }

    /// The page that belongs to an event cannot be read: the event is told of all the same, and the next one is asked for.
    #[test]
    fn an_event_whose_page_cannot_be_read_is_not_the_last() {
        let options = Options { timeout: Duration::from_millis(20), memory_size: 1 << 20, ..Options::default() };
        let mut controller = Controller::attach(Deaf::default(), &options).unwrap();
        controller.enable().unwrap();
        controller.request_event().unwrap();
        let (_, completions) = controller.admin_queue().buffers();
        // Namespace Attribute Changed, with its log page.
        completions.write_at(0, &(1_u128 << 112 | 0x0004_0002).to_le_bytes());
        assert!(controller.namespaces_changed().unwrap());
        let opcode = |at: usize, controller: &mut Controller| {
            controller.admin_queue().buffers().0.unwrap().read_value::<Sqe>(at * size_of::<Sqe>()).opcode
        };
        assert_eq!([0, 1, 2].map(|at| opcode(at, &mut controller)), [0x0c, 0x02, 0x0c]);
    }

    #[test]
    fn no_more_aborts_are_in_flight_than_the_controller_takes() {
        let options = Options { timeout: Duration::from_millis(20), memory_size: 1 << 20, ..Options::default() };
        let mut controller = Controller::attach(Deaf::default(), &options).unwrap();
        controller.enable().unwrap();
        let abort = |controller: &mut Controller, cid| controller.abort(QueueId(3), CommandId(cid));
        assert!(matches!(abort(&mut controller, 0x1234), Err(DriverError::Queue(QueueError::Timeout { .. }))));
        let entry = controller.admin_queue().buffers().0.unwrap().read_value::<Sqe>(0);
        assert_eq!((entry.opcode, entry.cdw10, entry.cdw11), (0x08, 0x1234_0003, 0));
        // One at a time, where it has not said that it takes more.
        assert!(matches!(abort(&mut controller, 2), Err(DriverError::AbortLimit { most: 1 })));
        complete(&mut controller, 0, 0);
        assert!(matches!(abort(&mut controller, 2), Err(DriverError::Queue(QueueError::Timeout { .. }))));
    }

    #[test]
    fn a_controller_that_reads_as_ones_is_gone_at_once() {
        let mut controller = Controller::attach(Deaf { gone: true, cc: 0 }, &Options::default()).unwrap();
        assert!(matches!(controller.start(), Err(DriverError::Gone)));
        assert!(matches!(controller.disable(), Err(DriverError::Gone)));
        assert!(matches!(controller.shutdown(), Err(DriverError::Gone)));
    }
}
