//! How long guests wait when their worker is killed, when its binary is replaced and when their volume's stack changes or the volume moves, by
//! the daemon's word and by their own clock.
//!
//! ```text
//!   client ──────── commands ───────┐ killed, replaced, changed ┌────── commands ───► the longest that one took
//!                                   └───── the pause ───────────┘         (the daemon's log, the upgrade's answer, the volume's history)
//! ```

use std::{
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Subject},
    suite::Suite,
};

/// Times that each is done.
const TIMES: usize = 20;
/// Seconds of a client's work; what is measured happens when the first part of it is over.
const SECONDS: f64 = 0.8;
const PART: Duration = Duration::from_millis(300);
/// How long nobody asks for anything before a change at rest: what was written, and what a change left to be filled, is done by then.
const REST: Duration = Duration::from_millis(500);
/// How long the next worker may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What happens meanwhile, with the place's other stack, or where its volume moves; how long nobody served then, in microseconds.
type Event = fn(&Suite, &Ours, &str) -> Result<u64, Failure>;

const CHANGED: &[(&str, Event)] = &[("changed", change)];
const ALL: &[(&str, Event)] = &[("killed", kill), ("replaced", replace), ("changed", change)];
const MOVED: &[(&str, Event)] = &[("moved", relocate)];

struct Place {
    name: &'static str,
    ours: Ours,
    /// What its volume's stack is changed to, or where it moves, and back.
    other: String,
    /// The last one also at rest.
    events: &'static [(&'static str, Event)],
}

/// All, in each place; changes and moves also at rest.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let places = places(suite)?;
    let began = Instant::now();
    for _ in 0..if suite.quick { 2 } else { TIMES } {
        for place in &places {
            let load = Load::new("randwrite", "4k", 32).on(place.name);
            let key = |how: &str| Key { test: load.name(), depth: load.depth, client: "lean".into(), subject: how.into() };
            for &(how, event) in place.events {
                record.add(&key(how), State::Any, sample(suite, place, &load, event)?);
            }
            if let Some(&(how, event)) = place.events.last() {
                record.add(&key(&format!("{how} at rest")), State::Any, at_rest(suite, place, event)?);
            }
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

/// With one device and with many, in memory, in a file, and with a service that reads what was being written; for changes of services
/// that keep tables on their legs as well, and for a volume that moves.
fn places(suite: &Suite) -> Result<Vec<Place>, Failure> {
    let file = |name: &str| format!("file:{}", suite.folder(name).display());
    let sealed = format!("crypt(mode=authenticated, key=file:{}, {})", suite.key()?.display(), file("sealed.img"));
    let slow = file("slow.img");
    let cached = format!("cache(mode=back, {}(size=64M)) | {slow}", file("fast.img"));
    let over = |service: &str, legs: &[&str]| {
        let legs: Vec<String> = legs.iter().map(|leg| file(leg)).collect();
        format!("{service}({})", legs.join(", "))
    };
    let many = (1..64).fold(Setup::default(), |setup, index| setup.disk(&format!("d{index}"), "memory", "64M"));
    let place = |name, folder: &str, setup: Setup, stack: &str, other: Option<String>| -> Result<Place, Failure> {
        let setup = setup.disk("d0", stack, "64M");
        let ours = Ours::start(&suite.binary, &suite.folder(folder), suite.target, "adaptive", &setup)?;
        let events = if other.is_some() { CHANGED } else { ALL };
        // A service that holds nothing back.
        let other = other.unwrap_or_else(|| format!("throttle(iops=1000000000) | {stack}"));
        Ok(Place { name, ours, other, events })
    };
    let changed =
        |name, folder: &str, stack: String, other: String| place(name, folder, Setup::default(), &stack, Some(other));
    Ok(vec![
        place("memory", "memory", Setup::default(), "memory", None)?,
        place("file", "file", Setup::default(), &file("paused.img"), None)?,
        place("file, authenticated", "sealed", Setup::default(), &sealed, None)?,
        place("memory, 64 devices", "many", many, "memory", None)?,
        changed("file, a cache put in", "cached", slow, cached)?,
        changed(
            "file, a leg of parity replaced",
            "parity",
            over("parity", &["leg-a.img", "leg-b.img", "leg-c.img"]),
            over("parity", &["leg-a.img", "leg-b.img", "leg-d.img"]),
        )?,
        changed(
            "file, a leg of a mirror replaced",
            "mirror",
            over("mirror", &["side-a.img", "side-b.img"]),
            over("mirror", &["side-a.img", "side-c.img"]),
        )?,
        changed(
            "file, a leg of a mirror put in",
            "wider",
            over("mirror", &["wide-a.img", "wide-b.img"]),
            over("mirror", &["wide-a.img", "wide-b.img", "wide-c.img"]),
        )?,
        Place { events: MOVED, ..changed("file, moved to another file", "moved", file("from.img"), file("to.img"))? },
    ])
}

/// A client that works while something happens.
fn sample(suite: &Suite, Place { ours, other, .. }: &Place, load: &Load, event: Event) -> Result<Sample, Failure> {
    let sockets = [ours.folder("d0")];
    let (sample, pause) = thread::scope(|scope| {
        let client = scope.spawn(|| Lean::with("--latency").run(&suite.binary, &sockets, load, suite.client, SECONDS));
        thread::sleep(PART);
        let pause = event(suite, ours, other);
        (client.join().expect("the thread does not panic"), pause)
    });
    let (mut sample, pause) = (sample?, pause?);
    sample.insert("pause".into(), pause as f64 * 1000.0);
    Ok(sample)
}

/// The same while nobody asks for anything.
fn at_rest(suite: &Suite, Place { ours, other, .. }: &Place, event: Event) -> Result<Sample, Failure> {
    thread::sleep(REST);
    let pause = event(suite, ours, other)?;
    Ok(Sample::from([("pause".into(), pause as f64 * 1000.0)]))
}

fn pauses(ours: &Ours) -> Vec<u64> {
    let number = |line: &str| line.split_once("pause_micros=")?.1.split(' ').next()?.parse().ok();
    ours.log().lines().filter_map(number).collect()
}

/// Kills the worker; how long nobody served, in microseconds.
fn kill(_: &Suite, ours: &Ours, _: &str) -> Result<u64, Failure> {
    let (before, view) = (pauses(ours).len(), ours.json(&["device", "show", "d0"])?);
    let worker = view["worker"]["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let unclear = |said: String| Failure::Output { program: "millrace serve".into(), said };
    let worker = worker.ok_or_else(|| unclear(view.to_string()))?;
    kill_process(worker, Signal::KILL).map_err(|error| unclear(format!("no worker to kill: {error}")))?;
    let start = Instant::now();
    loop {
        if let Some(pause) = pauses(ours).get(before) {
            return Ok(*pause);
        }
        if start.elapsed() > PATIENCE {
            return Err(unclear(ours.log()));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Has the same binary take the worker's place; how long nobody served, in microseconds.
fn replace(suite: &Suite, ours: &Ours, _: &str) -> Result<u64, Failure> {
    let view = ours.json(&["upgrade", "--trial", "0", "--binary", &suite.binary.display().to_string()])?;
    let pause = view["pause_micros"].as_u64();
    pause.ok_or_else(|| Failure::Output { program: "millrace upgrade".into(), said: view.to_string() })
}

/// Changes the volume's stack to the other one, and back at once; how long no request was let through the first time, in microseconds.
fn change(_: &Suite, ours: &Ours, other: &str) -> Result<u64, Failure> {
    let view = ours.json(&["volume", "show", "d0"])?;
    let stack = view["stack"].as_str().unwrap_or_default();
    let to = |stack: &str| ours.json(&["volume", "change", "d0", "--reformat", "--stack", stack]);
    to(other)?;
    let history = ours.json(&["volume", "show", "d0", "--history"])?;
    to(stack)?;
    let pause = history.as_array().and_then(|entries| entries.last()?["pause_us"].as_u64());
    pause.ok_or_else(|| Failure::Output { program: "millrace volume show --history".into(), said: history.to_string() })
}

/// Has the volume move to the other place, and back at once; how long no request was let through the first time, in microseconds: the longer
/// one of the pauses at its beginning and at its end.
fn relocate(_: &Suite, ours: &Ours, other: &str) -> Result<u64, Failure> {
    let view = ours.json(&["volume", "show", "d0"])?;
    let stack = view["stack"].as_str().unwrap_or_default();
    let to = |place: &str| ours.json(&["volume", "migrate", "d0", "--to", place, "--wait"]);
    to(other)?;
    let history = ours.json(&["volume", "show", "d0", "--history"])?;
    to(stack)?;
    let entries = history.as_array().map(Vec::as_slice).unwrap_or_default();
    let pause = match entries {
        [.., begins, ends] => begins["pause_us"].as_u64().max(ends["pause_us"].as_u64()),
        _ => None,
    };
    pause.ok_or_else(|| Failure::Output { program: "millrace volume show --history".into(), said: history.to_string() })
}
