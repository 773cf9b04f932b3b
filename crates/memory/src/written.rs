//! Which pages of a guest's memory a device wrote: what a machine that is being migrated has to copy again.

use std::{cell::RefCell, collections::BTreeMap};

use crate::PAGE_SIZE as PAGE;

/// Bits of a chunk: 2 MiB of memory, one cache line.
const BITS: u64 = 512;
const WORDS: usize = BITS as usize / 64;

/// A bit for each page; chunks without any are not there, so that it grows with what was written, not with what could be.
#[derive(Debug, Default)]
pub(crate) struct WriteLog(RefCell<BTreeMap<u64, [u64; WORDS]>>);

impl WriteLog {
    /// The range was or will be written. It does not wrap.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Some(rest) = len.checked_sub(1) else { return };
        let (mut page, last) = (addr / PAGE, (addr + rest) / PAGE);
        let mut chunks = self.0.borrow_mut();
        while page <= last {
            let number = page / BITS;
            let end = last.min(number * BITS + (BITS - 1));
            let chunk = chunks.entry(number).or_default();
            for page in page..=end {
                chunk[(page % BITS / 64) as usize] |= 1 << (page % 64);
            }
            page = end + 1;
        }
    }

    /// Forgets the range's pages, and calls `each` with the number of each that was marked, counted from the range's first.
    pub(crate) fn take(&self, addr: u64, len: u64, mut each: impl FnMut(u64)) {
        let Some(rest) = len.checked_sub(1) else { return };
        let (first, last) = (addr / PAGE, addr.saturating_add(rest) / PAGE);
        let mut chunks = self.0.borrow_mut();
        for (&number, chunk) in chunks.range_mut(first / BITS..=last / BITS) {
            for (at, word) in (0..).zip(chunk.iter_mut()) {
                let mut left = *word;
                while left != 0 {
                    let bit = u64::from(left.trailing_zeros());
                    left &= left - 1;
                    let page = number * BITS + at * 64 + bit;
                    if (first..=last).contains(&page) {
                        *word &= !(1 << bit);
                        each(page - first);
                    }
                }
            }
        }
        chunks.retain(|_, chunk| *chunk != [0; WORDS]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn taken(log: &WriteLog, addr: u64, len: u64) -> Vec<u64> {
        let mut pages = Vec::new();
        log.take(addr, len, |page| pages.push(page));
        pages
    }

    #[test]
    fn a_byte_marks_its_page_and_is_told_once() {
        let log = WriteLog::default();
        log.mark(0x1fff, 2);
        log.mark(0x20_0000, 0);
        assert_eq!(taken(&log, 0x1000, 0x1000), [0]);
        assert_eq!(taken(&log, 0, 1 << 40), [2]);
        assert_eq!(taken(&log, 0, u64::MAX), []);
        log.mark(u64::MAX - 1, 2);
        assert_eq!(taken(&log, u64::MAX - 0xfff, 0x1000), [0]);
        assert!(log.0.borrow().is_empty(), "nothing is kept for nothing");
    }

    proptest! {
        /// Against a set of page numbers.
        #[test]
        fn it_is_a_set_of_pages(steps in prop::collection::vec((any::<bool>(), 0u64..0x100_0000, 0u64..0x60_0000), 1..40)) {
            let (log, mut model) = (WriteLog::default(), BTreeSet::new());
            for (mark, addr, len) in steps {
                let pages = if len == 0 { 0..0 } else { addr / PAGE..(addr + len - 1) / PAGE + 1 };
                if mark {
                    log.mark(addr, len);
                    model.extend(pages);
                } else {
                    let expected: Vec<u64> = pages.clone().filter(|page| model.remove(page)).map(|page| page - pages.start).collect();
                    prop_assert_eq!(taken(&log, addr, len), expected);
                }
            }
            prop_assert_eq!(taken(&log, 0, u64::MAX), model.into_iter().collect::<Vec<_>>());
        }
    }
}
