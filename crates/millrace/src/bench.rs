//! `millrace bench`: drives any NVMe controller behind a vfio-user socket, ours or a peer's, from one polling thread; with `--device` a
//! physical one that was given away (vfio-pci), with `--virtio` any virtio disk behind a vhost-user socket.
//!
//! ```text
//!   BenchArgs ─► Target (controller, namespace, queues) ─► worker: poll ─ check ─ choose next ─ submit ─ ring ─► Report
//!                                                             │                      │
//!                                                          Tracker: what every unit of `bs` bytes holds (--verify)
//!   --lean ─► Targets ─► lean: take a batch ─ begin as many ─ ring ─► LeanReport
//! ```
//!
//! What it measures, and what it costs: commands are counted one by one, latencies are sampled (every 16th command unless
//! `--sample` says otherwise) from just before the entry is written to when its completion is seen. Without `--verify` the
//! data are not looked at: writes send one random buffer per slot over and over.
//!
//! `--lean` leaves out all that a measured target should not wait for: entries are made beforehand, completions are taken in
//! batches, and clocks are read once per many batches (with `--latency` or `--rate`: once per batch, and every command counts).
//!
//! With `--verify` every block written carries its address, a generation and a pattern made of both and of the run's seed,
//! and every block read must be what was last written, to the byte. A unit that this run has not written yet is written where
//! it would be read. No two commands are in flight to one unit. When time is up, all that was written is read once more.

mod lane;
mod lean;
mod lean_report;
mod pattern;
mod report;
mod stages;
mod tracker;
mod worker;
mod workload;

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{ArgGroup, Args, ValueEnum};
use millrace_backends::NvmePlace;
use millrace_block::Lba;
use millrace_driver::{
    CommandError, Controller, DmaBuffer, DmaError, DriverError, Namespace, Options, PAGE_SIZE, Pages, QueueError,
    QueueOptions, QueuePair, VfioError, VfioPci, VirtioError,
    spec::{NamespaceId, Status},
};
use thiserror::Error;

use pattern::Miscompare;
use report::Report;
use stages::StageWatch;
use worker::{Outcome, Worker};

use crate::{cli::Global, client::ClientError};

/// Drives an NVMe controller behind a vfio-user socket or a physical one, or a virtio disk, and prints IOPS, bandwidth and latencies.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("driven").required(true)))]
pub(crate) struct BenchArgs {
    /// The controller's vfio-user socket, or a folder with it as `cntrl`; several times with --lean
    #[arg(long = "socket", value_name = "PATH", group = "driven")]
    sockets: Vec<PathBuf>,
    /// A physical NVMe controller that is bound to vfio-pci, and its namespace, instead of a socket: 0000:01:00.0, or 0000:01:00.0/2
    #[arg(long, value_name = "ADDRESS[/NSID]", group = "driven", conflicts_with_all = ["sockets", "nsid", "virtio"])]
    device: Option<NvmePlace>,
    /// Nothing on the physical disk is needed: without this a load that writes, or --verify, is refused
    #[arg(long, conflicts_with = "sockets")]
    overwrite: bool,
    /// What to do
    #[arg(long, value_enum, default_value_t = Rw::Randread)]
    rw: Rw,
    /// Bytes per command: a multiple of the namespace's block size
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = parse_size)]
    bs: u64,
    /// Commands in flight per queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=65535))]
    qd: u32,
    /// Seconds to run
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    time: Duration,
    /// I/O queue pairs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=65534))]
    queues: u16,
    /// Check every block read against what was last written; overwrites the namespace, also with read workloads
    #[arg(long)]
    verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The namespace
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=0xffff_fffe))]
    nsid: u32,
    /// Use only the first SIZE bytes of the namespace
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    range: Option<u64>,
    /// Pin the client to this core
    #[arg(long, value_name = "N")]
    core: Option<usize>,
    /// Share of reads in randrw, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: u8,
    /// Take the latency of every Nth command
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    sample: u32,
    /// Ring by messages even if the target offers doorbells in shared memory
    #[arg(long)]
    doorbell_messages: bool,
    /// Use shadow doorbells (Doorbell Buffer Config)
    #[arg(long)]
    shadow_doorbells: bool,
    /// What the memory that is shared with the target consists of
    #[arg(long, value_enum, default_value_t = PagesArg::Small)]
    pages: PagesArg,
    /// Print where our own daemon (of --run-dir) spent its time meanwhile; it takes one built with the feature `stages`. With --json it is a
    /// part of the object
    #[arg(long)]
    stages: bool,
    #[command(flatten)]
    lean: LeanArgs,
}

/// What only the lean client has.
#[derive(Clone, Debug, Args)]
#[group(multiple = true, conflicts_with_all = ["verify", "rwmixread", "sample"])]
struct LeanArgs {
    /// Spend next to nothing on a command: all are made beforehand, and completions are taken in batches
    #[arg(long)]
    lean: bool,
    /// Completions to wait for before new commands take their places [default: a quarter of --qd]
    #[arg(long, value_name = "N", requires = "lean")]
    batch: Option<usize>,
    /// Each of the --qd commands always at its own address, so that its entry is never written again
    #[arg(long, requires = "lean")]
    still: bool,
    /// Take the latency of every command
    #[arg(long, requires = "lean")]
    latency: bool,
    /// Commands per second to begin, in all, whether earlier ones have completed or not; latencies count from when one was due
    #[arg(long, value_name = "IOPS", requires = "lean", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rate: Option<u64>,
    /// At random instants, independent of each other, with as many a second on average
    #[arg(long, requires = "rate")]
    uneven: bool,
    /// Sleep until an interrupt when nothing has completed, and count the interrupts
    #[arg(long, requires = "lean", conflicts_with = "rate")]
    interrupts: bool,
    /// The queues of virtio disks are packed ones
    #[arg(long, requires = "virtio")]
    packed: bool,
    /// The sockets are virtio disks' (vhost-user-blk), each driven by one queue with indirect descriptors
    #[arg(long, requires = "lean", conflicts_with_all = ["interrupts", "queues", "nsid", "doorbell_messages", "shadow_doorbells"])]
    virtio: bool,
}

/// What memory consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PagesArg {
    /// 4 KiB
    Small,
    /// 2 MiB, of those that the system has set aside
    Huge,
    /// 2 MiB where the system has some to give
    Transparent,
}

impl From<PagesArg> for Pages {
    fn from(pages: PagesArg) -> Self {
        match pages {
            PagesArg::Small => Self::Small,
            PagesArg::Huge => Self::Huge,
            PagesArg::Transparent => Self::Transparent,
        }
    }
}

/// The kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rw {
    /// Random reads
    Randread,
    /// Random writes
    Randwrite,
    /// Sequential reads, each queue in its own part
    Read,
    /// Sequential writes, each queue in its own part
    Write,
    /// Random reads and writes
    Randrw,
}

impl Rw {
    /// As on the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Read => "read",
            Self::Write => "write",
            Self::Randrw => "randrw",
        }
    }
}

impl BenchArgs {
    /// What is driven.
    fn places(&self) -> Vec<Place<'_>> {
        match self.device {
            Some(device) => vec![Place::Physical(device)],
            None => self.sockets.iter().map(|path| Place::Socket(path)).collect(),
        }
    }

    fn nsid(&self) -> u32 {
        self.device.map_or(self.nsid, |device| device.nsid)
    }

    /// A disk may hold anything, and who mistypes its address has lost it: what writes must be asked for twice.
    fn check_overwrite(&self) -> Result<(), BenchError> {
        let writes = self.verify || !matches!(self.rw, Rw::Randread | Rw::Read);
        match self.device {
            Some(device) if writes && !self.overwrite => Err(BenchError::WouldOverwrite(device)),
            _ => Ok(()),
        }
    }
}

/// Why a run failed.
#[derive(Debug, Error)]
pub(crate) enum BenchError {
    /// A physical disk would be written to, and nobody said that it may.
    #[error("this load would overwrite what is on the physical disk {0}; if nothing on it is needed, say --overwrite")]
    WouldOverwrite(NvmePlace),
    /// A physical controller could not be had.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// A physical controller could not be brought up.
    #[error("bringing up the physical NVMe controller {}", place.address)]
    Physical {
        /// Where it is.
        place: NvmePlace,
        /// Why.
        #[source]
        source: DriverError,
    },
    /// The controller could not be brought up.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A queue broke.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A virtio disk could not be reached, or broke.
    #[error(transparent)]
    Virtio(#[from] VirtioError),
    /// No memory to share with the target.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// A command of ours was wrong for the namespace.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The target refused or failed a read or write.
    #[error("{what} of {bytes} bytes at {lba}")]
    Io {
        /// "read" or "write".
        what: &'static str,
        /// First block.
        lba: Lba,
        /// Bytes.
        bytes: u64,
        /// The target's answer.
        #[source]
        status: Status,
    },
    /// A block is not what was last written.
    #[error(transparent)]
    Miscompare(#[from] Box<Miscompare>),
    /// Commands are in flight and none completes.
    #[error("no command has completed for {waited:?}; in flight: {in_flight}")]
    Stalled {
        /// How long.
        waited: Duration,
        /// Commands in flight on all queues.
        in_flight: usize,
    },
    /// `--bs` does not fit the namespace.
    #[error("--bs {bs}: not a multiple of the block size {block_size}, or more than {limit} bytes in one command")]
    BlockSize {
        /// What was asked for.
        bs: u64,
        /// The namespace's block size.
        block_size: u32,
        /// The most one command may move.
        limit: u64,
    },
    /// `--qd` is more than a queue holds.
    #[error("--qd {qd}: the controller's queues hold {limit} commands")]
    QueueDepth {
        /// What was asked for.
        qd: u32,
        /// The controller's limit.
        limit: u32,
    },
    /// `--queues` is more than the controller has.
    #[error(
        "--queues {queues}: the controller gives {limit}; ask for as many at most, or make it with more (device create --queues)"
    )]
    Queues {
        /// What was asked for.
        queues: u16,
        /// What it gives.
        limit: u16,
    },
    /// Fewer units than commands in flight.
    #[error("{units} units of {bs} bytes are too few for {queues} queues of depth {qd}")]
    RangeTooSmall {
        /// Units in the range.
        units: u64,
        /// Bytes of a unit.
        bs: u64,
        /// Queues.
        queues: u16,
        /// Commands in flight per queue.
        qd: u32,
    },
    /// The client could not be pinned.
    #[error("pinning to core {core}")]
    Core {
        /// The core.
        core: usize,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The ordinary client drives one controller.
    #[error("{0} sockets: only --lean drives more than one")]
    ManySockets(usize),
    /// The lean client only reads or only writes.
    #[error("--lean reads or writes; it does not mix the two")]
    Mixed,
    /// The daemon could not be asked where its time went.
    #[error("asking the daemon for its stages")]
    Daemon(#[from] Box<ClientError>),
    /// The daemon does not count.
    #[error("the daemon does not count stages: build it with --features stages")]
    NoStages,
    /// The results could not be written.
    #[error("writing the results")]
    Output(#[source] std::io::Error),
}

/// Runs the benchmark and prints its results, also when it fails midway.
///
/// # Errors
/// Whatever ended the run early, a wrong byte above all. Ctrl-C is not an error.
#[expect(clippy::needless_pass_by_value, reason = "one shape for every subcommand")]
pub(crate) fn run(global: &Global, args: BenchArgs) -> Result<(), BenchError> {
    let watch = if args.stages { Some(StageWatch::begin(global.run_dir())?) } else { None };
    measure(&args, watch.as_ref())
}

fn measure(args: &BenchArgs, watch: Option<&StageWatch>) -> Result<(), BenchError> {
    args.check_overwrite()?;
    if let Some(core) = args.core {
        pin(core)?;
    }
    if args.lean.lean {
        return lean::run(args, watch);
    }
    let places = args.places();
    let [place] = places[..] else { return Err(BenchError::ManySockets(places.len())) };
    let mut target = Target::connect(args, place)?;
    let interrupt = worker::interrupt_flag();
    let Outcome { measured, failure } = Worker::new(args, &mut target, interrupt)?.run(args.time);
    // What was measured is told whatever has become of the daemon.
    let stages = watch.map(StageWatch::end).transpose();
    let report = Report::new(args, &target, &measured);
    report.print(args.json, stages.as_ref().ok().and_then(Option::as_ref)).map_err(BenchError::Output)?;
    if let Some(error) = failure {
        return Err(error);
    }
    stages?;
    target.shutdown();
    Ok(())
}

fn pin(core: usize) -> Result<(), BenchError> {
    let failed = |source| BenchError::Core { core, source };
    if core >= rustix::thread::CpuSet::MAX_CPU {
        return Err(failed(std::io::ErrorKind::InvalidInput.into()));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).map_err(|errno| failed(errno.into()))
}

/// Where a controller is.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// Behind a vfio-user socket, or a folder with it.
    Socket(&'a Path),
    /// In the machine.
    Physical(NvmePlace),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Physical(place) => write!(f, "{place}"),
        }
    }
}

impl Place<'_> {
    fn connect(self, options: &Options) -> Result<Controller, BenchError> {
        match self {
            Self::Socket(socket) => {
                let inside = socket.join("cntrl");
                let socket = if socket.is_dir() { &inside } else { socket };
                Ok(Controller::connect(socket, options)?)
            }
            Self::Physical(place) => {
                let function = VfioPci::open(place.address)?;
                let started =
                    Controller::attach(function, options).and_then(|mut controller| controller.start().map(|()| controller));
                started.map_err(|source| BenchError::Physical { place, source })
            }
        }
    }
}

/// The controller under test and what was made on it.
struct Target {
    controller: Controller,
    namespace: Namespace,
    queues: Vec<(QueuePair, DmaBuffer)>,
    /// Units of `bs` bytes in the range.
    units: u64,
}

impl Target {
    fn connect(args: &BenchArgs, place: Place<'_>) -> Result<Self, BenchError> {
        let stride = args.bs.next_multiple_of(PAGE_SIZE as u64);
        let (queues, qd) = (u64::from(args.queues), u64::from(args.qd));
        let wanted = wanted_entries(args);
        // Data, entries of both queues, and PRP lists: two pages each are ample up to several MiB a command.
        let memory = queues * (qd * stride + u64::from(wanted) * (2 * PAGE_SIZE as u64 + stride / 256))
            + (if args.lean.lean { 1 } else { 16 } << 20);
        let pages = Pages::from(args.pages);
        let options = Options {
            memory_size: usize::try_from(memory.next_multiple_of(pages.granularity() as u64)).unwrap_or(usize::MAX),
            pages,
            io_queues: args.queues,
            max_transfer: usize::try_from(args.bs).unwrap_or(usize::MAX),
            mapped_doorbells: !args.doorbell_messages,
            shadow_doorbells: args.shadow_doorbells,
            ..Options::default()
        };
        let mut controller = place.connect(&options)?;
        let given = controller.io_queues();
        if args.queues > given {
            return Err(BenchError::Queues { queues: args.queues, limit: given });
        }
        let namespace = controller.namespace(NamespaceId(args.nsid()))?;
        let units = units(args, &namespace)?;
        let limit = controller.max_queue_entries() - 1;
        if args.qd > limit {
            return Err(BenchError::QueueDepth { qd: args.qd, limit });
        }
        let entries = wanted.min(limit + 1);
        if args.lean.interrupts {
            controller.enable_vectors(args.queues + 1)?;
        }
        let mut target = Self { controller, namespace, queues: Vec::new(), units };
        for index in 0..args.queues {
            let vector = args.lean.interrupts.then_some(index + 1);
            let options = QueueOptions { entries, vector, ..QueueOptions::default() };
            let queue = target.controller.create_queue_pair(&options)?;
            let buffer = target.controller.memory().alloc((qd * stride) as usize)?;
            target.queues.push((queue, buffer));
        }
        Ok(target)
    }

    /// Best effort: the results are out, and a target that cannot shut down has not failed the run.
    fn shutdown(&mut self) {
        let _ = self.controller.shutdown();
    }

    /// The controller's model number.
    fn model(&self) -> String {
        let model = self.controller.identity().map(|identity| String::from_utf8_lossy(&identity.mn).trim().to_owned());
        model.unwrap_or_default()
    }
}

/// Entries that each queue should have. Twice the commands let a lean client ring the head doorbell rarely.
fn wanted_entries(args: &BenchArgs) -> u32 {
    let least = (args.qd + 1).next_power_of_two();
    if args.lean.lean { least.max(2 * args.qd.next_power_of_two()).clamp(8, 0x1_0000) } else { least }
}

/// Checks `--bs` and `--range` against the namespace; the units there are.
fn units(args: &BenchArgs, namespace: &Namespace) -> Result<u64, BenchError> {
    let (bs, block_size, limit) = (args.bs, namespace.block_size(), namespace.max_transfer());
    if bs == 0 || !bs.is_multiple_of(u64::from(block_size)) || bs > limit {
        return Err(BenchError::BlockSize { bs, block_size, limit });
    }
    let bytes = namespace.size().0.saturating_mul(u64::from(block_size));
    let units = bytes.min(args.range.unwrap_or(u64::MAX)) / bs;
    let needed = u64::from(args.queues) * u64::from(if args.verify { args.qd } else { 1 });
    if units < needed {
        return Err(BenchError::RangeTooSmall { units, bs, queues: args.queues, qd: args.qd });
    }
    Ok(units)
}

/// A number of bytes: digits and perhaps k, m, g or t, for powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        suffix => return Err(format!("unknown unit {suffix:?}: k, m, g or t")),
    };
    let number: u64 = digits.parse().map_err(|error| format!("{digits:?}: {error}"))?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(|| "must be from 1 byte to 2^64".to_owned())
}

/// Seconds, fractions allowed.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    let time = Duration::try_from_secs_f64(seconds).map_err(|error| format!("{error}"))?;
    if time.is_zero() { Err("must be more than 0".to_owned()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parsed(words: &str) -> Result<BenchArgs, clap::Error> {
        #[derive(Parser)]
        struct Bench {
            #[command(flatten)]
            args: BenchArgs,
        }
        Bench::try_parse_from(format!("bench {words}").split_whitespace()).map(|bench| bench.args)
    }

    #[test]
    fn a_physical_disk_is_written_to_only_when_that_is_said() {
        let checked = |words: &str| parsed(words).unwrap_or_else(|error| panic!("{words}: {error}")).check_overwrite();
        for reads in ["", "--rw read", "--lean --rw randread"] {
            assert!(checked(&format!("--device 0000:01:00.0 {reads}")).is_ok(), "{reads}");
        }
        for writes in ["--rw randwrite", "--rw write", "--rw randrw", "--verify", "--lean --rw write"] {
            let device = format!("--device 01:00.0/2 {writes}");
            let told = checked(&device).unwrap_err().to_string();
            assert!(told.contains("0000:01:00.0/2") && told.contains("--overwrite"), "{told}");
            assert!(checked(&format!("{device} --overwrite")).is_ok(), "{writes}");
            assert!(checked(&format!("--socket a.sock {writes}")).is_ok(), "a socket is there to be tried: {writes}");
        }
    }

    #[test]
    fn a_controller_is_behind_sockets_or_in_the_machine() {
        let physical = parsed("--device 0000:01:00.0/2").unwrap();
        assert_eq!((physical.nsid(), physical.places()[0].to_string()), (2, "0000:01:00.0/2".to_owned()));
        let sockets = parsed("--socket a --socket b --nsid 3 --lean").unwrap();
        assert_eq!((sockets.nsid(), sockets.places().len()), (3, 2));
        for wrong in [
            "",
            "--device 0000:01:00.0 --socket a",
            "--device 0000:01:00.0 --nsid 2",
            "--device 0000:01:00.0 --lean --virtio",
            "--device nvme0n1",
            "--device 0000:01:00.0/0",
            "--socket a --overwrite",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_binary_units() {
        for (text, bytes) in [("512", 512), ("4k", 4096), ("1M", 1 << 20), ("2GiB", 2 << 30), ("1t", 1 << 40)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "k", "0", "4x", "-1", "99999999t", "1.5k"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn seconds_are_positive() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "x"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
