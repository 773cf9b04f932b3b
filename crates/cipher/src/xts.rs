//! AES-256-XTS (IEEE 1619, NIST SP 800-38E): each data unit is a block, its tweak the block's number as 16 bytes, little-endian.

use std::{cell::UnsafeCell, ffi::c_int, fmt, ptr::null_mut};

use aws_lc_sys::{EVP_CIPHER_CTX, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_Cipher, EVP_CipherInit_ex, EVP_aes_256_xts};
use millrace_block::PerShard;
use millrace_memory::Segment;

use crate::{error::CipherError, library, secret::Secret};

/// Which way data go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Encrypt = 1,
    Decrypt = 0,
}

/// A key's schedule for one direction, with the place of its tweak. Owned by one thread at a time.
struct Context(*mut EVP_CIPHER_CTX);

impl Context {
    fn new(key: &Secret<64>, direction: Direction) -> Result<Self, CipherError> {
        library::init();
        // SAFETY: the call allocates, or returns null.
        let context = Self(unsafe { EVP_CIPHER_CTX_new() });
        if context.0.is_null() {
            return Err(CipherError::Memory(std::io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        let tweak = [0; 16];
        let (key, way) = (key.bytes().as_ptr(), direction as c_int);
        // SAFETY: the context was just made; key and tweak have the 64 and 16 bytes that this cipher takes.
        let set = unsafe { EVP_CipherInit_ex(context.0, EVP_aes_256_xts(), null_mut(), key, tweak.as_ptr(), way) };
        if set == 1 { Ok(context) } else { Err(CipherError::WeakKey) }
    }

    /// One data unit.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for `len` bytes; they are the same place or do not overlap.
    unsafe fn unit(&mut self, number: u64, from: *const u8, to: *mut u8, len: usize) {
        let tweak = u128::from(number).to_le_bytes();
        // SAFETY: the context has its key; a null cipher and key keep them, and the tweak has 16 bytes.
        let set = unsafe { EVP_CipherInit_ex(self.0, std::ptr::null(), null_mut(), std::ptr::null(), tweak.as_ptr(), -1) };
        // SAFETY: the caller's promise.
        let done = unsafe { EVP_Cipher(self.0, to, from, len as _) };
        assert!(set == 1 && done >= 0, "the cipher library works on {len} bytes");
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is ours; the library wipes what it frees.
        unsafe { EVP_CIPHER_CTX_free(self.0) }
    }
}

/// One shard's contexts, made when they are first needed.
#[derive(Default)]
struct Place(UnsafeCell<[Option<Context>; 2]>);

// SAFETY: `Xts::with` hands the contexts to one thread at a time; they have no ties to the thread that made them.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

/// A volume's cipher.
pub struct Xts {
    key: Secret<64>,
    places: PerShard<Place>,
    /// Taken by threads that share a place.
    shared: std::sync::Mutex<()>,
}

impl fmt::Debug for Xts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Xts").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Xts {
    /// The cipher of this key: 32 bytes for the data, 32 for the tweak.
    ///
    /// # Errors
    /// [`CipherError::WeakKey`] when the halves are equal, [`CipherError::Memory`].
    pub fn new(key: Secret<64>) -> Result<Self, CipherError> {
        // What can fail fails here and not under a request.
        let (first, second) = (Context::new(&key, Direction::Encrypt)?, Context::new(&key, Direction::Decrypt)?);
        let xts = Self { key, places: PerShard::default(), shared: std::sync::Mutex::default() };
        xts.with(Direction::Encrypt, |context| *context = first);
        xts.with(Direction::Decrypt, |context| *context = second);
        Ok(xts)
    }

    /// The key.
    pub fn key(&self) -> &Secret<64> {
        &self.key
    }

    fn with<R>(&self, direction: Direction, work: impl FnOnce(&mut Context) -> R) -> R {
        let (place, own) = self.places.here();
        let _turn = (!own).then(|| self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        // SAFETY: the place is this shard's own, or the lock is held; `work` only ciphers, and does not come here again.
        let contexts = unsafe { &mut *place.0.get() };
        let context = &mut contexts[direction as usize];
        // Locked memory for one more context: a shard's first request to the volume.
        let make = || Context::new(&self.key, direction).expect("locked memory for a shard's cipher");
        work(context.get_or_insert_with(make))
    }

    fn units(&self, direction: Direction, first: u64, unit: usize, from: Segment, to: Segment) {
        assert_eq!(from.len(), to.len(), "a cipher keeps lengths");
        assert!(unit >= 16 && from.len().is_multiple_of(unit), "whole data units");
        let (from, to, len) = (from.as_ptr().cast_const(), to.as_ptr(), from.len());
        self.with(direction, |context| {
            for (number, at) in (first..).zip((0..len).step_by(unit)) {
                // SAFETY: both segments are mapped memory of `len` bytes and `at + unit <= len`. They are the same place, or
                // one is a buffer of ours. A guest that writes to its own at the same time spoils its own data only: no byte
                // decides anything.
                unsafe { context.unit(number, from.add(at), to.add(at), unit) };
            }
        });
    }

    /// Enciphers data units of `unit` bytes, numbered from `first` on. `to` is `from`, or another place.
    ///
    /// # Panics
    /// When the lengths differ or are not whole units.
    pub fn encrypt(&self, first: u64, unit: usize, from: Segment, to: Segment) {
        self.units(Direction::Encrypt, first, unit, from, to);
    }

    /// Deciphers data units in memory of the caller's own, and enciphers them with another key.
    ///
    /// # Panics
    /// When the length is not whole units.
    pub fn change_key(&self, to: &Self, first: u64, unit: usize, data: &mut [u8]) {
        assert!(unit >= 16 && data.len().is_multiple_of(unit), "whole data units");
        for (number, block) in (first..).zip(data.chunks_mut(unit)) {
            let place = block.as_mut_ptr();
            // SAFETY: the block is ours alone, and ciphered in its place.
            self.with(Direction::Decrypt, |context| unsafe { context.unit(number, place, place, unit) });
            // SAFETY: as above.
            to.with(Direction::Encrypt, |context| unsafe { context.unit(number, place, place, unit) });
        }
    }

    /// Deciphers data units; otherwise as [`Self::encrypt`].
    ///
    /// # Panics
    /// When the lengths differ or are not whole units.
    pub fn decrypt(&self, first: u64, unit: usize, from: Segment, to: Segment) {
        self.units(Direction::Decrypt, first, unit, from, to);
    }
}
