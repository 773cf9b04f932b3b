//! Commands that ask the daemon.

use std::{
    error::Error,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, fchown},
    path::Path,
};

use millrace_control::{
    AttachSpec, DeviceSpec, DeviceView, EMPTIED, HistoryEntry, NamespaceView, ServiceAnswer, ServiceCommand, ShardView,
    Size, State, Status, VolumeChange, VolumeSpec, VolumeView, WorkerView,
};
use millrace_services::Leaf;
use serde_json::{Value, json};

use crate::{
    Misuse,
    cli::{DeviceCommand, DeviceCreate, Global, VolumeCommand, VolumeCreate},
    client::{Client, segment},
    output::{self, Table, facts},
    serve::how_to_connect,
};

mod apps;
mod copies;
mod disks;
mod groups;
mod migrations;
mod stacks;
mod traces;
mod upgrade;
mod usage;

pub(crate) use apps::app;
pub(crate) use copies::copy;
pub(crate) use disks::disk;
pub(crate) use groups::group;
pub(crate) use traces::{analyze, trace};
pub(crate) use upgrade::{layouts, upgrade};
pub(crate) use usage::usage;

type Done = Result<(), Box<dyn Error>>;

fn client(global: &Global) -> Result<Client, Box<dyn Error>> {
    Ok(Client::new(&global.run_dir())?)
}

/// Prints a result in the form that was asked for.
fn show<T: serde::Serialize>(global: &Global, value: &T, text: impl FnOnce(&T) -> String) -> Done {
    if global.json { output::json(value) } else { output::line(&text(value)) }
}

pub(crate) fn volume(global: &Global, command: VolumeCommand) -> Done {
    volume_called("volume", global, command)
}

/// The same, of what is called so to whoever asked: a disk is a volume, too.
fn volume_called(kind: &str, global: &Global, command: VolumeCommand) -> Done {
    let client = client(global)?;
    let path = |name: &str| format!("/v1/volumes/{}", segment(name));
    match command {
        VolumeCommand::Create(create) => {
            let view: VolumeView = client.post("/v1/volumes", &volume_spec(create)?)?;
            show(global, &view, |view| {
                let warning = view.warning.as_ref().map(|warning| format!("\nwarning: {warning}")).unwrap_or_default();
                format!("volume {}: {} on {}{warning}", view.name, view.size, view.stack)
            })
        }
        VolumeCommand::List => {
            let views: Vec<VolumeView> = client.get("/v1/volumes")?;
            show(global, &views, |views| volume_table(views))
        }
        VolumeCommand::Show { name, history: false } => show(global, &client.get(&path(&name))?, volume_facts),
        VolumeCommand::Show { name, history: true } => {
            let entries: Vec<HistoryEntry> = client.get(&format!("{}/history", path(&name)))?;
            show(global, &entries, |entries| stacks::history(entries))
        }
        VolumeCommand::Change(change) => stacks::changed(global, stacks::change(&client, change)),
        VolumeCommand::Insert { name, service } => stacks::changed(global, stacks::insert(&client, &name, &service)),
        VolumeCommand::Remove { name, service } => stacks::changed(global, stacks::remove(&client, &name, &service)),
        VolumeCommand::Replace { name, old, new, reformat } => {
            stacks::changed(global, stacks::replace(&client, &name, (&old, &new), reformat))
        }
        VolumeCommand::Migrate(args) => migrations::migrate(global, &client, args),
        VolumeCommand::Command { name, service, command, arguments } => {
            let arguments = stacks::arguments(&arguments).map_err(Misuse)?;
            let command = ServiceCommand { service, command, arguments };
            let answer: ServiceAnswer = client.post(&format!("{}/commands", path(&name)), &command)?;
            show(global, &answer, |answer| answer.answer.clone())
        }
        VolumeCommand::Services => stacks::services(global),
        VolumeCommand::Resize(resize) => {
            let (size, shrink) = (Some(resize.size()), resize.shrink);
            let view: VolumeView =
                client.patch(&path(&resize.name), &VolumeChange { size, shrink, ..VolumeChange::default() })?;
            show(global, &view, |view| format!("{kind} {}: {}", view.name, view.size))
        }
        VolumeCommand::Delete { name } => {
            let view: VolumeView = client.get(&path(&name))?;
            client.delete(&path(&name))?;
            let files = view.stack.leaves().into_iter().filter_map(Leaf::file).filter(|file| file.exists());
            let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
            show(global, &json!({ "deleted": name }), |_| match files.len() {
                0 => format!("{kind} {name} deleted"),
                1 => format!("{kind} {name} deleted; {} stays", files[0]),
                _ => format!("{kind} {name} deleted; {} stay", files.join(", ")),
            })
        }
    }
}

fn volume_spec(create: VolumeCreate) -> Result<VolumeSpec, Box<dyn Error>> {
    // The daemon may run elsewhere: a relative path is ours.
    let stack = create.stack().resolved(&std::env::current_dir()?);
    let VolumeCreate { name, size, block_size, read_only, uuid, .. } = create;
    Ok(VolumeSpec { name, size, stack, block_size, read_only, uuid })
}

fn state(state: State, reason: Option<&String>) -> String {
    match (state, reason) {
        (State::Ready, _) => "ready".to_owned(),
        (State::Failed, Some(reason)) => format!("failed: {reason}"),
        (State::Failed, None) => "failed".to_owned(),
    }
}

/// How a volume is, and what of it is not well.
fn volume_state(view: &VolumeView) -> String {
    match (view.state, &view.unwell) {
        (State::Ready, Some(what)) => format!("{}: {what}", view.health),
        (is, _) => state(is, reason(view).as_ref()),
    }
}

fn attached_to(view: &VolumeView) -> String {
    let users = view.attached_to.iter().map(|user| format!("{}:{}", user.device, user.nsid));
    users.collect::<Vec<_>>().join(" ")
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

fn allocated(view: &VolumeView) -> String {
    view.allocated.map_or("-".to_owned(), |bytes| Size(bytes).approximate())
}

fn volume_table(views: &[VolumeView]) -> String {
    let mut table = Table::new(&["NAME", "SIZE", "USED", "BLOCK", "STACK", "ATTACHED TO", "STATE"]);
    for view in views {
        let read_only = if view.read_only { " (read-only)" } else { "" };
        table.row([
            view.name.to_string(),
            view.size.approximate(),
            allocated(view),
            u32::from(view.block_size).to_string(),
            format!("{}{read_only}", view.stack),
            dash(attached_to(view)),
            volume_state(view),
        ]);
    }
    table.render()
}

/// Why a volume has failed, without its name: that stands before it.
fn reason(view: &VolumeView) -> Option<String> {
    let itself = format!("volume {}: ", view.name);
    view.reason.as_ref().map(|reason| reason.strip_prefix(&*itself).unwrap_or(reason).to_owned())
}

/// What to do about what could not be opened.
const REOPENED: &str = "put right what it says; what could not be opened then opens by \"millrace upgrade\" (to the same binary: guests go on; \
     a change of the configuration counts from a restart on)";

fn volume_facts(view: &VolumeView) -> String {
    let reason = reason(view);
    let mut list = vec![("name", view.name.to_string()), ("state", volume_state(view))];
    list.extend(reason.filter(|why| !why.contains(EMPTIED)).map(|_| ("to do", REOPENED.to_owned())));
    list.extend([
        ("size", format!("{} ({} bytes)", view.size, view.size.0)),
        ("used", allocated(view)),
        ("block size", u32::from(view.block_size).to_string()),
        ("stack", view.stack.to_string()),
        ("read-only", view.read_only.to_string()),
        ("uuid", view.uuid.clone()),
        ("attached to", dash(attached_to(view))),
    ]);
    if let Some(device) = &view.created_by {
        list.push(("created by", format!("the guest of {device}")));
    }
    if let Some(migration) = &view.migration {
        list.push(("migrating", migrations::progress(migration)));
    }
    if view.stack.as_leaf().is_some() {
        return facts(&list);
    }
    format!("{}\n\n{}", facts(&list), stacks::tree(&view.tree))
}

pub(crate) fn device(global: &Global, command: DeviceCommand) -> Done {
    let client = client(global)?;
    let path = |name: &str| format!("/v1/devices/{}", segment(name));
    match command {
        DeviceCommand::Create(create) => {
            let view = create_device(&client, *create)?;
            show(global, &view, |view| format!("device {}: {}\n{}", view.name, view.socket.display(), how_to_connect(view)))
        }
        DeviceCommand::Attach { name, volume, nsid, read_only } => {
            let spec = AttachSpec { volume, nsid, read_only };
            let view: NamespaceView = client.post(&format!("{}/namespaces", path(&name)), &spec)?;
            show(global, &view, |view| format!("device {name}: namespace {} is volume {}", view.nsid, view.volume))
        }
        DeviceCommand::Detach { name, namespace, nsid } => {
            let nsid = match nsid {
                Some(nsid) => nsid,
                None => find_namespace(&client.get(&path(&name))?, namespace.as_deref())?,
            };
            client.delete(&format!("{}/namespaces/{nsid}", path(&name)))?;
            show(global, &json!({ "detached": nsid }), |_| format!("device {name}: namespace {nsid} detached"))
        }
        DeviceCommand::List => {
            let views: Vec<DeviceView> = client.get("/v1/devices")?;
            show(global, &views, |views| device_table(views))
        }
        DeviceCommand::Show { name } => show(global, &client.get(&path(&name))?, device_facts),
        DeviceCommand::Save { name, file } => {
            let saved = client.get_text(&format!("{}/state", path(&name)))?;
            replace(&file, |file| file.write_all(&saved)).map_err(|error| format!("{}: {error}", file.display()))?;
            show(global, &json!({ "saved": name, "bytes": saved.len() }), |_| {
                format!("device {name}: its state is in {}", file.display())
            })
        }
        DeviceCommand::Restore { name, file } => {
            let saved = fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            client.put_bytes(&format!("{}/state", path(&name)), saved)?;
            show(global, &json!({ "restored": name }), |_| format!("device {name} waits for its machine with this state"))
        }
        DeviceCommand::Delete { name } => {
            client.delete(&path(&name))?;
            show(global, &json!({ "deleted": name }), |_| format!("device {name} deleted"))
        }
    }
}

/// Writes a file that is durable then, with its name. What was there before is whole until it is, unless nothing can be made beside it. Its mode
/// stays, and its owner where we may give it away.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let fill = |mut file: File| {
        write(&mut file)?;
        file.sync_all()
    };
    // A link stays one.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let before = fs::metadata(&path).ok();
    // A device, for example, is written, and not replaced.
    if before.as_ref().is_some_and(|found| !found.is_file()) {
        return fill(File::create(&path)?);
    }
    let mut new = path.clone().into_os_string();
    new.push(format!(".{}.new", std::process::id()));
    let new = Path::new(&new);
    let file = match File::create_new(new) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return fill(File::create(&path)?),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(io::Error::new(error.kind(), format!("{} is there already; remove it", new.display())));
        }
        Err(error) => return Err(error),
    };
    let kept = before.map_or(Ok(()), |before| {
        let _ = fchown(&file, Some(before.uid()), Some(before.gid()));
        file.set_permissions(before.permissions())
    });
    let placed = kept.and_then(|()| fill(file)).and_then(|()| fs::rename(new, &path));
    if placed.is_err() {
        let _ = fs::remove_file(new);
    }
    placed?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Creates a device, with its first volume where one is named: both or neither.
fn create_device(client: &Client, create: DeviceCreate) -> Result<DeviceView, Box<dyn Error>> {
    let kind = create.kind().map_err(Misuse)?.resolved(&std::env::current_dir()?);
    let socket = create.socket.map(std::path::absolute).transpose()?;
    let spec = DeviceSpec { name: create.name, kind, socket, shard: create.shard, tenant: create.tenant };
    let view: DeviceView = client.post("/v1/devices", &spec)?;
    let Some(volume) = create.volume else { return Ok(view) };
    let path = format!("/v1/devices/{}", segment(view.name.as_str()));
    let attach = AttachSpec { volume, nsid: None, read_only: create.read_only };
    attach_first(client, view.name.as_str(), &path, &attach)?;
    Ok(client.get(&path)?)
}

/// Shows its first volume to a device that was just made. Without that there is to be no device.
fn attach_first(client: &Client, name: &str, path: &str, attach: &AttachSpec) -> Done {
    let attached: Result<NamespaceView, _> = client.post(&format!("{path}/namespaces"), attach);
    let Err(error) = attached else { return Ok(()) };
    match client.delete(path) {
        Ok(()) => Err(error.into()),
        Err(why) => {
            let stays = format!("device {name} stays, without volume {}: {why}", attach.volume);
            Err(format!("{error}; and {stays}; \"millrace device delete {name}\" when that is put right").into())
        }
    }
}

/// The identifier of the namespace that is meant; of a virtio disk's only one where nothing is said.
fn find_namespace(view: &DeviceView, meant: Option<&str>) -> Result<u32, Box<dyn Error>> {
    let (device, shown) = (&view.name, &view.namespaces);
    match meant {
        Some(meant) => meant_namespace(device.as_str(), shown, meant),
        None if view.virtio_blk.is_some() => {
            Ok(shown.first().ok_or_else(|| format!("device {device} shows no volume"))?.nsid)
        }
        None => {
            let shown = listed(shown);
            Err(Misuse(format!("which namespace? give its identifier, or its volume: {shown}")).into())
        }
    }
}

/// The same of a volume's name or an identifier: either may be a number.
fn meant_namespace(device: &str, shown: &[NamespaceView], meant: &str) -> Result<u32, Box<dyn Error>> {
    let number = meant.parse::<u32>().ok();
    let named = shown.iter().find(|namespace| namespace.volume.as_str() == meant);
    let numbered = shown.iter().find(|namespace| Some(namespace.nsid) == number);
    match (named, numbered, number) {
        (Some(named), Some(numbered), _) if named.nsid != numbered.nsid => {
            let (nsid, other) = (named.nsid, &numbered.volume);
            let both = format!("volume {meant} is namespace {nsid}, and namespace {meant} is volume {other}");
            Err(Misuse(format!("device {device}: {both}: say --nsid {nsid}, or --nsid {meant}")).into())
        }
        (Some(named), ..) => Ok(named.nsid),
        // That there is none of this number, the daemon says.
        (None, _, Some(nsid)) => Ok(nsid),
        (None, _, None) => Err(format!("device {device} does not show volume {meant}; it shows {}", listed(shown)).into()),
    }
}

/// Namespaces with their volumes.
fn listed(namespaces: &[NamespaceView]) -> String {
    let namespaces = namespaces.iter().map(|namespace| format!("{}:{}", namespace.nsid, namespace.volume));
    dash(namespaces.collect::<Vec<_>>().join(" "))
}

fn guest(view: &DeviceView) -> String {
    let phase = view.phase.as_deref().unwrap_or("-");
    let what = if view.virtio_blk.is_some() { "disk" } else { "controller" };
    if view.connected { format!("connected, {what} {phase}") } else { "none".to_owned() }
}

fn shard(view: &DeviceView) -> String {
    view.shard.map_or("-".to_owned(), |shard| shard.to_string())
}

fn worker(view: &DeviceView) -> String {
    format!("{} (process {})", view.worker.name, view.worker.pid)
}

fn device_table(views: &[DeviceView]) -> String {
    let mut table = Table::new(&["NAME", "KIND", "WORKER", "SHARD", "GUEST", "NAMESPACES", "SOCKET", "STATE"]);
    for view in views {
        let namespaces = view.namespaces.iter().map(|namespace| match view.virtio_blk {
            Some(_) => namespace.volume.to_string(),
            None => format!("{}:{}", namespace.nsid, namespace.volume),
        });
        table.row([
            view.name.to_string(),
            if view.virtio_blk.is_some() { "virtio-blk" } else { "nvme" }.to_owned(),
            view.worker.name.clone(),
            shard(view),
            guest(view),
            dash(namespaces.collect::<Vec<_>>().join(" ")),
            view.socket.display().to_string(),
            state(view.state, view.reason.as_ref()),
        ]);
    }
    table.render()
}

fn device_facts(view: &DeviceView) -> String {
    let counters = &view.counters;
    let transferred = |commands: u64, bytes: u64| format!("{commands} commands, {}", Size(bytes).approximate());
    let mut list = vec![
        ("name", view.name.to_string()),
        ("state", state(view.state, view.reason.as_ref())),
        ("socket", view.socket.display().to_string()),
        ("worker", worker(view)),
        ("shard", shard(view)),
        ("guest", guest(view)),
        ("serial", view.serial.clone()),
    ];
    list.extend(view.tenant.as_ref().map(|tenant| ("tenant", tenant.to_string())));
    list.extend(view.state_layout.map(|version| ("state layout", version.to_string())));
    list.extend(view.subnqn.as_ref().map(|subnqn| ("subsystem", subnqn.clone())));
    if let Some(nvme) = &view.nvme {
        list.extend([
            ("queues", format!("{} of {} entries, {} vectors", nvme.queues, nvme.queue_entries, nvme.vectors())),
            ("transfer", format!("at most {}", nvme.mdts)),
            ("quota", format!("{} on {}", nvme.ns_quota, nvme.ns_backend.0)),
        ]);
    }
    list.extend(view.virtio_blk.as_ref().map(|disk| ("queues", disk.queues.to_string())));
    list.extend([
        ("read", transferred(counters.read_commands, counters.bytes_read)),
        ("written", transferred(counters.write_commands, counters.bytes_written)),
        ("errors", format!("{} ({} of the medium)", counters.errors, counters.media_errors)),
    ]);
    let mut text = facts(&list);
    if !view.namespaces.is_empty() {
        let mut table = Table::new(&["NSID", "VOLUME", "MODE", "ATTACHED", "STATE"]);
        for namespace in &view.namespaces {
            table.row([
                namespace.nsid.to_string(),
                namespace.volume.to_string(),
                if namespace.read_only { "read-only" } else { "read-write" }.to_owned(),
                if namespace.attached { "yes" } else { "no, by the guest" }.to_owned(),
                state(namespace.state, namespace.reason.as_ref()),
            ]);
        }
        text = format!("{text}\n\n{}", table.render());
    }
    text
}

pub(crate) fn status(global: &Global) -> Done {
    let status: Status = client(global)?.get("/v1/status")?;
    show(global, &status, status_text)
}

fn status_text(status: &Status) -> String {
    let state_dir = status.state_dir.as_ref().map_or("none".to_owned(), |path| path.display().to_string());
    let overview = facts(&[
        ("version", status.version.clone()),
        ("process", format!("{}, running for {} s", status.pid, status.uptime_seconds)),
        ("run directory", status.run_dir.display().to_string()),
        ("state directory", state_dir),
        ("volumes", status.volumes.to_string()),
        ("devices", format!("{}, {} with a guest", status.devices, status.connected)),
    ]);
    let mut table = Table::new(&["SHARD", "DEVICES", "BUSY", "COMMANDS", "TASKS"]);
    for ShardView { index, devices, busy_permille, commands, tasks_waiting, .. } in &status.shards {
        let busy = format!("{}.{} %", busy_permille / 10, busy_permille % 10);
        table.row([index.to_string(), devices.to_string(), busy, commands.to_string(), tasks_waiting.to_string()]);
    }
    let mut lines = vec![overview, String::new(), table.render()];
    if status.workers.len() > 1 {
        let mut table = Table::new(&["WORKER", "PROCESS", "VOLUMES", "DEVICES", "GUESTS"]);
        for worker in &status.workers {
            let WorkerView { name, pid, volumes, devices, connected, .. } = worker;
            table.row([name.clone(), pid.to_string(), volumes.to_string(), devices.to_string(), connected.to_string()]);
        }
        lines.extend([String::new(), table.render()]);
    }
    lines.extend(status.upgrade.iter().map(|view| format!("last upgrade: {}", upgrade::text(view))));
    lines.extend(status.failed.iter().map(|failed| format!("failed: {failed}")));
    let opens =
        |failed: &String| ["volume ", "device "].iter().any(|kind| failed.starts_with(kind)) && !failed.contains(EMPTIED);
    if status.failed.iter().any(opens) {
        lines.push(format!("to do: {REOPENED}"));
    }
    lines.extend(status.degraded.iter().map(|degraded| format!("degraded: {degraded}")));
    if !status.degraded.is_empty() {
        lines.push("to do: \"millrace volume show NAME\" tells more of it".to_owned());
    }
    lines.join("\n")
}

pub(crate) fn metrics(global: &Global) -> Done {
    let client = client(global)?;
    if !global.json {
        return output::bytes(&client.get_text("/metrics")?);
    }
    let [volumes, devices, copies, groups, status] =
        ["volumes", "devices", "copies", "groups", "status"].map(|kind| client.get::<Value>(&format!("/v1/{kind}")));
    let status = status?;
    output::json(&json!({
        "volumes": volumes?,
        "devices": devices?,
        "copies": copies?,
        "groups": groups?,
        "shards": status["shards"],
        "workers": status["workers"],
    }))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
        thread,
    };

    use millrace_control::{API_SOCKET, LogicalBlock, MigrationView};
    use millrace_services::graph::Tree;

    use super::*;

    /// Somebody who gives these answers, one after the other, and tells at the end what was asked for.
    pub(super) fn daemon(folder: &Path, answers: Vec<(u16, String)>) -> thread::JoinHandle<Vec<Value>> {
        let listener = UnixListener::bind(folder.join(API_SOCKET)).unwrap();
        let answer = move |(status, body): (u16, String)| {
            let (mut stream, _) = listener.accept().unwrap();
            let asked = asked(&mut stream);
            write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
            asked
        };
        thread::spawn(move || answers.into_iter().map(answer).collect())
    }

    /// The body of a request.
    fn asked(stream: &mut UnixStream) -> Value {
        let mut bytes = Vec::new();
        loop {
            let mut more = [0; 4096];
            let length = stream.read(&mut more).unwrap();
            assert!(length > 0, "a request that breaks off");
            bytes.extend_from_slice(&more[..length]);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let head = head.to_ascii_lowercase();
            let expected: Option<usize> = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= expected.unwrap_or(0) {
                return serde_json::from_str(body).unwrap_or_default();
            }
        }
    }

    /// Volume v, with this stack.
    pub(super) fn volume(stack: &str, migration: Option<MigrationView>, state: State) -> String {
        let stack: millrace_services::Node = stack.parse().unwrap();
        let view = VolumeView {
            name: "v".parse().unwrap(),
            tree: Tree::of(&stack),
            stack,
            size: Size(1 << 20),
            block_size: LogicalBlock::default(),
            read_only: false,
            allocated: None,
            uuid: String::new(),
            created_by: None,
            state,
            reason: (state == State::Failed).then(|| "no such file".to_owned()),
            health: millrace_services::Health::Good,
            unwell: None,
            attached_to: Vec::new(),
            migration,
            warning: None,
        };
        serde_json::to_string(&view).unwrap()
    }

    /// What is said of a device whose volume is refused.
    fn refused(answers: &'static [(u16, &'static str)]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let answers = answers.iter().map(|&(status, body)| (status, body.to_owned())).collect();
        let daemon = daemon(folder.path(), answers);
        let client = Client::new(folder.path()).unwrap();
        let attach = AttachSpec { volume: "v".parse().unwrap(), nsid: None, read_only: false };
        let error = attach_first(&client, "d", "/v1/devices/d", &attach).unwrap_err().to_string();
        daemon.join().unwrap();
        error
    }

    /// What is detached from a device that shows these volumes.
    fn meant(shown: &[(u32, &str)], meant: &str) -> Result<u32, String> {
        let view = |&(nsid, volume): &(u32, &str)| NamespaceView {
            nsid,
            volume: volume.parse().unwrap(),
            read_only: false,
            attached: true,
            created_by_guest: false,
            state: State::Ready,
            reason: None,
        };
        let shown: Vec<_> = shown.iter().map(view).collect();
        meant_namespace("d", &shown, meant).map_err(|error| error.to_string())
    }

    #[test]
    fn a_volume_that_is_named_by_digits_is_detached_by_its_name() {
        let shown = [(1, "101"), (2, "data"), (3, "3")];
        for (given, nsid) in [("101", 1), ("1", 1), ("data", 2), ("2", 2), ("3", 3), ("77", 77)] {
            assert_eq!(meant(&shown, given), Ok(nsid), "{given}");
        }
        assert!(meant(&shown, "none").unwrap_err().ends_with("it shows 1:101 2:data 3:3"));
        let both = meant(&[(1, "101"), (101, "backup")], "101").unwrap_err();
        for said in ["volume 101 is namespace 1,", "volume backup", "--nsid 1,", "--nsid 101"] {
            assert!(both.contains(said), "{said}: {both}");
        }
    }

    #[test]
    fn a_volume_that_has_failed_is_named_once() {
        let mut view: VolumeView = serde_json::from_str(&volume("disk | file:/v.img", None, State::Failed)).unwrap();
        view.reason = Some("volume v: cannot open /v.img: No such file".to_owned());
        let views = [view];
        for told in [volume_table(&views), disks::table(&views), volume_facts(&views[0])] {
            assert!(told.contains("failed: cannot open /v.img") && !told.contains("volume v"), "{told}");
        }
    }

    #[test]
    fn a_volume_that_is_degraded_is_listed_as_such() {
        let mut view: VolumeView = serde_json::from_str(&volume("disk | file:/v.img", None, State::Ready)).unwrap();
        (view.health, view.unwell) = (millrace_services::Health::Degraded, Some("mirror: leg 1 failed".to_owned()));
        let views = [view];
        for told in [volume_table(&views), disks::table(&views), volume_facts(&views[0])] {
            assert!(told.contains("degraded: mirror: leg 1 failed") && !told.contains("ready"), "{told}");
        }
    }

    #[test]
    fn what_has_failed_comes_with_what_to_do() {
        let mut status = Status {
            version: String::new(),
            pid: 1,
            uptime_seconds: 1,
            run_dir: "/run".into(),
            state_dir: None,
            shards: Vec::new(),
            volumes: 1,
            devices: 0,
            connected: 0,
            failed: vec!["volume v: cannot open /v.img: No such file".to_owned()],
            degraded: Vec::new(),
            upgrade: None,
            workers: Vec::new(),
        };
        let told = status_text(&status);
        assert!(told.ends_with(&format!("No such file\nto do: {REOPENED}")), "{told}");
        let emptied = format!("volume v: it holds no mirror; {EMPTIED}: delete it");
        for failed in [vec!["copy c: its target is full".to_owned()], vec![emptied], Vec::new()] {
            status.failed = failed;
            assert!(!status_text(&status).contains("to do"));
        }
        status.degraded = vec!["volume v: mirror: leg 1 failed".to_owned()];
        assert!(status_text(&status).contains("leg 1 failed\nto do: \"millrace volume show NAME\""));
        // Always there, for programs.
        status.degraded.clear();
        assert!(json!(status)["degraded"].as_array().is_some_and(Vec::is_empty));
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm0.state");
        replace(&path, |file| file.write_all(b"first")).unwrap();
        let full = replace(&path, |file| {
            file.write_all(b"sec")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!((fs::read(&path).unwrap(), fs::read_dir(folder.path()).unwrap().count()), (b"first".to_vec(), 1));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        replace(&link, |file| file.write_all(b"third")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink() && fs::read(&path).unwrap() == b"third");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_mode_and_leaves_what_is_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, beside) = (folder.path().join("vm0.state"), folder.path().join("vm0.state.new"));
        fs::write(&path, "first").unwrap();
        fs::write(&beside, "precious").unwrap();
        let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        for kept in [0o600, 0o644] {
            mode(kept);
            replace(&path, |file| file.write_all(b"second")).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, kept);
        }
        replace(&path, |_| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!((fs::read(&path).unwrap(), fs::read(&beside).unwrap()), (b"second".to_vec(), b"precious".to_vec()));
        // Where nothing can be made it is written as it is.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
        replace(&path, |file| file.write_all(b"third")).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read_dir(folder.path()).unwrap().count()), (b"third".to_vec(), 2));
    }

    #[test]
    fn a_device_that_could_not_be_taken_back_is_told_of_with_what_led_to_it() {
        const NO_VOLUME: (u16, &str) = (409, r#"{"code":"c","status":409,"detail":"not this"}"#);
        const TOO_LATE: (u16, &str) = (503, r#"{"code":"c","status":503,"detail":"not that"}"#);
        let taken_back = refused(&[NO_VOLUME, (204, "")]);
        assert!(taken_back.contains("not this") && !taken_back.contains("device d"), "{taken_back}");
        let stays = refused(&[NO_VOLUME, TOO_LATE]);
        for said in ["not this", "not that", "device d stays", "\"millrace device delete d\""] {
            assert!(stays.contains(said), "{said}: {stays}");
        }
    }
}
