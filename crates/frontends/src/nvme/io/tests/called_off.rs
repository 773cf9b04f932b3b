//! Commands that wait for their turn, and that nobody waits for any more.

use millrace_block::{Metadata, MetadataFormat, Volume};
use millrace_nvme_spec::{admin::DeleteQueueCdw10, command::QueueId, registers::offset};

use super::{pairs::push_pair, *};
use crate::nvme::{
    fixture::{Line, TaggedMemory},
    registers::Lifecycle,
};

/// A guest whose namespace's requests stand in line.
fn in_line(inner: Arc<dyn Volume>) -> (FakeGuest, Arc<Line>) {
    let mut guest = FakeGuest::boot();
    let line = Line::new(inner);
    guest.add_volume(1, Arc::clone(&line) as Arc<dyn Volume>);
    guest.make_queues(1, 64);
    (guest, line)
}

fn plain() -> Arc<dyn Volume> {
    MemoryVolume::create("inner", SIZE, BlockSize::B512).expect("a volume")
}

/// Writes of a block each, which are under way then; their identifiers.
fn begin_writes(guest: &mut FakeGuest, first: u64, count: u64) -> Vec<u16> {
    let before = guest.controller.in_flight;
    let buffer = guest.alloc_pages(1);
    let cids = (first..first + count).map(|slba| {
        let mut write = command(NvmOpcode::WRITE, slba, 1);
        (write.dptr, write.mptr) = (guest.prps(buffer, 512), buffer + 1024);
        guest.push(1, write)
    });
    let cids = cids.collect();
    guest.ring(1);
    under_way(guest, before + count as u32);
    cids
}

/// So many commands are under way, and have come as far as they come.
fn under_way(guest: &mut FakeGuest, count: u32) {
    guest.step_until("commands under way", |guest| guest.controller.in_flight == count);
    (0..100).for_each(|_| _ = guest.step());
}

/// A guest with more tagged writes under way than there are buffers.
fn more_than_buffers() -> (FakeGuest, Arc<Line>, Vec<u16>) {
    let format = MetadataFormat { protection: 0, extended: false, first: false };
    let (mut guest, line) = in_line(TaggedMemory::new(SIZE, BlockSize::B512, Metadata::Shown(format)));
    let cids = begin_writes(&mut guest, 0, 56);
    assert!((1..56).contains(&line.came()), "{} have come", line.came());
    (guest, line, cids)
}

#[test]
fn who_waits_for_a_buffer_stands_in_no_line_after_a_reset() {
    let (mut guest, line, _) = more_than_buffers();
    let came = line.came();
    guest.disable();
    assert_eq!((line.came(), in_flight(&guest)), (came, 0));
}

#[test]
fn who_waits_for_a_buffer_stands_in_no_line_when_its_queue_goes() {
    let (mut guest, line, cids) = more_than_buffers();
    let came = line.came();
    let mut delete = sqe(AdminOpcode::DELETE_IO_SQ.0, 0);
    delete.cdw10 = DeleteQueueCdw10::new().with_qid(QueueId(1)).into_bits();
    succeeds(guest.admin(delete));
    assert_eq!((line.came(), in_flight(&guest)), (came, 0));
    for cid in cids {
        let status = guest.wait_for(1, cid).status();
        assert_eq!((status.code(), status.dnr()), (Status::ABORTED_SQ_DELETION, false));
    }
}

#[test]
fn who_stands_at_the_gate_does_not_enter_after_a_reset() {
    let (mut guest, line) = in_line(plain());
    begin_writes(&mut guest, 0, 20);
    assert_eq!(line.came(), 20);
    // A pair waits for them, and others for the pair.
    push_pair(&mut guest, 100, &[0; 512], &[1; 512]);
    guest.ring(1);
    under_way(&mut guest, 22);
    begin_writes(&mut guest, 200, 20);
    assert_eq!(line.came(), 20);
    guest.disable();
    assert_eq!((line.came(), in_flight(&guest)), (20, 0));
}

/// No deletion of a queue ends there: to call off again and again would only keep the shard awake.
#[test]
fn a_controller_that_has_failed_calls_off_again_only_when_it_is_reset() {
    let (mut guest, line) = in_line(plain());
    line.shut(true);
    begin_writes(&mut guest, 0, 1);
    let mut delete = sqe(AdminOpcode::DELETE_IO_SQ.0, 0);
    delete.cdw10 = DeleteQueueCdw10::new().with_qid(QueueId(1)).into_bits();
    guest.submit(0, delete);
    guest.step_until("the deletion", |guest| guest.controller.lifecycle.call_off_again.is_some());
    guest.controller.fail("a test");
    guest.step();
    assert_eq!(guest.controller.lifecycle.call_off_again, None);
    line.shut(false);
    guest.disable();
    assert_eq!(in_flight(&guest), 0);
}

#[test]
fn who_comes_to_the_line_after_a_reset_is_called_off_too() {
    let (mut guest, line) = in_line(plain());
    line.shut(true);
    begin_writes(&mut guest, 0, 3);
    guest.write32(offset::CC, 0);
    (0..100).for_each(|_| _ = guest.step());
    line.shut(false);
    guest.step_until("the line", |_| line.came() == 3);
    guest.step_until("not ready", |guest| guest.read32(offset::CSTS) & 1 == 0);
    // The next guest's commands are none of those.
    guest.enable();
    guest.make_queues(1, 64);
    guest.step();
    let Lifecycle { called_off, call_off_again, .. } = guest.controller.lifecycle;
    assert_eq!((called_off, call_off_again), (false, None));
}
