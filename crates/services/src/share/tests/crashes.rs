//! Volumes are created, resized, deleted and written to, and the power goes at every write boundary of it.

use std::collections::BTreeMap;

use millrace_block::{BlockCount, conformance::Random};

use super::{
    super::{space::region, table::Table},
    *,
};
use crate::{
    legs,
    testing::{Bench, Oracle, Rig, Session, every_cut, every_seed},
};

/// Extents of the disk behind its table.
const ROOM: u64 = 12;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// A volume as it should be.
struct Known {
    graph: Option<Graph>,
    oracle: Oracle,
    /// Blocks of it.
    blocks: u64,
}

/// What was under way when the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    Create(u64),
    Resize(u64),
    Delete,
}

struct Run {
    seed: u64,
    random: Random,
    leg: Arc<dyn Volume>,
    pool: Pool,
    known: BTreeMap<&'static str, Known>,
    /// Versions are never used twice.
    oracles: u64,
}

impl Run {
    fn new(seed: u64, leg: Arc<dyn Volume>) -> Self {
        let pool = Pool::open(&leg, "disk(extent=16K, depth=3)", Reason::Create).unwrap();
        Self { seed, random: Random::new(seed), leg, pool, known: BTreeMap::new(), oracles: 0 }
    }

    fn oracle(&mut self, blocks: u64) -> Oracle {
        self.oracles += 1;
        Oracle::new(self.seed + self.oracles, blocks, 512).numbered_from(self.oracles << 32)
    }

    /// A size in blocks: whole extents, and less often something else.
    fn size(&mut self) -> u64 {
        let blocks = (1 + self.random.below(5)) * 32;
        if self.random.below(3) == 0 { blocks - self.random.below(24) } else { blocks }
    }

    /// Does something with some volume. What is in doubt, when it failed.
    fn step(&mut self, session: &mut Session<'_>) -> Result<(), (&'static str, Option<Doubt>)> {
        let name = NAMES[self.random.below(3) as usize];
        let size = self.size();
        let Some(known) = self.known.get_mut(name) else {
            if self.pool.disk.volume().geometry().blocks.0 < size {
                return Ok(());
            }
            return match self.pool.volume(name, "share", Some(size << 9), Reason::Create) {
                Ok(graph) => {
                    let oracle = self.oracle(size);
                    self.known.insert(name, Known { graph: Some(graph), oracle, blocks: size });
                    Ok(())
                }
                Err(error) if error.to_string().contains("bytes free") => Ok(()),
                Err(_) => Err((name, Some(Doubt::Create(size)))),
            };
        };
        let graph = known.graph.as_mut().expect("it is in force");
        match self.random.below(8) {
            0 => {
                graph.discard(true);
                if self.pool.fact(&format!("volume {name}")).is_some() {
                    return Err((name, Some(Doubt::Delete)));
                }
                self.known.remove(name);
            }
            1..4 => match graph.volume().resize(BlockCount(size)) {
                Ok(()) => {
                    known.oracle.resize(size);
                    known.blocks = size;
                }
                Err(error) if error.to_string().contains("bytes free") => {}
                Err(_) => return Err((name, Some(Doubt::Resize(size)))),
            },
            _ => {
                let volume = Arc::clone(graph.volume());
                if !known.oracle.step(session, &volume) {
                    return Err((name, None));
                }
            }
        }
        Ok(())
    }

    /// The daemon is gone and comes back.
    fn reopen(&mut self, doubt: Option<(&'static str, Doubt)>) {
        self.known.values_mut().for_each(|known| known.graph = None);
        self.pool = Pool::open(&self.leg, "disk(extent=16K, depth=3)", Reason::Open).unwrap_or_else(|e| panic!("{e}"));
        for name in NAMES {
            let is = self.pool.fact(&format!("volume {name}")).is_some();
            let doubt = doubt.filter(|(of, _)| *of == name).map(|(_, doubt)| doubt);
            // The daemon has its size. The disk's table may still give more to a volume that became smaller when the power went.
            let size = self.known.get(name).filter(|_| doubt.is_none()).map(|known| known.blocks << 9);
            let open = |run: &Self| run.pool.volume(name, "share", size, Reason::Open).unwrap_or_else(|e| panic!("{e}"));
            match (is, doubt) {
                (true, Some(Doubt::Create(blocks))) => {
                    let (graph, oracle) = (open(self), self.oracle(blocks));
                    assert_eq!(graph.volume().geometry().blocks.0, blocks);
                    self.known.insert(name, Known { graph: Some(graph), oracle, blocks });
                }
                (false, Some(Doubt::Delete)) => drop(self.known.remove(name)),
                (true, _) => {
                    let graph = open(self);
                    let known = self.known.get_mut(name).expect("what the disk has was created");
                    let has = graph.volume().geometry().blocks.0;
                    match doubt {
                        Some(Doubt::Resize(blocks)) if has == blocks => known.oracle.resize(blocks),
                        _ => assert_eq!(has, known.blocks, "volume {name} after {doubt:?}"),
                    }
                    (known.graph, known.blocks) = (Some(graph), has);
                }
                (false, _) => assert!(!self.known.contains_key(name), "volume {name} is gone"),
            }
        }
    }

    /// Every volume holds what it may hold, and what is free shows nothing of what was there.
    fn check(&mut self, session: &mut Session<'_>) {
        for known in self.known.values_mut() {
            let volume = Arc::clone(known.graph.as_ref().expect("it is in force").volume());
            known.oracle.check(session, &volume);
        }
        let taken: u64 = self.known.values().map(|known| known.blocks.div_ceil(32)).sum();
        if taken == ROOM {
            return;
        }
        let mut rest = self.pool.create("rest", (ROOM - taken) * EXTENT);
        let volume = Arc::clone(rest.volume());
        let mut oracle = self.oracle((ROOM - taken) * 32);
        oracle.check(session, &volume);
        // Dirt for whoever comes next.
        assert!(oracle.step(session, &volume), "the rest can be written");
        drop(volume);
        rest.discard(true);
    }
}

/// One workload, with the power cut at a boundary. How many there were.
fn run(seed: u64, cut: u64) -> u64 {
    let rig = Rig::new(seed, 1, (ROOM + 1) * 32, BlockSize::B512);
    let bench = Bench::new(seed);
    let mut run = Run::new(seed, rig.volumes().remove(0));
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    let mut doubt = None;
    let mut session = Session::new(&bench, &rig.kept, seed);
    for _ in 0..14 {
        let result = run.step(&mut session);
        if let Err((name, in_doubt)) = result {
            assert!(rig.power.is_gone(), "something failed without reason: {in_doubt:?} of {name}");
            doubt = in_doubt.map(|doubt| (name, doubt));
        }
        if rig.power.is_gone() {
            break;
        }
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    rig.restart();
    run.reopen(doubt);
    let mut session = Session::new(&bench, &rig.kept, !seed);
    run.check(&mut session);
    for _ in 0..6 {
        run.step(&mut session).expect("everything works after the restart");
    }
    run.check(&mut session);
    run.reopen(None);
    run.check(&mut session);
    boundaries
}

#[test]
fn tables_and_data_survive_power_cuts() {
    every_cut("crash test of disk tables", SEED, 10_000, run);
}

#[test]
fn random_volumes_never_mix() {
    every_seed("volumes come and go", SEED, 40, |seed| {
        let (bench, kept) = (Bench::new(seed), Arc::<Kept>::default());
        let leg = FaultVolume::new(memory((ROOM + 1) * EXTENT), seed);
        leg.hold_writes();
        let mut run = Run::new(seed, leg);
        let mut session = Session::new(&bench, &kept, seed);
        for _ in 0..20 {
            for _ in 0..10 {
                run.step(&mut session).expect("nothing fails");
            }
            run.check(&mut session);
        }
        run.reopen(None);
        run.check(&mut session);
    });
}

/// The process dies before it has flushed a table, and the power goes while the next one opens the disk: one of the two tables is there.
#[test]
fn a_table_that_was_not_flushed_is_durable_before_the_other_copy_is_written() {
    const STACK: &str = "disk(extent=16K)";
    every_seed("a table that was not flushed, and a power cut", SEED, 200, |seed| {
        let rig = Rig::new(seed, 1, 64 * 32, BlockSize::B512);
        let leg = rig.volumes().remove(0);
        let pool = Pool::open(&leg, STACK, Reason::Create).unwrap();
        // Names of some length: the table has several sectors.
        let name = |number: u32| format!("{number:0>60}");
        let graphs: Vec<_> = (0..12).map(|number| pool.create(&name(number), EXTENT)).collect();
        drop((graphs, pool));
        let region = region(EXTENT);
        let found = region.load(&leg).unwrap().unwrap();
        let mut table = Table::decode(&found.content).unwrap();
        table.volumes.remove(&name(3));
        let (offset, copy) = region.copy(found.generation + 1, &table.encode());
        let volume = Arc::clone(&leg);
        let written = legs::block_on(move |cx| Box::pin(async move { legs::write_bytes(cx, &*volume, offset, copy).await }));
        written.unwrap().unwrap();
        rig.power.cut_at(seed % 4);
        drop(Pool::open(&leg, STACK, Reason::Open));
        rig.restart();
        let pool = Pool::open(&leg, STACK, Reason::Open).unwrap_or_else(|error| panic!("{error}"));
        assert!((0..12).all(|number| number == 3 || pool.fact(&format!("volume {}", name(number))).is_some()));
    });
}
