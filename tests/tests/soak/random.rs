//! Numbers that one seed gives, and how much of them a run takes.

/// Times as many commands as usual.
const RUNS: &str = "MILLRACE_TEST_RUNS";
/// Where they begin.
pub(crate) const SEED: &str = "MILLRACE_TEST_SEED";

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let number = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    };
    Some(number.unwrap_or_else(|_| panic!("{name} is {value:?}: set it to a number (0x… is hexadecimal), or not at all")))
}

/// The seed: this one, or what the environment says.
pub(crate) fn seed(usual: u64) -> u64 {
    variable(SEED).unwrap_or(usual)
}

/// How many commands: so many, or as many times as the environment says.
pub(crate) fn commands(usual: u64) -> u64 {
    usual * variable(RUNS).unwrap_or(1).max(1)
}

/// A small generator (splitmix64).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Whether it is the one of `among`.
    pub(crate) fn one_in(&mut self, among: usize) -> bool {
        self.below(among) == 0
    }
}
