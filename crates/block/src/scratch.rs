//! A task's own small memory: futures and lists of one request, placed without allocating.

use std::{
    alloc::Layout,
    any::Any,
    cell::{Cell, RefCell, UnsafeCell},
    future::Future,
    marker::{PhantomData, PhantomPinned},
    mem::MaybeUninit,
    ops::Deref,
    pin::Pin,
    ptr::NonNull,
    rc::Rc,
    task::{Context, Poll},
};

/// Objects that one request may keep alive (see [`Scratch::keep`]).
const KEPT: usize = 4;
/// Values that an arena can hold at once.
const DEPTH: usize = 64;
/// Marks the place of a value that is gone.
const GONE: u32 = 1 << 31;

/// A word of an arena.
type Word = UnsafeCell<MaybeUninit<u64>>;

/// Words of a carved arena besides its room.
const HEADER: usize = size_of::<Scratch>().div_ceil(8);

/// Bytes that a value of this type takes in a [`Scratch`].
pub const fn placed_bytes<T>() -> usize {
    size_of::<T>().next_multiple_of(8)
}

/// A bump arena. What was placed in it dies with the [`ScratchBox`] that owns it. The space comes back when everything that was
/// placed later is gone too, in whatever order they go (so that a loop over inner requests needs the room of one). Slices stay
/// until [`Scratch::reset`].
///
/// When it is full, values are placed on the heap instead: slower, never wrong. [`Scratch::overflows`] counts them, so that
/// a layer that understates its need is seen.
#[derive(Debug)]
pub struct Scratch {
    memory: NonNull<[Word]>,
    /// The memory is this arena's own; else it lies within another one, which outlives it.
    owned: bool,
    /// Counts overflows of the arena that this one was carved from.
    above: Option<NonNull<Cell<u64>>>,
    used: Cell<usize>,
    /// Where each value in `memory` starts, in their order; with [`GONE`] when it was dropped under a later one.
    starts: [Cell<u32>; DEPTH],
    /// How many there are.
    depth: Cell<usize>,
    /// Whether anything but slices was placed here since the last reset.
    touched: Cell<bool>,
    /// Values in `memory` that were not dropped.
    live: Cell<usize>,
    overflows: Cell<u64>,
    /// Slices that found no room.
    heap: RefCell<Vec<(NonNull<u8>, Layout)>>,
    kept: RefCell<[Option<Rc<dyn Any>>; KEPT]>,
    /// A carved arena must not be moved out of the one it lies in.
    _stays: PhantomPinned,
}

impl Scratch {
    /// An arena of `bytes` bytes (rounded up to 8).
    pub fn new(bytes: usize) -> Self {
        let memory: Box<[Word]> = (0..bytes.div_ceil(8)).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
        let memory = NonNull::new(Box::into_raw(memory)).expect("a box has an address");
        Self::over(memory, true, None)
    }

    fn over(memory: NonNull<[Word]>, owned: bool, above: Option<NonNull<Cell<u64>>>) -> Self {
        Self {
            memory,
            owned,
            above,
            used: Cell::new(0),
            starts: [const { Cell::new(0) }; DEPTH],
            depth: Cell::new(0),
            touched: Cell::new(false),
            live: Cell::new(0),
            overflows: Cell::new(0),
            heap: RefCell::new(Vec::new()),
            kept: RefCell::new([const { None }; KEPT]),
            _stays: PhantomPinned,
        }
    }

    /// An arena of `bytes` bytes within this one, for a part of the request that goes on beside others: what such parts place
    /// and drop is interleaved, so that in one arena their room would not come back.
    pub fn carve(&self, bytes: usize) -> ScratchBox<'_, Scratch> {
        const { assert!(align_of::<Scratch>() <= 8) };
        let words = bytes.div_ceil(8);
        let room = words.checked_add(HEADER).and_then(|all| Layout::array::<u64>(all).ok()).and_then(|room| self.take(room));
        let Some(ptr) = room else {
            self.overflowed();
            let heap = Box::into_raw(Box::new(Self::new(bytes)));
            let ptr = NonNull::new(heap).expect("a box has an address");
            return ScratchBox { ptr, place: None, owns: PhantomData };
        };
        // SAFETY: `take` handed out HEADER + words words, so that the place after the header is within them.
        let first = unsafe { ptr.cast::<Word>().add(HEADER) };
        let above = self.above.unwrap_or_else(|| NonNull::from(&self.overflows));
        let inner = Self::over(NonNull::slice_from_raw_parts(first, words), false, Some(above));
        let ptr = ptr.cast::<Scratch>();
        // SAFETY: room for a Scratch was just taken, aligned for one (checked above) and unused.
        unsafe { ptr.write(inner) };
        self.touched.set(true);
        self.live.set(self.live.get() + 1);
        ScratchBox { ptr, place: Some(Place { scratch: self, index: self.last() }), owns: PhantomData }
    }

    /// An arena of all the room that is left, for one of several requests that follow each other: what a request leaves behind goes
    /// with its arena. It takes `size_of::<Scratch>()` bytes besides.
    pub fn carve_rest(&self) -> ScratchBox<'_, Scratch> {
        let left = self.words().len() - self.used.get();
        self.carve(left.saturating_sub(HEADER) * 8)
    }

    fn words(&self) -> &[Word] {
        // SAFETY: the memory is this arena's own box, or words of the arena above, which this one's box borrows.
        unsafe { self.memory.as_ref() }
    }

    fn overflowed(&self) {
        self.overflows.set(self.overflows.get() + 1);
        if let Some(above) = self.above {
            // SAFETY: the arena above outlives this one (its box borrows it) and does not move while it is borrowed.
            let above = unsafe { above.as_ref() };
            above.set(above.get() + 1);
        }
    }

    /// Values that found no room since the arena was made.
    pub fn overflows(&self) -> u64 {
        self.overflows.get()
    }

    /// Forgets everything that was placed or kept. `&mut` proves that nothing borrows from it any more.
    ///
    /// # Panics
    /// When a placed value was leaked (`mem::forget`): it was pinned, so its memory must not be used again before it is dropped.
    #[inline]
    pub fn reset(&mut self) {
        if self.touched.get() {
            self.clear();
        }
        // Slices need nothing else.
        self.used.set(0);
        self.depth.set(0);
    }

    fn clear(&mut self) {
        assert_eq!(self.live.get(), 0, "a value in a task's scratch was leaked");
        self.touched.set(false);
        for kept in self.kept.get_mut() {
            *kept = None;
        }
        for (ptr, layout) in self.heap.get_mut().drain(..) {
            // SAFETY: `place_slice` allocated it with this layout; its borrows ended with the `&mut`.
            unsafe { std::alloc::dealloc(ptr.as_ptr(), layout) };
        }
    }

    /// Keeps `object` alive until the reset, so that a request may borrow from it for as long as it runs.
    ///
    /// # Panics
    /// When a request keeps more than a handful of objects.
    pub fn keep<T: Any>(&self, object: Rc<T>) -> &T {
        let ptr: *const T = Rc::as_ptr(&object);
        self.touched.set(true);
        let mut kept = self.kept.borrow_mut();
        let free = kept.iter_mut().find(|kept| kept.is_none());
        *free.expect("a request keeps few objects") = Some(object);
        // SAFETY: the Rc stays in `kept` until `reset`, which needs `&mut self` and so outlives the returned borrow.
        unsafe { &*ptr }
    }

    #[inline]
    fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.align() > 8 {
            return None;
        }
        let words = layout.size().div_ceil(8);
        let at = self.used.get();
        let end = at.checked_add(words)?;
        let slice = self.words().get(at..end)?;
        let depth = self.depth.get();
        self.starts.get(depth)?.set(u32::try_from(at).ok().filter(|at| at & GONE == 0)?);
        self.depth.set(depth + 1);
        self.used.set(end);
        // An UnsafeCell may be written through a shared reference; the bump never hands a word out twice.
        NonNull::new(slice.as_ptr().cast_mut().cast::<u8>())
    }

    /// Places a value.
    pub fn place<'a, T: 'a>(&'a self, value: T) -> ScratchBox<'a, T> {
        self.place_with(value, |ptr| ptr)
    }

    /// Places a future behind its trait object.
    pub fn place_future<'a, F, O>(&'a self, future: F) -> ScratchBox<'a, dyn Future<Output = O> + 'a>
    where
        F: Future<Output = O> + 'a,
        O: 'a,
    {
        self.place_with(future, |ptr| ptr as *mut (dyn Future<Output = O> + 'a))
    }

    fn place_with<'a, T: 'a, U: ?Sized>(&'a self, value: T, widen: impl FnOnce(*mut T) -> *mut U) -> ScratchBox<'a, U> {
        self.touched.set(true);
        let (ptr, place) = if let Some(ptr) = self.take(Layout::new::<T>()) {
            let ptr = ptr.cast::<T>().as_ptr();
            // SAFETY: `take` handed out room for a T, aligned (8 covers T's alignment) and unused.
            unsafe { ptr.write(value) };
            self.live.set(self.live.get() + 1);
            (ptr, Some(Place { scratch: self, index: self.last() }))
        } else {
            self.overflowed();
            (Box::into_raw(Box::new(value)), None)
        };
        let ptr = NonNull::new(widen(ptr)).expect("a placed value has an address");
        ScratchBox { ptr, place, owns: PhantomData }
    }

    /// Places a list of `len` values, made one after the other.
    pub fn place_list<'a, T: 'a>(&'a self, len: usize, mut make: impl FnMut(usize) -> T) -> ScratchBox<'a, [T]> {
        let room = Layout::array::<T>(len).ok().and_then(|room| self.take(room));
        let Some(ptr) = room else {
            self.overflowed();
            let list: Box<[T]> = (0..len).map(make).collect();
            let ptr = NonNull::new(Box::into_raw(list)).expect("a box has an address");
            return ScratchBox { ptr, place: None, owns: PhantomData };
        };
        self.touched.set(true);
        let index = self.last();
        let ptr = ptr.cast::<T>();
        for i in 0..len {
            // SAFETY: room for `len` Ts was just taken. (Should `make` panic, those before are leaked with their room.)
            unsafe { ptr.add(i).write(make(i)) };
        }
        self.live.set(self.live.get() + 1);
        let ptr = NonNull::slice_from_raw_parts(ptr, len);
        ScratchBox { ptr, place: Some(Place { scratch: self, index }), owns: PhantomData }
    }

    /// Places `len` copies of `value` as a slice that lives until the reset.
    // `&self` to `&mut`: every call returns words that nobody else has.
    #[expect(clippy::mut_from_ref)]
    pub fn place_slice<T: Copy>(&self, len: usize, value: T) -> &mut [T] {
        let layout = Layout::array::<T>(len).expect("a slice of sane length");
        let ptr = if layout.size() == 0 {
            NonNull::dangling()
        } else {
            self.take(layout).unwrap_or_else(|| self.take_heap(layout)).cast::<T>()
        };
        for i in 0..len {
            // SAFETY: room for `len` Ts was just taken; T is Copy, so nothing needs dropping.
            unsafe { ptr.add(i).write(value) };
        }
        // SAFETY: all elements were just initialised, nobody else has the words, and they live until `reset`.
        unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), len) }
    }

    /// Places a copy of `slice` that lives until the reset.
    #[inline]
    pub fn copy_slice<T: Copy>(&self, slice: &[T]) -> &[T] {
        let layout = Layout::for_value(slice);
        assert!(slice.is_empty() || layout.size() > 0, "room is for what has a size");
        if slice.is_empty() {
            return &[];
        }
        let ptr = self.take(layout).unwrap_or_else(|| self.take_heap(layout)).cast::<T>();
        // SAFETY: room for as many Ts was just taken, so that it does not overlap the slice; T is Copy.
        unsafe { std::ptr::copy_nonoverlapping(slice.as_ptr(), ptr.as_ptr(), slice.len()) };
        // SAFETY: all elements were just initialised, nobody else has the words, and they live until `reset`.
        unsafe { std::slice::from_raw_parts(ptr.as_ptr(), slice.len()) }
    }

    /// The value that was placed `index`-th is gone: gives back what is free at the end.
    fn give(&self, index: usize) {
        if let Some(start) = self.starts.get(index) {
            start.set(start.get() | GONE);
        }
        while let Some(last) = self.depth.get().checked_sub(1) {
            let start = self.starts[last].get();
            if start & GONE == 0 {
                return;
            }
            self.depth.set(last);
            self.used.set((start & !GONE) as usize);
        }
    }

    /// The number of the value placed last.
    fn last(&self) -> usize {
        self.depth.get() - 1
    }

    #[cold]
    fn take_heap(&self, layout: Layout) -> NonNull<u8> {
        self.overflowed();
        // SAFETY: the layout's size is not 0 (checked by the caller).
        let ptr = NonNull::new(unsafe { std::alloc::alloc(layout) });
        let ptr = ptr.unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        self.touched.set(true);
        self.heap.borrow_mut().push((ptr, layout));
        ptr
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.live.get() == 0 {
            self.reset();
            if self.owned {
                // SAFETY: `new` took it from a box of this type, and nothing that was placed in it is left.
                drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
            }
            return;
        }
        // Whoever still knows the leaked values may go on using them, and what they borrow.
        std::mem::forget(std::mem::take(self.kept.get_mut()));
        // The words of the arena above must not be used again: its own count of what lives in it stays up.
        assert!(self.owned, "a value in a carved scratch was leaked");
    }
}

/// The words of an arena that a value took.
#[derive(Debug)]
struct Place<'a> {
    scratch: &'a Scratch,
    index: usize,
}

/// Owns a value placed in a [`Scratch`]; pinned from the start.
#[derive(Debug)]
pub struct ScratchBox<'a, T: ?Sized> {
    ptr: NonNull<T>,
    /// `None`: on the heap.
    place: Option<Place<'a>>,
    owns: PhantomData<Box<T>>,
}

impl<T: ?Sized> Deref for ScratchBox<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the box owns an initialised value that lives until the box is dropped.
        unsafe { self.ptr.as_ref() }
    }
}

impl<T: ?Sized> ScratchBox<'_, T> {
    /// The value, pinned: it never moves, because the box only holds its address.
    pub fn as_pin_mut(&mut self) -> Pin<&mut T> {
        // SAFETY: the box owns the value exclusively, and no method moves it out.
        unsafe { Pin::new_unchecked(self.ptr.as_mut()) }
    }
}

impl<T: ?Sized> Drop for ScratchBox<'_, T> {
    fn drop(&mut self) {
        let Some(place) = &self.place else {
            // SAFETY: the value came from Box::into_raw and is dropped once, here.
            drop(unsafe { Box::from_raw(self.ptr.as_ptr()) });
            return;
        };
        // SAFETY: the value was initialised in `place_with` and is dropped once, here; nobody else has the words until they
        // are given back below, or at a reset, which needs that this box is gone.
        unsafe { self.ptr.as_ptr().drop_in_place() };
        let live = &place.scratch.live;
        live.set(live.get() - 1);
        place.scratch.give(place.index);
    }
}

impl<T: Future + ?Sized> Future for ScratchBox<'_, T> {
    type Output = T::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T::Output> {
        self.as_pin_mut().poll(cx)
    }
}
