//! Get Log Page.

use millrace_block::BlockSize;
use millrace_nvme_spec::{
    command::{CommandId, NamespaceId, QueueId, Sqe},
    log::{CommandEffectsLog, ErrorEntry, FirmwareSlotLog, LogId, SmartLog, SupportedLogPages},
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    status::Status,
};

use super::{
    super::super::{
        fixture::{FakeGuest, sqe},
        registers::Reset,
    },
    admin, code, expect, expect_reading, read_block, reading,
};

/// Get Log Page for `len` bytes from the page's start.
pub(super) fn log_page(lid: LogId, len: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::GET_LOG_PAGE, 0);
    let numd_z = len / 4 - 1;
    sqe.cdw10 = u32::from(lid.0) | (numd_z & 0xffff) << 16;
    sqe.cdw11 = numd_z >> 16;
    sqe
}

#[test]
fn the_pages_are_those_that_are_listed() {
    let mut guest = FakeGuest::boot();
    let supported: SupportedLogPages = reading(&mut guest, log_page(LogId::SUPPORTED, 1024));
    for lid in 0..=u8::MAX {
        let status = if supported.lids[usize::from(lid)].lsupp() { Status::SUCCESS } else { Status::INVALID_LOG_PAGE };
        expect_reading(&mut guest, log_page(LogId(lid), 4096), status);
    }
    assert_eq!(supported.lids.iter().filter(|page| page.lsupp()).count(), 7);
}

#[test]
fn offsets_and_lengths_are_checked() {
    let mut guest = FakeGuest::boot();
    let whole = expect_reading(&mut guest, log_page(LogId::FIRMWARE_SLOT, 4096), Status::SUCCESS);
    assert_eq!(&whole[8..16], b"0.1.0   ");
    assert!(whole[512..].iter().all(|byte| *byte == 0), "nothing lies beyond the page");
    for (low, high, status) in [
        (8, 0, Status::SUCCESS),
        (512, 0, Status::SUCCESS),
        (516, 0, Status::INVALID_FIELD),
        (2, 0, Status::INVALID_FIELD),
        (0, 1, Status::INVALID_FIELD),
        (u32::MAX, u32::MAX, Status::INVALID_FIELD),
    ] {
        let mut sqe = log_page(LogId::FIRMWARE_SLOT, 512);
        (sqe.cdw12, sqe.cdw13) = (low, high);
        let part = expect_reading(&mut guest, sqe, status);
        if status.is_success() {
            assert_eq!(part[..8], whole[low as usize..low as usize + 8]);
        }
    }
    // An offset in entries; a length beyond MDTS; the longest length.
    let mut by_index = log_page(LogId::ERROR, 64);
    by_index.cdw14 = 1 << 23;
    expect(&mut guest, by_index, Status::INVALID_FIELD);
    let most = guest.controller.config.max_transfer() as u32;
    let (cqe, _) = guest.command_reading(0, log_page(LogId::ERROR, most), most as usize);
    assert_eq!(code(&cqe), Status::SUCCESS);
    expect(&mut guest, log_page(LogId::ERROR, most + 4), Status::INVALID_FIELD);
    let mut longest = log_page(LogId::ERROR, 4);
    (longest.cdw10, longest.cdw11) = (longest.cdw10 | 0xffff << 16, 0xffff);
    expect(&mut guest, longest, Status::INVALID_FIELD);
}

#[test]
fn pages_belong_to_the_controller() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    for (nsid, status) in [
        (0, Status::SUCCESS),
        (u32::MAX, Status::SUCCESS),
        (1, Status::INVALID_FIELD),
        (65, Status::INVALID_NAMESPACE_OR_FORMAT),
    ] {
        let mut sqe = log_page(LogId::SMART, 512);
        sqe.nsid = NamespaceId(nsid);
        expect_reading(&mut guest, sqe, status);
    }
}

#[test]
fn errors_are_logged_newest_first() {
    let mut guest = FakeGuest::boot();
    guest.make_queues(1, 64);
    let first = guest.admin(admin(AdminOpcode::SANITIZE, 0));
    let second = guest.command(1, sqe(NvmOpcode::READ.0, 99));
    let log = log_page(LogId::ERROR, 4096);
    let entries: [ErrorEntry; 64] = reading(&mut guest, log);
    assert_eq!((entries[0].ecnt, entries[0].sqid, entries[0].cid), (2, QueueId(1), second.cid));
    assert_eq!(entries[0].status.status(), second.status());
    assert_eq!((entries[1].ecnt, entries[1].sqid, entries[1].cid), (1, QueueId(0), first.cid));
    assert_eq!(entries[1].status.status(), Status::INVALID_OPCODE.do_not_retry());
    assert_eq!((entries[2].ecnt, entries[2].cid), (0, CommandId(0)));
    for _ in 0..100 {
        guest.admin(admin(AdminOpcode::SANITIZE, 0));
    }
    let entries: [ErrorEntry; 64] = reading(&mut guest, log);
    let counts: Vec<u64> = entries.iter().map(|entry| entry.ecnt).collect();
    assert_eq!(counts, (39..=102).rev().collect::<Vec<_>>());
    // They outlive a reset.
    guest.disable();
    guest.enable();
    let entries: [ErrorEntry; 64] = reading(&mut guest, log);
    assert_eq!(entries[0].ecnt, 102);
}

#[test]
fn health_counts_what_the_guest_did() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.make_queues(1, 64);
    let before: SmartLog = reading(&mut guest, log_page(LogId::SMART, 512));
    let read = read_block(&mut guest, 1);
    for _ in 0..1001 {
        guest.command(1, read);
    }
    let mut write = read;
    write.opcode = NvmOpcode::WRITE.0;
    for _ in 0..3 {
        guest.command(1, write);
    }
    guest.admin(admin(AdminOpcode::SANITIZE, 0));
    let after: SmartLog = reading(&mut guest, log_page(LogId::SMART, 512));
    assert_eq!(before.host_reads.get(), 0);
    assert_eq!((after.host_reads.get(), after.host_writes.get()), (1001, 3));
    // Thousands of 512 bytes, rounded up.
    assert_eq!((after.data_units_read.get(), after.data_units_written.get()), (2, 1));
    assert_eq!(after.error_log_entries.get(), 1);
    assert_eq!((after.power_cycles.get(), after.unsafe_shutdowns.get()), (1, 0));
    assert_eq!((after.available_spare, after.percentage_used), (100, 0));
    assert_eq!(after.composite_temperature.get(), 298);
    assert!(guest.controller.state.logs.busy_micros.get() > 0);
}

#[test]
fn power_that_goes_without_a_shutdown_is_counted() {
    let mut guest = FakeGuest::boot();
    let cycles = |guest: &mut FakeGuest| {
        guest.enable();
        let log: SmartLog = reading(guest, log_page(LogId::SMART, 512));
        (log.power_cycles.get(), log.unsafe_shutdowns.get())
    };
    guest.controller.reset(Reset::PowerOn);
    assert_eq!(cycles(&mut guest), (2, 1));
    // A normal shutdown first.
    let cc = guest.read32(offset::CC);
    guest.write32(offset::CC, cc | 1 << 14);
    guest.step_until("the shutdown", |guest| guest.read32(offset::CSTS) >> 2 & 3 == 2);
    guest.controller.reset(Reset::PowerOn);
    assert_eq!(cycles(&mut guest), (3, 1));
    // Other resets are no loss of power; nor is a client that never enabled the controller.
    guest.controller.reset(Reset::Function);
    guest.controller.reset(Reset::PowerOn);
    assert_eq!(cycles(&mut guest), (4, 1));
}

#[test]
fn effects_and_firmware_are_told() {
    let mut guest = FakeGuest::boot();
    let effects: CommandEffectsLog = reading(&mut guest, log_page(LogId::COMMAND_EFFECTS, 4096));
    assert!(effects.io[usize::from(NvmOpcode::WRITE.0)].lbcc());
    assert!(!effects.io[usize::from(NvmOpcode::READ.0)].lbcc());
    assert!(effects.admin[usize::from(AdminOpcode::FORMAT_NVM.0)].ncc());
    assert!(!effects.admin[usize::from(AdminOpcode::NAMESPACE_MANAGEMENT.0)].csupp(), "there is no quota");
    let firmware: FirmwareSlotLog = reading(&mut guest, log_page(LogId::FIRMWARE_SLOT, 512));
    assert_eq!((firmware.afi.active_slot(), &firmware.frs[0]), (1, b"0.1.0   "));
    // Effects of another command set: its commands are not there.
    let mut other = log_page(LogId::COMMAND_EFFECTS, 4096);
    other.cdw14 = 2 << 24;
    let other: CommandEffectsLog = reading(&mut guest, other);
    assert!(other.admin[usize::from(AdminOpcode::FORMAT_NVM.0)].ncc());
    assert!(other.io.iter().all(|effects| !effects.csupp()));
}
