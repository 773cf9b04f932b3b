//! What is stored of volumes' sizes and block sizes, while these change.
//!
//! ```text
//!   resize, format ─► Switch of the volume ─► Shapes: store ─► its services ─► Switch of a volume below ─► Shapes …
//! ```
//!
//! A volume changes its shape when somebody asks for it, and when a volume that it is a leg of does. Each stores its own, on the way
//! down, before whoever is above can use what is new.

use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc};

use millrace_block::{BlockCount, BlockSize, Ledger, Volume as Blocks, VolumeError};
use millrace_frontends::nvme::Namespace;
use millrace_services::graph::follows_blocks;

use super::{Inner, Manager, growth};
use crate::{
    Name, Size,
    error::ControlError,
    model::LogicalBlock,
    store::{Store, StoreError, VolumeRecord},
};

/// The stored shape of a volume.
pub(super) struct Shapes {
    store: Arc<Store>,
    name: Name,
}

/// What of a volume's record its shape is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shape {
    size: Option<Size>,
    own_size: bool,
    growing: Option<Size>,
    lengths: BTreeMap<PathBuf, u64>,
    formatted: Option<LogicalBlock>,
}

impl Shape {
    fn of(record: &VolumeRecord) -> Self {
        let VolumeRecord { spec, own_size, growing, lengths, formatted, .. } = record;
        Self { size: spec.size, own_size: *own_size, growing: *growing, lengths: lengths.clone(), formatted: *formatted }
    }

    fn set(&self, record: &mut VolumeRecord) {
        record.spec.size = self.size;
        record.own_size = self.own_size;
        record.growing = self.growing;
        record.lengths.clone_from(&self.lengths);
        record.formatted = self.formatted;
    }
}

impl Shapes {
    pub(super) fn new(store: &Arc<Store>, name: &Name) -> Arc<Self> {
        Arc::new(Self { store: Arc::clone(store), name: name.clone() })
    }

    /// Nothing else of its record: others store what they find out meanwhile, as which legs are out of use.
    fn put(&self, shape: &Shape) -> Result<(), VolumeError> {
        let put = self.store.amend([&self.name], |record| shape.set(record));
        put.map_err(|error| self.failed("store its shape in", error))
    }

    /// Puts back what was stored before a change that failed.
    fn put_back(&self, shape: &Shape) {
        if let Err(error) = self.put(shape) {
            tracing::error!(volume = %self.name, %error, "what is stored is not the volume's size and block size");
        }
    }

    /// What is stored; nothing of a volume that is just being made.
    fn stored(&self) -> Result<Option<VolumeRecord>, VolumeError> {
        self.store.volume(&self.name).map_err(|error| self.failed("look its shape up in", error))
    }

    fn failed(&self, action: &'static str, error: StoreError) -> VolumeError {
        VolumeError::Io {
            volume: self.name.to_string(),
            action,
            path: self.store.path().to_owned(),
            source: io::Error::other(error),
        }
    }

    /// While it grows both sizes are stored, for its services may keep what they need at the new end from the first write on; and of one
    /// that never had a size but that of its legs, how long they are.
    fn grow(&self, root: &dyn Blocks, blocks: BlockCount, before: &VolumeRecord, after: &Shape) -> Result<(), VolumeError> {
        let blocks_before = root.geometry().blocks;
        let lengths = if before.own_size { growth::lengths(before) } else { BTreeMap::new() };
        let before = &Shape::of(before);
        self.put(&Shape { growing: after.size, lengths, ..before.clone() })?;
        let done = root.resize(blocks).and_then(|()| {
            self.put(after).inspect_err(|_| {
                if let Err(error) = root.resize(blocks_before) {
                    tracing::error!(volume = %self.name, %error, "the volume is larger than its stored size");
                }
            })
        });
        done.inspect_err(|_| self.put_back(before))
    }
}

impl Ledger for Shapes {
    /// A volume that came back too large would be enlarged without a word.
    fn resize(&self, root: &dyn Blocks, blocks: BlockCount) -> Result<(), VolumeError> {
        let bytes = blocks.0.checked_mul(u64::from(root.geometry().block_size.bytes()));
        // Impossible sizes are the volume's to refuse.
        let (Some(bytes), Some(before)) = (bytes, self.stored()?) else { return root.resize(blocks) };
        let (size, own_size, growing, lengths) = (Some(Size(bytes)), false, None, BTreeMap::new());
        let after = Shape { size, own_size, growing, lengths, formatted: before.formatted };
        if bytes >= before.size().0 {
            return self.grow(root, blocks, &before, &after);
        }
        self.put(&after)?;
        root.resize(blocks).inspect_err(|_| self.put_back(&Shape::of(&before)))
    }

    /// A crash before the end leaves old data under a new block size, as a format that is cut short may.
    fn format(&self, root: &dyn Blocks, block_size: BlockSize) -> Result<(), VolumeError> {
        let Some(before) = self.stored()? else { return root.format(block_size) };
        let foreseen = Shape::of(&formatted(&before, block_size, root.geometry().bytes()));
        self.put(&foreseen)?;
        root.format(block_size).inspect_err(|_| self.put_back(&Shape::of(&before)))?;
        // Legs whose lengths make no whole blocks have room for less, or again for what they had before.
        let mut after = Shape::of(&formatted(&before, block_size, root.geometry().bytes()));
        after.own_size &= after.size == before.spec.size;
        if after == foreseen { Ok(()) } else { self.put(&after) }
    }
}

/// What is stored of a volume of so many bytes when it has these blocks.
pub(super) fn formatted(record: &VolumeRecord, block_size: BlockSize, bytes: u64) -> VolumeRecord {
    let mut record = record.clone();
    // Its legs have room for another size then, which it has not got.
    record.own_size &= record.block_size().0 == block_size || !follows_blocks(&record.spec.stack);
    record.formatted = (record.spec.block_size.0 != block_size).then_some(LogicalBlock(block_size));
    let block = u64::from(block_size.bytes());
    record.spec.size = Some(Size(bytes / block * block));
    record
}

/// What is to be stored of a volume as it is now.
fn as_it_is(namespace: &Namespace, before: &VolumeRecord) -> VolumeRecord {
    let geometry = namespace.volume.geometry();
    let mut record = formatted(before, geometry.block_size, geometry.bytes());
    record.own_size &= record.spec.size == before.spec.size;
    record
}

/// Why a volume has not changed its shape; that it could not be stored is told as such.
pub(super) fn told(error: VolumeError) -> ControlError {
    match error {
        VolumeError::Io { volume, action, path, source } => match source.downcast::<StoreError>() {
            Ok(error) => error.into(),
            Err(source) => VolumeError::Io { volume, action, path, source }.into(),
        },
        error => error.into(),
    }
}

impl Manager {
    /// The shape of a volume has changed, or may have, and with it those of the volumes that it is made of: what is known and stored of
    /// them is what they are now.
    pub(super) fn follow_shapes(&self, inner: &mut Inner, name: &str) {
        let below = inner.below(name);
        for name in below.iter().map(Name::as_str).chain([name]) {
            let Some(volume) = inner.volumes.get_mut(name) else { continue };
            let Ok(namespace) = &volume.live else { continue };
            namespace.measure();
            let record = as_it_is(namespace, &volume.record);
            // On the way down the same was stored, unless something failed.
            let shape = Shape::of(&record);
            if let Err(error) = self.store.amend([&record.spec.name], |stored| shape.set(stored)) {
                tracing::error!(volume = name, %error, "what is stored is not the volume's size and block size");
            }
            volume.record = record;
        }
    }
}

impl Inner {
    /// A volume was given a size when it was opened, and those that it is made of with it: what is known of these is what is stored by now.
    pub(super) fn follow_below(&mut self, name: &Name) {
        for below in self.below(name.as_str()) {
            let Some(volume) = self.volumes.get_mut(&below) else { continue };
            let Ok(namespace) = &volume.live else { continue };
            volume.record = as_it_is(namespace, &volume.record);
        }
    }

    /// Whether nothing happens to the volumes that this one is made of, so that their shapes may change with its own.
    pub(super) fn check_below_idle(&self, name: &str) -> Result<(), ControlError> {
        self.below(name).iter().try_for_each(|below| {
            self.idle_volume(below.as_str())?;
            self.check_not_copied(below)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use millrace_block::Switch;
    use uuid::Uuid;

    use super::*;
    use crate::{
        model::VolumeSpec,
        store::{Changes, tests::FullDisk},
    };

    /// What is below: looks at what is stored when it is asked, and does it or refuses.
    struct Below {
        store: Arc<Store>,
        seen: Mutex<Vec<(u64, Option<u64>)>>,
        disk: FullDisk,
        refuses: bool,
        /// The state cannot be stored any more afterwards.
        fills: bool,
    }

    impl Ledger for Below {
        fn resize(&self, root: &dyn Blocks, blocks: BlockCount) -> Result<(), VolumeError> {
            // On the way back from what cannot be stored it cannot be asked.
            if let Ok(Some(stored)) = self.store.volume(&"v".parse().unwrap()) {
                self.seen.lock().unwrap().push((stored.size().0, stored.growing.map(|size| size.0)));
            }
            self.disk.set_full(self.fills);
            if self.refuses {
                return Err(VolumeError::Unsupported { volume: "v".to_owned(), what: "that" });
            }
            root.resize(blocks)
        }

        fn format(&self, root: &dyn Blocks, block_size: BlockSize) -> Result<(), VolumeError> {
            root.format(block_size)
        }
    }

    fn record(size: &str) -> VolumeRecord {
        let spec: VolumeSpec =
            serde_json::from_value(serde_json::json!({ "name": "v", "size": size, "stack": "memory" })).unwrap();
        VolumeRecord { own_size: true, ..VolumeRecord::new(spec, Uuid::nil()) }
    }

    /// Resizes a volume of 64 KiB; the answer, its size then, what is stored then, and what was when it was asked.
    fn resize(to: u64, refuses: bool, fills: bool) -> (bool, u64, u64, Vec<(u64, Option<u64>)>) {
        let disk = FullDisk::default();
        let store = Arc::new(disk.store());
        let record = record("64K");
        let name = record.spec.name.clone();
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        let memory = millrace_backends::open(&millrace_backends::BackendSpec::Memory, "v", Some(64 << 10), BlockSize::B512);
        let below = Below { store: Arc::clone(&store), seen: Mutex::default(), disk: disk.clone(), refuses, fills };
        let below = Arc::new(below);
        let inside = Switch::kept("inside", memory.unwrap(), Some(Arc::clone(&below) as _));
        let outside = Switch::kept("v", inside, Some(Shapes::new(&store, &name)));
        let done = outside.resize(BlockCount(to / 512)).is_ok();
        disk.set_full(false);
        let stored = store.volume(&name).unwrap().unwrap();
        assert!(stored.own_size != done, "a size that was asked for is the volume's");
        let seen = below.seen.lock().unwrap().clone();
        (done, outside.geometry().bytes(), stored.size().0, seen)
    }

    #[test]
    fn what_a_format_leaves_is_stored_before_it_is_used() {
        let store = Arc::new(FullDisk::default().store());
        let record = record("5K");
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        let memory = millrace_backends::open(&millrace_backends::BackendSpec::Memory, "v", Some(5 << 10), BlockSize::B512);
        let volume = Switch::kept("v", memory.unwrap(), Some(Shapes::new(&store, &record.spec.name)));
        for (block_size, bytes) in [(BlockSize::B4096, 4 << 10), (BlockSize::B512, 5 << 10)] {
            volume.format(block_size).unwrap();
            let stored = store.volume(&record.spec.name).unwrap().unwrap();
            assert_eq!((volume.geometry().bytes(), stored.size().0, stored.block_size().0), (bytes, bytes, block_size));
        }
    }

    #[test]
    fn what_is_stored_is_never_more_than_there_is_and_says_what_is_coming() {
        const K: u64 = 1 << 10;
        assert_eq!(resize(128 * K, false, false), (true, 128 * K, 128 * K, vec![(64 * K, Some(128 * K))]));
        assert_eq!(resize(32 * K, false, false), (true, 32 * K, 32 * K, vec![(32 * K, None)]));
        assert_eq!(resize(128 * K, true, false), (false, 64 * K, 64 * K, vec![(64 * K, Some(128 * K))]));
        assert_eq!(resize(32 * K, true, false), (false, 64 * K, 64 * K, vec![(32 * K, None)]));
        // It grew, and that cannot be stored: it has its old size again.
        let (done, has, stored, seen) = resize(128 * K, false, true);
        assert_eq!((done, has, stored, seen[0]), (false, 64 * K, 64 * K, (64 * K, Some(128 * K))));
    }
}
