//! Data that go to several places, or to their places and into a sum, read once.
//!
//! A guest may change its memory at any time. What is read once is the same in every place, and in the sum, without a copy that nobody
//! else can reach.

use std::{marker::PhantomData, ptr::NonNull};

use crate::{Reach, Segment, SegmentCursor, Target};

/// Places that data go to at most.
pub const MOST_PLACES: usize = 8;

/// Places that the same data go to. A part of [`Reach`] each, not the whole: what is loaded by more bytes at a time than it was stored waits
/// until all that was stored before has left the processor, copies past the caches as well.
#[derive(Debug)]
pub struct Places<'a> {
    starts: [*mut u8; MOST_PLACES],
    count: usize,
    /// Bytes of the shortest.
    len: usize,
    past_caches: bool,
    owners: PhantomData<&'a ()>,
}

impl<'a> Places<'a> {
    /// None so far.
    #[expect(clippy::new_without_default, reason = "there is no use for places that nothing is added to")]
    #[inline]
    pub fn new() -> Self {
        let starts = [std::ptr::null_mut(); MOST_PLACES];
        Self { starts, count: 0, len: usize::MAX, past_caches: true, owners: PhantomData }
    }

    /// One more.
    ///
    /// # Panics
    /// When there are [`MOST_PLACES`].
    #[inline]
    pub fn add(&mut self, place: &Reach<'a>) {
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
pub fn copy_to_all(from: &[Segment], to: &Places<'_>) {
    let mut cursor = SegmentCursor::new(if to.count == 0 { &[] } else { from });
    let mut at = 0;
    while let Some(run) = cursor.next_run(usize::MAX) {
        assert!(run.len() <= to.len - at, "every place holds the data");
        let place = |number: usize| {
            // SAFETY: memory of at least `to.len` bytes begins there, whose owner is borrowed (`Places::add`), and these lie within it (above).
            unsafe { Segment::new(NonNull::new_unchecked(to.starts[number].add(at)), run.len()) }
        };
        #[cfg(target_arch = "x86_64")]
        let mut parts = x86::NOWHERE;
        #[cfg(target_arch = "x86_64")]
        if x86::aligned(&mut parts[..to.count], place) {
            // SAFETY: `aligned` found that the processor has AVX2 and that places begin at lines; run and places are mapped memory
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
pub fn copy_and_sum(from: &[Segment], to: &[Reach<'_>]) {
    assert!(to.len() <= MOST_PLACES && from.len() + 1 == to.len(), "{} sources for {} places", from.len(), to.len());
    let len = to[0].segment.len();
    let alike = from.iter().all(|from| from.len() == len) && to.iter().all(|to| to.segment.len() == len);
    assert!(alike, "sums are of equal lengths");
    #[cfg(target_arch = "x86_64")]
    let mut parts = x86::NOWHERE;
    #[cfg(target_arch = "x86_64")]
    if x86::aligned(&mut parts[..to.len()], |number| to[number].segment.bare()) {
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
        __m256i, __m512i, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_store_si256, _mm256_stream_si256,
        _mm256_xor_si256, _mm512_loadu_si512, _mm512_setzero_si512, _mm512_store_si512, _mm512_stream_si512,
        _mm512_xor_si512,
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
        is_x86_feature_detected!("avx2")
    }

    /// # Safety
    /// `from` must be readable and each of `to` writable for `len` bytes, which is whole lines; places do not overlap the source;
    /// [`aligned`] said so.
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: &[*mut u8], len: usize, past_caches: bool) {
        // SAFETY: the caller's promise; the processor has the instructions, AVX2 because `aligned` asks for it.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                avx512::copy(from, to, len, past_caches);
            } else {
                avx2::copy(from, to, len, past_caches);
            }
        }
    }

    /// # Safety
    /// As of [`copy`], for every source.
    #[inline]
    pub(super) unsafe fn copy_and_sum(from: &[*const u8], to: &[*mut u8], len: usize, past_caches: bool) {
        // SAFETY: as in `copy`.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                avx512::copy_and_sum(from, to, len, past_caches);
            } else {
                avx2::copy_and_sum(from, to, len, past_caches);
            }
        }
    }

    /// Both, with registers of one kind: a line is one of them, or several.
    macro_rules! with_registers {
        ($name:ident, $feature:literal, $register:ty, $zero:ident, $load:ident, $store:ident, $stream:ident, $xor:ident) => {
            pub(super) mod $name {
                use super::*;

                const REGISTER: usize = size_of::<$register>();
                const IN_LINE: usize = LINE / REGISTER;

                /// Stores a register, past the caches or not.
                ///
                /// # Safety
                /// The place must be writable and aligned, and the processor have the instructions.
                #[inline]
                #[target_feature(enable = $feature)]
                unsafe fn store(to: *mut u8, data: $register, past_caches: bool) {
                    // SAFETY: the caller's promise.
                    unsafe { if past_caches { $stream(to.cast(), data) } else { $store(to.cast(), data) } }
                }

                /// # Safety
                /// As of [`super::copy`], and the processor has the instructions.
                #[target_feature(enable = $feature)]
                pub(in crate::once) unsafe fn copy(from: *const u8, to: &[*mut u8], len: usize, past_caches: bool) {
                    // Four lines to each place in turn, from registers.
                    for at in (0..len).step_by(4 * LINE) {
                        let count = (len - at).min(4 * LINE) / REGISTER;
                        // SAFETY: these parts of lines lie within all of them.
                        unsafe {
                            let data: [$register; 4 * IN_LINE] =
                                std::array::from_fn(|part| $load(from.add(at + part.min(count - 1) * REGISTER).cast()));
                            for to in to {
                                (0..count).for_each(|part| store(to.add(at + part * REGISTER), data[part], past_caches));
                            }
                        }
                    }
                    settle(past_caches);
                }

                /// # Safety
                /// As of [`super::copy_and_sum`], and the processor has the instructions.
                #[target_feature(enable = $feature)]
                pub(in crate::once) unsafe fn copy_and_sum(
                    from: &[*const u8],
                    to: &[*mut u8],
                    len: usize,
                    past_caches: bool,
                ) {
                    for at in (0..len).step_by(LINE) {
                        let mut sum = [$zero(); IN_LINE];
                        for (from, to) in from.iter().zip(to) {
                            for (part, sum) in sum.iter_mut().enumerate() {
                                let at = at + part * REGISTER;
                                // SAFETY: the line lies within all of them.
                                unsafe {
                                    let data = $load(from.add(at).cast());
                                    store(to.add(at), data, past_caches);
                                    *sum = $xor(*sum, data);
                                }
                            }
                        }
                        for (part, sum) in sum.into_iter().enumerate() {
                            // SAFETY: as above.
                            unsafe { store(to[from.len()].add(at + part * REGISTER), sum, past_caches) };
                        }
                    }
                    settle(past_caches);
                }
            }
        };
    }

    with_registers! {
        avx512, "avx512f", __m512i, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_store_si512, _mm512_stream_si512, _mm512_xor_si512
    }
    with_registers! {
        avx2, "avx2", __m256i, _mm256_setzero_si256, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256, _mm256_xor_si256
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
            let reach = |at: usize, len: usize| Reach { segment: piece(&mapping, 8 + at, odd, len).into(), target };
            let to = |len: usize| (0..places).map(|at| reach(at, len)).collect::<Vec<_>>();
            let copies = to(whole.len());
            let mut all = Places::new();
            for copy in &copies {
                all.add(copy);
            }
            copy_to_all(&from, &all);
            for copy in &copies {
                prop_assert_eq!(bytes(&copy.segment.bare()), &whole[..]);
            }
            if places > 1 {
                let len = runs[0] * unit;
                let from: Vec<_> = (0..places - 1).map(|at| piece(&mapping, at, at, len)).collect();
                let to = to(len);
                copy_and_sum(&from, &to);
                let mut sum = vec![0; len];
                for (from, to) in from.iter().zip(&to) {
                    prop_assert_eq!(bytes(from), bytes(&to.segment.bare()));
                    sum.iter_mut().zip(bytes(from)).for_each(|(sum, byte)| *sum ^= byte);
                }
                prop_assert_eq!(bytes(&to[places - 1].segment.bare()), sum);
            }
        }
    }

    /// Where the processor has both kinds, the others are tested above.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn registers_of_half_a_line_do_the_same() {
        if !is_x86_feature_detected!("avx2") {
            return;
        }
        let mapping = Mapping::anonymous(20 * 32768).unwrap();
        for lines in (1..=9).chain([64]) {
            let data = |number: usize| {
                (0..lines * LINE).map(move |byte| ((byte * 31) ^ (byte >> 8) ^ number) as u8).collect::<Vec<_>>()
            };
            let from: Vec<_> = (0..2).map(|at| piece(&mapping, at, at, lines * LINE)).collect();
            from.iter().enumerate().for_each(|(number, from)| from.write_at(0, &data(number)));
            let from: Vec<_> = from.iter().map(|from| from.as_ptr().cast_const()).collect();
            for past_caches in [false, true] {
                let places: Vec<_> = (8..11).map(|at| piece(&mapping, at, 0, lines * LINE + LINE)).collect();
                for place in &places {
                    place.fill(0x5a);
                }
                let to: Vec<_> = places.iter().map(Segment::as_ptr).collect();
                let behind = |at: usize| bytes(&places[at])[lines * LINE..].iter().all(|byte| *byte == 0x5a);
                let held = |at: usize| bytes(&places[at])[..lines * LINE].to_vec();
                // SAFETY: all are mapped for so many bytes, places begin at lines and are others than the sources; the processor has AVX2.
                unsafe { x86::avx2::copy(from[0], &to, lines * LINE, past_caches) };
                assert!((0..3).all(|at| held(at) == data(0) && behind(at)), "{lines} lines");
                // SAFETY: as above.
                unsafe { x86::avx2::copy_and_sum(&from, &to, lines * LINE, past_caches) };
                let sum: Vec<_> = data(0).iter().zip(data(1)).map(|(one, other)| one ^ other).collect();
                assert!(
                    [data(0), data(1), sum].iter().enumerate().all(|(at, data)| held(at) == *data && behind(at)),
                    "{lines} lines"
                );
            }
        }
    }
}
