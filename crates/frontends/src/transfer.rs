//! What nearly all requests of guests do.

use millrace_block::{Operation, trace::EventOperation};

/// A read or a write. It is a byte, and stays in a register on its way: an [`Operation`] would be copied as a whole from where its tag was
/// stored an instant ago, and a processor holds up a load that is wider than the store it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Read,
    Write { fua: bool },
}

impl Transfer {
    #[inline]
    pub(crate) fn is_write(self) -> bool {
        self != Self::Read
    }
}

impl From<Transfer> for Operation {
    #[inline]
    fn from(transfer: Transfer) -> Self {
        match transfer {
            Transfer::Read => Self::Read,
            Transfer::Write { fua } => Self::Write { fua },
        }
    }
}

impl From<Transfer> for EventOperation {
    fn from(transfer: Transfer) -> Self {
        Operation::from(transfer).into()
    }
}
