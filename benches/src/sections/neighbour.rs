//! A device whose guest means well, alone and beside one whose guest means harm: in one shard, in two, in a worker of its own.
//!
//! What the hostile guest itself computes has the lowest priority, so that what the other one loses is what the daemon does. Where
//! there is no core to spare, that is little, and what is lost is also lost to the scheduler: the notes say how many there are.
//!
//! Two cores are enough where the well-behaved guest and who serves it share one and take turns, each asleep while the other one works:
//!
//! ```text
//!   the client's core   guest ◄─ interrupt ─ worker        both sleep when there is nothing to do
//!   the target's core   hostile guest, its worker, all keepers, the daemon's own worker, the suite
//! ```
//!
//! Beside loops that have nothing to do with the daemon it is told what the machine itself does to a neighbour.

use std::{
    hint,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use millrace_tests::{Hostile, Trick};

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::{self, State},
    process,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Subject},
    suite::{ENOUGH, Suite},
};

/// What wants a core: the well-behaved guest, who serves it, the hostile one, who serves that.
const BUSY: usize = 4;
/// How long a hostile guest may take to begin.
const BEGIN: Duration = Duration::from_secs(5);

/// Who is beside the device.
const BESIDE: [(&str, &[Trick]); 4] = [
    ("alone", &[]),
    ("beside loops", &[Trick::Loops]),
    ("beside floods", &[Trick::Floods]),
    ("beside shrinking memory", &[Trick::Shrinking]),
];

/// Latencies alone and beside each kind of harm, in turns.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let spare = match cores.checked_sub(BUSY + 1) {
        Some(more) => format!("{} to spare", more + 1),
        None => "none to spare: what is lost is lost to the scheduler as well".to_owned(),
    };
    record.note(format!("{cores} cores; two guests and those who serve them want {BUSY}: {spare}"));
    let setup = Setup::default().disk("good", "memory", "64M").disk("bad", "memory", "64M");
    let one = format!("{0}-{0}", suite.target);
    let start = |name: &str, shards: &str, setup: &Setup| {
        Ours::start_on(&suite.binary, &suite.folder(name), shards, "adaptive", setup)
    };
    let mut places = vec![
        ("in one shard", start("one", &one, &setup)?),
        ("in two workers", start("workers", &one, &setup.clone().isolated())?),
    ];
    // Not on the client's core: it would wait for itself.
    let other = suite.target + 1;
    if other < cores && other != suite.client {
        places.push(("in two shards", start("two", &format!("{}-{other}", suite.target), &setup)?));
    }
    for (_, ours) in &places {
        let good = [ours.folder("good")];
        Lean::default().run(&suite.binary, &good, &Load::new("write", "128k", 8), suite.client, 0.3)?;
    }
    let began = Instant::now();
    for _ in 0..if suite.quick { 1 } else { ENOUGH } {
        for (place, ours) in &places {
            for depth in [1, 32] {
                for (subject, tricks) in BESIDE {
                    let load = Load::randread(depth).on(place);
                    let key = Key { test: load.name(), depth, client: "lean".into(), subject: subject.into() };
                    record.add(&key, State::Any, sample(suite, ours, &Lean::with("--latency"), &load, tricks)?);
                }
            }
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

/// Latencies alone and beside each kind of harm, in turns, where nothing of the one is on the other one's core.
pub(crate) fn on_its_own_core(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let measure = || {
        // The threads of hostile guests are started from here, and stay here.
        gate::pin(suite.target);
        take_turns(suite, record)
    };
    thread::scope(|scope| scope.spawn(measure).join().expect("a measurement does not panic"))
}

fn take_turns(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let setup = Setup::default().volume("good", "memory", "64M").device("good", "good", "messages");
    let setup = setup.disk("bad", "memory", "64M").isolated();
    let mut ours = Ours::start_on(&suite.binary, &suite.folder("spare"), "1", "adaptive", &setup)?;
    ours.daemon().bind(suite.target)?;
    let shown = ours.json(&["device", "show", "good"])?;
    let worker = shown["worker"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let worker = worker.ok_or(Failure::Output { program: "millrace device show".into(), said: shown.to_string() })?;
    process::bind(worker, suite.client)?;
    let asleep = Lean::with("--interrupts --batch 1");
    let good = [ours.folder("good")];
    asleep.run(&suite.binary, &good, &Load::new("write", "128k", 8), suite.client, 0.5)?;
    let mut keys = Vec::new();
    for depth in [1, 32] {
        for subject in BESIDE.iter().map(|(subject, _)| *subject).chain(LOOPS.map(|(subject, _)| subject)) {
            let load = Load::randread(depth).on("on its own core");
            keys.push((Key { test: load.name(), depth, client: "asleep".into(), subject: subject.into() }, load));
        }
    }
    let began = Instant::now();
    let enough = |record: &Record, state| keys.iter().all(|(key, _)| record.count(key, state) >= suite.wanted());
    while ![State::Near, State::Far, State::Any].iter().any(|state| enough(record, *state)) {
        for (key, load) in &keys {
            let before = suite.state(suite.ping_pong());
            let tricks = BESIDE.iter().find(|(subject, _)| *subject == key.subject);
            let sample = match tricks {
                Some((_, tricks)) => sample(suite, &ours, &asleep, load, tricks)?,
                None => beside_a_loop(&key.subject, || asleep.run(&suite.binary, &good, load, suite.client, suite.seconds))?,
            };
            record.add(key, before.between(suite.state(suite.ping_pong())), sample);
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

/// What a loop that knows nothing of the daemon is called, and what it does with its memory again and again.
type Loop = (&'static str, fn(&mut [u8]));

const LOOPS: [Loop; 2] = [("beside a loop", |_| hint::spin_loop()), ("beside copies", copy)];

/// Copies one half of some memory to the other: the caches that both cores share, and the way to memory, are busy with it.
fn copy(memory: &mut [u8]) {
    let (from, to) = memory.split_at_mut(memory.len() / 2);
    to.copy_from_slice(from);
    hint::black_box(to);
}

fn beside_a_loop<R>(subject: &str, measure: impl FnOnce() -> R) -> R {
    let stop = AtomicBool::new(false);
    let turn = LOOPS.iter().find(|(name, _)| *name == subject).map_or(LOOPS[0].1, |(_, turn)| *turn);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = rustix::process::nice(19);
            let mut memory = vec![1; 64 << 20];
            while !stop.load(Ordering::Relaxed) {
                turn(&mut memory);
            }
        });
        let measured = measure();
        stop.store(true, Ordering::Relaxed);
        measured
    })
}

/// The well-behaved guest's latencies while the other one does this.
fn sample(suite: &Suite, ours: &Ours, lean: &Lean, load: &Load, tricks: &'static [Trick]) -> Result<Sample, Failure> {
    let hostile = (!tricks.is_empty()).then(|| begin(ours, tricks));
    let before = hostile.as_ref().map_or(0, |hostile| done(hostile, tricks));
    let good = [ours.folder("good")];
    let mut sample = lean.run(&suite.binary, &good, load, suite.client, suite.seconds)?;
    if let Some(hostile) = hostile {
        sample.insert("rounds".into(), (done(&hostile, tricks) - before) as f64 / suite.seconds);
        hostile.finish();
    }
    Ok(sample)
}

fn done(hostile: &Hostile, tricks: &[Trick]) -> u64 {
    tricks.iter().map(|trick| hostile.rounds(*trick)).sum()
}

/// A hostile guest that has begun.
fn begin(ours: &Ours, tricks: &'static [Trick]) -> Hostile {
    let hostile = Hostile::nvme_in_the_background(&ours.folder("bad").join("cntrl"), tricks);
    let start = Instant::now();
    while done(&hostile, tricks) == 0 && start.elapsed() < BEGIN {
        thread::sleep(Duration::from_millis(5));
    }
    hostile
}
