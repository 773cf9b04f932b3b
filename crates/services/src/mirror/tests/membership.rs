//! Which legs make a mirror: what is on them, and what is put in by mistake.

use millrace_backends::fault::Kind;
use millrace_block::{Operation, trace::Tap};

use super::{
    rebuild::{command, look_at_marks},
    *,
};
use crate::{
    members::{
        decide::{Decision, Found, Shape, Wanted as Asked, decide},
        state::{LegState, Member, Table},
    },
    record::Region,
    service::{Health, LegOrigin, Mount},
    testing::answers_nobody_without,
};

fn fails(stack: &str, legs: &[Arc<dyn Volume>], reason: Reason) -> String {
    graph(stack, legs, None, reason, &Arc::default()).err().expect("it is refused").to_string()
}

#[test]
fn nonsense_is_refused_by_name() {
    let refused = |stack: &str| stack.parse::<crate::Node>().unwrap_err().to_string();
    assert!(
        refused("mirror(read=9, null, null)")
            .ends_with("read: round-robin, shortest-queue, or the number of a leg, counted from 0")
    );
    assert!(refused("mirror(region=5000, null)").ends_with("region: a power of two of at least 64K is possible"));
    assert!(refused("mirror(rate=1, null)").ends_with("rate: at least 4K a second"));
    assert!(refused("mirror()").contains("it is over 0 legs; 1 to 8 are possible"));
    let legs = volumes(&faulty(2, 1024));
    assert!(fails("mirror(read=2, disk:0, disk:1)", &legs, Reason::Create).ends_with("read: there is no leg 2"));
    let twice = [Arc::clone(&legs[0]), Arc::clone(&legs[0])];
    assert!(fails("mirror(disk:0, disk:1)", &twice, Reason::Create).ends_with("leg 1 (leg0) stands there twice"));
    let small = [memory(Wanted { block_size: BlockSize::B512, blocks: 128, read_only: false }, 0)];
    assert!(fails("mirror(disk:0)", &small, Reason::Create).contains("the smallest leg has 65536 bytes"));
    let other = memory(Wanted { block_size: BlockSize::B4096, blocks: 1024, read_only: false }, 1);
    assert!(fails("mirror(disk:0, disk:1)", &[Arc::clone(&legs[0]), other], Reason::Create).contains("4096"));
    assert!(fails("mirror(disk:0, disk:1)", &legs, Reason::Open).contains("it holds no mirror"));
    let graph = open("", &legs, Reason::Create);
    let service = graph.root.service.as_ref().unwrap();
    assert!(service.command("rebuild", &arguments(&[("leg", "0")])).unwrap_err().to_string().contains("in use"));
    assert!(service.command("fail", &arguments(&[("leg", "2")])).unwrap_err().to_string().contains("there are 0 to 1"));
    assert!(service.command("fail", &arguments(&[])).is_err());
    assert_eq!(
        service.command("jump", &arguments(&[])).unwrap_err().to_string(),
        "\"jump\" is no command of mirror; there are fail, rebuild, scrub, stop"
    );
}

#[test]
fn a_damaged_table_is_read_from_its_other_copy_and_a_newer_one_is_refused() {
    let legs = volumes(&faulty(2, 1024));
    drop(open("", &legs, Reason::Create));
    let region = RULES.table_region(RULES.area_of(&*legs[0]));
    // Both copies say the same, whichever is lost.
    for copy in 0..2 {
        let at = region.offset + copy * region.len / 2;
        let good = crate::legs::read(&legs[0], at, 4096).unwrap();
        let mut bad = good.clone();
        bad[40] ^= 1;
        crate::legs::write(&legs[0], at, bad).unwrap();
        let graph = open("", &legs, Reason::Open);
        assert_eq!((fact(&graph, "leg 0").as_deref(), fact(&graph, "leg 1").as_deref()), (Some("good"), Some("good")));
        let said = fact(&graph, "table of leg 0 repaired").unwrap_or_default();
        assert!(said.contains(&format!("copy {copy}")) && said.contains("is damaged"), "{said}");
        assert_eq!(fact(&graph, "table of leg 1 repaired"), None);
        drop(graph);
        // Both copies were written anew.
        assert_eq!(fact(&open("", &legs, Reason::Open), "table of leg 0 repaired"), None);
    }
    // Both are damaged: the leg is out of use, the mirror is not.
    for copy in 0..2 {
        let at = region.offset + copy * region.len / 2;
        let mut bad = crate::legs::read(&legs[0], at, 4096).unwrap();
        bad[40] ^= 1;
        crate::legs::write(&legs[0], at, bad).unwrap();
    }
    let graph = open("", &legs, Reason::Open);
    assert_eq!((fact(&graph, "leg 0").as_deref(), fact(&graph, "leg 1").as_deref()), (Some("failed"), Some("good")));
    drop(graph);
    // A newer layout: the other leg may lack what was written since.
    let region = RULES.table_region(RULES.area_of(&*legs[1]));
    let newer = Region { version: 4, ..region };
    let found = region.load(&legs[1]).unwrap().unwrap();
    newer.store(&legs[1], found.generation + 1, &found.content).unwrap();
    let held = |legs: &[Arc<dyn Volume>]| -> Vec<_> {
        legs.iter().map(|leg| crate::legs::read(leg, 0, leg.geometry().bytes() as usize).unwrap()).collect()
    };
    let before = held(&legs);
    for (stack, legs) in [("mirror(disk:0)", &legs[1..]), ("mirror(disk:0, disk:1)", &legs)] {
        let refused = fails(stack, legs, Reason::Open);
        assert!(refused.contains("layout 4") && refused.contains("use a newer millrace"), "{refused}");
    }
    assert!(held(&legs) == before, "nothing was written");
}

#[test]
fn a_damaged_bitmap_makes_everything_stale_and_nothing_wrong() {
    let legs = volumes(&faulty(2, 8192));
    let graph = open("region=64K, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 8192));
    drop(graph);
    for leg in &legs {
        let region = RULES.page_region(RULES.area_of(&**leg));
        for copy in 0..2 {
            crate::legs::write(leg, region.offset + copy * region.len / 2 + 512, vec![0xee; 512]).unwrap();
        }
    }
    let graph = open("region=64K, ", &legs, Reason::Open);
    assert_eq!(mirror(&graph).intent().unwrap().stale(), 64);
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert!(resync(&graph));
    assert_eq!(graph.tree().status.unwrap().health, Health::Good);
}

#[test]
fn legs_of_another_volume_and_legs_used_apart_are_refused() {
    let legs = volumes(&faulty(3, 1024));
    drop(open("", &legs[..2], Reason::Create));
    drop(open("", &legs[2..], Reason::Create));
    let mixed = [Arc::clone(&legs[0]), Arc::clone(&legs[2])];
    assert!(fails("mirror(disk:0, disk:1)", &mixed, Reason::Open).contains("it belongs to a mirror"));
    // Each leg alone, and both changed.
    for leg in 0..2 {
        let graph = open("", &legs[..2], Reason::Open);
        if leg == 1 {
            break;
        }
        graph.root.service.as_ref().unwrap().command("fail", &arguments(&[("leg", "1")])).unwrap();
    }
    change_record(&legs[1], |table, _| {
        table.event += 2;
        table.members[0].state = LegState::Failed;
    });
    assert!(fails("mirror(disk:0, disk:1)", &legs[..2], Reason::Open).contains("used apart from each other"));
    // The one that is trusted, alone.
    let graph = open("", &legs[..1], Reason::Open);
    assert_eq!(fact(&graph, "leg 0").as_deref(), Some("good"));
}

/// What a leg says, changed.
fn change_record(leg: &Arc<dyn Volume>, change: impl FnOnce(&mut Table, &mut usize)) {
    crate::testing::change_record(RULES, leg, change);
}

/// What it says is whole, and cannot be: no leg is so long.
#[test]
fn a_table_of_more_bytes_than_a_leg_has_is_refused_or_does_not_count() {
    const TOO_MANY: u64 = 1 << 40;
    let legs = volumes(&faulty(2, 1024));
    let made = open("", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1024));
    drop(made);
    let is_there = || {
        let made = open("", &legs, Reason::Open);
        assert_eq!((fact(&made, "leg 0").as_deref(), fact(&made, "leg 1").as_deref()), (Some("good"), Some("good")));
        on_bench(&made, |bench| bench.expect(0, &model));
    };
    let say = |bytes: u64| legs.iter().for_each(|leg| change_record(leg, |table, _| table.bytes = bytes));
    say(TOO_MANY);
    let refused = fails("mirror(disk:0, disk:1)", &legs, Reason::Open);
    assert!(refused.contains("it is of a mirror of 1099511627776 bytes, and this one has 524288"), "{refused}");
    // Nor is it opened for whoever asks for as many.
    let refused = graph("mirror(disk:0, disk:1)", &legs, Some(TOO_MANY), Reason::Open, &Arc::default()).err().unwrap();
    assert!(refused.to_string().contains("the smallest leg has 589824 bytes"), "{refused}");
    say(1024 * 512);
    is_there();
    // Regions so small that the bitmap has no room for them all.
    let cut = |shift: u32| legs.iter().for_each(|leg| change_record(leg, |table, _| table.region_shift = shift));
    cut(0);
    let refused = fails("mirror(disk:0, disk:1)", &legs, Reason::Open);
    assert!(refused.contains("regions of 2^0 bytes, too small for 524288"), "{refused}");
    cut(crate::members::region_shift(None, 1024 * 512).unwrap());
    is_there();
    // It was to grow to that, and nobody asks for it any more.
    for leg in &legs {
        change_record(leg, |table, _| table.growing = Some(TOO_MANY));
    }
    is_there();
}

#[test]
fn a_note_of_tables_that_are_not_on_the_leg_takes_it_out_of_use() {
    let note = Region { magic: RULES.note_magic.unwrap(), version: 1, ..RULES.table_region(1024 * 512) };
    // Beyond the leg, where the note is, and where nothing can be added to it.
    for area in [1 << 40, note.offset, u64::MAX - 4095] {
        let legs = volumes(&faulty(2, 1024));
        assert_eq!(RULES.area_of(&*legs[0]), note.offset);
        let made = open("", &legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&made, |bench| model = bench.write_random(0, 1024));
        let set = mirror(&made).members.on_legs().as_ref().unwrap().table.set;
        drop(made);
        (1..=2).for_each(|more| note.store(&legs[0], more, &[&set[..], &area.to_le_bytes()].concat()).unwrap());
        let refused = fails("mirror(disk:0)", &legs[..1], Reason::Open);
        assert!(refused.contains(&format!("its records are not at byte {area} any more")), "{refused}");
        let made = open("", &legs, Reason::Open);
        assert_eq!((fact(&made, "leg 0").as_deref(), fact(&made, "leg 1").as_deref()), (Some("failed"), Some("good")));
        on_bench(&made, |bench| bench.expect(0, &model));
        let service = made.root.service.as_ref().unwrap();
        service.command("rebuild", &arguments(&[("leg", "0")])).unwrap();
        assert!(resync(&made));
        assert!(legs.iter().all(|leg| data_of(leg) == model));
    }
}

#[test]
fn what_an_older_program_wrote_after_a_refused_rebuild_is_understood() {
    for (failed, taken_in) in [(0, false), (1, false), (0, true), (1, true)] {
        let legs = volumes(&faulty(2, 1024));
        let good = 1 - failed;
        let graph = open("region=64K, ", &legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        let command = |graph: &Graph, command: &str| {
            let service = graph.root.service.as_ref().unwrap();
            service.command(command, &arguments(&[("leg", &failed.to_string())])).unwrap()
        };
        command(&graph, "fail");
        on_bench(&graph, |bench| model[..512].copy_from_slice(&bench.write_random(0, 1)));
        drop(graph);
        // It was said to have failed at the first event.
        let mut said = None;
        change_record(&legs[good], |table, _| {
            table.event += 1;
            table.members[failed].failed_at = 1;
            said = Some(table.clone());
        });
        if taken_in {
            // One copy of what takes it in was stored there, of the same event.
            change_record(&legs[failed], |table, _| {
                *table = said.unwrap();
                (table.members[failed].state, table.members[failed].failed_at) = (LegState::Filling, 0);
            });
        }
        let graph = open("region=64K, ", &legs, Reason::Open);
        assert_eq!(fact(&graph, &format!("leg {failed}")).as_deref(), Some("failed"));
        on_bench(&graph, |bench| bench.expect(0, &model));
        // When it failed is not known.
        assert!(command(&graph, "rebuild").ends_with("with everything"));
        assert!(resync(&graph));
        assert!(legs.iter().all(|leg| data_of(leg) == model));
    }
}

#[test]
fn a_leg_that_went_on_apart_is_told_from_one_that_failed_at_an_unknown_event() {
    let legs = volumes(&faulty(2, 1024));
    drop(open("", &legs, Reason::Create));
    for (leg, other) in [(0, 1), (1, 0)] {
        change_record(&legs[leg], |table, _| {
            table.event += 2 + other as u64;
            (table.members[other].state, table.members[other].failed_at) = (LegState::Failed, 1);
        });
    }
    assert!(fails("mirror(disk:0, disk:1)", &legs, Reason::Open).contains("used apart from each other"));
}

#[test]
fn a_leg_that_went_on_while_the_other_one_could_not_be_read_is_told_from_one_that_is_new() {
    for [one, other] in [[1, 2], [2, 1], [1, 3]] {
        let legs = volumes(&faulty(2, 1024));
        drop(open("", &legs, Reason::Create));
        change_record(&legs[0], |table, _| {
            (table.members[1].state, table.members[1].failed_at) = (LegState::Failed, table.event + 1);
            table.event += one;
        });
        // It could not read what the first one says, and gave it another name.
        change_record(&legs[1], |table, _| {
            table.event += other;
            table.members[0] = Member { id: [9; 16], state: LegState::Failed, failed_at: table.event };
        });
        assert!(fails("mirror(disk:0, disk:1)", &legs, Reason::Open).contains("used apart from each other"));
    }
    // Which did not go on: it is filled again, even if it alone was told the last event before.
    for (lost, told) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let legs = volumes(&faulty(2, 1024));
        drop(open("", &legs, Reason::Create));
        change_record(&legs[lost], |table, _| table.event += told);
        change_record(&legs[1 - lost], |table, _| {
            table.event += 1;
            table.members[lost] = Member { id: [9; 16], state: LegState::Failed, failed_at: table.event };
        });
        let graph = open("", &legs, Reason::Open);
        assert_eq!(fact(&graph, &format!("leg {}", 1 - lost)).as_deref(), Some("good"), "{lost} {told}");
        assert!(resync(&graph));
        assert_eq!(fact(&graph, &format!("leg {lost}")).as_deref(), Some("good"));
    }
}

#[test]
fn data_that_were_there_come_to_the_new_leg() {
    let legs = faulty(2, 8192);
    let volumes = volumes(&legs);
    // The first leg was the volume, without room for tables.
    let plain = memory(Wanted { block_size: BlockSize::B512, blocks: 8192, read_only: false }, 7);
    crate::legs::write(&plain, 300 * 512, vec![7; 512]).unwrap();
    let all = [Arc::clone(&plain), Arc::clone(&volumes[1])];
    let build = Build {
        name: "new".to_owned(),
        volume: "test",
        legs: all.iter().cloned().map(Tap::new).collect(),
        stated: &[],
        sizing: &[],
        size: Some(8192 * 512),
        block_size: BlockSize::B512,
        shared: &crate::SharedObjects::default(),
    };
    let service = plan(&Settings::default()).unwrap().build(build).unwrap();
    let mount =
        Mount { reason: Reason::Change, legs: vec![LegOrigin::Data, LegOrigin::New], previous: None, reformat: false };
    service.mount(&mount).unwrap();
    assert!(service.leg_is_whole(0) && !service.leg_is_whole(1));
    assert_eq!(plain.geometry().bytes(), RULES.leg_bytes(8192 * 512), "it was lengthened");
    let service: Arc<dyn std::any::Any + Send + Sync> = service;
    let mirror: Arc<Mirror> = service.downcast().unwrap();
    let (volume, reads) = (Arc::clone(&mirror), legs[1].requests(Kind::Read));
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    bench.expect(300, &[7; 512]);
    bench.plain(Operation::WriteZeroes { fua: false, deallocate: false }, 0, 10).unwrap();
    assert_eq!(legs[1].requests(Kind::Read), reads, "what is being filled is not read");
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(MOST_LEGS).unwrap();
            assert!(mirror.resync(cx, &crate::background::Stop::default(), &pool).await);
            assert!(mirror.leg_is_whole(1));
        })
    })
    .unwrap();
    assert!(data_of(&all[0]) == data_of(&all[1]));
}

/// What the legs of a new mirror say.
fn table_of(legs: usize) -> Table {
    let members = (0..legs).map(|leg| Member { id: [leg as u8 + 1; 16], state: LegState::Good, failed_at: 0 }).collect();
    let label = "v".to_owned();
    Table {
        set: [9; 16],
        event: 1,
        bytes: 4096,
        region_shift: 22,
        label,
        members,
        form: [0; 4],
        growing: None,
        formatting: false,
    }
}

/// The marks of what the leg got may be gone, and the copy be from before that.
#[test]
fn a_copy_of_a_leg_that_was_being_filled_gets_everything() {
    let mut table = table_of(2);
    table.members[1].state = LegState::Filling;
    let found = [LegOrigin::Kept, LegOrigin::New].map(|origin| Found {
        name: format!("{origin:?}"),
        origin,
        record: Ok(Some((table.clone(), usize::from(origin == LegOrigin::New)))),
        blank: false,
        block_size: BlockSize::B512,
    });
    let shape = Shape { block_size: BlockSize::B512, more: 0 };
    let asked = Asked { bytes: 4096, region_shift: 22, label: "v", reason: Reason::Change, rules: RULES, shape };
    let decided = decide(&found, asked, &mut || [7; 16]).unwrap();
    assert!(decided.all_stale);
    assert_eq!(decided.table.members[1], Member { id: [7; 16], state: LegState::Filling, failed_at: 0 });
}

/// What it got meanwhile no mark of the others tells.
#[test]
fn a_leg_that_was_used_apart_and_is_rebuilt_gets_everything() {
    let legs = volumes(&faulty(2, 1024));
    let graph = open("region=64K, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    command(&graph, "fail", 1).unwrap();
    on_bench(&graph, |bench| model[..512].copy_from_slice(&bench.write_random(0, 1)));
    // Somebody else opened it alone, and a guest wrote there.
    change_record(&legs[1], |table, _| {
        table.event += 3;
        (table.members[0].state, table.members[0].failed_at) = (LegState::Failed, table.event);
    });
    crate::legs::write(&legs[1], 700 * 512, vec![0xee; 512]).unwrap();
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    assert!(legs.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn a_leg_that_was_used_apart_and_is_put_in_again_gets_everything() {
    let mut newest = table_of(2);
    newest.event = 11;
    (newest.members[1].state, newest.members[1].failed_at) = (LegState::Failed, 11);
    for (event, everything) in [(10, false), (11, true), (12, true)] {
        let said = Table { event, ..table_of(2) };
        let found = [(LegOrigin::Kept, &newest, 0), (LegOrigin::New, &said, 1)].map(|(origin, table, own)| Found {
            name: format!("{origin:?}"),
            origin,
            record: Ok(Some((table.clone(), own))),
            blank: false,
            block_size: BlockSize::B512,
        });
        let shape = Shape { block_size: BlockSize::B512, more: 0 };
        let asked = Asked { bytes: 4096, region_shift: 22, label: "v", reason: Reason::Change, rules: RULES, shape };
        let decided = decide(&found, asked, &mut || [7; 16]).unwrap();
        let id = if everything { [7; 16] } else { [2; 16] };
        assert_eq!(decided.table.members[1], Member { id, state: LegState::Filling, failed_at: 0 });
        assert_eq!(decided.all_stale, everything);
    }
}

/// A mirror's life on paper: legs fail, come back and miss stores of the table, and no stale leg is ever taken for good.
#[test]
fn no_history_makes_a_stale_leg_good() {
    for seed in 0..3000 {
        let mut random = conformance::Random::new(seed);
        let legs = 2 + random.below(3) as usize;
        let mut now = table_of(legs);
        let mut disks = vec![now.clone(); legs];
        let mut fresh = 100_u16;
        for _ in 0..12 {
            // A leg fails: every other one in use says so, but the power may go before all of them do.
            let good: Vec<usize> = (0..legs).filter(|leg| now.members[*leg].state == LegState::Good).collect();
            let cut = random.below(4) == 0;
            if good.len() > 1 && random.below(2) == 0 {
                let failed = good[random.below(good.len() as u64) as usize];
                now.event += 1;
                (now.members[failed].state, now.members[failed].failed_at) = (LegState::Failed, now.event);
            } else {
                now.event += 1;
                let filled = |member: &&mut Member| member.state == LegState::Filling;
                now.members.iter_mut().filter(filled).for_each(|member| member.state = LegState::Good);
            }
            let before = disks.clone();
            let mut acknowledged = true;
            for (disk, member) in disks.iter_mut().zip(&now.members) {
                if member.state != LegState::Failed {
                    if cut && random.below(2) == 0 {
                        acknowledged = false;
                        continue;
                    }
                    *disk = now.clone();
                }
            }
            let stale: Vec<bool> = now.members.iter().map(|member| member.state != LegState::Good).collect();
            let found: Vec<Found> = (0..legs)
                .map(|leg| Found {
                    name: format!("leg{leg}"),
                    origin: LegOrigin::Kept,
                    record: Ok(Some((disks[leg].clone(), leg))),
                    blank: false,
                    block_size: BlockSize::B512,
                })
                .collect();
            let shape = Shape { block_size: BlockSize::B512, more: 0 };
            let asked = Asked { bytes: 4096, region_shift: 22, label: "v", reason: Reason::Open, rules: RULES, shape };
            let mut make = || {
                fresh += 1;
                let mut id = [0; 16];
                id[..2].copy_from_slice(&fresh.to_le_bytes());
                id
            };
            let Decision { table, .. } =
                decide(&found, asked, &mut make).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            for (leg, (member, stale)) in table.members.iter().zip(&stale).enumerate() {
                let good = member.state == LegState::Good;
                assert!(!good || !stale || !acknowledged, "seed {seed}: leg {leg} missed writes: {before:?} {disks:?}");
            }
            // Open: the table is stored on all legs in use; those that failed may be added again.
            now = table;
            now.event += 1;
            for member in &mut now.members {
                if member.state == LegState::Failed && random.below(3) == 0 {
                    (member.state, member.failed_at) = (LegState::Filling, 0);
                }
            }
            for (disk, member) in disks.iter_mut().zip(&now.members) {
                if member.state != LegState::Failed {
                    *disk = now.clone();
                }
            }
        }
    }
}

/// The way back of a change that has overwritten them.
#[test]
fn without_its_tables_it_answers_no_request() {
    let legs = volumes(&faulty(2, 1024));
    let graph = open("", &legs, Reason::Create);
    let error = answers_nobody_without(RULES, RULES.area, &legs, &graph);
    assert!(error.contains("it holds no mirror"), "{error}");
}
