//! What waits in the engine, and somebody who waits for it: a reset, the end of the write cache.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_backends::fault::FaultVolume;
use millrace_block::{Asker, Request, Step, TaskContext, Volume};
use millrace_nvme_spec::features::FeatureId;

use super::*;
use crate::nvme::CLOCK;

fn capped(iops: u64) -> FakeGuest {
    FakeGuest::on_card(test_card(1), StorageFunctions { iops: Some(iops), ..StorageFunctions::default() })
}

/// Cycles of the test's engine so far.
fn cycles() -> u64 {
    Card::of_shard(&test_card(1)).expect("the guest's").borrow().engine.now()
}

/// Rings all queues with as many reads as they hold, and waits until the cap of 100 a second has used its burst, which is ten.
fn with_commands_that_wait() -> FakeGuest {
    let mut guest = capped(100);
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    (1..=4).for_each(|qid| guest.create_queues(qid, 64));
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    for qid in 1..=4 {
        for _ in 0..63 {
            guest.push(qid, sqe);
        }
        guest.ring(qid);
    }
    let mut ended = 0;
    guest.step_until("the end of the burst", |guest| {
        ended += (1..=4).filter_map(|qid| guest.poll(qid)).count();
        ended >= 12
    });
    guest
}

fn begin_reset(guest: &mut FakeGuest) {
    guest.write32(offset::CC, 0);
}

fn wait_for_reset(guest: &mut FakeGuest) {
    guest.step_until("the end of the reset", |guest| guest.controller.phase == Phase::Disabled);
}

#[test]
fn a_reset_ends_what_waits_for_a_cap() {
    let mut guest = with_commands_that_wait();
    let before = cycles();
    begin_reset(&mut guest);
    wait_for_reset(&mut guest);
    // At the cap's pace those that are held, 50 or so, would take half a second.
    assert!(cycles() - before < CLOCK / 10, "they took {} cycles", cycles() - before);
    guest.enable();
    guest.create_queues(1, 16);
    assert!(write(&mut guest, 1, 5, &pattern(1, 512)).is_success(), "the volume is there again");
}

#[test]
fn a_reset_is_no_way_to_another_burst() {
    let mut guest = with_commands_that_wait();
    let before = cycles();
    begin_reset(&mut guest);
    wait_for_reset(&mut guest);
    guest.enable();
    guest.create_queues(1, 16);
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    for _ in 0..6 {
        guest.push(1, sqe);
    }
    guest.ring(1);
    (0..6).for_each(|_| assert!(guest.wait(1).status().is_success()));
    assert!(cycles() - before >= 4 * CLOCK / 100, "six commands took {} cycles", cycles() - before);
}

#[test]
fn a_neighbour_sees_nothing_of_what_is_called_off() {
    let (mut first, mut second) = (with_commands_that_wait(), guest());
    let namespace = Arc::clone(&first.controller.namespaces.get(1).expect("it has one").namespace);
    second.add_namespace(1, &namespace);
    second.create_queues(1, 16);
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(second.alloc_pages(1), 0);
    begin_reset(&mut first);
    first.step_until("the end of the reset", |first| {
        assert!(second.command(1, sqe).status().is_success());
        first.controller.phase == Phase::Disabled
    });
    (0..20).for_each(|_| assert!(second.command(1, sqe).status().is_success()));
    assert_eq!((second.controller.phase, second.controller.counters.errors), (Phase::Ready, 0));
}

/// A volume that holds, and notes when what waits there is called off.
struct Noting {
    held: Arc<HeldVolume>,
    called_off: AtomicBool,
}

impl Volume for Noting {
    millrace_block::passes_on!(held);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.held.submit(cx, request)
    }

    fn call_off(&self, _: Asker) {
        self.called_off.store(true, Ordering::SeqCst);
    }

    fn scratch_bytes(&self) -> usize {
        self.held.scratch_bytes()
    }
}

/// The legs of one write end together or not at all.
#[test]
fn a_replicated_write_is_not_called_off_in_part() {
    for replicate in [false, true] {
        let mut guest = FakeGuest::on_card(test_card(2), StorageFunctions { replicate, ..StorageFunctions::default() });
        let held = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
        let noting = Arc::new(Noting { held: Arc::clone(&held), called_off: AtomicBool::new(false) });
        guest.add_volume(1, Arc::clone(&noting) as _);
        if replicate {
            let volume = MemoryVolume::create("replica", 1 << 20, BlockSize::B512).expect("a volume");
            let replica = crate::nvme::Namespace::new(volume, crate::nvme::fixture::identity(9), false);
            guest.controller.join_replica(2, &replica).expect("it fits");
        }
        guest.create_queues(1, 16);
        held.hold();
        let mut sqe = command(NvmOpcode::WRITE, 0, 1);
        sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
        guest.submit(1, sqe);
        guest.step_until("a command at the volume", |_| held.waiting() == 1);
        begin_reset(&mut guest);
        for _ in 0..100 {
            guest.step();
        }
        assert_eq!(noting.called_off.load(Ordering::SeqCst), !replicate);
        held.release();
        wait_for_reset(&mut guest);
    }
}

// ---- the end of the write cache -------------------------------------------------------------------------------------

/// A volume that loses with the power what was not flushed.
fn cached() -> Arc<FaultVolume> {
    let fault = FaultVolume::new(MemoryVolume::create("cached", 1 << 20, BlockSize::B512).expect("a volume"), 1);
    fault.hold_writes();
    fault
}

/// Pushes writes of a block of its own each.
fn push_writes(guest: &mut FakeGuest, qid: u16, count: u64) {
    let buffer = guest.alloc_pages(1);
    guest.write(buffer, &pattern(9, 512));
    for at in 0..count {
        let mut sqe = command(NvmOpcode::WRITE, u64::from(qid) * 64 + at, 1);
        sqe.dptr = DataPointer::prps(buffer, 0);
        guest.push(qid, sqe);
    }
    guest.ring(qid);
}

fn turn_the_cache_off(guest: &mut FakeGuest) -> u16 {
    let mut features = sqe(AdminOpcode::SET_FEATURES.0, 0);
    features.cdw10 = FeatureId::VOLATILE_WRITE_CACHE.0.into();
    guest.submit(0, features)
}

#[test]
fn turning_the_write_cache_off_waits_for_what_a_cap_holds() {
    let mut guest = capped(200);
    let fault = cached();
    guest.add_volume(1, Arc::clone(&fault) as _);
    guest.create_queues(1, 64);
    push_writes(&mut guest, 1, 40);
    let mut ended = 0;
    guest.step_until("the end of the burst", |guest| {
        ended += usize::from(guest.poll(1).is_some());
        ended >= 20
    });
    let cid = turn_the_cache_off(&mut guest);
    assert!(guest.wait_for(0, cid).status().is_success());
    while let Some(cqe) = guest.poll(1) {
        // With an engine that is so slow that they were called off.
        assert!(cqe.status().is_success() || cqe.status() == Status::INTERNAL_ERROR);
        ended += 1;
    }
    assert_eq!((ended, fault.power_loss()), (40, 0), "they had ended, and are durable");
}

#[test]
fn nothing_passes_between_the_flush_and_its_answer() {
    let (mut first, mut second) = (guest(), guest());
    let fault = cached();
    first.add_volume(1, Arc::clone(&fault) as _);
    (1..=4).for_each(|qid| first.create_queues(qid, 64));
    (1..=4).for_each(|qid| push_writes(&mut first, qid, 63));
    turn_the_cache_off(&mut first);
    first.step();
    // Its turns move the first one's commands.
    for _ in 0..50 {
        second.step();
    }
    let mut answer = None;
    first.step_until("the answer", |first| {
        second.step();
        answer = first.poll(0);
        answer.is_some()
    });
    assert!(answer.is_some_and(|cqe| cqe.status().is_success()));
    assert_eq!(fault.power_loss(), 0, "blocks that were lost");
}

/// A guest with a command at a volume that holds it, and one that waits with the end of the write cache.
fn while_the_cache_goes() -> (FakeGuest, Arc<HeldVolume>, u16) {
    let mut guest = guest();
    let held = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
    guest.add_volume(1, Arc::clone(&held) as _);
    guest.create_queues(1, 16);
    held.hold();
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    guest.submit(1, sqe);
    guest.step_until("a command at the volume", |_| held.waiting() == 1);
    let cid = turn_the_cache_off(&mut guest);
    for _ in 0..100 {
        guest.step();
    }
    // One that was rung for since.
    guest.submit(1, sqe);
    for _ in 0..100 {
        guest.step();
    }
    assert_eq!((guest.poll(0).is_none(), held.waiting()), (true, 1), "both wait for the first");
    (guest, held, cid)
}

#[test]
fn the_write_cache_can_be_turned_off_while_memory_is_unmapped() {
    let (mut guest, held, cid) = while_the_cache_goes();
    guest.controller.lifecycle.paused = true;
    held.release();
    assert!(guest.wait_for(0, cid).status().is_success());
    assert!(guest.wait(1).status().is_success());
    guest.settle();
    assert!(guest.controller.is_quiet() && guest.poll(1).is_none(), "now the memory may go");
    guest.controller.lifecycle.paused = false;
    assert!(guest.wait(1).status().is_success(), "and the other command is taken");
}

#[test]
fn a_reset_forgets_who_waits_for_the_card() {
    let (mut guest, held, _) = while_the_cache_goes();
    begin_reset(&mut guest);
    held.release();
    wait_for_reset(&mut guest);
    guest.enable();
    guest.create_queues(1, 16);
    assert!(write(&mut guest, 1, 5, &pattern(1, 512)).is_success(), "doorbells do not wait any more");
    guest.settle();
    assert!(guest.poll(0).is_none() && guest.controller.is_quiet());
}
