//! What a function takes and gives, with the names of its types' fields, from the debugging information.
//!
//! ```text
//!   !DISubprogram ─► parameters ─► pointer ─► struct ─► members ─► … ─► integers: Port { "command_slba", bit 0, 64 bits }
//! ```

use std::collections::HashMap;

/// A field of an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The names of the fields on the way to it.
    pub name: String,
    /// Where it lies in the argument, in bytes.
    pub offset: u64,
    /// Bits.
    pub width: u32,
}

/// `!N = !DIKind(key: value, …)` or `!N = !{…}`.
#[derive(Debug, Default)]
struct Record {
    kind: String,
    fields: HashMap<String, String>,
    items: Vec<String>,
}

/// All metadata of a text.
#[derive(Debug)]
pub(crate) struct Metadata {
    records: HashMap<String, Record>,
}

/// Cuts at commas that are neither in brackets nor in quotes.
fn cut(text: &str) -> Vec<String> {
    let (mut parts, mut depth, mut quoted) = (vec![String::new()], 0, false);
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            '(' | '{' if !quoted => depth += 1,
            ')' | '}' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("never empty").push(c);
    }
    parts.into_iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

fn record(text: &str) -> Option<Record> {
    let text = text.strip_prefix("distinct ").unwrap_or(text).strip_prefix('!')?;
    let (kind, rest) = text.split_at(text.find(['(', '{'])?);
    let inside = &rest[1..rest.len().checked_sub(1)?];
    if kind.is_empty() {
        let items = cut(inside).into_iter().map(|item| item.trim_start_matches('!').to_owned()).collect();
        return Some(Record { items, ..Record::default() });
    }
    let fields = cut(inside).into_iter().filter_map(|field| {
        let (key, value) = field.split_once(": ")?;
        Some((key.to_owned(), value.trim_start_matches('!').trim_matches('"').to_owned()))
    });
    Some(Record { kind: kind.to_owned(), fields: fields.collect(), items: Vec::new() })
}

impl Record {
    fn get(&self, key: &str) -> &str {
        self.fields.get(key).map_or("", String::as_str)
    }

    fn number(&self, key: &str) -> u64 {
        self.get(key).parse().unwrap_or(0)
    }
}

impl Metadata {
    pub(crate) fn new(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.strip_prefix('!')?.split_once(" = "));
        Self { records: lines.filter_map(|(number, text)| Some((number.to_owned(), record(text)?))).collect() }
    }

    /// The name of a subprogram in a module.
    pub(crate) fn function_in(&self, subprogram: &str, module: &str) -> Option<&str> {
        let record = self.records.get(subprogram)?;
        let scope = self.records.get(record.get("scope"))?;
        (scope.kind == "DINamespace" && scope.get("name") == module).then(|| record.get("name"))
    }

    /// `file:line` of a location.
    pub(crate) fn place(&self, location: &str) -> Option<String> {
        let record = self.records.get(location)?;
        let mut scope = self.records.get(record.get("scope"))?;
        while scope.get("file").is_empty() {
            scope = self.records.get(scope.get("scope"))?;
        }
        let file = self.records.get(scope.get("file"))?;
        Some(format!("{}:{}", file.get("filename"), record.get("line")))
    }

    /// The fields behind each parameter of a subprogram.
    pub(crate) fn parameters(&self, subprogram: &str) -> Result<Vec<Vec<Port>>, String> {
        let missing = || "no debugging information about its types; compile with -C debuginfo=2".to_owned();
        let record = self.records.get(subprogram).ok_or_else(missing)?;
        let types = self.records.get(record.get("type")).ok_or_else(missing)?;
        let types = self.records.get(types.get("types")).ok_or_else(missing)?;
        let [result, parameters @ ..] = &types.items[..] else { return Err(missing()) };
        if result != "null" {
            return Err("it returns a value; give it `output: &mut Out` instead".to_owned());
        }
        parameters
            .iter()
            .map(|parameter| {
                let pointer = self.records.get(parameter).filter(|record| record.get("tag") == "DW_TAG_pointer_type");
                let pointer = pointer.ok_or("a parameter is no reference to a struct")?;
                let mut ports = Vec::new();
                self.flatten(pointer.get("baseType"), "", 0, &mut ports)?;
                Ok(ports)
            })
            .collect()
    }

    fn flatten(&self, ty: &str, name: &str, bit: u64, ports: &mut Vec<Port>) -> Result<(), String> {
        let refuse = |what: &str| Err(format!("field `{name}` is {what}; fields are integers, structs and arrays of them"));
        let Some(record) = self.records.get(ty) else { return refuse("of no known type") };
        let below = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}_{part}") };
        match (record.kind.as_str(), record.get("tag")) {
            ("DIBasicType", _) => {
                let width = record.number("size") as u32;
                ports.push(Port { name: name.to_owned(), offset: bit / 8, width });
                Ok(())
            }
            ("DICompositeType", "DW_TAG_structure_type") => {
                let Some(elements) = self.records.get(record.get("elements")) else { return refuse("empty") };
                for member in elements.items.iter().filter_map(|item| self.records.get(item)) {
                    let (part, at) = (member.get("name"), bit + member.number("offset"));
                    self.flatten(member.get("baseType"), &below(part), at, ports)?;
                }
                Ok(())
            }
            ("DICompositeType", "DW_TAG_array_type") => {
                let ranges = self.records.get(record.get("elements")).and_then(|list| list.items.first());
                let count = ranges.and_then(|range| self.records.get(range)).map_or(0, |range| range.number("count"));
                if count == 0 {
                    return refuse("an empty array");
                }
                let step = record.number("size") / count;
                (0..count)
                    .try_for_each(|at| self.flatten(record.get("baseType"), &below(&at.to_string()), bit + at * step, ports))
            }
            (kind, tag) => refuse(&format!("a {kind} {tag}")),
        }
    }
}
