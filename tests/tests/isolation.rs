//! Workers of their own: docs/isolation.md. What happens to one is nobody else's trouble.

use std::{
    fs,
    io::Write,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use millrace_driver::{
    Command, Controller, DmaBuffer, Options, QueueOptions, QueuePair,
    spec::{NamespaceId, NvmOpcode, Status},
};
use millrace_tests::{Daemon, Load, Work, eventually, unless_heavy};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Value, json};

const BY_DEVICE: [&str; 2] = ["--isolation", "device"];
const BY_TENANT: [&str; 2] = ["--isolation", "tenant"];

fn file_disk(daemon: &Daemon, name: &str, device: &[&str]) -> PathBuf {
    let backend = format!("file:{}", daemon.path(&format!("{name}.img")).display());
    daemon.disk(name, &["--backend", &backend, "--size", "64M"], device)
}

fn device(daemon: &Daemon, name: &str) -> Value {
    daemon.json(&["device", "show", name])
}

fn worker_name(daemon: &Daemon, device_name: &str) -> String {
    device(daemon, device_name)["worker"]["name"].as_str().expect("a name").to_owned()
}

fn worker_of(daemon: &Daemon, device_name: &str) -> u32 {
    let pid = device(daemon, device_name)["worker"]["pid"].as_u64().expect("a process");
    u32::try_from(pid).expect("a process")
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("a signal");
}

/// Ends the worker of a device; the next one's process, once it answers.
fn kill_worker_of(daemon: &Daemon, name: &str, how: Signal) -> u32 {
    let old = worker_of(daemon, name);
    eventually("the end of a worker", || {
        // The runtime takes the first SIGSEGV and SIGBUS for faults that will come again; its own do.
        let _ = kill_process(Pid::from_raw(i32::try_from(old).ok()?)?, how);
        sleep(Duration::from_millis(5));
        (!is_alive(old)).then_some(())
    });
    eventually("another worker", || Some(worker_of(daemon, name)).filter(|new| *new != old && is_alive(*new)))
}

/// A host of its own, with a page.
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

    fn run(&mut self, opcode: NvmOpcode) {
        let mut command = Command::nvm(opcode).with_data(self.page.slice(0, 512));
        (command.sqe.nsid, command.sqe.cdw10) = (NamespaceId(1), 7);
        assert_eq!(self.queue.execute_any(&command).unwrap().status(), Status::SUCCESS);
    }

    fn write(&mut self, value: u64) {
        self.page.write_value(0, &value);
        self.run(NvmOpcode::WRITE);
    }

    fn read(&mut self) -> u64 {
        self.run(NvmOpcode::READ);
        self.page.read_value(0)
    }
}

fn names(list: &Value) -> Vec<String> {
    list.as_array().expect("a list").iter().map(|view| view["name"].as_str().expect("a name").to_owned()).collect()
}

fn workers(daemon: &Daemon) -> Vec<String> {
    names(&daemon.json(&["status"])["workers"])
}

/// Two guests under load in workers of their own: one's ends again and again, in every way; the other's is the same one throughout.
#[test]
fn one_worker_ends_and_the_others_do_not_notice() {
    let daemon = Daemon::start_with(&BY_DEVICE);
    let (victim, other) = (file_disk(&daemon, "victim", &[]), file_disk(&daemon, "other", &[]));
    assert_eq!(workers(&daemon), ["main", "other", "victim"]);
    let (own, others) = (daemon.worker().expect("a worker"), worker_of(&daemon, "other"));
    let mut loads = [&victim, &other].map(|socket| Load::start(socket, &Work::default()));
    loads.iter_mut().for_each(Load::wait_until_busy);
    let signals =
        [Signal::KILL, Signal::SEGV, Signal::KILL, Signal::ABORT, Signal::KILL, Signal::BUS, Signal::KILL, Signal::ILL];
    let rounds = unless_heavy(40, 1000);
    for (round, how) in (0..rounds).zip(signals.iter().cycle()) {
        sleep(Duration::from_micros(round * 7919 % 60_000));
        kill_worker_of(&daemon, "victim", *how);
        loads.iter_mut().for_each(Load::expect_running);
    }
    assert_eq!(worker_of(&daemon, "other"), others, "the other's worker is the same");
    assert_eq!(daemon.worker(), Some(own), "and so is the daemon's own");
    let [(victims, longest), (commands, others_longest)] = loads.map(Load::finish_with_longest);
    println!("  {rounds} workers ended; the victim: {victims} commands, the longest {} ms", longest / 1_000_000);
    println!("  the other: {commands} commands, the longest {} ms", others_longest / 1_000_000);
    assert_eq!(daemon.pauses().len(), usize::try_from(rounds).expect("a number"), "nobody else paused");
    daemon.finish();
}

/// A guest that ends its worker whenever it is there is taken out of service, in its own worker.
#[test]
fn a_device_that_ends_workers_ends_its_own() {
    let daemon = Daemon::start_with(&["--isolation", "device", "--polling", "spin"]);
    let (victim, other) = (file_disk(&daemon, "victim", &[]), file_disk(&daemon, "other", &[]));
    let others = worker_of(&daemon, "other");
    let mut load = Load::start(&other, &Work::default());
    let mut bad = Load::start(&victim, &Work { depth: 64, ..Work::default() });
    load.wait_until_busy();
    bad.wait_until_busy();
    eventually("the device is out of service", || {
        kill_worker_of(&daemon, "victim", Signal::SEGV);
        (device(&daemon, "victim")["phase"] == "failed").then_some(())
    });
    bad.kill();
    load.expect_running();
    assert_eq!((worker_of(&daemon, "other"), device(&daemon, "other")["phase"].as_str()), (others, Some("ready")));
    load.finish();
    daemon.finish();
}

/// The daemon's own worker ends, or hangs: guests of the other workers do not notice, and the operator has everything again.
#[test]
fn the_daemons_own_worker_ends() {
    let daemon = Daemon::start_with(&BY_TENANT);
    let sockets = ["a", "b"].map(|name| file_disk(&daemon, name, &["--tenant", name]));
    let before = ["a", "b"].map(|name| worker_of(&daemon, name));
    let mut loads = sockets.each_ref().map(|socket| Load::start(socket, &Work::default()));
    loads.iter_mut().for_each(Load::wait_until_busy);
    for round in 0..unless_heavy(20, 300) {
        sleep(Duration::from_micros(round * 7919 % 60_000));
        daemon.kill_worker(Signal::KILL);
        loads.iter_mut().for_each(Load::expect_running);
        assert_eq!(["a", "b"].map(|name| worker_of(&daemon, name)), before);
    }
    // While it stands still, nobody else does.
    let own = daemon.worker().expect("a worker");
    signal(own, Signal::STOP);
    let done = |socket: &Path| {
        let mut load = Load::start(socket, &Work::default());
        load.wait_until_busy();
        load.finish()
    };
    let [a, b] = loads;
    a.finish();
    assert!(done(&sockets[0]) > 0, "a new guest is served");
    signal(own, Signal::CONT);
    b.finish();
    let pauses = daemon.pauses().len();
    assert_eq!(pauses, unless_heavy(20, 300), "only the daemon's own worker took over from another");
    let c = file_disk(&daemon, "c", &["--tenant", "a"]);
    assert_eq!(worker_of(&daemon, "c"), before[0], "a tenant's devices have one worker");
    done(&c);
    daemon.finish();
}

/// A worker that hangs is shown, and keeps nobody waiting but its own guests; so does a keeper of a cell that is killed.
#[test]
fn a_worker_that_hangs_keeps_nobody_else_waiting() {
    let daemon = Daemon::start_with(&BY_DEVICE);
    file_disk(&daemon, "stuck", &[]);
    let other = file_disk(&daemon, "other", &[]);
    let stuck = worker_of(&daemon, "stuck");
    signal(stuck, Signal::STOP);
    let shown = daemon.json(&["device", "list"]);
    let shown = shown.as_array().expect("a list");
    let state = |name: &str| shown.iter().find(|view| view["name"] == name).expect("it is listed")["state"].clone();
    assert_eq!(state("stuck"), "failed");
    // On a busy machine the other's answer may have been late as well.
    eventually("the other's answer", || (device(&daemon, "other")["state"] == "ready").then_some(()));
    let status = daemon.json(&["status"]);
    assert!(status["failed"].to_string().contains("worker stuck"), "{status}");
    eventually("the other's counters", || daemon.run(&["metrics"]).contains("device=\"other\"").then_some(()));
    file_disk(&daemon, "third", &[]);
    let mut load = Load::start(&other, &Work::default());
    load.wait_until_busy();
    load.finish();
    signal(stuck, Signal::CONT);
    eventually("it answers again", || (device(&daemon, "stuck")["state"] == "ready").then_some(()));
    // Its keeper's death is its guests', and theirs only; then it is there again.
    let stat = fs::read_to_string(format!("/proc/{stuck}/stat")).expect("its state");
    let parent =
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)).expect("its parent").parse().expect("a process");
    assert_ne!(parent, daemon.pid(), "it has a keeper of its own");
    let mut load = Load::start(&other, &Work::default());
    load.wait_until_busy();
    signal(parent, Signal::KILL);
    eventually("another keeper", || {
        let view: Value = serde_json::from_str(&daemon.try_run(&["device", "show", "stuck", "--json"]).ok()?).ok()?;
        (view["worker"]["pid"].as_u64()? != u64::from(stuck) && view["state"] == "ready").then_some(())
    });
    load.finish();
    let mut load = Load::start(&daemon.socket("stuck"), &Work::default());
    load.wait_until_busy();
    load.finish();
    daemon.finish();
}

/// Programs come as often as they like: those that want a volume of a worker that hangs keep no operator waiting.
#[test]
fn a_change_is_held_up_by_no_programs_that_wait_for_a_worker() {
    let daemon = Daemon::start_with(&BY_TENANT);
    file_disk(&daemon, "a", &["--tenant", "x"]);
    let stuck = worker_of(&daemon, "a");
    signal(stuck, Signal::STOP);
    // As many as are heard of one user at a time. Were they served one after the other, each with a minute's patience, that would take longer
    // than anything here is waited for.
    let programs = [(); 8].map(|()| {
        let mut program = UnixStream::connect(daemon.run_dir().join("apps.sock")).expect("the door");
        program.write_all(b"{\"volume\": \"a\"}\n").expect("a request");
        program
    });
    for name in ["p", "q", "r"] {
        let mut command = daemon.client();
        command.args(["volume", "create", name, "--size", "16M", "--backend", "memory"]);
        let mut client = command.spawn().expect("the client");
        let status = eventually("a change that has nothing to do with it", || client.try_wait().expect("its state"));
        assert!(status.success(), "{status}");
    }
    assert_eq!(names(&daemon.json(&["device", "list"])), ["a"], "sessions that are about to be are no devices");
    // What is asked of it is refused, and leaves nothing lying for others to wait for.
    let (device_a, volume_a) = (["device", "delete", "a"], ["volume", "delete", "a"]);
    let another = ["device", "create", "b", "--nvme", "--tenant", "x"];
    for change in [&device_a[..], &volume_a, &another] {
        let refused = daemon.try_run(change).expect_err("its worker hangs");
        assert!(refused.contains("worker x: it does not answer in time"), "{change:?}: {refused}");
    }
    signal(stuck, Signal::CONT);
    drop(programs);
    eventually("it answers again", || (device(&daemon, "a")["state"] == "ready").then_some(()));
    assert_eq!(worker_of(&daemon, "a"), stuck);
    daemon.finish();
}

/// Everything is there again after a restart, also when the daemon is told to spread it otherwise.
#[test]
fn a_restart_brings_all_back_in_every_mode() {
    let mut daemon = Daemon::start();
    let backend = format!("file:{}", daemon.path("disk.img").display());
    daemon.run(&["disk", "create", "disk", &backend, "--size", "256M"]);
    for name in ["p", "q"] {
        daemon.run(&["volume", "create", name, "--size", "64M", "--stack", "share | volume:disk"]);
        daemon.run(&["device", "create", name, "--nvme", "--volume", name, "--tenant", "t"]);
    }
    file_disk(&daemon, "alone", &[]);
    daemon.run(&["volume", "create", "free", "--size", "16M", "--backend", "memory"]);
    let mut stamp = 0;
    let mut served = |daemon: &Daemon| {
        for (at, name) in ["p", "q", "alone"].iter().enumerate() {
            let mut host = OneHost::connect(&daemon.socket(name));
            if stamp > 0 {
                assert_eq!(host.read(), stamp + at as u64, "{name} has what was written before the restart");
            }
            host.write(stamp + 10 + at as u64);
        }
        stamp += 10;
    };
    let tidy = |daemon: &Daemon| {
        assert_eq!(names(&daemon.json(&["device", "list"])), ["alone", "p", "q"]);
        assert_eq!(names(&daemon.json(&["volume", "list"])), ["alone", "disk", "free", "p", "q"]);
        assert_eq!(daemon.json(&["status"])["failed"], Value::Array(Vec::new()));
    };
    served(&daemon);
    for options in [&BY_TENANT[..], &[], &BY_TENANT, &BY_TENANT] {
        let by_tenant = !options.is_empty();
        daemon.restart_with(options);
        tidy(&daemon);
        assert_eq!(worker_name(&daemon, "p"), if by_tenant { "t" } else { "main" });
        assert_eq!(worker_name(&daemon, "alone"), "main");
        assert_eq!(workers(&daemon).len(), if by_tenant { 2 } else { 1 });
        served(&daemon);
    }
    // Volumes of one disk cannot be apart.
    daemon.stop();
    let said = daemon.refuse_to_start(&BY_DEVICE);
    assert!(said.contains("--isolation shared") && said.contains("one disk"), "{said}");
    daemon.start_again();
    tidy(&daemon);
    daemon.run(&["device", "delete", "q"]);
    daemon.restart_with(&BY_DEVICE);
    assert_eq!(workers(&daemon), ["main", "alone", "p"]);
    daemon.crash_and_restart();
    assert_eq!(workers(&daemon), ["main", "alone", "p"]);
    assert_eq!(names(&daemon.json(&["volume", "list"])), ["alone", "disk", "free", "p", "q"]);
    daemon.finish();
}

/// A cache that has nothing of its own begins anew in the other worker.
#[test]
fn what_services_keep_in_memory_stays_in_its_worker() {
    let daemon = Daemon::start_with(&BY_TENANT);
    daemon.run(&["device", "create", "b", "--nvme", "--tenant", "y"]);
    let create = |name: &str, stack: &str| daemon.run(&["volume", "create", name, "--size", "16M", "--stack", stack]);
    let cached = |mode: &str, name: &str| {
        format!("cache(mode={mode}, memory(size=8M)) | file:{}", daemon.path(&format!("{name}.img")).display())
    };
    for (name, stack) in [("i", "integrity | memory".to_owned()), ("w", cached("back", "w"))] {
        create(name, &stack);
        let said = daemon.try_run(&["device", "attach", "b", name]).expect_err("it must be refused");
        assert!(said.contains("keeps in the memory of that worker"), "{said}");
        daemon.run(&["volume", "delete", name]);
    }
    create("t", &cached("through", "t"));
    daemon.run(&["device", "attach", "b", "t"]);
    assert_eq!(daemon.json(&["volume", "show", "t"])["health"], "good");
    daemon.finish();
}

/// A volume goes where it is attached; what two workers would have to share is refused with what to do.
#[test]
fn volumes_follow_their_devices() {
    let daemon = Daemon::start_with(&BY_TENANT);
    let refused = |arguments: &[&str], why: &str| {
        let said = daemon.try_run(arguments).expect_err("it must be refused");
        assert!(said.contains(why), "{arguments:?}: {said}");
    };
    let first = file_disk(&daemon, "a", &["--tenant", "x"]);
    daemon.run(&["device", "create", "b", "--nvme", "--tenant", "y"]);
    daemon.run(&["device", "create", "c", "--virtio-blk", "--tenant", "x"]);
    daemon.run(&["device", "create", "d", "--nvme"]);
    assert_eq!(workers(&daemon), ["main", "x", "y"]);
    for other in ["b", "d"] {
        refused(&["device", "attach", other, "a"], "device a shows it");
        refused(&["device", "attach", other, "a"], "--isolation tenant");
    }
    // What was written is there, wherever it goes.
    OneHost::connect(&first).write(1);
    for (before, device) in (1..).zip(["b", "d", "a"]) {
        let list = daemon.json(&["device", "list"]);
        let holder = list.as_array().unwrap().iter().find(|view| view["namespaces"] != Value::Array(Vec::new())).unwrap();
        daemon.run(&["device", "detach", holder["name"].as_str().unwrap(), "1"]);
        daemon.run(&["device", "attach", device, "a"]);
        let mut host = OneHost::connect(&daemon.socket(device));
        assert_eq!(host.read(), before);
        host.write(before + 1);
    }
    // A copy has both its volumes where it is.
    daemon.run(&["volume", "create", "copied", "--size", "64M", "--backend", "memory"]);
    daemon.run(&["copy", "a", "copied"]);
    let copies = || daemon.json(&["copy", "list"]);
    eventually("the copy", || (copies()[0]["state"] == "done").then_some(()));
    assert_eq!(names(&copies()), ["copy1"]);
    refused(&["device", "attach", "b", "copied"], "in the memory of that worker");
    daemon.run(&["volume", "delete", "copied"]);
    daemon.run(&["device", "detach", "a", "1"]);
    daemon.run(&["device", "attach", "c", "a"]);
    assert_eq!(device(&daemon, "c")["namespaces"][0]["volume"], "a");
    // What is in memory stays, once there is something.
    daemon.run(&["volume", "create", "m", "--size", "16M", "--backend", "memory"]);
    daemon.run(&["device", "attach", "b", "m"]);
    OneHost::connect(&daemon.socket("b")).write(9);
    daemon.run(&["device", "detach", "b", "1"]);
    refused(&["device", "attach", "a", "m"], "in the memory of that worker");
    daemon.run(&["volume", "delete", "m"]);
    // Names are one for all, and so are UUIDs.
    let known = daemon.json(&["volume", "show", "a"])["uuid"].as_str().expect("a UUID").to_owned();
    refused(&["volume", "create", "z", "--size", "16M", "--backend", "memory", "--uuid", &known], "a has the UUID");
    refused(&["device", "create", "z", "--nvme", "--tenant", "y", "--uuid", &known], "in worker x");
    let subsystem = device(&daemon, "d")["subnqn"].as_str().expect("a name").to_owned();
    let subsystem = subsystem.rsplit(':').next().expect("a UUID");
    refused(&["device", "create", "z", "--nvme", "--tenant", "y", "--uuid", subsystem], "d has the UUID");
    refused(&["volume", "create", "a", "--size", "16M", "--backend", "memory"], "exists already");
    refused(&["device", "create", "b", "--nvme", "--tenant", "x"], "exists already");
    refused(&["device", "create", "e", "--nvme", "--tenant", "main"], "worker would be called main");
    refused(&["device", "create", "e", "--nvme", "--tenant", "../x"], "cannot be a name");
    refused(&["device", "create", "e", "--nvme", "--tenant", "z", "--queues", "9999"], "queues");
    refused(&["device", "attach", "b", "none"], "does not exist");
    refused(&["device", "delete", "none"], "does not exist");
    refused(&["volume", "delete", "a"], "attached to c");
    assert_eq!(workers(&daemon), ["main", "x", "y"], "what was refused left no worker");
    // A worker that serves nobody ends; its volumes go to the daemon's own.
    let gone = worker_of(&daemon, "b");
    daemon.run(&["device", "delete", "b"]);
    assert_eq!(workers(&daemon), ["main", "x"]);
    assert!(!is_alive(gone));
    daemon.run(&["device", "delete", "c"]);
    daemon.run(&["device", "delete", "a"]);
    assert_eq!(workers(&daemon), ["main"]);
    assert_eq!(daemon.json(&["volume", "show", "a"])["state"], "ready");
    daemon.run(&["device", "attach", "d", "a"]);
    assert_eq!(OneHost::connect(&daemon.socket("d")).read(), 4);
    daemon.finish();
}

/// The daemon's own worker ends in the middle of moves: a volume is always somewhere, and open in the end.
#[test]
fn moves_survive_the_worker() {
    moves_survive(|daemon, _| daemon.worker());
}

/// So it is when the one ends that has the volume: whether it had let go before its answer was lost, it says afterwards.
#[test]
fn moves_survive_the_worker_that_lets_go() {
    moves_survive(|daemon, at| Some(worker_of(daemon, at)));
}

/// And when the one ends that takes it: it does not open what the other may have open.
#[test]
fn moves_survive_the_worker_that_receives() {
    moves_survive(|daemon, at| Some(worker_of(daemon, if at == "a" { "b" } else { "a" })));
}

fn moves_survive(victim: impl Fn(&Daemon, &str) -> Option<u32>) {
    let daemon = Daemon::start_with(&BY_TENANT);
    file_disk(&daemon, "a", &["--tenant", "x"]);
    daemon.run(&["device", "create", "b", "--nvme", "--tenant", "y"]);
    let mut at = "a";
    for round in 0..unless_heavy(12, 200) {
        let to = if at == "a" { "b" } else { "a" };
        let worker = victim(&daemon, at).expect("a worker");
        daemon.run(&["device", "detach", at, "1"]);
        let killer = std::thread::spawn(move || {
            sleep(Duration::from_micros(round * 7919 % 60_000));
            signal(worker, Signal::KILL);
        });
        let attached = daemon.try_run(&["device", "attach", to, "a"]);
        killer.join().expect("the killer");
        eventually("another worker", || victim(&daemon, at).filter(|new| *new != worker && is_alive(*new)));
        if attached.is_err() {
            eventually("it can be attached", || {
                let shown = device(&daemon, to)["namespaces"] != Value::Array(Vec::new());
                (shown || daemon.try_run(&["device", "attach", to, "a"]).is_ok()).then_some(())
            });
        }
        at = to;
        assert_eq!(names(&daemon.json(&["volume", "list"])), ["a"], "one volume, in one place");
        let mut host = OneHost::connect(&daemon.socket(at));
        assert!(round == 0 || host.read() == round, "what was written before the move");
        host.write(round + 1);
    }
    daemon.finish();
}

/// A worker hangs while its tenant gets another device: the device is refused, and the worker's guests have lost nothing.
#[test]
fn a_worker_that_hangs_is_not_given_up_for_another_device() {
    let daemon = Daemon::start_with(&BY_TENANT);
    let socket = file_disk(&daemon, "a", &["--tenant", "x"]);
    let mut host = OneHost::connect(&socket);
    host.write(1);
    let worker = worker_of(&daemon, "a");
    // The second time nobody has heard from it since the daemon's own worker began.
    for again in [false, true] {
        signal(worker, Signal::STOP);
        if again {
            daemon.kill_worker(Signal::KILL);
        }
        let refused = daemon.try_run(&["device", "create", "b", "--nvme", "--tenant", "x"]).unwrap_err();
        assert!(refused.contains("worker x"), "{refused}");
        // Nor is the name of what it has.
        let refused = daemon.try_run(&["volume", "create", "a", "--size", "16M", "--backend", "memory"]).unwrap_err();
        assert!(refused.contains("worker x"), "{refused}");
        signal(worker, Signal::CONT);
        assert_eq!(host.read(), 1, "its guest goes on");
        assert_eq!(worker_of(&daemon, "a"), worker);
    }
    file_disk(&daemon, "b", &["--tenant", "x"]);
    assert_eq!(worker_of(&daemon, "b"), worker);
    daemon.finish();
}

/// Somebody has put away what a worker makes in the run directory: the next one says so, and its guests go on.
#[test]
fn a_run_directory_in_disorder_costs_no_guest() {
    let daemon = Daemon::start();
    let mut host = OneHost::connect(&file_disk(&daemon, "a", &[]));
    host.write(1);
    let (api, hidden) = (daemon.run_dir().join("api.sock"), daemon.run_dir().join("api.hidden"));
    fs::rename(&api, &hidden).expect("the socket's other name");
    let in_the_way = daemon.run_dir().join("apps.new");
    fs::create_dir(&in_the_way).expect("a folder where a socket is to be");
    let worker = daemon.worker().expect("a worker");
    signal(worker, Signal::KILL);
    eventually("another worker", || daemon.worker().filter(|new| *new != worker && is_alive(*new)));
    for _ in 0..3 {
        assert_eq!(host.read(), 1, "the guest goes on");
        sleep(Duration::from_millis(300));
    }
    let next = daemon.worker().expect("a worker");
    fs::rename(&hidden, &api).expect("the socket's name");
    assert_eq!(worker_of(&daemon, "a"), next);
    fs::remove_dir(&in_the_way).expect("nothing in the way");
    eventually("programs are heard again", || UnixStream::connect(daemon.run_dir().join("apps.sock")).ok());
    assert_eq!(daemon.worker(), Some(next), "the same worker all the time");
    daemon.finish();
}

/// A copy of a program. A process of its own makes it: what other tests start meanwhile would have the file open for writing, if this one
/// had, and what is being written does not run.
fn copy_program(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").args([from, to]).status().expect("cp");
    assert!(copied.success(), "{} is not copied to {}", from.display(), to.display());
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).expect("making it one");
}

fn odd_worker(place: &Path, fault: &str) -> PathBuf {
    let path = place.join(fault);
    copy_program(&Daemon::odd_worker(), &path);
    path
}

/// The binary of a process; none of one that has ended since it was named.
fn runs(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// An upgrade is everybody's: all workers go on with the new binary, or all with the old one.
#[test]
fn an_upgrade_is_of_all_workers_or_of_none() {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().to_str().expect("a path in UTF-8");
    let daemon = Daemon::start_with(&["--isolation", "device", "--upgrade-from", path]);
    let sockets = ["a", "b"].map(|name| file_disk(&daemon, name, &[]));
    let mut loads = sockets.each_ref().map(|socket| Load::start(socket, &Work::default()));
    loads.iter_mut().for_each(Load::wait_until_busy);
    let (this, next) = (Daemon::binary().canonicalize().unwrap(), Daemon::next_binary().canonicalize().unwrap());
    let all_run = |binary: &Path| {
        daemon.worker_binary() == binary
            && ["a", "b"].iter().all(|name| runs(worker_of(&daemon, name)).as_deref() == Some(binary))
    };
    let layout = |name: &str| device(&daemon, name)["state_layout"].as_u64().expect("a version");
    let first = layout("a");
    for round in 0..unless_heavy(4, 40) {
        let pause = daemon.upgrade(if round % 2 == 0 { &next } else { &this }, 0).expect("an upgrade");
        println!("  guests waited {pause} µs");
        assert!(all_run(if round % 2 == 0 { &next } else { &this }));
        eventually("the trial is over everywhere", || {
            let version = if round % 2 == 0 { first + 1 } else { first };
            ["a", "b"].iter().all(|name| layout(name) == version).then_some(())
        });
        loads.iter_mut().for_each(Load::expect_running);
    }
    // The first one that fails ends it for all, whichever worker's it is.
    copy_program(&this, &place.path().join("whole"));
    for (fault, reason) in [
        ("hangs", "in time"),
        ("ignorant", "it does not know"),
        ("ends-at-its-turn", "exit status: 3"),
        ("fails-as-first", "exit status: 3"),
    ] {
        let refused = daemon.upgrade(&odd_worker(place.path(), fault), 3600).expect_err("no upgrade");
        assert!(refused.contains(reason), "{fault}: {refused}");
        eventually("all go on with the old binary", || all_run(&this).then_some(()));
        loads.iter_mut().for_each(Load::expect_running);
    }
    let soon = odd_worker(place.path(), "crashes-soon-as-first");
    let said = daemon.try_run(&["upgrade", "--binary", soon.to_str().expect("a path in UTF-8")]);
    println!("  {said:?}");
    eventually("all go on with the old binary", || all_run(&this).then_some(()));
    // One that fails afterwards, while the first is on trial.
    daemon.upgrade(&next, 3600).expect("an upgrade");
    assert!(all_run(&next));
    kill_worker_of(&daemon, "a", Signal::ABORT);
    eventually("all go on with the old binary", || all_run(&this).then_some(()));
    let last = daemon.json(&["upgrade", "--show"]);
    assert_eq!(last["state"], "failed", "{last}");
    assert!(last["reason"].as_str().is_some_and(|reason| reason.contains("worker a: ")), "{last}");
    for load in loads {
        load.finish();
    }
    daemon.finish();
}

/// While the daemon's own worker is about to be exchanged, nothing changes what is where: a worker that began then would have the old binary, and who
/// waited would wait for one that ends.
#[test]
fn no_worker_begins_while_the_daemons_own_is_exchanged() {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().to_str().expect("a path in UTF-8");
    let daemon = Daemon::start_with(&["--isolation", "tenant", "--upgrade-from", path]);
    let hangs = odd_worker(place.path(), "hangs");
    let mut upgrade = daemon.client();
    upgrade.args(["upgrade", "--binary", hangs.to_str().expect("a path in UTF-8")]);
    let mut upgrade = upgrade.spawn().expect("the client");
    let is_running = || {
        let view: Value = serde_json::from_str(&daemon.try_run(&["upgrade", "--show", "--json"]).ok()?).ok()?;
        Some(view["state"] == "running")
    };
    eventually("an upgrade", || is_running().filter(|running| *running));
    let refused = daemon.try_run(&["device", "create", "a", "--nvme", "--tenant", "x"]).unwrap_err();
    assert!(refused.contains("an upgrade is under way"), "{refused}");
    assert!(!upgrade.wait().expect("its end").success());
    let made = || daemon.try_run(&["device", "create", "b", "--nvme", "--tenant", "y"]).ok();
    eventually("a device after the upgrade", made);
    file_disk(&daemon, "a", &["--tenant", "x"]);
    assert_eq!(worker_name(&daemon, "a"), "x");
    daemon.finish();
}

/// What a configuration file declares is made where it belongs; what it cannot have is an error with its line.
#[test]
fn a_configuration_file_is_spread_as_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("millrace.toml");
    let path = file.to_str().expect("a path in UTF-8");
    let text = |attach: &str| {
        format!(
            "isolation = \"tenant\"\nworker_shards = \"1\"\n\
             [[volume]]\nname = \"one\"\nsize = \"16M\"\nbackend = \"file:one.img\"\n\
             [[volume]]\nname = \"two\"\nsize = \"16M\"\nbackend = \"memory\"\n\
             [[device]]\nname = \"a\"\nnvme = {{}}\ntenant = \"x\"\nattach = [{{ volume = \"one\" }}]\n\
             [[device]]\nname = \"b\"\nnvme = {{}}\ntenant = \"y\"\nattach = [{{ volume = \"{attach}\" }}]\n"
        )
    };
    fs::write(&file, text("two")).expect("a file");
    let mut daemon = Daemon::start_with(&["--config", path]);
    let is_right = |daemon: &Daemon| {
        assert_eq!(workers(daemon), ["main", "x", "y"]);
        assert_eq!((worker_name(daemon, "a"), worker_name(daemon, "b")), ("x".to_owned(), "y".to_owned()));
        assert_eq!(device(daemon, "b")["namespaces"][0]["volume"], "two");
    };
    is_right(&daemon);
    daemon.restart();
    is_right(&daemon);
    daemon.stop();
    for (attach, why) in [("one", "show the same"), ("none", "neither declared here nor known")] {
        fs::write(&file, text(attach)).expect("a file");
        let said = daemon.refuse_to_start(&["--config", path]);
        assert!(said.contains(why), "{said}");
    }
    fs::write(&file, text("two").replace("16M\"\nbackend = \"memory", "32M\"\nbackend = \"memory")).expect("a file");
    let said = daemon.refuse_to_start(&["--config", path]);
    assert!(said.contains("millrace.toml:7") && said.contains("size is 32"), "{said}");
    fs::write(&file, text("two")).expect("a file");
    daemon.start_again();
    is_right(&daemon);
    daemon.finish();
}

/// In a sandbox that reaches named paths only, each worker reaches what the file declares for it, and not the file.
#[test]
fn a_configuration_file_is_spread_in_a_strict_sandbox() {
    let place = tempfile::tempdir().expect("a folder");
    let images = place.path().join("images");
    fs::create_dir(&images).expect("a folder");
    for (folder, mode) in [(place.path(), 0o755), (images.as_path(), 0o777)] {
        fs::set_permissions(folder, fs::Permissions::from_mode(mode)).expect("a public folder");
    }
    let file = place.path().join("millrace.toml");
    let text = "isolation = \"tenant\"\n\
         [[volume]]\nname = \"one\"\nsize = \"16M\"\nbackend = \"file:images/one.img\"\n\
         [[volume]]\nname = \"two\"\nsize = \"16M\"\nbackend = \"memory\"\n\
         [[device]]\nname = \"a\"\nnvme = {}\ntenant = \"x\"\nattach = [{ volume = \"one\" }]\n\
         [[device]]\nname = \"b\"\nnvme = {}\ntenant = \"y\"\nattach = [{ volume = \"two\" }]\n";
    fs::write(&file, text).expect("a file");
    let mut options = vec!["--config", file.to_str().expect("a path in UTF-8"), "--sandbox", "on"];
    if geteuid().is_root() {
        options.extend(["--user", "nobody"]);
    }
    let mut daemon = Daemon::start_in(place.path(), &options);
    let is_right = |daemon: &Daemon, volumes: &[&str]| {
        assert_eq!(workers(daemon), ["main", "x", "y"]);
        let listed = daemon.json(&["volume", "list"]);
        assert_eq!(names(&listed), volumes);
        assert!(listed.as_array().expect("a list").iter().all(|view| view["state"] == "ready"), "{listed}");
    };
    is_right(&daemon, &["one", "two"]);
    daemon.restart();
    is_right(&daemon, &["one", "two"]);
    // One more, for a worker that has something already.
    let three = "[[volume]]\nname = \"three\"\nsize = \"16M\"\nbackend = \"file:images/three.img\"\n";
    let text = text.replace("{ volume = \"two\" }", "{ volume = \"two\" }, { volume = \"three\" }");
    fs::write(&file, text + three).expect("a file");
    daemon.restart();
    is_right(&daemon, &["one", "three", "two"]);
    // What is declared for others is out of reach.
    let backend = format!("file:{}", images.join("four.img").display());
    let refused = daemon.try_run(&["volume", "create", "four", "--size", "16M", "--backend", &backend]);
    let refused = refused.expect_err("the daemon's own worker has no file there");
    assert!(refused.contains("Permission denied"), "{refused}");
    daemon.finish();
}

/// A group that the file declares is in several workers: what is said of it holds in all of them, and the file may follow.
#[test]
fn a_group_is_changed_and_deleted_in_all_workers() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("millrace.toml");
    let write = |iops: u32| {
        let text = format!(
            "isolation = \"tenant\"\n\
             [[group]]\nname = \"gold\"\ncaps = {{ iops = {iops} }}\n\
             [[volume]]\nname = \"one\"\nsize = \"16M\"\nstack = \"throttle(group=gold) | memory\"\n\
             [[device]]\nname = \"a\"\nnvme = {{}}\ntenant = \"x\"\nattach = [{{ volume = \"one\" }}]\n"
        );
        fs::write(&file, text).expect("a file");
    };
    write(1000);
    let mut daemon = Daemon::start_with(&["--config", file.to_str().expect("a path in UTF-8")]);
    // As the worker says itself.
    let there = |daemon: &Daemon| -> Value {
        let mut command = daemon.client();
        command.env("MILLRACE_RUN_DIR", daemon.run_dir().join("cells/x")).args(["group", "list", "--json"]);
        serde_json::from_slice(&command.output().expect("running the client").stdout).expect("groups")
    };
    let shown = |daemon: &Daemon| daemon.json(&["group", "show", "gold"]);
    assert_eq!(shown(&daemon)["volumes"], json!(["one"]), "wherever it is");
    assert_eq!(daemon.json(&["group", "list"])[0]["volumes"], json!(["one"]));
    daemon.run(&["group", "change", "gold", "--iops", "100"]);
    assert_eq!((&shown(&daemon)["caps"], &there(&daemon)[0]["caps"]), (&json!({ "iops": 100 }), &json!({ "iops": 100 })));
    write(100);
    daemon.restart();
    assert_eq!(there(&daemon)[0]["caps"], json!({ "iops": 100 }));
    let refused = daemon.try_run(&["group", "delete", "gold"]).expect_err("a volume is in it");
    assert!(refused.contains("group gold is in use: volume one"), "{refused}");
    daemon.run(&["device", "detach", "a", "1"]);
    daemon.run(&["volume", "delete", "one"]);
    daemon.run(&["group", "delete", "gold"]);
    assert_eq!((daemon.json(&["group", "list"]), there(&daemon)), (json!([]), json!([])));
    daemon.finish();
}

/// Counters and accounts of all workers are in one answer.
#[test]
fn metrics_and_usage_are_of_all_workers() {
    let daemon = Daemon::start_with(&BY_DEVICE);
    let backend = format!("meter(tenant=acme) | file:{}", daemon.path("a.img").display());
    daemon.run(&["volume", "create", "a", "--size", "64M", "--stack", &backend]);
    daemon.run(&["device", "create", "a", "--nvme", "--volume", "a"]);
    let mut load = Load::start(&daemon.socket("a"), &Work::default());
    load.wait_until_busy();
    load.finish();
    let text = daemon.run(&["metrics"]);
    assert!(text.contains("millrace_device_up{device=\"a\"} 1"), "{text}");
    assert!(text.contains("shard=\"0\",worker=\"a\""), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1);
    let metered = |daemon: &Daemon| {
        let rows = daemon.json(&["usage", "--by", "tenant"]);
        rows.to_string().contains("acme").then_some(())
    };
    eventually("the account", || metered(&daemon));
    daemon.run(&["device", "delete", "a"]);
    assert_eq!(workers(&daemon), ["main"]);
    eventually("the account, when its worker is no more", || metered(&daemon));
    daemon.finish();
}
