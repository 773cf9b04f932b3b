//! Results, for people and for programs.

#![expect(clippy::cast_precision_loss, reason = "three digits are shown")]

use std::io::{self, Write};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::{
    BenchArgs, Target,
    stages::{self, Since},
    worker::{Counts, Measured},
};

/// Everything that is printed; its JSON form is the output of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Or the address of a physical controller.
    socket: String,
    model: String,
    nsid: u32,
    block_size: u32,
    rw: &'static str,
    bs: u64,
    qd: u32,
    queues: u16,
    range_bytes: u64,
    seconds: f64,
    interrupted: bool,
    total: Rate,
    #[serde(skip_serializing_if = "Option::is_none")]
    read: Option<Direction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write: Option<Direction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verify: Option<Verified>,
}

#[derive(Debug, Serialize)]
pub(super) struct Rate {
    pub(super) commands: u64,
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
}

#[derive(Debug, Serialize)]
struct Direction {
    #[serde(flatten)]
    rate: Rate,
    latency_ns: Latency,
}

#[derive(Debug, Serialize)]
pub(super) struct Latency {
    samples: u64,
    min: u64,
    mean: f64,
    p50: u64,
    p90: u64,
    p99: u64,
    #[serde(rename = "p99.9")]
    p99_9: u64,
    #[serde(rename = "p99.99")]
    p99_99: u64,
    max: u64,
}

#[derive(Debug, Serialize)]
struct Verified {
    checked_blocks: u64,
    initialising_writes: u64,
    final_pass: bool,
    seed: u64,
}

impl Rate {
    pub(super) fn new(commands: u64, bs: u64, seconds: f64) -> Self {
        let iops = if seconds > 0.0 { commands as f64 / seconds } else { 0.0 };
        Self { commands, iops, bytes_per_second: iops * bs as f64 }
    }
}

impl Latency {
    pub(super) fn new(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self {
            samples: histogram.len(),
            min: histogram.min(),
            mean: histogram.mean(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            p99_99: at(0.9999),
            max: histogram.max(),
        }
    }

    /// The columns' names, each after a space and nine wide.
    pub(super) fn headings() -> String {
        ["mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"].map(|name| format!(" {name:>9}")).concat()
    }

    /// The values under the headings.
    pub(super) fn columns(&self) -> String {
        let [p50, p90, p99, p99_9, p99_99, max] =
            [self.p50, self.p90, self.p99, self.p99_9, self.p99_99, self.max].map(|value| value as f64);
        [self.mean, p50, p90, p99, p99_9, p99_99, max].map(|value| format!(" {:>9}", time(value))).concat()
    }
}

impl Report {
    pub(super) fn new(args: &BenchArgs, target: &Target, measured: &Measured) -> Self {
        let seconds = measured.elapsed.as_secs_f64();
        let direction = |counts: &Counts| {
            (counts.commands > 0).then(|| Direction {
                rate: Rate::new(counts.commands, args.bs, seconds),
                latency_ns: Latency::new(&counts.latency),
            })
        };
        Self {
            socket: args.places().iter().map(ToString::to_string).collect(),
            model: target.model(),
            nsid: args.nsid(),
            block_size: target.namespace.block_size(),
            rw: args.rw.name(),
            bs: args.bs,
            qd: args.qd,
            queues: args.queues,
            range_bytes: target.units * args.bs,
            seconds,
            interrupted: measured.interrupted,
            total: Rate::new(measured.reads.commands + measured.writes.commands, args.bs, seconds),
            read: direction(&measured.reads),
            write: direction(&measured.writes),
            verify: args.verify.then_some(Verified {
                checked_blocks: measured.checked_blocks,
                initialising_writes: measured.initialised,
                final_pass: measured.final_pass,
                seed: measured.seed,
            }),
        }
    }

    /// Writes it to standard output, and with it where our own daemon spent its time.
    pub(super) fn print(&self, json: bool, stages: Option<&Since>) -> io::Result<()> {
        stages::print(self, json, stages, |out| self.table(out))
    }

    fn table(&self, out: &mut impl Write) -> io::Result<()> {
        let plural = if self.queues == 1 { "queue" } else { "queues" };
        writeln!(
            out,
            "{} · namespace {} · {} of {} · {} {plural} of depth {} · {:.2} s{}",
            if self.model.is_empty() { &self.socket } else { &self.model },
            self.nsid,
            self.rw,
            bytes(self.bs as f64),
            self.queues,
            self.qd,
            self.seconds,
            if self.interrupted { " (interrupted)" } else { "" }
        )?;
        writeln!(out, "{:<6} {:>11} {:>13}{}", "", "IOPS", "bandwidth", Latency::headings())?;
        for (name, direction) in [("read", &self.read), ("write", &self.write)] {
            let Some(Direction { rate, latency_ns: latency }) = direction else { continue };
            write!(out, "{name:<6} {:>11.0} {:>11}/s", rate.iops, bytes(rate.bytes_per_second))?;
            writeln!(out, "{}", latency.columns())?;
        }
        if self.read.is_some() && self.write.is_some() {
            writeln!(out, "{:<6} {:>11.0} {:>11}/s", "total", self.total.iops, bytes(self.total.bytes_per_second))?;
        }
        if let Some(verify) = &self.verify {
            let pass = if verify.final_pass { "all that was written was read once more" } else { "no last pass" };
            let Verified { checked_blocks, initialising_writes, .. } = verify;
            writeln!(out, "verify {checked_blocks} blocks checked; {initialising_writes} writes in place of reads; {pass}")?;
        }
        Ok(())
    }
}

/// With a binary unit and three digits.
pub(super) fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Nanoseconds, with a unit and three digits.
pub(super) fn time(nanoseconds: f64) -> String {
    scaled(nanoseconds, 1000.0, &["ns", "µs", "ms", "s"])
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value, 0);
    // What would round up to a whole step is shown in the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!(bytes(512.0), "512 B");
        assert_eq!(bytes(4096.0), "4.00 KiB");
        assert_eq!(bytes(1023.9), "1.00 KiB");
        assert_eq!(bytes(3.5e9), "3.26 GiB");
        assert_eq!(time(950.0), "950 ns");
        assert_eq!(time(12_345.0), "12.3 µs");
        assert_eq!(time(2.5e10), "25.0 s");
    }

    #[test]
    fn a_run_without_time_has_no_rate() {
        let rate = Rate::new(10, 4096, 0.0);
        assert_eq!((rate.commands, rate.iops.to_bits()), (10, 0.0f64.to_bits()));
    }
}
