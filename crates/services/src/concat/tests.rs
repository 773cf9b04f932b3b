use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Subject, SyncHarness, Wanted},
};

use super::*;
use crate::{
    Reason,
    testing::{CrashTest, crash_test, graph, subject},
};

const SEED: u64 = 0x636f_6e63;

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    // The first leg ends in the middle of what the suite works on.
    let blocks = [200, 104, wanted.blocks][leg];
    MemoryVolume::create(&format!("leg{leg}"), blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

#[test]
fn it_conforms() {
    let mut make = subject("concat(disk:0, disk:1, disk:2)", 3, |blocks, _| blocks - 304, memory);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn it_conforms_over_the_fault_volume() {
    let faulty = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let mut make = subject("concat(disk:0, disk:1, disk:2)", 3, |blocks, _| blocks - 304, faulty);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn sizes_are_those_of_the_legs() {
    let legs: Vec<Arc<dyn Volume>> =
        [100, 50].iter().map(|blocks| MemoryVolume::create("leg", blocks * 512, BlockSize::B512).unwrap() as _).collect();
    let make = |size| graph("concat(disk:0, disk:1)", &legs, size, Reason::Create, &Arc::default());
    assert_eq!(make(None).unwrap().volume().geometry().blocks.0, 150);
    assert_eq!(make(Some(120 * 512)).unwrap().volume().geometry().blocks.0, 120);
    let error = make(Some(151 * 512)).err().unwrap();
    assert_eq!(error.to_string(), "concat: its legs have 76800 bytes together; 77312 are asked for");
    let plan = (KIND.plan)(&Settings::default()).unwrap();
    let sizes = |stated: &[Option<u64>]| plan.leg_sizes(10, stated, BlockSize::B512);
    assert_eq!(sizes(&[Some(4), None]), [Some(4), Some(6)]);
    assert_eq!(sizes(&[Some(4), Some(3)]), [Some(4), Some(6)], "the last leg is what the others leave");
    assert_eq!(sizes(&[None, None]), [None, None]);
    assert_eq!(sizes(&[Some(12), Some(3)]), [Some(12), Some(3)]);
}

#[test]
fn flushed_data_survive_power_cuts() {
    crash_test(&CrashTest::new("concat(disk:0, disk:1)", 2));
}
