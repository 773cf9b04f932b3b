//! What was filled is not filled again, though another leg is out and its marks stay.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba};

use super::{
    rebuild::{command, look_at_marks, resync_half, state},
    *,
};
use crate::members::TABLES;

const SETTINGS: &str = "region=64K, rate=1T, ";
/// Of the volume, in 64 regions.
const BLOCKS: u64 = 8192;

fn stale(graph: &Graph) -> u64 {
    mirror(graph).intent().unwrap().stale()
}

/// Three legs, of which the last is out, and the second half filled; neither has anything of its own. And what there is.
fn half_filled() -> (Vec<Arc<FaultVolume>>, Graph, Vec<u8>) {
    let legs = faulty(3, BLOCKS);
    let volumes = volumes(&legs);
    let graph = open(SETTINGS, &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, BLOCKS));
    for leg in [1, 2] {
        command(&graph, "fail", leg).unwrap();
        crate::legs::write(&volumes[leg], 0, vec![0xee; model.len()]).unwrap();
    }
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    assert_eq!(stale(&graph), 64);
    resync_half(&graph);
    (legs, graph, model)
}

/// As upkeep does every 30 seconds.
fn save(graph: &Graph) {
    let mirror = mirror(graph);
    let saves = crate::legs::block_on(move |cx| {
        Box::pin(async move {
            // At the first look all of it has just been written.
            mirror.members.save_marks(cx).await;
            mirror.members.save_marks(cx).await;
        })
    });
    saves.unwrap();
}

/// It is opened anew. How much is to be done.
fn left(legs: &[Arc<FaultVolume>], graph: Graph) -> (Graph, u64) {
    drop(graph);
    let graph = open(SETTINGS, &volumes(legs), Reason::Open);
    assert_eq!([0, 1, 2].map(|leg| state(&graph, leg)), ["good", "being filled", "failed"]);
    let left = stale(&graph);
    (graph, left)
}

/// What is left is filled, and then the leg that is out.
fn fill_all(legs: &[Arc<FaultVolume>], graph: &Graph, model: &[u8]) {
    assert!(resync(graph));
    assert_eq!(state(graph, 1), "good");
    assert!(command(graph, "rebuild", 2).unwrap().ends_with("with what it missed"));
    assert!(resync(graph));
    assert_eq!(state(graph, 2), "good");
    assert!(volumes(legs).iter().all(|leg| data_of(leg) == model));
}

#[test]
fn what_was_filled_is_not_filled_again_while_another_leg_is_out() {
    for is_orderly in [false, true] {
        let (legs, graph, model) = half_filled();
        if is_orderly {
            graph.root.service.as_ref().unwrap().unmount().unwrap();
        } else {
            save(&graph);
        }
        let (graph, left) = left(&legs, graph);
        assert!((1..=32).contains(&left), "{left}");
        assert_eq!(mirror(&graph).intent().unwrap().marked(), 64, "the leg that is out lacks all of it");
        fill_all(&legs, &graph, &model);
    }
}

/// The leg that is being filled knows of a write before any leg has it.
#[test]
fn what_was_filled_and_is_written_again_is_filled_again() {
    // Or it knows nothing of the mark's store: it was out of use then.
    for knows in [true, false] {
        let (legs, graph, mut model) = half_filled();
        save(&graph);
        let (leg, pages) = (&volumes(&legs)[1], TABLES as usize / 2);
        let at = leg.geometry().bytes() - TABLES / 2;
        let before = crate::legs::read(leg, at, pages).unwrap();
        let range = Some((Lba(0), BlockCount(128)));
        legs[1].add(Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Lose) });
        on_bench(&graph, |bench| {
            // Not what is there: every bench draws the same.
            bench.random.bytes(8);
            model[..512].copy_from_slice(&bench.write_random(0, 1));
        });
        legs[1].clear();
        assert!(data_of(leg)[..512] != model[..512], "the power went before it was there");
        if !knows {
            crate::legs::write(leg, at, before).unwrap();
        }
        let (graph, left) = left(&legs, graph);
        assert!(if knows { (2..=33).contains(&left) } else { left == 64 }, "{left}");
        fill_all(&legs, &graph, &model);
    }
}

#[test]
fn a_leg_that_was_filled_beside_one_that_is_out_knows_what_that_lacks_when_it_is_the_last_one() {
    let (legs, graph, model) = half_filled();
    save(&graph);
    assert!(resync(&graph));
    assert_eq!(state(&graph, 1), "good");
    command(&graph, "fail", 0).unwrap();
    drop(graph);
    let graph = open(SETTINGS, &volumes(&legs), Reason::Open);
    assert_eq!([0, 1, 2].map(|leg| state(&graph, leg)), ["failed", "good", "failed"]);
    assert!(command(&graph, "rebuild", 2).unwrap().ends_with("with what it missed"));
    assert!(resync(&graph));
    assert!(data_of(&volumes(&legs)[2]) == model);
}

#[test]
fn a_bitmap_that_is_damaged_tells_nothing_of_what_was_filled() {
    for copy in 0..2 {
        let (legs, graph, model) = half_filled();
        save(&graph);
        let leg = &volumes(&legs)[1];
        let at = leg.geometry().bytes() - TABLES / 2 + copy * TABLES / 4;
        let mut bytes = crate::legs::read(leg, at, 512).unwrap();
        bytes[100] ^= 1;
        crate::legs::write(leg, at, bytes).unwrap();
        let (graph, left) = left(&legs, graph);
        assert_eq!(left, 64);
        fill_all(&legs, &graph, &model);
    }
}

/// Nobody fills it any more: what it lacks is marked on the others all the same.
#[test]
fn a_leg_that_fails_while_it_is_filled_gets_what_was_written_since_and_what_it_lacks() {
    let (legs, graph, mut model) = half_filled();
    save(&graph);
    command(&graph, "fail", 1).unwrap();
    on_bench(&graph, |bench| model[..512].copy_from_slice(&bench.write_random(0, 1)));
    (0..2).for_each(|_| look_at_marks(&graph));
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with what it missed"));
    assert_eq!(stale(&graph), 64);
    fill_all(&legs, &graph, &model);
}
