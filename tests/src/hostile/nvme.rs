//! An NVMe driver that means harm.

use std::path::Path;

use millrace_block::Lba;
use millrace_driver::{
    Command, Controller, DmaBuffer, DmaMemory, DmaRange, Namespace, Options, QueueOptions, QueuePair,
    spec::{
        AdminOpcode, NamespaceId, QueueId, Sqe,
        command::{DataPointer, Psdt},
        registers::Doorbell,
        sgl::{SglDescriptor, SglType},
    },
};
use rustix::fs::ftruncate;

use super::{Ended, Session, Trick};
use crate::PATIENCE;

/// Bytes of a page, and of a list of pages.
const PAGE: usize = 4096;
/// Bytes of a command whose memory shrinks.
const BYTES: usize = 16 << 10;
/// Region of the registers.
const BAR0: u32 = 0;
/// Where doorbells begin.
const DOORBELLS: u64 = 0x1000;

/// One connection, from its beginning to a bad end.
pub(super) fn session(socket: &Path, this: &Session) -> Result<(), Ended> {
    let options = Options { timeout: PATIENCE, memory_size: 8 << 20, ..Options::default() };
    let mut controller = Controller::open(socket, &options)?;
    controller.start()?;
    let namespace = controller.namespace(NamespaceId(1))?;
    let queue = controller.create_queue_pair(&QueueOptions::default())?;
    let mut guest = Guest { queue, namespace, controller };
    match this.trick {
        Trick::Loops => guest.loops(this),
        Trick::Floods => guest.floods(this),
        Trick::Shrinking => guest.shrinking(this),
    }
}

struct Guest {
    // Dropped before the controller, as its memory is the controller's.
    queue: QueuePair,
    namespace: Namespace,
    controller: Controller,
}

impl Guest {
    /// The largest read there is, with this for its data.
    fn large_read(&self, at: u64) -> Result<Sqe, Ended> {
        let len = self.namespace.max_transfer().min(1 << 20) as usize;
        Ok(self.namespace.read(Lba(0), DmaRange { iova: at, len })?.sqe)
    }

    /// Fills the queue with what `command` gives, rings, and takes the completions until there are none to come.
    fn fill(&mut self, this: &Session, mut command: impl FnMut(usize) -> Sqe) -> Result<(), Ended> {
        for at in 0..self.queue.capacity() {
            self.queue.submit(&Command::from(command(at)))?;
        }
        self.queue.ring()?;
        self.collect(this)
    }

    fn collect(&mut self, this: &Session) -> Result<(), Ended> {
        let Self { queue, controller, .. } = self;
        let (mut turn, mut failed) = (0_u64, None);
        let all = this.wait(|| {
            turn += 1;
            loop {
                match queue.next_completion() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(error) => failed = Some(Ended::from(error)),
                }
                if failed.is_some() {
                    break;
                }
            }
            // Shared memory alone does not tell.
            if turn.is_multiple_of(1024) && failed.is_none() {
                match controller.status() {
                    Ok(status) if status.cfs() => failed = Some("the controller has failed".into()),
                    Ok(_) => {}
                    Err(error) => failed = Some(error.into()),
                }
            }
            failed.is_some() || queue.in_flight() == 0
        });
        match failed {
            Some(error) => Err(error),
            None if all => Ok(queue.ring()?),
            None => Err("commands that do not end".into()),
        }
    }

    /// A list of pages that is its own only page, and the target of what is read; a segment that is the next one of itself, and two
    /// that are each other's.
    fn loops(&mut self, this: &Session) -> Result<(), Ended> {
        let list = self.controller.memory().alloc(PAGE)?;
        let segments = self.controller.memory().alloc(PAGE)?;
        let read = self.large_read(list.iova())?;
        let mut round = 0_usize;
        while this.goes_on(round) {
            round += 1;
            list.write_at(0, &list.iova().to_le_bytes().repeat(PAGE / 8));
            let (first, second) = (segments.iova(), segments.iova() + 512);
            segment(&segments, 0, if round.is_multiple_of(2) { first } else { second });
            segment(&segments, 512, first);
            self.fill(this, |at| {
                let mut sqe = read;
                if at.is_multiple_of(2) {
                    sqe.dptr = DataPointer::prps(list.iova(), list.iova());
                } else {
                    sqe.flags = sqe.flags.with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
                    sqe.dptr = DataPointer::from(SglDescriptor::segment(first, 16));
                }
                sqe
            })?;
        }
        Ok(())
    }

    /// Nonsense and large reads, in all queues; doorbells; messages.
    fn floods(&mut self, this: &Session) -> Result<(), Ended> {
        let large = self.large_read(self.controller.memory().range().iova)?;
        let data = self.controller.memory().alloc(PAGE)?;
        // All of its data to one page.
        let list = self.controller.memory().alloc(PAGE)?;
        list.write_at(0, &data.iova().to_le_bytes().repeat(PAGE / 8));
        let entries = self.queue.entries();
        let mut round = 0_usize;
        while this.goes_on(round) {
            round += 1;
            for value in [entries, 0xffff, 0x1_0000, u32::MAX] {
                self.queue.ring_tail_raw(value)?;
            }
            self.fill(this, |at| {
                let mut sqe = large;
                match at % 4 {
                    0 => sqe.dptr = DataPointer::prps(data.iova(), list.iova()),
                    1 => sqe.nsid = NamespaceId(u32::MAX - 1),
                    2 => sqe.opcode = 0x7f,
                    _ => sqe.set_cdw10_11(u64::MAX - 3),
                }
                sqe
            })?;
            for qid in 1..64_u64 {
                let bell = DOORBELLS + (qid + self.queue.id().0 as u64) * 8;
                self.controller.transport().region_write_posted(BAR0, bell, &u32::MAX.to_le_bytes())?;
            }
            let admin = self.controller.admin_queue();
            let mut abort = Command::admin(AdminOpcode::ABORT);
            for cid in 0..16_u32 {
                abort.sqe.cdw10 = cid << 16 | u32::from(QueueId(1).0);
                admin.submit(&abort)?;
            }
            admin.ring()?;
            if !this.wait(|| matches!(admin.next_completion(), Ok(None)) && admin.in_flight() == 0) {
                return Err("aborts that do not end".into());
            }
            admin.ring()?;
        }
        Ok(())
    }

    /// Memory that is taken away under commands, by message or by its file's end; every fourth time, the queues' own.
    fn shrinking(&mut self, this: &Session) -> Result<(), Ended> {
        let extra = DmaMemory::new(1 << 40, 4 << 20)?;
        let mut round = 0_usize;
        while this.goes_on(round) {
            round += 1;
            self.controller.transport().dma_map(extra.range(), extra.fd(), 0)?;
            let buffers: Vec<DmaBuffer> = (0..32).map(|_| extra.alloc(BYTES)).collect::<Result<_, _>>()?;
            for (at, buffer) in buffers.iter().enumerate() {
                let (lba, data) = (Lba(at as u64 * 64), buffer.slice(0, BYTES));
                let command =
                    if at.is_multiple_of(2) { self.namespace.read(lba, data) } else { self.namespace.write(lba, data) };
                self.queue.submit(&command?)?;
            }
            self.queue.ring()?;
            if !round.is_multiple_of(4) {
                self.controller.transport().dma_unmap(extra.range())?;
                self.collect(this)?;
                continue;
            }
            // Its commands end, or the device fails; and then the queues go, which this side does not touch any more.
            ftruncate(extra.fd(), 0)?;
            self.collect(this)?;
            return self.without_queues(this);
        }
        Ok(())
    }

    /// Truncates the memory of the queues themselves.
    fn without_queues(&mut self, this: &Session) -> Result<(), Ended> {
        ftruncate(self.controller.memory().fd(), 0)?;
        let (bell, entries, mut tail) = (Doorbell::SqTail(self.queue.id()), self.queue.entries(), 0);
        // Every doorbell makes the controller look at the queue.
        this.wait(|| {
            tail = (tail + 1) % entries;
            let rung = self.controller.write_doorbell(bell, tail);
            rung.is_err() || self.controller.status().map_or(true, |status| status.cfs())
        });
        Err("the queues' memory is gone".into())
    }
}

/// Writes a descriptor that says where more are.
fn segment(buffer: &DmaBuffer, at: usize, next: u64) {
    let descriptor = SglDescriptor::new(SglType::SEGMENT, next, 16);
    buffer.write_value(at, &descriptor);
}
