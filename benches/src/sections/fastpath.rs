//! FastPath beside the kernel's path to the same storage: fio with our engine, and with its own io_uring, libaio and psync on the same file,
//! where what is stored takes no time and where it does; and beside what fio itself takes.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::file::fill;
use crate::{
    client::{Fio, Load},
    error::Failure,
    record::{Key, Record, Sample},
    subject::{Setup, Subject},
    suite::{Case, Suite},
};

/// The engine, beside our binary: scripts/fio-engine puts it there.
const ENGINE: &str = "libmillrace-fio.so";
/// Commands in flight, and those that say enough of what others are compared with.
const ALL: &[u32] = &[1, 4, 16, 32, 64, 128];
const FEW: &[u32] = &[1, 32, 128];

/// Where a file lies.
struct Place {
    /// What the table says.
    name: &'static str,
    volume: &'static str,
    file: PathBuf,
    depths: &'static [u32],
    /// The kernel's ways to it.
    kernels: &'static [&'static str],
}

/// fio on the client's core in all cases; our daemon has the target's.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let engine = suite.binary.with_file_name(ENGINE);
    let (Some(fio), true) = (&suite.fio, engine.is_file()) else {
        record
            .note(format!("FastPath was not measured: it takes fio (scripts/guest-root) and {ENGINE} (scripts/fio-engine)"));
        return Ok(());
    };
    let shared = tempfile::tempdir_in("/dev/shm").ok();
    let places = places(suite.folder("fastpath.img"), shared.as_ref().map(TempDir::path));
    let size: u64 = if suite.quick { 256 << 20 } else { 1 << 30 };
    let mut setup = Setup::default().volume("memory", "memory", &size.to_string());
    for place in &places {
        fill(&place.file, size)?;
        setup = setup.volume(place.volume, &format!("file:{}", place.file.display()), &size.to_string());
    }
    let ours = suite.start_ours("spin", &setup)?;
    let run_dir = suite.folder("ours").join("run");
    let mut subjects = vec![ours];
    // Memory that was never written is made while it is, which takes longer than a write.
    let longer = Suite { seconds: 2.0, ..suite.clone() };
    let all = by_ours(&longer, fio, &engine, &run_dir, "memory", Load::new("write", "128k", 8));
    (all.run)(&mut subjects)?;
    let depths = if suite.quick { &FEW[..2] } else { ALL };
    let mut cases = Vec::new();
    for rw in ["randread", "randwrite"] {
        for &depth in depths {
            let load = Load::new(rw, "4k", depth);
            for place in places.iter().filter(|place| place.depths.contains(&depth)) {
                cases.push(by_ours(suite, fio, &engine, &run_dir, place.volume, load.clone().on(place.name)));
                for kernel in place.kernels {
                    // psync waits for each: it knows no depth.
                    if *kernel != "psync" || depth == 1 {
                        cases.push(by_kernel(suite, fio, kernel, &place.file, load.clone().on(place.name)));
                    }
                }
            }
            if rw == "randread" && FEW.contains(&depth) {
                cases.push(by_nobody(suite, fio, load.clone()));
            }
            cases.push(by_ours(suite, fio, &engine, &run_dir, "memory", load.on("in memory")));
        }
    }
    record.note("fio on the client's core, --direct=1, defaults otherwise; ours: its engine, our daemon polling on the target's core, which is counted as spent whole; fio null: its engine that does nothing, the most that fio can do".into());
    suite.measure(record, &mut subjects, &cases)
}

/// A folder in memory if there is one, and the disk: there its latency is the limit of all of them.
fn places(file: PathBuf, shared: Option<&Path>) -> Vec<Place> {
    const KERNELS: &[&str] = &["io_uring", "libaio", "psync"];
    let Some(shared) = shared else {
        return vec![Place { name: "on disk", volume: "disk", file, depths: ALL, kernels: KERNELS }];
    };
    let memory = shared.join("fastpath.img");
    vec![
        Place { name: "on tmpfs", volume: "file", file: memory, depths: ALL, kernels: KERNELS },
        Place { name: "on disk", volume: "disk", file, depths: FEW, kernels: &KERNELS[..1] },
    ]
}

fn by_ours<'a>(suite: &'a Suite, fio: &'a Fio, engine: &Path, run_dir: &Path, volume: &str, load: Load) -> Case<'a> {
    let options = vec![format!("--ioengine=external:{}", engine.display()), format!("--filename={volume}")];
    let key = Key { test: load.name(), depth: load.depth, client: String::new(), subject: "ours".into() };
    let run_dir: PathBuf = run_dir.to_owned();
    let run = move |_: &mut [Box<dyn Subject>]| {
        fio.run_beside(Some(&run_dir), &options, &load, suite.client, suite.seconds).map(|sample| spent(sample, 1.0))
    };
    Case { key, subject: Some(0), run: Box::new(run) }
}

/// Adds what each request takes of processors, in nanoseconds: of fio's, and of so many cores beside it.
fn spent(mut sample: Sample, beside: f64) -> Sample {
    if let (Some(client), Some(rate)) = (sample.get("client_core"), sample.get("iops").filter(|rate| **rate > 0.0)) {
        sample.insert("spent".into(), (client + beside) / rate * 1e9);
    }
    sample
}

fn by_kernel<'a>(suite: &'a Suite, fio: &'a Fio, engine: &str, file: &Path, load: Load) -> Case<'a> {
    let options = vec![format!("--ioengine={engine}"), format!("--filename={}", file.display())];
    let key = Key { test: load.name(), depth: load.depth, client: String::new(), subject: format!("fio {engine}") };
    let run = move |_: &mut [Box<dyn Subject>]| {
        fio.run(&options, &load, suite.client, suite.seconds).map(|sample| spent(sample, 0.0))
    };
    Case { key, subject: None, run: Box::new(run) }
}

/// fio's own work, with an engine that does nothing.
fn by_nobody<'a>(suite: &'a Suite, fio: &'a Fio, load: Load) -> Case<'a> {
    let options = vec!["--ioengine=null".to_owned(), "--size=1g".to_owned()];
    let load = load.on("nowhere");
    let key = Key { test: load.name(), depth: load.depth, client: String::new(), subject: "fio null".into() };
    let run = move |_: &mut [Box<dyn Subject>]| {
        fio.run(&options, &load, suite.client, suite.seconds).map(|sample| spent(sample, 0.0))
    };
    Case { key, subject: None, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_on_disk_is_measured_beside_one_in_memory() {
        let of = |shared: Option<&str>| {
            let places = places("/disk/file".into(), shared.map(Path::new));
            places.into_iter().map(|place| (place.name, place.depths)).collect::<Vec<_>>()
        };
        assert_eq!(of(Some("/memory")), [("on tmpfs", ALL), ("on disk", FEW)]);
        assert_eq!(of(None), [("on disk", ALL)]);
    }
}
