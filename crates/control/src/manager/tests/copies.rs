//! Copies of volumes, as jobs that outlive the daemon.

use super::{stacks::under_load, *};
use crate::{
    manager::copies::ENDED,
    model::{CopyChange, CopySpec, CopyState, VolumeChange},
    store::{Changes, CopyRecord},
};

/// So slow that nothing of the kind ends within a test: a step of 64 KiB takes 16 seconds.
const SLOW: &str = "4K";

fn spec(name: Option<&str>, source: &str, target: &str, rate: Option<&str>) -> CopySpec {
    CopySpec {
        name: name.map(|name| name.parse().unwrap()),
        source: source.parse().unwrap(),
        target: target.parse().unwrap(),
        rate: rate.map(size),
    }
}

fn to(state: CopyState) -> CopyChange {
    CopyChange { state: Some(state), rate: None }
}

/// As fast as it goes.
fn at_once() -> CopyChange {
    CopyChange { state: None, rate: Some(Size(0)) }
}

/// So many bytes, all different.
fn content(bytes: u64) -> Vec<u8> {
    (0..bytes / 8).flat_map(|at| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

impl Rig {
    /// Volumes `a`, with content, and `b` in files of 1 MiB.
    fn two_files(&self) -> Vec<u8> {
        let data = content(1 << 20);
        fs::write(self.path("a.img"), &data).unwrap();
        for name in ["a", "b"] {
            self.create_volume(&self.file_volume(name, "1M")).unwrap();
        }
        data
    }

    fn has(&self, file: &str, data: &[u8]) -> bool {
        fs::read(self.path(file)).unwrap() == data
    }

    /// Waits until a copy has done something.
    fn begun(&self, name: &str) {
        eventually("the beginning of a copy", || (self.copy(name).unwrap().done > 0).then_some(()));
    }

    fn stored_copy(&self, name: &str) -> CopyRecord {
        self.store.load_copies().unwrap().into_iter().find(|record| record.name.as_str() == name).unwrap()
    }

    /// As the end of a start does.
    fn relaunch(&self, name: &str) {
        let mut inner = self.peek();
        inner.copies.get_mut(name).unwrap().record.state = CopyState::Running;
        self.launch(&mut inner, &name.parse().unwrap());
    }

    fn copied(&self, name: &str) -> CopyView {
        eventually("the end of a copy", || Some(self.copy(name).unwrap()).filter(|view| view.state != CopyState::Running))
    }
}

#[test]
fn a_volume_is_copied_and_the_copy_is_remembered() {
    let mut rig = Rig::new();
    let data = rig.two_files();
    let view = rig.create_copy(&spec(None, "a", "b", None)).unwrap();
    assert_eq!((view.name.as_str(), view.bytes), ("copy1", 1 << 20));
    let view = rig.copied("copy1");
    assert_eq!((view.state, view.done, view.moved + view.offloaded, view.skipped), (CopyState::Done, 1 << 20, 1 << 20, 0));
    assert!(rig.has("b.img", &data));
    rig.restart();
    assert_eq!(rig.copy("copy1").unwrap().state, CopyState::Done);
    // Its volumes are free again.
    rig.delete_volume("a").unwrap();
    rig.resize_volume("b", size("2M"), false).unwrap();
    let error = rig.change_copy("copy1", &to(CopyState::Running)).unwrap_err();
    assert!(error.to_string().contains("it is done"), "{error}");
    rig.delete_copy("copy1").unwrap();
    rig.restart();
    assert!(rig.copies().is_empty());
    assert!(matches!(rig.copy("copy1"), Err(ControlError::NoCopy { name }) if name == "copy1"));
}

#[test]
fn a_volume_that_a_guest_uses_is_copied() {
    let rig = Rig::new();
    let data = rig.two_files();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("a", None)).unwrap();
    under_load(&rig, || {
        for name in ["one", "two", "three"] {
            rig.create_copy(&spec(Some(name), "a", "b", None)).unwrap();
            assert_eq!(rig.copied(name).state, CopyState::Done);
        }
        // Where the guest does not write, the copy is what it is of.
        assert!(fs::read(rig.path("b.img")).unwrap()[256 << 10..] == data[256 << 10..]);
    });
    rig.create_copy(&spec(Some("last"), "a", "b", None)).unwrap();
    assert_eq!(rig.copied("last").state, CopyState::Done);
    assert!(rig.has("b.img", &fs::read(rig.path("a.img")).unwrap()));
}

#[test]
fn nobody_else_has_the_target_while_a_copy_is_under_way() {
    let rig = Rig::new();
    let data = rig.two_files();
    rig.create_volume(&rig.file_volume("c", "1M")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    for paused in [false, true] {
        if paused {
            assert_eq!(rig.change_copy("job", &to(CopyState::Paused)).unwrap().state, CopyState::Paused);
            assert_eq!(rig.change_copy("job", &to(CopyState::Paused)).unwrap().state, CopyState::Paused);
        }
        let held = |result: Result<(), ControlError>| match result {
            Err(ControlError::Copying { copy, .. }) => assert_eq!(copy.as_str(), "job"),
            other => panic!("{other:?}"),
        };
        held(rig.attach("d", &attach("b", None)).map(drop));
        held(rig.delete_volume("b"));
        held(rig.resize_volume("b", size("2M"), false).map(drop));
        held(
            rig.change_volume(
                "b",
                &VolumeChange { stack: Some("memory".parse().unwrap()), reformat: true, ..VolumeChange::default() },
            )
            .map(drop),
        );
        held(rig.create_copy(&spec(None, "c", "b", None)).map(drop));
        held(rig.create_copy(&spec(None, "b", "c", None)).map(drop));
        held(rig.delete_volume("a"));
        held(rig.resize_volume("a", size("512K"), false).map(drop));
        let over = super::stacks::spec("over", None, "concat(volume:b)");
        let error = rig.create_volume(&over).unwrap_err().to_string();
        assert!(error.contains("copy job writes to volume b"), "{error}");
        let error = rig.create_copy(&spec(Some("job"), "a", "c", None)).unwrap_err();
        assert!(matches!(error, ControlError::CopyExists { .. }), "{error}");
    }
    // A guest may have the source all the time.
    rig.attach("d", &attach("a", None)).unwrap();
    rig.change_copy("job", &CopyChange { state: Some(CopyState::Running), rate: Some(Size(0)) }).unwrap();
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert!(rig.has("b.img", &data));
    rig.attach("d", &attach("b", None)).unwrap();
}

#[test]
fn copies_go_on_after_a_restart_and_end_when_they_are_cancelled() {
    let mut rig = Rig::new();
    let data = rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.begun("job");
    rig.restart();
    let view = rig.copy("job").unwrap();
    assert_eq!((view.state, view.rate), (CopyState::Running, Some(size(SLOW))));
    rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    rig.restart();
    let view = rig.copy("job").unwrap();
    assert!(view.state == CopyState::Paused && view.done > 0 && view.done < view.bytes, "{view:?}");
    rig.change_copy("job", &at_once()).unwrap();
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Paused, "its rate is its rate only");
    rig.change_copy("job", &to(CopyState::Running)).unwrap();
    let view = rig.copied("job");
    assert_eq!((view.state, view.moved + view.offloaded + view.skipped), (CopyState::Done, 1 << 20));
    assert!(rig.has("b.img", &data));

    fs::write(rig.path("b.img"), vec![0; 1 << 20]).unwrap();
    rig.create_copy(&spec(Some("other"), "a", "b", Some(SLOW))).unwrap();
    rig.delete_copy("other").unwrap();
    assert!(!rig.has("b.img", &data));
    rig.delete_volume("b").unwrap();
    rig.restart();
    assert_eq!(rig.copies().len(), 1);
}

#[test]
fn a_copy_that_fails_says_why_and_can_be_tried_again() {
    let mut rig = Rig::new();
    let data = rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.stop();
    fs::rename(rig.path("b.img"), rig.path("aside")).unwrap();
    rig.start();
    let view = rig.copy("job").unwrap();
    assert!(view.state == CopyState::Failed && view.reason.as_ref().unwrap().contains("b.img"), "{view:?}");
    assert!(rig.status().failed.iter().any(|line| line.starts_with("copy job: ")), "{:?}", rig.status().failed);
    let error = rig.change_copy("job", &to(CopyState::Paused)).unwrap_err();
    assert!(error.to_string().contains("it has ended"), "{error}");
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("b.img")).unwrap();
    rig.start();
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Failed, "it waits for its word");
    rig.change_copy("job", &CopyChange { state: Some(CopyState::Running), rate: Some(Size(0)) }).unwrap();
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert!(rig.has("b.img", &data));
}

/// One that is begun anew writes what another one, begun since, reads.
#[test]
fn copies_that_ran_together_go_on_together_after_a_restart() {
    let mut rig = Rig::new();
    rig.two_files();
    rig.create_volume(&rig.file_volume("c", "1M")).unwrap();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.stop();
    fs::rename(rig.path("b.img"), rig.path("aside")).unwrap();
    rig.start();
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("b.img")).unwrap();
    // Without holes, which take no time.
    fs::write(rig.path("b.img"), vec![7; 1 << 20]).unwrap();
    rig.start();
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Failed);
    rig.create_copy(&spec(Some("later"), "b", "c", Some(SLOW))).unwrap();
    rig.change_copy("job", &to(CopyState::Running)).unwrap();
    rig.restart();
    for name in ["job", "later"] {
        let view = rig.copy(name).unwrap();
        assert_eq!((view.state, view.reason), (CopyState::Running, None), "{name}");
    }
    // Of two that write one volume the first has it, whatever is stored.
    let other = CopyRecord::new("other".parse().unwrap(), &spec(None, "a", "c", None), 1 << 20);
    rig.store.apply(&Changes { put_copies: vec![&other], ..Changes::default() }).unwrap();
    rig.restart();
    let view = rig.copy("other").unwrap();
    assert!(view.state == CopyState::Failed && view.reason.as_ref().unwrap().contains("by later"), "{view:?}");
    assert_eq!(rig.copy("later").unwrap().state, CopyState::Running);
}

/// A unit was forgotten.
#[test]
fn a_rate_at_which_nothing_happens_is_refused() {
    let rig = Rig::new();
    rig.two_files();
    for rate in ["1", "100", "4095"] {
        let error = rig.create_copy(&spec(Some("job"), "a", "b", Some(rate))).unwrap_err().to_string();
        assert_eq!(error, "copy job: rate: at least 4K a second; 0: as fast as it goes");
    }
    assert!(rig.copies().is_empty());
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    for state in [None, Some(CopyState::Running), Some(CopyState::Paused)] {
        let error = rig.change_copy("job", &CopyChange { state, rate: Some(Size(100)) }).unwrap_err().to_string();
        assert!(error.contains("at least 4K"), "{error}");
        let view = rig.copy("job").unwrap();
        assert_eq!((view.state, view.rate), (CopyState::Running, Some(size(SLOW))));
    }
}

/// At the one before, which is stored still, a step takes most of a day.
#[test]
fn a_new_rate_counts_at_once() {
    let mut rig = Rig::new();
    let data = rig.two_files();
    let record = CopyRecord::new("job".parse().unwrap(), &spec(None, "a", "b", Some("1")), 1 << 20);
    rig.store.apply(&Changes { put_copies: vec![&record], ..Changes::default() }).unwrap();
    rig.restart();
    rig.begun("job");
    rig.change_copy("job", &at_once()).unwrap();
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert!(rig.has("b.img", &data));
}

/// Volumes that know no holes: all of it is read.
#[test]
fn a_rate_counts_for_zeroes_as_well() {
    let rig = Rig::new();
    for name in ["a", "b"] {
        rig.create_volume(&volume(name, "1M", "memory")).unwrap();
    }
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.begun("job");
    let view = rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    assert_eq!((view.state, view.done, view.skipped), (CopyState::Paused, 64 << 10, 64 << 10), "one step");
    rig.change_copy("job", &CopyChange { state: Some(CopyState::Running), rate: Some(Size(0)) }).unwrap();
    let view = rig.copied("job");
    assert_eq!((view.state, view.skipped), (CopyState::Done, 1 << 20));
}

#[test]
fn a_copy_that_failed_does_not_go_on_into_another_volume_of_that_name() {
    let mut rig = Rig::new();
    let data = rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.begun("job");
    rig.stop();
    fs::remove_file(rig.path("b.img")).unwrap();
    rig.start();
    let view = rig.copy("job").unwrap();
    assert!(view.state == CopyState::Failed && view.done > 0, "{view:?}");
    rig.delete_volume("b").unwrap();
    let other = format!("file:{}", rig.path("other.img").display());
    rig.create_volume(&volume("b", "1M", &other)).unwrap();
    rig.change_copy("job", &CopyChange { state: Some(CopyState::Running), rate: Some(Size(0)) }).unwrap();
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert!(rig.has("other.img", &data), "all of it is there");
}

#[test]
fn a_change_that_is_refused_leaves_the_rate_as_it_was() {
    let mut rig = Rig::new();
    rig.two_files();
    rig.create_device(&device("d", "{}")).unwrap();
    let with = |state, rate: &str| CopyChange { state: Some(state), rate: Some(size(rate)) };
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.begun("job");
    assert!(rig.change_copy("job", &with(CopyState::Done, "500M")).is_err());
    assert_eq!(rig.copy("job").unwrap().rate, Some(size(SLOW)));
    // What is not refused has both.
    for (state, rate) in
        [(CopyState::Running, "5K"), (CopyState::Paused, "6K"), (CopyState::Paused, "7K"), (CopyState::Running, SLOW)]
    {
        let view = rig.change_copy("job", &with(state, rate)).unwrap();
        assert_eq!((view.state, view.rate), (state, Some(size(rate))));
        assert_eq!((rig.stored_copy("job").state, rig.stored_copy("job").rate), (state, Some(size(rate))));
    }
    rig.stop();
    fs::rename(rig.path("b.img"), rig.path("aside")).unwrap();
    rig.start();
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("b.img")).unwrap();
    rig.start();
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Failed);
    rig.attach("d", &attach("b", None)).unwrap();
    for state in [CopyState::Running, CopyState::Paused] {
        assert!(rig.change_copy("job", &with(state, "500M")).is_err());
        assert_eq!((rig.copy("job").unwrap().rate, rig.stored_copy("job").rate), (Some(size(SLOW)), Some(size(SLOW))));
    }
}

#[test]
fn what_is_in_memory_is_not_taken_for_what_it_was() {
    let mut rig = Rig::new();
    rig.two_files();
    rig.create_volume(&volume("m", "1M", "memory")).unwrap();
    rig.create_copy(&spec(Some("full"), "a", "m", None)).unwrap();
    assert_eq!(rig.copied("full").state, CopyState::Done);
    rig.create_copy(&spec(Some("from"), "m", "b", Some(SLOW))).unwrap();
    rig.begun("from");
    rig.restart();
    let view = rig.copy("from").unwrap();
    let why = view.reason.unwrap();
    assert!(view.state == CopyState::Failed && why.contains("volume m is in memory, and what it held went"), "{why}");
    assert_eq!(rig.stored_copy("from").state, CopyState::Failed, "nor at the next start");
    rig.create_copy(&spec(Some("into"), "a", "m", Some(SLOW))).unwrap();
    rig.begun("into");
    rig.change_copy("into", &to(CopyState::Paused)).unwrap();
    assert!(rig.copy("into").unwrap().done > 0);
    rig.restart();
    let view = rig.copy("into").unwrap();
    assert_eq!((view.state, view.done), (CopyState::Paused, 0), "what was there went with the daemon");
}

#[test]
fn a_copy_that_cannot_be_is_refused() {
    let rig = Rig::new();
    rig.two_files();
    rig.create_volume(&rig.file_volume("small", "512K")).unwrap();
    rig.create_volume(&volume("in", "1M", "memory")).unwrap();
    rig.create_volume(&volume("part", "2M", "memory")).unwrap();
    rig.create_volume(&super::stacks::spec("over", Some("2M"), "concat(volume:part)")).unwrap();
    rig.create_volume(&super::stacks::spec("disk", Some("16M"), "disk(extent=1M) | memory")).unwrap();
    fs::write(rig.path("fixed.img"), vec![0; 1 << 20]).unwrap();
    rig.create_volume(&VolumeSpec { read_only: true, ..rig.file_volume("fixed", "1M") }).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("in", None)).unwrap();
    for (source, target, why) in [
        ("none", "b", "volume none does not exist"),
        ("a", "none", "volume none does not exist"),
        ("a", "a", "it is the source, too"),
        ("a", "small", "volume small has 524288 bytes, and volume a 1048576"),
        ("a", "in", "volume in is attached to d as namespace 1"),
        ("a", "part", "volume part is part of volume over"),
        ("part", "over", "share their blocks"),
        ("a", "fixed", "volume fixed is read-only"),
        ("a", "disk", "it is a disk"),
        ("disk", "a", "it is a disk"),
    ] {
        let error = rig.create_copy(&spec(None, source, target, None)).unwrap_err().to_string();
        assert!(error.contains(why), "{source} to {target}: {error}");
    }
    assert!(rig.copies().is_empty());
    for state in [CopyState::Done, CopyState::Failed] {
        assert!(matches!(rig.change_copy("none", &to(state)), Err(ControlError::NoCopy { .. })));
    }
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    let error = rig.change_copy("job", &to(CopyState::Done)).unwrap_err().to_string();
    assert_eq!(error, "copy job: a copy can be made running or paused");
}

#[test]
fn a_copy_that_cannot_be_stored_is_none() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    let data = rig.two_files();
    disk.set_full(true);
    assert!(matches!(rig.create_copy(&spec(None, "a", "b", None)), Err(ControlError::Store(_))));
    assert!(rig.copies().is_empty());
    disk.set_full(false);
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    disk.set_full(true);
    assert!(matches!(rig.change_copy("job", &to(CopyState::Paused)), Err(ControlError::Store(_))));
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Running);
    assert!(matches!(rig.change_copy("job", &at_once()), Err(ControlError::Store(_))));
    assert_eq!(rig.copy("job").unwrap().rate, Some(size(SLOW)));
    assert!(matches!(rig.delete_copy("job"), Err(ControlError::Store(_))));
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Paused, "it stands still all the same");
    disk.set_full(false);
    rig.change_copy("job", &at_once()).unwrap();
    rig.change_copy("job", &to(CopyState::Running)).unwrap();
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert!(rig.has("b.img", &data));
}

#[test]
fn a_copy_does_not_go_on_over_what_somebody_uses() {
    for state in [CopyState::Running, CopyState::Paused] {
        let mut rig = Rig::new();
        rig.two_files();
        rig.create_device(&device("d", "{}")).unwrap();
        rig.attach("d", &attach("b", None)).unwrap();
        let record = CopyRecord::new("job".parse().unwrap(), &spec(None, "a", "b", None), 1 << 20);
        rig.store.apply(&Changes { put_copies: vec![&CopyRecord { state, ..record }], ..Changes::default() }).unwrap();
        rig.restart();
        let view = rig.copied("job");
        let why = view.reason.unwrap_or_default();
        assert!(view.state == CopyState::Failed && why.contains("volume b is attached to d"), "{:?}: {why}", view.state);
        assert_eq!(rig.stored_copy("job").state, CopyState::Failed);
        assert!(rig.has("b.img", &vec![0; 1 << 20]));
    }
}

/// It was begun before all others, and who waits for it is to see how it ended.
#[test]
fn of_copies_that_have_ended_the_last_to_end_is_not_the_first_to_be_forgotten() {
    let rig = Rig::new();
    rig.two_files();
    rig.create_volume(&rig.file_volume("c", "1M")).unwrap();
    rig.create_copy(&spec(Some("a"), "a", "b", Some(SLOW))).unwrap();
    rig.change_copy("a", &to(CopyState::Paused)).unwrap();
    let another = |number: usize| {
        let name = format!("c{number}");
        rig.create_copy(&spec(Some(&name), "a", "c", None)).unwrap();
        assert_eq!(rig.copied(&name).state, CopyState::Done);
    };
    (0..ENDED).for_each(another);
    rig.change_copy("a", &CopyChange { state: Some(CopyState::Running), rate: Some(Size(0)) }).unwrap();
    assert_eq!(rig.copied("a").state, CopyState::Done);
    another(ENDED);
    assert_eq!(rig.copy("a").unwrap().state, CopyState::Done);
    assert!(rig.copies().len() <= ENDED && rig.copy("c0").is_err());
}

#[test]
fn a_configuration_cannot_use_the_target_of_a_copy() {
    let mut rig = Rig::new();
    rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    for config in [
        "[[device]]\nname = \"d\"\nnvme = {}\nattach = [{ volume = \"b\" }]\n",
        "[[volume]]\nname = \"over\"\nstack = \"concat(volume:b)\"\n",
    ] {
        rig.stop();
        let error = rig.try_start(Some(config)).expect_err("the volume is being written").to_string();
        assert!(error.contains("job"), "{error}");
        rig.start();
        assert_eq!(rig.copy("job").unwrap().state, CopyState::Running);
    }
}

#[test]
fn a_copy_whose_end_is_not_stored_keeps_its_target() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    let data = rig.two_files();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    rig.change_copy("job", &at_once()).unwrap();
    // From here on nothing is stored, so that no order could have it go on.
    disk.set_full(true);
    rig.relaunch("job");
    eventually("all bytes copied", || (rig.copy("job").unwrap().done >= 1 << 20).then_some(()));
    for _ in 0..100 {
        let error = rig.attach("d", &attach("b", None)).unwrap_err();
        assert!(matches!(error, ControlError::Copying { .. }), "{error}");
        thread::sleep(Duration::from_millis(1));
    }
    disk.set_full(false);
    assert_eq!(rig.copied("job").state, CopyState::Done);
    assert_eq!(rig.stored_copy("job").state, CopyState::Done);
    assert!(rig.has("b.img", &data));
    rig.attach("d", &attach("b", None)).unwrap();
}

#[test]
fn a_copy_that_does_not_begin_and_whose_failure_is_not_stored_keeps_its_target() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    rig.peek().volumes.get_mut("b").unwrap().live = Err("it is gone".to_owned());
    disk.set_full(true);
    rig.relaunch("job");
    assert!(matches!(rig.delete_volume("b"), Err(ControlError::Copying { .. })));
    disk.set_full(false);
    // The thread that answers guests tries again.
    assert_eq!(rig.copied("job").state, CopyState::Failed);
    assert_eq!(rig.stored_copy("job").state, CopyState::Failed);
    rig.delete_volume("b").unwrap();
}

/// A step of it takes minutes: its source is behind a throttle.
fn held_up(rig: &Rig) -> Vec<u8> {
    let data = rig.two_files();
    rig.try_change("a", "throttle(bandwidth=4K) | @a.img", false).unwrap();
    rig.create_copy(&spec(Some("job"), "a", "b", None)).unwrap();
    let switch = Arc::clone(&rig.peek().volumes["a"].graph.as_ref().unwrap().switch);
    eventually("a step that is under way", || (switch.in_flight() > 0).then_some(()));
    data
}

#[test]
fn a_copy_that_does_not_end_holds_its_target_and_nobody_else() {
    let rig = Rig::new();
    let data = held_up(&rig);
    for name in ["x", "y"] {
        rig.create_volume(&rig.file_volume(name, "1M")).unwrap();
    }
    thread::scope(|scope| {
        let cancelled = scope.spawn(|| rig.delete_copy("job"));
        eventually("a copy that is told to end", || rig.copy("job").unwrap().reason);
        // What looks for copies that are to go on finds none.
        rig.launch_copies(&mut rig.peek());
        rig.create_copy(&spec(Some("other"), "x", "y", None)).unwrap();
        assert_eq!(rig.copied("other").state, CopyState::Done);
        let error = rig.change_copy("job", &to(CopyState::Running)).unwrap_err();
        assert!(matches!(error, ControlError::CopyEnding { .. }), "{error}");
        let error = cancelled.join().unwrap().unwrap_err();
        assert!(matches!(error, ControlError::CopyEnding { .. }), "{error}");
    });
    assert!(matches!(rig.delete_volume("b"), Err(ControlError::Copying { .. })));
    assert_eq!(rig.stored_copy("job").state, CopyState::Paused, "a start has it go on no more");
    rig.try_change("a", "throttle(bandwidth=1G) | @a.img", false).unwrap();
    // Its thread forgets it.
    eventually("its end", || rig.copy("job").is_err().then_some(()));
    assert!(rig.store.load_copies().unwrap().iter().all(|record| record.name.as_str() == "other"));
    fs::write(rig.path("b.img"), vec![0; 1 << 20]).unwrap();
    rig.create_copy(&spec(Some("job"), "x", "b", Some(SLOW))).unwrap();
    assert_eq!(rig.copy("job").unwrap().state, CopyState::Running);
    assert!(!rig.has("b.img", &data), "nobody writes it any more");
}

#[test]
fn a_copy_that_is_paused_within_its_last_step_is_done_after_it() {
    let rig = Rig::new();
    let data = held_up(&rig);
    let error = rig.change_copy("job", &to(CopyState::Paused)).unwrap_err();
    assert!(matches!(error, ControlError::CopyEnding { .. }), "{error}");
    let view = rig.copy("job").unwrap();
    assert!(view.state == CopyState::Paused && view.reason.is_some(), "{view:?}");
    assert!(matches!(rig.change_copy("job", &to(CopyState::Running)), Err(ControlError::CopyEnding { .. })));
    rig.try_change("a", "throttle(bandwidth=1G) | @a.img", false).unwrap();
    eventually("the end of its step", || (rig.copy("job").unwrap().state == CopyState::Done).then_some(()));
    assert!(rig.has("b.img", &data));
}

#[test]
fn who_cancels_a_copy_does_not_forget_one_that_was_begun_again() {
    let mut rig = Rig::new();
    rig.two_files();
    rig.create_copy(&spec(Some("job"), "a", "b", Some(SLOW))).unwrap();
    rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    rig.restart();
    // Of one without a thread, and of one whose thread has ended.
    for _ in 0..2 {
        let error = rig.cancel_what_is_resumed_for_tests("job").unwrap_err();
        assert!(error.to_string().contains("begun again"), "{error}");
        assert_eq!(rig.copy("job").unwrap().state, CopyState::Running);
        rig.change_copy("job", &to(CopyState::Paused)).unwrap();
    }
    rig.delete_copy("job").unwrap();
    assert!(rig.copies().is_empty());
}

#[test]
fn what_a_disk_has_is_not_taken_for_memory() {
    let rig = Rig::new();
    rig.create_volume(&rig.file_volume("a", "1M")).unwrap();
    let mut inner = rig.peek();
    let own = inner.volumes["a"].record.spec.stack.clone();
    for (stack, is_in_memory) in [
        ("throttle(iops=1) | nvme:0000:01:00.0", false),
        ("mirror(nvme:0000:01:00.0, file:/b)", false),
        ("cache(mode=through, memory, nvme:0000:01:00.0)", false),
        // What something else has, too, does not go with the memory.
        ("cache(mode=through, memory, file:/b)", false),
        ("cache(mode=through, file:/b, memory)", true),
        ("cache(mode=back, memory, file:/b)", true),
        ("mirror(memory, file:/b)", false),
        ("mirror(memory, cache(mode=back, memory, file:/b))", true),
        ("concat(memory, file:/b)", true),
    ] {
        inner.volumes.get_mut("a").unwrap().record.spec.stack = stack.parse().unwrap();
        assert_eq!(inner.is_in_memory(&"a".parse().unwrap()), is_in_memory, "{stack}");
    }
    inner.volumes.get_mut("a").unwrap().record.spec.stack = own;
}
