//! The keys in force, and what they make of blocks.

use std::sync::Arc;

use millrace_block::BlockError;
use millrace_cipher::{Run, Xts};
use millrace_memory::{Lent, Reach, Segment, SegmentCursor, Target};

/// Bytes that are fetched before anything waits for one of them: the cipher fetches what comes after.
const AHEAD: usize = 1024;

/// A key that takes over from the first block on.
#[derive(Clone, Debug)]
pub(super) struct Next {
    pub(super) cipher: Arc<Xts>,
    /// Blocks below this one have the new key.
    pub(super) done: u64,
    /// Blocks from `done` to this one are being re-enciphered: requests wait.
    pub(super) end: u64,
    /// Where that failed.
    pub(super) failed: Failed,
    /// The journal's slot for the next chunk: the one that the last chunk does not use.
    pub(super) slot: u64,
}

impl Next {
    /// Blocks before `done` have the new key, and nothing else is under way.
    pub(super) fn at(cipher: Arc<Xts>, done: u64, slot: u64) -> Self {
        Self { cipher, done, end: done, failed: Failed::No, slot }
    }
}

/// What failed of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    No,
    /// Its journal may or may not be durable, and could not be taken back: its blocks have the old key, and who writes them fails.
    Journal,
    /// Its slot of the journal could not be read, or not be made durable, when the volume was opened: what it says is not known, and requests
    /// to its blocks fail.
    Slot,
    /// It is re-enciphered once more, for the leg may have lost that: requests to them wait.
    Again,
    /// It is not known which of its blocks have which key: who reads them fails. What is written has the new key, as all has that is not as the
    /// journal says: so a guest can put a bad block right.
    Home,
}

/// The keys in force. They do not change; others come in their place.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    pub(super) current: Arc<Xts>,
    pub(super) next: Option<Next>,
    /// Bytes of a block: a power of two.
    pub(super) unit: usize,
}

impl Keys {
    /// Whether a request must wait for blocks that are being re-enciphered; an error when it would wait for long.
    pub(super) fn is_blocked(&self, lba: u64, count: u64, reads: bool) -> Result<bool, BlockError> {
        match &self.next {
            Some(next) if next.done < next.end && lba < next.end && next.done < lba + count => match next.failed {
                Failed::No | Failed::Again => Ok(true),
                Failed::Journal if reads => Ok(false),
                Failed::Home if !reads => Ok(false),
                Failed::Journal | Failed::Slot | Failed::Home => Err(BlockError::NotReady),
            },
            _ => Ok(false),
        }
    }

    /// Blocks in so many bytes, without a division.
    fn blocks(&self, bytes: usize) -> usize {
        bytes >> self.unit.trailing_zeros()
    }

    /// Whether each segment is whole blocks.
    pub(super) fn are_whole(&self, segments: &[Segment]) -> bool {
        segments.iter().all(|segment| segment.len() & (self.unit - 1) == 0)
    }

    /// The key of a block, and the first block after it that may have another.
    fn of(&self, lba: u64) -> (&Xts, u64) {
        let Some(next) = &self.next else { return (&self.current, u64::MAX) };
        let end = if next.failed == Failed::Home { next.end.max(next.done) } else { next.done };
        if lba < end { (&next.cipher, end) } else { (&self.current, u64::MAX) }
    }

    /// Calls `work` for each run of blocks with one key: the key, the first block, and the parts of both.
    fn each<'a>(&self, mut lba: u64, from: Lent<'a>, to: Lent<'a>, work: impl Fn(&Xts, u64, Lent<'a>, Lent<'a>)) {
        let mut at = 0;
        while at < from.len() {
            let (cipher, end) = self.of(lba);
            let blocks = self.blocks(from.len() - at).min(usize::try_from(end - lba).unwrap_or(usize::MAX));
            let len = blocks * self.unit;
            let part = |whole: Lent<'a>| whole.part(at, len).expect("a part within the whole");
            work(cipher, lba, part(from), part(to));
            at += len;
            lba += blocks as u64;
        }
    }

    /// Calls `work` for each segment of whole blocks, which lie one after the other in `place`: its first block, it, its part of the place, and
    /// the block that is worked on after it, which is `next` behind the last.
    #[inline]
    fn each_segment<'a>(
        &self,
        mut lba: u64,
        segments: &[Segment],
        place: Lent<'a>,
        next: Option<u64>,
        mut work: impl FnMut(u64, Segment, Lent<'a>, Option<u64>),
    ) {
        let mut at = 0;
        for segment in segments {
            let part = place.part(at, segment.len()).expect("the place holds the request");
            at += segment.len();
            let behind = lba + self.blocks(segment.len()) as u64;
            work(lba, *segment, part, if at < place.len() { Some(behind) } else { next });
            lba = behind;
        }
    }

    /// Enciphers blocks from the guest's memory into `to`, a buffer that is used at once and has room for them.
    pub(super) fn encrypt_near(&self, lba: u64, from: &[Segment], to: Segment) {
        let target = Target::Near;
        let encrypt = |cipher: &Xts, lba, from, segment| cipher.encrypt(lba, self.unit, from, Reach { segment, target });
        if !self.are_whole(from) {
            SegmentCursor::new(from).copy_to(to);
            return self.each(lba, to.into(), to.into(), encrypt);
        }
        self.each_segment(lba, from, to.into(), None, |lba, from, to, _| self.each(lba, from.into(), to, encrypt));
    }

    /// Enciphers segments of whole blocks into `to` while no other key takes over; `next` is the block that the run goes on with.
    pub(super) fn encrypt_in(
        &self,
        run: &mut Run<'_>,
        lba: u64,
        from: &[Segment],
        Reach { segment: to, target }: Reach<'_>,
        next: Option<u64>,
    ) {
        self.each_segment(lba, from, to, next, |lba, from, segment, next| {
            run.encrypt(lba, self.unit, from.into(), Reach { segment, target }, next);
        });
    }

    /// Deciphers blocks to where they are, or to another place. A block of zeroes stays one: nothing was ever written there, or it was
    /// given back.
    pub(super) fn decrypt(&self, lba: u64, from: Segment, to: Segment) {
        let decrypt = |cipher: &Xts, lba, from, to| cipher.decrypt(lba, self.unit, from, to);
        self.each_written(from.into(), to.into(), |at, from, to| self.each(lba + at, from, to, decrypt));
    }

    /// As [`Self::decrypt`], to segments of whole blocks while no other key takes over; `next` is the block that the run goes on with.
    pub(super) fn decrypt_in(&self, run: &mut Run<'_>, lba: u64, from: Lent<'_>, to: &[Segment], next: Option<u64>) {
        self.each_segment(lba, to, from, next, |lba, to, from, next| {
            self.each_written(from, to.into(), |at, from, to| run.decrypt(lba + at, self.unit, from, to, next));
        });
    }

    /// Calls `work` for each run of blocks in `from` that are not zeroes: which block is the first, and the parts of both.
    /// Zeroes are written for the others.
    #[inline]
    fn each_written<'a>(&self, from: Lent<'a>, to: Lent<'a>, mut work: impl FnMut(u64, Lent<'a>, Lent<'a>)) {
        let blocks = self.blocks(from.len());
        let part = |of: Lent<'a>, at: usize, end: usize| {
            of.part(at * self.unit, (end - at) * self.unit).expect("blocks of the segment")
        };
        // The looks at each block's beginning would wait for memory one after the other, and the cipher for them.
        from.prefetch(0, from.len().min(AHEAD));
        let is_zero = |at: usize| is_zero(part(from, at, at + 1));
        let mut at = 0;
        while at < blocks {
            if is_zero(at) {
                part(to, at, at + 1).fill(0);
                at += 1;
                continue;
            }
            let end = (at + 1..blocks).find(|at| is_zero(*at)).unwrap_or(blocks);
            work(at as u64, part(from, at, end), part(to, at, end));
            at = end;
        }
    }
}

/// Whether a block is zeroes. Enciphered blocks never are, and almost always the first bytes tell.
fn is_zero(block: Lent<'_>) -> bool {
    const STEP: usize = 256;
    if block.read_value::<u128>(0) != 0 {
        return false;
    }
    let mut bytes = [0; STEP];
    (0..block.len()).step_by(STEP).all(|at| {
        let len = STEP.min(block.len() - at);
        block.read_at(at, &mut bytes[..len]);
        bytes[..len].iter().all(|byte| *byte == 0)
    })
}
