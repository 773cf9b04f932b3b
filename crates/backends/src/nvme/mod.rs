//! A volume on a namespace of a physical NVMe controller, driven from this process (docs/nvme-driver.md).
//!
//! ```text
//!   submit ─► check ─► this shard's lane: a hardware queue pair of its own
//!                │       ├─ data in memory that guests share, mapped for the device ─► straight to and from it
//!                │       └─ any other ─► by way of the lane's buffers, piece by piece
//!                │     the task of one command looks at the queue and wakes the others; when nothing comes it sleeps until the
//!                │     queue's interrupt, which is on only then; without one it naps
//!                └─► flush, write zeroes, deallocate, compare, copy: as the controller can, else by reading and writing
//!   the disk's watch (a thread): looks after the controller and who sleeps, has it abort what takes
//!     too long, resets it, or gives it up; another thread maps memory
//! ```
//!
//! Invariants:
//! * A command that was begun ends before its request does: by its completion, or when the controller was stopped and can touch no
//!   memory any more. What a reset has interrupted is begun again; nobody above sees it.
//! * Of a lane's tasks in flight one looks, or sleeps with the interrupt on, or naps; who neither does is woken by who does. Whatever
//!   becomes of the controller, who sleeps is woken: by the interrupt, by who takes its completion, or by the watch.
//! * A controller that is gone fails its requests. Nothing of it is used then, and its device is closed.
//!
//! A namespace that changes its size keeps its volume's as it is: larger, the volume can be resized; smaller, what lies beyond it fails.
//! It formats nothing.

mod disk;
mod lane;
mod line;
mod table;
mod transfer;

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
};

use millrace_block::{
    BlockCount, BlockSize, Geometry, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError, check,
    copy_by_bounce, future_bytes, helpers_scratch_bytes,
};
use millrace_driver::{Namespace, PciAddress, Transport, spec::NamespaceId};

use self::disk::{Disk, chain};
pub use self::{disk::Patience, lane::Waits};
use crate::{
    log::LogLimit,
    shape::{Shape, blocks_in, bytes_in},
};

/// A namespace of a controller, as it is written: `0000:01:00.0`, or `0000:01:00.0/2` for another than the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NvmePlace {
    /// The controller.
    pub address: PciAddress,
    /// The namespace's identifier.
    pub nsid: u32,
}

impl FromStr for NvmePlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, nsid) = text.split_once('/').unwrap_or((text, "1"));
        let address = address.parse::<PciAddress>().map_err(|error| error.to_string())?;
        let plain = nsid.bytes().all(|byte| byte.is_ascii_digit());
        let nsid = nsid.parse().ok().filter(|nsid| plain && (1..=0xffff_fffe).contains(nsid));
        let nsid = nsid.ok_or_else(|| format!("{text:?} names no namespace; write {address}/NUMBER"))?;
        Ok(Self { address, nsid })
    }
}

impl fmt::Display for NvmePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.nsid {
            1 => write!(f, "{}", self.address),
            nsid => write!(f, "{}/{nsid}", self.address),
        }
    }
}

impl NvmePlace {
    /// Files of the system that using it takes.
    pub fn files(&self) -> Vec<std::path::PathBuf> {
        millrace_driver::device_files(self.address)
    }
}

/// What the controller can do.
#[derive(Clone, Copy, Debug)]
struct Abilities {
    compare: bool,
    copy: bool,
    write_zeroes: bool,
    /// Write Zeroes may give space back.
    gives_back: bool,
    flush: bool,
}

/// See the module.
pub struct NvmeVolume {
    name: String,
    disk: Arc<Disk>,
    namespace: Namespace,
    abilities: Abilities,
    shape: Shape,
    log_limit: LogLimit,
    /// Held while the shape changes, never on the data path.
    changing: Mutex<()>,
}

impl fmt::Debug for NvmeVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeVolume").field("name", &self.name).field("address", &self.disk.address()).finish_non_exhaustive()
    }
}

impl NvmeVolume {
    /// Takes a namespace, and its controller if no other volume has it yet. `size` is the volume's size in bytes, of which the first
    /// part of the namespace is used; `None`: all of it.
    ///
    /// # Errors
    /// [`VolumeError::Refused`] with what to do when the controller cannot be had; [`VolumeError::InUse`];
    /// [`VolumeError::BadSize`] and [`VolumeError::BadBlockSize`] for a shape that the namespace cannot have.
    pub fn open(name: &str, place: &NvmePlace, size: Option<u64>, block_size: BlockSize) -> Result<Arc<Self>, VolumeError> {
        Self::on(Disk::open(name, place.address)?, name, place, size, block_size)
    }

    /// As [`open`](Self::open), all of the namespace, over any way to reach a controller: a connection, say. Data go by way of buffers. The
    /// place's address is what it is called.
    pub fn over(
        name: &str,
        place: &NvmePlace,
        transport: impl Transport + 'static,
        patience: Patience,
    ) -> Result<Arc<Self>, VolumeError> {
        let disk = Disk::bring_up(place.address, transport, None, patience);
        let disk = disk.map_err(|error| VolumeError::Refused { volume: name.to_owned(), why: chain(&error) })?;
        Self::on(disk, name, place, None, BlockSize::B512)
    }

    fn on(
        disk: Arc<Disk>,
        name: &str,
        place: &NvmePlace,
        size: Option<u64>,
        block_size: BlockSize,
    ) -> Result<Arc<Self>, VolumeError> {
        let refused = |why: String| VolumeError::Refused { volume: name.to_owned(), why };
        let nsid = NamespaceId(place.nsid);
        let identified = disk.with(|controller| controller.namespace(nsid));
        let identified = identified.ok_or_else(|| refused(format!("PCI function {} is gone", place.address)))?;
        let namespace = identified.map_err(|error| refused(format!("{place}: {}", chain(&error))))?;
        if namespace.block_size() > block_size.bytes() {
            let why = "the namespace's own blocks are larger";
            return Err(VolumeError::BadBlockSize { volume: name.to_owned(), block_size: block_size.bytes(), why });
        }
        let present = bytes_of(&namespace) & !(u64::from(block_size.bytes()) - 1);
        let bytes = size.unwrap_or(present);
        if bytes > present {
            return Err(VolumeError::BadSize { volume: name.to_owned(), size: bytes, why: "the namespace is smaller" });
        }
        blocks_in(name, bytes, block_size)?;
        let shape = Shape::new(block_size, bytes);
        if !disk.claim(&namespace) {
            return Err(VolumeError::InUse { volume: name.to_owned(), path: format!("nvme:{place}").into() });
        }
        let (can, vwc) = (disk.identity.oncs, disk.identity.vwc);
        let abilities = Abilities {
            // Where there are protection information the controller would have to be given them.
            compare: can.compare() && namespace.identify().dps.pit() == 0,
            // Ranges of one namespace, in the format that all have.
            copy: can.copy() && disk.identity.cdfs & 1 != 0 && namespace.most_copied().0 > 0,
            write_zeroes: can.write_zeroes(),
            gives_back: can.write_zeroes() && namespace.identify().dlfeat.write_zeroes(),
            flush: vwc.present(),
        };
        let (name, log_limit) = (name.to_owned(), LogLimit::default());
        Ok(Arc::new(Self { name, disk, namespace, abilities, shape, log_limit, changing: Mutex::default() }))
    }

    /// Has the controller reset, some time soon, as if it had failed: requests in flight are begun again.
    pub fn reset(&self) {
        self.disk.ask_for_reset();
    }

    /// Commands that the controller was asked to abort, because they took too long.
    pub fn aborts(&self) -> usize {
        self.disk.aborts()
    }

    /// How often the controller was reset.
    pub fn resets(&self) -> usize {
        self.disk.resets()
    }

    /// Bytes that the controller has moved between itself and the requests' own memory, and those that went by way of buffers.
    pub fn moved(&self) -> (u64, u64) {
        self.disk.moved()
    }

    /// Commands that the controller was given for requests, of all volumes on it.
    pub fn commands(&self) -> u64 {
        self.disk.commands()
    }

    /// Queue pairs that requests' data have gone through.
    pub fn queues_used(&self) -> usize {
        self.disk.moved_by_queue().filter(|moved| *moved != (0, 0)).count()
    }

    /// Blocks of the namespace, as the controller has told last.
    pub fn present(&self) -> BlockCount {
        self.namespace.size()
    }

    /// How requests to the controller have waited.
    pub fn waits(&self) -> Waits {
        self.disk.waits()
    }
}

fn bytes_of(namespace: &Namespace) -> u64 {
    namespace.size().0.saturating_mul(u64::from(namespace.block_size())).min(i64::MAX as u64)
}

impl Drop for NvmeVolume {
    fn drop(&mut self) {
        self.disk.release(self.namespace.nsid());
    }
}

impl Volume for NvmeVolume {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = self.shape.get();
        let (volatile_cache, deallocate) = (self.abilities.flush, self.abilities.gives_back);
        Geometry { block_size, blocks, read_only: false, volatile_cache, deallocate }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        if request.count.0 == 0 && request.operation != Operation::Flush {
            return Step::Done(Ok(()));
        }
        if self.disk.is_gone() {
            return Step::Done(Err(transfer::fault(request.operation, libc::ENODEV)));
        }
        Step::Wait(match request.operation {
            Operation::Read | Operation::Write { .. } => cx.scratch.place_future(self.transfer(cx, request)),
            Operation::Compare if self.abilities.compare => cx.scratch.place_future(self.transfer(cx, request)),
            Operation::Compare => cx.scratch.place_future(millrace_block::compare_by_reading(self, cx, request)),
            Operation::Flush if !self.abilities.flush => return Step::Done(Ok(())),
            Operation::Flush => cx.scratch.place_future(self.flush(cx, request)),
            Operation::Deallocate if !self.abilities.gives_back => return Step::Done(Ok(())),
            Operation::WriteZeroes { .. } | Operation::Deallocate => cx.scratch.place_future(self.erase(cx, request)),
            Operation::Copy { .. } if self.abilities.copy => cx.scratch.place_future(self.copy(cx, request)),
            Operation::Copy { .. } => cx.scratch.place_future(copy_by_bounce(self, cx, request)),
        })
    }

    fn scratch_bytes(&self) -> usize {
        let moves = future_bytes(Self::transfer);
        helpers_scratch_bytes(moves)
            .max(future_bytes(Self::erase))
            .max(future_bytes(Self::flush))
            .max(future_bytes(Self::copy))
    }

    /// The part by which it grows keeps what it holds.
    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (block_size, _) = self.shape.get();
        let bytes = bytes_in(&self.name, blocks, block_size)?;
        self.disk.measure();
        if bytes > bytes_of(&self.namespace) {
            let why = "the namespace is smaller";
            return Err(VolumeError::BadSize { volume: self.name.clone(), size: bytes, why });
        }
        self.shape.set(block_size, blocks);
        Ok(())
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name.clone(), what: "formatting" })
    }

    fn usage(&self) -> Usage {
        Usage { allocated: self.shape.bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in ["0000:01:00.0", "0000:01:00.0/2", "10000:e1:00.0/4294967294"] {
            assert_eq!(text.parse::<NvmePlace>().unwrap().to_string(), text);
        }
        assert_eq!("0000:01:00.0/1".parse::<NvmePlace>().unwrap().nsid, 1);
        for text in [
            "",
            "0000:01:00.0/",
            "0000:01:00.0/0",
            "0000:01:00.0/+1",
            "0000:01:00.0/4294967295",
            "nvme0n1",
            "0000:01:00.0/1/1",
        ] {
            assert!(text.parse::<NvmePlace>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_function_that_is_not_there_is_named() {
        let place = "ffff:ff:1f.7".parse().unwrap();
        let error = NvmeVolume::open("disk", &place, None, BlockSize::B512).unwrap_err().to_string();
        assert!(error.contains("disk") && error.contains("ffff:ff:1f.7") && error.contains("lspci"), "{error}");
    }
}
