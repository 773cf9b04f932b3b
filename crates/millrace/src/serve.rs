//! The daemon, and one disk without it.

use std::{
    error::Error,
    path::{Path, absolute},
};

use millrace_control::{DeviceSpec, DeviceView, ForegroundDisk, Name, ServeOptions, VolumeSpec};

use crate::{
    cli::{Global, NvmeCommand, ServeArgs},
    logging, notify, output,
};

pub(crate) fn serve(global: &Global, args: &ServeArgs) -> Result<(), Box<dyn Error>> {
    let _log = logging::start(&args.log)?;
    let options = ServeOptions {
        config: args.config.clone(),
        state_dir: args.state_dir(),
        run_dir: global.run_dir(),
        shards: args.shards.clone(),
        polling: args.polling(),
        placement: args.placement(),
    };
    let ready = |socket: &Path| {
        announce(&format!("millrace: ready on {}", socket.display()));
        notify::ready();
    };
    Ok(millrace_control::serve(&options, ready)?)
}

pub(crate) fn nvme(global: &Global, args: NvmeCommand) -> Result<(), Box<dyn Error>> {
    let _log = logging::start(&args.log)?;
    let base = std::env::current_dir()?;
    let mut nvme = args.controller.spec();
    nvme.ns_backend = nvme.ns_backend.resolved(&base);
    let name: Name = "nvme".parse()?;
    let backend = args.volume.resolved(&base);
    let disk = ForegroundDisk {
        volume: VolumeSpec { name: name.clone(), size: args.size, backend, block_size: args.block_size, read_only: false },
        device: DeviceSpec { name, nvme, socket: Some(absolute(&args.socket)?), shard: None },
        read_only: args.read_only,
        polling: args.polling.into(),
    };
    let json = global.json;
    let ready = |device: &DeviceView| {
        announce(&if json {
            serde_json::to_string(device).unwrap_or_default()
        } else {
            let socket = &device.socket;
            format!("millrace: ready on {}\n{}\nCtrl-C ends it.", socket.display(), how_to_connect(socket))
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
pub(crate) fn how_to_connect(socket: &Path) -> String {
    let socket = socket.display();
    format!(
        "QEMU 10.1 or newer:
  -object memory-backend-memfd,id=mem,size=2G,share=on -machine q35,memory-backend=mem \\
  -device '{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"type\":\"unix\",\"path\":\"{socket}\"}}}}'
Cloud Hypervisor:
  --memory size=2G,shared=on --user-device socket={socket}"
    )
}
