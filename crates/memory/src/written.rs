//! Which pages of a guest's memory a device wrote: what a machine that is being migrated has to copy again.

use std::{cell::RefCell, collections::BTreeMap, ops::Range};

use crate::PAGE_SIZE as PAGE;

/// Bits of a chunk: 2 MiB of memory, one cache line.
const BITS: u64 = 512;
const WORDS: usize = BITS as usize / 64;

#[derive(Debug, Default)]
pub(crate) struct WriteLog(RefCell<Marks>);

/// A page is marked in either or both. No mark takes more than three entries, and all together no more than two for 2 MiB of memory.
#[derive(Debug, Default)]
struct Marks {
    /// A bit for each page; chunks without any are not there, so that it grows with what was written, not with what could be.
    chunks: BTreeMap<u64, [u64; WORDS]>,
    /// Whole chunks in a row, by the first one's number: the last one's. They neither overlap nor touch. All of a guest's memory may have
    /// been written at once, and may be terabytes.
    runs: BTreeMap<u64, u64>,
}

impl WriteLog {
    /// The range was or will be written. It does not wrap.
    pub(crate) fn mark(&self, addr: u64, len: u64) {
        let Some(rest) = len.checked_sub(1) else { return };
        let end = (addr + rest) / PAGE + 1;
        self.0.borrow_mut().mark(addr / PAGE..end);
    }

    /// Forgets the range's pages, and calls `each` with the first and the last number of pages that were marked, counted from the range's
    /// first; of some maybe twice, and in no order.
    pub(crate) fn take(&self, addr: u64, len: u64, mut each: impl FnMut(u64, u64)) {
        let Some(rest) = len.checked_sub(1) else { return };
        let (first, last) = (addr / PAGE, addr.saturating_add(rest) / PAGE);
        let mut marks = self.0.borrow_mut();
        marks.take_runs(first, last, &mut each);
        marks.take_bits(first, last, &mut each);
    }
}

impl Marks {
    /// Marks pages; the whole chunks of many as a run. A range that ends before it begins has none.
    fn mark(&mut self, pages: Range<u64>) {
        // More than this has a whole chunk in it, wherever it begins.
        if pages.end.saturating_sub(pages.start) <= 2 * BITS {
            self.mark_bits(pages);
        } else {
            let (first, end) = (pages.start.div_ceil(BITS), pages.end / BITS);
            self.mark_bits(pages.start..first * BITS);
            self.mark_run(first, end - 1);
            self.mark_bits(end * BITS..pages.end);
        }
    }

    fn mark_bits(&mut self, pages: Range<u64>) {
        let Range { start: mut page, end: all } = pages;
        while page < all {
            let number = page / BITS;
            let end = all.min((number + 1) * BITS);
            let chunk = self.chunks.entry(number).or_default();
            for page in page..end {
                chunk[(page % BITS / 64) as usize] |= 1 << (page % 64);
            }
            page = end;
        }
    }

    /// Adds chunks to the runs; those that they overlap or touch become one with them.
    fn mark_run(&mut self, mut first: u64, mut last: u64) {
        while let Some((&from, &to)) = self.runs.range(..=last + 1).next_back().filter(|(_, to)| **to + 1 >= first) {
            self.runs.remove(&from);
            (first, last) = (first.min(from), last.max(to));
        }
        self.runs.insert(first, last);
    }

    /// Takes what of the runs lies within these pages. What is left of one on either side never reaches into the range's chunks again.
    fn take_runs(&mut self, first: u64, last: u64, each: &mut impl FnMut(u64, u64)) {
        let end = last / BITS;
        while let Some((&from, &to)) = self.runs.range(..=end).next_back().filter(|(_, to)| **to >= first / BITS) {
            self.runs.remove(&from);
            let pages = from * BITS..(to + 1) * BITS;
            self.mark(pages.start..first);
            self.mark(last + 1..pages.end);
            each(pages.start.max(first) - first, (pages.end - 1).min(last) - first);
        }
    }

    fn take_bits(&mut self, first: u64, last: u64, each: &mut impl FnMut(u64, u64)) {
        let mut empty = Vec::new();
        for (&number, chunk) in self.chunks.range_mut(first / BITS..=last / BITS) {
            for (at, word) in (0..).zip(chunk.iter_mut()) {
                let mut left = *word;
                while left != 0 {
                    let bit = u64::from(left.trailing_zeros());
                    left &= left - 1;
                    let page = number * BITS + at * 64 + bit;
                    if (first..=last).contains(&page) {
                        *word &= !(1 << bit);
                        each(page - first, page - first);
                    }
                }
            }
            if *chunk == [0; WORDS] {
                empty.push(number);
            }
        }
        for number in empty {
            self.chunks.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn taken(log: &WriteLog, addr: u64, len: u64) -> Vec<u64> {
        let mut pages = BTreeSet::new();
        log.take(addr, len, |from, to| pages.extend(from..=to));
        pages.into_iter().collect()
    }

    fn entries(log: &WriteLog) -> usize {
        let marks = log.0.borrow();
        marks.chunks.len() + marks.runs.len()
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
        assert_eq!(entries(&log), 0, "nothing is kept for nothing");
    }

    /// All of it, as after a worker's death, and in each report while a read may write anywhere.
    #[test]
    fn a_large_machine_has_few_entries() {
        const REPORT: u64 = 512 << 20;
        const PAGES: u64 = REPORT / PAGE;
        let log = WriteLog::default();
        for report in 0..64 {
            // From the middle of a chunk to that of another one.
            log.mark(1 << 20, 12 << 40);
            assert_eq!(entries(&log), 3);
            let mut told = 0;
            log.take(report * REPORT, REPORT, |from, to| told += to - from + 1);
            assert_eq!(told, if report == 0 { PAGES - 256 } else { PAGES });
            assert_eq!(taken(&log, report * REPORT, REPORT), []);
            assert!(entries(&log) <= 4, "a cut makes one more");
        }
        log.mark(1 << 20, 12 << 40);
        // What is cut within a chunk.
        assert_eq!(taken(&log, 1 << 40, PAGE), [0]);
        assert_eq!(taken(&log, (1 << 40) - PAGE, 3 * PAGE), [0, 2]);
        assert_eq!(entries(&log), 6);
        log.take(0, u64::MAX, |_, _| {});
        assert_eq!(entries(&log), 0);
    }

    proptest! {
        /// Against a set of page numbers.
        #[test]
        fn it_is_a_set_of_pages(steps in prop::collection::vec((any::<bool>(), 0u64..0x100_0000, 0u64..0xc0_0000), 1..40)) {
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
