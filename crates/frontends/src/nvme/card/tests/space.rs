//! FastPath's spaces as a controller has them: opened by a command, closed with its queue or by a reset.

use millrace_engine_model::map::fastpath;
use millrace_nvme_spec::command::Cqe;

use super::*;

/// Pages from address 0 on that end where the guest's memory does.
const PAGES: u32 = ((MEMORY_BASE + MEMORY_SIZE) / PAGE) as u32;

fn open(guest: &mut FakeGuest, ring: u64, pages: u32) -> Status {
    let mut sqe = sqe(AdminOpcode::OPEN_SPACE.0, 0);
    sqe.dptr = DataPointer::prps(ring, 0);
    sqe.cdw10 = pages;
    guest.admin(sqe).status().code()
}

fn send(guest: &mut FakeGuest, tag: u32, opcode: NvmOpcode, buffer: u64, lba: u32, blocks: u32) {
    let words = [buffer as u32, lba, blocks << 16, u32::from(opcode.0) | tag << 16];
    for (at, word) in (usize::from(fastpath::PAGE) / 4..).zip(words) {
        guest.controller.doorbell_write(at, word);
    }
}

/// Record number `at` of the first lap, if it is there.
fn record(guest: &FakeGuest, ring: u64, at: u64) -> Option<(u16, Status)> {
    let cqe: Cqe = guest.read_value(ring + at * fastpath::RECORD);
    cqe.phase().then(|| (cqe.cid.0, cqe.status().code()))
}

fn wait(guest: &mut FakeGuest, ring: u64, at: u64) -> (u16, Status) {
    guest.step_until("a record", |guest| record(guest, ring, at).is_some());
    record(guest, ring, at).expect("it is there")
}

fn delete_sq(guest: &mut FakeGuest) -> u16 {
    let mut delete = sqe(AdminOpcode::DELETE_IO_SQ.0, 0);
    delete.cdw10 = 1;
    guest.submit(0, delete)
}

#[test]
fn what_cannot_be_opened_is_refused() {
    let mut guest = guest();
    let ring = guest.alloc_pages(1);
    assert_eq!(open(&mut guest, ring, PAGES), Status::INVALID_FIELD, "there is no namespace");
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    let most = 511 * 512;
    for (ring, pages, expected) in [
        (ring, 0, Status::INVALID_FIELD),
        (ring, most + 1, Status::INVALID_FIELD),
        (ring, u32::MAX, Status::INVALID_FIELD),
        (ring + 16, PAGES, Status::PRP_OFFSET_INVALID),
        (0, PAGES, Status::INVALID_FIELD),
        (u64::MAX - 511, PAGES, Status::INVALID_FIELD),
        (ring, most, Status::SUCCESS),
        (ring, PAGES, Status::COMMAND_SEQUENCE_ERROR),
    ] {
        assert_eq!(open(&mut guest, ring, pages), expected, "{ring:#x}, {pages} pages");
    }
    let mut second = super::guest();
    second.add_memory_volume(1, 8 << 20, BlockSize::B512);
    second.create_queues(2, 16);
    let ring = second.alloc_pages(1);
    assert_eq!(open(&mut second, ring, PAGES), Status::COMMAND_SEQUENCE_ERROR, "it has queues");
    let mut others = [super::guest(), super::guest()];
    let opened = others.each_mut().map(|other| {
        other.add_namespace(1, second.controller.namespaces.get(1).map(|known| &known.namespace).expect("it has one"));
        let ring = other.alloc_pages(1);
        open(other, ring, PAGES)
    });
    assert_eq!(opened, [Status::SUCCESS, Status::NOT_ENOUGH_RESOURCES]);
    // Where the window is to be, there is memory.
    let [mut full, mut other] = others;
    full.controller.reset(Reset::Controller);
    other.map_on_card(511 << 21, 4096, 0);
    let ring = other.alloc_pages(1);
    assert_eq!(open(&mut other, ring, PAGES), Status::INVALID_FIELD);
}

#[test]
fn a_space_takes_the_place_of_a_queue_pair_and_gives_it_back() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    let (ring, buffer) = (guest.alloc_pages(1), guest.alloc_pages(64));
    for round in 0..3_u8 {
        guest.write(ring, &[0; 512]);
        assert_eq!(open(&mut guest, ring, PAGES), Status::SUCCESS);
        // Memory that comes where the window is does not hide it.
        guest.map_on_card(511 << 21, 4096, 0);
        let data = pattern(round, 200 << 10);
        guest.write(buffer, &data);
        send(&mut guest, 7, NvmOpcode::WRITE, buffer, 100, 400);
        assert_eq!(wait(&mut guest, ring, 0), (7, Status::SUCCESS));
        guest.write(buffer, &vec![0; data.len()]);
        send(&mut guest, 31, NvmOpcode::READ, buffer, 100, 400);
        assert_eq!(wait(&mut guest, ring, 1), (31, Status::SUCCESS));
        assert!(guest.read(buffer, data.len()) == data, "round {round}");
        send(&mut guest, 0, NvmOpcode::READ, u64::from(PAGES) * PAGE - 512, 0, 2);
        assert_eq!(wait(&mut guest, ring, 2), (0, Status::DATA_TRANSFER_ERROR));
        send(&mut guest, 1, NvmOpcode::READ, 0, 0, 2);
        assert_eq!(wait(&mut guest, ring, 3), (1, Status::DATA_TRANSFER_ERROR), "the buffer begins before the memory");
        send(&mut guest, 2, NvmOpcode::DATASET_MANAGEMENT, buffer, 0, 1);
        assert_eq!(wait(&mut guest, ring, 4), (2, Status::INVALID_OPCODE));
        // Its queue's doorbells are nobody's.
        guest.doorbell(2, 5);
        guest.doorbell(3, 70);
        let cid = delete_sq(&mut guest);
        assert!(guest.wait_for(0, cid).status().is_success());
        send(&mut guest, 3, NvmOpcode::FLUSH, 0, 0, 1);
        guest.settle();
        assert_eq!(record(&guest, ring, 5), None, "it is closed");
        let mut delete = sqe(AdminOpcode::DELETE_IO_CQ.0, 0);
        delete.cdw10 = 1;
        assert!(guest.admin(delete).status().is_success());
        let port = guest.controller.port.as_mut().expect("it is on a card");
        port.unmap(511 << 21, 4096);
        // The function has doorbells again.
        guest.create_queues(1, 16);
        assert_eq!(read(&mut guest, 1, 100, 4096), (Status::SUCCESS, data[..4096].to_vec()));
        guest.disable();
        guest.enable();
    }
}

#[test]
fn a_space_ends_when_its_requests_have() {
    for by_reset in [false, true] {
        let mut guest = guest();
        let memory = MemoryVolume::create("held", 8 << 20, BlockSize::B512).expect("a volume");
        let held = HeldVolume::new(memory);
        guest.add_volume(1, Arc::clone(&held) as _);
        let (ring, buffer) = (guest.alloc_pages(1), guest.alloc_pages(1));
        assert_eq!(open(&mut guest, ring, PAGES), Status::SUCCESS);
        held.hold();
        (0..32).for_each(|tag| send(&mut guest, tag, NvmOpcode::READ, buffer, tag, 8));
        guest.step_until("commands at the disk", |_| held.waiting() > 20);
        let cid = if by_reset {
            guest.write32(offset::CC, 0);
            0
        } else {
            delete_sq(&mut guest)
        };
        for _ in 0..100 {
            guest.step();
        }
        assert!(guest.poll(0).is_none() && !guest.controller.is_quiet(), "it waits");
        held.release();
        if by_reset {
            guest.step_until("the end of the reset", |guest| guest.controller.phase == Phase::Disabled);
        } else {
            assert!(guest.wait_for(0, cid).status().is_success());
            let records = (0..32).map(|at| record(&guest, ring, at).expect("all have one").1);
            let (done, off): (Vec<_>, Vec<_>) = records.partition(|status| status.is_success());
            // What no disk had is called off.
            assert!(done.len() > 20 && off.iter().all(|status| *status == Status::INTERNAL_ERROR), "{off:?}");
            guest.disable();
        }
        guest.enable();
        guest.write(ring, &[0; 512]);
        assert_eq!(open(&mut guest, ring, PAGES), Status::SUCCESS);
        send(&mut guest, 5, NvmOpcode::FLUSH, 0, 0, 1);
        assert_eq!(wait(&mut guest, ring, 0), (5, Status::SUCCESS));
    }
}

/// While no commands are taken, words wait, as doorbells do; as many as make sense.
#[test]
fn words_wait_while_the_controller_does() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    let (ring, buffer) = (guest.alloc_pages(1), guest.alloc_pages(1));
    assert_eq!(open(&mut guest, ring, PAGES), Status::SUCCESS);
    guest.controller.lifecycle.paused = true;
    (0..100).for_each(|tag| send(&mut guest, tag % 32, NvmOpcode::READ, buffer, tag, 8));
    guest.settle();
    assert_eq!(record(&guest, ring, 0), None);
    assert!(guest.controller.is_quiet(), "nothing has begun");
    guest.controller.lifecycle.paused = false;
    for at in 0..32 {
        assert!(wait(&mut guest, ring, at).1.is_success());
    }
    assert!(guest.controller.is_quiet());
}
