//! A stock Linux guest, driven by its lines.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex, OnceLock, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use crate::{Seats, guest_root, repository, wait::PATIENCE};

/// The longest that a guest may say nothing: a heavy scenario of fio under emulation takes a minute between two lines.
const SILENCE: Duration = Duration::from_secs(300);

/// One of the stock kernels of the guest root, or our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Linux 6.12.
    Stable,
    /// The newest of the backports.
    Newer,
    /// Built from Debian's source for what its kernels are without (`scripts/guest-kernel`).
    Own,
}

/// How to boot a guest; the options are those of `scripts/guest`.
#[derive(Debug)]
#[must_use]
pub struct Boot {
    name: String,
    arguments: Vec<String>,
    what: Vec<String>,
    /// For QEMU itself.
    extra: Vec<String>,
    /// The machine comes from elsewhere, in the middle of its scenario.
    incoming: bool,
}

impl Boot {
    /// Boots a kernel that runs a scenario of `tests/guest/scenarios`, or the script at a path.
    pub fn scenario(name: &str) -> Self {
        Self::new(name, vec![name.to_owned()])
    }

    /// Boots from the first disk: `bios` or `uefi`.
    pub fn firmware(kind: &str) -> Self {
        Self::new(kind, vec!["--firmware".to_owned(), kind.to_owned()])
    }

    fn new(name: &str, what: Vec<String>) -> Self {
        Self { name: name.to_owned(), arguments: Vec::new(), what, extra: Vec::new(), incoming: false }
    }

    fn with(mut self, option: &str, value: impl Into<String>) -> Self {
        self.arguments.extend([option.to_owned(), value.into()]);
        self
    }

    /// Gives it the controller served at a socket; may be repeated.
    pub fn socket(self, path: &Path) -> Self {
        let path = path.to_str().expect("a path in UTF-8").to_owned();
        self.with("--socket", path)
    }

    /// Gives it the virtio disk served at a socket, with options of QEMU's device (`num-queues=2,packed=on`), or none.
    pub fn disk(self, path: &Path, options: &str) -> Self {
        let path = path.to_str().expect("a path in UTF-8");
        let comma = if options.is_empty() { "" } else { "," };
        self.with("--disk", format!("{path}{comma}{options}"))
    }

    /// QEMU's control socket, for a [`Monitor`](crate::Monitor).
    pub fn monitor(self, path: &Path) -> Self {
        let path = path.to_str().expect("a path in UTF-8").to_owned();
        self.with("--qmp", path)
    }

    /// Waits for a machine that is migrated to this socket; everything else must be as it was started with.
    pub fn incoming(mut self, path: &Path) -> Self {
        self.incoming = true;
        let path = path.to_str().expect("a path in UTF-8").to_owned();
        self.with("--incoming", path)
    }

    /// Another kernel than the stable one.
    pub fn kernel(self, kernel: Kernel) -> Self {
        let name = match kernel {
            Kernel::Stable => "stable",
            Kernel::Newer => "newer",
            Kernel::Own => "own",
        };
        self.with("--kernel", name)
    }

    /// Virtual processors; 2 unless told.
    pub fn processors(self, count: usize) -> Self {
        self.with("--cpus", count.to_string())
    }

    /// Memory in MiB; 512 unless told.
    pub fn memory(self, mib: usize) -> Self {
        self.with("--memory", mib.to_string())
    }

    /// That memory in huge pages of 2 MiB, which must have been set aside.
    pub fn huge_pages(mut self) -> Self {
        self.arguments.push("--huge-pages".to_owned());
        self
    }

    /// With an IOMMU, so that it can give its devices to programs.
    pub fn iommu(mut self) -> Self {
        self.arguments.push("--iommu".to_owned());
        self
    }

    /// More arguments for QEMU.
    pub fn qemu(mut self, arguments: &[&str]) -> Self {
        self.extra.extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// A variable of the scenario.
    pub fn set(self, key: &str, value: impl std::fmt::Display) -> Self {
        self.with("--set", format!("{key}={value}"))
    }

    /// More for the kernel's command line.
    pub fn append(self, words: &str) -> Self {
        self.with("--append", words)
    }

    /// Starts it. It needs one of the seats that the test holds.
    ///
    /// # Panics
    /// When QEMU, the kernels or the guests' userland are missing.
    pub fn start(self, _seats: &Seats) -> Guest {
        prepare();
        let mut command = Command::new(repository().join("scripts/guest"));
        command.args(&self.arguments).args(&self.what).arg("--").args(&self.extra);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        println!("  guest {}: {}", self.name, self.arguments.join(" "));
        let (child, input, lines) = Self::spawn(&mut command);
        let (said, started) = (Vec::new(), Instant::now());
        Guest { name: self.name, command, child, input, lines, said, began: self.incoming, again: AGAIN, started }
    }

    fn spawn(command: &mut Command) -> (Child, Option<ChildStdin>, Receiver<String>) {
        let mut child = command.spawn().expect("starting scripts/guest");
        let (sender, lines) = channel();
        for stream in [
            Box::new(child.stdout.take().expect("its output")) as Box<dyn std::io::Read + Send>,
            Box::new(child.stderr.take().expect("its errors")),
        ] {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let input = child.stdin.take();
        (child, input, lines)
    }

    /// Boots it and waits for its good end; its lines.
    pub fn run(self, seats: &Seats) -> Vec<String> {
        self.start(seats).finish()
    }
}

/// Once per test program: the guests' userland is up to date and the accelerator is known.
pub(crate) fn prepare() {
    static READY: OnceLock<Result<(), String>> = OnceLock::new();
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let ready = READY.get_or_init(|| {
        let root = guest_root().join(".complete");
        if !root.exists() {
            return Err(format!("{} is missing", root.display()));
        }
        for script in ["scripts/guest-images", "scripts/probe-accel"] {
            let output = Command::new(repository().join(script)).stdin(Stdio::null()).output();
            let output = output.map_err(|error| format!("{script}: {error}"))?;
            if !output.status.success() {
                return Err(format!("{script}: {}", String::from_utf8_lossy(&output.stderr)));
            }
        }
        Ok(())
    });
    if let Err(reason) = ready {
        panic!("guests cannot be booted: {reason}\nRun `make guests` first; it installs nothing on the host.");
    }
}

/// A running guest. Dropping it kills it; when the test is failing, everything it said is shown first.
#[derive(Debug)]
pub struct Guest {
    name: String,
    command: Command,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    said: Vec<String>,
    began: bool,
    /// How often it may still be started again.
    again: u32,
    started: Instant,
}

/// A kernel changes its own code while it starts, and a processor that QEMU emulates may run what was there in between. Rare, and seen on
/// two cores that were busy.
const EMULATED_BADLY: &str = "Oops: int3";
/// How often a guest is started again for that.
const AGAIN: u32 = 2;

impl Guest {
    /// The next line of the scenario, or `None` when the guest has ended.
    fn next_line(&mut self) -> Option<String> {
        loop {
            let line = match self.lines.recv_timeout(SILENCE) {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => panic!("guest {}: silent for {SILENCE:?}", self.name),
            };
            self.said.push(line.clone());
            self.began |= line == "MILLRACE-BEGIN";
            if self.began {
                return Some(line);
            }
            if line.contains(EMULATED_BADLY) && self.again > 0 {
                println!("  guest {}: started again: its kernel was emulated badly: {line}", self.name);
                self.again -= 1;
                self.child.kill().expect("killing QEMU");
                self.child.wait().expect("QEMU's end");
                (self.child, self.input, self.lines) = Boot::spawn(&mut self.command);
            }
        }
    }

    /// Waits for a line that starts with `start`; the whole line.
    ///
    /// # Panics
    /// When the guest fails or ends before.
    pub fn wait_line(&mut self, start: &str) -> String {
        let mut limit = Instant::now() + 2 * SILENCE;
        while let Some(line) = self.next_line() {
            if line == "MILLRACE-BEGIN" {
                // What it waited for before it booted (a kernel that is being built) is none of its time.
                limit = Instant::now() + 2 * SILENCE;
            }
            if line.starts_with(start) {
                return line;
            }
            let failed = line.starts_with("MILLRACE-FAIL") || line.starts_with("MILLRACE-EXIT");
            if failed {
                self.drain();
            }
            assert!(!failed, "guest {}: {line}, while waiting for '{start}'", self.name);
            assert!(Instant::now() < limit, "guest {}: no '{start}' came", self.name);
        }
        panic!("guest {}: ended while waiting for '{start}'", self.name);
    }

    /// Waits for `MILLRACE-MARK` with `mark`; the rest of the line.
    pub fn wait_mark(&mut self, mark: &str) -> String {
        let start = format!("MILLRACE-MARK {mark}");
        let line = self.wait_line(&start);
        line[start.len()..].trim().to_owned()
    }

    /// Waits until the scenario asks for `line`'s first word, and sends the line.
    pub fn answer(&mut self, line: &str) {
        let word = line.split(' ').next().unwrap_or_default();
        self.wait_mark(&format!("await {word}"));
        self.send(line);
    }

    /// Sends a line.
    pub fn send(&mut self, line: &str) {
        println!("  to guest {}: {line}", self.name);
        let input = self.input.as_mut().expect("the guest's input is open");
        let sent = input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush());
        assert!(sent.is_ok(), "guest {}: {sent:?}", self.name);
    }

    /// Waits for the end, which must be a good one; the scenario's lines.
    pub fn finish(mut self) -> Vec<String> {
        let code = self.wait_line("MILLRACE-EXIT");
        assert_eq!(code, "MILLRACE-EXIT 0", "guest {}", self.name);
        self.drain();
        let status = crate::daemon::wait(&mut self.child);
        assert!(status.is_some_and(|status| status.success()), "guest {}: QEMU ended with {status:?}", self.name);
        println!("  guest {}: {:.1} s", self.name, self.started.elapsed().as_secs_f64());
        let begin = self.said.iter().position(|line| line == "MILLRACE-BEGIN").unwrap_or_default();
        self.said.split_off(begin)
    }

    /// Waits for the end, in which there is no exit code: a panic.
    pub fn expect_crash(mut self) {
        self.drain();
        let ended = self.said.iter().any(|line| line.starts_with("MILLRACE-EXIT"));
        assert!(!ended, "guest {}: it was to crash, and ended well", self.name);
        assert!(crate::daemon::wait(&mut self.child).is_some(), "guest {}: QEMU stays", self.name);
    }

    /// Everything until the guest closes its side.
    fn drain(&mut self) {
        while self.lines.recv_timeout(PATIENCE).map(|line| self.said.push(line)).is_ok() {}
    }

    /// Takes it away in the middle of whatever it does.
    pub fn kill(mut self) {
        self.child.kill().expect("killing QEMU");
        self.child.wait().expect("QEMU's end");
        println!("  guest {}: killed after {:.1} s", self.name, self.started.elapsed().as_secs_f64());
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(200)) {
                self.said.push(line);
            }
            println!("--- guest {}\n{}\n---", self.name, self.said.join("\n"));
        }
    }
}
