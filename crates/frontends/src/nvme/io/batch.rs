//! Reads and writes that nothing is wrong with, many at a time: the data path.
//!
//! ```text
//!   SQ: h ─► fetch, check, resolve ─► Volume::submit_many (one) ─┬─ done: its completion waits in the batch ─► settle
//!          (one by one; what is not plain                          └─ not: Volume::submit in a task slot ─┬─ done, as above
//!           ends the batch before it is taken)                                                            └─ waits: settle, then it is
//!                                                                                                          accepted like any other
//!    or: h, h + 1 … h + n ─► Volume::submit_many ─► so many are done; the next is submitted alone, those after it are looked at again
//! ```
//!
//! A batch only handles success. Whatever else an entry asks for — another opcode, a fused pair, metadata, a range outside the
//! volume, a reservation in the way, a bad data pointer — ends the batch with the entry still in the queue, and the long way
//! ([`Controller::io_command`]) takes it, checks it again and finds the right status.
//!
//! What holds for all commands of a batch is looked up once: the queues' memory, the namespace with its shape and rights, the
//! write gate. That is right because all of them were submitted before the batch began: whatever changes
//! meanwhile changes beside them, and its maker waits at the gate for the writes. A task slot is reserved at the first command that the volume
//! does not do at once. One by itself was tried by [`only`](super::only) before.
//!
//! Order of stores when a batch settles, for a successor that finds the state between any two of them:
//! 1. The completion entries, each with its phase tag last and with the submission queue's head after its own command (SQHD).
//! 2. The submission queue's head. Until here the commands lie in the queue as if they had not been taken. A successor that
//!    finds entries with the right phase tag beyond the completion queue's tail takes the last one's SQHD for the head: no
//!    command is carried out twice for the guest, and none is lost.
//! 3. The completion queue's tail and phase, in one store.
//!
//! A command that waits is accepted after the batch has settled up to it.

use std::rc::Rc;

use millrace_block::{BlockCount, Geometry, Lba, Metadata, Request, Step, Transfer, trace::Fetched};
use millrace_engine::{
    Launch, Outcome, ShardContext, TaskSlot,
    stages::{self, Stage},
};
use millrace_memory::{Access, GuestAddress, GuestMemory, Segment, Unsettled};
use millrace_nvme_spec::{
    command::{CommandId, Cqe, Fuse, Psdt, Sqe},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
    sgl::{SglIdentifier, SglType},
};

use super::{
    super::{
        controller::{BURST, CommandToken, Controller},
        data,
        errors::Subject,
        namespace::Attached,
        reservation::Rights,
        state,
    },
    task::{Finish, of_result, wait},
};

/// Submission entries fetched ahead.
const AHEAD: u32 = 12;
/// Commands whose data are brought near ahead.
const LOOK_AHEAD: u32 = 2;
/// With fewer commands to take, what is made for several costs more than it saves.
const FEW: u32 = 3;
/// Commands that a volume is given together, at most.
const TOGETHER: usize = 16;
/// The same when the first is a write: what is found next is found while stores past the caches are under way, of which there are some 4 KiB.
const WRITTEN_TOGETHER: usize = 4;
/// Batches in which that is not tried again after a volume has done none.
pub(super) const APART: u32 = 64;
/// Where in an entry Command Dwords 10 to 13 lie.
const SLBA: usize = std::mem::offset_of!(Sqe, cdw10);
/// Bytes of data after which completions are posted at once.
pub(super) const POST_AFTER: u64 = 128 << 10;

/// Completions after which they are posted, where nothing was copied past the caches: half of those to be taken, within these limits. The
/// guest makes new commands of the first half while the second is worked on: with all posted at the end, guest and device would wait for
/// each other by turns.
const POST: std::ops::RangeInclusive<usize> = 16..=32;

/// A namespace, with what holds for a batch.
struct View {
    nsid: u32,
    attached: Rc<Attached>,
    blocks: u64,
    shift: u32,
    /// Blocks of a command at most (MDTS).
    most: u64,
    readable: bool,
    /// Asked for at the first write, inside the gate.
    writable: Option<bool>,
    /// Inside the namespace's write gate.
    inside: bool,
    /// Whether the volume wants to know what will be read.
    prefetch: bool,
    /// Whether it is asked to do commands at once: of several it brings near itself what the later ones read.
    together: bool,
    geometry: Geometry,
    /// What was copied is settled before completions are posted.
    unsettled: Option<Unsettled>,
}

impl View {
    /// Whether this controller may write now. The first time it enters the gate, and stays inside as long as the view lives:
    /// whoever changes reservations waits for that.
    #[inline]
    fn is_writable(&mut self, controller: &Controller) -> bool {
        self.writable.unwrap_or_else(|| self.enter(controller))
    }

    /// Has the volume bring near what a later entry reads. Only a hint is taken from the entry, which is fetched and checked in
    /// its turn.
    fn prefetch(&mut self, sq: &Segment, index: u32, entries: u32) {
        let index = if index >= entries { index - entries } else { index };
        let at = index as usize * Sqe::SIZE;
        let [opcode, nsid] = sq.read_words::<1>(at).map(|word| [word as u8, (word >> 32) as u8])[0];
        let [lba, cdw12] = sq.read_words(at + SLBA);
        if NvmOpcode(opcode) == NvmOpcode::READ && nsid == self.nsid as u8 {
            let count = BlockCount(u64::from(ReadWriteCdw12::from_bits(cdw12 as u32).nlb_z()) + 1);
            self.prefetch = self.attached.volume.prefetch(Lba(lba), count);
        }
    }

    /// Has the volume bring near what a command reads that was checked.
    fn prefetch_for(&mut self, plain: &Plain) {
        if !plain.transfer.is_write() {
            self.prefetch = self.attached.volume.prefetch(plain.lba, plain.count);
        }
    }

    /// Has the volume do commands at once, from the first on; how many. One that does none is not asked again for a while.
    #[inline]
    fn do_at_once(&mut self, requests: &mut [Request<'_>]) -> usize {
        stages::enter(Stage::Volume);
        let done = self.attached.volume.submit_many(requests);
        if done == 0 {
            self.together = false;
            self.attached.apart.set(APART);
        }
        done
    }

    fn enter(&mut self, controller: &Controller) -> bool {
        let attached = &self.attached;
        let writable = if let Some(entered) = attached.namespace.gate.try_enter_all() {
            // `drop` leaves.
            std::mem::forget(entered);
            self.inside = true;
            attached.check_writable(&self.geometry).is_ok() && controller.check_rights(attached, Rights::WRITE).is_ok()
        } else {
            false
        };
        self.writable = Some(writable);
        writable
    }
}

impl Drop for View {
    #[inline]
    fn drop(&mut self) {
        // Who waits at the gate for writes finds what they wrote.
        self.unsettled = None;
        if self.inside {
            self.attached.namespace.gate.leave();
        }
    }
}

/// A command that was found in order; its data are in the controller's segments.
#[derive(Clone, Copy)]
struct Plain {
    cid: u16,
    transfer: Transfer,
    lba: Lba,
    count: BlockCount,
    bytes: u64,
}

/// Commands of one submission queue, between two settlements.
struct Batch {
    sqid: u16,
    cqid: u16,
    epoch: u32,
    sq: Segment,
    cq: Segment,
    entries: u32,
    /// The next entry to take. The `count` before it are done, but not settled.
    head: u32,
    /// Entries that the guest has added, seen from `head`.
    pending: u32,
    page_size: u64,
    write_cache: bool,
    /// The record that the next command which waits will have, once it was looked up.
    record: Option<u16>,
    view: Option<View>,
    /// Second halves of the completion entries, without phase.
    done: [u64; BURST as usize],
    count: usize,
    /// See [`POST`].
    post: usize,
    /// Bytes moved since the last settlement.
    moved: u64,
    reads: [u64; 2],
    writes: [u64; 2],
}

/// Why the next entry is not taken.
struct NotPlain;

impl Controller {
    /// Takes up to `budget` of the `pending` commands, for all of which there is room in the completion queue. Returns how many
    /// it took; fewer when the next is to go the long way, or the turn has moved enough.
    pub(crate) fn run_batch(&mut self, cx: &mut ShardContext<'_>, sqid: u16, pending: u32, budget: u32) -> u32 {
        if self.io.fused.any() {
            return 0;
        }
        let Some(mut batch) = Batch::begin(self, sqid, pending) else { return 0 };
        let (mut slot, mut taken) = (None, 0);
        while taken < budget && self.turn_bytes > 0 {
            let Ok(mut plain) = batch.next(self, 0) else { break };
            if batch.may_go_together(self) && budget - taken > 1 {
                let (done, alone) = if plain.transfer.is_write() {
                    self.launch_together::<WRITTEN_TOGETHER>(&mut batch, plain, budget - taken)
                } else {
                    self.launch_together::<TOGETHER>(&mut batch, plain, budget - taken)
                };
                taken += done;
                let Some(next) = alone else { continue };
                plain = next;
            } else if self.do_alone(&mut batch, &plain) {
                taken += 1;
                batch.finish(self, &plain);
                continue;
            }
            let Some(free) = slot.take().or_else(|| cx.reserve()) else { break };
            taken += 1;
            self.trace.fetched(sqid, plain.cid, || batch.fetched(&plain));
            stages::enter(Stage::Volume);
            match self.launch(free, &batch, &plain) {
                Outcome::Done(Ok(()), free) => {
                    slot = Some(free);
                    batch.finish(self, &plain);
                }
                Outcome::Done(Err(error), free) => {
                    slot = Some(free);
                    batch.settle(self);
                    let token = batch.token(&plain);
                    batch.accept(self, &plain);
                    self.complete(token, of_result(Err(error)));
                }
                Outcome::Waiting => {
                    batch.settle(self);
                    let token = batch.token(&plain);
                    batch.accept(self, &plain);
                    self.io.running.insert(token);
                }
            }
        }
        batch.settle(self);
        batch.count_transfers(self);
        stages::enter(Stage::Doorbells);
        taken
    }

    /// Hands the command that was found to its volume together with those after it that are like it. Returns how many are done, and the one
    /// that is to be launched alone.
    fn launch_together<const MOST: usize>(&mut self, batch: &mut Batch, first: Plain, budget: u32) -> (u32, Option<Plain>) {
        let &[segment] = self.segments.as_slice() else { return (0, Some(first)) };
        let (mut plains, mut segments) = ([first; MOST], [segment; MOST]);
        let (mut count, mut bytes) = (1, first.bytes);
        while count < MOST.min(budget as usize) && bytes < POST_AFTER {
            let Ok(plain) = batch.next(self, count as u32) else { break };
            let &[segment] = self.segments.as_slice() else { break };
            (plains[count], segments[count]) = (plain, segment);
            bytes += plain.bytes;
            count += 1;
        }
        let mut done = 0;
        if count > 1 {
            let mut requests: [_; MOST] = std::array::from_fn(|at| {
                let Plain { transfer, lba, count, .. } = plains[at];
                Request { operation: transfer.into(), lba, count, segments: std::slice::from_ref(&segments[at]) }
            });
            let view = batch.view.as_mut().expect("a plain command has a namespace");
            done = view.do_at_once(&mut requests[..count]);
        }
        plains[..done].iter().for_each(|plain| batch.finish(self, plain));
        let next = plains[..count].get(done).copied();
        if next.is_some() {
            self.segments.clear();
            self.segments.push(segments[done]);
        }
        (done as u32, next)
    }

    /// Has the volume do a command by itself, if it does so at once: that takes no place for a task.
    #[inline]
    fn do_alone(&self, batch: &mut Batch, plain: &Plain) -> bool {
        let view = batch.view.as_mut().expect("a plain command has a namespace");
        let (Plain { transfer, lba, count, bytes, .. }, segments) = (*plain, self.segments.as_slice());
        // Long ones are done in pieces, with others in between.
        if !view.together || bytes >= POST_AFTER || segments.len() != 1 || self.trace.is_on() {
            return false;
        }
        let mut request = Request { operation: transfer.into(), lba, count, segments };
        view.do_at_once(std::slice::from_mut(&mut request)) == 1
    }

    /// Hands a command to its volume.
    #[inline]
    fn launch<'s>(
        &self,
        slot: TaskSlot<'s>,
        batch: &Batch,
        plain: &Plain,
    ) -> Outcome<'s, Result<(), millrace_block::BlockError>> {
        let (segments, sink) = (self.segments.as_slice(), &self.sink);
        let Plain { transfer, lba, count, .. } = *plain;
        let view = batch.view.as_ref().expect("a plain command has a namespace");
        let _under = self.trace.under(view.nsid, batch.sqid, plain.cid);
        slot.run_with(&view.attached, |cx, attached| {
            let segments = match segments {
                // Nearly always; a copy of known length is two instructions.
                [one] => cx.scratch.copy_slice(&[*one]),
                segments => cx.scratch.copy_slice(segments),
            };
            match attached.volume.submit(cx, Request { operation: transfer.into(), lba, count, segments }) {
                // By itself, so that nothing but the tags is loaded.
                Step::Done(Ok(())) => Launch::Done(Ok(())),
                Step::Done(result) => Launch::Done(result),
                Step::Wait(future) => {
                    let begin = if transfer.is_write() { Finish::new } else { Finish::of_reader };
                    let finish = begin(attached, sink, batch.token(plain));
                    let entered = transfer.is_write().then(|| attached.namespace.gate.enter_again());
                    wait(cx, async move {
                        let result = future.await;
                        if transfer.is_write() {
                            attached.namespace.written(result, lba, count);
                        }
                        drop(entered);
                        finish.end(result);
                    })
                }
            }
        })
    }

    /// The namespace, if its reads and writes may be plain.
    #[inline]
    pub(super) fn plain_namespace(&self, nsid: u32) -> Option<&Rc<Attached>> {
        let attached = self.namespaces.get(nsid).filter(|attached| !attached.formatting.get())?;
        let namespace = &attached.namespace;
        let is_plain = namespace.uncorrectable.is_empty() && !matches!(namespace.volume.metadata(), Metadata::Shown(_));
        is_plain.then_some(attached)
    }

    fn view(&self, nsid: u32) -> Option<View> {
        let attached = self.plain_namespace(nsid)?;
        let namespace = &attached.namespace;
        let geometry = namespace.volume.geometry();
        Some(View {
            nsid,
            blocks: geometry.blocks.0,
            shift: geometry.block_size.shift(),
            most: self.config.max_transfer() >> geometry.block_size.shift(),
            readable: self.check_rights(attached, Rights::READ).is_ok(),
            writable: None,
            inside: false,
            prefetch: true,
            together: attached.apart.replace(attached.apart.get().saturating_sub(1)) == 0,
            unsettled: namespace.volume.settles_late().then(Unsettled::new),
            attached: Rc::clone(attached),
            geometry,
        })
    }
}

impl Batch {
    /// `None`: the queues' memory is not in one piece, or gone.
    fn begin(c: &mut Controller, sqid: u16, pending: u32) -> Option<Self> {
        let (sq, cq) = c.ring_segments(sqid)?;
        let state = c.sq(sqid);
        let batch = Self {
            sqid,
            cqid: state.cq.get(),
            epoch: c.state.epoch.get(),
            sq,
            cq,
            entries: state.entries.get(),
            head: state.head.get(),
            pending,
            page_size: c.page_size(),
            write_cache: c.write_cache_enabled(),
            record: None,
            view: None,
            done: [0; BURST as usize],
            count: 0,
            post: (pending as usize / 2).clamp(*POST.start(), *POST.end()),
            moved: 0,
            reads: [0; 2],
            writes: [0; 2],
        };
        (1..AHEAD.min(pending)).for_each(|ahead| batch.prefetch(ahead));
        Some(batch)
    }

    /// Whether the volume is to be asked to do the next command together with others.
    #[inline]
    fn may_go_together(&self, c: &Controller) -> bool {
        self.pending > FEW && self.view.as_ref().is_some_and(|view| view.together) && !c.trace.is_on()
    }

    fn prefetch(&self, ahead: u32) {
        let index = self.head + ahead;
        let index = if index >= self.entries { index - self.entries } else { index };
        self.sq.prefetch(index as usize * Sqe::SIZE, Sqe::SIZE);
    }

    /// Copies an entry out, checks it and resolves its data: the next one, or one of those `after` it, which has the same namespace then.
    #[expect(clippy::inline_always, reason = "with two callers it would be a call, and what it finds go through memory")]
    #[inline(always)]
    fn next(&mut self, c: &mut Controller, after: u32) -> Result<Plain, NotPlain> {
        stages::enter(Stage::Fetch);
        if self.pending <= after {
            return Err(NotPlain);
        }
        if self.pending > after + AHEAD {
            self.prefetch(after + AHEAD);
        }
        let index = self.head + after;
        let index = if index >= self.entries { index - self.entries } else { index };
        let sqe: Sqe = zerocopy::transmute!(self.sq.read_words::<{ Sqe::SIZE / 8 }>(index as usize * Sqe::SIZE));
        stages::enter(Stage::Check);
        let cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12);
        let transfer = match sqe.nvm_opcode() {
            NvmOpcode::READ => Transfer::Read,
            NvmOpcode::WRITE => Transfer::Write { fua: cdw12.fua() || !self.write_cache },
            _ => return Err(NotPlain),
        };
        if self.record.is_none() {
            self.record = Some(c.records.next().ok_or(NotPlain)?);
        }
        let cid = sqe.cid.0;
        if sqe.flags.fuse() != Fuse::NORMAL || c.io.running.contains(self.sqid, cid) {
            return Err(NotPlain);
        }
        let is_first = self.view.as_ref().is_none_or(|view| view.nsid != sqe.nsid.0);
        if is_first && after > 0 {
            return Err(NotPlain);
        }
        if is_first {
            // The old one leaves its gate before the new one enters.
            self.view = None;
            self.view = c.view(sqe.nsid.0);
        }
        let view = self.view.as_mut().ok_or(NotPlain)?;
        let (lba, count) = (sqe.cdw10_11(), u64::from(cdw12.nlb_z()) + 1);
        if count > view.most || view.blocks.checked_sub(count).is_none_or(|last| lba > last) {
            return Err(NotPlain);
        }
        let allowed = if transfer.is_write() { view.is_writable(c) } else { view.readable };
        if !allowed {
            return Err(NotPlain);
        }
        let bytes = count << view.shift;
        let plain = Plain { cid, transfer, lba: Lba(lba), count: BlockCount(count), bytes };
        if view.prefetch && view.together && self.pending > FEW {
            if after < LOOK_AHEAD {
                view.prefetch_for(&plain);
            }
        } else if view.prefetch {
            // What lies between this one and the farthest was looked at by those before.
            let nearest = if is_first { 1 } else { LOOK_AHEAD };
            for ahead in (nearest..=LOOK_AHEAD).take_while(|ahead| self.pending > *ahead) {
                view.prefetch(&self.sq, self.head + ahead, self.entries);
                if !view.prefetch {
                    break;
                }
            }
        }
        let access = if transfer.is_write() { Access::Read } else { Access::Write };
        stages::enter(Stage::Pointer);
        resolve(&c.memory, self.page_size, &sqe, bytes, access, &mut c.segments)?;
        Ok(plain)
    }

    /// The command at the head, as the trace has it.
    #[cold]
    fn fetched(&self, plain: &Plain) -> Fetched {
        let nsid = self.view.as_ref().map_or(0, |view| view.nsid);
        Fetched { nsid, operation: plain.transfer.into(), lba: plain.lba, count: plain.count.0 }
    }

    /// The command at the head, for when it does not end here and now.
    #[cold]
    fn token(&self, plain: &Plain) -> CommandToken {
        let nsid = self.view.as_ref().map_or(0, |view| view.nsid);
        let opcode = if plain.transfer.is_write() { NvmOpcode::WRITE } else { NvmOpcode::READ };
        let subject = Subject::of_transfer(nsid, opcode, plain.lba.0);
        let record = self.record.expect("looked up before");
        CommandToken { sqid: self.sqid, cid: plain.cid, epoch: self.epoch, subject, record }
    }

    /// The entry at the head was taken.
    #[inline]
    fn step(&mut self, plain: &Plain) {
        self.head = if self.head + 1 == self.entries { 0 } else { self.head + 1 };
        self.pending -= 1;
        self.moved += plain.bytes;
        let [commands, bytes] = if plain.transfer.is_write() { &mut self.writes } else { &mut self.reads };
        *commands += 1;
        *bytes += plain.bytes;
    }

    /// A command has succeeded.
    #[inline]
    fn finish(&mut self, c: &mut Controller, plain: &Plain) {
        stages::enter(Stage::Complete);
        self.step(plain);
        // SQHD, SQID, CID, and a status of 0.
        let [head, sqid, cid] = [self.head as u16, self.sqid, plain.cid].map(u64::from);
        self.done[self.count] = head | sqid << 16 | cid << 32;
        self.count += 1;
        let is_long = self.count == self.done.len() || self.moved >= POST_AFTER;
        if is_long || self.count >= self.post && !self.is_unsettled() {
            self.settle(c);
        }
    }

    /// Whether something was copied past the caches that is to be settled before completions are posted.
    #[inline]
    fn is_unsettled(&self) -> bool {
        self.view.as_ref().and_then(|view| view.unsettled.as_ref()).is_some_and(Unsettled::is_pending)
    }

    /// Posts what is done; see the module for the order of stores.
    fn settle(&mut self, c: &mut Controller) {
        c.count_moved(std::mem::take(&mut self.moved));
        let count = std::mem::take(&mut self.count);
        if count == 0 {
            return;
        }
        stages::enter(Stage::Complete);
        if let Some(unsettled) = self.view.as_ref().and_then(|view| view.unsettled.as_ref()) {
            unsettled.settle();
        }
        let cq = c.cq(self.cqid);
        let (mut tail, mut phase, entries) = (cq.tail(), cq.phase(), cq.entries.get());
        for second in &self.done[..count] {
            self.cq.publish_pair(tail as usize * Cqe::SIZE, 0, second | u64::from(phase) << 48);
            tail += 1;
            if tail == entries {
                (tail, phase) = (0, !phase);
            }
        }
        state::commit();
        c.sq(self.sqid).head.set(self.head);
        state::commit();
        cq.move_to(tail, phase);
        let vector = (cq.interrupts.get() != 0).then(|| cq.vector.get());
        if c.trace.is_on() {
            let commands = self.done[..count].iter().map(|second| (second >> 32) as u16);
            commands.for_each(|command| c.trace.completed(self.sqid, command, 0, vector));
        }
        if let Some(vector) = vector {
            c.interrupts.pend(vector, count as u32);
        }
    }

    /// Accepts a command whose completion comes by itself; everything before it is settled.
    fn accept(&mut self, c: &mut Controller, plain: &Plain) {
        // Read once more, for whoever takes over: it checks what it finds. The identifier is the one that was checked here.
        let mut sqe: Sqe = self.sq.read_value(self.head as usize * Sqe::SIZE);
        sqe.cid = CommandId(plain.cid);
        let record = c.put_on_record(self.sqid, self.head, &sqe);
        assert_eq!(record, self.record.take(), "nobody else takes records");
        self.step(plain);
    }

    fn count_transfers(&self, c: &mut Controller) {
        c.counters.read_commands += self.reads[0];
        c.counters.bytes_read += self.reads[1];
        c.counters.write_commands += self.writes[0];
        c.counters.bytes_written += self.writes[1];
    }
}

/// What a data pointer names, where that is one page, two pages or one SGL block: one piece of memory, or two.
#[expect(clippy::inline_always, reason = "what it finds stays in registers")]
#[inline(always)]
pub(super) fn pieces(
    memory: &GuestMemory,
    page_size: u64,
    sqe: &Sqe,
    bytes: u64,
    access: Access,
) -> Option<(Segment, Option<Segment>)> {
    if sqe.flags.psdt() == Psdt::PRP {
        let (first, second) = (sqe.dptr.prp1, sqe.dptr.prp2);
        let here = page_size - (first & (page_size - 1));
        if !first.is_multiple_of(4) {
            return None;
        }
        if bytes <= here {
            return Some((memory.find_whole(GuestAddress(first), bytes, access)?, None));
        }
        if bytes - here > page_size || second & (page_size - 1) != 0 {
            return None;
        }
        let mut first = memory.find_whole(GuestAddress(first), here, access)?;
        let second = memory.find_whole(GuestAddress(second), bytes - here, access)?;
        if !first.adjoins(&second) {
            return Some((first, Some(second)));
        }
        first.extend_over(&second);
        return Some((first, None));
    }
    if !matches!(sqe.flags.psdt(), Psdt::SGL_MPTR_CONTIGUOUS | Psdt::SGL_MPTR_SGL) {
        return None;
    }
    let block = sqe.dptr.sgl1();
    let is_plain =
        block.identifier == SglIdentifier::new().with_kind(SglType::DATA_BLOCK) && u64::from(block.length) == bytes;
    is_plain.then(|| memory.find_whole(GuestAddress(block.address), bytes, access)).flatten().map(|piece| (piece, None))
}

/// Resolves a data pointer into `segments`.
#[inline]
fn resolve(
    memory: &GuestMemory,
    page_size: u64,
    sqe: &Sqe,
    bytes: u64,
    access: Access,
    segments: &mut Vec<Segment>,
) -> Result<(), NotPlain> {
    segments.clear();
    if let Some((first, second)) = pieces(memory, page_size, sqe, bytes, access) {
        segments.push(first);
        segments.extend(second);
        return Ok(());
    }
    data::resolve(memory, page_size, sqe, bytes, access, segments).map_err(|_| NotPlain)
}
