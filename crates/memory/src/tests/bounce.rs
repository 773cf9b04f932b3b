//! The buffer pool.

use std::{
    collections::BTreeSet,
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use crate::{BUFFER_SIZE, BounceBuffer, BufferPool, Owner, taker};

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn buffers_are_aligned_and_apart() {
    let pool = BufferPool::new(3).unwrap();
    let buffers = [pool.try_take().unwrap(), pool.try_take().unwrap(), pool.try_take().unwrap()];
    assert!(pool.try_take().is_none());
    for (i, buffer) in buffers.iter().enumerate() {
        let segment = buffer.segment(BUFFER_SIZE);
        assert!((segment.as_ptr() as usize).is_multiple_of(4096));
        segment.fill(i as u8);
    }
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(super::content(&buffer.segment(BUFFER_SIZE)).iter().all(|byte| *byte == i as u8));
    }
    let too_long = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffers[0].segment(BUFFER_SIZE + 1)));
    assert!(too_long.is_err());
    drop(buffers);
    assert!((0..3).map(|_| pool.try_take()).collect::<Vec<_>>().iter().all(Option::is_some));
}

/// Of threads that make a pool each, and end.
#[test]
fn memory_of_pools_that_have_gone_is_the_next_ones() {
    let mut places = BTreeSet::new();
    for _ in 0..100 {
        // As many buffers as no other test has in a pool.
        let (pool, owner) = (BufferPool::new(7).unwrap(), Owner::default());
        for one in [&pool, pool.deeper(), pool.of(&owner)] {
            places.insert(one.try_take().unwrap().segment(BUFFER_SIZE).as_ptr() as usize);
        }
    }
    assert_eq!(places.len(), 3, "one for each that lives at once");
}

#[test]
fn an_owners_buffers_are_nobody_elses() {
    let pool = BufferPool::new(1).unwrap();
    let (one, other) = (Owner::default(), Owner::default());
    let places = [&pool, pool.deeper(), pool.of(&one), pool.of(&one).deeper(), pool.of(&other), pool.of(&one).of(&other)];
    let buffers = places.map(|place| place.try_take().unwrap());
    assert!(pool.deeper().of(&one).try_take().is_none(), "whatever the level was above");
    for (i, buffer) in buffers.iter().enumerate() {
        buffer.segment(BUFFER_SIZE).fill(i as u8);
    }
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(super::content(&buffer.segment(BUFFER_SIZE)).iter().all(|byte| *byte == i as u8));
    }
}

/// Wakers, and how often each was woken.
fn wakers<const N: usize>() -> ([Waker; N], impl Fn(usize) -> usize) {
    let woken: [Arc<Woken>; N] = std::array::from_fn(|_| Arc::default());
    (woken.each_ref().map(|woken| Waker::from(Arc::clone(woken))), move |i| woken[i].0.load(Ordering::Relaxed))
}

#[test]
fn those_who_wait_are_served_in_order_one_wake_each() {
    let pool = BufferPool::new(1).unwrap();
    let first = pool.try_take().unwrap();
    let (wakers, count) = wakers::<2>();
    let [mut a, mut b] = [Context::from_waker(&wakers[0]), Context::from_waker(&wakers[1])];
    let (mut take_a, mut take_b) = (pin!(pool.take()), pin!(pool.take()));
    for _ in 0..3 {
        // Polled for other reasons too: that is no second place in the line.
        assert!(take_a.as_mut().poll(&mut a).is_pending() && take_b.as_mut().poll(&mut b).is_pending());
    }
    drop(first);
    assert_eq!((count(0), count(1)), (1, 0));
    assert!(pool.try_take().is_none(), "it is promised");
    assert!(take_b.as_mut().poll(&mut b).is_pending(), "it is promised to another");
    let Poll::Ready(buffer) = take_a.as_mut().poll(&mut a) else { panic!("the buffer is free") };
    drop(buffer);
    assert_eq!((count(0), count(1)), (1, 1));
    let Poll::Ready(buffer) = take_b.as_mut().poll(&mut b) else { panic!("the buffer is free") };
    drop(buffer);
    assert!(pool.try_take().is_some());
}

/// As many buffers as one device can have at once.
fn take_all(pool: &BufferPool, device: u32) -> Vec<BounceBuffer> {
    taker::enter(device);
    std::iter::from_fn(|| pool.try_take()).collect()
}

#[test]
fn every_device_has_a_share_of_each_pool_that_no_other_can_take() {
    let root = BufferPool::new(16).unwrap();
    let owner = Owner::default();
    assert_eq!(take_all(&root, 1).len(), 16, "all are for one that is alone");
    root.share_among(1);
    assert_eq!(take_all(&root, 1).len(), 16);
    root.share_among(3);
    for pool in [&root, root.deeper(), root.of(&owner), root.of(&owner).deeper()] {
        let greedy = take_all(pool, 1);
        assert_eq!(greedy.len(), 12, "a quarter is spare");
        // One for each, and for what is no device's.
        let others: Vec<_> = [2, 3, 0, 1].map(|device| take_all(pool, device)).into();
        assert_eq!(others.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1, 0]);
        drop(greedy);
        assert_eq!(take_all(pool, 2).len(), 9);
    }
    // Nobody's share is nothing, however many there are.
    root.share_among(1000);
    let greedy = take_all(&root, 1);
    assert_eq!((greedy.len(), take_all(&root, 2).len()), (12, 1));
    taker::enter(0);
}

#[test]
fn a_long_line_of_one_device_keeps_no_other_waiting() {
    let pool = BufferPool::new(8).unwrap();
    pool.share_among(2);
    let mut greedy = take_all(&pool, 1);
    assert_eq!(greedy.len(), 6);
    let (wakers, count) = wakers::<4>();
    let mut line: Vec<_> = [1, 1, 2, 2]
        .map(|device| {
            taker::enter(device);
            Box::pin(pool.take())
        })
        .into();
    let mut poll = |at: usize| line[at].as_mut().poll(&mut Context::from_waker(&wakers[at]));
    assert!(poll(0).is_pending() && poll(1).is_pending(), "two are spare, and not for one that has six");
    let Poll::Ready(first) = poll(2) else { panic!("the other's share") };
    assert!(poll(3).is_pending());
    // The other gives its buffer back, and may have it again: before those who have waited for longer.
    drop(first);
    assert_eq!([0, 1, 2, 3].map(&count), [0, 0, 0, 1]);
    let Poll::Ready(second) = poll(3) else { panic!("promised") };
    // Of what is more than spare, whoever has waited longest has one.
    greedy.pop();
    assert_eq!([0, 1].map(&count), [0, 0], "two are free, and spare");
    drop(second);
    assert_eq!([0, 1].map(&count), [1, 0]);
    greedy.pop();
    assert_eq!([0, 1].map(&count), [1, 1]);
    assert!(poll(0).is_ready() && poll(1).is_ready());
    taker::enter(0);
}

#[test]
fn a_taker_that_gives_up_passes_its_turn_on() {
    let pool = BufferPool::new(1).unwrap();
    let first = pool.try_take().unwrap();
    let (wakers, count) = wakers::<3>();
    let mut takes: Vec<_> = (0..3).map(|_| Box::pin(pool.take())).collect();
    for (take, waker) in takes.iter_mut().zip(&wakers) {
        assert!(take.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    }
    // One that was not woken yet, then one that was.
    drop(takes.remove(1));
    drop(first);
    assert_eq!((count(0), count(1), count(2)), (1, 0, 0));
    drop(takes.remove(0));
    assert_eq!((count(0), count(1), count(2)), (1, 0, 1));
    assert!(takes.remove(0).as_mut().poll(&mut Context::from_waker(&wakers[2])).is_ready());
    assert!(pool.try_take().is_some());
}
