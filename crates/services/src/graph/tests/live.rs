//! The power fails before, within and after a change of a running volume's stack.
//!
//! ```text
//!   workload ─► change, alone or under load ─► workload          the power goes at some write of it, or while the change is stored
//!     ─► restart ─► the stored stack is opened: every block is one it may be ─► settled, closed, opened, changed on: still so
//! ```

use std::sync::{
    atomic::{AtomicUsize, Ordering},
    mpsc::TryRecvError,
};

use millrace_block::conformance::{Power, Random};
use millrace_engine::ShardConfig;

use super::*;
use crate::testing::{Bench as Means, Oracle, Rig, Session, beside, every_seed};

/// Power cuts of each workload.
const CUTS: usize = 8;
/// Turns that background work gets to come to its end.
const TURNS: usize = 1_000_000;
/// Steps of the workload at most beside a change under load.
const BESIDE: usize = 6;
/// Changes after the restart at most.
const FURTHER: usize = 3;

/// Stacks that a volume goes through, one change after the other.
struct Way {
    stacks: &'static [&'static str],
    disks: usize,
    blocks: u64,
}

/// How the record of a change fares.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Storing {
    Works,
    /// There is no room for it.
    Fails,
    /// The power goes right after it was stored, or right before.
    Cut {
        stored: bool,
    },
}

/// When the power goes.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// When everything is done, if the process does not just die.
    Never,
    /// At this write or flush.
    At(u64),
    /// While the change is stored.
    Storing { stored: bool },
}

/// What there is of a volume beyond the process, on the same power: the number of its stack.
struct Ledger {
    power: Arc<Power>,
    stored: AtomicUsize,
}

impl Ledger {
    fn store(&self, stack: usize, storing: Storing) -> Result<(), String> {
        let lost = || Err("the power is gone".to_owned());
        match storing {
            _ if self.power.is_gone() => return lost(),
            Storing::Fails => return Err("no space".to_owned()),
            Storing::Cut { stored } => {
                self.power.cut_at(0);
                if !stored {
                    return lost();
                }
            }
            Storing::Works => {}
        }
        self.stored.store(stack, Ordering::Relaxed);
        Ok(())
    }
}

/// How a change is made.
#[derive(Clone, Copy, Debug)]
struct How {
    /// Requests and background work go on meanwhile.
    busy: bool,
    storing: Storing,
    reformat: bool,
}

/// A volume whose requests have the scratch of a shard's: a request that came for one stack may be for the next one.
struct Shown(Arc<Switch>);

impl Volume for Shown {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.0.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        ShardConfig::VOLUME_SCRATCH
    }
}

/// A volume in use.
struct Live<'a> {
    way: &'a Way,
    rig: &'a Rig,
    ledger: Arc<Ledger>,
    /// `None` while it is being changed.
    graph: Option<Graph>,
    switch: Arc<Switch>,
    /// The same, as a guest has it.
    shown: Arc<dyn Volume>,
    session: Session<'a>,
}

fn exchange(switch: &Switch, old: &mut Graph, mut new: Graph, terms: Terms<'_>) -> Result<(), ChangeFailed> {
    change(switch, old, &mut new, terms)?;
    *old = new;
    Ok(())
}

impl<'a> Live<'a> {
    fn open(way: &'a Way, rig: &'a Rig, means: &'a Means, ledger: &Arc<Ledger>, size: Option<u64>, seed: u64) -> Self {
        let stack = way.stacks[ledger.stored.load(Ordering::Relaxed)];
        let reason = if size.is_none() { Reason::Create } else { Reason::Open };
        let graph = mounted(stack, &rig.volumes(), size, reason, &rig.kept);
        let graph = graph.unwrap_or_else(|error| panic!("{stack}: {error}"));
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        let shown = Arc::new(Shown(Arc::clone(&switch)));
        let session = Session::new(means, &rig.kept, seed);
        Self { way, rig, ledger: Arc::clone(ledger), graph: Some(graph), switch, shown, session }
    }

    fn graph(&mut self) -> &mut Graph {
        self.graph.as_mut().expect("no change is under way")
    }

    fn settle(&mut self) {
        let graph = self.graph.as_ref().expect("no change is under way");
        self.session.settle_until_done(graph, TURNS);
    }

    /// Random requests; none fails while there is power.
    fn work(&mut self, oracle: &mut Oracle, steps: u64) {
        for _ in 0..steps {
            if self.rig.power.is_gone() {
                return;
            }
            let good = oracle.step(&mut self.session, &self.shown);
            assert!(good || self.rig.power.is_gone(), "a request failed without reason");
        }
    }

    /// Ends all tasks.
    fn rest(&mut self) {
        self.graph().tasks.iter().for_each(|(_, tasks)| tasks.tell());
        self.session.settle(TURNS);
        assert_eq!(self.session.busy(), 0, "background work does not end");
        self.graph().tasks.clear();
    }

    /// Changes it to this stack.
    fn change_to(&mut self, stack: usize, how: How, oracle: &mut Oracle) -> Result<(), ChangeFailed> {
        if !how.busy {
            self.rest();
        }
        let node: Node = self.way.stacks[stack].parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: Some(self.bytes()), block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::clone(&self.rig.kept);
        let mut old = self.graph.take().expect("one change after the other");
        let new = Graph::build(&plan, &Disks(self.rig.volumes()), &SharedObjects::default(), &spawner, Some(&old));
        let new = new.unwrap_or_else(|error| panic!("{node}: {error}"));
        let (switch, ledger) = (Arc::clone(&self.switch), Arc::clone(&self.ledger));
        let change = move || {
            let mut store = || ledger.store(stack, how.storing);
            let patience = Duration::from_secs(60);
            let terms = Terms {
                patience,
                reformat: how.reformat,
                scratch: ShardConfig::VOLUME_SCRATCH,
                below: &[],
                store: &mut store,
                restore: None,
            };
            let result = exchange(&switch, &mut old, new, terms);
            (old, result)
        };
        let (mut graph, result) = if how.busy { self.beside_load(change, oracle) } else { change() };
        if result.is_err() {
            // Those that were ended before.
            let nodes = graph.nodes();
            graph.start(&nodes);
        }
        self.graph = Some(graph);
        result
    }

    /// Has it done on another thread, while requests and background tasks go on.
    fn beside_load<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static, oracle: &mut Oracle) -> T {
        let answer = beside(work);
        for step in 0.. {
            match answer.try_recv() {
                Err(TryRecvError::Empty) if step < BESIDE => self.work(oracle, 1),
                Err(TryRecvError::Empty) => std::thread::sleep(Duration::from_micros(20)),
                answer => return answer.expect("a change does not panic"),
            }
            self.session.settle(20);
        }
        unreachable!("it is waited for")
    }

    fn bytes(&self) -> u64 {
        self.switch.geometry().bytes()
    }

    /// The process dies with what it has in memory.
    fn die(mut self) {
        self.graph().tasks.clear();
        let rig = self.rig;
        drop(self);
        rig.kept.forget();
    }

    fn close(mut self) {
        self.rest();
        let graph = self.graph.take();
        drop(self);
        graph.expect("no change is under way").unmount();
    }
}

/// Writes and flushes until the change began, until it was done, and in all.
#[derive(Clone, Copy, Debug)]
struct Passed {
    began: u64,
    ended: u64,
    all: u64,
}

impl Passed {
    fn choose(self, random: &mut Random) -> Cut {
        let mut within = |from: u64, to: u64| Cut::At(from + random.below((to - from).max(1)));
        match within(0, 10) {
            Cut::At(0) => Cut::Storing { stored: false },
            Cut::At(1) => Cut::Storing { stored: true },
            Cut::At(2) => within(0, self.began),
            Cut::At(3) => within(self.ended, self.all),
            _ => within(self.began, self.ended),
        }
    }
}

/// Where the power went: before, within or after the change; and how often the change was stored.
#[derive(Debug, Default)]
struct Found {
    cuts: [usize; 3],
    stored: usize,
}

struct Round<'a> {
    way: &'a Way,
    seed: u64,
    rig: Rig,
    means: Means,
    ledger: Arc<Ledger>,
}

impl<'a> Round<'a> {
    fn new(way: &'a Way, seed: u64, first: usize) -> Self {
        let rig = Rig::new(seed, way.disks, way.blocks, BlockSize::B512);
        let ledger = Arc::new(Ledger { power: Arc::clone(&rig.power), stored: AtomicUsize::new(first) });
        Self { way, seed, rig, means: Means::new(seed), ledger }
    }

    fn open(&self, size: Option<u64>) -> Live<'_> {
        Live::open(self.way, &self.rig, &self.means, &self.ledger, size, self.seed)
    }

    fn stored(&self) -> usize {
        self.ledger.stored.load(Ordering::Relaxed)
    }

    /// Changes the volume under test, whose power may go.
    fn change(&self, live: &mut Live<'_>, oracle: &mut Oracle, random: &mut Random, cut: Cut) {
        let (to, busy, fails) = (self.stored() + 1, random.below(2) == 0, random.below(5) == 0);
        let storing = match cut {
            Cut::Storing { stored } => Storing::Cut { stored },
            _ => Storing::Works,
        };
        let tries = [(fails, Storing::Fails), (true, storing)];
        for (_, storing) in tries.into_iter().filter(|(tried, _)| *tried) {
            if self.rig.power.is_gone() {
                return;
            }
            let result = live.change_to(to, How { busy, storing, reformat: false }, oracle);
            if let Err(error) = result {
                let error = error.to_string();
                assert!(self.rig.power.is_gone() || storing != Storing::Works, "{error}");
                live.work(oracle, 2);
            }
        }
    }

    /// What is not in the stack any more does not matter any more.
    fn spoil(&self, stack: &str) {
        for (number, disk) in self.rig.disks.iter().enumerate() {
            if !stack.contains(&format!("disk:{number}")) {
                disk.spoil(0, &vec![0; disk.geometry().bytes() as usize]);
            }
        }
    }

    /// Opens what is stored, twice, and then changes it on.
    fn restart(&self, size: u64, oracle: &mut Oracle, died: bool, first: usize) {
        let mut live = self.open(Some(size));
        assert!(!died || oracle.expect_last(&mut live.session, &live.shown), "a block cannot be read");
        oracle.check(&mut live.session, &live.shown);
        live.settle();
        oracle.check(&mut live.session, &live.shown);
        live.work(oracle, 3);
        live.close();
        if self.stored() > first && self.seed.is_multiple_of(2) {
            self.spoil(self.way.stacks[self.stored()]);
        }
        live = self.open(Some(size));
        oracle.check(&mut live.session, &live.shown);
        for to in (self.stored() + 1..self.way.stacks.len()).take(FURTHER) {
            live.work(oracle, 2);
            live.settle();
            let mut how = How { busy: false, storing: Storing::Works, reformat: false };
            let mut result = live.change_to(to, how, oracle);
            if result.as_ref().is_err_and(|error| error.to_string().contains("--reformat begins an empty one")) {
                // The power failed while a cache was put in.
                assert_eq!(to, first + 1);
                how.reformat = true;
                result = live.change_to(to, how, oracle);
            }
            result.unwrap_or_else(|error| panic!("{}: {error}", self.way.stacks[to]));
            oracle.check(&mut live.session, &live.shown);
        }
        live.settle();
        live.close();
        live = self.open(Some(size));
        oracle.check(&mut live.session, &live.shown);
        live.close();
    }
}

/// A volume is changed, and the power goes.
fn changed(way: &Way, seed: u64, cut: Cut, found: &mut Found) -> Passed {
    let mut random = Random::new(seed);
    let first = random.below(way.stacks.len() as u64 - 1) as usize;
    let round = Round::new(way, seed, first);
    let power = &round.rig.power;
    let mut live = round.open(None);
    let size = live.bytes();
    let mut oracle = Oracle::new(seed, (size / 512).min(600), 512);
    live.settle();
    let start = power.boundaries();
    if let Cut::At(boundary) = cut {
        power.cut_at(boundary);
    }
    live.work(&mut oracle, 2 + random.below(5));
    live.session.settle(random.below(60) as usize);
    let (began, before) = (power.boundaries() - start, power.is_gone());
    round.change(&mut live, &mut oracle, &mut random, cut);
    let (ended, within) = (power.boundaries() - start, power.is_gone());
    live.work(&mut oracle, 1 + random.below(4));
    live.session.settle(random.below(60) as usize);
    let all = power.boundaries() - start;
    live.die();
    // Where writes are answered early, a death may lose what was not flushed.
    let died = matches!(cut, Cut::Never) && !way.stacks.iter().any(|stack| stack.contains("ack=fast"));
    if !died {
        round.rig.restart();
    }
    if !matches!(cut, Cut::Never) {
        found.cuts[if before {
            0
        } else if within {
            1
        } else {
            2
        }] += 1;
    }
    found.stored += usize::from(round.stored() > first);
    round.restart(size, &mut oracle, died, first);
    Passed { began, ended, all }
}

/// Cuts the power under these ways, with so many workloads.
fn changes_survive(what: &str, seed: u64, ways: &[Way], workloads: usize) {
    let mut found = Found::default();
    every_seed(what, seed, workloads, |seed| {
        let way = &ways[(seed % ways.len() as u64) as usize];
        let first = Random::new(seed).below(way.stacks.len() as u64 - 1) as usize;
        eprintln!("{what}: seed {seed:#x}, {} to {}", way.stacks[first], way.stacks[first + 1]);
        let passed = changed(way, seed, Cut::Never, &mut found);
        let mut random = Random::new(!seed);
        for _ in 0..CUTS {
            let cut = passed.choose(&mut random);
            eprintln!("{cut:?} of {passed:?}");
            changed(way, seed, cut, &mut found);
        }
    });
    println!("the power went before the change, within it, after it: {found:?}");
    let points: usize = found.cuts.iter().sum();
    assert!(found.cuts.iter().all(|cuts| *cuts > points / 30) && found.stored > points / 10, "{found:?}");
}

macro_rules! mirror {
    ($($leg:literal),*) => { concat!("mirror(region=64K, rate=1T", $(", ", $leg),*, ")") };
}

macro_rules! parity {
    ($($leg:literal),*) => { concat!("parity(chunk=4K, journal=128K, region=64K, rate=1T", $(", ", $leg),*, ")") };
}

macro_rules! cache {
    ($settings:literal, $slow:expr) => {
        concat!("cache(line=4K, ", $settings, ", disk:0) | ", $slow)
    };
}

macro_rules! crypt {
    ($settings:literal, $leg:expr) => {
        concat!("crypt(", $settings, "key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\") | ", $leg)
    };
}

#[test]
fn changes_of_mirrors_survive_power_cuts() {
    let ways = [
        Way {
            stacks: &[
                mirror!("disk:0", "disk:1"),
                mirror!("disk:0", "disk:2"),
                mirror!("disk:1", "disk:2"),
                mirror!("disk:1"),
            ],
            disks: 3,
            blocks: 160,
        },
        Way {
            stacks: &[
                mirror!("disk:0", "disk:1"),
                mirror!("disk:0", "disk:1", "disk:2"),
                mirror!("disk:1", "disk:2"),
                mirror!("disk:2"),
            ],
            disks: 3,
            blocks: 160,
        },
        Way {
            stacks: &[
                mirror!("disk:0", "disk:1"),
                concat!("meter(tenant=one) | ", mirror!("disk:0", "disk:1")),
                concat!("throttle(iops=1G) | meter(tenant=one) | ", mirror!("disk:0", "disk:1")),
                concat!("meter(tenant=one) | throttle(iops=1G) | ", mirror!("disk:0", "disk:1")),
                concat!("meter(tenant=one) | throttle(iops=1G) | ", mirror!("disk:2", "disk:1")),
                mirror!("disk:2"),
            ],
            disks: 3,
            blocks: 160,
        },
    ];
    changes_survive("changes of mirrors", SEED, &ways, 60);
}

#[test]
fn changes_of_parities_survive_power_cuts() {
    let ways = [
        Way {
            stacks: &[
                parity!("disk:0", "disk:1", "disk:2"),
                parity!("disk:0", "disk:1", "disk:3"),
                parity!("disk:2", "disk:1", "disk:3"),
                concat!("meter(tenant=one) | ", parity!("disk:2", "disk:1", "disk:3")),
            ],
            disks: 4,
            blocks: 400 + 64,
        },
        Way {
            stacks: &[
                parity!("redundancy=2", "disk:0", "disk:1", "disk:2", "disk:3"),
                parity!("redundancy=2", "disk:0", "disk:4", "disk:2", "disk:3"),
                parity!("redundancy=2", "disk:0", "disk:4", "disk:1", "disk:5"),
            ],
            disks: 6,
            blocks: 400 + 256 + 48,
        },
    ];
    changes_survive("changes of parities", SEED, &ways, 40);
}

#[test]
fn caches_that_come_and_go_survive_power_cuts() {
    const SLOW: &str = "concat(disk:1, disk:2)";
    let ways = [
        Way {
            stacks: &[
                SLOW,
                cache!("mode=back", "concat(disk:1, disk:2)"),
                cache!("mode=back, rate=1T", "concat(disk:1, disk:2)"),
                SLOW,
                cache!("mode=back, rate=1T, ack=fast", "concat(disk:1, disk:2)"),
                cache!("mode=through", "concat(disk:1, disk:2)"),
                SLOW,
            ],
            disks: 3,
            blocks: 200,
        },
        Way { stacks: &[SLOW, cache!("mode=back, rate=1T", "concat(disk:1, disk:2)"), SLOW], disks: 3, blocks: 200 },
    ];
    changes_survive("caches that come and go", SEED, &ways, 60);
}

#[test]
fn changes_below_caches_survive_power_cuts() {
    let ways = [
        Way {
            stacks: &[
                mirror!("disk:1", "disk:2"),
                cache!("mode=back", mirror!("disk:1", "disk:2")),
                cache!("mode=back", mirror!("disk:1", "disk:3")),
                cache!("mode=back, rate=1T", mirror!("disk:2", "disk:3")),
                cache!("mode=back, rate=1T", mirror!("disk:2")),
                mirror!("disk:2"),
            ],
            disks: 4,
            blocks: 200,
        },
        Way {
            stacks: &[
                cache!("mode=back", parity!("disk:1", "disk:2", "disk:3")),
                cache!("mode=back", parity!("disk:1", "disk:2", "disk:4")),
                cache!("mode=back", parity!("disk:3", "disk:2", "disk:4")),
                parity!("disk:3", "disk:2", "disk:4"),
            ],
            disks: 5,
            blocks: 400 + 64,
        },
    ];
    changes_survive("changes below caches", SEED, &ways, 50);
}

#[test]
fn changes_around_sealed_blocks_survive_power_cuts() {
    let ways = [
        Way {
            stacks: &[
                "integrity(disk:0)",
                "integrity(close-after=1ms, disk:0)",
                "meter(tenant=one) | integrity(rate=1T, close-after=1ms, disk:0)",
            ],
            disks: 1,
            blocks: 1200,
        },
        Way {
            stacks: &[
                mirror!("integrity(disk:0)", "integrity(disk:1)"),
                mirror!("integrity(disk:0)", "integrity(disk:2)"),
                mirror!("integrity(disk:2)"),
            ],
            disks: 3,
            blocks: 1200,
        },
        Way {
            stacks: &[
                crypt!("", mirror!("disk:0", "disk:1")),
                crypt!("discard=false, ", mirror!("disk:0", "disk:1")),
                crypt!("discard=false, ", mirror!("disk:0", "disk:2")),
                crypt!("", mirror!("disk:2")),
            ],
            disks: 3,
            blocks: 4096,
        },
        Way {
            stacks: &[
                crypt!("mode=authenticated, ", "disk:0"),
                crypt!("mode=authenticated, save-after=1ms, ", "disk:0"),
                concat!("throttle(iops=1G) | ", crypt!("mode=authenticated, discard=false, ", "disk:0")),
            ],
            disks: 1,
            blocks: 16_384,
        },
    ];
    changes_survive("changes around sealed blocks", SEED, &ways, 40);
}
