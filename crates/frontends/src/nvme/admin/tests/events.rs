//! Asynchronous events and Abort.

use std::collections::BTreeSet;

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{BlockError, BlockSize};
use millrace_nvme_spec::{
    admin::AsyncEvent,
    command::{NamespaceId, QueueId, Sqe},
    features::FeatureId,
    identify::NamespaceList,
    log::{ErrorEntry, LogId, ReservationNotification, ReservationNotificationType as Notice},
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    status::Status,
};

use super::{
    super::super::{
        fixture::{FakeGuest, PAGE, sqe},
        registers::Phase,
        state::EVENT_REQUESTS,
    },
    admin, code, expect,
    logs::log_page,
    reading,
};

fn event_request() -> Sqe {
    admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0)
}

fn abort(sqid: u16, cid: u16) -> Sqe {
    let mut sqe = admin(AdminOpcode::ABORT, 0);
    sqe.cdw10 = u32::from(sqid) | u32::from(cid) << 16;
    sqe
}

fn set_feature(fid: FeatureId, value: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::SET_FEATURES, 0);
    (sqe.cdw10, sqe.cdw11) = (u32::from(fid.0), value);
    sqe
}

/// Namespace Attribute Notices, and the temperature warning.
const NOTICES: u32 = 1 << 8;
const TEMPERATURE: u32 = 1 << 1;

#[test]
fn requests_have_a_limit_and_can_be_aborted() {
    let mut guest = FakeGuest::boot();
    let waiting: BTreeSet<u16> = (0..EVENT_REQUESTS).map(|_| guest.submit(0, event_request())).collect();
    // Ten thousand more are refused one by one, and leave nothing behind.
    for _ in 0..10_000 {
        expect(&mut guest, event_request(), Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED);
    }
    assert_eq!(guest.controller.in_flight as usize, EVENT_REQUESTS);
    let mut aborted = BTreeSet::new();
    for round in 0..10_000u32 {
        // Most name nothing: another queue, a missing queue, an identifier that is not in use.
        let (sqid, cid) = match round % 4 {
            0 => (1, round as u16),
            1 => (u16::MAX, round as u16),
            _ => (0, round as u16 | 0x8000),
        };
        let not_aborted = expect(&mut guest, abort(sqid, cid), Status::SUCCESS) & 1;
        let was_waiting = sqid == 0 && waiting.contains(&cid) && !aborted.contains(&cid);
        assert_eq!(not_aborted, u32::from(!was_waiting));
        if was_waiting {
            aborted.insert(cid);
        }
    }
    for &cid in &waiting {
        assert_eq!(expect(&mut guest, abort(0, cid), Status::SUCCESS), 0);
        assert_eq!(code(&guest.wait_for(0, cid)), Status::ABORT_REQUESTED);
        assert_eq!(expect(&mut guest, abort(0, cid), Status::SUCCESS), 1, "it is gone");
    }
    assert_eq!(guest.controller.in_flight, 0);
}

#[test]
fn a_waiting_requests_identifier_is_only_another_requests_conflict() {
    let mut guest = FakeGuest::boot();
    let cid = guest.submit(0, event_request());
    guest.settle();
    for (mut again, status) in [(event_request(), Status::CID_CONFLICT), (abort(0, 0x7777), Status::SUCCESS)] {
        again.cid.0 = cid;
        guest.push_as_is(0, &again);
        guest.ring(0);
        assert_eq!(code(&guest.wait(0)), status);
    }
    assert_eq!(guest.controller.state.events.outstanding.get(), 1);
}

/// A guest whose admin completion queue is where no memory is, with event requests that wait.
fn guest_without_completions(requests: u32) -> FakeGuest {
    let mut guest = FakeGuest::boot();
    guest.disable();
    let pair = guest.new_pair(16);
    guest.write32(offset::AQA, 15 << 16 | 15);
    guest.write64(offset::ASQ, pair.sq_base);
    guest.write64(offset::ACQ, PAGE);
    guest.queues.insert(0, pair);
    guest.write32(offset::CC, 4 << 20 | 6 << 16 | 1);
    for _ in 0..requests {
        guest.submit(0, event_request());
    }
    guest.settle();
    let events = &guest.controller.state.events;
    assert_eq!((guest.controller.phase, events.outstanding.get()), (Phase::Ready, requests));
    guest
}

/// Its controller has failed, waits for nothing, and is as good as new after a reset.
fn expect_recovery(mut guest: FakeGuest, requests: u32) {
    assert_eq!(guest.controller.phase, Phase::Failed);
    assert!(guest.read32(offset::CSTS) & 2 != 0, "fatal status");
    assert_eq!((guest.controller.state.events.outstanding.get(), guest.controller.in_flight), (requests, requests));
    assert!(guest.controller.is_quiet());
    guest.disable();
    guest.enable();
    let cid = guest.submit(0, event_request());
    assert_eq!(expect(&mut guest, abort(0, cid), Status::SUCCESS), 0);
    assert_eq!(code(&guest.wait_for(0, cid)), Status::ABORT_REQUESTED);
}

#[test]
fn a_request_that_cannot_be_completed_waits_no_more() {
    // An event, an abort, and two events at once.
    let mut guest = guest_without_completions(1);
    guest.doorbell(0, 1000);
    guest.settle();
    expect_recovery(guest, 0);

    let mut guest = guest_without_completions(1);
    let waiting = guest.controller.event_requests().next().expect("a request");
    guest.submit(0, abort(0, waiting));
    guest.settle();
    expect_recovery(guest, 0);

    for requests in [1, 2] {
        let mut guest = guest_without_completions(requests);
        guest.controller.state.features.async_events.set(NOTICES);
        guest.controller.namespace_changed(1);
        guest.doorbell(0, 1000);
        guest.settle();
        expect_recovery(guest, requests - 1);
    }
}

#[test]
fn requests_do_not_fill_a_small_completion_queue() {
    let mut guest = FakeGuest::boot();
    guest.disable();
    let pair = guest.new_pair(4);
    guest.write32(offset::AQA, 3 << 16 | 3);
    guest.write64(offset::ASQ, pair.sq_base);
    guest.write64(offset::ACQ, pair.cq_base);
    guest.queues.insert(0, pair);
    guest.write32(offset::CC, 4 << 20 | 6 << 16 | 1);
    let mut waiting = Vec::new();
    for _ in 0..EVENT_REQUESTS {
        waiting.push(guest.submit(0, event_request()));
        guest.settle();
        expect(&mut guest, abort(1, 0), Status::SUCCESS);
    }
    expect(&mut guest, set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, NOTICES), Status::SUCCESS);
    guest.controller.namespace_changed(3);
    assert_eq!(guest.wait(0).cid.0, waiting[0], "the oldest request is answered");
}

#[test]
fn a_changed_namespace_is_reported_once_until_the_log_is_read() {
    let mut guest = FakeGuest::boot();
    guest.controller.namespace_changed(5);
    let cid = guest.submit(0, event_request());
    guest.settle();
    assert!(guest.poll(0).is_none(), "the host has not asked for these events");
    expect(&mut guest, set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, NOTICES), Status::SUCCESS);
    guest.controller.namespace_changed(7);
    let cqe = guest.wait(0);
    assert_eq!((cqe.cid.0, cqe.dw0), (cid, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0().into_bits()));
    // Masked now.
    guest.submit(0, event_request());
    guest.controller.namespace_changed(9);
    guest.settle();
    assert!(guest.poll(0).is_none());
    let ids = |list: NamespaceList| list.iter().map(|id| id.0).collect::<Vec<_>>();
    // Reading with Retain Asynchronous Event changes nothing.
    let mut retained = log_page(LogId::CHANGED_NAMESPACES, 4096);
    retained.cdw10 |= 1 << 15;
    for _ in 0..2 {
        assert_eq!(ids(reading(&mut guest, retained)), [5, 7, 9]);
    }
    guest.controller.namespace_changed(9);
    guest.settle();
    assert!(guest.poll(0).is_none());
    let changed = log_page(LogId::CHANGED_NAMESPACES, 4096);
    assert_eq!(ids(reading(&mut guest, changed)), [5, 7, 9]);
    assert_eq!(ids(reading(&mut guest, changed)), [] as [u32; 0]);
    guest.settle();
    assert!(guest.poll(0).is_none(), "the log told everything");
    guest.controller.namespace_changed(64);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0().into_bits());
    assert_eq!(ids(reading(&mut guest, changed)), [64]);
}

/// The process may end when the guest has the completion of its read: then nobody would lift the mask.
#[test]
fn a_read_log_page_is_reported_again_before_its_completion() {
    let mut guest = FakeGuest::boot();
    expect(&mut guest, set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, NOTICES), Status::SUCCESS);
    guest.controller.namespace_changed(5);
    guest.admin(event_request());
    assert_ne!(guest.controller.state.events.masked.get(), 0);
    let mut read = log_page(LogId::CHANGED_NAMESPACES, 4096);
    read.dptr.prp1 = guest.alloc_pages(1);
    assert!(guest.controller.get_log_page(&read).is_ok());
    assert_eq!(guest.controller.state.events.masked.get(), 0);
    assert_ne!(guest.controller.state.logs.changed_namespaces[0].get(), 0, "its contents go when the guest has them");
    guest.controller.after_log_page();
    assert_eq!(guest.controller.state.logs.changed_namespaces[0].get(), 0);
}

#[test]
fn events_wait_for_a_request() {
    let mut guest = FakeGuest::boot();
    expect(&mut guest, set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, NOTICES), Status::SUCCESS);
    guest.controller.namespace_changed(1);
    guest.controller.namespace_changed(2);
    guest.settle();
    let cqe = guest.admin(event_request());
    assert_eq!(cqe.dw0, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0().into_bits());
    // One that the log has already told is not reported.
    guest.controller.namespace_changed(3);
    let _: NamespaceList = reading(&mut guest, log_page(LogId::CHANGED_NAMESPACES, 4096));
    guest.controller.namespace_changed(4);
    let _: NamespaceList = reading(&mut guest, log_page(LogId::CHANGED_NAMESPACES, 4096));
    guest.submit(0, event_request());
    guest.settle();
    assert!(guest.poll(0).is_none());
    // A reset forgets requests and events.
    guest.disable();
    guest.enable();
    assert_eq!(guest.controller.in_flight, 0);
}

#[test]
fn temperatures_beyond_a_threshold_are_reported() {
    let mut guest = FakeGuest::boot();
    guest.submit(0, event_request());
    // Over 290 K, which 298 K is; nobody asked for events yet.
    expect(&mut guest, set_feature(FeatureId::TEMPERATURE_THRESHOLD, 290), Status::SUCCESS);
    guest.settle();
    assert!(guest.poll(0).is_none());
    expect(&mut guest, set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, TEMPERATURE), Status::SUCCESS);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::TEMPERATURE_THRESHOLD.dw0().into_bits());
    let smart: millrace_nvme_spec::log::SmartLog = reading(&mut guest, log_page(LogId::SMART, 512));
    assert!(smart.critical_warning.temperature());
    // Still too warm: no second event. Cool, then under the lower threshold: one.
    guest.submit(0, event_request());
    expect(&mut guest, set_feature(FeatureId::TEMPERATURE_THRESHOLD, 280), Status::SUCCESS);
    expect(&mut guest, set_feature(FeatureId::TEMPERATURE_THRESHOLD, 340), Status::SUCCESS);
    guest.settle();
    assert!(guest.poll(0).is_none());
    let smart: millrace_nvme_spec::log::SmartLog = reading(&mut guest, log_page(LogId::SMART, 512));
    assert!(!smart.critical_warning.temperature());
    expect(&mut guest, set_feature(FeatureId::TEMPERATURE_THRESHOLD, 0x12c | 1 << 20), Status::SUCCESS);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::TEMPERATURE_THRESHOLD.dw0().into_bits());
}

#[test]
fn invalid_doorbells_are_reported_and_logged() {
    let mut guest = FakeGuest::boot();
    guest.make_queues(1, 16);
    guest.submit(0, event_request());
    guest.settle();
    guest.doorbell(2, 16);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::INVALID_DOORBELL_VALUE.dw0().into_bits());
    let errors: [ErrorEntry; 64] = reading(&mut guest, log_page(LogId::ERROR, 4096));
    assert_eq!((errors[0].ecnt, errors[0].sqid, errors[0].cid.0), (1, QueueId(1), 0xffff));
    assert_eq!(errors[1].ecnt, 0, "reported once, however often it is looked at");
    // A doorbell of a queue that does not exist, which only a message can tell.
    guest.submit(0, event_request());
    guest.settle();
    guest.controller.doorbell_write(7 * 2, 1);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::INVALID_DOORBELL_REGISTER.dw0().into_bits());
}

#[test]
fn a_disk_that_fails_is_reported_until_the_log_is_read() {
    let mut guest = FakeGuest::boot();
    let fault = FaultVolume::new(MemoryVolume::create("inner", 1 << 20, BlockSize::B512).unwrap(), 1);
    fault.add(Rule::new(Kind::Flush, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    guest.add_volume(1, fault);
    guest.make_queues(1, 16);
    guest.submit(0, event_request());
    let failed = guest.command(1, sqe(NvmOpcode::FLUSH.0, 1));
    assert!(failed.status().more() && failed.status().code() == Status::WRITE_FAULT);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::TRANSIENT_INTERNAL_ERROR.dw0().into_bits());
    guest.submit(0, event_request());
    guest.command(1, sqe(NvmOpcode::FLUSH.0, 1));
    assert_eq!(guest.controller.event_requests().count(), 1, "told once");
    let errors: [ErrorEntry; 64] = reading(&mut guest, log_page(LogId::ERROR, 4096));
    assert_eq!((errors[0].ecnt, errors[0].status.status()), (2, failed.status()));
    guest.command(1, sqe(NvmOpcode::FLUSH.0, 1));
    assert_eq!(guest.wait(0).dw0, AsyncEvent::TRANSIENT_INTERNAL_ERROR.dw0().into_bits());
}

#[test]
fn reservation_notices_queue_up_and_can_be_masked() {
    let mut guest = FakeGuest::boot();
    let namespace = guest.add_memory_volume(2, 1 << 20, BlockSize::B512);
    let other = guest.add_memory_volume(3, 1 << 20, BlockSize::B512);
    let identifier = set_feature(FeatureId::HOST_IDENTIFIER, 1);
    assert_eq!(code(&guest.command_writing(0, identifier, &[7; 16])), Status::SUCCESS);
    let mut mask = set_feature(FeatureId::RESERVATION_NOTIFICATION_MASK, 1 << 2);
    mask.nsid = NamespaceId(2);
    expect(&mut guest, mask, Status::SUCCESS);
    guest.submit(0, event_request());
    let (preempted, released, taken) =
        (Notice::REGISTRATION_PREEMPTED.0, Notice::RESERVATION_RELEASED.0, Notice::RESERVATION_PREEMPTED.0);
    // Masked, and for another host.
    guest.controller.reservation_notice(&namespace, &[([7; 16], released), ([8; 16], preempted)]);
    guest.settle();
    assert!(guest.poll(0).is_none());
    guest.controller.reservation_notice(&namespace, &[([8; 16], taken), ([7; 16], preempted)]);
    guest.controller.reservation_notice(&other, &[([7; 16], taken)]);
    assert_eq!(guest.wait(0).dw0, AsyncEvent::RESERVATION_LOG_PAGE_AVAILABLE.dw0().into_bits());
    let mut told = Vec::new();
    for _ in 0..3 {
        let page: ReservationNotification = reading(&mut guest, log_page(LogId::RESERVATION, 64));
        told.push((page.lpc, page.kind, page.available, page.nsid.0));
    }
    assert_eq!(
        told,
        [(1, Notice::REGISTRATION_PREEMPTED, 1, 2), (2, Notice::RESERVATION_PREEMPTED, 0, 3), (0, Notice::EMPTY, 0, 0)]
    );
    // More than there is room for: the oldest go, and the count tells.
    for _ in 0..100 {
        guest.controller.reservation_notice(&namespace, &[([7; 16], preempted)]);
    }
    let page: ReservationNotification = reading(&mut guest, log_page(LogId::RESERVATION, 64));
    assert_eq!((page.lpc, page.available), (2 + 100 - 63, 63));
}
