//! What guests see and do: through a real device, by our own driver.

use millrace_block::{Lba, VolumeError};
use millrace_driver::{
    Command, QueueError, QueueOptions,
    spec::{
        NamespaceId,
        identify::{Cns, IdentifyNamespace},
    },
};
use millrace_frontends::nvme::{Host, HostReply, NewFormat, Status};

use super::{stacks::spec, *};
use crate::{
    manager::host::{Request, Turn},
    store::Changes,
};

/// Paths whose file systems do not answer, until somebody says so.
pub(crate) static HUNG: Mutex<BTreeMap<PathBuf, Receiver<()>>> = Mutex::new(BTreeMap::new());

/// Whoever looks first at a path that hangs waits.
pub(in crate::manager) fn before_look(path: &Path) {
    let hung = HUNG.lock().unwrap().remove(path);
    if let Some(hung) = hung {
        let _ = hung.recv();
    }
}

fn blocks(guest: &mut Controller, nsid: u32) -> u64 {
    guest.namespace(NamespaceId(nsid)).unwrap().size().0
}

#[test]
fn changes_reach_a_running_guest() {
    let rig = Rig::new();
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    rig.create_volume(&rig.file_volume("f", "1M")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    let mut guest = guest(&rig, "d");
    assert!(nsids(&mut guest).is_empty());
    rig.attach("d", &attach("a", None)).unwrap();
    rig.attach("d", &attach("f", Some(7))).unwrap();
    assert_eq!(nsids(&mut guest), [1, 7]);
    assert_eq!(blocks(&mut guest, 7), 2048);
    rig.resize_volume("f", size("2M"), false).unwrap();
    assert_eq!(blocks(&mut guest, 7), 4096);
    rig.resize_volume("f", size("512K"), true).unwrap();
    assert_eq!((blocks(&mut guest, 7), rig.volume("f").unwrap().size), (1024, Size(512 << 10)));
    rig.detach("d", 1).unwrap();
    assert_eq!(nsids(&mut guest), [7]);
    let view = rig.device("d").unwrap();
    assert_eq!((view.connected, view.phase.as_deref()), (true, Some("ready")));
    drop(guest);
    rig.delete_device("d").unwrap();
    rig.delete_volume("f").unwrap();
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    for (text, why) in
        [("0", "smaller than one block"), ("100", "of 512 bytes"), ("1000", "not a multiple of the block size, 512")]
    {
        let error = rig.resize_volume("f", size(text), false).unwrap_err();
        assert!(matches!(error, ControlError::BadSize { .. }) && error.to_string().contains(why), "{error}");
    }
    assert!(rig.resize_volume("f", size("15E"), false).is_err());
    assert_eq!(rig.volume("f").unwrap().size, Size(64 << 10));
    assert_eq!(fs::metadata(rig.path("f.img")).unwrap().len(), 64 << 10);
    assert!(matches!(rig.resize_volume("g", size("1M"), false), Err(ControlError::NoVolume { .. })));
}

#[test]
fn what_a_guest_flushed_outlives_the_daemon() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "1M")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let mut disk = guest(&rig, "d");
    let namespace = disk.namespace(NamespaceId(1)).unwrap();
    let mut queue = disk.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = disk.memory().alloc(4096).unwrap();
    buffer.write_at(0, &[0x5a; 4096]);
    queue.execute(&namespace.write(Lba(8), buffer.slice(0, 4096)).unwrap()).unwrap();
    queue.execute(&namespace.flush()).unwrap();
    rig.stop();
    drop((queue, disk));
    rig.start();
    let mut disk = guest(&rig, "d");
    let namespace = disk.namespace(NamespaceId(1)).unwrap();
    let mut queue = disk.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = disk.memory().alloc(4096).unwrap();
    queue.execute(&namespace.read(Lba(8), buffer.slice(0, 4096)).unwrap()).unwrap();
    assert_eq!(buffer.read_vec(0, 4096), [0x5a; 4096]);
}

#[test]
fn a_read_only_attachment_is_not_written() {
    let rig = Rig::new();
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &AttachSpec { read_only: true, ..attach("a", None) }).unwrap();
    let mut guest = guest(&rig, "d");
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    let write: Command = namespace.write(Lba(0), buffer.slice(0, 4096)).unwrap();
    let error = queue.execute(&write).unwrap_err();
    let status = error.status().expect("refused by the device");
    assert_eq!(status.code(), Status::NAMESPACE_WRITE_PROTECTED.code(), "{error}");
    assert!(matches!(error, QueueError::Failed { .. }));
}

/// Asks as a controller on a shard does, and waits for the answer.
pub(super) fn ask<T: Send + 'static>(
    rig: &Rig,
    ask: impl FnOnce(&dyn Host, HostReply<T>) + Send + 'static,
) -> Result<T, Status> {
    let (sender, receiver): (_, Receiver<Option<Result<T, Status>>>) = sync_channel(1);
    let host = Arc::clone(&rig.host);
    rig.shards[0]
        .call(move |shard| {
            let cx = shard.context();
            let (reply, answer) = millrace_engine::remote(&cx);
            let slot = cx.reserve().expect("an idle shard has room");
            ask(&*host, reply);
            drop(slot.run(|tcx| {
                millrace_engine::Launch::<()>::Wait(tcx.scratch.place_future(async move {
                    let _ = sender.send(answer.await);
                }))
            }));
        })
        .unwrap();
    receiver.recv_timeout(PATIENCE).expect("an answer").expect("not dropped")
}

pub(super) fn create(rig: &Rig, device: &'static str, nsid: u32, bytes: u64) -> Result<Arc<Namespace>, Status> {
    ask(rig, move |host, reply| host.create_namespace(device, nsid, bytes, BlockSize::B4096, reply))
}

/// A request without an answer is answered before the next one is.
fn settle(rig: &Rig) {
    let refused = ask(rig, |host, reply| host.delete_namespace("nobody", 1, reply));
    assert!(refused.is_err());
}

pub(super) fn guests_device(rig: &Rig) {
    let (uuid, place) = ("1234abcd-0000-4000-8000-000000000000", rig.directory.path().display());
    let backend = format!(r#"{{"uuid":"{uuid}","ns_quota":"1M","ns_backend":"file:{place}"}}"#);
    rig.create_device(&device("d", &backend)).unwrap();
}

#[test]
fn a_guest_has_namespaces_of_its_own() {
    let mut rig = Rig::new();
    guests_device(&rig);
    let namespace = create(&rig, "d", 4, 256 << 10).unwrap();
    assert!(!namespace.is_shared() && namespace.volume.name() == "d-1234abcd-ns4");
    drop(namespace);
    let view = rig.volume("d-1234abcd-ns4").unwrap();
    assert_eq!(
        (view.created_by.unwrap().to_string(), view.block_size.0, view.size),
        ("d".to_owned(), BlockSize::B4096, Size(256 << 10))
    );
    assert!(rig.path("d-1234abcd-ns4.img").exists());
    let shown = rig.device("d").unwrap().namespaces[0].clone();
    assert!(shown.created_by_guest && !shown.attached && shown.nsid == 4);
    rig.host.attachment_changed("d", 4, true);
    settle(&rig);
    assert!(rig.namespace("d", 4).unwrap().attached);
    rig.restart();
    assert!(rig.namespace("d", 4).unwrap().attached);
    assert_eq!(nsids(&mut guest(&rig, "d")), [4]);
    // The operator cannot give it to others, and the quota is one.
    rig.create_device(&device("e", "{}")).unwrap();
    assert!(rig.attach("e", &attach("d-1234abcd-ns4", None)).unwrap_err().to_string().contains("for itself"));
    let status = create(&rig, "d", 5, 1 << 20).err().unwrap();
    assert_eq!(status.code(), Status::NAMESPACE_INSUFFICIENT_CAPACITY.code());
    let status = create(&rig, "d", 4, 4096).err().unwrap();
    assert_eq!(status.code(), Status::NAMESPACE_ID_UNAVAILABLE.code());
    ask(&rig, |host, reply| host.delete_namespace("d", 4, reply)).unwrap();
    assert!(rig.volumes().is_empty() && rig.device("d").unwrap().namespaces.is_empty());
    assert!(!rig.path("d-1234abcd-ns4.img").exists(), "its file goes with it");
    rig.restart();
    assert!(rig.volumes().is_empty());
}

/// A worker that ends between a file and its record, or the other way round, leaves nothing in the way of the guest's next request.
#[test]
fn a_file_without_a_namespace_is_in_nobodys_way() {
    let mut rig = Rig::new();
    guests_device(&rig);
    create(&rig, "d", 1, 4096).map(drop).unwrap();
    let [has, none] = [1, 2].map(|nsid| rig.path(&format!("d-1234abcd-ns{nsid}.img")));
    assert!(rig.store.load_files().unwrap().is_empty());
    let path = rig.path("d-1234abcd-ns3.img");
    fs::write(&path, "the operator's").unwrap();
    assert!(create(&rig, "d", 3, 4096).is_err());
    assert!(rig.store.load_files().unwrap().is_empty(), "it is no file of ours");
    fs::write(&none, "nobody's").unwrap();
    rig.store.apply(&Changes { put_files: vec![&has, &none], ..Changes::default() }).unwrap();
    rig.restart();
    assert!(has.exists() && path.exists() && !none.exists());
    create(&rig, "d", 2, 4096).map(drop).unwrap();
    ask(&rig, |host, reply| host.delete_namespace("d", 1, reply)).unwrap();
    assert!(!has.exists() && rig.store.load_files().unwrap().is_empty());
}

#[test]
fn a_file_system_that_hangs_keeps_nobody_waiting_but_the_guest_that_needs_it() {
    let rig = Rig::new();
    guests_device(&rig);
    fs::create_dir(rig.path("elsewhere")).unwrap();
    let backend = format!(r#"{{"ns_quota":"1M","ns_backend":"file:{}"}}"#, rig.path("elsewhere").display());
    rig.create_device(&device("e", &backend)).unwrap();
    let (made, deleted) = (rig.directory.path().to_owned(), rig.path("d-1234abcd-ns1.img"));
    for path in [made, deleted] {
        let (release, hung) = channel();
        HUNG.lock().unwrap().insert(path.clone(), hung);
        let is_create = path == rig.directory.path();
        thread::scope(|scope| {
            let asked = scope.spawn(|| {
                if is_create {
                    return create(&rig, "d", 1, 4096).map(drop);
                }
                ask(&rig, |host, reply| host.delete_namespace("d", 1, reply))
            });
            eventually("a look that hangs", || (!HUNG.lock().unwrap().contains_key(&path)).then_some(()));
            // The manager, and the thread that answers guests.
            assert_eq!(rig.volumes().len(), usize::from(!is_create));
            create(&rig, "e", 1, 4096).map(drop).unwrap();
            rig.host.attachment_changed("e", 1, true);
            ask(&rig, |host, reply| host.delete_namespace("e", 1, reply)).unwrap();
            assert!(!asked.is_finished(), "it waits");
            drop(release);
            asked.join().unwrap().unwrap();
        });
    }
    assert!(rig.volumes().is_empty());
}

/// Who removes a file has what exists locked.
#[test]
fn a_guests_volume_whose_file_system_does_not_answer_goes_without_its_file() {
    let mut rig = Rig::new();
    guests_device(&rig);
    create(&rig, "d", 1, 4096).map(drop).unwrap();
    let (path, (release, hung)) = (rig.path("d-1234abcd-ns1.img"), channel());
    rig.stop();
    HUNG.lock().unwrap().insert(path.clone(), hung);
    rig.start();
    rig.detach("d", 1).unwrap();
    let name = rig.volumes()[0].name.clone();
    rig.delete_volume(name.as_str()).unwrap();
    assert!(path.exists() && rig.store.load_files().unwrap().is_empty(), "the next start does not remove it either");
    drop(release);
}

#[test]
fn a_guest_without_quota_creates_nothing() {
    let rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    let status = create(&rig, "d", 1, 4096).err().unwrap();
    assert_eq!(status.code(), Status::NAMESPACE_INSUFFICIENT_CAPACITY.code());
    assert!(rig.volumes().is_empty());
}

#[test]
fn a_guest_destroys_only_what_it_made() {
    let rig = Rig::new();
    guests_device(&rig);
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    rig.attach("d", &attach("a", Some(1))).unwrap();
    let status = ask(&rig, |host, reply| host.delete_namespace("d", 1, reply)).unwrap_err();
    assert_eq!(status.code(), Status::OPERATION_DENIED.code());
    assert!(ask(&rig, |host, reply| host.delete_namespace("d", 2, reply)).is_err());
    assert_eq!(rig.volumes().len(), 1);
    // A file that is in the way is not taken over.
    fs::write(rig.path("d-1234abcd-ns2.img"), "precious").unwrap();
    assert!(create(&rig, "d", 2, 4096).is_err());
    assert_eq!(fs::read(rig.path("d-1234abcd-ns2.img")).unwrap(), b"precious");
}

#[test]
fn what_a_guest_made_stays_when_its_device_goes() {
    let mut rig = Rig::new();
    guests_device(&rig);
    create(&rig, "d", 1, 64 << 10).map(drop).unwrap();
    create(&rig, "d", 2, 64 << 10).map(drop).unwrap();
    rig.detach("d", 2).unwrap();
    assert!(rig.volume("d-1234abcd-ns2").unwrap().created_by.is_none(), "the operator took it over");
    rig.delete_device("d").unwrap();
    rig.restart();
    rig.create_device(&device("e", "{}")).unwrap();
    rig.attach("e", &attach("d-1234abcd-ns1", None)).unwrap();
    rig.detach("e", 1).unwrap();
    for name in ["d-1234abcd-ns1", "d-1234abcd-ns2"] {
        rig.delete_volume(name).unwrap();
        assert!(!rig.path(&format!("{name}.img")).exists());
    }
}

#[test]
fn a_file_that_was_not_made_for_the_guest_stays() {
    let rig = Rig::new();
    guests_device(&rig);
    let own = rig.stack("@d-1234abcd-ns1.img");
    for (stacks, goes) in [
        (vec!["@other.img"], false),
        (vec!["throttle(iops=1M) | @d-1234abcd-ns1.img"], true),
        (vec!["throttle(iops=1M) | @d-1234abcd-ns1.img", "@other.img"], false),
        (vec!["throttle(iops=1M) | @d-1234abcd-ns1.img", "@d-1234abcd-ns1.img"], true),
        (vec!["@other.img", "@d-1234abcd-ns1.img"], false),
    ] {
        create(&rig, "d", 1, 64 << 10).map(drop).unwrap();
        assert_eq!(rig.volume("d-1234abcd-ns1").unwrap().stack.to_string(), own);
        fs::write(rig.path("other.img"), vec![7; 64 << 10]).unwrap();
        for stack in &stacks {
            rig.change_stack_from("d-1234abcd-ns1", None, &rig.stack(stack).parse().unwrap(), true).unwrap();
        }
        ask(&rig, |host, reply| host.delete_namespace("d", 1, reply)).unwrap();
        assert!(rig.path("other.img").exists(), "{stacks:?}");
        assert_eq!(!rig.path("d-1234abcd-ns1.img").exists(), goes, "{stacks:?}");
        let _ = fs::remove_file(rig.path("d-1234abcd-ns1.img"));
    }
}

#[test]
fn what_a_guest_had_of_a_disk_is_free_when_it_deletes_its_namespace() {
    let rig = Rig::new();
    let pool = spec("pool", Some("1M"), &rig.stack("disk(extent=64K) | @pool.img"));
    rig.create_volume(&VolumeSpec { block_size: crate::LogicalBlock(BlockSize::B4096), ..pool }).unwrap();
    guests_device(&rig);
    create(&rig, "d", 1, 128 << 10).map(drop).unwrap();
    rig.change_stack_from("d-1234abcd-ns1", None, &"share | volume:pool".parse().unwrap(), true).unwrap();
    assert_eq!(rig.of_disk("volume d-1234abcd-ns1").as_deref(), Some("131072 bytes"));
    ask(&rig, |host, reply| host.delete_namespace("d", 1, reply)).unwrap();
    assert_eq!(rig.of_disk("volume d-1234abcd-ns1"), None);
}

#[test]
fn what_a_guest_detached_stays_detached() {
    let mut rig = Rig::new();
    rig.create_volume(&volume("a", "1M", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("a", None)).unwrap();
    rig.host.attachment_changed("d", 1, false);
    settle(&rig);
    rig.restart();
    assert!(!rig.namespace("d", 1).unwrap().attached);
    assert!(nsids(&mut guest(&rig, "d")).is_empty());
    assert!(matches!(rig.delete_volume("a"), Err(ControlError::VolumeAttached { .. })));
    rig.detach("d", 1).unwrap();
    rig.delete_volume("a").unwrap();
}

#[test]
fn a_format_is_remembered() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let format = |rig: &Rig| {
        let namespace = rig.peek().namespace_of(&"f".parse().unwrap()).unwrap();
        ask(rig, move |host, reply| {
            host.format("d", namespace, NewFormat { block_size: BlockSize::B4096, metadata: None }, reply);
        })
    };
    rig.detach("d", 1).unwrap();
    assert_eq!(format(&rig).unwrap_err().code(), Status::OPERATION_DENIED.code(), "it is no longer the guest's");
    rig.attach("d", &attach("f", None)).unwrap();
    rig.create_device(&device("e", "{}")).unwrap();
    rig.attach("e", &attach("f", None)).unwrap();
    assert_eq!(format(&rig).unwrap_err().code(), Status::OPERATION_DENIED.code(), "another guest has it");
    rig.detach("e", 1).unwrap();
    format(&rig).unwrap();
    for _ in 0..2 {
        assert_eq!(rig.volume("f").unwrap().block_size.0, BlockSize::B4096);
        rig.restart();
    }
    assert_eq!(blocks(&mut guest(&rig, "d"), 1), 16);
}

#[test]
fn a_format_under_way_keeps_other_changes_away_from_its_volume_only() {
    let mut rig = Rig::new();
    for name in ["f", "g"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_device(&device("d", "{}")).unwrap();
    rig.create_device(&device("e", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let namespace = rig.peek().namespace_of(&"f".parse().unwrap()).unwrap();
    let formatting = rig.begin_format("d", &namespace, BlockSize::B4096).unwrap();
    assert!(matches!(rig.resize_volume("f", size("1M"), false), Err(ControlError::Formatting { .. })));
    assert!(matches!(rig.attach("e", &attach("f", None)), Err(ControlError::Formatting { .. })));
    assert!(rig.begin_format("d", &namespace, BlockSize::B512).is_err());
    rig.detach("d", 1).unwrap();
    assert!(matches!(rig.delete_volume("f"), Err(ControlError::Formatting { .. })));
    // Whatever else goes on.
    rig.resize_volume("g", size("1M"), false).unwrap();
    rig.attach("e", &attach("g", None)).unwrap();
    let failure = VolumeError::Unsupported { volume: "f".to_owned(), what: "formatting" };
    rig.finish_format(formatting, Err(failure)).unwrap_err();
    drop(namespace);
    for _ in 0..2 {
        assert_eq!(
            (rig.volume("f").unwrap().block_size.0, rig.volume("f").unwrap().size),
            (BlockSize::B512, Size(64 << 10))
        );
        rig.restart();
    }
    rig.resize_volume("f", size("1M"), false).unwrap();
    rig.delete_volume("f").unwrap();
}

#[test]
fn use_that_grows_is_measured_beside_the_shards() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "1M")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("f", None)).unwrap();
    let mut disk = guest(&rig, "d");
    let namespace = disk.namespace(NamespaceId(1)).unwrap();
    let mut queue = disk.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = disk.memory().alloc(65536).unwrap();
    buffer.write_at(0, &vec![0x5a; 65536]);
    queue.execute(&namespace.write(Lba(8), buffer.slice(0, 65536)).unwrap()).unwrap();
    queue.execute(&namespace.flush()).unwrap();
    // By the sampling thread, in its own time.
    eventually("what the namespace uses", || {
        let id: Box<IdentifyNamespace> = disk.identify(Cns::NAMESPACE, NamespaceId(1)).unwrap();
        (id.nuse >= 128).then_some(())
    });
}

/// Guests that ask without a pause keep nobody from what is due.
#[test]
fn what_is_due_comes_before_what_is_asked() {
    let (link, requests) = HostLink::new();
    let mut thread = HostThread::new(WeakManager::new(), requests);
    link.attachment_changed("d", 1, true);
    let (now, later) = (Instant::now(), Instant::now() + PATIENCE);
    assert!(matches!(thread.turn(now), Turn::Due));
    assert!(matches!(thread.turn(later), Turn::Request(_)));
    drop(link);
    assert!(matches!(thread.turn(later), Turn::Over));
}

/// A store for each would keep the thread from other guests' requests.
#[test]
fn attachments_that_wait_are_stored_together() {
    let rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    for (name, nsid) in [("a", 1), ("b", 2)] {
        rig.create_volume(&volume(name, "1M", "memory")).unwrap();
        rig.attach("d", &attach(name, Some(nsid))).unwrap();
    }
    let manager = rig.manager.as_ref().unwrap();
    let namespace = rig.peek().namespace_of(&"a".parse().unwrap()).unwrap();
    let (link, requests) = HostLink::new();
    let mut thread = HostThread::new(Arc::downgrade(manager), requests);
    for attached in [false, true, false] {
        link.attachment_changed("d", 1, attached);
        link.attachment_changed("d", 2, !attached);
        link.attachment_changed("none", 1, attached);
        link.attachment_changed("d", 3, attached);
        link.reservation_notice(&namespace, &[]);
    }
    thread.note_attachments(manager, ("d".to_owned(), 1), true);
    drop(link);
    let mut next = || thread.turn(Instant::now() + PATIENCE);
    // What else was asked is still to come.
    assert!((0..3).all(|_| matches!(next(), Turn::Request(Request::Notice { .. }))));
    assert!(matches!(next(), Turn::Over));
    let attached = |store: bool| -> Vec<bool> {
        let inner = rig.peek();
        let here = inner.devices["d"].record.namespaces.clone();
        drop(inner);
        let stored = || rig.store.load().unwrap().1.remove(0).namespaces;
        let namespaces = if store { stored() } else { here };
        namespaces.iter().map(|namespace| namespace.attached).collect()
    };
    assert_eq!((attached(false), attached(true)), (vec![false, true], vec![false, true]));
}
