//! Changes of the guest's memory are logged while the machine moves.

use std::os::fd::AsFd;

use millrace_memory::PeerBytes;
use zerocopy::IntoBytes;

use super::super::{
    config::feature,
    fixture::{FakeDriver, GUEST_BASE, Setup, USED},
    message::{LogBase, VringAddr, code},
    queue::Queue,
    request::kind,
    ring::feature as ring_feature,
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
    assert_eq!(driver.answer().expect("it is answered always").1, 0_u64.as_bytes());
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
    assert_eq!(driver.answer().expect("an answer").1, 0_u64.as_bytes());
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
