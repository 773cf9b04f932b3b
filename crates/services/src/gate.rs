//! Services that let requests through to one leg, as they are, now or later.

use std::{sync::Arc, time::Duration};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Extent, Geometry, IoOperation, Lba, Request, Step, TaskContext, Usage, Volume,
    VolumeError,
};

/// What a request must pass.
pub trait Gate: Send + Sync + 'static {
    /// Looks at a request before the leg does, on any shard; its range lies within the leg. `None`: it may go on at once.
    fn look(&self, request: &Request<'_>, shift: u32) -> Option<Pass>;

    /// What is left of a wait. Asked after each part of it.
    fn left(&self, pass: &Pass) -> Option<Duration>;
}

/// A request that must wait.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// When it may go on, in the gate's own time.
    pub until: u64,
    /// How long to sleep before looking again.
    pub sleep: Duration,
}

/// A leg behind a gate.
pub struct Gated<G> {
    name: String,
    leg: Arc<dyn Volume>,
    gate: G,
}

impl<G: Gate> Gated<G> {
    /// A gate before a leg.
    pub fn new(name: String, leg: Arc<dyn Volume>, gate: G) -> Self {
        Self { name, leg, gate }
    }

    /// The gate.
    pub fn gate(&self) -> &G {
        &self.gate
    }
}

/// Waits until a request may go on.
async fn wait<G: Gate>(gate: &G, cx: TaskContext<'_>, pass: Pass) {
    let mut sleep = pass.sleep;
    loop {
        cx.io(IoOperation::Sleep(sleep)).await;
        match gate.left(&pass) {
            None => return,
            Some(left) => sleep = left,
        }
    }
}

impl<G: Gate> Volume for Gated<G> {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.leg.geometry()
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        // A range that the leg will refuse costs nothing: its length may be anything.
        let geometry = self.leg.geometry();
        let within = geometry.byte_range(request.lba, request.count).is_some();
        match within.then(|| self.gate.look(&request, geometry.block_size.shift())).flatten() {
            None => self.leg.submit(cx, request),
            Some(pass) => Step::Wait(cx.scratch.place_future(after(self, cx, request, pass))),
        }
    }

    fn scratch_bytes(&self) -> usize {
        self.leg.scratch_bytes() + after_bytes(after::<G>)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.leg.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.leg.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.leg.extent(lba)
    }
}

/// Scratch bytes that the future of [`after`] takes.
fn after_bytes<'a, G: Gate, F: Future + 'a>(_: fn(&'a Gated<G>, TaskContext<'a>, Request<'a>, Pass) -> F) -> usize {
    size_of::<F>().next_multiple_of(8)
}

/// A request that waits at the gate.
async fn after<'a, G: Gate>(
    gated: &'a Gated<G>,
    cx: TaskContext<'a>,
    request: Request<'a>,
    pass: Pass,
) -> Result<(), BlockError> {
    wait(&gated.gate, cx, pass).await;
    gated.leg.submit(cx, request).await
}
