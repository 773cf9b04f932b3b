//! Copies of volumes.

use std::{thread, time::Duration};

use millrace_control::{CopyChange, CopySpec, CopyState, CopyView, Size};
use serde_json::json;

use super::{Done, client, show};
use crate::{
    Misuse,
    cli::{CopyArgs, CopyCommand, Global},
    client::{Client, segment},
    output::{Table, facts},
};

/// How often is looked whether a copy has ended.
const LOOK: Duration = Duration::from_millis(100);

fn path(name: &str) -> String {
    format!("/v1/copies/{}", segment(name))
}

/// Does what is said of copies.
pub(crate) fn copy(global: &Global, args: CopyArgs) -> Done {
    let client = client(global)?;
    let (name, change) = match args.command {
        None => {
            let (Some(source), Some(target)) = (args.source, args.target) else {
                return Err(Misuse("a copy has a source and a target".to_owned()).into());
            };
            let spec = CopySpec { name: args.name, source, target, rate: args.rate };
            return begin(global, &client, &spec, args.wait);
        }
        Some(CopyCommand::List) => {
            let views: Vec<CopyView> = client.get("/v1/copies")?;
            return show(global, &views, |views| table(views));
        }
        Some(CopyCommand::Show { name }) => return show(global, &client.get(&path(&name))?, copy_facts),
        Some(CopyCommand::Cancel { name }) => {
            client.delete(&path(&name))?;
            return show(global, &json!({ "cancelled": name }), |_| format!("copy {name} is forgotten"));
        }
        Some(CopyCommand::Pause { name }) => (name, CopyChange { state: Some(CopyState::Paused), rate: None }),
        Some(CopyCommand::Resume { name, rate }) => (name, CopyChange { state: Some(CopyState::Running), rate }),
    };
    let view: CopyView = client.patch(&path(&name), &change)?;
    show(global, &view, line)
}

fn begin(global: &Global, client: &Client, spec: &CopySpec, wait: bool) -> Done {
    let mut view: CopyView = client.post("/v1/copies", spec)?;
    // One that is paused is not there yet: somebody may have it go on.
    while wait && matches!(view.state, CopyState::Running | CopyState::Paused) {
        thread::sleep(LOOK);
        view = client.get(&path(view.name.as_str()))?;
    }
    if view.state == CopyState::Failed {
        return Err(format!("copy {}: {}", view.name, view.reason.unwrap_or_default()).into());
    }
    show(global, &view, line)
}

fn state(view: &CopyView) -> String {
    let state = match view.state {
        CopyState::Running => "running",
        CopyState::Paused => "paused",
        CopyState::Done => "done",
        CopyState::Failed => "failed",
    };
    view.reason.as_ref().map_or_else(|| state.to_owned(), |reason| format!("{state}: {reason}"))
}

/// How much is done.
fn progress(view: &CopyView) -> String {
    let percent = view.done.saturating_mul(100).checked_div(view.bytes).unwrap_or(100);
    format!("{percent} % of {}", Size(view.bytes).approximate())
}

fn rate(view: &CopyView) -> String {
    view.rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate}/s"))
}

fn line(view: &CopyView) -> String {
    let CopyView { name, source, target, .. } = view;
    format!("copy {name}: {source} to {target}, {}, {}", progress(view), state(view))
}

fn table(views: &[CopyView]) -> String {
    let mut table = Table::new(&["NAME", "SOURCE", "TARGET", "DONE", "RATE", "STATE"]);
    for view in views {
        let (name, source, target) = (view.name.to_string(), view.source.to_string(), view.target.to_string());
        table.row([name, source, target, progress(view), rate(view), state(view)]);
    }
    table.render()
}

fn copy_facts(view: &CopyView) -> String {
    facts(&[
        ("name", view.name.to_string()),
        ("source", view.source.to_string()),
        ("target", view.target.to_string()),
        ("state", state(view)),
        ("done", format!("{} ({} of {} bytes)", progress(view), view.done, view.bytes)),
        ("rate", rate(view)),
        ("moved", Size(view.moved).approximate()),
        ("by the system", Size(view.offloaded).approximate()),
        ("skipped", Size(view.skipped).approximate()),
    ])
}
