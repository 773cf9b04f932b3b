//! The guest's memory: files, the regions that the device knows of them, and pages for data.
//!
//! ```text
//!   0010_0000  queues      one region, what the guest needs all the time
//!   0020_0000  data        one region, right behind
//!   0100_0000  small       32 regions of one page, neighbours in the guest but not in the file
//!   4000_0000  large       one region of 2 MiB
//!   8000_0000  read only   the device may not write it
//! ```

use std::{fs::File, os::unix::fs::FileExt};

use crate::choices::Choices;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const QUEUES: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const SMALL: u64 = 0x100_0000;
pub(crate) const LARGE: u64 = 0x4000_0000;
pub(crate) const READ_ONLY: u64 = 0x8000_0000;
/// Nothing is ever here.
pub(crate) const NOWHERE: u64 = 0x7_0000_0000;

const SMALL_PAGES: u64 = 32;
const LARGE_SIZE: u64 = 2 << 20;

/// A range of guest memory that is mapped, or not, as a whole.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) at: u64,
    pub(crate) size: u64,
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) writable: bool,
    pub(crate) mapped: bool,
}

impl Region {
    pub(crate) fn holds(&self, at: u64) -> bool {
        (self.at..self.at + self.size).contains(&at)
    }
}

pub(crate) struct Memory {
    pub(crate) files: Vec<File>,
    pub(crate) regions: Vec<Region>,
    /// Data pages that no command uses, in order of their addresses.
    free: Vec<u64>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let file = |size| {
            let fd = rustix::fs::memfd_create("fuzz-guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
            let file = File::from(fd);
            file.set_len(size).expect("room for the guest");
            file
        };
        let files = vec![file(2 << 20), file(SMALL_PAGES * PAGE), file(LARGE_SIZE), file(16 * PAGE)];
        let region = |at, size, file, offset| Region { at, size, file, offset, writable: true, mapped: false };
        let mut regions = vec![region(QUEUES, 1 << 20, 0, 0), region(DATA, 1 << 20, 0, 1 << 20)];
        // 13 and 32 have no common divisor: every page of the file has one place.
        regions.extend((0..SMALL_PAGES).map(|i| region(SMALL + i * PAGE, PAGE, 1, i * 13 % SMALL_PAGES * PAGE)));
        regions.push(region(LARGE, LARGE_SIZE, 2, 0));
        regions.push(Region { writable: false, ..region(READ_ONLY, 16 * PAGE, 3, 0) });
        let pages = |from: u64, size: u64| (from..from + size).step_by(PAGE as usize);
        let free = pages(DATA, 1 << 20).chain(pages(SMALL, SMALL_PAGES * PAGE)).chain(pages(LARGE, 1 << 20)).collect();
        Self { files, regions, free }
    }

    pub(crate) fn region_of(&self, at: u64) -> Option<usize> {
        self.regions.iter().position(|region| region.holds(at))
    }

    /// Whether the device can reach the page.
    pub(crate) fn is_mapped(&self, at: u64) -> bool {
        self.region_of(at).is_some_and(|region| self.regions[region].mapped)
    }

    /// Takes free pages that are mapped: neighbours, or from anywhere.
    pub(crate) fn take(&mut self, choices: &mut Choices, count: usize) -> Option<Vec<u64>> {
        let usable: Vec<usize> = (0..self.free.len()).filter(|&i| self.is_mapped(self.free[i])).collect();
        if usable.len() < count {
            return None;
        }
        let start = choices.below((usable.len() - count + 1) as u64) as usize;
        let stride = if choices.one_in(2) { 1 } else { 1 + choices.below(7) as usize };
        let span = usable.len();
        let mut chosen: Vec<usize> = (0..count).map(|i| usable[(start + i * stride) % span]).collect();
        chosen.sort_unstable();
        chosen.dedup();
        if chosen.len() < count {
            chosen = usable[start..start + count].to_vec();
        }
        let pages = chosen.iter().map(|&i| self.free[i]).collect();
        chosen.iter().rev().for_each(|&i| {
            self.free.remove(i);
        });
        Some(pages)
    }

    pub(crate) fn give_back(&mut self, pages: &[u64]) {
        for &page in pages {
            let at = self.free.partition_point(|&free| free < page);
            assert!(self.free.get(at) != Some(&page), "page {page:#x} is given back twice");
            self.free.insert(at, page);
        }
    }

    /// The runs of a file that a range of guest memory is.
    fn runs(&self, mut at: u64, mut len: u64) -> Vec<(usize, u64, u64)> {
        let mut runs = Vec::new();
        while len > 0 {
            let region = &self.regions[self.region_of(at).unwrap_or_else(|| panic!("no memory at {at:#x}"))];
            let now = len.min(region.at + region.size - at);
            runs.push((region.file, region.offset + at - region.at, now));
            at += now;
            len -= now;
        }
        runs
    }

    /// The guest reads its memory.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) {
        let mut rest = out;
        for (file, offset, len) in self.runs(at, rest.len() as u64) {
            let (now, later) = rest.split_at_mut(len as usize);
            self.files[file].read_exact_at(now, offset).expect("guest memory");
            rest = later;
        }
    }

    /// The guest writes its memory.
    pub(crate) fn write(&self, at: u64, data: &[u8]) {
        let mut rest = data;
        for (file, offset, len) in self.runs(at, data.len() as u64) {
            let (now, later) = rest.split_at(len as usize);
            self.files[file].write_all_at(now, offset).expect("guest memory");
            rest = later;
        }
    }

    pub(crate) fn fill(&self, at: u64, len: u64, byte: u8) {
        self.write(at, &vec![byte; len as usize]);
    }

    /// Reads a list of ranges as one.
    pub(crate) fn gather(&self, segments: &[(u64, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(at, len) in segments {
            let from = bytes.len();
            bytes.resize(from + len as usize, 0);
            self.read(at, &mut bytes[from..]);
        }
        bytes
    }

    /// Writes a list of ranges as one.
    pub(crate) fn scatter(&self, segments: &[(u64, u32)], data: &[u8]) {
        let mut rest = data;
        for &(at, len) in segments {
            let (now, later) = rest.split_at(len as usize);
            self.write(at, now);
            rest = later;
        }
    }
}
