//! Work beside requests comes to its end, and keeps no other from being done.

use std::{sync::atomic::AtomicBool, thread};

use millrace_backends::fault::Kind;
use millrace_block::Operation;

use super::{
    rebuild::{command, state},
    *,
};
use crate::testing::{
    Bench as Means, Kept, Session,
    waiting::{Gate, erase_beside, keep_busy, until, write_at_once},
};

/// What upkeep does of a scrub at a time.
fn scrub_a_while(graph: &Graph) {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(MOST_LEGS).unwrap();
            mirror.scrub_if_asked(cx, &crate::background::Stop::default(), &pool).await
        })
    })
    .unwrap();
}

/// As many legs as there can be, each of which needs buffers of its own: nobody has looked yet what lies there, and something does not fit.
#[test]
fn a_scrub_of_as_many_legs_as_there_can_be_comes_to_its_end() {
    let disk = |at| MemoryVolume::create(&format!("disk{at}"), 2 << 20, BlockSize::B512).unwrap() as Arc<dyn Volume>;
    let disks: Vec<_> = (0..MOST_LEGS).map(disk).collect();
    let legs = (0..MOST_LEGS).map(|leg| format!("integrity(disk:{leg})")).collect::<Vec<_>>().join(", ");
    let (stack, kept) = (format!("mirror(rate=1T, {legs})"), Arc::<Kept>::default());
    let open = |reason| graph(&stack, &disks, Some(512 << 10), reason, &kept).unwrap_or_else(|error| panic!("{error}"));
    let mut made = open(Reason::Create);
    let mut data = Vec::new();
    on_bench(&made, |bench| data = bench.write_random(0, 1024));
    kept.forget();
    made.unmount();
    drop(made);
    let bytes = crate::legs::read(&disks[3], 0, 2 << 20).unwrap();
    let block = bytes.chunks(512).position(|block| *block == data[700 * 512..701 * 512]).expect("it lies there");
    crate::legs::write(&disks[3], block as u64 * 512, vec![0xee; 512]).unwrap();
    let made = open(Reason::Open);
    let means = Means::new(SEED);
    let mut session = Session::new(&means, &kept, SEED);
    mirror(&made).start_scrub();
    session.settle_until_done(&made, 100_000);
    let scrub = mirror(&made).scrub().clone();
    assert_eq!((scrub.running, scrub.finished, scrub.repaired, scrub.differing), (false, 1, 1, 0));
}

#[test]
fn a_scrub_makes_way_where_legs_may_differ_and_goes_on_where_it_was() {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: leg_blocks(8192, BlockSize::B512), read_only: false };
    let gate = Gate::before(memory(wanted, 0), |operation| operation == Operation::Read);
    let mut legs = faulty(2, 8192);
    legs[0] = FaultVolume::new(Arc::<Gate>::clone(&gate), SEED);
    let graph = open("region=64K, rate=1T, ", &volumes(&legs), Reason::Create);
    let mirror = mirror(&graph);
    mirror.start_scrub();
    gate.open.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let before = legs[0].requests(Kind::Read);
        let scrub = scope.spawn(|| scrub_a_while(&graph));
        until("the first piece is read", || legs[0].requests(Kind::Read) > before);
        mirror.intent().unwrap().suspect(&(0..=0));
        gate.open.store(true, Ordering::Relaxed);
        scrub.join().unwrap();
    });
    let scrub = mirror.scrub().clone();
    assert!(scrub.running && scrub.at > 0, "{scrub:?}");
    assert!(resync(&graph));
    let at = scrub.at;
    loop {
        scrub_a_while(&graph);
        let scrub = mirror.scrub().clone();
        assert!(scrub.at > at);
        if !scrub.running {
            assert_eq!((scrub.finished, scrub.differing), (1, 0));
            break;
        }
    }
}

/// As writes that fail make them differ.
#[test]
fn a_scrub_goes_on_where_legs_come_to_differ_again_and_again() {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: leg_blocks(8192, BlockSize::B512), read_only: false };
    let gate = Gate::before(memory(wanted, 0), |operation| operation == Operation::Read);
    let mut legs = faulty(2, 8192);
    legs[0] = FaultVolume::new(Arc::<Gate>::clone(&gate), SEED);
    let graph = open("region=64K, rate=1T, ", &volumes(&legs), Reason::Create);
    let mirror = mirror(&graph);
    mirror.start_scrub();
    let ends = [(); 2].map(|()| {
        gate.open.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            let before = legs[0].requests(Kind::Read);
            let scrub = scope.spawn(|| scrub_a_while(&graph));
            until("a piece is read", || legs[0].requests(Kind::Read) > before);
            mirror.intent().unwrap().suspect(&(0..=0));
            gate.open.store(true, Ordering::Relaxed);
            scrub.join().unwrap();
        });
        assert!(resync(&graph));
        mirror.scrub().at
    });
    assert!(ends[1] > 2 * ends[0], "the second turn was one piece long as well: {ends:?}");
}

/// Where others are always at work a long range is never free as a whole.
#[test]
fn an_erasure_goes_on_beside_who_has_a_part_of_it() {
    let legs = faulty(2, 8192);
    let graph = open("", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 8192));
    let mirror = mirror(&graph);
    erase_beside(&mirror.members.ranges, 3 << 20..(3 << 20) + 4096, &legs[0], || {
        let zeroes = Operation::WriteZeroes { fua: false, deallocate: true };
        on_bench(&graph, |bench| bench.plain(zeroes, 0, 8192).unwrap());
    });
    on_bench(&graph, |bench| bench.expect_zeroes(0, 8192));
}

/// Somebody always has a part of the first piece.
#[test]
fn resync_and_scrub_go_on_beside_who_is_always_at_work() {
    let legs = volumes(&faulty(2, 1024));
    let graph = open("region=64K, rate=1T, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    crate::legs::write(&legs[1], 0, vec![0xee; 1024 * 512]).unwrap();
    let mirror = mirror(&graph);
    mirror.intent().unwrap().suspect_all();
    keep_busy(&mirror.members.ranges, || {
        thread::scope(|scope| {
            let resync = scope.spawn(|| resync(&graph));
            until("all is made equal", || resync.is_finished());
            assert!(resync.join().unwrap());
            assert!(legs.iter().all(|leg| data_of(leg) == model));
            mirror.start_scrub();
            let scrub = scope.spawn(|| scrub_a_while(&graph));
            until("all is compared", || scrub.is_finished());
        });
    });
    let scrub = mirror.scrub().clone();
    assert_eq!((scrub.running, scrub.finished, scrub.differing), (false, 1, 0));
}

/// What was copied may take long to become durable. The write stores the mark of its region, and so flushes the leg as well.
#[test]
fn a_write_to_a_new_region_does_not_wait_for_what_was_filled() {
    static HOLDS_ONE: AtomicBool = AtomicBool::new(false);
    let legs = volumes(&faulty(2, 1024));
    let gate = Gate::before(Arc::clone(&legs[1]), |operation| {
        operation == Operation::Flush && HOLDS_ONE.swap(false, Ordering::Relaxed)
    });
    let second: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let graph = open("region=64K, ", &[Arc::clone(&legs[0]), second], Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 128));
    command(&graph, "fail", 1).unwrap();
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    gate.open.store(false, Ordering::Relaxed);
    HOLDS_ONE.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let filling = scope.spawn(|| resync(&graph));
        until("what was filled is flushed", || !HOLDS_ONE.load(Ordering::Relaxed));
        write_at_once(graph.volume(), 1000);
        gate.open.store(true, Ordering::Relaxed);
        assert!(filling.join().unwrap());
    });
    assert_eq!(state(&graph, 1), "good");
    assert!(data_of(&legs[0]) == data_of(&legs[1]));
}

#[test]
fn work_that_waits_for_a_request_ends_when_it_is_told() {
    let graph = open("region=64K, ", &volumes(&faulty(2, 1024)), Reason::Create);
    let mirror = mirror(&graph);
    mirror.intent().unwrap().suspect(&(0..=0));
    mirror.start_scrub();
    let _held = mirror.members.ranges.try_lock(0..4096).expect("nobody has it");
    for scrubs in [false, true] {
        let stop = crate::background::Stop::default();
        let (told, mirror) = (stop.clone(), Arc::clone(&mirror));
        thread::scope(|scope| {
            let work = scope.spawn(move || {
                crate::legs::block_on(move |cx| {
                    Box::pin(async move {
                        let pool = millrace_memory::BufferPool::new(MOST_LEGS).unwrap();
                        if scrubs {
                            mirror.scrub_if_asked(cx, &told, &pool).await
                        } else {
                            mirror.resync(cx, &told, &pool).await
                        }
                    })
                })
                .unwrap()
            });
            // It most probably waits by then.
            thread::sleep(std::time::Duration::from_millis(20));
            stop.set();
            until("it ends", || work.is_finished());
        });
    }
    assert_eq!((mirror.intent().unwrap().stale(), mirror.scrub().at), (1, 0), "nothing was done");
}

#[test]
fn a_scrub_ends_unfinished_when_there_is_nothing_left_to_compare_with() {
    let graph = open("region=64K, rate=1T, ", &volumes(&faulty(2, 8192)), Reason::Create);
    let (mirror, service) = (mirror(&graph), Arc::clone(graph.root.service.as_ref().unwrap()));
    mirror.start_scrub();
    mirror.scrub().at = mirror.members.bytes() / 2;
    service.command("fail", &arguments(&[("leg", "1")])).unwrap();
    scrub_a_while(&graph);
    let scrub = mirror.scrub().clone();
    assert_eq!((scrub.running, scrub.finished, scrub.at), (false, 0, mirror.members.bytes() / 2));
    assert!(fact(&graph, "scrub").unwrap().ends_with("(it was ended before it was done)"));
}

#[test]
fn who_ends_a_scrub_is_told_how_far_it_was_and_nobody_begins_a_second_one() {
    let legs = faulty(2, 8192);
    let graph = open("region=64K, rate=1T, ", &volumes(&legs), Reason::Create);
    let (mirror, service) = (mirror(&graph), Arc::clone(graph.root.service.as_ref().unwrap()));
    let command = |command: &str| service.command(command, &arguments(&[])).map_err(|error| error.to_string());
    assert_eq!(command("stop").unwrap(), "no scrub was running");
    command("scrub").unwrap();
    mirror.scrub().at = mirror.members.bytes() / 2;
    assert!(command("scrub").unwrap_err().contains("already"));
    assert_eq!(command("stop").unwrap(), "the scrub is ended, at 50 %");
    assert!(fact(&graph, "scrub").unwrap().ends_with("(it was ended before it was done)"));
    command("scrub").unwrap();
    while mirror.scrub().running {
        scrub_a_while(&graph);
    }
    assert_eq!(fact(&graph, "scrub").as_deref(), Some("0 blocks repaired, 0 differ"));
}
