//! virtio-blk requests (virtio 1.3, 5.2.6): a chain's memory becomes one request on the volume.
//!
//! ```text
//!   readable: header 16 │ data …        writable: … data │ status 1
//!                         └── one Request with all pieces ──┘
//! ```
//!
//! Where the pieces begin and end means nothing; only their order does.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    rc::Rc,
    sync::Arc,
};

use millrace_block::{
    BlockCount, BlockError, ByteOffset, Geometry, Lba, Operation, Request, Step, TaskContext, Transfer, Volume,
    trace::{Carried, EventOperation, Fetched, carry},
};
use millrace_engine::{Launch, Outcome, TaskSlot};
use millrace_memory::Segment;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    config::{SECTOR, feature},
    dirty::DirtyLog,
    disk::Core,
    ring::{Buffers, Done, Plain},
};

mod long;
mod ranges;
mod together;

/// Request types.
pub(crate) mod kind {
    pub(crate) const IN: u32 = 0;
    pub(crate) const OUT: u32 = 1;
    pub(crate) const FLUSH: u32 = 4;
    pub(crate) const GET_ID: u32 = 8;
    pub(crate) const DISCARD: u32 = 11;
    pub(crate) const WRITE_ZEROES: u32 = 13;
}

/// The flag of a write-zeroes range whose space may be given back.
const UNMAP: u32 = 1;

/// The number of a disk's only volume in the trace.
const ONLY: u32 = 1;

/// Scratch bytes that the future of a request takes at most, without its volume's own need.
const TASK_BYTES: usize = 1024;

/// A request's head.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) kind: u32,
    pub(crate) reserved: u32,
    pub(crate) sector: u64,
}

/// A range to be discarded or zeroed.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Range {
    pub(crate) sector: u64,
    pub(crate) sectors: u32,
    pub(crate) flags: u32,
}

/// What is wrong with a chain so that not even a status can be given: the device fails.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum RequestError {
    #[error("a request without a header that can be read")]
    Header,
    #[error("a request without a status byte that can be written")]
    Status,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

impl Status {
    /// The one place where errors of volumes become the guest's.
    pub(crate) fn of(result: Result<(), BlockError>) -> Self {
        match result {
            Ok(()) => Self::Ok,
            Err(BlockError::Unsupported) => Self::Unsupported,
            Err(
                BlockError::OutOfRange
                | BlockError::ReadOnly
                | BlockError::ReadFault { .. }
                | BlockError::WriteFault { .. }
                | BlockError::NoSpace
                | BlockError::Miscompare
                | BlockError::Memory
                | BlockError::NotReady
                | BlockError::CalledOff,
            ) => Self::IoError,
        }
    }
}

/// The volume that a disk shows. Requests in flight keep it alive.
pub(crate) struct Attached {
    pub(crate) volume: Arc<dyn Volume>,
    /// The operator attached it read-only.
    pub(crate) read_only: bool,
    pub(crate) sink: Rc<Sink>,
    /// A piece of a long request was moved in this turn.
    moved: Cell<bool>,
    /// Looks ahead for which requests are submitted one by one.
    apart: Cell<u32>,
}

impl Attached {
    pub(crate) fn new(volume: Arc<dyn Volume>, read_only: bool, sink: &Rc<Sink>) -> Self {
        Self { volume, read_only, sink: Rc::clone(sink), moved: Cell::new(false), apart: Cell::new(0) }
    }
}

/// A request that waited and has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub(crate) queue: u16,
    pub(crate) done: Done,
    pub(crate) result: Result<(), BlockError>,
}

/// Where tasks put their ends for the disk's next turn.
#[derive(Debug, Default)]
pub(crate) struct Sink {
    pub(crate) results: RefCell<Vec<Finished>>,
    /// The log of changed pages, while there is one.
    pub(crate) log: RefCell<Option<Rc<DirtyLog>>>,
}

/// What is needed to end a request.
#[derive(Clone, Copy)]
struct Ending {
    queue: u16,
    token: u16,
    status: Segment,
    /// Bytes of data that a success has written, and a failure may have.
    written: u32,
}

impl Ending {
    /// Writes the status and notes what was changed of `ranges`, which the guest gave us to write.
    #[expect(clippy::inline_always, reason = "what it makes stays in registers")]
    #[inline(always)]
    fn end(&self, log: Option<&DirtyLog>, ranges: &[(u64, u64)], status: Status) -> Done {
        self.status.write_at(0, &[status as u8]);
        if let Some(log) = log {
            self.mark(log, ranges);
        }
        let written = if status == Status::Ok { self.written } else { 0 };
        Done { token: self.token, status: status as u16, len: written + 1 }
    }

    /// Data come first, and may be less than there is room for; the status is the last byte.
    fn mark(&self, log: &DirtyLog, ranges: &[(u64, u64)]) {
        let mut left = u64::from(self.written);
        for &(addr, len) in ranges {
            if left == 0 {
                break;
            }
            let run = len.min(left);
            log.mark(addr, run);
            left -= run;
        }
        if let Some(&(addr, len)) = ranges.last() {
            // No overflow: the last byte's address was checked.
            log.mark(addr + (len - 1), 1);
        }
    }

    fn push(&self, sink: &Sink, ranges: &[(u64, u64)], result: Result<(), BlockError>) {
        let done = self.end(sink.log.borrow().as_deref(), ranges, Status::of(result));
        sink.results.borrow_mut().push(Finished { queue: self.queue, done, result });
    }
}

impl Buffers {
    /// Takes the header off what can be read.
    #[inline]
    fn take_header(&mut self) -> Option<(Header, usize)> {
        let mut bytes = [0; size_of::<Header>()];
        if self.readable_bytes < bytes.len() as u64 {
            return None;
        }
        let (mut filled, mut start) = (0, 0);
        while filled < bytes.len() {
            let segment = self.readable.get(start).copied()?;
            let run = segment.len().min(bytes.len() - filled);
            segment.read_at(0, bytes.get_mut(filled..filled + run)?);
            filled += run;
            if run == segment.len() {
                start += 1;
            } else {
                *self.readable.get_mut(start)? = segment.part(run, segment.len() - run)?;
            }
        }
        self.readable_bytes -= bytes.len() as u64;
        Some((Header::read_from_bytes(&bytes).ok()?, start))
    }

    /// Takes the status byte off what can be written.
    #[inline]
    fn take_status(&mut self) -> Option<Segment> {
        let last = self.writable.last_mut()?;
        let rest = last.len() - 1;
        let status = last.part(rest, 1)?;
        self.writable_bytes -= 1;
        match last.part(0, rest).filter(|data| !data.is_empty()) {
            Some(data) => *last = data,
            None => drop(self.writable.pop()),
        }
        Some(status)
    }
}

/// What a transfer moves.
struct Data<'a> {
    sector: u64,
    bytes: u64,
    pieces: &'a [Segment],
    /// What is to be logged as changed.
    changed: &'a [(u64, u64)],
}

/// Blocks of a range in sectors; `None` when they are not whole blocks.
#[inline]
fn blocks(geometry: &Geometry, sector: u64, bytes: u64) -> Option<(Lba, BlockCount)> {
    geometry.whole_blocks(ByteOffset(sector.checked_mul(SECTOR)?), bytes)
}

impl Core {
    /// Starts the request in `buffers`. `Some` when it has ended at once; the slot comes back then.
    #[inline]
    pub(crate) fn start<'s>(
        &mut self,
        slot: TaskSlot<'s>,
        queue: u16,
        token: u16,
    ) -> Result<(Option<Done>, Option<TaskSlot<'s>>), RequestError> {
        self.followed += u64::from(self.buffers.followed);
        let (header, first) = self.buffers.take_header().ok_or(RequestError::Header)?;
        let status = self.buffers.take_status().ok_or(RequestError::Status)?;
        let mut ending = Ending { queue, token, status, written: 0 };
        self.trace.fetched(queue, token, || self.fetched(&header));
        let _under = self.trace.under(ONLY, queue, token);
        let launched = match header.kind {
            kind::IN => {
                self.counters.read_commands += 1;
                self.counters.bytes_read += self.buffers.writable_bytes;
                self.transfer(slot, &header, &mut ending, Transfer::Read, 0)
            }
            kind::OUT => {
                self.counters.write_commands += 1;
                self.counters.bytes_written += self.buffers.readable_bytes;
                let transfer = Transfer::Write { fua: !self.write_back() };
                self.transfer(slot, &header, &mut ending, transfer, first)
            }
            _ => self.other(slot, &header, &mut ending, first),
        };
        Ok(self.ended(launched, &ending))
    }

    /// Starts the read or write that a plain request is, with what its header says. Otherwise as [`Self::start`].
    #[inline]
    pub(crate) fn start_plain<'s>(
        &mut self,
        slot: TaskSlot<'s>,
        queue: u16,
        token: u16,
        plain: &Plain,
        sector: u64,
        geometry: &Geometry,
    ) -> (Option<Done>, Option<TaskSlot<'s>>) {
        let bytes = plain.data.len() as u64;
        let mut ending = self.begin_plain(queue, token, plain);
        let transfer = self.direction(plain);
        let fetched = || Fetched { nsid: ONLY, operation: transfer.into(), lba: Lba(sector), count: bytes / SECTOR };
        self.trace.fetched(queue, token, fetched);
        let _under = self.trace.under(ONLY, queue, token);
        let launched = self.launch(
            slot,
            &mut ending,
            transfer,
            &Data { sector, bytes, pieces: &[plain.data], changed: &[] },
            Some(geometry),
        );
        self.ended(launched, &ending)
    }

    /// How a plain request moves its data.
    #[inline]
    fn direction(&self, plain: &Plain) -> Transfer {
        if plain.writable { Transfer::Read } else { Transfer::Write { fua: !self.write_back() } }
    }

    /// What became of a request: its end, and the slot again, if it has ended.
    #[inline]
    fn ended<'s>(
        &mut self,
        launched: Outcome<'s, Result<(), BlockError>>,
        ending: &Ending,
    ) -> (Option<Done>, Option<TaskSlot<'s>>) {
        match launched {
            Outcome::Waiting => {
                self.in_flight += 1;
                (None, None)
            }
            Outcome::Done(result, slot) => {
                self.count_error(result);
                let done = ending.end(self.log.as_deref(), &self.buffers.ranges, Status::of(result));
                (Some(done), Some(slot))
            }
        }
    }

    /// The request in `buffers`, as the trace has it: in sectors.
    #[cold]
    fn fetched(&self, header: &Header) -> Fetched {
        let (operation, bytes) = match header.kind {
            kind::IN => (EventOperation::READ, self.buffers.writable_bytes),
            kind::OUT => (EventOperation::WRITE.with_fua(!self.write_back()), self.buffers.readable_bytes),
            kind::FLUSH => (EventOperation::FLUSH, 0),
            // Their ranges are in lists.
            kind::DISCARD => (EventOperation::DEALLOCATE, 0),
            kind::WRITE_ZEROES => (EventOperation::ZERO, 0),
            _ => (EventOperation::OTHER, 0),
        };
        let lba = if bytes == 0 { 0 } else { header.sector };
        Fetched { nsid: ONLY, operation, lba: Lba(lba), count: bytes / SECTOR }
    }

    /// Counts a failed request.
    pub(crate) fn count_error(&mut self, result: Result<(), BlockError>) {
        if let Err(error) = result {
            self.counters.errors += 1;
            if matches!(error, BlockError::ReadFault { .. } | BlockError::WriteFault { .. }) {
                self.counters.media_errors += 1;
            }
        }
    }

    /// A read or write of the data in `buffers`, from its piece `first` on.
    #[inline]
    fn transfer<'s>(
        &mut self,
        slot: TaskSlot<'s>,
        header: &Header,
        ending: &mut Ending,
        transfer: Transfer,
        first: usize,
    ) -> Outcome<'s, Result<(), BlockError>> {
        let buffers = &self.buffers;
        let (pieces, bytes) = if transfer == Transfer::Read {
            (buffers.writable.as_slice(), buffers.writable_bytes)
        } else {
            (buffers.readable.get(first..).unwrap_or(&[]), buffers.readable_bytes)
        };
        self.launch(slot, ending, transfer, &Data { sector: header.sector, bytes, pieces, changed: &buffers.ranges }, None)
    }

    /// Hands a read or write to the volume, whose geometry is asked for where it is not known.
    #[inline]
    fn launch<'s>(
        &self,
        slot: TaskSlot<'s>,
        ending: &mut Ending,
        transfer: Transfer,
        data: &Data<'_>,
        geometry: Option<&Geometry>,
    ) -> Outcome<'s, Result<(), BlockError>> {
        let &Data { sector, bytes, pieces, changed } = data;
        let Some(attached) = &self.attached else { return Outcome::Done(Err(BlockError::NotReady), slot) };
        if transfer.is_write() && attached.read_only {
            return Outcome::Done(Err(BlockError::ReadOnly), slot);
        }
        let found = geometry
            .map_or_else(|| blocks(&attached.volume.geometry(), sector, bytes), |known| blocks(known, sector, bytes));
        let Some((lba, count)) = found else {
            return Outcome::Done(Err(BlockError::OutOfRange), slot);
        };
        if bytes == 0 {
            return Outcome::Done(Ok(()), slot);
        }
        // While changes are logged: of what cannot be, nothing is written, and nothing is to be marked.
        if !changed.is_empty() && attached.volume.geometry().byte_range(lba, count).is_none() {
            return Outcome::Done(Err(BlockError::OutOfRange), slot);
        }
        // From here on the volume may write.
        ending.written = if transfer.is_write() { 0 } else { bytes as u32 };
        let ending = *ending;
        if bytes > long::AT_ONCE {
            return long::launch(slot, attached, ending, transfer, data);
        }
        slot.run_with(attached, |cx, attached| {
            let segments = match pieces {
                // Nearly always; a copy of known length is two instructions.
                [one] => cx.scratch.copy_slice(&[*one]),
                pieces => cx.scratch.copy_slice(pieces),
            };
            match attached.volume.submit(cx, Request { operation: transfer.into(), lba, count, segments }) {
                // By itself, so that nothing but the tags is loaded.
                Step::Done(Ok(())) => Launch::Done(Ok(())),
                Step::Done(result) => Launch::Done(result),
                Step::Wait(future) => {
                    let changed = cx.scratch.copy_slice(changed);
                    wait(cx, async move { ending.push(&attached.sink, changed, future.await) })
                }
            }
        })
    }

    fn other<'s>(
        &mut self,
        slot: TaskSlot<'s>,
        header: &Header,
        ending: &mut Ending,
        first: usize,
    ) -> Outcome<'s, Result<(), BlockError>> {
        self.counters.other_commands += 1;
        match header.kind {
            kind::FLUSH => self.flush(slot, *ending),
            kind::GET_ID => {
                ending.written = self.identify();
                Outcome::Done(Ok(()), slot)
            }
            kind::DISCARD if self.has(feature::DISCARD) => self.ranges(slot, *ending, first, false),
            kind::WRITE_ZEROES if self.has(feature::WRITE_ZEROES) => self.ranges(slot, *ending, first, true),
            _ => Outcome::Done(Err(BlockError::Unsupported), slot),
        }
    }

    fn flush<'s>(&self, slot: TaskSlot<'s>, ending: Ending) -> Outcome<'s, Result<(), BlockError>> {
        let Some(attached) = &self.attached else { return Outcome::Done(Err(BlockError::NotReady), slot) };
        let ranges = self.buffers.ranges.as_slice();
        slot.run_with(attached, |cx, attached| {
            let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
            match attached.volume.submit(cx, request) {
                Step::Done(result) => Launch::Done(result),
                Step::Wait(future) => {
                    let ranges = cx.scratch.copy_slice(ranges);
                    wait(cx, async move { ending.push(&attached.sink, ranges, future.await) })
                }
            }
        })
    }

    /// Writes the serial; the bytes written.
    fn identify(&self) -> u32 {
        let serial = self.config.serial_bytes();
        let mut rest = serial.as_slice();
        for segment in &self.buffers.writable {
            let run = segment.len().min(rest.len());
            let (now, later) = rest.split_at(run);
            segment.write_at(0, now);
            rest = later;
        }
        (serial.len() - rest.len()) as u32
    }
}

/// A request that waits: `future` ends it.
fn wait<'a, F>(cx: TaskContext<'a>, future: F) -> Launch<'a, Result<(), BlockError>>
where
    F: Future<Output = ()> + 'a,
{
    const { assert!(size_of::<Carried<F>>() <= TASK_BYTES, "a request's future fits the room that is planned for it") };
    Launch::Wait(cx.scratch.place_future(carry(future)))
}
