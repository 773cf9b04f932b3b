//! Exact results of known workloads.

use millrace_block::trace::{Event, EventKind, Key};

use super::*;
use crate::{
    format::{End, Writer},
    samples::{ANSWER, BACKEND, CHECKS, INTERRUPT, Job, QUEUE, SERVICE, WHOLE, events, names, trace},
};

/// 100 reads of 4 KiB, one after the other, 10 us apart; then 50 writes of 8 KiB, each 1 MiB further.
fn workload() -> Vec<Job> {
    let job = |operation, lba, count, at| Job { queue: 1, command: 7, operation, lba, count, at };
    let reads = (0..100).map(|number| job(EventOperation::READ, number * 8, 8, 1_000_000 + number * 10_000));
    let writes = (0..50).map(|number| job(EventOperation::WRITE, number * 2048, 16, 2_000_000 + number * 10_000));
    reads.chain(writes).collect()
}

fn report() -> Report {
    Report::of(&trace(&workload()), None)
}

fn all(count: u64, time: u64) -> Latency {
    Latency { count, mean: time, p50: time, p90: time, p99: time, p999: time, max: time }
}

#[test]
fn percentiles_are_exact() {
    let of = Latency::of((1..=1000).rev());
    assert_eq!(of, Latency { count: 1000, mean: 500, p50: 500, p90: 900, p99: 990, p999: 999, max: 1000 });
    assert_eq!(Latency::of([5]), all(1, 5));
    assert_eq!(Latency::of([]), Latency::default());
}

#[test]
fn the_time_is_divided_among_the_stages() {
    let report = report();
    assert_eq!((report.requests, report.errors, report.interrupts, report.events), (150, 0, 150, 1200));
    let found: Vec<_> = report.stages.iter().map(|stage| (stage.name.as_str(), stage.latency.clone())).collect();
    let expected = [
        ("queue", QUEUE),
        ("checks", CHECKS),
        ("data/throttle", 2 * SERVICE),
        ("data/memory", BACKEND),
        ("answer", ANSWER),
        ("interrupt", INTERRUPT),
    ];
    assert_eq!(found, expected.map(|(name, time)| (name, all(150, time))));
    let permille = |time: u64| Some(time * 1000 / WHOLE);
    let shares: Vec<_> = report.stages.iter().map(|stage| stage.permille).collect();
    let expected = [QUEUE, CHECKS, 2 * SERVICE, BACKEND, ANSWER].map(permille);
    assert_eq!(shares, [&expected[..], &[None]].concat());
    assert!(report.lost == Lost::default() && report.background.is_empty());
}

#[test]
fn requests_are_told_apart_by_what_they_are() {
    let report = report();
    let class = |name: &str, bytes, count| Class { name: name.to_owned(), bytes, latency: all(count, WHOLE) };
    assert_eq!(report.operations, [class("read", 400 << 10, 100), class("write", 400 << 10, 50)]);
    assert_eq!(report.sizes, [class("4 KiB read", 400 << 10, 100), class("8 KiB write", 400 << 10, 50)]);
    assert_eq!(report.depths, [class("1", 800 << 10, 150)]);
    // 64 MiB in 16 regions of 4 MiB: all reads are in the first, and of the writes four in each of 12 and two more.
    assert_eq!(report.offsets.len(), 13);
    assert_eq!(report.offsets[0], class("data 0 B-4 MiB", (400 << 10) + (32 << 10), 104));
    assert_eq!(report.offsets[12], class("data 48 MiB-52 MiB", 16 << 10, 2));
}

#[test]
fn order_mix_and_favourites_are_found() {
    let report = report();
    let order = |name: &str, requests, sequential, mean_run, longest_run| Order {
        name: name.to_owned(),
        requests,
        sequential,
        mean_run,
        longest_run,
    };
    assert_eq!(
        report.order,
        [order("vm1 data read", 100, 99, 400 << 10, 400 << 10), order("vm1 data write", 50, 0, 8 << 10, 8 << 10)]
    );
    // Reads up to a millisecond, writes from then on.
    assert_eq!(report.duration, 1_000_000 + 49 * 10_000 + WHOLE);
    let counts: Vec<_> = report.moments.iter().map(|moment| (moment.reads, moment.writes, moment.others)).collect();
    assert_eq!(counts, [(100, 0, 0), (0, 50, 0)]);
    assert_eq!(report.moments[1].written_bytes, 400 << 10);
    assert_eq!(report.moments[0].mean, WHOLE);
    // 16 reads lie in a piece, and each write in another; the first one's with reads.
    let first = Hot { volume: "data".to_owned(), offset: 0, reads: 16, writes: 1 };
    assert_eq!(report.hot[0], first);
    assert_eq!(report.hot[1], Hot { offset: 64 << 10, reads: 16, writes: 0, ..first });
}

#[test]
fn two_streams_beside_each_other_are_both_sequential() {
    let job = |queue, lba, at| Job { queue, command: 1, operation: EventOperation::READ, lba, count: 8, at };
    let jobs: Vec<_> =
        (0..50).flat_map(|n| [job(1, n * 8, 1000 + n * 9000), job(2, 65536 + n * 8, 3000 + n * 9000)]).collect();
    let report = Report::of(&trace(&jobs), None);
    assert_eq!((report.order[0].requests, report.order[0].sequential), (100, 98));
    assert_eq!(report.order[0].longest_run, 50 * 4096);
}

/// A stream goes on beside it meanwhile: a predecessor is one of 64 requests, however few of them have no successor yet.
#[test]
fn what_ended_long_ago_is_not_gone_on_from() {
    let job = |lba, at| Job { queue: 1, command: 1, operation: EventOperation::READ, lba, count: 8, at };
    let sequential = |between: u64| {
        let stream = (0..between).map(|n| job(65536 + n * 8, 10_000 + n * 9000));
        let jobs: Vec<_> = [job(0, 1000)].into_iter().chain(stream).chain([job(8, 10_000 + between * 9000)]).collect();
        let report = Report::of(&trace(&jobs), None);
        (report.order[0].sequential, report.order[0].longest_run)
    };
    assert_eq!(sequential(63), (63, 63 * 4096));
    assert_eq!(sequential(64), (63, 64 * 4096));
    assert_eq!(sequential(65), (64, 65 * 4096));
}

#[test]
fn depth_counts_what_is_in_flight() {
    let job = |command| Job {
        queue: 1,
        command,
        operation: EventOperation::WRITE,
        lba: u64::from(command),
        count: 1,
        at: 1000 + u64::from(command),
    };
    let report = Report::of(&trace(&(0..5).map(job).collect::<Vec<_>>()), None);
    let depths: Vec<_> = report.depths.iter().map(|class| (class.name.as_str(), class.latency.count)).collect();
    assert_eq!(depths, [("1", 1), ("2-3", 2), ("4-7", 2)]);
}

/// Legs that work at once: their parent's own time is what none of them covers.
#[test]
fn legs_side_by_side_are_not_their_parents_time() {
    let key = Key { device: 1, queue: 1, command: 1 };
    let event =
        |time, kind, span, parent, place| Event { time, kind, span, parent, place, key, count: 8, ..Event::default() };
    let mut names = names();
    names.nodes.push(crate::format::NodeName { id: 3, name: "other".to_owned(), ..names.nodes[1].clone() });
    let events = [
        event(100, EventKind::Fetched, 0, 0, 1),
        event(110, EventKind::Entered, 1, 0, 1),
        event(120, EventKind::Entered, 2, 1, 2),
        event(130, EventKind::Entered, 3, 1, 3),
        event(160, EventKind::Left, 2, 1, 2),
        event(190, EventKind::Left, 3, 1, 3),
        event(200, EventKind::Left, 1, 0, 1),
        event(205, EventKind::Completed, 0, 0, u16::MAX),
        // The same again, for nobody, and its end is missing.
        Event { key: Key::NOBODY, ..event(300, EventKind::Entered, 4, 0, 2) },
        // Begun, and not ended; ended, and not begun.
        event(400, EventKind::Fetched, 0, 0, 1),
        Event { key: Key { command: 9, ..key }, ..event(500, EventKind::Completed, 0, 0, 0) },
    ];
    let mut writer = Writer::default();
    let file = [
        writer.begin(&crate::format::Begin::default()),
        writer.names(&names),
        writer.events(2, 17, events.iter().map(Event::to_words)),
        writer.end(&End::default()),
    ];
    let trace = Trace::read(&file.concat()[..]).expect("a trace");
    assert_eq!(stages::own_times(&trace.requests[0]).into_iter().collect::<Vec<_>>(), [(1, 20), (2, 40), (3, 60)]);
    let report = Report::of(&trace, None);
    assert_eq!(report.lost, Lost { dropped: 17, unfinished: 1, unknown: 1, ..Lost::default() });
    let background = Background { node: "data/memory".to_owned(), requests: 1, bytes: 4096 };
    assert_eq!(report.background, [background]);
    assert_eq!((report.requests, report.interrupts), (1, 0));
}

#[test]
fn a_request_whose_end_is_lost_does_not_get_anothers() {
    let jobs: Vec<_> = workload();
    let events: Vec<_> = events(&jobs);
    // The first completion is lost, and its identifier is used again.
    let lost = events.iter().position(|event| event.kind == EventKind::Completed).expect("a completion");
    let without = [&events[..lost], &events[lost + 1..]].concat();
    let mut writer = Writer::default();
    let mut file = [writer.begin(&crate::format::Begin::default()), writer.names(&names())].concat();
    for events in without.chunks(crate::format::EVENTS) {
        file.extend(writer.events(0, 1, events.iter().map(Event::to_words)));
    }
    let report = Report::of(&Trace::read(&file[..]).expect("a trace"), None);
    assert_eq!((report.requests, report.lost.unfinished, report.lost.dropped, report.lost.cut), (149, 1, 1, true));
    assert!(report.operations.iter().all(|class| class.latency.max == WHOLE));
}

#[test]
fn a_file_damaged_in_its_middle_says_what_and_where_and_the_rest_is_analyzed() {
    let jobs: Vec<_> = workload();
    let mut writer = Writer::default();
    let mut blocks = vec![writer.begin(&crate::format::Begin::default()), writer.names(&names())];
    // A block ends anywhere within a request.
    for events in events(&jobs).chunks(101) {
        blocks.push(writer.events(0, 0, events.iter().map(Event::to_words)));
    }
    blocks.push(writer.end(&End::default()));
    for hit in 2..blocks.len() - 1 {
        let mut blocks = blocks.clone();
        let (from, len) = (blocks[..hit].iter().map(Vec::len).sum::<usize>(), blocks[hit].len());
        blocks[hit][len / 2] ^= 1;
        let report = Report::of(&Trace::read(&blocks.concat()[..]).expect("a trace"), None);
        let lost = &report.lost;
        assert_eq!((lost.damaged_bytes, lost.damaged_from, lost.missing_blocks), (len as u64, Some(from as u64), 1));
        assert!(report.requests > 130 && report.requests < 150 && !lost.cut, "{} requests", report.requests);
        let said = format!("not here: {len} bytes of the file are unreadable, from byte {from} on");
        assert!(report.text().contains(&said), "{}", report.text());
        // The end of one is not taken for another's, nor when one was seen.
        assert!(report.operations.iter().all(|class| class.latency.max <= WHOLE), "block {hit}: {:?}", report.operations);
        let queue = report.stages.iter().find(|stage| stage.name == "queue").expect("most were seen");
        assert_eq!(queue.latency.max, QUEUE, "block {hit}");
    }
}

/// A volume's nodes get new numbers when it is attached once more, or when its stack is changed.
#[test]
fn a_node_is_one_whatever_numbers_it_has() {
    let (jobs, mut later) = (workload(), names());
    for node in &mut later.nodes {
        (node.id, node.above) = (node.id + 2, if node.above == 0 { 0 } else { node.above + 2 });
    }
    let mut events = events(&jobs);
    let half = events.len() / 2;
    for event in &mut events[half..] {
        if matches!(event.kind, EventKind::Entered | EventKind::Left) {
            event.place += 2;
        }
    }
    let mut writer = Writer::default();
    let mut file = [writer.begin(&crate::format::Begin::default()), writer.names(&names())].concat();
    file.extend(writer.events(0, 0, events[..half].iter().map(Event::to_words)));
    file.extend(writer.names(&later));
    file.extend(writer.events(0, 0, events[half..].iter().map(Event::to_words)));
    let found = Report::of(&Trace::read(&file[..]).expect("a trace"), None);
    assert_eq!(found.stages, report().stages);
}

#[test]
fn the_text_says_it_all() {
    let text = report().text();
    for words in
        ["150 requests", "4 KiB read", "data/memory", "sequential", "99.0 %", "used most", "ended: the time was over"]
    {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
}

#[test]
fn what_is_used_most_is_found_under_requests_of_nonsense() {
    let job = |operation, lba, count, at| Job { queue: 1, command: 1, operation, lba, count, at };
    // All that there can be, and one piece far within.
    let far = 5000 * 128;
    let mut jobs: Vec<_> = (0..40).map(|n| job(EventOperation::WRITE, 0, u32::MAX, 1000 + n * 10_000)).collect();
    jobs.push(job(EventOperation::READ, far, 8, 900_000));
    jobs.push(job(EventOperation::READ, u64::MAX / 512, 8, 950_000));
    let report = Report::of(&trace(&jobs), None);
    let hot = |piece: u64, reads, writes| Hot { volume: "data".to_owned(), offset: piece << 16, reads, writes };
    assert_eq!(report.hot[..3], [hot(5000, 1, 40), hot(0, 0, 40), hot(1, 0, 40)]);
    assert_eq!(report.hot.len(), HOT);
}
