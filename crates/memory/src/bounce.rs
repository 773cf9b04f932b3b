//! Buffers of a shard's own, for services and commands that must see or change the bytes.

use std::{
    cell::RefCell,
    future::Future,
    io,
    mem::ManuallyDrop,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use crate::{Mapping, Segment};

/// Size of every buffer in bytes; longer data is worked through piece by piece.
pub const BUFFER_SIZE: usize = 64 * 1024;

#[derive(Debug)]
struct Inner {
    // Never unmapped: a segment of a buffer may be copied anywhere, and this keeps every such copy memory-safe.
    mapping: ManuallyDrop<Mapping>,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<usize>,
    waiting: Vec<Waker>,
}

/// A fixed number of equal, page-aligned buffers. Taking one never allocates; when all are out, the taker waits.
#[derive(Clone, Debug)]
pub struct BufferPool(Rc<Inner>);

impl BufferPool {
    /// A pool of `count` buffers. Pages are touched on first use only.
    pub fn new(count: usize) -> io::Result<Self> {
        assert!(count > 0, "a pool needs a buffer");
        let mapping = ManuallyDrop::new(Mapping::anonymous(count * BUFFER_SIZE)?);
        let state = RefCell::new(State { free: (0..count).rev().collect(), waiting: Vec::with_capacity(count) });
        Ok(Self(Rc::new(Inner { mapping, state })))
    }

    /// Takes a buffer if one is free. Its content is whatever its last user left.
    pub fn try_take(&self) -> Option<BounceBuffer> {
        let index = self.0.state.borrow_mut().free.pop()?;
        Some(BounceBuffer { pool: Rc::clone(&self.0), index })
    }

    /// Takes a buffer, waiting until one is free. A task must not wait for a second one while it holds a first.
    pub fn take(&self) -> impl Future<Output = BounceBuffer> + '_ {
        Take(self)
    }
}

struct Take<'a>(&'a BufferPool);

impl Future for Take<'_> {
    type Output = BounceBuffer;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BounceBuffer> {
        if let Some(buffer) = self.0.try_take() {
            return Poll::Ready(buffer);
        }
        self.0.0.state.borrow_mut().waiting.push(cx.waker().clone());
        Poll::Pending
    }
}

/// One buffer, returned to its pool on drop.
#[derive(Debug)]
pub struct BounceBuffer {
    pool: Rc<Inner>,
    index: usize,
}

impl BounceBuffer {
    /// The first `len` bytes as a segment.
    ///
    /// # Panics
    /// When `len` exceeds [`BUFFER_SIZE`].
    pub fn segment(&self, len: usize) -> Segment {
        assert!(len <= BUFFER_SIZE, "a bounce buffer holds {BUFFER_SIZE} bytes");
        // SAFETY: the mapping is writable and never unmapped.
        unsafe { self.pool.mapping.segment(self.index * BUFFER_SIZE, len) }.expect("the index lies within the pool")
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        let mut state = self.pool.state.borrow_mut();
        state.free.push(self.index);
        // All are woken and all but one wait again: which one gets it is the executor's order, and none is forgotten.
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for waker in &waiting {
            waker.wake_by_ref();
        }
        let mut emptied = waiting;
        emptied.clear();
        let mut state = self.pool.state.borrow_mut();
        if state.waiting.is_empty() {
            state.waiting = emptied;
        }
    }
}
