//! Bad input that needs a guest of its own, running beside the device: a real shard, a real socket, our own driver as the
//! guest. What one wrong command, message or register brings is tested beside the code; docs/testing.md has the list.

mod house;

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Lba};
use millrace_driver::{Command, Controller, DmaMemory, DmaRange, QueueOptions, QueuePair};
use millrace_frontends::nvme::DoorbellMode;
use millrace_nvme_spec::{
    admin::{AsyncEvent, AsyncEventDw0},
    command::{Cqe, DataPointer, NamespaceId, QueueId},
    log::LogId,
    registers::Doorbell,
    status::Status,
};
use millrace_vfio_user::pci;
use rustix::fs::{MemfdFlags, memfd_create};

use self::house::{CARDS, House, PATIENCE};

const BLOCK: usize = 512;

/// With the controller alone.
fn plain(doorbells: DoorbellMode) -> House {
    House::with(doorbells, None, volume())
}

/// With each kind that there is.
fn each() -> [House; 2] {
    CARDS.map(|card| House::with(DoorbellMode::Shared, card, volume()))
}

fn volume() -> Arc<MemoryVolume> {
    MemoryVolume::create("disk", 4 << 20, BlockSize::B512).expect("a volume")
}

fn status_of(queue: &mut QueuePair, command: &Command) -> Status {
    queue.execute_any(command).expect("a completion").status().code()
}

/// The next completion; the driver checks that each identifier completes once.
fn wait(queue: &mut QueuePair) -> Cqe {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(cqe) = queue.next_completion().expect("a completion that fits") {
            return cqe;
        }
        assert!(Instant::now() < deadline, "a command never completed");
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

/// Stops the other thread, also when an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The guest's other processor rewrites entries after the doorbell: whichever version is taken is checked and then used.
#[test]
fn entries_that_change_after_the_doorbell() {
    each().iter().for_each(change_entries);
}

fn change_entries(house: &House) {
    let (controller, disk, mut queue) = house.guest();
    let buffer = controller.memory().alloc(BLOCK).expect("memory");
    buffer.write_at(0, &[0x5a; BLOCK]);
    queue.execute(&disk.write(Lba(0), buffer.slice(0, BLOCK)).expect("in range")).expect("a write");
    let memory = File::from(controller.memory().fd().try_clone_to_owned().expect("a descriptor"));
    let (place, entries) = (queue.sq_range().iova - controller.memory().range().iova, u64::from(queue.entries()));
    let (stop, address) = (AtomicBool::new(false), buffer.slice(0, BLOCK).iova.to_le_bytes());
    let good = disk.read(Lba(0), buffer.slice(0, BLOCK)).expect("in range");
    let allowed = [
        Status::SUCCESS,
        Status::INVALID_OPCODE,
        Status::INVALID_FIELD,
        Status::DATA_TRANSFER_ERROR,
        Status::PRP_OFFSET_INVALID,
        Status::LBA_OUT_OF_RANGE,
        // An engine knows its namespace and no other.
        Status::INVALID_NAMESPACE_OR_FORMAT,
    ];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Bytes within an entry, and what they become: opcode, namespace, address, first block.
            let spoilers: [(u64, &[u8]); 4] = [(0, &[0x7f]), (4, &[9]), (24, &[0xff; 8]), (44, &[0xff; 8])];
            // The address comes back every other time only: an entry is wrong for a moment, or for a while.
            let restorers: [(u64, &[u8]); 4] = [(24, &address), (0, &[0x02]), (4, &[1]), (44, &[0; 8])];
            for round in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                for slot in 0..entries {
                    let (offset, bytes) = spoilers[((round + slot) % 4) as usize];
                    memory.write_all_at(bytes, place + slot * 64 + offset).expect("guest memory");
                    for (offset, bytes) in restorers.into_iter().skip((round % 2) as usize) {
                        memory.write_all_at(bytes, place + slot * 64 + offset).expect("guest memory");
                    }
                }
            }
        });
        let _stop = Stop(&stop);
        let (mut seen, mut rounds, deadline) = ([0; 2], 0, Instant::now() + 3 * PATIENCE);
        // So often, and until an entry was taken as it should be and another one as it should not.
        while rounds < 400 || seen.contains(&0) {
            assert!(rounds < 400 || Instant::now() < deadline, "done and refused: {seen:?} in {rounds} rounds");
            for _ in 0..16 {
                queue.submit(&good).expect("room");
            }
            queue.ring().expect("ringing");
            for _ in 0..16 {
                let status = wait(&mut queue).status().code();
                assert!(allowed.contains(&status), "{status}");
                seen[usize::from(status != Status::SUCCESS)] += 1;
            }
            rounds += 1;
        }
    });
    // The disk is as it was, and so is the queue.
    let back = controller.memory().alloc(BLOCK).expect("memory");
    queue.execute(&disk.read(Lba(0), back.slice(0, BLOCK)).expect("in range")).expect("a read");
    assert_eq!(back.read_vec(0, BLOCK), [0x5a; BLOCK]);
}

/// The device's own addresses are not memory: not its doorbells, not its interrupt table, wherever the guest put them.
#[test]
fn data_pointers_into_the_bar() {
    each().iter().for_each(point_into_the_bar);
}

fn point_into_the_bar(house: &House) {
    let (controller, disk, mut queue) = house.guest();
    let bar = 0xfebf_0000_u64;
    controller.transport().region_write(pci::REGION_CONFIG, 0x10, &(bar as u32).to_le_bytes()).expect("a BAR");
    for at in [0, bar, bar + 0x1000, bar + 0x1ff8] {
        for command in
            [disk.read(Lba(0), DmaRange { iova: at, len: BLOCK }), disk.write(Lba(0), DmaRange { iova: at, len: BLOCK })]
        {
            let mut sqe = command.expect("in range").sqe;
            sqe.dptr = DataPointer::prps(at, 0);
            let status = status_of(&mut queue, &Command::from(sqe));
            assert_eq!(status, Status::DATA_TRANSFER_ERROR, "PRP1 {at:#x}");
        }
    }
    assert!(!controller.status().expect("registers").cfs());
}

/// Doorbells of queues that are not there, and values beyond the queue: an event says so, and the queue goes on once its
/// doorbell makes sense again. However doorbells arrive.
#[test]
fn doorbells_that_make_no_sense() {
    for mode in [DoorbellMode::Shared, DoorbellMode::Messages] {
        let house = plain(mode);
        let (mut controller, disk, mut queue) = house.guest();
        controller.request_event().expect("an event request");
        let entries = queue.entries();
        for value in [entries, entries + 1, 0xffff, 0x1_0000, u32::MAX] {
            queue.ring_tail_raw(value).expect("a doorbell");
        }
        let event = event(&mut controller);
        assert_eq!(event, AsyncEvent::INVALID_DOORBELL_VALUE.dw0(), "{mode:?}");
        let tail = Doorbell::SqTail(queue.id());
        controller.write_doorbell(tail, 0).expect("a doorbell");
        queue.execute(&disk.flush()).unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        // Only now: a value that is looked at after the log was read is an event again.
        controller.get_log_page(LogId::ERROR, NamespaceId::BROADCAST, 0, 64).expect("the log that the event names");
        // Nothing of what the other doorbells are written makes a difference.
        controller.request_event().expect("an event request");
        for qid in [queue.id().0 + 1, 16, 17, 255, 256] {
            controller.write_doorbell(Doorbell::SqTail(QueueId(qid)), 1).expect("a doorbell");
            controller.write_doorbell(Doorbell::CqHead(QueueId(qid)), 1).expect("a doorbell");
        }
        if mode == DoorbellMode::Messages {
            assert_eq!(self::event(&mut controller), AsyncEvent::INVALID_DOORBELL_REGISTER.dw0());
        }
        queue.execute(&disk.flush()).expect("the queue goes on");
        // A queue that is made later starts at its beginning.
        let mut later = controller.create_queue_pair(&QueueOptions::default()).expect("a queue pair");
        later.execute(&disk.flush()).expect("the new queue works");
    }
}

fn event(controller: &mut Controller) -> AsyncEventDw0 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(cqe) = controller.poll_event().expect("the server lives") {
            return AsyncEventDw0::from_bits(cqe.dw0);
        }
        assert!(Instant::now() < deadline, "no event");
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

/// Memory that is mapped page by page is unmapped page by page while commands use it: each succeeds, or says that its data
/// could not be reached; and nothing is written to a page that was taken away.
#[test]
fn single_pages_are_unmapped_under_commands() {
    each().iter().for_each(unmap_single_pages);
}

fn unmap_single_pages(house: &House) {
    const PAGES: usize = 32;
    const AT: u64 = 1 << 29;
    let (controller, disk, mut queue) = house.guest();
    let extra = DmaMemory::new(AT, PAGES * 4096).expect("memory");
    let page = |i: usize| DmaRange { iova: AT + i as u64 * 4096, len: 4096 };
    for round in 0..20 {
        let buffer = extra.alloc(PAGES * 4096).expect("memory");
        for i in 0..PAGES {
            controller.transport().dma_map(page(i), extra.fd(), i as u64 * 4096).expect("a map");
        }
        for _ in 0..32 {
            queue.submit(&disk.read(Lba(0), buffer.slice(0, PAGES * 4096)).expect("in range")).expect("room");
        }
        queue.ring().expect("ringing");
        for i in (0..PAGES).rev() {
            controller.transport().dma_unmap(page((i * 29 + round) % PAGES)).expect("an unmap");
        }
        buffer.fill(0xa5);
        for _ in 0..32 {
            let status = wait(&mut queue).status().code();
            assert!([Status::SUCCESS, Status::DATA_TRANSFER_ERROR].contains(&status), "round {round}: {status}");
        }
        assert!(buffer.read_vec(0, PAGES * 4096).iter().all(|&byte| byte == 0xa5), "a page was written after its unmap");
    }
}

/// The same with huge pages, of which the guest's firmware gives back parts (as QEMU does below 1 MiB).
#[test]
fn parts_of_huge_pages_are_unmapped_under_commands() {
    const HUGE: u64 = 2 << 20;
    const AT: u64 = 1 << 40;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let huge = memfd_create("huge", flags).ok().filter(|file| rustix::fs::ftruncate(file, HUGE).is_ok());
    let house = plain(DoorbellMode::Shared);
    let (controller, disk, mut queue) = house.guest();
    let parts = [(0, 0xa_0000), (0xc_0000, HUGE - 0xc_0000)];
    let ranges = parts.map(|(offset, len)| (offset, DmaRange { iova: AT + offset, len: len as usize }));
    for round in 0..20 {
        for (offset, range) in ranges {
            let Some(huge) = &huge else { return eprintln!("skipped: parts of huge pages: this system has none") };
            let mapped = controller.transport().dma_map(range, huge.as_fd(), offset);
            if round == 0 && mapped.is_err() {
                return eprintln!("skipped: parts of huge pages: none are free");
            }
            mapped.expect("a map");
        }
        for i in 0..32 {
            // Half of them lie in the first part, half in the second.
            let data = DmaRange { iova: AT + if i % 2 == 0 { 0x1000 } else { 0x10_0000 }, len: 128 << 10 };
            queue.submit(&disk.read(Lba(0), data).expect("in range")).expect("room");
        }
        queue.ring().expect("ringing");
        for (_, range) in ranges {
            controller.transport().dma_unmap(range).expect("an unmap");
        }
        for _ in 0..32 {
            let status = wait(&mut queue).status().code();
            assert!([Status::SUCCESS, Status::DATA_TRANSFER_ERROR].contains(&status), "round {round}: {status}");
        }
    }
}
