//! Where the time on the data path goes, for a build with the feature `stages`; without it, nothing is here but empty functions.
//!
//! The path says where it is ([`enter`]); the time until it says so again belongs to that stage. Looking at the time stamp counter
//! costs time itself, [`overhead`] a look: whoever reads the counts takes it off.

/// Parts of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stage {
    /// The loop around everything, and what has no name of its own.
    Other,
    /// Looking for doorbells, and what is done once for a batch.
    Doorbells,
    /// Copying submission entries out.
    Fetch,
    /// Decoding and checking.
    Check,
    /// Resolving data pointers.
    Pointer,
    /// The volume.
    Volume,
    /// Posting completions.
    Complete,
    /// Raising interrupts.
    Interrupt,
}

impl Stage {
    /// How many there are.
    pub const COUNT: usize = 8;

    /// All of them, in the order of [`StageTimes`].
    pub const ALL: [Self; Self::COUNT] = [
        Self::Other,
        Self::Doorbells,
        Self::Fetch,
        Self::Check,
        Self::Pointer,
        Self::Volume,
        Self::Complete,
        Self::Interrupt,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::Doorbells => "doorbells",
            Self::Fetch => "fetch",
            Self::Check => "check",
            Self::Pointer => "pointer",
            Self::Volume => "volume",
            Self::Complete => "complete",
            Self::Interrupt => "interrupt",
        }
    }
}

/// Ticks of the time stamp counter spent in a stage, and how often it was entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTime {
    /// Ticks, with what looking at the counter took.
    pub ticks: u64,
    /// Entries.
    pub entries: u64,
}

impl StageTime {
    /// Ticks without those that looking at the counter took.
    pub fn net(&self) -> u64 {
        static EACH: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
        self.ticks.saturating_sub(self.entries.saturating_mul(*EACH.get_or_init(overhead)))
    }
}

/// The times of all stages, in the order of [`Stage::ALL`].
pub type StageTimes = [StageTime; Stage::COUNT];

/// From now on the calling thread's time belongs to `stage`.
#[inline(always)]
#[allow(clippy::inline_always)] // it must cost nothing where it is empty
pub fn enter(stage: Stage) {
    #[cfg(feature = "stages")]
    counting::enter(stage);
    #[cfg(not(feature = "stages"))]
    let _ = stage;
}

/// The calling thread's times since it began.
pub fn times() -> StageTimes {
    #[cfg(feature = "stages")]
    return counting::times();
    #[cfg(not(feature = "stages"))]
    StageTimes::default()
}

/// Ticks that one [`enter`] takes.
pub fn overhead() -> u64 {
    #[cfg(feature = "stages")]
    return counting::overhead();
    #[cfg(not(feature = "stages"))]
    0
}

#[cfg(feature = "stages")]
mod counting {
    use std::cell::Cell;

    use super::{Stage, StageTime, StageTimes};

    thread_local! {
        static NOW: Cell<(Stage, u64)> = const { Cell::new((Stage::Other, 0)) };
        static TIMES: [Cell<StageTime>; Stage::COUNT] =
            const { [const { Cell::new(StageTime { ticks: 0, entries: 0 }) }; Stage::COUNT] };
    }

    #[cfg(target_arch = "x86_64")]
    fn ticks() -> u64 {
        // SAFETY: the instruction only reads a counter.
        unsafe { std::arch::x86_64::_rdtsc() }
    }

    /// Nanoseconds.
    #[cfg(not(target_arch = "x86_64"))]
    fn ticks() -> u64 {
        use std::{sync::OnceLock, time::Instant};
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    #[inline]
    pub(super) fn enter(stage: Stage) {
        let now = ticks();
        let (before, since) = NOW.replace((stage, now));
        TIMES.with(|times| {
            let cell = &times[before as usize];
            let StageTime { ticks, entries } = cell.get();
            let past = if since == 0 { 0 } else { now.wrapping_sub(since) };
            cell.set(StageTime { ticks: ticks.wrapping_add(past), entries: entries + 1 });
        });
    }

    pub(super) fn times() -> StageTimes {
        TIMES.with(|times| times.each_ref().map(Cell::get))
    }

    pub(super) fn overhead() -> u64 {
        // On a thread of its own: the caller's counts stay as they are.
        let measure = || {
            (0..1000).for_each(|_| enter(Stage::Volume));
            let before = times()[Stage::Volume as usize];
            (0..10_000).for_each(|_| enter(Stage::Volume));
            let after = times()[Stage::Volume as usize];
            (after.ticks - before.ticks) / (after.entries - before.entries)
        };
        std::thread::spawn(measure).join().unwrap_or(0)
    }
}
