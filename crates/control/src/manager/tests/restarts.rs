//! What is there again, and what is not.

use super::*;

const CONFIG: &str = r#"
[[volume]]
name = "root"
size = "64K"
backend = "file:root.img"

[[volume]]
name = "scratch"
size = "64K"
backend = "memory"

[[device]]
name = "vm"
nvme = { queues = 2 }
attach = [{ volume = "root", nsid = 2 }, { volume = "scratch", read_only = true }]
"#;

#[test]
fn everything_comes_back() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_volume(&volume("m", "1M", "memory")).unwrap();
    rig.create_volume(&volume("gone", "1M", "null")).unwrap();
    rig.create_device(&device("d", r#"{"queues":3,"serial":"abc"}"#)).unwrap();
    rig.create_device(&device("e", "{}")).unwrap();
    rig.create_device(&DeviceSpec { socket: Some(rig.path("elsewhere")), ..device("g", "{}") }).unwrap();
    rig.attach("d", &attach("f", Some(5))).unwrap();
    rig.attach("e", &attach("f", None)).unwrap();
    rig.attach("d", &AttachSpec { read_only: true, ..attach("m", None) }).unwrap();
    rig.resize_volume("f", size("128K")).unwrap();
    rig.delete_volume("gone").unwrap();
    rig.delete_device("g").unwrap();
    let before = picture(&rig);
    for _ in 0..3 {
        rig.restart();
        assert_eq!(picture(&rig), before);
    }
    assert_eq!(nsids(&mut guest(&rig, "d")), [1, 5]);
}

#[test]
fn a_file_that_is_gone_costs_nothing_else() {
    let mut rig = Rig::new();
    for name in ["a", "b"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("a", None)).unwrap();
    rig.attach("d", &attach("b", None)).unwrap();
    rig.stop();
    fs::rename(rig.path("a.img"), rig.path("aside")).unwrap();
    rig.start();
    assert!(!rig.path("a.img").exists(), "it is not made anew");
    let a = rig.volume("a").unwrap();
    assert_eq!((a.state, a.allocated), (State::Failed, None));
    assert!(a.reason.unwrap().contains("a.img"));
    assert_eq!(rig.volume("b").unwrap().state, State::Ready);
    let d = rig.device("d").unwrap();
    let states: Vec<_> = d.namespaces.iter().map(|namespace| namespace.state).collect();
    assert_eq!((d.state, states), (State::Ready, vec![State::Failed, State::Ready]));
    assert_eq!(nsids(&mut guest(&rig, "d")), [2]);
    assert_eq!(rig.status().failed.len(), 2);
    // What has failed can be worked with as far as it makes sense.
    rig.create_device(&device("e", "{}")).unwrap();
    assert!(matches!(rig.attach("e", &attach("a", None)), Err(ControlError::VolumeFailed { .. })));
    assert!(matches!(rig.resize_volume("a", size("1M")), Err(ControlError::VolumeFailed { .. })));
    assert!(matches!(rig.delete_volume("a"), Err(ControlError::VolumeAttached { .. })));
    // And it works again when its file is back.
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("a.img")).unwrap();
    rig.start();
    assert_eq!((rig.volume("a").unwrap().state, rig.status().failed.len()), (State::Ready, 0));
    assert_eq!(nsids(&mut guest(&rig, "d")), [1, 2]);
}

#[test]
fn a_failed_volume_can_be_let_go() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("a", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("a", None)).unwrap();
    rig.stop();
    fs::OpenOptions::new().write(true).open(rig.path("a.img")).unwrap().set_len(4096).unwrap();
    rig.start();
    assert!(rig.volume("a").unwrap().reason.unwrap().contains("part of its data is missing"));
    assert_eq!(fs::metadata(rig.path("a.img")).unwrap().len(), 4096, "it is not lengthened");
    rig.detach("d", 1).unwrap();
    rig.delete_volume("a").unwrap();
    rig.restart();
    assert!(rig.volumes().is_empty() && rig.device("d").unwrap().namespaces.is_empty());
}

#[test]
fn a_socket_that_is_taken_costs_its_device_only() {
    let mut rig = Rig::new();
    for name in ["a", "b"] {
        rig.create_device(&device(name, "{}")).unwrap();
    }
    rig.stop();
    fs::write(rig.path("a.sock"), "").unwrap();
    rig.start();
    let a = rig.device("a").unwrap();
    assert!(a.state == State::Failed && a.shard.is_none() && a.reason.unwrap().contains("not a socket"));
    assert_eq!(rig.device("b").unwrap().state, State::Ready);
    rig.create_volume(&volume("m", "1M", "memory")).unwrap();
    assert!(matches!(rig.attach("a", &attach("m", None)), Err(ControlError::DeviceFailed { .. })));
    rig.delete_device("a").unwrap();
    assert!(rig.path("a.sock").exists(), "what was in the way is not ours");
}

#[test]
fn sockets_left_behind_are_replaced() {
    let mut rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.stop();
    drop(std::os::unix::net::UnixListener::bind(rig.path("d.sock")).unwrap());
    assert!(UnixStream::connect(rig.path("d.sock")).is_err());
    rig.start();
    rig.create_volume(&volume("m", "1M", "memory")).unwrap();
    rig.attach("d", &attach("m", None)).unwrap();
    assert_eq!(nsids(&mut guest(&rig, "d")), [1]);
}

#[test]
fn a_configuration_is_made_sure_of() {
    let mut rig = Rig::new();
    rig.create_volume(&volume("api", "1M", "memory")).unwrap();
    rig.stop();
    rig.try_start(Some(CONFIG)).unwrap();
    let names = |rig: &Rig| rig.volumes().iter().map(|volume| volume.name.to_string()).collect::<Vec<_>>();
    assert_eq!(names(&rig), ["api", "root", "scratch"]);
    let listed =
        |rig: &Rig| rig.device("vm").unwrap().namespaces.iter().map(|ns| (ns.nsid, ns.read_only)).collect::<Vec<_>>();
    assert_eq!(listed(&rig), [(1, true), (2, false)]);
    let before = picture(&rig);
    rig.stop();
    rig.try_start(Some(CONFIG)).unwrap();
    assert_eq!(picture(&rig), before);
    // What is missing is added, and without the file it is all there still.
    rig.detach("vm", 1).unwrap();
    rig.stop();
    rig.try_start(Some(CONFIG)).unwrap();
    assert_eq!(picture(&rig), before);
    rig.restart();
    assert_eq!(picture(&rig), before);
}

#[test]
fn a_configuration_that_fails_changes_nothing() {
    let mut rig = Rig::new();
    rig.create_volume(&volume("api", "1M", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    let before = picture(&rig);
    rig.stop();
    for (more, expected) in [
        ("[[volume]]\nname = \"late\"\nbackend = \"file:missing.img\"\n", "m.toml:16: volume late: cannot open "),
        ("[[device]]\nname = \"late\"\nnvme = { queues = 999 }\n", "m.toml:16: device late: 999 queues"),
        ("[[device]]\nname = \"late\"\nnvme = {}\nsocket = \"m.toml\"\n", "m.toml:16: device late: its socket: "),
        (
            "[[device]]\nname = \"d\"\nnvme = {}\nattach = [{ volume = \"root\" }, { volume = \"api\", nsid = 1 }]\n",
            "m.toml:16: device d: namespace 1 is volume root",
        ),
    ] {
        let error = rig.try_start(Some(&format!("{CONFIG}{more}"))).unwrap_err().to_string();
        let expected = format!("{}/{expected}", rig.directory.path().display());
        assert!(error.starts_with(&expected), "{error}\ninstead of\n{expected}");
        assert!(!rig.path("root.img").exists() && !rig.path("vm.sock").exists());
        rig.start();
        assert_eq!(picture(&rig), before);
        rig.stop();
    }
}

#[test]
fn a_crash_leaves_a_state_that_was_true() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let before = picture(&rig);
    // The state as it lies on disk while the daemon runs, read by another one.
    let copy = tempfile::tempdir().unwrap();
    fs::copy(rig.path("state.redb"), copy.path().join("state.redb")).unwrap();
    rig.stop();
    fs::copy(copy.path().join("state.redb"), rig.path("state.redb")).unwrap();
    rig.start();
    assert_eq!(picture(&rig), before);
}
