//! What the shares of one disk have together: its table, changed by one thread at a time, and the line before it.
//!
//! ```text
//!   grow:   choose free extents ─► zero them, flush ─► store the table ─► the volume shows them
//!   shrink: the volume shows less ─► nobody is there any more ─► store the table ─► give the blocks back
//! ```
//!
//! So at any instant, a crash included, an extent is in one volume at most, and a volume never shows what another one left.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume, pieces};
use millrace_memory::Owner;

use super::{
    line::Line,
    table::{Entry, LONGEST_NAME, Piece, Table},
};
use crate::{
    background::LocalFuture,
    flushes::Flushes,
    legs::{self, Leg},
    record::Region,
    service::ServiceError,
};

/// Tells the record of a disk's table from others.
const MAGIC: [u8; 8] = *b"MRDISK\0\0";
const VERSION: u32 = 1;
/// Longest region of the table: both copies.
const LONGEST: u64 = 16 << 20;
/// Volumes that are not in use and are named to who has asked for another.
const NAMED: usize = 16;
/// Bytes that are erased with one request.
const ERASE: u64 = 256 << 20;

/// Where the table of a disk with such extents is: in the first one.
pub(super) fn region(extent: u64) -> Region {
    Region { magic: MAGIC, version: VERSION, offset: 0, len: extent.min(LONGEST) }
}

/// See the module.
#[derive(Default)]
pub(super) struct Space {
    /// Absent while the disk is not in force. Held as long as the disk takes: to clear extents may be minutes.
    open: Mutex<Option<Open>>,
    /// What is asked for while that takes place, and guests wait. Locked for moments, and after `open`.
    seen: Mutex<Seen>,
    pub(super) line: Line,
    /// All flushes of the disk, its table's too: one that it refuses concerns every volume that had written.
    pub(super) flushes: Arc<Flushes>,
    /// Has the buffers for all that is below the line.
    pub(super) buffers: Owner,
}

/// What a disk is like, as it was when it was changed last.
#[derive(Default)]
struct Seen {
    /// Absent while the disk is not in force.
    table: Option<Table>,
    in_doubt: bool,
    damage: Option<String>,
    /// Volumes that are in force.
    users: BTreeSet<String>,
    /// Volumes that were not in force when the disk refused to make durable what a process that died may have written for their guests.
    lost: BTreeSet<String>,
}

/// Why a volume does not come into force a second time.
fn in_use(name: &str) -> ServiceError {
    refused(format!("volume {name} of the disk is in use already"))
}

struct Open {
    leg: Leg,
    region: Region,
    generation: u64,
    table: Table,
    /// Another table than this one may be found on the disk: it could neither be stored for certain nor be replaced again.
    in_doubt: bool,
    /// What was found to be wrong with a copy of the table.
    damage: Option<String>,
    flushes: Arc<Flushes>,
    /// The copy of the table that was written last may not be durable, though it can be read.
    unsure: bool,
    /// The disk refused the flush with which it was opened.
    refused: bool,
}

/// How a volume comes to its extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It is new on the disk.
    New,
    /// It is there, and was in force before.
    Own,
    /// It is new here, and the operator says that the disk has it.
    There,
    /// The same in a volume that is changed, which fills it where the disk does not have it.
    Either,
}

/// A disk's room, for the operator.
pub(super) struct Room {
    pub(super) extent: u64,
    pub(super) extents: u64,
    pub(super) free: u64,
    /// Volumes: name, size, whether in force.
    pub(super) volumes: Vec<(String, u64, bool)>,
    pub(super) damage: Option<String>,
}

fn refused(what: impl Into<String>) -> ServiceError {
    ServiceError::Legs(what.into())
}

impl Space {
    fn open_now(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk was changed, or was to be.
    fn note(&self, open: Option<&Open>) {
        let mut seen = self.seen();
        seen.table = open.map(|open| open.table.clone());
        seen.in_doubt = open.is_some_and(|open| open.in_doubt);
        seen.damage = open.and_then(|open| open.damage.clone());
    }

    fn with<T>(&self, work: impl FnOnce(&mut Open) -> Result<T, ServiceError>) -> Result<T, ServiceError> {
        let missing = || ServiceError::NotNow("the disk below is not in force".to_owned());
        let mut open = self.open_now();
        let result = work(open.as_mut().ok_or_else(missing)?);
        self.note(open.as_ref());
        result
    }

    /// Brings a disk into force: reads its table, or makes one where `new` allows it. `bytes` are those that it must have room for
    /// behind the table.
    pub(super) fn open(&self, leg: &Leg, extent: u64, bytes: u64, new: bool) -> Result<(), ServiceError> {
        let loaded = Open::load(leg, &self.flushes, extent, bytes, new)?;
        let mut open = self.open_now();
        if loaded.refused {
            let mut seen = self.seen();
            let volumes = loaded.table.volumes.keys();
            let lost: Vec<_> = volumes.filter(|name| !seen.users.contains(*name)).cloned().collect();
            seen.lost.extend(lost);
        }
        self.note(Some(open.insert(loaded)));
        Ok(())
    }

    /// Takes a disk out of force.
    pub(super) fn close(&self) {
        let mut open = self.open_now();
        *open = None;
        self.note(None);
    }

    /// The size of a volume that the disk has.
    pub(super) fn size_of(&self, name: &str) -> Option<u64> {
        Some(self.seen().table.as_ref()?.volumes.get(name)?.size)
    }

    /// A volume comes into force with so many bytes: its extents.
    pub(super) fn claim(&self, name: &str, size: u64, how: Claim) -> Result<Box<[u32]>, ServiceError> {
        // As after every change of its stack, while its guest waits: then nothing is to be changed.
        if how == Claim::Own
            && let Some(list) = self.seen().claim(name, size)?
        {
            return Ok(list);
        }
        let mut open = self.open_now();
        if self.seen().users.contains(name) {
            return Err(in_use(name));
        }
        let works = open.as_mut().ok_or_else(|| {
            refused("what is below is no disk that works; \"millrace disk create NAME STACK\" makes one".to_owned())
        })?;
        if how == Claim::There && !works.table.volumes.contains_key(name) {
            return Err(self.seen().is_not_there(name));
        }
        let claimed = works.claim(name, size, how);
        self.note(open.as_ref());
        let list = claimed?;
        if self.seen().users.insert(name.to_owned()) { Ok(list) } else { Err(in_use(name)) }
    }

    /// Whether what was written to a volume before it came into force may be lost, and nobody was told yet: now its guest is.
    pub(super) fn take_loss(&self, name: &str) -> bool {
        self.seen().lost.remove(name)
    }

    /// What [`Self::take_loss`] has taken was not told.
    pub(super) fn note_loss(&self, name: &str) {
        self.seen().lost.insert(name.to_owned());
    }

    /// A volume is not in force any more.
    pub(super) fn leave(&self, name: &str) {
        self.seen().users.remove(name);
    }

    /// Gives a volume that shows so many bytes more room, or less than an extent of it: all of its extents then.
    pub(super) fn grow(&self, name: &str, shown: u64, size: u64) -> Result<Box<[u32]>, ServiceError> {
        self.with(|open| {
            // What it gave up when that could not be stored is given up first, and cleared like any other's.
            if open.table.volumes.get(name).is_some_and(|entry| entry.size > shown) {
                open.shrink(name, shown)?;
            }
            open.grow(name, size)
        })
    }

    /// Takes room from a volume, which shows none of it any more; its extents then. On error it has all that it had, after a restart
    /// too. Where that cannot be said, because the disk takes neither the new table nor the one before, the volume is smaller, and
    /// only its room is given up later.
    pub(super) fn shrink(&self, name: &str, size: u64) -> Result<Box<[u32]>, ServiceError> {
        self.with(|open| {
            if let Err(error) = open.shrink(name, size) {
                if !open.in_doubt {
                    return Err(error);
                }
                let disk = open.leg.name();
                tracing::warn!(volume = name, disk, %error, "a volume is smaller now, and its room is given up later");
            }
            Ok(open.table.volumes.get(name).map(Entry::list).unwrap_or_default())
        })
    }

    /// Gives up a volume that is not in force.
    pub(super) fn release(&self, name: &str) -> Result<u64, ServiceError> {
        let mut open = self.open_now();
        {
            let mut seen = self.seen();
            if seen.users.contains(name) {
                return Err(ServiceError::NotNow(format!(
                    "volume {name} is in use: delete it by \"millrace volume delete\""
                )));
            }
            // It does not come into force meanwhile.
            if let Some(table) = &mut seen.table {
                table.volumes.remove(name);
            }
        }
        let result = open.as_mut().ok_or_else(|| ServiceError::NotNow("the disk is not in force".to_owned()));
        let result = result.and_then(|open| open.release(name));
        if result.is_ok() {
            // Only now: where the volume stays, whoever takes it is to be told.
            self.seen().lost.remove(name);
        }
        self.note(open.as_ref());
        result
    }

    /// The disk has room for so many bytes behind its table from now on.
    pub(super) fn resize(&self, bytes: u64) -> Result<(), ServiceError> {
        self.with(|open| open.set_extents(bytes))
    }

    pub(super) fn room(&self) -> Option<Room> {
        let seen = self.seen();
        let table = seen.table.as_ref()?;
        let volume = |(name, entry): (&String, &Entry)| (name.clone(), entry.size, seen.users.contains(name));
        Some(Room {
            extent: table.extent,
            extents: u64::from(table.extents.saturating_sub(1)),
            free: table.free_extents(),
            volumes: table.volumes.iter().map(volume).collect(),
            damage: seen.damage.clone(),
        })
    }
}

impl Seen {
    /// See [`Space::claim`]; `None` where the disk must be asked.
    fn claim(&mut self, name: &str, size: u64) -> Result<Option<Box<[u32]>>, ServiceError> {
        if self.users.contains(name) {
            return Err(in_use(name));
        }
        let entry = self.table.as_ref().and_then(|table| table.volumes.get(name));
        let Some(entry) = entry.filter(|entry| entry.size == size && !self.in_doubt) else { return Ok(None) };
        let list = entry.list();
        self.users.insert(name.to_owned());
        Ok(Some(list))
    }

    /// The disk does not have a volume that it should: an empty one would look like it.
    fn is_not_there(&self, name: &str) -> ServiceError {
        let all = self.table.iter().flat_map(|table| table.volumes.keys());
        let unused: Vec<_> = all.filter(|name| !self.users.contains(*name)).map(String::as_str).collect();
        let more = unused.len().saturating_sub(NAMED);
        let names = match (&unused[..], more) {
            ([], _) => "nothing that is not in use".to_owned(),
            (names, 0) => format!("these that are not in use: {}", names.join(", ")),
            (names, more) => format!("these that are not in use: {} and {more} more", names[..NAMED].join(", ")),
        };
        refused(format!(
            "existing=true, and the disk has no volume {name}; it has {names}. Give the volume the name that it has there, \
             or leave existing=true out to make a new one"
        ))
    }
}

/// Extents of a disk with so many bytes behind its table, the table's counted.
fn extents_in(bytes: u64, extent: u64) -> Result<u32, ServiceError> {
    let extents = bytes / extent + 1;
    u32::try_from(extents).map_err(|_| refused(format!("it would have {extents} extents: choose larger ones")))
}

impl Open {
    fn load(leg: &Leg, flushes: &Arc<Flushes>, extent: u64, bytes: u64, new: bool) -> Result<Self, ServiceError> {
        let region = region(extent);
        let wrong = |what: String| ServiceError::Content { leg: leg.name().to_owned(), what };
        let found = region.load(leg)?;
        let extents = extents_in(bytes, extent)?;
        let mut open = Self {
            leg: Arc::clone(leg),
            region,
            generation: 0,
            table: Table::new(extent, extents),
            in_doubt: false,
            damage: None,
            flushes: Arc::clone(flushes),
            unsure: false,
            refused: false,
        };
        // A copy that a process that died had written may not be durable yet, and the next store goes over the other one.
        let flushed = if found.is_some() && !leg.geometry().read_only { open.flush() } else { Ok(()) };
        let mut uneven = false;
        match found {
            None if new => open.store(open.table.clone())?,
            None => return Err(wrong("there is no table of a disk on it: it is another leg, or damaged".to_owned())),
            Some(found) => {
                open.table = Table::decode(&found.content).map_err(wrong)?;
                open.generation = found.generation;
                uneven = !found.is_even();
                open.damage = found.damaged;
            }
        }
        let has = open.table.extent;
        if has != extent {
            return Err(wrong(format!("it is a disk with extents of {has} bytes: write disk(extent={has})")));
        }
        if open.table.end() > extents {
            let (table, fits) = (open.table.end() - 1, extents - 1);
            return Err(wrong(format!(
                "its table gives away {table} extents of {extent} bytes, and there is room for {fits}: part of the disk is missing"
            )));
        }
        if let Err(error) = flushed {
            tracing::warn!(leg = leg.name(), %error, "a disk is opened; what was written to its volumes last may be lost");
            (open.unsure, open.refused) = (true, true);
        }
        if let Some(damage) = &open.damage {
            tracing::warn!(leg = leg.name(), damage, "the other copy of a disk's table is used; it is written anew");
        }
        if uneven {
            // Damaged, or a store that a crash cut short.
            open.store(open.table.clone())?;
        }
        if open.table.extents != extents {
            // The leg has grown; or a change of the disk's size was cut short by a crash.
            open.set_extents(bytes)?;
        }
        Ok(open)
    }

    fn wrong(&self, what: String) -> ServiceError {
        ServiceError::Content { leg: self.leg.name().to_owned(), what }
    }

    /// Replaces the table. On error the one before is there still, or [`Self::in_doubt`] says that nobody knows.
    fn store(&mut self, table: Table) -> Result<(), ServiceError> {
        let content = table.encode();
        if content.len() > self.region.room() {
            return Err(refused(format!(
                "the disk's table is full: {} bytes are there for it, and {} would be needed; larger extents make fewer pieces",
                self.region.room(),
                content.len()
            )));
        }
        if self.unsure {
            // What follows goes over the other copy.
            self.store_copy(self.generation, &self.table.encode())?;
            self.unsure = false;
        }
        let next = self.generation + 1;
        if let Err(error) = self.store_copy(next, &content) {
            // It may be there all the same, and would be found at the next start: what counts takes its place.
            let put_back = self.store_copy(next, &self.table.encode());
            self.in_doubt = put_back.is_err();
            if put_back.is_ok() {
                self.generation = next;
            }
            return Err(error);
        }
        (self.generation, self.table, self.in_doubt) = (next, table, false);
        // In both copies: one that rots does not bring back the table before, which gives a volume's blocks to nobody.
        match self.store_copy(next + 1, &content) {
            Ok(()) => self.generation = next + 1,
            Err(error) => {
                tracing::warn!(leg = self.leg.name(), %error, "a disk's table is stored in one copy only");
            }
        }
        Ok(())
    }

    /// [`Region::store`], with the disk's flushes.
    fn store_copy(&self, generation: u64, content: &[u8]) -> Result<(), ServiceError> {
        let (offset, copy) = self.region.copy(generation, content);
        self.durably("write", move |cx, leg| Box::pin(legs::write_bytes(cx, &**leg, offset, copy)))
    }

    fn flush(&self) -> Result<(), ServiceError> {
        self.durably("flush", |_, _| Box::pin(async { Ok(()) }))
    }

    /// Does work on the leg, and makes durable what it wrote.
    fn durably<W>(&self, what: &'static str, work: W) -> Result<(), ServiceError>
    where
        W: for<'a> FnOnce(TaskContext<'a>, &'a Leg) -> LocalFuture<'a, Result<(), BlockError>> + 'static,
    {
        let (leg, flushes) = (Arc::clone(&self.leg), Arc::clone(&self.flushes));
        let done = legs::block_on(move |cx| {
            Box::pin(async move {
                // Before the work: whatever is refused from then on may be what it wrote.
                let failed = flushes.failed();
                work(cx, &leg).await?;
                flushes.flush(cx, &*leg, failed).await
            })
        })?;
        done.map_err(|source| ServiceError::Leg { what, leg: self.leg.name().to_owned(), source })
    }

    /// See [`Space::claim`].
    fn claim(&mut self, name: &str, size: u64, how: Claim) -> Result<Box<[u32]>, ServiceError> {
        let has = self.table.volumes.get(name).map(|entry| entry.size);
        match (has, how) {
            (Some(has), Claim::New) => {
                return Err(refused(format!(
                    "the disk has a volume {name} of {has} bytes already: share(existing=true) takes it as it is; \
                     the disk's command \"release name={name}\" gives it up"
                )));
            }
            (None, Claim::Own) => {
                return Err(self.wrong(format!("its table has no volume {name}: it is another disk, or an older copy")));
            }
            (None, _) => drop(self.grow(name, size)?),
            (Some(has), _) if has < size => {
                return Err(self.wrong(format!("its table gives volume {name} {has} bytes, and it should have {size}")));
            }
            (Some(has), Claim::There | Claim::Either) if has != size => {
                return Err(refused(format!("the disk has volume {name} with {has} bytes: say that size, or none")));
            }
            // What is stored of a volume counts: a growth that was not stored any more did not take place.
            (Some(has), _) if has > size => self.shrink(name, size)?,
            (Some(_), _) => {}
        }
        if self.in_doubt {
            // Another table may be found at the next start, in which the volume is not.
            self.store(self.table.clone())?;
        }
        Ok(self.table.volumes.get(name).map(Entry::list).unwrap_or_default())
    }

    fn release(&mut self, name: &str) -> Result<u64, ServiceError> {
        let mut table = self.table.clone();
        let entry = table.volumes.remove(name).ok_or_else(|| ServiceError::Command(format!("it has no volume {name}")))?;
        self.store(table)?;
        self.give_back(&entry.pieces);
        Ok(entry.size)
    }

    fn set_extents(&mut self, bytes: u64) -> Result<(), ServiceError> {
        let extents = extents_in(bytes, self.table.extent)?;
        if extents < self.table.end() {
            let needed = u64::from(self.table.end() - 1) * self.table.extent;
            return Err(refused(format!("its volumes reach to byte {needed}: shrink or delete them first")));
        }
        self.store(Table { extents, ..self.table.clone() })
    }

    fn grow(&mut self, name: &str, size: u64) -> Result<Box<[u32]>, ServiceError> {
        if name.len() > LONGEST_NAME {
            return Err(refused(format!("its name has {} bytes, and {LONGEST_NAME} are possible", name.len())));
        }
        let mut table = self.table.clone();
        let mut entry = table.volumes.remove(name).unwrap_or_default();
        let (extent, has) = (table.extent, entry.extents());
        let more = size.div_ceil(extent).saturating_sub(has);
        let Some(new) = self.table.choose(&entry, more) else {
            let free = self.table.free_extents() * extent;
            return Err(refused(format!(
                "the disk has {free} bytes free, and volume {name} needs {} more",
                more.saturating_mul(extent)
            )));
        };
        // What a smaller size left in the last extent is the volume's own, and must not be seen either.
        let within = entry.size % extent;
        let last = entry.pieces.last().filter(|_| within > 0).map(|last| last.first + last.count - 1);
        let tail = last.map(|last| (u64::from(last) * extent + within, extent - within));
        let whole = new.iter().map(|piece| (u64::from(piece.first) * extent, u64::from(piece.count) * extent));
        self.erase(tail.into_iter().chain(whole), Operation::WriteZeroes { fua: false, deallocate: true })?;
        entry.extend(&new);
        entry.size = size;
        let list = entry.list();
        table.volumes.insert(name.to_owned(), entry);
        self.store(table)?;
        Ok(list)
    }

    fn shrink(&mut self, name: &str, size: u64) -> Result<(), ServiceError> {
        let mut table = self.table.clone();
        let Some(entry) = table.volumes.get_mut(name) else {
            return Err(self.wrong(format!("its table has no volume {name}")));
        };
        let gone = entry.truncate(size.div_ceil(table.extent));
        entry.size = size;
        self.store(table)?;
        self.give_back(&gone);
        Ok(())
    }

    /// Only so that the medium has its space again: who gets these extents next has them cleared.
    fn give_back(&self, gone: &[Piece]) {
        let extent = self.table.extent;
        let ranges = gone.iter().map(|piece| (u64::from(piece.first) * extent, u64::from(piece.count) * extent));
        if let Err(error) = self.erase(ranges, Operation::Deallocate) {
            tracing::debug!(leg = self.leg.name(), %error, "what a volume gave up was not given back by the disk");
        }
    }

    /// Erases ranges of bytes, and makes that durable.
    fn erase(&self, ranges: impl Iterator<Item = (u64, u64)>, operation: Operation) -> Result<(), ServiceError> {
        let shift = self.leg.geometry().block_size.shift();
        let ranges: Vec<_> = ranges.map(|(offset, len)| (offset >> shift, BlockCount(len >> shift))).collect();
        if ranges.is_empty() {
            return Ok(());
        }
        self.durably("clear", move |cx, leg| {
            Box::pin(async move {
                for (lba, count) in ranges {
                    for (at, count) in pieces(&leg.geometry(), count, ERASE) {
                        let request = Request { operation, lba: Lba(lba + at), count, segments: &[] };
                        leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await?;
                    }
                }
                Ok(())
            })
        })
    }
}
