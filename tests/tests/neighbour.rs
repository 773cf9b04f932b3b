//! A guest that means harm beside one that means well: docs/survival.md. The one fails, alone; the other does not notice.

use std::path::{Path, PathBuf};

use millrace_block::Lba;
use millrace_driver::{Controller, Options, QueueOptions, spec::NamespaceId};
use millrace_tests::{Daemon, Hostile, Load, Trick, Work, eventually, unless_heavy};
use serde_json::Value;

/// What a daemon's log may have at most: whatever a guest does, it is told at a limited rate.
const LOG: usize = 1 << 20;

fn shown(daemon: &Daemon, device: &str) -> Value {
    daemon.json(&["device", "show", device])
}

fn worker(daemon: &Daemon, device: &str) -> u64 {
    shown(daemon, device)["worker"]["pid"].as_u64().expect("a process")
}

/// Where the hostile guest's blocks are: a file, whose requests wait, or memory.
fn blocks(daemon: &Daemon, isolation: &str) -> String {
    if isolation == "shared" { format!("file:{}", daemon.path("bad.img").display()) } else { "memory".to_owned() }
}

fn nvme(daemon: &Daemon, backend: &str) -> PathBuf {
    daemon.disk("bad", &["--backend", backend, "--size", "64M"], &[])
}

fn virtio(daemon: &Daemon, backend: &str) -> PathBuf {
    daemon.virtio_disk("bad", &["--backend", backend, "--size", "64M"], &[])
}

/// One that checks every byte, and one that does every harm again and again.
fn beside(
    isolation: &str,
    disk: fn(&Daemon, &str) -> PathBuf,
    hostile: fn(&Path, &'static [Trick]) -> Hostile,
) -> (Daemon, PathBuf) {
    let daemon = Daemon::start_with(&["--isolation", isolation]);
    let good = daemon.disk("good", &["--backend", "memory", "--size", "64M"], &[]);
    let bad = disk(&daemon, &blocks(&daemon, isolation));
    let workers = ["good", "bad"].map(|name| worker(&daemon, name));
    assert_eq!(workers[0] == workers[1], isolation == "shared");
    let mut load = Load::start(&good, &Work::default());
    load.wait_until_busy();
    let hostile = hostile(&bad, &Trick::ALL);
    for trick in Trick::ALL {
        eventually(trick.word(), || {
            load.expect_running();
            (hostile.rounds(trick) >= unless_heavy(40, 4000)).then_some(())
        });
    }
    for trick in Trick::ALL {
        let (rounds, ends) = (hostile.rounds(trick), hostile.ends(trick));
        println!("  {}: {rounds} times, {ends} sessions that ended badly: {}", trick.word(), hostile.last_end(trick));
    }
    assert!(hostile.ends(Trick::Shrinking) > 0, "nothing came of memory that went");
    hostile.finish();
    assert_eq!(["good", "bad"].map(|name| worker(&daemon, name)), workers, "no worker ended");
    assert_eq!((daemon.pauses(), shown(&daemon, "good")["phase"].as_str()), (Vec::new(), Some("ready")));
    let (commands, longest) = load.finish_with_longest();
    println!("  the neighbour: {commands} commands, every byte right, the longest {} ms", longest / 1_000_000);
    assert!(daemon.log().len() < LOG, "the log has {} bytes", daemon.log().len());
    (daemon, bad)
}

/// As [`beside`], and the device serves the next guest as if nothing had been.
fn beside_nvme(isolation: &str) {
    let (daemon, bad) = beside(isolation, nvme, Hostile::nvme);
    let mut controller = Controller::connect(&bad, &Options::default()).expect("a controller");
    let namespace = controller.namespace(NamespaceId(1)).expect("a namespace");
    let mut queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue pair");
    let (out, back) = (controller.memory().alloc(4096).expect("memory"), controller.memory().alloc(4096).expect("memory"));
    out.fill(0x5a);
    queue.execute(&namespace.write(Lba(8), out.slice(0, 4096)).expect("in range")).expect("a write");
    queue.execute(&namespace.read(Lba(8), back.slice(0, 4096)).expect("in range")).expect("a read");
    assert_eq!(back.read_vec(0, 4096), [0x5a; 4096]);
    drop((queue, controller));
    daemon.finish();
}

#[test]
fn nvme_in_one_worker() {
    beside_nvme("shared");
}

#[test]
fn nvme_in_workers_of_their_own() {
    beside_nvme("device");
}

fn beside_virtio(isolation: &str) {
    let (daemon, _) = beside(isolation, virtio, Hostile::virtio);
    eventually("the virtio disk waits for the next guest", || (shown(&daemon, "bad")["state"] == "ready").then_some(()));
    daemon.finish();
}

#[test]
fn virtio_in_one_worker() {
    beside_virtio("shared");
}

#[test]
fn virtio_in_workers_of_their_own() {
    beside_virtio("device");
}
