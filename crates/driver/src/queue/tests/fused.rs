//! Fused pairs: both commands in the queue or none, told of at once, judged together.

use millrace_nvme_spec::command::Fuse;

use super::*;

fn pair(data: DmaRange) -> Fused {
    let half = |opcode, fuse| {
        let mut command = Command::nvm(opcode).with_data(data);
        command.sqe.flags = command.sqe.flags.with_fuse(fuse);
        command
    };
    Fused { compare: half(NvmOpcode::COMPARE, Fuse::FIRST), write: half(NvmOpcode::WRITE, Fuse::SECOND) }
}

fn plain() -> Fused {
    pair(DmaRange { iova: 0x10_0000, len: 512 })
}

#[test]
fn both_lie_side_by_side_and_the_doorbell_is_written_once() {
    let mut bench = Bench::new(4, Vec::new(), PAGE_SIZE);
    for _ in 0..3 {
        let cid = bench.queue.submit(&read(1)).unwrap();
        bench.queue.ring().unwrap();
        bench.post(cid, Status::SUCCESS, 0);
        bench.queue.next_completion().unwrap().unwrap();
    }
    bench.queue.ring().unwrap();
    bench.posted.take();
    // In the last entry and the first.
    let [compare, write] = bench.queue.submit_fused(&plain()).unwrap();
    assert!(bench.posted.take().is_empty(), "not rung yet");
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(SQ_BELL, 1)]);
    let halves = [3, 0].map(|at| bench.entry(at)).map(|sqe| (sqe.cid, sqe.nvm_opcode(), sqe.flags.fuse()));
    assert_eq!(halves, [(compare, NvmOpcode::COMPARE, Fuse::FIRST), (write, NvmOpcode::WRITE, Fuse::SECOND)]);
}

#[test]
fn a_pair_that_has_no_room_or_cannot_be_described_leaves_nothing_behind() {
    let mut bench = Bench::new(4, Vec::new(), PAGE_SIZE);
    for _ in 0..2 {
        bench.queue.submit(&read(1)).unwrap();
    }
    bench.queue.ring().unwrap();
    bench.posted.take();
    assert!(matches!(bench.queue.submit_fused(&plain()), Err(QueueError::Full { qid: QID, capacity: 3 })));
    bench.post(CommandId(0), Status::SUCCESS, 2);
    bench.queue.next_completion().unwrap().unwrap();
    let odd = Fused { write: Command::nvm(NvmOpcode::WRITE).with_data(DmaRange { iova: 2, len: 512 }), ..plain() };
    assert!(matches!(bench.queue.submit_fused(&odd), Err(QueueError::Prp { .. })));
    assert_eq!(bench.queue.in_flight(), 1, "neither is in flight");
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(CQ_BELL, 1)], "nor in the queue");
    bench.queue.submit_fused(&plain()).unwrap();
}

#[test]
fn both_completions_are_judged_together() {
    let judged = |compare: Status, write: Status| {
        let mut bench = Bench::new(4, page().1, PAGE_SIZE);
        // The first identifiers are 0 and 1, and completions come in any order.
        bench.post(CommandId(1), write, 2);
        bench.post(CommandId(0), compare, 2);
        let result = bench.queue.execute_fused(&plain());
        assert_eq!(bench.queue.in_flight(), 0);
        result.map_err(|error| match error {
            QueueError::Failed { opcode, status, .. } => (NvmOpcode(opcode), status),
            other => panic!("{other}"),
        })
    };
    let (aborted, failed) = (Status::ABORTED_FAILED_FUSED, Status::WRITE_FAULT);
    assert_eq!(judged(Status::SUCCESS, Status::SUCCESS), Ok(true));
    assert_eq!(judged(Status::COMPARE_FAILURE, aborted), Ok(false));
    assert_eq!(judged(failed, aborted), Err((NvmOpcode::COMPARE, failed)));
    assert_eq!(judged(aborted, failed), Err((NvmOpcode::WRITE, failed)));
    assert_eq!(judged(Status::SUCCESS, failed), Err((NvmOpcode::WRITE, failed)));
    let cannot = judged(Status::COMPARE_FAILURE, Status::SUCCESS);
    assert_eq!(cannot, Err((NvmOpcode::COMPARE, Status::COMPARE_FAILURE)), "it wrote all the same");
}
