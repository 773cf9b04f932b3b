//! On whose behalf the calling thread works.
//!
//! A shard says so around each turn of a device and each poll of its tasks; what tells devices apart ([`Asker::current`]) asks. Requests
//! carry nothing for it, and a device that nobody tells apart costs two stores a turn.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use millrace_memory::taker;

/// Numbers of those that are there.
static THERE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static NEXT: AtomicU32 = AtomicU32::new(1);
static GONE: AtomicU32 = AtomicU32::new(1);

fn there() -> MutexGuard<'static, BTreeSet<u32>> {
    THERE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of who asks: a device on a shard. None comes twice while the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asker(u32);

impl Asker {
    /// No device: the daemon itself, or a thread that is no shard.
    pub const NOBODY: Self = Self(0);

    /// One that there has not been before; it is there until it [leaves](Self::leave).
    ///
    /// # Panics
    /// After four billion.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        // Relaxed: it orders nothing.
        let number = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
        let number = number.expect("fewer than four billion devices");
        there().insert(number);
        Self(number)
    }

    /// It asks for nothing any more.
    pub fn leave(self) {
        there().remove(&self.0);
        GONE.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it has not left.
    pub fn is_there(number: u32) -> bool {
        there().contains(&number)
    }

    /// A number that is another one whenever somebody has left; never 0.
    #[inline]
    pub fn gone() -> u32 {
        GONE.load(Ordering::Relaxed)
    }

    /// On whose behalf the calling thread works.
    #[inline]
    pub fn current() -> Self {
        Self(taker::current())
    }

    /// The calling thread works on its behalf from now on. Who it was before: whose turn it is again afterwards.
    #[inline]
    pub fn enter(self) -> Self {
        Self(taker::enter(self.0))
    }

    /// Its number; 0 is nobody's.
    #[inline]
    pub fn number(self) -> u32 {
        self.0
    }
}
