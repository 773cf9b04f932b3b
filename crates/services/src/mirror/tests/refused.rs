//! Flushes that a leg refuses, whoever asked for them.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Operation};

use super::{
    failures::WRITE_FAULT,
    rebuild::{command, look_at_marks, state},
    *,
};
use crate::testing::waiting::{Gate, flush_around};

/// The leg's next flush fails, and what it was for is lost; the one after that succeeds.
fn forgets(leg: &FaultVolume) {
    leg.hold_writes();
    leg.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
}

fn flush(graph: &Graph) -> Result<(), millrace_block::BlockError> {
    let mut flushed = Ok(());
    on_bench(graph, |bench| flushed = bench.plain(Operation::Flush, 0, 0));
    flushed
}

/// Two legs; flushes of the second one wait at the gate.
fn before_a_gate(legs: &[Arc<FaultVolume>]) -> (Arc<Gate>, Graph) {
    let volumes = volumes(legs);
    let gate = Gate::before(Arc::clone(&volumes[1]), |operation| operation == Operation::Flush);
    let second: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let graph = open("region=64K, ", &[Arc::clone(&volumes[0]), second], Reason::Create);
    (gate, graph)
}

#[test]
fn what_the_last_leg_forgets_when_a_mark_is_stored_is_told_to_the_guest() {
    let legs = faulty(2, 1024);
    let graph = open("region=64K, ", &volumes(&legs), Reason::Create);
    command(&graph, "fail", 1).unwrap();
    on_bench(&graph, |bench| {
        bench.write_random(0, 8);
        legs[0].hold_writes();
        bench.write_random(0, 8);
        forgets(&legs[0]);
        assert!(bench.write(512, &[1; 512]).is_err(), "its region has no mark");
    });
    assert!(flush(&graph).is_err());
    assert_eq!(flush(&graph), Ok(()), "it is told once");
}

/// The first leg says so to one flush, which waits for the second leg, and takes the next one.
#[test]
fn a_flush_beside_one_that_a_leg_refused_does_not_count_that_leg() {
    for filling in [false, true] {
        let legs = faulty(2, 1024);
        let (gate, graph) = before_a_gate(&legs);
        if filling {
            command(&graph, "fail", 1).unwrap();
        }
        on_bench(&graph, |bench| drop(bench.write_random(0, 8)));
        if filling {
            command(&graph, "rebuild", 1).unwrap();
        }
        forgets(&legs[0]);
        let first = flush_around(graph.volume(), &gate, || {
            let second = flush(&graph);
            if filling {
                assert!(second.is_err(), "nobody else has it");
            } else {
                assert_eq!((second, state(&graph, 0).as_str()), (Ok(()), "failed"));
            }
        });
        assert_eq!(first.is_err(), filling);
        assert_eq!(flush(&graph), Ok(()));
    }
}

#[test]
fn marks_stay_beside_a_flush_that_a_leg_refused() {
    let legs = faulty(2, 1024);
    let (gate, graph) = before_a_gate(&legs);
    legs[0].hold_writes();
    on_bench(&graph, |bench| drop(bench.write_random(0, 100)));
    forgets(&legs[0]);
    let flushed = flush_around(graph.volume(), &gate, || (0..2).for_each(|_| look_at_marks(&graph)));
    assert_eq!((flushed, state(&graph, 0).as_str()), (Ok(()), "failed"));
    command(&graph, "rebuild", 0).unwrap();
    assert!(resync(&graph));
    assert_eq!(state(&graph, 0), "good");
    let volumes = volumes(&legs);
    assert!(data_of(&volumes[0]) == data_of(&volumes[1]));
}

#[test]
fn a_leg_that_forgets_what_it_has_while_the_mirror_grows_is_not_read() {
    for filling in [false, true] {
        let legs = faulty(2, 1024);
        let graph = open("region=64K, ", &volumes(&legs), Reason::Create);
        if filling {
            command(&graph, "fail", 1).unwrap();
            command(&graph, "rebuild", 1).unwrap();
        }
        legs[0].hold_writes();
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 100));
        forgets(&legs[0]);
        assert!(graph.volume().resize(BlockCount(2048)).is_err());
        if filling {
            assert_eq!(state(&graph, 0), "good", "it has to stay");
            assert!(flush(&graph).is_err());
        } else {
            assert_eq!(state(&graph, 0), "failed");
            on_bench(&graph, |bench| bench.expect(0, &model));
        }
        assert_eq!(flush(&graph), Ok(()));
    }
}

#[test]
fn what_a_leg_refused_counts_when_the_mirror_goes_out_of_force() {
    for alone in [false, true] {
        let volumes = volumes(&faulty(2, 1024));
        let graph = open("region=64K, ", &volumes, Reason::Create);
        if alone {
            command(&graph, "fail", 1).unwrap();
        }
        // Whoever asked was gone before it could do anything about that.
        mirror(&graph).members.note_refused(0);
        assert_eq!(graph.root.service.as_ref().unwrap().unmount().is_err(), alone);
        drop(graph);
        if !alone {
            let graph = open("region=64K, ", &volumes, Reason::Open);
            assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("failed", "good"));
        }
    }
}

#[test]
fn a_leg_that_goes_with_the_marks_looked_at_costs_no_suspicion() {
    let legs = faulty(3, 1024);
    let graph = open("region=64K, ", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 100)));
    look_at_marks(&graph);
    forgets(&legs[0]);
    look_at_marks(&graph);
    assert_eq!(state(&graph, 0), "failed");
    let mirror = mirror(&graph);
    let intent = mirror.members.intent().unwrap();
    assert!(intent.marked() > 0 && intent.stale() == 0, "the others have the same");
}
