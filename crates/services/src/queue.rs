//! Requests of one shard that wait for each other: who came first goes first.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    task::Waker,
};

use millrace_block::Asker;

/// A queue. It is touched by its own shard only: its mutex is there because the type must be shared, and never contended.
#[derive(Default)]
pub(crate) struct Queue(Mutex<Waiters>);

/// What a queue holds.
#[derive(Default)]
pub(crate) struct Waiters {
    waiters: VecDeque<Waiter>,
    next: u64,
}

struct Waiter {
    number: u64,
    waker: Option<Waker>,
    /// On whose behalf it waits; `None` when that is called off.
    asker: Option<Asker>,
}

impl Queue {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiters {
    /// Stands at the end; the number by which it is known.
    pub(crate) fn enter(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.waiters.push_back(Waiter { number, waker: None, asker: Some(Asker::current()) });
        number
    }

    /// Whom to wake when its turn comes. The waker stays on this shard, as wakers must.
    pub(crate) fn waits(&mut self, number: u64, waker: &Waker) {
        if let Some(me) = self.find(number).and_then(|at| self.waiters.get_mut(at)) {
            match &mut me.waker {
                Some(known) => known.clone_from(waker),
                none => *none = Some(waker.clone()),
            }
        }
    }

    /// Nobody waits any more for what it has asked for.
    pub(crate) fn call_off(&mut self, asker: Asker) {
        for waiter in self.waiters.iter_mut().filter(|waiter| waiter.asker == Some(asker)) {
            waiter.asker = None;
            if let Some(waker) = &waiter.waker {
                waker.wake_by_ref();
            }
        }
    }

    pub(crate) fn is_called_off(&self, number: u64) -> bool {
        self.find(number).and_then(|at| self.waiters.get(at)).is_some_and(|me| me.asker.is_none())
    }

    pub(crate) fn is_first(&self, number: u64) -> bool {
        self.waiters.front().is_some_and(|front| front.number == number)
    }

    pub(crate) fn leave(&mut self, number: u64) {
        if let Some(at) = self.find(number) {
            self.waiters.remove(at);
        }
    }

    /// Who is to be woken so that the first one looks.
    pub(crate) fn first(&self) -> Option<Waker> {
        self.waiters.front()?.waker.clone()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Where a waiter stands. They come in the order of their numbers.
    fn find(&self, number: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&number, |waiter| waiter.number).ok()
    }
}
