//! Which memory of guests the device reaches, and under which addresses.
//!
//! ```text
//!   a shard's miss ──ask──► the disk's watch: with_region ─► Iommu::map_region ─► entries, generation + 1
//!   memory goes (its last request has ended) ──going──► Iommu::unmap ─► entries, generation + 1 ─► it is unmapped here
//! ```
//!
//! Until a region is mapped, and where it cannot be, its data go by way of buffers.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
    mpsc::SyncSender,
};

use millrace_driver::{DmaRange, Iommu};
use millrace_memory::guard::{Region, Watcher, with_region};

use super::disk::Word;

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: usize,
    iova: u64,
    len: usize,
}

/// A lane's own copy of the table.
#[derive(Debug, Default)]
pub(super) struct Entries {
    list: Vec<Entry>,
    generation: u64,
}

impl Entries {
    /// Looks whether the table has changed.
    #[inline]
    pub(super) fn refresh(&mut self, table: &Table) {
        // Acquire: pairs with the release of a change. Memory that was unmapped and given away anew reaches a shard by way of
        // whoever mapped it, after the change: so a shard that has an address of the new memory sees that the old is gone.
        if table.generation.load(Ordering::Acquire) != self.generation {
            self.take(table);
        }
    }

    #[cold]
    fn take(&mut self, table: &Table) {
        let entries = table.entries.lock().unwrap_or_else(PoisonError::into_inner);
        self.generation = table.generation.load(Ordering::Acquire);
        self.list.clone_from(&entries);
    }

    /// The device's address of memory; `None` when it does not reach all of it.
    #[inline]
    pub(super) fn find(&self, start: usize, len: usize) -> Option<u64> {
        self.list.iter().find_map(|entry| {
            let offset = start.checked_sub(entry.start)?;
            (offset.checked_add(len)? <= entry.len).then(|| entry.iova + offset as u64)
        })
    }
}

/// See the module.
pub(super) struct Table {
    /// `None`: the device reaches no memory of guests.
    iommu: Option<Arc<Iommu>>,
    /// Held while memory is mapped or unmapped: mapping takes long, and what is being mapped must not go meanwhile.
    changing: Mutex<()>,
    entries: Mutex<Vec<Entry>>,
    generation: AtomicU64,
    watch: SyncSender<Word>,
}

impl Table {
    pub(super) fn new(iommu: Option<Arc<Iommu>>, watch: SyncSender<Word>) -> Self {
        Self { iommu, changing: Mutex::default(), entries: Mutex::default(), generation: AtomicU64::new(0), watch }
    }

    /// Asks for the region with this address to be mapped, some time soon.
    pub(super) fn ask(&self, address: usize) {
        // When there is too much to do already, the next miss asks again.
        let _ = self.watch.try_send(Word::Map(address));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Entry>)) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut entries);
        // Release: pairs with `Entries::refresh`.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Maps the region that holds an address, if a peer shares it with us. Takes long: not called on a shard.
    pub(super) fn map(&self, address: usize) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        with_region(address, |region| self.map_region(region));
    }

    fn map_region(&self, region: &Region) {
        let known = |entries: &Vec<Entry>| entries.iter().any(|entry| entry.start == region.start());
        if known(&self.entries.lock().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let Some(iommu) = &self.iommu else { return };
        match iommu.map_region(region) {
            Ok(DmaRange { iova, len }) => {
                self.change(|entries| entries.push(Entry { start: region.start(), iova, len }));
                tracing::info!(bytes = len, "a guest's memory is mapped for a disk");
            }
            // Remembered as memory that cannot be reached, or every miss would try again.
            Err(error) => {
                self.change(|entries| entries.push(Entry { start: region.start(), iova: 0, len: 0 }));
                tracing::warn!(
                    bytes = region.len(),
                    "a guest's memory cannot be mapped for a disk, its data are copied: {error}"
                );
            }
        }
    }

    /// Takes everything away.
    pub(super) fn clear(&self) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gone = Vec::new();
        self.change(|entries| gone = std::mem::take(entries));
        for entry in gone {
            self.unmap(entry);
        }
    }

    fn unmap(&self, entry: Entry) {
        if entry.len == 0 {
            return;
        }
        let Some(iommu) = &self.iommu else { return };
        if let Err(error) = iommu.unmap(DmaRange { iova: entry.iova, len: entry.len }) {
            // The pages stay pinned and are nobody's: what the device may still write there harms no one.
            tracing::error!(bytes = entry.len, "a guest's memory stays mapped for a disk: {error}");
        }
    }
}

impl Watcher for Table {
    fn going(&self, region: &Region) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gone = None;
        self.change(|entries| {
            let at = entries.iter().position(|entry| entry.start == region.start());
            gone = at.map(|at| entries.swap_remove(at));
        });
        if let Some(entry) = gone {
            self.unmap(entry);
        }
    }
}
