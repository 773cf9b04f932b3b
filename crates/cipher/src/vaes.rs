//! AES-256-XTS by the processor's wide AES instructions (VAES): with AVX-512 four cipher blocks in a register, four registers at a time, which
//! is what this file has; without it as in [`narrow`].
//!
//! ```text
//!   numbers of 8 units ──AES, second key──► 8 tweaks ─┐ times 1, x … x¹⁵, then each times x¹⁶, again and again
//!                                                      ▼
//!   line of data ──xor──► 14 rounds, first key ──xor──► line of the result
//! ```
//!
//! It is here for two things that the C library's calls do not have. The tweaks of eight units are made at once, where the library makes
//! each in a call of its own, before which nothing else can start. And data pass memory as in a copy: they are fetched ahead, and written
//! past the caches where a copy would be. What will be deciphered next is sent for while the cipher works, four lines with each group:
//! the caches can wait for some dozen lines at a time, and whoever asks for a whole block at once waits with them.
//!
//! Rounds and tweaks are woven by hand, in `woven!`: a compiler puts the tweaks of the next group between two groups, where they keep the
//! AES units waiting. One other instruction after every two rounds costs nothing, as long as it is no product without carry (those are
//! the AES units' work as well): what leaves a tweak at its upper end is folded back by shifts, for four registers at once. With the last
//! group of some data come the tweaks of the first group of those that come next, where they are known.
//!
//! Nothing here decides or looks up by a byte of key, tweak or data: all of it is AES instructions, shifts, products without carry and
//! sums (exclusive or), so that time does not tell them. The tests compare it with the library and with another implementation.
//!
//! Whitening: `aesenclast` ends with the sum with its round key. A tweak is kept as its sum with the last round key, which makes that the
//! one with the tweak as well; the first sum then takes the first round key and the last together.

use std::arch::{
    asm,
    x86_64::{
        __m128i, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_aesimc_si128,
        _mm_aeskeygenassist_si128, _mm_loadu_si128, _mm_prefetch, _mm_set_epi64x, _mm_shuffle_epi32, _mm_slli_si128,
        _mm_storeu_si128, _mm_xor_si128, _mm512_aesdeclast_epi128, _mm512_aesenc_epi128, _mm512_aesenclast_epi128,
        _mm512_broadcast_i32x4, _mm512_bslli_epi128, _mm512_bsrli_epi128, _mm512_castsi128_si512, _mm512_castsi512_si128,
        _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_maskz_add_epi64, _mm512_set_epi64, _mm512_set1_epi64,
        _mm512_setzero_si512, _mm512_sllv_epi64, _mm512_srlv_epi64, _mm512_storeu_si512, _mm512_stream_si512,
        _mm512_ternarylogic_epi64, _mm512_xor_si512,
    },
};

use std::{
    cell::Cell,
    mem::{MaybeUninit, offset_of},
    ptr::null,
};

use crate::{error::CipherError, secret::Secret, xts::Order};

mod narrow;

const ROUNDS: usize = 14;
/// Bytes of one key's round keys.
const KEYS: usize = (ROUNDS + 1) * 16;
/// Bytes of a cache line, which is a register's width.
const LINE: usize = 64;
/// Bytes that are worked on at a time: four registers, so that the AES units always have something to do.
pub(crate) const GROUP: usize = 4 * LINE;
/// Bytes that are fetched ahead. More at once than the first-level cache can wait for would hold up the cipher.
const AHEAD: usize = 1024;
/// Bytes that are sent for at once, at most, when there was no time to do it little by little.
const AT_ONCE: usize = 8192;
/// Units whose tweaks are made at once.
const TWEAKS: usize = 8;
/// x¹²⁸ in the field: x⁷ + x² + x + 1.
const POLYNOMIAL: i64 = 0x87;
/// The sum of three, as a table.
const SUM: i32 = 0x96;

thread_local! {
    /// What the thread will decipher soon and has not sent for: where it begins, and its bytes.
    static SOON: Cell<(*const u8, usize)> = const { Cell::new((null(), 0)) };
}

/// How many cipher blocks a register has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Width {
    Two,
    Four,
}

impl Width {
    /// The widest first.
    pub(crate) const ALL: [Self; 2] = [Self::Four, Self::Two];

    /// Whether the processor has the instructions.
    pub(crate) fn is_possible(self) -> bool {
        is_x86_feature_detected!("vaes")
            && is_x86_feature_detected!("aes")
            && match self {
                Self::Two => is_x86_feature_detected!("avx2"),
                Self::Four => {
                    is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("vpclmulqdq")
                }
            }
    }

    /// The widest that the processor has.
    pub(crate) fn best() -> Option<Self> {
        Self::ALL.into_iter().find(|width| width.is_possible())
    }
}

/// Notes data that the thread will decipher soon, and sends for those before at once. Nothing is ever read there for that: the place may be
/// gone by then.
pub(crate) fn foresee(at: *const u8, len: usize) {
    let (before, left) = SOON.replace((at, len));
    for done in (0..left.min(AT_ONCE)).step_by(GROUP) {
        prefetch::<_MM_HINT_T1>(before.wrapping_add(done));
    }
}

/// Takes as much of that as can be sent for while `len` bytes are worked on.
fn take_soon(len: usize) -> (*const u8, usize) {
    let (at, left) = SOON.get();
    let now = left.min(len);
    SOON.set((at.wrapping_add(now), left - now));
    (at, now)
}

/// Work that is carried from some data to those that come next, whose first tweaks are made meanwhile.
pub(crate) struct Known {
    /// Of which data that is; `None`: nothing is known.
    of: Option<Of>,
    /// Tweaks of two times [`TWEAKS`] units, those of the present ones and of the next. Written before they are used.
    ready: [MaybeUninit<[__m512i; TWEAKS / 4]>; 2],
    /// Those of the first group, where something is known.
    group: MaybeUninit<[__m512i; 4]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Of {
    /// The number of the first unit.
    first: u64,
    /// Whether they are enciphered: a group's tweaks are sums with that way's last round key.
    encrypt: bool,
    /// Whether it is one unit, so that no other unit's tweak is ready.
    alone: bool,
}

impl Default for Known {
    fn default() -> Self {
        Self { of: None, ready: [MaybeUninit::uninit(); 2], group: MaybeUninit::uninit() }
    }
}

/// The round keys: of the data's key for one way and the other, and of the tweak's.
pub(crate) struct Schedule {
    keys: Secret<{ 3 * KEYS }>,
    width: Width,
}

impl Schedule {
    /// For registers of a width that is possible.
    pub(crate) fn new(key: &Secret<64>, width: Width) -> Result<Self, CipherError> {
        assert!(width.is_possible(), "the processor has instructions for {width:?}");
        let mut keys = Secret::zeroed()?;
        // SAFETY: the processor has the instructions; there are 64 bytes of keys, and room for three schedules.
        unsafe {
            let (key, to): (*const u8, *mut u8) = (key.bytes().as_ptr(), keys.bytes_mut().as_mut_ptr());
            expand(key, to);
            invert(to, to.add(KEYS));
            expand(key.add(32), to.add(2 * KEYS));
        }
        Ok(Self { keys, width })
    }

    /// Enciphers data units.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for `len` bytes, which are whole units of whole [`GROUP`]s; they are the same place or do
    /// not overlap. To be written past the caches `to` must be aligned to lines. `known` is of this schedule.
    pub(crate) unsafe fn encrypt(
        &self,
        order: Order,
        from: *const u8,
        to: *mut u8,
        len: usize,
        past: bool,
        known: &mut Known,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if past {
                self.units::<true, true>(order, from, to, len, known);
            } else {
                self.units::<true, false>(order, from, to, len, known);
            }
        }
    }

    /// Deciphers them.
    ///
    /// # Safety
    /// As of [`Self::encrypt`].
    pub(crate) unsafe fn decrypt(&self, order: Order, from: *const u8, to: *mut u8, len: usize, known: &mut Known) {
        // SAFETY: the caller's promise.
        unsafe { self.units::<false, false>(order, from, to, len, known) }
    }

    /// # Safety
    /// As of [`Self::encrypt`].
    #[inline]
    unsafe fn units<const ENCRYPT: bool, const PAST: bool>(
        &self,
        order: Order,
        from: *const u8,
        to: *mut u8,
        len: usize,
        known: &mut Known,
    ) {
        let keys = self.keys.bytes().as_ptr();
        // SAFETY: the caller's promise; a schedule of a width exists only where its instructions do, and has three keys' rounds.
        unsafe {
            let (data, tweak) = (if ENCRYPT { keys } else { keys.add(KEYS) }, keys.add(2 * KEYS));
            match self.width {
                Width::Two => narrow::units::<ENCRYPT, PAST>(data, tweak, order, from, to, len, known),
                Width::Four => units::<ENCRYPT, PAST>(data, tweak, order, from, to, len, known),
            }
        }
    }
}

/// The round keys of a key of 32 bytes (FIPS 197).
///
/// # Safety
/// `key` has 32 bytes and `to` [`KEYS`].
#[target_feature(enable = "aes")]
unsafe fn expand(key: *const u8, to: *mut u8) {
    /// Each word's sum with all before it.
    #[target_feature(enable = "sse2")]
    fn sums(words: __m128i) -> __m128i {
        let words = _mm_xor_si128(words, _mm_slli_si128::<4>(words));
        _mm_xor_si128(words, _mm_slli_si128::<8>(words))
    }
    let to: *mut __m128i = to.cast();
    // SAFETY: the caller's promise; 14 is the last number used.
    unsafe {
        let (mut even, mut odd) = (_mm_loadu_si128(key.cast()), _mm_loadu_si128(key.add(16).cast()));
        _mm_storeu_si128(to, even);
        macro_rules! pair {
            ($at:literal, $constant:literal) => {
                _mm_storeu_si128(to.add($at - 1), odd);
                even = _mm_xor_si128(sums(even), _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<$constant>(odd)));
                _mm_storeu_si128(to.add($at), even);
                odd = _mm_xor_si128(sums(odd), _mm_shuffle_epi32::<0xaa>(_mm_aeskeygenassist_si128::<0>(even)));
            };
        }
        pair!(2, 1);
        pair!(4, 2);
        pair!(6, 4);
        pair!(8, 8);
        pair!(10, 16);
        pair!(12, 32);
        pair!(14, 64);
        let _ = odd;
    }
}

/// The round keys for the other way.
///
/// # Safety
/// Both have [`KEYS`] bytes.
#[target_feature(enable = "aes")]
unsafe fn invert(keys: *const u8, to: *mut u8) {
    for round in 0..=ROUNDS {
        // SAFETY: the caller's promise.
        unsafe {
            let key = _mm_loadu_si128(keys.add((ROUNDS - round) * 16).cast());
            let key = if matches!(round, 0 | ROUNDS) { key } else { _mm_aesimc_si128(key) };
            _mm_storeu_si128(to.add(round * 16).cast(), key);
        }
    }
}

/// Sixteen bytes, four times.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn four_times(bytes: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.cast())) }
}

/// The tweak of one unit.
///
/// # Safety
/// `keys` has [`KEYS`] bytes.
#[inline]
#[target_feature(enable = "avx512f,aes")]
unsafe fn tweak(keys: *const u8, number: u64) -> __m512i {
    // SAFETY: the caller's promise.
    let key = |round: usize| unsafe { _mm_loadu_si128(keys.add(round * 16).cast()) };
    let mut tweak = _mm_xor_si128(_mm_set_epi64x(0, number.cast_signed()), key(0));
    for round in 1..ROUNDS {
        tweak = _mm_aesenc_si128(tweak, key(round));
    }
    _mm512_castsi128_si512(_mm_aesenclast_si128(tweak, key(ROUNDS)))
}

/// The tweaks of [`TWEAKS`] units. The second four take no time of their own: the first wait for each of their rounds.
///
/// # Safety
/// `keys` has [`KEYS`] bytes.
#[inline]
#[target_feature(enable = "avx512f,vaes")]
unsafe fn tweaks(keys: *const u8, first: u64) -> [__m512i; 2] {
    let first = _mm512_set1_epi64(first.cast_signed());
    // The upper halves are zero.
    let numbers = |four| _mm512_maskz_add_epi64(0b0101_0101, first, four);
    // SAFETY: the caller's promise.
    unsafe {
        let key = four_times(keys);
        let mut one = _mm512_xor_si512(numbers(_mm512_set_epi64(0, 3, 0, 2, 0, 1, 0, 0)), key);
        let mut two = _mm512_xor_si512(numbers(_mm512_set_epi64(0, 7, 0, 6, 0, 5, 0, 4)), key);
        for round in 1..ROUNDS {
            let key = four_times(keys.add(round * 16));
            (one, two) = (_mm512_aesenc_epi128(one, key), _mm512_aesenc_epi128(two, key));
        }
        let key = four_times(keys.add(ROUNDS * 16));
        [_mm512_aesenclast_epi128(one, key), _mm512_aesenclast_epi128(two, key)]
    }
}

/// By how much the halves of a unit's tweak are shifted to the left for its products with x⁰ … x¹⁵, four in a register, and then what
/// leaves each half to the right. (A shift by 64 leaves nothing.) At places that `next_unit!` knows.
#[repr(C, align(64))]
struct Shifts([[[u64; 8]; 4]; 2]);

static SHIFTS: Shifts = {
    let mut shifts = [[[0; 8]; 4]; 2];
    let mut at = 0;
    while at < 32 {
        let power = at as u64 / 2;
        shifts[0][at / 8][at % 8] = power;
        shifts[1][at / 8][at % 8] = 64 - power;
        at += 1;
    }
    Shifts(shifts)
};

/// A unit's tweak times x to the power of four times `register` and the three powers after it, and the sum of that with `more`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
fn powers(tweak: __m512i, register: usize, more: __m512i) -> __m512i {
    // SAFETY: eight numbers of 64 bits.
    let [left, right] = [0, 1].map(|way| unsafe { _mm512_loadu_si512(SHIFTS.0[way][register].as_ptr().cast()) });
    // What leaves each half goes into the other: from the lower as it is, from the upper times x¹²⁸.
    let over = _mm512_srlv_epi64(tweak, right);
    let folded = _mm512_clmulepi64_epi128::<0x01>(over, _mm512_set1_epi64(POLYNOMIAL));
    let shifted = _mm512_sllv_epi64(tweak, left);
    _mm512_xor_si512(_mm512_ternarylogic_epi64::<SUM>(shifted, _mm512_bslli_epi128::<8>(over), folded), more)
}

/// What is the same for all groups: in registers, so nothing may point to it.
struct Means {
    rounds: [__m512i; ROUNDS - 1],
    /// The sum of the first round key with the last.
    outer: __m512i,
}

/// What the next group's tweaks are summed with, at places that `woven!` knows.
#[repr(C)]
struct Ends {
    /// The last round key, in a unit's first group.
    last: __m512i,
    /// What turns (t + last)·x¹⁶ into t·x¹⁶ + last, in the others.
    mend: __m512i,
}

impl Means {
    /// # Safety
    /// `keys` has [`KEYS`] bytes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn new(keys: *const u8, last: __m512i) -> Self {
        // SAFETY: the caller's promise.
        let key = |round: usize| unsafe { four_times(keys.add(round * 16)) };
        let mut rounds = [_mm512_setzero_si512(); ROUNDS - 1];
        for (at, round) in rounds.iter_mut().enumerate() {
            *round = key(at + 1);
        }
        Self { rounds, outer: _mm512_xor_si512(key(0), last) }
    }
}

impl Ends {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
    fn new(last: __m512i) -> Self {
        const { assert!(offset_of!(Self, last) == 0 && offset_of!(Self, mend) == LINE) }
        let over = _mm512_bsrli_epi128::<14>(last);
        let folded = _mm512_clmulepi64_epi128::<0x00>(over, _mm512_set1_epi64(POLYNOMIAL));
        Self { last, mend: _mm512_ternarylogic_epi64::<SUM>(_mm512_bslli_epi128::<2>(last), folded, last) }
    }
}

/// All rounds but the last of four registers of data, `d0` to `d3`, with instructions for the next group's tweaks, `n0` to `n3`, in pairs.
macro_rules! woven {
    ($aes:literal: $($round:literal $one:literal $two:literal)*) => {
        concat!($(
            $aes, " {d0}, {d0}, {k", $round, "}\n", $aes, " {d1}, {d1}, {k", $round, "}\n", $one, "\n",
            $aes, " {d2}, {d2}, {k", $round, "}\n", $aes, " {d3}, {d3}, {k", $round, "}\n", $two, "\n",
        )*)
    };
}

/// The unit goes on: its tweaks times x¹⁶. What leaves their upper ends is gathered from all four, folded, and brought to each.
macro_rules! same_unit {
    ($aes:literal) => {
        woven!($aes:
            "0" "vpunpckhdq {f}, {t0}, {t1}" "vpunpckhdq {g}, {t2}, {t3}"
            "1" "vpunpckhqdq {f}, {f}, {g}" "vpslldq {n0}, {t0}, 2"
            "2" "vpsrld {f}, {f}, 16" "vpslldq {n1}, {t1}, 2"
            "3" "vpslld {g}, {f}, 1" "vpslld {h}, {f}, 2"
            "4" "vpslldq {n2}, {t2}, 2" "vpternlogd {h}, {f}, {g}, 0x96"
            "5" "vpslldq {n3}, {t3}, 2" "vpslld {f}, {f}, 7"
            "6" "vpxorq {f}, {f}, {h}" ""
            "7" "vmovdqa32 {g}{{{first}}}{{z}}, {f}" ""
            "8" "vpshufd {h}{{{first}}}{{z}}, {f}, 1" "vpternlogq {n0}, {g}, [{ends} + 64], 0x96"
            "9" "vpshufd {g}{{{first}}}{{z}}, {f}, 2" ""
            "10" "vpternlogq {n1}, {h}, [{ends} + 64], 0x96" "vpshufd {h}{{{first}}}{{z}}, {f}, 3"
            "11" "vpternlogq {n2}, {g}, [{ends} + 64], 0x96" ""
            "12" "vpternlogq {n3}, {h}, [{ends} + 64], 0x96" ""
        )
    };
}

/// The next unit begins: as [`powers`] of its tweak.
macro_rules! next_unit {
    ($aes:literal) => {
        woven!($aes:
            "0" "vbroadcasti32x4 {h}, [{next}]" "vpsrlvq {g0}, {h}, [{shifts} + 256]"
            "1" "vpsrlvq {g1}, {h}, [{shifts} + 320]" "vpsrlvq {g2}, {h}, [{shifts} + 384]"
            "2" "vpsrlvq {g3}, {h}, [{shifts} + 448]" "vpunpckhdq {n0}, {g0}, {g1}"
            "3" "vpunpckhdq {n1}, {g2}, {g3}" "vpunpcklqdq {f}, {n0}, {n1}"
            "4" "vpslld {n0}, {f}, 1" "vpslld {n1}, {f}, 2"
            "5" "vpternlogd {n1}, {f}, {n0}, 0x96" "vpslld {f}, {f}, 7"
            "6" "vpxorq {f}, {f}, {n1}" "vpsllvq {n0}, {h}, [{shifts}]"
            "7" "vshufps {g0}{{{others}}}{{z}}, {f}, {g0}, 0x40" "vpsllvq {n1}, {h}, [{shifts} + 64]"
            "8" "vshufps {g1}{{{others}}}{{z}}, {f}, {g1}, 0x41" "vpternlogq {n0}, {g0}, [{ends}], 0x96"
            "9" "vpsllvq {n2}, {h}, [{shifts} + 128]" "vpternlogq {n1}, {g1}, [{ends}], 0x96"
            "10" "vshufps {g2}{{{others}}}{{z}}, {f}, {g2}, 0x42" "vpsllvq {n3}, {h}, [{shifts} + 192]"
            "11" "vshufps {g3}{{{others}}}{{z}}, {f}, {g3}, 0x43" "vpternlogq {n2}, {g2}, [{ends}], 0x96"
            "12" "vpternlogq {n3}, {g3}, [{ends}], 0x96" ""
        )
    };
}

/// One [`GROUP`] of data, whose tweaks are sums with the last round key; and the tweaks of the next. `next`: where the tweak of the unit
/// lies that begins with it; `None`: the unit goes on.
///
/// # Safety
/// `from` must be readable and `to` writable for so many bytes, which are the same place or do not overlap; what goes past the caches is
/// aligned to lines. `next` has 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
unsafe fn group<const ENCRYPT: bool, const PAST: bool>(
    means: &Means,
    ends: &Ends,
    tweaks: [__m512i; 4],
    next: Option<*const u8>,
    from: *const u8,
    to: *mut u8,
) -> [__m512i; 4] {
    let mut data = tweaks;
    for line in 0..4 {
        // SAFETY: the line lies within the group.
        let plain = unsafe { _mm512_loadu_si512(from.add(line * LINE).cast()) };
        data[line] = _mm512_ternarylogic_epi64::<SUM>(plain, tweaks[line], means.outer);
    }
    let ([mut d0, mut d1, mut d2, mut d3], [t0, t1, t2, t3]) = (data, tweaks);
    let (n0, n1, n2, n3): (__m512i, __m512i, __m512i, __m512i);
    macro_rules! run {
        ($template:expr, $($operands:tt)*) => {
            asm!(
                $template,
                d0 = inout(zmm_reg) d0, d1 = inout(zmm_reg) d1, d2 = inout(zmm_reg) d2, d3 = inout(zmm_reg) d3,
                n0 = out(zmm_reg) n0, n1 = out(zmm_reg) n1, n2 = out(zmm_reg) n2, n3 = out(zmm_reg) n3,
                f = out(zmm_reg) _, h = out(zmm_reg) _,
                k0 = in(zmm_reg) means.rounds[0], k1 = in(zmm_reg) means.rounds[1], k2 = in(zmm_reg) means.rounds[2],
                k3 = in(zmm_reg) means.rounds[3], k4 = in(zmm_reg) means.rounds[4], k5 = in(zmm_reg) means.rounds[5],
                k6 = in(zmm_reg) means.rounds[6], k7 = in(zmm_reg) means.rounds[7], k8 = in(zmm_reg) means.rounds[8],
                k9 = in(zmm_reg) means.rounds[9], k10 = in(zmm_reg) means.rounds[10], k11 = in(zmm_reg) means.rounds[11],
                k12 = in(zmm_reg) means.rounds[12],
                ends = in(reg) &raw const *ends,
                $($operands)*,
                options(pure, readonly, nostack, preserves_flags)
            )
        };
    }
    macro_rules! same {
        ($aes:literal) => {
            run!(
                same_unit!($aes), g = out(zmm_reg) _, first = in(kreg) 0x1111_u16,
                t0 = in(zmm_reg) t0, t1 = in(zmm_reg) t1, t2 = in(zmm_reg) t2, t3 = in(zmm_reg) t3
            )
        };
    }
    macro_rules! next {
        ($aes:literal, $next:expr) => {
            run!(
                next_unit!($aes), others = in(kreg) 0xdddd_u16, next = in(reg) $next, shifts = in(reg) &raw const SHIFTS,
                g0 = out(zmm_reg) _, g1 = out(zmm_reg) _, g2 = out(zmm_reg) _, g3 = out(zmm_reg) _
            )
        };
    }
    // SAFETY: the instructions change registers that they say they change, and read from memory the next unit's tweak, which the caller
    // promises, and what tweaks are made with, laid out as `Shifts` and `Ends` say: registers' 64 bytes, one after the other.
    unsafe {
        match (next, ENCRYPT) {
            (None, true) => same!("vaesenc"),
            (None, false) => same!("vaesdec"),
            (Some(next), true) => next!("vaesenc", next),
            (Some(next), false) => next!("vaesdec", next),
        }
    }
    for (line, (data, last)) in [d0, d1, d2, d3].into_iter().zip(tweaks).enumerate() {
        let result = if ENCRYPT { _mm512_aesenclast_epi128(data, last) } else { _mm512_aesdeclast_epi128(data, last) };
        // SAFETY: as above.
        unsafe {
            let to = to.add(line * LINE);
            if PAST { _mm512_stream_si512(to.cast(), result) } else { _mm512_storeu_si512(to.cast(), result) }
        }
    }
    [n0, n1, n2, n3]
}

/// Brings a group near that will be read: into the first-level cache by [`_MM_HINT_T0`], into the second by [`_MM_HINT_T1`].
#[inline]
fn prefetch<const HINT: i32>(at: *const u8) {
    for line in 0..4 {
        // SAFETY: a prefetch has no effect but on the cache, whatever the address.
        unsafe { _mm_prefetch::<HINT>(at.wrapping_add(line * LINE).cast()) };
    }
}

/// # Safety
/// As of [`Schedule::encrypt`], and both keys have [`KEYS`] bytes; [`Width::Four`] must be possible.
#[target_feature(enable = "avx512f,avx512bw,vaes,aes,vpclmulqdq")]
unsafe fn units<const ENCRYPT: bool, const PAST: bool>(
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
    // SAFETY: both have all rounds' keys; all places lie within `len`, which is whole units of whole groups. Where something is known of the
    // data, their first tweaks were written; the others are before a unit needs them.
    unsafe {
        let last = four_times(data_keys.add(ROUNDS * 16));
        let (means, ends) = (Means::new(data_keys, last), Ends::new(last));
        let alone = len == unit;
        let mut now = if known.of == Some(Of { first, encrypt: ENCRYPT, alone }) {
            known.group.assume_init()
        } else {
            let [one, _] =
                *known.ready[0].write(if alone { [tweak(tweak_keys, first), last] } else { tweaks(tweak_keys, first) });
            let tweak = _mm512_broadcast_i32x4(_mm512_castsi512_si128(one));
            [0, 1, 2, 3].map(|register| powers(tweak, register, last))
        };
        let (mut at, mut number) = (0, 0);
        while at < len {
            number += 1;
            let end = at + unit;
            if end < len {
                if number % TWEAKS == 0 {
                    known.ready[number / TWEAKS % 2].write(tweaks(tweak_keys, first.wrapping_add(number as u64)));
                }
            } else if let Some(then) = then {
                number = 0;
                known.ready[0].write(if alone { [tweak(tweak_keys, then), last] } else { tweaks(tweak_keys, then) });
            }
            let goes_on = end < len || then.is_some();
            let next = (&raw const known.ready).cast::<u8>().add(number % (2 * TWEAKS) * 16);
            while at < end {
                if at + AHEAD < len {
                    prefetch::<_MM_HINT_T0>(from.add(at + AHEAD));
                }
                if at < soon_len {
                    prefetch::<_MM_HINT_T1>(soon.wrapping_add(at));
                }
                let next = (goes_on && at + GROUP == end).then_some(next);
                now = group::<ENCRYPT, PAST>(&means, &ends, now, next, from.add(at), to.add(at));
                at += GROUP;
            }
        }
        known.of = then.map(|first| Of { first, encrypt: ENCRYPT, alone });
        known.group.write(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_foreseen_is_sent_for_over_as_many_bytes_as_are_worked_on() {
        let data = [0; 4096];
        let at = |byte: usize| data.as_ptr().wrapping_add(byte);
        foresee(at(0), 4096);
        assert_eq!(take_soon(1024), (at(0), 1024));
        assert_eq!(take_soon(2048), (at(1024), 2048));
        foresee(at(512), 512);
        assert_eq!(take_soon(4096), (at(512), 512), "the latest counts");
        assert_eq!(take_soon(4096).1, 0, "and once");
    }
}
