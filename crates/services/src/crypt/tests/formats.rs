//! Formats that end half way, in both modes: what is written afterwards can be read later, or cannot be written.

use std::sync::Arc;

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{
    BlockError, BlockSize, Operation, Volume, VolumeError,
    conformance::{Bench, SyncHarness, Wanted},
};

use super::{SEED, memory, open};
use crate::{Health, Reason, graph::Graph, testing::Formatted};

const MODES: [&str; 2] = ["xts", "authenticated"];
const FAULT: Effect = Effect::Fail(BlockError::WriteFault { errno: 5 });

/// A leg that keeps its block size, and says so before it has done anything, or when all of it is erased.
fn fixed(begins: bool) -> Arc<dyn Volume> {
    Formatted::over(&blank(), move |leg, block_size| {
        let has = leg.geometry().block_size;
        if block_size == has || begins {
            leg.format(has)?;
        }
        let refused = VolumeError::Unsupported { volume: leg.name().to_owned(), what: "formatting" };
        if block_size == has { Ok(()) } else { Err(refused) }
    })
}

fn blank() -> Arc<dyn Volume> {
    memory(Wanted { block_size: BlockSize::B512, blocks: 4096, read_only: false }, 0)
}

/// A disk that holds writes until it is flushed, and a volume over it with data.
struct Case {
    disk: Arc<FaultVolume>,
    stack: String,
    graph: Graph,
    data: Vec<u8>,
}

impl Case {
    fn new(mode: &str) -> Self {
        Self::over(mode, blank())
    }

    fn over(mode: &str, disk: Arc<dyn Volume>) -> Self {
        let disk = FaultVolume::new(disk, SEED);
        disk.hold_writes();
        let key = concat!(env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
        let stack = format!("crypt(mode={mode}, key=\"file:{key}\", disk:0)");
        let graph = open(&stack, &(Arc::<FaultVolume>::clone(&disk) as Arc<dyn Volume>), Reason::Create).unwrap();
        let mut case = Self { disk, stack, graph, data: Vec::new() };
        case.data = case.bench(|bench| bench.write_random(0, 64));
        case
    }

    fn bench<T>(&self, work: impl FnOnce(&mut Bench<'_>) -> T) -> T {
        work(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(self.graph.volume()), SEED))
    }

    fn fail(&self, kind: Requests, nth: &[u64], effect: Effect) {
        for nth in nth {
            self.disk.add(Rule::new(kind, When::Nth(*nth), effect));
        }
    }

    /// What a guest is told that flushes twice.
    fn flush_twice(&self) -> [Result<(), BlockError>; 2] {
        self.bench(|bench| [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0)))
    }

    /// A guest writes, and the power goes.
    fn write_and_restart(&mut self) {
        let new = self.bench(|bench| {
            let new = bench.write_random(8, 8);
            bench.plain(Operation::Flush, 0, 0).unwrap();
            new
        });
        let at = 8 * self.block();
        self.data[at..at + new.len()].copy_from_slice(&new);
        self.bench(|bench| bench.expect(0, &self.data));
        self.graph.tasks.clear();
        self.disk.power_loss();
        let disk: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&self.disk);
        self.graph = open(&self.stack, &disk, Reason::Open).unwrap();
        self.bench(|bench| bench.expect(0, &self.data));
    }

    fn block(&self) -> usize {
        self.graph.volume().geometry().block_size.bytes() as usize
    }

    /// Nothing goes until the volume is formatted again.
    fn is_closed(&self) {
        self.bench(|bench| {
            let segment = bench.memory.segment(0, bench.block());
            for operation in [Operation::Read, Operation::Write { fua: false }] {
                assert_eq!(bench.moving(operation, 3, &[segment]), Err(BlockError::NotReady), "{}", self.stack);
            }
        });
        let status = self.graph.services("crypt")[0].1.status();
        assert_eq!(status.health, Health::Failed, "{status:?}");
        assert!(status.facts.iter().any(|(_, value)| value.contains("format the volume again")), "{status:?}");
    }

    fn format_again(&mut self, block_size: BlockSize) {
        self.disk.clear();
        // Of what the leg may have dropped before.
        let _ = self.flush_twice();
        self.graph.volume().format(block_size).unwrap();
        assert_eq!(self.graph.services("crypt")[0].1.status().health, Health::Good);
        self.data = vec![0; 64 * self.block()];
        self.bench(|bench| bench.expect(0, &self.data));
        self.write_and_restart();
    }
}

#[test]
fn a_format_that_fails_leaves_the_key_that_is_on_the_leg() {
    for mode in MODES {
        // The header's two copies, written and flushed one after the other.
        for (kind, nth) in [(Requests::Write, 1), (Requests::Flush, 1), (Requests::Write, 2), (Requests::Flush, 2)] {
            for effect in [FAULT, Effect::Tear] {
                let mut case = Case::new(mode);
                case.fail(kind, &[nth], effect);
                let failed = case.graph.volume().format(BlockSize::B512);
                assert!(failed.is_err() && case.disk.faults() == 1, "{mode} {kind:?} {nth}: {failed:?}");
                assert_eq!(case.graph.services("crypt")[0].1.status().health, Health::Good);
                case.bench(|bench| bench.expect(0, &case.data));
                // What the guest had written and not flushed may have gone with it.
                let told = if kind == Requests::Flush { Err(BlockError::WriteFault { errno: 0 }) } else { Ok(()) };
                assert_eq!(case.flush_twice(), [told, Ok(())], "{mode} {kind:?} {nth}");
                case.write_and_restart();
                case.format_again(BlockSize::B512);
            }
        }
    }
}

#[test]
fn a_format_that_cannot_be_taken_back_either_leaves_no_key_in_force() {
    for mode in MODES {
        for (kind, nth) in [(Requests::Write, 1), (Requests::Flush, 1), (Requests::Write, 2), (Requests::Flush, 2)] {
            let mut case = Case::new(mode);
            case.fail(kind, &[nth, nth + 1], FAULT);
            assert!(case.graph.volume().format(BlockSize::B512).is_err());
            case.is_closed();
            // One that fails as well makes it no worse.
            case.fail(kind, &[1], FAULT);
            assert!(case.graph.volume().format(BlockSize::B512).is_err());
            case.is_closed();
            case.format_again(BlockSize::B512);
        }
    }
}

#[test]
fn a_format_to_another_block_size_that_fails_leaves_no_key_that_is_not_on_the_leg() {
    for mode in MODES {
        // The header on the leg that was formatted.
        for (kind, nth) in [(Requests::Write, 3), (Requests::Flush, 3), (Requests::Write, 4), (Requests::Flush, 4)] {
            let mut case = Case::new(mode);
            case.fail(kind, &[nth], FAULT);
            assert!(case.graph.volume().format(BlockSize::B4096).is_err(), "{mode} {kind:?} {nth}");
            case.is_closed();
            case.format_again(BlockSize::B4096);
        }
    }
}

#[test]
fn a_leg_that_refuses_other_blocks_costs_no_data() {
    for mode in MODES {
        let mut case = Case::over(mode, fixed(false));
        let refused = case.graph.volume().format(BlockSize::B4096);
        assert!(matches!(refused, Err(VolumeError::Unsupported { .. })), "{mode}: {refused:?}");
        assert_eq!(case.graph.services("crypt")[0].1.status().health, Health::Good);
        case.bench(|bench| bench.expect(0, &case.data));
        case.write_and_restart();
        case.format_again(BlockSize::B512);
    }
}

#[test]
fn a_leg_that_refuses_other_blocks_when_it_is_erased_leaves_no_key_in_force() {
    for mode in MODES {
        let mut case = Case::over(mode, fixed(true));
        assert!(case.graph.volume().format(BlockSize::B4096).is_err(), "{mode}");
        case.is_closed();
        case.format_again(BlockSize::B512);
    }
}
