//! What a leg answers reaches the guest: the leg's error, for what lies there, and nothing of it stays.

use std::sync::Arc;

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockError, BlockSize, Operation, Volume,
    conformance::{Bench, SyncHarness},
};

use super::graph;
use crate::Reason;

const SEED: u64 = 0x6572_726f;
const READ: BlockError = BlockError::ReadFault { errno: 5 };
const WRITE: BlockError = BlockError::WriteFault { errno: 5 };
/// Blocks of a request.
const AT_ONCE: u64 = 8;

/// For services without redundancy, over so many legs of `blocks` blocks: each of them fails in turn, whatever it is asked for.
///
/// # Panics
/// When that is not so.
pub fn each_leg_fails_in_turn(stack: &str, legs: usize, blocks: u64, size: Option<u64>) {
    let memory = |leg| MemoryVolume::create(&format!("leg{leg}"), blocks * 512, BlockSize::B512).unwrap();
    let legs: Vec<_> = (0..legs).map(|leg| FaultVolume::new(memory(leg), SEED)).collect();
    let volumes: Vec<_> = legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as Arc<dyn Volume>).collect();
    let graph =
        graph(stack, &volumes, size, Reason::Create, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"));
    let blocks = graph.volume().geometry().blocks.0;
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let mut model = bench.write_random(0, blocks);
    let mut failed = 0;
    for leg in &legs {
        for (kind, error) in [(Kind::Read, READ), (Kind::Write, WRITE)] {
            leg.add(Rule::new(kind, When::Always, Effect::Fail(error)));
            let before = failed;
            for lba in (0..blocks).step_by(AT_ONCE as usize) {
                let place = lba as usize * 512..(lba + AT_ONCE) as usize * 512;
                let result = if kind == Kind::Read {
                    let segment = bench.memory.segment(0, AT_ONCE as usize * 512);
                    bench.moving(Operation::Read, lba, &[segment])
                } else {
                    bench.write(lba, &model[place])
                };
                assert!(result.is_ok() || result == Err(error), "{stack}: {kind:?} at {lba}: {result:?}");
                failed += u64::from(result.is_err());
            }
            assert!(failed > before, "{stack}: no {kind:?} went to a leg");
            leg.clear();
            bench.expect(0, &model);
        }
        leg.add(Rule::new(Kind::Flush, When::Always, Effect::Fail(WRITE)));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(WRITE), "{stack}");
        leg.clear();
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()), "{stack}");
        model = bench.write_random(0, blocks);
    }
    assert!(failed >= 2 * blocks / AT_ONCE, "{stack}: {failed} failed, and each of {blocks} blocks lies on one of the legs");
}
