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
    let (verdict, after) = decide(command, state, config);
    (verdict, if verdict.goes() { after } else { *state })
}

/// The same, but that the state means something only if the command goes. For a circuit, whose user stores it only then.
#[inline]
pub fn decide(command: &Command, state: &State, config: &Config) -> (Verdict, State) {
    let refused = namespace::check(command, config);
    let turn = throttle::submit(command, state, config);
    let choice = replicate::submit(command, state, config);
    let kind = if (refused != status::SUCCESS) | choice.none {
        Verdict::REJECT
    } else if turn.early {
        Verdict::HOLD
    } else {
        // Pass and fan out are neighbours.
        Verdict::PASS + u8::from(choice.several)
    };
    let status = if refused == status::SUCCESS { status::INTERNAL_ERROR } else { refused };
    let verdict = Verdict { lba: share::submit(command, config), until: turn.until, status, disks: choice.disks, kind };
    let read = if command.only_reads() { choice.disks } else { state.turn() };
    (verdict, State::new(turn.iops, turn.bytes, state.failed(), read))
}
