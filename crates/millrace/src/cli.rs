//! The command line.

mod apps;
mod groups;
mod migrations;
mod sandbox;
mod trace;
mod usage;

use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use millrace_control::{
    Backend, DeviceKind, Doorbells, Functions, IsolationMode, LogicalBlock, Name, NvmeSpec, PlacementMode, PollingMode,
    Size, Uuid, VirtioBlkSpec, default_run_dir, default_state_dir,
};
use millrace_frontends::nvme::CardSpec;
use millrace_services::Node;

pub(crate) use self::{
    apps::AppCommand,
    groups::GroupCommand,
    migrations::VolumeMigrate,
    sandbox::{ConfinedArgs, SandboxArgs},
    trace::{AnalyzeArgs, Export, TraceArgs},
    usage::UsageArgs,
};
use crate::{bench::BenchArgs, engine};

/// What the manual page says beside the commands.
const PLACES: &str = "\
Files: /etc/millrace.toml, the service's configuration; /var/lib/millrace, the state; /run/millrace, the sockets. Of another user than root: \
$XDG_STATE_HOME/millrace (or ~/.local/state/millrace) and $XDG_RUNTIME_DIR/millrace (or /tmp/millrace-UID).

Exit status: 0: done; 1: it failed, and standard error says why; 2: wrong usage, or a configuration that cannot be understood.

What messages name as docs/… lies in share/doc/millrace, beside this program's bin.";

/// Virtual NVMe disks for virtual machines
///
/// `millrace serve` runs the daemon, and most other commands ask it. `millrace nvme` serves a single disk without it.
#[derive(Debug, Parser)]
#[command(name = "millrace", version, max_term_width = 100, after_long_help = PLACES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Where the daemon's sockets are [default: /run/millrace; of another user than root
    /// XDG_RUNTIME_DIR/millrace, or /tmp/millrace-UID]
    #[arg(long, global = true, env = "MILLRACE_RUN_DIR", hide_env_values = true, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print JSON; an error stays text, on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

impl Global {
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.run_dir.clone().unwrap_or_else(default_run_dir)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon
    Serve(ServeArgs),
    /// What `serve` runs, and runs again when it dies
    #[command(hide = true)]
    Worker(ServeArgs),
    /// What `worker` and `nvme` have make the system calls that they gave up
    #[command(hide = true)]
    Broker,
    /// What `worker` has run the commands that print keys
    #[command(hide = true)]
    KeyHelper {
        /// Programs that may be run
        allowed: Vec<PathBuf>,
        /// Any may be
        #[arg(long)]
        any: bool,
    },
    /// Create, list, show, change, resize, migrate and delete volumes
    Volume {
        #[command(subcommand)]
        command: VolumeCommand,
    },
    /// Create, list, show, resize and delete disks, which any number of volumes share
    Disk {
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Copy a volume to another one, and look after such copies
    Copy(CopyArgs),
    /// Create, list, show, change and delete groups: caps and weights that volumes have together
    Group {
        #[command(subcommand)]
        command: GroupCommand,
    },
    /// Create, list, show and delete devices; attach and detach volumes
    Device {
        #[command(subcommand)]
        command: DeviceCommand,
    },
    /// Say which users' programs may open volumes through libmillrace, which, how and how often
    App {
        #[command(subcommand)]
        command: AppCommand,
    },
    /// Show what metered volumes did, and what it costs
    Usage(UsageArgs),
    /// Record what becomes of every request of a device or a volume
    Trace(TraceArgs),
    /// Say what a trace means: latencies by stage, size, place and depth, order, mix, what is used most
    Analyze(AnalyzeArgs),
    /// Show how the daemon is doing
    Status,
    /// Have the daemon go on with another binary, under running guests
    Upgrade(UpgradeArgs),
    /// Show which layouts of what outlives the daemon's worker this binary reads and writes
    Layouts,
    /// Print the daemon's metrics (OpenMetrics text; with --json the objects that they are of)
    Metrics,
    /// Serve one NVMe disk in the foreground, without daemon and state
    Nvme(Box<NvmeCommand>),
    /// Drive any vfio-user NVMe device, or a physical one, and print IOPS, bandwidth and latencies
    Bench(BenchArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages to a directory
    Man {
        /// The directory; made if need be
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A configuration file (TOML) with volumes and devices to make sure of
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where the state is kept [default: /var/lib/millrace; of another user than root XDG_STATE_HOME/millrace, or
    /// ~/.local/state/millrace]
    #[arg(long, env = "MILLRACE_STATE_DIR", hide_env_values = true, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Poll threads: their number (2), or one bound to each core of a list (0,2,4-6) [default: 1]
    #[arg(long, value_name = "LIST")]
    pub(crate) shards: Option<String>,
    /// What a shard does without work [default: adaptive]
    #[arg(long, value_enum)]
    polling: Option<PollingArg>,
    /// How devices are spread over shards [default: device]
    #[arg(long, value_enum)]
    placement: Option<PlacementArg>,
    /// Which devices have a worker of their own, so that what their guests do to it is nobody else's trouble [default: shared]
    #[arg(long, value_enum)]
    isolation: Option<IsolationArg>,
    /// Poll threads of each worker beside the first, as --shards says them [default: 1]
    #[arg(long, value_name = "LIST")]
    pub(crate) worker_shards: Option<String>,
    /// The cell whose keeper or worker this is
    #[arg(long, value_name = "NAME", hide = true)]
    pub(crate) cell: Option<Name>,
    /// A directory whose programs "upgrade" may put in this one's place, beside the one of this program; may be repeated
    #[arg(long, value_name = "DIR")]
    pub(crate) upgrade_from: Vec<PathBuf>,
    /// A group that may connect to devices' sockets, too, by name or number: one that machines' monitors of other users are in
    #[arg(long, value_name = "GROUP")]
    pub(crate) socket_group: Option<String>,
    /// An engine that takes the controllers' I/O queues: fvm-soft or fvm-sim, [:cores=N,ssds=N,latency=CYCLES]
    #[arg(long, value_parser = engine::parse, value_name = "ENGINE")]
    pub(crate) engine: Option<CardSpec>,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

impl ServeArgs {
    pub(crate) fn state_dir(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(default_state_dir)
    }

    pub(crate) fn polling(&self) -> Option<PollingMode> {
        self.polling.map(PollingMode::from)
    }

    pub(crate) fn placement(&self) -> Option<PlacementMode> {
        self.placement.map(|placement| match placement {
            PlacementArg::Device => PlacementMode::Device,
            PlacementArg::Disk => PlacementMode::Disk,
        })
    }

    pub(crate) fn isolation(&self) -> Option<IsolationMode> {
        self.isolation.map(|isolation| match isolation {
            IsolationArg::Shared => IsolationMode::Shared,
            IsolationArg::Tenant => IsolationMode::Tenant,
            IsolationArg::Device => IsolationMode::Device,
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// The new binary [default: the one that this command runs]
    #[arg(long, value_name = "PATH")]
    pub(crate) binary: Option<PathBuf>,
    /// How long the old binary takes over again if the new one fails, in seconds
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub(crate) trial: u64,
    /// Only show how the last upgrade went
    #[arg(long, conflicts_with_all = ["binary", "trial"])]
    pub(crate) show: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// What is logged: a level (error, warn, info, debug, trace), or a list of TARGET=LEVEL [default: warn,millrace_control=info]
    #[arg(long = "log", env = "MILLRACE_LOG", hide_env_values = true, value_name = "FILTER")]
    pub(crate) filter: Option<String>,
    /// How it is written
    #[arg(long = "log-format", value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub(crate) format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PollingArg {
    /// Spin while there is work, then sleep until shortly before more is expected
    Adaptive,
    /// Sleep as soon as there is no work: least processor time, highest latency
    Interrupt,
    /// Spin for ever: lowest latency, one whole core per shard
    Spin,
}

impl From<PollingArg> for PollingMode {
    fn from(polling: PollingArg) -> Self {
        match polling {
            PollingArg::Adaptive => Self::Adaptive,
            PollingArg::Interrupt => Self::Interrupt,
            PollingArg::Spin => Self::Spin,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    /// Each device to the least loaded shard
    Device,
    /// Devices of one disk to one shard
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IsolationArg {
    /// None: one worker serves all
    Shared,
    /// A worker for the devices of each tenant
    Tenant,
    /// A worker for each device
    Device,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create a volume
    Create(VolumeCreate),
    /// List all volumes
    List,
    /// Show a volume, its stack as a tree
    Show {
        /// The volume
        name: String,
        /// Show the stacks that it had
        #[arg(long)]
        history: bool,
    },
    /// Put another stack in the place of a volume's, while guests use it
    Change(VolumeStack),
    /// Put a service over a volume's stack, while guests use it
    Insert {
        /// The volume
        name: String,
        /// The service with its settings: throttle(iops=1000)
        service: String,
    },
    /// Take a service out of a volume's stack, while guests use it
    Remove {
        /// The volume
        name: String,
        /// The service's name: the first one from the top, over one leg, goes; or its place, as "volume show" has it: throttle.0
        service: String,
    },
    /// Put a leaf in the place of another, while guests use the volume
    Replace {
        /// The volume
        name: String,
        /// The leaf that goes: file:/a.img
        old: String,
        /// What comes: a leaf, or a stack
        new: String,
        /// The new stack may show other data
        #[arg(long)]
        reformat: bool,
    },
    /// Bring a volume, or a part of its stack, to another place while guests use it
    Migrate(VolumeMigrate),
    /// Give a command to a service of a volume
    Command {
        /// The volume
        name: String,
        /// The service: its name; where there are several of it, its place, which "volume show" has beside each: stripe.0, or top
        service: String,
        /// The command
        command: String,
        /// Its arguments: name=value
        arguments: Vec<String>,
    },
    /// List the services that stacks can have, with their settings and commands
    Services,
    /// Grow a volume, or shrink it (--shrink: what lies beyond the smaller size is lost); guests that have it are told
    Resize(VolumeResize),
    /// Delete a volume that no device has. Its file stays
    Delete {
        /// The volume
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Make a disk of a back end, or of any stack. Volumes of it: volume create NAME --size SIZE --stack "share | volume:DISK"
    Create(DiskCreate),
    /// List all disks
    List,
    /// Show a disk, with the volumes on it
    Show {
        /// The disk
        name: String,
    },
    /// Grow a disk, or shrink it (--shrink); its volumes stay as they are
    Resize(VolumeResize),
    /// Give up a volume on a disk that no volume of this daemon is any more
    Release {
        /// The disk
        name: String,
        /// The volume, as "disk show" lists it
        volume: String,
    },
    /// Delete a disk that no volume is made of. What it is made of stays as it is
    Delete {
        /// The disk
        name: String,
    },
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct CopyArgs {
    /// The volume that is read. A guest may use it: what it writes meanwhile is copied, or not
    #[arg(required = true, value_name = "SOURCE")]
    pub(crate) source: Option<Name>,
    /// The volume that is written, from its beginning on. No device may have it
    #[arg(required = true, value_name = "TARGET")]
    pub(crate) target: Option<Name>,
    /// Bytes per second at most: 100M [default: as fast as it goes]
    #[arg(long, value_name = "SIZE")]
    pub(crate) rate: Option<Size>,
    /// Its name [default: one that is free]
    #[arg(long)]
    pub(crate) name: Option<Name>,
    /// Come back when it has ended
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(subcommand)]
    pub(crate) command: Option<CopyCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CopyCommand {
    /// List all copies, those that have ended too
    List,
    /// Show a copy
    Show {
        /// The copy
        name: String,
    },
    /// Have a copy stand still; its target stays its own
    Pause {
        /// The copy
        name: String,
    },
    /// Have a copy go on that was paused or has failed
    Resume {
        /// The copy
        name: String,
        /// Bytes per second at most from now on; 0: as fast as it goes
        #[arg(long, value_name = "SIZE")]
        rate: Option<Size>,
    },
    /// End a copy, or forget one that has ended. What it has copied stays on the target
    Cancel {
        /// The copy
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DiskCreate {
    /// Its name: A-Z a-z 0-9 . _ -, at most 64
    pub(crate) name: Name,
    /// What it is made of: file:PATH (a file or block device), or any stack, such as "mirror(file:a, file:b)"
    #[arg(value_parser = stack, value_name = "EXPR|FILE")]
    stack: Node,
    /// Its size, beside its table; what exists needs none
    #[arg(long)]
    pub(crate) size: Option<Size>,
    /// What volumes are given room in: a power of two from 16K to 1G
    #[arg(long, default_value = "1M", value_name = "SIZE")]
    extent: Size,
    /// Requests that the disk has at most; the others wait for their volume's turn [default: 256]
    #[arg(long, value_name = "N")]
    depth: Option<u64>,
    /// Size of the logical blocks, the disk's and its volumes': 512 or 4096
    #[arg(long, default_value = "512", value_name = "BYTES")]
    pub(crate) block_size: LogicalBlock,
}

impl DiskCreate {
    /// What the disk's volume is made of.
    pub(crate) fn stack(&self) -> Result<Node, String> {
        let depth = self.depth.map(|depth| format!(", depth={depth}")).unwrap_or_default();
        let text = format!("disk(extent={}{depth}) | {}", self.extent, self.stack);
        text.parse().map_err(|error: millrace_services::ParseError| error.to_string())
    }
}

#[derive(Debug, Args)]
pub(crate) struct VolumeCreate {
    /// Its name: A-Z a-z 0-9 . _ -, at most 64
    pub(crate) name: Name,
    /// Its size: bytes, or a unit of powers of 1024 (512M, 1G). A file that exists needs none: it has its own. Of a longer one guests see
    /// the beginning, and a resize cuts off the rest
    #[arg(long)]
    pub(crate) size: Option<Size>,
    #[command(flatten)]
    made_of: MadeOf,
    /// Size of its logical blocks: 512 or 4096
    #[arg(long, default_value = "512", value_name = "BYTES")]
    pub(crate) block_size: LogicalBlock,
    /// Never write to it (file only)
    #[arg(long)]
    pub(crate) read_only: bool,
    /// What guests know it by, where one moves here that has seen it elsewhere [default: a new one]
    #[arg(long)]
    pub(crate) uuid: Option<Uuid>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct MadeOf {
    /// Where its blocks are: memory, null, file:PATH (a file, made if missing, or a block device) or nvme:ADDRESS[/NSID] (a namespace of a
    /// controller that is bound to vfio-pci)
    #[arg(long, value_parser = backend, value_name = "BACKEND")]
    backend: Option<Backend>,
    /// What it is made of: an expression such as "throttle(iops=1000) | stripe(file:a, file:b)", or a file with one (TOML: stack = …)
    #[arg(long, value_parser = stack, value_name = "EXPR|FILE")]
    stack: Option<Node>,
}

impl VolumeCreate {
    /// What it is made of.
    pub(crate) fn stack(&self) -> Node {
        let MadeOf { backend, stack } = &self.made_of;
        let backend = backend.clone().map(Node::from);
        stack.clone().or(backend).expect("one of the group is there")
    }
}

#[derive(Debug, Args)]
pub(crate) struct VolumeStack {
    /// The volume
    pub(crate) name: String,
    /// Its new stack: an expression, or a file with one (TOML: stack = …)
    #[arg(long, value_parser = stack, value_name = "EXPR|FILE")]
    pub(crate) stack: Node,
    /// The new stack may show other data than the volume has now, which are lost then
    #[arg(long)]
    pub(crate) reformat: bool,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("new_size").required(true)))]
pub(crate) struct VolumeResize {
    /// The volume, or the disk
    pub(crate) name: String,
    /// Its new size
    #[arg(group = "new_size")]
    size: Option<Size>,
    /// Its new size
    #[arg(long = "size", value_name = "SIZE", group = "new_size")]
    size_option: Option<Size>,
    /// The new size may be smaller than that of now: what lies beyond it is lost
    #[arg(long)]
    pub(crate) shrink: bool,
}

impl VolumeResize {
    pub(crate) fn size(&self) -> Size {
        self.size.or(self.size_option).unwrap_or_default()
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    /// Create a device and its socket
    Create(Box<DeviceCreate>),
    /// Show a volume to the device's guest
    Attach {
        /// The device
        name: String,
        /// The volume
        volume: Name,
        /// Its namespace identifier, on an NVMe controller [default: the lowest free one]
        #[arg(long, value_name = "N")]
        nsid: Option<u32>,
        /// The guest cannot write it
        #[arg(long)]
        read_only: bool,
    },
    /// Show a volume no more
    Detach {
        /// The device
        name: String,
        /// The volume, or its namespace identifier; a virtio disk's only volume needs none
        #[arg(value_name = "NSID|VOLUME")]
        namespace: Option<String>,
        /// The namespace identifier, where a volume is named by the same number
        #[arg(long, value_name = "N", conflicts_with = "namespace")]
        nsid: Option<u32>,
    },
    /// List all devices
    List,
    /// Show a device
    Show {
        /// The device
        name: String,
    },
    /// Save a controller's state to a file, while its machine is paused
    Save {
        /// The device
        name: String,
        /// The file to make
        file: PathBuf,
    },
    /// Give a controller a saved state, before its machine connects
    Restore {
        /// The device
        name: String,
        /// The file
        file: PathBuf,
    },
    /// Delete a device; its guest loses it, its volumes stay
    Delete {
        /// The device
        name: String,
    },
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("kind").required(true)))]
pub(crate) struct DeviceCreate {
    /// Its name: A-Z a-z 0-9 . _ -, at most 64
    pub(crate) name: Name,
    /// It is an NVMe controller, over vfio-user
    #[arg(long, group = "kind")]
    nvme: bool,
    /// It is a virtio disk, over vhost-user: it shows one volume. Of the options of a controller, queues, serial and migration apply
    #[arg(long, group = "kind")]
    virtio_blk: bool,
    /// The machine of a virtio disk has no balloon, no free page reporting and no virtio-mem: a physical disk may keep its memory mapped, and
    /// data go there without a copy
    #[arg(long, requires = "virtio_blk")]
    pin_memory: bool,
    #[command(flatten)]
    controller: ControllerArgs,
    /// A volume to attach at once
    #[arg(long, value_name = "VOLUME")]
    pub(crate) volume: Option<Name>,
    /// The guest cannot write that volume
    #[arg(long, requires = "volume")]
    pub(crate) read_only: bool,
    /// Its socket [default: RUN_DIR/NAME.sock]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// The shard it lives on [default: the placement policy decides]
    #[arg(long, value_name = "N")]
    pub(crate) shard: Option<usize>,
    /// Whose it is: under "serve --isolation tenant", a tenant's devices have a worker of their own
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<Name>,
}

impl DeviceCreate {
    /// What it is, with its properties.
    pub(crate) fn kind(&self) -> Result<DeviceKind, String> {
        let nvme = self.controller.spec();
        if self.nvme {
            return Ok(DeviceKind::Nvme(nvme));
        }
        let NvmeSpec { queues, migration, .. } = nvme;
        let disk = VirtioBlkSpec { queues, serial: nvme.serial.clone(), migration, pin_memory: self.pin_memory };
        let usual = NvmeSpec { queues, serial: nvme.serial.clone(), migration, ..NvmeSpec::default() };
        if nvme == usual {
            Ok(DeviceKind::VirtioBlk(disk))
        } else {
            Err("a virtio disk has --queues, --serial, --migration, --pin-memory; the other options are an NVMe controller's"
                .to_owned())
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ControllerArgs {
    /// I/O queue pairs; a virtio disk's queues
    #[arg(long, value_name = "N", default_value_t = NvmeSpec::default().queues)]
    queues: u16,
    /// MSI-X vectors [default: one more than queues]
    #[arg(long, value_name = "N")]
    vectors: Option<u16>,
    /// Entries a queue may have
    #[arg(long, value_name = "N", default_value_t = NvmeSpec::default().queue_entries)]
    queue_entries: u32,
    /// Largest namespace identifier
    #[arg(long, value_name = "N", default_value_t = NvmeSpec::default().namespaces)]
    namespaces: u32,
    /// Largest transfer of one command: a power of two from 8K to 2M
    #[arg(long, value_name = "SIZE", default_value_t = NvmeSpec::default().mdts)]
    mdts: Size,
    /// How the guest rings: in memory it shares with us, or by messages
    #[arg(long, value_enum, default_value_t = DoorbellsArg::Shared)]
    doorbells: DoorbellsArg,
    /// What the guest may create itself by Namespace Management, in all [default: nothing]
    #[arg(long, value_name = "SIZE")]
    ns_quota: Option<Size>,
    /// Where the blocks of namespaces that the guest creates are: memory or file:DIR
    #[arg(long, value_parser = backend, value_name = "BACKEND", default_value = "memory")]
    ns_backend: Backend,
    /// Serial number [default: made from the name]
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,
    /// What its subsystem is named by, where a guest moves here that has seen it elsewhere [default: a new one]
    #[arg(long)]
    uuid: Option<Uuid>,
    /// Let the machine's monitor move the device's state: a controller's by vfio-user's migration, a virtio disk's by vhost-user
    /// (QEMU asks for neither)
    #[arg(long)]
    migration: bool,
    /// What the engine's storage functions do: share=FIRST+BLOCKS,iops=N,bytes=N,replicate
    #[arg(long, value_parser = functions, value_name = "LIST")]
    functions: Option<Functions>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DoorbellsArg {
    /// A shared page, which is polled: ringing costs the guest no exit
    Shared,
    /// Messages on the socket: an idle guest costs no CPU at all
    Messages,
}

impl ControllerArgs {
    pub(crate) fn spec(&self) -> NvmeSpec {
        NvmeSpec {
            queues: self.queues,
            vectors: self.vectors,
            queue_entries: self.queue_entries,
            namespaces: self.namespaces,
            mdts: self.mdts,
            doorbells: match self.doorbells {
                DoorbellsArg::Shared => Doorbells::Shared,
                DoorbellsArg::Messages => Doorbells::Messages,
            },
            ns_quota: self.ns_quota.unwrap_or_default(),
            ns_backend: self.ns_backend.clone(),
            serial: self.serial.clone(),
            uuid: self.uuid,
            migration: self.migration,
            functions: self.functions,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct NvmeCommand {
    /// The socket to make
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The disk: memory, null, file:PATH (a file or block device) or nvme:ADDRESS[/NSID] (a controller bound to vfio-pci)
    #[arg(long, value_parser = backend, value_name = "BACKEND")]
    pub(crate) volume: Backend,
    /// Its size; a file that exists needs none, a missing one is made with it
    #[arg(long)]
    pub(crate) size: Option<Size>,
    /// Size of its logical blocks: 512 or 4096
    #[arg(long, default_value = "512", value_name = "BYTES")]
    pub(crate) block_size: LogicalBlock,
    /// The guest cannot write it
    #[arg(long)]
    pub(crate) read_only: bool,
    #[command(flatten)]
    pub(crate) controller: ControllerArgs,
    /// What the poll thread does without work
    #[arg(long, value_enum, default_value_t = PollingArg::Adaptive)]
    pub(crate) polling: PollingArg,
    #[command(flatten)]
    pub(crate) sandbox: ConfinedArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Bytes of a document with a stack: what has more is a volume's file.
const LONGEST_DOCUMENT: u64 = 1 << 20;

/// A stack: an expression, or a file that holds a document with one. Relative paths start here.
pub(crate) fn stack(text: &str) -> Result<Node, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Document {
        stack: Node,
    }
    let base = std::env::current_dir().map_err(|error| error.to_string())?;
    let path = std::path::Path::new(text);
    let as_leaf = || format!("as a back end it is {}", Node::leaf(format!("file:{text}")));
    let Some(found) = path.metadata().ok().filter(std::fs::Metadata::is_file) else {
        // What has no sign of an expression in it is a path.
        let is_path = text.contains(['/', '.']) && !text.contains(['(', '|', ',', ':', '"']);
        if is_path && !path.exists() {
            return Err(format!("there is no such file; {}", as_leaf()));
        }
        return text.parse().map(|node: Node| node.resolved(&base)).map_err(|error| error.to_string());
    };
    if found.len() > LONGEST_DOCUMENT {
        return Err(format!("{text} is too long for a stack; {}", as_leaf()));
    }
    let document = std::fs::read_to_string(path).map_err(|error| format!("{text}: {error}; {}", as_leaf()))?;
    let base = base.join(path.parent().unwrap_or(&base));
    let node = match toml::from_str::<Document>(&document) {
        Ok(document) => document.stack,
        Err(error) if document.contains("stack") => return Err(format!("{text}: {error}")),
        // An expression by itself.
        Err(_) => document.trim().parse().map_err(|error| format!("{text}: {error}"))?,
    };
    Ok(node.resolved(&base))
}

fn functions(text: &str) -> Result<Functions, String> {
    Functions::try_from(text.to_owned()).map_err(|error| error.to_string())
}

fn backend(text: &str) -> Result<Backend, String> {
    Backend::try_from(text.to_owned()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
