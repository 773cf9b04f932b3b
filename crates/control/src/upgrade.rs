//! Another binary under running guests: what is asked and answered, and which layouts this one understands.

use std::{os::unix::process::ExitStatusExt, path::PathBuf, process::ExitStatus};

use millrace_frontends::nvme;
use millrace_keeper::{Layout, Link, UpgradeResult, Upgraded};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::store;

/// For how long the old binary takes over again unless told otherwise.
const TRIAL_SECONDS: u64 = 10;

/// Everything that one worker leaves to the next, with the versions of it that this build reads and writes.
pub fn layouts() -> Vec<Layout> {
    let store = Layout { name: "state.redb", oldest: store::LAYOUT_VERSION as u16, newest: store::LAYOUT_VERSION as u16 };
    nvme::layouts().into_iter().chain([store, Link::LAYOUT]).collect()
}

/// An upgrade that is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeSpec {
    /// The binary that is to serve, by its absolute path.
    #[schema(value_type = String)]
    pub binary: PathBuf,
    /// For how many seconds after it serves the old binary takes over again if the new one fails; 10 when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial_seconds: Option<u64>,
}

impl UpgradeSpec {
    pub(crate) fn trial_millis(&self) -> u64 {
        self.trial_seconds.unwrap_or(TRIAL_SECONDS).saturating_mul(1000)
    }
}

/// Where an upgrade stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UpgradeState {
    /// The new binary is starting.
    Running,
    /// The new binary serves. If it fails while it is on trial, this becomes "failed".
    Done,
    /// The old binary serves.
    Failed,
}

/// The last upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeView {
    /// Its name.
    pub id: String,
    /// Where it stands.
    pub state: UpgradeState,
    /// Why the old binary serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long guests' commands waited, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_micros: Option<u64>,
}

impl UpgradeView {
    pub(crate) fn running(id: Uuid) -> Self {
        Self { id: id.to_string(), state: UpgradeState::Running, reason: None, pause_micros: None }
    }

    pub(crate) fn failed(id: Uuid, reason: String) -> Self {
        Self { id: id.to_string(), state: UpgradeState::Failed, reason: Some(reason), pause_micros: None }
    }

    /// As the keeper tells. `refusal` is why this worker did not let go.
    pub(crate) fn ended(upgraded: &Upgraded, refusal: Option<String>) -> Self {
        let id = Uuid::from_bytes(upgraded.id).to_string();
        if let UpgradeResult::Done(micros) = upgraded.result {
            return Self { id, state: UpgradeState::Done, reason: None, pause_micros: Some(micros) };
        }
        Self { id, state: UpgradeState::Failed, reason: Some(reason(upgraded.result, refusal)), pause_micros: None }
    }
}

fn reason(result: UpgradeResult, refusal: Option<String>) -> String {
    let how = |status| ExitStatus::from_raw(status);
    match result {
        UpgradeResult::Done(_) => "it is done".to_owned(),
        UpgradeResult::Busy => "another upgrade is under way".to_owned(),
        UpgradeResult::CannotRun(errno) => {
            format!("the new binary cannot be run: {}", std::io::Error::from_raw_os_error(errno))
        }
        UpgradeResult::NotAllowed => {
            "the new binary lies neither in the directory of the daemon's own nor in one of its --upgrade-from".to_owned()
        }
        UpgradeResult::DiedAtStart(status) => {
            format!("the new binary ended ({}) before it could take over; the log may say why", how(status))
        }
        UpgradeResult::SilentAtStart => "the new binary was not ready to take over in time".to_owned(),
        UpgradeResult::Refused => {
            let why = refusal.unwrap_or_else(|| "the log says why".to_owned());
            format!("the new binary cannot go on with what this one leaves: {why}")
        }
        UpgradeResult::OldDied => "the worker died while the new binary was starting".to_owned(),
        UpgradeResult::Died(status) => {
            format!("the new binary ended ({}) before it had proved itself; the log may say why", how(status))
        }
        UpgradeResult::Silent => "the new binary did not serve in time".to_owned(),
    }
}
