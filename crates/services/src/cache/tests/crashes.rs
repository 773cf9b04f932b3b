//! Power cuts at every write boundary.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use millrace_block::{Scratch, TaskContext, conformance::SyncIo};
use millrace_memory::BufferPool;

use super::*;
use crate::testing::{CrashTest, Oracle, Rig, Session, Tearing, crash_test, every_cut};

thread_local! {
    /// Memory of buffers is never given back.
    static BUFFERS: BufferPool = BufferPool::new(2).expect("memory for buffers");
}

/// What the table in memory says agrees with itself. (Upkeep is in the middle of something: nothing can be waited for.)
fn the_table_is_consistent(graph: &Graph, _: &[Arc<millrace_block::conformance::CrashDisk>]) {
    let cache = cache(graph);
    assert!(!cache.is_broken(), "{:?}", graph.tree());
    let core = cache.core().unwrap();
    let (mut lines, mut dirty_lines) = (std::collections::BTreeSet::new(), 0);
    for slot in 0..core.table.len() {
        let place = core.table.slot(slot);
        let (valid, dirty) = (place.valid.load(Ordering::Relaxed), place.dirty.load(Ordering::Relaxed));
        assert_eq!(dirty & !valid, 0, "what is dirty is valid");
        let Some(line) = place.line() else {
            assert_eq!(valid | dirty | place.stored.load(Ordering::Relaxed), 0, "a free slot holds nothing");
            continue;
        };
        assert!(lines.insert(line), "line {line} is in two slots");
        assert_eq!(core.table.find(line).map(|found| found.slot), Some(slot));
        dirty_lines += u64::from(dirty != 0);
    }
    assert_eq!(cache.dirty_lines(), dirty_lines);
}

/// Writes everything back. No task may be in the middle of something.
fn drain(graph: &Graph) {
    let cache = cache(graph);
    // By hand, without a shard: so often that a shard's waits would count.
    let (io, scratch) = (SyncIo::new(SEED, false).hasty(), Scratch::new(16 << 10));
    BUFFERS.with(|buffers| {
        let mut drain = std::pin::pin!(cache.drain(TaskContext::new(&scratch, buffers, &io)));
        let drained = loop {
            if let Poll::Ready(drained) = drain.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                break drained;
            }
        };
        assert_eq!(drained, Ok(()));
    });
    assert!(cache.leg_is_whole(SLOW), "{:?}", graph.tree());
}

/// A fast leg of a few lines before a slow one of more.
const SLOW_LEG: &str = "concat(disk:1, disk:2, disk:3)";

#[test]
fn flushed_data_survive_power_cuts_in_write_back() {
    // Where writes are answered early, a death of the process may lose what was not flushed.
    for (settings, points, dies) in [("line=4K", 7000, true), ("ack=fast, line=8K, around=8K, rate=1T", 3000, false)] {
        let stack = format!("cache(mode=back, {settings}, disk:0, {SLOW_LEG})");
        let test = CrashTest::new(&stack, 4);
        crash_test(&CrashTest {
            blocks: 200,
            points,
            steps: 14,
            settle: 40,
            dies,
            verify: &the_table_is_consistent,
            ..test
        });
    }
}

#[test]
fn flushed_data_survive_power_cuts_in_write_through() {
    let stack = format!("cache(mode=through, line=4K, disk:0, {SLOW_LEG})");
    let test = CrashTest::new(&stack, 4);
    crash_test(&CrashTest { blocks: 200, steps: 14, settle: 40, verify: &the_table_is_consistent, ..test });
}

#[test]
fn large_blocks_survive_power_cuts() {
    let stack = format!("cache(mode=back, line=8K, around=64K, disk:0, {SLOW_LEG})");
    let test = CrashTest { block_size: BlockSize::B4096, ..CrashTest::new(&stack, 4) };
    crash_test(&CrashTest { blocks: 30, points: 1000, steps: 14, settle: 40, verify: &the_table_is_consistent, ..test });
}

#[test]
fn disks_that_tear_blocks_lose_nothing_that_was_flushed() {
    // So many lines that a page of the table has several parts.
    for (settings, points) in [("mode=back", 500), ("mode=back, ack=fast", 200), ("mode=through", 100)] {
        // Where writes are answered early, a death of the process may lose what was not flushed.
        let dies = !settings.ends_with("ack=fast");
        let stack = format!("cache({settings}, line=4K, around=64K, disk:0, {SLOW_LEG})");
        crash_test(&CrashTest {
            blocks: 60,
            tearing: Tearing::Mixed,
            steps: 14,
            points,
            settle: 40,
            dies,
            verify: &the_table_is_consistent,
            ..CrashTest::new(&stack, 4)
        });
    }
}

/// Work while lines are written back all the time, then a change of mode over the crash.
fn changed(seed: u64, cut: u64) -> u64 {
    let rig = Rig::new(seed, 2, 200, BlockSize::B512);
    let means = crate::testing::Bench::new(seed);
    let open = |mode: &str, reason| {
        graph(&format!("cache(mode={mode}, line=4K, disk:0, disk:1)"), &rig.volumes(), None, reason, &rig.kept).unwrap()
    };
    let mut volume = open("back", Reason::Create);
    let mut oracle = Oracle::new(seed, 200, 512);
    let mut session = Session::new(&means, &rig.kept, seed);
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    for step in 0..16 {
        if step % 3 == 2 {
            cache(&volume).command("flush", &Settings::default()).unwrap();
            session.settle(200);
        }
        let good = oracle.step(&mut session, volume.volume());
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "a request failed without reason");
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    volume.tasks.clear();
    drop(volume);
    rig.restart();
    for (round, mode) in ["through", "back", "through"].into_iter().enumerate() {
        let mut volume = open(mode, Reason::Open);
        let mut session = Session::new(&means, &rig.kept, seed + round as u64);
        oracle.check(&mut session, volume.volume());
        for _ in 0..4 {
            assert!(oracle.step(&mut session, volume.volume()), "a request failed after the restart");
        }
        session.settle(100);
        oracle.check(&mut session, volume.volume());
        for (_, tasks) in &volume.tasks {
            tasks.tell();
        }
        session.settle(usize::MAX);
        drain(&volume);
        // Now the slow leg has it all by itself.
        oracle.check(&mut session, &rig.volumes()[1]);
        drop(session);
        volume.unmount();
    }
    boundaries
}

#[test]
fn writing_back_and_changes_of_mode_survive_power_cuts() {
    every_cut("power cuts while lines are written back", SEED, 2000, changed);
}
