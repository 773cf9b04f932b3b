//! Segments, lists of them, and cursors over lists.

use std::os::fd::AsFd;

use proptest::prelude::*;
use rustix::io::Errno;

use super::{content, own_memory};
use crate::{DESK_SIZE, Desk, Mapping, Segment, SegmentCursor, Shared, Target, copy_segments, settle_streams, total_len};

#[test]
fn parts_stay_within() {
    let (_mapping, segment) = own_memory(4096);
    let part = segment.part(10, 20).unwrap();
    assert_eq!((part.len(), part.as_ptr() as usize - segment.as_ptr() as usize), (20, 10));
    assert!(segment.part(4096, 0).is_some_and(|part| part.is_empty()));
    for (offset, len) in [(4096, 1), (4097, 0), (0, 4097), (usize::MAX, 2), (2, usize::MAX), (usize::MAX, usize::MAX)] {
        assert!(segment.part(offset, len).is_none(), "{offset} {len}");
    }
    let (left, right) = (segment.part(0, 100).unwrap(), segment.part(100, 50).unwrap());
    assert!(left.adjoins(&right) && !right.adjoins(&left));
    let mut both = left;
    both.extend_over(&right);
    assert_eq!((both.as_ptr(), both.len()), (left.as_ptr(), 150));
}

#[test]
fn accesses_outside_a_segment_panic() {
    let (_mapping, segment) = own_memory(4096);
    let part = segment.part(0, 8).unwrap();
    let panics = |access: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err();
    assert!(panics(&|| part.read_at(1, &mut [0; 8])));
    assert!(panics(&|| part.write_at(8, &[0; 1])));
    assert!(panics(&|| part.read_at(usize::MAX, &mut [0; 2])));
    assert!(panics(&|| assert_eq!(part.read_value::<[u64; 2]>(0), [0; 2])));
    assert!(panics(&|| {
        let mut far = part;
        far.extend_over(&segment.part(9, 1).unwrap());
    }));
    assert!(!panics(&|| part.write_value(0, &u64::MAX)));
}

#[test]
fn equal_segments_have_equal_bytes_and_lengths() {
    let (_mapping, memory) = own_memory(16384);
    let (a, b) = (memory.part(1, 5000).unwrap(), memory.part(6000, 5000).unwrap());
    let bytes: Vec<u8> = (0..5000_u32).map(|i| (i * 7) as u8).collect();
    a.write_at(0, &bytes);
    b.write_at(0, &bytes);
    assert!(a.equals(&b));
    for at in [0, 1023, 1024, 4999] {
        b.write_at(at, &[bytes[at] ^ 1]);
        assert!(!a.equals(&b), "byte {at}");
        b.write_at(at, &[bytes[at]]);
    }
    assert!(!a.equals(&b.part(0, 4999).unwrap()) && !a.part(0, 4999).unwrap().equals(&b));
}

/// Lengths of the segments of a list.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![Just(0), Just(1), 1..20_usize, 500..530_usize, Just(4096)];
    prop::collection::vec(len, 0..12)
}

/// Segments of these lengths, a gap of three bytes between each two.
fn lay_out(memory: &Segment, lengths: &[usize]) -> Vec<Segment> {
    let mut at = 0;
    let place = |len: &usize| {
        let segment = memory.part(at, *len).unwrap();
        at += len + 3;
        segment
    };
    lengths.iter().map(place).collect()
}

fn gather(segments: &[Segment]) -> Vec<u8> {
    segments.iter().flat_map(content).collect()
}

fn number(segments: &[Segment]) -> Vec<u8> {
    let mut next = 0_u32;
    for segment in segments {
        for at in 0..segment.len() {
            next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            segment.write_value(at, &((next >> 24) as u8));
        }
    }
    gather(segments)
}

proptest! {
    #[test]
    fn lists_are_copied_until_one_ends(from in lengths(), to in lengths()) {
        let ((_a, source), (_b, target)) = (own_memory(1 << 16), own_memory(1 << 16));
        target.fill(0xdd);
        let (from, to) = (lay_out(&source, &from), lay_out(&target, &to));
        let data = number(&from);
        let copied = copy_segments(&from, &to);
        prop_assert_eq!(copied, total_len(&from).min(total_len(&to)));
        let found = gather(&to);
        prop_assert!(found[..copied] == data[..copied] && found[copied..].iter().all(|byte| *byte == 0xdd));
        // Nothing between the segments was touched.
        for segment in &to {
            segment.fill(0xdd);
        }
        prop_assert!(content(&target).iter().all(|byte| *byte == 0xdd));
    }

    #[test]
    fn a_cursor_hands_out_every_byte_once(list in lengths(), asks in prop::collection::vec(0_usize..3000, 1..40)) {
        let (_mapping, memory) = own_memory(1 << 16);
        let segments = lay_out(&memory, &list);
        let data = number(&segments);
        let mut cursor = SegmentCursor::new(&segments);
        let mut seen = Vec::new();
        for (i, ask) in asks.into_iter().enumerate() {
            // What is left is the split segment, if any, and the whole ones.
            let rest: Vec<Segment> = cursor.split_segment().into_iter().chain(cursor.whole_segments().iter().copied()).collect();
            prop_assert_eq!(cursor.remaining(), data.len() - seen.len());
            prop_assert!(gather(&rest) == data[seen.len()..]);
            prop_assert!(cursor.whole_segments().first().is_none_or(|segment| !segment.is_empty()));
            if i % 2 == 0 {
                let run = cursor.next_run(ask);
                prop_assert_eq!(run.is_none(), ask == 0 || seen.len() == data.len());
                prop_assert!(run.is_none_or(|run| (1..=ask).contains(&run.len())));
                seen.extend(run.iter().flat_map(content));
            } else {
                let skipped = ask.min(data.len() - seen.len());
                cursor.skip(ask);
                seen.extend_from_slice(&data[seen.len()..][..skipped]);
            }
            prop_assert!(data.starts_with(&seen));
        }
        let left = data.len() - seen.len();
        cursor.fill_rest(0xab);
        let filled = gather(&segments);
        prop_assert!(filled[..seen.len()] == seen && filled[seen.len()..] == vec![0xab; left]);
    }

    #[test]
    fn cursors_copy_and_compare_in_pieces(list in lengths(), piece in 1_usize..5000) {
        let ((_a, memory), (_b, buffer)) = (own_memory(1 << 16), own_memory(8192));
        let segments = lay_out(&memory, &list);
        let data = number(&segments);
        let piece_of = |len: usize| buffer.part(1, len).unwrap();
        let (mut reader, mut checker) = (SegmentCursor::new(&segments), SegmentCursor::new(&segments));
        for expected in data.chunks(piece) {
            let whole = piece_of(piece);
            prop_assert_eq!(reader.copy_to(whole), expected.len());
            prop_assert!(content(&piece_of(expected.len())) == expected);
            prop_assert!(checker.equals(piece_of(expected.len())));
        }
        prop_assert!(!checker.equals(piece_of(1)), "there is nothing left to equal a byte");
        let mut writer = SegmentCursor::new(&segments);
        for chunk in data.chunks(piece) {
            let inverted: Vec<u8> = chunk.iter().map(|byte| !byte).collect();
            piece_of(chunk.len()).write_at(0, &inverted);
            prop_assert_eq!(writer.copy_from(piece_of(chunk.len())), chunk.len());
        }
        prop_assert!(gather(&segments).iter().zip(&data).all(|(found, old)| *found == !old));
        let mut checker = SegmentCursor::new(&segments);
        if !data.is_empty() {
            let first = piece_of(1);
            first.write_at(0, &[data[0]]);
            prop_assert!(!checker.equals(first));
        }
    }
}

#[test]
fn a_mapping_gives_back_whole_pages_of_its_own_only() {
    let (mapping, segment) = own_memory(4 * 4096);
    segment.fill(1);
    mapping.discard(4096, 8192).unwrap();
    let expected = [vec![1; 4096], vec![0; 8192], vec![1; 4096]].concat();
    assert_eq!(content(&segment), expected);
    for (offset, len) in [(0, 5 * 4096), (4 * 4096, 4096), (usize::MAX - 4095, 4096), (1, 4096)] {
        assert!(mapping.discard(offset, len).is_err(), "{offset}+{len}");
    }
    assert_eq!(content(&segment), expected);
    assert!(Mapping::anonymous(0).is_err());
}

#[test]
fn shared_memory_is_seen_by_others_and_cannot_be_cut() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let ours = Shared::<[AtomicU32; 3]>::new("test").unwrap();
    assert_eq!(ours.file_len(), 4096);
    ours[2].store(77, Ordering::Relaxed);
    let theirs = Mapping::shared(ours.as_fd(), 0, 4096, true).unwrap();
    // SAFETY: the mapping lives to the end of the test and is writable.
    let segment = unsafe { theirs.segment(0, 12) }.unwrap();
    assert_eq!(segment.read_value::<u32>(8), 77);
    segment.write_value(0, &5_u32);
    assert_eq!(ours[0].load(Ordering::Relaxed), 5);
    for len in [0, 8192] {
        assert_eq!(rustix::fs::ftruncate(&ours, len), Err(Errno::PERM));
    }
}

#[test]
fn what_lies_on_a_desk_is_what_is_delivered() {
    const DATA: [u8; DESK_SIZE] = {
        let (mut data, mut at) = ([0; DESK_SIZE], 0);
        while at < DESK_SIZE {
            data[at] = (at % 251) as u8;
            at += 1;
        }
        data
    };
    let (_mapping, memory) = own_memory(4 * DESK_SIZE);
    memory.write_at(0, &DATA);
    let part = |at, len| memory.part(at, len).unwrap();
    let cut = [part(0, 1), part(1, 700), part(701, 0), part(701, DESK_SIZE - 701)];
    for target in [Target::Near, Target::Far, Target::Guest] {
        let (mut from, mut desk) = (SegmentCursor::new(&cut), Desk::new());
        assert_eq!(desk.load(&mut from, DESK_SIZE), DATA);
        memory.part(0, DESK_SIZE).unwrap().fill(0);
        // Whole lines, and places that begin within one.
        for at in [2 * DESK_SIZE, 2 * DESK_SIZE + 13] {
            let places = [part(at, 600), part(at + 600, DESK_SIZE - 600)];
            desk.store(&mut SegmentCursor::new(&places), target);
            settle_streams();
            let mut bytes = vec![0; DESK_SIZE];
            part(at, DESK_SIZE).read_at(0, &mut bytes);
            assert_eq!(bytes, DATA, "{target:?} at {at}");
        }
        memory.write_at(0, &DATA);
        // All of one piece.
        for at in [2 * DESK_SIZE, 2 * DESK_SIZE + 13] {
            assert_eq!(desk.load_all(part(0, 700).into()), &DATA[..700]);
            part(at, 701).fill(0x5a);
            desk.store_all(part(at, 701).into(), target);
            settle_streams();
            let mut bytes = [0; 701];
            part(at, 701).read_at(0, &mut bytes);
            assert_eq!((&bytes[..700], bytes[700]), (&DATA[..700], 0x5a), "{target:?} at {at}");
        }
    }
    let mut desk = Desk::new();
    assert!(desk.bytes().is_empty());
    assert_eq!(desk.load(&mut SegmentCursor::new(&cut[..2]), DESK_SIZE), &DATA[..701], "the list ends before");
    desk.store(&mut SegmentCursor::new(&[part(DESK_SIZE, 10)]), Target::Near);
    let mut bytes = [0; 11];
    part(DESK_SIZE, 11).read_at(0, &mut bytes);
    assert_eq!((&bytes[..10], bytes[10]), (&DATA[..10], 0), "as many as there is room for");
    let too_many = std::panic::catch_unwind(|| Desk::new().load(&mut SegmentCursor::new(&[]), DESK_SIZE + 1).len());
    assert!(too_many.is_err());
    let too_short = std::panic::catch_unwind(|| {
        let (_mapping, memory) = own_memory(4096);
        let mut desk = Desk::new();
        desk.load_all(memory.part(0, 10).unwrap().into());
        desk.store_all(memory.part(0, 9).unwrap().into(), Target::Near);
    });
    assert!(too_short.is_err());
}
