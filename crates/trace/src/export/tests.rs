//! What other programs are given.

use std::collections::{BTreeMap, BTreeSet};

use millrace_block::trace::{Event, EventKind, EventOperation, Key};
use serde_json::Value;

use super::*;
use crate::{
    Report, Trace,
    format::{Begin, DeviceName, Names, NamespaceName, Writer},
    guest, plot,
    samples::{INTERRUPT, Job, QUEUE, WHOLE, names, trace},
};

fn jobs() -> Vec<Job> {
    let job = |operation, lba, at| Job { queue: 3, command: 9, operation, lba, count: 8, at };
    vec![
        job(EventOperation::READ, 800, 1_000_000),
        job(EventOperation::WRITE.with_fua(true), 16, 1_010_000),
        job(EventOperation::COPY, 0, 1_020_000),
    ]
}

/// A trace of these events.
fn traced(names: &Names, events: &[Event]) -> Trace {
    let mut writer = Writer::default();
    let begin = Begin { clock: 50, unix: 1_700_000_000_000_000_050, ..Begin::default() };
    let file = [writer.begin(&begin), writer.names(names), writer.events(0, 0, events.iter().map(Event::to_words))];
    Trace::read(&file.concat()[..]).expect("a trace")
}

fn owned((name, length): (&str, u64)) -> (String, u64) {
    (name.to_owned(), length)
}

/// The stretches of an export with their lengths in nanoseconds; and it keeps the Trace Event Format's rules: what an event of each phase
/// has to have, rows with names, and of each identifier times that do not go back and ends of what began last.
fn stretches(out: &[u8]) -> Vec<(String, u64)> {
    let json: Value = serde_json::from_slice(out).expect("JSON");
    let (mut rows, mut last, mut lengths) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
    let mut open = BTreeMap::<&str, Vec<(&str, f64)>>::new();
    for event in json["traceEvents"].as_array().expect("events") {
        let word = |field: &str| event[field].as_str().filter(|word| !word.is_empty()).unwrap_or_else(|| panic!("{event}"));
        let (phase, name, process, row) = (word("ph"), word("name"), event["pid"].as_u64(), event["tid"].as_u64());
        if phase == "M" {
            assert!(event["args"]["name"].is_string(), "{event}");
            assert_eq!(name, if row.is_some() { "thread_name" } else { "process_name" });
            assert!(rows.insert((process, row)), "{event}");
            continue;
        }
        assert!(rows.contains(&(process, None)) && row.is_some() && rows.contains(&(process, row)), "{event}");
        let (id, time) = (word("id"), event["ts"].as_f64().expect("a time"));
        assert_eq!(word("cat"), "request");
        // No two processes have one in common.
        let (before, owner) = last.insert(id, (time, process)).unwrap_or((0.0, process));
        assert!(before <= time && owner == process, "{event}");
        let nested = open.entry(id).or_default();
        match phase {
            "b" => nested.push((name, time)),
            "e" => {
                let (begun, from) = nested.pop().expect("it had begun");
                assert_eq!(begun, name, "{id}");
                lengths.push((name.to_owned(), ((time - from) * 1000.0).round() as u64));
            }
            _ => assert_eq!(phase, "n", "{event}"),
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
    lengths.sort_unstable();
    lengths
}

#[test]
fn perfetto_gets_stages_within_requests() {
    let mut out = Vec::new();
    perfetto::write(&trace(&jobs()), &mut out).expect("a vector");
    assert_eq!(stretches(&out).len(), 3 * 4);
    let json: Value = serde_json::from_slice(&out).expect("JSON");
    let events = json["traceEvents"].as_array().expect("events");
    let of = |id: &str, phase: &str| {
        let these = events.iter().filter(move |event| event["id"] == id && event["ph"] == phase);
        these
            .map(|event| {
                (event["name"].as_str().expect("a name"), (event["ts"].as_f64().expect("a time") * 1000.0).round() as u64)
            })
            .collect::<Vec<_>>()
    };
    let begins: Vec<_> = of("0x0", "b");
    assert_eq!(begins.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["read", "queue", "data/throttle", "data/memory"]);
    assert_eq!(
        of("0x0", "e").iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["queue", "data/memory", "data/throttle", "read"]
    );
    assert_eq!(begins[0].1, 0);
    assert_eq!(of("0x0", "e")[0], ("queue", QUEUE));
    assert_eq!(of("0x0", "e")[3], ("read", WHOLE));
    assert_eq!(of("0x0", "n"), [("interrupt", WHOLE + INTERRUPT)]);
    let write = events.iter().find(|event| event["name"] == "write").expect("the write");
    assert_eq!((&write["args"]["offset"], &write["args"]["fua"]), (&Value::from(8192), &Value::from(true)));
    assert!(events.iter().any(|event| event["ph"] == "M" && event["args"]["name"] == "vm1"));
}

/// Legs that overlap, the first one done first, one of a moment without length, and a request that was fetched when it was seen: of each row
/// what ends is what began last.
#[test]
fn perfetto_gets_no_end_of_another_stretch() {
    let key = Key { device: 1, queue: 1, command: 1 };
    let event =
        |time, kind, span, parent, place| Event { time, kind, span, parent, place, key, count: 8, ..Event::default() };
    let events = [
        Event { count: 1, ..event(100, EventKind::Seen, 0, 0, 0) },
        event(100, EventKind::Fetched, 0, 0, 1),
        event(110, EventKind::Entered, 1, 0, 1),
        event(120, EventKind::Entered, 2, 1, 2),
        event(130, EventKind::Entered, 3, 1, 2),
        event(140, EventKind::Entered, 4, 3, 1),
        event(140, EventKind::Left, 4, 3, 1),
        event(150, EventKind::Entered, 5, 3, 1),
        event(160, EventKind::Left, 2, 1, 2),
        event(170, EventKind::Left, 5, 3, 1),
        event(190, EventKind::Left, 3, 1, 2),
        event(200, EventKind::Left, 1, 0, 1),
        event(205, EventKind::Completed, 0, 0, u16::MAX),
    ];
    let mut out = Vec::new();
    perfetto::write(&traced(&names(), &events), &mut out).expect("a vector");
    let [outer, leg] = ["data/throttle", "data/memory"];
    assert_eq!(stretches(&out), [(leg, 40), (leg, 60), (outer, 20), (outer, 90), ("other", 105)].map(owned));
}

/// A leg that was given up, one that goes on after what it was for, what is below both, and a request of no length.
#[test]
fn perfetto_gets_an_end_of_every_stretch() {
    let key = Key { device: 1, queue: 1, command: 1 };
    let event = |time, kind, span, parent, place| Event { time, kind, span, parent, place, key, ..Event::default() };
    let events = [
        event(100, EventKind::Fetched, 0, 0, 1),
        event(110, EventKind::Entered, 1, 0, 1),
        event(120, EventKind::Entered, 2, 1, 2),
        event(130, EventKind::Entered, 3, 1, 2),
        event(140, EventKind::Entered, 4, 3, 1),
        event(150, EventKind::Left, 4, 3, 1),
        event(170, EventKind::Left, 1, 0, 1),
        event(190, EventKind::Left, 3, 1, 2),
        event(200, EventKind::Completed, 0, 0, u16::MAX),
        event(300, EventKind::Fetched, 0, 0, 1),
        event(300, EventKind::Entered, 5, 0, 1),
        event(300, EventKind::Left, 5, 0, 1),
        event(300, EventKind::Completed, 0, 0, u16::MAX),
    ];
    let mut out = Vec::new();
    perfetto::write(&traced(&names(), &events), &mut out).expect("a vector");
    let [outer, leg] = ["data/throttle", "data/memory"];
    let expected = [(leg, 50), (leg, 60), (outer, 10), (outer, 60), ("other", 0), ("other", 100)];
    assert_eq!(stretches(&out), expected.map(owned));
}

/// The kernel's `struct blk_io_trace`, field by field.
#[test]
fn blktrace_gets_the_kernels_records() {
    let mut out = Vec::new();
    assert_eq!(blktrace::write(&trace(&jobs()), &mut out).expect("a vector"), 2, "the kernel knows no copies");
    // The notes before them.
    let out = out.split_off(48 + 8 + 48 + 16);
    assert_eq!(out.len(), 6 * 48);
    let record = |at: usize| &out[at * 48..(at + 1) * 48];
    let word = |at: usize, from: usize| u32::from_le_bytes(*record(at)[from..].first_chunk().expect("a word"));
    let long = |at: usize, from: usize| u64::from_le_bytes(*record(at)[from..].first_chunk().expect("a long word"));
    for at in 0..6 {
        assert_eq!((word(at, 0), word(at, 4)), (0x6561_7407, at as u32 + 3));
        assert_eq!((word(at, 24), word(at, 36) >> 20, word(at, 36) & 0xf_ffff), (4096, 259, 1));
        assert_eq!((word(at, 32), word(at, 44)), (1, 0), "the device, and nothing after it");
    }
    // Queued, issued, completed; read and by a file system, then written and durable.
    assert_eq!([0, 1, 2].map(|at| word(at, 28)), [0x0111_0001, 0x0141_0007, 0x0181_0008]);
    assert_eq!([3, 4, 5].map(|at| word(at, 28)), [0x8112_0001, 0x8142_0007, 0x8182_0008]);
    assert_eq!([0, 1, 2].map(|at| long(at, 8)), [0, QUEUE, WHOLE]);
    assert_eq!([long(0, 16), long(3, 16)], [800, 16]);
}

/// A record, and what follows it.
type Record = (Vec<u8>, Vec<u8>);

/// How many requests were written, and the records.
fn records(trace: &Trace) -> (usize, Vec<Record>) {
    let mut out = Vec::new();
    let written = blktrace::write(trace, &mut out).expect("a vector");
    let (mut records, mut rest) = (Vec::new(), &out[..]);
    while let Some((record, after)) = rest.split_at_checked(48) {
        let (data, after) = after.split_at(usize::from(u16::from_le_bytes([record[46], record[47]])));
        records.push((record.to_vec(), data.to_vec()));
        rest = after;
    }
    assert!(rest.is_empty());
    (written, records)
}

/// Whose requests they are, and when it was: what blkparse prints of a process's name is a string that ends within its 16 bytes.
#[test]
fn blktrace_gets_the_time_of_day_and_names() {
    let mut names = names();
    names.devices[0].name = "äöüäöüäö".to_owned();
    let key = Key { device: 1, queue: 1, command: 1 };
    let event = |time, kind, place| Event {
        time,
        kind,
        key,
        place,
        operation: EventOperation::READ,
        lba: 8,
        count: 8,
        ..Event::default()
    };
    let (written, records) =
        records(&traced(&names, &[event(1050, EventKind::Fetched, 1), event(1060, EventKind::Completed, 0)]));
    let notes: Vec<_> = records[..2].iter().map(|(record, data)| (&record[28..36], &data[..])).collect();
    let time = [1_700_000_000_u32.to_le_bytes(), 1050_u32.to_le_bytes()].concat();
    assert_eq!(notes[0], (&[1, 0, 0, 4, 0, 0, 0, 0][..], &time[..]));
    assert_eq!(notes[1], (&[0, 0, 0, 4, 1, 0, 0, 0][..], "äöüäöüä\0\0".as_bytes()));
    assert_eq!((written, records.len()), (1, 5));
}

/// A deallocation has a record for each range that the volume was asked for; one that never came there has none, because fio gives up at
/// records without a length.
#[test]
fn blktrace_gets_the_ranges_of_a_deallocation() {
    let mut names = names();
    names.nodes[0].block = 4096;
    let event = |time, kind, command, (span, parent, place): (u32, u32, u16), lba, count| {
        let (key, operation) = (Key { device: 1, queue: 1, command }, EventOperation::DEALLOCATE);
        Event { time, kind, span, parent, place, key, operation, lba, count, ..Event::default() }
    };
    let events = [
        event(100, EventKind::Fetched, 1, (0, 0, 1), 0, 0),
        event(110, EventKind::Entered, 1, (1, 0, 1), 4, 2),
        event(120, EventKind::Entered, 1, (2, 1, 2), 32, 16),
        event(130, EventKind::Left, 1, (2, 1, 2), 32, 16),
        event(130, EventKind::Left, 1, (1, 0, 1), 4, 2),
        event(140, EventKind::Entered, 1, (3, 0, 1), 100, u32::MAX),
        event(150, EventKind::Left, 1, (3, 0, 1), 100, u32::MAX),
        event(160, EventKind::Completed, 1, (0, 0, u16::MAX), 0, 0),
        event(200, EventKind::Fetched, 2, (0, 0, 1), 0, 0),
        event(210, EventKind::Completed, 2, (0, 0, u16::MAX), 0, 0),
    ];
    let (written, records) = records(&traced(&names, &events));
    let range = |(record, _): &(Vec<u8>, Vec<u8>)| {
        let sector = u64::from_le_bytes(*record[16..].first_chunk().expect("a long word"));
        (sector, u32::from_le_bytes(*record[24..].first_chunk().expect("a word")))
    };
    let ranges: Vec<_> = records[2..].iter().map(range).collect();
    // Each queued, issued, completed; no record can tell of more.
    assert_eq!((written, ranges), (1, [[(32, 8192), (800, u32::MAX - 4095)]; 3].concat()));
}

/// What goes to the same sector of two namespaces, and of a namespace of another device, are requests of three disks.
#[test]
fn blktrace_gets_a_disk_for_each_namespace() {
    let mut names = names();
    let other = NamespaceName { nsid: 2, volume: "other".to_owned(), ..names.devices[0].namespaces[0].clone() };
    names.devices[0].namespaces.push(other);
    names.devices.push(DeviceName { id: 2, name: "vm2".to_owned(), ..names.devices[0].clone() });
    let event = |time, kind, device, place| {
        let key = Key { device, queue: 1, command: 1 };
        Event { time, kind, key, place, operation: EventOperation::READ, lba: 8, count: 8, ..Event::default() }
    };
    let events: Vec<_> = [(1, 2), (1, 1), (2, 1)]
        .into_iter()
        .zip([100, 200, 300])
        .flat_map(|((device, nsid), time)| {
            [event(time, EventKind::Fetched, device, nsid), event(time + 10, EventKind::Completed, device, 0)]
        })
        .collect();
    let (written, records) = records(&traced(&names, &events));
    let device = |(record, _): &(Vec<u8>, Vec<u8>)| u32::from_le_bytes(*record[36..].first_chunk().expect("a word"));
    let disks: Vec<_> = records[3..].iter().map(device).map(|device| (device >> 20, device & 0xf_ffff)).collect();
    // Queued, issued and completed.
    assert_eq!((written, disks), (3, [[(259, 2); 3], [(259, 1); 3], [(259, 3); 3]].concat()));
}

/// The titles of all panels, in their order.
const PANELS: [&str; 10] = [
    "where the time went: mean, and 99th percentile (mark)",
    "in the guest's view: mean, and 99th percentile (mark)",
    "requests over time",
    "latency: share of requests that took no longer",
    "where: offset of requests over time",
    "by size: median, and 99th percentile (mark)",
    "by requests in flight: median, and 99th percentile (mark)",
    "by offset: median, and 99th percentile (mark)",
    "in order: requests that begin where another ended, of all (mark)",
    "used most, in pieces of 64 KiB",
];

fn titles(svg: &str) -> Vec<&str> {
    let parts = svg.split(r#"class="title">"#).skip(1);
    parts.map(|part| part.split("</text>").next().unwrap_or_default()).collect()
}

#[test]
fn the_picture_is_whole_and_the_text_is_no_markup() {
    // The first read is gone on from.
    let next = Job { lba: 808, at: 1_030_000, ..jobs()[0] };
    let mut trace = trace(&[jobs(), vec![next]].concat());
    if let Some(begin) = &mut trace.begin {
        begin.target = "device <script>&\"".to_owned();
    }
    let mut report = Report::of(&trace, None);
    let page = plot::html(&trace, &report);
    assert!(!page.contains("<script") && page.contains("device &lt;script&gt;&amp;&quot;"));
    let svg = plot::svg(&trace, &report);
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    for words in ["data/memory", "vm1 data read", "50.0 %, 8 KiB runs"] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(!svg.contains("href"), "it loads nothing");
    assert_eq!(titles(&svg), [&PANELS[..1], &PANELS[2..]].concat(), "the guest was not asked");
    report.guest = Some(guest::Summary {
        device: "259,0".to_owned(),
        requests: 4,
        joined: 3,
        unmatched: 1,
        uncertainty: 500,
        misfit: 0,
        stages: report.stages.clone(),
    });
    assert_eq!(titles(&plot::svg(&trace, &report)), PANELS);
    // A trace in which nothing happened.
    let empty = Trace::default();
    assert!(!plot::svg(&empty, &Report::of(&empty, None)).contains("NaN"));
}

/// A trace may be anybody's: what a terminal would obey is none of its names.
#[test]
fn names_are_only_text() {
    let mut names = names();
    names.devices[0].name = "vm\u{1b}[2J".to_owned();
    names.nodes[1].name = "mem\nory".to_owned();
    let mut writer = Writer::default();
    let begin = Begin { target: "device \u{1b}]0;vm1\u{7}".to_owned(), ..Begin::default() };
    let events = crate::samples::events(&jobs());
    let file = [writer.begin(&begin), writer.names(&names), writer.events(0, 0, events.iter().map(Event::to_words))];
    let trace = Trace::read(&file.concat()[..]).expect("a trace");
    let report = Report::of(&trace, None);
    let text = report.text();
    assert!(text.contains("device \u{fffd}]0;vm1\u{fffd}") && text.contains("data/mem\u{fffd}ory"), "{text}");
    assert!(![text, plot::svg(&trace, &report)].concat().contains(|letter: char| letter.is_control() && letter != '\n'));
}
