//! The worker dies, the guest does not notice: docs/survival.md.

use std::{fs, path::Path, thread::sleep, time::Duration};

use millrace_driver::{
    Command, Controller, DmaBuffer, Options, QueueOptions, QueuePair,
    spec::{NamespaceId, NvmOpcode, Status},
};
use millrace_tests::{Boot, Cage, Daemon, Load, Work, eventually, seats, skip, unless_heavy, within};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

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

/// Every leaf in memory keeps what is in it, wherever changes of the stack put it.
#[test]
fn every_leaf_in_memory_outlives_the_worker() {
    let daemon = Daemon::start();
    // With a smaller one before them as well; the one that comes and goes is not mixed up with those that stay.
    let stacks = [
        "stripe(chunk=64K, memory, memory, memory)",
        "throttle(iops=1000000) | stripe(chunk=64K, memory, memory, memory)",
        "cache(mode=back, memory(size=16M)) | stripe(chunk=64K, memory, memory, memory)",
        "stripe(chunk=64K, memory, memory, memory)",
    ];
    let socket = daemon.disk("disk", &["--stack", stacks[0], "--size", "192M"], &[]);
    let mut load = Load::start(&socket, &Work { range: "64m", ..Work::default() });
    load.wait_until_busy();
    let rounds = unless_heavy(2, 20);
    for stack in (0..rounds).flat_map(|_| &stacks[1..]) {
        daemon.run(&["volume", "change", "disk", "--stack", stack]);
        for _ in 0..2 {
            daemon.kill_worker(Signal::KILL);
            load.expect_running();
        }
    }
    let commands = load.finish();
    println!("  {} workers killed; {commands} commands, every byte right", 2 * rounds * (stacks.len() - 1));
    // What left is not kept: the three legs, in one file each.
    eventually("the keeper holds three memory files", || (daemon.held("/memfd:millrace-volume") == 3).then_some(()));
    daemon.finish();
}

/// A volume in memory was on its way to a file that nobody finds any more: it is where it was, and has what it had.
#[test]
fn memory_outlives_a_migration_that_cannot_go_on() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let mut load = Load::start(&socket, &Work { range: "32m", ..Work::default() });
    load.wait_until_busy();
    let folder = daemon.path("elsewhere");
    std::fs::create_dir(&folder).expect("a folder");
    let new = format!("file:{}", folder.join("new.img").display());
    daemon.run(&["volume", "migrate", "disk", "--to", &new, "--rate", "1M"]);
    std::fs::remove_dir_all(&folder).expect("the folder is gone");
    for _ in 0..2 {
        daemon.kill_worker(Signal::KILL);
        load.expect_running();
    }
    assert_eq!(daemon.json(&["volume", "show", "disk"])["stack"], "memory");
    let commands = load.finish();
    println!("  {commands} commands, every byte right");
    eventually("the keeper holds one memory file", || (daemon.held("/memfd:millrace-volume") == 1).then_some(()));
    daemon.finish();
}

/// However a worker ends: by a fault of its own every other time, since two in a row are too many.
#[test]
fn a_worker_may_end_in_any_way() {
    let signals =
        [Signal::SEGV, Signal::KILL, Signal::ABORT, Signal::KILL, Signal::BUS, Signal::KILL, Signal::ILL, Signal::KILL];
    survive_often(file, &Work::default(), &signals);
}

/// The kernel's memory killer takes the worker, at whatever it was doing, and never the keeper.
#[test]
fn the_memory_killer_is_no_different() {
    let daemon = Daemon::start();
    let score = |pid: u32| -> i32 {
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("a score");
        score.trim().parse().expect("a number")
    };
    let scores = || (score(daemon.pid()), score(daemon.worker().expect("a worker")));
    let (keeper, worker) = scores();
    println!("  scores for the memory killer: the keeper {keeper}, its worker {worker}");
    assert!(keeper < worker);
    // Every write to a new block takes memory, which counts for whoever touches it first.
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "4G"], &[]);
    let mut load = Load::start(&socket, &Work { range: "4g", ..Work::default() });
    load.wait_until_busy();
    let rounds = unless_heavy(5, 50);
    for round in 0..rounds {
        let cage = match Cage::new((1 + round % 3) << 20) {
            Ok(cage) => cage,
            Err(why) => return skip(&format!("a worker without memory: {why}")),
        };
        let old = daemon.worker().expect("a worker");
        cage.put(old);
        eventually("another worker", || daemon.worker().filter(|new| *new != old));
        eventually("the worker answers", || daemon.try_run(&["status"]).ok());
        assert!(cage.kills() >= 1, "it ended otherwise:\n{}", daemon.log());
        assert_eq!(scores(), (keeper, worker));
        load.expect_running();
    }
    let commands = load.finish();
    assert_eq!(daemon.pauses().len() as u64, rounds);
    println!("  {rounds} workers killed for want of memory; {commands} commands, every byte right");
    daemon.finish();
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
    let failed = daemon.json(&["status"])["failed"].to_string();
    assert!(failed.contains("device victim: two workers in a row ended"), "{failed}");
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

/// A process that serves a worker, by its word; none where that is in no sandbox.
fn server_of(worker: u32, word: &[u8]) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{worker}/task/{worker}/children")).ok()?;
    let is_it = |pid: &i32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|own| own == word)
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_it).and_then(Pid::from_raw)
}

/// A worker without its broker ends when it needs it, which is no device's fault: another one comes, with a broker of its own.
#[test]
fn the_brokers_end_is_the_workers_and_no_devices() {
    let daemon = Daemon::start();
    let backend = file(&daemon);
    let backend: Vec<&str> = backend.iter().map(String::as_str).collect();
    let mut load = Load::start(&daemon.disk("disk", &backend, &[]), &Work::default());
    load.wait_until_busy();
    // Two faults in a row would be too many.
    for round in 0..3 {
        let worker = eventually("a worker", || daemon.worker());
        let Some(broker) = server_of(worker, b"broker") else { return skip("no broker: the worker is in no sandbox") };
        kill_process(broker, Signal::KILL).expect("its end");
        let (name, path) = (format!("more{round}"), daemon.path(&format!("more{round}.img")));
        let backend = format!("file:{}", path.display());
        // The first one who asks for it is cut off.
        let create = || daemon.try_run(&["volume", "create", &name, "--backend", &backend, "--size", "1M"]);
        eventually("another worker", || {
            let _ = create();
            daemon.worker().filter(|new| *new != worker)
        });
        eventually("the volume is made", || {
            let _ = create();
            daemon.try_run(&["volume", "show", &name]).ok()
        });
        load.expect_running();
    }
    assert_eq!(daemon.json(&["device", "show", "disk"])["state"], "ready");
    load.finish();
    daemon.finish();
}

/// The same of its helper for key commands, when a key is to be had next.
#[test]
fn after_the_key_helpers_end_keys_can_be_had_again() {
    let daemon = Daemon::start();
    let worker = eventually("a worker", || daemon.worker());
    let Some(helper) = server_of(worker, b"key-helper") else { return skip("no helper: the worker is in no sandbox") };
    kill_process(helper, Signal::KILL).expect("its end");
    let stack = format!("crypt(key=\"command:/bin/echo {}\") | memory", "5a".repeat(32));
    // While it is on its way out it may still have a key for the first.
    let mut names = (0..).map(|number| format!("volume{number}"));
    let mut create = || {
        let name = names.next().expect("there are enough");
        daemon.try_run(&["volume", "create", &name, "--stack", &stack, "--size", "4M"])
    };
    eventually("another worker", || {
        let _ = create();
        daemon.worker().filter(|new| *new != worker)
    });
    eventually("a key from a command", || create().ok());
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

/// A host of its own: a controller, a queue, and a page.
struct OneHost {
    _controller: Controller,
    queue: QueuePair,
    page: DmaBuffer,
}

impl OneHost {
    fn connect(socket: &Path) -> Self {
        let mut controller = Controller::connect(socket, &Options::default()).unwrap();
        controller.start().unwrap();
        let queue = controller.create_queue_pair(&QueueOptions::default()).unwrap();
        let page = controller.memory().alloc(4096).unwrap();
        Self { _controller: controller, queue, page }
    }

    /// Carries out a command whose data, if any, begin with these words.
    fn run(&mut self, opcode: NvmOpcode, cdw10: u32, data: [u64; 2]) -> Status {
        self.page.write_value(0, &data);
        let mut command = Command::nvm(opcode).with_data(self.page.slice(0, 512));
        (command.sqe.nsid, command.sqe.cdw10) = (NamespaceId(1), cdw10);
        self.queue.execute_any(&command).unwrap().status()
    }
}

/// Who holds a reservation holds it still when its worker is dead, and so does a block that was marked as uncorrectable its mark.
#[test]
fn reservations_and_marks_outlive_the_worker() {
    const WRITE_EXCLUSIVE: u32 = 1 << 8;
    let daemon = Daemon::start();
    let first = daemon.disk("first", &["--backend", "memory", "--size", "64M"], &[]);
    daemon.run(&["device", "create", "second", "--nvme"]);
    daemon.run(&["device", "attach", "second", "first"]);
    let (mut first, mut second) = (OneHost::connect(&first), OneHost::connect(&daemon.socket("second")));
    assert_eq!(first.run(NvmOpcode::RESERVATION_REGISTER, 0, [0, 7]), Status::SUCCESS);
    assert_eq!(first.run(NvmOpcode::RESERVATION_ACQUIRE, WRITE_EXCLUSIVE, [7, 0]), Status::SUCCESS);
    assert_eq!(first.run(NvmOpcode::WRITE_UNCORRECTABLE, 9, [0, 0]), Status::SUCCESS);
    for _ in 0..3 {
        daemon.kill_worker(Signal::KILL);
        assert_eq!(second.run(NvmOpcode::WRITE, 1, [1, 1]).code(), Status::RESERVATION_CONFLICT);
        assert_eq!(second.run(NvmOpcode::READ, 9, [0, 0]).code(), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(first.run(NvmOpcode::WRITE, 1, [2, 2]), Status::SUCCESS);
    }
    assert_eq!(first.run(NvmOpcode::WRITE, 9, [3, 3]), Status::SUCCESS);
    assert_eq!(first.run(NvmOpcode::RESERVATION_RELEASE, WRITE_EXCLUSIVE, [7, 0]), Status::SUCCESS);
    daemon.kill_worker(Signal::KILL);
    assert_eq!(second.run(NvmOpcode::READ, 9, [0, 0]), Status::SUCCESS);
    assert_eq!(second.page.read_value::<[u64; 2]>(0), [3, 3]);
    assert_eq!(second.run(NvmOpcode::WRITE, 1, [1, 1]), Status::SUCCESS);
    drop((first, second));
    daemon.finish();
}

/// A device that gets the number of one that is gone has nothing of what that one's guest had reserved without an identifier of its own.
#[test]
fn a_new_device_inherits_no_reservation() {
    const EXCLUSIVE_ACCESS: u32 = 2 << 8;
    let daemon = Daemon::start();
    let first = daemon.disk("first", &["--backend", "memory", "--size", "64M"], &[]);
    let show = |name: &str| {
        daemon.run(&["device", "create", name, "--nvme"]);
        daemon.run(&["device", "attach", name, "first"]);
        OneHost::connect(&daemon.socket(name))
    };
    let (mut first, mut second) = (OneHost::connect(&first), show("second"));
    assert_eq!(first.run(NvmOpcode::RESERVATION_REGISTER, 0, [0, 7]), Status::SUCCESS);
    assert_eq!(first.run(NvmOpcode::RESERVATION_ACQUIRE, EXCLUSIVE_ACCESS, [7, 0]), Status::SUCCESS);
    assert_eq!(second.run(NvmOpcode::WRITE, 1, [1, 1]).code(), Status::RESERVATION_CONFLICT);
    drop(first);
    daemon.run(&["device", "delete", "first"]);
    assert_eq!(second.run(NvmOpcode::WRITE, 1, [1, 1]), Status::SUCCESS, "nobody holds it any more");
    let mut third = show("third");
    daemon.kill_worker(Signal::KILL);
    let acquired = third.run(NvmOpcode::RESERVATION_ACQUIRE, EXCLUSIVE_ACCESS, [7, 0]);
    assert_eq!(acquired.code(), Status::RESERVATION_CONFLICT, "it has registered with nothing");
    drop((second, third));
    daemon.finish();
}

/// The same where the volume was not there when the device was deleted, nor when that worker ended.
#[test]
fn a_new_device_inherits_no_reservation_of_a_volume_that_was_away() {
    const EXCLUSIVE_ACCESS: u32 = 2 << 8;
    let daemon = Daemon::start();
    let [here, away] = ["disk.img", "away.img"].map(|name| daemon.path(name));
    let stack = format!("file:{}", here.display());
    let first = daemon.disk("first", &["--stack", &stack, "--size", "1M"], &[]);
    daemon.run(&["device", "create", "second", "--nvme"]);
    daemon.run(&["device", "attach", "second", "first"]);
    let (mut first, mut second) = (OneHost::connect(&first), OneHost::connect(&daemon.socket("second")));
    assert_eq!(first.run(NvmOpcode::RESERVATION_REGISTER, 0, [0, 7]), Status::SUCCESS);
    assert_eq!(first.run(NvmOpcode::RESERVATION_ACQUIRE, EXCLUSIVE_ACCESS, [7, 0]), Status::SUCCESS);
    fs::rename(&here, &away).unwrap();
    daemon.kill_worker(Signal::KILL);
    daemon.run(&["device", "delete", "first"]);
    drop(first);
    // It gets the first one's controller identifier.
    daemon.run(&["device", "create", "third", "--nvme"]);
    daemon.kill_worker(Signal::KILL);
    fs::rename(&away, &here).unwrap();
    assert_eq!(second.run(NvmOpcode::WRITE, 1, [1, 1]), Status::SUCCESS, "nobody holds it any more");
    daemon.run(&["device", "attach", "third", "first"]);
    let mut third = OneHost::connect(&daemon.socket("third"));
    let acquired = third.run(NvmOpcode::RESERVATION_ACQUIRE, EXCLUSIVE_ACCESS, [7, 0]);
    assert_eq!(acquired.code(), Status::RESERVATION_CONFLICT, "it has registered with nothing");
    drop((second, third));
    daemon.finish();
}

/// A file that is not there when a worker takes over is waited for: no command ends with an error, those on record the least.
#[test]
fn a_guest_waits_for_a_namespace_that_is_gone_for_now() {
    const COMMANDS: usize = 12;
    let daemon = Daemon::start();
    let [here, away] = ["disk.img", "away.img"].map(|name| daemon.path(name));
    // All but the first are under way, and held back, for a while.
    let stack = format!("throttle(iops=2) | file:{}", here.display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "1M"], &[]);
    let mut host = OneHost::connect(&socket);
    assert_eq!(host.run(NvmOpcode::WRITE, 1, [4, 4]), Status::SUCCESS);
    let mut command = Command::nvm(NvmOpcode::READ).with_data(host.page.slice(0, 512));
    (command.sqe.nsid, command.sqe.cdw10) = (NamespaceId(1), 1);
    let mut left: Vec<_> = (0..COMMANDS).map(|_| host.queue.submit(&command).unwrap()).collect();
    host.queue.ring().unwrap();
    fs::rename(&here, &away).unwrap();
    let mut take = |host: &mut OneHost| {
        while let Some(cqe) = host.queue.next_completion().unwrap() {
            assert_eq!(cqe.status(), Status::SUCCESS);
            left.retain(|cid| *cid != cqe.cid);
            host.queue.ring().unwrap();
        }
        left.len()
    };
    for _ in 0..2 {
        daemon.kill_worker(Signal::KILL);
        let shown = daemon.json(&["device", "show", "disk"]);
        let reason = shown["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("waits for namespace 1") && reason.contains("disk.img"), "{shown}");
        let worker = daemon.worker();
        let refused = daemon.try_run(&["upgrade"]).unwrap_err();
        assert!(refused.contains("volume disk, which device disk is to show"), "{refused}");
        assert_eq!(daemon.worker(), worker, "nobody waited for it");
        daemon.run(&["volume", "create", "another", "--backend", "memory", "--size", "1M"]);
        assert!(daemon.try_run(&["device", "attach", "disk", "another"]).is_err(), "it shows what it showed");
        daemon.run(&["volume", "delete", "another"]);
    }
    let before = take(&mut host);
    assert!(before > 0, "the throttle held none back");
    fs::rename(&away, &here).unwrap();
    eventually("all that was under way is done", || (take(&mut host) == 0).then_some(()));
    assert_eq!(host.page.read_value::<[u64; 2]>(0), [4, 4]);
    assert_eq!(daemon.json(&["device", "show", "disk"])["state"], "ready");
    drop(host);
    daemon.finish();
}

/// The operator gives up a namespace that does not come back: its guest goes on with the others.
#[test]
fn a_guest_goes_on_without_a_namespace_that_the_operator_detaches() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "1M"], &[]);
    let image = daemon.path("second.img");
    let backend = format!("file:{}", image.display());
    daemon.run(&["volume", "create", "second", "--backend", &backend, "--size", "1M"]);
    daemon.run(&["device", "attach", "disk", "second"]);
    let mut host = OneHost::connect(&socket);
    assert_eq!(host.run(NvmOpcode::WRITE, 1, [5, 5]), Status::SUCCESS);
    let other = daemon.disk("other", &["--backend", "memory", "--size", "1M"], &[]);
    let mut neighbour = OneHost::connect(&other);
    fs::remove_file(&image).unwrap();
    daemon.kill_worker(Signal::KILL);
    assert_eq!(neighbour.run(NvmOpcode::WRITE, 1, [6, 6]), Status::SUCCESS, "nobody else waits");
    assert_eq!(daemon.json(&["device", "show", "disk"])["state"], "failed");
    daemon.run(&["device", "detach", "disk", "2"]);
    assert_eq!(host.run(NvmOpcode::READ, 1, [0, 0]), Status::SUCCESS);
    assert_eq!(host.page.read_value::<[u64; 2]>(0), [5, 5]);
    // Nothing of it comes back with the next worker.
    daemon.kill_worker(Signal::KILL);
    assert_eq!(host.run(NvmOpcode::READ, 1, [0, 0]), Status::SUCCESS);
    drop((host, neighbour));
    daemon.finish();
}

/// A file that is only read is locked by several at once, so that its lock does not tell when the dead worker's reads have ended: what tells
/// is given back when it has.
#[test]
fn a_guest_of_an_image_goes_on_when_the_dead_workers_reads_have_ended() {
    let daemon = Daemon::start();
    let image = daemon.path("image.img");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let backend = format!("file:{}", image.display());
    let socket = daemon.disk("disk", &["--backend", &backend, "--read-only"], &[]);
    let held = || fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let mut host = OneHost::connect(&socket);
    let before = held();
    for _ in 0..3 {
        daemon.kill_worker(Signal::KILL);
        assert_eq!(host.run(NvmOpcode::READ, 1, [0, 0]), Status::SUCCESS);
        assert_eq!(host.page.read_value::<[u8; 16]>(0), [7; 16]);
    }
    eventually("the keeper holds what it held", || (held() == before).then_some(()));
    drop(host);
    daemon.finish();
}

/// While no process can be started, nobody is served; then the guest goes on.
#[test]
fn a_keeper_that_cannot_start_a_worker_tries_again() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let mut load = Load::start(&socket, &Work { range: "32m", ..Work::default() });
    load.wait_until_busy();
    let pid = |number: u32| Pid::from_raw(i32::try_from(number).expect("a process id")).expect("not 0");
    let (keeper, worker) = (pid(daemon.pid()), daemon.worker().expect("a worker"));
    // No descriptor is free, as when the system is short of something.
    let none = Rlimit { current: Some(4), maximum: getrlimit(Resource::Nofile).maximum };
    let given = prlimit(Some(keeper), Resource::Nofile, none).expect("the keeper's limit");
    kill_process(pid(worker), Signal::KILL).expect("a signal");
    eventually("nobody is there", || daemon.worker().is_none().then_some(()));
    // However often it tries meanwhile.
    assert_eq!(within(Duration::from_secs(1), || daemon.worker()), None, "nobody comes");
    prlimit(Some(keeper), Resource::Nofile, given).expect("the keeper's limit");
    eventually("another worker", || daemon.worker().filter(|new| *new != worker));
    load.expect_running();
    load.finish();
    daemon.finish();
}

/// A device that a worker cannot bring back keeps its guest, until one can, or the device is deleted.
#[test]
fn a_device_that_does_not_come_up_at_once_keeps_its_guest() {
    let place = tempfile::tempdir().unwrap();
    let [folder, elsewhere, config] = ["folder", "elsewhere", "m.toml"].map(|name| place.path().join(name));
    let socket = folder.join("disk.sock");
    fs::create_dir(&folder).unwrap();
    let volume = "[[volume]]\nname = \"disk\"\nsize = \"64M\"\nbackend = \"memory\"\n";
    let device = "[[device]]\nname = \"disk\"\nnvme = {}\nsocket = \"folder/disk.sock\"\nattach = [{ volume = \"disk\" }]\n";
    fs::write(&config, format!("{volume}{device}")).unwrap();
    let daemon = Daemon::start_with(&["--config", config.to_str().unwrap()]);
    let mut host = OneHost::connect(&socket);
    assert_eq!(host.run(NvmOpcode::WRITE, 1, [4, 4]), Status::SUCCESS);
    let held = || fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let before = held();
    let fail = || {
        // Neither is its socket there, nor can another one be.
        fs::rename(&folder, &elsewhere).unwrap();
        for _ in 0..2 {
            daemon.kill_worker(Signal::KILL);
            assert_eq!(daemon.json(&["device", "show", "disk"])["state"], "failed");
        }
        fs::rename(&elsewhere, &folder).unwrap();
    };
    fail();
    daemon.kill_worker(Signal::KILL);
    assert_eq!(host.run(NvmOpcode::READ, 1, [0, 0]), Status::SUCCESS);
    assert_eq!(host.page.read_value::<[u64; 2]>(0), [4, 4]);
    fail();
    daemon.run(&["device", "delete", "disk"]);
    eventually("what was its is let go", || (held() + 5 < before).then_some(()));
    drop(host);
    daemon.finish();
}
