//! The way of a request.

use std::{ops::Range, sync::atomic::Ordering};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, Operation, Request, Scratch, ScratchBox, Step,
    TaskContext, Usage, Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes, helpers_scratch_bytes,
    placed_bytes,
};
use millrace_memory::{Access, BounceBuffer, Reach, Segment, SegmentCursor, Target, copy_and_sum};

use super::{
    Parity,
    codec::MOST_PARTS,
    journal::Entry,
    layout::{Band, Way},
    rows::{Image, Outcome, Rows, header_room},
};
use crate::{
    legs::{largest_scratch, wait_for_all, whole_blocks},
    locks::{Locked, until},
    members::{is_fault, state::Masks, why::Why},
    pieces::Map,
    told::is_told,
};

/// Bytes of each leg that are erased at once: more would keep others from the range for too long.
const ERASED_AT_ONCE: u64 = 16 << 20;
/// So few of them where others are always at work, or a stripe.
const ERASED_AT_LEAST: u64 = 256 << 10;

/// What is written.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// These bytes, the first of which belongs to this byte of the volume.
    Memory {
        segments: &'a [Segment],
        from: u64,
    },
    Zeroes,
}

impl Source<'_> {
    /// Copies what belongs to a byte of the volume and those after it.
    fn copy(&self, byte: u64, to: Segment) {
        match self {
            Self::Zeroes => to.fill(0),
            Self::Memory { segments, from } => {
                let mut cursor = SegmentCursor::new(segments);
                cursor.skip((byte - from) as usize);
                cursor.copy_to(to);
            }
        }
    }
}

/// Rows of some neighbouring data parts.
#[derive(Clone, Debug)]
struct Piece {
    rows: Rows,
    chunks: Range<usize>,
}

impl Piece {
    fn data(&self) -> u8 {
        self.chunks.clone().fold(0, |set, part| set | 1 << part)
    }
}

/// Rows that are about to be written, and the state that everything about them is decided by.
struct Writing<'w> {
    piece: &'w Piece,
    image: &'w Image,
    masks: Masks,
    /// Parity parts that are kept: their legs are in use.
    kept: u8,
}

/// A stripe that is written as a whole.
struct Whole<'a> {
    /// Nobody else works there.
    _range: Locked<'a>,
    /// All parts lie in it.
    _buffer: BounceBuffer,
    areas: &'a [Segment],
    rows: Rows,
    outcome: Outcome,
}

impl Parity {
    /// Cuts a band in pieces that fit into a buffer.
    fn pieces(&self, band: Band) -> impl Iterator<Item = Piece> + use<> {
        let most = self.most_rows();
        let Band { stripe, chunks, rows } = band;
        (rows.start..rows.end)
            .step_by(most as usize)
            .map(move |from| Piece { rows: Rows { stripe, from, len: most.min(rows.end - from) }, chunks: chunks.clone() })
    }

    fn copy_in(&self, piece: &Piece, image: &Image, source: &Source<'_>) {
        for chunk in piece.chunks.clone() {
            source.copy(self.layout.byte(piece.rows.stripe, chunk, piece.rows.from), image.area(chunk));
        }
    }

    /// Writes a piece.
    async fn write_piece(&self, cx: TaskContext<'_>, piece: &Piece, source: Source<'_>) -> Result<(), BlockError> {
        let bytes = self.leg_range(piece.rows);
        let (buffer, _range) = self.begin(cx, bytes.clone(), true).await?;
        let image = self.image(&buffer, piece.rows);
        let masks = self.members.masks();
        let in_use = self.parts_on(piece.rows.stripe, masks.writable);
        let kept = in_use & self.all_parts() & !self.data_parts();
        let writing = Writing { piece, image: &image, masks, kept };
        self.prepare(cx, &writing, &source).await?;
        let journaled = kept != 0 && !self.may_go_direct(piece, masks, &bytes);
        let number = if journaled { Some(self.log(cx, &writing, &bytes, &header_room(&buffer)).await?) } else { None };
        let now = self.parts_on(piece.rows.stripe, self.members.masks().writable);
        let changed = (piece.data() | kept) & in_use & now;
        let operation = match source {
            // Their parity is zeroes, too: what is erased takes no space.
            Source::Zeroes if piece.data() == self.data_parts() => Operation::WriteZeroes { fua: false, deallocate: true },
            _ => Operation::Write { fua: false },
        };
        let mut outcome = self.move_parts(cx, operation, piece.rows, &image, changed).await;
        if journaled {
            self.insist(cx, operation, (piece.rows, &image), changed, &mut outcome).await;
        }
        let direct = !journaled && self.is_healthy(masks);
        let result = self.settle(cx, piece.rows, piece.data(), outcome, direct).await;
        if let Some(number) = number {
            let now = self.members.masks();
            let torn = changed & !outcome.done & self.parts_on(piece.rows.stripe, now.writable);
            match result {
                // What is missing is known by the others alone, and they do not fit: the entry does.
                Err(error) if torn != 0 && !self.is_healthy(now) => {
                    self.stop(cx, self.legs_of_parts(piece.rows.stripe, torn), error).await;
                }
                _ => self.journal.rings()[self.journal.ring_of(piece.rows.stripe)].done(number),
            }
        }
        result
    }

    /// Writes once more what legs refused that cannot be spared: most who refuse one request take the next.
    async fn insist(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        (rows, image): (Rows, &Image),
        changed: u8,
        outcome: &mut Outcome,
    ) {
        let left = changed & !outcome.done;
        if left != 0 && !self.can_be_spared(rows.stripe, left, outcome) {
            let again = self.move_parts(cx, operation, rows, image, left).await;
            *outcome = Outcome { done: outcome.done | again.done, ..again };
        }
    }

    /// Whether the legs of these parts, which an outcome leaves, can go out of use.
    fn can_be_spared(&self, stripe: u64, left: u8, outcome: &Outcome) -> bool {
        let others = self.members.masks().readable & !self.legs_of_parts(stripe, left);
        outcome.refused.is_none() && others.count_ones() as usize >= self.layout.data()
    }

    /// Legs that must stay may lack what the journal has: nothing is read or written any more, so that nothing is computed from
    /// what does not fit, and no entry becomes void. The next opening carries them out again.
    async fn stop(&self, cx: TaskContext<'_>, legs: u8, error: BlockError) {
        self.members.stop(cx).await;
        if !self.stopped.swap(true, Ordering::Relaxed) {
            let leg = legs.trailing_zeros() as usize;
            tracing::error!(
                name = self.name,
                leg,
                volume = self.legs[leg].name(),
                %error,
                "this leg refused what the others took, and without it there are too few: nothing is read or written until the \
                 volume is opened again, which writes it once more from the journal. See that the leg is well first"
            );
        }
    }

    /// Brings into the image what is to be written: the data, and the parity that fits them.
    async fn prepare(&self, cx: TaskContext<'_>, writing: &Writing<'_>, source: &Source<'_>) -> Result<(), BlockError> {
        let Writing { piece, image, masks, kept, .. } = *writing;
        let (data, parts) = (piece.data(), image.parts());
        let others = self.data_parts() & !data;
        if others == 0 || kept == 0 {
            self.copy_in(piece, image, source);
            parts.encode(kept);
            return Ok(());
        }
        let bytes = self.leg_range(piece.rows);
        let readable = self.parts_on(piece.rows.stripe, masks.readable);
        let settled = self.members.intent().is_some_and(|intent| intent.is_settled(bytes.start, bytes.end));
        if self.layout.way(piece.chunks.len()) == Way::Modify && (data | kept) & !readable == 0 && settled {
            let outcome = self.move_parts(cx, Operation::Read, piece.rows, image, data | kept).await;
            if let Some(refused) = outcome.refused {
                return Err(refused);
            }
            if outcome.faulty == 0 {
                // What it was goes out of the parity, and what it will be comes in.
                piece.chunks.clone().for_each(|part| parts.account(part, kept));
                self.copy_in(piece, image, source);
                piece.chunks.clone().for_each(|part| parts.account(part, kept));
                return Ok(());
            }
            self.counters.read_errors.fetch_add(1, Ordering::Relaxed);
        }
        self.obtain(cx, piece.rows, image, others).await?;
        self.copy_in(piece, image, source);
        parts.encode(kept);
        Ok(())
    }

    /// Whether rows may be written without the journal: all of them, over legs that are all good, and no entry about them is left
    /// that a crash would bring back.
    fn may_go_direct(&self, piece: &Piece, masks: Masks, bytes: &Range<u64>) -> bool {
        piece.chunks.len() == self.layout.data()
            && !self.plan.log_all
            && self.is_healthy(masks)
            && !self.journal.rings()[self.journal.ring_of(piece.rows.stripe)].is_live(bytes)
    }

    pub(super) fn is_healthy(&self, masks: Masks) -> bool {
        masks.readable.count_ones() as usize == self.legs.len()
    }

    /// Writes an entry of the journal; when it returns, it is durable. Its number.
    async fn log(
        &self,
        cx: TaskContext<'_>,
        writing: &Writing<'_>,
        bytes: &Range<u64>,
        header: &Segment,
    ) -> Result<u64, BlockError> {
        let (rows, chunks, layout) = (writing.piece.rows, &writing.piece.chunks, &self.layout);
        let at = self.journal.ring_of(rows.stripe);
        let ring = &self.journal.rings()[at];
        let number = self.take_slot(cx, at, bytes).await?;
        let entry = Entry {
            set: self.journal.set(),
            ring: at as u32,
            number,
            tail: ring.tail(),
            stripe: rows.stripe,
            row: rows.from as u32,
            len: rows.len as u32,
            first: chunks.start as u32,
            count: chunks.len() as u32,
            parity: layout.parity as u32,
        };
        let mut list = [*header; MOST_PARTS + 1];
        let mut used = 1;
        for part in entry.parts(layout) {
            list[used] = writing.image.area(part);
            used += 1;
        }
        let list = &list[..used];
        entry.write(header, &list[1..]);
        let shift = self.shape().block_size.shift();
        let len = millrace_memory::total_len(list) as u64;
        let request = |copy: usize| {
            let leg = layout.leg(rows.stripe, layout.data() + copy);
            let lba = Lba((self.journal_of(leg) + self.journal.place(copy, number)) >> shift);
            (
                leg,
                Request { operation: Operation::Write { fua: true }, lba, count: BlockCount(len >> shift), segments: list },
            )
        };
        let copies = writing.kept >> layout.data();
        let mut outcome = self.exchange(cx, copies, &request).await;
        let left = copies & !outcome.done;
        if left != 0 && !self.can_be_spared(rows.stripe, left << layout.data(), &outcome) {
            // As in `insist`.
            let again = self.exchange(cx, left, &request).await;
            outcome = Outcome { done: outcome.done | again.done, ..again };
        }
        let failed = self.legs_of_parts(rows.stripe, outcome.faulty << layout.data());
        let result = match outcome.refused {
            Some(refused) => Err(refused),
            // Without its parity these rows need no journal.
            None => self.members.drop_legs(cx.deeper(), failed, outcome.error).await,
        };
        match result {
            Ok(()) => ring.told(entry.tail),
            Err(error) => self.leave_entry(cx, rows.stripe, writing.kept, number, error).await,
        }
        result.map(|()| number)
    }

    /// An entry was refused, and nothing of it is written in its place; but each of its legs may have it, whatever it said.
    async fn leave_entry(&self, cx: TaskContext<'_>, stripe: u64, copies: u8, number: u64, error: BlockError) {
        let masks = self.members.masks();
        let legs = self.legs_of_parts(stripe, copies) & masks.writable;
        if legs != 0 && !self.is_healthy(masks) {
            // It would be carried out under later ones that do not know of it, and what is missing be computed from both.
            self.stop(cx, legs, error).await;
        } else {
            self.journal.rings()[self.journal.ring_of(stripe)].done(number);
        }
    }

    /// Takes a slot of a ring, and makes room in it if there is none.
    async fn take_slot(&self, cx: TaskContext<'_>, ring: usize, bytes: &Range<u64>) -> Result<u64, BlockError> {
        let ring = &self.journal.rings()[ring];
        // Who is stopped gets no room, and is refused the flush.
        let can_have = || ring.written() > ring.tail() || ring.lacks_record() || self.members.masks().writable == 0;
        loop {
            let found = until(cx, || match ring.try_take(bytes) {
                Some(number) => Some(Ok(number)),
                None if can_have() => self.flush_turn.try_take().map(Err),
                None => None,
            });
            match found.await {
                Ok(number) => return Ok(number),
                Err(turn) => {
                    // A copy's requests come one level deeper, and hold a buffer of that level while they wait here.
                    let below = cx.deeper();
                    self.harden(below).await?;
                    if ring.lacks_record() {
                        self.record_void(below, &turn).await?;
                    }
                }
            }
        }
    }

    /// A guest's flush.
    async fn flush(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let losses = self.members.losses.count();
        let hardened = self.harden(cx).await;
        hardened.and(self.members.losses.tell(losses))
    }

    /// Makes everything that was written durable, on all legs in use.
    pub(super) async fn harden(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let mut written = [0; MOST_PARTS];
        for (written, ring) in written.iter_mut().zip(self.journal.rings()) {
            *written = ring.written();
        }
        let masks = self.members.masks();
        let flush = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
        let heard = |leg, result: Result<(), BlockError>| {
            if result.is_err_and(is_fault) {
                self.members.note_refused(leg);
            }
        };
        let outcome = self.exchange_and(cx, masks.writable, |leg| (leg, flush.clone()), heard).await;
        if let Some(refused) = outcome.refused {
            return Err(refused);
        }
        let faulty = outcome.faulty | self.members.refused() & masks.writable;
        let missed = self.members.unrecorded(masks.writable, faulty);
        let why = outcome.error.map_or(Why::Flush, Why::Failed);
        let dropped = self.members.drop_legs(cx.deeper(), missed, why).await;
        let error = dropped.err().unwrap_or(BlockError::WriteFault { errno: 0 });
        if self.doubt(cx, error).await || dropped.is_err() {
            return Err(error);
        }
        for (written, ring) in written.iter().zip(self.journal.rings()) {
            ring.advance(*written);
        }
        Ok(())
    }

    /// Legs refused a flush, whoever asked them, and must stay: what they had not made durable may be gone, and the next flush would not
    /// tell. Whether there are any.
    pub(super) async fn doubt(&self, cx: TaskContext<'_>, error: BlockError) -> bool {
        let (members, masks) = (&*self.members, self.members.masks());
        let lost = members.unflushed.legs() & masks.writable;
        let Some(intent) = members.intent().filter(|_| lost != 0) else { return false };
        let healthy = self.is_healthy(masks);
        if !healthy && self.journal.rings().iter().any(|ring| ring.head() > ring.tail()) {
            // They are in doubt until all is stopped: whoever flushes them beside this voids nothing.
            self.stop(cx, lost, error).await;
        } else {
            members.unflushed.settle(lost, |_| {
                if healthy {
                    intent.suspect_marked();
                }
            });
        }
        true
    }

    /// A write of these parts, and parity, has gone to the legs: it counts when every leg that it changes has it, or is known not
    /// to, after a crash too. `direct`: it began without the journal, over good legs.
    async fn settle(
        &self,
        cx: TaskContext<'_>,
        rows: Rows,
        parts: u8,
        outcome: Outcome,
        direct: bool,
    ) -> Result<(), BlockError> {
        let parity = self.all_parts() & !self.data_parts();
        let missed = self.legs_of_parts(rows.stripe, (parts | parity) & !outcome.done);
        let faulty = self.legs_of_parts(rows.stripe, outcome.faulty);
        let masks = self.members.masks();
        // A leg that this write left out and that has come back since is well: it is filled after this write.
        let missed = missed & (faulty | !masks.writable) & !masks.recorded;
        let mut result = outcome.refused.map_or(Ok(()), Err);
        if result.is_ok() && missed != 0 {
            result = self.members.drop_legs(cx.deeper(), missed, outcome.error).await;
        }
        if result.is_ok() && direct && !self.is_healthy(self.members.masks()) {
            // From now on a crash must not tear these rows.
            result = self.harden(cx).await;
        }
        if result.is_err()
            && let Some(intent) = self.members.intent()
        {
            let bytes = self.leg_range(rows);
            intent.suspect(&intent.regions_of(bytes.start, bytes.end));
        }
        result
    }

    /// A write of exactly one stripe that need not wait for anything but its legs; `None` when it is none, or must.
    #[inline]
    fn write_whole<'a>(&'a self, cx: TaskContext<'a>, request: &Request<'a>) -> Option<Step<'a>> {
        let shift = self.shape().block_size.shift();
        let (at, len, layout) = (request.lba.0 << shift, request.count.0 << shift, &self.layout);
        let one = len == layout.width() && at.is_multiple_of(len) && layout.chunk <= self.most_rows();
        if !one || request.operation != (Operation::Write { fua: false }) {
            return None;
        }
        let piece = Piece { rows: Rows { stripe: at / len, from: 0, len: layout.chunk }, chunks: 0..layout.data() };
        let (rows, bytes) = (piece.rows, self.leg_range(piece.rows));
        let range = self.members.ranges.try_lock(bytes.clone())?;
        let masks = self.members.masks();
        // After the lock: see `Ranges::try_lock`.
        if !self.members.is_marked(&bytes) || !self.may_go_direct(&piece, masks, &bytes) {
            return None;
        }
        if self.write_whole_at_once(rows, request) {
            return Some(Step::Done(Ok(())));
        }
        let buffer = cx.buffers.try_take()?;
        let image = self.image(&buffer, rows);
        self.copy_in(&piece, &image, &Source::Memory { segments: request.segments, from: at });
        image.parts().encode(self.all_parts());
        let areas = cx.scratch.copy_slice(image.parts().all);
        let mut whole = Whole { _range: range, _buffer: buffer, areas, rows, outcome: Outcome::default() };
        for part in 0..layout.legs {
            let (leg, request) = self.part_of(&whole, part);
            match self.legs[leg].submit(cx.deeper(), request) {
                Step::Done(result) => whole.outcome.note(part, result),
                step @ Step::Wait(_) => {
                    return Some(Step::Wait(cx.scratch.place_future(self.wait_for_whole(cx, whole, part, step))));
                }
            }
        }
        if whole.outcome.done == self.all_parts() && self.is_healthy(self.members.masks()) {
            return Some(Step::Done(Ok(())));
        }
        Some(Step::Wait(cx.scratch.place_future(self.settle_whole(cx, whole))))
    }

    /// A stripe with one parity whose legs are memory: data and their sum are one pass's. Whether it was done.
    #[inline]
    fn write_whole_at_once(&self, rows: Rows, request: &Request<'_>) -> bool {
        let (layout, shift) = (&self.layout, self.shape().block_size.shift());
        let (Some(template), true) = (request.segments.first(), layout.data() + 1 == layout.legs) else { return false };
        let (lba, count) = (Lba(self.leg_range(rows).start >> shift), BlockCount(rows.len >> shift));
        let mut places = [Reach { segment: (*template).into(), target: Target::Near }; MOST_PARTS];
        for (part, place) in places[..layout.legs].iter_mut().enumerate() {
            let leg = &self.legs[layout.leg(rows.stripe, part)];
            let Some(reach) = leg.reach(lba, count, Access::Write) else { return false };
            *place = reach;
        }
        let mut data = [*template; MOST_PARTS];
        let mut cursor = SegmentCursor::new(request.segments);
        for data in &mut data[..layout.data()] {
            match cursor.next_run(rows.len as usize) {
                Some(run) if run.len() as u64 == rows.len => *data = run,
                _ => return false,
            }
        }
        copy_and_sum(&data[..layout.data()], &places[..layout.legs]);
        (0..layout.legs).for_each(|part| self.legs[layout.leg(rows.stripe, part)].reached(lba, count));
        // Else it is written once more, the long way.
        self.is_healthy(self.members.masks())
    }

    /// The write of a part of a stripe.
    fn part_of<'a>(&self, whole: &Whole<'a>, part: usize) -> (usize, Request<'a>) {
        let shift = self.shape().block_size.shift();
        let (lba, count) = (Lba(self.leg_range(whole.rows).start >> shift), BlockCount(whole.rows.len >> shift));
        let segments = &whole.areas[part..=part];
        (
            self.layout.leg(whole.rows.stripe, part),
            Request { operation: Operation::Write { fua: false }, lba, count, segments },
        )
    }

    /// The leg of part `first` makes us wait: writes the parts after it, and waits for all.
    async fn wait_for_whole<'a>(
        &'a self,
        cx: TaskContext<'a>,
        mut whole: Whole<'a>,
        first: usize,
        step: Step<'a>,
    ) -> Result<(), BlockError> {
        {
            let scratch = largest_scratch(&self.legs);
            // Each part's request goes on beside the others, so it has a scratch of its own.
            let mut arenas: [Option<ScratchBox<'_, Scratch>>; MOST_PARTS] = Default::default();
            (first + 1..self.layout.legs).for_each(|part| arenas[part] = Some(cx.scratch.carve(scratch)));
            let mut steps: [Option<Step<'_>>; MOST_PARTS] = Default::default();
            steps[first] = Some(step);
            for part in first + 1..self.layout.legs {
                let arena = arenas[part].as_ref().expect("an arena was carved for each");
                let (leg, request) = self.part_of(&whole, part);
                steps[part] = Some(self.legs[leg].submit(cx.deeper().with_scratch(arena), request));
            }
            wait_for_all(&mut steps, |part, result| whole.outcome.note(part, result)).await;
        }
        self.settle_whole(cx, whole).await
    }

    async fn settle_whole(&self, cx: TaskContext<'_>, whole: Whole<'_>) -> Result<(), BlockError> {
        self.settle(cx, whole.rows, self.data_parts(), whole.outcome, true).await
    }

    /// A write or an erasure, stripe by stripe.
    async fn write(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shape = self.shape();
        let shift = shape.block_size.shift();
        // No overflow: the range was checked.
        let (mut at, end) = (request.lba.0 << shift, (request.lba.0 + request.count.0) << shift);
        let (source, fua) = match request.operation {
            Operation::Write { fua } => (Source::Memory { segments: request.segments, from: at }, fua),
            Operation::WriteZeroes { fua, .. } => (Source::Zeroes, fua),
            Operation::Deallocate if shape.deallocate => (Source::Zeroes, false),
            _ => return Ok(()),
        };
        let width = self.layout.width();
        // Stripes before this byte must be written like others.
        let mut like_others = 0;
        while at < end {
            if at >= like_others && at.is_multiple_of(width) && end - at >= width && matches!(source, Source::Zeroes) {
                let stripes = at / width..(end / width).min(at / width + (ERASED_AT_ONCE / self.layout.chunk).max(1));
                if let Some(stripe) = self.erase(cx, stripes.clone()).await? {
                    at = stripe * width;
                    continue;
                }
                // An entry of the journal keeps a stripe or two; the rest is for all of the request.
                let all = self.plan.log_all || !self.is_healthy(self.members.masks());
                like_others = if all { end } else { at + width };
            }
            let stop = end.min((at / width + 1) * width);
            for band in self.layout.bands(at..stop) {
                for piece in self.pieces(band) {
                    self.write_piece(cx, &piece, source).await?;
                }
            }
            at = stop;
        }
        if matches!(source, Source::Zeroes) {
            self.look_again(shape.block_size);
        }
        // Durable alone would not do: what it has in common with other writes, the parity, must be, too.
        if fua { self.harden(cx).await } else { Ok(()) }
    }

    /// Erases whole stripes on all legs, perhaps only the first of them: up to which. `None` when they must be written like others.
    async fn erase(&self, cx: TaskContext<'_>, stripes: Range<u64>) -> Result<Option<u64>, BlockError> {
        let chunk = self.layout.chunk;
        let mut bytes = stripes.start * chunk..stripes.end * chunk;
        let members = &*self.members;
        let _range = loop {
            self.mark(cx, &bytes).await?;
            // Both are powers of two: what is left are whole stripes.
            let range = members.ranges.lock_some(cx, &mut bytes, ERASED_AT_LEAST.max(chunk)).await;
            // After the lock: see `Ranges::try_lock`.
            if members.is_marked(&bytes) {
                break range;
            }
        };
        let masks = members.masks();
        let live = || self.journal.rings().iter().any(|ring| ring.is_live(&bytes));
        if self.plan.log_all || !self.is_healthy(masks) || live() {
            return Ok(None);
        }
        let shift = self.shape().block_size.shift();
        let (lba, count) = (Lba(bytes.start >> shift), BlockCount((bytes.end - bytes.start) >> shift));
        let operation = Operation::WriteZeroes { fua: false, deallocate: true };
        let request = |leg| (leg, Request { operation, lba, count, segments: &[] });
        let outcome = self.exchange(cx, masks.writable, request).await;
        let mut result = outcome.refused.map_or(Ok(()), Err);
        let missed = masks.writable & !outcome.done;
        if result.is_ok() && missed != 0 {
            result = members.drop_legs(cx.deeper(), missed, outcome.error).await;
        }
        if result.is_ok() && !self.is_healthy(members.masks()) {
            result = self.harden(cx).await;
        }
        if result.is_err()
            && let Some(intent) = members.intent()
        {
            intent.suspect(&intent.regions_of(bytes.start, bytes.end));
        }
        result.map(|()| Some(bytes.end / chunk))
    }

    /// A read: of the leg that has the data, or of the rows.
    #[inline]
    fn read<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let masks = self.members.masks();
        let is_there = || {
            let place = self.reader.map().locate(request.lba.0);
            request.count.0 <= place.run && masks.readable >> place.leg & 1 == 1
        };
        if self.plan.safe || !(self.is_healthy(masks) || is_there()) {
            return Step::Wait(cx.scratch.place_future(self.read_rows(cx, request)));
        }
        match self.reader.submit(cx.deeper(), request.clone()) {
            Step::Done(result) if !result.is_err_and(is_fault) => Step::Done(result),
            step => Step::Wait(cx.scratch.place_future(self.follow_read(cx, request, step))),
        }
    }

    async fn follow_read<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>, step: Step<'a>) -> Result<(), BlockError> {
        match step.await {
            Err(error) if is_fault(error) => {
                self.counters.read_errors.fetch_add(1, Ordering::Relaxed);
                self.read_rows(cx, request).await
            }
            result => result,
        }
    }

    /// A read by way of the rows: what is missing is computed, and in a safe volume everything is checked.
    async fn read_rows(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shift = self.shape().block_size.shift();
        let (from, end) = (request.lba.0 << shift, (request.lba.0 + request.count.0) << shift);
        for band in self.layout.bands(from..end) {
            for piece in self.pieces(band) {
                let (buffer, _range) = self.begin(cx, self.leg_range(piece.rows), false).await?;
                let image = self.image(&buffer, piece.rows);
                if self.plan.safe {
                    self.obtain_safely(cx, piece.rows, &image).await?;
                } else {
                    self.obtain(cx, piece.rows, &image, piece.data()).await?;
                }
                for chunk in piece.chunks.clone() {
                    let mut cursor = SegmentCursor::new(request.segments);
                    cursor.skip((self.layout.byte(piece.rows.stripe, chunk, piece.rows.from) - from) as usize);
                    cursor.copy_from(image.area(chunk));
                }
            }
        }
        Ok(())
    }

    /// Reads all parts of rows, and checks them as far as there is anything to check them with.
    async fn obtain_safely(&self, cx: TaskContext<'_>, rows: Rows, image: &Image) -> Result<(), BlockError> {
        let bytes = self.leg_range(rows);
        let settled = self.members.intent().is_some_and(|intent| intent.is_settled(bytes.start, bytes.end));
        if !settled {
            return self.obtain(cx, rows, image, self.all_parts()).await;
        }
        let checked = self.examine(cx, rows, image).await?;
        let Some(first) = checked.first else { return Ok(()) };
        let count = self.counters.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if is_told(count) || checked.repaired > 0 {
            let shift = self.shape().block_size.shift();
            let leg_lba = (bytes.start - rows.from + first) >> shift;
            tracing::error!(
                name = self.name,
                // The first of the volume's blocks in that row.
                lba = self.layout.byte(rows.stripe, 0, first) >> shift,
                stripe = rows.stripe,
                leg_lba,
                count,
                "a read was refused: parity and data do not fit, and nothing tells which is wrong. Find the leg that is wrong \
                 (\"scrub\", its own checks), then \"fail\" and \"rebuild\" it; or write the blocks anew"
            );
        }
        Err(BlockError::ReadFault { errno: 0 })
    }

    /// Scratch bytes of one exchange with the legs.
    fn legs_bytes(&self) -> usize {
        let each = placed_bytes::<Scratch>() + largest_scratch(&self.legs).next_multiple_of(8);
        self.legs.len() * each
    }
}

/// Scratch bytes that the future of [`Parity::wait_for_whole`] takes.
fn whole_bytes<'a, F: Future>(_: fn(&'a Parity, TaskContext<'a>, Whole<'a>, usize, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

/// Scratch bytes that the future of [`Parity::follow_read`] takes.
fn follow_bytes<'a, F: Future>(_: fn(&'a Parity, TaskContext<'a>, Request<'a>, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

impl Volume for Parity {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shape()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let (ByteOffset(_), _) = match check(&self.shape(), &request) {
            Ok(range) => range,
            Err(error) => return Step::Done(Err(error)),
        };
        match request.operation {
            Operation::Flush => Step::Wait(cx.scratch.place_future(self.flush(cx))),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Read => self.read(cx, request),
            Operation::Compare => Step::Wait(cx.scratch.place_future(compare_by_reading(self, cx, request))),
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(copy_by_bounce(self, cx, request))),
            _ if self.write_in_place(&request) => Step::Done(Ok(())),
            _ => match self.write_whole(cx, &request) {
                Some(step) => step,
                None => Step::Wait(cx.scratch.place_future(self.write(cx, request))),
            },
        }
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        // Healthy or not: most of what is read is there.
        self.reader.prefetch(lba, count)
    }

    fn scratch_bytes(&self) -> usize {
        // The leg that made us wait for a whole stripe is beside all others.
        let whole = whole_bytes(Self::wait_for_whole) + MOST_PARTS * size_of::<Segment>() + largest_scratch(&self.legs);
        let write = future_bytes(Self::write).max(whole);
        let read = self.reader.scratch_bytes() + follow_bytes(Self::follow_read);
        helpers_scratch_bytes(write.max(read) + self.legs_bytes())
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name.clone(), what: "resizing" })
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        // Nobody stores what is void meanwhile, and nobody stops it.
        let _turn = self.flush_turn.take_and_wait();
        if self.stopped.load(Ordering::Relaxed) {
            // One that ends half way would bring the legs back as they are.
            let why = "it is stopped until it is opened again, because a leg refused a write".to_owned();
            return Err(VolumeError::Refused { volume: self.name.clone(), why });
        }
        let bytes = whole_blocks(&self.name, self.bytes(), block_size)?;
        self.members.format_legs(block_size, self.layout.leg_bytes(bytes), || self.look_again(block_size))?;
        self.void_journal().map_err(|error| VolumeError::Io {
            volume: self.name.clone(),
            action: "write the journal's record of",
            path: "its legs".into(),
            source: std::io::Error::other(error.to_string()),
        })
    }

    fn usage(&self) -> Usage {
        let allocated: u64 = self.legs.iter().map(|leg| leg.usage().allocated).sum();
        Usage { allocated: allocated / self.legs.len() as u64 * self.layout.data() as u64 }
    }
}
