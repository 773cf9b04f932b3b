//! What services with redundancy keep in common: which of their legs are good, and what the legs say about that.
//!
//! ```text
//!   Masks     which legs are read, written, recorded as failed: one word, looked at by every request
//!   Table     the same as it lies on every leg, with what happened so far (members, events)
//!   Intent    the write-intent bitmap: where the legs may disagree after a crash
//!
//!   a leg fails ─► masks change ─► the others are flushed, and say so durably ─► the write that missed it is acknowledged
//!   mount ─► what does each leg say? ─► decide: good, to be filled, failed, or not to be put together at all
//!   grow ─► all legs ─► a note at each new end ─► said on all ─► first use of what is new: the records move there
//!   format ─► said on all ─► each leg is erased ─► said on all that it is done; a mount that finds one under way does it again
//!
//!   leg:      the service's own … │ members (two copies) │ bitmap (two copies) │ the service's own …
//! ```
//!
//! Invariants:
//! * A leg that missed an acknowledged write is recorded as failed on all others.
//! * There are never fewer good legs than the service needs to have all data.
//! * A leg that refused a flush is known to all who flush it until the others say that it failed, or the guest is told.
//!
//! It moves no data: what a leg lacks is filled by the service.

pub(crate) mod decide;
mod format;
mod grow;
pub(crate) mod intent;
mod meta;
mod refused;
pub(crate) mod state;
pub(crate) mod why;

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use millrace_block::{BlockError, BlockSize, TaskContext, Volume};

use self::{
    intent::{Intent, least_shift},
    meta::Decided,
    refused::Refused,
    state::{LegState, MOST_LEGS, Masks, Member, NEWEST, OnLegs, SharedMasks, Table, legs_of},
    why::Why,
};
use crate::{
    background::LocalFuture,
    legs::{Leg, block_on},
    locks::{Ranges, Turn, until},
    losses::Losses,
    record::Region,
    service::{Build, ServiceError},
    settings::{SettingError, Settings},
};

/// Bytes of the members' and the bitmap's records together.
pub(crate) const TABLES: u64 = 64 << 10;
/// Smallest region of the bitmap, as a power of two.
pub(crate) const LEAST_REGION: u32 = 16;
/// The region where none is set, as a power of two.
const USUAL_REGION: u32 = 22;
/// How often marks are looked at while legs are brought together, in nanoseconds: where they are gone nothing is done again at the next opening.
pub(crate) const SAVE_EVERY: u64 = 30_000_000_000;
/// How long a scrub goes on until it is looked for other work, in nanoseconds.
pub(crate) const SCRUB_TURN: u64 = 5_000_000_000;

/// What differs between services.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The service's name: for messages.
    pub(crate) service: &'static str,
    /// Tells its members' records from others.
    pub(crate) table_magic: [u8; 8],
    /// Tells its bitmaps from others.
    pub(crate) page_magic: [u8; 8],
    /// Bytes at the end of each leg that are the service's own; the tables are the first [`TABLES`] of them.
    pub(crate) area: u64,
    /// So many good legs have all data.
    pub(crate) least: usize,
    /// Each leg has its own place: what is on it is not what is on the others.
    pub(crate) placed: bool,
    /// How the data lie on the legs, in numbers of the service's own; zeroes: nothing to be said.
    pub(crate) form: [u32; 4],
    /// The settings that these numbers are; what is none is empty.
    pub(crate) form_settings: [&'static str; 4],
    /// Its legs can grow ([`Members::grow`]): tells the notes at their new ends from others.
    pub(crate) note_magic: Option<[u8; 8]>,
}

impl Rules {
    /// Bytes that a leg needs for so many bytes of data.
    pub(crate) fn leg_bytes(&self, bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(4096).and_then(|bytes| bytes.checked_add(self.area)).unwrap_or(u64::MAX)
    }

    /// Where a leg's area begins.
    pub(crate) fn area_of(&self, leg: &dyn Volume) -> u64 {
        (leg.geometry().bytes() >> 12 << 12).saturating_sub(self.area)
    }

    /// The record of the members in the area that begins there.
    pub(crate) fn table_region(&self, area: u64) -> Region {
        Region { magic: self.table_magic, version: NEWEST, offset: area, len: TABLES / 2 }
    }

    /// The record of the write-intent bitmap.
    pub(crate) fn page_region(&self, area: u64) -> Region {
        Region { magic: self.page_magic, version: 1, offset: area + TABLES / 2, len: TABLES / 2 }
    }
}

/// See the module.
pub(crate) struct Members {
    pub(crate) rules: Rules,
    /// The service's name, for messages.
    pub(crate) name: String,
    /// The volume's name.
    label: String,
    pub(crate) legs: Vec<Leg>,
    /// Bytes of data on each leg.
    bytes: AtomicU64,
    /// Those of them that may be used: the rest needs [`Self::open_up`] first.
    ready: AtomicU64,
    /// What is new reads as zeroes on all legs from here on.
    erased_from: AtomicU64,
    /// Where the area of each leg begins.
    areas: [AtomicU64; MOST_LEGS],
    /// The areas are on their way to the legs' new ends, where no table is yet.
    moving: AtomicBool,
    /// One size after the other: how long legs were before they grew.
    resizing: Mutex<Vec<grow::Length>>,
    /// The region's size if all is new, as a power of two.
    region_shift: u32,
    masks: SharedMasks,
    /// The legs that were read when everything was stopped: no masks tell any more.
    read_last: AtomicU8,
    /// Ranges of the legs that somebody works on.
    pub(crate) ranges: Ranges,
    /// Filled by the first mount.
    intent: OnceLock<Intent>,
    /// The turn to change the table.
    table_turn: Turn,
    /// The turn to store the bitmap.
    pub(crate) page_turn: Turn,
    /// One leg after the other is taken into use again.
    rebuilding: Mutex<()>,
    /// A leg is written again, and what it missed is not stale yet.
    admitting: AtomicBool,
    on_legs: Mutex<Option<OnLegs>>,
    /// Of each leg, which copy of its table was damaged when it was opened.
    damaged: Mutex<Vec<Option<String>>>,
    /// Legs of which it is known that they lack something of which no mark tells.
    lacks_unmarked: AtomicU8,
    /// Legs that the operator has taken out, and that are to get the decided regions, of which no mark tells yet.
    asked: AtomicU8,
    /// Legs that refused a flush, whoever asked them.
    refused: Refused,
    /// Of them those that had to stay, where each leg has its own place ([`Self::note_unflushed`]).
    pub(crate) unflushed: Refused,
    /// What the guest has to be told at its next flush.
    pub(crate) losses: Losses,
    /// Legs that failed.
    pub(crate) dropped: AtomicU64,
    /// Stale regions when resync began.
    pub(crate) resync_total: AtomicU64,
    /// Times that a region could not be brought in order, since all were.
    undone: AtomicU64,
}

/// Whether the leg is at fault, and not the request.
pub(crate) fn is_fault(error: BlockError) -> bool {
    match error {
        BlockError::ReadFault { .. }
        | BlockError::WriteFault { .. }
        | BlockError::NoSpace
        | BlockError::NotReady
        | BlockError::ReadOnly
        | BlockError::Unsupported => true,
        BlockError::OutOfRange | BlockError::Miscompare | BlockError::Memory | BlockError::CalledOff => false,
    }
}

/// The setting `region`, as a power of two.
pub(crate) fn region_setting(settings: &Settings) -> Result<Option<u32>, SettingError> {
    let region = settings.size("region")?;
    if region.is_some_and(|region| !region.is_power_of_two() || region < 1 << LEAST_REGION) {
        return Err(SettingError::new("region", "a power of two of at least 64K is possible"));
    }
    Ok(region.map(u64::trailing_zeros))
}

/// Refuses legs that stand there twice, and legs that cannot be written.
pub(crate) fn check_legs(legs: &[Leg]) -> Result<(), ServiceError> {
    for (at, leg) in legs.iter().enumerate() {
        if legs[..at].iter().any(|other| Arc::ptr_eq(leg, other)) {
            return Err(ServiceError::Legs(format!("leg {at} ({}) stands there twice", leg.name())));
        }
        if leg.geometry().read_only {
            return Err(ServiceError::Legs(format!("leg {at} ({}) is read-only", leg.name())));
        }
    }
    Ok(())
}

/// The region's size for so many bytes on each leg, as a power of two.
pub(crate) fn region_shift(set: Option<u32>, bytes: u64) -> Result<u32, SettingError> {
    let least = least_shift(bytes).max(LEAST_REGION);
    let shift = set.unwrap_or(least.max(USUAL_REGION));
    if shift < least {
        let regions = intent::REGIONS;
        let why = format!("a volume of this size needs {} bytes at least (there are {regions} regions)", 1_u64 << least);
        return Err(SettingError::new("region", why));
    }
    Ok(shift)
}

impl Members {
    /// The members of what is to be built; nothing is known of them before [`Self::take_up`].
    pub(crate) fn new(rules: Rules, build: Build<'_>, bytes: u64, region_shift: u32) -> Arc<Self> {
        let area = |at: usize| build.legs.get(at).map_or(0, |leg| rules.area_of(&**leg));
        Arc::new(Self {
            areas: std::array::from_fn(|at| AtomicU64::new(area(at))),
            moving: AtomicBool::new(false),
            resizing: Mutex::default(),
            rules,
            name: build.name,
            label: build.volume.to_owned(),
            legs: build.legs,
            bytes: AtomicU64::new(bytes),
            ready: AtomicU64::new(bytes),
            erased_from: AtomicU64::new(bytes),
            region_shift,
            masks: SharedMasks::default(),
            read_last: AtomicU8::new(0),
            ranges: Ranges::new(),
            intent: OnceLock::new(),
            table_turn: Turn::default(),
            page_turn: Turn::default(),
            rebuilding: Mutex::default(),
            admitting: AtomicBool::new(false),
            on_legs: Mutex::new(None),
            damaged: Mutex::default(),
            lacks_unmarked: AtomicU8::new(0),
            asked: AtomicU8::new(0),
            refused: Refused::default(),
            unflushed: Refused::default(),
            losses: Losses::default(),
            dropped: AtomicU64::new(0),
            resync_total: AtomicU64::new(0),
            undone: AtomicU64::new(0),
        })
    }

    /// Bytes of data on each leg.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Where a leg's area begins.
    fn area(&self, leg: usize) -> u64 {
        self.areas[leg].load(Ordering::Relaxed)
    }

    /// Where this table is stored on a leg.
    fn table_region(&self, leg: usize, version: u32) -> Region {
        Region { version, ..self.rules.table_region(self.area(leg)) }
    }

    /// Where the bitmap is stored on a leg.
    fn page_region(&self, leg: usize) -> Region {
        self.rules.page_region(self.area(leg))
    }

    #[inline]
    pub(crate) fn masks(&self) -> Masks {
        self.masks.get()
    }

    /// Whether a leg is read like those that have everything, or was when everything was stopped: what it has is not older for that.
    pub(crate) fn is_used(&self, leg: usize) -> bool {
        let readable = match self.masks().readable {
            0 => self.read_last.load(Ordering::Acquire),
            readable => readable,
        };
        readable >> leg & 1 == 1
    }

    /// Nothing is read or written any more. For whoever has the turn to change the table, or where no request is in flight.
    pub(crate) fn halt(&self) {
        let readable = self.masks().readable;
        if readable != 0 {
            // Release, before the masks: who finds these empty finds it.
            self.read_last.store(readable, Ordering::Release);
        }
        self.masks.set(Masks::default());
    }

    /// The bitmap; there is none before the first mount.
    #[inline]
    pub(crate) fn intent(&self) -> Option<&Intent> {
        self.intent.get()
    }

    /// Whether writes to these bytes of the legs may go: their regions' marks are durable.
    #[inline]
    pub(crate) fn is_marked(&self, bytes: &Range<u64>) -> bool {
        self.intent().is_some_and(|intent| intent.is_marked(&intent.regions_of(bytes.start, bytes.end)))
    }

    /// Makes the marks of these bytes durable.
    pub(crate) async fn mark(&self, cx: TaskContext<'_>, bytes: &Range<u64>) -> Result<(), BlockError> {
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        let regions = intent.regions_of(bytes.start, bytes.end);
        while !intent.is_marked(&regions) {
            intent.want(&regions);
            let turn =
                until(cx, || (intent.is_marked(&regions).then_some(None)).or_else(|| self.page_turn.try_take().map(Some)));
            if let Some(turn) = turn.await {
                self.store_page(cx, &turn).await?;
            }
        }
        Ok(())
    }

    pub(crate) fn on_legs(&self) -> MutexGuard<'_, Option<OnLegs>> {
        self.on_legs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A leg's name, for messages.
    pub(crate) fn leg_name(&self, leg: usize) -> &str {
        self.legs.get(leg).map_or("?", |leg| leg.name())
    }

    #[inline]
    fn all(&self) -> u8 {
        (u16::MAX >> (16 - self.legs.len())) as u8
    }

    /// The legs that a write which went to `legs` missed, and of which the others do not say so yet.
    #[inline]
    pub(crate) fn unrecorded(&self, legs: u8, faulty: u8) -> u8 {
        let masks = self.masks();
        let left_out = self.all() & !legs & !masks.writable;
        (faulty | left_out) & !masks.recorded
    }

    /// Whether nothing is left to be brought in order.
    pub(crate) fn is_in_order(&self) -> bool {
        let is_in_order = self.intent().is_none_or(|intent| intent.stale() == 0);
        if is_in_order {
            self.undone.store(0, Ordering::Relaxed);
        }
        is_in_order
    }

    /// Regions done and all, while legs are brought together.
    pub(crate) fn resync_progress(&self) -> Option<(u64, u64)> {
        let stale = self.intent()?.stale();
        let total = self.resync_total.load(Ordering::Relaxed).max(stale);
        (stale > 0).then_some((total - stale, total))
    }

    /// How each leg is, for the status.
    pub(crate) fn leg_facts(&self) -> Vec<(String, String)> {
        let on_legs = self.on_legs();
        let members = on_legs.iter().flat_map(|on_legs| on_legs.table.members.iter().enumerate());
        let fact = |(at, member): (usize, &Member)| {
            let state = match member.state {
                LegState::Good => "good",
                LegState::Filling => "being filled",
                LegState::Failed => "failed",
            };
            (format!("leg {at}"), state.to_owned())
        };
        members.map(fact).chain(self.damaged_tables()).chain(self.other_blocks()).chain(self.ways_back()).collect()
    }

    /// What to do about legs that have failed, while there are enough others to fill them from.
    fn ways_back(&self) -> Vec<(String, String)> {
        let masks = self.masks();
        let failed = self.all() & !masks.writable;
        let can_fill = masks.readable.count_ones() as usize >= self.rules.least;
        let way = |leg| {
            let what = format!(
                "\"rebuild leg={leg}\" fills it when it works again; \"volume replace\" puts another one in its place"
            );
            (format!("to do for leg {leg}"), what)
        };
        (0..self.legs.len()).filter(|leg| can_fill && failed & 1 << leg != 0).map(way).collect()
    }

    /// Of legs whose table was read from its other copy: what is wrong with the one.
    fn damaged_tables(&self) -> Vec<(String, String)> {
        let damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        let fact = |(at, what): (usize, &Option<String>)| Some((format!("table of leg {at} repaired"), what.clone()?));
        damaged.iter().enumerate().filter_map(fact).collect()
    }

    /// Of failed legs that have other blocks than those in use: what they have, and what to do.
    fn other_blocks(&self) -> impl Iterator<Item = (String, String)> {
        let readable = self.masks().readable;
        let has = |leg: usize| self.legs.get(leg).map(|leg| leg.geometry().block_size);
        let ours = has(readable.trailing_zeros() as usize);
        let others = (0..self.legs.len()).filter(move |leg| ours.is_some() && has(*leg) != ours);
        let size = move |leg| has(leg).map_or(0, BlockSize::bytes);
        others.map(move |leg| {
            let ours = ours.map_or(0, BlockSize::bytes);
            let what = format!("{} bytes, and the others of {ours}: \"rebuild\" formats it and fills it", size(leg));
            (format!("leg {leg} has blocks of"), what)
        })
    }

    /// The argument `leg` of a command.
    pub(crate) fn leg_argument(&self, arguments: &Settings) -> Result<usize, ServiceError> {
        let why = || SettingError::new("leg", format!("write leg=N; there are 0 to {}", self.legs.len() - 1));
        let leg: usize = arguments.parsed("leg", "the number of a leg")?.ok_or_else(why)?;
        if leg < self.legs.len() { Ok(leg) } else { Err(why().into()) }
    }

    /// Does something that waits, on the calling thread.
    fn wait_for<T: 'static>(
        self: &Arc<Self>,
        work: impl for<'a> FnOnce(Arc<Self>, TaskContext<'a>) -> LocalFuture<'a, T>,
    ) -> Result<T, ServiceError> {
        let me = Arc::clone(self);
        Ok(block_on(move |cx| work(me, cx))?)
    }

    /// The command `fail`.
    pub(crate) fn fail_leg(self: &Arc<Self>, leg: usize) -> Result<String, ServiceError> {
        // One that is being filled is in no comparison.
        let is_compared = self.masks().readable >> leg & 1 == 1;
        self.take_out(leg)?;
        let decided = if is_compared {
            self.wait_for(move |me, cx| Box::pin(async move { me.decide(cx, leg).await }))?
        } else {
            Decided::Nothing
        };
        Ok(format!("leg {leg} is out of use{}", decided.text()))
    }

    /// Takes a leg out of use that can be spared. It decides nothing: that the leg failed does not say that what it has is wrong.
    pub(crate) fn take_out(self: &Arc<Self>, leg: usize) -> Result<(), ServiceError> {
        let masks = self.masks();
        if masks.writable >> leg & 1 == 0 {
            return Err(ServiceError::NotNow(format!("leg {leg} is out of use already")));
        }
        if ((masks.readable & !(1 << leg)).count_ones() as usize) < self.rules.least {
            let why = match self.rules.least {
                1 => format!("leg {leg} is the last one that has all data: it stays"),
                _ => format!("without leg {leg} there would be too few good legs: it stays"),
            };
            return Err(ServiceError::NotNow(why));
        }
        let dropped = self.wait_for(move |me, cx| Box::pin(async move { me.drop_legs(cx, 1 << leg, Why::Asked).await }))?;
        dropped.map_err(|source| ServiceError::Leg {
            what: "record the failure of",
            leg: self.leg_name(leg).to_owned(),
            source,
        })
    }

    /// The command `rebuild`. `prepare` makes the leg ready for what else the service keeps there.
    pub(crate) fn rebuild_leg(
        self: &Arc<Self>,
        leg: usize,
        prepare: impl FnOnce(&Leg) -> Result<(), ServiceError>,
    ) -> Result<String, ServiceError> {
        let _alone = self.rebuilding.lock().unwrap_or_else(PoisonError::into_inner);
        let masks = self.masks();
        if masks.writable >> leg & 1 == 1 {
            return Err(ServiceError::NotNow(format!("leg {leg} is in use")));
        }
        if (masks.readable.count_ones() as usize) < self.rules.least {
            return Err(ServiceError::NotNow("there are too few good legs to fill it from".to_owned()));
        }
        if !self.legs[leg].trust_again() {
            let name = self.leg_name(leg);
            return Err(ServiceError::NotNow(format!(
                "leg {leg} ({name}) has failed a flush, and fails all flushes until it is opened anew: \"millrace upgrade\" does that when \
                 its disk is well; \"volume replace\" puts another one in its place"
            )));
        }
        let member = self.on_legs().as_ref().and_then(|on_legs| on_legs.table.members.get(leg).copied());
        let member = member.ok_or_else(|| ServiceError::NotNow(format!("the {} is not in force", self.rules.service)))?;
        let volume = &self.legs[leg];
        let (record, unread) = match self.find(volume) {
            Ok(found) => (found.record, None),
            // It can say nothing.
            Err(ServiceError::Content { .. }) => (None, None),
            Err(error @ ServiceError::Newer { .. }) => return Err(error),
            Err(error) => (None, Some(error)),
        };
        let known = record.and_then(|record| Table::decode(&record.content));
        let good = legs_of(masks.readable).next().unwrap_or(leg);
        let block_size = self.legs[good].geometry().block_size;
        let other_blocks = volume.geometry().block_size != block_size;
        let in_part = !other_blocks
            && !self.lacks_unmarked(leg)
            && known.is_some_and(|(table, own)| {
                table.members.get(own).is_some_and(|own| own.id == member.id) && member.lacks_marked_only(&table, own)
            });
        if other_blocks {
            // The others were formatted without it.
            volume.format(block_size)?;
        }
        // What it is told from now on is at its end.
        self.areas[leg].store(self.rules.area_of(&**volume), Ordering::Relaxed);
        // Sectors that went bad are good again when they are written. For a leg that is gone the others are not told to give it everything.
        if let Some(error) = unread.filter(|_| !self.takes_page(leg)) {
            return Err(error);
        }
        prepare(volume)?;
        let done = self.wait_for(move |me, cx| Box::pin(async move { me.readmit(cx, leg, !in_part).await }))?;
        done.map_err(|source| ServiceError::Leg { what: "take into use", leg: volume.name().to_owned(), source })?;
        let what = if in_part { "with what it missed" } else { "with everything" };
        Ok(format!("leg {leg} is being filled {what}"))
    }
}
