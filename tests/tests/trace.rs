//! Traces: every request of a known sequence, once, with its stages in order; nothing while nobody asks; an end that says why; stock
//! guests, whose own traces say the same; and the programs that exports are for, which read the same in them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command as Process, Output, Stdio},
    time::Duration,
};

use millrace_block::{BlockCount, Lba, trace::EventOperation};
use millrace_driver::{
    Command, Controller, DmaBuffer, Namespace, Options, QueueOptions, QueuePair,
    spec::{CommandId, NamespaceId},
};
use millrace_tests::{Boot, Daemon, Load, Work, eventually, repository, seats};
use millrace_trace::{
    Trace, guest,
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

    /// Waits until there are more than so many requests in the file.
    fn wait_for(&self, requests: usize) {
        let there = || Trace::read(File::open(&self.file).ok()?).ok().map(|trace| trace.requests.len());
        eventually("requests in the file", || there().filter(|there| *there > requests));
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
        // Where the one who empties the rings does not get a processor for long, some find no room.
        assert_eq!((said["events"].as_u64(), said["dropped"].as_u64()), (Some(trace.events), Some(trace.dropped)));
        assert!(trace.damage.is_none(), "{:?}", trace.damage);
        trace
    }

    /// Waits until it ends by itself, before it was to, for one of these reasons; what is in the file.
    fn expect_early(self, reasons: &[&str]) -> Trace {
        let (output, file) = self.wait();
        let trace = read(&file);
        assert!(trace.damage.is_none(), "{:?}", trace.damage);
        let end = trace.end.as_ref().expect("an end");
        assert!(end.early && reasons.contains(&end.reason.as_str()), "{end:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("ended early") && said.contains(&end.reason), "{said}");
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
    let missing = (trace.unfinished.len(), trace.unknown, trace.dropped);
    assert_eq!(missing, (0, 0, 0), "unfinished, unknown, dropped");
    trace.requests.iter().for_each(expect_order);
    let known: Vec<_> = trace.requests[64..96].iter().map(|request| CommandId(request.key.command)).collect();
    assert_eq!(known, ids);
    assert!(trace.requests.iter().all(|request| request.key.queue == host.queue.id().0 && request.nsid == 1));
    let leg = trace.nodes.values().find(|node| node.word.starts_with("file:")).expect("the leg").word.clone();
    let under = |above: &str, node: &str| (node.to_owned(), Some(above.to_owned()));
    for (at, request) in trace.requests.iter().enumerate() {
        let nodes = nodes(&trace, request);
        let leaves = nodes.iter().filter(|(_, above)| above.as_deref() == Some("mirror")).count();
        match at {
            // Both legs, in whatever order.
            0..64 | 96..99 => {
                assert_eq!(nodes[..2], [("throttle".to_owned(), None), under("throttle", "mirror")], "{request:?}");
                assert!(nodes.contains(&under("mirror", "memory")) && nodes.contains(&under("mirror", &leg)), "{request:?}");
            }
            64..96 => assert_eq!((nodes.len(), leaves), (3, 1), "{request:?}"),
            _ => assert!(nodes.is_empty() && request.status != 0, "{request:?}"),
        }
        assert!(at == 99 || request.status == 0, "{request:?}");
        let same = |visit: &&Visit| (visit.lba, visit.count) == (request.lba, request.count);
        assert!(request.visits.iter().filter(same).count() >= 3 || at == 99, "nothing moves blocks here: {request:?}");
    }
    assert!(trace.requests[64..96].iter().any(|request| request.depth > 1), "they were taken together");

    // Nobody asks: nothing is recorded.
    host.run(&host.write(0, 8));
    let (output, file) = Tracing::start(&daemon, "disk", &["--volume", "--seconds", "1"]).wait();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let quiet = read(&file);
    assert_eq!((quiet.events, quiet.requests.len(), quiet.end.expect("an end").early), (0, 0, false));

    let report = analyze(&daemon, &daemon.path("disk.trace"), &[]);
    assert_eq!(report["requests"], 0);
    drop(host);
    daemon.finish();
}

/// Waits until a device has finished a hundred commands more.
fn commands_go_on(daemon: &Daemon, device: &str) {
    let finished = || {
        let view = daemon.json(&["device", "show", device]);
        // When it has not answered in time the numbers are zeroes.
        (view["state"] == "ready").then_some(())?;
        Some(view["counters"]["read_commands"].as_u64()? + view["counters"]["write_commands"].as_u64()?)
    };
    let before = eventually("the device answers", finished);
    eventually("a hundred commands more", || finished().filter(|now| *now >= before + 100));
}

/// Commands that a load has in flight.
const DEPTH: u32 = 8;
const WENT: &str = "the daemon's worker went away";
const REPLACED: &str = "another binary took the daemon's place";

/// A load of large commands: there are few of them, so that hardly any machine is too busy to record them all.
fn load(socket: &Path) -> Load {
    let mut load = Load::start(socket, &Work { bs: "64k", depth: DEPTH, ..Work::default() });
    load.wait_until_busy();
    load
}

/// While a load runs, the stack is changed, and other traces are refused.
#[test]
fn a_trace_goes_on_through_changes() {
    let daemon = Daemon::start();
    let image = format!("file:{}", daemon.path("image").display());
    let socket = daemon.disk("disk", &["--stack", &image, "--size", "64M"], &[]);
    daemon.disk("other", &["--backend", "memory", "--size", "16M"], &[]);
    let load = load(&socket);

    let tracing = Tracing::start(&daemon, "disk", &["--volume"]);
    let refused =
        daemon.try_run(&["trace", "other", "--seconds", "1", "--out", daemon.path("no").to_str().expect("a path")]);
    assert!(refused.is_err_and(|said| said.contains("volume disk is being traced")));
    assert!(daemon.try_run(&["trace", "nothing"]).is_err_and(|said| said.contains("volume nothing does not exist")));
    assert!(!daemon.path("no").exists(), "a refused trace leaves no file");
    commands_go_on(&daemon, "disk");
    daemon.run(&["volume", "insert", "disk", "meter"]);
    commands_go_on(&daemon, "disk");
    daemon.run(&["volume", "remove", "disk", "meter"]);
    commands_go_on(&daemon, "disk");
    let trace = tracing.finish();
    assert!(trace.requests.len() > 250, "{} requests, {} events dropped", trace.requests.len(), trace.dropped);
    // What was under way when it began is nobody's. When requests came is not known of those that came just before, or in a gap.
    assert!(trace.background.len() <= DEPTH as usize, "{:?}", trace.background);
    let (seen, unseen): (Vec<_>, Vec<_>) = trace.requests.iter().partition(|request| request.seen.is_some());
    assert!(unseen.len() <= DEPTH as usize || trace.dropped > 0, "{unseen:?}");
    seen.into_iter().for_each(expect_order);
    let ways: std::collections::BTreeSet<Vec<String>> =
        trace.requests.iter().map(|request| nodes(&trace, request).into_iter().map(|(word, _)| word).collect()).collect();
    let expected = [vec![image.clone()], vec!["meter".to_owned(), image.clone()]];
    assert_eq!(ways, expected.into_iter().collect(), "through the meter, and not");
    load.finish();
    daemon.finish();
}

/// The worker goes away in every way there is, while a load runs.
#[test]
fn a_trace_ends_with_its_worker_and_says_why() {
    let daemon = Daemon::start();
    let image = format!("file:{}", daemon.path("image").display());
    let socket = daemon.disk("disk", &["--stack", &image, "--size", "64M"], &[]);
    let load = load(&socket);

    let tracing = Tracing::start(&daemon, "disk", &[]);
    tracing.wait_for(10);
    daemon.kill_worker(Signal::KILL);
    let trace = tracing.expect_early(&[WENT]);
    assert!(trace.requests.len() > 10, "what was in the file is there");

    // What is left to be taken is waited for half a second and no longer: on a busy machine that may be too short, but not every time.
    let upgraded = |_| {
        let tracing = Tracing::start(&daemon, "disk", &[]);
        tracing.wait_for(10);
        daemon.upgrade(&Daemon::binary(), 1).expect("an upgrade");
        let trace = tracing.expect_early(&[REPLACED, WENT]);
        let end = trace.end.as_ref().expect("an end");
        assert!(end.reason == WENT || end.events == trace.events, "{end:?} of {}", trace.events);
        end.reason == REPLACED
    };
    assert!((0..5).any(upgraded), "five upgrades, and no trace says that there was one");

    let tracing = Tracing::start(&daemon, "disk", &[]);
    load.finish();
    let mut daemon = daemon;
    daemon.stop();
    tracing.expect_early(&["the daemon was stopped"]);
}

/// A pager that shows its first page: its user ends the trace by Ctrl-C nevertheless, and the program by another one.
#[test]
fn a_trace_into_a_pipe_that_is_full_can_be_ended() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    let (pipe, end) = std::io::pipe().expect("a pipe");
    // With room for one page, it has none as soon as there is anything in it.
    rustix::pipe::fcntl_setpipe_size(&pipe, 4096).expect("a small one");
    let mut command = daemon.client();
    command.args(["trace", "disk", "--out", "-"]).stdout(end).stderr(Stdio::null());
    let mut child = command.spawn().expect("starting the trace");
    let waiting = || rustix::io::ioctl_fionread(&pipe).expect("a pipe");
    eventually("the beginning of the trace", || (waiting() > 0).then_some(()));
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::INT).expect("a signal");
    let file = daemon.path("next.trace");
    let next = ["trace", "disk", "--seconds", "1", "--out", file.to_str().expect("a path")];
    eventually("another trace is possible", || daemon.try_run(&next).ok());
    assert_eq!(child.try_wait().expect("its state"), None, "it has more to write");
    kill_process(pid, Signal::INT).expect("a signal");
    let status = eventually("its end", || child.try_wait().expect("its state"));
    assert!(!status.success());
    load.finish();
    daemon.finish();
}

/// The one who asks leaves: nothing is recorded for nobody, and the next one may ask.
#[test]
fn a_trace_that_nobody_reads_ends() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let mut load = Load::start(&socket, &Work::default());
    load.wait_until_busy();
    for round in 1..=3 {
        let mut tracing = Tracing::start(&daemon, "disk", &[]);
        tracing.child.kill().expect("killing it");
        tracing.child.wait().expect("its end");
        let trace = read(&tracing.file);
        assert!(trace.damage.cut && trace.end.is_none());
        eventually("the trace has ended", || {
            (daemon.log().matches("nobody listened any more").count() == round).then_some(())
        });
    }
    eventually("another trace is possible", || daemon.try_run(&["trace", "disk", "--seconds", "1", "--out", "-"]).ok());
    load.finish();
    daemon.finish();
}

/// Devices with workers of their own are traced there, by way of the daemon's own.
#[test]
fn a_device_with_a_worker_of_its_own_is_traced_there() {
    let daemon = Daemon::start_with(&["--isolation", "device"]);
    let backend = |name: &str| format!("file:{}", daemon.path(&format!("{name}.img")).display());
    let sockets = ["one", "two"].map(|name| daemon.disk(name, &["--backend", &backend(name), "--size", "16M"], &[]));
    let mut hosts = sockets.map(|socket| Host::connect(&socket));
    let traces = ["one", "two"].map(|name| Tracing::start(&daemon, name, &[]));
    for (number, host) in hosts.iter_mut().enumerate() {
        (0..5 + number as u64).for_each(|at| host.run(&host.write(at * 8, 8)));
    }
    let [one, two] = traces;
    let (one, two) = (one.finish(), two.finish());
    assert_eq!((one.requests.len(), two.requests.len()), (5, 6), "two workers, two traces at a time");
    assert_eq!(one.devices[&1].name, "one");

    let tracing = Tracing::start(&daemon, "one", &[]);
    let shown = daemon.json(&["device", "show", "one"]);
    let worker = i32::try_from(shown["worker"]["pid"].as_i64().expect("a process")).expect("a process");
    kill_process(Pid::from_raw(worker).expect("not 0"), Signal::KILL).expect("a signal");
    tracing.expect_early(&[WENT]);
    eventually("the worker is back", || daemon.try_run(&["trace", "one", "--seconds", "1", "--out", "-"]).ok());
    drop(hosts);
    daemon.finish();
}

/// Each request was at each of them; the guest is interrupted for some.
fn expect_stages(stages: &[(String, u64)]) {
    let at = |what: &dyn Fn(&str) -> bool| stages.iter().find(|(name, _)| what(name)).map_or(0, |(_, count)| *count);
    for stage in ["queue", "checks", "disk/throttle", "answer"] {
        assert_eq!(at(&|name| name == stage), 768, "{stage} in {stages:?}");
    }
    assert_eq!(at(&|name| name.starts_with("disk/throttle.0 (file:")), 768, "the file in {stages:?}");
    assert!(at(&|name| name == "interrupt") > 0, "no interrupt in {stages:?}");
}

/// The picture alone, with all its panels.
fn expect_picture(daemon: &Daemon, file: &Path, guests: &str) {
    let path = daemon.path("page.svg");
    analyze(daemon, file, &["--guest", guests, "--plot", path.to_str().expect("a path in UTF-8")]);
    let picture = fs::read_to_string(&path).expect("the picture");
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    let panels = [
        "where the time went",
        "in the guest's view",
        "requests over time",
        "latency",
        "where: offset",
        "by size",
        "by requests in flight",
        "by offset",
        "in order",
        "used most",
    ];
    for panel in panels {
        assert!(picture.contains(&format!("class=\"title\">{panel}")), "no panel {panel:?} in {picture}");
    }
    assert_eq!(picture.matches("class=\"title\">").count(), panels.len());
}

/// A program of the private root, run in this folder.
fn program(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Process::new(repository().join("scripts/in-root"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).output().expect("scripts/in-root")
}

/// What such a program prints that ends well.
fn in_root(folder: &Path, arguments: &[&str]) -> String {
    let output = program(folder, arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{said}{complained}", output.status);
    said
}

/// fio reads blktrace's records, and does it all again: how many reads, writes, trims and flushes that were.
fn replayed(daemon: &Daemon, records: &Path) -> [u64; 4] {
    let (log, image) =
        (format!("--read_iolog={}", records.display()), format!("--replay_redirect={}", daemon.path("image").display()));
    let job = ["fio", "--name=again", "--ioengine=null", "--replay_no_stall=1", "--output-format=json", "--size=64M"];
    let said = in_root(&daemon.path(""), &[&job[..], &[log.as_str(), image.as_str()]].concat());
    let fio: Value = serde_json::from_str(said.get(said.find('{').unwrap_or(0)..).unwrap_or_default())
        .unwrap_or_else(|error| panic!("{error} in {said}"));
    ["read", "write", "trim", "sync"].map(|what| fio["jobs"][0][what]["total_ios"].as_u64().unwrap_or_default())
}

/// Requests in what viewers get, with how long they took in nanoseconds, in order; all of it keeps the Trace Event Format's rules for events
/// within each other: of each identifier times do not go back, and what ends is what began last.
fn outermost(json: &Value) -> Vec<(String, u64)> {
    let (mut open, mut found) = (BTreeMap::<&str, (f64, Vec<(&str, f64)>)>::new(), Vec::new());
    for event in json["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] != "M") {
        assert!(event["pid"].is_u64() && event["tid"].is_u64() && event["cat"].is_string(), "{event}");
        let word = |field: &str| event[field].as_str().unwrap_or_else(|| panic!("no {field} in {event}"));
        let (id, name, time) = (word("id"), word("name"), event["ts"].as_f64().expect("a time"));
        let (last, nested) = open.entry(id).or_default();
        assert!(*last <= time, "{event}");
        *last = time;
        match word("ph") {
            "b" => nested.push((name, time)),
            "e" => {
                let (begun, from) = nested.pop().unwrap_or_else(|| panic!("{event} was not begun"));
                assert_eq!(begun, name, "{event}");
                // The others are legs with rows of their own.
                if nested.is_empty() && !id.contains('.') {
                    found.push((name.to_owned(), Duration::from_secs_f64((time - from) / 1e6).as_nanos() as u64));
                }
            }
            phase => assert_eq!(phase, "n", "{event}"),
        }
    }
    assert!(open.values().all(|(_, nested)| nested.is_empty()), "not ended: {open:?}");
    found.sort_unstable();
    found
}

/// An event of a request: when it was, which one, the kernel's letters for what is asked for, sector and sectors. A flush has none.
type Line = (u64, char, String, Option<(u64, u64)>);

/// Seconds with nine digits after the point, in nanoseconds.
fn nanoseconds(text: &str) -> u64 {
    text.replace('.', "").parse().unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// `259,1    0        3     0.000000000     1  Q   R 0 + 8 [disk]`; the error of a `C` is where another line has the name.
fn printed(line: &str) -> Option<Line> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["259,1", "0", _, time, "1", action, letters, rest @ ..] = &words[..] else { return None };
    let action = action.chars().next()?;
    let range = match rest {
        [sector, "+", count, _] => Some((sector.parse().ok()?, count.parse().ok()?)),
        _ => None,
    };
    assert!(action == 'C' || rest.last() == Some(&"[disk]"), "{line}");
    Some((nanoseconds(time), action, (*letters).to_owned(), range))
}

/// A request as the kernel's programs have it: its letters, and its ranges; those of the deallocation are known.
fn as_the_kernel_has_it(request: &Request, deallocated: &[(u64, u64)]) -> (&'static str, Vec<Option<(u64, u64)>>) {
    let own = vec![Some((request.lba, u64::from(request.count)))];
    match request.operation.base() {
        EventOperation::READ => ("R", own),
        EventOperation::WRITE if request.operation.fua() => ("WF", own),
        EventOperation::WRITE | EventOperation::ZERO => ("W", own),
        EventOperation::FLUSH => ("FW", vec![None]),
        EventOperation::DEALLOCATE => ("D", deallocated.iter().copied().map(Some).collect()),
        other => panic!("{other:?} was not asked for"),
    }
}

/// What blkparse is to print of a trace.
fn expected_lines(trace: &Trace, deallocated: &[(u64, u64)]) -> Vec<Line> {
    let first = trace.requests.iter().map(Request::began).min().expect("requests");
    let mut lines = Vec::new();
    for request in &trace.requests {
        let (letters, ranges) = as_the_kernel_has_it(request, deallocated);
        let times = [('Q', request.began()), ('D', request.fetched), ('C', request.completed.expect("completed"))];
        for (range, (action, time)) in ranges.iter().flat_map(|range| times.map(|time| (range, time))) {
            lines.push((time - first, action, letters.to_owned(), *range));
        }
    }
    lines.sort();
    lines
}

/// Counts and KiB of reads and writes in a line of blkparse's sums.
fn sums(said: &str, what: &str) -> Vec<u64> {
    let line =
        said.lines().find(|line| line.trim_start().starts_with(what)).unwrap_or_else(|| panic!("no {what} in {said}"));
    line.split(|letter: char| !letter.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

/// Least, mean, most and number of the times of a row in btt's first table, in nanoseconds.
fn row(table: &str, name: &str) -> [u64; 4] {
    let line = table.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {table}"));
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, least, mean, most, count] = words[..] else { panic!("{line}") };
    [nanoseconds(least), nanoseconds(mean), nanoseconds(most), count.parse().expect("a number")]
}

/// What btt is to say of the times from one event to the end, of all that have sectors.
fn expect_row(table: &str, name: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    let (count, [least, mean, most, found]) = (times.len() as u64, row(table, name));
    assert_eq!((least, most, found), (times[0], times[times.len() - 1], count), "{name} in {table}");
    assert!(mean.abs_diff(times.iter().sum::<u64>() / count) <= 1, "{name} in {table}");
}

/// The trace of known requests of all kinds, and the ranges of the one that deallocates.
fn trace_of_all_kinds(daemon: &Daemon) -> (Trace, [(u64, u64); 2]) {
    let image = format!("file:{}", daemon.path("image").display());
    let socket = daemon.disk("disk", &["--backend", &image, "--size", "16M"], &[]);
    let mut host = Host::connect(&socket);
    let tracing = Tracing::start(daemon, "disk", &[]);
    for number in 0..32 {
        host.run(&host.write(number * 24, 16));
    }
    let reads: Vec<_> = (0..32).map(|number| host.read(1000 + number * 8, number % 8 + 1)).collect();
    host.run_together(&reads);
    host.run(&host.namespace.flush());
    host.run(&host.namespace.write_zeroes(Lba(2000), BlockCount(50), false).expect("a command"));
    let fua = host.namespace.write_fua(Lba(3000), host.page.slice(0, 512)).expect("a command");
    host.run(&fua);
    let deallocated = [(4000, 16), (5000, 8)];
    let ranges = deallocated.map(|(lba, count)| (Lba(lba), BlockCount(count)));
    let deallocate = host.namespace.deallocate(&ranges, &host.page).expect("a command");
    host.run(&deallocate);
    let mut beyond = host.read((16 << 20) / 512 - 1, 1);
    beyond.sqe.cdw10 += 1;
    host.queue.execute(&beyond).expect_err("beyond the end");
    let trace = tracing.finish();
    assert_eq!((trace.requests.len(), trace.unfinished.len(), trace.dropped), (69, 0, 0));
    (trace, deallocated)
}

/// Its sums are those of our own report.
fn expect_sums(said: &str, report: &Value) {
    let class = |name: &str| {
        let all = report["operations"].as_array().expect("operations");
        let found = all.iter().find(|class| class["name"] == name).unwrap_or_else(|| panic!("no {name} in {report}"));
        [&found["latency"]["count"], &found["bytes"]].map(|number| number.as_u64().expect("a number"))
    };
    let add = |sum: [u64; 2], more: [u64; 2]| [sum[0] + more[0], sum[1] + more[1]];
    let reads = class("read");
    // The report counts the command, whose ranges are in a list.
    assert_eq!(class("deallocate"), [1, 0]);
    let writes = [class("write"), class("write zeroes"), class("flush"), [2, 24 * 512]].into_iter().fold([0, 0], add);
    for what in ["Reads Queued:", "Read Dispatches:", "Reads Completed:"] {
        assert_eq!(sums(said, what), [reads[0], reads[1] >> 10, writes[0], writes[1] >> 10], "{what} in {said}");
    }
    let failed = said.lines().filter(|line| line.ends_with("[5]")).count() as u64;
    assert_eq!(report["errors"].as_u64(), Some(failed), "{said}");
    // When it was, in whatever zone.
    assert!(said.lines().all(|line| !line.starts_with("Trace started at") || !line.ends_with(" 1970")), "{said}");
}

/// Our own eyes on what blkparse prints, as if a guest had traced it.
fn expect_our_own_reader(said: &str, lines: &[Line]) {
    let mut guests = guest::parse(said).expect("lines of blkparse");
    guests.sort_by_key(|request| (request.issued, request.sector));
    let found: Vec<_> = guests.iter().map(|request| (request.issued, request.sector, request.count)).collect();
    let issued = |(time, action, letters, range): &Line| {
        let (sector, count) = range.filter(|_| *action == 'D' && letters != "D")?;
        Some((*time, sector, count))
    };
    let mut expected: Vec<_> = lines.iter().filter_map(issued).collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

/// Each event, the sums, and the times are what our own analysis says.
#[test]
fn the_programs_that_exports_are_for_read_the_same_in_them() {
    let daemon = Daemon::start();
    let (trace, deallocated) = trace_of_all_kinds(&daemon);
    let (file, folder) = (daemon.path("disk.trace"), daemon.path("exports"));
    fs::create_dir(&folder).expect("a folder");
    let [records, json] = ["disk.blktrace.0", "disk.json"].map(|name| folder.join(name));
    let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let report = analyze(&daemon, &file, &["--export", "blktrace", "--out", &path(&records)]);

    let said = in_root(&folder, &["blkparse", "-i", "disk", "-d", "disk.bin"]);
    let mut lines: Vec<_> = said.lines().filter_map(printed).collect();
    lines.sort();
    let expected = expected_lines(&trace, &deallocated);
    assert_eq!(lines, expected, "{said}");
    expect_sums(&said, &report);
    expect_our_own_reader(&said, &expected);

    in_root(&folder, &["btt", "-i", "disk.bin", "-o", "btt"]);
    let table = fs::read_to_string(folder.join("btt.avg")).expect("btt's averages");
    let times = |from: fn(&Request) -> u64| {
        let of = |request: &Request| {
            let ranges = as_the_kernel_has_it(request, &deallocated).1.into_iter().flatten().count();
            vec![request.completed.expect("completed") - from(request); ranges]
        };
        trace.requests.iter().flat_map(of).collect::<Vec<_>>()
    };
    expect_row(&table, "Q2C", times(Request::began));
    expect_row(&table, "D2C", times(|request| request.fetched));

    // It takes events of one moment for a fault, and is to find no other.
    program(&folder, &["blkrawverify", "disk"]);
    let verified = fs::read_to_string(folder.join("disk.verify.out")).expect("what it found");
    let mut faults = verified.lines().filter_map(|line| line.trim().strip_prefix("Dump ")).filter(|fault| *fault != "seq-1");
    assert!(verified.contains("valid") && faults.all(|fault| fault == "time regression"), "{verified}");

    // Each range of the deallocation is a trim.
    assert_eq!(replayed(&daemon, &records), [33, 34, 2, 1]);

    analyze(&daemon, &file, &["--export", "perfetto", "--out", &path(&json)]);
    let json: Value = serde_json::from_reader(File::open(&json).expect("the export")).expect("JSON");
    let took = |request: &Request| (request.operation.name().to_owned(), request.latency().expect("completed"));
    let mut expected: Vec<_> = trace.requests.iter().map(took).collect();
    expected.sort_unstable();
    assert_eq!(outermost(&json), expected);
    daemon.finish();
}

/// What fio did in a stock guest is what the trace says that it did, and the guest's own trace is the same requests.
fn a_guests_requests_are_known(virtio: bool) {
    let daemon = Daemon::start();
    let stack = format!("throttle(iops=1M) | file:{}", daemon.path("image").display());
    let (disk, picked) = (["--stack", &stack, "--size", "64M"], daemon.path("picked"));
    let socket =
        if virtio { daemon.virtio_disk("disk", &disk, &[]) } else { daemon.disk("disk", &disk, &["--doorbells", "shared"]) };
    let outbox = format!("file:{}", picked.display());
    let outbox = daemon.disk("outbox", &["--backend", &outbox, "--size", "4M"], &[]);
    let boot = Boot::scenario("trace").set("OUTBOX", 4 << 20);
    let boot = if virtio { boot.disk(&socket, "").set("DISK", "vda") } else { boot.socket(&socket) };
    let mut guest = boot.socket(&outbox).start(&seats(1));
    guest.wait_mark("await traced");
    let tracing = Tracing::start(&daemon, "disk", &[]);
    guest.send("traced");
    guest.wait_mark("await done");
    let trace = tracing.finish();
    let file = daemon.path("disk.trace");
    guest.send("done");
    guest.finish();
    let text = fs::read(&picked).expect("the guest's trace");
    let guests = daemon.path("guest.txt");
    fs::write(&guests, text.split(|byte| *byte == 0).next().unwrap_or_default()).expect("the guest's trace");

    let [page, export, replay] = ["page.html", "perfetto.json", "disk.blktrace.0"].map(|name| daemon.path(name));
    let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let report = analyze(&daemon, &file, &["--guest", &path(&guests), "--plot", &path(&page)]);
    let classes = |of: &str| {
        let all = report[of].as_array().expect("classes").iter();
        all.map(|class| {
            (class["name"].as_str().expect("a name").to_owned(), class["latency"]["count"].as_u64().expect("a count"))
        })
        .collect::<Vec<_>>()
    };
    let expected = [("4 KiB write".to_owned(), 512), ("16 KiB read".to_owned(), 256)];
    assert_eq!(classes("sizes"), expected);
    let order: Vec<_> = report["order"].as_array().expect("orders").iter().collect();
    let share =
        |at: usize| order[at]["sequential"].as_f64().expect("a number") / order[at]["requests"].as_f64().expect("one");
    assert!(share(0) > 0.99 && share(1) < 0.2, "{order:?}");
    let stages: Vec<_> = classes("stages");
    expect_stages(&stages);
    trace.requests.iter().for_each(expect_order);
    let joined = &report["guest"];
    println!("  {joined}");
    assert_eq!((joined["joined"].as_u64(), joined["unmatched"].as_u64()), (Some(768), Some(0)), "{joined}");
    let outside = joined["stages"].as_array().expect("stages").iter().find(|stage| stage["name"] == "outside");
    assert!(outside.is_some_and(|stage| stage["latency"]["p50"].as_u64() > Some(0)), "{joined}");
    assert!(fs::read_to_string(&page).expect("the page").contains("in the guest's view"));
    expect_picture(&daemon, &file, &path(&guests));

    analyze(&daemon, &file, &["--export", "perfetto", "--out", &path(&export)]);
    let json: Value = serde_json::from_reader(File::open(&export).expect("the export")).expect("JSON");
    assert_eq!(outermost(&json).iter().filter(|(name, _)| name == "read").count(), 256);

    // fio reads blktrace's records, and does it all again.
    analyze(&daemon, &file, &["--export", "blktrace", "--out", &path(&replay)]);
    assert_eq!(replayed(&daemon, &replay), [256, 512, 0, 0]);
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
