//! Where the time went: no moment of a request belongs to two stages, and the stages of one that its volume was asked for once add up to it.
//!
//! ```text
//!   seen ─ queue ─ fetched ─ checks ─ first node ═══ nodes, each without those below ═══ last node ─ answer ─ completed ─ interrupt
//! ```
//!
//! A node's time is what it had the request without a node below having it: the union of its visits, less theirs. Nodes that work at once
//! (the legs of a mirror) both count.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Latency;
use crate::requests::{Request, Trace};

/// A part of a request's way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// What it is called.
    pub name: String,
    /// What it is.
    pub what: String,
    /// How long it took those requests that had it.
    pub latency: Latency,
    /// Its part of the time of all requests, in thousandths. What comes after the completion is no part of it.
    pub permille: Option<u64>,
}

/// Time that these intervals cover.
fn covered(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    let (mut sum, mut until) = (0_u64, 0);
    for (begin, end) in intervals {
        sum = sum.saturating_add(end.saturating_sub(begin.max(until)));
        until = until.max(end);
    }
    sum
}

/// How long a request was at each node, without the nodes below.
pub(crate) fn own_times(request: &Request) -> BTreeMap<u16, u64> {
    let mut below = vec![Vec::new(); request.visits.len()];
    for visit in &request.visits {
        if let Some((list, end)) = visit.within.and_then(|above| below.get_mut(above)).zip(visit.end) {
            list.push((visit.begin, end));
        }
    }
    let mut times: BTreeMap<u16, u64> = BTreeMap::new();
    for (visit, mut below) in request.visits.iter().zip(below) {
        let Some(end) = visit.end else { continue };
        for (from, until) in &mut below {
            (*from, *until) = ((*from).max(visit.begin), (*until).min(end));
        }
        below.retain(|(from, until)| from < until);
        let time = times.entry(visit.node).or_default();
        *time = time.saturating_add(end.saturating_sub(visit.begin).saturating_sub(covered(below)));
    }
    times
}

/// From when to when volumes had a request.
fn at_volumes(request: &Request) -> Option<(u64, u64)> {
    let roots = || request.visits.iter().filter(|visit| visit.within.is_none());
    Some((roots().map(|visit| visit.begin).min()?, roots().filter_map(|visit| visit.end).max()?))
}

/// A node's name for people.
pub(crate) fn node_name(trace: &Trace, node: u16) -> String {
    let Some(name) = trace.nodes.get(&node) else { return format!("node {node}") };
    format!("{}/{}", name.volume, name.name)
}

/// All stages, in the order of a request's way.
pub(super) fn stages(trace: &Trace) -> Vec<Stage> {
    let [mut queue, mut checks, mut answer, mut interrupt, mut nowhere] = [(); 5].map(|()| Vec::new());
    let mut nodes: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
    let mut total = 0_u128;
    for request in &trace.requests {
        let Some(completed) = request.completed else { continue };
        total += u128::from(completed.saturating_sub(request.began()));
        queue.extend(request.seen.map(|seen| request.fetched.saturating_sub(seen)));
        match at_volumes(request) {
            Some((begin, end)) => {
                checks.push(begin.saturating_sub(request.fetched));
                answer.push(completed.saturating_sub(end));
            }
            None => nowhere.push(completed.saturating_sub(request.fetched)),
        }
        for (node, time) in own_times(request) {
            nodes.entry(node).or_default().push(time);
        }
        interrupt.extend(request.interrupted.map(|interrupted| interrupted.saturating_sub(completed)));
    }
    let stage = |name: &str, what: &str, times: Vec<u64>, counts: bool| {
        let sum: u128 = times.iter().map(|time| u128::from(*time)).sum();
        let permille = counts.then(|| (sum * 1000).checked_div(total).unwrap_or_default() as u64);
        Stage { name: name.to_owned(), what: what.to_owned(), latency: Latency::of(times), permille }
    };
    let mut stages = vec![
        stage("queue", "in the guest's queue, after the daemon had seen it", queue, true),
        stage("checks", "fetched, checked, its memory found", checks, true),
        stage("no volume", "answered by the front end alone", nowhere, true),
    ];
    for (node, times) in nodes {
        let leaf = trace.nodes.get(&node).is_some_and(|node| node.leaf);
        let what = if leaf { "back end" } else { "service, without what is below" };
        stages.push(stage(&node_name(trace, node), what, times, true));
    }
    stages.push(stage("answer", "done, until the guest can see it", answer, true));
    stages.push(stage("interrupt", "visible, until the interrupt", interrupt, false));
    stages.retain(|stage| stage.latency.count > 0);
    stages
}
