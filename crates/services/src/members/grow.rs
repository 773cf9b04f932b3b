//! Growing: the legs become longer, and their areas move to the new ends.
//!
//! ```text
//!   before    data │ area                                  the area is in force
//!   announced data │ area │ new, zeroes             │ note  the same; the note says where the area is, the table what is to come
//!   moved     data │ old  │ new, zeroes             │ area  with marks on all that is new; the old area is erased
//!   done      data   data                           │ area
//! ```
//!
//! [`Members::grow`] announces. Until the new part is used for the first time ([`Members::open_up`]) the legs can be opened with the
//! size before as well: it may be that nobody has stored the new one. Once it is used everybody has, and the rest is done.
//!
//! Invariants:
//! * A leg that is opened with one of the two sizes has a table or a note at its end, or is shorter than that size.
//! * Old areas are erased when all legs in use have their tables at their new ends, and shown as data when that is durable.

use std::{
    ops::Range,
    sync::{Arc, PoisonError, atomic::Ordering},
};

use millrace_block::{BlockCount, BlockError, TaskContext, Volume, VolumeError};

use super::{
    Members, TABLES,
    intent::REGIONS,
    state::{Id, Table, legs_of},
    why::Refusals,
};
use crate::{
    legs,
    legs::Leg,
    record::{self, Region},
    service::ServiceError,
};

/// Bytes of a note.
const NOTE: usize = 24;

/// Where a leg's area is, and its table.
pub(super) struct Placed {
    pub(super) area: u64,
    pub(super) record: Option<record::Found>,
}

/// At the end of a leg that grew: where its area still is.
struct Note {
    set: Id,
    area: u64,
}

impl Note {
    fn encode(&self) -> Vec<u8> {
        [&self.set[..], &self.area.to_le_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (set, area) = bytes.get(..NOTE)?.split_at(size_of::<Id>());
        Some(Self { set: set.try_into().ok()?, area: u64::from_le_bytes(area.try_into().ok()?) })
    }
}

/// A leg and its length before it grew.
pub(super) type Length = (usize, BlockCount);

impl Members {
    /// Where notes are, in the area that begins there.
    fn note_region(&self, area: u64) -> Option<Region> {
        self.rules.note_magic.map(|magic| Region { magic, version: 1, offset: area, len: TABLES / 2 })
    }

    /// Looks for a leg's area: at its end, or where a note there says.
    pub(super) fn find(&self, leg: &Leg) -> Result<Placed, ServiceError> {
        let area = self.rules.area_of(&**leg);
        let record = self.rules.table_region(area).load(leg);
        if matches!(record, Ok(Some(_))) {
            return record.map(|record| Placed { area, record });
        }
        // A table that was being stored may have spoilt one copy of the note; the other one is still there.
        let note = self.note_region(area).and_then(|region| region.load(leg).ok().flatten());
        let Some(note) = note.and_then(|note| Note::decode(&note.content)) else {
            return record.map(|record| Placed { area, record });
        };
        let before = note.area.is_multiple_of(4096) && note.area.checked_add(TABLES).is_some_and(|end| end <= area);
        let found = if before { self.rules.table_region(note.area).load(leg)? } else { None };
        let is_ours = |found: &record::Found| Table::decode(&found.content).is_some_and(|(table, _)| table.set == note.set);
        match found.filter(is_ours) {
            Some(found) => Ok(Placed { area: note.area, record: Some(found) }),
            None => Err(ServiceError::Content {
                leg: leg.name().to_owned(),
                what: format!("it was being made longer, and its records are not at byte {} any more", note.area),
            }),
        }
    }

    /// Bytes before and after, while there is room for more than is used.
    fn growth(&self) -> Option<(u64, u64)> {
        let on_legs = self.on_legs();
        let table = &on_legs.as_ref()?.table;
        Some((table.bytes, table.growing?))
    }

    /// What follows from a table that comes into force.
    pub(super) fn note_growth(&self, table: &Table) {
        // A leg that was out of use when the others went on to their ends: where its area was are data.
        for (leg, area) in self.legs.iter().zip(&self.areas) {
            if table.growing.is_none() && area.load(Ordering::Relaxed) < table.bytes {
                area.store(self.rules.area_of(&**leg), Ordering::Relaxed);
            }
        }
        // What was erased and what not is not known.
        self.erased_from.store(self.bytes(), Ordering::Relaxed);
        self.ready.store(if table.growing.is_some() { table.bytes } else { self.bytes() }, Ordering::Release);
    }

    /// Whether the legs may be used up to this byte. Acquire: pairs with the release of whoever opened it up.
    #[inline]
    pub(crate) fn is_ready(&self, end: u64) -> bool {
        end <= self.ready()
    }

    /// Bytes of the legs that may be used; more after [`Self::open_up`].
    #[inline]
    pub(crate) fn ready(&self) -> u64 {
        self.ready.load(Ordering::Acquire)
    }

    /// Makes room for so many bytes on each leg, on the calling thread. What is new reads as zeroes. On error nothing has changed, but that
    /// a leg which refused a flush is out of use if it can be.
    pub(crate) fn grow(self: &Arc<Self>, bytes: u64) -> Result<(), VolumeError> {
        let mut lengths = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = |why: String| VolumeError::Refused { volume: self.name.clone(), why };
        let failed = |what: &str, error: &dyn std::fmt::Display| refused(format!("cannot {what}: {error}"));
        // What it grew by before is in use when more is asked for.
        let ready = self.wait_for(|me, cx| Box::pin(async move { me.open_up(cx).await }));
        let finish = |error: &dyn std::fmt::Display| failed("finish the growth before", error);
        ready.map_err(|error| finish(&error))?.map_err(|error| finish(&error))?;
        self.check_growth(bytes)?;
        *lengths = self.lengthen(bytes)?;
        let announced = self.wait_for(move |me, cx| {
            Box::pin(async move {
                let announced = me.announce(cx, bytes).await;
                if announced.is_err() {
                    // It may have dropped what the others have, and would be read.
                    me.drop_refusing(cx).await;
                }
                announced
            })
        });
        let error = match announced {
            Ok(Ok(())) => {
                self.show(bytes);
                return Ok(());
            }
            Ok(Err((Some(leg), error))) => failed(&format!("prepare leg {leg} ({})", self.leg_name(leg)), &error),
            Ok(Err((None, error))) => failed("store the tables", &error),
            Err(error) => failed("prepare its legs", &error),
        };
        self.shorten(&lengths);
        lengths.clear();
        Err(error)
    }

    /// Takes the last growth back, on the calling thread; false when what it grew by was used.
    pub(crate) fn take_back(self: &Arc<Self>) -> Result<bool, VolumeError> {
        let mut lengths = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let grown = lengths.iter().fold(0, |legs, (leg, _)| legs | 1_u8 << leg);
        let result = self.wait_for(move |me, cx| Box::pin(async move { me.withdraw(cx, grown).await }));
        let refused = |error: String| VolumeError::Refused { volume: self.name.clone(), why: error };
        let withdrawn = result.map_err(|error| refused(error.to_string()))?;
        let withdrawn = withdrawn.map_err(|error| refused(format!("cannot store the tables: {error}")))?;
        if withdrawn {
            self.shorten(&lengths);
            lengths.clear();
        }
        Ok(withdrawn)
    }

    /// This is its size.
    pub(super) fn show(&self, bytes: u64) {
        if let Some(intent) = self.intent() {
            intent.cover(bytes);
        }
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Whether legs can have so many bytes of data, as far as can be known before they are asked.
    fn check_growth(&self, bytes: u64) -> Result<(), VolumeError> {
        let refused = |why| Err(VolumeError::Refused { volume: self.name.clone(), why });
        let masks = self.masks();
        if let Some(leg) = (0..self.legs.len()).find(|leg| masks.writable >> leg & 1 == 0) {
            let name = self.leg_name(leg);
            return refused(format!(
                "leg {leg} ({name}) is out of use and cannot grow with the others: rebuild it, or leave it out (\"volume change\")"
            ));
        }
        let Some(intent) = self.intent() else { return refused(format!("the {} is not in force", self.rules.service)) };
        let most = REGIONS.saturating_mul(1 << intent.shift());
        if bytes > most {
            let region = 1_u64 << intent.shift();
            return refused(format!(
                "its bitmap has {REGIONS} regions of {region} bytes, which is enough for {most} bytes on each leg and not for {bytes}: \
                 make a new {} with a larger region, and copy",
                self.rules.service
            ));
        }
        let needed = self.rules.leg_bytes(bytes);
        let moves_by = |leg: usize| needed.saturating_sub(self.rules.area).saturating_sub(self.area(leg));
        if (0..self.legs.len()).any(|leg| (1..self.rules.area).contains(&moves_by(leg))) {
            return refused(format!("it grows by {} bytes at least, or not at all", self.rules.area));
        }
        Ok(())
    }

    /// Lengthens the legs that are too short for so many bytes of data; what they had. On error all are as they were.
    fn lengthen(&self, bytes: u64) -> Result<Vec<Length>, VolumeError> {
        let (needed, mut done) = (self.rules.leg_bytes(bytes), Vec::new());
        for (at, leg) in self.legs.iter().enumerate() {
            let geometry = leg.geometry();
            // One whose area is not at its end could not be shortened after a growth that was taken back.
            if geometry.bytes() >= needed && self.area(at) == self.rules.area_of(&**leg) {
                continue;
            }
            if let Err(error) = leg.resize(BlockCount(needed >> geometry.block_size.shift())) {
                self.shorten(&done);
                let why = format!("leg {at} cannot grow, and so no leg did: {error}");
                return Err(VolumeError::Refused { volume: self.name.clone(), why });
            }
            done.push((at, geometry.blocks));
        }
        Ok(done)
    }

    /// Gives legs the lengths back that they had.
    fn shorten(&self, lengths: &[Length]) {
        for (at, blocks) in lengths {
            if let Err(error) = self.legs[*at].resize(*blocks) {
                tracing::warn!(name = self.name, leg = at, %error, "a leg stays longer than it need be");
            }
        }
    }

    /// The legs are long enough: says at their ends where their areas are, and in these what is to come. Whose fault an error is.
    async fn announce(&self, cx: TaskContext<'_>, bytes: u64) -> Result<(), (Option<usize>, BlockError)> {
        let (before, set) = match &*self.on_legs() {
            Some(on_legs) => (on_legs.table.bytes, on_legs.table.set),
            None => return Err((None, BlockError::NotReady)),
        };
        let mut erased_from = before;
        for (leg, volume) in self.legs.iter().enumerate() {
            let (area, end) = (self.area(leg), self.rules.area_of(&**volume));
            let result = if area == end {
                self.erase_on(cx, leg, before..bytes).await
            } else {
                let after = area + self.rules.area;
                erased_from = erased_from.max(after.min(bytes));
                self.prepare(cx, leg, [before..area, after..end + self.rules.area], &Note { set, area }).await
            };
            result.map_err(|error| (Some(leg), error))?;
        }
        self.erased_from.store(erased_from, Ordering::Relaxed);
        self.say_growing(cx, Some(bytes)).await.map_err(|error| (None, error))
    }

    /// Erases what is new on a leg, and then notes at its end where its area is.
    async fn prepare(&self, cx: TaskContext<'_>, leg: usize, new: [Range<u64>; 2], note: &Note) -> Result<(), BlockError> {
        for range in new {
            self.erase_on(cx, leg, range).await?;
        }
        let end = self.rules.area_of(&*self.legs[leg]);
        let Some(region) = self.note_region(end) else { return Err(BlockError::Unsupported) };
        // Twice: see `find`.
        for generation in 0..2 {
            self.store_on(cx, leg, region, generation, &note.encode()).await?;
        }
        Ok(())
    }

    /// Makes bytes of a leg read as zeroes, durably. A volume may have ended within what is a block now.
    async fn erase_on(&self, cx: TaskContext<'_>, leg: usize, bytes: Range<u64>) -> Result<(), BlockError> {
        let volume = &*self.legs[leg];
        let shift = volume.geometry().block_size.shift();
        let start = bytes.start >> shift << shift;
        legs::clear_all(cx, volume, start, bytes.end - start).await?;
        self.flush_leg(cx, leg).await
    }

    /// Stores in the tables what the legs grow to.
    async fn say_growing(&self, cx: TaskContext<'_>, growing: Option<u64>) -> Result<(), BlockError> {
        let before = self.change_growth(|table| std::mem::replace(&mut table.growing, growing)).flatten();
        let result = self.store_for_all(cx).await;
        if result.is_err() {
            self.change_growth(|table| table.growing = before);
        }
        result
    }

    fn change_growth<T>(&self, change: impl FnOnce(&mut Table) -> T) -> Option<T> {
        self.on_legs().as_mut().map(|on_legs| change(&mut on_legs.table))
    }

    /// Stores the table on all legs in use, and drops those that refuse.
    async fn store_for_all(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let failed = {
            let _turn = self.table_turn.take(cx).await;
            self.store_table(cx, self.masks().writable).await?
        };
        self.drop_legs(cx, failed.legs, failed.why()).await
    }

    /// See [`Self::take_back`]. `grown` are the legs that became longer.
    async fn withdraw(&self, cx: TaskContext<'_>, grown: u8) -> Result<bool, BlockError> {
        let _turn = self.page_turn.take(cx).await;
        let Some((before, _)) = self.growth() else { return Ok(false) };
        let has_moved = |leg: usize| self.area(leg) == self.rules.area_of(&*self.legs[leg]);
        if grown == 0 || legs_of(grown).any(has_moved) {
            return Ok(false);
        }
        self.say_growing(cx, None).await?;
        self.show(before);
        self.erased_from.store(before, Ordering::Relaxed);
        Ok(true)
    }

    /// Makes all that there is room for usable. When it returns, the areas are at the legs' ends, and where they were are zeroes.
    pub(crate) async fn open_up(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        if self.is_ready(self.bytes()) {
            return Ok(());
        }
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        let _turn = self.page_turn.take(cx).await;
        let Some((before, after)) = self.growth() else { return Ok(()) };
        // A leg that fails from now on misses what is erased below.
        intent.want(&intent.regions_of(before, after));
        self.move_areas(cx).await?;
        let (mut failed, erased_from) = (Refusals::default(), self.erased_from.load(Ordering::Relaxed));
        for leg in legs_of(self.masks().writable) {
            failed.note(leg, self.erase_on(cx, leg, before..erased_from).await);
        }
        self.drop_legs(cx, failed.legs, failed.why()).await?;
        self.change_growth(|table| (table.bytes, table.growing) = (after, None));
        let stored = self.store_for_all(cx).await;
        match stored {
            Ok(()) => self.ready.store(after, Ordering::Release),
            Err(_) => _ = self.change_growth(|table| (table.bytes, table.growing) = (before, Some(after))),
        }
        stored
    }

    /// Stores bitmap and table at the ends of the legs in use, and from now on only there. The caller has the turn of the bitmap. After
    /// an error it is not known what is there: nothing else is stored before this was done.
    pub(super) async fn move_areas(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        self.moving.store(true, Ordering::Relaxed);
        let (wanted, masks) = (intent.wanted(), self.masks());
        for leg in legs_of(masks.writable) {
            self.areas[leg].store(self.rules.area_of(&*self.legs[leg]), Ordering::Relaxed);
        }
        let failed = self.store_page_on(cx, &wanted, masks.writable, masks.filling()).await?;
        self.drop_legs(cx, failed.legs, failed.why()).await?;
        self.store_for_all(cx).await?;
        intent.stored(&wanted);
        self.moving.store(false, Ordering::Relaxed);
        Ok(())
    }
}
