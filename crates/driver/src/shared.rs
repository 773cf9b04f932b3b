//! Words and rings in memory that the device reads and writes while we do.

use std::{
    marker::PhantomData,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use millrace_memory::Mapping;
use zerocopy::{Immutable, IntoBytes};

/// A 32-bit word: a doorbell register, a shadow doorbell or an event index.
#[derive(Debug)]
pub(crate) struct SharedU32 {
    ptr: NonNull<u32>,
    _mapping: Arc<Mapping>,
}

// SAFETY: the word lies in a mapping that `_mapping` keeps alive on any thread; it is only accessed atomically.
unsafe impl Send for SharedU32 {}

impl SharedU32 {
    /// The word `offset` bytes into a writable mapping; `None` when it does not lie within or is not aligned.
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let ptr = pointer_into::<u32>(mapping, offset, 1)?;
        Some(Self { ptr, _mapping: Arc::clone(mapping) })
    }

    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: `new` checked range, alignment and writability; the mapping lives as long as `self`; whoever else
        // touches the word does so outside this process, or atomically.
        unsafe { AtomicU32::from_ptr(self.ptr.as_ptr()) }
    }

    /// Stores with `Release`: whoever sees the value sees everything written before it.
    #[inline]
    pub(crate) fn store(&self, value: u32) {
        self.atomic().store(value, Ordering::Release);
    }

    /// Loads with `Acquire`.
    #[inline]
    pub(crate) fn load(&self) -> u32 {
        self.atomic().load(Ordering::Acquire)
    }
}

/// An array of queue entries.
#[derive(Debug)]
pub(crate) struct SharedRing<T> {
    ptr: NonNull<T>,
    entries: u32,
    _mapping: Arc<Mapping>,
    _entry: PhantomData<T>,
}

// SAFETY: plain shared memory kept alive by `_mapping`; entries are copied in and out, never borrowed.
unsafe impl<T: Send> Send for SharedRing<T> {}

impl<T: Copy> SharedRing<T> {
    /// `entries` entries from `offset` bytes into a writable mapping; `None` when they do not lie within.
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let ptr = pointer_into::<T>(mapping, offset, usize::try_from(entries).ok()?)?;
        Some(Self { ptr, entries, _mapping: Arc::clone(mapping), _entry: PhantomData })
    }

    /// Number of entries.
    #[inline]
    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    #[inline]
    fn at(&self, index: u32) -> *mut T {
        assert!(index < self.entries, "entry {index} of {}", self.entries);
        // SAFETY: index lies within the entries that `new` checked to be within the mapping.
        unsafe { self.ptr.add(index as usize).as_ptr() }
    }

    /// Copies an entry in. Seen by the device no later than the next [`SharedU32::store`].
    #[inline]
    pub(crate) fn write(&self, index: u32, entry: T) {
        // SAFETY: `at` gives an aligned pointer into writable memory of ours; the device reads it only after the
        // doorbell's release store that follows.
        unsafe { self.at(index).write_volatile(entry) }
    }

    /// Copies an entry into memory of the device's: word by word, for what is behind the addresses may know no wider stores. Seen by the
    /// device no later than the first [`SharedU32::store`] after [`device_fence`].
    #[inline]
    pub(crate) fn write_words(&self, index: u32, entry: T)
    where
        T: IntoBytes + Immutable,
    {
        let place = self.at(index).cast::<u64>();
        let (words, rest) = entry.as_bytes().as_chunks::<8>();
        assert!(rest.is_empty(), "an entry of {} bytes is no whole words", size_of::<T>());
        for (i, word) in words.iter().enumerate() {
            // SAFETY: as many words as the entry has, which lies within writable memory (`at`) and is aligned to 8 bytes and more.
            unsafe { place.add(i).write_volatile(u64::from_ne_bytes(*word)) }
        }
    }

    /// Brings an entry near as one that will be written: the device has read it a lap ago, and gives it up once.
    #[inline]
    pub(crate) fn prefetch_to_write(&self, index: u32) {
        millrace_memory::prefetch_to_write(self.at(index).cast::<u8>());
    }

    /// Loads the 64-bit word `word` of an entry with `Acquire`: what the device wrote before it is then visible.
    #[inline]
    pub(crate) fn load_word(&self, index: u32, word: usize) -> u64 {
        assert!((word + 1) * 8 <= size_of::<T>(), "word {word} of an entry of {} bytes", size_of::<T>());
        // SAFETY: the word lies within the entry (just checked), entries are 8-byte aligned (`pointer_into` aligns the
        // first to its whole size), and the device writes it with one store.
        unsafe { AtomicU64::from_ptr(self.at(index).cast::<u64>().add(word)) }.load(Ordering::Acquire)
    }
}

impl SharedRing<u64> {
    /// Stores a word with `Release`: whoever sees it sees everything written before it.
    #[inline]
    pub(crate) fn publish(&self, index: u32, word: u64) {
        // SAFETY: `at` gives an aligned pointer into writable memory of ours, which is accessed word by word, atomically.
        unsafe { AtomicU64::from_ptr(self.at(index)) }.store(word, Ordering::Release);
    }
}

/// Has all that was stored before reach a device's memory before what is stored after.
///
/// The race that it closes is between entries in the device's memory and the doorbell that tells of them: these stores are not of ordinary
/// memory, where the doorbell's release would be enough. Stores to a mapping that the system made write-combining lie in buffers of the
/// processor that a later store to another address may overtake; this empties them first. On the way to the device both are
/// posted writes, which do not overtake each other, so that the device finds the entries when it hears the doorbell.
#[inline]
pub(crate) fn device_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    // Devices are not among those that an ordinary fence is for: that is for processors alone.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier is all that it is, and every arm64 processor has it.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// A pointer to `count` values at `offset`, aligned to the value's whole size (a power of two for all we share).
fn pointer_into<T>(mapping: &Mapping, offset: usize, count: usize) -> Option<NonNull<T>> {
    let bytes = size_of::<T>().checked_mul(count)?;
    let end = offset.checked_add(bytes)?;
    let aligned = (mapping.as_ptr() as usize + offset).is_multiple_of(size_of::<T>());
    if end > mapping.len() || !mapping.is_writable() || !aligned {
        return None;
    }
    // SAFETY: offset lies within the mapping.
    NonNull::new(unsafe { mapping.as_ptr().add(offset) }.cast::<T>())
}
