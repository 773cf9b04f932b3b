//! The guest's own trace, joined with ours: how long requests were in the guest before the daemon saw them, and after it had done.
//!
//! ```text
//!   guest:  issue ──────────────────────────────────────────────► complete        its clock
//!   ours:           seen ─ fetched ─ … ─ completed ─ interrupted                   ours
//!           └ before ┘                                └── after ──┘
//! ```
//!
//! It is the text of the kernel's events `block_rq_issue`, `block_rq_requeue` and `block_rq_complete`, as any guest's tracefs has it, or
//! what `blkparse` prints (`D`, `R` and `C`). A guest's clock is not ours: but a request is seen after it was issued, and completed before
//! its guest knows, so each narrows down what the difference can be.

use std::collections::HashMap;

use serde::Serialize;
use thiserror::Error;

use crate::{
    report::{Latency, Stage, direction},
    requests::{Request, Trace},
};

const SECTOR: u64 = 512;

/// A request in the guest's trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestRequest {
    /// The guest's device, as its kernel numbers it.
    pub device: (u32, u32),
    /// It writes.
    pub writes: bool,
    /// First sector.
    pub sector: u64,
    /// Sectors.
    pub count: u64,
    /// When its driver was given it, in nanoseconds of the guest's clock.
    pub issued: u64,
    /// When it was completed there.
    pub completed: u64,
}

/// Why a guest's trace does not help.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GuestError {
    /// It has no such events.
    #[error("it has no block_rq_issue and block_rq_complete events of reads and writes, nor lines of blkparse")]
    Nothing,
    /// Nothing in it is ours.
    #[error("none of its {0} requests are those of the trace: was it taken at the same time, on the same disk?")]
    Strange(usize),
}

/// What both traces say together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// The guest's device.
    pub device: String,
    /// Requests in its trace, of all devices.
    pub requests: usize,
    /// Those that are ours.
    pub joined: usize,
    /// Ours that are not in its trace.
    pub unmatched: usize,
    /// How much the difference between the clocks may be wrong, in nanoseconds.
    pub uncertainty: u64,
    /// No one difference fits all requests: how much is missing.
    pub misfit: u64,
    /// Where the time went, in the guest's view.
    pub stages: Vec<Stage>,
}

/// Requests of both traces, brought together.
#[derive(Clone, Debug)]
pub struct Joined {
    /// For people.
    pub summary: Summary,
    /// What is to be added to the guest's clock for ours.
    pub difference: i128,
    /// Places of our requests, each with the guest's.
    pub pairs: Vec<(usize, GuestRequest)>,
}

/// What a line says of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Its driver was given it.
    Issued,
    /// It did not take it: it is given it again later.
    GivenBack,
    Completed,
}

/// A line about one request.
struct Line {
    action: Action,
    time: u64,
    device: (u32, u32),
    writes: bool,
    sector: u64,
    count: u64,
}

/// "123.456789" in nanoseconds.
fn seconds(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.')?;
    let digits = part.get(..part.len().min(9))?;
    let nanos = digits.parse::<u64>().ok()?.checked_mul(10_u64.pow(9 - digits.len() as u32))?;
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(nanos)
}

fn device(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(',')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Whether the kernel's letters are a write; `None`: they are neither a read nor a write of blocks.
fn writes(letters: &str) -> Option<bool> {
    let letters = letters.trim_start_matches('F');
    match letters.chars().next()? {
        'R' => Some(false),
        'W' => Some(true),
        _ => None,
    }
}

/// `… 12.345678: block_rq_issue: 259,0 R 4096 () 2048 + 8 none,0,0 [fio]`
fn ftrace(line: &str) -> Option<Line> {
    let events = [
        (": block_rq_issue: ", Action::Issued),
        (": block_rq_complete: ", Action::Completed),
        (": block_rq_requeue: ", Action::GivenBack),
    ];
    let found = events.into_iter().find_map(|(event, action)| Some((line.split_once(event)?, action)));
    let ((head, rest), action) = found?;
    let time = seconds(head.rsplit(' ').next()?)?;
    let mut words = rest.split_whitespace();
    let (device, writes) = (device(words.next()?)?, writes(words.next()?)?);
    let (before, after) = rest.split_once(" + ")?;
    let sector = before.rsplit(' ').next()?.parse().ok()?;
    let count = after.split_whitespace().next()?.parse().ok()?;
    Some(Line { action, time, device, writes, sector, count })
}

/// `259,0  1  17  0.000123456  697  D  R 2048 + 8 [fio]`
fn blkparse(line: &str) -> Option<Line> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [dev, _, _, time, _, letter, letters, sector, "+", count, ..] = words[..] else { return None };
    let action = match letter {
        "D" => Action::Issued,
        "R" => Action::GivenBack,
        "C" => Action::Completed,
        _ => return None,
    };
    Some(Line {
        action,
        time: seconds(time)?,
        device: device(dev)?,
        writes: writes(letters)?,
        sector: sector.parse().ok()?,
        count: count.parse().ok()?,
    })
}

/// Whether events of before it are missing: each processor's buffer has its own beginning, where it overran, and may have gaps.
fn is_gap(line: &str) -> bool {
    let line = line.trim();
    let begins = line.starts_with("##### CPU ") && line.ends_with("buffer started ####");
    begins || line.starts_with("CPU:") && line.contains("[LOST")
}

/// Understands a guest's trace. Lines about other things are left out.
///
/// # Errors
/// When there is nothing about reads and writes.
pub fn parse(text: &str) -> Result<Vec<GuestRequest>, GuestError> {
    // By device, direction and first sector: when it was issued, and how long it is.
    let mut open: HashMap<_, Vec<(u64, u64)>> = HashMap::new();
    let mut requests = Vec::new();
    let mut gaps = text.lines().filter(|line| is_gap(line)).count();
    for line in text.lines() {
        if is_gap(line) {
            gaps -= 1;
            open.clear();
        }
        let Some(line) = ftrace(line).or_else(|| blkparse(line)) else { continue };
        let Line { action, time, device, writes, sector, count } = line;
        if count == 0 {
            continue;
        }
        let waiting = open.entry((device, writes, sector)).or_default();
        match action {
            Action::Issued => waiting.push((time, count)),
            Action::GivenBack => _ = waiting.pop(),
            Action::Completed => {
                // The oldest of those that look alike. Where completions are missing that may be one without an end, and from then on
                // each would have the end of the next one: there it is the newest, and the others are forgotten.
                let taken = if gaps > 0 { waiting.len() } else { waiting.len().min(1) };
                let newest = waiting.drain(..taken).next_back();
                if let Some((issued, whole)) = newest {
                    requests.push(GuestRequest { device, writes, sector, count: whole, issued, completed: time });
                }
            }
        }
    }
    requests.sort_by_key(|request| request.issued);
    if requests.is_empty() { Err(GuestError::Nothing) } else { Ok(requests) }
}

/// What makes a request known again: direction, offset and length in bytes.
type Shape = (bool, u64, u64);

fn shape_of(trace: &Trace, request: &Request) -> Option<Shape> {
    let (offset, bytes) = trace.range(request);
    Some((direction(request)?, offset, bytes)).filter(|_| bytes > 0)
}

fn shape(request: &GuestRequest) -> Shape {
    (request.writes, request.sector.saturating_mul(SECTOR), request.count.saturating_mul(SECTOR))
}

fn by_shape<T>(items: impl Iterator<Item = (Shape, T)>) -> HashMap<Shape, Vec<T>> {
    let mut map: HashMap<Shape, Vec<T>> = HashMap::new();
    items.for_each(|(shape, item)| map.entry(shape).or_default().push(item));
    map
}

/// Brings both together.
///
/// # Errors
/// When they have nothing in common.
pub fn join(trace: &Trace, guest: &[GuestRequest]) -> Result<Joined, GuestError> {
    let ours = by_shape(trace.requests.iter().enumerate().filter_map(|(at, own)| Some((shape_of(trace, own)?, at))));
    let mut devices: HashMap<(u32, u32), usize> = HashMap::new();
    for request in guest.iter().filter(|request| ours.contains_key(&shape(request))) {
        *devices.entry(request.device).or_default() += 1;
    }
    let strange = GuestError::Strange(guest.len());
    let Some((&device, _)) = devices.iter().max_by_key(|(device, count)| (**count, **device)) else { return Err(strange) };
    let theirs = guest.iter().filter(|request| request.device == device);
    let theirs = by_shape(theirs.map(|request| (shape(request), request)));
    let Some(rough) = roughly(trace, &ours, &theirs) else { return Err(strange) };
    let pairs = pair(trace, &theirs, rough);
    if pairs.is_empty() {
        return Err(strange);
    }
    // Seen after it was issued; completed before the guest knows.
    let bounds = pairs.iter().filter_map(|(at, theirs)| {
        let own = &trace.requests[*at];
        let least = i128::from(own.completed?) - i128::from(theirs.completed);
        Some((least, i128::from(own.began()) - i128::from(theirs.issued)))
    });
    let (least, most) = bounds.reduce(|one, other| (one.0.max(other.0), one.1.min(other.1))).unwrap_or((rough, rough));
    let difference = i128::midpoint(least, most);
    let half = (most - least).unsigned_abs().div_ceil(2) as u64;
    let (uncertainty, misfit) = if least <= most { (half, 0) } else { (half, half) };
    let unmatched = ours.values().map(Vec::len).sum::<usize>() - pairs.len();
    let summary = Summary {
        device: format!("{},{}", device.0, device.1),
        requests: guest.len(),
        joined: pairs.len(),
        unmatched,
        uncertainty,
        misfit,
        stages: stages(trace, &pairs, difference),
    };
    Ok(Joined { summary, difference, pairs })
}

/// Differences of the clocks that are tried, and requests that each is tried with.
const TRIED: usize = 2048;
const TRIED_WITH: usize = 256;

/// Some of a list, spread over it.
fn spread<T>(list: &[T], most: usize) -> impl Iterator<Item = &T> {
    list.iter().step_by(list.len().div_ceil(most).max(1))
}

/// The difference of the clocks, roughly: of those that make a request of the guest's one of ours, the one with which the others are
/// nearest to theirs.
fn roughly(trace: &Trace, ours: &HashMap<Shape, Vec<usize>>, theirs: &HashMap<Shape, Vec<&GuestRequest>>) -> Option<i128> {
    let began = |at: &usize| i128::from(trace.requests[*at].began());
    let mut common: Vec<(&Vec<usize>, &GuestRequest)> = theirs
        .iter()
        .filter_map(|(shape, theirs)| Some((ours.get(shape)?, theirs)))
        .flat_map(|(own, theirs)| theirs.iter().map(move |theirs| (own, *theirs)))
        .collect();
    common.sort_by_key(|(_, theirs)| theirs.issued);
    let sample: Vec<_> = spread(&common, TRIED_WITH).copied().collect();
    let slack = slack(theirs);
    let misses = |difference: i128| -> i128 {
        let miss = |(own, theirs): &(&Vec<usize>, &GuestRequest)| {
            // Ours began between the guest's issue and completion, and rather soon.
            let (from, until) = (i128::from(theirs.issued) + difference, i128::from(theirs.completed) + difference + slack);
            let first = own.partition_point(|at| began(at) < from - slack);
            let near = own[first..].iter().map(began).take_while(|began| *began <= until);
            // One that is not there says more than one that is late: its guest stood still.
            near.map(|began| (began - from).abs().min(slack)).min().unwrap_or(4 * slack)
        };
        sample.iter().map(miss).sum()
    };
    // Those of which we have fewest leave the least doubt.
    common.sort_by_key(|(own, theirs)| (own.len(), theirs.issued));
    let anchors: Vec<_> = spread(&common[..common.len().min(64)], 16).copied().collect();
    let each = TRIED / anchors.len().max(1);
    let tried =
        anchors.iter().flat_map(|(own, theirs)| spread(own, each).map(move |at| began(at) - i128::from(theirs.issued)));
    tried.min_by_key(|difference| misses(*difference))
}

/// How far from each other two requests may seem that are one, besides the time that it took: as long as half of all take, for it is not known
/// how long they lay in the guest; and the clocks' rates differ a little.
fn slack(theirs: &HashMap<Shape, Vec<&GuestRequest>>) -> i128 {
    let times = theirs.values().flatten().map(|theirs| theirs.completed.saturating_sub(theirs.issued));
    i128::from(Latency::of(times).p50) + 50_000
}

/// Each of ours with that one of the guest's which it is: of those that look alike, the nearest in time. The difference of the clocks is
/// followed on the way.
fn pair(trace: &Trace, theirs: &HashMap<Shape, Vec<&GuestRequest>>, rough: i128) -> Vec<(usize, GuestRequest)> {
    let (mut pairs, mut difference, slack) = (Vec::new(), rough, slack(theirs));
    let mut next: HashMap<Shape, usize> = HashMap::new();
    for (at, own) in trace.requests.iter().enumerate() {
        let Some((shape, theirs)) = shape_of(trace, own).and_then(|shape| Some((shape, theirs.get(&shape)?))) else {
            continue;
        };
        let (from, began) = (next.entry(shape).or_default(), i128::from(own.began()));
        let off = |theirs: &GuestRequest| began - i128::from(theirs.issued) - difference;
        let Some(left) = theirs.get(*from..).filter(|left| !left.is_empty()) else { continue };
        // Both are in the order of their times.
        let after = left.partition_point(|theirs| off(theirs) > 0);
        let around = after.saturating_sub(1)..(after + 1).min(left.len());
        let near = around.min_by_key(|at| off(left[*at]).unsigned_abs()).unwrap_or(0);
        // Of those of one moment the first: the others are yet to be taken.
        let nearest = left.partition_point(|theirs| theirs.issued < left[near].issued);
        let found = left[nearest];
        let error = off(found);
        if error.abs() <= slack + i128::from(found.completed.saturating_sub(found.issued)) {
            // Not far for a single one: a guest that stands still makes its requests late, and the next ones are not.
            difference += (error / 8).clamp(-slack / 32, slack / 32);
            *from += nearest + 1;
            pairs.push((at, found.clone()));
        }
    }
    pairs
}

fn stages(trace: &Trace, pairs: &[(usize, GuestRequest)], difference: i128) -> Vec<Stage> {
    let ours = |time: u64| i128::from(time) + difference;
    let length = |from: i128, to: i128| u64::try_from((to - from).max(0)).unwrap_or(u64::MAX);
    let times = |of: &dyn Fn(&Request, &GuestRequest) -> Option<u64>| {
        Latency::of(pairs.iter().filter_map(|(at, theirs)| of(&trace.requests[*at], theirs)))
    };
    let stage =
        |name: &str, what: &str, latency| Stage { name: name.to_owned(), what: what.to_owned(), latency, permille: None };
    let whole = |_: &Request, theirs: &GuestRequest| Some(theirs.completed.saturating_sub(theirs.issued));
    let outside = |own: &Request, theirs: &GuestRequest| {
        Some(theirs.completed.saturating_sub(theirs.issued).saturating_sub(own.latency()?))
    };
    let before = |own: &Request, theirs: &GuestRequest| Some(length(ours(theirs.issued), own.began().into()));
    let after = |own: &Request, theirs: &GuestRequest| Some(length(own.completed?.into(), ours(theirs.completed)));
    vec![
        stage("guest", "from the guest's issue to its completion", times(&whole)),
        stage("daemon", "of these, seen by the daemon and not completed", times(&|own, _| own.latency())),
        stage("outside", "of these, the rest: exact, whatever the clocks", times(&outside)),
        stage("before", "issued, until the daemon saw it", times(&before)),
        stage("after", "visible to the guest, until its kernel had completed it", times(&after)),
    ]
}

#[cfg(test)]
mod tests;
