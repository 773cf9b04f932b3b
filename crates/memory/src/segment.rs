//! A checked piece of memory that somebody else may be writing to.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::copy::{Target, copy_bytes, copy_towards};

/// A contiguous piece of mapped memory, laid out as a `struct iovec`.
///
/// The memory may be changed by its other owner at any instant, so there is no way to get a reference to it: only copies.
/// It stays mapped while a request that holds the segment is in flight (see the crate's invariants).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    ptr: NonNull<u8>,
    len: usize,
}

impl Segment {
    /// A segment over `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must be mapped, readable and (where the segment will be written) writable, and must stay so until the
    /// last request that holds this segment or a part of it has completed.
    #[inline]
    pub unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Eight bytes that are there for ever, that everybody may write at once and nobody reads: where the count of an event fd goes that is
    /// read only to wait for it.
    pub fn sink() -> Self {
        static SINK: AtomicU64 = AtomicU64::new(0);
        // SAFETY: a static is never unmapped, and this one may be written through shared references.
        unsafe { Self::new(NonNull::from(&SINK).cast(), size_of::<u64>()) }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a segment of no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes lie in this process: for system calls and device DMA, never for a Rust reference.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The part of `len` bytes that starts at `offset`; `None` when it does not lie within the segment.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: offset <= self.len, so the pointer stays within the mapping the segment was made over.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(Self { ptr, len })
    }

    /// Whether `next` starts where this one ends, so that both are one run of bytes.
    #[inline]
    pub fn adjoins(&self, next: &Segment) -> bool {
        (self.ptr.as_ptr() as usize).checked_add(self.len) == Some(next.ptr.as_ptr() as usize)
    }

    /// Lengthens this segment over `next`, which must adjoin it.
    #[inline]
    pub fn extend_over(&mut self, next: &Segment) {
        assert!(self.adjoins(next), "only adjoining segments merge");
        self.len += next.len;
    }

    /// Copies bytes out, starting at `offset` within the segment.
    ///
    /// # Panics
    /// When the range does not lie within the segment: callers check lengths where they read them.
    #[inline]
    pub fn read_at(&self, offset: usize, out: &mut [u8]) {
        let part = self.part(offset, out.len()).expect("read within the segment");
        // SAFETY: `part` is mapped memory of out.len() bytes; `out` is ours and cannot overlap memory shared with a guest.
        unsafe { copy_bytes(part.as_ptr(), out.as_mut_ptr(), out.len()) }
    }

    /// Copies bytes in, starting at `offset` within the segment.
    ///
    /// # Panics
    /// When the range does not lie within the segment.
    #[inline]
    pub fn write_at(&self, offset: usize, data: &[u8]) {
        let part = self.part(offset, data.len()).expect("write within the segment");
        // SAFETY: `part` is mapped, writable memory of data.len() bytes; `data` is ours and does not overlap it.
        unsafe { copy_bytes(data.as_ptr(), part.as_ptr(), data.len()) }
    }

    /// Copies a value out.
    ///
    /// # Panics
    /// When the value does not lie within the segment.
    #[inline]
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let mut value = T::new_zeroed();
        self.read_at(offset, value.as_mut_bytes());
        value
    }

    /// Copies a value in.
    ///
    /// # Panics
    /// When the value does not lie within the segment.
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.write_at(offset, value.as_bytes());
    }

    /// Copies in a value whose 32-bit word at `last` tells the reader that the rest is there: that word is stored last.
    ///
    /// # Panics
    /// When the value does not lie within the segment, or the word not aligned within the value.
    pub fn publish<T: IntoBytes + Immutable>(&self, offset: usize, value: &T, last: usize) {
        let bytes = value.as_bytes();
        let part = self.part(offset, bytes.len()).expect("write within the segment");
        let word = bytes.get(last..last + 4).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes);
        let word = word.expect("a word within the value");
        assert!((part.as_ptr() as usize + last).is_multiple_of(4), "a published word is aligned");
        part.write_at(0, &bytes[..last]);
        part.write_at(last + 4, &bytes[last + 4..]);
        // SAFETY: the word lies within mapped, writable memory and is aligned; both sides access it atomically.
        let target = unsafe { AtomicU32::from_ptr(part.as_ptr().add(last).cast()) };
        // Release, on our side of the publication race: the rest is stored before the word. The reader's side loads the word,
        // then (acquire, or by dependency) the rest.
        target.store(word, Ordering::Release);
    }

    /// Copies words out, each read once.
    ///
    /// # Panics
    /// When they do not lie within the segment, or are not aligned.
    #[expect(clippy::inline_always, reason = "the words stay in registers")]
    #[inline(always)]
    pub fn read_words<const N: usize>(&self, offset: usize) -> [u64; N] {
        let part = self.part(offset, N * 8).expect("words within the segment");
        let words: *mut u64 = part.as_ptr().cast();
        assert!((words as usize).is_multiple_of(8), "words are aligned");
        // SAFETY: the words lie within mapped memory and are aligned; who changes them meanwhile only turns what is read.
        std::array::from_fn(|at| unsafe { AtomicU64::from_ptr(words.add(at)) }.load(Ordering::Relaxed))
    }

    /// Stores 16 bytes whose second half tells the reader that the first is there.
    ///
    /// # Panics
    /// When they do not lie within the segment, or are not aligned to 8 bytes.
    #[inline]
    pub fn publish_pair(&self, offset: usize, first: u64, second: u64) {
        let part = self.part(offset, 16).expect("a pair within the segment");
        assert!((part.as_ptr() as usize).is_multiple_of(8), "a published pair is aligned");
        let words: *mut u64 = part.as_ptr().cast();
        // SAFETY: both words lie within mapped, writable memory and are aligned; both sides access them atomically.
        let (low, high) = unsafe { (AtomicU64::from_ptr(words), AtomicU64::from_ptr(words.add(1))) };
        low.store(first, Ordering::Relaxed);
        // Release, on our side of the publication race: the first half is stored before the second. The reader's side loads the
        // second, then (acquire, or by dependency) the first.
        high.store(second, Ordering::Release);
    }

    /// Brings the cache lines of the range near, to be read soon. A range that does not lie within the segment is none.
    #[inline]
    pub fn prefetch(&self, offset: usize, len: usize) {
        if let Some(part) = self.part(offset, len) {
            crate::copy::prefetch(part.as_ptr(), len);
        }
    }

    /// Brings the first cache line near, to be written soon.
    #[inline]
    pub fn prefetch_to_write(&self) {
        crate::copy::prefetch_to_write(self.as_ptr());
    }

    /// Brings a whole segment's cache lines into the second level: a block that will be copied by one of the next commands.
    #[inline]
    pub fn prefetch_block(&self) {
        crate::copy::prefetch_block(self.as_ptr(), self.len);
    }

    /// Loads a 32-bit word that the memory's other owner stores at any time.
    ///
    /// # Panics
    /// When the word does not lie within the segment, or is not aligned.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> u32 {
        self.word(offset).load(Ordering::Relaxed)
    }

    /// Stores a 32-bit word that the memory's other owner loads at any time. It orders nothing: a fence does.
    ///
    /// # Panics
    /// When the word does not lie within the segment, or is not aligned.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        let part = self.part(offset, 4).expect("a word within the segment");
        assert!((part.as_ptr() as usize).is_multiple_of(4), "a shared word is aligned");
        // SAFETY: the word lies within mapped memory and is aligned; both sides access it atomically. The reference does not
        // leave this module's one access.
        unsafe { AtomicU32::from_ptr(part.as_ptr().cast()) }
    }

    /// Copies the first `run` bytes of both from this one to `to`.
    #[inline]
    fn copy_run(&self, to: &Segment, run: usize, target: Target) {
        assert!(run <= self.len && run <= to.len, "a run within both segments");
        let (from, to) = (self.as_ptr(), to.as_ptr());
        if (from as usize).abs_diff(to as usize) < run {
            // A guest may name one page twice.
            // SAFETY: both segments are mapped memory of at least `run` bytes (Segment's contract).
            unsafe { std::ptr::copy(from, to, run) };
        } else {
            // SAFETY: as above, and they do not overlap.
            unsafe { copy_towards(from, to, run, target) };
        }
    }

    /// Copies all of this segment to the start of `to`.
    ///
    /// # Panics
    /// When `to` is shorter.
    #[inline]
    pub fn copy_to(&self, to: &Segment, target: Target) {
        self.copy_run(to, self.len, target);
    }

    /// Loads a 16-bit word that the memory's other owner stores at any time. It orders nothing: a fence does.
    ///
    /// # Panics
    /// When the word does not lie within the segment, or is not aligned.
    #[inline]
    pub fn load_u16(&self, offset: usize) -> u16 {
        self.half_word(offset).load(Ordering::Relaxed)
    }

    /// Stores a 16-bit word that the memory's other owner loads at any time. It orders nothing: a fence does.
    ///
    /// # Panics
    /// When the word does not lie within the segment, or is not aligned.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) {
        self.half_word(offset).store(value, Ordering::Relaxed);
    }

    #[expect(clippy::inline_always, reason = "a few instructions, in the way of every request")]
    #[inline(always)]
    fn half_word(&self, offset: usize) -> &AtomicU16 {
        let part = self.part(offset, 2).expect("a word within the segment");
        assert!((part.as_ptr() as usize).is_multiple_of(2), "a shared word is aligned");
        // SAFETY: the word lies within mapped memory and is aligned; both sides access it atomically. The reference does not
        // leave this module's one access.
        unsafe { AtomicU16::from_ptr(part.as_ptr().cast()) }
    }

    pub(crate) fn store_u8(&self, offset: usize, value: u8) {
        self.byte(offset).store(value, Ordering::Relaxed);
    }

    pub(crate) fn set_bits(&self, offset: usize, bits: u8) {
        let byte = self.byte(offset);
        // Release: the page's bytes are written before its bit; the other side takes the bits (acquire), then the bytes.
        byte.fetch_or(bits, Ordering::Release);
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        let part = self.part(offset, 1).expect("a byte within the segment");
        // SAFETY: the byte lies within mapped memory; both sides access it atomically. The reference does not leave this
        // module's one access.
        unsafe { AtomicU8::from_ptr(part.as_ptr()) }
    }

    pub(crate) fn store_u64(&self, offset: usize, value: u64) {
        let part = self.part(offset, 8).expect("a word within the segment");
        assert!((part.as_ptr() as usize).is_multiple_of(8), "a shared word is aligned");
        // SAFETY: the word lies within mapped memory and is aligned; both sides access it atomically.
        unsafe { AtomicU64::from_ptr(part.as_ptr().cast()) }.store(value, Ordering::Relaxed);
    }

    /// Fills the whole segment with one byte.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the segment is mapped, writable memory of self.len bytes.
        unsafe { std::ptr::write_bytes(self.as_ptr(), byte, self.len) }
    }

    /// Whether all bytes are zeroes. Each is read once, so that a change meanwhile can only turn the answer.
    pub fn is_zero(&self) -> bool {
        const CHUNK: usize = 1024;
        let mut bytes = [0; CHUNK];
        (0..self.len).step_by(CHUNK).all(|at| {
            let bytes = &mut bytes[..CHUNK.min(self.len - at)];
            self.read_at(at, bytes);
            bytes.iter().all(|byte| *byte == 0)
        })
    }

    /// Whether both segments hold the same bytes. Each byte is read once, so that a change meanwhile can only turn the answer.
    pub fn equals(&self, other: &Segment) -> bool {
        const CHUNK: usize = 1024;
        let (mut ours, mut theirs) = ([0; CHUNK], [0; CHUNK]);
        let mut done = 0;
        while done < self.len.min(other.len) {
            let len = (self.len.min(other.len) - done).min(CHUNK);
            self.read_at(done, &mut ours[..len]);
            other.read_at(done, &mut theirs[..len]);
            if ours[..len] != theirs[..len] {
                return false;
            }
            done += len;
        }
        self.len == other.len
    }
}

/// Sum of the segments' lengths in bytes.
#[inline]
pub fn total_len(segments: &[Segment]) -> usize {
    segments.iter().map(Segment::len).sum()
}

/// Copies from one list of segments to another until either ends; returns the bytes copied.
///
/// The two lists may name the same memory only if they name it identically.
pub fn copy_segments(from: &[Segment], to: &[Segment]) -> usize {
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut target) = (from.next(), to.next());
    let mut copied = 0;
    while let (Some(src), Some(dst)) = (source, target) {
        let run = src.len.min(dst.len);
        src.copy_run(&dst, run, Target::Near);
        copied += run;
        source = src.part(run, src.len - run).filter(|rest| !rest.is_empty()).or_else(|| from.next());
        target = dst.part(run, dst.len - run).filter(|rest| !rest.is_empty()).or_else(|| to.next());
    }
    copied
}
