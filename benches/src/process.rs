//! Programs that are started, stopped between their samples, and ended.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
    thread::{CpuSet, sched_setaffinity},
};

use crate::error::Failure;

/// How long a daemon may take to come up, or to end when asked.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon. It stands still unless it is being measured, so that it takes nothing from others; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Daemon {
    program: PathBuf,
    child: Child,
    log: PathBuf,
    running: bool,
}

impl Daemon {
    /// Starts a program with its output in a file, and waits until `ready` says so.
    pub(crate) fn start(command: &mut Command, log: &Path, mut ready: impl FnMut() -> bool) -> Result<Self, Failure> {
        let program = PathBuf::from(command.get_program());
        let failed = |source| Failure::Start { program: program.clone(), source };
        let output = File::create(log).map_err(failed)?;
        let errors = output.try_clone().map_err(failed)?;
        let child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().map_err(failed)?;
        let mut daemon = Self { program, child, log: log.to_owned(), running: true };
        let start = Instant::now();
        while !ready() {
            let ended = daemon.child.try_wait().is_ok_and(|status| status.is_some());
            if ended || start.elapsed() > PATIENCE {
                return Err(Failure::NotUp { program: daemon.program.clone(), said: daemon.said() });
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(daemon)
    }

    fn said(&self) -> String {
        tail(&fs::read_to_string(&self.log).unwrap_or_default())
    }

    /// Lets it run.
    pub(crate) fn resume(&mut self) {
        self.signal(Signal::CONT);
        self.running = true;
    }

    /// Makes it stand still.
    pub(crate) fn pause(&mut self) {
        self.signal(Signal::STOP);
        self.running = false;
    }

    /// Signals the daemon and the processes that it has started.
    fn signal(&self, signal: Signal) {
        for pid in self.pids() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // It may have died: then the measurement fails by itself.
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// The daemon and what it has started, in that order.
    fn pids(&self) -> Vec<u32> {
        let mut pids = vec![self.child.id()];
        let mut next = 0;
        while let Some(pid) = pids.get(next) {
            next += 1;
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        pids
    }

    /// Binds what it consists of now, and what that starts, to a core.
    pub(crate) fn bind(&self, core: usize) -> Result<(), Failure> {
        self.pids().into_iter().try_for_each(|pid| bind(pid, core))
    }

    /// Processor time that it has used: all its processes and threads, user and system.
    pub(crate) fn cpu(&self) -> Result<Duration, Failure> {
        let mut ticks = 0;
        for pid in self.pids() {
            let text = read(&format!("/proc/{pid}/stat"))?;
            // The name, in brackets, may hold anything: count from after it. Fields 14 and 15, in ticks of 10 ms.
            let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
            ticks += fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
        }
        Ok(Duration::from_millis(ticks * 10))
    }

    /// A line of its memory maps' summaries, in bytes: `Rss`, `Pss`, `Anonymous` …
    pub(crate) fn memory(&self, name: &str) -> Result<u64, Failure> {
        let mut bytes = 0;
        for pid in self.pids() {
            let path = format!("/proc/{pid}/smaps_rollup");
            let text = read(&path)?;
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            bytes += kib.ok_or(Failure::Output { program: path, said: text })? * 1024;
        }
        Ok(bytes)
    }
}

/// Binds all threads of a process, and those that they start, to a core.
pub(crate) fn bind(pid: u32, core: usize) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    set.set(core);
    let path = PathBuf::from(format!("/proc/{pid}/task"));
    let failed = |source| Failure::Read { path: path.clone(), source };
    for thread in fs::read_dir(&path).map_err(failed)? {
        let name = thread.map_err(failed)?.file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        match sched_setaffinity(thread, &set) {
            // It has ended since.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(Failure::Bind { pid, core, source: errno.into() }),
        }
    }
    Ok(())
}

fn read(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|source| Failure::Read { path: path.into(), source })
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        // Its own processes are its own to end.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let start = Instant::now();
        while !self.child.try_wait().is_ok_and(|status| status.is_some()) {
            if start.elapsed() > PATIENCE {
                // It had its chance.
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Runs a program to its end; its output.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let program = PathBuf::from(command.get_program());
    let result = command.stdin(Stdio::null()).output();
    let output = result.map_err(|source: io::Error| Failure::Start { program: program.clone(), source })?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let complained = String::from_utf8_lossy(&output.stderr);
    Err(Failure::Ended { program, status: output.status, said: tail(&format!("{said}{complained}")) })
}

/// The last lines.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}
