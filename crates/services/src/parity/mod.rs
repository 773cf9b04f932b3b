//! Parity (RAID 5, RAID 6): chunks go round over the legs, and in each stripe one or two chunks are parity of the others.
//!
//! ```text
//!   write ─► region marked? ─► rows locked ─► copied; what parity needs is read ─┬─ in part, or a leg is missing: journal first
//!                                                                                └─ whole rows: no journal
//!            or, over legs in memory, within a chunk: data and parity in place, in one pass
//!            ─► all changed parts, wait for all ─► a leg failed? recorded on the others ─► done
//!   read ──► its leg ─► missing, or failed? the other parts of the rows, and the missing one is computed (and written again)
//!   mount ─► the journal is carried out again ─► parity of marked regions is made to fit, a leg that lacks something is filled
//!
//!   leg:     chunks, from its first byte on … │ members │ bitmap │ void │ journal
//! ```
//!
//! Invariants:
//! * A write is acknowledged when every leg it changes has it, or is durably recorded as failed on the others.
//! * Rows that are written in part, or while a leg is missing, are written when the journal has them durably: a crash at any
//!   instant, with a leg lost at once, changes no other block of these rows. Where all legs are memory nothing outlives
//!   the power, and rows of one chunk go to their places at once: what a worker leaves that is killed is made to fit by the bitmap, unless a
//!   leg goes at that very moment (`log=all` closes that).
//! * An entry of the journal is void only when everything it says is durable in its place; rows with entries that are not are
//!   written by way of the journal.
//! * Where a part is known by the others alone, and some of them have what an entry says and some do not, nothing is read or
//!   written until the entry was carried out again.
//! * Whoever computes a part from the others, or writes parity, has the rows locked.
//!
//! It does not guess: rows whose parity does not fit are reported, and repaired where two parity chunks tell which part is wrong.

mod codec;
mod command;
mod in_place;
mod journal;
mod layout;
mod mount;
mod path;
mod rows;
mod scrub;
#[cfg(test)]
mod tests;
mod upkeep;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockSize, Geometry, Volume, VolumeError};

use self::{
    journal::{Journal, SLOT},
    layout::Layout,
    scrub::Scrub,
};
use crate::{
    legs::{Leg, common_geometry},
    locks::Turn,
    members::{Members, Rules, TABLES, check_legs, region_setting, region_shift, state::MOST_LEGS},
    pieces::{Map, Mapped, Place},
    service::{self, Build, Kind, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "parity",
    help: "chunks go round over the legs with parity (RAID 5, RAID 6): one or two of them may be lost",
    legs: 3..=MOST_LEGS,
    settings: &[
        Word { name: "redundancy", help: "how many legs may be lost: 1 or 2 [1]" },
        Word { name: "chunk", help: "size of a chunk: a power of two from 4K to 16M [64K]" },
        Word { name: "safe", help: "every read checks the parity: an error instead of data that do not fit [false]" },
        Word {
            name: "log",
            help: "what goes by way of the journal: partial (all but whole rows over good legs), or all (then a power cut with a \
                   leg lost at once tears no row) [partial]",
        },
        Word { name: "journal", help: "bytes of the journal on each leg: a multiple of 64K from 128K to 64M [1M]" },
        Word {
            name: "region",
            help: "what one bit of the write-intent bitmap stands for on each leg: a power of two from 64K [4M, more for large \
                   volumes]",
        },
        Word { name: "rate", help: "bytes per second and leg at most for rebuild, resync and scrub [256M]" },
    ],
    commands: &[
        Word { name: "fail", help: "leg=N: takes a leg out of use" },
        Word { name: "rebuild", help: "leg=N: fills a failed leg again, with only what it missed where possible" },
        Word { name: "scrub", help: "checks all parity; repairs what can be decided, reports the rest" },
        Word { name: "stop", help: "ends a scrub" },
    ],
    shares_legs: false,
    is_disk: false,
    samples: &[
        "parity(chunk=4K, journal=128K, region=64K, ?, ?, ?)",
        "parity(chunk=8K, journal=128K, log=all, safe=true, ?, ?, ?)",
        "parity(redundancy=2, chunk=4K, journal=128K, ?, ?, ?, ?)",
    ],
    plan,
};

/// Sizes a chunk may have.
const CHUNKS: std::ops::RangeInclusive<u64> = 4096..=16 << 20;
/// Sizes of the journal.
const JOURNALS: std::ops::RangeInclusive<u64> = 2 * SLOT..=64 << 20;
/// Bytes per second of rebuild, resync and scrub where none are set.
const USUAL_RATE: u64 = 256 << 20;

#[derive(Clone, Copy, Debug)]
struct ParityPlan {
    chunk: u64,
    redundancy: usize,
    safe: bool,
    log_all: bool,
    journal: u64,
    region_shift: Option<u32>,
    rate: u64,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let chunk = settings.size("chunk")?.unwrap_or(64 << 10);
    if !chunk.is_power_of_two() || !CHUNKS.contains(&chunk) {
        return Err(SettingError::new("chunk", "a power of two from 4K to 16M is possible"));
    }
    let redundancy = settings.parsed("redundancy", "1 or 2")?.unwrap_or(1);
    if !(1..=2).contains(&redundancy) {
        return Err(SettingError::new("redundancy", "1 or 2 is possible"));
    }
    let log_all = match settings.text("log") {
        None | Some("partial") => false,
        Some("all") => true,
        Some(_) => return Err(SettingError::new("log", "partial or all")),
    };
    let journal = settings.size("journal")?.unwrap_or(1 << 20);
    if !journal.is_multiple_of(SLOT) || !JOURNALS.contains(&journal) {
        return Err(SettingError::new("journal", "a multiple of 64K from 128K to 64M is possible"));
    }
    let rate = settings.size("rate")?.unwrap_or(USUAL_RATE);
    if rate < 4096 {
        return Err(SettingError::new("rate", "at least 4K a second"));
    }
    let (safe, region_shift) = (settings.flag("safe")?, region_setting(settings)?);
    Ok(Box::new(ParityPlan { chunk, redundancy, safe, log_all, journal, region_shift, rate }))
}

impl ParityPlan {
    fn layout(&self, legs: usize) -> Layout {
        Layout { chunk: self.chunk, legs, parity: self.redundancy }
    }

    fn rules(&self, layout: &Layout) -> Rules {
        Rules {
            service: "parity",
            table_magic: *b"MPMEMBER",
            page_magic: *b"MPINTENT",
            area: TABLES + Journal::bytes(layout, self.journal),
            least: layout.data(),
            placed: true,
            form: [layout.chunk as u32, layout.parity as u32, self.journal as u32, 1],
            form_settings: ["chunk", "redundancy", "journal", ""],
            note_magic: None,
        }
    }
}

impl Plan for ParityPlan {
    fn layout(&self, _: usize) -> service::Layout {
        service::Layout::Spread { how: format!("parity {} {}", self.chunk, self.redundancy), spare: self.redundancy }
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        let layout = self.layout(stated.len().max(self.redundancy + 1));
        let each = self.rules(&layout).leg_bytes(layout.leg_bytes(size));
        stated.iter().map(|stated| Some(stated.unwrap_or(0).max(each))).collect()
    }

    fn goes_without_others(&self) -> bool {
        true
    }

    fn keeps_size(&self) -> bool {
        true
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let block_size = build.block_size;
        check_legs(&build.legs)?;
        let least = self.redundancy + 2;
        if build.legs.len() < least {
            let why = format!("{} legs; with redundancy={} there must be {least}", build.legs.len(), self.redundancy);
            return Err(ServiceError::Legs(why));
        }
        let layout = self.layout(build.legs.len());
        let rules = self.rules(&layout);
        let smallest = build.legs.iter().map(|leg| leg.geometry().bytes()).min().unwrap_or(0);
        let room = (smallest >> 12 << 12).saturating_sub(rules.area) / self.chunk * self.chunk;
        let bytes = build.size.unwrap_or_else(|| room.saturating_mul(layout.data() as u64));
        let on_each = layout.leg_bytes(bytes);
        if bytes < u64::from(block_size.bytes()) || room < on_each {
            return Err(ServiceError::Legs(format!(
                "the smallest leg has {smallest} bytes; {bytes} bytes with parity need {} on each",
                rules.leg_bytes(on_each.max(self.chunk))
            )));
        }
        let region_shift = region_shift(self.region_shift, on_each)?;
        let (name, legs) = (build.name.clone(), build.legs.clone());
        let geometry = common_geometry(&legs, block_size, BlockCount(bytes >> block_size.shift()));
        let shift = AtomicU32::new(block_size.shift());
        let reader =
            Mapped::new(name.clone(), legs.clone(), ParityMap { layout, bytes: AtomicU64::new(bytes), shift }, block_size);
        Ok(Arc::new(Parity {
            name,
            members: Members::new(rules, build, on_each, region_shift),
            legs,
            plan: *self,
            layout,
            shape: AtomicU8::new(pack(&geometry)),
            reader,
            journal: Journal::new(layout, self.journal),
            flush_turn: Turn::default(),
            stopped: AtomicBool::new(false),
            counters: Counters::default(),
            scrub: Mutex::default(),
        }))
    }
}

/// Where the data are.
struct ParityMap {
    layout: Layout,
    /// Of the volume.
    bytes: AtomicU64,
    /// Power of two of the bytes of a block.
    shift: AtomicU32,
}

impl Map for ParityMap {
    fn blocks(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed) >> self.shift.load(Ordering::Relaxed)
    }

    #[inline]
    fn locate(&self, lba: u64) -> Place {
        let shift = self.shift.load(Ordering::Relaxed);
        let (stripe, chunk, row) = self.layout.locate(lba << shift);
        let at = stripe * self.layout.chunk + row;
        Place { leg: self.layout.leg(stripe, chunk), lba: at >> shift, run: (self.layout.chunk - row) >> shift }
    }

    fn set_blocks(&self, _: u64) {}

    fn capacity(&self, _: &[Leg]) -> u64 {
        self.blocks()
    }

    fn enlarge(&self, name: &str, _: &[Leg], _: u64) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: name.to_owned(), what: "resizing" })
    }

    fn formatted(&self, _: &[Leg], block_size: BlockSize) {
        self.shift.store(block_size.shift(), Ordering::Relaxed);
        // What does not fill a larger block is not shown again.
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.bytes.store(bytes >> block_size.shift() << block_size.shift(), Ordering::Relaxed);
    }
}

/// What went wrong so far, and what was done about it.
#[derive(Debug, Default)]
struct Counters {
    read_errors: AtomicU64,
    repaired: AtomicU64,
    /// Reads that were refused because the parity did not fit.
    refused: AtomicU64,
    /// Entries of the journal that were carried out again.
    replayed: AtomicU64,
}

/// See the module.
pub(crate) struct Parity {
    name: String,
    members: Arc<Members>,
    legs: Vec<Leg>,
    plan: ParityPlan,
    layout: Layout,
    /// Block size and abilities.
    shape: AtomicU8,
    /// The way of reads while nothing is missing.
    reader: Mapped<ParityMap>,
    journal: Journal,
    /// The turn to make what was written durable, so that the journal has room.
    flush_turn: Turn,
    /// Only an opening, which carries the journal out again, makes it right again.
    stopped: AtomicBool,
    counters: Counters,
    scrub: Mutex<Scrub>,
}

fn pack(geometry: &Geometry) -> u8 {
    u8::from(geometry.block_size == BlockSize::B4096)
        | u8::from(geometry.volatile_cache) << 1
        | u8::from(geometry.deallocate) << 2
}

impl Parity {
    /// Bytes of the volume.
    #[inline]
    fn bytes(&self) -> u64 {
        self.reader.map().bytes.load(Ordering::Relaxed)
    }

    /// Its shape now.
    #[inline]
    fn shape(&self) -> Geometry {
        let shape = self.shape.load(Ordering::Relaxed);
        let block_size = if shape & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
        let blocks = BlockCount(self.bytes() >> block_size.shift());
        Geometry { block_size, blocks, read_only: false, volatile_cache: shape & 2 != 0, deallocate: shape & 4 != 0 }
    }

    /// Asks the legs again what they can.
    fn look_again(&self, block_size: BlockSize) {
        self.reader.look_anew(block_size);
        let blocks = BlockCount(self.bytes() >> block_size.shift());
        self.shape.store(pack(&common_geometry(&self.legs, block_size, blocks)), Ordering::Relaxed);
    }

    fn scrub(&self) -> MutexGuard<'_, Scrub> {
        self.scrub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the journal begins on a leg.
    fn journal_of(&self, leg: usize) -> u64 {
        self.members.rules.area_of(&*self.legs[leg]) + TABLES
    }
}
