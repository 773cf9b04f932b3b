//! The daemon with its volumes, the programs on them, and the operator's ways to give commands.

use std::{
    collections::VecDeque,
    fs,
    thread::{scope, sleep},
    time::Duration,
};

use millrace_tests::{Daemon, PATIENCE, within};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    oracle::Oracle,
    program::{Order, Program},
    random::{Random, SEED},
    stack::{Expect, Shape, Stack},
};

/// Commands that a failure shows.
const SHOWN: usize = 30;
/// What volumes have at first, in MiB; they get no smaller.
pub(crate) const LEAST: usize = 4;
/// What they have at most.
pub(crate) const MOST: usize = 8;
/// What the disk has of which a volume has a share.
const POOL: &str = "64M";
/// In the reason for which a change is given up, with nothing changed, where requests take longer than it waits. On a busy disk a flush may.
const IN_FLIGHT: &str = "requests did not end within";

/// Name, shape, whether it is in memory, and block size of each volume.
const VOLUMES: [(&str, Shape, bool, usize); 15] = [
    ("plain", Shape::Plain, false, 512),
    ("plain-memory", Shape::Plain, true, 512),
    ("stripe", Shape::Stripe, false, 4096),
    ("concat-memory", Shape::Concat, true, 4096),
    ("mirror", Shape::Mirror, false, 512),
    ("mirror-memory", Shape::Mirror, true, 4096),
    ("parity", Shape::Parity, false, 4096),
    ("parity-memory", Shape::Parity, true, 512),
    ("parity2", Shape::Parity2, false, 4096),
    ("integrity", Shape::Integrity, false, 4096),
    ("xts", Shape::Xts, false, 512),
    ("xts-memory", Shape::Xts, true, 4096),
    ("authenticated", Shape::Authenticated, false, 4096),
    ("share", Shape::Share, false, 512),
    ("nested", Shape::Nested, false, 4096),
];

/// What was done last, shown when the test fails.
#[derive(Debug)]
struct Journal {
    seed: u64,
    commands: u64,
    lines: VecDeque<String>,
}

impl Journal {
    fn note(&mut self, line: &str) {
        self.commands += 1;
        self.lines.push_back(format!("{:6} {line}", self.commands));
        if self.lines.len() > SHOWN {
            self.lines.pop_front();
        }
    }

    /// How the last one went.
    fn add(&mut self, words: &str) {
        if let Some(line) = self.lines.back_mut() {
            line.push_str(words);
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the last of {} commands of {SEED}={:#x}", self.commands, self.seed);
            for line in &self.lines {
                println!("{line}");
            }
        }
    }
}

/// A volume with its program.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) stack: Stack,
    /// It is gone when the daemon is.
    pub(crate) is_memory: bool,
    pub(crate) mib: usize,
    pub(crate) block_size: usize,
    pub(crate) program: Program,
}

/// All there is. Its parts are dropped in this order: what the operator did is the last that a failure shows.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) volumes: Vec<Volume>,
    pub(crate) random: Random,
    pub(crate) daemon: Daemon,
    /// Of files and other things that are made.
    numbers: usize,
    journal: Journal,
}

/// What the daemon says, whatever it is, has no panic in it.
fn expect_calm(said: &str) {
    assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{said}");
}

/// Whether nothing goes on in a volume's services.
fn is_idle(tree: &Value) -> bool {
    let own = tree["status"]["progress"].as_array().is_none_or(Vec::is_empty);
    own && tree["over"].as_array().is_none_or(|legs| legs.iter().all(is_idle))
}

/// A file that nobody uses any more goes.
pub(crate) fn forget_file(leaf: &str) {
    if let Some(path) = leaf.strip_prefix("file:") {
        let _ = fs::remove_file(path);
    }
}

impl World {
    /// A daemon with all volumes, and a program on each.
    pub(crate) fn start(seed: u64) -> Self {
        let shards = if seed.is_multiple_of(2) { "2" } else { "1" };
        let mut world = Self {
            volumes: Vec::new(),
            random: Random::new(seed),
            daemon: Daemon::start_with(&["--shards", shards]),
            numbers: 0,
            journal: Journal { seed, commands: 0, lines: VecDeque::new() },
        };
        for (at, digits) in ["5a", "a5"].into_iter().enumerate() {
            fs::write(world.key(at), digits.repeat(32)).expect("a key file");
        }
        let pool = world.new_file();
        world.must(&["disk", "create", "pool", &pool, "--size", POOL]);
        for (at, (name, shape, is_memory, block_size)) in VOLUMES.into_iter().enumerate() {
            let leg = |world: &mut Self| if is_memory { "memory".to_owned() } else { world.new_file() };
            let legs = (0..shape.legs()).map(|_| leg(&mut world)).collect();
            let stack = Stack { tops: Vec::new(), shape, legs, key: world.key(0), failed: Vec::new() };
            world.create(name, &stack, LEAST, block_size);
            let oracle = Oracle::new(name, at as u64 + 1, block_size, (LEAST << 20) / block_size);
            let program = Program::start(&world.daemon.run_dir(), name, oracle, seed.wrapping_add(1 + at as u64));
            let name = name.to_owned();
            world.volumes.push(Volume { name, stack, is_memory, mib: LEAST, block_size, program });
        }
        world
    }

    /// Makes a volume.
    pub(crate) fn create(&mut self, name: &str, stack: &Stack, mib: usize, block_size: usize) {
        let (text, size, block_size) = (stack.text(), format!("{mib}M"), block_size.to_string());
        self.must(&["volume", "create", name, "--size", &size, "--block-size", &block_size, "--stack", &text]);
    }

    /// One of two files with keys.
    pub(crate) fn key(&self, at: usize) -> String {
        self.daemon.path(&format!("key{at}")).display().to_string()
    }

    /// A number that nothing has yet.
    pub(crate) fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers
    }

    /// A file that does not exist, as a leaf.
    pub(crate) fn new_file(&mut self) -> String {
        let number = self.number();
        format!("file:{}", self.daemon.path(&format!("f{number:06}")).display())
    }

    /// What is done without a command.
    pub(crate) fn note(&mut self, line: &str) {
        self.journal.note(line);
    }

    /// Gives a command; its output, or what it said when it failed.
    pub(crate) fn tell(&mut self, arguments: &[&str]) -> Result<String, String> {
        self.journal.note(&format!("millrace {}", arguments.join(" ")));
        let result = self.daemon.try_run(arguments);
        self.judge(result)
    }

    /// Whatever was said, it was said in order.
    fn judge(&mut self, result: Result<String, String>) -> Result<String, String> {
        match &result {
            Ok(said) => expect_calm(said),
            Err(said) => {
                expect_calm(said);
                let why = said.split_once('\n').map_or("", |(_, why)| why.trim());
                self.journal.add(&format!("\n         -> {why}"));
                let is_ordinary = ["exit status: 1\n", "exit status: 2\n"].iter().any(|status| said.starts_with(status));
                assert!(is_ordinary && !why.is_empty(), "a failure is told with the reason: {said}");
            }
        }
        result
    }

    /// A command that succeeds. A change that is given up for requests in flight is given again.
    pub(crate) fn must(&mut self, arguments: &[&str]) -> String {
        let result = within(PATIENCE, || match self.tell(arguments) {
            Err(why) if why.contains(IN_FLIGHT) => None,
            result => Some(result),
        });
        let result = result.unwrap_or_else(|| Err(format!("given again for {PATIENCE:?}: {IN_FLIGHT} a few seconds")));
        result.unwrap_or_else(|why| panic!("millrace {}: {why}", arguments.join(" ")))
    }

    /// A command that succeeds as soon as what is under way lets it.
    pub(crate) fn must_soon(&mut self, arguments: &[&str]) {
        self.soon(&format!("millrace {}", arguments.join(" ")), |daemon| daemon.try_run(arguments));
    }

    /// What succeeds as soon as what is under way lets it.
    pub(crate) fn soon<T>(&mut self, what: &str, attempt: impl Fn(&Daemon) -> Result<T, String>) {
        self.journal.note(&format!("{what} (soon)"));
        let mut last = String::new();
        let done = within(PATIENCE, || match attempt(&self.daemon) {
            Ok(done) => Some(done),
            Err(why) => {
                expect_calm(&why);
                last = why;
                None
            }
        });
        assert!(done.is_some(), "{what}, for {PATIENCE:?}: {last}");
    }

    /// A command that is refused.
    pub(crate) fn must_not(&mut self, arguments: &[&str]) {
        if let Ok(said) = self.tell(arguments) {
            panic!("millrace {} was not refused: {said}", arguments.join(" "));
        }
    }

    /// A command of which something is expected; whether it succeeded.
    pub(crate) fn expect(&mut self, arguments: &[&str], expect: Expect) -> bool {
        match expect {
            Expect::Success => drop(self.must(arguments)),
            Expect::Refusal => self.must_not(arguments),
            Expect::Either => return self.tell(arguments).is_ok(),
        }
        expect == Expect::Success
    }

    /// A command during which the worker dies: it is done or not, whatever it says.
    pub(crate) fn struck(&mut self, arguments: &[&str]) -> bool {
        let delay = Duration::from_micros(self.random.below(60_000) as u64);
        self.journal.note(&format!("millrace {} (and the worker dies after {delay:?})", arguments.join(" ")));
        let daemon = &self.daemon;
        let result = scope(|scope| {
            let killer = scope.spawn(move || {
                sleep(delay);
                daemon.kill_worker(Signal::KILL);
            });
            let result = daemon.try_run(arguments);
            killer.join().expect("the next worker serves");
            result
        });
        self.judge(result).is_ok()
    }

    /// A volume as the daemon shows it.
    pub(crate) fn look(&self, name: &str) -> Value {
        let arguments = ["volume", "show", name, "--json"];
        let said = self.daemon.try_run(&arguments).unwrap_or_else(|why| panic!("millrace {}: {why}", arguments.join(" ")));
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error} in: {said}"))
    }

    /// A volume's stack as the daemon shows it.
    pub(crate) fn shown(&self, name: &str) -> String {
        self.look(name)["stack"].as_str().expect("a stack").to_owned()
    }

    /// Waits for a volume that is to look like this, twice in a row.
    fn await_volume(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let (mut last, mut times) = (Value::Null, 0);
        let reached = within(PATIENCE, || {
            last = self.look(name);
            times = if is_so(&last) { times + 1 } else { 0 };
            (times == 2).then_some(())
        });
        assert!(reached.is_some(), "volume {name} is not {what} after {PATIENCE:?}: {last:#}");
        last
    }

    /// Waits until nothing goes on in a volume that has all its legs.
    pub(crate) fn settle(&self, at: usize) -> Value {
        self.await_volume(&self.volumes[at].name, "at rest", |view| {
            view["health"] == "good" && view["migration"].is_null() && is_idle(&view["tree"])
        })
    }

    /// Changes a volume's stack by a command, during which the worker may die. Afterwards the volume is made of `new`, or of what it was.
    pub(crate) fn alter(&mut self, at: usize, arguments: &[&str], new: Stack, expect: Expect) -> bool {
        let name = self.volumes[at].name.clone();
        let before = self.shown(&name);
        let strikes = expect != Expect::Refusal && self.random.one_in(5);
        let succeeded = if strikes { self.struck(arguments) } else { self.expect(arguments, expect) };
        let now = self.shown(&name);
        let done = succeeded || now != before;
        if done {
            self.volumes[at].stack = new;
        }
        self.expect_stack(at, &before);
        done
    }

    /// A volume is made of what it should be made of, and of nothing else.
    pub(crate) fn expect_stack(&self, at: usize, before: &str) {
        let Volume { name, stack, .. } = &self.volumes[at];
        let now = self.shown(name);
        if let Some(mistake) = stack.mistake(&now) {
            panic!("volume {name}: {mistake}: {now}; before it was {before}");
        }
    }

    /// Compares a volume with what its program knows.
    pub(crate) fn compare(&self, at: usize) {
        self.volumes[at].program.tell(Order::Compare);
    }

    /// The same of all.
    pub(crate) fn compare_all(&mut self) {
        self.note("all volumes are compared");
        (0..self.volumes.len()).for_each(|at| self.compare(at));
        self.daemon.expect_well();
    }

    /// Fails when a program has failed.
    pub(crate) fn expect_well(&self) {
        self.volumes.iter().for_each(|volume| volume.program.expect_well());
    }

    /// The daemon ends in some way and comes again. What was in memory is gone and made anew, all else is there.
    pub(crate) fn daemon_ends(&mut self, how: impl FnOnce(&mut Daemon)) {
        let in_memory: Vec<usize> = (0..self.volumes.len()).filter(|at| self.volumes[*at].is_memory).collect();
        for at in &in_memory {
            self.volumes[*at].program.tell(Order::Rest);
        }
        how(&mut self.daemon);
        for at in in_memory {
            let Volume { name, mib, block_size, .. } = &self.volumes[at];
            let (name, mib, block_size) = (name.clone(), *mib, *block_size);
            self.must(&["volume", "delete", &name]);
            self.volumes[at].stack.failed.clear();
            let stack = self.volumes[at].stack.clone();
            self.create(&name, &stack, mib, block_size);
            let volume = &self.volumes[at];
            volume.program.oracle().clear();
            volume.program.tell(Order::Go);
        }
        for volume in &self.volumes {
            self.await_volume(&volume.name, "ready", |view| view["state"] == "ready");
        }
        // By then all programs have found their volumes again.
        self.compare_all();
    }

    /// All programs end, and then the daemon.
    pub(crate) fn finish(mut self) {
        for volume in std::mem::take(&mut self.volumes) {
            let done = volume.program.finish();
            println!("  volume {}: {done} requests", volume.name);
            assert!(done > 0, "the program on volume {} did nothing", volume.name);
        }
        println!("  {} commands", self.journal.commands);
        self.daemon.expect_well();
        self.daemon.stop();
    }
}
