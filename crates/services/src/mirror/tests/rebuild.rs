//! Legs that come back, whatever happens meanwhile.

use std::{thread, time::Duration};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, BlockError, Lba, Operation};

use super::{
    failures::{WRITE_FAULT, pull},
    *,
};
use crate::testing::waiting::{stop_half_way, until, write_around};

pub(super) fn command(graph: &Graph, command: &str, leg: usize) -> Result<String, crate::ServiceError> {
    graph.root.service.as_ref().unwrap().command(command, &arguments(&[("leg", &leg.to_string())]))
}

pub(super) fn state(graph: &Graph, leg: usize) -> String {
    fact(graph, &format!("leg {leg}")).unwrap()
}

/// Takes a leg in again, which lacks only what it missed.
fn come_back(graph: &Graph, leg: usize) {
    assert!(command(graph, "rebuild", leg).unwrap().ends_with("with what it missed"));
    assert!(resync(graph));
    assert_eq!(state(graph, leg), "good");
}

/// Upkeep looks whether marks can go.
pub(super) fn look_at_marks(graph: &Graph) {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| Box::pin(async move { mirror.members.take_marks_away(cx).await })).unwrap();
}

/// A leg is taken in again while a write that began without it is on its way, and something else is done then.
fn rebuild_beside(upkeep: impl Fn(&Graph) + Sync) {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    let (graph, upkeep) = (&graph, &upkeep);
    let (mut model, mut data) = (Vec::new(), Vec::new());
    on_bench(graph, |bench| {
        model = bench.write_random(0, 1024);
        command(graph, "fail", 0).unwrap();
        // What it missed is here, and in the write that is on its way.
        model[512 * 512..520 * 512].copy_from_slice(&bench.write_random(512, 8));
        data = bench.random.bytes(8 * 512);
    });
    let slow = Effect::Delay(Duration::from_secs(1));
    legs[1].add(Rule { range: Some((Lba(0), BlockCount(1024))), ..Rule::new(Kind::Write, When::Always, slow) });
    thread::scope(|scope| {
        write_around(graph.volume(), &legs[1], &data, || {
            let rebuild = scope.spawn(move || command(graph, "rebuild", 0).unwrap());
            until("the leg is written again", || mirror(graph).masks().writable == 3);
            let beside = scope.spawn(move || upkeep(graph));
            until("what is done beside it is over", || beside.is_finished());
            assert!(!rebuild.is_finished(), "it waits for the write");
        });
    });
    model[..data.len()].copy_from_slice(&data);
    legs[1].clear();
    assert!(resync(graph));
    assert_eq!(state(graph, 0), "good");
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn upkeep_beside_a_rebuild_takes_no_unfilled_leg_for_a_good_one() {
    rebuild_beside(|graph| {
        resync(graph);
        assert_eq!(state(graph, 0), "being filled");
    });
}

#[test]
fn upkeep_beside_a_rebuild_does_not_forget_what_the_leg_missed() {
    rebuild_beside(|graph| (0..2).for_each(|_| look_at_marks(graph)));
}

#[test]
fn marks_stay_when_a_leg_cannot_make_durable_what_they_stand_for() {
    for seed in 0..8 {
        let wanted = Wanted { block_size: BlockSize::B512, blocks: leg_blocks(1024, BlockSize::B512), read_only: false };
        let legs: Vec<_> = (0..2).map(|leg| FaultVolume::new(memory(wanted, leg), seed)).collect();
        let volumes = volumes(&legs);
        let graph = open("region=64K, ", &volumes, Reason::Create);
        legs[1].hold_writes();
        let mut model = vec![0; 1024 * 512];
        on_bench(&graph, |bench| model[..100 * 512].copy_from_slice(&bench.write_random(0, 100)));
        look_at_marks(&graph);
        legs[1].add(Rule::new(Kind::Flush, When::Always, Effect::Fail(WRITE_FAULT)));
        assert!(legs[1].power_loss() > 0);
        look_at_marks(&graph);
        assert_eq!(state(&graph, 1), "failed");
        legs[1].clear();
        come_back(&graph, 1);
        assert!(volumes.iter().all(|leg| data_of(leg) == model), "seed {seed}");
    }
}

#[test]
fn a_leg_that_was_out_of_use_during_a_format_comes_back_empty() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let legs = faulty(3, 1024);
        let volumes = volumes(&legs);
        let graph = open("", &volumes, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 100));
        command(&graph, "fail", 2).unwrap();
        graph.volume().format(block_size).unwrap();
        assert_eq!(state(&graph, 2), "failed");
        assert!(command(&graph, "rebuild", 2).unwrap().ends_with("with everything"));
        on_bench(&graph, |bench| bench.expect_zeroes(0, bench.blocks()));
        assert!(resync(&graph));
        assert_eq!(state(&graph, 2), "good");
        assert!(volumes.iter().all(|leg| data_of(leg).iter().all(|byte| *byte == 0)));
        drop(graph);
        let graph = open("", &volumes, Reason::Open);
        assert_eq!(state(&graph, 2), "good");
    }
}

#[test]
fn a_leg_that_was_filled_knows_what_others_miss_when_it_is_the_last_one() {
    let legs = volumes(&faulty(2, 1024));
    let graph = open("region=64K, ", &legs, Reason::Create);
    let write = |graph: &Graph, content: u8| {
        on_bench(graph, |bench| bench.write(200, &[content; 512]).unwrap());
    };
    command(&graph, "fail", 0).unwrap();
    write(&graph, 1);
    come_back(&graph, 0);
    command(&graph, "fail", 1).unwrap();
    write(&graph, 2);
    drop(graph);
    let graph = open("region=64K, ", &legs, Reason::Open);
    come_back(&graph, 1);
    assert!(legs.iter().all(|leg| data_of(leg)[200 * 512..201 * 512] == [2; 512]));
}

#[test]
fn a_rebuild_that_the_leg_refuses_changes_nothing() {
    // It refuses everything, or only the second copy of its table.
    for all in [true, false] {
        let legs = faulty(2, 1024);
        let volumes = volumes(&legs);
        let graph = open("region=64K, ", &volumes, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            pull(&legs[1]);
            model[..512].copy_from_slice(&bench.write_random(0, 1));
        });
        if !all {
            legs[1].clear();
            let range = Some((Lba(1024), BlockCount(64)));
            legs[1].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(2), Effect::Fail(WRITE_FAULT)) });
        }
        assert!(command(&graph, "rebuild", 1).is_err());
        assert_eq!(state(&graph, 1), "failed");
        drop(graph);
        legs[1].clear();
        let graph = open("region=64K, ", &volumes, Reason::Open);
        assert_eq!(state(&graph, 1), "failed");
        come_back(&graph, 1);
        assert!(volumes.iter().all(|leg| data_of(leg) == model));
    }
}

/// Brings half of what is to be done in order, and is told to stop.
pub(super) fn resync_half(graph: &Graph) {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let (stop, pool) = (crate::background::Stop::default(), millrace_memory::BufferPool::new(MOST_LEGS).unwrap());
            let intent = mirror.members.intent().unwrap();
            stop_half_way(intent, &stop, Box::pin(mirror.resync(cx, &stop, &pool))).await
        })
    })
    .unwrap();
}

#[test]
fn what_was_filled_before_a_close_is_not_filled_again() {
    let legs = volumes(&faulty(2, 8192));
    let graph = open("region=64K, rate=1T, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 8192));
    // All is marked, and was not written since.
    look_at_marks(&graph);
    command(&graph, "fail", 1).unwrap();
    crate::legs::write(&legs[1], 0, vec![0xee; 8192 * 512]).unwrap();
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    assert_eq!(mirror(&graph).intent().unwrap().stale(), 64);
    resync_half(&graph);
    graph.root.service.as_ref().unwrap().unmount().unwrap();
    drop(graph);
    let graph = open("region=64K, rate=1T, ", &legs, Reason::Open);
    let left = mirror(&graph).intent().unwrap().stale();
    assert!((1..=32).contains(&left), "{left}");
    assert_eq!(state(&graph, 1), "being filled");
    assert!(resync(&graph));
    assert_eq!(state(&graph, 1), "good");
    assert!(legs.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn a_rebuild_of_a_leg_that_is_gone_does_not_mark_everything() {
    let legs = faulty(2, 8192);
    let volumes = volumes(&legs);
    let graph = open("region=64K, rate=1T, ", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 8192));
    (0..2).for_each(|_| look_at_marks(&graph));
    on_bench(&graph, |bench| {
        pull(&legs[1]);
        model[..512].copy_from_slice(&bench.write_random(0, 1));
    });
    assert!(command(&graph, "rebuild", 1).is_err());
    assert_eq!(mirror(&graph).intent().unwrap().marked(), 1);
    legs[1].clear();
    come_back(&graph, 1);
    // What it says cannot be read, and can be written.
    command(&graph, "fail", 1).unwrap();
    let range = Some((Lba(8192), BlockCount(128)));
    let unread = Effect::Fail(BlockError::ReadFault { errno: 5 });
    legs[1].add(Rule { range, ..Rule::new(Kind::Read, When::Always, unread) });
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with everything"));
    legs[1].clear();
    assert!(resync(&graph));
    assert_eq!(state(&graph, 1), "good");
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
}

#[test]
fn a_format_beside_a_resync_leaves_nothing_of_what_was_there() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let legs = faulty(2, 1024);
        let volumes = volumes(&legs);
        let graph = open("region=64K, ", &volumes, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        // The first piece is to be made equal, which takes a while.
        crate::legs::write(&volumes[1], 4096, vec![0xee; 4096]).unwrap();
        mirror(&graph).intent().unwrap().suspect(&(0..=7));
        let slow = Effect::Delay(Duration::from_millis(200));
        legs[1].add(Rule { range: Some((Lba(0), BlockCount(16))), ..Rule::new(Kind::Write, When::Nth(1), slow) });
        thread::scope(|scope| {
            let before = legs[1].requests(Kind::Write);
            let resync = scope.spawn(|| resync(&graph));
            until("the piece is written", || legs[1].requests(Kind::Write) > before);
            graph.volume().format(block_size).unwrap();
            assert!(resync.join().unwrap());
        });
        assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("good", "good"));
        assert!(volumes.iter().all(|leg| data_of(leg).iter().all(|byte| *byte == 0)));
        on_bench(&graph, |bench| bench.expect_zeroes(0, bench.blocks()));
    }
}

/// Each may have lost something else: they are made alike again, and until then all reads go to one.
#[test]
fn legs_that_all_refuse_a_flush_are_compared() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    for leg in &legs {
        leg.hold_writes();
    }
    on_bench(&graph, |bench| {
        bench.write_random(0, 400);
        for leg in &legs {
            leg.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        }
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(WRITE_FAULT));
    });
    for leg in &legs {
        assert!(leg.power_loss() > 0);
        leg.clear();
    }
    assert!(data_of(&volumes[0]) != data_of(&volumes[1]));
    on_bench(&graph, |bench| bench.plain(Operation::Flush, 0, 0).unwrap());
    assert!(mirror(&graph).intent().unwrap().stale() > 0);
    assert!(resync(&graph));
    assert!(data_of(&volumes[0]) == data_of(&volumes[1]));
}

/// A leg that, once it has failed a flush, fails all of them until what it lost is written anew, or, where it cannot be sure of that, for good.
struct Sticky(Arc<FaultVolume>, std::sync::atomic::AtomicBool, bool);

impl Volume for Sticky {
    millrace_block::passes_on!(0);

    fn submit<'a>(
        &'a self,
        cx: millrace_block::TaskContext<'a>,
        request: millrace_block::Request<'a>,
    ) -> millrace_block::Step<'a> {
        if request.operation == Operation::Flush && self.1.load(Ordering::Relaxed) {
            return millrace_block::Step::Done(Err(WRITE_FAULT));
        }
        self.0.submit(cx, request)
    }

    fn trust_again(&self) -> bool {
        self.1.fetch_and(!self.2, Ordering::Relaxed);
        !self.1.load(Ordering::Relaxed)
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }
}

/// As a file does.
#[test]
fn a_leg_that_fails_every_flush_after_one_is_taken_in_again() {
    for can_be_sure in [true, false] {
        let legs = faulty(2, 1024);
        let sticky = Arc::new(Sticky(Arc::clone(&legs[1]), false.into(), can_be_sure));
        let volumes: Vec<Arc<dyn Volume>> =
            vec![Arc::<FaultVolume>::clone(&legs[0]) as _, Arc::<Sticky>::clone(&sticky) as _];
        let graph = open("region=64K, ", &volumes, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            legs[1].hold_writes();
            model = bench.write_random(0, 1024);
            sticky.1.store(true, Ordering::Relaxed);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        assert_eq!(state(&graph, 1), "failed");
        assert!(legs[1].power_loss() > 0);
        if can_be_sure {
            come_back(&graph, 1);
            on_bench(&graph, |bench| bench.plain(Operation::Flush, 0, 0).unwrap());
            assert!(volumes.iter().all(|leg| data_of(leg) == model));
        } else {
            let said = command(&graph, "rebuild", 1).unwrap_err().to_string();
            assert!(said.contains("until it is opened anew"), "{said}");
        }
        assert_eq!(state(&graph, 1), if can_be_sure { "good" } else { "failed" });
    }
}

/// The leg that has all data has lost some, while another one is filled from it: the guest is told, and they become alike.
#[test]
fn a_flush_of_the_mirrors_own_that_the_last_good_leg_refuses_is_the_guests_matter() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let graph = open("region=64K, ", &volumes, Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    command(&graph, "fail", 1).unwrap();
    on_bench(&graph, |bench| _ = bench.write_random(0, 8));
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    legs[0].hold_writes();
    on_bench(&graph, |bench| _ = bench.write_random(512, 100));
    look_at_marks(&graph);
    legs[0].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
    look_at_marks(&graph);
    assert_eq!((legs[0].faults(), state(&graph, 0).as_str()), (1, "good"), "it has to stay");
    assert!(legs[0].power_loss() > 0);
    legs[0].clear();
    on_bench(&graph, |bench| {
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    assert!(resync(&graph));
    assert_eq!(state(&graph, 1), "good");
    assert!(data_of(&volumes[0]) == data_of(&volumes[1]));
}
