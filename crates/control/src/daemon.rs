//! The daemon: from its options to its last word.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use millrace_engine::{Engine, EngineError, Placement, Polling, ShardConfig, ShardsError, parse_shards};
use millrace_keeper::{Key, Kind, Link, Predecessor};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use tokio::{
    net::UnixListener,
    runtime,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::{
    api,
    config::{ConfigError, Declared, PlacementMode, PollingMode},
    dirs::{DirError, RunDir, failed, make_private},
    error::ControlError,
    manager::{DeviceView, Manager, RestoreError, Settings},
    model::{AttachSpec, DeviceSpec, VolumeSpec},
    store::{Store, StoreError},
};

/// How long requests in progress may still take when the daemon stops.
const GRACE: Duration = Duration::from_secs(3);

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
    /// Who holds what must outlive this process, and says when to stop; signals say it otherwise.
    pub keeper: Option<Arc<Link>>,
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
    /// What is stored cannot be brought back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The foreground disk cannot be made.
    #[error(transparent)]
    Control(#[from] ControlError),
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

/// Runs the daemon until it is told to stop by SIGTERM or SIGINT. `ready` is called with the API's socket when it answers.
pub fn serve(options: &ServeOptions, ready: impl FnOnce(&Path)) -> Result<(), DaemonError> {
    // Everything that can be wrong without touching anything comes first.
    let predecessor = options.keeper.as_ref().and_then(|keeper| keeper.predecessor());
    let declared = match options.config.as_deref().map(Declared::read).transpose() {
        // What it once declared is stored; guests do not wait for a file that is being edited.
        Err(error) if predecessor.is_some() => {
            tracing::error!(%error, "the configuration file is left aside");
            None
        }
        other => other?,
    };
    let from_file = declared.as_ref();
    let shards = options.shards.as_deref().or_else(|| from_file.and_then(|declared| declared.shards.as_deref()));
    let polling = options.polling.or_else(|| from_file.and_then(|declared| declared.polling)).unwrap_or_default();
    let placement = options.placement.or_else(|| from_file.and_then(|declared| declared.placement)).unwrap_or_default();
    let shards = shard_configs(shards.unwrap_or("1"), polling)?;

    raise_file_limit();
    let keeper = options.keeper.as_ref();
    let run_dir = RunDir::take(&options.run_dir, keeper.map(Arc::as_ref))?;
    make_private(&options.state_dir)?;
    let store = Store::open(&options.state_dir)?;
    let settings = Settings {
        run_dir: absolute(&options.run_dir)?,
        state_dir: Some(absolute(&options.state_dir)?),
        placement: match placement {
            PlacementMode::Device => Placement::Device,
            PlacementMode::Disk => Placement::Disk,
        },
        keeper: options.keeper.clone(),
    };
    let kept = keeper.and_then(|keeper| keeper.take(Key::of_daemon(Kind::API)));
    let socket = run_dir.api_socket(kept.is_some())?;
    let manager =
        Manager::start(settings, store, Engine::start(shards)?, declared.as_ref().filter(|_| predecessor.is_none()))?;
    if let Some(Predecessor { signal, pid, died_micros, .. }) = predecessor {
        let pause_micros = monotonic_micros().saturating_sub(died_micros);
        tracing::warn!(pid, ?signal, pause_micros, "the worker before this one has died; its guests go on");
    }
    let result = run(|| async {
        let listener = match kept {
            Some(held) => taken_listener(held.fd)?,
            None => bind(&socket, keeper.map(Arc::as_ref))?,
        };
        api_until_told(&socket, listener, &manager, keeper, ready).await
    });
    manager.shutdown();
    if let Err(error) = fs::remove_file(&socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %socket.display(), %error, "the API's socket stays behind");
    }
    result
}

/// Serves one disk until it is told to stop by SIGTERM or SIGINT. `ready` is called when its socket listens.
pub fn foreground(disk: &ForegroundDisk, ready: impl FnOnce(&DeviceView)) -> Result<(), DaemonError> {
    raise_file_limit();
    let settings = Settings { run_dir: PathBuf::from("/"), state_dir: None, placement: Placement::Device, keeper: None };
    let engine = Engine::start(shard_configs("1", disk.polling)?)?;
    let manager = Manager::start(settings, Store::in_memory()?, engine, None)?;
    let result = (|| {
        let volume = manager.create_volume(&disk.volume)?;
        let device = manager.create_device(&disk.device)?;
        let attach = AttachSpec { volume: volume.name, nsid: None, read_only: disk.read_only };
        manager.attach(device.name.as_str(), &attach)?;
        let device = manager.device(device.name.as_str())?;
        run(async || {
            let told = signalled()?;
            ready(&device);
            told.await;
            Ok(())
        })
    })();
    manager.shutdown();
    result
}

fn monotonic_micros() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

fn shard_configs(shards: &str, polling: PollingMode) -> Result<Vec<ShardConfig>, ShardsError> {
    let cores = parse_shards(shards)?;
    let polling = match polling {
        PollingMode::Adaptive => Polling::default(),
        PollingMode::Spin => Polling::Spin,
    };
    let config = |(index, core)| ShardConfig { polling, ..ShardConfig::new(index, core) };
    Ok(cores.into_iter().enumerate().map(config).collect())
}

fn absolute(path: &Path) -> Result<PathBuf, DirError> {
    std::path::absolute(path).map_err(failed(path, "use the path"))
}

/// Runs a future on this thread.
fn run<F: Future<Output = Result<(), DaemonError>>>(future: impl FnOnce() -> F) -> Result<(), DaemonError> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| DaemonError::Io { what: "no runtime for the API", source })?;
    let result = runtime.block_on(async { future().await });
    // A request that hangs does not keep the daemon.
    runtime.shutdown_timeout(GRACE);
    result
}

async fn api_until_told(
    socket: &Path,
    listener: UnixListener,
    manager: &Arc<Manager>,
    keeper: Option<&Arc<Link>>,
    ready: impl FnOnce(&Path),
) -> Result<(), DaemonError> {
    let told = told_to_stop(keeper)?;
    let (stop, stopping) = oneshot::channel::<()>();
    let server = axum::serve(listener, api::router(Arc::clone(manager)));
    let server = server.with_graceful_shutdown(async {
        // The sender gone means the same.
        let _ = stopping.await;
    });
    let serving = tokio::spawn(async move { server.await });
    ready(socket);
    told.await;
    tracing::info!("stopping");
    let _ = stop.send(());
    if tokio::time::timeout(GRACE, serving).await.is_err() {
        tracing::warn!("a request of the API was cut off");
    }
    Ok(())
}

/// The API's socket, which only its owner may connect to.
fn bind(socket: &Path, keeper: Option<&Link>) -> Result<UnixListener, DaemonError> {
    // Bound under another name first: there is no moment in which others could connect.
    let hidden = socket.with_extension("new");
    match fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&hidden, "remove it")(error).into()),
        _ => {}
    }
    let listener = UnixListener::bind(&hidden).map_err(failed(&hidden, "make the API's socket"))?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).map_err(failed(&hidden, "make it private"))?;
    fs::rename(&hidden, socket).map_err(failed(socket, "put the API's socket in place"))?;
    if let Some(Err(error)) = keeper.map(|keeper| keeper.put(Key::of_daemon(Kind::API), listener.as_fd())) {
        tracing::warn!(%error, "the API's socket is not kept");
    }
    Ok(listener)
}

/// The API's socket, as the worker before this one left it: those who asked meanwhile are in its backlog.
fn taken_listener(socket: OwnedFd) -> Result<UnixListener, DaemonError> {
    let failed = |source| DaemonError::Io { what: "the API's socket cannot be taken over", source };
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true).map_err(failed)?;
    UnixListener::from_std(listener).map_err(failed)
}

/// Finished when the process is told to stop: by its keeper, or by a signal.
fn told_to_stop(keeper: Option<&Arc<Link>>) -> Result<Pin<Box<dyn Future<Output = ()>>>, DaemonError> {
    let Some(keeper) = keeper.map(Arc::clone) else { return Ok(Box::pin(signalled()?)) };
    // What is sent to all processes of a service or a terminal is the keeper's to understand.
    drop(signalled()?);
    let (tell, told) = oneshot::channel();
    let wait = move || {
        keeper.wait_for_stop();
        let _ = tell.send(());
    };
    let spawned = std::thread::Builder::new().name("millrace-stop".to_owned()).spawn(wait);
    spawned.map_err(|source| DaemonError::Io { what: "no thread for the keeper's word", source })?;
    Ok(Box::pin(async {
        // The sender gone means the same.
        let _ = told.await;
    }))
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
