//! Bad input: settings, legs, keys, and what stands on the leg. Clear errors, and nothing is changed.

use std::{fmt::Write as _, sync::Arc};

use millrace_block::{BlockSize, Volume, conformance::Wanted};
use millrace_cipher::{KeySource, Sealer};

use super::{
    super::{
        header::Header,
        layout::{LOG_PAGES, PAGE, REGION, log_start},
    },
    close, disk, memory, on_bench, open, open_stack, stack,
};
use crate::{Node, Reason, legs, settings::Settings};

/// Bytes of a leg that are compared.
const HEAD: usize = 1 << 20;

#[test]
fn settings_that_cannot_be_are_refused_by_name() {
    let refused = |settings: &str| format!("crypt({settings}, key=file:/k, null)").parse::<Node>().unwrap_err().to_string();
    let error = refused("mode=gcm");
    assert!(error.contains("mode: \"gcm\" is none; there are xts and authenticated"), "{error}");
    for settings in ["save-after=1s", "mode=xts, save-after=1s"] {
        assert!(refused(settings).contains("is of no use in this mode"), "{settings}");
    }
    for time in ["0ms", "20m", "soon"] {
        assert!(refused(&format!("mode=authenticated, save-after={time}")).contains("save-after"));
    }
}

#[test]
fn a_key_that_is_wrong_opens_nothing() {
    let disk = disk(64, BlockSize::B512);
    close(open(&disk, Reason::Create).unwrap());
    let before = legs::read(&disk, 0, HEAD).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("other");
    std::fs::write(&other, "11".repeat(32)).unwrap();
    let with = format!("crypt(mode=authenticated, key=\"file:{}\", disk:0)", other.display());
    for reason in [Reason::Open, Reason::Create, Reason::Change] {
        let wrong = open_stack(&with, &disk, reason).err().unwrap();
        assert!(wrong.contains("does not open it: it was sealed with another key"), "{wrong}");
        assert!(wrong.contains("leg disk") && wrong.contains("other"), "{wrong}");
    }
    assert_eq!(legs::read(&disk, 0, HEAD).unwrap(), before, "nothing was changed");
}

#[test]
fn legs_that_do_not_fit_are_refused() {
    let small = memory(Wanted { block_size: BlockSize::B512, blocks: 2048, read_only: false }, 0);
    let error = open(&small, Reason::Create).err().unwrap();
    assert!(error.contains("its leg has 1048576 bytes; with log and tags 1073664 are needed"), "{error}");
    let foreign = disk(64, BlockSize::B512);
    legs::write(&foreign, 512 << 10, vec![0xee; 512]).unwrap();
    let error = open(&foreign, Reason::Create).err().unwrap();
    assert!(error.contains("holds something else; erase it first"), "{error}");
    assert_eq!(legs::read(&foreign, 512 << 10, 512).unwrap(), [0xee; 512]);
    let blank = disk(64, BlockSize::B512);
    let error = open(&blank, Reason::Open).err().unwrap();
    assert!(error.contains("it has no crypt header of this mode"), "{error}");
}

#[test]
fn a_leg_of_the_other_mode_is_refused() {
    let xts = stack("").replace("mode=authenticated, ", "");
    for (first, second, says) in
        [(stack(""), xts.clone(), "say mode=authenticated"), (xts, stack(""), "leave out mode=authenticated")]
    {
        let disk = disk(64, BlockSize::B512);
        close(open_stack(&first, &disk, Reason::Create).unwrap());
        let before = legs::read(&disk, 0, HEAD).unwrap();
        for reason in [Reason::Open, Reason::Create] {
            let error = open_stack(&second, &disk, reason).err().unwrap();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(legs::read(&disk, 0, HEAD).unwrap(), before, "nothing was changed");
    }
}

/// A volume with data, closed; and its data.
fn prepared() -> (Arc<dyn Volume>, Vec<u8>) {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 64));
    close(graph);
    (disk, data)
}

fn spoil(disk: &Arc<dyn Volume>, at: usize) {
    let block = at as u64 / 512 * 512;
    let mut bytes = legs::read(disk, block, 512).unwrap();
    bytes[at % 512] ^= 0x40;
    legs::write(disk, block, bytes).unwrap();
}

#[test]
fn a_damaged_header_is_read_from_the_other_copy_and_put_right() {
    let half = (REGION.len / 2) as usize;
    for copy in [0, half] {
        for at in [0, 12, 16, 24, 33, 60, 100, 190, 200] {
            let (disk, data) = prepared();
            spoil(&disk, copy + at);
            let graph = open(&disk, Reason::Open).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &data));
            let status = graph.services("crypt")[0].1.status();
            let mut said = String::new();
            status.facts.iter().for_each(|(name, value)| write!(said, "{name}: {value}; ").unwrap());
            assert!(
                said.contains("header repaired: copy") && said.contains(if at == 0 { "is not there" } else { "is damaged" }),
                "{said}"
            );
            close(graph);
            let graph = open(&disk, Reason::Open).unwrap();
            assert!(graph.services("crypt")[0].1.status().facts.iter().all(|(name, _)| name != "header repaired"));
            close(graph);
        }
    }
    let (disk, _) = prepared();
    spoil(&disk, 100);
    spoil(&disk, half + 100);
    let error = open(&disk, Reason::Open).err().unwrap();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_newer_an_unknown_or_a_forged_header_is_refused() {
    // A newer layout, with a checksum that is right.
    let (disk, _) = prepared();
    let newer = crate::record::Region { version: REGION.version + 1, ..REGION };
    newer.store(&disk, 99, &[7; 100]).unwrap();
    let error = open(&disk, Reason::Open).err().unwrap();
    assert!(error.contains("use a newer millrace"), "{error}");
    // Contents that this layout does not have, or that nobody who has the key has written; the checksum is right.
    for (at, byte, says) in [
        (16, 9, "a cipher of number 9"),
        (21, 4, "blocks of 1024 bytes"),
        (21, 16, "the volume of 512"),
        (24, 7, "laid out in a way"),
        (32, 1, "laid out in a way"),
        (28, 9, "does not fit 9 records"),
        (0, 1, "does not open it"),
        (50, 1, "does not open it"),
        (40, 99, "changed by somebody who does not have the key"),
        (140, 8, "a state of number 8"),
        (140, 4, "changed by somebody who does not have the key"),
        (140, 1, "changed by somebody who does not have the key"),
        (140, 2, "does not fit 1 records"),
        (150, 1, "changed by somebody who does not have the key"),
        (155, 1, "changed by somebody who does not have the key"),
        (180, 1, "changed by somebody who does not have the key"),
    ] {
        let (disk, _) = prepared();
        let found = REGION.load(&disk).unwrap().unwrap();
        let mut content = found.content;
        content[at] = if content[at] == byte { byte ^ 0xff } else { byte };
        REGION.store(&disk, found.generation + 1, &content).unwrap();
        let error = open(&disk, Reason::Open).err().unwrap();
        assert!(error.contains(says), "byte {at}: {error}");
    }
    let (disk, _) = prepared();
    REGION.store(&disk, 99, &[1; 40]).unwrap();
    let error = open(&disk, Reason::Open).err().unwrap();
    assert!(error.contains("40 bytes"), "{error}");
}

#[test]
fn an_older_root_alone_gives_nobody_older_data() {
    for log_goes in [false, true] {
        let (disk, _) = prepared();
        // A root that was good once, in both copies, and the blocks as they are now.
        let old = legs::read(&disk, 0, REGION.len as usize).unwrap();
        let graph = open(&disk, Reason::Open).unwrap();
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(3, 1));
        close(graph);
        legs::write(&disk, 0, old).unwrap();
        if log_goes {
            legs::write(&disk, log_start(0, 0), vec![0; 2 * LOG_PAGES as usize * PAGE]).unwrap();
        }
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| {
            if log_goes {
                assert_eq!(super::read(bench, 3), super::CHANGED);
            } else {
                bench.expect(3, &data);
            }
        });
        close(graph);
    }
}

#[test]
fn commands_that_are_none_are_refused() {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&disk, Reason::Create).unwrap();
    let service = &graph.services("crypt")[0].1;
    let mut settings = Settings::default();
    settings.add("x", "1");
    let error = crate::crypt::KIND.check_arguments("rekey", &settings).unwrap_err().to_string();
    assert!(error.contains("rekey has no argument x; it takes none"), "{error}");
    let error = service.command("scrub", &Settings::default()).unwrap_err().to_string();
    assert!(error.contains("no command of crypt"), "{error}");
    close(graph);
}

#[test]
fn keys_are_nowhere_in_what_is_shown() {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&disk, Reason::Create).unwrap();
    let source: KeySource = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key").parse().unwrap();
    let (header, found) = Header::load(&disk).unwrap().unwrap();
    let sealer = Sealer::new(&header.open(&source.load().unwrap()).unwrap()).unwrap();
    assert!(header.is_whole(&sealer, &found.content));
    assert_eq!(format!("{sealer:?}"), "Sealer(AES-256-GCM-SIV)");
    let shown = format!("{:?}", graph.services("crypt")[0].1.status());
    let key = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key")).unwrap();
    assert!(shown.contains("test.key") && !shown.contains(key.trim()));
    close(graph);
}
