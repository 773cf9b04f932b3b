//! What the translator does not understand, and where that was written.

use std::fmt;

/// Why there is no circuit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The function.
    pub function: String,
    /// The instruction, as LLVM writes it; empty: it is about the function.
    pub instruction: String,
    /// Where it was written, as `file:line`; empty: not known.
    pub place: String,
    /// What is wrong, and what to do.
    pub why: String,
}

impl Refused {
    /// About a function, or all of the text.
    pub fn new(function: &str, why: impl Into<String>) -> Self {
        Self { function: function.to_owned(), instruction: String::new(), place: String::new(), why: why.into() }
    }

    /// About an instruction.
    #[must_use]
    pub fn at(self, instruction: &str, place: String) -> Self {
        Self { instruction: instruction.to_owned(), place, ..self }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "function {}", self.function)?;
        if !self.place.is_empty() {
            write!(f, ", {}", self.place)?;
        }
        if !self.instruction.is_empty() {
            write!(f, ", instruction `{}`", self.instruction)?;
        }
        write!(f, ": {}", self.why)
    }
}

impl std::error::Error for Refused {}
