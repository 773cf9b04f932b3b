//! The whole daemon under random commands of operators, with a program on each volume that knows what each block may hold.
//!
//! ```text
//!   Program ── a thread, a FastPath space ── reads, writes, zeroes, flushes ──► volume ◄── step(): the table of commands
//!     └─ Oracle: each block's writes                                              │          insert, remove, change, fail, rebuild,
//!   15 of them, on stacks of all kinds                                            │          replace, scrub, rekey, resize, migrate,
//!                                                                      the real daemon      copy, upgrade, kill -9, nonsense
//! ```
//!
//! The commands come from one seed, `MILLRACE_TEST_SEED`; `MILLRACE_TEST_RUNS=100` gives 100 times as many. What the programs do comes
//! from it as well, but not when: a failure may want several runs to come again.

mod commands;
mod oracle;
mod program;
mod random;
mod refusals;
mod stack;
mod world;

use random::SEED;
use world::World;

/// Commands in a usual run.
const COMMANDS: u64 = 150;
/// After so many all volumes are compared.
const ROUND: u64 = 25;
/// Where a usual run begins.
const USUAL: u64 = 0x736f_616b;

#[test]
fn volumes_hold_what_programs_wrote_whatever_operators_do() {
    let seed = random::seed(USUAL);
    println!("  {SEED}={seed:#x}");
    let mut world = World::start(seed);
    for number in 1..=random::commands(COMMANDS) {
        commands::step(&mut world);
        if number.is_multiple_of(ROUND) {
            world.compare_all();
        }
    }
    world.compare_all();
    world.note("the end: the daemon is stopped and started again");
    world.daemon_ends(millrace_tests::Daemon::restart);
    world.finish();
}
