//! Formats: of sizes that do not fit, with a leg out of use, and with the power cut in the middle.

use super::{failures::state, rebuild::replace, *};
use crate::{
    service::Health,
    testing::{FormatCut, Rig, graph_of_blocks},
};

fn open_with(form: Form, legs: &[Arc<dyn Volume>], block_size: BlockSize, size: u64, reason: Reason) -> Graph {
    let made = graph_of_blocks(block_size, &form.stack(), legs, Some(size), reason, &Arc::default());
    made.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn what_does_not_fill_a_larger_block_is_left_out_for_good() {
    // The last one begins a stripe of its own.
    for before in [128 * 16 + 1, 128 * 16 - 1, 128 * 16] {
        let form = SMALL;
        let legs = volumes(&form.faulty(before));
        let graph = open_with(form, &legs, BlockSize::B512, before * 512, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, before));
        graph.volume().format(BlockSize::B4096).unwrap();
        let after = before / 8;
        assert_eq!(graph.volume().geometry().blocks.0, after);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, after));
        parity(&graph).members.intent().unwrap().suspect(&(0..=7));
        assert!(resync(&graph));
        let found = scrubbed(&graph);
        assert_eq!((found.differing, found.unread), (0, 0));
        drop(graph);
        let graph = open_with(form, &legs, BlockSize::B4096, after * 4096, Reason::Open);
        assert!((0..form.legs).all(|leg| state(&graph, leg) == "good"));
        on_bench(&graph, |bench| bench.expect(0, &model));
        graph.volume().format(BlockSize::B512).unwrap();
        assert_eq!(graph.volume().geometry().blocks.0, after * 8);
        on_bench(&graph, |bench| bench.expect_zeroes(0, after * 8));
        drop(graph);
        drop(open_with(form, &legs, BlockSize::B512, after * 4096, Reason::Open));
    }
}

fn all_fits(graph: &Graph, rig: &Rig) {
    parity_fits(graph, &rig.volumes());
}

#[test]
fn a_power_cut_in_a_format_leaves_everything_or_nothing() {
    let (small, large) = (BlockSize::B512, BlockSize::B4096);
    for (form, failed) in [(SMALL, None), (SMALL, Some(0)), (SMALL, Some(2)), (TWO, None), (TWO, Some(1))] {
        for (blocks, keep_blocks) in
            [((small, small), false), ((small, large), false), ((small, large), true), ((large, small), true)]
        {
            let size = if blocks.0 == small { 16 * 4096 + 512 } else { 16 * 4096 };
            FormatCut {
                stack: &form.stack(),
                disks: form.legs,
                disk_bytes: form.leg_bytes(size),
                size,
                failed,
                blocks,
                keep_blocks,
                resync: &resync,
                verify: &all_fits,
            }
            .test(0..2);
        }
    }
}

#[test]
fn a_leg_that_was_out_of_use_during_a_format_to_other_blocks_is_left_out_after_a_restart() {
    for (form, count) in [(SMALL, 1), (TWO, 2)] {
        let legs = volumes(&form.faulty(1024));
        let graph = open_with(form, &legs, BlockSize::B512, 1024 * 512, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
        (0..count).for_each(|leg| _ = command(&graph, "fail", leg).unwrap());
        graph.volume().format(BlockSize::B4096).unwrap();
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 128));
        drop(graph);
        let graph = open_with(form, &legs, BlockSize::B4096, 1024 * 512, Reason::Open);
        assert_eq!(graph.tree().status.unwrap().health, Health::Degraded);
        for leg in 0..count {
            assert_eq!(state(&graph, leg), "failed");
            let said = fact(&graph, &format!("leg {leg} has blocks of")).unwrap();
            assert!(said.starts_with("512 bytes, and the others of 4096"), "{said}");
        }
        on_bench(&graph, |bench| bench.expect(0, &model));
        for leg in 0..count {
            assert!(command(&graph, "rebuild", leg).unwrap().ends_with("with everything"));
            assert!(resync(&graph));
        }
        assert_eq!(graph.tree().status.unwrap().health, Health::Good);
        assert_eq!(fact(&graph, "leg 0 has blocks of"), None);
        parity_fits(&graph, &legs);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}

#[test]
fn a_leg_of_other_blocks_is_replaced_and_another_one_stays_out_meanwhile() {
    let form = TWO;
    let mut legs = volumes(&form.faulty(1024));
    let graph = open_with(form, &legs, BlockSize::B512, 1024 * 512, Reason::Create);
    (0..2).for_each(|leg| _ = command(&graph, "fail", leg).unwrap());
    graph.volume().format(BlockSize::B4096).unwrap();
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 128));
    drop(graph);
    drop(open_with(form, &legs, BlockSize::B4096, 1024 * 512, Reason::Open));
    legs[0] = volumes(&form.faulty(1024)).swap_remove(0);
    legs[0].format(BlockSize::B4096).unwrap();
    replace(form, &legs, 0);
    let graph = open_with(form, &legs, BlockSize::B4096, 1024 * 512, Reason::Open);
    assert!(resync(&graph));
    assert_eq!((state(&graph, 0).as_str(), state(&graph, 1).as_str()), ("good", "failed"));
    command(&graph, "rebuild", 1).unwrap();
    assert!(resync(&graph));
    assert_eq!(graph.tree().status.unwrap().health, Health::Good);
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &model));
}
