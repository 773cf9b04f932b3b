//! Legs that come back, whatever happens meanwhile.

use std::{thread, time::Duration};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba, trace::Tap};

use super::{
    failures::{WRITE_FAULT, pull, rot, state},
    *,
};
use crate::testing::waiting::{stop_half_way, until, write_around};

/// Upkeep looks whether marks can go.
pub(super) fn look_at_marks(graph: &Graph) {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| Box::pin(async move { parity.members.take_marks_away(cx).await })).unwrap();
}

#[test]
fn upkeep_beside_a_rebuild_takes_no_unfilled_leg_for_a_good_one() {
    for (form, back) in [(SMALL, 0), (SMALL, 2), (TWO, 1)] {
        let legs = form.faulty(1024);
        let volumes = volumes(&legs);
        let graph = form.open(&volumes, Reason::Create);
        let graph = &graph;
        let (mut model, mut data) = (Vec::new(), Vec::new());
        on_bench(graph, |bench| {
            model = bench.write_random(0, 1024);
            command(graph, "fail", back).unwrap();
            model[512 * 512..640 * 512].copy_from_slice(&bench.write_random(512, 128));
            data = bench.random.bytes(16 * 512);
        });
        let area = parity(graph).members.rules.area_of(&*volumes[1]) / 512;
        let (slow, all) = (&legs[(back + 1) % form.legs], (1 << form.legs) - 1);
        let delay = Effect::Delay(Duration::from_secs(1));
        slow.add(Rule { range: Some((Lba(0), BlockCount(area))), ..Rule::new(Kind::Write, When::Always, delay) });
        thread::scope(|scope| {
            write_around(graph.volume(), slow, &data, || {
                let rebuild = scope.spawn(move || command(graph, "rebuild", back).unwrap());
                until("the leg is written again", || parity(graph).members.masks().writable == all);
                let beside = scope.spawn(move || {
                    resync(graph);
                    assert_eq!(state(graph, back), "being filled");
                });
                until("upkeep is over", || beside.is_finished());
                assert!(!rebuild.is_finished(), "it waits for the write");
            });
        });
        model[..data.len()].copy_from_slice(&data);
        slow.clear();
        assert!(resync(graph));
        assert_eq!(state(graph, back), "good");
        parity_fits(graph, &volumes);
        on_bench(graph, |bench| bench.expect(0, &model));
    }
}

/// Puts the volume together with another leg in one place, which is not the last.
pub(super) fn replace(form: Form, legs: &[Arc<dyn Volume>], replaced: usize) {
    let shared = crate::SharedObjects::default();
    let block_size = legs.last().unwrap().geometry().block_size;
    let legs = legs.iter().cloned().map(Tap::new).collect();
    let build = Build {
        name: "new".to_owned(),
        volume: "test",
        legs,
        stated: &[],
        sizing: &[],
        size: None,
        block_size,
        shared: &shared,
    };
    let service = form.plan().build(build).unwrap();
    let mut origins = vec![crate::LegOrigin::Kept; form.legs];
    origins[replaced] = crate::LegOrigin::New;
    service.mount(&crate::Mount { reason: Reason::Change, legs: origins, previous: None, reformat: false }).unwrap();
    service.unmount().unwrap();
}

#[test]
fn what_the_journal_of_a_replaced_leg_says_is_not_carried_out_when_it_comes_back() {
    let form = SMALL;
    let (mut faults, other) = (form.faulty(1024), form.faulty(1024).swap_remove(0));
    let legs = volumes(&faults);
    let graph = form.open(&legs, Reason::Create);
    let layout = parity(&graph).layout;
    let stripe = (0..16).find(|stripe| layout.leg(*stripe, layout.data()) == 1).unwrap();
    let lba = stripe * layout.width() / 512;
    let mut model = Vec::new();
    let write = |graph: &Graph, content: u8| {
        on_bench(graph, |bench| bench.write(lba, &[content; 512]).unwrap());
    };
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    write(&graph, 1);
    pull(&faults[1]);
    write(&graph, 2);
    assert_eq!(state(&graph, 1), "failed");
    graph.root.service.as_ref().unwrap().unmount().unwrap();
    drop(graph);
    let first = std::mem::replace(&mut faults[1], other);
    for _ in 0..2 {
        let legs = volumes(&faults);
        replace(form, &legs, 1);
        let graph = form.open(&legs, Reason::Open);
        assert!(resync(&graph));
        assert_eq!(state(&graph, 1), "good");
        model[lba as usize * 512..][..512].fill(2);
        on_bench(&graph, |bench| bench.expect(0, &model));
        parity_fits(&graph, &legs);
        graph.root.service.as_ref().unwrap().unmount().unwrap();
        first.clear();
        faults[1] = Arc::clone(&first);
    }
}

#[test]
fn marks_stay_when_a_leg_cannot_make_durable_what_they_stand_for() {
    for leg in [0, 1, 2, 0, 1, 2] {
        let legs = SMALL.faulty(1024);
        let volumes = volumes(&legs);
        let graph = SMALL.open(&volumes, Reason::Create);
        legs[leg].hold_writes();
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 400));
        look_at_marks(&graph);
        legs[leg].add(Rule::new(Kind::Flush, When::Always, Effect::Fail(WRITE_FAULT)));
        assert!(legs[leg].power_loss() > 0);
        look_at_marks(&graph);
        assert_eq!(state(&graph, leg), "failed");
        legs[leg].clear();
        assert!(command(&graph, "rebuild", leg).unwrap().ends_with("with what it missed"));
        assert!(resync(&graph));
        assert_eq!(state(&graph, leg), "good");
        parity_fits(&graph, &volumes);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

/// The operator knows which legs are wrong; no write has marked their blocks.
#[test]
fn an_undecided_block_is_filled_on_the_legs_that_the_operator_takes_out() {
    for (form, count, opened_anew) in [(SMALL, 1, false), (SMALL, 1, true), (TWO, 2, false), (TWO, 2, true)] {
        let legs = volumes(&form.faulty(1024));
        let mut graph = form.open(&legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        (0..2).for_each(|_| look_at_marks(&graph));
        assert_eq!(parity(&graph).members.intent().unwrap().marked(), 0);
        let wrong: Vec<_> = (0..count).map(|part| parity(&graph).layout.leg(5, part)).collect();
        // In one block of the row, but not the same byte.
        (5 * 4096 + 700..).zip(&wrong).for_each(|(at, leg)| rot(&legs[*leg], at));
        let found = scrubbed(&graph);
        assert_eq!((found.differing, found.repaired, found.listed), (1, 0, vec![41]));
        for leg in &wrong {
            let said = command(&graph, "fail", *leg).unwrap();
            assert!(said.contains("were found to differ"), "{said}");
        }
        if opened_anew {
            // A crash.
            drop(graph);
            graph = form.open(&legs, Reason::Open);
        }
        for leg in &wrong {
            assert!(command(&graph, "rebuild", *leg).unwrap().ends_with("with what it missed"));
        }
        assert!(resync(&graph));
        assert!((0..form.legs).all(|leg| state(&graph, leg) == "good"));
        parity_fits(&graph, &legs);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

/// With a mark, the next opening would make the parity fit what is wrong on the other one.
#[test]
fn an_undecided_block_stays_so_while_another_leg_can_still_be_taken_out() {
    let legs = volumes(&TWO.faulty(1024));
    let graph = TWO.open(&legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    let wrong = [0, 1].map(|part| parity(&graph).layout.leg(5, part));
    (5 * 4096 + 700..).zip(&wrong).for_each(|(at, leg)| rot(&legs[*leg], at));
    assert_eq!(scrubbed(&graph).differing, 1);
    command(&graph, "fail", wrong[0]).unwrap();
    assert_eq!(parity(&graph).members.intent().unwrap().marked(), 0);
    // A crash.
    drop(graph);
    let graph = TWO.open(&legs, Reason::Open);
    assert!(resync(&graph));
    assert_eq!(scrubbed(&graph).differing, 1, "the others do not fit either");
    assert!(command(&graph, "fail", wrong[1]).unwrap().contains("were found to differ"));
    on_bench(&graph, |bench| bench.expect(0, &model));
    for leg in &wrong {
        command(&graph, "rebuild", *leg).unwrap();
    }
    assert!(resync(&graph));
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// One that cannot be written is not one that is wrong.
#[test]
fn a_leg_that_fails_by_itself_decides_nothing() {
    let faulty = SMALL.faulty(1024);
    let legs = volumes(&faulty);
    let graph = SMALL.open(&legs, Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    rot(&legs[parity(&graph).layout.leg(5, 0)], 5 * 4096 + 700);
    assert_eq!(scrubbed(&graph).differing, 1);
    faulty[1].add(Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)));
    graph.root.service.as_ref().unwrap().unmount().unwrap();
    assert_eq!(state(&graph, 1), "failed");
    assert_eq!(parity(&graph).members.intent().unwrap().marked(), 0);
}

#[test]
fn a_leg_that_was_out_of_use_during_a_format_comes_back_empty() {
    for (form, block_size) in [(SMALL, BlockSize::B512), (WIDE, BlockSize::B512), (TWO, BlockSize::B4096)] {
        let legs = volumes(&form.faulty(1024));
        let graph = form.open(&legs, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        command(&graph, "fail", 1).unwrap();
        graph.volume().format(block_size).unwrap();
        assert_eq!(state(&graph, 1), "failed");
        assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with everything"));
        on_bench(&graph, |bench| {
            bench.expect_zeroes(0, bench.blocks());
            _ = bench.write_random(3, 1);
        });
        assert!(resync(&graph));
        assert_eq!(state(&graph, 1), "good");
        parity_fits(&graph, &legs);
    }
}

#[test]
fn a_rebuild_that_the_leg_refuses_changes_nothing() {
    // It refuses everything, or only the second copy of its table.
    for all in [true, false] {
        let legs = SMALL.faulty(1024);
        let volumes = volumes(&legs);
        let graph = SMALL.open(&volumes, Reason::Create);
        let area = Lba(parity(&graph).members.rules.area_of(&*volumes[1]) / 512);
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            pull(&legs[1]);
            model[..64 * 512].copy_from_slice(&bench.write_random(0, 64));
        });
        if !all {
            legs[1].clear();
            let range = Some((area, BlockCount(64)));
            legs[1].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(2), Effect::Fail(WRITE_FAULT)) });
        }
        assert!(command(&graph, "rebuild", 1).is_err());
        drop(graph);
        legs[1].clear();
        let graph = SMALL.open(&volumes, Reason::Open);
        assert_eq!(state(&graph, 1), "failed");
        assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
        assert!(resync(&graph));
        parity_fits(&graph, &volumes);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

/// Brings half of what is to be done in order, and is told to stop.
fn resync_half(graph: &Graph) {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let (stop, pool) = (crate::background::Stop::default(), millrace_memory::BufferPool::new(2).unwrap());
            let intent = parity.members.intent().unwrap();
            stop_half_way(intent, &stop, Box::pin(parity.resync(cx, &stop, &pool))).await
        })
    })
    .unwrap();
}

#[test]
fn what_was_filled_before_a_close_is_not_filled_again() {
    let legs = volumes(&SMALL.faulty(8192));
    let graph = SMALL.open(&legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 8192));
    // All is marked, and was not written since.
    look_at_marks(&graph);
    command(&graph, "fail", 1).unwrap();
    let bytes = parity(&graph).members.bytes();
    crate::legs::write(&legs[1], 0, vec![0xee; bytes as usize]).unwrap();
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    let all = parity(&graph).members.intent().unwrap().stale();
    assert_eq!(all, bytes >> 16);
    resync_half(&graph);
    graph.root.service.as_ref().unwrap().unmount().unwrap();
    drop(graph);
    let graph = SMALL.open(&legs, Reason::Open);
    let left = parity(&graph).members.intent().unwrap().stale();
    assert!((1..=all / 2).contains(&left), "{left} of {all}");
    assert_eq!(state(&graph, 1), "being filled");
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert!(resync(&graph));
    assert_eq!(state(&graph, 1), "good");
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn what_was_filled_is_not_filled_again_while_another_leg_is_out() {
    for is_orderly in [false, true] {
        let legs = volumes(&TWO.faulty(8192));
        let graph = TWO.open(&legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 8192));
        let bytes = parity(&graph).members.bytes();
        for leg in [1, 2] {
            command(&graph, "fail", leg).unwrap();
            crate::legs::write(&legs[leg], 0, vec![0xee; bytes as usize]).unwrap();
        }
        assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
        let all = parity(&graph).members.intent().unwrap().stale();
        assert_eq!(all, bytes >> 16);
        resync_half(&graph);
        if is_orderly {
            graph.root.service.as_ref().unwrap().unmount().unwrap();
        } else {
            (0..2).for_each(|_| look_at_marks(&graph));
        }
        drop(graph);
        let graph = TWO.open(&legs, Reason::Open);
        let left = parity(&graph).members.intent().unwrap().stale();
        assert!((1..=all / 2).contains(&left), "{left} of {all}");
        assert_eq!((state(&graph, 1).as_str(), state(&graph, 2).as_str()), ("being filled", "failed"));
        on_bench(&graph, |bench| bench.expect(0, &model));
        assert!(resync(&graph));
        assert_eq!(state(&graph, 1), "good");
        assert!(command(&graph, "rebuild", 2).unwrap().ends_with("with what it missed"));
        assert!(resync(&graph));
        assert!((0..TWO.legs).all(|leg| state(&graph, leg) == "good"));
        parity_fits(&graph, &legs);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

#[test]
fn a_format_beside_a_resync_leaves_nothing_of_what_was_there() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let legs = SMALL.faulty(1024);
        let volumes = volumes(&legs);
        let graph = SMALL.open(&volumes, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        // The first parity does not fit, and is slow to write.
        let parity = parity(&graph);
        let leg = parity.layout.leg(0, parity.layout.data());
        crate::legs::write(&volumes[leg], 0, vec![0xee; 512]).unwrap();
        parity.members.intent().unwrap().suspect(&(0..=3));
        let slow = Effect::Delay(Duration::from_millis(200));
        legs[leg].add(Rule { range: Some((Lba(0), BlockCount(8))), ..Rule::new(Kind::Write, When::Nth(1), slow) });
        thread::scope(|scope| {
            let before = legs[leg].requests(Kind::Write);
            let resync = scope.spawn(|| resync(&graph));
            until("the parity is written", || legs[leg].requests(Kind::Write) > before);
            graph.volume().format(block_size).unwrap();
            assert!(resync.join().unwrap());
        });
        assert!((0..3).all(|leg| state(&graph, leg) == "good"));
        parity_fits(&graph, &volumes);
        on_bench(&graph, |bench| bench.expect_zeroes(0, bench.blocks()));
    }
}
