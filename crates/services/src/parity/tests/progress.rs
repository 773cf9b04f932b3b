//! Work beside requests keeps no other from being done, and is not misled by what is done meanwhile.

use std::thread;

use millrace_backends::fault::{Kind, Late};
use millrace_block::{BlockError, Operation, Request, Step, TaskContext, future_bytes};

use super::{
    failures::{rot, state},
    rebuild::look_at_marks,
    *,
};
use crate::testing::waiting::{Gate, erase_beside, keep_busy, until};

/// Legs of which one, while its gate is closed, answers no read.
fn with_gate(form: Form, gated: usize) -> (Vec<Arc<FaultVolume>>, Arc<Gate>) {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: form.leg_bytes(1024 * 512) / 512, read_only: false };
    let gate = Gate::before(memory(wanted, gated), |operation| operation == Operation::Read);
    let mut legs = form.faulty(1024);
    legs[gated] = FaultVolume::new(Arc::<Gate>::clone(&gate), SEED);
    (legs, gate)
}

/// What upkeep does of a scrub at a time.
fn scrub_a_while(graph: &Graph) {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(2).unwrap();
            parity.scrub_if_asked(cx, &crate::background::Stop::default(), &pool).await
        })
    })
    .unwrap();
}

#[test]
fn a_scrub_makes_way_where_parity_may_not_fit_and_goes_on_where_it_was() {
    let (legs, gate) = with_gate(SMALL, 0);
    let graph = SMALL.open(&volumes(&legs), Reason::Create);
    let parity = parity(&graph);
    parity.start_scrub();
    gate.open.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let before = legs[0].requests(Kind::Read);
        let scrub = scope.spawn(|| scrub_a_while(&graph));
        until("the first rows are read", || legs[0].requests(Kind::Read) > before);
        parity.members.intent().unwrap().suspect(&(0..=0));
        gate.open.store(true, Ordering::Relaxed);
        scrub.join().unwrap();
    });
    let scrub = parity.scrub().clone();
    assert!(scrub.running && scrub.at > 0, "{scrub:?}");
    assert!(resync(&graph));
    let at = scrub.at;
    loop {
        scrub_a_while(&graph);
        let scrub = parity.scrub().clone();
        assert!(scrub.at > at);
        if !scrub.running {
            assert_eq!((scrub.finished, scrub.differing, scrub.unread), (1, 0, 0));
            break;
        }
    }
}

/// As writes that fail make it.
#[test]
fn a_scrub_goes_on_where_parity_comes_not_to_fit_again_and_again() {
    let (legs, gate) = with_gate(SMALL, 0);
    let graph = SMALL.open(&volumes(&legs), Reason::Create);
    let parity = parity(&graph);
    parity.start_scrub();
    let ends = [(); 2].map(|()| {
        gate.open.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            let before = legs[0].requests(Kind::Read);
            let scrub = scope.spawn(|| scrub_a_while(&graph));
            until("rows are read", || legs[0].requests(Kind::Read) > before);
            parity.members.intent().unwrap().suspect(&(0..=0));
            gate.open.store(true, Ordering::Relaxed);
            scrub.join().unwrap();
        });
        assert!(resync(&graph));
        parity.scrub().at
    });
    assert!(ends[1] > 2 * ends[0], "the second turn was one piece long as well: {ends:?}");
}

/// What was computed in the place of what a leg has, before it was taken in, does not tell which part is wrong.
#[test]
fn a_leg_that_is_taken_in_during_a_check_spoils_no_other() {
    let layout = TWO.plan().layout(TWO.legs);
    let (rotten, filled) = (layout.leg(0, 0), layout.leg(0, 1));
    let (legs, gate) = with_gate(TWO, rotten);
    let volumes = volumes(&legs);
    let graph = TWO.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    command(&graph, "fail", filled).unwrap();
    assert!(command(&graph, "rebuild", filled).unwrap().ends_with("with what it missed"));
    rot(&volumes[rotten], 5);
    gate.open.store(false, Ordering::Relaxed);
    let found = thread::scope(|scope| {
        let before = legs[rotten].requests(Kind::Read);
        let scrub = scope.spawn(|| scrubbed(&graph));
        until("the first rows are read", || legs[rotten].requests(Kind::Read) > before);
        // It missed nothing.
        assert!(resync(&graph));
        assert_eq!(state(&graph, filled), "good");
        gate.open.store(true, Ordering::Relaxed);
        scrub.join().unwrap()
    });
    assert_eq!((found.differing, found.repaired), (1, 0));
    let again = scrubbed(&graph);
    assert_eq!((again.differing, again.repaired), (0, 1));
    parity_fits(&graph, &volumes);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Where others are always at work a long range is never free as a whole.
#[test]
fn an_erasure_goes_on_beside_who_has_a_part_of_it() {
    let legs = SMALL.faulty(8192);
    let graph = SMALL.open(&volumes(&legs), Reason::Create);
    // Whole rows: the journal has nothing of it.
    on_bench(&graph, |bench| _ = bench.write_random(0, 8192));
    let parity = parity(&graph);
    erase_beside(&parity.members.ranges, 3 << 19..(3 << 19) + 4096, &legs[0], || {
        let zeroes = Operation::WriteZeroes { fua: false, deallocate: true };
        on_bench(&graph, |bench| bench.plain(zeroes, 0, 8192).unwrap());
    });
    on_bench(&graph, |bench| bench.expect_zeroes(0, 8192));
}

/// Somebody always has a part of the first rows.
#[test]
fn resync_and_scrub_go_on_beside_who_is_always_at_work() {
    let form = Form { settings: "chunk=16K, journal=128K, region=64K, rate=1T, ", legs: 3 };
    let legs = volumes(&form.faulty(1024));
    let graph = form.open(&legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    let parity = parity(&graph);
    rot(&legs[parity.layout.leg(0, 2)], 5);
    parity.members.intent().unwrap().suspect_all();
    keep_busy(&parity.members.ranges, || {
        thread::scope(|scope| {
            let resync = scope.spawn(|| resync(&graph));
            until("all parity fits", || resync.is_finished());
            assert!(resync.join().unwrap());
            parity_fits(&graph, &legs);
            let scrub = scope.spawn(|| scrubbed(&graph));
            until("all is checked", || scrub.is_finished());
            let found = scrub.join().unwrap();
            assert_eq!((found.finished, found.differing, found.unread), (1, 0, 0));
        });
    });
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn a_scrub_ends_unfinished_when_there_is_no_parity_left_to_check() {
    let graph = SMALL.open(&volumes(&SMALL.faulty(1024)), Reason::Create);
    let parity = parity(&graph);
    parity.start_scrub();
    parity.scrub().at = parity.members.bytes() / 2;
    command(&graph, "fail", 1).unwrap();
    scrub_a_while(&graph);
    let scrub = parity.scrub().clone();
    assert_eq!((scrub.running, scrub.finished, scrub.at), (false, 0, parity.members.bytes() / 2));
    assert!(fact(&graph, "scrub").unwrap().ends_with("(it was ended before it was done)"));
}

/// Counts reads that are under way, and how many were at once.
#[derive(Default)]
struct Reads {
    now: AtomicU64,
    most: AtomicU64,
}

struct Counted(Arc<dyn Volume>, Arc<Reads>);

impl Counted {
    async fn read(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let now = self.1.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.1.most.fetch_max(now, Ordering::Relaxed);
        let result = self.0.submit(cx, request).await;
        self.1.now.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

impl Volume for Counted {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match request.operation {
            Operation::Read => Step::Wait(cx.scratch.place_future(self.read(cx, request))),
            _ => self.0.submit(cx, request),
        }
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::read) + self.0.scratch_bytes()
    }
}

/// Requests wait for it in a change.
#[test]
fn the_journal_is_looked_at_on_all_legs_at_once() {
    let disks = volumes(&TWO.faulty(1024));
    let mut model = Vec::new();
    let graph = TWO.open(&disks, Reason::Create);
    on_bench(&graph, |bench| model = bench.write_random(0, 100));
    drop(graph);
    let reads = Arc::<Reads>::default();
    let slow = |disk: &Arc<dyn Volume>| -> Arc<dyn Volume> {
        Arc::new(Counted(Late::new(Arc::clone(disk), 3, 0), Arc::clone(&reads)))
    };
    let graph = TWO.open(&disks.iter().map(slow).collect::<Vec<_>>(), Reason::Open);
    assert!(reads.most.load(Ordering::Relaxed) > 1, "one after the other");
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn what_has_nothing_to_compare_is_not_scrubbed_and_one_scrub_at_a_time_is_enough() {
    let legs = SMALL.faulty(1024);
    let graph = SMALL.open(&volumes(&legs), Reason::Create);
    let (parity, service) = (parity(&graph), Arc::clone(graph.root.service.as_ref().unwrap()));
    let tell = |command: &str| service.command(command, &arguments(&[])).map_err(|error| error.to_string());
    tell("scrub").unwrap();
    parity.scrub().at = parity.members.bytes() / 2;
    assert!(tell("scrub").unwrap_err().contains("already"));
    assert_eq!(tell("stop").unwrap(), "the scrub is ended, at 50 %");
    assert_eq!(tell("stop").unwrap(), "no scrub was running");
    assert!(fact(&graph, "scrub").unwrap().ends_with("(it was ended before it was done)"));
    command(&graph, "fail", 1).unwrap();
    assert!(tell("scrub").unwrap_err().contains("no parity to check"));
    assert!(fact(&graph, "to do for leg 1").is_some());
}
