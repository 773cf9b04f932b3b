//! Another binary under running guests: docs/survival.md, "Upgrade".

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use millrace_tests::{Boot, Daemon, Load, Work, eventually, seats, unless_heavy};
use rustix::process::{Pid, Signal, kill_process};

/// Long enough that no trial ends by itself.
const LONG: u64 = 3600;

fn file_disk(daemon: &Daemon, name: &str) -> PathBuf {
    let backend = format!("file:{}", daemon.path(&format!("{name}.img")).display());
    daemon.disk(name, &["--backend", &backend, "--size", "1G"], &[])
}

fn layout(daemon: &Daemon, device: &str) -> u64 {
    daemon.json(&["device", "show", device])["state_layout"].as_u64().expect("a version")
}

/// The versions of the state region that a binary understands, the newest last.
fn newest_layout(binary: &Path) -> u64 {
    let output = std::process::Command::new(binary).args(["layouts", "--json"]).output().expect("running it");
    let layouts: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let state = layouts.as_array().expect("a list").iter().find(|layout| layout["name"] == "device-state");
    state.and_then(|layout| layout["newest"].as_u64()).expect("a version")
}

fn print_pauses(mut pauses: Vec<u64>) {
    pauses.sort_unstable();
    let count = pauses.len();
    println!("  {count} upgrades; guests waited: median {} µs, longest {} µs", pauses[count / 2], pauses[count - 1]);
}

/// Back and forth between two layouts under a load that checks every byte and that nothing completes twice.
fn there_and_back(socket: &Path, daemon: &Daemon, work: &Work<'_>, rounds: usize) {
    let (this, next) = (Daemon::binary(), Daemon::next_binary());
    assert_eq!(newest_layout(&next), newest_layout(&this) + 1);
    let mut load = Load::start(socket, work);
    load.wait_until_busy();
    let mut pauses = Vec::new();
    for round in 0..rounds {
        let binary = if round % 2 == 0 { &next } else { &this };
        // Every other time there, the trial is over before the way back: then the layout is the new one.
        let trial = if round % 4 < 2 { 0 } else { LONG };
        pauses.push(daemon.upgrade(binary, trial).expect("an upgrade"));
        assert_eq!(daemon.worker_binary(), binary.canonicalize().unwrap());
        if trial == 0 {
            eventually("the newest layout", || (layout(daemon, "disk") == newest_layout(binary)).then_some(()));
        } else {
            assert_eq!(layout(daemon, "disk"), newest_layout(&this), "the old binary could not go on");
        }
        sleep(Duration::from_micros(round as u64 * 7919 % 50_000));
        load.expect_running();
    }
    let commands = load.finish();
    print_pauses(pauses);
    println!("  {commands} commands, every byte right");
}

#[test]
fn commands_on_a_file_complete_once() {
    let daemon = Daemon::start();
    let socket = file_disk(&daemon, "disk");
    there_and_back(&socket, &daemon, &Work::default(), unless_heavy(20, 200));
    daemon.finish();
}

#[test]
fn large_commands_over_several_queues_complete_once() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "256M"], &[]);
    let work = Work { bs: "64k", depth: 8, more: &["--queues", "4", "--doorbell-messages"], ..Work::default() };
    there_and_back(&socket, &daemon, &work, unless_heavy(8, 100));
    daemon.finish();
}

/// The worker dies while the new layout is in force, and while it is on trial: whoever follows understands what it finds.
#[test]
fn workers_of_both_layouts_may_die() {
    let daemon = Daemon::start_with(&["--log", "warn,millrace_frontends=debug"]);
    let socket = file_disk(&daemon, "disk");
    let (this, next) = (Daemon::binary(), Daemon::next_binary());
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    for trial in [0, LONG] {
        daemon.upgrade(&next, trial).expect("an upgrade");
        let version = if trial == 0 { newest_layout(&next) } else { newest_layout(&this) };
        eventually("the layout", || (layout(&daemon, "disk") == version).then_some(()));
        daemon.kill_worker(Signal::KILL);
        assert_eq!(daemon.worker_binary(), next.canonicalize().unwrap(), "killed once, it is started again");
        load.expect_running();
        daemon.upgrade(&this, 0).expect("an upgrade");
    }
    // A fault of its own while it is on trial is one too many.
    daemon.upgrade(&next, LONG).expect("an upgrade");
    daemon.kill_worker(Signal::ABORT);
    assert_eq!(daemon.worker_binary(), this.canonicalize().unwrap());
    let last = daemon.json(&["upgrade", "--show"]);
    assert_eq!(last["state"], "failed", "{last}");
    assert!(last["reason"].as_str().is_some_and(|reason| reason.contains("SIGABRT")), "{last}");
    load.finish();
    // What only the new layout has: counted by the one worker that took it over after the trial, and forgotten with the layout.
    assert_eq!(daemon.log().matches("takeovers=1").count(), 1, "{}", daemon.log());
    assert!(!daemon.log().contains("takeovers=2"), "{}", daemon.log());
    daemon.finish();
}

/// Killed once, the new binary is started again; killed twice on trial, it is given up, whoever did that.
#[test]
fn a_worker_that_is_killed_twice_on_trial_is_given_up() {
    let daemon = Daemon::start();
    let socket = file_disk(&daemon, "disk");
    let (this, next) = (Daemon::binary().canonicalize().unwrap(), Daemon::next_binary().canonicalize().unwrap());
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    daemon.upgrade(&next, LONG).expect("an upgrade");
    daemon.kill_worker(Signal::KILL);
    assert_eq!(daemon.worker_binary(), next, "once is no verdict");
    load.expect_running();
    daemon.kill_worker(Signal::KILL);
    assert_eq!(daemon.worker_binary(), this);
    load.expect_running();
    let last = eventually("it is told", || {
        let last = daemon.json(&["upgrade", "--show"]);
        (last["state"] == "failed").then_some(last)
    });
    assert!(last["reason"].as_str().is_some_and(|reason| reason.contains("SIGKILL")), "{last}");
    assert_eq!(last["binary"].as_str().map(Path::new), Some(next.as_path()), "{last}");
    assert_eq!(daemon.json(&["status"])["upgrade"], last);
    daemon.upgrade(&this, 0).expect("an upgrade");
    load.finish();
    daemon.finish();
}

/// A worker of its own that hangs when the trial ends hears of it later: otherwise whoever follows the daemon's own would send it back.
#[test]
fn a_worker_that_does_not_hear_of_the_trials_end_is_told_again() {
    let daemon = Daemon::start_with(&["--isolation", "device"]);
    file_disk(&daemon, "disk");
    let next = Daemon::next_binary();
    daemon.upgrade(&next, 30).expect("an upgrade");
    let pid = || daemon.json(&["device", "show", "disk"])["worker"]["pid"].as_i64().expect("a process");
    let cell = pid();
    let process = i32::try_from(cell).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(process, Signal::STOP).expect("a signal");
    eventually("it does not hear", || daemon.log().contains("was not told yet that its trial is over").then_some(()));
    kill_process(process, Signal::CONT).expect("a signal");
    eventually("the newest layout", || (layout(&daemon, "disk") == newest_layout(&next)).then_some(()));
    daemon.kill_worker(Signal::KILL);
    assert_eq!(pid(), cell, "it was not sent back");
    daemon.finish();
}

/// What the new binary cannot bring back calls the upgrade off. The command says why, and so does whoever serves from then on.
#[test]
fn a_namespace_that_is_not_brought_back_calls_the_upgrade_off() {
    let daemon = Daemon::start();
    file_disk(&daemon, "disk");
    let other = daemon.disk("other", &["--backend", "memory", "--size", "64M"], &[]);
    let (this, next) = (Daemon::binary().canonicalize().unwrap(), Daemon::next_binary());
    let mut load = Load::start(&other, &Work::default());
    load.wait_until_busy();
    let file = fs::OpenOptions::new().write(true).open(daemon.path("disk.img")).expect("the volume's file");
    file.set_len(1 << 20).expect("most of it goes");
    let refused = daemon.upgrade(&next, LONG).expect_err("no upgrade");
    for words in
        ["device disk: namespace 1: ", "part of its data is missing", "devices: guests waited", "what to do: put that right"]
    {
        assert!(refused.contains(words), "{words}: {refused}");
    }
    assert_eq!(daemon.worker_binary(), this);
    load.expect_running();
    let status = daemon.run(&["status"]);
    assert!(status.contains("last upgrade: the old binary") && status.contains("part of its data is missing"), "{status}");
    file.set_len(1 << 30).expect("it is as long as before");
    daemon.upgrade(&this, 0).expect("an upgrade");
    assert_eq!(daemon.json(&["volume", "show", "disk"])["state"], "ready");
    let status = daemon.run(&["status"]);
    assert!(status.contains("last upgrade: the new binary") && !status.contains("failed: "), "{status}");
    load.finish();
    daemon.finish();
}

/// A file of the test's own that may be run.
fn program(place: &Path, name: &str, content: &[u8]) -> PathBuf {
    let path = place.join(name);
    fs::write(&path, content).expect("writing a program");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("making it one");
    path
}

fn odd_worker(place: &Path, fault: &str) -> PathBuf {
    let content = fs::read(Daemon::odd_worker()).expect("the program");
    program(place, fault, &content)
}

/// A daemon that may be upgraded from a folder, and that folder.
fn daemon_with_place() -> (Daemon, tempfile::TempDir) {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().to_str().expect("a path in UTF-8");
    (Daemon::start_with(&["--upgrade-from", path, "--upgrade-from", "/bin"]), place)
}

/// A new binary that does not come as far as its turn is not noticed by anybody.
#[test]
fn a_binary_that_does_not_start_changes_nothing() {
    let (daemon, place) = daemon_with_place();
    let place = place.path();
    let socket = file_disk(&daemon, "disk");
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    let worker = daemon.worker();
    let not_a_program = place.join("text");
    fs::write(&not_a_program, "no program").expect("a file");
    // A worker that was taken over can write to volumes, and make files in the daemon's folders.
    let elsewhere = program(&daemon.path("state"), "elsewhere", b"#!/bin/sh\n");
    let linked = place.join("linked");
    std::os::unix::fs::symlink(&elsewhere, &linked).expect("a link");
    let garbage = program(place, "garbage", b"\x7fELF, and nothing more");
    let script = program(place, "script", b"#!/bin/sh\nexit 7\n");
    let missing = place.join("missing");
    for (binary, reason) in [
        (missing.as_path(), "No such file"),
        (&not_a_program, "Permission denied"),
        (&garbage, "cannot be run"),
        (&elsewhere, "lies neither"),
        (&linked, "lies neither"),
        (&script, "exit status"),
        (Path::new("/bin/false"), "exit status: 1"),
        (&odd_worker(place, "strange"), "it understands versions"),
        (&odd_worker(place, "ignorant"), "it does not know commands-in-flight"),
        (&odd_worker(place, "hangs"), "in time"),
    ] {
        let refused = daemon.upgrade(binary, LONG).expect_err("no upgrade");
        assert!(refused.contains(reason), "{}: {refused}", binary.display());
        assert_eq!(daemon.worker(), worker, "{}", binary.display());
        load.expect_running();
    }
    load.finish();
    assert_eq!(daemon.pauses(), Vec::<u64>::new(), "nobody waited");
    daemon.finish();
}

/// One that fails when it has its turn costs a pause: the old binary serves again, and nothing is lost.
#[test]
fn a_binary_that_fails_at_its_turn_is_replaced_by_the_old_one() {
    let (daemon, place) = daemon_with_place();
    let place = place.path();
    let socket = file_disk(&daemon, "disk");
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    let this = daemon.worker_binary();
    for (fault, reason) in [("ends-at-its-turn", "exit status: 3"), ("hangs-at-its-turn", "did not serve in time")] {
        let refused = daemon.upgrade(&odd_worker(place, fault), LONG).expect_err("no upgrade");
        assert!(refused.contains(reason), "{fault}: {refused}");
        assert_eq!(daemon.worker_binary(), this);
        load.expect_running();
    }
    // It says that it serves, and does nothing of the kind.
    let soon = odd_worker(place, "crashes-soon");
    let path = soon.to_str().expect("a path in UTF-8");
    let refused = daemon.try_run(&["upgrade", "--binary", path]);
    eventually("the old binary", || (daemon.worker_binary() == this).then_some(()));
    println!("  {refused:?}");
    load.expect_running();
    assert_eq!(daemon.json(&["upgrade", "--show"])["state"], "failed");
    // After all that an upgrade works as ever.
    daemon.upgrade(&this, 0).expect("an upgrade");
    load.finish();
    daemon.finish();
}

/// The worker has its files open, whatever becomes of their names; the next one would not find them.
#[test]
fn a_file_that_is_gone_holds_an_upgrade_up_and_costs_a_mirror_one_leg() {
    let daemon = Daemon::start();
    let (file, leg) = (daemon.path("disk.img"), daemon.path("leg.img"));
    let away = daemon.path("away.img");
    let plain = file_disk(&daemon, "disk");
    let stack = format!("mirror(file:{}, file:{})", daemon.path("first.img").display(), leg.display());
    let mirror = daemon.disk("mirror", &["--size", "64M", "--stack", &stack], &[]);
    let mut loads = [&plain, &mirror].map(|socket| Load::start(socket, &Work::default()));
    loads.iter_mut().for_each(Load::wait_until_busy);
    let (this, worker) = (Daemon::binary(), daemon.worker());
    for (path, volume) in [(&file, "disk"), (&leg, "mirror")] {
        fs::rename(path, &away).expect("the file goes");
        let refused = daemon.upgrade(&this, LONG).expect_err("no upgrade");
        let says = format!("volume {volume}: {}", path.display());
        assert!(refused.contains(&says) && refused.contains("put it back"), "{refused}");
        assert_eq!(daemon.worker(), worker);
        fs::rename(&away, path).expect("it is back");
    }
    fs::rename(&leg, &away).expect("a leg goes");
    daemon.kill_worker(Signal::KILL);
    eventually("the next worker serves", || {
        daemon.json(&["status"])["degraded"]
            .as_array()
            .is_some_and(|all| all == &["volume mirror: mirror: leg 1 failed"])
            .then_some(())
    });
    loads.iter_mut().for_each(Load::expect_running);
    let shown = daemon.run(&["volume", "show", "mirror"]);
    assert!(shown.contains("No such file") && shown.contains("volume replace"), "{shown}");
    // What is not there any more holds nothing up; and when it is back, the next worker fills it.
    daemon.upgrade(&this, 0).expect("an upgrade");
    fs::rename(&away, &leg).expect("it is back");
    daemon.upgrade(&this, 0).expect("an upgrade");
    eventually("both legs are good", || {
        daemon.json(&["status"])["degraded"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
    for load in loads {
        load.finish();
    }
    daemon.finish();
}

/// What the operator made is there for the next binary, whose own changes are there for the one after it.
#[test]
fn the_operator_goes_on_as_well() {
    let daemon = Daemon::start();
    let (this, next) = (Daemon::binary(), Daemon::next_binary());
    assert!(daemon.try_run(&["upgrade", "--show"]).is_err(), "there was none");
    for round in 0..4 {
        let volume = format!("volume{round}");
        daemon.run(&["volume", "create", &volume, "--backend", "memory", "--size", "64M"]);
        // A device that is made while the new binary is on trial has the layout that the old one understands.
        let device = format!("device{round}");
        daemon.run(&["device", "create", &device, "--nvme"]);
        assert_eq!(layout(&daemon, &device), newest_layout(&this));
        daemon.run(&["device", "attach", &device, &volume]);
        daemon.upgrade(if round % 2 == 0 { &next } else { &this }, LONG).expect("an upgrade");
        daemon.run(&["volume", "show", &volume]);
    }
    daemon.finish();
}

/// A guest reads and writes, verifies and flushes at depth 32 meanwhile.
#[test]
fn a_guest_does_not_notice() {
    let daemon = Daemon::start();
    let socket = file_disk(&daemon, "disk");
    let mut guest = Boot::scenario("survive").socket(&socket).start(&seats(1));
    guest.wait_mark("await stop");
    let mut pauses = Vec::new();
    for round in 0..unless_heavy(6, 40) {
        sleep(Duration::from_secs(2));
        let binary = if round % 2 == 0 { Daemon::next_binary() } else { Daemon::binary() };
        pauses.push(daemon.upgrade(&binary, if round % 4 < 2 { 0 } else { LONG }).expect("an upgrade"));
    }
    guest.send("stop now");
    guest.finish();
    print_pauses(pauses);
    daemon.finish();
}
