//! Another binary under running guests: what is asked and answered, and which layouts this one understands.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::ExitStatus,
};

use millrace_frontends::nvme;
use millrace_keeper::{Layout, Link, UpgradeResult, Upgraded};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::store;

/// The file's name in a worker's run directory ([`Asked`]).
pub(crate) const FILE: &str = "upgrade.json";

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
    /// The binary that was to serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub binary: Option<PathBuf>,
    /// The version that serves now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why the old binary serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its failure was to guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// How long guests' commands waited, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_micros: Option<u64>,
}

impl UpgradeView {
    fn new(id: String, state: UpgradeState, binary: Option<PathBuf>) -> Self {
        let version = Some(env!("CARGO_PKG_VERSION").to_owned());
        Self { id, state, binary, version, reason: None, devices: None, advice: None, pause_micros: None }
    }

    pub(crate) fn running(id: Uuid, binary: &Path) -> Self {
        Self::new(id.to_string(), UpgradeState::Running, Some(binary.to_owned()))
    }

    /// It has failed in another worker, before this one's turn.
    pub(crate) fn failed(id: Uuid, binary: Option<PathBuf>, reason: String) -> Self {
        let devices =
            "guests of workers that had the new binary already waited while the old one took over again; all go on";
        Self {
            reason: Some(reason),
            devices: Some(devices.to_owned()),
            advice: Some(AGAIN.to_owned()),
            ..Self::new(id.to_string(), UpgradeState::Failed, binary)
        }
    }

    /// As the keeper tells. `refusal` is why this worker did not let go, `asked` what other workers have left of it.
    pub(crate) fn ended(upgraded: &Upgraded, refusal: Option<String>, asked: Option<Asked>) -> Self {
        let id = Uuid::from_bytes(upgraded.id).to_string();
        let (binary, words) = asked.map(|asked| (asked.binary, asked.words)).unzip();
        if let UpgradeResult::Done(micros) = upgraded.result {
            return Self { pause_micros: Some(micros), ..Self::new(id, UpgradeState::Done, binary) };
        }
        let (devices, advice) = aftermath(upgraded.result);
        Self {
            reason: Some(reason(upgraded.result, refusal, words.flatten())),
            devices: Some(devices.to_owned()),
            advice: Some(advice.to_owned()),
            ..Self::new(id, UpgradeState::Failed, binary)
        }
    }
}

/// What workers of both binaries know of an upgrade: a file in their run directory, for the one that begins it does not see its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Asked {
    id: String,
    binary: PathBuf,
    /// Why the new binary's worker ended, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    words: Option<String>,
}

impl Asked {
    /// An upgrade begins. It does as well without the file.
    pub(crate) fn begin(folder: &Path, id: Uuid, binary: &Path) {
        Self { id: id.to_string(), binary: binary.to_owned(), words: None }.write(folder);
    }

    /// What is known of the upgrade of this name.
    pub(crate) fn of(folder: &Path, id: [u8; 16]) -> Option<Self> {
        Self::read(folder).filter(|asked| asked.id == Uuid::from_bytes(id).to_string())
    }

    fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(folder.join(FILE)).ok()?).ok()
    }

    fn write(&self, folder: &Path) {
        let path = folder.join(FILE);
        let text = serde_json::to_vec(self).map_err(std::io::Error::from);
        if let Err(error) = text.and_then(|text| fs::write(&path, text)) {
            tracing::warn!(path = %path.display(), %error, "what is known of the upgrade is not written down");
        }
    }
}

/// Leaves why this worker ends to whoever serves next, who tells it if this one's binary was the new one. The first word counts.
pub(crate) fn leave_words(folder: &Path, why: &str) {
    if let Some(asked) = Asked::read(folder).filter(|asked| asked.words.is_none()) {
        Asked { words: Some(why.to_owned()), ..asked }.write(folder);
    }
}

const AGAIN: &str = "put that right, and \"millrace upgrade\" again";

/// What a failure was to guests, and what to do about it.
fn aftermath(result: UpgradeResult) -> (&'static str, &'static str) {
    let unnoticed = "guests noticed nothing: the worker that they had goes on";
    let waited = "guests waited while the old binary took over again, and all devices go on with it; \"millrace status\" lists what it could not \
                  bring back";
    match result {
        UpgradeResult::Done(_) => ("they go on", "nothing"),
        UpgradeResult::Busy => (unnoticed, "wait for the end of the other one (\"millrace upgrade --show\")"),
        UpgradeResult::CannotRun(_) => (unnoticed, "name a program that this machine can run (--binary), and try again"),
        UpgradeResult::NotAllowed => (
            unnoticed,
            "put it into one of them and name it without symbolic links, or restart the daemon with --upgrade-from DIR",
        ),
        UpgradeResult::Refused => (
            unnoticed,
            "\"millrace layouts\" of both binaries shows what each understands: upgrade to a release in between first",
        ),
        UpgradeResult::DiedAtStart(_) | UpgradeResult::SilentAtStart => (unnoticed, AGAIN),
        UpgradeResult::OldDied => (
            "guests waited for another worker of the old binary, with which all devices go on",
            "\"millrace upgrade\" again",
        ),
        UpgradeResult::Died(_) | UpgradeResult::Silent => (waited, AGAIN),
    }
}

fn reason(result: UpgradeResult, refusal: Option<String>, words: Option<String>) -> String {
    let how = |status| ExitStatus::from_raw(status);
    let words = || words.map_or_else(|| "; the log may say why".to_owned(), |words| format!(": {words}"));
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
            format!("the new binary ended ({}) before it could take over{}", how(status), words())
        }
        UpgradeResult::SilentAtStart => "the new binary was not ready to take over in time".to_owned(),
        UpgradeResult::Refused => {
            let why = refusal.unwrap_or_else(|| "the log says why".to_owned());
            format!("the new binary cannot go on with what this one leaves: {why}")
        }
        UpgradeResult::OldDied => "the worker died while the new binary was starting".to_owned(),
        UpgradeResult::Died(status) => {
            format!("the new binary ended ({}) before it had proved itself{}", how(status), words())
        }
        UpgradeResult::Silent => "the new binary did not serve in time".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_with_what_it_was_and_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let id = Uuid::from_u128(5);
        let ended = |result| {
            let upgraded = Upgraded { id: id.into_bytes(), result };
            UpgradeView::ended(&upgraded, None, Asked::of(folder.path(), upgraded.id))
        };
        // Without the file there is less to tell.
        let view = ended(UpgradeResult::Died(256));
        assert_eq!((view.state, view.binary), (UpgradeState::Failed, None));
        assert!(view.reason.unwrap().ends_with("(exit status: 1) before it had proved itself; the log may say why"));
        leave_words(folder.path(), "nobody asked");
        assert!(!folder.path().join(FILE).exists());

        Asked::begin(folder.path(), id, Path::new("/new"));
        leave_words(folder.path(), "volume v: its file is too short");
        leave_words(folder.path(), "and so on");
        let view = ended(UpgradeResult::Died(256));
        assert_eq!(view.binary.as_deref(), Some(Path::new("/new")));
        assert_eq!(view.version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
        assert!(view.reason.unwrap().ends_with("before it had proved itself: volume v: its file is too short"));
        assert!(view.devices.unwrap().contains("took over again") && view.advice.unwrap().contains("millrace upgrade"));
        let done = ended(UpgradeResult::Done(7));
        assert_eq!((done.state, done.pause_micros, done.reason), (UpgradeState::Done, Some(7), None));
        assert_eq!((done.binary.as_deref(), done.advice), (Some(Path::new("/new")), None));

        // Another one, of which nothing is known here.
        assert_eq!(Asked::of(folder.path(), [9; 16]), None);
    }

    #[test]
    fn guests_wait_only_for_what_had_its_turn() {
        for (result, noticed) in [
            (UpgradeResult::CannotRun(2), false),
            (UpgradeResult::NotAllowed, false),
            (UpgradeResult::DiedAtStart(256), false),
            (UpgradeResult::SilentAtStart, false),
            (UpgradeResult::Refused, false),
            (UpgradeResult::OldDied, true),
            (UpgradeResult::Died(6), true),
            (UpgradeResult::Silent, true),
        ] {
            let (devices, advice) = aftermath(result);
            assert_eq!(devices.contains("waited"), noticed, "{result:?}: {devices}");
            assert!(!advice.is_empty(), "{result:?}");
        }
    }
}
