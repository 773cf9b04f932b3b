//! Command identifiers in flight.

use millrace_nvme_spec::CommandId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// In flight.
    Busy,
    /// Its completion is there, and was not handed out.
    Kept,
}

/// Gives out identifiers `0..capacity`, the last one given back first: `n` commands in flight use only `0..n`.
#[derive(Debug)]
pub(crate) struct CidTable {
    free: Vec<u16>,
    states: Vec<State>,
}

impl CidTable {
    pub(crate) fn new(capacity: u16) -> Self {
        Self { free: (0..capacity).rev().collect(), states: vec![State::Free; usize::from(capacity)] }
    }

    /// An identifier that is not in flight; `None` when all are.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<CommandId> {
        let cid = self.free.pop()?;
        self.states[usize::from(cid)] = State::Busy;
        Some(CommandId(cid))
    }

    /// A command has ended; false if it is not in flight. Its identifier is not free yet.
    #[inline]
    pub(crate) fn complete(&mut self, cid: CommandId) -> bool {
        match self.states.get_mut(usize::from(cid.0)) {
            Some(state) if *state == State::Busy => {
                *state = State::Kept;
                true
            }
            _ => false,
        }
    }

    /// The completion was handed out.
    #[inline]
    pub(crate) fn free(&mut self, cid: CommandId) {
        if let Some(state) = self.states.get_mut(usize::from(cid.0))
            && *state == State::Kept
        {
            *state = State::Free;
            self.free.push(cid.0);
        }
    }

    /// Both at once; false if it is not in flight.
    #[inline]
    pub(crate) fn release(&mut self, cid: CommandId) -> bool {
        let ended = self.complete(cid);
        if ended {
            self.free(cid);
        }
        ended
    }

    /// Number of identifiers that are not free.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.states.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_identifier_is_given_out_once_and_taken_back_once() {
        let mut cids = CidTable::new(3);
        let taken: Vec<_> = std::iter::from_fn(|| cids.take()).collect();
        assert_eq!(taken, [CommandId(0), CommandId(1), CommandId(2)]);
        assert_eq!(cids.in_flight(), 3);
        assert!(cids.complete(CommandId(1)));
        assert!(!cids.complete(CommandId(1)), "completed twice");
        assert!(!cids.complete(CommandId(3)), "never given out");
        assert_eq!(cids.take(), None, "it is not handed out yet");
        cids.free(CommandId(1));
        cids.free(CommandId(0));
        assert_eq!(cids.take(), Some(CommandId(1)));
        assert_eq!(cids.take(), None);
    }
}
