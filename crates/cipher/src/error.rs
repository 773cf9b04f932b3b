//! What can go wrong with keys and ciphers: told to the operator.

use std::{io, time::Duration};

use thiserror::Error;

/// Why a cipher could not be set up or a sealed key not be opened.
#[derive(Debug, Error)]
pub enum CipherError {
    /// Keys must never be swapped, and the system does not let us lock the memory for them.
    #[error(
        "memory for keys cannot be locked: {0}; raise the limit of locked memory (ulimit -l, LimitMEMLOCK=), or run with CAP_IPC_LOCK"
    )]
    Memory(#[source] io::Error),
    /// The system has no random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(#[source] io::Error),
    /// The two halves of an XTS key are equal, which the standard forbids.
    #[error("the key's two halves are equal")]
    WeakKey,
    /// What was sealed was not sealed with this key, or has been changed since.
    #[error("the key does not fit, or what it protects was changed")]
    Authentication,
    /// The library refused what it cannot refuse.
    #[error("the cipher library refused to {0}")]
    Library(&'static str),
}

/// Why a key could not be had from its source.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The text names no source. It is not here: it may be a key.
    #[error(
        "{0} names no source of a key; file:PATH, keyring:NAME and command:PROGRAM are possible, where PATH and PROGRAM are absolute \
         (begin with /)"
    )]
    Source(String),
    /// The source failed.
    #[error("the key cannot be had from {from}: {source}{}", to_do(from, source))]
    Io {
        /// The source.
        from: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The command said that it failed.
    #[error("the key command {command} failed: {status}; it said: {said}")]
    Command {
        /// The command.
        command: String,
        /// Its exit status.
        status: String,
        /// The beginning of what it wrote to its standard error.
        said: String,
    },
    /// The command took too long.
    #[error("the key command {command} was killed: it has not ended within {} s", limit.as_secs())]
    Slow {
        /// The command.
        command: String,
        /// How long it may take.
        limit: Duration,
    },
    /// What came is no key.
    #[error("{from} gave {bytes} bytes that are no key: 32 bytes, or 64 hexadecimal digits, are one")]
    NoKey {
        /// The source.
        from: String,
        /// How many bytes came.
        bytes: usize,
    },
    /// No memory for it.
    #[error(transparent)]
    Cipher(#[from] CipherError),
}

/// What to do about a source that gives no key. Whether a volume is made or opened nobody knows here.
fn to_do(from: &str, error: &io::Error) -> &'static str {
    let (source, _) = from.split_once(':').unwrap_or_default();
    match (source, error.kind()) {
        ("keyring", _) if error.raw_os_error() == Some(libc::ENOKEY) => {
            "; put it into a keyring that the daemon searches, its session's or its user's (as that user: keyctl padd user NAME @u < KEY; \
             under systemd with KeyringMode=shared)"
        }
        ("command", io::ErrorKind::PermissionDenied) => {
            "; the daemon's user must be allowed to run it, and a daemon with --allow or --key-command runs only the programs that \
             --key-command names (\"key_commands\" under [sandbox]), from its next start on"
        }
        ("file", io::ErrorKind::PermissionDenied) => {
            "; the daemon's user must be allowed to read it, and so must the sandbox (\"allow\" under [sandbox] in the daemon's \
             configuration, or serve --allow PATH, from its next start on)"
        }
        ("file", io::ErrorKind::NotFound) => {
            "; of a volume that is there bring it back: no other key opens it; for a new volume make it: head -c 32 /dev/urandom > FILE, \
             chmod 600, the daemon's user its owner"
        }
        _ => "",
    }
}
