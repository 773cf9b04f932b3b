use millrace_block::Lba;

use super::*;

/// A lean queue of `depth` reads, and the controller's side of it.
fn lean(entries: u32, depth: u32, areas: Vec<MappedArea>) -> (LeanQueue, Side) {
    let bench = Bench::new(entries, areas, PAGE_SIZE);
    let commands: Vec<_> = (0..depth).map(|cid| read(cid + 100)).collect();
    let (sq, cq) = (bench.queue.sq_range(), bench.queue.cq_range());
    let queue = LeanQueue::new(bench.queue, &commands).unwrap();
    assert_eq!(sq.len.min(cq.len), PAGE_SIZE);
    (queue, Side { posted: bench.posted, done: 0 })
}

struct Side {
    posted: Posted,
    done: usize,
}

impl Side {
    fn post_entry(&mut self, lean: &LeanQueue, mut cqe: Cqe, status: Status) {
        let entries = lean.queue().entries() as usize;
        cqe.status = StatusField::new(status, (self.done / entries).is_multiple_of(2));
        lean.queue().buffers().1.write_value(self.done % entries * Cqe::SIZE, &cqe);
        self.done += 1;
    }

    fn post(&mut self, lean: &LeanQueue, cid: u16) {
        self.post_entry(lean, Cqe { sqid: QID, cid: CommandId(cid), ..Cqe::default() }, Status::SUCCESS);
    }
}

fn entry(lean: &LeanQueue, index: usize) -> Sqe {
    lean.queue().buffers().0.unwrap().read_value(index * Sqe::SIZE)
}

#[test]
fn batches_wrap_out_of_order_and_each_entry_is_its_identifiers() {
    let (mut lean, mut side) = lean(8, 3, Vec::new());
    let mut taken = Vec::new();
    let mut tail = 0;
    for round in 0..20u64 {
        for cid in 0..3 {
            lean.begin(cid, Lba(round << 40 | u64::from(cid)));
            let sqe = entry(&lean, tail % 8);
            assert_eq!((sqe.cid.0, sqe.nsid.0), (cid, u32::from(cid) + 100));
            assert_eq!((sqe.cdw10, sqe.cdw11), (u32::from(cid), (round << 8) as u32));
            tail += 1;
        }
        lean.ring().unwrap();
        let rung = side.posted.take();
        assert_eq!(rung.last(), Some(&(SQ_BELL, tail as u32 % 8)));
        for (posted, cid) in [2, 0, 1].into_iter().enumerate() {
            lean.take(3, &mut taken).unwrap();
            assert!(taken.is_empty(), "{posted} of 3 are not enough");
            side.post(&lean, cid);
        }
        lean.take(3, &mut taken).unwrap();
        assert_eq!(taken, [2, 0, 1]);
        assert_eq!(lean.in_flight(), 0);
    }
}

#[test]
fn the_head_is_rung_before_the_controller_could_run_out_of_entries() {
    // 7 usable entries, 3 in flight: 4 to spare, of which at most 2 stay unrung between batches.
    let (mut lean, mut side) = lean(8, 3, Vec::new());
    let mut taken = Vec::new();
    let (mut head, mut most) = (0, 0);
    for round in 0..50 {
        let cid = (round % 3) as u16;
        lean.begin(cid, Lba(round));
        lean.ring().unwrap();
        for (bell, value) in side.posted.take() {
            if bell == CQ_BELL {
                head = value;
            }
        }
        side.post(&lean, cid);
        lean.take(1, &mut taken).unwrap();
        let occupied = (side.done as u32 + 8 - head) % 8;
        assert!(occupied <= 7 - 3, "room for all that may be in flight: {occupied}");
        most = most.max(occupied);
    }
    assert!(most > 1, "it is not rung for every completion");
}

#[test]
fn entries_that_would_be_the_same_are_not_written_again() {
    let (_, areas) = page();
    let (mut lean, mut side) = lean(2, 1, areas);
    let mut taken = Vec::new();
    for round in 0..4 {
        lean.begin(0, Lba(7));
        if round < 2 {
            lean.queue().buffers().0.unwrap().write_value(round * Sqe::SIZE, &[0xee_u8; Sqe::SIZE]);
        }
        side.post(&lean, 0);
        lean.take(1, &mut taken).unwrap();
        assert_eq!(taken, [0]);
    }
    assert_eq!(entry(&lean, 0).opcode, 0xee, "left alone");
    lean.begin(0, Lba(8));
    assert_eq!((entry(&lean, 0).opcode, entry(&lean, 0).cdw10), (NvmOpcode::READ.0, 8));
}

#[test]
fn completions_that_cannot_be_end_the_run() {
    let good = Cqe { sqid: QID, ..Cqe::default() };
    let bad = [Cqe { cid: CommandId(1), ..good }, Cqe { cid: CommandId(0xffff), ..good }, Cqe { sqid: QueueId(1), ..good }];
    for cqe in bad {
        let (mut lean, mut side) = lean(4, 2, page().1);
        lean.begin(0, Lba(0));
        side.post_entry(&lean, cqe, Status::SUCCESS);
        assert!(matches!(lean.take(1, &mut Vec::new()), Err(QueueError::BadCompletion { qid: QID, .. })), "{cqe:?}");
    }
    let (mut lean, mut side) = lean(4, 2, page().1);
    lean.begin(0, Lba(0));
    side.post_entry(&lean, good, Status::LBA_OUT_OF_RANGE);
    let error = lean.take(1, &mut Vec::new()).unwrap_err();
    assert_eq!(error.status().map(Status::code), Some(Status::LBA_OUT_OF_RANGE));
}

#[test]
#[should_panic(expected = "in flight")]
fn a_command_is_begun_once_at_a_time() {
    let (mut lean, _) = lean(4, 2, page().1);
    lean.begin(1, Lba(0));
    lean.begin(1, Lba(0));
}
