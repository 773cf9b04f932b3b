//! A thread that drops what is slow to drop (unmapping a guest's memory takes milliseconds), so that no shard has to.
#![forbid(unsafe_code)]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        OnceLock,
        mpsc::{Sender, channel},
    },
    thread,
};

type Corpse = Box<dyn Send>;

static REAPER: OnceLock<Option<Sender<Corpse>>> = OnceLock::new();

/// Starts the thread, if it does not run yet: shards may be forbidden to start threads later.
pub(crate) fn be_ready() {
    REAPER.get_or_init(start);
}

/// Drops `value` on a background thread, some time soon.
pub fn drop_later(value: Box<dyn Send>) {
    match REAPER.get_or_init(start) {
        // The thread never ends, so the value is never returned by the channel.
        Some(reaper) => drop(reaper.send(value)),
        None => drop(value),
    }
}

fn start() -> Option<Sender<Corpse>> {
    let (sender, receiver) = channel::<Corpse>();
    let run = move || {
        for corpse in receiver {
            if catch_unwind(AssertUnwindSafe(|| drop(corpse))).is_err() {
                tracing::error!("a value panicked while it was dropped");
            }
        }
    };
    match thread::Builder::new().name("millrace-reaper".into()).spawn(run) {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::warn!(%error, "no thread for slow drops: they will delay the shards");
            None
        }
    }
}
