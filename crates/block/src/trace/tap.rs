//! A place between two nodes of a volume's graph, where requests can be watched.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    task::{Context, Poll},
};

use millrace_memory::{Access, Reach, Segment};

use super::{Event, EventKind, EventOperation, Key, NOW, Now, Under, event::status_of, next_span, record};
use crate::{
    Asker, BlockCount, BlockError, BlockSize, ByteOffset, Extent, Geometry, Lba, Metadata, MetadataFormat, Operation,
    PlainFile, Request, Step, TaggedRequest, TaskContext, Transfer, Usage, Volume, VolumeError, placed_bytes,
};

/// A visit of a request to a node.
#[derive(Clone, Copy, Debug)]
struct Span {
    key: Key,
    place: u16,
    operation: EventOperation,
    number: u32,
    parent: u32,
    count: u32,
    lba: u64,
}

impl Span {
    fn begin(place: u16, operation: Operation, lba: Lba, count: BlockCount) -> Self {
        let Now { key, span: parent } = NOW.get();
        let count = u32::try_from(count.0).unwrap_or(u32::MAX);
        let span = Self { key, place, operation: operation.into(), number: next_span(), parent, count, lba: lba.0 };
        record(span.event(EventKind::Entered, 0));
        span
    }

    fn event(&self, kind: EventKind, status: u16) -> Event {
        let Self { key, place, operation, number, parent, count, lba } = *self;
        Event { time: 0, lba, span: number, parent, count, key, kind, operation, status, place }
    }

    /// What is done until the guard goes is done within it.
    fn enter(&self) -> Under {
        Under::new(Now { key: self.key, span: self.number })
    }

    fn end(&self, result: Result<(), BlockError>) {
        record(self.event(EventKind::Left, status_of(result)));
    }

    fn follow<'a>(self, cx: TaskContext<'a>, step: Step<'a>) -> Step<'a> {
        match step {
            Step::Done(result) => {
                self.end(result);
                Step::Done(result)
            }
            step @ Step::Wait(_) => Step::Wait(cx.scratch.place_future(Spanned { span: self, step })),
        }
    }
}

/// A visit that waits.
struct Spanned<'a> {
    span: Span,
    step: Step<'a>,
}

impl Future for Spanned<'_> {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let under = self.span.enter();
        let poll = Pin::new(&mut self.step).poll(cx);
        drop(under);
        if let Poll::Ready(result) = poll {
            self.span.end(result);
        }
        poll
    }
}

/// Scratch bytes that a visit takes on top of the volume's own need.
pub(crate) fn submit_bytes() -> usize {
    placed_bytes::<Spanned<'static>>()
}

/// Has a volume do a request, and records that at `place`.
#[cold]
pub(crate) fn submit<'a>(place: u16, volume: &'a dyn Volume, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
    let span = Span::begin(place, request.operation, request.lba, request.count);
    let under = span.enter();
    let step = volume.submit(cx, request);
    drop(under);
    span.follow(cx, step)
}

/// The same with metadata.
pub(crate) fn submit_tagged<'a>(
    place: u16,
    volume: &'a dyn Volume,
    cx: TaskContext<'a>,
    request: TaggedRequest,
) -> Step<'a> {
    let span = Span::begin(place, request.operation, request.lba, request.count);
    let under = span.enter();
    let step = volume.submit_tagged(cx, request);
    drop(under);
    span.follow(cx, step)
}

/// A volume as it is, with an ear to it: what a service has for its leg.
pub struct Tap {
    volume: Arc<dyn Volume>,
    /// The node's number in the trace; 0: it is not traced.
    place: AtomicU16,
}

impl Tap {
    /// A tap before a volume; it is off.
    pub fn new(volume: Arc<dyn Volume>) -> Arc<Self> {
        Arc::new(Self { volume, place: AtomicU16::new(0) })
    }

    /// Whether it stands before this volume: what is below two taps may be one.
    pub fn is_before(&self, volume: &Arc<dyn Volume>) -> bool {
        Arc::ptr_eq(&self.volume, volume)
    }

    /// Records requests from now on, under this number; 0: no more. Those in flight are recorded as they began.
    pub fn set(&self, place: u16) {
        self.place.store(place, Ordering::Relaxed);
    }
}

impl Volume for Tap {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match self.place.load(Ordering::Relaxed) {
            0 => self.volume.submit(cx, request),
            place => submit(place, &*self.volume, cx, request),
        }
    }

    #[inline]
    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        // Requests are recorded one by one.
        if self.place.load(Ordering::Relaxed) == 0 { self.volume.submit_many(requests) } else { 0 }
    }

    #[inline]
    fn do_one(&self, transfer: Transfer, at: ByteOffset, data: Segment) -> bool {
        self.place.load(Ordering::Relaxed) == 0 && self.volume.do_one(transfer, at, data)
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.volume.prefetch(lba, count)
    }

    #[inline]
    fn reach(&self, lba: Lba, count: BlockCount, access: Access) -> Option<Reach<'_>> {
        // Only requests are recorded.
        if self.place.load(Ordering::Relaxed) == 0 { self.volume.reach(lba, count, access) } else { None }
    }

    #[inline]
    fn reached(&self, lba: Lba, count: BlockCount) {
        self.volume.reached(lba, count);
    }

    fn call_off(&self, asker: Asker) {
        self.volume.call_off(asker);
    }

    fn settles_late(&self) -> bool {
        self.volume.settles_late()
    }

    fn metadata(&self) -> Metadata {
        self.volume.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        match self.place.load(Ordering::Relaxed) {
            0 => self.volume.submit_tagged(cx, request),
            place => submit_tagged(place, &*self.volume, cx, request),
        }
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.volume.format_metadata(format)
    }

    fn scratch_bytes(&self) -> usize {
        self.volume.scratch_bytes() + submit_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.volume.extent(lba)
    }

    fn as_file(&self) -> Option<&dyn PlainFile> {
        self.volume.as_file()
    }

    fn trust_again(&self) -> bool {
        self.volume.trust_again()
    }

    fn erases_by_key(&self) -> bool {
        self.volume.erases_by_key()
    }
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").field("volume", &self.volume.name()).finish_non_exhaustive()
    }
}
