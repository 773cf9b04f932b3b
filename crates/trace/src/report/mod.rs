//! What a trace says: latencies by stage, size, offset and depth, order, mix over time, what is used most.
//!
//! Percentiles are exact: the smallest value that so many per cent of the values do not exceed.

mod order;
mod stages;
#[cfg(test)]
mod tests;
mod text;

use std::collections::BTreeMap;

use millrace_block::trace::EventOperation;
use serde::Serialize;

pub use order::Order;
pub use stages::Stage;
pub(crate) use stages::node_name;
pub(crate) use text::{percent, time};

use crate::{
    guest::Joined,
    requests::{Request, Trace},
};

/// Parts into which time and a volume's blocks are divided.
const PARTS: usize = 60;
const REGIONS: usize = 16;
/// Bytes of a piece of a volume, and how many of those used most are listed.
const PIECE: u64 = 64 << 10;
const HOT: usize = 16;

/// A set of durations, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Their mean.
    pub mean: u64,
    /// Half of them are not longer.
    pub p50: u64,
    /// 90 of 100 are not.
    pub p90: u64,
    /// 99 of 100 are not.
    pub p99: u64,
    /// 999 of 1000 are not.
    pub p999: u64,
    /// The longest.
    pub max: u64,
}

impl Latency {
    /// Of these durations.
    pub fn of(durations: impl IntoIterator<Item = u64>) -> Self {
        let mut all: Vec<u64> = durations.into_iter().collect();
        all.sort_unstable();
        let Some(max) = all.last().copied() else { return Self::default() };
        let sum: u128 = all.iter().map(|duration| u128::from(*duration)).sum();
        let at = |permille: usize| all[(all.len() * permille).div_ceil(1000).max(1) - 1];
        Self {
            count: all.len() as u64,
            mean: (sum / all.len() as u128) as u64,
            p50: at(500),
            p90: at(900),
            p99: at(990),
            p999: at(999),
            max,
        }
    }
}

/// Requests that have something in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Class {
    /// What.
    pub name: String,
    /// Bytes that they moved or named.
    pub bytes: u64,
    /// How long they took.
    pub latency: Latency,
}

/// A part of the time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// When it begins, in nanoseconds since the first request.
    pub at: u64,
    /// Reads that were fetched.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Other requests.
    pub others: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// The mean latency of all of them in nanoseconds.
    pub mean: u64,
}

/// A piece of a volume that is used much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hot {
    /// The volume.
    pub volume: String,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Reads that touched it.
    pub reads: u64,
    /// Writes that did.
    pub writes: u64,
}

/// What the volumes did for nobody that is traced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Background {
    /// The node.
    pub node: String,
    /// Requests.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What is not in the trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// Events that found no room in the daemon's rings.
    pub dropped: u64,
    /// Bytes of the file that are damaged.
    pub damaged_bytes: u64,
    /// Where in the file the first of them lies.
    pub damaged_from: Option<u64>,
    /// Blocks of the file that are missing.
    pub missing_blocks: u64,
    /// The file ends without an end.
    pub cut: bool,
    /// Requests that were not completed while they were traced.
    pub unfinished: u64,
    /// Ends of requests whose beginning is not there.
    pub unknown: u64,
}

/// Everything that is said of a trace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// What was traced.
    pub target: String,
    /// Devices and their volumes.
    pub devices: Vec<String>,
    /// From the first request to the end of the last, in nanoseconds.
    pub duration: u64,
    /// Why the trace ended.
    pub ended: Option<String>,
    /// Requests that were completed.
    pub requests: u64,
    /// Of these, with an error.
    pub errors: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Events.
    pub events: u64,
    /// By what they ask for.
    pub operations: Vec<Class>,
    /// Where the time went.
    pub stages: Vec<Stage>,
    /// By size.
    pub sizes: Vec<Class>,
    /// By where in the volume.
    pub offsets: Vec<Class>,
    /// By requests in flight.
    pub depths: Vec<Class>,
    /// In what order blocks were used.
    pub order: Vec<Order>,
    /// Over time.
    pub moments: Vec<Moment>,
    /// What is used most.
    pub hot: Vec<Hot>,
    /// What volumes did by themselves.
    pub background: Vec<Background>,
    /// With the guest's own trace.
    pub guest: Option<crate::guest::Summary>,
    /// What is missing.
    pub lost: Lost,
}

impl Report {
    /// Of a trace, and what it has in common with the guest's own.
    pub fn of(trace: &Trace, guest: Option<&Joined>) -> Self {
        let (first, last) = trace.span();
        let device = |device: &crate::format::DeviceName| {
            format!("{} ({}): {}", device.name, device.kind, trace.volumes(device.id).join(", "))
        };
        let damage = trace.damage;
        Self {
            target: trace.begin.as_ref().map_or_else(|| "unknown".to_owned(), |begin| begin.target.clone()),
            devices: trace.devices.values().map(device).collect(),
            duration: last - first,
            ended: trace.end.as_ref().map(|end| end.reason.clone()),
            requests: trace.requests.len() as u64,
            errors: trace.requests.iter().filter(|request| request.status != 0).count() as u64,
            interrupts: trace.interrupts,
            events: trace.events,
            operations: classes(trace, |request| Some((request.operation.base(), request.operation.name().to_owned()))),
            stages: stages::stages(trace),
            sizes: classes(trace, |request| {
                let bytes = trace.range(request).1;
                (bytes > 0).then(|| (bytes, format!("{} {}", size(bytes), request.operation.name())))
            }),
            offsets: offsets(trace),
            depths: classes(trace, |request| Some(depth(request.depth))),
            order: order::orders(trace),
            moments: moments(trace, first, last),
            hot: hot(trace),
            background: background(trace),
            guest: guest.map(|joined| joined.summary.clone()),
            lost: Lost {
                dropped: trace.dropped,
                damaged_bytes: damage.bytes,
                damaged_from: damage.first,
                missing_blocks: damage.blocks,
                cut: damage.cut,
                unfinished: trace.unfinished.len() as u64,
                unknown: trace.unknown,
            },
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        text::text(self)
    }
}

/// A number of bytes, in the largest unit that fits.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) if bytes.is_multiple_of(unit) => format!("{} {name}", bytes / unit),
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

/// Requests in flight, in classes that double.
fn depth(depth: u32) -> (u32, String) {
    let class = depth.max(1).ilog2();
    let (from, to) = (1_u32 << class, (1_u64 << (class + 1)) - 1);
    (class, if class == 0 { "1".to_owned() } else { format!("{from}-{to}") })
}

/// Requests by a property: its order, and its name. Names tell classes of one order apart.
fn classes<K: Ord>(trace: &Trace, of: impl Fn(&Request) -> Option<(K, String)>) -> Vec<Class> {
    let mut found: BTreeMap<(K, String), (u64, Vec<u64>)> = BTreeMap::new();
    for request in &trace.requests {
        let Some((class, latency)) = of(request).zip(request.latency()) else { continue };
        let entry = found.entry(class).or_default();
        entry.0 = entry.0.saturating_add(trace.range(request).1);
        entry.1.push(latency);
    }
    let class = |((_, name), (bytes, latencies))| Class { name, bytes, latency: Latency::of(latencies) };
    found.into_iter().map(class).collect()
}

fn offsets(trace: &Trace) -> Vec<Class> {
    classes(trace, |request| {
        let (offset, bytes) = trace.range(request);
        let namespace = trace.namespace(request).filter(|namespace| bytes > 0 && namespace.size > 0)?;
        let region = namespace.size.div_ceil(REGIONS as u64).max(1);
        let index = (offset / region).min(REGIONS as u64 - 1);
        let name = format!("{} {}-{}", namespace.volume, size(index * region), size((index + 1).saturating_mul(region)));
        Some(((namespace.volume.clone(), index), name))
    })
}

/// Whether a request reads, writes, or neither.
pub(crate) fn direction(request: &Request) -> Option<bool> {
    match request.operation.base() {
        EventOperation::READ | EventOperation::COMPARE => Some(false),
        EventOperation::WRITE | EventOperation::ZERO => Some(true),
        _ => None,
    }
}

fn moments(trace: &Trace, first: u64, last: u64) -> Vec<Moment> {
    let part = ((last - first) / PARTS as u64 + 1).max(1_000_000);
    let mut moments = vec![Moment::default(); ((last - first) / part + 1) as usize];
    let mut sums = vec![0_u128; moments.len()];
    if trace.requests.is_empty() {
        return Vec::new();
    }
    for request in &trace.requests {
        // Fetched before the last one was completed.
        let at = (request.fetched.saturating_sub(first) / part) as usize;
        let (Some(moment), bytes) = (moments.get_mut(at), trace.range(request).1) else { continue };
        match direction(request) {
            Some(false) => (moment.reads, moment.read_bytes) = (moment.reads + 1, moment.read_bytes.saturating_add(bytes)),
            Some(true) => {
                (moment.writes, moment.written_bytes) = (moment.writes + 1, moment.written_bytes.saturating_add(bytes));
            }
            None => moment.others += 1,
        }
        sums[at] += u128::from(request.latency().unwrap_or_default());
    }
    for (at, (moment, sum)) in moments.iter_mut().zip(sums).enumerate() {
        moment.at = at as u64 * part;
        let count = moment.reads + moment.writes + moment.others;
        moment.mean = sum.checked_div(u128::from(count)).unwrap_or_default() as u64;
    }
    moments
}

/// Where requests begin and end, in pieces, with the reads and writes that there are more from there on: two entries a request, however long
/// it is.
fn edges(trace: &Trace) -> BTreeMap<(&str, u64), [i64; 2]> {
    let mut edges: BTreeMap<(&str, u64), [i64; 2]> = BTreeMap::new();
    for request in &trace.requests {
        let ((offset, bytes), Some(writes)) = (trace.range(request), direction(request)) else { continue };
        let Some(namespace) = trace.namespace(request).filter(|_| bytes > 0) else { continue };
        let end = offset.saturating_add(bytes - 1) / PIECE + 1;
        for (piece, more) in [(offset / PIECE, 1), (end, -1)] {
            edges.entry((&namespace.volume, piece)).or_default()[usize::from(writes)] += more;
        }
    }
    edges
}

fn hot(trace: &Trace) -> Vec<Hot> {
    let edges = edges(trace);
    let mut most: Vec<Hot> = Vec::with_capacity(HOT + 1);
    let mut counts = [0_i64; 2];
    // The last edge of a volume ends its last request: nothing is between it and the next volume.
    let ends = edges.keys().skip(1).map(|(_, piece)| *piece).chain([0]);
    for (((volume, from), more), until) in edges.iter().zip(ends) {
        counts = [counts[0] + more[0], counts[1] + more[1]];
        let [reads, writes] = counts.map(|count| u64::try_from(count).unwrap_or_default());
        if reads + writes == 0 {
            continue;
        }
        for piece in (*from..until).take(HOT) {
            // Behind those that are used as much and lie before it.
            let at = most.partition_point(|hot| hot.reads + hot.writes >= reads + writes);
            if at >= HOT {
                break;
            }
            most.insert(at, Hot { volume: (*volume).to_owned(), offset: piece * PIECE, reads, writes });
            most.truncate(HOT);
        }
    }
    most
}

fn background(trace: &Trace) -> Vec<Background> {
    let mut nodes: BTreeMap<u16, [u64; 2]> = BTreeMap::new();
    for visit in &trace.background {
        let [requests, bytes] = nodes.entry(visit.node).or_default();
        *requests += 1;
        *bytes = bytes.saturating_add(u64::from(visit.count) * u64::from(visit.block));
    }
    let named =
        |(node, [requests, bytes]): (u16, [u64; 2])| Background { node: stages::node_name(trace, node), requests, bytes };
    nodes.into_iter().map(named).collect()
}
