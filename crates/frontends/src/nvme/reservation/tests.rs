//! The state machine: the specification's table of rights, its scenarios, and what must hold after anything.

use millrace_nvme_spec::reservation::ReservationType as Type;
use proptest::prelude::*;
use zerocopy::FromBytes;

use super::*;

const TYPES: [Type; 6] = [
    Type::WRITE_EXCLUSIVE,
    Type::EXCLUSIVE_ACCESS,
    Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY,
    Type::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY,
    Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS,
    Type::EXCLUSIVE_ACCESS_ALL_REGISTRANTS,
];

fn id(number: u8) -> [u8; 16] {
    let mut id = [0; 16];
    id[0] = number;
    id
}

fn host(number: u8) -> HostKey {
    HostKey::new(id(number), false, 99)
}

fn register(r: &mut Reservations, number: u8, key: u64) -> Result<Notices, Status> {
    r.register(host(number), number.into(), RegisterAction::REGISTER, false, &RegisterData { crkey: 0, nrkey: key })
}

fn unregister(r: &mut Reservations, number: u8, key: u64) -> Result<Notices, Status> {
    r.register(host(number), 0, RegisterAction::UNREGISTER, false, &RegisterData { crkey: key, nrkey: 0 })
}

fn acquire(r: &mut Reservations, number: u8, kind: Type, key: u64) -> Result<Notices, Status> {
    r.acquire(host(number), AcquireAction::ACQUIRE, kind, &AcquireData { crkey: key, prkey: 0 })
}

fn preempt(r: &mut Reservations, number: u8, kind: Type, key: u64, victim: u64) -> Result<Notices, Status> {
    r.acquire(host(number), AcquireAction::PREEMPT, kind, &AcquireData { crkey: key, prkey: victim })
}

/// Hosts 1, 2 and 3 registered with keys 10, 20 and 30; host 1 holds a reservation.
fn held(kind: Type) -> Reservations {
    let mut r = Reservations::default();
    for number in 1..=3 {
        assert_eq!(register(&mut r, number, u64::from(number) * 10), Ok(vec![]));
    }
    assert_eq!(acquire(&mut r, 1, kind, 10), Ok(vec![]));
    r
}

#[test]
fn rights_are_the_specifications_table() {
    // Holder, registrant, stranger: for each type.
    let (all, read, none) = (Rights::ALL, Rights::READ, Rights::NONE);
    let table =
        [[all, read, read], [all, none, none], [all, all, read], [all, all, none], [all, all, read], [all, all, none]];
    for (kind, rights) in TYPES.into_iter().zip(table) {
        let r = held(kind);
        assert_eq!([1, 2, 9].map(|number| r.rights(&host(number))), rights, "{kind}");
    }
    assert_eq!(Reservations::default().rights(&host(1)), Rights::ALL);
}

#[test]
fn registering_twice_replacing_and_unregistering() {
    let mut r = Reservations::default();
    assert_eq!(register(&mut r, 1, 10), Ok(vec![]));
    assert_eq!(register(&mut r, 1, 10), Ok(vec![]), "the same key again");
    assert_eq!(register(&mut r, 1, 11), Err(Status::RESERVATION_CONFLICT));
    let replace = |r: &mut Reservations, number, ignore, crkey| {
        r.register(host(number), 0, RegisterAction::REPLACE, ignore, &RegisterData { crkey, nrkey: 77 })
    };
    assert_eq!(replace(&mut r, 1, false, 9), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(replace(&mut r, 2, false, 10), Err(Status::RESERVATION_CONFLICT), "not a registrant");
    assert_eq!(replace(&mut r, 1, true, 9), Ok(vec![]));
    assert_eq!(unregister(&mut r, 1, 10), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(unregister(&mut r, 1, 77), Ok(vec![]));
    assert_eq!(unregister(&mut r, 1, 77), Err(Status::RESERVATION_CONFLICT));
    let bad = r.register(host(1), 0, RegisterAction(3), false, &RegisterData::default());
    assert_eq!(bad, Err(Status::INVALID_FIELD));
}

/// Base 7.6, IEKEY: nor does the absence of a key cause an error.
#[test]
fn who_ignores_the_key_needs_none() {
    let mut r = held(Type::WRITE_EXCLUSIVE);
    let generation = r.generation;
    let ignoring =
        |r: &mut Reservations, host, action| r.register(host, 9, action, true, &RegisterData { crkey: 5, nrkey: 77 });
    assert_eq!(ignoring(&mut r, host(9), RegisterAction::UNREGISTER), Ok(vec![]), "it was none");
    assert_eq!((r.find(&host(9)).is_none(), r.registrants.len(), r.generation), (true, 3, generation + 1));
    // It was preempted, say, and comes back.
    assert_eq!(ignoring(&mut r, host(9), RegisterAction::REPLACE), Ok(vec![]));
    assert_eq!(r.find(&host(9)).map(|r| (r.key, r.cntlid)), Some((77, 9)));
    assert_eq!((r.generation, r.rights(&host(9))), (generation + 2, Rights::READ));
    let long = HostKey::new([5; 16], true, 1);
    assert_eq!(ignoring(&mut r, long, RegisterAction::REPLACE), Err(Status::HOST_ID_INCONSISTENT_FORMAT));
}

#[test]
fn hosts_with_identifiers_of_both_lengths_do_not_mix() {
    let mut r = held(Type::WRITE_EXCLUSIVE);
    let long = HostKey::new([5; 16], true, 1);
    let result = r.register(long, 1, RegisterAction::REGISTER, false, &RegisterData { crkey: 0, nrkey: 1 });
    assert_eq!(result, Err(Status::HOST_ID_INCONSISTENT_FORMAT));
}

#[test]
fn hosts_without_identifiers_are_told_apart_by_their_controllers() {
    let (one, other) = (HostKey::new([0; 16], false, 1), HostKey::new([0; 16], false, 2));
    let mut r = Reservations::default();
    let data = RegisterData { crkey: 0, nrkey: 5 };
    r.register(one, 1, RegisterAction::REGISTER, false, &data).expect("registered");
    r.acquire(one, AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, &AcquireData { crkey: 5, prkey: 0 }).expect("acquired");
    assert_eq!((r.rights(&one), r.rights(&other)), (Rights::ALL, Rights::NONE));
}

#[test]
fn acquiring_needs_a_registration_and_nobody_elses_reservation() {
    let mut r = held(Type::WRITE_EXCLUSIVE);
    assert_eq!(acquire(&mut r, 1, Type::WRITE_EXCLUSIVE, 10), Ok(vec![]), "again, the same");
    assert_eq!(acquire(&mut r, 1, Type::EXCLUSIVE_ACCESS, 10), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(acquire(&mut r, 2, Type::WRITE_EXCLUSIVE, 20), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(acquire(&mut r, 9, Type::WRITE_EXCLUSIVE, 0), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(acquire(&mut r, 1, Type::NONE, 10), Err(Status::INVALID_FIELD));
    assert_eq!(acquire(&mut r, 1, Type(7), 10), Err(Status::INVALID_FIELD));
    let bad = r.acquire(host(1), AcquireAction(3), Type::WRITE_EXCLUSIVE, &AcquireData { crkey: 10, prkey: 0 });
    assert_eq!(bad, Err(Status::INVALID_FIELD));
    let mut r = held(Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS);
    assert_eq!(acquire(&mut r, 2, Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS, 20), Ok(vec![]), "every registrant holds it");
}

#[test]
fn releasing_tells_those_who_were_let_in() {
    let released = |number| (id(number), Notice::RESERVATION_RELEASED.0);
    for kind in TYPES {
        let mut r = held(kind);
        let release = |r: &mut Reservations, number, kind, key| r.release(host(number), ReleaseAction::RELEASE, kind, key);
        assert_eq!(release(&mut r, 1, kind, 11), Err(Status::RESERVATION_CONFLICT));
        assert_eq!(release(&mut r, 1, Type(kind.0 % 6 + 1), 10), Err(Status::INVALID_FIELD));
        if !kind.is_all_registrants() {
            assert_eq!(release(&mut r, 2, kind, 20), Ok(vec![]), "without effect");
            assert!(r.held.is_some());
        }
        let told = if kind.admits_registrants() { vec![released(2), released(3)] } else { vec![] };
        assert_eq!(release(&mut r, 1, kind, 10), Ok(told), "{kind}");
        assert_eq!(r.rights(&host(9)), Rights::ALL);
        assert_eq!(release(&mut r, 1, kind, 10), Ok(vec![]), "there is none any more");
        assert_eq!(r.release(host(1), ReleaseAction(2), kind, 10), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn clearing_unregisters_everybody() {
    let mut r = held(Type::EXCLUSIVE_ACCESS);
    assert_eq!(r.release(host(9), ReleaseAction::CLEAR, Type::NONE, 0), Err(Status::RESERVATION_CONFLICT));
    let told = [2, 3].map(|number| (id(number), Notice::RESERVATION_PREEMPTED.0));
    assert_eq!(r.release(host(2), ReleaseAction::CLEAR, Type::NONE, 20).map(|n| n.len()), Ok(2));
    let mut r = held(Type::EXCLUSIVE_ACCESS);
    assert_eq!(r.release(host(1), ReleaseAction::CLEAR, Type::NONE, 10), Ok(told.to_vec()));
    assert!(r.registrants.is_empty() && r.held.is_none());
}

#[test]
fn a_holder_that_unregisters_lets_go() {
    for kind in TYPES {
        let mut r = held(kind);
        let notices = unregister(&mut r, 1, 10).expect("unregistered");
        if kind.is_all_registrants() {
            assert_eq!(
                (notices.len(), r.rights(&host(2)), r.rights(&host(1)).contain(Rights::WRITE)),
                (0, Rights::ALL, false)
            );
            unregister(&mut r, 2, 20).expect("unregistered");
            unregister(&mut r, 3, 30).expect("unregistered");
        } else {
            assert_eq!(notices.len(), if kind.admits_registrants() { 2 } else { 0 });
        }
        assert_eq!(r.rights(&host(9)), Rights::ALL, "{kind}");
    }
}

#[test]
fn preempting_the_holder_takes_its_place() {
    let preempted = |number| (id(number), Notice::REGISTRATION_PREEMPTED.0);
    let released = |number| (id(number), Notice::RESERVATION_RELEASED.0);
    let mut r = held(Type::WRITE_EXCLUSIVE);
    assert_eq!(preempt(&mut r, 2, Type::WRITE_EXCLUSIVE, 20, 10), Ok(vec![preempted(1)]));
    assert_eq!((r.rights(&host(2)), r.rights(&host(1))), (Rights::ALL, Rights::READ));
    assert!(r.find(&host(1)).is_none());
    let mut r = held(Type::WRITE_EXCLUSIVE);
    let notices = preempt(&mut r, 2, Type::EXCLUSIVE_ACCESS, 20, 10);
    assert_eq!(notices, Ok(vec![preempted(1), released(3)]), "the type changes");
    assert_eq!(r.rights(&host(3)), Rights::NONE);
    let mut r = held(Type::WRITE_EXCLUSIVE);
    let own =
        r.acquire(host(1), AcquireAction::PREEMPT_AND_ABORT, Type::EXCLUSIVE_ACCESS, &AcquireData { crkey: 10, prkey: 10 });
    assert_eq!(own, Ok(vec![released(2), released(3)]), "its own, to change the type");
    assert_eq!(r.rights(&host(1)), Rights::ALL);
}

#[test]
fn preempting_others_unregisters_them() {
    let preempted = |number| (id(number), Notice::REGISTRATION_PREEMPTED.0);
    let mut r = held(Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY);
    assert_eq!(preempt(&mut r, 2, Type::EXCLUSIVE_ACCESS, 20, 30), Ok(vec![preempted(3)]));
    assert_eq!(r.held.map(|held| held.kind), Some(Type::WRITE_EXCLUSIVE_REGISTRANTS_ONLY), "the reservation stays");
    assert_eq!(preempt(&mut r, 2, Type::EXCLUSIVE_ACCESS, 20, 30), Err(Status::RESERVATION_CONFLICT), "nobody has it");
    assert_eq!(preempt(&mut r, 2, Type::EXCLUSIVE_ACCESS, 20, 0), Err(Status::INVALID_FIELD));
    assert_eq!(preempt(&mut r, 3, Type::EXCLUSIVE_ACCESS, 30, 10), Err(Status::RESERVATION_CONFLICT), "not any more");
    let mut r = held(Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS);
    assert_eq!(preempt(&mut r, 2, Type::EXCLUSIVE_ACCESS, 20, 10), Ok(vec![preempted(1)]));
    assert_eq!(preempt(&mut r, 2, Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS, 20, 0), Ok(vec![preempted(3)]));
    assert_eq!(r.registrants.len(), 1);
    assert_eq!(preempt(&mut r, 2, Type::WRITE_EXCLUSIVE_ALL_REGISTRANTS, 20, 20), Ok(vec![]), "itself, by its key");
    assert_eq!(r.rights(&host(9)), Rights::ALL, "nobody holds it any more");
    let mut r = Reservations::default();
    register(&mut r, 1, 10).expect("registered");
    assert_eq!(preempt(&mut r, 1, Type::WRITE_EXCLUSIVE, 10, 5), Err(Status::RESERVATION_CONFLICT));
    register(&mut r, 2, 5).expect("registered");
    assert_eq!(preempt(&mut r, 1, Type::WRITE_EXCLUSIVE, 10, 5), Ok(vec![preempted(2)]));
    assert!(r.held.is_none(), "without a reservation, none is made");
}

#[test]
fn a_host_without_an_identifier_ends_with_its_controller() {
    let nameless = |controller| HostKey::new([0; 16], false, controller);
    let data = RegisterData { crkey: 0, nrkey: 70 };
    for kind in TYPES {
        let mut r = Reservations::default();
        register(&mut r, 2, 20).expect("registered");
        for controller in [7, 8] {
            r.register(nameless(controller), 1, RegisterAction::REGISTER, false, &data).expect("registered");
        }
        let acquired = r.acquire(nameless(7), AcquireAction::ACQUIRE, kind, &AcquireData { crkey: 70, prkey: 0 });
        assert_eq!(acquired, Ok(vec![]));
        assert!(r.end_controller(7).is_some());
        assert_eq!((r.find(&nameless(7)).is_none(), r.registrants.len()), (true, 2));
        assert_eq!(r.held.is_some(), kind.is_all_registrants(), "{kind}: those who are left hold it still");
        let generation = r.generation;
        assert_eq!((r.end_controller(7), r.generation), (None, generation), "it has nothing any more");
    }
}

#[test]
fn the_report_says_it_all() {
    let r = held(Type::EXCLUSIVE_ACCESS);
    let report = r.report(false);
    let (status, entries) = ReservationStatus::read_from_prefix(&report).expect("a header");
    assert_eq!((status.generation, status.rtype, status.registrants.get(), status.ptpls), (3, Type::EXCLUSIVE_ACCESS, 3, 0));
    let entries = <[RegisteredController]>::ref_from_bytes(entries).expect("entries");
    let seen: Vec<_> = entries.iter().map(|e| (e.cntlid.0, e.rcsts.holds(), e.hostid, e.rkey)).collect();
    assert_eq!(seen, [(1, true, 1, 10), (2, false, 2, 20), (3, false, 3, 30)]);
    let report = r.report(true);
    assert_eq!(report.len(), 64 + 3 * 64);
    let entry = RegisteredControllerExtended::read_from_bytes(&report[128..192]).expect("an entry");
    assert_eq!((entry.cntlid.0, entry.hostid, entry.rkey), (2, id(2), 20));
}

#[test]
fn registrants_have_a_limit_and_one_controller_leaves_room_for_others() {
    let (mut r, mut number) = (Reservations::default(), 0_u128);
    let mut one_more = |cntlid| {
        number += 1;
        let host = HostKey::new(number.to_le_bytes(), true, 1);
        r.register(host, cntlid, RegisterAction::REGISTER, false, &RegisterData::default())
    };
    let mut until_refused = |cntlid| (0..=MOST).take_while(|_| one_more(cntlid).is_ok()).count();
    assert_eq!(until_refused(1), MOST / 2);
    for cntlid in 2..18 {
        assert_eq!(until_refused(cntlid), ASSURED, "controller {cntlid}");
    }
    assert_eq!(one_more(18), Err(Status::NOT_ENOUGH_RESOURCES), "there is no room at all");
}

#[test]
fn who_registered_through_a_controller_that_is_gone_makes_room() {
    let mut r = Reservations::default();
    let long = |number: u128| HostKey::new(number.to_le_bytes(), true, 1);
    let register = |r: &mut Reservations, number, cntlid| {
        r.register(long(number), cntlid, RegisterAction::REGISTER, false, &RegisterData { crkey: 0, nrkey: 5 })
    };
    for number in 1..=MOST as u128 {
        assert_eq!(register(&mut r, number, (number / 8) as u16), Ok(vec![]));
    }
    let data = AcquireData { crkey: 5, prkey: 0 };
    assert_eq!(r.acquire(long(8), AcquireAction::ACQUIRE, Type::EXCLUSIVE_ACCESS, &data), Ok(vec![]));
    assert_eq!(register(&mut r, 1000, 40), Err(Status::NOT_ENOUGH_RESOURCES));
    // Of hosts 8 to 15 the first holds the reservation, and the second comes back by another controller.
    assert_eq!([1, 1].map(|gone| r.let_go(|cntlid| cntlid != gone)), [true, false]);
    assert_eq!((register(&mut r, 9, 41), r.registrants.len()), (Ok(vec![]), MOST), "they are registered still");
    r.goes_on_by(&long(9), 41);
    for number in 10..16_u128 {
        let told = vec![(number.to_le_bytes(), Notice::REGISTRATION_PREEMPTED.0)];
        assert_eq!(register(&mut r, 1000 + number, 40), Ok(told));
    }
    assert_eq!(register(&mut r, 2000, 42), Err(Status::NOT_ENOUGH_RESOURCES), "nobody else is gone");
    assert!(r.let_go(|cntlid| cntlid != 2));
    assert_eq!(register(&mut r, 2000, 3), Err(Status::NOT_ENOUGH_RESOURCES), "it has its share");
    assert!([8, 9].iter().all(|number| r.find(&long(*number)).is_some()));
    assert_eq!((r.rights(&long(8)), r.registrants.len()), (Rights::ALL, MOST));
}

#[derive(Clone, Debug)]
enum Step {
    Register(u8, u8, bool, u64, u64),
    Acquire(u8, u8, u8, u64, u64),
    Release(u8, u8, u8, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = || 0_u64..4;
    let step = prop_oneof![
        3 => (1_u8..5, 0_u8..4, any::<bool>(), key(), key()).prop_map(|(h, a, i, c, n)| Step::Register(h, a, i, c, n)),
        3 => (1_u8..5, 0_u8..4, 0_u8..8, key(), key()).prop_map(|(h, a, t, c, p)| Step::Acquire(h, a, t, c, p)),
        1 => (1_u8..5, 0_u8..3, 1_u8..7, key()).prop_map(|(h, a, t, c)| Step::Release(h, a, t, c)),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn whatever_happens_the_books_balance(steps in steps()) {
        let mut r = Reservations::default();
        for step in steps {
            let (before, generation) = (r.report(false), r.generation);
            let (result, counts) = match step {
                Step::Register(h, a, ignore, crkey, nrkey) => {
                    (r.register(host(h), 1, RegisterAction(a), ignore, &RegisterData { crkey, nrkey }), true)
                }
                Step::Acquire(h, a, t, crkey, prkey) => {
                    (r.acquire(host(h), AcquireAction(a), Type(t), &AcquireData { crkey, prkey }), a != 0)
                }
                Step::Release(h, a, t, key) => (r.release(host(h), ReleaseAction(a), Type(t), key), a == 1),
            };
            match result {
                Err(_) => prop_assert_eq!(r.report(false), before, "a refused command changes nothing"),
                Ok(notices) => {
                    prop_assert_eq!(r.generation, generation + u32::from(counts));
                    prop_assert!(notices.iter().all(|(told, _)| *told != [0; 16]));
                }
            }
            if let Some(held) = r.held {
                prop_assert!(!r.has_lost_holder(held), "a reservation has a holder");
                prop_assert!((1..5).any(|h| r.holds(&host(h)) && r.rights(&host(h)) == Rights::ALL));
                for h in 1..6 {
                    prop_assert!(!r.holds(&host(h)) || r.find(&host(h)).is_some(), "holders are registrants");
                    let stranger = r.find(&host(h)).is_none();
                    prop_assert!(!stranger || !r.rights(&host(h)).contain(Rights::WRITE));
                }
            }
            let mut hosts: Vec<_> = r.registrants.iter().map(|registrant| registrant.host.id).collect();
            hosts.dedup();
            prop_assert_eq!(hosts.len(), r.registrants.len());
        }
    }
}
