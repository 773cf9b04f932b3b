//! Room in the scratch over a leg that leaves something there for each request, as a mirror does.

use std::sync::Arc;

use millrace_block::{
    BlockSize, Operation, Request, Step, TaskContext, Volume,
    conformance::{Bench, SyncHarness},
    placed_bytes,
};
use millrace_memory::Segment;

use super::{SEED, disk, open, stack};
use crate::Reason;

/// A leg with room for one such thing.
struct Untidy(Arc<dyn Volume>);

impl Volume for Untidy {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match request.segments {
            [one] => self.0.submit(cx, Request { segments: cx.scratch.copy_slice(&[*one]), ..request }),
            _ => self.0.submit(cx, request),
        }
    }

    fn scratch_bytes(&self) -> usize {
        placed_bytes::<Segment>() + self.0.scratch_bytes()
    }
}

/// The harness finds whatever goes to the heap.
#[test]
fn nothing_piles_up_over_the_pieces_of_a_long_request() {
    const BLOCKS: u64 = 10 << 11;
    let leg: Arc<dyn Volume> = Arc::new(Untidy(disk(BLOCKS, BlockSize::B512)));
    let graph = open(&stack("discard=false, "), &leg, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 8 << 11);
    bench.expect(0, &data);
    // In parts that are no whole blocks, so that they go by way of a buffer.
    let parts = [bench.memory.segment(0, 100), bench.memory.segment(100, (8 << 20) - 100)];
    bench.moving(Operation::Read, 0, &parts).unwrap();
    assert!(bench.memory.bytes(0, 8 << 20) == data);
    bench.plain(Operation::WriteZeroes { fua: false, deallocate: false }, 0, BLOCKS).unwrap();
    bench.expect_zeroes(0, 8 << 11);
}
