//! Flushes of a leg that those who need one at the same time have together.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::{BlockError, TaskContext, Volume};

use crate::{
    legs,
    locks::{Turn, until},
};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    turn: Turn,
    /// Counts those who need one.
    wanted: AtomicU64,
    /// Up to whom it was done.
    done: AtomicU64,
}

impl Flushes {
    /// Makes durable what was written before.
    pub(crate) async fn flush(&self, cx: TaskContext<'_>, leg: &dyn Volume) -> Result<(), BlockError> {
        // SeqCst: whoever flushes loads `wanted` after it has the turn, and flushes for everybody who had come by then.
        let mine = self.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let is_done = || self.done.load(Ordering::SeqCst) >= mine;
        let turn = until(cx, || if is_done() { Some(None) } else { self.turn.try_take().map(Some) }).await;
        if turn.is_some() && !is_done() {
            let all = self.wanted.load(Ordering::SeqCst);
            legs::flush(cx, leg).await?;
            self.done.fetch_max(all, Ordering::SeqCst);
        }
        Ok(())
    }
}
