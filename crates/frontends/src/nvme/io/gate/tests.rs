//! Writes and pairs at the gate, many of them on one shard.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use millrace_engine::{Launch, Shard, ShardConfig};
use proptest::prelude::*;

use super::*;

/// Somebody at the gate: a write or a pair of a range, inside for so many turns.
#[derive(Clone, Debug)]
struct Visit {
    is_pair: bool,
    range: Range,
    turns: u32,
}

fn visits() -> impl Strategy<Value = Vec<Visit>> {
    let visit = (prop::bool::weighted(0.3), 0_u64..40, 1_u64..10, 0_u32..6).prop_map(|(is_pair, start, len, turns)| Visit {
        is_pair,
        range: (start, start + len),
        turns,
    });
    proptest::collection::vec(visit, 1..40)
}

/// Runs all visits at once; checks at every step that no pair overlaps anything else inside. Returns how many ended.
fn run(visits: &[Visit]) -> usize {
    let mut shard = Shard::new(&ShardConfig { tasks: 64, ..ShardConfig::new(0, None) }).expect("a shard");
    let gate = Arc::new(WriteGate::default());
    let inside: Rc<RefCell<Vec<Visit>>> = Rc::default();
    let ended = Rc::new(RefCell::new(0));
    for visit in visits {
        let (visit, gate) = (visit.clone(), Arc::clone(&gate));
        let (inside, ended) = (Rc::clone(&inside), Rc::clone(&ended));
        let cx = shard.context();
        let slot = cx.reserve().expect("a slot");
        let _ = slot.run::<(), _>(|cx| {
            Launch::Wait(cx.scratch.place_future(async move {
                let (mut write, mut pair) = (None, None);
                if visit.is_pair {
                    pair = gate.lock(cx, visit.range, || true).await;
                } else {
                    write = gate.enter(cx, visit.range, || true).await;
                }
                assert!(pair.is_some() || write.is_some());
                let clashes = |other: &Visit| (other.is_pair || visit.is_pair) && overlap(other.range, visit.range);
                assert!(!inside.borrow().iter().any(clashes), "{visit:?} among {:?}", inside.borrow());
                inside.borrow_mut().push(visit.clone());
                for _ in 0..visit.turns {
                    yield_now().await;
                }
                let at = inside.borrow().iter().position(|v| v.range == visit.range && v.is_pair == visit.is_pair);
                inside.borrow_mut().swap_remove(at.expect("inside"));
                drop((write, pair));
                *ended.borrow_mut() += 1;
            }))
        });
        shard.turn();
    }
    for _ in 0..1_000_000 {
        if *ended.borrow() == visits.len() {
            break;
        }
        shard.turn();
    }
    assert_eq!(gate.state.load(Ordering::Acquire), 0, "everybody has left");
    assert!(gate.pairs().is_empty());
    ended.take()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_pair_is_alone_in_its_range_and_nobody_waits_for_ever(visits in visits()) {
        prop_assert_eq!(run(&visits), visits.len());
    }
}

#[test]
fn without_pairs_everybody_enters_at_once() {
    let gate = WriteGate::default();
    let first = gate.try_enter((0, 8));
    let second = gate.try_enter((4, 12));
    assert!(first.is_some() && second.is_some());
    drop((first, second));
    assert_eq!(gate.state.load(Ordering::Acquire), 0);
}

#[test]
fn a_drain_closes_the_gate_and_a_pair_its_range_only() {
    let gate = WriteGate::default();
    assert!(gate.begin(Some((0, 8))));
    assert!(gate.try_enter((100, 101)).is_none(), "while it drains");
    assert!(!gate.begin(None), "one drain at a time");
    drop(Opener(&gate));
    assert!(gate.try_enter((100, 101)).is_some());
    assert!(gate.try_enter((7, 9)).is_none());
    assert!(!gate.begin(Some((7, 9))));
    drop(PairLock { gate: &gate, range: (0, 8) });
    assert!(gate.try_enter((7, 9)).is_some());
    assert_eq!(gate.state.load(Ordering::Acquire), 0);
}
