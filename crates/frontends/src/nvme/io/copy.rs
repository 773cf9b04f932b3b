//! Copy (NVM 3.3.2): source ranges of one or several namespaces, one after the other on to one range.

use std::rc::Rc;

use millrace_block::{BlockCount, BlockError, Geometry, Lba, Metadata, Operation, Request, TaskContext, pieces, yield_now};
use millrace_engine::TaskSlot;
use millrace_memory::{Access, BUFFER_SIZE};
use millrace_nvme_spec::{
    command::Sqe,
    nvm::{CopyCdw12, CopyFormat, CopyRange, ProtectionCdw15, ProtectionInfo},
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        data,
        errors::parameter,
        namespace::Attached,
        reservation::Rights,
        status::Completion,
    },
    Blocks, gate,
    limits::{CDFE, CDFS, MCL, MSRC_Z, MSSRL},
    long::{Failure, PIECE, Writer, check_wanted},
    protect::Protection,
    tagged::{self, PRINFO, Sides},
    task::{Finish, InFlight, wait},
};

/// A source range, checked.
struct Source {
    attached: Rc<Attached>,
    lba: Lba,
    count: BlockCount,
    /// Of namespaces with metadata: what to check when it is read.
    read: Option<Protection>,
}

/// Why a copy was refused, and the first range that was not copied.
type Refused = (Status, usize);

impl Controller {
    pub(super) fn copy(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        let geometry = attached.namespace.volume.geometry();
        let fields = CopyCdw12::from_bits(sqe.cdw12);
        let format = self.copy_format(fields.format())?;
        if fields.nr_z() > MSRC_Z {
            return Err(self.refuse(parameter::NLB, Status::COMMAND_SIZE_LIMIT_EXCEEDED));
        }
        attached.check_writable(&geometry)?;
        self.check_rights(&attached, Rights::WRITE)?;
        let write = self.copy_protection(&attached, fields, sqe)?;
        let count = usize::from(fields.nr_z()) + 1;
        self.resolve(sqe, (count * size_of::<CopyRange>()) as u64, Access::Read)?;
        // The list is on the heap: its ranges name namespaces that have to be kept. A copy is no command of the data path.
        let mut ranges = vec![CopyRange::default(); count];
        data::copy_in(&self.segments, ranges.as_mut_bytes());
        let target = Lba(sqe.cdw10_11());
        let target_of = (&attached, &geometry, fields.prinfor());
        let sources = match self.copy_sources(target_of, target, format, &ranges) {
            Ok(sources) => sources,
            Err((status, range)) => {
                return Ok(Outcome::Done(Completion { dw0: range as u32, status: status.do_not_retry() }));
            }
        };
        self.counters.write_commands += 1;
        let (host, sink, durable) = (self.host_key(), &self.sink, self.durable(fields.fua()));
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let _sources: Vec<_> = sources.iter().map(|source| InFlight::new(&source.attached)).collect();
                let writer = Writer { attached, host, geometry, finish: &finish };
                let completion = copy_all(cx, &writer, (target, write), durable, &sources).await;
                finish.complete(completion);
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// The descriptor format, where we have it and the host enabled it.
    fn copy_format(&self, format: CopyFormat) -> Result<CopyFormat, Status> {
        let bit = 1_u16.checked_shl(format.0.into()).unwrap_or(0);
        let enabled = CDFS & bit != 0 && (CDFE & bit == 0 || self.copy_formats_enabled() & bit != 0);
        if enabled { Ok(format) } else { Err(self.invalid(12, 8)) }
    }

    /// What is to be done with protection information when the target is written; `None`: it has no metadata.
    fn copy_protection(&self, attached: &Attached, fields: CopyCdw12, sqe: &Sqe) -> Result<Option<Protection>, Status> {
        let Metadata::Shown(format) = attached.namespace.volume.metadata() else { return Ok(None) };
        if format.protection != 0 && fields.prinfor().pract() != fields.prinfow().pract() {
            return Err(self.invalid(12, 12));
        }
        let application = ProtectionCdw15::from_bits(sqe.cdw15);
        let write = Protection::new(format, sqe.cdw10_11(), fields.prinfow(), sqe.cdw14, application);
        write.map(Some).map_err(|status| self.refuse(PRINFO, status))
    }

    /// Checks every source range, and the target range they make together.
    fn copy_sources(
        &self,
        (attached, geometry, info): (&Rc<Attached>, &Geometry, ProtectionInfo),
        target: Lba,
        format: CopyFormat,
        ranges: &[CopyRange],
    ) -> Result<Vec<Source>, Refused> {
        let mut total = 0;
        let mut sources = Vec::with_capacity(ranges.len());
        for (i, range) in ranges.iter().enumerate() {
            let count = u64::from(range.nlb_z) + 1;
            total += count;
            if count > u64::from(MSSRL) || total > u64::from(MCL) {
                return Err((Status::COMMAND_SIZE_LIMIT_EXCEEDED, i));
            }
            sources.push(self.copy_source(attached, geometry, (format, info), range).map_err(|status| (status, i))?);
        }
        let blocks = Blocks::new(geometry, target, BlockCount(total)).map_err(|status| (status, 0))?;
        let (first, end) = blocks.range();
        let overlaps = |source: &Source| {
            let (from, to) = gate::range(source.lba, source.count);
            Rc::ptr_eq(&source.attached, attached) && from < end && first < to
        };
        match sources.iter().position(overlaps) {
            Some(i) => Err((Status::OVERLAPPING_IO_RANGE, i)),
            None => Ok(sources),
        }
    }

    fn copy_source(
        &self,
        target: &Rc<Attached>,
        geometry: &Geometry,
        (format, info): (CopyFormat, ProtectionInfo),
        range: &CopyRange,
    ) -> Result<Source, Status> {
        let attached = match format {
            CopyFormat::NSID_SLBA_32 if range.sopt.fco() => return Err(Status::FAST_COPY_NOT_POSSIBLE),
            CopyFormat::NSID_SLBA_32 => Rc::clone(self.namespaces.require(range.snsid.0)?),
            _ => Rc::clone(target),
        };
        let source = attached.namespace.volume.geometry();
        let metadata = attached.namespace.volume.metadata();
        let (shown, others) = (metadata.shown(), target.namespace.volume.metadata().shown());
        if source.block_size != geometry.block_size || shown != others {
            return Err(Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT);
        }
        let blocks = Blocks::new(&source, Lba(range.slba), BlockCount(u64::from(range.nlb_z) + 1))?;
        self.check_rights(&attached, Rights::READ)?;
        let application = ProtectionCdw15::new().with_lbat(range.elbat).with_lbatm(range.elbatm);
        let protection = |format| Protection::new(format, range.slba, info, range.eilbrt, application);
        let read = shown.map(protection).transpose()?;
        Ok(Source { attached, lba: blocks.lba, count: blocks.count, read })
    }
}

/// Copies the ranges one after the other. When one fails, the result names it.
async fn copy_all(
    cx: TaskContext<'_>,
    writer: &Writer<'_>,
    (target, write): (Lba, Option<Protection>),
    durable: bool,
    sources: &[Source],
) -> Completion {
    let mut at = target;
    for (i, source) in sources.iter().enumerate() {
        let result = match (source.read, write) {
            (Some(read), Some(write)) => {
                let sides = Sides { read, write, before: at.0 - target.0 };
                let whole = tagged::copy(cx, writer, &source.attached, (source.lba, at, source.count), sides);
                cx.scratch.place_future(whole).await
            }
            _ => copy_range(cx, writer, at, source).await,
        };
        if let Err(failure) = result {
            return Completion { dw0: i as u32, ..failure.into() };
        }
        at = Lba(at.0 + source.count.0);
    }
    if durable {
        // A copy has no forced unit access of its own.
        let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
        return super::task::of_result(writer.attached.volume.submit(cx, request).await);
    }
    Completion::SUCCESS
}

async fn copy_range(cx: TaskContext<'_>, writer: &Writer<'_>, target: Lba, source: &Source) -> Result<(), Failure> {
    let namespace = &source.attached.namespace;
    let same = std::sync::Arc::ptr_eq(namespace, &writer.attached.namespace);
    let bytes = if same { PIECE } else { BUFFER_SIZE as u64 };
    for (at, count) in pieces(&writer.geometry, source.count, bytes) {
        let (from, to) = (Lba(source.lba.0 + at), Lba(target.0 + at));
        if namespace.uncorrectable.overlaps(from, count) {
            return Err(Failure::Volume(BlockError::ReadFault { errno: 0 }));
        }
        if same {
            writer.piece(cx, Operation::Copy { source: from }, to, count).await?;
        } else {
            // Placed, so that every command's future stays small.
            cx.scratch.place_future(copy_across(cx, writer, source, from, to, count)).await?;
        }
        yield_now().await;
    }
    Ok(())
}

/// Copies a piece from another volume, through a buffer.
async fn copy_across(
    cx: TaskContext<'_>,
    writer: &Writer<'_>,
    source: &Source,
    from: Lba,
    to: Lba,
    count: BlockCount,
) -> Result<(), Failure> {
    writer.check_wanted()?;
    let namespace = &writer.attached.namespace;
    // The gate before the buffer: a write inside may wait for a buffer.
    let _entered = writer.enter(cx, to, count).await?;
    let buffer = cx.buffers.take().await;
    check_wanted(writer.finish, &source.attached)?;
    source.attached.namespace.unchanged(&writer.geometry)?;
    namespace.unchanged(&writer.geometry)?;
    let segments = [buffer.segment((count.0 << writer.geometry.block_size.shift()) as usize)];
    let read = Request { operation: Operation::Read, lba: from, count, segments: &segments };
    let cx = cx.deeper();
    // Each with its own arena: what a volume leaves in one must not pile up over thousands of pieces.
    source.attached.volume.submit(cx.with_scratch(&cx.scratch.carve_rest()), read).await?;
    let write = Request { operation: Operation::Write { fua: false }, lba: to, count, segments: &segments };
    let result = writer.attached.volume.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await;
    namespace.written(result, to, count);
    Ok(result?)
}
