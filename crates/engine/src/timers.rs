//! Sleeps of tasks: a heap of deadlines. Not the ring's timeouts, so that a thousand throttled requests take no ring entry
//! from those that could run.
#![forbid(unsafe_code)]

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    task::{Context, Poll, Waker},
    time::Instant,
};

enum Timer {
    Free,
    Armed(Waker),
    Fired,
}

/// All timers of one shard. Grows only beyond the capacity it was made with.
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
    all: Vec<Timer>,
    free: Vec<u32>,
}

impl Timers {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            heap: BinaryHeap::with_capacity(capacity),
            all: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
        }
    }

    pub(crate) fn start(&mut self, deadline: Instant, waker: &Waker) -> u32 {
        let token = self.free.pop().unwrap_or_else(|| {
            self.all.push(Timer::Free);
            self.all.len() as u32 - 1
        });
        self.all[token as usize] = Timer::Armed(waker.clone());
        self.heap.push(Reverse((deadline, token)));
        token
    }

    /// Ready once the timer has fired; the token is free then.
    pub(crate) fn poll(&mut self, token: u32, cx: &Context<'_>) -> Poll<()> {
        let timer = &mut self.all[token as usize];
        match timer {
            Timer::Fired => {
                *timer = Timer::Free;
                self.free.push(token);
                Poll::Ready(())
            }
            Timer::Armed(waker) => {
                waker.clone_from(cx.waker());
                Poll::Pending
            }
            Timer::Free => panic!("timer {token} was polled after its end"),
        }
    }

    /// Fires one timer that is due.
    pub(crate) fn fire(&mut self, now: Instant) -> Option<Waker> {
        let &Reverse((deadline, token)) = self.heap.peek()?;
        if deadline > now {
            return None;
        }
        self.heap.pop();
        match std::mem::replace(&mut self.all[token as usize], Timer::Fired) {
            Timer::Armed(waker) => Some(waker),
            Timer::Free | Timer::Fired => panic!("timer {token} fired twice"),
        }
    }

    /// The first deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }
}
