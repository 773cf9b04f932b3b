//! A file on tmpfs as memory: its blocks are copied to and from a mapping instead of asked for by system calls.
//!
//! Only what the file holds already is reached that way. A touch of a hole would take memory where a read must not, and where the
//! file system is full it would be a bus error where a write has to fail: so holes are left to the caller's system calls, and
//! an extent counts as held once it has no hole. Whatever takes data away (a hole is punched, the file shrinks) is announced by
//! [`FileMap::forget`] before, and again when it is done: who looks meanwhile may still see what is about to go.
//!
//! What is held gets [huge pages](crate::huge) by and by: a copy of a few kilobytes from somewhere in a large file waits for the
//! translation of small ones as long as for half of its data.
//!
//! Somebody else may truncate the file all the same. Then the guard replaces the mapping; from then on nothing is copied any more,
//! and whoever was copying is told that it does not count.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
    time::Instant,
};

use rustix::fs::SeekFrom;

use crate::{
    Mapping, PAGE_SIZE, Segment, SegmentCursor, Target,
    guard::{GuardedMapping, Poison},
    huge::{self, Collapse, EXTENT, Settled, Stepped},
};

/// A file of so many bytes stays in a processor's caches for the most part.
const NEAR: u64 = 16 << 20;
/// Of the writes into extents with holes, one in so many is followed by another look.
const LOOK_EVERY: u32 = 64;

/// See the module. May be used from several threads at once.
#[derive(Debug)]
pub struct FileMap {
    mapping: GuardedMapping,
    bytes: u64,
    poison: Poison,
    /// One bit per extent without a hole. The extent past the last whole one is never held.
    held: Box<[AtomicU64]>,
    settled: Settled,
    /// Writes into extents with holes.
    writes: AtomicU32,
    /// Times that something was forgotten.
    forgotten: AtomicU64,
}

impl FileMap {
    /// Maps the first `bytes` bytes of a file; `None` when its file system is not one in memory.
    ///
    /// # Errors
    /// What the system said to the mapping.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64, writable: bool) -> io::Result<Option<Arc<Self>>> {
        let system = rustix::fs::fstatfs(fd)?;
        // The type's width differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        let is_tmpfs = system.f_type as i64 == libc::TMPFS_MAGIC as i64;
        let Some(len) = usize::try_from(bytes).ok().filter(|len| is_tmpfs && *len > 0) else { return Ok(None) };
        let poison = Poison::new();
        let mapping = GuardedMapping::new(Mapping::shared(fd.as_fd(), 0, len, writable)?, &poison)?;
        let words = (bytes / EXTENT).div_ceil(64) as usize;
        let held = (0..words).map(|_| AtomicU64::new(0)).collect();
        let (writes, forgotten) = (AtomicU32::new(0), AtomicU64::new(0));
        let map = Arc::new(Self { mapping, bytes, poison, held, settled: Settled::new(words), writes, forgotten });
        map.look_at_all(fd);
        if words > 0 {
            let weak = Arc::downgrade(&map);
            huge::watch(weak);
        }
        Ok(Some(map))
    }

    /// Records the extents that have no hole: once, for it takes as long as the file is.
    fn look_at_all(&self, fd: BorrowedFd<'_>) {
        let (mut whole_to, forgotten) = (0, self.forgotten.load(Ordering::SeqCst));
        for extent in 0..self.bytes / EXTENT {
            let (start, end) = (extent * EXTENT, (extent + 1) * EXTENT);
            if whole_to < end {
                // Where the next hole is; the file's end is one.
                match rustix::fs::seek(fd, SeekFrom::Hole(start)) {
                    Ok(hole) => whole_to = hole,
                    Err(_) => return,
                }
            }
            if whole_to >= end {
                self.hold(extent, forgotten);
            }
        }
    }

    /// Records the extents of a range that have no hole, each by itself: to ask where the next hole is would take as long as the file is, and
    /// whoever asked would be kept.
    fn look(&self, offset: u64, len: u64) {
        let (first, past) = (offset / EXTENT, (offset + len).min(self.bytes).div_ceil(EXTENT));
        for extent in first..past.min(self.bytes / EXTENT) {
            let forgotten = self.forgotten.load(Ordering::SeqCst);
            if !self.holds(extent * EXTENT, EXTENT) && self.is_whole((extent * EXTENT) as usize) {
                self.hold(extent, forgotten);
            }
        }
    }

    /// Whether all pages of an extent are there. Those that are swapped out count as holes: they are as well left to system calls.
    fn is_whole(&self, at: usize) -> bool {
        self.mapping.resident(at, EXTENT as usize).is_ok_and(|pages| pages as u64 == EXTENT / PAGE_SIZE)
    }

    /// Records an extent in which no hole was seen, after so many things had been forgotten.
    fn hold(&self, extent: u64, forgotten: u64) {
        let Some(word) = self.held.get((extent / 64) as usize) else { return };
        // SeqCst for the race below; as a release it pairs with the acquire in `holds`.
        word.fetch_or(1 << (extent % 64), Ordering::SeqCst);
        // Race: what was seen has gone meanwhile. `forget` counts, then clears the bit: either it clears this one, or the count is another one
        // here.
        if self.forgotten.load(Ordering::SeqCst) == forgotten {
            huge::written();
        } else {
            word.fetch_and(!(1 << (extent % 64)), Ordering::SeqCst);
        }
    }

    #[inline]
    fn holds(&self, offset: u64, len: u64) -> bool {
        let Some(last) = len.checked_sub(1).and_then(|rest| offset.checked_add(rest)) else { return false };
        (offset / EXTENT..=last / EXTENT).all(|extent| {
            let word = self.held.get((extent / 64) as usize);
            word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (extent % 64) != 0)
        })
    }

    /// The range as memory, if the file holds all of it.
    #[inline]
    fn piece(&self, offset: u64, segments: &[Segment]) -> Option<Segment> {
        let len = crate::total_len(segments);
        if self.poison.is_set() || !self.holds(offset, len as u64) {
            return None;
        }
        // SAFETY: the segment is used within a method of the map that owns the mapping, and is not handed out; only `write`
        // writes to it, which its caller must not call for a map that is not writable, and the guard outlives a fault.
        unsafe { self.mapping.segment(usize::try_from(offset).ok()?, len) }
    }

    /// Copies the bytes from `offset` on into the segments. `false`: they have to be read by a system call.
    #[inline]
    pub fn read(&self, offset: u64, to: &[Segment]) -> bool {
        let Some(piece) = self.piece(offset, to) else { return false };
        match to {
            [to] => piece.copy_to(to, if self.is_far() { Target::GuestFromFar } else { Target::Guest }),
            list => _ = SegmentCursor::new(list).copy_from(piece),
        }
        self.is_sound(Ordering::Acquire)
    }

    /// Copies the segments to the bytes from `offset` on. `false`: they have to be written by a system call.
    ///
    /// The map must have been made writable.
    #[inline]
    pub fn write(&self, offset: u64, from: &[Segment]) -> bool {
        let Some(piece) = self.piece(offset, from) else { return false };
        match from {
            [from] => from.copy_to(&piece, if self.is_far() { Target::Far } else { Target::Near }),
            list => _ = SegmentCursor::new(list).copy_to(piece),
        }
        // Stores must have been made before the poison is looked at. On x86 a processor that is to forget the old mapping is interrupted,
        // which ends the copy before; elsewhere nothing comes between them.
        self.is_sound(if cfg!(target_arch = "x86_64") { Ordering::Acquire } else { Ordering::SeqCst })
    }

    /// Whether what was copied before is the file's: the guard sets the poison before it replaces the mapping.
    #[inline]
    fn is_sound(&self, order: Ordering) -> bool {
        // Race: the mapping is replaced while it is copied from or to, and the poison must not have been looked at before the copy. The
        // other side is the order in `guard::replace_mapping`. Acquire is enough after loads, and costs nothing where they are in order.
        fence(order);
        !self.poison.is_set()
    }

    /// Brings a range that will be read near, if the file holds it. Returns whether it is any use.
    #[inline]
    pub fn prefetch(&self, offset: u64, len: u64) -> bool {
        let len = len.min(8192);
        if self.is_far() && self.holds(offset, len) {
            // SAFETY: as in `piece`.
            let piece = unsafe { self.mapping.segment(offset as usize, len as usize) };
            if let Some(piece) = piece {
                piece.prefetch_block();
            }
        }
        self.is_far()
    }

    /// Whether most of the file is in no cache.
    #[inline]
    fn is_far(&self) -> bool {
        self.bytes > NEAR
    }

    /// Data will be taken out of a range, or have been: from now on it is left to system calls.
    pub fn forget(&self, offset: u64, len: u64) {
        // The other side of the race in `hold`.
        self.forgotten.fetch_add(1, Ordering::SeqCst);
        let past = offset.saturating_add(len).min(self.bytes).div_ceil(EXTENT);
        for extent in offset / EXTENT..past {
            let (word, bit) = ((extent / 64) as usize, 1 << (extent % 64));
            if let Some(held) = self.held.get(word) {
                held.fetch_and(!bit, Ordering::SeqCst);
                self.settled.forget(word, bit);
            }
        }
    }

    /// A system call wrote a range: now and then it is seen whether holes have gone. The process must own the file or be allowed to write
    /// it: of others the system says that all pages are there.
    pub fn written(&self, offset: u64, len: u64) {
        // Relaxed: only about how many counts.
        let chosen = self.writes.fetch_add(1, Ordering::Relaxed).is_multiple_of(LOOK_EVERY);
        if (chosen || (offset + len).is_multiple_of(EXTENT)) && !self.holds(offset, len) {
            self.look(offset, len);
        }
    }
}

impl Collapse for FileMap {
    /// Of a file that is opened all extents may be waiting: half of a core at most is used for them. What is swapped out is left where it is.
    fn step(&self, from: usize) -> Option<Stepped> {
        let began = Instant::now();
        let stepped = self
            .settled
            .step(&self.held, from, |offset| self.poison.is_set() || self.is_whole(offset) && self.mapping.collapse(offset));
        stepped.map(|stepped| Stepped { rest: began.elapsed(), ..stepped })
    }
}
