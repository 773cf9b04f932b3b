//! Changes of the guest's memory are logged while the machine moves, and the disk's state goes along.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsFd,
};

use millrace_block::BlockSize;
use millrace_memory::PeerBytes;
use zerocopy::IntoBytes;

use super::{
    super::{
        config::feature,
        fixture::{FakeDriver, GUEST_BASE, Setup, USED},
        message::{LogBase, StateTransfer, VringAddr, VringState, code, protocol},
        queue::Queue,
        request::kind,
        ring::feature as ring_feature,
        state::SIZE,
    },
    sessions::{blank, choose, disk_of_kind, is_durable, without_discard},
};

/// Pages that are marked, and no longer afterwards.
fn take(log: &PeerBytes) -> Vec<u64> {
    let bytes: [u8; 4096] = log.read_value(0);
    log.write_value(0, &[0_u8; 4096]);
    let marked = |(at, byte): (usize, &u8)| {
        (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| at as u64 * 8 + bit).collect()
    };
    bytes.iter().enumerate().flat_map::<Vec<u64>, _>(marked).collect()
}

/// Begins logging as QEMU does: the log, the feature, then each ring's flag.
fn begin(driver: &mut FakeDriver) -> PeerBytes {
    let (log, file) = PeerBytes::create("log", 4096).expect("a log");
    let base = LogBase { size: 4096, offset: 0 };
    driver.send(code::SET_LOG_BASE, 0, base.as_bytes(), &[file.as_fd()]);
    assert_eq!(driver.answer().expect("it is answered always").1, base.as_bytes());
    let packed = if driver.setup.packed { 1 << 34 } else { 0 };
    let features = driver.setup.features | feature::LOG_ALL | packed;
    assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(true));
    let base = driver.queues[0].base;
    let addr = VringAddr { flags: VringAddr::LOG, log: base + USED, ..driver.queues[0].addr() };
    assert_eq!(driver.tell(code::SET_VRING_ADDR, addr.as_bytes(), &[]), Some(true));
    log
}

#[test]
fn what_is_written_to_the_guest_is_logged() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.request(kind::OUT, 0, &vec![5; 16384], 0);
        let log = begin(&mut driver);
        let ring = driver.queues[0].base / 4096;
        // Where used chains are told: the used ring, or the descriptors themselves.
        let told = if setup.packed { ring } else { ring + USED / 4096 };
        driver.free_all();
        let data = (driver.alloc(4096 * 8)).next_multiple_of(4096);
        let header = driver.alloc(16);
        let status = driver.alloc(16);
        driver.write(header, &[kind::IN.as_bytes(), 0_u32.as_bytes(), 0_u64.as_bytes()].concat());
        driver.submit(0, &[(header, 16, false), (data + 100, 8192, true), (status, 1, true)]);
        driver.wait_used(0);
        let mut expected = vec![told, data / 4096, data / 4096 + 1, data / 4096 + 2, status / 4096];
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(take(&log), expected, "packed: {}", setup.packed);
        // A write changes its status and the ring only, one that waits too.
        driver.volume.hold(true);
        driver.write(header, &[kind::OUT.as_bytes(), 0_u32.as_bytes(), 0_u64.as_bytes()].concat());
        driver.submit(0, &[(header, 16, false), (data + 100, 512, false), (status, 1, true)]);
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
        assert_eq!(take(&log), Vec::<u64>::new(), "nothing is marked before it is written");
        driver.volume.hold(false);
        driver.wait_used(0);
        let mut expected = vec![told, status / 4096];
        expected.sort_unstable();
        assert_eq!(take(&log), expected);
        // Asking for kicks writes to the guest as well.
        driver.device(millrace_engine::Device::arm);
        assert_eq!(take(&log), [ring + USED / 4096]);
        driver.device(|device, _| millrace_engine::Device::disarm(device));
        take(&log);
        // The end of logging.
        let features = driver.setup.features | if setup.packed { 1 << 34 } else { 0 };
        assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(true));
        driver.request(kind::IN, 0, &[], 512);
        assert_eq!(take(&log), Vec::<u64>::new());
    }
}

/// What could have been written and was not is nobody's to copy, however much memory a guest gives for it.
#[test]
fn only_what_was_written_is_logged() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let log = begin(&mut driver);
        let ring = driver.queues[0].base / 4096;
        let told = if setup.packed { ring } else { ring + USED / 4096 };
        let data = driver.alloc(4096 * 8).next_multiple_of(4096);
        let header = driver.alloc(16);
        let status = driver.alloc(16);
        let end = 64_u64 << 11;
        for (what, kind, sector, written) in [
            ("a serial", kind::GET_ID, 0, Some(data / 4096)),
            ("a flush", kind::FLUSH, 0, None),
            ("a read over the end", kind::IN, end - 8, None),
            ("a read of half a block", kind::IN, 0, None),
            ("what is unknown", 99, 0, None),
        ] {
            let len = if what == "a read of half a block" { 8192 + 256 } else { 8192 };
            driver.write(header, &[kind.as_bytes(), 0_u32.as_bytes(), sector.as_bytes()].concat());
            driver.submit(0, &[(header, 16, false), (data, len, true), (status, 1, true)]);
            driver.wait_used(0);
            let mut expected: Vec<u64> = [told, status / 4096].into_iter().chain(written).collect();
            expected.sort_unstable();
            expected.dedup();
            assert_eq!(take(&log), expected, "{what}, packed: {}", setup.packed);
        }
    }
}

/// A read that began before the log ends before it begins: its data are in the memory that is copied from then on.
#[test]
fn the_log_begins_when_nothing_is_in_flight() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.volume.hold(true);
    let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
    driver.submit(0, &pieces);
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
    let features = driver.setup.features | feature::LOG_ALL;
    driver.send(code::SET_FEATURES, 8, features.as_bytes(), &[]);
    for _ in 0..1000 {
        driver.shard.turn();
    }
    assert_eq!(driver.next_used(0), None);
    driver.volume.hold(false);
    assert_eq!(driver.answer().expect("an answer").1, 0_u64.as_bytes());
    assert!(driver.next_used(0).is_some(), "it ended before the answer");
}

/// With the feature chosen first the log begins later: it waits for what began before it as well.
#[test]
fn a_log_that_comes_after_its_feature_begins_when_nothing_is_in_flight() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let features = driver.setup.features | feature::LOG_ALL;
    assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(true));
    driver.volume.hold(true);
    let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
    driver.submit(0, &pieces);
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
    let (log, file) = PeerBytes::create("log", 4096).expect("a log");
    let base = LogBase { size: 4096, offset: 0 };
    driver.send(code::SET_LOG_BASE, 0, base.as_bytes(), &[file.as_fd()]);
    for _ in 0..1000 {
        driver.shard.turn();
    }
    assert!(!driver.is_answered(), "the read may still write to memory, and marks nothing");
    driver.volume.hold(false);
    assert_eq!(driver.answer().expect("an answer").1, base.as_bytes());
    assert!(driver.next_used(0).is_some(), "it ended before the answer");
    take(&log);
    // Another log in place of the first need not wait: what is in flight knows already what it changes.
    driver.volume.hold(true);
    let (pieces, data, _) = driver.prepare(kind::IN, 0, &[], 512);
    driver.submit(0, &pieces);
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
    let (log, file) = PeerBytes::create("log", 4096).expect("a log");
    driver.send(code::SET_LOG_BASE, 0, base.as_bytes(), &[file.as_fd()]);
    driver.answer().expect("an answer");
    assert_eq!(driver.next_used(0), None);
    driver.volume.hold(false);
    driver.wait_used(0);
    assert!(take(&log).contains(&(data / 4096)));
}

/// A worker may die between a change of a ring and its mark, and in that queue nothing may come any more.
#[test]
fn a_ring_that_ran_before_is_in_the_log() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        begin(&mut driver);
        driver.request(kind::OUT, 0, &[5; 512], 0);
        driver.restart_daemon();
        driver.connect();
        // As QEMU connects again: it tells of its log when its rings have begun.
        let base = driver.queues[0].base;
        let addr = VringAddr { flags: VringAddr::LOG, log: base + USED, ..driver.queues[0].addr() };
        assert_eq!(driver.tell(code::SET_VRING_ADDR, addr.as_bytes(), &[]), Some(true));
        let packed = if setup.packed { ring_feature::PACKED } else { 0 };
        let features = setup.features | feature::LOG_ALL | packed;
        assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(true));
        let (log, file) = PeerBytes::create("log", 4096).expect("a log");
        driver.send(code::SET_LOG_BASE, 0, LogBase { size: 4096, offset: 0 }.as_bytes(), &[file.as_fd()]);
        driver.answer().expect("it is answered always");
        let (ring, used) = (base / 4096, (base + USED) / 4096);
        assert_eq!(take(&log), if setup.packed { vec![ring, used] } else { vec![used] });
    }
}

/// A log that is too small for the guest's memory: what lies beyond is nobody's.
#[test]
fn a_small_log_is_not_written_beyond() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let (_log, file) = PeerBytes::create("log", 8).expect("a log");
    driver.send(code::SET_LOG_BASE, 0, LogBase { size: 8, offset: 0 }.as_bytes(), &[file.as_fd()]);
    driver.answer().expect("an answer");
    let features = driver.setup.features | feature::LOG_ALL;
    assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(true));
    // The log has 64 pages, and the guest's memory begins behind them.
    const { assert!(GUEST_BASE / 4096 > 64) };
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

/// Where a ring stands when it is made by a guest's driver, and nowhere else.
#[test]
fn a_packed_ring_that_went_round_to_its_first_place_does_not_begin() {
    let begins = |base, features| {
        let mut queue = Queue::default();
        queue.base = base;
        queue.begins(features)
    };
    for base in [0, 0x8000, 0x8000_0000, 0x8000_8001, 0x8001_8000] {
        assert!(!begins(base, ring_feature::PACKED), "{base:#x}");
    }
    assert!(begins(0x8000_8000, ring_feature::PACKED));
    assert!(begins(0, 0));
    assert!(!begins(1, 0));
}

// ---- the disk's state -----------------------------------------------------------------------------------------------------

/// Has the state go or come, with a channel of the front end's as its monitor would make one; the answer, and the channel that is to be used.
fn transfer(driver: &mut FakeDriver, direction: u32, phase: u32) -> (u64, Option<File>) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let theirs = if direction == StateTransfer::LOAD { reader.as_fd() } else { writer.as_fd() };
    driver.send(code::SET_DEVICE_STATE_FD, 0, StateTransfer { direction, phase }.as_bytes(), &[theirs]);
    let (header, payload, channel) = driver.answer().expect("it is answered always");
    assert_eq!((header.request, header.flags), (code::SET_DEVICE_STATE_FD, 5));
    (u64::from_le_bytes(payload.try_into().expect("a word")), channel.map(File::from))
}

/// One that is accepted.
fn begin_transfer(driver: &mut FakeDriver, direction: u32) -> File {
    let (answer, channel) = transfer(driver, direction, StateTransfer::STOPPED);
    assert_eq!(answer, 0);
    channel.expect("a channel")
}

fn expect_refusal(driver: &mut FakeDriver, direction: u32, phase: u32) {
    let (answer, channel) = transfer(driver, direction, phase);
    assert_eq!((answer, channel.is_none()), (StateTransfer::REFUSED, true), "direction {direction}, phase {phase}");
    assert!(!is_good(driver), "nothing has moved");
}

/// Whether the transfer went well.
fn is_good(driver: &mut FakeDriver) -> bool {
    driver.get::<u64>(code::CHECK_DEVICE_STATE, &[]) == 0
}

fn save(driver: &mut FakeDriver) -> Vec<u8> {
    let mut record = Vec::new();
    begin_transfer(driver, StateTransfer::SAVE).read_to_end(&mut record).expect("a record");
    assert!(is_good(driver));
    record
}

/// Whether the disk takes it.
fn load(driver: &mut FakeDriver, record: &[u8]) -> bool {
    begin_transfer(driver, StateTransfer::LOAD).write_all(record).expect("room for a record");
    is_good(driver)
}

fn stop(driver: &mut FakeDriver, index: u32) {
    driver.get::<VringState>(code::GET_VRING_BASE, VringState { index, num: 0 }.as_bytes());
}

/// Where the volume is another daemon's, and knows nothing of the guest.
#[test]
fn the_write_cache_mode_goes_along_in_the_disks_state() {
    for setup in [Setup::default(), Setup::packed()] {
        for write_back in [false, true] {
            let mut source = FakeDriver::new(setup);
            source.connect();
            choose(&mut source, write_back);
            stop(&mut source, 0);
            let record = save(&mut source);
            let mut target = FakeDriver::new(setup);
            // Without a state, a front end that asks for the configuration has write-back, and one that does not write-through.
            target.knows_config = write_back;
            target.negotiate();
            assert!(load(&mut target, &record));
            target.resume();
            assert_eq!(is_durable(&mut target), !write_back, "packed: {}", setup.packed);
            // It keeps it, as one that was chosen here.
            target.restart_daemon();
            target.connect();
            assert_eq!(is_durable(&mut target), !write_back, "packed: {}", setup.packed);
            // Where the move fails, the guest goes on where it was.
            source.start_queue(0);
            assert_eq!(is_durable(&mut source), !write_back, "packed: {}", setup.packed);
        }
    }
}

#[test]
fn the_disks_state_moves_while_all_queues_are_stopped_and_at_no_other_time() {
    let mut driver = FakeDriver::new(Setup { queues: 2, ..Setup::default() });
    driver.connect();
    for index in 0..2 {
        expect_refusal(&mut driver, StateTransfer::SAVE, StateTransfer::STOPPED);
        expect_refusal(&mut driver, StateTransfer::LOAD, StateTransfer::STOPPED);
        stop(&mut driver, index);
    }
    let record = save(&mut driver);
    // A queue that starts before all of it is there.
    choose(&mut driver, false);
    let mut channel = begin_transfer(&mut driver, StateTransfer::LOAD);
    channel.write_all(&record).expect("room for a record");
    driver.start_queue(0);
    assert!(!is_good(&mut driver));
    assert!(is_durable(&mut driver), "the mode is as it was");
    // One whose memory has gone goes on when that comes back: it is not stopped.
    let region = [0_u64.as_bytes(), FakeDriver::region().as_bytes()].concat();
    assert_eq!(driver.tell(code::REM_MEM_REG, &region, &[]), Some(true));
    expect_refusal(&mut driver, StateTransfer::SAVE, StateTransfer::STOPPED);
}

#[test]
fn transfers_that_make_no_sense_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.negotiate();
    assert!(!is_good(&mut driver), "none has begun");
    for (direction, phase) in [(2, 0), (u32::MAX, 0), (0, 1), (1, u32::MAX)] {
        expect_refusal(&mut driver, direction, phase);
    }
    let record = save(&mut driver);
    assert!(!is_good(&mut driver), "it has ended already");
    // A refusal is the end of what was begun before.
    begin_transfer(&mut driver, StateTransfer::LOAD).write_all(&record).expect("room for a record");
    expect_refusal(&mut driver, 2, 0);
    // Without a descriptor it is no such message.
    driver.send(code::SET_DEVICE_STATE_FD, 8, StateTransfer::default().as_bytes(), &[]);
    assert!(driver.answer().is_none(), "the connection ends");
    // Not without the feature.
    let mut driver = FakeDriver::new(Setup { protocol: protocol::ALL & !protocol::DEVICE_STATE, ..Setup::default() });
    driver.negotiate();
    let null = File::open("/dev/null").expect("/dev/null");
    let told = driver.tell(code::SET_DEVICE_STATE_FD, StateTransfer::default().as_bytes(), &[null.as_fd()]);
    assert_eq!((told, driver.tell(code::CHECK_DEVICE_STATE, &[], &[])), (Some(false), Some(false)));
}

/// It would go on there, too, if it only connected again.
#[test]
fn a_state_with_discard_is_taken_where_there_is_none() {
    let mut source = FakeDriver::new(Setup::default());
    source.connect();
    stop(&mut source, 0);
    let record = save(&mut source);
    let mut target = disk_of_kind(without_discard(), false);
    target.negotiate();
    assert!(load(&mut target, &record));
    // What cannot be written never had it.
    let mut target = disk_of_kind(blank(BlockSize::B512), true);
    target.negotiate();
    let without = feature::DISCARD | feature::WRITE_ZEROES;
    for (features, is_taken) in [(source.setup.features, false), (source.setup.features & !without, true)] {
        let of_read_only = forged(&record, |bytes| {
            bytes[24..32].copy_from_slice(&features.to_le_bytes());
            bytes[38] = 1;
        });
        assert_eq!(load(&mut target, &of_read_only), is_taken);
    }
}

/// A record that says something else, and has the right checksum.
fn forged(record: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut forged = record.to_vec();
    change(&mut forged);
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &forged[16..]) as u32;
    forged[12..16].copy_from_slice(&sum.to_le_bytes());
    forged
}

#[test]
fn states_that_are_none_or_of_other_disks_are_not_taken() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    choose(&mut driver, false);
    stop(&mut driver, 0);
    let record = save(&mut driver);
    assert_eq!(record.len(), SIZE);
    choose(&mut driver, true);
    let damaged = |at: usize| {
        let mut damaged = record.clone();
        damaged[at] ^= 1;
        damaged
    };
    let sectors = u64::from_le_bytes(record[16..24].try_into().expect("eight bytes"));
    let of_sectors = |sectors: u64| forged(&record, |bytes| bytes[16..24].copy_from_slice(&sectors.to_le_bytes()));
    for (what, wrong) in [
        ("nothing", Vec::new()),
        ("the first part of it", record[..18].to_vec()),
        ("something else", vec![0x55; SIZE]),
        ("another magic", forged(&record, |bytes| bytes[0] ^= 1)),
        ("a newer version", forged(&record, |bytes| bytes[8] = 2)),
        ("another checksum", damaged(12)),
        ("another mode", damaged(39)),
        ("more than there is", damaged(SIZE - 1)),
        ("a mode that is none", forged(&record, |bytes| bytes[39] = 2)),
        ("a larger disk's", of_sectors(sectors + 1)),
        ("a huge disk's", of_sectors(u64::MAX)),
        ("blocks of another size", forged(&record, |bytes| bytes[32..36].copy_from_slice(&4096_u32.to_le_bytes()))),
        ("more queues", forged(&record, |bytes| bytes[36] += 1)),
        ("a read-only disk's", forged(&record, |bytes| bytes[38] = 1)),
        ("a guest's behind a vIOMMU", forged(&record, |bytes| bytes[28] |= 1 << 1)),
    ] {
        assert!(!load(&mut driver, &wrong), "{what}");
    }
    // It has room for a record, and for nothing more.
    let mut channel = begin_transfer(&mut driver, StateTransfer::LOAD);
    assert!(channel.write_all(&[0x55; SIZE + 1]).is_err());
    assert!(!is_good(&mut driver));
    driver.start_queue(0);
    assert!(!is_durable(&mut driver), "nothing of it was taken");
    stop(&mut driver, 0);
    // A guest that was told of less finds it here; zeroes at the end need not be written.
    let smaller = forged(&of_sectors(sectors - 8), |bytes| bytes[36] -= 1);
    for good in [&record[..], &record[..40], &smaller[..]] {
        choose(&mut driver, true);
        assert!(load(&mut driver, good));
        driver.start_queue(0);
        assert!(is_durable(&mut driver));
        stop(&mut driver, 0);
    }
}
