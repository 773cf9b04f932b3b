//! A daemon of the test's own.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};

use crate::{
    process::Usage,
    wait::{PATIENCE, eventually, within},
};

/// Words that no log of a healthy daemon has, whatever guests do.
const ALARMS: [&str; 4] = ["panicked", "RUST_BACKTRACE", "internal invariant", "a system call was refused"];

/// Private memory that an allocator may keep.
const SLACK: u64 = 16 << 20;

/// `millrace serve` in a folder of its own. Dropping it kills it; when the test is failing, its log is shown first.
#[derive(Debug)]
pub struct Daemon {
    dir: PathBuf,
    /// The same, if it is the daemon's own.
    _own: Option<TempDir>,
    options: Vec<String>,
    /// A crash may leave a picture of its memory in the folder.
    dumping: bool,
    process: Option<Child>,
}

impl Daemon {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// When it does not come up, with what it said.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// As [`start`](Self::start), with more options for `serve`.
    ///
    /// Only root can look into a daemon that is in its sandbox, as many tests do: for others this one has none.
    pub fn start_with(options: &[&str]) -> Self {
        let mut options = options.to_vec();
        if !rustix::process::geteuid().is_root() {
            options.extend(["--sandbox", "off"]);
        }
        Self::confined(&options)
    }

    /// As [`start_with`](Self::start_with), in its sandbox whoever runs the test.
    pub fn confined(options: &[&str]) -> Self {
        let own = tempfile::Builder::new().prefix("millrace-").tempdir().expect("a temporary folder");
        Self::launch_in(own.path().to_owned(), Some(own), options, false)
    }

    /// As [`start_with`](Self::start_with), in a folder of the test's.
    pub fn start_in(dir: &Path, options: &[&str]) -> Self {
        Self::launch_in(dir.to_owned(), None, options, false)
    }

    /// As [`start_in`](Self::start_in), where the system may put a picture of its memory into the folder when it crashes.
    pub fn start_dumping_in(dir: &Path, options: &[&str]) -> Self {
        Self::launch_in(dir.to_owned(), None, options, true)
    }

    fn launch_in(dir: PathBuf, own: Option<TempDir>, options: &[&str], dumping: bool) -> Self {
        let options = options.iter().map(ToString::to_string).collect();
        let mut daemon = Self { dir, _own: own, options, dumping, process: None };
        daemon.launch();
        daemon
    }

    /// The binary under test: `MILLRACE_BIN`, or the one that was built with this test.
    ///
    /// # Panics
    /// When it was not built.
    pub fn binary() -> PathBuf {
        if let Some(path) = std::env::var_os("MILLRACE_BIN") {
            return path.into();
        }
        let test = std::env::current_exe().expect("the test's own path");
        let profile = test.parent().and_then(Path::parent).expect("tests are in PROFILE/deps");
        let path = profile.join("millrace");
        let advice = "build it in this profile (cargo build -p millrace), or name it in MILLRACE_BIN";
        assert!(path.is_file(), "there is no {}: {advice}", path.display());
        path
    }

    /// The same program with the next version of its layouts.
    ///
    /// # Panics
    /// When it was not built.
    pub fn next_binary() -> PathBuf {
        beside("millrace-next")
    }

    /// A worker that a keeper should not be left with.
    ///
    /// # Panics
    /// When it was not built.
    pub fn odd_worker() -> PathBuf {
        beside("odd-worker")
    }

    /// Has another binary take the worker's place, on trial for so many seconds; how long guests waited in microseconds, or why the old
    /// one serves.
    pub fn upgrade(&self, binary: &Path, trial: u64) -> Result<u64, String> {
        let (path, trial) = (binary.to_str().expect("a path in UTF-8"), trial.to_string());
        let view = self.try_run(&["upgrade", "--binary", path, "--trial", &trial, "--json"])?;
        let view: Value = serde_json::from_str(&view).unwrap_or_else(|error| panic!("{error} in {view}"));
        assert_eq!(view["state"], "done");
        Ok(view["pause_micros"].as_u64().expect("a pause"))
    }

    /// What the worker runs.
    pub fn worker_binary(&self) -> PathBuf {
        // A worker may end between the two looks, and another take its place.
        eventually("a worker's binary", || fs::read_link(format!("/proc/{}/exe", self.worker()?)).ok())
    }

    fn launch(&mut self) {
        let log = File::options().create(true).append(true).open(self.log_path()).expect("the log");
        let mut command = Command::new(Self::binary());
        if self.dumping {
            command = Command::new("sh");
            command.args(["-c", "ulimit -c unlimited && exec \"$0\" \"$@\""]).arg(Self::binary()).current_dir(&self.dir);
        }
        let child = command
            .args(["serve", "--state-dir"])
            .arg(self.path("state"))
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .spawn()
            .expect("starting the daemon");
        self.process = Some(child);
        eventually("the daemon answers", || {
            if let Some(status) = self.process.as_mut()?.try_wait().expect("the daemon's state") {
                panic!("the daemon ended with {status} at once:\n{}", self.log());
            }
            self.try_run(&["status"]).ok()
        });
    }

    /// A path in the daemon's own folder, for images and the like.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where its sockets are.
    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// The socket of a device.
    pub fn socket(&self, device: &str) -> PathBuf {
        self.run_dir().join(format!("{device}.sock"))
    }

    fn log_path(&self) -> PathBuf {
        self.path("serve.log")
    }

    /// What the daemon has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The keeper's process id.
    ///
    /// # Panics
    /// When it is stopped.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the daemon runs").id()
    }

    /// The worker's process id, if one lives.
    pub fn worker(&self) -> Option<u32> {
        let keeper = self.pid();
        let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
        // Beside it there may be cells, and one that is to take its place.
        let is_worker = |pid: &u32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words.split(|byte| *byte == 0).any(|word| word == b"worker")
        };
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_worker)
    }

    /// Ends and starts it with other options.
    pub fn restart_with(&mut self, options: &[&str]) {
        self.options = options.iter().map(ToString::to_string).collect();
        self.restart();
    }

    /// Starts it with options with which it cannot run, after [`stop`](Self::stop); what it says.
    ///
    /// # Panics
    /// When it runs.
    pub fn refuse_to_start(&mut self, options: &[&str]) -> String {
        let mut command = Command::new(Self::binary());
        command.args(["serve", "--state-dir"]).arg(self.path("state")).arg("--run-dir").arg(self.run_dir()).args(options);
        let output = command.stdin(Stdio::null()).output().expect("starting the daemon");
        assert!(!output.status.success(), "the daemon ran");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Ends the worker by a signal; the next one's process id, once it serves.
    pub fn kill_worker(&self, signal: Signal) -> u32 {
        let old = eventually("a worker", || self.worker());
        let pid = Pid::from_raw(i32::try_from(old).expect("a process id")).expect("not 0");
        let new = eventually("another worker", || {
            // The runtime takes the first SIGSEGV and SIGBUS for faults that will come again; its own do.
            let _ = kill_process(pid, signal);
            within(Duration::from_millis(200), || self.worker().filter(|new| *new != old))
        });
        eventually("the worker answers", || self.try_run(&["status"]).ok());
        new
    }

    /// How long nobody served guests, each time that a worker died, in microseconds; in order.
    pub fn pauses(&self) -> Vec<u64> {
        let numbers = |line: &str| line.split_once("pause_micros=")?.1.split(' ').next()?.parse().ok();
        self.log().lines().filter_map(numbers).collect()
    }

    /// The client, ready to have a command added.
    pub fn client(&self) -> Command {
        let mut command = Command::new(Self::binary());
        command.env("MILLRACE_RUN_DIR", self.run_dir()).stdin(Stdio::null());
        command
    }

    /// Runs a command of the client; its output, or everything it said when it fails.
    pub fn try_run(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.client().args(arguments).output().expect("running the client");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(said) } else { Err(format!("{}\n{said}{complained}", output.status)) }
    }

    /// Runs a command of the client that must succeed; its output.
    pub fn run(&self, arguments: &[&str]) -> String {
        let shown = arguments.join(" ");
        println!("  $ millrace {shown}");
        self.try_run(arguments).unwrap_or_else(|error| panic!("millrace {shown}: {error}"))
    }

    /// As [`run`](Self::run) with `--json`.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error} in: {output}"))
    }

    /// The status of a service, by its name, in a volume's stack.
    ///
    /// # Panics
    /// When it has none of that name.
    pub fn service(&self, volume: &str, service: &str) -> Value {
        let volume = self.json(&["volume", "show", volume]);
        let node = node(&volume["tree"], service).unwrap_or_else(|| panic!("no {service} in {volume}"));
        node["status"].clone()
    }

    /// Makes a volume, a device and attaches the one to the other; the device's socket.
    ///
    /// `volume` and `device` are more arguments of `volume create` and `device create`.
    pub fn disk(&self, name: &str, volume: &[&str], device: &[&str]) -> PathBuf {
        self.run(&[&["volume", "create", name], volume].concat());
        self.run(&[&["device", "create", name, "--nvme"], device].concat());
        self.run(&["device", "attach", name, name]);
        self.socket(name)
    }

    /// As [`disk`](Self::disk), with a virtio disk.
    pub fn virtio_disk(&self, name: &str, volume: &[&str], device: &[&str]) -> PathBuf {
        self.run(&[&["volume", "create", name], volume].concat());
        self.run(&[&["device", "create", name, "--virtio-blk", "--volume", name], device].concat());
        self.socket(name)
    }

    /// What worker and keeper hold now.
    ///
    /// # Panics
    /// When it has died.
    pub fn usage(&self) -> Usage {
        let worker = eventually("a worker", || self.worker());
        let found = Usage::of(worker).zip(Usage::of(self.pid()));
        let (worker, keeper) = found.unwrap_or_else(|| panic!("the daemon is gone:\n{}", self.log()));
        Usage { fds: worker.fds + keeper.fds, keeper: keeper.private, ..worker }
    }

    /// As [`usage`](Self::usage), once nothing comes or goes any more.
    pub fn usage_at_rest(&self) -> Usage {
        let mut seen = Vec::new();
        eventually("the daemon to come to rest", || {
            std::thread::sleep(Duration::from_millis(20));
            seen.push(self.usage());
            let last = seen.last_chunk::<4>()?;
            let held = |usage: &Usage| (usage.fds, usage.shared_mappings, usage.threads, usage.huge);
            last.iter().all(|usage| held(usage) == held(&last[3])).then_some(last[3])
        })
    }

    /// Descriptors that the keeper holds whose name begins so.
    pub fn held(&self, name: &str) -> usize {
        let fds = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the keeper's descriptors");
        let links = fds.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with(name)).count()
    }

    /// Waits until it holds no more than `before`, after all guests have left.
    ///
    /// # Panics
    /// When it keeps something.
    pub fn expect_back_to(&self, before: &Usage) {
        self.expect_within(before, SLACK);
    }

    /// As [`expect_back_to`](Self::expect_back_to), with private memory of the worker, and of the keeper, at most `slack` bytes above what it
    /// was.
    pub fn expect_within(&self, before: &Usage, slack: u64) {
        let mut now = self.usage();
        within(PATIENCE, || {
            std::thread::sleep(Duration::from_millis(20));
            now = self.usage();
            now.is_back_to(before, slack).then_some(())
        })
        .unwrap_or_else(|| panic!("the daemon keeps what guests had: before {before:?}, now {now:?}"));
        println!("  given back: {now:?}, before {before:?}");
    }

    /// Fails unless it is alive and its log is free of panics.
    pub fn expect_well(&mut self) {
        let ended = self.process.as_mut().expect("the daemon runs").try_wait().expect("the daemon's state");
        assert!(ended.is_none(), "the daemon ended: {ended:?}\n{}", self.log());
        self.expect_calm_log();
        self.run(&["status"]);
    }

    fn expect_calm_log(&self) {
        let log = self.log();
        for alarm in ALARMS {
            let lines: Vec<_> = log.lines().filter(|line| line.contains(alarm)).collect();
            assert!(lines.is_empty(), "the daemon's log has '{alarm}': {lines:#?}\nAll of it:\n{log}");
        }
    }

    /// Ends it as a service manager does.
    ///
    /// # Panics
    /// When it does not end well.
    pub fn stop(&mut self) {
        let mut child = self.process.take().expect("the daemon runs");
        signal(&child, Signal::TERM);
        let status = wait(&mut child).unwrap_or_else(|| {
            let _ = child.kill();
            panic!("the daemon did not end within {PATIENCE:?} of SIGTERM:\n{}", self.log());
        });
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
        self.expect_calm_log();
    }

    /// Ends it and starts it again in the same folders.
    pub fn restart(&mut self) {
        println!("  daemon: restarted");
        self.stop();
        self.launch();
    }

    /// Starts it again after [`stop`](Self::stop), in the same folders.
    ///
    /// # Panics
    /// When it does not answer.
    pub fn start_again(&mut self) {
        println!("  daemon: started again");
        self.launch();
    }

    /// Takes it away as a crash does, and starts it again in the same folders.
    pub fn crash_and_restart(&mut self) {
        println!("  daemon: SIGKILL, and started again");
        let mut child = self.process.take().expect("the daemon runs");
        child.kill().expect("killing the daemon");
        child.wait().expect("the daemon's end");
        self.launch();
    }

    /// The end of a test: the daemon is alive and well, and ends when told to.
    pub fn finish(mut self) {
        self.expect_well();
        self.stop();
    }
}

/// Another program of the workspace that tests start.
fn beside(name: &str) -> PathBuf {
    let path = Daemon::binary().with_file_name(name);
    assert!(path.is_file(), "there is no {}: cargo build --workspace --bins builds it", path.display());
    path
}

/// A node of a volume's tree by its name.
fn node<'a>(tree: &'a Value, name: &str) -> Option<&'a Value> {
    if tree["node"].as_str() == Some(name) {
        return Some(tree);
    }
    tree["over"].as_array()?.iter().find_map(|below| node(below, name))
}

/// Sends a signal to a child that has not been waited for.
pub(crate) fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id")).expect("not 0");
    kill_process(pid, signal).expect("signalling a child");
}

/// The end of a child, or `None` after [`PATIENCE`].
pub(crate) fn wait(child: &mut Child) -> Option<ExitStatus> {
    within(PATIENCE, || child.try_wait().expect("a child's state"))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the daemon's log\n{}---", self.log());
        }
        if let Some(child) = &mut self.process {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `millrace nvme`: one disk in the foreground.
#[derive(Debug)]
pub struct OneDisk {
    child: Child,
    log: NamedTempFile,
}

impl OneDisk {
    /// Serves `volume`, in the form of the command line, at `socket`; waits until the socket is there.
    pub fn start(socket: &Path, volume: &str, options: &[&str]) -> Self {
        let log = NamedTempFile::new().expect("a file for the log");
        let child = Command::new(Daemon::binary())
            .args(["nvme", "--log", "info", "--volume", volume, "--socket"])
            .arg(socket)
            .args(options)
            .stdin(Stdio::null())
            .stderr(log.reopen().expect("the log"))
            .spawn()
            .expect("starting millrace nvme");
        let mut server = Self { child, log };
        eventually("the socket of millrace nvme", || {
            server.expect_running();
            socket.exists().then_some(())
        });
        server
    }

    fn expect_running(&mut self) {
        let ended = self.child.try_wait().expect("the server's state");
        assert!(ended.is_none(), "millrace nvme ended: {ended:?}\n{}", self.log());
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log.path()).expect("the log")
    }

    /// Ends it as Ctrl-C does. Nothing may have been refused to it.
    pub fn stop(&mut self) {
        self.expect_running();
        signal(&self.child, Signal::INT);
        let (status, log) = (wait(&mut self.child), self.log());
        assert!(status.is_some_and(|status| status.success()), "millrace nvme ended with {status:?}\n{log}");
        assert!(!log.contains("a system call was refused"), "{log}");
    }
}

impl Drop for OneDisk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
