//! The C interface. `include/millrace.h` is made of this file, of what is public in it: `tests/abi.rs` says when it is not what it would be
//! now, and makes it. So the words before a function are for who calls it from C. What they ask of the caller is what makes the function
//! safe to call: a space is one of `fastpath_open` that was not freed, or null, and memory is as long as is said.
#![expect(unreachable_pub, reason = "the header is made of what is public here, and no other crate sees it")]

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    mem::MaybeUninit,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::PathBuf,
    slice,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::io::Errno;

use crate::{
    error::Error,
    memory::Piece,
    requests::{Completion, Operation, Teller},
    shared::{FastPath, accept_each},
    space::{Options, Space, Submission},
    statistics::Latencies,
};

/// Flag of a request: the memory is in the space's buffer. The daemon moves the bytes there, nobody copies.
pub const FP_DIRECT: c_uint = 1;
/// Flag of a request: return when it has ended.
pub const FP_BLOCKING: c_uint = 2;
/// Flag of a write, and of zeroes: when it has ended, it outlives a loss of power. Not of a deallocation (-EINVAL).
pub const FP_DURABLE: c_uint = 4;

/// Flag of a space: nothing will be written.
pub const FP_READ_ONLY: c_uint = 1;
/// Flag of a space: completions signal an event fd, see fastpath_eventfd().
pub const FP_EVENTS: c_uint = 2;
/// Flag of a space: measure requests' times, see fastpath_statistics().
pub const FP_STATISTICS: c_uint = 4;
/// Flag of a space: no queue, requests go to the front of the daemon's engine (docs/hardware.md), at most 32 at a time, each a system call;
/// not with FP_EVENTS, and without fastpath_deallocate(). -EOPNOTSUPP where there is none, or none free.
pub const FP_ENGINE: c_uint = 8;

/// Operation of a request.
pub const FP_READ: c_uint = 0;
/// Operation of a request.
pub const FP_WRITE: c_uint = 1;
/// Operation of a request: see fastpath_flush().
pub const FP_FLUSH: c_uint = 2;
/// Operation of a request: see fastpath_deallocate().
pub const FP_DEALLOCATE: c_uint = 3;
/// Operation of a request: see fastpath_deallocate().
pub const FP_WRITE_ZEROES: c_uint = 4;

/// The most pieces of a vectored request.
const PIECES: usize = 1024;
/// Bytes of the options in the first version of the interface: who was compiled with that goes on to work when there are more, which are
/// behind these, and mean what they did before when they are zero.
const FIRST_OPTIONS: usize = 32;
/// The most bytes of options that are looked at.
const MOST_OPTIONS: usize = 4096;

thread_local! {
    /// The text of this thread's last error. It goes before the program's exit handlers and the destructors of static objects run, which may
    /// call us: they do without it.
    static LAST: RefCell<Cow<'static, CStr>> = const { RefCell::new(Cow::Borrowed(c"")) };
    /// Its number, which stays as long as the thread.
    static LAST_NUMBER: Cell<c_int> = const { Cell::new(0) };
}

/// What is behind a fastpath_t: the library's.
pub struct Handle {
    path: FastPath,
    /// Where `fastpath_read` and `fastpath_write` go on. Changed with the space's lock held.
    position: AtomicU64,
    buffer: *mut u8,
}

/// A space: a controller of this program's own in the daemon, a queue pair, and a buffer.
#[expect(non_camel_case_types, reason = "the name is for C")]
pub type fastpath_t = Handle;

/// What a space is to be. A later library may know more fields, behind these, and goes on to take structures without them.
#[repr(C)]
pub struct COptions {
    /// sizeof(struct fastpath_options)
    size: usize,
    /// The daemon's run directory; NULL: $MILLRACE_RUN_DIR, or where this user's daemon has it.
    run_dir: *const c_char,
    /// Requests that may be in progress, 1 to 1023; 0: 128.
    depth: c_uint,
    /// FP_READ_ONLY, FP_EVENTS, FP_STATISTICS, FP_ENGINE.
    flags: c_uint,
    /// Longest wait for the daemon, and of a blocking request; 0: 30 seconds.
    timeout_ms: c_uint,
    /// Not looked at: programs of before have left anything there.
    reserved: c_uint,
}

const _: () =
    assert!(std::mem::offset_of!(COptions, reserved) + 4 == FIRST_OPTIONS, "fields are added, and behind the first ones");

/// A request with a tag: any number may be in flight, and each end is told apart.
#[repr(C)]
pub struct CRequest {
    /// FP_READ, FP_WRITE, FP_FLUSH, FP_DEALLOCATE or FP_WRITE_ZEROES.
    operation: c_uint,
    /// FP_DIRECT, FP_DURABLE.
    flags: c_uint,
    /// First byte on the volume.
    offset: u64,
    /// Bytes, unless there is an iov.
    size: u64,
    /// The memory, unless there is an iov.
    buffer: *mut c_void,
    /// Pieces of memory, or NULL.
    iov: *const Piece,
    /// How many pieces.
    iovcnt: c_uint,
    /// Yours.
    tag: u64,
}

/// The end of a request with a tag.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CCompletion {
    /// The request's.
    tag: u64,
    /// Bytes, or a negative number of errno.h.
    result: i64,
    /// How long it took, of a space with FP_STATISTICS.
    time_ns: u64,
}

/// What requests of one kind took; times to one part in eight.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CLatencies {
    requests: u64,
    errors: u64,
    bytes: u64,
    min_ns: u64,
    mean_ns: u64,
    p50_ns: u64,
    p90_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    max_ns: u64,
}

/// What requests took.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CStatistics {
    reads: CLatencies,
    writes: CLatencies,
    others: CLatencies,
}

/// Keeps the error's text for this thread; its number, negative.
fn fail(error: &Error) -> c_int {
    let errno = error.errno();
    let text = match error {
        // It comes often, and is no news.
        Error::Full => Cow::Borrowed(c"the space holds no more requests and completions; poll or reap first"),
        other => Cow::Owned(CString::new(other.in_full().replace('\0', " ")).unwrap_or_default()),
    };
    LAST_NUMBER.set(errno);
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    -errno
}

fn count(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// # Safety
/// A string, or null.
unsafe fn text<'a>(from: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller's promise.
    (!from.is_null()).then(|| unsafe { CStr::from_ptr(from) })
}

/// Options of a program that was compiled with this header, an earlier or a later one: what it does not know is zero, and what we do not
/// know must be.
///
/// # Safety
/// As many bytes as its `size` says, if that is possible.
unsafe fn known(given: *const COptions) -> Result<COptions, Error> {
    const OURS: usize = size_of::<COptions>();
    let other = Error::Invalid("the options are of another version: set .size to sizeof(struct fastpath_options)");
    // SAFETY: the caller's promise: the size is there in any version.
    let size = unsafe { given.cast::<usize>().read() };
    if !(FIRST_OPTIONS..=MOST_OPTIONS).contains(&size) {
        return Err(other);
    }
    // SAFETY: the caller's promise: what is behind ours, if anything.
    let rest = unsafe { slice::from_raw_parts(given.cast::<u8>().wrapping_add(OURS), size.saturating_sub(OURS)) };
    if rest.iter().any(|byte| *byte != 0) {
        return Err(other);
    }
    let mut ours = MaybeUninit::<COptions>::zeroed();
    // SAFETY: both have as many bytes, and of numbers and pointers zeroes are values, too.
    unsafe {
        given.cast::<u8>().copy_to_nonoverlapping(ours.as_mut_ptr().cast(), size.min(OURS));
        Ok(ours.assume_init())
    }
}

/// # Safety
/// Pointers as in `fastpath_open`.
unsafe fn open(volume: *const c_char, size: usize, options: *const COptions) -> Result<Box<Handle>, Error> {
    let mut wanted = Options { buffer: size, ..Options::default() };
    if !options.is_null() {
        // SAFETY: the caller's promise.
        let given = unsafe { known(options) }?;
        if given.flags & !(FP_READ_ONLY | FP_EVENTS | FP_STATISTICS | FP_ENGINE) != 0 {
            return Err(Error::Invalid("unknown flags in the options"));
        }
        // SAFETY: the caller's promise.
        wanted.run_dir =
            unsafe { text(given.run_dir) }.map(|dir| PathBuf::from(std::ffi::OsStr::from_bytes(dir.to_bytes())));
        if given.depth != 0 {
            wanted.depth = u16::try_from(given.depth).map_err(|_| Error::Options("the depth is 1 to 1023"))?;
        }
        if given.timeout_ms != 0 {
            wanted.timeout = Duration::from_millis(u64::from(given.timeout_ms));
        }
        wanted.read_only = given.flags & FP_READ_ONLY != 0;
        wanted.events = given.flags & FP_EVENTS != 0;
        wanted.statistics = given.flags & FP_STATISTICS != 0;
        wanted.engine = given.flags & FP_ENGINE != 0;
    }
    // SAFETY: the caller's promise.
    let volume = match unsafe { text(volume) } {
        Some(volume) => volume.to_str().map_err(|_| Error::Invalid("a volume's name is text"))?.to_owned(),
        None => std::env::var("MILLRACE_VOLUME").map_err(|_| Error::NoVolume)?,
    };
    let path = FastPath::open(&volume, &wanted)?;
    let buffer = path.buffer_address();
    Ok(Box::new(Handle { path, position: AtomicU64::new(0), buffer }))
}

/// Opens a volume by its name (NULL: $MILLRACE_VOLUME), with a zeroed buffer of at least `size` bytes. `options` may be NULL. NULL when it
/// fails: fastpath_error() and fastpath_error_number() say why.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_open(volume: *const c_char, size: usize, options: *const COptions) -> *mut fastpath_t {
    // SAFETY: the caller's promise.
    match unsafe { open(volume, size, options) } {
        Ok(handle) => Box::into_raw(handle),
        Err(error) => {
            fail(&error);
            std::ptr::null_mut()
        }
    }
}

/// fastpath_open(NULL, size, NULL).
#[unsafe(no_mangle)]
pub extern "C" fn fastpath_alloc(size: usize) -> *mut fastpath_t {
    // SAFETY: null pointers are defaults.
    unsafe { fastpath_open(std::ptr::null(), size, std::ptr::null()) }
}

/// Gives everything back: the buffer is not there any more. Requests in progress may be carried out or not, and their memory is not touched
/// any more. No other call on the space may be under way. NULL is nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_free(fp: *mut fastpath_t) {
    if !fp.is_null() {
        // SAFETY: the caller's promise: it came from `fastpath_open`, and comes here once.
        drop(unsafe { Box::from_raw(fp) });
    }
}

/// The space behind a handle.
///
/// # Safety
/// A handle of `fastpath_open` that is not freed, or null.
unsafe fn at<'a>(handle: *const Handle) -> Result<&'a Handle, Error> {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { handle.as_ref() }) else { return Err(Error::Invalid("the space is null")) };
    Ok(handle)
}

/// The buffer for FP_DIRECT, page-aligned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_buffer(fp: *const fastpath_t) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { at(fp) }.map_or(std::ptr::null_mut(), |handle| handle.buffer.cast())
}

/// The buffer's length in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_buffer_size(fp: *const fastpath_t) -> usize {
    // SAFETY: the caller's promise.
    unsafe { at(fp) }.map_or(0, |handle| handle.path.buffer_len())
}

/// Bytes of a block: requests are whole blocks at whole blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_block_size(fp: *const fastpath_t) -> c_uint {
    // SAFETY: the caller's promise.
    unsafe { at(fp) }.map_or(0, |handle| handle.path.block_size())
}

/// The volume's size in bytes, as it is now: asks the daemon. Of a volume that has grown, what is new may be used from then on, and not
/// before (-ENXIO).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_volume_size(fp: *const fastpath_t) -> i64 {
    // SAFETY: the caller's promise.
    let size = unsafe { at(fp) }.and_then(|handle| handle.path.refresh());
    size.map_or_else(|error| i64::from(fail(&error)), count)
}

/// Of a space with FP_EVENTS: a descriptor for poll(2) that becomes readable when something has finished, and now and then when nothing has.
/// Read its 8 bytes, then poll the space until nothing comes. It is the space's: do not close it.
///
/// A daemon that has ended, or has ended the space, signals nothing: the space sees that when it is polled. Who only sleeps watches
/// fastpath_connection() as well, or polls the space by a timer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_eventfd(fp: *const fastpath_t) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { at(fp) };
    let fd = handle.and_then(|handle| handle.path.events().ok_or(Error::Invalid("the space was opened without FP_EVENTS")));
    fd.map_or_else(|error| fail(&error), |fd| fd.as_raw_fd())
}

/// A descriptor for poll(2) that hangs up (POLLHUP, which needs no asking for; POLLRDHUP) when the daemon has stopped, taken the volume
/// back, or ended the space because its controller had failed: what is in progress then ends with -ENODEV when the space is polled, a
/// hundredth of a second later at most; of a space without FP_EVENTS, after some thousands of polls in vain. It is the space's: do not read,
/// write or close it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_connection(fp: *const fastpath_t) -> c_int {
    // SAFETY: the caller's promise.
    let handle = unsafe { at(fp) };
    handle.map_or_else(|error| fail(&error), |handle| handle.path.connection().as_raw_fd())
}

/// Begins what is wanted, and waits for it if it is to block.
///
/// # Safety
/// As of `at`; the memory is as the header wants it.
unsafe fn run(
    handle: *const Handle,
    wanted: Submission<'_>,
    position: Option<&AtomicU64>,
    flags: c_uint,
) -> Result<u64, Error> {
    if flags & !(FP_DIRECT | FP_BLOCKING | FP_DURABLE) != 0 {
        return Err(Error::Invalid("unknown flags"));
    }
    // SAFETY: the caller's promise.
    let handle = unsafe { at(handle) }?;
    let (direct, durable) = (flags & FP_DIRECT != 0, flags & FP_DURABLE != 0);
    let all = || wanted.pieces.iter().map(|piece| piece.len as u64).sum::<u64>() + wanted.len;
    if flags & FP_BLOCKING == 0 {
        let wanted = Submission { direct, durable, ..wanted };
        // SAFETY: the caller's promise.
        unsafe { handle.path.submit(&wanted, position) }?;
        return Ok(all());
    }
    let wanted = Submission { direct, durable, teller: Teller::Waited, ..wanted };
    // SAFETY: the caller's promise.
    let done = unsafe { handle.path.submit_and_wait(&wanted, position) }?;
    match done.errno {
        0 => Ok(done.bytes),
        errno => Err(Error::Failed { errno }),
    }
}

fn wanted(operation: Operation, offset: u64, len: u64, pieces: &[Piece]) -> Submission<'_> {
    Submission { operation, offset, len, pieces, direct: false, durable: false, teller: Teller::Counted }
}

/// # Safety
/// As of `run`.
unsafe fn transfer(handle: *const Handle, operation: Operation, offset: u64, pieces: &[Piece], flags: c_uint) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { transfer_at(handle, wanted(operation, offset, 0, pieces), None, flags) }
}

/// # Safety
/// As of `run`.
unsafe fn transfer_at(handle: *const Handle, wanted: Submission<'_>, position: Option<&AtomicU64>, flags: c_uint) -> i64 {
    if wanted.pieces.iter().any(|piece| piece.start.is_null() && piece.len > 0) {
        return i64::from(fail(&Error::Invalid("the buffer is null")));
    }
    // SAFETY: the caller's promise.
    let result = unsafe { run(handle, wanted, position, flags) };
    result.map_or_else(|error| i64::from(fail(&error)), count)
}

/// # Safety
/// As of `transfer`.
unsafe fn go_on(handle: *const Handle, operation: Operation, buffer: *mut u8, size: usize, flags: c_uint) -> i64 {
    // SAFETY: the caller's promise.
    let position = match unsafe { at(handle) } {
        Ok(handle) => &handle.position,
        Err(error) => return i64::from(fail(&error)),
    };
    let pieces = [Piece { start: buffer, len: size }];
    // SAFETY: the caller's promise.
    unsafe { transfer_at(handle, wanted(operation, 0, 0, &pieces), Some(position), flags) }
}

/// Reads at the space's position, which moves on by `size` when the request is accepted, and only then: threads that share it leave
/// nothing out; one that fails later has moved it. With FP_BLOCKING: bytes moved, always `size`. Without: `size`, as soon as the request is
/// accepted, and fastpath_polling() tells of its end. The memory must be left alone until then.
///
/// The memory of an FP_DIRECT request lies in the space's buffer at a multiple of 4 bytes; other memory is copied. A request of any length
/// is made into as many commands as it takes, and ends when the last one has; there is no order between requests that are in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_read(fp: *mut fastpath_t, buffer: *mut c_void, size: usize, flags: c_uint) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { go_on(fp, Operation::Read, buffer.cast(), size, flags) }
}

/// As fastpath_read(), but writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_write(fp: *mut fastpath_t, buffer: *const c_void, size: usize, flags: c_uint) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { go_on(fp, Operation::Write, buffer.cast_mut().cast(), size, flags) }
}

/// Where fastpath_read() and fastpath_write() go on; 0 at first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_seek(fp: *mut fastpath_t, offset: u64) -> c_int {
    // SAFETY: the caller's promise.
    let moved = unsafe { at(fp) }.and_then(|handle| {
        let _space = handle.path.lock()?;
        handle.position.store(offset, Ordering::Relaxed);
        Ok(())
    });
    moved.map_or_else(|error| fail(&error), |()| 0)
}

/// As fastpath_read(), but at an offset of the volume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_pread(
    fp: *mut fastpath_t,
    buffer: *mut c_void,
    size: usize,
    offset: u64,
    flags: c_uint,
) -> i64 {
    let piece = Piece { start: buffer.cast(), len: size };
    // SAFETY: the caller's promise.
    unsafe { transfer(fp, Operation::Read, offset, &[piece], flags) }
}

/// As fastpath_write(), but at an offset of the volume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_pwrite(
    fp: *mut fastpath_t,
    buffer: *const c_void,
    size: usize,
    offset: u64,
    flags: c_uint,
) -> i64 {
    let piece = Piece { start: buffer.cast_mut().cast(), len: size };
    // SAFETY: the caller's promise.
    unsafe { transfer(fp, Operation::Write, offset, &[piece], flags) }
}

/// # Safety
/// As the header says: `iov` is `iovcnt` pieces.
unsafe fn pieces<'a>(iov: *const Piece, iovcnt: usize) -> Result<&'a [Piece], Error> {
    if iov.is_null() || !(1..=PIECES).contains(&iovcnt) {
        return Err(Error::Invalid("a vectored request has 1 to 1024 pieces"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { slice::from_raw_parts(iov, iovcnt) })
}

/// # Safety
/// As the header says.
unsafe fn vectored(
    handle: *const Handle,
    operation: Operation,
    iov: *const Piece,
    iovcnt: c_int,
    offset: u64,
    flags: c_uint,
) -> i64 {
    // SAFETY: the caller's promise.
    match unsafe { pieces(iov, usize::try_from(iovcnt).unwrap_or(0)) } {
        // SAFETY: the caller's promise.
        Ok(pieces) => unsafe { transfer(handle, operation, offset, pieces, flags) },
        Err(error) => i64::from(fail(&error)),
    }
}

/// As fastpath_pread(), but with up to 1024 pieces of memory; with FP_DIRECT each piece is whole blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_preadv(
    fp: *mut fastpath_t,
    iov: *const Piece,
    iovcnt: c_int,
    offset: u64,
    flags: c_uint,
) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { vectored(fp, Operation::Read, iov, iovcnt, offset, flags) }
}

/// As fastpath_pwrite(), but with up to 1024 pieces of memory; with FP_DIRECT each piece is whole blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_pwritev(
    fp: *mut fastpath_t,
    iov: *const Piece,
    iovcnt: c_int,
    offset: u64,
    flags: c_uint,
) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { vectored(fp, Operation::Write, iov, iovcnt, offset, flags) }
}

/// # Safety
/// As of `at`.
unsafe fn without_memory(handle: *const Handle, operation: Operation, offset: u64, size: u64, flags: c_uint) -> c_int {
    // SAFETY: the caller's promise; there is no memory.
    match unsafe { run(handle, wanted(operation, offset, size, &[]), None, flags) } {
        Ok(_) => 0,
        Err(error) => fail(&error),
    }
}

/// When it has ended, all writes that had ended before it began are durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_flush(fp: *mut fastpath_t, flags: c_uint) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { without_memory(fp, Operation::Flush, 0, 0, flags) }
}

/// The blocks' contents are not needed any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_deallocate(fp: *mut fastpath_t, offset: u64, size: u64, flags: c_uint) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { without_memory(fp, Operation::Deallocate, offset, size, flags) }
}

/// The blocks read as zeroes from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_write_zeroes(fp: *mut fastpath_t, offset: u64, size: u64, flags: c_uint) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { without_memory(fp, Operation::WriteZeroes, offset, size, flags) }
}

/// Goes on with what is in progress, without waiting. How many requests of the calls without tags are in progress still, or, once, the error
/// of the first that failed since the last call. Those that were waited for too long (-ETIMEDOUT) count as well; their errors are not told again.
/// Tagged completions it leaves where they are: they have their room until fastpath_reap() takes them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_polling(fp: *mut fastpath_t) -> c_int {
    // SAFETY: the caller's promise.
    let counted = unsafe { at(fp) }.and_then(|handle| handle.path.counted().map_err(|errno| Error::Failed { errno }));
    counted.map_or_else(|error| fail(&error), |count| c_int::try_from(count).unwrap_or(c_int::MAX))
}

/// # Safety
/// As the header says.
unsafe fn accept(space: &mut Space, request: &CRequest) -> Result<(), Error> {
    if request.flags & !(FP_DIRECT | FP_DURABLE) != 0 {
        return Err(Error::Invalid("a request that is submitted has the flags FP_DIRECT and FP_DURABLE, or none"));
    }
    let operation = match request.operation {
        FP_READ => Operation::Read,
        FP_WRITE => Operation::Write,
        FP_FLUSH => Operation::Flush,
        FP_DEALLOCATE => Operation::Deallocate,
        FP_WRITE_ZEROES => Operation::WriteZeroes,
        _ => return Err(Error::Invalid("an unknown operation")),
    };
    let one = [Piece { start: request.buffer.cast(), len: usize::try_from(request.size).unwrap_or(usize::MAX) }];
    let (pieces, len) = match operation {
        Operation::Read | Operation::Write if request.iov.is_null() => (&one[..], 0),
        // SAFETY: the caller's promise.
        Operation::Read | Operation::Write => (unsafe { pieces(request.iov, request.iovcnt as usize) }?, 0),
        _ => (&one[..0], request.size),
    };
    if pieces.iter().any(|piece| piece.start.is_null() && piece.len > 0) {
        return Err(Error::Invalid("the buffer is null"));
    }
    let (direct, durable) = (request.flags & FP_DIRECT != 0, request.flags & FP_DURABLE != 0);
    let (offset, teller) = (request.offset, Teller::Tagged(request.tag));
    // SAFETY: the caller's promise.
    unsafe { space.accept(&Submission { operation, offset, len, pieces, direct, durable, teller }) }.map(drop)
}

/// # Safety
/// As the header says: `count` requests.
unsafe fn submit(handle: *const Handle, requests: *const CRequest, count: usize) -> Result<usize, Error> {
    // SAFETY: the caller's promise.
    let handle = unsafe { at(handle) }?;
    if count == 0 {
        return Ok(0);
    }
    if requests.is_null() {
        return Err(Error::Invalid("the request is null"));
    }
    // SAFETY: the caller's promise.
    let requests = unsafe { slice::from_raw_parts(requests, count) };
    let mut space = handle.path.lock()?;
    // SAFETY: the caller's promise.
    accept_each(&mut space, requests, |space, request| unsafe { accept(space, request) })
}

/// Begins a request with a tag. The structure and its iov are done with on return, the memory is not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_submit(fp: *mut fastpath_t, request: *const CRequest) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { submit(fp, request, 1) } {
        Ok(_) => 0,
        Err(error) => fail(&error),
    }
}

/// Begins several requests with tags, in order, at less cost than one by one: how many were accepted, from the first on, each as a whole,
/// and of the others nothing was done. When the first is not accepted, why, as of fastpath_submit(). That one after it is not, its own
/// submission tells: most often there was no more room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_submit_many(fp: *mut fastpath_t, requests: *const CRequest, count: c_uint) -> c_int {
    // SAFETY: the caller's promise.
    let accepted = unsafe { submit(fp, requests, count as usize) };
    accepted.map_or_else(|error| fail(&error), |accepted| c_int::try_from(accepted).unwrap_or(c_int::MAX))
}

/// Goes on with what is in progress and takes up to `max` completions; how many. Waits up to `timeout_ms` (0: not at all, negative: for
/// ever) for the first one while anything is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_reap(
    fp: *mut fastpath_t,
    completions: *mut CCompletion,
    max: c_uint,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let path = match unsafe { at(fp) } {
        Ok(handle) if !completions.is_null() => &handle.path,
        Ok(_) => return fail(&Error::Invalid("the completions are null")),
        Err(error) => return fail(&error),
    };
    let forever = Duration::from_secs(u64::from(u32::MAX));
    let timeout = u64::try_from(timeout_ms).map_or(forever, Duration::from_millis);
    let (mut at, max) = (0, max as usize);
    let each = |done: Completion| {
        let result = if done.errno == 0 { count(done.bytes) } else { -i64::from(done.errno) };
        let completion = CCompletion { tag: done.tag, result, time_ns: done.nanos };
        // SAFETY: the caller's promise: `max` completions, and no more are taken.
        unsafe { completions.add(at).write(completion) };
        at += 1;
    };
    let taken = if timeout_ms == 0 { path.poll_each(max, each) } else { path.wait_each(max, timeout, each) };
    c_int::try_from(taken).unwrap_or(c_int::MAX)
}

impl From<&Latencies> for CLatencies {
    fn from(from: &Latencies) -> Self {
        Self {
            requests: from.requests,
            errors: from.errors,
            bytes: from.bytes,
            min_ns: if from.requests == 0 { 0 } else { from.min },
            mean_ns: from.mean(),
            p50_ns: from.permille(500),
            p90_ns: from.permille(900),
            p99_ns: from.permille(990),
            p999_ns: from.permille(999),
            max_ns: from.max,
        }
    }
}

/// Of a space with FP_STATISTICS: what requests took since it was opened or cleared. `statistics` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fastpath_statistics(fp: *mut fastpath_t, statistics: *mut CStatistics, clear: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { at(fp) }.and_then(|handle| {
        let mut space = handle.path.lock()?;
        let found = space.statistics().ok_or(Error::Invalid("the space was opened without FP_STATISTICS"))?;
        let (reads, writes, others) = ((&found.reads).into(), (&found.writes).into(), (&found.others).into());
        if clear != 0 {
            found.clear();
        }
        if !statistics.is_null() {
            // SAFETY: the caller's promise.
            unsafe { statistics.write(CStatistics { reads, writes, others }) };
        }
        Ok(())
    });
    result.map_or_else(|error| fail(&error), |()| 0)
}

/// This thread's last error, in words that name what failed. Valid until this thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn fastpath_error() -> *const c_char {
    // Stays where it is until this thread's next error: the string is replaced, never changed.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or_else(|_| fastpath_strerror(LAST_NUMBER.get()))
}

/// This thread's last error as a positive number.
#[unsafe(no_mangle)]
pub extern "C" fn fastpath_error_number() -> c_int {
    LAST_NUMBER.get()
}

/// What an error number means here; `error` may be negative.
#[unsafe(no_mangle)]
pub extern "C" fn fastpath_strerror(error: c_int) -> *const c_char {
    const TEXTS: &[(Errno, &CStr)] = &[
        (Errno::AGAIN, c"the space is full: poll or reap first; or too many programs stand at the daemon's door"),
        (Errno::INVAL, c"the request, its memory or an option cannot be"),
        (Errno::NXIO, c"the request reaches past the volume's end"),
        (Errno::ROFS, c"the volume cannot be written, or not here"),
        (Errno::NOSPC, c"there is no room for the volume's data, or in the daemon for the space's memory"),
        (Errno::IO, c"the volume's medium failed"),
        (Errno::BUSY, c"somebody else has the volume"),
        (Errno::NODEV, c"the daemon has gone away, or has ended the space, or this process was forked since; open it again"),
        (Errno::TIMEDOUT, c"nothing has finished in time"),
        (Errno::ACCESS, c"this user may not open the volume, or not in this way; or the run directory is not to be trusted"),
        (Errno::DQUOT, c"this user has as many sessions as it may have"),
        (Errno::NOENT, c"there is no such volume, or no daemon with this run directory"),
        (Errno::CONNREFUSED, c"no daemon answers in this run directory"),
        (Errno::NOMEM, c"there is no memory"),
        (Errno::MFILE, c"this process has as many descriptors as it may: see ulimit -n"),
        (Errno::NFILE, c"the system has as many files open as it may: see fs.file-max"),
        (Errno::OPNOTSUPP, c"the volume does not do that"),
    ];
    let errno = error.checked_abs().unwrap_or(0);
    if errno == 0 {
        return c"no error".as_ptr();
    }
    let found = TEXTS.iter().find(|(known, _)| known.raw_os_error() == errno);
    found.map_or(c"an error of the system".as_ptr(), |(_, text)| text.as_ptr())
}

/// The library's version.
#[unsafe(no_mangle)]
pub extern "C" fn fastpath_version() -> *const c_char {
    static VERSION: OnceLock<CString> = OnceLock::new();
    VERSION.get_or_init(|| CString::new(env!("CARGO_PKG_VERSION")).unwrap_or_default()).as_ptr()
}
