//! Configuration, live changes, the API and metrics: everything beside the data path.
//!
//! ```text
//!   command line ══ HTTP on RUN_DIR/api.sock ══► api ─┐                       ┌─► volumes (back ends)
//!   config file ── parsed, compared ──────────────────┼─► Manager ── devices ─┴─► shards
//!   applications ══ RUN_DIR/apps.sock ══► apps ──────┤
//!   guests ── Host ── its own thread ─────────────────┘      │
//!                                                            └─► Store: STATE_DIR/state.redb
//! ```
//!
//! With isolation there are more workers, each with a manager of its own: `cells` starts them, passes on what is about the
//! others, and makes one answer of theirs.
//!
//! Invariants:
//! * A change is validated, done and stored; when any of it fails, state and disk are as before and the error says what, about
//!   which object, and what to do.
//! * What fails while a daemon starts (a file that is gone, a socket that is taken) is shown as failed and costs nothing else.
//! * One daemon per state directory and per run directory.
//! * Nothing here runs on a shard, except calls that are short; guests' requests never wait for the operator's on a shard.
//!
//! It does no I/O for guests, and knows nothing of registers and commands.

#![forbid(unsafe_code)]

mod api;
mod apps;
mod cells;
mod config;
mod confine;
mod daemon;
mod devices;
mod dirs;
mod disks;
mod error;
mod itself;
mod manager;
mod model;
mod name;
mod size;
mod store;
mod upgrade;
mod usage;
mod witness;

pub use api::{Operator, Problem, explain, openapi};
pub use apps::{APPS_SOCKET, AppChange, AppUser};
pub use config::{ConfigError, Declared, FileSettings, IsolationMode, PlacementMode, PollingMode, SandboxTable};
pub use daemon::{DaemonError, ForegroundDisk, ServeOptions, foreground, serve};
pub use dirs::{API_SOCKET, DirError, default_run_dir, default_state_dir, trust_run_dir};
pub use error::{CHANGED_MEANWHILE, Class, ControlError, EMPTIED};
pub use manager::{
    AppSource, AppView, CopyView, DeviceCounters, DeviceView, GroupView, HistoryEntry, Manager, MigrationView,
    NamespaceView, RestoreError, ShardView, State, Status, UserView, VolumeView, WorkerName, WorkerView,
};
pub use model::{
    AttachSpec, Backend, CopyChange, CopySpec, CopyState, DeviceKind, DeviceKindError, DeviceSpec, Doorbells, Functions,
    GroupCaps, GroupChange, GroupSpec, LogicalBlock, LogicalBlockError, MigrationChange, MigrationSpec, NvmeSpec,
    ServiceAnswer, ServiceCommand, VirtioBlkSpec, VolumeChange, VolumeSpec,
};
pub use name::{Name, NameError};
pub use size::{Size, SizeError};
pub use store::StoreError;
pub use upgrade::{UpgradeSpec, UpgradeState, UpgradeView, layouts};
pub use usage::{UsageBy, UsageQuestion, UsageRow};
pub use uuid::Uuid;
