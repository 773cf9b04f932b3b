//! Millrace: virtual NVMe disks for virtual machines.
//!
//! ```text
//!   millrace serve ─────────► the daemon                       ◄── HTTP on RUN_DIR/api.sock ── volume, disk, copy, group, device,
//!                                                                                               app, usage, trace, status, …
//!   millrace nvme ──────────► one disk in the foreground
//!   millrace bench ─────────► a client of any vfio-user NVMe device, or of a physical one
//!   millrace analyze ───────► what a trace's file means
//!   millrace layouts, completions, man
//! ```
//!
//! Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage: the parser of arguments
//! ends with it, and we do where it cannot know (`Misuse`).
//!
//! It decides nothing about volumes and devices: that is the daemon's.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod client;
mod commands;
mod engine;
mod logging;
mod notify;
mod output;
mod serve;

use std::{error::Error, io, process::ExitCode};

use clap::{CommandFactory, Parser};
use millrace_control::{ConfigError, DaemonError, explain};
use millrace_sandbox::SandboxError;

use crate::{
    bench::BenchError,
    cli::{Cli, Command},
    logging::LogError,
};

/// What was asked for cannot be right, whatever there is: the exit code says so.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Misuse(String);

/// The program: what its arguments ask for is done, and what failed is on standard error.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("millrace: {}{}", explain(&*error), advice(&*error));
            if is_misuse(&*error) { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let Cli { global, command } = cli;
    match command {
        Command::Serve(options) => serve::serve(&global, &options),
        Command::Worker(options) => serve::worker(&global, &options),
        Command::Broker => serve::broker(),
        Command::KeyHelper { allowed, any } => serve::key_helper(&allowed, any),
        Command::Nvme(options) => serve::nvme(&global, *options),
        Command::Volume { command } => commands::volume(&global, command),
        Command::Disk { command } => commands::disk(&global, command),
        Command::Copy(args) => commands::copy(&global, args),
        Command::Group { command } => commands::group(&global, command),
        Command::Device { command } => commands::device(&global, command),
        Command::App { command } => commands::app(&global, command),
        Command::Usage(args) => commands::usage(&global, &args),
        Command::Trace(args) => commands::trace(&global, &args),
        Command::Analyze(args) => commands::analyze(&global, &args),
        Command::Status => commands::status(&global),
        Command::Upgrade(args) => commands::upgrade(&global, &args),
        Command::Layouts => commands::layouts(&global),
        Command::Metrics => commands::metrics(&global),
        Command::Bench(options) => Ok(bench::run(&global, options)?),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "millrace", &mut script);
            output::bytes(&script)
        }
        Command::Man { directory } => {
            let named =
                |error: io::Error| format!("{}: {error}; give a directory, which is made if need be", directory.display());
            std::fs::create_dir_all(&directory).map_err(named)?;
            Ok(clap_mangen::generate_to(Cli::command(), &directory).map_err(named)?)
        }
    }
}

/// What to do about a failure of the daemon's own, where we know something.
fn advice(error: &(dyn Error + 'static)) -> String {
    let advice = match error.downcast_ref() {
        Some(DaemonError::Control(error)) => error.advice(),
        _ => None,
    };
    advice.map(|advice| format!("; {advice}")).unwrap_or_default()
}

/// Whether the command line or the configuration file is wrong by itself: the same again fails again. What the system lacks, a file or a
/// user, may be there by then.
fn is_misuse(error: &(dyn Error + 'static)) -> bool {
    let of_daemon = matches!(
        error.downcast_ref(),
        Some(DaemonError::Shards(_) | DaemonError::Config(ConfigError::Parse { .. } | ConfigError::Twice { .. }))
    );
    let of_bench = matches!(error.downcast_ref(), Some(BenchError::ManySockets(_) | BenchError::Mixed));
    let of_log = matches!(error.downcast_ref(), Some(LogError::Filter { .. } | LogError::Word { .. }));
    let of_sandbox = matches!(error.downcast_ref(), Some(SandboxError::Memory { .. }));
    error.is::<Misuse>() || of_daemon || of_bench || of_log || of_sandbox
}

/// The reader of our output went away: nobody is left to complain to.
fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
