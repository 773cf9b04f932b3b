//! A fast leg in memory, which is empty after the daemon's stop.

use std::time::Duration;

use millrace_block::Switch;

use super::*;
use crate::{
    Node, SharedObjects,
    background::Spawner,
    graph::{ChangeFailed, LeafError, LeafRequest, Leaves, Plan as GraphPlan, Terms, change},
    service::{Health, LegOrigin, Mount},
    testing::{Disks, Kept},
};

/// The first disk as the leaf `memory`, the others by number.
struct Legs(Vec<Arc<dyn Volume>>);

impl Leaves for Legs {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        if request.leaf.is_memory() { Ok(Arc::clone(&self.0[FAST])) } else { Disks(self.0.clone()).open(request) }
    }
}

fn built(settings: &str, legs: &[Arc<dyn Volume>], old: Option<&Graph>) -> Graph {
    let node: Node = format!("cache({settings}, memory) | disk:1").parse().unwrap();
    let plan = GraphPlan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    Graph::build(&plan, &Legs(legs.to_vec()), &SharedObjects::default(), &spawner, old).unwrap()
}

fn made(settings: &str, legs: &[Arc<dyn Volume>]) -> Graph {
    let mut graph = built(settings, legs, None);
    graph.mount(Reason::Create).unwrap();
    graph
}

#[test]
fn a_write_through_cache_begins_empty_when_its_memory_is_gone() {
    let mut legs = volumes(&faulty(50));
    let graph = made("mode=through, line=4K", &legs);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 40));
    drop(graph);
    let forgotten = || memory("fast", fast_bytes(50, 4096) >> 9 << 9, BlockSize::B512);
    legs[FAST] = forgotten();
    let mut graph = built("mode=through, line=4K", &legs, None);
    graph.mount(Reason::Open).unwrap();
    on_bench(&graph, |bench| {
        bench.expect(0, &data);
        data = bench.write_random(0, 40);
        bench.expect(0, &data);
    });
    assert_eq!(graph.tree().status.unwrap().health, Health::Good);
    drop(graph);
    // Write-back may have had what nothing else has, and what holds something else was not emptied.
    legs[FAST] = forgotten();
    let refused = |settings: &str| built(settings, &legs, None).mount(Reason::Open).unwrap_err().to_string();
    assert!(refused("mode=back, line=4K").contains("it holds no cache"));
    legs::write(&legs[FAST], 4096, vec![0x5a; 512]).unwrap();
    assert!(refused("mode=through, line=4K").contains("it holds no cache"));
    // Nobody knows whether a disk that was exchanged had something.
    let exchanged = [forgotten(), Arc::clone(&legs[SLOW])];
    assert!(fails("mode=through, line=4K", &exchanged, Reason::Open).contains("it holds no cache"));
}

fn make_through(switch: &Switch, graph: &mut Graph, legs: &[Arc<dyn Volume>]) -> Result<(), ChangeFailed> {
    let mut new = built("mode=through, line=4K", legs, Some(graph));
    // Its tasks are not run here, and so have ended.
    graph.tasks.clear();
    let store: &mut dyn FnMut() -> Result<(), String> = &mut || Ok(());
    let patience = Duration::from_secs(1);
    let terms = Terms { patience, reformat: false, scratch: 1 << 20, below: &[], store, restore: None };
    change(switch, graph, &mut new, terms)?;
    *graph = new;
    Ok(())
}

/// When the memory is gone, a write-through cache does not know that there was something.
#[test]
fn what_is_dirty_in_memory_is_written_back_before_a_cache_becomes_write_through() {
    let legs = volumes(&faulty(50));
    let mut graph = made("mode=back, line=4K", &legs);
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 40));
    let refused = make_through(&switch, &mut graph, &legs).unwrap_err().to_string();
    assert!(refused.contains("5 dirty lines are only on the fast leg (fast), which is in memory"), "{refused}");
    on_bench(&graph, |bench| bench.expect(0, &data));
    cache(&graph).drain_now().unwrap();
    make_through(&switch, &mut graph, &legs).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
}

/// Write-through is refused over memory with dirty lines: nobody is told to begin with it.
#[test]
fn another_fast_leg_than_memory_comes_in_when_the_cache_was_taken_out() {
    let legs = volumes(&faulty(50));
    let graph = made("mode=back, line=4K", &legs);
    on_bench(&graph, |bench| drop(bench.write_random(0, 40)));
    let new = built("mode=back, line=4K", &legs, None);
    let previous: Arc<dyn Service> = cache(&graph);
    let origins = vec![LegOrigin::New, LegOrigin::Kept];
    let mount = Mount { reason: Reason::Change, legs: origins, previous: Some(previous), reformat: false };
    let refused = cache(&new).may_mount(&mount).unwrap_err().to_string();
    assert!(refused.contains("5 dirty lines are on the fast leg that is to go (fast)"), "{refused}");
    assert!(refused.contains("volume remove") && !refused.contains("mode=through"), "{refused}");
}
