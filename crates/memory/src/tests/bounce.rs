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

use crate::{BUFFER_SIZE, BufferPool};

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
fn those_who_wait_are_woken_and_served() {
    let pool = BufferPool::new(1).unwrap();
    let first = pool.try_take().unwrap();
    let woken = [Arc::new(Woken::default()), Arc::new(Woken::default())];
    let wakers = woken.each_ref().map(|woken| Waker::from(Arc::clone(woken)));
    let [mut a, mut b] = [Context::from_waker(&wakers[0]), Context::from_waker(&wakers[1])];
    let (mut take_a, mut take_b) = (pin!(pool.take()), pin!(pool.take()));
    assert!(take_a.as_mut().poll(&mut a).is_pending() && take_b.as_mut().poll(&mut b).is_pending());
    drop(first);
    let count = |i: usize| woken[i].0.load(Ordering::Relaxed);
    assert!(count(0) + count(1) > 0, "a buffer that came back wakes somebody");
    // Whoever is polled first gets it; the other is woken when it comes back.
    let Poll::Ready(buffer) = take_b.as_mut().poll(&mut b) else { panic!("the buffer is free") };
    assert!(take_a.as_mut().poll(&mut a).is_pending());
    let before = count(0);
    drop(buffer);
    assert!(count(0) > before);
    assert!(take_a.as_mut().poll(&mut a).is_ready());
}
