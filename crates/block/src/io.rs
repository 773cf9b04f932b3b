//! What a waiting task may ask of its shard.

use std::{
    future::Future,
    os::fd::BorrowedFd,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use millrace_memory::{BufferPool, Segment};

use crate::{ByteOffset, Scratch};

/// An operation of the shard's asynchronous I/O (io_uring).
#[derive(Clone, Copy, Debug)]
pub enum IoOperation<'a> {
    /// `preadv2` into the segments.
    Read {
        /// Open file.
        fd: BorrowedFd<'a>,
        /// First byte.
        offset: ByteOffset,
        /// Memory. The list of it is copied when the operation starts.
        segments: &'a [Segment],
    },
    /// `pwritev2` from the segments.
    Write {
        /// Open file.
        fd: BorrowedFd<'a>,
        /// First byte.
        offset: ByteOffset,
        /// Memory. The list of it is copied when the operation starts.
        segments: &'a [Segment],
        /// Durable when completed (`RWF_DSYNC`).
        fua: bool,
    },
    /// `fdatasync`.
    DataSync {
        /// Open file.
        fd: BorrowedFd<'a>,
    },
    /// `fallocate` with the given `FALLOC_FL_*` mode.
    Allocate {
        /// Open file.
        fd: BorrowedFd<'a>,
        /// Mode bits of fallocate(2).
        mode: i32,
        /// First byte.
        offset: ByteOffset,
        /// Bytes.
        len: u64,
    },
    /// Completes after a time.
    Sleep(Duration),
}

/// A shard's asynchronous I/O, as volumes see it. Implemented by the engine.
///
/// # Safety
/// An implementation must use the memory of a started operation only until it reports the completion, and must report each exactly
/// once. After the start it has its own list of the segments.
pub unsafe trait ShardIo {
    /// Starts an operation; its token is passed to `poll_completion` until that returns `Ready`. Whoever cannot take it yet says
    /// `Pending`, and wakes the task when there is room; a shard's ring takes all, and carries them out in the order of their starts.
    ///
    /// # Safety
    /// The file must stay open, and the memory behind the segments valid, until completion.
    unsafe fn poll_start(&self, operation: &IoOperation<'_>, cx: &mut Context<'_>) -> Poll<u32>;

    /// The operation's result as the system gave it: a count, or a negative errno.
    fn poll_completion(&self, token: u32, cx: &mut Context<'_>) -> Poll<i32>;
}

/// An operation under way. Must be awaited to its end: dropping it earlier aborts the process, because the kernel would go on
/// writing to memory whose owner thinks it is free.
#[must_use = "an operation starts when it is first polled"]
pub struct IoFuture<'a> {
    io: &'a dyn ShardIo,
    operation: IoOperation<'a>,
    token: Option<u32>,
}

impl Future for IoFuture<'_> {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<i32> {
        let token = if let Some(token) = self.token {
            token
        } else {
            // SAFETY: the operation borrows its file for the future's life, which is never dropped in mid-flight; its memory stays until
            // the last request that holds it has completed (Segment's contract). One that is forgotten instead leaves nothing of its own
            // in use; its file the system has by itself from when the shard's turn ends, or the ring has room.
            match unsafe { self.io.poll_start(&self.operation, cx) } {
                Poll::Ready(token) => *self.token.insert(token),
                Poll::Pending => return Poll::Pending,
            }
        };
        let result = self.io.poll_completion(token, cx);
        if result.is_ready() {
            self.token = None;
        }
        result
    }
}

impl Drop for IoFuture<'_> {
    fn drop(&mut self) {
        // When a test cuts the power, tasks go while they sleep: no memory is at stake then.
        let harmless = cfg!(feature = "conformance") && matches!(self.operation, IoOperation::Sleep(_));
        if self.token.is_some() && !harmless {
            // A panic could be caught by a device's fence while the kernel still owns the memory.
            eprintln!("millrace: an I/O operation was dropped in flight: {:?}", self.operation);
            std::process::abort();
        }
    }
}

/// What a request may use while it waits: its own scratch, and its shard's ring and buffers.
#[derive(Clone, Copy)]
pub struct TaskContext<'a> {
    /// The request's own memory.
    pub scratch: &'a Scratch,
    /// The shard's buffers.
    pub buffers: &'a BufferPool,
    io: &'a dyn ShardIo,
}

impl<'a> TaskContext<'a> {
    /// A context over a shard's means.
    pub fn new(scratch: &'a Scratch, buffers: &'a BufferPool, io: &'a dyn ShardIo) -> Self {
        Self { scratch, buffers, io }
    }

    /// The same means with another scratch: for a part of the request that goes on beside others.
    #[must_use]
    pub fn with_scratch(self, scratch: &'a Scratch) -> Self {
        Self { scratch, ..self }
    }

    /// The same means with other buffers, and those below them: for a task that holds what requests wait for, while they hold the
    /// shard's.
    #[must_use]
    pub fn with_buffers(self, buffers: &'a BufferPool) -> Self {
        Self { buffers, ..self }
    }

    /// The same means with the buffers of the level below: for requests to inner volumes while a buffer is held.
    #[must_use]
    pub fn deeper(self) -> Self {
        Self { buffers: self.buffers.deeper(), ..self }
    }

    /// An operation of the shard's ring; its output is the system's: a count, or a negative errno.
    pub fn io(&self, operation: IoOperation<'a>) -> IoFuture<'a> {
        IoFuture { io: self.io, operation, token: None }
    }
}
