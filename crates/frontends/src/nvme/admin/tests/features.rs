//! Get Features and Set Features.

use std::{sync::Arc, time::Duration};

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{BlockError, BlockSize};
use millrace_nvme_spec::{
    command::{NamespaceId, Sqe},
    features::{FeatureId, HostBehavior, Timestamp, TimestampOrigin},
    opcode::{AdminOpcode, NvmOpcode},
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::super::fixture::{FakeGuest, HeldVolume, sqe},
    admin, code, expect, expect_reading, reading, with,
};

fn get(fid: FeatureId, select: u32, value: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::GET_FEATURES, 0);
    (sqe.cdw10, sqe.cdw11) = (u32::from(fid.0) | select << 8, value);
    sqe
}

fn set(fid: FeatureId, value: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::SET_FEATURES, 0);
    (sqe.cdw10, sqe.cdw11) = (u32::from(fid.0), value);
    sqe
}

fn of(mut sqe: Sqe, nsid: u32) -> Sqe {
    sqe.nsid = NamespaceId(nsid);
    sqe
}

const SAVE: u32 = 1 << 31;
const SELECTS: std::ops::Range<u32> = 0..3;

/// What is supported: saveable, namespace specific, changeable.
const FEATURES: [(FeatureId, u32); 15] = [
    (FeatureId::ARBITRATION, 4),
    (FeatureId::POWER_MANAGEMENT, 4),
    (FeatureId::TEMPERATURE_THRESHOLD, 4),
    (FeatureId::ERROR_RECOVERY, 6),
    (FeatureId::VOLATILE_WRITE_CACHE, 4),
    (FeatureId::NUMBER_OF_QUEUES, 4),
    (FeatureId::INTERRUPT_COALESCING, 4),
    (FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 4),
    (FeatureId::WRITE_ATOMICITY_NORMAL, 4),
    (FeatureId::ASYNC_EVENT_CONFIGURATION, 4),
    (FeatureId::TIMESTAMP, 4),
    (FeatureId::HOST_BEHAVIOR_SUPPORT, 4),
    (FeatureId::HOST_IDENTIFIER, 4),
    (FeatureId::RESERVATION_NOTIFICATION_MASK, 6),
    (FeatureId::RESERVATION_PERSISTENCE, 2),
];

#[test]
fn features_tell_what_they_allow() {
    let mut guest = FakeGuest::boot();
    for fid in (0..=u8::MAX).map(FeatureId) {
        if let Some((_, allowed)) = FEATURES.iter().find(|(known, _)| *known == fid) {
            assert_eq!(expect(&mut guest, get(fid, 3, 0), Status::SUCCESS), *allowed, "{fid}");
        } else {
            expect(&mut guest, get(fid, 3, 0), Status::INVALID_FIELD);
            expect(&mut guest, get(fid, 0, 0), Status::INVALID_FIELD);
            expect(&mut guest, set(fid, 0), Status::INVALID_FIELD);
        }
    }
    for select in 4..8 {
        expect(&mut guest, get(FeatureId::ARBITRATION, select, 0), Status::INVALID_FIELD);
    }
}

#[test]
fn nothing_is_saveable() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    for (fid, _) in FEATURES {
        let mut sqe = of(set(fid, 0), 1);
        sqe.cdw10 |= SAVE;
        expect(&mut guest, sqe, Status::FEATURE_NOT_SAVEABLE);
    }
}

#[test]
fn values_are_kept_until_reset() {
    let mut guest = FakeGuest::boot();
    for (fid, selector, value, kept, default) in [
        (FeatureId::ARBITRATION, 0, 0x0302_01fa, 0x0302_0102, 5),
        (FeatureId::POWER_MANAGEMENT, 0, 0x40, 0x40, 0),
        (FeatureId::TEMPERATURE_THRESHOLD, 0, 350, 350, 343),
        (FeatureId::TEMPERATURE_THRESHOLD, 1 << 20, 1 << 20 | 0xa, 10, 0),
        (FeatureId::VOLATILE_WRITE_CACHE, 0, 0xffff_fffe, 0, 1),
        (FeatureId::NUMBER_OF_QUEUES, 0, 0x0002_0003, 0x0002_0003, 0x0007_0007),
        (FeatureId::INTERRUPT_COALESCING, 0, 0xffff_0a09, 0x0a09, 0),
        (FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 3, 0x1_0003, 0x1_0003, 3),
        (FeatureId::WRITE_ATOMICITY_NORMAL, 0, 1, 1, 0),
        // Only what the controller reports can be asked for.
        (FeatureId::ASYNC_EVENT_CONFIGURATION, 0, 0xffff_ffff, 0x102, 0),
    ] {
        assert_eq!(expect(&mut guest, get(fid, 0, selector), Status::SUCCESS), default, "{fid} at first");
        expect(&mut guest, set(fid, value), Status::SUCCESS);
        for (select, wanted) in SELECTS.zip([kept, default, default]) {
            assert_eq!(expect(&mut guest, get(fid, select, selector), Status::SUCCESS), wanted, "{fid} {select}");
        }
        guest.disable();
        guest.enable();
        assert_eq!(expect(&mut guest, get(fid, 0, selector), Status::SUCCESS), default, "{fid} after a reset");
    }
}

#[test]
fn the_write_cache_and_the_burst_are_heeded() {
    let mut guest = FakeGuest::boot();
    assert!(guest.controller.write_cache_enabled());
    expect(&mut guest, set(FeatureId::VOLATILE_WRITE_CACHE, 0), Status::SUCCESS);
    assert!(!guest.controller.write_cache_enabled());
    assert_eq!(guest.controller.arbitration_burst(), 32);
    expect(&mut guest, set(FeatureId::ARBITRATION, 1), Status::SUCCESS);
    assert_eq!(guest.controller.arbitration_burst(), 2);
    expect(&mut guest, set(FeatureId::ARBITRATION, 7), Status::SUCCESS);
    assert_eq!(guest.controller.arbitration_burst(), u32::MAX);
}

/// Who turns it off flushes no more.
#[test]
fn turning_the_write_cache_off_makes_durable_what_was_written() {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume");
    let fault = FaultVolume::new(volume, 1);
    guest.add_volume(1, Arc::clone(&fault) as Arc<dyn millrace_block::Volume>);
    let flushes = |guest: &mut FakeGuest, value, status| {
        let before = fault.requests(Kind::Flush);
        expect(guest, set(FeatureId::VOLATILE_WRITE_CACHE, value), status);
        fault.requests(Kind::Flush) - before
    };
    assert_eq!([1, 0, 0, 1].map(|value| flushes(&mut guest, value, Status::SUCCESS)), [0, 1, 0, 0]);
    fault.add(Rule::new(Kind::Flush, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    assert_eq!(flushes(&mut guest, 0, Status::WRITE_FAULT), 1);
    assert!(!guest.controller.write_cache_enabled(), "what is written from now on is durable all the same");
}

#[test]
fn turning_the_write_cache_off_makes_durable_what_is_being_written() {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume");
    let fault = FaultVolume::new(volume, 1);
    guest.add_volume(1, Arc::clone(&fault) as Arc<dyn millrace_block::Volume>);
    guest.make_queues(1, 16);
    fault.hold_writes();
    fault.add(Rule::new(Kind::Write, When::Nth(1), Effect::Delay(Duration::from_millis(10))));
    // Many blocks: a power loss spares one of them by chance, but not all.
    let buffer = guest.alloc_pages(8);
    let mut write = sqe(NvmOpcode::WRITE.0, 1);
    (write.dptr, write.cdw12) = (guest.prps(buffer, 64 * 512), 63);
    let write = guest.submit(1, write);
    guest.step_until("the write", |_| fault.requests(Kind::Write) == 1);
    expect(&mut guest, set(FeatureId::VOLATILE_WRITE_CACHE, 0), Status::SUCCESS);
    assert!(guest.wait_for(1, write).status().is_success());
    assert_eq!(fault.power_loss(), 0, "what was accepted before is durable");
}

/// Of another host's writes it says nothing, and does not wait for them.
#[test]
fn turning_the_write_cache_off_waits_for_no_other_hosts_writes() {
    let (mut guest, mut other) = (FakeGuest::boot(), FakeGuest::boot());
    let volume = HeldVolume::new(MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume"));
    let namespace = guest.add_volume(1, Arc::clone(&volume) as Arc<dyn millrace_block::Volume>);
    other.add_namespace(1, &namespace);
    other.make_queues(1, 16);
    let mut write = sqe(NvmOpcode::WRITE.0, 1);
    let buffer = other.alloc_pages(1);
    write.dptr = other.prps(buffer, 512);
    volume.hold();
    let write = other.submit(1, write);
    other.step_until("the write", |_| volume.waiting() == 1);
    // The other one takes no turn: to it the write stays in flight.
    volume.release();
    expect(&mut guest, set(FeatureId::VOLATILE_WRITE_CACHE, 0), Status::SUCCESS);
    assert!(other.wait_for(1, write).status().is_success());
}

#[test]
fn impossible_values_are_refused() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    for (fid, value) in [
        (FeatureId::POWER_MANAGEMENT, 1),
        (FeatureId::TEMPERATURE_THRESHOLD, 1 << 16),
        (FeatureId::TEMPERATURE_THRESHOLD, 2 << 20),
        (FeatureId::NUMBER_OF_QUEUES, 0xffff),
        (FeatureId::NUMBER_OF_QUEUES, 0xffff << 16),
        (FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 9),
        (FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 0xffff),
    ] {
        expect(&mut guest, set(fid, value), Status::INVALID_FIELD);
    }
    // Deallocated blocks never fail a read; reservations do not persist.
    expect(&mut guest, of(set(FeatureId::ERROR_RECOVERY, 1 << 16), 1), Status::INVALID_FIELD);
    expect(&mut guest, of(set(FeatureId::RESERVATION_PERSISTENCE, 1), 1), Status::INVALID_FIELD);
    expect(&mut guest, of(set(FeatureId::RESERVATION_PERSISTENCE, 0), 1), Status::FEATURE_NOT_CHANGEABLE);
    for selector in [1 << 16, 15 << 16, 2 << 20] {
        expect(&mut guest, get(FeatureId::TEMPERATURE_THRESHOLD, 0, selector), Status::INVALID_FIELD);
    }
    expect(&mut guest, get(FeatureId::INTERRUPT_VECTOR_CONFIGURATION, 0, 9), Status::INVALID_FIELD);
}

#[test]
fn more_queues_than_there_are_can_be_asked_for() {
    let mut guest = FakeGuest::boot();
    let granted = expect(&mut guest, set(FeatureId::NUMBER_OF_QUEUES, 0x0003_0100), Status::SUCCESS);
    assert_eq!(granted, 0x0003_0007);
}

#[test]
fn namespaces_have_features_of_their_own() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.add_memory_volume(2, 1 << 20, BlockSize::B512);
    for (fid, value) in [(FeatureId::ERROR_RECOVERY, 100), (FeatureId::RESERVATION_NOTIFICATION_MASK, 0b1110)] {
        expect(&mut guest, of(set(fid, value), 1), Status::SUCCESS);
        assert_eq!(expect(&mut guest, of(get(fid, 0, 0), 1), Status::SUCCESS), value);
        assert_eq!(expect(&mut guest, of(get(fid, 0, 0), 2), Status::SUCCESS), 0);
        expect(&mut guest, of(set(fid, 2), u32::MAX), Status::SUCCESS);
        for nsid in [1, 2] {
            assert_eq!(expect(&mut guest, of(get(fid, 0, 0), nsid), Status::SUCCESS), 2);
        }
        for (nsid, status) in
            [(0, Status::INVALID_NAMESPACE_OR_FORMAT), (3, Status::INVALID_FIELD), (65, Status::INVALID_NAMESPACE_OR_FORMAT)]
        {
            expect(&mut guest, of(get(fid, 0, 0), nsid), status);
            expect(&mut guest, of(set(fid, 0), nsid), status);
        }
    }
    expect(&mut guest, of(get(FeatureId::ERROR_RECOVERY, 0, 0), u32::MAX), Status::INVALID_NAMESPACE_OR_FORMAT);
    expect(&mut guest, of(get(FeatureId::RESERVATION_NOTIFICATION_MASK, 0, 0), u32::MAX), Status::INVALID_FIELD);
    expect(&mut guest, of(get(FeatureId::RESERVATION_PERSISTENCE, 0, 0), u32::MAX), Status::INVALID_FIELD);
    // And the controller's belong to no namespace: they are not set for one, and are the same for all.
    expect(&mut guest, set(FeatureId::ARBITRATION, 3), Status::SUCCESS);
    for select in SELECTS {
        let value = expect(&mut guest, get(FeatureId::ARBITRATION, select, 0), Status::SUCCESS);
        for nsid in [1, 3, u32::MAX] {
            assert_eq!(expect(&mut guest, of(get(FeatureId::ARBITRATION, select, 0), nsid), Status::SUCCESS), value);
        }
    }
    for nsid in [1, 3] {
        expect(&mut guest, of(set(FeatureId::ARBITRATION, 0), nsid), Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    }
    for command in [get(FeatureId::ARBITRATION, 0, 0), set(FeatureId::ARBITRATION, 0)] {
        expect(&mut guest, of(command, 65), Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    expect(&mut guest, of(set(FeatureId::ARBITRATION, 0), u32::MAX), Status::SUCCESS);
}

#[test]
fn the_timestamp_counts_on() {
    let mut guest = FakeGuest::boot();
    let now: Timestamp = reading(&mut guest, get(FeatureId::TIMESTAMP, 0, 0));
    assert_eq!(now.attributes.origin(), TimestampOrigin::RESET);
    let start = (1 << 48) - 5;
    let timestamp = Timestamp::new(start, now.attributes);
    let cqe = guest.command_writing(0, set(FeatureId::TIMESTAMP, 0), timestamp.as_bytes());
    assert_eq!(code(&cqe), Status::SUCCESS);
    let now: Timestamp = reading(&mut guest, get(FeatureId::TIMESTAMP, 0, 0));
    assert_eq!(now.attributes.origin(), TimestampOrigin::SET_FEATURES);
    let passed = |at: Timestamp| at.millis().wrapping_sub(start) & ((1 << 48) - 1);
    let first = passed(now);
    guest.step_until("the clock", |guest| {
        let now: Timestamp = reading(guest, get(FeatureId::TIMESTAMP, 0, 0));
        passed(now) > first + 5
    });
    let default: Timestamp = reading(&mut guest, get(FeatureId::TIMESTAMP, 1, 0));
    assert_eq!(default.millis(), 0);
}

#[test]
fn the_host_tells_what_it_can_and_who_it_is() {
    let mut guest = FakeGuest::boot();
    let mut behavior = HostBehavior::new_zeroed();
    (behavior.acre, behavior.lbafee, behavior.cdfe) = (1, 1, 1 << 2);
    let fid = FeatureId::HOST_BEHAVIOR_SUPPORT;
    assert_eq!(code(&guest.command_writing(0, set(fid, 0), behavior.as_bytes())), Status::SUCCESS);
    assert_eq!(reading::<HostBehavior>(&mut guest, get(fid, 0, 0)), behavior);
    assert_eq!(reading::<HostBehavior>(&mut guest, get(fid, 1, 0)), HostBehavior::new_zeroed());
    for wrong in [
        with(&behavior, |data| data.acre = 2),
        with(&behavior, |data| data.etdas = 1),
        with(&behavior, |data| data.cdfe = 1 << 4),
    ] {
        assert_eq!(code(&guest.command_writing(0, set(fid, 0), wrong.as_bytes())), Status::INVALID_FIELD);
    }
    let fid = FeatureId::HOST_IDENTIFIER;
    assert_eq!(reading::<[u8; 16]>(&mut guest, get(fid, 0, 1)), [0; 16]);
    assert_eq!(code(&guest.command_writing(0, set(fid, 1), &[7; 16])), Status::SUCCESS);
    assert_eq!(reading::<[u8; 16]>(&mut guest, get(fid, 0, 1)), [7; 16]);
    assert_eq!(code(&guest.command_writing(0, set(fid, 0), &[9; 8])), Status::SUCCESS);
    assert_eq!(reading::<[u8; 8]>(&mut guest, get(fid, 0, 0)), [9; 8]);
    // Data that cannot be reached change nothing.
    let mut nowhere = set(fid, 0);
    nowhere.dptr.prp1 = 0x1000;
    expect(&mut guest, nowhere, Status::DATA_TRANSFER_ERROR);
    assert_eq!(reading::<[u8; 8]>(&mut guest, get(fid, 0, 0)), [9; 8]);
    let rest = expect_reading(&mut guest, get(fid, 0, 0), Status::SUCCESS);
    assert!(rest[8..].iter().all(|byte| *byte == 0), "no more than the identifier is written");
}
