//! The daemon: from its options to its last word.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc::sync_channel},
    thread,
    time::Duration,
};

use millrace_engine::{Engine, EngineError, Placement, Polling, ShardConfig, ShardsError, parse_shards};
use millrace_frontends::nvme::CardSpec;
use millrace_keeper::{Held, Key, Kind, Link, LinkError, Predecessor, Word};
use millrace_sandbox::{Group, Sandbox, SandboxError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use tokio::{
    net::UnixListener,
    runtime,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};
use uuid::Uuid;

use crate::{
    Name,
    api::{self, Door, Operator},
    apps,
    cells::{self, ArrangeError, Arranged, BeginError, Cells},
    config::{ConfigError, Declared, FileSettings, IsolationMode, PlacementMode, PollingMode},
    confine,
    dirs::{DirError, RunDir, failed, let_through, make_private},
    error::ControlError,
    manager::{DeviceView, Ending, Manager, RestoreError, Settings},
    model::{AttachSpec, DeviceSpec, VolumeSpec},
    store::{Store, StoreError},
    upgrade::{self, layouts},
    witness::Witness,
};

/// How long requests in progress may still take when the daemon stops.
const GRACE: Duration = Duration::from_secs(3);
/// How often the applications' socket is tried again, where guests do not wait for it.
const APPS_AGAIN: Duration = Duration::from_secs(1);
/// How long the removal of sockets is waited for.
const PUT_AWAY: Duration = Duration::from_secs(2);

/// What `millrace serve` was asked for. What is `None` comes from the configuration file, or is the default.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// A configuration file to apply.
    pub config: Option<PathBuf>,
    /// Where the state is kept.
    pub state_dir: PathBuf,
    /// Where sockets go.
    pub run_dir: PathBuf,
    /// The shards, as `millrace_engine::parse_shards` understands them; one that is bound to no core by default.
    pub shards: Option<String>,
    /// What shards do without work.
    pub polling: Option<PollingMode>,
    /// How devices are spread.
    pub placement: Option<PlacementMode>,
    /// Which devices have a worker of their own.
    pub isolation: Option<IsolationMode>,
    /// The shards of these workers.
    pub worker_shards: Option<String>,
    /// The cell that this worker serves; `None`: it is the daemon's own.
    pub cell: Option<Name>,
    /// The engine that takes controllers' I/O queues; `None`: this program does it all.
    pub card: Option<CardSpec>,
    /// The configuration file's settings when the daemon was started; `None`: those that it has now.
    pub held: Option<FileSettings>,
}

impl ServeOptions {
    /// The folder of this worker's own in one of the daemon's.
    fn folder(&self, base: &Path) -> PathBuf {
        self.cell.as_ref().map_or_else(|| base.to_owned(), |cell| cells::folder(base, cell))
    }

    /// The file's settings that count: a worker that follows another one serves as that did, whatever has become of the file.
    fn settings(&self, file: Option<&Declared>) -> FileSettings {
        let now = file.map(Declared::settings);
        let Some(held) = &self.held else { return now.unwrap_or_default() };
        let changed = now.map(|now| held.differences(&now)).unwrap_or_default();
        if !changed.is_empty() {
            let settings = changed.join(", ");
            tracing::warn!(%settings, "the configuration file has other settings; they are left aside until the daemon is started anew");
        }
        held.clone()
    }

    fn shards(&self, file: &FileSettings) -> Result<Vec<ShardConfig>, ShardsError> {
        let (own, files) = match &self.cell {
            None => (&self.shards, &file.shards),
            Some(_) => (&self.worker_shards, &file.worker_shards),
        };
        let polling = self.polling.or(file.polling).unwrap_or_default();
        shard_configs(own.as_deref().or(files.as_deref()).unwrap_or("1"), polling)
    }

    /// Who may use the API: of a cell's, only the daemon's own worker.
    fn operators(&self, file: &FileSettings) -> Vec<Operator> {
        if self.cell.is_some() { Vec::new() } else { file.operators.clone() }
    }

    fn placement(&self, file: &FileSettings) -> Placement {
        match self.placement.or(file.placement).unwrap_or_default() {
            PlacementMode::Device => Placement::Device,
            PlacementMode::Disk => Placement::Disk,
        }
    }
}

/// One disk in the foreground, without any state.
#[derive(Clone, Debug)]
pub struct ForegroundDisk {
    /// The disk.
    pub volume: VolumeSpec,
    /// The controller. Its socket must be given.
    pub device: DeviceSpec,
    /// Guests cannot write.
    pub read_only: bool,
    /// What the shard does without work.
    pub polling: PollingMode,
}

/// Why the daemon cannot run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// A directory cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The configuration file cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The list of shards cannot be understood.
    #[error("--shards: {0}")]
    Shards(#[from] ShardsError),
    /// A shard cannot start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The stored state cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Devices cannot be spread over workers as it is asked for.
    #[error(transparent)]
    Arrange(#[from] ArrangeError),
    /// A worker of its own is not there for what was declared for it.
    #[error(transparent)]
    Begin(#[from] BeginError),
    /// What is stored cannot be brought back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The foreground disk cannot be made.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The keeper cannot be worked with.
    #[error(transparent)]
    Keeper(#[from] LinkError),
    /// The thread that hears it has ended.
    #[error("the keeper's word is not heard any more; the log says why")]
    Deaf,
    /// The daemon cannot be confined.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The system refused something else.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// Allows as many open files as the system lets us: vectors, connections and shared memory are descriptors, and a device may
/// have hundreds of them. The usual limit is there for programs that use select(2), which we do not.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = limit.current, "the number of open files stays limited");
    }
}

/// How the daemon comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Guests lose their devices.
    Stop,
    /// Everything is left to another worker: the process is to end without putting anything away.
    LetGo,
    /// The same, because what the keeper says is not heard any more.
    Deaf,
}

/// Whether guests are another worker's to go on with after this one's end: nothing of theirs may be put away then. Until the first worker
/// serves, there are none.
fn is_left(result: &Result<End, DaemonError>, predecessor: Option<Predecessor>) -> bool {
    match result {
        Ok(end) => *end != End::Stop,
        Err(DaemonError::Keeper(LinkError::Gone)) => false,
        Err(_) => predecessor.is_some(),
    }
}

/// Runs the daemon until its keeper, at the other end of `link`, tells it to stop or to let go.
pub fn serve(options: &ServeOptions, link: OwnedFd, sandbox: Sandbox) -> Result<(), DaemonError> {
    let result = serve_confined(options, link, sandbox);
    if let Err(error) = &result {
        upgrade::leave_words(&options.folder(&options.run_dir), &api::explain(error));
    }
    // What was refused may be why.
    confine::tell_refused();
    result
}

fn serve_confined(options: &ServeOptions, link: OwnedFd, sandbox: Sandbox) -> Result<(), DaemonError> {
    // Everything that can be wrong without touching anything comes first, and what takes time: in an upgrade, guests do not wait for it.
    let declared = options.config.as_deref().map(Declared::read).transpose();
    let file = options.settings(declared.as_ref().ok().and_then(Option::as_ref));
    let isolation = options.isolation.or(file.isolation).unwrap_or_default();
    let (placement, shards) = (options.placement(&file), options.shards(&file)?);
    let (operators, apps) = (options.operators(&file), file.apps);
    raise_file_limit();
    let (runtime, (engine, keeper)) = (runtime()?, warm_up(link, shards)?);
    let predecessor = keeper.predecessor();
    let whole = if_usable(declared, predecessor)?;
    let declared = whole.as_ref().filter(|_| predecessor.is_none());
    // The other's word is heard only after this one's, that it serves.
    let on_trial = keeper.is_on_trial();
    let (run_path, state_path) = (options.folder(&options.run_dir), options.folder(&options.state_dir));
    let (run_dir, socket_group) = take_run_dir(options, &run_path, &keeper, &sandbox)?;
    make_private(&state_path)?;
    sandbox.wait_for_turn(&run_path.join(confine::LOCK))?;
    let (store, arranged) = open_state(options, isolation, Store::open(&state_path)?, predecessor, declared)?;
    let part = declared.map(|declared| arranged.part(declared, options.cell.as_ref()));
    for cell in &arranged.cells {
        keeper.start_cell(cell.as_str())?;
    }
    confine::close(sandbox, &[&options.run_dir, &state_path], &store, part.as_ref(), &engine)?;
    let settings = Settings {
        run_dir: absolute(&options.run_dir)?,
        state_dir: Some(absolute(&state_path)?),
        placement,
        keeper: Some(Arc::clone(&keeper)),
        cell: options.cell.clone(),
        apps,
        card: options.card,
        socket_group,
    };
    let (kept, door) = (keeper.take(Key::of_daemon(Kind::API)), keeper.take(Key::of_daemon(Kind::APPS)));
    let socket = run_dir.api_socket(kept.is_some())?;
    let manager = Manager::start(settings, store, engine, part.as_ref().filter(|_| options.cell.is_none()))?;
    log_predecessor(predecessor);
    let has_cells = options.cell.is_none() && (isolation != IsolationMode::Shared || !arranged.cells.is_empty());
    let folders = || (options.run_dir.clone(), options.state_dir.clone());
    let cells = has_cells.then(|| Cells::new(isolation, folders(), &keeper, &manager, &arranged));
    let result = run(runtime, async || {
        let listener = match kept {
            Some(held) => taken_listener(held.fd)?,
            None => bind(&socket, &keeper)?,
        };
        open_to_operators(&socket, &operators, predecessor)?;
        let listener = Door::new(listener, operators);
        let apps = || open_to_apps(&options.run_dir, (door, &keeper), (&manager, cells.as_ref()));
        let apps = options.cell.is_none().then(apps).transpose()?;
        match &cells {
            Some(cells) if predecessor.is_none() => cells.begin(&arranged).await?,
            Some(cells) => drop(tokio::spawn(Arc::clone(cells).go_on(on_trial))),
            None => {}
        }
        let result = api_until_told(listener, (options, whole), (&manager, cells.as_ref()), &keeper).await;
        apps.inspect(tokio::task::JoinHandle::abort);
        result
    });
    if is_left(&result, predecessor) {
        // Nothing of it is dropped: sockets stay in their places, and devices where they are.
        std::mem::forget(manager);
    } else {
        manager.shutdown();
        put_away(vec![socket, run_path.join(apps::APPS_SOCKET), run_path.join(upgrade::FILE)]);
    }
    if result? == End::Deaf { Err(DaemonError::Deaf) } else { Ok(()) }
}

/// Starts the shards, and waits for this worker's turn.
fn warm_up(link: OwnedFd, shards: Vec<ShardConfig>) -> Result<(Engine, Arc<Link>), DaemonError> {
    let (engine, witness) = Witness::start(shards)?;
    let keeper = Arc::new(Link::begin(link, &layouts())?);
    witness.leave(&keeper);
    Ok((engine, keeper))
}

/// The run directory, and the group that passes through it to devices' sockets, those of cells too.
fn take_run_dir(
    options: &ServeOptions,
    path: &Path,
    keeper: &Link,
    sandbox: &Sandbox,
) -> Result<(RunDir, Option<Group>), DirError> {
    let group = sandbox.policy().socket_group.clone();
    let is_first = keeper.predecessor().is_none() && options.cell.is_none();
    if let Some(group) = group.as_ref().filter(|_| is_first) {
        let_through(path, group)?;
    }
    Ok((RunDir::take(path, Some(keeper))?, group))
}

/// Lets operators reach the API's socket. Guests that are served already do not wait for that.
fn open_to_operators(socket: &Path, operators: &[Operator], predecessor: Option<Predecessor>) -> Result<(), DirError> {
    match Door::open(socket, operators) {
        Err(error) if predecessor.is_some() => {
            tracing::error!(%error, "the API may not be reached by all who may use it");
            Ok(())
        }
        opened => opened,
    }
}

/// Hears applications from now on, where the worker before this one did; without its socket, after a worker's end, as soon as one can be
/// made.
fn open_to_apps(
    run_dir: &Path,
    (kept, keeper): (Option<Held>, &Arc<Link>),
    (manager, cells): (&Arc<Manager>, Option<&Arc<Cells>>),
) -> Result<tokio::task::JoinHandle<()>, DirError> {
    let taken = kept.and_then(|held| {
        let taken = taken_listener(held.fd);
        taken.inspect_err(|error| tracing::error!(%error, "the applications' socket is made anew")).ok()
    });
    let mut door = match taken.map_or_else(|| apps::bind(run_dir, keeper), Ok) {
        Err(error) if keeper.predecessor().is_none() => return Err(error),
        door => door.inspect_err(|error| tracing::error!(%error, "applications are not heard for now")),
    };
    let (run_dir, keeper, manager, cells) = (run_dir.to_owned(), Arc::clone(keeper), Arc::clone(manager), cells.cloned());
    Ok(tokio::spawn(async move {
        let listener = loop {
            match door {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(APPS_AGAIN).await,
            }
            door = apps::bind(&run_dir, &keeper);
        };
        apps::serve(listener, manager, cells).await;
    }))
}

/// The configuration file, if there is one. What it once declared is stored; guests do not wait for a file that is being edited.
fn if_usable(
    declared: Result<Option<Declared>, ConfigError>,
    predecessor: Option<Predecessor>,
) -> Result<Option<Declared>, ConfigError> {
    match declared {
        Err(error) if predecessor.is_some() => {
            tracing::error!(%error, "the configuration file is left aside");
            Ok(None)
        }
        other => other,
    }
}

/// Removes what nobody listens to or looks at any more. The end does not wait for a file system, or who is to ask it, that hangs.
fn put_away(paths: Vec<PathBuf>) {
    let (done, told) = sync_channel(1);
    let remove = move || {
        for path in paths {
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "what belongs to this daemon stays behind");
            }
        }
        // Who waited may have waited for long enough.
        let _ = done.send(());
    };
    let spawned = thread::Builder::new().name("millrace-end".to_owned()).spawn(remove);
    if spawned.is_err() || told.recv_timeout(PUT_AWAY).is_err() {
        tracing::warn!("sockets stay behind: there was no thread to remove them, or their file system does not answer");
    }
}

/// The worker's state, which cells it has, and what of the configuration file is whose. When the daemon starts, everything is put where it belongs
/// first. A cell makes sure of its part when its daemon says so, and needs to know it before: its sandbox closes around it.
fn open_state(
    options: &ServeOptions,
    isolation: IsolationMode,
    own: Store,
    predecessor: Option<Predecessor>,
    declared: Option<&Declared>,
) -> Result<(Store, Arranged), DaemonError> {
    if let Some(cell) = &options.cell {
        return Ok(cells::part_of(own, cell, isolation, declared)?);
    }
    if predecessor.is_none() {
        return Ok(cells::arrange(own, &options.state_dir, isolation, declared)?);
    }
    let cells = cells::stored(&options.state_dir).map_err(failed(&options.state_dir.join(cells::DIR), "list it"))?;
    Ok((own, Arranged::of(cells)))
}

fn log_predecessor(predecessor: Option<Predecessor>) {
    let Some(Predecessor { signal, pid, died_micros, let_go, .. }) = predecessor else { return };
    let pause_micros = monotonic_micros().saturating_sub(died_micros);
    if let_go {
        tracing::info!(pid, pause_micros, "the worker before this one has let go; its guests go on");
    } else {
        tracing::warn!(pid, ?signal, pause_micros, "the worker before this one has died; its guests go on");
    }
}

/// Serves one disk until it is told to stop by SIGTERM or SIGINT. `ready` is called when its socket listens.
pub fn foreground(disk: &ForegroundDisk, sandbox: Sandbox, ready: impl FnOnce(&DeviceView)) -> Result<(), DaemonError> {
    let result = foreground_confined(disk, sandbox, ready);
    // What was refused may be why.
    confine::tell_refused();
    result
}

fn foreground_confined(disk: &ForegroundDisk, sandbox: Sandbox, ready: impl FnOnce(&DeviceView)) -> Result<(), DaemonError> {
    raise_file_limit();
    let settings = Settings {
        run_dir: PathBuf::from("/"),
        state_dir: None,
        placement: Placement::Device,
        keeper: None,
        cell: None,
        apps: Vec::new(),
        card: None,
        socket_group: None,
    };
    let (runtime, engine) = (runtime()?, Engine::start(shard_configs("1", disk.polling)?)?);
    confine::close_around(sandbox, &disk.volume, &disk.device, &engine)?;
    let manager = Manager::start(settings, Store::in_memory()?, engine, None)?;
    let result = (|| {
        let volume = manager.create_volume(&disk.volume)?;
        let device = manager.create_device(&disk.device)?;
        let attach = AttachSpec { volume: volume.name, nsid: None, read_only: disk.read_only };
        manager.attach(device.name.as_str(), &attach)?;
        let device = manager.device(device.name.as_str())?;
        run(runtime, async || {
            let told = signalled()?;
            ready(&device);
            told.await;
            Ok(End::Stop)
        })
    })();
    manager.shutdown();
    result.map(|_| ())
}

pub(crate) fn monotonic_micros() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

fn shard_configs(shards: &str, polling: PollingMode) -> Result<Vec<ShardConfig>, ShardsError> {
    let cores = parse_shards(shards)?;
    let polling = match polling {
        PollingMode::Adaptive => Polling::default(),
        PollingMode::Interrupt => Polling::interrupt(),
        PollingMode::Spin => Polling::Spin,
    };
    let config = |(index, core)| ShardConfig { polling, ..ShardConfig::new(index, core) };
    Ok(cores.into_iter().enumerate().map(config).collect())
}

fn absolute(path: &Path) -> Result<PathBuf, DirError> {
    std::path::absolute(path).map_err(failed(path, "use the path"))
}

fn runtime() -> Result<runtime::Runtime, DaemonError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|source| DaemonError::Io { what: "no runtime for the API", source })
}

/// Runs a future on this thread.
fn run<F: Future<Output = Result<End, DaemonError>>>(
    runtime: runtime::Runtime,
    future: impl FnOnce() -> F,
) -> Result<End, DaemonError> {
    let result = runtime.block_on(async { future().await });
    match result {
        // A request that hangs does not keep the daemon.
        Ok(End::Stop) => runtime.shutdown_timeout(GRACE),
        // Requests that wait are the next worker's to answer, or nobody's.
        _ => runtime.shutdown_background(),
    }
    result
}

async fn api_until_told(
    listener: Door,
    (options, declared): (&ServeOptions, Option<Declared>),
    (manager, cells): (&Arc<Manager>, Option<&Arc<Cells>>),
    keeper: &Arc<Link>,
) -> Result<End, DaemonError> {
    let told = told_to_end(keeper, manager, cells)?;
    if options.cell.is_none() && keeper.predecessor().is_none() {
        apps::tell_missing(manager, cells);
    }
    let (stop, stopping) = oneshot::channel::<()>();
    let mut router = api::router(Arc::clone(manager));
    if options.cell.is_some() {
        router = router.merge(cells::door(manager, declared));
    }
    if let Some(cells) = cells {
        router = cells::front(router, cells);
    }
    let server = axum::serve(listener, router);
    let server = server.with_graceful_shutdown(async {
        // The sender gone means the same.
        let _ = stopping.await;
    });
    let serving = tokio::spawn(async move { server.await });
    keeper.ready()?;
    let end = told.await;
    if end != End::Stop {
        return Ok(end);
    }
    tracing::info!("stopping");
    manager.end_trace(Ending::Stopping);
    let _ = stop.send(());
    if tokio::time::timeout(GRACE, serving).await.is_err() {
        tracing::warn!("a request of the API was cut off");
    }
    Ok(End::Stop)
}

/// The API's socket, which only its owner may connect to.
fn bind(socket: &Path, keeper: &Link) -> Result<UnixListener, DaemonError> {
    // Bound under another name first: there is no moment in which others could connect.
    let hidden = socket.with_extension("new");
    match fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&hidden, "remove it")(error).into()),
        _ => {}
    }
    let listener = UnixListener::bind(&hidden).map_err(failed(&hidden, "make the API's socket"))?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).map_err(failed(&hidden, "make it private"))?;
    fs::rename(&hidden, socket).map_err(failed(socket, "put the API's socket in place"))?;
    if let Err(error) = keeper.put(Key::of_daemon(Kind::API), listener.as_fd()) {
        tracing::warn!(%error, "the API's socket is not kept");
    }
    Ok(listener)
}

/// A socket as the worker before this one left it: those who asked meanwhile are in its backlog.
fn taken_listener(socket: OwnedFd) -> Result<UnixListener, DaemonError> {
    let failed = |source| DaemonError::Io { what: "a listening socket cannot be taken over", source };
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true).map_err(failed)?;
    UnixListener::from_std(listener).map_err(failed)
}

/// Finished when the keeper tells the process to end.
fn told_to_end(
    keeper: &Arc<Link>,
    manager: &Arc<Manager>,
    cells: Option<&Arc<Cells>>,
) -> Result<impl Future<Output = End> + use<>, DaemonError> {
    // What is sent to all processes of a service or a terminal is the keeper's to understand.
    drop(signalled()?);
    let (keeper, manager) = (Arc::clone(keeper), Arc::clone(manager));
    let cells = cells.map(|cells| (Arc::clone(cells), runtime::Handle::current()));
    let (tell, told) = oneshot::channel();
    let wait = move || {
        let _ = tell.send(hear(&keeper, &manager, cells.as_ref()));
    };
    let spawned = thread::Builder::new().name("millrace-stop".to_owned()).spawn(wait);
    spawned.map_err(|source| DaemonError::Io { what: "no thread for the keeper's word", source })?;
    // Its thread gone is a fault of ours, and no word of the keeper's.
    Ok(async { told.await.unwrap_or(End::Deaf) })
}

/// Does what the keeper says, until it says to end.
fn hear(keeper: &Link, manager: &Arc<Manager>, cells: Option<&(Arc<Cells>, runtime::Handle)>) -> End {
    let mut not_held = 0;
    loop {
        match keeper.listen() {
            Ok(Word::Stop) | Err(LinkError::Gone) => return End::Stop,
            Err(error) => {
                tracing::error!(%error, "the keeper's word is not heard");
                return End::Deaf;
            }
            Ok(Word::Upgraded(upgraded)) => match cells {
                Some((cells, runtime)) => drop(runtime.spawn(Arc::clone(cells).note_upgraded(upgraded))),
                None => manager.note_upgraded(&upgraded),
            },
            Ok(Word::NotHeld(key)) => {
                let (owner, kind) = (Uuid::from_bytes(key.owner), key.kind.0);
                // A client may have thousands of regions that are all not held.
                not_held += 1;
                if u64::is_power_of_two(not_held) {
                    tracing::error!(%owner, kind, count = not_held, "the keeper has no room for a descriptor, and the next worker would not find it: raise the limit of open files (LimitNOFILE=), or have fewer devices and clients");
                }
            }
            Ok(Word::Settled) => {
                if let Some((cells, _)) = &cells {
                    cells.note_settled();
                }
                manager.end_trial();
            }
            Ok(Word::LetGo(theirs)) => match manager.let_go(&theirs) {
                Ok(()) => return End::LetGo,
                Err(error) => {
                    tracing::warn!(%error, "the new binary cannot take over");
                    // A keeper that is gone is heard of next.
                    if let Err(error) = keeper.refuse() {
                        tracing::error!(%error, "the keeper was not told so");
                    }
                }
            },
        }
    }
}

/// Finished when the process is told to stop. Signals count from the call on.
fn signalled() -> Result<impl Future<Output = ()>, DaemonError> {
    let watch = |kind| signal(kind).map_err(|source| DaemonError::Io { what: "signals cannot be watched", source });
    let (mut terminate, mut interrupt) = (watch(SignalKind::terminate())?, watch(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
