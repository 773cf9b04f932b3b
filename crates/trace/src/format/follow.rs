//! A file while it comes from the daemon: where its last whole block ends, and what that says.

use super::{Block, END, End, HEADER, Writer, decode};

/// Looks at the bytes of a file as they come. They are taken to be right: nobody was between.
#[derive(Debug, Default)]
pub struct Follower {
    /// What came of the block that is not whole yet.
    part: Vec<u8>,
    whole: u64,
    next: u64,
    end: Option<End>,
}

impl Follower {
    /// More of it has come.
    pub fn push(&mut self, bytes: &[u8]) {
        self.part.extend(bytes);
        let mut at = 0;
        while let Some((header, rest)) = self.part[at..].split_at_checked(HEADER) {
            let len = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
            let Some(content) = rest.get(..len) else { break };
            let kind = u16::from_le_bytes([header[10], header[11]]);
            if kind == END
                && let Some(Block::End(end)) = decode(kind, 0, content)
            {
                self.end = Some(end);
            }
            at += HEADER + len;
            self.next += 1;
        }
        self.whole += at as u64;
        self.part.drain(..at);
    }

    /// Bytes up to the end of the last whole block.
    pub fn whole(&self) -> u64 {
        self.whole
    }

    /// How it ended, if it did.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// A last block for a file that broke off, to be put after its last whole one.
    pub fn last_word(&self, reason: &str) -> Vec<u8> {
        let end = End { reason: reason.to_owned(), early: true, ..End::default() };
        Writer { next: self.next }.end(&end)
    }
}
