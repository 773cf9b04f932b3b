//! Many devices on one core: busy ones, idle ones, and what they hold.

use std::{path::Path, thread, time::Duration};

use millrace_driver::{Controller, Options, QueueOptions, QueuePair};

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
    machine,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Spdk, Subject},
    suite::{Case, Suite},
};

/// Devices that are busy at once.
const BUSY: usize = 64;
/// Devices that are idle at once.
const IDLE: usize = 1000;

fn name(index: usize) -> String {
    format!("d{index}")
}

/// Devices of SPDK, each with its own volume: it lets no two have one.
fn nulls(spdk: &Spdk, count: usize) -> Result<(), Failure> {
    (0..count).try_for_each(|index| {
        spdk.null(&name(index), 1 << 30)?;
        spdk.device(&name(index), &name(index))
    })
}

/// 64 busy devices on one core, beside one.
pub(crate) fn busy(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let setup = (0..BUSY).fold(Setup::default(), |setup, index| setup.disk(&name(index), "null", "1G"));
    let ours = suite.start_ours("spin", &setup)?;
    let spdk = suite.start_spdk(|spdk| nulls(spdk, BUSY))?;
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let all: Vec<String> = (0..BUSY).map(name).collect();
    let mut cases = suite.on_each(&subjects, "lean", &Lean::default(), &Load::randread(32).on("on 1 device"), &all[..1]);
    cases.extend(suite.on_each(&subjects, "lean", &Lean::default(), &Load::randread(32).on("on 64 devices"), &all));
    suite.measure(record, &mut subjects, &cases)
}

/// A client that does nothing: its controller is up, with one queue pair.
struct Idle {
    _queue: QueuePair,
    _controller: Controller,
}

fn connect(folder: &Path) -> Result<Idle, Failure> {
    let options =
        Options { memory_size: 256 << 10, admin_entries: 4, io_queues: 1, max_transfer: 4096, ..Options::default() };
    let mut controller = Controller::connect(&folder.join("cntrl"), &options)?;
    let queue = controller.create_queue_pair(&QueueOptions { entries: 32, ..QueueOptions::default() })?;
    Ok(Idle { _queue: queue, _controller: controller })
}

fn connect_all(subject: &dyn Subject, count: std::ops::Range<usize>) -> Result<Vec<Idle>, Failure> {
    count.map(|index| connect(&subject.folder(&name(index)))).collect()
}

/// What 1,000 idle devices cost, and what a busy one loses beside them.
pub(crate) fn idle(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let count = if suite.quick { IDLE / 4 } else { IDLE };
    machine::raise_open_files();
    for doorbells in ["shared", "messages"] {
        let setup = many(count, doorbells);
        let mut ours = Ours::start(&suite.binary, &suite.folder(doorbells), suite.target, "adaptive", &setup)?;
        let clients = connect_all(&ours, 0..count)?;
        // They have to be idle for a while before they count as such.
        thread::sleep(Duration::from_secs(2));
        for _ in 0..suite.wanted() {
            let (before, time) = (ours.daemon().cpu()?, Duration::from_secs(if suite.quick { 1 } else { 3 }));
            thread::sleep(time);
            let used = ours.daemon().cpu()?.saturating_sub(before);
            let key = Key {
                test: format!("{count} idle devices, doorbells {doorbells}"),
                depth: 0,
                client: "idle".into(),
                subject: "ours".into(),
            };
            record.add(&key, State::Any, Sample::from([("cpu".into(), used.as_secs_f64() / time.as_secs_f64())]));
        }
        drop(clients);
    }
    beside(suite, record, count)
}

fn many(count: usize, doorbells: &str) -> Setup {
    let setup = Setup::default().volume("null", "null", "1G");
    (0..count).fold(setup, |setup, index| setup.device(&name(index), "null", doorbells))
}

/// One busy device alone, and beside idle ones with clients.
fn beside(suite: &Suite, record: &mut Record, count: usize) -> Result<(), Failure> {
    let alone = Ours::start(&suite.binary, &suite.folder("alone"), suite.target, "spin", &many(1, "shared"))?;
    let crowd = Ours::start(&suite.binary, &suite.folder("crowd"), suite.target, "spin", &many(count, "shared"))?;
    let clients = connect_all(&crowd, 1..count)?;
    let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(alone), Box::new(crowd)];
    let devices = [name(0)];
    let cases: Vec<Case<'_>> = (0..subjects.len())
        .flat_map(|index| {
            let subject = if index == 0 { "alone".to_owned() } else { format!("beside {} idle", count - 1) };
            let lean = |depth| suite.lean(index, &subject, "lean", Lean::default(), Load::randread(depth), &devices);
            [lean(1), lean(32), lean(128)]
        })
        .collect();
    suite.measure(record, &mut subjects, &cases)?;
    drop(clients);
    Ok(())
}

/// What a daemon holds by itself, and with connected devices: another daemon for each sample.
pub(crate) fn footprint(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    machine::raise_open_files();
    let count = if suite.quick { 64 } else { 256 };
    for _ in 0..suite.wanted() {
        let mut bare = Ours::start(&suite.binary, &suite.folder("bare"), suite.target, "adaptive", &Setup::default())?;
        held(record, "without devices", &mut bare, None, 0)?;
        drop(bare);
        let setup = many(count, "shared");
        let mut ours = Ours::start(&suite.binary, &suite.folder("ours"), suite.target, "adaptive", &setup)?;
        held_by_devices(record, &mut ours, count)?;
        drop(ours);
        if let Some(tree) = &suite.spdk {
            let mut spdk = Spdk::start(tree, &suite.folder("spdk"), suite.target, 1024)?;
            held(record, "without devices", &mut spdk, None, 0)?;
            nulls(&spdk, BUSY)?;
            held_by_devices(record, &mut spdk, BUSY)?;
        }
    }
    record.note("Anonymous: memory of the daemon's own; RSS counts pages shared with clients (queues) as well; huge: huge pages, which RSS does not count".into());
    Ok(())
}

/// Records what a daemon with so many devices holds without clients, and what each of them adds.
fn held_by_devices(record: &mut Record, subject: &mut dyn Subject, count: usize) -> Result<(), Failure> {
    let before = held(record, &format!("{count} devices, no client"), subject, None, 0)?;
    let clients = connect_all(subject, 0..count)?;
    thread::sleep(Duration::from_millis(500));
    held(record, "each connected device", subject, Some(&before), count)?;
    drop(clients);
    Ok(())
}

/// Records what a daemon holds, or by how much that has grown per device.
fn held(
    record: &mut Record,
    what: &str,
    subject: &mut dyn Subject,
    before: Option<&Sample>,
    devices: usize,
) -> Result<Sample, Failure> {
    let daemon = subject.daemon();
    let mut sample = Sample::new();
    for (metric, lines) in [
        ("rss", &["Rss"][..]),
        ("pss", &["Pss"]),
        ("anonymous", &["Anonymous"]),
        ("huge", &["Private_Hugetlb", "Shared_Hugetlb"]),
    ] {
        let bytes = lines.iter().map(|line| daemon.memory(line)).sum::<Result<u64, _>>()?;
        let grown = bytes as f64 - before.map_or(0.0, |before| before[metric]);
        sample.insert(metric.into(), grown / devices.max(1) as f64);
    }
    let key = Key { test: what.to_owned(), depth: 0, client: "held".into(), subject: subject.name().into() };
    record.add(&key, State::Any, sample.clone());
    Ok(sample)
}
