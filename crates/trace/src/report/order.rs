//! In what order blocks are used: one after the other, or here and there.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::direction;
use crate::requests::Trace;

/// How many requests back a request's predecessor may be: queues are served in turn, and several streams go beside each other.
const LOOK_BACK: usize = 64;

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
    /// Ends of the last requests, each with the bytes of its run so far; those that were gone on from are taken out.
    ends: VecDeque<(u64, u64)>,
    /// How many there are.
    count: u64,
    bytes: u64,
}

pub(super) fn orders(trace: &Trace) -> Vec<Order> {
    let mut found: BTreeMap<(u16, u16, bool), Runs> = BTreeMap::new();
    for request in &trace.requests {
        let ((offset, bytes), Some(writes)) = (trace.range(request), direction(request)) else { continue };
        if bytes == 0 {
            continue;
        }
        let runs = found.entry((request.key.device, request.nsid, writes)).or_insert_with(|| {
            let device = trace.devices.get(&request.key.device).map_or("?", |device| device.name.as_str());
            let volume = trace.namespace(request).map_or("?", |namespace| namespace.volume.as_str());
            let name = format!("{device} {volume} {}", if writes { "write" } else { "read" });
            Runs { order: Order { name, ..Order::default() }, ..Runs::default() }
        });
        runs.order.requests += 1;
        runs.bytes = runs.bytes.saturating_add(bytes);
        let before = runs.ends.iter().position(|(end, _)| *end == offset).and_then(|at| runs.ends.remove(at));
        runs.order.sequential += u64::from(before.is_some());
        runs.count += u64::from(before.is_none());
        let run = before.map_or(0, |(_, run)| run).saturating_add(bytes);
        runs.order.longest_run = runs.order.longest_run.max(run);
        runs.ends.push_back((offset.saturating_add(bytes), run));
        if runs.ends.len() > LOOK_BACK {
            runs.ends.pop_front();
        }
    }
    let finished = |runs: Runs| Order { mean_run: runs.bytes / runs.count.max(1), ..runs.order };
    found.into_values().map(finished).collect()
}
