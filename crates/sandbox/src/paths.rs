//! Which paths the process reaches: Landlock.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};

use rustix::fs::FileType;

/// The newest rights that are asked for; the system gives what it knows of them.
const NEWEST: ABI = ABI::V6;
/// What makes the promise whole: before Linux 6.2 a file could be cut without the right to it.
const LEAST: i32 = 3;

/// A path, and what is done there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// A file is read, written and cut, or anything is made, changed and removed in a directory. No program is run.
    Use(PathBuf),
    /// It is read.
    Read(PathBuf),
    /// Sockets are made and removed in a directory.
    Sockets(PathBuf),
}

impl Grant {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Use(path) | Self::Read(path) | Self::Sockets(path) => path,
        }
    }

    fn rights(&self, is_dir: bool) -> BitFlags<AccessFs> {
        let rights = match self {
            Self::Use(_) => {
                AccessFs::from_all(NEWEST)
                    & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::MakeSym)
            }
            Self::Read(_) => AccessFs::ReadFile | AccessFs::ReadDir,
            Self::Sockets(_) => AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir,
        };
        if is_dir { rights } else { rights & AccessFs::from_file(NEWEST) }
    }
}

/// What the system knows of Landlock: 0 for nothing.
fn version() -> i32 {
    const VERSION: u32 = 1;
    // SAFETY: without a ruleset and with this flag the call only tells a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, VERSION) };
    i32::try_from(version).unwrap_or(0).max(0)
}

/// Whether the system knows it.
///
/// # Errors
/// It does not, in words.
pub(crate) fn look() -> io::Result<()> {
    if version() > 0 {
        return Ok(());
    }
    Err(io::Error::other("the system has no Landlock (Linux 5.13, and \"landlock\" among its security modules)"))
}

/// The rules of the grants, for [`restrict_all`](crate::threads::restrict_all). `None`: files stay open as they are, only running programs and
/// what is not a file is refused.
pub(crate) fn rules(grants: Option<&[Grant]>) -> io::Result<Option<OwnedFd>> {
    ruleset(grants).map_err(io::Error::other)
}

/// What the system cannot do of what was granted and no more, in words.
pub(crate) fn less(grants: Option<&[Grant]>) -> Option<String> {
    let version = version();
    let less = grants.is_some() && (1..LEAST).contains(&version);
    less.then(|| format!("Landlock of version {version} does not keep files from being cut (version {LEAST}, Linux 6.2)"))
}

/// Puts the only thread of a process under the grants, if the system can.
pub(crate) fn restrict_this_thread(grants: Option<&[Grant]>) -> io::Result<()> {
    if look().is_ok()
        && let Some(rules) = rules(grants)?
    {
        // SAFETY: numbers only; the descriptor is open.
        if unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn ruleset(grants: Option<&[Grant]>) -> Result<Option<OwnedFd>, RulesetError> {
    let handled = if grants.is_some() { AccessFs::from_all(NEWEST) } else { AccessFs::Execute.into() };
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(handled)?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::AbstractUnixSocket)?
        .create()?;
    for grant in grants.unwrap_or_default() {
        // What is not there cannot be reached either; what takes its place later is not what was meant.
        let Ok(path) = PathFd::new(grant.path()) else { continue };
        let is_dir = rustix::fs::fstat(&path).is_ok_and(|found| FileType::from_raw_mode(found.st_mode).is_dir());
        ruleset = ruleset.add_rule(PathBeneath::new(path, grant.rights(is_dir)))?;
    }
    Ok(ruleset.into())
}
