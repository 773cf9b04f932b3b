//! Work beside requests: stale regions are copied, and marks of idle regions are taken away.

use std::{ops::Range, sync::Arc, time::Duration};

use millrace_block::{BlockError, Operation, TaskContext, clock};
use millrace_memory::{BUFFER_SIZE, BufferPool, Segment};

use super::Mirror;
use crate::{
    background::{Pace, Stop},
    members::{
        SAVE_EVERY,
        intent::Intent,
        state::{MOST_LEGS, legs_of},
        why::Why,
    },
};

/// Bytes that are copied or compared at once; writes to them wait meanwhile.
pub(super) const PIECE: u64 = BUFFER_SIZE as u64;
/// How often work is looked for.
const WORK_LOOK: Duration = Duration::from_millis(100);
/// So many looks for work later, marks are looked at: a region that was not written meanwhile loses its mark.
const IDLE_LOOKS: u32 = 30;
/// How long regions that could not be copied are left alone.
const TRY_AGAIN: Duration = Duration::from_secs(5);

impl Mirror {
    /// The task.
    pub(super) async fn upkeep(self: Arc<Self>, cx: TaskContext<'_>, stop: Stop) {
        // Of its own, for all that is below, too: requests that wait for the task hold the shard's.
        let pool = match BufferPool::new(MOST_LEGS) {
            Ok(pool) => pool,
            Err(error) => {
                tracing::error!(mirror = self.name, %error, "no memory for resync");
                return;
            }
        };
        let cx = cx.with_buffers(&pool);
        let mut looks = 0_u32;
        while !stop.is_set() {
            let all = self.resync(cx, &stop, &pool).await;
            let was_long = self.scrub_if_asked(cx, &stop, &pool).await;
            looks = looks.wrapping_add(1);
            // While there is a scrub looks are few.
            if was_long || looks.is_multiple_of(IDLE_LOOKS) {
                self.members.take_marks_away(cx).await;
            }
            let goes_on = self.scrub().running;
            stop.sleep(cx, if all || goes_on { WORK_LOOK } else { TRY_AGAIN }).await;
        }
    }

    /// Makes the legs agree wherever they may not; false when that is not possible everywhere.
    pub(super) async fn resync(&self, cx: TaskContext<'_>, stop: &Stop, pool: &BufferPool) -> bool {
        let Some(intent) = self.intent() else { return true };
        let (mut pace, mut saved) = (Pace::new(self.plan.rate), clock::now());
        let mut from = 0;
        while let Some(region) = intent.next_stale(from) {
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
        if is_in_order && self.masks().filling() != 0 {
            return self.members.promote(cx).await.is_ok();
        }
        is_in_order
    }

    async fn sync_region(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        pace: &mut Pace,
        region: u64,
    ) -> Result<(), BlockError> {
        let Some(shift) = self.intent().map(Intent::shift) else { return Ok(()) };
        // What it grew by and nobody used yet is equal on all legs.
        let end = ((region + 1) << shift).min(self.members.ready());
        let mut at = region << shift;
        let mut result = Ok(());
        while at < end && !stop.is_set() {
            let (done, synced) = self.sync_piece(cx, stop, pool, at..end.min(at + PIECE)).await;
            result = result.and(synced);
            pace.spend(cx, stop, done).await;
            at += done;
        }
        result
    }

    /// Gives all legs what the first good one has. Where that one cannot read all of a piece, it goes block by block, so that another one's
    /// count for those blocks alone: reads before came from the first. What no leg can read is left, and told. Where others are at work all the
    /// time it is the beginning of the piece: how much. Nothing of it: it is told to stop.
    pub(super) async fn sync_piece(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        mut bytes: Range<u64>,
    ) -> (u64, Result<(), BlockError>) {
        let (ours, theirs) = (pool.take().await, pool.take().await);
        let Some(_range) = self.members.ranges.lock_some_until(cx, &mut bytes, stop).await else { return (0, Ok(())) };
        let done = bytes.end - bytes.start;
        // A format to larger blocks while this waited may have left the end out.
        let len = done.min(self.members.ready().saturating_sub(bytes.start)) as usize;
        if len == 0 {
            return (done, Ok(()));
        }
        (done, self.sync_locked(cx.deeper(), bytes.start, ours.segment(len), theirs.segment(len)).await)
    }

    /// [`Self::sync_piece`], with room for what is locked.
    async fn sync_locked(&self, cx: TaskContext<'_>, at: u64, ours: Segment, theirs: Segment) -> Result<(), BlockError> {
        let readable = self.masks().readable;
        let found = self.sync_part(cx, readable & readable.wrapping_neg(), at, ours, theirs).await;
        let block = self.shape().block_size.bytes() as usize;
        if found.is_ok() || readable.count_ones() < 2 {
            return found;
        }
        let mut result = Ok(());
        for offset in (0..ours.len()).step_by(block) {
            let part = |whole: Segment| whole.part(offset, block).expect("a block of the piece");
            let (at, readable) = (at + offset as u64, self.masks().readable);
            result = result.and(self.sync_part(cx, readable, at, part(ours), part(theirs)).await);
        }
        result
    }

    /// Gives all legs what the first of these that can be read has.
    async fn sync_part(
        &self,
        cx: TaskContext<'_>,
        sources: u8,
        at: u64,
        ours: Segment,
        theirs: Segment,
    ) -> Result<(), BlockError> {
        let mut found = Err(BlockError::NotReady);
        for source in legs_of(sources) {
            found = self.transfer(cx, source, Operation::Read, at, ours).await;
            if found.is_ok() {
                for leg in legs_of(self.masks().writable & !(1 << source)) {
                    self.make_equal(cx, leg, at, ours, theirs).await?;
                }
                break;
            }
        }
        found
    }

    /// Writes a piece to a leg unless it is there already: what was never written stays so on sparse legs.
    async fn make_equal(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        at: u64,
        ours: Segment,
        theirs: Segment,
    ) -> Result<(), BlockError> {
        let read = self.transfer(cx, leg, Operation::Read, at, theirs).await;
        if read.is_ok() && ours.equals(&theirs) {
            return Ok(());
        }
        match self.transfer(cx, leg, Operation::Write { fua: false }, at, ours).await {
            Ok(()) => Ok(()),
            Err(error) => self.members.drop_legs(cx, 1 << leg, Why::Failed(error)).await,
        }
    }
}
