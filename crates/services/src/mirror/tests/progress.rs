//! Work beside requests comes to its end, and keeps no other from being done.

use std::thread;

use millrace_backends::fault::Kind;
use millrace_block::Operation;

use super::*;
use crate::testing::{
    Bench as Means, Kept, Session,
    waiting::{Gate, erase_beside, until},
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
