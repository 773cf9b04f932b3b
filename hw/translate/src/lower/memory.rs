//! What memory holds: for each byte of each object a byte of a value.

use std::collections::BTreeMap;

use super::flow;
use crate::graph::{Graph, Id};

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// Object and place to a value, and which byte of it.
    bytes: BTreeMap<(usize, u64), (Id, u32)>,
}

impl Memory {
    pub(super) fn store(&mut self, graph: &mut Graph, object: usize, offset: u64, value: Id) {
        let whole = graph.width(value).div_ceil(8) * 8;
        let value = graph.zero_extend(value, whole);
        for byte in 0..whole / 8 {
            self.bytes.insert((object, offset + u64::from(byte)), (value, byte));
        }
    }

    /// What lies there; `None`: nothing that was written.
    pub(super) fn load(&self, graph: &mut Graph, object: usize, offset: u64, bytes: u64) -> Option<Id> {
        let cells = (0..bytes).map(|at| self.bytes.get(&(object, offset + at)).copied());
        let cells = cells.collect::<Option<Vec<_>>>()?;
        let mut parts = Vec::new();
        for run in cells.chunk_by(|a, b| a.0 == b.0 && a.1 + 1 == b.1) {
            parts.push(graph.slice(run[0].0, run[0].1 * 8, run.len() as u32 * 8));
        }
        Some(graph.concat(&parts))
    }

    /// Forgets what lies there, or copies what lies elsewhere.
    pub(super) fn copy(&mut self, to: (usize, u64), from: (usize, u64), bytes: u64) {
        let cells: Vec<_> = (0..bytes).map(|at| self.bytes.get(&(from.0, from.1 + at)).copied()).collect();
        for (at, cell) in cells.into_iter().enumerate() {
            let place = (to.0, to.1 + at as u64);
            match cell {
                Some(cell) => self.bytes.insert(place, cell),
                None => self.bytes.remove(&place),
            };
        }
    }

    /// Memory after several ways, of which one was taken.
    pub(super) fn join(graph: &mut Graph, ways: &[&Self], conditions: &[Id]) -> Self {
        let mut places: Vec<(usize, u64)> = ways.iter().flat_map(|way| way.bytes.keys().copied()).collect();
        places.sort_unstable();
        places.dedup();
        let cells = |place: &(usize, u64)| ways.iter().map(|way| way.bytes.get(place).copied()).collect::<Vec<_>>();
        let follows = |a: &(usize, u64), b: &(usize, u64)| {
            let next = |a: &Option<(Id, u32)>| a.map(|(id, byte)| (id, byte + 1));
            a.0 == b.0 && a.1 + 1 == b.1 && cells(a).iter().map(next).eq(cells(b))
        };
        let mut joined = Self::default();
        for run in places.chunk_by(follows) {
            let first = cells(&run[0]);
            if first.iter().all(|cell| *cell == first[0]) {
                joined.bytes.extend(run.iter().map(|place| (*place, cells(place)[0].expect("of a way"))));
                continue;
            }
            let width = run.len() as u32 * 8;
            let values: Vec<Option<Id>> =
                first.iter().map(|cell| cell.map(|(id, byte)| graph.slice(id, byte * 8, width))).collect();
            if let Some(value) = flow::choose(graph, &values, conditions) {
                joined.store(graph, run[0].0, run[0].1, value);
            }
        }
        joined
    }
}
