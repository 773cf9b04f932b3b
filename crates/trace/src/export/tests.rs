//! What other programs are given.

use std::collections::BTreeMap;

use millrace_block::trace::{Event, EventKind, EventOperation, Key};
use serde_json::Value;

use super::*;
use crate::{
    Report, Trace,
    format::{Begin, DeviceName, NamespaceName, Writer},
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

#[test]
fn perfetto_gets_stages_within_requests() {
    let mut out = Vec::new();
    perfetto::write(&trace(&jobs()), &mut out).expect("a vector");
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
    let mut writer = Writer::default();
    let file =
        [writer.begin(&Begin::default()), writer.names(&names()), writer.events(0, 0, events.iter().map(Event::to_words))];
    let mut out = Vec::new();
    perfetto::write(&Trace::read(&file.concat()[..]).expect("a trace"), &mut out).expect("a vector");
    let json: Value = serde_json::from_slice(&out).expect("JSON");
    let (mut open, mut lengths) = (BTreeMap::<&str, Vec<(&str, f64)>>::new(), Vec::new());
    for event in json["traceEvents"].as_array().expect("events") {
        let (Some(id), Some(name), Some(time)) = (event["id"].as_str(), event["name"].as_str(), event["ts"].as_f64()) else {
            continue;
        };
        match event["ph"].as_str() {
            Some("b") => open.entry(id).or_default().push((name, time)),
            Some("e") => {
                let (begun, from) = open.get_mut(id).and_then(Vec::pop).expect("it had begun");
                assert_eq!(begun, name, "{id}");
                lengths.push((name, ((time - from) * 1000.0).round() as u64));
            }
            _ => {}
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
    lengths.sort_unstable();
    let [outer, leg] = ["data/throttle", "data/memory"];
    assert_eq!(lengths, [(leg, 40), (leg, 60), (outer, 20), (outer, 90), ("other", 105)]);
}

/// The kernel's `struct blk_io_trace`, field by field.
#[test]
fn blktrace_gets_the_kernels_records() {
    let mut out = Vec::new();
    assert_eq!(blktrace::write(&trace(&jobs()), &mut out).expect("a vector"), 2, "the kernel knows no copies");
    assert_eq!(out.len(), 6 * 48);
    let record = |at: usize| &out[at * 48..(at + 1) * 48];
    let word = |at: usize, from: usize| u32::from_le_bytes(*record(at)[from..].first_chunk().expect("a word"));
    let long = |at: usize, from: usize| u64::from_le_bytes(*record(at)[from..].first_chunk().expect("a long word"));
    for at in 0..6 {
        assert_eq!((word(at, 0), word(at, 4)), (0x6561_7407, at as u32 + 1));
        assert_eq!((word(at, 24), word(at, 36) >> 20, word(at, 36) & 0xf_ffff), (4096, 259, 1));
    }
    // Queued, issued, completed; read and by a file system, then written and durable.
    assert_eq!([0, 1, 2].map(|at| word(at, 28)), [0x0111_0001, 0x0141_0007, 0x0181_0008]);
    assert_eq!([3, 4, 5].map(|at| word(at, 28)), [0x8112_0001, 0x8142_0007, 0x8182_0008]);
    assert_eq!([0, 1, 2].map(|at| long(at, 8)), [0, QUEUE, WHOLE]);
    assert_eq!([long(0, 16), long(3, 16)], [800, 16]);
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
    let mut writer = Writer::default();
    let file =
        [writer.begin(&Begin::default()), writer.names(&names), writer.events(0, 0, events.iter().map(Event::to_words))];
    let mut out = Vec::new();
    let written = blktrace::write(&Trace::read(&file.concat()[..]).expect("a trace"), &mut out).expect("a vector");
    let device = |record: &[u8]| u32::from_le_bytes(*record[36..].first_chunk().expect("a word"));
    let disks: Vec<_> = out.chunks(48).map(device).map(|device| (device >> 20, device & 0xf_ffff)).collect();
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
