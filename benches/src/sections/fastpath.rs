//! FastPath beside the kernel's path to the same storage: fio with our engine, and with its own io_uring, libaio and psync on the same file.

use std::path::{Path, PathBuf};

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

/// fio on the client's core in all cases; our daemon has the target's.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let engine = suite.binary.with_file_name(ENGINE);
    let (Some(fio), true) = (&suite.fio, engine.is_file()) else {
        record
            .note(format!("FastPath was not measured: it takes fio (scripts/guest-root) and {ENGINE} (scripts/fio-engine)"));
        return Ok(());
    };
    let shared = tempfile::tempdir_in("/dev/shm").ok();
    let file = shared.as_ref().map_or_else(|| suite.folder("fastpath.img"), |shared| shared.path().join("fastpath.img"));
    let place = if shared.is_some() { "on tmpfs" } else { "on disk" };
    let size: u64 = if suite.quick { 256 << 20 } else { 1 << 30 };
    fill(&file, size)?;
    let setup = Setup::default().volume("file", &format!("file:{}", file.display()), &size.to_string());
    let ours = suite.start_ours("spin", &setup.volume("memory", "memory", &size.to_string()))?;
    let run_dir = suite.folder("ours").join("run");
    let mut subjects = vec![ours];
    // Memory that was never written is made while it is, which takes longer than a write.
    let longer = Suite { seconds: 2.0, ..suite.clone() };
    let all = by_ours(&longer, fio, &engine, &run_dir, "memory", Load::new("write", "128k", 8));
    (all.run)(&mut subjects)?;
    let depths: &[u32] = if suite.quick { &[1, 32] } else { &[1, 4, 16, 32, 64, 128] };
    let mut cases = Vec::new();
    for rw in ["randread", "randwrite"] {
        for &depth in depths {
            let load = Load::new(rw, "4k", depth);
            cases.push(by_ours(suite, fio, &engine, &run_dir, "file", load.clone().on(place)));
            for kernel in ["io_uring", "libaio", "psync"] {
                // psync waits for each: it knows no depth.
                if kernel != "psync" || depth == 1 {
                    cases.push(by_kernel(suite, fio, kernel, &file, load.clone().on(place)));
                }
            }
            cases.push(by_ours(suite, fio, &engine, &run_dir, "memory", load.on("in memory")));
        }
    }
    record.note("fio on the client's core, --direct=1, defaults otherwise; ours: its engine, our daemon polling on the target's core, which is counted as spent whole".into());
    suite.measure(record, &mut subjects, &cases)
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
