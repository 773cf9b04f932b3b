//! The program's own memory, of which a request moves bytes: pieces that the program promised to leave alone until the request has ended.

use millrace_driver::DmaBuffer;

/// A piece of the program's memory. The layout of POSIX's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
}

impl Piece {
    const NONE: Self = Self { start: std::ptr::null_mut(), len: 0 };
}

/// The memory of one request, in order. Its room is kept from one request to the next.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Most requests have no other: it is where the request is.
    first: Piece,
    rest: Vec<Piece>,
}

// SAFETY: the pointers are only followed by `gather` and `scatter`, whose caller owns the promise that the memory is there.
unsafe impl Send for Pieces {}

impl Default for Pieces {
    fn default() -> Self {
        Self { first: Piece::NONE, rest: Vec::new() }
    }
}

impl Pieces {
    /// Forgets the pieces before and takes these.
    #[inline]
    pub(crate) fn set(&mut self, pieces: &[Piece]) {
        self.rest.clear();
        self.first = pieces.first().copied().unwrap_or(Piece::NONE);
        if let [_, rest @ ..] = pieces
            && !rest.is_empty()
        {
            self.rest.extend_from_slice(rest);
        }
    }

    /// The piece that holds the byte at `at`, from there on.
    #[inline]
    pub(crate) fn run(&self, at: usize) -> Option<Piece> {
        let mut before = 0;
        for piece in std::iter::once(&self.first).chain(&self.rest) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_in_whichever_piece_they_are() {
        let mut bytes = [0; 16];
        let start = bytes.as_mut_ptr();
        let piece = |at: usize, len| Piece { start: start.wrapping_add(at), len };
        let mut pieces = Pieces::default();
        let found = |pieces: &Pieces, at| pieces.run(at).map(|run| (run.start as usize - start as usize, run.len));
        assert_eq!(found(&pieces, 0), None);
        pieces.set(&[piece(4, 3), piece(0, 0), piece(8, 2)]);
        let all = [Some((4, 3)), Some((6, 1)), Some((8, 2)), Some((9, 1)), None];
        assert_eq!([0, 2, 3, 4, 5].map(|at| found(&pieces, at)), all);
        // Nothing is left of what was there before.
        pieces.set(&[piece(1, 2)]);
        assert_eq!([0, 1, 2].map(|at| found(&pieces, at)), [Some((1, 2)), Some((2, 1)), None]);
        pieces.set(&[piece(0, 0), piece(8, 2)]);
        assert_eq!(found(&pieces, 1), Some((9, 1)));
        pieces.set(&[]);
        assert_eq!(found(&pieces, 0), None);
    }
}
