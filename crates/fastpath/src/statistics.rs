//! How long requests took, counted as they finish.

use crate::requests::Operation;

/// Buckets of a power of two.
const STEPS: usize = 8;
/// Below this, a bucket is one nanosecond wide.
const LINEAR: u64 = STEPS as u64;
/// Buckets for all of `u64`.
const BUCKETS: usize = (64 - 2) * STEPS;

/// Latencies of one kind of request, in nanoseconds, to one part in eight.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// Requests that finished well.
    pub requests: u64,
    /// Requests that failed; their times are not counted.
    pub errors: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The shortest.
    pub min: u64,
    /// The longest.
    pub max: u64,
    /// All together.
    pub total: u64,
    counts: Vec<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { requests: 0, errors: 0, bytes: 0, min: u64::MAX, max: 0, total: 0, counts: vec![0; BUCKETS] }
    }
}

impl Latencies {
    pub(crate) fn note(&mut self, bytes: u64, nanos: u64) {
        self.requests += 1;
        self.bytes += bytes;
        self.min = self.min.min(nanos);
        self.max = self.max.max(nanos);
        self.total = self.total.saturating_add(nanos);
        if let Some(count) = self.counts.get_mut(bucket(nanos)) {
            *count += 1;
        }
    }

    /// A time that `permille` thousandths of the requests did not exceed; 0 when there were none.
    pub fn permille(&self, permille: u64) -> u64 {
        let wanted = (u128::from(self.requests) * u128::from(permille.min(1000))).div_ceil(1000).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= wanted {
                return upper(index).min(self.max);
            }
        }
        0
    }

    /// The mean; 0 when there were none.
    pub fn mean(&self) -> u64 {
        self.total.checked_div(self.requests).unwrap_or(0)
    }

    fn clear(&mut self) {
        let mut counts = std::mem::take(&mut self.counts);
        counts.fill(0);
        *self = Self { counts, ..Self::default() };
    }
}

fn bucket(nanos: u64) -> usize {
    if nanos < LINEAR {
        return nanos as usize;
    }
    // The highest bit says which power of two, the three below it which step.
    let power = nanos.ilog2();
    let step = (nanos >> (power - 3)) & (LINEAR - 1);
    (power as usize - 2) * STEPS + step as usize
}

/// The largest value of a bucket.
fn upper(index: usize) -> u64 {
    if index < STEPS {
        return index as u64;
    }
    let (power, step) = (index / STEPS + 2, (index % STEPS) as u64);
    let width = 1u64 << (power - 3);
    ((LINEAR + step) * width).saturating_add(width - 1)
}

/// Latencies of a space since it was opened, or since they were cleared.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Reads.
    pub reads: Latencies,
    /// Writes.
    pub writes: Latencies,
    /// Everything else.
    pub others: Latencies,
}

impl Statistics {
    pub(crate) fn of(&mut self, operation: Operation) -> &mut Latencies {
        match operation {
            Operation::Read => &mut self.reads,
            Operation::Write => &mut self.writes,
            Operation::Flush | Operation::Deallocate | Operation::WriteZeroes => &mut self.others,
        }
    }

    pub(crate) fn clear(&mut self) {
        for latencies in [&mut self.reads, &mut self.writes, &mut self.others] {
            latencies.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_they_say() {
        let mut last = None;
        for nanos in (0..5000).chain([1 << 20, (1 << 40) + 12345, u64::MAX - 1, u64::MAX]) {
            let index = bucket(nanos);
            assert!(index < BUCKETS && nanos <= upper(index), "{nanos} in {index}, up to {}", upper(index));
            assert!(index == 0 || nanos > upper(index - 1), "{nanos} in {index}");
            assert!(last <= Some(index), "in order");
            last = Some(index);
        }
    }

    #[test]
    fn percentiles_are_right_to_one_part_in_eight() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.permille(500), latencies.mean()), (0, 0));
        (1..=1000).for_each(|nanos| latencies.note(512, nanos * 100));
        assert_eq!((latencies.min, latencies.max, latencies.mean()), (100, 100_000, 50_050));
        let median = latencies.permille(500);
        assert!((50_000..=50_000 * 9 / 8).contains(&median), "{median}");
        assert_eq!(latencies.permille(1000), 100_000);
        latencies.clear();
        assert_eq!((latencies.requests, latencies.permille(990)), (0, 0));
    }
}
