use millrace_nvme_spec::command::{CommandFlags, CommandId, DataPointer, NamespaceId};

use super::*;
use crate::nvme::fixture::sqe;

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
