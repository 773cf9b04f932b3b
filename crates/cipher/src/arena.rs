//! Memory for keys: locked, left out of core dumps and of children, and where the system can out of the kernel's own view; zeroed
//! when it comes back.
//!
//! ```text
//!   chunk (256 KiB, or as large as one piece needs):  [class|piece][class|piece]…    16 bytes before each piece tell its class
//!   free lists, one per class (64 B · 2^n), under one lock: nothing here is on the path of a request
//! ```

// Pieces are aligned to 16.
#![expect(clippy::cast_ptr_alignment)]

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::{NonNull, null_mut},
    sync::{Mutex, PoisonError},
};

use crate::error::CipherError;

/// Bytes of a chunk.
const CHUNK: usize = 256 << 10;
/// Bytes before a piece; keeps pieces aligned to 16.
const HEADER: usize = 16;
/// The smallest piece is `1 << SMALLEST` bytes, its header included.
const SMALLEST: u32 = 6;
/// Classes of pieces: up to `1 << (SMALLEST + CLASSES - 1)` bytes, which is 2 GiB.
const CLASSES: usize = 26;

struct Arena {
    /// Free pieces of each class; each holds the address of the next in its first word after the header.
    free: [*mut u8; CLASSES],
    /// What is left of the chunk at hand.
    rest: *mut u8,
    left: usize,
}

// SAFETY: the pointers name memory that only the arena uses, and the lock around it lets one thread at a time do so.
unsafe impl Send for Arena {}

static ARENA: Mutex<Arena> = Mutex::new(Arena { free: [null_mut(); CLASSES], rest: null_mut(), left: 0 });

/// Class of a piece with room for `len` bytes.
fn class_of(len: usize) -> Option<u32> {
    let whole = len.checked_add(HEADER)?.checked_next_power_of_two()?;
    let class = whole.trailing_zeros().saturating_sub(SMALLEST);
    ((class as usize) < CLASSES).then_some(class)
}

fn bytes_of(class: u32) -> usize {
    1 << (SMALLEST + class)
}

/// Maps and locks zeroed memory. It is never unmapped: an address that held a key must not become something else's.
fn map(len: usize) -> io::Result<NonNull<u8>> {
    let (ptr, lock) =
        map_secret(len).map(|ptr| (ptr, false)).or_else(|_| Ok::<_, io::Error>((map_anonymous(len)?, true)))?;
    // SAFETY: the range was just mapped. No call changes a byte of it; children do not get it.
    let result = unsafe {
        [libc::MADV_DONTDUMP, libc::MADV_DONTFORK].map(|advice| libc::madvise(ptr, len, advice)).iter().sum::<i32>()
            + if lock { libc::mlock(ptr, len) } else { 0 }
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        // SAFETY: nobody else knows the range yet.
        unsafe { libc::munmap(ptr, len) };
        return Err(error);
    }
    NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))
}

/// Memory that the kernel takes out of its own view: whoever reads another process's memory through the kernel does not read this.
/// It is locked by its nature. Not every system has it.
fn map_secret(len: usize) -> io::Result<*mut libc::c_void> {
    // SAFETY: the call takes a number.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is new, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the descriptor is open.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), libc::off_t::try_from(len).unwrap_or(libc::off_t::MAX)) } != 0 {
        return Err(io::Error::last_os_error());
    }
    map_at(len, libc::MAP_SHARED, fd.as_raw_fd())
}

fn map_anonymous(len: usize) -> io::Result<*mut libc::c_void> {
    map_at(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
}

fn map_at(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<*mut libc::c_void> {
    // SAFETY: a fresh mapping at an address of the kernel's choosing cannot alias anything of ours.
    let ptr = unsafe { libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    if ptr == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(ptr) }
}

impl Arena {
    fn take(&mut self, class: u32) -> io::Result<*mut u8> {
        let (free, bytes) = (&mut self.free[class as usize], bytes_of(class));
        if !free.is_null() {
            let piece = *free;
            // SAFETY: a free piece of ours of at least 64 bytes, which `give` filled; it is aligned to 16.
            *free = unsafe { piece.add(HEADER).cast::<*mut u8>().replace(null_mut()) };
            return Ok(piece);
        }
        if bytes > CHUNK {
            return Ok(map(bytes)?.as_ptr());
        }
        if bytes > self.left {
            // The rest of the old chunk is lost, at most once per chunk.
            self.rest = map(CHUNK)?.as_ptr();
            self.left = CHUNK;
        }
        let piece = self.rest;
        // SAFETY: at least `bytes` bytes are left of the chunk.
        self.rest = unsafe { piece.add(bytes) };
        self.left -= bytes;
        Ok(piece)
    }

    fn give(&mut self, piece: *mut u8, class: u32) {
        // SAFETY: a piece that `take` handed out with this class and that nobody uses any more.
        unsafe { piece.add(HEADER).cast::<*mut u8>().write(self.free[class as usize]) };
        self.free[class as usize] = piece;
    }
}

/// `len` zeroed bytes, aligned to 16.
pub(crate) fn allocate(len: usize) -> Result<NonNull<u8>, CipherError> {
    let too_long = || CipherError::Memory(io::Error::from_raw_os_error(libc::ENOMEM));
    #[cfg(test)]
    limit::take_one().ok_or_else(too_long)?;
    let class = class_of(len).ok_or_else(too_long)?;
    let piece = ARENA.lock().unwrap_or_else(PoisonError::into_inner).take(class).map_err(CipherError::Memory)?;
    // SAFETY: the piece is ours, aligned to 16, and longer than its header.
    let place = unsafe {
        piece.cast::<u64>().write(u64::from(class));
        piece.add(HEADER)
    };
    Ok(NonNull::new(place).expect("a piece has an address"))
}

/// Bytes that the piece at this place has room for.
///
/// # Safety
/// The place came from [`allocate`] and was not given back.
pub(crate) unsafe fn room(place: NonNull<u8>) -> usize {
    // SAFETY: the caller's promise; the header lies right before the place.
    let class = unsafe { place.as_ptr().sub(HEADER).cast::<u64>().read() };
    bytes_of(class as u32) - HEADER
}

/// Zeroes a piece and takes it back.
///
/// # Safety
/// The place came from [`allocate`], was not given back, and nobody uses it any more.
pub(crate) unsafe fn free(place: NonNull<u8>) {
    // SAFETY: the caller's promise.
    let room = unsafe { room(place) };
    // SAFETY: the piece has this much room; this memset is never optimised away.
    unsafe { aws_lc_sys::OPENSSL_cleanse(place.as_ptr().cast(), room) };
    let class = (room + HEADER).trailing_zeros() - SMALLEST;
    // SAFETY: the header lies right before the place.
    let piece = unsafe { place.as_ptr().sub(HEADER) };
    ARENA.lock().unwrap_or_else(PoisonError::into_inner).give(piece, class);
}

/// Has the arena run out of memory, for a test's thread.
#[cfg(test)]
pub(crate) mod limit {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<u32> = const { Cell::new(u32::MAX) };
    }

    /// So many more pieces are there for the calling thread.
    pub(crate) fn set(pieces: u32) {
        LEFT.set(pieces);
    }

    pub(super) fn take_one() -> Option<()> {
        LEFT.set(LEFT.get().checked_sub(1)?);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_zeroed_and_do_not_overlap() {
        let pieces: Vec<_> = [1, 48, 49, 600, 5000, 300_000].map(|len| (allocate(len).unwrap(), len)).into();
        for (at, (place, len)) in pieces.iter().enumerate() {
            assert!(place.as_ptr().addr().is_multiple_of(16));
            // SAFETY: the piece has at least this many bytes and nobody else uses it.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(place.as_ptr(), *len);
                assert!(bytes.iter().all(|byte| *byte == 0) && room(*place) >= *len);
                bytes.fill(at as u8 + 1);
            }
        }
        for (at, (place, len)) in pieces.iter().enumerate() {
            // SAFETY: as above; then the piece is given back, once.
            unsafe {
                assert!(std::slice::from_raw_parts(place.as_ptr(), *len).iter().all(|byte| *byte == at as u8 + 1));
                free(*place);
            }
        }
        let again = allocate(600).unwrap();
        // SAFETY: as above.
        unsafe {
            assert!(std::slice::from_raw_parts(again.as_ptr(), 600).iter().all(|byte| *byte == 0));
            free(again);
        }
        assert!(allocate(usize::MAX).is_err() && allocate(usize::MAX - 8).is_err());
    }

    #[test]
    fn nothing_of_a_key_is_left_where_it_was() {
        // No other test has pieces of this class.
        const LEN: usize = 100_000;
        let place = allocate(LEN).unwrap();
        // SAFETY: the piece has so many bytes, and nobody else uses it; then it is given back, once.
        unsafe {
            place.as_ptr().write_bytes(0x5a, LEN);
            free(place);
        }
        // Its first word may link it to another free piece.
        // SAFETY: memory of the arena is never unmapped; reading it is all we do.
        let left = (8..LEN).filter(|at| unsafe { place.as_ptr().add(*at).read_volatile() } != 0).count();
        assert_eq!(left, 0, "bytes of a key that was given back");
    }

    #[test]
    fn where_the_system_can_nobody_reads_keys_through_it() {
        use std::os::unix::fs::FileExt;
        let place = allocate(64).unwrap();
        // SAFETY: the piece has so many bytes, and nobody else uses it.
        unsafe { place.as_ptr().write_bytes(0x5a, 64) };
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut bytes = [0; 64];
        let read = memory.read_exact_at(&mut bytes, place.as_ptr().addr() as u64);
        // SAFETY: as above.
        match unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) } {
            // What the search above finds where there is no such memory.
            -1 => assert_eq!((read.is_ok(), bytes), (true, [0x5a; 64])),
            fd => {
                assert!(read.is_err());
                // SAFETY: the descriptor is ours, and closed once.
                unsafe { libc::close(i32::try_from(fd).unwrap()) };
            }
        }
        // SAFETY: given back once, and not used any more.
        unsafe { free(place) };
    }

    #[test]
    fn the_system_is_told_to_keep_keys_to_itself() {
        let place = allocate(64).unwrap();
        let address = place.as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let inside = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).ok());
            Some((start?..end?).contains(&address))
        };
        let lines = maps.lines().skip_while(|line| inside(line) != Some(true));
        let flags = lines.map_while(|line| Some(line.to_owned())).find(|line| line.starts_with("VmFlags:")).unwrap();
        for flag in ["dd", "dc", "lo"] {
            assert!(flags.split(' ').any(|word| word == flag), "{flag} (dump, fork, lock) in {flags}");
        }
        // SAFETY: given back once, and not used any more.
        unsafe { free(place) };
    }
}
