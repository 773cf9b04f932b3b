//! A device whose guest means well, alone and beside one whose guest means harm: in one shard, in two, in a worker of its own.
//!
//! What the hostile guest itself computes has the lowest priority, so that what the other one loses is what the daemon does. Where
//! there is no core to spare, that is little, and what is lost is also lost to the scheduler: the notes say how many there are.

use std::{
    thread,
    time::{Duration, Instant},
};

use millrace_tests::{Hostile, Trick};

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
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
                    record.add(&key, State::Any, sample(suite, ours, &load, tricks)?);
                }
            }
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

/// The well-behaved guest's latencies while the other one does this.
fn sample(suite: &Suite, ours: &Ours, load: &Load, tricks: &'static [Trick]) -> Result<Sample, Failure> {
    let hostile = (!tricks.is_empty()).then(|| begin(ours, tricks));
    let before = hostile.as_ref().map_or(0, |hostile| done(hostile, tricks));
    let good = [ours.folder("good")];
    let mut sample = Lean::with("--latency").run(&suite.binary, &good, load, suite.client, suite.seconds)?;
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
