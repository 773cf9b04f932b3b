//! In what order blocks are used: one after the other, or here and there.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::direction;
use crate::requests::Trace;

/// How many requests back a request's predecessor may be: queues are served in turn, and several streams go beside each other.
const LOOK_BACK: u64 = 64;

/// The order of reads, or of writes, of a volume by one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Order {
    /// "vm1 data read".
    pub name: String,
    /// Requests.
    pub requests: u64,
    /// Those that begin where one of the 64 before them has ended.
    pub sequential: u64,
    /// The mean length of a run of such requests in bytes.
    pub mean_run: u64,
    /// The longest run.
    pub longest_run: u64,
}

#[derive(Default)]
struct Runs {
    order: Order,
    /// The last requests, in order, but for those that were gone on from.
    last: VecDeque<Last>,
    /// How many there are.
    count: u64,
    bytes: u64,
}

/// One of the last requests.
struct Last {
    /// Which one it was.
    number: u64,
    end: u64,
    /// Bytes of its run so far.
    run: u64,
}

pub(super) fn orders(trace: &Trace) -> Vec<Order> {
    let mut found: BTreeMap<(u16, u16, &str, bool), Runs> = BTreeMap::new();
    for request in &trace.requests {
        let ((offset, bytes), Some(writes)) = (trace.range(request), direction(request)) else { continue };
        if bytes == 0 {
            continue;
        }
        let volume = trace.namespace(request).map_or("?", |namespace| namespace.volume.as_str());
        let runs = found.entry((request.key.device, request.nsid, volume, writes)).or_insert_with(|| {
            let device = trace.devices.get(&request.key.device).map_or("?", |device| device.name.as_str());
            let name = format!("{device} {volume} {}", if writes { "write" } else { "read" });
            Runs { order: Order { name, ..Order::default() }, ..Runs::default() }
        });
        runs.order.requests += 1;
        runs.bytes = runs.bytes.saturating_add(bytes);
        let number = runs.order.requests;
        while runs.last.front().is_some_and(|last| number - last.number > LOOK_BACK) {
            runs.last.pop_front();
        }
        let before = runs.last.iter().position(|last| last.end == offset).and_then(|at| runs.last.remove(at));
        runs.order.sequential += u64::from(before.is_some());
        runs.count += u64::from(before.is_none());
        let run = before.map_or(0, |last| last.run).saturating_add(bytes);
        runs.order.longest_run = runs.order.longest_run.max(run);
        runs.last.push_back(Last { number, end: offset.saturating_add(bytes), run });
    }
    let finished = |runs: Runs| Order { mean_run: runs.bytes / runs.count.max(1), ..runs.order };
    found.into_values().map(finished).collect()
}
