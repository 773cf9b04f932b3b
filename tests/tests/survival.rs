//! The worker dies, the guest does not notice: docs/survival.md.

use std::{thread::sleep, time::Duration};

use millrace_tests::{Boot, Daemon, Load, Work, eventually, seats, unless_heavy};
use rustix::process::Signal;

/// How often a guest's worker dies in a run. `MILLRACE_WORKER_KILLS` says another number.
fn kills() -> usize {
    let wanted = std::env::var("MILLRACE_WORKER_KILLS").ok();
    wanted.map_or(unless_heavy(60, 500), |kills| kills.parse().expect("MILLRACE_WORKER_KILLS is a number"))
}

/// A guest reads and writes, verifies and flushes at depth 32 while its worker dies again and again.
fn survive(backend: impl Fn(&Daemon) -> Vec<String>, device: &[&str], kills: usize) {
    let daemon = Daemon::start();
    let backend = backend(&daemon);
    let backend: Vec<&str> = backend.iter().map(String::as_str).collect();
    let socket = daemon.disk("disk", &backend, device);
    let mut guest = Boot::scenario("survive").socket(&socket).start(&seats(1));
    guest.wait_mark("await stop");
    for _ in 0..kills {
        sleep(Duration::from_secs(2));
        daemon.kill_worker(Signal::KILL);
    }
    guest.send("stop now");
    guest.finish();
    let mut pauses = daemon.pauses();
    pauses.sort_unstable();
    assert_eq!(pauses.len(), kills);
    let (median, worst) = (pauses[kills / 2], pauses[kills - 1]);
    println!("  {kills} workers killed; pauses: median {median} µs, longest {worst} µs");
    daemon.finish();
}

fn memory(_: &Daemon) -> Vec<String> {
    ["--backend", "memory", "--size", "1G"].map(str::to_owned).to_vec()
}

fn file(daemon: &Daemon) -> Vec<String> {
    let backend = format!("file:{}", daemon.path("disk.img").display());
    ["--backend".to_owned(), backend, "--size".to_owned(), "1G".to_owned()].to_vec()
}

#[test]
fn a_guest_on_a_file_does_not_notice_that_its_worker_dies() {
    survive(file, &[], kills());
}

#[test]
fn a_guest_on_memory_does_not_notice_that_its_worker_dies() {
    survive(memory, &[], kills().div_ceil(3));
}

#[test]
fn a_guest_that_rings_by_messages_does_not_notice_that_its_worker_dies() {
    survive(file, &["--doorbells", "messages"], kills().div_ceil(3));
}

/// Our own client, which checks every byte and that nothing completes twice, instead of a guest: its worker dies far more often.
fn survive_often(backend: impl Fn(&Daemon) -> Vec<String>, work: &Work<'_>, signals: &[Signal]) {
    let daemon = Daemon::start();
    let backend = backend(&daemon);
    let backend: Vec<&str> = backend.iter().map(String::as_str).collect();
    let socket = daemon.disk("disk", &backend, &[]);
    let mut load = Load::start(&socket, work);
    load.wait_until_busy();
    let rounds = unless_heavy(60, 1000);
    for (round, signal) in (0..rounds).zip(signals.iter().cycle()) {
        // From the middle of the takeover to long after it.
        sleep(Duration::from_micros(round * 7919 % 100_000));
        daemon.kill_worker(*signal);
        load.expect_running();
    }
    let commands = load.finish();
    println!("  {rounds} workers ended; {commands} commands, every byte right");
    daemon.finish();
}

#[test]
fn commands_on_a_file_complete_once() {
    survive_often(file, &Work::default(), &[Signal::KILL]);
}

#[test]
fn commands_on_memory_complete_once() {
    survive_often(memory, &Work { depth: 32, ..Work::default() }, &[Signal::KILL]);
}

#[test]
fn large_commands_over_several_queues_complete_once() {
    let work = Work { bs: "64k", depth: 8, more: &["--queues", "4", "--doorbell-messages"], ..Work::default() };
    survive_often(file, &work, &[Signal::KILL]);
}

/// However a worker ends: by a fault of its own every other time, since two in a row are too many.
#[test]
fn a_worker_may_end_in_any_way() {
    let signals =
        [Signal::SEGV, Signal::KILL, Signal::ABORT, Signal::KILL, Signal::BUS, Signal::KILL, Signal::ILL, Signal::KILL];
    survive_often(file, &Work::default(), &signals);
}

/// A device during whose work the worker fails twice in a row is taken out of service; the others go on.
#[test]
fn a_device_that_ends_workers_is_taken_out_of_service() {
    let daemon = Daemon::start_with(&["--polling", "spin"]);
    let victim = daemon.disk("victim", &["--backend", "memory", "--size", "64M"], &[]);
    let other = daemon.disk("other", &["--backend", "memory", "--size", "64M"], &[]);
    let mut load = Load::start(&victim, &Work { depth: 64, ..Work::default() });
    load.wait_until_busy();
    let phase = || daemon.json(&["device", "show", "victim"])["phase"].as_str().map(str::to_owned);
    let mut faults = 0;
    eventually("the device is out of service", || {
        daemon.kill_worker(Signal::SEGV);
        faults += 1;
        (phase().as_deref() == Some("failed")).then_some(())
    });
    assert!(faults >= 2, "one fault is forgiven");
    // Its guest finds a fatal status; nobody else finds anything.
    load.kill();
    let mut load = Load::start(&other, &Work::default());
    load.wait_until_busy();
    daemon.kill_worker(Signal::KILL);
    load.finish();
    // A new guest may try again.
    let mut load = Load::start(&victim, &Work::default());
    load.wait_until_busy();
    load.finish();
    daemon.finish();
}

/// The daemon's own callers wait while nobody is there, and what they made is kept.
#[test]
fn the_operator_waits_for_the_next_worker() {
    let daemon = Daemon::start();
    for round in 0..unless_heavy(5, 50) {
        let name = format!("volume{round}");
        daemon.run(&["volume", "create", &name, "--backend", "memory", "--size", "64M"]);
        let old = daemon.worker();
        daemon.kill_worker(Signal::KILL);
        assert_ne!(daemon.worker(), old);
        daemon.run(&["volume", "show", &name]);
    }
    daemon.finish();
}
