//! The least that a target does for one request at a time: two loops on the two cores exchange the lines that a guest and its target do, and do
//! nothing else. What is above that is the target's and the client's.
//!
//! ```text
//!   client: address ─► index (doorbell)        target: index ─► what it leads to ─► answer ─► its index (phase)
//!      ▲                                                                                         │
//!      └───────────────────────── sees the answer, begins the next one ◄─────────────────────────┘
//! ```

use std::{
    sync::atomic::{AtomicU64, Ordering, fence},
    thread,
    time::{Duration, Instant},
};

use crate::{
    client::Load,
    gate::pin,
    record::{Key, Record, Sample},
    suite::Suite,
};

/// Requests of one sample: some tens of milliseconds.
const REQUESTS: u64 = 100_000;
/// Looks in vain after which the other loop is given up: more than it stands still for where other work has its core.
const PATIENCE: u32 = 2_000_000_000;
/// Looks in vain after which something else may have the core: the other loop, where there is only one.
const ALONE: u32 = 1 << 16;

/// Words on cache lines of their own.
#[derive(Default)]
#[repr(align(128))]
struct Line([AtomicU64; 8]);

impl Line {
    fn get(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Relaxed)
    }

    fn set(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Relaxed);
    }

    /// Waits for the other side's store of this value, and sees what came before that. Whether it came.
    fn wait(&self, value: u64) -> bool {
        (1..PATIENCE).any(|look| {
            if look % ALONE == 0 {
                thread::sleep(Duration::from_micros(1));
            }
            // Acquire: pairs with `tell`.
            self.0[0].load(Ordering::Acquire) == value
        })
    }

    /// Release: who sees the value sees what was stored before.
    fn tell(&self, value: u64) {
        self.0[0].store(value, Ordering::Release);
    }
}

/// What guest and target share.
#[derive(Default)]
struct Lines {
    /// The available ring's index, or the submission queue's doorbell.
    asked: Line,
    /// A descriptor and its table, which stay.
    table: [Line; 2],
    /// The request's header, or the submission queue's entry.
    request: Line,
    /// Its status byte.
    status: Line,
    /// The used ring, or the completion queue.
    answered: Line,
    /// The completion queue's head doorbell.
    head: Line,
}

/// A pair of queues.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Doorbell and entry there, completion back, its head.
    Nvme,
    /// Index, descriptor, table and header there, status, used entry and index back.
    Virtio,
}

impl Kind {
    fn ask(self, lines: &Lines, number: u64) {
        lines.request.set(1, number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        lines.asked.tell(number);
        if matches!(self, Self::Virtio) {
            // As every guest that may have to notify.
            fence(Ordering::SeqCst);
        }
    }

    /// Whether it was answered well.
    fn take(self, lines: &Lines, number: u64) -> bool {
        lines.answered.wait(number)
            && match self {
                Self::Nvme => {
                    lines.head.set(0, number);
                    true
                }
                Self::Virtio => lines.answered.get(1) == number && lines.status.get(0) == 0,
            }
    }

    /// Whether there was a request.
    fn serve(self, lines: &Lines, number: u64) -> bool {
        if !lines.asked.wait(number) {
            return false;
        }
        if matches!(self, Self::Virtio) {
            let led = lines.table.iter().fold(0, |led, line| led | line.get(0));
            assert_eq!(led, 0, "nobody changes them");
        }
        let address = lines.request.get(1);
        if matches!(self, Self::Virtio) {
            lines.status.set(0, 0);
        }
        // What is answered follows from what was read.
        lines.answered.set(1, if address == u64::MAX { 0 } else { number });
        lines.answered.tell(number);
        true
    }
}

/// Requests a second between a client and a target on these cores; `None` when one of them was never there.
fn exchange(kind: Kind, client: usize, target: usize) -> Option<f64> {
    let lines = Lines::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(target);
            (1..=REQUESTS).all(|number| kind.serve(&lines, number))
        });
        let client = scope.spawn(|| {
            pin(client);
            let start = Instant::now();
            let done = (1..=REQUESTS).all(|number| {
                kind.ask(&lines, number);
                kind.take(&lines, number)
            });
            done.then(|| REQUESTS as f64 / start.elapsed().as_secs_f64())
        });
        client.join().expect("the client does not panic")
    })
}

/// Adds it to a section, as a subject of its own.
pub(crate) fn add(suite: &Suite, record: &mut Record, kind: Kind) {
    let key = Key { test: Load::randread(1).name(), depth: 1, client: "lean".into(), subject: "least".into() };
    record.note("least: two loops that exchange the lines of guest and target, and do nothing else".into());
    for _ in 0..3 * suite.wanted() {
        let first = suite.ping_pong();
        let Some(rate) = exchange(kind, suite.client, suite.target) else { continue };
        let second = suite.ping_pong();
        let mut sample = Sample::from([("iops".to_owned(), rate)]);
        if suite.gated {
            sample.insert("pings".into(), 1e9 / rate / f64::midpoint(first, second));
        }
        record.add(&key, suite.state(first).between(suite.state(second)), sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_answered() {
        let last = thread::available_parallelism().map_or(0, |cores| cores.get() - 1);
        for kind in [Kind::Nvme, Kind::Virtio] {
            assert!(exchange(kind, 0, last).is_some_and(|rate| rate > 0.0));
        }
    }
}
