//! A shard with a device that has one disk, and a guest of our own driver: for tests of the controller alone, and of one whose I/O
//! queues are on an engine.

use std::{path::PathBuf, sync::Arc, time::Duration};

use millrace_block::{BlockSize, Volume};
use millrace_driver::{Controller, Namespace as Disk, Options, QueueOptions, QueuePair};
use millrace_engine::{Engine, ShardConfig};
use millrace_frontends::nvme::{
    CardSpec, Config, DoorbellMode, Host, HostReply, Identity, MakeEngine, Namespace, NewFormat, NvmeDevice,
};
use millrace_nvme_spec::command::NamespaceId;
use millrace_vfio_user::Listener;

/// How long anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// No card, and one whose engine is the software one, or with the feature `sim` the simulated one.
pub(crate) const CARDS: [Option<CardSpec>; 2] =
    [None, Some(CardSpec { engine: ENGINE.0, make: ENGINE.1, cores: 1, ssds: 1, latency: 0 })];

#[cfg(feature = "sim")]
const ENGINE: (&str, MakeEngine) = ("fvm-sim", |shape| Ok(Box::new(millrace_engine_model::SimEngine::new(shape)?)));
#[cfg(not(feature = "sim"))]
const ENGINE: (&str, MakeEngine) = ("fvm-soft", |shape| Ok(Box::new(millrace_engine_model::SoftEngine::new(shape))));

/// A daemon that grants nothing.
struct Nobody;

impl Host for Nobody {
    fn create_namespace(&self, _: &str, _: u32, _: u64, _: BlockSize, _: HostReply<Arc<Namespace>>) {}
    fn delete_namespace(&self, _: &str, _: u32, _: HostReply<()>) {}
    fn format(&self, _: &str, _: Arc<Namespace>, _: NewFormat, _: HostReply<()>) {}
    fn attachment_changed(&self, _: &str, _: u32, _: bool) {}
    fn reservation_notice(&self, _: &Arc<Namespace>, _: &[([u8; 16], u8)]) {}
}

/// A shard with a device that has one disk.
pub(crate) struct House {
    // Stops before the folder goes.
    _engine: Engine,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl House {
    /// With this volume as its disk, on a card or not.
    pub(crate) fn with(doorbells: DoorbellMode, card: Option<CardSpec>, volume: Arc<dyn Volume>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("bad.sock");
        let listener = Listener::bind(&socket).expect("a socket");
        let engine = Engine::start(vec![ShardConfig::new(0, None)]).expect("a shard");
        let namespace = Namespace::new(volume, Identity { uuid: [7; 16], eui64: [0; 8] }, false);
        let config = Config { doorbells, card, ..Config::new("bad") };
        let added = engine.shards()[0].call_wait(move |shard| {
            shard.add_device_with(|cx| {
                let mut device = NvmeDevice::new(config, listener, Arc::new(Nobody), cx)?;
                device.attach(Some(1), namespace, false)?;
                Ok::<_, millrace_frontends::nvme::DeviceError>(Box::new(device) as Box<_>)
            })
        });
        added.expect("the shard runs").expect("a device");
        Self { _engine: engine, socket, _folder: folder }
    }

    /// A guest with a queue pair.
    pub(crate) fn guest(&self) -> (Controller, Disk, QueuePair) {
        // Within what an engine's tables reach.
        let options = Options { timeout: PATIENCE, memory_size: 8 << 20, iova: 1 << 28, ..Options::default() };
        let mut controller = Controller::connect(&self.socket, &options).expect("a controller");
        let disk = controller.namespace(NamespaceId(1)).expect("a namespace");
        let options = QueueOptions { entries: 64, ..QueueOptions::default() };
        let queue = controller.create_queue_pair(&options).expect("a queue pair");
        (controller, disk, queue)
    }
}
