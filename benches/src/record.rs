//! Samples on disk: one JSON file per section, to which later runs of the same binaries add.

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{error::Failure, gate::State, stats::Summary};

/// What one sample measured: a value for every metric. Rates are per second, times in nanoseconds.
pub(crate) type Sample = BTreeMap<String, f64>;

/// All samples of one subject doing one thing in one state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What was done, e.g. `randread 4k`.
    pub(crate) test: String,
    /// Commands in flight; 0 where that has no meaning.
    pub(crate) depth: u32,
    /// Who asked: `lean`, `still`, `perf`, `fio` …
    pub(crate) client: String,
    /// Who answered: `ours`, `spdk` …
    pub(crate) subject: String,
    /// Where the cores were.
    pub(crate) state: State,
    /// In the order in which they were taken.
    pub(crate) samples: Vec<Sample>,
    /// By metric; derived from the samples, for readers of the file.
    #[serde(default)]
    pub(crate) summary: BTreeMap<String, Summary>,
}

impl Row {
    /// What its samples say about a metric.
    pub(crate) fn summary(&self, metric: &str) -> Option<Summary> {
        let values: Vec<f64> = self.samples.iter().filter_map(|sample| sample.get(metric).copied()).collect();
        Summary::of(&values)
    }
}

/// What names a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// As in [`Row`].
    pub(crate) test: String,
    /// As in [`Row`].
    pub(crate) depth: u32,
    /// As in [`Row`].
    pub(crate) client: String,
    /// As in [`Row`].
    pub(crate) subject: String,
}

/// One section's results.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The section's name.
    pub(crate) section: String,
    /// When the newest sample was taken, in UTC.
    pub(crate) date: String,
    /// The machine, in words.
    pub(crate) machine: String,
    /// What was measured: name to version or fingerprint. Samples of other binaries are not mixed in.
    pub(crate) binaries: BTreeMap<String, String>,
    /// Samples that were dropped because the cores moved.
    pub(crate) dropped: u64,
    /// The results.
    pub(crate) rows: Vec<Row>,
    /// What is to be said about them.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    #[serde(skip)]
    path: PathBuf,
}

impl Record {
    /// The section's record in a folder: what is there, if it is of the same binaries and not to be forgotten.
    pub(crate) fn open(
        folder: &std::path::Path,
        section: &str,
        machine: &str,
        binaries: &BTreeMap<String, String>,
        forget: bool,
    ) -> Self {
        let path = folder.join(format!("{section}.json"));
        let kept = (!forget).then(|| fs::read(&path).ok()).flatten();
        let kept: Option<Self> = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match kept {
            Some(kept) if kept.binaries == *binaries => Self { path, ..kept },
            _ => Self {
                section: section.to_owned(),
                date: String::new(),
                machine: machine.to_owned(),
                binaries: binaries.clone(),
                dropped: 0,
                rows: Vec::new(),
                notes: Vec::new(),
                path,
            },
        }
    }

    /// Adds a sample.
    pub(crate) fn add(&mut self, key: &Key, state: State, sample: Sample) {
        if state == State::Mixed {
            self.dropped += 1;
            return;
        }
        if let Some(row) = self.rows.iter_mut().find(|row| row.is(key, state)) {
            row.samples.push(sample);
            return;
        }
        self.rows.push(Row {
            test: key.test.clone(),
            depth: key.depth,
            client: key.client.clone(),
            subject: key.subject.clone(),
            state,
            samples: vec![sample],
            summary: BTreeMap::new(),
        });
    }

    /// Samples there are of this in a state.
    pub(crate) fn count(&self, key: &Key, state: State) -> usize {
        self.rows.iter().find(|row| row.is(key, state)).map_or(0, |row| row.samples.len())
    }

    /// Whether it has samples of a test of exactly this name.
    pub(crate) fn has(&self, test: &str) -> bool {
        self.rows.iter().any(|row| row.test == test)
    }

    /// Says something once.
    pub(crate) fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Writes the file.
    pub(crate) fn save(&mut self, date: &str) -> Result<(), Failure> {
        date.clone_into(&mut self.date);
        for row in &mut self.rows {
            let metrics: Vec<String> = row.samples.iter().flat_map(|sample| sample.keys().cloned()).collect();
            row.summary = metrics.into_iter().filter_map(|metric| Some((metric.clone(), row.summary(&metric)?))).collect();
        }
        let failed = |source: io::Error| Failure::Write { path: self.path.clone(), source };
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        fs::write(&self.path, text).map_err(failed)
    }
}

impl Row {
    fn is(&self, key: &Key, state: State) -> bool {
        self.state == state
            && self.test == key.test
            && self.depth == key.depth
            && self.client == key.client
            && self.subject == key.subject
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key { test: "randread 4k".into(), depth: 32, client: "lean".into(), subject: "ours".into() }
    }

    #[test]
    fn samples_add_up_over_runs_of_one_binary_and_states_stay_apart() {
        let dir = tempfile::tempdir().unwrap();
        let binaries = BTreeMap::from([("ours".to_owned(), "1".to_owned())]);
        let sample = |value| Sample::from([("iops".to_owned(), value)]);
        for run in 0..2 {
            let mut record = Record::open(dir.path(), "null", "m", &binaries, false);
            record.add(&key(), State::Near, sample(f64::from(run)));
            record.add(&key(), State::Far, sample(9.0));
            record.add(&key(), State::Mixed, sample(100.0));
            record.save("today").unwrap();
        }
        let record = Record::open(dir.path(), "null", "m", &binaries, false);
        assert_eq!((record.count(&key(), State::Near), record.dropped), (2, 2));
        assert_eq!(record.rows[0].summary["iops"].median.to_bits(), 0.5f64.to_bits());
        let other = BTreeMap::from([("ours".to_owned(), "2".to_owned())]);
        assert!(Record::open(dir.path(), "null", "m", &other, false).rows.is_empty(), "another binary");
        assert!(Record::open(dir.path(), "null", "m", &binaries, true).rows.is_empty(), "forgotten");
    }
}
