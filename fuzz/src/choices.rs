//! From bytes to decisions.
//!
//! An operation is a record of [`OP_BYTES`] bytes, whether they come from a seed or from a coverage-guided fuzzer: the first
//! chooses its kind, the next ones its first decisions, and decisions beyond the record come from a generator that the record
//! seeds. So an operation does the same whatever stands before it, and a failing sequence can be cut down.

use millrace_block::conformance::Random;

/// Bytes of an operation.
pub const OP_BYTES: usize = 16;

/// One operation, undecoded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Op(pub [u8; OP_BYTES]);

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Decisions drawn from one operation.
pub(crate) struct Choices {
    bytes: [u8; OP_BYTES],
    at: usize,
    random: Random,
}

impl Choices {
    pub(crate) fn new(op: Op) -> Self {
        let (low, high) = op.0.split_at(8);
        let word = |half: &[u8]| half.iter().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
        Self { bytes: op.0, at: 0, random: Random::new(word(low) ^ word(high).rotate_left(32)) }
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or_else(|| self.random.number() as u8)
    }

    /// Any number.
    pub(crate) fn number(&mut self) -> u64 {
        let head = u64::from(self.byte());
        self.random.number().rotate_left(8) ^ head
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "a choice among nothing");
        if limit <= 256 { u64::from(self.byte()) % limit } else { self.number() % limit }
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        &among[self.below(among.len() as u64) as usize]
    }

    /// A 64-bit number of the kind that finds wrong arithmetic.
    pub(crate) fn nasty64(&mut self) -> u64 {
        let near = self.below(5).wrapping_sub(2);
        let base = match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            3 => u64::MAX - 4095,
            4 => 1 << 32,
            5 => 1 << self.below(64),
            6 => u64::from(u32::MAX) << self.below(32),
            _ => self.number(),
        };
        base.wrapping_add(near)
    }

    /// A 32-bit number of that kind.
    pub(crate) fn nasty32(&mut self) -> u32 {
        let near = (self.below(5) as u32).wrapping_sub(2);
        let base = match self.below(6) {
            0 => 0,
            1 => u32::MAX,
            2 => 1 << 31,
            3 => 0xffff,
            4 => 1 << self.below(32),
            _ => self.number() as u32,
        };
        base.wrapping_add(near)
    }
}
