//! PRP entries and lists for a contiguous range of device addresses (Base 4.3.1).

use millrace_nvme_spec::command::DataPointer;
use millrace_nvme_spec::prp::PrpEntry;
use thiserror::Error;

use crate::dma::{DmaRange, PAGE_SIZE};

const ENTRIES_PER_PAGE: usize = PAGE_SIZE / PrpEntry::SIZE;

/// Why a range cannot be described.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PrpError {
    /// PRP entry 1 must be dword aligned, and a range must have bytes.
    #[error("data of {len} bytes at {iova:#x} are empty, not dword aligned or wrap")]
    BadRange {
        /// First address.
        iova: u64,
        /// Bytes.
        len: usize,
    },
    /// More pages than the list pages can name.
    #[error("{entries} PRP entries do not fit into {list_pages} list pages")]
    ListTooShort {
        /// Entries that the list would need.
        entries: usize,
        /// Pages there are for it.
        list_pages: usize,
    },
}

/// List pages that a transfer of `len` bytes at any alignment may need.
pub(crate) const fn list_pages(len: usize) -> usize {
    // An unaligned range touches one page more, and PRP entry 1 is in the command itself.
    let entries = len.div_ceil(PAGE_SIZE);
    if entries <= 1 {
        return 0;
    }
    // All list pages but the last spend their last entry on the pointer to the next.
    (entries - 1).div_ceil(ENTRIES_PER_PAGE - 1)
}

/// Describes `data`, writing the list, if one is needed, entry by entry through `write(index, entry)` into `list`:
/// contiguous pages of which `index` counts the entries.
pub(crate) fn describe(
    data: DmaRange,
    list: DmaRange,
    mut write: impl FnMut(usize, PrpEntry),
) -> Result<DataPointer, PrpError> {
    let page = PAGE_SIZE as u64;
    let bad = PrpError::BadRange { iova: data.iova, len: data.len };
    if data.len == 0 || !PrpEntry(data.iova).is_dword_aligned() {
        return Err(bad);
    }
    let end = data.iova.checked_add(data.len as u64).ok_or(bad)?;
    let one_page = Ok(DataPointer::prps(data.iova, 0));
    // The last page of the address space has none after it.
    let Some(second) = PrpEntry(data.iova).page(page).checked_add(page) else { return one_page };
    if end <= second {
        return one_page;
    }
    if end - second <= page {
        return Ok(DataPointer::prps(data.iova, second));
    }
    let entries = usize::try_from((end - second).div_ceil(page)).map_err(|_| bad)?;
    write_list(second, entries, list, &mut write)?;
    Ok(DataPointer::prps(data.iova, list.iova))
}

/// As [`describe`], for data in several runs of device addresses: each but the first starts at a page, each but the last ends at one.
pub(crate) fn describe_runs(
    runs: impl IntoIterator<Item = DmaRange>,
    list: DmaRange,
    mut write: impl FnMut(usize, PrpEntry),
) -> Result<DataPointer, PrpError> {
    let page = PAGE_SIZE as u64;
    let slots = list.len / PrpEntry::SIZE;
    // PRP entry 1; then what goes into the list, the newest one held back: the last slot of a page is a pointer if more follow.
    let (mut first, mut held, mut slot) = (None, None, 0);
    let mut end = 0;
    for DmaRange { iova, len } in runs {
        let bad = PrpError::BadRange { iova, len };
        let fits = if first.is_none() { PrpEntry(iova).is_dword_aligned() } else { iova % page == 0 && end % page == 0 };
        let after = iova.checked_add(len as u64).filter(|after| fits && *after > iova).ok_or(bad)?;
        let mut at = iova;
        while at < after {
            if first.is_none() {
                first = Some(at);
            } else if let Some(before) = held.replace(at) {
                if slot % ENTRIES_PER_PAGE == ENTRIES_PER_PAGE - 1 && slot < slots {
                    write(slot, PrpEntry(list.iova + ((slot + 1) * PrpEntry::SIZE) as u64));
                    slot += 1;
                }
                if slot + 1 >= slots {
                    return Err(PrpError::ListTooShort { entries: slot + 1, list_pages: list.len / PAGE_SIZE });
                }
                write(slot, PrpEntry(before));
                slot += 1;
            }
            at = (at - at % page).saturating_add(page);
        }
        end = after;
    }
    let first = first.ok_or(PrpError::BadRange { iova: 0, len: 0 })?;
    Ok(match (held, slot) {
        (None, _) => DataPointer::prps(first, 0),
        (Some(second), 0) => DataPointer::prps(first, second),
        (Some(last), _) => {
            write(slot, PrpEntry(last));
            DataPointer::prps(first, list.iova)
        }
    })
}

fn write_list(
    first_page: u64,
    entries: usize,
    list: DmaRange,
    write: &mut impl FnMut(usize, PrpEntry),
) -> Result<(), PrpError> {
    let list_pages = list.len / PAGE_SIZE;
    let needed = if entries <= ENTRIES_PER_PAGE { 1 } else { (entries - 1).div_ceil(ENTRIES_PER_PAGE - 1) };
    if needed > list_pages {
        return Err(PrpError::ListTooShort { entries, list_pages });
    }
    let mut slot = 0;
    for entry in 0..entries {
        // The last slot of a page points to the next page, unless it holds the very last entry.
        if slot % ENTRIES_PER_PAGE == ENTRIES_PER_PAGE - 1 && entry + 1 < entries {
            write(slot, PrpEntry(list.iova + ((slot + 1) * PrpEntry::SIZE) as u64));
            slot += 1;
        }
        write(slot, PrpEntry(first_page + (entry * PAGE_SIZE) as u64));
        slot += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const LIST: u64 = 0x9_0000_0000;

    /// Reads the pointer as a controller does, and gives the bytes' addresses as runs within pages.
    fn walk(pointer: DataPointer, len: usize, list: &HashMap<usize, PrpEntry>) -> Vec<(u64, usize)> {
        let page = PAGE_SIZE as u64;
        let mut runs = Vec::new();
        let mut left = len;
        let mut take = |address: u64, left: &mut usize| {
            let run = usize::try_from(page - address % page).unwrap().min(*left);
            runs.push((address, run));
            *left -= run;
        };
        take(pointer.prp1, &mut left);
        if left == 0 {
            assert_eq!(pointer.prp2, 0);
        } else if left <= PAGE_SIZE {
            take(pointer.prp2, &mut left);
        } else {
            let mut at = pointer.prp2;
            while left > 0 {
                let entry = list[&(usize::try_from(at - LIST).unwrap() / 8)];
                let last_slot = (at + 8).is_multiple_of(page);
                if last_slot && left > PAGE_SIZE {
                    at = entry.0;
                    assert_eq!(at % page, 0);
                    continue;
                }
                assert_eq!(entry.0 % page, 0, "only the first entry may have an offset");
                take(entry.0, &mut left);
                at += 8;
            }
        }
        runs
    }

    proptest! {
        #[test]
        fn a_controller_reads_back_the_range(page in 0u64..1 << 20, dword in 0u64..1024, len in 1usize..5 << 20) {
            let data = DmaRange { iova: page * 4096 + dword * 4, len };
            let pages = list_pages(len);
            let mut list = HashMap::new();
            let area = DmaRange { iova: LIST, len: pages * PAGE_SIZE };
            let pointer = describe(data, area, |index, entry| {
                assert!(index < pages * ENTRIES_PER_PAGE, "entry {index} past the list");
                assert!(list.insert(index, entry).is_none());
            }).unwrap();
            let mut expected = data.iova;
            for (address, run) in walk(pointer, len, &list) {
                prop_assert_eq!(address, expected);
                expected += run as u64;
            }
            prop_assert_eq!(expected, data.iova + len as u64);
        }
    }

    proptest! {
        #[test]
        fn runs_are_described_as_one_run_is(dword in 0u64..1024, len in 1usize..5 << 20, cuts in proptest::collection::vec(1u64..2000, 0..5)) {
            // One range, and the same cut at pages.
            let data = DmaRange { iova: (1 << 32) + dword * 4, len };
            let end = data.iova + len as u64;
            let mut cuts: Vec<u64> = cuts.iter().map(|cut| (1 << 32) + cut * 4096).filter(|cut| (data.iova + 1..end).contains(cut)).collect();
            cuts.sort_unstable();
            cuts.dedup();
            cuts.insert(0, data.iova);
            cuts.push(end);
            let runs = cuts.windows(2).map(|two| DmaRange { iova: two[0], len: (two[1] - two[0]) as usize });
            let area = DmaRange { iova: LIST, len: list_pages(len + PAGE_SIZE) * PAGE_SIZE };
            let (mut one, mut many) = (HashMap::new(), HashMap::new());
            let expected = describe(data, area, |index, entry| { one.insert(index, entry); }).unwrap();
            let pointer = describe_runs(runs, area, |index, entry| { assert!(many.insert(index, entry).is_none()); }).unwrap();
            prop_assert_eq!((pointer.prp1, pointer.prp2), (expected.prp1, expected.prp2));
            if expected.prp2 == LIST {
                prop_assert_eq!(one, many);
            }
        }
    }

    #[test]
    fn runs_that_leave_holes_in_pages_are_refused() {
        let list = DmaRange { iova: LIST, len: PAGE_SIZE };
        let run = |iova, len| DmaRange { iova, len };
        let describe = |runs: &[DmaRange]| describe_runs(runs.iter().copied(), list, |_, _| {});
        assert!(describe(&[run(512, 3584), run(0x9000, 512)]).is_ok());
        for bad in
            [&[run(0, 512), run(0x9000, 512)][..], &[run(0, 4096), run(0x9200, 512)], &[run(2, 512)], &[], &[run(0, 0)]]
        {
            assert!(matches!(describe(bad), Err(PrpError::BadRange { .. })), "{bad:?}");
        }
        assert!(matches!(describe(&[run(0, 514 * PAGE_SIZE)]), Err(PrpError::ListTooShort { .. })));
        assert!(describe(&[run(0, 513 * PAGE_SIZE)]).is_ok());
    }

    #[test]
    fn a_list_that_fills_its_page_exactly_does_not_chain() {
        // 513 pages: one in PRP 1, 512 in the list.
        let mut written = Vec::new();
        let data = DmaRange { iova: 0, len: 513 * PAGE_SIZE };
        describe(data, DmaRange { iova: LIST, len: PAGE_SIZE }, |index, entry| written.push((index, entry.0))).unwrap();
        assert_eq!(written.len(), 512);
        assert_eq!(written[511], (511, 512 * 4096));
    }

    #[test]
    fn one_entry_more_chains_to_the_next_page() {
        let mut written = HashMap::new();
        let data = DmaRange { iova: 0, len: 514 * PAGE_SIZE };
        let list = DmaRange { iova: LIST, len: 2 * PAGE_SIZE };
        describe(data, list, |index, entry| {
            written.insert(index, entry.0);
        })
        .unwrap();
        assert_eq!(written[&511], LIST + 4096);
        assert_eq!((written[&512], written[&513]), (512 * 4096, 513 * 4096));
    }

    #[test]
    fn the_last_page_of_the_address_space_has_none_after_it() {
        let data = DmaRange { iova: u64::MAX - 4095, len: 512 };
        let pointer = describe(data, DmaRange { iova: LIST, len: PAGE_SIZE }, |_, _| panic!("no list")).unwrap();
        assert_eq!((pointer.prp1, pointer.prp2), (u64::MAX - 4095, 0));
    }

    #[test]
    fn refuses_what_it_cannot_describe() {
        let list = DmaRange { iova: LIST, len: PAGE_SIZE };
        for (iova, len) in [(0, 0), (2, 512), (u64::MAX - 3, 512)] {
            let result = describe(DmaRange { iova, len }, list, |_, _| panic!("no list"));
            assert_eq!(result, Err(PrpError::BadRange { iova, len }));
        }
        let long = describe(DmaRange { iova: 0, len: 514 * PAGE_SIZE }, list, |_, _| {});
        assert_eq!(long, Err(PrpError::ListTooShort { entries: 513, list_pages: 1 }));
    }
}
