//! Biased locking: the shard that is nearly always the one to lock does so without an atomic operation.
//!
//! ```text
//!   the favoured shard:  inside ─► still favoured? ─► whoever locked the ordinary way is seen ─► works ─► outside
//!   anybody else:        favour ◄ withdrawn ─► barrier ─► favoured shard outside? ─► barrier ─► locks the ordinary way
//! ```
//!
//! An atomic operation waits for all stores before it, so that two of them around a copy past the caches cost as much as a good part of the
//! copy. The favoured shard's way in and out is ordinary stores, of lines that nobody else writes. The price is paid by whoever else comes:
//! `membarrier(2)`, as for the [`Switch`](crate::Switch). So the favour is not given before one shard came so many times, and each
//! time that it did not last it is twice as many the next time.
//!
//! This is not a lock by itself: it stands before an ordinary one, which whoever is not favoured takes, and the favoured shard looks at.

use std::{
    marker::PhantomData,
    sync::atomic::{AtomicU64, Ordering, compiler_fence},
};

use crate::{
    per_shard::{PerShard, SHARED, own_slot},
    switch::barrier,
};

/// The favoured shard's slot plus one; 0: nobody is favoured.
const SHARD: u64 = 0xff;
/// The favour was withdrawn, and it is not known yet that the shard is outside.
const WITHDRAWN: u64 = 0x100;
/// Counts withdrawals, so that who looks late does not take one for another.
const NUMBER: u64 = 0x200;

/// What a shard writes, and no other.
#[derive(Debug, Default)]
struct Here {
    /// Odd while the shard is inside by favour.
    turns: AtomicU64,
    /// Times that it came without the favour, since it had it last.
    waited: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub struct Bias {
    /// Who is favoured.
    state: AtomicU64,
    here: PerShard<Here>,
    /// So many times a shard comes before it is favoured: now, at least, and at most.
    patience: AtomicU64,
    least: u64,
    most: u64,
    /// The shard's turns when it was favoured.
    since: AtomicU64,
}

/// Inside by favour; dropping it leaves.
#[derive(Debug)]
pub struct Favoured<'a> {
    turns: &'a AtomicU64,
    /// It stays on its thread.
    _local: PhantomData<*const ()>,
}

impl Bias {
    /// A shard is favoured after it came `least` times, and after twice as many for each favour that did not last, up to `most`.
    pub fn new(least: u64, most: u64) -> Self {
        // The process's first one takes long, so that it is not left to a shard. Without barriers nobody is ever favoured.
        let _ = barrier();
        let count = AtomicU64::new;
        Self { state: count(0), here: PerShard::default(), patience: count(least), least, most, since: count(0) }
    }

    /// Enters if the calling shard is favoured. Whoever took the ordinary lock before is to be looked for after it (SeqCst): who took it
    /// found no favour afterwards ([`Self::is_open`]), so that it is before this one's.
    #[inline]
    pub fn enter(&self) -> Option<Favoured<'_>> {
        let favoured = own_slot() as u64 + 1;
        if self.state.load(Ordering::Relaxed) & (SHARD | WITHDRAWN) != favoured {
            return None;
        }
        let turns = &self.here.of(own_slot()).turns;
        let before = turns.load(Ordering::Relaxed);
        if before % 2 == 1 {
            // Once at a time.
            return None;
        }
        turns.store(before.wrapping_add(1), Ordering::Relaxed);
        let inside = Favoured { turns, _local: PhantomData };
        // The processor may still load early what comes next; whoever withdraws the favour makes every processor run a full barrier
        // after that, which is the other side of this race: either we find the favour gone, or we are seen inside.
        compiler_fence(Ordering::SeqCst);
        (self.state.load(Ordering::SeqCst) & (SHARD | WITHDRAWN) == favoured).then_some(inside)
    }

    /// Whether no other shard is favoured. To be asked after the ordinary lock was taken by a SeqCst operation, and if not, it is given
    /// back: the favoured shard may be inside.
    #[inline]
    pub fn is_open(&self) -> bool {
        let shard = self.state.load(Ordering::SeqCst) & SHARD;
        shard == 0 || shard == own_slot() as u64 + 1
    }

    /// Withdraws the favour from another shard. Whether it is outside, and what it copied is seen by all; if not, ask again later.
    #[cold]
    pub fn withdraw(&self) -> bool {
        let mut state = self.state.load(Ordering::SeqCst);
        let shard = state & SHARD;
        if shard == 0 || (shard == own_slot() as u64 + 1 && state & WITHDRAWN == 0) {
            return true;
        }
        let turns = &self.here.of(shard as usize - 1).turns;
        if state & WITHDRAWN == 0 {
            let next = (state | WITHDRAWN).wrapping_add(NUMBER);
            if self.state.compare_exchange(state, next, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                return false;
            }
            state = next;
            let lasted = turns.load(Ordering::Relaxed).wrapping_sub(self.since.load(Ordering::Relaxed)) / 2;
            let patience = self.patience.load(Ordering::Relaxed);
            let next = if lasted >= self.most { self.least } else { patience.saturating_mul(2).min(self.most) };
            self.patience.store(next, Ordering::Relaxed);
        }
        // After this the shard is seen inside, or finds the favour gone. Acquire: what it did inside is seen.
        if barrier().is_err() || turns.load(Ordering::Acquire) % 2 == 1 {
            return false;
        }
        // It left by an ordinary store, which may be seen before what it copied past the caches: after this that is seen, too.
        if barrier().is_err() {
            return false;
        }
        // Somebody else may have found out first, and the favour may have been given anew since: then the next look tells.
        self.state.compare_exchange(state, state & !(SHARD | WITHDRAWN), Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// The calling shard came without the favour, and could have used it.
    #[inline]
    pub fn count(&self) {
        let (here, own) = self.here.here();
        let waited = here.waited.load(Ordering::Relaxed) + 1;
        if own {
            here.waited.store(waited, Ordering::Relaxed);
            if waited >= self.patience.load(Ordering::Relaxed) {
                self.favour(here);
            }
        }
    }

    /// Favours the calling shard, if nobody is and the favour could be withdrawn.
    #[cold]
    fn favour(&self, here: &Here) {
        here.waited.store(0, Ordering::Relaxed);
        let state = self.state.load(Ordering::Relaxed);
        if state & (SHARD | WITHDRAWN) == 0 && own_slot() != SHARED && barrier().is_ok() {
            let favoured = state | (own_slot() as u64 + 1);
            // SeqCst: between this and the ordinary lock of whoever is there already, and looks at the favour after it.
            if self.state.compare_exchange(state, favoured, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                self.since.store(here.turns.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Favoured<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: what was done inside is seen by whoever sees this, but for copies past the caches (`Bias::withdraw`).
        self.turns.store(self.turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::ShardSlot;

    /// Withdraws from a thread of its own, which may have to look more than once.
    fn withdrawn_elsewhere(bias: &Bias) -> bool {
        thread::scope(|scope| scope.spawn(|| (0..3).any(|_| bias.withdraw())).join().unwrap())
    }

    fn is_open_elsewhere(bias: &Bias) -> bool {
        thread::scope(|scope| scope.spawn(|| bias.is_open()).join().unwrap())
    }

    #[test]
    fn favour_is_earned_and_withdrawn_only_from_outside() {
        let _place = ShardSlot::claim();
        let bias = Bias::new(2, 8);
        bias.count();
        assert!(bias.enter().is_none() && bias.is_open() && is_open_elsewhere(&bias));
        bias.count();
        let inside = bias.enter().expect("it came often enough");
        assert!(bias.enter().is_none(), "once at a time");
        assert!(bias.is_open() && !is_open_elsewhere(&bias));
        assert!(!withdrawn_elsewhere(&bias), "it is inside");
        assert!(!is_open_elsewhere(&bias));
        drop(inside);
        assert!(bias.enter().is_none(), "the favour is gone");
        assert!(withdrawn_elsewhere(&bias) && is_open_elsewhere(&bias));
    }

    #[test]
    fn a_favour_that_does_not_last_is_earned_more_dearly() {
        let _place = ShardSlot::claim();
        let bias = Bias::new(2, 8);
        let earn = || {
            (1..100)
                .find(|_| {
                    bias.count();
                    bias.enter().is_some()
                })
                .expect("it is earned")
        };
        for (needed, turns) in [(2, 0), (4, 0), (8, 0), (8, 0), (8, 8), (2, 0)] {
            assert_eq!(earn(), needed);
            assert!((0..turns).all(|_| bias.enter().is_some()));
            assert!(withdrawn_elsewhere(&bias));
        }
    }

    /// One shard enters by favour at the moment when another thread withdraws that, over and over: never are both inside.
    #[test]
    fn who_withdraws_the_favour_is_alone() {
        const ROUNDS: u64 = 20_000;
        // Looks at the other: longer than a barrier takes, behind which it comes.
        const STAY: usize = 20_000;
        let bias = Bias::new(1, 1);
        let (round, ready) = (AtomicU64::new(0), AtomicU64::new(0));
        let (inside, together) = ([const { AtomicU64::new(0) }; 2], AtomicU64::new(0));
        let alone = |own: usize, number: u64| {
            inside[own].store(number, Ordering::Relaxed);
            let other = (0..STAY).all(|_| inside[1 - own].load(Ordering::Relaxed) != number);
            inside[own].store(0, Ordering::Relaxed);
            together.fetch_add(u64::from(!other), Ordering::Relaxed);
        };
        let wait = |counter: &AtomicU64, number| {
            while counter.load(Ordering::Acquire) < number {
                std::hint::spin_loop();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let _place = ShardSlot::claim();
                for number in 1..=ROUNDS {
                    bias.count();
                    ready.store(number, Ordering::Release);
                    wait(&round, number);
                    (0..number % 64).for_each(|_| std::hint::spin_loop());
                    if let Some(_inside) = bias.enter() {
                        alone(0, number);
                    }
                }
            });
            for number in 1..=ROUNDS {
                wait(&ready, number);
                round.store(number, Ordering::Release);
                (0..number / 64 % 64).for_each(|_| std::hint::spin_loop());
                while !bias.withdraw() {}
                alone(1, number);
            }
        });
        assert_eq!(together.into_inner(), 0, "rounds with both inside");
    }

    #[test]
    fn threads_without_a_place_are_never_favoured() {
        let bias = Bias::new(1, 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                (0..10).for_each(|_| bias.count());
                assert!(bias.enter().is_none() && bias.is_open() && bias.withdraw());
            });
        });
    }
}
