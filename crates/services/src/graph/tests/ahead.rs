//! What a volume is to be made of, and no part of it is yet, comes into force before its guest waits.

use std::thread;

use millrace_backends::fault::Kind;

use super::*;
use crate::{
    legs,
    testing::waiting::{Gate, until},
};

const BLOCKS: u64 = 16384;

#[test]
fn a_guest_goes_on_while_a_new_leg_is_erased() {
    for service in ["integrity", "metadata"] {
        let alone = mounted(&format!("{service} | disk:0"), &memory(1, BLOCKS), None, Reason::Create, &Arc::default());
        let blocks = alone.unwrap().volume().geometry().blocks.0;
        let gate = Gate::before(memory(1, BLOCKS).remove(0), |operation| matches!(operation, Operation::WriteZeroes { .. }));
        let medium: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
        let leg = FaultVolume::new(medium, SEED);
        let mut disks = memory(1, blocks);
        disks.push(Arc::<FaultVolume>::clone(&leg));
        // Not where it is looked at.
        legs::write(&disks[1], 4 << 20, vec![0xd1; 4096]).unwrap();
        let mut old = mounted("disk:0", &disks, None, Reason::Create, &Arc::default()).unwrap();
        let mut new = beside(&old, &disks, &format!("move(disk:0, {service} | disk:1)")).unwrap();
        let switch = Switch::new("test", Arc::clone(old.volume()));
        gate.open.store(false, Ordering::Relaxed);
        let changes = {
            let switch = Arc::clone(&switch);
            thread::spawn(move || {
                let result = change(&switch, &mut old, &mut new, terms(&mut || Ok(()), false));
                (old, new, result)
            })
        };
        until("it is being erased", || leg.requests(Kind::WriteZeroes) > 0);
        let mut harness = SyncHarness::new(SEED, false);
        let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
        let mut bench = Bench::new(&mut harness, volume, SEED);
        let data = bench.write_random(0, 100);
        bench.expect(0, &data);
        assert!(!changes.is_finished(), "{service}: they were done meanwhile");
        gate.open.store(true, Ordering::Relaxed);
        let (_old, new, result) = changes.join().unwrap();
        result.unwrap();
        assert!(Arc::ptr_eq(&switch.root(), new.volume()), "{service}");
    }
}
