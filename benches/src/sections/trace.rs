//! What it costs to record every request.
//!
//! ```text
//!   client ── reads ──► null ── events ──► the daemon's rings ──► a file: while it is recorded; no event otherwise
//! ```

use std::{fs, process::Command};

use crate::{
    client::{Lean, Load},
    error::Failure,
    process::Daemon,
    record::Record,
    subject::Setup,
    suite::{Case, Suite},
};

/// A volume that does nothing, recorded and not, in turns.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let devices = ["null".to_owned()];
    let mut subjects = vec![suite.start_ours("spin", &Setup::default().disk("null", "null", "1G"))?];
    let mut cases = Vec::new();
    for depth in [1, 32] {
        let load = Load::randread(depth);
        let case = |name| suite.lean(0, name, "lean", Lean::default(), load.clone(), &devices);
        cases.extend([case("ours"), recorded(suite, case("recorded"))]);
    }
    suite.measure(record, &mut subjects, &cases)
}

/// The same while a recording is made, on the client's core: the target's own has only what the shard does for it.
fn recorded<'a>(suite: &'a Suite, case: Case<'a>) -> Case<'a> {
    let measure = case.run;
    let run = move |subjects: &mut _| {
        let (out, log) = (suite.folder("recorded.trace"), suite.folder("recorded.log"));
        let _ = fs::remove_file(&out);
        let mut command = Command::new(&suite.binary);
        command.args(["trace", "null", "--out"]).arg(&out).arg("--run-dir").arg(suite.folder("ours").join("run"));
        let recording = Daemon::start(&mut command, &log, || fs::metadata(&out).is_ok_and(|file| file.len() > 0))?;
        recording.bind(suite.client)?;
        let sample = measure(subjects);
        drop(recording);
        let _ = fs::remove_file(&out);
        sample
    };
    Case { run: Box::new(run), ..case }
}
