//! The benchmark suite: ours beside the peers, in one run.
//!
//! ```text
//!   section ──► daemons (ours, SPDK …) on the target's core, each standing still but for its own samples
//!      │
//!      └─► round: for every case   ping-pong ─ client on its core for part of a second ─ ping-pong
//!                    │                  └── NEAR or FAR, the same before and after? ──┘
//!                    ▼
//!               record: target/bench/SECTION.json ──► table, plot
//! ```
//!
//! What it promises:
//! * ours and the peers are measured in turns by the same client, within one run;
//! * a sample during which the cores moved is dropped, and samples are compared only within one state ([`gate`]);
//! * medians and their spread are of all samples of the same binaries, also over several runs of the suite;
//! * no result is kept in the source, and nothing fails because something was slow.
//!
//! It starts programs and reads what they say; the load itself comes from `millrace bench --lean`.

#![forbid(unsafe_code)]
#![expect(clippy::cast_precision_loss, reason = "three digits are shown")]

mod client;
mod copies;
mod docs;
mod error;
mod gate;
mod goals;
mod least;
mod machine;
mod plot;
mod process;
mod record;
mod sections;
mod stats;
mod subject;
mod suite;
mod table;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;

use crate::{client::Fio, error::Failure, record::Record, sections::Section, subject::Tree, suite::Suite};

/// Measures Millrace beside its peers.
#[derive(Debug, Parser)]
#[command(name = "millrace-benches", version, max_term_width = 100)]
struct Cli {
    /// Sections to measure, separated by commas [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Vec<String>,
    /// Few samples, in a few minutes for all
    #[arg(long)]
    quick: bool,
    /// Seconds of a sample [default: 0.5; 0.2 when quick]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Seconds that a section may take; it can be continued by another run [default: 600; 12 when quick]
    #[arg(long, value_name = "SECONDS")]
    budget: Option<u64>,
    /// Forget earlier samples of the same binaries
    #[arg(long)]
    fresh: bool,
    /// Only ours
    #[arg(long)]
    ours: bool,
    /// The binary [default: target/release/millrace]
    #[arg(long, value_name = "PATH")]
    millrace: Option<PathBuf>,
    /// A built tree of SPDK
    #[arg(long, env = "SPDK_DIR", value_name = "DIR")]
    spdk: Option<PathBuf>,
    /// Where results are kept [default: target/bench]
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// Where the daemons' files are, on a disk whose file system knows direct I/O
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    work: PathBuf,
    /// The core of what is measured
    #[arg(long, value_name = "N", default_value_t = 1)]
    target_core: usize,
    /// The core of the client
    #[arg(long, value_name = "N", default_value_t = 0)]
    client_core: usize,
    /// Do not tell samples by the distance of the cores
    #[arg(long)]
    ungated: bool,
    /// Only print the tables of what has been measured
    #[arg(long)]
    print: bool,
    /// Only put what has been measured into performance.md and performance.svg of a folder
    #[arg(long, value_name = "DIR")]
    docs: Option<PathBuf>,
    /// Only print how far apart the cores are
    #[arg(long)]
    ping: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let mut text = failure.to_string();
            let mut cause = std::error::Error::source(&failure);
            while let Some(error) = cause {
                text = format!("{text}: {error}");
                cause = error.source();
            }
            eprintln!("bench: {text}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    if cli.ping {
        let round_trip = gate::ping_pong(cli.client_core, cli.target_core);
        println!("{} {round_trip:.0} ns", gate::State::of(round_trip));
        return Ok(());
    }
    let sections = chosen(&cli.only)?;
    let work = tempfile::Builder::new().prefix("millrace-bench.").tempdir_in(&cli.work);
    let work = work.map_err(|source| Failure::Write { path: cli.work.clone(), source })?;
    let suite = suite(cli, work.path());
    let records = || sections.iter().map(|section| suite.record(section.name)).collect::<Vec<_>>();
    if let Some(folder) = &cli.docs {
        return docs::write(folder, &sections, &records());
    }
    if cli.print {
        print(&sections, &records());
        return Ok(());
    }
    // SPDK's target and client both want huge pages; they are given back at the end.
    let pages = suite.spdk.as_ref().and_then(|_| machine::HugePages::reserve(2048, &suite.folder("huge")));
    let suite = match (&suite.spdk, &pages) {
        (Some(_), None) => {
            eprintln!("bench: no huge pages for SPDK (they take root): going on without it");
            Suite { spdk: None, ..suite }
        }
        (None, _) if !cli.ours => {
            eprintln!("bench: no SPDK: SPDK_DIR does not name a built tree; going on without it");
            suite
        }
        _ => suite,
    };
    let mut records = Vec::new();
    for section in &sections {
        eprintln!("bench: {}: {}", section.name, section.title);
        let mut record = suite.record(section.name);
        (section.run)(&suite, &mut record)?;
        record.save(&machine::now())?;
        records.push(record);
    }
    print(&sections, &records);
    Ok(())
}

fn print(sections: &[&Section], records: &[Record]) {
    for (section, record) in sections.iter().zip(records) {
        print!("{}", table::text(record, section.title));
    }
    print!("{}", goals::text(records));
}

fn chosen(only: &[String]) -> Result<Vec<&'static Section>, Failure> {
    if only.is_empty() {
        return Ok(sections::ALL.iter().collect());
    }
    let find = |name: &String| {
        let all = || sections::ALL.iter().map(|section| section.name).collect::<Vec<_>>().join(", ");
        sections::ALL.iter().find(|section| section.name == name).ok_or_else(|| Failure::Section(name.clone(), all()))
    };
    only.iter().map(find).collect()
}

fn suite(cli: &Cli, work: &Path) -> Suite {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned();
    let target = std::env::var_os("MILLRACE_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
    let in_root = repository.join("scripts/in-root");
    let has_root = target.join("guest-root/usr/bin/fio").is_file();
    Suite {
        binary: cli.millrace.clone().unwrap_or_else(|| target.join("release/millrace")),
        spdk: cli.spdk.as_deref().filter(|_| !cli.ours).and_then(Tree::find),
        fio: has_root.then(|| Fio(in_root.clone())),
        in_root: has_root.then_some(in_root),
        work: work.to_owned(),
        target: cli.target_core,
        client: cli.client_core,
        seconds: cli.seconds.unwrap_or(if cli.quick { 0.2 } else { 0.5 }),
        budget: Duration::from_secs(cli.budget.unwrap_or(if cli.quick { 12 } else { 600 })),
        quick: cli.quick,
        records: cli.records.clone().unwrap_or_else(|| target.join("bench")),
        fresh: cli.fresh,
        gated: !cli.ungated && std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1),
    }
}
