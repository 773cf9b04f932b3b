//! Random stacks.

mod errors;

use millrace_block::{BlockSize, conformance::Random};

pub use self::errors::random_stacks_with_errors;
use super::{Bench, Oracle, Rig, Session, every_seed, graph};
use crate::Reason;

/// How random stacks are tried.
pub struct RandomStacks {
    /// Where everything random comes from.
    pub seed: u64,
    /// Stacks.
    pub stacks: usize,
    /// Steps of the workload on each, between crashes.
    pub steps: usize,
    /// Crashes of each.
    pub crashes: usize,
}

/// A stack of at most so many levels over the next disks.
fn stack(random: &mut Random, levels: u64, disk: &mut usize) -> String {
    let leaf = |disk: &mut usize| {
        *disk += 1;
        format!("disk:{}", *disk - 1)
    };
    if levels == 0 {
        return leaf(disk);
    }
    let samples: Vec<_> = crate::all().iter().flat_map(|kind| kind.samples).collect();
    let sample = samples[random.below(samples.len() as u64) as usize];
    // Every question mark is a leg.
    let mut text = String::new();
    for part in sample.split_inclusive('?') {
        match part.strip_suffix('?') {
            Some(before) => {
                let below = random.below(levels);
                text.push_str(before);
                text.push_str(&stack(random, below, disk));
            }
            None => text.push_str(part),
        }
    }
    text
}

/// Disks for a stack over so many.
fn rig(random: &mut Random, seed: u64, disks: usize) -> Rig {
    let block_size = if random.below(2) == 0 { BlockSize::B512 } else { BlockSize::B4096 };
    // Some keep a megabyte for themselves.
    let blocks = if block_size == BlockSize::B512 { 16_384 } else { 4096 };
    Rig::new(seed, disks, blocks, block_size)
}

fn try_stack(test: &RandomStacks, seed: u64) {
    let mut random = Random::new(seed);
    let mut disks = 0;
    let text = stack(&mut random, 4, &mut disks);
    eprintln!("random stack, seed {seed:#x}: {text}");
    let rig = rig(&mut random, seed, disks);
    let open = |reason| graph(&text, &rig.volumes(), None, reason, &rig.kept).unwrap_or_else(|error| panic!("{error}"));
    let mut volume = open(Reason::Create);
    let geometry = volume.volume().geometry();
    let mut oracle = Oracle::new(seed, geometry.blocks.0.min(600), geometry.block_size.bytes() as usize);
    for _ in 0..test.crashes {
        let bench = Bench::new(random.number());
        let mut session = Session::new(&bench, &rig.kept, random.number());
        rig.power.cut_at(random.below(4 * test.steps as u64));
        for _ in 0..test.steps {
            let good = oracle.step(&mut session, volume.volume());
            if rig.power.is_gone() {
                break;
            }
            assert!(good, "a request failed without reason");
        }
        drop(session);
        volume.tasks.clear();
        drop(volume);
        rig.restart();
        volume = open(Reason::Open);
        let mut session = Session::new(&bench, &rig.kept, random.number());
        oracle.check(&mut session, volume.volume());
        session.settle(1000);
        oracle.check(&mut session, volume.volume());
        for (_, tasks) in &volume.tasks {
            tasks.tell();
        }
        session.settle(usize::MAX);
        drop(session);
        volume.unmount();
        volume = open(Reason::Open);
    }
}

/// Tries random stacks: each behaves like a plain disk, with crashes.
///
/// # Panics
/// With the seed, when one does not.
pub fn random_stacks(test: &RandomStacks) {
    every_seed("random stacks", test.seed, test.stacks, |seed| try_stack(test, seed));
}
