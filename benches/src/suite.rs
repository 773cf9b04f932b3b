//! Taking samples: in turns, gated, until there are enough.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use crate::{
    client::{self, Fio, Lean, Load},
    error::Failure,
    gate::{self, State},
    machine,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Spdk, Subject, Tree},
};

/// Samples that a median needs.
pub(crate) const ENOUGH: usize = 5;

/// Huge pages that SPDK's target gets, in MiB: as many as its volumes in memory and 64 controllers need.
const SPDK_MEMORY: usize = 1024;

/// What every section has at hand.
#[derive(Clone, Debug)]
pub(crate) struct Suite {
    /// Our binary.
    pub(crate) binary: PathBuf,
    /// SPDK, where there is one.
    pub(crate) spdk: Option<Tree>,
    /// fio, where there is one.
    pub(crate) fio: Option<Fio>,
    /// The repository's `scripts/in-root`, which runs QEMU's programs; where the private root is there.
    pub(crate) in_root: Option<PathBuf>,
    /// For daemons' folders and files on disk.
    pub(crate) work: PathBuf,
    /// The core of the target, and that of the client.
    pub(crate) target: usize,
    /// See `target`.
    pub(crate) client: usize,
    /// Seconds of a sample.
    pub(crate) seconds: f64,
    /// How long a section may take.
    pub(crate) budget: Duration,
    /// Few samples, small sizes.
    pub(crate) quick: bool,
    /// Where records are.
    pub(crate) records: PathBuf,
    /// Start records anew.
    pub(crate) fresh: bool,
    /// Whether the cores' distance can be told: it takes two.
    pub(crate) gated: bool,
}

/// One thing to measure again and again.
pub(crate) struct Case<'a> {
    /// Its name.
    pub(crate) key: Key,
    /// Who answers, by its place among the subjects; `None` for a client that needs nobody.
    pub(crate) subject: Option<usize>,
    /// Takes one sample.
    #[expect(clippy::type_complexity, reason = "written once")]
    pub(crate) run: Box<dyn Fn(&mut [Box<dyn Subject>]) -> Result<Sample, Failure> + 'a>,
}

impl Suite {
    /// A record of a section.
    pub(crate) fn record(&self, section: &str) -> Record {
        let mut binaries = BTreeMap::from([("ours".to_owned(), machine::fingerprint(&self.binary))]);
        if let Some(spdk) = &self.spdk {
            binaries.insert("spdk".into(), spdk.version());
        }
        Record::open(&self.records, section, &machine::describe(), &binaries, self.fresh)
    }

    /// Samples that each case should have in a state.
    pub(crate) fn wanted(&self) -> usize {
        if self.quick { 1 } else { ENOUGH }
    }

    /// Whether every case has enough samples: in each state, or, when quick, in one of them.
    fn done(&self, record: &Record, cases: &[Case<'_>]) -> bool {
        let enough = |state: &State| cases.iter().all(|case| record.count(&case.key, *state) >= self.wanted());
        if self.quick || !self.gated {
            [State::Near, State::Far, State::Any].iter().any(enough)
        } else {
            [State::Near, State::Far].iter().all(enough)
        }
    }

    /// Takes samples of all cases in turn, so that what changes on the machine changes for all of them, until every case has
    /// enough or the time is over. Subjects stand still but for their own samples.
    pub(crate) fn measure(
        &self,
        record: &mut Record,
        subjects: &mut [Box<dyn Subject>],
        cases: &[Case<'_>],
    ) -> Result<(), Failure> {
        for subject in subjects.iter_mut() {
            subject.daemon().pause();
        }
        let start = Instant::now();
        loop {
            for case in cases {
                let first = self.ping_pong();
                let before = self.state(first);
                if before == State::Mixed || record.count(&case.key, before) >= 2 * self.wanted() {
                    // The cores are on their way, or will have to move before this one's other samples can be taken.
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                let mut sample = sample(subjects, case)?;
                let second = self.ping_pong();
                let state = before.between(self.state(second));
                // No number where the distance is not measured, and none that could be read back.
                if let (1, true, Some(rate)) = (case.key.depth, self.gated, sample.get("iops").copied()) {
                    sample.insert("pings".into(), 1e9 / rate / f64::midpoint(first, second));
                }
                if let Some(rate) = sample.get("iops") {
                    eprintln!(
                        "  {:>7.1} s  {state:<6} {:<18} depth {:<4} {:<8} {:<5} {:>12.0}/s",
                        start.elapsed().as_secs_f64(),
                        case.key.test,
                        case.key.depth,
                        case.key.client,
                        case.key.subject,
                        rate
                    );
                }
                record.add(&case.key, state, sample);
            }
            if self.done(record, cases) || start.elapsed() >= self.budget {
                break;
            }
        }
        for subject in subjects.iter_mut() {
            subject.daemon().resume();
        }
        record.save(&machine::now())
    }

    pub(crate) fn ping_pong(&self) -> f64 {
        if self.gated { gate::ping_pong(self.client, self.target) } else { f64::NAN }
    }

    /// Where the cores are. Where there is only one, all samples are of one kind.
    pub(crate) fn state(&self, round_trip: f64) -> State {
        if self.gated { State::of(round_trip) } else { State::Any }
    }

    /// A case of our lean client on devices of a subject.
    pub(crate) fn lean<'a>(
        &'a self,
        index: usize,
        name: &str,
        client: &str,
        lean: Lean,
        load: Load,
        devices: &'a [String],
    ) -> Case<'a> {
        let key = Key { test: load.name(), depth: load.depth, client: client.into(), subject: name.into() };
        let run = move |subjects: &mut [Box<dyn Subject>]| {
            let sockets: Vec<PathBuf> = devices.iter().map(|device| subjects[index].folder(device)).collect();
            lean.run(&self.binary, &sockets, &load, self.client, self.seconds)
        };
        Case { key, subject: Some(index), run: Box::new(run) }
    }

    /// A case of SPDK's own client.
    pub(crate) fn perf<'a>(&'a self, tree: &'a Tree, index: usize, name: &str, load: Load, device: &'a str) -> Case<'a> {
        let key = Key { test: load.name(), depth: load.depth, client: "perf".into(), subject: name.into() };
        let run = move |subjects: &mut [Box<dyn Subject>]| {
            client::perf(tree, &subjects[index].folder(device), &load, self.client, self.seconds)
        };
        Case { key, subject: Some(index), run: Box::new(run) }
    }

    /// A folder for one daemon of a section.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// A file with a key-encryption key.
    pub(crate) fn key(&self) -> Result<PathBuf, Failure> {
        let path = self.work.join("bench.key");
        let failed = |source| Failure::Write { path: path.clone(), source };
        fs::create_dir_all(&self.work).map_err(failed)?;
        fs::write(&path, "5a".repeat(32)).map_err(failed)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(path)
    }

    /// Our daemon for a section.
    pub(crate) fn start_ours(&self, polling: &str, setup: &Setup) -> Result<Box<dyn Subject>, Failure> {
        Ok(Box::new(Ours::start(&self.binary, &self.folder("ours"), self.target, polling, setup)?))
    }

    /// SPDK's target for a section, if there is one, with what `prepare` makes.
    pub(crate) fn start_spdk(
        &self,
        prepare: impl FnOnce(&Spdk) -> Result<(), Failure>,
    ) -> Result<Option<Box<dyn Subject>>, Failure> {
        let Some(tree) = &self.spdk else { return Ok(None) };
        let spdk = Spdk::start(tree, &self.folder("spdk"), self.target, SPDK_MEMORY)?;
        prepare(&spdk)?;
        Ok(Some(Box::new(spdk)))
    }

    /// Writes all of a device of every subject once: memory that was never written may be zeroes that all lie in one place.
    pub(crate) fn write_once(&self, subjects: &mut [Box<dyn Subject>], devices: &[String]) -> Result<(), Failure> {
        for subject in subjects.iter_mut() {
            subject.daemon().pause();
        }
        for subject in subjects {
            subject.daemon().resume();
            for device in devices {
                self.write_all(&**subject, device)?;
            }
            subject.daemon().pause();
        }
        Ok(())
    }

    /// Writes all of a device of one subject, which is not standing still.
    pub(crate) fn write_all(&self, subject: &dyn Subject, device: &str) -> Result<(), Failure> {
        let sockets = [subject.folder(device)];
        Lean::default().run(&self.binary, &sockets, &Load::new("write", "128k", 8), self.client, 0.3).map(drop)
    }

    /// The same load on the same device of every subject.
    pub(crate) fn on_each<'a>(
        &'a self,
        subjects: &[Box<dyn Subject>],
        client: &str,
        lean: &Lean,
        load: &Load,
        devices: &'a [String],
    ) -> Vec<Case<'a>> {
        let cases = subjects.iter().enumerate();
        cases.map(|(index, subject)| self.lean(index, subject.name(), client, lean.clone(), load.clone(), devices)).collect()
    }
}

/// One sample, with what the subject spent on it.
fn sample(subjects: &mut [Box<dyn Subject>], case: &Case<'_>) -> Result<Sample, Failure> {
    let Some(index) = case.subject else { return (case.run)(subjects) };
    subjects[index].daemon().resume();
    let before = subjects[index].work()?;
    let (cpu, start) = (subjects[index].daemon().cpu()?, Instant::now());
    let sample = (case.run)(subjects);
    let (used, elapsed) = (subjects[index].daemon().cpu()?.saturating_sub(cpu), start.elapsed());
    let after = subjects[index].work()?;
    subjects[index].daemon().pause();
    let mut sample = sample?;
    sample.insert("core".into(), used.as_secs_f64() / elapsed.as_secs_f64());
    if let Some(cycles) = after.cycles_since(before) {
        sample.insert("cycles".into(), cycles);
    }
    Ok(sample)
}
