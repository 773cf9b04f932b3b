//! Why legs are taken out of use, and which.

use std::fmt::{self, Display, Formatter};

use millrace_block::BlockError;

/// Why a leg is taken out of use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why {
    /// The operator wants it.
    Asked,
    /// It refused a request.
    Failed(BlockError),
    /// It refused the tables that every leg keeps.
    Tables(BlockError),
    /// It refused a flush of somebody else.
    Flush,
    /// A write went past it, while it was being taken out for another reason.
    Missed,
}

impl From<Option<BlockError>> for Why {
    fn from(error: Option<BlockError>) -> Self {
        error.map_or(Self::Missed, Self::Failed)
    }
}

impl Display for Why {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked => f.write_str("the operator takes it out"),
            Self::Failed(error) => write!(f, "{error}"),
            Self::Tables(error) => write!(f, "its tables cannot be written: {error}"),
            Self::Flush => f.write_str("it refused a flush"),
            Self::Missed => f.write_str("a write went past it"),
        }
    }
}

impl Why {
    /// What a request gets that needs the leg all the same.
    pub(crate) fn error(self) -> BlockError {
        match self {
            Self::Failed(error) | Self::Tables(error) => error,
            Self::Asked | Self::Flush | Self::Missed => BlockError::WriteFault { errno: 0 },
        }
    }
}

/// Legs that refused something.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusals {
    pub(crate) legs: u8,
    /// What the first of them said.
    first: Option<BlockError>,
}

impl Refusals {
    pub(crate) fn note(&mut self, leg: usize, result: Result<(), BlockError>) {
        if let Err(error) = result {
            self.legs |= 1 << leg;
            self.first.get_or_insert(error);
        }
    }

    pub(crate) fn or(mut self, other: Self) -> Self {
        self.legs |= other.legs;
        self.first = self.first.or(other.first);
        self
    }

    /// Why they are taken out.
    pub(crate) fn why(self) -> Why {
        self.first.map_or(Why::Missed, Why::Tables)
    }
}
