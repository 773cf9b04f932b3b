use std::{
    fs,
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::BlockSize;
use millrace_driver::{Controller, Options};
use millrace_engine::ShardConfig;
use tempfile::TempDir;

use super::*;
use crate::{
    Class, Size,
    model::{AttachSpec, DeviceSpec, VolumeSpec},
    store::{NamespaceRecord, StoreError, tests::FullDisk},
};

mod apps;
mod copies;
mod creations;
mod deletes;
mod disks;
mod ends;
mod exchanges;
mod groups;
mod guests;
mod migrations;
mod protection;
mod resizes;
mod restarts;
mod sessions;
mod shares;
mod stacks;
mod traces;
mod twisted;
mod virtio;

pub(crate) use guests::HUNG;
pub(super) use guests::before_look;

/// The longest wait before a hang is called one: far longer than anything takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Waits until `reached` gives something.
pub(crate) fn eventually<T>(what: &str, mut reached: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = reached() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A manager in a directory of its own.
struct Rig {
    directory: TempDir,
    manager: Option<Arc<Manager>>,
}

impl Rig {
    fn new() -> Self {
        let mut rig = Self { directory: tempfile::tempdir().unwrap(), manager: None };
        rig.start();
        rig
    }

    fn on(disk: &FullDisk) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let manager = start(directory.path(), disk.store(), 1, Placement::Device, None).unwrap();
        Self { directory, manager: Some(manager) }
    }

    fn with_placement(shards: usize, placement: Placement) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let manager = start(directory.path(), store, shards, placement, None).unwrap();
        Self { directory, manager: Some(manager) }
    }

    fn try_start(&mut self, config: Option<&str>) -> Result<(), RestoreError> {
        assert!(self.manager.is_none(), "stopped before it starts again");
        let declared = config.map(|text| {
            let path = self.path("m.toml");
            fs::write(&path, text).unwrap();
            Declared::read(&path).unwrap()
        });
        let store = open_store(self.directory.path());
        self.manager = Some(start(self.directory.path(), store, 1, Placement::Device, declared.as_ref())?);
        Ok(())
    }

    fn start(&mut self) {
        self.try_start(None).unwrap();
    }

    fn stop(&mut self) {
        let manager = self.manager.take().unwrap();
        manager.shutdown();
        // The thread that answers guests may hold it for a moment more.
        let mut shared = Some(manager);
        drop(eventually("a manager that nobody else holds", || match Arc::try_unwrap(shared.take()?) {
            Ok(manager) => Some(manager),
            Err(manager) => {
                shared = Some(manager);
                None
            }
        }));
    }

    fn restart(&mut self) {
        self.stop();
        self.start();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn file_volume(&self, name: &str, size: &str) -> VolumeSpec {
        volume(name, size, &format!("file:{}", self.path(&format!("{name}.img")).display()))
    }
}

impl std::ops::Deref for Rig {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        self.manager.as_ref().unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(manager) = &self.manager {
            manager.shutdown();
        }
    }
}

/// The state of the manager before this one: a program that another test starts has all descriptors for a moment, locks included.
fn open_store(directory: &Path) -> Store {
    eventually("a state that nobody else holds", || match Store::open(directory) {
        Err(StoreError::InUse { .. }) => None,
        result => Some(result.unwrap()),
    })
}

/// A manager with one shard and its state in `directory`.
pub(crate) fn manager_in(directory: &Path) -> Arc<Manager> {
    start(directory, Store::open(directory).unwrap(), 1, Placement::Device, None).unwrap()
}

fn start(
    directory: &Path,
    store: Store,
    shards: usize,
    placement: Placement,
    declared: Option<&Declared>,
) -> Result<Arc<Manager>, RestoreError> {
    let settings = Settings {
        run_dir: directory.to_owned(),
        state_dir: Some(directory.to_owned()),
        placement,
        keeper: None,
        cell: None,
        apps: declared.map(|declared| declared.apps.clone()).unwrap_or_default(),
        card: None,
        socket_group: None,
    };
    let engine = Engine::start((0..shards).map(|index| ShardConfig::new(index, None)).collect()).unwrap();
    Manager::start(settings, store, engine, declared)
}

fn volume(name: &str, size: &str, backend: &str) -> VolumeSpec {
    serde_json::from_str(&format!(r#"{{"name":"{name}","size":"{size}","backend":"{backend}"}}"#)).unwrap()
}

fn device(name: &str, nvme: &str) -> DeviceSpec {
    serde_json::from_str(&format!(r#"{{"name":"{name}","nvme":{nvme}}}"#)).unwrap()
}

fn attach(volume: &str, nsid: Option<u32>) -> AttachSpec {
    AttachSpec { volume: volume.parse().unwrap(), nsid, read_only: false }
}

fn size(text: &str) -> Size {
    text.parse().unwrap()
}

/// Everything that is shown, less what changes by itself.
fn picture(manager: &Manager) -> String {
    let mut volumes = manager.volumes();
    for volume in &mut volumes {
        volume.allocated = None;
    }
    serde_json::to_string(&(volumes, manager.devices())).unwrap()
}

/// The device's guest, as our own driver.
fn guest(rig: &Rig, device: &str) -> Controller {
    Controller::connect(&rig.path(&format!("{device}.sock")), &Options::default()).unwrap()
}

fn nsids(guest: &mut Controller) -> Vec<u32> {
    guest.active_namespaces().unwrap().into_iter().map(|nsid| nsid.0).collect()
}

#[test]
fn an_image_that_is_not_raw_is_told_when_its_volume_is_made() {
    let rig = Rig::new();
    let mut image = vec![0; 1 << 20];
    image[..4].copy_from_slice(b"QFI\xfb");
    fs::write(rig.path("a.img"), &image).unwrap();
    let told = rig.create_volume(&rig.file_volume("a", "1M")).unwrap().warning.unwrap();
    assert!(told.contains("a.img begins as a qcow2 image"), "{told}");
    assert_eq!(rig.volume("a").unwrap().warning, None, "once");
    assert_eq!(rig.create_volume(&rig.file_volume("b", "1M")).unwrap().warning, None);
    assert!(fs::read(rig.path("a.img")).unwrap() == image);
}

#[test]
fn a_file_that_is_longer_is_told_when_its_volume_is_made() {
    let rig = Rig::new();
    fs::write(rig.path("a.img"), vec![1; 1 << 20]).unwrap();
    let told = rig.create_volume(&rig.file_volume("a", "64K")).unwrap().warning.unwrap();
    assert!(told.contains("a.img has 1M, and the volume 64K of it"), "{told}");
    assert_eq!(fs::metadata(rig.path("a.img")).unwrap().len(), 1 << 20, "and nothing is cut off");
}

#[test]
fn volumes_come_and_go() {
    let rig = Rig::new();
    let view = rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    assert_eq!((view.size, view.state, view.attached_to.len()), (Size(1 << 20), State::Ready, 0));
    let view = rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    assert_eq!(fs::metadata(rig.path("f.img")).unwrap().len(), 64 << 10);
    assert_eq!(rig.volume("f").unwrap().uuid, view.uuid);
    rig.delete_volume("f").unwrap();
    assert!(rig.path("f.img").exists(), "the operator's file stays");
    assert!(matches!(rig.volume("f"), Err(ControlError::NoVolume { name }) if name == "f"));
    assert!(matches!(rig.delete_volume("f"), Err(ControlError::NoVolume { .. })));
    assert_eq!(rig.volumes().len(), 1);
    // Without a size, a file has its own.
    let spec = VolumeSpec { size: None, ..rig.file_volume("f", "1") };
    assert_eq!(rig.create_volume(&spec).unwrap().size, Size(64 << 10));
}

#[test]
fn a_refused_volume_leaves_nothing() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    let before = picture(&rig);
    let refused = |spec: &VolumeSpec| rig.create_volume(spec).unwrap_err();
    assert!(matches!(refused(&volume("f", "1M", "memory")), ControlError::VolumeExists { .. }));
    let same_file = VolumeSpec { name: "g".parse().unwrap(), ..rig.file_volume("f", "64K") };
    assert!(matches!(refused(&same_file), ControlError::FileTaken { other, .. } if other.as_str() == "f"));
    fs::hard_link(rig.path("f.img"), rig.path("link.img")).unwrap();
    assert!(matches!(refused(&rig.file_volume("link", "64K")), ControlError::FileTaken { .. }));
    let error = refused(&VolumeSpec { size: None, ..rig.file_volume("missing", "1") });
    assert!(error.to_string().contains("missing.img") && error.advice().unwrap().contains("with a size"), "{error}");
    assert!(matches!(refused(&rig.file_volume("odd", "1000")), ControlError::Volume(_)));
    assert!(!rig.path("odd.img").exists());
    assert!(
        refused(&volume("n", "1M", &format!("file:{}", rig.path("no/such/dir.img").display())))
            .to_string()
            .contains("dir.img")
    );
    assert!(refused(&volume("d", "1M", &format!("file:{}", rig.directory.path().display()))).class() == Class::Invalid);
    assert_eq!(picture(&rig), before);
}

#[test]
fn another_process_has_the_file() {
    let rig = Rig::new();
    let file = fs::File::create(rig.path("f.img")).unwrap();
    file.set_len(1 << 20).unwrap();
    file.lock().unwrap();
    let error = rig.create_volume(&rig.file_volume("f", "1M")).unwrap_err();
    assert!(error.class() == Class::Conflict && error.to_string().contains("in use by another"), "{error}");
    assert!(rig.path("f.img").exists());
    file.unlock().unwrap();
    rig.create_volume(&rig.file_volume("f", "1M")).unwrap();
}

#[test]
fn a_store_that_fails_undoes_every_change() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_volume(&volume("m", "64K", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let mut guest = guest(&rig, "d");
    let before = picture(&rig);
    disk.set_full(true);
    let failed = |result: Result<(), ControlError>| assert!(matches!(result, Err(ControlError::Store(_))), "{result:?}");
    failed(rig.create_volume(&rig.file_volume("g", "64K")).map(drop));
    assert!(!rig.path("g.img").exists(), "a file that was made for it is gone");
    fs::write(rig.path("h.img"), [7; 4096]).unwrap();
    failed(rig.create_volume(&rig.file_volume("h", "64K")).map(drop));
    assert_eq!(fs::read(rig.path("h.img")).unwrap(), [7; 4096], "a file that was lengthened for it is as before");
    failed(rig.delete_volume("m"));
    failed(rig.resize_volume("f", size("128K"), false).map(drop));
    failed(rig.resize_volume("f", size("32K"), true).map(drop));
    assert_eq!(fs::metadata(rig.path("f.img")).unwrap().len(), 64 << 10);
    failed(rig.create_device(&device("e", "{}")).map(drop));
    assert!(!rig.path("e.sock").exists());
    failed(rig.delete_device("d"));
    failed(rig.attach("d", &attach("m", None)).map(drop));
    failed(rig.detach("d", 1));
    assert_eq!(picture(&rig), before);
    assert_eq!(nsids(&mut guest), [1]);
    disk.set_full(false);
    rig.attach("d", &attach("m", None)).unwrap();
    assert_eq!(nsids(&mut guest), [1, 2]);
}

#[test]
fn a_volume_that_is_attached_stays() {
    let rig = Rig::new();
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    for name in ["d", "e"] {
        rig.create_device(&device(name, "{}")).unwrap();
        rig.attach(name, &attach("a", Some(3))).unwrap();
    }
    let error = rig.delete_volume("a").unwrap_err();
    assert_eq!(error.to_string(), "volume a is attached to d as namespace 3, e as namespace 3");
    assert!(error.advice().unwrap().contains("\"millrace device detach d 3\", \"millrace device detach e 3\""));
    rig.detach("d", 3).unwrap();
    rig.delete_device("e").unwrap();
    rig.delete_volume("a").unwrap();
}

#[test]
fn attachments_are_checked() {
    let rig = Rig::new();
    for name in ["a", "b", "c"] {
        rig.create_volume(&volume(name, "1M", "memory")).unwrap();
    }
    rig.create_device(&device("d", r#"{"namespaces":2}"#)).unwrap();
    let refused = |device: &str, spec: AttachSpec| rig.attach(device, &spec).unwrap_err();
    assert!(matches!(refused("d", attach("none", None)), ControlError::NoVolume { .. }));
    assert!(matches!(refused("none", attach("a", None)), ControlError::NoDevice { .. }));
    assert!(matches!(refused("d", attach("a", Some(0))), ControlError::NsidRange { nsid: 0, largest: 2, .. }));
    assert!(matches!(refused("d", attach("a", Some(3))), ControlError::NsidRange { nsid: 3, .. }));
    assert_eq!(rig.attach("d", &attach("a", Some(2))).unwrap().nsid, 2);
    assert!(matches!(refused("d", attach("b", Some(2))), ControlError::NsidTaken { volume, .. } if volume.as_str() == "a"));
    assert!(matches!(refused("d", attach("a", None)), ControlError::AttachedAlready { nsid: 2, .. }));
    assert_eq!(rig.attach("d", &attach("b", None)).unwrap().nsid, 1);
    assert!(matches!(refused("d", attach("c", None)), ControlError::NoNsidFree { largest: 2, .. }));
    assert!(matches!(rig.detach("d", 7), Err(ControlError::NotAttached { nsid: 7, .. })));
    rig.detach("d", 2).unwrap();
    assert!(matches!(rig.detach("d", 2), Err(ControlError::NotAttached { nsid: 2, .. })));
    let listed: Vec<_> = rig.device("d").unwrap().namespaces.iter().map(|ns| (ns.nsid, ns.volume.to_string())).collect();
    assert_eq!(listed, [(1, "b".to_owned())]);
}

#[test]
fn a_shard_that_hangs_keeps_nobody_else_waiting() {
    let rig = Rig::with_placement(2, Placement::Device);
    let stuck = rig.create_device(&device("stuck", "{}")).unwrap().shard.unwrap();
    let other = rig.create_device(&device("other", "{}")).unwrap().shard.unwrap();
    assert_ne!(stuck, other);
    let done = Arc::new(AtomicBool::new(false));
    let (manager, its_done) = (rig.manager.clone().unwrap(), Arc::clone(&done));
    // It waits for what the manager locks, again and again: whoever waited for the shard with that in hand would wait for ever.
    let hang = move || while !its_done.load(Ordering::Relaxed) && !manager.volumes().is_empty() {};
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    rig.shards[stuck].call(move |_| hang()).unwrap();
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || {
        manager.end_sessions();
        tell.send((manager.devices(), manager.device("stuck"), manager.status())).unwrap();
    });
    let (devices, shown, status) = told.recv_timeout(PATIENCE).expect("what the others are doing");
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!((names, devices[1].state), (vec!["other", "stuck"], State::Failed));
    let is_ready = |name: &str| (rig.device(name).unwrap().state == State::Ready).then_some(());
    // On a busy machine the other's answer may have been late as well.
    eventually("the other device's answer", || is_ready("other"));
    let reason = shown.unwrap().reason.unwrap();
    assert!(reason.contains(&format!("shard {stuck} has been busy")), "{reason}");
    assert!(status.failed.iter().any(|failed| failed.contains("stuck")), "{:?}", status.failed);
    done.store(true, Ordering::Relaxed);
    eventually("the stuck device's answer", || is_ready("stuck"));
}

/// Has a shard hang until what is returned is dropped, and be known for it: whoever is the first to wait waits for long.
fn hang(rig: &Rig, shard: usize) -> Sender<()> {
    let (release, hung) = channel();
    rig.shards[shard]
        .call(move |_| {
            let _ = hung.recv();
        })
        .unwrap();
    assert!(rig.shards[shard].call_within(Duration::ZERO, |_| ()).is_err());
    release
}

/// The shards of [`two_devices`].
const STUCK: usize = 0;
const OTHER: usize = 1;

/// Two devices, each with a shard of its own.
fn two_devices() -> Rig {
    let rig = Rig::with_placement(2, Placement::Device);
    for (name, shard) in [("stuck", STUCK), ("other", OTHER)] {
        rig.create_device(&DeviceSpec { shard: Some(shard), ..device(name, "{}") }).unwrap();
    }
    rig
}

#[test]
fn a_device_whose_shard_hangs_stays_as_it_is_and_the_others_are_changed() {
    let rig = two_devices();
    for name in ["v", "w"] {
        rig.create_volume(&volume(name, "1M", "memory")).unwrap();
    }
    rig.attach("stuck", &attach("v", Some(3))).unwrap();
    let before = picture(&rig);
    let release = hang(&rig, STUCK);
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || {
        let refused = [
            manager.delete_device("stuck"),
            manager.attach("stuck", &attach("w", None)).map(drop),
            manager.detach("stuck", 3),
            manager.save_device_state("stuck").map(drop),
            manager.restore_device_state("stuck", Vec::new()),
            manager.start_trace(&Target::Device("stuck".to_owned()), None).map(drop),
        ];
        let traced = manager.start_trace(&Target::Device("other".to_owned()), None).map(drop);
        let third = manager.create_device(&device("third", "{}")).unwrap();
        manager.attach("third", &attach("w", None)).unwrap();
        manager.delete_device("third").unwrap();
        tell.send((refused, traced, third)).unwrap();
    });
    let (refused, traced, third) = told.recv_timeout(PATIENCE).expect("what became of the changes");
    for (at, result) in refused.iter().enumerate() {
        assert!(matches!(result, Err(ControlError::Silent { .. })), "{at}: {result:?}");
    }
    assert!(traced.is_ok(), "{traced:?}");
    assert_eq!((third.shard, third.state), (Some(OTHER), State::Ready), "not where nobody answers");
    drop(release);
    eventually("what there was", || (picture(&rig) == before).then_some(()));
    assert_eq!(nsids(&mut guest(&rig, "stuck")), [3], "nothing was done late");
    rig.delete_device("stuck").unwrap();
}

#[test]
fn a_device_that_goes_while_its_shard_hangs_is_gone_when_that_is_back() {
    let rig = two_devices();
    let gone = rig.peek().devices.remove("stuck").unwrap();
    let release = hang(&rig, STUCK);
    rig.peek().retire(gone);
    assert!(!rig.path("stuck.sock").exists());
    rig.bury();
    assert_eq!(rig.peek().retiring.len(), 1, "its shard has it still");
    // Another one of its name is none of its business.
    assert_eq!(rig.create_device(&device("stuck", "{}")).unwrap().shard, Some(OTHER));
    drop(release);
    eventually("its end", || {
        rig.bury();
        rig.peek().retiring.is_empty().then_some(())
    });
    eventually("a shard without devices", || (rig.shards[STUCK].stats().devices == 0).then_some(()));
    assert!(rig.path("stuck.sock").exists() && rig.has_device("stuck"));
}

#[test]
fn a_device_whose_shard_hangs_keeps_no_start_waiting() {
    let rig = two_devices();
    let release = hang(&rig, STUCK);
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || {
        let resumed: Vec<_> = manager.peek().devices.values().map(|device| device.live.as_ref().unwrap().resume()).collect();
        tell.send(resumed).unwrap();
    });
    let resumed = told.recv_timeout(PATIENCE).expect("that the daemon starts");
    assert!(matches!(resumed[..], [Ok(()), Err(ControlError::Silent { .. })]), "{resumed:?}");
    drop(release);
    eventually("its shard", || rig.delete_device("stuck").ok());
}

/// A pair may have been begun there: who else shows the volume must not come before it.
#[test]
fn what_a_hanging_shard_showed_it_shows_again_before_anybody_goes_on() {
    let rig = two_devices();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    let at = NamespaceRecord { nsid: 3, volume: "v".parse().unwrap(), read_only: false, attached: true };
    let release = hang(&rig, STUCK);
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || {
        let inner = manager.peek();
        let live = inner.device("stuck").unwrap().live().unwrap();
        // At once: nobody waits for a shard that is known to hang.
        let first = inner.show_again(live, &at);
        tell.send(first).unwrap();
        tell.send(inner.show_surely(live, &at)).unwrap();
    });
    let first = told.recv_timeout(PATIENCE).expect("what the shard did not do");
    assert!(matches!(first, Err(ControlError::Silent { .. })), "{first:?}");
    drop(release);
    told.recv_timeout(PATIENCE).expect("that it is shown").unwrap();
    assert_eq!(nsids(&mut guest(&rig, "stuck")), [3]);
}

#[test]
fn a_volume_that_a_hanging_shard_shows_is_resized_and_the_guest_learns_of_it() {
    let rig = two_devices();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    rig.attach("stuck", &attach("v", None)).unwrap();
    let release = hang(&rig, STUCK);
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || tell.send(manager.resize_volume("v", size("2M"), false).map(|view| view.size)).unwrap());
    let resized = told.recv_timeout(PATIENCE).expect("the volume's size");
    assert_eq!(resized.ok(), Some(size("2M")));
    drop(release);
    let mut guest = guest(&rig, "stuck");
    let blocks = guest.namespace(millrace_driver::spec::NamespaceId(1)).unwrap().size().0;
    assert_eq!(blocks, (2 << 20) / 512);
}

#[test]
fn a_shard_that_hangs_does_not_keep_the_daemon_from_its_end() {
    let rig = two_devices();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.attach("other", &attach("f", None)).unwrap();
    // The one that would be asked to flush, too.
    let release = hang(&rig, STUCK);
    let (manager, (tell, told)) = (rig.manager.clone().unwrap(), sync_channel(1));
    thread::spawn(move || {
        manager.shutdown();
        tell.send(()).unwrap();
    });
    told.recv_timeout(PATIENCE).expect("the end");
    let volumes = rig.store.load().unwrap().0;
    assert!(!volumes[0].untold, "it was flushed");
    drop(release);
}

#[test]
fn devices_are_checked() {
    let rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    assert!(matches!(rig.create_device(&device("d", "{}")), Err(ControlError::DeviceExists { .. })));
    let same_socket = DeviceSpec { socket: Some(rig.path("d.sock")), ..device("e", "{}") };
    assert!(rig.create_device(&same_socket).unwrap_err().to_string().contains("that of device d"));
    fs::write(rig.path("file"), "precious").unwrap();
    let on_file = DeviceSpec { socket: Some(rig.path("file")), ..device("e", "{}") };
    assert!(rig.create_device(&on_file).unwrap_err().class() == Class::Conflict);
    assert_eq!(fs::read(rig.path("file")).unwrap(), b"precious");
    let nowhere = DeviceSpec { socket: Some(rig.path("no/dir/x.sock")), ..device("e", "{}") };
    assert!(rig.create_device(&nowhere).unwrap_err().to_string().contains("no/dir/x.sock"));
    let too_long = DeviceSpec { socket: Some(rig.path(&"x".repeat(120))), ..device("e", "{}") };
    assert!(rig.create_device(&too_long).unwrap_err().class() == Class::Invalid);
    assert_eq!(rig.devices().len(), 1);
    rig.delete_device("d").unwrap();
    assert!(!rig.path("d.sock").exists());
    assert!(matches!(rig.delete_device("d"), Err(ControlError::NoDevice { .. })));
}

#[test]
fn the_uuid_of_a_device_whose_commands_go_on_is_taken() {
    let rig = Rig::new();
    let uuid = "1234abcd-0000-4000-8000-000000000000";
    rig.create_device(&device("d", &format!(r#"{{"uuid":"{uuid}"}}"#))).unwrap();
    let mut inner = rig.peek();
    let old = inner.devices.remove("d").unwrap();
    let (uuid, name) = (old.record.uuid, old.record.spec.name.clone());
    assert_eq!(inner.check_unused("device", &name, uuid).ok(), Some(()));
    // As if a command of it had not finished.
    inner.retiring.push((uuid, name.clone(), old.live.unwrap()));
    let refused = inner.check_unused("device", &name, uuid).unwrap_err().to_string();
    assert!(refused.contains("device d, which is deleted") && refused.contains("not finished"), "{refused}");
    inner.bury();
    assert_eq!(inner.check_unused("device", &name, uuid).ok(), Some(()));
}

/// What fits at another time, or when something else is other than it is now, is a conflict; what is not there is missing.
#[test]
fn what_may_be_asked_for_again_is_a_conflict() {
    let rig = Rig::new();
    rig.create_volume(&volume("m", "64K", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("m", None)).unwrap();
    let over = |stack: &str| {
        let spec = VolumeSpec { stack: stack.parse().unwrap(), ..volume("v", "64K", "memory") };
        rig.create_volume(&spec).unwrap_err()
    };
    let uuid = Some(rig.volume("m").unwrap().uuid.parse().unwrap());
    let same_uuid = VolumeSpec { uuid, ..volume("w", "64K", "memory") };
    let same_socket = DeviceSpec { socket: Some(rig.path("d.sock")), ..device("e", "{}") };
    for (error, class, code) in [
        (over("concat(volume:m)"), Class::Conflict, "not-now"),
        (over("concat(volume:none)"), Class::Missing, "no-volume"),
        (rig.create_volume(&same_uuid).unwrap_err(), Class::Conflict, "not-now"),
        (rig.create_device(&same_socket).unwrap_err(), Class::Conflict, "not-now"),
        (rig.cancel_migration("m").unwrap_err(), Class::Conflict, "not-now"),
    ] {
        assert_eq!((error.class(), error.code()), (class, code), "{error}");
    }
    // The system has no address space for it.
    let error = rig.create_volume(&volume("large", "4E", "memory")).unwrap_err();
    assert!(error.class() == Class::Failed && error.to_string().contains("4611686018427387904 bytes of memory"), "{error}");
}

/// To guests it means that there is none, and at the keeper it is the daemon itself.
#[test]
fn nothing_has_the_uuid_of_zeroes() {
    let rig = Rig::new();
    let nil = Uuid::nil();
    let spec = VolumeSpec { uuid: Some(nil), ..volume("v", "1M", "memory") };
    let refused =
        [rig.create_volume(&spec).map(drop), rig.create_device(&device("d", &format!(r#"{{"uuid":"{nil}"}}"#))).map(drop)];
    for error in refused.map(Result::unwrap_err) {
        assert!(error.class() == Class::Invalid && error.to_string().contains("the UUID of zeroes"), "{error}");
    }
    assert!(rig.volumes().is_empty() && rig.devices().is_empty());
}

#[test]
fn memory_that_nobody_sees_goes_nowhere() {
    let (rig, other) = (Rig::new(), Rig::new());
    let (look, limit) = (Step::Look { volume: "m".to_owned() }, Duration::from_secs(600));
    rig.create_volume(&volume("m", "1M", "memory")).unwrap();
    let records = rig.step(&look).unwrap();
    let names: Vec<Name> = records.iter().map(|record| record.spec.name.clone()).collect();
    rig.peek().volumes.get_mut("m").unwrap().live = Err("no descriptors are left".to_owned());
    for step in [&look, &Step::release(&names, limit)] {
        let refused = rig.step(step).unwrap_err().to_string();
        assert!(refused.contains("in the memory of that worker"), "{refused}");
    }
    assert!(rig.has_volume("m"));
    // What has come holds nothing, and goes nowhere else before it is settled who has it.
    other.step(&Step::Receive { records }).unwrap();
    assert!(other.has_received());
    let refused = other.step(&look).unwrap_err().to_string();
    assert!(refused.contains("not finished"), "{refused}");
    let late = other.step(&Step::Release { volumes: names.clone(), before: 0, looked: Vec::new() }).unwrap_err().to_string();
    assert!(late.contains("too late") && other.has_volume("m"), "{late}");
    other.step(&Step::release(&names, limit)).unwrap();
    assert!(!other.has_volume("m"));
}

/// Another worker may have it open: a start in the middle leaves it alone.
#[test]
fn what_was_received_is_not_opened_by_a_start() {
    let (rig, mut other) = (Rig::new(), Rig::new());
    let limit = Duration::from_secs(600);
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let records = rig.step(&Step::Look { volume: "v".to_owned() }).unwrap();
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    other.restart();
    let view = other.volume("v").unwrap();
    assert_eq!((view.state, view.reason.as_deref()), (State::Failed, Some(RECEIVED)), "it was not tried");
    assert!(other.has_received());
    rig.step(&Step::release_looked(&records, limit)).unwrap();
    other.step(&Step::Open { volumes: vec!["v".parse().unwrap()], closed: Vec::new() }).unwrap();
    assert_eq!(other.volume("v").unwrap().state, State::Ready);
    other.restart();
    assert_eq!((other.volume("v").unwrap().state, other.has_received()), (State::Ready, false));
}

#[test]
fn what_was_changed_since_it_was_looked_at_does_not_go() {
    let (rig, other) = (Rig::new(), Rig::new());
    let (look, limit) = (Step::Look { volume: "v".to_owned() }, Duration::from_secs(600));
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let first = rig.step(&look).unwrap();
    other.step(&Step::Receive { records: first.clone() }).unwrap();
    rig.resize_volume("v", size("128K"), false).unwrap();
    let refused = rig.step(&Step::release_looked(&first, limit)).unwrap_err().to_string();
    assert!(refused.contains("changed meanwhile"), "{refused}");
    assert_eq!(rig.volume("v").unwrap().state, State::Ready);
    // Something is made of it.
    let second = rig.step(&look).unwrap();
    rig.create_volume(&VolumeSpec {
        stack: "throttle(iops=9) | volume:v".parse().unwrap(),
        ..volume("w", "128K", "memory")
    })
    .unwrap();
    assert!(rig.step(&Step::release_looked(&second, limit)).is_err());
    let alone = Step::release(&["v".parse().unwrap()], limit);
    let refused = rig.step(&alone).unwrap_err().to_string();
    assert!(refused.contains("volume w is made of it"), "{refused}");
    assert_eq!(rig.volume("w").unwrap().state, State::Ready);
    rig.delete_volume("w").unwrap();
    // What comes again is what counts.
    other.step(&Step::Receive { records: second.clone() }).unwrap();
    rig.step(&Step::release_looked(&second, limit)).unwrap();
    other.step(&Step::Open { volumes: vec!["v".parse().unwrap()], closed: Vec::new() }).unwrap();
    assert_eq!((other.volume("v").unwrap().state, other.volume("v").unwrap().size), (State::Ready, size("128K")));
}

#[test]
fn read_only_volumes_share_a_file_and_keep_their_size() {
    let rig = Rig::new();
    fs::write(rig.path("f.img"), vec![7; 8192]).unwrap();
    for name in ["a", "b"] {
        let spec = VolumeSpec { read_only: true, name: name.parse().unwrap(), ..rig.file_volume("f", "8K") };
        assert!(rig.create_volume(&spec).unwrap().read_only);
    }
    let writer = rig.create_volume(&rig.file_volume("f", "8K")).unwrap_err();
    assert!(matches!(writer, ControlError::FileTaken { .. }), "{writer}");
    assert!(matches!(rig.resize_volume("a", size("4K"), false), Err(ControlError::ReadOnly { .. })));
    rig.create_device(&device("d", "{}")).unwrap();
    assert!(rig.attach("d", &attach("a", None)).unwrap().read_only);
}

#[test]
fn placement_by_device_spreads_and_by_disk_gathers() {
    let shards = |rig: &Rig| rig.devices().iter().map(|device| device.shard.unwrap()).collect::<Vec<_>>();
    let fill = |rig: &Rig| {
        for name in ["a", "b", "c"] {
            rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
            rig.create_device(&device(name, "{}")).unwrap();
            rig.attach(name, &attach(name, None)).unwrap();
        }
    };
    let spread = Rig::with_placement(2, Placement::Device);
    fill(&spread);
    assert_eq!(shards(&spread), [0, 1, 0]);
    let gathered = Rig::with_placement(2, Placement::Disk);
    fill(&gathered);
    assert_eq!(shards(&gathered), [0, 0, 0]);
    let fixed = DeviceSpec { shard: Some(1), ..device("fixed", "{}") };
    assert_eq!(gathered.create_device(&fixed).unwrap().shard, Some(1));
    assert!(gathered.create_device(&DeviceSpec { shard: Some(2), ..device("beyond", "{}") }).is_err());
}

/// Its path is not looked at again: the file system may have gone since.
#[test]
fn a_file_is_known_by_what_it_was_when_it_was_opened() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    let stack = format!("throttle(iops=100000) | file:{}", rig.path("f.img").display()).parse().unwrap();
    rig.change_stack_from("f", None, &stack, false).unwrap();
    fs::rename(rig.path("f.img"), rig.path("moved.img")).unwrap();
    fs::write(rig.path("f.img"), vec![0; 64 << 10]).unwrap();
    fs::hard_link(rig.path("f.img"), rig.path("link.img")).unwrap();
    // The next start would open it for both.
    let same_path = VolumeSpec { name: "g".parse().unwrap(), ..rig.file_volume("f", "64K") };
    for spec in [rig.file_volume("moved", "64K"), same_path] {
        let refused = rig.create_volume(&spec).unwrap_err();
        assert!(matches!(&refused, ControlError::FileTaken { other, .. } if other.as_str() == "f"), "{refused}");
    }
    rig.create_volume(&rig.file_volume("link", "64K")).unwrap();
}

/// Nothing locks what could not be opened.
#[test]
fn a_file_is_known_by_another_path_though_its_volume_could_not_be_opened() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    let mirror = format!("mirror(file:{}, file:{})", rig.path("a").display(), rig.path("b").display());
    rig.create_volume(&stacks::spec("m", Some("1M"), &mirror)).unwrap();
    rig.stop();
    for short in ["f.img", "b"] {
        fs::File::options().write(true).open(rig.path(short)).unwrap().set_len(4096).unwrap();
        fs::hard_link(rig.path(short), rig.path(&format!("link-{short}"))).unwrap();
    }
    rig.start();
    assert_eq!(rig.volume("f").unwrap().state, State::Failed);
    for (short, volume) in [("f.img", "f"), ("b", "m")] {
        let path = rig.path(&format!("link-{short}"));
        let stack = format!("file:{}", path.display());
        let refused = rig.create_volume(&stacks::spec("new", Some("64K"), &stack)).unwrap_err();
        assert!(matches!(&refused, ControlError::FileTaken { other, .. } if other.as_str() == volume), "{refused}");
        assert_eq!(fs::metadata(&path).unwrap().len(), 4096, "nothing was done to it");
    }
}

#[test]
fn devices_of_a_disk_meet_though_its_files_cannot_be_seen() {
    let rig = Rig::with_placement(2, Placement::Disk);
    for name in ["a", "b"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_device(&DeviceSpec { shard: Some(1), ..device("a", "{}") }).unwrap();
    rig.attach("a", &attach("a", None)).unwrap();
    for name in ["a.img", "b.img"] {
        fs::rename(rig.path(name), rig.path(&format!("away-{name}"))).unwrap();
    }
    rig.create_device(&device("b", "{}")).unwrap();
    rig.attach("b", &attach("b", None)).unwrap();
    assert_eq!(rig.device("b").unwrap().shard, Some(1));
}

#[test]
fn nothing_changes_after_the_end() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.shutdown();
    assert!(!rig.path("d.sock").exists());
    assert!(matches!(rig.create_volume(&volume("a", "1M", "memory")), Err(ControlError::Stopping)));
    assert!(matches!(rig.delete_volume("f"), Err(ControlError::Stopping)));
    rig.shutdown();
}
