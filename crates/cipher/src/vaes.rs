//! AES-256-XTS by the processor's wide AES instructions (VAES with AVX-512): four cipher blocks in a register, four registers at a time.
//!
//! ```text
//!   numbers of 8 units ──AES, second key──► 8 tweaks ─┐ times 1, x … x³ and x⁴ … x⁷, then each times x⁸, again and again
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
//! the AES units' work as well): what leaves a tweak at its upper end is folded back by shifts, for two registers at once.
//!
//! Nothing here decides or looks up by a byte of key, tweak or data: all of it is AES instructions, shifts, products without carry and
//! sums (exclusive or), so that time does not tell them. The tests compare it with the library and with another implementation.
//!
//! Whitening: `aesenclast` ends with the sum with its round key. A tweak is kept as its sum with the last round key, which makes that the
//! one with the tweak as well; the first sum then takes the first round key and the last together.

use std::arch::{
    asm,
    x86_64::{
        __m128i, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_aesimc_si128, _mm_aeskeygenassist_si128, _mm_loadu_si128,
        _mm_prefetch, _mm_shuffle_epi32, _mm_slli_si128, _mm_storeu_si128, _mm_xor_si128, _mm512_aesdeclast_epi128,
        _mm512_aesenc_epi128, _mm512_aesenclast_epi128, _mm512_broadcast_i32x4, _mm512_bslli_epi128, _mm512_bsrli_epi128,
        _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_maskz_add_epi64, _mm512_set_epi64, _mm512_set1_epi64,
        _mm512_setzero_si512, _mm512_sllv_epi64, _mm512_srlv_epi64, _mm512_storeu_si512, _mm512_stream_si512,
        _mm512_ternarylogic_epi64, _mm512_xor_si512,
    },
};

use std::{cell::Cell, mem::offset_of, ptr::null};

use crate::{error::CipherError, secret::Secret, xts::Order};

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

/// Whether the processor has the instructions.
pub(crate) fn is_possible() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("vaes")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("aes")
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

/// Tweaks of the first [`TWEAKS`] units of data that come next, made while those before were worked on: the number of the first, and they.
#[derive(Default)]
pub(crate) struct Known(Option<(u64, [__m512i; TWEAKS / 4])>);

/// The round keys: of the data's key for one way and the other, and of the tweak's.
pub(crate) struct Schedule(Secret<{ 3 * KEYS }>);

impl Schedule {
    /// `None` where the processor lacks the instructions.
    pub(crate) fn new(key: &Secret<64>) -> Result<Option<Self>, CipherError> {
        if !is_possible() {
            return Ok(None);
        }
        let mut keys = Secret::zeroed()?;
        // SAFETY: the processor has the instructions; there are 64 bytes of keys, and room for three schedules.
        unsafe {
            let (key, to): (*const u8, *mut u8) = (key.bytes().as_ptr(), keys.bytes_mut().as_mut_ptr());
            expand(key, to);
            invert(to, to.add(KEYS));
            expand(key.add(32), to.add(2 * KEYS));
        }
        Ok(Some(Self(keys)))
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
        let keys = self.0.bytes().as_ptr();
        // SAFETY: the caller's promise; a schedule exists only where the instructions do.
        unsafe {
            if past {
                units::<true, true>(keys, keys.add(2 * KEYS), order, from, to, len, known);
            } else {
                units::<true, false>(keys, keys.add(2 * KEYS), order, from, to, len, known);
            }
        }
    }

    /// Deciphers them.
    ///
    /// # Safety
    /// As of [`Self::encrypt`].
    pub(crate) unsafe fn decrypt(&self, order: Order, from: *const u8, to: *mut u8, len: usize, known: &mut Known) {
        let keys = self.0.bytes().as_ptr();
        // SAFETY: as in `encrypt`.
        unsafe { units::<false, false>(keys.add(KEYS), keys.add(2 * KEYS), order, from, to, len, known) }
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

/// By how much a tweak is shifted to the left for x to the power of `power` and the three powers after it, and what leaves each of its
/// halves to the right. (A shift by 64 leaves nothing.)
#[inline]
#[target_feature(enable = "avx512f")]
fn shifts(power: i64) -> [__m512i; 2] {
    let [a, b, c, d] = [power, power + 1, power + 2, power + 3];
    let right = _mm512_set_epi64(64 - d, 64 - d, 64 - c, 64 - c, 64 - b, 64 - b, 64 - a, 64 - a);
    [_mm512_set_epi64(d, d, c, c, b, b, a, a), right]
}

/// A unit's tweak times x to the power of `power` and the three powers after it, and the sum of that with `more`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
fn powers(tweak: __m512i, power: i64, more: __m512i) -> __m512i {
    let [left, right] = shifts(power);
    // What leaves each half goes into the other: from the lower as it is, from the upper times x¹²⁸.
    let over = _mm512_srlv_epi64(tweak, right);
    let folded = _mm512_clmulepi64_epi128::<0x01>(over, _mm512_set1_epi64(POLYNOMIAL));
    let shifted = _mm512_sllv_epi64(tweak, left);
    _mm512_xor_si512(_mm512_ternarylogic_epi64::<SUM>(shifted, _mm512_bslli_epi128::<8>(over), folded), more)
}

/// Tweaks times x⁸, and the sum of that with `more`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
fn times_x8(tweaks: __m512i, more: __m512i) -> __m512i {
    let over = _mm512_bsrli_epi128::<15>(tweaks);
    let folded = _mm512_clmulepi64_epi128::<0x00>(over, _mm512_set1_epi64(POLYNOMIAL));
    _mm512_ternarylogic_epi64::<SUM>(_mm512_bslli_epi128::<1>(tweaks), folded, more)
}

/// What is the same for all groups: in registers, so nothing may point to it.
struct Means {
    rounds: [__m512i; ROUNDS - 1],
    /// The sum of the first round key with the last.
    outer: __m512i,
    /// What turns (t + last)·x⁸ into t·x⁸ + last.
    mend: __m512i,
}

/// What the first tweaks of a unit are made with, at places that `woven!` knows.
#[repr(C)]
struct UnitMeans {
    /// See [`shifts`]: of powers 0 and 4.
    shifts: [[__m512i; 2]; 2],
    polynomial: __m512i,
    /// The last round key.
    last: __m512i,
}

impl Means {
    /// # Safety
    /// `keys` has [`KEYS`] bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
    unsafe fn new(keys: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let key = |round: usize| unsafe { four_times(keys.add(round * 16)) };
        let mut rounds = [_mm512_setzero_si512(); ROUNDS - 1];
        for (at, round) in rounds.iter_mut().enumerate() {
            *round = key(at + 1);
        }
        let last = key(ROUNDS);
        Self { rounds, outer: _mm512_xor_si512(key(0), last), mend: times_x8(last, last) }
    }
}

impl UnitMeans {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(last: __m512i) -> Self {
        const { assert!(offset_of!(Self, polynomial) == 256 && offset_of!(Self, last) == 320) }
        Self { shifts: [shifts(0), shifts(4)], polynomial: _mm512_set1_epi64(POLYNOMIAL), last }
    }
}

/// All rounds but the last of four registers of data, `d0` to `d3`, with an instruction for the next group's tweaks, `n0` to `n3`, after every
/// two. The first thirteen of these make `n0` and `n1`; the others `n2` and `n3`, which are those times x⁸.
macro_rules! woven {
    ($aes:literal: $o0:literal $o1:literal $o2:literal $o3:literal $o4:literal $o5:literal $o6:literal $o7:literal $o8:literal $o9:literal
     $o10:literal $o11:literal $o12:literal) => {
        concat!(
            woven!($aes, "0", $o0, $o1),
            woven!($aes, "1", $o2, $o3),
            woven!($aes, "2", $o4, $o5),
            woven!($aes, "3", $o6, $o7),
            woven!($aes, "4", $o8, $o9),
            woven!($aes, "5", $o10, $o11),
            woven!($aes, "6", $o12, "vpunpckhqdq {f}, {n0}, {n1}"),
            woven!($aes, "7", "vpsrlq {f}, {f}, 56", "vpslldq {n2}, {n0}, 1"),
            woven!($aes, "8", "vpsllq {g}, {f}, 1", "vpsllq {h}, {f}, 2"),
            woven!($aes, "9", "vpslldq {n3}, {n1}, 1", "vpternlogq {h}, {f}, {g}, 0x96"),
            woven!($aes, "10", "vpsllq {f}, {f}, 7", "vpxorq {f}, {f}, {h}"),
            woven!($aes, "11", "vmovdqa64 {g}{{{low}}}{{z}}, {f}", "vpsrldq {f}, {f}, 8"),
            woven!($aes, "12", "vpternlogq {n2}, {g}, {mend}, 0x96", "vpternlogq {n3}, {f}, {mend}, 0x96"),
        )
    };
    ($aes:literal, $round:literal, $one:literal, $two:literal) => {
        concat!(
            $aes,
            " {d0}, {d0}, {k",
            $round,
            "}\n",
            $aes,
            " {d1}, {d1}, {k",
            $round,
            "}\n",
            $one,
            "\n",
            $aes,
            " {d2}, {d2}, {k",
            $round,
            "}\n",
            $aes,
            " {d3}, {d3}, {k",
            $round,
            "}\n",
            $two,
            "\n",
        )
    };
}

/// The unit goes on: from its last two registers of tweaks.
macro_rules! same_unit {
    ($aes:literal) => {
        woven!($aes:
            "vpunpckhqdq {f}, {t2}, {t3}" "vpsrlq {f}, {f}, 56" "vpslldq {n0}, {t2}, 1" "vpsllq {g}, {f}, 1" "vpsllq {h}, {f}, 2"
            "vpslldq {n1}, {t3}, 1" "vpternlogq {h}, {f}, {g}, 0x96" "vpsllq {f}, {f}, 7" "vpxorq {f}, {f}, {h}"
            "vmovdqa64 {g}{{{low}}}{{z}}, {f}" "vpsrldq {f}, {f}, 8" "vpternlogq {n0}, {g}, {mend}, 0x96"
            "vpternlogq {n1}, {f}, {mend}, 0x96"
        )
    };
}

/// The next unit begins: as [`powers`] of its tweak.
macro_rules! next_unit {
    ($aes:literal) => {
        woven!($aes:
            "vbroadcasti32x4 {h}, [{next}]" "vpsrlvq {f}, {h}, [{unit} + 64]" "vpsllvq {n0}, {h}, [{unit}]"
            "vpclmulqdq {g}, {f}, [{unit} + 256], 1" "vpslldq {f}, {f}, 8" "vpsllvq {n1}, {h}, [{unit} + 128]"
            "vpternlogq {n0}, {f}, {g}, 0x96" "vpsrlvq {f}, {h}, [{unit} + 192]" "vpxorq {n0}, {n0}, [{unit} + 320]"
            "vpclmulqdq {g}, {f}, [{unit} + 256], 1" "vpslldq {f}, {f}, 8" "vpternlogq {n1}, {f}, {g}, 0x96"
            "vpxorq {n1}, {n1}, [{unit} + 320]"
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
    unit: &UnitMeans,
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
    let ([mut d0, mut d1, mut d2, mut d3], [_, _, t2, t3]) = (data, tweaks);
    let (n0, n1, n2, n3): (__m512i, __m512i, __m512i, __m512i);
    macro_rules! run {
        ($template:expr, $($operands:tt)*) => {
            asm!(
                $template,
                d0 = inout(zmm_reg) d0, d1 = inout(zmm_reg) d1, d2 = inout(zmm_reg) d2, d3 = inout(zmm_reg) d3,
                n0 = out(zmm_reg) n0, n1 = out(zmm_reg) n1, n2 = out(zmm_reg) n2, n3 = out(zmm_reg) n3,
                f = out(zmm_reg) _, g = out(zmm_reg) _, h = out(zmm_reg) _,
                k0 = in(zmm_reg) means.rounds[0], k1 = in(zmm_reg) means.rounds[1], k2 = in(zmm_reg) means.rounds[2],
                k3 = in(zmm_reg) means.rounds[3], k4 = in(zmm_reg) means.rounds[4], k5 = in(zmm_reg) means.rounds[5],
                k6 = in(zmm_reg) means.rounds[6], k7 = in(zmm_reg) means.rounds[7], k8 = in(zmm_reg) means.rounds[8],
                k9 = in(zmm_reg) means.rounds[9], k10 = in(zmm_reg) means.rounds[10], k11 = in(zmm_reg) means.rounds[11],
                k12 = in(zmm_reg) means.rounds[12],
                mend = in(zmm_reg) means.mend, low = in(kreg) 0x55_u8,
                $($operands)*
            )
        };
    }
    // SAFETY: the instructions change registers that they say they change, and read from memory the next unit's tweak, which the caller
    // promises, and what units begin with, laid out as `UnitMeans` says: 64 bytes each, the polynomial after two pairs, the key after it.
    unsafe {
        match (next, ENCRYPT) {
            (None, true) => {
                run!(same_unit!("vaesenc"), t2 = in(zmm_reg) t2, t3 = in(zmm_reg) t3, options(pure, nomem, nostack, preserves_flags));
            }
            (None, false) => {
                run!(same_unit!("vaesdec"), t2 = in(zmm_reg) t2, t3 = in(zmm_reg) t3, options(pure, nomem, nostack, preserves_flags));
            }
            (Some(next), true) => {
                run!(next_unit!("vaesenc"), next = in(reg) next, unit = in(reg) &raw const *unit, options(pure, readonly, nostack, preserves_flags));
            }
            (Some(next), false) => {
                run!(next_unit!("vaesdec"), next = in(reg) next, unit = in(reg) &raw const *unit, options(pure, readonly, nostack, preserves_flags));
            }
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
/// As of [`Schedule::encrypt`], and both keys have [`KEYS`] bytes; the processor must have what [`Schedule::new`] asks for.
#[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
unsafe fn units<const ENCRYPT: bool, const PAST: bool>(
    data_keys: *const u8,
    tweak_keys: *const u8,
    Order { first, unit, next: then }: Order,
    from: *const u8,
    to: *mut u8,
    len: usize,
    known: &mut Known,
) {
    let (soon, soon_len) = take_soon(len);
    for at in (0..AHEAD.min(len)).step_by(GROUP) {
        prefetch::<_MM_HINT_T0>(from.wrapping_add(at));
    }
    // SAFETY: both have all rounds' keys; all places lie within `len`, which is whole units of whole groups.
    unsafe {
        let last = four_times(data_keys.add(ROUNDS * 16));
        let (means, unit_means) = (Means::new(data_keys), UnitMeans::new(last));
        // Of two times eight units, those of the present eight and of the next. Behind the last unit it does not matter what there is.
        let mut ready = [[last; TWEAKS / 4]; 2];
        let place = |ready: &[_; 2], number: usize| (&raw const *ready).cast::<u8>().add(number % (2 * TWEAKS) * 16);
        ready[0] = match known.0.take() {
            Some((number, tweaks)) if number == first => tweaks,
            _ => tweaks(tweak_keys, first),
        };
        let tweak = four_times(place(&ready, 0));
        let (one, two) = (powers(tweak, 0, last), powers(tweak, 4, last));
        let mut now = [one, two, times_x8(one, means.mend), times_x8(two, means.mend)];
        let (mut at, mut number) = (0, 0);
        while at < len {
            number += 1;
            let end = at + unit;
            if number % TWEAKS == 0 && end < len {
                ready[number / TWEAKS % 2] = tweaks(tweak_keys, first.wrapping_add(number as u64));
            }
            if let Some(then) = then.filter(|_| end == len) {
                known.0 = Some((then, tweaks(tweak_keys, then)));
            }
            while at < end {
                if at + AHEAD < len {
                    prefetch::<_MM_HINT_T0>(from.add(at + AHEAD));
                }
                if at < soon_len {
                    prefetch::<_MM_HINT_T1>(soon.wrapping_add(at));
                }
                let next = (at + GROUP == end).then(|| place(&ready, number));
                now = group::<ENCRYPT, PAST>(&means, &unit_means, now, next, from.add(at), to.add(at));
                at += GROUP;
            }
        }
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
