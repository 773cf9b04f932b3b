//! Requests in progress, in a table that is made when a space is opened.

use std::{ops::Range, time::Instant};

use crate::memory::Pieces;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Blocks into memory.
    Read,
    /// Memory into blocks.
    Write,
    /// What was written before is durable when it ends.
    Flush,
    /// The blocks' contents are not needed any more.
    Deallocate,
    /// The blocks read as zeroes.
    WriteZeroes,
}

/// A request on a part of the space's buffer, for [`FastPath::begin_many`](crate::FastPath::begin_many).
#[derive(Clone, Debug)]
pub struct Direct {
    /// What it does.
    pub operation: Operation,
    /// What the program calls it: its end is a [`Completion`] with this tag.
    pub tag: u64,
    /// First byte on the volume.
    pub offset: u64,
    /// The part of the buffer; of one without memory, its length counts alone.
    pub part: Range<usize>,
    /// A write, or zeroes: durable when it has ended.
    pub durable: bool,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// What the program called it.
    pub tag: u64,
    /// 0, or what went wrong as a number of errno.h.
    pub errno: i32,
    /// Bytes it moved or named; 0 when it failed.
    pub bytes: u64,
    /// How long it took in nanoseconds; 0 where the space does not measure.
    pub nanos: u64,
}

/// Who is told of a request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Teller {
    /// It is a completion with this tag.
    Tagged(u64),
    /// It counts, and its error is kept.
    Counted,
    /// Somebody looks at its place.
    Waited,
    /// Somebody did, and was told that it took too long: it counts, and its error is no news.
    Abandoned,
}

/// A request's place in the table.
pub(crate) type Place = u16;

/// One request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    /// First byte on the volume.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// The memory is the space's own buffer.
    pub(crate) direct: bool,
    /// Durable when it ends.
    pub(crate) durable: bool,
    pub(crate) teller: Teller,
    pub(crate) pieces: Pieces,
    /// Bytes for which there is a command.
    pub(crate) issued: u64,
    /// A flush has been issued: it has no bytes.
    pub(crate) flushed: bool,
    /// Commands in flight.
    pub(crate) commands: u32,
    /// The first failure.
    pub(crate) errno: i32,
    pub(crate) started: Option<Instant>,
    /// For whoever waits: it has ended.
    pub(crate) ended: bool,
}

impl Request {
    /// Whether all of it has been made into commands, or more would be useless.
    pub(crate) fn is_issued(&self) -> bool {
        self.errno != 0 || if self.operation == Operation::Flush { self.flushed } else { self.issued == self.len }
    }

    fn empty() -> Self {
        Self {
            operation: Operation::Flush,
            offset: 0,
            len: 0,
            direct: false,
            durable: false,
            teller: Teller::Counted,
            pieces: Pieces::default(),
            issued: 0,
            flushed: false,
            commands: 0,
            errno: 0,
            started: None,
            ended: false,
        }
    }
}

/// All requests of a space.
#[derive(Debug)]
pub(crate) struct Table {
    requests: Vec<Request>,
    free: Vec<Place>,
}

impl Table {
    pub(crate) fn new(places: Place) -> Self {
        Self { requests: (0..places).map(|_| Request::empty()).collect(), free: (0..places).rev().collect() }
    }

    /// A free place, which is taken now.
    pub(crate) fn take(&mut self) -> Option<Place> {
        self.free.pop()
    }

    pub(crate) fn give_back(&mut self, place: Place) {
        assert!(self.free.len() < self.requests.len(), "place {place} is given back twice");
        self.free.push(place);
    }

    /// Requests in progress.
    pub(crate) fn in_progress(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    pub(crate) fn get(&mut self, place: Place) -> &mut Request {
        &mut self.requests[usize::from(place)]
    }

    /// Two fields at once: the request, read-only.
    pub(crate) fn look(&self, place: Place) -> &Request {
        &self.requests[usize::from(place)]
    }
}
