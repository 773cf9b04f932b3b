use std::{
    convert::Infallible,
    pin::Pin,
    sync::atomic::{AtomicBool, AtomicU64},
    task::{Context, Poll, Waker},
};

use millrace_memory::{BufferPool, Mapping};

use super::*;
use crate::{Lba, Operation, Scratch, ShardIo, ShardSlot, yield_now};

/// A volume that says when it is gone.
struct Root {
    blocks: u64,
    /// Requests wait this many polls.
    waits: u32,
    gone: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

impl Root {
    fn make(blocks: u64, waits: u32) -> (Arc<Self>, Arc<AtomicBool>, Arc<AtomicU64>) {
        let (gone, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        (Arc::new(Self { blocks, waits, gone: Arc::clone(&gone), done: Arc::clone(&done) }), gone, done)
    }

    async fn run(&self, _: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        for _ in 0..self.waits {
            yield_now().await;
        }
        self.finish()
    }

    #[expect(clippy::unnecessary_wraps)]
    fn finish(&self) -> Result<(), BlockError> {
        assert!(!self.gone.load(Ordering::SeqCst), "a request runs in a volume that is gone");
        self.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

impl Volume for Root {
    fn name(&self) -> &'static str {
        "root"
    }

    fn geometry(&self) -> Geometry {
        assert!(!self.gone.load(Ordering::SeqCst), "a look at a volume that is gone");
        let (block_size, blocks) = (BlockSize::B512, BlockCount(self.blocks));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: false }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match self.waits {
            0 => Step::Done(self.finish()),
            _ => Step::Wait(cx.scratch.place_future(self.run(cx, request))),
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let done = requests.iter().take_while(|request| self.waits == 0 && request.lba.0 < self.blocks);
        done.filter(|_| self.finish().is_ok()).count()
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::run)
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Ok(())
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Sleeps that end at the second look.
struct Naps(AtomicU64);

// SAFETY: no operation uses memory, and each is reported once.
unsafe impl ShardIo for Naps {
    unsafe fn poll_start(&self, operation: &IoOperation<'_>, _: &mut Context<'_>) -> Poll<u32> {
        assert!(matches!(operation, IoOperation::Sleep(_)));
        Poll::Ready(0)
    }

    fn poll_completion(&self, _: u32, cx: &mut Context<'_>) -> Poll<i32> {
        cx.waker().wake_by_ref();
        if self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) { Poll::Pending } else { Poll::Ready(0) }
    }
}

const FLUSH: Request<'static> = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };

#[expect(clippy::unnecessary_wraps)]
fn never() -> Result<(), Infallible> {
    Ok(())
}

#[test]
fn one_is_done_at_once_where_nothing_special_is_on() {
    let (root, _, done) = Root::make(4, 0);
    let switch = Switch::new("v", root);
    let mapping = Mapping::anonymous(4096).unwrap();
    // SAFETY: it is used while the mapping is there.
    let data = unsafe { mapping.segment(0, 512) }.unwrap();
    let one = |at: u64| switch.do_one(Transfer::Read, ByteOffset(at), data);
    assert!(one(512) && !one(4 * 512) && !one(100), "of the volume, behind its end, half a block");
    switch.trace(3);
    assert!(!one(0), "it is recorded as a request of its own");
    switch.trace(0);
    switch.close();
    assert!(!one(0));
    switch.open();
    switch.note_loss();
    assert!(one(0), "a flush tells of that");
    assert_eq!((done.load(Ordering::Relaxed), switch.in_flight()), (2, 0));
}

#[test]
fn requests_in_flight_are_waited_for_and_new_ones_wait() {
    let (old, old_gone, old_done) = Root::make(1, 5);
    let (new, _, new_done) = Root::make(2, 1);
    let new: Arc<dyn Volume> = new;
    let switch = Switch::new("v", old);
    let (scratches, buffers, io) =
        ([(); 2].map(|()| Scratch::new(switch.scratch_bytes())), BufferPool::new(1).unwrap(), Naps(AtomicU64::new(0)));
    let mut first = switch.submit(TaskContext::new(&scratches[0], &buffers, &io), FLUSH);
    let busy = switch.change(&new, Duration::ZERO, never);
    assert!(matches!(busy, Err(ChangeError::Busy { in_flight: 1, .. })), "{busy:?}");
    assert!(!old_gone.load(Ordering::SeqCst) && switch.geometry().blocks.0 == 1);
    let mut cx = Context::from_waker(Waker::noop());
    std::thread::scope(|scope| {
        let change = scope.spawn(|| switch.change(&new, Duration::from_secs(60), never));
        while !switch.visit().inner.is_paused() {
            std::thread::sleep(Duration::from_micros(20));
        }
        let mut second = switch.submit(TaskContext::new(&scratches[1], &buffers, &io), FLUSH);
        for _ in 0..20 {
            assert!(Pin::new(&mut second).poll(&mut cx).is_pending(), "a pause is a pause");
        }
        while Pin::new(&mut first).poll(&mut cx).is_pending() {}
        drop(first);
        while Pin::new(&mut second).poll(&mut cx).is_pending() {
            std::thread::sleep(Duration::from_micros(20));
        }
        assert!(change.join().unwrap().is_ok());
    });
    assert!(old_gone.load(Ordering::SeqCst) && switch.geometry().blocks.0 == 2);
    assert_eq!((old_done.load(Ordering::Relaxed), new_done.load(Ordering::Relaxed), switch.in_flight()), (1, 1, 0));
    assert_eq!(scratches.each_ref().map(Scratch::overflows), [0, 0]);
}

#[test]
fn what_fails_in_between_leaves_the_old_one() {
    let (old, gone, _) = Root::make(1, 0);
    let (new, new_gone, _) = Root::make(2, 0);
    let switch = Switch::new("v", old);
    let new: Arc<dyn Volume> = new;
    let failed = switch.change(&new, Duration::from_secs(60), || Err("no"));
    assert!(matches!(failed, Err(ChangeError::Refused("no"))), "{failed:?}");
    drop(new);
    assert!(!gone.load(Ordering::SeqCst) && new_gone.load(Ordering::SeqCst) && switch.geometry().blocks.0 == 1);
    drop(switch);
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn a_loss_is_told_once_whatever_is_in_force() {
    let (old, ..) = Root::make(1, 0);
    let (new, ..) = Root::make(2, 0);
    let new: Arc<dyn Volume> = new;
    let switch = Switch::new("v", old);
    let (scratch, buffers, io) =
        (Scratch::new(switch.scratch_bytes()), BufferPool::new(1).unwrap(), Naps(AtomicU64::new(0)));
    let submit = |operation| match switch.submit(TaskContext::new(&scratch, &buffers, &io), Request { operation, ..FLUSH }) {
        Step::Done(done) => done,
        Step::Wait(_) => panic!("nothing waits here"),
    };
    let is_told_once = || {
        assert!(switch.is_untold());
        assert_eq!(submit(Operation::Read), Ok(()));
        assert_eq!(submit(Operation::Flush), Err(BlockError::WriteFault { errno: 0 }));
        assert!(!switch.is_untold());
        assert_eq!(submit(Operation::Flush), Ok(()));
    };
    switch.note_loss();
    is_told_once();
    // By a change that failed, and before one that did not.
    let failed = switch.change(&new, Duration::from_secs(60), || {
        switch.note_loss();
        Err("no")
    });
    assert!(matches!(failed, Err(ChangeError::Refused("no"))), "{failed:?}");
    switch.trace(7);
    switch.trace(0);
    switch.change(&new, Duration::from_secs(60), never).unwrap();
    is_told_once();
    let noted = switch.change(&new, Duration::from_secs(60), || {
        switch.note_loss();
        never()
    });
    noted.unwrap();
    is_told_once();
}

#[test]
fn many_threads_and_many_changes() {
    let (first, ..) = Root::make(1, 0);
    let switch = Switch::new("v", first);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..4_u32 {
            let (switch, stop) = (&switch, &stop);
            scope.spawn(move || {
                // Some as shards, some as others.
                let _slot = (number % 2 == 0).then(ShardSlot::claim);
                let (buffers, io) = (BufferPool::new(1).unwrap(), Naps(AtomicU64::new(0)));
                let mut cx = Context::from_waker(Waker::noop());
                while !stop.load(Ordering::Relaxed) {
                    let scratch = Scratch::new(512);
                    let mut step = switch.submit(TaskContext::new(&scratch, &buffers, &io), FLUSH);
                    while Pin::new(&mut step).poll(&mut cx).is_pending() {}
                    assert!(switch.geometry().blocks.0 > 0);
                }
            });
        }
        for number in 0..300_u32 {
            let (root, ..) = Root::make(1 + u64::from(number), number % 3);
            let root: Arc<dyn Volume> = root;
            switch.change(&root, Duration::from_secs(60), never).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!((switch.geometry().blocks.0, switch.in_flight()), (300, 0));
}
