//! The write-intent bitmap: which regions of the volume may differ between the legs after a crash.
//!
//! ```text
//!   wanted     somebody wants to write there; what the next store of the bitmap will say
//!   durable    the bitmap on the legs says so: writes may go
//!   kept       marked for the sake of legs that are out alone: those in use agree there, durably
//!   touched    written since the last look: not idle
//!   stale      the legs may differ there now: reads go to one leg, and resync has it to do
//!   undecided  they did differ there, and nothing told which leg is right: left to the operator
//!   decided    undecided ones of which the operator has taken a leg out, that gets them when it is taken in again
//! ```
//!
//! While a leg is out its marks tell what it lacks, and stay on the legs that have everything. A leg that is being filled has the others, the
//! wanted ones, alone: what is done of it is not done again after a crash. A kept region is not durable: who writes there has the mark stored
//! on all legs in use first, also on those that are being filled.
//!
//! A write that finds its region durable costs two loads. `durable` is set by whoever stored the bitmap and cleared by whoever has the
//! turn to store it, so the two never meet.

use std::{
    ops::RangeInclusive,
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes of the bitmap on a leg.
pub(crate) const BYTES: usize = 4032;
/// Regions at most.
pub(crate) const REGIONS: u64 = BYTES as u64 * 8;
const WORDS: usize = BYTES / 8;

/// A bitmap as it is stored.
pub(crate) type Page = [u64; WORDS];

/// 64 regions.
#[derive(Debug, Default)]
struct Word {
    wanted: AtomicU64,
    durable: AtomicU64,
    touched: AtomicU64,
    stale: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Intent {
    words: Box<[Word]>,
    /// Kept regions. Like those after it not in the words: no write looks at them. Only for whoever has the turn to store.
    kept: Box<[AtomicU64]>,
    /// Undecided regions.
    undecided: Box<[AtomicU64]>,
    /// Those that the operator has decided, and that have no mark yet.
    decided: Box<[AtomicU64]>,
    /// Power of two of the bytes of a region.
    shift: u32,
    /// Number of regions.
    regions: AtomicU64,
    /// Times that something became stale. 0: never, so that nobody need look.
    suspicions: AtomicU64,
    /// Stale regions now.
    stale: AtomicU64,
}

/// The smallest region with which a volume of so many bytes has at most [`REGIONS`].
pub(crate) fn least_shift(bytes: u64) -> u32 {
    (0..63).find(|shift| bytes.div_ceil(1 << shift) <= REGIONS).unwrap_or(63)
}

fn bit(region: u64) -> (usize, u64) {
    ((region / 64) as usize, 1 << (region % 64))
}

/// A bitmap from its bytes; what is missing is taken for set.
pub(crate) fn page_from(bytes: &[u8]) -> Page {
    let mut page = [u64::MAX; WORDS];
    for (word, bytes) in page.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    page
}

/// A bitmap's bytes.
pub(crate) fn page_bytes(page: &Page) -> Vec<u8> {
    page.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Intent {
    /// A bitmap in which nothing is set.
    pub(crate) fn new(bytes: u64, shift: u32) -> Self {
        let words = (0..WORDS).map(|_| Word::default()).collect();
        let count = || AtomicU64::new(0);
        let page = || (0..WORDS).map(|_| count()).collect();
        let (kept, undecided, decided) = (page(), page(), page());
        let (regions, suspicions, stale) = (count(), count(), count());
        let intent = Self { words, kept, undecided, decided, shift, regions, suspicions, stale };
        intent.cover(bytes);
        intent
    }

    /// It is of so many bytes now.
    pub(crate) fn cover(&self, bytes: u64) {
        let regions = bytes.div_ceil(1 << self.shift);
        assert!(regions <= REGIONS, "the region's size is checked");
        self.regions.store(regions, Ordering::Relaxed);
    }

    /// Power of two of the bytes of a region.
    pub(crate) fn shift(&self) -> u32 {
        self.shift
    }

    /// Number of regions.
    pub(crate) fn regions(&self) -> u64 {
        self.regions.load(Ordering::Relaxed)
    }

    /// The regions that a range of bytes, which is not empty, touches.
    #[inline]
    pub(crate) fn regions_of(&self, start: u64, end: u64) -> RangeInclusive<u64> {
        start >> self.shift..=(end - 1) >> self.shift
    }

    /// Whether writes to these regions may go. SeqCst: see `Ranges::try_lock`.
    #[inline]
    pub(crate) fn is_marked(&self, regions: &RangeInclusive<u64>) -> bool {
        regions.clone().all(|region| {
            let (word, bit) = bit(region);
            let word = &self.words[word];
            if word.touched.load(Ordering::Relaxed) & bit == 0 {
                word.touched.fetch_or(bit, Ordering::Relaxed);
            }
            word.durable.load(Ordering::SeqCst) & bit != 0
        })
    }

    /// Asks for marks on these regions.
    pub(crate) fn want(&self, regions: &RangeInclusive<u64>) {
        for region in regions.clone() {
            let (word, bit) = bit(region);
            self.words[word].wanted.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Asks for marks on all regions.
    pub(crate) fn want_all(&self) {
        if let Some(last) = self.regions().checked_sub(1) {
            self.want(&(0..=last));
        }
    }

    /// What is wanted: all that legs which are being filled need to be told.
    pub(crate) fn wanted(&self) -> Page {
        std::array::from_fn(|at| self.words[at].wanted.load(Ordering::Relaxed))
    }

    /// This and what is kept: what all other legs need to be told.
    pub(crate) fn with_kept(&self, wanted: &Page) -> Page {
        std::array::from_fn(|at| wanted[at] | self.kept[at].load(Ordering::Relaxed))
    }

    /// All that is marked, or is to be.
    pub(crate) fn page(&self) -> Page {
        self.with_kept(&self.wanted())
    }

    /// Keeps marks that [were taken away](Self::unmark) for the sake of legs that are out alone. Only for whoever has the turn to store.
    pub(crate) fn keep(&self, page: &Page) {
        self.kept.iter().zip(page).for_each(|(kept, bits)| _ = kept.fetch_or(*bits, Ordering::Relaxed));
    }

    /// Wants what is kept. Only for whoever has the turn to store.
    pub(crate) fn want_kept(&self) {
        for (word, kept) in self.words.iter().zip(&self.kept) {
            // `wanted` first: a page has it at every moment.
            word.wanted.fetch_or(kept.load(Ordering::Relaxed), Ordering::Relaxed);
            kept.store(0, Ordering::Relaxed);
        }
    }

    /// Whether all that is wanted is on the legs in use.
    pub(crate) fn is_stored(&self) -> bool {
        self.words.iter().all(|word| word.wanted.load(Ordering::Relaxed) & !word.durable.load(Ordering::Relaxed) == 0)
    }

    /// This is on the legs now. Only for whoever has the turn to store.
    pub(crate) fn stored(&self, page: &Page) {
        for (word, bits) in self.words.iter().zip(page) {
            word.durable.fetch_or(*bits, Ordering::SeqCst);
        }
    }

    /// Regions that are marked, and were not written since the last call, and are not stale; and for [`Self::is_doubted`] the suspicions
    /// before that. Only for whoever has the turn to store.
    pub(crate) fn idle(&self) -> (Page, u64) {
        let suspicions = self.suspicions();
        let idle = std::array::from_fn(|at| {
            let word = &self.words[at];
            let touched = word.touched.swap(0, Ordering::Relaxed);
            word.durable.load(Ordering::Relaxed) & !touched & !word.stale.load(Ordering::Relaxed)
        });
        (idle, suspicions)
    }

    /// Whether nobody wanted to write since it [started](Self::start), or since [`Self::idle`].
    pub(crate) fn is_untouched(&self) -> bool {
        self.words.iter().all(|word| word.touched.load(Ordering::Relaxed) == 0)
    }

    /// Whether a suspicion came up since these regions seemed idle, or while they were looked at: that may be counted before, and its bits
    /// set after the look.
    pub(crate) fn is_doubted(&self, idle: &Page, suspicions: u64) -> bool {
        let stale = |(word, bits): (&Word, &u64)| word.stale.load(Ordering::Acquire) & bits != 0;
        self.suspicions() != suspicions || self.words.iter().zip(idle).any(stale)
    }

    /// Regions that are marked, and not stale: for who knows that nothing is in flight.
    pub(crate) fn in_order(&self) -> Page {
        std::array::from_fn(|at| {
            let word = &self.words[at];
            let marked = word.wanted.load(Ordering::Relaxed) | word.durable.load(Ordering::Relaxed);
            marked & !word.stale.load(Ordering::Relaxed)
        })
    }

    /// Takes marks away: writes must ask again. Those in flight are to be waited for before this is stored. Only for whoever has
    /// the turn to store. SeqCst: see `Ranges::try_lock`.
    pub(crate) fn unmark(&self, page: &Page) {
        for (word, bits) in self.words.iter().zip(page) {
            // `wanted` first: who finds `durable` cleared wants anew, and must not be forgotten.
            word.wanted.fetch_and(!bits, Ordering::Relaxed);
            word.durable.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// Takes [`Self::unmark`] back, or marks other regions: what is still on the legs as it was is `durable`; else only the next store says
    /// so. Only for whoever has the turn to store, since the marks were taken away.
    pub(crate) fn mark_again(&self, page: &Page, durable: bool) {
        for (word, bits) in self.words.iter().zip(page) {
            word.wanted.fetch_or(*bits, Ordering::Relaxed);
            if durable {
                word.durable.fetch_or(*bits, Ordering::SeqCst);
            }
        }
    }

    /// Starts with what is on the legs.
    pub(crate) fn start(&self, page: &Page) {
        self.start_within(page, &[u64::MAX; WORDS]);
    }

    /// [`Self::start`]; what is marked beyond these regions is marked for the sake of legs that are out alone.
    pub(crate) fn start_within(&self, page: &Page, within: &Page) {
        for (at, word) in self.words.iter().enumerate() {
            let present = page[at] & self.present(at);
            let bits = present & within[at];
            self.kept[at].store(present & !within[at], Ordering::Relaxed);
            word.wanted.store(bits, Ordering::Relaxed);
            word.durable.store(bits, Ordering::SeqCst);
            word.touched.store(0, Ordering::Relaxed);
            word.stale.store(0, Ordering::Relaxed);
        }
        self.stale.store(0, Ordering::Relaxed);
    }

    /// The bits of a word that stand for regions.
    fn present(&self, word: usize) -> u64 {
        match self.regions().saturating_sub(word as u64 * 64) {
            0 => 0,
            count @ 1..64 => u64::MAX >> (64 - count),
            _ => u64::MAX,
        }
    }

    /// Whether reads of the range may go to any leg.
    #[inline]
    pub(crate) fn is_settled(&self, start: u64, end: u64) -> bool {
        self.stale.load(Ordering::Acquire) == 0
            || self.regions_of(start, end).all(|region| {
                let (word, bit) = bit(region);
                self.words[word].stale.load(Ordering::Acquire) & bit == 0
            })
    }

    /// The legs may differ in these regions. Release: whoever reads there after this was called knows.
    ///
    /// The suspicion is counted before its bits are set. [`Self::cleared`] takes a bit away and then looks at the count: if it took one that
    /// was set here, it finds this suspicion counted. The other way round it could look between the two, and the region would count as settled.
    pub(crate) fn suspect(&self, regions: &RangeInclusive<u64>) {
        self.suspicions.fetch_add(1, Ordering::Release);
        for region in regions.clone() {
            let (word, bit) = bit(region);
            // Who takes the bit away takes it from the number: it counts before it is there.
            self.stale.fetch_add(1, Ordering::Release);
            if self.words[word].stale.fetch_or(bit, Ordering::Release) & bit != 0 {
                let _ = self.stale.fetch_update(Ordering::AcqRel, Ordering::Acquire, |stale| stale.checked_sub(1));
            }
        }
    }

    /// The legs may differ anywhere.
    pub(crate) fn suspect_all(&self) {
        if let Some(last) = self.regions().checked_sub(1) {
            self.suspect(&(0..=last));
        }
    }

    /// The legs may differ in these regions.
    pub(crate) fn suspect_page(&self, page: &Page) {
        for region in (0..self.regions()).filter(|region| page[bit(*region).0] & bit(*region).1 != 0) {
            self.suspect(&(region..=region));
        }
    }

    /// The legs may differ wherever a mark is.
    pub(crate) fn suspect_marked(&self) {
        for region in 0..self.regions() {
            let (word, bit) = bit(region);
            if self.words[word].durable.load(Ordering::Relaxed) & bit != 0 {
                self.suspect(&(region..=region));
            }
        }
    }

    /// A block of this region differs, and nothing tells which leg is right.
    pub(crate) fn note_undecided(&self, region: u64) {
        let (word, bit) = bit(region);
        self.undecided[word].fetch_or(bit, Ordering::Relaxed);
    }

    /// Whether there are undecided regions.
    pub(crate) fn has_undecided(&self) -> bool {
        self.undecided.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// The operator has decided the undecided regions.
    pub(crate) fn decide(&self) {
        for (undecided, decided) in self.undecided.iter().zip(&self.decided) {
            decided.fetch_or(undecided.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// The decided regions.
    pub(crate) fn decided(&self) -> Page {
        std::array::from_fn(|at| self.decided[at].load(Ordering::Relaxed))
    }

    /// The decided regions are marked, or nothing differs there any more.
    pub(crate) fn forget_decided(&self) {
        self.decided.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Suspicions so far: for [`Self::cleared`].
    pub(crate) fn suspicions(&self) -> u64 {
        self.suspicions.load(Ordering::Acquire)
    }

    /// The legs agree in this region, unless a suspicion came up since `suspicions`.
    pub(crate) fn cleared(&self, region: u64, suspicions: u64) {
        let (word, bit) = bit(region);
        if self.words[word].stale.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
            // Nothing is left to be taken away when all began anew meanwhile.
            let _ = self.stale.fetch_update(Ordering::AcqRel, Ordering::Acquire, |stale| stale.checked_sub(1));
        }
        if self.suspicions() != suspicions {
            self.suspect(&(region..=region));
        }
    }

    /// Stale regions.
    pub(crate) fn stale(&self) -> u64 {
        self.stale.load(Ordering::Acquire)
    }

    /// Marked regions.
    pub(crate) fn marked(&self) -> u64 {
        let marked = |(word, kept): (&Word, &AtomicU64)| word.durable.load(Ordering::Relaxed) | kept.load(Ordering::Relaxed);
        self.words.iter().zip(&self.kept).map(|pair| u64::from(marked(pair).count_ones())).sum()
    }

    /// The first stale region from this one on.
    pub(crate) fn next_stale(&self, from: u64) -> Option<u64> {
        (from..self.regions()).find(|region| {
            let (word, bit) = bit(*region);
            self.words[word].stale.load(Ordering::Acquire) & bit != 0
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_region_is_as_small_as_the_bitmap_allows() {
        assert_eq!(least_shift(REGIONS), 0);
        assert_eq!(least_shift(REGIONS + 1), 1);
        assert_eq!(least_shift(1 << 40), 26);
        assert!(u64::MAX.div_ceil(1 << least_shift(u64::MAX)) <= REGIONS);
    }

    #[test]
    fn what_is_wanted_counts_when_it_is_stored() {
        let intent = Intent::new(100 << 20, 20);
        assert!(!intent.is_marked(&(3..=70)));
        intent.want(&(3..=70));
        let page = intent.page();
        assert!(!intent.is_marked(&(3..=70)));
        intent.stored(&page);
        assert!(intent.is_marked(&(3..=70)) && !intent.is_marked(&(70..=71)));
        assert_eq!(intent.marked(), 68);
        // Touched by the looks above; idle at the second call.
        assert!(intent.idle().0.iter().all(|word| *word == 0));
        intent.suspect(&(5..=5));
        let (idle, _) = intent.idle();
        intent.unmark(&idle);
        assert_eq!((intent.marked(), intent.is_marked(&(5..=5)), intent.is_marked(&(6..=6))), (1, true, false));
        intent.mark_again(&idle, false);
        assert_eq!((intent.marked(), intent.page()), (1, page));
        intent.mark_again(&idle, true);
        assert_eq!((intent.marked(), intent.is_marked(&(3..=70))), (68, true));
    }

    #[test]
    fn what_is_kept_is_for_legs_that_are_out_alone_until_it_is_wanted_again() {
        let intent = Intent::new(100 << 20, 20);
        let (mut page, mut within) = ([0; WORDS], [0; WORDS]);
        (page[0], within[0]) = (0b1111, 0b10011);
        intent.start_within(&page, &within);
        assert_eq!((intent.wanted()[0], intent.page()[0], intent.marked()), (0b11, 0b1111, 4));
        assert!(intent.is_stored() && intent.is_marked(&(0..=1)) && !intent.is_marked(&(2..=2)));
        intent.suspect_marked();
        assert_eq!(intent.stale(), 2);
        // Somebody writes there.
        intent.want(&(2..=2));
        assert!(!intent.is_stored());
        intent.stored(&intent.wanted());
        assert!(intent.is_stored() && intent.is_marked(&(2..=2)));
        // It is idle later.
        page[0] = 0b100;
        intent.unmark(&page);
        intent.keep(&page);
        assert_eq!((intent.wanted()[0], intent.page()[0], intent.marked()), (0b11, 0b1111, 4));
        intent.want_kept();
        assert_eq!((intent.wanted()[0], intent.page()[0], intent.is_stored()), (0b1111, 0b1111, false));
        intent.start(&page);
        assert_eq!((intent.wanted(), intent.page()), (page, page));
    }

    #[test]
    fn a_suspicion_that_comes_up_meanwhile_is_kept() {
        let intent = Intent::new(100 << 20, 20);
        assert!(intent.is_settled(0, 1));
        intent.suspect(&(7..=8));
        assert!(!intent.is_settled(8 << 20, (8 << 20) + 1) && intent.is_settled(9 << 20, 10 << 20));
        assert_eq!(
            (intent.stale(), intent.next_stale(0), intent.next_stale(8), intent.next_stale(9)),
            (2, Some(7), Some(8), None)
        );
        let before = intent.suspicions();
        intent.cleared(7, before);
        assert_eq!((intent.stale(), intent.next_stale(0)), (1, Some(8)));
        let before = intent.suspicions();
        intent.suspect(&(8..=8));
        intent.cleared(8, before);
        assert_eq!(intent.stale(), 1);
    }

    #[test]
    fn a_suspicion_that_comes_up_at_the_same_time_is_kept() {
        let (intent, together) = (Intent::new(100 << 20, 20), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    together.wait();
                    intent.suspect(&(7..=7));
                    together.wait();
                }
            });
            intent.suspect(&(7..=7));
            for _ in 0..20_000 {
                let before = intent.suspicions();
                together.wait();
                intent.cleared(7, before);
                together.wait();
                assert!(!intent.is_settled(7 << 20, 8 << 20));
            }
        });
    }

    #[test]
    fn a_region_that_comes_under_suspicion_at_the_same_time_is_not_idle_unnoticed() {
        // The last one: what is looked at before it takes time.
        let (last, together) = (REGIONS - 1, std::sync::Barrier::new(2));
        let intent = Intent::new(REGIONS << 20, 20);
        intent.want(&(last..=last));
        let page = intent.page();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2_000 {
                    together.wait();
                    intent.suspect(&(last..=last));
                    together.wait();
                }
            });
            for _ in 0..2_000 {
                intent.start(&page);
                together.wait();
                let (idle, before) = intent.idle();
                together.wait();
                let seems_idle = idle[bit(last).0] & bit(last).1 != 0;
                assert!(!seems_idle || intent.is_doubted(&idle, before));
            }
        });
    }

    proptest! {
        #[test]
        fn pages_read_back(words in proptest::collection::vec(any::<u64>(), WORDS)) {
            let page: Page = words.try_into().unwrap();
            prop_assert_eq!(page_from(&page_bytes(&page)), page);
            let intent = Intent::new(1 << 40, 26);
            intent.start(&page);
            let set = page.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            prop_assert!(intent.marked() <= set);
            let same = |at: u64| intent.is_marked(&(at..=at)) == (page[(at / 64) as usize] >> (at % 64) & 1 == 1);
            prop_assert!((0..intent.regions()).all(same));
        }
    }
}
