//! The log: lines on standard error, and never more of them than a person can use.
//!
//! Logging never waits for whoever reads standard error (see `lines`): shards log, and a blocked pipe must not stop a disk.

mod lines;

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io, panic,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use thiserror::Error;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer, filter::ParseError, layer::Context, layer::SubscriberExt, util::SubscriberInitExt,
};

use self::lines::Lines;
use crate::cli::{LogArgs, LogFormat};

/// What is logged unless told otherwise: what the operator does, and what goes wrong.
const DEFAULT: &str = "warn,millrace_control=info";

/// Lines in a second before the rest are withheld. What guests can cause is limited where it arises; this is the last resort.
const BURST: u64 = 200;
const SECOND: Duration = Duration::from_secs(1);

/// There can be no log.
#[derive(Debug, Error)]
pub(crate) enum LogError {
    /// The filter cannot be understood.
    #[error("--log {filter:?}: {source}; write a level (error, warn, info, debug, trace) or a list of TARGET=LEVEL")]
    Filter {
        filter: String,
        #[source]
        source: ParseError,
    },
    /// No thread for the log.
    #[error("the log's thread cannot be started: {0}")]
    Thread(#[from] io::Error),
}

/// Writes what is left when the program ends.
pub(crate) struct LogGuard(Lines);

impl Drop for LogGuard {
    fn drop(&mut self) {
        self.0.flush();
    }
}

pub(crate) fn start(args: &LogArgs) -> Result<LogGuard, LogError> {
    let text = args.filter.as_deref().unwrap_or(DEFAULT);
    let filter = EnvFilter::try_new(text).map_err(|source| LogError::Filter { filter: text.to_owned(), source })?;
    let lost: fn(u64) -> String = match args.format {
        LogFormat::Text => |count| format!("{count} log lines were dropped: nobody read them\n"),
        LogFormat::Json => |count| {
            let line = serde_json::json!({ "level": "WARN", "message": "log lines were dropped: nobody read them", "dropped": count });
            format!("{line}\n")
        },
    };
    let out = Lines::start(io::stderr(), lost)?;
    let lines = tracing_subscriber::fmt::layer().with_writer(out.clone()).with_ansi(false);
    let lines = match args.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // The filter is everybody's: what it hides must not count as a flood.
    tracing_subscriber::registry().with(filter).with(lines).with(FloodGuard::default()).init();
    log_panics();
    Ok(LogGuard(out))
}

/// Panics are reported on the same way as everything else: a shard that contains one must not wait for a reader either.
fn log_panics() {
    panic::set_hook(Box::new(|panic| {
        let backtrace = Backtrace::capture();
        let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| tracing::field::display(backtrace));
        let thread = std::thread::current();
        tracing::error!(thread = thread.name(), backtrace, "a fault of ours: {panic}");
    }));
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
    use std::sync::Arc;

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

    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Lines that nobody asked for take none of those that are let through.
    #[test]
    fn what_is_hidden_is_no_flood() {
        let written = Arc::new(Mutex::new(Vec::new()));
        let out = Mutex::new(Written(Arc::clone(&written)));
        let lines = tracing_subscriber::fmt::layer().with_writer(out).with_ansi(false);
        let filter = EnvFilter::try_new("info").unwrap();
        let subscriber = tracing_subscriber::registry().with(filter).with(lines).with(FloodGuard::default());
        tracing::subscriber::with_default(subscriber, || {
            (0..1000).for_each(|_| tracing::debug!("nobody asked"));
            tracing::warn!("it matters");
        });
        let written = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        assert!(written.contains("it matters") && !written.contains("nobody asked"), "{written}");
    }

    #[test]
    fn the_default_filter_is_one() {
        EnvFilter::try_new(DEFAULT).unwrap();
    }
}
