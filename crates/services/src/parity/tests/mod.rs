//! Parity as a whole. Its parts are tested where they are.

mod bad;
mod crashes;
mod failures;
mod format;
mod progress;
mod rebuild;
mod refused;
mod stopped;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
};
use millrace_memory::parity::{power, product};

use super::*;
use crate::{
    Reason,
    graph::Graph,
    testing::{graph, subject},
};

const SEED: u64 = 0x7061_7269;

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    let bytes = wanted.blocks << wanted.block_size.shift();
    MemoryVolume::create(&format!("leg{leg}"), bytes, wanted.block_size).unwrap()
}

/// The settings of an expression, and its number of legs.
#[derive(Clone, Copy)]
struct Form {
    settings: &'static str,
    legs: usize,
}

impl Form {
    fn stack(self) -> String {
        let legs = (0..self.legs).map(|leg| format!("disk:{leg}")).collect::<Vec<_>>().join(", ");
        format!("parity({}{legs})", self.settings)
    }

    fn plan(self) -> ParityPlan {
        let node: crate::Node = self.stack().parse().unwrap();
        let mut settings = Settings::default();
        node.settings().iter().for_each(|(name, value)| assert!(settings.add(name, value)));
        let sizes = ["chunk", "journal"].map(|name| settings.size(name).unwrap());
        let redundancy = settings.parsed("redundancy", "").unwrap().unwrap_or(1);
        ParityPlan {
            chunk: sizes[0].unwrap_or(64 << 10),
            redundancy,
            safe: false,
            log_all: false,
            journal: sizes[1].unwrap_or(1 << 20),
            region_shift: None,
            rate: 1,
        }
    }

    /// Bytes of a leg for so many bytes of the volume.
    fn leg_bytes(self, bytes: u64) -> u64 {
        let (plan, layout) = (self.plan(), self.plan().layout(self.legs));
        plan.rules(&layout).leg_bytes(layout.leg_bytes(bytes))
    }

    fn leg_blocks(self) -> impl Fn(u64, BlockSize) -> u64 {
        move |blocks, block_size| self.leg_bytes(blocks << block_size.shift()) >> block_size.shift()
    }

    /// Fault volumes over memory, for a volume of so many blocks of 512 bytes.
    fn faulty(self, blocks: u64) -> Vec<Arc<FaultVolume>> {
        let wanted = Wanted { block_size: BlockSize::B512, blocks: self.leg_bytes(blocks * 512) / 512, read_only: false };
        (0..self.legs).map(|leg| FaultVolume::new(memory(wanted, leg), SEED + leg as u64)).collect()
    }

    fn open(self, legs: &[Arc<dyn Volume>], reason: Reason) -> Graph {
        graph(&self.stack(), legs, None, reason, &Arc::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    fn conforms(self, make_leg: impl FnMut(Wanted, usize) -> Arc<dyn Volume>) {
        let stack = self.stack();
        let mut make = subject(&stack, self.legs, self.leg_blocks(), make_leg);
        let mut subject = Subject { resizes: false, ..Subject::new(SEED, &mut make) };
        conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
    }
}

fn volumes(legs: &[Arc<FaultVolume>]) -> Vec<Arc<dyn Volume>> {
    legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as Arc<dyn Volume>).collect()
}

/// The service at a graph's root.
fn parity(graph: &Graph) -> Arc<Parity> {
    let services = graph.services("parity");
    let service: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&services[0].1) as _;
    service.downcast().expect("parity")
}

fn facts(graph: &Graph) -> Vec<(String, String)> {
    graph.tree().status.expect("a service has a status").facts
}

fn fact(graph: &Graph, name: &str) -> Option<String> {
    facts(graph).into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
}

fn arguments(text: &[(&str, &str)]) -> Settings {
    let mut settings = Settings::default();
    assert!(text.iter().all(|(name, value)| settings.add(name, value)));
    settings
}

fn command(graph: &Graph, command: &str, leg: usize) -> Result<String, ServiceError> {
    graph.root.service.as_ref().unwrap().command(command, &arguments(&[("leg", &leg.to_string())]))
}

fn on_bench(graph: &Graph, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
}

/// Does upkeep's work on the calling thread.
fn resync(graph: &Graph) -> bool {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(2).unwrap();
            parity.resync(cx, &crate::background::Stop::default(), &pool).await
        })
    })
    .unwrap()
}

fn scrubbed(graph: &Graph) -> Scrub {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(2).unwrap();
            parity.start_scrub();
            loop {
                parity.scrub_if_asked(cx, &crate::background::Stop::default(), &pool).await;
                let scrub = parity.scrub().clone();
                if !scrub.running {
                    return scrub;
                }
            }
        })
    })
    .unwrap()
}

/// By plain arithmetic: every row's parity is the sum of its data.
fn parity_fits(graph: &Graph, legs: &[Arc<dyn Volume>]) {
    let parity = parity(graph);
    let (layout, bytes) = (parity.layout, parity.members.bytes() as usize);
    let all: Vec<_> = legs.iter().map(|leg| crate::legs::read(leg, 0, bytes).unwrap()).collect();
    let products: Vec<[u8; 256]> =
        (0..layout.data()).map(|part| std::array::from_fn(|byte| product(power(part as u8), byte as u8))).collect();
    for (stripe, start) in (0..bytes).step_by(layout.chunk as usize).enumerate() {
        let places = start..bytes.min(start + layout.chunk as usize);
        let chunk = |part: usize| &all[layout.leg(stripe as u64, part)][places.clone()];
        let sum = |term: &dyn Fn(usize, u8) -> u8| {
            let mut sum = vec![0; places.len()];
            for part in 0..layout.data() {
                sum.iter_mut().zip(chunk(part)).for_each(|(sum, byte)| *sum ^= term(part, *byte));
            }
            sum
        };
        let p = sum(&|_, byte| byte);
        assert!(chunk(layout.data()) == p, "P of stripe {stripe}");
        if layout.parity == 2 {
            let q = sum(&|part, byte| products[part][usize::from(byte)]);
            assert!(chunk(layout.data() + 1) == q, "Q of stripe {stripe}");
        }
    }
}

/// Entries that the journal has had so far.
fn journaled(graph: &Graph) -> u64 {
    parity(graph).journal.rings().iter().map(journal::Ring::head).sum()
}

const SMALL: Form = Form { settings: "chunk=4K, journal=128K, region=64K, ", legs: 3 };
const WIDE: Form = Form { settings: "chunk=16K, journal=256K, ", legs: 5 };
const TWO: Form = Form { settings: "redundancy=2, chunk=4K, journal=128K, region=64K, ", legs: 4 };
const WIDEST: Form = Form { settings: "redundancy=2, chunk=64K, log=all, ", legs: 8 };

#[test]
fn it_conforms() {
    SMALL.conforms(memory);
    WIDE.conforms(memory);
}

#[test]
fn it_conforms_with_two_parity_chunks() {
    TWO.conforms(memory);
    WIDEST.conforms(memory);
}

#[test]
fn it_conforms_when_everything_is_checked_and_logged() {
    Form { settings: "chunk=8K, safe=true, log=all, journal=128K, ", legs: 3 }.conforms(memory);
    Form { settings: "redundancy=2, chunk=8K, safe=true, ", legs: 5 }.conforms(memory);
}

#[test]
fn it_conforms_over_disks_that_hold_writes() {
    for form in [SMALL, TWO] {
        form.conforms(|wanted, leg| -> Arc<dyn Volume> {
            let volume = FaultVolume::new(memory(wanted, leg), SEED + leg as u64);
            volume.hold_writes();
            volume
        });
    }
}

#[test]
fn the_parity_fits_whatever_is_written() {
    for form in [SMALL, WIDE, TWO, WIDEST] {
        let legs = volumes(&form.faulty(8192));
        let graph = form.open(&legs, Reason::Create);
        on_bench(&graph, |bench| {
            let blocks = bench.blocks().min(8192);
            let mut model = vec![0; blocks as usize * 512];
            for round in 0..120 {
                let most = [1, 8, 40, 400][round % 4];
                let count = 1 + bench.random.below(most);
                let lba = bench.random.below(blocks - count);
                let range = lba as usize * 512..(lba + count) as usize * 512;
                if round % 7 == 0 {
                    let erase = millrace_block::Operation::WriteZeroes { fua: round % 2 == 0, deallocate: true };
                    bench.plain(erase, lba, count).unwrap();
                    model[range].fill(0);
                } else {
                    model[range].copy_from_slice(&bench.write_random(lba, count));
                }
            }
            bench.expect(0, &model);
        });
        parity_fits(&graph, &legs);
    }
}

#[test]
fn small_writes_over_memory_change_parity_where_it_lies() {
    for form in [SMALL, WIDE, TWO] {
        let wanted = Wanted { block_size: BlockSize::B512, blocks: form.leg_bytes(8192 * 512) / 512, read_only: false };
        let legs: Vec<_> = (0..form.legs).map(|leg| memory(wanted, leg)).collect();
        let graph = form.open(&legs, Reason::Create);
        assert!(resync(&graph));
        on_bench(&graph, |bench| {
            let chunk = form.plan().chunk / 512;
            // Regions are marked by what goes the long way.
            let mut model = bench.write_random(0, 4096);
            bench.plain(millrace_block::Operation::Flush, 0, 0).unwrap();
            let before = journaled(&graph);
            for _ in 0..200 {
                let count = 1 + bench.random.below(chunk.min(16));
                let lba = bench.random.below(4096 / chunk) * chunk + bench.random.below(chunk - count + 1);
                model[lba as usize * 512..(lba + count) as usize * 512].copy_from_slice(&bench.write_random(lba, count));
            }
            assert_eq!(journaled(&graph), before, "none needed the journal");
            bench.expect(0, &model);
        });
        parity_fits(&graph, &legs);
        // A leg that is out of use would be computed from the others.
        command(&graph, "fail", 1).unwrap();
        let before = journaled(&graph);
        on_bench(&graph, |bench| drop(bench.write_random(0, 1)));
        assert!(journaled(&graph) > before, "while a leg is missing it does");
    }
}
