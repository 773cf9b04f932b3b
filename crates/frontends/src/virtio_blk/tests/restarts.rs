//! The daemon dies with requests under way: none is lost, and none is done again that the guest has seen end.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::atomic::Ordering,
};

use millrace_block::{BlockCount, Operation, Volume as _};
use millrace_engine::Readiness;
use millrace_memory::PeerBytes;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::super::{
    fixture::{FakeDriver, QUEUE, Setup},
    message::{Header, VringState, code},
    request::kind,
};

const WRITE: Operation = Operation::Write { fua: false };

#[test]
fn requests_under_way_are_done_again_in_their_order() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        // Some that ended before, so that the ring is not at its start.
        for sector in 0..7 {
            driver.request(kind::OUT, sector, &[1; 512], 0);
        }
        driver.volume.take_seen();
        driver.volume.hold(true);
        driver.free_all();
        let mut names = Vec::new();
        for sector in 0..5_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, 10 + sector, &[2; 512], 0);
            names.push(driver.submit(0, &pieces));
        }
        driver.until("in flight", |driver| driver.volume.seen.lock().expect("no test panicked").len() == 5);
        driver.restart_daemon();
        driver.volume.hold(false);
        driver.volume.take_seen();
        driver.connect();
        let used: Vec<(u16, u32)> = (0..5).map(|_| driver.wait_used(0)).collect();
        assert_eq!(used, names.iter().map(|name| (*name, 1)).collect::<Vec<_>>());
        let expected: Vec<_> = (10..15).map(|sector| (WRITE, sector, 1, 1)).collect();
        assert_eq!(driver.volume.take_seen(), expected, "each once, in order");
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing ends twice");
        for sector in 0..20 {
            assert_eq!(driver.request(kind::IN, sector, &[], 512).0, 0);
        }
    }
}

/// What is taken, done and given back in one go is on record as ended, and leaves the record as the next request needs it.
#[test]
fn what_was_answered_at_once_is_not_done_again() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.together.store(1, Ordering::SeqCst);
        let submit = |driver: &mut FakeDriver, sector: u64| {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[3; 512], 0);
            let table = driver.alloc(48);
            driver.write_table(table, &pieces);
            driver.submit_indirect(0, table, 48)
        };
        for sector in 0..u64::from(QUEUE) + 3 {
            driver.free_all();
            let name = submit(&mut driver, sector);
            assert_eq!(driver.wait_used(0), (name, 1));
        }
        assert_eq!(driver.volume.did.load(Ordering::SeqCst), usize::from(QUEUE) + 3);
        driver.restart_daemon();
        driver.connect();
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing ends twice");
        assert_eq!(driver.volume.did.load(Ordering::SeqCst), usize::from(QUEUE) + 3, "nor is it done twice");
        assert!(driver.volume.take_seen().is_empty());
        let name = submit(&mut driver, 0);
        assert_eq!(driver.wait_used(0), (name, 1));
    }
}

/// A front end that stops its queues before what the last process had taken is done: it is done first, for whoever goes on at that place
/// knows nothing of it.
#[test]
fn what_an_earlier_process_had_taken_is_done_before_a_queue_stops() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        for sector in 0..5_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, 10 + sector, &[2; 512], 0);
            driver.submit(0, &pieces);
        }
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 5);
        driver.restart_daemon();
        driver.volume.hold(false);
        driver.negotiate();
        driver.join_inflight();
        driver.set_up_queue(0);
        // Together, so that nothing is taken between them.
        for num in [1, 0] {
            driver.send(code::SET_VRING_ENABLE, 0, VringState { index: 0, num }.as_bytes(), &[]);
        }
        // The front end's socket is read, and nothing was done yet: the shard must not go to sleep over it.
        driver.device(|device, cx| millrace_engine::Device::event(device, cx, 1));
        assert_eq!(driver.device(millrace_engine::Device::arm), Readiness::Busy);
        driver.device(|device, _| millrace_engine::Device::disarm(device));
        let _: VringState = driver.get(code::GET_VRING_BASE, VringState { index: 0, num: 0 }.as_bytes());
        assert_eq!((0..5).filter_map(|_| driver.next_used(0)).count(), 5);
    }
}

/// The record tells where a queue goes on, whatever the front end says: nothing that was offered meanwhile is passed over.
#[test]
fn a_front_end_that_begins_at_what_was_offered_last_loses_no_request() {
    let mut driver = FakeDriver::new(Setup { begins_at_offered: true, ..Setup::default() });
    driver.connect();
    driver.request(kind::OUT, 0, &[1; 512], 0);
    driver.volume.hold(true);
    let submit = |driver: &mut FakeDriver, sector: u64| {
        let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
        driver.submit(0, &pieces)
    };
    let taken = [submit(&mut driver, 1), submit(&mut driver, 2)];
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 2);
    driver.restart_daemon();
    let offered = [submit(&mut driver, 3), submit(&mut driver, 4)];
    driver.volume.hold(false);
    driver.connect();
    let ended: Vec<u16> = (0..4).map(|_| driver.wait_used(0).0).collect();
    assert_eq!(ended, [taken, offered].concat());
}

/// The daemon may end when a disk has grown, and before its guest is told; QEMU, which connects again, asks for nothing.
#[test]
fn a_change_of_before_the_end_is_told_by_the_next_process() {
    for on_record in [true, false] {
        changed_before_the_end(on_record);
    }
}

/// Whether a guest had begun, so that a record is there.
fn changed_before_the_end(on_record: bool) {
    let mut driver = FakeDriver::new(Setup::default());
    let word = |driver: &mut FakeDriver| {
        driver.negotiate();
        let (ours, theirs) = UnixStream::pair().expect("a channel");
        ours.set_nonblocking(true).expect("a socket");
        assert_eq!(driver.tell(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]), Some(true));
        driver.join_inflight();
        driver.start_queue(0);
        let mut message = [0; 12];
        std::io::Read::read(&mut &ours, &mut message).ok().map(|_| message)
    };
    assert_eq!(word(&mut driver), None, "it has just asked");
    driver.volume.resize(BlockCount(96 << 11)).expect("room");
    driver.restart_daemon();
    if !on_record {
        driver.inflight = None;
        driver.queues[0].forget();
        driver.wipe_queues();
    }
    let changed = Header { request: code::BACKEND_CONFIG_CHANGE, flags: 1, size: 0 };
    assert_eq!(word(&mut driver).as_ref().map(|message| &message[..]), Some(changed.as_bytes()));
    assert_eq!(driver.request(kind::IN, (96 << 11) - 1, &[], 512).0, 0);
}

/// Another worker is to take the place of this one: what is under way ends here, what is new is left to the next.
#[test]
fn a_disk_that_is_held_finishes_what_it_has_and_takes_nothing_more() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        let submit = |driver: &mut FakeDriver, sector: u64| {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
            driver.submit(0, &pieces)
        };
        let taken = [submit(&mut driver, 0), submit(&mut driver, 1)];
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 2);
        driver.device(|device, _| device.hold());
        let left = [submit(&mut driver, 2), submit(&mut driver, 3)];
        driver.settle();
        assert!(!driver.device(|device, cx| device.is_held(cx)), "two are under way");
        driver.volume.hold(false);
        driver.until("all that was taken has ended", |driver| driver.device(|device, cx| device.is_held(cx)));
        assert_eq!([driver.next_used(0), driver.next_used(0)].map(|used| used.map(|(name, _)| name)), taken.map(Some));
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing new was taken");
        assert_eq!(driver.device(|device, _| device.status().in_flight), 0, "nothing is on record for the next one");
        driver.volume.take_seen();
        driver.restart_daemon();
        driver.connect();
        assert_eq!([driver.wait_used(0), driver.wait_used(0)].map(|(name, _)| name), left);
        assert_eq!(driver.volume.take_seen().len(), 2, "each once");
    }
}

/// Killed again before the first death is dealt with, and with some ended in between.
#[test]
fn death_upon_death() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        let mut open = BTreeSet::new();
        for sector in 0..4_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
            open.insert(driver.submit(0, &pieces));
        }
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 4);
        for _ in 0..5 {
            driver.restart_daemon();
            driver.connect();
            driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 4);
        }
        driver.volume.hold(false);
        while !open.is_empty() {
            let (name, _) = driver.wait_used(0);
            assert!(open.remove(&name), "{name} ends twice");
        }
        driver.settle();
        assert_eq!(driver.next_used(0), None);
    }
}

/// The file of the record, to look at and to change.
fn record(driver: &FakeDriver) -> PeerBytes {
    let (file, what) = driver.inflight.as_ref().expect("a record");
    PeerBytes::map(file, what.offset, what.size).expect("mapped")
}

const SPLIT_STATE: usize = 16;
const PACKED_STATE: usize = 32;

/// The daemon dies after the guest could see a batch, and before the record says so.
#[test]
fn a_batch_that_the_guest_may_have_seen_is_not_done_again() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.volume.hold(true);
    let mut names = Vec::new();
    for sector in 0..3_u64 {
        let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
        names.push(driver.submit(0, &pieces));
    }
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 3);
    driver.volume.hold(false);
    for _ in 0..3 {
        driver.wait_used(0);
    }
    let record = record(&driver);
    // As it was between the index's store and the next.
    for name in &names {
        record.store_u8(16 + usize::from(*name) * SPLIT_STATE, 1);
    }
    record.store_u16(14, 0);
    driver.volume.take_seen();
    driver.restart_daemon();
    driver.connect();
    driver.settle();
    assert_eq!(driver.volume.take_seen(), [], "nothing is done again");
    assert_eq!(driver.next_used(0), None);
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

/// A packed record of before a batch of three requests was crossed off, each a state of 3 from 0 on; where `torn`, with the wrap counter of after it.
fn rewind(record: &PeerBytes, before: &[u8; 32], torn: bool) {
    for head in 0..3 {
        record.store_u8(32 + head * 3 * PACKED_STATE, 1);
    }
    record.store_u16(14, u16::from_le_bytes([before[14], before[15]]));
    record.store_u16(18, u16::from_le_bytes([before[18], before[19]]));
    record.store_u8(21, before[21] ^ u8::from(torn));
}

/// The same of a packed ring: visible, the batch is completed; not visible, it is taken back and done again, and what was written of
/// it behind its first descriptor is not taken for used when the guest comes there.
#[test]
fn a_packed_batch_is_completed_or_taken_back() {
    for visible in [true, false] {
        let mut driver = FakeDriver::new(Setup::packed());
        driver.connect();
        driver.volume.hold(true);
        let mut names = Vec::new();
        for sector in 0..3_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
            names.push(driver.submit(0, &pieces));
        }
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 3);
        let record = record(&driver);
        let before: [u8; 32] = record.read_value(0);
        let first: u16 = driver.read_value(driver.queues[0].base + 14);
        driver.volume.hold(false);
        driver.until("the end of all", |driver| driver.device(|device, _| device.status().in_flight) == 0);
        // As it was before the first descriptor's flags, or right after them.
        rewind(&record, &before, false);
        if !visible {
            driver.write_value(driver.queues[0].base + 14, &first);
        }
        driver.volume.take_seen();
        driver.restart_daemon();
        if !visible {
            driver.volume.hold(true);
        }
        driver.connect();
        if visible {
            driver.settle();
            assert_eq!(driver.volume.take_seen(), []);
        } else {
            driver.until("again in flight", |driver| driver.device(|device, _| device.status().in_flight) == 3);
            assert_eq!(driver.next_used(0), None, "what was behind the first is not seen");
            driver.volume.hold(false);
        }
        let mut ended: Vec<u16> = (0..3).map(|_| driver.wait_used(0).0).collect();
        ended.sort_unstable();
        names.sort_unstable();
        assert_eq!(ended, names, "visible: {visible}");
        driver.settle();
        assert_eq!(driver.next_used(0), None);
        assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
    }
}

/// Killed after a batch was visible and before the record says so; the guest takes it, and offers its places again where `reused`.
/// Where `torn`, the batch goes over the ring's end and the record's old position has a new wrap counter and an old index.
#[test]
fn a_packed_batch_that_the_guest_has_taken_stays_completed() {
    for (reused, torn) in [(true, false), (false, true)] {
        let mut driver = FakeDriver::new(Setup::packed());
        driver.connect();
        if torn {
            (0..3).for_each(|sector| assert_eq!(driver.request(kind::OUT, sector, &[1; 512], 0).0, 0));
        }
        let submit = |driver: &mut FakeDriver, sector: u64| {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
            driver.submit(0, &pieces)
        };
        driver.volume.hold(true);
        (0..3).for_each(|sector| _ = submit(&mut driver, sector));
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 3);
        let record = record(&driver);
        let before: [u8; 32] = record.read_value(0);
        driver.volume.hold(false);
        driver.until("the end of all", |driver| driver.device(|device, _| device.status().in_flight) == 0);
        // As it was right after the first descriptor's flags.
        rewind(&record, &before, torn);
        (0..3).for_each(|_| assert!(driver.next_used(0).is_some(), "the guest sees the batch"));
        // 7 places are left: the third goes over the end, to the batch's first place.
        let mut names: Vec<u16> = Vec::new();
        if reused {
            names.extend((4..7).map(|sector| submit(&mut driver, sector)));
        }
        let ring: Vec<u8> = driver.read(driver.queues[0].base, 16 * usize::from(QUEUE));
        driver.volume.take_seen();
        driver.restart_daemon();
        driver.volume.hold(true);
        driver.connect();
        driver.settle();
        assert_eq!(driver.read(driver.queues[0].base, ring.len()), ring, "the guest's descriptors are as they were");
        let seen: Vec<u64> = driver.volume.take_seen().into_iter().map(|seen| seen.1).collect();
        assert_eq!(seen, if reused { vec![4, 5, 6] } else { vec![] }, "nothing is done again, reused: {reused}");
        driver.volume.hold(false);
        // Released while the shard looks at them, they end in any order.
        let mut ended: Vec<u16> = names.iter().map(|_| driver.wait_used(0).0).collect();
        ended.sort_unstable();
        names.sort_unstable();
        assert_eq!(ended, names);
        driver.settle();
        assert_eq!(driver.next_used(0), None);
        assert_eq!(driver.request(kind::IN, 0, &[], 512), (0, vec![2; 512]));
    }
}

/// Whatever a front end writes into the record: the queue is refused, or works on nonsense of its own memory; nothing panics.
#[test]
fn a_garbled_record_costs_the_queue_only() {
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..300 {
        let setup = if round % 2 == 0 { Setup::default() } else { Setup::packed() };
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        for sector in 0..3_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &[2; 512], 0);
            driver.submit(0, &pieces);
        }
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 3);
        driver.restart_daemon();
        driver.volume.hold(false);
        let record = record(&driver);
        if round == 1 {
            // Nothing under way, and nothing free.
            (0..3).for_each(|head| record.store_u8(32 + head * 3 * PACKED_STATE, 0));
            for at in [12, 14] {
                record.store_u16(at, u16::MAX);
            }
        }
        for _ in 0..=random() % 4 {
            let at = random() as usize % record.len();
            record.store_u8(at, random() as u8);
        }
        driver.negotiate();
        let (file, what) = driver.inflight.as_ref().expect("a record");
        let (file, what) = (file.try_clone().expect("a descriptor"), *what);
        let request = super::super::message::code::SET_INFLIGHT_FD;
        assert_eq!(driver.tell(request, what.as_bytes(), &[file.as_fd()]), Some(true));
        driver.try_start_queue(0);
        for _ in 0..50 {
            driver.shard.turn();
        }
        // A new one meets what was made of the record, where the queue was not refused.
        let (pieces, ..) = driver.prepare(kind::OUT, 3, &[2; 512], 0);
        driver.submit(0, &pieces);
        driver.kick(0);
        for _ in 0..50 {
            driver.shard.turn();
        }
        driver.stream = None;
        driver.until("rest", |driver| driver.device(|device, cx| device.is_idle(cx) && !device.status().connected));
        driver.queues[0].forget();
        driver.wipe_queues();
        driver.inflight = None;
        driver.connect();
        assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0, "round {round}");
    }
}

/// A step of the guest, the volume or fate.
#[derive(Clone, Copy, Debug)]
enum Move {
    Write { sector: u8, pieces: u8 },
    Hold,
    Release,
    Turns(u8),
    Collect,
    Kill,
    Leave,
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => (0..32_u8, 1..4_u8).prop_map(|(sector, pieces)| Move::Write { sector, pieces }),
        1 => Just(Move::Hold),
        2 => Just(Move::Release),
        3 => (1..6_u8).prop_map(Move::Turns),
        3 => Just(Move::Collect),
        1 => Just(Move::Kill),
        1 => Just(Move::Leave),
    ]
}

/// Takes ends from the ring: each is of a request that is open.
fn collect(driver: &mut FakeDriver, open: &mut BTreeMap<u16, u8>) {
    while let Some((name, len)) = driver.next_used(0) {
        assert!(open.remove(&name).is_some(), "a request that is open ends, once");
        assert_eq!(len, 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Any sequence of writes, deaths and departures, on either ring: every request ends exactly once, and the disk holds what was
    /// written. (Blocks are written by one request at a time, so that what they hold is known.)
    #[test]
    fn every_request_ends_once(packed: bool, event: bool, moves in prop::collection::vec(moves(), 1..120)) {
        let setup = if packed { Setup::packed() } else { Setup::default() };
        let features = if event { setup.features } else { setup.features & !(1 << 29) };
        let mut driver = FakeDriver::new(Setup { features, ..setup });
        driver.connect();
        let mut open: BTreeMap<u16, u8> = BTreeMap::new();
        let mut model = [0_u8; 32];
        let (mut value, mut used) = (0_u8, 0);
        for step in moves {
            match step {
                Move::Write { sector, pieces } => {
                    let busy = open.values().any(|other| *other == sector);
                    if busy || used + usize::from(pieces) + 2 > usize::from(QUEUE) {
                        continue;
                    }
                    value = value.wrapping_add(1);
                    let (whole, ..) = driver.prepare(kind::OUT, sector.into(), &[value; 512], 0);
                    let (addr, mut at) = (whole[1].0, 0);
                    let mut cut = vec![whole[0]];
                    for piece in 0..pieces {
                        let len = if piece + 1 == pieces { 512 - at } else { 100 };
                        cut.push((addr + u64::from(at), len, false));
                        at += len;
                    }
                    cut.push(whole[2]);
                    used += cut.len();
                    let name = driver.submit(0, &cut);
                    open.insert(name, sector);
                    model[usize::from(sector)] = value;
                }
                Move::Hold => driver.volume.hold(true),
                Move::Release => driver.volume.hold(false),
                Move::Turns(count) => (0..count).for_each(|_| { driver.shard.turn(); }),
                Move::Collect => {
                    collect(&mut driver, &mut open);
                    if open.is_empty() {
                        used = 0;
                        driver.free_all();
                    }
                }
                Move::Kill => {
                    driver.restart_daemon();
                    driver.connect();
                }
                Move::Leave => {
                    driver.stream = None;
                    driver.volume.hold(false);
                    driver.until("rest", |driver| {
                        driver.device(|device, cx| device.is_idle(cx) && !device.status().connected)
                    });
                    // As QEMU does: where to go on is the used ring's word.
                    driver.connect();
                }
            }
        }
        driver.volume.hold(false);
        driver.until("the end of all", |driver| {
            collect(driver, &mut open);
            open.is_empty()
        });
        driver.settle();
        prop_assert_eq!(driver.next_used(0), None);
        for (sector, value) in model.into_iter().enumerate() {
            prop_assert_eq!(driver.request(kind::IN, sector as u64, &[], 512), (0, vec![value; 512]), "sector {}", sector);
        }
    }
}
