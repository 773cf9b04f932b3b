//! The suite that every volume passes, through the NVMe controller that shows one to a guest: each request goes as commands of our
//! own driver through a real socket and a real shard. What the controller does to data, and what an engine does in its place, is as
//! good as the volume behind it.

mod house;

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard},
    task::Poll,
    time::Instant,
};

use millrace_backends::MemoryVolume;
use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError,
    check,
    conformance::{self, Subject, SyncHarness, Wanted},
    copy_by_bounce, future_bytes, helpers_scratch_bytes, pieces,
};
use millrace_driver::{Command, Controller, DmaBuffer, Namespace, QueuePair};
use millrace_frontends::nvme::{CardSpec, DoorbellMode};
use millrace_memory::SegmentCursor;
use millrace_nvme_spec::{command::Cqe, status::Status};

use self::house::{CARDS, House, PATIENCE};

const SEED: u64 = 20_260_731;
/// Bytes of a command at most: an engine's.
const MOST: usize = 128 << 10;
/// Buffers, and so commands that move data at the same time.
const BUFFERS: usize = 12;

/// A guest's queue, and what came out of it.
struct Lane {
    queue: QueuePair,
    buffers: Vec<DmaBuffer>,
    /// Whose command has an identifier, by numbers that are used once.
    owners: HashMap<u16, u64>,
    ended: HashMap<u64, Cqe>,
    begun: u64,
}

impl Lane {
    fn begin(&mut self, command: &Command) -> u64 {
        let cid = self.queue.submit(command).expect("a command that can be");
        self.queue.ring().expect("ringing");
        self.begun += 1;
        self.owners.insert(cid.0, self.begun);
        self.begun
    }

    fn look(&mut self) {
        while let Some(cqe) = self.queue.next_completion().expect("a completion that fits") {
            let owner = self.owners.remove(&cqe.cid.0).expect("a command that was begun");
            self.ended.insert(owner, cqe);
        }
        self.queue.ring().expect("ringing");
    }
}

/// A disk as a guest sees it.
struct Seen {
    lane: Mutex<Lane>,
    disk: Namespace,
    block_size: BlockSize,
    // They go last.
    _kept: Mutex<(Controller, House)>,
}

impl Seen {
    fn new(card: Option<CardSpec>, wanted: Wanted) -> Self {
        let bytes = wanted.blocks << wanted.block_size.shift();
        let volume = MemoryVolume::create("disk", bytes, wanted.block_size).expect("a volume");
        let house = House::with(DoorbellMode::Shared, card, volume);
        let (controller, disk, queue) = house.guest();
        let buffers = (0..BUFFERS).map(|_| controller.memory().alloc(MOST).expect("memory")).collect();
        let lane = Lane { queue, buffers, owners: HashMap::new(), ended: HashMap::new(), begun: 0 };
        Self { lane: Mutex::new(lane), disk, block_size: wanted.block_size, _kept: Mutex::new((controller, house)) }
    }

    fn lane(&self) -> MutexGuard<'_, Lane> {
        self.lane.lock().expect("no panic")
    }

    /// Has a command carried out, beside others.
    async fn run(&self, command: &Command) -> Result<(), BlockError> {
        let deadline = Instant::now() + PATIENCE;
        let mut number = None;
        let cqe = poll_fn(|task| {
            let mut lane = self.lane();
            lane.look();
            if number.is_none() && lane.queue.in_flight() < lane.queue.capacity() {
                number = Some(lane.begin(command));
            }
            if let Some(cqe) = number.and_then(|number| lane.ended.remove(&number)) {
                return Poll::Ready(cqe);
            }
            assert!(Instant::now() < deadline, "a command never completed: {:?}", command.sqe);
            task.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        match cqe.status().code() {
            Status::SUCCESS => Ok(()),
            Status::COMPARE_FAILURE => Err(BlockError::Miscompare),
            other => panic!("{other}: {:?}", command.sqe),
        }
    }

    async fn moving(&self, _: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let mut place = SegmentCursor::new(request.segments);
        for (at, count) in pieces(&self.geometry(), request.count, MOST as u64) {
            let (lba, len) = (Lba(request.lba.0 + at), (count.0 << self.block_size.shift()) as usize);
            let buffer = poll_fn(|task| {
                if let Some(buffer) = self.lane().buffers.pop() {
                    return Poll::Ready(buffer);
                }
                task.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
            let data = buffer.slice(0, len);
            let command = match request.operation {
                Operation::Write { fua: true } => self.disk.write_fua(lba, data),
                Operation::Write { fua: false } => self.disk.write(lba, data),
                Operation::Compare => self.disk.compare(lba, data),
                _ => self.disk.read(lba, data),
            };
            let reads = request.operation == Operation::Read;
            if reads {
                buffer.fill(0xee);
            } else {
                buffer.fill_from(&mut place, len);
            }
            let done = self.run(&command.expect("within the disk")).await;
            if reads {
                buffer.drain_to(&mut place, len);
            }
            self.lane().buffers.push(buffer);
            done?;
        }
        Ok(())
    }

    async fn erase(&self, _: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        for (at, count) in pieces(&self.geometry(), request.count, MOST as u64) {
            let command = self.disk.write_zeroes(Lba(request.lba.0 + at), count, false);
            self.run(&command.expect("within the disk")).await?;
        }
        Ok(())
    }

    async fn flush(&self, _: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        self.run(&self.disk.flush()).await
    }
}

impl Volume for Seen {
    fn name(&self) -> &'static str {
        "a disk as a guest sees it"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (self.block_size, self.disk.size());
        Geometry { block_size, blocks, read_only: false, volatile_cache: true, deallocate: false }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        match request.operation {
            Operation::Read | Operation::Write { .. } | Operation::Compare => {
                Step::Wait(cx.scratch.place_future(self.moving(cx, request)))
            }
            Operation::WriteZeroes { .. } => Step::Wait(cx.scratch.place_future(self.erase(cx, request))),
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(copy_by_bounce(self, cx, request))),
            Operation::Flush => Step::Wait(cx.scratch.place_future(self.flush(cx, request))),
            // An engine has no Dataset Management.
            Operation::Deallocate => Step::Done(Ok(())),
        }
    }

    fn scratch_bytes(&self) -> usize {
        helpers_scratch_bytes(future_bytes(Self::moving)).max(future_bytes(Self::erase)).max(future_bytes(Self::flush))
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "resizing by a guest" })
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "formatting here" })
    }

    fn usage(&self) -> Usage {
        Usage { allocated: 0 }
    }
}

fn conform(card: Option<CardSpec>) {
    let mut make = |wanted: Wanted| -> Option<Arc<dyn Volume>> {
        (!wanted.read_only).then(|| Arc::new(Seen::new(card, wanted)) as Arc<dyn Volume>)
    };
    let mut subject = Subject::new(SEED, &mut make);
    (subject.resizes, subject.formats) = (false, false);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
}

#[test]
fn through_the_controller() {
    conform(CARDS[0]);
}

#[test]
fn through_an_engine() {
    conform(CARDS[1]);
}
