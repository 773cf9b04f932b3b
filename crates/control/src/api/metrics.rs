//! Metrics in the open standard's text format, gathered when they are asked for.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, info::Info},
    registry::{Registry, Unit},
};

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

use crate::{
    CopyState,
    cells::MAIN,
    itself,
    manager::{CopyView, DeviceView, GroupView, Manager, State, Status, ThrottleView, VolumeView, WorkerView},
};

#[cfg(test)]
mod tests;

/// What the text is.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Device {
    device: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceOperation {
    device: String,
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Volume {
    volume: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Copy {
    copy: String,
}

/// Something of a worker, and what more is told apart.
type OfWorker = Vec<(&'static str, String)>;

/// Something of a worker, which has a label where it is not the daemon's own.
fn of_worker(kind: &'static str, name: String, worker: &str) -> OfWorker {
    let worker = (worker != MAIN).then(|| ("worker", worker.to_owned()));
    [(kind, name)].into_iter().chain(worker).collect()
}

/// What throttles, groups and users' caps have held back in a worker. Of several they are no sum: that would become less when one does not answer, or
/// ends, and less than before is another counter to whoever reads them.
pub(crate) struct HeldBack {
    pub(crate) worker: String,
    pub(crate) throttles: Vec<ThrottleView>,
    pub(crate) groups: Vec<GroupView>,
    /// By the users' numbers.
    pub(crate) users: Vec<(u32, u64)>,
}

impl HeldBack {
    /// In this worker.
    pub(crate) fn here(manager: &Manager) -> Self {
        let (throttles, groups, users) = (manager.throttles(), manager.groups(), manager.users_held_back());
        Self { worker: MAIN.to_owned(), throttles, groups, users }
    }
}

/// Seconds that only grow.
type Seconds<L> = Family<L, Counter<f64, std::sync::atomic::AtomicU64>>;

/// The metrics of these.
pub(crate) fn response(
    status: &Status,
    all_devices: &[DeviceView],
    all_volumes: &[VolumeView],
    all_copies: &[CopyView],
    held_back: &[HeldBack],
) -> Response {
    let text = render(status, all_devices, all_volumes, all_copies, held_back);
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

/// The whole text.
fn render(
    status: &Status,
    all_devices: &[DeviceView],
    all_volumes: &[VolumeView],
    all_copies: &[CopyView],
    held_back: &[HeldBack],
) -> String {
    let mut everything = Registry::default();
    process(&mut everything);
    let registry = everything.sub_registry_with_prefix("millrace");
    registry.register("build", "What runs", Info::new([("version".to_owned(), status.version.clone())]));
    let uptime: Gauge = Gauge::default();
    uptime.set(saturate(status.uptime_seconds));
    registry.register_with_unit("uptime", "Time since the daemon's worker started", Unit::Seconds, uptime);
    let failed: Gauge = Gauge::default();
    failed.set(i64::try_from(status.failed.len()).unwrap_or(i64::MAX));
    registry.register("failed_objects", "Volumes, devices and namespaces that do not work", failed);
    let degraded: Gauge = Gauge::default();
    degraded.set(i64::try_from(status.degraded.len()).unwrap_or(i64::MAX));
    registry.register("degraded_objects", "Volumes that work with less than they promise", degraded);
    devices(registry, all_devices);
    volumes(registry, all_volumes);
    copies(registry, all_copies);
    throttles(registry, held_back);
    limits(registry, held_back);
    shards(registry, &status.workers);
    let mut text = String::new();
    match text::encode(&mut text, &everything) {
        Ok(()) => text,
        Err(fmt::Error) => unreachable!("a string takes all text"),
    }
}

/// What every program tells, under the names that every program uses.
fn process(registry: &mut Registry) {
    let Some((cpu_seconds, resident)) = itself::usage() else { return };
    let cpu: Counter<f64, std::sync::atomic::AtomicU64> = Counter::default();
    cpu.inc_by(cpu_seconds);
    let memory: Gauge = Gauge::default();
    memory.set(saturate(resident));
    registry.register_with_unit("process_cpu", "Time on processors, user and system", Unit::Seconds, cpu);
    registry.register_with_unit("process_resident_memory", "Memory that is resident", Unit::Bytes, memory);
    if let Some(open) = itself::open_fds() {
        let fds: Gauge = Gauge::default();
        fds.set(i64::try_from(open).unwrap_or(i64::MAX));
        registry.register("process_open_fds", "Open file descriptors", fds);
    }
}

fn devices(registry: &mut Registry, devices: &[DeviceView]) {
    let commands = Family::<DeviceOperation, Counter>::default();
    let bytes = Family::<DeviceOperation, Counter>::default();
    let [errors, media_errors, interrupts] = [(); 3].map(|()| Family::<Device, Counter>::default());
    let [connected, up] = [(); 2].map(|()| Family::<Device, Gauge>::default());
    for view in devices {
        let device = Device { device: view.name.to_string() };
        connected.get_or_create(&device).set(view.connected.into());
        up.get_or_create(&device).set((view.state == State::Ready).into());
        // One that does not say what it is doing has no counts either: zeroes would be counters that begin anew, and again when it does.
        if view.phase.is_none() {
            continue;
        }
        let operation = |operation| DeviceOperation { device: view.name.to_string(), operation };
        let counters = &view.counters;
        for (name, count) in
            [("read", counters.read_commands), ("write", counters.write_commands), ("other", counters.other_commands)]
        {
            commands.get_or_create(&operation(name)).inc_by(count);
        }
        for (name, count) in [("read", counters.bytes_read), ("write", counters.bytes_written)] {
            bytes.get_or_create(&operation(name)).inc_by(count);
        }
        errors.get_or_create(&device).inc_by(counters.errors);
        media_errors.get_or_create(&device).inc_by(counters.media_errors);
        interrupts.get_or_create(&device).inc_by(counters.interrupts);
    }
    registry.register("device_commands", "Commands finished", commands);
    registry.register_with_unit("device_transferred", "Data moved for the guest", Unit::Bytes, bytes);
    registry.register("device_errors", "Commands that ended with an error", errors);
    registry.register("device_media_errors", "Commands that failed for the medium's fault", media_errors);
    registry.register("device_interrupts", "Interrupts signalled to the guest", interrupts);
    registry.register("device_connected", "Whether a client is connected", connected);
    registry.register("device_up", "Whether the device works", up);
}

fn volumes(registry: &mut Registry, volumes: &[VolumeView]) {
    let [size, allocated, up] = [(); 3].map(|()| Family::<Volume, Gauge>::default());
    for view in volumes {
        let volume = Volume { volume: view.name.to_string() };
        size.get_or_create(&volume).set(saturate(view.size.0));
        if let Some(bytes) = view.allocated {
            allocated.get_or_create(&volume).set(saturate(bytes));
        }
        up.get_or_create(&volume).set((view.state == State::Ready).into());
    }
    registry.register_with_unit("volume_size", "Size of the volume", Unit::Bytes, size);
    registry.register_with_unit("volume_allocated", "What the medium holds for the volume", Unit::Bytes, allocated);
    registry.register("volume_up", "Whether the volume works", up);
}

fn copies(registry: &mut Registry, copies: &[CopyView]) {
    let [size, done, running] = [(); 3].map(|()| Family::<Copy, Gauge>::default());
    for view in copies {
        let copy = Copy { copy: view.name.to_string() };
        size.get_or_create(&copy).set(saturate(view.bytes));
        done.get_or_create(&copy).set(saturate(view.done));
        running.get_or_create(&copy).set((view.state == CopyState::Running).into());
    }
    registry.register_with_unit("copy_size", "What there is to copy", Unit::Bytes, size);
    registry.register_with_unit("copy_done", "What the copy is past", Unit::Bytes, done);
    registry.register("copy_running", "Whether the copy goes on", running);
}

fn throttles(registry: &mut Registry, held_back: &[HeldBack]) {
    let volumes = Family::<Volume, Counter>::default();
    let time = Seconds::<Volume>::default();
    for view in held_back.iter().flat_map(|held| &held.throttles) {
        let volume = Volume { volume: view.volume.to_string() };
        volumes.get_or_create(&volume).inc_by(view.requests);
        time.get_or_create(&volume).inc_by(seconds(view.nanoseconds));
    }
    registry.register("volume_held_back", "Requests that waited for a throttle", volumes);
    registry.register_with_unit("volume_held_back", "Time that they waited", Unit::Seconds, time);
}

/// Groups, and users' caps.
fn limits(registry: &mut Registry, held_back: &[HeldBack]) {
    let [groups, users] = [(); 2].map(|()| Family::<OfWorker, Counter>::default());
    for HeldBack { worker, groups: in_groups, users: of_users, .. } in held_back {
        for view in in_groups {
            groups.get_or_create(&of_worker("group", view.name.to_string(), worker)).inc_by(view.held_back);
        }
        for (uid, count) in of_users {
            users.get_or_create(&of_worker("user", uid.to_string(), worker)).inc_by(*count);
        }
    }
    registry.register("group_held_back", "Requests that a group was the first to hold back", groups);
    registry.register("app_held_back", "Requests that a user's caps were the first to hold back", users);
}

fn shards(registry: &mut Registry, workers: &[WorkerView]) {
    let [busy, idle] = [(); 2].map(|()| Seconds::<OfWorker>::default());
    let [turns, sleeps, held_up, commands] = [(); 4].map(|()| Family::<OfWorker, Counter>::default());
    let [devices, waiting] = [(); 2].map(|()| Family::<OfWorker, Gauge>::default());
    let [ticks, entries] = [(); 2].map(|()| Family::<OfWorker, Counter>::default());
    for (worker, view) in workers.iter().flat_map(|worker| worker.shards.iter().map(move |view| (worker, view))) {
        let shard = of_worker("shard", view.index.to_string(), &worker.name);
        busy.get_or_create(&shard).inc_by(seconds(view.busy_ns));
        idle.get_or_create(&shard).inc_by(seconds(view.idle_ns));
        turns.get_or_create(&shard).inc_by(view.turns);
        sleeps.get_or_create(&shard).inc_by(view.sleeps);
        held_up.get_or_create(&shard).inc_by(view.held_up);
        commands.get_or_create(&shard).inc_by(view.commands);
        devices.get_or_create(&shard).set(saturate(view.devices));
        waiting.get_or_create(&shard).set(saturate(view.tasks_waiting));
        for view in &view.stages {
            let mut stage = shard.clone();
            stage.push(("stage", view.stage.clone()));
            ticks.get_or_create(&stage).inc_by(view.ticks);
            entries.get_or_create(&stage).inc_by(view.entries);
        }
    }
    registry.register_with_unit("shard_busy", "Time in passes that found work", Unit::Seconds, busy);
    registry.register_with_unit("shard_idle", "Time looking in vain, and asleep", Unit::Seconds, idle);
    registry.register("shard_turns", "Passes of the shard's loop", turns);
    registry.register("shard_sleeps", "Times the shard slept", sleeps);
    registry.register("shard_held_up", "Submissions that waited for a disk whose queue was full", held_up);
    registry.register("shard_commands", "Commands finished on the shard", commands);
    registry.register("shard_devices", "Devices on the shard", devices);
    let tasks = "Tasks that wait: requests that did not end at once, and the upkeep of services, which always does";
    registry.register("shard_tasks_waiting", tasks, waiting);
    registry.register("shard_stage_ticks", "Ticks of the time stamp counter in a stage of the data path", ticks);
    registry.register("shard_stage_entries", "Times a stage of the data path was entered", entries);
}

fn saturate(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of 104 days are exact, of more nearly so")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}
