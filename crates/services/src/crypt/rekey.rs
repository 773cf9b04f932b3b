//! Re-keying while the volume is in use.
//!
//! ```text
//!   chunk k:  requests to it wait, those under way end
//!             read old ─► flush ─► journal slot k % 2 ◄─ as it was ─► flush ─► re-encipher ─► write ─► chunk k+1
//!                                    └─ failed ─► slot made void, flush ─► requests go on, and it is tried again
//! ```
//!
//! The journal holds the chunk as it was, under the old key. After a crash both slots are looked at: a block that is still equal
//! to what the journal says has the old key, and is re-enciphered; any other has the new one, whether it was re-enciphered or
//! written since. (An enciphered block under one key does not by chance equal one under another.) So what the journal says is durable
//! in its place before the journal can be: otherwise a slot that was not flushed, and is there all the same, would have an older block
//! taken for one under the new key. That flush makes chunk k-1 durable as well, before its slot is used again, by chunk k+1. A slot that
//! is found may be what a process that died had written, and not durable: it is written again before anything is done by it.
//! Chunks are counted from the start: one that the end of the volume cut short is followed by another when the volume grows.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, IoOperation, Lba, Operation, ReplaceError, Request, TaskContext, Volume,
};
use millrace_cipher::Xts;
use millrace_memory::{BounceBuffer, BufferPool, Segment};
use thiserror::Error;

use super::{
    header::{CHUNK, Header, JOURNAL, JournalPage, OFFSET, PAGE, SLOT, crc},
    keys::{Failed, Keys, Next},
    volume::Crypt,
};
use crate::{
    background::Stop,
    flushes::Flushes,
    legs::{self, Leg},
    service::ServiceError,
};

/// What a disk writes as a whole: less than a block may be.
const SECTOR: usize = 512;
/// How often it is looked whether requests have ended.
const DRAIN_LOOK: Duration = Duration::from_micros(50);
/// How long keys that could not be exchanged are left alone.
const EXCHANGE_AGAIN: Duration = Duration::from_millis(1);

/// Why a chunk was not re-enciphered.
#[derive(Debug, Error)]
pub(super) enum RekeyError {
    /// The leg refused.
    #[error(transparent)]
    Leg(#[from] BlockError),
    /// The keys could not be exchanged.
    #[error(transparent)]
    Replace(#[from] ReplaceError),
}

/// A buffer of the deepest pool: no request takes one of these, so that no request can wait for us while we wait for it.
async fn deepest_buffer(cx: TaskContext<'_>) -> BounceBuffer {
    let deepest = (0..BufferPool::LEVELS).fold(cx, |cx, _| cx.deeper());
    deepest.buffers.take().await
}

impl Crypt {
    /// Brings keys into force and waits until requests under those before have ended.
    async fn exchange(&self, cx: TaskContext<'_>, keys: Keys) -> Result<(), RekeyError> {
        let retired = self.keys.replace(Some(keys))?;
        while !retired.is_free() {
            cx.io(IoOperation::Sleep(DRAIN_LOOK)).await;
        }
        Ok(())
    }

    /// [`Self::exchange`] for keys that those in force must not outlast: blocks have the new ones already, or requests wait. Tried until it
    /// succeeds.
    async fn exchange_surely(&self, cx: TaskContext<'_>, keys: Keys) {
        let mut is_told = false;
        while let Err(error) = self.exchange(cx, keys.clone()).await {
            if !is_told {
                tracing::warn!(volume = self.name, %error, "the keys of a chunk cannot be exchanged yet: requests to it wait");
                is_told = true;
            }
            cx.io(IoOperation::Sleep(EXCHANGE_AGAIN)).await;
        }
    }

    /// Re-enciphers the next chunk; false when there is none, or somebody else works on the keys.
    pub(super) async fn rekey_chunk(&self, cx: TaskContext<'_>, stop: &Stop) -> Result<bool, RekeyError> {
        let is_rekeying = self.keys.visit().as_ref().is_some_and(|keys| keys.next.is_some());
        if !is_rekeying || self.geometry().read_only {
            return Ok(false);
        }
        let buffer = deepest_buffer(cx).await;
        let Some(claim) = self.try_claim() else { return Ok(false) };
        let Some(work) = self.keys.visit().as_ref().and_then(|keys| Work::of(keys, self.geometry().blocks.0)) else {
            return Ok(false);
        };
        let Work { done, end, .. } = work;
        if done >= end {
            self.end_rekeying(cx, &buffer, &work).await?;
            return Ok(true);
        }
        if work.failed == Failed::Slot {
            let keys = self.look_at_slot(cx, &buffer, &work).await?;
            self.exchange(cx, keys).await?;
            return Ok(true);
        }
        let (old, home) = if work.is_half_done() {
            // What is written to it meanwhile would be overwritten.
            self.exchange(cx, work.held(Failed::Again)).await?;
            match self.read_both(cx, &buffer, &work).await {
                Ok(both) => both,
                Err(error) => {
                    // Nobody is to wait for long.
                    self.exchange_surely(cx, work.held(Failed::Home)).await;
                    return Err(error.into());
                }
            }
        } else {
            self.exchange(cx, work.held(Failed::No)).await?;
            match self.write_journal(cx, &buffer, &work).await {
                Ok(home) => (home.clone(), home),
                Err(error) => {
                    // What is written from now on has the old key, which a journal would call the new one.
                    let void = match self.void_slot(cx, &buffer, &work).await {
                        Ok(()) => self.chunk_before(cx, &buffer, &work).await,
                        Err(error) => Err(error),
                    };
                    self.exchange_surely(cx, void.unwrap_or_else(|_| work.held(Failed::Journal))).await;
                    return Err(error.into());
                }
            }
        };
        let mut new = home;
        self.home_failed.store(self.flushes.failed(), Ordering::Relaxed);
        change_keys((&work.current, &work.next), done, work.unit, &mut new, &old);
        if let Err(error) = self.move_home(cx, &buffer, &work, Operation::Write { fua: false }, &new).await {
            // Part of the chunk may have the new key: nobody can use it until it is all there.
            self.exchange_surely(cx, work.held(Failed::Home)).await;
            return Err(error.into());
        }
        // Else it would be taken for one that was not begun, and be re-enciphered twice.
        self.exchange_surely(cx, work.keys_after()).await;
        self.control().failure = None;
        drop(claim);
        if let Some(micros) = (new.len() as u64).saturating_mul(1_000_000).checked_div(self.rekey_rate) {
            drop(buffer);
            stop.sleep(cx, Duration::from_micros(micros)).await;
        }
        Ok(true)
    }

    /// Reads the chunk and puts it in the journal as it is, durably; so was the chunk before it written.
    async fn write_journal(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<Vec<u8>, BlockError> {
        let home = self.read_home(cx, buffer, work).await?;
        // The slot may be there after a power cut although it was not flushed: then what it says is.
        self.flush_home(cx).await?;
        let id = self.control().header.as_ref().and_then(|header| Some(header.rekeying.as_ref()?.id));
        let id = id.ok_or(BlockError::NotReady)?;
        let page = JournalPage { id, start: work.done, len: home.len() as u32, data_crc: crc(&home) };
        let slot = buffer.segment(PAGE + home.len());
        slot.write_at(0, &page.encode());
        slot.write_at(PAGE, &home);
        self.transfer(cx, Operation::Write { fua: false }, work.slot_start(), slot).await?;
        self.flush_home(cx).await?;
        Ok(home)
    }

    /// Makes the chunk before durable in its place. An error where the leg has refused to since that was written, and may have dropped it.
    async fn flush_home(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        self.flushes.flush_alone(cx, &*self.leg).await?;
        self.flushes.check(self.home_failed.load(Ordering::Relaxed))
    }

    /// The keys with which the work goes on where a chunk's journal was not stored: with the chunk before once more, if it may be lost. Its own
    /// journal is there yet.
    async fn chunk_before(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<Keys, BlockError> {
        let failed = self.flushes.failed();
        if self.flushes.check(self.home_failed.load(Ordering::Relaxed)).is_err() {
            let slot = 1 - work.slot;
            let found = self.read_journal(cx, buffer, slot).await?;
            let ends_here = |(start, old): &(u64, Vec<u8>)| start + (old.len() / work.unit) as u64 == work.done;
            if let Some((start, _)) = found.filter(ends_here) {
                let next = Next { cipher: Arc::clone(&work.next), done: start, end: work.done, failed: Failed::Again, slot };
                return Ok(Keys { current: Arc::clone(&work.current), next: Some(next), unit: work.unit });
            }
            // There is none.
            self.home_failed.store(failed, Ordering::Relaxed);
        }
        Ok(work.keys(work.done, work.done, Failed::No))
    }

    /// The slot says nothing, durably.
    async fn void_slot(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<(), BlockError> {
        let page = buffer.segment(PAGE);
        page.fill(0);
        self.transfer(cx, Operation::Write { fua: false }, work.slot_start(), page).await?;
        self.flushes.flush_alone(cx, &*self.leg).await
    }

    /// Looks at a slot that could not be read, or not be made durable, when the volume was opened: the keys to go on with.
    async fn look_at_slot(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<Keys, BlockError> {
        let found = self.read_journal(cx, buffer, work.slot).await?;
        let is_its =
            |(start, old): &(u64, Vec<u8>)| *start == work.done && !old.is_empty() && old.len().is_multiple_of(work.unit);
        let Some((_, old)) = found.filter(is_its) else {
            // It is of another chunk, or void: this one was not begun.
            return Ok(work.keys(work.done, work.done, Failed::No));
        };
        // What was read is in the buffer yet.
        let slot = buffer.segment(PAGE + old.len());
        self.transfer(cx, Operation::Write { fua: false }, work.slot_start(), slot).await?;
        self.flushes.flush_alone(cx, &*self.leg).await?;
        Ok(work.keys(work.done, work.done + (old.len() / work.unit) as u64, Failed::Home))
    }

    /// The chunk as the journal has it, and as it is in its place.
    async fn read_both(
        &self,
        cx: TaskContext<'_>,
        buffer: &BounceBuffer,
        work: &Work,
    ) -> Result<(Vec<u8>, Vec<u8>), BlockError> {
        let old = self.read_slot(cx, buffer, work).await?;
        Ok((old, self.read_home(cx, buffer, work).await?))
    }

    /// The chunk as the journal has it.
    async fn read_slot(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<Vec<u8>, BlockError> {
        let found = self.read_journal(cx, buffer, work.slot).await?;
        let (_, old) = found.filter(|(start, _)| *start == work.done).ok_or(BlockError::ReadFault { errno: 0 })?;
        Ok(old)
    }

    /// What a slot of the journal says, if anything: its first block, and the blocks as they were.
    async fn read_journal(
        &self,
        cx: TaskContext<'_>,
        buffer: &BounceBuffer,
        number: u64,
    ) -> Result<Option<(u64, Vec<u8>)>, BlockError> {
        let slot = buffer.segment(SLOT);
        self.transfer(cx, Operation::Read, slot_start(number), slot).await?;
        let mut bytes = vec![0; SLOT];
        slot.read_at(0, &mut bytes);
        let id = self.control().header.as_ref().and_then(|header| Some(header.rekeying.as_ref()?.id));
        let found = JournalPage::decode(&bytes, &id.ok_or(BlockError::NotReady)?);
        Ok(found.map(|(page, old)| (page.start, old.to_vec())))
    }

    /// The chunk as it is in its place.
    async fn read_home(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<Vec<u8>, BlockError> {
        let len = (work.end - work.done) as usize * work.unit;
        let mut home = vec![0; len];
        self.move_home(cx, buffer, work, Operation::Read, &home).await?;
        buffer.segment(len).read_at(0, &mut home);
        Ok(home)
    }

    async fn move_home(
        &self,
        cx: TaskContext<'_>,
        buffer: &BounceBuffer,
        work: &Work,
        operation: Operation,
        data: &[u8],
    ) -> Result<(), BlockError> {
        let segment = buffer.segment(data.len());
        segment.write_at(0, data);
        self.transfer(cx, operation, work.start(), segment).await
    }

    async fn transfer(&self, cx: TaskContext<'_>, operation: Operation, at: u64, data: Segment) -> Result<(), BlockError> {
        let shift = self.geometry().block_size.shift();
        let (lba, count) = (Lba(at >> shift), BlockCount((data.len() >> shift) as u64));
        let segments = [data];
        self.leg.submit(cx, Request { operation, lba, count, segments: &segments }).await
    }

    /// Everything has the new key: forgets the old one.
    async fn end_rekeying(&self, cx: TaskContext<'_>, buffer: &BounceBuffer, work: &Work) -> Result<(), RekeyError> {
        if let Err(error) = self.flush_home(cx).await {
            let keys = self.chunk_before(cx, buffer, work).await?;
            self.exchange(cx, keys).await?;
            return Err(error.into());
        }
        let header = self.control().header.as_ref().map(Header::end_rekeying).ok_or(BlockError::NotReady)?;
        self.control().ending = true;
        self.store_header_in(cx, &header).await?;
        self.note_header(header);
        self.exchange_surely(cx, Keys { current: Arc::clone(&work.next), next: None, unit: work.unit }).await;
        tracing::info!(volume = self.name, "re-keying is done");
        Ok(())
    }
}

/// The next chunk, and its keys.
struct Work {
    current: Arc<Xts>,
    next: Arc<Xts>,
    unit: usize,
    done: u64,
    end: u64,
    /// Behind its last block as the journal has it, or will: of one that is half done, also where the volume has become shorter since. What lies
    /// past the end then has the new key if it comes back, as after a crash.
    journaled: u64,
    /// What failed of it before.
    failed: Failed,
    slot: u64,
}

impl Work {
    /// `None` when nothing is to be re-enciphered.
    fn of(keys: &Keys, blocks: u64) -> Option<Self> {
        let next = keys.next.as_ref()?;
        let end = blocks.min(next.done.saturating_add((CHUNK / keys.unit) as u64));
        let (current, cipher) = (Arc::clone(&keys.current), Arc::clone(&next.cipher));
        // The journal has no more of a chunk that failed than it had then.
        let end = if next.failed == Failed::No { end } else { end.min(next.end) };
        let (done, failed, slot, unit) = (next.done, next.failed, next.slot, keys.unit);
        let mut work = Self { current, next: cipher, unit, done, end, journaled: end, failed, slot };
        if work.is_half_done() {
            work.journaled = next.end;
        }
        Some(work)
    }

    /// Whether part of it may have the new key already.
    fn is_half_done(&self) -> bool {
        matches!(self.failed, Failed::Home | Failed::Again)
    }

    /// The keys while it is under way, or has failed.
    fn held(&self, failed: Failed) -> Keys {
        self.keys(self.done, self.journaled, failed)
    }

    fn keys(&self, done: u64, end: u64, failed: Failed) -> Keys {
        let next = Next { cipher: Arc::clone(&self.next), done, end, failed, slot: self.slot };
        Keys { current: Arc::clone(&self.current), next: Some(next), unit: self.unit }
    }

    /// The keys after the chunk.
    fn keys_after(&self) -> Keys {
        let next = Next::at(Arc::clone(&self.next), self.journaled, 1 - self.slot);
        Keys { current: Arc::clone(&self.current), next: Some(next), unit: self.unit }
    }

    /// The first byte of the journal's slot on the leg.
    fn slot_start(&self) -> u64 {
        slot_start(self.slot)
    }

    /// Its first byte on the leg.
    fn start(&self) -> u64 {
        OFFSET + self.done * self.unit as u64
    }
}

/// The first byte of a slot of the journal on the leg.
fn slot_start(slot: u64) -> u64 {
    JOURNAL + slot * SLOT as u64
}

/// Gives the new key to what of the blocks of `home` is still as it was, and holds anything: in sectors, for power may have gone in the middle of
/// a block. Each is enciphered by its place alone.
fn change_keys(keys: (&Xts, &Xts), first: u64, unit: usize, home: &mut [u8], old: &[u8]) -> usize {
    let mut changed = 0;
    for (number, (block, old)) in (first..).zip(home.chunks_mut(unit).zip(old.chunks(unit))) {
        // Zeroes have no key, and what is zeroes now was given back: of a block that power tore, the journal may have zeroes in part.
        if legs::is_zero(old) || legs::is_zero(block) {
            continue;
        }
        if block == old {
            keys.0.change_key(keys.1, number, unit, block);
            changed += 1;
            continue;
        }
        if block.chunks(SECTOR).zip(old.chunks(SECTOR)).all(|(home, old)| home != old) {
            continue;
        }
        let mut new = old.to_vec();
        keys.0.change_key(keys.1, number, unit, &mut new);
        for ((home, old), new) in block.chunks_mut(SECTOR).zip(old.chunks(SECTOR)).zip(new.chunks(SECTOR)) {
            if home == old {
                home.copy_from_slice(new);
            }
        }
        changed += 1;
    }
    changed
}

/// A chunk that the journal knows.
struct Known {
    slot: u64,
    page: JournalPage,
    /// Its blocks as they were.
    old: Vec<u8>,
    /// Behind its last block.
    end: u64,
}

/// `None` where the medium failed; other trouble is an error.
fn unless_bad<T>(result: Result<T, ServiceError>) -> Result<Option<T>, ServiceError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ServiceError::Leg { source: BlockError::ReadFault { .. } | BlockError::WriteFault { .. }, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Known {
    /// What a slot holds, if it is of this re-keying.
    fn in_slot(slot: u64, bytes: &[u8], id: &[u8; 16], block_size: BlockSize) -> Option<Self> {
        let (page, old) = JournalPage::decode(bytes, id)?;
        if old.is_empty() || !old.len().is_multiple_of(block_size.bytes() as usize) {
            return None;
        }
        let end = page.start.saturating_add(old.len() as u64 >> block_size.shift());
        Some(Self { slot, old: old.to_vec(), end, page })
    }

    /// Where it is on the leg, and how many bytes. What lies past the end was cut off since: if it comes back it has the new key, as the
    /// journal says.
    fn place(&self, leg: &Leg, block_size: BlockSize) -> (u64, usize) {
        let blocks = leg.geometry().bytes().saturating_sub(OFFSET) >> block_size.shift();
        let count = self.end.min(blocks).saturating_sub(self.page.start);
        (OFFSET.saturating_add(self.page.start << block_size.shift()), (count << block_size.shift()) as usize)
    }

    /// Writes its slot once more, durably, as it was found; false where the medium failed.
    fn store(&self, leg: &Leg, flushes: &Flushes) -> Result<bool, ServiceError> {
        let bytes = [&self.page.encode()[..], &self.old].concat();
        Ok(unless_bad(flushes.write(leg, slot_start(self.slot), bytes))?.is_some())
    }

    /// Its slot says nothing any more, durably.
    fn void(&self, leg: &Leg, flushes: &Flushes) -> Result<(), ServiceError> {
        flushes.write(leg, slot_start(self.slot), vec![0; PAGE])
    }

    /// Gives the new key to what is still as it was, durably; false where the medium failed, or cannot be written.
    fn complete(
        &self,
        (leg, flushes): (&Leg, &Flushes),
        block_size: BlockSize,
        keys: (&Xts, &Xts),
    ) -> Result<bool, ServiceError> {
        let (at, len) = self.place(leg, block_size);
        if len == 0 {
            return Ok(true);
        }
        let Some(mut home) = unless_bad(legs::read(leg, at, len))? else { return Ok(false) };
        let changed = change_keys(keys, self.page.start, block_size.bytes() as usize, &mut home, &self.old);
        if leg.geometry().read_only {
            return Ok(changed == 0);
        }
        // All of it: the leg may show what it could not make durable, and would not write by itself.
        Ok(unless_bad(flushes.write(leg, at, home))?.is_some())
    }

    /// Whether anything of it is not as it was.
    fn is_begun(&self, leg: &Leg, block_size: BlockSize) -> Result<bool, ServiceError> {
        let (at, len) = self.place(leg, block_size);
        Ok(len == 0 || legs::read(leg, at, len)? != self.old[..len])
    }

    /// The keys while requests to it fail.
    fn held(&self, cipher: Arc<Xts>, failed: Failed) -> Next {
        Next { cipher, done: self.page.start, end: self.end, failed, slot: self.slot }
    }
}

/// After a crash in the middle of a re-keying: completes the chunks that the journal knows, and says where it goes on. What the leg cannot
/// do yet is tried again while the volume is in use, and costs that chunk until then.
pub(super) fn recover(
    (leg, flushes): (&Leg, &Flushes),
    id: &[u8; 16],
    block_size: BlockSize,
    keys: (&Xts, &Arc<Xts>),
) -> Result<Next, ServiceError> {
    let (read_only, cipher) = (leg.geometry().read_only, Arc::clone(keys.1));
    let keys: (&Xts, &Xts) = (keys.0, keys.1);
    let (mut chunks, mut unreadable) = (Vec::<Known>::new(), None);
    for slot in 0..2 {
        match legs::read(leg, slot_start(slot), SLOT) {
            Ok(bytes) => chunks.extend(Known::in_slot(slot, &bytes, id, block_size)),
            Err(error) if unreadable.is_none() => unreadable = Some(error),
            Err(error) => return Err(error),
        }
    }
    chunks.sort_by_key(|chunk| chunk.end);
    let Some(last) = chunks.pop() else {
        // A slot that cannot be read may be of any chunk.
        return unreadable.map_or_else(|| Ok(Next::at(cipher, 0, 0)), Err);
    };
    // Once the last one is begun, the one before is durable. (What of it cannot be read has the new key, like the rest.) Where it cannot be
    // read either it counts as begun: its slot is there, and came behind a flush.
    if let Some(before) = chunks.pop()
        && !before.complete((leg, flushes), block_size, keys)?
        && !unless_bad(last.is_begun(leg, block_size))?.unwrap_or(true)
    {
        if !read_only {
            last.void(leg, flushes)?;
        }
        return Ok(before.held(cipher, Failed::Home));
    }
    let failed = if !read_only && !last.store(leg, flushes)? {
        Some(Failed::Slot)
    } else {
        (!last.complete((leg, flushes), block_size, keys)?).then_some(Failed::Home)
    };
    match (failed, unreadable) {
        (None, None) => Ok(Next::at(cipher, last.end, 1 - last.slot)),
        (Some(failed), None) => Ok(last.held(cipher, failed)),
        (None, Some(error)) => {
            unless_bad(Err::<(), _>(error))?;
            // It may be of the next chunk, and say that part of that has the new key.
            let end = last.end.saturating_add((CHUNK >> block_size.shift()) as u64);
            Ok(Next { cipher, done: last.end, end, failed: Failed::Slot, slot: 1 - last.slot })
        }
        (Some(_), Some(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Power went while a block of eight sectors was written in its place: some of them have the new key.
    #[test]
    fn a_block_that_is_half_new_gets_the_rest() {
        let [before, after] = [(); 2].map(|()| Xts::new(millrace_cipher::Secret::generate().unwrap()).unwrap());
        let old: Vec<u8> = (0..3 * 4096_usize).map(|at| (at * 7 + at / 512) as u8).collect();
        let mut new = old.clone();
        assert_eq!(change_keys((&before, &after), 9, 4096, &mut new, &old), 3);
        assert!(new.chunks(SECTOR).zip(old.chunks(SECTOR)).all(|(new, old)| new != old));
        for sectors in 0..=24 {
            let mut torn = [&new[..sectors * SECTOR], &old[sectors * SECTOR..]].concat();
            assert_eq!(change_keys((&before, &after), 9, 4096, &mut torn, &old), (24 - sectors).div_ceil(8));
            assert!(torn == new, "{sectors} sectors");
        }
    }
}
