use millrace_nvme_spec::pci::offset;

use super::*;
use crate::nvme::{
    fixture::{FakeGuest, test_config},
    registers::Phase,
};

fn read<const N: usize>(guest: &FakeGuest, at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    guest.controller.config_read(at as u64, &mut bytes);
    bytes
}

fn read32(guest: &FakeGuest, at: usize) -> u32 {
    u32::from_le_bytes(read(guest, at))
}

fn write32(guest: &mut FakeGuest, at: usize, value: u32) {
    guest.controller.config_write(at as u64, &value.to_le_bytes());
}

#[test]
fn it_is_an_nvme_controller_with_its_three_capabilities() {
    let guest = FakeGuest::new(test_config());
    assert_eq!(read::<4>(&guest, offset::VENDOR_ID), *b"RM\x01\x00");
    assert_eq!(read::<3>(&guest, offset::CLASS_CODE), [0x02, 0x08, 0x01]);
    assert_eq!(read::<1>(&guest, offset::INTERRUPT_PIN), [1]);
    let mut chain = Vec::new();
    let mut at = usize::from(read::<1>(&guest, offset::CAPABILITIES)[0]);
    while at != 0 {
        let [id, next] = read::<2>(&guest, at);
        chain.push((id, at));
        at = usize::from(next);
    }
    assert_eq!(chain, [(0x01, 0x40), (0x11, 0x50), (0x10, 0x60)]);
    // 9 vectors, table and pending bits in BAR4; an endpoint that can be reset.
    assert_eq!(read::<12>(&guest, 0x50), [0x11, 0x60, 8, 0, 4, 0, 0, 0, 4, 0x20, 0, 0]);
    assert_eq!((read::<2>(&guest, 0x62), read32(&guest, 0x64) >> 28 & 1), ([2, 0], 1));
}

#[test]
fn sizing_finds_the_two_ranges_and_nothing_else() {
    let mut guest = FakeGuest::new(test_config());
    let sizes: Vec<u32> = (0..6)
        .chain([8])
        .map(|bar| {
            let at = offset::BAR0 + bar * 4;
            write32(&mut guest, at, u32::MAX);
            read32(&guest, at)
        })
        .collect();
    assert_eq!(sizes, [0xffff_e004, u32::MAX, 0, 0, 0xffff_c004, u32::MAX, 0]);
    write32(&mut guest, offset::BAR0, 0xfebf_2abc);
    assert_eq!(read32(&guest, offset::BAR0), 0xfebf_2004);
}

#[test]
fn only_what_may_be_written_changes() {
    let mut guest = FakeGuest::new(test_config());
    let before: [u8; 256] = read(&guest, 0);
    // Everything but the reset bit.
    for at in 0..256_u64 {
        let byte = if at == DEVICE_CONTROL_HIGH as u64 { 0x7f } else { 0xff };
        guest.controller.config_write(at, &[byte]);
    }
    let after: [u8; 256] = read(&guest, 0);
    for at in 0..256 {
        let allowed = writable(at) | if at == DEVICE_CONTROL_HIGH { 0x79 } else { 0 };
        assert_eq!((before[at] ^ after[at]) & !allowed, 0, "byte {at:#x}");
        assert_eq!(after[at] & allowed, if at == DEVICE_CONTROL_HIGH { 0x79 } else { allowed }, "byte {at:#x}");
    }
    assert_eq!(guest.controller.phase, Phase::Disabled);
}

#[test]
fn power_states_that_do_not_exist_are_not_entered() {
    let mut guest = FakeGuest::new(test_config());
    for (written, read_back) in [(3, 3), (1, 3), (2, 3), (0, 0)] {
        guest.controller.config_write(0x44, &[written]);
        assert_eq!(read::<1>(&guest, 0x44)[0] & 3, read_back, "after {written}");
    }
}

#[test]
fn function_level_reset_takes_the_controller_and_its_configuration_back() {
    let mut guest = FakeGuest::boot();
    write32(&mut guest, offset::BAR0, 0xfebf_0000);
    guest.controller.config_write(offset::COMMAND as u64, &[6, 0]);
    guest.controller.config_write(0x52, &[0, 0x80]);
    guest.controller.msix_write(0, &[1; 16]);
    let before: [u8; 256] = read(&FakeGuest::new(test_config()), 0);
    let [low, high] = read::<2>(&guest, 0x68);
    guest.controller.config_write(0x68, &[low, high | 0x80]);
    guest.settle();
    assert_eq!(guest.controller.phase, Phase::Disabled);
    assert_eq!(read::<256>(&guest, 0), before);
    let mut entry = [0; 16];
    guest.controller.msix_read(0, &mut entry);
    assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], "vectors start masked");
}

#[test]
fn the_msix_table_reads_back_what_was_written_to_vectors_that_exist() {
    let mut guest = FakeGuest::new(test_config());
    guest.controller.msix_write(16, &[0xab; 16]);
    guest.controller.msix_write(9 * 16, &[0xcd; 16]);
    // Half a word, and beyond the table: nothing.
    guest.controller.msix_write(17, &[0xef; 4]);
    guest.controller.msix_write(16, &[0xef; 3]);
    guest.controller.msix_write(0x1ffc, &[0xff; 64]);
    guest.controller.msix_write(u64::MAX - 3, &[0xff; 4]);
    let mut table = vec![0; 0x4000];
    guest.controller.msix_read(0, &mut table);
    let mut expected = vec![0; 0x4000];
    (0..9).for_each(|vector| expected[vector * 16 + 12] = 1);
    expected[16..28].fill(0xab);
    assert_eq!(table, expected);
}

#[test]
fn accesses_across_the_end_touch_what_is_there() {
    let mut guest = FakeGuest::new(test_config());
    let mut bytes = [0xff; 8];
    guest.controller.config_read(252, &mut bytes);
    assert_eq!(bytes, [0; 8]);
    guest.controller.config_write(252, &[0xff; 8]);
    guest.controller.config_write(u64::MAX, &[0xff]);
    assert_eq!(read::<4>(&guest, 252), [0; 4]);
}

#[test]
fn extended_configuration_space_is_there_and_empty() {
    let mut guest = FakeGuest::new(test_config());
    guest.controller.config_write(256, &[0xff; 64]);
    let mut bytes = vec![0xff; EXTENDED_CONFIG_SIZE - 256];
    guest.controller.config_read(256, &mut bytes);
    assert_eq!(bytes, vec![0; EXTENDED_CONFIG_SIZE - 256]);
}
