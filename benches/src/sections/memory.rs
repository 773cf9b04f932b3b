//! Volumes in memory: larger than the caches that are near, and small enough for them.

use crate::{
    client::{Lean, Load},
    error::Failure,
    record::Record,
    subject::Setup,
    suite::Suite,
};

const LARGE: &str = "64 MB";
const SMALL: &str = "8 MB";

/// Reads and writes of 4 KiB at every depth, and of 128 KiB.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let setup = Setup::default().disk("large", "memory", "64M").disk("small", "memory", "8M");
    let ours = suite.start_ours("spin", &setup)?;
    let spdk = suite.start_spdk(|spdk| {
        spdk.memory("large", 64 << 20)?;
        spdk.memory("small", 8 << 20)?;
        spdk.device("large", "large")?;
        spdk.device("small", "small")
    })?;
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let (large, small) = (["large".to_owned()], ["small".to_owned()]);
    suite.write_once(&mut subjects, &["large".to_owned(), "small".to_owned()])?;
    let depths: &[u32] = if suite.quick { &[128] } else { &[1, 4, 32, 128] };
    // SPDK's queues hold 255 commands.
    let long: &[u32] = if suite.quick { &[32] } else { &[32, 255] };
    let lean = Lean::default();
    let mut cases = Vec::new();
    for rw in ["randread", "randwrite"] {
        for &depth in depths {
            cases.extend(suite.on_each(&subjects, "lean", &lean, &Load::new(rw, "4k", depth).on(LARGE), &large));
        }
        cases.extend(suite.on_each(&subjects, "lean", &lean, &Load::new(rw, "4k", 128).on(SMALL), &small));
        for &depth in long {
            cases.extend(suite.on_each(&subjects, "lean", &lean, &Load::new(rw, "128k", depth).on(LARGE), &large));
        }
    }
    suite.measure(record, &mut subjects, &cases)
}
