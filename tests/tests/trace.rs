//! Traces: every request of a known sequence, once, with its stages in order; nothing while nobody asks; an end that says why; and stock
//! guests, whose own traces say the same.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command as Process, Output, Stdio},
    thread::sleep,
    time::Duration,
};

use millrace_block::{BlockCount, Lba, trace::EventOperation};
use millrace_driver::{
    Command, Controller, DmaBuffer, Namespace, Options, QueueOptions, QueuePair,
    spec::{CommandId, NamespaceId},
};
use millrace_tests::{Boot, Daemon, Load, Work, eventually, repository, seats};
use millrace_trace::{
    Trace,
    requests::{Request, Visit},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// `millrace trace` in the background.
struct Tracing {
    child: Child,
    file: PathBuf,
}

impl Tracing {
    /// Starts it, and waits until requests are recorded.
    fn start(daemon: &Daemon, name: &str, more: &[&str]) -> Self {
        let file = daemon.path(&format!("{name}.trace"));
        let _ = fs::remove_file(&file);
        let mut command = daemon.client();
        command.args(["trace", name, "--json", "--out"]).arg(&file).args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starting the trace");
        eventually("the trace begins", || {
            assert_eq!(child.try_wait().expect("its state"), None, "it ended at once");
            fs::metadata(&file).ok().filter(|file| file.len() > 0).map(drop)
        });
        Self { child, file }
    }

    fn wait(self) -> (Output, PathBuf) {
        (self.child.wait_with_output().expect("its end"), self.file)
    }

    /// Ends it as Ctrl-C does; what is in the file.
    fn finish(self) -> Trace {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a process")).expect("not 0");
        kill_process(pid, Signal::INT).expect("a signal");
        let (output, file) = self.wait();
        assert!(output.status.success(), "the trace failed: {}", String::from_utf8_lossy(&output.stderr));
        let trace = read(&file);
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((said["events"].as_u64(), said["dropped"].as_u64()), (Some(trace.events), Some(0)));
        assert!(trace.damage.is_none(), "{:?}", trace.damage);
        trace
    }

    /// Waits until it ends by itself, before it was to; what is in the file.
    fn expect_early(self, why: &str) -> Trace {
        let (output, file) = self.wait();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("ended early") && said.contains(why), "{said}");
        let trace = read(&file);
        assert!(trace.damage.is_none(), "{:?}", trace.damage);
        let end = trace.end.as_ref().expect("an end");
        assert!(end.early && end.reason.contains(why), "{end:?}");
        trace
    }
}

fn read(file: &Path) -> Trace {
    Trace::read(File::open(file).expect("the trace")).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn analyze(daemon: &Daemon, file: &Path, more: &[&str]) -> Value {
    daemon.json(&[&["analyze", file.to_str().expect("a path in UTF-8")], more].concat())
}

/// A guest of the test's own.
struct Host {
    queue: QueuePair,
    page: DmaBuffer,
    namespace: Namespace,
    _controller: Controller,
}

impl Host {
    fn connect(socket: &Path) -> Self {
        let mut controller = Controller::connect(socket, &Options::default()).expect("a controller");
        controller.start().expect("bring-up");
        let namespace = controller.namespace(NamespaceId(1)).expect("a namespace");
        let queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue");
        let page = controller.memory().alloc(64 << 10).expect("memory");
        Self { queue, page, namespace, _controller: controller }
    }

    fn read(&self, lba: u64, blocks: u64) -> Command {
        self.namespace.read(Lba(lba), self.page.slice(0, (blocks * 512) as usize)).expect("a read")
    }

    fn write(&self, lba: u64, blocks: u64) -> Command {
        self.namespace.write(Lba(lba), self.page.slice(0, (blocks * 512) as usize)).expect("a write")
    }

    fn run(&mut self, command: &Command) {
        self.queue.execute(command).expect("a good end");
    }

    /// All at once, with one ring of the doorbell.
    fn run_together(&mut self, commands: &[Command]) -> Vec<CommandId> {
        let ids = commands.iter().map(|command| self.queue.submit(command).expect("room")).collect();
        self.queue.ring().expect("ringing");
        for _ in commands {
            eventually("a completion", || self.queue.next_completion().expect("a completion"));
        }
        ids
    }
}

/// What was asked for, in the trace's words.
type Asked = (EventOperation, u64, u32);

fn asked(request: &Request) -> Asked {
    (request.operation, request.lba, request.count)
}

/// The words of the nodes that a request came by, each with the one above it.
fn nodes(trace: &Trace, request: &Request) -> Vec<(String, Option<String>)> {
    let word = |visit: &Visit| trace.nodes[&visit.node].word.clone();
    request.visits.iter().map(|visit| (word(visit), visit.within.map(|above| word(&request.visits[above])))).collect()
}

fn expect_order(request: &Request) {
    let completed = request.completed.expect("completed");
    let seen = request.seen.expect("seen");
    assert!(seen <= request.fetched, "{request:?}");
    let mut last = request.fetched;
    for visit in &request.visits {
        assert!(last <= visit.begin, "{request:?}");
        last = visit.begin;
        let end = visit.end.expect("an end");
        assert!(visit.begin <= end && end <= completed, "{request:?}");
        if let Some(above) = visit.within {
            assert!(end <= request.visits[above].end.expect("an end"), "{request:?}");
        }
    }
    assert!(request.interrupted.is_none_or(|interrupted| completed <= interrupted), "{request:?}");
}

#[test]
fn every_request_is_there_once_with_its_stages_in_order() {
    let daemon = Daemon::start();
    let stack = format!("throttle(iops=10M) | mirror(memory, file:{})", daemon.path("leg").display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "16M"], &[]);
    let mut host = Host::connect(&socket);
    host.run(&host.write(0, 8));

    let tracing = Tracing::start(&daemon, "disk", &[]);
    let mut expected: Vec<Asked> = Vec::new();
    for number in 0..64 {
        host.run(&host.write(number * 24, 16));
        expected.push((EventOperation::WRITE, number * 24, 16));
    }
    let reads: Vec<_> = (0..32).map(|number| host.read(number * 8, number % 8 + 1)).collect();
    let ids = host.run_together(&reads);
    expected.extend((0..32).map(|number| (EventOperation::READ, number * 8, number as u32 % 8 + 1)));
    host.run(&host.namespace.flush());
    expected.push((EventOperation::FLUSH, 0, 0));
    host.run(&host.namespace.write_zeroes(Lba(100), BlockCount(50), false).expect("a command"));
    expected.push((EventOperation::ZERO, 100, 50));
    let fua = host.namespace.write_fua(Lba(7), host.page.slice(0, 512)).expect("a command");
    host.run(&fua);
    expected.push((EventOperation::WRITE.with_fua(true), 7, 1));
    // One that the front end refuses, and no volume ever sees.
    let mut beyond = host.read((16 << 20) / 512 - 1, 1);
    beyond.sqe.cdw10 += 1;
    host.queue.execute(&beyond).expect_err("beyond the end");
    expected.push((EventOperation::READ, (16 << 20) / 512, 1));
    let trace = tracing.finish();

    let found: Vec<_> = trace.requests.iter().map(asked).collect();
    assert_eq!(found, expected);
    assert!(trace.unfinished.is_empty() && trace.unknown == 0, "{} and {}", trace.unfinished.len(), trace.unknown);
    trace.requests.iter().for_each(expect_order);
    let joined = &report["guest"];
    println!("  {joined}");
    assert_eq!((joined["joined"].as_u64(), joined["unmatched"].as_u64()), (Some(768), Some(0)), "{joined}");
    let outside = joined["stages"].as_array().expect("stages").iter().find(|stage| stage["name"] == "outside");
    assert!(outside.is_some_and(|stage| stage["latency"]["p50"].as_u64() > Some(0)), "{joined}");
    assert!(fs::read_to_string(&page).expect("the page").contains("in the guest's view"));

    analyze(&daemon, &file, &["--export", "perfetto", "--out", &path(&export)]);
    let json: Value = serde_json::from_reader(File::open(&export).expect("the export")).expect("JSON");
    let began = json["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] == "b");
    assert_eq!(began.filter(|event| event["name"] == "read").count(), 256);

    // fio reads blktrace's records, and does it all again.
    analyze(&daemon, &file, &["--export", "blktrace", "--out", &path(&replay)]);
    let again = Process::new(repository().join("scripts/in-root"))
        .args(["fio", "--name=again", "--ioengine=null", "--replay_no_stall=1", "--output-format=json", "--size=64M"])
        .arg(format!("--read_iolog={}", replay.display()))
        .arg(format!("--replay_redirect={}", daemon.path("image").display()))
        .output()
        .expect("fio");
    let said = String::from_utf8_lossy(&again.stdout);
    let fio: Value = serde_json::from_str(said.get(said.find('{').unwrap_or(0)..).unwrap_or_default())
        .unwrap_or_else(|error| panic!("{error} in {said}{}", String::from_utf8_lossy(&again.stderr)));
    let did = |what: &str| fio["jobs"][0][what]["total_ios"].as_u64();
    assert_eq!((did("read"), did("write")), (Some(256), Some(512)), "{said}");
    assert!(trace.dropped == 0);
    daemon.finish();
}

#[test]
fn an_nvme_guests_requests_are_known() {
    a_guests_requests_are_known(false);
}

#[test]
fn a_virtio_guests_requests_are_known() {
    a_guests_requests_are_known(true);
}
