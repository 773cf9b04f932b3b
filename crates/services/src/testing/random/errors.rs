//! Random stacks over legs that give errors.
//!
//! ```text
//!   round: some legs give errors, transient or for good ─ work ─► power cut, death or orderly end
//!     ─► perhaps opened while they still do ─► opened when they are well: what may be there is there
//!     ─► what is left to the operator: failed legs are rebuilt ─► every copy is right ─► next round, with other legs
//! ```

use std::{
    collections::BTreeSet,
    sync::{Arc, mpsc::TryRecvError},
};

use millrace_backends::fault::{Effect, FaultVolume, Kind, Rule, When};
use millrace_block::{
    BlockError, Operation, Volume,
    conformance::{Harness, Job, Random},
};

use super::{RandomStacks, rig, stack};
use crate::{
    Node, Reason,
    graph::{Graph, GraphError},
    settings::Settings,
    testing::{Bench, Oracle, Rig, Session, beside, every_seed, graph, is_busy},
};

/// Turns that background work gets to bring everything in order.
const TURNS: usize = 200_000;
/// What legs are asked for by services.
const KINDS: [Kind; 6] = [Kind::Read, Kind::Write, Kind::Flush, Kind::WriteZeroes, Kind::Deallocate, Kind::Copy];

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The power goes.
    Cut,
    /// The process dies.
    Death,
    /// The volume is closed.
    Orderly,
}

/// Whether the guest sees nothing of errors of these disks, as far as the stack's redundancy goes.
fn hides(node: &Node, bad: &BTreeSet<usize>) -> bool {
    let Node::Service(service) = node else {
        return !bad.contains(&disk(node));
    };
    let legs = &service.legs;
    let good = legs.iter().filter(|leg| hides(leg, bad)).count();
    let is = |name: &str, value: &str| service.settings.text(name) == Some(value);
    match service.service.as_str() {
        "mirror" => good > 0,
        "parity" => legs.len() - good <= if is("redundancy", "2") { 2 } else { 1 },
        "cache" if is("mode", "through") => hides(&legs[1], bad),
        "move" => hides(&legs[0], bad),
        _ => good == legs.len(),
    }
}

/// Whether a crash while these disks are bad may cost blocks that were written since the last flush: a leg of a parity that does not log whole
/// rows is missing.
fn forgets(node: &Node, bad: &BTreeSet<usize>) -> bool {
    let Node::Service(service) = node else { return false };
    let partial = service.service == "parity" && service.settings.text("log") != Some("all");
    partial && !service.legs.iter().all(|leg| hides(leg, bad)) || service.legs.iter().any(|leg| forgets(leg, bad))
}

/// The number of the disk that a leaf is.
fn disk(leaf: &Node) -> usize {
    leaf.word().strip_prefix("disk:").and_then(|number| number.parse().ok()).expect("a leaf is a disk")
}

/// What is wrong with the disks of a stack.
struct Trouble {
    node: Node,
    legs: Vec<Arc<FaultVolume>>,
    /// Those that give errors, from when it begins.
    bad: BTreeSet<usize>,
}

impl Trouble {
    fn choose(&mut self, random: &mut Random) {
        let disks = self.legs.len() as u64;
        self.bad = match random.below(4) {
            0 => (0..self.legs.len()).filter(|_| random.below(3) == 0).collect(),
            _ => [random.below(disks) as usize].into(),
        };
    }

    fn begin(&self, random: &mut Random) {
        for leg in &self.bad {
            let rule = rule(random);
            eprintln!("disk:{leg}: {rule:?}");
            self.legs[*leg].add(rule);
        }
    }

    fn hides(&self) -> bool {
        hides(&self.node, &self.bad)
    }
}

/// Something that is wrong with a leg.
fn rule(random: &mut Random) -> Rule {
    let error = [BlockError::ReadFault { errno: 5 }, BlockError::WriteFault { errno: 5 }, BlockError::NotReady];
    let fail = Effect::Fail(error[random.below(3) as usize]);
    let everything = |when, effect| Rule { kinds: vec![], ..Rule::new(Kind::Read, when, effect) };
    match random.below(5) {
        0 => everything(When::Always, fail),
        1 => everything(When::OneIn(2 + random.below(30)), fail),
        2 => Rule::new(KINDS[random.below(KINDS.len() as u64) as usize], When::OneIn(1 + random.below(6)), fail),
        3 => Rule::new(KINDS[random.below(KINDS.len() as u64) as usize], When::Nth(1 + random.below(20)), fail),
        _ => Rule::new(Kind::Write, When::OneIn(1 + random.below(8)), Effect::Tear),
    }
}

struct Trial<'a> {
    text: String,
    trouble: Trouble,
    rig: Rig,
    bench: &'a Bench,
    oracle: Oracle,
    random: Random,
}

impl<'a> Trial<'a> {
    fn open(&self, reason: Reason) -> Result<Graph, GraphError> {
        open(&self.text, &self.trouble.legs, &self.rig, reason)
    }

    fn open_well(&self) -> Graph {
        self.open(Reason::Open).unwrap_or_else(|error| panic!("it does not open with all legs well: {error}"))
    }

    fn session(&mut self) -> Session<'a> {
        Session::new(self.bench, &self.rig.kept, self.random.number())
    }

    /// Works, and after a while legs give errors. Returns how it ended.
    fn work(&mut self, volume: Graph, mut session: Session<'_>, steps: usize) -> End {
        self.trouble.choose(&mut self.random);
        let mut end = [End::Cut, End::Cut, End::Death, End::Orderly][self.random.below(4) as usize];
        if end == End::Cut && forgets(&self.trouble.node, &self.trouble.bad) {
            end = End::Death;
        }
        if end == End::Cut {
            self.rig.power.cut_at(self.random.below(4 * steps as u64));
        }
        let begin = self.random.below(steps as u64 / 2);
        for step in 0..steps as u64 {
            if step == begin {
                self.trouble.begin(&mut self.random);
            }
            let good = self.oracle.step(&mut session, volume.volume());
            if self.rig.power.is_gone() {
                break;
            }
            let bad = &self.trouble.bad;
            assert!(good || step >= begin && !self.trouble.hides(), "an error reached the guest, and only {bad:?} were bad");
        }
        match end {
            End::Orderly => close(volume, session),
            End::Cut | End::Death => die(volume, session, &self.rig),
        }
        if end == End::Cut {
            self.rig.restart();
        }
        end
    }

    /// Opens it while legs still give errors: that may fail, and changes nothing.
    fn try_to_open(&mut self, end: End) {
        let Ok(volume) = self.open(Reason::Open) else { return self.rig.kept.forget() };
        let mut session = self.session();
        if self.trouble.hides() {
            self.look(end, &mut session, volume.volume());
        }
        session.settle(100);
        die(volume, session, &self.rig);
    }

    /// Everything is what it may be after this end; from now on it stays so.
    fn look(&mut self, end: End, session: &mut Session<'_>, volume: &Arc<dyn Volume>) {
        if end != End::Cut {
            if self.trouble.hides() && !self.text.contains("ack=fast") {
                assert!(self.oracle.expect_last(session, volume), "a block cannot be read");
            }
            let flush = Job::new(Operation::Flush, 0, 0);
            assert_eq!(session.run(volume, &[flush]), [Ok(())]);
        }
        self.oracle.check(session, volume);
    }

    fn round(&mut self, volume: Graph, session: Session<'_>, steps: usize) -> Graph {
        let end = self.work(volume, session, steps);
        if self.random.below(3) == 0 {
            self.try_to_open(end);
        }
        self.trouble.legs.iter().for_each(|leg| leg.clear());
        let volume = self.open_well();
        let mut session = self.session();
        self.look(end, &mut session, volume.volume());
        self.trouble.bad.clear();
        repair(&volume, &mut session);
        self.oracle.check(&mut session, volume.volume());
        for _ in 0..3 {
            assert!(self.oracle.step(&mut session, volume.volume()), "a request failed, and all legs are well");
        }
        close(volume, session);
        self.open_well()
    }
}

/// What is left to the operator, and all that is done beside the guest's requests.
fn repair(volume: &Graph, session: &mut Session<'_>) {
    for (name, service) in volume.services("mirror").into_iter().chain(volume.services("parity")) {
        let failed = service.status().facts.into_iter().filter(|(_, value)| value == "failed");
        for (leg, _) in failed {
            let mut arguments = Settings::default();
            assert!(arguments.add("leg", leg.trim_start_matches("leg ")));
            let service = Arc::clone(&service);
            let rebuilt = beside(move || service.command("rebuild", &arguments).map_err(|error| error.to_string()));
            let rebuilt = loop {
                match rebuilt.try_recv() {
                    Err(TryRecvError::Empty) => session.settle(1),
                    rebuilt => break rebuilt.expect("a command does not panic"),
                }
            };
            rebuilt.unwrap_or_else(|error| panic!("{name}, {leg}: {error}"));
        }
    }
    session.settle_until_done(volume, TURNS);
    assert!(!is_busy(&volume.tree()), "it does not come in order: {:#?}", volume.tree());
}

fn open(text: &str, legs: &[Arc<FaultVolume>], rig: &Rig, reason: Reason) -> Result<Graph, GraphError> {
    let legs: Vec<_> = legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as Arc<dyn Volume>).collect();
    graph(text, &legs, None, reason, &rig.kept)
}

/// Tasks are told, and get their turns.
fn close(mut volume: Graph, mut session: Session<'_>) {
    volume.tasks.iter().for_each(|(_, tasks)| tasks.tell());
    session.settle(10 * TURNS);
    assert_eq!(session.busy(), 0, "background work does not end: {:?}", volume.tree());
    drop(session);
    volume.unmount();
}

/// The process dies with what it has in memory.
fn die(mut volume: Graph, session: Session<'_>, rig: &Rig) {
    drop(session);
    volume.tasks.clear();
    drop(volume);
    rig.kept.forget();
}

fn try_stack(test: &RandomStacks, seed: u64) {
    let mut random = Random::new(seed);
    let mut disks = 0;
    let text = stack(&mut random, 3, &mut disks);
    eprintln!("random stack, seed {seed:#x}: {text}");
    let rig = rig(&mut random, seed, disks);
    let legs: Vec<_> = rig.volumes().into_iter().map(|disk| FaultVolume::new(disk, random.number())).collect();
    let mut volume = open(&text, &legs, &rig, Reason::Create).unwrap_or_else(|error| panic!("{error}"));
    let geometry = volume.volume().geometry();
    let oracle = Oracle::new(seed, geometry.blocks.0.min(600), geometry.block_size.bytes() as usize);
    let trouble = Trouble { node: text.parse().expect("a stack"), legs, bad: BTreeSet::new() };
    let bench = Bench::new(random.number());
    let mut trial = Trial { text, trouble, rig, bench: &bench, oracle, random };
    for _ in 0..test.crashes {
        let mut session = trial.session();
        repair(&volume, &mut session);
        volume = trial.round(volume, session, test.steps);
    }
}

/// Tries random stacks over legs that give errors, with crashes. A request succeeds as on a plain disk, or fails; a write that failed leaves each
/// of its blocks old or new. What was flushed is there when the legs are well again. Where the stack has redundancy over the bad legs, the guest
/// sees no error.
///
/// # Panics
/// With the seed, when that is not so.
pub fn random_stacks_with_errors(test: &RandomStacks) {
    every_seed("random stacks over failing legs", test.seed, test.stacks, |seed| try_stack(test, seed));
}
