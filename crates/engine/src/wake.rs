//! The list of tasks that are ready to run, and the wakers that put them there.
//!
//! The list is leaked: a waker may outlive its shard (in a buffer pool's or a lock's list), and then wakes nobody. A shard lives
//! as long as the process, so this is a fixed cost of 24 bytes per slot.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    sync::atomic::{AtomicU64, Ordering},
    task::{RawWaker, RawWakerVTable, Waker},
};

/// A number of the calling thread that is never given out again.
pub(crate) fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            // Relaxed: only uniqueness counts.
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

struct Queue {
    /// The only thread that may touch the cells.
    owner: u64,
    ready: RefCell<VecDeque<u32>>,
}

struct WakeCell {
    queue: &'static Queue,
    index: u32,
    /// On the list already: a task is at most once there, so that the list never grows.
    queued: Cell<bool>,
}

/// All wakers of one shard.
pub(crate) struct Wakers {
    queue: &'static Queue,
    cells: &'static [WakeCell],
}

impl Wakers {
    pub(crate) fn new(count: usize) -> Self {
        let ready = RefCell::new(VecDeque::with_capacity(count));
        let queue: &'static Queue = Box::leak(Box::new(Queue { owner: thread_number(), ready }));
        let cell = |index| WakeCell { queue, index, queued: Cell::new(false) };
        let cells = Box::leak((0..u32::try_from(count).expect("a sane number of tasks")).map(cell).collect());
        Self { queue, cells }
    }

    /// The waker of one task. Costs nothing: no count is kept.
    pub(crate) fn waker(&self, index: u32) -> Waker {
        let cell: *const WakeCell = &raw const self.cells[index as usize];
        // SAFETY: the vtable's functions keep RawWaker's contract: see there. The data pointer is to a leaked WakeCell.
        unsafe { Waker::from_raw(RawWaker::new(cell.cast(), &VTABLE)) }
    }

    /// Tasks on the list now.
    pub(crate) fn ready(&self) -> usize {
        self.queue.ready.borrow().len()
    }

    /// Takes the first task off the list.
    pub(crate) fn pop(&self) -> Option<u32> {
        let index = self.queue.ready.borrow_mut().pop_front()?;
        self.cells[index as usize].queued.set(false);
        Some(index)
    }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake, forget);

// Clone and drop touch no memory, so that they are fine on any thread.
fn clone(data: *const ()) -> RawWaker {
    RawWaker::new(data, &VTABLE)
}

fn forget(_: *const ()) {}

fn wake(data: *const ()) {
    // SAFETY: the pointer is to a leaked, never freed WakeCell (`Wakers::waker`). Only `queue` and `owner`, which never
    // change, are read before the thread is known to be the cells' only user.
    let cell = unsafe { &*data.cast::<WakeCell>() };
    assert_eq!(cell.queue.owner, thread_number(), "a task's waker left its shard's thread: use `remote`");
    if !cell.queued.replace(true) {
        cell.queue.ready.borrow_mut().push_back(cell.index);
    }
}
