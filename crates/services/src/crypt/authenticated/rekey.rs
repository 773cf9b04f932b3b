//! Re-keying while the volume is in use.
//!
//! ```text
//!   begin ─► save ─► header: new key, key before ─► what is written from now on, blocks and pages, has the new key
//!   task  ─► group by group: its page is to be saved; blocks that have the old key: lock ─► read ─► open ─► seal ─► log ─► leg
//!   end   ─► save, twice ─► header without the key before
//! ```
//!
//! Which key a block or a page has is in its version, and so in what is known of it: nothing need be remembered beside the tree and
//! the log, and a crash is what it is for any write. How far it came is in the header, as of a save; after a crash it goes back to the
//! first block of which the log says that it has the old key.
//!
//! The first save at the end makes everything durable; behind the second one, the log has nothing of the old key.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use millrace_block::{BlockError, IoOperation, Operation, TaskContext, Volume as _, yield_now};
use millrace_cipher::Sealer;
use millrace_memory::{BUFFER_SIZE, Segment};

use super::{
    control::cipher_error,
    layout::{FAN, LEVELS, PAGE, blocks_under},
    page::{Change, Place, Record, TURNED},
    table::Node,
    volume::{Authenticated, DATA, Force, Lock, Piece},
};
use crate::{
    background::{Pace, Stop, own_buffers},
    locks::{Taken, Turn, until},
    service::ServiceError,
};

/// How long the task sleeps while there is nothing to do.
const IDLE: Duration = Duration::from_millis(100);
/// How long it waits after a failure.
const AGAIN: Duration = Duration::from_secs(1);
/// How often it is looked whether a turn, or a key, is free.
const LOOK: Duration = Duration::from_micros(50);
/// Groups that are looked at before the shard does something else.
const LOOKED_AT: usize = 64;

/// Where re-keying is.
#[derive(Debug, Default)]
pub(super) struct Rekeying {
    /// Who works on the next blocks.
    turn: Turn,
    /// Those who want it to wait.
    wanted: AtomicU32,
    /// Blocks before this one have the new key.
    done: AtomicU64,
}

/// While it exists, nothing is re-keyed.
pub(super) struct Pause<'a> {
    _turn: Taken<'a>,
    wanted: &'a AtomicU32,
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.wanted.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Rekeying {
    pub(super) fn start(&self, done: u64) {
        self.done.store(done, Ordering::SeqCst);
    }

    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    /// A block before the end of what is done is not.
    pub(super) fn go_back(&self, lba: u64) {
        self.done.fetch_min(lba, Ordering::SeqCst);
    }
}

impl Authenticated {
    pub(super) fn is_rekeying(&self) -> bool {
        self.sealer.visit().as_ref().is_some_and(|force| force.old.is_some())
    }

    /// Keeps blocks from being re-keyed. Not to be called on a shard.
    pub(super) fn pause_rekeying(&self) -> Pause<'_> {
        self.rekeying.wanted.fetch_add(1, Ordering::SeqCst);
        loop {
            if let Some(turn) = self.rekeying.turn.try_take() {
                return Pause { _turn: turn, wanted: &self.rekeying.wanted };
            }
            thread::sleep(LOOK);
        }
    }

    /// Begins a re-keying.
    pub(super) fn begin_rekeying(&self) -> Result<String, ServiceError> {
        let not_now = |what: &str| ServiceError::NotNow(what.to_owned());
        if self.geometry().read_only {
            return Err(not_now("it is read-only"));
        }
        let _pause = self.pause_rekeying();
        let _saving = self.take_saving();
        if self.is_rekeying() {
            return Err(not_now("it is being re-keyed already"));
        }
        // Behind it nothing is half done.
        self.block_on("save tags to", |volume, cx| Box::pin(volume.save_now(cx)))?;
        let before = self.control().header.clone().ok_or_else(|| not_now("it is not in force"))?;
        let (header, key) = before.begin_rekeying(&self.kek).map_err(|error| cipher_error(&error))?;
        let sealer = Arc::new(Sealer::new(&key).map_err(|error| cipher_error(&error))?);
        let root = self.make_root(self.rooted.load(Ordering::SeqCst), 0);
        self.rekeying.start(0);
        let header = root.of(&header);
        let stored = self.store_header(&header, &sealer);
        let begun = stored.and_then(|()| {
            let turned = if header.turned { TURNED } else { 0 };
            self.control().header = Some(header);
            let (old, uuid) = self.sealer.visit().as_ref().map(|force| (Arc::clone(&force.sealer), force.uuid)).unzip();
            let (old, uuid) = (old.ok_or_else(|| not_now("it is not in force"))?, uuid.unwrap_or_default());
            let retired = self.sealer.replace(Some(Force { sealer, turned, old: Some(old), uuid }));
            retired.map_err(|error| ServiceError::NotNow(error.to_string()))?.wait();
            Ok(())
        });
        if let Err(error) = begun {
            // A header with both keys may be there all the same. Before any page is written, the one before comes back.
            let mut control = self.control();
            (control.header, control.unfinished) = (Some(before), Some(root));
            return Err(error);
        }
        tracing::info!(volume = self.name, "re-keying has begun");
        Ok("re-keying has begun; volume show tells how far it is".to_owned())
    }

    /// The background task.
    pub(super) async fn run_rekeying(&self, cx: TaskContext<'_>, stop: Stop) {
        // Requests wait for the blocks that it has locked, and they may have all of the shard's buffers.
        let own = match own_buffers() {
            Ok(own) => own,
            Err(error) => {
                tracing::error!(volume = self.name, %error, "no memory to re-key with");
                return;
            }
        };
        let mut cx = cx;
        cx.buffers = &own;
        let rate = self.settled.rekey_rate;
        let mut pace = Pace::new(rate);
        while !stop.is_set() {
            match self.rekey_next(cx).await {
                Ok(None) => {
                    cx.io(IoOperation::Sleep(IDLE)).await;
                }
                Ok(Some(blocks)) => {
                    self.control().rekey_failure = None;
                    match rate {
                        // A leg in memory makes nobody wait.
                        0 => yield_now().await,
                        _ => pace.spend(cx, &stop, blocks << self.block_size().shift()).await,
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    let before = self.control().rekey_failure.replace(text.clone());
                    if before.is_none_or(|before| before != text) {
                        let (volume, leg, lba) = (&self.name, self.leg.name(), self.rekeying.done());
                        tracing::error!(volume, leg, lba, %error, "re-keying does not go on; it is tried again");
                    }
                    stop.sleep(cx, AGAIN).await;
                }
            }
        }
    }

    /// Re-keys some blocks and says how many; `None` when there is nothing to do.
    async fn rekey_next(&self, cx: TaskContext<'_>) -> Result<Option<u64>, BlockError> {
        if !self.is_rekeying() || self.geometry().read_only || self.rekeying.wanted.load(Ordering::SeqCst) > 0 {
            return Ok(None);
        }
        let Some(_turn) = self.rekeying.turn.try_take() else { return Ok(None) };
        if !self.is_rekeying() {
            return Ok(None);
        }
        for _ in 0..LOOKED_AT {
            let (lba, blocks) = (self.rekeying.done(), self.geometry().blocks.0);
            if lba >= blocks {
                self.end_rekeying(cx).await?;
                return Ok(Some(0));
            }
            let untouched = self.pages_of(cx, lba).await?;
            if untouched > 0 {
                self.rekeying.start((lba + untouched).min(blocks));
                continue;
            }
            let node = self.ready(cx, lba).await?;
            let end = ((lba / FAN + 1) * FAN).min(blocks);
            let (next, changed) = self.rekey_group(cx, node, lba, end).await?;
            self.rekeying.start(next);
            if changed > 0 {
                return Ok(Some(changed));
            }
        }
        Ok(Some(0))
    }

    /// Sees to it that the pages above a block are saved, if they have the old key. If one of them was never needed, all blocks that it
    /// covers are untouched: says how many from this one on.
    async fn pages_of(&self, cx: TaskContext<'_>, lba: u64) -> Result<u64, BlockError> {
        for level in (0..LEVELS).rev() {
            let covers = blocks_under(level);
            let place = Place { level, number: lba / covers };
            let (above, at) = self.table.above(place);
            let record = above.record(at);
            // Who wrote there under the old key has needed it.
            if record == Record::FRESH && self.table.get(place).is_none() {
                return Ok(covers - lba % covers);
            }
            let node = self.ready_page(cx, place).await?;
            let is_old = self.sealer.visit().as_ref().is_some_and(|force| force.is_old(record.version));
            if record != Record::FRESH && is_old {
                node.touch();
            }
        }
        Ok(0)
    }

    /// Re-keys the first blocks of a group, from one on, that have the old key. Says behind which block none is left, and how many
    /// were changed.
    async fn rekey_group(&self, cx: TaskContext<'_>, node: &Node, mut lba: u64, end: u64) -> Result<(u64, u64), BlockError> {
        while lba < end {
            let at = (lba % FAN) as usize;
            until(cx, || (!node.is_locked(at..at + 1)).then_some(())).await;
            let seen = node.look(at);
            if seen.doubtful {
                self.settle(cx, node, lba).await?;
            } else if !seen.locked && !self.is_old(&seen.record) {
                lba += 1;
            } else if !seen.locked {
                let is_next = |at: &usize| {
                    let seen = node.look(*at);
                    !seen.doubtful && self.is_old(&seen.record)
                };
                let run = (at..at + (end - lba) as usize).take_while(is_next);
                let count = (run.count() as u64).clamp(1, self.most());
                let changed = self.rekey_piece(cx, node, Piece { lba, count }).await?;
                return Ok((lba + changed, changed));
            }
        }
        Ok((end, 0))
    }

    /// Whether a block was sealed under the key before.
    fn is_old(&self, record: &Record) -> bool {
        record.is_sealed() && self.sealer.visit().as_ref().is_some_and(|force| force.is_old(record.version))
    }

    /// Writes blocks of one group as they are, under the new key. Says how many of the first ones have it, or nothing that could have
    /// a key.
    async fn rekey_piece(&self, cx: TaskContext<'_>, node: &Node, mut piece: Piece) -> Result<u64, BlockError> {
        let mut again = false;
        loop {
            until(cx, || (!node.is_locked(piece.range())).then_some(())).await;
            let buffer = cx.buffers.take().await;
            let Some(lock) = Lock::take(node, piece.range()) else { continue };
            let stays = |at| !node.look(at).doubtful && self.is_old(&node.record(at));
            if !piece.range().all(stays) {
                // Somebody has written there.
                return Ok(0);
            }
            let page = buffer.segment(BUFFER_SIZE).part(DATA, PAGE).expect("the end of the buffer");
            let data = buffer.segment((piece.count << self.block_size().shift()) as usize);
            self.submit_piece(cx.deeper(), Operation::Read, piece, &[data]).await?;
            let new = self.seal_again(node, piece, data)?;
            if new.is_empty() && again {
                // It is not what was written there. Nobody could know under the new key either.
                lock.change(&[Record::LOST]);
                node.touch();
                self.report(piece.lba, false);
                return Ok(1);
            }
            if new.len() < piece.count as usize {
                // Those before it first; or once more, alone: it may have come over badly.
                again = new.is_empty();
                piece.count = (new.len() as u64).max(1);
                continue;
            }
            let change = |number: usize| {
                let old = node.record(piece.range().start + number);
                Change { lba: piece.lba + number as u64, old, new: new[number] }
            };
            let entered = match self.enter(cx.deeper(), page, new.len(), change).await? {
                Ok(entered) => entered,
                Err(full) => {
                    drop((lock, buffer));
                    self.save(cx, full).await?;
                    continue;
                }
            };
            self.commit(cx.deeper(), page, &entered).await?;
            let result = self.submit_piece(cx.deeper(), Operation::Write { fua: false }, piece, &[data]).await;
            self.written(lock, piece, &new, result);
            drop(entered);
            return result.map(|()| piece.count);
        }
    }

    /// Opens blocks and seals them under the new key, where they are: those before the first one that does not open.
    fn seal_again(&self, node: &Node, piece: Piece, data: Segment) -> Result<Vec<Record>, BlockError> {
        let visit = self.sealer.visit();
        let force = visit.as_ref().ok_or(BlockError::NotReady)?;
        let unit = self.block_size().bytes() as usize;
        let mut new = Vec::with_capacity(piece.count as usize);
        for (number, at) in piece.range().enumerate() {
            let (old, lba) = (node.record(at), piece.lba + number as u64);
            let block = data.part(number * unit, unit).expect("a block of the piece");
            if !force.open(lba, &old, block) {
                break;
            }
            new.push(force.seal(lba, &old, block));
        }
        Ok(new)
    }

    /// Everything has the new key: forgets the one before.
    async fn end_rekeying(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let _saving = self.saving.take(cx).await;
        self.save_now(cx).await?;
        self.save_now(cx).await?;
        let root = self.make_root(self.rooted.load(Ordering::SeqCst), 0);
        let before = {
            let mut control = self.control();
            let header = control.header.clone().ok_or(BlockError::NotReady)?;
            control.header.replace(header.end_rekeying())
        };
        if let Err(error) = self.store_root(cx, root).await {
            self.control().header = before;
            return Err(error);
        }
        let force = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            Force { sealer: Arc::clone(&force.sealer), turned: force.turned, old: None, uuid: force.uuid }
        };
        let retired = self.sealer.replace(Some(force)).map_err(|_| BlockError::NotReady)?;
        while !retired.is_free() {
            cx.io(IoOperation::Sleep(LOOK)).await;
        }
        tracing::info!(volume = self.name, "re-keying is done");
        Ok(())
    }
}
