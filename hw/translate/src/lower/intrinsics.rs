//! Calls: LLVM's own functions, of which each has a circuit. There are no others; what is not inlined is refused.

use super::{
    INPUT, Lowering, Meaning,
    instructions::{CALL, bits_of},
};
use crate::{
    graph::{Graph, Id},
    ir::{Type, Value},
};

/// Calls that say something to the compiler only.
const SAYING: &[&str] = &["llvm.experimental.noalias.scope.decl", "llvm.assume", "llvm.lifetime", "llvm.dbg"];

/// Results of most two-operand functions.
fn two(graph: &mut Graph, name: &str, a: Id, b: Id) -> Option<Id> {
    let width = graph.width(a);
    Some(match name {
        "umin" | "umax" => {
            let less = graph.less(a, b);
            if name == "umin" { graph.mux(less, a, b) } else { graph.mux(less, b, a) }
        }
        "smin" | "smax" => {
            let less = graph.less_signed(a, b);
            if name == "smin" { graph.mux(less, a, b) } else { graph.mux(less, b, a) }
        }
        "usub.sat" => {
            let (difference, borrow) = subtract(graph, a, b);
            let zero = graph.constant(0, width);
            graph.mux(borrow, zero, difference)
        }
        "uadd.sat" => {
            let (sum, carry) = add(graph, a, b);
            let most = graph.constant(u128::MAX, width);
            graph.mux(carry, most, sum)
        }
        _ => return None,
    })
}

/// Sum and carry.
fn add(graph: &mut Graph, a: Id, b: Id) -> (Id, Id) {
    let width = graph.width(a);
    let (a, b) = (graph.zero_extend(a, width + 1), graph.zero_extend(b, width + 1));
    let sum = graph.add(a, b);
    (graph.slice(sum, 0, width), graph.slice(sum, width, 1))
}

/// Difference and borrow, from one subtractor as wide as its operands need.
fn subtract(graph: &mut Graph, a: Id, b: Id) -> (Id, Id) {
    let width = graph.width(a);
    let needed = graph.significant(a).max(graph.significant(b)).max(1);
    let (narrow_a, narrow_b) = (graph.slice(a, 0, needed), graph.slice(b, 0, needed));
    let (wide_a, wide_b) = (graph.zero_extend(narrow_a, needed + 1), graph.zero_extend(narrow_b, needed + 1));
    let difference = graph.sub(wide_a, wide_b);
    let (low, borrow) = (graph.slice(difference, 0, needed), graph.slice(difference, needed, 1));
    if needed == width {
        return (low, borrow);
    }
    let above: Vec<Id> = std::iter::once(low).chain((needed..width).map(|_| borrow)).collect();
    (graph.concat(&above), borrow)
}

/// Bits that are set, as a number of `width` bits.
fn count(graph: &mut Graph, a: Id, width: u32) -> Id {
    let own = graph.width(a);
    if own == 1 {
        return graph.zero_extend(a, width);
    }
    let (low, high) = (graph.slice(a, 0, own / 2), graph.slice(a, own / 2, own - own / 2));
    let (low, high) = (count(graph, low, width), count(graph, high, width));
    graph.add(low, high)
}

/// Zeroes below the lowest bit that is set, or all.
fn trailing_zeros(graph: &mut Graph, a: Id, width: u32) -> Id {
    let own = graph.width(a);
    if own == 1 {
        let none = graph.not(a);
        return graph.zero_extend(none, width);
    }
    let half = own.next_power_of_two() / 2;
    let (low, high) = (graph.slice(a, 0, half), graph.slice(a, half, own - half));
    let none = graph.is_zero(low);
    let (low, high) = (trailing_zeros(graph, low, width), trailing_zeros(graph, high, width));
    let offset = graph.constant(half.into(), width);
    let high = graph.add(high, offset);
    graph.mux(none, high, low)
}

fn reversed(graph: &mut Graph, a: Id, step: u32) -> Id {
    let pieces: Vec<Id> = (0..graph.width(a) / step).rev().map(|at| graph.slice(a, at * step, step)).collect();
    graph.concat(&pieces)
}

impl Lowering<'_> {
    pub(super) fn call(
        &mut self,
        at: usize,
        name: &str,
        ty: &Type,
        arguments: &[(Type, Value)],
    ) -> Result<Option<Meaning>, String> {
        if SAYING.iter().any(|saying| name.starts_with(saying)) {
            return Ok(None);
        }
        let Some(name) = name.strip_prefix("llvm.") else {
            return Err(CALL.into());
        };
        if name.starts_with("memcpy.") || name.starts_with("memmove.") || name.starts_with("memset.") {
            return self.move_bytes(at, name, arguments).map(|()| None);
        }
        let short = name.rsplit_once(".i").map_or(name, |(short, _)| short);
        let Some((Type::Int(width), _)) = arguments.first() else { return Err(format!("llvm.{name} has no circuit")) };
        let values = arguments.iter().filter(|(ty, _)| *ty == Type::Int(*width)).map(|(_, value)| value);
        let values = values.map(|value| self.bits(value, *width)).collect::<Result<Vec<Id>, String>>()?;
        let graph = &mut self.graph;
        if let ("uadd.with.overflow" | "usub.with.overflow", [a, b]) = (short, &values[..]) {
            let (value, over) = if short.starts_with("uadd") { add(graph, *a, *b) } else { subtract(graph, *a, *b) };
            return Ok(Some(Meaning::Parts(vec![value, over])));
        }
        let result = bits_of(ty)?;
        let id = match (short, &values[..]) {
            (_, [a, b]) if two(graph, short, *a, *b).is_some() => two(graph, short, *a, *b).expect("just found"),
            ("ctpop", [a]) => {
                let counted = count(graph, *a, result);
                self.counts.insert(counted, *a);
                counted
            }
            ("abs", [a, ..]) => {
                let (zero, sign) = (graph.constant(0, *width), graph.slice(*a, width - 1, 1));
                let negative = graph.sub(zero, *a);
                graph.mux(sign, negative, *a)
            }
            ("cttz", [a, ..]) => trailing_zeros(graph, *a, result),
            ("ctlz", [a, ..]) => {
                let turned = reversed(graph, *a, 1);
                trailing_zeros(graph, turned, result)
            }
            ("bitreverse", [a]) => reversed(graph, *a, 1),
            ("bswap", [a]) => reversed(graph, *a, 8),
            ("fshl" | "fshr", [a, b, by]) => {
                let by = graph.known(*by).ok_or("a rotation by what is not constant")? as u32 % width;
                let both = graph.concat(&[*b, *a]);
                let low = if short == "fshl" { (width - by) % width + u32::from(by == 0) * width } else { by };
                graph.slice(both, low, *width)
            }
            _ => {
                return Err(format!(
                    "llvm.{name} has no circuit; write it another way, or teach hw/translate/src/lower/intrinsics.rs"
                ));
            }
        };
        Ok(Some(Meaning::Bits(id)))
    }

    fn move_bytes(&mut self, at: usize, name: &str, arguments: &[(Type, Value)]) -> Result<(), String> {
        let [(_, to), (_, from), (_, bytes), ..] = arguments else { return Err("too few arguments".into()) };
        let length = match bytes {
            Value::Int(bytes) => u64::try_from(*bytes).map_err(|_| "a negative length")?,
            _ => return Err("a length that is not constant".into()),
        };
        let to = self.pointer(to)?;
        if name.starts_with("memset.") {
            let byte = self.bits(from, 8)?;
            for place in 0..length {
                self.memories[at].store(&mut self.graph, to.0, to.1 + place, byte);
            }
            return Ok(());
        }
        let from = self.pointer(from)?;
        if from.0 == INPUT {
            let words = self.inputs.clone();
            for port in words
                .iter()
                .filter(|port| port.offset >= from.1 && port.offset + u64::from(port.width / 8) <= from.1 + length)
            {
                let value = self.load_input(port.offset, u64::from(port.width / 8))?;
                self.memories[at].store(&mut self.graph, to.0, to.1 + port.offset - from.1, value);
            }
        } else {
            self.memories[at].copy(to, from, length);
        }
        Ok(())
    }
}
