//! Which leg a read goes to.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::PerShard;

use crate::members::state::MOST_LEGS;

/// How reads are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// To each leg in turn.
    RoundRobin,
    /// To the leg with the fewest reads of this shard's in flight.
    ShortestQueue,
    /// To this leg, as long as it is good.
    Prefer(usize),
}

/// What a shard remembers.
#[derive(Debug, Default)]
struct Here {
    next: AtomicU64,
    queues: [AtomicU64; MOST_LEGS],
}

/// Chooses legs for reads.
#[derive(Debug)]
pub(crate) struct Balance {
    policy: Policy,
    here: PerShard<Here>,
}

/// A read in flight; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Queued<'a> {
    balance: &'a Balance,
    leg: usize,
}

/// The `number`-th leg of a set, counted round and round. The set is not empty.
#[inline]
pub(crate) fn pick(legs: u8, number: u64) -> usize {
    let mut left = number % u64::from(legs.count_ones());
    let mut legs = legs;
    while left > 0 {
        // The lowest bit goes.
        legs &= legs - 1;
        left -= 1;
    }
    legs.trailing_zeros() as usize
}

/// The leg with the shortest queue; of several, the one whose turn it is.
fn shortest(legs: u8, turn: u64, length: impl Fn(usize) -> u64) -> usize {
    let count = u64::from(legs.count_ones());
    let in_turn = (0..count).map(|at| pick(legs, turn.wrapping_add(at)));
    in_turn.min_by_key(|leg| length(*leg)).unwrap_or(0)
}

impl Balance {
    pub(crate) fn new(policy: Policy) -> Self {
        Self { policy, here: PerShard::default() }
    }

    /// The leg for the next read, of a set that is not empty.
    #[inline]
    pub(crate) fn choose(&self, legs: u8) -> usize {
        let turn = || {
            let (here, _) = self.here.here();
            let turn = here.next.load(Ordering::Relaxed);
            self.here.add(|here| &here.next, 1);
            turn
        };
        match self.policy {
            Policy::Prefer(leg) if legs >> leg & 1 == 1 => leg,
            Policy::Prefer(_) => legs.trailing_zeros() as usize,
            Policy::RoundRobin => pick(legs, turn()),
            Policy::ShortestQueue => {
                let (here, _) = self.here.here();
                shortest(legs, turn(), |leg| here.queues[leg].load(Ordering::Relaxed))
            }
        }
    }

    /// Counts a read that waits.
    pub(crate) fn queue(&self, leg: usize) -> Queued<'_> {
        self.here.add(|here| &here.queues[leg], 1);
        Queued { balance: self, leg }
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        // It ends on the shard where it began.
        self.balance.here.add(|here| &here.queues[self.leg], u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_keeps_to_good_legs() {
        for legs in 1..=u8::MAX {
            for number in 0..20 {
                assert_eq!(legs >> pick(legs, number) & 1, 1);
            }
            let all: std::collections::BTreeSet<_> = (0..8).map(|number| pick(legs, number)).collect();
            assert_eq!(all.len() as u32, legs.count_ones());
            assert_eq!(legs >> Balance::new(Policy::Prefer(3)).choose(legs) & 1, 1);
        }
        assert_eq!(Balance::new(Policy::Prefer(3)).choose(0b1010), 3);
    }

    #[test]
    fn turns_go_round_and_short_queues_win() {
        let round = Balance::new(Policy::RoundRobin);
        let legs: Vec<_> = (0..6).map(|_| round.choose(0b101)).collect();
        assert_eq!(legs, [0, 2, 0, 2, 0, 2]);
        let short = Balance::new(Policy::ShortestQueue);
        let (first, second) = (short.queue(0), short.queue(0));
        let third = short.queue(1);
        assert!((0..4).all(|_| short.choose(0b11) == 1));
        drop((first, second));
        assert!((0..4).all(|_| short.choose(0b11) == 0));
        drop(third);
        let legs: std::collections::BTreeSet<_> = (0..4).map(|_| short.choose(0b11)).collect();
        assert_eq!(legs.len(), 2);
    }
}
