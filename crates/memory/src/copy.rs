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
    // What was copied is what is used: without this the compiler could read `from` again where it needs a part of the copy.
    // SAFETY: no instruction at all; the compiler has to assume that it changes memory.
    unsafe { std::arch::asm!("/* {0} {1} */", in(reg) from, in(reg) to, options(nostack, preserves_flags)) }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Brings the lines of `len` bytes at `at` near. It is a hint: the address may be any.
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
