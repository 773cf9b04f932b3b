//! Where a key-encryption key comes from.

use std::{
    ffi::CString,
    fmt,
    fs::{File, Metadata},
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    str::FromStr,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};

use crate::{error::KeyError, secret::Secret};

/// Bytes that a source may give: 64 digits and a line end, with room to tell that there are too many.
const MOST: usize = 80;

/// Letters of the longest kind of source.
const LONGEST_KIND: usize = "keyring".len();

/// How long a key command may take: whoever opens a volume waits for it.
const LIMIT: Duration = Duration::from_secs(10);
/// How often is looked whether one has ended.
const LOOK: Duration = Duration::from_millis(2);

/// Waits for a key command's end, until then; `None`: it has not ended. Dropped, it kills the command.
pub type Running = Box<dyn FnOnce(Instant) -> io::Result<Option<ExitStatus>> + Send>;

/// Starts a key command: its words, where its output goes, and where its errors go.
pub type Runner = Box<dyn Fn(&str, OwnedFd, OwnedFd) -> io::Result<Running> + Send + Sync>;

static RUNNER: OnceLock<Runner> = OnceLock::new();

/// Has somebody else run key commands from now on: a process in a sandbox runs no programs itself. The first call counts.
pub fn run_commands_by(runner: Runner) {
    let _ = RUNNER.set(runner);
}

/// A command of our own, which goes with it: it, and what it has started.
struct Own {
    child: Child,
    has_ended: bool,
}

impl Own {
    fn wait(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        loop {
            match self.child.try_wait()? {
                None if Instant::now() < deadline => thread::sleep(LOOK),
                ended => {
                    self.has_ended = ended.is_some();
                    return Ok(ended);
                }
            }
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

fn run_here(line: &str, output: OwnedFd, errors: OwnedFd) -> io::Result<Running> {
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
    let mut own = Own { child: command.spawn()?, has_ended: false };
    Ok(Box::new(move |deadline| own.wait(deadline)))
}

/// Names a key without holding it: this is what configuration and logs see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file.
    File(PathBuf),
    /// A key of type "user" in the kernel's keyrings, by its description.
    Keyring(String),
    /// A program and its arguments, separated by spaces; the key is what it prints. No shell is involved.
    Command(String),
}

impl FromStr for KeySource {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        match text.split_once(':') {
            Some(("file", path)) if path.starts_with('/') => Ok(Self::File(path.into())),
            Some(("keyring", name)) if !name.is_empty() && !name.contains('\0') => Ok(Self::Keyring(name.to_owned())),
            Some(("command", line)) if line.starts_with('/') => Ok(Self::Command(line.to_owned())),
            // What stands behind the colon, or without one, may be a key itself.
            Some((kind, _)) if kind.len() <= LONGEST_KIND && kind.bytes().all(|letter| letter.is_ascii_lowercase()) => {
                Err(KeyError::Source(format!("\"{kind}:…\"")))
            }
            _ => Err(KeyError::Source("what stands there (it is not shown, for it may be a key)".to_owned())),
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Keyring(name) => write!(f, "keyring:{name}"),
            Self::Command(line) => write!(f, "command:{line}"),
        }
    }
}

impl KeySource {
    /// Fetches the key: 32 bytes, or 64 hexadecimal digits with or without a line end.
    ///
    /// # Errors
    /// Which source failed, and how.
    pub fn load(&self) -> Result<Secret<32>, KeyError> {
        let mut raw = Secret::<MOST>::zeroed()?;
        let failed = |source| KeyError::Io { from: self.to_string(), source };
        let len = match self {
            Self::File(path) => {
                let mut file = File::open(path).map_err(failed)?;
                if is_open_to_all(&file.metadata().map_err(failed)?) {
                    tracing::warn!(key = %self, "everybody on this machine can reach the key file: chmod 600 it");
                }
                read_some(&mut file, raw.bytes_mut()).map_err(failed)?
            }
            Self::Keyring(name) => keyring(name, raw.bytes_mut()).map_err(failed)?,
            Self::Command(line) => self.run(line, raw.bytes_mut(), LIMIT)?,
        };
        decode(&raw, len)?.ok_or_else(|| KeyError::NoKey { from: self.to_string(), bytes: len })
    }

    pub(crate) fn run(&self, line: &str, key: &mut [u8], limit: Duration) -> Result<usize, KeyError> {
        let failed = |source| KeyError::Io { from: self.to_string(), source };
        let deadline = Instant::now() + limit;
        // The ends that the command gets are closed here when it has started: its own are the last, and their end is its end.
        let ((output, theirs), (errors, their_errors)) = (io::pipe().map_err(failed)?, io::pipe().map_err(failed)?);
        let run = RUNNER.get().map_or(&run_here as &dyn Fn(&str, OwnedFd, OwnedFd) -> _, |runner| runner);
        let wait = run(line, theirs.into(), their_errors.into()).map_err(failed)?;
        let mut output = Timely { from: output, deadline };
        let len = match read_some(&mut output, key) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(self.too_slow(limit)),
            result => result.map_err(failed)?,
        };
        // A command that says more than a key is ended by the closed pipe.
        drop(output);
        let mut said = String::new();
        let _ = Timely { from: errors, deadline }.take(500).read_to_string(&mut said);
        let Some(status) = wait(deadline).map_err(failed)? else { return Err(self.too_slow(limit)) };
        if status.success() {
            return Ok(len);
        }
        let (command, said) = (self.to_string(), said.trim().replace(char::is_control, " "));
        Err(KeyError::Command { command, status: status.to_string(), said })
    }

    fn too_slow(&self, limit: Duration) -> KeyError {
        KeyError::Slow { command: self.to_string(), limit }
    }
}

/// Whether others than its owner and group can reach a key file.
pub fn is_open_to_all(file: &Metadata) -> bool {
    file.permissions().mode() & 0o007 != 0
}

/// A pipe that is read until the deadline.
struct Timely {
    from: io::PipeReader,
    deadline: Instant,
}

impl Read for Timely {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::from_borrowed_fd(self.from.as_fd(), PollFlags::IN)], Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => self.from.read(to),
            Err(Errno::INTR) => Err(io::ErrorKind::Interrupted.into()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Reads until the end, or until there is no room.
fn read_some(from: &mut dyn Read, to: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < to.len() {
        match from.read(&mut to[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// Reads a key of the kernel's: first the ones that the session or user has, by their description.
fn keyring(name: &str, to: &mut [u8]) -> io::Result<usize> {
    const KEYCTL_READ: libc::c_long = 11;
    let description = CString::new(name)?;
    // SAFETY: two strings that end in zero and live through the call; no callout, and no keyring to link the key to.
    let key = unsafe {
        libc::syscall(libc::SYS_request_key, c"user".as_ptr(), description.as_ptr(), std::ptr::null::<u8>(), 0_i64)
    };
    if key < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system writes at most `to.len()` bytes.
    let len = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_READ, key, to.as_mut_ptr(), to.len()) };
    usize::try_from(len).map_err(|_| io::Error::last_os_error())
}

/// The key in what came; `None` when there is none.
fn decode(raw: &Secret<MOST>, len: usize) -> Result<Option<Secret<32>>, KeyError> {
    let Some(came) = raw.bytes().get(..len) else { return Ok(None) };
    let mut key = Secret::<32>::zeroed()?;
    if len == 32 {
        key.bytes_mut().copy_from_slice(came);
        return Ok(Some(key));
    }
    let digits = came.trim_ascii_end();
    if digits.len() != 64 {
        return Ok(None);
    }
    for (byte, pair) in key.bytes_mut().iter_mut().zip(digits.chunks(2)) {
        let [Some(high), Some(low)] = [pair[0], pair[1]].map(|digit| char::from(digit).to_digit(16)) else {
            return Ok(None);
        };
        *byte = (high << 4 | low) as u8;
    }
    Ok(Some(key))
}
