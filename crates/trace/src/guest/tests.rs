//! Guests' traces as kernels write them, and clocks that differ.

use millrace_block::trace::EventOperation;

use super::*;
use crate::samples::{Job, WHOLE, trace};

#[test]
fn kernels_lines_are_understood() {
    let text = "# tracer: nop\n\
        \x20            fio-697     [001] .....    12.000100: block_rq_issue: 259,0 R 4096 () 2048 + 8 none,0,0 [fio]\n\
        \x20         <idle>-0       [001] d.h1.    12.000350: block_rq_complete: 259,0 R () 2048 + 8 none,0,0 [0]\n\
        \x20   kworker/0:1H-12      [000] .....    12.000400: block_rq_issue: 254,16 WFS 8192 () 4096 + 16 [kworker/0:1H]\n\
        \x20   kworker/0:1H-12      [000] .....    12.000410: block_rq_issue: 254,16 FF 0 () 0 + 0 none,0,0 [kworker/0:1H]\n\
        \x20         <idle>-0       [000] ..s1.    12.001000: block_rq_complete: 254,16 WFS () 4096 + 16 [0]\n\
        \x20         <idle>-0       [000] ..s1.    12.001100: block_rq_complete: 254,16 W () 77 + 16 [0]\n";
    let one = GuestRequest {
        device: (259, 0),
        writes: false,
        sector: 2048,
        count: 8,
        issued: 12_000_100_000,
        completed: 12_000_350_000,
    };
    let two = GuestRequest {
        device: (254, 16),
        writes: true,
        sector: 4096,
        count: 16,
        issued: 12_000_400_000,
        completed: 12_001_000_000,
    };
    assert_eq!(parse(text), Ok(vec![one.clone(), two]));
    let blkparse = "259,0    1        1    12.000050000   697  Q   R 2048 + 8 [fio]\n\
        259,0    1        2    12.000100000   697  D   R 2048 + 8 [fio]\n\
        259,0    1        3    12.000350000     0  C   R 2048 + 8 [0]\n\
        CPU1 (259,0):\n Reads Queued: 1, 4KiB\n";
    assert_eq!(parse(blkparse), Ok(vec![one]));
    assert_eq!(parse("nothing of the kind\n"), Err(GuestError::Nothing));
}

/// Lines of the kernel's about one sector: what, and when in microseconds.
fn lines(events: &[(&str, u64)]) -> String {
    let line = |(event, time): &(&str, u64)| match *event {
        "gap" => "##### CPU 1 buffer started ####\n".to_owned(),
        "lost" => "CPU:1 [LOST 12 EVENTS]\n".to_owned(),
        event => format!("  fio-697  [001] .....  0.{time:06}: block_rq_{event}: 259,0 R 4096 () 2048 + 8 [fio]\n"),
    };
    events.iter().map(line).collect()
}

fn pairs(events: &[(&str, u64)]) -> Vec<(u64, u64)> {
    let requests = parse(&lines(events)).expect("requests");
    requests.iter().map(|request| (request.issued / 1000, request.completed / 1000)).collect()
}

#[test]
fn an_issue_whose_end_is_missing_takes_nobody_elses() {
    // The processor that takes the interrupts has forgotten more than the others.
    let early = [("issue", 10), ("issue", 20), ("complete", 21), ("issue", 30), ("complete", 31), ("issue", 40)];
    let late = [("issue", 60), ("issue", 61), ("complete", 62), ("complete", 64)];
    for gap in ["gap", "lost"] {
        let events = [&early[..], &[(gap, 0)], &late[..]].concat();
        assert_eq!(pairs(&events), [(20, 21), (30, 31), (60, 62), (61, 64)]);
    }
}

#[test]
fn a_request_that_its_driver_did_not_take_is_issued_when_it_did() {
    let events = [("issue", 10), ("requeue", 11), ("issue", 20), ("complete", 25), ("issue", 30), ("complete", 33)];
    assert_eq!(pairs(&events), [(20, 25), (30, 33)]);
}

/// Requests of ours, and what their guest says of them: issued so long before they are seen, known so long after they are completed.
fn both(count: u64, lba: impl Fn(u64) -> u64, before: u64, after: u64, difference: i64) -> (Trace, Vec<GuestRequest>) {
    let job = |number: u64| Job {
        queue: 1,
        command: 1,
        operation: if number.is_multiple_of(3) { EventOperation::WRITE } else { EventOperation::READ },
        lba: lba(number),
        count: 8,
        // Not in step, as nothing is.
        at: 1_000_000_000 + number * 50_000 + number.pow(3) * 7919 % 40_009,
    };
    let jobs: Vec<_> = (0..count).map(job).collect();
    let theirs = jobs.iter().enumerate().map(|(number, job)| GuestRequest {
        device: (259, 0),
        writes: number.is_multiple_of(3),
        sector: job.lba,
        count: 8,
        // A little more each time, but for the first: so that it is the first that tells.
        issued: (job.at - before - number as u64 % 7 * 10).checked_add_signed(difference).expect("a time"),
        completed: (job.at + WHOLE + after + number as u64 % 5 * 10).checked_add_signed(difference).expect("a time"),
    });
    let theirs = theirs.collect();
    (trace(&jobs), theirs)
}

fn stage<'a>(joined: &'a Joined, name: &str) -> &'a Latency {
    &joined.summary.stages.iter().find(|stage| stage.name == name).expect("a stage").latency
}

#[test]
fn clocks_are_told_apart_by_what_cannot_be() {
    for difference in [-900_000_000, 0, 5_000_000_000_000_000] {
        let (trace, theirs) = both(200, |number| number * 64, 400, 600, difference);
        let joined = join(&trace, &theirs).expect("they have all in common");
        assert_eq!((joined.summary.joined, joined.summary.unmatched, joined.summary.misfit), (200, 0, 0));
        // Between 400 too little and 600 too much: in the middle, 500 on either side.
        assert_eq!(joined.summary.uncertainty, 500);
        assert_eq!(joined.difference, i128::from(-difference) - 100);
        assert_eq!(stage(&joined, "daemon").max, WHOLE);
        assert_eq!(stage(&joined, "outside").p50, stage(&joined, "guest").p50 - WHOLE);
        let sum = stage(&joined, "before").mean + stage(&joined, "after").mean;
        assert!(sum.abs_diff(stage(&joined, "outside").mean) <= 1, "they add up");
    }
}

#[test]
fn a_guest_that_stands_still_is_followed() {
    let (trace, mut theirs) = both(300, |number| number * 64, 400, 600, 77_000);
    // Its processor was taken away when it had just begun them.
    for late in [40..52, 120..122, 200..216] {
        theirs[late].iter_mut().for_each(|request| request.issued -= 3_000_000);
    }
    let joined = join(&trace, &theirs).expect("they have all in common");
    assert_eq!((joined.summary.joined, joined.summary.unmatched, joined.summary.misfit), (300, 0, 0));
    assert!(joined.pairs.iter().all(|(at, request)| trace.requests[*at].lba == request.sector));
}

#[test]
fn parts_of_traces_and_blocks_that_are_used_again_are_joined() {
    // Ten blocks, over and over; the guest's trace began later and ended earlier.
    let (trace, theirs) = both(300, |number| number % 10 * 8, 300, 300, 77_000);
    let joined = join(&trace, &theirs[40..250]).expect("they have something in common");
    assert_eq!((joined.summary.joined, joined.summary.unmatched), (210, 90));
    assert!(joined.pairs.iter().all(|(at, request)| trace.requests[*at].lba == request.sector));
    assert!(joined.pairs.iter().enumerate().all(|(number, (at, _))| *at == number + 40), "each with its own");
}

/// A guest's clock has microseconds: two requests may have one time, long before ours begin or among them.
#[test]
fn requests_of_one_moment_keep_nobody_from_being_joined() {
    let (trace, theirs) = both(300, |_| 8, 300, 300, 77_000);
    let early = |number: u64| GuestRequest { issued: 1000 + number / 2, completed: 5000 + number / 2, ..theirs[0].clone() };
    let mut all: Vec<_> =
        (0..20).map(early).chain((0..20).map(|number| GuestRequest { writes: false, ..early(number) })).collect();
    all.sort_by_key(|request| request.issued);
    all.extend(theirs.iter().cloned());
    let joined = join(&trace, &all).expect("they have most in common");
    assert_eq!((joined.summary.joined, joined.summary.unmatched), (300, 0));
    assert!(joined.pairs.iter().enumerate().all(|(number, (at, request))| *at == number && *request == theirs[number]));
}

#[test]
fn another_disks_trace_is_refused() {
    let (trace, theirs) = both(20, |number| number * 64, 300, 300, 0);
    let others: Vec<_> =
        theirs.iter().map(|request| GuestRequest { sector: request.sector + 1, ..request.clone() }).collect();
    assert_eq!(join(&trace, &others).map(|joined| joined.pairs), Err(GuestError::Strange(20)));
    let mixed: Vec<_> = others.into_iter().map(|request| GuestRequest { device: (8, 0), ..request }).chain(theirs).collect();
    let joined = join(&trace, &mixed).expect("the other half is ours");
    assert_eq!((joined.summary.joined, joined.summary.device.as_str()), (20, "259,0"));
}
