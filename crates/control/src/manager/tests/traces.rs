//! Traces: when they end, whatever their askers do, and what they record until then.

use millrace_block::trace::{Event, EventKind, Key};
use millrace_trace::Trace;

use super::*;

fn target() -> Target {
    Target::Device("a".to_owned())
}

/// A device that is traced, with one of two volumes.
fn rig() -> Rig {
    let rig = Rig::new();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    rig.create_volume(&volume("w", "1M", "memory")).unwrap();
    rig.create_device(&device("a", "{}")).unwrap();
    rig.attach("a", &attach("v", None)).unwrap();
    rig
}

#[test]
fn a_trace_may_be_to_last_for_ever() {
    let rig = rig();
    let target = Target::Volume("v".to_owned());
    let blocks = rig.start_trace(&target, Some(u64::MAX)).unwrap();
    rig.stop_trace(&target).unwrap();
    drop(blocks);
    eventually("the trace's end", || rig.start_trace(&target, Some(u64::MAX)).ok());
}

#[test]
fn a_trace_ends_though_its_asker_stands_still() {
    let rig = rig();
    let mut blocks = rig.start_trace(&target(), Some(1)).unwrap();
    // The device is quiet: events come from here, as many as fit, for as long as anything is recorded.
    let running = Arc::clone(rig.tracing().as_ref().unwrap());
    let event = Event { kind: EventKind::Seen, key: Key { device: 1, ..Key::NOBODY }, ..Event::default() };
    drop(eventually("the trace's end", || {
        if !running.is_finished() {
            (0..50_000).for_each(|_| running.rings[0].push(&event));
        }
        rig.start_trace(&target(), Some(u64::MAX)).ok()
    }));
    let mut file = Vec::new();
    while let Ok(block) = blocks.try_recv() {
        file.extend(block);
    }
    let trace = Trace::read(&file[..]).unwrap();
    assert!(trace.events > 0 && trace.damage.cut, "it had no more room");
}

#[test]
fn nothing_switches_a_trace_on_that_is_finished() {
    let rig = rig();
    let mut blocks = rig.start_trace(&target(), None).unwrap();
    let running = Arc::clone(rig.tracing().as_ref().unwrap());
    // Its last blocks are not taken yet.
    rig.finish_trace(&running);
    rig.attach("a", &attach("w", None)).unwrap();
    assert!(rig.tracing().is_some());
    rig.stop_trace(&target()).unwrap();
    let mut file = Vec::new();
    while let Some(block) = blocks.blocking_recv() {
        file.extend(block);
    }
    let trace = Trace::read(&file[..]).unwrap();
    let volumes: Vec<_> = trace.nodes.values().map(|node| node.volume.as_str()).collect();
    assert_eq!(volumes, ["v"]);
}

#[test]
fn a_trace_of_a_volume_goes_without_the_device_whose_shard_hangs() {
    let rig = two_devices();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    for name in ["stuck", "other"] {
        rig.attach(name, &attach("v", Some(1))).unwrap();
    }
    let release = hang(&rig, STUCK);
    let begun = rig.start_trace(&Target::Volume("v".to_owned()), None).map(drop);
    assert!(begun.is_ok(), "{begun:?}");
    drop(release);
}
