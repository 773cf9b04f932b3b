//! The log: lines on standard error, and never more of them than a person can use.
//!
//! Logging never waits for whoever reads standard error (see `lines`): shards log, and a blocked pipe must not stop a disk.

mod flood;
mod lines;

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    io, panic,
};

use serde_json::json;
use thiserror::Error;
use tracing_subscriber::{
    EnvFilter, Layer,
    filter::{LevelFilter, ParseError},
    fmt::{
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use self::{
    flood::{Flood, FloodGuard},
    lines::Lines,
};
use crate::cli::{LogArgs, LogFormat};

/// What is logged unless told otherwise: what the operator does, and what goes wrong.
const DEFAULT: &str = "warn,millrace_control=info";
/// What targets begin with: the crates that log, and what they have in common.
const TARGETS: [&str; 8] = [
    "millrace_control",
    "millrace_services",
    "millrace_frontends",
    "millrace_backends",
    "millrace_engine",
    "millrace_cipher",
    "millrace_command",
    "millrace",
];

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
    /// A word of it would be a target that nothing has.
    #[error("--log {filter:?}: {why}")]
    Word { filter: String, why: String },
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
    let filter = filter(args.filter.as_deref().unwrap_or(DEFAULT))?;
    let (flood, format) = (Flood::default(), args.format);
    let out = Lines::start(io::stderr(), flood.clone(), move |loss, count| loss.line(format, count))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(out.clone()).with_ansi(false);
    let lines = match args.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // The filter is everybody's: what it hides must not count as a flood.
    tracing_subscriber::registry().with(filter).with(lines).with(FloodGuard { flood, lines: out.clone() }).init();
    log_panics();
    Ok(LogGuard(out))
}

/// Understands a filter. For the library a word that is no level is a target, and what no target names is off, errors too: so words are looked at
/// here, and errors stay on where no level is said for all.
fn filter(text: &str) -> Result<EnvFilter, LogError> {
    fn is_level(part: &str) -> bool {
        part.parse::<LevelFilter>().is_ok()
    }
    let mut parts: Vec<_> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    for &part in parts.iter().filter(|part| !is_level(part)) {
        let target = part.split(['=', '[']).next().unwrap_or_default();
        if TARGETS.contains(&target.split("::").next().unwrap_or_default()) {
            continue;
        }
        let why = if target == part {
            format!("{part:?} is no level; write error, warn, info, debug or trace, or a list of TARGET=LEVEL")
        } else {
            let targets = TARGETS.join(", ");
            format!("{target:?} is no target; there are {targets}, and what lies in them, as millrace_services::mirror")
        };
        return Err(LogError::Word { filter: text.to_owned(), why });
    }
    if !parts.iter().any(|part| is_level(part)) {
        parts.push("error");
    }
    EnvFilter::try_new(parts.join(",")).map_err(|source| LogError::Filter { filter: text.to_owned(), source })
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

/// What the log says of itself: so many lines are not in it.
#[derive(Clone, Copy)]
enum Loss {
    /// Nobody read them in time.
    Dropped,
    /// They were too many.
    Withheld,
}

impl Loss {
    /// The line, in the form of all others.
    fn line(self, format: LogFormat, count: u64) -> String {
        let (field, message) = match self {
            Self::Dropped => ("dropped", "log lines were dropped: nobody read them"),
            Self::Withheld => ("withheld", "log lines were withheld: there were too many"),
        };
        let (mut timestamp, target) = (String::new(), module_path!());
        // A clock that cannot be told is no reason to be silent.
        let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
        match format {
            LogFormat::Text => format!("{timestamp}  WARN {target}: {message} {field}={count}\n"),
            LogFormat::Json => {
                let fields = json!({ "message": message, field: count });
                format!("{}\n", json!({ "timestamp": timestamp, "level": "WARN", "fields": fields, "target": target }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, PipeReader},
        iter,
    };

    use serde_json::Value;

    use super::*;

    /// What is logged in `during`, line by line as somebody reads it, in a log of the program's own form.
    fn logged(format: LogFormat, during: impl FnOnce()) -> (LogGuard, impl Iterator<Item = String>) {
        let (reader, writer): (PipeReader, _) = io::pipe().unwrap();
        let flood = Flood::default();
        let out = Lines::start(writer, flood.clone(), move |loss, count| loss.line(format, count)).unwrap();
        let lines = tracing_subscriber::fmt::layer().with_writer(out.clone()).with_ansi(false);
        let lines = match format {
            LogFormat::Text => lines.boxed(),
            LogFormat::Json => lines.json().boxed(),
        };
        let filter = EnvFilter::try_new("info").unwrap();
        let guard = FloodGuard { flood, lines: out.clone() };
        let subscriber = tracing_subscriber::registry().with(filter).with(lines).with(guard);
        tracing::subscriber::with_default(subscriber, during);
        let mut reader = BufReader::new(reader);
        let next = move || {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|length| *length > 0).map(|_| line)
        };
        (LogGuard(out), iter::from_fn(next))
    }

    /// Lines that nobody asked for take none of those that are let through.
    #[test]
    fn what_is_hidden_is_no_flood() {
        let (guard, mut lines) = logged(LogFormat::Text, || {
            (0..1000).for_each(|_| tracing::debug!("nobody asked"));
            tracing::warn!("it matters");
        });
        drop(guard);
        let written = lines.next().unwrap();
        assert!(written.contains("it matters"), "{written}");
        assert!(lines.next().is_none());
    }

    /// Also when nothing follows: the line comes by itself. It and every other has what all have.
    #[test]
    fn what_was_withheld_is_told_in_the_form_of_all_lines() {
        let (guard, mut lines) = logged(LogFormat::Json, || {
            (0..1000).for_each(|_| tracing::warn!("noise"));
            tracing::error!("it matters");
        });
        let (mut told, mut is_there) = (0, false);
        while told < 1001 {
            let line: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
            let said = ["timestamp", "level", "target"].map(|key| line[key].is_string());
            assert!(said == [true; 3] && line["fields"]["message"].is_string(), "{line}");
            is_there |= line["level"] == "ERROR" && line["fields"]["message"] == "it matters";
            told += ["withheld", "dropped"].iter().find_map(|key| line["fields"][key].as_u64()).unwrap_or(1);
        }
        drop(guard);
        assert!(told == 1001 && is_there);
    }

    /// What the program says of lost lines looks as if it were logged.
    #[test]
    fn losses_are_lines_like_others() {
        let (guard, mut lines) =
            logged(LogFormat::Text, || tracing::warn!(dropped = 7, "log lines were dropped: nobody read them"));
        drop(guard);
        let without_time = |line: &str| line.split_once(' ').map(|(_, rest)| rest.replace("::tests", "")).unwrap();
        let logged = lines.next().unwrap();
        assert_eq!(without_time(&Loss::Dropped.line(LogFormat::Text, 7)), without_time(&logged));
        let json: Value = serde_json::from_str(&Loss::Dropped.line(LogFormat::Json, 7)).unwrap();
        assert_eq!((&json["level"], &json["fields"]["dropped"]), (&"WARN".into(), &7.into()));
        assert!(json["timestamp"].as_str().is_some_and(|time| time.ends_with('Z')), "{json}");
    }

    #[test]
    fn a_filter_is_of_levels_and_targets_of_ours_and_keeps_errors() {
        for (text, kept) in [
            (DEFAULT, DEFAULT),
            ("trace", "trace"),
            ("millrace=debug,warn", "millrace=debug,warn"),
            ("millrace_control=info", "error,millrace_control=info"),
            ("millrace_services::mirror=debug", "error,millrace_services::mirror=debug"),
            (" info , millrace=debug", "info,millrace=debug"),
            ("", "error"),
        ] {
            assert_eq!(filter(text).unwrap().to_string(), EnvFilter::try_new(kept).unwrap().to_string(), "{text}");
        }
        for (text, why) in [
            ("wran", "\"wran\" is no level; write error, warn"),
            ("info,wran", "\"wran\" is no level"),
            ("warn,millrace_servces=debug", "\"millrace_servces\" is no target; there are millrace_control, "),
            ("=debug", "\"\" is no target"),
            ("millrace_control=loud", "write a level"),
        ] {
            let error = filter(text).unwrap_err().to_string();
            assert!(error.starts_with("--log ") && error.contains(why), "{text}: {error}");
        }
    }
}
