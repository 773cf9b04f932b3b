//! What is there again, and what is not.

use millrace_services::record::Region;

use super::{guests::HUNG, stacks::spec, *};
use crate::{model::CopyState, upgrade::UpgradeSpec};

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
    rig.resize_volume("f", size("128K"), false).unwrap();
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
    let failed = rig.status().failed.join("\n");
    assert!(failed.starts_with("volume a: cannot ") && !failed.contains("volume a: volume a: "), "{failed}");
    // What has failed can be worked with as far as it makes sense.
    rig.create_device(&device("e", "{}")).unwrap();
    assert!(matches!(rig.attach("e", &attach("a", None)), Err(ControlError::VolumeFailed { .. })));
    assert!(matches!(rig.resize_volume("a", size("1M"), false), Err(ControlError::VolumeFailed { .. })));
    assert!(matches!(rig.delete_volume("a"), Err(ControlError::VolumeAttached { .. })));
    // And it works again when its file is back.
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("a.img")).unwrap();
    rig.start();
    assert_eq!((rig.volume("a").unwrap().state, rig.status().failed.len()), (State::Ready, 0));
    assert_eq!(nsids(&mut guest(&rig, "d")), [1, 2]);
}

/// Files that do not answer when the daemon starts: what lets them answer.
fn start_with_hung(rig: &mut Rig, files: &[&str]) -> Vec<Sender<()>> {
    let hang = |file: &&str| {
        let (release, hung) = channel();
        HUNG.lock().unwrap().insert(rig.path(file), hung);
        release
    };
    let releases = files.iter().map(hang).collect();
    rig.start();
    releases
}

#[test]
fn a_file_system_that_does_not_answer_keeps_nobody_else_waiting() {
    let mut rig = Rig::new();
    // They are on one: the second is looked at while the first hangs, and tells that others may be.
    for name in ["a", "b", "v"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("a", None)).unwrap();
    rig.attach("d", &attach("b", None)).unwrap();
    rig.create_device(&serde_json::from_str(r#"{"name":"e","virtio_blk":{}}"#).unwrap()).unwrap();
    rig.attach("e", &attach("v", None)).unwrap();
    rig.stop();
    let release = start_with_hung(&mut rig, &["a.img", "v.img"]);
    let a = rig.volume("a").unwrap();
    let why = a.reason.unwrap();
    assert!(a.state == State::Failed && why.contains("a.img does not answer; it is opened when that does"), "{why}");
    assert!(rig.status().failed.iter().any(|failed| failed.starts_with("volume a: ")));
    assert_eq!(rig.volume("b").unwrap().state, State::Ready);
    assert_eq!(rig.device("d").unwrap().state, State::Ready);
    let mut guest = guest(&rig, "d");
    assert_eq!(nsids(&mut guest), [2]);
    let waits = rig.device("e").unwrap().reason.unwrap();
    assert!(waits.contains("waits for namespace 1") && waits.contains("does not answer"), "{waits}");
    // Whatever names other files goes on as well.
    rig.create_volume(&rig.file_volume("c", "64K")).unwrap();
    drop(release);
    eventually("a volume that is opened", || (rig.volume("a").unwrap().state == State::Ready).then_some(()));
    eventually("a namespace that is shown", || (nsids(&mut guest) == [1, 2]).then_some(()));
    eventually("a disk that is shown", || (rig.device("e").unwrap().state == State::Ready).then_some(()));
    assert!(rig.status().failed.is_empty(), "{:?}", rig.status().failed);
}

/// A volume that is made of two.
fn mirror_of_volumes() -> Rig {
    let rig = Rig::new();
    for name in ["x", "y"] {
        rig.create_volume(&rig.file_volume(name, "1M")).unwrap();
    }
    rig.create_volume(&spec("m", None, "mirror(volume:x, volume:y)")).unwrap();
    rig
}

fn all_opens_whole(rig: &Rig) {
    eventually("all that is opened", || rig.status().failed.is_empty().then_some(()));
    let records = rig.store.load().unwrap().0;
    assert!(records.iter().all(|record| record.out_of_use.is_empty()), "it was not opened with a leg alone");
}

/// Without the leg it would be there with less, and compare it later.
#[test]
fn what_is_made_of_a_volume_that_does_not_answer_waits_with_it() {
    let mut rig = mirror_of_volumes();
    // It would be opened before the others.
    rig.create_volume(&spec("a", None, "throttle(iops=1M) | volume:m")).unwrap();
    rig.stop();
    let release = start_with_hung(&mut rig, &["x.img"]);
    for (name, of) in [("m", "volume x, of which it is made, does not answer"), ("a", "volume m, of which")] {
        let why = rig.volume(name).unwrap().reason.unwrap();
        assert!(why.contains(of), "{why}");
    }
    assert_eq!(rig.volume("y").unwrap().state, State::Ready);
    drop(release);
    all_opens_whole(&rig);
}

/// The dead worker's requests may have hung there, too, and keep it for a while.
#[test]
fn what_is_made_of_a_volume_waits_until_nobody_keeps_that_either() {
    let mut rig = mirror_of_volumes();
    rig.stop();
    let release = start_with_hung(&mut rig, &["x.img"]);
    let holder = fs::File::open(rig.path("x.img")).unwrap();
    rustix::fs::flock(&holder, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    drop(release);
    let is_kept = || rig.volume("x").unwrap().reason.is_some_and(|why| why.contains("x.img is in use")).then_some(());
    eventually("a look that finds it kept", is_kept);
    assert_eq!(rig.volume("m").unwrap().state, State::Failed);
    drop(holder);
    all_opens_whole(&rig);
}

#[test]
fn what_answers_and_cannot_be_opened_is_not_tried_for_ever() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("a", "64K")).unwrap();
    rig.stop();
    let release = start_with_hung(&mut rig, &["a.img"]);
    fs::OpenOptions::new().write(true).open(rig.path("a.img")).unwrap().set_len(4096).unwrap();
    assert!(!rig.peek().is_nobody_late());
    drop(release);
    eventually("the end of all tries", || rig.peek().is_nobody_late().then_some(()));
    assert!(rig.volume("a").unwrap().reason.unwrap().contains("part of its data is missing"));
}

/// What hung does not come back with it.
#[test]
fn a_volume_that_does_not_answer_can_be_deleted_meanwhile() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("a", "64K")).unwrap();
    rig.stop();
    let release = start_with_hung(&mut rig, &["a.img"]);
    rig.delete_volume("a").unwrap();
    rig.create_volume(&VolumeSpec { name: "b".parse().unwrap(), ..rig.file_volume("a", "64K") }).unwrap();
    drop(release);
    rig.restart();
    assert_eq!(rig.volumes().iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(rig.volume("b").unwrap().state, State::Ready);
}

/// Files that nobody writes to: who reads them waits.
fn make_fifo(path: &Path) {
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn a_key_that_does_not_come_keeps_its_own_volume_only() {
    let mut rig = Rig::new();
    let command = format!("command:/bin/cat {}", rig.path("c.key").display());
    for (name, key) in [("f", "@f.key"), ("c", command.as_str())] {
        fs::write(rig.path(&format!("{name}.key")), [7; 32]).unwrap();
        let stack = rig.stack(&format!("crypt(key=\"{key}\") | @{name}.img"));
        rig.create_volume(&spec(name, Some("64K"), &stack)).unwrap();
    }
    rig.create_volume(&rig.file_volume("p", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("p", None)).unwrap();
    rig.stop();
    for key in ["f.key", "c.key"] {
        fs::remove_file(rig.path(key)).unwrap();
        make_fifo(&rig.path(key));
    }
    rig.start();
    let why = |name: &str| rig.volume(name).unwrap().reason.unwrap();
    assert!(why("f").contains("f.key does not answer; it is opened when that does"), "{}", why("f"));
    assert!(why("c").contains(&format!("the source of its key, {command}, does not answer")), "{}", why("c"));
    assert_eq!((rig.volume("p").unwrap().state, rig.device("d").unwrap().state), (State::Ready, State::Ready));
    assert_eq!(nsids(&mut guest(&rig, "d")), [1]);
    fs::write(rig.path("f.key"), [7; 32]).unwrap();
    eventually("a volume that has its key", || (rig.volume("f").unwrap().state == State::Ready).then_some(()));
    // Its command has an end.
    let killed = format!("the key command {command} was killed");
    eventually("a command that is killed", || why("c").contains(&killed).then_some(()));
}

/// Requests of a worker that died may keep the file for a moment more, so that it is free when the volume is opened.
#[test]
fn the_key_of_a_volume_whose_file_is_kept_is_not_fetched_while_others_wait() {
    let mut rig = Rig::new();
    fs::write(rig.path("f.key"), [7; 32]).unwrap();
    rig.create_volume(&spec("f", Some("64K"), &rig.stack("crypt(key=\"@f.key\") | @f.img"))).unwrap();
    rig.stop();
    fs::remove_file(rig.path("f.key")).unwrap();
    make_fifo(&rig.path("f.key"));
    let holder = fs::File::open(rig.path("f.img")).unwrap();
    holder.lock().unwrap();
    rig.start();
    let why = rig.volume("f").unwrap().reason.unwrap();
    assert!(why.contains("f.key does not answer; it is opened when that does"), "{why}");
    // It comes, and the file is kept still: later looks ask for no key before it is free.
    fs::write(rig.path("f.key"), [7; 32]).unwrap();
    let is_kept = || rig.volume("f").unwrap().reason.is_some_and(|why| why.contains("f.img is in use")).then_some(());
    eventually("a look that finds it kept", is_kept);
    fs::remove_file(rig.path("f.key")).unwrap();
    fs::write(rig.path("f.key"), [7; 32]).unwrap();
    drop(holder);
    eventually("a volume that is opened", || (rig.volume("f").unwrap().state == State::Ready).then_some(()));
}

/// Has an erasure of what lies over a file begun, and not ended, as a worker's end leaves it in the middle of a guest's Format.
fn cut_off_erasure(path: &Path) {
    let disk = format!("file:{}", path.display()).parse().unwrap();
    let disk = millrace_backends::open(&disk, "e", None, BlockSize::B512).unwrap();
    let region = Region { magic: *b"MILLINTG", version: 1, offset: 0, len: 16 << 10 };
    let found = region.load(&disk).unwrap().unwrap();
    let mut content = found.content;
    content[32] = 1;
    region.store(&disk, found.generation + 1, &content).unwrap();
}

#[test]
fn an_erasure_that_was_cut_off_keeps_its_own_volume_only() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("erased-slowly", Some("1M"), &rig.stack("integrity | @e.img"))).unwrap();
    rig.create_volume(&spec("over", None, "throttle(iops=1M) | volume:erased-slowly")).unwrap();
    rig.create_volume(&rig.file_volume("p", "64K")).unwrap();
    for (device_name, volume) in [("d", "over"), ("e", "p")] {
        rig.create_device(&device(device_name, "{}")).unwrap();
        rig.attach(device_name, &attach(volume, None)).unwrap();
    }
    rig.stop();
    cut_off_erasure(&rig.path("e.img"));
    let (release, hung) = channel();
    HUNG.lock().unwrap().insert("erased-slowly".into(), hung);
    rig.start();
    let why = |name: &str| rig.volume(name).unwrap().reason.unwrap();
    assert!(why("erased-slowly").contains("an erasure that was cut off"), "{}", why("erased-slowly"));
    assert!(why("over").contains("volume erased-slowly, of which it is made, is being erased"), "{}", why("over"));
    assert_eq!((rig.volume("p").unwrap().state, rig.device("d").unwrap().state), (State::Ready, State::Ready));
    assert_eq!(nsids(&mut guest(&rig, "e")), [1]);
    // Nobody has it meanwhile, and no other worker begins again.
    assert!(matches!(rig.delete_volume("erased-slowly"), Err(ControlError::Changing { .. })));
    let upgrade = UpgradeSpec { binary: "/proc/self/exe".into(), trial_seconds: None };
    let refused = rig.prepare_upgrade(&upgrade, Uuid::new_v4(), || true).unwrap_err().to_string();
    assert!(refused.contains("volume erased-slowly: an erasure that was cut off"), "{refused}");
    drop(release);
    all_opens_whole(&rig);
    let mut guest = guest(&rig, "d");
    eventually("a namespace that is shown", || (nsids(&mut guest) == [1]).then_some(()));
    rig.prepare_upgrade(&upgrade, Uuid::new_v4(), || true).unwrap();
    assert!(rig.peek().changing.is_empty());
    rig.restart();
    assert!(rig.status().failed.is_empty());
}

/// The copy waits for its target, and that must not wait for the copy.
#[test]
fn an_erasure_of_what_is_copied_to_is_completed() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("p", "1M")).unwrap();
    rig.create_volume(&spec("t", Some("1M"), &rig.stack("integrity | @t.img"))).unwrap();
    let copy = serde_json::from_str(r#"{"name":"job","source":"p","target":"t","rate":"4K"}"#).unwrap();
    rig.create_copy(&copy).unwrap();
    rig.stop();
    cut_off_erasure(&rig.path("t.img"));
    rig.start();
    eventually("a target that is open", || (rig.volume("t").unwrap().state == State::Ready).then_some(()));
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Running);
}

/// Why it failed is told, and nothing is kept from going for long.
#[test]
fn an_erasure_that_fails_is_not_begun_again_at_once() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("not-erased", Some("1M"), &rig.stack("integrity | @n.img"))).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("not-erased", None)).unwrap();
    rig.stop();
    cut_off_erasure(&rig.path("n.img"));
    let hang = || {
        let (release, hung) = channel();
        HUNG.lock().unwrap().insert("not-erased".into(), hung);
        release
    };
    let release = hang();
    rig.start();
    eventually("its erasure", || (!HUNG.lock().unwrap().contains_key(Path::new("not-erased"))).then_some(()));
    fs::rename(rig.path("n.img"), rig.path("aside")).unwrap();
    drop(release);
    let is_told = || rig.volume("not-erased").unwrap().reason.is_some_and(|why| why.contains("No such file")).then_some(());
    eventually("its failure", is_told);
    let _release = hang();
    fs::rename(rig.path("aside"), rig.path("n.img")).unwrap();
    // Looks come once a second at least.
    thread::sleep(Duration::from_secs(3));
    assert!(HUNG.lock().unwrap().remove(Path::new("not-erased")).is_some(), "nobody has begun again");
    is_told().expect("the cause");
    let upgrade = UpgradeSpec { binary: "/proc/self/exe".into(), trial_seconds: None };
    rig.prepare_upgrade(&upgrade, Uuid::new_v4(), || true).expect("another worker may try it, too");
    rig.delete_device("d").unwrap();
    rig.delete_volume("not-erased").unwrap();
    assert!(rig.peek().is_nobody_late());
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

/// As a cell's worker does it, which goes on.
#[test]
fn what_is_refused_of_a_part_leaves_devices_that_run_as_they_were() {
    let rig = Rig::new();
    rig.create_volume(&volume("api", "1M", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    let before = picture(&rig);
    let more = "[[device]]\nname = \"d\"\nnvme = {}\nattach = [{ volume = \"root\" }, { volume = \"api\", nsid = 1 }]\n";
    let path = rig.path("m.toml");
    fs::write(&path, format!("{CONFIG}{more}")).unwrap();
    let error = rig.declare(&Declared::read(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("device d: namespace 1 is volume root"), "{error}");
    assert_eq!(picture(&rig), before);
    assert!(!rig.path("root.img").exists() && !rig.path("vm.sock").exists());
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

/// The slow leg has all of it.
#[test]
fn a_read_cache_in_memory_keeps_no_volume_from_coming_back() {
    let mut rig = Rig::new();
    let stack = rig.stack("cache(mode=through, memory(size=4M)) | @slow");
    rig.create_volume(&spec("v", Some("1M"), &stack)).unwrap();
    let data: Vec<_> = (0..1 << 20).map(|at: usize| (at / 512 + at) as u8).collect();
    let switch = |rig: &Rig| Arc::clone(&rig.peek().volumes["v"].graph.as_ref().unwrap().switch);
    millrace_services::legs::write(&switch(&rig), 0, data.clone()).unwrap();
    rig.restart();
    let view = rig.volume("v").unwrap();
    assert_eq!((view.health, view.reason), (millrace_services::Health::Good, None));
    assert!(millrace_services::legs::read(&switch(&rig), 0, data.len()).unwrap() == data);
}

/// What to put right, or where to bring something back from, there is not.
#[test]
fn a_volume_whose_memory_a_stop_has_emptied_is_to_be_made_anew() {
    let mut rig = Rig::new();
    for (name, size, stack) in [
        ("i", "4M", "integrity | memory"),
        ("m", "1M", "mirror(memory, memory)"),
        ("pool", "16M", "disk | memory"),
        ("s", "1M", "share | volume:pool"),
    ] {
        let told = rig.create_volume(&spec(name, Some(size), stack)).unwrap().warning;
        assert_eq!(told.is_some_and(|told| told.contains("in memory")), !["pool", "s"].contains(&name), "{name}");
    }
    for (name, stack) in [("f", "mirror(@a, @b)"), ("c", "cache(mode=back, memory(size=4M)) | @slow")] {
        let stack = rig.stack(stack);
        rig.create_volume(&spec(name, Some("1M"), &stack)).unwrap();
    }
    rig.stop();
    for leg in ["a", "b"] {
        fs::remove_file(rig.path(leg)).unwrap();
    }
    rig.start();
    for name in ["i", "m", "s"] {
        let view = rig.volume(name).unwrap();
        assert_eq!(view.health, millrace_services::Health::Failed);
        let why = view.reason.unwrap_or_default();
        assert!(
            why.contains(crate::EMPTIED) && why.contains(&format!("\"millrace volume delete {name}\"")),
            "{name}: {why}"
        );
    }
    for (name, has) in [("f", "its files may come back"), ("c", "its slow leg has what was written back")] {
        let why = rig.volume(name).unwrap().reason.unwrap();
        assert!(!why.contains(crate::EMPTIED), "{has}: {why}");
    }
    rig.delete_volume("m").unwrap();
    rig.create_volume(&spec("m", Some("1M"), "mirror(memory, memory)")).unwrap();
}
