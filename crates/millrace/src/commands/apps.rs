//! Who may open volumes through libmillrace.

use std::{fs, os::unix::fs::PermissionsExt};

use millrace_control::{AppSource, AppView};
use serde_json::json;

use super::{Done, client, groups::caps, show};
use crate::{
    Misuse,
    cli::{AppCommand, Global},
    output::{Table, facts},
};

/// Does what is said of users' programs.
pub(crate) fn app(global: &Global, command: AppCommand) -> Done {
    let client = client(global)?;
    let path = |user: u32| format!("/v1/apps/{user}");
    match command {
        AppCommand::Create(create) => {
            let view: AppView = client.post("/v1/apps", &create.app().map_err(Misuse)?)?;
            show(global, &view, |view| format!("{}{}", summary(view), way_in(global)))
        }
        AppCommand::List => {
            let views: Vec<AppView> = client.get("/v1/apps")?;
            show(global, &views, |views| table(views))
        }
        AppCommand::Show { user } => show(global, &client.get(&path(user))?, described),
        AppCommand::Change(set) => {
            let view: AppView = client.patch(&path(set.user), &set.change())?;
            show(global, &view, summary)
        }
        AppCommand::Delete { user } => {
            client.delete(&path(user))?;
            show(global, &json!({ "deleted": user }), |_| format!("user {user} may open nothing any more"))
        }
    }
}

/// What the operator has to do beside, where the run directory keeps everybody else out.
fn way_in(global: &Global) -> String {
    let run_dir = global.run_dir();
    let is_shut = fs::metadata(&run_dir).is_ok_and(|found| found.permissions().mode() & 0o001 == 0);
    let path = run_dir.display();
    if is_shut { format!("\n{path} lets nobody else through yet: chmod 711 {path}") } else { String::new() }
}

fn mode(view: &AppView) -> &'static str {
    if view.read_only { "read-only" } else { "read-write" }
}

fn source(view: &AppView) -> &'static str {
    match view.source {
        AppSource::File => "the configuration file",
        AppSource::Command => "a command",
    }
}

fn summary(view: &AppView) -> String {
    let AppView { uid, sessions, open, .. } = view;
    let caps = if view.caps.is_empty() { String::new() } else { format!("; together {}", caps(&view.caps)) };
    format!("user {uid}: {}, {}, {sessions} at a time, {open} open{caps}", view.volumes.join(" "), mode(view))
}

fn table(views: &[AppView]) -> String {
    let mut table = Table::new(&["USER", "VOLUMES", "MODE", "OPEN", "AT MOST", "CAPS", "HELD BACK", "SAID BY"]);
    for view in views {
        let (open, sessions) = (view.open.to_string(), view.sessions.to_string());
        let (mode, source) = (mode(view).to_owned(), source(view).to_owned());
        let (caps, held_back) = (caps(&view.caps), view.held_back.to_string());
        table.row([view.uid.to_string(), view.volumes.join(" "), mode, open, sessions, caps, held_back, source]);
    }
    table.render()
}

fn described(view: &AppView) -> String {
    facts(&[
        ("user", view.uid.to_string()),
        ("volumes", view.volumes.join(" ")),
        ("mode", mode(view).to_owned()),
        ("sessions", format!("{} of {}", view.open, view.sessions)),
        ("caps", caps(&view.caps)),
        ("held back", format!("{} requests", view.held_back)),
        ("said by", source(view).to_owned()),
    ])
}
