//! `--stages`: where our own daemon's shards spent their time while a run went on.

#![expect(clippy::cast_precision_loss, reason = "three digits are shown")]

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use super::BenchError;
use crate::client::Client;

/// What all shards of a daemon have counted.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Counted {
    commands: u64,
    /// Ticks of the time stamp counter and entries, by stage.
    stages: BTreeMap<String, (u64, u64)>,
    /// The stages in the daemon's order.
    order: Vec<String>,
}

impl Counted {
    /// Asks the daemon in this run directory.
    pub(super) fn ask(run_dir: &Path) -> Result<Self, BenchError> {
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

    /// A table of what has been added since an earlier look: ticks and entries for each command.
    pub(super) fn since(&self, earlier: &Self) -> String {
        let commands = self.commands.saturating_sub(earlier.commands).max(1) as f64;
        let mut out = format!("{:<12} {:>14} {:>18}\n", "stage", "ticks per I/O", "entries per I/O");
        let mut total = 0.0;
        for name in &self.order {
            let (ticks, entries) = self.stages.get(name).copied().unwrap_or_default();
            let (ticks_before, entries_before) = earlier.stages.get(name).copied().unwrap_or_default();
            let ticks = ticks.saturating_sub(ticks_before) as f64 / commands;
            let entries = entries.saturating_sub(entries_before) as f64 / commands;
            total += ticks;
            out += &[format!("{name:<12} {ticks:>14.1} {entries:>18.3}"), "\n".to_owned()].concat();
        }
        out + &format!("{:<12} {total:>14.1}\n", "all")
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
        let text = after.since(&before);
        let lines: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, [vec!["fetch", "10.0", "1.000"], vec!["check", "20.0", "0.000"], vec!["all", "30.0"]]);
        assert_eq!(Counted::read(&json!({ "shards": [{ "commands": 1 }] })).order, Vec::<String>::new());
    }
}
