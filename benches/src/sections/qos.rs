//! What shares and caps promise, by the clock: parts of a disk that has more to do than it can, what is guaranteed of it, how long it takes
//! for who has a target, and what a cap lets through, over a while and [at any time](caps).
//!
//! ```text
//!   client ── as much as it can ──► share(weight) ─┐
//!   client ── as much as it can ──► share(weight) ─┼─► disk ──► so many a second          client ── as much as it can ──► throttle ──► memory
//!   client ── as much as it can ──► share(weight) ─┘
//! ```

use std::{thread, time::Instant};

use super::caps;
use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Subject},
    suite::{ENOUGH, Suite},
};

/// Volumes of one disk: weight, and commands in flight.
const SHARES: [(f64, u32); 3] = [(1.0, 16), (1.0, 64), (2.0, 32)];
/// Requests a second that the disk does: so few that each client has some waiting whenever it does not run.
const DISK: u32 = 2000;
/// What of that is guaranteed to one that stands beside another of [`HEAVY`] times its weight, with so many in flight each.
const FLOOR: u32 = 1200;
const HEAVY: u32 = 10;
const DEEP: u32 = 64;
/// How long the disk shall take for one request after the other: it takes four times as long when its depth is used up.
const TARGET: &str = "2ms";
/// Reads a second that are allowed.
const CAPS: [u32; 3] = [1000, 20_000, 100_000];
/// Seconds that a promise is about.
const SECONDS: f64 = 10.0;
/// Seconds in which is looked what a cap lets through at any time.
const WATCHED: f64 = 3.0;

/// How far each is off what is due to it, in percent, what comes of guarantees and targets, and caps at any time, in buckets.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let pool = format!("disk(depth=16) | throttle(iops={DISK}) | file:{}", suite.folder("pool.img").display());
    let mut setup = Setup::default().volume("pool", &pool, "512M");
    for (at, (weight, _)) in SHARES.iter().enumerate() {
        setup = setup.disk(&share(at), &format!("share(weight={weight}) | volume:pool"), "64M");
    }
    let others = [
        ("floor", format!("share(min_iops={FLOOR})")),
        ("heavy", format!("share(weight={HEAVY})")),
        ("prompt", format!("share(latency={TARGET})")),
        ("plain", "share".to_owned()),
    ];
    for (name, share) in others {
        setup = setup.disk(name, &format!("{share} | volume:pool"), "64M");
    }
    for cap in CAPS {
        setup = setup.disk(&format!("cap-{cap}"), &format!("throttle(iops={cap}) | memory"), "64M");
    }
    let ours = Ours::start(&suite.binary, &suite.folder("ours"), suite.target, "spin", &setup)?;
    let (began, seconds) = (Instant::now(), if suite.quick { suite.seconds } else { SECONDS });
    for _ in 0..if suite.quick { 1 } else { ENOUGH } {
        shares(suite, record, &ours, seconds)?;
        guarantee(suite, record, &ours, seconds)?;
        target(suite, record, &ours, seconds)?;
        for cap in CAPS {
            let (load, sockets) = (Load::randread(32), [ours.folder(&format!("cap-{cap}"))]);
            let got = Lean::default().run(&suite.binary, &sockets, &load, suite.client, seconds)?;
            add(record, &format!("cap of {cap} a second"), load.depth, got["iops"], cap.into());
            let above = caps::most_above(&sockets[0].join("cntrl"), cap, suite.client, seconds.min(WATCHED))?;
            let test = format!("cap of {cap} a second, with rests");
            let key = Key { test, depth: caps::DEPTH, client: "driver".into(), subject: "ours".into() };
            record.add(&key, State::Any, Sample::from([("above".into(), above)]));
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

fn share(at: usize) -> String {
    format!("share-{at}")
}

/// A client on each device, with so many in flight, all at the same time; what each got.
fn together(
    suite: &Suite,
    ours: &Ours,
    lean: &Lean,
    clients: &[(String, u32)],
    seconds: f64,
) -> Result<Vec<Sample>, Failure> {
    thread::scope(|scope| {
        let start = |(device, depth): &(String, u32)| {
            let (load, sockets) = (Load::randread(*depth), [ours.folder(device)]);
            scope.spawn(move || lean.run(&suite.binary, &sockets, &load, suite.client, seconds))
        };
        let clients: Vec<_> = clients.iter().map(start).collect();
        let ends = clients.into_iter().map(|client| client.join().expect("the thread does not panic"));
        ends.collect()
    })
}

fn guarantee(suite: &Suite, record: &mut Record, ours: &Ours, seconds: f64) -> Result<(), Failure> {
    let clients = ["floor", "heavy"].map(|device| (device.to_owned(), DEEP));
    let rates = together(suite, ours, &Lean::default(), &clients, seconds)?;
    let test = format!("guarantee of {FLOOR} a second");
    let key = Key { test, depth: DEEP, client: "lean".into(), subject: "ours".into() };
    record.add(&key, State::Any, Sample::from([("iops".into(), rates[0]["iops"])]));
    Ok(())
}

/// One request after the other beside a volume that has more than the disk takes, with a target and without. Clients sleep: beside each other
/// on one core they would wait for it.
fn target(suite: &Suite, record: &mut Record, ours: &Ours, seconds: f64) -> Result<(), Failure> {
    let (_, deep) = SHARES[1];
    for (device, subject) in [("prompt", "ours"), ("plain", "no target")] {
        let clients = [(device.to_owned(), 1), (share(1), deep)];
        let samples = together(suite, ours, &Lean::with("--interrupts --batch 1"), &clients, seconds)?;
        let test = format!("one after the other, beside {deep} in flight");
        let key = Key { test, depth: 1, client: "asleep".into(), subject: subject.into() };
        record.add(&key, State::Any, Sample::from([("p99".into(), samples[0]["p99"])]));
    }
    Ok(())
}

fn shares(suite: &Suite, record: &mut Record, ours: &Ours, seconds: f64) -> Result<(), Failure> {
    let clients: Vec<_> = SHARES.iter().enumerate().map(|(at, (_, depth))| (share(at), *depth)).collect();
    let rates = together(suite, ours, &Lean::default(), &clients, seconds)?;
    let (all, weights): (f64, f64) = (rates.iter().map(|sample| sample["iops"]).sum(), SHARES.iter().map(|of| of.0).sum());
    for ((weight, depth), sample) in SHARES.iter().zip(&rates) {
        add(record, &format!("share, weight {weight}"), *depth, sample["iops"], all * weight / weights);
    }
    Ok(())
}

fn add(record: &mut Record, test: &str, depth: u32, got: f64, due: f64) {
    let key = Key { test: test.into(), depth, client: "lean".into(), subject: "ours".into() };
    let off = (got / due - 1.0).abs() * 100.0;
    record.add(&key, State::Any, Sample::from([("iops".into(), got), ("off".into(), off)]));
}
