//! A place within a list of segments.

use crate::Segment;

/// Walks a list of segments from its start, handing out contiguous pieces of the lengths asked for.
#[derive(Clone, Debug)]
pub struct SegmentCursor<'a> {
    segments: &'a [Segment],
    /// Bytes of the first segment that were already handed out.
    offset: usize,
}

impl<'a> SegmentCursor<'a> {
    /// A cursor at the first byte.
    pub fn new(segments: &'a [Segment]) -> Self {
        Self { segments, offset: 0 }
    }

    /// The next contiguous piece of at most `max` bytes, and moves past it; `None` at the end or when `max` is 0.
    pub fn next_run(&mut self, max: usize) -> Option<Segment> {
        if max == 0 {
            return None;
        }
        loop {
            let (first, rest) = self.segments.split_first()?;
            let left = first.len() - self.offset;
            if left == 0 {
                (self.segments, self.offset) = (rest, 0);
                continue;
            }
            let run = left.min(max);
            let piece = first.part(self.offset, run)?;
            self.offset += run;
            return Some(piece);
        }
    }

    /// Moves past `len` bytes, or to the end.
    pub fn skip(&mut self, mut len: usize) {
        while let Some(run) = self.next_run(len) {
            len -= run.len();
        }
    }

    /// The rest of a segment that was handed out in part; `None` where the cursor stands between two segments.
    pub fn split_segment(&self) -> Option<Segment> {
        let first = self.segments.first()?;
        let left = first.len() - self.offset;
        (self.offset > 0 && left > 0).then(|| first.part(self.offset, left))?
    }

    /// The segments of which nothing was handed out yet, from the first on that is not empty.
    pub fn whole_segments(&self) -> &'a [Segment] {
        let untouched = self.segments.get(usize::from(self.offset > 0)..).unwrap_or(&[]);
        let empty = untouched.iter().take_while(|segment| segment.is_empty()).count();
        untouched.get(empty..).unwrap_or(&[])
    }

    /// Bytes not handed out yet.
    pub fn remaining(&self) -> usize {
        crate::total_len(self.segments) - self.offset
    }

    /// Fills everything from here on with one byte.
    pub fn fill_rest(mut self, byte: u8) {
        while let Some(run) = self.next_run(usize::MAX) {
            run.fill(byte);
        }
    }

    /// Fills the next `len` bytes.
    pub fn fill(&mut self, len: usize, byte: u8) {
        let mut left = len;
        while let Some(run) = self.next_run(left).filter(|_| left > 0) {
            run.fill(byte);
            left -= run.len();
        }
    }

    /// Copies the next `to.len()` bytes into `to`; fewer when the list ends before. Returns the bytes copied.
    pub fn copy_to(&mut self, to: Segment) -> usize {
        let mut done = 0;
        while let Some(run) = self.next_run(to.len() - done) {
            done += crate::copy_segments(&[run], &[to.part(done, run.len()).expect("a run is no longer than what is left")]);
        }
        done
    }

    /// Copies `from` over the next `from.len()` bytes; fewer when the list ends before. Returns the bytes copied.
    pub fn copy_from(&mut self, from: Segment) -> usize {
        let mut done = 0;
        while let Some(run) = self.next_run(from.len() - done) {
            done +=
                crate::copy_segments(&[from.part(done, run.len()).expect("a run is no longer than what is left")], &[run]);
        }
        done
    }

    /// Whether the next `len` bytes are zeroes; false when the list ends before.
    pub fn is_zero(&mut self, len: usize) -> bool {
        let mut done = 0;
        while let Some(run) = self.next_run(len - done) {
            if !run.is_zero() {
                return false;
            }
            done += run.len();
        }
        done == len
    }

    /// Whether the next `with.len()` bytes equal `with`; false when the list ends before.
    pub fn equals(&mut self, with: Segment) -> bool {
        let mut done = 0;
        while let Some(run) = self.next_run(with.len() - done) {
            if !with.part(done, run.len()).is_some_and(|part| part.equals(&run)) {
                return false;
            }
            done += run.len();
        }
        done == with.len()
    }
}
