//! Groups: caps and weights that volumes have together.

use millrace_control::{GroupCaps, GroupView, Name};
use serde_json::json;

use super::{Done, client, dash, show};
use crate::{
    Misuse,
    cli::{Global, GroupCommand},
    client::segment,
    output::{Table, facts},
};

/// Does what is said of groups.
pub(crate) fn group(global: &Global, command: GroupCommand) -> Done {
    let client = client(global)?;
    let path = |name: &str| format!("/v1/groups/{}", segment(name));
    match command {
        GroupCommand::Create(create) => {
            let view: GroupView = client.post("/v1/groups", &create.spec())?;
            show(global, &view, |view| {
                let has = summary(view);
                // A weight alone counts on a disk only.
                let way = if view.caps.is_empty() {
                    format!("create VOLUME --size SIZE --stack \"share(group={}) | volume:DISK\"", view.name)
                } else {
                    format!("insert VOLUME \"throttle(group={})\"", view.name)
                };
                format!("group {}: {has}\nvolumes in it: millrace volume {way}", view.name)
            })
        }
        GroupCommand::List => {
            let views: Vec<GroupView> = client.get("/v1/groups")?;
            show(global, &views, |views| table(views))
        }
        GroupCommand::Show { name } => show(global, &client.get(&path(&name))?, described),
        GroupCommand::Change(set) => {
            let path = path(&set.name);
            let view: GroupView = client.patch(&path, &set.change().map_err(Misuse)?)?;
            show(global, &view, |view| format!("group {}: {}", view.name, summary(view)))
        }
        GroupCommand::Delete { name } => {
            client.delete(&path(&name))?;
            show(global, &json!({ "deleted": name }), |_| format!("group {name} deleted"))
        }
    }
}

/// Caps, or a dash.
pub(super) fn caps(caps: &GroupCaps) -> String {
    let caps = caps.settings().into_iter().map(|(name, value)| format!("{name}={value}"));
    dash(caps.collect::<Vec<_>>().join(", "))
}

/// Its caps and its weight.
fn summary(view: &GroupView) -> String {
    format!("{}; weight {}", caps(&view.caps), view.weight)
}

fn names(names: &[Name]) -> String {
    dash(names.iter().map(Name::to_string).collect::<Vec<_>>().join(" "))
}

fn within(view: &GroupView) -> String {
    dash(view.within.as_ref().map(Name::to_string).unwrap_or_default())
}

fn table(views: &[GroupView]) -> String {
    let mut table = Table::new(&["NAME", "WITHIN", "CAPS", "WEIGHT", "VOLUMES", "HELD BACK"]);
    for view in views {
        let (weight, volumes) = (view.weight.to_string(), view.volumes.len().to_string());
        table.row([view.name.to_string(), within(view), caps(&view.caps), weight, volumes, view.held_back.to_string()]);
    }
    table.render()
}

fn described(view: &GroupView) -> String {
    facts(&[
        ("name", view.name.to_string()),
        ("within", within(view)),
        ("caps", caps(&view.caps)),
        ("weight", view.weight.to_string()),
        ("volumes", names(&view.volumes)),
        ("groups", names(&view.groups)),
        ("held back", format!("{} requests", view.held_back)),
    ])
}
