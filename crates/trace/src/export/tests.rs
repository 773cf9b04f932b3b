//! What other programs are given.

use millrace_block::trace::EventOperation;
use serde_json::Value;

use super::*;
use crate::{
    Report, plot,
    samples::{INTERRUPT, Job, QUEUE, WHOLE, trace},
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

#[test]
fn the_picture_is_whole_and_the_text_is_no_markup() {
    let mut trace = trace(&jobs());
    if let Some(begin) = &mut trace.begin {
        begin.target = "device <script>&\"".to_owned();
    }
    let report = Report::of(&trace, None);
    let page = plot::html(&trace, &report);
    assert!(!page.contains("<script") && page.contains("device &lt;script&gt;&amp;&quot;"));
    let svg = plot::svg(&trace, &report);
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    for word in ["where the time went", "data/memory", "requests over time", "used most"] {
        assert!(svg.contains(word), "{word}");
    }
    assert!(!svg.contains("href"), "it loads nothing");
    // A trace in which nothing happened.
    let empty = crate::Trace::default();
    assert!(!plot::svg(&empty, &Report::of(&empty, None)).contains("NaN"));
}
