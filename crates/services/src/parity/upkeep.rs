//! Work beside requests: parity is made to fit, legs are filled, the journal is voided when all is quiet.

use std::{sync::Arc, time::Duration};

use millrace_block::{BlockError, Operation, TaskContext, clock};
use millrace_memory::BufferPool;

use super::{
    Parity,
    codec::{MOST_PARTS, parts_of},
    journal::Ring,
    rows::{Checked, Image, Rows},
};
use crate::{
    background::{Pace, Stop},
    locks::{Locked, Taken},
    members::{SAVE_EVERY, intent::Intent, state::legs_of, why::Refusals},
};

/// How often work is looked for.
const WORK_LOOK: Duration = Duration::from_millis(100);
/// So many looks for work later, marks are looked at: a region that was not written meanwhile loses its mark.
const IDLE_LOOKS: u32 = 30;
/// How long regions that could not be done are left alone.
const TRY_AGAIN: Duration = Duration::from_secs(5);

impl Parity {
    /// The task.
    pub(super) async fn upkeep(self: Arc<Self>, cx: TaskContext<'_>, stop: Stop) {
        // Of its own, for all that is below, too: requests that wait for the task hold the shard's.
        let pool = match BufferPool::new(2) {
            Ok(pool) => pool,
            Err(error) => {
                tracing::error!(name = self.name, %error, "no memory for resync");
                return;
            }
        };
        let cx = cx.with_buffers(&pool);
        let mut looks = 0_u32;
        while !stop.is_set() {
            let all = self.resync(cx, &stop, &pool).await;
            let was_long = self.scrub_if_asked(cx, &stop, &pool).await;
            self.void_when_quiet(cx).await;
            looks = looks.wrapping_add(1);
            // While there is a scrub looks are few.
            if was_long || looks.is_multiple_of(IDLE_LOOKS) {
                self.members.take_marks_away(cx).await;
            }
            // Whoever was refused it: what is missing is not computed from what may be gone.
            self.doubt(cx, BlockError::WriteFault { errno: 0 }).await;
            let goes_on = self.scrub().running;
            stop.sleep(cx, if all || goes_on { WORK_LOOK } else { TRY_AGAIN }).await;
        }
    }

    /// Makes parity fit, and fills legs, wherever that is to be done; false when it is not possible everywhere.
    pub(super) async fn resync(&self, cx: TaskContext<'_>, stop: &Stop, pool: &BufferPool) -> bool {
        let Some(intent) = self.members.intent() else { return true };
        let (mut pace, mut saved) = (Pace::new(self.plan.rate), clock::now());
        let mut from = 0;
        while let Some(region) = intent.next_stale(from) {
            // A leg that refused a flush in the middle of this, whoever asked it: nothing is filled from what may be gone.
            if self.doubt(cx, BlockError::WriteFault { errno: 0 }).await {
                return false;
            }
            let suspicions = intent.suspicions();
            let result = self.sync_region(cx, stop, pool, &mut pace, region).await;
            if stop.is_set() {
                return true;
            }
            match result {
                Ok(()) => intent.cleared(region, suspicions),
                Err(error) => self.members.note_undone(region, error),
            }
            from = region + 1;
            if clock::now().saturating_sub(saved) >= SAVE_EVERY {
                self.members.save_marks(cx).await;
                saved = clock::now();
            }
        }
        let is_in_order = self.members.is_in_order();
        if is_in_order && self.members.masks().filling() != 0 {
            return self.members.promote(cx).await.is_ok();
        }
        is_in_order
    }

    /// All rows in a range of bytes of the legs, in pieces that fit into a buffer.
    pub(super) fn rows_in(&self, start: u64, end: u64) -> impl Iterator<Item = Rows> + use<> {
        let (chunk, most) = (self.layout.chunk, self.most_rows());
        let mut at = start;
        std::iter::from_fn(move || {
            let (stripe, from) = (at / chunk, at % chunk);
            let len = most.min(chunk - from).min(end.saturating_sub(at));
            at += len;
            (len > 0).then_some(Rows { stripe, from, len })
        })
    }

    async fn sync_region(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        pace: &mut Pace,
        region: u64,
    ) -> Result<(), BlockError> {
        let Some(shift) = self.members.intent().map(Intent::shift) else { return Ok(()) };
        let end = ((region + 1) << shift).min(self.members.bytes());
        let (mut at, mut result) = (region << shift, Ok(()));
        while let Some(rows) = self.rows_in(at, end).next()
            && !stop.is_set()
        {
            let (done, synced) = self.sync_rows(cx, stop, pool, rows).await;
            result = result.and(synced);
            pace.spend(cx, stop, done).await;
            at += done;
        }
        result
    }

    /// Locks rows, or the first of them where others are at work all the time. `None`: it is told to stop.
    async fn lock_rows(&self, cx: TaskContext<'_>, stop: &Stop, rows: Rows) -> Option<(Rows, Locked<'_>)> {
        let mut bytes = self.leg_range(rows);
        let locked = self.members.ranges.lock_some_until(cx, &mut bytes, stop).await?;
        Some((Rows { len: bytes.end - bytes.start, ..rows }, locked))
    }

    /// Makes the parity of rows fit their data, and fills the parts of legs that are being filled: of how many bytes, as with [`Self::lock_rows`].
    async fn sync_rows(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        rows: Rows,
    ) -> (u64, Result<(), BlockError>) {
        let (buffer, other) = (pool.take().await, pool.take().await);
        let Some((rows, _range)) = self.lock_rows(cx, stop, rows).await else { return (0, Ok(())) };
        (rows.len, self.sync_locked(cx, rows, &self.image(&buffer, rows), &self.image(&other, rows)).await)
    }

    /// [`Self::sync_rows`], with room for what is locked.
    async fn sync_locked(&self, cx: TaskContext<'_>, rows: Rows, image: &Image, found: &Image) -> Result<(), BlockError> {
        let masks = self.members.masks();
        let readable = self.parts_on(rows.stripe, masks.readable);
        let filling = self.parts_on(rows.stripe, masks.writable) & !readable;
        let parity = self.all_parts() & !self.data_parts();
        if filling == 0 && readable != self.all_parts() && self.layout.parity == 1 {
            // With a leg missing there is nothing to compare with: the parity is what its data are known by.
            return Ok(());
        }
        self.obtain(cx, rows, image, self.data_parts()).await?;
        image.parts().encode(parity);
        // What is there already need not be written: what was never written stays so on sparse legs.
        let look = (parity | filling) & (readable | filling);
        let outcome = self.move_parts(cx, Operation::Read, rows, found, look).await;
        let same = |part: &usize| outcome.done >> part & 1 == 1 && image.area(*part).equals(&found.area(*part));
        let differ = parts_of(look).filter(|part| !same(part)).fold(0, |set, part| set | 1 << part);
        let written = self.move_parts(cx, Operation::Write { fua: false }, rows, image, differ).await;
        let failed = self.legs_of_parts(rows.stripe, written.faulty);
        match written.refused {
            Some(refused) => Err(refused),
            None => self.members.drop_legs(cx, failed, written.error).await,
        }
    }

    /// Tells the legs that the journal's entries are of no more use, when all are durable in their places.
    pub(super) async fn void_when_quiet(&self, cx: TaskContext<'_>) {
        let rings = self.journal.rings();
        if rings.iter().any(|ring| !ring.is_quiet()) || rings.iter().all(Ring::is_void) {
            return;
        }
        let turn = self.flush_turn.take(cx).await;
        if self.harden(cx).await.is_ok() {
            // If it fails, the entries stay of use, and the legs that refused are out of it.
            let _ = self.record_void(cx, &turn).await;
        }
    }

    /// Stores on all legs in use how far entries of the journal are void: in both copies, so that a damaged one does not bring
    /// entries back.
    pub(super) async fn record_void(&self, cx: TaskContext<'_>, _turn: &Taken<'_>) -> Result<(), BlockError> {
        let rings = self.journal.rings();
        let tails: [u64; MOST_PARTS] = std::array::from_fn(|ring| rings.get(ring).map_or(0, Ring::tail));
        let mut failed = Refusals::default();
        for leg in legs_of(self.members.masks().writable) {
            for _ in 0..2 {
                let (region, generation, content) = self.journal.void_record(leg, self.journal_of(leg), &tails);
                failed.note(leg, self.members.store_on(cx.deeper(), leg, region, generation, &content).await);
            }
        }
        if let Err(error) = self.members.drop_legs(cx, failed.legs, failed.why()).await {
            self.doubt(cx, error).await;
            return Err(error);
        }
        rings.iter().zip(tails).for_each(|(ring, tail)| ring.voided(tail));
        Ok(())
    }

    /// Reads rows and checks their parity, for a scrub: of how many bytes, as with [`Self::lock_rows`].
    pub(super) async fn look_at(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        rows: Rows,
    ) -> (u64, Result<Checked, BlockError>) {
        let buffer = pool.take().await;
        let Some((rows, _range)) = self.lock_rows(cx, stop, rows).await else { return (0, Ok(Checked::default())) };
        let bytes = self.leg_range(rows);
        if self.members.intent().is_none_or(|intent| !intent.is_settled(bytes.start, bytes.end)) {
            // Resync has it to do.
            return (rows.len, Ok(Checked::default()));
        }
        (rows.len, self.examine(cx, rows, &self.image(&buffer, rows)).await)
    }
}
