//! Results as a table.

use std::fmt::Write as _;

use crate::{
    gate::State,
    record::{Record, Row},
};

/// The record's results: one line for each thing done in each state, one column for each subject.
pub(crate) fn text(record: &Record, title: &str) -> String {
    let mut out = format!("\n{} · {title}\n", record.section);
    let subjects = subjects(record);
    for metric in metrics(record) {
        let _ = write!(out, "{:<44}", heading(metric));
        for subject in &subjects {
            let _ = write!(out, " {subject:>26}");
        }
        out.push('\n');
        for (test, depth, client, state) in lines(record) {
            let find = |subject: &str| {
                let same = |row: &&Row| row.test == test && row.depth == depth && row.client == client && row.state == state;
                record.rows.iter().filter(same).find(|row| row.subject == subject)?.summary(metric)
            };
            let summaries: Vec<_> = subjects.iter().map(|subject| find(subject)).collect();
            if summaries.iter().all(Option::is_none) {
                continue;
            }
            let depth = if depth == 0 { String::new() } else { depth.to_string() };
            let _ = write!(out, "{test:<22} {depth:>4} {client:<9} {state:<5} ");
            for (index, summary) in summaries.iter().enumerate() {
                let Some(summary) = summary else {
                    let _ = write!(out, " {:>26}", "–");
                    continue;
                };
                let ratio = match summaries[0] {
                    Some(first) if index > 0 && summary.median > 0.0 => format!(" ×{:.2}", first.median / summary.median),
                    _ => String::new(),
                };
                let spread = match record.section.as_str() {
                    "pauses" => format!("to {}", number(summary.max)),
                    _ => format!("±{}", number(summary.mad)),
                };
                let value = format!("{} ({}, {spread}){ratio}", number(summary.median), summary.samples);
                let _ = write!(out, " {value:>26}");
            }
            out.push('\n');
        }
    }
    for note in &record.notes {
        let _ = writeln!(out, "  {note}");
    }
    let _ = writeln!(out, "  {} · {} samples dropped because the cores moved", record.date, record.dropped);
    out
}

/// Who was measured, first whom the others are compared with.
pub(crate) fn subjects(record: &Record) -> Vec<&str> {
    let mut subjects: Vec<&str> = Vec::new();
    for row in &record.rows {
        if !subjects.contains(&row.subject.as_str()) {
            subjects.push(&row.subject);
        }
    }
    subjects.sort_by_key(|subject| !matches!(*subject, "ours" | "alone"));
    subjects
}

/// The metrics that are worth a table of their own, of those that the record has.
pub(crate) fn metrics(record: &Record) -> Vec<&'static str> {
    let has = |metric: &&str| record.rows.iter().any(|row| row.samples.iter().any(|sample| sample.contains_key(*metric)));
    let by_section: &[&'static str] = match record.section.as_str() {
        "null" => &["iops", "cycles", "pings"],
        "virtio" => &["iops", "pings"],
        "fastpath" => &["iops", "p50", "spent"],
        "tail" => &["p50", "p99", "p99.9"],
        "polling" => &["p50", "mean", "core"],
        "interrupts" => &["iops", "interrupts"],
        "wake" => &["p50", "max", "cpu"],
        "footprint" => &["rss", "pss", "anonymous", "huge"],
        "devices" => &["iops", "spread"],
        "idle" => &["iops", "cpu"],
        "neighbour" | "spare" => &["p50", "p99", "p99.9", "rounds"],
        "pauses" => &["pause", "max"],
        "qos" => &["iops", "off", "above", "p99"],
        "copy" => &["rate"],
        _ => &["iops"],
    };
    by_section.iter().copied().filter(has).collect()
}

/// What a metric is.
pub(crate) fn heading(metric: &str) -> String {
    match metric {
        "iops" => "I/Os per second".into(),
        "cycles" => "TSC cycles of busy time per I/O".into(),
        "pings" => "latency in ping-pongs of a cache line".into(),
        "core" => "share of the core that the target takes".into(),
        "spent" => "processor time per I/O, ns".into(),
        "spread" => "distance of the slowest from the fastest".into(),
        "cpu" => "share of a core that is used".into(),
        "interrupts" => "interrupts per I/O".into(),
        "rounds" => "rounds of harm per second".into(),
        "off" => "off what is due, percent".into(),
        "above" => "most above the cap at any time, buckets".into(),
        "rate" => "bytes per second".into(),
        "pause" => "nobody served, ns (median, samples, worst)".into(),
        "rss" | "pss" => format!("{}, bytes", metric.to_uppercase()),
        "anonymous" => "memory of its own, bytes".into(),
        "huge" => "huge pages, bytes".into(),
        percentile => format!("{percentile}, ns"),
    }
}

/// What was done, without repetition, in the order in which it was.
pub(crate) fn lines(record: &Record) -> Vec<(&str, u32, &str, State)> {
    let mut lines = Vec::new();
    for row in &record.rows {
        let line = (row.test.as_str(), row.depth, row.client.as_str(), row.state);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.sort_by_key(|(test, depth, client, state)| (client.to_owned(), test.to_owned(), *depth, *state));
    lines
}

/// Three digits and a unit.
pub(crate) fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        size if size >= 999.5e6 => (value / 1e9, "G"),
        size if size >= 999.5e3 => (value / 1e6, "M"),
        size if size >= 9999.5 => (value / 1e3, "K"),
        _ => (value, ""),
    };
    let digits = match value.abs() {
        size if size >= 99.95 || size == 0.0 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.0995 => 2,
        _ => 4,
    };
    format!("{value:.digits$}{unit}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{metrics, number};
    use crate::{
        gate::State,
        record::{Key, Record, Sample},
    };

    #[test]
    fn round_trips_of_nvme_and_virtio_are_shown_in_ping_pongs() {
        let dir = tempfile::tempdir().unwrap();
        for (section, shown) in [("null", true), ("virtio", true), ("memory", false)] {
            let mut record = Record::open(dir.path(), section, "m", &BTreeMap::new(), true);
            let key = Key { test: "randread 4k".into(), depth: 1, client: "lean".into(), subject: "ours".into() };
            record.add(&key, State::Near, Sample::from([("iops".to_owned(), 4e6), ("pings".to_owned(), 2.5)]));
            assert_eq!(metrics(&record).contains(&"pings"), shown, "{section}");
        }
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.0625, "0.0625"), (1.5, "1.50"), (250.0, "250"), (8_300_000.0, "8.30M"), (39_500.0, "39.5K")]
        {
            assert_eq!(number(value), text);
        }
    }
}
