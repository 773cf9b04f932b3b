//! One read or write that nothing is wrong with, by itself: who has one command under way waits for it.
//!
//! What is known of it stays in registers from its entry to its completion, and in no list. Everything is checked as in a [batch](super::batch),
//! which finds out again about whatever is not done here: nothing was taken then. The order of stores is a batch's, too.

use millrace_block::{ByteOffset, Transfer};
use millrace_engine::stages::{self, Stage};
use millrace_memory::{Access, Segment};
use millrace_nvme_spec::{
    command::{Cqe, Fuse, Sqe},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
};

use super::{
    super::{controller::Controller, reservation::Rights, state},
    batch::{APART, POST_AFTER, pieces},
};

impl Controller {
    /// Has the volume do the one command that is in a queue, for which there is room in the completion queue, and posts that; `None` if it did not.
    pub(crate) fn do_only(&mut self, sqid: u16) -> Option<()> {
        if self.io.fused.any() || self.trace.is_on() || self.turn_bytes == 0 {
            return None;
        }
        stages::enter(Stage::Fetch);
        let (entries, completions) = self.ring_segments(sqid)?;
        let (head, cqid) = (self.sq(sqid).head.get(), self.sq(sqid).cq.get());
        let cqe = completions.part(self.cq(cqid).tail() as usize * Cqe::SIZE, Cqe::SIZE)?;
        let sqe: Sqe = zerocopy::transmute!(entries.read_words::<{ Sqe::SIZE / 8 }>(head as usize * Sqe::SIZE));
        stages::enter(Stage::Check);
        let cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12);
        let transfer = match sqe.nvm_opcode() {
            NvmOpcode::READ => Transfer::Read,
            NvmOpcode::WRITE => Transfer::Write { fua: self.durable(cdw12.fua()) },
            _ => return None,
        };
        if sqe.flags.fuse() != Fuse::NORMAL || self.io.running.contains(sqid, sqe.cid.0) {
            return None;
        }
        let attached = self.plain_namespace(sqe.nsid.0).filter(|attached| attached.apart.get() == 0)?;
        let namespace = &attached.namespace;
        // Nearly all that come here are answered.
        cqe.prefetch_to_write();
        let geometry = namespace.volume.geometry();
        let (lba, count) = (sqe.cdw10_11(), u64::from(cdw12.nlb_z()) + 1);
        let bytes = count << geometry.block_size.shift();
        if geometry.blocks.0.checked_sub(count).is_none_or(|last| lba > last) || bytes > self.config.max_transfer() {
            return None;
        }
        // Long ones are done in pieces, with others in between.
        if bytes >= POST_AFTER {
            return None;
        }
        stages::enter(Stage::Pointer);
        let access = if transfer.is_write() { Access::Read } else { Access::Write };
        let (data, None) = pieces(&self.memory, self.page_size(), &sqe, bytes, access)? else { return None };
        stages::enter(Stage::Check);
        // Whoever changes reservations waits until it has left.
        let entered = if transfer.is_write() { Some(namespace.gate.try_enter_all()?) } else { None };
        let rights = if transfer.is_write() { Rights::WRITE } else { Rights::READ };
        if transfer.is_write() && attached.check_writable(&geometry).is_err() || self.check_rights(attached, rights).is_err()
        {
            return None;
        }
        stages::enter(Stage::Volume);
        // No overflow: the last block is within the volume.
        if !attached.volume.do_one(transfer, ByteOffset(lba << geometry.block_size.shift()), data) {
            attached.apart.set(APART);
            return None;
        }
        drop(entered);
        stages::enter(Stage::Complete);
        cqe.prefetch_to_write();
        self.post_only(sqid, sqe.cid.0, &cqe);
        let [commands, moved] = if transfer.is_write() {
            [&mut self.counters.write_commands, &mut self.counters.bytes_written]
        } else {
            [&mut self.counters.read_commands, &mut self.counters.bytes_read]
        };
        *commands += 1;
        *moved += bytes;
        self.count_moved(bytes);
        stages::enter(Stage::Doorbells);
        Some(())
    }

    /// Posts the success of the command at the head in its completion entry; see the batch's module for the order of stores.
    #[expect(clippy::inline_always, reason = "what it is given stays in registers")]
    #[inline(always)]
    fn post_only(&mut self, sqid: u16, cid: u16, cqe: &Segment) {
        let sq = self.sq(sqid);
        let cq = self.cq(sq.cq.get());
        let head = if sq.head.get() + 1 == sq.entries.get() { 0 } else { sq.head.get() + 1 };
        let (tail, phase) = (cq.tail() + 1, cq.phase());
        let [sqhd, sqid, cid] = [head as u16, sqid, cid].map(u64::from);
        cqe.publish_pair(0, 0, sqhd | sqid << 16 | cid << 32 | u64::from(phase) << 48);
        state::commit();
        sq.head.set(head);
        state::commit();
        if tail == cq.entries.get() {
            cq.move_to(0, !phase);
        } else {
            cq.move_to(tail, phase);
        }
        if cq.interrupts.get() != 0 {
            let vector = cq.vector.get();
            self.interrupts.pend(vector, 1);
        }
    }
}
