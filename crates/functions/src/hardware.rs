//! The functions as the translator takes them: one argument with all that goes in, one with all that comes out. Each becomes a module
//! `hw/rtl/generated/fn_NAME.sv` whose ports have the names of the fields here.

use crate::{
    Command, Config, State, Verdict, chain,
    replicate::{self, Answer, Join, Outcome},
};

/// What [`chain`] is given.
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

/// What [`chain`] tells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainOut {
    /// What becomes of the command.
    pub verdict: Verdict,
    /// The state from then on.
    pub state: State,
}

/// [`chain::submit`].
#[inline(never)]
pub fn chain(input: &ChainIn, output: &mut ChainOut) {
    (output.verdict, output.state) = chain::submit(&input.command, &input.state, &input.config);
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
