use proptest::prelude::*;

use super::{config, read};
use crate::{Command, Config, LBA_MASK, State, Verdict, chain, opcode, status};

/// What counts of a verdict: kind, status of a reject, block and disks of others.
fn gist(verdict: &Verdict) -> (u8, u16, u64, u16) {
    match verdict.kind {
        Verdict::REJECT => (Verdict::REJECT, verdict.status, 0, 0),
        kind => (kind, 0, verdict.lba, verdict.disks),
    }
}

fn ask(command: &Command, config: &Config) -> (u8, u16, u64, u16) {
    gist(&chain::submit(command, &State::default(), config).0)
}

fn rejected(status: u16) -> (u8, u16, u64, u16) {
    (Verdict::REJECT, status, 0, 0)
}

fn goes(lba: u64, disks: u16) -> (u8, u16, u64, u16) {
    (u8::from(disks.count_ones() > 1), 0, lba, disks)
}

#[test]
fn refuses_in_the_software_controllers_order() {
    let plain = config(Config::READ_ONLY, 1);
    let all_wrong = Command { nsid: 2, slba: 1000, nlb_z: 256, opcode: opcode::WRITE, ..read(0) };
    assert_eq!(ask(&all_wrong, &plain), rejected(status::INVALID_NAMESPACE));
    let named = Command { nsid: 1, ..all_wrong };
    assert_eq!(ask(&named, &plain), rejected(status::LBA_OUT_OF_RANGE));
    let within = Command { slba: 0, ..named };
    assert_eq!(ask(&within, &plain), rejected(status::INVALID_FIELD));
    let small = Command { nlb_z: 255, ..within };
    assert_eq!(ask(&small, &plain), rejected(status::READ_ONLY));
    assert_eq!(ask(&Command { opcode: opcode::COMPARE, ..small }, &plain), goes(0, 1));
    let zeroes = Command { opcode: opcode::WRITE_ZEROES, nlb_z: 999, ..small };
    assert_eq!(ask(&zeroes, &config(0, 1)), goes(0, 1), "moves nothing: MDTS says nothing about it");
    assert_eq!(ask(&small, &Config { namespace: plain.namespace & !Config::ENABLED, ..plain }).0, Verdict::REJECT);
}

#[test]
fn a_flush_names_no_blocks_and_may_mean_all_namespaces() {
    let plain = config(Config::READ_ONLY | Config::REPLICATE, 0b110);
    let flush = Command { opcode: opcode::FLUSH, slba: 0, nlb_z: u16::MAX, nsid: u32::MAX, ..read(0) };
    assert_eq!(ask(&flush, &plain), goes(0, 0b110));
    assert_eq!(ask(&Command { nsid: u32::MAX, ..read(0) }, &plain), rejected(status::INVALID_NAMESPACE));
}

#[test]
fn large_blocks_reach_mdts_sooner() {
    let plain = config(0, 1);
    let large = Config { namespace: plain.namespace ^ (9 << 32) | (12 << 32), ..plain };
    assert_eq!(ask(&Command { nlb_z: 31, ..read(0) }, &large), goes(0, 1));
    assert_eq!(ask(&Command { nlb_z: 32, ..read(0) }, &large), rejected(status::INVALID_FIELD));
}

#[test]
fn no_disk_is_an_error_and_not_a_verdict_without_disks() {
    assert_eq!(ask(&read(0), &config(0, 0)), rejected(status::INTERNAL_ERROR));
    let (verdict, state) = chain::submit(&read(0), &State::new(1, 2, 0b11, 1), &config(Config::REPLICATE, 0b11));
    assert_eq!((gist(&verdict), state), (rejected(status::INTERNAL_ERROR), State::new(1, 2, 0b11, 1)));
}

fn any_command() -> impl Strategy<Value = Command> {
    let opcodes = prop_oneof![
        Just(opcode::FLUSH),
        Just(opcode::WRITE),
        Just(opcode::READ),
        Just(opcode::COMPARE),
        Just(opcode::WRITE_ZEROES)
    ];
    let slba = prop_oneof![0..1100u64, any::<u64>()];
    let nsid = prop_oneof![4 => Just(1u32), 1 => any::<u32>()];
    let nlb_z = prop_oneof![0..300u16, any::<u16>()];
    (slba, nsid, any::<u32>(), nlb_z, opcodes, any::<u8>(), any::<u8>()).prop_map(
        |(slba, nsid, now, nlb_z, opcode, function, queue)| Command { slba, nsid, now, nlb_z, opcode, function, queue },
    )
}

proptest! {
    /// Nothing a guest writes reaches a block outside its window, or a disk that is not its own, or has failed.
    #[test]
    fn what_goes_stays_within(
        command in any_command(),
        words in any::<[u64; 5]>(),
        small in any::<bool>(),
        (a, b) in any::<(u64, u64)>(),
    ) {
        let [namespace, blocks, share, iops, bytes] = words;
        let namespace = namespace & !0xffff_ffff | 1 | Config::ENABLED;
        let blocks = if small { blocks % 2000 } else { blocks & LBA_MASK };
        let config = Config { namespace, blocks, share: share & (LBA_MASK >> 1), iops, bytes, ..Config::default() };
        let state = State { a, b };
        let (verdict, after) = chain::submit(&command, &state, &config);
        match verdict.kind {
            Verdict::PASS | Verdict::FAN_OUT => {
                prop_assert_eq!(verdict.kind == Verdict::FAN_OUT, verdict.disks.count_ones() > 1);
                prop_assert!(verdict.disks != 0 && verdict.disks & !config.disks() == 0);
                prop_assert!(!config.has(Config::REPLICATE) || verdict.disks & state.failed() == 0);
                prop_assert!(command.only_reads() || !config.has(Config::READ_ONLY) || command.is_flush());
                if !command.is_flush() {
                    let last = u128::from(command.slba) + u128::from(command.nlb_z);
                    prop_assert!(last < u128::from(blocks));
                    prop_assert_eq!(verdict.lba, (config.start() + command.slba) & LBA_MASK);
                }
                prop_assert_eq!(after.failed(), state.failed());
            }
            Verdict::HOLD => {
                prop_assert!(config.has(Config::THROTTLE) && verdict.until != command.now);
                prop_assert_eq!(after, state);
            }
            _ => {
                prop_assert!(verdict.kind == Verdict::REJECT && verdict.status != status::SUCCESS);
                prop_assert_eq!(after, state);
            }
        }
    }
}
