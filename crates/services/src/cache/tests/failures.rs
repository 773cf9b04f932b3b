//! Legs that fail: what the guest is told, and what the operator.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba};

use super::*;
use crate::service::Health;

const WRITE_FAULT: BlockError = BlockError::WriteFault { errno: 5 };
const READ_FAULT: BlockError = BlockError::ReadFault { errno: 5 };

fn pull(leg: &FaultVolume) {
    leg.add(Rule { kinds: vec![], ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NotReady)) });
}

fn health(graph: &Graph) -> Health {
    graph.tree().status.unwrap().health
}

#[test]
fn without_its_fast_leg_a_write_through_cache_goes_on() {
    let legs = faulty(50);
    let mut graph = open("mode=through, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 100));
    pull(&legs[0]);
    on_bench(&graph, |bench| {
        bench.expect(0, &data);
        let other = bench.write_random(10, 50);
        data[10 * 512..60 * 512].copy_from_slice(&other);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.expect(0, &data);
    });
    assert_eq!(health(&graph), Health::Degraded);
    assert_eq!(fact(&graph, "fast leg").as_deref(), Some("failed; the volume goes on without it"));
    // It comes back with what it had: nothing of that is believed that was written meanwhile.
    legs[0].clear();
    cache(&graph).command("resume", &Settings::default()).unwrap();
    assert_eq!(health(&graph), Health::Good);
    on_bench(&graph, |bench| bench.expect(0, &data));
    assert!(cache(&graph).command("resume", &Settings::default()).is_err());
    close(&mut graph);
    drop(graph);
    let graph = open("mode=through, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

#[test]
fn without_its_fast_leg_a_write_back_cache_says_what_is_missing() {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    let (mut dirty, mut clean) = (Vec::new(), Vec::new());
    on_bench(&graph, |bench| {
        clean = bench.write_random(200, 64);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    cache(&graph).drain_now().unwrap();
    on_bench(&graph, |bench| dirty = bench.write_random(0, 24));
    pull(&legs[0]);
    on_bench(&graph, |bench| {
        // What is clean is on the slow leg, too.
        bench.expect(200, &clean);
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Read, 3, &[segment]), Err(BlockError::NotReady));
        // New data go to the slow leg.
        let new = bench.write_random(8, 16);
        dirty[8 * 512..].copy_from_slice(&new);
        bench.expect(8, &new);
        // The table there still calls what they replaced the newest.
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::NotReady));
    });
    assert_eq!((health(&graph), fact(&graph, "dirty lines").as_deref()), (Health::Failed, Some("1")));
    assert_eq!(fact(&graph, "fast leg").as_deref(), Some("failed; 1 dirty lines are only there"));
    let refused = cache(&graph).leave().unwrap_err().to_string();
    assert!(refused.contains("1 lines are only on the fast leg"), "{refused}");
    assert!(!cache(&graph).leg_is_whole(SLOW));
    legs[0].clear();
    cache(&graph).command("resume", &Settings::default()).unwrap();
    on_bench(&graph, |bench| {
        bench.expect(0, &dirty);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    assert_eq!(health(&graph), Health::Good);
    drop(graph);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect(0, &dirty);
        bench.expect(200, &clean);
    });
}

#[test]
fn errors_of_the_slow_leg_are_the_guests_and_leave_nothing_wrong_behind() {
    for mode in ["through", "back"] {
        let legs = faulty(50);
        let graph = open(&format!("mode={mode}, line=4K"), &volumes(&legs), Reason::Create);
        legs[1].add(Rule {
            range: Some((Lba(40), BlockCount(1))),
            ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT))
        });
        on_bench(&graph, |bench| {
            let segment = bench.memory.segment(0, 4096);
            assert_eq!(bench.moving(Operation::Read, 40, &[segment]), Err(READ_FAULT));
            bench.expect_zeroes(48, 8);
            // What is written is read from the cache.
            let data = bench.write_random(40, 8);
            bench.expect(40, &data);
        });
        assert_eq!(health(&graph), Health::Good);
    }
}

#[test]
fn a_write_that_failed_on_the_slow_leg_is_not_in_the_cache() {
    let legs = faulty(50);
    let graph = open("mode=through, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        let before = bench.write_random(0, 8);
        legs[1].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        assert_eq!(bench.write(0, &[9; 512]), Err(WRITE_FAULT));
        bench.expect(0, &before);
    });
}

/// A guest whose memory goes in the middle of a write: the blocks may be half of each, but not change once more when their line goes.
#[test]
fn what_a_write_to_the_fast_leg_may_have_begun_is_read_from_the_slow_one() {
    for blocks in [8, 16] {
        let legs = faulty(50);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, blocks));
        cache(&graph).drain_now().unwrap();
        on_bench(&graph, |bench| {
            legs[0].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(BlockError::Memory)));
            assert_eq!(bench.write(0, &vec![9; data.len()]), Err(BlockError::Memory));
            legs[0].add(Rule {
                range: Some((Lba(0), BlockCount(u64::MAX))),
                ..Rule::new(Kind::Read, When::Nth(1), Effect::Corrupt)
            });
            bench.expect(0, &data[..4096]);
            // What is dirty is read where it is.
            legs[0].clear();
            let dirty = bench.write_random(0, 8);
            legs[0].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(BlockError::Memory)));
            assert_eq!(bench.write(0, &[9; 4096]), Err(BlockError::Memory));
            bench.expect(0, &dirty);
        });
        assert_eq!(health(&graph), Health::Good);
    }
}

#[test]
fn a_write_is_not_acknowledged_while_the_slow_leg_keeps_it_from_the_table() {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        // Beside the cache, so that the slow leg has something to flush.
        bench.write_random(1000, 600);
        legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        assert_eq!(bench.write(0, &[9; 512]), Err(WRITE_FAULT));
        data = bench.write_random(0, 8);
    });
    drop(graph);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

#[test]
fn what_a_failed_flush_of_the_slow_leg_lost_is_written_back_again() {
    // Where writes are answered early the table on the fast leg has never called the lines dirty.
    for ack in ["durable", "fast"] {
        lost_and_written_back_again(ack);
    }
}

fn lost_and_written_back_again(ack: &str) {
    let legs = faulty(50);
    legs[1].hold_writes();
    let graph = open(&format!("mode=back, ack={ack}, line=4K"), &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        bench.plain(Operation::Flush, 0, 0).unwrap();
        data = bench.write_random(0, 40);
    });
    for round in 1..=3 {
        legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        let refused = cache(&graph).leave().unwrap_err().to_string();
        assert!(refused.contains("write fault"), "{refused}");
        assert!(legs[1].power_loss() > 0, "something is lost in round {round}");
        legs[1].clear();
        assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("5"));
        assert!(fact(&graph, "trouble").unwrap().contains("is dirty again"));
        on_bench(&graph, |bench| {
            bench.expect(0, &data);
            // What is on the fast leg is not lost: there is nothing to tell.
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
    }
    cache(&graph).drain_now().unwrap();
    assert_eq!(legs[1].power_loss(), 0);
    assert_eq!(slow_data(&volumes(&legs), 0, 40), data);
}

#[test]
fn the_guest_is_told_what_was_lost_in_a_flush_that_it_did_not_ask_for() {
    for mode in ["through", "back"] {
        let legs = faulty(50);
        let graph = open(&format!("mode={mode}, line=4K"), &volumes(&legs), Reason::Create);
        let flush = |bench: &mut Bench<'_>| bench.plain(Operation::Flush, 0, 0);
        on_bench(&graph, |bench| {
            // Beside the cache where it writes back.
            bench.write_random(1000, 600);
            legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        });
        let me = cache(&graph);
        let ours = legs::block_on(move |cx| Box::pin(async move { me.commit(cx).await })).unwrap();
        assert_eq!(ours, Err(WRITE_FAULT));
        on_bench(&graph, |bench| {
            assert_eq!(flush(bench), Err(BlockError::WriteFault { errno: 0 }), "{mode}");
            assert_eq!(flush(bench), Ok(()), "once");
            // Of one that it asked for it is told by that.
            bench.write_random(1000, 600);
            legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
            assert_eq!(flush(bench), Err(WRITE_FAULT));
            assert_eq!(flush(bench), Ok(()));
        });
    }
}

#[test]
fn a_fast_leg_that_lost_what_was_never_flushed_is_not_believed_when_it_comes_again() {
    let legs = faulty(50);
    legs[0].hold_writes();
    let graph = open("mode=through, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 100));
    pull(&legs[0]);
    on_bench(&graph, |bench| bench.expect(0, &data));
    assert_eq!(health(&graph), Health::Degraded);
    legs[0].clear();
    assert!(legs[0].power_loss() > 0);
    cache(&graph).command("resume", &Settings::default()).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
    // With lines that are nowhere else the guest is told that it cannot be sure of them.
    let legs = faulty(50);
    legs[0].hold_writes();
    let graph = open("mode=back, ack=fast, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.write_random(0, 100);
    });
    pull(&legs[0]);
    on_bench(&graph, |bench| {
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Read, 0, &[segment]), Err(BlockError::NotReady));
    });
    legs[0].clear();
    legs[0].power_loss();
    cache(&graph).command("resume", &Settings::default()).unwrap();
    on_bench(&graph, |bench| {
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    });
}

/// Its next flush succeeds, and the table would call dirty what is not there.
#[test]
fn the_guest_is_told_of_dirty_data_that_a_failed_flush_of_the_fast_leg_lost() {
    let legs = faulty(50);
    legs[0].hold_writes();
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        bench.plain(Operation::Flush, 0, 0).unwrap();
        legs[0].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        bench.write_random(0, 8);
    });
    assert_eq!(legs[0].faults(), 1);
    assert!(legs[0].power_loss() > 0);
    legs[0].clear();
    on_bench(&graph, |bench| {
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    });
}

/// Blocks that were dirty are written to the slow leg, because the fast one is gone; what is read then.
fn written_past_the_fast_leg() -> (Vec<Arc<FaultVolume>>, Graph, Vec<u8>) {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 24));
    pull(&legs[0]);
    on_bench(&graph, |bench| {
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Read, 3, &[segment]), Err(BlockError::NotReady));
        let new = bench.write_random(8, 16);
        data[8 * 512..].copy_from_slice(&new);
    });
    (legs, graph, data)
}

/// Nobody flushes before the process dies.
#[test]
fn the_table_of_a_fast_leg_that_is_used_again_calls_nothing_dirty_that_is_older() {
    let (legs, graph, data) = written_past_the_fast_leg();
    // It can be read, and does not take its table: what that says is still wrong.
    legs[0].clear();
    legs[0].add(Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)));
    let refused = cache(&graph).command("resume", &Settings::default()).unwrap_err().to_string();
    assert!(refused.contains("cannot store the table on leg fast"), "{refused}");
    assert!(cache(&graph).is_broken());
    on_bench(&graph, |bench| bench.expect(0, &data));
    legs[0].clear();
    cache(&graph).command("resume", &Settings::default()).unwrap();
    assert_eq!(health(&graph), Health::Good);
    // Nothing is unmounted.
    drop(graph);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

/// A file refuses every flush until it is opened again, and what was written back to it may be only on the fast leg.
#[test]
fn a_fast_leg_is_used_again_although_the_slow_one_refuses_its_flush() {
    let (legs, graph, data) = written_past_the_fast_leg();
    legs[0].clear();
    legs[1].add(Rule::new(Kind::Flush, When::Always, Effect::Fail(WRITE_FAULT)));
    let said = cache(&graph).command("resume", &Settings::default()).unwrap();
    assert!(said.contains("is used again, but its table cannot be put right yet"), "{said}");
    assert!(!cache(&graph).is_broken());
    assert!(fact(&graph, "trouble").unwrap().contains("a flush of the slow leg failed"));
    on_bench(&graph, |bench| {
        bench.expect(0, &data);
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(WRITE_FAULT));
        legs[1].clear();
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    });
    // Nothing is unmounted: the table is right now.
    drop(graph);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

/// What was written back is on the fast leg still, until that is used again and not trusted. The slow leg forgets it then, or has before, and
/// who had a line kept it from becoming dirty again.
#[test]
fn the_guest_is_told_of_what_was_written_back_and_lost_when_the_fast_leg_is_used_again() {
    for before in [false, true] {
        let legs = faulty(50);
        legs[SLOW].hold_writes();
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        on_bench(&graph, |bench| {
            bench.write_random(0, 40);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        let cache = cache(&graph);
        let core = cache.core().unwrap();
        let moved = cache.wait_for(|me, cx| {
            Box::pin(async move {
                let core = me.core()?;
                for slot in 0..core.table.len() {
                    me.clean_line(cx, core, slot).await?;
                }
                Ok::<_, BlockError>(())
            })
        });
        assert_eq!((moved.unwrap(), cache.dirty_lines()), (Ok(()), 0));
        let forget = || legs[SLOW].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
        if before {
            let _in_use = core.ranges.try_lock(core.line_bytes(0)).expect("nobody has it");
            forget();
            let ours = cache.wait_for(|me, cx| Box::pin(async move { me.commit(cx).await }));
            assert_eq!((ours.unwrap(), cache.dirty_lines()), (Err(WRITE_FAULT), 0));
        }
        pull(&legs[FAST]);
        on_bench(&graph, |bench| drop(bench.read(0, 8)));
        assert!(cache.is_broken());
        legs[FAST].clear();
        if !before {
            forget();
        }
        let said = cache.command("resume", &Settings::default()).unwrap();
        assert!(said.contains("the fast leg is used again"), "{said}");
        on_bench(&graph, |bench| {
            assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }), "{before}");
            assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()), "once");
        });
    }
}

/// The slow leg forgot what was written back, and who had a line kept it from becoming dirty again. Then a write of it fails half way, and what
/// the fast leg has of it is not believed any more.
#[test]
fn the_guest_is_told_of_what_was_written_back_and_lost_when_a_write_fails() {
    let legs = faulty(50);
    legs[SLOW].hold_writes();
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 8);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    let cache = cache(&graph);
    let core = cache.core().unwrap();
    let moved = cache.wait_for(|me, cx| Box::pin(async move { me.clean_line(cx, me.core()?, 0).await }));
    assert_eq!((moved.unwrap(), cache.dirty_lines()), (Ok(4096), 0));
    {
        let _in_use = core.ranges.try_lock(core.line_bytes(0)).expect("nobody has it");
        legs[SLOW].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
        let ours = cache.wait_for(|me, cx| Box::pin(async move { me.commit(cx).await }));
        assert_eq!((ours.unwrap(), cache.dirty_lines()), (Err(WRITE_FAULT), 0));
    }
    legs[FAST].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(BlockError::Memory)));
    on_bench(&graph, |bench| {
        assert_eq!(bench.write(0, &[9; 4096]), Err(BlockError::Memory));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()), "once");
    });
}

#[test]
fn a_bad_sector_does_not_keep_a_volume_from_being_opened() {
    for leg in [FAST, SLOW] {
        let legs = faulty(50);
        let mut graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 8));
        cache(&graph).drain_now().unwrap();
        let place = cache(&graph).core().unwrap().plan.data(0) >> 9;
        close(&mut graph);
        let range = if leg == FAST { (Lba(place), BlockCount(1 << 20)) } else { (Lba(0), BlockCount(8)) };
        legs[leg].add(Rule { range: Some(range), ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)) });
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
    }
}

#[test]
fn a_cache_that_was_closed_takes_no_requests() {
    for mode in ["through", "back"] {
        let legs = faulty(50);
        let settings = format!("mode={mode}, line=4K");
        let mut graph = open(&settings, &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 40));
        close(&mut graph);
        on_bench(&graph, |bench| {
            assert_eq!(bench.write(0, &[9; 512]), Err(BlockError::NotReady));
            assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::NotReady));
            let segment = bench.memory.segment(0, 512);
            assert_eq!(bench.moving(Operation::Read, 0, &[segment]), Err(BlockError::NotReady));
        });
        drop(graph);
        let graph = open(&settings, &volumes(&legs), Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
    }
}

#[test]
fn what_cannot_be_written_back_stays_dirty_and_is_tried_again() {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 40));
    legs[1].add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)));
    let refused = cache(&graph).leave().unwrap_err().to_string();
    assert!(refused.contains("no space left"), "{refused}");
    assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("5"));
    assert!(fact(&graph, "trouble").unwrap().contains("could not be written back"));
    on_bench(&graph, |bench| bench.expect(0, &data));
    legs[1].clear();
    cache(&graph).drain_now().unwrap();
    assert_eq!(slow_data(&volumes(&legs), 0, 40), data);
}

/// What upkeep does after the command.
fn flush_all(cache: &Cache) -> Result<(), BlockError> {
    let flushed = cache.wait_for(|me, cx| {
        Box::pin(async move {
            let (stop, mut hand) = (crate::background::Stop::default(), 0);
            me.flush_everything(cx, &stop, me.core()?, &mut hand).await
        })
    });
    flushed.unwrap()
}

/// One of upkeep's rounds.
fn one_round(cache: &Cache) -> Result<(), BlockError> {
    let done = cache.wait_for(|me, cx| {
        Box::pin(async move {
            let (stop, mut hand) = (crate::background::Stop::default(), 0);
            me.round(cx, &stop, me.core()?, &mut hand).await
        })
    });
    done.unwrap()
}

/// One sector of the fast leg cannot be read, or one of the slow leg not be written.
#[test]
fn a_line_that_cannot_be_moved_keeps_no_other_where_it_is() {
    for (leg, by_command) in [(FAST, true), (FAST, false), (SLOW, true), (SLOW, false)] {
        let legs = faulty(50);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 40));
        let cache = cache(&graph);
        let core = cache.core().unwrap();
        assert_eq!(core.table.slot(0).line(), Some(0), "it is the first that is tried");
        let (lba, kind, fault) = match leg {
            FAST => (core.plan.data(0) >> 9, Kind::Read, READ_FAULT),
            _ => (0, Kind::Write, WRITE_FAULT),
        };
        let range = Some((Lba(lba), BlockCount(8)));
        legs[leg].add(Rule { range, ..Rule::new(kind, When::Always, Effect::Fail(fault)) });
        if by_command {
            cache.command("flush", &Settings::default()).unwrap();
            assert_eq!(flush_all(&cache), Err(fault));
            assert_eq!(cache.flushing.left.load(Ordering::Relaxed), 0, "it is tried again at upkeep's own pace");
        } else {
            let refused = cache.leave().unwrap_err().to_string();
            assert!(refused.contains("(1 lines are only on the fast leg)"), "{refused}");
        }
        assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("1"));
        assert_eq!(slow_data(&volumes(&legs), 8, 32), data[8 * 512..]);
        legs[leg].clear();
        if by_command {
            // It was written lately, and is left alone once.
            (0..2).for_each(|_| assert_eq!(one_round(&cache), Ok(())));
        } else {
            cache.drain_now().unwrap();
        }
        assert_eq!(cache.dirty_lines(), 0);
        assert_eq!(slow_data(&volumes(&legs), 0, 40), data);
    }
}

/// Under a steady load all of a line is never free at once.
#[test]
fn a_line_that_requests_always_have_keeps_no_other_where_it_is() {
    for by_command in [true, false] {
        let legs = faulty(50);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 40));
        let cache = cache(&graph);
        let core = cache.core().unwrap();
        assert_eq!(core.table.slot(0).line(), Some(0), "it is the first that is tried");
        let held = core.ranges.try_lock(0..512).unwrap();
        if by_command {
            cache.command("flush", &Settings::default()).unwrap();
            assert_eq!(flush_all(&cache), Ok(()));
            assert_eq!(cache.flushing.left.load(Ordering::Relaxed), 0, "it is tried again at upkeep's own pace");
        } else {
            let refused = cache.leave().unwrap_err().to_string();
            assert!(refused.contains("1 lines are only on the fast leg (fast): they were in use"), "{refused}");
        }
        assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("1"));
        assert_eq!(slow_data(&volumes(&legs), 8, 32), data[8 * 512..]);
        drop(held);
        cache.drain_now().unwrap();
        assert_eq!(slow_data(&volumes(&legs), 0, 40), data);
    }
}

/// Who waits for such a line keeps nobody from the turn to move others.
#[test]
fn the_turn_to_move_is_free_while_a_line_is_waited_for() {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 8)));
    let cache = cache(&graph);
    let held = cache.core().unwrap().ranges.try_lock(0..512).unwrap();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| cache.leave());
        until("it begins", || cache.draining.load(Ordering::Relaxed));
        // Again and again, until it gives up.
        let mut turns = Ok(());
        while turns.is_ok() && cache.draining.load(Ordering::Relaxed) {
            turns = cache.stop_beside().map(drop);
        }
        drop(held);
        let _ = leaving.join().unwrap();
        turns.unwrap();
    });
}

/// As many in a row cannot be moved as end a pass.
#[test]
fn what_lies_behind_many_lines_that_cannot_be_moved_is_written_back_by_the_next_try() {
    for by_command in [true, false] {
        let legs = faulty(100);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        on_bench(&graph, |bench| (0..80).for_each(|line| drop(bench.write_random(line * 8, 8))));
        let cache = cache(&graph);
        let core = cache.core().unwrap();
        let dirty = cache.dirty_lines();
        assert!(dirty > 70 && (0..64).all(|slot| !core.table.slot(slot).is_clean()), "{dirty}");
        let range = Some((Lba(core.plan.data(0) >> 9), BlockCount(64 * 8)));
        legs[FAST].add(Rule { range, ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)) });
        if by_command {
            cache.command("flush", &Settings::default()).unwrap();
            let passes = cache.wait_for(|me, cx| {
                Box::pin(async move {
                    let (stop, mut hand, core) = (crate::background::Stop::default(), 0, me.core()?);
                    let first = me.flush_everything(cx, &stop, core, &mut hand).await;
                    let left = me.flushing.left.load(Ordering::Relaxed);
                    let second = me.flush_everything(cx, &stop, core, &mut hand).await;
                    Ok::<_, BlockError>((first, left, second))
                })
            });
            let rest = core.table.len() - 64;
            assert_eq!(passes.unwrap(), Ok((Err(READ_FAULT), rest, Ok(()))));
            assert_eq!(cache.flushing.left.load(Ordering::Relaxed), 0);
        } else {
            let refused = [(); 2].map(|()| cache.leave().unwrap_err().to_string());
            assert!(refused[0].contains(&format!("({dirty} lines are only on the fast leg)")), "{refused:?}");
            assert!(refused[1].contains("(64 lines are only on the fast leg)"), "{refused:?}");
        }
        assert_eq!(cache.dirty_lines(), 64);
    }
}

/// A cache of some lines of 4 KiB, nearly all of which are dirty.
fn crowded(rate: &str) -> (Vec<Arc<FaultVolume>>, Graph) {
    let legs = faulty(80);
    let graph = open(&format!("mode=back, line=4K, rate={rate}"), &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| (0..70).for_each(|line| drop(bench.write_random(line * 8, 8))));
    assert!(cache(&graph).dirty_lines() > 60);
    (legs, graph)
}

/// A line a second is moved, which the command need not wait for.
#[test]
fn the_command_flush_ends_a_round_that_keeps_to_the_rate() {
    let (legs, graph) = crowded("4K");
    let before = legs[SLOW].requests(Kind::Write);
    let beside = cache(&graph);
    let round = std::thread::spawn(move || one_round(&beside));
    until("a line is written back", || legs[SLOW].requests(Kind::Write) > before);
    cache(&graph).command("flush", &Settings::default()).unwrap();
    assert_eq!(round.join().unwrap(), Ok(()));
    assert!(cache(&graph).dirty_lines() > 0, "the round went on to its end");
    assert_eq!(flush_all(&cache(&graph)), Ok(()));
    assert_eq!(cache(&graph).dirty_lines(), 0);
}

#[test]
fn a_full_cache_has_room_before_all_of_it_is_written_back() {
    let (legs, graph) = crowded("1T");
    let before = legs[SLOW].requests(Kind::Flush);
    assert_eq!(one_round(&cache(&graph)), Ok(()));
    assert_eq!(cache(&graph).dirty_lines(), 0);
    assert!(legs[SLOW].requests(Kind::Flush) > before + 1, "lines can go only when they are flushed");
}

/// Each commit costs flushes of both legs.
#[test]
fn a_small_cache_that_is_full_is_not_flushed_all_the_time() {
    let legs = faulty(300);
    let graph = open("mode=back, line=4K, rate=1T", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| (0..250).for_each(|line| drop(bench.write_random(line * 8, 8))));
    let cache = cache(&graph);
    assert!(cache.dirty_lines() > u64::from(cache.core().unwrap().table.len()) * 7 / 10);
    let before = legs[SLOW].requests(Kind::Flush);
    assert_eq!((one_round(&cache), cache.dirty_lines()), (Ok(()), 0));
    // An eighth of the cache is more than what is sorted together.
    let flushes = legs[SLOW].requests(Kind::Flush) - before;
    assert!((2..=5).contains(&flushes), "{flushes}");
}

#[test]
fn upkeep_writes_back_what_was_left_alone() {
    let legs = faulty(50);
    let graph = open("mode=back, line=4K, rate=1T", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 40));
    let quiet = cache(&graph);
    let rounds = legs::block_on(move |cx| {
        Box::pin(async move {
            let (stop, mut hand, mut rounds) = (crate::background::Stop::default(), 0, 0);
            while quiet.dirty_lines() > 0 && rounds < 1000 {
                quiet.round(cx, &stop, quiet.core().unwrap(), &mut hand).await.unwrap();
                rounds += 1;
            }
            rounds
        })
    })
    .unwrap();
    let all = u64::from(cache(&graph).core().unwrap().table.len());
    assert!(rounds > all / 4, "written lately, it was left alone for a pass: {rounds} rounds");
    assert_eq!(fact(&graph, "lines written back").as_deref(), Some("5"));
    assert_eq!(slow_data(&volumes(&legs), 0, 40), data);
}

#[test]
fn the_death_of_the_process_loses_nothing() {
    // Again and again, with writes of all kinds and no flush.
    for mode in ["back", "through"] {
        let legs = faulty(20);
        let mut model = vec![0; 2048 * 512];
        let mut graph = open(&format!("mode={mode}, line=4K, around=32K"), &volumes(&legs), Reason::Create);
        for round in 0..30 {
            on_bench(&graph, |bench| {
                bench.random = millrace_block::conformance::Random::new(round);
                for _ in 0..12 {
                    let (lba, count) =
                        (bench.random.below(1900), 1 + bench.random.below(if round % 3 == 0 { 100 } else { 30 }));
                    let range = lba as usize * 512..(lba + count) as usize * 512;
                    if bench.random.below(5) == 0 {
                        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, lba, count).unwrap();
                        model[range].fill(0);
                    } else {
                        model[range].copy_from_slice(&bench.write_random(lba, count));
                    }
                }
            });
            if round % 4 == 1 {
                cache(&graph).drain_now().unwrap();
            }
            // Nothing is unmounted.
            drop(graph);
            graph = open(&format!("mode={mode}, line=4K, around=32K"), &volumes(&legs), Reason::Open);
            on_bench(&graph, |bench| bench.expect(0, &model));
        }
    }
}

#[test]
fn what_is_not_flushed_may_be_lost_and_what_is_flushed_is_not() {
    let legs = faulty(50);
    for leg in &legs {
        leg.hold_writes();
    }
    let graph = open("mode=back, ack=fast, line=4K", &volumes(&legs), Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(0, 40);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        let other = bench.write_random(100, 8);
        data.extend(other);
        let segment = bench.memory.segment(0, 4096);
        segment.write_at(0, &[5; 4096]);
        bench.moving(Operation::Write { fua: true }, 200, &[segment]).unwrap();
        bench.write_random(300, 40);
    });
    drop(graph);
    assert!(legs.iter().map(|leg| leg.power_loss()).sum::<u64>() > 0, "something was not durable");
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect(0, &data[..40 * 512]);
        bench.expect(200, &[5; 4096]);
    });
}
