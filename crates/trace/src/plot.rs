//! The report as a picture: one SVG, and a page that has it with the report's text. Neither loads anything.
//!
//! ```text
//!   where the time went  │ over time: reads, writes      each panel: a title, axes, marks; two in a row
//!   latencies            │ by size …
//! ```

use std::fmt::Write;

use crate::{
    report::{Class, Order, Report, direction, percent, size, time},
    requests::Trace,
};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 34.0;
const READ: &str = "#2b6cb0";
const WRITTEN: &str = "#c05621";
const OTHER: &str = "#718096";
const COLOURS: [&str; 8] = ["#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#d53f8c", "#319795", "#718096"];
/// Rows of a panel of bars, and dots of a panel of dots, at most.
const ROWS: usize = 14;
const DOTS: usize = 4000;

/// Text in which nothing is markup.
pub(crate) fn escape(text: &str) -> String {
    let escaped = |character| match character {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        other => String::from(other),
    };
    text.chars().map(escaped).collect()
}

/// One panel, drawn at the origin.
struct Panel {
    body: String,
}

impl Panel {
    fn new(title: &str) -> Self {
        let mut panel = Self { body: String::new() };
        panel.rect(0.0, 0.0, WIDTH - 10.0, HEIGHT - 10.0, "#ffffff");
        panel.text(10.0, 20.0, "start", "title", title);
        panel
    }

    fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        let (width, height) = (width.max(0.0), height.max(0.0));
        let _ =
            writeln!(self.body, r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"#);
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let text = escape(text);
        let _ = writeln!(self.body, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{text}</text>"#);
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = writeln!(self.body, r##"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="#cbd5e0" fill="none"/>"##);
    }

    fn path(&mut self, points: &[(f64, f64)], colour: &str) {
        let mut data = String::new();
        for (at, (x, y)) in points.iter().enumerate() {
            let _ = write!(data, "{}{x:.1} {y:.1}", if at == 0 { 'M' } else { 'L' });
        }
        let _ = writeln!(self.body, r#"<path d="{data}" stroke="{colour}" stroke-width="1.5" fill="none"/>"#);
    }

    fn legend(&mut self, entries: &[(&str, &str)]) {
        let mut x = WIDTH - RIGHT;
        for (name, colour) in entries.iter().rev() {
            self.text(x, 20.0, "end", "small", name);
            x -= 7.0 * name.len() as f64 + 12.0;
            self.rect(x, 12.0, 8.0, 8.0, colour);
            x -= 10.0;
        }
    }

    /// Axes with the largest value of each.
    fn axes(&mut self, right: &str, top: &str) {
        let floor = HEIGHT - BOTTOM - 10.0;
        self.line((LEFT, TOP), (LEFT, floor));
        self.line((LEFT, floor), (WIDTH - RIGHT, floor));
        self.text(WIDTH - RIGHT, floor + 16.0, "end", "small", right);
        self.text(LEFT - 6.0, TOP + 8.0, "end", "small", top);
        self.text(LEFT - 6.0, floor, "end", "small", "0");
    }
}

fn x(part: f64) -> f64 {
    LEFT + part.clamp(0.0, 1.0) * (WIDTH - RIGHT - LEFT)
}

fn y(part: f64) -> f64 {
    let floor = HEIGHT - BOTTOM - 10.0;
    floor - part.clamp(0.0, 1.0) * (floor - TOP)
}

fn part(value: u64, of: u64) -> f64 {
    value as f64 / of.max(1) as f64
}

/// A bar for each row: its name, how long, what it says, and a mark further on.
fn bars(title: &str, legend: &[(&str, &str)], rows: &[(String, u64, Option<u64>, String)]) -> Panel {
    let mut panel = Panel::new(title);
    panel.legend(legend);
    let rows = &rows[..rows.len().min(ROWS)];
    let most = rows.iter().map(|(_, value, mark, _)| (*value).max(mark.unwrap_or(0))).max().unwrap_or(1);
    let height = ((HEIGHT - TOP - 20.0) / rows.len().max(1) as f64).min(22.0);
    for (at, (name, value, mark, says)) in rows.iter().enumerate() {
        let top = TOP + at as f64 * height;
        let shown: String =
            if name.chars().count() > 24 { name.chars().take(23).chain(['…']).collect() } else { name.clone() };
        panel.text(LEFT - 6.0, top + height * 0.7, "end", "small", &shown);
        let long = (WIDTH - RIGHT - LEFT - 120.0) * part(*value, most);
        panel.rect(LEFT, top + 2.0, long.max(1.0), height - 4.0, COLOURS[at % COLOURS.len()]);
        let mut end = LEFT + long;
        if let Some(mark) = mark {
            let marked = LEFT + (WIDTH - RIGHT - LEFT - 120.0) * part(*mark, most);
            panel.line((end, top + height / 2.0), (marked, top + height / 2.0));
            panel.rect(marked, top + 3.0, 2.0, height - 6.0, "#1a202c");
            end = end.max(marked);
        }
        panel.text(end + 6.0, top + height * 0.7, "start", "small", says);
    }
    panel
}

fn stages(report: &Report) -> Panel {
    let rows: Vec<_> = report
        .stages
        .iter()
        .map(|stage| {
            let says = format!("{} / {}", time(stage.latency.mean), time(stage.latency.p99));
            (stage.name.clone(), stage.latency.mean, Some(stage.latency.p99), says)
        })
        .collect();
    bars("where the time went: mean, and 99th percentile (mark)", &[], &rows)
}

fn classes(title: &str, classes: &[Class]) -> Panel {
    let row = |class: &Class| {
        let says = format!("{} ({}x)", time(class.latency.p50), class.latency.count);
        (class.name.clone(), class.latency.p50, Some(class.latency.p99), says)
    };
    let mut most: Vec<&Class> = classes.iter().collect();
    if most.len() > ROWS {
        // Those that there are most of, in their order.
        let mut counts: Vec<u64> = most.iter().map(|class| class.latency.count).collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        let least = counts[ROWS - 1];
        most.retain(|class| class.latency.count >= least);
    }
    bars(title, &[], &most.into_iter().map(row).collect::<Vec<_>>())
}

/// What of a part of the time is drawn.
type Count = fn(&crate::report::Moment) -> u64;

fn over_time(report: &Report) -> Panel {
    let mut panel = Panel::new("requests over time");
    panel.legend(&[("reads", READ), ("writes", WRITTEN), ("others", OTHER)]);
    let moments = &report.moments;
    let most = moments.iter().map(|moment| moment.reads.max(moment.writes).max(moment.others)).max().unwrap_or(1);
    panel.axes(&time(report.duration), &most.to_string());
    let across = |at: usize| x((at as f64 + 0.5) / moments.len() as f64);
    let lines: [(Count, &str); 3] =
        [(|moment| moment.reads, READ), (|moment| moment.writes, WRITTEN), (|moment| moment.others, OTHER)];
    for (count, colour) in lines {
        let points: Vec<_> =
            moments.iter().enumerate().map(|(at, moment)| (across(at), y(part(count(moment), most)))).collect();
        panel.path(&points, colour);
    }
    panel
}

/// How many requests took at most so long, with time in steps that double.
fn latencies(trace: &Trace) -> Panel {
    let mut panel = Panel::new("latency: share of requests that took no longer");
    panel.legend(&[("reads", READ), ("writes", WRITTEN)]);
    let all: Vec<(Option<bool>, u64)> =
        trace.requests.iter().filter_map(|request| Some((direction(request), request.latency()?.max(1)))).collect();
    let log = |value: u64| (value as f64).log2();
    let least = log(all.iter().map(|(_, latency)| *latency).min().unwrap_or(1));
    let most = log(all.iter().map(|(_, latency)| *latency).max().unwrap_or(2)).max(least + 1.0);
    panel.axes(&time(most.exp2() as u64), "100 %");
    panel.text(LEFT, HEIGHT - BOTTOM + 6.0, "start", "small", &time(least.exp2() as u64));
    for (kind, colour) in [(Some(false), READ), (Some(true), WRITTEN)] {
        let mut times: Vec<u64> = all.iter().filter(|(of, _)| *of == kind).map(|(_, latency)| *latency).collect();
        times.sort_unstable();
        let steps = times.len().min(200);
        let point = |step: usize| {
            let at = (times.len() * step / steps).max(1) - 1;
            (x((log(times[at]) - least) / (most - least)), y(part(step as u64, steps as u64)))
        };
        panel.path(&(1..=steps).map(point).collect::<Vec<_>>(), colour);
    }
    panel
}

fn places(trace: &Trace, report: &Report) -> Panel {
    let mut panel = Panel::new("where: offset of requests over time");
    panel.legend(&[("reads", READ), ("writes", WRITTEN)]);
    let first = trace.span().0;
    let end = |request| Some(trace.namespace(request)?.size);
    let most = trace.requests.iter().filter_map(end).max().unwrap_or(1);
    panel.axes(&time(report.duration), &size(most));
    // All of a short trace, some of a long one.
    let step = trace.requests.len().div_ceil(DOTS).max(1);
    let mut dots = [String::new(), String::new()];
    for request in trace.requests.iter().step_by(step) {
        let (offset, bytes) = trace.range(request);
        let Some(writes) = direction(request).filter(|_| bytes > 0) else { continue };
        let (across, up) = (x(part(request.fetched.saturating_sub(first), report.duration)), y(part(offset, most)));
        let _ = write!(dots[usize::from(writes)], "M{across:.0} {up:.0}h2");
    }
    for (dots, colour) in dots.iter().zip([READ, WRITTEN]) {
        let _ = writeln!(panel.body, r#"<path d="{dots}" stroke="{colour}" stroke-width="2" fill="none"/>"#);
    }
    panel
}

fn in_order(report: &Report) -> Panel {
    let row = |order: &Order| {
        let says = format!("{}, {} runs", percent(order.sequential, order.requests), size(order.mean_run));
        (order.name.clone(), order.sequential, Some(order.requests), says)
    };
    let rows: Vec<_> = report.order.iter().map(row).collect();
    bars("in order: requests that begin where another ended, of all (mark)", &[], &rows)
}

fn hot(report: &Report) -> Panel {
    let row = |hot: &crate::report::Hot| {
        let says = format!("{} reads, {} writes", hot.reads, hot.writes);
        (format!("{} at {}", hot.volume, size(hot.offset)), hot.reads + hot.writes, None, says)
    };
    bars("used most, in pieces of 64 KiB", &[], &report.hot.iter().map(row).collect::<Vec<_>>())
}

/// The picture.
pub fn svg(trace: &Trace, report: &Report) -> String {
    let mut panels = vec![
        stages(report),
        over_time(report),
        latencies(trace),
        places(trace, report),
        classes("by size: median, and 99th percentile (mark)", &report.sizes),
        classes("by requests in flight: median, and 99th percentile (mark)", &report.depths),
        classes("by offset: median, and 99th percentile (mark)", &report.offsets),
        in_order(report),
        hot(report),
    ];
    if let Some(guest) = &report.guest {
        let row = |stage: &crate::report::Stage| {
            let says = format!("{} / {}", time(stage.latency.mean), time(stage.latency.p99));
            (stage.name.clone(), stage.latency.mean, Some(stage.latency.p99), says)
        };
        let rows: Vec<_> = guest.stages.iter().map(row).collect();
        panels.insert(1, bars("in the guest's view: mean, and 99th percentile (mark)", &[], &rows));
    }
    let (width, height) = (2.0 * WIDTH + 10.0, panels.len().div_ceil(2) as f64 * HEIGHT + 50.0);
    let mut out = format!(
        concat!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">"##,
            "\n<style>text {{ font: 12px sans-serif; fill: #1a202c }} .small {{ font-size: 11px; fill: #4a5568 }} ",
            ".title {{ font-weight: bold }} .head {{ font-size: 16px; font-weight: bold }}</style>\n",
            r##"<rect width="{width}" height="{height}" fill="#edf2f7"/>"##,
            "\n",
            r##"<text x="12" y="26" class="head">{title}</text>"##,
            "\n"
        ),
        width = width,
        height = height,
        title = escape(&format!("{}: {} requests in {}", report.target, report.requests, time(report.duration)))
    );
    for (at, panel) in panels.iter().enumerate() {
        let (across, down) = ((at % 2) as f64 * WIDTH + 10.0, (at / 2) as f64 * HEIGHT + 42.0);
        let _ = writeln!(out, r#"<g transform="translate({across} {down})">{}</g>"#, panel.body);
    }
    out + "</svg>\n"
}

/// The picture and the text, as a page.
pub fn html(trace: &Trace, report: &Report) -> String {
    let (title, svg, text) = (escape(&report.target), svg(trace, report), escape(&report.text()));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n<style>body {{ margin: 16px; \
         background: #edf2f7 }} pre {{ background: #ffffff; padding: 12px; overflow-x: auto }} svg {{ max-width: 100%; height: auto \
         }}</style></head>\n<body>\n{svg}<pre>{text}</pre>\n</body></html>\n"
    )
}
