//! Whoever can write to the leg can destroy, and is found out: no guest is given what was not written there last.

use std::sync::Arc;

use millrace_block::{BlockSize, Operation, Volume, conformance::Bench};

use super::{
    super::layout::{LEVELS, LOG_PAGES, PAGE, PAGES, REGION, blocks_under, log_start, page_start},
    CHANGED, close, disk, kill, on_bench, open, put_raw, raw, read,
};
use crate::{Health, Reason, graph::Graph, legs};

const SIZES: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];
const BLOCKS: u64 = 500;

fn flip(disk: &Arc<dyn Volume>, start: u64, at: usize) {
    let mut bytes = legs::read(disk, start, PAGE).unwrap();
    bytes[at] ^= 0x10;
    legs::write(disk, start, bytes).unwrap();
}

fn flip_block(disk: &Arc<dyn Volume>, lba: u64, at: usize) {
    let mut block = raw(disk, lba);
    block[at] ^= 1;
    put_raw(disk, lba, &block);
}

/// A volume with data, closed; and its data.
fn prepared(block_size: BlockSize) -> (Arc<dyn Volume>, Vec<u8>) {
    let disk = disk(BLOCKS, block_size);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, BLOCKS));
    close(graph);
    (disk, data)
}

fn facts(graph: &Graph) -> (String, String, Health) {
    let status = graph.services("crypt")[0].1.status();
    (status.facts[2].1.clone(), status.facts[3].1.clone(), status.health)
}

/// All blocks but these are as they were, and these cannot be read.
fn all_but(bench: &mut Bench<'_>, data: &[u8], changed: &[u64]) {
    let block = bench.block();
    for lba in 0..BLOCKS {
        if changed.contains(&lba) {
            assert_eq!(read(bench, lba), CHANGED, "block {lba}");
        } else {
            bench.expect(lba, &data[lba as usize * block..][..block]);
        }
    }
}

#[test]
fn a_flipped_bit_is_found_at_once_and_after_a_restart() {
    for block_size in SIZES {
        let (disk, data) = prepared(block_size);
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| {
            for lba in [0, 167, 168, 499] {
                flip_block(&disk, lba, 77);
                assert_eq!(read(bench, lba), CHANGED, "block {lba}");
                flip_block(&disk, lba, 77);
                assert_eq!(read(bench, lba), Ok(()));
            }
            bench.expect(0, &data);
        });
        assert_eq!(facts(&graph), ("4".to_owned(), "0".to_owned(), Health::Degraded));
        close(graph);
        flip_block(&disk, 300, 0);
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| {
            all_but(bench, &data, &[300]);
            let segment = bench.memory.segment(0, 60 * bench.block());
            assert_eq!(bench.moving(Operation::Read, 250, &[segment]), CHANGED, "within a longer read");
            // What is written is good again.
            let new = bench.write_random(300, 1);
            bench.expect(300, &new);
        });
        close(graph);
    }
}

#[test]
fn blocks_in_the_place_of_others_are_found() {
    for block_size in SIZES {
        let (disk, data) = prepared(block_size);
        // Of this volume, and of another one under the same key-encryption key.
        let (other, _) = prepared(block_size);
        let (one, two) = (raw(&disk, 7), raw(&disk, 8));
        put_raw(&disk, 7, &two);
        put_raw(&disk, 8, &one);
        put_raw(&disk, 20, &raw(&other, 20));
        put_raw(&disk, 30, &vec![0; one.len()]);
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| all_but(bench, &data, &[7, 8, 20, 30]));
        close(graph);
    }
}

/// Blocks 5 and 200 are written anew, in a volume that was closed before and after. Returns the leg as it was, and the new data.
fn rewritten(disk: &Arc<dyn Volume>, mut data: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let before = legs::read(disk, 0, (disk.geometry().bytes() >> 12 << 12) as usize).unwrap();
    let graph = open(disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| {
        let block = bench.block();
        for lba in [5, 200] {
            let new = bench.write_random(lba, 1);
            data[lba as usize * block..][..block].copy_from_slice(&new);
        }
    });
    close(graph);
    (before, data)
}

#[test]
fn a_block_that_is_put_back_is_found_with_and_without_its_pages() {
    for block_size in SIZES {
        // How many levels of pages are put back with it.
        for levels in 0..=LEVELS {
            let (disk, data) = prepared(block_size);
            let (before, data) = rewritten(&disk, data);
            let put_back = |start: u64, len: usize| {
                legs::write(&disk, start, before[start as usize..start as usize + len].to_vec()).unwrap();
            };
            let block = block_size.bytes() as usize;
            put_back(super::block_start(5, block_size), block);
            for level in 0..levels {
                put_back(page_start(level, 0, block_size), PAGES as usize);
            }
            let graph = open(&disk, Reason::Open).unwrap();
            // A page that is not the right one loses what it covers; nothing wrong is read.
            let lost: Vec<_> = match levels {
                0 => vec![5],
                1 => (0..168).collect(),
                _ => (0..BLOCKS).collect(),
            };
            on_bench(&graph, |bench| all_but(bench, &data, &lost));
            assert_eq!(facts(&graph).2, Health::Degraded);
            close(graph);
        }
    }
}

#[test]
fn what_stays_behind_is_found_when_header_and_pages_are_put_back() {
    // All but one block: that block is found. With that one, too, it is the leg as it was: nobody can know.
    for forgotten in [Some(200), None] {
        let block_size = BlockSize::B512;
        let (disk, old) = prepared(block_size);
        let (before, new) = rewritten(&disk, old.clone());
        assert_ne!(old, new);
        let kept = raw(&disk, 200);
        legs::write(&disk, 0, before).unwrap();
        if forgotten.is_some() {
            put_raw(&disk, 200, &kept);
        }
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| all_but(bench, &old, forgotten.as_slice()));
        close(graph);
    }
}

#[test]
fn what_was_given_back_stays_zeroes_whoever_puts_data_there() {
    let (disk, data) = prepared(BlockSize::B512);
    let old = raw(&disk, 9);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| {
        bench.plain(Operation::Deallocate, 8, 4).unwrap();
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 20, 4).unwrap();
    });
    assert!(raw(&disk, 9).iter().all(|byte| *byte == 0));
    close(graph);
    put_raw(&disk, 9, &old);
    put_raw(&disk, 21, &[0x77; 512]);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| {
        bench.expect(0, &data[..8 * 512]);
        bench.expect_zeroes(8, 4);
        bench.expect_zeroes(20, 4);
    });
    close(graph);
}

#[test]
fn a_page_that_was_changed_loses_its_blocks_and_no_others() {
    for (level, place) in (0..LEVELS).flat_map(|level| [(level, 0), (level, 1)]) {
        let (disk, data) = prepared(BlockSize::B512);
        // One of its two places is of use.
        flip(&disk, page_start(level, 0, BlockSize::B512) + place * PAGE as u64, 1000);
        let graph = open(&disk, Reason::Open).unwrap();
        let mut hit = false;
        on_bench(&graph, |bench| {
            hit = read(bench, 0).is_err();
            let lost: Vec<_> = (0..blocks_under(level).min(BLOCKS)).filter(|_| hit).collect();
            all_but(bench, &data, &lost);
            // They can be written, and that stays.
            let new = bench.write_random(0, BLOCKS);
            bench.expect(0, &new);
        });
        assert_eq!(facts(&graph).1, if hit { "1" } else { "0" });
        close(graph);
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| _ = bench.read(0, BLOCKS));
        assert_eq!(facts(&graph).1, "0");
        close(graph);
    }
}

#[test]
fn after_a_crash_a_block_that_was_changed_is_found_too() {
    for block_size in SIZES {
        let (disk, _) = prepared(block_size);
        let graph = open(&disk, Reason::Open).unwrap();
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, BLOCKS));
        kill(graph);
        flip_block(&disk, 3, 9);
        put_raw(&disk, 4, &raw(&disk, 5));
        put_raw(&disk, 6, &vec![0; block_size.bytes() as usize]);
        for _ in 0..2 {
            let graph = open(&disk, Reason::Open).unwrap();
            on_bench(&graph, |bench| all_but(bench, &data, &[3, 4, 6]));
            close(graph);
        }
    }
}

#[test]
fn a_page_of_the_log_that_was_changed_gives_nobody_wrong_data() {
    let (disk, old) = prepared(BlockSize::B512);
    let graph = open(&disk, Reason::Open).unwrap();
    let mut new = Vec::new();
    on_bench(&graph, |bench| new = bench.write_random(0, BLOCKS));
    kill(graph);
    let header = REGION.load(&disk).unwrap().unwrap().content;
    let epoch = u64::from_le_bytes(header[40..48].try_into().unwrap());
    flip(&disk, log_start(epoch, 2), 100);
    let graph = open(&disk, Reason::Open).unwrap();
    let mut lost = 0;
    on_bench(&graph, |bench| {
        for lba in 0..BLOCKS {
            if read(bench, lba).is_ok() {
                let found = bench.memory.bytes(0, 512);
                let at = lba as usize * 512..(lba as usize + 1) * 512;
                assert!(
                    found == new[at.clone()],
                    "block {lba}, which was {}",
                    if found == old[at] { "old" } else { "nobody's" }
                );
            } else {
                lost += 1;
            }
        }
    });
    assert!((1..=72).contains(&lost), "{lost} blocks of one page");
    close(graph);
}

#[test]
fn logs_of_another_time_or_volume_are_nobodys() {
    let (disk, data) = prepared(BlockSize::B512);
    // What a log was, when the blocks were others.
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| _ = bench.write_random(0, BLOCKS));
    let log = |epoch| legs::read(&disk, log_start(epoch, 0), LOG_PAGES as usize * PAGE).unwrap();
    let logs = [log(0), log(1)];
    on_bench(&graph, |bench| bench.write(0, &data).unwrap());
    close(graph);
    for (epoch, log) in (0..).zip(logs) {
        legs::write(&disk, log_start(epoch, 0), log).unwrap();
    }
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
    assert_eq!(facts(&graph).0, "0");
    close(graph);
}
