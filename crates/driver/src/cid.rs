//! Command identifiers in flight.

use millrace_nvme_spec::CommandId;

/// Gives out identifiers `0..capacity`, the last one given back first: `n` commands in flight use only `0..n`.
#[derive(Debug)]
pub(crate) struct CidTable {
    free: Vec<u16>,
    busy: Vec<bool>,
}

impl CidTable {
    pub(crate) fn new(capacity: u16) -> Self {
        Self { free: (0..capacity).rev().collect(), busy: vec![false; usize::from(capacity)] }
    }

    /// An identifier that is not in flight; `None` when all are.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<CommandId> {
        let cid = self.free.pop()?;
        self.busy[usize::from(cid)] = true;
        Some(CommandId(cid))
    }

    /// Takes an identifier back; false if it is not in flight.
    #[inline]
    pub(crate) fn release(&mut self, cid: CommandId) -> bool {
        match self.busy.get_mut(usize::from(cid.0)) {
            Some(busy) if *busy => {
                *busy = false;
                self.free.push(cid.0);
                true
            }
            _ => false,
        }
    }

    /// Number of identifiers in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.busy.len() - self.free.len()
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
        assert!(cids.release(CommandId(1)));
        assert!(!cids.release(CommandId(1)), "completed twice");
        assert!(!cids.release(CommandId(3)), "never given out");
        assert_eq!(cids.take(), Some(CommandId(1)));
        assert_eq!(cids.take(), None);
    }
}
