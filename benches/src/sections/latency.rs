//! Not how many, but how long: tails, the price of polling less, interrupts, waking up.

use std::time::Duration;

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
    record::{Key, Record},
    subject::{Ours, Setup, Subject},
    suite::{Case, Suite},
};

/// Tails at depth 1, and at half of what the slower one can do.
pub(crate) fn tail(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let ours = suite.start_ours("spin", &Setup::default().disk("null", "null", "1G").disk("large", "memory", "64M"))?;
    let spdk = suite.start_spdk(|spdk| {
        spdk.null("null", 1 << 30)?;
        spdk.memory("large", 64 << 20)?;
        spdk.device("null", "null")?;
        spdk.device("large", "large")
    })?;
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let (null, large) = (["null".to_owned()], ["large".to_owned()]);
    suite.write_once(&mut subjects, &large)?;
    let timed = Lean::with("--latency");
    let mut cases = suite.on_each(&subjects, "lean", &timed, &Load::randread(1).on("null"), &null);
    cases.extend(suite.on_each(&subjects, "lean", &timed, &Load::randread(1).on("64 MB"), &large));
    for (place, devices) in [("null, half load", &null), ("64 MB, half load", &large)] {
        let slowest = slowest(suite, &mut subjects, devices)?;
        let paced = Lean::with(&format!("--rate {:.0}", slowest / 2.0));
        record
            .note(format!("{place}: {:.2} M/s, half of what the slowest did at depth 32 when the run began", slowest / 2e6));
        cases.extend(suite.on_each(&subjects, "lean", &paced, &Load::randread(128).on(place), devices));
    }
    suite.measure(record, &mut subjects, &cases)
}

/// What the slowest subject does at depth 32 right now, a second, at its best.
fn slowest(suite: &Suite, subjects: &mut [Box<dyn Subject>], devices: &[String]) -> Result<f64, Failure> {
    let mut slowest = f64::INFINITY;
    for subject in subjects.iter_mut() {
        subject.daemon().pause();
    }
    for index in 0..subjects.len() {
        let case = suite.lean(index, "", "", Lean::default(), Load::randread(32), devices);
        subjects[index].daemon().resume();
        let mut best: f64 = 0.0;
        for _ in 0..3 {
            best = best.max((case.run)(subjects)?["iops"]);
        }
        subjects[index].daemon().pause();
        slowest = slowest.min(best);
    }
    Ok(slowest)
}

/// Ways to wait for work.
const WAYS: [&str; 3] = ["spin", "adaptive", "interrupt"];

/// Commands a second, and what that is called on an NVMe and on a virtio disk.
const PACES: [(&str, [&str; 2]); 5] = [
    ("1000", ["null, 1 K/s", "virtio, null, 1 K/s"]),
    ("5000", ["null, 5 K/s", "virtio, null, 5 K/s"]),
    ("5000 --uneven", ["null, 5 K/s at random", "virtio, null, 5 K/s at random"]),
    ("20000", ["null, 20 K/s", "virtio, null, 20 K/s"]),
    ("200000", ["null, 200 K/s", "virtio, null, 200 K/s"]),
];

/// Polling all the time beside polling as long as it seems worth it and not at all, under loads that leave time between commands.
pub(crate) fn polling(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for way in WAYS {
        // A file is one daemon's at a time.
        let file = suite.folder(&format!("polled-{way}.img"));
        let setup = Setup::default().disk("null", "null", "1G").disk("file", &format!("file:{}", file.display()), "256M");
        let setup = setup.volume("nothing", "null", "1G").virtio("virtio", "nothing");
        subjects.push(Box::new(Ours::start(&suite.binary, &suite.folder(way), suite.target, way, &setup)?));
    }
    let [null, disk, virtio] = ["null", "file", "virtio"].map(|name| [name.to_owned()]);
    suite.write_once(&mut subjects, &disk)?;
    let longer = Suite { seconds: suite.seconds.max(1.0), ..suite.clone() };
    let mut cases: Vec<Case<'_>> = Vec::new();
    let mut each = |lean: &Lean, load: &Load, devices| {
        for (index, way) in WAYS.into_iter().enumerate() {
            cases.push(longer.lean(index, way, "lean", lean.clone(), load.clone(), devices));
        }
    };
    for (pace, places) in PACES {
        for (options, place, devices) in [("", places[0], &null), ("--virtio ", places[1], &virtio)] {
            each(&Lean::with(&format!("{options}--rate {pace}")), &Load::randread(32).on(place), devices);
        }
    }
    each(&Lean::with("--rate 5000"), &Load::new("randwrite", "4k", 32).on("file on disk, 5 K/s"), &disk);
    each(&Lean::with("--latency"), &Load::randread(1).on("file on disk, one after the other"), &disk);
    record.note("K/s: thousands of commands a second, evenly or at random instants; virtio: one that is woken by the guest's notifications".into());
    longer.measure(record, &mut subjects, &cases)
}

/// Interrupts per command, with a client that sleeps until one comes.
pub(crate) fn interrupts(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let ours = suite.start_ours("spin", &Setup::default().disk("null", "null", "1G"))?;
    let spdk = suite.start_spdk(|spdk| {
        spdk.null("null", 1 << 30)?;
        spdk.device("null", "null")
    })?;
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let null = ["null".to_owned()];
    let depths: &[u32] = if suite.quick { &[1, 32] } else { &[1, 4, 16, 32, 128] };
    let cases: Vec<Case<'_>> = depths
        .iter()
        .flat_map(|depth| {
            let lean = Lean::with("--interrupts --batch 1");
            suite.on_each(&subjects, "asleep", &lean, &Load::randread(*depth), &null)
        })
        .collect();
    suite.measure(record, &mut subjects, &cases)
}

/// The first command after a long pause, with doorbells in shared memory and as messages.
pub(crate) fn wake(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let setup = Setup::default().volume("null", "null", "1G").device("shared", "null", "shared");
    let setup = setup.device("messages", "null", "messages");
    let mut ours = suite.start_ours("adaptive", &setup)?;
    let rounds = if suite.quick { 1 } else { 5 };
    for (device, name) in [("shared", "doorbells shared"), ("messages", "doorbells messages")] {
        for _ in 0..rounds {
            let seconds = if suite.quick { 1.0 } else { 2.5 };
            let before = ours.daemon().cpu()?;
            let lean = Lean::with("--rate 10");
            let sockets = [ours.folder(device)];
            let mut sample = lean.run(&suite.binary, &sockets, &Load::randread(1), suite.client, seconds)?;
            let used = ours.daemon().cpu()?.saturating_sub(before);
            sample.insert("cpu".into(), used.as_secs_f64() / seconds);
            let key = Key {
                test: format!("after 100 ms of nothing, {name}"),
                depth: 1,
                client: "lean".into(),
                subject: "ours".into(),
            };
            record.add(&key, State::Any, sample);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}
