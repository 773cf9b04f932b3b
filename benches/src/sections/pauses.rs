//! How long guests wait when their worker is killed, when its binary is replaced and when their volume's stack changes, by the daemon's word
//! and by their own clock.
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
/// How long the next worker may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What happens meanwhile; how long nobody served then, in microseconds.
type Event = fn(&Suite, &Ours) -> Result<u64, Failure>;

/// What is put above a stack, and taken away again: it holds nothing back.
const ABOVE: &str = "throttle(iops=1000000000) | ";

/// All, with one device and with many, in memory, in a file, and with a service that reads what was being written.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let file = |name: &str| format!("file:{}", suite.folder(name).display());
    let sealed = format!("crypt(mode=authenticated, key=file:{}, {})", suite.key()?.display(), file("sealed.img"));
    let one = |backend: &str| Setup::default().disk("d0", backend, "64M");
    let many = (0..64).fold(Setup::default(), |setup, index| setup.disk(&format!("d{index}"), "memory", "64M"));
    let start = |name: &str, setup: &Setup| Ours::start(&suite.binary, &suite.folder(name), suite.target, "adaptive", setup);
    let places = [
        ("memory", start("memory", &one("memory"))?),
        ("file", start("file", &one(&file("paused.img")))?),
        ("file, authenticated", start("sealed", &one(&sealed))?),
        ("memory, 64 devices", start("many", &many)?),
    ];
    let began = Instant::now();
    for _ in 0..if suite.quick { 2 } else { TIMES } {
        for (place, ours) in &places {
            let load = Load::new("randwrite", "4k", 32).on(place);
            for (how, event) in [("killed", kill as Event), ("replaced", replace as Event), ("changed", change as Event)] {
                let key = Key { test: load.name(), depth: load.depth, client: "lean".into(), subject: how.into() };
                record.add(&key, State::Any, sample(suite, ours, &load, event)?);
            }
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

/// A client that works while something happens.
fn sample(suite: &Suite, ours: &Ours, load: &Load, event: Event) -> Result<Sample, Failure> {
    let sockets = [ours.folder("d0")];
    let (sample, pause) = thread::scope(|scope| {
        let client = scope.spawn(|| Lean::with("--latency").run(&suite.binary, &sockets, load, suite.client, SECONDS));
        thread::sleep(PART);
        let pause = event(suite, ours);
        (client.join().expect("the thread does not panic"), pause)
    });
    let (mut sample, pause) = (sample?, pause?);
    sample.insert("pause".into(), pause as f64 * 1000.0);
    Ok(sample)
}

fn pauses(ours: &Ours) -> Vec<u64> {
    let number = |line: &str| line.split_once("pause_micros=")?.1.split(' ').next()?.parse().ok();
    ours.log().lines().filter_map(number).collect()
}

/// Kills the worker; how long nobody served, in microseconds.
fn kill(_: &Suite, ours: &Ours) -> Result<u64, Failure> {
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
fn replace(suite: &Suite, ours: &Ours) -> Result<u64, Failure> {
    let view = ours.json(&["upgrade", "--trial", "0", "--binary", &suite.binary.display().to_string()])?;
    let pause = view["pause_micros"].as_u64();
    pause.ok_or_else(|| Failure::Output { program: "millrace upgrade".into(), said: view.to_string() })
}

/// Puts a service above the volume's stack, or takes it away again; how long no request was let through, in microseconds.
fn change(_: &Suite, ours: &Ours) -> Result<u64, Failure> {
    let view = ours.json(&["volume", "show", "d0"])?;
    let stack = view["stack"].as_str().unwrap_or_default();
    let next = stack.strip_prefix(ABOVE).map_or_else(|| format!("{ABOVE}{stack}"), str::to_owned);
    ours.json(&["volume", "change", "d0", "--stack", &next])?;
    let history = ours.json(&["volume", "show", "d0", "--history"])?;
    let pause = history.as_array().and_then(|entries| entries.last()?["pause_us"].as_u64());
    pause.ok_or_else(|| Failure::Output { program: "millrace volume show --history".into(), said: history.to_string() })
}
