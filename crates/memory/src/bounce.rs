//! Buffers of a shard's own, for services and commands that must see or change the bytes.

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::VecDeque,
    future::Future,
    io,
    pin::Pin,
    rc::Rc,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::{Mapping, Segment, taker};

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

/// Mappings of pools that have gone, for the next ones: threads come and go.
static UNUSED: Mutex<Vec<&'static Mapping>> = Mutex::new(Vec::new());

/// Memory for so many bytes of buffers, for good.
fn have_mapping(len: usize) -> io::Result<&'static Mapping> {
    let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
    match unused.iter().position(|mapping| mapping.len() == len) {
        Some(at) => Ok(unused.swap_remove(at)),
        None => Ok(Box::leak(Box::new(Mapping::anonymous(len)?))),
    }
}

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
    shares: Rc<Shares>,
}

/// What is kept of each pool for those who have few of its buffers.
#[derive(Debug, Default)]
struct Shares {
    /// Buffers that are kept.
    spare: Cell<usize>,
    /// With fewer than these, one has few.
    share: Cell<usize>,
}

/// Of so many who wait and may not take is remembered that they may not, while one is looked for who may.
const REFUSED: usize = 8;
/// Stands for whoever has a buffer that is free.
const NOBODY_YET: u32 = u32::MAX;

#[derive(Debug)]
struct Inner {
    /// How many are above it.
    level: usize,
    /// The pool of the layer below. Made when it is first asked for.
    deeper: OnceCell<BufferPool>,
    common: Rc<Common>,
    // Never unmapped: a segment of a buffer may be copied anywhere, and this keeps every such copy memory-safe. Nor does another pool get it while
    // the kernel still reads or writes there: each buffer keeps this, a task that has one keeps it until its operation has ended (dropped before, it
    // ends the process), and a shard that stops with tasks under way never drops them.
    mapping: &'static Mapping,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<usize>,
    /// Whom each buffer was taken for.
    takers: Vec<u32>,
    /// Those who wait, first come first served as far as they may have one, by the ticket each of them drew, and whom they take for.
    waiting: VecDeque<(u64, u32, Waker)>,
    /// Buffers of those who were woken and have not come for them yet, by ticket.
    promised: Vec<(u64, usize)>,
    /// The next ticket.
    next: u64,
}

impl State {
    /// Whether one may have a free buffer. What is spare is for those who have few: see [`BufferPool::share_among`].
    fn may_take(&self, shares: &Shares, taker: u32) -> bool {
        let free = self.free.len();
        let has = || self.takers.iter().filter(|other| **other == taker).count();
        free > shares.spare.get() || (free > 0 && has() < shares.share.get())
    }

    /// Takes a free buffer.
    fn take(&mut self, shares: &Shares, taker: u32) -> Option<usize> {
        if !self.may_take(shares, taker) {
            return None;
        }
        let index = self.free.pop()?;
        self.takers[index] = taker;
        Some(index)
    }

    /// Promises a free buffer to whoever has waited longest of those who may have it; returns whom to wake.
    fn promise(&mut self, shares: &Shares) -> Option<Waker> {
        if self.free.is_empty() {
            return None;
        }
        // Of those who have many there may be a long line, one behind the other.
        let (mut refused, mut oldest) = ([NOBODY_YET; REFUSED], 0);
        let mut may_take = |taker: u32| {
            if refused.contains(&taker) {
                return false;
            }
            let may_take = self.may_take(shares, taker);
            if !may_take {
                refused[oldest] = taker;
                oldest = (oldest + 1) % REFUSED;
            }
            may_take
        };
        let at = self.waiting.iter().position(|(_, taker, _)| may_take(*taker))?;
        let (ticket, taker, waker) = self.waiting.remove(at)?;
        let index = self.take(shares, taker)?;
        self.promised.push((ticket, index));
        Some(waker)
    }
}

impl Inner {
    /// A buffer is free again: wakes those who may have one now.
    fn give_back(&self, index: usize) {
        let shares = &self.common.shares;
        let mut state = self.state.borrow_mut();
        state.takers[index] = NOBODY_YET;
        state.free.push(index);
        // Not always one: whoever gives back a buffer has one less, and may have another that was spare.
        while !state.waiting.is_empty()
            && let Some(waker) = state.promise(shares)
        {
            // A waker may do anything: no borrow is held meanwhile.
            drop(state);
            waker.wake();
            state = self.state.borrow_mut();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody has a buffer: each of them keeps this.
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(self.mapping);
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
/// * Whoever has none of a pool's buffers may have any that is free, and whoever must wait although one is free ([shares](Self::share_among))
///   has some himself: he waits for holders all the same.
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
        Self::with_shares(count, Rc::default())
    }

    fn with_shares(count: usize, shares: Rc<Shares>) -> io::Result<Self> {
        Self::at(0, Rc::new(Common { count, owners: [const { OnceCell::new() }; OWNERS], shares }))
    }

    /// So many devices use this pool, those below it, and the owners': they have [shares](taker::shares) in each.
    pub fn share_among(&self, devices: usize) {
        let Common { count, shares, .. } = &*self.0.common;
        let (spare, share) = taker::shares(*count, devices);
        shares.spare.set(spare);
        shares.share.set(share);
    }

    fn at(level: usize, common: Rc<Common>) -> io::Result<Self> {
        let mapping = have_mapping(common.count * BUFFER_SIZE)?;
        let waiting = VecDeque::with_capacity(WAITERS);
        let (takers, promised) = (vec![NOBODY_YET; common.count], Vec::with_capacity(common.count));
        let state = State { free: (0..common.count).rev().collect(), takers, waiting, promised, next: 0 };
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
        let Common { count, shares, .. } = &*self.0.common;
        Self::with_shares(*count, Rc::clone(shares)).map_or(self, |pool| place.get_or_init(|| pool))
    }

    /// Takes a buffer if one is free that nobody else is to have. Its content is whatever its last user left.
    pub fn try_take(&self) -> Option<BounceBuffer> {
        let index = self.0.state.borrow_mut().take(&self.0.common.shares, taker::current())?;
        Some(BounceBuffer { pool: Rc::clone(&self.0), index })
    }

    /// Takes a buffer, waiting until one is free. A task must not wait for a second one of this
    /// pool while it holds a first.
    pub fn take(&self) -> impl Future<Output = BounceBuffer> + '_ {
        Take { pool: &self.0, taker: taker::current(), ticket: None }
    }
}

struct Take<'a> {
    pool: &'a Rc<Inner>,
    /// Whom it is for, whoever's task looks.
    taker: u32,
    /// `Some` from the first vain look to the end.
    ticket: Option<u64>,
}

impl Take<'_> {
    fn look(&mut self, waker: &Waker) -> Option<usize> {
        let state = &mut *self.pool.state.borrow_mut();
        let Some(ticket) = self.ticket else {
            let index = state.take(&self.pool.common.shares, self.taker);
            if index.is_none() {
                self.ticket = Some(state.next);
                state.waiting.push_back((state.next, self.taker, waker.clone()));
                state.next += 1;
            }
            return index;
        };
        if let Some((.., known)) = state.waiting.iter_mut().find(|(known, ..)| *known == ticket) {
            // Polled for another reason, and perhaps from another task.
            known.clone_from(waker);
            return None;
        }
        // Who is on the list no more was promised a buffer.
        self.ticket = None;
        let at = state.promised.iter().position(|(known, _)| *known == ticket)?;
        Some(state.promised.swap_remove(at).1)
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
        if let Some(at) = state.waiting.iter().position(|(known, ..)| *known == ticket) {
            state.waiting.remove(at);
            return;
        }
        // A task that was torn down between its wake and its turn: what it was promised is the next one's.
        let Some(at) = state.promised.iter().position(|(known, _)| *known == ticket) else { return };
        let (_, index) = state.promised.swap_remove(at);
        drop(state);
        self.pool.give_back(index);
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
        self.pool.give_back(self.index);
    }
}
