//! Where a key-encryption key comes from.

use std::{
    ffi::CString,
    fmt,
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    str::FromStr,
    sync::OnceLock,
};

use crate::{error::KeyError, secret::Secret};

/// Bytes that a source may give: 64 digits and a line end, with room to tell that there are too many.
const MOST: usize = 80;

/// Waits for a key command's end.
pub type Running = Box<dyn FnOnce() -> io::Result<ExitStatus> + Send>;

/// Starts a key command: its words, where its output goes, and where its errors go.
pub type Runner = Box<dyn Fn(&str, OwnedFd, OwnedFd) -> io::Result<Running> + Send + Sync>;

static RUNNER: OnceLock<Runner> = OnceLock::new();

/// Has somebody else run key commands from now on: a process in a sandbox runs no programs itself. The first call counts.
pub fn run_commands_by(runner: Runner) {
    let _ = RUNNER.set(runner);
}

fn run_here(line: &str, output: OwnedFd, errors: OwnedFd) -> io::Result<Running> {
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let mut command = Command::new(words.next().unwrap_or_default());
    let mut child = command.args(words).stdin(Stdio::null()).stdout(output).stderr(errors).spawn()?;
    Ok(Box::new(move || child.wait()))
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
            _ => Err(KeyError::Source(text.to_owned())),
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
                let mode = file.metadata().map_err(failed)?.permissions().mode();
                if mode & 0o007 != 0 {
                    tracing::warn!(key = %self, "everybody on this machine can reach the key file: chmod 600 it");
                }
                read_some(&mut file, raw.bytes_mut()).map_err(failed)?
            }
            Self::Keyring(name) => keyring(name, raw.bytes_mut()).map_err(failed)?,
            Self::Command(line) => self.run(line, raw.bytes_mut())?,
        };
        decode(&raw, len)?.ok_or_else(|| KeyError::NoKey { from: self.to_string(), bytes: len })
    }

    fn run(&self, line: &str, key: &mut [u8]) -> Result<usize, KeyError> {
        let failed = |source| KeyError::Io { from: self.to_string(), source };
        // The ends that the command gets are closed here when it has started: its own are the last, and their end is its end.
        let ((mut output, theirs), (errors, their_errors)) = (io::pipe().map_err(failed)?, io::pipe().map_err(failed)?);
        let run = RUNNER.get().map_or(&run_here as &dyn Fn(&str, OwnedFd, OwnedFd) -> _, |runner| runner);
        let wait = run(line, theirs.into(), their_errors.into()).map_err(failed)?;
        let len = read_some(&mut output, key).map_err(failed)?;
        // A command that says more than a key is ended by the closed pipe.
        drop(output);
        let mut said = String::new();
        let _ = errors.take(500).read_to_string(&mut said);
        let status = wait().map_err(failed)?;
        if status.success() {
            return Ok(len);
        }
        let (command, said) = (self.to_string(), said.trim().replace(char::is_control, " "));
        Err(KeyError::Command { command, status: status.to_string(), said })
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
