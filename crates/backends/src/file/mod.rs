//! A volume in a regular file or on a block device, through the shard's ring.
//!
//! ```text
//!   submit ─► check ─► read, write   on tmpfs, where the file has no hole: copied at once, see `millrace_memory::FileMap`
//!                  │                 segments aligned (or page cache in use) ─► transfer: straight to and from the segments
//!                  │                 else ───────────────────────────────────► bounced: piece by piece, aligned buffer
//!                  ├─► zeroes, deallocate ─► erase: fallocate, else zeroes are written
//!                  ├─► flush, and a durable write while the page cache has anything ─► sync: fdatasync
//!                  ├─► compare ─► by reading into a buffer
//!                  └─► copy ─► by the system, where blocks can be shared, else through a buffer: `copy.rs`
//! ```
//!
//! The page cache is bypassed (`O_DIRECT`) where the file system's alignment is not coarser than the volume's block, so that
//! no block is ever read to be modified and written. All I/O uses one descriptor in one mode at a time, so that the page
//! cache and direct I/O need not be kept coherent. The file system's own word on alignment (statx) is trusted; where it
//! refuses I/O all the same, the volume falls back to the page cache for good.
//!
//! A flush that has failed has lost data: the system tells of an error once and forgets the pages that it could not write. So
//! every later flush of the volume fails as well, until it is opened anew, or all that was lost is written anew past the page cache
//! ([`Volume::trust_again`]); and flushes go to the system one at a time (`flushes.rs`). A durable
//! write would be told of what others have lost, too: where these may have lost anything, it is a plain write and then a flush.

mod beside;
mod cached;
mod copy;
mod flushes;
mod open;
mod transfer;

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicI32, Ordering},
    },
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Extent, Geometry, Lba, Operation, PlainFile, Request, Step, TaskContext,
    Usage, Volume, VolumeError, check, compare_by_reading, future_bytes, helpers_scratch_bytes,
};
use millrace_memory::{FileMap, PAGE_SIZE, Segment};
use rustix::{
    fs::{FallocateFlags, OFlags},
    io::Errno,
};

pub use self::open::FileOptions;
use self::{
    cached::{Cached, Putting, cuts},
    copy::Sharing,
    flushes::Flushes,
    open::{Alignment, Context, Kind, length},
};
use crate::{
    ahead::prefetch_ahead,
    log::LogLimit,
    shape::{Shape, blocks_after_format, bytes_in},
};

/// See the module.
#[derive(Debug)]
pub struct FileVolume {
    name: String,
    path: PathBuf,
    fd: Arc<OwnedFd>,
    kind: Kind,
    read_only: bool,
    shape: Shape,
    alignment: Option<Alignment>,
    /// Bytes of the file system's blocks.
    block: u64,
    /// The descriptor is in direct mode, so that I/O must be aligned.
    direct: AtomicBool,
    cached: Cached,
    /// Holes can be punched.
    can_punch: AtomicBool,
    /// Ranges can be zeroed by fallocate; assumed until the system says no.
    can_zero_range: AtomicBool,
    /// The file as memory, where its file system is.
    map: Option<Arc<FileMap>>,
    /// Has the system copy within the file, where its file system may do so without moving data.
    sharing: Option<Sharing>,
    /// The errno of the first flush that failed, or 0.
    lost: AtomicI32,
    flushes: Flushes,
    log_limit: LogLimit,
    /// Held while the shape changes, never on the data path.
    changing: Mutex<()>,
}

impl FileVolume {
    /// Opens a file or block device, creating the file (sparse) when it is missing and a size is given.
    ///
    /// # Errors
    /// [`VolumeError::InUse`] when another volume or process has it, or the kernel still has, for a moment after it was closed: who has the
    /// time tries again; [`VolumeError::BadSize`] and
    /// [`VolumeError::BadBlockSize`] for a shape it cannot have; [`VolumeError::Io`] with what the system said.
    pub fn open(name: &str, options: &FileOptions) -> Result<Arc<Self>, VolumeError> {
        let opened = open::open(name, options)?;
        // Without it everything goes by the ring.
        let map = FileMap::new(opened.fd.as_fd(), opened.bytes, !options.read_only).ok().flatten();
        let mut volume = Self {
            name: name.to_owned(),
            path: options.path.clone(),
            fd: Arc::new(opened.fd),
            kind: opened.kind,
            read_only: options.read_only,
            shape: Shape::new(options.block_size, opened.bytes),
            alignment: opened.alignment,
            block: opened.block,
            direct: AtomicBool::new(false),
            cached: Cached::default(),
            can_punch: AtomicBool::new(opened.can_punch),
            can_zero_range: AtomicBool::new(true),
            map,
            sharing: None,
            lost: AtomicI32::new(0),
            flushes: Flushes::default(),
            log_limit: LogLimit::default(),
            changing: Mutex::new(()),
        };
        volume.choose_mode(options.block_size)?;
        if volume.kind == Kind::Regular && !volume.read_only && volume.may_share() {
            volume.sharing = Sharing::of(&volume.fd);
        }
        Ok(Arc::new(volume))
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// The file.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn context(&self) -> Context<'_> {
        Context { volume: &self.name, path: &self.path }
    }

    /// Carries a read or write out at once where the file is memory and holds the range. `request` was checked.
    #[inline]
    fn is_moved_in_memory(&self, request: &Request<'_>) -> bool {
        let Some(map) = &self.map else { return false };
        let (offset, _) = self.offset_of(request);
        match request.operation {
            Operation::Read => map.read(offset, request.segments),
            Operation::Write { .. } => map.write(offset, request.segments),
            _ => false,
        }
    }

    /// The ring wrote a range.
    fn written(&self, offset: u64, len: u64) {
        self.map.iter().for_each(|map| map.written(offset, len));
    }

    /// Data are about to go from a range, or the file there, or have gone.
    fn forget(&self, offset: u64, len: u64) {
        self.map.iter().for_each(|map| map.forget(offset, len));
    }

    /// A range with these edges is about to be zeroed: of the file system's blocks that it cuts, a part is, and in the page cache. Block
    /// devices are zeroed on the disk.
    fn note_zeroed(&self, edges: [u64; 2]) -> Option<Putting<'_>> {
        (self.kind == Kind::Regular && cuts(edges, self.block)).then(|| self.cached.begin())
    }

    /// Bypasses the page cache if blocks of this size allow it.
    fn choose_mode(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let fits =
            |alignment: Alignment| alignment.offset <= block_size.bytes() as usize && alignment.memory <= PAGE_SIZE as usize;
        let direct = self.alignment.is_some_and(fits) && rustix::fs::fcntl_setfl(&self.fd, OFlags::DIRECT).is_ok();
        if !direct {
            rustix::fs::fcntl_setfl(&self.fd, OFlags::empty()).map_err(self.context().failed("set up"))?;
        }
        self.direct.store(direct, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the memory can be handed to the system as it is.
    fn suits(&self, segments: &[Segment]) -> bool {
        match self.alignment {
            Some(Alignment { memory, offset }) if self.is_direct() => segments
                .iter()
                .all(|segment| (segment.as_ptr() as usize).is_multiple_of(memory) && segment.len().is_multiple_of(offset)),
            _ => true,
        }
    }

    /// Makes durable what was done beside the data path. The system tells of what it has lost once, and here as in a flush: so it has its turn
    /// among those.
    fn sync_beside(&self) -> rustix::io::Result<()> {
        let turn = self.flushes.wait_beside().inspect_err(|errno| {
            tracing::warn!(
                volume = self.name, path = %self.path.display(), %errno,
                "a flush under way does not end; see whether the disk answers"
            );
        })?;
        let Some(turn) = turn else { return Ok(()) };
        let covered = self.cached.covered();
        // What was lost is known before the turn is given on.
        rustix::fs::fdatasync(&self.fd).inspect_err(|errno| self.lost.store(errno.raw_os_error(), Ordering::Relaxed))?;
        self.cached.made_durable(covered);
        turn.done();
        Ok(())
    }

    /// What a flush has lost is about to be written anew: forgets that it has failed, if the next one does not. Whether it did.
    fn forget_lost(&self) -> bool {
        let Ok(Some(_turn)) = self.flushes.wait_beside() else { return false };
        let is_well = rustix::fs::fdatasync(&self.fd).is_ok();
        if is_well {
            self.lost.store(0, Ordering::Relaxed);
        }
        is_well
    }

    /// Moves the file's end, not yet durably.
    fn move_end(&self, before: u64, after: u64) -> rustix::io::Result<()> {
        self.forget(before.min(after), u64::MAX);
        let _putting = self.note_zeroed([before, after]);
        if after > before {
            // What lies past the old end is not the volume's: a write in flight during an earlier shrink may have put it there.
            rustix::fs::ftruncate(&self.fd, before)?;
        }
        let result = rustix::fs::ftruncate(&self.fd, after);
        self.forget(before.min(after), u64::MAX);
        result
    }

    fn erase_all(&self, bytes: u64) -> rustix::io::Result<()> {
        self.forget(0, u64::MAX);
        let erase = |how: FallocateFlags| {
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.fd, how | FallocateFlags::KEEP_SIZE, 0, bytes))
        };
        let cannot = |errno: Errno| matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS);
        let erased = erase(FallocateFlags::PUNCH_HOLE).or_else(|first| match erase(FallocateFlags::ZERO_RANGE) {
            Err(second) if cannot(first) && cannot(second) && self.kind == Kind::Regular => self.begin_anew(bytes),
            // Why it is not erased is what the call says that could have done it.
            Err(second) if cannot(second) => Err(first),
            result => result,
        });
        self.forget(0, u64::MAX);
        erased?;
        self.sync_beside()
    }

    /// Empties the file of a volume of so many bytes where the system erases no ranges. What lies behind the volume would go with it.
    pub(crate) fn begin_anew(&self, bytes: u64) -> rustix::io::Result<()> {
        if length(&self.fd)? > bytes {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::fs::ftruncate(&self.fd, 0)?;
        rustix::fs::ftruncate(&self.fd, bytes)
    }

    fn refuse_if_read_only(&self, what: &'static str) -> Result<(), VolumeError> {
        if self.read_only { Err(VolumeError::Unsupported { volume: self.name.clone(), what }) } else { Ok(()) }
    }
}

impl Volume for FileVolume {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = self.shape.get();
        let deallocate = self.can_punch.load(Ordering::Relaxed);
        Geometry { block_size, blocks, read_only: self.read_only, volatile_cache: !self.read_only, deallocate }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        if request.count.0 == 0 && request.operation != Operation::Flush {
            return Step::Done(Ok(()));
        }
        if self.is_moved_in_memory(&request) {
            return Step::Done(Ok(()));
        }
        Step::Wait(match request.operation {
            Operation::Read | Operation::Write { .. } if self.suits(request.segments) => {
                cx.scratch.place_future(self.transfer(cx, request))
            }
            Operation::Read | Operation::Write { .. } => cx.scratch.place_future(self.bounced(cx, request)),
            Operation::Flush if self.read_only => return Step::Done(Ok(())),
            Operation::Flush => cx.scratch.place_future(self.sync(cx, request)),
            Operation::Deallocate if !self.can_punch.load(Ordering::Relaxed) => return Step::Done(Ok(())),
            Operation::WriteZeroes { .. } | Operation::Deallocate => cx.scratch.place_future(self.erase(cx, request)),
            Operation::Compare => cx.scratch.place_future(compare_by_reading(self, cx, request)),
            Operation::Copy { .. } => cx.scratch.place_future(self.copy(cx, request)),
        })
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        if self.map.is_none() {
            return 0;
        }
        let geometry = self.geometry();
        let mut far = true;
        for (at, request) in requests.iter().enumerate() {
            far = far && prefetch_ahead(self, requests, at);
            if check(&geometry, request).is_err() || request.count.0 == 0 || !self.is_moved_in_memory(request) {
                return at;
            }
        }
        requests.len()
    }

    #[inline]
    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let Some(map) = &self.map else { return false };
        let range = self.geometry().byte_range(lba, count);
        range.is_none_or(|(ByteOffset(offset), len)| map.prefetch(offset, len))
    }

    fn scratch_bytes(&self) -> usize {
        let moves = future_bytes(Self::transfer).max(future_bytes(Self::bounced));
        let others = future_bytes(Self::erase).max(future_bytes(Self::sync)).max(future_bytes(Self::copy));
        helpers_scratch_bytes(moves).max(others)
    }

    /// A device that was enlarged keeps what its new part holds; a file's reads as zeroes.
    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.refuse_if_read_only("resizing while read-only")?;
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (block_size, blocks_before) = self.shape.get();
        let (before, after) = (self.shape.bytes(), bytes_in(&self.name, blocks, block_size)?);
        if self.kind == Kind::Device {
            let present = length(&self.fd).map_err(self.context().failed("measure"))?;
            if after > present {
                let why = "the device is smaller";
                return Err(VolumeError::BadSize { volume: self.name.clone(), size: after, why });
            }
            self.shape.set(block_size, blocks);
            self.shape.settle();
            return Ok(());
        }
        if after < before {
            // First no new request comes beyond the end, then the end moves.
            self.shape.set(block_size, blocks);
        }
        if let Err(errno) = self.move_end(before, after) {
            self.shape.set(block_size, blocks_before);
            return Err(self.context().failed("resize")(errno));
        }
        // From here on it has the new size, durably or not: what was cut off does not come back.
        self.shape.set(block_size, blocks);
        self.shape.settle();
        self.sync_beside().map_err(self.context().failed("make durable the new size of"))
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.refuse_if_read_only("formatting while read-only")?;
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let room = self.shape.room();
        let blocks = blocks_after_format(&self.name, room, block_size)?;
        let device_block = self.alignment.filter(|_| self.kind == Kind::Device).map_or(0, |alignment| alignment.offset);
        if device_block > block_size.bytes() as usize {
            let (volume, why) = (self.name.clone(), "the device's own blocks are larger");
            return Err(VolumeError::BadBlockSize { volume, block_size: block_size.bytes(), why });
        }
        // A device erases whole blocks of its own.
        let bytes = room - room % (device_block as u64).max(1);
        self.erase_all(bytes).map_err(self.context().failed("erase"))?;
        self.choose_mode(block_size)?;
        self.shape.set(block_size, blocks);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { allocated: self.allocated() }
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.extent_at(lba)
    }

    fn trust_again(&self) -> bool {
        // What the disk has lost the page cache may still have: read there it looks right, and is not written anew.
        self.lost.load(Ordering::Relaxed) == 0 || (self.is_direct() && self.forget_lost())
    }

    fn as_file(&self) -> Option<&dyn PlainFile> {
        (self.kind == Kind::Regular).then_some(self as _)
    }
}

impl FileVolume {
    /// The error of a request that the system failed, and a line in the log.
    #[cold]
    fn failed(&self, what: &'static str, offset: u64, errno: i32, error: BlockError) -> BlockError {
        if let Some(withheld) = self.log_limit.admit() {
            let cause = std::io::Error::from_raw_os_error(errno);
            tracing::warn!(
                volume = self.name, path = %self.path.display(), offset, withheld, "cannot {what}: {cause}; {error}"
            );
        }
        error
    }

    /// Changes over to the page cache, because the system refused direct I/O that it should allow.
    #[cold]
    fn give_up_direct(&self) -> bool {
        if rustix::fs::fcntl_setfl(&self.fd, OFlags::empty()).is_err() {
            return false;
        }
        if self.direct.swap(false, Ordering::Relaxed) {
            tracing::warn!(volume = self.name, path = %self.path.display(), "direct I/O is refused; using the page cache");
        }
        true
    }
}
