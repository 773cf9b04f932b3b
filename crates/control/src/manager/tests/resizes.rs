//! Resizes that take long: who waits for them, and who is told so.

use std::{
    os::unix::fs::FileExt,
    sync::mpsc::{Sender, channel},
    thread::JoinHandle,
};

use millrace_block::{BlockCount, Volume as Blocks, VolumeError};

use super::{
    stacks::spec,
    twisted::{Twist, Twisted},
    *,
};
use crate::{manager::shutdown::Limits, store::Changes, upgrade::UpgradeSpec, usage::UsageQuestion};

/// Says when it is resized, and waits until it is told to go on: not for ever, so that a test of who waits for it ends.
struct Slow {
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Twist for Slow {
    fn resize(&self, below: &dyn Blocks, blocks: BlockCount) -> Result<(), VolumeError> {
        self.begun.send(()).unwrap();
        let told = self.go_on.lock().unwrap().recv_timeout(PATIENCE);
        told.map_err(|_| VolumeError::Unsupported { volume: below.name().to_owned(), what: "waiting any longer" })?;
        below.resize(blocks)
    }
}

impl Rig {
    /// Resizes a volume, which takes until it is told to go on.
    fn resize_slowly(&self, name: &str, to: &str) -> (Sender<()>, JoinHandle<Result<VolumeView, ControlError>>) {
        let ((begun, has_begun), (tell, go_on)) = (channel(), channel());
        self.twist(name, Slow { begun, go_on: Mutex::new(go_on) });
        (tell, self.begin_to_resize(name, to, &has_begun))
    }

    /// The same inside of it: what is stored changes already.
    fn grow_slowly(&self, name: &str, to: &str) -> (Sender<()>, JoinHandle<Result<VolumeView, ControlError>>) {
        let ((begun, has_begun), (tell, go_on)) = (channel(), channel());
        {
            let inner = self.peek();
            let switch = &inner.volumes[name].graph.as_ref().unwrap().switch;
            let slow: Arc<dyn Blocks> =
                Arc::new(Twisted { below: switch.root(), twist: Slow { begun, go_on: Mutex::new(go_on) } });
            switch.change(&slow, PATIENCE, || Ok::<(), VolumeError>(())).unwrap();
        }
        (tell, self.begin_to_resize(name, to, &has_begun))
    }

    fn begin_to_resize(
        &self,
        name: &str,
        to: &str,
        has_begun: &Receiver<()>,
    ) -> JoinHandle<Result<VolumeView, ControlError>> {
        let (manager, name, to) = (Arc::clone(self.manager.as_ref().unwrap()), name.to_owned(), size(to));
        let resizing = thread::spawn(move || manager.resize_volume(&name, to, false));
        has_begun.recv_timeout(PATIENCE).unwrap();
        resizing
    }
}

#[test]
fn nobody_waits_for_a_resize_and_whom_it_concerns_is_told() {
    let mut rig = Rig::new();
    for name in ["l", "other"] {
        rig.create_volume(&rig.file_volume(name, "1M")).unwrap();
    }
    rig.create_volume(&spec("v", None, "throttle(iops=100K) | volume:l")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    let (tell, resizing) = rig.resize_slowly("v", "2M");
    // All others go on.
    rig.create_volume(&rig.file_volume("new", "64K")).unwrap();
    assert_eq!(rig.resize_volume("other", size("3M"), false).unwrap().size, size("3M"));
    rig.attach("d", &attach("other", None)).unwrap();
    assert_eq!(rig.volume("v").unwrap().size, size("1M"));
    for name in ["v", "l"] {
        let refused = |result: Result<(), ControlError>| {
            let error = result.expect_err("it is being resized");
            assert!(matches!(&error, ControlError::Resizing { by, .. } if by.as_str() == "v"), "{error}");
            assert_eq!((error.class(), error.code()), (Class::Conflict, "resizing"));
        };
        refused(rig.resize_volume(name, size("4M"), false).map(drop));
        refused(rig.try_change(name, "throttle(iops=1000) | volume:other", true).map(drop));
        refused(rig.delete_volume(name));
        refused(rig.attach("d", &attach(name, None)).map(drop));
        let to = serde_json::from_str(&format!(r#"{{"to":"file:{}"}}"#, rig.path("to").display())).unwrap();
        refused(rig.migrate_volume(name, &to).map(drop));
        let copy = serde_json::from_str(&format!(r#"{{"source":"new","target":"{name}"}}"#)).unwrap();
        refused(rig.create_copy(&copy).map(drop));
    }
    let over = rig.create_volume(&spec("over", None, "throttle(iops=1000) | volume:v")).unwrap_err().to_string();
    assert!(over.contains("volume v is being resized"), "{over}");
    // Nobody lets go in the middle of it: the keeper would not wait.
    let upgrade = UpgradeSpec { binary: "/proc/self/exe".into(), trial_seconds: None };
    let refused = rig.upgrade(&upgrade, || true).unwrap_err().to_string();
    assert!(refused.contains("volume v is being resized"), "{refused}");
    assert!(!resizing.is_finished(), "the resize was not waited for");
    tell.send(()).unwrap();
    assert_eq!(resizing.join().unwrap().unwrap().size, size("2M"));
    assert_eq!((rig.volume("v").unwrap().size, rig.volume("l").unwrap().size), (size("2M"), size("2M")));
    assert!(rig.peek().resizing.is_empty());
    rig.restart();
    for (name, has) in [("v", "2M"), ("l", "2M"), ("other", "3M")] {
        let view = rig.volume(name).unwrap();
        assert_eq!((view.state, view.size), (State::Ready, size(has)), "{:?}", view.reason);
    }
}

#[test]
fn a_volume_is_made_smaller_by_who_means_it_only() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "1M")).unwrap();
    rig.create_volume(&spec("pool", Some("1M"), &rig.stack("disk(extent=64K) | @pool.img"))).unwrap();
    rig.create_volume(&spec("s", Some("256K"), "share | volume:pool")).unwrap();
    let length = || fs::metadata(rig.path("v.img")).unwrap().len();
    for (name, has, wanted, lost) in
        [("v", "1M", "512K", "512K"), ("pool", "1M", "768K", "256K"), ("s", "256K", "192K", "64K")]
    {
        let refused = rig.resize_volume(name, size(wanted), false).unwrap_err();
        let told = format!("volume {name} has {has}, and {wanted} is smaller: what lies in its last {lost} would be lost");
        assert_eq!(refused.to_string(), told);
        assert_eq!((refused.class(), refused.code()), (Class::Conflict, "would-shrink"));
        assert!(refused.advice().unwrap().contains("--shrink (over the API: \"shrink\": true)"));
        assert_eq!((rig.volume(name).unwrap().size, length()), (size(has), 1 << 20));
    }
    // The size that it has takes nothing away.
    rig.resize_volume("v", size("1M"), false).unwrap();
    let change = |body: &str| rig.change_volume("v", &serde_json::from_str(body).unwrap());
    let refused = change(r#"{"size":"512K"}"#).unwrap_err();
    assert!(matches!(refused, ControlError::WouldShrink { .. }), "{refused}");
    assert_eq!(change(r#"{"size":"512K","shrink":true}"#).unwrap().size, size("512K"));
    assert_eq!(length(), 512 << 10);
    // It may be smaller, and need not.
    assert_eq!(change(r#"{"size":"2M","shrink":true}"#).unwrap().size, size("2M"));
    let refused = change(r#"{"stack":"memory","shrink":true}"#).unwrap_err();
    assert!(refused.class() == Class::Invalid && refused.to_string().contains("\"shrink\" is of a change of its size"));
}

#[test]
fn a_resize_that_fails_leaves_its_volume_as_it_was() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "1M")).unwrap();
    let (tell, resizing) = rig.resize_slowly("v", "2M");
    drop(tell);
    assert!(resizing.join().unwrap().is_err());
    assert_eq!(rig.volume("v").unwrap().size, size("1M"));
    rig.try_change("v", "throttle(iops=1000) | @v.img", false).unwrap();
}

#[test]
fn what_shares_a_disk_waits_while_that_is_resized() {
    let rig = Rig::new();
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @disk.img"))).unwrap();
    rig.create_volume(&spec("s", Some("128K"), "share | volume:pool")).unwrap();
    let (tell, resizing) = rig.resize_slowly("pool", "1M");
    assert!(matches!(rig.resize_volume("s", size("256K"), false), Err(ControlError::Resizing { .. })));
    assert!(matches!(rig.delete_volume("s"), Err(ControlError::Resizing { .. })));
    tell.send(()).unwrap();
    resizing.join().unwrap().unwrap();
    rig.resize_volume("s", size("256K"), false).unwrap();
}

/// A change of a disk may take long, and its guests wait for the end of it: no room is given or taken meanwhile.
#[test]
fn what_shares_a_disk_waits_while_that_is_changed() {
    let rig = Rig::new();
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @disk.img"))).unwrap();
    rig.create_volume(&spec("s", Some("128K"), "share | volume:pool")).unwrap();
    let stack = rig.peek().volumes["pool"].record.spec.stack.clone();
    rig.peek().changing.insert("pool".parse().unwrap(), stack);
    assert!(matches!(rig.resize_volume("s", size("256K"), false), Err(ControlError::Changing { .. })));
    assert!(matches!(rig.delete_volume("s"), Err(ControlError::Changing { .. })));
    let refused = rig.create_volume(&spec("t", Some("64K"), "share | volume:pool")).unwrap_err().to_string();
    assert!(refused.contains("is being changed"), "{refused}");
    rig.peek().changing.clear();
    rig.resize_volume("s", size("256K"), false).unwrap();
    rig.create_volume(&spec("t", Some("64K"), "share | volume:pool")).unwrap();
    rig.delete_volume("s").unwrap();
}

/// Its extents are cleared, for hours on some disks: whoever gave room back would wait for that with everything locked.
#[test]
fn nothing_on_a_disk_goes_while_another_volume_comes_to_it() {
    let rig = Rig::new();
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @disk.img"))).unwrap();
    rig.create_volume(&spec("s", Some("64K"), "share | volume:pool")).unwrap();
    rig.create_volume(&rig.file_volume("other", "64K")).unwrap();
    rig.create_volume(&rig.file_volume("comes", "64K")).unwrap();
    rig.peek().changing.insert("comes".parse().unwrap(), "share | volume:pool".parse().unwrap());
    let refused =
        |error: ControlError| assert!(matches!(&error, ControlError::Changing { name } if name.as_str() == "comes"));
    refused(rig.delete_volume("s").unwrap_err());
    refused(rig.resize_volume("pool", size("1M"), false).unwrap_err());
    refused(rig.try_change("pool", "disk(extent=64K) | throttle(iops=1M) | @disk.img", false).unwrap_err());
    // What is not on it goes, and who wants room there waits with nothing locked.
    rig.delete_volume("other").unwrap();
    rig.resize_volume("s", size("128K"), false).unwrap();
    rig.peek().changing.clear();
    rig.delete_volume("s").unwrap();
    rig.resize_volume("pool", size("1M"), false).unwrap();
}

#[test]
fn the_daemon_ends_after_a_resize() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "1M")).unwrap();
    let (tell, resizing) = rig.resize_slowly("v", "2M");
    let manager = Arc::clone(rig.manager.as_ref().unwrap());
    let ending = thread::spawn(move || manager.shutdown());
    eventually("the beginning of the end", || rig.peek().stopping.then_some(()));
    assert!(matches!(rig.resize_volume("v", size("3M"), false), Err(ControlError::Stopping)));
    assert!(!ending.is_finished() && rig.has_volume("v"), "it is not closed in the middle of it");
    tell.send(()).unwrap();
    assert_eq!(resizing.join().unwrap().unwrap().size, size("2M"));
    ending.join().unwrap();
    rig.restart();
    assert_eq!(rig.volume("v").unwrap().size, size("2M"));
}

/// A file system that does not answer may have it. What is about others is put in order; what it stored on its way stays, as after a kill.
#[test]
fn a_resize_that_does_not_end_keeps_the_daemon_for_a_while_only() {
    let rig = Rig::new();
    for name in ["v", "w"] {
        rig.create_volume(&rig.file_volume(name, "1M")).unwrap();
    }
    let (tell, resizing) = rig.grow_slowly("v", "2M");
    rig.shutdown_within(&Limits { resizes: Duration::ZERO, ..Limits::USUAL });
    let is_free = |name: &str| fs::File::open(rig.path(name)).unwrap().try_lock().is_ok();
    eventually("a file that is closed", || is_free("w.img").then_some(()));
    assert!(!is_free("v.img"), "who is in the midst of it has it");
    let stored = rig.store.volume(&"v".parse().unwrap()).unwrap().unwrap();
    assert_eq!((stored.size(), stored.growing), (size("1M"), Some(size("2M"))));
    tell.send(()).unwrap();
    assert!(resizing.join().unwrap().is_err(), "the volume is no more");
}

/// What a volume's services find out is stored beside its shape, which is older here than what is stored.
#[test]
fn what_a_growth_stores_and_what_is_found_out_meanwhile_stay_both() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "1M")).unwrap();
    let (tell, resizing) = rig.grow_slowly("v", "2M");
    let stored = |rig: &Rig| {
        let VolumeRecord { growing, untold, spec, .. } = rig.store.volume(&"v".parse().unwrap()).unwrap().unwrap();
        (spec.size.unwrap(), growing, untold)
    };
    assert_eq!(stored(&rig), (size("1M"), Some(size("2M")), false));
    rig.peek().volumes["v"].graph.as_ref().unwrap().switch.note_loss();
    rig.note_legs(&mut rig.peek());
    assert_eq!(stored(&rig), (size("1M"), Some(size("2M")), true));
    tell.send(()).unwrap();
    resizing.join().unwrap().unwrap();
    assert_eq!(stored(&rig), (size("2M"), None, true));
    rig.restart();
    let view = rig.volume("v").unwrap();
    assert_eq!((view.state, view.size), (State::Ready, size("2M")), "{:?}", view.reason);
}

/// The time before a resize is on the account at the size of then, also of what the volume is made of.
#[test]
fn a_resize_is_charged_from_then_on() {
    let rig = Rig::new();
    rig.create_volume(&spec("l", Some("256K"), &rig.stack("meter(tenant=x) | @l.img"))).unwrap();
    rig.create_volume(&spec("v", None, "meter(tenant=y) | volume:l")).unwrap();
    let settle = || {
        for name in ["l", "v"] {
            rig.settle_volume(&rig.peek(), name);
        }
    };
    settle();
    rig.account.pass(Duration::from_secs(100));
    rig.resize_volume("v", size("1M"), false).unwrap();
    rig.account.pass(Duration::from_secs(10));
    settle();
    let rows = rig.usage(&UsageQuestion::default()).unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        // Beyond what it had been at the first size all the time: ten seconds, and those that this took.
        let beyond = row.provisioned_byte_seconds - u128::from(row.seconds) * (256 << 10);
        assert!((10..100).contains(&(beyond / (768 << 10))), "{row:?}");
    }
}

/// Mirrors that have more than a stripe over them shows, in a volume that was never given a size.
#[test]
fn parts_that_keep_their_size_come_back_after_a_change_and_a_growth_that_was_cut_short() {
    let mut rig = Rig::new();
    for name in ["a", "b", "c", "d"] {
        fs::File::create(rig.path(name)).unwrap().set_len(1000 << 10).unwrap();
    }
    let stack = "stripe(chunk=256K, mirror(@a, @b), mirror(@c, @d))";
    let comes_back = |rig: &Rig, has: &str| {
        let view = rig.volume("v").unwrap();
        assert_eq!((view.state, view.size), (State::Ready, size(has)), "{:?}", view.reason);
    };
    rig.create_volume(&spec("v", None, &rig.stack(stack))).unwrap();
    comes_back(&rig, "1536K");
    rig.try_change("v", &format!("meter(tenant=x) | {stack}"), false).unwrap();
    rig.restart();
    comes_back(&rig, "1536K");
    let refused = rig.resize_volume("v", size("1536K"), false).unwrap_err().to_string();
    assert!(refused.contains("it has 958464 bytes and would have to have 786432"), "{refused}");
    // The power went before any leg was longer, and when some were: of no mirror, of one, of one and a half.
    let files = ["a", "b", "c", "d"];
    for longer in 0..files.len() {
        rig.stop();
        let store = open_store(rig.directory.path());
        let mut record = store.load().unwrap().0.remove(0);
        assert!(record.own_size && record.growing.is_none() && record.lengths.is_empty());
        record.growing = Some(size("2M"));
        record.lengths = files.map(|name| (rig.path(name), 1000 << 10)).into();
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        drop(store);
        for name in &files[..longer] {
            fs::File::options().write(true).open(rig.path(name)).unwrap().set_len((1 << 20) + (64 << 10)).unwrap();
        }
        rig.start();
        comes_back(&rig, "1536K");
        for name in files {
            assert_eq!(fs::metadata(rig.path(name)).unwrap().len(), 1000 << 10, "{name} when {longer} were longer");
        }
    }
    rig.resize_volume("v", size("2M"), false).unwrap();
    rig.restart();
    comes_back(&rig, "2M");
}

/// How long the files were is known as long as it takes.
#[test]
fn what_a_first_growth_stores_of_its_files_goes_when_it_is_done() {
    let rig = Rig::new();
    fs::File::create(rig.path("a")).unwrap().set_len(1 << 20).unwrap();
    rig.create_volume(&spec("v", None, &rig.stack("meter(tenant=x) | @a"))).unwrap();
    let stored = |rig: &Rig| rig.store.volume(&"v".parse().unwrap()).unwrap().unwrap();
    let (tell, resizing) = rig.grow_slowly("v", "2M");
    assert_eq!(stored(&rig).lengths, std::collections::BTreeMap::from([(rig.path("a"), 1 << 20)]));
    tell.send(()).unwrap();
    resizing.join().unwrap().unwrap();
    let record = stored(&rig);
    assert!(record.lengths.is_empty() && !record.own_size && record.size() == size("2M"), "{record:?}");
}

/// It is the first size of what is below as well.
#[test]
fn a_size_that_what_is_below_does_not_open_with_is_refused() {
    let mut rig = Rig::new();
    for (name, length) in [("x", 5 << 20), ("y", 4 << 20)] {
        fs::File::create(rig.path(name)).unwrap().set_len(length).unwrap();
    }
    rig.create_volume(&spec("below", None, &rig.stack("mirror(@x, @y)"))).unwrap();
    rig.create_volume(&spec("top", None, "throttle(iops=1M) | volume:below")).unwrap();
    let refused = rig.resize_volume("top", size("4544K"), false).unwrap_err().to_string();
    assert!(refused.contains("volume below: ") && refused.contains("make the volume larger"), "{refused}");
    let comes_back = |rig: &mut Rig, has: &str| {
        rig.restart();
        for name in ["below", "top"] {
            let view = rig.volume(name).unwrap();
            assert_eq!((view.state, view.size), (State::Ready, size(has)), "{name}: {:?}", view.reason);
        }
    };
    comes_back(&mut rig, "4032K");
    rig.resize_volume("top", size("8M"), false).unwrap();
    comes_back(&mut rig, "8M");
}

/// Of a leaf of a stated size nothing is cut off when the volume is made smaller: what is there is erased before it is shown again.
#[test]
fn a_growth_that_was_cut_off_shows_nothing_again() {
    for stack in ["integrity | @a(size=1M)", "metadata | @a(size=1M)"] {
        let mut rig = Rig::new();
        rig.create_volume(&spec("v", None, &rig.stack(stack))).unwrap();
        let (whole, at) = (rig.volume("v").unwrap().size, 512 << 10);
        let volume = |rig: &Rig| Arc::clone(&rig.peek().namespace_of(&"v".parse().unwrap()).unwrap().volume);
        millrace_services::legs::write(&volume(&rig), at, vec![7; 4096]).unwrap();
        rig.resize_volume("v", size("256K"), true).unwrap();
        rig.stop();
        let store = open_store(rig.directory.path());
        let mut record = store.load().unwrap().0.remove(0);
        record.growing = Some(whole);
        store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        drop(store);
        rig.start();
        let view = rig.volume("v").unwrap();
        assert_eq!((view.state, view.size), (State::Ready, size("256K")), "{stack}: {:?}", view.reason);
        rig.resize_volume("v", whole, false).unwrap();
        assert!(millrace_services::legs::read(&volume(&rig), at, 4096).unwrap() == [0; 4096], "{stack}");
    }
}

/// The same where a volume below has the size of the growth already. What is in its file is what a device would show again.
#[test]
fn a_growth_over_a_volume_that_was_cut_off_shows_nothing_again() {
    for stack in ["integrity | volume:b", "metadata | volume:b", "throttle(iops=1M) | integrity | volume:b"] {
        let mut rig = Rig::new();
        rig.create_volume(&rig.file_volume("b", "1M")).unwrap();
        rig.create_volume(&spec("v", None, stack)).unwrap();
        let (whole, at) = (rig.volume("v").unwrap().size, 512 << 10);
        rig.resize_volume("v", size("256K"), true).unwrap();
        let below = rig.volume("b").unwrap().size;
        assert!(below < size("1M"), "{stack}: {below}");
        rig.stop();
        let file = fs::File::options().write(true).open(rig.path("b.img")).unwrap();
        file.write_all_at(&vec![7; (1 << 20) - below.0 as usize], below.0).unwrap();
        let store = open_store(rig.directory.path());
        for mut record in store.load().unwrap().0 {
            match record.spec.name.as_str() {
                "b" => record.spec.size = Some(size("1M")),
                _ => record.growing = Some(whole),
            }
            store.apply(&Changes { put_volumes: vec![&record], ..Changes::default() }).unwrap();
        }
        drop(store);
        rig.start();
        for _ in 0..2 {
            for (name, has) in [("v", size("256K")), ("b", below)] {
                let view = rig.volume(name).unwrap();
                assert_eq!((view.state, view.size), (State::Ready, has), "{stack}, {name}: {:?}", view.reason);
            }
            rig.restart();
        }
        rig.resize_volume("v", whole, false).unwrap();
        let volume = Arc::clone(&rig.peek().namespace_of(&"v".parse().unwrap()).unwrap().volume);
        assert!(millrace_services::legs::read(&volume, at, 4096).unwrap() == [0; 4096], "{stack}");
    }
}

#[test]
fn a_format_comes_back_or_is_refused() {
    let mut rig = Rig::new();
    fs::File::create(rig.path("a")).unwrap().set_len(1 << 20).unwrap();
    rig.create_volume(&spec("own", None, &rig.stack("integrity | @a"))).unwrap();
    rig.create_volume(&spec("below", Some("512K"), &rig.stack("integrity | mirror(@b, @c)"))).unwrap();
    rig.create_volume(&spec("top", None, "throttle(iops=1M) | volume:below")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    for name in ["own", "top"] {
        rig.attach("d", &attach(name, None)).unwrap();
    }
    let (whole, next) = (rig.volume("own").unwrap().size, BlockSize::B4096);
    let [own, top] = ["own", "top"].map(|name| rig.peek().namespace_of(&name.parse().unwrap()).unwrap());
    // A leg of what it is made of would be told another size.
    assert!(rig.begin_format("d", &top, next).is_err());
    let formatting = rig.begin_format("d", &own, next).unwrap();
    own.volume.format(next).unwrap();
    rig.finish_format(formatting, Ok(())).unwrap();
    drop((own, top));
    rig.restart();
    let (half, now) = (size("512K"), BlockSize::B512);
    for (name, has, blocks) in [("own", whole, next), ("below", half, now), ("top", half, now)] {
        let view = rig.volume(name).unwrap();
        assert_eq!((view.state, view.size, view.block_size.0), (State::Ready, has, blocks), "{name}: {:?}", view.reason);
    }
}

#[test]
fn what_is_made_smaller_comes_back_or_is_refused() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("v", None, &rig.stack("integrity | @a(size=1000448)"))).unwrap();
    rig.create_volume(&spec("pool", Some("1M"), &rig.stack("disk(extent=64K) | mirror(@b, @c)"))).unwrap();
    rig.resize_volume("v", size("256K"), true).unwrap();
    let refused = rig.resize_volume("pool", size("512K"), true).unwrap_err().to_string();
    assert!(refused.contains("or not open again") && refused.contains("make another volume"), "{refused}");
    rig.restart();
    for (name, has) in [("v", "256K"), ("pool", "1M")] {
        let view = rig.volume(name).unwrap();
        assert_eq!((view.state, view.size), (State::Ready, size(has)), "{:?}", view.reason);
    }
    assert!(fs::metadata(rig.path("a")).unwrap().len() >= 1_000_448, "a leaf has what it is stated to have");
}
