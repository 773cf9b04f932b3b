//! Users of FastPath on the command line.

use clap::{Args, Subcommand};
use millrace_control::{AppChange, AppUser};

use super::groups::{CAPS, CapsArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum AppCommand {
    /// Let a user's programs open volumes
    Create(AppCreate),
    /// List the users whose programs may open volumes, beside root and the daemon's own
    List,
    /// Show what a user's programs may open
    Show {
        /// The user: a name or number
        #[arg(value_parser = user)]
        user: u32,
    },
    /// Let a user's programs open others, or in another way, from now on. What they have open and may not have any more ends; caps hold for
    /// what is open, in the place of all caps before, or none does (--no-caps)
    Change(AppSet),
    /// Let a user's programs open nothing any more, and end what they have open
    Delete {
        /// The user: a name or number
        #[arg(value_parser = user)]
        user: u32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AppCreate {
    /// The user: a name or number
    #[arg(value_parser = user)]
    user: u32,
    #[command(flatten)]
    volumes: VolumesArgs,
    /// They may only read
    #[arg(long)]
    read_only: bool,
    /// How many they may have open at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    sessions: usize,
    #[command(flatten)]
    caps: CapsArgs,
}

impl AppCreate {
    pub(crate) fn app(self) -> Result<AppUser, String> {
        let volumes = self.volumes.names().ok_or("which volumes? --volume NAME, or --all-volumes")?;
        let caps = self.caps.caps();
        Ok(AppUser { uid: self.user, volumes, read_only: self.read_only, sessions: self.sessions, caps })
    }
}

#[derive(Debug, Args)]
pub(crate) struct AppSet {
    /// The user: a name or number
    #[arg(value_parser = user)]
    pub(crate) user: u32,
    #[command(flatten)]
    volumes: VolumesArgs,
    /// They may only read
    #[arg(long, conflicts_with = "read_write")]
    read_only: bool,
    /// They may read and write
    #[arg(long)]
    read_write: bool,
    /// How many they may have open at a time; more that are open stay
    #[arg(long, value_name = "N")]
    sessions: Option<usize>,
    #[command(flatten)]
    caps: CapsArgs,
    /// Lift all caps
    #[arg(long, conflicts_with_all = CAPS)]
    no_caps: bool,
}

impl AppSet {
    pub(crate) fn change(self) -> AppChange {
        let read_only = (self.read_only || self.read_write).then_some(self.read_only);
        let caps = self.caps.caps();
        let caps = (self.no_caps || !caps.is_empty()).then_some(caps);
        AppChange { volumes: self.volumes.names(), read_only, sessions: self.sessions, caps }
    }
}

/// Volumes, in the place of all that were named before.
#[derive(Debug, Args)]
struct VolumesArgs {
    /// A volume that they may open; may be repeated
    #[arg(long = "volume", value_name = "NAME", conflicts_with = "all_volumes")]
    volumes: Vec<String>,
    /// They may open every volume, those that will be made included
    #[arg(long)]
    all_volumes: bool,
}

impl VolumesArgs {
    fn names(self) -> Option<Vec<String>> {
        if self.all_volumes {
            return Some(vec!["*".to_owned()]);
        }
        (!self.volumes.is_empty()).then_some(self.volumes)
    }
}

/// A user of this machine by name; any by number, for a machine need not know those of a container.
fn user(text: &str) -> Result<u32, String> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map_err(|_| "that is no user's number".to_owned());
    }
    millrace_sandbox::uid_of(text)
        .map_err(|error| format!("{error}; a user that this machine does not know is said by number"))
}
