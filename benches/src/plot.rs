//! IOPS and latency against depth, as SVG.

use std::fmt::Write as _;

use crate::{
    gate::State,
    record::{Record, Row},
    table::number,
};

const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 62.0;
const TOP: f64 = 46.0;

/// One line: points of depth and value.
struct Series {
    name: String,
    subject: String,
    state: State,
    points: Vec<(u32, f64)>,
}

/// A picture of the records: for each load that was measured at several depths, IOPS on the left, latency on the right.
pub(crate) fn svg(records: &[Record]) -> String {
    let loads = [
        ("null", "randread 4k", "lean", "null, random read of 4 KiB"),
        ("memory", "randread 4k 64 MB", "lean", "memory, 64 MB, random read of 4 KiB"),
        ("memory", "randwrite 4k 64 MB", "lean", "memory, 64 MB, random write of 4 KiB"),
    ];
    let mut body = String::new();
    let mut row = 0.0;
    for (section, test, client, title) in loads {
        let Some(record) = records.iter().find(|record| record.section == section) else { continue };
        let rates = series(record, test, client, |_, iops| iops);
        if rates.is_empty() {
            continue;
        }
        let times = series(record, test, client, |depth, iops| f64::from(depth) * 1e9 / iops);
        panel(&mut body, 0.0, row, &format!("{title}: I/Os per second"), &rates);
        panel(&mut body, WIDTH + LEFT + 40.0, row, "mean latency, ns", &times);
        row += HEIGHT + TOP + 44.0;
    }
    let (width, height) = (2.0 * (WIDTH + LEFT) + 60.0, row.max(1.0));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

fn series(record: &Record, test: &str, client: &str, value: impl Fn(u32, f64) -> f64) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in record.rows.iter().filter(|row: &&Row| row.test == test && row.client == client) {
        let Some(summary) = row.summary("iops") else { continue };
        let point = (row.depth, value(row.depth, summary.median));
        match all.iter_mut().find(|series| series.subject == row.subject && series.state == row.state) {
            Some(series) => series.points.push(point),
            None => all.push(Series {
                name: format!("{} {}", row.subject, row.state),
                subject: row.subject.clone(),
                state: row.state,
                points: vec![point],
            }),
        }
    }
    for series in &mut all {
        series.points.sort_by_key(|(depth, _)| *depth);
    }
    all.retain(|series| series.points.len() > 1);
    all.sort_by(|a, b| (&a.subject, a.state).cmp(&(&b.subject, b.state)));
    all
}

/// Both axes are logarithmic: depths lie evenly, and so do ratios.
fn panel(out: &mut String, x: f64, y: f64, title: &str, all: &[Series]) {
    let points = || all.iter().flat_map(|series| series.points.iter().copied());
    let low = points().map(|(_, value)| value).fold(f64::INFINITY, f64::min).log10().mul_add(5.0, 0.0).floor() / 5.0;
    let high = (points().map(|(_, value)| value).fold(0.0, f64::max).log10() * 5.0).ceil() / 5.0;
    let deepest = f64::from(points().map(|(depth, _)| depth).max().unwrap_or(1)).log2().max(1.0);
    let across = |depth: u32| x + LEFT + f64::from(depth).log2() / deepest * WIDTH;
    let up = |value: f64| y + TOP + HEIGHT * (1.0 - (value.log10() - low) / (high - low).max(0.2));
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" font-weight=\"bold\">{title}</text>", x + LEFT, y + 18.0);
    let mut grid = low;
    while grid <= high + 0.01 {
        let value = 10f64.powf(grid);
        let at = up(value);
        let _ = writeln!(
            out,
            "<line x1=\"{:.0}\" x2=\"{:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            x + LEFT,
            x + LEFT + WIDTH,
            x + LEFT - 6.0,
            at + 4.0,
            number(value)
        );
        grid += if high - low > 1.5 { 0.4 } else { 0.2 };
    }
    let mut depths: Vec<u32> = points().map(|(depth, _)| depth).collect();
    depths.sort_unstable();
    depths.dedup();
    for depth in depths {
        let at = across(depth);
        let _ =
            writeln!(out, "<text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{depth}</text>", y + TOP + HEIGHT + 16.0);
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">depth</text>",
        x + LEFT + WIDTH / 2.0,
        y + TOP + HEIGHT + 32.0
    );
    for (index, series) in all.iter().enumerate() {
        let color = match series.subject.as_str() {
            "ours" => "#c0392b",
            "spdk" => "#2c6fbb",
            _ => "#7f8c8d",
        };
        let dash = if series.state == State::Far { " stroke-dasharray=\"5 4\"" } else { "" };
        let path: Vec<String> =
            series.points.iter().map(|(depth, value)| format!("{:.1},{:.1}", across(*depth), up(*value))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>",
            path.join(" ")
        );
        for (depth, value) in &series.points {
            let _ =
                writeln!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"/>", across(*depth), up(*value));
        }
        let at = x + LEFT + 96.0 * index as f64;
        let _ = writeln!(
            out,
            "<line x1=\"{at:.0}\" x2=\"{:.0}\" y1=\"{:.0}\" y2=\"{:.0}\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>\
             <text x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            at + 20.0,
            y + 32.0,
            y + 32.0,
            at + 25.0,
            y + 36.0,
            series.name
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::record::{Key, Sample};

    #[test]
    fn every_subject_and_state_has_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record::open(dir.path(), "null", "m", &BTreeMap::new(), true);
        for (subject, state, scale) in [("ours", State::Near, 3.0), ("ours", State::Far, 1.0), ("spdk", State::Near, 2.0)] {
            for depth in [1, 32] {
                let key = Key { test: "randread 4k".into(), depth, client: "lean".into(), subject: subject.into() };
                record.add(&key, state, Sample::from([("iops".to_owned(), 1e6 * scale * f64::from(depth))]));
            }
        }
        let svg = svg(&[record]);
        assert_eq!(svg.matches("<polyline").count(), 6, "three lines in two panels");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
