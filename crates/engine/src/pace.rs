//! How operations go to the kernel: at once, or by way of threads of its own.
//!
//! Whoever submits to a disk whose queue is full waits within the call until there is room: file systems do not pass on that the caller
//! would rather not (`RWF_NOWAIT` ends at their door). On a shard that is everybody's wait. So where a submission has waited, the
//! ring's operations are handed to the kernel's own threads for a while, which may wait as they like:
//!
//! ```text
//!   Direct ── a submission was slow ─► Watched ── slow again, and it slept ─► Aside ── after a while, with fewer in flight ─► Watched
//!      ▲                                  │                                     ▲ for twice as long                             │
//!      └────────── nothing for a while ───┴─────────────────────────────────────┴────────────────────────────────────────────────┘
//! ```
//!
//! That a thread was taken off its processor makes a submission slow, too, and is nothing that others could wait for in its place. The kernel
//! counts how often a thread slept; as asking for that is a system call, it is done only while something is suspected.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// What is not over after this is slow.
const SLOW: Duration = Duration::from_micros(300);
/// How long something is suspected.
const SUSPECTED: Duration = Duration::from_millis(100);
/// How long operations go aside for the first time, and at most.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Direct,
    /// Until then.
    Watched(Instant),
    /// At least until then, and while more than so many operations are in flight.
    Aside(Instant, usize),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Pace {
    state: State,
    /// How long operations went aside last.
    aside: Duration,
    /// How often the thread had slept before the submission, where that is asked.
    slept: u64,
    /// Submissions that waited, as far as known.
    pub(crate) held_up: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { state: State::Direct, aside: Duration::ZERO, slept: 0, held_up: 0 }
    }
}

impl Pace {
    /// Whether operations are to be handed to the kernel's threads.
    #[inline]
    pub(crate) fn is_aside(&self) -> bool {
        matches!(self.state, State::Aside(..))
    }

    /// A submission begins; `sleeps` tells how often the thread has slept in its life.
    #[inline]
    pub(crate) fn begin(&mut self, sleeps: impl FnOnce() -> u64) {
        if let State::Watched(_) = self.state {
            self.slept = sleeps();
        }
    }

    /// It has ended, and this many operations are in flight. Returns whether operations go aside from now on that did not before.
    #[inline]
    pub(crate) fn end(&mut self, began: Instant, now: Instant, in_flight: usize, sleeps: impl FnOnce() -> u64) -> bool {
        let slow = now.duration_since(began) >= SLOW;
        match self.state {
            State::Direct if !slow => {}
            State::Direct => self.state = State::Watched(now + SUSPECTED),
            State::Watched(_) if slow && sleeps() != self.slept => {
                self.held_up += 1;
                self.aside = (self.aside * 2).clamp(SHORTEST, LONGEST);
                self.state = State::Aside(now + self.aside, in_flight / 2);
                return true;
            }
            State::Watched(until) if now >= until => *self = Self { held_up: self.held_up, ..Self::default() },
            State::Watched(_) => {}
            // Where few are in flight the disk is full of others' requests: whether it still is can only be tried.
            State::Aside(until, enough) => {
                if now >= until && (in_flight <= enough || now >= until + LONGEST) {
                    self.state = State::Watched(now + SUSPECTED.max(self.aside));
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time that passes as told.
    struct Clock {
        now: Instant,
        sleeps: u64,
    }

    impl Clock {
        fn new() -> Self {
            Self { now: Instant::now(), sleeps: 7 }
        }

        /// A submission that takes so long, with so many in flight.
        fn submit(&mut self, pace: &mut Pace, took: Duration, sleeps: bool, in_flight: usize) -> bool {
            pace.begin(|| self.sleeps);
            let began = self.now;
            self.now += took;
            self.sleeps += u64::from(sleeps);
            pace.end(began, self.now, in_flight, || self.sleeps)
        }
    }

    const FAST: Duration = Duration::from_micros(20);
    const LONG: Duration = Duration::from_millis(5);

    #[test]
    fn who_was_taken_off_the_processor_has_not_waited() {
        let (mut pace, mut clock) = (Pace::default(), Clock::new());
        for _ in 0..1000 {
            assert!(!clock.submit(&mut pace, LONG, false, 100));
            assert!(!pace.is_aside());
        }
        assert_eq!(pace.held_up, 0);
    }

    #[test]
    fn short_sleeps_are_nobodys_harm() {
        let (mut pace, mut clock) = (Pace::default(), Clock::new());
        for _ in 0..1000 {
            assert!(!clock.submit(&mut pace, FAST, true, 100));
        }
        assert_eq!(pace.state, State::Direct);
    }

    #[test]
    fn who_has_waited_goes_aside_and_comes_back_when_less_is_in_flight() {
        let (mut pace, mut clock) = (Pace::default(), Clock::new());
        assert!(!clock.submit(&mut pace, LONG, true, 100), "it may have been anything");
        assert!(clock.submit(&mut pace, LONG, true, 100) && pace.is_aside());
        // While as much is in flight, however long that is (within reason).
        for _ in 0..1000 {
            assert!(!clock.submit(&mut pace, LONG, true, 60));
            assert!(pace.is_aside());
        }
        assert!(!clock.submit(&mut pace, FAST, false, 50));
        assert!(!pace.is_aside(), "half as many");
        // Nothing more happens: it is forgotten.
        for _ in 0..60 {
            assert!(!clock.submit(&mut pace, Duration::from_micros(299), true, 50));
            clock.now += LONG;
        }
        assert_eq!((pace.state, pace.aside, pace.held_up), (State::Direct, Duration::ZERO, 1));
    }

    #[test]
    fn who_has_to_go_aside_again_stays_longer_each_time_and_looks_again_all_the_same() {
        let (mut pace, mut clock) = (Pace::default(), Clock::new());
        clock.submit(&mut pace, LONG, true, 0);
        let mut stays = Vec::new();
        for _ in 0..12 {
            assert!(clock.submit(&mut pace, LONG, true, 3));
            let began = clock.now;
            while pace.is_aside() {
                clock.now += Duration::from_millis(1);
                clock.submit(&mut pace, FAST, false, 1);
            }
            stays.push(clock.now - began);
        }
        assert!(stays.is_sorted() && stays[0] < SHORTEST * 2 && stays[11] > LONGEST && stays[11] < LONGEST * 2, "{stays:?}");
        // With many in flight all the time, too.
        assert!(clock.submit(&mut pace, LONG, true, 100));
        let began = clock.now;
        while pace.is_aside() {
            clock.now += Duration::from_millis(1);
            clock.submit(&mut pace, FAST, false, 100);
        }
        assert!(clock.now - began < LONGEST * 3);
        assert_eq!(pace.held_up, 13);
    }
}
