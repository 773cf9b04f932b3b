//! Why a measurement could not be taken.

use std::{io, path::PathBuf, process::ExitStatus};

use thiserror::Error;

/// Why the suite could not go on.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// A program could not be started.
    #[error("starting {program}")]
    Start {
        /// The program.
        program: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A program ended badly.
    #[error("{program} ended with {status}; it said: {said}")]
    Ended {
        /// The program.
        program: PathBuf,
        /// How.
        status: ExitStatus,
        /// The end of what it said.
        said: String,
    },
    /// A daemon did not come up.
    #[error("{program} did not come up; it said: {said}")]
    NotUp {
        /// The program.
        program: PathBuf,
        /// The end of what it said.
        said: String,
    },
    /// A program's output is not what was expected.
    #[error("{program} said what is not understood: {said}")]
    Output {
        /// The program.
        program: String,
        /// What it said.
        said: String,
    },
    /// A peer refused a request on its own socket.
    #[error("{method}: {error}")]
    Rpc {
        /// The request.
        method: String,
        /// Its answer.
        error: String,
    },
    /// The socket of a peer.
    #[error("asking {peer}")]
    Ask {
        /// Whom.
        peer: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A process could not be bound to a core.
    #[error("binding process {pid} to core {core}")]
    Bind {
        /// Which.
        pid: u32,
        /// Where.
        core: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file could not be written.
    #[error("writing {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file could not be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A controller could not be brought up.
    #[error(transparent)]
    Driver(#[from] millrace_driver::DriverError),
    /// A section that there is not.
    #[error("there is no section {0}; there are: {1}")]
    Section(String, String),
}
