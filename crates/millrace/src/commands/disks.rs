//! Disks: volumes that other volumes share. What is said of volumes is said of them.

use millrace_control::{VolumeSpec, VolumeView};

use super::{Done, client, show, volume, volume_state};
use crate::{
    cli::{DiskCommand, DiskCreate, Global, VolumeCommand},
    client::segment,
    output::Table,
};

/// Does what is said of disks.
pub(crate) fn disk(global: &Global, command: DiskCommand) -> Done {
    match command {
        DiskCommand::Create(create) => make(global, &create),
        DiskCommand::List => {
            let mut views: Vec<VolumeView> = client(global)?.get("/v1/volumes")?;
            views.retain(|view| view.stack.is_disk());
            show(global, &views, |views| table(views))
        }
        DiskCommand::Show { name } => {
            check_disk(global, &name, &format!("show {name}"))?;
            volume(global, VolumeCommand::Show { name, history: false })
        }
        DiskCommand::Resize(resize) => {
            let shrink = if resize.shrink { " --shrink" } else { "" };
            check_disk(global, &resize.name, &format!("resize {} {}{shrink}", resize.name, resize.size()))?;
            volume(global, VolumeCommand::Resize(resize))
        }
        DiskCommand::Release { name, volume: given_up } => {
            let (service, command) = ("disk".to_owned(), "release".to_owned());
            volume(global, VolumeCommand::Command { name, service, command, arguments: vec![format!("name={given_up}")] })
        }
        DiskCommand::Delete { name } => {
            check_disk(global, &name, &format!("delete {name}"))?;
            volume(global, VolumeCommand::Delete { name })
        }
    }
}

/// What is said of disks is not done to other volumes: whoever takes one for a disk means another one.
fn check_disk(global: &Global, name: &str, command: &str) -> Done {
    let view: VolumeView = client(global)?.get(&format!("/v1/volumes/{}", segment(name)))?;
    if view.stack.is_disk() {
        return Ok(());
    }
    Err(format!("{name} is no disk; for a volume it is \"millrace volume {command}\"").into())
}

fn make(global: &Global, create: &DiskCreate) -> Done {
    let DiskCreate { name, size, block_size, .. } = create;
    let (name, stack) = (name.clone(), create.stack()?);
    let spec = VolumeSpec { name, size: *size, stack, block_size: *block_size, read_only: false, uuid: None };
    let view: VolumeView = client(global)?.post("/v1/volumes", &spec)?;
    show(global, &view, |view| {
        format!(
            "disk {0}: {1} on {2}\nvolumes of it: millrace volume create NAME --size SIZE --stack \"share | volume:{0}\"",
            view.name, view.size, view.stack
        )
    })
}

pub(super) fn table(views: &[VolumeView]) -> String {
    let mut table = Table::new(&["NAME", "SIZE", "FREE", "VOLUMES", "STACK", "STATE"]);
    for view in views {
        let facts = view.tree.status.as_ref().map(|status| &status.facts[..]).unwrap_or_default();
        let free = facts.iter().find(|(name, _)| name == "free").map_or("-", |(_, value)| value);
        table.row([
            view.name.to_string(),
            view.size.approximate(),
            free.to_owned(),
            facts.iter().filter(|(name, _)| name.starts_with("volume ")).count().to_string(),
            view.stack.to_string(),
            volume_state(view),
        ]);
    }
    table.render()
}
