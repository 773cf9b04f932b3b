//! What can go wrong with a shard as a whole.

use std::io;

use thiserror::Error;

/// Why a shard could not start or answer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The kernel gave no ring.
    #[error(
        "shard {shard}: io_uring is not available: Linux 5.11 or newer is needed, with kernel.io_uring_disabled=0 and a \
         seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register"
    )]
    Ring {
        /// The shard's index.
        shard: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The thread could not be bound to its core.
    #[error("shard {shard}: cannot bind to core {core}; is it online, and in the process's cpuset?")]
    Pin {
        /// The shard's index.
        shard: usize,
        /// The core asked for.
        core: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Memory, file descriptors or the thread itself could not be had.
    #[error("shard {shard}: {what}")]
    Setup {
        /// The shard's index.
        shard: usize,
        /// What was being set up.
        what: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The shard has stopped, or the call it was asked to make panicked: there is no answer.
    #[error("shard {shard} gave no answer: it has stopped, or the call failed there")]
    NoAnswer {
        /// The shard's index.
        shard: usize,
    },
    /// The shard has not come to what it was asked in time, and will not do it.
    #[error("shard {shard} does not answer: it has been busy with something else for long")]
    Silent {
        /// The shard's index.
        shard: usize,
    },
    /// A shard was asked to wait for itself.
    #[error("shard {shard} was asked to wait for itself")]
    OwnShard {
        /// The shard's index.
        shard: usize,
    },
    /// A shard's thread ended by a panic of its own.
    #[error("the thread of shard {shard} panicked")]
    Panicked {
        /// The shard's index.
        shard: usize,
    },
}

/// A list of shards could not be understood.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ShardsError {
    /// No shard at all.
    #[error("at least one shard is needed")]
    None,
    /// Not a number, or a range that ends before it starts.
    #[error("{0:?} is neither a core number nor a range such as 4-6")]
    Syntax(String),
    /// The same core twice.
    #[error("core {0} is named twice")]
    Twice(usize),
    /// More shards or a higher core number than any machine has.
    #[error("{0} is more than {1}")]
    TooLarge(usize, usize),
}
