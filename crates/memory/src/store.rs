//! Memory of our own that holds a volume's bytes: large, sparse, growable, reached by copies only.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{MemfdFlags, SealFlags, SeekFrom},
    process::{Resource, getrlimit},
};

use crate::{
    Access, Mapping, PAGE_SIZE, Reach, Segment, SegmentCursor, Target,
    huge::{self, Collapse, EXTENT, Settled, Stepped},
};

/// Chunks a store may consist of. Each one that is added at least doubles the store, so that these suffice for 64 bits.
const CHUNKS: usize = 64;

/// A store of so many bytes stays in a processor's caches for the most part.
const NEAR: usize = 16 << 20;
/// Bytes of a range that are prefetched at most: the processor finds the rest itself.
const PREFETCH: u64 = 8192;

#[derive(Debug)]
pub(crate) struct Chunk {
    /// Offset of the chunk's first byte within the store.
    start: u64,
    mapping: Mapping,
    /// The mapping is of a memory file, which others may hold, or like one: a page that was only read would be taken there.
    is_file: bool,
    /// One bit per extent that was written since it was last given back as a whole.
    touched: Box<[AtomicU64]>,
    /// Of memory files only.
    settled: Settled,
}

/// Told of every memory file that a store makes, with its number.
pub type OnFile = Box<dyn Fn(u32, BorrowedFd<'_>) -> io::Result<()> + Send + Sync>;

impl Chunk {
    fn new(start: u64, bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // Where private memory has a limit, it is for other things than what volumes hold.
        if getrlimit(Resource::Data).current.is_some() {
            return Ok(Self::over(start, Mapping::anonymous_shared(len)?, true));
        }
        let mapping = Mapping::anonymous(len)?;
        if bytes >= EXTENT {
            // A kernel without transparent huge pages refuses; ordinary pages do as well.
            let _ = mapping.advise_huge();
        }
        Ok(Self::over(start, mapping, false))
    }

    fn over(start: u64, mapping: Mapping, is_file: bool) -> Self {
        let words = (mapping.len() as u64).div_ceil(EXTENT).div_ceil(64) as usize;
        let touched = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { start, mapping, is_file, touched, settled: Settled::new(if is_file { words } else { 0 }) }
    }

    /// A chunk in a memory file.
    pub(crate) fn in_file(start: u64, file: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        let bytes = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mapping = Mapping::shared(file, 0, len, true)?;
        if bytes >= EXTENT {
            // As above. Where the system's settings for shared memory say no, `huge` makes up for it.
            let _ = mapping.advise_huge();
        }
        let chunk = Arc::new(Self::over(start, mapping, true));
        let mut at = 0;
        // What an earlier process wrote.
        while let Ok(data) = rustix::fs::seek(file, SeekFrom::Data(at)) {
            at = rustix::fs::seek(file, SeekFrom::Hole(data))?;
            chunk.touch(start + data, usize::try_from(at - data).unwrap_or(usize::MAX).max(1));
        }
        if bytes >= EXTENT {
            let weak = Arc::downgrade(&chunk);
            huge::watch(weak);
        }
        Ok(chunk)
    }

    /// How far from an offset the record says the same, and what: whether it was written.
    fn written(&self, offset: u64, len: usize) -> (usize, bool) {
        let is_written = |extent: u64| {
            let word = self.touched.get((extent / 64) as usize);
            word.is_none_or(|word| word.load(Ordering::Acquire) & 1 << (extent % 64) != 0)
        };
        let at = offset - self.start;
        let (first, last) = (at / EXTENT, (at + len as u64 - 1) / EXTENT);
        let written = is_written(first);
        let same = (first..=last).take_while(|extent| is_written(*extent) == written).last().unwrap_or(first);
        (((same + 1) * EXTENT - at).min(len as u64) as usize, written)
    }

    /// Calls `each` with the parts of a range of which the record says the same: the offset within the store, the length, and whether it was
    /// written. What was not reads as zeroes, and would take memory where it is looked at.
    fn parts(&self, offset: u64, len: usize, mut each: impl FnMut(u64, usize, bool)) {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (run, written) = self.written(at, len - done);
            each(at, run, written);
            done += run;
        }
    }

    /// Makes zeroes of what was written in a range.
    fn clear(&self, offset: u64, len: usize) {
        self.parts(offset, len, |at, run, written| {
            if written {
                self.piece(at, run).fill(0);
                // It may have been given back meanwhile.
                self.touch(at, run);
            }
        });
    }

    fn end(&self) -> u64 {
        self.start + self.mapping.len() as u64
    }

    fn piece(&self, offset: u64, len: usize) -> Segment {
        // SAFETY: the segment is used within a method of the store that owns the mapping, which is writable, and is not
        // handed out.
        unsafe { self.mapping.segment((offset - self.start) as usize, len) }.expect("the run lies within the chunk")
    }

    /// Records a write, once it is made: who finds the bit (acquire) finds the bytes.
    fn touch(&self, offset: u64, len: usize) {
        let first = (offset - self.start) / EXTENT;
        let last = (offset - self.start + len as u64 - 1) / EXTENT;
        for extent in first..=last {
            let (word, bit) = (&self.touched[(extent / 64) as usize], 1 << (extent % 64));
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Release);
                if self.is_file {
                    huge::written();
                }
            }
        }
    }

    /// Forgets the writes to the extents that lie wholly in the range.
    fn untouch(&self, offset: u64, len: usize) {
        let first = (offset - self.start).div_ceil(EXTENT);
        let past = (offset - self.start + len as u64) / EXTENT;
        for extent in first..past {
            let (word, bit) = ((extent / 64) as usize, 1 << (extent % 64));
            self.touched[word].fetch_and(!bit, Ordering::SeqCst);
            self.settled.forget(word, bit);
        }
    }

    fn discard(&self, offset: u64, len: usize) {
        let at = (offset - self.start) as usize;
        let page = PAGE_SIZE as usize;
        let (first, past) = (at.next_multiple_of(page), (at + len) / page * page);
        if first >= past {
            return self.clear(offset, len);
        }
        // Locked memory cannot be given back; then it is zeroed.
        let give_back = if self.is_file { Mapping::punch } else { Mapping::discard };
        // Before the pages go, as writes are recorded after they are made: whatever comes last, bytes that are not on record are
        // zeroes.
        self.untouch(offset, len);
        if give_back(&self.mapping, first, past - first).is_err() {
            self.piece(offset, len).fill(0);
            self.touch(offset, len);
            return;
        }
        self.clear(offset, first - at);
        self.clear(self.start + past as u64, at + len - past);
    }
}

impl Collapse for Chunk {
    /// Where an extent was written for the most part: one that was not would take memory that nobody needs.
    fn step(&self, from: usize) -> Option<Stepped> {
        self.settled.step(&self.touched, from, |offset| match self.mapping.resident(offset, EXTENT as usize) {
            Ok(pages) => pages as u64 >= EXTENT / PAGE_SIZE / 2 && huge::make(&self.mapping, offset),
            Err(_) => true,
        })
    }
}

/// Zeroed memory that grows in place and is backed by pages only where it was written.
///
/// It may be used from several threads at once. Overlapping uses at the same time mix their bytes, as they would on a disk.
/// What lies past [`Self::capacity`] cannot be reached: such a range panics, because callers check theirs.
pub struct ByteStore {
    /// Filled from the first on; a chunk never moves or goes before the store does.
    chunks: [OnceLock<Arc<Chunk>>; CHUNKS],
    /// Held while a chunk is added, never on the data path.
    growing: Mutex<()>,
    /// Its chunks are memory files, and this one is told of them.
    on_file: Option<OnFile>,
}

impl std::fmt::Debug for ByteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ByteStore").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

impl ByteStore {
    /// A store of at least `bytes` zeroes.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let store = Self { chunks: [const { OnceLock::new() }; CHUNKS], growing: Mutex::new(()), on_file: None };
        store.grow(bytes)?;
        Ok(store)
    }

    /// A store in memory files, which may outlive this process: `files` are those that an earlier one was told of, in order.
    pub fn in_files(bytes: u64, files: &[OwnedFd], on_file: OnFile) -> io::Result<Self> {
        let store = Self { chunks: [const { OnceLock::new() }; CHUNKS], growing: Mutex::new(()), on_file: Some(on_file) };
        for (place, file) in store.chunks.iter().zip(files) {
            place.set(Chunk::in_file(store.capacity(), file.as_fd())?).expect("the places are filled in order");
        }
        store.grow(bytes)?;
        Ok(store)
    }

    /// Bytes that can be reached.
    pub fn capacity(&self) -> u64 {
        self.present().last().map_or(0, Chunk::end)
    }

    fn present(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.iter().map_while(|chunk| Some(&**chunk.get()?))
    }

    /// Makes at least `bytes` bytes reachable. What is reachable stays so, and stays where it is.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        let _one_at_a_time = self.growing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let capacity = self.capacity();
        let Some(missing) = bytes.checked_sub(capacity).filter(|missing| *missing > 0) else { return Ok(()) };
        let room = io::Error::from(io::ErrorKind::OutOfMemory);
        let Some(size) = missing.max(capacity).checked_next_multiple_of(PAGE_SIZE) else { return Err(room) };
        let Some((number, free)) = (0..).zip(&self.chunks).find(|(_, chunk)| chunk.get().is_none()) else {
            return Err(room);
        };
        let chunk = match &self.on_file {
            None => Arc::new(Chunk::new(capacity, size)?),
            Some(on_file) => {
                let file = memory_file(size)?;
                let chunk = Chunk::in_file(capacity, file.as_fd())?;
                on_file(number, file.as_fd())?;
                chunk
            }
        };
        free.set(chunk).expect("the slot is free while the lock is held");
        Ok(())
    }

    /// Calls `each` with every chunk's part of the range: the chunk, the offset within the store, and the length.
    fn runs(&self, offset: u64, len: u64, mut each: impl FnMut(&Chunk, u64, usize)) {
        let end = offset.checked_add(len).expect("a range within the store");
        let mut at = offset;
        for chunk in self.present() {
            if at == end {
                return;
            }
            if at < chunk.end() {
                let run = (end - at).min(chunk.end() - at);
                each(chunk, at, run as usize);
                at += run;
            }
        }
        assert_eq!(at, end, "a range within the store");
    }

    /// The range, if it lies in the first chunk: all of it does in a store that never grew.
    #[inline]
    fn first_chunk(&self, offset: u64, len: usize) -> Option<(&Chunk, Segment)> {
        let chunk = self.chunks.first()?.get()?;
        // SAFETY: as for `Chunk::piece`, but that `reach` hands it out, for as long as the store is borrowed.
        let piece = unsafe { chunk.mapping.segment(usize::try_from(offset).ok()?, len) }?;
        Some((chunk, piece))
    }

    /// Whether most of the store is in no cache.
    #[inline]
    fn is_far(chunk: &Chunk) -> bool {
        chunk.mapping.len() > NEAR
    }

    /// Brings a range that will be read near. Returns whether it is any use: not in a store that fits in the caches. What lies
    /// outside the store is left alone.
    #[inline]
    pub fn prefetch(&self, offset: u64, len: u64) -> bool {
        let len = len.min(PREFETCH) as usize;
        match self.first_chunk(offset, len) {
            Some((chunk, piece)) => {
                if Self::is_far(chunk) {
                    piece.prefetch_block();
                }
                Self::is_far(chunk)
            }
            None => self.capacity() > NEAR as u64,
        }
    }

    /// Copies the bytes from `offset` on into the segments.
    ///
    /// # Panics
    /// As every method here, when the range does not lie within the capacity.
    #[inline]
    pub fn read(&self, offset: u64, to: &[Segment]) {
        if let [to] = to
            && !to.is_empty()
            && let Some((chunk, piece)) = self.first_chunk(offset, to.len())
            && (!chunk.is_file || chunk.written(offset, to.len()) == (to.len(), true))
        {
            return piece.copy_to(to, if Self::is_far(chunk) { Target::GuestFromFar } else { Target::Guest });
        }
        self.read_list(offset, to);
    }

    /// The range itself, where it lies in one piece. To be read it must have been written, all of it; whoever writes says so afterwards
    /// ([`Self::reached`]). Nobody has it longer than the store:
    ///
    /// ```compile_fail,E0505
    /// use millrace_memory::{Access, ByteStore};
    ///
    /// let store = ByteStore::new(4096).unwrap();
    /// let reach = store.reach(0, 512, Access::Write).unwrap();
    /// drop(store);
    /// reach.segment.fill(1);
    /// ```
    ///
    /// This is well:
    ///
    /// ```
    /// use millrace_memory::{Access, ByteStore};
    ///
    /// let store = ByteStore::new(4096).unwrap();
    /// let reach = store.reach(0, 512, Access::Write).unwrap();
    /// reach.segment.fill(1);
    /// drop(store);
    /// ```
    #[inline]
    pub fn reach(&self, offset: u64, len: usize, access: Access) -> Option<Reach<'_>> {
        let (chunk, segment) = self.first_chunk(offset, len).filter(|_| len > 0)?;
        let there = access == Access::Write || !chunk.is_file || chunk.written(offset, len) == (len, true);
        let target = if Self::is_far(chunk) { Target::Far } else { Target::Near };
        there.then_some(Reach { segment: segment.into(), target })
    }

    /// A range that was [reached](Self::reach) has been written.
    #[inline]
    pub fn reached(&self, offset: u64, len: usize) {
        self.runs(offset, len as u64, Chunk::touch);
    }

    fn read_list(&self, offset: u64, to: &[Segment]) {
        let mut cursor = SegmentCursor::new(to);
        self.runs(offset, cursor.remaining() as u64, |chunk, at, len| {
            chunk.parts(at, len, |at, run, written| {
                if written {
                    cursor.copy_from(chunk.piece(at, run));
                } else {
                    cursor.fill(run, 0);
                }
            });
        });
    }

    /// Copies the segments to the bytes from `offset` on.
    #[inline]
    pub fn write(&self, offset: u64, from: &[Segment]) {
        if let [from] = from
            && !from.is_empty()
            && let Some((chunk, piece)) = self.first_chunk(offset, from.len())
        {
            from.copy_to(&piece, if Self::is_far(chunk) { Target::Far } else { Target::Near });
            return chunk.touch(offset, from.len());
        }
        self.write_list(offset, from);
    }

    fn write_list(&self, offset: u64, from: &[Segment]) {
        let mut cursor = SegmentCursor::new(from);
        self.runs(offset, cursor.remaining() as u64, |chunk, at, len| {
            cursor.copy_to(chunk.piece(at, len));
            chunk.touch(at, len);
        });
    }

    /// Whether the bytes from `offset` on equal the segments'.
    pub fn equals(&self, offset: u64, with: &[Segment]) -> bool {
        let mut cursor = SegmentCursor::new(with);
        let mut equal = true;
        self.runs(offset, cursor.remaining() as u64, |chunk, at, len| {
            chunk.parts(at, len, |at, run, written| {
                equal = equal && if written { cursor.equals(chunk.piece(at, run)) } else { cursor.is_zero(run) };
            });
        });
        equal
    }

    /// Copies `len` bytes from one offset to another, and gives memory back where there is none to copy. The ranges should not overlap.
    pub fn copy_within(&self, from: u64, to: u64, len: u64) {
        self.runs(from, len, |chunk, at, run| {
            chunk.parts(at, run, |at, run, written| {
                let to = to + (at - from);
                if written {
                    self.write(to, &[chunk.piece(at, run)]);
                } else {
                    self.discard(to, run as u64);
                }
            });
        });
    }

    /// Writes zeroes.
    pub fn zero(&self, offset: u64, len: u64) {
        self.runs(offset, len, |chunk, at, run| {
            chunk.piece(at, run).fill(0);
            chunk.touch(at, run);
        });
    }

    /// Makes the range read as zeroes and gives its whole pages back to the system.
    pub fn discard(&self, offset: u64, len: u64) {
        self.runs(offset, len, Chunk::discard);
    }

    /// Bytes held, counted in extents of 2 MiB that were written.
    pub fn allocated(&self) -> u64 {
        let held = |chunk: &Chunk| {
            let bits: u32 = chunk.touched.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum();
            (u64::from(bits) * EXTENT).min(chunk.mapping.len() as u64)
        };
        self.present().map(held).sum()
    }
}

/// A file of zeroes that nobody can shrink.
fn memory_file(bytes: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("millrace-volume", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
