//! What sizes the leaves of a new volume are told, and which nobody tells one.

use millrace_block::BlockSize;

use super::{Leaf, Node, NodeError, PLAIN_LEAVES, ServiceNode, node_name};
use crate::{concat, registry};

impl Node {
    /// All leaves, from left to right, each with the size that a new volume of this size tells it; `None`: it has its own.
    pub fn sized_leaves(&self, size: Option<u64>, block_size: BlockSize) -> Vec<(&Leaf, Option<u64>)> {
        match self {
            Self::Leaf(leaf) => vec![(leaf, size.or(stated(self)))],
            Self::Service(node) => {
                let sizes = told(node, size, block_size).unwrap_or_else(|| vec![None; node.legs.len()]);
                let below = node.legs.iter().zip(sizes);
                below.flat_map(|(leg, size)| leg.sized_leaves(size, block_size)).collect()
            }
        }
    }

    /// Checks that each leaf in memory of a new volume has a size: what its `size=` says, or what the services above leave it of
    /// the volume's. A file may have its own, which is not looked at.
    ///
    /// # Errors
    /// The first leaf that has none.
    pub fn check_sizes(&self, size: Option<u64>, block_size: BlockSize) -> Result<(), NodeError> {
        self.check_sizes_below(size, block_size, &node_name("", self.word(), None), &mut Vec::new())
    }

    fn check_sizes_below(
        &self,
        size: Option<u64>,
        block_size: BlockSize,
        name: &str,
        path: &mut Vec<usize>,
    ) -> Result<(), NodeError> {
        let Self::Service(node) = self else { return Ok(()) };
        // What is wrong with its settings is told by others.
        let Some(sizes) = told(node, size, block_size) else { return Ok(()) };
        let stated: Vec<_> = node.legs.iter().map(stated).collect();
        for (at, (leg, size_of_leg)) in node.legs.iter().zip(sizes).enumerate() {
            let name = node_name(name, leg.word(), Some(at));
            path.push(at);
            if size_of_leg.or(stated[at]).is_none() && PLAIN_LEAVES.contains(&leg.word()) {
                let before = if node.service == concat::KIND.name { &stated[..at] } else { &[] };
                let what = want(leg.word(), size, before);
                return Err(NodeError { node: name, setting: None, what, path: path.clone() });
            }
            leg.check_sizes_below(size_of_leg, block_size, &name, path)?;
            path.pop();
        }
        Ok(())
    }
}

/// What a service tells its legs where it has this size.
fn told(node: &ServiceNode, size: Option<u64>, block_size: BlockSize) -> Option<Vec<Option<u64>>> {
    let plan = registry::find(&node.service).and_then(|kind| (kind.plan)(&node.settings).ok())?;
    let stated: Vec<_> = node.legs.iter().map(stated).collect();
    Some(match size {
        Some(size) => plan.leg_sizes(size, &stated, block_size),
        None => stated,
    })
}

fn stated(leg: &Node) -> Option<u64> {
    leg.as_leaf().and_then(|leaf| leaf.settings.size("size").ok().flatten())
}

/// What a leaf lacks. `before` are the legs that take theirs first.
fn want(leaf: &str, size: Option<u64>, before: &[Option<u64>]) -> String {
    let needed = format!("it needs a size: {leaf}(size=…)");
    let taken = before.iter().try_fold(0_u64, |sum, size| sum.checked_add((*size)?));
    match size.zip(taken).filter(|_| !before.is_empty()) {
        Some((size, taken)) => {
            format!("{needed}; the legs before it have {} together, and the volume {}", text(taken), text(size))
        }
        None => needed,
    }
}

/// A size as the operator writes it.
fn text(bytes: u64) -> String {
    let units = ["", "K", "M", "G", "T"];
    let whole = |unit: &usize| bytes > 0 && bytes.is_multiple_of(1_u64 << (10 * unit));
    let unit = (1..units.len()).rev().find(whole).unwrap_or(0);
    format!("{}{}", bytes >> (10 * unit), units[unit])
}
