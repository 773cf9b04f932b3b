//! Flushes of a file: one at a time, for all who want one.
//!
//! The system tells of what it has lost once, to whichever of two flushes on two shards asks first. The other one would be answered before
//! it is known here that the first has failed.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use millrace_block::{IoOperation, TaskContext, yield_now};

/// How often a shard looks whether the flush before it has ended, before it sleeps between looks.
const TURNS: u32 = 8;
/// How long it sleeps then, at first; twice as long each time, up to 32 times: many who wait for a slow disk must not cost a core.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
const DOUBLINGS: u32 = 5;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    busy: AtomicBool,
    /// Counts those who want one.
    wanted: AtomicU64,
    /// Up to whom it was done.
    done: AtomicU64,
}

/// Whoever has it flushes, for so many; dropping it lets the next one.
pub(super) struct Turn<'a> {
    flushes: &'a Flushes,
    all: u64,
}

impl Flushes {
    /// Waits until it is this one's turn; `None`: a flush that began since has been done.
    pub(super) async fn wait(&self, cx: TaskContext<'_>) -> Option<Turn<'_>> {
        // SeqCst: whoever flushes loads `wanted` after it has the turn, and flushes for everybody who had come by then.
        let mine = self.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let mut turns = 0_u32;
        loop {
            if self.done.load(Ordering::SeqCst) >= mine {
                return None;
            }
            // Acquire: pairs with the release of whose turn it was before, who has said by then what was lost.
            if self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Some(Turn { flushes: self, all: self.wanted.load(Ordering::SeqCst) });
            }
            if turns < TURNS {
                yield_now().await;
            } else {
                cx.io(IoOperation::Sleep(LOOK_AGAIN * (1 << (turns - TURNS).min(DOUBLINGS)))).await;
            }
            turns = turns.saturating_add(1);
        }
    }
}

impl Turn<'_> {
    /// The flush has succeeded.
    pub(super) fn done(&self) {
        self.flushes.done.fetch_max(self.all, Ordering::SeqCst);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.flushes.busy.store(false, Ordering::Release);
    }
}
