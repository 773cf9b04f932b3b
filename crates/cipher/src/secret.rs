//! Bytes that nobody else may see.

use std::{fmt, ptr::NonNull};

use crate::{arena, error::CipherError};

/// `N` bytes of a key, in locked memory; zeroed when dropped.
pub struct Secret<const N: usize>(NonNull<u8>);

// SAFETY: the secret owns its bytes alone, like a box.
unsafe impl<const N: usize> Send for Secret<N> {}
// SAFETY: shared access only reads.
unsafe impl<const N: usize> Sync for Secret<N> {}

impl<const N: usize> Secret<N> {
    /// `N` zero bytes, to be filled.
    pub(crate) fn zeroed() -> Result<Self, CipherError> {
        arena::allocate(N).map(Self)
    }

    /// Random bytes.
    ///
    /// # Errors
    /// [`CipherError::Memory`] or [`CipherError::Random`].
    pub fn generate() -> Result<Self, CipherError> {
        let mut secret = Self::zeroed()?;
        fill(secret.bytes_mut())?;
        Ok(secret)
    }

    /// A copy of these bytes, which are the caller's to wipe.
    ///
    /// # Errors
    /// [`CipherError::Memory`].
    pub fn copy_of(bytes: &[u8; N]) -> Result<Self, CipherError> {
        let mut secret = Self::zeroed()?;
        secret.bytes_mut().copy_from_slice(bytes);
        Ok(secret)
    }

    /// Another copy.
    ///
    /// # Errors
    /// [`CipherError::Memory`].
    pub fn again(&self) -> Result<Self, CipherError> {
        Self::copy_of(self.bytes())
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8; N] {
        // SAFETY: the piece has N bytes (N was asked for), initialised, and is ours until we are dropped.
        unsafe { self.0.cast::<[u8; N]>().as_ref() }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; N] {
        // SAFETY: as in `bytes`, and the borrow is exclusive.
        unsafe { self.0.cast::<[u8; N]>().as_mut() }
    }
}

impl<const N: usize> Drop for Secret<N> {
    fn drop(&mut self) {
        // SAFETY: the piece is ours, and nobody has it after us.
        unsafe { arena::free(self.0) }
    }
}

impl<const N: usize> fmt::Debug for Secret<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({N} bytes)")
    }
}

fn fill(mut bytes: &mut [u8]) -> Result<(), CipherError> {
    while !bytes.is_empty() {
        // SAFETY: the system writes at most so many bytes to memory that is ours.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => bytes = &mut bytes[got..],
            Err(_) => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error => return Err(CipherError::Random(error)),
            },
        }
    }
    Ok(())
}

/// Random bytes that are no secret: identifiers, nonces.
///
/// # Errors
/// [`CipherError::Random`].
pub fn random<const N: usize>() -> Result<[u8; N], CipherError> {
    let mut bytes = [0; N];
    fill(&mut bytes)?;
    Ok(bytes)
}
