//! Volumes that do not flush as they should: the end of the daemon, and of their time in a worker.

use millrace_block::{BlockError, Operation, Request, Step as Begun, TaskContext, Volume as Blocks};

use super::{guests::HUNG, stacks::spec, twisted::Twist, *};
use crate::{
    manager::shutdown::{FlushError, Limits, flush},
    upgrade::UpgradeSpec,
};

/// How flushes go.
enum Flushes {
    Hang,
    Fail,
}

impl Twist for Flushes {
    fn submit<'a>(&'a self, below: &'a dyn Blocks, cx: TaskContext<'a>, request: Request<'a>) -> Begun<'a> {
        match (request.operation, self) {
            (Operation::Flush, Self::Hang) => Begun::Wait(cx.scratch.place_future(std::future::pending())),
            (Operation::Flush, Self::Fail) => Begun::Done(Err(BlockError::WriteFault { errno: 5 })),
            _ => below.submit(cx, request),
        }
    }
}

impl Rig {
    fn note_loss(&self, name: &str) {
        self.peek().volumes[name].graph.as_ref().unwrap().switch.note_loss();
    }

    /// What a guest's flush comes to.
    fn flush(&self, name: &str) -> Result<(), FlushError> {
        let volume = Arc::clone(&self.peek().volumes[name].live().unwrap().volume);
        flush(&self.shards, &volume, Instant::now() + PATIENCE)
    }
}

const LIMIT: Duration = Duration::from_secs(600);

fn look() -> Step {
    Step::Look { volume: "v".to_owned() }
}

fn open(closed: Vec<VolumeRecord>) -> Step {
    Step::Open { volumes: vec!["v".parse().unwrap()], closed }
}

#[test]
fn a_volume_that_hangs_costs_the_others_nothing_at_the_end() {
    let rig = Rig::new();
    for name in ["a", "b", "c"] {
        rig.create_volume(&rig.file_volume(name, "64K")).unwrap();
    }
    rig.twist("a", Flushes::Hang);
    rig.twist("c", Flushes::Fail);
    rig.shutdown_within(&Limits { volumes: Duration::from_secs(5), ..Limits::USUAL });
    let records = rig.store.load().unwrap().0;
    let untold: Vec<_> = records.iter().map(|record| (record.spec.name.as_str(), record.untold)).collect();
    assert_eq!(untold, [("a", false), ("b", false), ("c", true)], "what is not known is told to nobody, as after a kill");
    let is_free = |name: &str| fs::File::open(rig.path(name)).unwrap().try_lock().is_ok();
    eventually("files that are closed", || (is_free("b.img") && is_free("c.img")).then_some(()));
    assert!(!is_free("a.img"), "it is left as it was");
}

/// It takes no requests meanwhile: a leg of a mirror would be taken for an ill one.
#[test]
fn a_volume_that_is_being_formatted_is_not_flushed_at_the_end() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("a", "64K")).unwrap();
    rig.twist("a", Flushes::Fail);
    rig.peek().formatting.insert("a".parse().unwrap());
    let soon = Duration::from_millis(100);
    rig.shutdown_within(&Limits { resizes: soon, volumes: soon, ..Limits::USUAL });
    assert!(!rig.store.load().unwrap().0[0].untold, "no flush has failed");
}

#[test]
fn what_could_not_be_made_durable_before_a_move_is_told_after_it() {
    let (rig, other) = (Rig::new(), Rig::new());
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    rig.twist("v", Flushes::Fail);
    let records = rig.step(&look()).unwrap();
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    let refused = rig.step(&Step::release_looked(&records, LIMIT)).unwrap_err().to_string();
    assert!(refused.contains("could not be made durable") && refused.contains("all the same"), "{refused}");
    assert_eq!(rig.volume("v").unwrap().state, State::Ready, "nothing has happened yet");
    let records = rig.step(&look()).unwrap();
    assert!(records[0].untold, "it goes along");
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    rig.step(&Step::release_looked(&records, LIMIT)).unwrap();
    other.step(&open(Vec::new())).unwrap();
    assert!(matches!(other.flush("v"), Err(FlushError::Volume(_))));
    other.flush("v").expect("it is told once");
}

/// What is below tells of a loss once: here to who could not open the volume for that.
#[test]
fn what_an_opening_that_failed_has_found_out_is_told_after_the_next_one() {
    for stack in ["integrity | volume:a", "metadata | volume:a", "cache(mode=back, volume:a) | @b"] {
        let mut rig = Rig::new();
        rig.create_volume(&rig.file_volume("a", "8M")).unwrap();
        rig.create_volume(&spec("v", Some("1M"), &rig.stack(stack))).unwrap();
        rig.stop();
        let store = open_store(rig.directory.path());
        store.amend([&"a".parse().unwrap()], |record| record.untold = true).unwrap();
        drop(store);
        rig.start();
        assert_eq!(rig.volume("v").unwrap().state, State::Failed, "{stack}");
        let untold = |name: &str| rig.store.volume(&name.parse().unwrap()).unwrap().unwrap().untold;
        assert_eq!((untold("a"), untold("v")), (false, true), "{stack}");
        rig.restart();
        assert!(matches!(rig.flush("v"), Err(FlushError::Volume(_))), "{stack}");
        rig.flush("v").expect("it is told once");
    }
}

/// Between the looks for it, and when it is closed.
#[test]
fn what_a_volume_finds_out_on_its_way_is_told_where_it_goes() {
    let (rig, other) = (Rig::new(), Rig::new());
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let records = rig.step(&look()).unwrap();
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    rig.note_loss("v");
    let refused = rig.step(&Step::release_looked(&records, LIMIT)).unwrap_err().to_string();
    assert!(refused.contains("changed meanwhile"), "{refused}");
    rig.flush("v").unwrap_err();
    let records = rig.step(&look()).unwrap();
    assert!(!records[0].untold, "it was told");
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    let mut closed = rig.step(&Step::release_looked(&records, LIMIT)).unwrap();
    assert_eq!(closed, records, "what it was when it was closed");
    closed[0].untold = true;
    other.step(&open(closed)).unwrap();
    assert!(other.store.volume(&"v".parse().unwrap()).unwrap().unwrap().untold, "a worker that dies tells it, too");
    assert!(matches!(other.flush("v"), Err(FlushError::Volume(_))));
    other.flush("v").expect("it is told once");
}

#[test]
fn a_volume_that_comes_and_hangs_keeps_nobody_else_waiting() {
    let (rig, other) = (Rig::new(), Rig::new());
    rig.create_volume(&rig.file_volume("v", "64K")).unwrap();
    let records = rig.step(&look()).unwrap();
    other.step(&Step::Receive { records: records.clone() }).unwrap();
    rig.step(&Step::release_looked(&records, LIMIT)).unwrap();
    let (release, hung) = channel();
    HUNG.lock().unwrap().insert(rig.path("v.img"), hung);
    let mut closed = records;
    closed[0].untold = true;
    thread::scope(|scope| {
        let opening = scope.spawn(|| other.step(&open(closed)));
        eventually("a look that hangs", || (!HUNG.lock().unwrap().contains_key(&rig.path("v.img"))).then_some(()));
        assert_eq!(other.volume("v").unwrap().state, State::Failed);
        // Whoever finishes moves asks for it again: that hangs no second thread, and nobody else waits for it.
        let again = other.step(&open(Vec::new())).unwrap_err();
        assert!(again.class() == Class::Conflict && again.to_string().contains("being opened already"), "{again}");
        let stored = other.store.volume(&"v".parse().unwrap()).unwrap().unwrap();
        assert!(stored.untold, "whoever opens it in the end tells its next guest");
        assert!(!other.has_received() && other.opening().len() == 1, "it is not asked for once more");
        // Nor does who makes another one look at it.
        let (_, hung) = channel();
        HUNG.lock().unwrap().insert(rig.path("v.img"), hung);
        other.create_volume(&volume("k", "64K", "memory")).unwrap();
        assert!(HUNG.lock().unwrap().remove(&rig.path("v.img")).is_some(), "nobody has looked");
        assert!(!opening.is_finished(), "it waits");
        drop(release);
        opening.join().unwrap().unwrap();
    });
    assert_eq!(other.volume("v").unwrap().state, State::Ready);
    other.step(&open(Vec::new())).expect("it is over");
    assert!(matches!(other.flush("v"), Err(FlushError::Volume(_))));
}

/// The file systems that it looked at may have kept it waiting for hours.
#[test]
fn an_upgrade_that_nobody_waits_for_any_more_does_not_begin() {
    let rig = Rig::new();
    let spec = UpgradeSpec { binary: "/proc/self/exe".into(), trial_seconds: None };
    let refused = rig.prepare_upgrade(&spec, Uuid::new_v4(), || false).unwrap_err();
    assert!(refused.class() == Class::Conflict && refused.to_string().contains("has gone"), "{refused}");
    assert!(rig.last_upgrade().is_err(), "none is under way");
    rig.prepare_upgrade(&spec, Uuid::new_v4(), || true).unwrap();
}

/// As a file that is gone: this worker has the key, and no other one would get it.
#[test]
fn an_upgrade_does_not_begin_without_a_volumes_key() {
    let rig = Rig::new();
    rig.create_device(&device("d", "{}")).unwrap();
    let (path, upgrade) = (rig.path("key"), UpgradeSpec { binary: "/proc/self/exe".into(), trial_seconds: None });
    for (name, kind) in [("f", "file:"), ("c", "command:/bin/cat ")] {
        let source = format!("{kind}{}", path.display());
        fs::write(&path, [7; 32]).unwrap();
        let stack = rig.stack(&format!("crypt(key=\"{source}\") | @{name}.img"));
        rig.create_volume(&spec(name, Some("64K"), &stack)).unwrap();
        rig.attach("d", &attach(name, Some(1))).unwrap();
        fs::remove_file(&path).unwrap();
        let refused = rig.prepare_upgrade(&upgrade, Uuid::new_v4(), || true).unwrap_err();
        let (class, said) = (refused.class(), refused.to_string());
        assert!(class == Class::Conflict && said.contains(&format!("volume {name}: ")), "{said}");
        assert!(said.contains(&source), "{said}");
        rig.detach("d", 1).unwrap();
    }
    rig.prepare_upgrade(&upgrade, Uuid::new_v4(), || true).expect("no guest needs a key");
}
