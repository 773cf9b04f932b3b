use std::{
    cell::Cell,
    collections::VecDeque,
    fs::File,
    future::{Future, poll_fn},
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
    task::Wake,
};

use millrace_block::ShardSlot;
use millrace_driver::{
    Controller, MappedArea, Namespace, Options, PciAddress, QueueOptions, Transport, TransportError, VfioError,
    spec::{
        AdminOpcode, NamespaceId, NvmOpcode,
        features::FeatureId,
        registers::{Capabilities, offset},
    },
};

use millrace_memory::{Access, GuestAddress, GuestMemory, Protection, guard::Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::nvme::{
    Patience,
    disk::{Disk, sum},
    table::Mapper,
};

const BYTES: Option<SglLimits> = Some(SglLimits { granularity: 1, pieces: 3 });
const DWORDS: Option<SglLimits> = Some(SglLimits { granularity: 4, pieces: 3 });

fn reach(limits: Option<SglLimits>, pieces: &[(u64, usize)]) -> (usize, bool) {
    let mut survey = Survey::new(limits);
    for (iova, len) in pieces {
        if !survey.add(DmaRange { iova: *iova, len: *len }) {
            break;
        }
    }
    let Reach { len, sgl } = survey.reach(512);
    (len, sgl)
}

#[test]
fn a_command_that_never_ends_is_noticed_among_others_that_do() {
    let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds));
    let mut slots: Vec<Slot> = (0..4).map(|_| Slot::default()).collect();
    let (patience, grace) = (Duration::from_secs(30), Duration::from_secs(10));
    assert_eq!(overdue(&mut slots, patience), None);
    (slots[2].begun, slots[2].cid) = (ago(40), CommandId(7));
    // Others come and go; one has completed and was not seen yet.
    (slots[0].begun, slots[1].begun, slots[1].status) = (ago(0), ago(50), Some(Status::SUCCESS));
    assert_eq!((stuck(&slots, grace), overdue(&mut slots, patience)), (None, Some(CommandId(7))));
    assert_eq!(
        (stuck(&slots, grace), overdue(&mut slots, patience)),
        (None, None),
        "it is asked for once, and has time to end"
    );
    slots[2].aborted = ago(11);
    assert!(stuck(&slots, grace).is_some_and(|time| time.as_secs() >= 40));
    slots[2].status = Some(Status::ABORT_REQUESTED);
    assert_eq!(stuck(&slots, grace), None);
}

#[test]
fn prps_are_used_where_they_say_as_much() {
    for limits in [None, BYTES, DWORDS] {
        assert_eq!(reach(limits, &[]), (0, false));
        assert_eq!(reach(limits, &[(0x1004, 8192)]), (8192, false));
        let pages = [(0x1e00, 512), (0x8000, 4096), (0x2000, 4096), (0x6000, 4096), (0x9000, 512)];
        assert_eq!(reach(limits, &pages), (13312, false));
    }
}

#[test]
fn an_sgl_says_what_prps_cannot() {
    let holes = [(0x1000, 512), (0x2000, 512), (0x3000, 1024)];
    assert_eq!(reach(None, &holes), (512, false));
    assert_eq!(reach(DWORDS, &holes), (2048, true));
    let odd = [(0x1001, 700), (0x2003, 324)];
    assert_eq!(reach(None, &odd), (0, false));
    assert_eq!(reach(DWORDS, &odd), (0, false));
    assert_eq!(reach(BYTES, &odd), (1024, true));
    // 512 bytes of them PRPs can say too.
    assert_eq!(reach(BYTES, &[(0x1000, 600), (0x2001, 423)]), (512, false));
}

#[test]
fn pieces_are_counted_and_neighbours_are_one() {
    let apart: Vec<(u64, usize)> = (0..5).map(|i| (i * 4096, 512)).collect();
    assert_eq!(reach(BYTES, &apart), (1536, true));
    let adjoin: Vec<(u64, usize)> = (0..5).map(|i| (i * 512 + 2, 512)).collect();
    assert_eq!(reach(BYTES, &adjoin), (2560, true));
    // What PRPs go on to say beyond them is theirs.
    let pages: Vec<(u64, usize)> = (0..5).map(|i| (i * 8192, 4096)).collect();
    assert_eq!(reach(BYTES, &pages), (5 * 4096, false));
}

/// A controller that says yes to each admin command, with zeroes for data, and completes nothing else by itself.
#[derive(Default)]
struct Nods {
    /// What it was told of memory, and where that starts.
    memory: Option<(File, u64)>,
    cc: u32,
    /// Its admin queues.
    queues: [u64; 2],
    done: u32,
    /// Queue pairs that it grants beside the first.
    more_queues: u32,
    /// It has been unplugged.
    gone: Arc<AtomicBool>,
    said: Arc<Said>,
}

/// What a controller says of its namespace.
#[derive(Default)]
struct Said {
    /// Bytes of a block, as a power of two; 0: all data are zeroes.
    block: AtomicU8,
    /// Times that it does not say anything.
    refusals: AtomicUsize,
    /// Times that it does not answer after that.
    silences: AtomicUsize,
    /// Commands that it had: whether that was a queue's, and not a question for the namespace.
    had: Mutex<Vec<bool>>,
}

impl Said {
    /// The status of an admin command, if it is answered; its data are written.
    fn answer(&self, sqe: &[u8; 64], data: impl FnOnce(u64, &[u8])) -> Option<u16> {
        let is_queue = sqe[0] == AdminOpcode::CREATE_IO_SQ.0;
        if !is_queue && (sqe[0] != AdminOpcode::IDENTIFY.0 || sqe[40] != 0) {
            return Some(0);
        }
        self.had.lock().unwrap().push(is_queue);
        let block = self.block.load(Ordering::Relaxed);
        if is_queue || block == 0 {
            return Some(0);
        }
        let is_left = |times: &AtomicUsize| {
            times.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        };
        if is_left(&self.refusals) {
            return Some(Status::INTERNAL_ERROR.into_bits() << 1);
        }
        if is_left(&self.silences) {
            return None;
        }
        let mut identify = [0; 131];
        identify[..8].copy_from_slice(&1000_u64.to_le_bytes());
        identify[130] = block;
        data(u64::from_le_bytes(sqe[24..32].try_into().unwrap()), &identify);
        Some(0)
    }
}

impl Nods {
    /// Completes the admin commands before `tail`. They are fewer than the queue has entries, and after one without an answer comes a reset.
    fn nod(&mut self, tail: u32) {
        let (memory, start) = self.memory.as_ref().unwrap();
        for at in u64::from(self.done)..u64::from(tail) {
            let mut sqe = [0; 64];
            memory.read_exact_at(&mut sqe, self.queues[0] - start + at * 64).unwrap();
            let write = |at: u64, data: &[u8]| memory.write_all_at(data, at - start).unwrap();
            let Some(status) = self.said.answer(&sqe, write).map(|status| status | 1) else { continue };
            let cid = u16::from_le_bytes([sqe[2], sqe[3]]);
            // Of the features only their number is set.
            let is_number = sqe[0] == AdminOpcode::SET_FEATURES.0 && sqe[40] == FeatureId::NUMBER_OF_QUEUES.0;
            let granted = if is_number { self.more_queues << 16 | self.more_queues } else { 0 };
            let cqe = u128::from(cid) << 96 | u128::from(at + 1) << 64 | u128::from(status) << 112 | u128::from(granted);
            memory.write_all_at(&cqe.to_le_bytes(), self.queues[1] - start + at * 16).unwrap();
        }
        self.done = tail;
    }
}

impl Transport for Nods {
    fn region_read(&mut self, _: u32, at: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        let value = match at {
            offset::CAP => Capabilities::new().with_mqes_z(63).with_to(1).with_css_nvm(true).into_bits(),
            offset::CC => self.cc.into(),
            offset::CSTS => u64::from(self.cc & 1),
            _ => 0,
        };
        buf.copy_from_slice(&value.to_le_bytes()[..buf.len()]);
        Ok(())
    }
    fn region_write(&mut self, _: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        match at {
            offset::CC => {
                self.cc = u32::from(data[0]);
                if self.cc & 1 == 0 {
                    self.done = 0;
                }
            }
            offset::ASQ => self.queues[0] = u64::from_le_bytes(data.try_into().unwrap()),
            offset::ACQ => self.queues[1] = u64::from_le_bytes(data.try_into().unwrap()),
            _ => {}
        }
        Ok(())
    }
    fn region_write_posted(&mut self, _: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        if at == offset::DOORBELLS {
            self.nod(u32::from_le_bytes(data.try_into().unwrap()));
        }
        Ok(())
    }
    fn map_region(&mut self, _: u32) -> Result<Vec<MappedArea>, TransportError> {
        Ok(Vec::new())
    }
    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, _: u64) -> Result<(), TransportError> {
        self.memory = Some((fd.try_clone_to_owned().unwrap().into(), range.iova));
        Ok(())
    }
    fn dma_unmap(&mut self, _: DmaRange) -> Result<(), TransportError> {
        Ok(())
    }
    fn vectors(&mut self) -> Result<u32, TransportError> {
        Ok(0)
    }
    fn set_vectors(&mut self, _: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        Ok(())
    }
    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<(), TransportError> {
        (self.cc, self.done) = (0, 0);
        Ok(())
    }
    fn check(&mut self) -> Result<(), TransportError> {
        if self.gone.load(Ordering::Relaxed) { Err(VfioError::Removing(address()).into()) } else { Ok(()) }
    }
}

fn address() -> PciAddress {
    "ffff:ff:1f.7".parse().unwrap()
}

/// A queue with room for one command, and memory.
fn pair() -> (QueuePair, Controller) {
    let options = Options { memory_size: 1 << 20, ..Options::default() };
    let mut controller = Controller::attach(Nods::default(), &options).unwrap();
    controller.start().unwrap();
    (controller.create_queue_pair(&QueueOptions { entries: 2, ..QueueOptions::default() }).unwrap(), controller)
}

/// A lane with room for one command, and one buffer.
fn lane() -> Lane {
    let (pair, controller) = pair();
    Lane::new(pair, vec![controller.memory().alloc(BOUNCE).unwrap()], true).unwrap()
}

/// Completes the command in flight; `nth`: how many have completed on this queue before.
fn complete(lane: &Lane, nth: usize) {
    assert_eq!(lane.state().pair.as_ref().unwrap().in_flight(), 1);
    complete_as(lane, nth, 0);
}

/// Completes a command with this identifier, be there one or not.
fn complete_as(lane: &Lane, nth: usize, cid: u16) {
    let state = lane.state();
    let pair = state.pair.as_ref().unwrap();
    let entries = pair.entries() as usize;
    let phase = u128::from((nth / entries).is_multiple_of(2));
    let cqe = u128::from(pair.id().0) << 80 | u128::from(cid) << 96 | phase << 112;
    pair.buffers().1.write_at(nth % entries * 16, &cqe.to_le_bytes());
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    HasBuffer,
    Placed,
    Done,
    Down,
}
use Stage::{Done, Down, HasBuffer, New, Placed};

/// A request as a task that is polled by hand.
struct Task<'a> {
    future: Option<Pin<Box<dyn Future<Output = ()> + 'a>>>,
    stage: Rc<Cell<Stage>>,
    woken: Arc<Woken>,
}

impl<'a> Task<'a> {
    fn new(lane: &'a Lane, bounces: bool) -> Self {
        let (stage, woken) = (Rc::new(Cell::new(New)), Arc::<Woken>::default());
        Self { future: Some(Box::pin(request(lane, bounces, Rc::clone(&stage)))), stage, woken }
    }

    fn direct(lane: &'a Lane) -> Self {
        Self::new(lane, false)
    }

    fn bouncing(lane: &'a Lane) -> Self {
        Self::new(lane, true)
    }

    /// Polls it, whether it was woken or not.
    fn poll(&mut self) -> Stage {
        self.woken.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(Arc::clone(&self.woken));
        if let Some(future) = &mut self.future
            && future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready()
        {
            self.future = None;
        }
        self.stage.get()
    }

    fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Polls it if it was woken.
    fn run(&mut self) -> Stage {
        if self.is_woken() { self.poll() } else { self.stage.get() }
    }
}

/// A sleep that ends when the test polls the task.
async fn nap() {
    let mut again = false;
    poll_fn(|_| if std::mem::replace(&mut again, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

async fn buffer(lane: &Lane) -> Bounce<'_> {
    let mut standing = lane.for_buffer();
    loop {
        if let Some(bounce) = lane.buffer(&mut standing).await {
            return bounce;
        }
        nap().await;
    }
}

async fn request(lane: &Lane, bounces: bool, stage: Rc<Cell<Stage>>) {
    let command = Command::nvm(NvmOpcode::READ);
    let bounce = if bounces { Some(buffer(lane).await) } else { None };
    stage.set(HasBuffer);
    let data = bounce.as_ref().map_or(Data::None, |bounce| Data::Bounce(bounce, 512));
    let mut standing = lane.for_place();
    let begun = loop {
        match lane.begin(&mut standing, &|| true, &command, &data).await {
            Begun::Full => nap().await,
            begun => break begun,
        }
    };
    let Begun::Flight(ticket) = begun else { return stage.set(Down) };
    stage.set(Placed);
    while !matches!(poll_fn(|cx| lane.poll_end(ticket, cx)).await, Turn::Done(_)) {
        let mut again = false;
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if std::mem::replace(&mut again, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
    stage.set(Done);
}

#[test]
fn who_has_a_buffer_and_who_wants_one_do_not_stand_in_each_others_way() {
    let lane = lane();
    let [mut first, mut second] = [(); 2].map(|()| Task::direct(&lane));
    let [mut has, mut wants] = [(); 2].map(|()| Task::bouncing(&lane));
    assert_eq!((first.poll(), has.poll(), wants.poll()), (Placed, HasBuffer, New));
    assert_eq!(lane.commands(), 1, "who waits has begun nothing");
    complete(&lane, 0);
    // The place is promised to who has waited, and here comes somebody else.
    assert_eq!((first.poll(), has.is_woken()), (Done, true));
    second.poll();
    let mut completed = 1;
    for _ in 0..12 {
        for task in [&mut has, &mut wants, &mut second] {
            task.run();
        }
        if lane.state().pair.as_ref().unwrap().in_flight() == 1 {
            complete(&lane, completed);
            completed += 1;
        }
    }
    assert_eq!((has.run(), wants.run(), second.run(), completed), (Done, Done, Done, 4));
    assert_eq!(lane.commands(), 4);
}

#[test]
fn newcomers_come_after_those_who_wait() {
    let lane = lane();
    let mut tasks = VecDeque::from([Task::direct(&lane)]);
    assert_eq!(tasks[0].poll(), Placed);
    for nth in 0..10 {
        // Two more for each that ends, and the newest is polled first.
        tasks.extend([Task::direct(&lane), Task::direct(&lane)]);
        let newest = tasks.len() - 2;
        assert_eq!((tasks[newest].poll(), tasks[newest + 1].poll()), (HasBuffer, HasBuffer));
        complete(&lane, nth);
        assert_eq!(tasks.pop_front().unwrap().poll(), Done);
        let mut other = Task::direct(&lane);
        assert_eq!((other.poll(), tasks[0].is_woken(), tasks[1].is_woken()), (HasBuffer, true, false));
        // A task may be polled for another reason.
        assert_eq!((tasks[1].poll(), tasks[0].poll()), (HasBuffer, Placed));
        tasks.push_back(other);
    }
    complete(&lane, 10);
    for nth in 11.. {
        let Some(mut task) = tasks.pop_front() else { break };
        assert_eq!(task.run(), Done);
        if let Some(next) = tasks.front_mut() {
            assert_eq!(next.run(), Placed);
            complete(&lane, nth);
        }
    }
}

#[test]
fn what_a_task_was_promised_that_is_no_more_is_the_next_ones() {
    let lane = lane();
    let mut holder = Task::bouncing(&lane);
    let [mut one, mut two] = [(); 2].map(|()| Task::direct(&lane));
    let [mut three, mut four, mut five] = [(); 3].map(|()| Task::bouncing(&lane));
    assert_eq!((holder.poll(), one.poll(), two.poll()), (Placed, HasBuffer, HasBuffer));
    assert_eq!((three.poll(), four.poll(), five.poll()), (New, New, New));
    // One that nobody has called yet.
    drop(four);
    complete(&lane, 0);
    assert_eq!((holder.poll(), one.is_woken(), two.is_woken()), (Done, true, false));
    assert_eq!((three.is_woken(), five.is_woken()), (true, false));
    drop((one, three));
    assert_eq!((two.run(), five.run()), (Placed, HasBuffer));
    complete(&lane, 1);
    assert_eq!((two.run(), five.run()), (Done, Placed));
    complete(&lane, 2);
    assert_eq!(five.run(), Done);
}

#[test]
fn who_waits_hears_that_the_queue_is_gone_or_another() {
    let lane = lane();
    let start = || [(); 4].map(|()| Task::direct(&lane));
    // Gone while one is in flight.
    let mut tasks = start();
    assert_eq!(tasks.each_mut().map(Task::poll), [Placed, HasBuffer, HasBuffer, HasBuffer]);
    drop(lane.take_pair());
    lane.lose();
    assert_eq!(tasks.each_mut().map(Task::run), [Done, Down, Down, Down]);
    // Gone between a promise and the task's turn.
    lane.put_pair(pair().0);
    let mut tasks = start();
    assert_eq!(tasks.each_mut().map(Task::poll), [Placed, HasBuffer, HasBuffer, HasBuffer]);
    complete(&lane, 0);
    assert_eq!((tasks[0].run(), tasks[2].is_woken()), (Done, false));
    drop(lane.take_pair());
    lane.lose();
    assert_eq!(tasks.each_mut().map(Task::run), [Done, Down, Down, Down]);
    // Another: in the same order.
    lane.put_pair(pair().0);
    let mut tasks = start();
    assert_eq!(tasks.each_mut().map(Task::poll), [Placed, HasBuffer, HasBuffer, HasBuffer]);
    drop(lane.take_pair());
    lane.lose();
    lane.put_pair(pair().0);
    assert_eq!(tasks.each_mut().map(Task::run), [Done, Placed, HasBuffer, HasBuffer]);
    complete(&lane, 0);
    assert_eq!(tasks.each_mut().map(Task::run), [Done, Done, Placed, HasBuffer]);
    complete(&lane, 1);
    assert_eq!(tasks.each_mut().map(Task::run), [Done, Done, Done, Placed]);
    complete(&lane, 2);
    assert_eq!(tasks[3].run(), Done);
}

/// Its tasks are of several threads: each looks for itself, those who wait sleep meanwhile, and they go in their order all the same.
#[test]
fn on_the_common_lane_everybody_looks_for_himself() {
    let lane = Lane { exclusive: false, ..lane() };
    let mut tasks = [(); 3].map(|()| Task::direct(&lane));
    assert_eq!(tasks.each_mut().map(Task::poll), [Placed, HasBuffer, HasBuffer]);
    assert_eq!(tasks.each_ref().map(Task::is_woken), [true, false, false]);
    complete(&lane, 0);
    assert_eq!((tasks[2].poll(), tasks[2].is_woken()), (HasBuffer, false));
    assert_eq!((tasks[0].run(), tasks[2].poll(), tasks[1].poll(), tasks[2].poll()), (Done, HasBuffer, Placed, HasBuffer));
    complete(&lane, 1);
    assert_eq!((tasks[1].run(), tasks[2].poll()), (Done, Placed));
    complete(&lane, 2);
    assert_eq!(tasks[2].run(), Done);
    // So with buffers.
    let [mut has, mut wants] = [(); 2].map(|()| Task::bouncing(&lane));
    assert_eq!((has.poll(), wants.poll(), wants.is_woken()), (Placed, New, false));
    complete(&lane, 3);
    assert_eq!((has.run(), wants.poll()), (Done, Placed));
    complete(&lane, 4);
    assert_eq!(wants.run(), Done);
}

#[test]
fn misses_ask_ever_more_seldom_until_the_table_changes() {
    let (mut asking, mut now) = (Asking::default(), Instant::now());
    let mut pauses = Vec::new();
    for _ in 0..10 {
        assert!(asking.is_due(now));
        let (_, pause) = asking.last.unwrap();
        assert!(!asking.is_due(now + pause / 2));
        pauses.push(pause.as_millis());
        now += pause;
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80, 100, 100, 100, 100, 100]);
    let (asked, _) = asking.last.unwrap();
    asking.hurry();
    assert!(!asking.is_due(asked + ASK / 2) && asking.is_due(asked + ASK));
    // So as a lane asks.
    let (lane, (asks, asked)) = (lane(), sync_channel(8));
    let table = Table::new(None, asks);
    let segments = [Segment::sink()];
    let miss = || lane.direct(&table, &SegmentCursor::new(&segments), 512, 512);
    assert_eq!((miss(), asked.try_iter().count()), (Reach::default(), 1));
    let asked_last = || lane.state().asking.last.unwrap().1;
    lane.state().asking.last = Some((Instant::now(), SELDOM));
    miss();
    assert_eq!(asked_last(), SELDOM);
    table.clear();
    miss();
    assert!(asked_last() < SELDOM, "another table");
}

/// An IOMMU whose kernel takes as long to map memory as somebody keeps the other end of `until`.
struct Slow {
    begun: Sender<()>,
    until: Mutex<Receiver<()>>,
}

impl Mapper for Slow {
    fn interface(&self) -> &'static str {
        "a test"
    }
    fn place(&self, region: &Region) -> Result<DmaRange, VfioError> {
        Ok(DmaRange { iova: 1 << 40, len: region.len() })
    }
    fn map_part(&self, _: &Region, _: u64, _: Range<usize>) -> Result<(), VfioError> {
        let _ = self.begun.send(());
        let _ = self.until.lock().unwrap().recv();
        Ok(())
    }
    fn unmap(&self, _: DmaRange) -> Result<(), VfioError> {
        Ok(())
    }
}

#[test]
fn a_disk_is_watched_while_memory_is_mapped_for_it() {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 20).unwrap();
    let mut memory = GuestMemory::new();
    let all = Protection { read: true, write: true };
    memory.map(GuestAddress(0), 1 << 20, all, Some((file.as_fd(), 0))).unwrap();
    let start = memory.translate(GuestAddress(0), 4096, Access::Read).unwrap().as_ptr() as usize;
    let gone = Arc::<AtomicBool>::default();
    let (begun, has_begun) = channel();
    // Dropped before the memory, which does not go while it is being mapped.
    let (ends, until) = channel::<()>();
    let slow: Arc<dyn Mapper> = Arc::new(Slow { begun, until: Mutex::new(until) });
    let controller = Nods { gone: Arc::clone(&gone), ..Nods::default() };
    let disk = Disk::bring_up(address(), controller, Some(slow), Patience::default()).unwrap();
    disk.table.ask(start);
    has_begun.recv().unwrap();
    gone.store(true, Ordering::Relaxed);
    let patience = Instant::now() + Duration::from_secs(30);
    while !disk.is_gone() {
        assert!(Instant::now() < patience, "nobody looks at the disk while the kernel maps memory");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(ends);
    drop(memory);
    assert_eq!(disk.moved(), (0, 0));
}

#[test]
fn who_is_a_shard_in_passing_leaves_the_queues_to_the_shards() {
    let controller = Nods { more_queues: 1, ..Nods::default() };
    let disk = Disk::bring_up(address(), controller, None, Patience::default()).unwrap();
    let common = disk.lane();
    let passing = ShardSlot::claim_in_passing();
    assert!(std::ptr::eq(disk.lane(), common));
    drop(passing);
    let shard = ShardSlot::claim();
    assert!(!std::ptr::eq(disk.lane(), common), "the only queue of a shard's is taken");
    drop(shard);
    assert!(std::ptr::eq(disk.lane(), common));
}

/// A disk whose namespace has blocks of 512 bytes and a volume, and what its controller says from now on.
fn with_namespace(patience: Patience) -> (Arc<Disk>, Namespace, Arc<Said>) {
    let said = Arc::<Said>::default();
    let controller = Nods { said: Arc::clone(&said), ..Nods::default() };
    let disk = Disk::bring_up(address(), controller, None, patience).unwrap();
    said.block.store(9, Ordering::Relaxed);
    let namespace = disk.with(|controller| controller.namespace(NamespaceId(1))).unwrap().unwrap();
    assert!(disk.claim(&namespace));
    said.had.lock().unwrap().clear();
    (disk, namespace, said)
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < patience, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn after_a_reset_no_queue_is_made_before_it_is_known_what_the_namespace_is() {
    let (disk, namespace, said) = with_namespace(Patience::default());
    said.refusals.store(1, Ordering::Relaxed);
    said.block.store(12, Ordering::Relaxed);
    disk.ask_for_reset();
    wait_until("it is never known that the namespace was formatted", || namespace.size().0 == 0);
    wait_until("the queue is never made", || said.had.lock().unwrap().contains(&true));
    assert_eq!(said.had.lock().unwrap()[..3], [false, false, true]);
    assert!(!disk.is_gone());
}

#[test]
fn a_namespace_of_which_the_controller_says_nothing_is_asked_for_until_it_does() {
    let (disk, namespace, said) = with_namespace(Patience::default());
    // Once in each try of the reset, and at the next look.
    said.refusals.store(4, Ordering::Relaxed);
    disk.ask_for_reset();
    let is_known = || said.refusals.load(Ordering::Relaxed) == 0 && namespace.size().0 == 1000;
    wait_until("it is not asked for any more", is_known);
    assert_eq!((said.had.lock().unwrap()[..4].to_vec(), disk.resets()), (vec![false, false, false, true], 1));
    assert!(!disk.is_gone());
}

/// How a disk is made that is soon tired of waiting for an admin command: this controller answers at once, or never.
fn impatient() -> Patience {
    Patience { answer: Duration::from_millis(20), ..Patience::default() }
}

#[test]
fn a_controller_that_does_not_answer_is_reset_and_not_asked_again() {
    let (disk, _namespace, said) = with_namespace(impatient());
    // The question is refused, and then not answered at the next look.
    said.silences.store(1, Ordering::Relaxed);
    said.refusals.store(1, Ordering::Relaxed);
    disk.measure();
    wait_until("it is not reset", || said.had.lock().unwrap().contains(&true));
    assert_eq!((said.had.lock().unwrap()[..4].to_vec(), disk.resets()), (vec![false, false, false, true], 1));
    assert!(!disk.is_gone());
}

#[test]
fn a_controller_that_does_not_answer_after_three_resets_is_given_up() {
    let (disk, _namespace, said) = with_namespace(impatient());
    said.silences.store(usize::MAX, Ordering::Relaxed);
    disk.ask_for_reset();
    wait_until("it is not given up", || disk.is_gone());
    // Once in each try.
    assert_eq!((said.had.lock().unwrap().clone(), disk.resets()), (vec![false; 3], 1));
}

/// The controller completes as many commands that it does not have as nobody believes any more.
fn complete_strangely(lane: &Lane) {
    for nth in 0..STRANGE as usize {
        assert!(!lane.is_strange(), "after {nth}");
        complete_as(lane, nth, 99);
        assert!(!lane.state().drain(None), "nothing has ended");
    }
}

#[test]
fn completions_that_cannot_be_are_noted_and_counted() {
    let lane = lane();
    let mut task = Task::direct(&lane);
    assert_eq!((task.poll(), lane.troubles().is_none()), (Placed, true));
    complete_strangely(&lane);
    assert!(lane.is_strange());
    let (times, last) = lane.troubles().unwrap();
    assert!(times == STRANGE && matches!(last, QueueError::BadCompletion { .. }), "{times} times: {last}");
    assert!(lane.troubles().is_none(), "it is told of once");
    complete(&lane, STRANGE as usize);
    assert_eq!(task.poll(), Done);
    drop(lane.take_pair());
    lane.lose();
    lane.put_pair(pair().0);
    assert!(!lane.is_strange(), "another queue is believed anew");
}

/// The log has a line a second, and a disk looks ten times.
#[test]
fn troubles_that_are_not_told_yet_stay_counted() {
    let (lanes, (_, mut controller)) = ([lane(), lane()], pair());
    let strange = |lane: &Lane, nth| {
        complete_as(lane, nth, 99);
        lane.state().drain(None);
    };
    let troubles = || lanes.iter().filter_map(Lane::troubles);
    assert!(sum(None, troubles(), controller.admin_queue()).is_none());
    for lane in &lanes {
        strange(lane, 0);
    }
    let untold = sum(None, troubles(), controller.admin_queue());
    assert_eq!(untold.as_ref().map(|(times, _)| *times), Some(2));
    strange(&lanes[1], 1);
    // Those that an admin command's waiting has passed over are told with them.
    let admin = controller.admin_queue();
    let had = admin.execute(&Command::admin(AdminOpcode::IDENTIFY)).unwrap().sqhd;
    let at = usize::from(had) * 16;
    let cqe = 99_u128 << 96 | 1 << 112;
    admin.buffers().1.write_at(at, &cqe.to_le_bytes());
    assert!(controller.poll_event().unwrap().is_none());
    let untold = sum(untold, troubles(), controller.admin_queue());
    let untold = sum(untold, troubles(), controller.admin_queue());
    assert!(matches!(untold, Some((4, QueueError::BadCompletion { qid: QueueId::ADMIN, .. }))), "{untold:?}");
}

#[test]
fn a_controller_that_completes_what_it_does_not_have_is_reset_and_then_given_up() {
    let disk = Disk::bring_up(address(), Nods::default(), None, Patience::default()).unwrap();
    complete_strangely(disk.lane());
    let is_up_again = || disk.resets() == 1 && disk.lane().state().pair.is_some() && !disk.lane().is_strange();
    wait_until("it is not reset", is_up_again);
    assert!(!disk.is_gone());
    complete_strangely(disk.lane());
    wait_until("it is not given up", || disk.is_gone());
    assert_eq!(disk.resets(), 1);
}
