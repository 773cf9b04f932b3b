//! Copies between memory of ours and memory that somebody else may be changing.

/// Copies `len` bytes between memory of which one side may be changing under us.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes, and they must not overlap.
#[inline]
pub(crate) unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= 512 {
        // The copy is one instruction outside Rust's memory model, so a guest's concurrent store is only ever torn data.
        // SAFETY: the caller vouches for both ranges; the direction flag is clear by the ABI.
        unsafe {
            std::arch::asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    // SAFETY: the caller vouches for both ranges and that they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    use_the_copy(from, to);
}

/// What was copied is what is used: without this the compiler could read `from` again where it needs a part of the copy.
#[inline]
pub(crate) fn use_the_copy(from: *const u8, to: *mut u8) {
    // SAFETY: no instruction at all; the compiler has to assume that it changes memory.
    unsafe { std::arch::asm!("/* {0} {1} */", in(reg) from, in(reg) to, options(nostack, preserves_flags)) }
}

/// What is known of a copy's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Its lines are probably in a cache, or will be used soon.
    Near,
    /// Its lines are probably in no cache: they are written past the caches, which saves reading them first.
    Far,
    /// Memory of a guest's: far if so much else was copied since it was the target last.
    Guest,
    /// As `Guest`, and what is copied comes from no first-level cache: from memory, or from where a prefetch brought it.
    GuestFromFar,
}

/// Copies longer than this are left to the processor's own string move.
const BULK: usize = 16 << 10;

/// Copies as [`copy_bytes`], in the way that suits the target.
///
/// # Safety
/// As for [`copy_bytes`].
#[inline]
pub(crate) unsafe fn copy_towards(from: *const u8, to: *mut u8, len: usize, target: Target) {
    #[cfg(target_arch = "x86_64")]
    if len >= 512 && (to as usize).is_multiple_of(LINE) {
        let past_caches = match target {
            Target::Near => false,
            Target::Far => true,
            Target::Guest | Target::GuestFromFar => len > BULK && recent::is_far(to as usize, len),
        };
        // The processor's own string move asks for more lines at a time; vectors are faster where the lines are near.
        let by_vector = len <= BULK && target != Target::GuestFromFar;
        let has_avx512 = std::arch::is_x86_feature_detected!("avx512f");
        // SAFETY: the features are there, the target is aligned to lines, and the caller vouches for the ranges.
        unsafe {
            match (past_caches, has_avx512) {
                (true, true) => return stream_avx512(from, to, len),
                (true, false) => return stream_sse2(from, to, len),
                (false, true) if by_vector => return copy_avx512(from, to, len),
                (false, _) => {}
            }
        }
    }
    let _ = target;
    // SAFETY: the caller's promise is passed on.
    unsafe { copy_bytes(from, to, len) }
}

/// Streaming stores, which are not ordered with others: whoever learns by a later ordinary store of ours (a completion's phase, a counter)
/// that data are there might not find them. The fence that closes the race comes after every copy, or once for many ([`Unsettled`]).
/// The other side needs none: its loads come after the one that told it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod streams {
    use std::cell::Cell;

    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) enum State {
        /// Each copy is settled.
        EachAlone,
        /// [`super::Unsettled`] is there, and nothing waits to be settled, or something does.
        Together,
        Pending,
    }

    thread_local! {
        pub(super) static STATE: Cell<State> = const { Cell::new(State::EachAlone) };
    }

    /// Some were made, here or by somebody else who writes past the caches: they are settled at once, or with others by
    /// [`Unsettled`](super::Unsettled).
    #[inline]
    pub fn made() {
        if STATE.get() == State::EachAlone { fence() } else { STATE.set(State::Pending) }
    }

    #[inline]
    pub(super) fn fence() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

pub use streams::made as streams_made;

/// From here on everybody finds what this thread copied past the caches before: for who is about to tell others so by an ordinary store,
/// and cannot wait for whoever has [`Unsettled`].
#[inline]
pub fn settle_streams() {
    streams::fence();
}

/// While it is there, copies past the caches on this thread are settled together, by [`Self::settle`] or at its end: waiting for each
/// costs as much as the copy. Whoever has one settles before anybody is told that data are there by an ordinary store; an operation with
/// the lock prefix (a mutex, `fetch_and`) settles by itself.
#[derive(Debug)]
pub struct Unsettled(std::marker::PhantomData<*const ()>);

impl Unsettled {
    /// Begins.
    ///
    /// # Panics
    /// When there is one on this thread.
    #[expect(clippy::new_without_default, reason = "it does something")]
    #[inline]
    pub fn new() -> Self {
        assert!(streams::STATE.get() == streams::State::EachAlone, "one at a time");
        streams::STATE.set(streams::State::Together);
        Self(std::marker::PhantomData)
    }

    /// Whether something waits to be settled.
    #[inline]
    pub fn is_pending(&self) -> bool {
        streams::STATE.get() == streams::State::Pending
    }

    /// From here on everybody finds what was copied before.
    #[inline]
    pub fn settle(&self) {
        if self.is_pending() {
            streams::fence();
            streams::STATE.set(streams::State::Together);
        }
    }
}

impl Drop for Unsettled {
    #[inline]
    fn drop(&mut self) {
        self.settle();
        streams::STATE.set(streams::State::EachAlone);
    }
}

/// How long ago a piece of guest memory was a target, measured in bytes copied since.
#[cfg(target_arch = "x86_64")]
mod recent {
    use std::cell::Cell;

    /// Power of two of a piece's bytes.
    const PIECE: u32 = 17;
    const PIECES: usize = 1024;
    /// After so many bytes a piece has left the caches.
    const FAR: u64 = 12 << 20;

    thread_local! {
        /// Bytes copied in bulk, and what they were when each piece was the target.
        static COPIED: Cell<u64> = const { Cell::new(0) };
        static SEEN: [Cell<u64>; PIECES] = const { [const { Cell::new(0) }; PIECES] };
    }

    pub(super) fn is_far(target: usize, len: usize) -> bool {
        let now = COPIED.get() + len as u64;
        COPIED.set(now);
        SEEN.with(|seen| {
            let last = seen[(target >> PIECE) % PIECES].replace(now);
            last != 0 && now - last > FAR
        })
    }
}

/// # Safety
/// As for [`copy_bytes`], and the processor must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_avx512(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_storeu_si512};
    let whole = len & !(4 * LINE - 1);
    for at in (0..whole).step_by(4 * LINE) {
        // SAFETY: `at` and the three lines after it lie within both ranges.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            let lines = [0, 1, 2, 3].map(|line| _mm512_loadu_si512(from.add(line * LINE).cast()));
            (0..4).for_each(|line| _mm512_storeu_si512(to.add(line * LINE).cast(), lines[line]));
        }
    }
    // SAFETY: what is left lies within both ranges.
    unsafe { copy_bytes(from.add(whole), to.add(whole), len - whole) }
}

/// Writes past the caches.
///
/// # Safety
/// As for [`copy_bytes`], the processor must have AVX-512, and `to` must be aligned to a line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let whole = len & !(4 * LINE - 1);
    for at in (0..whole).step_by(4 * LINE) {
        prefetch(from.wrapping_add(at + AHEAD), 4 * LINE);
        // SAFETY: `at` and the three lines after it lie within both ranges; the target is aligned.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            let lines = [0, 1, 2, 3].map(|line| _mm512_loadu_si512(from.add(line * LINE).cast()));
            (0..4).for_each(|line| _mm512_stream_si512(to.add(line * LINE).cast(), lines[line]));
        }
    }
    streams::made();
    // SAFETY: what is left lies within both ranges.
    unsafe { copy_bytes(from.add(whole), to.add(whole), len - whole) }
}

/// As `stream_avx512`, for every x86-64.
///
/// # Safety
/// As for [`copy_bytes`], and `to` must be aligned to a line.
#[cfg(target_arch = "x86_64")]
unsafe fn stream_sse2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let whole = len & !(LINE - 1);
    for at in (0..whole).step_by(LINE) {
        prefetch(from.wrapping_add(at + AHEAD), LINE);
        // SAFETY: the line lies within both ranges; the target is aligned.
        unsafe {
            let (from, to): (*const __m128i, *mut __m128i) = (from.add(at).cast(), to.add(at).cast());
            let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
            (0..4).for_each(|part| _mm_stream_si128(to.add(part), parts[part]));
        }
    }
    streams::made();
    // SAFETY: what is left lies within both ranges.
    unsafe { copy_bytes(from.add(whole), to.add(whole), len - whole) }
}

/// Bytes that a streaming copy fetches ahead.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2048;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Brings the lines of `len` bytes at `at` as near as can be: few, and needed at once. It is a hint: the address may be any.
#[inline]
pub(crate) fn prefetch(at: *const u8, len: usize) {
    for line in (0..len).step_by(LINE) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect but on the cache, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.wrapping_add(line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at.wrapping_add(line);
    }
}

/// Brings the line at `at` near as one that will be written: whoever else has it gives it up once. It is a hint: the address may be any.
#[inline]
pub fn prefetch_to_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no effect but on the cache, whatever the address; processors that do not know it do nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Brings a block's lines into the second-level cache. The first level can wait for a dozen lines or two at a time: a block's would hold
/// up everything behind them, and drive out what is in use. It is a hint: the address may be any.
#[inline]
pub(crate) fn prefetch_block(at: *const u8, len: usize) {
    for line in (0..len).step_by(LINE) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.wrapping_add(line).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at.wrapping_add(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn copies_past_the_caches_wait_for_whoever_settles_them() {
        use streams::{STATE, State};
        let mapping = Mapping::anonymous(16384).unwrap();
        // SAFETY: the mapping outlives both.
        let (from, to) = unsafe { (mapping.segment(0, 4096).unwrap(), mapping.segment(8192, 4096).unwrap()) };
        from.write_at(0, &[7; 4096]);
        from.copy_to(&to, Target::Far);
        assert!(STATE.get() == State::EachAlone);
        let unsettled = Unsettled::new();
        from.copy_to(&to, Target::Near);
        assert!(STATE.get() == State::Together, "nothing to settle");
        from.copy_to(&to, Target::Far);
        assert!(STATE.get() == State::Pending);
        unsettled.settle();
        assert!(STATE.get() == State::Together);
        assert!(std::panic::catch_unwind(Unsettled::new).is_err(), "two on one thread");
        from.copy_to(&to, Target::Far);
        drop(unsettled);
        assert!(STATE.get() == State::EachAlone);
        let mut bytes = [0; 4096];
        to.read_at(0, &mut bytes);
        assert_eq!(bytes, [7; 4096]);
    }
}
