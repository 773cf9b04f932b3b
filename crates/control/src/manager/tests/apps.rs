//! Who may open volumes as an application: said, said otherwise and taken back while the daemon runs.

use std::{io::Read, os::unix::net::UnixStream};

use super::*;
use crate::{
    apps::{AppChange, AppUser},
    manager::{AppSource, Asker, Elsewhere, Others, SessionSpec},
};

const UID: u32 = 4_000_001;
const OTHER: u32 = 4_000_002;

fn app(uid: u32, volumes: &[&str], read_only: bool, sessions: usize) -> AppUser {
    AppUser { uid, volumes: volumes.iter().map(ToString::to_string).collect(), read_only, sessions }
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
fn a_full_disk_leaves_who_may_open_what_as_it_was() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    with_volumes(&rig);
    rig.create_app(&app(UID, &["a"], false, 2), &nobody()).unwrap();
    let mut session = open(&rig, UID, "a", false).unwrap();
    let before = said(&rig);
    disk.set_full(true);
    refused(rig.delete_app(UID), Class::Failed, "");
    refused(rig.create_app(&app(OTHER, &["a"], false, 2), &nobody()), Class::Failed, "");
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
