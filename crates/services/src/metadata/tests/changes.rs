//! What a change of the stack leaves of it.

use std::{sync::Arc, time::Duration};

use millrace_backends::MemoryVolume;
use millrace_block::{
    BlockSize, Switch, Volume,
    conformance::{Bench, SyncHarness},
};

use super::{SEED, Woven};
use crate::{
    Node, Reason, SharedObjects,
    background::Spawner,
    graph::{Graph, Plan, Terms, change},
    testing::{Disks, Kept, graph},
};

const SIZE: BlockSize = BlockSize::B512;

#[test]
fn a_leg_in_the_place_of_another_is_erased_when_it_may_be() {
    // The header is on the part that stays, and on the one that goes.
    for stack in ["metadata(stripe(chunk=64K, disk:0, disk:2))", "metadata(stripe(chunk=64K, disk:2, disk:1))"] {
        let disks: Vec<Arc<dyn Volume>> =
            (0..3).map(|_| MemoryVolume::create("disk", 256 << 10, SIZE).unwrap() as _).collect();
        let before = "metadata(stripe(chunk=64K, disk:0, disk:1))";
        let mut old = graph(before, &disks, None, Reason::Create, &Arc::default()).unwrap();
        let blocks = old.volume().geometry().blocks.0;
        let mut harness = SyncHarness::new(SEED, false);
        Bench::new(&mut harness, Woven::over(old.volume()), SEED).write_random(0, blocks);
        let node: Node = stack.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: None, block_size: SIZE };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let leaves = Disks(disks.clone());
        let mut new = Graph::build(&plan, &leaves, &SharedObjects::default(), &spawner, Some(&old)).unwrap();
        let switch = Switch::new("test", Arc::clone(old.volume()));
        let (patience, mut store) = (Duration::from_secs(1), || Ok(()));
        let terms = Terms { patience, reformat: true, scratch: 1 << 20, below: &[], store: &mut store, restore: None };
        change(&switch, &mut old, &mut new, terms).unwrap();
        drop(old);
        for reopened in [false, true] {
            if reopened {
                new.unmount();
                new = graph(stack, &disks, None, Reason::Open, &Arc::default()).unwrap();
            }
            Bench::new(&mut harness, Woven::over(new.volume()), SEED).expect_zeroes(0, blocks);
        }
    }
}
