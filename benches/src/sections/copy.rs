//! Copies of whole volumes, beside what copies files: QEMU's `qemu-img convert`, and `cp`.
//!
//! ```text
//!   file ──► millrace copy ──► file      the same through services, and in memory
//!   file ──► qemu-img, cp ───► file      all of them until it is durable
//! ```

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::file::fill;
use crate::{
    error::Failure,
    gate::State,
    process,
    record::{Key, Record, Sample},
    subject::{Ours, Setup},
    suite::Suite,
};

/// How often is looked whether a copy of ours is done.
const LOOK: Duration = Duration::from_millis(1);

/// What is copied, and the bytes of it that are no hole.
struct Case {
    name: &'static str,
    held: u64,
    /// Of ours, whose target has `-to` behind it.
    volume: &'static str,
    /// What others copy, and to where.
    files: Option<(PathBuf, PathBuf)>,
}

/// Full files, files that are mostly holes, and volumes that only we have. Copies are made over those before.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let bytes: u64 = if suite.quick { 64 << 20 } else { 1 << 30 };
    let (full, holes) = (suite.folder("full.img"), suite.folder("holes.img"));
    fill(&full, bytes)?;
    fill(&holes, bytes / 8)?;
    lengthen(&holes, bytes)?;
    let ours = start(suite, bytes, &full, &holes)?;
    // These two hold nothing yet.
    for volume in ["memory", "sealed"] {
        copy(&ours, "full", volume)?;
    }
    let files = |path: &Path| Some((path.to_owned(), suite.folder("other.img")));
    let case = |name, held, volume, files| Case { name, held, volume, files };
    let cases = [
        case("file to file", bytes, "full", files(&full)),
        case("file to file, 7/8 holes", bytes / 8, "holes", files(&holes)),
        case("enciphered to enciphered", bytes, "sealed", None),
        case("memory to memory", bytes, "memory", None),
    ];
    record.note("bytes that are no holes, until they are durable on the target, which has an earlier copy; qemu-img convert -n -W -t none -T none; cp --sparse=always and sync".into());
    let began = Instant::now();
    for _ in 0..2 * suite.wanted() {
        for case in &cases {
            let taken = copy(&ours, case.volume, &format!("{}-to", case.volume))?;
            add(record, case, "ours", taken);
            if let Some((from, to)) = &case.files {
                if let Some(in_root) = &suite.in_root {
                    add(record, case, "qemu-img", convert(in_root, from, to, bytes)?);
                }
                add(record, case, "cp", cp(from, to)?);
            }
        }
        if began.elapsed() >= suite.budget {
            break;
        }
    }
    Ok(())
}

fn start(suite: &Suite, bytes: u64, full: &Path, holes: &Path) -> Result<Ours, Failure> {
    let size = bytes.to_string();
    let file = |name: &str| format!("file:{}", suite.folder(name).display());
    let key = suite.key()?;
    let sealed = |name: &str| format!("crypt(key=file:{}, {})", key.display(), file(name));
    let setup = Setup::default()
        .volume("full", &format!("file:{}", full.display()), &size)
        .volume("holes", &format!("file:{}", holes.display()), &size)
        .volume("full-to", &file("full-to.img"), &size)
        .volume("holes-to", &file("holes-to.img"), &size)
        .volume("sealed", &sealed("sealed.img"), &size)
        .volume("sealed-to", &sealed("sealed-to.img"), &size)
        .volume("memory", "memory", &size)
        .volume("memory-to", "memory", &size);
    Ours::start(&suite.binary, &suite.folder("ours"), suite.target, "adaptive", &setup)
}

fn add(record: &mut Record, case: &Case, subject: &str, taken: Duration) {
    let key = Key { test: case.name.into(), depth: 0, client: String::new(), subject: subject.into() };
    record.add(&key, State::Any, Sample::from([("rate".into(), case.held as f64 / taken.as_secs_f64())]));
}

/// How long a copy of ours takes.
fn copy(ours: &Ours, from: &str, to: &str) -> Result<Duration, Failure> {
    let start = Instant::now();
    ours.json(&["copy", from, to, "--name", "bench"])?;
    let end = loop {
        let view = ours.json(&["copy", "show", "bench"])?;
        match view["state"].as_str() {
            Some("done") => break start.elapsed(),
            Some("running") => thread::sleep(LOOK),
            _ => return Err(Failure::Output { program: "millrace copy".into(), said: view.to_string() }),
        }
    };
    ours.json(&["copy", "cancel", "bench"])?;
    Ok(end)
}

fn convert(in_root: &Path, from: &Path, to: &Path, bytes: u64) -> Result<Duration, Failure> {
    lengthen(to, bytes)?;
    let start = Instant::now();
    let mut command = Command::new(in_root);
    command.args("qemu-img convert -n -W -t none -T none -f raw -O raw".split(' ')).args([from, to]);
    process::output(&mut command)?;
    Ok(start.elapsed())
}

fn cp(from: &Path, to: &Path) -> Result<Duration, Failure> {
    let start = Instant::now();
    process::output(Command::new("cp").arg("--sparse=always").args([from, to]))?;
    process::output(Command::new("sync").arg(to))?;
    Ok(start.elapsed())
}

/// Makes a file that long, where it is not there one of holes.
fn lengthen(path: &Path, bytes: u64) -> Result<(), Failure> {
    let opened = File::options().write(true).create(true).truncate(false).open(path);
    opened.and_then(|file| file.set_len(bytes)).map_err(|source| Failure::Write { path: path.to_owned(), source })
}
