//! A verified load of our own client, in a process of its own: something that can be killed, and that notices a wrong byte.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    daemon::{self, Daemon},
    wait::eventually,
};

/// What a load does.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The pattern: `randrw`, `randwrite`, …
    pub rw: &'a str,
    /// Bytes of a command, as the command line takes them.
    pub bs: &'a str,
    /// Commands in flight.
    pub depth: u32,
    /// Only the first bytes of the namespace.
    pub range: &'a str,
    /// More options of `millrace bench`.
    pub more: &'a [&'a str],
}

impl Default for Work<'_> {
    fn default() -> Self {
        Self { rw: "randrw", bs: "4k", depth: 16, range: "16m", more: &[] }
    }
}

/// `millrace bench --verify` until it is told to end.
#[derive(Debug)]
pub struct Load(Option<Child>);

impl Load {
    /// Starts it. It runs until [`finish`](Self::finish) or [`kill`](Self::kill).
    pub fn start(socket: &Path, work: &Work<'_>) -> Self {
        let child = Command::new(Daemon::binary())
            .args(["bench", "--verify", "--json", "--time", "3600", "--rw", work.rw, "--bs", work.bs])
            .args(["--qd", &work.depth.to_string(), "--range", work.range, "--socket"])
            .arg(socket)
            .args(work.more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting the load");
        Self(Some(child))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("the load was not ended")
    }

    /// Its process id.
    pub fn pid(&mut self) -> u32 {
        self.child().id()
    }

    /// Fails when it has ended by itself.
    pub fn expect_running(&mut self) {
        if self.child().try_wait().expect("the load's state").is_some() {
            let output = self.0.take().expect("the load").wait_with_output().expect("its output");
            panic!("the load ended: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
    }

    /// Ends it and checks that every byte it read was right; the commands it completed.
    pub fn finish(self) -> u64 {
        self.finish_with_longest().0
    }

    /// As [`finish`](Self::finish); with the longest time that a command took, in nanoseconds.
    pub fn finish_with_longest(mut self) -> (u64, u64) {
        self.expect_running();
        daemon::signal(self.child(), Signal::INT);
        let output = self.0.take().expect("the load").wait_with_output().expect("the load's output");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the load failed: {}\n{complaint}", output.status);
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error} in {}", String::from_utf8_lossy(&output.stdout)));
        let commands = report["total"]["commands"].as_u64().expect("a number of commands");
        assert!(report["verify"]["checked_blocks"].as_u64().is_some_and(|blocks| blocks > 0), "nothing checked: {report}");
        let longest = ["read", "write"].iter().filter_map(|of| report[of]["latency_ns"]["max"].as_u64()).max();
        (commands, longest.expect("a latency"))
    }

    /// Takes it away in the middle of its I/O.
    pub fn kill(mut self) {
        let mut child = self.0.take().expect("the load was not ended");
        child.kill().expect("killing the load");
        child.wait().expect("the load's end");
    }

    /// Waits until it has certainly begun: it has used processor time since.
    pub fn wait_until_busy(&mut self) {
        let pid = self.pid();
        let before = ticks(pid);
        eventually("the load is busy", || {
            self.expect_running();
            (ticks(pid) > before + 10).then_some(())
        });
    }
}

/// Processor time of a process so far, in units of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold anything; the numbers come after its closing bracket.
    let numbers = stat.rsplit(')').next().unwrap_or_default();
    numbers.split_whitespace().skip(11).take(2).filter_map(|number| number.parse::<u64>().ok()).sum()
}

impl Drop for Load {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
