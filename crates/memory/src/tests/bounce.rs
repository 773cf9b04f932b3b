//! The buffer pool.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use crate::{BUFFER_SIZE, BufferPool, Owner};

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
