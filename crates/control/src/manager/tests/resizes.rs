//! Resizes that take long: who waits for them, and who is told so.

use std::{
    sync::mpsc::{Sender, channel},
    thread::JoinHandle,
};

use millrace_block::{BlockCount, Volume as Blocks, VolumeError};

use super::{
    stacks::spec,
    twisted::{Twist, Twisted},
    *,
};
use crate::{manager::shutdown::Limits, upgrade::UpgradeSpec, usage::UsageQuestion};

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
        let resizing = thread::spawn(move || manager.resize_volume(&name, to));
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
    assert_eq!(rig.resize_volume("other", size("3M")).unwrap().size, size("3M"));
    rig.attach("d", &attach("other", None)).unwrap();
    assert_eq!(rig.volume("v").unwrap().size, size("1M"));
    for name in ["v", "l"] {
        let refused = |result: Result<(), ControlError>| {
            let error = result.expect_err("it is being resized");
            assert!(matches!(&error, ControlError::Resizing { by, .. } if by.as_str() == "v"), "{error}");
            assert_eq!((error.class(), error.code()), (Class::Conflict, "resizing"));
        };
        refused(rig.resize_volume(name, size("4M")).map(drop));
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
    let refused = rig.upgrade(&upgrade).unwrap_err().to_string();
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
    assert!(matches!(rig.resize_volume("s", size("256K")), Err(ControlError::Resizing { .. })));
    assert!(matches!(rig.delete_volume("s"), Err(ControlError::Resizing { .. })));
    tell.send(()).unwrap();
    resizing.join().unwrap().unwrap();
    rig.resize_volume("s", size("256K")).unwrap();
}

/// A change of a disk may take long, and its guests wait for the end of it: no room is given or taken meanwhile.
#[test]
fn what_shares_a_disk_waits_while_that_is_changed() {
    let rig = Rig::new();
    rig.create_volume(&spec("pool", Some("512K"), &rig.stack("disk(extent=64K) | @disk.img"))).unwrap();
    rig.create_volume(&spec("s", Some("128K"), "share | volume:pool")).unwrap();
    let stack = rig.peek().volumes["pool"].record.spec.stack.clone();
    rig.peek().changing.insert("pool".parse().unwrap(), stack);
    assert!(matches!(rig.resize_volume("s", size("256K")), Err(ControlError::Changing { .. })));
    assert!(matches!(rig.delete_volume("s"), Err(ControlError::Changing { .. })));
    let refused = rig.create_volume(&spec("t", Some("64K"), "share | volume:pool")).unwrap_err().to_string();
    assert!(refused.contains("is being changed"), "{refused}");
    rig.peek().changing.clear();
    rig.resize_volume("s", size("256K")).unwrap();
    rig.create_volume(&spec("t", Some("64K"), "share | volume:pool")).unwrap();
    rig.delete_volume("s").unwrap();
}

#[test]
fn the_daemon_ends_after_a_resize() {
    let mut rig = Rig::new();
    rig.create_volume(&rig.file_volume("v", "1M")).unwrap();
    let (tell, resizing) = rig.resize_slowly("v", "2M");
    let manager = Arc::clone(rig.manager.as_ref().unwrap());
    let ending = thread::spawn(move || manager.shutdown());
    eventually("the beginning of the end", || rig.peek().stopping.then_some(()));
    assert!(matches!(rig.resize_volume("v", size("3M")), Err(ControlError::Stopping)));
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
    rig.resize_volume("v", size("1M")).unwrap();
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
