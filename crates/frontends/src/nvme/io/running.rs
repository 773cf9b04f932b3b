//! Which command identifiers are taken by commands that wait.

use super::super::controller::CommandToken;

/// One bit per command identifier of each submission queue that ever had a command waiting.
#[derive(Debug)]
pub(crate) struct Running {
    queues: Vec<Option<Box<[u64; WORDS]>>>,
    count: u32,
}

/// Bits for all 65,536 identifiers.
const WORDS: usize = 1024;

impl Running {
    pub(super) fn new(queues: u16) -> Self {
        Self { queues: (0..=queues).map(|_| None).collect(), count: 0 }
    }

    /// Whether a waiting command of the queue has this identifier.
    #[inline]
    pub(crate) fn contains(&self, sqid: u16, cid: u16) -> bool {
        let (word, bit) = place(cid);
        self.count != 0 && matches!(self.queues.get(usize::from(sqid)), Some(Some(words)) if words[word] & bit != 0)
    }

    pub(super) fn insert(&mut self, token: CommandToken) {
        let (word, bit) = place(token.cid);
        let Some(queue) = self.queues.get_mut(usize::from(token.sqid)) else { return };
        // Once per queue: the bits stay for the controller's life.
        let words = queue.get_or_insert_with(|| Box::new([0; WORDS]));
        self.count += u32::from(words[word] & bit == 0);
        words[word] |= bit;
    }

    /// A task's result has come.
    pub(crate) fn remove(&mut self, token: CommandToken) {
        let (word, bit) = place(token.cid);
        if let Some(Some(words)) = self.queues.get_mut(usize::from(token.sqid)) {
            self.count -= u32::from(words[word] & bit != 0);
            words[word] &= !bit;
        }
    }
}

fn place(cid: u16) -> (usize, u64) {
    (usize::from(cid / 64), 1 << (cid % 64))
}
