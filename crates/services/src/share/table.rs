//! The table of a disk: which extents belong to which volume. docs/formats/share.md.
//!
//! ```text
//!   disk:   extent 0: the table │ 1 │ 2 │ 3 │ 4 │ 5 │ …          an extent belongs to one volume, or is free
//!   volume: size, pieces: (first extent, number of extents) …     in the order of the volume's blocks
//! ```
//!
//! Nothing here does I/O. What was read from a disk is checked in full before any of it is used.

use std::collections::BTreeMap;

/// Bytes of a table's head.
const HEAD: usize = 16;
/// Longest name of a volume in bytes.
pub(super) const LONGEST_NAME: usize = 255;

/// Extents that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Piece {
    pub(super) first: u32,
    /// At least 1.
    pub(super) count: u32,
}

/// A volume in the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// Bytes.
    pub(super) size: u64,
    /// Its extents, just as many as the size needs.
    pub(super) pieces: Vec<Piece>,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    /// Bytes of an extent: a power of two.
    pub(super) extent: u64,
    /// Extents of the disk, the first one counted, which holds the table.
    pub(super) extents: u32,
    pub(super) volumes: BTreeMap<String, Entry>,
}

impl Entry {
    /// Its number of extents.
    pub(super) fn extents(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.count)).sum()
    }

    /// Its extents one by one.
    pub(super) fn list(&self) -> Box<[u32]> {
        self.pieces.iter().flat_map(|piece| piece.first..piece.first + piece.count).collect()
    }

    /// Appends extents; neighbours become one piece.
    pub(super) fn extend(&mut self, more: &[Piece]) {
        for piece in more {
            match self.pieces.last_mut() {
                Some(last) if last.first + last.count == piece.first => last.count += piece.count,
                _ => self.pieces.push(*piece),
            }
        }
    }

    /// Keeps the first so many extents, and returns the others.
    pub(super) fn truncate(&mut self, extents: u64) -> Vec<Piece> {
        let (mut left, mut gone) = (extents, Vec::new());
        self.pieces.retain_mut(|piece| {
            let keep = left.min(u64::from(piece.count)) as u32;
            left -= u64::from(keep);
            if keep < piece.count {
                gone.push(Piece { first: piece.first + keep, count: piece.count - keep });
                piece.count = keep;
            }
            keep > 0
        });
        gone
    }
}

/// Reads numbers from what may be too short.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.0.split_at_checked(len).ok_or("its table ends too early")?;
        self.0 = rest;
        Ok(head)
    }

    fn number<const N: usize>(&mut self) -> Result<u64, String> {
        let mut wide = [0; 8];
        for (to, from) in wide.iter_mut().zip(self.bytes(N)?) {
            *to = *from;
        }
        Ok(u64::from_le_bytes(wide))
    }

    fn word(&mut self) -> Result<u32, String> {
        self.number::<4>().map(|number| number as u32)
    }
}

impl Table {
    /// A table without volumes.
    pub(super) fn new(extent: u64, extents: u32) -> Self {
        Self { extent, extents, volumes: BTreeMap::new() }
    }

    /// Understands and checks a table.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn decode(content: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(content);
        let (shift, extents, volumes, zero) = (reader.word()?, reader.word()?, reader.word()?, reader.word()?);
        if zero != 0 {
            return Err("its table's head is not as it should be".to_owned());
        }
        let extent = 1_u64.checked_shl(shift).filter(|_| (14..=30).contains(&shift));
        let extent = extent.ok_or_else(|| format!("its table has extents of 2^{shift} bytes, which cannot be"))?;
        let mut table = Self::new(extent, extents);
        for _ in 0..volumes {
            let len = reader.number::<2>()? as usize;
            let name = std::str::from_utf8(reader.bytes(len)?).map_err(|_| "its table has a name that is no text")?;
            let entry = Entry { size: reader.number::<8>()?, pieces: Vec::new() };
            let pieces = reader.word()?;
            let pieces = (0..pieces).map(|_| Ok(Piece { first: reader.word()?, count: reader.word()? }));
            let entry = Entry { pieces: pieces.collect::<Result<_, String>>()?, ..entry };
            if table.volumes.insert(name.to_owned(), entry).is_some() {
                return Err(format!("its table has volume {name} twice"));
            }
        }
        if !reader.0.is_empty() {
            return Err("its table is longer than what it lists".to_owned());
        }
        table.check()?;
        Ok(table)
    }

    fn check(&self) -> Result<(), String> {
        for (name, entry) in &self.volumes {
            let outside = |piece: &&Piece| {
                let end = piece.first.checked_add(piece.count);
                piece.first == 0 || piece.count == 0 || end.is_none_or(|end| end > self.extents)
            };
            if let Some(Piece { first, count }) = entry.pieces.iter().find(outside) {
                let last = self.extents.saturating_sub(1);
                return Err(format!(
                    "its table gives volume {name} {count} extents from {first} on, and the disk's are 1 to {last}"
                ));
            }
            if entry.size == 0 || entry.extents() != entry.size.div_ceil(self.extent) {
                let (size, extents) = (entry.size, entry.extents());
                return Err(format!("its table gives volume {name} of {size} bytes {extents} extents, which does not fit"));
            }
        }
        let taken = self.taken();
        match taken.windows(2).find(|two| two[0].0.first + two[0].0.count > two[1].0.first) {
            Some([(_, one), (piece, other)]) => {
                Err(format!("its table gives extent {} to volume {one} and to volume {other}", piece.first))
            }
            _ => Ok(()),
        }
    }

    /// All pieces in their order on the disk, with whose they are.
    fn taken(&self) -> Vec<(Piece, &str)> {
        let pieces = self.volumes.iter().flat_map(|(name, entry)| entry.pieces.iter().map(|piece| (*piece, name.as_str())));
        let mut taken: Vec<_> = pieces.collect();
        taken.sort_unstable();
        taken
    }

    /// The table as it is stored.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.volumes.len() * 64);
        let volumes = self.volumes.len() as u32;
        for word in [self.extent.trailing_zeros(), self.extents, volumes, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for (name, entry) in &self.volumes {
            bytes.extend_from_slice(&(name.len() as u16).to_le_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&entry.size.to_le_bytes());
            bytes.extend_from_slice(&(entry.pieces.len() as u32).to_le_bytes());
            for piece in &entry.pieces {
                bytes.extend_from_slice(&piece.first.to_le_bytes());
                bytes.extend_from_slice(&piece.count.to_le_bytes());
            }
        }
        bytes
    }

    /// What belongs to nobody, in its order on the disk.
    pub(super) fn free(&self) -> Vec<Piece> {
        let (mut free, mut next) = (Vec::new(), 1);
        for (piece, _) in self.taken() {
            if piece.first > next {
                free.push(Piece { first: next, count: piece.first - next });
            }
            next = piece.first + piece.count;
        }
        if self.extents > next {
            free.push(Piece { first: next, count: self.extents - next });
        }
        free
    }

    /// Extents that belong to nobody.
    pub(super) fn free_extents(&self) -> u64 {
        self.free().iter().map(|piece| u64::from(piece.count)).sum()
    }

    /// The first extent after which all are free.
    pub(super) fn end(&self) -> u32 {
        self.taken().last().map_or(1, |(piece, _)| piece.first + piece.count)
    }

    /// Chooses free extents for a volume: right behind its last one, else from the smallest hole that has room for all, else from
    /// the largest ones. `None` when there are not enough.
    pub(super) fn choose(&self, entry: &Entry, extents: u64) -> Option<Vec<Piece>> {
        let mut free = self.free();
        if self.free_extents() < extents {
            return None;
        }
        // Not more than there are, and those are counted in 32 bits.
        let (mut left, mut chosen) = (extents as u32, Vec::new());
        let mut take = |piece: &mut Piece, left: &mut u32| {
            let count = piece.count.min(*left);
            chosen.push(Piece { first: piece.first, count });
            *left -= count;
            *piece = Piece { first: piece.first + count, count: piece.count - count };
        };
        let behind = entry.pieces.last().map(|last| last.first + last.count);
        if let Some(next) = free.iter_mut().find(|piece| Some(piece.first) == behind && left > 0) {
            take(next, &mut left);
        }
        while left > 0 {
            free.retain(|piece| piece.count > 0);
            let fits = free.iter_mut().filter(|piece| piece.count >= left).min_by_key(|piece| piece.count);
            let at = fits.map(|piece| piece.first);
            let at = at.or_else(|| free.iter().max_by_key(|piece| piece.count).map(|piece| piece.first))?;
            take(free.iter_mut().find(|piece| piece.first == at)?, &mut left);
        }
        Some(chosen)
    }
}
