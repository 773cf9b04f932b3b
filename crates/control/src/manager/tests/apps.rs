//! Who may open volumes as an application: said, said otherwise and taken back while the daemon runs.

use std::{io::Read, os::unix::net::UnixStream};

use millrace_block::Lba;
use millrace_driver::{DmaBuffer, QueueOptions, QueuePair, VfioUser, spec::NamespaceId};

use super::*;
use crate::{
    apps::{AppChange, AppUser},
    manager::{AppSource, Asker, Elsewhere, Granted, Limit, Others, SessionSpec},
    model::GroupCaps,
    store::SessionRecord,
};

const UID: u32 = 4_000_001;
const OTHER: u32 = 4_000_002;

fn app(uid: u32, volumes: &[&str], read_only: bool, sessions: usize) -> AppUser {
    let volumes = volumes.iter().map(ToString::to_string).collect();
    AppUser { uid, volumes, read_only, sessions, caps: GroupCaps::default() }
}

fn only(volumes: &[&str]) -> AppChange {
    AppChange { volumes: Some(app(0, volumes, false, 1).volumes), ..AppChange::default() }
}

fn nobody() -> Others {
    Others::default()
}

fn with_volumes(rig: &Rig) {
    for name in ["a", "b"] {
        rig.create_volume(&volume(name, "1M", "memory")).unwrap();
    }
}

fn open(rig: &Rig, uid: u32, volume: &str, read_only: bool) -> Result<(Name, UnixStream), ControlError> {
    rig.open_session(Asker { uid }, &SessionSpec { volume: volume.to_owned(), read_only }, &Elsewhere::new)
}

/// Whether the session's device is there, with its connection.
fn goes_on(rig: &Rig, (name, connection): &mut (Name, UnixStream)) -> bool {
    let is_there = rig.device(name.as_str()).is_ok();
    connection.set_nonblocking(is_there).unwrap();
    let is_open = connection.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    assert_eq!(is_there, is_open, "device and connection end together");
    is_there
}

fn refused<T>(result: Result<T, ControlError>, class: Class, why: &str) {
    let error = result.err().expect("it is refused");
    assert!(error.class() == class && error.to_string().contains(why), "{error}");
}

fn bandwidth(bytes: u64) -> GroupCaps {
    GroupCaps { bandwidth: Some(Size(bytes)), ..GroupCaps::default() }
}

fn cap(rig: &Rig, caps: GroupCaps) {
    let change = AppChange { caps: Some(caps), ..AppChange::default() };
    assert_eq!(rig.change_app(UID, &change, &nobody()).unwrap().caps, change.caps.unwrap());
}

fn held_back(rig: &Rig) -> u64 {
    rig.app(UID, &nobody()).unwrap().held_back
}

/// A session's program.
struct Program {
    guest: Controller,
    queue: QueuePair,
    buffer: DmaBuffer,
}

impl Program {
    fn of((_, connection): (Name, UnixStream)) -> Self {
        let transport = VfioUser::from_stream(connection, PATIENCE).unwrap();
        let mut guest = Controller::attach(transport, &Options::default()).unwrap();
        guest.start().unwrap();
        let queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
        let buffer = guest.memory().alloc(4096).unwrap();
        Self { guest, queue, buffer }
    }

    /// Begins writes of 512 bytes.
    fn begin(&mut self, count: u64) {
        let namespace = self.guest.namespace(NamespaceId(1)).unwrap();
        for at in 0..count {
            self.queue.submit(&namespace.write(Lba(at), self.buffer.slice(0, 512)).unwrap()).unwrap();
        }
        self.queue.ring().unwrap();
    }

    fn end(&mut self) {
        eventually("the end of the writes", || {
            while let Some(cqe) = self.queue.next_completion().unwrap() {
                assert!(cqe.status().is_success(), "{cqe:?}");
            }
            self.queue.ring().unwrap();
            (self.queue.in_flight() == 0).then_some(())
        });
    }
}

/// What is said, in short.
fn said(rig: &Rig) -> Vec<(u32, String, bool, usize, AppSource)> {
    let views = rig.apps(&nobody()).into_iter();
    views.map(|view| (view.uid, view.volumes.join(" "), view.read_only, view.sessions, view.source)).collect()
}

#[test]
fn a_user_is_let_in_counted_and_shut_out_while_the_daemon_runs() {
    let mut rig = Rig::new();
    with_volumes(&rig);
    refused(open(&rig, UID, "a", false), Class::Denied, "may not open volume a");
    rig.create_app(&app(UID, &["a"], false, 2), &nobody()).unwrap();
    rig.create_app(&app(OTHER, &["*"], true, 9), &nobody()).unwrap();
    let (mut first, mut second) = (open(&rig, UID, "a", false).unwrap(), open(&rig, UID, "a", true).unwrap());
    refused(open(&rig, UID, "a", false), Class::Conflict, "has 2 sessions, and may have no more");
    refused(open(&rig, UID, "b", true), Class::Denied, "may not open volume b");
    let mut beside = open(&rig, OTHER, "a", true).unwrap();
    assert_eq!(rig.app(UID, &nobody()).unwrap().open, 2);
    let others = Others { sessions: Elsewhere::from([("app-1".to_owned(), UID)]), ..nobody() };
    assert_eq!(rig.app(UID, &others).unwrap().open, 3, "other workers' count as well");

    // Fewer than there are: none is ended, and none is added.
    rig.change_app(UID, &AppChange { sessions: Some(1), ..AppChange::default() }, &nobody()).unwrap();
    assert!(goes_on(&rig, &mut first) && goes_on(&rig, &mut second));
    refused(open(&rig, UID, "a", true), Class::Conflict, "has 1 sessions");
    // Who may only read loses what writes, and keeps what reads.
    rig.change_app(UID, &AppChange { read_only: Some(true), ..AppChange::default() }, &nobody()).unwrap();
    assert!(!goes_on(&rig, &mut first) && goes_on(&rig, &mut second));
    refused(open(&rig, UID, "a", false), Class::Denied, "not in this way");
    // Another volume in the old one's place.
    rig.change_app(UID, &only(&["b"]), &nobody()).unwrap();
    assert!(!goes_on(&rig, &mut second));
    let mut third = open(&rig, UID, "b", true).unwrap();

    let (before, b) = (said(&rig), (UID, "b".to_owned(), true, 1, AppSource::Command));
    assert_eq!(before, [b, (OTHER, "*".to_owned(), true, 9, AppSource::Command)]);
    rig.delete_app(UID).unwrap();
    assert!(!goes_on(&rig, &mut third) && goes_on(&rig, &mut beside));
    refused(open(&rig, UID, "b", true), Class::Denied, "may not open volume b");
    assert_eq!(said(&rig), before[1..]);
    rig.restart();
    assert_eq!(said(&rig), before[1..], "what was said outlives the daemon");
    open(&rig, OTHER, "b", true).unwrap();
    refused(open(&rig, UID, "b", true), Class::Denied, "may not open volume b");
}

#[test]
fn what_cannot_be_said_of_a_user_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    with_volumes(&rig);
    rig.create_app(&app(UID, &["a"], true, 2), &nobody()).unwrap();
    let before = said(&rig);
    let create = |app: &AppUser| rig.create_app(app, &nobody());
    let change = |change: &AppChange| rig.change_app(UID, change, &nobody());
    refused(create(&app(UID, &["b"], false, 1)), Class::Conflict, "user 4000001 has been given volumes already");
    refused(create(&app(OTHER, &["a", "none"], false, 1)), Class::Missing, "volume none does not exist");
    refused(create(&app(OTHER, &[], false, 1)), Class::Invalid, "name one at least");
    refused(create(&app(OTHER, &["a", "a"], false, 1)), Class::Invalid, "a is named twice");
    refused(create(&app(OTHER, &["*", "a"], false, 1)), Class::Invalid, "name no others beside it");
    refused(create(&app(OTHER, &["../a"], false, 1)), Class::Invalid, "is no volume's name");
    refused(create(&app(OTHER, &["a"], false, 0)), Class::Invalid, "user 4000002: sessions: 1 to 65535 are possible, not 0");
    refused(create(&app(u32::MAX, &["a"], false, 1)), Class::Invalid, "that is no user's number");
    refused(create(&app(0, &["a"], false, 1)), Class::Invalid, "user 0: it may open every volume");
    refused(create(&app(0, &["*"], true, 1)), Class::Invalid, "user 0: it may open every volume");
    refused(change(&AppChange::default()), Class::Invalid, "say which volumes");
    let limited = |uid, caps| AppUser { caps, ..app(uid, &["*"], false, 1) };
    refused(create(&limited(OTHER, bandwidth(0))), Class::Invalid, "user 4000002: bandwidth: 1 at least is possible");
    let burst = GroupCaps { burst: Some("1s".to_owned()), ..GroupCaps::default() };
    refused(create(&limited(OTHER, burst)), Class::Invalid, "burst: it is of caps, and there are none");
    refused(create(&limited(0, bandwidth(5))), Class::Invalid, "only the number of its sessions can be said");
    refused(change(&only(&["none"])), Class::Missing, "volume none does not exist");
    refused(change(&AppChange { sessions: Some(0), ..AppChange::default() }), Class::Invalid, "not 0");
    refused(rig.change_app(OTHER, &only(&["a"]), &nobody()), Class::Missing, "user 4000002 has not been given any volumes");
    refused(rig.delete_app(OTHER), Class::Missing, "user 4000002 has not been given any volumes");
    refused(rig.app(OTHER, &nobody()), Class::Missing, "user 4000002 has not been given any volumes");
    assert_eq!(said(&rig), before);
    // A volume of another worker is one; and one that has gone since does not keep the rest from being changed.
    let others = Others { volumes: ["none".to_owned()].into(), ..nobody() };
    rig.create_app(&app(OTHER, &["none", "b"], false, 1), &others).unwrap();
    rig.change_app(OTHER, &only(&["none", "a"]), &nobody()).unwrap();
    // Of those who may open all, how many sessions they may have can be said, and ends none.
    rig.create_app(&app(0, &["*"], false, 1), &nobody()).unwrap();
    let mut own = open(&rig, 0, "a", false).unwrap();
    refused(open(&rig, 0, "a", false), Class::Conflict, "user 0 has 1 sessions");
    rig.delete_app(0).unwrap();
    assert!(goes_on(&rig, &mut own));
    open(&rig, 0, "a", false).unwrap();
}

#[test]
fn a_users_caps_hold_for_all_his_sessions_and_for_nobody_elses() {
    let mut rig = Rig::new();
    with_volumes(&rig);
    for uid in [UID, OTHER] {
        rig.create_app(&app(uid, &["*"], false, 9), &nobody()).unwrap();
    }
    let mut first = Program::of(open(&rig, UID, "a", false).unwrap());
    let mut other = Program::of(open(&rig, OTHER, "a", false).unwrap());
    first.begin(8);
    first.end();
    // One write may go, and is paid for until long after this test.
    cap(&rig, bandwidth(1));
    first.begin(1);
    first.end();
    assert_eq!(held_back(&rig), 0);
    let session = open(&rig, UID, "b", false).unwrap();
    let view = rig.device(session.0.as_str()).unwrap();
    assert_eq!((view.session_caps, view.session_held_back), (bandwidth(1), Some(0)));
    let mut second = Program::of(session);
    second.begin(1);
    eventually("one that is held on another volume", || (held_back(&rig) == 1).then_some(()));
    first.begin(3);
    eventually("one that is held where it was open before", || (held_back(&rig) == 2).then_some(()));
    other.begin(8);
    other.end();
    assert_eq!((first.queue.in_flight(), second.queue.in_flight()), (3, 1));
    // Other caps are obeyed at once, and so is that there are none.
    cap(&rig, bandwidth(1 << 30));
    first.end();
    second.end();
    cap(&rig, bandwidth(1));
    first.begin(2);
    second.begin(2);
    eventually("those that are held again", || (held_back(&rig) >= 4).then_some(()));
    cap(&rig, GroupCaps::default());
    first.end();
    second.end();
    first.begin(8);
    first.end();
    assert_eq!(held_back(&rig), 0);
    assert!(rig.devices().iter().all(|view| view.session_caps.is_empty() && view.session_held_back.is_none()));
    drop((first, second, other));
    cap(&rig, bandwidth(7));
    rig.restart();
    assert_eq!(rig.app(UID, &nobody()).unwrap().caps, bandwidth(7), "what was said outlives the daemon");
    let change = AppChange { sessions: Some(3), ..AppChange::default() };
    assert_eq!(rig.change_app(UID, &change, &nobody()).unwrap().caps, bandwidth(7), "what is not said stays");
}

/// In a worker that is told who may have what: a session that was granted before its user's caps were changed comes after them.
#[test]
fn a_session_that_is_made_late_brings_back_no_old_caps() {
    let rig = Rig::new();
    with_volumes(&rig);
    let granted = |name: &str, caps| {
        let (name, volume) = (name.parse().unwrap(), "a".to_owned());
        Granted { name, uid: UID, volume, read_only: false, caps }
    };
    let caps_of = |name: &str| rig.device(name).unwrap().session_caps;
    rig.receive_session(&granted("first", GroupCaps::default())).unwrap();
    rig.receive_limit(&Limit { uid: UID, caps: bandwidth(5) }).unwrap();
    rig.receive_session(&granted("second", GroupCaps::default())).unwrap();
    assert_eq!((caps_of("first"), caps_of("second")), (bandwidth(5), bandwidth(5)));
    rig.receive_limit(&Limit { uid: UID, caps: GroupCaps::default() }).unwrap();
    rig.receive_session(&granted("third", bandwidth(5))).unwrap();
    assert!(["first", "second", "third"].iter().all(|name| caps_of(name).is_empty()));
    assert!(rig.users_held_back().is_empty(), "nobody has caps");
}

#[test]
fn users_and_sessions_without_caps_are_stored_as_they_were_before_there_were_any() {
    let user = r#"{"uid":4000001,"volumes":["a"],"read_only":false,"sessions":2}"#;
    let stored: AppUser = serde_json::from_str(user).unwrap();
    assert_eq!(stored, app(UID, &["a"], false, 2));
    assert_eq!(serde_json::to_string(&stored).unwrap(), user, "earlier programs understand it");
    let session: SessionRecord = serde_json::from_str(r#"{"uid":4000001}"#).unwrap();
    assert!(session.caps.is_empty());
    assert_eq!(serde_json::to_string(&session).unwrap(), r#"{"uid":4000001}"#);
}

#[test]
fn what_caps_hold_back_ends_when_they_are_lifted_or_nobody_waits_for_it() {
    let rig = Rig::new();
    with_volumes(&rig);
    rig.create_app(&app(UID, &["*"], false, 9), &nobody()).unwrap();
    let mut program = Program::of(open(&rig, UID, "a", false).unwrap());
    cap(&rig, bandwidth(1));
    program.begin(3);
    eventually("a write that is held", || (held_back(&rig) > 0).then_some(()));
    // Lifted and said again while writes wait: those go, and later ones do not.
    cap(&rig, GroupCaps::default());
    program.end();
    cap(&rig, bandwidth(1));
    program.begin(3);
    eventually("another one that is held", || (held_back(&rig) > 0).then_some(()));
    // Nobody waits for what is held when its program resets its controller.
    program.guest.disable().expect("within CAP.TO");
}

#[test]
fn a_full_disk_leaves_who_may_open_what_as_it_was() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    with_volumes(&rig);
    rig.create_app(&app(UID, &["a"], false, 2), &nobody()).unwrap();
    let mut session = open(&rig, UID, "a", false).unwrap();
    let before = said(&rig);
    disk.set_full(true);
    refused(rig.delete_app(UID), Class::NoRoom, "");
    refused(rig.create_app(&app(OTHER, &["a"], false, 2), &nobody()), Class::NoRoom, "");
    disk.set_full(false);
    assert_eq!(said(&rig), before);
    assert!(goes_on(&rig, &mut session));
}

#[test]
fn what_a_command_says_of_a_user_holds_over_the_file_until_it_says_the_same() {
    let mut rig = Rig::new();
    let entry = |uid, volume| format!("[[app]]\nuid = {uid}\nvolumes = [\"{volume}\"]\nsessions = 3\n");
    let file = format!("{}{}", entry(UID, "a"), entry(OTHER, "a"));
    let restart = |rig: &mut Rig, file: &str| {
        rig.stop();
        rig.try_start(Some(file)).unwrap();
    };
    restart(&mut rig, &file);
    with_volumes(&rig);
    let (in_file, by_command) =
        ((UID, "a".to_owned(), false, 3, AppSource::File), (OTHER, "b".to_owned(), false, 3, AppSource::Command));
    refused(rig.create_app(&app(UID, &["b"], false, 1), &nobody()), Class::Conflict, "has been given volumes already");
    let mut session = open(&rig, UID, "a", false).unwrap();
    rig.delete_app(UID).unwrap();
    rig.change_app(OTHER, &only(&["b"]), &nobody()).unwrap();
    assert!(!goes_on(&rig, &mut session));
    assert_eq!(said(&rig), std::slice::from_ref(&by_command));
    refused(rig.delete_app(UID), Class::Missing, "has not been given any volumes");
    restart(&mut rig, &file);
    refused(open(&rig, UID, "a", false), Class::Denied, "may not open volume a");
    assert_eq!(said(&rig), std::slice::from_ref(&by_command), "a start does not let in who was shut out");
    // The same as the file: from then on the file says it, whatever that will be.
    rig.create_app(&app(UID, &["a"], false, 3), &nobody()).unwrap();
    assert_eq!(said(&rig), [in_file, by_command.clone()]);
    restart(&mut rig, &entry(UID, "b"));
    assert_eq!(said(&rig), [(UID, "b".to_owned(), false, 3, AppSource::File), by_command]);
    // Who was shut out and is in no file any more is forgotten: a later entry is meant.
    rig.delete_app(UID).unwrap();
    restart(&mut rig, "");
    restart(&mut rig, &entry(UID, "b"));
    open(&rig, UID, "b", false).unwrap();
}
