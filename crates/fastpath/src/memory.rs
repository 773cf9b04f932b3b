//! The program's own memory, of which a request moves bytes: pieces that the program promised to leave alone until the request has ended.

use millrace_driver::DmaBuffer;

/// A piece of the program's memory. The layout of POSIX's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
}

/// The memory of one request, in order. Its room is kept from one request to the next.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<Piece>);

// SAFETY: the pointers are only followed by `gather` and `scatter`, whose caller owns the promise that the memory is there.
unsafe impl Send for Pieces {}

impl Pieces {
    /// Forgets the pieces before and takes these.
    pub(crate) fn set(&mut self, pieces: &[Piece]) {
        self.0.clear();
        self.0.extend_from_slice(pieces);
    }

    /// The piece that holds the byte at `at`, from there on.
    pub(crate) fn run(&self, at: usize) -> Option<Piece> {
        let mut before = 0;
        for piece in &self.0 {
            let within = at - before;
            if within < piece.len {
                return Some(Piece { start: piece.start.wrapping_add(within), len: piece.len - within });
            }
            before += piece.len;
        }
        None
    }

    /// Calls `copy(piece, offset)` for the runs that make up `len` bytes from `at` on; `offset` counts from 0.
    fn each(&self, at: usize, len: usize, mut copy: impl FnMut(Piece, usize)) {
        let mut done = 0;
        while done < len {
            let Some(run) = self.run(at + done) else { return };
            let piece = Piece { len: run.len.min(len - done), ..run };
            copy(piece, done);
            done += piece.len;
        }
    }

    /// Copies `len` bytes, from `at` of these pieces on, to the start of shared memory.
    ///
    /// # Safety
    /// The pieces are readable memory that nobody writes.
    pub(crate) unsafe fn gather(&self, at: usize, len: usize, to: &DmaBuffer) {
        self.each(at, len, |piece, offset| {
            // SAFETY: the caller's promise; no piece is empty here.
            to.write_at(offset, unsafe { std::slice::from_raw_parts(piece.start, piece.len) });
        });
    }

    /// Copies `len` bytes from the start of shared memory to these pieces, from `at` on.
    ///
    /// # Safety
    /// The pieces are writable memory that nobody else looks at.
    pub(crate) unsafe fn scatter(&self, at: usize, len: usize, from: &DmaBuffer) {
        self.each(at, len, |piece, offset| {
            // SAFETY: the caller's promise; no piece is empty here, and bytes may hold anything.
            from.read_at(offset, unsafe { std::slice::from_raw_parts_mut(piece.start, piece.len) });
        });
    }
}
