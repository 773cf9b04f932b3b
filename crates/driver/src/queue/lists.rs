//! Room for what describes the data of each command that may be in flight: a PRP list or SGL descriptors.

use millrace_nvme_spec::{CommandId, command::DataPointer, identify::SglSupport, prp::PrpEntry, sgl::SglDescriptor};

use crate::{
    dma::{DmaBuffer, DmaError, DmaMemory, DmaRange, PAGE_SIZE},
    prp::{self, PrpError},
    sgl::{self, SglError, SglLimits},
    shared::SharedRing,
};

/// The lists of a queue pair, by command identifier.
pub(crate) struct Lists {
    pages: Option<Pages>,
    bytes_each: usize,
    sgl: Option<SglLimits>,
}

struct Pages {
    buffer: DmaBuffer,
    /// All of the buffer, twice: a command uses its part in one way or the other.
    prps: SharedRing<PrpEntry>,
    descriptors: SharedRing<SglDescriptor>,
}

impl Lists {
    /// Lists for `commands` transfers of up to `max_transfer` bytes each, on a queue whose controller takes SGLs as `support` says.
    pub(crate) fn new(
        memory: &DmaMemory,
        commands: u16,
        max_transfer: usize,
        support: SglSupport,
    ) -> Result<Self, DmaError> {
        let bytes_each = prp::list_pages(max_transfer) * PAGE_SIZE;
        let bytes = bytes_each * usize::from(commands);
        let pages = if bytes == 0 { None } else { Some(Pages::new(memory.alloc(bytes)?)) };
        Ok(Self { pages, bytes_each, sgl: SglLimits::new(support, bytes_each) })
    }

    /// What can be said by SGLs; `None`: nothing.
    #[inline]
    pub(super) fn sgl(&self) -> Option<SglLimits> {
        self.sgl
    }

    /// The pages of all lists.
    #[cfg(test)]
    pub(super) fn buffer(&self) -> Option<&DmaBuffer> {
        self.pages.as_ref().map(|pages| &pages.buffer)
    }

    #[inline]
    fn list(&self, pages: &Pages, cid: CommandId) -> DmaRange {
        pages.buffer.slice(usize::from(cid.0) * self.bytes_each, self.bytes_each)
    }

    #[inline]
    fn first<T>(&self, cid: CommandId) -> usize {
        usize::from(cid.0) * (self.bytes_each / size_of::<T>())
    }

    #[inline]
    pub(super) fn prps(&self, cid: CommandId, data: DmaRange) -> Result<DataPointer, PrpError> {
        let Some(pages) = &self.pages else {
            return prp::describe(data, DmaRange { iova: 0, len: 0 }, |_, _| {});
        };
        let first = self.first::<PrpEntry>(cid);
        prp::describe(data, self.list(pages, cid), |index, entry| pages.prps.write((first + index) as u32, entry))
    }

    pub(super) fn prps_of_runs(
        &self,
        cid: CommandId,
        runs: impl IntoIterator<Item = DmaRange>,
    ) -> Result<DataPointer, PrpError> {
        let Some(pages) = &self.pages else {
            return prp::describe_runs(runs, DmaRange { iova: 0, len: 0 }, |_, _| {});
        };
        let first = self.first::<PrpEntry>(cid);
        prp::describe_runs(runs, self.list(pages, cid), |index, entry| pages.prps.write((first + index) as u32, entry))
    }

    pub(super) fn descriptors(
        &self,
        cid: CommandId,
        expected: usize,
        pieces: impl IntoIterator<Item = DmaRange>,
    ) -> Result<DataPointer, SglError> {
        let limits = self.sgl.ok_or(SglError::NotSupported)?;
        // Without pages the limit is one piece, which needs none.
        let list = self.pages.as_ref().map_or(0, |pages| self.list(pages, cid).iova);
        let first = self.first::<SglDescriptor>(cid);
        sgl::describe(pieces, expected, limits, list, |index, descriptor| {
            let pages = self.pages.as_ref().expect("several pieces are taken only where there is room for them");
            pages.descriptors.write((first + index) as u32, descriptor);
        })
    }
}

impl Pages {
    fn new(buffer: DmaBuffer) -> Self {
        let fits = "the entries fill the buffer";
        let prps = buffer.ring((buffer.len() / PrpEntry::SIZE) as u32).expect(fits);
        let descriptors = buffer.ring((buffer.len() / SglDescriptor::SIZE) as u32).expect(fits);
        Self { buffer, prps, descriptors }
    }
}
