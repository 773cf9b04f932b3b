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

/// Polling all the time beside polling as long as it seems worth it, under loads that leave time between commands.
pub(crate) fn polling(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let file = suite.folder("polled.img");
    let setup = Setup::default().disk("null", "null", "1G").disk("file", &format!("file:{}", file.display()), "256M");
    let start = |polling: &str| Ours::start(&suite.binary, &suite.folder(polling), suite.target, polling, &setup);
    let spin = start("spin")?;
    // The file is one daemon's at a time; the other one has its own.
    let setup = Setup::default().disk("null", "null", "1G").disk("file", &format!("file:{}.2", file.display()), "256M");
    let adaptive = Ours::start(&suite.binary, &suite.folder("adaptive"), suite.target, "adaptive", &setup)?;
    let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(spin), Box::new(adaptive)];
    let (null, disk) = (["null".to_owned()], ["file".to_owned()]);
    suite.write_once(&mut subjects, &disk)?;
    let longer = Suite { seconds: suite.seconds.max(1.0), ..suite.clone() };
    let mut cases: Vec<Case<'_>> = Vec::new();
    for (index, name) in ["spin", "adaptive"].into_iter().enumerate() {
        for (rate, place) in [(1_000, "null, 1 K/s"), (20_000, "null, 20 K/s"), (200_000, "null, 200 K/s")] {
            let paced = Lean::with(&format!("--rate {rate}"));
            cases.push(longer.lean(index, name, "lean", paced, Load::randread(32).on(place), &null));
        }
        let load = Load::new("randwrite", "4k", 32).on("file on disk, 5 K/s");
        cases.push(longer.lean(index, name, "lean", Lean::with("--rate 5000"), load, &disk));
    }
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
