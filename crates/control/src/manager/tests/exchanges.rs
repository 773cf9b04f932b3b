//! What is noted of a volume while it is being changed, what goes to the account meanwhile, and what a change leaves stored.

use millrace_services::{Node, Service, Settings};

use super::{
    stacks::{spec, write},
    *,
};
use crate::usage::{UsageBy, UsageQuestion};

impl Rig {
    fn stored_v(&self) -> VolumeRecord {
        self.store.volume(&"v".parse().unwrap()).unwrap().unwrap()
    }

    /// The mirror of volume `v`, whoever has its graph later.
    fn mirror(&self) -> Arc<dyn Service> {
        self.peek().volumes["v"].graph.as_ref().unwrap().graph.services("mirror").remove(0).1
    }
}

fn fail(mirror: &Arc<dyn Service>, leg: &str) {
    let mut arguments = Settings::default();
    arguments.add("leg", leg);
    mirror.command("fail", &arguments).unwrap();
}

/// Emptying a cache that is taken out may take an hour. The leg that fails meanwhile may be the only one that is there when the power is back.
#[test]
fn what_happens_during_a_change_is_noted_then() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("throttle(iops=1M) | mirror(@a, @b)"))).unwrap();
    let mirror = rig.mirror();
    let switch = Arc::clone(&rig.peek().volumes["v"].graph.as_ref().unwrap().switch);
    let next: Node = rig.stack("mirror(@a, @b)").parse().unwrap();
    let mut change = rig.begin_change("v", None, |_| Ok(next.clone())).unwrap();
    fail(&mirror, "1");
    switch.note_loss();
    rig.note_legs(&mut rig.peek());
    let is_noted = |of: &str| {
        let stored = rig.stored_v();
        assert_eq!((stored.out_of_use, stored.untold), (vec![rig.stack("@b")], true), "{of}");
    };
    is_noted("during the change");
    let result = rig.exchange(&mut change, false);
    is_noted("with the change");
    rig.end_change(change, result).unwrap();
    is_noted("after the change");
    assert_eq!(rig.stored_v().spec.stack, next);
    assert!(rig.peek().watched.is_empty());
}

/// Writes on the account, of whom there are any.
fn written(rig: &Rig, by: UsageBy) -> Vec<(String, u64)> {
    let rows = rig.usage(&UsageQuestion { by, ..UsageQuestion::default() }).unwrap();
    rows.into_iter().filter(|row| row.writes > 0).map(|row| (row.name, row.writes)).collect()
}

fn line(name: &str, writes: u64) -> (String, u64) {
    (name.to_owned(), writes)
}

/// What a change waits for may take an hour, and the daemon be upgraded or killed meanwhile, or a device go: what guests do is on the account
/// as ever.
#[test]
fn what_is_done_during_a_change_is_on_the_account_meanwhile() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("256K"), "meter(tenant=x) | throttle(iops=1M) | memory")).unwrap();
    for name in ["d", "e"] {
        rig.create_device(&device(name, "{}")).unwrap();
        rig.attach(name, &attach("v", Some(1))).unwrap();
    }
    write(&rig, "d", 1);
    let next: Node = "meter(tenant=y) | memory".parse().unwrap();
    let mut change = rig.begin_change("v", None, |_| Ok(next)).unwrap();
    write(&rig, "d", 2);
    write(&rig, "e", 4);
    rig.keep_account();
    assert_eq!(written(&rig, UsageBy::Tenant), [line("x", 7)]);
    rig.delete_device("e").unwrap();
    write(&rig, "d", 8);
    rig.leave_account(&rig.peek());
    assert_eq!(written(&rig, UsageBy::Device), [line("d", 11), line("e", 4)]);
    let result = rig.exchange(&mut change, false);
    // The other tenant's meter is in force, and this one's is on the account still.
    write(&rig, "d", 16);
    rig.keep_account();
    assert_eq!(written(&rig, UsageBy::Tenant), [line("x", 15)]);
    rig.end_change(change, result).unwrap();
    rig.keep_account();
    assert_eq!(written(&rig, UsageBy::Tenant), [line("x", 15), line("y", 16)]);
    assert_eq!(written(&rig, UsageBy::Device), [line("d", 27), line("e", 4)]);
    assert!(rig.peek().metering.is_empty());
}

/// A volume of tenant b's, of which its guest has written three blocks.
fn metered() -> Rig {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("256K"), "meter(tenant=b) | memory")).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("v", Some(1))).unwrap();
    write(&rig, "d", 3);
    rig
}

/// A thread has read a meter, and comes to write when another one is over that and on the account.
#[test]
fn what_was_read_of_a_meter_before_another_came_over_it_is_on_the_account_once() {
    let rig = metered();
    let read = {
        let inner = rig.peek();
        inner.all_metered(inner.volumes.get("v"))
    };
    write(&rig, "d", 2);
    rig.try_change("v", "meter(tenant=a) | meter(tenant=b) | memory", false).unwrap();
    write(&rig, "d", 5);
    rig.settle_volume(&rig.peek(), "v");
    rig.account.write(&read);
    assert_eq!(written(&rig, UsageBy::Tenant), [line("a", 5), line("b", 5)]);
}

/// Nothing of what a change begins with is stored when it is refused.
#[test]
fn what_happens_during_a_change_that_is_refused_is_noted_as_well() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("mirror(@a, @b)"))).unwrap();
    let mirror = rig.mirror();
    let before: Node = rig.stack("mirror(@a, @b)").parse().unwrap();
    let next = rig.stack("mirror(@c, @d)").parse().unwrap();
    let mut change = rig.begin_change("v", None, |_| Ok(next)).unwrap();
    fail(&mirror, "1");
    let result = rig.exchange(&mut change, false);
    rig.end_change(change, result).unwrap_err();
    let stored = rig.stored_v();
    assert_eq!((stored.out_of_use, stored.spec.stack), (vec![rig.stack("@b")], before));
    assert!(rig.peek().watched.is_empty());
}

/// A leg that is out of use is known by what stands in the stack.
#[test]
fn a_leg_out_of_use_is_stored_as_it_stands_in_the_new_stack() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), &rig.stack("mirror(@a, @b)"))).unwrap();
    fail(&rig.mirror(), "1");
    rig.note_legs(&mut rig.peek());
    assert_eq!(rig.stored_v().out_of_use, [rig.stack("@b")]);
    let next: Node = rig.stack("mirror(@a, throttle(iops=1M) | @b)").parse().unwrap();
    let mut change = rig.begin_change("v", None, |_| Ok(next.clone())).unwrap();
    let result = rig.exchange(&mut change, false);
    let out_of_use = [next.legs()[1].to_string()];
    assert_eq!(rig.stored_v().out_of_use, out_of_use, "with the change, not when it is looked at next");
    rig.end_change(change, result).unwrap();
    assert_eq!(rig.stored_v().out_of_use, out_of_use);
}

#[test]
fn the_history_comes_back_with_its_pauses_and_does_not_grow_for_ever() {
    let mut rig = Rig::new();
    let stacks = ["@a", "throttle(iops=1M) | @a"];
    rig.create_volume(&spec("v", Some("256K"), &rig.stack(stacks[0]))).unwrap();
    for round in 1..=33_usize {
        rig.try_change("v", stacks[round % 2], false).unwrap();
        let (history, stored) = (rig.volume_history("v").unwrap(), rig.stored_v().history);
        assert_eq!(stored, history);
        assert_eq!(history.len(), (round + 1).min(32));
        assert!(history.last().unwrap().pause_us.is_some(), "{round}");
    }
    let history = rig.volume_history("v").unwrap();
    rig.restart();
    assert_eq!(rig.volume_history("v").unwrap(), history);
}

/// Between the moment in which the other meter comes into force and the end of the change, which may have to wait, both count.
#[test]
fn what_is_done_at_the_end_of_a_change_is_on_one_account() {
    let rig = metered();
    let next: Node = "meter(tenant=a) | meter(tenant=b) | memory".parse().unwrap();
    let mut change = rig.begin_change("v", None, |_| Ok(next)).unwrap();
    let result = rig.exchange(&mut change, false);
    write(&rig, "d", 16);
    rig.end_change(change, result).unwrap();
    write(&rig, "d", 5);
    rig.keep_account();
    assert_eq!(written(&rig, UsageBy::Tenant), [line("a", 5), line("b", 19)]);
}
