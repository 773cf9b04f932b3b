//! Bad input: settings, legs, keys, and what stands on the leg. Clear errors, and nothing is changed.

use std::{fmt::Write as _, sync::Arc};

use millrace_block::{
    BlockSize, Volume,
    conformance::{Bench, SyncHarness},
};

use super::{SEED, disk, memory, open, stack};
use crate::{Node, Reason, legs};
use millrace_block::conformance::Wanted;

#[test]
fn settings_that_cannot_be_are_refused_by_name() {
    let refused = |stack: &str| stack.parse::<Node>().unwrap_err().to_string();
    assert!(refused("crypt(null)").contains("key: is needed"), "{}", refused("crypt(null)"));
    for key in ["0011223344", "hex:00", "file:relative/key", "env:KEY"] {
        let error = refused(&format!("crypt(key={key}, null)"));
        assert!(error.contains("file:PATH, keyring:NAME and command:PROGRAM are possible"), "{error}");
    }
    assert!(refused("crypt(key=file:/k, discard=perhaps, null)").contains("discard"));
    assert!(refused("crypt(key=file:/k, rekey-rate=fast, null)").contains("rekey-rate"));
    assert!(refused("crypt(key=file:/k, null, null, null)").contains("3 legs"));
}

#[test]
fn a_key_that_is_missing_or_wrong_opens_nothing() {
    let disk = disk(64, BlockSize::B512);
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("other");
    let with = |path: &std::path::Path| format!("crypt(key=\"file:{}\", disk:0)", path.display());
    let missing = open(&with(&other), &disk, Reason::Create).err().unwrap();
    assert!(missing.contains("No such file") && missing.contains("other"), "{missing}");
    assert!(legs::read(&disk, 0, 4096).unwrap().iter().all(|byte| *byte == 0), "nothing was written");
    std::fs::write(&other, "no key").unwrap();
    let nonsense = open(&with(&other), &disk, Reason::Create).err().unwrap();
    assert!(nonsense.contains("64 hexadecimal digits"), "{nonsense}");

    drop(open(&stack(""), &disk, Reason::Create).unwrap());
    let before = legs::read(&disk, 0, 256 << 10).unwrap();
    std::fs::write(&other, "11".repeat(32)).unwrap();
    for reason in [Reason::Open, Reason::Create, Reason::Change] {
        let wrong = open(&with(&other), &disk, reason).err().unwrap();
        assert!(wrong.contains("does not open it: it was sealed with another key"), "{wrong}");
        assert!(wrong.contains("leg disk") && wrong.contains("other"), "{wrong}");
    }
    assert_eq!(legs::read(&disk, 0, 256 << 10).unwrap(), before, "nothing was changed");
}

#[test]
fn legs_that_do_not_fit_are_refused() {
    let small = memory(Wanted { block_size: BlockSize::B512, blocks: 512, read_only: false }, 0);
    let error = open(&stack(""), &small, Reason::Create).err().unwrap();
    assert!(error.contains("its leg has 262144 bytes; it needs 262144 for its header"), "{error}");
    let foreign = disk(64, BlockSize::B512);
    legs::write(&foreign, 8192, vec![0xee; 512]).unwrap();
    let error = open(&stack(""), &foreign, Reason::Create).err().unwrap();
    assert!(error.contains("holds something else; erase it first"), "{error}");
    assert_eq!(legs::read(&foreign, 8192, 512).unwrap(), [0xee; 512]);
    let blank = disk(64, BlockSize::B512);
    let error = open(&stack(""), &blank, Reason::Open).err().unwrap();
    assert!(error.contains("it has no crypt header"), "{error}");
}

/// A volume with data, closed; and its data.
fn prepared() -> (Arc<dyn Volume>, Vec<u8>) {
    let disk = disk(64, BlockSize::B512);
    let mut graph = open(&stack(""), &disk, Reason::Create).unwrap();
    let data = Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).write_random(0, 64);
    graph.tasks.clear();
    graph.unmount();
    (disk, data)
}

fn spoil(disk: &Arc<dyn Volume>, at: usize, change: impl Fn(&mut u8)) {
    let block = at as u64 / 512 * 512;
    let mut bytes = legs::read(disk, block, 512).unwrap();
    change(&mut bytes[at % 512]);
    legs::write(disk, block, bytes).unwrap();
}

#[test]
fn a_damaged_header_is_read_from_the_other_copy_and_put_right() {
    for copy in [0, 8192] {
        for at in [0, 12, 16, 24, 33, 60, 100, 200] {
            let (disk, data) = prepared();
            spoil(&disk, copy + at, |byte| *byte ^= 0x40);
            let graph = open(&stack(""), &disk, Reason::Open).unwrap();
            Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &data);
            let status = graph.services("crypt")[0].1.status();
            let mut said = String::new();
            status.facts.iter().for_each(|(name, value)| write!(said, "{name}: {value}; ").unwrap());
            assert!(
                said.contains("header repaired: copy") && said.contains(if at == 0 { "is not there" } else { "is damaged" }),
                "{said}"
            );
            drop(graph);
            let graph = open(&stack(""), &disk, Reason::Open).unwrap();
            assert!(graph.services("crypt")[0].1.status().facts.iter().all(|(name, _)| name != "header repaired"));
        }
    }
    let (disk, _) = prepared();
    spoil(&disk, 100, |byte| *byte ^= 1);
    spoil(&disk, 8192 + 100, |byte| *byte ^= 1);
    let error = open(&stack(""), &disk, Reason::Open).err().unwrap();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_newer_or_unknown_header_is_refused() {
    // A newer layout, with a checksum that is right.
    let (disk, _) = prepared();
    let newer = crate::record::Region { version: 2, ..super::super::header::REGION };
    newer.store(&disk, 99, &[7; 100]).unwrap();
    let error = open(&stack(""), &disk, Reason::Open).err().unwrap();
    assert!(error.contains("use a newer millrace"), "{error}");
    // Contents that this layout does not have: another cipher, state, offset, block size, length.
    for (at, bytes, says) in [
        (16, &[9_u8][..], "a cipher of number 9"),
        (20, &[0, 4], "blocks of 1024 bytes"),
        (20, &[0, 16], "the volume of 512"),
        (24, &[7], "a state of number 7"),
        (32, &[1], "first block is at byte"),
    ] {
        let (disk, _) = prepared();
        let found = super::super::header::REGION.load(&disk).unwrap().unwrap();
        let mut content = found.content;
        content[at..at + bytes.len()].copy_from_slice(bytes);
        super::super::header::REGION.store(&disk, found.generation + 1, &content).unwrap();
        let error = open(&stack(""), &disk, Reason::Open).err().unwrap();
        assert!(error.contains(says), "{says}: {error}");
    }
    let (disk, _) = prepared();
    super::super::header::REGION.store(&disk, 99, &[1; 40]).unwrap();
    let error = open(&stack(""), &disk, Reason::Open).err().unwrap();
    assert!(error.contains("40 bytes"), "{error}");
}
