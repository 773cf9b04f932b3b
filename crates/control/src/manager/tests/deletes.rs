//! Volumes that are deleted: what may hang holds up nobody else.

use super::{super::moves::Step, twisted::Twist, *};

/// Tells when it is closed whether what exists was locked meanwhile.
struct Witness {
    manager: Weak<Manager>,
    was_locked: Sender<bool>,
}

impl Twist for Witness {}

impl Drop for Witness {
    fn drop(&mut self) {
        let manager = self.manager.upgrade().unwrap();
        // Others lock it for a moment.
        let is_free = (0..1000).any(|_| {
            manager.inner.try_lock().is_ok() || {
                thread::sleep(Duration::from_millis(1));
                false
            }
        });
        self.was_locked.send(!is_free).unwrap();
    }
}

/// A file that hangs takes its time to be closed.
#[test]
fn a_volume_is_closed_when_what_exists_is_not_locked() {
    let rig = Rig::new();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    let (was_locked, told) = channel();
    rig.twist("v", Witness { manager: Arc::downgrade(rig.manager.as_ref().unwrap()), was_locked });
    rig.delete_volume("v").unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false));
}

/// Takes its time to be closed: until it is told that it may.
struct Lingers(Mutex<Receiver<()>>);

impl Twist for Lingers {}

impl Drop for Lingers {
    fn drop(&mut self) {
        let _ = self.0.lock().unwrap().recv();
    }
}

/// With isolation, the changes of others wait for it.
#[test]
fn a_volume_that_goes_to_another_worker_is_closed_while_nothing_is_locked() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let (release, hung) = channel();
    rig.twist("v", Lingers(Mutex::new(hung)));
    let manager = Arc::clone(rig.manager.as_ref().unwrap());
    let step = Step::release(&["v".parse().unwrap()], Duration::from_secs(60));
    let going = thread::spawn(move || manager.step(&step).map(|records| records.len()));
    eventually("a volume that has gone", || rig.volumes().is_empty().then_some(()));
    assert!(!going.is_finished(), "its worker says so when its files are free");
    drop(release);
    assert_eq!(going.join().unwrap().unwrap(), 1);
}

#[test]
fn a_volume_whose_files_are_not_closed_is_deleted_all_the_same() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let (release, hung) = channel();
    rig.twist("v", Lingers(Mutex::new(hung)));
    let manager = Arc::clone(rig.manager.as_ref().unwrap());
    let deleting = thread::spawn(move || manager.delete_volume("v"));
    eventually("a volume that is deleted", || deleting.is_finished().then_some(()));
    deleting.join().unwrap().unwrap();
    assert!(rig.volumes().is_empty() && rig.store.load().unwrap().0.is_empty());
    let is_free = || fs::File::open(rig.path("v.img")).unwrap().try_lock().is_ok();
    assert!(!is_free(), "it is not closed");
    drop(release);
    eventually("a file that is closed", || is_free().then_some(()));
}
