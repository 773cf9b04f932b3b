//! Volumes over memory, for benches.

use std::sync::Arc;

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Volume};
use millrace_services::{
    Node, Reason, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan},
};

/// With so many bytes for a leg whose size nobody says.
struct InMemory(u64);

impl Leaves for InMemory {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        Ok(MemoryVolume::create(&request.name, request.size.unwrap_or(self.0), request.block_size)?)
    }
}

/// Background tasks do not run: in the authenticated mode of encryption the writers save.
struct Nowhere;

impl Spawner for Nowhere {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), millrace_engine::EngineError> {
        Ok(())
    }
}

/// A volume of `size` bytes, mounted.
pub(crate) fn volume(stack: &str, size: u64, block_size: BlockSize) -> Graph {
    let node: Node = stack.parse().expect("a stack");
    let plan = Plan { volume: "bench", stack: &node, size: Some(size), block_size };
    let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
    let mut graph = Graph::build(&plan, &InMemory(size), &SharedObjects::default(), &spawner, None).expect("a graph");
    graph.mount(Reason::Create).expect("it mounts");
    graph
}
