use std::{cell::Cell, os::fd::AsFd, rc::Rc, time::Duration};

use super::{Gadget, shard, signal::Signal, turn_until, waits};
use crate::{Launch, Outcome, Readiness, ShardContext, poller::Events};

/// A healthy device beside a faulty one: goes on being polled.
fn healthy() -> (Gadget, Rc<Cell<u32>>) {
    let polls = Rc::new(Cell::new(0));
    let count = Rc::clone(&polls);
    let poll = Box::new(move |_: &mut ShardContext<'_>| {
        count.set(count.get() + 1);
        0
    });
    (Gadget { poll, ..Gadget::default() }, polls)
}

#[test]
fn a_panic_in_a_device_fences_that_device_only() {
    let mut shard = shard();
    let (good, polls) = healthy();
    let bad_polls = Rc::new(Cell::new(0));
    let count = Rc::clone(&bad_polls);
    let bad = Gadget {
        poll: Box::new(move |cx| {
            count.set(count.get() + 1);
            let _slot = cx.reserve().unwrap();
            panic!("a bug")
        }),
        ..Gadget::default()
    };
    let fences = Rc::clone(&bad.fences);
    let good_fences = Rc::clone(&good.fences);
    let bad = shard.add_device(Box::new(bad));
    let good = shard.add_device(Box::new(good));
    for _ in 0..5 {
        shard.turn();
    }
    assert_eq!((bad_polls.get(), fences.get(), polls.get(), good_fences.get()), (1, 1, 5, 0));
    assert_eq!((shard.is_fenced(bad), shard.is_fenced(good)), (Some(true), Some(false)));
    assert_eq!(shard.core_for_tests().slots.free(), 64, "the slot it held came back");
    assert!(shard.remove_device(bad).is_some());
    assert_eq!(shard.is_fenced(bad), None);
}

#[test]
fn a_panic_in_a_task_fences_its_device_only() {
    let mut shard = shard();
    let (good, polls) = healthy();
    let bad = Gadget::default();
    let fences = Rc::clone(&bad.fences);
    shard.add_device(Box::new(good));
    let bad = shard.add_device(Box::new(bad));
    let signal = Rc::new(Signal::new(4));
    let started = shard.with_device(bad, |_: &mut Gadget, cx| {
        for _ in 0..2 {
            let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run_with(&signal, |tcx, signal| {
                Launch::Wait(tcx.scratch.place_future(async move {
                    signal.wait().await;
                    panic!("a bug in a task")
                }))
            });
            waits(outcome);
        }
    });
    assert!(started.is_some());
    shard.turn();
    assert_eq!(fences.get(), 0);
    signal.notify_all();
    shard.turn();
    assert_eq!(fences.get(), 1, "twice at fault, fenced once");
    assert_eq!(shard.is_fenced(bad), Some(true));
    assert_eq!(Rc::strong_count(&signal), 1);
    assert_eq!(shard.core_for_tests().slots.free(), 64);
    let before = polls.get();
    shard.turn();
    assert_eq!(polls.get(), before + 1);
}

#[test]
fn a_panic_in_the_first_poll_of_a_task_is_contained_too() {
    let mut shard = shard();
    let gadget = Gadget {
        poll: Box::new(|cx| {
            let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
                Launch::Wait(tcx.scratch.place_future(async move {
                    assert_eq!(tcx.scratch.overflows(), 1, "a bug at once");
                }))
            });
            waits(outcome);
            1
        }),
        ..Gadget::default()
    };
    let fences = Rc::clone(&gadget.fences);
    shard.add_device(Box::new(gadget));
    shard.turn();
    shard.turn();
    assert_eq!(fences.get(), 1);
    assert_eq!(shard.core_for_tests().slots.free(), 64);
}

#[test]
fn a_fenced_device_gets_no_events_and_does_not_spin_its_shard() {
    let mut shard = shard();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let gadget = Gadget { event: Box::new(|_, _| panic!("a bug in an event")), ..Gadget::default() };
    let fences = Rc::clone(&gadget.fences);
    let key = shard
        .add_device_with(|cx| cx.register(ours.as_fd(), 0).map(|()| -> Box<dyn crate::Device> { Box::new(gadget) }))
        .unwrap();
    drop(theirs);
    turn_until(&mut shard, || fences.get() == 1);
    let mut events = Events::new();
    shard.core_for_tests().poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
    assert_eq!(events.len(), 0, "its descriptor is out of the set");
    assert!(shard.with_device(key, |_: &mut Gadget, _| ()).is_some(), "it can still be looked at");
    assert_eq!(shard.with_device(key, |_: &mut Gadget, _| -> () { panic!("again") }), None);
    assert_eq!(fences.get(), 1);
}

#[test]
fn keys_name_one_device_and_one_type() {
    struct Other(Gadget);
    impl crate::Device for Other {
        fn name(&self) -> &'static str {
            "other"
        }
        fn poll(&mut self, cx: &mut crate::ShardContext<'_>) -> usize {
            self.0.poll(cx)
        }
        fn event(&mut self, _: &mut crate::ShardContext<'_>, _: u32) {}
        fn arm(&mut self, _: &mut crate::ShardContext<'_>) -> Readiness {
            Readiness::Block
        }
        fn disarm(&mut self) {}
        fn fence(&mut self, _: &mut crate::ShardContext<'_>) {}
    }
    let mut shard = shard();
    let first = shard.add_device(Box::new(Gadget::default()));
    assert!(shard.with_device(first, |_: &mut Other, _| ()).is_none());
    assert_eq!(shard.is_fenced(first), Some(false), "a wrong type is no fault of the device");
    assert!(shard.remove_device(first).is_some());
    assert!(shard.remove_device(first).is_none());
    let second = shard.add_device(Box::new(Other(Gadget::default())));
    assert_ne!(first, second);
    assert!(shard.with_device(first, |_: &mut Gadget, _| ()).is_none());
    let key = shard.with_device(second, |_: &mut Other, cx| cx.key());
    assert_eq!(key, Some(second));
    assert_eq!(shard.devices().collect::<Vec<_>>(), [second]);
}
