//! Get Log Page.

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{BlockError, BlockSize};
use millrace_nvme_spec::{
    command::{CommandId, DataPointer, Fuse, NamespaceId, Psdt, QueueId, Sqe},
    log::{CommandEffectsLog, ErrorEntry, FirmwareSlotLog, LogId, ParameterErrorLocation, SmartLog, SupportedLogPages},
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    sgl::SglDescriptor,
    status::Status,
};

use super::{
    super::super::{
        fixture::{FakeGuest, sqe},
        registers::Reset,
    },
    admin, boot_with_all, code, expect, expect_reading, read_block, reading, with,
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
    assert_eq!(entries[1].status.status(), Status::INVALID_OPCODE.do_not_retry().with_more(true));
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

/// The newest entry of the Error Information log.
fn newest(guest: &mut FakeGuest) -> ErrorEntry {
    reading(guest, log_page(LogId::ERROR, 64))
}

#[test]
fn errors_tell_the_namespace_the_block_and_the_parameter() {
    const SIZE: u64 = 8 << 20;
    let location = ParameterErrorLocation::dword;
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, SIZE, BlockSize::B512);
    guest.make_queues(1, 64);
    let read = read_block(&mut guest, 1);
    let at = |slba: u64| with(&read, |sqe| sqe.set_cdw10_11(slba));
    let end = SIZE / 512;
    let too_many = (guest.controller.config.max_transfer() / 512) as u32;
    let outside = with(&read, |sqe| sqe.dptr = DataPointer::prps(0, 0));
    let flags = |psdt, fuse| with(&read, |sqe| sqe.flags = sqe.flags.with_psdt(Psdt(psdt)).with_fuse(Fuse(fuse)));
    for (sqe, lba, pel) in [
        (at(end + 7), end + 7, location(10, 0)),
        (at(u64::MAX), u64::MAX, location(10, 0)),
        (with(&read, |sqe| sqe.nsid = NamespaceId(2)), 0, location(1, 0)),
        (with(&read, |sqe| sqe.nsid = NamespaceId(1000)), 0, location(1, 0)),
        (with(&read, |sqe| sqe.opcode = 0x7f), 0, location(0, 0)),
        (with(&outside, |sqe| sqe.set_cdw10_11(5)), 5, location(6, 0)),
        (flags(3, 0), 0, location(0, 14)),
        (with(&flags(3, 0), |sqe| sqe.dptr = SglDescriptor::data_block(read.dptr.prp1, 512).into()), 0, location(0, 14)),
        (flags(0, 3), 0, location(0, 8)),
        (with(&read, |sqe| sqe.cdw12 = too_many), 0, location(12, 0)),
        // What begins with an LBA of the target, or with none at all.
        (with(&at(9), |sqe| (sqe.opcode, sqe.cdw12) = (NvmOpcode::COPY.0, 0x300)), 0, location(12, 8)),
    ] {
        let cqe = guest.command(1, sqe);
        let entry = newest(&mut guest);
        assert_eq!((entry.sqid, entry.cid, entry.status.status()), (QueueId(1), cqe.cid, cqe.status()));
        assert_eq!((entry.nsid, entry.lba, entry.pel), (sqe.nsid, lba, pel), "{}", cqe.status());
        assert_eq!((entry.lpver, entry.opc, entry.trtype), (1, sqe.opcode, 0));
    }
}

#[test]
fn errors_of_the_medium_tell_the_block() {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume");
    let fault = FaultVolume::new(volume, 1);
    fault.add(Rule::new(Kind::Read, When::Always, Effect::Fail(BlockError::ReadFault { errno: 5 })));
    guest.add_volume(3, fault);
    guest.make_queues(1, 64);
    let read = with(&read_block(&mut guest, 3), |sqe| sqe.set_cdw10_11(77));
    assert_eq!(code(&guest.command(1, read)), Status::UNRECOVERED_READ_ERROR);
    let entry = newest(&mut guest);
    assert_eq!((entry.nsid, entry.lba, entry.pel), (NamespaceId(3), 77, ParameterErrorLocation::NONE));
}

#[test]
fn errors_of_admin_commands_tell_the_parameter() {
    let location = ParameterErrorLocation::dword;
    let mut guest = boot_with_all();
    let command = |opcode, change: &dyn Fn(&mut Sqe)| with(&admin(opcode, 0), change);
    let page = guest.alloc_pages(1);
    for (sqe, status, pel) in [
        (command(AdminOpcode::SANITIZE, &|_| ()), Status::INVALID_OPCODE, location(0, 0)),
        (command(AdminOpcode::IDENTIFY, &|sqe| sqe.cdw10 = 0xff), Status::INVALID_FIELD, location(10, 0)),
        (
            command(AdminOpcode::IDENTIFY, &|sqe| sqe.nsid = NamespaceId(1000)),
            Status::INVALID_NAMESPACE_OR_FORMAT,
            location(1, 0),
        ),
        (command(AdminOpcode::GET_FEATURES, &|sqe| sqe.cdw10 = 0xdf), Status::INVALID_FIELD, location(10, 0)),
        (command(AdminOpcode::GET_FEATURES, &|sqe| sqe.cdw10 = 0x701), Status::INVALID_FIELD, location(10, 8)),
        (command(AdminOpcode::SET_FEATURES, &|sqe| sqe.cdw10 = 1 << 31 | 1), Status::FEATURE_NOT_SAVEABLE, location(10, 31)),
        (command(AdminOpcode::SET_FEATURES, &|sqe| (sqe.cdw10, sqe.cdw11) = (2, 1)), Status::INVALID_FIELD, location(11, 0)),
        (command(AdminOpcode::GET_LOG_PAGE, &|sqe| sqe.cdw10 = 0xc0), Status::INVALID_LOG_PAGE, location(10, 0)),
        (command(AdminOpcode::CREATE_IO_CQ, &|sqe| sqe.cdw10 = 1), Status::INVALID_QUEUE_SIZE, location(10, 16)),
        (command(AdminOpcode::CREATE_IO_CQ, &|sqe| sqe.cdw10 = 63 << 16), Status::INVALID_QUEUE_IDENTIFIER, location(10, 0)),
        (command(AdminOpcode::CREATE_IO_CQ, &|sqe| sqe.cdw10 = 63 << 16 | 1), Status::INVALID_FIELD, location(11, 0)),
        (
            command(AdminOpcode::CREATE_IO_CQ, &|sqe| {
                (sqe.cdw10, sqe.cdw11) = (63 << 16 | 1, 0xffff_0003);
                sqe.dptr = DataPointer::prps(page, 0);
            }),
            Status::INVALID_INTERRUPT_VECTOR,
            location(11, 16),
        ),
        (
            command(AdminOpcode::CREATE_IO_CQ, &|sqe| {
                (sqe.cdw10, sqe.cdw11) = (63 << 16 | 1, 1);
                sqe.dptr = DataPointer::prps(page + 8, 0);
            }),
            Status::PRP_OFFSET_INVALID,
            location(6, 0),
        ),
        (command(AdminOpcode::NAMESPACE_MANAGEMENT, &|sqe| sqe.cdw10 = 9), Status::INVALID_FIELD, location(10, 0)),
        (command(AdminOpcode::FORMAT_NVM, &|sqe| sqe.nsid = NamespaceId(1)), Status::INVALID_FIELD, location(1, 0)),
    ] {
        expect(&mut guest, sqe, status);
        let entry = newest(&mut guest);
        assert_eq!((entry.nsid, entry.lba, entry.pel), (sqe.nsid, 0, pel), "{status} {:#x}", sqe.opcode);
    }
    // What was refused for a parameter does not blame the next failure.
    guest.make_queues(1, 16);
    guest.doorbell(2, 16);
    guest.settle();
    let entry = newest(&mut guest);
    assert_eq!((entry.cid, entry.pel), (CommandId::NONE, ParameterErrorLocation::NONE));
}
