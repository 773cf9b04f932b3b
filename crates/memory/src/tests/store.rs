//! The store against a vector.

use std::os::fd::OwnedFd;

use proptest::prelude::*;

use super::{content, memory_file, own_memory};
use crate::{ByteStore, Segment};

const PAGE: u64 = 4096;

#[derive(Clone, Debug)]
enum Step {
    Grow(u64),
    Write { at: u64, len: u64, cut: usize },
    Read { at: u64, len: u64, cut: usize },
    Zero { at: u64, len: u64 },
    Discard { at: u64, len: u64 },
    Copy { from: u64, to: u64, len: u64 },
    Compare { at: u64, len: u64, spoil: bool },
}

fn steps() -> impl Strategy<Value = Step> {
    let at = || 0..20 * PAGE;
    let len = || 0..3 * PAGE;
    let cut = || 0..5000_usize;
    prop_oneof![
        (1..20 * PAGE).prop_map(Step::Grow),
        (at(), len(), cut()).prop_map(|(at, len, cut)| Step::Write { at, len, cut }),
        (at(), len(), cut()).prop_map(|(at, len, cut)| Step::Read { at, len, cut }),
        (at(), len()).prop_map(|(at, len)| Step::Zero { at, len }),
        (at(), len()).prop_map(|(at, len)| Step::Discard { at, len }),
        (at(), at(), len()).prop_map(|(from, to, len)| Step::Copy { from, to, len }),
        (at(), len(), any::<bool>()).prop_map(|(at, len, spoil)| Step::Compare { at, len, spoil }),
    ]
}

/// The first `len` bytes as two segments.
fn cut_at(memory: &Segment, len: usize, cut: usize) -> [Segment; 2] {
    let cut = cut.min(len);
    [memory.part(0, cut).unwrap(), memory.part(cut, len - cut).unwrap()]
}

struct Pair {
    store: ByteStore,
    model: Vec<u8>,
    written: u8,
}

impl Pair {
    /// The part of a range that exists.
    fn clip(&self, at: u64, len: u64) -> (usize, usize) {
        let end = self.model.len() as u64;
        (at.min(end) as usize, len.min(end - at.min(end)) as usize)
    }

    fn step(&mut self, memory: &Segment, step: &Step) {
        match *step {
            Step::Grow(bytes) => {
                self.store.grow(bytes).unwrap();
                assert!(self.store.capacity() >= bytes && self.store.capacity() >= self.model.len() as u64);
                self.model.resize(self.store.capacity() as usize, 0);
            }
            Step::Write { at, len, cut } => {
                let (at, len) = self.clip(at, len);
                self.written = self.written.wrapping_add(1);
                memory.part(0, len).unwrap().fill(self.written);
                self.store.write(at as u64, &cut_at(memory, len, cut));
                self.model[at..at + len].fill(self.written);
            }
            Step::Read { at, len, cut } => {
                let (at, len) = self.clip(at, len);
                memory.fill(0xee);
                self.store.read(at as u64, &cut_at(memory, len, cut));
                let found = content(memory);
                assert!(found[..len] == self.model[at..at + len] && found[len..].iter().all(|byte| *byte == 0xee));
            }
            Step::Zero { at, len } => {
                let (at, len) = self.clip(at, len);
                self.store.zero(at as u64, len as u64);
                self.model[at..at + len].fill(0);
            }
            Step::Discard { at, len } => {
                let (at, len) = self.clip(at, len);
                self.store.discard(at as u64, len as u64);
                self.model[at..at + len].fill(0);
            }
            Step::Copy { from, to, len } => {
                let len = len.min(from.abs_diff(to));
                let ((from, a), (to, b)) = (self.clip(from, len), self.clip(to, len));
                let len = a.min(b);
                self.store.copy_within(from as u64, to as u64, len as u64);
                self.model.copy_within(from..from + len, to);
            }
            Step::Compare { at, len, spoil } => {
                let (at, len) = self.clip(at, len);
                let mine = memory.part(0, len).unwrap();
                mine.write_at(0, &self.model[at..at + len]);
                let spoil = spoil && len > 0;
                if spoil {
                    mine.write_at(len / 2, &[!self.model[at + len / 2]]);
                }
                assert_eq!(self.store.equals(at as u64, &[mine]), !spoil);
            }
        }
    }
}

/// A store in memory files that nobody else has.
fn in_files(bytes: u64) -> ByteStore {
    ByteStore::in_files(bytes, &[], Box::new(|_, _| Ok(()))).unwrap()
}

proptest! {
    #[test]
    fn a_store_behaves_as_a_vector(
        files in any::<bool>(),
        first in 1..4 * PAGE,
        steps in prop::collection::vec(steps(), 1..60),
    ) {
        let store = if files { in_files(first) } else { ByteStore::new(first).unwrap() };
        let model = vec![0; store.capacity() as usize];
        prop_assert!(model.len() as u64 >= first);
        let mut pair = Pair { store, model, written: 0 };
        let (_mapping, memory) = own_memory(4 * PAGE as usize);
        for step in steps {
            pair.step(&memory, &step);
        }
        let (_mapping, all) = own_memory(pair.model.len().next_multiple_of(4096));
        pair.store.read(0, &[all.part(0, pair.model.len()).unwrap()]);
        prop_assert!(content(&all)[..pair.model.len()] == pair.model);
    }
}

#[test]
fn what_lies_outside_cannot_be_reached() {
    let store = ByteStore::new(8192).unwrap();
    let (_mapping, memory) = own_memory(4096);
    assert_eq!(store.capacity(), 8192);
    for (at, len) in [(8192, 1), (8191, 2), (u64::MAX, 2), (0, 8193)] {
        let outside: [&dyn Fn(); 5] = [
            &|| store.zero(at, len),
            &|| store.discard(at, len),
            &|| store.copy_within(0, at.max(8000), 4096),
            &|| store.read(at.max(8000), &[memory]),
            &|| store.write(at.max(8000), &[memory]),
        ];
        for outside in outside {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(outside));
            assert!(result.is_err(), "{at}+{len}");
        }
    }
    assert!(ByteStore::new(1 << 60).is_err());
    assert!(store.grow(u64::MAX).is_err());
    assert_eq!(store.capacity(), 8192, "growing failed and changed nothing");
}

/// Bytes that the file takes.
fn taken(file: &OwnedFd) -> usize {
    usize::try_from(rustix::fs::fstat(file).unwrap().st_blocks).unwrap() * 512
}

#[test]
fn what_was_never_written_takes_no_memory_whatever_is_done_with_it() {
    const EXTENT: u64 = 2 << 20;
    let file = memory_file(&[]);
    rustix::fs::ftruncate(&file, 4 * EXTENT).unwrap();
    let store = ByteStore::in_files(4 * EXTENT, &[file.try_clone().unwrap()], Box::new(|_, _| Ok(()))).unwrap();
    let (_mapping, memory) = own_memory(16384);
    assert!(store.equals(EXTENT - 8192, &[memory]));
    memory.write_at(16383, &[1]);
    assert!(!store.equals(EXTENT - 8192, &[memory]));
    store.copy_within(0, 2 * EXTENT, EXTENT + 512);
    // Parts of pages, and pages between parts.
    for (at, len) in [(512, 512), (4096, 100), (8000, 12_288), (EXTENT - 1, 2), (EXTENT + 1, 4096)] {
        store.discard(at, len);
    }
    store.read(4 * EXTENT - 16384, &[memory]);
    assert_eq!(content(&memory), vec![0; 16384]);
    assert_eq!((taken(&file), store.allocated()), (0, 0));
    // What was written is compared, erased and copied as ever, and what a hole is copied over is given back.
    memory.fill(7);
    store.write(EXTENT, &[memory]);
    assert!(store.equals(EXTENT, &[memory]) && !store.equals(EXTENT - 4096, &[memory]));
    store.discard(EXTENT + 1, 1);
    memory.write_at(1, &[0]);
    assert!(store.equals(EXTENT, &[memory]));
    store.copy_within(EXTENT, 3 * EXTENT, 16384);
    assert!(store.equals(3 * EXTENT, &[memory]));
    assert_eq!((taken(&file), store.allocated()), (32768, 2 * EXTENT));
    store.copy_within(0, EXTENT, EXTENT);
    assert_eq!((taken(&file), store.allocated()), (16384, EXTENT));
}

#[test]
fn a_store_is_larger_than_memory_and_counts_what_it_holds() {
    const EXTENT: u64 = 2 << 20;
    let store = ByteStore::new(1 << 43).unwrap();
    let (_mapping, memory) = own_memory(4096);
    assert_eq!(store.allocated(), 0);
    store.read(1 << 42, &[memory]);
    assert_eq!(store.allocated(), 0);
    for at in [0, 5 * EXTENT - 1, (1 << 43) - 4096] {
        store.write(at, &[memory]);
    }
    assert_eq!(store.allocated(), 4 * EXTENT);
    store.discard(0, 4096);
    assert_eq!(store.allocated(), 4 * EXTENT);
    store.discard(0, 5 * EXTENT);
    assert_eq!(store.allocated(), 2 * EXTENT);
    store.discard(1, (1 << 43) - 1);
    assert_eq!(store.allocated(), 0);
    let small = ByteStore::new(4096).unwrap();
    small.write(0, &[memory]);
    assert_eq!(small.allocated(), 4096);
}
