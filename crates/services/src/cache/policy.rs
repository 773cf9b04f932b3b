//! Which line goes when another one comes: S3-FIFO (Yang and others, SOSP 2023).
//!
//! ```text
//!   new ─► small (a tenth) ─ used again? ─► main ─ used? ─► main again
//!             └─ not: out ─► ghost: remembered by number only     └─ not: out
//!   new, and remembered ─► main
//! ```
//!
//! What is read once, as a scan does, passes through `small` and never pushes out what is in `main`. A use costs a counter of two bits in
//! the line's own entry, which is full after three uses: from then on a hit writes nothing.

use std::collections::VecDeque;

/// Uses that are counted at most.
pub(super) const HOTTEST: u8 = 3;
/// Uses in `small` from which on a line goes to `main`.
const WARM: u8 = 2;
/// Lines that are looked at for one that can go.
const LOOKS: usize = 64;

/// The lines, as the policy sees them.
pub(super) trait Lines {
    /// Uses since it came, or since it was last looked at.
    fn heat(&self, slot: u32) -> u8;

    /// Sets its uses.
    fn set_heat(&self, slot: u32, heat: u8);

    /// Takes the line out of its slot and tells its number; `None` when it cannot go now.
    fn take_out(&self, slot: u32) -> Option<u64>;
}

/// Remembers lines that went, by a part of their hash: as many as there are slots.
#[derive(Debug)]
struct Ghost {
    /// At the place that the hash says: a part of the hash, and the count of lines that had gone.
    places: Box<[(u32, u32)]>,
    gone: u32,
    reach: u32,
}

/// Spreads numbers of lines.
pub(super) fn hash(line: u64) -> u64 {
    let mixed = (line ^ (line >> 31)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

impl Ghost {
    fn new(slots: u32) -> Self {
        let places = (slots as usize).next_power_of_two().max(8);
        Self { places: vec![(0, 0); places].into_boxed_slice(), gone: slots.max(1), reach: slots }
    }

    fn place(&mut self, line: u64) -> (&mut (u32, u32), u32) {
        let hash = hash(line);
        let at = hash as usize & (self.places.len() - 1);
        (&mut self.places[at], (hash >> 32) as u32)
    }

    fn remember(&mut self, line: u64) {
        self.gone = self.gone.wrapping_add(1);
        let gone = self.gone;
        let (place, part) = self.place(line);
        *place = (part, gone);
    }

    /// Whether it is remembered; it is forgotten then.
    fn recall(&mut self, line: u64) -> bool {
        let (gone, reach) = (self.gone, self.reach);
        let (place, part) = self.place(line);
        let known = place.0 == part && place.1 != 0 && gone.wrapping_sub(place.1) < reach;
        if known {
            *place = (0, 0);
        }
        known
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Policy {
    free: Vec<u32>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Lines that `small` may have while lines must go.
    small_share: usize,
    ghost: Ghost,
}

impl Policy {
    /// Bytes of memory that it takes for each line at most: three lists of numbers, and places that are a power of two.
    pub(super) const BYTES_PER_LINE: usize = 3 * size_of::<u32>() + 2 * size_of::<(u32, u32)>();

    /// For so many slots, all of them free.
    pub(super) fn new(slots: u32) -> Self {
        let room = slots as usize;
        Self {
            free: (0..slots).rev().collect(),
            small: VecDeque::with_capacity(room),
            main: VecDeque::with_capacity(room),
            small_share: (room / 10).max(1),
            ghost: Ghost::new(slots),
        }
    }

    /// All slots are free again, but for those that hold something.
    pub(super) fn reset(&mut self, slots: u32, held: impl Fn(u32) -> bool) {
        *self = Self::new(slots);
        self.free.retain(|slot| !held(*slot));
        // What was there before counts as used.
        self.main.extend((0..slots).filter(|slot| held(*slot)));
    }

    /// A slot for a new line: a free one, or that of a line that went. Also tells whether one went.
    pub(super) fn slot(&mut self, lines: &impl Lines) -> Option<(u32, bool)> {
        if let Some(slot) = self.free.pop() {
            return Some((slot, false));
        }
        for _ in 0..LOOKS {
            let of_small = self.small.len() >= self.small_share || self.main.is_empty();
            let slot = if of_small { self.small.pop_front()? } else { self.main.pop_front()? };
            let heat = lines.heat(slot);
            if of_small && heat >= WARM {
                lines.set_heat(slot, 0);
                self.main.push_back(slot);
            } else if !of_small && heat > 0 {
                lines.set_heat(slot, heat - 1);
                self.main.push_back(slot);
            } else if let Some(line) = lines.take_out(slot) {
                if of_small {
                    self.ghost.remember(line);
                }
                return Some((slot, true));
            } else {
                self.main.push_back(slot);
            }
        }
        None
    }

    /// The slot was not needed.
    pub(super) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// A line came into the slot.
    pub(super) fn came(&mut self, slot: u32, line: u64) {
        if self.ghost.recall(line) {
            self.main.push_back(slot);
        } else {
            self.small.push_back(slot);
        }
    }

    /// Slots that hold nothing.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::{Cell, RefCell},
        collections::{BTreeMap, HashMap},
    };

    use millrace_block::conformance::Random;

    use super::*;

    /// Lines without data.
    struct Model {
        slots: Vec<(Cell<u64>, Cell<u8>)>,
        places: RefCell<HashMap<u64, u32>>,
        stuck: Cell<bool>,
    }

    impl Lines for Model {
        fn heat(&self, slot: u32) -> u8 {
            self.slots[slot as usize].1.get()
        }

        fn set_heat(&self, slot: u32, heat: u8) {
            self.slots[slot as usize].1.set(heat);
        }

        fn take_out(&self, slot: u32) -> Option<u64> {
            if self.stuck.get() {
                return None;
            }
            let line = self.slots[slot as usize].0.get();
            assert_eq!(self.places.borrow_mut().remove(&line), Some(slot), "a line that is there goes, once");
            Some(line)
        }
    }

    fn model(slots: u32) -> (Policy, Model) {
        let lines = (0..slots).map(|_| (Cell::new(0), Cell::new(0))).collect();
        (Policy::new(slots), Model { slots: lines, places: RefCell::default(), stuck: Cell::new(false) })
    }

    fn use_line(policy: &mut Policy, model: &Model, line: u64) -> bool {
        let known = model.places.borrow().get(&line).copied();
        if let Some(slot) = known {
            model.set_heat(slot, (model.heat(slot) + 1).min(HOTTEST));
            return true;
        }
        let (slot, _) = policy.slot(model).expect("lines can go");
        model.slots[slot as usize].0.set(line);
        model.set_heat(slot, 0);
        assert!(model.places.borrow_mut().insert(line, slot).is_none());
        policy.came(slot, line);
        false
    }

    fn s3_hits(slots: u32, trace: &[u64]) -> usize {
        let (mut policy, model) = model(slots);
        trace.iter().filter(|line| use_line(&mut policy, &model, **line)).count()
    }

    fn lru_hits(slots: u32, trace: &[u64]) -> usize {
        let (mut last, mut order) = (HashMap::new(), BTreeMap::new());
        let mut hits = 0;
        for (now, line) in trace.iter().enumerate() {
            match last.insert(*line, now) {
                Some(before) => {
                    hits += 1;
                    order.remove(&before);
                }
                None if order.len() == slots as usize => {
                    let (_, oldest) = order.pop_first().expect("it is full");
                    last.remove(&oldest);
                }
                None => {}
            }
            order.insert(now, *line);
        }
        hits
    }

    /// Skewed uses of some lines; now and then a scan of lines that are never used again.
    fn trace(seed: u64, working_set: u64, scan: u64, scans: u64) -> Vec<u64> {
        let mut random = Random::new(seed);
        let (mut trace, mut next) = (Vec::new(), 1 << 40);
        for _ in 0..scans {
            for _ in 0..4 * working_set {
                // The product of two: small numbers are more frequent.
                let (one, two) = (random.below(working_set), random.below(working_set));
                trace.push(one * two / working_set);
            }
            trace.extend(next..next + scan);
            next += scan;
        }
        trace
    }

    #[test]
    fn scans_do_not_push_out_what_is_used() {
        for (seed, slots, working_set, scan) in [(1, 100, 100, 400), (2, 1000, 900, 5000), (3, 64, 200, 300)] {
            let trace = trace(seed, working_set, scan, 20);
            let (s3, lru) = (s3_hits(slots, &trace), lru_hits(slots, &trace));
            eprintln!("seed {seed}, {slots} slots: S3-FIFO hits {s3}, LRU {lru}, of {}", trace.len());
            assert!(s3 * 100 > lru * 105, "seed {seed}: S3-FIFO hits {s3}, LRU {lru}");
        }
    }

    #[test]
    fn without_scans_it_is_as_good_as_lru() {
        for seed in 0..5 {
            let trace = trace(seed, 500, 0, 40);
            let (s3, lru) = (s3_hits(200, &trace), lru_hits(200, &trace));
            assert!(s3 * 100 >= lru * 98, "seed {seed}: S3-FIFO hits {s3}, LRU {lru}");
        }
    }

    #[test]
    fn lines_that_cannot_go_are_left_and_no_slot_is_lost() {
        let (mut policy, model) = model(16);
        assert!((0..16).all(|line| !use_line(&mut policy, &model, line)));
        model.stuck.set(true);
        assert_eq!(policy.slot(&model), None);
        model.stuck.set(false);
        for line in 100..1000 {
            use_line(&mut policy, &model, line);
            assert_eq!(policy.small.len() + policy.main.len() + policy.free.len(), 16);
        }
        assert_eq!(model.places.borrow().len(), 16);
    }

    #[test]
    fn what_went_lately_is_remembered() {
        let mut ghost = Ghost::new(64);
        assert!((0..1000).all(|line| !ghost.recall(line)));
        ghost.remember(7);
        assert!(ghost.recall(7) && !ghost.recall(7));
        ghost.remember(8);
        (1000..1064).for_each(|line| ghost.remember(line));
        assert!(!ghost.recall(8), "too long ago");
    }
}
