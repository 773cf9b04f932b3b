//! Traces: when they end, whatever their askers do, and what they record until then.

use millrace_block::{
    Lba,
    trace::{Event, EventKind, Key},
};
use millrace_driver::{QueueOptions, spec::NamespaceId};
use millrace_frontends::nvme::NewFormat;
use millrace_trace::Trace;
use tokio::sync::mpsc;

use super::{
    guests::{ask, create, guests_device},
    *,
};

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

/// What there is of a trace when it is over.
fn rest(mut blocks: mpsc::Receiver<Vec<u8>>) -> Trace {
    let mut file = Vec::new();
    while let Some(block) = blocks.blocking_recv() {
        file.extend(block);
    }
    Trace::read(&file[..]).unwrap()
}

#[test]
fn a_trace_of_a_volume_is_over_for_a_device_that_shows_another_in_its_place() {
    let rig = rig();
    let mut guest = guest(&rig, "a");
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    let target = Target::Volume("v".to_owned());
    let blocks = rig.start_trace(&target, None).unwrap();
    for other in ["w", "v"] {
        let namespace = guest.namespace(NamespaceId(1)).unwrap();
        queue.execute(&namespace.read(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
        rig.detach("a", 1).unwrap();
        rig.attach("a", &attach(other, Some(1))).unwrap();
    }
    rig.stop_trace(&target).unwrap();
    assert_eq!(rest(blocks).requests.len(), 1, "the other one is the other volume's");
}

/// A trace of a device goes on for a volume of its that others have by now, but not with it.
#[test]
fn a_volume_that_its_device_shows_no_more_is_traced_no_more() {
    let rig = rig();
    rig.create_device(&device("b", "{}")).unwrap();
    let blocks = rig.start_trace(&target(), None).unwrap();
    rig.detach("a", 1).unwrap();
    rig.attach("b", &attach("v", Some(1))).unwrap();
    let mut guest = guest(&rig, "b");
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    queue.execute(&namespace.read(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
    rig.stop_trace(&target()).unwrap();
    assert!(rest(blocks).background.is_empty());
}

#[test]
fn a_trace_has_what_a_guest_makes_and_formats_meanwhile() {
    let rig = Rig::new();
    guests_device(&rig);
    rig.create_volume(&rig.file_volume("f", "1M")).unwrap();
    rig.attach("d", &attach("f", Some(2))).unwrap();
    let target = Target::Device("d".to_owned());
    let blocks = rig.start_trace(&target, None).unwrap();
    let namespace = create(&rig, "d", 1, 64 << 10).unwrap();
    let format = NewFormat { block_size: BlockSize::B512, metadata: None };
    ask(&rig, move |host, reply| host.format("d", namespace, format, reply)).unwrap();
    rig.resize_volume("f", size("2M"), false).unwrap();
    ask(&rig, |host, reply| host.delete_namespace("d", 1, reply)).unwrap();
    rig.stop_trace(&target).unwrap();
    let trace = rest(blocks);
    let known = |nsid: u16| {
        let known = trace.namespaces[&(1, nsid)].iter();
        known.map(|(_, namespace)| (namespace.volume.as_str(), namespace.block, namespace.size)).collect::<Vec<_>>()
    };
    assert_eq!(known(1), [("d-1234abcd-ns1", 4096, 64 << 10), ("d-1234abcd-ns1", 512, 64 << 10)]);
    assert_eq!(known(2), [("f", 512, 1 << 20), ("f", 512, 2 << 20)]);
    let nodes: Vec<_> = trace.nodes.values().map(|node| (node.volume.as_str(), node.block)).collect();
    assert_eq!(nodes, [("f", 512), ("d-1234abcd-ns1", 4096), ("d-1234abcd-ns1", 512)]);
}

/// Each session of an application that opens and ends is such a change.
#[test]
fn changes_that_are_none_use_up_no_numbers() {
    let rig = rig();
    let blocks = rig.start_trace(&target(), None).unwrap();
    let running = Arc::clone(rig.tracing().as_ref().unwrap());
    assert!(running.next_nodes(usize::from(u16::MAX) - 2).is_some(), "one is left");
    (0..10).for_each(|_| rig.retrace(&rig.peek(), "v"));
    rig.attach("a", &attach("w", None)).unwrap();
    rig.stop_trace(&target()).unwrap();
    let trace = rest(blocks);
    let nodes: Vec<_> = trace.nodes.values().map(|node| (node.id, node.volume.as_str())).collect();
    assert_eq!(nodes, [(1, "v"), (u16::MAX, "w")]);
    assert!(!trace.end.unwrap().early);
}

#[test]
fn a_trace_that_has_no_more_numbers_ends_and_says_so() {
    let rig = rig();
    let blocks = rig.start_trace(&target(), None).unwrap();
    let running = Arc::clone(rig.tracing().as_ref().unwrap());
    assert!(running.next_nodes(usize::from(u16::MAX) - 1).is_some());
    rig.attach("a", &attach("w", None)).unwrap();
    let trace = rest(blocks);
    let end = trace.end.unwrap();
    assert!(end.early && end.reason.contains("used up"), "{}", end.reason);
    assert!(trace.nodes.values().all(|node| node.volume == "v" && node.id != 0));
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
