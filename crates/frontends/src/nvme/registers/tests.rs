use std::sync::Arc;

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockSize,
    trace::{self, Event, EventKind, Site},
};
use millrace_nvme_spec::{
    opcode::{AdminOpcode, NvmOpcode},
    status::Status,
};
use proptest::prelude::*;

use super::*;
use crate::nvme::fixture::{FakeGuest, HeldVolume, MEMORY_BASE, MEMORY_SIZE, sqe, test_config};

const ENABLE: u32 = 4 << 20 | 6 << 16 | 1;
const SHN_NORMAL: u32 = 1 << 14;
const SHN_ABRUPT: u32 = 2 << 14;
const RDY: u32 = 1;
const CFS: u32 = 2;
const SHST: u32 = 3 << 2;
const SHST_COMPLETE: u32 = 2 << 2;
const NSSRO: u32 = 1 << 4;

fn csts(guest: &FakeGuest) -> u32 {
    guest.read32(offset::CSTS)
}

/// A guest with a volume whose requests wait, and one flush of it in flight.
fn guest_with_flush_in_flight() -> (FakeGuest, Arc<HeldVolume>) {
    let mut guest = FakeGuest::boot();
    let volume = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
    guest.add_volume(1, Arc::clone(&volume) as Arc<dyn millrace_block::Volume>);
    guest.make_queues(1, 16);
    volume.hold();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.step_until("the flush to reach the volume", |_| volume.waiting() == 1);
    (guest, volume)
}

#[test]
fn capabilities_say_what_the_controller_does() {
    let guest = FakeGuest::new(test_config());
    let cap = Capabilities::from_bits(guest.read64(offset::CAP));
    assert_eq!((cap.mqes_z(), cap.cqr(), cap.dstrd()), (1023, true, 0));
    assert_eq!((cap.css_nvm(), cap.css_iocs(), cap.nssrs()), (true, true, true));
    assert_eq!((cap.mpsmin(), cap.mpsmax()), (0, MPS_MAX));
    assert_eq!((cap.crwms(), cap.crims(), cap.pmrs(), cap.cmbs(), cap.bps()), (false, false, false, false, false));
    assert_eq!(guest.read32(offset::VS), 0x0001_0400);
    for absent in [offset::NSSR, offset::CMBLOC, offset::CMBSZ, offset::BPINFO, offset::CRTO, offset::PMRCAP, 0x18, 0xffc] {
        assert_eq!(guest.read32(absent), 0, "offset {absent:#x}");
    }
}

#[test]
fn reads_of_any_width_see_the_same_bytes_and_odd_writes_change_nothing() {
    let mut guest = FakeGuest::new(test_config());
    guest.write64(offset::ASQ, 0x1234_5678_9abc_d000);
    guest.write32(offset::AQA, 0x003f_001f);
    let mut all = [0; 0x40];
    guest.controller.register_read(0, &mut all);
    for at in 0..0x38 {
        for width in [1, 2, 4, 8] {
            let mut part = vec![0; width];
            guest.controller.register_read(at as u64, &mut part);
            assert_eq!(part, all[at..at + width], "{width} bytes at {at:#x}");
        }
    }
    for (at, width) in [(offset::ASQ, 1), (offset::ASQ, 2), (offset::ASQ + 2, 4), (offset::ASQ - 4, 8), (offset::ASQ, 12)] {
        guest.controller.register_write(at, &vec![0xff; width]);
        let mut now = [0; 0x40];
        guest.controller.register_read(0, &mut now);
        assert_eq!(now, all, "{width} bytes at {at:#x}");
    }
    // Reserved bits stay zero: the low bits of addresses, and of AQA.
    guest.write64(offset::ACQ, u64::MAX);
    guest.write32(offset::AQA, u32::MAX);
    assert_eq!((guest.read64(offset::ACQ), guest.read32(offset::AQA)), (u64::MAX - 0xfff, 0x0fff_0fff));
}

#[test]
fn every_setup_that_cannot_work_ends_in_fatal_status_and_a_reset_mends_it() {
    let good = [ENABLE, 0x001f_001f, MEMORY_BASE as u32, MEMORY_BASE as u32 + 0x1_0000];
    let bad = [
        ("CSS 1", [ENABLE | 1 << 4, good[1], good[2], good[3]]),
        ("CSS admin only", [ENABLE | 7 << 4, good[1], good[2], good[3]]),
        ("MPS 128 KiB", [ENABLE | 5 << 7, good[1], good[2], good[3]]),
        ("AMS weighted", [ENABLE | 1 << 11, good[1], good[2], good[3]]),
        ("one SQ entry", [ENABLE, 0x001f_0000, good[2], good[3]]),
        ("one CQ entry", [ENABLE, 0x0000_001f, good[2], good[3]]),
        ("ASQ off a 64 KiB page", [ENABLE | 4 << 7, good[1], good[2] + 0x1000, good[3]]),
        ("ACQ off an 8 KiB page", [ENABLE | 1 << 7, good[1], good[2], good[3] + 0x1000]),
    ];
    for (what, [cc, aqa, asq, acq]) in bad {
        let mut guest = FakeGuest::new(test_config());
        guest.write32(offset::AQA, aqa);
        guest.write64(offset::ASQ, asq.into());
        guest.write64(offset::ACQ, acq.into());
        guest.write32(offset::CC, cc);
        assert_eq!(csts(&guest), CFS, "{what}");
        guest.write32(offset::CC, cc & !1);
        assert_eq!(csts(&guest), 0, "{what}, reset");
        guest.enable();
        assert_eq!(csts(&guest), RDY, "{what}, mended");
    }
    for css in [0, 6] {
        let mut guest = FakeGuest::new(test_config());
        guest.write32(offset::AQA, good[1]);
        guest.write64(offset::ASQ, good[2].into());
        guest.write64(offset::ACQ, good[3].into());
        guest.write32(offset::CC, ENABLE | css << 4 | 4 << 7);
        assert_eq!(csts(&guest), RDY, "CSS {css}, 64 KiB pages");
    }
}

#[test]
fn fields_of_the_time_before_the_enable_do_not_change_after_it() {
    let mut guest = FakeGuest::boot();
    guest.write32(offset::CC, ENABLE & !(0xf << 16) | 9 << 16 | 6 << 4 | 4 << 7 | 1 << 11);
    assert_eq!(guest.read32(offset::CC), ENABLE & !(0xf << 16) | 9 << 16, "only the entry size changed");
    assert_eq!(csts(&guest), RDY);
}

#[test]
fn admin_queue_memory_outside_the_guest_is_fatal_for_this_controller_only() {
    let mut guest = FakeGuest::new(test_config());
    guest.write32(offset::AQA, 0x001f_001f);
    guest.write64(offset::ASQ, MEMORY_BASE + MEMORY_SIZE);
    guest.write64(offset::ACQ, MEMORY_BASE);
    guest.write32(offset::CC, ENABLE);
    guest.settle();
    assert_eq!(csts(&guest), RDY, "nothing was touched yet");
    guest.doorbell(0, 1);
    guest.settle();
    assert_eq!(csts(&guest), RDY | CFS);
    guest.disable();
    guest.enable();
    assert!(guest.admin(sqe(AdminOpcode::ABORT.0, 0)).status().is_success());
}

#[test]
fn a_truncated_memory_file_is_fatal_status_and_not_the_end_of_the_process() {
    let mut guest = FakeGuest::boot();
    guest.push(0, sqe(AdminOpcode::ABORT.0, 0));
    guest.memory.set_len(0).expect("a guest may do that");
    guest.ring(0);
    guest.settle();
    assert_eq!(csts(&guest), RDY | CFS);
}

#[test]
fn disable_keeps_rdy_until_nothing_is_in_flight_and_late_completions_are_dropped() {
    let (mut guest, volume) = guest_with_flush_in_flight();
    let before = guest.read(guest.queues[&1].cq_base, 16);
    guest.write32(offset::CC, ENABLE & !1);
    for _ in 0..10 {
        guest.step();
    }
    assert_eq!((csts(&guest), guest.controller.phase), (RDY, Phase::Resetting));
    volume.release();
    guest.step_until("not ready", |guest| csts(guest) & RDY == 0);
    assert_eq!(guest.read(guest.queues[&1].cq_base, 16), before, "nothing was posted");
    assert_eq!(guest.controller.in_flight, 0);
    assert!(!guest.controller.sq_exists(1) && !guest.controller.cq_exists(0));
    // A new life: identifiers and phases start over, and the old command does not come back.
    guest.enable();
    guest.make_queues(1, 16);
    assert!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
    assert_eq!(guest.poll(1), None);
}

/// What it drops has no end, and whoever traces the device is not to wait for one.
#[test]
fn a_trace_tells_of_a_reset() {
    let (mut guest, volume) = guest_with_flush_in_flight();
    let events = Arc::new(trace::Ring::new(64));
    trace::install(Some(Arc::clone(&events)));
    guest.controller.trace = Site::new(1, None);
    guest.write32(offset::CC, ENABLE & !1);
    volume.release();
    guest.step_until("not ready", |guest| csts(guest) & RDY == 0);
    trace::install(None);
    let mut kinds = Vec::new();
    while events.drain(64, |words| kinds.push(Event::from_words(words).expect("a known kind").kind)) > 0 {}
    assert_eq!(kinds, [EventKind::Reset]);
}

#[test]
fn enable_before_the_disable_has_finished_takes_effect_after_it() {
    let (mut guest, volume) = guest_with_flush_in_flight();
    let epoch = guest.controller.state.epoch.get();
    guest.write32(offset::CC, ENABLE & !1);
    guest.write32(offset::CC, ENABLE);
    guest.step();
    assert_eq!(guest.controller.phase, Phase::Resetting);
    volume.release();
    guest.step_until("ready again", |guest| guest.controller.phase == Phase::Ready);
    assert_eq!((csts(&guest), guest.controller.state.epoch.get()), (RDY, epoch + 1));
    assert!(!guest.controller.sq_exists(1), "I/O queues are gone");
}

#[test]
fn subsystem_reset_clears_the_registers_and_says_so_until_told() {
    let mut guest = FakeGuest::boot();
    guest.write32(offset::INTMS, 0xf0);
    guest.write32(offset::NSSR, NSSR_RESET - 1);
    assert_eq!(csts(&guest), RDY, "another value does nothing");
    guest.write32(offset::NSSR, NSSR_RESET);
    assert_eq!(csts(&guest), NSSRO);
    for register in [offset::CC, offset::AQA, offset::ASQ, offset::ACQ, offset::INTMS, offset::NSSR] {
        assert_eq!(guest.read32(register), 0, "offset {register:#x}");
    }
    guest.enable();
    assert_eq!(csts(&guest), RDY | NSSRO);
    guest.write32(offset::CSTS, 0);
    assert_eq!(csts(&guest), RDY | NSSRO);
    guest.write32(offset::CSTS, u32::MAX);
    assert_eq!(csts(&guest), RDY);
}

#[test]
fn a_reset_forgets_what_is_held_and_event_requests_keep_nothing_waiting() {
    let mut guest = FakeGuest::boot();
    for _ in 0..3 {
        guest.submit(0, sqe(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0));
    }
    guest.settle();
    assert_eq!(guest.controller.in_flight, 3, "event requests are held");
    assert!(guest.controller.is_quiet());
    guest.disable();
    assert_eq!(guest.controller.in_flight, 0);
}

#[test]
fn shutdown_flushes_every_volume_before_it_is_complete() {
    for request in [SHN_NORMAL, SHN_ABRUPT] {
        let mut guest = FakeGuest::boot();
        let volumes = [1, 7, 64].map(|nsid| {
            let volume = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
            guest.add_volume(nsid, Arc::clone(&volume) as Arc<dyn millrace_block::Volume>);
            volume.hold();
            volume
        });
        guest.write32(offset::CC, ENABLE | request);
        guest.step_until("flushes", |_| volumes.iter().all(|volume| volume.waiting() == 1));
        assert_eq!(csts(&guest), RDY | 1 << 2, "shutdown processing occurring");
        volumes[0].release();
        volumes[2].release();
        guest.step_until("two flushes", |_| volumes[0].waiting() + volumes[2].waiting() == 0);
        guest.step();
        assert_eq!(csts(&guest), RDY | 1 << 2, "the third has not finished");
        volumes[1].release();
        guest.step_until("shutdown", |guest| csts(guest) & SHST == SHST_COMPLETE);
        // No command is taken any more.
        guest.submit(0, sqe(AdminOpcode::ABORT.0, 0));
        guest.settle();
        assert_eq!(guest.poll(0), None);
        // A reset brings it back (Base 3.6.1).
        guest.disable();
        assert_eq!(csts(&guest), 0);
        guest.enable();
        assert_eq!(csts(&guest), RDY);
    }
}

#[test]
fn shutdown_waits_for_commands_in_flight_and_completes_them() {
    let (mut guest, volume) = guest_with_flush_in_flight();
    guest.write32(offset::CC, ENABLE | SHN_NORMAL);
    for _ in 0..10 {
        guest.step();
    }
    assert_eq!((csts(&guest), volume.waiting()), (RDY | 1 << 2, 1), "its own flush has not begun");
    volume.release();
    guest.step_until("shutdown", |guest| csts(guest) & SHST == SHST_COMPLETE);
    assert!(guest.poll(1).is_some_and(|cqe| cqe.status().is_success()));
}

#[test]
fn shutdown_completes_though_a_volume_cannot_be_flushed() {
    let mut guest = FakeGuest::boot();
    let volume = FaultVolume::new(MemoryVolume::create("bad", 1 << 20, BlockSize::B512).expect("a volume"), 1);
    volume.add(Rule::new(Kind::Flush, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    guest.add_volume(1, Arc::clone(&volume) as Arc<dyn millrace_block::Volume>);
    guest.write32(offset::CC, ENABLE | SHN_NORMAL);
    guest.settle();
    assert_eq!((csts(&guest), volume.faults()), (RDY | SHST_COMPLETE, 1));
    assert_eq!(guest.controller.namespaces.get(1).map(|attached| attached.in_flight.get()), Some(0));
}

#[test]
fn shutdown_of_a_disabled_controller_completes_and_enabling_ends_it() {
    let mut guest = FakeGuest::new(test_config());
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.write32(offset::CC, SHN_NORMAL);
    guest.settle();
    assert_eq!(csts(&guest), SHST_COMPLETE);
    guest.enable();
    assert_eq!(csts(&guest), RDY);
}

#[test]
fn shutdown_and_disable_in_one_write_do_both() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.write32(offset::CC, ENABLE & !1 | SHN_NORMAL);
    guest.settle();
    assert_eq!(csts(&guest), SHST_COMPLETE);
}

#[test]
fn function_level_reset_under_io_drains_then_starts_from_nothing() {
    let (mut guest, volume) = guest_with_flush_in_flight();
    guest.controller.config_write(0x69, &[0x80]);
    guest.step();
    assert_eq!((csts(&guest), guest.read32(offset::CC)), (RDY, 0));
    volume.release();
    guest.step_until("the reset", |guest| csts(guest) == 0);
    assert_eq!((guest.read32(offset::AQA), guest.read64(offset::ASQ)), (0, 0));
    guest.enable();
}

#[test]
fn doorbells_of_queues_that_do_not_exist_are_not_kept_for_those_that_will() {
    let mut guest = FakeGuest::boot();
    guest.controller.doorbell_write(2, 5);
    guest.controller.doorbell_write(usize::MAX, 5);
    guest.controller.doorbell_write(1023, 5);
    guest.make_queues(1, 16);
    guest.settle();
    assert_eq!(guest.poll(1), None);
    let cid = guest.push(1, sqe(NvmOpcode::FLUSH.0, 99));
    guest.controller.doorbell_write(2, 1);
    let cqe = guest.wait(1);
    assert_eq!((cqe.cid.0, cqe.status().code()), (cid, Status::INVALID_NAMESPACE_OR_FORMAT.code()));
}

#[test]
fn a_completion_queue_that_is_never_drained_holds_commands_back_and_loses_none() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    // Four completion entries: room for three.
    let mut pair = guest.new_pair(4);
    guest.controller.create_cq(1, pair.cq_base, 4, None);
    let big = guest.new_pair(16);
    guest.controller.create_sq(1, big.sq_base, 16, 1, 0);
    pair.sq_base = big.sq_base;
    for cid in 0..10 {
        let mut flush = sqe(NvmOpcode::FLUSH.0, 1);
        flush.cid.0 = cid;
        guest.write_value(pair.sq_base + u64::from(cid) * 64, &flush);
    }
    guest.doorbell(2, 10);
    guest.settle();
    assert_eq!(guest.controller.sq(1).head.get(), 3, "a completion has room before a command is taken");
    assert!(!guest.controller.can_take(), "a full queue does not keep the shard awake");
    guest.queues.insert(1, pair);
    let seen: Vec<u16> = (0..10).map(|_| guest.wait(1).cid.0).collect();
    assert_eq!(seen, (0..10).collect::<Vec<u16>>());
}

/// Were the doorbell read a second time, the queue would be empty up to a tail that nobody has noted. The guest could then fill it to the
/// noted one, 4 commands on in a queue of 5, and nothing would have moved.
#[test]
fn what_the_guest_rings_while_its_queue_is_taken_from_is_left_for_the_next_look() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.make_queues(1, 5);
    for round in 0..10 {
        let first = guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
        let tail = guest.queues[&1].tail;
        let second = guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
        let FakeGuest { controller, shard, .. } = &mut guest;
        assert_eq!(controller.take_from(&mut shard.context(), 1, tail), 1, "round {round}");
        assert_eq!(controller.sq(1).head.get(), tail, "round {round}");
        assert_eq!([guest.wait(1).cid.0, guest.wait(1).cid.0], [first, second]);
    }
}

// ---- any order of writes, against a model ---------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Action {
    Cc(u32),
    Aqa(u32),
    Asq(u64),
    Acq(u64),
    Mask(u32),
    Unmask(u32),
    Csts(u32),
    Nssr(bool),
    FunctionReset,
    Noise(u64, Vec<u8>),
}

/// What the specification says of a controller with nothing in flight, whose transitions are over before the next write.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    cc: u32,
    csts: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    mask: u32,
}

impl Model {
    fn apply(&mut self, action: &Action) {
        match *action {
            Action::Cc(value) => self.cc(value),
            Action::Aqa(value) => self.aqa = value & 0x0fff_0fff,
            Action::Asq(value) => self.asq = value >> 12 << 12,
            Action::Acq(value) => self.acq = value >> 12 << 12,
            Action::Mask(bits) => self.mask |= bits,
            Action::Unmask(bits) => self.mask &= !bits,
            Action::Csts(value) => self.csts &= !(value & NSSRO),
            Action::Nssr(true) => *self = Self { csts: NSSRO, ..Self::default() },
            Action::FunctionReset => *self = Self { csts: self.csts & NSSRO, ..Self::default() },
            Action::Nssr(false) | Action::Noise(..) => {}
        }
    }

    fn cc(&mut self, value: u32) {
        let old = std::mem::replace(&mut self.cc, value & 0x00ff_fff1);
        let (was, is) = (old & 1 != 0, value & 1 != 0);
        if was && is {
            // CSS, MPS and AMS stay.
            self.cc = self.cc & !0x3ff0 | old & 0x3ff0;
        }
        if was && !is {
            (self.csts, self.mask) = (self.csts & NSSRO, 0);
        }
        if !was && is {
            self.csts &= NSSRO | SHST;
            if self.can_enable() {
                self.csts = self.csts & NSSRO | RDY;
            } else {
                self.csts |= CFS;
            }
        }
        let shn = self.cc >> 14 & 3;
        if matches!(shn, 1 | 2) && shn != old >> 14 & 3 && self.csts & SHST == 0 {
            self.csts |= SHST_COMPLETE;
        }
    }

    fn can_enable(&self) -> bool {
        let field = |at: u32, bits: u32| self.cc >> at & ((1 << bits) - 1);
        let page = 1_u64 << (12 + field(7, 4));
        matches!(field(4, 3), 0 | 6)
            && field(7, 4) <= 4
            && field(11, 3) == 0
            && self.aqa & 0xfff != 0
            && self.aqa >> 16 != 0
            && self.asq.is_multiple_of(page)
            && self.acq.is_multiple_of(page)
    }
}

fn actions() -> impl Strategy<Value = Action> {
    let cc = (
        any::<bool>(),
        prop_oneof![4 => Just(0_u32), 1 => 0..8_u32],
        prop_oneof![4 => Just(0_u32), 1 => 0..16_u32],
        0..4_u32,
    )
        .prop_map(|(en, css, mps, shn)| Action::Cc(ENABLE & !1 | u32::from(en) | css << 4 | mps << 7 | shn << 14));
    let address = prop_oneof![(0..32_u64).prop_map(|page| MEMORY_BASE + page * 4096), any::<u64>()];
    prop_oneof![
        8 => cc,
        1 => any::<u32>().prop_map(Action::Cc),
        2 => prop_oneof![Just(0x001f_001f), any::<u32>()].prop_map(Action::Aqa),
        2 => address.clone().prop_map(Action::Asq),
        2 => address.prop_map(Action::Acq),
        1 => any::<u32>().prop_map(Action::Mask),
        1 => any::<u32>().prop_map(Action::Unmask),
        1 => any::<u32>().prop_map(Action::Csts),
        1 => any::<bool>().prop_map(Action::Nssr),
        1 => Just(Action::FunctionReset),
        1 => (0..0x2000_u64, proptest::collection::vec(any::<u8>(), 1..4)).prop_map(|(at, data)| Action::Noise(at, data)),
    ]
}

fn perform(guest: &mut FakeGuest, action: &Action) {
    match *action {
        Action::Cc(value) => guest.write32(offset::CC, value),
        Action::Aqa(value) => guest.write32(offset::AQA, value),
        Action::Asq(value) => guest.write64(offset::ASQ, value),
        Action::Acq(value) => {
            guest.write32(offset::ACQ, value as u32);
            guest.write32(offset::ACQ + 4, (value >> 32) as u32);
        }
        Action::Mask(bits) => guest.write32(offset::INTMS, bits),
        Action::Unmask(bits) => guest.write32(offset::INTMC, bits),
        Action::Csts(value) => guest.write32(offset::CSTS, value),
        Action::Nssr(right) => guest.write32(offset::NSSR, if right { NSSR_RESET } else { 1 }),
        Action::FunctionReset => guest.controller.reset(Reset::Function),
        Action::Noise(at, ref data) => guest.controller.register_write(at, data),
    }
    guest.settle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn registers_follow_the_model_whatever_a_guest_writes(actions in proptest::collection::vec(actions(), 1..60)) {
        let mut guest = FakeGuest::new(test_config());
        guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
        let mut model = Model::default();
        for action in &actions {
            perform(&mut guest, action);
            model.apply(action);
            let seen = Model {
                cc: guest.read32(offset::CC),
                csts: csts(&guest),
                aqa: guest.read32(offset::AQA),
                asq: guest.read64(offset::ASQ),
                acq: guest.read64(offset::ACQ),
                mask: guest.read32(offset::INTMC),
            };
            prop_assert_eq!(&seen, &model, "after {:?}", action);
        }
    }
}

#[test]
fn queue_memory_that_is_unmapped_in_use_is_fatal_for_the_controller() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.make_queues(1, 16);
    assert!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
    guest.controller.memory.unmap_all();
    guest.controller.caches.forget_translations();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.settle();
    assert_eq!(csts(&guest), RDY | CFS);
}

/// Linux clears its queues' memory only once the controller knows them: what an earlier life had posted there is none of this one's.
#[test]
fn a_takeover_after_an_enable_finds_no_completions_of_an_earlier_life() {
    let mut guest = FakeGuest::boot();
    let pair = guest.queues[&0].clone();
    for _ in 0..5 {
        guest.admin(sqe(AdminOpcode::GET_LOG_PAGE.0, 0));
    }
    guest.disable();
    guest.write32(offset::CC, ENABLE);
    assert_eq!(guest.controller.phase, Phase::Ready);
    let io = guest.new_pair(16);
    guest.write(io.cq_base, &guest.read(pair.cq_base, 5 * 16));
    guest.controller.create_cq(1, io.cq_base, 16, None);
    guest.controller.create_sq(1, io.sq_base, 16, 1, 0);
    // The worker dies, and the next one takes over.
    guest.controller.resume();
    for qid in [0, 1] {
        assert_eq!((guest.controller.cq(qid).tail(), guest.controller.sq(qid).head.get()), (0, 0), "queue {qid}");
    }
    guest.write(pair.cq_base, &[0; 64 * 16]);
    guest.queues.insert(0, pair);
    let cid = guest.submit(0, sqe(AdminOpcode::IDENTIFY.0, 0));
    assert_eq!(guest.wait(0).cid.0, cid);
    guest.settle();
    assert!(guest.poll(0).is_none(), "nothing else was carried out");
}
