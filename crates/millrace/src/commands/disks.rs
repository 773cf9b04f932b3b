//! Disks: volumes that other volumes share. What is said of volumes is said of them.

use std::error::Error;

use millrace_control::{Size, VolumeSpec, VolumeView};

use super::{Done, client, show, volume_called, volume_state};
use crate::{
    cli::{DiskCommand, DiskCreate, Global, VolumeCommand},
    client::{ClientError, segment},
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
            volume_called("disk", global, VolumeCommand::Show { name, history: false })
        }
        DiskCommand::Resize(resize) => {
            let shrink = if resize.shrink { " --shrink" } else { "" };
            check_disk(global, &resize.name, &format!("resize {} {}{shrink}", resize.name, resize.size()))?;
            volume_called("disk", global, VolumeCommand::Resize(resize))
        }
        DiskCommand::Release { name, volume: given_up } => {
            find(global, &name)?;
            let (service, command, arguments) = ("disk".to_owned(), "release".to_owned(), vec![format!("name={given_up}")]);
            volume_called("disk", global, VolumeCommand::Command { name, service, command, arguments })
        }
        DiskCommand::Delete { name } => {
            check_disk(global, &name, &format!("delete {name}"))?;
            volume_called("disk", global, VolumeCommand::Delete { name })
        }
    }
}

/// The volume of this name, for who has called it a disk.
fn find(global: &Global, name: &str) -> Result<VolumeView, Box<dyn Error>> {
    client(global)?.get(&format!("/v1/volumes/{}", segment(name))).map_err(|error| match error {
        ClientError::Refused(problem) if problem.code == "no-volume" => {
            format!("disk {name} does not exist; \"millrace disk list\" shows what there is").into()
        }
        error => error.into(),
    })
}

/// What is said of disks is not done to other volumes: whoever takes one for a disk means another one.
fn check_disk(global: &Global, name: &str, command: &str) -> Done {
    if find(global, name)?.stack.is_disk() {
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

/// What no volume has. A daemon from before it was a number tells it as a fact.
fn free(view: &VolumeView) -> String {
    let Some(status) = &view.tree.status else { return "-".to_owned() };
    let told = || status.facts.iter().find(|(name, _)| name == "free").map(|(_, value)| value.clone());
    status.room.map(|room| Size(room.free).approximate()).or_else(told).unwrap_or_else(|| "-".to_owned())
}

pub(super) fn table(views: &[VolumeView]) -> String {
    let mut table = Table::new(&["NAME", "SIZE", "FREE", "VOLUMES", "STACK", "STATE"]);
    for view in views {
        let facts = view.tree.status.as_ref().map(|status| &status.facts[..]).unwrap_or_default();
        table.row([
            view.name.to_string(),
            view.size.approximate(),
            free(view),
            facts.iter().filter(|(name, _)| name.starts_with("volume ")).count().to_string(),
            view.stack.to_string(),
            volume_state(view),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use millrace_control::State;
    use millrace_services::{Room, Status};

    use super::*;
    use crate::commands::tests::volume;

    #[test]
    fn what_is_free_is_told_in_one_unit() {
        let shown = |room, fact: &str| {
            let mut view: VolumeView = serde_json::from_str(&volume("disk | null", None, State::Ready)).unwrap();
            let told = Status::good([("free", fact.to_owned())]);
            view.tree.status = Some(Status { room, ..told });
            table(&[view])
        };
        let room = Room { free: (96 << 20) + 4096, total: 1 << 30 };
        let told = shown(Some(room), "100667392 bytes of 1024 MiB");
        assert!(told.contains(" 96M ") && !told.contains("bytes"), "{told}");
        // As a daemon before this one tells it.
        let told = shown(None, "96 MiB of 1024 MiB");
        assert!(told.contains(" 96 MiB of 1024 MiB "), "{told}");
    }
}
