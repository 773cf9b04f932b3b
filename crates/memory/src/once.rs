//! Data that go to several places, or to their places and into a sum, read once.
//!
//! A guest may change its memory at any time. What is read once is the same in every place, and in the sum, without a copy that nobody
//! else can reach.

use std::ptr::NonNull;

use crate::{Segment, SegmentCursor, Target};

/// Memory that holds what somebody asked for.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// Where it is.
    pub segment: Segment,
    /// How it is best written.
    pub target: Target,
}

/// Places that data go to at most.
pub const MOST_PLACES: usize = 8;

/// Places that the same data go to. A part of [`Reach`] each, not the whole: what is loaded by more bytes at a time than it was stored waits
/// until all that was stored before has left the processor, copies past the caches as well.
#[derive(Debug)]
pub struct Places {
    starts: [*mut u8; MOST_PLACES],
    count: usize,
    /// Bytes of the shortest.
    len: usize,
    past_caches: bool,
}

impl Places {
    /// None so far.
    #[expect(clippy::new_without_default, reason = "there is no use for places that nothing is added to")]
    #[inline]
    pub fn new() -> Self {
        Self { starts: [std::ptr::null_mut(); MOST_PLACES], count: 0, len: usize::MAX, past_caches: true }
    }

    /// One more.
    ///
    /// # Panics
    /// When there are [`MOST_PLACES`].
    #[inline]
    pub fn add(&mut self, place: &Reach) {
        self.starts[self.count] = place.segment.as_ptr();
        self.count += 1;
        self.len = self.len.min(place.segment.len());
        self.past_caches &= place.target == Target::Far;
    }
}

/// Bytes that go by way of a small place of our own where the processor has no wide registers.
const STEP: usize = 512;
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies `from` to the beginning of each of `to`.
///
/// # Panics
/// When one of them is shorter.
pub fn copy_to_all(from: &[Segment], to: &Places) {
    let mut cursor = SegmentCursor::new(if to.count == 0 { &[] } else { from });
    let mut at = 0;
    while let Some(run) = cursor.next_run(usize::MAX) {
        assert!(run.len() <= to.len - at, "every place holds the data");
        let place = |number: usize| {
            // SAFETY: a segment of at least `to.len` bytes begins there (`Places::add`), and these lie within it (above).
            unsafe { Segment::new(NonNull::new_unchecked(to.starts[number].add(at)), run.len()) }
        };
        #[cfg(target_arch = "x86_64")]
        let mut parts = x86::NOWHERE;
        #[cfg(target_arch = "x86_64")]
        if x86::aligned(&mut parts[..to.count], place) {
            // SAFETY: `aligned` found that the processor has AVX-512 and that places begin at lines; run and places are mapped memory
            // of `run.len()` bytes (Segment's contract), and the places are no guest's, so that they do not overlap the run.
            unsafe { x86::copy(run.as_ptr(), &parts[..to.count], run.len(), to.past_caches) };
            at += run.len();
            continue;
        }
        let mut bytes = [0; STEP];
        for step in (0..run.len()).step_by(STEP) {
            let bytes = &mut bytes[..STEP.min(run.len() - step)];
            run.read_at(step, bytes);
            (0..to.count).for_each(|number| place(number).write_at(step, bytes));
        }
        at += run.len();
    }
}

/// Copies each of `from` to its place in `to`, and puts their sum (exclusive or) in the last of `to`.
///
/// # Panics
/// When lengths differ, there is not one place more than there are sources, or more than [`MOST_PLACES`].
pub fn copy_and_sum(from: &[Segment], to: &[Reach]) {
    assert!(to.len() <= MOST_PLACES && from.len() + 1 == to.len(), "{} sources for {} places", from.len(), to.len());
    let len = to[0].segment.len();
    let alike = from.iter().all(|from| from.len() == len) && to.iter().all(|to| to.segment.len() == len);
    assert!(alike, "sums are of equal lengths");
    #[cfg(target_arch = "x86_64")]
    let mut parts = x86::NOWHERE;
    #[cfg(target_arch = "x86_64")]
    if x86::aligned(&mut parts[..to.len()], |number| to[number].segment) {
        let past = to.iter().all(|reach| reach.target == Target::Far);
        let sources: [*const u8; MOST_PLACES] = std::array::from_fn(|at| from[at.min(from.len() - 1)].as_ptr().cast_const());
        // SAFETY: as above, with every source of `len` bytes.
        return unsafe { x86::copy_and_sum(&sources[..from.len()], &parts[..to.len()], len, past) };
    }
    let (mut bytes, mut sum) = ([0; STEP], [0; STEP]);
    for step in (0..len).step_by(STEP) {
        let part = STEP.min(len - step);
        sum.fill(0);
        for (from, to) in from.iter().zip(to) {
            from.read_at(step, &mut bytes[..part]);
            to.segment.write_at(step, &bytes[..part]);
            sum.iter_mut().zip(&bytes[..part]).for_each(|(sum, byte)| *sum ^= byte);
        }
        to[from.len()].segment.write_at(step, &sum[..part]);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512i, _mm512_loadu_si512, _mm512_setzero_si512, _mm512_store_si512, _mm512_stream_si512, _mm512_xor_si512,
    };

    use super::{LINE, MOST_PLACES, Segment};

    pub(super) const NOWHERE: [*mut u8; MOST_PLACES] = [std::ptr::null_mut(); MOST_PLACES];

    /// Puts down where the places are; false when they are not for this module.
    #[inline]
    pub(super) fn aligned(parts: &mut [*mut u8], place: impl Fn(usize) -> Segment) -> bool {
        for (number, part) in parts.iter_mut().enumerate() {
            let place = place(number);
            *part = place.as_ptr();
            if !(*part as usize).is_multiple_of(LINE) || !place.len().is_multiple_of(LINE) {
                return false;
            }
        }
        is_x86_feature_detected!("avx512f")
    }

    /// Stores a line, past the caches or not.
    ///
    /// # Safety
    /// The line must be writable and aligned, and the processor have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(to: *mut u8, line: __m512i, past_caches: bool) {
        // SAFETY: the caller's promise.
        unsafe { if past_caches { _mm512_stream_si512(to.cast(), line) } else { _mm512_store_si512(to.cast(), line) } }
    }

    /// # Safety
    /// `from` must be readable and each of `to` writable for `len` bytes, which is whole lines; places are aligned to lines and do not
    /// overlap the source; the processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy(from: *const u8, to: &[*mut u8], len: usize, past_caches: bool) {
        // Four lines to each place in turn, from registers.
        for at in (0..len).step_by(4 * LINE) {
            let count = (len - at).min(4 * LINE) / LINE;
            // SAFETY: these lines lie within all of them.
            unsafe {
                let lines: [__m512i; 4] =
                    std::array::from_fn(|line| _mm512_loadu_si512(from.add(at + line.min(count - 1) * LINE).cast()));
                for to in to {
                    (0..count).for_each(|line| store(to.add(at + line * LINE), lines[line], past_caches));
                }
            }
        }
        settle(past_caches);
    }

    /// # Safety
    /// As of [`copy`], for every source.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_and_sum(from: &[*const u8], to: &[*mut u8], len: usize, past_caches: bool) {
        for at in (0..len).step_by(LINE) {
            let mut sum = _mm512_setzero_si512();
            // SAFETY: the line lies within all of them.
            unsafe {
                for (from, to) in from.iter().zip(to) {
                    let line = _mm512_loadu_si512(from.add(at).cast());
                    store(to.add(at), line, past_caches);
                    sum = _mm512_xor_si512(sum, line);
                }
                store(to[from.len()].add(at), sum, past_caches);
            }
        }
        settle(past_caches);
    }

    fn settle(past_caches: bool) {
        if past_caches {
            crate::copy::streams_made();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Mapping;

    /// A piece of memory at a line's start, or `off` bytes behind it.
    fn piece(mapping: &Mapping, number: usize, off: usize, len: usize) -> Segment {
        // SAFETY: the mapping outlives the test's segments.
        unsafe { mapping.segment(number * 32768 + off, len) }.unwrap()
    }

    fn bytes(segment: &Segment) -> Vec<u8> {
        let mut bytes = vec![0; segment.len()];
        segment.read_at(0, &mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn every_place_has_the_same_and_the_sum_is_right(
            runs in prop::collection::vec(1_usize..40, 1..4), odd in 0_usize..2, places in 1_usize..=MOST_PLACES, far: bool, seed: u8,
        ) {
            let mapping = Mapping::anonymous(20 * 32768).unwrap();
            let unit = if odd == 1 { 63 } else { 64 };
            let from: Vec<_> = runs.iter().enumerate().map(|(at, units)| piece(&mapping, at, at, units * unit)).collect();
            for (at, run) in from.iter().enumerate() {
                let data: Vec<u8> = (0..run.len()).map(|byte| (byte as u8).wrapping_mul(31) ^ seed ^ at as u8).collect();
                run.write_at(0, &data);
            }
            let whole: Vec<u8> = from.iter().flat_map(bytes).collect();
            let target = if far { Target::Far } else { Target::Near };
            let to = |len: usize| -> Vec<Reach> {
                (0..places).map(|at| Reach { segment: piece(&mapping, 8 + at, odd, len), target }).collect()
            };
            let copies = to(whole.len());
            let mut all = Places::new();
            for copy in &copies {
                all.add(copy);
            }
            copy_to_all(&from, &all);
            for copy in &copies {
                prop_assert_eq!(bytes(&copy.segment), &whole[..]);
            }
            if places > 1 {
                let len = runs[0] * unit;
                let from: Vec<_> = (0..places - 1).map(|at| piece(&mapping, at, at, len)).collect();
                let to = to(len);
                copy_and_sum(&from, &to);
                let mut sum = vec![0; len];
                for (from, to) in from.iter().zip(&to) {
                    prop_assert_eq!(bytes(from), bytes(&to.segment));
                    sum.iter_mut().zip(bytes(from)).for_each(|(sum, byte)| *sum ^= byte);
                }
                prop_assert_eq!(bytes(&to[places - 1].segment), sum);
            }
        }
    }
}
