//! Services that see requests on their way to one leg, and let them through as they are. The leg's memory is not reached through them
//! ([`Volume::reach`]): nobody would come by.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millrace_block::{
    Asker, BlockCount, BlockSize, Extent, Geometry, Lba, Metadata, MetadataFormat, Request, Step, TaggedRequest,
    TaskContext, Usage, Volume, VolumeError,
};

use crate::legs::Leg;

/// What sees every request.
pub trait Gate: Send + Sync + 'static {
    /// Looks at a request before the leg does, on any shard; its range lies within the leg.
    fn look(&self, request: &Request<'_>, shift: u32, leg: &dyn Volume);

    /// Looks at reads and writes that the leg has done.
    fn look_at_all(&self, requests: &[Request<'_>], shift: u32);
}

/// A leg behind a gate.
pub struct Gated<G> {
    name: String,
    leg: Leg,
    gate: G,
    /// Blocks of the leg and the power of two of their bytes, when it was last asked: a request need not ask.
    blocks: AtomicU64,
    shift: AtomicU32,
}

impl<G: Gate> Gated<G> {
    /// A gate before a leg.
    pub fn new(name: String, leg: Leg, gate: G) -> Self {
        let gated = Self { name, leg, gate, blocks: AtomicU64::new(0), shift: AtomicU32::new(0) };
        gated.ask();
        gated
    }

    /// Asks the leg for its shape.
    fn ask(&self) {
        let geometry = self.leg.geometry();
        self.blocks.store(geometry.blocks.0, Ordering::Relaxed);
        self.shift.store(geometry.block_size.shift(), Ordering::Relaxed);
    }

    /// Shows a request to the gate. A range that the leg will refuse is not seen: its length may be anything.
    #[inline]
    fn show(&self, request: &Request<'_>) {
        if self.is_within(request) || self.is_within_now(request) {
            self.gate.look(request, self.shift.load(Ordering::Relaxed), &*self.leg);
        }
    }

    #[inline]
    fn is_within(&self, request: &Request<'_>) -> bool {
        let end = request.lba.0.checked_add(request.count.0);
        end.is_some_and(|end| end <= self.blocks.load(Ordering::Relaxed))
    }

    /// The leg may have grown by itself.
    #[cold]
    fn is_within_now(&self, request: &Request<'_>) -> bool {
        self.ask();
        self.is_within(request)
    }

    /// The gate.
    pub fn gate(&self) -> &G {
        &self.gate
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
        self.show(&request);
        self.leg.submit(cx, request)
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let done = self.leg.submit_many(requests);
        self.gate.look_at_all(&requests[..done], self.shift.load(Ordering::Relaxed));
        done
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.leg.prefetch(lba, count)
    }

    fn call_off(&self, asker: Asker) {
        self.leg.call_off(asker);
    }

    fn settles_late(&self) -> bool {
        self.leg.settles_late()
    }

    fn metadata(&self) -> Metadata {
        self.leg.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        let TaggedRequest { operation, lba, count, data, .. } = request;
        self.show(&Request { operation, lba, count, segments: &[data] });
        self.leg.submit_tagged(cx, request)
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.leg.format_metadata(format)
    }

    fn scratch_bytes(&self) -> usize {
        self.leg.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let result = self.leg.resize(blocks);
        self.ask();
        result
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let result = self.leg.format(block_size);
        self.ask();
        result
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.leg.extent(lba)
    }

    fn erases_by_key(&self) -> bool {
        self.leg.erases_by_key()
    }
}
