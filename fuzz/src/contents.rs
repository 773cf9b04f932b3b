//! What every block of every disk may hold.
//!
//! A block's content is a pattern that names the write and the block it was made for (its [`Tag`]), or zeroes. Each block has
//! candidates: tags that it may hold now. A write adds its candidate when it is submitted and, if it succeeds, removes all
//! candidates whose writes had ended before it began; what failed, was torn or was reset stays possible. A read must find one
//! of the candidates, and proves the older others wrong.

use std::collections::BTreeMap;

/// What a block's content is called: 0 for zeroes.
pub(crate) type Tag = u64;
/// Nobody knows: the source was taken away while it was written.
pub(crate) const ANYTHING: Tag = u64::MAX;
/// Write Uncorrectable: reading fails.
pub(crate) const UNREADABLE: Tag = u64::MAX - 1;

/// Names a command that changes blocks.
pub(crate) type WriteId = u64;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    tag: Tag,
    write: WriteId,
    /// When its write began.
    start: u64,
    /// When its write ended; `None`: it has not.
    end: Option<u64>,
    /// Its write succeeded.
    succeeded: bool,
    /// What a Compare and Write pair found in the block before it wrote this.
    found: Option<Tag>,
    /// When it became impossible; kept for reads that began before.
    dead: Option<u64>,
}

impl Candidate {
    fn zero(now: u64) -> Self {
        Self { tag: 0, write: 0, start: 0, end: Some(now), succeeded: true, found: None, dead: None }
    }

    fn since(&self, start: u64) -> bool {
        self.dead.is_none_or(|dead| dead >= start)
    }
}

#[derive(Debug)]
struct Write {
    start: u64,
    /// Disk, first block, number of blocks.
    target: (usize, u64, u64),
    /// Disk, first block, number, and where it goes: a copy follows what its sources become.
    sources: Vec<(usize, u64, u64, u64)>,
}

#[derive(Debug, Default)]
struct Disk {
    block: usize,
    blocks: Vec<Vec<Candidate>>,
}

/// The contents of all disks.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    disks: Vec<Disk>,
    writes: BTreeMap<WriteId, Write>,
    next_write: WriteId,
    next_tag: Tag,
}

impl Contents {
    /// A new disk of zeroes.
    pub(crate) fn add_disk(&mut self, block: usize, blocks: u64) -> usize {
        self.disks.push(Disk::default());
        self.reset_disk(self.disks.len() - 1, block, blocks, 0);
        self.disks.len() - 1
    }

    /// The disk is zeroes, whatever is under way.
    pub(crate) fn reset_disk(&mut self, disk: usize, block: usize, blocks: u64, now: u64) {
        self.disks[disk] = Disk { block, blocks: vec![vec![Candidate::zero(now)]; blocks as usize] };
    }

    pub(crate) fn blocks(&self, disk: usize) -> u64 {
        self.disks[disk].blocks.len() as u64
    }

    pub(crate) fn block_size(&self, disk: usize) -> usize {
        self.disks[disk].block
    }

    /// The operator changes a disk's size: what is cut off reads as zeroes if it comes back.
    pub(crate) fn resize(&mut self, disk: usize, blocks: u64, now: u64) {
        let list = &mut self.disks[disk].blocks;
        let before = list.len() as u64;
        if blocks < before {
            list.truncate(blocks as usize);
        } else {
            list.resize(blocks as usize, vec![Candidate::zero(now)]);
            let late: Vec<(WriteId, u64, u64)> = self
                .writes
                .iter()
                .filter(|(_, write)| write.target.0 == disk && write.target.1 + write.target.2 > before)
                .map(|(id, write)| (*id, write.target.1, write.target.2))
                .collect();
            let copies =
                |write: &Write| write.sources.iter().any(|&(from, lba, count, _)| from == disk && lba + count > before);
            let copied: Vec<WriteId> = self.writes.iter().filter(|(_, write)| copies(write)).map(|(id, _)| *id).collect();
            for id in copied {
                self.spoil(id);
            }
            // What these do now nobody can say.
            for (id, first, count) in late {
                (first.max(before)..(first + count).min(blocks)).for_each(|lba| self.add(disk, lba, ANYTHING, id, None));
            }
        }
    }

    /// A tag that nothing has yet.
    pub(crate) fn new_tag(&mut self) -> Tag {
        self.next_tag += 1;
        self.next_tag
    }

    /// A command that makes blocks `first..` hold `tags` is submitted.
    pub(crate) fn begin(&mut self, now: u64, disk: usize, first: u64, tags: &[Tag]) -> WriteId {
        let id = self.open(now, (disk, first, tags.len() as u64), Vec::new());
        for (lba, &tag) in (first..).zip(tags) {
            self.add(disk, lba, tag, id, None);
        }
        id
    }

    /// The write is the second half of a pair whose first half compares the blocks with these.
    pub(crate) fn follows_compare(&mut self, write: WriteId, expected: &[Tag]) {
        let (disk, first, _) = self.writes[&write].target;
        for (list, &tag) in self.disks[disk].blocks[first as usize..].iter_mut().zip(expected) {
            let ours = list.iter_mut().filter(|candidate| candidate.write == write);
            ours.for_each(|candidate| candidate.found = Some(tag));
        }
    }

    /// A command that copies ranges (disk, first block, count) to one range is submitted.
    pub(crate) fn begin_copy(&mut self, now: u64, disk: usize, first: u64, ranges: &[(usize, u64, u64)]) -> WriteId {
        let mut at = first;
        let mut sources = Vec::new();
        for &(from, lba, count) in ranges {
            sources.push((from, lba, count, at));
            at += count;
        }
        let id = self.open(now, (disk, first, at - first), sources.clone());
        for (from, lba, count, to) in sources {
            for i in 0..count {
                let tags: Vec<Tag> = self.live(from, lba + i).map(|candidate| candidate.tag).collect();
                // What cannot be read is not copied.
                for tag in tags.into_iter().filter(|&tag| tag != UNREADABLE) {
                    self.add(disk, to + i, tag, id, None);
                }
            }
        }
        id
    }

    fn open(&mut self, start: u64, target: (usize, u64, u64), sources: Vec<(usize, u64, u64, u64)>) -> WriteId {
        self.next_write += 1;
        self.writes.insert(self.next_write, Write { start, target, sources });
        self.next_write
    }

    fn live(&self, disk: usize, lba: u64) -> impl Iterator<Item = &Candidate> {
        self.disks[disk].blocks[lba as usize].iter().filter(|candidate| candidate.dead.is_none())
    }

    /// A block may hold a tag from now on, and so may blocks that copies under way make of it.
    fn add(&mut self, disk: usize, lba: u64, tag: Tag, write: WriteId, end: Option<u64>) {
        let Some(list) = self.disks[disk].blocks.get_mut(lba as usize) else { return };
        if list.iter().any(|candidate| candidate.write == write && candidate.tag == tag && candidate.dead.is_none()) {
            return;
        }
        let start = self.writes.get(&write).map_or(0, |write| write.start);
        list.push(Candidate { tag, write, start, end, succeeded: false, found: None, dead: None });
        if tag == UNREADABLE {
            return;
        }
        let mut further = Vec::new();
        for (&copy, under_way) in &self.writes {
            for &(from, first, count, to) in &under_way.sources {
                if from == disk && (first..first + count).contains(&lba) {
                    further.push((under_way.target.0, to + lba - first, copy));
                }
            }
        }
        for (disk, lba, copy) in further {
            self.add(disk, lba, tag, copy, None);
        }
    }

    /// What the write puts there may be anything: its source was taken away.
    pub(crate) fn spoil(&mut self, write: WriteId) {
        let Some(&Write { target: (disk, first, count), .. }) = self.writes.get(&write) else { return };
        (first..first + count).for_each(|lba| self.add(disk, lba, ANYTHING, write, None));
    }

    /// The command has ended; `oldest` is when the oldest command still under way began.
    pub(crate) fn end(&mut self, write: WriteId, now: u64, succeeded: bool, oldest: u64) {
        let Write { start, target: (disk, first, count), .. } = self.writes.remove(&write).expect("a write ends once");
        for lba in first..first + count {
            let Some(list) = self.disks[disk].blocks.get_mut(lba as usize) else { continue };
            for candidate in &mut *list {
                if candidate.write == write {
                    (candidate.end, candidate.succeeded) = (Some(now), succeeded);
                } else if succeeded && candidate.end.is_some_and(|end| end < start) {
                    candidate.dead.get_or_insert(now);
                }
            }
            if succeeded {
                order_pairs(list, write, start, now);
            }
            list.retain(|candidate| candidate.since(oldest));
        }
    }

    /// The tags that a block may hold now.
    pub(crate) fn possible(&self, disk: usize, lba: u64) -> Vec<Tag> {
        self.live(disk, lba).map(|candidate| candidate.tag).collect()
    }

    /// Whether the block may have held the tag at a moment since `start`.
    pub(crate) fn may_have_been(&self, disk: usize, lba: u64, tag: Tag, start: u64) -> bool {
        let Some(list) = self.disks[disk].blocks.get(lba as usize) else { return true };
        list.iter().any(|candidate| [tag, ANYTHING].contains(&candidate.tag) && candidate.since(start))
    }

    /// Whether the block held the tag all the time since `start`.
    pub(crate) fn surely_is(&self, disk: usize, lba: u64, tag: Tag, start: u64) -> bool {
        let Some(list) = self.disks[disk].blocks.get(lba as usize) else { return false };
        list.iter().filter(|candidate| candidate.since(start)).all(|candidate| candidate.tag == tag)
    }

    /// Whether reading the range may have failed at a moment since `start`, because blocks were marked.
    pub(crate) fn may_be_unreadable(&self, disk: usize, first: u64, count: u64, start: u64) -> bool {
        self.range(disk, first, count).any(|list| {
            list.iter().any(|candidate| [UNREADABLE, ANYTHING].contains(&candidate.tag) && candidate.since(start))
        })
    }

    /// Whether a block of the range surely cannot be read.
    pub(crate) fn is_unreadable(&self, disk: usize, first: u64, count: u64, start: u64) -> bool {
        self.range(disk, first, count)
            .any(|list| list.iter().filter(|candidate| candidate.since(start)).all(|candidate| candidate.tag == UNREADABLE))
    }

    fn range(&self, disk: usize, first: u64, count: u64) -> impl Iterator<Item = &Vec<Candidate>> {
        self.disks[disk].blocks.iter().skip(first as usize).take(count as usize)
    }

    /// A read or compare that began at `start` found these bytes.
    pub(crate) fn found(&mut self, disk: usize, first: u64, data: &[u8], start: u64, now: u64) -> Result<(), String> {
        let block = self.disks[disk].block;
        for (lba, bytes) in (first..).zip(data.chunks_exact(block)) {
            let found = tag_of(bytes);
            // The disk may have shrunk since.
            let Some(list) = self.disks[disk].blocks.get_mut(lba as usize) else { continue };
            let anything = list.iter().any(|candidate| candidate.tag == ANYTHING && candidate.since(start));
            let matches = |candidate: &Candidate| Some(candidate.tag) == found && candidate.since(start);
            if !anything && !list.iter().any(matches) {
                return Err(format!(
                    "disk {disk} block {lba} holds {}, but may only hold {list:?} (read since {start}, now {now})",
                    found.map_or_else(|| format!("garbage {:02x?}", &bytes[..32]), |tag| format!("tag {tag}")),
                ));
            }
            let Some(found) = found.filter(|_| !anything) else { continue };
            for candidate in &mut *list {
                if candidate.tag != found && candidate.end.is_some_and(|end| end < start) {
                    candidate.dead.get_or_insert(now);
                }
            }
        }
        Ok(())
    }

    /// Every write under way was cut off by a reset that has ended now.
    pub(crate) fn cut_off(&mut self, now: u64) {
        let writes: Vec<WriteId> = self.writes.keys().copied().collect();
        for write in writes {
            self.end(write, now, false, now);
        }
    }
}

/// A pair is one: what was written at the same time, and is not what the pair found, was written after it. `write` has just
/// succeeded; it is a pair itself, or another's neighbour in time.
fn order_pairs(list: &mut [Candidate], write: WriteId, start: u64, now: u64) {
    let known = |tag: Tag| ![ANYTHING, UNREADABLE].contains(&tag);
    let after = |other: &Candidate, pair: &Candidate| {
        other.write != pair.write && other.succeeded && known(other.tag) && Some(other.tag) != pair.found
    };
    for at in 0..list.len() {
        let pair = list[at];
        let ended = pair.end.is_some_and(|end| end >= start);
        if pair.found.is_none() || !pair.succeeded || !ended || pair.dead.is_some() {
            continue;
        }
        let overwritten = list.iter().any(|other| {
            let concerns = pair.write == write && other.end.is_some_and(|end| end >= start) || other.write == write;
            // A command with several candidates may have left what the pair found.
            let alone = list.iter().filter(|third| third.write == other.write).count() == 1;
            // Or another one has put that back before the pair came.
            let restored = list.iter().any(|third| {
                let meets = third.end.is_none_or(|end| end >= other.start);
                ![pair.write, other.write].contains(&third.write) && Some(third.tag) == pair.found && meets
            });
            concerns && alone && !restored && after(other, &pair)
        });
        if overwritten {
            list[at].dead = Some(now);
        }
    }
}

/// The content of a tag.
pub(crate) fn pattern(tag: Tag, block: usize, out: &mut Vec<u8>) {
    out.extend((0..block as u64 / 8).flat_map(|i| word(tag, i).to_le_bytes()));
}

fn word(tag: Tag, i: u64) -> u64 {
    match (tag, i) {
        (0, _) => 0,
        (_, 0) => tag,
        _ => (tag ^ i << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// The tag of a whole block; `None` when it is torn within, or never was a pattern.
pub(crate) fn tag_of(block: &[u8]) -> Option<Tag> {
    let mut words = block.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
    let tag = words.next()?;
    words.zip(1..).all(|(found, i)| found == word(tag, i)).then_some(tag)
}
