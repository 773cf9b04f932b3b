use proptest::prelude::*;

use super::{config, read};
use crate::{
    Command, Config, State, Verdict, chain, opcode,
    replicate::{Answer, Join, Outcome, complete},
    status,
};

const ERROR: u16 = 0x281;

#[test]
fn reads_go_to_each_good_disk_in_turn() {
    let mirror = config(Config::REPLICATE, 0b1000_0000_0010_0101);
    let mut state = State::new(0, 0, 0b100, 0);
    let mut seen = [0; 5];
    for place in &mut seen {
        let (verdict, after) = chain::submit(&read(7), &state, &mirror);
        assert_eq!(verdict.kind, Verdict::PASS);
        (*place, state) = (verdict.disks, after);
    }
    assert_eq!(seen, [1, 0b10_0000, 0x8000, 1, 0b10_0000]);
}

#[test]
fn writes_go_to_all_good_disks_and_keep_the_turn() {
    let mirror = config(Config::REPLICATE, 0b111);
    let state = State::new(0, 0, 0b001, 0b010);
    for opcode in [opcode::WRITE, opcode::WRITE_ZEROES, opcode::FLUSH] {
        let (verdict, after) = chain::submit(&Command { opcode, ..read(7) }, &state, &mirror);
        assert_eq!((verdict.kind, verdict.disks, after), (Verdict::FAN_OUT, 0b110, state));
    }
    let alone = chain::submit(&Command { opcode: opcode::WRITE, ..read(7) }, &State::new(0, 0, 0b011, 0), &mirror).0;
    assert_eq!((alone.kind, alone.disks), (Verdict::PASS, 0b100));
}

#[test]
fn without_replication_the_first_disk_is_the_one() {
    for opcode in [opcode::WRITE, opcode::READ, opcode::FLUSH] {
        let verdict = chain::submit(&Command { opcode, ..read(7) }, &State::default(), &config(0, 0b1100)).0;
        assert_eq!((verdict.kind, verdict.disks), (Verdict::PASS, 0b100));
    }
}

/// Asks disks until the command ends: its status, the disks that are given up, and how many were asked.
fn run(disks: u16, asked: u16, bad: u16, reads: bool) -> (u16, u16, u32) {
    let config = config(Config::REPLICATE, disks);
    let (mut join, mut count) = (Join { pending: asked, ..Join::default() }, 0);
    loop {
        let disk = 1 << join.pending.ilog2();
        let status = if bad & disk != 0 { ERROR } else { status::SUCCESS };
        let (outcome, after) = complete(&join, &Answer { disk, status, reads: reads.into() }, &State::default(), &config);
        (join, count) = (after, count + 1);
        match outcome.kind {
            Outcome::PENDING => assert_ne!(join.pending, 0),
            Outcome::AGAIN => assert_eq!((join.pending, outcome.disks.count_ones()), (outcome.disks, 1)),
            _ => return (outcome.status, outcome.disks, count),
        }
    }
}

proptest! {
    #[test]
    fn a_write_ends_with_the_last_answer(disks in 1u16.., bad in any::<u16>()) {
        let (status, failed, count) = run(disks, disks, bad, false);
        prop_assert_eq!(count, disks.count_ones());
        if disks & !bad == 0 {
            prop_assert_eq!((status, failed), (ERROR, 0), "what all have is the guest's error");
        } else {
            prop_assert_eq!((status, failed), (status::SUCCESS, disks & bad));
        }
    }

    #[test]
    fn a_read_ends_with_the_first_good_disk(disks in 1u16.., bad in any::<u16>(), pick in 0u32..16) {
        let asked = (0..16).map(|i| 1u16 << ((pick + i) % 16)).find(|disk| disks & disk != 0).unwrap();
        let (status, failed, count) = run(disks, asked, bad, true);
        if disks & !bad == 0 {
            prop_assert_eq!((status, failed, count), (ERROR, 0, disks.count_ones()));
        } else {
            prop_assert_eq!(status, status::SUCCESS);
            prop_assert_eq!(failed & !(disks & bad), 0);
            prop_assert_eq!(failed.count_ones(), count - 1);
        }
    }
}
