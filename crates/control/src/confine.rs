//! The sandbox around the daemon: which paths its volumes and devices need, and what is said of it (docs/sandbox.md).

use std::{
    io,
    path::{Path, PathBuf},
};

use millrace_backends::BackendSpec;
use millrace_engine::Engine;
use millrace_sandbox::{Grant, Sandbox, end_worker, refused, this_is_a_shard};
use millrace_services::{Leaf, Node, run_key_commands_by};

use crate::{
    config::Declared,
    daemon::DaemonError,
    itself::look_at_itself,
    model::{DeviceSpec, VolumeSpec},
    store::{Store, StoreError},
};

/// In the run directory: held by the worker's broker until nothing is done any more of what it was asked for.
pub(crate) const LOCK: &str = "broker.lock";

/// Closes the sandbox: what is stored and declared stays within reach, and `dirs`.
pub(crate) fn close(
    mut sandbox: Sandbox,
    dirs: &[&Path],
    store: &Store,
    declared: Option<&Declared>,
    engine: &Engine,
) -> Result<(), DaemonError> {
    if let Some(helper) = sandbox.take_helper() {
        run_key_commands_by(Box::new(move |line, output, errors| helper.run(line, &output, &errors, end_with_helper)));
    }
    let grants = if sandbox.policy().is_strict() { grants(dirs, store, declared)? } else { Vec::new() };
    close_to(sandbox, grants, engine)
}

/// A worker starts no program any more: only another one has another helper. Without it, volumes would not open that need a key.
fn end_with_helper() -> io::Error {
    tracing::error!("the helper for key commands has ended, and so does this worker: the next one has a helper again");
    end_worker()
}

/// Closes the sandbox around one disk.
pub(crate) fn close_around(
    sandbox: Sandbox,
    volume: &VolumeSpec,
    device: &DeviceSpec,
    engine: &Engine,
) -> Result<(), DaemonError> {
    let mut grants = own(&[]);
    of_stack(&volume.stack, true, &mut grants);
    of_device(device, &mut grants);
    close_to(sandbox, grants, engine)
}

fn close_to(mut sandbox: Sandbox, grants: Vec<Grant>, engine: &Engine) -> Result<(), DaemonError> {
    for shard in engine.shards() {
        shard.call_wait(|_| this_is_a_shard())?;
    }
    look_at_itself();
    sandbox.close(grants)?;
    tracing::info!(%sandbox, "confined");
    for what in sandbox.missing() {
        tracing::warn!("{what}");
    }
    Ok(())
}

/// Tells the operator what was refused since the last time.
pub(crate) fn tell_refused() {
    for call in refused() {
        tracing::warn!(times = call.count, "a system call was refused: {call}; see docs/sandbox.md");
    }
}

fn grants(dirs: &[&Path], store: &Store, declared: Option<&Declared>) -> Result<Vec<Grant>, StoreError> {
    let (volumes, devices) = store.load()?;
    let mut grants = own(dirs);
    for volume in &volumes {
        // Whatever is stored is there.
        of_stack(&volume.spec.stack, false, &mut grants);
    }
    for device in &devices {
        of_device(&device.spec, &mut grants);
    }
    for volume in declared.iter().flat_map(|declared| &declared.volumes) {
        of_stack(&volume.value.stack, true, &mut grants);
    }
    for device in declared.iter().flat_map(|declared| &declared.devices) {
        of_device(&device.value.spec(), &mut grants);
    }
    Ok(grants)
}

/// What the daemon itself looks at.
fn own(dirs: &[&Path]) -> Vec<Grant> {
    // Itself, for its metrics, and what the system tells of disks.
    let read = ["/proc/self", "/sys/dev/block", "/sys/devices", "/sys/kernel/iommu_groups"]
        .map(|path| Grant::Read(PathBuf::from(path)));
    dirs.iter().map(|dir| Grant::Use(dir.to_path_buf())).chain(read).collect()
}

/// A declared file that is not there will be made, in its directory.
fn of_stack(stack: &Node, declared: bool, grants: &mut Vec<Grant>) {
    for path in stack.leaves().into_iter().filter_map(Leaf::file) {
        let place = if declared && !path.exists() { path.parent() } else { Some(path) };
        grants.extend(place.map(|path| Grant::Use(path.to_owned())));
    }
    for leaf in stack.leaves() {
        if let Ok(BackendSpec::Nvme(place)) = leaf.spec.parse() {
            grants.extend(place.files().into_iter().map(Grant::Use));
        }
    }
    grants.extend(stack.setting_files().into_iter().map(|path| Grant::Read(path.to_owned())));
}

fn of_device(device: &DeviceSpec, grants: &mut Vec<Grant>) {
    let folder = device.socket.as_deref().and_then(Path::parent);
    grants.extend(folder.map(|folder| Grant::Sockets(folder.to_owned())));
    if let Some(BackendSpec::File(folder)) = device.kind.nvme().map(|nvme| &nvme.ns_backend.0) {
        grants.push(Grant::Use(folder.clone()));
    }
}
