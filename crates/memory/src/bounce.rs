//! Buffers of a shard's own, for services and commands that must see or change the bytes.

use std::{
    cell::{OnceCell, RefCell},
    collections::VecDeque,
    future::Future,
    io,
    mem::ManuallyDrop,
    pin::Pin,
    rc::Rc,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::{Mapping, Segment};

/// Size of every buffer in bytes; longer data is worked through piece by piece.
pub const BUFFER_SIZE: usize = 64 * 1024;
/// Takers that may wait before the list of them grows.
const WAITERS: usize = 256;
/// Pools of a shard, one below the other (see [`BufferPool::deeper`]).
const LEVELS: usize = 29;
/// Things that can have buffers of their own, each.
const OWNERS: usize = 256;

/// Which numbers of owners are taken.
static TAKEN: Mutex<[bool; OWNERS]> = Mutex::new([false; OWNERS]);

/// What has buffers of its own on each shard ([`BufferPool::of`]), as long as this lives.
#[derive(Debug)]
pub struct Owner(usize);

impl Default for Owner {
    fn default() -> Self {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        // All that come too late have the last one's together.
        let number = taken.iter().position(|taken| !taken).unwrap_or(OWNERS - 1);
        taken[number] = number < OWNERS - 1;
        Self(number)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        TAKEN.lock().unwrap_or_else(PoisonError::into_inner)[self.0] = false;
    }
}

/// What a pool and those below it have in common.
#[derive(Debug)]
struct Common {
    /// Buffers of a level.
    count: usize,
    /// The pools of owners. Made when they are first asked for.
    owners: [OnceCell<BufferPool>; OWNERS],
}

#[derive(Debug)]
struct Inner {
    /// How many are above it.
    level: usize,
    /// The pool of the layer below. Made when it is first asked for.
    deeper: OnceCell<BufferPool>,
    common: Rc<Common>,
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
/// That no circle of those who wait can close:
/// * Who holds a buffer while something below it does its part, which may need a buffer too, hands down the [`deeper`] pool. So a
///   holder waits only for pools below its own.
/// * What else requests wait for (a range, a turn, a mark, keys), they may wait for with the buffers of those above them in hand, of
///   which a copy has one more than a write. So whoever holds it has taken his own buffer before, and hands down the [`deeper`]
///   pool; where those who wait have a buffer of their own level, too, that of two levels down.
/// * A service hands down the same number of levels for all requests, reads and flushes, too: at the next one they must not be further
///   apart than a copy and a write.
/// * To what several stacks have in common requests come on any level. All below it is done with buffers [of its own](Self::of), which
///   nobody has who waits there.
///
/// [`deeper`]: Self::deeper
#[derive(Clone, Debug)]
pub struct BufferPool(Rc<Inner>);

impl BufferPool {
    /// Layers that may hold a buffer each, one above the other, for one request.
    pub const LEVELS: usize = LEVELS;

    /// A pool of `count` buffers with as many for every deeper level that is asked for. Pages are touched on first use only.
    pub fn new(count: usize) -> io::Result<Self> {
        assert!(count > 0, "a pool needs a buffer");
        Self::at(0, Rc::new(Common { count, owners: [const { OnceCell::new() }; OWNERS] }))
    }

    fn at(level: usize, common: Rc<Common>) -> io::Result<Self> {
        let mapping = ManuallyDrop::new(Mapping::anonymous(common.count * BUFFER_SIZE)?);
        let waiting = VecDeque::with_capacity(WAITERS);
        let state = State { free: (0..common.count).rev().collect(), waiting, promised: 0, next: 0 };
        let (deeper, state) = (OnceCell::new(), RefCell::new(state));
        Ok(Self(Rc::new(Inner { level, deeper, common, mapping, state })))
    }

    /// The pool for whoever works below a holder of one of these buffers. The deepest is its own: stacks that need more levels
    /// than there are must not be made.
    #[inline]
    pub fn deeper(&self) -> &BufferPool {
        self.0.deeper.get().unwrap_or_else(|| self.dig())
    }

    /// The first time that somebody works there, or the deepest level.
    #[cold]
    fn dig(&self) -> &BufferPool {
        let Inner { level, deeper, common, .. } = &*self.0;
        if level + 1 == LEVELS {
            return self;
        }
        // Where the system has no room for another one, this one must do.
        Self::at(level + 1, Rc::clone(common)).map_or(self, |pool| deeper.get_or_init(|| pool))
    }

    /// The pool for whoever works below something that has buffers of its own: nobody above it holds any of these.
    #[inline]
    pub fn of(&self, owner: &Owner) -> &BufferPool {
        let place = &self.0.common.owners[owner.0];
        place.get().unwrap_or_else(|| self.make(place))
    }

    /// The first time that somebody works there.
    #[cold]
    fn make<'a>(&'a self, place: &'a OnceCell<BufferPool>) -> &'a BufferPool {
        // As in `dig`.
        Self::new(self.0.common.count).map_or(self, |pool| place.get_or_init(|| pool))
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
