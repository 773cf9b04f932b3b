//! The worker dies, the guest does not notice: docs/survival.md.

use std::{thread::sleep, time::Duration};

use millrace_tests::{Boot, Daemon, seats, unless_heavy};
use rustix::process::Signal;

/// How often a guest's worker dies in a run. `MILLRACE_WORKER_KILLS` says another number.
fn kills() -> usize {
    let wanted = std::env::var("MILLRACE_WORKER_KILLS").ok();
    wanted.map_or(unless_heavy(20, 500), |kills| kills.parse().expect("MILLRACE_WORKER_KILLS is a number"))
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
    survive(memory, &[], kills().div_ceil(2));
}

#[test]
fn a_guest_that_rings_by_messages_does_not_notice_that_its_worker_dies() {
    survive(file, &["--doorbells", "messages"], kills().div_ceil(2));
}
