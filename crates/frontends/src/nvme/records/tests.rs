use millrace_block::BlockSize;
use millrace_nvme_spec::{
    command::{CommandFlags, CommandId, DataPointer, NamespaceId},
    opcode::NvmOpcode,
};

use super::*;
use crate::nvme::fixture::{FakeGuest, sqe};

/// A command that uses every field there is.
fn full(number: u32) -> Sqe {
    Sqe {
        flags: CommandFlags::new().with_fuse(Fuse::SECOND),
        cid: CommandId(0xc1d0 + number as u16),
        nsid: NamespaceId(0x0a0b_0c0d),
        mptr: 0x1234_5678_9abc_def0,
        dptr: DataPointer::prps(0x1111_2222_3333_4444, 0x5555_6666_7777_8888),
        cdw10: u32::MAX,
        cdw11: number,
        cdw12: 0x0c0c_0c0c,
        cdw13: 0x0d0d_0d0d,
        cdw14: 0x0e0e_0e0e,
        cdw15: 0x0f0f_0f0f,
        ..sqe(0x81, 0)
    }
}

#[test]
fn a_command_comes_back_as_it_was_taken() {
    let records = Records::new().expect("shared memory");
    let last = state::QUEUES as u16 - 1;
    let places = [(0, 0), (1, 0xffff), (last, 7), (last, 0xffff)];
    let taken: Vec<u16> = (0..)
        .zip(places)
        .map(|(number, (sqid, index))| records.take(&full(number), sqid, index).expect("a free record"))
        .collect();
    for step in 0..3 {
        for (number, (&at, (sqid, index))) in (0..).zip(taken.iter().zip(places)) {
            let state = if step == 0 { TAKING } else { ACCEPTED };
            assert_eq!((records.sqid(at), records.index(at), records.state_of(at)), (sqid, index, state));
            assert_eq!((records.sqe(at), records.order(at)), (full(number), number));
            assert_eq!(records.is_compared(at), step == 2);
            records.accept(at);
            if step == 1 {
                records.set_compared(at);
            }
        }
    }
    let placed: Vec<_> = (0..).zip(places).map(|(number, (sqid, index))| (sqid, index, full(number))).collect();
    assert_eq!(records.placed(), placed);
}

#[test]
fn a_number_is_kept_beside_all_that_its_command_uses() {
    let records = Records::new().expect("shared memory");
    let at = records.take(&full(1), 3, 5).expect("a free record");
    records.accept(at);
    assert_eq!(records.numbered(at), None);
    records.number(at, u64::MAX - 1);
    assert_eq!(records.numbered(at), Some(u64::MAX - 1));
    assert_eq!((records.sqid(at), records.index(at), records.state_of(at)), (3, 5, ACCEPTED));
    assert_eq!((records.sqe(at).mptr, records.sqe(at).cdw13), (full(1).mptr, full(1).cdw13));
    records.release(at);
    assert_eq!(records.take(&full(2), 0, 0), Some(at), "the one used last");
    assert_eq!(records.numbered(at), None);
}

/// Nobody can write to a namespace that is not there: a pair that was begun on it waits, and does not fail.
#[test]
fn a_pair_that_was_begun_waits_for_its_namespace() {
    let mut guest = FakeGuest::boot();
    guest.make_queues(1, 16);
    let dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    let half = |cid, fuse, opcode: NvmOpcode| {
        let flags = CommandFlags::new().with_fuse(fuse);
        Sqe { flags, cid: CommandId(cid), dptr, ..sqe(opcode.0, 1) }
    };
    let pair = [half(1, Fuse::FIRST, NvmOpcode::COMPARE), half(2, Fuse::SECOND, NvmOpcode::WRITE)];
    let records = &guest.controller.records;
    let taken: Vec<u16> = (0..).zip(&pair).map(|(index, sqe)| records.take(sqe, 1, index).expect("a free record")).collect();
    for at in &taken {
        records.accept(*at);
    }
    records.set_compared(taken[1]);
    // As a worker finds it that takes over.
    guest.controller.again = taken.clone().into();
    guest.controller.recount();
    guest.controller.redo_pairs(&mut guest.shard.context());
    assert_eq!(guest.controller.again, taken, "nothing is done of it");
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.controller.redo_pairs(&mut guest.shard.context());
    assert!(guest.controller.again.is_empty());
    for cid in [1, 2] {
        assert!(guest.wait_for(1, cid).status().is_success(), "command {cid}");
    }
}
