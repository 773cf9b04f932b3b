//! Where state and sockets are, and who has them.

use std::{
    env, fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use millrace_keeper::{Key, Kind, Link};
use millrace_sandbox::Group;
use rustix::{
    fs::{FlockOperation, Gid, Mode, OFlags},
    io::Errno,
};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// The API's socket in the run directory.
pub const API_SOCKET: &str = "api.sock";

/// How long the lock is waited for.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
/// Held by the daemon that uses the run directory.
const LOCK: &str = "api.lock";

/// Why a directory cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DirError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Somebody else could replace what is in it.
    #[error("{} belongs to another user, or others may write to it; choose another --run-dir", path.display())]
    NotOurs {
        /// The directory.
        path: PathBuf,
    },
    /// Another daemon uses it.
    #[error("{}: another daemon uses this run directory; stop it, or choose another --run-dir", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// Something that is not a socket is where the API's should be.
    #[error("{}: exists and is not a socket; remove it, or choose another --run-dir", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

/// Where the daemon keeps its state unless told otherwise.
pub fn default_state_dir() -> PathBuf {
    if is_root() {
        return PathBuf::from("/var/lib/millrace");
    }
    let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    xdg("XDG_STATE_HOME").or_else(home).unwrap_or_else(temporary).join("millrace")
}

/// Where sockets are unless told otherwise.
pub fn default_run_dir() -> PathBuf {
    if is_root() {
        return PathBuf::from("/run/millrace");
    }
    xdg("XDG_RUNTIME_DIR").map_or_else(|| temporary_run_dir(user()), |dir| dir.join("millrace"))
}

/// Whether who answers in a run directory is to be believed: not where another user may have made it first. For those who connect, before
/// they do.
///
/// # Errors
/// [`DirError::NotOurs`]. [`DirError::Io`] where it cannot be seen: nobody is to be asked there, for whoever can rename it may have it back
/// in the next moment.
pub fn trust_run_dir(path: &Path) -> Result<(), DirError> {
    trust(path, user())
}

fn trust(path: &Path, user: u32) -> Result<(), DirError> {
    if path != temporary_run_dir(user) {
        return Ok(());
    }
    let found = fs::symlink_metadata(path).map_err(failed(path, "examine it"))?;
    if is_anothers(&found, user) { Err(DirError::NotOurs { path: path.to_owned() }) } else { Ok(()) }
}

/// Whether a folder is another user's, or others may put there what they like.
fn is_anothers(found: &fs::Metadata, user: u32) -> bool {
    !found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0
}

fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn xdg(variable: &str) -> Option<PathBuf> {
    // The specification: relative paths are invalid and to be ignored.
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

fn temporary() -> PathBuf {
    env::temp_dir()
}

fn temporary_run_dir(user: u32) -> PathBuf {
    temporary().join(format!("millrace-{user}"))
}

/// A run directory that this process alone uses.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// The lock goes with it.
    lock: OwnedFd,
}

impl RunDir {
    /// Makes the directory if need be, and takes it.
    ///
    /// Under a keeper, the lock is the keeper's: it is held from one worker to the next.
    pub(crate) fn take(path: &Path, keeper: Option<&Link>) -> Result<Self, DirError> {
        let key = Key::of_daemon(Kind::RUN_LOCK);
        if let Some(held) = keeper.and_then(|keeper| keeper.take(key)) {
            return Ok(Self { path: path.to_owned(), lock: held.fd });
        }
        let dir = Self::lock(path)?;
        if let Some(Err(error)) = keeper.map(|keeper| keeper.put(key, dir.lock.as_fd())) {
            tracing::warn!(%error, "the run directory's lock is not kept");
        }
        Ok(dir)
    }

    fn lock(path: &Path) -> Result<Self, DirError> {
        make_private(path)?;
        let ours = rustix::process::geteuid().as_raw();
        if path == temporary_run_dir(ours) {
            // Anyone could have made it before us.
            let found = fs::symlink_metadata(path).map_err(failed(path, "examine it"))?;
            if is_anothers(&found, ours) {
                return Err(DirError::NotOurs { path: path.to_owned() });
            }
        }
        let lock_path = path.join(LOCK);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let lock = rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| failed(&lock_path, "open it")(errno.into()))?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { path: path.to_owned(), lock }),
                // A worker whose keeper was killed goes a moment later.
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                Err(Errno::WOULDBLOCK) => return Err(DirError::InUse { path: path.to_owned() }),
                Err(errno) => return Err(failed(&lock_path, "lock it")(errno.into())),
            }
        }
    }

    /// Where the API is, with nothing there that a daemon before us left behind, unless its socket is `kept`.
    pub(crate) fn api_socket(&self, kept: bool) -> Result<PathBuf, DirError> {
        let path = self.path.join(API_SOCKET);
        if kept {
            return Ok(path);
        }
        match fs::symlink_metadata(&path) {
            Ok(found) if found.file_type().is_socket() => {
                // We hold the lock, so nobody answers there.
                fs::remove_file(&path).map_err(failed(&path, "remove the old socket"))?;
            }
            Ok(_) => return Err(DirError::NotASocket { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&path, "examine it")(error)),
        }
        Ok(path)
    }
}

/// Whether a daemon, or a cell of one, uses a run directory.
pub(crate) fn is_locked(path: &Path) -> bool {
    let Ok(lock) = fs::File::open(path.join(LOCK)) else { return false };
    matches!(rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK))
}

/// Makes a directory that only its owner enters; one that is there stays as it is.
pub(crate) fn make_private(path: &Path) -> Result<(), DirError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed(path, "create the directory"))
}

/// Lets a group pass through the run directory, if nobody can mind: it is made here, or ours, private and empty. Otherwise it is only told
/// that the group may not.
pub(crate) fn let_through(path: &Path, group: &Group) -> Result<(), DirError> {
    make_private(path)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // What cannot be opened so is not ours.
    if let Ok(dir) = rustix::fs::open(path, flags, Mode::empty()) {
        let io = |action| move |errno: Errno| failed(path, action)(errno.into());
        let found = rustix::fs::fstat(&dir).map_err(io("examine it"))?;
        let is_ours = found.st_uid == rustix::process::geteuid().as_raw() && found.st_mode & 0o777 == 0o700;
        if is_ours && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) {
            rustix::fs::fchown(&dir, None, Some(Gid::from_raw(group.gid())))
                .map_err(io("give it to the group of --socket-group"))?;
            rustix::fs::fchmod(&dir, Mode::RWXU | Mode::XGRP).map_err(io("let the group of --socket-group pass"))?;
        }
    }
    tell_closed(path, group);
    Ok(())
}

/// Tells the operator of a folder that keeps the group from its sockets.
pub(crate) fn tell_closed(folder: &Path, group: &Group) {
    if let Some(closed) = closed_to(folder, group.gid()) {
        let (name, folder, closed) = (group.name(), folder.display(), closed.display());
        tracing::warn!(
            "group {name} cannot come to devices' sockets in {folder}, for it may not pass through {closed}: \
             \"chgrp {name} {closed}\" and \"chmod g+x {closed}\", or have them elsewhere (--run-dir, or a device's --socket)"
        );
    }
}

/// The folder, or one that it is in, through which a group may not pass. What lists of access allow beside the mode is not seen.
fn closed_to(folder: &Path, group: u32) -> Option<PathBuf> {
    let whole = std::path::absolute(folder).ok()?;
    let is_closed = |folder: &&Path| {
        fs::metadata(folder).is_ok_and(|found| {
            let pass = if found.gid() == group { 0o010 } else { 0o001 };
            found.mode() & pass == 0
        })
    };
    whole.ancestors().find(is_closed).map(Path::to_owned)
}

pub(crate) fn failed(path: &Path, action: &'static str) -> impl Fn(io::Error) -> DirError {
    let path = path.to_owned();
    move |source| DirError::Io { path: path.clone(), action, source }
}
