//! What the operator wants given up, and the order in which it is.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    commands::Helper,
    filter::{self, ShardFilter},
    paths::{self, Grant},
    refused, rights,
    rights::User,
};

/// What a keeper that is root goes on with: it starts workers, which become another user, and ends them.
const KEEPERS: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SYS_RESOURCE);

/// How much of it there must be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// What can be had. Without allowed paths, files stay open.
    #[default]
    Auto,
    /// All of it, or the daemon does not start.
    On,
    /// Nothing.
    Off,
}

/// The operator's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// How much of it there must be.
    pub mode: Mode,
    /// Files and directories that may be used, beside those of what is configured.
    pub allow: Vec<PathBuf>,
    /// Programs that may be run for their keys.
    pub key_commands: Vec<PathBuf>,
    /// Who to be, when started by root: a name or a number.
    pub user: Option<String>,
    /// Bytes of private memory.
    pub memory: Option<u64>,
    /// Open files.
    pub files: Option<u64>,
    /// Nothing but named paths, where none is named as well: for who will not be told of others later.
    #[serde(skip)]
    pub only_named: bool,
}

/// Why there is no sandbox, or not all of it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// A part of it cannot be had.
    #[error("the sandbox cannot {part}: {source}; \"--sandbox auto\" goes on without that")]
    Part {
        /// What was tried, as a verb.
        part: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Root without capabilities still owns root's files.
    #[error("\"--sandbox on\" does not serve as root: start it as another user, or name one with --user")]
    Root,
    /// The user cannot be taken on.
    #[error("--user {user}: {source}; only root can become another user")]
    User {
        /// Who.
        user: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A directory for the user cannot be made.
    #[error("{}: cannot be made for --user: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl Policy {
    /// Whether only named paths and programs can be used.
    pub fn is_strict(&self) -> bool {
        self.mode == Mode::On || self.mode == Mode::Auto && (self.only_named || !self.allow.is_empty())
    }

    /// Programs that may be run for their keys; `None`: any.
    pub fn programs(&self) -> Option<&[PathBuf]> {
        (self.is_strict() || !self.key_commands.is_empty()).then_some(&self.key_commands)
    }

    /// Gives up what a process with one thread can. `dirs` are made for the user if need be, `helper` runs key commands, if
    /// there are any to be run.
    ///
    /// # Errors
    /// What cannot be had, if all must be.
    pub fn enter(self, dirs: &[&Path], helper: Option<Command>) -> Result<Sandbox, SandboxError> {
        let mut sandbox = Sandbox { policy: self, missing: Vec::new(), done: Vec::new(), helper: None };
        if sandbox.policy.mode == Mode::Off {
            return Ok(sandbox);
        }
        rights::look_around();
        sandbox.limit()?;
        sandbox.become_less(dirs)?;
        sandbox.need("keep its memory to itself", "no dumps", rights::keep_to_itself())?;
        sandbox.need("watch what is refused", "refused calls are told", refused::watch())?;
        match helper.map(Helper::start).transpose() {
            Ok(helper) => sandbox.helper = helper,
            Err(error) => sandbox.need("start the helper for key commands", "", Err(error))?,
        }
        Ok(sandbox)
    }
}

/// A process on its way into the sandbox.
#[derive(Debug)]
pub struct Sandbox {
    policy: Policy,
    missing: Vec<String>,
    done: Vec<&'static str>,
    helper: Option<Helper>,
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.policy.mode == Mode::Off { f.write_str("off") } else { f.write_str(&self.done.join(", ")) }
    }
}

impl Sandbox {
    /// What the operator wanted.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// What the system could not do, in words.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Who runs key commands from now on; `None`: the process itself.
    pub fn take_helper(&mut self) -> Option<Helper> {
        self.helper.take()
    }

    fn need(&mut self, part: &'static str, done: &'static str, result: io::Result<()>) -> Result<(), SandboxError> {
        match result {
            Ok(()) => self.done.push(done),
            Err(source) if self.policy.mode == Mode::On => return Err(SandboxError::Part { part, source }),
            Err(source) => self.missing.push(format!("the sandbox cannot {part}: {source}")),
        }
        Ok(())
    }

    fn limit(&mut self) -> Result<(), SandboxError> {
        let (files, memory) = (self.policy.files, self.policy.memory);
        self.need("limit its open files", "open files limited", rights::limit_files(files))?;
        self.need("limit its memory", "memory limited", rights::limit_memory(memory))?;
        self.need("have memory for keys locked", "keys locked", rights::raise_locked())
    }

    fn become_less(&mut self, dirs: &[&Path]) -> Result<(), SandboxError> {
        self.need("give up capabilities for good", "no capabilities to gain", rights::drop_bounds())?;
        match self.policy.user.clone() {
            Some(user) => {
                let failed = |source| SandboxError::User { user: user.clone(), source };
                let found = User::find(&user).map_err(failed)?;
                if rights::is_root() {
                    for dir in dirs {
                        let failed = |source| SandboxError::Directory { path: dir.to_path_buf(), source };
                        found.make_dir(dir).map_err(failed)?;
                    }
                    found.become_it().map_err(failed)?;
                } else if !found.is_present() {
                    return Err(failed(io::ErrorKind::PermissionDenied.into()));
                }
            }
            None if rights::is_root() && self.policy.mode == Mode::On => return Err(SandboxError::Root),
            None => {}
        }
        self.need("give up its capabilities", "no capabilities", rights::drop_all())
    }

    /// Closes what is still open, on every thread there is: paths but `grants` and the allowed ones, and calls that control does not
    /// make. What is returned is for the shards.
    ///
    /// # Errors
    /// What cannot be had, if all must be.
    pub fn close(&mut self, mut grants: Vec<Grant>) -> Result<Option<ShardFilter>, SandboxError> {
        if self.policy.mode == Mode::Off {
            return Ok(None);
        }
        grants.extend(self.policy.allow.iter().cloned().map(Grant::Use));
        let strict = self.policy.is_strict();
        let (done, result) = match paths::close(strict.then_some(&grants)) {
            Ok(None) if strict => ("only allowed paths", Ok(())),
            Ok(None) => ("no programs, all paths", Ok(())),
            Ok(Some(less)) => ("", Err(io::Error::other(less))),
            Err(error) => ("", Err(error)),
        };
        self.need("restrict paths", done, result)?;
        let closed = filter::close().and_then(|()| ShardFilter::new());
        let (filter, result) = match closed {
            Ok(filter) => (Some(filter), Ok(())),
            Err(error) => (None, Err(io::Error::other(error))),
        };
        self.need("restrict system calls", "system calls listed", result)?;
        Ok(filter)
    }

    /// Notes how it went with one of the shards.
    ///
    /// # Errors
    /// As [`Self::close`].
    pub fn shard_closed(&mut self, result: Result<(), String>) -> Result<(), SandboxError> {
        self.need("restrict a shard's system calls", "a shard's listed", result.map_err(io::Error::other))
    }
}

/// What the process that starts workers gives up itself: it keeps its user, for a worker may become another one, and runs programs.
///
/// # Errors
/// What the system refused.
pub fn harden_keeper(mode: Mode) -> Result<(), SandboxError> {
    let harden = || -> io::Result<()> {
        rights::keep_to_itself()?;
        rights::hand_nothing_down()?;
        let had = capabilities(None)?;
        if had.effective.contains(CapabilitySet::SETPCAP) {
            let kept = had.permitted.intersection(KEEPERS);
            set_capabilities(
                None,
                CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
            )?;
        }
        Ok(set_no_new_privs(true)?)
    };
    match mode {
        Mode::Off => Ok(()),
        Mode::On => harden().map_err(|source| SandboxError::Part { part: "harden the keeper", source }),
        // It is the workers that guests reach.
        Mode::Auto => harden().or(Ok(())),
    }
}
