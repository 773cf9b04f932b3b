//! What keeps a flood of lines from the log: a second has so many, and errors so many for themselves, whatever else there is.
//!
//! ```text
//!   event ─► FloodGuard ─ admitted ─► a line
//!                 └─ withheld and counted; the first wakes thread "log", which tells how many when that second is over
//! ```

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{Layer, layer::Context};

use super::lines::Lines;

/// Lines in a second before the rest are withheld, errors apart. What guests can cause is limited where it arises; this is the last resort.
const BURST: u64 = 200;
const SECOND: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    errors: u64,
    others: u64,
    /// Not told yet.
    withheld: u64,
    /// When that is to be told.
    due: Option<Instant>,
}

/// Whether a line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Admitted,
    /// The first one since it was told how many they were.
    FirstWithheld,
    Withheld,
}

impl Window {
    fn judge(&mut self, now: Instant, is_error: bool) -> Verdict {
        let began = *self.began.get_or_insert(now);
        let began = if now.duration_since(began) < SECOND {
            began
        } else {
            (self.began, self.errors, self.others) = (Some(now), 0, 0);
            now
        };
        let lines = if is_error { &mut self.errors } else { &mut self.others };
        *lines += 1;
        if *lines <= BURST {
            return Verdict::Admitted;
        }
        self.withheld += 1;
        if self.due.is_some() {
            return Verdict::Withheld;
        }
        // Another second may begin before this is told, and must not put it off.
        self.due = Some(began + SECOND);
        Verdict::FirstWithheld
    }
}

/// The lines of the running second. Who logs shares it with the thread that writes.
#[derive(Clone, Default)]
pub(super) struct Flood(Arc<Mutex<Window>>);

impl Flood {
    fn window(&self) -> MutexGuard<'_, Window> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it is to be told how many lines were withheld, if any were.
    pub(super) fn due(&self) -> Option<Instant> {
        self.window().due
    }

    /// How many lines were withheld, if that is to be told at this moment, or now in any case.
    pub(super) fn take(&self, now: Option<Instant>) -> u64 {
        let mut window = self.window();
        if window.due.is_none_or(|due| now.is_some_and(|now| now < due)) {
            return 0;
        }
        window.due = None;
        std::mem::take(&mut window.withheld)
    }
}

/// Withholds lines beyond [`BURST`] a second.
pub(super) struct FloodGuard {
    pub(super) flood: Flood,
    pub(super) lines: Lines,
}

impl<S: Subscriber> Layer<S> for FloodGuard {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        let verdict = self.flood.window().judge(Instant::now(), *event.metadata().level() == Level::ERROR);
        if verdict == Verdict::FirstWithheld {
            self.lines.wake();
        }
        verdict == Verdict::Admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (flood, start) = (Flood::default(), Instant::now());
        let judge = |now| flood.window().judge(now, false);
        let verdicts: Vec<_> = (0..1000).map(|_| judge(start)).collect();
        let of = |verdict| verdicts.iter().filter(|found| **found == verdict).count() as u64;
        assert_eq!((of(Verdict::Admitted), of(Verdict::FirstWithheld), of(Verdict::Withheld)), (BURST, 1, 799));
        // It is told when the second is over, without another line.
        assert_eq!((flood.due(), flood.take(Some(start))), (Some(start + SECOND), 0));
        assert_eq!(flood.take(Some(start + SECOND)), 800);
        assert_eq!((flood.due(), flood.take(Some(start + SECOND)), flood.take(None)), (None, 0, 0));
        assert_eq!(judge(start + SECOND), Verdict::Admitted);
    }

    /// The next second begins before anybody looks: what was withheld is due all the same.
    #[test]
    fn a_flood_that_goes_on_is_told_of_once_a_second() {
        let (flood, start) = (Flood::default(), Instant::now());
        for second in 0..3 {
            let now = start + SECOND * second;
            for _ in 0..BURST + 10 {
                flood.window().judge(now, false);
            }
            assert_eq!(flood.due(), Some(start + SECOND));
        }
        assert_eq!(flood.take(Some(start + SECOND * 3)), 30);
    }

    /// Noise takes no error's place; errors have as many, and no more.
    #[test]
    fn errors_are_written_in_a_flood_of_warnings() {
        let (flood, start) = (Flood::default(), Instant::now());
        let judge = |is_error| flood.window().judge(start, is_error);
        assert_eq!((0..1000).filter(|_| judge(false) == Verdict::Admitted).count() as u64, BURST);
        assert!((0..BURST).all(|_| judge(true) == Verdict::Admitted));
        assert_eq!(judge(true), Verdict::Withheld);
        // The end of the program does not wait for that of the second.
        assert_eq!(flood.take(None), 801);
    }
}
