//! Copies as a whole: volumes of every kind, failures, and power cuts.

use millrace_backends::{
    FileOptions, FileVolume, MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockSize, METADATA_SIZE, NO_METADATA, TaggedRequest,
    conformance::{Power, Random},
};
use millrace_memory::BUFFER_SIZE;

use super::*;
use crate::{
    Reason,
    background::{Running, Stop, Task},
    testing::{NO_CUT, Rig, every_cut, graph},
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

/// A rate is of what the volumes have to do, and holes that the source knows cost them nothing.
#[test]
fn zeroes_that_are_read_count_as_work_and_holes_do_not() {
    let bytes = 1024 * KIB;
    let mut read = copier(&memory(bytes), &memory(bytes));
    assert_eq!((read.step(0, 100 * KIB).unwrap(), read.worked()), (100 * KIB, 100 * KIB));
    finish(&mut read, 100 * KIB, 100 * KIB).unwrap();
    assert_eq!((read.worked(), read.copied().skipped), (bytes, bytes));
    let directory = tempfile::tempdir().unwrap();
    let mut known = copier(&file(&directory.path().join("source"), bytes), &memory(bytes));
    finish(&mut known, 0, 100 * KIB).unwrap();
    assert_eq!((known.worked(), known.copied().skipped), (0, bytes));
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

/// A volume of so many bytes, with metadata of these settings.
fn with_metadata(settings: &str, bytes: u64, block_size: BlockSize) -> Arc<dyn Volume> {
    let leg = MemoryVolume::create("leg", 2 * bytes + 256 * KIB, block_size).unwrap() as Arc<dyn Volume>;
    let stack = format!("metadata({settings}, disk:0)");
    Arc::clone(graph(&stack, &[leg], Some(bytes), Reason::Create, &Arc::default()).unwrap().volume())
}

/// Bytes that [`tagged`] moves with one request, at most.
const HALF: usize = BUFFER_SIZE / 2;

/// Reads or writes blocks with their metadata, from the first on; what was in memory afterwards.
fn tagged(volume: &Arc<dyn Volume>, operation: Operation, mut data: Vec<u8>, mut tags: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let volume = Arc::clone(volume);
    let moved = legs::block_on(move |cx| {
        Box::pin(async move {
            let shift = volume.geometry().block_size.shift();
            let buffer = cx.buffers.take().await;
            let all = buffer.segment(BUFFER_SIZE);
            let pieces = data.chunks_mut(HALF).zip(tags.chunks_mut((HALF >> shift) * METADATA_SIZE));
            for (number, (data, tags)) in pieces.enumerate() {
                let (blocks, metadata) = (all.part(0, data.len()).unwrap(), all.part(HALF, tags.len()).unwrap());
                blocks.write_at(0, data);
                metadata.write_at(0, tags);
                let (lba, count) = (Lba(((number * HALF) >> shift) as u64), BlockCount((data.len() >> shift) as u64));
                let request = TaggedRequest { operation, lba, count, data: blocks, metadata };
                let arena = cx.scratch.carve_rest();
                volume.submit_tagged(cx.deeper().with_scratch(&arena), request).await.unwrap();
                blocks.read_at(0, data);
                metadata.read_at(0, tags);
            }
            (data, tags)
        })
    });
    moved.unwrap()
}

const WRITE: Operation = Operation::Write { fua: false };

/// All blocks of a volume and their metadata.
fn read_tagged(volume: &Arc<dyn Volume>) -> (Vec<u8>, Vec<u8>) {
    let geometry = volume.geometry();
    let (data, tags) = (vec![0; geometry.bytes() as usize], vec![0; geometry.blocks.0 as usize * METADATA_SIZE]);
    tagged(volume, Operation::Read, data, tags)
}

/// Blocks with metadata that do not fit their data, which is nobody's matter here; those of the second half have none.
fn patchy_with_tags(random: &mut Random, bytes: u64, block_size: BlockSize) -> (Vec<u8>, Vec<u8>) {
    let mut data = patchy(random, bytes);
    let blocks = data.len() / block_size.bytes() as usize;
    // The first blocks have data, and zeroes have metadata of their own; so have the last, without.
    data[..8192].fill(0x5a);
    let end = data.len();
    data[end / 2 - 8192..end / 2].fill(0);
    data[end - 8192..].fill(0xa5);
    let mut tags = random.bytes(blocks / 2 * METADATA_SIZE);
    tags.resize(blocks * METADATA_SIZE, NO_METADATA[0]);
    (data, tags)
}

#[test]
fn metadata_go_with_their_blocks() {
    let (mut random, bytes) = (Random::new(SEED), 1024 * KIB);
    for (block_size, settings) in [
        (BlockSize::B512, "protection=1"),
        (BlockSize::B4096, "protection=2, transfer=extended"),
        (BlockSize::B512, "protection=3"),
        (BlockSize::B4096, "protection=none"),
    ] {
        let [source, target] = [(); 2].map(|()| with_metadata(settings, bytes, block_size));
        let (data, tags) = patchy_with_tags(&mut random, bytes, block_size);
        tagged(&source, WRITE, data.clone(), tags.clone());
        tagged(&target, WRITE, dirt(bytes), vec![0x77; tags.len()]);
        let mut copier = copier(&source, &target);
        finish(&mut copier, 0, 100 * KIB).unwrap();
        let found = read_tagged(&target);
        assert!(found.0 == data, "data, {settings}");
        assert!(found.1 == tags, "metadata, {settings}");
        let Copied { moved, offloaded, skipped } = copier.copied();
        assert_eq!((moved + skipped, offloaded), (bytes, 0));
    }
}

#[test]
fn blocks_without_metadata_have_none_on_a_target_that_keeps_them() {
    let bytes = 256 * KIB;
    let (source, target) = (memory(bytes), with_metadata("protection=1", bytes, BlockSize::B512));
    let data = patchy(&mut Random::new(SEED), bytes);
    legs::write(&source, 0, data.clone()).unwrap();
    let tags = vec![0x77; data.len() / 512 * METADATA_SIZE];
    tagged(&target, WRITE, dirt(bytes), tags.clone());
    finish(&mut copier(&source, &target), 0, 64 * KIB).unwrap();
    assert!(read_tagged(&target) == (data, vec![NO_METADATA[0]; tags.len()]));
}

#[test]
fn metadata_that_the_target_would_not_have_are_refused_by_name() {
    let bytes = 64 * KIB;
    let source = with_metadata("protection=1", bytes, BlockSize::B512);
    let refused = |target: &Arc<dyn Volume>| {
        let made = Copier::new(switch("source", &source), switch("target", target), Arc::new(Here));
        made.err().unwrap().to_string()
    };
    let lost = "volume source has metadata with its blocks, which would be lost";
    let own = "metadata(protection=1, transfer=separate, position=last)";
    assert_eq!(refused(&memory(bytes)), format!("{lost}: volume target keeps none; use a target with {own}"));
    let other = with_metadata("protection=3, transfer=extended", bytes, BlockSize::B512);
    assert_eq!(
        refused(&other),
        format!(
            "volume source has {own}, and volume target metadata(protection=3, transfer=extended, position=last): make the \
             target with the source's settings"
        )
    );
    other.format_metadata(None).unwrap();
    assert_eq!(refused(&other), format!("{lost}: volume target shows none now; format it with them, or use one with {own}"));
    assert_eq!(
        refused(&with_metadata("protection=1", bytes, BlockSize::B4096)),
        "volume source has metadata with blocks of 512 bytes, and volume target with blocks of 4096: make the target with \
         the source's block size"
    );
    // Where nobody keeps the guest of the source from choosing again.
    let target = with_metadata("protection=1", bytes, BlockSize::B512);
    let mut copier = copier(&source, &target);
    let at = copier.step(0, 4096).unwrap();
    let type_2 = MetadataFormat { protection: 2, ..MetadataFormat::default() };
    source.format_metadata(Some(type_2)).unwrap();
    let error = copier.step(at, 4096).unwrap_err().to_string();
    assert!(error.starts_with("volume source has metadata(protection=2, "), "{error}");
}

/// Blocks of the volumes that are copied with interruptions.
const BLOCKS: u64 = 1200;

/// Copies in steps of any size, with a flush here and there, until everything is copied or the power goes. How far it was durable.
fn copy_until_cut(copying: &mut Copier, power: &Power, random: &mut Random) -> u64 {
    let (mut at, mut stored) = (0, 0);
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
    stored
}

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
    let stored = copy_until_cut(&mut copier(&disks[0], &disks[1]), power, &mut random);
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

/// Blocks of volumes with metadata that are copied with interruptions: of several groups, each with pages of its own.
const TAGGED_BLOCKS: u64 = 400;

/// Volumes with metadata over the disks.
fn mounted(rig: &Rig, reason: Reason) -> [Arc<dyn Volume>; 2] {
    let disks = rig.volumes();
    [0, 1].map(|at| {
        let made = graph("metadata(disk:0)", &disks[at..=at], Some(TAGGED_BLOCKS * 512), reason, &rig.kept);
        Arc::clone(made.unwrap().volume())
    })
}

fn flush(volume: &Arc<dyn Volume>) {
    let volume = Arc::clone(volume);
    legs::block_on(move |cx| Box::pin(async move { legs::flush(cx, &*volume).await })).unwrap().unwrap();
}

/// [`interrupted`], with metadata.
fn interrupted_with_metadata(seed: u64, (data, tags): &(Vec<u8>, Vec<u8>), cut: u64) -> u64 {
    let rig = Rig::new(seed, 2, 2 * TAGGED_BLOCKS, BlockSize::B512);
    let power: &Power = &rig.power;
    let [source, target] = mounted(&rig, Reason::Create);
    tagged(&source, WRITE, data.clone(), tags.clone());
    tagged(&target, WRITE, dirt(TAGGED_BLOCKS * 512), vec![0x77; tags.len()]);
    flush(&source);
    flush(&target);
    let start = power.boundaries();
    power.cut_at(cut);
    let stored = copy_until_cut(&mut copier(&source, &target), power, &mut Random::new(!seed));
    let boundaries = power.boundaries() - start;
    drop((source, target));
    rig.restart();
    let [source, target] = mounted(&rig, Reason::Open);
    finish(&mut copier(&source, &target), stored, 64 * KIB).unwrap();
    drop((source, target));
    rig.restart();
    for (volume, name) in mounted(&rig, Reason::Open).iter().zip(["source", "target"]) {
        let found = read_tagged(volume);
        assert!(found.0 == *data, "data of the {name} after a copy that went on at {stored}");
        assert!(found.1 == *tags, "metadata of the {name} after a copy that went on at {stored}");
    }
    boundaries
}

#[test]
fn a_copy_with_metadata_that_goes_on_after_a_power_cut_leaves_nothing_out() {
    let mut prepared = (0, (Vec::new(), Vec::new()));
    every_cut("copies with metadata and power cuts", SEED, 1000, |seed, cut| {
        if cut == NO_CUT {
            prepared = (seed, patchy_with_tags(&mut Random::new(seed), TAGGED_BLOCKS * 512, BlockSize::B512));
        }
        assert_eq!(prepared.0, seed);
        interrupted_with_metadata(seed, &prepared.1, cut)
    });
}
