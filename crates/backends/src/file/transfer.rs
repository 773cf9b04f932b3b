//! The requests of a file volume that wait for the ring.

use std::{slice, sync::atomic::Ordering, time::Duration};

use millrace_block::{BlockError, ByteOffset, IoOperation, Operation, Request, TaskContext};
use millrace_memory::{BUFFER_SIZE, Segment, SegmentCursor};

use super::{FileVolume, Kind, length};

/// Segments the system takes at once (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;
/// Times that a request is tried again after the system asked for it, one millisecond apart.
const PATIENCE: u32 = 1000;
/// Times that the one buffer of zeroes is named in one write.
const ZEROES: usize = 16;

/// Which way data move.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direction {
    Read,
    Write { fua: bool },
}

impl Direction {
    fn of(operation: Operation) -> Self {
        match operation {
            Operation::Write { fua } => Self::Write { fua },
            _ => Self::Read,
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
        }
    }

    fn error(self, errno: i32) -> BlockError {
        match self {
            Self::Read => BlockError::from_read_errno(errno),
            Self::Write { .. } => BlockError::from_write_errno(errno),
        }
    }
}

/// How often a request was put off.
struct Retries(u32);

impl Retries {
    /// Waits before another try, if the system asks for one and there were not too many.
    async fn again(&mut self, cx: TaskContext<'_>, errno: i32) -> bool {
        if !matches!(errno, libc::EINTR | libc::EAGAIN) || self.0 == PATIENCE {
            return false;
        }
        self.0 += 1;
        cx.io(IoOperation::Sleep(Duration::from_millis(1))).await;
        true
    }
}

impl FileVolume {
    #[inline]
    pub(super) fn offset_of(&self, request: &Request<'_>) -> (u64, u64) {
        let shift = self.shape.get().0.shift();
        // No overflow: `check` found the range within the volume.
        (request.lba.0 << shift, request.count.0 << shift)
    }

    /// Which way a request's data move, and whether a flush follows. The system tells a durable write, as it does a flush, of what became of
    /// others: where that may be anything, the write is a plain one, which is told of itself alone, and the flush has its turn.
    fn way_of(&self, operation: Operation) -> (Direction, bool) {
        match Direction::of(operation) {
            Direction::Write { fua: true } if !self.is_direct() || self.cached.held_any(self.cached.durable()) => {
                (Direction::Write { fua: false }, true)
            }
            direction => (direction, false),
        }
    }

    /// A read or write of memory that the system takes as it is.
    pub(super) async fn transfer(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (offset, _) = self.offset_of(&request);
        let (direction, flushes) = self.way_of(request.operation);
        self.move_all(cx, direction, offset, request.segments).await?;
        if flushes { self.sync(cx, request).await } else { Ok(()) }
    }

    /// A read or write by way of an aligned buffer.
    pub(super) async fn bounced(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (offset, len) = self.offset_of(&request);
        let buffer = cx.buffers.take().await;
        let (direction, flushes) = self.way_of(request.operation);
        let mut place = SegmentCursor::new(request.segments);
        let mut done = 0;
        while done < len {
            let piece = [buffer.segment((len - done).min(BUFFER_SIZE as u64) as usize)];
            if matches!(direction, Direction::Write { .. }) {
                place.copy_to(piece[0]);
            }
            self.move_all(cx, direction, offset + done, &piece).await?;
            if matches!(direction, Direction::Read) {
                place.copy_from(piece[0]);
            }
            done += piece[0].len() as u64;
        }
        // A flush may take long, and others may want the buffer.
        drop(buffer);
        if flushes { self.sync(cx, request).await } else { Ok(()) }
    }

    /// Moves all of the segments' bytes, however few the system moves at once. What lies past a file's end is read as zeroes.
    pub(super) async fn move_all(
        &self,
        cx: TaskContext<'_>,
        direction: Direction,
        offset: u64,
        segments: &[Segment],
    ) -> Result<(), BlockError> {
        let (fd, end) = (self.file(), offset + millrace_memory::total_len(segments) as u64);
        let mut place = SegmentCursor::new(segments);
        let mut at = offset;
        let (mut retries, durable) = (Retries(0), self.cached.durable());
        while at < end {
            let part = place.split_segment();
            let whole = place.whole_segments();
            let segments = match &part {
                Some(part) => slice::from_ref(part),
                None => whole.get(..MAX_SEGMENTS).unwrap_or(whole),
            };
            let (here, direct) = (ByteOffset(at), self.is_direct());
            let result = match direction {
                Direction::Read => cx.io(IoOperation::Read { fd, offset: here, segments }).await,
                Direction::Write { fua } => cx.io(IoOperation::Write { fd, offset: here, segments, fua }).await,
            };
            match (usize::try_from(result), direction) {
                // A device that has become smaller has lost what was there; a file that is shorter has a hole.
                (Ok(0), Direction::Read) if self.kind == Kind::Device => {
                    return Err(self.failed("read", at, libc::EIO, BlockError::ReadFault { errno: libc::EIO }));
                }
                (Ok(0), Direction::Read) => {
                    place.fill_rest(0);
                    return Ok(());
                }
                (Ok(0), Direction::Write { .. }) => {
                    return Err(self.failed("write", at, libc::EIO, BlockError::WriteFault { errno: libc::EIO }));
                }
                (Ok(moved), _) => {
                    place.skip(moved);
                    at += moved as u64;
                    if matches!(direction, Direction::Read) && self.kind == Kind::Regular && self.is_ragged(at) {
                        // Direct I/O stops inside a block only where the file ends.
                        place.fill_rest(0);
                        return Ok(());
                    }
                }
                (Err(_), _) => {
                    let refused = result == -libc::EINVAL && direct && self.give_up_direct();
                    if !refused && !retries.again(cx, -result).await {
                        if matches!(direction, Direction::Write { fua: true }) {
                            self.note_told(-result, durable);
                        }
                        return Err(self.move_failed(direction, at, -result));
                    }
                }
            }
        }
        if matches!(direction, Direction::Write { .. }) {
            self.written(offset, end - offset);
        }
        Ok(())
    }

    /// The error of a read or write that the system failed.
    #[cold]
    fn move_failed(&self, direction: Direction, at: u64, errno: i32) -> BlockError {
        // Past its end a device says of a write that there is no room; one that was pulled has none at all.
        let full = matches!(direction, Direction::Write { .. }) && errno == libc::ENOSPC && self.kind == Kind::Device;
        if full && length(&self.fd).is_ok_and(|length| at >= length) {
            let what = "write where the device ends by now, smaller than it was or gone";
            return self.failed(what, at, libc::ENODEV, BlockError::WriteFault { errno: libc::ENODEV });
        }
        self.failed(direction.what(), at, errno, direction.error(errno))
    }

    /// A durable write has failed: it may have been told of what came into the page cache while it was under way, and the next flush will not
    /// be. What was there before is not asked for so: see `way_of`. `durable`: how much of that was as the write began.
    #[cold]
    fn note_told(&self, errno: i32, durable: u64) {
        // Memory that a client took away, of which no disk tells, must not cost others that have the file. A disk tells of what it has lost
        // with many numbers, all of which may be the write's own as well.
        if errno != libc::EFAULT && (!self.is_direct() || self.cached.held_any(durable)) {
            self.lost.store(errno, Ordering::Relaxed);
        }
    }

    fn is_ragged(&self, at: u64) -> bool {
        self.is_direct() && self.alignment.is_some_and(|alignment| !at.is_multiple_of(alignment.offset as u64))
    }

    /// A flush.
    pub(super) async fn sync(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let mut retries = Retries(0);
        let turn = self.flushes.wait(cx).await;
        let covered = self.cached.covered();
        loop {
            let result = match &turn {
                Some(_) => cx.io(IoOperation::DataSync { fd: self.file() }).await,
                None => 0,
            };
            // After the system's answer: a write beside this flush may have been told of the loss in its place.
            let lost = self.lost.load(Ordering::Relaxed);
            if lost != 0 {
                return Err(self.failed("flush, as an earlier one has failed", 0, lost, BlockError::from_write_errno(lost)));
            }
            if result >= 0 {
                if let Some(turn) = &turn {
                    self.cached.made_durable(covered);
                    turn.done();
                }
                return Ok(());
            }
            if !retries.again(cx, -result).await {
                self.lost.store(-result, Ordering::Relaxed);
                return Err(self.failed("flush", 0, -result, BlockError::from_write_errno(-result)));
            }
        }
    }

    /// Makes a range read as zeroes, in the cheapest way that the request and the system allow.
    pub(super) async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (fua, give_back) = match request.operation {
            Operation::WriteZeroes { fua, deallocate } => (fua, deallocate),
            _ => (false, true),
        };
        let ways = [
            (give_back, &self.can_punch, libc::FALLOC_FL_PUNCH_HOLE),
            (request.operation != Operation::Deallocate, &self.can_zero_range, libc::FALLOC_FL_ZERO_RANGE),
        ];
        let (offset, len) = self.offset_of(&request);
        self.forget(offset, len);
        let putting = self.note_zeroed([offset, offset + len]);
        let mut erased = false;
        for (wanted, able, mode) in ways {
            if wanted && !erased && able.load(Ordering::Relaxed) {
                let result = self.allocate(cx, mode, offset, len).await;
                self.forget(offset, len);
                erased = result?;
                if !erased {
                    able.store(false, Ordering::Relaxed);
                }
            }
        }
        if !erased {
            self.write_zeroes(cx, offset, len).await?;
        }
        // What is under way no flush makes durable.
        drop(putting);
        if fua { self.sync(cx, request).await } else { Ok(()) }
    }

    /// One fallocate; false when the system cannot do it here.
    async fn allocate(&self, cx: TaskContext<'_>, mode: i32, offset: u64, len: u64) -> Result<bool, BlockError> {
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        let mut retries = Retries(0);
        loop {
            let result = cx.io(IoOperation::Allocate { fd: self.file(), mode, offset: ByteOffset(offset), len }).await;
            match -result {
                errno if errno <= 0 => return Ok(true),
                libc::EOPNOTSUPP | libc::ENOSYS => return Ok(false),
                errno if retries.again(cx, errno).await => {}
                errno => return Err(self.failed("erase", offset, errno, BlockError::from_write_errno(errno))),
            }
        }
    }

    async fn write_zeroes(&self, cx: TaskContext<'_>, offset: u64, len: u64) -> Result<(), BlockError> {
        let buffer = cx.buffers.take().await;
        let zeroes = buffer.segment(BUFFER_SIZE);
        zeroes.fill(0);
        let mut done = 0;
        while done < len {
            let left = (len - done) as usize;
            let direction = Direction::Write { fua: false };
            if left >= BUFFER_SIZE {
                let segments = [zeroes; ZEROES];
                let segments = &segments[..(left / BUFFER_SIZE).min(ZEROES)];
                self.move_all(cx, direction, offset + done, segments).await?;
                done += (segments.len() * BUFFER_SIZE) as u64;
            } else {
                self.move_all(cx, direction, offset + done, &[buffer.segment(left)]).await?;
                done = len;
            }
        }
        Ok(())
    }
}
