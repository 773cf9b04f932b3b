//! From a function's blocks to a graph: branches become conditions, joins become selections.
//!
//! ```text
//!          d                      for a join j with the dominator d: which of its edges is taken, as conditions
//!         / \ c                   of the branches between d and j; the values that come with the edges are
//!        a   b      ─────►        selected by them. Equal values are one, the last one needs no condition.
//!         \ /
//!          j
//! ```
//!
//! All blocks are carried out: what has no effect but its result costs nothing but its circuit. Memory is resolved here: every pointer is an object and a
//! place in it that are known, and what is stored in a byte is selected at joins as other values are.

mod flow;
mod instructions;
mod intrinsics;
mod memory;

use std::collections::HashMap;

use self::{flow::Flow, memory::Memory};
use crate::{
    error::Refused,
    graph::{Graph, Id},
    ir::{Function, Instruction, Op, Value},
    ports::{Metadata, Port},
};

/// A function as a graph.
#[derive(Clone, Debug)]
pub(crate) struct Lowered {
    pub graph: Graph,
    pub inputs: Vec<Port>,
    pub outputs: Vec<(Port, Id)>,
}

/// What a name stands for.
#[derive(Clone, Debug)]
enum Meaning {
    Bits(Id),
    /// An object, and bytes from its beginning.
    Pointer(usize, u64),
    /// Of an aggregate.
    Parts(Vec<Id>),
    /// Anything: nobody may depend on it.
    Undefined,
}

/// The object that is read only, and the one that is written.
const INPUT: usize = 0;
const OUTPUT: usize = 1;

struct Lowering<'a> {
    function: &'a Function,
    graph: Graph,
    names: HashMap<&'a str, Meaning>,
    inputs: Vec<Port>,
    objects: usize,
    /// Values that count the bits of another one.
    counts: HashMap<Id, Id>,
    flow: Flow,
    /// What memory holds at the end of each block.
    memories: Vec<Memory>,
}

/// Makes the graph of a function.
pub(crate) fn lower(name: &str, function: &Function, metadata: &Metadata) -> Result<Lowered, Refused> {
    let subprogram = function.subprogram.as_deref().unwrap_or_default();
    let parameters = metadata.parameters(subprogram).map_err(|why| Refused::new(name, why))?;
    let [inputs, outputs] = <[_; 2]>::try_from(parameters)
        .map_err(|_| Refused::new(name, "it must have two parameters: `input: &In, output: &mut Out`"))?;
    let flow = Flow::new(function).map_err(|why| Refused::new(name, why))?;
    let mut lowering = Lowering {
        function,
        graph: Graph::default(),
        names: HashMap::new(),
        inputs,
        objects: 2,
        counts: HashMap::new(),
        memories: vec![Memory::default(); function.blocks.len() + 1],
        flow,
    };
    for (at, parameter) in function.parameters.iter().take(2).enumerate() {
        lowering.names.insert(parameter, Meaning::Pointer(at, 0));
    }
    for at in lowering.flow.order.clone() {
        lowering.enter(at);
        for instruction in function.blocks.get(at).map_or(&[][..], |block| &block.instructions) {
            let located = |why: String| {
                let place = instruction.location.as_deref().and_then(|location| metadata.place(location));
                Refused::new(name, why).at(&instruction.text, place.unwrap_or_default())
            };
            lowering.instruction(at, instruction).map_err(located)?;
        }
    }
    let exit = lowering.memories.pop().unwrap_or_default();
    let outputs = outputs.into_iter().map(|port| {
        let bytes = u64::from(port.width / 8);
        let value = exit.load(&mut lowering.graph, OUTPUT, port.offset, bytes);
        let value = value.ok_or_else(|| Refused::new(name, format!("it does not always write `output.{}`", port.name)));
        Ok((port, value?))
    });
    let outputs = outputs.collect::<Result<_, Refused>>()?;
    Ok(Lowered { inputs: lowering.inputs, graph: lowering.graph, outputs })
}

impl<'a> Lowering<'a> {
    /// Begins a block: conditions of its edges, and memory where they meet.
    fn enter(&mut self, at: usize) {
        let before = self.flow.edges_into(at);
        let Some(&first) = before.first() else { return };
        if before.iter().all(|from| *from == first) {
            self.memories[at] = self.memories[first].clone();
            return;
        }
        let conditions = self.flow.conditions(&mut self.graph, at);
        let memories: Vec<&Memory> = before.iter().map(|from| &self.memories[*from]).collect();
        self.memories[at] = Memory::join(&mut self.graph, &memories, &conditions);
    }

    fn instruction(&mut self, at: usize, instruction: &'a Instruction) -> Result<(), String> {
        let meaning = match &instruction.op {
            Op::Phi { ty, incoming } => Some(self.phi(at, ty, incoming)?),
            Op::Branch { condition, targets } => {
                let condition = condition.as_ref().map(|condition| self.bits(condition, 1)).transpose()?;
                let edges = match (condition, &targets[..]) {
                    (Some(condition), [yes, no]) => {
                        let otherwise = self.graph.not(condition);
                        vec![(yes.as_str(), condition), (no.as_str(), otherwise)]
                    }
                    _ => vec![(targets[0].as_str(), self.graph.bit(true))],
                };
                self.flow.leave(&mut self.graph, at, &edges);
                None
            }
            Op::Switch { ty, value, default, cases } => {
                let width = instructions::bits_of(ty)?;
                let value = self.bits(value, width)?;
                let mut edges = Vec::new();
                let mut none = self.graph.bit(true);
                for (case, target) in cases {
                    let case = self.graph.constant(case.cast_unsigned(), width);
                    let taken = self.graph.eq(value, case);
                    let not_taken = self.graph.not(taken);
                    none = self.graph.and(none, not_taken);
                    edges.push((target.as_str(), taken));
                }
                edges.push((default.as_str(), none));
                self.flow.leave(&mut self.graph, at, &edges);
                None
            }
            Op::Return => {
                self.flow.leave_function(&mut self.graph, at);
                None
            }
            Op::Unreachable => None,
            _ => self.compute(at, instruction)?,
        };
        if let (Some(name), Some(meaning)) = (&instruction.result, meaning) {
            if let Meaning::Bits(id) = meaning {
                self.graph.names.entry(id).or_insert_with(|| name.clone());
            }
            self.names.insert(name, meaning);
        }
        Ok(())
    }

    fn phi(&mut self, at: usize, ty: &crate::ir::Type, incoming: &[(Value, String)]) -> Result<Meaning, String> {
        let width = instructions::bits_of(ty)?;
        let before = self.flow.edges_into(at);
        let mut values = Vec::new();
        for from in &before {
            let label = &self.function.blocks[*from].label;
            let value = incoming.iter().find(|(_, block)| block == label);
            let (value, _) = value.ok_or_else(|| format!("no value for the edge from {label}"))?;
            values.push(match self.meaning(value, width)? {
                Meaning::Bits(id) => Some(id),
                Meaning::Undefined => None,
                _ => return Err("a pointer that depends on a branch; let the branch choose the value behind it".into()),
            });
        }
        let conditions = self.flow.conditions(&mut self.graph, at);
        Ok(match flow::choose(&mut self.graph, &values, &conditions) {
            Some(id) => Meaning::Bits(id),
            None => Meaning::Undefined,
        })
    }

    /// What an operand of so many bits stands for.
    fn meaning(&mut self, value: &Value, width: u32) -> Result<Meaning, String> {
        match value {
            Value::Int(known) => Ok(Meaning::Bits(self.graph.constant(known.cast_unsigned(), width))),
            Value::Undef => Ok(Meaning::Undefined),
            Value::Local(name) => {
                self.names.get(name.as_str()).cloned().ok_or_else(|| format!("%{name} is not known: is there a loop?"))
            }
        }
    }

    /// An operand as bits.
    fn bits(&mut self, value: &Value, width: u32) -> Result<Id, String> {
        match self.meaning(value, width)? {
            Meaning::Bits(id) if self.graph.width(id) == width => Ok(id),
            Meaning::Bits(id) => Err(format!("an operand has {} bits, not {width}", self.graph.width(id))),
            Meaning::Undefined => Ok(self.graph.constant(0, width)),
            _ => Err("a pointer where a number is needed".into()),
        }
    }
}
