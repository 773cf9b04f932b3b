//! Users whose applications may open volumes: what the configuration file and the API say of them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Name, error::ControlError, manager::SESSIONS, model::GroupCaps};

/// All volumes.
const ALL: &str = "*";

/// A user whose applications may open volumes, beside the daemon's own user and root, who may open all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppUser {
    /// The user's number.
    pub uid: u32,
    /// Names of volumes; `*` means all.
    pub volumes: Vec<String>,
    /// It may only read.
    #[serde(default)]
    pub read_only: bool,
    /// How many sessions it may have at a time.
    #[serde(default = "default_sessions")]
    pub sessions: usize,
    /// Caps that hold for all its sessions together, in each worker.
    #[serde(default, skip_serializing_if = "GroupCaps::is_empty")]
    pub caps: GroupCaps,
}

/// What a user's applications shall have from now on; what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppChange {
    /// Names of volumes, in the place of all that it may open; `*` means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<String>>,
    /// It may only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// How many sessions it may have at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<usize>,
    /// Caps in the place of all that it has; none lifts all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caps: Option<GroupCaps>,
}

fn default_sessions() -> usize {
    SESSIONS
}

impl AppUser {
    /// One that may open nothing, whatever the configuration file says.
    pub(crate) fn shut_out(uid: u32) -> Self {
        Self { uid, volumes: Vec::new(), read_only: false, sessions: SESSIONS, caps: GroupCaps::default() }
    }

    /// Whether a session like this is among what the user may have.
    pub(crate) fn allows(&self, volume: &str, read_only: bool) -> bool {
        (read_only || !self.read_only) && self.volumes.iter().any(|allowed| allowed == ALL || allowed == volume)
    }

    /// What it says of volumes and their use is of no effect for those who may open all.
    pub(crate) fn is_unlimited(&self) -> bool {
        !self.read_only && self.volumes == [ALL] && self.caps.is_empty()
    }

    /// The volumes that it names.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        self.volumes.iter().map(String::as_str).filter(|name| *name != ALL)
    }

    pub(crate) fn changed(mut self, change: &AppChange) -> Self {
        let AppChange { volumes, read_only, sessions, caps } = change.clone();
        self.volumes = volumes.unwrap_or(self.volumes);
        self.read_only = read_only.unwrap_or(self.read_only);
        self.sessions = sessions.unwrap_or(self.sessions);
        self.caps = caps.unwrap_or(self.caps);
        self
    }

    /// What can be found out without knowing which volumes there are.
    pub(crate) fn validate(&self) -> Result<(), ControlError> {
        let invalid = |why: String| Err(invalid(self.uid, why));
        if self.uid == u32::MAX {
            return invalid("that is no user's number".to_owned());
        }
        if self.volumes.is_empty() {
            return invalid("volumes: name one at least, or \"*\" for all; who shall have none is deleted".to_owned());
        }
        let mut seen = BTreeSet::new();
        for volume in &self.volumes {
            if volume == ALL && self.volumes.len() > 1 {
                return invalid("volumes: \"*\" is all of them; name no others beside it".to_owned());
            }
            if let (true, Err(error)) = (volume != ALL, volume.parse::<Name>()) {
                return invalid(format!("volumes: {volume:?} is no volume's name: {error}"));
            }
            if !seen.insert(volume) {
                return invalid(format!("volumes: {volume} is named twice"));
            }
        }
        // As many as there are names for a user's sessions.
        if !(1..=usize::from(u16::MAX)).contains(&self.sessions) {
            let why =
                format!("sessions: 1 to {} are possible, not {}; who shall have none is deleted", u16::MAX, self.sessions);
            return invalid(why);
        }
        match self.caps.read() {
            Ok(caps) if caps.is_empty() && !self.caps.is_empty() => {
                invalid("burst: it is of caps, and there are none: say --iops N or another one beside it".to_owned())
            }
            Ok(_) => Ok(()),
            Err(error) => invalid(error.to_string()),
        }
    }
}

/// What cannot be said of a user.
pub(crate) fn invalid(uid: u32, why: impl Into<String>) -> ControlError {
    ControlError::invalid("user", &name(uid), why)
}

/// A user's number where an object has a name.
pub(crate) fn name(uid: u32) -> Name {
    uid.to_string().parse().expect("numbers make a name")
}
