//! Copies of volumes.

use std::{error::Error, thread, time::Duration};

use millrace_control::{CopyChange, CopySpec, CopyState, CopyView, Size};
use serde_json::json;

use super::{Done, client, show};
use crate::{
    Misuse,
    cli::{CopyArgs, CopyCommand, Global},
    client::{Client, ClientError, segment},
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
    if wait {
        view = ended(client, view, LOOK)?;
    }
    if view.state == CopyState::Failed {
        return Err(format!("copy {}: {}", view.name, view.reason.unwrap_or_default()).into());
    }
    show(global, &view, line)
}

/// Waits until a copy has ended. One that is paused is not there yet: somebody may have it go on.
fn ended(client: &Client, mut view: CopyView, look: Duration) -> Result<CopyView, Box<dyn Error>> {
    while matches!(view.state, CopyState::Running | CopyState::Paused) {
        thread::sleep(look);
        view = client.get(&path(view.name.as_str())).map_err(|error| lost(&view, error))?;
    }
    Ok(view)
}

/// Why a copy that was under way is not waited for any more.
fn lost(CopyView { name, .. }: &CopyView, error: ClientError) -> Box<dyn Error> {
    match error {
        ClientError::Refused(problem) if problem.code == "no-copy" => {
            format!("copy {name} was cancelled: its target may hold a part of it only").into()
        }
        error => error.while_waiting(&format!("copy {name}"), &format!("millrace copy show {name}")),
    }
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

#[cfg(test)]
mod tests {
    use std::slice;

    use serde_json::Value;

    use super::*;
    use crate::commands::tests::daemon;

    fn view(state: &str) -> Value {
        json!({
            "name": "c", "source": "a", "target": "b", "state": state, "reason": null, "rate": null,
            "bytes": 4096, "done": 0, "moved": 0, "offloaded": 0, "skipped": 0,
        })
    }

    /// What is said of a copy by a daemon that answers so and ends then.
    fn waited(answers: &[(u16, Value)]) -> Result<CopyState, String> {
        let folder = tempfile::tempdir().unwrap();
        let daemon = daemon(folder.path(), answers.iter().map(|(status, body)| (*status, body.to_string())).collect());
        let first = serde_json::from_value(view("running")).unwrap();
        let ended = ended(&Client::new(folder.path()).unwrap(), first, Duration::ZERO);
        daemon.join().unwrap();
        ended.map(|view| view.state).map_err(|error| error.to_string())
    }

    /// What has not failed is not called so.
    #[test]
    fn a_copy_is_waited_for_and_who_waits_is_told_why_it_is_not() {
        let running = (200, view("running"));
        assert_eq!(waited(&[(200, view("paused")), running.clone(), (200, view("done"))]), Ok(CopyState::Done));
        let ended = waited(slice::from_ref(&running)).unwrap_err();
        assert!(ended.contains("the daemon has ended") && ended.contains("copy c goes on when it is back"), "{ended}");
        let stopping = (503, json!({ "code": "stopping", "status": 503, "detail": "the daemon is stopping" }));
        let ended = waited(&[running.clone(), stopping]).unwrap_err();
        assert!(ended.contains("\"millrace copy show c\"") && ended.ends_with("the daemon is stopping"), "{ended}");
        let gone = (404, json!({ "code": "no-copy", "status": 404, "detail": "copy c does not exist" }));
        let cancelled = waited(&[running, gone]).unwrap_err();
        assert!(cancelled.starts_with("copy c was cancelled"), "{cancelled}");
    }
}
