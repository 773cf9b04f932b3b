//! A space of FastPath's front: requests as words in the function's page, ends as records in a ring (docs/hardware.md, "FastPath").

use millrace_nvme_spec::{
    AdminOpcode, CommandId, Cqe, QueueId,
    command::DataPointer,
    nvm::ReadWriteCdw12,
    registers::{Doorbell, offset},
};

use crate::{
    cid::CidTable,
    command::Command,
    controller::Controller,
    dma::DmaBuffer,
    doorbell::BAR0,
    error::DriverError,
    queue::{CompletionQueue, QueueError},
    transport::SharedTransport,
};

/// The queue pair whose place it takes.
const ID: QueueId = QueueId(1);
/// Requests that may be in flight, and records in the ring.
const TAGS: u16 = 32;
/// Where a request's words are in the page of doorbells.
const WORDS: u64 = 0x800;

/// A space: used by one thread, and without a queue of its own. Each request is one message, because its words are register writes.
///
/// It is useless once its controller was disabled or reset.
pub struct Space {
    records: CompletionQueue,
    tags: CidTable,
    transport: SharedTransport,
    /// Where the controller's memory ends: offsets in the buffer are addresses.
    end: u64,
    /// Kept for its life and address.
    _ring: DmaBuffer,
}

impl Controller {
    /// Opens a space in the place of I/O queue pair 1, on all of the controller's memory. There are no I/O queues, and namespace 1 is there.
    ///
    /// # Errors
    /// Invalid Command Opcode from a controller without such a front, Not Enough Resources when others have all of its spaces.
    ///
    /// # Panics
    /// When the memory does not end within the first GiB of device addresses: nothing beyond can be named.
    pub fn open_space(&mut self) -> Result<Space, DriverError> {
        let memory = self.memory.range();
        let end = memory.iova + memory.len as u64;
        assert!(end <= 1 << 30, "the memory ends at {end:#x}");
        let ring = self.memory.alloc(usize::from(TAGS) * Cqe::SIZE)?;
        let mut open = Command::admin(AdminOpcode::OPEN_SPACE);
        open.sqe.dptr = DataPointer::prps(ring.range().iova, 0);
        open.sqe.cdw10 = (end / 4096) as u32;
        self.admin(&open)?;
        let entries = ring.ring(TAGS.into()).expect("it was allocated for its records");
        Ok(Space {
            // Records have the layout of completions; nobody is told that they were read.
            records: CompletionQueue::new(entries, self.doorbells.bell(Doorbell::CqHead(ID))),
            tags: CidTable::new(TAGS),
            transport: self.transport.clone(),
            end,
            _ring: ring,
        })
    }
}

impl Space {
    /// Requests that may be in flight.
    pub fn capacity(&self) -> usize {
        TAGS.into()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.tags.in_flight()
    }

    /// Sends a request: a command as it would go into a queue, for namespace 1, of up to 65,535 blocks in one run of memory; of
    /// its flags FUA alone is carried. What the front does not know ends with Invalid Command Opcode.
    ///
    /// # Errors
    /// [`QueueError::Full`], [`QueueError::Transport`].
    pub fn submit(&mut self, command: &Command) -> Result<CommandId, QueueError> {
        let Some(tag) = self.tags.take() else {
            return Err(QueueError::Full { qid: ID, capacity: TAGS.into() });
        };
        let (sqe, cdw12) = (&command.sqe, ReadWriteCdw12::from_bits(command.sqe.cdw12));
        let at = command.data.map_or(0, |data| data.iova);
        assert!(at < self.end, "memory of another controller");
        let lba = sqe.cdw10_11();
        let blocks = u32::from(cdw12.nlb_z()) + 1;
        let go = u32::from(sqe.opcode) | u32::from(cdw12.fua()) << 8 | u32::from(tag.0) << 16;
        let words = [at as u32, lba as u32, (lba >> 32) as u32 & 0xffff | blocks << 16, go];
        let mut bytes = [0; 16];
        for (place, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        let sent = self.transport.get().region_write_posted(BAR0, offset::DOORBELLS + WORDS, &bytes);
        if let Err(source) = sent {
            self.tags.release(tag);
            return Err(QueueError::Transport { qid: ID, source });
        }
        Ok(tag)
    }

    /// Takes the next record if there is one: its command identifier is the request's tag, its Dword 0 the cycles that it took.
    ///
    /// # Errors
    /// [`QueueError::BadCompletion`] for one that cannot be, and when a request was refused that we sent.
    pub fn next_completion(&mut self) -> Result<Option<Cqe>, QueueError> {
        let Some(cqe) = self.records.pop() else { return Ok(None) };
        if cqe.sqhd == 0 && self.tags.release(cqe.cid) {
            return Ok(Some(cqe));
        }
        Err(QueueError::BadCompletion { qid: ID, cqe })
    }

    /// Fails when the controller's process is gone: shared memory alone does not tell.
    pub fn check(&self) -> Result<(), QueueError> {
        self.transport.get().check().map_err(|source| QueueError::Transport { qid: ID, source })
    }
}
