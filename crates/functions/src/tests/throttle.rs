use proptest::prelude::*;

use super::{config, read};
use crate::{
    Command, Config, State, Verdict, chain, opcode,
    throttle::{self, FRACTION},
};

/// Units of time until a command goes, and the state then; what is held is asked again when the verdict said.
fn go(state: State, mut command: Command, config: &Config) -> (u32, State) {
    for _ in 0..4 {
        let (verdict, after) = chain::submit(&command, &state, config);
        if verdict.kind != Verdict::HOLD {
            return (command.now, after);
        }
        command.now = verdict.until;
    }
    panic!("{command:?} is held again and again by {config:?} in {state:?}");
}

fn throttled(time: u64, burst: u64) -> Config {
    Config { iops: (time << FRACTION) | (burst << (32 + FRACTION)), ..config(Config::THROTTLE, 1) }
}

#[test]
fn a_burst_goes_at_once_and_then_the_rate() {
    let config = throttled(10, 50);
    let (mut state, mut at, mut gone) = (State::default(), 1000, [0; 10]);
    for place in &mut gone {
        (at, state) = go(state, Command { now: at, ..read(0) }, &config);
        *place = at;
    }
    // 50 units are six commands: the one that ends the burst still goes.
    assert_eq!(gone, [1000, 1000, 1000, 1000, 1000, 1000, 1010, 1020, 1030, 1040]);
}

#[test]
fn bytes_are_counted_and_erasing_moves_none() {
    let bytes = 2 << FRACTION;
    let config = Config { bytes, ..config(Config::THROTTLE, 1) };
    let command = Command { nlb_z: 99, ..read(0) };
    let (at, state) = go(State::default(), command, &config);
    assert_eq!(at, 1000);
    assert_eq!(go(state, command, &config).0, 1200);
    let zeroes = Command { opcode: opcode::WRITE_ZEROES, ..command };
    let (at, state) = go(State::default(), zeroes, &config);
    assert_eq!((at, go(state, command, &config).0), (1000, 1000));
    assert_eq!(go(state, Command { opcode: opcode::FLUSH, ..command }, &config).1, state, "a flush is free");
}

#[test]
fn without_times_nothing_is_held() {
    let config = Config { namespace: config(Config::THROTTLE, 1).namespace, blocks: 1000, ..Config::default() };
    let mut state = State::default();
    for _ in 0..1000 {
        let (at, after) = go(state, Command { nlb_z: 255, ..read(0) }, &config);
        assert_eq!(at, 1000);
        state = after;
    }
}

#[test]
fn time_wraps_and_an_idle_function_owes_nothing() {
    let config = throttled(100, 0);
    let command = Command { now: u32::MAX - 5, ..read(0) };
    let full = u64::from(command.now) << FRACTION;
    let (at, state) = go(State::new(full, full, 0, 0), command, &config);
    assert_eq!(at, u32::MAX - 5);
    assert_eq!(go(state, command, &config).0, 94, "over the end of time");
    for idle in [101, 1 << 20, 1 << 31, u32::MAX - (1 << 22)] {
        let late = Command { now: command.now.wrapping_add(idle), ..command };
        assert!(!throttle::submit(&late, &state, &config).early, "after {idle}");
    }
}

proptest! {
    /// Over any time no more goes than the rate, one burst and one command; and what wants to go always goes in the end.
    #[test]
    fn caps_hold_over_any_time(
        time in 1u64..5000,
        burst in 0u64..20_000,
        start in any::<u32>(),
        pauses in proptest::collection::vec(0u32..6000, 60),
        blocks in proptest::collection::vec(0u16..256, 60),
        of_bytes in any::<bool>(),
    ) {
        // Times in fractions of units, so that they are no whole numbers.
        let cap = (time * 37) | ((burst * 37) << 32);
        let base = config(Config::THROTTLE, 1);
        let config = if of_bytes { Config { bytes: cap, ..base } } else { Config { iops: cap, ..base } };
        let (mut state, mut now) = (State::default(), start);
        let mut gone: std::vec::Vec<(u64, u64)> = std::vec::Vec::new();
        for (pause, nlb_z) in pauses.iter().zip(&blocks) {
            let asked = now.wrapping_add(*pause);
            let (at, after) = go(state, Command { now: asked, nlb_z: *nlb_z, ..read(0) }, &config);
            (state, now) = (after, at);
            let cost = time * 37 * if of_bytes { u64::from(*nlb_z) + 1 } else { 1 };
            gone.push((u64::from(now.wrapping_sub(start)) << FRACTION, cost));
        }
        for first in 0..gone.len() {
            let mut taken = 0;
            for (at, cost) in &gone[first..] {
                prop_assert!(taken <= (at - gone[first].0) + burst * 37, "from {first}");
                taken += cost;
            }
        }
    }
}
