//! Which edges lead where, and when each is taken.

use std::collections::HashMap;

use crate::{
    graph::{Graph, Id},
    ir::{Function, Op},
};

/// Blocks by number; the one after the last is where the function ends.
pub(super) struct Flow {
    labels: HashMap<String, usize>,
    /// Every block after those that lead to it.
    pub order: Vec<usize>,
    before: Vec<Vec<usize>>,
    dominator: Vec<usize>,
    /// For each block, where it goes and when, as its last instruction says.
    leaving: Vec<Vec<(usize, Id)>>,
}

fn targets(op: &Op) -> Vec<&str> {
    match op {
        Op::Branch { targets, .. } => targets.iter().map(String::as_str).collect(),
        Op::Switch { default, cases, .. } => {
            cases.iter().map(|(_, target)| target.as_str()).chain([default.as_str()]).collect()
        }
        _ => Vec::new(),
    }
}

impl Flow {
    pub(super) fn new(function: &Function) -> Result<Self, String> {
        let exit = function.blocks.len();
        let labels: HashMap<String, usize> =
            function.blocks.iter().enumerate().map(|(at, block)| (block.label.clone(), at)).collect();
        let mut after = vec![Vec::new(); exit + 1];
        for (at, block) in function.blocks.iter().enumerate() {
            let last = block.instructions.last().map_or(&Op::Unknown, |last| &last.op);
            if *last == Op::Return {
                after[at].push(exit);
            }
            for target in targets(last) {
                let target = *labels.get(target).ok_or_else(|| format!("a branch to {target}, which is not there"))?;
                if !leads_nowhere(function, target) && !after[at].contains(&target) {
                    after[at].push(target);
                }
            }
        }
        let mut flow = Self {
            labels,
            order: Vec::new(),
            before: vec![Vec::new(); exit + 1],
            dominator: vec![0; exit + 1],
            leaving: vec![Vec::new(); exit + 1],
        };
        flow.sort(function, &after)?;
        for at in flow.order.clone() {
            for target in &after[at] {
                flow.before[*target].push(at);
            }
        }
        flow.dominators();
        Ok(flow)
    }

    fn sort(&mut self, function: &Function, after: &[Vec<usize>]) -> Result<(), String> {
        // 0: new, 1: on the way, 2: done.
        let (mut marks, mut stack, mut done) = (vec![0; after.len()], vec![(0, 0)], Vec::new());
        marks[0] = 1;
        while let Some((at, next)) = stack.pop() {
            let Some(target) = after[at].get(next) else {
                marks[at] = 2;
                done.push(at);
                continue;
            };
            stack.push((at, next + 1));
            match marks[*target] {
                0 => {
                    marks[*target] = 1;
                    stack.push((*target, 0));
                }
                1 => {
                    let label = function.blocks.get(*target).map_or("", |block| &block.label);
                    return Err(format!(
                        "a loop is left at block {label}; give it a small constant bound, so that it is unrolled"
                    ));
                }
                _ => {}
            }
        }
        done.reverse();
        if !done.contains(&function.blocks.len()) {
            return Err("it never returns".into());
        }
        self.order = done;
        Ok(())
    }

    fn dominators(&mut self) {
        let mut rank = vec![usize::MAX; self.before.len()];
        for (at, block) in self.order.iter().enumerate() {
            rank[*block] = at;
        }
        for block in &self.order[1..] {
            let mut common = self.before[*block][0];
            for from in &self.before[*block][1..] {
                let mut other = *from;
                while common != other {
                    if rank[common] > rank[other] {
                        common = self.dominator[common];
                    } else {
                        other = self.dominator[other];
                    }
                }
            }
            self.dominator[*block] = common;
        }
    }

    /// Blocks that lead to a block, each once.
    pub(super) fn edges_into(&self, at: usize) -> Vec<usize> {
        self.before[at].clone()
    }

    /// A block ends: where it goes, and when.
    pub(super) fn leave(&mut self, graph: &mut Graph, at: usize, edges: &[(&str, Id)]) {
        let mut leaving: Vec<(usize, Id)> = Vec::new();
        for (target, condition) in edges {
            let target = self.labels[*target];
            if !self.before[target].contains(&at) {
                continue;
            }
            match leaving.iter_mut().find(|(known, _)| *known == target) {
                Some((_, known)) => *known = graph.or(*known, *condition),
                None => leaving.push((target, *condition)),
            }
        }
        if let [(_, only)] = &mut leaving[..] {
            // Others lead nowhere.
            *only = graph.bit(true);
        }
        self.leaving[at] = leaving;
    }

    /// The function ends here.
    pub(super) fn leave_function(&mut self, graph: &mut Graph, at: usize) {
        let exit = self.before.len() - 1;
        self.leaving[at] = vec![(exit, graph.bit(true))];
    }

    /// When each of the edges into a block is taken, once its dominator is reached.
    pub(super) fn conditions(&self, graph: &mut Graph, at: usize) -> Vec<Id> {
        let from = self.dominator[at];
        let mut reached: HashMap<usize, Id> = HashMap::from([(from, graph.bit(true))]);
        let mut edges: HashMap<usize, Id> = HashMap::new();
        let start = self.order.iter().position(|block| *block == from).unwrap_or(0);
        for block in &self.order[start..] {
            if *block == at {
                break;
            }
            let Some(&here) = reached.get(block) else { continue };
            for (target, condition) in &self.leaving[*block] {
                let taken = graph.and(here, *condition);
                if *target == at {
                    edges.insert(*block, taken);
                } else {
                    let sum = match reached.get(target) {
                        Some(known) => graph.or(*known, taken),
                        None => taken,
                    };
                    reached.insert(*target, sum);
                }
            }
        }
        self.before[at].iter().map(|block| edges.get(block).copied().unwrap_or_else(|| graph.bit(false))).collect()
    }
}

/// A block that only says that nothing comes here.
fn leads_nowhere(function: &Function, at: usize) -> bool {
    matches!(&function.blocks[at].instructions[..], [only] if only.op == Op::Unreachable)
}

/// The value whose condition holds, one of which does; `None` is any.
pub(super) fn choose(graph: &mut Graph, values: &[Option<Id>], conditions: &[Id]) -> Option<Id> {
    let mut groups: Vec<(Id, Id, usize)> = Vec::new();
    for (value, condition) in values.iter().zip(conditions) {
        let Some(value) = value else { continue };
        match groups.iter_mut().find(|(known, ..)| known == value) {
            Some((_, known, count)) => {
                *known = graph.or(*known, *condition);
                *count += 1;
            }
            None => groups.push((*value, *condition, 1)),
        }
    }
    // The one that most edges bring needs no condition.
    let default = (0..groups.len()).max_by_key(|at| (groups[*at].2, usize::MAX - at))?;
    let (mut chosen, ..) = groups.remove(default);
    for (value, condition, _) in groups.into_iter().rev() {
        chosen = graph.mux(condition, value, chosen);
    }
    Some(chosen)
}
