//! Groups: caps and weights that volumes have together.

use super::*;
use crate::model::{GroupCaps, GroupChange, GroupSpec, VolumeChange};

fn group(json: &str) -> GroupSpec {
    serde_json::from_str(json).unwrap()
}

fn with_stack(name: &str, stack: &str) -> VolumeSpec {
    let json = format!(r#"{{"name":"{name}","size":"1M","stack":"{stack}"}}"#);
    serde_json::from_str(&json).unwrap()
}

fn refused<T>(result: Result<T, ControlError>, class: Class, why: &str) {
    let error = result.err().expect("it is refused");
    assert!(error.class() == class && error.to_string().contains(why), "{error}");
}

fn caps(caps: GroupCaps) -> GroupChange {
    GroupChange { caps: Some(caps), weight: None }
}

fn weight(weight: u32) -> GroupChange {
    GroupChange { caps: None, weight: Some(weight) }
}

/// A tenant, a group in it, and a volume in that.
fn with_groups(rig: &Rig) {
    rig.create_group(&group(r#"{"name":"acme","caps":{"iops":50000}}"#)).unwrap();
    let gold = r#"{"name":"gold","within":"acme","caps":{"write_iops":2000,"bandwidth":"100M","burst":"1s"}}"#;
    rig.create_group(&group(gold)).unwrap();
    rig.create_volume(&with_stack("v", "throttle(iops=1000, group=gold) | memory")).unwrap();
}

#[test]
fn groups_come_back_after_a_restart_and_go_when_nothing_is_in_them() {
    let mut rig = Rig::new();
    with_groups(&rig);
    let faster = GroupCaps { iops: Some(70_000), ..GroupCaps::default() };
    assert_eq!(rig.change_group("acme", &caps(faster.clone())).unwrap().caps, faster);
    let heavier = rig.change_group("acme", &weight(3)).unwrap();
    assert_eq!((heavier.weight, &heavier.caps), (3, &faster), "what is not said stays");
    assert_eq!(rig.change_group("acme", &caps(faster)).unwrap().weight, 3);
    let before = rig.groups();
    assert_eq!(before[0].groups, ["gold".parse().unwrap()]);
    assert_eq!((before[1].volumes.len(), before[1].within.as_ref().unwrap().as_str()), (1, "acme"));
    rig.restart();
    assert_eq!(rig.groups(), before);
    assert_eq!(rig.volume("v").unwrap().state, State::Ready, "groups are there before volumes");
    refused(rig.delete_group("gold"), Class::Conflict, "group gold is in use: volume v");
    refused(rig.delete_group("acme"), Class::Conflict, "group acme is in use: group gold");
    let stack = VolumeChange { stack: Some("throttle(group=acme) | memory".parse().unwrap()), ..VolumeChange::default() };
    rig.change_volume("v", &stack).unwrap();
    rig.delete_group("gold").unwrap();
    refused(rig.delete_group("acme"), Class::Conflict, "group acme is in use: volume v");
    rig.delete_volume("v").unwrap();
    rig.delete_group("acme").unwrap();
    rig.restart();
    assert!(rig.groups().is_empty());
}

#[test]
fn nonsense_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    with_groups(&rig);
    let before = rig.groups();
    let create = |json: &str| rig.create_group(&group(json));
    refused(create(r#"{"name":"gold"}"#), Class::Conflict, "group gold exists already");
    refused(create(r#"{"name":"a","within":"none"}"#), Class::Missing, "group none does not exist");
    refused(create(r#"{"name":"a","caps":{"iops":0}}"#), Class::Invalid, "group a: iops: 1 at least is possible");
    refused(create(r#"{"name":"a","caps":{"iops":1,"burst":"2h"}}"#), Class::Invalid, "is not a time");
    create(r#"{"name":"b","within":"gold"}"#).unwrap();
    create(r#"{"name":"c","within":"b"}"#).unwrap();
    refused(create(r#"{"name":"d","within":"c"}"#), Class::Invalid, "4 groups within each other are possible");
    for name in ["c", "b"] {
        rig.delete_group(name).unwrap();
    }
    refused(rig.group("none"), Class::Missing, "group none does not exist");
    refused(rig.delete_group("none"), Class::Missing, "group none does not exist");
    let zero = GroupCaps { read_bandwidth: Some(Size(0)), ..GroupCaps::default() };
    refused(rig.change_group("gold", &caps(zero)), Class::Invalid, "group gold: read_bandwidth: 1 at least");
    for impossible in [0, 1001] {
        refused(rig.change_group("gold", &weight(impossible)), Class::Invalid, "group gold: weight: 1 to 1000 is possible");
    }
    refused(create(r#"{"name":"a","weight":0}"#), Class::Invalid, "group a: weight: 1 to 1000");
    refused(rig.change_group("gold", &GroupChange::default()), Class::Invalid, "group gold: say which caps or which weight");
    let stack = "throttle(group=silver) | memory";
    refused(
        rig.create_volume(&with_stack("w", stack)),
        Class::Invalid,
        "there is no group silver; \"millrace group create silver",
    );
    let change = VolumeChange { stack: Some(stack.parse().unwrap()), ..VolumeChange::default() };
    refused(rig.change_volume("v", &change), Class::Invalid, "there is no group silver");
    assert_eq!(rig.groups(), before);
    assert!(serde_json::from_str::<GroupSpec>(r#"{"name":"a","iops":1}"#).is_err(), "caps stand under caps");
}

/// A group has one weight, which is set in one place: two cannot contradict each other. Volumes that stand in it by their shares hold it.
#[test]
fn a_group_of_shares_has_one_weight_which_is_changed_under_them() {
    let mut rig = Rig::new();
    rig.create_group(&group(r#"{"name":"gold","weight":3}"#)).unwrap();
    rig.create_volume(&with_stack("pool", &format!("disk(extent=16K) | file:{}", rig.path("pool.img").display()))).unwrap();
    let volume = |name: &str, stack: &str| -> VolumeSpec {
        serde_json::from_str(&format!(r#"{{"name":"{name}","size":"64K","stack":"{stack}"}}"#)).unwrap()
    };
    for name in ["a", "b"] {
        rig.create_volume(&volume(name, "share(group=gold) | volume:pool")).unwrap();
    }
    refused(rig.create_group(&group(r#"{"name":"gold","weight":5}"#)), Class::Conflict, "group gold exists already");
    refused(rig.delete_group("gold"), Class::Conflict, "group gold is in use: volume a, volume b");
    refused(rig.create_volume(&volume("c", "share(group=iron) | volume:pool")), Class::Invalid, "there is no group iron");
    let told = |rig: &Rig, weight: &str| {
        let tree = rig.volume("pool").unwrap().tree;
        tree.status.unwrap().facts.contains(&("group gold".to_owned(), format!("weight {weight}, volumes in it: 2")))
    };
    assert!(told(&rig, "3"));
    rig.change_group("gold", &weight(5)).unwrap();
    assert!(told(&rig, "5"));
    rig.restart();
    assert!(told(&rig, "5") && rig.group("gold").unwrap().weight == 5);
    // A volume is taken out of the group while it is in use.
    let stack = VolumeChange { stack: Some("share | volume:pool".parse().unwrap()), ..VolumeChange::default() };
    rig.change_volume("a", &stack).unwrap();
    refused(rig.delete_group("gold"), Class::Conflict, "group gold is in use: volume b");
}

#[test]
fn what_cannot_be_stored_is_not_done() {
    let disk = FullDisk::default();
    let rig = Rig::on(&disk);
    with_groups(&rig);
    let before = rig.groups();
    disk.set_full(true);
    assert!(rig.create_group(&group(r#"{"name":"silver"}"#)).is_err());
    assert!(rig.change_group("gold", &weight(2)).is_err());
    rig.delete_volume("v").unwrap_err();
    assert_eq!(rig.groups(), before);
    disk.set_full(false);
    rig.delete_volume("v").unwrap();
    disk.set_full(true);
    assert!(rig.delete_group("gold").is_err());
    assert_eq!(rig.groups().len(), 2);
}

#[test]
fn a_file_makes_sure_of_groups() {
    let mut rig = Rig::new();
    rig.stop();
    let file = "[[group]]\nname = \"gold\"\nwithin = \"acme\"\ncaps = { iops = 100 }\nweight = 4\n[[group]]\nname = \"acme\"\n\
                [[volume]]\nname = \"v\"\nsize = \"1M\"\nstack = \"throttle(group=gold) | memory\"\n";
    rig.try_start(Some(file)).unwrap();
    assert_eq!(rig.group("gold").unwrap().volumes.len(), 1);
    rig.stop();
    // Again: nothing is to be done.
    rig.try_start(Some(file)).unwrap();
    rig.stop();
    let error = rig.try_start(Some(&file.replace("100", "200"))).unwrap_err().to_string();
    assert!(
        error.contains("group gold exists already, and differs: it is (within acme, iops=200, weight=4) in the file"),
        "{error}"
    );
    let error = rig.try_start(Some("[[group]]\nname = \"x\"\nwithin = \"nobody\"\n")).unwrap_err().to_string();
    assert!(error.contains("m.toml:1: group nobody does not exist"), "{error}");
    rig.start();
    assert_eq!(rig.groups().len(), 2, "nothing of a file that cannot be applied is there");
}

/// Cells delete theirs before the daemon's own worker does.
#[test]
fn a_group_that_will_not_be_deleted_says_so_beforehand() {
    let rig = Rig::new();
    with_groups(&rig);
    let view = rig.group_to_delete("gold").unwrap();
    assert_eq!(view.volumes, ["v".parse().unwrap()], "what is in it is told with what is in it elsewhere");
    assert!(matches!(rig.group_to_delete("none"), Err(ControlError::NoGroup { .. })));
    rig.peek().changing.insert("v".parse().unwrap(), "memory".parse().unwrap());
    assert!(matches!(rig.group_to_delete("gold"), Err(ControlError::Changing { .. })));
    rig.peek().changing.clear();
}
