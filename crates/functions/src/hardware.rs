//! The functions as the translator takes them: one argument with all that goes in, one with all that comes out. Each becomes a module
//! `hw/rtl/generated/fn_NAME.sv` whose ports have the names of the fields here.

use crate::{
    Command, Config, State, Verdict,
    cache::{self, Decision, Ended, Row},
    chain,
    copy::{self, Action, Event, Job, Route},
    replicate::{self, Answer, Join, Outcome},
    share, throttle,
};

/// What [`chain`](fn@chain) is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainIn {
    /// The command.
    pub command: Command,
    /// Its function's state.
    pub state: State,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`chain`](fn@chain) tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainOut {
    /// What becomes of the command.
    pub verdict: Verdict,
    /// The state from then on, if the command goes: pass and fan out.
    pub state: State,
}

/// [`chain::decide`].
#[inline(never)]
pub fn chain(input: &ChainIn, output: &mut ChainOut) {
    (output.verdict, output.state) = chain::decide(&input.command, &input.state, &input.config);
}

/// What [`join`] is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinIn {
    /// So far.
    pub join: Join,
    /// A disk's answer.
    pub answer: Answer,
    /// The function's state.
    pub state: State,
    /// The function's configuration.
    pub config: Config,
}

/// What [`join`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinOut {
    /// What becomes of the command.
    pub outcome: Outcome,
    /// From then on.
    pub join: Join,
}

/// [`replicate::complete`].
#[inline(never)]
pub fn join(input: &JoinIn, output: &mut JoinOut) {
    (output.outcome, output.join) = replicate::complete(&input.join, &input.answer, &input.state, &input.config);
}

/// What [`share`](fn@share) is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareIn {
    /// The command.
    pub command: Command,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`share`](fn@share) tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareOut {
    /// First block on the disks.
    pub lba: u64,
    /// 1: all blocks are within the window.
    pub within: u8,
}

/// [`share::submit`] and [`share::contains`].
#[inline(never)]
pub fn share(input: &ShareIn, output: &mut ShareOut) {
    output.lba = share::submit(&input.command, &input.config);
    output.within = u8::from(share::contains(&input.command, &input.config));
}

/// What [`throttle`](fn@throttle) is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleIn {
    /// The command.
    pub command: Command,
    /// Its function's state.
    pub state: State,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`throttle`](fn@throttle) tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleOut {
    /// The bucket of commands from then on.
    pub iops: u64,
    /// The bucket of blocks from then on.
    pub bytes: u64,
    /// Early: when to ask again.
    pub until: u32,
    /// 1: it waits.
    pub early: u8,
}

/// [`throttle::submit`].
#[inline(never)]
pub fn throttle(input: &ThrottleIn, output: &mut ThrottleOut) {
    let turn = throttle::submit(&input.command, &input.state, &input.config);
    *output = ThrottleOut { iops: turn.iops, bytes: turn.bytes, until: turn.until, early: u8::from(turn.early) };
}

/// What [`replicate`](fn@replicate) is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicateIn {
    /// The command.
    pub command: Command,
    /// Its function's state.
    pub state: State,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`replicate`](fn@replicate) tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicateOut {
    /// The disks that it goes to.
    pub disks: u16,
}

/// [`replicate::submit`].
#[inline(never)]
pub fn replicate(input: &ReplicateIn, output: &mut ReplicateOut) {
    output.disks = replicate::submit(&input.command, &input.state, &input.config).disks;
}

/// What [`cache_submit`] is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSubmitIn {
    /// The command.
    pub command: Command,
    /// The row of its first block.
    pub row: Row,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`cache_submit`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSubmitOut {
    /// Where it goes.
    pub decision: Decision,
    /// The row from then on.
    pub row: Row,
}

/// [`cache::submit`].
#[inline(never)]
pub fn cache_submit(input: &CacheSubmitIn, output: &mut CacheSubmitOut) {
    (output.decision, output.row) = cache::submit(&input.command, &input.row, &input.config);
}

/// What [`cache_complete`] is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCompleteIn {
    /// What ended.
    pub ended: Ended,
    /// Its row.
    pub row: Row,
}

/// What [`cache_complete`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCompleteOut {
    /// The row from then on.
    pub row: Row,
}

/// [`cache::complete`].
#[inline(never)]
pub fn cache_complete(input: &CacheCompleteIn, output: &mut CacheCompleteOut) {
    output.row = cache::complete(&input.ended, &input.row);
}

/// What [`copy_submit`] is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopySubmitIn {
    /// The command.
    pub command: Command,
    /// The copy.
    pub job: Job,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`copy_submit`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopySubmitOut {
    /// Where the command goes.
    pub route: Route,
    /// The copy from then on.
    pub job: Job,
}

/// [`copy::submit`].
#[inline(never)]
pub fn copy_submit(input: &CopySubmitIn, output: &mut CopySubmitOut) {
    (output.route, output.job) = copy::submit(&input.command, &input.job, &input.config);
}

/// What [`copy_step`] is given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStepIn {
    /// What happened.
    pub event: Event,
    /// The copy.
    pub job: Job,
    /// Its function's configuration.
    pub config: Config,
}

/// What [`copy_step`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStepOut {
    /// What it does next.
    pub action: Action,
    /// The copy from then on.
    pub job: Job,
}

/// [`copy::step`].
#[inline(never)]
pub fn copy_step(input: &CopyStepIn, output: &mut CopyStepOut) {
    (output.action, output.job) = copy::step(&input.event, &input.job, &input.config);
}
