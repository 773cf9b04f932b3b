//! What the members' legs say: stores of table and bitmap, and what follows for requests.

use std::{
    fmt::Display,
    sync::atomic::{AtomicBool, Ordering},
};

use millrace_block::{BlockError, TaskContext, clock};

use super::{
    Members,
    intent::{Intent, Page, page_bytes},
    state::{LegState, Masks, Member, OnLegs, Telling, legs_of},
    why::{Refusals, Why},
};
use crate::{
    legs::{self, Stores},
    locks::{Taken, until},
    record::Region,
    service::ServiceError,
    told::is_told,
};

/// How long the answer of `fail` waits for the turn to store marks, in nanoseconds.
const MARK_PATIENCE: u64 = if cfg!(test) { 50_000_000 } else { 5_000_000_000 };

/// What became of undecided regions when the operator took a leg out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decided {
    /// There are none.
    Nothing,
    /// They are marked when the leg is taken in again.
    Later,
    /// They are marked, durably.
    Marked,
    /// They could not be marked: the leg is filled with everything.
    Unmarked,
}

impl Decided {
    /// What the answer says of it.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Later => {
                "; \"rebuild\" fills it from the others also where the legs were found to differ, unless the volume is opened \
                 anew, or its stack changed, before: first \"fail\" any other leg that is wrong there"
            }
            Self::Marked => {
                "; \"rebuild\" fills it from the others also where the legs were found to differ: before that, \"fail\" any \
                 other leg that is wrong there"
            }
            Self::Unmarked => {
                "; where the legs were found to differ could not be marked: \"rebuild\" fills it with everything, unless the \
                 volume is opened anew, or its stack changed, before"
            }
        }
    }
}

impl Members {
    /// Stores what the bitmap is to say on all legs that are written, and drops those that refuse. The caller has the turn.
    pub(crate) async fn store_page(&self, cx: TaskContext<'_>, _turn: &Taken<'_>) -> Result<(), BlockError> {
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        if self.moving.load(Ordering::Relaxed) {
            self.move_areas(cx).await?;
        }
        let (wanted, masks) = (intent.wanted(), self.masks());
        let failed = self.store_page_on(cx, &wanted, masks.writable, masks.filling()).await?;
        self.drop_legs(cx, failed.legs, failed.why()).await?;
        intent.stored(&wanted);
        Ok(())
    }

    /// Stores a bitmap, with what is kept on all but legs that are being filled, and on these first: a crash finds on none of them less than is
    /// to be done, for one that has an older store than the others does not count ([`Self::within`]). The legs that refuse.
    pub(super) async fn store_page_on(
        &self,
        cx: TaskContext<'_>,
        wanted: &Page,
        on: u8,
        filling: u8,
    ) -> Result<Refusals, BlockError> {
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        let generation = match &mut *self.on_legs() {
            Some(on_legs) => {
                on_legs.page_generation += 1;
                on_legs.page_generation
            }
            None => return Err(BlockError::NotReady),
        };
        let stores = [(on & filling, page_bytes(wanted)), (on & !filling, page_bytes(&intent.with_kept(wanted)))];
        let mut failed = Refusals::default();
        for (on, bytes) in stores {
            for leg in legs_of(on) {
                failed.note(leg, self.store_on(cx.deeper(), leg, self.page_region(leg), generation, &bytes).await);
            }
        }
        Ok(failed)
    }

    /// Stores a record on a leg, durably.
    pub(crate) async fn store_on(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        region: Region,
        generation: u64,
        content: &[u8],
    ) -> Result<(), BlockError> {
        region.write_in(cx, &*self.legs[leg], generation, content).await?;
        self.flush_leg(cx, leg).await
    }

    /// Stores the members' table on these legs; those that refuse. Nobody is told it before all have the event before it.
    pub(super) async fn store_table(&self, cx: TaskContext<'_>, on: u8) -> Result<Refusals, BlockError> {
        let failed = self.catch_up(cx, on).await?;
        if failed.legs != 0 {
            return Ok(failed);
        }
        let telling = self.on_legs().as_mut().map(|on_legs| on_legs.newest(on)).ok_or(BlockError::NotReady)?;
        Ok(self.tell_legs(cx, &telling).await)
    }

    /// Stores the table as it was stored last on those of the legs that refused it; those that refuse it again.
    async fn catch_up(&self, cx: TaskContext<'_>, on: u8) -> Result<Refusals, BlockError> {
        let telling = self.on_legs().as_mut().map(|on_legs| on_legs.late(on)).ok_or(BlockError::NotReady)?;
        match telling {
            Some(telling) => Ok(self.tell_legs(cx, &telling).await),
            None => Ok(Refusals::default()),
        }
    }

    async fn tell_legs(&self, cx: TaskContext<'_>, telling: &Telling) -> Refusals {
        let mut failed = Refusals::default();
        for (leg, copies, content) in telling.stores() {
            let region = self.table_region(leg, telling.version());
            for generation in copies {
                let stored = self.store_on(cx.deeper(), leg, region, generation, content).await;
                failed.note(leg, stored);
                if stored.is_err() {
                    break;
                }
            }
        }
        if let Some(on_legs) = &mut *self.on_legs() {
            on_legs.told(telling, failed.legs);
        }
        failed
    }

    /// Takes legs out of use. When it returns, the others say durably that these miss writes. The last good leg stays.
    pub(crate) async fn drop_legs(&self, cx: TaskContext<'_>, which: u8, why: impl Into<Why>) -> Result<(), BlockError> {
        if which & !self.masks().recorded == 0 {
            return Ok(());
        }
        let _turn = self.table_turn.take(cx).await;
        let (mut which, mut why) = (which, why.into());
        loop {
            let masks = self.masks();
            let fresh = which & !masks.recorded;
            if fresh == 0 {
                return Ok(());
            }
            let readable = masks.readable & !fresh;
            if (readable.count_ones() as usize) < self.rules.least {
                self.note_unflushed(which);
                return Err(why.error());
            }
            let new = fresh & masks.writable;
            if new != 0 {
                self.note_failed(new, &why);
            }
            let masks = Masks { readable, writable: masks.writable & !fresh, recorded: masks.recorded };
            self.masks.set(masks);
            // What the others have must be durable before they say that they are on their own.
            let failed = self.flush_legs(cx.deeper(), masks.writable).await;
            let failed = failed.or(self.store_table(cx, masks.writable).await?);
            // Who refused somebody else's flush says nothing with this one.
            let unfit = failed.legs | self.refused() & masks.writable;
            if unfit == 0 {
                self.masks.set(Masks { recorded: masks.recorded | fresh, ..masks });
                self.refused.forget(fresh);
                return Ok(());
            }
            which |= unfit;
            why = if failed.legs == 0 { Why::Flush } else { failed.why() };
        }
    }

    /// A region cannot be brought in order now. It is tried again every few seconds, so the log is told ever more seldom.
    pub(crate) fn note_undone(&self, region: u64, error: BlockError) {
        let count = self.undone.fetch_add(1, Ordering::Relaxed) + 1;
        if is_told(count) {
            tracing::warn!(name = self.name, region, %error, count, "a region cannot be brought in order on all legs now");
        }
    }

    /// Takes legs out of use that refused a flush of which nobody else takes care.
    pub(super) async fn drop_refusing(&self, cx: TaskContext<'_>) {
        // Of those that stay it is noted.
        let _ = self.drop_legs(cx, self.refused() & self.masks().writable, Why::Flush).await;
    }

    /// Nothing is read or written until the legs are looked at anew: what they have is not what requests may see.
    pub(crate) async fn stop(&self, cx: TaskContext<'_>) {
        let _turn = self.table_turn.take(cx).await;
        self.halt();
    }

    /// A leg has a block that is wrong and cannot be put right there: no mark may tell of it. When the leg is taken in again it is filled with
    /// everything.
    pub(crate) fn note_wrong(&self, leg: usize) {
        // Release: pairs with whoever takes the leg out of use, or in again.
        self.lacks_unmarked.fetch_or(1 << leg, Ordering::Release);
    }

    /// Whether the bitmap does not tell all that a leg lacks.
    pub(super) fn lacks_unmarked(&self, leg: usize) -> bool {
        self.lacks_unmarked.load(Ordering::Acquire) >> leg & 1 == 1
    }

    /// The legs differ in this block, and nothing tells which of them is right: the operator may.
    pub(crate) fn note_undecided(&self, at: u64) {
        if let Some(intent) = self.intent() {
            intent.note_undecided(at >> intent.shift());
        }
    }

    /// The operator has taken out a leg that was in all comparisons: it gets the undecided regions when it is taken in again. They are marked
    /// at once where no other leg can go. While one can they are not: after a crash such a mark has the legs in use made equal, and the next
    /// one to go may be the only one that is wrong. Then the leg's return marks them.
    pub(super) async fn decide(&self, cx: TaskContext<'_>, leg: usize) -> Decided {
        let Some(intent) = self.intent() else { return Decided::Nothing };
        if self.asked.load(Ordering::Acquire) == 0 && !intent.has_undecided() {
            return Decided::Nothing;
        }
        intent.decide();
        self.asked.fetch_or(1 << leg, Ordering::AcqRel);
        if self.masks().readable.count_ones() as usize > self.rules.least {
            return Decided::Later;
        }
        // Whoever has the turn may flush the leg that never answers, for which this one was taken out.
        let deadline = clock::now() + MARK_PATIENCE;
        let look = || match self.page_turn.try_take() {
            None if clock::now() < deadline => None,
            turn => Some(turn),
        };
        let marked = match until(cx, look).await {
            Some(turn) if self.is_asked(leg) => {
                intent.mark_again(&intent.decided(), false);
                self.store_page(cx, &turn).await.is_ok()
            }
            // Somebody took it in again meanwhile, with these.
            Some(_) => return Decided::Nothing,
            None => false,
        };
        if !marked {
            // No mark tells.
            legs_of(self.asked.load(Ordering::Acquire)).for_each(|leg| self.note_wrong(leg));
        }
        self.forget_decided(intent);
        if marked { Decided::Marked } else { Decided::Unmarked }
    }

    /// Whether the operator has taken this leg out where regions are decided that no mark tells of yet.
    fn is_asked(&self, leg: usize) -> bool {
        self.asked.load(Ordering::Acquire) >> leg & 1 == 1
    }

    /// No leg needs to be given decided regions beyond the marks.
    pub(super) fn forget_decided(&self, intent: &Intent) {
        intent.forget_decided();
        self.asked.store(0, Ordering::Release);
    }

    /// Changes the table for legs that fail now.
    pub(super) fn note_failed(&self, legs: u8, why: &dyn Display) {
        let mut on_legs = self.on_legs();
        let Some(on_legs) = on_legs.as_mut() else { return };
        let event = on_legs.next_event();
        for leg in legs_of(legs) {
            if let Some(member) = on_legs.table.members.get_mut(leg) {
                (member.state, member.failed_at) = (LegState::Failed, event);
            }
            self.dropped.fetch_add(1, Ordering::Relaxed);
            tracing::error!(
                name = self.name,
                leg,
                volume = self.leg_name(leg),
                reason = %why,
                "a leg failed and is out of use; the others go on. Replace it with \"volume change\", or \"rebuild\" it when it \
                 is well again"
            );
        }
    }

    /// Whether legs in use lack nothing.
    fn is_filled(&self) -> bool {
        // In this order: what is stale is known before the leg counts as taken in. Acquire: pairs with the end of the admission.
        !self.admitting.load(Ordering::Acquire) && self.intent().is_some_and(|intent| intent.stale() == 0)
    }

    /// Lets legs that are filled be read.
    pub(crate) async fn promote(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        // Before the turn, as in `save_marks`: what is flushed below is then little.
        let failed = self.flush_legs(cx, self.masks().writable).await;
        if failed.legs != 0 {
            return self.drop_legs(cx, failed.legs, failed.why()).await;
        }
        let page_turn = self.page_turn.take(cx).await;
        let Some(intent) = self.intent() else { return Ok(()) };
        if self.masks().filling() == 0 || !self.is_filled() {
            return Ok(());
        }
        // From then on its bitmap counts, and it may be the last one that tells what those miss that are out.
        intent.want_kept();
        if !intent.is_stored() {
            self.store_page(cx, &page_turn).await?;
        }
        let turn = self.table_turn.take(cx).await;
        let masks = self.masks();
        let filled = masks.filling();
        if filled == 0 || !self.is_filled() {
            return Ok(());
        }
        if self.unflushed.legs() & masks.writable != 0 {
            // What was filled may be computed from what is gone: the service looks at that with the legs as they are.
            return Err(BlockError::WriteFault { errno: 0 });
        }
        let set = |state| {
            if let Some(on_legs) = &mut *self.on_legs() {
                for leg in legs_of(filled) {
                    on_legs.table.members[leg].state = state;
                }
            }
        };
        // What was copied must be durable before the table says so.
        let mut failed = self.flush_legs(cx, masks.writable).await;
        let refused = failed.legs | self.refused() & masks.writable;
        if refused == 0 {
            set(LegState::Good);
            failed = self.store_table(cx, masks.writable).await?;
            if failed.legs == 0 {
                self.masks.set(Masks { readable: masks.writable, ..masks });
                tracing::info!(name = self.name, "all legs that are in use have all data");
                return Ok(());
            }
        }
        let unfit = failed.legs | refused;
        let enough = (masks.writable & !unfit).count_ones() as usize >= self.rules.least;
        if refused == 0 && unfit & filled == 0 && enough {
            // Who refused is the one that goes, and need not stay any more: the others say so with that.
            self.masks.set(Masks { readable: masks.writable, ..masks });
        } else {
            set(LegState::Filling);
        }
        drop((turn, page_turn));
        self.drop_legs(cx, unfit, if failed.legs == 0 { Why::Flush } else { failed.why() }).await
    }

    /// A leg refuses a flush. At once, for its next one may succeed: who flushes it beside that looks at [`Self::refused`], and whoever
    /// asked for this one takes it out of use.
    pub(crate) fn note_refused(&self, leg: usize) {
        self.refused.note(leg);
    }

    /// Legs that refused a flush, and neither do the others say so nor is the guest told.
    #[inline]
    pub(crate) fn refused(&self) -> u8 {
        self.refused.legs()
    }

    /// Those of these legs that refused a flush stay, and may have lost what they had not made durable: their next flush would not tell,
    /// but the guest's does. Where all have the same they may differ now.
    pub(crate) fn note_unflushed(&self, legs: u8) {
        self.refused.settle(legs & self.masks().writable, |legs| {
            self.losses.add();
            if self.rules.placed {
                legs_of(legs).for_each(|leg| self.unflushed.note(leg));
            } else if let Some(intent) = self.intent() {
                intent.suspect_marked();
            }
        });
    }

    /// Flushes a leg.
    pub(super) async fn flush_leg(&self, cx: TaskContext<'_>, leg: usize) -> Result<(), BlockError> {
        let flushed = legs::flush(cx, &*self.legs[leg]).await;
        if flushed.is_err() {
            self.note_refused(leg);
        }
        flushed
    }

    /// Flushes legs; those that refuse.
    pub(crate) async fn flush_legs(&self, cx: TaskContext<'_>, which: u8) -> Refusals {
        let mut failed = Refusals::default();
        for leg in legs_of(which) {
            failed.note(leg, self.flush_leg(cx, leg).await);
        }
        failed
    }

    /// [`Self::take_marks_away`] in the middle of a long filling: what is done is not done again after a crash.
    pub(crate) async fn save_marks(&self, cx: TaskContext<'_>) {
        // Before the turn: what was copied takes its time to become durable, and who writes to a region without a mark waits for the turn.
        let failed = self.flush_legs(cx, self.masks().writable).await;
        if failed.legs == 0 {
            self.take_marks_away(cx).await;
        } else {
            // Of those that stay it is noted.
            let _ = self.drop_legs(cx, failed.legs, failed.why()).await;
        }
    }

    /// Whether marks that are no more needed may go from some legs in use. While a leg is failed they tell what it missed, and go from those alone
    /// that are being filled.
    fn may_unmark(&self, masks: Masks) -> bool {
        // Acquire: what a leg missed that is in use again is stale, and so not idle.
        (masks.writable == self.all() || masks.filling() != 0) && !self.admitting.load(Ordering::Acquire)
    }

    /// Takes the marks of idle regions away, as far as that [may be](Self::may_unmark).
    pub(crate) async fn take_marks_away(&self, cx: TaskContext<'_>) {
        let Some(intent) = self.intent() else { return };
        let turn = self.page_turn.take(cx).await;
        let masks = self.masks();
        if !self.may_unmark(masks) {
            return;
        }
        let (losses, refused) = (self.losses.count(), self.refused.state());
        // What such a leg lost the marks alone tell, until it is known to be whole.
        if (self.refused() | self.unflushed.legs()) & masks.writable != 0 {
            return;
        }
        let (idle, suspicions) = intent.idle();
        if idle.iter().all(|word| *word == 0) {
            return;
        }
        intent.unmark(&idle);
        for region in (0..intent.regions()).filter(|region| idle[(region / 64) as usize] >> (region % 64) & 1 == 1) {
            self.ranges.quiesce(cx, region << intent.shift()..(region + 1) << intent.shift()).await;
        }
        // What was written there must be durable on all legs before the mark is gone.
        let failed = self.flush_legs(cx, masks.writable).await;
        let dropped = self.drop_legs(cx, failed.legs, failed.why()).await;
        // In this order: who finds the leg taken care of finds the loss counted. One that is out of use by now costs no suspicion.
        let is_open = self.refused() & self.masks().writable != 0;
        let is_lost = dropped.is_err() || is_open || self.losses.count() != losses;
        if is_lost || self.refused.state() != refused || self.masks().writable != masks.writable {
            // A leg that failed may have lost what it had not made durable, whoever flushed it: the marks tell where. They are still on the
            // legs.
            intent.mark_again(&idle, true);
            // What was marked came under suspicion without these. While a placed leg is filled what it got is right, and would be computed
            // from what may be gone: there the service looks what is to be done.
            if is_lost && (!self.rules.placed || masks.readable == masks.writable) {
                intent.suspect_page(&idle);
            }
            tracing::debug!(name = self.name, "marks stay");
        } else if intent.is_doubted(&idle, suspicions) {
            // All that was marked came under suspicion, while these seemed not to be.
            intent.mark_again(&idle, true);
            intent.suspect_page(&idle);
        } else {
            if masks.writable != self.all() {
                intent.keep(&idle);
            }
            if self.store_page(cx, &turn).await.is_err() {
                intent.mark_again(&idle, false);
            }
        }
    }

    /// Takes a leg that failed into use again, to be filled. `full`: all of it, else what was marked since it failed.
    pub(crate) async fn readmit(&self, cx: TaskContext<'_>, leg: usize, full: bool) -> Result<(), BlockError> {
        let Some(intent) = self.intent() else { return Err(BlockError::NotReady) };
        self.drop_the_late(cx).await?;
        let page_turn = self.page_turn.take(cx).await;
        let is_asked = self.is_asked(leg);
        if full {
            intent.want_all();
        }
        if is_asked {
            intent.mark_again(&intent.decided(), false);
        }
        // It gets what is kept for it: that is to be done again.
        intent.want_kept();
        if full || is_asked || !intent.is_stored() {
            // On the good legs first: should the power go, nobody may think that little is missing.
            self.store_page(cx, &page_turn).await?;
        }
        if is_asked {
            // Others that were taken out get them by the marks: these stay as long as one is out.
            self.forget_decided(intent);
        }
        // It may be the last one some day, and then knows what the others miss: what is marked now is not stored again. In both
        // copies, for it may have newer numbers than the others.
        for _ in 0..2 {
            let failed = self.store_page_on(cx, &intent.wanted(), 1 << leg, 0).await?;
            if failed.legs != 0 {
                return Err(failed.why().error());
            }
        }
        let turn = self.table_turn.take(cx).await;
        let masks = self.masks();
        if masks.readable == 0 {
            return Err(BlockError::NotReady);
        }
        let Some(before) = self.change_member(leg, LegState::Filling, 0) else { return Err(BlockError::NotReady) };
        let failed = if self.admit_in_silence(leg, masks.writable) {
            Refusals::default()
        } else {
            self.store_table(cx, masks.writable | 1 << leg).await?
        };
        if failed.legs >> leg & 1 == 1 {
            // It may have the table that takes it in: the others say something newer.
            self.change_member(leg, before.state, before.failed_at);
            let failed = failed.or(self.store_table(cx, masks.writable).await?);
            drop((turn, page_turn));
            self.drop_legs(cx, failed.legs & masks.writable, failed.why()).await?;
            return Err(failed.why().error());
        }
        let recorded = masks.recorded & !(1 << leg);
        // What it lost before it lacks, and gets.
        self.refused.forget(1 << leg);
        self.unflushed.forget(1 << leg);
        if full {
            self.lacks_unmarked.fetch_and(!(1 << leg), Ordering::AcqRel);
        }
        let admission = Admission::begin(&self.admitting);
        self.masks.set(Masks { writable: masks.writable | 1 << leg, recorded, ..masks });
        drop((turn, page_turn));
        let dropped = self.drop_legs(cx, failed.legs, failed.why()).await;
        // Writes that began without the leg have marked their regions; from now on all go to it.
        self.ranges.quiesce(cx, 0..self.bytes()).await;
        intent.suspect_marked();
        drop(admission);
        self.resync_total.store(intent.stale(), Ordering::Relaxed);
        dropped
    }

    /// Legs that refuse what was said last, and once more, go out of use, unless they have to stay.
    async fn drop_the_late(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let failed = {
            let _turn = self.table_turn.take(cx).await;
            self.catch_up(cx, self.masks().writable).await?
        };
        if failed.legs != 0 && self.drop_legs(cx, failed.legs, failed.why()).await.is_err() {
            tracing::warn!(name = self.name, reason = %failed.why(), "a leg does not take its tables, and has to stay until another one is filled");
        }
        Ok(())
    }

    /// Where a leg has to stay that refuses its table, and so nobody is told anything new: the leg that is filled, and for which that one may go,
    /// is told when it is. Until then the others say that it failed, and the bitmap what it lacks.
    fn admit_in_silence(&self, leg: usize, on: u8) -> bool {
        let mut on_legs = self.on_legs();
        let Some(on_legs) = on_legs.as_mut().filter(|on_legs| on_legs.is_late(on)) else { return false };
        on_legs.is_to_be_told(leg);
        true
    }

    /// Says in the table what a leg is; what it was. The caller has the turn.
    fn change_member(&self, leg: usize, state: LegState, failed_at: u64) -> Option<Member> {
        let mut on_legs = self.on_legs();
        let table = &mut on_legs.as_mut()?.table;
        let member = table.members.get_mut(leg)?;
        Some(std::mem::replace(member, Member { state, failed_at, ..*member }))
    }

    /// Stores bitmap and table on the calling thread, on the legs in use, and lets requests come. A leg that refuses is dropped,
    /// unless that must not be.
    pub(crate) fn store_all(&self, may_drop: bool) -> Result<(), ServiceError> {
        let not_now = || ServiceError::NotNow(format!("the {} is not in force", self.rules.service));
        // That they were taken up is an event too.
        self.on_legs().as_mut().ok_or_else(not_now)?.next_event();
        loop {
            let masks = self.on_legs().as_ref().ok_or_else(not_now)?.table.masks();
            let (failed, error) = self.try_store_all(masks.writable);
            let Some(error) = error else {
                self.masks.set(masks);
                return Ok(());
            };
            if !may_drop || ((masks.readable & !failed).count_ones() as usize) < self.rules.least {
                return Err(error);
            }
            self.note_failed(failed, &error);
        }
    }

    /// Stores bitmap and table on these legs; those that refuse, and what the first of them said.
    fn try_store_all(&self, on: u8) -> (u8, Option<ServiceError>) {
        let mut on_legs = self.on_legs();
        let Some(on_legs) = on_legs.as_mut() else { return (0, None) };
        if let Some(telling) = on_legs.late(on) {
            let refused = self.tell_legs_now(on_legs, &telling);
            if refused.0 != 0 {
                return refused;
            }
        }
        on_legs.page_generation += 1;
        // The bitmap on all legs before any table: a table may make a leg a member that is to be filled.
        let (failed, first) = self.store_pages_now(on, on_legs.table.masks().filling(), on_legs.page_generation);
        let telling = on_legs.newest(on);
        let (refused, error) = self.tell_legs_now(on_legs, &telling);
        (failed | refused, first.or(error))
    }

    /// Like [`Self::tell_legs`], on the calling thread.
    pub(super) fn tell_legs_now(&self, on_legs: &mut OnLegs, telling: &Telling) -> (u8, Option<ServiceError>) {
        let stores = telling.stores().map(|(leg, copies, content)| {
            let region = self.table_region(leg, telling.version());
            (leg, copies.map(|generation| region.copy(generation, content)).into())
        });
        let (refused, first) = self.store_now(stores);
        on_legs.told(telling, refused);
        (refused, first)
    }

    /// Whether a leg that is out of use takes the bitmap.
    pub(super) fn takes_page(&self, leg: usize) -> bool {
        let generation = self.on_legs().as_mut().map_or(1, |on_legs| {
            on_legs.page_generation += 1;
            on_legs.page_generation
        });
        self.store_pages_now(1 << leg, 0, generation).1.is_none()
    }

    /// Like [`Self::store_page_on`] with what is wanted, on the calling thread.
    fn store_pages_now(&self, on: u8, filling: u8, generation: u64) -> (u8, Option<ServiceError>) {
        let bytes = |page: fn(&Intent) -> Page| self.intent().map(|intent| page_bytes(&page(intent))).unwrap_or_default();
        let stores = [(on & filling, bytes(Intent::wanted)), (on & !filling, bytes(Intent::page))];
        stores.iter().fold((0, None), |(refused, first), (on, page)| {
            let (more, error) =
                self.store_now(legs_of(*on).map(|leg| (leg, vec![self.page_region(leg).copy(generation, page)])));
            (refused | more, first.or(error))
        })
    }

    /// Stores on legs side by side; those that refuse, and what the first of them said.
    fn store_now(&self, stores: impl Iterator<Item = (usize, Stores)>) -> (u8, Option<ServiceError>) {
        let mut on = Vec::new();
        let results = legs::store_on_all(stores.map(|(leg, stores)| {
            on.push(leg);
            (&self.legs[leg], stores)
        }));
        match results {
            Ok(results) => refusals(on.into_iter().zip(results)),
            Err(error) => (on.iter().fold(0, |legs, leg| legs | 1 << leg), Some(error)),
        }
    }

    /// Flushes the legs in use, and then takes the marks away of what does not differ: what is done is not done again by whoever opens the legs
    /// next.
    pub(crate) fn put_away(&self) -> Result<(), ServiceError> {
        let masks = self.masks();
        let flushed = legs::flush_all(legs_of(masks.writable).map(|leg| &self.legs[leg]))?;
        let (refused, error) = refusals(legs_of(masks.writable).zip(flushed));
        // Who refused somebody else's flush, of which nobody took care, says nothing with this one.
        let left = self.refused() & masks.writable;
        let refused = refused | left;
        let error = error.or_else(|| {
            let leg = self.leg_name(legs_of(left).next()?).to_owned();
            Some(ServiceError::Leg { what: "flush", leg, source: BlockError::WriteFault { errno: 0 } })
        });
        if let Some(error) = error {
            // What these legs have dropped the others have, or else nobody: the next mount must not take theirs for the newest.
            if ((masks.readable & !refused).count_ones() as usize) < self.rules.least {
                self.losses.add();
                return Err(error);
            }
            self.note_failed(refused, &error);
            return self.store_all(true);
        }
        let Some(intent) = self.intent() else { return Ok(()) };
        let in_order = intent.in_order();
        // As in `take_marks_away`.
        let may_go = self.may_unmark(masks) && (self.refused() | self.unflushed.legs()) & masks.writable == 0;
        if !may_go || in_order.iter().all(|word| *word == 0) {
            return Ok(());
        }
        intent.unmark(&in_order);
        if masks.writable != self.all() {
            intent.keep(&in_order);
        }
        let generation = self.on_legs().as_mut().map_or(1, |on_legs| {
            on_legs.page_generation += 1;
            on_legs.page_generation
        });
        self.store_pages_now(masks.writable, masks.filling(), generation).1.map_or(Ok(()), Err)
    }
}

/// Which legs refused, and what the first of them said.
fn refusals(results: impl Iterator<Item = (usize, Result<(), ServiceError>)>) -> (u8, Option<ServiceError>) {
    let (mut refused, mut first) = (0, None);
    for (leg, result) in results {
        if let Err(error) = result {
            refused |= 1 << leg;
            first.get_or_insert(error);
        }
    }
    (refused, first)
}

/// A leg is written again, and what it missed is not stale yet: until this is dropped it cannot be promoted, and no mark goes.
struct Admission<'a>(&'a AtomicBool);

impl<'a> Admission<'a> {
    /// Before the leg is among those that are written.
    fn begin(admitting: &'a AtomicBool) -> Self {
        admitting.store(true, Ordering::Release);
        Self(admitting)
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire of whoever looks next at what is stale.
        self.0.store(false, Ordering::Release);
    }
}
