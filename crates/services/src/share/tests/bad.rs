//! Settings, legs and tables that cannot be: each is refused by name, and nothing is changed.

use proptest::prelude::*;

use super::*;
use crate::{
    legs,
    share::{
        space::region,
        table::{Entry, Piece, Table},
    },
};

fn refused(stack: &str) -> String {
    stack.parse::<Node>().unwrap_err().to_string()
}

#[test]
fn nonsense_is_refused_by_name() {
    for (stack, why) in [
        ("disk(extent=1000, null)", "column 6: disk: extent: a power of two from 16K to 1G is possible"),
        ("disk(extent=8K, null)", "extent: a power of two"),
        ("disk(depth=0, null)", "disk: depth: 1 to 1048576 requests are possible"),
        ("share(weight=0, volume:p)", "share: weight: 1 to 1000 is possible"),
        ("share(weight=two, volume:p)", "\"two\" is not a number"),
        ("share(min_iops=0, volume:p)", "share: min_iops: 1 at least is possible; leave it out"),
        ("share(min_bandwidth=fast, volume:p)", "min_bandwidth: \"fast\" is not a size"),
        ("share(latency=0us, volume:p)", "share: latency: 1us to 10s is possible"),
        ("share(latency=11s, volume:p)", "share: latency: 1us to 10s is possible"),
        ("disk(iops=many, null)", "iops: \"many\" is not a number"),
        ("share(existing=perhaps, volume:p)", "is not true or false"),
        ("share | file:/a", "share: it is over a disk only: share | volume:DISK"),
        ("share | throttle(iops=1) | volume:p", "share: it is over a disk only"),
        ("throttle(iops=5) | disk | null", "throttle: a disk is below it, which stands at the top"),
        ("share()", "it is over 0 legs; 1 are possible"),
    ] {
        let error = refused(stack);
        assert!(error.contains(why), "{stack}: {error}");
    }
    "throttle(iops=5) | share | disk | null".parse::<Node>().unwrap();
}

#[test]
fn what_is_too_large_or_no_disk_is_refused() {
    let pool = Pool::new(5);
    let error = |result: Result<Graph, GraphError>| result.err().expect("it is refused").to_string();
    let create = |name: &str, size| pool.volume(name, "share", Some(size), Reason::Create);
    assert_eq!(error(create("v", 65 << 10)), "share: the disk has 65536 bytes in all; 66560 are asked for");
    let a = create("a", 3 * EXTENT).unwrap();
    assert_eq!(error(create("v", 2 * EXTENT)), "share: the disk has 16384 bytes free, and volume v needs 32768 more");
    assert_eq!(error(create("a", EXTENT)), "share: volume a of the disk is in use already");
    assert!(a.volume().resize(millrace_block::BlockCount(1 << 30)).is_err());
    let other =
        make("v", "share | volume:pool", &memory(EXTENT), None, &SharedObjects::default(), &pool.kept, Reason::Create);
    assert!(error(other).contains("what is below is no disk that works"));
    let small = Pool::open(&memory(EXTENT), "disk(extent=16K)", Reason::Create).err().unwrap().to_string();
    assert!(small.contains("disk: its leg has 16384 bytes; it needs an extent of 16384 for its table"), "{small}");
    assert!(error(pool.volume("x", "share", None, Reason::Open)).contains("its table has no volume x"));
    let name = "n".repeat(300);
    assert!(error(create(&name, 512)).contains("its name has 300 bytes, and 255 are possible"));
}

#[test]
fn what_a_volume_left_is_taken_or_given_up_only_when_told() {
    let leg = memory(9 * EXTENT);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let a = pool.create("a", 3 * EXTENT);
    let data = on_bench(&a, |bench| bench.write_random(0, 96));
    let used = pool.command("release", "a").unwrap_err();
    assert!(used.contains("volume a is in use"), "{used}");
    drop((a, pool));
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let error = pool.volume("a", "share", Some(3 * EXTENT), Reason::Create).err().unwrap().to_string();
    assert!(error.contains("share(existing=true)") && error.contains("release name=a"), "{error}");
    let error = pool.volume("a", "share(existing=true)", Some(EXTENT), Reason::Create).err().unwrap().to_string();
    assert!(error.contains("the disk has volume a with 49152 bytes"), "{error}");
    let mut a = pool.volume("a", "share(existing=true)", None, Reason::Create).unwrap();
    // It could not be stored: what was there before stays.
    a.discard(false);
    let a = pool.volume("a", "share(existing=true)", None, Reason::Create).unwrap();
    on_bench(&a, |bench| bench.expect(0, &data));
    drop((a, pool));
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    assert!(pool.command("release", "b").unwrap_err().contains("it has no volume b"));
    assert!(pool.command("forget", "a").unwrap_err().contains("no command of disk"));
    assert_eq!(pool.command("release", "a").unwrap(), "volume a of 49152 bytes is given up");
    let all = pool.create("all", 8 * EXTENT);
    on_bench(&all, |bench| bench.expect_zeroes(0, 256));
}

/// An empty volume under a misspelt name would look like the one that was meant.
#[test]
fn what_the_operator_says_is_there_is_not_made() {
    let leg = memory(9 * EXTENT);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let made = [pool.create("a", EXTENT), pool.create("b", EXTENT)];
    drop((made, pool));
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let refused = |name: &str, size| {
        pool.volume(name, "share(existing=true)", size, Reason::Create).err().expect("it is not there").to_string()
    };
    let b = pool.volume("b", "share", None, Reason::Open).unwrap();
    for size in [None, Some(EXTENT)] {
        let error = refused("A", size);
        assert!(error.contains("the disk has no volume A; it has these that are not in use: a. Give"), "{error}");
    }
    assert_eq!(pool.fact("volume A"), None);
    let a = pool.volume("a", "share(existing=true)", None, Reason::Create).unwrap();
    let error = refused("c", Some(EXTENT));
    assert!(error.contains("it has nothing that is not in use"), "{error}");
    drop((a, b, pool));
    // Later it is the volume's own, whatever its stack says.
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    pool.volume("a", "share(existing=true)", None, Reason::Open).unwrap();
}

/// A disk with one volume of three extents, stored several times.
fn stored() -> (Arc<dyn Volume>, Vec<u8>) {
    let leg = memory(9 * EXTENT);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let a = pool.create("a", 3 * EXTENT);
    let data = on_bench(&a, |bench| bench.write_random(0, 96));
    (leg, data)
}

fn open(leg: &Arc<dyn Volume>, stack: &str) -> Result<Pool, String> {
    Pool::open(leg, stack, Reason::Open).map_err(|error| error.to_string())
}

#[test]
fn one_damaged_copy_is_told_and_the_other_one_used() {
    for (copy, at, what) in [(0, 40, "damaged"), (1, 40, "damaged"), (0, 0, "not there"), (1, 7, "not there")] {
        let (leg, data) = stored();
        // The last change is in both copies.
        let pool = open(&leg, "disk(extent=16K)").unwrap();
        let last = on_bench(&pool.create("b", EXTENT), |bench| bench.write_random(0, 32));
        drop(pool);
        legs::write(&leg, copy * EXTENT / 2, {
            let mut bytes = legs::read(&leg, copy * EXTENT / 2, 512).unwrap();
            bytes[at] ^= 1;
            bytes
        })
        .unwrap();
        let pool = open(&leg, "disk(extent=16K)").unwrap();
        let said = pool.fact("table").unwrap();
        assert!(said.contains(&format!("copy {copy} of its record is {what}")), "{said}");
        for (name, data) in [("a", &data), ("b", &last)] {
            let volume = pool.volume(name, "share", None, Reason::Open).unwrap();
            on_bench(&volume, |bench| bench.expect(0, data));
        }
        drop(pool);
        assert_eq!(open(&leg, "disk(extent=16K)").unwrap().fact("table"), None, "it was written anew");
    }
}

#[test]
fn foreign_newer_and_damaged_disks_are_refused() {
    let (leg, _) = stored();
    let error = open(&leg, "disk(extent=32K)").err().unwrap();
    assert!(error.contains("it is a disk with extents of 16384 bytes: write disk(extent=16384)"), "{error}");
    let error = open(&memory(9 * EXTENT), "disk(extent=16K)").err().unwrap();
    assert!(error.contains("there is no table of a disk on it"), "{error}");
    let newer = crate::record::Region { version: 2, ..region(EXTENT) };
    newer.store(&leg, 100, &Table::new(EXTENT, 9).encode()).unwrap();
    let error = open(&leg, "disk(extent=16K)").err().unwrap();
    assert!(error.contains("layout 2") && error.contains("newer millrace"), "{error}");
    let (leg, _) = stored();
    for copy in [0, 1] {
        let mut bytes = legs::read(&leg, copy * EXTENT / 2, 512).unwrap();
        bytes[30] ^= 1;
        bytes[33] ^= 1;
        legs::write(&leg, copy * EXTENT / 2, bytes).unwrap();
    }
    assert!(open(&leg, "disk(extent=16K)").err().unwrap().contains("is damaged"));
}

#[test]
fn tables_that_cannot_be_are_refused() {
    let entry = |size: u64, pieces: &[(u32, u32)]| Entry {
        size,
        pieces: pieces.iter().map(|(first, count)| Piece { first: *first, count: *count }).collect(),
    };
    let table = |volumes: Vec<(&str, Entry)>| Table {
        volumes: volumes.into_iter().map(|(name, entry)| (name.to_owned(), entry)).collect(),
        ..Table::new(EXTENT, 9)
    };
    for (bad, why) in [
        (table(vec![("a", entry(EXTENT, &[(0, 1)]))]), "gives volume a 1 extents from 0 on, and the disk's are 1 to 8"),
        (table(vec![("a", entry(EXTENT * 2, &[(8, 2)]))]), "2 extents from 8 on"),
        (table(vec![("a", entry(EXTENT, &[(u32::MAX, 1)]))]), "extents from 4294967295 on"),
        (table(vec![("a", entry(EXTENT * 2, &[(3, 1)]))]), "volume a of 32768 bytes 1 extents"),
        (table(vec![("a", entry(0, &[]))]), "volume a of 0 bytes"),
        (table(vec![("a", entry(EXTENT * 2, &[(2, 1), (2, 1)]))]), "extent 2 to volume a and to volume a"),
        (
            table(vec![("a", entry(EXTENT * 2, &[(2, 2)])), ("b", entry(EXTENT, &[(3, 1)]))]),
            "extent 3 to volume a and to volume b",
        ),
        (Table { extent: 2, ..table(vec![]) }, "extents of 2^1 bytes"),
        // It is right in itself, and the disk is not as large.
        (Table { extents: 900, ..table(vec![("a", entry(EXTENT, &[(400, 1)]))]) }, "part of the disk is missing"),
    ] {
        let (leg, _) = stored();
        let before = legs::read(&leg, 0, EXTENT as usize / 2).unwrap();
        region(EXTENT).store(&leg, 101, &bad.encode()).unwrap();
        let error = open(&leg, "disk(extent=16K)").err().unwrap_or_else(|| panic!("{bad:?}"));
        assert!(error.contains(why), "{error}");
        assert!(legs::read(&leg, 0, EXTENT as usize / 2).unwrap() == before, "nothing was written");
    }
    let good = table(vec![("a", entry(EXTENT * 2, &[(2, 2)])), ("b", entry(EXTENT, &[(7, 1)]))]);
    assert_eq!(Table::decode(&good.encode()), Ok(good.clone()));
    for len in 0..good.encode().len() {
        assert!(Table::decode(&good.encode()[..len]).is_err(), "{len} bytes of it");
    }
    assert_eq!(Table::decode(&[good.encode(), vec![0]].concat()).unwrap_err(), "its table is longer than what it lists");
}

#[test]
fn a_full_table_is_told_and_changes_nothing() {
    let leg = memory(1200 * EXTENT);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let mut volumes = Vec::new();
    let full = (0..1100).find_map(|number| {
        match pool.volume(&format!("a-volume-with-a-rather-long-name-{number}"), "share", Some(512), Reason::Create) {
            Ok(volume) => {
                volumes.push(volume);
                None
            }
            Err(error) => Some(error.to_string()),
        }
    });
    let full = full.expect("the table has an end");
    assert!(full.contains("the disk's table is full: 8160 bytes are there for it"), "{full}");
    volumes.pop().unwrap().discard(true);
    pool.create("another", 512);
}

proptest! {
    #[test]
    fn no_bytes_make_a_table_panic(bytes: Vec<u8>, word in 0..40_usize, value: u8) {
        let _ = Table::decode(&bytes);
        let volumes = [("a".to_owned(), Entry { size: 5 * EXTENT, pieces: vec![Piece { first: 3, count: 5 }] })];
        let mut good = Table { volumes: volumes.into(), ..Table::new(EXTENT, 9) }.encode();
        let at = word.min(good.len() - 1);
        good[at] = value;
        if let Ok(table) = Table::decode(&good) {
            prop_assert_eq!(table.encode(), good);
        }
    }

    #[test]
    fn extents_are_chosen_once(sizes in prop::collection::vec(1..20_u64, 1..12), keep in prop::collection::vec(any::<bool>(), 12)) {
        let mut table = Table::new(EXTENT, 60);
        for (number, extents) in sizes.iter().enumerate() {
            let mut entry = Entry { size: extents * EXTENT, pieces: Vec::new() };
            let chosen = table.choose(&entry, *extents);
            prop_assert_eq!(chosen.is_some(), table.free_extents() >= *extents);
            let Some(chosen) = chosen else { continue };
            entry.extend(&chosen);
            prop_assert_eq!(entry.extents(), *extents);
            table.volumes.insert(number.to_string(), entry);
            if !keep[number] {
                table.volumes.remove(&(number / 2).to_string());
            }
            let decoded = Table::decode(&table.encode());
            prop_assert_eq!(decoded.as_ref(), Ok(&table));
        }
    }
}
