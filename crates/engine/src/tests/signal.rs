//! An event between tasks of one shard.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
};

/// Lets tasks of one shard wait until another one says that something has changed: range locks, queues, throttles.
///
/// ```text
///   while !lock.try_take(range) { signal.wait().await; }        // nothing runs between the look and the wait
/// ```
#[derive(Debug)]
pub(super) struct Signal {
    /// Notifications so far.
    epoch: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl Signal {
    /// A signal with room for so many waiting tasks before it must allocate.
    pub(super) fn new(capacity: usize) -> Self {
        Self { epoch: Cell::new(0), waiting: RefCell::new(Vec::with_capacity(capacity)) }
    }

    /// Completes at the first notification after this call.
    pub(super) fn wait(&self) -> Wait<'_> {
        Wait { signal: self, epoch: self.epoch.get() }
    }

    /// Wakes every task that waits now.
    pub(super) fn notify_all(&self) {
        self.epoch.set(self.epoch.get() + 1);
        let mut waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        // No borrow is held while wakers run; a task that waits anew meanwhile goes to the fresh list.
        for waker in &waiting {
            waker.wake_by_ref();
        }
        waiting.clear();
        let mut fresh = self.waiting.borrow_mut();
        if fresh.is_empty() {
            *fresh = waiting;
        }
    }
}

/// Waits for a [`Signal`].
#[must_use = "waits only when awaited"]
#[derive(Debug)]
pub(super) struct Wait<'a> {
    signal: &'a Signal,
    epoch: u64,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.signal.epoch.get() != self.epoch {
            return Poll::Ready(());
        }
        let mut waiting = self.signal.waiting.borrow_mut();
        // Polled again for another reason, a task may be listed twice: harmless, but it must not make the list grow.
        if waiting.len() < waiting.capacity() || !waiting.iter().any(|known| known.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}
