//! A function as a graph of operations on bits, which is kept small while it is built.
//!
//! ```text
//!   inputs, constants ──wires: slice, concat──► operations: not and or xor add sub mul eq ult slt mux ──wires──► outputs
//! ```
//!
//! What is known of a value's bits is in its shape: constant bits are parts of a concatenation, so `x & 0xff` is eight bits of `x` beside zeroes, and
//! an addition of such values is an adder of nine bits. Each operation exists once, however often it is written.
//!
//! Invariant: operands are made before what uses them, so numbers are in the order of evaluation.

use std::collections::{HashMap, HashSet};

/// A value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(pub u32);

/// What a value is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    /// A port, by its number.
    Input(usize),
    Const(u128),
    /// Bits from `low` on.
    Slice {
        of: Id,
        low: u32,
    },
    /// Parts, lowest first.
    Concat(Vec<Id>),
    Not(Id),
    And(Id, Id),
    Or(Id, Id),
    Xor(Id, Id),
    Add(Id, Id),
    Sub(Id, Id),
    Mul(Id, Id),
    Eq(Id, Id),
    /// Less, without sign.
    Ult(Id, Id),
    /// Less, with sign.
    Slt(Id, Id),
    /// The second if the first is set, else the third.
    Mux(Id, Id, Id),
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    nodes: Vec<(Op, u32)>,
    unique: HashMap<(Op, u32), Id>,
    /// What a value was called.
    pub names: HashMap<Id, String>,
    /// Sums that are the lower bits of a wider one.
    merged: HashMap<Id, Id>,
}

/// The lowest bits set.
pub(crate) fn ones(width: u32) -> u128 {
    if width >= 128 { u128::MAX } else { (1 << width) - 1 }
}

/// What an operation needs.
pub(crate) fn operands(op: &Op) -> Vec<Id> {
    match op {
        Op::Input(_) | Op::Const(_) => Vec::new(),
        Op::Slice { of, .. } => vec![*of],
        Op::Concat(parts) => parts.clone(),
        Op::Not(a) => vec![*a],
        Op::Mux(c, a, b) => vec![*c, *a, *b],
        Op::And(a, b)
        | Op::Or(a, b)
        | Op::Xor(a, b)
        | Op::Add(a, b)
        | Op::Sub(a, b)
        | Op::Mul(a, b)
        | Op::Eq(a, b)
        | Op::Ult(a, b)
        | Op::Slt(a, b) => vec![*a, *b],
    }
}

impl Graph {
    pub(crate) fn op(&self, id: Id) -> &Op {
        &self.nodes[id.0 as usize].0
    }

    pub(crate) fn width(&self, id: Id) -> u32 {
        self.nodes[id.0 as usize].1
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The operation that has a value's bits as its lowest ones.
    pub(crate) fn carrier(&self, id: Id) -> Id {
        self.merged.get(&id).map_or(id, |wider| self.carrier(*wider))
    }

    /// Whether a value is made from another one.
    fn depends(&self, id: Id, on: Id) -> bool {
        let (mut stack, mut seen) = (vec![id], HashSet::new());
        while let Some(id) = stack.pop().map(|id| self.carrier(id)) {
            if id == on {
                return true;
            }
            if seen.insert(id) {
                stack.extend(operands(self.op(id)));
            }
        }
        false
    }

    /// Finds sums that are the lower bits of a wider one which is needed anyway: a difference and its borrow are one subtractor.
    pub(crate) fn merge_sums(&mut self, live: &[Id]) {
        let is_sum = |op: &Op| matches!(op, Op::Add(..) | Op::Sub(..) | Op::Mul(..));
        let mut sums: Vec<Id> = live.iter().copied().filter(|id| is_sum(self.op(*id))).collect();
        sums.sort_by_key(|id| (std::cmp::Reverse(self.width(*id)), *id));
        for (at, narrow) in sums.iter().copied().enumerate() {
            for wide in sums[..at].iter().copied().filter(|wide| self.width(*wide) > self.width(narrow)).collect::<Vec<_>>()
            {
                if self.is_part(narrow, wide) && !self.depends(wide, narrow) {
                    self.merged.insert(narrow, wide);
                    break;
                }
            }
        }
    }

    /// Whether a sum is the lower bits of another one.
    fn is_part(&mut self, narrow: Id, wide: Id) -> bool {
        let (small, large) = (self.op(narrow).clone(), self.op(wide).clone());
        let [(a, b), (c, d)] = [small.clone(), large.clone()].map(|op| match op {
            Op::Add(a, b) | Op::Sub(a, b) | Op::Mul(a, b) => (a, b),
            _ => unreachable!("sums only"),
        });
        let width = self.width(narrow);
        let (c, d) = (self.slice(c, 0, width), self.slice(d, 0, width));
        let straight = (a, b) == (c, d) || (!matches!(small, Op::Sub(..)) && (a, b) == (d, c));
        straight && std::mem::discriminant(&small) == std::mem::discriminant(&large)
    }

    /// The value of this shape, as it is.
    fn raw(&mut self, op: Op, width: u32) -> Id {
        assert!((1..=128).contains(&width), "{op:?} has {width} bits");
        if let Some(id) = self.unique.get(&(op.clone(), width)) {
            return *id;
        }
        let id = Id(self.nodes.len() as u32);
        self.nodes.push((op.clone(), width));
        self.unique.insert((op, width), id);
        id
    }

    pub(crate) fn input(&mut self, port: usize, width: u32) -> Id {
        self.raw(Op::Input(port), width)
    }

    pub(crate) fn constant(&mut self, value: u128, width: u32) -> Id {
        self.raw(Op::Const(value & ones(width)), width)
    }

    pub(crate) fn bit(&mut self, value: bool) -> Id {
        self.constant(value.into(), 1)
    }

    /// A constant's value.
    pub(crate) fn known(&self, id: Id) -> Option<u128> {
        match self.op(id) {
            Op::Const(value) => Some(*value),
            _ => None,
        }
    }

    /// Parts, lowest first, none of them a concatenation.
    pub(crate) fn parts(&self, id: Id) -> Vec<Id> {
        match self.op(id) {
            Op::Concat(parts) => parts.clone(),
            _ => vec![id],
        }
    }

    /// The largest value that the constant bits allow.
    fn most(&self, id: Id) -> u128 {
        let parts = self.parts(id);
        parts.iter().rev().fold(0, |sum, part| {
            let width = self.width(*part);
            sum.checked_shl(width).unwrap_or(0) | self.known(*part).unwrap_or(ones(width))
        })
    }

    /// The smallest value that the constant bits allow.
    fn least(&self, id: Id) -> u128 {
        let parts = self.parts(id);
        parts
            .iter()
            .rev()
            .fold(0, |sum, part| sum.checked_shl(self.width(*part)).unwrap_or(0) | self.known(*part).unwrap_or(0))
    }

    /// Bits that can be set.
    pub(crate) fn significant(&self, id: Id) -> u32 {
        128 - self.most(id).leading_zeros()
    }

    /// Lowest bits that are known to be 0.
    fn low_zeros(&self, id: Id) -> u32 {
        let parts = self.parts(id);
        match self.known(parts[0]) {
            Some(0) => self.width(parts[0]),
            Some(value) => value.trailing_zeros(),
            None => 0,
        }
    }

    pub(crate) fn concat(&mut self, parts: &[Id]) -> Id {
        let flat: Vec<Id> = parts.iter().flat_map(|part| self.parts(*part)).collect();
        let mut merged: Vec<Id> = Vec::new();
        for part in flat {
            let together = merged.last().and_then(|last| self.joined(*last, part));
            match together {
                Some(together) => *merged.last_mut().expect("has a last one") = together,
                None => merged.push(part),
            }
        }
        if let [only] = merged[..] {
            return only;
        }
        let width = merged.iter().map(|part| self.width(*part)).sum();
        self.raw(Op::Concat(merged), width)
    }

    /// Two neighbours as one, if they are constants or neighbours of one value.
    fn joined(&mut self, low: Id, high: Id) -> Option<Id> {
        let (low_width, width) = (self.width(low), self.width(low) + self.width(high));
        if let (Some(a), Some(b)) = (self.known(low), self.known(high)) {
            return Some(self.constant(a | (b << low_width), width));
        }
        let &Op::Slice { of: high_of, low: high_at } = self.op(high) else { return None };
        let (of, at) = match *self.op(low) {
            Op::Slice { of, low } => (of, low),
            _ => (low, 0),
        };
        (of == high_of && at + low_width == high_at).then(|| self.slice(of, at, width))
    }

    pub(crate) fn slice(&mut self, of: Id, low: u32, width: u32) -> Id {
        let whole = self.width(of);
        assert!(width > 0 && low + width <= whole, "bits {low}+{width} of {whole}");
        if width == whole {
            return of;
        }
        match self.op(of).clone() {
            Op::Const(value) => self.constant(value >> low, width),
            Op::Slice { of, low: further } => self.slice(of, low + further, width),
            Op::Concat(parts) => {
                let (mut at, mut taken) = (0, Vec::new());
                for part in parts {
                    let end = at + self.width(part);
                    let (from, to) = (low.max(at), (low + width).min(end));
                    if from < to {
                        taken.push(self.slice(part, from - at, to - from));
                    }
                    at = end;
                }
                self.concat(&taken)
            }
            Op::Not(a) => {
                let a = self.slice(a, low, width);
                self.not(a)
            }
            Op::And(a, b) | Op::Or(a, b) | Op::Xor(a, b) => {
                let op = self.op(of).clone();
                let (a, b) = (self.slice(a, low, width), self.slice(b, low, width));
                self.bitwise(&op, a, b)
            }
            Op::Mux(c, a, b) => {
                let (a, b) = (self.slice(a, low, width), self.slice(b, low, width));
                self.mux(c, a, b)
            }
            Op::Add(a, b) | Op::Sub(a, b) | Op::Mul(a, b) if low + width < whole => {
                let op = self.op(of).clone();
                let (a, b) = (self.slice(a, 0, low + width), self.slice(b, 0, low + width));
                let narrow = match op {
                    Op::Add(..) => self.add(a, b),
                    Op::Sub(..) => self.sub(a, b),
                    _ => self.mul(a, b),
                };
                self.slice(narrow, low, width)
            }
            _ => self.raw(Op::Slice { of, low }, width),
        }
    }

    pub(crate) fn zero_extend(&mut self, id: Id, width: u32) -> Id {
        let more = width - self.width(id);
        if more == 0 {
            return id;
        }
        let zeros = self.constant(0, more);
        self.concat(&[id, zeros])
    }

    pub(crate) fn sign_extend(&mut self, id: Id, width: u32) -> Id {
        let top = self.slice(id, self.width(id) - 1, 1);
        let mut parts = vec![id];
        parts.extend((self.width(id)..width).map(|_| top));
        self.concat(&parts)
    }

    /// Where constants of some values begin and end, or turn from 0 to 1.
    fn cuts(&self, values: &[Id], all: bool) -> Vec<u32> {
        let mut cuts = vec![0];
        for value in values {
            let mut at = 0;
            for part in self.parts(*value) {
                let width = self.width(part);
                if let Some(known) = self.known(part) {
                    cuts.extend(
                        (0..width).filter(|bit| *bit == 0 || (known >> bit ^ known >> (bit - 1)) & 1 == 1).map(|b| at + b),
                    );
                    cuts.push(at + width);
                } else if all {
                    cuts.extend([at, at + width]);
                }
                at += width;
            }
        }
        cuts.push(self.width(values[0]));
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    pub(crate) fn not(&mut self, a: Id) -> Id {
        match self.op(a).clone() {
            Op::Const(value) => self.constant(!value, self.width(a)),
            Op::Not(a) => a,
            Op::Concat(parts) if parts.iter().any(|part| self.known(*part).is_some()) => {
                let parts: Vec<Id> = parts.into_iter().map(|part| self.not(part)).collect();
                self.concat(&parts)
            }
            _ => self.raw(Op::Not(a), self.width(a)),
        }
    }

    pub(crate) fn and(&mut self, a: Id, b: Id) -> Id {
        self.bitwise(&Op::And(a, b), a, b)
    }

    pub(crate) fn or(&mut self, a: Id, b: Id) -> Id {
        self.bitwise(&Op::Or(a, b), a, b)
    }

    pub(crate) fn xor(&mut self, a: Id, b: Id) -> Id {
        self.bitwise(&Op::Xor(a, b), a, b)
    }

    /// And, or, xor, by the ranges in which constants are the same.
    fn bitwise(&mut self, op: &Op, a: Id, b: Id) -> Id {
        let cuts = self.cuts(&[a, b], false);
        let mut parts = Vec::new();
        for range in cuts.windows(2) {
            let (low, width) = (range[0], range[1] - range[0]);
            let (a, b) = (self.slice(a, low, width), self.slice(b, low, width));
            parts.push(self.bitwise_part(op, a, b));
        }
        self.concat(&parts)
    }

    fn bitwise_part(&mut self, op: &Op, a: Id, b: Id) -> Id {
        let width = self.width(a);
        let (a, b) = if a <= b { (a, b) } else { (b, a) };
        let constant = self.known(a).map(|k| (k, b)).or(self.known(b).map(|k| (k, a)));
        if let Some((known, other)) = constant {
            return match (op, known == 0) {
                (Op::And(..), true) | (Op::Or(..), false) => self.constant(known, width),
                (Op::And(..), false) | (Op::Or(..) | Op::Xor(..), true) => other,
                _ => self.not(other),
            };
        }
        if a == b {
            return if matches!(op, Op::Xor(..)) { self.constant(0, width) } else { a };
        }
        match op {
            Op::Xor(..) => self.raw(Op::Xor(a, b), width),
            Op::And(..) => {
                if self.not(a) == b {
                    return self.constant(0, width);
                }
                self.raw(Op::And(a, b), width)
            }
            _ => self.or_part(a, b, width),
        }
    }

    /// Or, with what conditions of paths come to: `p&q | p&!q` is `p`, `p | !p&q` is `p|q`.
    fn or_part(&mut self, a: Id, b: Id, width: u32) -> Id {
        let not_a = self.not(a);
        if not_a == b {
            return self.constant(ones(width), width);
        }
        if let (&Op::And(p, q), &Op::And(r, s)) = (self.op(a), self.op(b)) {
            for (p, q, r, s) in [(p, q, r, s), (p, q, s, r), (q, p, r, s), (q, p, s, r)] {
                if p == r && self.not(q) == s {
                    return p;
                }
            }
        }
        for (a, b) in [(a, b), (b, a)] {
            let not_a = self.not(a);
            if let &Op::And(p, q) = self.op(b) {
                if p == a || q == a {
                    return a;
                }
                if p == not_a || q == not_a {
                    return self.or(a, if p == not_a { q } else { p });
                }
            }
        }
        self.raw(Op::Or(a, b), width)
    }

    pub(crate) fn add(&mut self, a: Id, b: Id) -> Id {
        let width = self.width(a);
        let (a, b) = if self.known(a).is_some() { (b, a) } else { (a, b) };
        match (self.known(a), self.known(b)) {
            (Some(a), Some(b)) => return self.constant(a.wrapping_add(b), width),
            (None, Some(0)) => return a,
            _ => {}
        }
        let low = self.low_zeros(a).max(self.low_zeros(b)).min(width);
        if low > 0 && low < width {
            let other = if self.low_zeros(a) >= low { b } else { a };
            let below = self.slice(other, 0, low);
            let (a, b) = (self.slice(a, low, width - low), self.slice(b, low, width - low));
            let above = self.add(a, b);
            return self.concat(&[below, above]);
        }
        if low == width {
            return if self.known(a) == Some(0) { b } else { a };
        }
        let most = self.most(a).checked_add(self.most(b));
        let needed = most.map_or(128, |most| 128 - most.leading_zeros());
        if needed < width {
            let (a, b) = (self.slice(a, 0, needed), self.slice(b, 0, needed));
            let sum = self.add(a, b);
            return self.zero_extend(sum, width);
        }
        for (a, b) in [(a, b), (b, a)] {
            // x + 1 + y is one subtraction: x - !y.
            if let &Op::Add(x, one) = self.op(a)
                && self.known(one) == Some(1)
                && self.known(b).is_none()
            {
                let b = self.not(b);
                return self.sub(x, b);
            }
        }
        let (a, b) = if self.known(b).is_none() && b < a { (b, a) } else { (a, b) };
        self.raw(Op::Add(a, b), width)
    }

    pub(crate) fn sub(&mut self, a: Id, b: Id) -> Id {
        let width = self.width(a);
        if a == b {
            return self.constant(0, width);
        }
        if let Some(known) = self.known(b) {
            let negative = self.constant(known.wrapping_neg(), width);
            return self.add(a, negative);
        }
        let low = self.low_zeros(b);
        if low > 0 {
            let below = self.slice(a, 0, low);
            let (a, b) = (self.slice(a, low, width - low), self.slice(b, low, width - low));
            let above = self.sub(a, b);
            return self.concat(&[below, above]);
        }
        let needed = self.significant(a).max(self.significant(b)) + 1;
        if needed < width {
            let (a, b) = (self.slice(a, 0, needed), self.slice(b, 0, needed));
            let difference = self.sub(a, b);
            return self.sign_extend(difference, width);
        }
        self.raw(Op::Sub(a, b), width)
    }

    pub(crate) fn mul(&mut self, a: Id, b: Id) -> Id {
        let width = self.width(a);
        let (a, b) = if self.known(a).is_some() { (b, a) } else { (a, b) };
        match (self.known(a), self.known(b)) {
            (Some(a), Some(b)) => return self.constant(a.wrapping_mul(b), width),
            (None, Some(known)) if known == 0 || known.is_power_of_two() => {
                return self.shift_left(a, if known == 0 { width } else { known.trailing_zeros() });
            }
            _ => {}
        }
        let needed = self.significant(a) + self.significant(b);
        if needed < width {
            let (a, b) = (self.slice(a, 0, needed), self.slice(b, 0, needed));
            let product = self.mul(a, b);
            return self.zero_extend(product, width);
        }
        let (a, b) = if self.known(b).is_none() && b < a { (b, a) } else { (a, b) };
        self.raw(Op::Mul(a, b), width)
    }

    /// By a known number of bits.
    pub(crate) fn shift_left(&mut self, a: Id, by: u32) -> Id {
        let width = self.width(a);
        if by == 0 {
            return a;
        }
        if by >= width {
            return self.constant(0, width);
        }
        let (zeros, kept) = (self.constant(0, by), self.slice(a, 0, width - by));
        self.concat(&[zeros, kept])
    }

    /// By a known number of bits; `sign` comes in from above.
    pub(crate) fn shift_right(&mut self, a: Id, by: u32, sign: bool) -> Id {
        let width = self.width(a);
        let by = by.min(if sign { width - 1 } else { width });
        if by == width {
            return self.constant(0, width);
        }
        let kept = self.slice(a, by, width - by);
        if sign { self.sign_extend(kept, width) } else { self.zero_extend(kept, width) }
    }

    pub(crate) fn eq(&mut self, a: Id, b: Id) -> Id {
        if a == b {
            return self.bit(true);
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for range in self.cuts(&[a, b], false).windows(2) {
            let (low, width) = (range[0], range[1] - range[0]);
            let (a, b) = (self.slice(a, low, width), self.slice(b, low, width));
            match (self.known(a), self.known(b)) {
                (Some(a), Some(b)) if a == b => {}
                (Some(_), Some(_)) => return self.bit(false),
                _ if a == b => {}
                _ => {
                    left.push(a);
                    right.push(b);
                }
            }
        }
        if left.is_empty() {
            return self.bit(true);
        }
        let (a, b) = (self.concat(&left), self.concat(&right));
        let (a, b) = if self.known(a).is_some() || (self.known(b).is_none() && b < a) { (b, a) } else { (a, b) };
        if self.width(a) == 1 {
            let different = self.xor(a, b);
            return self.not(different);
        }
        if let (&Op::Mux(c, x, y), Some(known)) = (self.op(a), self.known(b))
            && let (Some(x), Some(y)) = (self.known(x), self.known(y))
        {
            let (x, y) = (self.bit(x == known), self.bit(y == known));
            return self.mux(c, x, y);
        }
        self.raw(Op::Eq(a, b), 1)
    }

    pub(crate) fn is_zero(&mut self, a: Id) -> Id {
        let zero = self.constant(0, self.width(a));
        self.eq(a, zero)
    }

    /// Less, without sign.
    pub(crate) fn less(&mut self, a: Id, b: Id) -> Id {
        if a == b || self.least(a) >= self.most(b) {
            return self.bit(false);
        }
        if self.most(a) < self.least(b) {
            return self.bit(true);
        }
        let needed = self.significant(a).max(self.significant(b));
        let (a, b) = (self.slice(a, 0, needed), self.slice(b, 0, needed));
        if let Some(limit) = self.known(b).filter(|limit| limit.is_power_of_two()) {
            let low = limit.trailing_zeros();
            let above = self.slice(a, low, needed - low);
            return self.is_zero(above);
        }
        if let Some(limit) = self.known(a).filter(|limit| (limit + 1).is_power_of_two()) {
            let low = (limit + 1).trailing_zeros();
            let above = self.slice(b, low, needed - low);
            let zero = self.is_zero(above);
            return self.not(zero);
        }
        self.raw(Op::Ult(a, b), 1)
    }

    /// Less, with sign.
    pub(crate) fn less_signed(&mut self, a: Id, b: Id) -> Id {
        let top = self.width(a) - 1;
        if self.significant(a).max(self.significant(b)) <= top {
            return self.less(a, b);
        }
        if let (Some(a), Some(b)) = (self.known(a), self.known(b)) {
            // With the sign turned over the order is that without sign.
            return self.bit(a ^ (1 << top) < b ^ (1 << top));
        }
        if self.known(b) == Some(0) {
            return self.slice(a, top, 1);
        }
        self.raw(Op::Slt(a, b), 1)
    }

    /// What a value is where a condition is known.
    fn given(&mut self, value: Id, condition: Id, known: bool) -> Id {
        let (opposite, parts) = (self.not(condition), self.parts(value));
        if !parts.contains(&condition) && !parts.contains(&opposite) {
            return value;
        }
        let known_part = |graph: &mut Self, part: Id| match part {
            part if part == condition => graph.bit(known),
            part if part == opposite => graph.bit(!known),
            part => part,
        };
        let parts: Vec<Id> = parts.into_iter().map(|part| known_part(self, part)).collect();
        self.concat(&parts)
    }

    #[allow(clippy::many_single_char_names, reason = "c ? a : b, as everybody writes it")]
    pub(crate) fn mux(&mut self, c: Id, a: Id, b: Id) -> Id {
        if let Some(known) = self.known(c) {
            return if known == 1 { a } else { b };
        }
        if a == b {
            return a;
        }
        if let &Op::Not(c) = self.op(c) {
            return self.mux(c, b, a);
        }
        let (a, b) = (self.given(a, c, true), self.given(b, c, false));
        if self.width(a) == 1 {
            return self.mux_bit(c, a, b);
        }
        // Only where they differ; neighbours that differ stay together.
        let (mut parts, mut differing): (Vec<Id>, Option<(u32, u32)>) = (Vec::new(), None);
        let cuts = self.cuts(&[a, b], true);
        for range in cuts.windows(2) {
            let (low, end) = (range[0], range[1]);
            let (x, y) = (self.slice(a, low, end - low), self.slice(b, low, end - low));
            if x == y {
                if let Some((from, to)) = differing.take() {
                    parts.push(self.mux_part(c, a, b, from, to));
                }
                parts.push(x);
            } else {
                differing = Some((differing.map_or(low, |(from, _)| from), end));
            }
        }
        if let Some((from, to)) = differing {
            parts.push(self.mux_part(c, a, b, from, to));
        }
        self.concat(&parts)
    }

    fn mux_part(&mut self, c: Id, a: Id, b: Id, from: u32, to: u32) -> Id {
        let (a, b) = (self.slice(a, from, to - from), self.slice(b, from, to - from));
        if self.width(a) == 1 {
            return self.mux_bit(c, a, b);
        }
        if let &Op::Mux(d, x, y) = self.op(a) {
            if d == c {
                return self.mux(c, x, b);
            }
            if y == b || x == b {
                let d = if y == b { d } else { self.not(d) };
                let both = self.and(c, d);
                return self.mux(both, if y == b { x } else { y }, b);
            }
        }
        if let &Op::Mux(d, x, y) = self.op(b) {
            if d == c {
                return self.mux(c, a, y);
            }
            if x == a || y == a {
                let d = if x == a { d } else { self.not(d) };
                let either = self.or(c, d);
                return self.mux(either, a, if x == a { y } else { x });
            }
        }
        self.raw(Op::Mux(c, a, b), to - from)
    }

    fn mux_bit(&mut self, c: Id, a: Id, b: Id) -> Id {
        if a == b {
            return a;
        }
        let not_c = self.not(c);
        match (self.known(a), self.known(b)) {
            (Some(1), _) => self.or(c, b),
            (Some(_), _) => self.and(not_c, b),
            (_, Some(0)) => self.and(c, a),
            (_, Some(_)) => self.or(not_c, a),
            _ if a == c => self.or(c, b),
            _ if b == c => self.and(c, a),
            _ => self.raw(Op::Mux(c, a, b), 1),
        }
    }
}
