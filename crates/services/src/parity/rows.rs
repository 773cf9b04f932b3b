//! Rows of a stripe in a buffer: read, computed, checked, and written back.
//!
//! ```text
//!   buffer:  D0 │ D1 │ … │ P │ Q │ as many again as there are parity parts │ … │ header of a journal's entry
//!            └ so many bytes of each leg, at one offset                                └ its last 4096 bytes
//! ```

use std::{ops::Range, sync::atomic::Ordering};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, Scratch, ScratchBox, Step, TaskContext, Volume};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, Segment};

use super::{
    Parity,
    codec::{MOST_PARTS, Parts, Verdict, parts_of},
    journal::HEADER,
};
use crate::{
    legs::{largest_scratch, wait_for_all},
    locks::{Locked, UNIT},
    members::is_fault,
};

/// Requests to several legs, ended. Sets of whatever numbers the caller gave them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub(super) done: u8,
    /// The leg was at fault.
    pub(super) faulty: u8,
    pub(super) error: Option<BlockError>,
    /// An error that is no leg's fault.
    pub(super) refused: Option<BlockError>,
}

impl Outcome {
    pub(super) fn note(&mut self, number: usize, result: Result<(), BlockError>) {
        match result {
            Ok(()) => self.done |= 1 << number,
            Err(error) if is_fault(error) => {
                self.faulty |= 1 << number;
                self.error.get_or_insert(error);
            }
            Err(error) => {
                self.refused.get_or_insert(error);
            }
        }
    }
}

/// Neighbouring blocks of which the same parts are to be written again.
#[derive(Default)]
struct Run(Option<(Rows, u8)>);

impl Run {
    /// Adds a block with parts, which may be none. What came before it, if that is not the same.
    fn add(&mut self, block: Rows, parts: u8) -> Option<(Rows, u8)> {
        match &mut self.0 {
            Some((rows, known)) if *known == parts => {
                rows.len += block.len;
                None
            }
            before => std::mem::replace(before, (parts != 0).then_some((block, parts))),
        }
    }
}

/// Some rows of a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) stripe: u64,
    /// Bytes within each chunk.
    pub(super) from: u64,
    pub(super) len: u64,
}

/// Room for rows in a buffer.
pub(super) struct Image {
    areas: [Segment; 2 * MOST_PARTS],
    parts: usize,
    data: usize,
}

impl Image {
    /// All parts.
    pub(super) fn parts(&self) -> Parts<'_> {
        Parts { all: &self.areas[..self.parts], data: self.data }
    }

    /// The part's bytes, as a list.
    pub(super) fn list(&self, part: usize) -> &[Segment] {
        &self.areas[part..=part]
    }

    pub(super) fn area(&self, part: usize) -> Segment {
        self.areas[part]
    }

    /// One block of all parts, with the room behind them.
    fn block(&self, at: usize, block: usize) -> Self {
        Self { areas: self.areas.map(|area| area.part(at, block).expect("a block of the rows")), ..*self }
    }

    /// The room behind the parts.
    fn spare(&self) -> &[Segment] {
        &self.areas[self.parts..2 * self.parts - self.data]
    }
}

/// Room for the header of a journal's entry.
pub(super) fn header_room(buffer: &BounceBuffer) -> Segment {
    buffer.segment(BUFFER_SIZE).part(BUFFER_SIZE - HEADER, HEADER).expect("the end of the buffer")
}

/// What a check of rows found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    /// Blocks that were wrong, or could not be read, and are right now.
    pub(super) repaired: u64,
    /// Blocks of each leg where the parity does not fit, and nothing tells why, or what is right could not be written.
    pub(super) unknown: u64,
    /// The first of those of which nothing tells what is right, in bytes within the chunk.
    pub(super) first: Option<u64>,
}

impl Parity {
    /// Bytes of each leg that fit into a buffer.
    pub(super) fn most_rows(&self) -> u64 {
        let areas = (self.layout.legs + self.layout.parity) as u64;
        let most = (BUFFER_SIZE - HEADER) as u64 / areas;
        // At least 6144, for there are at most ten areas.
        (most >> 12 << 12).min(self.layout.chunk)
    }

    /// The bytes of the legs that rows are.
    pub(super) fn leg_range(&self, rows: Rows) -> Range<u64> {
        let start = rows.stripe * self.layout.chunk + rows.from;
        start..start + rows.len
    }

    /// The parts of a stripe that are on these legs.
    pub(super) fn parts_on(&self, stripe: u64, legs: u8) -> u8 {
        parts_of(legs).fold(0, |set, leg| set | 1 << self.layout.part(stripe, leg))
    }

    /// The legs of these parts.
    pub(super) fn legs_of_parts(&self, stripe: u64, parts: u8) -> u8 {
        parts_of(parts).fold(0, |set, part| set | 1 << self.layout.leg(stripe, part))
    }

    /// All parts of a stripe.
    pub(super) fn all_parts(&self) -> u8 {
        (u16::MAX >> (16 - self.layout.legs)) as u8
    }

    /// All data parts of a stripe.
    pub(super) fn data_parts(&self) -> u8 {
        (u16::MAX >> (16 - self.layout.data())) as u8
    }

    pub(super) fn image(&self, buffer: &BounceBuffer, rows: Rows) -> Image {
        let (all, len) = (buffer.segment(BUFFER_SIZE), rows.len as usize);
        let used = self.layout.legs + self.layout.parity;
        let area = |number: usize| all.part(number.min(used - 1) * len, len).expect("rows fit into a buffer");
        Image { areas: std::array::from_fn(area), parts: self.layout.legs, data: self.layout.data() }
    }

    /// A buffer for rows and the lock on them; to write there, the region's mark besides. While it waits for one it has none of
    /// the others, so nobody waits for it.
    pub(super) async fn begin(
        &self,
        cx: TaskContext<'_>,
        bytes: Range<u64>,
        write: bool,
    ) -> Result<(BounceBuffer, Locked<'_>), BlockError> {
        let members = &*self.members;
        loop {
            if write {
                self.mark(cx, &bytes).await?;
            }
            let buffer = cx.buffers.take().await;
            if let Some(range) = members.ranges.try_lock(bytes.clone()) {
                // After the lock: see `Ranges::try_lock`.
                if !write || members.is_marked(&bytes) {
                    return Ok((buffer, range));
                }
                continue;
            }
            drop(buffer);
            drop(members.ranges.lock(cx, bytes.clone()).await);
        }
    }

    /// Makes the marks of these bytes durable. A leg that refuses and has to stay may have lost what it had besides.
    pub(super) async fn mark(&self, cx: TaskContext<'_>, bytes: &Range<u64>) -> Result<(), BlockError> {
        let marked = self.members.mark(cx, bytes).await;
        if let Err(error) = marked {
            self.doubt(cx, error).await;
        }
        marked
    }

    /// Submits one request for each number of a set, and waits for all.
    pub(super) fn exchange<'r>(
        &'r self,
        cx: TaskContext<'r>,
        numbers: u8,
        request: impl Fn(usize) -> (usize, Request<'r>),
    ) -> impl Future<Output = Outcome> {
        self.exchange_and(cx, numbers, request, |_, _| ())
    }

    /// [`Self::exchange`]; `heard` is told what each says at once, while others may take long.
    pub(super) async fn exchange_and<'r>(
        &'r self,
        cx: TaskContext<'r>,
        numbers: u8,
        request: impl Fn(usize) -> (usize, Request<'r>),
        heard: impl Fn(usize, Result<(), BlockError>),
    ) -> Outcome {
        let scratch = largest_scratch(&self.legs);
        // Each goes on beside the others, so it has a scratch of its own.
        let mut arenas: [Option<ScratchBox<'_, Scratch>>; MOST_PARTS] = Default::default();
        parts_of(numbers).for_each(|number| arenas[number] = Some(cx.scratch.carve(scratch)));
        let mut steps: [Option<Step<'_>>; MOST_PARTS] = Default::default();
        for number in parts_of(numbers) {
            let arena = arenas[number].as_ref().expect("an arena was carved for each");
            let (leg, request) = request(number);
            steps[number] = Some(self.legs[leg].submit(cx.deeper().with_scratch(arena), request));
        }
        let mut outcome = Outcome::default();
        let note = |number, result| {
            heard(number, result);
            outcome.note(number, result);
        };
        wait_for_all(&mut steps, note).await;
        outcome
    }

    /// Reads, writes or erases these parts of rows.
    pub(super) async fn move_parts(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        rows: Rows,
        image: &Image,
        parts: u8,
    ) -> Outcome {
        let shift = self.shape().block_size.shift();
        let (lba, count) = (Lba(self.leg_range(rows).start >> shift), BlockCount(rows.len >> shift));
        let request = |part: usize| {
            let segments = if operation.has_data() { image.list(part) } else { &[] };
            (self.layout.leg(rows.stripe, part), Request { operation, lba, count, segments })
        };
        self.exchange(cx, parts, request).await
    }

    /// Rows, block by block.
    fn blocks<'i>(&self, rows: Rows, image: &'i Image) -> impl Iterator<Item = (Rows, Image)> + use<'i> {
        let block = self.shape().block_size.bytes() as usize;
        (0..rows.len as usize).step_by(block).map(move |at| {
            let one = Rows { from: rows.from + at as u64, len: block as u64, ..rows };
            (one, image.block(at, block))
        })
    }

    /// Parts that are not there: their legs are out of use, or cannot read them.
    fn absent(&self, rows: Rows, bad: u8) -> u8 {
        self.all_parts() & !self.parts_on(rows.stripe, self.members.masks().readable) | bad
    }

    /// Reads rows so that these parts are there, by way of the others where it must be, and writes again what a leg in use could
    /// not read. That goes block by block: what the leg can read may be all there is where another one rots. The rows are locked.
    pub(super) async fn obtain(&self, cx: TaskContext<'_>, rows: Rows, image: &Image, wanted: u8) -> Result<(), BlockError> {
        if self.obtain_whole(cx, rows, image, wanted).await?.is_some() {
            return Ok(());
        }
        let mut bad = Run::default();
        for (block, part) in self.blocks(rows, image) {
            let obtained = self.obtain_block(cx, block, &part, wanted).await;
            self.mend(cx, rows, image, bad.add(block, obtained.map_or(0, |(bad, _)| bad))).await;
            obtained?;
        }
        self.mend(cx, rows, image, bad.0).await;
        Ok(())
    }

    /// Obtains rows of several blocks: without which parts. `None` when a leg in use cannot read, or there is one block only.
    async fn obtain_whole(
        &self,
        cx: TaskContext<'_>,
        rows: Rows,
        image: &Image,
        wanted: u8,
    ) -> Result<Option<u8>, BlockError> {
        if rows.len <= u64::from(self.shape().block_size.bytes()) {
            return Ok(None);
        }
        let none = Outcome::default();
        let (outcome, absent) = self.attempt(cx, rows, image, wanted, &none).await?;
        Ok((outcome.faulty == 0).then_some(absent))
    }

    /// Obtains a block of rows. Returns the parts that could not be read, though their legs are in use, and were computed; and all that it did
    /// without.
    async fn obtain_block(
        &self,
        cx: TaskContext<'_>,
        rows: Rows,
        image: &Image,
        wanted: u8,
    ) -> Result<(u8, u8), BlockError> {
        let mut so_far = Outcome::default();
        loop {
            let (outcome, absent) = self.attempt(cx, rows, image, wanted, &so_far).await?;
            if outcome.faulty == 0 {
                return Ok((so_far.faulty, absent));
            }
            so_far.faulty |= outcome.faulty;
            so_far.error = outcome.error.or(so_far.error);
        }
    }

    /// Reads what these parts need, without what could not be read so far. When all of it could be, they are there, and if some
    /// are computed, all parts are. With it, what was absent.
    async fn attempt(
        &self,
        cx: TaskContext<'_>,
        rows: Rows,
        image: &Image,
        wanted: u8,
        so_far: &Outcome,
    ) -> Result<(Outcome, u8), BlockError> {
        let absent = self.absent(rows, so_far.faulty);
        let missing = (wanted | so_far.faulty) & absent;
        if missing != 0 && absent.count_ones() as usize > self.layout.parity {
            return Err(so_far.error.unwrap_or(BlockError::ReadFault { errno: 0 }));
        }
        let get = if missing == 0 { wanted } else { self.all_parts() & !absent };
        let outcome = self.move_parts(cx, Operation::Read, rows, image, get).await;
        if let Some(refused) = outcome.refused {
            return Err(refused);
        }
        if outcome.faulty == 0 {
            assert!(missing == 0 || image.parts().solve(absent), "no more is missing than there is parity");
        }
        self.counters.read_errors.fetch_add(u64::from(outcome.faulty.count_ones()), Ordering::Relaxed);
        Ok((outcome, absent))
    }

    /// Reads all parts of rows, and checks them as far as there is anything to check them with. What a leg in use could not read is
    /// written again, unless what was computed does not fit. The rows are locked.
    pub(super) async fn examine(&self, cx: TaskContext<'_>, rows: Rows, image: &Image) -> Result<Checked, BlockError> {
        if let Some(absent) = self.obtain_whole(cx, rows, image, self.all_parts()).await? {
            return Ok(self.check_rows(cx, rows, image, absent).await);
        }
        let (mut all, mut bad) = (Checked::default(), Run::default());
        for (block, part) in self.blocks(rows, image) {
            let obtained = self.obtain_block(cx, block, &part, self.all_parts()).await;
            let mut unread = 0;
            if let Ok((faulty, absent)) = obtained {
                let checked = self.check_rows(cx, block, &part, absent).await;
                all.repaired += checked.repaired;
                all.unknown += checked.unknown;
                all.first = all.first.or(checked.first);
                if checked.first.is_none() {
                    unread = faulty;
                }
            }
            all.repaired += self.mend(cx, rows, image, bad.add(block, unread)).await;
            obtained?;
        }
        all.repaired += self.mend(cx, rows, image, bad.0).await;
        Ok(all)
    }

    /// Writes parts of some of the rows again that could not be read, and takes their legs out of use if that does not help. Neighbouring blocks
    /// together: a disk whose sectors are larger than the blocks heals one that went bad when all of it is written, and refuses a part. How many
    /// parts of blocks were written. The rows are locked.
    async fn mend(&self, cx: TaskContext<'_>, rows: Rows, image: &Image, bad: Option<(Rows, u8)>) -> u64 {
        let Some((run, parts)) = bad else { return 0 };
        let outcome =
            self.write_again(cx, run, &image.block((run.from - rows.from) as usize, run.len as usize), parts).await;
        let (mut mended, mut failed) = (self.blocks_of(run, outcome.done), 0);
        for part in parts_of(outcome.faulty) {
            match self.mend_units(cx, run, part).await {
                Some(blocks) => mended += blocks,
                None => failed |= 1 << part,
            }
        }
        if failed != 0 {
            let legs = self.legs_of_parts(rows.stripe, failed);
            // What cannot be recorded stays as it is: the leg is still there, and is computed when it cannot be read.
            let _ = self.members.drop_legs(cx.deeper(), legs, outcome.error).await;
        }
        mended
    }

    /// How many blocks these parts of rows are.
    fn blocks_of(&self, rows: Rows, parts: u8) -> u64 {
        u64::from(parts.count_ones()) * (rows.len >> self.shape().block_size.shift())
    }

    /// Writes parts of rows that were computed, and reads them.
    async fn write_again(&self, cx: TaskContext<'_>, rows: Rows, image: &Image, parts: u8) -> Outcome {
        // Durably: a leg that checks what it has would take what was there before for good after a power cut.
        let write = Operation::Write { fua: true };
        let mut outcome = self.move_parts(cx, write, rows, image, parts).await;
        if outcome.faulty == 0 && outcome.refused.is_none() {
            outcome = self.move_parts(cx, Operation::Read, rows, image, parts).await;
            // Whatever a leg said there: the caller goes on with what was computed.
            assert!(image.parts().solve(parts), "no more was computed than there is parity");
        }
        self.counters.repaired.fetch_add(self.blocks_of(rows, outcome.done), Ordering::Relaxed);
        outcome
    }

    /// Writes all of the units around rows of which a leg refuses its part alone, as a disk does whose sectors are larger: it can read nothing else of
    /// such a sector either. How many blocks; `None` when the leg may not stay. The rows are locked, by whole units.
    async fn mend_units(&self, cx: TaskContext<'_>, rows: Rows, part: usize) -> Option<u64> {
        let (first, end) = (rows.from / UNIT * UNIT, (rows.from + rows.len).next_multiple_of(UNIT));
        let all = Rows { from: first, len: end - first, ..rows };
        let bytes = self.leg_range(all);
        if all == rows || self.members.intent().is_none_or(|intent| !intent.is_settled(bytes.start, bytes.end)) {
            return None;
        }
        // Another time: until then it is computed.
        let Some(buffer) = cx.buffers.try_take() else { return Some(0) };
        let mut mended = 0;
        for from in (first..end).step_by(UNIT as usize) {
            let unit = Rows { from, len: UNIT, ..rows };
            let image = self.image(&buffer, unit);
            for (block, image) in self.blocks(unit, &image) {
                let is_asked = (rows.from..rows.from + rows.len).contains(&block.from);
                // What it can read may be right on it alone.
                if !is_asked && self.move_parts(cx, Operation::Read, block, &image, 1 << part).await.done != 0 {
                    return None;
                }
            }
            let absent = self.absent(unit, 1 << part);
            if absent.count_ones() as usize > self.layout.parity {
                return None;
            }
            let others = self.all_parts() & !absent;
            let is_read = self.move_parts(cx, Operation::Read, unit, &image, others).await.done == others;
            if !is_read || !image.parts().solve(absent) {
                // Another leg's fault: the unit stays as it is.
                continue;
            }
            // Where another part of a block is wrong, what is computed would fit that, and hide it: a scrub reports it, and until then it stays.
            let has_spare = (absent.count_ones() as usize) < self.layout.parity;
            if has_spare && image.parts().verdict(image.spare()) != Verdict::Right {
                continue;
            }
            let written = self.write_again(cx, unit, &image, 1 << part).await.done;
            if written == 0 {
                return None;
            }
            mended += self.blocks_of(unit, written);
        }
        Some(mended)
    }

    /// Compares parity and data of rows that are all in the image, and repairs what can be decided. `computed`: parts that were not read. Their
    /// legs may have come into use since, and then what is there says nothing about them.
    async fn check_rows(&self, cx: TaskContext<'_>, rows: Rows, image: &Image, computed: u8) -> Checked {
        let (mut checked, absent) = (Checked::default(), self.absent(rows, computed));
        let has_spare = (absent.count_ones() as usize) < self.layout.parity;
        if !has_spare || image.parts().verdict(image.spare()) == Verdict::Right {
            return checked;
        }
        for (block, image) in self.blocks(rows, image) {
            let parts = image.parts();
            match parts.verdict(image.spare()) {
                Verdict::Right => {}
                Verdict::Wrong(part) if absent == 0 && parts.solve(1 << part) => {
                    let given = self.give(cx, block, &image, part).await;
                    checked.repaired += given.repaired;
                    checked.unknown += given.unknown;
                }
                _ => {
                    self.members.note_undecided(self.leg_range(block).start);
                    checked.unknown += 1;
                    checked.first.get_or_insert(block.from);
                }
            }
        }
        checked
    }

    /// Writes a part of a block that did not fit, and takes its leg out of use if it refuses. What became of it. The rows are locked.
    async fn give(&self, cx: TaskContext<'_>, block: Rows, image: &Image, part: usize) -> Checked {
        let (mut given, leg) = (Checked::default(), self.layout.leg(block.stripe, part));
        if self.members.masks().writable >> leg & 1 == 0 {
            // It went out of use over the block before: it lacks this one, too.
            self.members.note_wrong(leg);
            return given;
        }
        // Durably: see above.
        let outcome = self.move_parts(cx, Operation::Write { fua: true }, block, image, 1 << part).await;
        let written = outcome.done != 0;
        tracing::warn!(
            name = self.name,
            leg,
            lba = self.leg_range(block).start >> self.shape().block_size.shift(),
            written,
            "a block of this leg did not fit the others, and was computed from them"
        );
        if written {
            self.counters.repaired.fetch_add(1, Ordering::Relaxed);
            given.repaired = 1;
        } else {
            self.members.note_wrong(leg);
            if outcome.faulty == 0 || self.members.drop_legs(cx.deeper(), 1 << leg, outcome.error).await.is_err() {
                given.unknown = 1;
            }
        }
        given
    }
}
