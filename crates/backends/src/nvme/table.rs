//! Which memory of guests the device reaches, and under which addresses.
//!
//! ```text
//!   a shard's miss ──ask──► a thread: with_region ─► Mapper::map_part, piece by piece ─► entries, generation + 1
//!   memory goes (its last request has ended) ──going──► Mapper::unmap ─► entries, generation + 1 ─► it is unmapped here
//! ```
//!
//! Until a region is mapped, and where it cannot be, its data go by way of buffers. What could not be mapped is tried again, ever more seldom.
//! What [must not be pinned](millrace_memory::GuestMemory::unpinned) is no region here, and never mapped.
//!
//! To map is to pin, and the kernel takes long over what is large: the thread does nothing else, and holds up who wants memory gone, or
//! another disk's mapped, for no longer than a piece takes.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_driver::{DmaRange, Iommu, VfioError};
use millrace_memory::guard::{Region, Watcher, with_region};

/// Memory is mapped up to the next multiple of it.
const PIECE: usize = 1 << 30;
/// When memory that could not be mapped is tried again, at first; twice as long each time.
const AGAIN: Duration = Duration::from_secs(10);
/// And in the end.
const LONGEST: Duration = Duration::from_secs(640);
/// How long nobody maps between two pieces.
const BETWEEN: Duration = Duration::from_millis(1);

/// What makes memory reachable for a device: its [`Iommu`].
pub(super) trait Mapper: Send + Sync {
    /// What it is, for the log.
    fn interface(&self) -> &'static str;
    /// See [`Iommu::place_region`].
    fn place(&self, region: &Region) -> Result<DmaRange, VfioError>;
    /// See [`Iommu::map_part`].
    fn map_part(&self, region: &Region, iova: u64, part: Range<usize>) -> Result<(), VfioError>;
    /// See [`Iommu::unmap`].
    fn unmap(&self, range: DmaRange) -> Result<(), VfioError>;
}

impl Mapper for Iommu {
    fn interface(&self) -> &'static str {
        Iommu::interface(self)
    }

    fn place(&self, region: &Region) -> Result<DmaRange, VfioError> {
        self.place_region(region)
    }

    fn map_part(&self, region: &Region, iova: u64, part: Range<usize>) -> Result<(), VfioError> {
        Iommu::map_part(self, region, iova, part)
    }

    fn unmap(&self, range: DmaRange) -> Result<(), VfioError> {
        Iommu::unmap(self, range)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: usize,
    iova: u64,
    len: usize,
}

/// A lane's own sight of the table.
#[derive(Debug, Default)]
pub(super) struct Entries {
    /// By address; they do not overlap.
    list: Arc<[Entry]>,
    generation: u64,
}

impl Entries {
    /// Looks whether the table has changed; whether it had.
    #[inline]
    pub(super) fn refresh(&mut self, table: &Table) -> bool {
        // Acquire: pairs with the release of a change. Memory that was unmapped and given away anew reaches a shard by way of
        // whoever mapped it, after the change: so a shard that has an address of the new memory sees that the old is gone.
        let changed = table.generation.load(Ordering::Acquire) != self.generation;
        if changed {
            self.take(table);
        }
        changed
    }

    #[cold]
    fn take(&mut self, table: &Table) {
        let entries = table.entries.lock().unwrap_or_else(PoisonError::into_inner);
        self.generation = table.generation.load(Ordering::Acquire);
        self.list = Arc::clone(&entries);
    }

    /// The device's address of memory; `None` when it does not reach all of it. Few steps, however much memory is mapped: others' is, too.
    #[inline]
    pub(super) fn find(&self, start: usize, len: usize) -> Option<u64> {
        let after = self.list.partition_point(|entry| entry.start <= start);
        let entry = &self.list[after.checked_sub(1)?];
        let offset = start - entry.start;
        (offset.checked_add(len)? <= entry.len).then(|| entry.iova + offset as u64)
    }
}

/// A region of which something is mapped, and not all yet.
struct Partial {
    start: usize,
    iova: u64,
    done: usize,
}

/// When a region could not be mapped, and how long it is left alone from then on.
struct Failure {
    since: Instant,
    wait: Duration,
}

/// What only who maps and who unmaps use.
#[derive(Default)]
struct Changing {
    partial: Option<Partial>,
    /// By address. They end with their regions.
    failed: BTreeMap<usize, Failure>,
}

/// See the module.
pub(super) struct Table {
    /// `None`: the device reaches no memory of guests.
    mapper: Option<Arc<dyn Mapper>>,
    /// Held while a piece is mapped, or memory unmapped: what is being mapped must not go meanwhile.
    changing: Mutex<Changing>,
    entries: Mutex<Arc<[Entry]>>,
    generation: AtomicU64,
    /// Nothing is mapped any more.
    closed: AtomicBool,
    asks: SyncSender<usize>,
}

impl Table {
    /// Addresses that are asked for come out at the other end of `asks`, for [`serve`].
    pub(super) fn new(mapper: Option<Arc<dyn Mapper>>, asks: SyncSender<usize>) -> Self {
        let (changing, entries, generation) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        Self { mapper, changing, entries, generation, closed: AtomicBool::new(false), asks }
    }

    /// Asks for the region with this address to be mapped, some time soon.
    pub(super) fn ask(&self, address: usize) {
        // When there is too much to do already, the next miss asks again.
        let _ = self.asks.try_send(address);
    }

    fn changing(&self) -> MutexGuard<'_, Changing> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list(&self) -> Arc<[Entry]> {
        Arc::clone(&self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the list. The caller is the only one: it has `changing`.
    fn change(&self, _: &mut Changing, change: impl FnOnce(&mut Vec<Entry>)) {
        // Made beside the lock, for which shards may wait.
        let mut list = self.list().to_vec();
        change(&mut list);
        let list = list.into();
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        *entries = list;
        // Release: pairs with `Entries::refresh`.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Maps the region that holds an address, if a peer shares it with us. Takes long: not called on a shard.
    fn map(&self, address: usize, now: Instant) {
        loop {
            let mut state = self.changing();
            if with_region(address, |region| self.map_piece(&mut state, region, now)) != Some(true) {
                return;
            }
            drop(state);
            // Locks are not fair: who waits for these gets them only while nobody has them.
            thread::sleep(BETWEEN);
        }
    }

    /// Maps the next piece of a region; whether there are more.
    fn map_piece(&self, state: &mut Changing, region: &Region, now: Instant) -> bool {
        let start = region.start();
        let waits = state.failed.get(&start).is_some_and(|failure| now < failure.since + failure.wait);
        if self.closed.load(Ordering::Relaxed) || waits || self.position(start).is_ok() {
            return false;
        }
        let Some(mapper) = &self.mapper else { return false };
        let (iova, done) = match &state.partial {
            Some(partial) if partial.start == start => (partial.iova, partial.done),
            // That one's memory is just going; the next miss asks for this one again.
            Some(_) => return false,
            None => match mapper.place(region) {
                Ok(range) => (range.iova, 0),
                Err(error) => {
                    fail(state, region, now, &error);
                    return false;
                }
            },
        };
        state.partial = None;
        let end = piece_end(start, done, region.len());
        if let Err(error) = mapper.map_part(region, iova, done..end) {
            self.unmap(DmaRange { iova, len: done });
            fail(state, region, now, &error);
            return false;
        }
        if end < region.len() {
            state.partial = Some(Partial { start, iova, done: end });
            return true;
        }
        state.failed.remove(&start);
        self.change(state, |list| {
            let at = list.partition_point(|entry| entry.start < start);
            list.insert(at, Entry { start, iova, len: end });
        });
        tracing::info!(bytes = end, "a guest's memory is mapped for a disk");
        false
    }

    /// Where in the list a region is, or belongs.
    fn position(&self, start: usize) -> Result<usize, usize> {
        self.list().binary_search_by_key(&start, |entry| entry.start)
    }

    /// Maps nothing from now on.
    pub(super) fn close(&self) {
        // Relaxed: `clear` takes the lock after this, and who maps looks under it. In all other cases it is a hint.
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Takes everything away, for good.
    pub(super) fn clear(&self) {
        self.close();
        let mut state = self.changing();
        state.failed.clear();
        if let Some(partial) = state.partial.take() {
            self.unmap(DmaRange { iova: partial.iova, len: partial.done });
        }
        let mut gone = Vec::new();
        self.change(&mut state, |list| gone = std::mem::take(list));
        for entry in gone {
            self.unmap(DmaRange { iova: entry.iova, len: entry.len });
        }
    }

    fn unmap(&self, range: DmaRange) {
        let Some(mapper) = &self.mapper else { return };
        if let Err(error) = mapper.unmap(range) {
            // The pages stay pinned and are nobody's: what the device may still write there harms no one.
            tracing::error!(bytes = range.len, "a guest's memory stays mapped for a disk: {error}");
        }
    }
}

/// Remembers memory that cannot be mapped, or every miss would try again.
fn fail(state: &mut Changing, region: &Region, now: Instant, error: &VfioError) {
    let before = state.failed.get(&region.start()).map(|failure| failure.wait);
    let wait = before.map_or(AGAIN, |wait| (2 * wait).min(LONGEST));
    // To get here may have taken long.
    state.failed.insert(region.start(), Failure { since: now.max(Instant::now()), wait });
    if before.is_none() {
        tracing::warn!(
            bytes = region.len(),
            "a guest's memory cannot be mapped for a disk; its data are copied until it can, which is tried now and then: {error}"
        );
    }
}

/// Where the piece that begins `done` bytes into a region ends. It is cut at multiples of [`PIECE`] of the address: so no large page is cut.
fn piece_end(start: usize, done: usize, len: usize) -> usize {
    let at = start + done;
    let rest = PIECE - at % PIECE;
    done + rest.min(len - done)
}

/// The life of the thread that maps what is asked for, as long as there is a table.
pub(super) fn serve(table: &Weak<Table>, asks: &Receiver<usize>) {
    for address in asks {
        let Some(table) = table.upgrade() else { return };
        table.map(address, Instant::now());
    }
}

impl Watcher for Table {
    fn going(&self, region: &Region) {
        let start = region.start();
        let mut state = self.changing();
        state.failed.remove(&start);
        let partial = state.partial.take_if(|partial| partial.start == start);
        let mut gone = partial.map(|partial| DmaRange { iova: partial.iova, len: partial.done });
        if let Ok(at) = self.position(start) {
            self.change(&mut state, |list| {
                let entry = list.remove(at);
                gone = Some(DmaRange { iova: entry.iova, len: entry.len });
            });
        }
        let Some(range) = gone else { return };
        self.unmap(range);
        // There is room for others: they need not wait for as long as they would.
        state.failed.values_mut().for_each(|failure| failure.wait = AGAIN);
    }
}

#[cfg(test)]
mod tests;
