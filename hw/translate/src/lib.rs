//! Circuits from the functions in `crates/functions`, by way of the LLVM IR that rustc makes of them.
//!
//! ```text
//!   hardware.rs ─rustc─► LLVM IR ─ir─► blocks ─lower─► graph of bits ─schedule─► stages ─emit─► fn_NAME.sv
//!                           └─ports─► names and widths, from the debugging information
//! ```
//!
//! Every function of the module `hardware` with the shape `fn name(input: &In, output: &mut Out)` becomes a module. rustc has inlined all calls and unrolled
//! all loops; branches become selections, memory is resolved, and what is left is a graph without state. Whatever has no circuit — a loop, a
//! division, a panic, a computed place in memory — is refused, with the function, the instruction and the line that it came from.
//!
//! Invariant: the same IR gives the same bytes.

#![forbid(unsafe_code)]

mod emit;
mod error;
mod evaluate;
mod graph;
mod ir;
mod lex;
mod lower;
pub mod native;
mod ports;
mod rustc;
mod schedule;
pub mod testbench;
#[cfg(test)]
mod tests;

pub use self::{
    error::Refused,
    ports::Port,
    rustc::{FUNCTIONS, llvm_ir},
};
use self::{
    lower::Lowered,
    ports::Metadata,
    schedule::{Interval, Schedule},
};

/// The module whose functions become circuits.
const HARDWARE: &str = "hardware";

/// How a function is built.
#[derive(Clone, Copy, Debug)]
struct Target {
    name: &'static str,
    interval: Interval,
}

/// The functions, in the order of the documentation. The chain is asked once in eight cycles at most, and must be small.
const TARGETS: &[Target] = &[
    Target { name: "chain", interval: Interval::Latency },
    Target { name: "join", interval: Interval::One },
    Target { name: "share", interval: Interval::One },
    Target { name: "throttle", interval: Interval::One },
    Target { name: "replicate", interval: Interval::One },
    Target { name: "cache_submit", interval: Interval::Latency },
    Target { name: "cache_complete", interval: Interval::One },
    Target { name: "copy_submit", interval: Interval::One },
    Target { name: "copy_step", interval: Interval::One },
];

/// Nanoseconds that a stage may take, by the estimate of `schedule`.
pub const PERIOD: f64 = 6.0;

/// A circuit.
#[derive(Clone, Debug)]
pub struct Circuit {
    /// The function's name.
    pub name: String,
    lowered: Lowered,
    schedule: Schedule,
}

impl Circuit {
    /// The fields that it takes; those that it looks at have ports.
    pub fn inputs(&self) -> &[Port] {
        &self.lowered.inputs
    }

    /// The fields that it gives.
    pub fn outputs(&self) -> impl Iterator<Item = &Port> {
        self.lowered.outputs.iter().map(|(port, _)| port)
    }

    /// Cycles from arguments to results.
    pub fn latency(&self) -> usize {
        self.schedule.stages
    }

    /// Whether new arguments may come in every cycle.
    pub fn takes_one_each_cycle(&self) -> bool {
        self.schedule.interval == Interval::One
    }

    /// Whether a field has a port.
    pub fn looks_at(&self, port: usize) -> bool {
        let graph = &self.lowered.graph;
        self.schedule.sources_in_order().iter().any(|id| *graph.op(*id) == graph::Op::Input(port))
    }

    /// The module's text.
    pub fn verilog(&self) -> String {
        emit::module(&self.name, &self.lowered, &self.schedule)
    }

    /// What it gives for some arguments: the graph, carried out here.
    pub fn evaluate(&self, inputs: &[u64]) -> Vec<u64> {
        evaluate::evaluate(&self.lowered, inputs)
    }
}

/// Makes the circuits of all functions in this IR.
///
/// # Errors
/// When a function is missing, or has something that the translator does not understand.
pub fn translate(ir: &str, period: f64) -> Result<Vec<Circuit>, Refused> {
    let (functions, metadata) = (ir::functions(ir), Metadata::new(ir));
    let of = |function: &ir::Function| {
        let subprogram = function.subprogram.as_deref()?;
        metadata.function_in(subprogram, HARDWARE).map(str::to_owned)
    };
    let known = functions.iter().filter_map(of).find(|name| !TARGETS.iter().any(|target| target.name == name));
    if let Some(name) = known {
        return Err(Refused::new(
            &name,
            "it is in crates/functions/src/hardware.rs, but not among the targets in hw/translate/src/lib.rs",
        ));
    }
    TARGETS
        .iter()
        .map(|target| {
            let function = functions.iter().find(|function| of(function).as_deref() == Some(target.name));
            let function = function
                .ok_or_else(|| Refused::new(target.name, "it is not in the IR; is it public, and never inlined?"))?;
            circuit(target.name, function, &metadata, target.interval, period)
        })
        .collect()
}

fn circuit(
    name: &str,
    function: &ir::Function,
    metadata: &Metadata,
    interval: Interval,
    period: f64,
) -> Result<Circuit, Refused> {
    let mut lowered = lower::lower(name, function, metadata)?;
    let outputs: Vec<graph::Id> = lowered.outputs.iter().map(|(_, id)| *id).collect();
    let needed = schedule::evaluation(&lowered.graph, &outputs);
    lowered.graph.merge_sums(&needed);
    let schedule = Schedule::new(&lowered.graph, &outputs, interval, period);
    Ok(Circuit { name: name.to_owned(), lowered, schedule })
}
