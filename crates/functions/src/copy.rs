//! Direct copy: a namespace is copied to another disk while its guest goes on.
//!
//! ```text
//!   blocks     0 ─────────── at ──── at + 32 ──────────── copied
//!                  both        held         the source only         a guest's writes
//!
//!   ready ─► drain ─► read ─► write ─► ready …  ─► done          one window of 32 blocks after the other
//!              └ until writes from before the window was set have ended
//! ```
//!
//! Behind the window a write goes to both disks, so what was copied stays the same; ahead of it to the source, as it will be copied. In the window
//! it waits. A write that was on its way to the source when the window came is waited for: writes are counted in two epochs, which change with every
//! window, and the older one must be empty before the window is read. When all is copied both disks are the same, and stay so.

use crate::{Command, Config, LBA_MASK};

/// Blocks of a window: 128 KiB at most.
pub const WINDOW: u64 = 32;

const PHASE: u32 = 48;
const EPOCH: u64 = 1 << 51;
/// Writes of an epoch that are counted at most.
const MOST_WRITES: u64 = 0xffff;

/// What a copy does.
pub mod phase {
    /// Between two windows.
    pub const READY: u8 = 0;
    /// Earlier writes have to end.
    pub const DRAIN: u8 = 1;
    /// The window is read.
    pub const READ: u8 = 2;
    /// The window is written.
    pub const WRITE: u8 = 3;
    /// All is copied.
    pub const DONE: u8 = 4;
    /// A disk failed; nothing is copied any more.
    pub const FAILED: u8 = 5;
}

/// A copy's state; all zeroes is its beginning.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Bits 47:0 the window's first block, 50:48 phase, 51 epoch.
    pub at: u64,
    /// Writes that have not ended: bits 15:0 of epoch 0, 31:16 of epoch 1.
    pub writes: u32,
}

impl Job {
    /// The window's first block.
    #[inline]
    pub fn first(&self) -> u64 {
        self.at & LBA_MASK
    }

    /// One of [`phase`].
    #[inline]
    pub fn phase(&self) -> u8 {
        (self.at >> PHASE) as u8 & 7
    }

    #[inline]
    fn with(self, phase: u8, first: u64) -> Self {
        Self { at: (self.at & EPOCH) | (u64::from(phase) << PHASE) | (first & LBA_MASK), ..self }
    }

    /// The epoch of a write that goes now.
    #[inline]
    pub fn epoch(&self) -> u8 {
        u8::from(self.at & EPOCH != 0)
    }

    /// Writes of an epoch that have not ended.
    #[inline]
    fn count(&self, epoch: u8) -> u64 {
        u64::from(if epoch & 1 == 0 { self.writes } else { self.writes >> 16 }) & MOST_WRITES
    }

    /// One write more or less, which is 1 or the 16 bits that undo it.
    #[inline]
    fn counted(self, epoch: u8, change: u16) -> Self {
        let count = (self.count(epoch) as u16).wrapping_add(change);
        let writes = if epoch & 1 == 0 {
            (self.writes & 0xffff_0000) | u32::from(count)
        } else {
            (self.writes & 0xffff) | (u32::from(count) << 16)
        };
        Self { writes, ..self }
    }
}

/// Where a guest's command goes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Both: first block on the target.
    pub target: u64,
    /// Write: to be told when it ends.
    pub epoch: u8,
    /// [`Self::SOURCE`], [`Self::BOTH`] or [`Self::HOLD`].
    pub kind: u8,
}

impl Route {
    /// To the source.
    pub const SOURCE: u8 = 0;
    /// To source and target.
    pub const BOTH: u8 = 1;
    /// It is to be asked again, when the window has gone on.
    pub const HOLD: u8 = 2;
}

/// Where a guest's command goes, and the copy from then on. `command.slba` is within the namespace.
#[inline]
pub fn submit(command: &Command, job: &Job, config: &Config) -> (Route, Job) {
    let slba = command.slba & LBA_MASK;
    let (first, phase, epoch) = (job.first(), job.phase(), job.epoch());
    let last = slba + u64::from(command.nlb_z);
    let moving = (phase == phase::DRAIN) | (phase == phase::READ) | (phase == phase::WRITE);
    let within = moving & (slba < first + WINDOW) & (last >= first);
    let flush = command.is_flush();
    let behind = flush | (phase == phase::DONE) | (slba < first);
    let full = job.count(epoch) == MOST_WRITES;
    let mut route = Route { target: (config.target_start() + slba) & LBA_MASK, epoch, kind: Route::SOURCE };
    if command.only_reads() {
        return (route, *job);
    }
    if (within & !flush) | full {
        route.kind = Route::HOLD;
        return (route, *job);
    }
    route.kind = if behind & (phase != phase::FAILED) { Route::BOTH } else { Route::SOURCE };
    (route, job.counted(epoch, 1))
}

/// What happened to a copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// A guest's write: its epoch.
    pub epoch: u8,
    /// [`Self::TURN`], [`Self::MOVED`], [`Self::FAILED`] or [`Self::WRITTEN`].
    pub kind: u8,
}

impl Event {
    /// It is the copy's turn.
    pub const TURN: u8 = 0;
    /// The read or write that it asked for is done.
    pub const MOVED: u8 = 1;
    /// The read or write that it asked for failed.
    pub const FAILED: u8 = 2;
    /// A guest's write ended.
    pub const WRITTEN: u8 = 3;
}

/// What a copy does next.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    /// Read, write: first block, of the source or the target.
    pub lba: u64,
    /// Read, write: blocks, 0's based.
    pub nlb_z: u16,
    /// [`Self::WAIT`], [`Self::READ`], [`Self::WRITE`] or [`Self::END`].
    pub kind: u8,
}

impl Action {
    /// Nothing.
    pub const WAIT: u8 = 0;
    /// Reads the window of the source.
    pub const READ: u8 = 1;
    /// Writes what was read to the target.
    pub const WRITE: u8 = 2;
    /// It is done, or failed.
    pub const END: u8 = 3;
}

/// The next step of a copy, and the copy from then on.
#[inline]
pub fn step(event: &Event, job: &Job, config: &Config) -> (Action, Job) {
    let (first, phase) = (job.first(), job.phase());
    let left = config.to_copy().wrapping_sub(first) & LBA_MASK;
    let window = if left < WINDOW { left } else { WINDOW };
    let mut action = Action { lba: first, nlb_z: (window as u16).wrapping_sub(1) & 31, kind: Action::WAIT };
    let mut after = *job;
    match event.kind {
        Event::TURN if phase == phase::READY => {
            if first < config.to_copy() {
                after = job.with(phase::DRAIN, first);
                after.at ^= EPOCH;
            } else {
                after = job.with(phase::DONE, first);
                action.kind = Action::END;
            }
        }
        Event::TURN if phase == phase::DRAIN && job.count(job.epoch() ^ 1) == 0 => {
            after = job.with(phase::READ, first);
            action.kind = Action::READ;
        }
        Event::MOVED if phase == phase::READ => {
            after = job.with(phase::WRITE, first);
            action.lba = (config.target_start() + first) & LBA_MASK;
            action.kind = Action::WRITE;
        }
        Event::MOVED if phase == phase::WRITE => after = job.with(phase::READY, first + window),
        Event::FAILED if phase == phase::READ || phase == phase::WRITE => {
            after = job.with(phase::FAILED, first);
            action.kind = Action::END;
        }
        Event::WRITTEN if job.count(event.epoch) != 0 => after = job.counted(event.epoch, u16::MAX),
        _ => {}
    }
    (action, after)
}
