//! Small writes to a volume in memory: its parity is changed where it lies.

use millrace_block::{BlockCount, Lba, Operation, Request, Volume as _};
use millrace_memory::{Access, Reach, Segment, SegmentCursor, Target, parity::replace};

use super::{
    Parity,
    codec::{MOST_PARTS, Parts},
    rows::Rows,
};

impl Parity {
    /// A write within one chunk of a volume whose legs are all in memory, and good: what it changes in the parity goes there in the pass
    /// that moves the data. Whether it was done; if not, it must go the long way.
    ///
    /// There is no journal: power takes all of the memory, and leaves nothing that could be torn. What a worker that is killed leaves is in
    /// regions that are marked, as whole rows are.
    #[inline]
    pub(super) fn write_in_place(&self, request: &Request<'_>) -> bool {
        let shift = self.shape().block_size.shift();
        let (at, len, layout) = (request.lba.0 << shift, request.count.0 << shift, &self.layout);
        let (stripe, chunk, from) = layout.locate(at);
        if request.operation != (Operation::Write { fua: false }) || from + len > layout.chunk || self.plan.log_all {
            return false;
        }
        let rows = Rows { stripe, from, len };
        let bytes = self.leg_range(rows);
        let (lba, count) = (Lba(bytes.start >> shift), BlockCount(len >> shift));
        // Most legs are no memory: nothing is locked to find that out.
        if self.legs[layout.leg(stripe, chunk)].reach(lba, count, Access::Write).is_none() {
            return false;
        }
        let Some(_range) = self.members.ranges.try_lock(bytes.clone()) else { return false };
        // After the lock: see `Ranges::try_lock`.
        let settled = self.members.intent().is_some_and(|intent| intent.is_settled(bytes.start, bytes.end));
        let fit = settled && self.members.is_marked(&bytes) && self.is_healthy(self.members.masks());
        if !fit || self.journal.rings()[self.journal.ring_of(stripe)].is_live(&bytes) {
            return false;
        }
        self.replace_in_memory(rows, chunk, (lba, count), request.segments)
            // Else it is written once more, the long way.
            && self.is_healthy(self.members.masks())
    }

    /// Puts data in the place of a chunk's rows, and of their parity what this changes, if that is memory on all legs.
    fn replace_in_memory(&self, rows: Rows, chunk: usize, (lba, count): (Lba, BlockCount), data: &[Segment]) -> bool {
        let Some(template) = data.first() else { return false };
        let layout = &self.layout;
        let mut places = [Reach { segment: (*template).into(), target: Target::Near }; MOST_PARTS];
        for (part, place) in places[..layout.legs].iter_mut().enumerate() {
            let Some(reach) = self.legs[layout.leg(rows.stripe, part)].reach(lba, count, Access::Write) else {
                return false;
            };
            *place = reach;
        }
        let mut parity = [(places[0].segment, 1); MOST_PARTS];
        for (number, parity) in parity[..layout.parity].iter_mut().enumerate() {
            *parity = (places[layout.data() + number].segment, Parts::factor(number, chunk));
        }
        replace(places[chunk].segment, &parity[..layout.parity], &mut SegmentCursor::new(data));
        let changed = (layout.data()..layout.legs).chain([chunk]);
        changed.for_each(|part| self.legs[layout.leg(rows.stripe, part)].reached(lba, count));
        true
    }
}
