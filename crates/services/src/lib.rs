//! Storage services: gates in a volume's path, composed freely and changed while the volume is in use.
//!
//! ```text
//!   "throttle(iops=1000) | stripe(file:/a, file:/b)" ── stack: parse, check ──► Node
//!                                                                                │ graph: plan sizes, open leaves, build
//!   namespace ─► Switch ─► throttle ─► stripe ─┬► file:/a                        ▼
//!                  ▲                           └► file:/b   ◄──────────────── Graph: mount, background tasks
//!                  └── change: new graph beside the old, pause, drain, unmount, mount, exchange, resume
//! ```
//!
//! A service is one folder: its logic, its tests, and a line in `registry.rs`. How one is written: docs/services/README.md.
//!
//! Invariants:
//! * A service is a `Volume` and passes the conformance suite alone, over failing legs and in random stacks.
//! * Nothing is allocated or locked per request; no cache line is written by several shards.
//! * A graph is built without touching what its legs hold. Only `mount` does, when nothing else is using them.
//! * A change that fails at any step leaves the old graph running.
//!
//! It opens no files and knows no back end: whoever builds a graph brings its leaves. It stores no configuration.

#![forbid(unsafe_code)]

mod apart;
pub mod background;
mod cache;
mod concat;
pub mod copy;
mod crypt;
mod flushes;
pub mod gate;
pub mod graph;
mod integrity;
pub mod legs;
mod locks;
mod losses;
mod members;
mod metadata;
pub mod meter;
pub mod migrate;
mod mirror;
mod parity;
pub mod pieces;
mod queue;
pub mod record;
mod registry;
mod service;
mod settings;
mod share;
mod shared;
mod stack;
mod stripe;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod throttle;
mod told;

/// Keys that are fetched before the volumes that need them are opened.
pub use crypt::{FetchedKey, FetchedKeys, key_sources};
/// Where keys come from, whether all can reach a key file, and who runs the commands that print keys.
pub use millrace_cipher::{
    KeySource, Runner as KeyCommandRunner, is_open_to_all as is_key_open_to_all, run_commands_by as run_key_commands_by,
};
pub use registry::{all, find};
pub use service::{
    Build, Health, Keeps, Kind, Layout, LegOrigin, Mount, Plan, Progress, Reason, Room, Service, ServiceError, Sizing,
    Status, Word,
};
pub use settings::{SettingError, Settings};
pub use shared::SharedObjects;
pub use stack::{Leaf, MAX_DEPTH, Node, NodeError, ParseError, ServiceNode};
