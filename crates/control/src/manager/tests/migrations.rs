//! Volumes that go to another place while a guest uses them.

use std::os::fd::AsRawFd;

use millrace_services::{Settings, legs};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{
    stacks::{spec, under_load},
    *,
};
use crate::model::{MigrationChange, MigrationSpec};

/// So slow that nothing of the kind ends within a test.
const SLOW: &str = "4K";
const SIZE: u64 = 2 << 20;

/// So many bytes, all different.
fn content(bytes: u64) -> Vec<u8> {
    (0..bytes / 8).flat_map(|at| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

impl Rig {
    fn migrate(&self, name: &str, to: &str, leg: Option<&str>, rate: Option<&str>) -> Result<VolumeView, ControlError> {
        let leg = leg.map(|leg| self.stack(leg));
        let spec = MigrationSpec { to: self.stack(to).parse().unwrap(), leg, rate: rate.map(size) };
        self.migrate_volume(name, &spec)
    }

    fn at_rate(&self, name: &str, rate: &str) {
        self.change_migration(name, &MigrationChange { rate: size(rate) }).unwrap();
    }

    /// Waits for the end of a migration; what history says of it.
    fn migrated(&self, name: &str) -> String {
        eventually("the end of a migration", || self.volume(name).unwrap().migration.is_none().then_some(()));
        self.last_note(name)
    }

    fn last_note(&self, name: &str) -> String {
        self.volume_history(name).unwrap().pop().unwrap().note.unwrap_or_default()
    }

    fn stack_of(&self, name: &str) -> String {
        self.volume(name).unwrap().stack.to_string()
    }

    /// Waits until a migration has copied something.
    fn under_way(&self, name: &str) {
        let done = || self.volume(name).unwrap().migration.unwrap().done;
        eventually("the beginning of a migration", || (done() > 0).then_some(()));
    }

    /// Volume `v` in a file with content, shown by device `d`.
    fn with_content(stack: &str) -> (Self, Vec<u8>) {
        let rig = Self::new();
        let data = content(SIZE);
        fs::write(rig.path("a"), &data).unwrap();
        rig.create_volume(&spec("v", Some("2M"), &rig.stack(stack))).unwrap();
        rig.create_device(&device("d", "{}")).unwrap();
        rig.attach("d", &attach("v", None)).unwrap();
        (rig, data)
    }

    /// The file has what was there before, where the load does not write.
    fn has_rest(&self, file: &str, data: &[u8]) {
        assert!(fs::read(self.path(file)).unwrap()[256 << 10..] == data[256 << 10..], "{file}");
    }
}

fn refused(result: Result<VolumeView, ControlError>, why: &str) {
    let error = result.expect_err("it is refused").to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn a_volume_goes_from_file_to_file_while_a_guest_writes() {
    let (mut rig, data) = Rig::with_content("@a");
    under_load(&rig, || {
        for (from, to) in [("a", "b"), ("b", "c"), ("c", "b")] {
            rig.migrate("v", &format!("@{to}"), None, None).unwrap();
            assert_eq!(rig.migrated("v"), rig.stack(&format!("migrated from @{from}")));
            assert_eq!(rig.stack_of("v"), rig.stack(&format!("@{to}")));
            rig.has_rest(to, &data);
            fs::remove_file(rig.path(from)).unwrap();
        }
    });
    let history = rig.volume_history("v").unwrap();
    assert_eq!((history.len(), history[1].stack.to_string()), (7, rig.stack("move(@a, @b)")));
    assert!(
        history[1].note.as_ref().unwrap().ends_with("begins") && history[1..].iter().all(|entry| entry.pause_us.is_some())
    );
    rig.restart();
    assert_eq!((rig.stack_of("v"), rig.volume("v").unwrap().state), (rig.stack("@b"), State::Ready));
    assert_eq!(rig.volume_history("v").unwrap().len(), history.len());
    rig.has_rest("b", &data);
}

#[test]
fn parts_of_any_stack_go_and_services_stay() {
    let (rig, data) = Rig::with_content("throttle(iops=1M) | @a");
    under_load(&rig, || {
        rig.migrate("v", "stripe(chunk=64K, @x, @y)", None, None).unwrap();
        rig.migrated("v");
        assert_eq!(rig.stack_of("v"), rig.stack("throttle(iops=1M) | stripe(chunk=64K, @x, @y)"));
        rig.migrate("v", "@z", Some("@y"), None).unwrap();
        rig.migrated("v");
        // The whole of it, with another service above meanwhile.
        rig.migrate("v", "@b", Some("stripe"), Some(SLOW)).unwrap();
        let moving = rig.stack_of("v");
        rig.try_change("v", &format!("meter | {moving}"), false).unwrap();
        rig.under_way("v");
        rig.at_rate("v", "0");
        rig.migrated("v");
        assert_eq!(rig.stack_of("v"), rig.stack("meter | throttle(iops=1M) | @b"));
        rig.has_rest("b", &data);
    });
}

#[test]
fn a_share_goes_to_another_disk_and_gives_its_room_back() {
    let (rig, data) = Rig::with_content("@a");
    for pool in ["p", "q"] {
        let stack = rig.stack(&format!("disk(extent=64K) | @{pool}.img"));
        rig.create_volume(&spec(pool, Some("4M"), &stack)).unwrap();
    }
    let holds = |pool: &str| {
        let facts = rig.volume(pool).unwrap().tree.status.unwrap().facts;
        facts.iter().any(|(name, _)| name == "volume v")
    };
    under_load(&rig, || {
        rig.migrate("v", "share | volume:p", None, None).unwrap();
        assert!(rig.migrated("v").starts_with("migrated from"));
        fs::remove_file(rig.path("a")).unwrap();
        assert!(holds("p") && !holds("q"));
        refused(rig.migrate("v", "@a", Some("volume:p"), None), "--leg share");
        rig.migrate("v", "share(weight=2) | volume:q", None, Some(SLOW)).unwrap();
        rig.under_way("v");
        assert!(holds("p") && holds("q"));
        rig.cancel_migration("v").unwrap();
        assert!(holds("p") && !holds("q"));
        rig.migrate("v", "share(weight=2) | volume:q", None, None).unwrap();
        rig.migrated("v");
        assert!(!holds("p") && holds("q"));
        // The disk itself, under the volume on it.
        rig.migrate("q", "@r.img", None, None).unwrap();
        rig.migrated("q");
        assert_eq!(rig.stack_of("q"), rig.stack("disk(extent=64K) | @r.img"));
        fs::remove_file(rig.path("q.img")).unwrap();
        rig.migrate("v", "@b", None, None).unwrap();
        rig.migrated("v");
    });
    rig.has_rest("b", &data);
}

#[test]
fn a_migration_goes_on_after_a_restart_and_ends_when_it_is_cancelled() {
    let (mut rig, data) = Rig::with_content("@a");
    rig.migrate("v", "@b", None, Some(SLOW)).unwrap();
    rig.under_way("v");
    refused(rig.migrate("v", "@c", None, None), "already");
    rig.restart();
    let migration = rig.volume("v").unwrap().migration.unwrap();
    assert_eq!((migration.rate, migration.total), (Some(size(SLOW)), SIZE));
    rig.cancel_migration("v").unwrap();
    assert_eq!((rig.stack_of("v"), rig.last_note("v")), (rig.stack("@a"), rig.stack("migration to @b cancelled")));
    refused(rig.cancel_migration("v"), "it is not being migrated");
    rig.migrate("v", "@b", None, Some(SLOW)).unwrap();
    rig.restart();
    rig.under_way("v");
    rig.at_rate("v", "1G");
    assert!(rig.migrated("v").starts_with("migrated from"));
    assert_eq!(rig.stack_of("v"), rig.stack("@b"));
    assert!(fs::read(rig.path("b")).unwrap() == data);
    rig.restart();
    assert!(rig.volume("v").unwrap().migration.is_none());
}

#[test]
fn another_change_does_not_end_a_migration() {
    let (mut rig, _) = Rig::with_content("throttle(iops=1M) | @a");
    rig.migrate("v", "@b", None, Some(SLOW)).unwrap();
    rig.under_way("v");
    let (moving, history) = (rig.stack_of("v"), rig.volume_history("v").unwrap().len());
    for (stack, reformat) in [
        ("throttle(iops=1M) | @a", false),
        ("throttle(iops=9) | @a", true),
        ("@b", false),
        ("@b", true),
        ("throttle(iops=1M) | move(@a, @c)", false),
        ("move(@b, @a)", true),
    ] {
        let error = rig.try_change("v", stack, reformat).unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Conflict, "migrating"), "{stack}: {error}");
        assert!(error.to_string().contains(&rig.stack("being migrated to @b")), "{error}");
        assert!(error.advice().unwrap().contains("\"millrace volume migrate v --cancel\""));
        assert_eq!((rig.stack_of("v"), rig.volume_history("v").unwrap().len()), (moving.clone(), history), "{stack}");
        assert!(!rig.path("c").exists());
    }
    // Who read the stack before it began is told of that.
    let error = rig.try_change_from("v", "throttle(iops=1M) | @a", "@a").unwrap_err();
    assert!(error.code() == "changed-meanwhile" && error.to_string().contains(&moving), "{error}");
    // Services come and go, here and after a restart.
    rig.try_change_from("v", &moving, &format!("meter | {moving}")).unwrap();
    rig.restart();
    rig.try_change("v", moving.strip_prefix("throttle(iops=1M) | ").unwrap(), false).unwrap();
    assert!(rig.stack_of("v").contains("move("), "{}", rig.stack_of("v"));
    rig.cancel_migration("v").unwrap();
    assert_eq!((rig.stack_of("v"), rig.last_note("v")), (rig.stack("@a"), rig.stack("migration to @b cancelled")));
    rig.try_change("v", "throttle(iops=1M) | @a", false).unwrap();
}

#[test]
fn a_volume_comes_back_without_a_place_that_is_gone() {
    let (mut rig, _) = Rig::with_content("@a");
    rig.migrate("v", "@b", None, Some(SLOW)).unwrap();
    rig.stop();
    fs::remove_file(rig.path("b")).unwrap();
    rig.start();
    let view = rig.volume("v").unwrap();
    assert_eq!((view.state, view.stack.to_string()), (State::Ready, rig.stack("@a")));
    let note = rig.last_note("v");
    assert!(note.starts_with(&rig.stack("migration to @b failed: ")), "{note}");
    rig.restart();
    assert_eq!((rig.stack_of("v"), rig.last_note("v")), (rig.stack("@a"), note));
    assert!(!rig.path("b").exists());
}

/// What was acknowledged without the leg is on the one that is gone.
#[test]
fn a_migration_is_not_given_up_for_a_leg_that_was_out_of_use() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("mirror(@a, @b)"))).unwrap();
    let switch = |rig: &Rig| Arc::clone(&rig.peek().volumes["v"].graph.as_ref().unwrap().switch);
    // Holes take no time.
    legs::write(&switch(&rig), 0, vec![5; 1 << 20]).unwrap();
    rig.migrate("v", "@c", Some("@b"), Some(SLOW)).unwrap();
    {
        let mirror = rig.peek().volumes["v"].graph.as_ref().unwrap().graph.services("mirror").remove(0).1;
        let mut arguments = Settings::default();
        arguments.add("leg", "1");
        mirror.command("fail", &arguments).unwrap();
    }
    legs::write(&switch(&rig), 0, vec![7; 4096]).unwrap();
    assert!(rig.stack_of("v").contains("move("), "{}", rig.stack_of("v"));
    rig.stop();
    fs::rename(rig.path("a"), rig.path("aside")).unwrap();
    rig.start();
    let view = rig.volume("v").unwrap();
    let reason = view.reason.unwrap_or_default();
    assert!(view.state == State::Failed && reason.contains(&rig.path("a").display().to_string()), "{reason}");
    rig.stop();
    fs::rename(rig.path("aside"), rig.path("a")).unwrap();
    rig.start();
    assert_eq!(rig.volume("v").unwrap().state, State::Ready);
    assert!(legs::read(&switch(&rig), 0, 4096).unwrap() == [7; 4096]);
}

#[test]
fn a_place_that_cannot_be_written_ends_it_and_the_guest_goes_on() {
    let (rig, data) = Rig::with_content("@a");
    let place = memfd_create("place", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let to = format!("file:/proc/self/fd/{}", place.as_raw_fd());
    under_load(&rig, || {
        rig.migrate("v", &to, None, Some(SLOW)).unwrap();
        rig.under_way("v");
        fcntl_add_seals(&place, SealFlags::FUTURE_WRITE).unwrap();
        // The guest's next write beyond the first pieces, or the walk, meets it.
        rig.at_rate("v", "0");
        let note = rig.migrated("v");
        assert!(note.contains("failed: ") && note.contains("cannot be written"), "{note}");
        assert_eq!(rig.stack_of("v"), rig.stack("@a"));
    });
    rig.has_rest("a", &data);
}

#[test]
fn what_cannot_be_is_refused_and_nothing_changes() {
    let (rig, _) = Rig::with_content("@a");
    rig.create_volume(&rig.file_volume("w", "2M")).unwrap();
    rig.create_volume(&rig.file_volume("small", "1M")).unwrap();
    rig.create_volume(&rig.file_volume("large", "3M")).unwrap();
    let before = picture(&rig);
    for (to, leg, why) in [
        ("@a", None, "is where it is already"),
        ("stripe | @a", None, "are one file"),
        ("@w.img", None, "w.img is the file of volume w"),
        ("volume:small", None, "it has 1048576 bytes and 2097152 are needed"),
        ("volume:large", None, "large is too large: it has 3145728 bytes, and what is to go there 2097152"),
        ("stripe(chunk=4K, @x(size=1M), @y(size=64K))", None, "are asked for"),
        ("volume:v", None, "a volume cannot be over itself"),
        ("volume:none", None, "there is no volume none"),
        ("@none/b", None, "none/b"),
        ("@b", Some("mirror"), "has no mirror"),
        ("share | volume:w", None, "is no disk"),
    ] {
        refused(rig.migrate("v", to, leg, None), why);
        assert_eq!(picture(&rig), before, "{to}");
        assert!(!rig.path("x").exists() && !rig.path("b").exists(), "{to}");
    }
    refused(rig.migrate("v", "@b", None, Some("1")), "at least 4K a second");
    refused(rig.change_migration("v", &MigrationChange { rate: size("1M") }), "it is not being migrated");
    assert!(matches!(rig.migrate("no", "@b", None, None), Err(ControlError::NoVolume { .. })));
}

#[test]
fn a_configuration_may_have_either_place_while_a_volume_is_on_its_way() {
    let (mut rig, _) = Rig::with_content("@a");
    rig.migrate("v", "@b", None, Some(SLOW)).unwrap();
    let declared =
        |rig: &Rig, file: &str| format!("[[volume]]\nname = \"v\"\nsize = \"2M\"\nstack = \"{}\"\n", rig.stack(file));
    for file in ["@a", "@b"] {
        rig.stop();
        let text = declared(&rig, file);
        rig.try_start(Some(&text)).unwrap();
        assert!(rig.stack_of("v").contains("move("), "{}", rig.stack_of("v"));
    }
    rig.stop();
    let text = declared(&rig, "@c");
    assert!(rig.try_start(Some(&text)).is_err());
    rig.start();
    rig.cancel_migration("v").unwrap();
}

/// No guest waits for a change that could not be stored, and what was copied is not compared again for it.
#[test]
fn a_migration_is_not_brought_to_its_end_while_nothing_can_be_stored() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    fs::write(rig.path("a"), content(SIZE)).unwrap();
    rig.create_volume(&spec("v", Some("2M"), &rig.stack("@a"))).unwrap();
    // Nobody but this test looks after it.
    let name: Name = "v".parse().unwrap();
    rig.peek().attended.insert(name.clone());
    rig.migrate("v", "@b", None, None).unwrap();
    disk.set_full(true);
    let error = eventually("the first try", || rig.look_after(&name).err());
    // One that was met with while guests waited is a change's.
    assert!(matches!(error, ControlError::Store(_)), "{error}");
    assert_eq!(rig.stack_of("v"), rig.stack("move(@a, @b)"));
    disk.set_full(false);
    rig.look_after(&name).unwrap();
    assert_eq!((rig.stack_of("v"), rig.last_note("v")), (rig.stack("@b"), rig.stack("migrated from @a")));
}
