//! Volumes that do nothing.

use crate::{
    client::{Lean, Load},
    error::Failure,
    least, machine,
    record::Record,
    subject::{Setup, Subject},
    suite::Suite,
};

fn subjects(suite: &Suite) -> Result<Vec<Box<dyn Subject>>, Failure> {
    let ours = suite.start_ours("spin", &Setup::default().disk("null", "null", "1G"))?;
    let spdk = suite.start_spdk(|spdk| {
        spdk.null("null", 1 << 30)?;
        spdk.device("null", "null")
    })?;
    Ok([Some(ours), spdk].into_iter().flatten().collect())
}

fn depths(suite: &Suite) -> &'static [u32] {
    if suite.quick { &[1, 32, 128] } else { &[1, 4, 32, 128] }
}

/// Our lean client at every depth: with a new address for every command, and with commands that stay as they are.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let mut subjects = subjects(suite)?;
    let devices = ["null".to_owned()];
    let mut cases = Vec::new();
    for &depth in depths(suite) {
        for (client, lean) in [("lean", Lean::default()), ("still", Lean::with("--still"))] {
            cases.extend(suite.on_each(&subjects, client, &lean, &Load::randread(depth), &devices));
        }
    }
    suite.measure(record, &mut subjects, &cases)?;
    subjects.clear();
    least::add(suite, record, least::Kind::Nvme);
    record.save(&machine::now())
}

/// SPDK's own client, unmodified.
pub(crate) fn perf(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let Some(tree) = &suite.spdk else { return Ok(()) };
    let mut subjects = subjects(suite)?;
    let mut cases = Vec::new();
    for &depth in depths(suite) {
        for (index, subject) in subjects.iter().enumerate() {
            cases.push(suite.perf(tree, index, subject.name(), Load::randread(depth), "null"));
        }
    }
    suite.measure(record, &mut subjects, &cases)
}
