//! Sums of data in GF(2^8), for parity: P is the sum, Q the sum with each part times a power of 2.
//!
//! Addition is exclusive or. Multiplication is modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), in which 2 generates all but 0.
//!
//! The bytes should belong to whoever calls: what somebody else changes meanwhile is summed up as it is found, once.

use crate::{DESK_SIZE, Desk, Lent, Segment, SegmentCursor, Target};

/// The polynomial without its highest term.
const POLYNOMIAL: u8 = 0x1d;

/// The product of two numbers.
pub const fn product(one: u8, other: u8) -> u8 {
    let (mut one, mut other, mut sum) = (one, other, 0);
    while other > 0 {
        if other & 1 == 1 {
            sum ^= one;
        }
        one = one << 1 ^ if one & 0x80 == 0 { 0 } else { POLYNOMIAL };
        other >>= 1;
    }
    sum
}

/// 2 to the power of `exponent`: what a part of this number is multiplied with in Q.
pub const fn power(exponent: u8) -> u8 {
    let (mut result, mut left) = (1, exponent);
    while left > 0 {
        result = product(result, 2);
        left -= 1;
    }
    result
}

/// The number whose product with this one is 1; 0 has none, and gets 0.
pub const fn inverse(number: u8) -> u8 {
    // number^254: the group has 255 elements.
    let (mut result, mut left) = (1, 254);
    while left > 0 {
        result = product(result, number);
        left -= 1;
    }
    result
}

/// Adds `from` to `to`.
///
/// # Panics
/// When they differ in length.
pub fn add_into(to: &Segment, from: &Segment) {
    sum_into(to, to, from);
}

/// Makes `to` the sum of `first` and `second`; it may be one of them.
///
/// # Panics
/// When they differ in length.
pub fn sum_into(to: &Segment, first: &Segment, second: &Segment) {
    assert!(to.len() == first.len() && to.len() == second.len(), "sums are of equal lengths");
    // SAFETY: all three are mapped memory of so many bytes (Segment's contract).
    unsafe { sum(to.as_ptr(), first.as_ptr(), second.as_ptr(), to.len()) }
}

/// # Safety
/// As for [`sum_words`].
unsafe fn sum(to: *mut u8, first: *const u8, second: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has it; of the memory our caller says the same.
            return unsafe { x86::sum_avx512(to, first, second, len) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::sum_avx2(to, first, second, len) };
        }
    }
    // SAFETY: as above.
    unsafe { sum_words(to, first, second, len) }
}

/// Adds `factor` times `from` to `to`.
///
/// # Panics
/// When they differ in length.
pub fn add_product_into(to: &Segment, from: &Segment, factor: u8) {
    match factor {
        0 => {}
        1 => add_into(to, from),
        _ => multiply::<true>(to, from, factor),
    }
}

/// Makes every byte its product with `factor`.
pub fn scale(bytes: &Segment, factor: u8) {
    if factor != 1 {
        multiply::<false>(bytes, bytes, factor);
    }
}

/// Makes `to` the product of `from` and `factor`, or adds it.
fn multiply<const ADD: bool>(to: &Segment, from: &Segment, factor: u8) {
    assert_eq!(to.len(), from.len(), "sums are of equal lengths");
    // SAFETY: both are mapped memory of so many bytes (Segment's contract).
    unsafe { product_into::<ADD>(to.as_ptr(), from.as_ptr(), to.len(), factor) }
}

/// # Safety
/// As for [`multiply_bytes`].
unsafe fn product_into<const ADD: bool>(to: *mut u8, from: *const u8, len: usize, factor: u8) {
    let tables = Tables::of(factor);
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512bw") {
            // SAFETY: the processor has it; of the memory our caller says the same.
            return unsafe { x86::multiply_avx512::<ADD>(to, from, len, &tables) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::multiply_avx2::<ADD>(to, from, len, &tables) };
        }
    }
    // SAFETY: as above.
    unsafe { multiply_bytes::<ADD>(to, from, len, &tables) }
}

/// Puts the next bytes of a list in the place of a part's, and in each parity of that part what this changes: all in one pass. With
/// each parity comes what the part is multiplied with in it.
///
/// # Panics
/// When a parity is not as long as the part, or the list ends before.
pub fn replace(part: Lent<'_>, parity: &[(Lent<'_>, u8)], from: &mut SegmentCursor<'_>) {
    let len = part.len();
    assert!(parity.iter().all(|(parity, _)| parity.len() == len), "parity is as long as what it is of");
    // They come while the data do.
    part.prefetch(0, len);
    for (parity, _) in parity {
        parity.prefetch(0, len);
    }
    let mut desk = Desk::new();
    for at in (0..len).step_by(DESK_SIZE) {
        let step = DESK_SIZE.min(len - at);
        let data = desk.load(from, step);
        assert_eq!(data.len(), step, "there are data for all of the part");
        let place = part.part(at, step).expect("it is within the part");
        for (parity, factor) in parity {
            let parity = parity.part(at, step).expect("parity is as long as the part");
            // SAFETY: the owners of all this memory are borrowed, the desk is ours, and parity, part and desk are different places of
            // `step` bytes.
            unsafe {
                add(parity.as_ptr(), place.as_ptr(), step, *factor);
                add(parity.as_ptr(), data.as_ptr(), step, *factor);
            }
        }
        desk.store_all(place, Target::Near);
    }
}

/// Adds `factor` times `from`.
///
/// # Safety
/// As for [`multiply_bytes`].
unsafe fn add(to: *mut u8, from: *const u8, len: usize, factor: u8) {
    // SAFETY: as our caller says.
    unsafe {
        match factor {
            1 => sum(to, to, from, len),
            _ => product_into::<true>(to, from, len, factor),
        }
    }
}

/// The products of a factor with each low and each high half of a byte.
struct Tables {
    low: [u8; 16],
    high: [u8; 16],
}

impl Tables {
    fn of(factor: u8) -> Self {
        let mut tables = Self { low: [0; 16], high: [0; 16] };
        for half in 0..16_u8 {
            tables.low[usize::from(half)] = product(factor, half);
            tables.high[usize::from(half)] = product(factor, half << 4);
        }
        tables
    }

    fn product(&self, byte: u8) -> u8 {
        self.low[usize::from(byte & 15)] ^ self.high[usize::from(byte >> 4)]
    }
}

/// # Safety
/// All three must be memory of `len` bytes; `to` may be one of the others, and overlaps neither in part.
unsafe fn sum_words(to: *mut u8, first: *const u8, second: *const u8, len: usize) {
    let mut at = 0;
    while at + 8 <= len {
        // SAFETY: at + 8 <= len.
        unsafe {
            let sum = first.add(at).cast::<u64>().read_unaligned() ^ second.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_unaligned(sum);
        }
        at += 8;
    }
    while at < len {
        // SAFETY: at < len.
        unsafe { to.add(at).write(first.add(at).read() ^ second.add(at).read()) };
        at += 1;
    }
}

/// # Safety
/// Both must be memory of `len` bytes that does not overlap in part.
unsafe fn multiply_bytes<const ADD: bool>(to: *mut u8, from: *const u8, len: usize, tables: &Tables) {
    for at in 0..len {
        // SAFETY: at < len.
        unsafe {
            let before = if ADD { to.add(at).read() } else { 0 };
            to.add(at).write(before ^ tables.product(from.add(at).read()));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_loadu_si256, _mm256_set1_epi8,
        _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256, _mm512_and_si512,
        _mm512_broadcast_i32x4, _mm512_loadu_si512, _mm512_set1_epi8, _mm512_shuffle_epi8, _mm512_srli_epi64,
        _mm512_storeu_si512, _mm512_xor_si512,
    };

    use super::{Tables, multiply_bytes, sum_words};

    /// # Safety
    /// As for `sum_words`; the processor must have AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn sum_avx512(to: *mut u8, first: *const u8, second: *const u8, len: usize) {
        let mut at = 0;
        while at + 64 <= len {
            // SAFETY: at + 64 <= len; the instructions need no alignment.
            unsafe {
                let sum =
                    _mm512_xor_si512(_mm512_loadu_si512(first.add(at).cast()), _mm512_loadu_si512(second.add(at).cast()));
                _mm512_storeu_si512(to.add(at).cast(), sum);
            }
            at += 64;
        }
        // SAFETY: the rest of the same memory.
        unsafe { sum_words(to.add(at), first.add(at), second.add(at), len - at) };
    }

    /// # Safety
    /// As for `sum_words`; the processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sum_avx2(to: *mut u8, first: *const u8, second: *const u8, len: usize) {
        let mut at = 0;
        while at + 32 <= len {
            // SAFETY: at + 32 <= len; the instructions need no alignment.
            unsafe {
                let one = _mm256_loadu_si256(first.add(at).cast());
                let sum = _mm256_xor_si256(one, _mm256_loadu_si256(second.add(at).cast()));
                _mm256_storeu_si256(to.add(at).cast(), sum);
            }
            at += 32;
        }
        // SAFETY: the rest of the same memory.
        unsafe { sum_words(to.add(at), first.add(at), second.add(at), len - at) };
    }

    /// # Safety
    /// As for `multiply_bytes`; the processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn multiply_avx2<const ADD: bool>(to: *mut u8, from: *const u8, len: usize, tables: &Tables) {
        // SAFETY: both tables are 16 bytes.
        let (low, high) =
            unsafe { (_mm_loadu_si128(tables.low.as_ptr().cast()), _mm_loadu_si128(tables.high.as_ptr().cast())) };
        let (low, high) = (_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high));
        let half = _mm256_set1_epi8(15);
        let mut at = 0;
        while at + 32 <= len {
            // SAFETY: at + 32 <= len; the instructions need no alignment.
            unsafe {
                let data = _mm256_loadu_si256(from.add(at).cast());
                let low = _mm256_shuffle_epi8(low, _mm256_and_si256(data, half));
                let high = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi64::<4>(data), half));
                let mut sum = _mm256_xor_si256(low, high);
                if ADD {
                    sum = _mm256_xor_si256(_mm256_loadu_si256(to.add(at).cast()), sum);
                }
                _mm256_storeu_si256(to.add(at).cast(), sum);
            }
            at += 32;
        }
        // SAFETY: the rest of the same memory.
        unsafe { multiply_bytes::<ADD>(to.add(at), from.add(at), len - at, tables) };
    }

    /// # Safety
    /// As for `multiply_bytes`; the processor must have AVX-512BW.
    #[target_feature(enable = "avx512bw")]
    pub(super) unsafe fn multiply_avx512<const ADD: bool>(to: *mut u8, from: *const u8, len: usize, tables: &Tables) {
        // SAFETY: both tables are 16 bytes.
        let (low, high) =
            unsafe { (_mm_loadu_si128(tables.low.as_ptr().cast()), _mm_loadu_si128(tables.high.as_ptr().cast())) };
        let (low, high) = (_mm512_broadcast_i32x4(low), _mm512_broadcast_i32x4(high));
        let half = _mm512_set1_epi8(15);
        let mut at = 0;
        while at + 64 <= len {
            // SAFETY: at + 64 <= len; the instructions need no alignment.
            unsafe {
                let data = _mm512_loadu_si512(from.add(at).cast());
                let low = _mm512_shuffle_epi8(low, _mm512_and_si512(data, half));
                let high = _mm512_shuffle_epi8(high, _mm512_and_si512(_mm512_srli_epi64::<4>(data), half));
                let mut sum = _mm512_xor_si512(low, high);
                if ADD {
                    sum = _mm512_xor_si512(_mm512_loadu_si512(to.add(at).cast()), sum);
                }
                _mm512_storeu_si512(to.add(at).cast(), sum);
            }
            at += 64;
        }
        // SAFETY: the rest of the same memory.
        unsafe { multiply_bytes::<ADD>(to.add(at), from.add(at), len - at, tables) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segment(bytes: &mut [u8]) -> Segment {
        let ptr = std::ptr::NonNull::new(bytes.as_mut_ptr()).unwrap();
        // SAFETY: the slice outlives the segment in every test here.
        unsafe { Segment::new(ptr, bytes.len()) }
    }

    #[test]
    fn numbers_form_a_field() {
        let mut seen = std::collections::BTreeSet::new();
        for exponent in 0..255 {
            assert!(seen.insert(power(exponent)), "2 generates every number but 0");
        }
        for one in 1..=255 {
            assert_eq!(product(one, inverse(one)), 1);
            assert_eq!((product(one, 0), product(one, 1)), (0, one));
        }
        assert_eq!((product(2, 0x80), product(7, 5)), (0x1d, 27));
    }

    proptest! {
        #[test]
        fn every_implementation_sums_alike(
            first in proptest::collection::vec(any::<u8>(), 0..400), seed in any::<u8>(), factor in any::<u8>(), cut in 0..64_usize,
        ) {
            let mut first = first;
            let mut second: Vec<u8> = first.iter().enumerate().map(|(at, byte)| byte.wrapping_mul(31) ^ seed ^ at as u8).collect();
            let cut = cut.min(first.len());
            let expected: Vec<u8> = first[cut..].iter().zip(&second[cut..]).map(|(one, other)| one ^ other).collect();
            let products: Vec<u8> =
                first[cut..].iter().zip(&second[cut..]).map(|(one, other)| one ^ product(*other, factor)).collect();
            let mut to = vec![0; expected.len()];
            sum_into(&segment(&mut to), &segment(&mut first[cut..]), &segment(&mut second[cut..]));
            prop_assert_eq!(&to, &expected);
            // SAFETY: all three are of this length.
            unsafe { sum_words(to.as_mut_ptr(), first[cut..].as_ptr(), second[cut..].as_ptr(), expected.len()) };
            prop_assert_eq!(&to, &expected);
            let mut sum = first[cut..].to_vec();
            add_into(&segment(&mut sum), &segment(&mut second[cut..]));
            prop_assert_eq!(&sum, &expected);
            let mut sum = first[cut..].to_vec();
            add_product_into(&segment(&mut sum), &segment(&mut second[cut..]), factor);
            prop_assert_eq!(&sum, &products);
            let mut sum = first[cut..].to_vec();
            // SAFETY: both are of this length.
            unsafe { multiply_bytes::<true>(sum.as_mut_ptr(), second[cut..].as_ptr(), sum.len(), &Tables::of(factor)) };
            prop_assert_eq!(&sum, &products);
            let mut scaled = second[cut..].to_vec();
            scale(&segment(&mut scaled), factor);
            let plain: Vec<u8> = second[cut..].iter().map(|byte| product(*byte, factor)).collect();
            prop_assert_eq!(&scaled, &plain);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: all three are of this length, and the processor has it.
                unsafe { x86::sum_avx2(to.as_mut_ptr(), first[cut..].as_ptr(), second[cut..].as_ptr(), expected.len()) };
                prop_assert_eq!(&to, &expected);
                let mut sum = first[cut..].to_vec();
                // SAFETY: as above.
                unsafe { x86::multiply_avx2::<true>(sum.as_mut_ptr(), second[cut..].as_ptr(), sum.len(), &Tables::of(factor)) };
                prop_assert_eq!(&sum, &products);
            }
        }
    }

    #[test]
    fn a_part_that_is_replaced_changes_its_parity_by_that() {
        let bytes = |len: usize, seed: u8| (0..len).map(|at| (at as u8).wrapping_mul(37) ^ seed).collect::<Vec<_>>();
        for len in [512, 4096, 3 * 4096 + 512] {
            let (mut old, other, mut new) = (bytes(len, 1), bytes(len, 99), bytes(len, 200));
            let sums = |data: &[u8], factor: u8| -> Vec<u8> {
                data.iter().zip(&other).map(|(one, other)| product(*one, factor) ^ other).collect()
            };
            let (mut p, mut q) = (sums(&old, 1), sums(&old, 7));
            let expected = (sums(&new, 1), sums(&new, 7));
            let (first, second) = new.split_at_mut(len / 512 / 2 * 512 + 8);
            let list = [segment(first), segment(second)];
            let parity = [(segment(&mut p).into(), 1), (segment(&mut q).into(), 7)];
            replace(segment(&mut old).into(), &parity, &mut SegmentCursor::new(&list));
            assert!(old == new && (p, q) == expected, "{len} bytes");
        }
    }
}
