//! Reads and writes that were looked at ahead, done by the volume with one call: several together, or one by itself.
//!
//! They are taken from the ring when they are done: a successor that finds them there does them again, and nobody is told of them twice.

use std::slice;

use millrace_block::{BlockCount, ByteOffset, Geometry, Lba, Request, Transfer};
use millrace_memory::Segment;

use super::{
    super::{
        disk::Core,
        ring::{Done, Plain, Ring, RingError},
    },
    Attached, Ending, SECTOR, Status, blocks, long,
};

/// Looks ahead in which none of them is done at once after a volume has done none. (One by itself that is no whole blocks counts as such, too: it is
/// the volume that sees it.)
const APART: u32 = 64;

/// A read or write of whole blocks.
#[derive(Clone, Copy)]
struct Found {
    transfer: Transfer,
    lba: Lba,
    count: BlockCount,
    data: Segment,
}

impl Core {
    /// Has the volume do the [one request](Ring::has_one) that is there, takes it and gives it back; whether it did. If not, nothing was taken.
    ///
    /// Who has one request under way waits for it: what is known of it stays in registers from here to its answer, and in no list.
    pub(crate) fn do_only(&mut self, ring: &mut Ring, queue: u16) -> Result<bool, RingError> {
        // Where what changes is logged, every request goes the long way.
        if self.log.is_some() || self.spent() >= self.until || !ring.has_one() {
            return Ok(false);
        }
        let Some(attached) = self.at_once() else { return Ok(false) };
        let Some((head, plain)) = ring.only(&self.memory) else { return Ok(false) };
        let Some(transfer) = self.direct(attached, &plain) else { return Ok(false) };
        let Some(offset) = plain.sector().and_then(|sector| sector.checked_mul(SECTOR)) else { return Ok(false) };
        if !attached.volume.do_one(transfer, ByteOffset(offset), plain.data) {
            attached.apart.set(APART);
            return Ok(false);
        }
        ring.fetch_index();
        ring.take_plain(head)?;
        let done = self.end_plain(queue, head, &plain);
        ring.give_back(&[done], None);
        Ok(true)
    }

    /// Has the volume do what was looked at ahead, from the first on and at most so many: what it does at once needs no place for a task.
    /// Returns how many are done: each is to be taken from the ring, and [ended](Self::end_plain).
    pub(crate) fn do_together<const MOST: usize>(&self, geometry: &Geometry) -> usize {
        let Some(attached) = self.at_once() else { return 0 };
        let Some(first) = self.found(attached, 0, geometry) else { return 0 };
        let (mut found, mut count, mut bytes) = ([first; MOST], 1, first.data.len() as u64);
        let room = self.until.saturating_sub(self.spent());
        if room == 0 {
            return 0;
        }
        while count < MOST
            && let Some(next) = self.found(attached, count, geometry).filter(|_| bytes < room)
        {
            found[count] = next;
            bytes += next.data.len() as u64;
            count += 1;
        }
        if MOST > 1 && count == 1 {
            return 0;
        }
        let mut requests: [_; MOST] = std::array::from_fn(|at| {
            let Found { transfer, lba, count, ref data } = found[at];
            Request { operation: transfer.into(), lba, count, segments: slice::from_ref(data) }
        });
        let done = attached.volume.submit_many(&mut requests[..count]);
        if done == 0 {
            attached.apart.set(APART);
        }
        done
    }

    /// The volume, if it is to be asked to do requests at once.
    #[inline]
    fn at_once(&self) -> Option<&Attached> {
        let attached = self.attached.as_ref().filter(|_| !self.trace.is_on())?;
        let apart = attached.apart.get();
        attached.apart.set(apart.saturating_sub(1));
        (apart == 0).then_some(attached)
    }

    /// The read or write of whole blocks that was looked at ahead at a place, if it is one that the volume may be given as it is.
    #[inline]
    fn found(&self, attached: &Attached, at: usize, geometry: &Geometry) -> Option<Found> {
        let (_, plain, sector) = self.transfer_ahead(at)?;
        let transfer = self.direct(attached, &plain)?;
        let (lba, count) = blocks(geometry, sector, plain.data.len() as u64)?;
        Some(Found { transfer, lba, count, data: plain.data })
    }

    /// How a plain request moves its data, if the volume may be given it as it is.
    #[inline]
    fn direct(&self, attached: &Attached, plain: &Plain) -> Option<Transfer> {
        let transfer = self.direction(plain);
        let refused = transfer.is_write() && attached.read_only;
        (!refused && plain.data.len() as u64 <= long::AT_ONCE).then_some(transfer)
    }

    /// Ends a request that was looked at ahead, and is done.
    #[inline]
    pub(crate) fn end_plain(&mut self, queue: u16, token: u16, plain: &Plain) -> Done {
        let ending = self.begin_plain(queue, token, plain);
        ending.end(self.log.as_deref(), &[], Status::Ok)
    }

    /// Counts a request that was looked at ahead.
    #[inline]
    pub(super) fn begin_plain(&mut self, queue: u16, token: u16, plain: &Plain) -> Ending {
        let bytes = plain.data.len() as u64;
        let mut ending = Ending { queue, token, status: plain.status, written: 0 };
        if plain.writable {
            self.counters.read_commands += 1;
            self.counters.bytes_read += bytes;
            ending.written = bytes as u32;
        } else {
            self.counters.write_commands += 1;
            self.counters.bytes_written += bytes;
        }
        ending
    }
}
