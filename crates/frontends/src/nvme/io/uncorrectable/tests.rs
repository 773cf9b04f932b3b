//! Ranges against a set of blocks.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn ranges_are_the_set_of_marked_blocks(
        steps in proptest::collection::vec((any::<bool>(), 0_u64..200, 1_u64..40), 1..60), probe in (0_u64..220, 1_u64..20),
    ) {
        let ranges = UncorrectableRanges::default();
        let mut model = BTreeSet::new();
        for (mark, start, len) in steps {
            if mark {
                prop_assert!(ranges.mark(Lba(start), BlockCount(len)));
                model.extend(start..start + len);
            } else {
                ranges.clear(Lba(start), BlockCount(len));
                model.retain(|block| !(start..start + len).contains(block));
            }
            let kept = ranges.ranges();
            prop_assert_eq!(kept.map.iter().flat_map(|(&s, &e)| s..e).collect::<BTreeSet<u64>>(), model.clone());
            let touching = kept.map.iter().zip(kept.map.iter().skip(1)).any(|((_, &end), (&next, _))| end >= next);
            prop_assert!(!touching);
        }
        let (start, len) = probe;
        prop_assert_eq!(ranges.overlaps(Lba(start), BlockCount(len)), model.range(start..start + len).next().is_some());
    }
}

#[test]
fn a_guest_cannot_make_it_remember_without_end() {
    let ranges = UncorrectableRanges::default();
    for i in 0..MOST as u64 {
        assert!(ranges.mark(Lba(i * 4), BlockCount(3)));
    }
    assert!(!ranges.mark(Lba(u64::MAX - 1), BlockCount(1)));
    for i in 0..MOST as u64 {
        ranges.clear(Lba(i * 4 + 1), BlockCount(1));
    }
    assert!(ranges.ranges().map.len() <= MOST + 1);
    ranges.clear_all();
    assert!(!ranges.overlaps(Lba(0), BlockCount(u64::MAX)));
    assert!(ranges.mark(Lba(7), BlockCount(1)));
}

#[test]
fn the_last_blocks_that_a_number_can_name() {
    let ranges = UncorrectableRanges::default();
    assert!(ranges.mark(Lba(u64::MAX - 4), BlockCount(100)));
    assert!(ranges.overlaps(Lba(u64::MAX - 2), BlockCount(1)));
    assert!(!ranges.overlaps(Lba(0), BlockCount(5)));
}
