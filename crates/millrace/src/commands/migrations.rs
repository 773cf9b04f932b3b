//! Migrations of volumes.

use std::{thread, time::Duration};

use millrace_control::{HistoryEntry, MigrationChange, MigrationSpec, MigrationView, Size, VolumeView};
use serde_json::json;

use super::{Done, show};
use crate::{
    cli::{Global, VolumeMigrate},
    client::{Client, segment},
};

/// How often is looked whether a migration is over.
const LOOK: Duration = Duration::from_millis(100);

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
        (None, None) => return Err("say where the volume is to go: --to".into()),
    };
    if args.wait {
        while view.migration.is_some() {
            thread::sleep(LOOK);
            view = client.get(&volume)?;
        }
        let history: Vec<HistoryEntry> = client.get(&format!("{volume}/history"))?;
        let note = history.into_iter().rev().find_map(|entry| entry.note).unwrap_or_default();
        if !note.starts_with("migrated ") {
            return Err(format!("volume {}: {note}", view.name).into());
        }
    }
    show(global, &view, line)
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
