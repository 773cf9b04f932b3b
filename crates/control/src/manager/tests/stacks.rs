//! Volumes that are made of services, and changed while their guests go on.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_block::Lba;
use millrace_driver::{Command, QueueOptions, spec::NamespaceId};
use millrace_services::{Health, Status, graph::Tree};

use super::*;
use crate::{
    error::CHANGED_MEANWHILE,
    model::{ServiceCommand, VolumeChange},
    store::Changes,
    usage::{UsageBy, UsageQuestion, UsageRow},
};

pub(super) fn spec(name: &str, size: Option<&str>, stack: &str) -> VolumeSpec {
    let size = size.map(|size| size.parse().unwrap());
    VolumeSpec { size, stack: stack.parse().unwrap(), ..volume(name, "1", "memory") }
}

fn stack_of(rig: &Rig, name: &str) -> String {
    rig.volume(name).unwrap().stack.to_string()
}

impl Rig {
    /// `file:` with a path in its directory, for each `@`.
    pub(super) fn stack(&self, text: &str) -> String {
        text.replace('@', &format!("file:{}/", self.directory.path().display()))
    }

    pub(super) fn try_change(&self, name: &str, stack: &str, reformat: bool) -> Result<VolumeView, ControlError> {
        let stack = Some(self.stack(stack).parse().unwrap());
        self.change_volume(name, &VolumeChange { stack, reformat, ..VolumeChange::default() })
    }

    /// The same, if this is its stack.
    pub(super) fn try_change_from(&self, name: &str, from: &str, stack: &str) -> Result<VolumeView, ControlError> {
        let [from, stack] = [from, stack].map(|text| Some(self.stack(text).parse().unwrap()));
        self.change_volume(name, &VolumeChange { stack, from, ..VolumeChange::default() })
    }
}

#[test]
fn a_stack_of_files_comes_back_as_it_was() {
    let mut rig = Rig::new();
    let view = rig.create_volume(&spec("v", Some("1M"), &rig.stack("stripe(chunk=64K, @a, @b)"))).unwrap();
    assert_eq!((view.size, view.tree.over.len(), view.tree.over[1].size), (Size(1 << 20), 2, 512 << 10));
    assert_eq!(fs::metadata(rig.path("a")).unwrap().len(), 512 << 10);
    rig.resize_volume("v", size("2M"), false).unwrap();
    rig.create_volume(&spec("c", None, &rig.stack("concat(@d(size=64K), memory(size=192K))"))).unwrap();
    let before = picture(&rig);
    rig.restart();
    assert_eq!(picture(&rig), before);
    assert_eq!(rig.volume("c").unwrap().size, Size(256 << 10));
    assert_eq!(rig.volume_history("v").unwrap().len(), 1);
    rig.stop();
    fs::remove_file(rig.path("b")).unwrap();
    rig.start();
    let view = rig.volume("v").unwrap();
    assert!(view.state == State::Failed && view.reason.as_ref().unwrap().contains("/b"), "{view:?}");
    assert!(!rig.path("b").exists(), "a leg that is gone is not made anew");
    assert_eq!(view.tree.over.len(), 2);
}

/// Its legs are told sizes when it comes back, and were not when it was made.
#[test]
fn what_was_resized_comes_back_as_it_was() {
    for (stack, refused, sizes) in [
        ("concat(@a, @c(size=64K))", &[][..], ["256K", "192K"]),
        ("stripe(chunk=4K, @a, @b)", &["160K", "256K"][..], ["112K", "128K"]),
        ("stripe(chunk=4K, @a(size=64K), @c)", &["256K"][..], ["112K", "128K"]),
    ] {
        let mut rig = Rig::new();
        for (name, kilobytes) in [("a", 64), ("b", 128), ("c", 64)] {
            fs::write(rig.path(name), vec![0_u8; kilobytes << 10]).unwrap();
        }
        let comes_back = |rig: &mut Rig, has: Size| {
            rig.restart();
            let view = rig.volume("v").unwrap();
            assert_eq!((view.state, view.size), (State::Ready, has), "{stack}: {:?}", view.reason);
        };
        let made = rig.create_volume(&spec("v", None, &rig.stack(stack))).unwrap();
        for to in refused {
            let refused = rig.resize_volume("v", size(to), true).unwrap_err().to_string();
            assert!(refused.contains("a stripe"), "{refused}");
        }
        comes_back(&mut rig, made.size);
        for to in sizes {
            let bytes = rig.resize_volume("v", size(to), true).unwrap().size.0;
            let data: Vec<_> = (0..bytes).map(|at| (at / 512 + at) as u8).collect();
            let switch = |rig: &Rig| Arc::clone(&rig.peek().volumes["v"].graph.as_ref().unwrap().switch);
            millrace_services::legs::write(&switch(&rig), 0, data.clone()).unwrap();
            comes_back(&mut rig, size(to));
            assert!(millrace_services::legs::read(&switch(&rig), 0, data.len()).unwrap() == data, "{stack} at {to}");
        }
    }
}

#[test]
fn a_mirror_grows_and_comes_back_with_the_size_that_it_has() {
    let mut rig = Rig::new();
    let stack = rig.stack("throttle(iops=100K) | mirror(@a, @b)");
    rig.create_volume(&spec("v", Some("1M"), &stack)).unwrap();
    assert_eq!(rig.resize_volume("v", size("3M"), false).unwrap().size, size("3M"));
    let length = |rig: &Rig, name| fs::metadata(rig.path(name)).unwrap().len();
    assert_eq!((length(&rig, "a"), length(&rig, "b")), ((3 << 20) + (64 << 10), (3 << 20) + (64 << 10)));
    let refused = |rig: &Rig, wanted: &str, why: &str| {
        let error = rig.resize_volume("v", size(wanted), true).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(rig.volume("v").unwrap().size, size("3M"));
    };
    refused(&rig, "2M", "making it smaller is not possible");
    refused(&rig, "1T", "32256 regions of 4194304 bytes, which is enough for 135291469824 bytes");
    rig.restart();
    assert_eq!((rig.volume("v").unwrap().state, rig.volume("v").unwrap().size), (State::Ready, size("3M")));
    // The power went while it grew: before any leg was longer, and when all was done but for the last word.
    for (has, growing, comes_back) in [("3M", "5M", "3M"), ("1M", "3M", "3M")] {
        rig.stop();
        let store = open_store(rig.directory.path());
        let mut record = store.load().unwrap().0.remove(0);
        (record.spec.size, record.growing) = (Some(size(has)), Some(size(growing)));
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        drop(store);
        rig.start();
        let view = rig.volume("v").unwrap();
        assert_eq!((view.state, view.size), (State::Ready, size(comes_back)), "{:?}", view.reason);
    }
    // What was settled is stored: the next growth that comes to nothing leaves that size, and not the one before.
    rig.stop();
    let store = open_store(rig.directory.path());
    let mut record = store.load().unwrap().0.remove(0);
    assert_eq!((record.size(), record.growing), (size("3M"), None));
    record.growing = Some(size("7M"));
    store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
    drop(store);
    rig.start();
    assert_eq!((rig.volume("v").unwrap().state, rig.volume("v").unwrap().size), (State::Ready, size("3M")));
    rig.resize_volume("v", size("5M"), false).unwrap();
    rig.restart();
    assert_eq!(rig.volume("v").unwrap().size, size("5M"));
}

#[test]
fn a_stack_that_cannot_be_leaves_nothing() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("f", "64K")).unwrap();
    rig.create_volume(&volume("m", "64K", "memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("m", None)).unwrap();
    let refused =
        |size: Option<&str>, stack: &str| rig.create_volume(&spec("v", size, &rig.stack(stack))).unwrap_err().to_string();
    for (size, stack, why) in [
        (Some("64K"), "stripe(chunk=4K, @a, @f.img)", "f.img is the file of volume f"),
        (Some("64K"), "stripe(chunk=4K, @a, @a)", "is a leg already, of stripe.0"),
        (Some("64K"), "stripe(chunk=4K, @a, @no/dir/b)", "no/dir/b"),
        (Some("64K"), "stripe(chunk=4K, @a, volume:x)", "there is no volume x"),
        (Some("64K"), "stripe(chunk=4K, @a, volume:m)", "volume m is attached to d as namespace 1"),
        (Some("64K"), "stripe(chunk=4K, floppy:a)", "back end \"floppy:a\" is unknown"),
        (None, "stripe(chunk=4K, memory, @a)", "needs a size"),
        (Some("1M"), "concat(@a(size=64K), volume:f)", "it has 65536 bytes and 983040 are needed"),
        (Some("60000"), "stripe(chunk=4K, @a, @b)", "60000"),
    ] {
        let error = refused(size, stack);
        assert!(error.contains(why), "{stack}: {error}");
        assert!(!rig.path("a").exists() && !rig.path("b").exists(), "{stack}: files are gone again");
    }
    fs::write(rig.path("one"), [0; 8192]).unwrap();
    fs::hard_link(rig.path("one"), rig.path("two")).unwrap();
    assert!(refused(None, "stripe(chunk=4K, @one, @two)").contains("are one file"));
    let wide = (0..8).map(|at| format!("stripe(chunk=4K, @{at}a, @{at}b, @{at}c, @{at}d, @{at}e, @{at}f, @{at}g, @{at}h)"));
    let wide = format!("stripe(chunk=4K, {})", wide.collect::<Vec<_>>().join(", "));
    assert!(refused(Some("64M"), &wide).contains("too deep or too wide"));
    assert!(!rig.path("0a").exists());
    assert_eq!(rig.volumes().len(), 2);
}

#[test]
fn of_two_changes_of_one_stack_the_second_is_told_what_it_is_by_now() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("@v"))).unwrap();
    let late = |rig: &Rig, stack: &str, by_now: &str| {
        let error = rig.try_change_from("v", "@v", stack).unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Conflict, CHANGED_MEANWHILE), "{error}");
        assert!(error.to_string().contains(&rig.stack(by_now)), "{error}");
        assert_eq!(stack_of(rig, "v"), rig.stack(by_now));
    };
    let first = "throttle(iops=500) | @v";
    rig.try_change_from("v", "@v", first).unwrap();
    late(&rig, "meter(tenant=acme) | @v", first);
    // Also one that would change nothing, and after a restart.
    late(&rig, first, first);
    rig.restart();
    late(&rig, "@v", first);
    let both = "meter(tenant=acme) | throttle(iops=500) | @v";
    rig.try_change_from("v", first, both).unwrap();
    assert_eq!(stack_of(&rig, "v"), rig.stack(both));
    let from = Some(rig.stack(both).parse().unwrap());
    let resize = VolumeChange { size: Some(size("2M")), from, ..VolumeChange::default() };
    let refused = rig.change_volume("v", &resize).unwrap_err();
    assert!(refused.class() == Class::Invalid && refused.to_string().contains("are of a change of its stack"), "{refused}");
    assert_eq!(rig.volume("v").unwrap().size, size("1M"));
}

#[test]
fn volumes_are_made_of_volumes() {
    let mut rig = Rig::new();
    for name in ["x", "y"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    // Restored first, by its name.
    rig.create_volume(&spec("a", None, "stripe(chunk=4K, volume:x, volume:y)")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    let refused = |result: Result<(), ControlError>, why: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(rig.delete_volume("x"), "volume x is part of volume a");
    refused(rig.resize_volume("y", size("128K"), false).map(drop), "volume y is part of volume a");
    refused(rig.attach("d", &attach("x", None)).map(drop), "volume x is part of volume a");
    refused(rig.create_volume(&spec("b", None, "concat(volume:x)")).map(drop), "volume x is part of volume a already");
    refused(rig.try_change("x", "volume:a", true).map(drop), "a volume cannot be over itself");
    rig.restart();
    assert_eq!((rig.volume("a").unwrap().state, rig.volume("a").unwrap().size), (State::Ready, Size(128 << 10)));
    rig.delete_volume("a").unwrap();
    rig.delete_volume("x").unwrap();
}

#[test]
fn volumes_below_keep_the_size_that_they_are_given() {
    let mut rig = Rig::new();
    for name in ["x", "y"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_volume(&spec("mid", None, "throttle(iops=1M) | volume:x")).unwrap();
    rig.create_volume(&spec("top", None, "stripe(chunk=4K, volume:mid, volume:y)")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("top", None)).unwrap();
    let sizes = |rig: &Rig| {
        ["top", "mid", "x", "y"].map(|name| {
            let view = rig.volume(name).unwrap();
            assert_eq!(view.state, State::Ready, "{name}: {:?}", view.reason);
            view.size.0 >> 10
        })
    };
    for (wanted, all) in [("256K", [256, 128, 128, 128]), ("64K", [64, 128, 128, 128]), ("1M", [1024, 512, 512, 512])] {
        rig.resize_volume("top", size(wanted), true).unwrap();
        assert_eq!(sizes(&rig), all);
        rig.restart();
        assert_eq!(sizes(&rig), all, "after a restart");
    }
    // The power went when those below had grown, but for the last word on the one above; and when one of them had.
    for grown in [&["mid", "x", "y"][..], &["x"]] {
        rig.stop();
        let store = open_store(rig.directory.path());
        for mut record in store.load().unwrap().0 {
            let name = record.spec.name.to_string();
            let larger = Size(record.size().0 * 2);
            if grown.contains(&name.as_str()) {
                record.spec.size = Some(larger);
            } else {
                record.growing = Some(larger);
            }
            if let Some(file) = ["x", "y"].iter().find(|known| **known == name && grown.contains(known)) {
                fs::File::options().write(true).open(rig.path(&format!("{file}.img"))).unwrap().set_len(larger.0).unwrap();
            }
            store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        }
        drop(store);
        rig.start();
        assert_eq!(sizes(&rig)[0], 2048, "{grown:?}");
    }
    // What is in the way of one is in the way of all that it is made of.
    let namespace = rig.peek().namespace_of(&"top".parse().unwrap()).unwrap();
    let formatting = rig.begin_format("d", &namespace, BlockSize::B4096).unwrap();
    assert!(matches!(rig.try_change("x", "memory", true), Err(ControlError::Formatting { .. })));
    namespace.volume.format(BlockSize::B4096).unwrap();
    rig.finish_format(formatting, Ok(())).unwrap();
    drop(namespace);
    for _ in 0..2 {
        for name in ["top", "mid", "x", "y"] {
            let view = rig.volume(name).unwrap();
            assert_eq!((view.state, view.block_size.0), (State::Ready, BlockSize::B4096), "{name}: {:?}", view.reason);
        }
        rig.restart();
    }
}

/// Writes and reads blocks of device `d` until told to stop; the number of rounds.
fn load(socket: &Path, stop: &AtomicBool) -> u64 {
    let mut guest = Controller::connect(socket, &Options::default()).unwrap();
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(8192).unwrap();
    let mut round = 0_u64;
    while !stop.load(Ordering::Relaxed) || round < 10 {
        let (lba, data) = (Lba(8 * (round % 30)), round.to_le_bytes().repeat(512));
        buffer.write_at(0, &data);
        let write: Command = namespace.write(lba, buffer.slice(0, 4096)).unwrap();
        queue.execute(&write).expect("no write fails");
        let read = namespace.read(lba, buffer.slice(4096, 4096)).unwrap();
        queue.execute(&read).expect("no read fails");
        let mut found = vec![0; 4096];
        buffer.read_at(4096, &mut found);
        assert!(found == data, "round {round} reads what it wrote");
        round += 1;
    }
    round
}

/// Does something while a guest writes and reads.
pub(super) fn under_load(rig: &Rig, meanwhile: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (stop, socket) = (AtomicBool::new(false), rig.path("d.sock"));
    thread::scope(|scope| {
        let load = scope.spawn(|| load(&socket, &stop));
        let end = Stop(&stop);
        meanwhile();
        drop(end);
        assert!(load.join().unwrap() > 0);
    });
}

#[test]
fn a_stack_is_changed_while_a_guest_writes() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("v", Some("256K"), &rig.stack("stripe(chunk=64K, @a, @b)"))).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    under_load(&rig, || {
        for round in 0..20 {
            let chunk = if round % 2 == 0 { "65536" } else { "64K" };
            rig.try_change("v", &format!("stripe(chunk={chunk}, @a, @b)"), false).unwrap();
        }
        let error = rig.try_change("v", "stripe(chunk=4K, @a, @b)", false).unwrap_err();
        assert!(error.to_string().contains("--reformat") && error.class() == Class::Conflict, "{error}");
        let error = rig.try_change("v", "stripe(chunk=64K, @a, @none/b)", false).unwrap_err();
        assert!(error.to_string().contains("none/b"), "{error}");
        let error = rig.try_change("v", "@a", true).unwrap_err();
        assert!(error.to_string().contains("it has 131072 bytes and 262144 are needed"), "{error}");
        assert!(matches!(rig.try_change("w", "memory", false), Err(ControlError::NoVolume { .. })));
    });
    let history = rig.volume_history("v").unwrap();
    assert_eq!((history.len(), stack_of(&rig, "v")), (21, rig.stack("stripe(chunk=64K, @a, @b)")));
    assert!(history[1..].iter().all(|entry| entry.pause_us.is_some()), "{history:?}");
    rig.restart();
    assert_eq!(stack_of(&rig, "v"), rig.stack("stripe(chunk=64K, @a, @b)"));
}

#[test]
fn services_change_places_while_a_guest_writes() {
    let mut rig = Rig::new();
    let stacks = ["meter(tenant=t) | throttle(iops=900000) | @a", "throttle(iops=900000) | meter(tenant=t) | @a"];
    rig.create_volume(&spec("v", Some("256K"), &rig.stack(stacks[0]))).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    let services = |rig: &Rig| {
        let tree = rig.volume("v").unwrap().tree;
        [tree.node.clone(), tree.over[0].node.clone()]
    };
    assert_eq!(services(&rig), ["meter", "throttle"]);
    under_load(&rig, || {
        for round in 1..20 {
            rig.try_change("v", stacks[round % 2], false).unwrap();
        }
    });
    assert_eq!((services(&rig), stack_of(&rig, "v")), (["throttle".to_owned(), "meter".to_owned()], rig.stack(stacks[1])));
    rig.restart();
    assert_eq!(stack_of(&rig, "v"), rig.stack(stacks[1]));
}

#[test]
fn a_leg_with_parity_fails_and_is_replaced_while_a_guest_writes() {
    let mut rig = Rig::new();
    let stack = |legs: &str| format!("parity(chunk=16K, journal=128K, {legs})");
    rig.create_volume(&spec("v", Some("256K"), &rig.stack(&stack("@a, @b, @c")))).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    let leg = |rig: &Rig| {
        let facts = rig.volume("v").unwrap().tree.status.unwrap().facts;
        facts.into_iter().find(|(name, _)| name == "leg 1").unwrap().1
    };
    under_load(&rig, || {
        let arguments = [("leg".to_owned(), "1".to_owned())].into();
        let fail = ServiceCommand { service: "parity".to_owned(), command: "fail".to_owned(), arguments };
        rig.command_service("v", &fail).unwrap();
        assert_eq!(leg(&rig), "failed");
        let error = rig.try_change("v", &stack("@a, @d, @e"), false).unwrap_err();
        assert!(error.to_string().contains("--reformat"), "{error}");
        rig.try_change("v", &stack("@a, @d, @c"), false).unwrap();
        eventually("a new leg with everything", || match leg(&rig).as_str() {
            "good" => Some(()),
            "being filled" => None,
            other => panic!("the new leg is {other}"),
        });
    });
    assert_eq!(stack_of(&rig, "v"), rig.stack(&stack("@a, @d, @c")));
    rig.restart();
    assert_eq!((rig.volume("v").unwrap().state, leg(&rig).as_str()), (State::Ready, "good"));
}

#[test]
fn a_change_that_cannot_be_stored_is_none() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    rig.create_volume(&spec("v", Some("256K"), &rig.stack("stripe(chunk=64K, @a, @b)"))).unwrap();
    let before = picture(&rig);
    disk.set_full(true);
    let error = rig.try_change("v", "stripe(chunk=65536, @a, @b)", false).unwrap_err();
    assert!(matches!(error, ControlError::Change { .. }), "{error}");
    assert!(error.to_string().contains("make room on that file system"), "{error}");
    disk.set_full(false);
    assert_eq!(picture(&rig), before);
    rig.try_change("v", "stripe(chunk=65536, @a, @b)", false).unwrap();
    rig.try_change("v", "concat(@a, @b)", true).unwrap();
    assert_eq!(stack_of(&rig, "v"), rig.stack("concat(@a, @b)"));
}

#[test]
fn services_are_told_by_name() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("256K"), "stripe(chunk=4K, concat(memory(size=128K)), concat(memory(size=128K)))"))
        .unwrap();
    let command = |service: &str| {
        let command = ServiceCommand { service: service.to_owned(), command: "dance".to_owned(), arguments: [].into() };
        rig.command_service("v", &command).unwrap_err().to_string()
    };
    assert_eq!(command("stripe"), "volume v: stripe: \"dance\" is no command of stripe; it has none");
    assert_eq!(
        command("mirror"),
        "volume v: it has no service mirror; it has stripe (no commands); concat, as stripe.0 and stripe.1 (no commands)"
    );
    let several = command("concat");
    assert!(several.ends_with("it has several services concat: say which, stripe.0 or stripe.1"), "{several}");
    for one in ["stripe.1", "stripe.1 (concat)"] {
        assert!(command(one).contains("no command of concat"), "{one}: {}", command(one));
    }
    // What is there is a back end.
    assert!(command("stripe.1.0").contains("it has no service stripe.1.0"));
    // Those that a change has kept are where they stand by now.
    rig.try_change("v", "meter | stripe(chunk=4K, concat(memory(size=128K)), concat(memory(size=128K)))", false).unwrap();
    assert!(command("meter.0.1").contains("no command of concat"), "{}", command("meter.0.1"));
    assert!(command("stripe.1").contains("it has no service stripe.1"), "{}", command("stripe.1"));
}

/// Of two legs the wrong one would be taken out of use, and nobody told.
#[test]
fn arguments_that_a_command_does_not_take_are_refused() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("meter(tenant=t) | mirror(@a, @b)"))).unwrap();
    rig.create_volume(&spec("w", Some("1M"), &rig.stack("mirror(@c, @d)"))).unwrap();
    let command = |volume: &str, service: &str, command: &str, arguments: &[(&str, &str)]| {
        let arguments = arguments.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let command = ServiceCommand { service: service.to_owned(), command: command.to_owned(), arguments };
        rig.command_service(volume, &command).map_err(|error| error.to_string())
    };
    for (volume, service) in [("v", "mirror"), ("v", "meter.0"), ("w", "mirror"), ("w", "top")] {
        for (name, arguments, why) in [
            ("fail", &[("force", "yes"), ("leg", "1")][..], "fail has no argument force; it takes leg"),
            ("scrub", &[("leg", "1")], "scrub has no argument leg; it takes none"),
        ] {
            let error = command(volume, service, name, arguments).unwrap_err();
            assert!(error.starts_with(&format!("volume {volume}: {service}: ")) && error.ends_with(why), "{error}");
        }
        let none = command(volume, service, "dance", &[("leg", "1")]).unwrap_err();
        assert!(none.contains("is no command of mirror"), "{none}");
        assert!(rig.volume(volume).unwrap().tree.status.is_none_or(|status| status.health == Health::Good));
    }
    command("w", "mirror", "fail", &[("leg", "1")]).unwrap();
}

/// Each as its service understands it.
#[test]
fn commands_say_which_arguments_they_take() {
    let mut takes = Vec::new();
    for kind in millrace_services::all() {
        for command in kind.commands {
            for name in ["leg", "name"] {
                let mut arguments = millrace_services::Settings::default();
                arguments.add(name, "1");
                if kind.check_arguments(command.name, &arguments).is_ok() {
                    takes.push(format!("{} {} {name}", kind.name, command.name));
                }
            }
        }
    }
    let known = ["disk release name", "mirror fail leg", "mirror rebuild leg", "parity fail leg", "parity rebuild leg"];
    assert_eq!(takes, known);
}

/// The place of the uppermost one is its name, which is that of all.
#[test]
fn the_uppermost_service_is_told_from_those_of_its_kind_below_it() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", None, "concat(concat(memory(size=128K)), memory(size=128K))")).unwrap();
    let command = |service: &str| {
        let command = ServiceCommand { service: service.to_owned(), command: "dance".to_owned(), arguments: [].into() };
        rig.command_service("v", &command).unwrap_err().to_string()
    };
    let several = command("concat");
    assert!(several.ends_with("it has several services concat: say which, top or concat.0"), "{several}");
    for one in ["top", "concat.0"] {
        assert!(command(one).contains("no command of concat"), "{one}: {}", command(one));
    }
    let none = command("mirror");
    assert!(none.ends_with("it has concat, as top and concat.0 (no commands)"), "{none}");
    // It is what is uppermost now, several of it or not. A back end takes no commands.
    rig.try_change("v", "meter | concat(concat(memory(size=128K)), memory(size=128K))", false).unwrap();
    assert!(command("top").contains("no command of meter"), "{}", command("top"));
    rig.create_volume(&spec("b", Some("64K"), "memory")).unwrap();
    let top = ServiceCommand { service: "top".to_owned(), command: "dance".to_owned(), arguments: [].into() };
    let refused = rig.command_service("b", &top).unwrap_err().to_string();
    assert!(refused.contains("it has no service top; it has none at all"), "{refused}");
}

#[test]
fn of_several_services_who_is_not_well_is_told_by_its_place() {
    let unwell = |stack: &str, legs: &[usize]| {
        let mut tree = Tree::of(&stack.parse().unwrap());
        let node = legs.iter().fold(&mut tree, |node, leg| &mut node.over[*leg]);
        node.status = Some(Status { health: Health::Degraded, ..Status::good([]) });
        super::super::graphs::unwell(&tree).unwrap()
    };
    let degraded = |node: &str| (Health::Degraded, node.to_owned());
    assert_eq!(unwell("meter | mirror(null, null)", &[0]), degraded("mirror"));
    let two = "stripe(mirror(null, null), mirror(null, null))";
    assert_eq!(unwell(two, &[1]), degraded("stripe.1 (mirror)"));
    assert_eq!(unwell(&format!("meter | {two}"), &[0, 0]), degraded("meter.0.0 (mirror)"));
    for (legs, node) in [(&[][..], "top (mirror)"), (&[0], "mirror.0 (mirror)")] {
        assert_eq!(unwell("mirror(mirror(null, null), null)", legs), degraded(node));
    }
    let mut tree = Tree::of(&"mirror(null, null, null)".parse().unwrap());
    let legs = [("leg 0", "good"), ("leg 1", "failed"), ("leg 2", "being filled")].map(|(leg, is)| (leg, is.to_owned()));
    tree.status = Some(Status { health: Health::Degraded, ..Status::good(legs) });
    let told = super::super::graphs::unwell(&tree).unwrap();
    assert_eq!(told, degraded("mirror: leg 1 failed, leg 2 being filled"));
}

#[test]
fn services_are_listed_to_who_names_a_wrong_one() {
    let rig = Rig::new();
    rig.create_volume(&spec("m", Some("1M"), &rig.stack("mirror(@a, @b)"))).unwrap();
    rig.create_volume(&spec("p", Some("256K"), "memory")).unwrap();
    let command = |volume: &str| {
        let command = ServiceCommand { service: "cache".to_owned(), command: "flush".to_owned(), arguments: [].into() };
        rig.command_service(volume, &command).unwrap_err().to_string()
    };
    let (mirror, plain) = (command("m"), command("p"));
    assert!(mirror.starts_with("volume m: it has no service cache; it has mirror (fail, rebuild, "), "{mirror}");
    assert!(plain.contains("it has no service cache; it has none at all"), "{plain}");
}

#[test]
fn what_a_change_will_have_is_taken() {
    let rig = Rig::new();
    for name in ["v", "l", "w"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.create_device(&device("d", "{}")).unwrap();
    // A change of v is under way: nobody has its lock, and nothing of it is stored.
    let coming = rig.stack("mirror(@v.img, volume:l)").parse().unwrap();
    rig.peek().changing.insert("v".parse().unwrap(), coming);
    let refused = |result: Result<(), ControlError>| {
        let error = result.expect_err("it is to be v's");
        assert!(error.class() == Class::Conflict || error.class() == Class::Invalid, "{error}");
        assert!(error.to_string().contains("volume v"), "{error}");
    };
    refused(rig.attach("d", &attach("l", None)).map(drop));
    refused(rig.delete_volume("l"));
    refused(rig.create_volume(&spec("over", None, "throttle(iops=1000) | volume:l")).map(drop));
    refused(rig.try_change("w", "mirror(@w.img, volume:l)", true).map(drop));
    refused(rig.try_change("l", "throttle(iops=1000) | volume:v", true).map(drop));
    let copy = serde_json::from_str(r#"{"source":"w","target":"l"}"#).unwrap();
    refused(rig.create_copy(&copy).map(drop));
    rig.peek().changing.clear();
    rig.attach("d", &attach("l", None)).unwrap();
}

#[test]
fn a_guests_own_volume_that_is_being_changed_keeps_its_owner() {
    let rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.create_volume(&rig.file_volume("own", "64K")).unwrap();
    rig.attach("d", &attach("own", None)).unwrap();
    let stack = {
        let mut inner = rig.peek();
        let record = &mut inner.volumes.get_mut("own").unwrap().record;
        record.created_by = Some("d".parse().unwrap());
        record.spec.stack.clone()
    };
    rig.peek().changing.insert("own".parse().unwrap(), stack);
    for refused in [rig.detach("d", 1), rig.delete_device("d")] {
        assert!(matches!(refused, Err(ControlError::Changing { .. })), "{refused:?}");
    }
    rig.peek().changing.clear();
    rig.delete_device("d").unwrap();
}

#[test]
fn what_was_done_is_on_the_account_before_its_meter_goes() {
    type Goes = fn(&Rig);
    let ways: [Goes; 5] = [
        |rig| {
            rig.detach("d", 1).unwrap();
            rig.delete_volume("v").unwrap();
        },
        |rig| drop(rig.try_change("v", "memory", true).unwrap()),
        |rig| drop(rig.try_change("v", "meter(tenant=y) | memory", false).unwrap()),
        |rig| rig.shutdown(),
        |rig| rig.leave_all(1),
    ];
    for (way, goes) in ways.into_iter().enumerate() {
        let mut rig = Rig::new();
        rig.create_volume(&spec("v", Some("256K"), "meter(tenant=x) | throttle(iops=200) | memory")).unwrap();
        rig.create_device(&device("d", "{}")).unwrap();
        rig.attach("d", &attach("v", None)).unwrap();
        // From the first line on there is time for others.
        let is_begun = || !rig.usage(&UsageQuestion::default()).unwrap().is_empty();
        eventually("the account's first line", || is_begun().then_some(()));
        under_load(&rig, || ());
        let counted = {
            let inner = rig.peek();
            let (_, meter) = inner.volumes["v"].graph.as_ref().unwrap().graph.services("meter").remove(0);
            millrace_services::meter::read(&meter).unwrap().all
        };
        goes(&rig);
        let rows = rig.usage(&UsageQuestion { by: UsageBy::Tenant, ..UsageQuestion::default() }).unwrap();
        let (row, throttled_us) = (&rows[0], counted.throttled_us);
        assert_eq!((row.reads, row.writes, row.throttled_us), (counted.reads, counted.writes, throttled_us), "way {way}");
        assert!(throttled_us > 0, "way {way}: nothing was held back");
        let rows = rig.usage(&UsageQuestion { by: UsageBy::Device, ..UsageQuestion::default() }).unwrap();
        let of_device = rows.iter().find(|row| row.name == "d").map(|row| row.reads + row.writes);
        assert_eq!(of_device, Some(counted.reads + counted.writes), "way {way}: {rows:?}");
        if way == 4 {
            // Nothing of it answers any more.
            std::mem::forget(rig.manager.take());
        }
    }
}

/// A guest writes 4 KiB so many times.
pub(super) fn write(rig: &Rig, device: &str, writes: usize) {
    let mut guest = Controller::connect(&rig.path(&format!("{device}.sock")), &Options::default()).unwrap();
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    for _ in 0..writes {
        queue.execute(&namespace.write(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
    }
}

/// Of two meters the upper one is on the account, whichever was there first, and nobody pays for what is on another's.
#[test]
fn a_meter_comes_and_goes_above_another_and_nothing_is_charged_twice() {
    let mut rig = Rig::new();
    let (lower, both) = ("meter(tenant=b) | @v.img", "meter(tenant=a) | meter(tenant=b) | @v.img");
    rig.create_volume(&spec("v", Some("256K"), &rig.stack(lower))).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", Some(1))).unwrap();
    let on_account = |rig: &Rig| {
        rig.settle_volume(&rig.peek(), "v");
        let rows = rig.usage(&UsageQuestion { by: UsageBy::Tenant, ..UsageQuestion::default() }).unwrap();
        rows.into_iter().map(|row| (row.name, row.writes)).collect::<Vec<_>>()
    };
    let line = |tenant: &str, writes: u64| (tenant.to_owned(), writes);
    write(&rig, "d", 3);
    rig.try_change("v", both, false).unwrap();
    write(&rig, "d", 5);
    assert_eq!(on_account(&rig), [line("a", 5), line("b", 3)]);
    rig.try_change("v", lower, false).unwrap();
    write(&rig, "d", 1);
    assert_eq!(on_account(&rig), [line("a", 5), line("b", 4)]);
    // Both are there from the start, and count alike.
    rig.try_change("v", both, false).unwrap();
    rig.restart();
    write(&rig, "d", 7);
    rig.try_change("v", lower, false).unwrap();
    write(&rig, "d", 2);
    assert_eq!(on_account(&rig), [line("a", 12), line("b", 6)]);
}

/// Of a volume that several devices show, each has on the account what it has done, whether it goes or stays, and when a service above has
/// held its requests back; the volume's size is there once.
#[test]
fn devices_that_share_a_volume_have_accounts_of_their_own() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("256K"), "throttle(iops=200) | meter(tenant=x) | memory")).unwrap();
    let by = |by| rig.usage(&UsageQuestion { by, ..UsageQuestion::default() }).unwrap();
    for name in ["d", "e", "f"] {
        rig.create_device(&device(name, "{}")).unwrap();
        rig.attach(name, &attach("v", Some(1))).unwrap();
    }
    eventually("the account's first line", || (!by(UsageBy::Volume).is_empty()).then_some(()));
    let write = |name: &str, writes: usize| write(&rig, name, writes);
    write("d", 3);
    write("e", 5);
    write("f", 7);
    // Whoever has the volume's line: when the first goes, it is the second's.
    rig.detach("d", 1).unwrap();
    write("e", 10);
    write("f", 20);
    rig.delete_device("f").unwrap();
    rig.detach("e", 1).unwrap();
    let written = |rows: Vec<UsageRow>| {
        // The time before the first attachment is nobody's.
        let rows = rows.into_iter().filter(|row| !row.name.is_empty() || row.writes > 0);
        rows.map(|row| (row.name, row.writes, row.written_bytes >> 12)).collect::<Vec<_>>()
    };
    let line = |name: &str, writes: u64| (name.to_owned(), writes, writes);
    assert_eq!(written(by(UsageBy::Device)), [line("d", 3), line("e", 15), line("f", 27)]);
    assert_eq!(written(by(UsageBy::Volume)), [line("v", 45)]);
    let size = |rows: Vec<UsageRow>| {
        rows.iter().map(|row| (row.seconds, row.provisioned_byte_seconds)).fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
    };
    let (seconds, provisioned) = size(by(UsageBy::Device));
    assert_eq!(size(by(UsageBy::Volume)), (seconds, provisioned));
    assert_eq!(provisioned, u128::from(seconds) * (256 << 10), "once, whoever shows it");
}

/// The legs' own records do not tell which of two is old when the other one is gone; the state does.
#[test]
fn a_mirror_goes_on_without_a_leg_and_never_with_an_old_one() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("mirror(@a, @b)"))).unwrap();
    let (a, b) = (rig.path("a"), rig.path("b"));
    let away = rig.path("away");
    fs::rename(&a, &away).unwrap();
    rig.restart();
    let view = rig.volume("v").unwrap();
    assert!(format!("{:?}", view.tree).contains("No such file"), "{:?}", view.tree);
    assert_eq!((view.state, rig.status().failed.len()), (State::Ready, 0));
    assert_eq!((view.health, view.unwell.as_deref()), (Health::Degraded, Some("mirror: leg 0 failed")));
    assert_eq!(rig.status().degraded, ["volume v: mirror: leg 0 failed"]);
    // What is above it changes while the leg is not there, and its file is not made.
    rig.try_change("v", "meter(tenant=t) | mirror(@a, @b)", false).unwrap();
    assert!(!a.exists());
    // Now the other one is gone, and this one does not know what was written without it.
    fs::rename(&away, &a).unwrap();
    fs::rename(&b, &away).unwrap();
    rig.restart();
    let view = rig.volume("v").unwrap();
    assert_eq!(view.state, State::Failed);
    assert!(view.reason.as_ref().is_some_and(|why| why.contains("No such file")), "{:?}", view.reason);
    fs::rename(&away, &b).unwrap();
    rig.restart();
    assert_eq!(rig.volume("v").unwrap().state, State::Ready);
    eventually("both legs are good", || rig.status().degraded.is_empty().then_some(()));
}

#[test]
fn a_size_that_the_stack_has_not_is_refused_with_the_one_that_it_has() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), "memory")).unwrap();
    let refused = rig.create_volume(&spec("w", Some("64K"), "volume:v")).unwrap_err().to_string();
    assert_eq!(refused, "volume w: size 64K is not usable: its stack has 1M");
}
