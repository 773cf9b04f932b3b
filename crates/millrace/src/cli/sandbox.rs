//! What a process that serves guests gives up (docs/sandbox.md).

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use millrace_control::{SandboxTable, Size};
use millrace_sandbox::{Mode, Policy};

/// What every one of them gives up.
#[derive(Debug, Args)]
pub(crate) struct ConfinedArgs {
    /// How much of the sandbox there must be: what can be had, all of it, or nothing [default: auto]
    #[arg(long = "sandbox", value_enum, value_name = "MODE")]
    mode: Option<SandboxArg>,
    /// Serve as this user, when started by root
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Private memory that may be had, 256M or more: beyond, the process ends; a daemon's worker is started again [default: the
    /// machine's]
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Size>,
    /// Files that may be open [default: the system's limit]
    #[arg(long, value_name = "COUNT")]
    file_limit: Option<u64>,
}

impl ConfinedArgs {
    /// The policy of who serves what it is told now, and nothing else later.
    pub(crate) fn policy(&self) -> Policy {
        Policy { mode: self.mode.map_or_else(Mode::default, Mode::from), only_named: true, ..self.settings() }
    }

    fn settings(&self) -> Policy {
        let memory = self.memory_limit.map(|size| size.0);
        Policy { user: self.user.clone(), memory, files: self.file_limit, ..Policy::default() }
    }
}

/// What the daemon gives up.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    #[command(flatten)]
    confined: ConfinedArgs,
    /// A file or directory that volumes and keys may be in, beside what is configured; may be repeated. None: any
    #[arg(long, value_name = "PATH")]
    allow: Vec<PathBuf>,
    /// A program that may be run for its key (key=command:…); may be repeated
    #[arg(long, value_name = "PATH")]
    key_command: Vec<PathBuf>,
}

impl SandboxArgs {
    /// The policy, with the configuration file's settings below what is set here.
    pub(crate) fn policy(&self, file: SandboxTable) -> std::io::Result<Policy> {
        let absolute = |paths: &[PathBuf]| paths.iter().map(std::path::absolute).collect::<Result<_, _>>();
        let (allow, key_commands) = (absolute(&self.allow)?, absolute(&self.key_command)?);
        let line = Policy { allow, key_commands, ..self.confined.settings() };
        Ok(file.under(line, self.confined.mode.map(Mode::from)))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SandboxArg {
    /// What can be had; a daemon without --allow leaves files open
    Auto,
    /// All of it, or there is no start
    On,
    /// Nothing
    Off,
}

impl From<SandboxArg> for Mode {
    fn from(arg: SandboxArg) -> Self {
        match arg {
            SandboxArg::Auto => Self::Auto,
            SandboxArg::On => Self::On,
            SandboxArg::Off => Self::Off,
        }
    }
}
