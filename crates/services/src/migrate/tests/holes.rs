//! What holds nothing is not read, and not written where nothing is.

use std::path::Path;

use millrace_backends::{FileOptions, FileVolume};
use millrace_block::{Extent, Lba, Request, Step, TaskContext};

use super::*;

const BYTES: u64 = 1 << 30;

/// A disk that knows which of its blocks are zeroes.
pub(super) struct Knowing(pub(super) Arc<dyn Volume>);

impl Volume for Knowing {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.0.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        let unit = self.0.geometry().block_size.bytes() as usize;
        let data = legs::read(&self.0, 0, self.0.geometry().bytes() as usize).ok()?;
        let is_zero = |block: &&[u8]| block.iter().all(|byte| *byte == 0);
        let mut blocks = data.chunks(unit).skip(lba.0 as usize).peekable();
        let unused = is_zero(blocks.peek()?);
        let count = blocks.take_while(|block| is_zero(block) == unused).count() as u64;
        Some(Extent { blocks: BlockCount(count), unused })
    }
}

fn file(path: &Path) -> Arc<dyn Volume> {
    let options = FileOptions { path: path.to_owned(), size: Some(BYTES), block_size: BlockSize::B4096, read_only: false };
    FileVolume::open("file", &options).unwrap()
}

fn status(moving: &Move, what: &str) -> u64 {
    let facts = moving.status().facts;
    facts.iter().find(|(name, _)| name == what).unwrap().1.parse().unwrap()
}

/// Data, and where they are.
type Pieces = Vec<(u64, Vec<u8>)>;

/// A file with data in some places, and these.
fn sparse(path: &Path) -> (Arc<dyn Volume>, Pieces) {
    let volume = file(path);
    let mut random = Random::new(SEED);
    let places = [0, 100 << 20, (700 << 20) + 4096, BYTES - 8192];
    let pieces: Vec<_> = places.into_iter().map(|at| (at, random.bytes(8192))).collect();
    for (at, piece) in &pieces {
        legs::write(&volume, *at, piece.clone()).unwrap();
    }
    (volume, pieces)
}

/// It has these, and nothing else.
fn holds_only(volume: &Arc<dyn Volume>, pieces: &[(u64, Vec<u8>)]) {
    for (at, piece) in pieces {
        assert!(legs::read(volume, *at, piece.len()).unwrap() == *piece, "at {at}");
    }
    let allocated = volume.usage().allocated;
    assert!(allocated < 4 << 20, "{allocated} bytes are allocated");
    // A step that meets no piece.
    for at in (0..BYTES).step_by(50 << 20).filter(|at| pieces.iter().all(|(place, _)| place.abs_diff(*at) > 8192)) {
        assert!(legs::read(volume, at, 4096).unwrap() == vec![0; 4096], "at {at}");
    }
}

#[test]
fn pieces_are_holes_until_something_is_written_to_them() {
    const PIECE: u64 = 16 << 10;
    // The last piece is shorter.
    let (old, new) = (Knowing(memory(small(100), OLD)), Knowing(memory(small(100), NEW)));
    legs::write(&new.0, 0, vec![1; 512]).unwrap();
    let holes = Holes::of(&old, &new, 51_200, PIECE).unwrap();
    assert_eq!((holes.end_in_old(0, 1 << 20), holes.end_in_both(0, 1 << 20)), (4 * PIECE, 0));
    assert_eq!(holes.end_in_both(PIECE, 51_200 - PIECE), 4 * PIECE);
    assert_eq!(holes.end_in_old(0, PIECE), PIECE);
    holes.fill(&(2 * PIECE + 512..2 * PIECE + 1024));
    assert_eq!((holes.end_in_old(0, 1 << 20), holes.end_in_old(2 * PIECE, 1 << 20)), (2 * PIECE, 2 * PIECE));
    assert_eq!(holes.end_in_both(3 * PIECE, 51_200 - 3 * PIECE), 4 * PIECE);
    holes.forget();
    assert_eq!((holes.end_in_old(0, 1 << 20), holes.end_in_both(3 * PIECE, PIECE)), (0, 3 * PIECE));
    // Who knows nothing, or of no hole.
    assert!(Holes::of(&*memory(small(100), OLD), &new, 51_200, PIECE).is_none());
    legs::write(&old.0, 0, vec![1; 51_200]).unwrap();
    assert!(Holes::of(&old, &new, 51_200, PIECE).is_none());
}

#[test]
fn holes_are_neither_read_nor_written() {
    let directory = tempfile::tempdir().unwrap();
    let (old, mut pieces) = sparse(&directory.path().join("old"));
    let new = file(&directory.path().join("new"));
    let graph =
        graph("move(disk:0, disk:1)", &[Arc::clone(&old), Arc::clone(&new)], None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    let mut random = Random::new(!SEED);
    let mut put = |at: u64| {
        on_bench(graph.volume(), |bench| bench.write(at >> 12, &random.bytes(4096)).unwrap());
        pieces.push((at, legs::read(&old, at, 4096).unwrap()));
    };
    // Before the walk, and behind it, where there were holes.
    put(300 << 20);
    walk(&moving, 6);
    let mark = moving.mark();
    assert!((1..BYTES).contains(&mark), "{mark}");
    put(50 << 20);
    put(400 << 20);
    put(BYTES - (2 << 20));
    to_the_end(&moving);
    put(500 << 20);
    assert!(moving.is_whole());
    holds_only(&new, &pieces);
    assert_eq!(status(&moving, "bytes given back") >> 22, 0);
    let skipped = status(&moving, "bytes of holes skipped");
    assert!(skipped > BYTES - (4 << 20), "{skipped}");
}

#[test]
fn what_lay_in_the_new_leg_is_erased_where_the_old_one_has_holes() {
    // The second time the walk begins anew, over what the first one has left.
    for reasons in [&[Reason::Create][..], &[Reason::Create, Reason::Open]] {
        let directory = tempfile::tempdir().unwrap();
        let (old, pieces) = sparse(&directory.path().join("old"));
        let new = file(&directory.path().join("new"));
        for at in [4 << 20, 400 << 20, BYTES - (1 << 20)] {
            legs::write(&new, at, vec![0xd1; 512 << 10]).unwrap();
        }
        for (number, reason) in reasons.iter().enumerate() {
            let legs = [Arc::clone(&old), Arc::clone(&new)];
            let graph = graph("move(disk:0, disk:1)", &legs, None, *reason, &Arc::default()).unwrap();
            let moving = move_of(&graph);
            walk(&moving, if number + 1 < reasons.len() { 20 } else { usize::MAX });
            if number + 1 == reasons.len() {
                assert!(moving.is_whole());
                assert!(status(&moving, "bytes of holes skipped") > BYTES / 4 * 3);
            }
        }
        holds_only(&new, &pieces);
    }
}

#[test]
fn a_hole_that_cannot_be_erased_ends_the_migration() {
    let pair = faulty(1024);
    legs::write(&volumes(&pair)[NEW], 0, vec![0xd1; 64 << 10]).unwrap();
    let knowing: Vec<Arc<dyn Volume>> =
        volumes(&pair).into_iter().map(|disk| -> Arc<dyn Volume> { Arc::new(Knowing(disk)) }).collect();
    // Of nothing but holes.
    let mut running = Live::new("disk:0", knowing);
    pair[NEW].add(Rule::new(Kind::WriteZeroes, When::Always, Effect::Fail(BlockError::NoSpace)));
    running.change_to("move(piece=16K, disk:0, disk:1)").unwrap();
    let moving = move_of(&running.graph);
    to_the_end(&moving);
    let why = moving.failure().unwrap();
    assert!(why.contains("disk:1 cannot be written: no space left"), "{why}");
}

#[test]
fn a_format_that_makes_the_volume_longer_leaves_no_hole_behind() {
    // As many pieces as a word has bits, and a block beyond them that fits in no large one.
    let bytes = 64 * (16 << 10) + 512;
    let disks: Vec<_> = [OLD, NEW].map(|leg| memory(small(bytes / 512), leg)).into_iter().collect();
    for disk in &disks {
        disk.format(BlockSize::B4096).unwrap();
    }
    let knowing: Vec<Arc<dyn Volume>> =
        disks.iter().map(|disk| -> Arc<dyn Volume> { Arc::new(Knowing(Arc::clone(disk))) }).collect();
    let graph = graph(STACK, &knowing, None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    assert!(moving.holes.get().is_some() && moving.bytes() == bytes - 512);
    walk(&moving, 1);
    let skipped = status(&moving, "bytes of holes skipped");
    moving.format(BlockSize::B512).unwrap();
    assert_eq!(moving.bytes(), bytes);
    let last = bytes / 512 - 1;
    let data = on_bench(graph.volume(), |bench| [bench.write_random(last, 1), bench.write_random(40, 8)]);
    to_the_end(&moving);
    assert!(moving.is_whole() && data_of(&disks[OLD]) == data_of(&disks[NEW]));
    assert!(legs::read(&disks[NEW], last * 512, 512).unwrap() == data[0]);
    assert_eq!(status(&moving, "bytes of holes skipped"), skipped, "nothing is known any more");
}
