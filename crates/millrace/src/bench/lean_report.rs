//! What the lean client found, for people and for programs.

#![expect(clippy::cast_precision_loss, reason = "three digits are shown")]

use std::io::{self, Write};

use serde::Serialize;

use super::{
    BenchArgs,
    lean::Measured,
    report::{Latency, Rate, bytes},
    stages::{self, Since},
};

/// Everything that is printed; its JSON form is the output of `--lean --json`.
#[derive(Debug, Serialize)]
pub(super) struct LeanReport {
    /// Of the first controller.
    model: String,
    devices: usize,
    rw: &'static str,
    /// Every command kept its address.
    still: bool,
    bs: u64,
    qd: u32,
    queues: u16,
    /// Commands that were asked for a second, when they were paced.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<u64>,
    seconds: f64,
    total: Rate,
    /// How far apart the controllers are.
    fairness: Fairness,
    /// Of every command with `--latency`, `--rate` or `--interrupts`, of a few otherwise.
    latency_ns: Latency,
    #[serde(skip_serializing_if = "Option::is_none")]
    interrupts: Option<u64>,
}

/// Commands per controller: the slowest, the fastest, and their distance as a part of the mean.
#[derive(Debug, PartialEq, Serialize)]
struct Fairness {
    min: u64,
    max: u64,
    spread: f64,
}

impl Fairness {
    fn new(commands: &[u64]) -> Self {
        let (min, max) = (commands.iter().min().copied().unwrap_or(0), commands.iter().max().copied().unwrap_or(0));
        let total: u64 = commands.iter().sum();
        let spread = if total == 0 { 0.0 } else { (max - min) as f64 * commands.len() as f64 / total as f64 };
        Self { min, max, spread }
    }
}

impl LeanReport {
    pub(super) fn new(args: &BenchArgs, model: String, measured: &Measured) -> Self {
        let seconds = measured.elapsed.as_secs_f64();
        Self {
            model,
            devices: args.places().len(),
            rw: args.rw.name(),
            still: args.lean.still,
            bs: args.bs,
            qd: args.qd,
            queues: args.queues,
            rate: args.lean.rate,
            seconds,
            total: Rate::new(measured.commands.iter().sum(), args.bs, seconds),
            fairness: Fairness::new(&measured.commands),
            latency_ns: Latency::new(&measured.latency),
            interrupts: args.lean.interrupts.then_some(measured.interrupts),
        }
    }

    /// Writes it to standard output, and with it where our own daemon spent its time.
    pub(super) fn print(&self, json: bool, stages: Option<&Since>) -> io::Result<()> {
        stages::print(self, json, stages, |out| self.table(out))
    }

    fn table(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "{} · {} of {} · controllers: {} · queues each: {} · depth {} · {:.2} s",
            self.model,
            self.rw,
            bytes(self.bs as f64),
            self.devices,
            self.queues,
            self.qd,
            self.seconds
        )?;
        writeln!(out, "{:>11} {:>13}{}", "IOPS", "bandwidth", Latency::headings())?;
        let Rate { iops, bytes_per_second, .. } = self.total;
        writeln!(out, "{iops:>11.0} {:>11}/s{}", bytes(bytes_per_second), self.latency_ns.columns())?;
        if self.devices > 1 {
            let Fairness { min, max, spread } = self.fairness;
            writeln!(out, "commands per controller: {min} to {max}, {:.1} % apart", spread * 100.0)?;
        }
        if let Some(interrupts) = self.interrupts {
            writeln!(
                out,
                "interrupts: {interrupts}, {:.4} per command",
                interrupts as f64 / self.total.commands.max(1) as f64
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Fairness;

    #[test]
    fn fairness_is_the_distance_as_a_part_of_the_mean() {
        assert_eq!(Fairness::new(&[90, 100, 110]), Fairness { min: 90, max: 110, spread: 0.2 });
        assert_eq!(Fairness::new(&[]), Fairness { min: 0, max: 0, spread: 0.0 });
    }
}
