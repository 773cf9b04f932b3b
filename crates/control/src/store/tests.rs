use std::{
    io,
    ops::Bound,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::*;

fn volume(name: &str) -> VolumeRecord {
    let spec =
        serde_json::from_str(&format!(r#"{{"name":"{name}","size":"1G","backend":"memory","block_size":4096}}"#)).unwrap();
    VolumeRecord::new(spec, Uuid::from_u128(7))
}

fn device(name: &str) -> DeviceRecord {
    let spec =
        serde_json::from_str(&format!(r#"{{"name":"{name}","nvme":{{"queues":3,"serial":"X"}},"shard":2}}"#)).unwrap();
    let namespaces = vec![NamespaceRecord { nsid: 9, volume: "v".parse().unwrap(), read_only: true, attached: false }];
    DeviceRecord { spec, cntlid: 5, uuid: Uuid::from_u128(8), namespaces, session: None, disk_kind: None }
}

fn overwrite_version(directory: &Path, version: u64) {
    let database = Database::create(directory.join(FILE)).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(META).unwrap().insert(VERSION, version).unwrap();
    transaction.commit().unwrap();
}

#[test]
fn what_is_stored_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    assert_eq!(store.load().unwrap(), (vec![], vec![]));
    let (a, b, d) = (volume("a"), volume("b"), device("d"));
    store.apply(&Changes { put_volumes: vec![&b, &a], put_devices: vec![&d], ..Changes::default() }).unwrap();
    drop(store);
    let store = Store::open(directory.path()).unwrap();
    assert_eq!(store.load().unwrap(), (vec![a.clone(), b.clone()], vec![d.clone()]));
    let changes = Changes { remove_volumes: vec![&a.spec.name], remove_devices: vec![&d.spec.name], ..Changes::default() };
    store.apply(&changes).unwrap();
    assert_eq!(store.load().unwrap(), (vec![b], vec![]));
}

#[test]
fn of_a_record_each_owner_changes_what_is_its_own() {
    let store = Store::in_memory().unwrap();
    let (a, b) = (volume("a"), volume("b"));
    store.apply(&Changes { put_volumes: vec![&a, &b], ..Changes::default() }).unwrap();
    let none: Name = "none".parse().unwrap();
    store.amend([&a.spec.name, &none], |record| record.untold = true).unwrap();
    store.amend([&a.spec.name], |record| record.growing = Some(Size(1))).unwrap();
    let after = VolumeRecord { untold: true, growing: Some(Size(1)), ..a };
    assert_eq!(store.load().unwrap().0, [after, b]);
}

#[test]
fn one_process_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let _first = Store::open(directory.path()).unwrap();
    let second = Store::open(directory.path()).err().unwrap();
    assert!(matches!(&second, StoreError::InUse { path } if *path == directory.path().join(FILE)), "{second}");
    assert!(second.to_string().contains("another daemon has this state open"));
}

#[test]
fn another_layout_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let record = volume("a");
    let store = Store::open(directory.path()).unwrap();
    store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
    drop(store);
    overwrite_version(directory.path(), LAYOUT_VERSION + 1);
    let error = Store::open(directory.path()).err().unwrap();
    assert!(matches!(error, StoreError::Version { found, .. } if found == LAYOUT_VERSION + 1), "{error}");
    overwrite_version(directory.path(), LAYOUT_VERSION);
    assert_eq!(Store::open(directory.path()).unwrap().load().unwrap().0, [record]);
}

#[test]
fn a_record_that_cannot_be_read_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    store
        .transact(|transaction| {
            transaction.open_table(VOLUMES)?.insert("odd", br#"{"spec":1}"#.as_slice())?;
            Ok(())
        })
        .unwrap();
    let error = store.load().unwrap_err();
    assert!(matches!(&error, StoreError::Record { kind: "volume", name, .. } if name == "odd"), "{error}");
}

#[test]
fn what_is_no_database_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(FILE), "not a database, but long enough to be taken for one".repeat(1000)).unwrap();
    let error = Store::open(directory.path()).err().unwrap().to_string();
    assert!(error.contains(directory.path().to_str().unwrap()), "{error}");
}

#[test]
fn an_empty_file_is_no_new_state() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(FILE), "").unwrap();
    let error = Store::open(directory.path()).err().unwrap().to_string();
    assert!(error.contains("it is empty") && error.contains("put a copy back"), "{error}");
}

/// A first start that is cut short leaves no state, or nothing of one; what it leaves is in nobody's way.
#[test]
fn a_state_has_its_name_when_it_is_whole() {
    for left in [&b""[..], b"redb, and no more"] {
        let directory = tempfile::tempdir().unwrap();
        let (path, new) = (directory.path().join(FILE), directory.path().join("state.new"));
        std::fs::write(&new, left).unwrap();
        let store = Store::open(directory.path()).unwrap();
        assert!(path.exists() && !new.exists());
        let record = volume("a");
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        assert!(matches!(Store::open(directory.path()), Err(StoreError::InUse { .. })));
        drop(store);
        assert_eq!(Store::open(directory.path()).unwrap().load().unwrap().0, [record]);
    }
}

/// While it is made, it has the other name: whoever is quicker has made the state.
#[test]
fn a_state_that_is_there_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (path, new) = (directory.path().join(FILE), directory.path().join("state.new"));
    std::fs::write(&path, "another daemon's").unwrap();
    std::fs::write(&new, "").unwrap();
    assert!(!put_in_place(directory.path(), &new, &path).unwrap());
    assert!(!new.exists() && std::fs::read(&path).unwrap() == b"another daemon's");
}

/// One bit makes another number of a number, and good JSON.
#[test]
fn a_number_that_has_changed_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let store = Store::open(directory.path()).unwrap();
    store.apply(&Changes { put_volumes: vec![&volume("a")], ..Changes::default() }).unwrap();
    drop(store);
    let mut bytes = std::fs::read(&path).unwrap();
    let size = (1_u64 << 30).to_string();
    let is_size = |at: &usize| bytes[*at..].starts_with(size.as_bytes());
    let places: Vec<usize> = (0..bytes.len()).filter(is_size).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at + 3] ^= 1;
    }
    std::fs::write(&path, bytes).unwrap();
    let error = Store::open(directory.path()).and_then(|store| store.load()).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("it is damaged (") && error.to_string().contains("put a copy back"), "{error}");
}

/// What panics while something is stored is no word about what is there.
#[test]
fn a_panic_is_damage_where_the_state_was_read() {
    let store = Store::in_memory().unwrap();
    let record = volume("a");
    let number = 7;
    let error = store.transact(|_| -> Result<(), redb::Error> { panic!("a fault in number {number}") }).unwrap_err();
    assert!(matches!(&error, StoreError::Panicked { what, .. } if what == "a fault in number 7"), "{error}");
    assert!(!error.to_string().contains("damaged"), "{error}");
    store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
    let error = store.read(|_| -> Result<(), redb::Error> { panic!("no such page") }).unwrap_err();
    assert!(error.to_string().contains("it is damaged (no such page)"), "{error}");
}

/// The database takes some of it for a fault of its own.
#[test]
fn damage_is_an_error_and_no_panic() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let store = Store::open(directory.path()).unwrap();
    for index in 0..40 {
        store.apply(&Changes { put_volumes: vec![&volume(&format!("v{index}"))], ..Changes::default() }).unwrap();
    }
    drop(store);
    let good = std::fs::read(&path).unwrap();
    let mut random = millrace_block::conformance::Random::new(7);
    let mut refused = 0;
    for _ in 0..40 {
        let mut bad = good.clone();
        for _ in 0..60 {
            let at = random.below(bad.len() as u64) as usize;
            bad[at] ^= 1 << random.below(8);
        }
        std::fs::write(&path, bad).unwrap();
        match Store::open(directory.path()).and_then(|store| store.load().map(drop)) {
            Ok(()) => {}
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains(FILE), "{error}");
            }
        }
    }
    assert!(refused > 0);
    std::fs::write(&path, good).unwrap();
    assert_eq!(Store::open(directory.path()).unwrap().load().unwrap().0.len(), 40);
}

#[test]
fn a_state_in_memory_works_alike() {
    let store = Store::in_memory().unwrap();
    let record = volume("a");
    store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
    assert_eq!(store.load().unwrap().0, [record]);
}

/// A disk that outlives its database, and that can be full.
#[derive(Clone, Debug, Default)]
pub(crate) struct FullDisk {
    blocks: Arc<RwLock<Vec<u8>>>,
    full: Arc<AtomicBool>,
    /// So many more times what is written is not made durable.
    unsynced: Arc<AtomicUsize>,
}

impl FullDisk {
    pub(crate) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    fn fail_syncs(&self, times: usize) {
        self.unsynced.store(times, Ordering::Relaxed);
    }

    pub(crate) fn store(&self) -> Store {
        let disk = self.clone();
        Store::prepare(Box::new(move || Database::builder().create_with_backend(disk.clone())), "disk".into()).unwrap()
    }

    fn check(&self) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(28)) } else { Ok(()) }
    }
}

impl redb::StorageBackend for FullDisk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.blocks.read().unwrap().len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let blocks = self.blocks.read().unwrap();
        out.copy_from_slice(blocks.get(offset as usize..offset as usize + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.blocks.write().unwrap().resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        let times = self.unsynced.load(Ordering::Relaxed);
        self.unsynced.store(times.saturating_sub(1), Ordering::Relaxed);
        if times > 0 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.blocks.write().unwrap()[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn try_lock_range(&self, _: Bound<u64>, _: Bound<u64>) -> Result<bool, redb::BackendError> {
        Ok(true)
    }
}

#[test]
fn a_full_disk_changes_nothing_and_heals() {
    let disk = FullDisk::default();
    let store = disk.store();
    let (a, b) = (volume("a"), volume("b"));
    store.apply(&Changes { put_volumes: vec![&a], ..Changes::default() }).unwrap();
    disk.set_full(true);
    for _ in 0..3 {
        let error =
            store.apply(&Changes { put_volumes: vec![&b], remove_volumes: vec![&a.spec.name], ..Changes::default() });
        assert!(matches!(error, Err(StoreError::Database { .. })));
    }
    disk.set_full(false);
    assert_eq!(store.load().unwrap().0, std::slice::from_ref(&a));
    store.apply(&Changes { put_volumes: vec![&b], ..Changes::default() }).unwrap();
    assert_eq!(store.load().unwrap().0, [a, b]);
}

/// All of it is written, only the last sync fails: the file has what the daemon was told it has not.
#[test]
fn what_was_not_synced_is_taken_back() {
    for failures in [1, 3, 20] {
        let disk = FullDisk::default();
        let store = disk.store();
        let (a, b, d) = (volume("a"), volume("b"), device("d"));
        store.apply(&Changes { put_volumes: vec![&a], put_files: vec![Path::new("/f")], ..Changes::default() }).unwrap();
        let grown = VolumeRecord { growing: Some(Size(2 << 30)), ..a.clone() };
        disk.fail_syncs(failures);
        let changes = Changes {
            put_volumes: vec![&grown, &b],
            put_devices: vec![&d],
            put_received: vec![&b.spec.name],
            remove_files: vec![Path::new("/f")],
            ..Changes::default()
        };
        store.apply(&changes).unwrap_err();
        disk.fail_syncs(0);
        assert_eq!(store.load().unwrap(), (vec![a.clone()], vec![]), "{failures} syncs failed");
        assert!(store.load_received().unwrap().is_empty());
        assert_eq!(store.load_files().unwrap(), [Path::new("/f")]);
        store.apply(&Changes { put_volumes: vec![&b], ..Changes::default() }).unwrap();
        assert_eq!(store.load().unwrap().0, [a, b]);
    }
}
