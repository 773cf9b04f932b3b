//! Tasks that wait for the same thing, first come first served.

use std::{collections::VecDeque, task::Waker};

/// See the module. Of so many things that are free, the first so many in the line may take one each, called or not, and a newcomer one that
/// is left over.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiting: VecDeque<Waiter>,
    /// The next number.
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    /// They stand in the order of these.
    number: u64,
    /// `None`: it was called and has not come yet, or comes without.
    waker: Option<Waker>,
}

impl Line {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self { waiting: VecDeque::with_capacity(capacity), next: 0 }
    }

    /// Whether the one with this number, or one without, may take something when so many are free.
    #[inline]
    pub(super) fn may_take(&self, number: Option<u64>, free: usize) -> bool {
        number.map_or(self.waiting.len(), |number| self.find(number)) < free
    }

    /// Stands in the line, at its end or where it is. With a waker it is called when its turn comes.
    pub(super) fn stand(&mut self, number: &mut Option<u64>, waker: Option<Waker>) {
        if let Some(number) = *number {
            let at = self.find(number);
            self.waiting[at].waker = waker;
            return;
        }
        self.waiting.push_back(Waiter { number: self.next, waker });
        *number = Some(self.next);
        self.next += 1;
    }

    /// Leaves the line, if it stands there. Who does not take anything has the others [called](Self::call).
    #[inline]
    pub(super) fn leave(&mut self, number: &mut Option<u64>) {
        if let Some(number) = number.take() {
            self.waiting.remove(self.find(number));
        }
    }

    /// Wakes those whose turn it is, now that so many are free.
    pub(super) fn call(&mut self, free: usize) {
        self.waiting.iter_mut().take(free).filter_map(|waiter| waiter.waker.take()).for_each(Waker::wake);
    }

    /// How many stand before it.
    fn find(&self, number: u64) -> usize {
        let found = self.waiting.binary_search_by_key(&number, |waiter| waiter.number);
        found.expect("who has a number stands in the line")
    }
}
