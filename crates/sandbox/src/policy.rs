//! What the operator wants given up, and the order in which it is.

use std::{
    fmt, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    broker::Broker,
    commands::Helper,
    filter::{self, Programs},
    paths::{self, Grant},
    rights::{self, Group, User},
    threads::restrict_all,
    trap,
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
    /// Who may connect to guests' sockets, beside the process's user: the process is in that group, to be able to give them to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_group: Option<Group>,
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
    /// A part of it has failed that the system has. The keeper starts another worker.
    #[error("the sandbox cannot {part}: {source}")]
    Broken {
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
    /// So little that nothing would start.
    #[error("--memory-limit (memory of [sandbox] in the file): {bytes} bytes are too little; {}M is the least", least >> 20)]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes needed.
        least: u64,
    },
    /// Whoever serves may not give sockets to the group.
    #[error(
        "--socket-group {group}: user {user} is not in group {group}, and so can give it no socket: usermod -aG {group} {user} \
         (or SupplementaryGroups={group} in the service's unit), and start it anew"
    )]
    NotInGroup {
        /// The group.
        group: String,
        /// Who serves.
        user: String,
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

    /// Whether it can be, as far as its settings tell.
    ///
    /// # Errors
    /// A limit with which nothing starts; a group that this process is not in, and cannot join.
    pub fn check(&self) -> Result<(), SandboxError> {
        let least = rights::LEAST_MEMORY;
        if let Some(bytes) = self.memory.filter(|bytes| *bytes < least) {
            return Err(SandboxError::Memory { bytes, least });
        }
        match &self.socket_group {
            Some(group) if !rights::is_root() && !group.is_ours() => {
                Err(SandboxError::NotInGroup { group: group.name().to_owned(), user: User::own_name() })
            }
            _ => Ok(()),
        }
    }

    /// Gives up what a process with one thread can. `dirs` are made for the user if need be, `broker` makes calls for the process once it
    /// is closed, `helper` runs key commands, if there are any to be run.
    ///
    /// # Errors
    /// What cannot be had, if all must be; and a broker that does not start.
    pub fn enter(self, dirs: &[&Path], broker: Command, helper: Option<Command>) -> Result<Sandbox, SandboxError> {
        let mut sandbox = Sandbox { policy: self, missing: Vec::new(), done: Vec::new(), broker: None, helper: None };
        if sandbox.policy.mode == Mode::Off {
            return Ok(sandbox);
        }
        rights::look_around();
        sandbox.limit()?;
        sandbox.become_less(dirs)?;
        sandbox.need("keep its memory to itself", "no dumps", rights::keep_to_itself())?;
        if filter::is_possible() {
            trap::watch().map_err(broken("watch its system calls"))?;
            sandbox.broker = Some(Broker::start(broker).map_err(broken("start its broker"))?);
        }
        match helper.map(Helper::start).transpose() {
            Ok(helper) => sandbox.helper = helper,
            Err(error) => sandbox.need("start the helper for key commands", "", Err(error))?,
        }
        Ok(sandbox)
    }
}

/// A part that can be had, and has failed: half of it would be worse than none.
fn broken(part: &'static str) -> impl Fn(io::Error) -> SandboxError {
    move |source| SandboxError::Broken { part, source }
}

/// A process on its way into the sandbox.
#[derive(Debug)]
pub struct Sandbox {
    policy: Policy,
    missing: Vec<String>,
    done: Vec<&'static str>,
    broker: Option<Broker>,
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
        let group = self.policy.socket_group.as_ref();
        match self.policy.user.clone() {
            Some(user) => {
                let failed = |source| SandboxError::User { user: user.clone(), source };
                let mut found = User::find(&user).map_err(failed)?;
                if let Some(group) = group {
                    found.join(group);
                }
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
            // Without capabilities root, too, gives files to its own groups only.
            None if rights::is_root() => {
                group.map_or(Ok(()), Group::join).map_err(broken("have root join the group of its sockets"))?;
            }
            None => {}
        }
        self.need("give up its capabilities", "no capabilities", rights::drop_all())
    }

    /// Waits until nothing is done any more of what the process before this one has asked its own broker for. They know each other by a
    /// lock file.
    ///
    /// # Errors
    /// The lock cannot be had.
    pub fn wait_for_turn(&self, lock: &Path) -> Result<(), SandboxError> {
        let waited = self.broker.as_ref().map_or(Ok(()), |broker| broker.wait_for_turn(lock));
        waited.map_err(broken("wait for the last one's broker"))
    }

    /// Closes what is still open, on every thread there is. The broker reaches `grants` and the allowed paths, and the process itself
    /// none; calls that are on no list are the broker's. Shards have said by now what they are.
    ///
    /// # Errors
    /// What cannot be had, if all must be; and what has failed half-way.
    pub fn close(&mut self, mut grants: Vec<Grant>) -> Result<(), SandboxError> {
        if self.policy.mode == Mode::Off {
            return Ok(());
        }
        grants.extend(self.policy.allow.iter().cloned().map(Grant::Use));
        let grants = self.policy.is_strict().then_some(&grants[..]);
        // What the system says of itself can't be asked any more afterwards.
        let (landlock, less) = (paths::look(), paths::less(grants));
        let broker = self.broker.take();
        let calls = broker.is_some();
        let programs = match broker {
            Some(broker) => {
                let group = self.policy.socket_group.as_ref().map(Group::gid);
                broker.open(grants, group).map_err(broken("confine its broker"))?;
                Some(Programs::new().map_err(io::Error::other).map_err(broken("make its lists of calls"))?)
            }
            None => None,
        };
        // Where a broker reaches paths, nobody else does.
        let reached = if calls { Some(&[][..]) } else { grants };
        let ruleset = if landlock.is_ok() { paths::rules(reached).map_err(broken("make its rules"))? } else { None };
        restrict_all(ruleset.as_ref().map(AsFd::as_fd), programs).map_err(broken("restrict a thread"))?;
        let done = if grants.is_some() { "only allowed paths" } else { "no programs, all paths" };
        let less = less.map_or(Ok(()), |less| Err(io::Error::other(less)));
        self.need("restrict paths", done, landlock.and(less))?;
        let calls = if calls { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) };
        self.need("restrict system calls", "system calls listed", calls)
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
