//! What each block of a volume may hold: a write's number, or one of a few. A block says itself which it holds, and whose.

/// The number of zeroes, which is what nobody has written yet.
pub(crate) const ZEROES: u64 = 0;

const MAGIC: u64 = u64::from_le_bytes(*b"millsoak");
const WORD: usize = 8;

/// A word of a block's pattern: what it is, whose, which and when, and then what follows from these.
fn word(at: usize, mark: u64, block: u64, write: u64) -> u64 {
    match at {
        0 => MAGIC,
        1 => mark,
        2 => block,
        3 => write,
        _ => (mark ^ block.rotate_left(20) ^ write.rotate_left(40) ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// Which write a block holds; or what is wrong with it.
fn held(bytes: &[u8], mark: u64, block: u64) -> Result<u64, String> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(ZEROES);
    }
    let read: Vec<u64> = bytes
        .chunks_exact(WORD)
        .map(|word| word.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
        .collect();
    if read[0] != MAGIC {
        return Err(format!("it holds what no program wrote: {:02x?}…", &bytes[..32]));
    }
    let write = read[3];
    if (read[1], read[2]) != (mark, block) {
        return Err(format!("it holds block {} of the volume with mark {}, write {write}", read[2], read[1]));
    }
    match (0..read.len()).find(|at| read[*at] != word(*at, mark, block, write)) {
        None => Ok(write),
        Some(at) => Err(format!("it holds write {write}, but something else from byte {} on", at * WORD)),
    }
}

/// What a volume may hold.
#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    name: String,
    /// What tells its patterns from other volumes'.
    mark: u64,
    block_size: usize,
    /// For each block the numbers of the writes that it may hold.
    may: Vec<Vec<u64>>,
    /// The last write's number.
    last: u64,
}

impl Oracle {
    /// A volume of zeroes.
    pub(crate) fn new(name: &str, mark: u64, block_size: usize, blocks: usize) -> Self {
        Self { name: name.to_owned(), mark, block_size, may: vec![vec![ZEROES]; blocks], last: ZEROES }
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    pub(crate) fn blocks(&self) -> usize {
        self.may.len()
    }

    /// The volume has another size. What is new reads as zeroes.
    pub(crate) fn resize(&mut self, blocks: usize) {
        self.may.resize(blocks, vec![ZEROES]);
    }

    /// The volume was made anew.
    pub(crate) fn clear(&mut self) {
        self.may.fill(vec![ZEROES]);
    }

    fn may_hold(&mut self, first: usize, count: usize, write: u64) {
        for may in &mut self.may[first..first + count] {
            if !may.contains(&write) {
                may.push(write);
            }
        }
    }

    /// A write from this block on begins: its number, and its bytes.
    pub(crate) fn begin_write(&mut self, first: usize, bytes: &mut [u8]) -> u64 {
        self.last += 1;
        for (at, block) in bytes.chunks_exact_mut(self.block_size).enumerate() {
            for (place, bytes) in block.chunks_exact_mut(WORD).enumerate() {
                bytes.copy_from_slice(&word(place, self.mark, (first + at) as u64, self.last).to_le_bytes());
            }
        }
        self.may_hold(first, bytes.len() / self.block_size, self.last);
        self.last
    }

    /// Zeroes are being written, or blocks given back, which may read as zeroes from then on.
    pub(crate) fn begin_zeroes(&mut self, first: usize, count: usize) {
        self.may_hold(first, count, ZEROES);
    }

    /// A write has ended well.
    pub(crate) fn ended(&mut self, first: usize, count: usize, write: u64) {
        for may in &mut self.may[first..first + count] {
            may.clear();
            may.push(write);
        }
    }

    /// Whether blocks are what they may be; nobody writes them now. What a block has been once it stays.
    pub(crate) fn check(&mut self, first: usize, bytes: &[u8]) -> Result<(), String> {
        for (at, block) in bytes.chunks_exact(self.block_size).enumerate() {
            let number = first + at;
            let may = &mut self.may[number];
            let wrong =
                |why: String| format!("volume {}, block {number}: {why}; writes that it may hold: {may:?}", self.name);
            let held = held(block, self.mark, number as u64).map_err(wrong)?;
            if !may.contains(&held) {
                return Err(wrong(format!("it holds write {held}")));
            }
            may.retain(|write| *write == held);
        }
        Ok(())
    }
}

const BLOCK: usize = 512;

/// Four blocks of a volume, the second and third of them written.
fn written() -> (Oracle, Vec<u8>) {
    let (mut oracle, mut bytes) = (Oracle::new("v", 7, BLOCK, 4), vec![0; 4 * BLOCK]);
    let write = oracle.begin_write(1, &mut bytes[BLOCK..3 * BLOCK]);
    oracle.ended(1, 2, write);
    (oracle, bytes)
}

#[test]
fn a_wrong_block_is_noticed() {
    let (oracle, right) = written();
    assert_eq!(oracle.clone().check(0, &right), Ok(()));
    let expect = |why: &str, spoil: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = right.clone();
        spoil(&mut bytes);
        let told = oracle.clone().check(0, &bytes).expect_err(why);
        assert!(told.starts_with("volume v, block ") && told.contains(why), "{told}");
    };
    expect("but something else from byte 504 on", &|bytes| bytes[2 * BLOCK - 1] ^= 1);
    expect("what no program wrote", &|bytes| bytes[0] = 1);
    expect("it holds write 0", &|bytes| bytes[BLOCK..2 * BLOCK].fill(0));
    expect("it holds block 1 of the volume with mark 7", &|bytes| bytes.copy_within(BLOCK..2 * BLOCK, 2 * BLOCK));
    expect("it holds write 9", &|bytes| {
        let mut later = Oracle { last: 8, ..oracle.clone() };
        later.begin_write(1, &mut bytes[BLOCK..2 * BLOCK]);
    });
    expect("of the volume with mark 8", &|bytes| {
        let mut other = Oracle { mark: 8, ..oracle.clone() };
        other.begin_write(1, &mut bytes[BLOCK..2 * BLOCK]);
    });
}

#[test]
fn a_write_that_was_cut_off_is_there_or_not_and_stays_so() {
    let (oracle, old) = written();
    let (mut cut_off, mut new) = (oracle.clone(), old.clone());
    cut_off.begin_write(1, &mut new[BLOCK..2 * BLOCK]);
    for (first, then) in [(&old, &new), (&new, &old)] {
        let mut oracle = cut_off.clone();
        assert_eq!(oracle.check(0, first), Ok(()));
        assert_eq!(oracle.check(0, first), Ok(()));
        assert!(oracle.check(0, then).is_err(), "a block changed by itself");
    }
    // One that has ended is there.
    let mut done = oracle.clone();
    let write = done.begin_write(1, &mut new[BLOCK..2 * BLOCK]);
    done.ended(1, 1, write);
    assert!(done.check(0, &new).is_ok() && done.check(0, &old).is_err());
    // Of one that was made smaller and larger again the end is zeroes.
    let mut short = oracle;
    short.resize(2);
    short.resize(4);
    assert!(short.check(0, &old).is_err());
    let mut bytes = old.clone();
    bytes[2 * BLOCK..].fill(0);
    assert_eq!(short.check(0, &bytes), Ok(()));
}
