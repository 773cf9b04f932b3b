//! Services that see requests on their way to one leg, and let them through as they are.

use crate::legs::Leg;
use millrace_block::{
    BlockCount, BlockSize, Extent, Geometry, Lba, Metadata, MetadataFormat, Request, Step, TaggedRequest, TaskContext,
    Usage, Volume, VolumeError,
};

/// What sees every request.
pub trait Gate: Send + Sync + 'static {
    /// Looks at a request before the leg does, on any shard; its range lies within the leg.
    fn look(&self, request: &Request<'_>, shift: u32);
}

/// A leg behind a gate.
pub struct Gated<G> {
    name: String,
    leg: Leg,
    gate: G,
}

impl<G: Gate> Gated<G> {
    /// A gate before a leg.
    pub fn new(name: String, leg: Leg, gate: G) -> Self {
        Self { name, leg, gate }
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
        // A range that the leg will refuse is not seen: its length may be anything.
        let geometry = self.leg.geometry();
        if geometry.byte_range(request.lba, request.count).is_some() {
            self.gate.look(&request, geometry.block_size.shift());
        }
        self.leg.submit(cx, request)
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.leg.prefetch(lba, count)
    }

    fn settles_late(&self) -> bool {
        self.leg.settles_late()
    }

    fn metadata(&self) -> Metadata {
        self.leg.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        let TaggedRequest { operation, lba, count, data, .. } = request;
        let geometry = self.leg.geometry();
        let within = geometry.byte_range(lba, count).is_some();
        let plain = Request { operation, lba, count, segments: &[data] };
        if within {
            self.gate.look(&plain, geometry.block_size.shift());
        }
        self.leg.submit_tagged(cx, request)
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.leg.format_metadata(format)
    }

    fn scratch_bytes(&self) -> usize {
        self.leg.scratch_bytes()
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

    fn erases_by_key(&self) -> bool {
        self.leg.erases_by_key()
    }
}
