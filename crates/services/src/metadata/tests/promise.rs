//! What it promises beyond data: which metadata a block has after plain writes, failures, restarts and other sizes.

use std::sync::Arc;

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Metadata, MetadataFormat, NO_METADATA, Operation, Step, TaggedRequest,
    TaskContext, Volume, VolumeError,
    conformance::{Bench, Job, SyncHarness},
};
use millrace_memory::Segment;

use super::{
    super::page::{PAGE, block_start, group_start},
    SEED, Woven, disk, job, open, tag_of,
};
use crate::{
    Health, LegOrigin, Mount, Reason,
    graph::Graph,
    legs,
    testing::{
        Formatted, grow_over_what_was_there,
        waiting::{Gate, copy_and_write},
    },
};

const SIZE: BlockSize = BlockSize::B512;
const FAULT: BlockError = BlockError::WriteFault { errno: 5 };

/// Writes and reads single blocks, each of one byte, with metadata of another one.
struct Probe(Arc<dyn Volume>);

impl Probe {
    fn over(volume: &Arc<dyn Volume>) -> Self {
        Self(Arc::clone(volume))
    }

    fn run(&self, operation: Operation, lba: u64, data: &[u8], tag: [u8; 8]) -> (Result<(), BlockError>, Vec<u8>, [u8; 8]) {
        let (lba, len, volume) = (Lba(lba), data.len(), Arc::clone(&self.0));
        let data = data.to_vec();
        let result = legs::block_on(move |cx: TaskContext<'_>| {
            Box::pin(async move {
                let buffer = cx.buffers.take().await;
                let all: Segment = buffer.segment(len + 8);
                let (block, metadata) = (all.part(0, len).unwrap(), all.part(len, 8).unwrap());
                block.write_at(0, &data);
                metadata.write_at(0, &tag);
                let request = TaggedRequest { operation, lba, count: BlockCount(1), data: block, metadata };
                let step: Step<'_> = volume.submit_tagged(cx.deeper(), request);
                let result = step.await;
                let (mut data, mut tag) = (vec![0; len], [0; 8]);
                block.read_at(0, &mut data);
                metadata.read_at(0, &mut tag);
                (result, data, tag)
            })
        });
        result.unwrap()
    }

    fn write(&self, lba: u64, byte: u8, tag: u8) -> Result<(), BlockError> {
        self.run(Operation::Write { fua: false }, lba, &[byte; 512], [tag; 8]).0
    }

    /// The block's first byte and its metadata; all bytes of each are the same.
    fn read(&self, lba: u64) -> Result<(u8, u8), BlockError> {
        let (result, data, tag) = self.run(Operation::Read, lba, &[0x77; 512], [0x77; 8]);
        assert!(result.is_err() || data.iter().all(|byte| *byte == data[0]) && tag.iter().all(|byte| *byte == tag[0]));
        result.map(|()| (data[0], tag[0]))
    }
}

fn on_bench(volume: &Arc<dyn Volume>, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(volume), SEED));
}

fn over(faulty: &Arc<FaultVolume>, reason: Reason) -> Graph {
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(faulty);
    open(&volume, reason).unwrap()
}

/// The process dies.
fn kill(mut graph: Graph) {
    graph.tasks.clear();
}

#[test]
fn metadata_stay_until_the_block_is_written_without() {
    let disk = disk(500, SIZE);
    let mut graph = open(&disk, Reason::Create).unwrap();
    let probe = Probe::over(graph.volume());
    assert_eq!(probe.read(0), Ok((0, NO_METADATA[0])), "never written");
    for lba in [0, 159, 160, 499] {
        probe.write(lba, 1, 2).unwrap();
    }
    on_bench(graph.volume(), |bench| {
        let plain = job(bench, Operation::Write { fua: true }, 159, 3);
        bench.job(plain).unwrap();
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 160, 1).unwrap();
        bench.plain(Operation::Copy { source: Lba(0) }, 1, 1).unwrap();
    });
    for reopened in [false, true] {
        if reopened {
            graph.unmount();
            graph = open(&disk, Reason::Open).unwrap();
        }
        let probe = Probe::over(graph.volume());
        let found = [0, 159, 160, 499, 1, 2].map(|lba| probe.read(lba).unwrap());
        assert_eq!(found, [(1, 2), (3, 0xff), (0, 0xff), (1, 2), (1, 0xff), (0, 0xff)]);
    }
}

/// The flush was for another group's page: what was acknowledged may be lost with it, and its next flush succeeds.
#[test]
fn the_guest_is_told_what_a_leg_forgot_in_a_flush_for_a_page() {
    let faulty = FaultVolume::new(disk(500, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    let probe = Probe::over(graph.volume());
    probe.write(7, 1, 2).unwrap();
    faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
    assert_eq!(probe.write(300, 1, 2), Err(FAULT));
    on_bench(graph.volume(), |bench| {
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()), "once");
    });
    probe.write(300, 1, 3).unwrap();
    assert_eq!(probe.read(300), Ok((1, 3)));
}

/// The flush was for what the volume grew by. The group is whole, so that no other flush comes before.
#[test]
fn the_guest_is_told_what_a_leg_forgot_when_the_volume_grew() {
    let faulty = FaultVolume::new(disk(480, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    Probe::over(graph.volume()).write(7, 1, 2).unwrap();
    faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
    assert!(graph.volume().resize(BlockCount(640)).is_err());
    on_bench(graph.volume(), |bench| {
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())]);
    });
    graph.volume().resize(BlockCount(640)).unwrap();
}

/// The flush was for the header's word that blocks are being erased. Nothing was yet, so the volume goes on.
#[test]
fn the_guest_is_told_what_a_leg_forgot_in_a_format() {
    let faulty = FaultVolume::new(disk(480, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    Probe::over(graph.volume()).write(7, 1, 2).unwrap();
    faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
    assert!(graph.volume().format(SIZE).is_err());
    on_bench(graph.volume(), |bench| {
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())]);
    });
}

#[test]
fn the_newest_metadata_count_although_the_data_are_the_same() {
    for seed in 0..20 {
        let faulty = FaultVolume::new(disk(300, SIZE), seed);
        faulty.hold_writes();
        let graph = over(&faulty, Reason::Create);
        let probe = Probe::over(graph.volume());
        for tag in 1..5 {
            probe.write(7, 1, tag).unwrap();
        }
        probe.write(8, 0, 9).unwrap();
        on_bench(graph.volume(), |bench| {
            bench.plain(Operation::Deallocate, 8, 1).unwrap();
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        kill(graph);
        faulty.power_loss();
        let graph = over(&faulty, Reason::Open);
        let probe = Probe::over(graph.volume());
        assert_eq!((probe.read(7), probe.read(8)), (Ok((1, 4)), Ok((0, 0xff))));
    }
}

/// Blocks that got their first metadata in this run, and rot afterwards, keep them: whoever checks them is told.
#[test]
fn rotten_blocks_keep_their_metadata() {
    for clean in [true, false] {
        let disk = disk(300, SIZE);
        let rot = |lba: u64| legs::write(&disk, block_start(lba, SIZE), vec![9; 512]).unwrap();
        let mut graph = open(&disk, Reason::Create).unwrap();
        let probe = Probe::over(graph.volume());
        probe.write(7, 1, 2).unwrap();
        on_bench(graph.volume(), |bench| bench.plain(Operation::Flush, 0, 0).unwrap());
        if clean {
            graph.unmount();
        } else {
            // The next one finds the data that belong to them; from its next page on they are sure.
            kill(graph);
            let graph = open(&disk, Reason::Open).unwrap();
            let probe = Probe::over(graph.volume());
            assert_eq!(probe.read(7), Ok((1, 2)));
            probe.write(8, 3, 4).unwrap();
            kill(graph);
        }
        rot(7);
        for _ in 0..2 {
            let mut graph = open(&disk, Reason::Open).unwrap();
            let probe = Probe::over(graph.volume());
            assert_eq!(probe.read(7), Ok((9, 2)), "stopped well: {clean}");
            rot(20);
            assert_eq!(probe.read(20), Ok((9, 0xff)), "it never had any");
            graph.unmount();
        }
    }
}

#[test]
fn a_failed_write_leaves_the_old_block_or_the_new_one() {
    let kinds = [(Requests::Write, 1), (Requests::Write, 2), (Requests::Flush, 1)];
    for (kind, nth) in kinds {
        for effect in [Effect::Tear, Effect::Fail(BlockError::WriteFault { errno: 5 })] {
            for seed in 0..10 {
                let faulty = FaultVolume::new(disk(300, SIZE), seed);
                faulty.hold_writes();
                let graph = over(&faulty, Reason::Create);
                let probe = Probe::over(graph.volume());
                probe.write(3, 1, 1).unwrap();
                faulty.add(Rule::new(kind, When::Nth(nth), effect));
                assert!(probe.write(3, 2, 2).is_err());
                faulty.clear();
                let found = probe.read(3);
                assert!([Ok((1, 1)), Ok((2, 2))].contains(&found), "{found:?}");
                // And once more, over one that nobody has looked at.
                faulty.add(Rule::new(kind, When::Nth(nth), effect));
                assert!(probe.write(3, 4, 4).is_err());
                faulty.clear();
                probe.write(3, 5, 5).unwrap();
                assert_eq!(probe.read(3), Ok((5, 5)));
                on_bench(graph.volume(), |bench| {
                    // What a flush of its own may have lost is told once.
                    let told = bench.plain(Operation::Flush, 0, 0);
                    assert_eq!(told.is_err(), kind == Requests::Flush);
                    bench.plain(Operation::Flush, 0, 0).unwrap();
                });
                probe.write(3, 6, 6).unwrap();
                kill(graph);
                faulty.power_loss();
                let found = Probe::over(over(&faulty, Reason::Open).volume()).read(3);
                assert!([Ok((5, 5)), Ok((6, 6))].contains(&found), "{found:?}");
            }
        }
    }
}

#[test]
fn damaged_pages_cost_no_more_than_they_must() {
    let spoil = |disk: &Arc<dyn Volume>, group: u64, copy: u64| {
        let start = group_start(group, SIZE) + copy * PAGE as u64 + 512;
        let mut bytes = legs::read(disk, start, 512).unwrap();
        bytes[100] ^= 0x80;
        legs::write(disk, start, bytes).unwrap();
    };
    for (copies, lost) in [(vec![0], false), (vec![1], false), (vec![0, 1], true)] {
        let disk = disk(500, SIZE);
        let mut graph = open(&disk, Reason::Create).unwrap();
        let probe = Probe::over(graph.volume());
        probe.write(170, 1, 1).unwrap();
        probe.write(171, 1, 1).unwrap();
        probe.write(3, 3, 3).unwrap();
        graph.unmount();
        for copy in &copies {
            spoil(&disk, 1, *copy);
        }
        let graph = open(&disk, Reason::Open).unwrap();
        let probe = Probe::over(graph.volume());
        assert_eq!(probe.read(3), Ok((3, 3)));
        let fault = Err(BlockError::ReadFault { errno: 0 });
        assert_eq!(probe.read(170), if lost { fault } else { Ok((1, 1)) }, "{copies:?}");
        assert_eq!(graph.services("metadata")[0].1.status().facts.len(), if lost { 2 } else { 1 });
        // Data are there all the same, and what is written is whole again.
        on_bench(graph.volume(), |bench| bench.expect(170, &[1; 1024]));
        probe.write(170, 5, 5).unwrap();
        assert_eq!(probe.read(170), Ok((5, 5)));
        assert_eq!(probe.read(171), if lost { fault } else { Ok((1, 1)) });
    }
}

/// A fault of reads of a group's page in this place.
fn unreadable(group: u64, place: u64) -> Rule {
    let start = group_start(group, SIZE) + place * PAGE as u64;
    let range = Some((Lba(start >> SIZE.shift()), BlockCount(PAGE as u64 >> SIZE.shift())));
    Rule { range, ..Rule::new(Requests::Read, When::Always, Effect::Fail(BlockError::ReadFault { errno: 5 })) }
}

#[test]
fn the_only_page_is_missed_when_it_cannot_be_read() {
    for is_written in [false, true] {
        let faulty = FaultVolume::new(disk(500, SIZE), SEED);
        let graph = over(&faulty, Reason::Create);
        Probe::over(graph.volume()).write(170, 1, 1).unwrap();
        kill(graph);
        let graph = over(&faulty, Reason::Open);
        let probe = Probe::over(graph.volume());
        // The first page comes to the second place.
        faulty.add(unreadable(1, 1));
        assert_eq!(probe.read(170), Err(BlockError::ReadFault { errno: 5 }));
        on_bench(graph.volume(), |bench| bench.expect(170, &[1; 512]));
        if is_written {
            probe.write(171, 2, 2).unwrap();
        }
        faulty.clear();
        let expected = if is_written { Err(BlockError::ReadFault { errno: 0 }) } else { Ok((1, 1)) };
        assert_eq!(probe.read(170), expected, "what is written takes its place");
        assert_eq!(graph.services("metadata")[0].1.status().facts.len(), if is_written { 2 } else { 1 });
        probe.write(171, 2, 2).unwrap();
        kill(graph);
        let graph = over(&faulty, Reason::Open);
        let probe = Probe::over(graph.volume());
        assert_eq!((probe.read(170), probe.read(171)), (expected, Ok((2, 2))));
    }
}

#[test]
fn a_page_that_could_not_be_read_does_not_come_back_over_what_was_written() {
    let disk = disk(500, SIZE);
    let faulty = FaultVolume::new(Arc::clone(&disk), SEED);
    let mut graph = over(&faulty, Reason::Create);
    Probe::over(graph.volume()).write(170, 1, 1).unwrap();
    // The page of the close, the second one, comes to the first place, and has nothing but the newest.
    graph.unmount();
    drop(graph);
    legs::write(&disk, group_start(1, SIZE) + PAGE as u64, vec![0x80; PAGE]).unwrap();
    faulty.add(unreadable(1, 0));
    let graph = over(&faulty, Reason::Open);
    Probe::over(graph.volume()).write(170, 5, 5).unwrap();
    kill(graph);
    faulty.clear();
    let graph = over(&faulty, Reason::Open);
    assert_eq!(Probe::over(graph.volume()).read(170), Ok((5, 5)));
}

#[test]
fn what_the_newer_page_may_have_said_is_not_made_up() {
    let faulty = FaultVolume::new(disk(500, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let probe = Probe::over(graph.volume());
    probe.write(170, 1, 1).unwrap();
    probe.write(171, 2, 2).unwrap();
    kill(graph);
    let mut graph = over(&faulty, Reason::Open);
    let probe = Probe::over(graph.volume());
    faulty.add(unreadable(1, 0));
    let found = [170, 171, 172].map(|lba| probe.read(lba));
    let lost = Err(BlockError::ReadFault { errno: 0 });
    assert_eq!(found, [Ok((1, 1)), lost, lost]);
    assert_eq!(graph.services("metadata")[0].1.status().health, Health::Degraded);
    // Nothing was written: it is there when it can be read again.
    graph.unmount();
    faulty.clear();
    let graph = over(&faulty, Reason::Open);
    let probe = Probe::over(graph.volume());
    let found = [170, 171, 172].map(|lba| probe.read(lba));
    assert_eq!(found, [Ok((1, 1)), Ok((2, 2)), Ok((0, 0xff))]);
}

#[test]
fn what_a_volume_grows_by_has_no_metadata() {
    let disk = disk(500, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    let probe = Probe::over(graph.volume());
    for lba in [9, 170, 400] {
        probe.write(lba, 1, 1).unwrap();
    }
    graph.volume().resize(BlockCount(165)).unwrap();
    assert_eq!(probe.read(170), Err(BlockError::OutOfRange));
    graph.volume().resize(BlockCount(500)).unwrap();
    assert_eq!([9, 170, 400].map(|lba| probe.read(lba).unwrap()), [(1, 1), (0, 0xff), (0, 0xff)]);
    kill(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    let probe = Probe::over(graph.volume());
    assert_eq!([9, 170, 400].map(|lba| probe.read(lba).unwrap()), [(1, 1), (0, 0xff), (0, 0xff)]);
}

#[test]
fn what_was_cut_off_from_blocks_that_were_not_looked_at_has_no_metadata() {
    let disk = disk(500, SIZE);
    let mut graph = open(&disk, Reason::Create).unwrap();
    Probe::over(graph.volume()).write(170, 1, 1).unwrap();
    graph.unmount();
    let graph = open(&disk, Reason::Open).unwrap();
    graph.volume().resize(BlockCount(169)).unwrap();
    graph.volume().resize(BlockCount(500)).unwrap();
    kill(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    assert_eq!(Probe::over(graph.volume()).read(170), Ok((0, 0xff)));
}

#[test]
fn the_form_of_metadata_is_remembered_and_a_format_erases_them() {
    let disk = disk(700, SIZE);
    let mut graph = open(&disk, Reason::Create).unwrap();
    let shown = |format| Metadata::Shown(format);
    assert_eq!(graph.volume().metadata(), shown(MetadataFormat { protection: 1, ..MetadataFormat::default() }));
    let forms = (0..16).map(MetadataFormat::from_bits).chain([None]);
    for form in forms {
        let block_size = if form.is_some_and(|form| form.first) { BlockSize::B4096 } else { SIZE };
        graph.volume().format(block_size).unwrap();
        graph.volume().format_metadata(form).unwrap();
        graph.unmount();
        graph = open(&disk, Reason::Open).unwrap();
        assert_eq!(graph.volume().metadata(), form.map_or(Metadata::Hidden, shown));
        assert_eq!(graph.volume().geometry().block_size, block_size);
        let view = Woven::over(graph.volume());
        on_bench(&view, |bench| {
            bench.expect_zeroes(0, bench.blocks());
            bench.write_random(0, bench.blocks());
        });
    }
    let status = graph.services("metadata")[0].1.status();
    assert!(status.facts[0].1.contains("not shown"), "{status:?}");
    let plain: Arc<dyn Volume> = disk;
    assert_eq!(plain.metadata(), Metadata::Never);
    assert!(plain.format_metadata(None).is_err());
}

/// One store of the header fails, or two: what is shown is as it was after a restart, too, or the volume is closed until it is formatted.
#[test]
fn another_form_that_could_not_be_stored_is_not_there_after_a_restart() {
    for failures in [1, 2] {
        let faulty = FaultVolume::new(disk(500, SIZE), SEED);
        let mut graph = over(&faulty, Reason::Create);
        let before = graph.volume().metadata();
        let range = Some((Lba(0), BlockCount(32)));
        for nth in 2..2 + failures {
            faulty.add(Rule { range, ..Rule::new(Requests::Write, When::Nth(nth), Effect::Fail(FAULT)) });
        }
        assert!(graph.volume().format_metadata(None).is_err());
        assert_eq!(graph.volume().metadata(), before);
        let is_closed = graph.services("metadata")[0].1.status().health == Health::Failed;
        assert_eq!(is_closed, failures == 2);
        faulty.clear();
        if is_closed {
            graph.volume().format(SIZE).unwrap();
        }
        graph.unmount();
        let graph = over(&faulty, Reason::Open);
        assert_eq!(graph.volume().metadata(), before);
    }
}

#[test]
fn writes_that_meet_leave_one_of_them() {
    let disk = disk(300, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    let view = Woven::over(graph.volume());
    on_bench(&view, |bench| {
        for round in 0..200 {
            let jobs: Vec<_> = (0..8_u64)
                .map(|number| {
                    let segment = bench.memory.segment(number as usize * 0x4000, 20 * 512);
                    segment.fill((round + number) as u8);
                    let operation = if number < 6 { Operation::Write { fua: false } } else { Operation::Read };
                    let (lba, count) = (Lba(150 + bench.random.below(5)), BlockCount(20));
                    Job { operation, lba, count, segments: vec![segment] }
                })
                .collect();
            assert!(bench.jobs(&jobs).iter().all(Result::is_ok));
        }
    });
    assert_ne!(tag_of(&[1; 512]), tag_of(&[2; 512]));
}

#[test]
fn a_write_needs_no_buffer_of_the_copies_that_wait_for_its_blocks() {
    let gate = Gate::before(disk(5000, SIZE), |operation| operation == Operation::Read);
    let volume: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let crypt = concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", disk:0)");
    let stack = format!("metadata({crypt})");
    let graph = crate::testing::graph(&stack, &[volume], None, Reason::Create, &Arc::default()).unwrap();
    // The page of their group has been read.
    on_bench(graph.volume(), |bench| drop(bench.write_random(0, 100)));
    copy_and_write(graph.volume(), &gate, 64, 0, 1);
}

#[test]
fn what_lay_on_a_device_beyond_the_end_is_not_seen_when_the_volume_grows() {
    let blocks = super::leg_blocks(500, SIZE);
    let mut graph = grow_over_what_was_there(&disk(3000, SIZE), blocks, SEED, |leg| open(leg, Reason::Create).unwrap());
    graph.unmount();
}

#[test]
fn after_a_format_that_failed_nothing_is_acknowledged_that_the_next_opening_erases() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let inner: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let leg =
        Formatted::over(&inner, |_, _| Err(VolumeError::Unsupported { volume: "leg".to_owned(), what: "other blocks" }));
    let graph = open(&leg, Reason::Create).unwrap();
    let service = Arc::clone(&graph.services("metadata")[0].1);
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.write_random(0, 1100);
    faulty.add(Rule::new(Requests::WriteZeroes, When::Nth(1), Effect::Fail(FAULT)));
    assert!(graph.volume().format(SIZE).is_err());
    let closed = Err(BlockError::NotReady);
    assert_eq!(bench.write(3, &[7; 512]), closed, "it would be erased");
    let segment = [bench.memory.segment(0, 512)];
    assert_eq!(bench.moving(Operation::Read, 3, &segment), closed);
    assert_eq!(bench.plain(Operation::Flush, 0, 0), closed);
    assert_eq!(service.status().health, crate::Health::Failed);
    assert!(graph.volume().format(BlockSize::B4096).is_err());
    assert_eq!(bench.write(3, &[7; 512]), closed, "a leg that refuses at once has not ended it");
    faulty.clear();
    graph.volume().format(SIZE).unwrap();
    bench.write(3, &[8; 512]).unwrap();
    bench.expect_zeroes(0, 3);
    assert_eq!(service.status().health, crate::Health::Good);
    drop(service);
    let mut graph = graph;
    graph.unmount();
    drop(graph);
    let graph = open(&leg, Reason::Open).unwrap();
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(3, &[8; 512]);
    bench.expect_zeroes(4, 1096);
}

#[test]
fn a_leg_with_an_old_header_is_erased_when_it_may_be() {
    let leg = disk(1100, SIZE);
    let mut graph = open(&leg, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let old = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 1100);
    graph.unmount();
    drop(graph);
    // It comes anew into a stack, as it was, and as one whose data may go.
    let mut graph = open(&leg, Reason::Open).unwrap();
    let service = Arc::clone(&graph.services("metadata")[0].1);
    for reformat in [false, true] {
        service.unmount().unwrap();
        let mount = Mount { reason: Reason::Change, legs: vec![LegOrigin::New], previous: None, reformat };
        service.mount(&mount).unwrap();
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        if reformat { bench.expect_zeroes(0, 1100) } else { bench.expect(0, &old) }
    }
    let data = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(100, 900);
    drop(service);
    graph.unmount();
    drop(graph);
    let graph = open(&leg, Reason::Open).unwrap();
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect_zeroes(0, 100);
    bench.expect(100, &data);
}

/// The way back of a change that has overwritten the header.
#[test]
fn without_its_header_it_answers_no_request() {
    let leg = disk(500, SIZE);
    let graph = open(&leg, Reason::Create).unwrap();
    let service = Arc::clone(&graph.services("metadata")[0].1);
    let probe = Probe::over(graph.volume());
    probe.write(7, 1, 2).unwrap();
    service.unmount().unwrap();
    let header = legs::read(&leg, 0, 16 << 10).unwrap();
    legs::write(&leg, 0, vec![0; 16 << 10]).unwrap();
    let mount = Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept], previous: None, reformat: false };
    let error = service.mount(&mount).unwrap_err().to_string();
    assert!(error.contains("it has no metadata header"), "{error}");
    assert_eq!((probe.read(7), probe.write(7, 3, 4)), (Err(BlockError::NotReady), Err(BlockError::NotReady)));
    assert_eq!(service.status().health, Health::Failed);
    legs::write(&leg, 0, header).unwrap();
    service.mount(&mount).unwrap();
    assert_eq!(probe.read(7), Ok((1, 2)));
    assert_eq!(service.status().health, Health::Good);
}
