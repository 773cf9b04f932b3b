//! Volumes that do nothing.

use crate::{
    client::{Lean, Load},
    error::Failure,
    record::Record,
    subject::{Ours, Setup, Spdk, Subject},
    suite::{Case, Suite},
};

/// Huge pages that SPDK's target gets, in MiB.
const SPDK_MEMORY: usize = 512;

fn subjects(suite: &Suite) -> Result<Vec<Box<dyn Subject>>, Failure> {
    let setup = Setup::default().disk("null", "null", "1G");
    let ours = Ours::start(&suite.binary, &suite.folder("ours"), suite.target, "spin", &setup)?;
    let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(ours)];
    if let Some(tree) = &suite.spdk {
        let spdk = Spdk::start(tree, &suite.folder("spdk"), suite.target, SPDK_MEMORY)?;
        spdk.null("null", 1 << 30)?;
        spdk.device("null", "null")?;
        subjects.push(Box::new(spdk));
    }
    Ok(subjects)
}

fn depths(suite: &Suite) -> &'static [u32] {
    if suite.quick { &[1, 32, 128] } else { &[1, 4, 32, 128] }
}

/// Our lean client at every depth: with a new address for every command, and with commands that stay as they are.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let mut subjects = subjects(suite)?;
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let devices = ["null".to_owned()];
    let mut cases: Vec<Case<'_>> = Vec::new();
    for &depth in depths(suite) {
        for (client, lean) in [("lean", Lean::default()), ("still", Lean::with("--still"))] {
            for (index, name) in names.iter().enumerate() {
                cases.push(suite.lean(index, name, client, lean.clone(), Load::randread(depth), &devices));
            }
        }
    }
    suite.measure(record, &mut subjects, &cases)
}

/// SPDK's own client, unmodified.
pub(crate) fn perf(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let Some(tree) = &suite.spdk else { return Ok(()) };
    let mut subjects = subjects(suite)?;
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let mut cases = Vec::new();
    for &depth in depths(suite) {
        for (index, name) in names.iter().enumerate() {
            cases.push(suite.perf(tree, index, name, Load::randread(depth), "null"));
        }
    }
    suite.measure(record, &mut subjects, &cases)
}
