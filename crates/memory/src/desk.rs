//! A small place of our own that blocks pass through: each byte is loaded once, looked at there, and stored.

use std::mem::MaybeUninit;

use crate::{
    Lent, SegmentCursor, Target,
    copy::{copy_towards, use_the_copy},
};

/// Bytes that a [`Desk`] has room for: the largest block.
pub const DESK_SIZE: usize = 4096;

/// Where blocks lie while they are looked at on their way: what was seen here is what is stored, whatever becomes of the place they came
/// from. On the stack of whoever copies, so that it is in the first-level cache.
#[repr(align(64))]
pub struct Desk {
    place: MaybeUninit<[u8; DESK_SIZE]>,
    /// Bytes that lie here.
    len: usize,
}

impl Desk {
    /// An empty one.
    #[expect(clippy::new_without_default, reason = "a place on the stack, not a value")]
    #[inline]
    pub fn new() -> Self {
        Self { place: MaybeUninit::uninit(), len: 0 }
    }

    /// Puts the next `len` bytes here; fewer where the list ends before. Returns them.
    ///
    /// # Panics
    /// When they are more than [`DESK_SIZE`].
    #[inline]
    pub fn load(&mut self, from: &mut SegmentCursor<'_>, len: usize) -> &[u8] {
        assert!(len <= DESK_SIZE, "{len} bytes for a desk");
        self.len = 0;
        while let Some(run) = from.next_run(len - self.len) {
            // SAFETY: the run is mapped memory (Segment's contract), the place is ours and has room: no more than `len` bytes are asked
            // for, and those are within it. They do not overlap:
            // nobody has a segment of the place.
            unsafe { copy_towards(run.as_ptr(), self.start().add(self.len), run.len(), Target::Near) };
            use_the_copy(run.as_ptr(), self.start());
            self.len += run.len();
        }
        self.bytes()
    }

    /// Puts all of this memory here, and returns it.
    ///
    /// # Panics
    /// When it is more than [`DESK_SIZE`].
    #[inline]
    pub fn load_all(&mut self, from: Lent<'_>) -> &[u8] {
        let len = from.len();
        assert!(len <= DESK_SIZE, "{len} bytes for a desk");
        // SAFETY: it is mapped memory, whose owner is borrowed, and the place is ours and has room. They do not overlap, as above.
        unsafe { copy_towards(from.as_ptr(), self.start(), len, Target::Near) };
        use_the_copy(from.as_ptr(), self.start());
        self.len = len;
        self.bytes()
    }

    /// What lies here.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `load` or `load_all` put so many bytes there.
        unsafe { std::slice::from_raw_parts(self.place.as_ptr().cast(), self.len) }
    }

    /// Copies what lies here over the next bytes of the list, or as many as there are.
    #[inline]
    pub fn store(&self, to: &mut SegmentCursor<'_>, target: Target) {
        let mut left = self.bytes();
        while let Some(run) = to.next_run(left.len()) {
            let (part, rest) = left.split_at(run.len());
            // SAFETY: the run is mapped memory of so many bytes (Segment's contract), and nobody has a segment of the place.
            unsafe { copy_towards(part.as_ptr(), run.as_ptr(), part.len(), target) };
            left = rest;
        }
    }

    /// Copies what lies here to the beginning of `to`.
    ///
    /// # Panics
    /// When that is shorter.
    #[inline]
    pub fn store_all(&self, to: Lent<'_>, target: Target) {
        let data = self.bytes();
        assert!(data.len() <= to.len(), "{} bytes for {}", data.len(), to.len());
        // SAFETY: it is mapped memory of so many bytes, whose owner is borrowed, and nobody has a segment of the place.
        unsafe { copy_towards(data.as_ptr(), to.as_ptr(), data.len(), target) };
    }

    fn start(&mut self) -> *mut u8 {
        self.place.as_mut_ptr().cast()
    }
}
