//! What a core asks about every command: namespace, share, throttle, replicate, each as far as it is switched on.
//!
//! ```text
//!   command ─► namespace ─► share ─► throttle ─► replicate ─► pass, fan out
//!                  │ refused            │ too early   │ no disk is left
//!                  ▼                    ▼             ▼
//!                reject                hold         reject
//! ```

use crate::{Command, Config, State, Verdict, namespace, replicate, share, status, throttle};

/// The state that a command needs: its function's.
#[inline]
pub fn key(command: &Command) -> u8 {
    command.function
}

/// What becomes of a command, and the function's state from then on.
#[inline]
pub fn submit(command: &Command, state: &State, config: &Config) -> (Verdict, State) {
    let refused = namespace::check(command, config);
    if refused != status::SUCCESS {
        return (Verdict::reject(refused), *state);
    }
    let disks = replicate::submit(command, state, config);
    if disks == 0 {
        return (Verdict::reject(status::INTERNAL_ERROR), *state);
    }
    let turn = throttle::submit(command, state, config);
    if turn.wait != 0 {
        return (Verdict::hold(command.now.wrapping_add(turn.wait)), *state);
    }
    let read = if command.only_reads() { disks } else { state.turn() };
    let state = State::new(turn.iops, turn.bytes, state.failed(), read);
    (Verdict::go(share::submit(command, config), disks), state)
}
