//! Functions in LLVM's text: blocks of instructions, as far as the translator knows them.
//!
//! ```text
//!   define … { label: instruction … }  ─► Function { blocks: [Block { label, instructions }] }
//! ```
//!
//! What is not known becomes [`Op::Unknown`], and is refused when a function that has it is translated: others do no harm.

use crate::lex::{Token, tokens};

/// A type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Int(u32),
    Ptr,
    Void,
    Struct(Vec<Type>),
    Array(u64, Box<Type>),
}

impl Type {
    /// Bytes, and what they are aligned to.
    fn layout(&self) -> (u64, u64) {
        match self {
            Self::Int(bits) => {
                let bytes = u64::from(bits.div_ceil(8)).next_power_of_two();
                (bytes, bytes)
            }
            Self::Ptr => (8, 8),
            Self::Void => (0, 1),
            Self::Array(count, of) => (count * of.layout().0, of.layout().1),
            Self::Struct(parts) => {
                let (mut end, mut most) = (0u64, 1);
                for (bytes, align) in parts.iter().map(Self::layout) {
                    end = end.next_multiple_of(align) + bytes;
                    most = most.max(align);
                }
                (end.next_multiple_of(most), most)
            }
        }
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.layout().0
    }

    /// Where an element is, and its type.
    pub(crate) fn element(&self, index: u64) -> Option<(u64, &Type)> {
        match self {
            Self::Array(_, of) => Some((index * of.bytes(), of)),
            Self::Struct(parts) => {
                let part = parts.get(usize::try_from(index).ok()?)?;
                let before = Self::Struct(parts[..index as usize].to_vec());
                let end: u64 = before.parts_end();
                Some((end.next_multiple_of(part.layout().1), part))
            }
            _ => None,
        }
    }

    fn parts_end(&self) -> u64 {
        let Self::Struct(parts) = self else { return 0 };
        parts.iter().map(Self::layout).fold(0u64, |end, (bytes, align)| end.next_multiple_of(align) + bytes)
    }
}

/// An operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Local(String),
    Int(i128),
    /// No particular value.
    Undef,
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Binary { kind: String, ty: Type, a: Value, b: Value },
    Compare { how: String, ty: Type, a: Value, b: Value },
    Select { ty: Type, condition: Value, a: Value, b: Value },
    Cast { kind: String, from: Type, value: Value, to: Type },
    Phi { ty: Type, incoming: Vec<(Value, String)> },
    Branch { condition: Option<Value>, targets: Vec<String> },
    Switch { ty: Type, value: Value, default: String, cases: Vec<(i128, String)> },
    Return,
    Unreachable,
    Load { ty: Type, from: Value },
    Store { ty: Type, value: Value, to: Value },
    Element { ty: Type, base: Value, indices: Vec<Value> },
    Call { name: String, ty: Type, arguments: Vec<(Type, Value)> },
    Extract { from: Value, index: u64 },
    Alloca { ty: Type },
    Freeze { ty: Type, value: Value },
    Unknown,
}

/// An instruction.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub result: Option<String>,
    pub op: Op,
    /// As it was written, without what hangs on it.
    pub text: String,
    /// Its `DILocation`.
    pub location: Option<String>,
}

/// Instructions that are carried out one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub label: String,
    pub instructions: Vec<Instruction>,
}

/// A function with a body.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub parameters: Vec<String>,
    /// Its `DISubprogram`.
    pub subprogram: Option<String>,
    pub blocks: Vec<Block>,
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn next(&mut self) -> Option<Token> {
        self.at += 1;
        self.tokens.get(self.at - 1).cloned()
    }

    fn mark(&mut self, c: char) -> Option<()> {
        (self.next()? == Token::Mark(c)).then_some(())
    }

    fn is_mark(&self, c: char) -> bool {
        self.peek() == Some(&Token::Mark(c))
    }

    fn word(&mut self) -> Option<String> {
        match self.next()? {
            Token::Word(word) => Some(word),
            _ => None,
        }
    }

    /// Skips what stands in brackets, from the opening one.
    fn skip_brackets(&mut self) -> Option<()> {
        let mut depth = 0;
        loop {
            match self.next()? {
                Token::Mark('(') => depth += 1,
                Token::Mark(')') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Some(());
            }
        }
    }

    /// Skips flags and attributes; what follows is a type or a value.
    fn skip_attributes(&mut self) -> Option<()> {
        loop {
            match self.peek()? {
                Token::Word(word) if is_type(word) || is_value(word) => return Some(()),
                Token::Word(word) if word == "align" => self.at += 2,
                Token::Word(_) => {
                    self.at += 1;
                    if self.is_mark('(') {
                        self.skip_brackets()?;
                    }
                }
                _ => return Some(()),
            }
        }
    }

    fn ty(&mut self) -> Option<Type> {
        match self.next()? {
            Token::Word(word) if word == "ptr" => Some(Type::Ptr),
            Token::Word(word) if word == "void" => Some(Type::Void),
            Token::Word(word) => word.strip_prefix('i')?.parse().ok().map(Type::Int),
            Token::Mark('{') => {
                let mut parts = Vec::new();
                while !self.is_mark('}') {
                    parts.push(self.ty()?);
                    if self.is_mark(',') {
                        self.at += 1;
                    }
                }
                self.at += 1;
                Some(Type::Struct(parts))
            }
            Token::Mark('[') => {
                let Token::Int(count) = self.next()? else { return None };
                if self.word()? != "x" {
                    return None;
                }
                let of = self.ty()?;
                self.mark(']')?;
                Some(Type::Array(u64::try_from(count).ok()?, Box::new(of)))
            }
            _ => None,
        }
    }

    fn value(&mut self) -> Option<Value> {
        match self.next()? {
            Token::Local(name) => Some(Value::Local(name)),
            Token::Int(value) => Some(Value::Int(value)),
            Token::Word(word) => match word.as_str() {
                "true" => Some(Value::Int(1)),
                "false" | "null" | "zeroinitializer" => Some(Value::Int(0)),
                "undef" | "poison" => Some(Value::Undef),
                _ => None,
            },
            Token::Meta(_) => Some(Value::Undef),
            _ => None,
        }
    }

    fn typed(&mut self) -> Option<(Type, Value)> {
        self.skip_attributes()?;
        let ty = self.ty()?;
        self.skip_attributes()?;
        Some((ty, self.value()?))
    }

    fn label(&mut self) -> Option<String> {
        if self.word()? != "label" {
            return None;
        }
        match self.next()? {
            Token::Local(name) => Some(name),
            _ => None,
        }
    }

    fn op(&mut self) -> Option<Op> {
        let mut kind = self.word()?;
        while matches!(kind.as_str(), "tail" | "musttail" | "notail") {
            kind = self.word()?;
        }
        match kind.as_str() {
            "add" | "sub" | "mul" | "and" | "or" | "xor" | "shl" | "lshr" | "ashr" | "udiv" | "sdiv" | "urem" | "srem" => {
                let (ty, a) = self.typed()?;
                self.mark(',')?;
                Some(Op::Binary { kind, ty, a, b: self.value()? })
            }
            "icmp" => {
                let mut how = self.word()?;
                if how == "samesign" {
                    how = self.word()?;
                }
                let (ty, a) = self.typed()?;
                self.mark(',')?;
                Some(Op::Compare { how, ty, a, b: self.value()? })
            }
            "select" => {
                let (_, condition) = self.typed()?;
                self.mark(',')?;
                let (ty, a) = self.typed()?;
                self.mark(',')?;
                Some(Op::Select { ty, condition, a, b: self.typed()?.1 })
            }
            "zext" | "sext" | "trunc" => {
                let (from, value) = self.typed()?;
                if self.word()? != "to" {
                    return None;
                }
                Some(Op::Cast { kind, from, value, to: self.ty()? })
            }
            "phi" => self.phi(),
            "br" => self.branch(),
            "switch" => self.switch(),
            "ret" => (self.ty()? == Type::Void).then_some(Op::Return),
            "unreachable" => Some(Op::Unreachable),
            _ => self.memory_op(&kind),
        }
    }

    fn memory_op(&mut self, kind: &str) -> Option<Op> {
        match kind {
            "load" => {
                let ty = self.ty()?;
                self.mark(',')?;
                Some(Op::Load { ty, from: self.typed()?.1 })
            }
            "store" => {
                let (ty, value) = self.typed()?;
                self.mark(',')?;
                Some(Op::Store { ty, value, to: self.typed()?.1 })
            }
            "getelementptr" => {
                self.skip_attributes()?;
                let ty = self.ty()?;
                self.mark(',')?;
                let (_, base) = self.typed()?;
                let mut indices = Vec::new();
                while self.is_mark(',') {
                    self.at += 1;
                    indices.push(self.typed()?.1);
                }
                Some(Op::Element { ty, base, indices })
            }
            "call" => {
                self.skip_attributes()?;
                let ty = self.ty()?;
                let Token::Global(name) = self.next()? else { return None };
                self.mark('(')?;
                let mut arguments = Vec::new();
                while !self.is_mark(')') {
                    if self.peek() == Some(&Token::Word("metadata".into())) {
                        self.at += 2;
                    } else {
                        arguments.push(self.typed()?);
                    }
                    if self.is_mark(',') {
                        self.at += 1;
                    }
                }
                Some(Op::Call { name, ty, arguments })
            }
            "extractvalue" => {
                let (_, from) = self.typed()?;
                self.mark(',')?;
                let Token::Int(index) = self.next()? else { return None };
                Some(Op::Extract { from, index: u64::try_from(index).ok()? })
            }
            "alloca" => Some(Op::Alloca { ty: self.ty()? }),
            "freeze" => {
                let (ty, value) = self.typed()?;
                Some(Op::Freeze { ty, value })
            }
            _ => None,
        }
    }

    fn phi(&mut self) -> Option<Op> {
        let ty = self.ty()?;
        let mut incoming = Vec::new();
        while self.is_mark('[') || self.is_mark(',') {
            if self.is_mark(',') {
                self.at += 1;
                if !self.is_mark('[') {
                    break;
                }
            }
            self.mark('[')?;
            let value = self.value()?;
            self.mark(',')?;
            let Token::Local(from) = self.next()? else { return None };
            self.mark(']')?;
            incoming.push((value, from));
        }
        Some(Op::Phi { ty, incoming })
    }

    fn branch(&mut self) -> Option<Op> {
        if self.peek() == Some(&Token::Word("label".into())) {
            return Some(Op::Branch { condition: None, targets: vec![self.label()?] });
        }
        let (_, condition) = self.typed()?;
        self.mark(',')?;
        let yes = self.label()?;
        self.mark(',')?;
        Some(Op::Branch { condition: Some(condition), targets: vec![yes, self.label()?] })
    }

    fn switch(&mut self) -> Option<Op> {
        let (ty, value) = self.typed()?;
        self.mark(',')?;
        let default = self.label()?;
        self.mark('[')?;
        let mut cases = Vec::new();
        while !self.is_mark(']') {
            let (_, case) = self.typed()?;
            let Value::Int(case) = case else { return None };
            self.mark(',')?;
            cases.push((case, self.label()?));
        }
        Some(Op::Switch { ty, value, default, cases })
    }
}

fn is_type(word: &str) -> bool {
    matches!(word, "ptr" | "void") || word.strip_prefix('i').is_some_and(|bits| bits.parse::<u32>().is_ok())
}

fn is_value(word: &str) -> bool {
    matches!(word, "true" | "false" | "null" | "undef" | "poison" | "zeroinitializer")
}

/// `!dbg !7` at the end of a line.
fn debug_of(line: &str) -> Option<String> {
    let number = line.split("!dbg !").nth(1)?;
    Some(number.chars().take_while(char::is_ascii_digit).collect())
}

fn instruction(line: &str) -> Instruction {
    let text = line.trim().split(", !").next().unwrap_or_default().to_owned();
    let mut parser = Parser { tokens: tokens(&text), at: 0 };
    let result = match &parser.tokens[..] {
        [Token::Local(name), Token::Mark('='), ..] => Some(name.clone()),
        _ => None,
    };
    if result.is_some() {
        parser.at = 2;
    }
    Instruction { result, op: parser.op().unwrap_or(Op::Unknown), text, location: debug_of(line) }
}

/// The functions that have a body.
pub(crate) fn functions(text: &str) -> Vec<Function> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if !line.starts_with("define ") {
            continue;
        }
        let parameters = tokens(line.split(" personality ").next().unwrap_or(line));
        let parameters = parameters.into_iter().filter_map(|token| match token {
            Token::Local(name) => Some(name),
            _ => None,
        });
        let mut function = Function { parameters: parameters.collect(), subprogram: debug_of(line), blocks: Vec::new() };
        while let Some(line) = lines.next().filter(|line| *line != "}") {
            let line = line.trim_end();
            if line.trim().is_empty() || line.trim_start().starts_with("#dbg_") || line.starts_with(';') {
                continue;
            }
            if !line.starts_with(' ') {
                let label = line.split(':').next().unwrap_or_default().trim_matches('"').to_owned();
                function.blocks.push(Block { label, instructions: Vec::new() });
                continue;
            }
            let mut whole = line.to_owned();
            if whole.trim_start().starts_with("switch ") {
                while !whole.contains(']') {
                    let Some(more) = lines.next() else { break };
                    whole.push_str(more);
                }
            }
            if let Some(block) = function.blocks.last_mut() {
                block.instructions.push(instruction(&whole));
            }
        }
        found.push(function);
    }
    found
}
