use std::{
    cell::{Cell, RefCell},
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::{ByteOffset, IoOperation, TaskContext};
use millrace_memory::{Mapping, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Gadget, config, shard, turn_until, waits};
use crate::{Launch, MAX_SEGMENTS, Outcome, Shard, ShardConfig, ShardContext};

/// Starts a task that keeps `T` and gives its result to a cell.
fn launch<F>(shard: &mut Shard, work: F) -> Rc<Cell<Option<i32>>>
where
    F: AsyncFnOnce(TaskContext<'_>) -> i32 + 'static,
{
    let result = Rc::new(Cell::new(None));
    let report = Rc::clone(&result);
    let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(async move {
            let value = work(tcx).await;
            report.set(Some(value));
        }))
    });
    waits(outcome);
    result
}

fn memory(pages: usize) -> (Rc<Mapping>, Segment) {
    let mapping = Rc::new(Mapping::anonymous(pages * 4096).unwrap());
    // SAFETY: the tests keep the mapping until their tasks have ended.
    let segment = unsafe { mapping.segment(0, pages * 4096) }.unwrap();
    (mapping, segment)
}

#[test]
fn a_file_is_written_synced_and_read_through_the_ring() {
    let mut shard = shard();
    let file = Rc::new(tempfile::tempfile().unwrap());
    let (mapping, all) = memory(4);
    let own = Rc::clone(&file);
    let written = launch(&mut shard, async move |tcx| {
        let fd = own.as_fd();
        let parts = [all.part(0, 1000).unwrap(), all.part(1000, 3096).unwrap()];
        parts[0].fill(1);
        parts[1].fill(2);
        let offset = ByteOffset(512);
        let wrote = tcx.io(IoOperation::Allocate { fd, mode: 0, offset: ByteOffset(0), len: 8192 }).await;
        assert_eq!(wrote, 0);
        let list = tcx.scratch.place_slice(2, parts[0]);
        list[1] = parts[1];
        let wrote = tcx.io(IoOperation::Write { fd, offset, segments: list, fua: true }).await;
        assert_eq!(tcx.io(IoOperation::DataSync { fd }).await, 0);
        wrote
    });
    turn_until(&mut shard, || written.get().is_some());
    assert_eq!(written.get(), Some(4096));
    assert_eq!(file.metadata().unwrap().len(), 8192);
    let read = launch(&mut shard, async move |tcx| {
        let target = all.part(8192, 4096).unwrap();
        tcx.io(IoOperation::Read { fd: file.as_fd(), offset: ByteOffset(512), segments: &[target] }).await
    });
    turn_until(&mut shard, || read.get().is_some());
    assert_eq!(read.get(), Some(4096));
    let mut bytes = vec![0; 4096];
    all.read_at(8192, &mut bytes);
    assert!(bytes[..1000].iter().all(|b| *b == 1) && bytes[1000..].iter().all(|b| *b == 2));
    drop(mapping);
}

#[test]
fn errors_come_back_as_the_system_gave_them() {
    let mut shard = shard();
    let (mapping, all) = memory(1);
    let only_read = std::fs::File::open("/dev/zero").unwrap();
    let result = launch(&mut shard, async move |tcx| {
        tcx.io(IoOperation::Write { fd: only_read.as_fd(), offset: ByteOffset(0), segments: &[all], fua: false }).await
    });
    turn_until(&mut shard, || result.get().is_some());
    assert_eq!(result.get(), Some(-libc::EBADF));
    drop(mapping);
}

#[test]
fn more_operations_than_the_ring_has_entries_wait_their_turn() {
    let mut shard = Shard::new(&ShardConfig { ring_entries: 4, ..config() }).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (reader, mut writer) = (Rc::new(reader), std::fs::File::from(writer));
    let (mapping, all) = memory(1);
    let order: Rc<RefCell<Vec<usize>>> = Rc::default();
    for i in 0..50 {
        let (order, reader) = (Rc::clone(&order), Rc::clone(&reader));
        let target = all.part(i, 1).unwrap();
        launch(&mut shard, async move |tcx| {
            // The offset of a pipe is "the present position".
            let (fd, segments) = (reader.as_fd(), [target]);
            let result = tcx.io(IoOperation::Read { fd, offset: ByteOffset(u64::MAX), segments: &segments }).await;
            order.borrow_mut().push(i);
            result
        });
    }
    for _ in 0..20 {
        shard.turn();
    }
    assert_eq!(shard.core_for_tests().ring.in_flight(), 4, "full, and not more than full");
    assert_eq!(shard.context().waiting_tasks(), 50);
    for i in 1..=50 {
        writer.write_all(&[7]).unwrap();
        turn_until(&mut shard, || order.borrow().len() == i);
    }
    assert_eq!(shard.core_for_tests().ring.in_flight(), 0);
    // A freed entry goes to whoever waited longest; the kernel serves the first four, which were in the ring together, as it likes.
    let waited: Vec<_> = order.borrow().iter().copied().filter(|i| *i >= 4).collect();
    assert!(waited.is_sorted(), "{waited:?}");
    let mut bytes = [0; 50];
    all.read_at(0, &mut bytes);
    assert_eq!(bytes, [7; 50]);
    drop(mapping);
}

/// Also when nobody waits for the operation any more, which nothing forbids.
#[test]
fn a_list_of_segments_is_no_longer_used_when_its_operation_has_started() {
    let mut shard = Shard::new(&ShardConfig { ring_entries: 4, ..config() }).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (reader, mut writer) = (Rc::new(reader), std::fs::File::from(writer));
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"abcdef").unwrap();
    let (mapping, all) = memory(1);
    for at in 0..4 {
        let reader = Rc::clone(&reader);
        launch(&mut shard, async move |tcx| {
            let (fd, segments) = (reader.as_fd(), [all.part(at, 1).unwrap()]);
            tcx.io(IoOperation::Read { fd, offset: ByteOffset(u64::MAX), segments: &segments }).await
        });
    }
    for _ in 0..20 {
        shard.turn();
    }
    assert_eq!(shard.core_for_tests().ring.in_flight(), 4, "what comes now must wait for an entry");
    let file = Rc::new(file);
    let own = Rc::clone(&file);
    let forgotten = launch(&mut shard, async move |tcx| {
        let place = |at| all.part(at, 3).unwrap();
        let list = tcx.scratch.place_slice(2, place(100));
        list[1] = place(200);
        let mut read = Box::pin(tcx.io(IoOperation::Read { fd: own.as_fd(), offset: ByteOffset(0), segments: list }));
        let started = std::future::poll_fn(|cx| std::task::Poll::Ready(read.as_mut().poll(cx).is_pending())).await;
        std::mem::forget(read);
        (list[0], list[1]) = (place(300), place(400));
        std::hint::black_box(&list);
        i32::from(started)
    });
    turn_until(&mut shard, || forgotten.get().is_some());
    assert_eq!(forgotten.get(), Some(1));
    writer.write_all(&[7; 4]).unwrap();
    while shard.core_for_tests().ring.in_flight() > 0 {
        shard.turn();
    }
    let bytes = |at| {
        let mut bytes = [0; 3];
        all.read_at(at, &mut bytes);
        bytes
    };
    assert_eq!([100, 200, 300, 400].map(bytes), [*b"abc", *b"def", [0; 3], [0; 3]]);
    drop(mapping);
}

/// A device that always has more requests than the ring has entries, and comes before tasks in each turn.
#[test]
fn who_waits_for_an_entry_gets_one_before_newcomers() {
    let mut shard = Shard::new(&ShardConfig { ring_entries: 4, tasks: 8, ..config() }).unwrap();
    let zero = Rc::new(std::fs::File::open("/dev/zero").unwrap());
    let (mapping, all) = memory(1);
    let (started, ended): (Rc<Cell<usize>>, Rc<RefCell<Vec<usize>>>) = <_>::default();
    let log = Rc::clone(&ended);
    let flood = move |cx: &mut ShardContext<'_>| {
        let mut count = 0;
        while let Some(slot) = cx.reserve() {
            let (number, log, zero) = (started.replace(started.get() + 1), Rc::clone(&log), Rc::clone(&zero));
            let outcome: Outcome<'_, ()> = slot.run(|tcx| {
                Launch::Wait(tcx.scratch.place_future(async move {
                    let segments = [all];
                    let read = IoOperation::Read { fd: zero.as_fd(), offset: ByteOffset(0), segments: &segments };
                    assert_eq!(tcx.io(read).await, 4096);
                    log.borrow_mut().push(number);
                }))
            });
            waits(outcome);
            count += 1;
        }
        count
    };
    let key = shard.add_device(Box::new(Gadget { poll: Box::new(flood), ..Gadget::default() }));
    for _ in 0..20 {
        shard.turn();
        assert!(shard.core_for_tests().ring.in_flight() <= 4);
    }
    let first: Vec<usize> = ended.borrow().iter().copied().filter(|number| *number < 8).collect();
    assert_eq!(first.len(), 8, "of the first eight these have ended: {first:?}");
    assert!(ended.borrow().len() >= 40, "{} have ended", ended.borrow().len());
    shard.remove_device(key);
    while shard.context().waiting_tasks() > 0 || shard.core_for_tests().slots.waiting() > 0 {
        shard.turn();
    }
    assert_eq!(shard.core_for_tests().ring.in_flight(), 0);
    drop(mapping);
}

#[test]
fn one_task_may_have_several_operations_in_flight() {
    let mut shard = shard();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut writer = std::fs::File::from(writer);
    let (mapping, all) = memory(1);
    let result = launch(&mut shard, async move |tcx| {
        let (one, two) = ([all.part(0, 3).unwrap()], [all.part(3, 3).unwrap()]);
        let fd = reader.as_fd();
        let read = |segments| tcx.io(IoOperation::Read { fd, offset: ByteOffset(u64::MAX), segments });
        let mut both = [(std::pin::pin!(read(&one)), None), (std::pin::pin!(read(&two)), None)];
        std::future::poll_fn(|cx| {
            for (leg, result) in &mut both {
                if result.is_none()
                    && let std::task::Poll::Ready(value) = leg.as_mut().poll(cx)
                {
                    *result = Some(value);
                }
            }
            let sum = both.iter().map(|(_, result)| *result).sum::<Option<i32>>();
            sum.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    });
    for _ in 0..10 {
        shard.turn();
    }
    assert_eq!(shard.core_for_tests().ring.in_flight(), 2);
    writer.write_all(b"abc").unwrap();
    turn_until(&mut shard, || true);
    writer.write_all(b"def").unwrap();
    turn_until(&mut shard, || result.get().is_some());
    assert_eq!(result.get(), Some(6));
    drop(mapping);
}

#[test]
fn too_many_segments_fault_the_task_only() {
    let mut shard = shard();
    let file = Rc::new(tempfile::tempfile().unwrap());
    let (mapping, all) = memory(1);
    let byte = all.part(0, 1).unwrap();
    for (count, result) in [(MAX_SEGMENTS, i32::try_from(MAX_SEGMENTS).ok()), (MAX_SEGMENTS + 1, None)] {
        let file = Rc::clone(&file);
        let written = launch(&mut shard, async move |tcx| {
            let list = vec![byte; count];
            tcx.io(IoOperation::Write { fd: file.as_fd(), offset: ByteOffset(0), segments: &list, fua: false }).await
        });
        while shard.context().waiting_tasks() > 0 {
            shard.turn();
        }
        assert_eq!(written.get(), result);
        assert_eq!(shard.core_for_tests().ring.in_flight(), 0, "no entry is lost");
    }
    drop(mapping);
}

#[test]
fn a_stopping_shard_waits_for_the_kernel() {
    let mut shard = shard();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (mapping, all) = memory(1);
    let result = launch(&mut shard, async move |tcx| {
        tcx.io(IoOperation::Read { fd: reader.as_fd(), offset: ByteOffset(u64::MAX), segments: &[all] }).await
    });
    shard.turn();
    let helper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::File::from(writer).write_all(b"late").unwrap();
    });
    drop(shard);
    assert_eq!(result.get(), Some(4));
    helper.join().unwrap();
    drop(mapping);
}

#[test]
fn the_ring_does_only_what_it_was_made_for() {
    let mut uring = crate::ring::build(4, None, true, None).unwrap();
    let nop = io_uring::opcode::Nop::new().build();
    // SAFETY: a no-op touches no memory.
    unsafe { uring.submission().push(&nop) }.unwrap();
    uring.submit_and_wait(1).unwrap();
    let entry = uring.completion().next().unwrap();
    assert_eq!(entry.result(), -libc::EACCES);
}

/// Who waits for the end of a process's last requests hears of it by that.
#[test]
fn a_rings_witness_goes_with_the_ring_and_not_before() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    // The ring is all that has the other end when the settings are gone.
    let mut shard = Shard::new(&ShardConfig { witness: Some(Arc::new(writer.into())), ..config() }).unwrap();
    shard.turn();
    let nothing = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&Timespec::default())).unwrap();
    assert_eq!(nothing, 0, "it has not hung up");
    drop(shard);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0, "it has");
}

/// Where they were fewer, those of one slow disk could be all of them.
#[test]
fn the_kernel_has_a_thread_for_each_operation_that_must_wait() {
    for turns in [true, false] {
        let ring = crate::ring::prepare(512, turns).unwrap();
        let mut workers = [0; 2];
        // It says how many there were allowed, and changes nothing.
        ring.submitter().register_iowq_max_workers(&mut workers).unwrap();
        assert_eq!(workers[0], 512);
    }
}

#[test]
fn descriptors_wake_their_device_and_only_while_registered() {
    let mut shard = shard();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let events: Rc<RefCell<Vec<u32>>> = Rc::default();
    let log = Rc::clone(&events);
    let fd: OwnedFd = ours.into();
    let gadget = Gadget { event: Box::new(move |_, token| log.borrow_mut().push(token)), ..Gadget::default() };
    let added = shard.add_device_with(|cx| {
        cx.register(fd.as_fd(), 1)?;
        cx.register(fd.as_fd(), 5)?;
        std::io::Result::Ok(Box::new(gadget))
    });
    let key = added.unwrap();
    shard.turn();
    assert!(events.borrow().is_empty());
    (&theirs).write_all(b"x").unwrap();
    shard.turn();
    events.borrow_mut().sort_unstable();
    assert_eq!(*events.borrow(), [1, 5]);
    shard.with_device(key, |_: &mut Gadget, cx| cx.unregister(5).unwrap()).unwrap();
    shard.turn();
    assert_eq!(*events.borrow(), [1, 5, 1], "level-triggered, and 5 is gone");
    // A token that is registered again changes its descriptor.
    let (other, _other_peer) = std::os::unix::net::UnixStream::pair().unwrap();
    shard.with_device(key, |_: &mut Gadget, cx| cx.register(other.as_fd(), 1).unwrap()).unwrap();
    shard.turn();
    assert_eq!(events.borrow().len(), 3);
    shard.with_device(key, |_: &mut Gadget, cx| cx.register(fd.as_fd(), 1).unwrap()).unwrap();
    assert!(shard.remove_device(key).is_some());
    shard.turn();
    assert_eq!(events.borrow().len(), 3);
    // Nothing of ours keeps the socket open: its peer sees the end.
    drop(fd);
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut &theirs, &mut rest).unwrap_or_default();
    assert!(rest.is_empty());
}

/// A list of system calls does not see what is done through a ring.
#[test]
fn a_ring_does_what_disks_need_and_nothing_else() {
    use io_uring::{opcode, types::Fd};
    let mut ring = crate::ring::build(8, None, true, None).unwrap();
    let mut run = |entry: io_uring::squeue::Entry| {
        // SAFETY: what the entries point to is constant, or null.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    };
    let byte = std::fs::File::open("/dev/zero").unwrap();
    let mut place = [7_u8];
    let read = opcode::Read::new(Fd(std::os::fd::AsRawFd::as_raw_fd(&byte)), place.as_mut_ptr(), 1).build();
    assert_eq!(run(read), 1);
    assert_eq!(place, [0]);
    let others = [
        opcode::Nop::new().build(),
        opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/etc/passwd".as_ptr()).build(),
        opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
        opcode::Connect::new(Fd(0), std::ptr::null(), 0).build(),
        opcode::UnlinkAt::new(Fd(libc::AT_FDCWD), c"/nonexistent".as_ptr()).build(),
        opcode::SendMsg::new(Fd(0), std::ptr::null()).build(),
    ];
    for other in others {
        let shown = format!("{other:?}");
        assert_eq!(run(other), -libc::EACCES, "{shown}");
    }
    let refused = ring.submitter().register_files(&[0]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
}

/// The kernel may tell of a request's end before it is done with the file. A thread that has nothing more to do by then must not keep it.
fn files_are_free_when_their_requests_have_ended(mut shard: Shard, mut between: impl FnMut(&mut Shard)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [1; 4096]).unwrap();
    let (mapping, all) = memory(1);
    for round in 0..3000 {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while file.try_lock().is_err() {
            assert!(Instant::now() < deadline, "the file is still locked by round {}", round - 1);
            std::thread::sleep(Duration::from_micros(50));
            between(&mut shard);
        }
        let file = Rc::new(file);
        let own = Rc::clone(&file);
        // Flushes go by way of the kernel's threads.
        let result = launch(&mut shard, async move |tcx| {
            let fd = own.as_fd();
            let write = IoOperation::Write { fd, offset: ByteOffset(0), segments: &[all], fua: false };
            tcx.io(write).await.min(tcx.io(IoOperation::DataSync { fd }).await)
        });
        // Not a moment later: the kernel is not to be done with the file first.
        while result.get().is_none() {
            shard.turn();
        }
        assert_eq!(result.get(), Some(0));
    }
    drop(mapping);
}

#[test]
fn a_thread_without_a_loop_leaves_no_file_with_the_kernel() {
    let shard = Shard::new(&ShardConfig { ring_entries: 16, ..ShardConfig::of_thread() }).unwrap();
    files_are_free_when_their_requests_have_ended(shard, |_| {});
}

#[test]
fn a_shard_that_turns_leaves_no_file_with_the_kernel() {
    // Its loop makes many passes in the time.
    files_are_free_when_their_requests_have_ended(shard(), |shard| (0..16).for_each(|_| _ = shard.poll()));
}
