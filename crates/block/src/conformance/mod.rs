//! What every volume must do, as a suite that any volume can be put through.
//!
//! ```text
//!   Subject (makes volumes, says what they promise) ──► run ──► checks, one after the other, each on a fresh volume
//!                                                        │        └─► Bench: bytes in, bytes out
//!                                                        └──► Harness: drives requests in flight (SyncHarness, or a shard)
//! ```
//!
//! A failed check panics and names the volume, the check and the seed. [`SyncHarness`] needs no engine; it delays, reorders
//! and, if asked to, maltreats the I/O below, and it gives each request exactly the scratch its volume asks for.

mod bench;
mod checks;
mod data;
mod disk;
mod passing;
mod sync_io;
mod workload;

use std::{fmt, sync::Arc};

use millrace_memory::Segment;

pub use self::{
    bench::{Bench, Memory},
    disk::{CrashDisk, Power},
    sync_io::{SyncHarness, SyncIo},
};
use crate::{BlockCount, BlockError, BlockSize, Lba, Operation, Request, Volume};

/// A request that owns its list of segments.
#[derive(Clone, Debug)]
pub struct Job {
    /// See [`Request::operation`].
    pub operation: Operation,
    /// See [`Request::lba`].
    pub lba: Lba,
    /// See [`Request::count`].
    pub count: BlockCount,
    /// See [`Request::segments`].
    pub segments: Vec<Segment>,
}

impl Job {
    /// A request without data.
    pub fn new(operation: Operation, lba: u64, count: u64) -> Self {
        Self { operation, lba: Lba(lba), count: BlockCount(count), segments: Vec::new() }
    }

    /// The request, borrowing the list.
    pub fn request(&self) -> Request<'_> {
        Request { operation: self.operation, lba: self.lba, count: self.count, segments: &self.segments }
    }
}

/// Something that can drive requests to their ends.
pub trait Harness {
    /// Submits all jobs before any is waited for, and returns their results in their order.
    fn run(&mut self, volume: &Arc<dyn Volume>, jobs: &[Job]) -> Vec<Result<(), BlockError>>;
}

/// A volume a check asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Its block size.
    pub block_size: BlockSize,
    /// Its number of blocks.
    pub blocks: u64,
    /// Whether it refuses writes.
    pub read_only: bool,
}

/// The kind of volume under test, and what it promises beyond the trait.
pub struct Subject<'a> {
    /// Makes a fresh volume; `None` where this kind cannot be so (read-only, or with this block size).
    pub make: &'a mut dyn FnMut(Wanted) -> Option<Arc<dyn Volume>>,
    /// It keeps what is written to it.
    pub stores_data: bool,
    /// A fresh volume, and the part a volume grew by, read as zeroes.
    pub starts_zeroed: bool,
    /// It can be resized.
    pub resizes: bool,
    /// It can be made smaller as well.
    pub shrinks: bool,
    /// It can be formatted to either block size.
    pub formats: bool,
    /// Where everything random comes from.
    pub seed: u64,
}

impl fmt::Debug for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl<'a> Subject<'a> {
    /// A kind of volume that can do everything.
    pub fn new(seed: u64, make: &'a mut dyn FnMut(Wanted) -> Option<Arc<dyn Volume>>) -> Self {
        Self { make, stores_data: true, starts_zeroed: true, resizes: true, shrinks: true, formats: true, seed }
    }
}

/// Puts a kind of volume through the whole suite.
///
/// # Panics
/// When it fails.
pub fn run(harness: &mut dyn Harness, subject: &mut Subject<'_>) {
    let mut made = 0;
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        eprintln!("conformance: seed {}, {block_size:?}", subject.seed);
        for check in checks::ALL {
            if check.needs_data && !subject.stores_data {
                continue;
            }
            let wanted = Wanted { block_size, blocks: checks::BLOCKS, read_only: check.read_only };
            let Some(volume) = (subject.make)(wanted) else { continue };
            eprintln!("conformance: {}: {}", volume.name(), check.name);
            made += usize::from(!check.read_only);
            (check.run)(&mut Bench::new(harness, volume, subject.seed), &checks::Promises::of(subject));
        }
    }
    assert!(made > 0, "no volume was made, so that nothing was checked");
}

/// A small, seeded source of numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not 0. (Its slight bias does not matter here.)
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.number().to_le_bytes());
        words.take(len).collect()
    }
}
