//! One trace through both engines: disks are given the same commands, guests the same completions and data.
//!
//! With one command at a time the streams are the same, entry by entry. With many, what NVM Express leaves open may differ (commands with
//! lists are overtaken): then each queue gets the same completions and each disk the same commands, in some order.
#![cfg(feature = "sim")]

use millrace_engine_model::{
    Engine, Shape, SimEngine, SoftEngine,
    testing::{BASE, Rig, SIZE},
};
use millrace_functions::Config;
use millrace_nvme_spec::command::{DataPointer, NamespaceId, Sqe};
use zerocopy::{FromZeros, IntoBytes};

const FUNCTIONS: u8 = 3;
const QUEUES: u16 = 4;
/// Where a guest's data and lists are.
const DATA: u64 = 0x20_0000;
const LISTS: u64 = 0x18_0000;

/// Numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// A command, and the lists that it needs in its guest's memory.
#[derive(Clone)]
struct Step {
    function: u8,
    qid: u16,
    sqe: Sqe,
    lists: Vec<(u64, Vec<u64>)>,
}

/// A command of a trace; `place` keeps the blocks, pages and lists of those in flight together apart.
fn step(random: &mut Random, function: u8, qid: u16, place: u64) -> Step {
    let opcode = [0, 1, 1, 1, 2, 2, 2, 5, 8][random.below(9) as usize];
    let blocks = if random.one_in(2) { 1 + random.below(8) } else { 1 + random.below(64) };
    let mut sqe = Sqe::new_zeroed();
    (sqe.opcode, sqe.nsid, sqe.cid.0) = (opcode, NamespaceId(1), random.next() as u16);
    sqe.set_cdw10_11(place * 64 + random.below(65 - blocks));
    sqe.cdw12 = (blocks - 1) as u32 | if random.one_in(4) { 1 << 30 } else { 0 };
    // Nine pages for each command, and a page of lists.
    let (data, list) = (DATA + place * 0xa000, LISTS + place * 0x1000);
    let offset = if random.one_in(2) { 0 } else { random.below(1024) * 4 };
    let pages = (offset + blocks * 512).div_ceil(4096);
    let mut lists = Vec::new();
    let second = match pages {
        1 => random.next(),
        2 => data + 4096,
        _ => {
            let mut entries: Vec<u64> = (1..pages).map(|page| data + page * 4096).collect();
            if random.one_in(6) {
                let at = random.below(pages - 1) as usize;
                entries[at] = if random.one_in(2) { entries[at] + 8 } else { SIZE + 4096 };
            }
            // At the end of a page, so that it leads on to another one.
            let chained = random.one_in(3);
            let at = if chained { list + 4096 - 16 } else { list + random.below(64) * 8 };
            if chained && entries.len() > 2 {
                lists.push((at, vec![entries[0], list]));
                lists.push((list, entries[1..].to_vec()));
            } else {
                lists.push((at, entries));
            }
            at
        }
    };
    sqe.dptr = DataPointer::prps(data + offset, second);
    match random.below(30) {
        0 => sqe.opcode = random.next() as u8,
        1 => sqe.nsid = NamespaceId(random.below(3) as u32),
        2 => sqe.set_cdw10_11(4097 - blocks + random.below(4)),
        3 => sqe.dptr.prp1 += 1 + random.below(3),
        4 => sqe.dptr.prp1 = SIZE + 4096 * random.below(1 << 40),
        5 => sqe.flags = (random.next() as u8).into(),
        6 => sqe.cdw12 |= 0xffff,
        7 => sqe.dptr.prp2 |= random.below(4096),
        8 => sqe.set_cdw10_11(random.next()),
        9 => sqe.cdw12 |= 1 << 23,
        _ => {}
    }
    Step { function, qid, sqe, lists }
}

fn rigs(ssds: u8) -> [Rig; 2] {
    let shape = Shape::new(1, ssds);
    let sim = SimEngine::new(shape).expect("a configuration that was built");
    let engines: [Box<dyn Engine>; 2] = [Box::new(SoftEngine::new(shape)), Box::new(sim)];
    engines.map(|engine| {
        let mut rig = Rig::new(engine, FUNCTIONS);
        rig.configure(1, 1, 4096, &[(0, Config::SHARE), (2, 1 << 20)]);
        if ssds > 1 {
            // Blocks that nobody else writes: else the replicas would differ, and each read depend on whose turn it is.
            rig.configure(2, 0b11, 4096, &[(0, Config::SHARE | Config::REPLICATE), (2, 2 << 20)]);
        }
        for function in 0..FUNCTIONS {
            (1..=QUEUES).for_each(|qid| rig.queue(function, qid, 64));
            let fill: Vec<u8> = (0..SIZE - DATA).map(|at| (at ^ at >> 9) as u8 ^ function).collect();
            rig.memory(function, DATA, fill.len()).copy_from_slice(&fill);
        }
        rig
    })
}

fn push(rig: &mut Rig, step: &Step) {
    for (at, entries) in &step.lists {
        let bytes = entries.as_bytes();
        rig.memory(step.function, *at, bytes.len()).copy_from_slice(bytes);
    }
    rig.push(step.function, step.qid, &step.sqe);
}

/// What a disk was asked: opcode, namespace, first block, CDW12, pages. Slots and places of lists are the engine's own affair.
type Asked = (u8, u32, u64, u32, Vec<u64>);

fn asked(rig: &Rig) -> Vec<Vec<Asked>> {
    let of = |(sqe, pages): (&Sqe, &Vec<u64>)| (sqe.opcode, sqe.nsid.0, sqe.cdw10_11(), sqe.cdw12, pages.clone());
    rig.disks.iter().map(|disk| disk.commands.iter().zip(&disk.pages).map(of).collect()).collect()
}

fn contents(rig: &mut Rig) -> Vec<Vec<u8>> {
    (0..FUNCTIONS).map(|function| rig.memory(function, DATA, (SIZE - DATA) as usize).to_vec()).collect()
}

fn same_in_the_end(rigs: &mut [Rig; 2], seed: u64) {
    let [soft, sim] = rigs;
    assert!(contents(soft) == contents(sim), "seed {seed}: the guests' data differ");
    for (one, other) in soft.disks.iter().zip(&sim.disks) {
        assert!(one.blocks == other.blocks, "seed {seed}: the disks' blocks differ");
    }
    assert_eq!((soft.world.lost, sim.world.lost), (0, 0));
    assert!(soft.disks.iter().any(|disk| disk.commands.len() > 100), "the trace has something to say");
    assert!(soft.disks.iter().flat_map(|disk| &disk.pages).flatten().all(|page| *page >= BASE));
}

#[test]
fn one_command_at_a_time() {
    for (seed, ssds) in [(1, 1), (2, 2)] {
        println!("seed {seed}");
        let (mut random, mut rigs) = (Random(seed), rigs(ssds));
        for count in 0..1500 {
            let (function, qid) = (random.below(FUNCTIONS.into()) as u8, 1 + random.below(QUEUES.into()) as u16);
            let step = step(&mut random, function, qid, count % 32);
            let answers = rigs.each_mut().map(|rig| {
                push(rig, &step);
                rig.ring(function, qid);
                rig.answers(function, qid)
            });
            assert_eq!(answers[0].len(), 1, "seed {seed}, command {count}");
            assert_eq!(answers[0], answers[1], "seed {seed}, command {count}: {:?}", step.sqe);
        }
        assert_eq!(asked(&rigs[0]), asked(&rigs[1]), "seed {seed}");
        assert_eq!(rigs[0].world.interrupts, rigs[1].world.interrupts, "seed {seed}");
        same_in_the_end(&mut rigs, seed);
    }
}

#[test]
fn many_commands_at_once() {
    for (seed, ssds) in [(3, 1), (4, 2)] {
        println!("seed {seed}");
        let (mut random, mut rigs) = (Random(seed), rigs(ssds));
        for round in 0..60 {
            let count = 1 + random.below(32);
            let steps: Vec<Step> = (0..count)
                .map(|place| {
                    let (function, qid) = (random.below(FUNCTIONS.into()) as u8, 1 + random.below(QUEUES.into()) as u16);
                    let mut step = step(&mut random, function, qid, place);
                    step.sqe.cid.0 = place as u16;
                    step
                })
                .collect();
            let answers = rigs.each_mut().map(|rig| {
                steps.iter().for_each(|step| push(rig, step));
                let queues = (0..FUNCTIONS).flat_map(|function| (1..=QUEUES).map(move |qid| (function, qid)));
                queues.clone().for_each(|(function, qid)| rig.ring(function, qid));
                let of = |(function, qid)| {
                    let mut all = rig.answers(function, qid);
                    all.sort_by_key(|cqe| cqe.cid.0);
                    all.iter().map(|cqe| (function, qid, cqe.cid.0, cqe.status())).collect::<Vec<_>>()
                };
                queues.flat_map(of).collect::<Vec<_>>()
            });
            assert_eq!(answers[0].len() as u64, count, "seed {seed}, round {round}");
            assert_eq!(answers[0], answers[1], "seed {seed}, round {round}");
        }
        let sorted = |rig: &Rig| {
            let mut all = asked(rig);
            // Reads of replicas take turns in the order in which they come.
            let mut all: Vec<Asked> = if ssds > 1 { all.drain(..).flatten().collect() } else { all.swap_remove(0) };
            all.sort();
            all
        };
        assert_eq!(sorted(&rigs[0]), sorted(&rigs[1]), "seed {seed}");
        same_in_the_end(&mut rigs, seed);
    }
}
