//! What every unit of a queue's range holds, for `--verify`.

/// Set while a command to the unit is in flight.
const BUSY: u32 = 1 << 31;

/// One word per unit: the generation last written, 0 when unknown, and whether a command is in flight.
#[derive(Debug)]
pub(super) struct Tracker {
    first: u64,
    units: Vec<u32>,
}

impl Tracker {
    /// Units `first..first + count`, all unknown.
    pub(super) fn new(first: u64, count: u64) -> Self {
        Self { first, units: vec![0; usize::try_from(count).expect("a word per unit fits into memory")] }
    }

    fn slot(&mut self, unit: u64) -> &mut u32 {
        &mut self.units[(unit - self.first) as usize]
    }

    /// The first unit from `unit` on, around the end, to which nothing is in flight; it is then busy.
    ///
    /// # Panics
    /// When all are busy: there are at least as many units as commands in flight.
    pub(super) fn reserve(&mut self, unit: u64) -> u64 {
        let (start, count) = ((unit - self.first) as usize, self.units.len());
        let free = (start..count).chain(0..start).find(|&index| self.units[index] & BUSY == 0);
        let index = free.expect("more units than commands in flight");
        self.units[index] |= BUSY;
        self.first + index as u64
    }

    /// The generation a unit holds; 0 when unknown.
    pub(super) fn generation(&mut self, unit: u64) -> u32 {
        *self.slot(unit) & !BUSY
    }

    /// The generation that the next write to a unit gives it.
    pub(super) fn next_generation(&mut self, unit: u64) -> u32 {
        // Not 0, which is "unknown"; 2^31 writes to one unit outlast every run.
        (self.generation(unit) + 1) & !BUSY
    }

    /// Ends a command to a unit, which now holds `generation`.
    pub(super) fn release(&mut self, unit: u64, generation: u32) {
        let slot = self.slot(unit);
        assert!(*slot & BUSY != 0, "unit {unit} has no command in flight");
        *slot = generation;
    }

    /// The first unit at or after `unit` whose content is known.
    pub(super) fn next_known(&self, unit: u64) -> Option<u64> {
        let from = unit.checked_sub(self.first)? as usize;
        let rest = self.units.get(from..)?;
        rest.iter().position(|word| word & !BUSY != 0).map(|index| unit + index as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_per_unit_at_a_time() {
        let mut tracker = Tracker::new(100, 3);
        assert_eq!(tracker.reserve(101), 101);
        assert_eq!(tracker.reserve(101), 102, "the next one that is free");
        assert_eq!(tracker.reserve(102), 100, "around the end");
        tracker.release(102, 1);
        assert_eq!(tracker.reserve(100), 102);
    }

    #[test]
    fn generations_count_writes_and_failure_makes_unknown() {
        let mut tracker = Tracker::new(0, 2);
        assert_eq!((tracker.generation(0), tracker.next_generation(0)), (0, 1));
        tracker.reserve(0);
        tracker.release(0, 1);
        assert_eq!((tracker.generation(0), tracker.next_generation(0)), (1, 2));
        assert_eq!(tracker.next_known(0), Some(0));
        assert_eq!(tracker.next_known(1), None);
        tracker.reserve(0);
        tracker.release(0, 0);
        assert_eq!(tracker.next_known(0), None);
    }

    #[test]
    #[should_panic(expected = "more units than commands")]
    fn never_two_commands_to_one_unit() {
        let mut tracker = Tracker::new(0, 1);
        tracker.reserve(0);
        tracker.reserve(0);
    }
}
