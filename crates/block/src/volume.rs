//! The one trait behind every namespace and virtio disk.

use std::{
    future::Future,
    io,
    os::fd::BorrowedFd,
    pin::Pin,
    slice,
    task::{Context, Poll},
};

use millrace_memory::{Access, Reach, Segment};

use crate::{
    Asker, BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, Metadata, MetadataFormat, Request, ScratchBox,
    TaggedRequest, TaskContext, Transfer, VolumeError,
};

/// A request that waits, placed in its task's scratch.
pub type TaskFuture<'a, O = Result<(), BlockError>> = ScratchBox<'a, dyn Future<Output = O> + 'a>;

/// How far a request came at once.
#[must_use]
pub enum Step<'a> {
    /// It is finished.
    Done(Result<(), BlockError>),
    /// It waits: await it.
    Wait(TaskFuture<'a>),
}

impl Step<'_> {
    /// A step that has succeeded at once, or what it is otherwise. Of one that has, nothing but the tags is loaded (a load that is wider than
    /// the store before it waits for that), and nothing dropped.
    #[inline]
    pub fn at_once(self) -> Result<Self, Self> {
        if matches!(self, Self::Done(Ok(()))) {
            std::mem::forget(self);
            return Ok(Self::Done(Ok(())));
        }
        Err(self)
    }
}

impl Future for Step<'_> {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Done(result) => Poll::Ready(*result),
            Self::Wait(future) => future.as_pin_mut().poll(cx),
        }
    }
}

/// How much of a volume is in use, for metrics and Identify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes the medium really holds for this volume.
    pub allocated: u64,
}

/// A run of blocks about which the same is known without reading them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How long it is: at least one block.
    pub blocks: BlockCount,
    /// It holds nothing, and so reads as zeroes. Otherwise it may hold anything.
    pub unused: bool,
}

/// A volume that is a regular file, its blocks from the file's first byte on: for copies that the system makes by itself.
pub trait PlainFile {
    /// The file. Only to be read from.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether its file system may copy without moving data: by sharing blocks, or at a server. Elsewhere the system copies through
    /// its cache, slower than who reads and writes past it, and at the cost of what others have there.
    fn may_share(&self) -> bool;

    /// Has the system copy bytes of another file to the same place in this one: by sharing them, where the file system can. How
    /// many were copied; 0: the other file ends there. May wait: not called on a shard. They are durable after a flush.
    fn copy_from(&self, other: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64>;
}

/// A named, sized store of blocks: a back end, or a service over other volumes.
///
/// One object serves all shards; `submit` is called on any of them. Every implementation passes the conformance suite.
pub trait Volume: Send + Sync {
    /// The operator's name for it: in every message about it.
    fn name(&self) -> &str;

    /// Its shape at this moment.
    fn geometry(&self) -> Geometry;

    /// Starts a request.
    ///
    /// The range is checked against the volume's present size (a shrink may have overtaken the front end's check); the
    /// segments' length is the caller's promise ([`Request::assert_lengths`]).
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a>;

    /// Does reads and writes, each as [`Self::submit`] would, from the first on and as long as they end at once and well; returns how many.
    /// Those after them were not begun, and whoever asked submits the next of them alone. What lies on the way is paid once for all of them.
    ///
    /// All of them move data. A service that passes them on may change where they lie ([`Request::lba`]): afterwards the caller's
    /// are of no use but for their operations and counts. Who says nothing does none.
    fn submit_many(&self, _requests: &mut [Request<'_>]) -> usize {
        0
    }

    /// Does one read or write of some bytes as [`Self::submit_many`] does several; whether it did. Whoever waits for one request alone asks for
    /// nothing else before, not even the volume's shape, and all that says what it is goes in registers. Who passes requests on as they come passes
    /// this on; nobody else need say anything.
    fn do_one(&self, transfer: Transfer, at: ByteOffset, data: Segment) -> bool {
        let Some((lba, count)) = self.geometry().whole_blocks(at, data.len() as u64) else { return false };
        let request = Request { operation: transfer.into(), lba, count, segments: slice::from_ref(&data) };
        self.submit_many(&mut [request]) == 1
    }

    /// A read of this range will be submitted soon: a volume whose data lie in memory brings them near. It is a hint; the range
    /// is not checked. Returns whether it is any use: who gets `false` need not ask again for a while. A service that passes
    /// reads on may pass this on as well.
    fn prefetch(&self, _lba: Lba, _count: BlockCount) -> bool {
        false
    }

    /// The memory that holds these blocks, where the volume is memory and they lie in one piece: a service makes what it makes of blocks
    /// on the way from or to the guest, and saves a copy. To be used at once, within [`Self::submit`], as the request that it replaces;
    /// whoever writes writes all of it, and says so ([`Self::reached`]). `None`: submit a request.
    ///
    /// Who asks may do without what it gets. So a service passes this on only if a request that never comes by is no matter to it: not one
    /// that counts requests, or holds them back; nor one that must know when they have ended, because it may lead elsewhere afterwards.
    fn reach(&self, _lba: Lba, _count: BlockCount, _access: Access) -> Option<Reach<'_>> {
        None
    }

    /// Blocks that were [reached](Self::reach) have been written. Who passes that on passes this on.
    fn reached(&self, _lba: Lba, _count: BlockCount) {}

    /// Nobody waits any more for what this device has asked for on the calling shard: those of its requests that only wait for their turn
    /// may fail at once ([`BlockError::CalledOff`]). A service passes this on only if it hands a leg's errors to who asked, and does
    /// nothing itself when a request fails. Who says nothing finishes everything.
    fn call_off(&self, _asker: Asker) {}

    /// Whether copies that a request makes may be settled after it has ended, with those of others ([`Unsettled`](millrace_memory::Unsettled)):
    /// nothing that happens in here between a copy and the request's end tells others by an ordinary store that data are there. Who says
    /// nothing settles each.
    fn settles_late(&self) -> bool {
        false
    }

    /// What it keeps with each block besides the block. Who says nothing keeps nothing.
    fn metadata(&self) -> Metadata {
        Metadata::Never
    }

    /// Starts a read or write of blocks with their metadata: each block and its metadata change together, also across power loss.
    /// A [plain](Self::submit) write, or an erasure, leaves blocks with [`NO_METADATA`](crate::NO_METADATA).
    fn submit_tagged<'a>(&'a self, _cx: TaskContext<'a>, _request: TaggedRequest) -> Step<'a> {
        Step::Done(Err(BlockError::Unsupported))
    }

    /// Says how the metadata are shown from now on, or that they are not (NVMe Format). Called beside the data path, after
    /// [`Self::format`] and with no request in flight.
    fn format_metadata(&self, _format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "keeping metadata with its blocks" })
    }

    /// Scratch bytes a request needs at most, inner volumes included: what its futures and lists take.
    fn scratch_bytes(&self) -> usize;

    /// Grows or shrinks the volume. Called beside the data path; requests in flight beyond a new end may fail with
    /// [`BlockError::OutOfRange`]. On error nothing has changed.
    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError>;

    /// Erases the volume's data and gives it a block size, its size in bytes (rounded down) unchanged (NVMe Format). Called
    /// beside the data path, with no request in flight.
    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError>;

    /// Space in use. May ask the system below and wait for it: not called on a shard.
    fn usage(&self) -> Usage;

    /// What is known of the blocks from this one on; `None`: nothing, or there is no such block. May ask the system below and
    /// wait: not called on a shard. Who says nothing knows nothing.
    fn extent(&self, _lba: Lba) -> Option<Extent> {
        None
    }

    /// The file that it is, if that is all. A volume whose inside may be exchanged is none: ask what is inside at the moment.
    fn as_file(&self) -> Option<&dyn PlainFile> {
        None
    }

    /// All that was written here and not made durable is about to be written anew, as to a leg that is taken into use again: a flush that has
    /// failed need not fail those to come. False: they fail all the same. Called with no request in flight; may ask the system below and
    /// wait: not called on a shard. Who says nothing remembers no failure, or goes on failing.
    fn trust_again(&self) -> bool {
        true
    }

    /// Whether a [format](Self::format) first of all destroys the one key under which all of its data are enciphered, wherever
    /// they are (NVMe's Cryptographic Erase). Who says nothing does not promise it.
    fn erases_by_key(&self) -> bool {
        false
    }
}
