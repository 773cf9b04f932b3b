//! Formats: of sizes that do not fit, with legs that fail or are out of use, and with the power cut in the middle.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba, VolumeError};

use super::{
    failures::{WRITE_FAULT, pull},
    *,
};
use crate::{
    members::state::Table,
    service::Health,
    testing::{FormatCut, Formatted, Rig, graph_of_blocks},
};

const BOTH: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];

fn command(graph: &Graph, command: &str, leg: usize) -> Result<String, ServiceError> {
    graph.root.service.as_ref().unwrap().command(command, &arguments(&[("leg", &leg.to_string())]))
}

fn state(graph: &Graph, leg: usize) -> String {
    fact(graph, &format!("leg {leg}")).unwrap()
}

fn open_with(legs: &[Arc<dyn Volume>], block_size: BlockSize, size: u64, reason: Reason) -> Graph {
    let stack = stack("region=64K, rate=1T, ", legs.len());
    let made = graph_of_blocks(block_size, &stack, legs, Some(size), reason, &Arc::default());
    made.unwrap_or_else(|error| panic!("{error}"))
}

fn scrub(graph: &Graph) -> Scrub {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move { mirror.scrub_all(cx, &millrace_memory::BufferPool::new(MOST_LEGS).unwrap()).await })
    })
    .unwrap()
}

#[test]
fn what_does_not_fill_a_larger_block_is_left_out_for_good() {
    for (before, after) in [(1023, 127), (1017, 127), (1024, 128), (1025, 128)] {
        let legs = volumes(&faulty(2, before));
        let graph = open_with(&legs, BlockSize::B512, before * 512, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, before));
        graph.volume().format(BlockSize::B4096).unwrap();
        assert_eq!(graph.volume().geometry().blocks.0, after);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, after));
        mirror(&graph).intent().unwrap().suspect(&(0..=7));
        assert!(resync(&graph));
        assert_eq!(scrub(&graph).differing, 0);
        command(&graph, "fail", 0).unwrap();
        command(&graph, "rebuild", 0).unwrap();
        assert!(resync(&graph));
        drop(graph);
        // So large it is for whoever opens it.
        let graph = open_with(&legs, BlockSize::B4096, after * 4096, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &model));
        assert!((0..2).all(|leg| state(&graph, leg) == "good"));
        graph.volume().resize(BlockCount(after + 100)).unwrap();
        on_bench(&graph, |bench| {
            bench.expect_zeroes(after, 100);
            model = bench.write_random(0, after + 100);
        });
        assert!(resync(&graph));
        assert!(legs.iter().all(|leg| data_of(leg)[..model.len()] == model));
        graph.volume().format(BlockSize::B512).unwrap();
        assert_eq!(graph.volume().geometry().blocks.0, (after + 100) * 8);
        drop(graph);
        drop(open_with(&legs, BlockSize::B512, (after + 100) * 4096, Reason::Open));
    }
    let legs = volumes(&faulty(2, 1024));
    let graph = open_with(&legs, BlockSize::B512, 7 * 512, Reason::Create);
    assert!(matches!(graph.volume().format(BlockSize::B4096), Err(VolumeError::BadBlockSize { .. })));
    assert_eq!(graph.volume().geometry().blocks.0, 7);
}

#[test]
fn a_volume_of_which_only_the_owner_knows_the_size_after_a_format_opens() {
    // It was formatted by a program that did not say so on the legs.
    let legs = volumes(&faulty(2, 1023));
    let graph = open_with(&legs, BlockSize::B512, 1023 * 512, Reason::Create);
    graph.volume().format(BlockSize::B4096).unwrap();
    mirror(&graph).members.on_legs().as_mut().unwrap().table.bytes = 1023 * 512;
    mirror(&graph).members.store_all(false).unwrap();
    drop(graph);
    for _ in 0..2 {
        let graph = open_with(&legs, BlockSize::B4096, 127 * 4096, Reason::Open);
        on_bench(&graph, |bench| bench.expect_zeroes(0, 127));
    }
    let smaller =
        graph_of_blocks(BlockSize::B4096, &stack("region=64K, ", 2), &legs, Some(126 * 4096), Reason::Open, &Arc::default());
    assert!(smaller.is_err(), "that is another size");
}

fn legs_are_equal(graph: &Graph, rig: &Rig) {
    let bytes = graph.volume().geometry().bytes() as usize;
    let all: Vec<_> = rig.volumes().iter().map(|leg| data_of(leg)[..bytes].to_vec()).collect();
    assert!(all.iter().all(|data| *data == all[0]), "the legs differ");
}

#[test]
fn a_power_cut_in_a_format_leaves_everything_or_nothing() {
    for (disks, failed) in [(2, None), (2, Some(0)), (2, Some(1)), (3, None), (3, Some(1))] {
        for (blocks, keep_blocks) in BOTH
            .into_iter()
            .flat_map(|before| BOTH.into_iter().flat_map(move |after| [false, true].map(|keep| ((before, after), keep))))
        {
            let size = if blocks.0 == BlockSize::B512 { 150 * 512 } else { 19 * 4096 };
            FormatCut {
                stack: &stack("region=64K, rate=1T, ", disks),
                disks,
                disk_bytes: RULES.leg_bytes(size),
                size,
                failed,
                blocks,
                keep_blocks,
                resync: &resync,
                verify: &legs_are_equal,
            }
            .test(0..3);
        }
    }
}

/// These legs, the next format of one of which fails: before it begins, or half way.
fn stubborn(legs: &[Arc<dyn Volume>], which: usize, half_way: bool) -> Vec<Arc<dyn Volume>> {
    let mut legs = legs.to_vec();
    let refused = AtomicBool::new(false);
    legs[which] = Formatted::over(&legs[which], move |leg, block_size| {
        if refused.swap(true, Ordering::Relaxed) {
            return leg.format(block_size);
        }
        if !half_way {
            return Err(VolumeError::Unsupported { volume: leg.name().to_owned(), what: "formatting" });
        }
        crate::legs::write(leg, 0, vec![0; 1 << 16]).unwrap();
        let source = std::io::Error::from_raw_os_error(5);
        Err(VolumeError::Io { volume: leg.name().to_owned(), action: "erase", path: "it".into(), source })
    });
    legs
}

#[test]
fn a_leg_that_fails_during_a_format_is_left_out_and_comes_back_empty() {
    for (leg, half_way) in [(0, true), (1, true), (1, false)] {
        let plain = volumes(&faulty(2, 1024));
        let legs = stubborn(&plain, leg, half_way);
        let graph = open_with(&legs, BlockSize::B512, 1024 * 512, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        graph.volume().format(BlockSize::B4096).unwrap();
        assert_eq!(state(&graph, leg), "failed");
        on_bench(&graph, |bench| (0..2).for_each(|_| bench.expect_zeroes(0, 128)));
        drop(graph);
        // Its blocks are what they were.
        let graph = open_with(&legs, BlockSize::B4096, 1024 * 512, Reason::Open);
        assert_eq!((state(&graph, leg).as_str(), state(&graph, 1 - leg).as_str()), ("failed", "good"));
        let said = fact(&graph, &format!("leg {leg} has blocks of")).unwrap();
        assert!(said.starts_with("512 bytes, and the others of 4096"), "{said}");
        on_bench(&graph, |bench| (0..2).for_each(|_| bench.expect_zeroes(0, 128)));
        assert!(command(&graph, "rebuild", leg).unwrap().ends_with("with everything"));
        assert!(resync(&graph));
        assert_eq!(graph.tree().status.unwrap().health, Health::Good);
        assert!(plain.iter().all(|leg| data_of(leg).iter().all(|byte| *byte == 0)));
    }
}

#[test]
fn a_format_that_no_leg_can_leaves_equal_legs() {
    // The only leg in use; half of it is erased, or nothing.
    for half_way in [true, false] {
        let plain = volumes(&faulty(2, 1024));
        let legs = stubborn(&plain, 0, half_way);
        let graph = open_with(&legs, BlockSize::B512, 1024 * 512, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        command(&graph, "fail", 1).unwrap();
        assert!(graph.volume().format(BlockSize::B4096).is_err());
        if half_way {
            model[..1 << 16].fill(0);
        }
        for reason in ["now", "after a restart"] {
            let again = (reason != "now").then(|| open_with(&legs, BlockSize::B512, 1024 * 512, Reason::Open));
            let graph = again.as_ref().unwrap_or(&graph);
            assert_eq!((state(graph, 0).as_str(), state(graph, 1).as_str()), ("good", "failed"), "{reason}");
            on_bench(graph, |bench| bench.expect(0, &model));
        }
        drop(graph);
        let graph = open_with(&legs, BlockSize::B512, 1024 * 512, Reason::Open);
        command(&graph, "rebuild", 1).unwrap();
        assert!(resync(&graph));
        assert!(plain.iter().all(|leg| data_of(leg) == model));
    }
}

#[test]
fn a_format_that_the_legs_cannot_note_changes_nothing() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open_with(&volumes, BlockSize::B512, 1024 * 512, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    pull(&legs[1]);
    command(&graph, "fail", 1).unwrap();
    // The other one could come back with what it has, when the power goes before the only one that is left has its tables again.
    let refused = graph.volume().format(BlockSize::B4096).unwrap_err().to_string();
    assert!(refused.contains("leg 1") && refused.contains("out of use"), "{refused}");
    on_bench(&graph, |bench| bench.expect(0, &model));
    graph.volume().format(BlockSize::B512).unwrap();
    on_bench(&graph, |bench| {
        bench.expect_zeroes(0, 1024);
        model = bench.write_random(0, 1024);
    });
    // The tables cannot be written at all.
    let range = Some((Lba(1024), BlockCount(128)));
    legs[0].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(2), Effect::Fail(WRITE_FAULT)) });
    assert!(graph.volume().format(BlockSize::B512).is_err());
    on_bench(&graph, |bench| bench.expect(0, &model));
    drop(graph);
    for leg in &legs {
        leg.clear();
    }
    let graph = open_with(&volumes, BlockSize::B512, 1024 * 512, Reason::Open);
    assert_eq!(state(&graph, 1), "failed");
    on_bench(&graph, |bench| bench.expect(0, &model));
    // It is erased around its tables, and refuses that: too few are left without it.
    legs[0].add(Rule::new(Kind::WriteZeroes, When::Nth(1), Effect::Fail(WRITE_FAULT)));
    assert!(graph.volume().format(BlockSize::B512).is_err());
    on_bench(&graph, |bench| bench.expect(0, &model));
    drop(graph);
    let graph = open_with(&volumes, BlockSize::B512, 1024 * 512, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Another one that cannot be begun would bring the legs back as they are.
#[test]
fn a_format_that_stopped_half_way_is_followed_by_an_opening_and_nothing_else() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open_with(&volumes, BlockSize::B512, 1024 * 512, Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
    command(&graph, "fail", 1).unwrap();
    // It is told of the format, formatted, and then cannot be told again.
    legs[0].add(Rule::new(Kind::Write, When::Nth(4), Effect::Fail(WRITE_FAULT)));
    assert!(graph.volume().format(BlockSize::B4096).is_err());
    assert_eq!(mirror(&graph).masks(), Masks::default());
    legs[0].add(Rule::new(Kind::WriteZeroes, When::Nth(1), Effect::Fail(WRITE_FAULT)));
    let refused = graph.volume().format(BlockSize::B4096).unwrap_err().to_string();
    assert!(refused.contains("stopped half way: open the volume again"), "{refused}");
    assert_eq!(mirror(&graph).masks(), Masks::default());
    drop(graph);
    legs[0].clear();
    let graph = open_with(&volumes, BlockSize::B4096, 1024 * 512, Reason::Open);
    assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("good", "failed"));
    on_bench(&graph, |bench| bench.expect_zeroes(0, 128));
}

/// What they have to do was reckoned before a format that they waited for.
#[test]
fn upkeep_has_nothing_to_do_where_the_end_was_left_out() {
    let legs = volumes(&faulty(2, 1027));
    let graph = open_with(&legs, BlockSize::B512, 1027 * 512, Reason::Create);
    graph.volume().format(BlockSize::B4096).unwrap();
    let mirror = mirror(&graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(MOST_LEGS).unwrap();
            for (at, blocks) in [(1024, 3), (1016, 11)] {
                let (stop, bytes) = (crate::background::Stop::default(), at * 512..(at + blocks) * 512);
                let (done, synced) = mirror.sync_piece(cx, &stop, &pool, bytes.clone()).await;
                assert_eq!((done, synced), (blocks * 512, Ok(())));
                assert_eq!(mirror.scrub_piece(cx, &stop, &pool, bytes).await, blocks * 512);
            }
        })
    })
    .unwrap();
    on_bench(&graph, |bench| bench.expect_zeroes(0, 128));
}

#[test]
fn the_only_leg_left_is_formatted_when_those_out_of_use_know() {
    for is_there in [true, false] {
        let legs = faulty(3, 1024);
        let volumes = volumes(&legs);
        let graph = open_with(&volumes, BlockSize::B512, 1024 * 512, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        command(&graph, "fail", 2).unwrap();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        if !is_there {
            pull(&legs[2]);
        }
        // It is told of the format, formatted, and then cannot be told again.
        legs[0].add(Rule::new(Kind::Write, When::Nth(4), Effect::Fail(WRITE_FAULT)));
        assert_eq!(graph.volume().format(BlockSize::B4096).is_ok(), is_there);
        assert_eq!(["failed", "good", "failed"].to_vec(), (0..3).map(|leg| state(&graph, leg)).collect::<Vec<_>>());
        drop(graph);
        legs[2].clear();
        let region = RULES.table_region(RULES.area_of(&*volumes[2]));
        let (said, _) = Table::decode(&region.load(&volumes[2]).unwrap().unwrap().content).unwrap();
        assert_eq!(said.formatting, is_there);
        let block_size = if is_there { BlockSize::B4096 } else { BlockSize::B512 };
        let graph = open_with(&volumes, block_size, 1024 * 512, Reason::Open);
        let left = if is_there { vec![0; 1024 * 512] } else { model };
        on_bench(&graph, |bench| bench.expect(0, &left));
        // A leg that has nothing at all is filled without being asked.
        for leg in (0..3).filter(|leg| state(&graph, *leg) == "failed").collect::<Vec<_>>() {
            command(&graph, "rebuild", leg).unwrap();
        }
        assert!(resync(&graph));
        (0..3).for_each(|leg| assert_eq!(state(&graph, leg), "good"));
        assert!(volumes.iter().all(|leg| data_of(leg) == left));
    }
}

#[test]
fn a_leg_of_other_blocks_is_refused_where_none_was_formatted_without_it() {
    let legs = volumes(&faulty(2, 1024));
    drop(open_with(&legs, BlockSize::B512, 1024 * 512, Reason::Create));
    legs[1].format(BlockSize::B4096).unwrap();
    let open = |legs: &[Arc<dyn Volume>], block_size, reason| {
        let made = graph_of_blocks(block_size, &stack("", legs.len()), legs, Some(1024 * 512), reason, &Arc::default());
        made.map_err(|error| error.to_string())
    };
    // It is new, and the volume too.
    let refused = open(&legs, BlockSize::B512, Reason::Create).err().unwrap();
    assert!(refused.contains("blocks of 4096 bytes"), "{refused}");
    // It was replaced by something else: what is there is nobody's to erase.
    let graph = open(&legs, BlockSize::B512, Reason::Open).unwrap();
    assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("good", "failed"));
    drop(graph);
    let refused = open(&legs[1..], BlockSize::B512, Reason::Open).err().unwrap();
    assert!(refused.contains("blocks of 4096 bytes"), "{refused}");
}
