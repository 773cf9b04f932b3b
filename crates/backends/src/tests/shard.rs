//! Drives requests on a real shard with its real ring.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockError, Volume,
    conformance::{Harness, Job},
};
use millrace_engine::{Launch, Outcome, Shard, ShardConfig};

pub(super) struct ShardHarness(Shard);

impl ShardHarness {
    pub(super) fn new() -> Self {
        // Few ring entries and buffers, so that requests have to wait for them.
        let config = ShardConfig { tasks: 128, ring_entries: 8, buffers: 3, ..ShardConfig::new(0, None) };
        Self(Shard::new(&config).unwrap())
    }
}

impl Harness for ShardHarness {
    fn run(&mut self, volume: &Arc<dyn Volume>, jobs: &[Job]) -> Vec<Result<(), BlockError>> {
        let results = Rc::new(RefCell::new(vec![None; jobs.len()]));
        for (i, job) in jobs.iter().enumerate() {
            let context = self.0.context();
            let slot = context.reserve().expect("more slots than a check has requests");
            let (volume, job, results) = (Arc::clone(volume), job.clone(), Rc::clone(&results));
            let outcome = slot.run(|cx| {
                Launch::<()>::Wait(cx.scratch.place_future(async move {
                    let result = volume.submit(cx, job.request()).await;
                    results.borrow_mut()[i] = Some(result);
                }))
            });
            assert!(matches!(outcome, Outcome::Waiting));
        }
        // Only so that a wake-up that was lost ends the test.
        let patience = Instant::now() + Duration::from_secs(60);
        while results.borrow().iter().any(Option::is_none) {
            self.0.turn();
            assert!(Instant::now() < patience, "requests never ended: {:?}", results.borrow());
        }
        results.take().into_iter().flatten().collect()
    }
}
