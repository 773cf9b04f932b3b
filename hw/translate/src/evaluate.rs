//! A graph, carried out.

use crate::{
    graph::{Graph, Id, Op, ones},
    lower::Lowered,
};

fn signed(value: u128, width: u32) -> i128 {
    (value << (128 - width)).cast_signed() >> (128 - width)
}

fn node(graph: &Graph, id: Id, inputs: &[u64], values: &[u128]) -> u128 {
    let of = |id: &Id| values[id.0 as usize];
    let width = graph.width(id);
    let value = match graph.op(id) {
        Op::Input(port) => inputs[*port].into(),
        Op::Const(value) => *value,
        Op::Slice { of: whole, low } => of(whole) >> low,
        Op::Concat(parts) => {
            let (mut value, mut at) = (0, 0);
            for part in parts {
                value |= of(part) << at;
                at += graph.width(*part);
            }
            value
        }
        Op::Not(a) => !of(a),
        Op::And(a, b) => of(a) & of(b),
        Op::Or(a, b) => of(a) | of(b),
        Op::Xor(a, b) => of(a) ^ of(b),
        Op::Add(a, b) => of(a).wrapping_add(of(b)),
        Op::Sub(a, b) => of(a).wrapping_sub(of(b)),
        Op::Mul(a, b) => of(a).wrapping_mul(of(b)),
        Op::Eq(a, b) => (of(a) == of(b)).into(),
        Op::Ult(a, b) => (of(a) < of(b)).into(),
        Op::Slt(a, b) => (signed(of(a), graph.width(*a)) < signed(of(b), graph.width(*b))).into(),
        Op::Mux(c, a, b) => {
            if of(c) == 1 {
                of(a)
            } else {
                of(b)
            }
        }
    };
    value & ones(width)
}

/// The outputs for these inputs.
pub(crate) fn evaluate(lowered: &Lowered, inputs: &[u64]) -> Vec<u64> {
    let graph = &lowered.graph;
    let mut values = Vec::with_capacity(graph.len());
    for id in (0..graph.len() as u32).map(Id) {
        let value = node(graph, id, inputs, &values);
        values.push(value);
    }
    lowered.outputs.iter().map(|(_, id)| values[id.0 as usize] as u64).collect()
}
