//! When the next work will come, told from when it came before.
//!
//! ```text
//!  last work    settle       foreseen sleep         watch          naps, or blocked, as without foresight
//!  ────┴───────────────────┬──────────────────────┬─────────────┬──────────────────────────────────────────────
//!      looks again at once │ ends shortly before  │ looks again │ it did not come: this pause is not like
//!                          │ the work should come │ at once     │ the last ones
//! ```
//!
//! A shard that sleeps between two requests answers the next one late: waking up takes longer than many a request. Where pauses are
//! alike (a guest that does one thing after the other on a disk, a steady pace) the sleep ends before the work comes. Where they
//! are not, nothing is foreseen and the shard sleeps as it would without.
//!
//! Of each of the last 16 pauses is known when it ended, or between which two looks. A few are disturbed: what counts is when the fourth
//! shortest ended. Pauses are alike unless several certainly ended much later; where that is not known, looking will tell. Those in which
//! completions are waited for are compared with such, and those in which only a guest can bring something with theirs.
//!
//! What is foreseen may be wrong: a guest that wrote once in five seconds may read at any time. Where nothing would end a sleep before its time
//! the shard sleeps in parts, which are naps.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Pauses that are remembered.
const KEPT: usize = 16;
/// Places in their order: a few are shorter, and a few are longer.
const SHORT: usize = 3;
/// See `SHORT`.
const LONG: usize = KEPT - 1 - SHORT;
/// Pauses that are added before it is asked again whether they are alike.
const FRESH: usize = 4;
/// Shorter pauses are none: work comes in pieces.
const SETTLE: Duration = Duration::from_micros(4);
/// By how much pauses may differ and be alike, beside a quarter of their length.
const SPREAD: Duration = Duration::from_micros(20);
/// The longest that is looked for work that should come: a guest's timers are alike, too, in seconds and more or less.
const WATCHED: Duration = Duration::from_micros(200);
/// A sleep that is to be shorter is not begun, but for one of so many.
const TRIED: u32 = 64;
/// See `TRIED`.
const LEAST: Duration = Duration::from_micros(4);

/// The last of something.
#[derive(Debug, Default)]
struct History<T> {
    last: [T; KEPT],
    next: usize,
    full: bool,
}

impl<T: Copy> History<T> {
    fn push(&mut self, value: T) {
        self.last[self.next] = value;
        self.next = (self.next + 1) % KEPT;
        self.full |= self.next == 0;
    }

    /// Of their lengths in order, the one at this place; `None` until enough are known.
    fn ranked(&self, place: usize, length: impl Fn(T) -> Duration) -> Option<Duration> {
        let mut sorted = self.last.map(length);
        sorted.sort_unstable();
        self.full.then_some(sorted[place])
    }
}

/// When a pause ended: at a time between these.
#[derive(Clone, Copy, Debug, Default)]
struct End {
    earliest: Duration,
    latest: Duration,
}

/// The last pauses of one kind.
#[derive(Debug, Default)]
struct Pauses {
    ends: History<End>,
    /// What they have in common, if they are alike as far as is known.
    common: Option<End>,
}

impl Pauses {
    fn push(&mut self, end: End) {
        self.ends.push(end);
        if self.ends.next.is_multiple_of(FRESH) {
            self.common = self.compare();
        }
    }

    /// They are alike if most began to end before any had ended for long.
    fn compare(&self) -> Option<End> {
        let soonest = self.ends.ranked(SHORT, |end| end.latest)?;
        let longest = self.ends.ranked(LONG, |end| end.earliest)?;
        let (earliest, latest) = (self.ends.ranked(SHORT, |end| end.earliest)?, self.ends.ranked(LONG, |end| end.latest)?);
        let alike = longest <= soonest + (soonest / 4).min(WATCHED) + SPREAD;
        alike.then_some(End { earliest, latest: latest.min(earliest + WATCHED) })
    }
}

/// What a shard without work does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Looks again.
    Look,
    /// Sleeps so long, for work should come soon afterwards; or less, and asks again.
    Until(Duration),
    /// Sleeps as it sees fit.
    AtWill,
}

/// How far the present pause is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Settle,
    /// Until the pause has this length, and then watches until it has that one.
    Sleep {
        until: Duration,
        watch: Duration,
    },
    /// Until the pause has this length.
    Watch(Duration),
    /// Nothing is foreseen any more.
    Open,
}

/// See the module. Lengths are times since the last work, but those of `excess`.
#[derive(Debug)]
pub(crate) struct Foresight {
    /// By whether completions are waited for.
    pauses: [Pauses; 2],
    /// By how much sleeps were longer than asked for.
    excess: History<Duration>,
    stage: Stage,
    /// Which of the histories the present pause belongs to.
    kind: usize,
    /// Foreseen sleeps in a row that were too long.
    late: u32,
    /// Sleeps that were not worth it since one was tried all the same.
    skipped: u32,
    /// A sleep has just ended: what is found now came during it.
    woke: Option<End>,
}

impl Default for Foresight {
    fn default() -> Self {
        let (pauses, excess) = Default::default();
        Self { pauses, excess, stage: Stage::Settle, kind: 0, late: 0, skipped: 0, woke: None }
    }
}

impl Foresight {
    /// What to do when the pause is `idle` long, of which `spin` is spent looking where nothing is foreseen. `waiting`: completions
    /// are expected.
    pub(crate) fn rest(&mut self, idle: Duration, spin: Duration, waiting: bool) -> Rest {
        self.woke = None;
        match self.stage {
            Stage::Settle if idle < SETTLE => return Rest::Look,
            Stage::Settle => {
                self.kind = usize::from(waiting);
                if let Some(rest) = self.foresee(idle) {
                    return rest;
                }
            }
            Stage::Sleep { until, watch } => {
                let left = until.saturating_sub(idle);
                if left >= LEAST {
                    return Rest::Until(left);
                }
                self.stage = Stage::Watch(watch);
                if idle < watch {
                    return Rest::Look;
                }
            }
            Stage::Watch(end) if idle < end => return Rest::Look,
            Stage::Watch(_) | Stage::Open => {}
        }
        self.stage = Stage::Open;
        if idle < spin { Rest::Look } else { Rest::AtWill }
    }

    fn foresee(&mut self, idle: Duration) -> Option<Rest> {
        let End { earliest, latest } = self.pauses[self.kind].common?;
        let watch = latest + SPREAD;
        // The next one may be longer than all of them.
        let excess = self.excess();
        let mut sleep = earliest.saturating_sub(idle + excess + excess / 4);
        if sleep < LEAST {
            // Without sleeps nobody would notice that waking up has become faster.
            self.skipped = (self.skipped + 1) % TRIED;
            if self.skipped > 0 {
                self.stage = Stage::Watch(watch);
                return Some(Rest::Look);
            }
            sleep = LEAST;
        }
        self.stage = Stage::Sleep { until: idle + sleep, watch };
        Some(Rest::Until(sleep))
    }

    fn excess(&self) -> Duration {
        self.excess.ranked(LONG, |excess| excess).unwrap_or_default()
    }

    /// A sleep is over that began and ended when the pause was so long. `event`: something ended it before its time.
    pub(crate) fn slept(&mut self, began: Duration, ended: Duration, event: bool) {
        let uncertain = match self.stage {
            // Probably it came just now; when that happens again and again, sooner.
            Stage::Sleep { until, .. } if ended >= until => self.excess().max(ended / (16 >> self.late.min(3))),
            _ if event => self.excess(),
            _ => ended,
        };
        self.woke = Some(End { earliest: ended.saturating_sub(uncertain).max(began), latest: ended });
    }

    /// A sleep that nothing ended before its time was by so much longer than asked for.
    pub(crate) fn overslept(&mut self, excess: Duration) {
        if excess < self.excess() / 2 {
            // A bad spell is over.
            self.excess.last.fill(excess);
        }
        self.excess.push(excess);
    }

    /// Whether the present pause is one that will be remembered.
    #[inline]
    pub(crate) fn is_resting(&self) -> bool {
        self.stage != Stage::Settle
    }

    /// Work was found when the pause was `idle` long.
    #[inline]
    pub(crate) fn work(&mut self, idle: Duration) {
        if self.is_resting() {
            self.learn(idle);
        }
    }

    /// When pauses end that only a guest ends, if they are alike.
    #[cfg(test)]
    pub(crate) fn common_for_tests(&self) -> Option<Duration> {
        self.pauses[0].common.map(|end| end.earliest)
    }

    fn learn(&mut self, idle: Duration) {
        let woke = self.woke.take();
        let late = woke.is_some() && self.stage != Stage::Open;
        self.late = if late { self.late + 1 } else { 0 };
        self.pauses[self.kind].push(woke.unwrap_or(End { earliest: idle, latest: idle }));
        self.stage = Stage::Settle;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN: Duration = Duration::from_micros(20);
    /// What waking up takes, at least and at most.
    const WAKING: [u64; 2] = [14, 19];
    const NAP: u64 = 45;
    const LONGEST_NAP: u64 = 400;

    /// What became of pauses of given lengths, in microseconds.
    #[derive(Debug, Default)]
    struct Outcome {
        /// Pauses whose end was met awake.
        awake: usize,
        /// How late the last one's was seen.
        late: u64,
        /// Time spent asleep, and in all.
        asleep: u64,
        all: u64,
    }

    /// A shard through pauses that are so long, looking every microsecond. What ends a pause of `waiting` wakes it, too.
    fn live(foresight: &mut Foresight, pauses: impl Iterator<Item = u64>, waiting: bool) -> Outcome {
        let mut outcome = Outcome::default();
        let mut sleeps = 0;
        for pause in pauses {
            let (mut idle, mut slept) = (0, false);
            while idle < pause {
                slept = true;
                let micros = Duration::from_micros;
                let asked = match foresight.rest(micros(idle), SPIN, waiting) {
                    Rest::Look => {
                        (idle, slept) = (idle + 1, false);
                        continue;
                    }
                    // Nothing would end the sleep before its time, but for what wakes it.
                    Rest::Until(sleep) if waiting => sleep.as_micros() as u64,
                    Rest::Until(sleep) => (sleep.as_micros() as u64).min(LONGEST_NAP),
                    Rest::AtWill => NAP,
                };
                sleeps += 1;
                let waking = WAKING[sleeps % 2];
                let event = waiting && idle + asked > pause;
                let end = if event { pause } else { idle + asked } + waking;
                outcome.asleep += end.min(pause) - idle;
                if !event {
                    foresight.overslept(micros(waking));
                }
                foresight.slept(micros(idle), micros(end), event);
                idle = end;
            }
            outcome.awake += usize::from(!slept);
            outcome.all += pause;
            outcome.late = idle - pause;
            foresight.work(Duration::from_micros(idle));
        }
        outcome
    }

    #[test]
    fn a_steady_pace_is_met_awake() {
        for (pause, waiting) in [50, 60, 200, 1000, 20_000].into_iter().flat_map(|pause| [(pause, false), (pause, true)]) {
            let mut foresight = Foresight::default();
            // First a pace at which sleeps are not worth it.
            live(&mut foresight, (0..1000).map(|_| 25), waiting);
            live(&mut foresight, (0..64).map(|_| pause), waiting);
            let outcome = live(&mut foresight, (0..1000).map(|_| pause), waiting);
            assert!(outcome.awake > 900, "{pause}: {outcome:?}");
            let (asleep, all) = (outcome.asleep * 100 / outcome.all, pause - 20);
            assert!(asleep >= all * 60 / pause, "{pause}: {asleep} % of the time asleep");
        }
    }

    #[test]
    fn who_comes_sooner_than_ever_before_waits_for_a_nap_at_most() {
        for pause in [1000, 20_000, 5_000_000] {
            let mut foresight = Foresight::default();
            live(&mut foresight, (0..64).map(|_| pause), false);
            for early in [pause / 2, 30, 500, 30, 30, 30, 30, 30] {
                let Outcome { late, .. } = live(&mut foresight, std::iter::once(early), false);
                assert!(late <= LONGEST_NAP + WAKING[1], "{late} µs late after {early} µs instead of {pause}");
            }
        }
    }

    #[test]
    fn a_pace_that_changes_is_followed() {
        let mut foresight = Foresight::default();
        for pause in [1000, 150, 600, 80, 5000] {
            live(&mut foresight, (0..64).map(|_| pause), true);
            let outcome = live(&mut foresight, (0..100).map(|_| pause), true);
            assert!(outcome.awake > 85, "{pause}: {outcome:?}");
        }
    }

    #[test]
    fn timers_of_seconds_cost_next_to_nothing() {
        // 5 s, and up to 4 ms more.
        let pauses = || (0..64).map(|turn| 5_000_000 + turn * 389 % 4000);
        let mut foresight = Foresight::default();
        for waiting in [false, true] {
            let outcome = live(&mut foresight, pauses(), waiting);
            let awake = outcome.all - outcome.asleep;
            assert!(awake < 64 * 300, "{awake} µs awake of {}", outcome.all);
        }
    }

    #[test]
    fn one_bad_spell_of_long_sleeps_is_forgotten() {
        let mut foresight = Foresight::default();
        live(&mut foresight, (0..64).map(|_| 200), false);
        (0..KEPT).for_each(|_| foresight.overslept(Duration::from_millis(1)));
        let outcome = live(&mut foresight, (0..1000).map(|_| 200), false);
        assert!(outcome.awake > 900 && outcome.asleep * 2 > outcome.all, "{outcome:?}");
    }

    #[test]
    fn completions_and_requests_are_told_apart() {
        let mut foresight = Foresight::default();
        let mut met = [0; 2];
        for turn in 0..500 {
            for (waiting, pause) in [(true, 90), (false, 700)] {
                let outcome = live(&mut foresight, std::iter::once(pause), waiting);
                met[usize::from(waiting)] += usize::from(turn >= 50) * outcome.awake;
            }
        }
        assert!(met.iter().all(|met| *met > 400), "{met:?} of 450");
    }

    #[test]
    fn of_pauses_without_a_rule_not_much_more_is_spent_awake_than_without_foresight() {
        for (mean, percent) in [(40, 180), (100, 175), (200, 125), (2000, 110)] {
            // A fixed sequence of lengths, exponentially distributed.
            let mut state = 7_u64;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let uniform = (f64::from((state >> 32) as u32) + 1.0) / (f64::from(u32::MAX) + 1.0);
                Duration::from_micros(mean).mul_f64(-uniform.ln()).as_micros() as u64 + 1
            };
            let pauses: Vec<u64> = (0..10_000).map(|_| random()).collect();
            let outcome = live(&mut Foresight::default(), pauses.iter().copied(), false);
            let spun: u64 = pauses.iter().map(|pause| (*pause).min(20)).sum();
            let awake = outcome.all - outcome.asleep;
            assert!(awake * 100 < spun * percent, "{mean}: {awake} µs awake, {spun} before the first sleep");
        }
    }
}
