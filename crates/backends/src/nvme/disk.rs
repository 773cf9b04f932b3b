//! One controller with its queues, shared by the volumes on its namespaces, and the thread that watches over it.

use std::{
    collections::BTreeMap,
    error::Error,
    fmt::Write,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{PerShard, ShardSlot, VolumeError};
use millrace_driver::{
    Controller, DriverError, Namespace, Options, PciAddress, QueueError, QueueOptions, QueuePair, Transport, VfioError,
    VfioPci,
    spec::{NamespaceId, identify::IdentifyController},
};
use millrace_memory::guard;

use super::{
    lane::{BOUNCE, BOUNCES, ENTRIES, Lane, STRANGE, Waits},
    table::{self, Mapper, Table},
};
use crate::log::LogLimit;

/// The most bytes of one command.
pub(super) const TRANSFER: usize = 1 << 20;
/// Queues of shards at most; one more is for everybody else.
const MOST_LANES: usize = 16;
/// How often the controller is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How long an earlier owner, a worker that died, may keep the device.
const SUCCESSION: Duration = Duration::from_secs(5);
/// Times that a reset is tried.
const RESETS: u32 = 3;
/// How long after a reset for completions that cannot be a controller is given up when it goes on with them.
const RELAPSE: Duration = Duration::from_secs(60);

const UP: u8 = 0;
const RESETTING: u8 = 1;
const GONE: u8 = 2;

/// How long a disk is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a command, before the controller is asked to abort it.
    pub command: Duration,
    /// For the controller's answer to that or to any other admin command or message, and then for the command's end, before it is reset.
    pub answer: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { command: Duration::from_secs(30), answer: Duration::from_secs(10) }
    }
}

/// Every disk that is open: a controller has one owner.
static DISKS: Mutex<Vec<(PciAddress, Weak<Disk>)>> = Mutex::new(Vec::new());

/// See the module.
pub(super) struct Disk {
    address: PciAddress,
    /// `None` when it is gone.
    control: Mutex<Option<Controller>>,
    state: AtomicU8,
    /// The first for everybody, the others for one shard each.
    lanes: Vec<Lane>,
    /// Interrupts that are enabled: see [`vector`].
    vectors: u16,
    next_lane: AtomicUsize,
    lane_of: PerShard<OnceLock<usize>>,
    pub(super) table: Arc<Table>,
    pub(super) identity: Box<IdentifyController>,
    pub(super) max_transfer: usize,
    /// Bytes that one Write Zeroes may name.
    pub(super) zeroes_limit: u64,
    /// Namespaces with volumes.
    claimed: Mutex<BTreeMap<NamespaceId, Namespace>>,
    /// The controller did not say what one of them is now.
    unmeasured: AtomicBool,
    /// Has the watch reset the controller.
    watch: SyncSender<()>,
    patience: Patience,
    /// Commands that it was asked to abort so far.
    aborts: AtomicUsize,
    /// Its resets so far.
    resets: AtomicUsize,
    told_gone: AtomicBool,
    /// When it was last reset for completions that cannot be.
    strange: Mutex<Option<Instant>>,
    /// What went wrong with its queues and was not told yet: how often, and the last of it.
    untold: Mutex<Option<(u64, QueueError)>>,
    /// How often that is told.
    log_limit: LogLimit,
}

/// An error and its causes in one line.
pub(super) fn chain(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.ends_with(&said) {
            let _ = write!(text, ": {said}");
        }
        cause = error.source();
    }
    text
}

fn refused(volume: &str, error: &dyn Error) -> VolumeError {
    VolumeError::Refused { volume: volume.to_owned(), why: chain(error) }
}

/// What went wrong with queues: how often, and the last of it. What is not told yet is told with what is new of lanes and the admin queue.
pub(super) fn sum(
    untold: Option<(u64, QueueError)>,
    lanes: impl Iterator<Item = (u64, QueueError)>,
    admin: &mut QueuePair,
) -> Option<(u64, QueueError)> {
    let all = untold.into_iter().chain(lanes).chain(admin.take_passed_over());
    all.reduce(|(sum, _), (times, last)| (sum + times, last))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// The disk at this address, opened if need be. Takes long: not called on a shard.
    pub(super) fn open(volume: &str, address: PciAddress) -> Result<Arc<Self>, VolumeError> {
        let mut disks = lock(&DISKS);
        disks.retain(|(_, disk)| disk.strong_count() > 0);
        let known = disks.iter().find(|(known, _)| *known == address).and_then(|(_, disk)| disk.upgrade());
        if let Some(disk) = known.filter(|disk| !disk.is_gone()) {
            return Ok(disk);
        }
        let function = take(volume, address)?;
        let iommu: Arc<dyn Mapper> = function.iommu();
        let disk = Self::bring_up(address, function, Some(iommu), Patience::default());
        let disk = disk.map_err(|error| refused(volume, &error))?;
        disks.retain(|(known, _)| *known != address);
        disks.push((address, Arc::downgrade(&disk)));
        Ok(disk)
    }

    /// A controller of one's own, that nobody else finds. Without an IOMMU (`mapper`) all data go by way of buffers.
    pub(super) fn bring_up(
        address: PciAddress,
        function: impl Transport + 'static,
        mapper: Option<Arc<dyn Mapper>>,
        patience: Patience,
    ) -> Result<Arc<Self>, DriverError> {
        let by = mapper.as_ref().map_or("a transport of its own", |mapper| mapper.interface());
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let wanted = cores.min(MOST_LANES) + 1;
        let options = Options {
            timeout: patience.answer,
            // Queues, their lists, and buffers; what is not used costs nothing.
            memory_size: (4 << 20) + wanted * (BOUNCES * BOUNCE + (2 << 20)),
            io_queues: wanted as u16,
            max_transfer: TRANSFER,
            ..Options::default()
        };
        let mut controller = Controller::attach(function, &options)?;
        controller.start()?;
        watch_namespaces(address, &mut controller);
        let identity = Box::new(controller.identity().expect("a controller that was started has told who it is").clone());
        let count = wanted.min(usize::from(controller.io_queues())).max(1);
        let vectors = enable_vectors(address, &mut controller, count);
        let (mut lanes, mut in_controller) = (Vec::with_capacity(count), 0);
        for at in 0..count {
            let buffers = (0..BOUNCES).map(|_| controller.memory().alloc(BOUNCE)).collect::<Result<_, _>>()?;
            let pair = new_pair(&mut controller, vector(vectors, at))?;
            in_controller += usize::from(pair.is_in_controller());
            lanes.push(Lane::new(pair, buffers, at > 0)?);
        }
        let (watch, words) = sync_channel(64);
        let (asks, asked) = sync_channel(64);
        let table = Arc::new(Table::new(mapper, asks));
        let seen: Arc<dyn guard::Watcher> = Arc::<Table>::clone(&table);
        guard::watch(Arc::downgrade(&seen));
        let (max_transfer, zeroes_limit) = (controller.max_transfer() as usize, controller.zeroes_limit()?);
        let (queues, interrupts) = (lanes.len(), vectors.saturating_sub(1));
        tracing::info!(%address, by, queues, interrupts, in_controller, max_transfer, "an NVMe controller is ours");
        let disk = Arc::new(Self {
            address,
            control: Mutex::new(Some(controller)),
            state: AtomicU8::new(UP),
            lanes,
            vectors,
            next_lane: AtomicUsize::new(1),
            lane_of: PerShard::default(),
            table,
            identity,
            max_transfer,
            zeroes_limit,
            claimed: Mutex::default(),
            unmeasured: AtomicBool::new(false),
            watch,
            patience,
            aborts: AtomicUsize::new(0),
            resets: AtomicUsize::new(0),
            told_gone: AtomicBool::new(false),
            strange: Mutex::default(),
            untold: Mutex::default(),
            log_limit: LogLimit::default(),
        });
        disk.spawn_threads(words, asked)?;
        Ok(disk)
    }

    /// Begins the watch, and what maps memory: it may take so long that it is no part of the watch.
    fn spawn_threads(self: &Arc<Self>, words: Receiver<()>, asked: Receiver<usize>) -> Result<(), DriverError> {
        let (disk, table) = (Arc::downgrade(self), Arc::downgrade(&self.table));
        let named = |name: String| thread::Builder::new().name(name);
        let watch = named(format!("nvme {}", self.address)).spawn(move || watch_over(&disk, &words));
        watch.map_err(DriverError::EventFd)?;
        let map = named(format!("map {}", self.address)).spawn(move || table::serve(&table, &asked));
        map.map(drop).map_err(DriverError::EventFd)
    }

    pub(super) fn address(&self) -> PciAddress {
        self.address
    }

    /// Whether it will never answer again.
    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) == GONE
    }

    pub(super) fn aborts(&self) -> usize {
        self.aborts.load(Ordering::Relaxed)
    }

    pub(super) fn resets(&self) -> usize {
        self.resets.load(Ordering::Relaxed)
    }

    /// The calling shard's queue, or the common one. Threads that are a shard's in passing, to open a volume for instance, would keep one from
    /// the shards for good.
    #[inline]
    pub(super) fn lane(&self) -> &Lane {
        if !ShardSlot::stays() {
            return &self.lanes[0];
        }
        let (here, _) = self.lane_of.here();
        let index = *here.get_or_init(|| self.next_lane.fetch_add(1, Ordering::Relaxed));
        self.lanes.get(index).unwrap_or(&self.lanes[0])
    }

    /// Bytes moved directly, and by way of buffers.
    pub(super) fn moved(&self) -> (u64, u64) {
        self.moved_by_queue().fold((0, 0), |sum, lane| (sum.0 + lane.0, sum.1 + lane.1))
    }

    /// The same of each queue.
    pub(super) fn moved_by_queue(&self) -> impl Iterator<Item = (u64, u64)> {
        self.lanes.iter().map(Lane::moved)
    }

    /// Commands of its queues, all of them together.
    pub(super) fn commands(&self) -> u64 {
        self.lanes.iter().map(Lane::commands).sum()
    }

    /// How its tasks have waited.
    pub(super) fn waits(&self) -> Waits {
        self.lanes.iter().map(Lane::waits).fold(Waits::default(), |sum, lane| Waits {
            naps: sum.naps + lane.naps,
            sleeps: sum.sleeps + lane.sleeps,
            interrupts: sum.interrupts + lane.interrupts,
        })
    }

    /// Runs something with the controller, for setting up.
    pub(super) fn with<R>(
        &self,
        run: impl FnOnce(&mut Controller) -> Result<R, DriverError>,
    ) -> Option<Result<R, DriverError>> {
        lock(&self.control).as_mut().map(run)
    }

    /// A namespace has one volume.
    pub(super) fn claim(&self, namespace: &Namespace) -> bool {
        let mut claimed = lock(&self.claimed);
        let free = !claimed.contains_key(&namespace.nsid());
        if free {
            claimed.insert(namespace.nsid(), namespace.clone());
        }
        free
    }

    pub(super) fn release(&self, nsid: NamespaceId) {
        lock(&self.claimed).remove(&nsid);
    }

    /// Asks how large the volumes' namespaces are. Takes long: not called on a shard.
    pub(super) fn measure(&self) {
        if let Some(controller) = lock(&self.control).as_mut() {
            let _ = self.measure_by(controller, false);
        }
    }

    /// Asks for all of them. Of which the controller does not say what it is now is asked again at the next look; `forsake`: it has no
    /// commands until then. When it does not answer at all, the others are not asked for.
    fn measure_by(&self, controller: &mut Controller, forsake: bool) -> Result<(), DriverError> {
        let mut unknown = None;
        for (nsid, known) in lock(&self.claimed).iter() {
            let before = known.size();
            match controller.namespace(*nsid) {
                Ok(now) if !known.follow(&now) => {
                    if before.0 != 0 {
                        tracing::error!(address = %self.address, %nsid, "the namespace is another one, or has other blocks: its volume fails until it is opened anew");
                    }
                }
                Ok(now) if now.size() == before => {}
                Ok(now) => {
                    let (before, blocks) = (before.0, now.size().0);
                    tracing::warn!(address = %self.address, %nsid, before, blocks, "the namespace has changed its size");
                }
                Err(error) if is_final(&error) => {
                    known.forsake();
                    if before.0 != 0 {
                        tracing::error!(address = %self.address, %nsid, "the namespace has changed: {}", chain(&error));
                    }
                }
                Err(error) => {
                    if forsake {
                        known.forsake();
                    }
                    let is_silent = error.is_timeout();
                    if is_silent || unknown.is_none() {
                        unknown = Some((*nsid, error));
                    }
                    if is_silent {
                        break;
                    }
                }
            }
        }
        let was_told = self.unmeasured.swap(unknown.is_some(), Ordering::Relaxed);
        let Some((nsid, error)) = unknown else { return Ok(()) };
        if !was_told {
            let why = chain(&error);
            tracing::error!(address = %self.address, %nsid, "the controller does not say what the namespace is now, and is asked again: {why}");
        }
        Err(error)
    }

    /// Follows what the controller tells of its namespaces; why it is to be reset, when it does not answer.
    fn follow_namespaces(&self, controller: &mut Controller) -> Option<String> {
        let told = controller.namespaces_changed();
        if let Err(error) = &told {
            tracing::warn!(address = %self.address, "the controller tells no more of its namespaces: {}", chain(error));
        }
        let silence = match told {
            Err(error) if error.is_timeout() => error,
            Ok(false) | Err(_) if !self.unmeasured.load(Ordering::Relaxed) => return None,
            _ => self.measure_by(controller, false).err().filter(DriverError::is_timeout)?,
        };
        Some(format!("it does not say what its namespaces are: {}", chain(&silence)))
    }

    /// Has the controller reset, some time soon. What is in flight is begun again.
    pub(super) fn ask_for_reset(&self) {
        let _ = self.watch.try_send(());
    }

    /// Looks at the controller; resets it where that may help.
    fn look(&self) {
        if self.is_gone() {
            return;
        }
        let mut control = lock(&self.control);
        let Some(controller) = control.as_mut() else { return };
        let present = controller.transport().check();
        if let Err(error) = present {
            tracing::error!(address = %self.address, "the controller is gone: {}", chain(&error));
            return self.give_up(control.take());
        }
        let strange = self.tell_troubles(controller);
        if strange.is_some() && lock(&self.strange).replace(Instant::now()).is_some_and(|reset| reset.elapsed() < RELAPSE) {
            tracing::error!(address = %self.address, "the controller goes on completing commands that it does not have");
            return self.give_up(control.take());
        }
        let ill = match controller.status() {
            Ok(csts) if csts.into_bits() == u32::MAX => Some("its registers cannot be read".to_owned()),
            Ok(csts) if csts.cfs() => Some("it reports a fatal error".to_owned()),
            Ok(_) => strange.or_else(|| self.end_overdue(controller)).or_else(|| self.follow_namespaces(controller)),
            Err(error) => Some(chain(&error)),
        };
        if let Some(why) = ill {
            tracing::error!(address = %self.address, "the controller is reset: {why}");
            // It may be that commands in the controller's own memory do not reach it.
            controller.forgo_controller_memory();
            self.reset(&mut control);
        }
        self.lanes.iter().for_each(Lane::nudge);
    }

    /// Tells of what went wrong with queues; why the controller is to be reset, when too many of its completions cannot be: others may be as
    /// wrong, and not be seen to be.
    fn tell_troubles(&self, controller: &mut Controller) -> Option<String> {
        let mut untold = lock(&self.untold);
        *untold = sum(untold.take(), self.lanes.iter().filter_map(Lane::troubles), controller.admin_queue());
        if untold.is_some()
            && self.log_limit.admit().is_some()
            && let Some((times, error)) = untold.take()
        {
            tracing::warn!(address = %self.address, times, "queues have trouble, this is the last: {}", chain(&error));
        }
        let is_strange = self.lanes.iter().any(Lane::is_strange);
        is_strange.then(|| format!("it has completed {STRANGE} commands on one queue that it does not have"))
    }

    /// Has commands aborted that take too long, one after the other, as every controller takes it; why it is to be reset, when that does
    /// not help. An abort that finds another command with the same identifier, because the first has just ended, is one for nothing: what
    /// was aborted is begun again.
    fn end_overdue(&self, controller: &mut Controller) -> Option<String> {
        let Patience { command: patience, answer } = self.patience;
        if let Some(time) = self.lanes.iter().find_map(|lane| lane.stuck(answer)) {
            return Some(format!("a command takes {time:?}, and was to be aborted"));
        }
        let (started, mut asked, mut aborted) = (Instant::now(), 0, 0);
        let mut ill = None;
        while let Some((qid, cid)) = self.lanes.iter().find_map(|lane| lane.overdue(patience)) {
            asked += 1;
            match controller.abort(qid, cid) {
                Ok(done) => aborted += usize::from(done),
                // It may end by itself.
                Err(DriverError::Queue(QueueError::Failed { .. })) => {}
                Err(error) => {
                    ill = Some(format!("a command takes more than {patience:?}, and is not aborted: {}", chain(&error)));
                }
            }
            // The others at the next look.
            if ill.is_some() || started.elapsed() > LOOK {
                break;
            }
        }
        if asked > 0 {
            self.aborts.fetch_add(asked, Ordering::Relaxed);
            tracing::warn!(address = %self.address, asked, aborted, "commands that take more than {patience:?} are aborted");
        }
        ill
    }

    /// Resets the controller, and gives it up when that does not help.
    fn reset(&self, control: &mut Option<Controller>) {
        let Some(controller) = control.as_mut() else { return };
        self.state.store(RESETTING, Ordering::Release);
        self.resets.fetch_add(1, Ordering::Relaxed);
        let pairs: Vec<QueuePair> = self.lanes.iter().filter_map(Lane::take_pair).collect();
        let started = Instant::now();
        for attempt in 0..RESETS {
            // Once one of the two has succeeded, the device touches no memory until it is enabled again.
            let stopped = if attempt == 0 {
                controller.disable().or_else(|_| controller.reset())
            } else {
                // Not every function has a reset.
                controller.reset().or_else(|_| controller.disable())
            };
            let Err(error) = stopped.and_then(|()| {
                self.lanes.iter().for_each(Lane::lose);
                controller.start()?;
                // Before anything is begun again: it may have been formatted meanwhile. Of which it never says so the volumes fail, and not
                // the disk, unless it does not answer.
                let last = attempt + 1 == RESETS;
                let told = self.measure_by(controller, last);
                told.or_else(|error| if last && !error.is_timeout() { Ok(()) } else { Err(error) })?;
                let fresh = (0..self.lanes.len()).map(|at| new_pair(controller, vector(self.vectors, at)));
                let fresh = fresh.collect::<Result<Vec<_>, _>>()?;
                self.lanes.iter().zip(fresh).for_each(|(lane, pair)| lane.put_pair(pair));
                Ok(())
            }) else {
                drop(pairs);
                watch_namespaces(self.address, controller);
                self.state.store(UP, Ordering::Release);
                tracing::warn!(address = %self.address, took = ?started.elapsed(), "the controller is up again");
                return;
            };
            tracing::error!(address = %self.address, attempt, "the reset has failed: {}", chain(&error));
            self.lanes.iter().for_each(|lane| drop(lane.take_pair()));
        }
        // They keep the device open.
        drop(pairs);
        self.give_up(control.take());
    }

    /// The device is lost: it is closed, which also lets the system take it away, and everything fails from now on.
    fn give_up(&self, controller: Option<Controller>) {
        // No new commands first.
        self.state.store(GONE, Ordering::Release);
        let pairs: Vec<QueuePair> = self.lanes.iter().filter_map(Lane::take_pair).collect();
        if let Some(mut controller) = controller {
            // Whatever comes of it: closing the device stops its transfers.
            if controller.status().is_ok_and(|csts| csts.into_bits() != u32::MAX) {
                let _ = controller.disable();
            }
            drop(pairs);
            drop(controller);
        }
        self.table.clear();
        // Now nothing can reach the memory of what was in flight.
        self.lanes.iter().for_each(Lane::lose);
        if !self.told_gone.swap(true, Ordering::Relaxed) {
            tracing::error!(address = %self.address, "the disk is given up: its volumes fail until they are opened anew");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Who maps memory would keep the device open.
        self.table.close();
        // Nothing is in flight: requests keep the volume, and volumes the disk.
        if let Some(mut controller) = lock(&self.control).take()
            && let Err(error) = controller.shutdown()
        {
            tracing::warn!(address = %self.address, "the controller was not shut down: {}", chain(&error));
        }
    }
}

/// Takes the function from the kernel; waits a little for an earlier owner that is dying.
fn take(volume: &str, address: PciAddress) -> Result<VfioPci, VolumeError> {
    let deadline = Instant::now() + SUCCESSION;
    loop {
        match VfioPci::open(address) {
            Ok(function) => return Ok(function),
            Err(VfioError::InUse { .. }) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(VfioError::InUse { path, .. }) => return Err(VolumeError::InUse { volume: volume.to_owned(), path }),
            Err(error) => return Err(refused(volume, &error)),
        }
    }
}

/// Whether that is the controller's answer, and not a failure to give one.
fn is_final(error: &DriverError) -> bool {
    match error {
        DriverError::BadNamespace { .. } => true,
        DriverError::Queue(error) => error.status().is_some_and(|status| status.dnr()),
        _ => false,
    }
}

fn new_pair(controller: &mut Controller, vector: Option<u16>) -> Result<QueuePair, DriverError> {
    let entries = ENTRIES.min(controller.max_queue_entries());
    controller.create_queue_pair(&QueueOptions { entries, id: None, vector })
}

/// Has interrupts for all lanes but the first, or as many as there are; how many, with that of the admin queue, which nobody listens to.
fn enable_vectors(address: PciAddress, controller: &mut Controller, lanes: usize) -> u16 {
    let enable = |controller: &mut Controller| {
        let present = controller.transport().vectors().unwrap_or(0);
        let count = u16::try_from(lanes).unwrap_or(u16::MAX).min(u16::try_from(present).unwrap_or(u16::MAX));
        if count > 1 {
            controller.enable_vectors(count)?;
        }
        Ok::<_, DriverError>(count)
    };
    match enable(controller) {
        Ok(count) if count > 1 && controller.masks_vectors() => return count,
        Ok(_) => tracing::info!(%address, "the controller has no interrupts that can be masked: it is polled"),
        Err(error) => tracing::warn!(%address, "the controller is polled, without interrupts: {}", chain(&error)),
    }
    0
}

fn watch_namespaces(address: PciAddress, controller: &mut Controller) {
    if let Err(error) = controller.watch_namespaces() {
        tracing::warn!(%address, "the controller does not tell of its namespaces: {}", chain(&error));
    }
}

/// The interrupt of a lane.
fn vector(vectors: u16, lane: usize) -> Option<u16> {
    u16::try_from(lane).ok().filter(|lane| (1..vectors).contains(lane))
}

/// The life of the thread beside a disk.
fn watch_over(disk: &Weak<Disk>, words: &Receiver<()>) {
    let mut looked = Instant::now();
    loop {
        let word = words.recv_timeout(LOOK);
        let Some(disk) = disk.upgrade() else { return };
        match word {
            Ok(()) => disk.reset(&mut lock(&disk.control)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            disk.look();
        }
    }
}
