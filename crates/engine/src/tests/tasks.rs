use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    rc::Rc,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use millrace_block::{Asker, IoOperation};

use super::{Gadget, config, flag, shard, signal::Signal, turn_until, waits};
use crate::{DeviceKey, Launch, Outcome, Shard, ShardConfig, ShardContext, remote};

#[test]
fn what_is_done_at_once_leaves_no_trace() {
    let mut shard = Shard::new(&ShardConfig { tasks: 1, ..config() }).unwrap();
    let cx = shard.context();
    let mut slot = cx.reserve().unwrap();
    assert!(cx.reserve().is_none());
    for round in 0..100 {
        // Each round takes most of the scratch: without the reset, the second would overflow.
        let outcome = slot.run(|tcx| {
            let list = tcx.scratch.place_slice(200, round);
            Launch::Done((list[199], tcx.scratch.overflows()))
        });
        let Outcome::Done(value, back) = outcome else { panic!("nothing waits here") };
        assert_eq!(value, (round, 0));
        slot = back;
    }
    drop(slot);
    assert!(cx.reserve().is_some());
    assert_eq!(cx.waiting_tasks(), 0);
    assert_eq!(shard.core_for_tests().slots.started(), 0);
}

/// What the daemon does by itself is no device's, on whichever shard and however often it waits.
#[test]
fn tasks_of_the_shard_itself_ask_for_nobody() {
    let mut shard = shard();
    let (signal, seen) = (Rc::new(Signal::new(1)), Rc::new(RefCell::new(Vec::new())));
    let both = Rc::new((Rc::clone(&signal), Rc::clone(&seen)));
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run_with(&both, |tcx, both| {
        both.1.borrow_mut().push(Asker::current());
        Launch::Wait(tcx.scratch.place_future(async move {
            both.0.wait().await;
            both.1.borrow_mut().push(Asker::current());
        }))
    });
    waits(outcome);
    shard.turn();
    signal.notify_all();
    turn_until(&mut shard, || seen.borrow().len() == 2);
    assert_eq!(*seen.borrow(), [Asker::NOBODY; 2]);
}

#[test]
fn a_waiting_task_keeps_what_it_borrows() {
    let mut shard = shard();
    let object = Rc::new((Signal::new(1), Cell::new(0)));
    let slot = shard.context().reserve().unwrap();
    let outcome: Outcome<'_, ()> = slot.run_with(&object, |tcx, object| {
        let steps = tcx.scratch.place_slice(3, 7);
        Launch::Wait(tcx.scratch.place_future(async move {
            for step in steps.iter() {
                object.0.wait().await;
                object.1.set(object.1.get() + step);
            }
        }))
    });
    waits(outcome);
    assert_eq!(Rc::strong_count(&object), 2);
    for round in 1..=3 {
        shard.turn();
        assert_eq!(object.1.get(), (round - 1) * 7);
        object.0.notify_all();
        shard.turn();
        assert_eq!(object.1.get(), round * 7);
    }
    assert_eq!(Rc::strong_count(&object), 1);
    assert_eq!(shard.context().waiting_tasks(), 0);
}

#[test]
fn an_object_shared_only_with_its_task_dies_with_it() {
    struct Last(Rc<Cell<bool>>, Signal);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let (seen, dropped) = flag();
    let mut shard = shard();
    let signal = Rc::new(Signal::new(1));
    let object = Rc::new(Last(dropped, Signal::new(1)));
    let go = Rc::clone(&signal);
    let slot = shard.context().reserve().unwrap();
    let outcome: Outcome<'_, ()> = slot.run_with(&object, |tcx, object| {
        Launch::Wait(tcx.scratch.place_future(async move {
            go.wait().await;
            object.1.notify_all();
        }))
    });
    waits(outcome);
    drop(object);
    shard.turn();
    assert!(!seen.get());
    signal.notify_all();
    shard.turn();
    assert!(seen.get());
}

#[test]
fn a_slot_that_waited_has_all_its_scratch_again() {
    let mut shard = Shard::new(&ShardConfig { tasks: 1, ..config() }).unwrap();
    let signal = Rc::new(Signal::new(1));
    for _ in 0..10 {
        let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run_with(&signal, |tcx, signal| {
            let list = tcx.scratch.place_slice(200, 0_u64);
            Launch::Wait(tcx.scratch.place_future(async move {
                signal.wait().await;
                list.fill(1);
            }))
        });
        waits(outcome);
        signal.notify_all();
        shard.turn();
    }
    let slot = shard.context().reserve().unwrap();
    let Outcome::Done(overflows, _) = slot.run(|tcx| Launch::Done(tcx.scratch.overflows())) else { panic!("at once") };
    assert_eq!(overflows, 0);
}

fn wait_for(cx: &ShardContext<'_>, signal: &Rc<Signal>, count: &Rc<Cell<u32>>) -> bool {
    let Some(slot) = cx.reserve() else { return false };
    let count = Rc::clone(count);
    let outcome: Outcome<'_, ()> = slot.run_with(signal, |tcx, signal| {
        Launch::Wait(tcx.scratch.place_future(async move {
            signal.wait().await;
            count.set(count.get() + 1);
        }))
    });
    matches!(outcome, Outcome::Waiting)
}

#[test]
fn slots_run_out_and_come_back() {
    let mut shard = shard();
    let (signal, count) = (Rc::new(Signal::new(64)), Rc::new(Cell::new(0)));
    for round in 1..=3 {
        for _ in 0..64 {
            assert!(wait_for(&shard.context(), &signal, &count));
        }
        assert!(!wait_for(&shard.context(), &signal, &count));
        assert_eq!(shard.context().waiting_tasks(), 64);
        signal.notify_all();
        assert_eq!(shard.turn(), 64);
        assert_eq!(count.get(), round * 64);
    }
    assert!(shard.context().reserve().is_some());
}

/// As many slots as a device gets; each waits for the signal.
fn take_all(shard: &mut Shard, key: DeviceKey, signal: &Rc<Signal>) -> Option<usize> {
    let count = Rc::new(Cell::new(0));
    shard.with_device(key, |_: &mut Gadget, cx| {
        let mut taken = 0;
        while wait_for(cx, signal, &count) {
            taken += 1;
        }
        taken
    })
}

#[test]
fn devices_leave_each_other_a_quarter() {
    let mut shard = shard();
    let greedy = shard.add_device(Box::new(Gadget::default()));
    let signal = Rc::new(Signal::new(64));
    assert_eq!(take_all(&mut shard, greedy, &signal), Some(64));
    signal.notify_all();
    shard.turn();
    let other = shard.add_device(Box::new(Gadget::default()));
    assert_eq!(take_all(&mut shard, greedy, &signal), Some(48));
    assert_eq!(shard.with_device(other, |_: &mut Gadget, cx| cx.reserve().is_some()), Some(true));
    assert_eq!(shard.with_device(greedy, |_: &mut Gadget, cx| cx.reserve().is_some()), Some(false));
    signal.notify_all();
    shard.turn();
}

/// However many they are, whoever comes first, and though nothing comes back.
#[test]
fn devices_that_take_all_they_can_leave_the_others_their_share() {
    for (devices, share) in [(3, 4), (10, 1)] {
        let mut shard = shard();
        let keys: Vec<_> = (0..devices).map(|_| shard.add_device(Box::new(Gadget::default()))).collect();
        let signal = Rc::new(Signal::new(64));
        let (modest, greedy) = keys.split_last().unwrap();
        let taken: Vec<_> = greedy.iter().map(|key| take_all(&mut shard, *key, &signal).unwrap()).collect();
        assert_eq!((taken[0], taken[1]), (48, share), "of {devices}");
        for key in greedy {
            assert_eq!(take_all(&mut shard, *key, &signal), Some(0), "of {devices}");
        }
        assert_eq!(take_all(&mut shard, *modest, &signal), Some(share), "of {devices}");
        signal.notify_all();
        shard.turn();
        assert_eq!(shard.core_for_tests().slots.waiting(), 0);
    }
}

/// As of slots, whether they are taken in a device's turn or in a task of its own.
#[test]
fn devices_leave_each_other_a_share_of_the_buffers() {
    let mut shard = Shard::new(&ShardConfig { buffers: 8, ..config() }).unwrap();
    let [greedy, other] = [(); 2].map(|()| shard.add_device(Box::new(Gadget::default())));
    let taken = Rc::new(RefCell::new(Vec::new()));
    let take = |cx: &mut ShardContext<'_>| {
        let (taken, before) = (Rc::clone(&taken), taken.borrow().len());
        taken.borrow_mut().extend(cx.buffers().try_take());
        let of_task = Rc::clone(&taken);
        let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
            Launch::Wait(tcx.scratch.place_future(async move {
                of_task.borrow_mut().extend(std::iter::from_fn(|| tcx.buffers.try_take()));
            }))
        });
        waits(outcome);
        taken.borrow().len() - before
    };
    assert_eq!(shard.with_device(greedy, |_: &mut Gadget, cx| take(cx)), Some(6));
    assert_eq!(shard.with_device(greedy, |_: &mut Gadget, cx| take(cx)), Some(0));
    assert_eq!(shard.with_device(other, |_: &mut Gadget, cx| take(cx)), Some(1));
    // Alone, it may have all.
    shard.remove_device(other);
    assert_eq!(shard.with_device(greedy, |_: &mut Gadget, cx| take(cx)), Some(1));
}

#[test]
fn a_wake_after_the_end_is_nothing() {
    let mut shard = shard();
    let kept: Rc<RefCell<Option<Waker>>> = Rc::default();
    let polls = Rc::new(Cell::new(0));
    let (keep, count) = (Rc::clone(&kept), Rc::clone(&polls));
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(poll_fn(move |cx| {
            *keep.borrow_mut() = Some(cx.waker().clone());
            count.set(count.get() + 1);
            if count.get() == 3 { Poll::Ready(()) } else { Poll::Pending }
        })))
    });
    waits(outcome);
    assert_eq!(polls.get(), 1);
    shard.turn();
    assert_eq!(polls.get(), 1, "nobody woke it");
    let waker = kept.borrow().clone().unwrap();
    waker.wake_by_ref();
    waker.wake_by_ref();
    assert_eq!(shard.turn(), 1, "woken twice, polled once");
    assert_eq!(polls.get(), 2);
    waker.wake_by_ref();
    shard.turn();
    assert_eq!(polls.get(), 3);
    waker.wake_by_ref();
    shard.turn();
    assert_eq!(polls.get(), 3, "it has ended");
    drop(shard);
    waker.wake();
}

#[test]
fn a_task_may_wake_itself_without_starving_others() {
    let mut shard = shard();
    let (seen, stop) = flag();
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(poll_fn(move |cx| {
            cx.waker().wake_by_ref();
            if stop.get() { Poll::Ready(()) } else { Poll::Pending }
        })))
    });
    waits(outcome);
    // Each turn ends although the task is always ready.
    for _ in 0..10 {
        assert_eq!(shard.turn(), 1);
    }
    seen.set(true);
    shard.turn();
    assert_eq!(shard.context().waiting_tasks(), 0);
}

/// One that waited for it would never end.
#[test]
fn a_stopping_shard_does_not_wait_for_a_task_that_always_has_something_to_do() {
    let mut shard = shard();
    let polls = Rc::new(Cell::new(0_u64));
    let count = Rc::clone(&polls);
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(poll_fn(move |cx| {
            count.set(count.get() + 1);
            cx.waker().wake_by_ref();
            Poll::Pending
        })))
    });
    waits(outcome);
    drop(shard);
    assert!(polls.get() > 1, "it had its time");
    assert_eq!(Rc::strong_count(&polls), 2, "it was leaked, not dropped");
}

#[test]
fn a_waker_that_leaves_its_shard_is_caught() {
    let mut shard = shard();
    let kept: Rc<RefCell<Option<Waker>>> = Rc::default();
    let keep = Rc::clone(&kept);
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(poll_fn(move |cx| match keep.replace(Some(cx.waker().clone())) {
            None => Poll::Pending,
            Some(_) => Poll::Ready(()),
        })))
    });
    waits(outcome);
    let waker = kept.borrow().clone().unwrap();
    let foreign = waker.clone();
    assert!(std::thread::spawn(move || foreign.wake()).join().is_err());
    assert_eq!(shard.turn(), 0);
    waker.wake();
    assert_eq!(shard.turn(), 1);
}

#[test]
fn sleeps_end_in_the_order_of_their_deadlines_and_not_early() {
    let mut shard = shard();
    let order: Rc<RefCell<Vec<u64>>> = Rc::default();
    let start = Instant::now();
    for millis in [30, 10, 20, 0] {
        let order = Rc::clone(&order);
        let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
            Launch::Wait(tcx.scratch.place_future(async move {
                assert_eq!(tcx.io(IoOperation::Sleep(Duration::from_millis(millis))).await, 0);
                assert!(start.elapsed() >= Duration::from_millis(millis));
                order.borrow_mut().push(millis);
            }))
        });
        waits(outcome);
    }
    turn_until(&mut shard, || order.borrow().len() == 4);
    assert_eq!(*order.borrow(), [0, 10, 20, 30]);
    assert_eq!(shard.context().waiting_tasks(), 0, "no task panicked");
}

#[test]
fn answers_come_from_other_threads() {
    let mut shard = shard();
    let answers: Rc<RefCell<Vec<Option<String>>>> = Rc::default();
    let mut senders = Vec::new();
    for _ in 0..3 {
        let cx = shard.context();
        let (sender, answer) = remote::<String>(&cx);
        senders.push(sender);
        let answers = Rc::clone(&answers);
        let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
            Launch::Wait(tcx.scratch.place_future(async move {
                let answer = answer.await;
                answers.borrow_mut().push(answer);
            }))
        });
        waits(outcome);
    }
    let last = senders.pop();
    drop(senders.pop());
    let first = senders.pop().unwrap();
    std::thread::spawn(move || first.send("forty-two".to_owned())).join().unwrap();
    turn_until(&mut shard, || answers.borrow().len() == 2);
    answers.borrow_mut().sort();
    assert_eq!(*answers.borrow(), [None, Some("forty-two".to_owned())]);
    assert_eq!(shard.context().waiting_tasks(), 1);
    // An answer that is there before anybody asks.
    let cx = shard.context();
    let (sender, answer) = remote::<u8>(&cx);
    sender.send(9);
    let (seen, done) = flag();
    let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(async move {
            done.set(answer.await == Some(9));
        }))
    });
    waits(outcome);
    assert!(seen.get());
    drop(last);
    turn_until(&mut shard, || answers.borrow().len() == 3);
}

#[test]
fn a_signal_wakes_those_who_waited_before_it() {
    let mut shard = shard();
    let (signal, count) = (Rc::new(Signal::new(1)), Rc::new(Cell::new(0)));
    signal.notify_all();
    for _ in 0..3 {
        assert!(wait_for(&shard.context(), &signal, &count));
    }
    shard.turn();
    assert_eq!(count.get(), 0, "the notification came before they waited");
    signal.notify_all();
    assert!(wait_for(&shard.context(), &signal, &count));
    shard.turn();
    assert_eq!(count.get(), 3);
    signal.notify_all();
    shard.turn();
    assert_eq!(count.get(), 4);
}

#[test]
fn a_buffer_wakes_who_waits_for_it() {
    let mut shard = shard();
    let cx = shard.context();
    let held = [cx.buffers().try_take().unwrap(), cx.buffers().try_take().unwrap()];
    let count = Rc::new(Cell::new(0));
    for _ in 0..5 {
        let count = Rc::clone(&count);
        let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
            Launch::Wait(tcx.scratch.place_future(async move {
                let _buffer = tcx.buffers.take().await;
                count.set(count.get() + 1);
            }))
        });
        waits(outcome);
    }
    shard.turn();
    assert_eq!(count.get(), 0);
    drop(held);
    turn_until(&mut shard, || count.get() == 5);
}

#[test]
fn a_stopping_shard_ends_what_can_end() {
    let (seen, done) = flag();
    let forever = Rc::new(Signal::new(1));
    let count = Rc::new(Cell::new(0));
    let mut shard = shard();
    assert!(wait_for(&shard.context(), &forever, &count));
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(async move {
            tcx.io(IoOperation::Sleep(Duration::from_millis(5))).await;
            done.set(true);
        }))
    });
    waits(outcome);
    drop(shard);
    assert!(seen.get());
    // The other was leaked, not dropped: its slot still holds the signal.
    assert_eq!(Rc::strong_count(&forever), 2);
    forever.notify_all();
    assert_eq!(count.get(), 0);
}
