//! Huge pages for memory files and files on tmpfs, made beside the data path.
//!
//! ```text
//!   ByteStore::write ─ first write to an extent ─┐                           which extents are there for the most part?
//!   FileMap ───── an extent without a hole ──────┴► written() ─ unpark ─► thread: which are there as a whole?
//!                                                                            └─► MADV_COLLAPSE, one by one
//! ```
//!
//! Anonymous memory that asks for huge pages gets them as it is touched. Memory files and files on tmpfs do so only where the system's
//! administrator allows it (`shmem_enabled`, the mount's `huge=`; `never` unless changed). But one huge page in the place of small ones that are there
//! can always be had (Linux 6.1). That takes milliseconds, so that a thread does it. Where it fails, small pages do as well.

use std::{
    sync::{
        Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::mapping::Mapping;

/// Bytes of a huge page, and of what is recorded by one bit: an extent.
pub(crate) const EXTENT: u64 = 2 << 20;
/// Who writes to an extent often writes to the next ones soon.
const SOON: Duration = Duration::from_millis(100);
/// Extents that fill slowly are looked at after pauses that double, until they are longer than this.
const LAST: Duration = Duration::from_secs(60);
/// Looking takes at most one part in so many of a core.
const SHARE: u32 = 20;
/// Extents of one that get their pages before others have their turn.
const TURN: usize = 64;

static WATCHED: Mutex<Vec<Weak<dyn Collapse>>> = Mutex::new(Vec::new());
static THREAD: OnceLock<Option<Thread>> = OnceLock::new();
/// Something was written since the thread last looked.
static WRITTEN: AtomicBool = AtomicBool::new(false);

/// What gets huge pages by and by.
pub(crate) trait Collapse: Send + Sync {
    /// Puts a huge page in the place of small ones behind the next extent that wants one, from this one on; `None` where no more do.
    fn step(&self, from: usize) -> Option<Stepped>;
}

/// What became of an extent.
pub(crate) struct Stepped {
    /// Where to go on.
    pub(crate) next: usize,
    /// Whether it need not be looked at again.
    pub(crate) settled: bool,
    /// How long nothing is to be done for the next one, as long as this one took.
    pub(crate) rest: Duration,
}

/// The extents of a mapping that have their huge page, or cannot have one: a bit for each.
#[derive(Debug)]
pub(crate) struct Settled(Box<[AtomicU64]>);

impl Settled {
    pub(crate) fn new(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// Extents of a word are not wanted any more: after that is recorded (`SeqCst`), see [`Self::step`].
    pub(crate) fn forget(&self, word: usize, bits: u64) {
        if let Some(settled) = self.0.get(word) {
            settled.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// See [`Collapse::step`]: `make` is given the extent's place in the mapping, and says whether it is settled.
    pub(crate) fn step(&self, wanted: &[AtomicU64], from: usize, make: impl FnOnce(usize) -> bool) -> Option<Stepped> {
        let mut from = from;
        while let (Some(wanted), Some(settled)) = (wanted.get(from / 64), self.0.get(from / 64)) {
            let new = wanted.load(Ordering::Relaxed) & !settled.load(Ordering::Relaxed) & u64::MAX << (from % 64);
            if new == 0 {
                from = (from / 64 + 1) * 64;
                continue;
            }
            let extent = from / 64 * 64 + new.trailing_zeros() as usize;
            let bit = 1 << (extent % 64);
            from = extent + 1;
            // The race is with who clears the one bit, then the other (`forget`): in the one order of all four (SeqCst), either this finds the
            // extent forgotten, or what is set here is cleared there.
            settled.fetch_or(bit, Ordering::SeqCst);
            let is_wanted = wanted.load(Ordering::SeqCst) & bit != 0;
            let is_settled = is_wanted && make(extent * EXTENT as usize);
            if !is_settled {
                settled.fetch_and(!bit, Ordering::Relaxed);
            }
            return Some(Stepped { next: from, settled: is_settled || !is_wanted, rest: Duration::ZERO });
        }
        None
    }
}

/// Puts a huge page in the place of the small ones of an extent; whether that is settled. Outside the mapping lies part of the last extent at
/// most: it has no huge page, as one that the system refuses.
pub(crate) fn make(mapping: &Mapping, offset: usize) -> bool {
    mapping.collapse(offset, EXTENT as usize).unwrap_or(true)
}

/// From now on what is watched gets huge pages, as it is filled.
pub(crate) fn watch(watched: Weak<dyn Collapse>) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
    // Without the thread, pages stay small.
    THREAD.get_or_init(|| {
        let started = thread::Builder::new().name("millrace-huge".into()).spawn(run);
        started.ok().map(|handle| handle.thread().clone())
    });
    written();
}

/// An extent was written for the first time, or is whole now.
pub(crate) fn written() {
    // Relaxed: it tells when to look. What is seen then is the record of what is watched.
    if !WRITTEN.swap(true, Ordering::Relaxed)
        && let Some(Some(thread)) = THREAD.get()
    {
        thread.unpark();
    }
}

fn run() {
    let mut pause = None;
    let mut took = Duration::ZERO;
    loop {
        match pause {
            None => thread::park(),
            Some(pause) => thread::park_timeout(pause),
        }
        if WRITTEN.load(Ordering::Relaxed) {
            pause = None;
            thread::sleep(SOON.max(took * SHARE).min(LAST));
            // Whoever sets it after this wakes the thread once more.
            WRITTEN.store(false, Ordering::Relaxed);
        }
        let looked = look();
        took = looked.took;
        let next = pause.map_or(SOON, |pause| (pause * 2).max(SOON)).max(took * SHARE);
        pause = if looked.more { Some(Duration::ZERO) } else { Some(next).filter(|next| looked.again > 0 && *next < LAST) };
    }
}

/// What a look has found.
#[derive(Default)]
struct Looked {
    /// Extents that are to be looked at again.
    again: usize,
    /// There are more that were not looked at, so that others have their turn.
    more: bool,
    /// How long it took, but for rests, and what was settled before them.
    took: Duration,
}

/// Looks at everything that is watched, and keeps none of it from going for longer than one extent takes.
fn look() -> Looked {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.retain(|watched| watched.strong_count() > 0);
    let present = watched.clone();
    drop(watched);
    let began = Instant::now();
    let (mut looked, mut rested) = (Looked::default(), Duration::ZERO);
    for watched in present {
        let (mut from, mut settled) = (0, 0);
        while let Some(Stepped { next, settled: is_settled, rest }) =
            watched.upgrade().and_then(|watched| watched.step(from))
        {
            thread::sleep(rest);
            rested += if is_settled { 2 * rest } else { rest };
            from = next;
            looked.again += usize::from(!is_settled);
            settled += usize::from(is_settled);
            if settled == TURN {
                looked.more = true;
                break;
            }
        }
    }
    looked.took = began.elapsed().saturating_sub(rested);
    looked
}

#[cfg(test)]
mod tests {
    use std::os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    };

    use rustix::fs::{FallocateFlags, MemfdFlags};

    use super::*;
    use crate::{
        ByteStore, FileMap, Mapping, Segment,
        tests::{content as bytes, own_memory},
    };

    const EXTENT: usize = super::EXTENT as usize;
    const PATIENCE: Duration = Duration::from_secs(60);

    fn memory_file(name: &str, bytes: usize) -> OwnedFd {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        file
    }

    fn store_in(file: &OwnedFd) -> ByteStore {
        let bytes = u64::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap();
        let files = [file.try_clone().unwrap()];
        ByteStore::in_files(bytes, &files, Box::new(|_, _| Ok(()))).unwrap()
    }

    /// Whether this system replaces small pages on demand.
    fn is_possible() -> bool {
        let file = memory_file("huge-probe", EXTENT);
        let mapping = Mapping::shared(file.as_fd(), 0, EXTENT, true).unwrap();
        // SAFETY: the mapping is writable and outlives the segment.
        unsafe { mapping.segment(0, EXTENT) }.unwrap().fill(1);
        mapping.collapse(0, EXTENT).is_ok()
    }

    /// Bytes of this process's mappings of the file that are huge pages.
    fn huge_bytes(name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut ours = false;
        let mut bytes = 0;
        for line in maps.lines() {
            if line.contains("memfd:") || line.contains(" rw-") || line.contains(" r-") {
                ours = line.contains(name);
            } else if let Some(kilobytes) = line.strip_prefix("ShmemPmdMapped:").filter(|_| ours) {
                bytes += kilobytes.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
            }
        }
        bytes
    }

    /// Bytes that the file takes.
    fn taken(file: &OwnedFd) -> usize {
        usize::try_from(rustix::fs::fstat(file).unwrap().st_blocks).unwrap() * 512
    }

    /// Looks, and touches a page, until so many bytes are huge pages.
    fn look_until_huge(touch: impl Fn(&[Segment]), name: &str, bytes: usize) {
        let (_mapping, page) = own_memory(4096);
        let limit = Instant::now() + PATIENCE;
        while huge_bytes(name) != bytes {
            assert!(Instant::now() < limit, "{} bytes of huge pages, not {bytes}", huge_bytes(name));
            look();
            touch(&[page]);
            thread::sleep(Duration::from_micros(20));
        }
    }

    #[test]
    fn what_a_file_holds_gets_huge_pages_and_its_holes_stay() {
        const NAME: &str = "huge-test-file";
        let file = std::fs::File::from(memory_file(NAME, 4 * EXTENT));
        let content: Vec<u8> = (0..4 * EXTENT).map(|at| (at / 4096 + at) as u8).collect();
        file.write_all_at(&content[..EXTENT], 0).unwrap();
        // All of one but a page, and one that is written later.
        file.write_all_at(&content[EXTENT + 4096..2 * EXTENT], EXTENT as u64 + 4096).unwrap();
        let map = FileMap::new(file.as_fd(), 4 * EXTENT as u64, true).unwrap().expect("a memfd lies in memory");
        let touch = |at: usize| {
            let map = &map;
            move |page: &[Segment]| _ = map.read(at as u64, page)
        };
        look();
        if is_possible() {
            look_until_huge(touch(0), NAME, EXTENT);
        }
        assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * EXTENT as u64 - 4096, "no hole was filled");
        file.write_all_at(&content[2 * EXTENT..3 * EXTENT], 2 * EXTENT as u64).unwrap();
        map.written(2 * EXTENT as u64, EXTENT as u64);
        if is_possible() {
            look_until_huge(touch(2 * EXTENT), NAME, 2 * EXTENT);
        }
        // Data are taken out, and come back in small pages.
        map.forget(0, EXTENT as u64);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 0, EXTENT as u64).unwrap();
        map.forget(0, EXTENT as u64);
        file.write_all_at(&content[..EXTENT], 0).unwrap();
        map.written(0, EXTENT as u64);
        if is_possible() {
            look_until_huge(touch(0), NAME, 2 * EXTENT);
        }
        let (_mapping, memory) = own_memory(EXTENT);
        for at in [0, 2 * EXTENT] {
            assert!(map.read(at as u64, &[memory]) && bytes(&memory) == content[at..at + EXTENT]);
        }
        assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * EXTENT as u64 - 4096);
    }

    #[test]
    fn what_was_written_gets_huge_pages_and_what_was_not_stays_sparse() {
        const NAME: &str = "huge-test-store";
        let file = memory_file(NAME, 3 * EXTENT + EXTENT / 2);
        let store = store_in(&file);
        let (_mapping, memory) = own_memory(EXTENT);
        let number = |memory: &Segment| (0..EXTENT).step_by(8).for_each(|at| memory.write_value(at, &(at as u64 * 3 + 1)));
        number(&memory);
        let page = memory.part(0, 4096).unwrap();
        store.write(0, &[memory]);
        store.write(EXTENT as u64, &[page]);
        store.write(3 * EXTENT as u64, &[memory.part(0, EXTENT / 2).unwrap()]);
        look();
        if is_possible() {
            look_until_huge(|page| store.read(0, page), NAME, EXTENT);
        }
        assert_eq!(taken(&file), EXTENT + 4096 + EXTENT / 2, "the page alone in its extent stays alone");
        assert!(store.equals(0, &[memory]) && store.equals(EXTENT as u64, &[page]));
        assert!(store.equals(3 * EXTENT as u64, &[memory.part(0, EXTENT / 2).unwrap()]));
        // Given back, it is written and found anew.
        store.discard(0, EXTENT as u64);
        assert_eq!(taken(&file), 4096 + EXTENT / 2);
        store.write(0, &[memory]);
        if is_possible() {
            look_until_huge(|page| store.read(0, page), NAME, EXTENT);
        }
        assert!(store.equals(0, &[memory]));
        // A successor finds what is there.
        drop(store);
        let store = store_in(&file);
        assert!(store.equals(0, &[memory]) && store.equals(EXTENT as u64, &[page]));
    }

    #[test]
    fn writes_meanwhile_are_not_lost() {
        let file = memory_file("huge-test-writes", 4 * EXTENT);
        let store = store_in(&file);
        let pages = 4 * EXTENT / 4096;
        let stamp = |memory: &Segment, page: usize, round: usize| memory.write_value(0, &[page as u64, round as u64]);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (_mapping, memory) = own_memory(4096);
                for round in 0..8 {
                    // In an order of no pattern: the factor and the count have no common divisor.
                    for page in (0..pages).map(|at| at * 1021 % pages) {
                        stamp(&memory, page, round);
                        store.write(page as u64 * 4096, &[memory]);
                    }
                    store.discard(round as u64 % 4 * EXTENT as u64, EXTENT as u64);
                }
            });
            while !writer.is_finished() {
                look();
            }
        });
        let (_mapping, memory) = own_memory(4096);
        for page in 0..pages {
            memory.fill(0);
            // Round 7 ended with giving the last extent back.
            if page / (EXTENT / 4096) < 3 {
                stamp(&memory, page, 7);
            }
            assert!(store.equals(page as u64 * 4096, &[memory]), "page {page}");
        }
    }
}
