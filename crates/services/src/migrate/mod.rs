//! Move: a leg goes to another place while it is in use. What `millrace volume migrate` puts in the leg's place, and takes out at the end.
//!
//! ```text
//!   read, compare ───────────────────────────────────────────────► OLD
//!   write ─► range locked ─► where is the walk? ─┬─ before it: ──► OLD            the walk will come to it
//!                                                └─ past it: copied once ─► OLD and NEW, wait for both
//!   walk  ─► range locked ─► a hole? ─┬─ no: ──► OLD ─► NEW ─┬─► the mark goes on ─► at the end: flush NEW ─► NEW is whole: the manager
//!                                     └─ yes: zeroes ─► NEW ─┘                                                   puts it in our place
//!
//!   0 ─────────── both have it ────────────► mark ─── only OLD has it ───────────────► end
//! ```
//!
//! Invariants:
//! * OLD has everything all the time: the migration can end at any instant, by a crash too, and nothing has happened.
//! * Below the mark NEW has what OLD has, but for writes under way. Who writes holds its range and only then looks where the mark is;
//!   the mark passes a range only under its lock.
//! * What counts as a hole held nothing when the move was put in, with no request in flight; whoever writes there says so first, under
//!   the range's lock.
//! * NEW is whole only after a flush of NEW that began when every flush of the guest went to both.
//! * An error of NEW ends the migration and is no guest's; an error of OLD is the guest's, and what it was about is walked over again.
//!
//! It keeps nothing on its legs: opened again it begins at the start, and compares before it writes. It decides nothing about the end:
//! `graph::change` asks [`Service::leg_is_whole`], once more while no request is in flight.

mod command;
mod holes;
mod path;
pub mod stacks;
#[cfg(test)]
mod tests;
mod walk;

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use millrace_block::{BlockError, BlockSize, Volume};

use self::holes::Holes;
use crate::{
    legs::{Leg, common_block_size},
    locks::Ranges,
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word, of_type},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: SERVICE,
    help: "the first leg is being migrated to the second (volume migrate puts it there, and takes it out)",
    legs: 2..=2,
    settings: &[
        Word { name: "rate", help: "bytes per second at most [as many as there can be]" },
        Word { name: "piece", help: "bytes copied at once, which writes wait for: a power of two from 4K to 4M [256K]" },
    ],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["move(piece=16K, ?, ?)"],
    plan,
};

/// Its word in an expression.
pub const SERVICE: &str = "move";
/// The leg that has the data.
const OLD: usize = 0;
/// The leg that is to have them.
const NEW: usize = 1;
/// Bytes copied at once where nothing is set.
const USUAL_PIECE: u64 = 256 << 10;
const PIECES: std::ops::RangeInclusive<u64> = 4096..=4 << 20;
/// Least bytes per second.
const LEAST_RATE: u64 = 4096;

#[derive(Clone, Copy, Debug)]
struct MovePlan {
    rate: Option<u64>,
    piece: u64,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let rate = settings.size("rate")?;
    if rate.is_some_and(|rate| rate < LEAST_RATE) {
        return Err(SettingError::new("rate", "at least 4K a second"));
    }
    let piece = settings.size("piece")?.unwrap_or(USUAL_PIECE);
    if !piece.is_power_of_two() || !PIECES.contains(&piece) {
        return Err(SettingError::new("piece", "a power of two from 4K to 4M is possible"));
    }
    Ok(Box::new(MovePlan { rate, piece }))
}

impl Plan for MovePlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Moving
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        stated.iter().map(|stated| Some(stated.unwrap_or(0).max(size))).collect()
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        common_block_size(&build.legs)?;
        let (old, new) = (Arc::clone(&build.legs[OLD]), Arc::clone(&build.legs[NEW]));
        if let Some(size) = build.size {
            check_sizes(&*old, &*new)?;
            let has = old.geometry().bytes();
            if size > has {
                return Err(ServiceError::Legs(format!("{} has {has} bytes, and {size} are needed", old.name())));
            }
        }
        if let Some(leg) = [&old, &new].into_iter().find(|leg| leg.geometry().read_only) {
            return Err(ServiceError::Legs(format!("{} is read-only", leg.name())));
        }
        Ok(Arc::new(Move::new(build.name, old, new, *self)))
    }
}

/// Refuses a new leg of another size: what is above may keep something at its leg's end, so the end must not move.
fn check_sizes(old: &dyn Volume, new: &dyn Volume) -> Result<(), ServiceError> {
    let (has, gets) = (old.geometry().bytes(), new.geometry().bytes());
    let (what, how) = match gets.cmp(&has) {
        std::cmp::Ordering::Equal => return Ok(()),
        std::cmp::Ordering::Less => ("too small", "more"),
        std::cmp::Ordering::Greater => ("too large", "less"),
    };
    let name = new.name();
    Err(ServiceError::Legs(format!(
        "{name} is {what}: it has {gets} bytes, and what is to go there {has}; give it {how} (of a file or a block device, only what is \
         needed is used)"
    )))
}

/// Bytes that both legs have.
fn common_bytes(old: &dyn Volume, new: &dyn Volume) -> u64 {
    old.geometry().bytes().min(new.geometry().bytes())
}

/// How far it is. The walk alone makes it go on, and whoever finds NEW failing puts an end to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    /// The mark is on its way.
    Copying,
    /// The mark was at the end, and NEW is being flushed; flushes of the guest go to both.
    Flushing,
    /// NEW was flushed with the mark at the end. It is whole as long as the mark is there.
    Flushed,
    /// NEW is not written any more.
    Ended,
}

impl Phase {
    fn of(number: u8) -> Self {
        match number {
            0 => Self::Copying,
            1 => Self::Flushing,
            2 => Self::Flushed,
            _ => Self::Ended,
        }
    }
}

/// What the walk has done.
#[derive(Debug, Default)]
struct Counters {
    written: AtomicU64,
    zeroes: AtomicU64,
    holes: AtomicU64,
}

/// See the module.
pub(crate) struct Move {
    name: String,
    old: Leg,
    new: Leg,
    plan: MovePlan,
    /// Bytes of data.
    bytes: AtomicU64,
    ranges: Ranges,
    /// Both have what lies before it.
    mark: AtomicU64,
    phase: AtomicU8,
    /// What held nothing when it began, if anything is known of that.
    holes: OnceLock<Arc<Holes>>,
    /// NEW may have much of it already.
    compare: AtomicBool,
    /// Why it has ended.
    failure: Mutex<Option<String>>,
    counters: Counters,
}

/// How a migration is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// So many bytes of so many are on the new leg.
    Copying(u64, u64),
    /// The new leg has everything, durably what was flushed, and goes on having it.
    Whole,
    /// It has ended: why.
    Failed(String),
}

/// How a migration is doing; `None` when the service is none.
pub fn progress(service: &Arc<dyn Service>) -> Option<Progress> {
    Some(of_type::<Move>(service)?.progress())
}

impl Move {
    fn new(name: String, old: Leg, new: Leg, plan: MovePlan) -> Self {
        let bytes = common_bytes(&*old, &*new);
        Self {
            name,
            old,
            new,
            plan,
            bytes: AtomicU64::new(bytes),
            ranges: Ranges::new(),
            mark: AtomicU64::new(0),
            phase: AtomicU8::new(Phase::Copying as u8),
            holes: OnceLock::new(),
            compare: AtomicBool::new(true),
            failure: Mutex::default(),
            counters: Counters::default(),
        }
    }

    #[inline]
    fn phase(&self) -> Phase {
        Phase::of(self.phase.load(Ordering::SeqCst))
    }

    #[inline]
    fn mark(&self) -> u64 {
        self.mark.load(Ordering::SeqCst)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether only OLD is written there. To be asked under the range's lock.
    #[inline]
    fn is_ahead(&self, range: &Range<u64>) -> bool {
        self.mark() <= range.start || self.phase() == Phase::Ended
    }

    /// Whether NEW has everything.
    fn is_whole(&self) -> bool {
        // In this order: the walk leaves the phase before the mark goes on again.
        self.mark() == self.bytes() && self.phase() == Phase::Flushed && self.mark() == self.bytes()
    }

    /// Something may be written there. To be called under the range's lock.
    #[inline]
    fn fill(&self, range: &Range<u64>) {
        if let Some(holes) = self.holes.get() {
            holes.fill(range);
        }
    }

    /// The walk goes over it again from there.
    fn step_back(&self, to: u64) {
        self.compare.store(true, Ordering::Relaxed);
        self.mark.fetch_min(to, Ordering::SeqCst);
    }

    /// The walk's next phase, unless it has ended.
    fn enter(&self, phase: Phase) {
        let next = |now| (Phase::of(now) != Phase::Ended).then_some(phase as u8);
        // Ended: stays so.
        let _ = self.phase.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }

    /// Ends it: from now on only OLD is written.
    #[cold]
    fn end(&self, why: String) {
        {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            if failure.is_none() {
                tracing::error!(
                    volume = self.name,
                    from = self.old.name(),
                    to = self.new.name(),
                    "the migration has ended: {why}"
                );
                *failure = Some(why);
            }
        }
        self.phase.store(Phase::Ended as u8, Ordering::SeqCst);
    }

    /// NEW has failed.
    #[cold]
    fn end_by(&self, error: BlockError) {
        self.end(format!("{} cannot be written: {error}", self.new.name()));
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn progress(&self) -> Progress {
        match self.failure() {
            Some(why) => Progress::Failed(why),
            None if self.is_whole() => Progress::Whole,
            None => Progress::Copying(self.mark(), self.bytes()),
        }
    }
}
