//! What requests do, on rings of either kind.

use std::{
    os::unix::fs::FileExt as _,
    sync::{Arc, atomic::Ordering, mpsc},
};

use millrace_block::{
    BlockSize, Operation, Volume,
    trace::{self, Event, EventKind, Site},
};

use super::super::{
    fixture::{AVAIL, FakeDriver, GUEST_BASE, MEMORY, QUEUE, Seen, Setup, USED, Watched},
    message::{ConfigHead, code},
    request::kind,
    ring::feature as ring,
};
use millrace_backends::MemoryVolume;
use zerocopy::IntoBytes;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + seed * 31 + at / 512) as u8).collect()
}

fn both(test: impl Fn(Setup)) {
    for setup in [Setup::default(), Setup::packed()] {
        for features in [0, ring::EVENT_IDX, ring::INDIRECT, ring::EVENT_IDX | ring::INDIRECT] {
            let rings = ring::EVENT_IDX | ring::INDIRECT;
            test(Setup { features: setup.features & !rings | features, ..setup });
        }
    }
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [sector.as_bytes(), sectors.as_bytes(), flags.as_bytes()].concat()
}

#[test]
fn what_was_written_is_read_again_many_times_around_the_ring() {
    both(|setup| {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        for round in 0..100 {
            let data = pattern(round, 4096);
            assert_eq!(driver.request(kind::OUT, round as u64 * 8, &data, 0).0, OK);
            assert_eq!(driver.request(kind::FLUSH, 0, &[], 0).0, OK);
            let (status, back) = driver.request(kind::IN, round as u64 * 8, &[], 4096);
            assert!(status == OK && back == data, "round {round}");
        }
        let counters = driver.device(|device, _| device.status().counters);
        assert_eq!((counters.read_commands, counters.write_commands, counters.other_commands), (100, 100, 100));
        assert_eq!((counters.bytes_read, counters.errors), (409_600, 0));
    });
}

/// Each request is seen in its queue, once; an empty queue, which is looked at again and again, tells nothing.
#[test]
fn a_trace_tells_of_requests_and_not_of_looks() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let events = Arc::new(trace::Ring::new(4096));
        trace::install(Some(Arc::clone(&events)));
        driver.device(|device, _| device.trace(Site::new(1, None)));
        for sector in 0..5 {
            assert_eq!(driver.request(kind::IN, sector, &[], 512).0, OK);
            (0..1000).for_each(|_| _ = driver.shard.turn());
        }
        trace::install(None);
        let mut told = Vec::new();
        while events.drain(64, |words| told.push(Event::from_words(words).expect("a known kind"))) > 0 {}
        let seen: Vec<_> = told.iter().filter(|event| event.kind == EventKind::Seen).map(|event| event.count).collect();
        assert_eq!(seen, [1; 5], "packed: {}", setup.packed);
        assert_eq!(told.iter().filter(|event| event.kind == EventKind::Fetched).count(), 5);
    }
}

/// What it had asked for has no end, and whoever traces the disk is not to wait for one.
#[test]
fn a_trace_tells_that_the_front_end_is_gone() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let events = Arc::new(trace::Ring::new(64));
    trace::install(Some(Arc::clone(&events)));
    driver.device(|device, _| device.trace(Site::new(1, None)));
    driver.stream = None;
    driver.settle();
    trace::install(None);
    let mut kinds = Vec::new();
    while events.drain(64, |words| kinds.push(Event::from_words(words).expect("a known kind").kind)) > 0 {}
    assert_eq!(kinds, [EventKind::Reset]);
}

#[test]
fn discard_zeroes_identity_and_what_is_unknown() {
    both(|setup| {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.request(kind::OUT, 0, &pattern(1, 8192), 0);
        assert_eq!(driver.request(kind::DISCARD, 0, &range(0, 4, 0), 0).0, OK);
        assert_eq!(driver.request(kind::WRITE_ZEROES, 0, &[range(6, 1, 0), range(8, 2, 1)].concat(), 0).0, OK);
        let mut expected = pattern(1, 8192);
        for sectors in [0..4, 6..7, 8..10] {
            expected[sectors.start * 512..sectors.end * 512].fill(0);
        }
        assert_eq!(driver.request(kind::IN, 0, &[], 8192), (OK, expected));
        let (status, serial) = driver.request(kind::GET_ID, 0, &[], 20);
        assert_eq!((status, serial), (OK, b"MR-disk\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec()));
        assert_eq!(driver.request(99, 0, &[], 0).0, UNSUPPORTED);
        assert_eq!(driver.request(kind::DISCARD, 0, &range(0, 4, 1), 0).0, UNSUPPORTED, "a discard has no flags");
        assert_eq!(driver.request(kind::WRITE_ZEROES, 0, &range(0, 4, 2), 0).0, UNSUPPORTED, "an unknown flag");
    });
}

#[test]
fn ranges_outside_the_disk_and_lengths_that_are_no_blocks_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let sectors = 64 << 11;
    for (what, kind, sector, out, into) in [
        ("a read behind the end", kind::IN, sectors, vec![], 512),
        ("a write over the end", kind::OUT, sectors - 1, vec![0; 1024], 0),
        ("a sector whose byte has no number", kind::IN, u64::MAX, vec![], 512),
        ("half a block", kind::IN, 0, vec![], 256),
        ("a discard over the end", kind::DISCARD, 0, range(sectors - 1, 2, 0), 0),
        ("a discard that overflows", kind::DISCARD, 0, range(u64::MAX - 1, 2, 0), 0),
        ("no range at all", kind::DISCARD, 0, vec![], 0),
        ("half a range", kind::WRITE_ZEROES, 0, vec![0; 24], 0),
        ("too many ranges", kind::WRITE_ZEROES, 0, vec![0; 33 * 16], 0),
    ] {
        assert_eq!(driver.request(kind, sector, &out, into).0, IO_ERROR, "{what}");
    }
    assert_eq!(driver.request(kind::IN, sectors - 1, &[], 512).0, OK, "the last sector");
    assert_eq!(driver.device(|device, _| device.status().counters.errors), 9);
}

/// Sectors are 512 bytes whatever the blocks are; less than a block cannot be asked for.
#[test]
fn blocks_of_4096_bytes() {
    let volume = MemoryVolume::create("disk", 64 << 20, BlockSize::B4096).expect("a volume");
    let mut driver = FakeDriver::over(Setup::default(), Watched::over(volume));
    driver.connect();
    let data = pattern(3, 8192);
    assert_eq!(driver.request(kind::OUT, 16, &data, 0).0, OK);
    assert_eq!(driver.volume.take_seen(), [(Operation::Write { fua: false }, 2, 2, 1)]);
    assert_eq!(driver.request(kind::IN, 16, &[], 8192), (OK, data));
    assert_eq!(driver.request(kind::IN, 1, &[], 4096).0, IO_ERROR);
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, IO_ERROR);
    let head = ConfigHead { offset: 20, size: 4, flags: 0 };
    let space: [u8; 16] = driver.get(code::GET_CONFIG, &[head.as_bytes(), &[0; 4]].concat());
    assert_eq!(space[12..], 4096_u32.to_le_bytes());
}

/// The chain of a merged request is one request on the volume, with all its pieces; where header and status are cut means nothing.
#[test]
fn a_chain_is_one_request_however_it_is_cut() {
    both(|setup| {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let data = pattern(5, 10 * 512);
        let header = driver.alloc(16);
        driver.write(header, &[kind::OUT.as_bytes(), 0_u32.as_bytes(), 40_u64.as_bytes()].concat());
        // Ten pieces of data, none next to another; the header in two.
        let mut pieces = vec![(header, 5, false), (header + 5, 11, false)];
        for part in data.chunks(512) {
            let addr = driver.alloc(1024);
            driver.write(addr, part);
            pieces.push((addr, 512, false));
        }
        let status = driver.alloc(1);
        pieces.push((status, 1, true));
        driver.submit(0, &pieces);
        driver.wait_used(0);
        assert_eq!(driver.read(status, 1), [OK]);
        assert_eq!(driver.volume.take_seen(), [(Operation::Write { fua: false }, 40, 10, 10)]);
        // Neighbours are one piece; data and status in one descriptor are told apart.
        driver.free_all();
        let (mut pieces, data_at, _) = driver.prepare(kind::IN, 40, &[], 5120);
        pieces.truncate(1);
        driver.write(data_at + 5120, &[0xff]);
        pieces.extend([(data_at, 2048, true), (data_at + 2048, 5121 - 2048, true)]);
        driver.submit(0, &pieces);
        assert_eq!(driver.wait_used(0).1, 5121);
        assert_eq!(driver.read(data_at, 5120), data);
        assert_eq!(driver.read(data_at + 5120, 1), [OK]);
        assert_eq!(driver.volume.take_seen(), [(Operation::Read, 40, 10, 1)]);
    });
}

/// The same with an indirect table; the ring gives one descriptor for it.
#[test]
fn an_indirect_table_is_one_request() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let data = pattern(9, 40 * 512);
        let (pieces, _, status) = driver.prepare(kind::OUT, 8, &[], 0);
        let mut entries = vec![pieces[0]];
        for part in data.chunks(512) {
            let addr = driver.alloc(1024);
            driver.write(addr, part);
            entries.push((addr, 512, false));
        }
        entries.push((status, 1, true));
        let table = driver.alloc(entries.len() as u64 * 16);
        driver.write_table(table, &entries);
        driver.submit_indirect(0, table, entries.len() as u32 * 16);
        driver.wait_used(0);
        assert_eq!(driver.read(status, 1), [OK], "packed: {}", setup.packed);
        assert_eq!(driver.volume.take_seen(), [(Operation::Write { fua: false }, 8, 40, 40)]);
        assert_eq!(driver.request(kind::IN, 8, &[], 40 * 512), (OK, data));
    }
}

/// The guest can go on with the first of many while the others are worked on.
#[test]
fn the_first_of_many_are_given_back_while_others_are_worked_on() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let (memory, index) = (driver.memory.try_clone().unwrap(), driver.queues[0].base - GUEST_BASE + USED + 2);
    let (tell, given_back) = mpsc::channel();
    *driver.volume.look.lock().unwrap() = Some(Box::new(move || {
        let mut used = [0; 2];
        memory.read_exact_at(&mut used, index).unwrap();
        tell.send(u16::from_le_bytes(used)).unwrap();
    }));
    for at in 0..40 {
        let (pieces, ..) = driver.prepare(kind::IN, at * 8, &[], 512);
        let table = driver.alloc(48);
        driver.write_table(table, &pieces);
        driver.submit_indirect(0, table, 48);
    }
    (0..40).for_each(|_| _ = driver.wait_used(0));
    let seen: Vec<u16> = given_back.try_iter().collect();
    assert_eq!(seen, [[0; 16].as_slice(), &[16; 16], &[32; 8]].concat());
}

/// Several that are found together go to the volume together, as far as it does them at once; the others wait, or fail, each for itself.
#[test]
fn requests_that_are_found_together_all_end() {
    for (setup, most) in
        [Setup::default(), Setup::packed()].into_iter().flat_map(|setup| [1, 3, 16].map(|most| (setup, most)))
    {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.together.store(most, Ordering::SeqCst);
        for round in 0..20_u64 {
            driver.free_all();
            // Every fifth is behind the end, and what is left over after some were done together waits in every second round.
            driver.volume.hold(round % 2 == 1);
            let sector = |at: u64| if at % 5 == 4 { u64::MAX / 1024 } else { (round * 7 + at) * 8 };
            let requests: Vec<_> = (0..QUEUE as u64 - 1)
                .map(|at| {
                    let data = pattern((round + at) as usize, 4096);
                    let (pieces, _, status) = driver.prepare(kind::OUT, sector(at), &data, 0);
                    let table = driver.alloc(3 * 16);
                    driver.write_table(table, &pieces);
                    driver.submit_indirect(0, table, 3 * 16);
                    (at, data, status)
                })
                .collect();
            driver.shard.turn();
            driver.volume.hold(false);
            for _ in &requests {
                driver.wait_used(0);
            }
            for (at, _, status) in &requests {
                let expected = if at % 5 == 4 { IO_ERROR } else { OK };
                assert_eq!(driver.read(*status, 1), [expected], "request {at} of round {round}, {most} together");
            }
            for (at, data, _) in requests.into_iter().filter(|(at, ..)| at % 5 != 4) {
                assert!(driver.request(kind::IN, sector(at), &[], 4096) == (OK, data), "request {at} of round {round}");
            }
        }
        let did = driver.volume.did.load(Ordering::SeqCst);
        assert!(did >= 20, "{did} were done together, {most} at a time");
        let counters = driver.device(|device, _| device.status().counters);
        assert_eq!(counters.write_commands, 20 * u64::from(QUEUE - 1));
    }
}

/// More than go to the volume together by one: that one needs no task either.
#[test]
fn the_last_one_of_several_is_done_at_once() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.together.store(16, Ordering::SeqCst);
        for at in 0..17 {
            let (pieces, ..) = driver.prepare(kind::IN, at * 8, &[], 512);
            let table = driver.alloc(48);
            driver.write_table(table, &pieces);
            driver.submit_indirect(0, table, 48);
        }
        (0..17).for_each(|_| _ = driver.wait_used(0));
        let did = driver.volume.did.load(Ordering::SeqCst);
        assert_eq!((did, driver.volume.take_seen().len()), (17, 0));
    }
}

#[test]
fn one_by_itself_is_done_at_once() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.together.store(1, Ordering::SeqCst);
        let rounds = u64::from(QUEUE) * 2;
        for round in 0..rounds {
            driver.free_all();
            let data = pattern(round as usize, 4096);
            for (kind, out, into) in [(kind::OUT, data.as_slice(), 0), (kind::IN, &[][..], 4096)] {
                let (pieces, place, status) = driver.prepare(kind, round * 8, out, into);
                let table = driver.alloc(3 * 16);
                driver.write_table(table, &pieces);
                let name = driver.submit_indirect(0, table, 3 * 16);
                assert_eq!(driver.wait_used(0), (name, into + 1), "round {round}");
                assert_eq!(driver.read(status, 1), [OK]);
                assert!(into == 0 || driver.read(place, 4096) == data, "round {round}");
            }
        }
        assert_eq!(driver.volume.did.load(Ordering::SeqCst) as u64, rounds * 2);
        assert!(driver.volume.take_seen().is_empty(), "none was submitted");
        let status = driver.device(|device, _| device.status());
        let counters = status.counters;
        assert_eq!((status.in_flight, counters.read_commands, counters.write_commands), (0, rounds, rounds));
        assert_eq!((counters.bytes_read, counters.bytes_written), (rounds * 4096, rounds * 4096));
    }
}

/// What a volume does not do at once goes the usual way, and for a while so does what comes next.
#[test]
fn one_by_itself_that_is_refused_is_submitted() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let write = |driver: &mut FakeDriver, sector: u64, data: &[u8]| {
            driver.free_all();
            let (pieces, _, status) = driver.prepare(kind::OUT, sector, data, 0);
            let table = driver.alloc(3 * 16);
            driver.write_table(table, &pieces);
            let name = driver.submit_indirect(0, table, 3 * 16);
            (driver.wait_used(0) == (name, 1)).then(|| driver.read(status, 1)[0])
        };
        let did = |driver: &FakeDriver| driver.volume.did.load(Ordering::SeqCst);
        assert_eq!(write(&mut driver, 0, &pattern(1, 512)), Some(OK));
        assert_eq!((did(&driver), driver.volume.take_seen().len()), (0, 1));
        driver.volume.together.store(1, Ordering::SeqCst);
        let mut tries = 1;
        while did(&driver) == 0 {
            assert_eq!(write(&mut driver, tries, &pattern(1, 512)), Some(OK));
            tries += 1;
            assert!(tries < 1000, "it is never tried again");
        }
        assert!(tries > 10, "not with every request: {tries}");
        // One that cannot be done at all is answered as ever.
        let end = driver.volume.geometry().blocks.0;
        for (sector, len) in [(end, 512), (end - 1, 1024), (u64::MAX, 512), (0, 500)] {
            assert_eq!(write(&mut driver, sector, &pattern(1, len)), Some(IO_ERROR));
        }
        let counters = driver.device(|device, _| device.status().counters);
        assert_eq!((counters.write_commands, counters.errors), (tries + 4, 4));
    }
}

/// However long a guest's requests are, nobody else on the shard waits long for its turn.
#[test]
fn a_turn_moves_so_much_and_no_more() {
    const MIB: u32 = 1 << 20;
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        // The same memory many times: 15 requests of 48 MiB, and then some that go ahead by themselves.
        let header = driver.prepare(kind::IN, 0, &[], 0).0[0];
        let (data, status, table) = (driver.alloc(u64::from(MIB)), driver.alloc(1), driver.alloc(50 * 16));
        let long = [vec![header], vec![(data, MIB, true); 48], vec![(status, 1, true)]].concat();
        let short = [vec![header], vec![(data, MIB, true); 3], vec![(status, 1, true)]].concat();
        for entries in [long, short] {
            driver.write_table(table, &entries);
            (0..QUEUE - 1).for_each(|_| _ = driver.submit_indirect(0, table, entries.len() as u32 * 16));
            let mut ended = 0;
            while ended < QUEUE - 1 {
                driver.shard.turn();
                let moved: u64 = driver.volume.take_seen().iter().map(|seen| seen.2 * 512).sum();
                assert!(moved <= 16 * u64::from(MIB), "{moved} bytes in a turn");
                while let Some((_, len)) = driver.next_used(0) {
                    assert_eq!((len, driver.read(status, 1)[0]), ((entries.len() as u32 - 2) * MIB + 1, OK));
                    ended += 1;
                }
            }
        }
    }
}

/// Nor are many descriptors followed in a turn, for requests that move nothing.
#[test]
fn a_turn_follows_so_many_descriptors_and_no_more() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let header = driver.prepare(kind::FLUSH, 0, &[], 0).0[0];
        let (data, status, table) = (driver.alloc(1024), driver.alloc(1), driver.alloc(1026 * 16));
        let bytes = (data..data + 1024).map(|at| (at, 1, true));
        let entries: Vec<_> = [header].into_iter().chain(bytes).chain([(status, 1, true)]).collect();
        driver.write_table(table, &entries);
        for _ in 1..QUEUE {
            driver.submit_indirect(0, table, entries.len() as u32 * 16);
        }
        let mut turns: Vec<u16> = Vec::new();
        while turns.iter().sum::<u16>() < QUEUE - 1 {
            driver.shard.turn();
            let mut ended = 0;
            while let Some((_, len)) = driver.next_used(0) {
                assert_eq!((len, driver.read(status, 1)[0]), (1, OK));
                ended += 1;
            }
            turns.push(ended);
        }
        // 8 MiB, of which each descriptor is 256 bytes.
        assert!(turns.iter().all(|ended| *ended < QUEUE - 1), "{turns:?}");
    }
}

/// Zeroes and discards bring no data, and have a volume work all the same.
#[test]
fn a_turn_erases_so_much_and_no_more() {
    let many: Vec<u8> = (0..32).flat_map(|at| range(at * 8, 8, 0)).collect();
    for setup in [Setup::default(), Setup::packed()] {
        for (kind, ranges) in [(kind::WRITE_ZEROES, range(0, 2048, 0)), (kind::DISCARD, many.clone())] {
            let mut driver = FakeDriver::new(setup);
            driver.connect();
            let (entries, _, status) = driver.prepare(kind, 0, &ranges, 0);
            let table = driver.alloc(48);
            driver.write_table(table, &entries);
            (1..QUEUE).for_each(|_| _ = driver.submit_indirect(0, table, 48));
            let mut ended = 0;
            while ended < QUEUE - 1 {
                driver.shard.turn();
                // A discard takes as long as 32 KiB, however short it is.
                let cost = |seen: &Seen| if seen.0 == Operation::Deallocate { 32 << 10 } else { seen.2 * 512 };
                let spent: u64 = driver.volume.take_seen().iter().map(cost).sum();
                assert!(spent <= 16 << 20, "{spent} bytes in a turn");
                while let Some((_, len)) = driver.next_used(0) {
                    assert_eq!((len, driver.read(status, 1)[0]), (1, OK));
                    ended += 1;
                }
            }
        }
    }
}

/// A volume may do with a range at once what takes long: it gets it in pieces, small ones first.
#[test]
fn ranges_go_piece_by_piece() {
    const MIB: u64 = 2048;
    for (kind, sectors) in [(kind::DISCARD, 40 * MIB), (kind::WRITE_ZEROES, 32 * MIB)] {
        let mut driver = FakeDriver::new(Setup::default());
        driver.connect();
        let begin = MIB / 2 + 8;
        assert_eq!(driver.request(kind, 0, &range(begin, sectors as u32, 0), 0).0, OK);
        let (mut at, mut most) = (begin, MIB);
        for (_, lba, count, _) in driver.volume.take_seen() {
            assert_eq!(lba, at, "nothing is left out, or done twice");
            assert!(count <= most, "{count} blocks after pieces of {most} at most");
            (at, most) = (at + count, most * 2);
        }
        assert_eq!(at, begin + sectors);
        // A range over the end: nothing is done of it, nor of the one before.
        let ranges = [range(0, 8, 0), range((64 << 11) - 8, 16, 0)].concat();
        assert_eq!(driver.request(kind, 0, &ranges, 0).0, IO_ERROR);
        assert!(driver.volume.take_seen().is_empty());
    }
}

/// Of more than it was told of, a driver may not ask, wherever the disk ends.
#[test]
fn ranges_longer_than_announced_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let head = ConfigHead { offset: 48, size: 4, flags: 0 };
    let space: [u8; 16] = driver.get(code::GET_CONFIG, &[head.as_bytes(), &[0; 4]].concat());
    let most = u32::from_le_bytes(space[12..].try_into().expect("four bytes"));
    assert!(u64::from(most) < 64 << 11, "there are more on the disk");
    assert_eq!(driver.request(kind::WRITE_ZEROES, 0, &range(0, most + 1, 0), 0).0, IO_ERROR);
    assert!(driver.volume.take_seen().is_empty());
    assert_eq!(driver.request(kind::WRITE_ZEROES, 0, &range(0, most, 0), 0).0, OK);
    assert!(!driver.volume.take_seen().is_empty());
}

/// Where the volume waits, long requests do not wait for each other.
#[test]
fn long_requests_wait_beside_each_other() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.volume.hold(true);
    let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 6 << 20);
    let names = [driver.submit(0, &pieces), driver.submit(0, &pieces)];
    driver.until("both", |driver| driver.volume.seen.lock().expect("no test panicked").len() == 2);
    driver.volume.hold(false);
    let mut ended = [driver.wait_used(0), driver.wait_used(0)];
    ended.sort_unstable();
    let mut expected = names.map(|name| (name, (6 << 20) + 1));
    expected.sort_unstable();
    assert_eq!(ended, expected);
    assert_eq!(driver.volume.take_seen().len(), 4);
}

/// Pieces of a long request end within those of its memory.
#[test]
fn a_long_request_is_whole() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let (sector, bytes) = (24, (5 << 20) + 512);
    let data = pattern(4, bytes);
    let memory = driver.alloc(bytes as u64 * 2 + 64);
    for (kind, first) in [(kind::OUT, [1000, 3 << 20, 7]), (kind::IN, [(4 << 20) - 1, 2, 100])] {
        let header = driver.prepare(kind, sector, &[], 0).0[0];
        let status = driver.alloc(1);
        let mut pieces = vec![header];
        let (mut at, mut done) = (memory, 0);
        for len in first.into_iter().chain([bytes - first.iter().sum::<usize>()]) {
            if kind == kind::OUT {
                driver.write(at, &data[done..done + len]);
            } else {
                driver.write(at, &vec![0; len]);
            }
            pieces.push((at, len as u32, kind == kind::IN));
            (at, done) = (at + len as u64 + 3, done + len);
        }
        pieces.push((status, 1, true));
        driver.submit(0, &pieces);
        driver.wait_used(0);
        assert_eq!(driver.read(status, 1), [OK]);
        let seen: Vec<_> = driver.volume.take_seen().into_iter().map(|(_, lba, count, _)| (lba, count)).collect();
        assert_eq!(seen, [(24, 8192), (24 + 8192, 2049)]);
        if kind == kind::IN {
            let mut back = Vec::new();
            for (addr, len, _) in &pieces[1..5] {
                back.extend(driver.read(*addr, *len as usize));
            }
            assert!(back == data);
        }
    }
    // One that ends beyond the disk does nothing.
    let header = driver.prepare(kind::OUT, (64 << 11) - 10000, &[], 0).0[0];
    let status = driver.alloc(1);
    driver.submit(0, &[header, (memory, bytes as u32, false), (status, 1, true)]);
    driver.wait_used(0);
    assert_eq!((driver.read(status, 1), driver.volume.take_seen()), (vec![IO_ERROR], vec![]));
}

/// Requests that came together are looked at together: those of the usual shape, and others between them.
#[test]
fn all_shapes_may_come_in_one_batch() {
    for (setup, round) in
        [Setup::default(), Setup::packed()].into_iter().flat_map(|setup| (0..4).map(move |round| (setup, round)))
    {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.together.store(usize::from(round == 3), Ordering::SeqCst);
        let data = pattern(3, 1024);
        assert_eq!(driver.request(kind::OUT, 100, &data, 0).0, OK);
        driver.volume.take_seen();
        driver.free_all();
        let blocks = driver.volume.geometry().blocks.0;
        // What it is; kind, sector, bytes out, bytes in; how far table and header are from where they should be; the status.
        let wanted = [
            ("a read", kind::IN, 100, 0, 1024, 0, 0, OK),
            ("a write", kind::OUT, 200, 512, 0, 0, 0, OK),
            ("a serial", kind::GET_ID, 0, 0, 20, 0, 0, OK),
            ("a table at no word's place", kind::IN, 101, 0, 512, 4, 0, OK),
            ("a header at no word's place", kind::IN, 100, 0, 512, 0, 4, OK),
            ("a sector past the end", kind::IN, blocks, 0, 512, 0, 0, IO_ERROR),
            ("half a sector", kind::IN, 0, 0, 256, 0, 0, IO_ERROR),
            ("a kind that is none", 77, 0, 0, 512, 0, 0, UNSUPPORTED),
            ("a read into what is ours to read", kind::IN, 5, 512, 0, 0, 0, OK),
        ];
        let mut expected = Vec::new();
        for (what, kind, sector, out, into, table_at, header_at, status) in wanted {
            let (mut pieces, place, status_at) = driver.prepare(kind, sector, &data[..out], into);
            if header_at > 0 {
                let header: [u64; 2] = driver.read_value(pieces[0].0);
                pieces[0].0 = driver.alloc(32) + header_at;
                driver.write_value(pieces[0].0, &header);
            }
            let table = driver.alloc(pieces.len() as u64 * 16 + 16) + table_at;
            driver.write_table(table, &pieces);
            let name = match round {
                // As chains of the ring's own, as far as it has descriptors.
                1 if expected.len() < 3 => driver.submit(0, &pieces),
                _ => driver.submit_indirect(0, table, pieces.len() as u32 * 16),
            };
            expected.push((what, name, place, into, status_at, status));
            if round >= 2 {
                // Each by itself, and by the shortest way.
                driver.settle();
            }
        }
        driver.settle();
        for (what, name, place, into, status_at, status) in expected {
            let len = if status == OK { into + 1 } else { 1 };
            assert_eq!(driver.next_used(0), Some((name, len)), "{what}");
            assert_eq!(driver.read(status_at, 1), [status], "{what}");
            match what {
                "a read" => assert_eq!(driver.read(place, 1024), data),
                "a table at no word's place" => assert_eq!(driver.read(place, 512), data[512..]),
                "a header at no word's place" => assert_eq!(driver.read(place, 512), data[..512]),
                _ => {}
            }
        }
        assert_eq!(driver.request(kind::IN, 200, &[], 512), (OK, data[..512].to_vec()));
        let did = driver.volume.did.load(Ordering::SeqCst);
        assert_eq!(did, if round == 3 { 2 } else { 0 }, "the first two, before one is refused");
    }
}

#[test]
fn a_batch_is_told_once_and_only_to_who_asked() {
    both(|setup| {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.settle();
        driver.interrupts(0);
        for round in 0..20 {
            let mut names = Vec::new();
            driver.free_all();
            for sector in 0..5 {
                let (pieces, ..) = driver.prepare(kind::IN, sector, &[], 512);
                names.push(driver.submit(0, &pieces));
            }
            driver.settle();
            for name in names {
                assert_eq!(driver.next_used(0), Some((name, 513)));
            }
            // With the event index the guest's wish stands at 0, which only the first batch passes.
            let wishes = !setup.packed && setup.features & ring::EVENT_IDX != 0;
            assert_eq!(driver.interrupts(0), u64::from(!wishes || round == 0), "round {round}");
        }
        let area = driver.queues[0].base + AVAIL;
        if setup.packed {
            driver.write_value(area + 2, &1_u16);
        } else {
            driver.write_value(area, &1_u16);
        }
        driver.request(kind::IN, 0, &[], 512);
        assert_eq!(driver.interrupts(0), 0, "the guest is polling");
    });
}

#[test]
fn an_event_index_is_told_when_it_is_passed() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.settle();
    driver.interrupts(0);
    let wish = driver.queues[0].base + AVAIL + 4 + u64::from(QUEUE) * 2;
    driver.write_value(wish, &3_u16);
    let counts: Vec<u64> = (0..6)
        .map(|_| {
            driver.request(kind::IN, 0, &[], 512);
            driver.interrupts(0)
        })
        .collect();
    assert_eq!(counts, [0, 0, 0, 1, 0, 0]);
    // A packed ring: position and wrap counter.
    let mut driver = FakeDriver::new(Setup::packed());
    driver.connect();
    driver.settle();
    driver.interrupts(0);
    let area = driver.queues[0].base + AVAIL;
    driver.write_value(area, &(4_u16 | 1 << 15));
    driver.write_value(area + 2, &2_u16);
    // Three descriptors each: the request at 3 to 5 passes position 4, and after the wrap nothing does.
    let counts: Vec<u64> = (0..=QUEUE / 3)
        .map(|_| {
            driver.request(kind::IN, 0, &[], 512);
            driver.interrupts(0)
        })
        .collect();
    assert!(counts[1] == 1 && counts.iter().sum::<u64>() == 1, "{counts:?}");
    // The next round: position 4, the other wrap counter.
    driver.write_value(area, &4_u16);
    let counts: Vec<u64> = (0..3)
        .map(|_| {
            driver.request(kind::IN, 0, &[], 512);
            driver.interrupts(0)
        })
        .collect();
    assert_eq!(counts.iter().sum::<u64>(), 1, "{counts:?}");
}

/// A shard that sleeps is woken by a kick, and asks for one before it sleeps.
#[test]
fn a_sleeping_disk_asks_for_a_kick() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.settle();
        let readiness = driver.device(millrace_engine::Device::arm);
        assert_eq!(readiness, millrace_engine::Readiness::Block);
        let wish = |driver: &FakeDriver| {
            let queue = driver.queues[0].base;
            let [place, flags]: [u16; 2] = driver.read_value(queue + USED);
            let index: u16 = driver.read_value(queue + USED + 4 + u64::from(QUEUE) * 8);
            if setup.packed { (place, flags) } else { (index, 0) }
        };
        let next = if setup.packed { (1 << 15, 2) } else { (0, 0) };
        assert_eq!(wish(&driver), next, "the next position, and that it counts");
        driver.device(|device, _| millrace_engine::Device::disarm(device));
        let none = if setup.packed { (1 << 15, 1) } else { (u16::MAX, 0) };
        assert_eq!(wish(&driver), none, "a disk that is awake is not to be kicked");
        let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
        driver.submit(0, &pieces);
        let readiness = driver.device(millrace_engine::Device::arm);
        assert_eq!(readiness, millrace_engine::Readiness::Busy, "what came before the wish is seen");
        driver.device(|device, _| millrace_engine::Device::disarm(device));
        driver.kick(0);
        driver.wait_used(0);
    }
}

#[test]
fn requests_in_flight_end_in_any_order() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        let mut expected = Vec::new();
        for sector in 0..5_u64 {
            let (pieces, ..) = driver.prepare(kind::OUT, sector, &pattern(sector as usize, 512), 0);
            expected.push(driver.submit(0, &pieces));
        }
        driver.until("all in flight", |driver| driver.device(|device, _| device.status().in_flight) == 5);
        assert_eq!(driver.next_used(0), None);
        driver.volume.hold(false);
        let mut names: Vec<u16> = (0..5).map(|_| driver.wait_used(0).0).collect();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
        for sector in 0..5_u64 {
            assert_eq!(driver.request(kind::IN, sector, &[], 512), (OK, pattern(sector as usize, 512)));
        }
    }
}

#[test]
fn memory_over_the_end_of_a_region_is_not_reached() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let (mut pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
    pieces[1] = (GUEST_BASE + MEMORY - 256, 512, true);
    driver.submit(0, &pieces);
    driver.settle();
    assert_eq!(driver.next_used(0), None);
    assert_eq!(driver.device(|device, _| device.status().phase), super::super::DevicePhase::Failed);
}
