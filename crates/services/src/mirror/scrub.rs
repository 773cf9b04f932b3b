//! Scrub: compares what the legs hold, and repairs what can be decided.

use std::{ops::Range, sync::atomic::Ordering};

use millrace_block::{Operation, TaskContext, clock};
use millrace_memory::{BounceBuffer, BufferPool, Segment};

use super::{Mirror, upkeep::PIECE};
use crate::{
    background::{Pace, Stop},
    locks::UNIT,
    members::{
        SCRUB_TURN,
        intent::Intent,
        state::{MOST_LEGS, legs_of},
        why::Why,
    },
};

/// Differing blocks that are listed.
const LISTED: usize = 16;

/// A scrub, and what it found.
#[derive(Clone, Debug, Default)]
pub(super) struct Scrub {
    pub(super) running: bool,
    /// Bytes done.
    pub(super) at: u64,
    /// Blocks that were wrong on some leg and are right now.
    pub(super) repaired: u64,
    /// Blocks that differ, where nothing tells which leg is right.
    pub(super) differing: u64,
    /// The first of them.
    pub(super) listed: Vec<u64>,
    /// Scrubs that came to their end.
    pub(super) finished: u64,
    /// It was ended before it was done.
    pub(super) cut_short: bool,
    /// It has just made way for what may differ: the next turn is its own, or writes that fail again and again would stop it.
    made_way: bool,
}

/// Which of the values, as numbers of the first leg that has each, more than half of the legs have.
pub(super) fn majority(values: &[usize]) -> Option<usize> {
    values.iter().copied().find(|value| values.iter().filter(|other| *other == value).count() * 2 > values.len())
}

impl Mirror {
    /// Carries on with a scrub if one was asked for: until the legs may differ somewhere, every other
    /// time, and for a while at most. Whether that was over.
    pub(super) async fn scrub_if_asked(&self, cx: TaskContext<'_>, stop: &Stop, pool: &BufferPool) -> bool {
        let (mut pace, began) = (Pace::new(self.plan.rate), clock::now());
        let suspicions = || self.intent().map(Intent::suspicions);
        let (before, makes_way) = (suspicions(), !std::mem::take(&mut self.scrub().made_way));
        while !stop.is_set() {
            let at = {
                let mut scrub = self.scrub();
                if !scrub.running {
                    return false;
                }
                if self.masks().readable.count_ones() < 2 {
                    (scrub.running, scrub.cut_short) = (false, true);
                    tracing::warn!(
                        mirror = self.name,
                        at = scrub.at,
                        "a scrub ends before it is done: only one leg is good, and there is nothing to compare it with"
                    );
                    return false;
                }
                if scrub.at >= self.members.ready() {
                    (scrub.running, scrub.finished) = (false, scrub.finished + 1);
                    let (repaired, differing) = (scrub.repaired, scrub.differing);
                    tracing::info!(mirror = self.name, repaired, differing, "scrub finished");
                    return false;
                }
                scrub.at
            };
            let len = PIECE.min(self.members.ready().saturating_sub(at));
            let done = self.scrub_piece(cx, stop, pool, at..at + len).await;
            self.advance_scrub(at, done);
            pace.spend(cx, stop, done).await;
            // Not because something is stale: what cannot be made equal would let no scrub end.
            if makes_way && suspicions() != before {
                self.scrub().made_way = true;
                return false;
            }
            if clock::now().saturating_sub(began) >= SCRUB_TURN {
                return true;
            }
        }
        false
    }

    /// Compares a piece on all good legs, or the beginning of it, where others are at work all the time: how much. Nothing: it is told to stop.
    pub(super) async fn scrub_piece(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        pool: &BufferPool,
        mut bytes: Range<u64>,
    ) -> u64 {
        let Some(_range) = self.members.ranges.lock_some_until(cx, &mut bytes, stop).await else { return 0 };
        let done = bytes.end - bytes.start;
        // A format to larger blocks while this waited may have left the end out.
        let len = done.min(self.members.ready().saturating_sub(bytes.start));
        if len > 0 {
            // As many of this level's buffers as there are may be held here.
            self.compare(cx.deeper(), pool, bytes.start, len).await;
        }
        done
    }

    /// [`Self::scrub_piece`], of what is locked.
    async fn compare(&self, cx: TaskContext<'_>, pool: &BufferPool, at: u64, len: u64) {
        if self.intent().is_none_or(|intent| !intent.is_settled(at, at + len)) {
            // Resync has it to do.
            return;
        }
        let readable = self.masks().readable;
        let (mut buffers, mut good): ([Option<BounceBuffer>; MOST_LEGS], _) = (Default::default(), 0_u8);
        for leg in legs_of(readable) {
            let buffer = pool.take().await;
            good |= u8::from(self.look_at(cx, leg, at, buffer.segment(len as usize)).await) << leg;
            buffers[leg] = Some(buffer);
        }
        let segment = |leg: usize| buffers[leg].as_ref().expect("a buffer was taken for each").segment(len as usize);
        let same = |first| legs_of(good).all(|leg| segment(first).equals(&segment(leg)));
        if good == readable && legs_of(good).next().is_none_or(same) {
            return;
        }
        let block = self.shape().block_size.bytes() as usize;
        for offset in (0..len as usize).step_by(block) {
            // One that was taken out meanwhile is not asked again.
            let in_use = self.masks().readable;
            let (readable, good) = (readable & in_use, good & in_use);
            let part = |leg: usize| segment(leg).part(offset, block).expect("a block of the piece");
            let (place, mut have) = (at + offset as u64, good);
            // What it can read of the piece counts.
            for leg in legs_of(readable & !good) {
                have |= u8::from(self.look_at(cx, leg, place, part(leg)).await) << leg;
            }
            if self.vote(cx, have, place, &part).await {
                // What the leg could not read is read again, block by block: its buffer is free around this one.
                let around = (place / UNIT * UNIT).saturating_sub(at) as usize;
                let room = |leg: usize| segment(leg).part(around, UNIT as usize);
                self.heal(cx, readable & !have, place, &part, &room).await;
            }
        }
    }

    async fn look_at(&self, cx: TaskContext<'_>, leg: usize, at: u64, segment: Segment) -> bool {
        let read = self.transfer(cx, leg, Operation::Read, at, segment).await;
        if let Err(error) = read {
            self.counters.read_errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(mirror = self.name, leg, at, %error, "a scrub could not read a leg");
        }
        read.is_ok()
    }

    /// Gives a block to the legs that cannot read it.
    async fn heal(
        &self,
        cx: TaskContext<'_>,
        legs: u8,
        at: u64,
        part: &impl Fn(usize) -> Segment,
        room: &impl Fn(usize) -> Option<Segment>,
    ) {
        for leg in legs_of(legs) {
            match self.repair(cx, leg, at, part(leg), room(leg), true).await {
                Ok(count) => self.scrub().repaired += count,
                Err(error) => _ = self.members.drop_legs(cx, 1 << leg, Why::Failed(error)).await,
            }
        }
    }

    /// Unless it was begun anew meanwhile.
    fn advance_scrub(&self, at: u64, len: u64) {
        let mut scrub = self.scrub();
        if scrub.at == at {
            scrub.at += len;
        }
    }

    /// Compares what was read of a block from these legs; false when nothing tells which of them is right.
    async fn vote(&self, cx: TaskContext<'_>, legs: u8, at: u64, part: &impl Fn(usize) -> Segment) -> bool {
        let like = |leg: usize| legs_of(legs).find(|other| part(*other).equals(&part(leg))).unwrap_or(leg);
        let (mut values, mut count) = ([0; MOST_LEGS], 0);
        for leg in legs_of(legs) {
            values[count] = like(leg);
            count += 1;
        }
        let values = &values[..count];
        if values.iter().all(|value| *value == values[0]) {
            return true;
        }
        let lba = at >> self.shape().block_size.shift();
        let Some(right) = majority(values) else {
            self.members.note_undecided(at);
            self.note_differing(lba);
            return false;
        };
        for (leg, _) in legs_of(legs).zip(values).filter(|(_, value)| **value != right) {
            // Durably: what was found must not come back with a power cut.
            match self.transfer(cx, leg, Operation::Write { fua: true }, at, part(right)).await {
                Ok(()) => {
                    tracing::warn!(mirror = self.name, leg, lba, "a block differed from the majority and was rewritten");
                    self.counters.repaired.fetch_add(1, Ordering::Relaxed);
                    self.scrub().repaired += 1;
                }
                Err(error) => {
                    self.members.note_wrong(leg);
                    _ = self.members.drop_legs(cx, 1 << leg, Why::Failed(error)).await;
                }
            }
        }
        true
    }

    fn note_differing(&self, lba: u64) {
        let mut scrub = self.scrub();
        scrub.differing += 1;
        if scrub.listed.len() < LISTED {
            scrub.listed.push(lba);
            tracing::error!(
                mirror = self.name,
                lba,
                "the legs differ, and nothing tells which one is right: compare with a backup, \"fail\" each leg that is \
                 wrong, and then \"rebuild\" it"
            );
        }
    }

    /// Starts a scrub from the beginning.
    pub(super) fn start_scrub(&self) {
        let mut scrub = self.scrub();
        let finished = scrub.finished;
        *scrub = Scrub { running: true, finished, ..Scrub::default() };
    }

    /// Scrubs everything at once: for tests.
    #[cfg(test)]
    pub(super) async fn scrub_all(&self, cx: TaskContext<'_>, pool: &BufferPool) -> Scrub {
        self.start_scrub();
        loop {
            self.scrub_if_asked(cx, &Stop::default(), pool).await;
            let scrub = self.scrub().clone();
            if !scrub.running {
                return scrub;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::majority;

    #[test]
    fn a_majority_is_more_than_half() {
        assert_eq!(majority(&[0, 1]), None);
        assert_eq!(majority(&[0, 1, 1]), Some(1));
        assert_eq!(majority(&[0, 1, 2]), None);
        assert_eq!(majority(&[0, 0, 2, 2]), None);
        assert_eq!(majority(&[0, 0, 0, 3]), Some(0));
        assert_eq!(majority(&[5]), Some(5));
    }
}
