//! A value that is read on every request and replaced while requests go on.
//!
//! ```text
//!   visit:    parity ─► enter presence[parity] ─► parity still the same? ─► current       (nothing shared is written)
//!   replace:  current ◄ new ─► parity flips ─► barrier ─► presence[old parity] empty? ─► the old value is free
//! ```
//!
//! Those who came later are counted on the other side, so that a replacement ends however many requests keep coming. Who
//! replaces pays: `membarrier(2)`, as for the [`Switch`](crate::Switch).

use std::{
    cell::Cell,
    io,
    ops::Deref,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
};

use crate::{
    per_shard::{Inside, Presence},
    switch::barrier,
};

/// See the module.
pub struct Epochs<T> {
    current: AtomicPtr<T>,
    /// Which side visitors are counted on now.
    parity: AtomicUsize,
    presence: [Presence; 2],
    /// A replaced value is still visited.
    draining: AtomicBool,
}

// SAFETY: the value is owned like a box's and visited from any thread like an `Arc`'s.
unsafe impl<T: Send + Sync> Send for Epochs<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Epochs<T> {}

/// Somebody who reads the value. It stays as it is until the visit is dropped.
pub struct Visit<'a, T> {
    value: &'a T,
    _inside: Inside<'a>,
}

impl<T> Deref for Visit<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value
    }
}

/// A value that was replaced and may still be visited by those who came before. Another one can be replaced when this is
/// gone: so it must be dropped, and not before it is [free](Self::is_free).
#[must_use = "the old value is in use until it is free"]
pub struct Retired<'a, T> {
    epochs: &'a Epochs<T>,
    value: *mut T,
    side: usize,
    /// It was seen to be free, and stays so. (Who looks at the parity at an unlucky moment is counted on this side for an instant,
    /// and leaves.)
    free: Cell<bool>,
}

impl<T> Retired<'_, T> {
    /// Whether nobody visits it any more, and what its visitors copied is where it belongs.
    pub fn is_free(&self) -> bool {
        if !self.free.get() && self.epochs.presence[self.side].count() == 0 {
            // Copies that are settled together ([`Volume::settles_late`](crate::Volume::settles_late)) may outlast the visit in which they were
            // made. Whoever made them runs the barrier as well, and whoever uses or gives away their place comes after it.
            self.free.set(barrier().is_ok());
        }
        self.free.get()
    }

    /// Waits until it is free. Blocks: not to be called on a shard.
    pub fn wait(self) {
        while !self.is_free() {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }
}

impl<T> Drop for Retired<'_, T> {
    fn drop(&mut self) {
        if !self.is_free() {
            // Whoever waits gave up (a task that is torn down): the value stays, and so does the mark that it is visited.
            return;
        }
        // SAFETY: the pointer came from a box and was taken out of `current`. Who visits is counted on this side if they saw it:
        // they entered this side and then found the parity unchanged, so they entered before the flip as far as the barrier in
        // `replace` can tell, and the count above, made after it, would show them. Who found the parity changed loads `current`
        // after the flip, and so after the exchange. No other replacement has begun meanwhile (`draining`).
        drop(unsafe { Box::from_raw(self.value) });
        self.epochs.draining.store(false, Ordering::Release);
    }
}

/// Why a value was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The one before is still in use.
    #[error("the change before is not finished")]
    Busy,
    /// The system refuses the barrier that makes it safe.
    #[error("the system refuses membarrier(2): {0}")]
    Barrier(#[source] io::Error),
}

impl<T> Epochs<T> {
    /// Begins with this value.
    pub fn new(value: T) -> Self {
        let current = AtomicPtr::new(Box::into_raw(Box::new(value)));
        Self { current, parity: AtomicUsize::new(0), presence: Default::default(), draining: AtomicBool::new(false) }
    }

    /// Reads the value.
    #[inline]
    pub fn visit(&self) -> Visit<'_, T> {
        loop {
            let side = self.parity.load(Ordering::Relaxed) & 1;
            let inside = self.presence[side].enter();
            // Acquire: who sees the flip sees the exchange before it.
            if self.parity.load(Ordering::Acquire) & 1 == side {
                // SAFETY: see `Retired::drop`: what is loaded here is freed only when this side was seen empty after its flip.
                // (Loaded before the next flip, it is retired by that and counted on this side; loaded after the exchange and
                // before its flip, it is the new value, and the replacement after that cannot begin before we have left.)
                let value = unsafe { &*self.current.load(Ordering::Acquire) };
                return Visit { value, _inside: inside };
            }
        }
    }

    /// Replaces the value: who comes from now on sees the new one. The old one is returned for its visitors to be waited for.
    ///
    /// # Errors
    /// See [`ReplaceError`]; then nothing has changed.
    pub fn replace(&self, value: T) -> Result<Retired<'_, T>, ReplaceError> {
        if self.draining.swap(true, Ordering::Acquire) {
            return Err(ReplaceError::Busy);
        }
        // Once before anything is changed, to know that it works.
        if let Err(error) = barrier() {
            self.draining.store(false, Ordering::Release);
            return Err(ReplaceError::Barrier(error));
        }
        let old = self.current.swap(Box::into_raw(Box::new(value)), Ordering::AcqRel);
        let side = self.parity.fetch_xor(1, Ordering::Release) & 1;
        while barrier().is_err() {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        Ok(Retired { epochs: self, value: old, side, free: Cell::new(false) })
    }
}

impl<T> Drop for Epochs<T> {
    fn drop(&mut self) {
        // SAFETY: from `new` or `replace`; there is no other reference to this, so nobody visits.
        drop(unsafe { Box::from_raw(*self.current.get_mut()) });
    }
}

impl<T> std::fmt::Debug for Epochs<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epochs").field("parity", &self.parity).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU64};

    use super::*;

    /// Knows whether it was dropped.
    struct Watched(u64, Arc<AtomicU64>);

    impl Drop for Watched {
        fn drop(&mut self) {
            self.0 = u64::MAX;
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_value_stays_for_those_who_came_before() {
        let dropped = Arc::new(AtomicU64::new(0));
        let epochs = Epochs::new(Watched(1, Arc::clone(&dropped)));
        let before = epochs.visit();
        let retired = epochs.replace(Watched(2, Arc::clone(&dropped))).unwrap();
        assert!(!retired.is_free());
        assert!(matches!(epochs.replace(Watched(3, Arc::clone(&dropped))), Err(ReplaceError::Busy)));
        let after = epochs.visit();
        assert_eq!((before.0, after.0, dropped.load(Ordering::Relaxed)), (1, 2, 1));
        drop(before);
        assert!(retired.is_free());
        drop(retired);
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
        let retired = epochs.replace(Watched(4, Arc::clone(&dropped))).unwrap();
        assert!(!retired.is_free() && after.0 == 2);
        drop(after);
        retired.wait();
        assert_eq!((epochs.visit().0, dropped.load(Ordering::Relaxed)), (4, 3));
    }

    #[test]
    fn nobody_ever_sees_a_dropped_value() {
        let dropped = Arc::new(AtomicU64::new(0));
        let epochs = Arc::new(Epochs::new(Watched(0, Arc::clone(&dropped))));
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..3)
            .map(|number| {
                let (epochs, stop) = (Arc::clone(&epochs), Arc::clone(&stop));
                std::thread::spawn(move || {
                    let _own = (number > 0).then(crate::ShardSlot::claim);
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let visit = epochs.visit();
                        let other = epochs.visit();
                        assert!(visit.0 != u64::MAX && other.0 >= visit.0 && visit.0 >= last);
                        last = visit.0;
                    }
                })
            })
            .collect();
        for value in 1..2000 {
            epochs.replace(Watched(value, Arc::clone(&dropped))).unwrap().wait();
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 1999);
    }
}
