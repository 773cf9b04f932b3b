//! Buffers of a shard's own, for services and commands that must see or change the bytes.

use std::{
    cell::RefCell,
    collections::VecDeque,
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
/// Takers that may wait before the list of them grows.
const WAITERS: usize = 256;
/// Pools of a shard, one below the other (see [`BufferPool::deeper`]).
const LEVELS: usize = 16;

#[derive(Debug)]
struct Inner {
    /// The pool of the layer below.
    deeper: Option<BufferPool>,
    // Never unmapped: a segment of a buffer may be copied anywhere, and this keeps every such copy memory-safe.
    mapping: ManuallyDrop<Mapping>,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<usize>,
    /// Those who wait, first come first served, by the ticket each of them drew. Never longer than there are takers.
    waiting: VecDeque<(u64, Waker)>,
    /// Free buffers that belong to takers who were woken and have not come for them yet.
    promised: usize,
    /// The next ticket.
    next: u64,
}

impl State {
    /// Takes a free buffer that nobody was promised.
    fn take(&mut self) -> Option<usize> {
        if self.free.len() > self.promised { self.free.pop() } else { None }
    }

    /// Promises a buffer that became free to whoever has waited longest; returns whom to wake.
    fn promise(&mut self) -> Option<Waker> {
        let (_, waker) = self.waiting.pop_front()?;
        self.promised += 1;
        Some(waker)
    }
}

/// A fixed number of equal, page-aligned buffers. Taking one never allocates; when all are out, the taker waits.
///
/// Who holds a buffer while something below it does its part, which may need a buffer too, hands down the [`deeper`] pool. So a
/// holder waits only for pools below its own, and no circle of waiting holders can close.
///
/// [`deeper`]: Self::deeper
#[derive(Clone, Debug)]
pub struct BufferPool(Rc<Inner>);

impl BufferPool {
    /// Layers that may hold a buffer each, one above the other, for one request.
    pub const LEVELS: usize = LEVELS;

    /// A pool of `count` buffers with as many for every deeper level. Pages are touched on first use only.
    pub fn new(count: usize) -> io::Result<Self> {
        let mut pool = None;
        for _ in 0..LEVELS {
            pool = Some(Self::above(count, pool)?);
        }
        Ok(pool.expect("there is more than one level"))
    }

    fn above(count: usize, deeper: Option<BufferPool>) -> io::Result<Self> {
        assert!(count > 0, "a pool needs a buffer");
        let mapping = ManuallyDrop::new(Mapping::anonymous(count * BUFFER_SIZE)?);
        let waiting = VecDeque::with_capacity(WAITERS);
        let state = State { free: (0..count).rev().collect(), waiting, promised: 0, next: 0 };
        Ok(Self(Rc::new(Inner { deeper, mapping, state: RefCell::new(state) })))
    }

    /// The pool for whoever works below a holder of one of these buffers. The deepest is its own: stacks that need more levels
    /// than there are must not be made.
    pub fn deeper(&self) -> &BufferPool {
        self.0.deeper.as_ref().unwrap_or(self)
    }

    /// Takes a buffer if one is free that nobody waits for. Its content is whatever its last user left.
    pub fn try_take(&self) -> Option<BounceBuffer> {
        let index = self.0.state.borrow_mut().take()?;
        Some(BounceBuffer { pool: Rc::clone(&self.0), index })
    }

    /// Takes a buffer, waiting until one is free. A task must not wait for a second one of this
    /// pool while it holds a first.
    pub fn take(&self) -> impl Future<Output = BounceBuffer> + '_ {
        Take { pool: &self.0, ticket: None }
    }
}

struct Take<'a> {
    pool: &'a Rc<Inner>,
    /// `Some` from the first vain look to the end.
    ticket: Option<u64>,
}

impl Take<'_> {
    fn look(&mut self, waker: &Waker) -> Option<usize> {
        let state = &mut *self.pool.state.borrow_mut();
        let Some(ticket) = self.ticket else {
            let index = state.take();
            if index.is_none() {
                self.ticket = Some(state.next);
                state.waiting.push_back((state.next, waker.clone()));
                state.next += 1;
            }
            return index;
        };
        if let Some((_, known)) = state.waiting.iter_mut().find(|(known, _)| *known == ticket) {
            // Polled for another reason, and perhaps from another task.
            known.clone_from(waker);
            return None;
        }
        // Who is on the list no more was promised a buffer.
        self.ticket = None;
        state.promised -= 1;
        state.free.pop()
    }
}

impl Future for Take<'_> {
    type Output = BounceBuffer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BounceBuffer> {
        match self.look(cx.waker()) {
            Some(index) => Poll::Ready(BounceBuffer { pool: Rc::clone(self.pool), index }),
            None => Poll::Pending,
        }
    }
}

impl Drop for Take<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.pool.state.borrow_mut();
        if let Some(at) = state.waiting.iter().position(|(known, _)| *known == ticket) {
            state.waiting.remove(at);
            return;
        }
        // A task that was torn down between its wake and its turn: what it was promised is the next one's.
        state.promised -= 1;
        let next = state.promise();
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
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
        let next = state.promise();
        // A waker may do anything: no borrow is held meanwhile.
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}
