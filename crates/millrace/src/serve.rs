//! The daemon, and one disk without it.

use std::{
    error::Error,
    ffi::{OsStr, OsString},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf, absolute},
};

use millrace_control::{API_SOCKET, DeviceKind, DeviceSpec, DeviceView, ForegroundDisk, Name, ServeOptions, VolumeSpec};
use millrace_keeper::{Keeper, Outcome};

use crate::{
    cli::{Global, NvmeCommand, ServeArgs},
    logging, notify, output,
};

/// The keeper: runs a worker, and runs another when it dies (docs/survival.md).
pub(crate) fn serve(global: &Global, args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    // Wrong settings are told by the worker, but for what is the keeper's own.
    let place = |path: &PathBuf| path.canonicalize().map_err(|error| format!("--upgrade-from {}: {error}", path.display()));
    let places = args.upgrade_from.iter().map(place).collect::<Result<_, _>>()?;
    let (words, run_dir) = (worker_words(std::env::args_os()), global.run_dir());
    let worker = |binary: &Path| {
        let mut command = std::process::Command::new(binary);
        command.arg0("millrace").args(&words).env_remove("NOTIFY_SOCKET");
        command
    };
    let all_words: Vec<_> = std::env::args_os().skip(1).collect();
    let cell = |binary: &Path, name: &OsStr| {
        let mut command = std::process::Command::new(binary);
        let mut option = OsString::from("--cell=");
        option.push(name);
        command.arg0("millrace").args(&all_words).arg(option).env_remove("NOTIFY_SOCKET");
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
    match Keeper::new(worker, cell, started, places)?.run()? {
        Outcome::Stopped => Ok(()),
        // It has said why.
        Outcome::Failed(code) => std::process::exit(code.unwrap_or(1)),
    }
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
    };
    Ok(millrace_control::serve(&options, socket)?)
}

pub(crate) fn nvme(global: &Global, args: NvmeCommand) -> Result<(), Box<dyn Error>> {
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
    Ok(millrace_control::foreground(&disk, ready)?)
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
  --memory size=2G,shared=on --disk vhost_user=on,socket={socket},num_queues=N"
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
