//! What a guest can do wrong: its disk fails, and nothing else does.

use std::sync::atomic::Ordering;

use super::super::{
    DevicePhase,
    fixture::{AVAIL, FakeDriver, GUEST_BASE, MEMORY, Piece, QUEUE, Setup, drain},
    message::{code, protocol},
    request::kind,
};

/// Address, length, flags, and link or name.
type Fields = (u64, u32, u16, u16);

/// Writes a descriptor of either kind at an index. A packed one is made available by the caller's order: the first comes last.
fn descriptor(driver: &FakeDriver, index: u16, (addr, len, flags, next): Fields) {
    let place = driver.queues[0].base + u64::from(index) * 16;
    driver.write_value(place, &addr);
    driver.write_value(place + 8, &len);
    if driver.setup.packed {
        driver.write_value(place + 12, &next);
        driver.write_value(place + 14, &(flags | 1 << 7));
    } else {
        driver.write_value(place + 12, &[flags, next]);
    }
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Fails, says so to who asks, and works again after a reset.
fn expect_failure(driver: &mut FakeDriver, what: &str) {
    driver.until(what, |driver| driver.device(|device, _| device.status().phase) == DevicePhase::Failed);
    assert_eq!(driver.get::<u64>(code::GET_STATUS, &[]) & 0x40, 0x40, "{what}: it needs a reset");
    assert_eq!(drain(&driver.queues[0].err), 1, "{what}: the front end is told");
    // It takes nothing more.
    assert_eq!(driver.next_used(0), None, "{what}");
    assert_eq!(driver.tell(code::RESET_DEVICE, &[], &[]), Some(true), "{what}");
    driver.queues[0].forget();
    driver.wipe_queues();
    driver.inflight = None;
    driver.resume();
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0, "{what}: as good as new");
}

/// Chains that are wrong in themselves, as pieces of a chain that is made in the usual way.
fn chains(driver: &mut FakeDriver) -> Vec<(&'static str, Vec<Piece>)> {
    let (good, ..) = driver.prepare(kind::IN, 0, &[], 512);
    let end = GUEST_BASE + MEMORY;
    let header = good[0];
    vec![
        ("a header that is writable", vec![(header.0, 16, true), good[2]]),
        ("a header cut short", vec![(header.0, 15, false), good[2]]),
        ("nothing but a header", vec![header]),
        ("a status that cannot be written", vec![header, (good[1].0, 512, false)]),
        ("data to be read after data to be written", vec![header, good[2], (good[1].0, 512, false)]),
        ("memory that is not there", vec![header, (0x1000, 512, true), good[2]]),
        ("memory over the end", vec![header, (end - 256, 512, true), good[2]]),
        ("memory at the end of all addresses", vec![header, (u64::MAX - 100, 512, true), good[2]]),
        ("a piece without length", vec![header, (good[1].0, 0, true), good[2]]),
        ("a header that is not there", vec![(end, 16, false), good[2]]),
        ("a status that is not there", vec![header, (end + 4096, 1, true)]),
        ("more than there is memory", vec![header, (good[1].0, u32::MAX, true), good[2]]),
    ]
}

#[test]
fn wrong_chains_fail_the_disk_and_no_other() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        let mut witness = FakeDriver::new(setup);
        driver.connect();
        witness.connect();
        for at in 0.. {
            driver.free_all();
            let mut chains = chains(&mut driver);
            if at >= chains.len() {
                break;
            }
            let (what, pieces) = chains.swap_remove(at);
            driver.submit(0, &pieces);
            expect_failure(&mut driver, what);
            assert_eq!(witness.request(kind::IN, 0, &[], 512).0, 0);
        }
    }
}

#[test]
fn wrong_rings_fail_the_disk() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let data = driver.alloc(16);
    let wrong: [(&str, &[Fields], &[u16]); 6] = [
        ("a head outside the ring", &[], &[QUEUE]),
        ("a link outside the ring", &[(data, 16, NEXT, QUEUE)], &[0]),
        ("a loop of one", &[(data, 16, NEXT, 0)], &[0]),
        ("a loop of two", &[(data, 16, NEXT, 1), (data, 16, NEXT, 0)], &[0]),
        ("a loop through what may be written", &[(data, 16, NEXT, 1), (data, 16, NEXT | WRITE, 1)], &[0]),
        ("an indirect table that goes on", &[(data, 16, NEXT | INDIRECT, 1)], &[0]),
    ];
    for (what, descriptors, heads) in wrong {
        for (index, fields) in descriptors.iter().enumerate() {
            descriptor(&driver, index as u16, *fields);
        }
        for head in heads {
            driver.publish(0, *head);
        }
        expect_failure(&mut driver, what);
    }
    // More available than there are descriptors.
    let index = driver.queues[0].next.wrapping_add(QUEUE + 1);
    driver.write_value(driver.queues[0].base + AVAIL + 2, &index);
    expect_failure(&mut driver, "more than the ring has");
    // A head again while its request is in flight.
    driver.volume.hold(true);
    let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
    let head = driver.submit(0, &pieces);
    driver.publish(0, head);
    driver.until("failure", |driver| driver.device(|device, _| device.status().phase) == DevicePhase::Failed);
    driver.volume.hold(false);
    // What was in flight ends as ever.
    assert_eq!(driver.wait_used(0), (head, 513));
    expect_failure(&mut driver, "a head twice");
    // Twice in one look, and a head that is none behind good ones: what came before ends as ever.
    for (what, wrong) in [("a head twice at once", None), ("a head out of its table, at once", Some(QUEUE))] {
        driver.free_all();
        let (pieces, ..) = driver.prepare(kind::IN, 0, &[], 512);
        let table = driver.alloc(48);
        driver.write_table(table, &pieces);
        driver.volume.hold(true);
        let head = driver.submit_indirect(0, table, 48);
        driver.publish(0, wrong.unwrap_or(head));
        driver.until("failure", |driver| driver.device(|device, _| device.status().phase) == DevicePhase::Failed);
        driver.volume.hold(false);
        assert_eq!(driver.wait_used(0), (head, 513), "{what}");
        expect_failure(&mut driver, what);
    }
}

/// A request by itself goes to the volume before it is taken: not one whose head is in use.
#[test]
fn a_head_in_use_does_nothing_again() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.volume.hold(true);
    driver.volume.together.store(1, Ordering::SeqCst);
    let (pieces, ..) = driver.prepare(kind::OUT, 0, &[1; 512], 0);
    let table = driver.alloc(48);
    driver.write_table(table, &pieces);
    // A chain of the ring's own is submitted, and waits.
    let head = driver.submit(0, &pieces);
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
    descriptor(&driver, head, (table, 48, INDIRECT, 0));
    driver.publish(0, head);
    driver.until("failure", |driver| driver.device(|device, _| device.status().phase) == DevicePhase::Failed);
    assert_eq!(driver.volume.did.load(Ordering::SeqCst), 0);
    driver.volume.hold(false);
    assert_eq!(driver.wait_used(0), (head, 1));
    expect_failure(&mut driver, "a head in use");
}

#[test]
fn wrong_packed_rings_fail_the_disk() {
    let mut driver = FakeDriver::new(Setup::packed());
    driver.connect();
    let data = driver.alloc(16);
    // A chain without an end.
    for index in (0..QUEUE).rev() {
        descriptor(&driver, index, (data, 16, NEXT, 0));
    }
    expect_failure(&mut driver, "a chain longer than the ring");
    descriptor(&driver, driver.queues[0].next, (data, 16, NEXT | INDIRECT, 0));
    expect_failure(&mut driver, "an indirect table that goes on");
}

#[test]
fn wrong_indirect_tables_fail_the_disk() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        let table = driver.alloc(64);
        let inner = driver.alloc(64);
        let flags = |flags: u16, next: u16| if setup.packed { [next, flags] } else { [flags, next] };
        let entry = |driver: &FakeDriver, at: u64, addr: u64, words: [u16; 2]| {
            driver.write_value(table + at * 16, &addr);
            driver.write_value(table + at * 16 + 8, &16_u32);
            driver.write_value(table + at * 16 + 12, &words);
        };
        for (what, len) in [("no entry", 8), ("half an entry", 24), ("65536 entries", 65_536 * 16), ("outside", 16 * 17)] {
            let addr = if what == "outside" { GUEST_BASE + MEMORY - 16 } else { table };
            entry(&driver, 0, inner, flags(NEXT, 0));
            driver.submit_indirect(0, addr, len);
            expect_failure(&mut driver, what);
        }
        entry(&driver, 0, inner, flags(INDIRECT, 0));
        driver.submit_indirect(0, table, 16);
        expect_failure(&mut driver, "a table in a table");
        // Each entry is right, all of them together are more than a request may have: bytes, and pieces.
        for (what, count, len, apart) in [("5 GB in pieces of 15 MB", 350, 15_000_000, 0), ("1025 pieces", 1024, 16, 32)] {
            driver.free_all();
            let (good, ..) = driver.prepare(kind::IN, 0, &[], 512);
            let long = driver.alloc(1026 * 16);
            let data = (0..count).map(|at| (GUEST_BASE + (1 << 20) + at * apart, len, true));
            let pieces: Vec<Piece> = [good[0]].into_iter().chain(data).chain([good[2]]).collect();
            for (at, (addr, len, writable)) in pieces.iter().enumerate() {
                let place = long + at as u64 * 16;
                let next = if at + 1 < pieces.len() { NEXT } else { 0 };
                driver.write_value(place, addr);
                driver.write_value(place + 8, len);
                driver.write_value(place + 12, &flags(next | if *writable { WRITE } else { 0 }, at as u16 + 1));
            }
            driver.submit_indirect(0, long, pieces.len() as u32 * 16);
            expect_failure(&mut driver, what);
        }
        if !setup.packed {
            entry(&driver, 0, inner, flags(NEXT, 0));
            driver.submit_indirect(0, table, 16);
            expect_failure(&mut driver, "a table with a loop");
            entry(&driver, 0, inner, flags(NEXT, 4));
            driver.submit_indirect(0, table, 64);
            expect_failure(&mut driver, "a link out of its table");
        }
    }
    // Where the feature was not chosen there are no tables.
    let setup = Setup { features: Setup::default().features & !(1 << 28), ..Setup::default() };
    let mut driver = FakeDriver::new(setup);
    driver.connect();
    let table = driver.alloc(64);
    driver.submit_indirect(0, table, 16);
    expect_failure(&mut driver, "a table where none may be");
}

/// A front end that cannot read the device status sees the connection end.
#[test]
fn without_a_status_the_connection_ends() {
    let setup = Setup { protocol: protocol::ALL & !protocol::STATUS, ..Setup::default() };
    let mut driver = FakeDriver::new(setup);
    driver.connect();
    driver.publish(0, QUEUE);
    driver.until("the end of the connection", |driver| !driver.device(|device, _| device.status().connected));
    driver.queues[0].forget();
    driver.wipe_queues();
    driver.inflight = None;
    driver.connect();
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

/// Random bytes in rings and descriptors: whatever they say, the process lives and the next guest is served.
#[test]
fn random_rings_never_cost_more_than_the_disk() {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..400_u32 {
        let setup = if round % 2 == 0 { Setup::default() } else { Setup::packed() };
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        for _ in 0..4 {
            for index in 0..QUEUE {
                // Mostly near what is right, so that it is followed some way.
                let addr = if random() % 8 == 0 { random() } else { GUEST_BASE + 0x8000 + random() % 0x10_0000 };
                let len = if random() % 8 == 0 { random() as u32 } else { (random() % 2048) as u32 };
                let flags = (random() % 8) as u16;
                descriptor(&driver, index, (addr, len, flags, (random() % 18) as u16));
            }
            driver.write(GUEST_BASE + 0x8000, &random().to_le_bytes());
            // Tables that are nearly what all guests write.
            for index in (0..QUEUE).step_by(1 + (random() % 4) as usize) {
                let table = GUEST_BASE + 0x9000 + u64::from(index) * 64;
                let place = GUEST_BASE + 0xa000 + random() % 0x1000;
                driver
                    .write_table(table, &[(place, 16, false), (place + 64, 512, random() % 2 == 0), (place + 32, 1, true)]);
                if random() % 2 == 0 {
                    driver.write(table + random() % 48, &random().to_le_bytes()[..1]);
                }
                descriptor(&driver, index, (table, 48, INDIRECT, 0));
            }
            driver.publish(0, (random() % 17) as u16);
            for _ in 0..8 {
                driver.shard.turn();
            }
        }
        driver.volume.take_seen();
        driver.stream = None;
        driver.until("rest", |driver| driver.device(|device, cx| device.is_idle(cx) && !device.status().connected));
        driver.queues[0].forget();
        driver.wipe_queues();
        driver.inflight = None;
        driver.connect();
        assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0, "round {round}");
    }
}
