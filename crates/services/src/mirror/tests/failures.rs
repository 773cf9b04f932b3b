//! Legs that fail, and what becomes of them.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, BlockError, Lba, Operation};

use super::{
    rebuild::{command, look_at_marks, state},
    *,
};
use crate::{service::Health, testing::sector::BadSector};

pub(super) const WRITE_FAULT: BlockError = BlockError::WriteFault { errno: 5 };
const READ_FAULT: BlockError = BlockError::ReadFault { errno: 5 };

/// Everything on this leg fails from now on.
pub(super) fn pull(leg: &FaultVolume) {
    leg.add(Rule { kinds: vec![], ..Rule::new(Kind::Read, When::Always, Effect::Fail(BlockError::NotReady)) });
}

/// The leg cannot read this block so many times.
fn fails_to_read(leg: &FaultVolume, block: u64, times: u64) {
    for time in 1..=times {
        let range = Some((Lba(block), BlockCount(1)));
        leg.add(Rule { range, ..Rule::new(Kind::Read, When::Nth(time), Effect::Fail(READ_FAULT)) });
    }
}

fn scrub(graph: &Graph) -> crate::mirror::scrub::Scrub {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move { mirror.scrub_all(cx, &millrace_memory::BufferPool::new(MOST_LEGS).unwrap()).await })
    })
    .unwrap()
}

/// Rot below the mirror: one byte of a block.
fn rot(leg: &Arc<dyn Volume>, model: &[u8], block: usize) {
    let mut spoiled = model[block * 512..(block + 1) * 512].to_vec();
    spoiled[17] ^= 4;
    crate::legs::write(leg, block as u64 * 512, spoiled).unwrap();
}

#[test]
fn a_pulled_leg_is_no_error_and_what_it_missed_is_copied_when_it_comes_back() {
    let legs = faulty(2, 8192);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        bench.write_random(0, 8192);
        pull(&legs[1]);
        model = bench.write_random(0, 300);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.expect(0, &model);
    });
    assert_eq!((fact(&graph, "leg 0").as_deref(), fact(&graph, "leg 1").as_deref()), (Some("good"), Some("failed")));
    assert_eq!(graph.tree().status.unwrap().health, Health::Degraded);
    assert!(fact(&graph, "to do for leg 1").is_some_and(|told| told.contains("rebuild leg=1")));
    let service = Arc::clone(graph.root.service.as_ref().unwrap());
    let alone = service.command("scrub", &arguments(&[])).unwrap_err().to_string();
    assert!(alone.contains("only one leg is good"), "{alone}");
    assert!(service.leg_is_whole(0) && !service.leg_is_whole(1));
    let refused = service.command("fail", &arguments(&[("leg", "0")])).unwrap_err();
    assert_eq!(refused.to_string(), "leg 0 is the last one that has all data: it stays");
    assert!(service.command("rebuild", &arguments(&[("leg", "1")])).is_err(), "it still does not answer");
    assert_eq!(fact(&graph, "leg 1").as_deref(), Some("failed"));

    legs[1].clear();
    let before = legs[1].requests(Kind::Write);
    let said = service.command("rebuild", &arguments(&[("leg", "1")])).unwrap();
    assert_eq!(said, "leg 1 is being filled with what it missed");
    assert_eq!(graph.tree().status.unwrap().progress.len(), 1);
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert!(resync(&graph));
    assert_eq!(fact(&graph, "leg 1").as_deref(), Some("good"));
    assert!(data_of(&volumes[0]) == data_of(&volumes[1]));
    // 300 blocks are three regions of 64 KiB: of 4 MiB, only these were written.
    assert!(legs[1].requests(Kind::Write) - before < 20, "only what it missed");
}

#[test]
fn a_write_that_missed_a_leg_waits_until_that_is_recorded() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 8);
        pull(&legs[1]);
        // The other leg takes the data and refuses its tables, which lie at its end.
        let tables = Some((Lba(1024), BlockCount(128)));
        legs[0].add(Rule { range: tables, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
        let data = bench.random.bytes(512);
        assert!(bench.write(3, &data).is_err(), "nobody would know, after a crash, which leg is right");
        assert!(bench.write(3, &data).is_err());
        legs[0].clear();
        assert_eq!(bench.write(3, &data), Ok(()));
        bench.expect(3, &data);
    });
    drop(graph);
    legs[1].clear();
    let graph = open("", &volumes, Reason::Open);
    assert_eq!(fact(&graph, "leg 1").as_deref(), Some("failed"));
}

/// Its next flush succeeds. Where the mirror goes out of force, nothing of the other leg is replaced by what this one has left.
#[test]
fn a_leg_that_forgets_what_it_has_when_the_mirror_goes_is_not_read() {
    let forgets = || Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT));
    for which in [0, 1] {
        let legs = faulty(2, 2000);
        for leg in &legs {
            leg.hold_writes();
        }
        let graph = open("", &volumes(&legs), Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 2000));
        legs[which].add(forgets());
        let service = mirror(&graph);
        service.unmount().unwrap();
        for leg in &legs {
            leg.clear();
        }
        drop((service, graph));
        let graph = open("", &volumes(&legs), Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
        assert_eq!(graph.tree().status.unwrap().health, Health::Degraded);
    }
    // Both: nobody has it, and the guest is told by the next one.
    let legs = faulty(2, 2000);
    for leg in &legs {
        leg.hold_writes();
    }
    let graph = open("", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 100)));
    for leg in &legs {
        leg.add(forgets());
    }
    let service = mirror(&graph);
    service.unmount().unwrap_err();
    assert!(service.members.losses.is_untold());
}

#[test]
fn errors_of_all_legs_are_the_guests_and_drop_none() {
    let legs = faulty(2, 1024);
    let graph = open("", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 8);
        for leg in &legs {
            leg.add(Rule { range: Some((Lba(5), BlockCount(1))), ..Rule::new(Kind::Write, When::Always, Effect::Tear) });
        }
        let data = bench.random.bytes(3 * 512);
        assert_eq!(bench.write(4, &data), Err(BlockError::WriteFault { errno: 0 }));
        for leg in &legs {
            leg.clear();
        }
        // Each leg may have another part of it: all reads see the same one.
        let first = bench.read(4, 3);
        (0..8).for_each(|_| bench.expect(4, &first));
    });
    assert_eq!((fact(&graph, "leg 0").as_deref(), fact(&graph, "leg 1").as_deref()), (Some("good"), Some("good")));
    assert!(resync(&graph));
    assert!(data_of(&volumes(&legs)[0]) == data_of(&volumes(&legs)[1]));
}

#[test]
fn what_one_leg_cannot_read_is_read_elsewhere_and_rewritten() {
    let legs = faulty(2, 1024);
    let graph = open("read=0, ", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        let data = bench.write_random(0, 1024);
        fails_to_read(&legs[0], 0, 2);
        let before = legs[0].requests(Kind::Write);
        bench.expect(0, &data);
        assert!(legs[0].requests(Kind::Write) > before, "it is given the data again");
        assert_eq!(fact(&graph, "leg 0").as_deref(), Some("good"));
        assert!(fact(&graph, "repaired").is_some());
        // A leg that cannot read even what was just written is of no use.
        legs[0].add(Rule {
            range: Some((Lba(7), BlockCount(1))),
            ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT))
        });
        bench.expect(0, &data);
        assert_eq!(fact(&graph, "leg 0").as_deref(), Some("failed"));
        bench.expect(0, &data);
        // The last leg's errors are the guest's.
        legs[1].add(Rule::new(Kind::Read, When::Nth(1), Effect::Fail(READ_FAULT)));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Read, 0, &[segment]), Err(READ_FAULT));
        bench.expect(0, &data);
    });
}

/// The disk refuses a write of a part of it.
#[test]
fn a_sector_of_several_blocks_that_goes_bad_costs_no_leg() {
    for way in ["read", "read a block", "scrub"] {
        let mut legs = volumes(&faulty(2, 1024));
        let disk = BadSector::on(Arc::clone(&legs[0]));
        legs[0] = Arc::<BadSector>::clone(&disk);
        let graph = open("read=0, region=64K, ", &legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            disk.goes_bad();
            match way {
                "read" => bench.expect(3, &model[3 * 512..200 * 512]),
                "read a block" => bench.expect(10, &model[10 * 512..11 * 512]),
                _ => assert_eq!(scrub(&graph).differing, 0),
            }
        });
        assert_eq!((disk.is_bad(), fact(&graph, "leg 0").as_deref()), (false, Some("good")), "{way}");
        assert!(legs.iter().all(|leg| data_of(leg) == model), "{way}");
    }
}

#[test]
fn a_scrub_repairs_by_majority_and_never_by_guess() {
    // The block that the first leg cannot read lies elsewhere, and beside the rotten one.
    for (count, unreadable) in [(2, 3), (3, 3), (2, 701), (3, 701)] {
        let legs = faulty(count, 1024);
        let volumes = volumes(&legs);
        let graph = open("", &volumes, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        rot(&volumes[1], &model, 700);
        fails_to_read(&legs[0], unreadable, 2);
        let (found, again) = (scrub(&graph), scrub(&graph));
        assert_eq!(
            fact(&graph, "repaired").as_deref(),
            Some(if count == 3 { "2" } else { "1" }),
            "it cannot be read, and is"
        );
        if count == 3 {
            assert_eq!((found.differing, found.repaired, found.listed), (0, 2, vec![]));
            assert_eq!((again.differing, again.repaired), (0, 0));
            assert!(volumes.iter().all(|leg| data_of(leg) == model));
        } else {
            assert_eq!((found.differing, found.repaired, found.listed), (1, 1, vec![700]));
            assert_eq!(again.differing, 1);
            assert!(data_of(&volumes[0]) == model && data_of(&volumes[1]) != model, "neither leg was changed");
            assert_eq!(fact(&graph, "differing blocks").as_deref(), Some("700"));
        }
    }
}

#[test]
fn what_is_undecided_is_given_to_no_leg() {
    let legs = faulty(3, 1024);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    rot(&volumes[1], &model, 700);
    fails_to_read(&legs[0], 700, 2);
    assert_eq!((scrub(&graph).listed, data_of(&volumes[0]) == model), (vec![700], true));
    // When it can be read again there is a majority.
    assert_eq!(scrub(&graph).repaired, 1);
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

/// Nor as a part of a sector that is given for the other blocks in it.
#[test]
fn what_is_undecided_is_not_given_with_the_sector_around_it() {
    let mut legs = volumes(&faulty(3, 1024));
    let disk = BadSector::on(Arc::clone(&legs[0]));
    legs[0] = Arc::<BadSector>::clone(&disk);
    let graph = open("region=64K, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    rot(&legs[1], &model, 11);
    let rotten = data_of(&legs[1]);
    disk.goes_bad();
    for _ in 0..2 {
        let found = scrub(&graph);
        assert_eq!((found.differing, found.repaired, found.listed), (1, 0, vec![11]));
        assert_eq!((disk.is_bad(), state(&graph, 0).as_str()), (true, "good"));
        assert!(data_of(&legs[1]) == rotten && data_of(&legs[2]) == model);
    }
    // The operator knows which leg is wrong.
    command(&graph, "fail", 1).unwrap();
    let found = scrub(&graph);
    assert_eq!((found.differing, found.repaired, disk.is_bad()), (0, 8, false));
    assert!(data_of(&legs[0]) == model && data_of(&legs[2]) == model);
}

/// Nor does another leg's bad block in it cost the leg with the bad sector.
#[test]
fn a_sector_that_no_other_leg_has_as_a_whole_costs_no_leg() {
    let other = faulty(2, 1024).remove(1);
    let mut legs = volumes(&faulty(2, 1024));
    let disk = BadSector::on(Arc::clone(&legs[0]));
    legs[0] = Arc::<BadSector>::clone(&disk);
    legs[1] = Arc::<FaultVolume>::clone(&other);
    let graph = open("region=64K, ", &legs, Reason::Create);
    on_bench(&graph, |bench| {
        let model = bench.write_random(0, 1024);
        (0..2).for_each(|_| look_at_marks(&graph));
        disk.goes_bad();
        let range = Some((Lba(12), BlockCount(1)));
        other.add(Rule { range, ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)) });
        // More than once: legs take turns.
        (0..4).for_each(|_| bench.expect(10, &model[10 * 512..11 * 512]));
        assert_eq!((disk.is_bad(), state(&graph, 0).as_str()), (true, "good"));
        other.clear();
        (0..4).for_each(|_| bench.expect(10, &model[10 * 512..11 * 512]));
        assert_eq!((disk.is_bad(), state(&graph, 0).as_str()), (false, "good"));
        bench.expect(0, &model);
    });
}

/// No mark tells of the block that is wrong there: filled with what it missed, the leg would have it again.
#[test]
fn a_leg_that_refuses_what_a_scrub_found_is_filled_with_everything() {
    let legs = faulty(3, 1024);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    rot(&volumes[2], &model, 700);
    let range = Some((Lba(700), BlockCount(1)));
    legs[2].add(Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
    assert_eq!((scrub(&graph).repaired, state(&graph, 2).as_str()), (0, "failed"));
    legs[2].clear();
    assert!(command(&graph, "rebuild", 2).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    assert_eq!(state(&graph, 2), "good");
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

/// So many legs, of which the first has a wrong block that no mark tells of; and what the others have.
fn with_a_wrong_block(count: usize) -> (Vec<Arc<FaultVolume>>, Graph, Vec<u8>) {
    let legs = faulty(count, 1024);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    assert_eq!(mirror(&graph).intent().unwrap().marked(), 0);
    rot(&volumes[0], &model, 700);
    (legs, graph, model)
}

/// The operator knows which leg is wrong.
#[test]
fn an_undecided_block_is_filled_on_the_leg_that_the_operator_takes_out() {
    for opened_anew in [false, true] {
        let (legs, mut graph, model) = with_a_wrong_block(2);
        let volumes = volumes(&legs);
        assert_eq!(scrub(&graph).listed, [700]);
        assert_eq!(mirror(&graph).intent().unwrap().marked(), 0, "a crash must not decide it");
        let said = command(&graph, "fail", 0).unwrap();
        assert!(said.contains("were found to differ"), "{said}");
        if opened_anew {
            // A crash.
            drop(graph);
            graph = open("region=64K, ", &volumes, Reason::Open);
        }
        assert!(command(&graph, "rebuild", 0).unwrap().ends_with("with what it missed"));
        assert_eq!(mirror(&graph).intent().unwrap().stale(), 1, "the block's region, and no other");
        assert!(resync(&graph));
        assert_eq!(state(&graph, 0), "good");
        assert!(volumes.iter().all(|leg| data_of(leg) == model));
        assert_eq!(command(&graph, "fail", 0).unwrap(), "leg 0 is out of use", "the legs are equal now");
    }
}

/// While another leg can still go no mark is made: with one, the next opening would make the legs equal.
#[test]
fn an_undecided_block_is_marked_when_its_leg_is_taken_in_again() {
    let (legs, graph, model) = with_a_wrong_block(3);
    let volumes = volumes(&legs);
    crate::legs::write(&volumes[2], 700 * 512, vec![0xa5; 512]).unwrap();
    assert_eq!(scrub(&graph).listed, [700]);
    let marked = || mirror(&graph).intent().unwrap().marked();
    let said = command(&graph, "fail", 0).unwrap();
    assert!(said.contains("were found to differ"), "{said}");
    assert_eq!(marked(), 0);
    assert!(command(&graph, "rebuild", 0).unwrap().ends_with("with what it missed"));
    assert_eq!(marked(), 1);
    assert!(resync(&graph));
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
    assert_eq!(command(&graph, "fail", 0).unwrap(), "leg 0 is out of use", "the legs are equal now");
}

#[test]
fn the_answer_of_fail_does_not_wait_for_a_leg_that_never_answers() {
    let (legs, graph, model) = with_a_wrong_block(2);
    let volumes = volumes(&legs);
    scrub(&graph);
    let mirror = mirror(&graph);
    // As upkeep has it while it flushes that leg.
    let turn = mirror.members.page_turn.try_take().unwrap();
    let said = command(&graph, "fail", 0).unwrap();
    assert!(said.contains("could not be marked"), "{said}");
    drop(turn);
    assert!(command(&graph, "rebuild", 0).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn an_undecided_block_whose_mark_is_refused_is_filled_all_the_same() {
    let (legs, graph, model) = with_a_wrong_block(2);
    let volumes = volumes(&legs);
    scrub(&graph);
    let page = RULES.page_region(RULES.area_of(&*volumes[1]));
    let range = Some((Lba(page.offset / 512), BlockCount(page.len / 512)));
    legs[1].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(1), Effect::Fail(WRITE_FAULT)) });
    command(&graph, "fail", 0).unwrap();
    assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("failed", "good"));
    assert!(command(&graph, "rebuild", 0).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    assert_eq!(state(&graph, 0), "good");
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn a_leg_that_was_not_compared_decides_nothing() {
    let (_, graph, _) = with_a_wrong_block(3);
    let marked = || mirror(&graph).intent().unwrap().marked();
    command(&graph, "fail", 2).unwrap();
    assert_eq!(scrub(&graph).differing, 1);
    command(&graph, "rebuild", 2).unwrap();
    assert_eq!(state(&graph, 2), "being filled");
    assert_eq!(command(&graph, "fail", 2).unwrap(), "leg 2 is out of use");
    assert_eq!(marked(), 0);
    command(&graph, "fail", 0).unwrap();
    assert_eq!(marked(), 1);
}

#[test]
fn a_format_forgets_what_was_undecided() {
    let (_, graph, _) = with_a_wrong_block(2);
    assert_eq!(scrub(&graph).differing, 1);
    graph.volume().format(BlockSize::B512).unwrap();
    assert_eq!(command(&graph, "fail", 0).unwrap(), "leg 0 is out of use");
}

#[test]
fn where_legs_may_differ_a_block_that_cannot_be_read_takes_no_other_with_it() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    // As a power cut leaves them: the last write is on one leg.
    rot(&volumes[1], &model, 1);
    mirror(&graph).intent().unwrap().suspect_all();
    on_bench(&graph, |bench| {
        bench.expect(1, &model[512..1024]);
        fails_to_read(&legs[0], 2, 3);
        bench.expect(0, &model[..4096]);
    });
    fails_to_read(&legs[0], 3, 3);
    assert!(resync(&graph));
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn the_last_block_of_a_long_request_stays_what_it_is() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    rot(&volumes[1], &model, 128);
    mirror(&graph).intent().unwrap().suspect_all();
    on_bench(&graph, |bench| {
        fails_to_read(&legs[0], 2, 3);
        bench.expect(0, &model[..129 * 512]);
        bench.expect(128, &model[128 * 512..129 * 512]);
    });
    assert!(data_of(&volumes[0]) == model);
}

#[test]
fn marks_come_before_writes_and_go_when_all_is_quiet() {
    let legs = faulty(2, 8192);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 1);
        let before = legs[0].requests(Kind::Flush);
        bench.write_random(1, 100);
        assert_eq!(legs[0].requests(Kind::Flush), before, "a marked region costs nothing");
        bench.write_random(128, 1);
        assert_eq!(legs[0].requests(Kind::Flush), before + 1, "a new one costs a store");
    });
    assert_eq!(mirror(&graph).intent().unwrap().marked(), 2);
    let quiet = mirror(&graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            quiet.members.take_marks_away(cx).await;
            assert_eq!(quiet.intent().unwrap().marked(), 2, "they were just used");
            quiet.members.take_marks_away(cx).await;
            assert_eq!(quiet.intent().unwrap().marked(), 0);
        })
    })
    .unwrap();
    drop(graph);
    let graph = open("region=64K, ", &volumes, Reason::Open);
    assert_eq!(mirror(&graph).intent().unwrap().stale(), 0, "nothing to do after a quiet crash");
}

#[test]
fn format_erases_all_legs_and_heals_none() {
    let legs = faulty(3, 1024);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 100);
    });
    graph.root.service.as_ref().unwrap().command("fail", &arguments(&[("leg", "2")])).unwrap();
    graph.volume().format(BlockSize::B4096).unwrap();
    assert_eq!(graph.volume().geometry().blocks.0, 128);
    on_bench(&graph, |bench| bench.expect_zeroes(0, 128));
    assert_eq!(fact(&graph, "leg 2").as_deref(), Some("failed"));
}
