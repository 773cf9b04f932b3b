//! Fused Compare and Write.

use super::*;
use crate::nvme::fixture::HeldVolume;

/// A pair on `slba`: compare with `old`, write `new`. Returns their identifiers; not rung.
pub(super) fn push_pair(guest: &mut FakeGuest, slba: u64, old: &[u8], new: &[u8]) -> [u16; 2] {
    let halves = [(NvmOpcode::COMPARE, Fuse::FIRST, old), (NvmOpcode::WRITE, Fuse::SECOND, new)];
    halves.map(|(opcode, fuse, data)| {
        let half = half(guest, opcode, fuse, slba, data);
        guest.push(1, half)
    })
}

fn half(guest: &mut FakeGuest, opcode: NvmOpcode, fuse: Fuse, slba: u64, data: &[u8]) -> Sqe {
    let buffer = guest.alloc_pages((data.len() as u64).div_ceil(PAGE));
    guest.write(buffer, data);
    let mut sqe = command(opcode, slba, data.len() as u64 / 512);
    sqe.flags = CommandFlags::new().with_fuse(fuse);
    sqe.dptr = guest.prps(buffer, data.len() as u64);
    sqe
}

fn finish(guest: &mut FakeGuest, cids: [u16; 2]) -> [Cqe; 2] {
    guest.ring(1);
    cids.map(|cid| guest.wait_for(1, cid))
}

#[test]
fn a_pair_writes_only_what_it_compared() {
    let mut guest = guest(BlockSize::B512);
    let (old, new) = (pattern(1024, 1), pattern(1024, 2));
    let cids = push_pair(&mut guest, 4, &[0; 1024], &old);
    finish(&mut guest, cids).into_iter().for_each(succeeds);
    assert_eq!(read(&mut guest, 4, 1024), old);
    let cids = push_pair(&mut guest, 4, &new, &new);
    let [compare, write] = finish(&mut guest, cids);
    fails(compare, Status::COMPARE_FAILURE);
    fails(write, Status::ABORTED_FAILED_FUSED);
    assert_eq!(read(&mut guest, 4, 1024), old);
    assert_eq!((in_flight(&guest), guest.controller.in_flight), (0, 0));
}

#[test]
fn halves_without_their_other() {
    let mut guest = guest(BlockSize::B512);
    let first = half(&mut guest, NvmOpcode::COMPARE, Fuse::FIRST, 0, &[0; 512]);
    let second = half(&mut guest, NvmOpcode::WRITE, Fuse::SECOND, 0, &[1; 512]);
    // Alone in its doorbell write.
    fails(guest.command(1, first), Status::ABORTED_MISSING_FUSED);
    fails(guest.command(1, second), Status::ABORTED_MISSING_FUSED);
    // Followed by a command that is not fused, which succeeds.
    let cids = [guest.push(1, first), guest.push(1, sqe(NvmOpcode::FLUSH.0, 1))];
    let [alone, flush] = finish(&mut guest, cids);
    fails(alone, Status::ABORTED_MISSING_FUSED);
    succeeds(flush);
    // Followed by another first, which has its second.
    let lone = guest.push(1, first);
    let pair = push_pair(&mut guest, 0, &[0; 512], &[1; 512]);
    finish(&mut guest, pair).into_iter().for_each(succeeds);
    fails(guest.wait_for(1, lone), Status::ABORTED_MISSING_FUSED);
    assert_eq!(guest.controller.io_parked(), 0);
}

#[test]
fn a_first_half_does_not_wait_behind_a_refused_identifier() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::Read, When::Nth(1), Effect::Delay(Duration::from_millis(20))));
    let buffer = guest.alloc_pages(1);
    let mut read = command(NvmOpcode::READ, 0, 8);
    read.dptr = guest.prps(buffer, 4096);
    read.cid.0 = 500;
    let first = half(&mut guest, NvmOpcode::COMPARE, Fuse::FIRST, 0, &[0; 512]);
    guest.push_as_is(1, &read);
    let lone = guest.push(1, first);
    guest.push_as_is(1, &read);
    guest.ring(1);
    fails(guest.wait_for(1, lone), Status::ABORTED_MISSING_FUSED);
    fails(guest.wait(1), Status::CID_CONFLICT);
    succeeds(guest.wait(1));
}

#[test]
fn a_wrong_half_takes_the_other_with_it() {
    let mut guest = guest(BlockSize::B512);
    let bad_range = SIZE / 512;
    let cases = [
        (NvmOpcode::COMPARE, bad_range, NvmOpcode::WRITE, 0, Status::LBA_OUT_OF_RANGE, Status::ABORTED_FAILED_FUSED),
        (NvmOpcode::COMPARE, 0, NvmOpcode::WRITE, bad_range, Status::ABORTED_FAILED_FUSED, Status::LBA_OUT_OF_RANGE),
        (NvmOpcode::READ, 0, NvmOpcode::WRITE, 0, Status::INVALID_FIELD, Status::ABORTED_FAILED_FUSED),
        (NvmOpcode::COMPARE, 0, NvmOpcode::READ, 0, Status::ABORTED_FAILED_FUSED, Status::INVALID_FIELD),
        (NvmOpcode::COMPARE, 0, NvmOpcode::WRITE, 1, Status::INVALID_FIELD, Status::INVALID_FIELD),
    ];
    for (first, first_lba, second, second_lba, first_status, second_status) in cases {
        let first = half(&mut guest, first, Fuse::FIRST, first_lba, &[0; 512]);
        let second = half(&mut guest, second, Fuse::SECOND, second_lba, &[1; 512]);
        let cids = [guest.push(1, first), guest.push(1, second)];
        let [first, second] = finish(&mut guest, cids);
        fails(first, first_status);
        fails(second, second_status);
    }
    assert_eq!(read(&mut guest, 0, 1024), [0; 1024]);
}

#[test]
fn no_write_comes_between() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::Compare, When::Always, Effect::Delay(Duration::from_millis(10))));
    let (ours, theirs) = ([1; 1024], [2; 1024]);
    let cids = push_pair(&mut guest, 8, &[0; 1024], &ours);
    guest.ring(1);
    guest.step_until("the pair to be taken", |guest| fault.requests(Kind::Compare) == 1 || guest.step() == usize::MAX);
    // Overlaps the pair by a block: it has to wait, or the pair's write would bury it.
    let late = half(&mut guest, NvmOpcode::WRITE, Fuse::NORMAL, 9, &theirs);
    let zero = command(NvmOpcode::WRITE_ZEROES, 7, 2);
    let aside = half(&mut guest, NvmOpcode::WRITE, Fuse::NORMAL, 10, &theirs);
    let others = [late, zero, aside].map(|sqe| guest.push(1, sqe));
    guest.ring(1);
    for cid in others.into_iter().chain(cids) {
        succeeds(guest.wait_for(1, cid));
    }
    assert_eq!(read(&mut guest, 8, 2048), [&[0; 512][..], &[2; 1536]].concat());
}

#[test]
fn blocks_of_a_pair_are_not_marked_before_it_has_ended() {
    let mut guest = FakeGuest::boot();
    let held = HeldVolume::new(MemoryVolume::create("inner", SIZE, BlockSize::B512).expect("a volume"));
    guest.add_volume(1, Arc::clone(&held) as Arc<dyn millrace_block::Volume>);
    guest.make_queues(1, 64);
    held.hold();
    let pair = push_pair(&mut guest, 8, &[0; 512], &[1; 512]);
    guest.ring(1);
    guest.step_until("the pair to compare", |_| held.waiting() == 1);
    let mark = guest.submit(1, command(NvmOpcode::WRITE_UNCORRECTABLE, 8, 1));
    for _ in 0..100 {
        guest.step();
        assert!(guest.poll(1).is_none(), "the pair is still under way");
    }
    held.release();
    for cid in pair.into_iter().chain([mark]) {
        succeeds(guest.wait_for(1, cid));
    }
    let (cqe, _) = guest.command_reading(1, command(NvmOpcode::READ, 8, 1), 512);
    fails(cqe, Status::UNRECOVERED_READ_ERROR);
}

#[test]
fn pairs_on_one_block_take_turns() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::Compare, When::Every(2), Effect::Delay(Duration::from_millis(2))));
    // All compare with zeroes: exactly one of them finds them.
    let pairs: Vec<_> = (1..=8).map(|i| push_pair(&mut guest, 3, &[0; 512], &[i; 512])).collect();
    guest.ring(1);
    let mut won = Vec::new();
    for (i, pair) in (1..).zip(pairs) {
        let [compare, write] = pair.map(|cid| guest.wait_for(1, cid).status());
        assert_eq!(compare.is_success(), write.is_success());
        if compare.is_success() {
            won.push(i);
        } else {
            assert_eq!((compare.code(), write.code()), (Status::COMPARE_FAILURE, Status::ABORTED_FAILED_FUSED));
        }
    }
    assert_eq!(won.len(), 1);
    assert_eq!(read(&mut guest, 3, 512), [won[0]; 512]);
}

#[test]
fn pairs_wrap_around_the_queue() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, SIZE, BlockSize::B512);
    guest.make_queues(1, 4);
    let mut old = [0; 512];
    for i in 1..20 {
        let new = [i; 512];
        let cids = push_pair(&mut guest, 0, &old, &new);
        finish(&mut guest, cids).into_iter().for_each(succeeds);
        old = new;
        if i % 3 == 0 {
            succeeds(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)));
        }
    }
}

#[test]
fn a_held_half_is_let_go() {
    let mut guest = guest(BlockSize::B512);
    let cids = push_pair(&mut guest, 0, &[0; 512], &[1; 512]);
    // The second is in the queue, but not taken before the queue is about to go.
    guest.ring(1);
    let (first, token) = guest.controller.accept(1).expect("the first half");
    assert!(guest.controller.pending_entries(1).is_some());
    let shard = &mut guest.shard;
    let mut cx = shard.context();
    let slot = cx.reserve().expect("a slot");
    let outcome = guest.controller.io_command(&mut cx, slot, token, &first);
    assert!(matches!(outcome, super::super::Outcome::Held));
    assert_eq!((guest.controller.io_parked(), guest.controller.in_flight), (1, 1));
    guest.controller.abort_held(1);
    assert_eq!((guest.controller.io_parked(), guest.controller.in_flight), (0, 0));
    let cqe = guest.poll(1).expect("its completion");
    assert_eq!(cqe.cid.0, cids[0]);
    fails(cqe, Status::ABORTED_SQ_DELETION);
    fails(guest.wait_for(1, cids[1]), Status::ABORTED_MISSING_FUSED);
}
