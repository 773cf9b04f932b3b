//! Applications' sessions: who gets one, and when it ends.

use millrace_driver::{QueueOptions, spec::NamespaceId};

use super::*;
use crate::{
    apps::AppUser,
    manager::{Asker, Elsewhere, SESSIONS, SessionSpec},
    model::GroupCaps,
};

const STRANGER: Asker = Asker { uid: 4_000_000 };
const KNOWN: Asker = Asker { uid: 4_000_001 };

fn spec(volume: &str, read_only: bool) -> SessionSpec {
    SessionSpec { volume: volume.to_owned(), read_only }
}

fn own() -> Asker {
    Asker { uid: rustix::process::geteuid().as_raw() }
}

/// A manager that knows a user who may read two volumes, twice at a time.
fn rig() -> Rig {
    let directory = tempfile::tempdir().unwrap();
    let (volumes, caps) = (vec!["a".into(), "none".into()], GroupCaps::default());
    let apps = vec![AppUser { uid: KNOWN.uid, volumes, read_only: true, sessions: 2, caps }];
    let settings = Settings {
        run_dir: directory.path().to_owned(),
        state_dir: Some(directory.path().to_owned()),
        placement: Placement::Device,
        keeper: None,
        cell: None,
        apps,
        card: None,
        socket_group: Some(millrace_sandbox::Group::find(&rustix::process::getegid().as_raw().to_string()).unwrap()),
    };
    let engine = Engine::start(vec![ShardConfig::new(0, None)]).unwrap();
    let store = Store::open(directory.path()).unwrap();
    let manager = Manager::start(settings, store, engine, None).unwrap();
    let rig = Rig { directory, manager: Some(manager) };
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    rig.create_volume(&volume("b", "1M", "memory")).unwrap();
    rig
}

#[test]
fn users_get_what_they_may_have_and_no_more() {
    let rig = rig();
    let refused = |asker, wanted| rig.open_session(asker, &wanted, &Elsewhere::new).unwrap_err();
    for (asker, wanted) in
        [(STRANGER, spec("a", true)), (STRANGER, spec("none", true)), (KNOWN, spec("a", false)), (KNOWN, spec("b", true))]
    {
        let error = refused(asker, wanted);
        assert!(matches!(error, ControlError::NotAllowed { .. }) && error.class() == Class::Denied, "{error}");
    }
    assert!(matches!(refused(KNOWN, spec("none", true)), ControlError::NoVolume { .. }));
    assert!(matches!(refused(own(), spec("../a", true)), ControlError::NoVolume { .. }));
    let first = rig.open_session(KNOWN, &spec("a", true), &Elsewhere::new).unwrap();
    let second = rig.open_session(KNOWN, &spec("a", true), &Elsewhere::new).unwrap();
    assert_ne!(first.0, second.0);
    assert!(matches!(refused(KNOWN, spec("a", true)), ControlError::TooManySessions { limit: 2, .. }));
    let view = rig.device(first.0.as_str()).unwrap();
    assert_eq!((view.session_of_uid, view.namespaces.len(), view.namespaces[0].read_only), (Some(KNOWN.uid), 1, true));
    assert!(matches!(rig.delete_volume("a"), Err(ControlError::VolumeAttached { .. })));
    let many: Vec<_> = (0..SESSIONS).map(|_| rig.open_session(own(), &spec("b", false), &Elsewhere::new).unwrap()).collect();
    assert!(matches!(refused(own(), spec("b", false)), ControlError::TooManySessions { .. }));
    drop(many);
}

#[test]
fn a_group_may_connect_to_devices_and_to_no_session() {
    let rig = rig();
    let mode = |device: &str| {
        let socket = rig.device(device).unwrap().socket;
        std::os::unix::fs::PermissionsExt::mode(&fs::symlink_metadata(socket).unwrap().permissions()) & 0o777
    };
    rig.create_device(&device("d", "{}")).unwrap();
    rig.create_device(&serde_json::from_str(r#"{"name":"v","virtio_blk":{}}"#).unwrap()).unwrap();
    let (session, _connection) = rig.open_session(own(), &spec("a", true), &Elsewhere::new).unwrap();
    assert_eq!([mode("d"), mode("v"), mode(session.as_str())], [0o660, 0o660, 0o600]);
}

#[test]
fn a_session_lives_as_long_as_its_connection() {
    let mut rig = rig();
    let (name, connection) = rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap();
    let transport = millrace_driver::VfioUser::from_stream(connection, Duration::from_secs(30)).unwrap();
    let mut guest = Controller::attach(transport, &Options::default()).unwrap();
    guest.start().unwrap();
    rig.end_sessions();
    assert!(rig.device(name.as_str()).unwrap().connected, "it stays while its application does");
    drop(guest);
    eventually("the session's end, when its application has gone", || {
        rig.end_sessions();
        rig.device(name.as_str()).is_err().then_some(())
    });
    // One that nobody looked at while it lasted goes as soon as it is looked for.
    let (name, connection) = rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap();
    let transport = millrace_driver::VfioUser::from_stream(connection, Duration::from_secs(30)).unwrap();
    drop(Controller::attach(transport, &Options::default()).unwrap());
    let is_connected = || rig.device(name.as_str()).is_ok_and(|device| device.connected);
    eventually("the connection's end", || (!is_connected()).then_some(()));
    rig.end_sessions();
    assert!(rig.device(name.as_str()).is_err(), "its application has been there");
    // One that has failed, because the program took a queue's memory away, goes with its connection: nobody would reset it.
    let (name, connection) = rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap();
    let transport = millrace_driver::VfioUser::from_stream(connection, Duration::from_secs(30)).unwrap();
    let mut guest = Controller::attach(transport, &Options::default()).unwrap();
    guest.start().unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let memory = guest.memory().range();
    guest.transport().dma_unmap(memory).unwrap();
    queue.submit(&namespace.flush()).unwrap();
    queue.ring().unwrap();
    eventually("the end of a session that has failed", || {
        rig.end_sessions();
        rig.device(name.as_str()).is_err().then_some(())
    });
    eventually("what tells the program so", || queue.check().is_err().then_some(()));
    // One that is there when the daemon stops is not there when it starts again.
    let (name, _connection) = rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap();
    rig.stop();
    rig.start();
    assert!(rig.device(name.as_str()).is_err());
    rig.delete_volume("a").unwrap();
}

#[test]
fn sockets_of_sessions_go_that_a_killed_daemon_has_left() {
    let mut rig = rig();
    let sessions = [(); 2].map(|()| rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap());
    let [left, others] = sessions.each_ref().map(|(name, _)| rig.device(name.as_str()).unwrap().socket);
    rig.stop();
    // The end has removed them.
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    fs::write(&others, "precious").unwrap();
    rig.start();
    assert!(!left.exists(), "nobody hears it");
    assert_eq!(fs::read(&others).unwrap(), b"precious");
}

/// What it would tidy up in its state waits: volumes and guests do not.
#[test]
fn a_daemon_starts_whose_state_has_no_room_to_forget_sessions() {
    let disk = FullDisk::default();
    let mut rig = Rig::on(&disk);
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    let (name, _connection) = rig.open_session(own(), &spec("a", false), &Elsewhere::new).unwrap();
    rig.stop();
    let store = disk.store();
    disk.set_full(true);
    rig.manager = Some(start(rig.directory.path(), store, 1, Placement::Device, None).unwrap());
    assert!(rig.device(name.as_str()).is_err(), "there is no device of it");
    assert_eq!(rig.volume("a").unwrap().state, State::Ready);
    disk.set_full(false);
    rig.stop();
    rig.manager = Some(start(rig.directory.path(), disk.store(), 1, Placement::Device, None).unwrap());
    assert!(rig.store.load().unwrap().1.is_empty(), "it is forgotten by now");
}
