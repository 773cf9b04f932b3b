//! Task slots: where requests wait. The one place where lifetimes are erased.
//!
//! ```text
//!   reserve ─► TaskSlot ─► run(closure) ─┬─ Done(value): the scratch is reset, the slot comes back
//!      ▲                                 └─ Wait(future): parked, polled at once, then on every wake ──┐
//!      └────────────── free ◄── scratch reset ◄── future dropped ◄── finished or panicked ◄────────────┘
//! ```

use std::{
    any::Any,
    cell::{Cell, RefCell, UnsafeCell},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    task::{Context, Poll},
};

use millrace_block::{Asker, Scratch, TaskContext, TaskFuture};

use crate::{core::Core, device::Account, wake::Wakers};

/// How far a task came at once.
pub enum Launch<'a, R> {
    /// It is finished, with a value for the caller.
    Done(R),
    /// It waits: the future finishes the work by itself.
    Wait(TaskFuture<'a, ()>),
}

/// What became of a slot.
pub enum Outcome<'a, R> {
    /// The task is finished; the slot is empty again and can be run again or dropped.
    Done(R, TaskSlot<'a>),
    /// The task waits; the executor owns the slot until it finishes.
    Waiting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// A `TaskSlot` exists.
    Reserved,
    /// Holds a future that nobody is polling.
    Waiting,
    /// Its future is being polled.
    Polling,
}

struct Slot {
    // Field order is drop order: the future goes before the scratch it lies in and the object it borrows.
    future: UnsafeCell<Option<TaskFuture<'static, ()>>>,
    scratch: UnsafeCell<Scratch>,
    /// What the future borrows besides the scratch.
    shared: RefCell<Option<Rc<dyn Any>>>,
    state: Cell<State>,
    account: RefCell<Option<Rc<Account>>>,
}

/// All slots of one shard, allocated once.
pub(crate) struct Slots {
    all: Box<[Slot]>,
    /// Last in, first out: the slot used last is the one still in the cache.
    free: RefCell<Vec<u32>>,
    wakers: Wakers,
    waiting: Cell<usize>,
    started: Cell<u64>,
    /// Accounts whose task panicked since the shard last looked.
    faults: RefCell<Vec<Rc<Account>>>,
}

impl Slots {
    pub(crate) fn new(count: usize, scratch_bytes: usize) -> Self {
        let slot = |_| Slot {
            future: UnsafeCell::new(None),
            scratch: UnsafeCell::new(Scratch::new(scratch_bytes)),
            shared: RefCell::new(None),
            state: Cell::new(State::Free),
            account: RefCell::new(None),
        };
        Self {
            all: (0..count).map(slot).collect(),
            free: RefCell::new((0..u32::try_from(count).expect("a sane number of tasks")).rev().collect()),
            wakers: Wakers::new(count),
            waiting: Cell::new(0),
            started: Cell::new(0),
            faults: RefCell::new(Vec::new()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Tasks that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.get()
    }

    /// Tasks that ever waited.
    pub(crate) fn started(&self) -> u64 {
        self.started.get()
    }

    /// Tasks that were woken.
    pub(crate) fn ready(&self) -> usize {
        self.wakers.ready()
    }

    /// Slots that nobody has.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.borrow().len()
    }

    /// The next account whose task panicked.
    pub(crate) fn take_fault(&self) -> Option<Rc<Account>> {
        self.faults.borrow_mut().pop()
    }

    #[inline]
    fn reserve(&self) -> Option<u32> {
        let index = self.free.borrow_mut().pop()?;
        let state = self.all[index as usize].state.replace(State::Reserved);
        debug_assert_eq!(state, State::Free);
        Some(index)
    }

    fn release(&self, index: u32) {
        let slot = &self.all[index as usize];
        // A tiny task may have placed values and panicked: whatever was placed is gone, its room comes back here.
        Self::reset(slot);
        slot.state.set(State::Free);
        self.free.borrow_mut().push(index);
    }

    #[inline]
    fn reset(slot: &Slot) {
        // SAFETY: callers hold the slot reserved or have just emptied it, so no future is in it; the function that started the
        // task has returned, and its type (see `context`) kept it from leaving a borrow of the scratch anywhere else. So this
        // is the only reference.
        unsafe { &mut *slot.scratch.get() }.reset();
    }

    /// Runs the tasks that were ready when it was called; returns their number.
    pub(crate) fn run_ready(&self) -> usize {
        let count = self.wakers.ready();
        for _ in 0..count {
            let Some(index) = self.wakers.pop() else { break };
            self.poll(index);
        }
        count
    }

    /// Polls a task, if there is one.
    fn poll(&self, index: u32) {
        let slot = &self.all[index as usize];
        // A wake may come late, when the slot is free, reserved, or holds another task (which is then polled for nothing).
        if slot.state.get() != State::Waiting {
            return;
        }
        slot.state.set(State::Polling);
        let before = slot.account.borrow().as_ref().map_or(Asker::NOBODY, |account| account.asker).enter();
        let future = slot.future.get();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let waker = self.wakers.waker(index);
            // SAFETY: state Polling makes this call the only user of the cell: `poll` returns above, `park` needs state
            // Reserved, and nothing else touches it.
            let task = unsafe { &mut *future }.as_mut().expect("a waiting slot holds a future");
            let poll = task.as_pin_mut().poll(&mut Context::from_waker(&waker));
            if poll.is_ready() {
                // SAFETY: as above; `task` is not used again.
                unsafe { *future = None };
            }
            poll
        }));
        before.enter();
        match result {
            Ok(Poll::Pending) => slot.state.set(State::Waiting),
            Ok(Poll::Ready(())) => self.finish(index, false),
            Err(_) => {
                // SAFETY: as above. A future that panicked is dropped like any other; if that panics too, it is gone anyway.
                let dropped = catch_unwind(AssertUnwindSafe(|| unsafe { *future = None }));
                if dropped.is_err() {
                    tracing::error!("a task panicked, and again while it was dropped");
                }
                self.finish(index, true);
            }
        }
    }

    fn finish(&self, index: u32, panicked: bool) {
        let slot = &self.all[index as usize];
        self.waiting.set(self.waiting.get() - 1);
        // The future is gone; what it borrowed may go.
        let shared = slot.shared.borrow_mut().take();
        if let Some(account) = slot.account.borrow_mut().take() {
            account.waiting.set(account.waiting.get() - 1);
            if panicked {
                self.faults.borrow_mut().push(account);
            }
        }
        self.release(index);
        // Last: it may be the device's last reference, and dropping that runs foreign code.
        drop(shared);
    }

    fn park(&self, index: u32, future: TaskFuture<'static, ()>, shared: Option<Rc<dyn Any>>, account: &Rc<Account>) {
        let slot = &self.all[index as usize];
        assert_eq!(slot.state.get(), State::Reserved, "only a reserved slot takes a task");
        *slot.shared.borrow_mut() = shared;
        // SAFETY: a reserved slot's cell is empty and nobody looks at it (`poll` wants state Waiting).
        unsafe { *slot.future.get() = Some(future) };
        *slot.account.borrow_mut() = Some(Rc::clone(account));
        account.waiting.set(account.waiting.get() + 1);
        self.waiting.set(self.waiting.get() + 1);
        self.started.set(self.started.get() + 1);
        slot.state.set(State::Waiting);
        self.poll(index);
    }
}

/// An empty slot of the caller's own. Dropping it gives it back.
pub struct TaskSlot<'a> {
    core: &'a Core,
    account: &'a Rc<Account>,
    index: u32,
}

impl<'a> TaskSlot<'a> {
    #[inline]
    pub(crate) fn reserve(core: &'a Core, account: &'a Rc<Account>) -> Option<Self> {
        // What is spare is for those who have less than their share: whoever takes of it is owed as much.
        if account.waiting.get() >= core.task_share.get() && core.slots.free() <= core.tasks_spare.get() {
            return None;
        }
        let index = core.slots.reserve()?;
        Some(Self { core, account, index })
    }

    /// Runs a task in the slot.
    ///
    /// `start` may borrow from the context it is given, and must own (or share by `Rc`) everything else its future needs: the
    /// future lives on after the caller has returned. A future is polled once before this returns, so it must not need a
    /// `RefCell` that the caller has borrowed.
    #[inline]
    pub fn run<R, F>(self, start: F) -> Outcome<'a, R>
    where
        F: for<'t> FnOnce(TaskContext<'t>) -> Launch<'t, R>,
    {
        // SAFETY: `start` is generic over the context's lifetime.
        let launch = start(unsafe { self.context() });
        self.go_on(launch, || None)
    }

    /// As [`Self::run`], with an object that the task may borrow for as long as it lives: the namespace and volume of a request,
    /// the queue its completion goes to. The reference count is touched only when the task waits.
    #[inline]
    pub fn run_with<T, R, F>(self, shared: &Rc<T>, start: F) -> Outcome<'a, R>
    where
        T: 'static,
        F: for<'t> FnOnce(TaskContext<'t>, &'t T) -> Launch<'t, R>,
    {
        let object: *const T = Rc::as_ptr(shared);
        // SAFETY: `start` is generic over the lifetime of context and object, so the argument of `context` holds for both: only
        // the returned future can keep the borrow. While `start` runs, the caller's Rc keeps the object; from before the
        // future is first polled until after it is dropped, a clone in the slot does.
        let launch = start(unsafe { self.context() }, unsafe { &*object });
        self.go_on(launch, || {
            let shared: Rc<dyn Any> = Rc::<T>::clone(shared);
            Some(shared)
        })
    }

    /// The slot's means, as if they lived for ever.
    ///
    /// # Safety
    /// The context must go to nothing but a function that is generic over its lifetime and whose result is given to `go_on`.
    #[inline]
    unsafe fn context(&self) -> TaskContext<'static> {
        let core: *const Core = self.core;
        let slot = &self.core.slots.all[self.index as usize];
        // SAFETY: this is where a lifetime is lengthened, to 'static. It is sound because the memory outlives every use that can
        // be made of it:
        // * Who can use it? The caller's function is generic over the lifetime, so it cannot know that it is 'static and cannot
        //   keep the context, or anything borrowed from it, in its R or in what it captured: only in the future it returns. (For
        //   the same reason that future borrows nothing else: only what is valid for every lifetime fits.)
        // * How long does the future live? It goes into the slot and stays there until `poll` drops it, which is before the
        //   scratch is reset. A slot that never finishes is dropped with the Slots, which Core declares before the ring and
        //   the buffers, and each slot drops its future before its scratch.
        // * Does the memory stay in place? Core lies in an Rc of the shard's and is never moved out; slots are a boxed slice.
        // * The scratch's cell is only borrowed mutably in `reset`, when no future is in the slot.
        unsafe { TaskContext::new(&*slot.scratch.get(), &(*core).buffers, &(*core).ring) }
    }

    #[inline]
    fn go_on<R>(self, launch: Launch<'static, R>, shared: impl FnOnce() -> Option<Rc<dyn Any>>) -> Outcome<'a, R> {
        match launch {
            Launch::Done(value) => {
                Slots::reset(&self.core.slots.all[self.index as usize]);
                Outcome::Done(value, self)
            }
            Launch::Wait(future) => {
                let (core, account, index) = (self.core, self.account, self.index);
                // The slot is the executor's now.
                std::mem::forget(self);
                core.slots.park(index, future, shared(), account);
                Outcome::Waiting
            }
        }
    }
}

impl Drop for TaskSlot<'_> {
    fn drop(&mut self) {
        self.core.slots.release(self.index);
    }
}

impl fmt::Debug for TaskSlot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskSlot").field("index", &self.index).finish_non_exhaustive()
    }
}
