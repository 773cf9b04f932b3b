//! `--stages`: where our own daemon's shards spent their time while a run went on.

#![expect(clippy::cast_precision_loss, reason = "three digits are shown")]

use std::{
    collections::BTreeMap,
    io::{self, StdoutLock, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use serde::Serialize;
use serde_json::Value;

use super::BenchError;
use crate::client::Client;

/// Counters are published about once a millisecond.
const PUBLISHED: Duration = Duration::from_millis(20);

/// A daemon that counts while a run goes on.
#[derive(Debug)]
pub(super) struct StageWatch {
    run_dir: PathBuf,
    before: Counted,
}

impl StageWatch {
    pub(super) fn begin(run_dir: PathBuf) -> Result<Self, BenchError> {
        let before = Counted::ask(&run_dir)?;
        Ok(Self { run_dir, before })
    }

    /// What was counted since it began.
    pub(super) fn end(&self) -> Result<Since, BenchError> {
        sleep(PUBLISHED);
        Ok(Counted::ask(&self.run_dir)?.since(&self.before))
    }
}

/// What was counted between two looks, for each command.
#[derive(Debug, Serialize)]
pub(super) struct Since {
    commands: u64,
    /// Of all stages.
    ticks_per_command: f64,
    /// In the daemon's order.
    each: Vec<StageSince>,
}

#[derive(Debug, Serialize)]
struct StageSince {
    stage: String,
    ticks_per_command: f64,
    entries_per_command: f64,
}

impl Since {
    pub(super) fn table(&self) -> String {
        let mut lines = vec![format!("{:<12} {:>14} {:>18}", "stage", "ticks per I/O", "entries per I/O")];
        for StageSince { stage, ticks_per_command: ticks, entries_per_command: entries } in &self.each {
            lines.push(format!("{stage:<12} {ticks:>14.1} {entries:>18.3}"));
        }
        lines.push(format!("{:<12} {:>14.1}\n", "all", self.ticks_per_command));
        lines.join("\n")
    }
}

/// A report as JSON, with the stages in it: one object.
#[derive(Debug, Serialize)]
struct WithStages<'a, T> {
    #[serde(flatten)]
    report: &'a T,
    #[serde(skip_serializing_if = "Option::is_none")]
    stages: Option<&'a Since>,
}

/// Writes a report to standard output, as JSON or as its table, and with it where our own daemon spent its time.
pub(super) fn print<T: Serialize>(
    report: &T,
    json: bool,
    stages: Option<&Since>,
    table: impl FnOnce(&mut StdoutLock<'static>) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &WithStages { report, stages })?;
        writeln!(out)?;
    } else {
        table(&mut out)?;
        if let Some(stages) = stages {
            out.write_all(stages.table().as_bytes())?;
        }
    }
    out.flush()
}

/// What all shards of a daemon have counted.
#[derive(Debug, Default, PartialEq)]
struct Counted {
    commands: u64,
    /// Ticks of the time stamp counter and entries, by stage.
    stages: BTreeMap<String, (u64, u64)>,
    /// The stages in the daemon's order.
    order: Vec<String>,
}

impl Counted {
    /// Asks the daemon in this run directory.
    fn ask(run_dir: &Path) -> Result<Self, BenchError> {
        let status: Value = Client::new(run_dir).map_err(BenchError::Output)?.get("/v1/status").map_err(Box::new)?;
        let counted = Self::read(&status);
        if counted.order.is_empty() { Err(BenchError::NoStages) } else { Ok(counted) }
    }

    fn read(status: &Value) -> Self {
        let mut counted = Self::default();
        for shard in status["shards"].as_array().into_iter().flatten() {
            counted.commands += shard["commands"].as_u64().unwrap_or(0);
            for stage in shard["stages"].as_array().into_iter().flatten() {
                let name = stage["stage"].as_str().unwrap_or("?").to_owned();
                if !counted.order.contains(&name) {
                    counted.order.push(name.clone());
                }
                let (ticks, entries) = counted.stages.entry(name).or_default();
                *ticks += stage["ticks"].as_u64().unwrap_or(0);
                *entries += stage["entries"].as_u64().unwrap_or(0);
            }
        }
        counted
    }

    /// What has been added since an earlier look.
    fn since(&self, earlier: &Self) -> Since {
        let commands = self.commands.saturating_sub(earlier.commands);
        let per_command = |count: u64| count as f64 / commands.max(1) as f64;
        let stage = |name: &String| {
            let (ticks, entries) = self.stages.get(name).copied().unwrap_or_default();
            let (ticks_before, entries_before) = earlier.stages.get(name).copied().unwrap_or_default();
            StageSince {
                stage: name.clone(),
                ticks_per_command: per_command(ticks.saturating_sub(ticks_before)),
                entries_per_command: per_command(entries.saturating_sub(entries_before)),
            }
        };
        let each: Vec<_> = self.order.iter().map(stage).collect();
        let ticks_per_command = each.iter().map(|stage| stage.ticks_per_command).sum();
        Since { commands, ticks_per_command, each }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stages_of_all_shards_are_counted_for_each_command() {
        let shard = |commands: u64, ticks: u64| {
            json!({ "commands": commands, "stages": [
                { "stage": "fetch", "ticks": ticks, "entries": commands },
                { "stage": "check", "ticks": 2 * ticks, "entries": 0 },
            ] })
        };
        let before = Counted::read(&json!({ "shards": [shard(10, 100)] }));
        let after = Counted::read(&json!({ "shards": [shard(110, 1100), shard(100, 1000)] }));
        let since = after.since(&before);
        let text = since.table();
        let lines: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, [vec!["fetch", "10.0", "1.000"], vec!["check", "20.0", "0.000"], vec!["all", "30.0"]]);
        assert_eq!(Counted::read(&json!({ "shards": [{ "commands": 1 }] })).order, Vec::<String>::new());
        let report = json!({ "rw": "randread" });
        let whole = serde_json::to_value(WithStages { report: &report, stages: Some(&since) }).unwrap();
        assert_eq!((&whole["rw"], &whole["stages"]["commands"]), (&json!("randread"), &json!(200)));
        assert_eq!(
            whole["stages"]["each"][1],
            json!({ "stage": "check", "ticks_per_command": 20.0, "entries_per_command": 0.0 })
        );
        let without = serde_json::to_value(WithStages { report: &report, stages: None }).unwrap();
        assert_eq!(without, report);
    }
}
