use std::sync::{Arc, atomic::Ordering};

use millrace_block::trace::{self, Event, EventKind, Ring};
use millrace_nvme_spec::{opcode::NvmOpcode, registers::offset};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::nvme::fixture::{FakeGuest, sqe, test_config};

const MS: Duration = Duration::from_millis(1);

/// The eventfds that a client has handed in for vectors `0..count`.
struct Wires(Vec<OwnedFd>);

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

fn wires(count: usize) -> (Wires, Vec<OwnedFd>) {
    let ours: Vec<OwnedFd> = (0..count).map(|_| new_eventfd()).collect();
    let theirs = ours.iter().map(|fd| fd.try_clone().expect("a descriptor")).collect();
    (Wires(ours), theirs)
}

fn take(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(errno) => {
            assert_eq!(errno, Errno::AGAIN);
            0
        }
    }
}

impl Wires {
    /// Signals of a vector since the last call.
    fn take(&self, vector: usize) -> u64 {
        take(&self.0[vector])
    }
}

fn change(index: u32, start: u32, count: u32, action: IrqAction, data: IrqData<'_>) -> IrqSet<'_> {
    IrqSet { index, start, count, action, data }
}

fn eventfds(fds: Vec<OwnedFd>) -> IrqData<'static> {
    IrqData::Eventfds(fds.into_iter().map(Received::from).collect())
}

/// A controller's interrupts with every vector wired.
fn wired(guest: &mut FakeGuest) -> Wires {
    let (wires, theirs) = wires(9);
    let set = change(irq::IRQ_MSIX, 0, 9, IrqAction::Trigger, eventfds(theirs));
    guest.controller.interrupts.set_irqs(set).expect("eventfds are accepted");
    wires
}

fn mask(guest: &mut FakeGuest, vector: u32, action: IrqAction) {
    let set = change(irq::IRQ_MSIX, vector, 1, action, IrqData::None);
    guest.controller.interrupts.set_irqs(set).expect("masks are accepted");
}

#[test]
fn a_turn_raises_each_vector_once_however_many_completions_it_has() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    for vector in [3, 3, 3, 8] {
        guest.controller.interrupts.pend(vector, 1);
    }
    guest.step();
    assert_eq!([wires.take(3), wires.take(8), wires.take(0)], [1, 1, 0]);
    assert_eq!(guest.controller.counters.interrupts, 2);
    guest.step();
    assert_eq!((wires.take(3), guest.controller.counters.interrupts), (0, 2));
    // A vector that does not exist is nobody's.
    guest.controller.interrupts.pend(9, 1);
    guest.controller.interrupts.pend(u16::MAX, 1);
    guest.step();
    assert_eq!(guest.controller.counters.interrupts, 2);
}

#[test]
fn a_full_eventfd_is_signalled_already() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    rustix::io::write(&wires.0[1], &(u64::MAX - 1).to_ne_bytes()).expect("room for all but one");
    guest.controller.interrupts.pend(1, 1);
    guest.step();
    assert_eq!(wires.take(1), u64::MAX - 1);
}

#[test]
fn what_is_masked_or_not_wired_stays_pending_until_it_can_be_delivered() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    mask(&mut guest, 2, IrqAction::Mask);
    guest.controller.interrupts.pend(2, 1);
    guest.controller.interrupts.pend(3, 1);
    guest.step();
    assert_eq!((wires.take(2), wires.take(3)), (0, 1));
    let mut pba = [0; 8];
    guest.controller.msix_read(0x2000, &mut pba);
    assert_eq!(u64::from_le_bytes(pba), 1 << 2, "the pending bit array shows it");
    mask(&mut guest, 2, IrqAction::Unmask);
    guest.step();
    assert_eq!(wires.take(2), 1);
    // The MSI-X function mask: bits 14 and 15 of message control.
    guest.controller.config_write(0x52, &[0, 0xc0]);
    guest.controller.interrupts.pend(4, 1);
    guest.step();
    assert_eq!(wires.take(4), 0);
    guest.controller.config_write(0x52, &[0, 0x80]);
    guest.step();
    assert_eq!(wires.take(4), 1);
    // A client rewires: everything away, then new eventfds.
    let all_away = change(irq::IRQ_MSIX, 0, 0, IrqAction::Trigger, IrqData::None);
    guest.controller.interrupts.set_irqs(all_away).expect("accepted");
    guest.controller.interrupts.pend(5, 1);
    guest.step();
    assert_eq!(wires.take(5), 0);
    let wires = wired(&mut guest);
    guest.step();
    assert_eq!(wires.take(5), 1);
    let one_away = change(irq::IRQ_MSIX, 5, 1, IrqAction::Trigger, IrqData::Deassign);
    guest.controller.interrupts.set_irqs(one_away).expect("accepted");
    guest.controller.interrupts.pend(5, 1);
    guest.step();
    assert_eq!(wires.take(5), 0);
}

#[test]
fn masks_by_flags_touch_only_the_vectors_that_are_flagged() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    let set = change(irq::IRQ_MSIX, 1, 3, IrqAction::Mask, IrqData::Bool(&[1, 0, 1]));
    guest.controller.interrupts.set_irqs(set).expect("accepted");
    (1..=3).for_each(|vector| guest.controller.interrupts.pend(vector, 1));
    guest.step();
    assert_eq!([wires.take(1), wires.take(2), wires.take(3)], [0, 1, 0]);
    // A client may trigger vectors itself, to test its wiring.
    let set = change(irq::IRQ_MSIX, 1, 3, IrqAction::Trigger, IrqData::Bool(&[0, 0, 1]));
    guest.controller.interrupts.set_irqs(set).expect("accepted");
    assert_eq!([wires.take(1), wires.take(2), wires.take(3)], [0, 0, 1]);
}

#[test]
fn only_eventfds_are_accepted() {
    let mut guest = FakeGuest::new(test_config());
    let (_reader, writer) = rustix::pipe::pipe().expect("a pipe");
    for (index, action) in [
        (irq::IRQ_MSIX, IrqAction::Trigger),
        (irq::IRQ_INTX, IrqAction::Trigger),
        (irq::IRQ_INTX, IrqAction::Unmask),
        (irq::IRQ_ERR, IrqAction::Trigger),
    ] {
        let fd = writer.try_clone().expect("a descriptor");
        let set = change(index, 0, 1, action, eventfds(vec![fd]));
        assert_eq!(guest.controller.interrupts.set_irqs(set), Err(Errno::INVAL), "{index} {action:?}");
    }
    let set = change(irq::IRQ_MSIX, 0, 1, IrqAction::Mask, eventfds(vec![new_eventfd()]));
    assert_eq!(guest.controller.interrupts.set_irqs(set), Err(Errno::INVAL));
    let set = change(irq::IRQ_MSI, 0, 0, IrqAction::Trigger, IrqData::None);
    assert_eq!(guest.controller.interrupts.set_irqs(set), Err(Errno::INVAL));
}

#[test]
fn a_reset_forgets_what_is_pending_and_keeps_the_wiring() {
    let mut guest = FakeGuest::boot();
    let wires = wired(&mut guest);
    mask(&mut guest, 1, IrqAction::Mask);
    guest.controller.interrupts.pend(1, 1);
    guest.disable();
    mask(&mut guest, 1, IrqAction::Unmask);
    guest.step();
    assert_eq!(wires.take(1), 0);
    guest.controller.interrupts.pend(1, 1);
    guest.step();
    assert_eq!(wires.take(1), 1);
    guest.controller.interrupts.disconnect();
    guest.controller.interrupts.pend(1, 1);
    guest.step();
    assert_eq!(wires.take(1), 0);
}

#[test]
fn interrupts_of_the_next_client_are_traced_too() {
    let mut guest = FakeGuest::new(test_config());
    guest.controller.interrupts.trace = Site::new(7, None);
    guest.controller.interrupts.disconnect();
    let (ring, _wires) = (Arc::new(Ring::new(64)), wired(&mut guest));
    trace::install(Some(Arc::clone(&ring)));
    guest.controller.interrupts.pend(3, 1);
    guest.step();
    trace::install(None);
    let mut seen = Vec::new();
    ring.drain(64, |words| seen.extend(Event::from_words(words).map(|event| (event.kind, event.key.device, event.place))));
    assert_eq!(seen, [(EventKind::Interrupted, 7, 3)]);
}

// ---- coalescing -----------------------------------------------------------------------------------------------------

/// `threshold` completions or `time` in 100 µs.
fn coalesce(guest: &FakeGuest, threshold: u32, time: u32) {
    guest.controller.state.features.interrupt_coalescing.set(time << 8 | (threshold - 1));
}

#[test]
fn coalescing_waits_for_the_threshold_or_the_time_whichever_is_first() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    coalesce(&guest, 4, 10);
    let start = Instant::now();
    let interrupts = |guest: &mut FakeGuest, at| {
        guest.controller.raise_interrupts(at);
        wires.take(1)
    };
    for posted in 1..=4 {
        guest.controller.interrupts.pend(1, 1);
        assert_eq!(interrupts(&mut guest, start), u64::from(posted == 4), "{posted} completions");
    }
    assert_eq!(guest.controller.interrupts.next_deadline(), None);
    // Too few: the time counts from the first of them.
    guest.controller.interrupts.pend(1, 1);
    assert_eq!(interrupts(&mut guest, start + MS), 0);
    guest.controller.interrupts.pend(1, 1);
    assert_eq!(interrupts(&mut guest, start + MS * 3 / 2), 0);
    assert_eq!(guest.controller.interrupts.next_deadline(), Some(start + MS * 2));
    assert_eq!(interrupts(&mut guest, start + MS * 2), 1);
    assert_eq!(guest.controller.interrupts.next_deadline(), None);
    assert_eq!(interrupts(&mut guest, start + MS * 9), 0);
}

#[test]
fn coalescing_spares_the_admin_queue_and_vectors_that_are_exempt() {
    let mut guest = FakeGuest::new(test_config());
    let wires = wired(&mut guest);
    coalesce(&guest, 100, 255);
    guest.controller.state.features.coalescing_disabled[0].set(1 << 5);
    (0..9).for_each(|vector| guest.controller.interrupts.pend(vector, 1));
    guest.controller.raise_interrupts(Instant::now());
    let raised: Vec<usize> = (0..9).filter(|&vector| wires.take(vector) > 0).collect();
    assert_eq!(raised, [0, 5]);
    // The earliest of several deadlines counts.
    assert!(guest.controller.interrupts.next_deadline().is_some());
}

#[test]
fn no_time_or_a_threshold_of_one_is_no_coalescing() {
    for (threshold, time) in [(256, 0), (1, 255)] {
        let mut guest = FakeGuest::new(test_config());
        let wires = wired(&mut guest);
        coalesce(&guest, threshold, time);
        guest.controller.interrupts.pend(1, 1);
        guest.controller.raise_interrupts(Instant::now());
        assert_eq!(wires.take(1), 1, "threshold {threshold}, time {time}");
    }
}

#[test]
fn coalesced_completions_of_real_commands_come_with_fewer_interrupts() {
    let mut guest = FakeGuest::boot();
    let wires = wired(&mut guest);
    guest.add_memory_volume(1, 1 << 20, millrace_block::BlockSize::B512);
    guest.make_queues(1, 64);
    coalesce(&guest, 8, 255);
    for _ in 0..16 {
        guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
        guest.ring(1);
        guest.controller.turn(&mut guest.shard.context());
    }
    assert_eq!(wires.take(1), 2);
}

// ---- the pin --------------------------------------------------------------------------------------------------------

fn wire_pin(guest: &mut FakeGuest) -> OwnedFd {
    let eventfd = new_eventfd();
    let theirs = vec![eventfd.try_clone().expect("a descriptor")];
    let set = change(irq::IRQ_INTX, 0, 1, IrqAction::Trigger, eventfds(theirs));
    guest.controller.interrupts.set_irqs(set).expect("accepted");
    eventfd
}

fn unmask_pin(guest: &mut FakeGuest) {
    let set = change(irq::IRQ_INTX, 0, 1, IrqAction::Unmask, IrqData::None);
    guest.controller.interrupts.set_irqs(set).expect("accepted");
}

fn pin_status(guest: &FakeGuest) -> bool {
    let mut status = [0];
    guest.controller.config_read(6, &mut status);
    status[0] & 8 != 0
}

/// A guest that uses the pin, with one completion it has not consumed.
fn guest_with_completion() -> (FakeGuest, OwnedFd) {
    let mut guest = FakeGuest::boot();
    let pin = wire_pin(&mut guest);
    guest.submit(0, sqe(millrace_nvme_spec::AdminOpcode::ABORT.0, 0));
    guest.settle();
    (guest, pin)
}

#[test]
fn the_pin_is_a_level_that_masks_itself() {
    let (mut guest, pin) = guest_with_completion();
    assert_eq!((take(&pin), pin_status(&guest)), (1, true));
    guest.submit(0, sqe(millrace_nvme_spec::AdminOpcode::ABORT.0, 0));
    guest.settle();
    assert_eq!(take(&pin), 0, "masked since it was signalled");
    unmask_pin(&mut guest);
    guest.settle();
    assert_eq!(take(&pin), 1, "still asserted");
    assert!(guest.poll(0).is_some() && guest.poll(0).is_some());
    guest.settle();
    unmask_pin(&mut guest);
    guest.settle();
    assert_eq!((take(&pin), pin_status(&guest)), (0, false), "everything was consumed");
}

#[test]
fn intms_holds_the_pin_down_and_intmc_lets_it_go() {
    let mut guest = FakeGuest::boot();
    let pin = wire_pin(&mut guest);
    guest.write32(offset::INTMS, 1);
    guest.submit(0, sqe(millrace_nvme_spec::AdminOpcode::ABORT.0, 0));
    guest.settle();
    assert_eq!((take(&pin), pin_status(&guest)), (0, false));
    guest.write32(offset::INTMC, 1);
    guest.settle();
    assert_eq!((take(&pin), pin_status(&guest)), (1, true));
}

#[test]
fn intx_disable_in_the_command_register_holds_the_pin_down() {
    let mut guest = FakeGuest::boot();
    let pin = wire_pin(&mut guest);
    guest.controller.config_write(4, &[6, 4]);
    guest.submit(0, sqe(millrace_nvme_spec::AdminOpcode::ABORT.0, 0));
    guest.settle();
    assert_eq!((take(&pin), pin_status(&guest)), (0, true), "the status shows the level all the same");
    guest.controller.config_write(4, &[6, 0]);
    guest.settle();
    assert_eq!(take(&pin), 1);
}

#[test]
fn vectors_take_the_pins_place_and_queues_without_interrupts_use_neither() {
    let mut guest = FakeGuest::boot();
    let pin = wire_pin(&mut guest);
    let wires = wired(&mut guest);
    guest.submit(0, sqe(millrace_nvme_spec::AdminOpcode::ABORT.0, 0));
    guest.settle();
    assert_eq!((take(&pin), wires.take(0)), (0, 1));
    assert!(guest.poll(0).is_some());
    let pair = guest.new_pair(16);
    guest.controller.create_cq(1, pair.cq_base, 16, None);
    guest.controller.create_sq(1, pair.sq_base, 16, 1, 0);
    guest.queues.insert(1, pair);
    let cqe = guest.command(1, sqe(NvmOpcode::FLUSH.0, 1));
    assert_eq!((cqe.status().is_success(), wires.take(0)), (false, 0));
}

#[test]
fn a_clients_eventfd_unmasks_the_pin() {
    let (mut guest, pin) = guest_with_completion();
    assert_eq!(take(&pin), 1);
    let resample = new_eventfd();
    let theirs = vec![resample.try_clone().expect("a descriptor")];
    let set = change(irq::IRQ_INTX, 0, 1, IrqAction::Unmask, eventfds(theirs));
    guest.controller.interrupts.set_irqs(set).expect("accepted");
    assert!(guest.controller.interrupts.take_pin_change() && guest.controller.interrupts.pin_unmask().is_some());
    assert!(!guest.controller.interrupts.take_pin_change(), "told once");
    guest.controller.interrupts.unmask_pin();
    guest.settle();
    assert_eq!(take(&pin), 0, "it was not written");
    rustix::io::write(&resample, &1_u64.to_ne_bytes()).expect("an eventfd");
    guest.controller.interrupts.unmask_pin();
    guest.settle();
    assert_eq!(take(&pin), 1);
}

/// The worker may end when it has read that eventfd empty, and before it has said so.
#[test]
fn an_unmask_that_was_read_and_not_remembered_is_made_up_for() {
    let (mut guest, pin) = guest_with_completion();
    assert_eq!(take(&pin), 1);
    let resample = new_eventfd();
    for (unmask, signals) in [(Some(&resample), 1), (None, 0)] {
        let clone = |fd: &OwnedFd| fd.try_clone().expect("a descriptor");
        let (pin_masked, unmask) = (true, unmask.map(clone));
        let wiring = Wiring { vectors: Vec::new(), masked: [0; WORDS], pin: Some(clone(&pin)), pin_masked, unmask };
        guest.controller.interrupts.take_over(wiring);
        guest.settle();
        assert_eq!(take(&pin), signals, "the level is asserted; with another eventfd to unmask it: {}", signals == 1);
    }
}

// ---- shadow doorbells -----------------------------------------------------------------------------------------------

/// A guest with an I/O queue of 16 entries and shadow doorbells.
fn guest_with_shadow() -> (FakeGuest, u64, u64) {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, millrace_block::BlockSize::B512);
    let (shadow, events) = (guest.alloc_pages(1), guest.alloc_pages(1));
    let registers = &guest.controller.state.registers;
    registers.shadow_doorbells.set(shadow);
    registers.event_indexes.set(events);
    guest.make_queues(1, 16);
    (guest, shadow, events)
}

/// What stands in the doorbells is of the last time that the guest had to ring.
#[test]
fn without_their_page_shadow_doorbells_say_nothing_new() {
    let (mut guest, shadow, _) = guest_with_shadow();
    for tail in 1..=6_u32 {
        guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
        guest.write_value(shadow + 8, &tail);
        assert!(guest.wait_shadow(1, shadow).status().is_success());
    }
    guest.doorbell(2, 3);
    guest.doorbell(3, 1);
    assert_eq!(guest.controller.consumed(1), 6);
    let before = guest.controller.counters.commands();
    guest.controller.state.registers.shadow_doorbells.set(1 << 40);
    guest.controller.caches.forget_translations();
    for _ in 0..10 {
        guest.step();
    }
    assert_eq!((guest.controller.counters.commands(), guest.controller.consumed(1)), (before, 6));
    guest.controller.state.registers.shadow_doorbells.set(shadow);
    guest.controller.caches.forget_translations();
    guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.write_value(shadow + 8, &7_u32);
    assert!(guest.wait_shadow(1, shadow).status().is_success());
}

/// Linux's rule (nvme_dbbuf_need_event): whether a store from `old` to `new` passes the event index.
fn needs_ring(event: u32, new: u32, old: u32) -> bool {
    (new.wrapping_sub(event).wrapping_sub(1) & 0xffff) < (new.wrapping_sub(old) & 0xffff)
}

#[test]
fn a_guest_rings_when_we_sleep_and_hardly_when_we_poll() {
    let (mut guest, shadow, events) = guest_with_shadow();
    let mut tail = 0;
    let mut rings_while_polling = 0;
    for round in 0..1000 {
        let asleep = round % 7 == 0;
        if asleep {
            assert!(guest.controller.arm_event_indexes());
            assert!(!guest.controller.can_take(), "everything was taken");
        }
        let flushes = 1 + round % 5;
        let old = tail;
        for _ in 0..flushes {
            guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
            tail = (tail + 1) % 16;
        }
        guest.write_value(shadow + 8, &tail);
        let event: u32 = guest.read_value(events + 8);
        if asleep {
            assert!(needs_ring(event, tail, old), "round {round}: {old} to {tail}, event index {event}");
            guest.controller.relax_event_indexes();
        } else {
            rings_while_polling += u32::from(needs_ring(event, tail, old));
        }
        for _ in 0..flushes {
            assert!(guest.wait_shadow(1, shadow).status().is_success());
        }
    }
    let laps = 3 * 1000 / 16;
    assert!(rings_while_polling <= laps, "{rings_while_polling} rings in {laps} laps");
}

#[test]
fn a_store_before_arming_is_seen_by_the_look_after_it() {
    let (mut guest, shadow, _) = guest_with_shadow();
    guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.write_value(shadow + 8, &1_u32);
    assert!(guest.controller.arm_event_indexes());
    assert!(guest.controller.can_take());
    // Without shadow doorbells there is nothing to arm.
    let mut plain = FakeGuest::boot();
    assert!(!plain.controller.arm_event_indexes());
    plain.controller.doorbells.words[0].store(1, Ordering::Relaxed);
    assert!(plain.controller.can_take());
}
