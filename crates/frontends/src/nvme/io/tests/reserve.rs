//! Reservations by command, between two guests that share a namespace.

use millrace_nvme_spec::{
    command::DataPointer,
    log::ReservationNotificationType as Notice,
    registers::offset,
    reservation::{
        AcquireAction, AcquireCdw10, AcquireData, ChangePersistence, RegisterAction, RegisterCdw10, RegisterData,
        RegisteredController, ReleaseAction, ReleaseCdw10, ReleaseData, ReportCdw11, ReservationStatus,
        ReservationType as Type,
    },
};
use zerocopy::FromBytes;

use super::super::super::{
    Config,
    fixture::{HeldVolume, HostCall, identity, test_config},
    namespace::Allocated,
};
use super::*;

/// Two guests, hosts 1 and 2, with one namespace.
fn pair() -> [FakeGuest; 2] {
    pair_on(shared())
}

fn shared() -> Arc<dyn millrace_block::Volume> {
    MemoryVolume::create("shared", SIZE, BlockSize::B512).expect("a volume")
}

fn pair_on(volume: Arc<dyn millrace_block::Volume>) -> [FakeGuest; 2] {
    let namespace = Namespace::new(volume, identity(1), true);
    [1, 2].map(|number| {
        let mut guest = FakeGuest::boot();
        guest.add_namespace(1, &namespace);
        guest.make_queues(1, 64);
        set_host(&mut guest, number);
        guest
    })
}

/// The same, registered with their numbers, and the first has reserved what is written.
fn reserved_on(volume: Arc<dyn millrace_block::Volume>) -> [FakeGuest; 2] {
    let [mut one, mut two] = pair_on(volume);
    for (guest, number) in [(&mut one, 1), (&mut two, 2)] {
        succeeds(register(guest, RegisterAction::REGISTER, false, 0, number));
    }
    succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE, 1, 0));
    [one, two]
}

/// Host 2 preempts host 1 there.
fn begin_preempt(two: &mut FakeGuest) -> u16 {
    let mut sqe = sqe(NvmOpcode::RESERVATION_ACQUIRE.0, 1);
    let fields = AcquireCdw10::new().with_racqa(AcquireAction::PREEMPT_AND_ABORT).with_rtype(Type::WRITE_EXCLUSIVE);
    sqe.cdw10 = fields.into_bits();
    let buffer = two.alloc_pages(1);
    two.write(buffer, AcquireData { crkey: 2, prkey: 1 }.as_bytes());
    sqe.dptr = two.prps(buffer, 16);
    two.submit(1, sqe)
}

fn register(guest: &mut FakeGuest, action: RegisterAction, ignore: bool, crkey: u64, nrkey: u64) -> Cqe {
    let mut sqe = sqe(NvmOpcode::RESERVATION_REGISTER.0, 1);
    sqe.cdw10 = RegisterCdw10::new().with_rrega(action).with_iekey(ignore).into_bits();
    guest.command_writing(1, sqe, RegisterData { crkey, nrkey }.as_bytes())
}

fn acquire(guest: &mut FakeGuest, action: AcquireAction, kind: Type, crkey: u64, prkey: u64) -> Cqe {
    let mut sqe = sqe(NvmOpcode::RESERVATION_ACQUIRE.0, 1);
    sqe.cdw10 = AcquireCdw10::new().with_racqa(action).with_rtype(kind).into_bits();
    guest.command_writing(1, sqe, AcquireData { crkey, prkey }.as_bytes())
}

fn release(guest: &mut FakeGuest, action: ReleaseAction, kind: Type, crkey: u64) -> Cqe {
    let mut sqe = sqe(NvmOpcode::RESERVATION_RELEASE.0, 1);
    sqe.cdw10 = ReleaseCdw10::new().with_rrela(action).with_rtype(kind).into_bits();
    guest.command_writing(1, sqe, ReleaseData { crkey }.as_bytes())
}

fn try_read(guest: &mut FakeGuest) -> Cqe {
    guest.command_reading(1, command(NvmOpcode::READ, 0, 1), 512).0
}

#[test]
fn a_reservation_shuts_the_other_guest_out() {
    let [mut one, mut two] = pair();
    succeeds(write(&mut two, 0, &[2; 512]));
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
    succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE, 11, 0));
    let conflict = Status::RESERVATION_CONFLICT;
    fails(write(&mut two, 0, &[3; 512]), conflict);
    for sqe in [
        command(NvmOpcode::WRITE_ZEROES, 0, 1),
        command(NvmOpcode::WRITE_ZEROES, 0, 8192),
        command(NvmOpcode::WRITE_UNCORRECTABLE, 0, 1),
        command(NvmOpcode::COPY, 0, 1),
        command(NvmOpcode::DATASET_MANAGEMENT, 0, 1),
        sqe(NvmOpcode::FLUSH.0, 1),
        sqe(NvmOpcode::FLUSH.0, u32::MAX),
    ] {
        fails(two.command(1, sqe), conflict);
    }
    assert_eq!(read(&mut two, 0, 512), [2; 512]);
    succeeds(write(&mut one, 0, &[1; 512]));
    succeeds(release(&mut one, ReleaseAction::RELEASE, Type::WRITE_EXCLUSIVE, 11));
    succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, 11, 0));
    fails(try_read(&mut two), conflict);
    fails(two.command(1, command(NvmOpcode::VERIFY, 0, 1)), conflict);
    succeeds(register(&mut two, RegisterAction::REGISTER, false, 0, 22));
    succeeds(try_read(&mut two));
    succeeds(write(&mut two, 0, &[3; 512]));
    fails(acquire(&mut two, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE, 22, 0), conflict);
    succeeds(release(&mut one, ReleaseAction::RELEASE, Type::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, 11));
    let mut second = [0; 16];
    second[0] = 2;
    let calls = one.host.take_calls();
    let told =
        HostCall::ReservationNotice { uuid: identity(1).uuid, notify: vec![(second, Notice::RESERVATION_RELEASED.0)] };
    assert_eq!(calls, [told]);
    assert_eq!(in_flight(&one), 0);
    // That message has not arrived: what comes next waits, and goes as one.
    for _ in 0..3 {
        succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, 11, 0));
        succeeds(release(&mut one, ReleaseAction::RELEASE, Type::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, 11));
    }
    assert_eq!(one.host.take_calls(), []);
    let namespace = Arc::clone(&one.controller.namespaces.get(1).expect("attached").namespace);
    two.controller.reservation_notice(&namespace, &[]);
    one.controller.reservation_notice(&namespace, &[]);
    let told =
        HostCall::ReservationNotice { uuid: identity(1).uuid, notify: vec![(second, Notice::RESERVATION_RELEASED.0)] };
    assert_eq!([one.host.take_calls(), two.host.take_calls()].concat(), [told]);
}

#[test]
fn who_preempts_shuts_out_what_is_under_way() {
    preempts_while_under_way(Kind::Write, |one| {
        let buffer = one.alloc_pages(1);
        one.write(buffer, &[1; 512]);
        let mut slow = command(NvmOpcode::WRITE, 0, 1);
        slow.dptr = one.prps(buffer, 512);
        vec![one.submit(1, slow)]
    });
}

#[test]
fn who_preempts_shuts_out_a_pair_that_still_compares() {
    preempts_while_under_way(Kind::Compare, |one| {
        let pair = super::pairs::push_pair(one, 0, &[0; 512], &[1; 512]);
        one.ring(1);
        pair.to_vec()
    });
}

/// Host 1 has a command under way that is slow in its request of this kind, and host 2 preempts.
fn preempts_while_under_way(kind: Kind, begin: impl FnOnce(&mut FakeGuest) -> Vec<u16>) {
    let fault = FaultVolume::new(shared(), 1);
    let [mut one, mut two] = reserved_on(Arc::<FaultVolume>::clone(&fault));
    fault.add(Rule::new(kind, When::Nth(1), Effect::Delay(Duration::from_millis(10))));
    let slow = begin(&mut one);
    one.step_until("it to be under way", |_| fault.requests(kind) == 1);
    // Host 2 preempts; it is told so only when host 1's write has ended.
    let preempt = begin_preempt(&mut two);
    for _ in 0..100 {
        two.step();
        assert!(two.poll(1).is_none(), "the write of host 1 is still under way");
    }
    for slow in slow {
        succeeds(one.wait_for(1, slow));
    }
    succeeds(two.wait_for(1, preempt));
    succeeds(write(&mut two, 0, &[2; 512]));
    fails(write(&mut one, 0, &[1; 512]), Status::RESERVATION_CONFLICT);
    assert_eq!(read(&mut two, 0, 512), [2; 512]);
}

#[test]
fn wrong_fields() {
    let [mut one, _] = pair();
    let refused = Status::INVALID_FIELD;
    fails(register(&mut one, RegisterAction(5), false, 0, 11), refused);
    let mut persist = sqe(NvmOpcode::RESERVATION_REGISTER.0, 1);
    // To set it is asked for by Linux each time: it is let, and stays as it is.
    for (cptpl, ok) in [(1, false), (3, true), (2, true)] {
        persist.cdw10 = RegisterCdw10::new().with_cptpl(ChangePersistence(cptpl)).into_bits();
        let cqe = one.command_writing(1, persist, RegisterData { crkey: 0, nrkey: 11 }.as_bytes());
        assert_eq!(cqe.status(), if ok { Status::SUCCESS } else { refused.do_not_retry().with_more(true) });
    }
    let mut ignoring = sqe(NvmOpcode::RESERVATION_ACQUIRE.0, 1);
    ignoring.cdw10 = AcquireCdw10::new().with_iekey(true).with_rtype(Type::WRITE_EXCLUSIVE).into_bits();
    fails(one.command_writing(1, ignoring, AcquireData { crkey: 11, prkey: 0 }.as_bytes()), refused);
    ignoring.opcode = NvmOpcode::RESERVATION_RELEASE.0;
    fails(one.command_writing(1, ignoring, ReleaseData { crkey: 11 }.as_bytes()), refused);
    fails(acquire(&mut one, AcquireAction::ACQUIRE, Type::NONE, 11, 0), refused);
    fails(register(&mut one, RegisterAction::REGISTER, false, 0, 12), Status::RESERVATION_CONFLICT);
    fails(one.command(1, sqe(NvmOpcode::RESERVATION_REGISTER.0, 1)), Status::DATA_TRANSFER_ERROR);
    fails(one.command(1, sqe(NvmOpcode::RESERVATION_REGISTER.0, 7)), refused);
    succeeds(register(&mut one, RegisterAction::REPLACE, true, 99, 12));
    succeeds(register(&mut one, RegisterAction::UNREGISTER, false, 12, 0));
}

#[test]
fn reports_are_cut_to_the_length_asked_for_and_no_longer_than_they_are() {
    let [mut one, mut two] = pair();
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
    succeeds(register(&mut two, RegisterAction::REGISTER, false, 0, 22));
    succeeds(acquire(&mut two, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, 22, 0));
    let mut sqe = sqe(NvmOpcode::RESERVATION_REPORT.0, 1);
    let buffer = one.alloc_pages(2);
    one.write(buffer, &[0xaa; 8192]);
    // By pages, and by a segment as long as what is asked for, as Linux does it.
    for (psdt, dptr) in [
        (Psdt::PRP, DataPointer::prps(buffer, buffer + 4096)),
        (Psdt::SGL_MPTR_CONTIGUOUS, SglDescriptor::data_block(buffer, 8192).into()),
    ] {
        one.write(buffer, &[0xaa; 8192]);
        (sqe.cdw10, sqe.dptr, sqe.flags) = (8192 / 4 - 1, dptr, CommandFlags::new().with_psdt(psdt));
        succeeds(one.command(1, sqe));
    }
    sqe.flags = CommandFlags::new();
    let report = one.read(buffer, 8192);
    let (status, rest) = ReservationStatus::read_from_prefix(&report).expect("a header");
    assert_eq!((status.generation, status.rtype, status.registrants.get()), (2, Type::EXCLUSIVE_ACCESS, 2));
    assert_eq!(status.ptpls, 0);
    let (entries, rest) = <[RegisteredController]>::ref_from_prefix_with_elems(rest, 2).expect("entries");
    let seen: Vec<_> = entries.iter().map(|e| (e.rcsts.holds(), e.hostid, e.rkey)).collect();
    assert_eq!(seen, [(false, 1, 11), (true, 2, 22)]);
    assert!(rest.iter().all(|&byte| byte == 0xaa));
    sqe.cdw10 = 0;
    let (cqe, header) = one.command_reading(1, sqe, 8);
    succeeds(cqe);
    assert_eq!((&header[..4], &header[4..]), (&report[..4], &[0; 4][..]), "one dword");
    sqe.cdw11 = ReportCdw11::new().with_eds(true).into_bits();
    // All of the status, and not only its code: Linux asks once more only then.
    assert_eq!(one.command(1, sqe).status().into_bits(), 0x18);
    sqe.cdw11 = 0;
    sqe.cdw10 = u32::MAX;
    fails(one.command(1, sqe), Status::INVALID_FIELD);
}

#[test]
fn a_namespace_that_is_one_guests_own_has_no_reservations() {
    let mut guest = guest(BlockSize::B512);
    let refused = Status::INVALID_FIELD;
    fails(register(&mut guest, RegisterAction::REGISTER, false, 0, 11), refused);
    fails(acquire(&mut guest, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, 11, 0), refused);
    fails(release(&mut guest, ReleaseAction::CLEAR, Type::EXCLUSIVE_ACCESS, 11), refused);
    fails(guest.command_reading(1, sqe(NvmOpcode::RESERVATION_REPORT.0, 1), 4).0, refused);
    guest.controller.namespaces.get(1).expect("attached").namespace.share();
    succeeds(register(&mut guest, RegisterAction::REGISTER, false, 0, 11));
    assert_eq!(report(&mut guest), (1, Type::NONE));
}

#[test]
fn who_has_no_key_registers_by_one_that_is_ignored() {
    let [mut one, mut two] = pair();
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
    succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 11, 0));
    fails(write(&mut two, 0, &[2; 512]), Status::RESERVATION_CONFLICT);
    fails(register(&mut two, RegisterAction::REPLACE, false, 22, 23), Status::RESERVATION_CONFLICT);
    succeeds(register(&mut two, RegisterAction::REPLACE, true, 22, 23));
    succeeds(write(&mut two, 0, &[2; 512]));
    assert_eq!(report(&mut one), (2, Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY));
    for _ in 0..2 {
        succeeds(register(&mut two, RegisterAction::UNREGISTER, true, 99, 0));
        assert_eq!(report(&mut one), (1, Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY));
    }
}

/// Base 5.1.25.1.28; what was registered under an identifier persists (Base 8.1.22).
#[test]
fn a_host_without_an_identifier_is_another_one_after_a_reset() {
    let [mut one, mut two] = pair();
    let conflict = Status::RESERVATION_CONFLICT;
    for (host, stays) in [(0, false), (1, true)] {
        set_host(&mut one, host);
        succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
        succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, 11, 0));
        fails(write(&mut two, 0, &[2; 512]), conflict);
        one.disable();
        let kept = if stays { (1, Type::EXCLUSIVE_ACCESS) } else { (0, Type::NONE) };
        assert_eq!(report(&mut two), kept, "host {host}");
        one.enable();
        one.make_queues(1, 64);
        for guest in [&mut one, &mut two] {
            if stays { fails(write(guest, 0, &[3; 512]), conflict) } else { succeeds(write(guest, 0, &[3; 512])) }
        }
    }
    set_host(&mut one, 1);
    succeeds(write(&mut one, 0, &[3; 512]));
}

/// Else whom it shut out could write before them.
#[test]
fn a_host_without_an_identifier_holds_until_its_writes_have_ended() {
    let volume = MemoryVolume::create("shared", SIZE, BlockSize::B512).expect("a volume");
    let held = HeldVolume::new(volume);
    let namespace = Namespace::new(Arc::clone(&held) as Arc<dyn millrace_block::Volume>, identity(1), true);
    let [mut one, mut two] = [1, 2].map(|_| {
        let mut guest = FakeGuest::boot();
        guest.add_namespace(1, &namespace);
        guest.make_queues(1, 64);
        guest
    });
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
    succeeds(acquire(&mut one, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, 11, 0));
    let buffer = one.alloc_pages(1);
    one.write(buffer, &[1; 512]);
    let mut slow = command(NvmOpcode::WRITE, 0, 1);
    slow.dptr = one.prps(buffer, 512);
    held.hold();
    one.submit(1, slow);
    one.step_until("it to be under way", |_| held.waiting() == 1);
    let cc = one.read32(offset::CC);
    one.write32(offset::CC, cc & !1);
    for _ in 0..10 {
        one.step();
    }
    fails(write(&mut two, 0, &[2; 512]), Status::RESERVATION_CONFLICT);
    held.release();
    one.step_until("not ready", |guest| guest.read32(offset::CSTS) & 1 == 0);
    succeeds(write(&mut two, 0, &[2; 512]));
    assert_eq!(read(&mut two, 0, 512), [2; 512]);
}

/// They may take for ever, and who fences another host must not lose its disk by that.
#[test]
fn who_waits_for_another_guests_writes_can_be_reset() {
    let held = HeldVolume::new(shared());
    let [mut one, mut two] = reserved_on(Arc::<HeldVolume>::clone(&held));
    let write_of = |guest: &mut FakeGuest, byte| {
        let buffer = guest.alloc_pages(1);
        guest.write(buffer, &[byte; 512]);
        let mut write = command(NvmOpcode::WRITE, 0, 1);
        write.dptr = guest.prps(buffer, 512);
        guest.submit(1, write)
    };
    held.hold();
    let slow = write_of(&mut one, 1);
    one.step_until("it to be under way", |_| held.waiting() == 1);
    // Host 2 preempts, and writes: both wait for host 1's write.
    let preempt = begin_preempt(&mut two);
    for _ in 0..100 {
        two.step();
    }
    write_of(&mut two, 3);
    for _ in 0..100 {
        two.step();
    }
    assert_eq!((two.controller.in_flight, held.waiting()), (2, 1));
    // Who is only in a hurry gets no early answer: the change is made.
    two.controller.hurry(&two.shard.context());
    let early = two.wait(1);
    assert_ne!(early.cid.0, preempt);
    assert_eq!(early.status().code(), Status::NAMESPACE_NOT_READY);
    two.disable();
    assert_eq!((in_flight(&two), held.waiting()), (0, 1));
    // It learns that it holds the reservation when host 1's write has ended, and not before, also where it asks a second time.
    for called_off in [true, false] {
        two.enable();
        two.make_queues(1, 64);
        set_host(&mut two, 2);
        let (asked, buffer) = begin_report(&mut two);
        for _ in 0..100 {
            two.step();
            assert!(two.poll(1).is_none(), "the write of host 1 is still under way");
        }
        if called_off {
            two.controller.hurry(&two.shard.context());
            assert_eq!(two.wait(1).status().code(), Status::NAMESPACE_NOT_READY);
            two.disable();
            continue;
        }
        held.release();
        succeeds(one.wait_for(1, slow));
        succeeds(two.wait_for(1, asked));
        assert_eq!(reported(&two.read(buffer, 4096)), (1, Type::WRITE_EXCLUSIVE));
    }
    // The next one waits for nothing.
    held.hold();
    let slow = write_of(&mut two, 2);
    two.step_until("it to be under way", |_| held.waiting() == 1);
    assert_eq!(report(&mut one), (1, Type::WRITE_EXCLUSIVE));
    held.release();
    succeeds(two.wait_for(1, slow));
    fails(write(&mut one, 0, &[1; 512]), Status::RESERVATION_CONFLICT);
}

/// The controller that it registered through is there no more: it makes room for nobody while it goes on by another one.
#[test]
fn who_acquires_or_releases_by_another_controller_is_there_again() {
    let [mut one, _] = pair();
    let cntlid = one.controller.config.cntlid;
    let namespace = Arc::clone(&one.controller.namespaces.get(1).expect("attached").namespace);
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 11));
    for acquires in [true, false] {
        namespace.forget_controller(cntlid, &*one.host);
        assert_eq!(registered_through(&namespace), u16::MAX);
        let cqe = if acquires {
            acquire(&mut one, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE, 11, 0)
        } else {
            release(&mut one, ReleaseAction::RELEASE, Type::WRITE_EXCLUSIVE, 11)
        };
        succeeds(cqe);
        assert_eq!(registered_through(&namespace), cntlid, "acquires: {acquires}");
    }
}

/// The controller of the first registrant.
fn registered_through(namespace: &Namespace) -> u16 {
    let report = namespace.reservations().now().report(false);
    let (_, entries) = ReservationStatus::read_from_prefix(&report).expect("a header");
    RegisteredController::read_from_prefix(entries).expect("an entry").0.cntlid.0
}

/// A program's controller.
fn session(cntlid: u16, namespace: &Arc<Namespace>, read_only: bool) -> FakeGuest {
    let mut guest = FakeGuest::new(Config { cntlid, session: true, ..test_config() });
    guest.enable();
    let allocated = Allocated { namespace: Arc::clone(namespace), read_only, by_guest: false };
    guest.controller.namespaces.allocate(1, allocated).expect("a free identifier");
    guest.controller.namespaces.attach(1).expect("an attachment");
    guest.make_queues(1, 64);
    guest
}

fn report(guest: &mut FakeGuest) -> (u16, Type) {
    let (asked, buffer) = begin_report(guest);
    succeeds(guest.wait_for(1, asked));
    reported(&guest.read(buffer, 4096))
}

/// The command's identifier, and where its answer will be.
fn begin_report(guest: &mut FakeGuest) -> (u16, u64) {
    let buffer = guest.alloc_pages(1);
    let mut sqe = sqe(NvmOpcode::RESERVATION_REPORT.0, 1);
    (sqe.cdw10, sqe.dptr) = (4096 / 4 - 1, guest.prps(buffer, 4096));
    (guest.submit(1, sqe), buffer)
}

/// Registrants, and what is held.
fn reported(report: &[u8]) -> (u16, Type) {
    let (status, _) = ReservationStatus::read_from_prefix(report).expect("a header");
    (status.registrants.get(), status.rtype)
}

#[test]
fn a_session_that_only_reads_changes_no_reservation_and_a_guest_that_only_reads_may() {
    let volume = MemoryVolume::create("shared", SIZE, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, identity(1), true);
    let mut reader = session(2, &namespace, true);
    let refused = Status::NAMESPACE_WRITE_PROTECTED;
    fails(register(&mut reader, RegisterAction::REGISTER, false, 0, 11), refused);
    fails(acquire(&mut reader, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, 11, 0), refused);
    fails(release(&mut reader, ReleaseAction::CLEAR, Type::EXCLUSIVE_ACCESS, 11), refused);
    assert_eq!(report(&mut reader), (0, Type::NONE));
    let mut guest = FakeGuest::boot();
    let allocated = Allocated { namespace: Arc::clone(&namespace), read_only: true, by_guest: false };
    guest.controller.namespaces.allocate(1, allocated).expect("a free identifier");
    guest.controller.namespaces.attach(1).expect("an attachment");
    guest.make_queues(1, 64);
    succeeds(register(&mut guest, RegisterAction::REGISTER, false, 0, 11));
    assert_eq!(report(&mut reader), (1, Type::NONE));
}

#[test]
fn what_a_session_registered_ends_with_it_and_nothing_else_does() {
    let [mut one, mut two] = pair();
    succeeds(register(&mut one, RegisterAction::REGISTER, false, 0, 1));
    let namespace = Arc::clone(&one.controller.namespaces.get(1).expect("attached").namespace);
    let (mut program, mut other) = (session(1, &namespace, false), session(2, &namespace, false));
    // Its own number, then two identifiers of which one is host 1's.
    for (host, key) in [(None, 11), (Some(9), 12), (Some(1), 1)] {
        if let Some(host) = host {
            set_host(&mut program, host);
        }
        succeeds(register(&mut program, RegisterAction::REGISTER, false, 0, key));
    }
    succeeds(register(&mut other, RegisterAction::REGISTER, false, 0, 22));
    set_host(&mut program, 9);
    succeeds(acquire(&mut program, AcquireAction::ACQUIRE, Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY, 12, 0));
    assert_eq!(report(&mut two), (4, Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY));
    fails(write(&mut two, 0, &[1; 512]), Status::RESERVATION_CONFLICT);
    program.host.take_calls();
    program.controller.end_all_registrations();
    assert_eq!(report(&mut two), (2, Type::NONE), "host 1 and the other session are left");
    succeeds(write(&mut two, 0, &[1; 512]));
    let mut first = [0; 16];
    first[0] = 1;
    let told = HostCall::ReservationNotice { uuid: identity(1).uuid, notify: vec![(first, Notice::RESERVATION_RELEASED.0)] };
    assert_eq!(program.host.take_calls(), [told]);
    // A guest's stay.
    one.controller.end_all_registrations();
    assert_eq!(report(&mut two), (2, Type::NONE));
}
