//! Volumes that are long in the making: nothing is locked meanwhile, and nobody takes what is theirs.

use std::thread::JoinHandle;

use super::{guests::HUNG, stacks::spec, *};
use crate::manager::shutdown::Limits;

/// A volume that is being made until the sender goes.
fn make(rig: &Rig, spec: VolumeSpec) -> (Sender<()>, JoinHandle<Result<VolumeView, ControlError>>) {
    let ((release, hung), name) = (channel(), PathBuf::from(spec.name.as_str()));
    HUNG.lock().unwrap().insert(name.clone(), hung);
    let manager = Arc::clone(rig.manager.as_ref().unwrap());
    let making = thread::spawn(move || manager.create_volume(&spec));
    eventually("its making", || (!HUNG.lock().unwrap().contains_key(&name)).then_some(()));
    (release, making)
}

#[test]
fn a_volume_that_is_long_in_the_making_keeps_nobody_waiting() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @pool.img"))).unwrap();
    rig.create_volume(&spec("other", Some("64K"), "share | volume:pool")).unwrap();
    rig.create_volume(&rig.file_volume("w", "64K")).unwrap();
    let uuid = "1234abcd-0000-4000-8000-000000000001".parse().unwrap();
    let slow = VolumeSpec { uuid: Some(uuid), ..spec("made-slowly", Some("64K"), "share | volume:pool") };
    let (release, making) = make(&rig, slow);
    assert_eq!((rig.volumes().len(), rig.devices().len(), rig.status().failed.len()), (3, 0, 0));
    rig.keep_account();
    rig.end_sessions();
    // What is its own is taken.
    let refused = |error: ControlError| assert!(matches!(error, ControlError::Changing { .. }), "{error}");
    let twice = rig.create_volume(&volume("made-slowly", "64K", "memory")).unwrap_err();
    assert!(matches!(twice, ControlError::VolumeExists { .. }) && rig.has_volume("made-slowly"), "{twice}");
    let same = rig.create_volume(&VolumeSpec { uuid: Some(uuid), ..volume("x", "64K", "memory") }).unwrap_err();
    assert!(same.to_string().contains("made-slowly has the UUID"), "{same}");
    refused(rig.delete_volume("made-slowly").unwrap_err());
    assert!(matches!(rig.delete_volume("pool"), Err(ControlError::VolumeInStack { .. })));
    // Whoever would wait for the disk's table with everything locked.
    refused(rig.resize_volume("pool", size("1M"), false).unwrap_err());
    refused(rig.delete_volume("other").unwrap_err());
    // All else goes on.
    rig.resize_volume("w", size("128K"), false).unwrap();
    rig.create_volume(&volume("m", "64K", "memory")).unwrap();
    rig.delete_volume("w").unwrap();
    drop(release);
    assert_eq!(making.join().unwrap().unwrap().uuid, uuid.to_string());
    rig.delete_volume("other").unwrap();
    rig.restart();
    assert_eq!(rig.volume("made-slowly").unwrap().state, State::Ready);
    rig.delete_volume("made-slowly").unwrap();
}

#[test]
fn the_file_of_a_volume_that_is_being_made_is_taken() {
    let rig = Rig::new();
    let spec = rig.file_volume("file-made-slowly", "64K");
    let (release, making) = make(&rig, spec.clone());
    let other = rig.create_volume(&VolumeSpec { name: "x".parse().unwrap(), ..spec }).unwrap_err();
    assert!(matches!(other, ControlError::FileTaken { .. }), "{other}");
    drop(release);
    making.join().unwrap().unwrap();
}

#[test]
fn a_volume_that_cannot_be_stored_in_the_end_leaves_nothing() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    let spec = rig.file_volume("not-stored", "64K");
    let (release, making) = make(&rig, spec.clone());
    disk.set_full(true);
    drop(release);
    assert!(matches!(making.join().unwrap(), Err(ControlError::Store(_))));
    assert!(!rig.path("not-stored.img").exists() && !rig.has_volume("not-stored"));
    disk.set_full(false);
    rig.create_volume(&spec).unwrap();
}

#[test]
fn the_end_of_the_daemon_does_not_wait_for_a_volume_that_is_being_made() {
    let rig = Rig::new();
    let (release, making) = make(&rig, rig.file_volume("made-too-late", "64K"));
    rig.shutdown_within(&Limits { changes: Duration::ZERO, ..Limits::USUAL });
    drop(release);
    assert!(matches!(making.join().unwrap(), Err(ControlError::Stopping)));
    assert!(!rig.path("made-too-late.img").exists() && rig.store.load().unwrap().0.is_empty());
}
