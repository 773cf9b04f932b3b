//! Which unit comes next, and whether it is read or written.

use super::Rw;

/// What to do with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

/// A small fast generator (splitmix64): good enough to spread I/O, and reproducible from its seed.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Evenly spread over `0..bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// The sequence of one queue.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    rw: Rw,
    read_percent: u64,
    rng: Rng,
    first: u64,
    count: u64,
    next: u64,
}

impl Workload {
    /// Over units `first..first + count`.
    pub(super) fn new(rw: Rw, read_percent: u8, seed: u64, first: u64, count: u64) -> Self {
        Self { rw, read_percent: u64::from(read_percent), rng: Rng::new(seed), first, count, next: 0 }
    }

    /// The first unit of its part.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// What comes next.
    #[inline]
    pub(super) fn next(&mut self) -> (Kind, u64) {
        match self.rw {
            Rw::Randread => (Kind::Read, self.random()),
            Rw::Randwrite => (Kind::Write, self.random()),
            Rw::Read => (Kind::Read, self.sequential()),
            Rw::Write => (Kind::Write, self.sequential()),
            Rw::Randrw => {
                let kind = if self.rng.below(100) < self.read_percent { Kind::Read } else { Kind::Write };
                (kind, self.random())
            }
        }
    }

    /// A unit of its part that is always the same for a number.
    #[inline]
    pub(super) fn fixed(&self, number: u16) -> u64 {
        self.first + u64::from(number) % self.count
    }

    fn random(&mut self) -> u64 {
        self.first + self.rng.below(self.count)
    }

    fn sequential(&mut self) -> u64 {
        let unit = self.first + self.next;
        self.next = if self.next + 1 == self.count { 0 } else { self.next + 1 };
        unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_wrap_within_their_part() {
        let mut load = Workload::new(Rw::Write, 50, 1, 10, 3);
        assert_eq!([0, 2, 3].map(|number| load.fixed(number)), [10, 12, 10]);
        let units: Vec<u64> = (0..5).map(|_| load.next().1).collect();
        assert_eq!(units, [10, 11, 12, 10, 11]);
    }

    #[test]
    fn random_units_cover_their_part_and_nothing_else() {
        let mut load = Workload::new(Rw::Randread, 50, 7, 10, 4);
        let mut seen = [0; 4];
        for _ in 0..400 {
            seen[(load.next().1 - 10) as usize] += 1;
        }
        assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
    }

    #[test]
    fn mixes_by_percentage() {
        for percent in [0, 30, 100] {
            let mut load = Workload::new(Rw::Randrw, percent, 7, 0, 100);
            let reads = (0..10_000).filter(|_| load.next().0 == Kind::Read).count();
            assert!(reads.abs_diff(usize::from(percent) * 100) < 300, "{reads} reads at {percent} %");
        }
    }
}
