//! Migrations of volumes.

use std::{thread, time::Duration};

use millrace_control::{HistoryEntry, MigrationChange, MigrationSpec, MigrationView, Size, State, VolumeView};
use serde_json::json;

use super::{Done, show};
use crate::{
    Misuse,
    cli::{Global, VolumeMigrate},
    client::{Client, ClientError, segment},
};

/// How often is looked whether a migration is over.
const LOOK: Duration = Duration::from_millis(100);
/// How often is looked at a volume that has failed before it is waited for no longer: one whose files are late is opened all the same.
const FAILED_LOOKS: u32 = 100;

/// Does what is said of a volume's migration.
pub(super) fn migrate(global: &Global, client: &Client, args: VolumeMigrate) -> Done {
    let volume = format!("/v1/volumes/{}", segment(&args.name));
    let path = format!("{volume}/migration");
    if args.cancel {
        client.delete(&path)?;
        return show(global, &json!({ "cancelled": args.name }), |_| format!("volume {} stays where it was", args.name));
    }
    let mut view: VolumeView = match (args.to, args.rate) {
        (Some(to), rate) => client.post(&path, &MigrationSpec { to, leg: args.leg, rate })?,
        (None, Some(rate)) => client.patch(&path, &MigrationChange { rate })?,
        (None, None) => return Err(Misuse("say where the volume is to go: --to".to_owned()).into()),
    };
    if args.wait {
        view = ended(client, &volume, view, LOOK)?;
    }
    show(global, &view, line)
}

/// Waits until a volume's migration is over. It must have come to its end; anything else is an error.
fn ended(
    client: &Client,
    volume: &str,
    mut view: VolumeView,
    look: Duration,
) -> Result<VolumeView, Box<dyn std::error::Error>> {
    let mut failed = 0;
    while let Some(migration) = &view.migration {
        failed = if view.state == State::Failed { failed + 1 } else { 0 };
        if failed == FAILED_LOOKS {
            let (name, to, reason) = (&view.name, &migration.to, view.reason.as_deref().unwrap_or_default());
            let waits = format!("its migration to {to} goes on when it can be opened");
            return Err(format!("volume {name} is not available: {reason}; {waits}").into());
        }
        thread::sleep(look);
        let lost = |error: ClientError| {
            let VolumeView { name, .. } = &view;
            error.while_waiting(&format!("the migration of volume {name}"), &format!("millrace volume show {name}"))
        };
        view = client.get(volume).map_err(lost)?;
    }
    let history: Vec<HistoryEntry> = client.get(&format!("{volume}/history"))?;
    let name = &view.name;
    match history.into_iter().rev().find_map(|entry| entry.note) {
        Some(note) if note.starts_with("migrated ") => Ok(view),
        Some(note) if !note.ends_with(" begins") => Err(format!("volume {name}: {note}").into()),
        // Nothing says how it ended.
        _ => {
            let advice = format!("\"millrace volume show {name} --history\" tells when");
            Err(format!("volume {name}: its history does not say how the migration ended; {advice}").into())
        }
    }
}

fn line(view: &VolumeView) -> String {
    match &view.migration {
        None => format!("volume {}: {}", view.name, view.stack),
        Some(migration) => format!("volume {}: {}", view.name, progress(migration)),
    }
}

/// How far a migration is.
pub(super) fn progress(migration: &MigrationView) -> String {
    let MigrationView { from, to, rate, done, total, reason } = migration;
    if let Some(reason) = reason {
        return format!("from {from} to {to} has failed: {reason}");
    }
    let percent = done.saturating_mul(100).checked_div(*total).unwrap_or(100);
    let rate = rate.map(|rate| format!(", at most {rate}/s")).unwrap_or_default();
    format!("from {from} to {to}, {percent} % of {}{rate}", Size(*total).approximate())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::tests::{daemon, volume};

    const MOVING: &str = "move(file:/a, file:/b)";

    fn moving(state: State) -> String {
        let [from, to] = ["file:/a", "file:/b"].map(|leaf| leaf.parse().unwrap());
        volume(MOVING, Some(MigrationView { from, to, rate: None, done: 0, total: 1 << 20, reason: None }), state)
    }

    /// What is said of a migration when a volume looks like this, one time after the other.
    fn waited(looks: Vec<String>) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let first = serde_json::from_str(&looks[0]).unwrap();
        let daemon = daemon(folder.path(), looks.into_iter().skip(1).map(|look| (200, look)).collect());
        let ended = ended(&Client::new(folder.path()).unwrap(), "/v1/volumes/v", first, Duration::ZERO);
        daemon.join().unwrap();
        ended.map(|view| view.stack.to_string()).map_err(|error| error.to_string())
    }

    /// The end of a migration: the volume as it is then, and its history.
    fn end(stack: &str, note: &str) -> [String; 2] {
        let history = json!([{ "time": 1, "stack": MOVING, "note": note }, { "time": 2, "stack": stack }]);
        [volume(stack, None, State::Ready), history.to_string()]
    }

    #[test]
    fn a_migration_is_waited_for_until_nothing_can_come_of_it() {
        let often = usize::try_from(FAILED_LOOKS).unwrap();
        let gone = waited(vec![moving(State::Failed); often]).unwrap_err();
        assert!(gone.starts_with("volume v is not available: no such file; its migration to file:/b"), "{gone}");
        // Late, twice.
        let late = vec![moving(State::Failed); often - 1];
        let looks =
            [late.clone(), vec![moving(State::Ready)], late, end("file:/b", "migrated from file:/a").into()].concat();
        assert_eq!(waited(looks).unwrap(), "file:/b");
        let ended = waited(vec![moving(State::Ready); 2]).unwrap_err();
        assert!(ended.contains("the daemon has ended") && ended.contains("the migration of volume v goes on"), "{ended}");
        for (note, said) in [
            ("migration to file:/b begins", "its history does not say how the migration ended"),
            ("migration to file:/b cancelled", "volume v: migration to file:/b cancelled"),
        ] {
            let looks = [vec![moving(State::Ready)], end("file:/a", note).into()].concat();
            let error = waited(looks).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
