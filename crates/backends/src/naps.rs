//! The sleeps of a task that nobody wakes, between two looks at what it waits for.

use std::time::Duration;

use millrace_block::{IoOperation, TaskContext};

/// The first sleep.
const FIRST: Duration = Duration::from_micros(50);
/// Each is twice as long as the one before, up to so many times: many who wait for long must not cost a core.
const DOUBLINGS: u32 = 4;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Naps(u32);

impl Naps {
    pub(crate) async fn nap(&mut self, cx: TaskContext<'_>) {
        cx.io(IoOperation::Sleep(FIRST * (1 << self.0))).await;
        self.0 = (self.0 + 1).min(DOUBLINGS);
    }
}
