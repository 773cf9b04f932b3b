//! Disks that volumes share.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_block::{BlockCount, Lba};
use millrace_driver::{DmaBuffer, QueueOptions, spec::NamespaceId};

use super::{
    stacks::{spec, under_load},
    *,
};
use crate::model::ServiceCommand;

const SHARE: &str = "share | volume:pool";

/// A new device, d, with volume v, and its guest: with a queue and a buffer of 4096 bytes.
fn guest_of(rig: &Rig) -> (Controller, millrace_driver::Namespace, millrace_driver::QueuePair, DmaBuffer) {
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    let mut guest = guest(rig, "d");
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    (guest, namespace, queue, buffer)
}

impl Rig {
    /// With a disk of eight extents.
    fn with_disk() -> Self {
        let rig = Self::new();
        rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K, depth=2) | @pool.img"))).unwrap();
        rig
    }

    fn share(&self, name: &str, size: &str) -> Result<VolumeView, ControlError> {
        self.create_volume(&spec(name, Some(size), SHARE))
    }

    /// Requests that are in volume v.
    fn in_flight(&self) -> u64 {
        self.peek().volumes["v"].graph.as_ref().unwrap().switch.in_flight()
    }

    pub(super) fn of_disk(&self, name: &str) -> Option<String> {
        let facts = self.volume("pool").unwrap().tree.status.expect("the disk is in force").facts;
        facts.into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }
}

fn refused<T>(result: Result<T, ControlError>, why: &str) {
    let error = result.err().expect("it is refused").to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn volumes_of_one_disk_come_back_as_they_were() {
    let mut rig = Rig::with_disk();
    // Restored before the disk, by its name, if order did not count.
    rig.share("a", "192K").unwrap();
    rig.share("b", "64K").unwrap();
    rig.resize_volume("b", size("128K"), false).unwrap();
    rig.resize_volume("a", size("64K"), true).unwrap();
    rig.create_volume(&spec("c", Some("100K"), "throttle(iops=100000) | share(weight=3) | volume:pool")).unwrap();
    assert_eq!(fs::metadata(rig.path("pool.img")).unwrap().len(), 576 << 10);
    assert_eq!(rig.of_disk("free").as_deref(), Some("196608 bytes of 524288 bytes"));
    let before = picture(&rig);
    rig.restart();
    assert_eq!(picture(&rig), before);
    assert_eq!(
        (rig.of_disk("volume a").unwrap(), rig.of_disk("volume b").unwrap()),
        ("65536 bytes".into(), "131072 bytes".into())
    );
    rig.delete_volume("a").unwrap();
    assert_eq!((rig.of_disk("volume a"), rig.of_disk("free").unwrap()), (None, "262144 bytes of 524288 bytes".into()));
    refused(rig.delete_volume("pool"), "volume pool is part of volume b");
    for name in ["b", "c", "pool"] {
        rig.delete_volume(name).unwrap();
    }
}

/// As after a loss of the state. A volume that came back so is one like any other from then on.
#[test]
fn what_a_disk_has_comes_back_by_its_name_only() {
    let mut rig = Rig::with_disk();
    rig.share("v", "128K").unwrap();
    fs::copy(rig.path("pool.img"), rig.path("copy.img")).unwrap();
    rig.delete_volume("v").unwrap();
    rig.create_volume(&spec("copy", None, &rig.stack("disk(extent=64K) | @copy.img"))).unwrap();
    let there = "share(existing=true) | volume:copy";
    for size in [None, Some("64K")] {
        let why = "the disk has no volume V; it has these that are not in use: v.";
        refused(rig.create_volume(&spec("V", size, there)), why);
    }
    assert!(rig.volume("V").is_err());
    assert_eq!(rig.create_volume(&spec("v", None, there)).unwrap().size, size("128K"));
    rig.restart();
    let heavier = "share(existing=true, weight=2) | volume:copy";
    rig.try_change("v", heavier, false).unwrap();
    rig.stop();
    let config = format!("[[volume]]\nname = \"v\"\nsize = \"128K\"\nstack = \"{heavier}\"\n");
    rig.try_start(Some(&config)).unwrap();
    rig.try_change("v", there, false).unwrap();
}

#[test]
fn a_disk_is_for_shares_only_and_says_when_it_is_full() {
    let rig = Rig::with_disk();
    rig.create_volume(&rig.file_volume("plain", "64K")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    refused(rig.attach("d", &attach("pool", None)), "it is a disk, which no guest sees");
    refused(rig.create_volume(&spec("v", None, "concat(volume:pool)")), "volume pool is a disk: volumes have parts of it");
    refused(rig.create_volume(&spec("v", None, "share | volume:plain")), "volume plain is no disk");
    refused(rig.create_volume(&spec("v", Some("1M"), SHARE)), "the disk has 524288 bytes in all; 1048576 are asked for");
    rig.share("a", "448K").unwrap();
    refused(rig.share("b", "128K"), "the disk has 65536 bytes free, and volume b needs 131072 more");
    refused(rig.resize_volume("a", size("640K"), false), "larger than its disk");
    assert_eq!(rig.volume("a").unwrap().size, size("448K"));
    refused(rig.resize_volume("pool", size("384K"), true), "its volumes reach to byte 458752");
    rig.resize_volume("pool", size("1M"), false).unwrap();
    rig.share("b", "128K").unwrap();
    rig.resize_volume("a", size("640K"), false).unwrap();
    refused(rig.try_change("pool", "@other.img(size=1M)", true), "a disk stays a disk");
    refused(rig.try_change("plain", "disk | @plain.img", true), "a disk stays a disk");
    refused(
        rig.create_volume(&VolumeSpec {
            block_size: crate::LogicalBlock(BlockSize::B4096),
            ..spec("w", Some("64K"), SHARE)
        }),
        "blocks of 512",
    );
}

#[test]
fn what_cannot_be_stored_leaves_nothing_on_the_disk() {
    let full = FullDisk::default();
    let rig = Rig::on(&full);
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @pool.img"))).unwrap();
    full.set_full(true);
    rig.share("v", "128K").unwrap_err();
    full.set_full(false);
    assert_eq!(rig.of_disk("volume v"), None);
    rig.share("v", "128K").unwrap();
    rig.create_volume(&spec("w", Some("128K"), &rig.stack("@w.img"))).unwrap();
    full.set_full(true);
    rig.try_change("w", SHARE, true).unwrap_err();
    assert_eq!(rig.of_disk("volume w"), None);
    full.set_full(false);
    rig.try_change("w", SHARE, true).unwrap();
    assert_eq!(rig.of_disk("volume w").as_deref(), Some("131072 bytes"));
    // A share that is taken out of a volume is given up.
    rig.try_change("w", "@w2.img(size=128K)", true).unwrap();
    assert_eq!(rig.of_disk("volume w"), None);
    refused(rig.create_volume(&spec("x", Some("128K"), &rig.stack("mirror(@no/dir/m, share | volume:pool)"))), "no/dir/m");
    assert_eq!(rig.of_disk("volume x"), None);
    let release = |name: &str| ServiceCommand {
        service: "disk".to_owned(),
        command: "release".to_owned(),
        arguments: [("name".to_owned(), name.to_owned())].into(),
    };
    refused(rig.command_service("pool", &release("v")), "volume v is in use");
    refused(rig.command_service("pool", &release("u")), "it has no volume u");
}

#[test]
fn what_a_volume_that_does_not_open_has_is_not_released() {
    let mut rig = Rig::with_disk();
    rig.create_volume(&spec("v", Some("128K"), &rig.stack("stripe(chunk=4K, share | volume:pool, @b.img)"))).unwrap();
    let held = rig.of_disk("volume v").unwrap();
    std::fs::remove_file(rig.path("b.img")).unwrap();
    rig.restart();
    let release = ServiceCommand {
        service: "disk".to_owned(),
        command: "release".to_owned(),
        arguments: [("name".to_owned(), "v".to_owned())].into(),
    };
    refused(rig.command_service("pool", &release), "volume v is over it, though it could not be opened");
    assert!(rig.of_disk("volume v").unwrap().starts_with(&held));
}

#[test]
fn a_configuration_that_fails_leaves_nothing_on_the_disk() {
    let mut rig = Rig::with_disk();
    rig.stop();
    let config = "[[volume]]\nname = \"v\"\nsize = \"128K\"\nstack = \"share | volume:pool\"\n\
                  [[volume]]\nname = \"over\"\nsize = \"128K\"\nstack = \"concat(volume:v)\"\n\
                  [[volume]]\nname = \"late\"\nbackend = \"file:missing.img\"\n";
    rig.try_start(Some(config)).unwrap_err();
    rig.start();
    assert_eq!(rig.of_disk("volume v"), None);
    rig.share("v", "128K").unwrap();
}

#[test]
fn volumes_of_a_disk_change_while_guests_write() {
    let rig = Rig::with_disk();
    rig.resize_volume("pool", size("4M"), false).unwrap();
    rig.share("v", "256K").unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    let stop = AtomicBool::new(false);
    under_load(&rig, || {
        for round in 0..10 {
            // Beside it, below it, above it and itself.
            rig.share("w", "1M").unwrap();
            rig.try_change("v", &format!("share(weight={}) | volume:pool", round + 1), false).unwrap();
            rig.try_change("v", "throttle(iops=1M) | share | volume:pool", false).unwrap();
            rig.try_change("pool", &format!("disk(extent=64K, depth={}) | @pool.img", round + 1), false).unwrap();
            rig.resize_volume("v", size("1M"), false).unwrap();
            rig.resize_volume("v", size("128K"), true).unwrap();
            rig.delete_volume("w").unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(stop.load(Ordering::Relaxed));
    assert_eq!(rig.of_disk("volume v").as_deref(), Some("131072 bytes"));
}

/// Services above a disk write to it when they are closed: what is below them is still in force then, whatever its name.
#[test]
fn what_stands_on_a_disk_is_closed_before_it() {
    for disk in ["pool", "zpool"] {
        let mut rig = Rig::new();
        let stack = rig.stack("disk(extent=64K) | cache(mode=back, @fast.img(size=8M)) | @slow.img");
        rig.create_volume(&spec(disk, Some("16M"), &stack)).unwrap();
        rig.create_volume(&spec("vm", Some("1M"), &format!("integrity | share | volume:{disk}"))).unwrap();
        rig.create_device(&device("d", "{}")).unwrap();
        rig.attach("d", &attach("vm", None)).unwrap();
        under_load(&rig, || thread::sleep(Duration::from_millis(50)));
        rig.restart();
        for name in [disk, "vm"] {
            let view = rig.volume(name).unwrap();
            assert_eq!(view.state, State::Ready, "{name} on {disk}: {:?}", view.reason);
        }
        under_load(&rig, || ());
    }
}

#[test]
fn what_a_guest_left_behind_does_not_reach_who_comes_next() {
    let rig = Rig::with_disk();
    rig.create_volume(&spec("v", Some("64K"), &format!("throttle(iops=1) | {SHARE}"))).unwrap();
    let (_guest, namespace, mut queue, buffer) = guest_of(&rig);
    buffer.write_at(0, &[0xaa; 4096]);
    // One goes through in a second: most are there for as long as the test takes.
    for at in 0..96 {
        queue.submit(&namespace.write(Lba(8 * (at % 16)), buffer.slice(0, 4096)).unwrap()).unwrap();
    }
    queue.ring().unwrap();
    eventually("requests that are held back", || (rig.in_flight() >= 64).then_some(()));
    rig.detach("d", 1).unwrap();
    assert!(rig.in_flight() >= 8, "the throttle holds them back, and detaching does not wait for ever");
    // On a shard that stands still they are not let go in the time that it has.
    eventually("the volume is empty", || rig.delete_volume("v").ok());
    rig.share("w", "64K").unwrap();
    rig.attach("d", &attach("w", None)).unwrap();
    // One of those would come every second.
    thread::sleep(Duration::from_millis(2500));
    let read = namespace.read(Lba(0), buffer.slice(0, 4096)).unwrap();
    let end = queue.submit(&read).unwrap();
    queue.ring().unwrap();
    queue.wait_for(end).unwrap();
    let mut found = vec![1; 4096];
    buffer.read_at(0, &mut found);
    assert_eq!(found, vec![0; 4096]);
}

#[test]
fn a_long_command_ends_with_the_volume_that_it_was_for() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("w", "64M")).unwrap();
    rig.create_volume(&spec("v", None, "throttle(iops=1) | volume:w")).unwrap();
    let (guest, namespace, mut queue, buffer) = guest_of(&rig);
    // It goes to the volume in pieces, one a second.
    let ranges: Vec<_> = (0..32).map(|at| (Lba(at * 4096), BlockCount(4096))).collect();
    let list = guest.memory().alloc(4096).unwrap();
    queue.submit(&namespace.deallocate(&ranges, &list).unwrap()).unwrap();
    queue.ring().unwrap();
    eventually("a piece that is held back", || (rig.in_flight() > 0).then_some(()));
    rig.detach("d", 1).unwrap();
    eventually("the volume is empty", || rig.delete_volume("v").ok());
    rig.attach("d", &attach("w", None)).unwrap();
    buffer.write_at(0, &[0xbb; 4096]);
    for at in 0..32 {
        queue.execute(&namespace.write(Lba(at * 4096), buffer.slice(0, 4096)).unwrap()).unwrap();
    }
    thread::sleep(Duration::from_millis(2500));
    for at in 0..32 {
        queue.execute(&namespace.read(Lba(at * 4096), buffer.slice(0, 4096)).unwrap()).unwrap();
        let mut found = vec![0; 4096];
        buffer.read_at(0, &mut found);
        assert_eq!(found, vec![0xbb; 4096], "{at}");
    }
}

#[test]
fn a_throttle_below_holds_up_no_change() {
    let rig = Rig::new();
    rig.create_volume(&spec("w", Some("1M"), "throttle(iops=1) | memory")).unwrap();
    rig.create_volume(&spec("v", None, "volume:w")).unwrap();
    let (_guest, namespace, mut queue, buffer) = guest_of(&rig);
    // More than go through in the time that a change waits for.
    let ends: Vec<_> =
        (0..64).map(|at| queue.submit(&namespace.write(Lba(at * 8), buffer.slice(0, 4096)).unwrap()).unwrap()).collect();
    queue.ring().unwrap();
    eventually("requests that are held back", || (rig.in_flight() >= 32).then_some(()));
    rig.try_change("v", "meter(tenant=t) | volume:w", false).unwrap();
    for end in ends {
        queue.wait_for(end).unwrap();
    }
    // It holds back again: what went is owed.
    queue.submit(&namespace.write(Lba(0), buffer.slice(0, 512)).unwrap()).unwrap();
    queue.ring().unwrap();
    thread::sleep(Duration::from_secs(1));
    assert!(queue.next_completion().unwrap().is_none());
}
