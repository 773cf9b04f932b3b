//! The C library's own memory comes from the arena too: its key schedules are as good as the keys.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr::{NonNull, null_mut},
    sync::Once,
};

use crate::arena;

unsafe extern "C" fn allocate(len: usize, _: *const c_char, _: c_int) -> *mut c_void {
    arena::allocate(len).map_or(null_mut(), |place| place.as_ptr().cast())
}

unsafe extern "C" fn reallocate(old: *mut c_void, len: usize, _: *const c_char, _: c_int) -> *mut c_void {
    let Some(old) = NonNull::new(old.cast::<u8>()) else {
        return arena::allocate(len).map_or(null_mut(), |place| place.as_ptr().cast());
    };
    let Ok(new) = arena::allocate(len) else { return null_mut() };
    // SAFETY: the library passes what `allocate` gave it; both pieces are at least so long, and they are different ones.
    unsafe {
        std::ptr::copy_nonoverlapping(old.as_ptr(), new.as_ptr(), arena::room(old).min(len));
        arena::free(old);
    }
    new.as_ptr().cast()
}

unsafe extern "C" fn free(old: *mut c_void, _: *const c_char, _: c_int) {
    if let Some(old) = NonNull::new(old.cast()) {
        // SAFETY: the library passes what `allocate` gave it, once.
        unsafe { arena::free(old) };
    }
}

/// Must come before any other call of the library's.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: nobody called the library before (nobody else in the process uses it), so that nothing it has allocated in
        // another way will come to `free`.
        let set = unsafe { aws_lc_sys::CRYPTO_set_mem_functions(Some(allocate), Some(reallocate), Some(free)) };
        assert_eq!(set, 1, "the cipher library takes its memory from us");
    });
}
