//! Looks that end, and looks that hang.

use std::{
    fs::File,
    os::unix::fs::symlink,
    sync::mpsc::{Sender, channel},
};

use super::*;
use crate::manager::tests::{HUNG, PATIENCE};

/// A volume as stored.
pub(in crate::manager) fn record(name: &str, stack: &str) -> VolumeRecord {
    let spec = format!(r#"{{"name": "{name}", "stack": "{stack}", "size": "1M"}}"#);
    VolumeRecord::new(serde_json::from_str(&spec).unwrap(), uuid::Uuid::nil())
}

#[test]
fn a_file_that_somebody_keeps_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.img");
    assert_eq!(look(&path, false), Found::Gone(path.clone()));
    let [is_free, is_kept] = [Found::Free, Found::Kept(path.clone())];
    let file = File::create(&path).unwrap();
    flock(&file, FlockOperation::NonBlockingLockShared).unwrap();
    assert_eq!([true, false].map(|read_only| look(&path, read_only)), [is_free.clone(), is_kept.clone()]);
    flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!([true, false].map(|read_only| look(&path, read_only)), [is_kept.clone(), is_kept]);
    flock(&file, FlockOperation::Unlock).unwrap();
    assert_eq!(look(&path, false), is_free);
}

#[test]
fn file_systems_are_told_by_their_places() {
    let mounts = ["/", "/srv/vm", "/srv"].map(PathBuf::from);
    for (path, system) in [("/srv/vm/a/b.img", "/srv/vm"), ("/srv/vms/b.img", "/srv"), ("/b.img", "/")] {
        assert_eq!(system_of(Path::new(path), &mounts), Path::new(system), "{path}");
    }
    assert_eq!(system_of(Path::new("/srv/vm/b.img"), &[]), Path::new("/srv/vm"), "its folder");
    assert_eq!(plain(br"/a\040b\134c\9"), br"/a b\c\9");
    assert!(mount_points().contains(&PathBuf::from("/")));
}

/// Volumes whose looks hang, and what lets them go on.
fn hung(names: impl Iterator<Item = String>, folder: &Path) -> Vec<(VolumeRecord, Sender<()>)> {
    let one = |name: String| {
        let (path, (release, hung)) = (folder.join(&name), channel());
        HUNG.lock().unwrap().insert(path.clone(), hung);
        (volume(&name, &path), release)
    };
    names.map(one).collect()
}

fn volume(name: &str, path: &Path) -> VolumeRecord {
    record(name, &format!("file:{}", path.display()))
}

/// What is asked for again and again, with another one.
fn with(all: &[(VolumeRecord, Sender<()>)], other: &VolumeRecord) -> Vec<VolumeRecord> {
    all.iter().map(|(record, _)| record).chain([other]).cloned().collect()
}

#[test]
fn a_device_is_a_file_system_by_itself() {
    let mounts = ["/", "/dev", "/dev/shm"].map(PathBuf::from);
    for (path, system) in [("/dev/mapper/a", "/dev/mapper/a"), ("/dev/sda", "/dev/sda"), ("/dev/shm/a", "/dev/shm")] {
        assert_eq!(system_of(Path::new(path), &mounts), Path::new(system), "{path}");
    }
}

/// Folders that are file systems to looks.
fn folders(directory: &Path, names: impl Iterator<Item = String>) -> Vec<PathBuf> {
    let root = directory.canonicalize().unwrap();
    let made = names.map(|name| root.join(name)).inspect(|folder| fs::create_dir(folder).unwrap());
    made.collect()
}

/// Ends of looks that hung, and of those that waited for them.
fn ended(looks: &mut Looks, all: Vec<(VolumeRecord, Sender<()>)>) -> usize {
    drop(all);
    std::iter::from_fn(|| looks.next_done(Instant::now() + PATIENCE, true)).count()
}

/// Several file systems with more volumes than there are looks; whether the one that answers did so before.
fn looks_beside_dead_ones(dead: usize, has_answered: bool) {
    let directory = tempfile::tempdir().unwrap();
    let mounts = folders(directory.path(), (0..dead).map(|at| format!("dead{at}")).chain(["alive".to_owned()]));
    let (alive, dead) = mounts.split_last().unwrap();
    let is_next = |looks: &mut Looks, all: &[_], name: &str| {
        let path = alive.join("gone.img");
        looks.ask(with(all, &volume(name, &path)), mounts.clone());
        assert_eq!(looks.next_done(Instant::now() + PATIENCE, true), Some((name.parse().unwrap(), Found::Gone(path))));
    };
    let mut looks = Looks::default();
    if has_answered {
        is_next(&mut looks, &[], "z");
    }
    // Their names come first.
    let hung_at = |(at, folder): (usize, &PathBuf)| hung((0..MOST).map(|volume| format!("a{at}-{volume}")), folder);
    let all: Vec<_> = dead.iter().enumerate().flat_map(hung_at).collect();
    for at in 0..2 * MOST {
        is_next(&mut looks, &all, &format!("z{at}"));
        assert!(looks.places.lock().at.len() <= SILENT, "there are places left");
    }
    assert_eq!(looks.unanswered().count(), all.len());
    let count = all.len();
    assert_eq!((ended(&mut looks, all), looks.unanswered().count()), (count, 0), "all are looked at");
}

#[test]
fn looks_that_hang_leave_places_for_other_file_systems() {
    looks_beside_dead_ones(1, false);
    looks_beside_dead_ones(SILENT - 1, false);
}

#[test]
fn what_has_answered_keeps_its_places_however_many_do_not() {
    looks_beside_dead_ones(2 * MOST, true);
}

/// A file that hangs is not taken for its file system.
#[test]
fn a_file_that_hangs_has_the_next_one_looked_at() {
    let directory = tempfile::tempdir().unwrap();
    let mounts = folders(directory.path(), ["alive".to_owned()].into_iter());
    let all = hung(["a".to_owned()].into_iter(), &mounts[0]);
    let (path, mut looks) = (mounts[0].join("gone.img"), Looks::default());
    looks.ask(with(&all, &volume("b", &path)), mounts);
    assert_eq!(looks.next_done(Instant::now() + PATIENCE, true), Some(("b".parse().unwrap(), Found::Gone(path))));
    assert_eq!(ended(&mut looks, all), 1);
}

#[test]
fn a_link_is_on_the_file_system_that_it_leads_to() {
    let directory = tempfile::tempdir().unwrap();
    let mounts = folders(directory.path(), ["dead", "gone", "alive"].map(str::to_owned).into_iter());
    let alive = &mounts[2];
    let mut all = Vec::new();
    for folder in ["dead", "gone"] {
        symlink(format!("../{folder}"), alive.join(folder)).unwrap();
        all.extend(hung((0..MOST).map(|at| format!("a{folder}{at}")), &alive.join(folder)));
    }
    let mut looks = Looks::default();
    for at in 0..MOST {
        let (name, path) = (format!("z{at}"), alive.join("none.img"));
        looks.ask(with(&all, &volume(&name, &path)), mounts.clone());
        assert_eq!(looks.next_done(Instant::now() + PATIENCE, true), Some((name.parse().unwrap(), Found::Gone(path))));
    }
    let count = all.len();
    assert_eq!(ended(&mut looks, all), count);
}
