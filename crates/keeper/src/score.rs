//! Whom the kernel's memory killer takes: the worker, which is replaced, and not the keeper, which nobody replaces.

use std::fs;

const OWN: &str = "/proc/self/oom_score_adj";
/// The score of what is never taken, and the highest.
const NEVER: i32 = -1000;
const FIRST: i32 = 1000;
/// How far above its own score a keeper puts its workers that may not lower its own.
const ABOVE: i32 = 100;

/// Takes this process out of the killer's sight, if the system lets it. The score that workers are to have: the one that the daemon
/// was given, or a higher one. `None`: the system has no scores.
pub(crate) fn protect_own() -> Option<i32> {
    let given: i32 = fs::read_to_string(OWN).ok()?.trim().parse().ok()?;
    Some(match fs::write(OWN, NEVER.to_string()) {
        // The daemon as a whole may have been given the lowest: its worker is still taken first.
        Ok(()) => given.max(NEVER + 1),
        Err(_) => given.saturating_add(ABOVE).min(FIRST),
    })
}

/// Gives a worker its score. It inherited the keeper's.
pub(crate) fn expose(worker: u32, score: i32) {
    // A system that refuses keeps them alike; the killer prefers the larger one then.
    let _ = fs::write(format!("/proc/{worker}/oom_score_adj"), score.to_string());
}
