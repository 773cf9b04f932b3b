//! What is written is read; what is cut off or damaged costs itself only.

use std::hash::{BuildHasher, RandomState};

use millrace_block::trace::{EventKind, EventOperation};

use super::*;
use crate::samples::{Job, blocks, events, names};

fn jobs(count: u64) -> Vec<Job> {
    let job = |number: u64| Job {
        queue: 1,
        command: number as u16,
        operation: EventOperation::READ,
        lba: number * 8,
        count: 8,
        at: 1000 + number * 5000,
    };
    (0..count).map(job).collect()
}

fn file(requests: u64, of: usize) -> Vec<Vec<u8>> {
    blocks(&events(&jobs(requests)), of)
}

fn read(bytes: &[u8]) -> (Vec<Block>, Damage) {
    let mut reader = Reader::open(bytes).expect("a trace");
    let mut blocks = Vec::new();
    while let Some(block) = reader.next_block().expect("a slice can be read") {
        blocks.push(block);
    }
    (blocks, reader.damage())
}

fn events_of(blocks: &[Block]) -> Vec<Event> {
    let of = |block: &Block| match block {
        Block::Events { events, .. } => events.clone(),
        _ => Vec::new(),
    };
    blocks.iter().flat_map(of).collect()
}

/// Numbers from a seed, which is printed.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let seed = std::env::var("MILLRACE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| RandomState::new().hash_one(0)) | 1;
        println!("MILLRACE_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

#[test]
fn what_is_written_is_read() {
    let (blocks, damage) = read(&file(1000, 100).concat());
    assert!(damage.is_none(), "{damage:?}");
    assert_eq!(blocks[1], Block::Names(names()));
    assert!(matches!(&blocks[0], Block::Begin(begin) if begin.target == "device vm1"));
    assert!(matches!(blocks.last(), Some(Block::End(end)) if end.events == 8000));
    assert_eq!(events_of(&blocks), events(&jobs(1000)));
}

#[test]
fn a_file_that_is_larger_than_what_is_read_ahead_is_read() {
    let bytes = file(30_000, EVENTS).concat();
    assert!(bytes.len() > 9 << 20);
    let (blocks, damage) = read(&bytes);
    assert!(damage.is_none());
    assert_eq!(events_of(&blocks).len(), 240_000);
}

#[test]
fn a_file_that_ends_anywhere_is_read_up_to_there() {
    let blocks = file(6, 10);
    let whole = blocks.concat();
    for len in 0..whole.len() {
        let ends = blocks.iter().scan(0, |end, block| {
            *end += block.len();
            Some(*end)
        });
        let expected = ends.take_while(|end| *end <= len).count();
        if expected == 0 {
            assert!(matches!(Reader::open(&whole[..len]), Err(FormatError::NoTrace)), "cut at {len}");
            continue;
        }
        let (found, damage) = read(&whole[..len]);
        assert_eq!(found.len(), expected, "cut at {len}");
        let rest = len - blocks[..expected].iter().map(Vec::len).sum::<usize>();
        let first = (rest > 0).then_some((len - rest) as u64);
        assert_eq!(damage, Damage { bytes: rest as u64, first, blocks: 0, cut: true }, "cut at {len}");
    }
}

#[test]
fn a_damaged_beginning_costs_itself_only() {
    let blocks = file(40, 40);
    let whole = blocks.concat();
    let (sound, _) = read(&whole);
    for bit in 0..HEADER * 8 {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let mut reader = Reader::open(&damaged[..]).unwrap_or_else(|error| panic!("bit {bit}: {error}"));
        let mut found = Vec::new();
        while let Some(block) = reader.next_block().expect("a slice can be read") {
            found.push(block);
        }
        assert_eq!(found, sound[1..], "bit {bit}");
        let damage = Damage { bytes: blocks[0].len() as u64, first: Some(0), blocks: 1, cut: false };
        assert_eq!(reader.damage(), damage, "bit {bit}");
        assert_eq!(reader.good().0, whole.len() as u64, "bit {bit}");
    }
}

#[test]
fn what_is_damaged_costs_itself_only() {
    let blocks = file(400, 40);
    let mut random = Random::new();
    for _ in 0..300 {
        let hit = 1 + random.below(blocks.len() - 2);
        let mut damaged = blocks.clone();
        match random.below(4) {
            0 => damaged[hit] = Vec::new(),
            1 => {
                let len = random.below(damaged[hit].len());
                damaged[hit].truncate(len);
            }
            2 => {
                let more: Vec<u8> = (0..random.below(5000)).map(|_| random.below(256) as u8).collect();
                // Within it: what comes before it would leave it whole.
                let at = 1 + random.below(damaged[hit].len() - 1);
                damaged[hit].splice(at..at, more);
                damaged[hit][0] ^= 1;
            }
            _ => {
                let at = random.below(damaged[hit].len());
                damaged[hit][at] ^= 1 << random.below(8);
            }
        }
        let (found, damage) = read(&damaged.concat());
        let expected = [&blocks[..hit], &blocks[hit + 1..]].concat().concat();
        assert!(found == read(&expected).0, "block {hit}");
        assert_eq!((damage.blocks, damage.cut), (1, false), "block {hit}");
        assert_eq!(damage.bytes, damaged[hit].len() as u64, "block {hit}");
        let before: usize = blocks[..hit].iter().map(Vec::len).sum();
        assert_eq!(damage.first, (damage.bytes > 0).then_some(before as u64), "block {hit}");
    }
}

#[test]
fn nonsense_never_panics() {
    let mut random = Random::new();
    for _ in 0..200 {
        let mut bytes = file(20, 16).concat();
        for _ in 0..random.below(200) {
            let at = random.below(bytes.len());
            bytes[at] = random.below(256) as u8;
        }
        if let Ok(trace) = crate::Trace::read(&bytes[..]) {
            let report = crate::Report::of(&trace, None);
            assert!(!report.text().is_empty() && !crate::plot::html(&trace, &report).is_empty());
        }
    }
    // Blocks that are whole, of events that make no sense.
    for _ in 0..50 {
        let word = |random: &mut Random| (random.below(usize::MAX) as u64) >> random.below(64);
        let mut events: Vec<_> = (0..500).map(|_| [(); 5].map(|()| word(&mut random))).collect();
        for event in &mut events {
            // Of known kinds and few keys, so that they meet.
            event[4] = event[4] & !0xff_0000 | (1 + random.below(6) as u64) << 16;
            event[3] &= 0x0001_0001_ffff_ffff;
        }
        let mut writer = Writer::default();
        let bytes = [writer.begin(&Begin::default()), writer.names(&names()), writer.events(0, 0, events)].concat();
        let trace = crate::Trace::read(&bytes[..]).expect("a trace");
        let report = crate::Report::of(&trace, None);
        assert!(!report.text().is_empty() && !crate::plot::svg(&trace, &report).is_empty());
        crate::export::perfetto::write(&trace, &mut Vec::new()).expect("a vector");
        crate::export::blktrace::write(&trace, &mut Vec::new()).expect("a vector");
    }
}

#[test]
fn other_files_and_versions_are_refused() {
    for bytes in [&b""[..], b"MRTRACEB", b"hello", &[0; 5000]] {
        assert!(matches!(Reader::open(bytes), Err(FormatError::NoTrace)));
    }
    let mut newer = file(1, 8).concat();
    newer[8] = 2;
    let content = newer[12..16].first_chunk().map_or(0, |len| u32::from_le_bytes(*len)) as usize;
    let sum = checksum(&newer[..HEADER], &newer[HEADER..HEADER + content]);
    newer[HEADER - 4..HEADER].copy_from_slice(&sum.to_le_bytes());
    assert!(matches!(Reader::open(&newer[..]), Err(FormatError::Version(2))));
}

#[test]
fn a_block_and_an_event_that_are_unknown_are_passed_over() {
    let mut writer = Writer::default();
    let begin = writer.begin(&Begin::default());
    let strange = writer.block(99, 0, b"of a later minor version");
    let mut event = Event { time: 5, kind: EventKind::Completed, ..Event::default() }.to_words();
    event[4] |= 0x77 << 16;
    let known = Event { time: 6, kind: EventKind::Completed, ..Event::default() };
    let events = writer.events(3, 7, [event, known.to_words()]);
    let (blocks, damage) = read(&[begin, strange, events].concat());
    assert_eq!(blocks[1..], [Block::Events { ring: 3, dropped: 7, events: vec![known] }]);
    assert_eq!(damage.blocks, 0, "it is there, and not understood");
}

#[test]
fn a_broken_off_file_gets_a_last_word() {
    let whole = file(20, 16).concat();
    for (at, step) in [(500, 1), (2000, 7), (whole.len() - 1, 1000), (whole.len(), 4096)] {
        let mut follower = Follower::default();
        whole[..at].chunks(step).for_each(|bytes| follower.push(bytes));
        assert_eq!(follower.end().is_some(), at == whole.len());
        if at < whole.len() {
            let closed = [&whole[..follower.whole() as usize], &follower.last_word("gone")].concat();
            let (blocks, damage) = read(&closed);
            assert!(damage.is_none(), "{damage:?}");
            assert!(matches!(blocks.last(), Some(Block::End(end)) if end.reason == "gone" && end.early));
        }
    }
}
