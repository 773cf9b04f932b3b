//! The daemon, and one disk without it.

use std::{
    error::Error,
    ffi::{OsStr, OsString},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf, absolute},
};

use millrace_control::{
    API_SOCKET, Declared, DeviceKind, DeviceSpec, DeviceView, FileSettings, ForegroundDisk, Name, ServeOptions, VolumeSpec,
};
use millrace_keeper::{Keeper, Outcome};
use millrace_sandbox::{Group, Policy, Sandbox, harden_keeper};

use crate::{
    cli::{Global, NvmeCommand, ServeArgs},
    logging, notify, output,
};

/// In the environment of workers: what they give up.
const POLICY: &str = "MILLRACE_SANDBOX";
/// In the environment of workers, and of cells' keepers: the settings of the configuration file when the daemon was started.
const SETTINGS: &str = "MILLRACE_SETTINGS";

/// The keeper: runs a worker, and runs another when it dies (docs/survival.md).
pub(crate) fn serve(global: &Global, args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    // Wrong settings are told by the worker, but for what is the keeper's own.
    let place = |path: &PathBuf| path.canonicalize().map_err(|error| format!("--upgrade-from {}: {error}", path.display()));
    let places = args.upgrade_from.iter().map(place).collect::<Result<_, _>>()?;
    let (words, run_dir) = (worker_words(std::env::args_os()), global.run_dir());
    let declared = declared(args);
    let settings = settings(args, declared.as_ref())?;
    let policy = policy(args, declared.as_ref(), settings.as_deref())?;
    let policy_text = serde_json::to_string(&policy)?;
    harden_keeper(policy.mode)?;
    let command = |binary: &Path, cell: Option<&OsStr>| {
        let mut command = std::process::Command::new(binary);
        command.arg0("millrace").env_remove("NOTIFY_SOCKET").env_remove(SETTINGS);
        if let Some(settings) = &settings {
            command.env(SETTINGS, settings);
        }
        let Some(name) = cell else {
            command.args(&words).env(POLICY, &policy_text);
            return command;
        };
        let mut option = OsString::from("--cell=");
        option.push(name);
        command.args(std::env::args_os().skip(1)).arg(option);
        command
    };
    if args.cell.is_some() {
        // A cell is a part of its daemon, and ends with it: in order, for its guests have done nothing wrong.
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
        rustix::thread::set_name(c"millrace-cell")?;
    }
    let started = || {
        if args.cell.is_some() {
            return;
        }
        announce(&format!("millrace: ready on {}", run_dir.join(API_SOCKET).display()));
        notify::ready();
    };
    match Keeper::new(command, started, places, args.cell.is_none())?.run()? {
        Outcome::Stopped => Ok(()),
        // It has said why.
        Outcome::Failed(code) => std::process::exit(code.unwrap_or(1)),
    }
}

/// The configuration file as it is when the daemon starts. That it is wrong is the worker's to say.
fn declared(args: &ServeArgs) -> Option<Declared> {
    args.config.as_deref().and_then(|path| Declared::read(path).ok())
}

/// The system passes on no string of 128 KiB; with more settings than this, workers read the file.
const MOST_SETTINGS: usize = 100 << 10;

/// The file's settings of the daemon, for all its workers: a file that is being edited changes nothing of it. Cells have the daemon's.
fn settings(args: &ServeArgs, file: Option<&Declared>) -> Result<Option<String>, Box<dyn Error>> {
    match std::env::var(SETTINGS) {
        Ok(settings) if args.cell.is_some() => Ok(Some(settings)),
        _ => Ok(file
            .map(|file| serde_json::to_string(&file.settings()))
            .transpose()?
            .filter(|text| text.len() < MOST_SETTINGS)),
    }
}

/// Who may connect to devices' sockets, for all workers. A cell has what its daemon has.
fn socket_group(args: &ServeArgs, file: Option<&Declared>, held: Option<&str>) -> Result<Option<Group>, Box<dyn Error>> {
    let held = held.map(serde_json::from_str::<FileSettings>).transpose()?.or_else(|| file.map(Declared::settings));
    let line = args.socket_group.as_deref().map(|group| ("--socket-group", group));
    let file = held.as_ref().and_then(FileSettings::socket_group).map(|group| ("socket_group =", group));
    let find = |(key, group): (&str, &str)| Group::find(group).map_err(|error| format!("{key} {group}: {error}"));
    Ok(line.or(file).map(find).transpose()?)
}

/// What all workers give up, from the command line and the configuration file as they are when the daemon starts: a file that is being
/// edited must not open the sandbox of the next worker.
fn policy(args: &ServeArgs, file: Option<&Declared>, held: Option<&str>) -> Result<Policy, Box<dyn Error>> {
    let mut policy = args.sandbox.policy(file.map(|declared| declared.sandbox.clone()).unwrap_or_default())?;
    policy.socket_group = socket_group(args, file, held)?;
    policy.check()?;
    if let Some(path) = policy.allow.iter().find(|path| !path.exists()) {
        return Err(format!("--allow {}: there is no such file or directory", path.display()).into());
    }
    Ok(policy)
}

/// Gives up what the keeper says, or, when it is of another version and says nothing, the command line.
fn enter(global: &Global, args: &ServeArgs) -> Result<Sandbox, Box<dyn Error>> {
    let policy = match std::env::var(POLICY) {
        Ok(text) => serde_json::from_str(&text)?,
        Err(_) => policy(args, declared(args).as_ref(), None)?,
    };
    let mut helper = own("key-helper");
    match policy.programs() {
        Some(programs) => helper.arg("--").args(programs),
        None => helper.arg("--any"),
    };
    Ok(policy.enter(&[&global.run_dir(), &args.state_dir()], own("broker"), Some(helper))?)
}

/// This program as another process, which serves this one.
fn own(word: &str) -> std::process::Command {
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg0("millrace").arg(word);
    command
}

/// Makes system calls for the worker at standard input.
pub(crate) fn broker() -> Result<(), Box<dyn Error>> {
    // It was started by a descriptor's name.
    rustix::thread::set_name(c"millrace-broker")?;
    Ok(millrace_sandbox::broker(std::io::stdin().as_fd())?)
}

/// Runs programs that print keys for the worker at standard input.
pub(crate) fn key_helper(allowed: &[PathBuf], any: bool) -> Result<(), Box<dyn Error>> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    Ok(millrace_sandbox::help(std::io::stdin().as_fd(), (!any).then_some(allowed))?)
}

/// The same command line, for the worker.
fn worker_words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<_> = words.skip(1).collect();
    let mut is_value = false;
    let subcommand = words.iter().position(|word| {
        let is_one = !is_value && !word.as_encoded_bytes().starts_with(b"-");
        is_value = word == "--run-dir";
        is_one
    });
    if let Some(word) = subcommand.and_then(|at| words.get_mut(at)) {
        *word = OsString::from("worker");
    }
    words
}

/// The daemon itself. Its keeper is at its standard input.
pub(crate) fn worker(global: &Global, args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    // Without a keeper nobody takes care of what guests do here.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    // It was started by a descriptor's number.
    rustix::thread::set_name(c"millrace")?;
    let sandbox = enter(global, args)?;
    // Another user's process is not ended with its keeper unless it says so again.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let _log = logging::start(&args.log)?;
    let options = ServeOptions {
        config: args.config.clone(),
        state_dir: args.state_dir(),
        run_dir: global.run_dir(),
        shards: args.shards.clone(),
        polling: args.polling(),
        placement: args.placement(),
        isolation: args.isolation(),
        worker_shards: args.worker_shards.clone(),
        cell: args.cell.clone(),
        card: args.engine,
        held: std::env::var(SETTINGS).ok().map(|text| serde_json::from_str(&text)).transpose()?,
    };
    Ok(millrace_control::serve(&options, socket, sandbox)?)
}

pub(crate) fn nvme(global: &Global, args: NvmeCommand) -> Result<(), Box<dyn Error>> {
    let policy = args.sandbox.policy();
    policy.check()?;
    // While there is one thread.
    let sandbox = policy.enter(&[], own("broker"), None)?;
    let _log = logging::start(&args.log)?;
    let base = std::env::current_dir()?;
    let kind = DeviceKind::Nvme(args.controller.spec()).resolved(&base);
    let name: Name = "nvme".parse()?;
    let stack = args.volume.resolved(&base).into();
    let disk = ForegroundDisk {
        volume: VolumeSpec {
            name: name.clone(),
            size: args.size,
            stack,
            block_size: args.block_size,
            read_only: false,
            uuid: None,
        },
        device: DeviceSpec { name, kind, socket: Some(absolute(&args.socket)?), shard: None, tenant: None },
        read_only: args.read_only,
        polling: args.polling.into(),
    };
    let json = global.json;
    let ready = |device: &DeviceView| {
        announce(&if json {
            serde_json::to_string(device).unwrap_or_default()
        } else {
            let socket = &device.socket;
            format!("millrace: ready on {}\n{}\nCtrl-C ends it.", socket.display(), how_to_connect(device))
        });
        notify::ready();
    };
    Ok(millrace_control::foreground(&disk, sandbox, ready)?)
}

/// Says that we are ready. Nobody may be reading, which is no reason to stop.
fn announce(text: &str) {
    let _ = output::line(text);
}

/// What to tell a virtual machine monitor.
pub(crate) fn how_to_connect(device: &DeviceView) -> String {
    let socket = device.socket.display();
    if let Some(disk) = &device.virtio_blk {
        let queues = disk.queues;
        return format!(
            "QEMU:
  -object memory-backend-memfd,id=mem,size=2G,share=on -machine q35,memory-backend=mem \\
  -chardev socket,id=disk,path={socket},reconnect-ms=100 -device vhost-user-blk-pci,chardev=disk,num-queues=N (at most {queues})
Cloud Hypervisor:
  --memory size=2G,shared=on --disk vhost_user=on,socket={socket},num_queues=N (at most its processors)"
        );
    }
    format!(
        "QEMU 10.1 or newer:
  -object memory-backend-memfd,id=mem,size=2G,share=on -machine q35,memory-backend=mem \\
  -device '{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"type\":\"unix\",\"path\":\"{socket}\"}}}}'
Cloud Hypervisor:
  --memory size=2G,shared=on --user-device socket={socket}"
    )
}
