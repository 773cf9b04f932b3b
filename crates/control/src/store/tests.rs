use std::{
    io,
    ops::Bound,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use super::*;

fn volume(name: &str) -> VolumeRecord {
    let spec =
        serde_json::from_str(&format!(r#"{{"name":"{name}","size":"1G","backend":"memory","block_size":4096}}"#)).unwrap();
    VolumeRecord {
        spec,
        formatted: None,
        uuid: Uuid::from_u128(7),
        created_by: None,
        owns_file: false,
        own_size: false,
        growing: None,
        memory_leaves: Vec::new(),
        out_of_use: Vec::new(),
        history: Vec::new(),
    }
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
}

impl FullDisk {
    pub(crate) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
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
        self.check()
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
