//! Reading a file, whatever became of it.

use std::io::Read;

use super::{Block, FormatError, HEADER, MAGIC, MOST, VERSION, checksum, decode};

/// Bytes that are read ahead.
const WINDOW: usize = 2 * (MOST + HEADER);

/// What is not there of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Bytes that belong to no block whose checksum is right.
    pub bytes: u64,
    /// Where in the file the first of these bytes lies.
    pub first: Option<u64>,
    /// Blocks that are missing by their numbers, between those that are there.
    pub blocks: u64,
    /// There is no last block: the file was cut off.
    pub cut: bool,
}

impl Damage {
    /// Whether all that was written is there.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// A file that is read block by block.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    window: Vec<u8>,
    at: usize,
    ended: bool,
    next: Option<u64>,
    damage: Damage,
    /// Bytes of the file up to the end of the last good block, and that block's number.
    good: u64,
    passed: u64,
}

/// What lies at a place of the file.
enum Found {
    Good { len: usize, block: Option<Block>, number: u64 },
    Strange(u16),
    Bad,
    Short,
}

impl<R: Read> Reader<R> {
    /// Reads the beginning.
    ///
    /// # Errors
    /// When it is no trace, or of another version.
    pub fn open(source: R) -> Result<Self, FormatError> {
        let damage = Damage { cut: true, ..Damage::default() };
        let mut reader = Self { source, window: Vec::new(), at: 0, ended: false, next: None, damage, good: 0, passed: 0 };
        reader.fill()?;
        match reader.look() {
            Found::Strange(version) => Err(FormatError::Version(version)),
            // A trace with a damaged beginning is one that has another block somewhere.
            // Short is said by its length, which may be what is damaged.
            Found::Bad | Found::Short => {
                let found = reader.skip();
                found.then_some(reader).ok_or(FormatError::NoTrace)
            }
            Found::Good { .. } => Ok(reader),
        }
    }

    /// What was lost so far; all of it after the last block.
    pub fn damage(&self) -> Damage {
        self.damage
    }

    /// How many bytes of the file lie before the end of the last block that was read, and that block's number.
    pub fn good(&self) -> (u64, Option<u64>) {
        (self.good, self.next.map(|next| next - 1))
    }

    fn fill(&mut self) -> Result<(), FormatError> {
        if self.window.len() - self.at >= HEADER + MOST || self.ended {
            return Ok(());
        }
        self.window.drain(..self.at);
        self.at = 0;
        let room = (WINDOW - self.window.len()) as u64;
        let read = self.source.by_ref().take(room).read_to_end(&mut self.window)?;
        self.ended = (read as u64) < room;
        Ok(())
    }

    fn look(&self) -> Found {
        let rest = &self.window[self.at..];
        let Some((header, content)) = rest.split_at_checked(HEADER) else {
            return if rest.starts_with(&MAGIC[..rest.len().min(8)]) { Found::Short } else { Found::Bad };
        };
        if !header.starts_with(&MAGIC) {
            return Found::Bad;
        }
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let long = |at: usize| u32::from(short(at)) | u32::from(short(at + 2)) << 16;
        let len = long(12) as usize;
        if len > MOST {
            return Found::Bad;
        }
        let Some(content) = content.get(..len) else { return Found::Short };
        if checksum(header, content) != long(28) {
            return Found::Bad;
        }
        if short(8) != VERSION {
            return Found::Strange(short(8));
        }
        let number = u64::from(long(16)) | u64::from(long(20)) << 32;
        Found::Good { len: HEADER + len, block: decode(short(10), long(24), content), number }
    }

    /// As [`Self::search`]; what is passed is lost.
    fn skip(&mut self) -> bool {
        let mut passed = 0;
        let found = self.search(&mut passed);
        self.lose(passed);
        self.passed += passed;
        found
    }

    /// So many bytes from here on are damaged.
    fn lose(&mut self, bytes: u64) {
        if bytes > 0 {
            self.damage.first.get_or_insert(self.passed);
        }
        self.damage.bytes += bytes;
    }

    /// Goes on to the next place in the window where a good block lies; whether there is one. Counts what is passed.
    fn search(&mut self, passed: &mut u64) -> bool {
        while self.at < self.window.len() {
            match self.look() {
                Found::Good { .. } => return true,
                Found::Short if !self.ended => return true,
                Found::Bad | Found::Strange(_) | Found::Short => {}
            }
            let next = self.window[self.at + 1..].windows(MAGIC.len()).position(|bytes| bytes == MAGIC);
            let step = next.map_or(self.window.len() - self.at, |next| next + 1);
            // What may be the beginning of a magic stays, while more is to come.
            let kept = if next.is_none() && !self.ended { step.saturating_sub(MAGIC.len() - 1).max(1) } else { step };
            self.at += kept;
            *passed += kept as u64;
            if next.is_none() {
                return false;
            }
        }
        false
    }

    /// The next block that is whole; `None`: there is none.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn next_block(&mut self) -> Result<Option<Block>, FormatError> {
        loop {
            self.fill()?;
            if self.at == self.window.len() {
                return Ok(None);
            }
            let Found::Good { len, block, number } = self.look() else {
                self.skip();
                continue;
            };
            self.at += len;
            if block.is_none() {
                self.lose(len as u64);
            }
            self.passed += len as u64;
            self.good = self.passed;
            // A number that goes back is of a file that something was appended to.
            let missing = self.next.map_or(number, |next| number.saturating_sub(next));
            self.damage.blocks = self.damage.blocks.saturating_add(missing);
            self.next = Some(number.saturating_add(1));
            if let Some(block) = block {
                self.damage.cut = !matches!(block, Block::End(_));
                return Ok(Some(block));
            }
        }
    }
}
