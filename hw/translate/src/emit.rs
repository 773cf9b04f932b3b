//! A scheduled graph as a SystemVerilog module.

use std::{collections::HashMap, fmt::Write};

use crate::{
    graph::{Graph, Id, Op, operands},
    lower::Lowered,
    schedule::{Interval, Leaf, Schedule, leaves},
};

struct Emitter<'a> {
    lowered: &'a Lowered,
    schedule: &'a Schedule,
    names: HashMap<Id, String>,
}

/// Neighbouring bits of a mask, as lowest and count.
fn runs(mask: u128) -> Vec<(u32, u32)> {
    let (mut found, mut rest) = (Vec::new(), mask);
    while rest != 0 {
        let low = rest.trailing_zeros();
        let width = (rest >> low).trailing_ones();
        found.push((low, width));
        rest &= !(crate::graph::ones(width) << low);
    }
    found
}

fn range(width: u32) -> String {
    if width == 1 { String::new() } else { format!("[{}:0] ", width - 1) }
}

/// The module's text.
pub(crate) fn module(name: &str, lowered: &Lowered, schedule: &Schedule) -> String {
    let graph = &lowered.graph;
    let mut names = HashMap::new();
    for id in schedule.sources_in_order() {
        if let Op::Input(port) = graph.op(id) {
            names.insert(id, format!("in_{}", lowered.inputs[*port].name));
        }
    }
    for (number, id) in schedule.order.iter().enumerate() {
        let hint = graph.names.get(id).map_or("", String::as_str).trim_start_matches(['_', '.']);
        let hint: String = hint.chars().take_while(char::is_ascii_alphabetic).collect();
        let usable = hint.len() > 2 && !hint.starts_with("sroa") && !hint.starts_with("spec") && !hint.starts_with("sink");
        names.insert(*id, if usable { format!("{}_{number}", hint.to_lowercase()) } else { format!("n{number}") });
    }
    Emitter { lowered, schedule, names }.module(name)
}

impl Emitter<'_> {
    fn graph(&self) -> &Graph {
        &self.lowered.graph
    }

    /// A register's name.
    fn register(&self, source: Id, cut: usize, (low, width): (u32, u32)) -> String {
        let name = &self.names[&source];
        if width == self.graph().width(source) {
            return format!("{name}_s{cut}");
        }
        format!("{name}_{}_{low}_s{cut}", low + width - 1)
    }

    /// Bits of a value, as seen in a stage.
    fn bits(&self, source: Id, low: u32, width: u32, stage: usize) -> String {
        let (graph, schedule) = (self.graph(), self.schedule);
        let (made, input) = (schedule.stage(source), matches!(graph.op(source), Op::Input(_)));
        let direct = match schedule.interval {
            Interval::One => made == stage,
            Interval::Latency => (input && stage < schedule.stages) || (!input && made == stage),
        };
        let (name, from, whole) = if direct {
            (self.names[&source].clone(), 0, graph.width(source))
        } else {
            let kept = schedule.kept(graph, source);
            let (cut, mask) = match schedule.interval {
                Interval::One => *kept.iter().find(|(cut, _)| *cut == stage).expect("kept until it is used"),
                Interval::Latency => kept[0],
            };
            let run = runs(mask).into_iter().find(|(from, count)| *from <= low && low + width <= from + count);
            let run = run.expect("what is used is kept");
            (self.register(source, cut, run), run.0, run.1)
        };
        match (width == whole, width) {
            (true, _) => name,
            (false, 1) => format!("{name}[{}]", low - from),
            _ => format!("{name}[{}:{}]", low - from + width - 1, low - from),
        }
    }

    /// A value as an expression, as seen in a stage.
    fn value(&self, id: Id, stage: usize) -> String {
        let parts = leaves(self.graph(), id).into_iter().map(|leaf| match leaf {
            Leaf::Const { value, width } => format!("{width}'h{value:x}"),
            Leaf::Bits { source, low, width } => self.bits(source, low, width, stage),
        });
        let parts: Vec<String> = parts.collect();
        let repeated: Vec<String> = parts
            .chunk_by(|a, b| a == b)
            .map(|same| if let [only] = same { only.clone() } else { format!("{{{}{{{}}}}}", same.len(), same[0]) })
            .collect();
        match &repeated[..] {
            [only] => only.clone(),
            several => format!("{{{}}}", several.iter().rev().map(String::as_str).collect::<Vec<_>>().join(", ")),
        }
    }

    fn expression(&self, id: Id) -> String {
        let stage = self.schedule.stage(id);
        let op = self.graph().op(id);
        let values: Vec<String> = operands(op).into_iter().map(|operand| self.value(operand, stage)).collect();
        match (op, &values[..]) {
            (Op::Not(_), [a]) => format!("~{a}"),
            (Op::And(..), [a, b]) => format!("{a} & {b}"),
            (Op::Or(..), [a, b]) => format!("{a} | {b}"),
            (Op::Xor(..), [a, b]) => format!("{a} ^ {b}"),
            (Op::Add(..), [a, b]) => format!("{a} + {b}"),
            (Op::Sub(..), [a, b]) => format!("{a} - {b}"),
            (Op::Mul(..), [a, b]) => format!("{a} * {b}"),
            (Op::Eq(..), [a, b]) => format!("{a} == {b}"),
            (Op::Ult(..), [a, b]) => format!("{a} < {b}"),
            (Op::Slt(..), [a, b]) => format!("$signed({a}) < $signed({b})"),
            (Op::Mux(..), [c, a, b]) => format!("{c} ? {a} : {b}"),
            _ => unreachable!("wires have no expression of their own"),
        }
    }

    /// Inputs that are looked at, in the order of the fields.
    fn inputs(&self) -> Vec<Id> {
        let mut inputs: Vec<(usize, Id)> = self
            .names
            .keys()
            .filter_map(|id| match self.graph().op(*id) {
                Op::Input(port) => Some((*port, *id)),
                _ => None,
            })
            .collect();
        inputs.sort_unstable();
        inputs.into_iter().map(|(_, id)| id).collect()
    }

    fn header(&self, name: &str, text: &mut String) -> std::fmt::Result {
        let (schedule, graph) = (self.schedule, self.graph());
        let interval = match schedule.interval {
            Interval::One => "1: new arguments in every cycle",
            Interval::Latency => "its latency: in_* stay from in_valid until out_valid",
        };
        writeln!(text, "// Generated by hw/translate from `{name}` in crates/functions/src/hardware.rs. Not to be edited.")?;
        writeln!(text, "//")?;
        writeln!(text, "// Latency: {} cycles. Interval: {interval}.", schedule.stages)?;
        writeln!(
            text,
            "// Operations: {}. Bits in registers: {}.",
            schedule.order.len(),
            schedule.register_bits(graph) + schedule.stages as u32
        )?;
        writeln!(text, "`default_nettype none\n\nmodule fn_{name} (")?;
        writeln!(
            text,
            "    input  wire logic        clk,\n    input  wire logic        rst,\n    input  wire logic        in_valid,"
        )?;
        for id in self.inputs() {
            let range = range(graph.width(id));
            writeln!(text, "    input  wire logic {range:<7}{},", self.names[&id])?;
        }
        writeln!(text, "    output wire logic        out_valid,")?;
        let outputs: Vec<String> = self
            .lowered
            .outputs
            .iter()
            .map(|(port, _)| format!("    output wire logic {:<7}out_{}", range(port.width), port.name))
            .collect();
        writeln!(text, "{}\n);\n    localparam int LATENCY = {};\n", outputs.join(",\n"), schedule.stages)
    }

    fn stage(&self, stage: usize, text: &mut String) -> std::fmt::Result {
        let (schedule, graph) = (self.schedule, self.graph());
        writeln!(text, "\n    // Stage {stage}")?;
        for id in schedule.order.iter().filter(|id| schedule.stage(**id) == stage) {
            let width = graph.width(*id);
            writeln!(text, "    wire logic {}{} = {};", range(width), self.names[id], self.expression(*id))?;
        }
        let mut registers = Vec::new();
        for source in schedule.sources_in_order() {
            for (cut, mask) in schedule.kept(graph, source).into_iter().filter(|(cut, _)| *cut == stage + 1) {
                for run in runs(mask) {
                    let from = self.bits(source, run.0, run.1, stage);
                    registers.push((self.register(source, cut, run), run.1, from));
                }
            }
        }
        for (name, width, _) in &registers {
            writeln!(text, "    logic {}{name};", range(*width))?;
        }
        if !registers.is_empty() {
            writeln!(text, "    always_ff @(posedge clk) begin")?;
            for (name, _, from) in &registers {
                writeln!(text, "        {name} <= {from};")?;
            }
            writeln!(text, "    end")?;
        }
        Ok(())
    }

    /// Bits that have a name and no use.
    fn unused(&self) -> Vec<String> {
        let graph = self.graph();
        let mut found = Vec::new();
        for source in self.schedule.sources_in_order() {
            let all = crate::graph::ones(graph.width(source));
            for (low, width) in runs(all & !self.schedule.used(source)) {
                found.push(format!("{}[{}:{low}]", self.names[&source], low + width - 1));
            }
        }
        found
    }

    fn module(&self, name: &str) -> String {
        let mut text = String::new();
        self.write(name, &mut text).expect("a string takes everything");
        text
    }

    fn write(&self, name: &str, text: &mut String) -> std::fmt::Result {
        let schedule = self.schedule;
        self.header(name, text)?;
        let shifted = if schedule.stages == 1 { "in_valid".into() } else { "{valid[LATENCY-2:0], in_valid}".to_string() };
        writeln!(text, "    logic [LATENCY-1:0] valid;\n    always_ff @(posedge clk) begin")?;
        writeln!(text, "        if (rst) valid <= '0;\n        else valid <= {shifted};\n    end")?;
        for stage in 0..schedule.stages {
            self.stage(stage, text)?;
        }
        writeln!(text, "\n    assign out_valid = valid[LATENCY-1];")?;
        for (port, id) in &self.lowered.outputs {
            writeln!(text, "    assign out_{} = {};", port.name, self.value(*id, schedule.stages))?;
        }
        let unused = self.unused();
        if !unused.is_empty() {
            writeln!(
                text,
                "\n    // Bits that the function does not look at.\n    wire logic unused = &{{1'b0, {}}};",
                unused.join(", ")
            )?;
        }
        writeln!(text, "endmodule\n\n`default_nettype wire")
    }
}
