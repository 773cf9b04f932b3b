//! Readers beside writers that go on and on.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use millrace_backends::fault::Late;
use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, TaskContext, Volume,
    conformance::{Memory, SyncIo},
};
use millrace_memory::BufferPool;

use super::{SEED, disk, kill, on_bench, open};
use crate::{Reason, testing::waiting::end_all};

/// Turns from when the leg has read until it says so: many writes of another come to pass meanwhile.
const LATE: u32 = 40;
/// Turns in which a read ends, with room.
const TURNS: u32 = 10_000;
/// The block that is written all the time.
const HOT: u64 = 3;

#[test]
fn a_read_of_a_block_that_is_written_all_the_time_ends() {
    let leg: Arc<dyn Volume> = Late::new(disk(64, BlockSize::B512), 0, LATE);
    let graph = open(&leg, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 8));
    let (io, buffers, room) = (SyncIo::new(SEED, false).hasty(), BufferPool::new(2).unwrap(), Memory::new(9 * 512));
    let volume = graph.volume();
    let scratches = [(); 2].map(|()| Scratch::new(volume.scratch_bytes()));
    let (all, one) = ([room.segment(0, 8 * 512)], [room.segment(8 * 512, 512)]);
    let work = [(Operation::Read, 0, 8, &all[..]), (Operation::Write { fua: false }, HOT, 1, &one[..])];
    let submit = |at: usize| {
        let (operation, lba, count, segments) = work[at];
        let request = Request { operation, lba: Lba(lba), count: BlockCount(count), segments };
        volume.submit(TaskContext::new(&scratches[at], &buffers, &io), request)
    };
    let mut cx = Context::from_waker(Waker::noop());
    let (mut read, mut write, mut writes, mut result) = (submit(0), Some(submit(1)), 0, None);
    for _ in 0..TURNS {
        if let Poll::Ready(ended) = Pin::new(&mut read).poll(&mut cx) {
            result = Some(ended);
            break;
        }
        let step = write.as_mut().expect("there is always one");
        if let Poll::Ready(written) = Pin::new(step).poll(&mut cx) {
            written.unwrap();
            // Not before the one that has ended has given its room back.
            drop(write.take());
            (write, writes) = (Some(submit(1)), writes + 1);
        }
    }
    assert_eq!(result, Some(Ok(())), "beside {writes} writes");
    assert!(writes > 10, "{writes} writes");
    end_all(&mut [write]);
    let found = room.bytes(0, 8 * 512);
    for lba in (0..8).filter(|lba| *lba != HOT as usize) {
        assert!(found[lba * 512..][..512] == data[lba * 512..][..512], "block {lba}");
    }
    assert!(found[HOT as usize * 512..][..512].iter().all(|byte| *byte == 0), "the hot block is what was written there");
    drop(read);
    kill(graph);
}
