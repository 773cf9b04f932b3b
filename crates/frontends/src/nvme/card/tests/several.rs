//! Guests that share a card: what one of them does leaves the others alone.

use millrace_memory::MAX_REGIONS;

use super::*;

#[test]
fn an_unmap_of_one_guest_leaves_the_disks_to_the_others() {
    let (mut first, mut second) = (guest(), guest());
    let held = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
    let namespace = first.add_volume(1, Arc::clone(&held) as _);
    second.add_namespace(1, &namespace);
    first.create_queues(1, 16);
    second.create_queues(1, 16);
    // Two regions that share a page of 2 MiB: what is gone the disk finds out, not the engine.
    let rest = 47 << 20;
    let (gone, size) = (MEMORY_BASE + rest, MEMORY_SIZE - rest);
    second.controller.port.as_mut().expect("it is on a card").unmap(MEMORY_BASE, MEMORY_SIZE);
    second.map_on_card(MEMORY_BASE, rest, 0);
    second.map_on_card(gone, size, rest);
    held.hold();
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(first.alloc_pages(1), 0);
    first.submit(1, sqe);
    first.step_until("a command at the disk", |_| held.waiting() == 1);
    second.controller.port.as_mut().expect("it is on a card").unmap(gone, size);
    sqe.dptr = DataPointer::prps(second.alloc_pages(1), 0);
    second.submit(1, sqe);
    first.step_until("the other guest's command at the disk", |_| {
        second.step();
        held.waiting() == 2
    });
    held.release();
    let mut ended = 0;
    first.step_until("the ends of both", |first| {
        second.step();
        ended += [first.poll(1), second.poll(1)].into_iter().flatten().filter(|cqe| cqe.status().is_success()).count();
        ended == 2
    });
    sqe.dptr = DataPointer::prps(gone, 0);
    assert_eq!(second.command(1, sqe).status().code(), Status::DATA_TRANSFER_ERROR, "its memory is gone");
}

/// Each may have as many as a device without a card.
#[test]
fn the_regions_of_one_guest_leave_room_for_the_others() {
    let mut first = guest();
    let namespace = first.add_memory_volume(1, 1 << 20, BlockSize::B512);
    first.controller.port.as_mut().expect("it is on a card").unmap(MEMORY_BASE, MEMORY_SIZE);
    for page in 0..MAX_REGIONS as u64 {
        first.map_on_card(MEMORY_BASE + page * PAGE, PAGE, page * PAGE);
    }
    let mut second = guest();
    second.add_namespace(1, &namespace);
    for guest in [&mut first, &mut second] {
        guest.create_queues(1, 16);
        assert!(write(guest, 1, 0, &pattern(1, 4096)).is_success());
        assert_eq!(read(guest, 1, 0, 4096), (Status::SUCCESS, pattern(1, 4096)));
    }
}
