//! Encryption that notices every change: AES-256-GCM, and AES-256-GCM-SIV for keys and for the authenticated mode's blocks and
//! pages.

use std::{fmt, ptr::null};

use aws_lc_sys::{
    EVP_AEAD, EVP_AEAD_CTX, EVP_AEAD_CTX_free, EVP_AEAD_CTX_new, EVP_AEAD_CTX_open_gather, EVP_AEAD_CTX_seal_scatter,
    EVP_aead_aes_256_gcm, EVP_aead_aes_256_gcm_siv,
};
use millrace_memory::Segment;

use crate::{
    error::CipherError,
    library,
    secret::{Secret, random},
};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 12;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;

/// A key's schedule. It does not change after it was made, so any number of threads use it.
struct Context(*mut EVP_AEAD_CTX);

// SAFETY: the library allows concurrent use of a context: sealing and opening only read it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn new(key: &[u8; 32], algorithm: *const EVP_AEAD) -> Result<Self, CipherError> {
        library::init();
        // SAFETY: the key has the 32 bytes that both algorithms take.
        let context = unsafe { EVP_AEAD_CTX_new(algorithm, key.as_ptr(), 32, TAG_BYTES) };
        if context.is_null() {
            return Err(CipherError::Memory(std::io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        Ok(Self(context))
    }

    /// # Safety
    /// `from` is readable and `to` writable for `len` bytes; they are the same place or do not overlap.
    unsafe fn seal(
        &self,
        nonce: &[u8; NONCE_BYTES],
        extra: &[u8],
        from: *const u8,
        to: *mut u8,
        len: usize,
    ) -> [u8; TAG_BYTES] {
        let (mut tag, mut tag_len) = ([0; TAG_BYTES], 0);
        // SAFETY: the caller's promise, and the lengths of our own arrays.
        let done = unsafe {
            EVP_AEAD_CTX_seal_scatter(
                self.0,
                to,
                tag.as_mut_ptr(),
                &raw mut tag_len,
                TAG_BYTES,
                nonce.as_ptr(),
                NONCE_BYTES,
                from,
                len,
                null(),
                0,
                extra.as_ptr(),
                extra.len(),
            )
        };
        assert!(done == 1 && tag_len == TAG_BYTES, "the cipher library seals {len} bytes");
        tag
    }

    /// # Safety
    /// As for `seal`.
    unsafe fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        extra: &[u8],
        tag: &[u8; TAG_BYTES],
        from: *const u8,
        to: *mut u8,
        len: usize,
    ) -> Result<(), CipherError> {
        // SAFETY: the caller's promise, and the lengths of our own arrays.
        let done = unsafe {
            EVP_AEAD_CTX_open_gather(
                self.0,
                to,
                nonce.as_ptr(),
                NONCE_BYTES,
                from,
                len,
                tag.as_ptr(),
                TAG_BYTES,
                extra.as_ptr(),
                extra.len(),
            )
        };
        if done == 1 {
            return Ok(());
        }
        // SAFETY: the call touches the calling thread's list of errors only.
        unsafe { aws_lc_sys::ERR_clear_error() };
        Err(CipherError::Authentication)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is ours; the library wipes what it frees.
        unsafe { EVP_AEAD_CTX_free(self.0) }
    }
}

/// A volume's authenticated cipher: AES-256-GCM.
pub struct Aead(Context);

impl fmt::Debug for Aead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Aead(AES-256-GCM)")
    }
}

impl Aead {
    /// The cipher of this key.
    ///
    /// # Errors
    /// [`CipherError::Memory`].
    pub fn new(key: &Secret<32>) -> Result<Self, CipherError> {
        library::init();
        // SAFETY: the call returns a constant.
        Context::new(key.bytes(), unsafe { EVP_aead_aes_256_gcm() }).map(Self)
    }

    /// Enciphers `from` to `to` (the same place, or another) and returns the tag. A nonce must never be used twice.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], extra: &[u8], from: Segment, to: Segment) -> [u8; TAG_BYTES] {
        assert_eq!(from.len(), to.len(), "a cipher keeps lengths");
        // SAFETY: both are mapped memory of this length, the same place or one of them a buffer of ours.
        unsafe { self.0.seal(nonce, extra, from.as_ptr(), to.as_ptr(), from.len()) }
    }

    /// Deciphers `from`, which must be memory that nobody else writes to, to `to`, if it is what was sealed. Otherwise `to` holds
    /// nothing of use.
    ///
    /// # Errors
    /// [`CipherError::Authentication`].
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        extra: &[u8],
        tag: &[u8; TAG_BYTES],
        from: Segment,
        to: Segment,
    ) -> Result<(), CipherError> {
        assert_eq!(from.len(), to.len(), "a cipher keeps lengths");
        // SAFETY: as in `seal`.
        unsafe { self.0.open(nonce, extra, tag, from.as_ptr(), to.as_ptr(), from.len()) }
    }
}

/// The cipher of a volume whose every block is checked: AES-256-GCM-SIV (RFC 8452), which bears it that a nonce comes twice with
/// other data. A second key makes codes of pages that are not secret.
pub struct Sealer {
    data: Context,
    codes: Context,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(AES-256-GCM-SIV)")
    }
}

impl Sealer {
    /// The cipher of this key: 32 bytes for data, 32 for codes.
    ///
    /// # Errors
    /// [`CipherError::Memory`].
    pub fn new(key: &Secret<64>) -> Result<Self, CipherError> {
        library::init();
        // SAFETY: the call returns a constant.
        let algorithm = unsafe { EVP_aead_aes_256_gcm_siv() };
        let (Some(data), Some(codes)) = (key.bytes().first_chunk(), key.bytes().last_chunk()) else {
            return Err(CipherError::Library("split a key"));
        };
        Ok(Self { data: Context::new(data, algorithm)?, codes: Context::new(codes, algorithm)? })
    }

    /// Enciphers `data`, memory that nobody else writes to, where it is, and returns the tag.
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], extra: &[u8], data: Segment) -> [u8; TAG_BYTES] {
        // SAFETY: it is mapped memory of this length, and a place is the same as itself.
        unsafe { self.data.seal(nonce, extra, data.as_ptr(), data.as_ptr(), data.len()) }
    }

    /// Deciphers `data`, memory that nobody else writes to, where it is, if it is what was sealed; otherwise it holds nothing of use
    /// afterwards.
    ///
    /// # Errors
    /// [`CipherError::Authentication`].
    pub fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        extra: &[u8],
        tag: &[u8; TAG_BYTES],
        data: Segment,
    ) -> Result<(), CipherError> {
        // SAFETY: as in `seal`.
        unsafe { self.data.open(nonce, extra, tag, data.as_ptr(), data.as_ptr(), data.len()) }
    }

    /// The code of a text: nobody without the key makes another text that has it.
    pub fn code(&self, nonce: &[u8; NONCE_BYTES], text: &[u8]) -> [u8; TAG_BYTES] {
        let mut nothing = [0; 1];
        let place = nothing.as_mut_ptr();
        // SAFETY: no byte of the place is used.
        unsafe { self.codes.seal(nonce, text, place, place, 0) }
    }

    /// Whether a text has this code.
    pub fn is_code(&self, nonce: &[u8; NONCE_BYTES], text: &[u8], code: &[u8; TAG_BYTES]) -> bool {
        let mut nothing = [0; 1];
        let place = nothing.as_mut_ptr();
        // SAFETY: no byte of the place is used.
        unsafe { self.codes.open(nonce, text, code, place, place, 0) }.is_ok()
    }
}

/// Seals a secret under a key-encryption key: nonce, enciphered secret, tag. `extra` must be the same when it is opened.
///
/// # Errors
/// [`CipherError::Memory`] or [`CipherError::Random`].
pub fn seal<const N: usize>(key: &Secret<32>, extra: &[u8], secret: &Secret<N>) -> Result<Vec<u8>, CipherError> {
    library::init();
    // SAFETY: the call returns a constant.
    let context = Context::new(key.bytes(), unsafe { EVP_aead_aes_256_gcm_siv() })?;
    let nonce = random()?;
    let mut sealed = vec![0; NONCE_BYTES + N + TAG_BYTES];
    sealed[..NONCE_BYTES].copy_from_slice(&nonce);
    let to = sealed[NONCE_BYTES..].as_mut_ptr();
    // SAFETY: both places have N bytes, and are different.
    let tag = unsafe { context.seal(&nonce, extra, secret.bytes().as_ptr(), to, N) };
    sealed[NONCE_BYTES + N..].copy_from_slice(&tag);
    Ok(sealed)
}

/// Opens what [`seal`] made.
///
/// # Errors
/// [`CipherError::Authentication`] when the key, `extra` or a bit of `sealed` is another.
pub fn open<const N: usize>(key: &Secret<32>, extra: &[u8], sealed: &[u8]) -> Result<Secret<N>, CipherError> {
    library::init();
    // SAFETY: the call returns a constant.
    let context = Context::new(key.bytes(), unsafe { EVP_aead_aes_256_gcm_siv() })?;
    let (Some((nonce, rest)), true) = (sealed.split_first_chunk(), sealed.len() == NONCE_BYTES + N + TAG_BYTES) else {
        return Err(CipherError::Authentication);
    };
    let (body, tag) = rest.split_last_chunk().ok_or(CipherError::Authentication)?;
    let mut secret = Secret::zeroed()?;
    // SAFETY: both places have N bytes (the length was checked), and are different.
    unsafe { context.open(nonce, extra, tag, body.as_ptr(), secret.bytes_mut().as_mut_ptr(), N) }?;
    Ok(secret)
}
