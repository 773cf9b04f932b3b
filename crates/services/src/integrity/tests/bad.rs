//! Bad input: settings, legs, and what stands on the leg. Clear errors, and nothing is changed.

use std::sync::Arc;

use millrace_block::{
    BlockSize, Volume,
    conformance::{Bench, SyncHarness, Wanted},
};

use super::{super::page::REGION, SEED, close, disk, memory, open};
use crate::{Node, Reason, legs};

#[test]
fn settings_and_legs_that_cannot_be_are_refused() {
    let refused = |stack: &str| stack.parse::<Node>().unwrap_err().to_string();
    assert!(refused("integrity(close-after=soon, null)").contains("close-after"));
    assert!(refused("integrity(close-after=61m, null)").contains("from 1ms to an hour"));
    assert!(refused("integrity(close-after=0ms, null)").contains("from 1ms to an hour"));
    assert!(refused("integrity(rate=1K, null)").contains("at least 4K"));
    assert!(refused("integrity(null, null)").contains("2 legs"));
    let small = memory(Wanted { block_size: BlockSize::B512, blocks: 140, read_only: false }, 0);
    let error = open(&small, Reason::Create).err().unwrap();
    assert!(error.contains("with the checksums"), "{error}");
    let foreign = disk(64, BlockSize::B512);
    legs::write(&foreign, 1024, vec![0xee; 512]).unwrap();
    let error = open(&foreign, Reason::Create).err().unwrap();
    assert!(error.contains("holds something else; erase it first"), "{error}");
    assert_eq!(legs::read(&foreign, 1024, 512).unwrap(), [0xee; 512]);
    let error = open(&disk(64, BlockSize::B512), Reason::Open).err().unwrap();
    assert!(error.contains("it has no integrity header"), "{error}");
}

fn prepared() -> (Arc<dyn Volume>, Vec<u8>) {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&disk, Reason::Create).unwrap();
    let data = Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).write_random(0, 64);
    close(graph);
    (disk, data)
}

fn spoil(disk: &Arc<dyn Volume>, at: u64) {
    let mut bytes = legs::read(disk, at / 512 * 512, 512).unwrap();
    bytes[at as usize % 512] ^= 0x20;
    legs::write(disk, at / 512 * 512, bytes).unwrap();
}

#[test]
fn a_damaged_header_is_read_from_the_other_copy_and_put_right() {
    for copy in [0, 8192] {
        for at in [0, 12, 17, 24, 40, 60] {
            let (disk, data) = prepared();
            spoil(&disk, copy + at);
            let graph = open(&disk, Reason::Open).unwrap();
            Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &data);
            let facts = graph.services("integrity")[0].1.status().facts;
            assert!(
                facts.iter().any(|(name, said)| name == "header repaired"
                    && said.contains(if at == 0 { "is not there" } else { "is damaged" })),
                "{facts:?}"
            );
            close(graph);
            let graph = open(&disk, Reason::Open).unwrap();
            assert!(graph.services("integrity")[0].1.status().facts.iter().all(|(name, _)| name != "header repaired"));
        }
    }
    let (disk, _) = prepared();
    spoil(&disk, 40);
    spoil(&disk, 8192 + 40);
    let error = open(&disk, Reason::Open).err().unwrap();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_newer_or_unknown_header_is_refused() {
    let (disk, _) = prepared();
    let newer = crate::record::Region { version: 2, ..REGION };
    newer.store(&disk, 99, &[7; 100]).unwrap();
    assert!(open(&disk, Reason::Open).err().unwrap().contains("use a newer millrace"));
    for (at, value, says) in [
        (16, 9, "of kind 9"),
        (21, 16, "and the volume of 512"),
        (24, 1, "laid out"),
        (30, 9, "laid out"),
        (32, 2, "laid out"),
    ] {
        let (disk, _) = prepared();
        let found = REGION.load(&disk).unwrap().unwrap();
        let mut content = found.content;
        content[at] = value;
        REGION.store(&disk, found.generation + 1, &content).unwrap();
        let error = open(&disk, Reason::Open).err().unwrap();
        assert!(error.contains(says), "{says}: {error}");
    }
    let (disk, _) = prepared();
    REGION.store(&disk, 99, &[1; 31]).unwrap();
    assert!(open(&disk, Reason::Open).err().unwrap().contains("31 bytes"));
}

/// What a format that was cut short before its last store has left in one copy of the header.
#[test]
fn a_copy_of_before_a_crash_has_nothing_erased_when_the_other_one_is_damaged() {
    for opened in [true, false] {
        let (disk, data) = prepared();
        let found = REGION.load(&disk).unwrap().unwrap();
        let mut erasing = found.content.clone();
        erasing[32] = 1;
        REGION.store(&disk, found.generation + 1, &erasing).unwrap();
        REGION.store(&disk, found.generation + 2, &found.content).unwrap();
        if opened {
            close(open(&disk, Reason::Open).unwrap());
        }
        let newer = (found.generation + 2) % 2 * 8192 + 40;
        spoil(&disk, newer);
        if !opened {
            let error = open(&disk, Reason::Open).err().unwrap();
            assert!(error.contains("is damaged") && error.contains("may be of long ago"), "{error}");
            // It is brought back.
            spoil(&disk, newer);
        }
        let graph = open(&disk, Reason::Open).unwrap();
        Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &data);
    }
}
