//! The suite itself, for a moment, against a real daemon.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// `MILLRACE_BIN`, or the binary that was built with this test.
fn millrace() -> PathBuf {
    if let Some(path) = std::env::var_os("MILLRACE_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("the test's own path");
    let path = test.parent().and_then(Path::parent).expect("tests are in PROFILE/deps").join("millrace");
    assert!(path.is_file(), "there is no {}: build it in this profile, or name it in MILLRACE_BIN", path.display());
    path
}

/// What the sections of recordings, promises and copies have measured.
fn recorded_and_not(records: &Path) {
    let text = std::fs::read(records.join("trace.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let rows = record["rows"].as_array().expect("rows");
    let mut subjects: Vec<_> = rows.iter().filter_map(|row| row["subject"].as_str()).collect();
    subjects.sort_unstable();
    assert_eq!(subjects, ["ours", "ours", "recorded", "recorded"], "{record}");

    let text = std::fs::read(records.join("qos.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let rows = record["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().filter(|row| row["samples"][0]["off"].is_number()).count(), 6, "{record}");
    assert_eq!(rows.iter().filter(|row| row["samples"][0]["above"].is_number()).count(), 3, "{record}");
    let guaranteed = |row: &&Value| row["test"].as_str().is_some_and(|test| test.starts_with("guarantee"));
    assert!(rows.iter().find(guaranteed).is_some_and(|row| row["samples"][0]["iops"].is_number()), "{record}");
    let mut prompt: Vec<_> =
        rows.iter().filter(|row| row["samples"][0]["p99"].is_number()).filter_map(|row| row["subject"].as_str()).collect();
    prompt.sort_unstable();
    assert_eq!(prompt, ["no target", "ours"], "{record}");

    let text = std::fs::read(records.join("copy.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let ours = record["rows"].as_array().expect("rows").iter().filter(|row| row["subject"] == "ours");
    assert_eq!(ours.filter(|row| row["samples"][0]["rate"].as_f64().is_some_and(|rate| rate > 0.0)).count(), 4, "{record}");
}

#[test]
fn a_section_leaves_a_record_of_what_every_sample_measured() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let records = dir.path().join("records");
    let last = std::thread::available_parallelism().map_or(0, |cores| cores.get() - 1).to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-benches"))
        .args([
            "--ours",
            "--quick",
            "--ungated",
            "--seconds",
            "0.02",
            "--budget",
            "1",
            "--only",
            "null,interrupts,virtio,spare,trace,qos,copy",
            "--target-core",
        ])
        .args([&last, "--client-core", "0", "--millrace"])
        .arg(millrace())
        .arg("--records")
        .arg(&records)
        .arg("--work")
        .arg(dir.path())
        .output()
        .expect("running the suite");
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.contains("what is to be reached"), "{said}");

    let text = std::fs::read(records.join("virtio.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let rows = record["rows"].as_array().into_iter().flatten().filter(|row| row["subject"] == "ours");
    let mut ours: Vec<_> = rows.filter_map(|row| Some((row["client"].as_str()?, row["depth"].as_u64()?))).collect();
    ours.sort_unstable();
    let measured: Vec<_> = ["lean", "packed", "still"].into_iter().flat_map(|of| [(of, 1), (of, 32)]).collect();
    assert_eq!(ours, measured, "{record}");

    let text = std::fs::read(records.join("spare.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let rows = record["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 12, "{record}");
    for row in rows {
        assert!(row["samples"][0]["p99"].as_f64().is_some_and(|p99| p99 > 0.0), "commands were completed: {row}");
        let harm = ["beside loops", "beside floods", "beside shrinking memory"]
            .contains(&row["subject"].as_str().unwrap_or_default());
        assert_eq!(harm, row["samples"][0]["rounds"].is_number(), "{row}");
    }

    recorded_and_not(&records);
    let text = std::fs::read(records.join("null.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(record["section"], "null");
    assert!(record["binaries"]["ours"].is_string() && record["machine"].is_string());
    let rows = record["rows"].as_array().expect("rows");
    let depths = |of: &str| -> Vec<u64> {
        let lean = rows.iter().filter(|row| row["client"] == "lean" && row["subject"] == of);
        lean.filter_map(|row| row["depth"].as_u64()).collect()
    };
    assert_eq!((depths("ours"), depths("least")), (vec![1, 32, 128], vec![1]));
    for row in rows {
        assert_eq!(row["state"], "any", "{row}");
        let summary = &row["summary"]["iops"];
        assert!(summary["median"].as_f64().is_some_and(|median| median > 0.0), "commands were completed: {row}");
        assert!(summary["min"].as_f64() <= summary["max"].as_f64(), "{row}");
        let told = row["samples"][0]["p99.9"].is_number() && row["samples"][0]["cycles"].is_number();
        assert_eq!(told, row["subject"] == "ours", "the least there is has no daemon: {row}");
    }
    let text = std::fs::read(records.join("interrupts.json")).expect("the record");
    let record: Value = serde_json::from_slice(&text).expect("JSON");
    let first = &record["rows"][0]["samples"][0];
    assert!(first["interrupts"].as_f64().is_some_and(|each| each > 0.0), "a client that sleeps was woken: {record}");
}

#[test]
fn a_section_that_is_not_there_is_an_error_that_names_those_that_are() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_millrace-benches")).args(["--only", "nul"]).output().expect("running the suite");
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && complained.contains("no section nul") && complained.contains("null, perf"),
        "{complained}"
    );
}
