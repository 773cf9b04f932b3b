//! Cache: a fast leg in front of a slow one. `cache(mode=back, FAST) | SLOW`.
//!
//! ```text
//!   read ─► in the table? ─ yes ─► fast leg: still the same line? done
//!                         └ no ──► slow leg ─► (blocks locked) a copy to the fast leg
//!   write, through ─► slow leg ─► fast leg            write, back ─► fast leg; the blocks are dirty
//!   flush, back ────► commit: flush legs ─► pages of the table that changed ─► flush
//!   upkeep ─────────► dirty lines ─► slow leg ─► commit: now they can go
//!   long requests, and what finds no room ─► around: the slow leg alone
//! ```
//!
//! Files: `table` where lines are · `policy` which goes (S3-FIFO) · `path` requests · `around` what passes the cache by · `commit` what makes
//! dirty data durable · `unflushed` what flushes lose that fail · `upkeep` writing back · `disk` the format · `mount` coming and going · `format` erasing all · `command` the operator's side.
//!
//! Invariants:
//! * The slow leg has the volume's blocks at their own places. What it lacks is dirty in the table, and the fast leg has it.
//! * A block that is dirty in the table on the fast leg has its newest flushed data in that slot: data are durable before their entry, and
//!   an entry is durably clean before its slot is given to another line.
//! * An entry is durably clean only when the slow leg has the data durably.
//! * Unless `ack=fast` says otherwise, a write is acknowledged when the table on the fast leg says of its blocks what is so: the death of the
//!   process, which is no power cut to the guest, loses nothing.
//! * After a crash only dirty blocks of the table count; everything else is read from the slow leg.
//! * A hit takes no lock and writes nothing that other shards read, but a counter of two bits in its first three uses.
//!
//! It does not mark the slow leg: its blocks are the volume's from the first to the last, so that a cache can be put over data that are
//! there and taken away again. It does not mirror: what is dirty is on one leg only.

mod around;
mod command;
mod commit;
mod disk;
mod format;
mod mount;
mod path;
mod policy;
mod table;
#[cfg(test)]
mod tests;
mod unflushed;
mod upkeep;

use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockError, BlockSize, Geometry, Lba, PerShard, Volume};

use self::{
    disk::{LEAST_LINE, MOST_LINE, Superblock},
    policy::Policy,
    table::Table,
    unflushed::{BESIDE, Failures, Unflushed, WRITTEN},
};
use crate::{
    legs::{Leg, common_block_size},
    locks::{Ranges, Turn},
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "cache",
    help: "a fast leg in front of a slow one: cache(mode=back, FAST) | SLOW",
    legs: 2..=2,
    settings: &[
        Word { name: "mode", help: "through: writes go to both legs; back: to the fast one, and later to the slow one" },
        Word {
            name: "ack",
            help: "of back: durable: a write is answered when a crash of the daemon cannot lose it; fast: before that [durable]",
        },
        Word { name: "line", help: "bytes that come and go together: a power of two, 4K to 64 blocks [32K]" },
        Word { name: "around", help: "requests of at least so many bytes pass the cache by; 0: none [256K]" },
        Word { name: "rate", help: "bytes per second at most that are written back beside requests [64M]" },
    ],
    commands: &[
        Word { name: "flush", help: "writes back everything that is dirty now; volume show tells how far it is" },
        Word { name: "resume", help: "uses the fast leg again after it failed" },
    ],
    shares_legs: false,
    is_disk: false,
    samples: &[
        "cache(mode=through, line=4K, ?, ?)",
        "cache(mode=back, line=8K, around=16K, rate=1T, ?, ?)",
        "cache(mode=back, ack=fast, line=4K, ?, ?)",
    ],
    plan,
};

/// A line where none is set, as a power of two.
const USUAL_LINE: u32 = 15;
/// Where requests begin to pass by if nothing is set.
const USUAL_AROUND: u64 = 256 << 10;
/// Bytes written back each second if nothing is set.
const USUAL_RATE: u64 = 64 << 20;

/// Legs by number.
const FAST: usize = 0;
const SLOW: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Through,
    Back,
}

#[derive(Clone, Copy, Debug)]
struct CachePlan {
    mode: Mode,
    /// What a crash of the process must not lose is durable before it is acknowledged.
    ack_durable: bool,
    line_shift: Option<u32>,
    /// Bytes; `u64::MAX`: never.
    around: u64,
    rate: u64,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let mode = match settings.required("mode")? {
        "through" => Mode::Through,
        "back" => Mode::Back,
        other => return Err(SettingError::new("mode", format!("{other:?} is neither through nor back"))),
    };
    let ack_durable = match settings.text("ack") {
        None | Some("durable") => true,
        Some("fast") => false,
        Some(other) => return Err(SettingError::new("ack", format!("{other:?} is neither durable nor fast"))),
    };
    let line = settings.size("line")?;
    if line.is_some_and(|line| !line.is_power_of_two() || !(1 << LEAST_LINE..=1 << MOST_LINE).contains(&line)) {
        return Err(SettingError::new("line", "a power of two from 4K to 256K is possible"));
    }
    let around = match settings.size("around")?.unwrap_or(USUAL_AROUND) {
        0 => u64::MAX,
        bytes => bytes,
    };
    let rate = settings.size("rate")?.unwrap_or(USUAL_RATE);
    if rate < 4096 {
        return Err(SettingError::new("rate", "at least 4K a second"));
    }
    Ok(Box::new(CachePlan { mode, ack_durable, line_shift: line.map(u64::trailing_zeros), around, rate }))
}

impl Plan for CachePlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Same(vec![SLOW])
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        let stated = |leg: usize| stated.get(leg).copied().flatten();
        vec![stated(FAST), Some(stated(SLOW).unwrap_or(0).max(size))]
    }

    fn keeps_size(&self) -> bool {
        true
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let block_size = common_block_size(&build.legs)?;
        let [fast, slow] = &build.legs[..] else {
            return Err(ServiceError::Legs("a cache has two legs: the fast one and the slow one".to_owned()));
        };
        if Arc::ptr_eq(fast, slow) {
            return Err(ServiceError::Legs(format!("{} stands there twice: it cannot be its own cache", fast.name())));
        }
        for (what, leg) in [("fast", fast), ("slow", slow)] {
            if leg.geometry().read_only {
                return Err(ServiceError::Legs(format!("the {what} leg ({}) is read-only", leg.name())));
            }
        }
        let line_shift = self.line_shift.unwrap_or(USUAL_LINE);
        if line_shift > block_size.shift() + 6 {
            let most = (block_size.bytes() * 64) >> 10;
            let why = format!("a line has 64 blocks at most: {most}K with blocks of {} bytes", block_size.bytes());
            return Err(SettingError::new("line", why).into());
        }
        let (fast_bytes, slow_bytes) = (fast.geometry().bytes(), slow.geometry().bytes());
        // Where no line is set, that of the cache which is there counts.
        let line_shift = self.line_shift.unwrap_or(LEAST_LINE);
        if disk::Plan::for_leg(fast_bytes, line_shift).is_none() {
            return Err(ServiceError::Legs(format!(
                "the fast leg ({}) has {fast_bytes} bytes, which is too small: 8 lines of {}K and their table must fit",
                fast.name(),
                (1_u64 << line_shift) >> 10
            )));
        }
        let bytes = build.size.unwrap_or(slow_bytes);
        if bytes > slow_bytes || bytes == 0 {
            return Err(ServiceError::Legs(format!(
                "the slow leg ({}) has {slow_bytes} bytes and the volume {bytes}: it must have all of the volume's blocks",
                slow.name()
            )));
        }
        Ok(Cache::new(build, *self, bytes))
    }
}

/// What happened so far, on one shard.
#[derive(Debug, Default)]
struct Counters {
    read_hits: AtomicU64,
    read_misses: AtomicU64,
    write_hits: AtomicU64,
    write_misses: AtomicU64,
    passed_by: AtomicU64,
    evicted: AtomicU64,
    written_back: AtomicU64,
    /// Lines that became dirty, less those that became clean.
    dirty_lines: AtomicU64,
}

/// What is there once it was mounted.
#[derive(Debug)]
struct Core {
    plan: disk::Plan,
    table: Table,
    policy: Mutex<Policy>,
    ranges: Ranges,
}

/// The turn to commit, and how many commits there were.
#[derive(Debug, Default)]
struct Commits {
    turn: Turn,
    started: AtomicU64,
    /// The last one that succeeded.
    finished: AtomicU64,
}

/// Writing back that was asked for.
#[derive(Debug, Default)]
struct Flushing {
    /// Slots that are yet to be looked at for the command.
    left: AtomicU32,
    done: AtomicU64,
    total: AtomicU64,
    /// The slot where the next try to take everything out begins: one that was cut short goes on behind what was refused.
    hand: AtomicU32,
}

/// See the module.
pub(crate) struct Cache {
    name: String,
    label: String,
    me: Weak<Cache>,
    fast: Leg,
    slow: Leg,
    /// The fast leg is in memory: once the daemon was stopped, it is empty.
    forgets: bool,
    plan: CachePlan,
    /// Bytes of data.
    bytes: u64,
    /// Block size and abilities.
    shape: AtomicU8,
    core: OnceLock<Core>,
    /// The superblock on the fast leg says so, too.
    in_force: AtomicBool,
    commits: Commits,
    /// Whoever moves dirty lines to the slow leg, or commits that, has it for one of them; a format has it, and the turn to commit, throughout.
    moving: Turn,
    counters: PerShard<Counters>,
    /// Since the last flush of the slow or the fast leg.
    slow_unflushed: Unflushed,
    fast_unflushed: Unflushed,
    failures: Failures,
    /// There may be blocks that only the fast leg has.
    may_be_dirty: AtomicBool,
    /// The fast leg failed: of what it has only dirty blocks are used.
    broken: AtomicBool,
    /// A format erased the slow leg, and the fast one does not say so: see `format`.
    void: AtomicBool,
    /// It is about to be taken out: writes go through.
    leaving: AtomicBool,
    /// For that everything is being written back, which takes as long as it takes.
    draining: AtomicBool,
    flushing: Flushing,
    /// The superblock as it was stored last, and its generation.
    superblock: Mutex<Option<(Superblock, u64)>>,
    /// What names it, and whether it has dirty lines on the fast leg, while it is out of force.
    left: Mutex<Option<([u8; 16], bool)>>,
    /// What a leg said last, for the status.
    trouble: Mutex<Option<String>>,
    /// Which copy of the superblock was damaged when the cache was opened.
    damaged: Mutex<Option<String>>,
}

fn pack(geometry: &Geometry) -> u8 {
    u8::from(geometry.block_size == BlockSize::B4096)
        | u8::from(geometry.volatile_cache) << 1
        | u8::from(geometry.deallocate) << 2
}

/// A part of one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    line: u64,
    /// Its blocks.
    mask: u64,
    /// Bytes into the line where it begins.
    at: u64,
    /// Its bytes.
    len: u64,
}

impl Core {
    fn new(plan: disk::Plan) -> Self {
        Self { plan, table: Table::new(plan.slots), policy: Mutex::new(Policy::new(plan.slots)), ranges: Ranges::new() }
    }

    /// The part of its line that a range of bytes begins with.
    #[inline]
    fn part(&self, start: u64, end: u64, shift: u32) -> Part {
        let line_shift = self.plan.line_shift;
        let (line, at) = (start >> line_shift, start & ((1 << line_shift) - 1));
        let len = (end - start).min((1 << line_shift) - at);
        let (first, count) = (at >> shift, len >> shift);
        let mask = if count == 0 { 0 } else { u64::MAX >> (64 - count) << first };
        Part { line, mask, at, len }
    }

    /// The page of the table on the fast leg that tells of a slot.
    fn page(&self, slot: u32, block_size: BlockSize) -> u32 {
        slot / self.plan.per_page(block_size)
    }

    /// The bytes of a line.
    fn line_bytes(&self, line: u64) -> std::ops::Range<u64> {
        line << self.plan.line_shift..(line + 1) << self.plan.line_shift
    }
}

impl Cache {
    fn new(build: Build<'_>, plan: CachePlan, bytes: u64) -> Arc<Self> {
        let [fast, slow] = [FAST, SLOW].map(|leg| Arc::clone(&build.legs[leg]));
        let forgets = build.sizing_of(FAST).is_in_memory;
        Arc::new_cyclic(|me| {
            let cache = Self {
                name: build.name,
                label: build.volume.to_owned(),
                me: Weak::clone(me),
                fast,
                slow,
                forgets,
                plan,
                bytes,
                shape: AtomicU8::new(0),
                core: OnceLock::new(),
                in_force: AtomicBool::new(false),
                commits: Commits::default(),
                moving: Turn::default(),
                counters: PerShard::default(),
                slow_unflushed: Unflushed::new(WRITTEN | BESIDE),
                fast_unflushed: Unflushed::default(),
                failures: Failures::default(),
                may_be_dirty: AtomicBool::new(plan.mode == Mode::Back),
                broken: AtomicBool::new(false),
                void: AtomicBool::new(false),
                leaving: AtomicBool::new(false),
                draining: AtomicBool::new(false),
                flushing: Flushing::default(),
                superblock: Mutex::new(None),
                left: Mutex::new(None),
                trouble: Mutex::new(None),
                damaged: Mutex::new(None),
            };
            cache.look_again();
            cache
        })
    }

    /// Its shape now.
    #[inline]
    fn shape(&self) -> Geometry {
        let shape = self.shape.load(Ordering::Relaxed);
        let block_size = if shape & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
        let blocks = BlockCount(self.bytes >> block_size.shift());
        Geometry { block_size, blocks, read_only: false, volatile_cache: shape & 2 != 0, deallocate: shape & 4 != 0 }
    }

    /// Asks the slow leg again what it can.
    fn look_again(&self) {
        let geometry = self.slow.geometry();
        let volatile_cache = geometry.volatile_cache || self.may_be_dirty.load(Ordering::Relaxed);
        self.shape.store(pack(&Geometry { volatile_cache, ..geometry }), Ordering::Relaxed);
    }

    #[inline]
    fn is_in_force(&self) -> bool {
        self.in_force.load(Ordering::Relaxed)
    }

    /// What there is while it is in force.
    #[inline]
    fn core(&self) -> Result<&Core, BlockError> {
        self.core.get().filter(|_| self.is_in_force()).ok_or(BlockError::NotReady)
    }

    /// Whether writes go to the fast leg only.
    #[inline]
    fn writes_back(&self) -> bool {
        self.plan.mode == Mode::Back && !self.leaving.load(Ordering::Relaxed) && !self.is_broken()
    }

    #[inline]
    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// A place on the fast leg.
    #[inline]
    fn place(core: &Core, slot: u32, at: u64, shift: u32) -> Lba {
        Lba((core.plan.data(slot) + at) >> shift)
    }

    fn superblock(&self) -> MutexGuard<'_, Option<(Superblock, u64)>> {
        self.superblock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lines with dirty blocks.
    fn dirty_lines(&self) -> u64 {
        // Each shard's part is read at a moment of its own: for an instant the sum may be below nothing.
        let sum = self.counters.sum(|here| &here.dirty_lines);
        if sum > u64::MAX / 2 { 0 } else { sum }
    }

    /// The fast leg failed: from now on it is not used, but for what only it has.
    fn fast_failed(&self, what: &str, error: impl std::fmt::Display) {
        let text = format!("{what}: {error}");
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        if self.broken.swap(true, Ordering::Relaxed) {
            return;
        }
        let (leg, dirty) = (self.fast.name(), self.dirty_lines());
        if dirty == 0 {
            tracing::error!(cache = self.name, leg, what, %error, "the fast leg failed; the volume goes on without its cache. When it is well \
                again: \"volume command VOLUME cache resume\"; or take the cache out with \"volume change\"");
        } else {
            tracing::error!(cache = self.name, leg, what, %error, dirty_lines = dirty, "the fast leg failed, and dirty lines are only on it: \
                writes go to the slow leg now, reads of those lines may fail. Bring the leg back, then \"volume command VOLUME cache resume\"");
        }
    }
}
