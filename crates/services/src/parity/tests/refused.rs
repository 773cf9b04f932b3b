//! Flushes and entries of the journal that a leg refuses which has to stay, and flushes beside each other.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba, Operation};

use super::{
    failures::{WRITE_FAULT, nothing_wrong_is_read, state, void_when_quiet},
    rebuild::look_at_marks,
    *,
};
use crate::testing::waiting::{Gate, flush_around};

#[test]
fn what_a_leg_forgets_when_a_mark_is_stored_is_in_the_journal() {
    // The leg has the parity of the chunk that is written, or that chunk.
    for part in [2, 0] {
        let legs = SMALL.faulty(1024);
        let volumes = volumes(&legs);
        let graph = SMALL.open(&volumes, Reason::Create);
        let layout = parity(&graph).layout;
        let forgets = &legs[layout.leg(0, part)];
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            bench.plain(Operation::Flush, 0, 0).unwrap();
            (0..2).for_each(|_| look_at_marks(&graph));
            assert_eq!(parity(&graph).members.intent().unwrap().marked(), 0);
            command(&graph, "fail", layout.leg(0, 1)).unwrap();
            forgets.hold_writes();
            model[..8 * 512].copy_from_slice(&bench.write_random(0, 8));
            forgets.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
            assert!(bench.write(512, &[1; 512]).is_err(), "its region has no mark");
            nothing_wrong_is_read(bench, 8, &model[8 * 512..]);
            assert!(bench.plain(Operation::Flush, 0, 0).is_err());
            void_when_quiet(&graph);
            nothing_wrong_is_read(bench, 8, &model[8 * 512..]);
        });
        assert!(fact(&graph, "stopped").is_some());
        drop(graph);
        let graph = SMALL.open(&volumes, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

/// It may be on a leg all the same, and those after it do not know of it.
#[test]
fn an_entry_that_was_refused_is_not_carried_out_under_later_ones() {
    let form = Form { legs: 5, ..TWO };
    for when in [When::Nth(1), When::Always] {
        let legs = form.faulty(1024);
        let volumes = volumes(&legs);
        let graph = form.open(&volumes, Reason::Create);
        let layout = parity(&graph).layout;
        let (mut model, mut first) = (Vec::new(), Vec::new());
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            for part in [1, 2] {
                command(&graph, "fail", layout.leg(0, part)).unwrap();
            }
            // The other copy is written well.
            let leg = layout.leg(0, layout.data());
            let slots = Lba((parity(&graph).journal_of(leg) + journal::VOID_RECORD) / 512);
            let range = Some((slots, BlockCount(2 * (128 << 10) / 512)));
            legs[leg].add(Rule { range, ..Rule::new(Kind::Write, when, Effect::Fail(WRITE_FAULT)) });
            first = bench.random.bytes(512);
            let written = bench.write(0, &first);
            assert_eq!(written.is_ok(), when == When::Nth(1), "it is asked once more");
            assert_eq!(fact(&graph, "stopped").is_none(), written.is_ok());
            legs[leg].clear();
            let second = bench.random.bytes(512);
            if bench.write(8, &second).is_ok() {
                model[8 * 512..9 * 512].copy_from_slice(&second);
            }
        });
        // A crash.
        drop(graph);
        let graph = form.open(&volumes, Reason::Open);
        on_bench(&graph, |bench| {
            let block = bench.read(0, 1);
            assert!(block == first || (when == When::Always && block == model[..512]));
            model[..512].copy_from_slice(&block);
            bench.expect(0, &model);
        });
    }
}

/// The first leg says so to one flush, which waits for the last leg, and takes the next one.
#[test]
fn a_flush_beside_one_that_a_leg_refused_does_not_count_that_leg() {
    let legs = SMALL.faulty(1024);
    let mut volumes = volumes(&legs);
    let gate = Gate::before(Arc::clone(&volumes[2]), |operation| operation == Operation::Flush);
    volumes[2] = Arc::<Gate>::clone(&gate);
    let graph = SMALL.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    legs[0].hold_writes();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    legs[0].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
    let first = flush_around(graph.volume(), &gate, || {
        on_bench(&graph, |bench| assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(())));
        assert_eq!(state(&graph, 0), "failed");
    });
    assert_eq!(first, Ok(()));
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Upkeep flushes while a leg is filled, and before it counts as filled.
#[test]
fn a_leg_is_not_filled_from_what_another_one_forgot() {
    for is_filled in [false, true] {
        let legs = SMALL.faulty(1024);
        let volumes = volumes(&legs);
        let graph = SMALL.open(&volumes, Reason::Create);
        let layout = parity(&graph).layout;
        // The first has the chunk beside the one that is written, the second its parity.
        let (back, forgets) = (layout.leg(0, 1), &legs[layout.leg(0, 2)]);
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            command(&graph, "fail", back).unwrap();
            bench.write_random(0, 8);
            command(&graph, "rebuild", back).unwrap();
            forgets.hold_writes();
            model[..8 * 512].copy_from_slice(&bench.write_random(0, 8));
        });
        forgets.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
        let service = parity(&graph);
        let saving = Arc::clone(&service);
        crate::legs::block_on(move |cx| Box::pin(async move { saving.members.save_marks(cx).await })).unwrap();
        if is_filled {
            let intent = service.members.intent().unwrap();
            while let Some(region) = intent.next_stale(0) {
                intent.cleared(region, intent.suspicions());
            }
        }
        assert!(!resync(&graph));
        void_when_quiet(&graph);
        assert!(fact(&graph, "stopped").is_some());
        drop((graph, service));
        let graph = SMALL.open(&volumes, Reason::Open);
        assert_eq!(state(&graph, back), "being filled");
        on_bench(&graph, |bench| bench.expect(0, &model));
        assert!(resync(&graph));
        assert_eq!(state(&graph, back), "good");
        parity_fits(&graph, &volumes);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}
