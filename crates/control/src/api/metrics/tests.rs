//! What the text has, and the table of metrics in the documentation.

use std::{collections::BTreeMap, fs, path::Path};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::manager::tests::manager_in;

/// Of a metric, by the name that its samples have: its type, its labels, what it means.
type Table = BTreeMap<String, (String, Vec<String>, String)>;

/// What is given.
fn given(text: &str) -> Table {
    let (mut table, mut help, mut kind) = (Table::new(), "", "");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').unwrap().1.trim_end_matches('.');
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            kind = rest.split_once(' ').unwrap().1;
        } else if !line.starts_with('#') {
            let (sample, _) = line.rsplit_once(' ').unwrap();
            let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
            let labels = labels.split(',').filter_map(|label| Some(label.split_once('=')?.0.to_owned())).collect();
            table.insert(name.to_owned(), (kind.to_owned(), labels, help.to_owned()));
        }
    }
    table
}

/// What is documented.
fn documented(page: &str) -> Table {
    let code = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let mut table = Table::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, name, kind, labels, meaning, _] = cells[..] else { panic!("{line}") };
        table.insert(code(name).concat(), (kind.to_owned(), code(labels), meaning.to_owned()));
    }
    table
}

fn spec<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A shard that is held up for a moment: zeroes would be counters that begin anew, and an alarm when it answers again.
#[test]
fn a_device_that_does_not_answer_has_no_counts() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager_in(directory.path());
    manager.create_device(&spec(json!({ "name": "d", "nvme": {} }))).unwrap();
    let mut devices = manager.devices();
    let status = manager.status_with(&[], &devices);
    let text = |devices: &[DeviceView]| render(&status, devices, &[], &[], &[]);
    assert!(text(&devices).contains("millrace_device_media_errors_total{device=\"d\"} 0"));
    (devices[0].phase, devices[0].state) = (None, State::Failed);
    let told = text(&devices);
    manager.shutdown();
    let of_device: Vec<_> = told.lines().filter(|line| line.contains("device=\"d\"")).collect();
    assert_eq!(of_device, ["millrace_device_connected{device=\"d\"} 0", "millrace_device_up{device=\"d\"} 0"]);
}

/// A sum over workers becomes less when one ends, which no counter does.
#[test]
fn what_workers_hold_back_is_counted_apart() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager_in(directory.path());
    manager.create_group(&spec(json!({ "name": "g", "caps": { "iops": 1000 } }))).unwrap();
    let status = manager.status_with(&[], &[]);
    let held = |worker: &str, count| {
        let mut held = HeldBack { worker: worker.to_owned(), users: vec![(5, count)], ..HeldBack::here(&manager) };
        held.groups[0].held_back = count;
        held
    };
    let text = render(&status, &[], &[], &[], &[held(MAIN, 1), held("x", 2), held("y", 3)]);
    manager.shutdown();
    for (metric, label) in [("group", "group=\"g\""), ("app", "user=\"5\"")] {
        for (worker, count) in [("", 1), (",worker=\"x\"", 2), (",worker=\"y\"", 3)] {
            let sample = format!("millrace_{metric}_held_back_total{{{label}{worker}}} {count}");
            assert!(text.lines().any(|line| line == sample), "{sample}: {text}");
        }
    }
}

#[test]
fn every_metric_is_documented_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager_in(directory.path());
    manager.create_group(&spec(json!({ "name": "g", "caps": { "iops": 1000 } }))).unwrap();
    for (name, stack) in [("a", "throttle(group=g) | memory"), ("b", "memory")] {
        manager.create_volume(&spec(json!({ "name": name, "size": "1M", "stack": stack }))).unwrap();
    }
    manager.create_device(&spec(json!({ "name": "d", "nvme": {} }))).unwrap();
    manager.create_copy(&spec(json!({ "source": "a", "target": "b" }))).unwrap();
    let (volumes, devices) = (manager.volumes(), manager.devices());
    let mut status = manager.status_with(&volumes, &devices);
    // What only some builds have, and what only programs with caps bring.
    status.workers[0].shards[0].stages = spec(json!([{ "stage": "s", "ticks": 1, "entries": 1 }]));
    let held_back = HeldBack { users: vec![(5, 1)], ..HeldBack::here(&manager) };
    let given = given(&render(&status, &devices, &volumes, &manager.copies(), &[held_back]));
    manager.shutdown();

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let documented = documented(&fs::read_to_string(path).unwrap());
    let names = |table: &Table| table.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&documented), names(&given), "in docs/metrics.md, and given");
    for (name, (kind, labels, help)) in given {
        let (its_kind, its_labels, meaning) = &documented[&name];
        assert_eq!((its_kind, its_labels), (&kind, &labels), "{name}");
        assert!(meaning.starts_with(&help), "{name}: {meaning:?}, and it says of itself {help:?}");
    }
}
