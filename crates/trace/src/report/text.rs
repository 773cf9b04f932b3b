//! The report for people.

use std::fmt::Write;

use super::{Class, Latency, Report, size};

/// A duration, with three digits that count.
pub(crate) fn time(nanos: u64) -> String {
    let (value, unit) = match nanos {
        0..1_000 => return format!("{nanos} ns"),
        1_000..1_000_000 => (nanos as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (nanos as f64 / 1e6, "ms"),
        _ => (nanos as f64 / 1e9, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// Lines of cells, the first of each to the left.
fn table(out: &mut String, head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> = std::iter::once(head.iter().map(ToString::to_string).collect()).chain(rows).collect();
    let widest = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widest(column).unwrap_or(0);
            if column == 0 {
                let _ = write!(line, "  {cell:<width$}");
            } else {
                let _ = write!(line, "  {cell:>width$}");
            }
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

fn latency(latency: &Latency) -> Vec<String> {
    let Latency { mean, p50, p90, p99, p999, max, .. } = *latency;
    [mean, p50, p90, p99, p999, max].map(time).to_vec()
}

const LATENCY: [&str; 6] = ["mean", "p50", "p90", "p99", "p99.9", "max"];

fn classes(out: &mut String, title: &str, name: &str, classes: &[Class]) {
    if classes.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    let head = [&[name, "requests", "bytes"][..], &LATENCY].concat();
    let row = |class: &Class| {
        let first = vec![class.name.clone(), class.latency.count.to_string(), size(class.bytes)];
        [first, latency(&class.latency)].concat()
    };
    table(out, &head, classes.iter().map(row));
}

pub(crate) fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", part as f64 * 100.0 / whole.max(1) as f64)
}

pub(super) fn text(report: &Report) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "trace of {}", report.target);
    for device in &report.devices {
        let _ = writeln!(out, "  {device}");
    }
    let seconds = report.duration as f64 / 1e9;
    let rate = if seconds > 0.0 { report.requests as f64 / seconds } else { 0.0 };
    let _ = writeln!(
        out,
        "  {} requests in {}, {rate:.0} a second; {} errors, {} interrupts, {} events",
        report.requests,
        time(report.duration),
        report.errors,
        report.interrupts,
        report.events
    );
    let _ = writeln!(out, "  ended: {}", report.ended.as_deref().unwrap_or("it does not say: the file was cut off"));
    lost(&mut out, report);
    classes(&mut out, "by operation", "operation", &report.operations);
    stages(&mut out, report);
    guest(&mut out, report);
    classes(&mut out, "by size", "size", &report.sizes);
    classes(&mut out, "by requests in flight", "in flight", &report.depths);
    classes(&mut out, "by offset", "where", &report.offsets);
    rest(&mut out, report);
    out
}

fn lost(out: &mut String, report: &Report) {
    let lost = &report.lost;
    let damaged = format!("bytes of the file are unreadable, from byte {} on", lost.damaged_from.unwrap_or(0));
    let parts = [
        (lost.dropped, "events found no room in the daemon's rings"),
        (lost.damaged_bytes, damaged.as_str()),
        (lost.missing_blocks, "blocks of the file are missing, with the events in them"),
        (lost.unfinished, "requests were not completed while they were traced"),
        (lost.unknown, "requests began before the trace, or their beginning is lost"),
    ];
    for (count, what) in parts.into_iter().filter(|(count, _)| *count > 0) {
        let _ = writeln!(out, "  not here: {count} {what}");
    }
}

fn stages(out: &mut String, report: &Report) {
    let _ = writeln!(out, "\nwhere the time went");
    let head = [&["stage", "of all", "requests"][..], &LATENCY, &["what"]].concat();
    let rows = report.stages.iter().map(|stage| {
        let permille = stage.permille.map_or("-".to_owned(), |permille| percent(permille, 1000));
        let first = vec![stage.name.clone(), permille, stage.latency.count.to_string()];
        [first, latency(&stage.latency), vec![stage.what.clone()]].concat()
    });
    table(out, &head, rows);
}

fn guest(out: &mut String, report: &Report) {
    let Some(guest) = &report.guest else { return };
    let _ = writeln!(out, "\nwith the guest's own trace (device {})", guest.device);
    let _ = writeln!(
        out,
        "  {} of its {} requests are ours; {} of ours are not in its trace",
        guest.joined, guest.requests, guest.unmatched
    );
    let _ = writeln!(out, "  its clock and ours are told apart to {} on either side", time(guest.uncertainty));
    if guest.misfit > 0 {
        let _ = writeln!(out, "  no one difference between the clocks fits all: some are off by {}", time(guest.misfit));
    }
    let rows = guest.stages.iter().map(|stage| {
        [vec![stage.name.clone(), stage.latency.count.to_string()], latency(&stage.latency), vec![stage.what.clone()]]
            .concat()
    });
    table(out, &[&["stage", "requests"][..], &LATENCY, &["what"]].concat(), rows);
}

fn rest(out: &mut String, report: &Report) {
    if !report.order.is_empty() {
        let _ = writeln!(out, "\norder");
        let rows = report.order.iter().map(|order| {
            let share = percent(order.sequential, order.requests);
            vec![order.name.clone(), order.requests.to_string(), share, size(order.mean_run), size(order.longest_run)]
        });
        table(out, &["requests of", "requests", "sequential", "mean run", "longest run"], rows);
    }
    if !report.moments.is_empty() {
        let _ = writeln!(out, "\nover time");
        let rows = report.moments.iter().map(|moment| {
            let all = moment.reads + moment.writes + moment.others;
            let moved = size(moment.read_bytes.saturating_add(moment.written_bytes));
            let share = percent(moment.reads, all);
            vec![time(moment.at), all.to_string(), share, moved, time(moment.mean)]
        });
        table(out, &["from", "requests", "reads", "bytes", "mean latency"], rows);
    }
    if !report.hot.is_empty() {
        let _ = writeln!(out, "\nused most, in pieces of 64 KiB");
        let rows = report
            .hot
            .iter()
            .map(|hot| vec![format!("{} at {}", hot.volume, hot.offset), hot.reads.to_string(), hot.writes.to_string()]);
        table(out, &["piece", "reads", "writes"], rows);
    }
    if !report.background.is_empty() {
        let _ = writeln!(out, "\nfor nobody who was traced: volumes' own work, copies, other guests");
        let rows = report.background.iter().map(|node| vec![node.node.clone(), node.requests.to_string(), size(node.bytes)]);
        table(out, &["node", "requests", "bytes"], rows);
    }
}
