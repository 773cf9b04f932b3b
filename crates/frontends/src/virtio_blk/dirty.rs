//! The log of pages that we changed, for a machine that is being migrated.
//!
//! The front end copies the guest's memory while the guest runs, and copies again what was changed meanwhile: for our changes it
//! looks here. A page's bit is set after the page is written, never before: a bit that was taken before the write would be lost.

use std::{ops::Range, os::fd::OwnedFd};

use millrace_memory::{MapError, PeerBytes};

use super::{memory::pages, message::LogBase};

/// The bitmap, one bit for each page of guest addresses from 0 on.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    bytes: PeerBytes,
}

impl DirtyLog {
    /// Maps the front end's log.
    pub(crate) fn map(base: &LogBase, fd: &OwnedFd) -> Result<Self, MapError> {
        Ok(Self { bytes: PeerBytes::map(fd, base.offset, base.size)? })
    }

    /// Whether the front end took the log away.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.bytes.is_poisoned()
    }

    /// `len` bytes at a guest address were written. What lies beyond the log is no page that anybody copies.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Range { mut start, end } = pages(addr, len);
        while start < end {
            let Some(byte) = usize::try_from(start / 8).ok().filter(|byte| *byte < self.bytes.len()) else { return };
            // All that lie in one byte.
            let next = end.min((start / 8 + 1) * 8);
            let (from, last) = (start % 8, (next - 1) % 8);
            self.bytes.set_bits(byte, (u8::MAX << from) & (u8::MAX >> (7 - last)));
            start = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_that_was_touched_is_marked_and_no_other() {
        let (bytes, file) = PeerBytes::create("log", 8).expect("a log");
        let log = DirtyLog::map(&LogBase { size: 8, offset: 0 }, &file).expect("mapped");
        log.mark(0x1fff, 2);
        log.mark(0x9000, 0x1000);
        log.mark(0x7000, 0);
        log.mark(63 * 4096, u64::MAX);
        log.mark(u64::MAX, 1);
        let seen: [u8; 8] = bytes.read_value(0);
        assert_eq!(seen, [0b110, 0b10, 0, 0, 0, 0, 0, 0x80]);
        // Over several bytes of the log.
        log.mark(22 * 4096 + 1, 20 * 4096 - 1);
        let seen: [u8; 8] = bytes.read_value(0);
        assert_eq!(seen, [0b110, 0b10, 0b1100_0000, 0xff, 0xff, 0b11, 0, 0x80]);
    }
}
