//! Two controllers of one machine: what one was, the other becomes.

use std::{
    os::{fd::AsFd, unix::fs::FileExt},
    sync::Arc,
};

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, METADATA_SIZE, Metadata, MetadataFormat, Volume};
use millrace_nvme_spec::{
    command::CommandFlags,
    features::FeatureId,
    opcode::{AdminOpcode, NvmOpcode},
    registers::{NSSR_RESET, offset},
};
use proptest::prelude::*;

use super::*;
use crate::nvme::{
    Config,
    fixture::{FakeGuest, HeldVolume, MEMORY_BASE, MEMORY_SIZE, PAGE, TaggedMemory, sqe, test_config},
    namespace::Namespace,
};

const BLOCKS: u64 = 64;

/// A machine with a namespace whose reads can be held, two I/O queues, and something of everything that a state has.
fn machine() -> (FakeGuest, Arc<Namespace>, Arc<HeldVolume>) {
    let mut guest = FakeGuest::new(config());
    let volume = HeldVolume::new(MemoryVolume::create("disk", BLOCKS * 4096, BlockSize::B4096).expect("a volume"));
    let namespace = guest.add_volume(3, Arc::clone(&volume) as Arc<dyn Volume>);
    guest.enable();
    guest.create_queues(1, 8);
    guest.create_queues(2, 64);
    feature(&mut guest, FeatureId::ASYNC_EVENT_CONFIGURATION, 1 << 8);
    feature(&mut guest, FeatureId::INTERRUPT_COALESCING, 0x0203);
    feature(&mut guest, FeatureId::TEMPERATURE_THRESHOLD, 0x0150);
    for _ in 0..3 {
        guest.submit(0, sqe(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0));
    }
    // An error for the log, and a command that was refused.
    assert!(!guest.command(2, sqe(0x7f, 3)).status().is_success());
    for lba in 0..8 {
        assert!(guest.command_writing(1, transfer(NvmOpcode::WRITE, lba), &[lba as u8 + 1; 4096]).status().is_success());
    }
    guest.settle();
    (guest, namespace, volume)
}

fn config() -> Config {
    Config { migration: true, ..test_config() }
}

/// The machine's controller elsewhere.
fn target(guest: &FakeGuest, namespace: &Arc<Namespace>) -> FakeGuest {
    let mut target = FakeGuest::new(config());
    target.add_namespace(3, namespace);
    target.move_from(guest);
    target
}

fn feature(guest: &mut FakeGuest, fid: FeatureId, value: u32) {
    let mut set = sqe(AdminOpcode::SET_FEATURES.0, 0);
    (set.cdw10, set.cdw11) = (u32::from(fid.0), value);
    assert!(guest.admin(set).status().is_success(), "{fid:?}");
}

fn get_feature(guest: &mut FakeGuest, fid: FeatureId) -> u32 {
    let mut get = sqe(AdminOpcode::GET_FEATURES.0, 0);
    get.cdw10 = u32::from(fid.0);
    guest.admin(get).dw0
}

fn transfer(opcode: NvmOpcode, lba: u64) -> millrace_nvme_spec::command::Sqe {
    let mut transfer = sqe(opcode.0, 3);
    transfer.cdw10 = lba as u32;
    transfer
}

fn expect_data(guest: &mut FakeGuest, qid: u16) {
    for lba in 0..8 {
        let (cqe, data) = guest.command_reading(qid, transfer(NvmOpcode::READ, lba), 4096);
        assert!(cqe.status().is_success());
        assert_eq!(data, [lba as u8 + 1; 4096], "block {lba}");
    }
}

fn read_all(guest: &mut FakeGuest) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let part = guest.controller.read_saved(1000).expect("it can be read");
        assert!(part.len() <= 1000);
        if part.is_empty() {
            return all;
        }
        all.extend(part);
    }
}

/// Saves a machine whose controller is stopped for it.
fn saved(guest: &mut FakeGuest) -> Vec<u8> {
    assert_eq!(guest.controller.migrate(MigrationState::StopCopy), Some(Ok(())));
    read_all(guest)
}

fn restore(guest: &mut FakeGuest, state: &[u8]) -> Option<Result<(), Errno>> {
    assert_eq!(guest.controller.migrate(MigrationState::Resuming), Some(Ok(())));
    state.chunks(777).for_each(|part| guest.controller.write_saved(part).expect("it can be written"));
    guest.controller.migrate(MigrationState::Running)
}

/// All of the region, and of the doorbells.
fn region(guest: &FakeGuest) -> Vec<u8> {
    let files = [guest.controller.state.as_fd(), guest.controller.doorbells.as_fd()];
    let read = |fd: std::os::fd::BorrowedFd<'_>| {
        let file = std::fs::File::from(fd.try_clone_to_owned().expect("a descriptor"));
        let mut bytes = vec![0; file.metadata().expect("its length").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("the region");
        bytes
    };
    files.into_iter().flat_map(read).collect()
}

#[test]
fn a_machine_goes_on_with_the_other_controller() {
    let (mut source, namespace, volume) = machine();
    // Some are in flight when it is to stop, and some were rung but not taken.
    volume.hold();
    for lba in 0..3 {
        let buffer = source.alloc_pages(1);
        let mut read = transfer(NvmOpcode::READ, lba);
        read.dptr = source.prps(buffer, 4096);
        source.submit(1, read);
    }
    source.step_until("reads in flight", |_| volume.waiting() == 3);
    assert_eq!(source.controller.migrate(MigrationState::StopCopy), None, "commands are in flight");
    let late = source.submit(2, transfer(NvmOpcode::FLUSH, 0));
    volume.release();
    source.step_until("stopped", |guest| guest.controller.migrate(MigrationState::StopCopy).is_some());
    assert_eq!(source.controller.migration_state(), MigrationState::StopCopy);
    let before = region(&source);
    assert_eq!(source.step(), 0);
    assert_eq!(region(&source), before, "it stands still");
    assert!(source.poll(2).is_none());
    let state = read_all(&mut source);
    assert_eq!(source.controller.read_saved(100), Ok(vec![]), "it stays at the end");
    let mut target = target(&source, &namespace);
    assert_eq!(restore(&mut target, &state), Some(Ok(())));
    assert_eq!(target.controller.phase, Phase::Ready);
    assert_eq!(target.read32(offset::CC), source.read32(offset::CC));
    // The reads that were completed there, and the flush that was not taken there.
    for _ in 0..3 {
        assert!(target.wait(1).status().is_success());
    }
    assert!(target.wait_for(2, late).status().is_success());
    expect_data(&mut target, 1);
    expect_data(&mut target, 2);
    assert_eq!(get_feature(&mut target, FeatureId::INTERRUPT_COALESCING), 0x0203);
    assert_eq!(get_feature(&mut target, FeatureId::TEMPERATURE_THRESHOLD), 0x0150);
    assert_eq!(target.controller.state.logs.error_count.get(), 1);
    assert_eq!(target.controller.counters.write_commands, 8);
    // An event finds one of the three requests.
    target.controller.namespace_changed(3);
    assert_eq!(target.wait(0).dw0 & 7, 2);
    assert_eq!(target.controller.state.events.outstanding.get(), 2);
    target.create_queues(3, 16);
    expect_data(&mut target, 3);
    // The migration was given up: the source goes on as well as ever, from where it stood.
    assert_eq!(source.controller.migrate(MigrationState::Running), Some(Ok(())));
    assert!(source.wait_for(2, late).status().is_success());
    assert_eq!(source.controller.read_saved(8), Err(Errno::INVAL));
    assert_eq!(source.controller.write_saved(b"x"), Err(Errno::INVAL));
}

#[test]
fn a_controller_that_is_not_enabled_is_moved_too() {
    let (mut source, namespace, _) = machine();
    source.disable();
    let state = saved(&mut source);
    let mut target = target(&source, &namespace);
    assert_eq!(restore(&mut target, &state), Some(Ok(())));
    assert_eq!(target.controller.phase, Phase::Disabled);
    target.enable();
    target.create_queues(1, 8);
    expect_data(&mut target, 1);
}

#[test]
fn nothing_written_changes_nothing() {
    let (mut guest, ..) = machine();
    assert_eq!(restore(&mut guest, &[]), Some(Ok(())));
    expect_data(&mut guest, 1);
    assert_eq!(guest.controller.migrate(MigrationState::PreCopy), Some(Ok(())));
    expect_data(&mut guest, 2);
    assert_eq!(guest.controller.read_saved(100), Ok(vec![]), "all comes at the end");
    assert!(!saved(&mut guest).is_empty());
}

#[test]
fn bad_states_are_refused_and_change_nothing() {
    let (mut source, namespace, _) = machine();
    let good = saved(&mut source);
    let mut guest = target(&source, &namespace);
    guest.controller.migrate(MigrationState::Running).expect("at once").expect("it runs");
    let before = region(&guest);
    for length in (0..good.len()).step_by(97).chain(good.len() - 9..good.len()) {
        assert!(guest.controller.take_saved(&good[..length]).is_err(), "cut at {length}");
    }
    let longer = [&good[..], &[0]].concat();
    assert!(matches!(guest.controller.take_saved(&longer), Err(SavedStateError::Length { .. })));
    for at in (0..good.len()).step_by(13) {
        let mut flipped = good.clone();
        flipped[at] ^= 1 << (at % 8);
        let error = guest.controller.take_saved(&flipped).expect_err("a bit is wrong");
        match at {
            0..8 => assert_eq!(error, SavedStateError::Magic),
            8..12 => assert!(matches!(error, SavedStateError::Version { .. })),
            16..24 => assert!(matches!(error, SavedStateError::Length { .. })),
            _ => assert_eq!(error, SavedStateError::Checksum, "byte {at}"),
        }
    }
    assert_eq!(region(&guest), before);
    // By the protocol, in pieces, and the device goes on.
    assert_eq!(restore(&mut guest, &good[..good.len() - 1]), Some(Err(Errno::INVAL)));
    assert_eq!(guest.controller.migration_state(), MigrationState::Resuming);
    assert_eq!(guest.controller.migrate(MigrationState::Running), Some(Ok(())));
    guest.enable();
    guest.create_queues(1, 8);
    expect_data(&mut guest, 1);
    let too_long = vec![0; LONGEST];
    guest.controller.migrate(MigrationState::Resuming).expect("nothing is in flight").expect("it stops");
    guest.controller.write_saved(&too_long).expect("as long as it may be");
    assert_eq!(guest.controller.write_saved(&[0]), Err(Errno::FBIG));
}

#[test]
fn a_device_of_another_kind_refuses() {
    let (mut source, namespace, volume) = machine();
    let state = saved(&mut source);
    let refusal = |config: Config, namespaces: &[(u32, &Arc<Namespace>)]| {
        let mut guest = FakeGuest::new(config);
        for (nsid, namespace) in namespaces {
            guest.add_namespace(*nsid, namespace);
        }
        let before = region(&guest);
        let error = guest.controller.take_saved(&state).expect_err("another device");
        assert_eq!(region(&guest), before);
        error
    };
    let other = Namespace::new(volume, crate::nvme::fixture::identity(9), false);
    let smaller = MemoryVolume::create("smaller", 4096 * (BLOCKS - 1), BlockSize::B4096).expect("a volume");
    let smaller = Namespace::new(smaller, namespace.identity, false);
    let here = [(3, &namespace)];
    for config in [
        Config { queues: 4, ..config() },
        Config { vectors: 5, ..config() },
        Config { queue_entries: 16, ..config() },
        Config { serial: "another".to_owned(), ..config() },
        Config { subnqn: "nqn.2014-08.org.nvmexpress:uuid:another".to_owned(), ..config() },
    ] {
        assert!(matches!(refusal(config, &here), SavedStateError::Shape { .. }));
    }
    for namespaces in [&[][..], &[(4, &namespace)], &[(3, &other)], &[(3, &smaller)], &[(3, &namespace), (5, &other)]] {
        assert!(matches!(refusal(config(), namespaces), SavedStateError::Namespace { .. }));
    }
}

#[test]
fn attachments_are_as_they_were() {
    let (mut source, namespace, _) = machine();
    source.controller.namespaces.detach(3);
    let detached = saved(&mut source);
    let mut guest = target(&source, &namespace);
    assert_eq!(restore(&mut guest, &detached), Some(Ok(())));
    assert!(guest.controller.namespaces.get(3).is_none());
    assert!(!guest.host.take_calls().is_empty(), "the daemon remembers it");
}

#[test]
fn a_worker_that_takes_over_knows_where_it_stood() {
    use MigrationState::{Error, PreCopy, Resuming, Running, Stop, StopCopy};
    let (mut guest, ..) = machine();
    for (stood, stands) in [(Running, Running), (PreCopy, PreCopy), (Stop, Stop), (StopCopy, Stop), (Resuming, Error)] {
        guest.controller.stand(stood);
        (guest.controller.lifecycle.stopped, guest.controller.lifecycle.paused) = (false, false);
        guest.controller.resume_migration();
        assert_eq!(guest.controller.migration_state(), stands);
        assert_eq!(guest.controller.lifecycle.stopped, !matches!(stands, Running | PreCopy));
    }
    assert_eq!(guest.controller.migrate(Running), Some(Err(Errno::INVAL)), "only a reset helps");
    guest.controller.leave_migration();
    expect_data(&mut guest, 1);
}

#[test]
fn a_restored_state_waits_for_its_memory() {
    let (mut source, namespace, _) = machine();
    let state = saved(&mut source);
    let mut guest = target(&source, &namespace);
    guest.controller.memory.unmap_all();
    guest.controller.hold_saved(&state).expect("it fits");
    assert!(guest.controller.awaits_guest());
    let queued = guest.submit(1, transfer(NvmOpcode::FLUSH, 0));
    guest.controller.release();
    guest.step();
    assert!(guest.controller.awaits_guest() && guest.poll(1).is_none());
    let all = millrace_memory::Protection { read: true, write: true };
    let backing = Some((guest.memory.as_fd(), 0));
    guest.controller.memory.map(GuestAddress(MEMORY_BASE), MEMORY_SIZE, all, backing).expect("mapped");
    guest.controller.release();
    assert!(!guest.controller.awaits_guest());
    assert!(guest.wait_for(1, queued).status().is_success());
    expect_data(&mut guest, 2);
}

/// Has the first half of a pair taken, and not the second; their identifiers.
fn park(guest: &mut FakeGuest, first: Sqe, second: Sqe) -> [u16; 2] {
    let half = |sqe: Sqe, fuse| Sqe { flags: CommandFlags::new().with_fuse(fuse), ..sqe };
    let cids = [(first, Fuse::FIRST), (second, Fuse::SECOND)].map(|(sqe, fuse)| guest.push(1, half(sqe, fuse)));
    guest.ring(1);
    let (first, token) = guest.controller.accept(1).expect("the first half");
    let mut cx = guest.shard.context();
    let slot = cx.reserve().expect("a slot");
    guest.controller.start(&mut cx, slot, token, &first);
    assert_eq!(guest.controller.io_parked(), 1);
    cids
}

/// It has touched nothing, and begins to only when the controller runs again.
#[test]
fn a_first_half_on_record_keeps_nobody_waiting_for_a_controller_that_stands_still() {
    let (mut guest, namespace, _) = machine();
    let [old, new] = [1, 9].map(|byte| {
        let buffer = guest.alloc_pages(1);
        guest.write(buffer, &[byte; 4096]);
        guest.prps(buffer, 4096)
    });
    let [first, second] =
        [(NvmOpcode::COMPARE, old), (NvmOpcode::WRITE, new)].map(|(opcode, dptr)| Sqe { dptr, ..transfer(opcode, 0) });
    let cids = park(&mut guest, first, second);
    assert_eq!(guest.controller.migrate(MigrationState::Stop), Some(Ok(())));
    // As the next worker finds it.
    guest.controller.io_reset();
    guest.controller.resume();
    guest.controller.resume_migration();
    assert_eq!(guest.controller.again.len(), 1);
    assert!(guest.controller.is_quiet(), "memory may be unmapped");
    assert!(!guest.controller.waits_for_turns(), "no turn does anything");
    let state = saved(&mut guest);
    let mut target = target(&guest, &namespace);
    assert_eq!(restore(&mut guest, &state), Some(Ok(())), "it may be given a state");
    assert!(!guest.controller.is_quiet(), "it runs, and carries it out again");
    for _ in 0..2 {
        target.controller.hold_saved(&state).expect("the one before has not gone on");
        assert!(target.controller.is_quiet() && !target.controller.waits_for_turns());
    }
    target.controller.release();
    for cid in cids {
        assert!(target.wait_for(1, cid).status().is_success());
    }
    let (_, data) = target.command_reading(1, transfer(NvmOpcode::READ, 0), 4096);
    assert_eq!(data, [9; 4096]);
}

/// A machine that is restored resets its devices before it knows their states. What resets the controller is a guest that runs.
#[test]
fn only_a_guest_that_runs_ends_a_restored_state_by_a_reset() {
    let (mut source, namespace, _) = machine();
    let state = saved(&mut source);
    let mut guest = target(&source, &namespace);
    guest.controller.hold_saved(&state).expect("it fits");
    let mut control = [0; 2];
    guest.controller.config_read(0x68, &mut control);
    guest.controller.config_write(0x68, &[control[0], control[1] | 0x80]);
    assert!(guest.controller.awaits_guest() && guest.controller.phase == Phase::Ready);
    guest.controller.release();
    expect_data(&mut guest, 1);
    for subsystem in [false, true] {
        let mut guest = target(&source, &namespace);
        guest.controller.hold_saved(&state).expect("it fits");
        let (register, value) =
            if subsystem { (offset::NSSR, NSSR_RESET) } else { (offset::CC, guest.read32(offset::CC) & !1) };
        guest.write32(register, value);
        assert!(!guest.controller.awaits_guest() && guest.controller.phase == Phase::Disabled);
        guest.enable();
        guest.create_queues(1, 8);
        expect_data(&mut guest, 1);
    }
}

/// The pages that are in the log, and forgotten now.
fn logged(guest: &mut FakeGuest) -> Vec<u64> {
    let range = LogRange { address: MEMORY_BASE, size: MEMORY_SIZE, page_size: PAGE };
    let mut bitmap = vec![0; range.bitmap_bytes() as usize];
    guest.controller.report(range, &mut bitmap).expect("there is a log");
    (0..MEMORY_SIZE / PAGE).filter(|page| bitmap[(page / 8) as usize] & 1 << (page % 8) != 0).collect()
}

fn contents(guest: &FakeGuest) -> Vec<u8> {
    let mut bytes = vec![0; 4 << 20];
    guest.memory.read_exact_at(&mut bytes, 0).expect("guest memory");
    bytes
}

#[test]
fn every_page_that_is_written_is_reported_and_few_others() {
    let (mut guest, _, volume) = machine();
    let range = LogRange { address: 0, size: PAGE, page_size: PAGE };
    assert_eq!(guest.controller.report(range, &mut [0; 8]), Err(Errno::INVAL), "there is no log");
    guest.controller.start_logging();
    assert_eq!(guest.controller.report(range, &mut vec![0; PART + 8]), Err(Errno::TOOBIG));
    let standing = logged(&mut guest);
    for held in [false, true] {
        let before = contents(&guest);
        let mut buffers = Vec::new();
        if held {
            volume.hold();
        }
        for lba in 0..6 {
            let buffer = guest.alloc_pages(2);
            let mut read = transfer(NvmOpcode::READ, lba);
            // Two pages, from the middle of the first.
            read.dptr = guest.prps(buffer + 2048, 4096);
            buffers.push((buffer - MEMORY_BASE) / PAGE);
            guest.submit(2, read);
        }
        if held {
            guest.step_until("reads in flight", |_| volume.waiting() == 6);
            // What was told while they were in flight is told again: the data come later.
            let told = logged(&mut guest);
            assert!(buffers.iter().all(|page| told.contains(page) && told.contains(&(page + 1))));
            volume.release();
        }
        for _ in 0..6 {
            assert!(guest.wait(2).status().is_success());
        }
        let (_, identity) = guest.command_reading(0, sqe(AdminOpcode::IDENTIFY.0, 3), 4096);
        assert!(identity.iter().any(|byte| *byte != 0));
        let reported = logged(&mut guest);
        let after = contents(&guest);
        let changed = |page: &u64| {
            let at = (page * PAGE) as usize;
            before[at..at + PAGE as usize] != after[at..at + PAGE as usize]
        };
        // The guest's own entries are not the device's writes.
        let queues: Vec<u64> = guest.queues.values().map(|pair| (pair.sq_base - MEMORY_BASE) / PAGE).collect();
        for page in (0..before.len() as u64 / PAGE).filter(changed).filter(|page| !queues.contains(page)) {
            assert!(reported.contains(&page), "page {page} was written and not told (held: {held})");
        }
        assert!(buffers.iter().all(|page| reported.contains(page)));
        assert!(reported.len() <= standing.len() + 13 + 1, "{} pages of {}", reported.len(), MEMORY_SIZE / PAGE);
        // Only what may be written at any time.
        assert_eq!(logged(&mut guest), standing);
    }
    guest.controller.migrate(MigrationState::Stop).expect("nothing is in flight").expect("it stops");
    assert_eq!(logged(&mut guest), standing);
    assert_eq!(logged(&mut guest), [0; 0], "a device that stands still writes nothing");
    guest.controller.resume_logging();
    assert_eq!(logged(&mut guest).len() as u64, MEMORY_SIZE / PAGE, "what another worker had logged is lost");
    guest.controller.stop_logging();
    assert_eq!(guest.controller.report(range, &mut [0; 8]), Err(Errno::INVAL));
}

/// A machine with a namespace of 512-byte blocks whose reads can be held.
fn machine_with(metadata: Metadata) -> (FakeGuest, Arc<HeldVolume>) {
    let mut guest = FakeGuest::new(config());
    let volume = HeldVolume::new(TaggedMemory::new(1 << 20, BlockSize::B512, metadata));
    guest.add_volume(3, Arc::clone(&volume) as Arc<dyn Volume>);
    guest.enable();
    guest.create_queues(1, 8);
    (guest, volume)
}

/// A command with fresh memory for so many bytes, and for metadata; the pages that they are in.
fn pointed(guest: &mut FakeGuest, opcode: NvmOpcode, blocks: u64, len: u64) -> (Sqe, Vec<u64>) {
    let (data, tags) = (guest.alloc_pages(len.div_ceil(PAGE)), guest.alloc_pages(1));
    guest.write(data, &vec![0x5a; if opcode == NvmOpcode::WRITE { len as usize } else { 0 }]);
    guest.write(tags, &vec![0x6b; if opcode == NvmOpcode::WRITE { blocks as usize * METADATA_SIZE } else { 0 }]);
    let mut sqe = transfer(opcode, 0);
    (sqe.cdw12, sqe.dptr, sqe.mptr) = (blocks as u32 - 1, guest.prps(data, len), tags);
    let pages = (data..data + len).step_by(PAGE as usize).chain([tags]);
    (sqe, pages.map(|at| (at - MEMORY_BASE) / PAGE).collect())
}

#[test]
fn all_that_a_read_in_flight_writes_is_reported() {
    let shown = |extended| Metadata::Shown(MetadataFormat { extended, ..MetadataFormat::default() });
    for metadata in [Metadata::Never, shown(false), shown(true)] {
        for (blocks, is_detached) in [(8, false), (16, false), (8, true), (16, true)] {
            let note = format!("{blocks} blocks, {metadata:?}, detached: {is_detached}");
            let (mut guest, volume) = machine_with(metadata);
            let len = blocks * (512 + if metadata == shown(true) { METADATA_SIZE as u64 } else { 0 });
            let (write, _) = pointed(&mut guest, NvmOpcode::WRITE, blocks, len);
            assert!(guest.command(1, write).status().is_success());
            guest.controller.start_logging();
            let (read, pages) = pointed(&mut guest, NvmOpcode::READ, blocks, len);
            let before = contents(&guest);
            volume.hold();
            guest.submit(1, read);
            guest.step_until("a read in flight", |_| volume.waiting() == 1);
            if is_detached {
                drop(guest.controller.namespaces.detach(3));
            }
            logged(&mut guest);
            volume.release();
            assert!(guest.wait(1).status().is_success());
            let (after, reported) = (contents(&guest), logged(&mut guest));
            let changed = |page: &u64| {
                let bytes = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
                before[bytes.clone()] != after[bytes]
            };
            let separate = usize::from(metadata == shown(false));
            assert_eq!(pages.iter().filter(|page| changed(page)).count(), pages.len() - 1 + separate, "{note}");
            for page in pages.iter().filter(|page| changed(page)) {
                assert!(reported.contains(page), "page {page} was written and not told: {note}");
            }
            assert!(reported.len() < 10, "{} pages: {note}", reported.len());
        }
    }
}

#[test]
fn a_read_of_which_nothing_is_known_may_write_anywhere() {
    let (mut guest, ..) = machine();
    guest.controller.start_logging();
    guest.controller.records.take(&sqe(NvmOpcode::READ.0, 4), 1, 0).expect("a free record");
    logged(&mut guest);
    assert_eq!(logged(&mut guest).len() as u64, MEMORY_SIZE / PAGE);
}

/// Its guest may keep the second out for as long as it likes. No pair begins so: it never reads.
#[test]
fn a_first_half_that_says_that_it_reads_writes_nowhere() {
    let (mut guest, ..) = machine();
    guest.controller.start_logging();
    let standing = logged(&mut guest);
    let [first, second] = park(&mut guest, sqe(NvmOpcode::READ.0, 9999), transfer(NvmOpcode::WRITE, 0));
    for _ in 0..2 {
        assert_eq!(logged(&mut guest), standing);
    }
    for cid in [first, second] {
        assert!(!guest.wait_for(1, cid).status().is_success());
    }
}

/// As a client that means harm would write it: the checksum is right.
fn forge(state: &[u8], changes: &[(usize, u8)]) -> Vec<u8> {
    let mut forged = state.to_vec();
    for &(at, value) in changes {
        let at = 24 + at % (forged.len() - 24);
        forged[at] = value;
    }
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &forged[16..]) as u32;
    forged[12..16].copy_from_slice(&sum.to_le_bytes());
    forged
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever a state says, the controller that takes it does not fail us; nor the next one that gets its state.
    #[test]
    fn forged_states_do_no_harm(
        changes in prop::collection::vec((any::<usize>(), prop_oneof![any::<u8>(), Just(0xff), Just(0)]), 1..12),
        at_end in any::<bool>(),
    ) {
        let (mut source, namespace, _) = machine();
        let state = saved(&mut source);
        // Commands and doorbells are at the end.
        let changes: Vec<_> =
            changes.into_iter().map(|(at, value)| (if at_end { state.len() - 24 - 1 - at % 200 } else { at }, value)).collect();
        let mut guest = target(&source, &namespace);
        if restore(&mut guest, &forge(&state, &changes)) == Some(Ok(())) {
            for qid in [0, 1, 2] {
                guest.submit(qid, transfer(NvmOpcode::FLUSH, 0));
            }
            for _ in 0..200 {
                guest.step();
            }
            let again = guest.controller.migrate(MigrationState::StopCopy);
            if again == Some(Ok(())) {
                let state = read_all(&mut guest);
                prop_assert!(guest.controller.parse_saved(&state).is_ok(), "what is saved can be taken");
            }
            guest.controller.leave_migration();
            guest.controller.reset(Reset::Function);
            guest.step_until("reset", |guest| { guest.step(); guest.controller.phase != Phase::Resetting });
            guest.enable();
        }
    }
}
