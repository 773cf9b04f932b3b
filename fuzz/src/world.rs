//! What the guest cannot see: the shard, the device on it, its disks, the operator.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError,
    conformance::Random, future_bytes, yield_now,
};
use millrace_engine::{DeviceKey, Shard, ShardConfig};
use millrace_frontends::nvme::{Config, Host, HostReply, Identity, Namespace, NewFormat, NvmeDevice};
use millrace_nvme_spec::status::Status;
use millrace_vfio_user::Listener;

/// A volume whose requests take some turns of the shard, counted and not timed, so that a run can be repeated.
pub(crate) struct LagVolume {
    inner: Arc<FaultVolume>,
    direct: Arc<MemoryVolume>,
    /// Turns that a request takes at most; 0: it is done at once, as the memory volume does it.
    most: AtomicU64,
    /// Requests wait while it is set.
    held: AtomicBool,
    random: Mutex<Random>,
}

impl LagVolume {
    async fn run(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let most = self.most.load(Ordering::Relaxed);
        let turns = self.random.lock().expect("nobody panics with it").below(most + 1);
        for _ in 0..turns {
            yield_now().await;
        }
        while self.held.load(Ordering::Relaxed) {
            yield_now().await;
        }
        self.inner.submit(cx, request).await
    }
}

impl Volume for LagVolume {
    fn name(&self) -> &str {
        self.direct.name()
    }

    fn geometry(&self) -> Geometry {
        self.direct.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.most.load(Ordering::Relaxed) == 0 && !self.held.load(Ordering::Relaxed) {
            return self.direct.submit(cx, request);
        }
        Step::Wait(cx.scratch.place_future(self.run(cx, request)))
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::run) + self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.direct.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.direct.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.direct.usage()
    }
}

/// A volume as a namespace, and the handles to make it slow or bad.
#[derive(Clone)]
pub(crate) struct Disk {
    pub(crate) lag: Arc<LagVolume>,
    pub(crate) namespace: Arc<Namespace>,
}

impl Disk {
    pub(crate) fn create(name: &str, blocks: u64, block_size: BlockSize, seed: u64) -> Self {
        let bytes = blocks << block_size.shift();
        let direct = MemoryVolume::create(name, bytes, block_size).expect("a volume");
        let inner = FaultVolume::new(Arc::clone(&direct) as Arc<dyn Volume>, seed);
        let lag = Arc::new(LagVolume {
            inner,
            direct,
            most: AtomicU64::new(0),
            held: AtomicBool::new(false),
            random: Mutex::new(Random::new(seed)),
        });
        let mut uuid = [0x4d; 16];
        uuid[..8].copy_from_slice(&seed.to_be_bytes());
        let volume = Arc::clone(&lag) as Arc<dyn Volume>;
        let namespace = Namespace::new(volume, Identity { uuid, eui64: [0; 8] }, false);
        Self { lag, namespace }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.lag.geometry()
    }

    /// Requests take up to `turns` turns from now on.
    pub(crate) fn set_lag(&self, turns: u64) {
        self.lag.most.store(turns, Ordering::Relaxed);
    }

    pub(crate) fn hold(&self, held: bool) {
        self.lag.held.store(held, Ordering::Relaxed);
    }

    /// From now on some requests fail, and some writes are torn. Requests take at least a turn then.
    pub(crate) fn go_bad(&self, one_in: u64) {
        let rules = [
            (Kind::Read, Effect::Fail(BlockError::ReadFault { errno: 5 })),
            (Kind::Write, Effect::Tear),
            (Kind::Write, Effect::Fail(BlockError::NoSpace)),
            (Kind::WriteZeroes, Effect::Fail(BlockError::WriteFault { errno: 5 })),
            (Kind::Deallocate, Effect::Fail(BlockError::WriteFault { errno: 5 })),
            (Kind::Compare, Effect::Fail(BlockError::ReadFault { errno: 5 })),
            (Kind::Copy, Effect::Fail(BlockError::WriteFault { errno: 5 })),
            (Kind::Flush, Effect::Fail(BlockError::WriteFault { errno: 5 })),
        ];
        for (kind, effect) in rules {
            self.lag.inner.add(Rule::new(kind, When::OneIn(one_in), effect));
        }
        self.lag.most.fetch_max(1, Ordering::Relaxed);
    }

    pub(crate) fn get_well(&self) {
        self.lag.inner.clear();
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// The daemon: does what a guest asks for between two turns, never within one.
#[derive(Default)]
pub(crate) struct Daemon {
    work: Mutex<VecDeque<Work>>,
    /// Disks that were created for the guest, by the volume's name.
    created: Arc<Mutex<Vec<(String, Disk)>>>,
    count: AtomicU64,
}

impl Daemon {
    fn push(&self, work: Work) {
        self.work.lock().expect("no panic").push_back(work);
    }

    /// Does one thing that was asked for. False: there is none.
    fn work(&self) -> bool {
        let work = self.work.lock().expect("no panic").pop_front();
        work.map(|work| work()).is_some()
    }

    pub(crate) fn take_created(&self) -> Vec<(String, Disk)> {
        std::mem::take(&mut *self.created.lock().expect("no panic"))
    }
}

impl Host for Daemon {
    fn create_namespace(&self, _: &str, _: u32, bytes: u64, block_size: BlockSize, reply: HostReply<Arc<Namespace>>) {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let created = Arc::clone(&self.created);
        self.push(Box::new(move || {
            let name = format!("guest-{number}");
            let disk = Disk::create(&name, bytes >> block_size.shift(), block_size, 1000 + number);
            created.lock().expect("no panic").push((name, disk.clone()));
            reply.send(Ok(disk.namespace));
        }));
    }

    fn delete_namespace(&self, _: &str, _: u32, reply: HostReply<()>) {
        self.push(Box::new(move || reply.send(Ok(()))));
    }

    fn format(&self, _: &str, namespace: Arc<Namespace>, format: NewFormat, reply: HostReply<()>) {
        self.push(Box::new(move || {
            reply.send(format.apply(&*namespace.volume).map_err(|_| Status::INTERNAL_ERROR));
        }));
    }

    fn attachment_changed(&self, _: &str, _: u32, _: bool) {}

    fn reservation_notice(&self, _: &Arc<Namespace>, _: &[([u8; 16], u8)]) {}
}

/// The shard and the device.
pub(crate) struct World {
    pub(crate) shard: Shard,
    pub(crate) key: DeviceKey,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) socket: PathBuf,
    _folder: tempfile::TempDir,
    /// Turns so far.
    pub(crate) turns: u64,
}

impl World {
    pub(crate) fn new(config: Config, tasks: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("fuzz.sock");
        let listener = Listener::bind(&socket).expect("a socket");
        let settings = ShardConfig { tasks, buffers: 4, ring_entries: 16, ..ShardConfig::new(0, None) };
        let mut shard = Shard::new(&settings).expect("a shard");
        let daemon = Arc::new(Daemon::default());
        let host = Arc::clone(&daemon) as Arc<dyn Host>;
        let key = shard
            .add_device_with(|cx| NvmeDevice::new(config, listener, host, cx).map(|d| Box::new(d) as Box<_>))
            .expect("a device");
        Self { shard, key, daemon, socket, _folder: folder, turns: 0 }
    }

    /// One turn of the shard, and now and then of the daemon. Returns the work done.
    pub(crate) fn turn(&mut self) -> usize {
        self.turns += 1;
        let mut work = self.shard.turn();
        if self.turns.is_multiple_of(8) {
            work += usize::from(self.daemon.work());
        }
        assert!(self.shard.is_fenced(self.key) == Some(false), "the device panicked");
        work
    }

    /// The operator reaches the device.
    pub(crate) fn device<R>(&mut self, f: impl FnOnce(&mut NvmeDevice) -> R) -> R {
        self.shard.with_device(self.key, |device: &mut NvmeDevice, _| f(device)).expect("the device is there")
    }
}
