//! Shards driven turn by turn on the test's own thread, and whole engines with real threads, rings and descriptors.

mod fencing;
mod io;
mod signal;
mod sleeping;
mod tasks;

use std::{cell::Cell, rc::Rc, time::Duration};

use crate::{Device, Outcome, Polling, Readiness, Shard, ShardConfig, ShardContext};

fn config() -> ShardConfig {
    ShardConfig { tasks: 64, buffers: 2, ring_entries: 16, ..ShardConfig::new(0, None) }
}

fn shard() -> Shard {
    Shard::new(&config()).unwrap()
}

/// Turns the shard until `done`; a shard that will never get there makes the test hang, and its runner says which.
fn turn_until(shard: &mut Shard, mut done: impl FnMut() -> bool) {
    while !done() {
        shard.turn();
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Takes the outcome by value, for it borrows the shard.
#[allow(clippy::needless_pass_by_value)]
fn waits(outcome: Outcome<'_, ()>) {
    assert!(matches!(outcome, Outcome::Waiting));
}

fn flag() -> (Rc<Cell<bool>>, Rc<Cell<bool>>) {
    let flag = Rc::new(Cell::new(false));
    (Rc::clone(&flag), flag)
}

type Event = Box<dyn FnMut(&mut ShardContext<'_>, u32)>;

/// A device made of closures.
struct Gadget {
    poll: Box<dyn FnMut(&mut ShardContext<'_>) -> usize>,
    event: Event,
    arm: Box<dyn FnMut(&mut ShardContext<'_>) -> Readiness>,
    may_have_work: Box<dyn FnMut() -> bool>,
    fences: Rc<Cell<u32>>,
    armed: Rc<Cell<i32>>,
}

impl Default for Gadget {
    fn default() -> Self {
        Self {
            poll: Box::new(|_| 0),
            event: Box::new(|_, _| {}),
            arm: Box::new(|_| Readiness::Block),
            may_have_work: Box::new(|| true),
            fences: Rc::default(),
            armed: Rc::default(),
        }
    }
}

impl Device for Gadget {
    fn name(&self) -> &'static str {
        "gadget"
    }

    fn poll(&mut self, cx: &mut ShardContext<'_>) -> usize {
        (self.poll)(cx)
    }

    fn event(&mut self, cx: &mut ShardContext<'_>, token: u32) {
        (self.event)(cx, token);
    }

    fn arm(&mut self, cx: &mut ShardContext<'_>) -> Readiness {
        self.armed.set(self.armed.get() + 1);
        (self.arm)(cx)
    }

    fn may_have_work(&mut self) -> bool {
        (self.may_have_work)()
    }

    fn disarm(&mut self) {
        self.armed.set(self.armed.get() - 1);
    }

    fn fence(&mut self, _: &mut ShardContext<'_>) {
        self.fences.set(self.fences.get() + 1);
    }
}

/// Sleeps at once when there is nothing to do.
fn sleepy() -> ShardConfig {
    ShardConfig { polling: Polling::interrupt(), ..config() }
}
