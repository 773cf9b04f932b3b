//! How far apart the two cores are right now.
//!
//! A virtual machine's cores may be moved between physical ones within seconds, and with them everything that depends on the
//! way of a cache line from one to the other. So every sample stands between two measurements of that way, and counts only
//! when both say the same; samples are compared only with those of their own state.

use std::{
    fmt,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Instant,
};

use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// Round trips in one burst, and bursts in one measurement: some milliseconds in all.
const TRIPS: u32 = 1000;
const BURSTS: usize = 9;
/// How long a partner that does not answer is waited for, in spins: it may have lost its core for a time slice.
const PATIENCE: u32 = 50_000_000;

/// Where the cores are, by the round trip of a cache line between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// They share a cache, or a mesh whose way is as short: 50 to 150 ns.
    Near,
    /// They do not: 220 to 500 ns.
    Far,
    /// Neither of the two, or another one after the sample than before.
    Mixed,
    /// It makes no difference to what was measured.
    Any,
}

impl State {
    /// The state of a round trip in nanoseconds.
    pub(crate) fn of(round_trip: f64) -> Self {
        match round_trip {
            50.0..=150.0 => Self::Near,
            220.0..=500.0 => Self::Far,
            _ => Self::Mixed,
        }
    }

    /// The state of a sample that stands between two.
    pub(crate) fn between(self, after: Self) -> Self {
        if self == after { self } else { Self::Mixed }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Near => "NEAR",
            Self::Far => "FAR",
            Self::Mixed => "mixed",
            Self::Any => "–",
        })
    }
}

/// A flag on cache lines of its own.
#[repr(align(128))]
struct Line(AtomicU32);

/// The round trip of a cache line between two cores, in nanoseconds: the median of some bursts. Infinite when one of the
/// cores was never there. Nothing else should spin on them meanwhile.
pub(crate) fn ping_pong(first: usize, second: usize) -> f64 {
    let line = Line(AtomicU32::new(0));
    let mut bursts = thread::scope(|scope| {
        let pong = scope.spawn(|| {
            pin(second);
            // Release and Acquire: each side's store is all that the other one waits for.
            for trip in 0..TRIPS * BURSTS as u32 {
                if !wait(&line, 2 * trip + 1) {
                    return;
                }
                line.0.store(2 * trip + 2, Ordering::Release);
            }
        });
        let ping = scope.spawn(|| {
            pin(first);
            let mut bursts = Vec::with_capacity(BURSTS);
            for burst in 0..BURSTS as u32 {
                let start = Instant::now();
                for trip in burst * TRIPS..(burst + 1) * TRIPS {
                    line.0.store(2 * trip + 1, Ordering::Release);
                    if !wait(&line, 2 * trip + 2) {
                        return bursts;
                    }
                }
                bursts.push(start.elapsed().as_nanos() as f64 / f64::from(TRIPS));
            }
            bursts
        });
        pong.join().expect("the partner does not panic");
        ping.join().expect("the thread does not panic")
    });
    bursts.sort_by(f64::total_cmp);
    if bursts.len() == BURSTS { bursts[BURSTS / 2] } else { f64::INFINITY }
}

fn wait(line: &Line, value: u32) -> bool {
    (0..PATIENCE).any(|_| line.0.load(Ordering::Acquire) == value)
}

/// Pins the calling thread. A machine without that core leaves it where it is, which the measurement shows.
pub(crate) fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    let _ = sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_have_their_states() {
        for (round_trip, state) in [
            (75.0, State::Near),
            (125.0, State::Near),
            (340.0, State::Far),
            (20.0, State::Mixed),
            (180.0, State::Mixed),
            (f64::INFINITY, State::Mixed),
        ] {
            assert_eq!(State::of(round_trip), state, "{round_trip}");
        }
    }

    #[test]
    fn a_sample_counts_only_when_nothing_moved() {
        assert_eq!(State::Near.between(State::Near), State::Near);
        assert_eq!(State::Near.between(State::Far), State::Mixed);
        assert_eq!(State::Mixed.between(State::Far), State::Mixed);
    }

    #[test]
    fn a_line_goes_there_and_back() {
        assert!(ping_pong(0, std::thread::available_parallelism().map_or(0, |cores| cores.get() - 1)) > 0.0);
    }
}
