//! When each operation is carried out: stages between registers.
//!
//! ```text
//!   inputs ─► stage 0 ─┤reg├─► stage 1 ─┤reg├─► … ─► stage L-1 ─┤reg├─► outputs        latency L
//! ```
//!
//! First every operation comes as early as its operands and the clock allow. Then operations move, one at a time, as long as fewer bits must be
//! kept in registers. Delays are estimates for a slow 7-series part, wires included: what counts is that a stage is not much longer than others.
//!
//! With an interval of 1 a value that is used later travels along from register to register, inputs too. With an interval of the latency inputs stay
//! as they are, and a value needs one register.

use std::collections::{HashMap, HashSet};

use crate::graph::{Graph, Id, Op, ones, operands};

/// How often new arguments may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interval {
    /// In every cycle.
    One,
    /// When the results of the last ones are there; arguments stay until then.
    Latency,
}

/// Nanoseconds from the clock's edge to a register's output, and before the next edge.
const EDGES: f64 = 0.8;

/// Some bits of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaf {
    Const { value: u128, width: u32 },
    Bits { source: Id, low: u32, width: u32 },
}

/// What wires a value consists of, lowest first.
pub(crate) fn leaves(graph: &Graph, id: Id) -> Vec<Leaf> {
    let width = graph.width(id);
    match graph.op(id) {
        Op::Const(value) => vec![Leaf::Const { value: *value, width }],
        Op::Slice { of, low } => vec![Leaf::Bits { source: graph.carrier(*of), low: *low, width }],
        Op::Concat(parts) => parts.iter().flat_map(|part| leaves(graph, *part)).collect(),
        _ => vec![Leaf::Bits { source: graph.carrier(id), low: 0, width }],
    }
}

/// Nanoseconds of an operation.
fn delay(graph: &Graph, id: Id) -> f64 {
    let (op, width) = (graph.op(id), f64::from(graph.width(id)));
    let compared = |a: &Id| f64::from(graph.width(*a));
    match op {
        Op::Input(_) | Op::Const(_) | Op::Slice { .. } | Op::Concat(_) | Op::Not(_) => 0.0,
        Op::And(..) | Op::Or(..) | Op::Xor(..) => 0.5,
        Op::Add(..) | Op::Sub(..) => 1.2 + 0.03 * width,
        Op::Mul(..) => 4.0,
        Op::Ult(a, _) | Op::Slt(a, _) => 1.2 + 0.03 * compared(a),
        Op::Eq(a, b) => {
            let bits = compared(a) * if graph.known(*b).is_some() { 1.0 } else { 2.0 };
            0.8 * bits.log(6.0).ceil().max(1.0)
        }
        Op::Mux(..) => 0.6 + 0.005 * width,
    }
}

/// Everything that outputs need, operands first.
pub(crate) fn evaluation(graph: &Graph, outputs: &[Id]) -> Vec<Id> {
    let (mut order, mut seen) = (Vec::new(), HashSet::new());
    let mut stack: Vec<(Id, bool)> = outputs.iter().rev().map(|id| (*id, false)).collect();
    while let Some((id, ready)) = stack.pop() {
        let id = graph.carrier(id);
        if ready {
            order.push(id);
        } else if seen.insert(id) {
            stack.push((id, true));
            stack.extend(operands(graph.op(id)).into_iter().rev().map(|operand| (operand, false)));
        }
    }
    order
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub interval: Interval,
    /// Stages, which is the latency.
    pub stages: usize,
    /// Operations that count, in the order of evaluation.
    pub order: Vec<Id>,
    stage: HashMap<Id, usize>,
    /// For each operation or input, who uses which bits; `None`: an output.
    uses: HashMap<Id, Vec<(Option<Id>, u128)>>,
    period: f64,
}

impl Schedule {
    pub(crate) fn new(graph: &Graph, outputs: &[Id], interval: Interval, period: f64) -> Self {
        let is_operation = |op: &Op| !matches!(op, Op::Input(_) | Op::Const(_) | Op::Slice { .. } | Op::Concat(_));
        let order: Vec<Id> = evaluation(graph, outputs).into_iter().filter(|id| is_operation(graph.op(*id))).collect();
        let mut uses: HashMap<Id, Vec<(Option<Id>, u128)>> = HashMap::new();
        let wanted = order.iter().flat_map(|id| operands(graph.op(*id)).into_iter().map(|operand| (Some(*id), operand)));
        for (user, value) in wanted.chain(outputs.iter().map(|output| (None, *output))) {
            for leaf in leaves(graph, value) {
                if let Leaf::Bits { source, low, width } = leaf {
                    uses.entry(source).or_default().push((user, ones(width) << low));
                }
            }
        }
        let mut schedule = Self { interval, stages: 1, order, stage: HashMap::new(), uses, period };
        schedule.as_early_as_possible(graph);
        schedule.save_registers(graph);
        schedule
    }

    /// The stage of an operation; inputs are there from the beginning.
    pub(crate) fn stage(&self, id: Id) -> usize {
        self.stage.get(&id).copied().unwrap_or(0)
    }

    fn sources(graph: &Graph, id: Id) -> Vec<Id> {
        let leaves = operands(graph.op(id)).into_iter().flat_map(|operand| leaves(graph, operand));
        leaves.filter_map(|leaf| if let Leaf::Bits { source, .. } = leaf { Some(source) } else { None }).collect()
    }

    fn as_early_as_possible(&mut self, graph: &Graph) {
        let mut arrival: HashMap<Id, f64> = HashMap::new();
        for id in self.order.clone() {
            let sources = Self::sources(graph, id);
            let mut stage = sources.iter().map(|source| self.stage(*source)).max().unwrap_or(0);
            let here = sources.iter().filter(|source| self.stage(**source) == stage);
            let start = here.filter_map(|source| arrival.get(source)).fold(EDGES, |a, b| a.max(*b));
            let mut end = start + delay(graph, id);
            if end > self.period && start > EDGES {
                stage += 1;
                end = EDGES + delay(graph, id);
            }
            self.stage.insert(id, stage);
            arrival.insert(id, end);
            self.stages = self.stages.max(stage + 1);
        }
    }

    /// Whether every operation ends in time.
    fn in_time(&self, graph: &Graph, sources: &HashMap<Id, Vec<Id>>) -> bool {
        let mut arrival: HashMap<Id, f64> = HashMap::new();
        self.order.iter().all(|id| {
            let stage = self.stage(*id);
            let here = sources[id].iter().filter(|source| self.stage(**source) == stage);
            let start = here.filter_map(|source| arrival.get(source)).fold(EDGES, |a, b| a.max(*b));
            let end = start + delay(graph, *id);
            arrival.insert(*id, end);
            end <= self.period || start <= EDGES
        })
    }

    fn save_registers(&mut self, graph: &Graph) {
        let sources: HashMap<Id, Vec<Id>> = self.order.iter().map(|id| (*id, Self::sources(graph, *id))).collect();
        let mut cost = self.register_bits(graph);
        for _ in 0..6 {
            let before = cost;
            for id in self.order.clone().into_iter().rev() {
                let now = self.stage(id);
                let first = sources[&id].iter().map(|source| self.stage(*source)).max().unwrap_or(0);
                let users = self.uses[&id].iter().filter_map(|(user, _)| *user);
                let last = users.map(|user| self.stage(user)).min().unwrap_or(self.stages - 1);
                let mut best = now;
                for stage in first..=last {
                    self.stage.insert(id, stage);
                    let bits = self.register_bits(graph);
                    if bits < cost && self.in_time(graph, &sources) {
                        (best, cost) = (stage, bits);
                    }
                }
                self.stage.insert(id, best);
            }
            if cost == before {
                break;
            }
        }
    }

    /// Which bits of a value are kept in registers, and after which stage.
    pub(crate) fn kept(&self, graph: &Graph, source: Id) -> Vec<(usize, u128)> {
        let (made, input) = (self.stage(source), matches!(graph.op(source), Op::Input(_)));
        let used = |from: usize| {
            let uses = self.uses[&source].iter();
            let later = uses.filter(|(user, _)| user.map_or(self.stages, |user| self.stage(user)) >= from);
            later.fold(0, |mask, (_, bits)| mask | bits)
        };
        let cuts = match (self.interval, input) {
            (Interval::One, _) => made + 1..self.stages + 1,
            (Interval::Latency, true) => self.stages..self.stages + 1,
            (Interval::Latency, false) => made + 1..made + 2,
        };
        cuts.map(|cut| (cut, used(cut))).filter(|(_, mask)| *mask != 0).collect()
    }

    /// Bits in registers, all together.
    pub(crate) fn register_bits(&self, graph: &Graph) -> u32 {
        self.uses.keys().flat_map(|source| self.kept(graph, *source)).map(|(_, mask)| mask.count_ones()).sum()
    }

    /// Operations and inputs that something is kept of, in order.
    pub(crate) fn sources_in_order(&self) -> Vec<Id> {
        let mut sources: Vec<Id> = self.uses.keys().copied().collect();
        sources.sort_unstable();
        sources
    }

    /// All bits of a value that anybody uses.
    pub(crate) fn used(&self, source: Id) -> u128 {
        self.uses.get(&source).map_or(0, |uses| uses.iter().fold(0, |mask, (_, bits)| mask | bits))
    }
}
