//! Huge pages for memory files, made beside the data path.
//!
//! ```text
//!   ByteStore::write ─ first write to an extent ─► written() ─ unpark ─► thread: which extents are there for the most part?
//!                                                                          └─► MADV_COLLAPSE, one by one
//! ```
//!
//! Anonymous memory that asks for huge pages gets them as it is touched. A memory file does so only where the system's
//! administrator allows it (`shmem_enabled`, which is `never` unless changed). But one huge page in the place of small ones that are there
//! can always be had (Linux 6.1). That takes a millisecond, so that a thread does it. Where it fails, small pages do as well.

use std::{
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::store::Chunk;

/// Who writes to an extent often writes to the next ones soon.
const SOON: Duration = Duration::from_millis(100);
/// Extents that fill slowly are looked at after pauses that double, until they are longer than this.
const LAST: Duration = Duration::from_secs(60);
/// Looking takes at most one part in so many of a core.
const SHARE: u32 = 20;

static CHUNKS: Mutex<Vec<Weak<Chunk>>> = Mutex::new(Vec::new());
static THREAD: OnceLock<Option<Thread>> = OnceLock::new();
/// Something was written since the thread last looked.
static WRITTEN: AtomicBool = AtomicBool::new(false);

/// From now on the chunk, which is in a memory file, gets huge pages as it is written.
pub(crate) fn watch(chunk: &Arc<Chunk>) {
    CHUNKS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(chunk));
    // Without the thread, pages stay small.
    THREAD.get_or_init(|| {
        let started = thread::Builder::new().name("millrace-huge".into()).spawn(run);
        started.ok().map(|handle| handle.thread().clone())
    });
    written();
}

/// An extent was written for the first time.
pub(crate) fn written() {
    // Relaxed: it tells when to look. What is seen then is the chunk's own record.
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
            thread::sleep(SOON.max(took * SHARE));
            // Whoever sets it after this wakes the thread once more.
            WRITTEN.store(false, Ordering::Relaxed);
        }
        let began = Instant::now();
        let unfilled = look();
        took = began.elapsed();
        let next = pause.map_or(SOON, |pause| pause * 2).max(took * SHARE);
        pause = Some(next).filter(|next| unfilled > 0 && *next < LAST);
    }
}

/// Looks at every chunk; returns the number of extents that are to be looked at again.
fn look() -> usize {
    let mut chunks = CHUNKS.lock().unwrap_or_else(PoisonError::into_inner);
    chunks.retain(|chunk| chunk.strong_count() > 0);
    let present: Vec<Arc<Chunk>> = chunks.iter().filter_map(Weak::upgrade).collect();
    drop(chunks);
    present.iter().map(|chunk| chunk.collapse()).sum()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::MemfdFlags;

    use super::*;
    use crate::{ByteStore, Mapping, Segment, tests::own_memory};

    const EXTENT: usize = 2 << 20;
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

    /// Looks, and touches a page of an extent, until it has its huge page.
    fn look_until_huge(store: &ByteStore, name: &str, at: usize, bytes: usize) {
        let (_mapping, page) = own_memory(4096);
        let limit = Instant::now() + PATIENCE;
        while huge_bytes(name) != bytes {
            assert!(Instant::now() < limit, "{} bytes of huge pages, not {bytes}", huge_bytes(name));
            look();
            store.read(at as u64, &[page]);
            thread::sleep(Duration::from_micros(20));
        }
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
            look_until_huge(&store, NAME, 0, EXTENT);
        }
        assert_eq!(taken(&file), EXTENT + 4096 + EXTENT / 2, "the page alone in its extent stays alone");
        assert!(store.equals(0, &[memory]) && store.equals(EXTENT as u64, &[page]));
        assert!(store.equals(3 * EXTENT as u64, &[memory.part(0, EXTENT / 2).unwrap()]));
        // Given back, it is written and found anew.
        store.discard(0, EXTENT as u64);
        assert_eq!(taken(&file), 4096 + EXTENT / 2);
        store.write(0, &[memory]);
        if is_possible() {
            look_until_huge(&store, NAME, 0, EXTENT);
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
