//! The log: lines on standard error, and never more of them than a person can use.

use std::{
    io,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use thiserror::Error;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer, filter::ParseError, layer::Context, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::cli::{LogArgs, LogFormat};

/// What is logged unless told otherwise: what the operator does, and what goes wrong.
const DEFAULT: &str = "warn,millrace_control=info";

/// Lines in a second before the rest are withheld. What guests can cause is limited where it arises; this is the last resort.
const BURST: u64 = 200;
const SECOND: Duration = Duration::from_secs(1);

/// The filter cannot be understood.
#[derive(Debug, Error)]
#[error("--log {filter:?}: {source}; write a level (error, warn, info, debug, trace) or a list of TARGET=LEVEL")]
pub(crate) struct FilterError {
    filter: String,
    #[source]
    source: ParseError,
}

pub(crate) fn start(args: &LogArgs) -> Result<(), FilterError> {
    let text = args.filter.as_deref().unwrap_or(DEFAULT);
    let filter = EnvFilter::try_new(text).map_err(|source| FilterError { filter: text.to_owned(), source })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let lines = match args.format {
        LogFormat::Text => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(filter)).with(FloodGuard::default()).init();
    Ok(())
}

/// Withholds lines beyond [`BURST`] a second, and says afterwards how many they were.
#[derive(Default)]
struct FloodGuard(Mutex<Window>);

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    lines: u64,
}

impl Window {
    /// Whether a line may be written now, and how many were withheld in the second that has ended.
    fn admit(&mut self, now: Instant) -> (bool, u64) {
        let mut withheld = 0;
        if self.began.is_none_or(|began| now.duration_since(began) >= SECOND) {
            withheld = self.lines.saturating_sub(BURST);
            *self = Self { began: Some(now), lines: 0 };
        }
        self.lines += 1;
        (self.lines <= BURST, withheld)
    }
}

impl<S: Subscriber> Layer<S> for FloodGuard {
    fn event_enabled(&self, _event: &Event<'_>, _context: Context<'_, S>) -> bool {
        let (admitted, withheld) = self.0.lock().unwrap_or_else(PoisonError::into_inner).admit(Instant::now());
        if withheld > 0 {
            tracing::warn!(withheld, "log lines were withheld: there were too many");
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut window, start) = (Window::default(), Instant::now());
        let admitted = (0..1000).filter(|_| window.admit(start).0).count() as u64;
        assert_eq!(admitted, BURST);
        assert_eq!(window.admit(start + SECOND), (true, 1000 - BURST));
        assert_eq!(window.admit(start + SECOND), (true, 0));
        assert_eq!(window.admit(start + SECOND * 2), (true, 0));
    }

    #[test]
    fn the_default_filter_is_one() {
        EnvFilter::try_new(DEFAULT).unwrap();
    }
}
