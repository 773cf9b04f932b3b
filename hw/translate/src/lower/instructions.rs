//! Instructions that compute something.

use super::{INPUT, Lowering, Meaning};
use crate::{
    graph::{Graph, Id, ones},
    ir::{Instruction, Op, Type, Value},
};

/// Why a call is refused.
pub(super) const CALL: &str = "a call: a panic, or a function that is not inlined; neither has a circuit";

/// Bits of an integer type.
pub(super) fn bits_of(ty: &Type) -> Result<u32, String> {
    match ty {
        Type::Int(width) if (1..=128).contains(width) => Ok(*width),
        other => Err(format!("values of type {other:?} have no circuit; integers of up to 128 bits have")),
    }
}

impl Lowering<'_> {
    pub(super) fn compute(&mut self, at: usize, instruction: &Instruction) -> Result<Option<Meaning>, String> {
        let id = match &instruction.op {
            Op::Binary { kind, ty, a, b } => {
                let width = bits_of(ty)?;
                let (a, b) = (self.bits(a, width)?, self.bits(b, width)?);
                self.binary(kind, a, b)?
            }
            Op::Compare { how, ty, a, b } => {
                let width = bits_of(ty)?;
                let (a, b) = (self.bits(a, width)?, self.bits(b, width)?);
                self.compare(how, a, b)?
            }
            Op::Select { ty, condition, a, b } => {
                let (width, condition) = (bits_of(ty)?, self.bits(condition, 1)?);
                let (a, b) = (self.bits(a, width)?, self.bits(b, width)?);
                self.graph.mux(condition, a, b)
            }
            Op::Cast { kind, from, value, to } => {
                let (from, to) = (bits_of(from)?, bits_of(to)?);
                let value = self.bits(value, from)?;
                match kind.as_str() {
                    "zext" => self.graph.zero_extend(value, to),
                    "sext" => self.graph.sign_extend(value, to),
                    _ => self.graph.slice(value, 0, to),
                }
            }
            Op::Freeze { ty, value } => {
                let width = bits_of(ty)?;
                self.bits(value, width)?
            }
            Op::Load { ty, from } => self.load(at, ty, from)?,
            Op::Store { ty, value, to } => {
                let value = self.bits(value, bits_of(ty)?)?;
                let (object, offset) = self.pointer(to)?;
                if object == INPUT {
                    return Err("it writes what goes in".into());
                }
                self.memories[at].store(&mut self.graph, object, offset, value);
                return Ok(None);
            }
            Op::Element { ty, base, indices } => return Ok(Some(self.element(ty, base, indices)?)),
            Op::Alloca { .. } => {
                self.objects += 1;
                return Ok(Some(Meaning::Pointer(self.objects - 1, 0)));
            }
            Op::Extract { from: Value::Local(name), index } => match self.names.get(name.as_str()) {
                Some(Meaning::Parts(parts)) if (*index as usize) < parts.len() => parts[*index as usize],
                _ => return Err("a part of what is no aggregate".into()),
            },
            Op::Call { name, ty, arguments } => return self.call(at, name, ty, arguments),
            _ if instruction.text.contains("call ") => return Err(CALL.into()),
            _ => return Err("the translator does not know it; write it another way, or teach hw/translate/src/ir.rs".into()),
        };
        Ok(Some(Meaning::Bits(id)))
    }

    fn binary(&mut self, kind: &str, a: Id, b: Id) -> Result<Id, String> {
        let graph = &mut self.graph;
        Ok(match kind {
            "add" => graph.add(a, b),
            "sub" => graph.sub(a, b),
            "mul" => graph.mul(a, b),
            "and" => graph.and(a, b),
            "or" => graph.or(a, b),
            "xor" => graph.xor(a, b),
            "shl" | "lshr" | "ashr" => shift(graph, kind, a, b),
            _ => return Err("a division; it has no small circuit: let the configuration hold the reciprocal".into()),
        })
    }

    fn compare(&mut self, how: &str, a: Id, b: Id) -> Result<Id, String> {
        // More than one bit is set: no counting is needed for that.
        if let (Some(&of), Some(limit)) = (self.counts.get(&a), self.graph.known(b))
            && [("ugt", 1), ("ult", 2)].contains(&(how, limit))
        {
            let minus_one = self.graph.constant(u128::MAX, self.graph.width(of));
            let below = self.graph.add(of, minus_one);
            let rest = self.graph.and(of, below);
            let one_at_most = self.graph.is_zero(rest);
            return Ok(if how == "ult" { one_at_most } else { self.graph.not(one_at_most) });
        }
        let graph = &mut self.graph;
        let (basic, swapped, negated) = match how {
            "eq" => (Graph::eq as fn(&mut Graph, Id, Id) -> Id, false, false),
            "ne" => (Graph::eq as _, false, true),
            "ult" => (Graph::less as _, false, false),
            "ugt" => (Graph::less as _, true, false),
            "uge" => (Graph::less as _, false, true),
            "ule" => (Graph::less as _, true, true),
            "slt" => (Graph::less_signed as _, false, false),
            "sgt" => (Graph::less_signed as _, true, false),
            "sge" => (Graph::less_signed as _, false, true),
            "sle" => (Graph::less_signed as _, true, true),
            other => return Err(format!("comparison {other} is not known")),
        };
        let result = if swapped { basic(graph, b, a) } else { basic(graph, a, b) };
        Ok(if negated { graph.not(result) } else { result })
    }

    fn load(&mut self, at: usize, ty: &Type, from: &Value) -> Result<Id, String> {
        let (width, (object, offset)) = (bits_of(ty)?, self.pointer(from)?);
        let bytes = ty.bytes();
        let whole = if object == INPUT {
            self.load_input(offset, bytes)?
        } else {
            let found = self.memories[at].load(&mut self.graph, object, offset, bytes);
            found.ok_or("it reads memory that it has not written on every way here")?
        };
        Ok(self.graph.slice(whole, 0, width))
    }

    /// Bytes of what goes in, from the fields that lie there.
    pub(super) fn load_input(&mut self, offset: u64, bytes: u64) -> Result<Id, String> {
        let (mut at, end, mut parts) = (offset, offset + bytes, Vec::new());
        while at < end {
            let holds = |port: &crate::ports::Port| port.offset <= at && at < port.offset + u64::from(port.width / 8);
            let Some(number) = self.inputs.iter().position(holds) else {
                // Between fields.
                parts.push(self.graph.constant(0, 8));
                at += 1;
                continue;
            };
            let port = &self.inputs[number];
            let (start, width) = (port.offset, port.width);
            let stop = end.min(start + u64::from(width / 8));
            let input = self.graph.input(number, width);
            parts.push(self.graph.slice(input, (at - start) as u32 * 8, (stop - at) as u32 * 8));
            at = stop;
        }
        if parts.is_empty() { Err("it reads nothing".into()) } else { Ok(self.graph.concat(&parts)) }
    }

    pub(super) fn pointer(&mut self, value: &Value) -> Result<(usize, u64), String> {
        match self.meaning(value, 64)? {
            Meaning::Pointer(object, offset) => Ok((object, offset)),
            _ => Err("a pointer that is not known here; use references to fields, not computed places".into()),
        }
    }

    fn element(&mut self, ty: &Type, base: &Value, indices: &[Value]) -> Result<Meaning, String> {
        let (object, mut offset) = self.pointer(base)?;
        let mut within = Type::Array(u64::MAX, Box::new(ty.clone()));
        for index in indices {
            let index = match self.meaning(index, 64)? {
                Meaning::Bits(id) => self.graph.known(id),
                _ => None,
            };
            let index = index.ok_or("an index that is not constant; select among the elements instead")?;
            let (step, inside) = within.element(index as u64).ok_or("an index into what has no elements")?;
            offset += step;
            within = inside.clone();
        }
        Ok(Meaning::Pointer(object, offset))
    }
}

/// A shift; by more than there is, it is anything.
pub(super) fn shift(graph: &mut Graph, kind: &str, a: Id, by: Id) -> Id {
    let width = graph.width(a);
    let step = |graph: &mut Graph, a: Id, by: u32| match kind {
        "shl" => graph.shift_left(a, by),
        "lshr" => graph.shift_right(a, by, false),
        _ => graph.shift_right(a, by, true),
    };
    if let Some(known) = graph.known(by) {
        return step(graph, a, (known & ones(31)) as u32);
    }
    let mut shifted = a;
    for bit in 0..graph.significant(by).min(width.ilog2() + u32::from(!width.is_power_of_two())) {
        let further = step(graph, shifted, 1 << bit);
        let whether = graph.slice(by, bit, 1);
        shifted = graph.mux(whether, further, shifted);
    }
    shifted
}
