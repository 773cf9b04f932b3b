//! Replication: every disk has all data. Writes go to all, a read to one of them in turn.
//!
//! ```text
//!   write ─► all good disks ─► join: the last answer ends it
//!   read  ─► the next good disk after the last one read ─ failed? ─► another one
//! ```

use crate::{Command, Config, State, status};

/// The lowest of some disks.
#[inline]
fn lowest(disks: u16) -> u16 {
    disks & disks.wrapping_neg()
}

/// The next of some disks after one of them, in turn.
#[inline]
fn next(disks: u16, last: u16) -> u16 {
    let above = disks & !(last | last.wrapping_sub(1));
    lowest(if above == 0 { disks } else { above })
}

/// The disks that a command goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// A bit each.
    pub disks: u16,
    /// There is none.
    pub none: bool,
    /// There is more than one.
    pub several: bool,
}

/// The disks that a command goes to.
#[inline]
pub fn submit(command: &Command, state: &State, config: &Config) -> Choice {
    let all = config.has(Config::REPLICATE);
    let good = if all { config.disks() & !state.failed() } else { config.disks() };
    // Without replication it is the first one.
    let last = if all { state.turn() } else { 0 };
    let to_all = all & !command.only_reads();
    Choice {
        disks: if to_all { good } else { next(good, last) },
        none: good == 0,
        several: to_all & (good & good.wrapping_sub(1) != 0),
    }
}

/// A command that several disks carry out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Join {
    /// Disks that have not answered yet.
    pub pending: u16,
    /// Disks that could not do it.
    pub failed: u16,
    /// The first failure's status.
    pub status: u16,
    /// A disk did it.
    pub done: u8,
}

/// A disk's answer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The disk, a bit.
    pub disk: u16,
    /// Its status.
    pub status: u16,
    /// The command leaves the disks as they are: another disk can do it instead.
    pub reads: u8,
}

/// What becomes of a command when a disk has answered.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// End: the guest's status.
    pub status: u16,
    /// End: disks that are not used any more. Again: the disk that it goes to.
    pub disks: u16,
    /// [`Self::PENDING`], [`Self::END`] or [`Self::AGAIN`].
    pub kind: u8,
}

impl Outcome {
    /// Other disks have not answered yet.
    pub const PENDING: u8 = 0;
    /// The command ends.
    pub const END: u8 = 1;
    /// It goes to another disk.
    pub const AGAIN: u8 = 2;
}

/// Joins a disk's answer. An error that all disks have is the guest's; one that some have is theirs, and they are not used any more.
#[inline]
pub fn complete(join: &Join, answer: &Answer, state: &State, config: &Config) -> (Outcome, Join) {
    let good = answer.status == status::SUCCESS;
    let first = join.failed == 0;
    let join = Join {
        pending: join.pending & !answer.disk,
        failed: if good { join.failed } else { join.failed | answer.disk },
        status: if good || !first { join.status } else { answer.status },
        done: u8::from(good || join.done & 1 != 0),
    };
    if join.pending != 0 {
        return (Outcome { kind: Outcome::PENDING, ..Outcome::default() }, join);
    }
    if join.done != 0 {
        return (Outcome { status: status::SUCCESS, disks: join.failed, kind: Outcome::END }, join);
    }
    let others = config.disks() & !state.failed() & !join.failed;
    if answer.reads & 1 != 0 && config.has(Config::REPLICATE) && others != 0 {
        let disk = lowest(others);
        return (Outcome { status: 0, disks: disk, kind: Outcome::AGAIN }, Join { pending: disk, ..join });
    }
    (Outcome { status: join.status, disks: 0, kind: Outcome::END }, join)
}
