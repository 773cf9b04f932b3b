//! AES-256-XTS (IEEE 1619, NIST SP 800-38E): each data unit is a block, its tweak the block's number as 16 bytes, little-endian.

use std::{
    cell::UnsafeCell,
    ffi::c_int,
    fmt, io,
    ptr::null_mut,
    sync::{Mutex, PoisonError},
};

use aws_lc_sys::{EVP_CIPHER_CTX, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_Cipher, EVP_CipherInit_ex, EVP_aes_256_xts};
use millrace_block::PerShard;
use millrace_memory::{Lent, Reach, Target, streams_made};

use crate::{error::CipherError, library, secret::Secret};

/// Which way data go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Encrypt = 1,
    Decrypt = 0,
}

/// A key's schedule for one direction, with the place of its tweak. Owned by one thread at a time.
struct Context(*mut EVP_CIPHER_CTX);

// SAFETY: it has no ties to the thread that made it.
unsafe impl Send for Context {}

impl Context {
    /// The key's halves differ.
    fn new(key: &Secret<64>, direction: Direction) -> Result<Self, CipherError> {
        library::init();
        let no_memory = || CipherError::Memory(io::Error::from_raw_os_error(libc::ENOMEM));
        // SAFETY: the call allocates, or returns null.
        let context = Self(unsafe { EVP_CIPHER_CTX_new() });
        if context.0.is_null() {
            return Err(no_memory());
        }
        let tweak = [0; 16];
        let (key, way) = (key.bytes().as_ptr(), direction as c_int);
        // SAFETY: the context was just made; key and tweak have the 64 and 16 bytes that this cipher takes.
        let set = unsafe { EVP_CipherInit_ex(context.0, EVP_aes_256_xts(), null_mut(), key, tweak.as_ptr(), way) };
        // Of such a key the library refuses the memory alone, which it allocates for the schedule.
        if set == 1 { Ok(context) } else { Err(no_memory()) }
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

/// A shard that had no memory for a context of its own tries again after so many requests.
const TRY_AGAIN: u32 = 1000;

/// One shard's contexts, made when they are first needed.
#[derive(Default)]
struct Own {
    contexts: [Option<Context>; 2],
    /// Requests until memory is asked for again.
    patience: u32,
}

impl Own {
    fn context(&mut self, key: &Secret<64>, direction: Direction) -> Option<&mut Context> {
        let context = &mut self.contexts[direction as usize];
        match (context.is_some(), self.patience) {
            (true, _) => {}
            (false, 0) => {
                *context = Context::new(key, direction).ok();
                self.patience = if context.is_some() { 0 } else { TRY_AGAIN };
            }
            (false, left) => self.patience = left - 1,
        }
        context.as_mut()
    }
}

/// A shard's place.
#[derive(Default)]
struct Place(UnsafeCell<Own>);

// SAFETY: `Library::with` hands what is in it to the one thread whose place it is.
unsafe impl Sync for Place {}

/// The C library's implementation, for processors without the instructions of ours.
struct Library {
    places: PerShard<Place>,
    /// For threads without a place of their own, and for shards without the memory: what can fail fails when it is made and not under a
    /// request.
    common: Mutex<[Context; 2]>,
}

impl Library {
    fn new(key: &Secret<64>) -> Result<Self, CipherError> {
        // In the order of their numbers.
        let common = [Context::new(key, Direction::Decrypt)?, Context::new(key, Direction::Encrypt)?];
        Ok(Self { places: PerShard::default(), common: Mutex::new(common) })
    }

    fn with<R>(&self, key: &Secret<64>, direction: Direction, work: impl FnOnce(&mut Context) -> R) -> R {
        let (place, is_own) = self.places.here();
        if is_own {
            // SAFETY: the place is this shard's own; `work` only ciphers, and does not come here again.
            let own = unsafe { &mut *place.0.get() };
            if let Some(context) = own.context(key, direction) {
                return work(context);
            }
        }
        let mut common = self.common.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut common[direction as usize])
    }
}

enum Engine {
    #[cfg(target_arch = "x86_64")]
    Vaes(crate::vaes::Schedule),
    Library(Library),
}

impl Engine {
    fn new(key: &Secret<64>) -> Result<Self, CipherError> {
        #[cfg(target_arch = "x86_64")]
        if let Some(width) = crate::vaes::Width::best() {
            return crate::vaes::Schedule::new(key, width).map(Self::Vaes);
        }
        Library::new(key).map(Self::Library)
    }
}

/// Which data units, and what comes after them.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    /// The first one's number.
    pub(crate) first: u64,
    /// Bytes of each.
    pub(crate) unit: usize,
    /// The number of the first one that will be worked on after these, where that is known.
    pub(crate) next: Option<u64>,
}

#[cfg(target_arch = "x86_64")]
use crate::vaes::Known;
/// What the next units need and is known already: nothing.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Default)]
struct Known;

/// Several pieces of data with one cipher, one after the other: who tells what comes next has it begun meanwhile.
pub struct Run<'a> {
    xts: &'a Xts,
    known: Known,
}

/// A volume's cipher.
pub struct Xts {
    key: Secret<64>,
    engine: Engine,
}

impl fmt::Debug for Xts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Xts").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Units are made of so many bytes.
const GRAIN: usize = 512;

impl Xts {
    /// The cipher of this key: 32 bytes for the data, 32 for the tweak.
    ///
    /// # Errors
    /// [`CipherError::WeakKey`] when the halves are equal, [`CipherError::Memory`].
    pub fn new(key: Secret<64>) -> Result<Self, CipherError> {
        let (data, tweak) = key.bytes().split_at(32);
        if data.iter().zip(tweak).fold(0, |sum, (one, other)| sum | one ^ other) == 0 {
            return Err(CipherError::WeakKey);
        }
        Ok(Self { engine: Engine::new(&key)?, key })
    }

    /// Every cipher of this key that the processor has: the library's, which is the first, and with registers of each width.
    #[cfg(test)]
    pub(crate) fn all(key: &Secret<64>) -> Result<Vec<Self>, CipherError> {
        let mut engines = vec![Engine::Library(Library::new(key)?)];
        #[cfg(target_arch = "x86_64")]
        for width in crate::vaes::Width::ALL.into_iter().filter(|width| width.is_possible()) {
            engines.push(Engine::Vaes(crate::vaes::Schedule::new(key, width)?));
        }
        engines.into_iter().map(|engine| Ok(Self { engine, key: key.again()? })).collect()
    }

    /// The key.
    pub fn key(&self) -> &Secret<64> {
        &self.key
    }

    /// # Safety
    /// `from` must be readable and `to` writable for `len` bytes, which are whole units; they are the same place or do not overlap.
    unsafe fn units(
        &self,
        direction: Direction,
        order: Order,
        (from, to): (*const u8, *mut u8),
        len: usize,
        past: bool,
        known: &mut Known,
    ) {
        match &self.engine {
            // SAFETY: the caller's promise; units are whole groups, and what goes past the caches is aligned to lines.
            #[cfg(target_arch = "x86_64")]
            Engine::Vaes(schedule) => unsafe {
                match direction {
                    Direction::Encrypt => schedule.encrypt(order, from, to, len, past, known),
                    Direction::Decrypt => schedule.decrypt(order, from, to, len, known),
                }
                if past {
                    streams_made();
                }
            },
            Engine::Library(library) => library.with(&self.key, direction, |context| {
                for (number, at) in (order.first..).zip((0..len).step_by(order.unit)) {
                    // SAFETY: the caller's promise, and `at + unit <= len`.
                    unsafe { context.unit(number, from.add(at), to.add(at), order.unit) };
                }
            }),
        }
    }

    fn segments(&self, direction: Direction, order: Order, from: Lent<'_>, to: Reach<'_>, known: &mut Known) {
        assert_eq!(from.len(), to.segment.len(), "a cipher keeps lengths");
        assert!(is_whole(order.unit, from.len()), "whole data units");
        let places = (from.as_ptr().cast_const(), to.segment.as_ptr());
        let past = to.target == Target::Far && places.1.addr().is_multiple_of(64);
        // SAFETY: both are mapped memory of this length, whose owners are borrowed. They are the same place, or one of them is no guest's. A
        // guest that writes to its own at the same time spoils its own data only: no byte decides anything.
        unsafe { self.units(direction, order, places, from.len(), past, known) };
    }

    /// Enciphers data units of `unit` bytes, numbered from `first` on. `to` is `from`, or another place; far places are written past the
    /// caches.
    ///
    /// # Panics
    /// When the lengths differ or are not whole units, or units are not multiples of 512 bytes.
    pub fn encrypt(&self, first: u64, unit: usize, from: Lent<'_>, to: Reach<'_>) {
        self.run().encrypt(first, unit, from, to, None);
    }

    /// Several pieces of data, one after the other.
    pub fn run(&self) -> Run<'_> {
        Run { xts: self, known: Known::default() }
    }

    /// Deciphers data units; otherwise as [`Self::encrypt`]. Who deciphers is about to use them: they are written as near ones.
    ///
    /// # Panics
    /// As [`Self::encrypt`].
    pub fn decrypt(&self, first: u64, unit: usize, from: Lent<'_>, to: Lent<'_>) {
        self.run().decrypt(first, unit, from, to, None);
    }

    /// Deciphers data units in memory of the caller's own, and enciphers them with another key.
    ///
    /// # Panics
    /// As [`Self::encrypt`].
    pub fn change_key(&self, to: &Self, first: u64, unit: usize, data: &mut [u8]) {
        assert!(is_whole(unit, data.len()), "whole data units");
        let (place, len) = (data.as_mut_ptr(), data.len());
        // SAFETY: the data are ours alone, and ciphered in their place.
        unsafe {
            let (order, known) = (Order { first, unit, next: None }, Known::default);
            self.units(Direction::Decrypt, order, (place, place), len, false, &mut known());
            to.units(Direction::Encrypt, order, (place, place), len, false, &mut known());
        }
    }
}

impl Run<'_> {
    /// As [`Xts::encrypt`]; `next`: the number of the first unit that will be enciphered after these. Nothing depends on it but speed.
    ///
    /// # Panics
    /// As [`Xts::encrypt`].
    pub fn encrypt(&mut self, first: u64, unit: usize, from: Lent<'_>, to: Reach<'_>, next: Option<u64>) {
        self.xts.segments(Direction::Encrypt, Order { first, unit, next }, from, to, &mut self.known);
    }

    /// As [`Xts::decrypt`]; `next`: the number of the first unit that will be deciphered after these. Nothing depends on it but speed.
    ///
    /// # Panics
    /// As [`Xts::encrypt`].
    pub fn decrypt(&mut self, first: u64, unit: usize, from: Lent<'_>, to: Lent<'_>, next: Option<u64>) {
        let to = Reach { segment: to, target: Target::Near };
        self.xts.segments(Direction::Decrypt, Order { first, unit, next }, from, to, &mut self.known);
    }
}

/// Notes data that the calling thread will decipher soon: they are brought near little by little, while it enciphers or deciphers others.
/// False where the processor has no instructions for that, and nothing is noted.
pub fn foresee(data: Lent<'_>) -> bool {
    #[cfg(target_arch = "x86_64")]
    if crate::vaes::Width::best().is_some() {
        crate::vaes::foresee(data.as_ptr(), data.len());
        return true;
    }
    let _ = data;
    false
}

fn is_whole(unit: usize, len: usize) -> bool {
    unit > 0 && unit.is_multiple_of(GRAIN) && len.is_multiple_of(unit)
}
