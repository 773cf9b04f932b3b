//! Formats: the legs are erased, and whatever happens meanwhile, nobody reads what they had, or what a leg that is out of use still has.
//!
//! ```text
//!   said on all legs in use ─► each leg: ─┬─ other blocks: formatted, and told again ─┬─► bitmap and table: it is done
//!                                         └─ the same: erased around its tables ──────┘
//!   mount ─► somebody says that a format is under way? ─► it is done again, on all legs in use
//! ```
//!
//! Invariants:
//! * From the first byte that is erased until all are, a leg says that a format is under way, and no leg says anything newer. Where one leg
//!   alone is in use, and loses its tables for an instant, those out of use say so as well.
//! * A table that says so is not left on a leg that is written.

use std::{
    fmt::Display,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use millrace_block::{BlockSize, Volume, VolumeError};

use super::{
    Members, TABLES,
    grow::Placed,
    intent::BYTES,
    state::{LegState, Member, legs_of},
};
use crate::{
    legs,
    locks::{Locked, Taken},
    record::Region,
    service::ServiceError,
};

/// How long a format sleeps before it looks again whether all is quiet.
const HOLD_AGAIN: Duration = Duration::from_micros(100);

/// Why a format did not come to its end.
pub(super) struct Stopped {
    pub(super) error: VolumeError,
    /// Every leg in use has what it had, but for this one, of which some may be erased.
    as_before: Option<Touched>,
}

/// Whether something of a leg may be erased.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Touched {
    No,
    Perhaps,
}

impl Touched {
    /// What a leg refuses as a whole is not begun.
    fn by(error: &VolumeError) -> Self {
        if matches!(error, VolumeError::Io { .. }) { Self::Perhaps } else { Self::No }
    }
}

impl Members {
    /// Waits until nothing is done beside requests, and keeps it so. Sleeps meanwhile.
    fn hold_upkeep(&self) -> (Taken<'_>, Taken<'_>, Locked<'_>) {
        loop {
            // All or none: who has one of them may wait for another one.
            if let Some((page, table)) = self.page_turn.try_take().zip(self.table_turn.try_take())
                && let Some(range) = self.ranges.try_lock(0..self.bytes())
            {
                return (page, table, range);
            }
            thread::sleep(HOLD_AGAIN);
        }
    }

    fn not_formatted(&self, action: &'static str, error: &dyn Display) -> VolumeError {
        let (volume, source) = (self.name.clone(), std::io::Error::other(error.to_string()));
        VolumeError::Io { volume, action, path: "its legs".into(), source }
    }

    /// Erases all legs, gives them a block size, and has the service look at them again. Each has so many bytes of data from now on. No
    /// request is in flight, and the calling thread may wait.
    pub(crate) fn format_legs(
        self: &Arc<Self>,
        block_size: BlockSize,
        bytes: u64,
        look_again: impl FnOnce(),
    ) -> Result<(), VolumeError> {
        let _alone = self.rebuilding.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = self.wait_for(|me, cx| Box::pin(async move { me.open_up(cx).await }));
        let unfinished = |error: &dyn Display| self.not_formatted("finish the growth of", error);
        opened.map_err(|error| unfinished(&error))?.map_err(|error| unfinished(&error))?;
        // What was read before a leg is formatted must not be written to one that has been.
        let _held = self.hold_upkeep();
        if self.masks().readable == 0 {
            // If this one could not be begun, the legs would come back as that one left them.
            let why =
                "a format or a change of the stack stopped half way: open the volume again, or change its stack".to_owned();
            return Err(VolumeError::Refused { volume: self.name.clone(), why });
        }
        self.begin_format()?;
        if let Err(Stopped { error, as_before }) = self.erase_legs(block_size, true) {
            match as_before {
                Some(touched) => self.take_back_format(touched),
                None => self.leave_off(&error),
            }
            return Err(error);
        }
        look_again();
        self.end_format(bytes).map_err(|error| self.not_formatted("write the tables of", &error))
    }

    /// A mount found a format that was cut short.
    pub(super) fn format_again(&self, block_size: BlockSize) -> Result<(), ServiceError> {
        tracing::warn!(name = self.name, "a format was cut short: all legs are erased again");
        // Who cannot be told could not be read either, just now: the volume comes up without it.
        self.erase_legs(block_size, false).map_err(|stopped| stopped.error)?;
        self.end_format(self.bytes())
    }

    /// Says that a format is under way.
    fn begin_format(&self) -> Result<(), VolumeError> {
        self.set_formatting(true);
        self.store_all(true).map_err(|error| {
            self.take_back_format(Touched::No);
            self.not_formatted("write the tables of", &error)
        })
    }

    fn set_formatting(&self, formatting: bool) {
        if let Some(on_legs) = &mut *self.on_legs() {
            on_legs.table.formatting = formatting;
        }
    }

    /// When one leg alone is in use, and cannot keep its tables: tells the others of the format. Else the one that is left says enough.
    fn tell_those_out_of_use(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let in_use = self.masks().writable;
        let keeps_tables = |leg: usize| self.legs[leg].geometry().block_size == block_size;
        if in_use.count_ones() != 1 || legs_of(in_use).all(keeps_tables) {
            return Ok(());
        }
        for leg in (0..self.legs.len()).filter(|leg| in_use >> leg & 1 == 0) {
            self.tell(leg).map_err(|error| {
                let why = format!(
                    "leg {leg} ({}) is out of use and cannot be told of a format to other blocks, so that a power cut could bring \
                     back what it has: {error}. Rebuild it, or leave it out (\"volume change\"), and then format",
                    self.leg_name(leg)
                );
                VolumeError::Refused { volume: self.name.clone(), why }
            })?;
        }
        Ok(())
    }

    /// Stores the table on a leg that is out of use, if it has one.
    fn tell(&self, leg: usize) -> Result<(), ServiceError> {
        let (table, generation) = match &*self.on_legs() {
            Some(on_legs) => (on_legs.table.clone(), on_legs.generation),
            None => return Ok(()),
        };
        let volume = &self.legs[leg];
        let (area, record) = match self.find(volume) {
            Ok(Placed { area, record: Some(record) }) => (area, record),
            // It can say nothing.
            Ok(_) | Err(ServiceError::Content { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let region = Region { version: table.version(), ..self.rules.table_region(area) };
        let newest = record.generation.max(generation);
        (1..=2).try_for_each(|more| region.store(volume, newest + more, &table.encode(leg)))
    }

    /// Stores the table on one leg.
    fn store_table_on(&self, leg: usize) -> Result<(), ServiceError> {
        let mut on_legs = self.on_legs();
        let Some(on_legs) = on_legs.as_mut() else { return Ok(()) };
        let telling = on_legs.newest(1 << leg);
        self.tell_legs_now(on_legs, &telling).1.map_or(Ok(()), Err)
    }

    /// Erases all legs in use, and gives them a block size. Those that fail are taken out of use, unless too few would be left, or none
    /// can have such blocks, or those out of use must be told and cannot be.
    fn erase_legs(&self, block_size: BlockSize, must_tell: bool) -> Result<(), Stopped> {
        let mut erased = 0_u8;
        for leg in legs_of(self.masks().writable) {
            let writable = self.masks().writable;
            if writable >> leg & 1 == 0 {
                continue;
            }
            erased &= writable;
            if let Err(error) = self.tell_those_out_of_use(block_size)
                && must_tell
            {
                return Err(Stopped { error, as_before: (erased == 0).then_some(Touched::No) });
            }
            let before = self.legs[leg].geometry().block_size;
            let Err(error) = self.erase_leg(leg, block_size) else {
                erased |= 1 << leg;
                continue;
            };
            let touched = Touched::by(&error);
            let is_like_before = erased == 0 && self.legs[leg].geometry().block_size == before;
            let is_needed = ((writable & !(1 << leg)).count_ones() as usize) < self.rules.least;
            if is_needed || (erased == 0 && touched == Touched::No) {
                return Err(Stopped { error, as_before: is_like_before.then_some(touched) });
            }
            self.note_failed(1 << leg, &error);
            // Before anybody says that it is done: two events at once would be too many for those who wait.
            self.store_all(true).map_err(|error| {
                let error = self.not_formatted("write the tables of", &error);
                Stopped { error, as_before: None }
            })?;
        }
        Ok(())
    }

    /// Erases a leg, and gives it a block size. If it has that already it keeps its tables all the time.
    fn erase_leg(&self, leg: usize, block_size: BlockSize) -> Result<(), VolumeError> {
        let (volume, end) = (&self.legs[leg], self.rules.area_of(&*self.legs[leg]));
        let failed = |error: ServiceError| self.not_formatted("erase", &error);
        let keeps_tables = volume.geometry().block_size == block_size;
        if !keeps_tables {
            volume.format(block_size)?;
        }
        if !keeps_tables || self.area(leg) != end {
            // Nothing is left that would have to be anywhere else.
            self.areas[leg].store(end, Ordering::Relaxed);
            self.store_table_on(leg).map_err(failed)?;
        }
        if !keeps_tables {
            return Ok(());
        }
        let (volume, bytes) = (Arc::clone(volume), volume.geometry().bytes());
        let erased = legs::block_on(move |cx| {
            Box::pin(async move {
                legs::erase(cx, &*volume, 0, end).await?;
                legs::erase(cx, &*volume, end + TABLES, bytes - end - TABLES).await
            })
        });
        let failed =
            |error: &dyn Display| self.not_formatted("erase", &format!("leg {leg} ({}): {error}", self.leg_name(leg)));
        erased.map_err(|error| failed(&error))?.map_err(|error| failed(&error))
    }

    /// All legs in use are empty: says so.
    fn end_format(&self, bytes: u64) -> Result<(), ServiceError> {
        if let Some(on_legs) = &mut *self.on_legs() {
            let event = on_legs.next_event();
            let table = &mut on_legs.table;
            for member in &mut table.members {
                *member = match member.state {
                    // No bitmap says what is to be copied over what it has from before: what it says is too old for that.
                    LegState::Failed => Member { failed_at: event, ..*member },
                    _ => Member { state: LegState::Good, ..*member },
                };
            }
            (table.bytes, table.growing, table.formatting) = (bytes, None, false);
            self.show(bytes);
            self.note_growth(table);
        }
        if let Some(intent) = self.intent() {
            intent.start(&[0; BYTES / 8]);
            // What differed is erased.
            intent.decide();
            self.forget_decided(intent);
        }
        self.store_all(true).inspect_err(|error| self.leave_off(error))
    }

    /// A format that erased nothing, or some of one leg only, is none.
    fn take_back_format(&self, touched: Touched) {
        if touched == Touched::Perhaps
            && let Some(intent) = self.intent()
        {
            intent.want_all();
            intent.suspect_all();
        }
        self.set_formatting(false);
        if let Err(error) = self.store_all(true) {
            self.leave_off(&error);
        }
    }

    /// A format can neither be ended nor taken back.
    fn leave_off(&self, error: &dyn Display) {
        // What is written from now on would be erased by the next mount.
        self.halt();
        tracing::error!(
            name = self.name,
            %error,
            "a format stopped half way: nothing is read or written until the volume is opened again, which erases all legs"
        );
    }
}
