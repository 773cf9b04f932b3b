//! Copies as a whole: volumes of every kind, failures, and power cuts.

use millrace_backends::{
    FileOptions, FileVolume, MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockSize,
    conformance::{Power, Random},
};

use super::*;
use crate::{
    background::{Running, Stop, Task},
    testing::{NO_CUT, Rig, every_cut},
};

const SEED: u64 = 0x636f_7079;
const KIB: u64 = 1 << 10;

/// Does work where it is asked for.
struct Here;

impl Spawner for Here {
    fn spawn(&self, task: Task, stop: Stop, running: Running) -> Result<(), EngineError> {
        legs::block_on(move |cx| {
            Box::pin(async move {
                task.begin(cx, stop).await;
                drop(running);
            })
        })
    }
}

fn memory(bytes: u64) -> Arc<dyn Volume> {
    MemoryVolume::create("memory", bytes, BlockSize::B512).unwrap()
}

fn switch(name: &str, root: &Arc<dyn Volume>) -> Arc<Switch> {
    Switch::new(name, Arc::clone(root))
}

fn copier(source: &Arc<dyn Volume>, target: &Arc<dyn Volume>) -> Copier {
    Copier::new(switch("source", source), switch("target", target), Arc::new(Here)).unwrap()
}

/// Copies everything from a byte on, in steps of so many.
fn finish(copier: &mut Copier, from: u64, most: u64) -> Result<(), CopyError> {
    let mut at = from;
    while at < copier.bytes() {
        let next = copier.step(at, most)?;
        assert!(next > at && next <= copier.bytes(), "from {at} to {next}");
        at = next;
    }
    copier.flush()
}

fn read_all(volume: &Arc<dyn Volume>) -> Vec<u8> {
    legs::read(volume, 0, volume.geometry().bytes() as usize).unwrap()
}

/// Random bytes in some places, zeroes elsewhere.
fn patchy(random: &mut Random, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    for _ in 0..8 {
        let at = random.below(bytes / 512) * 512;
        let len = (1 + random.below(200)) * 512;
        let len = len.min(bytes - at) as usize;
        data[at as usize..][..len].copy_from_slice(&random.bytes(len));
    }
    data
}

fn dirt(bytes: u64) -> Vec<u8> {
    vec![0xd1; bytes as usize]
}

#[test]
fn a_target_has_what_its_source_has_and_keeps_what_lies_beyond() {
    let mut random = Random::new(SEED);
    for most in [4 * KIB, 100 * KIB, 1 << 30] {
        let bytes = 2048 * KIB + 512 * random.below(64);
        let (source, target) = (memory(bytes), memory(bytes + 64 * KIB));
        let data = patchy(&mut random, bytes);
        legs::write(&source, 0, data.clone()).unwrap();
        legs::write(&target, 0, dirt(bytes + 64 * KIB)).unwrap();
        let mut copier = copier(&source, &target);
        finish(&mut copier, 0, most).unwrap();
        let found = read_all(&target);
        assert!(found[..data.len()] == data, "steps of {most}");
        assert!(found[data.len()..] == dirt(64 * KIB));
        let Copied { moved, offloaded, skipped } = copier.copied();
        assert_eq!((moved + skipped, offloaded), (bytes, 0));
        assert!(skipped > 0 && moved > 0, "{:?}", copier.copied());
    }
}

#[test]
fn blocks_of_one_size_are_copied_to_blocks_of_another() {
    let (mut random, bytes) = (Random::new(SEED), 1024 * KIB);
    for sizes in [[BlockSize::B512, BlockSize::B4096], [BlockSize::B4096, BlockSize::B512]] {
        let [source, target] = sizes.map(|size| MemoryVolume::create("memory", bytes, size).unwrap() as Arc<dyn Volume>);
        let data = patchy(&mut random, bytes);
        legs::write(&source, 0, data.clone()).unwrap();
        legs::write(&target, 0, dirt(bytes)).unwrap();
        finish(&mut copier(&source, &target), 0, 10 * KIB).unwrap();
        assert!(read_all(&target) == data, "from {:?} to {:?}", sizes[0], sizes[1]);
        // It goes on from where a step ended when blocks were smaller.
        legs::write(&target, 0, dirt(4 * KIB)).unwrap();
        finish(&mut copier(&source, &target), 512, 10 * KIB).unwrap();
        assert!(read_all(&target) == data);
    }
}

fn file(path: &std::path::Path, bytes: u64) -> Arc<dyn Volume> {
    let options = FileOptions { path: path.to_owned(), size: Some(bytes), block_size: BlockSize::B4096, read_only: false };
    FileVolume::open("file", &options).unwrap()
}

#[test]
fn holes_of_files_are_skipped_and_the_system_copies_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = 4 << 30;
    let source = file(&directory.path().join("source"), bytes);
    let target = file(&directory.path().join("target"), bytes);
    let places = [0, 1 << 30, (3 << 30) + 4096, bytes - 8192];
    let mut random = Random::new(SEED);
    let pieces: Vec<_> = places.iter().map(|_| random.bytes(8192)).collect();
    for (at, piece) in places.iter().zip(&pieces) {
        legs::write(&source, *at, piece.clone()).unwrap();
    }
    legs::write(&target, 2 << 30, vec![0xd1; 1 << 20]).unwrap();
    let mut copier = copier(&source, &target);
    // Whatever the file system is.
    copier.offload = true;
    finish(&mut copier, 0, 8 << 20).unwrap();
    for (at, piece) in places.iter().zip(&pieces) {
        assert!(legs::read(&target, *at, 8192).unwrap() == *piece, "at {at}");
    }
    assert!(legs::read(&target, 2 << 30, 1 << 20).unwrap() == vec![0; 1 << 20], "a hole of the source is one of the target");
    let Copied { moved, offloaded, skipped } = copier.copied();
    assert_eq!((moved, offloaded + skipped), (0, bytes), "no byte comes through here");
    assert!(skipped > bytes - (4 << 20) && offloaded > 0, "{:?}", copier.copied());
    assert!(target.usage().allocated < 4 << 20, "{:?}", target.usage());
}

#[test]
fn what_is_exchanged_meanwhile_is_read_where_it_is_now() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = 256 * KIB;
    let (old, new) = (file(&directory.path().join("old"), bytes), file(&directory.path().join("new"), bytes));
    let target = file(&directory.path().join("target"), bytes);
    let mut random = Random::new(SEED);
    let data = random.bytes(bytes as usize);
    legs::write(&old, 0, data.clone()).unwrap();
    let newer: Vec<u8> = data.iter().map(|byte| !byte).collect();
    legs::write(&new, 0, newer.clone()).unwrap();
    let source = switch("source", &old);
    let mut copier = Copier::new(Arc::clone(&source), switch("target", &target), Arc::new(Here)).unwrap();
    copier.offload = true;
    let half = copier.step(0, 128 * KIB).unwrap();
    source.change(&new, std::time::Duration::from_secs(10), || Ok::<_, ()>(())).unwrap();
    finish(&mut copier, half, 64 * KIB).unwrap();
    let found = read_all(&target);
    assert!(found[..half as usize] == data[..half as usize] && found[half as usize..] == newer[half as usize..]);
}

#[test]
fn volumes_that_do_not_fit_are_refused() {
    let refused = |source: &Arc<dyn Volume>, target: &Arc<dyn Volume>| {
        let made = Copier::new(switch("source", source), switch("target", target), Arc::new(Here));
        made.err().unwrap().to_string()
    };
    let large = MemoryVolume::create("memory", 64 * KIB, BlockSize::B4096).unwrap() as Arc<dyn Volume>;
    let (small, usual) = (memory(63 * KIB), memory(64 * KIB));
    assert_eq!(
        refused(&usual, &small),
        "volume target has 64512 bytes, and volume source 65536: make the target as large first"
    );
    assert_eq!(
        refused(&small, &large),
        "volume source has 64512 bytes, and volume target blocks of 4096: it must be a multiple"
    );
    let mut copier = copier(&small, &usual);
    small.resize(BlockCount(16)).unwrap();
    let error = copier.step(0, 4096).unwrap_err().to_string();
    assert_eq!(error, "volume source has 8192 bytes now, and had 64512 when the copy began");
}

#[test]
fn the_volume_that_fails_is_named_and_the_copy_can_go_on() {
    for (kind, expected) in [
        (Kind::Read, "volume source cannot be read at byte 131072: unrecovered read error (errno 5)"),
        (Kind::Write, "volume target cannot be written at byte 131072: write fault (errno 5)"),
    ] {
        let (source, target) = (FaultVolume::new(memory(512 * KIB), SEED), FaultVolume::new(memory(512 * KIB), SEED));
        let data = Random::new(SEED).bytes(512 << 10);
        let (from, to) = (Arc::clone(&source) as Arc<dyn Volume>, Arc::clone(&target) as Arc<dyn Volume>);
        legs::write(&from, 0, data.clone()).unwrap();
        let error = match kind {
            Kind::Read => BlockError::ReadFault { errno: 5 },
            _ => BlockError::WriteFault { errno: 5 },
        };
        let rule = Rule { range: Some((Lba(256), BlockCount(1))), ..Rule::new(kind, When::Always, Effect::Fail(error)) };
        if kind == Kind::Read {
            source.add(rule);
        } else {
            target.add(rule);
        }
        let mut copier = copier(&from, &to);
        let error = finish(&mut copier, 0, 256 * KIB).unwrap_err();
        assert_eq!(error.to_string(), expected);
        source.clear();
        target.clear();
        finish(&mut copier, 0, 256 * KIB).unwrap();
        assert!(read_all(&to) == data);
    }
}

/// Blocks of the volumes that are copied with interruptions.
const BLOCKS: u64 = 1200;

/// A copy is interrupted by a power cut, and goes on from where it was durable; then the power goes once more. How many boundaries
/// there were before the first cut.
fn interrupted(seed: u64, data: &[u8], cut: u64) -> u64 {
    let rig = Rig::new(seed, 2, BLOCKS, BlockSize::B512);
    let disks = rig.volumes();
    let mut random = Random::new(!seed);
    rig.disks[0].spoil(0, data);
    rig.disks[1].spoil(0, &dirt(BLOCKS * 512));
    let start = rig.power.boundaries();
    let power: &Power = &rig.power;
    power.cut_at(cut);
    let (mut at, mut stored) = (0, 0);
    let mut copying = copier(&disks[0], &disks[1]);
    let result: Result<(), CopyError> = loop {
        if at == copying.bytes() {
            break copying.flush();
        }
        match copying.step(at, (1 + random.below(20)) * 4096) {
            Ok(next) => at = next,
            Err(error) => break Err(error),
        }
        if random.below(3) == 0 {
            match copying.flush() {
                Ok(()) => stored = at,
                Err(error) => break Err(error),
            }
        }
    };
    assert!(result.is_ok() || power.is_gone(), "{result:?}");
    let boundaries = power.boundaries() - start;
    rig.restart();
    finish(&mut copier(&disks[0], &disks[1]), stored, 64 * KIB).unwrap();
    rig.restart();
    assert!(rig.disks[1].durable() == data, "after a copy that went on at {stored}");
    assert!(rig.disks[0].durable() == data, "the source is as it was");
    boundaries
}

#[test]
fn a_copy_that_goes_on_after_a_power_cut_leaves_nothing_out() {
    let mut prepared = (0, Vec::new());
    every_cut("copies and power cuts", SEED, 10_000, |seed, cut| {
        if cut == NO_CUT {
            prepared = (seed, patchy(&mut Random::new(seed), BLOCKS * 512));
        }
        assert_eq!(prepared.0, seed);
        interrupted(seed, &prepared.1, cut)
    });
}
