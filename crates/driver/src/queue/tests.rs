//! Queue logic, with the test in the controller's place: it reads entries and posts completions in the shared memory.

mod fused;
mod lean;

use std::sync::Arc;

use millrace_memory::Mapping;
use millrace_nvme_spec::{
    NvmOpcode,
    identify::{SglAlignment, SglSupport},
    registers::DoorbellLayout,
    sgl::SglDescriptor,
};

use zerocopy::IntoBytes;

use super::*;
use crate::{dma::PAGE_SIZE, doorbell::Shadow, transport::MappedArea};

/// A transport of which only posted writes work; it keeps them.
#[derive(Clone, Default)]
struct Posted(Arc<std::sync::Mutex<Vec<(u64, u32)>>>);

impl Posted {
    fn take(&self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl crate::Transport for Posted {
    fn region_write_posted(&mut self, _: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        self.0.lock().unwrap().push((offset, u32::from_le_bytes(data.try_into().unwrap())));
        Ok(())
    }
    fn check(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
    fn region_read(&mut self, _: u32, _: u64, _: &mut [u8]) -> Result<(), TransportError> {
        unreachable!("queues do not read registers")
    }
    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), TransportError> {
        unreachable!("queues do not write registers but doorbells")
    }
    fn map_region(&mut self, _: u32) -> Result<Vec<MappedArea>, TransportError> {
        unreachable!("queues do not map")
    }
    fn dma_map(&mut self, _: DmaRange, _: BorrowedFd<'_>, _: u64) -> Result<(), TransportError> {
        unreachable!("queues do not map")
    }
    fn dma_unmap(&mut self, _: DmaRange) -> Result<(), TransportError> {
        unreachable!("queues do not map")
    }
    fn vectors(&mut self) -> Result<u32, TransportError> {
        unreachable!("queues do not set up interrupts")
    }
    fn set_vectors(&mut self, _: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        unreachable!("queues do not set up interrupts")
    }
    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        unreachable!("queues do not set up interrupts")
    }
    fn reset(&mut self) -> Result<(), TransportError> {
        unreachable!("queues do not reset")
    }
}

const QID: QueueId = QueueId(3);
const SQ_BELL: u64 = 0x1018;
const CQ_BELL: u64 = 0x101c;

struct Bench {
    queue: QueuePair,
    posted: Posted,
    shadow: Option<(DmaBuffer, DmaBuffer)>,
    /// Completions posted so far.
    done: usize,
}

impl Bench {
    fn new(entries: u32, areas: Vec<MappedArea>, max_transfer: usize) -> Self {
        Self::full(entries, areas, max_transfer, None)
    }

    fn full(entries: u32, areas: Vec<MappedArea>, max_transfer: usize, inside: Option<&ControllerMemory>) -> Self {
        Self::build(entries, areas, max_transfer, (false, inside))
    }

    fn build(
        entries: u32,
        areas: Vec<MappedArea>,
        max_transfer: usize,
        (shadowed, inside): (bool, Option<&ControllerMemory>),
    ) -> Self {
        let memory = DmaMemory::new(1 << 32, 64 * PAGE_SIZE).unwrap();
        let sgls = SglSupport::new().with_support(SglAlignment::DWORD);
        let posted = Posted::default();
        let transport = SharedTransport::new(posted.clone());
        let mut doorbells = Doorbells::new(DoorbellLayout::new(0).unwrap(), transport.clone(), areas);
        if shadowed {
            let page = || memory.alloc(PAGE_SIZE).unwrap();
            doorbells.shadow = Some(Shadow { doorbells: page(), events: page() });
        }
        let queue = QueuePair::new(QueueParts {
            id: QID,
            entries,
            memory: QueueMemory::new(&memory, inside, entries).unwrap(),
            lists: Lists::new(&memory, (entries - 1) as u16, max_transfer, sgls).unwrap(),
            doorbells: &doorbells,
            interrupt: None,
            mask: None,
            transport,
            timeout: Duration::from_secs(10),
        });
        let shadow = doorbells.shadow.map(|shadow| (shadow.doorbells, shadow.events));
        Self { queue, posted, shadow, done: 0 }
    }

    fn entry(&self, index: u32) -> Sqe {
        self.queue.buffers().0.unwrap().read_value(index as usize * Sqe::SIZE)
    }

    /// Posts the next completion as a controller does: phase inverted on every pass.
    fn post(&mut self, cid: CommandId, status: Status, sqhd: u16) {
        self.post_entry(Cqe { dw0: u32::from(cid.0) + 100, sqhd, sqid: QID, cid, ..Cqe::default() }, status);
    }

    fn post_entry(&mut self, mut cqe: Cqe, status: Status) {
        let entries = self.queue.entries() as usize;
        let phase = (self.done / entries).is_multiple_of(2);
        cqe.status = StatusField::new(status, phase);
        self.queue.buffers().1.write_value(self.done % entries * Cqe::SIZE, &cqe);
        self.done += 1;
    }
}

fn read(nsid: u32) -> Command {
    let mut command = Command::nvm(NvmOpcode::READ);
    command.sqe.nsid.0 = nsid;
    command
}

fn page() -> (Arc<Mapping>, Vec<MappedArea>) {
    let mapping = Arc::new(Mapping::anonymous(PAGE_SIZE).unwrap());
    (Arc::clone(&mapping), vec![MappedArea { offset: 0x1000, mapping }])
}

#[test]
fn both_queues_wrap_and_the_phase_inverts() {
    let (doorbells, areas) = page();
    let word = |offset: u64| crate::shared::SharedU32::new(&doorbells, offset as usize - 0x1000).unwrap().load();
    let mut bench = Bench::new(4, areas, PAGE_SIZE);
    for round in 0..23u32 {
        assert!(bench.queue.next_completion().unwrap().is_none(), "nothing posted in round {round}");
        let cid = bench.queue.submit(&read(round)).unwrap();
        assert_eq!(word(SQ_BELL), round % 4, "not rung yet");
        bench.queue.ring().unwrap();
        assert_eq!(word(SQ_BELL), (round + 1) % 4);
        let sqe = bench.entry(round % 4);
        assert_eq!((sqe.nsid.0, sqe.cid, sqe.opcode), (round, cid, NvmOpcode::READ.0));
        bench.post(cid, Status::SUCCESS, ((round + 1) % 4) as u16);
        let cqe = bench.queue.next_completion().unwrap().expect("posted");
        assert_eq!((cqe.cid, cqe.dw0, cqe.status()), (cid, u32::from(cid.0) + 100, Status::SUCCESS));
        bench.queue.ring().unwrap();
        assert_eq!(word(CQ_BELL), (round + 1) % 4);
    }
    assert!(bench.posted.take().is_empty(), "mapped doorbells need no message");
}

#[test]
fn a_queue_in_the_controllers_memory_holds_the_same_entries() {
    let mapping = Arc::new(Mapping::anonymous(2 * PAGE_SIZE).unwrap());
    let inside = ControllerMemory::at(&mapping, 0x4000_0000);
    let mut bench = Bench::full(4, page().1, PAGE_SIZE, Some(&inside));
    assert!(bench.queue.is_in_controller());
    assert_eq!(bench.queue.sq_range(), DmaRange { iova: 0x4000_0000, len: PAGE_SIZE });
    for round in 0..6_u32 {
        let mut command = read(round);
        command.sqe.cdw15 = 0xa5a5_0000 + round;
        command.sqe.mptr = 0x1122_3344_5566_7788;
        let cid = bench.queue.submit(&command).unwrap();
        bench.queue.ring().unwrap();
        let mut bytes = [0; Sqe::SIZE];
        // SAFETY: the mapping has two pages, which nobody writes meanwhile.
        unsafe { mapping.segment((round % 4) as usize * Sqe::SIZE, Sqe::SIZE) }.unwrap().read_at(0, &mut bytes);
        assert_eq!(bytes, Sqe { cid, ..command.sqe }.as_bytes());
        bench.post(cid, Status::SUCCESS, ((round + 1) % 4) as u16);
        bench.queue.next_completion().unwrap().expect("posted");
    }
}

#[test]
fn a_full_queue_refuses_and_out_of_order_completions_free_their_identifiers() {
    let (_, areas) = page();
    let mut bench = Bench::new(4, areas, PAGE_SIZE);
    let cids: Vec<_> = (0..3).map(|nsid| bench.queue.submit(&read(nsid)).unwrap()).collect();
    assert!(matches!(bench.queue.submit(&read(9)), Err(QueueError::Full { qid: QID, capacity: 3 })));
    bench.post(cids[1], Status::SUCCESS, 3);
    assert_eq!(bench.queue.next_completion().unwrap().unwrap().cid, cids[1]);
    assert_eq!(bench.queue.in_flight(), 2);
    assert_eq!(bench.queue.submit(&read(9)).unwrap(), cids[1]);
    assert_eq!(bench.entry(3).nsid.0, 9);
}

#[test]
fn completions_that_cannot_be_are_errors() {
    let good = |cid| Cqe { sqhd: 1, sqid: QID, cid, ..Cqe::default() };
    let bad: [fn(&mut Cqe); 4] =
        [|cqe| cqe.cid = CommandId(2), |cqe| cqe.cid = CommandId(0xffff), |cqe| cqe.sqid = QueueId(1), |cqe| cqe.sqhd = 4];
    for spoil in bad {
        let mut bench = Bench::new(4, page().1, PAGE_SIZE);
        let cid = bench.queue.submit(&read(1)).unwrap();
        let mut cqe = good(cid);
        spoil(&mut cqe);
        bench.post_entry(cqe, Status::SUCCESS);
        assert!(matches!(bench.queue.next_completion(), Err(QueueError::BadCompletion { qid: QID, .. })));
        assert_eq!(bench.queue.in_flight(), 1, "the command is still in flight");
        bench.post_entry(good(cid), Status::SUCCESS);
        assert_eq!(bench.queue.next_completion().unwrap().unwrap().cid, cid);
        bench.post_entry(good(cid), Status::SUCCESS);
        assert!(matches!(bench.queue.next_completion(), Err(QueueError::BadCompletion { .. })), "completed twice");
    }
}

/// They may be there before the command's own end is, however late it is looked for.
#[test]
fn who_waits_passes_over_what_cannot_be_and_counts_it() {
    let mut bench = Bench::new(8, page().1, PAGE_SIZE);
    bench.queue.timeout = Duration::ZERO;
    let cids = [1, 2].map(|nsid| bench.queue.submit(&read(nsid)).unwrap());
    bench.post(CommandId(5), Status::SUCCESS, 2);
    // Of the other one, which is not waited for, but there is no such head.
    bench.post(cids[1], Status::SUCCESS, 8);
    bench.post(cids[0], Status::SUCCESS, 2);
    assert_eq!(bench.queue.wait_for(cids[0]).unwrap().cid, cids[0]);
    bench.post(CommandId(6), Status::SUCCESS, 2);
    bench.post(cids[1], Status::SUCCESS, 2);
    assert!(bench.queue.take(cids[1]).unwrap());
    let passed_over = bench.queue.take_passed_over();
    let is_last = |cqe: Cqe| cqe.cid == CommandId(6);
    assert!(
        matches!(passed_over, Some((3, QueueError::BadCompletion { qid: QID, cqe })) if is_last(cqe)),
        "{passed_over:?}"
    );
    assert!(bench.queue.take_passed_over().is_none(), "it is told of once");
}

#[test]
fn a_bad_completion_of_the_command_itself_ends_the_wait() {
    let mut bench = Bench::new(8, page().1, PAGE_SIZE);
    let cid = bench.queue.submit(&read(1)).unwrap();
    bench.post(cid, Status::SUCCESS, 8);
    let bad = bench.queue.wait_for(cid).unwrap_err();
    assert!(matches!(bad, QueueError::BadCompletion { qid: QID, cqe } if cqe.cid == cid), "{bad}");
    assert_eq!((bench.queue.in_flight(), bench.queue.take_passed_over().is_none()), (1, true));
}

#[test]
fn messages_ring_the_head_first_and_only_what_moved() {
    let mut bench = Bench::new(4, Vec::new(), PAGE_SIZE);
    bench.queue.ring().unwrap();
    assert!(bench.posted.take().is_empty());
    let first = bench.queue.submit(&read(1)).unwrap();
    bench.queue.submit(&read(2)).unwrap();
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(SQ_BELL, 2)]);
    bench.post(first, Status::SUCCESS, 1);
    bench.queue.next_completion().unwrap().unwrap();
    bench.queue.submit(&read(3)).unwrap();
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(CQ_BELL, 1), (SQ_BELL, 3)]);
    bench.queue.ring().unwrap();
    assert!(bench.posted.take().is_empty());
    bench.queue.ring_tail_raw(0xdead_beef).unwrap();
    assert_eq!(bench.posted.take(), [(SQ_BELL, 0xdead_beef)]);
}

#[test]
fn shadow_doorbells_ring_only_past_the_event_index() {
    let mut bench = Bench::build(8, Vec::new(), PAGE_SIZE, (true, None));
    let (doorbells, events) = bench.shadow.take().unwrap();
    let at = usize::from(QID.0) * 8;
    bench.queue.submit(&read(1)).unwrap();
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(SQ_BELL, 1)], "the controller waits for entry 0");
    bench.queue.submit(&read(1)).unwrap();
    bench.queue.ring().unwrap();
    assert_eq!(doorbells.read_value::<u32>(at), 2);
    assert!(bench.posted.take().is_empty(), "it was told, and polls");
    events.write_value(at, &2u32);
    bench.queue.submit(&read(1)).unwrap();
    bench.queue.ring().unwrap();
    assert_eq!(bench.posted.take(), [(SQ_BELL, 3)]);
}

#[test]
fn every_command_in_flight_has_a_list_of_its_own() {
    let mut bench = Bench::new(4, page().1, 4 * PAGE_SIZE);
    let data = |iova| DmaRange { iova, len: 4 * PAGE_SIZE };
    let command = |iova| Command::nvm(NvmOpcode::WRITE).with_data(data(iova));
    bench.queue.submit(&command(0x10_0000)).unwrap();
    bench.queue.submit(&command(0x20_0000)).unwrap();
    let lists = bench.queue.lists.buffer().unwrap();
    for (index, base) in [(0, 0x10_0000), (1, 0x20_0000)] {
        let pointer = bench.entry(index).dptr;
        assert_eq!(pointer.prp1, base);
        let offset = usize::try_from(pointer.prp2 - lists.iova()).unwrap();
        let entries = lists.read_value::<[u64; 4]>(offset);
        assert_eq!(entries, [base + 0x1000, base + 0x2000, base + 0x3000, 0]);
    }
    let odd = Command::nvm(NvmOpcode::WRITE).with_data(DmaRange { iova: 2, len: 512 });
    assert!(matches!(bench.queue.submit(&odd), Err(QueueError::Prp { .. })));
    assert_eq!(bench.queue.in_flight(), 2, "the refused command is not in flight");
}

#[test]
fn pieces_go_as_an_sgl_whose_list_is_the_commands_own() {
    let mut bench = Bench::new(4, page().1, 4 * PAGE_SIZE);
    let write = |len| Command::nvm(NvmOpcode::WRITE).with_data(DmaRange { iova: 0, len });
    let pieces = |base| [DmaRange { iova: base, len: 500 }, DmaRange { iova: base + 0x1004, len: 524 }];
    assert_eq!(bench.queue.sgl(), Some(SglLimits { granularity: 4, pieces: 256 }));
    bench.queue.submit_sgl(&write(1024), pieces(0x10_0000)).unwrap();
    bench.queue.submit_sgl(&write(1024), pieces(0x20_0000)).unwrap();
    bench.queue.submit_sgl(&write(500), pieces(0x30_0000).into_iter().take(1)).unwrap();
    let lists = bench.queue.lists.buffer().unwrap();
    for (index, base) in [(0, 0x10_0000), (1, 0x20_0000)] {
        let sqe = bench.entry(index);
        assert_eq!(sqe.flags.psdt(), Psdt::SGL_MPTR_CONTIGUOUS);
        let segment = sqe.dptr.sgl1();
        assert_eq!(segment, SglDescriptor::last_segment(segment.address, 32));
        let list = lists.read_value::<[SglDescriptor; 2]>(usize::try_from(segment.address - lists.iova()).unwrap());
        assert_eq!(list, pieces(base).map(|piece| SglDescriptor::data_block(piece.iova, piece.len as u32)));
    }
    assert_eq!(bench.entry(2).dptr.sgl1(), SglDescriptor::data_block(0x30_0000, 500));
    bench.post(CommandId(2), Status::SUCCESS, 3);
    bench.queue.next_completion().unwrap().unwrap();
    let refused = bench.queue.submit_sgl(&write(1025), pieces(0x10_0000)).unwrap_err();
    assert!(matches!(refused, QueueError::Sgl { source: SglError::Length { len: 1024, expected: 1025 }, .. }), "{refused}");
    assert_eq!(bench.queue.in_flight(), 2, "the refused command is not in flight");
}

#[test]
fn waiting_for_one_command_keeps_the_others_completions() {
    let mut bench = Bench::new(8, page().1, PAGE_SIZE);
    let cids: Vec<_> = (0..3).map(|nsid| bench.queue.submit(&read(nsid)).unwrap()).collect();
    for cid in [cids[2], cids[0], cids[1]] {
        bench.post(cid, Status::LBA_OUT_OF_RANGE, 3);
    }
    assert_eq!(bench.queue.wait_for(cids[1]).unwrap().cid, cids[1]);
    assert_eq!(bench.queue.wait_for(cids[0]).unwrap().cid, cids[0], "from those kept");
    assert_eq!(bench.queue.next_completion().unwrap().unwrap().cid, cids[2]);
    assert_eq!(bench.queue.in_flight(), 0);
}

#[test]
fn a_status_that_is_not_success_is_an_error_with_the_completion() {
    let mut bench = Bench::new(4, page().1, PAGE_SIZE);
    // The first identifier is 0: its completion can lie there before the command does.
    bench.post(CommandId(0), Status::COMPARE_FAILURE.do_not_retry(), 1);
    let error = bench.queue.execute(&Command::nvm(NvmOpcode::COMPARE)).unwrap_err();
    assert_eq!(error.status().map(Status::code), Some(Status::COMPARE_FAILURE));
    let QueueError::Failed { opcode, cqe, .. } = error else { panic!("{error}") };
    assert_eq!((opcode, cqe.dw0), (NvmOpcode::COMPARE.0, 100));
}
