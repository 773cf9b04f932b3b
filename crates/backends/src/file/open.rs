//! Opening a file or block device: what it is, who else has it, and what the system below allows.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use millrace_block::{BlockSize, VolumeError};
use rustix::{
    fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat, StatxFlags},
    io::Errno,
};

/// What to open.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// The volume's size in bytes. A file that is missing is created with it, a shorter one is lengthened, and of a longer
    /// one or a larger device only the first part is used. `None`: all of a file that exists. Either way as many blocks as fit.
    pub size: Option<u64>,
    /// The volume's block size.
    pub block_size: BlockSize,
    /// Never write. Several read-only volumes may share a file that nobody writes.
    pub read_only: bool,
}

/// Whether a file is a plain one or a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Regular,
    Device,
}

/// What direct I/O (past the page cache) demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of memory addresses, in bytes.
    pub(super) memory: usize,
    /// Of offsets and lengths, in bytes.
    pub(super) offset: usize,
}

/// An open, locked file.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) fd: OwnedFd,
    pub(super) kind: Kind,
    /// Those that make no whole block counted.
    pub(super) bytes: u64,
    /// `None`: direct I/O is impossible here.
    pub(super) alignment: Option<Alignment>,
    /// Whether holes can be punched.
    pub(super) can_punch: bool,
    /// Bytes of the file system's blocks.
    pub(super) block: u64,
}

/// Names the volume and its path in errors.
pub(super) struct Context<'a> {
    pub(super) volume: &'a str,
    pub(super) path: &'a Path,
}

impl Context<'_> {
    pub(super) fn failed(&self, action: &'static str) -> impl Fn(Errno) -> VolumeError + '_ {
        move |errno| self.io(action, errno.into())
    }

    /// As `failed`, for the calls that tell that somebody else has the file.
    fn refused(&self, action: &'static str) -> impl Fn(Errno) -> VolumeError + '_ {
        move |errno| match errno {
            Errno::BUSY | Errno::WOULDBLOCK => {
                VolumeError::InUse { volume: self.volume.to_owned(), path: self.path.to_owned() }
            }
            errno => self.io(action, errno.into()),
        }
    }

    fn io(&self, action: &'static str, source: io::Error) -> VolumeError {
        VolumeError::Io { volume: self.volume.to_owned(), action, path: self.path.to_owned(), source }
    }

    fn bad_size(&self, size: u64, why: &'static str) -> VolumeError {
        VolumeError::BadSize { volume: self.volume.to_owned(), size, why }
    }
}

/// Opens what `options` says, creating it if need be.
pub(super) fn open(volume: &str, options: &FileOptions) -> Result<Opened, VolumeError> {
    let context = Context { volume, path: &options.path };
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR | OFlags::EXCL };
    // NONBLOCK: opening a FIFO by mistake must not wait for its other end. EXCL on an existing device: refused while mounted.
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    match rustix::fs::open(&options.path, flags, Mode::empty()) {
        Ok(fd) => examine(&context, options, fd),
        Err(Errno::NOENT) if options.size.is_some() && !options.read_only => {
            let mode = Mode::RUSR | Mode::WUSR;
            let fd = rustix::fs::open(&options.path, flags | OFlags::CREATE, mode).map_err(context.failed("create"))?;
            let made = examine(&context, options, fd).and_then(|opened| {
                persist(&context, &opened)?;
                Ok(opened)
            });
            // One that somebody else was quicker to lock is theirs.
            if made.as_ref().is_err_and(|error| !matches!(error, VolumeError::InUse { .. })) {
                // The first error is the one to tell.
                let _ = fs::remove_file(&options.path);
            }
            made
        }
        Err(errno) => Err(context.refused("open")(errno)),
    }
}

fn examine(context: &Context<'_>, options: &FileOptions, fd: OwnedFd) -> Result<Opened, VolumeError> {
    let stat = rustix::fs::fstat(&fd).map_err(context.failed("examine"))?;
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::Regular,
        FileType::BlockDevice => Kind::Device,
        _ => {
            let why = "it is neither a regular file nor a block device";
            return Err(context.io("use", io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
    };
    let lock =
        if options.read_only { FlockOperation::NonBlockingLockShared } else { FlockOperation::NonBlockingLockExclusive };
    rustix::fs::flock(&fd, lock).map_err(context.refused("lock"))?;
    let bytes = settle_size(context, options, &fd, kind)?;
    let alignment = alignment(&fd, kind).map_err(context.failed("examine"))?;
    let device_block = alignment.filter(|_| kind == Kind::Device).map_or(0, |alignment| alignment.offset);
    if device_block > options.block_size.bytes() as usize {
        return Err(VolumeError::BadBlockSize {
            volume: context.volume.to_owned(),
            block_size: options.block_size.bytes(),
            why: "the device's own blocks are larger",
        });
    }
    let can_punch = !options.read_only
        && match kind {
            Kind::Regular => punches(&fd, bytes),
            Kind::Device => device_erases(&stat),
        };
    let block = u64::try_from(stat.st_blksize).unwrap_or(0);
    Ok(Opened { fd, kind, bytes, alignment, can_punch, block })
}

/// The volume's size, and what makes no whole block; lengthens a file that is too short.
fn settle_size(context: &Context<'_>, options: &FileOptions, fd: &OwnedFd, kind: Kind) -> Result<u64, VolumeError> {
    let present = length(fd).map_err(context.failed("measure"))?;
    let block = u64::from(options.block_size.bytes());
    let Some(size) = options.size else {
        return if present < block { Err(context.bad_size(present, "the file holds no whole block")) } else { Ok(present) };
    };
    crate::shape::blocks_in(context.volume, size, options.block_size)?;
    match kind {
        Kind::Device if size > present => Err(context.bad_size(size, "the device is smaller")),
        Kind::Regular if size > present && !options.read_only => {
            rustix::fs::ftruncate(fd, size).map_err(context.failed("lengthen"))?;
            Ok(size)
        }
        _ => Ok(size),
    }
}

/// Length of a file or device in bytes.
pub(super) fn length(fd: &OwnedFd) -> rustix::io::Result<u64> {
    rustix::fs::seek(fd, SeekFrom::End(0))
}

/// What direct I/O demands; `None` where it is impossible.
fn alignment(fd: &OwnedFd, kind: Kind) -> rustix::io::Result<Option<Alignment>> {
    let asked = StatxFlags::DIOALIGN;
    if let Ok(answer) = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, asked)
        && StatxFlags::from_bits_retain(answer.stx_mask).contains(asked)
    {
        let (memory, offset) = (answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize);
        return Ok((memory > 0 && offset > 0).then_some(Alignment { memory, offset }));
    }
    // Older systems do not tell. A device's I/O is aligned to its blocks; a file system's to 4096 at the worst.
    let block = match kind {
        Kind::Device => rustix::fs::ioctl_blksszget(fd)? as usize,
        Kind::Regular => 4096,
    };
    Ok(Some(Alignment { memory: block, offset: block }))
}

/// Whether the file system punches holes: tried where nothing is, past the end.
fn punches(fd: &OwnedFd, bytes: u64) -> bool {
    let past = length(fd).unwrap_or(0).max(bytes).next_multiple_of(4096);
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, past, 4096).is_ok()
}

/// Whether the device zeroes ranges by a command of its own, which is what punching a hole in it needs.
fn device_erases(stat: &Stat) -> bool {
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    // A partition's queue is its disk's.
    ["queue", "../queue"].iter().any(|queue| {
        let limit = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes"));
        limit.is_ok_and(|limit| limit.trim() != "0")
    })
}

/// Makes a file that was just created survive a power loss.
fn persist(context: &Context<'_>, opened: &Opened) -> Result<(), VolumeError> {
    rustix::fs::fsync(&opened.fd).map_err(context.failed("make durable"))?;
    let parent = context.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = rustix::fs::open(parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    directory.and_then(rustix::fs::fsync).map_err(context.failed("make durable"))
}
