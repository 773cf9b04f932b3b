//! The same for processors without AVX-512: two cipher blocks in a register, eight registers at a time.
//!
//! There are sixteen registers, so round keys and tweaks lie in memory. A group's tweaks are made with the rounds of the group before, woven
//! in by hand, or ahead of them where a unit begins. The AES units take two of these registers in a cycle and have each back four cycles
//! later, so that eight are just enough; and unlike those of 512 bits they share their ports with whatever else is done.

use std::arch::{
    asm,
    x86_64::{
        __m128i, __m256i, _MM_HINT_T0, _MM_HINT_T1, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_loadu_si128, _mm_set_epi64x,
        _mm_storeu_si128, _mm_xor_si128, _mm256_aesdeclast_epi128, _mm256_aesenc_epi128, _mm256_aesenclast_epi128,
        _mm256_broadcastsi128_si256, _mm256_castpd_si256, _mm256_castsi256_pd, _mm256_loadu_si256, _mm256_set_epi64x,
        _mm256_shuffle_pd, _mm256_slli_epi64, _mm256_slli_si256, _mm256_sllv_epi64, _mm256_srli_si256, _mm256_srlv_epi64,
        _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
    },
};

use super::{AHEAD, GROUP, Known, Of, ROUNDS, TWEAKS, prefetch, take_soon};
use crate::xts::Order;

/// Bytes of a register.
const REGISTER: usize = 32;
/// Registers that are worked on at a time, so that the AES units always have something to do.
const REGISTERS: usize = GROUP / REGISTER;

/// Sixteen bytes, twice.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn twice(bytes: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.cast())) }
}

/// Writes the tweak of one unit.
///
/// # Safety
/// `keys` has [`super::KEYS`] bytes, `to` sixteen.
#[inline]
#[target_feature(enable = "avx2,aes")]
unsafe fn tweak(keys: *const u8, number: u64, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        let key = |round: usize| _mm_loadu_si128(keys.add(round * 16).cast());
        let mut tweak: __m128i = _mm_xor_si128(_mm_set_epi64x(0, number.cast_signed()), key(0));
        for round in 1..ROUNDS {
            tweak = _mm_aesenc_si128(tweak, key(round));
        }
        _mm_storeu_si128(to.cast(), _mm_aesenclast_si128(tweak, key(ROUNDS)));
    }
}

/// Writes the tweaks of [`TWEAKS`] units.
///
/// # Safety
/// `keys` has [`super::KEYS`] bytes, `to` sixteen for each unit.
#[inline]
#[target_feature(enable = "avx2,vaes")]
unsafe fn tweaks(keys: *const u8, first: u64, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        let key = twice(keys);
        let mut units = [0, 2, 4, 6].map(|at: u64| {
            let (one, two) = (first.wrapping_add(at), first.wrapping_add(at + 1));
            _mm256_xor_si256(_mm256_set_epi64x(0, two.cast_signed(), 0, one.cast_signed()), key)
        });
        for round in 1..ROUNDS {
            let key = twice(keys.add(round * 16));
            units = units.map(|unit| _mm256_aesenc_epi128(unit, key));
        }
        let key = twice(keys.add(ROUNDS * 16));
        for (at, unit) in units.into_iter().enumerate() {
            _mm256_storeu_si256(to.add(at * REGISTER).cast(), _mm256_aesenclast_epi128(unit, key));
        }
    }
}

/// A group's tweaks, which are sums with the last round key.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Tweaks([__m256i; REGISTERS]);

/// By how much the halves of a unit's tweak are shifted to the left for its products with x⁰ … x¹⁵, two in a register, and then what
/// leaves each half to the right. (A shift by 64 leaves nothing.)
#[repr(C, align(64))]
struct Shifts([[[u64; 4]; REGISTERS]; 2]);

static SHIFTS: Shifts = {
    let mut shifts = [[[0; 4]; REGISTERS]; 2];
    let mut at = 0;
    while at < 4 * REGISTERS {
        let power = at as u64 / 2;
        shifts[0][at / 4][at % 4] = power;
        shifts[1][at / 4][at % 4] = 64 - power;
        at += 1;
    }
    Shifts(shifts)
};

/// What is the same for all groups.
struct Means {
    keys: *const u8,
    /// The sum of the first round key with the last.
    outer: __m256i,
    last: __m256i,
    /// What turns (t + last)·x¹⁶ into t·x¹⁶ + last.
    mend: __m256i,
}

/// Takes one of the four numbers of 32 bits in each block to its lower end, alone.
#[repr(C, align(64))]
struct Alone([[i8; REGISTER]; 4]);

static ALONE: Alone = {
    let mut takes = [[-1; REGISTER]; 4];
    let mut at = 0;
    while at < 4 * 8 {
        let (number, byte) = (at / 8, at % 8);
        takes[number][byte / 4 * 16 + byte % 4] = (4 * number + byte % 4) as i8;
        at += 1;
    }
    Alone(takes)
};

/// All rounds but the last of eight registers of data, `d0` to `d7`, with four other instructions in each.
macro_rules! woven {
    ($aes:literal: $($round:literal $one:literal $two:literal $three:literal $four:literal)*) => {
        concat!($(
            "vbroadcasti128 {k}, [{keys} + ", $round, " * 16]\n",
            $aes, " {d0}, {d0}, {k}\n", $aes, " {d1}, {d1}, {k}\n", $one, "\n",
            $aes, " {d2}, {d2}, {k}\n", $aes, " {d3}, {d3}, {k}\n", $two, "\n",
            $aes, " {d4}, {d4}, {k}\n", $aes, " {d5}, {d5}, {k}\n", $three, "\n",
            $aes, " {d6}, {d6}, {k}\n", $aes, " {d7}, {d7}, {k}\n", $four, "\n",
        )*)
    };
}

/// The rounds alone.
macro_rules! only {
    ($aes:literal) => {
        woven!($aes:
            "1" "" "" "" "" "2" "" "" "" "" "3" "" "" "" "" "4" "" "" "" "" "5" "" "" "" "" "6" "" "" "" "" "7" "" "" "" ""
            "8" "" "" "" "" "9" "" "" "" "" "10" "" "" "" "" "11" "" "" "" "" "12" "" "" "" "" "13" "" "" "" ""
        )
    };
}

/// The unit goes on: its tweaks times x¹⁶. What leaves their upper ends is gathered from four registers, folded, and brought to each; then
/// the same for the other four.
#[rustfmt::skip]
macro_rules! same_unit {
    ($aes:literal) => {
        woven!($aes:
            "1" "vmovdqa {f}, [{t}]\nvpunpckhdq {f}, {f}, [{t} + 32]" "vmovdqa {g}, [{t} + 64]\nvpunpckhdq {g}, {g}, [{t} + 96]" "vpunpckhqdq {f}, {f}, {g}" "vpsrld {f}, {f}, 16"
            "2" "vpslld {g}, {f}, 1" "vpslld {h}, {f}, 2" "vpslld {i}, {f}, 7" "vpxor {f}, {f}, {g}"
            "3" "vpxor {h}, {h}, {i}" "vpxor {f}, {f}, {h}" "vmovdqa {h}, [{t}]\nvpslldq {h}, {h}, 2" "vpshufb {g}, {f}, [{alone}]"
            "4" "vpxor {h}, {h}, {mend}" "vpxor {h}, {h}, {g}\nvmovdqa [{n}], {h}" "vmovdqa {j}, [{t} + 32]\nvpslldq {j}, {j}, 2" "vpshufb {i}, {f}, [{alone} + 32]"
            "5" "vpxor {j}, {j}, {mend}" "vpxor {j}, {j}, {i}\nvmovdqa [{n} + 32], {j}" "vmovdqa {h}, [{t} + 64]\nvpslldq {h}, {h}, 2" "vpshufb {g}, {f}, [{alone} + 64]"
            "6" "vpxor {h}, {h}, {mend}" "vpxor {h}, {h}, {g}\nvmovdqa [{n} + 64], {h}" "vmovdqa {j}, [{t} + 96]\nvpslldq {j}, {j}, 2" "vpshufb {i}, {f}, [{alone} + 96]"
            "7" "vpxor {j}, {j}, {mend}" "vpxor {j}, {j}, {i}\nvmovdqa [{n} + 96], {j}" "vmovdqa {f}, [{t} + 128]\nvpunpckhdq {f}, {f}, [{t} + 160]" "vmovdqa {g}, [{t} + 192]\nvpunpckhdq {g}, {g}, [{t} + 224]"
            "8" "vpunpckhqdq {f}, {f}, {g}" "vpsrld {f}, {f}, 16" "vpslld {g}, {f}, 1" "vpslld {h}, {f}, 2"
            "9" "vpslld {i}, {f}, 7" "vpxor {f}, {f}, {g}" "vpxor {h}, {h}, {i}" "vpxor {f}, {f}, {h}"
            "10" "vmovdqa {h}, [{t} + 128]\nvpslldq {h}, {h}, 2" "vpshufb {g}, {f}, [{alone}]" "vpxor {h}, {h}, {mend}" "vpxor {h}, {h}, {g}\nvmovdqa [{n} + 128], {h}"
            "11" "vmovdqa {j}, [{t} + 160]\nvpslldq {j}, {j}, 2" "vpshufb {i}, {f}, [{alone} + 32]" "vpxor {j}, {j}, {mend}" "vpxor {j}, {j}, {i}\nvmovdqa [{n} + 160], {j}"
            "12" "vmovdqa {h}, [{t} + 192]\nvpslldq {h}, {h}, 2" "vpshufb {g}, {f}, [{alone} + 64]" "vpxor {h}, {h}, {mend}" "vpxor {h}, {h}, {g}\nvmovdqa [{n} + 192], {h}"
            "13" "vmovdqa {j}, [{t} + 224]\nvpslldq {j}, {j}, 2" "vpshufb {i}, {f}, [{alone} + 96]" "vpxor {j}, {j}, {mend}" "vpxor {j}, {j}, {i}\nvmovdqa [{n} + 224], {j}"
        )
    };
}

/// Times x⁷ + x² + x + 1, of numbers of 64 bits whose products fit.
#[inline]
#[target_feature(enable = "avx2")]
fn folded(over: __m256i) -> __m256i {
    let one_two = _mm256_xor_si256(_mm256_slli_epi64::<1>(over), _mm256_slli_epi64::<2>(over));
    _mm256_xor_si256(_mm256_xor_si256(over, _mm256_slli_epi64::<7>(over)), one_two)
}

impl Means {
    /// # Safety
    /// `keys` has [`super::KEYS`] bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn new(keys: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let [first, last] = [0, ROUNDS].map(|round| unsafe { twice(keys.add(round * 16)) });
        let on = _mm256_xor_si256(_mm256_slli_si256::<2>(last), folded(_mm256_srli_si256::<14>(last)));
        Self { keys, outer: _mm256_xor_si256(first, last), last, mend: _mm256_xor_si256(on, last) }
    }

    /// The tweaks of a unit's first group: its tweak times x⁰ … x¹⁵.
    ///
    /// # Safety
    /// `tweak` has sixteen bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn begin(&self, tweak: *const u8) -> Tweaks {
        // SAFETY: the caller's promise.
        let tweak = unsafe { twice(tweak) };
        let mut tweaks = [tweak; REGISTERS];
        for (register, to) in tweaks.iter_mut().enumerate() {
            // SAFETY: four numbers of 64 bits.
            let [left, right] = [0, 1].map(|way| unsafe { _mm256_loadu_si256(SHIFTS.0[way][register].as_ptr().cast()) });
            // What leaves each half goes into the other: from the lower as it is, from the upper times x¹²⁸.
            let over = _mm256_srlv_epi64(tweak, right);
            let (upper, lower) = (_mm256_castsi256_pd(folded(over)), _mm256_castsi256_pd(over));
            let over = _mm256_castpd_si256(_mm256_shuffle_pd::<0b0101>(upper, lower));
            *to = _mm256_xor_si256(_mm256_xor_si256(_mm256_sllv_epi64(tweak, left), over), self.last);
        }
        Tweaks(tweaks)
    }

    /// One [`GROUP`] of data. `after`: where the tweaks of the group that follows in its unit are written; `None`: they are known, or none
    /// follows.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for so many bytes, which are the same place or do not overlap; what goes past the caches
    /// is aligned to lines.
    #[inline]
    #[target_feature(enable = "avx2,vaes")]
    unsafe fn group<const ENCRYPT: bool, const PAST: bool>(
        &self,
        tweaks: &Tweaks,
        after: Option<&mut Tweaks>,
        from: *const u8,
        to: *mut u8,
    ) {
        let mut data = tweaks.0;
        for (register, data) in data.iter_mut().enumerate() {
            // SAFETY: the register's bytes lie within the group.
            let plain = unsafe { _mm256_loadu_si256(from.add(register * REGISTER).cast()) };
            *data = _mm256_xor_si256(_mm256_xor_si256(plain, *data), self.outer);
        }
        let [mut d0, mut d1, mut d2, mut d3, mut d4, mut d5, mut d6, mut d7] = data;
        macro_rules! run {
            ($template:expr, $($operands:tt)*) => {
                asm!(
                    $template,
                    d0 = inout(ymm_reg) d0, d1 = inout(ymm_reg) d1, d2 = inout(ymm_reg) d2, d3 = inout(ymm_reg) d3,
                    d4 = inout(ymm_reg) d4, d5 = inout(ymm_reg) d5, d6 = inout(ymm_reg) d6, d7 = inout(ymm_reg) d7,
                    k = out(ymm_reg) _, keys = in(reg) self.keys,
                    $($operands)*
                )
            };
        }
        macro_rules! same {
            ($aes:literal, $after:expr) => {
                run!(
                    same_unit!($aes), f = out(ymm_reg) _, g = out(ymm_reg) _, h = out(ymm_reg) _, i = out(ymm_reg) _,
                    j = out(ymm_reg) _, mend = in(ymm_reg) self.mend, t = in(reg) &raw const *tweaks, n = in(reg) &raw mut *$after,
                    alone = in(reg) &raw const ALONE, options(nostack, preserves_flags)
                )
            };
        }
        macro_rules! rounds {
            ($aes:literal) => {
                run!(only!($aes), options(pure, readonly, nostack, preserves_flags))
            };
        }
        // SAFETY: the instructions change registers that they say they change, and all of `after`; they read the round keys, the tweaks and
        // constants, each laid out as its type says and aligned to registers.
        unsafe {
            match (after, ENCRYPT) {
                (Some(after), true) => same!("vaesenc", after),
                (Some(after), false) => same!("vaesdec", after),
                (None, true) => rounds!("vaesenc"),
                (None, false) => rounds!("vaesdec"),
            }
        }
        for (register, (data, last)) in [d0, d1, d2, d3, d4, d5, d6, d7].into_iter().zip(tweaks.0).enumerate() {
            let result = if ENCRYPT { _mm256_aesenclast_epi128(data, last) } else { _mm256_aesdeclast_epi128(data, last) };
            // SAFETY: as above.
            unsafe {
                let to = to.add(register * REGISTER);
                if PAST { _mm256_stream_si256(to.cast(), result) } else { _mm256_storeu_si256(to.cast(), result) }
            }
        }
    }
}

/// # Safety
/// As of `Schedule::encrypt`, and both keys have [`super::KEYS`] bytes; [`super::Width::Two`] must be possible.
#[target_feature(enable = "avx2,vaes,aes")]
pub(super) unsafe fn units<const ENCRYPT: bool, const PAST: bool>(
    data_keys: *const u8,
    tweak_keys: *const u8,
    Order { first, unit, next: then }: Order,
    from: *const u8,
    to: *mut u8,
    len: usize,
    known: &mut Known,
) {
    if len == 0 {
        return;
    }
    let (soon, soon_len) = take_soon(len);
    for at in (0..AHEAD.min(len)).step_by(GROUP) {
        prefetch::<_MM_HINT_T0>(from.wrapping_add(at));
    }
    const { assert!(size_of::<Tweaks>() == GROUP && size_of::<Known>() >= 2 * TWEAKS * 16 + GROUP) }
    let ready: *mut u8 = (&raw mut known.ready).cast();
    let kept: *mut Tweaks = (&raw mut known.group).cast();
    // SAFETY: both have all rounds' keys; all places lie within `len`, which is whole units of whole groups. Where something is known of the
    // data, their first tweaks were written; the others are before a unit needs them. `ready` has sixteen bytes for two times as many
    // units as are made at once, and `kept` a group's.
    unsafe {
        let means = Means::new(data_keys);
        let alone = len == unit;
        let make = |number: u64, place: usize| {
            let place = ready.add(place % (2 * TWEAKS) * 16);
            if alone { tweak(tweak_keys, number, place) } else { tweaks(tweak_keys, number, place) }
        };
        let mut both = [if known.of == Some(Of { first, encrypt: ENCRYPT, alone }) {
            *kept
        } else {
            make(first, 0);
            means.begin(ready)
        }; 2];
        let (mut at, mut number) = (0, 0);
        while at < len {
            number += 1;
            let end = at + unit;
            if end < len {
                if number % TWEAKS == 0 {
                    make(first.wrapping_add(number as u64), number);
                }
            } else if let Some(then) = then {
                number = 0;
                make(then, 0);
            }
            let goes_on = end < len || then.is_some();
            let next = ready.add(number % (2 * TWEAKS) * 16);
            while at < end {
                if at + AHEAD < len {
                    prefetch::<_MM_HINT_T0>(from.add(at + AHEAD));
                }
                if at < soon_len {
                    prefetch::<_MM_HINT_T1>(soon.wrapping_add(at));
                }
                let [one, other] = &mut both;
                let (now, after) = if (at / GROUP).is_multiple_of(2) { (one, other) } else { (other, one) };
                let follows = at + GROUP < end;
                if !follows && goes_on {
                    *after = means.begin(next);
                }
                means.group::<ENCRYPT, PAST>(now, follows.then_some(after), from.add(at), to.add(at));
                at += GROUP;
            }
        }
        known.of = then.map(|first| Of { first, encrypt: ENCRYPT, alone });
        *kept = both[at / GROUP % 2];
    }
}
