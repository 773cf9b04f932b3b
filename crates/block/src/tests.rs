//! Scratch, geometry, requests and operations under way. Volumes are tested by the conformance suite.

use std::{
    cell::Cell,
    future::Future,
    os::{fd::AsFd, unix::process::ExitStatusExt},
    pin::Pin,
    process::Command,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use millrace_memory::{BufferPool, Mapping, Segment};

use crate::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, IoOperation, Lba, Operation, Request, Scratch, ShardIo, Step,
    TaskContext, check, yield_now,
};

/// Counts how often it is dropped.
struct Dropped<'a>(&'a Cell<u32>, [u64; 4]);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

const ONE: usize = size_of::<Dropped<'static>>();

#[test]
fn a_placed_value_lives_as_long_as_its_box() {
    let drops = Cell::new(0);
    let scratch = Scratch::new(2 * ONE);
    let first = scratch.place(Dropped(&drops, [1; 4]));
    let second = scratch.place(Dropped(&drops, [2; 4]));
    let third = scratch.place(Dropped(&drops, [3; 4]));
    assert_eq!(scratch.overflows(), 1, "the third is on the heap");
    assert_eq!([&first, &second, &third].map(|value| value.1), [[1; 4], [2; 4], [3; 4]]);
    assert_eq!(drops.get(), 0);
    drop(second);
    drop(third);
    assert_eq!(drops.get(), 2);
    assert_eq!(first.1, [1; 4]);
    drop(first);
    assert_eq!(drops.get(), 3);
}

#[test]
#[should_panic(expected = "leaked")]
fn the_room_of_a_leaked_value_is_not_used_again() {
    let mut scratch = Scratch::new(ONE);
    std::mem::forget(scratch.place(1_u64));
    scratch.reset();
}

#[test]
fn room_comes_back_in_whatever_order_values_go() {
    let drops = Cell::new(0);
    let mut scratch = Scratch::new(3 * ONE);
    for _ in 0..1000 {
        let outer = scratch.place(Dropped(&drops, [0; 4]));
        for _ in 0..3 {
            let _inner = scratch.place(Dropped(&drops, [1; 4]));
            let _innermost = scratch.place(Dropped(&drops, [2; 4]));
        }
        drop(outer);
    }
    assert_eq!((scratch.overflows(), drops.get()), (0, 7000));
    // What is dropped under something else comes back with that.
    for _ in 0..1000 {
        let first = scratch.place(Dropped(&drops, [0; 4]));
        let second = scratch.place(Dropped(&drops, [0; 4]));
        drop(first);
        let third = scratch.place(Dropped(&drops, [0; 4]));
        drop(second);
        drop(third);
    }
    let rest = [(); 3].map(|()| scratch.place(Dropped(&drops, [0; 4])));
    assert_eq!(scratch.overflows(), 0);
    let none = scratch.place(Dropped(&drops, [0; 4]));
    assert_eq!(scratch.overflows(), 1);
    drop((rest, none));
    scratch.reset();
    let slice = scratch.place_slice(4, 9_u64);
    let before = scratch.place(Dropped(&drops, [0; 4]));
    drop(before);
    let after = scratch.place(Dropped(&drops, [5; 4]));
    assert_eq!((&*slice, after.1), (&[9; 4][..], [5; 4]), "a slice keeps its room");
}

#[test]
fn slices_and_objects_are_kept_to_the_reset() {
    let mut scratch = Scratch::new(64);
    let object = Rc::new(Cell::new(1));
    for round in 0..3_u32 {
        let kept = scratch.keep(Rc::clone(&object));
        let (small, empty) = (scratch.place_slice(3, round), scratch.place_slice(0, round));
        let (large, copy) = (scratch.place_slice(1000, u64::from(round)), scratch.copy_slice(&[1_u8, 2, 3]));
        small[1] = 77;
        kept.set(kept.get() + 1);
        assert_eq!((&*small, empty.len(), copy), (&[round, 77, round][..], 0, &[1, 2, 3][..]));
        assert!(large.iter().all(|item| *item == u64::from(round)) && scratch.copy_slice::<u8>(&[]).is_empty());
        assert_eq!(Rc::strong_count(&object), 2);
        scratch.reset();
        assert_eq!(Rc::strong_count(&object), 1);
    }
    assert_eq!((object.get(), scratch.overflows()), (4, 3), "one slice a round went to the heap");
}

#[test]
fn values_that_want_more_than_words_go_to_the_heap() {
    #[repr(align(64))]
    struct Wide(u8);
    let scratch = Scratch::new(1024);
    let wide = scratch.place(Wide(3));
    assert!((&raw const *wide).addr().is_multiple_of(64));
    assert_eq!((wide.0, scratch.overflows()), (3, 1));
}

#[test]
fn placed_futures_run_and_yield() {
    let scratch = Scratch::new(256);
    let mut future = scratch.place_future(async {
        yield_now().await;
        yield_now().await;
        7
    });
    let mut cx = Context::from_waker(Waker::noop());
    let polls: Vec<_> = (0..3).map(|_| Pin::new(&mut future).poll(&mut cx)).collect();
    assert_eq!(polls, [Poll::Pending, Poll::Pending, Poll::Ready(7)]);
    let mut step = Step::Done(Err(BlockError::NotReady));
    assert_eq!(Pin::new(&mut step).poll(&mut cx), Poll::Ready(Err(BlockError::NotReady)));
}

fn geometry(block_size: BlockSize, blocks: u64) -> Geometry {
    Geometry { block_size, blocks: BlockCount(blocks), read_only: false, volatile_cache: false, deallocate: true }
}

#[test]
fn ranges_are_checked_without_overflow() {
    for (block_size, shift) in [(BlockSize::B512, 9), (BlockSize::B4096, 12)] {
        assert_eq!(BlockSize::from_bytes(block_size.bytes()), Some(block_size));
        for blocks in [0, 1, 1000, i64::MAX as u64 >> shift] {
            let geometry = geometry(block_size, blocks);
            assert_eq!(geometry.bytes(), blocks << shift);
            let edges = [0, 1, blocks / 2, blocks.wrapping_sub(1), blocks, blocks + 1, u64::MAX - 1, u64::MAX];
            for lba in edges {
                for count in edges {
                    let inside = u128::from(lba) + u128::from(count) <= u128::from(blocks);
                    let expected = inside.then(|| (ByteOffset(lba << shift), count << shift));
                    assert_eq!(geometry.byte_range(Lba(lba), BlockCount(count)), expected, "{lba}+{count} of {blocks}");
                }
            }
        }
    }
    for bytes in [0, 1, 511, 513, 1024, 4095, 8192, u32::MAX] {
        assert_eq!(BlockSize::from_bytes(bytes), None);
    }
}

#[test]
fn bytes_that_are_whole_blocks_are_told_as_blocks() {
    for (block_size, size) in [(BlockSize::B512, 512), (BlockSize::B4096, 4096)] {
        let geometry = geometry(block_size, 8);
        for (first, count) in [(0, 0), (0, 1), (7, 2), (u64::MAX / size, 1)] {
            let found = geometry.whole_blocks(ByteOffset(first * size), count * size);
            assert_eq!(found, Some((Lba(first), BlockCount(count))), "beyond the end as well");
        }
        for (offset, bytes) in [(1, size), (size, size - 1), (size / 2, size / 2), (0, 1), (u64::MAX, u64::MAX)] {
            assert_eq!(geometry.whole_blocks(ByteOffset(offset), bytes), None);
        }
    }
}

fn memory(len: usize) -> Segment {
    let mapping = std::mem::ManuallyDrop::new(Mapping::anonymous(len).unwrap());
    // SAFETY: the mapping is writable and never unmapped.
    unsafe { mapping.segment(0, len) }.unwrap()
}

#[test]
fn a_request_is_checked_against_the_geometry() {
    let mut geometry = geometry(BlockSize::B512, 100);
    let segments = [memory(1024)];
    let read = Request { operation: Operation::Read, lba: Lba(98), count: BlockCount(2), segments: &segments };
    assert_eq!(check(&geometry, &read), Ok((ByteOffset(98 * 512), 1024)));
    assert_eq!(check(&geometry, &Request { lba: Lba(99), ..read }), Err(BlockError::OutOfRange));
    let copy = |source| Request { operation: Operation::Copy { source: Lba(source) }, segments: &[], ..read };
    assert_eq!(check(&geometry, &copy(98)), Ok((ByteOffset(98 * 512), 1024)));
    assert_eq!(check(&geometry, &copy(99)), Err(BlockError::OutOfRange));
    let flush = Request { operation: Operation::Flush, lba: Lba(u64::MAX), count: BlockCount(9), segments: &[] };
    assert_eq!(check(&geometry, &flush), Ok((ByteOffset(0), 0)));
    geometry.read_only = true;
    assert!(check(&geometry, &read).is_ok() && check(&geometry, &flush).is_ok());
    assert_eq!(check(&geometry, &copy(0)), Err(BlockError::ReadOnly));
    let wrong = Request { count: BlockCount(1), ..read };
    assert!(std::panic::catch_unwind(|| check(&geometry, &wrong)).is_err(), "segments that do not match the range");
}

#[test]
fn errors_of_the_system_are_told_apart() {
    let read = [
        (libc::EFAULT, BlockError::Memory),
        (libc::EIO, BlockError::ReadFault { errno: libc::EIO }),
        (libc::ENOSPC, BlockError::ReadFault { errno: libc::ENOSPC }),
    ];
    for (errno, error) in read {
        assert_eq!(BlockError::from_read_errno(errno), error);
    }
    let write = [
        (libc::EFAULT, BlockError::Memory),
        (libc::EIO, BlockError::WriteFault { errno: libc::EIO }),
        (libc::ENOSPC, BlockError::NoSpace),
        (libc::EDQUOT, BlockError::NoSpace),
        (libc::EFBIG, BlockError::NoSpace),
        (libc::EROFS, BlockError::ReadOnly),
        (libc::EPERM, BlockError::ReadOnly),
        (libc::EOPNOTSUPP, BlockError::Unsupported),
    ];
    for (errno, error) in write {
        assert_eq!(BlockError::from_write_errno(errno), error);
    }
}

/// I/O that is full at first, then takes one operation and completes it at the second look.
#[derive(Default)]
struct Slow {
    looks: Cell<u32>,
    started: Cell<bool>,
}

// SAFETY: the operation is never carried out, and its completion is reported once.
unsafe impl ShardIo for Slow {
    unsafe fn poll_start(&self, _: &IoOperation<'_>, _: &mut Context<'_>) -> Poll<u32> {
        self.looks.set(self.looks.get() + 1);
        if self.looks.get() < 3 {
            return Poll::Pending;
        }
        assert!(!self.started.replace(true), "an operation starts once");
        Poll::Ready(5)
    }

    fn poll_completion(&self, token: u32, _: &mut Context<'_>) -> Poll<i32> {
        assert_eq!(token, 5);
        self.looks.set(self.looks.get() + 1);
        if self.looks.get() < 5 { Poll::Pending } else { Poll::Ready(-libc::EIO) }
    }
}

#[test]
fn an_operation_waits_for_room_and_for_its_end() {
    let (scratch, buffers, io) = (Scratch::new(0), BufferPool::new(1).unwrap(), Slow::default());
    let file = std::io::stdin();
    let mut future = TaskContext::new(&scratch, &buffers, &io).io(IoOperation::DataSync { fd: file.as_fd() });
    let mut cx = Context::from_waker(Waker::noop());
    let polls: Vec<_> = (0..4).map(|_| Pin::new(&mut future).poll(&mut cx)).collect();
    assert_eq!(polls, [Poll::Pending, Poll::Pending, Poll::Pending, Poll::Ready(-libc::EIO)]);
    assert!(io.started.get());
}

const CHILD: &str = "MILLRACE_TEST_DROPPED_IO";

#[test]
fn an_operation_dropped_in_flight_ends_the_process() {
    let run = |mode| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::dropped_io_child"]).env(CHILD, mode);
        command.output().unwrap().status
    };
    assert!(run("before its start").success());
    assert_eq!(run("in flight").signal(), Some(libc::SIGABRT));
}

/// Not a test by itself: a process for the one above.
#[test]
fn dropped_io_child() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    let (scratch, buffers, io) = (Scratch::new(0), BufferPool::new(1).unwrap(), Slow::default());
    let file = std::io::stdin();
    let mut future = TaskContext::new(&scratch, &buffers, &io).io(IoOperation::DataSync { fd: file.as_fd() });
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..if mode == "in flight" { 3 } else { 2 } {
        assert!(Pin::new(&mut future).poll(&mut cx).is_pending());
    }
    drop(future);
}

#[test]
fn carved_arenas_keep_apart_what_goes_on_side_by_side() {
    let each = 4 * size_of::<Dropped<'static>>();
    let mut scratch = Scratch::new(2 * (each + size_of::<Scratch>() + 8));
    let drops = Cell::new(0);
    for _ in 0..3 {
        let [one, two] = [(); 2].map(|()| scratch.carve(each));
        // Interleaved, many times: in one arena their room would not come back.
        for _ in 0..100 {
            let a = one.place(Dropped(&drops, [1; 4]));
            let b = two.place(Dropped(&drops, [2; 4]));
            let c = one.place(Dropped(&drops, [3; 4]));
            drop(b);
            assert_eq!((a.1, c.1), ([1; 4], [3; 4]));
            drop(c);
            drop(a);
        }
        drop(two);
        drop(one);
    }
    assert_eq!((drops.get(), scratch.overflows()), (900, 0));
    let carved = scratch.carve(each);
    let places: Vec<_> = (0..5).map(|_| carved.place(Dropped(&drops, [0; 4]))).collect();
    assert_eq!((carved.overflows(), scratch.overflows()), (1, 1), "what finds no room is counted above as well");
    drop(places);
    drop(carved);
    drop(scratch.carve(1 << 20));
    assert_eq!(scratch.overflows(), 2);
    scratch.reset();
}

#[test]
fn lists_live_as_long_as_their_box() {
    let drops = Cell::new(0);
    let scratch = Scratch::new(3 * ONE);
    for round in 0..4_u64 {
        let mut list = scratch.place_list(3, |at| Dropped(&drops, [round + at as u64; 4]));
        list.as_pin_mut().get_mut()[1].1[0] = 99;
        assert_eq!((list[0].1[0], list[1].1[0], list[2].1[0]), (round, 99, round + 2));
    }
    assert_eq!((drops.get(), scratch.overflows()), (12, 0));
    let long = scratch.place_list(4, |_| Dropped(&drops, [7; 4]));
    assert_eq!((long.len(), scratch.overflows()), (4, 1));
    drop(long);
    assert_eq!((drops.get(), scratch.place_list(0, |_| 1_u8).len()), (16, 0));
}
