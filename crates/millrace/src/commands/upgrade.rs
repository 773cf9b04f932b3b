//! Another binary under running guests.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use millrace_control::{UpgradeSpec, UpgradeState, UpgradeView};
use serde_json::{Value, json};

use super::{Done, client, show};
use crate::{
    cli::{Global, UpgradeArgs},
    client::{Client, ClientError},
    output::Table,
};

const PATH: &str = "/v1/upgrade";
/// Longer than the keepers of many workers give a new binary, one after the other.
const LIMIT: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(50);

pub(crate) fn upgrade(global: &Global, args: &UpgradeArgs) -> Done {
    let client = client(global)?;
    let view = if args.show { client.get(PATH)? } else { run(&client, args)? };
    if view.state == UpgradeState::Failed && !args.show {
        return Err(text(&view).into());
    }
    show(global, &view, text)
}

/// How an upgrade went: which binary, why, what it was to guests and what to do.
pub(super) fn text(view: &UpgradeView) -> String {
    let binary = view.binary.as_ref().map(|path| format!(" ({})", path.display())).unwrap_or_default();
    let version = view.version.as_ref().map(|version| format!(", version {version},")).unwrap_or_default();
    match view.state {
        UpgradeState::Running => format!("the new binary{binary} is starting"),
        UpgradeState::Done => {
            let micros = view.pause_micros.unwrap_or_default();
            format!("the new binary{binary} serves; guests waited {}.{} ms", micros / 1000, micros % 1000 / 100)
        }
        UpgradeState::Failed => {
            let why = view.reason.as_deref().unwrap_or("nobody knows why");
            let mut lines = vec![format!("the old binary{version} serves, and not the new one{binary}: {why}")];
            lines.extend(view.devices.iter().map(|devices| format!("devices: {devices}")));
            lines.extend(view.advice.iter().map(|advice| format!("what to do: {advice}")));
            lines.join("\n")
        }
    }
}

/// Asks for an upgrade and waits for its end, which another worker tells.
fn run(client: &Client, args: &UpgradeArgs) -> Result<UpgradeView, Box<dyn std::error::Error>> {
    let binary = match &args.binary {
        // The keeper follows no links: where they lead may be nobody's to wait for but this command's.
        Some(path) => path.canonicalize().or_else(|_| std::path::absolute(path))?,
        None => std::env::current_exe()?,
    };
    let spec = UpgradeSpec { binary, trial_seconds: Some(args.trial) };
    let before = client.get(PATH).ok().map(|view: UpgradeView| view.id);
    let id = match client.post(PATH, &spec) {
        Ok(UpgradeView { id, .. }) => Some(id),
        // A new binary that was quick: the old worker let go before it had answered.
        Err(ClientError::Http { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let is_ours = |view: &UpgradeView| id.as_ref().map_or(before.as_ref() != Some(&view.id), |id| view.id == *id);
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        sleep(LOOK);
        match client.get::<UpgradeView>(PATH) {
            Ok(view) if view.state != UpgradeState::Running && is_ours(&view) => return Ok(view),
            // A request that the old worker had, and one that the new one answers before it has heard of the upgrade.
            Ok(_) | Err(ClientError::Connection { .. } | ClientError::Http { .. } | ClientError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err("the daemon does not say how the upgrade ended; its log may".into())
}

pub(crate) fn layouts(global: &Global) -> Done {
    let layouts = millrace_control::layouts();
    let list: Vec<Value> = layouts
        .iter()
        .map(|layout| json!({ "name": layout.name, "oldest": layout.oldest, "newest": layout.newest }))
        .collect();
    show(global, &list, |_| {
        let mut table = Table::new(&["LAYOUT", "READS AND WRITES"]);
        for layout in &layouts {
            let reads = format!("{} to {}", layout.oldest, layout.newest);
            table.row([layout.name.to_owned(), reads]);
        }
        table.render()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_all_that_is_known() {
        let view = json!({
            "id": "x", "state": "failed", "binary": "/new", "version": "1.2.3", "reason": "it ended", "devices": "they go on",
            "advice": "try again",
        });
        assert_eq!(
            text(&serde_json::from_value(view).unwrap()),
            "the old binary, version 1.2.3, serves, and not the new one (/new): it ended\ndevices: they go on\nwhat to do: try again"
        );
        // As workers of earlier versions tell it.
        let view = json!({ "id": "x", "state": "failed", "reason": "it ended" });
        assert_eq!(text(&serde_json::from_value(view).unwrap()), "the old binary serves, and not the new one: it ended");
        let view = json!({ "id": "x", "state": "done", "pause_micros": 12_345 });
        assert_eq!(text(&serde_json::from_value(view).unwrap()), "the new binary serves; guests waited 12.3 ms");
    }
}
