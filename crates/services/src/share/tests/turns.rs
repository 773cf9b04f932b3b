//! Who goes next: a disk that answers on command counts what each volume gets. No clock is asked.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, IoOperation, Lba, Operation, Request, Scratch, ShardSlot, Step,
    TaskContext, Usage, VolumeError,
    conformance::{Memory, SyncIo},
    future_bytes, placed_bytes,
};
use millrace_engine::{Engine, ShardConfig};
use millrace_memory::BufferPool;

use super::*;
use crate::{
    background::{Background, OnShards, Task},
    share::{line::Line, member::Member},
    throttle::{Caps, Group},
};

/// Requests wait until they are let go, the oldest first.
#[derive(Default)]
pub(super) struct OnCommand {
    open: AtomicU64,
    waiting: Mutex<VecDeque<u64>>,
    next: AtomicU64,
    /// The most that were there at once.
    pub(super) most: AtomicU64,
    blocks: u64,
}

impl OnCommand {
    fn let_go(&self, count: u64) {
        self.open.fetch_add(count, Ordering::Relaxed);
    }

    fn in_flight(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    async fn serve(&self) -> Result<(), BlockError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut waiting = self.waiting.lock().unwrap();
            waiting.push_back(number);
            self.most.fetch_max(waiting.len() as u64, Ordering::Relaxed);
        }
        poll_fn(|_| {
            let mut waiting = self.waiting.lock().unwrap();
            if waiting.front() != Some(&number) || self.open.load(Ordering::Relaxed) == 0 {
                return Poll::Pending;
            }
            waiting.pop_front();
            self.open.fetch_sub(1, Ordering::Relaxed);
            Poll::Ready(Ok(()))
        })
        .await
    }

    fn serve_bytes<'a, F: Future + 'a>(_: fn(&'a Self) -> F) -> usize {
        placed_bytes::<F>()
    }
}

impl Volume for OnCommand {
    fn name(&self) -> &'static str {
        "on command"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BlockSize::B512, BlockCount(self.blocks));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: true }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        // The table is read as zeroes, and everything else but reads by guests is done at once.
        if request.operation != Operation::Read || request.lba.0 < EXTENT >> 9 {
            request.segments.iter().filter(|_| request.operation == Operation::Read).for_each(|segment| segment.fill(0));
            return Step::Done(Ok(()));
        }
        Step::Wait(cx.scratch.place_future(self.serve()))
    }

    fn scratch_bytes(&self) -> usize {
        Self::serve_bytes(Self::serve)
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "resizing" })
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "formatting" })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Keeps so many reads of so many blocks in flight on each volume while the disk lets `total` of them go, one by one; how many
/// each volume got.
pub(super) fn served(disk: &OnCommand, volumes: &[(&Graph, usize, u64)], total: u64) -> Vec<u64> {
    let (io, buffers, memory) = (SyncIo::new(SEED, false), BufferPool::new(1).unwrap(), Memory::new(1 << 20));
    let segments: Vec<_> = volumes.iter().map(|(.., blocks)| [memory.segment(0, (blocks << 9) as usize)]).collect();
    let scratch = |graph: &Graph| Scratch::new(graph.volume().scratch_bytes());
    let scratches: Vec<Vec<Scratch>> =
        volumes.iter().map(|(graph, deep, _)| (0..*deep).map(|_| scratch(graph)).collect()).collect();
    let submit = |at: usize, slot: usize| {
        let request =
            Request { operation: Operation::Read, lba: Lba(0), count: BlockCount(volumes[at].2), segments: &segments[at] };
        volumes[at].0.volume().submit(TaskContext::new(&scratches[at][slot], &buffers, &io), request)
    };
    let mut steps: Vec<Vec<Option<Step<'_>>>> =
        (0..volumes.len()).map(|at| (0..volumes[at].1).map(|slot| Some(submit(at, slot))).collect()).collect();
    let mut served = vec![0; volumes.len()];
    let mut cx = Context::from_waker(Waker::noop());
    let mut ending = false;
    loop {
        for (at, steps) in steps.iter_mut().enumerate() {
            for (slot, place) in steps.iter_mut().enumerate() {
                let Some(step) = place else { continue };
                if Pin::new(step).poll(&mut cx).is_ready() {
                    served[at] += u64::from(!ending);
                    *place = None;
                    if !ending {
                        *place = Some(submit(at, slot));
                    }
                }
            }
        }
        ending |= served.iter().sum::<u64>() >= total;
        if ending && steps.iter().flatten().all(Option::is_none) {
            return served;
        }
        if disk.open.load(Ordering::Relaxed) == 0 && disk.in_flight() > 0 {
            disk.let_go(1);
        }
    }
}

pub(super) fn pool(depth: u64) -> (Arc<OnCommand>, Pool) {
    let disk = Arc::new(OnCommand { blocks: 64 * (EXTENT >> 9), ..OnCommand::default() });
    let leg: Arc<dyn Volume> = Arc::<OnCommand>::clone(&disk);
    let pool = Pool::open(&leg, &format!("disk(extent=16K, depth={depth})"), Reason::Create).unwrap();
    (disk, pool)
}

/// Each has its share within 2 %.
pub(super) fn assert_shares(served: &[u64], weights: &[u64]) {
    let (all, sum) = (served.iter().sum::<u64>(), weights.iter().sum::<u64>());
    for (served, weight) in served.iter().zip(weights) {
        let (got, due) = (served * sum * 100, all * weight);
        assert!((98 * due..102 * due).contains(&got), "{served} of {all} for weight {weight} of {sum}");
    }
}

#[test]
fn equal_volumes_get_equal_shares_however_deep_their_queues() {
    let _own = ShardSlot::claim();
    for depth in [1, 8] {
        let (disk, pool) = pool(depth);
        let volumes = ["a", "b", "c"].map(|name| pool.create(name, EXTENT));
        let deep = [16, 24, 60];
        let all: Vec<_> = volumes.iter().zip(deep).map(|(volume, deep)| (volume, deep, 8)).collect();
        let counts = served(&disk, &all, 6000);
        assert_shares(&counts, &[1, 1, 1]);
        assert_eq!(disk.most.load(Ordering::Relaxed), depth, "as many as the disk shall have, and not more");
    }
}

#[test]
fn weights_divide_the_disk_and_large_requests_cost_more() {
    let _own = ShardSlot::claim();
    let (disk, pool) = pool(4);
    let stacks = [("a", "share"), ("b", "share(weight=3)"), ("c", "share(weight=10)")];
    let volumes =
        stacks.map(|(name, stack)| pool.volume(name, stack, Some(EXTENT), Reason::Create).unwrap_or_else(|e| panic!("{e}")));
    let all: Vec<_> = volumes.iter().map(|volume| (volume, 32, 8)).collect();
    assert_shares(&served(&disk, &all, 14_000), &[1, 3, 10]);
    // 4 KiB against 16 KiB: equal bytes.
    let mixed = [(&volumes[0], 32, 8), (&volumes[1], 32, 32)];
    assert_shares(&served(&disk, &mixed, 7000), &[4, 3]);
}

/// What a turn costs is a whole number, and by these weights not what it should be.
#[test]
fn what_division_leaves_of_a_turn_is_not_lost() {
    let _own = ShardSlot::claim();
    for weights in [[700, 300], [1000, 820], [586, 293]] {
        let (disk, pool) = pool(4);
        let make = |at: usize| {
            let stack = format!("share(weight={})", weights[at]);
            pool.volume(&format!("v{at}"), &stack, Some(EXTENT), Reason::Create).unwrap_or_else(|error| panic!("{error}"))
        };
        let volumes = [make(0), make(1)];
        assert_shares(&served(&disk, &[(&volumes[0], 32, 8), (&volumes[1], 32, 8)], 10_000), &weights);
    }
}

#[test]
fn who_comes_late_gets_its_share_from_now_on_and_not_more() {
    let _own = ShardSlot::claim();
    let (disk, pool) = pool(2);
    let volumes = ["a", "b"].map(|name| pool.create(name, EXTENT));
    served(&disk, &[(&volumes[0], 16, 8)], 3000);
    assert_shares(&served(&disk, &[(&volumes[0], 16, 8), (&volumes[1], 16, 8)], 4000), &[1, 1]);
}

#[test]
fn a_disk_that_is_not_saturated_makes_nobody_wait() {
    let _own = ShardSlot::claim();
    let (disk, pool) = pool(64);
    let volumes = ["a", "b"].map(|name| pool.create(name, EXTENT));
    served(&disk, &[(&volumes[0], 20, 8), (&volumes[1], 40, 8)], 1000);
    assert_eq!(disk.most.load(Ordering::Relaxed), 60);
    for volume in &volumes {
        let facts = volume.tree().status.unwrap().facts;
        assert!(facts.contains(&("waited for a turn".to_owned(), "0 requests".to_owned())), "{facts:?}");
    }
}

/// A disk whose reads take a while on the shard's own clock.
#[derive(Default)]
struct Slow {
    now: AtomicU64,
    most: AtomicU64,
}

impl Slow {
    async fn nap(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        cx.io(IoOperation::Sleep(Duration::from_micros(20))).await;
        self.now.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Volume for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BlockSize::B512, BlockCount(64 * (EXTENT >> 9)));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: true }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if request.operation != Operation::Read || request.lba.0 < EXTENT >> 9 {
            request.segments.iter().filter(|_| request.operation == Operation::Read).for_each(|segment| segment.fill(0));
            return Step::Done(Ok(()));
        }
        Step::Wait(cx.scratch.place_future(self.nap(cx, request)))
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::nap)
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "resizing" })
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "formatting" })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Readers, and how often each reads. Where shards have no core each, a turn takes as long as the system leaves the shard waiting
/// whose turn it is.
const READERS: u64 = 30;
const ROUNDS: u64 = 20;

/// Reads a volume over and over.
fn reader(volume: &Arc<dyn Volume>, done: &Arc<AtomicU64>) -> Task {
    let (volume, done) = (Arc::clone(volume), Arc::clone(done));
    Task::new("reader", move |cx, _| {
        Box::pin(async move {
            let memory = Memory::new(4096);
            for _ in 0..ROUNDS {
                let segments = [memory.segment(0, 4096)];
                let (lba, count) = (Lba(0), BlockCount(8));
                let request = Request { operation: Operation::Read, lba, count, segments: &segments };
                let arena = cx.scratch.carve_rest();
                assert_eq!(volume.submit(cx.with_scratch(&arena), request).await, Ok(()));
                done.fetch_add(1, Ordering::Relaxed);
            }
        })
    })
}

#[test]
fn on_one_shard_and_on_several_nobody_is_forgotten() {
    let plain = ["share(min_iops=200)", "share(latency=10us, weight=2)", "share"];
    let grouped = ["share(group=silver)", "share(group=gold, weight=1000)", "share(min_iops=200, group=gold)"];
    for (shards, depth, stacks) in
        [(1, 1, plain), (1, 3, plain), (2, 1, plain), (3, 4, plain), (1, 2, grouped), (2, 1, grouped), (3, 4, grouped)]
    {
        let slow = Arc::<Slow>::default();
        let leg: Arc<dyn Volume> = Arc::<Slow>::clone(&slow);
        let pool = Pool::open(&leg, &format!("disk(extent=16K, depth={depth})"), Reason::Create).unwrap();
        let gold = Group::declare(&pool.shared, "gold", None, &Caps::default()).unwrap();
        let _silver = Group::declare(&pool.shared, "silver", Some(&gold), &Caps::default()).unwrap();
        let make = |(name, stack): (&str, &str)| pool.volume(name, stack, Some(EXTENT), Reason::Create);
        let volumes = [("a", stacks[0]), ("b", stacks[1]), ("c", stacks[2])]
            .map(|volume| make(volume).unwrap_or_else(|error| panic!("{error}")));
        let engine = Engine::start((0..shards).map(|index| ShardConfig::new(index, None)).collect()).unwrap();
        let done = Arc::<AtomicU64>::default();
        let tasks = (0..READERS as usize).map(|number| reader(volumes[number % 3].volume(), &done)).collect();
        let load = Background::start(tasks, &OnShards::new(engine.shards().to_vec()));
        let end = Instant::now() + PATIENCE;
        while done.load(Ordering::Relaxed) < READERS * ROUNDS {
            if Instant::now() >= end {
                // The tasks never end: whoever waited for that would hide why.
                std::mem::forget((load, engine));
                panic!("{shards} shards, depth {depth}: somebody waits for ever");
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert!(load.stop());
        engine.stop().unwrap();
        let most = slow.most.load(Ordering::Relaxed);
        assert!(most <= if shards == 1 { depth } else { 2 * depth + shards as u64 }, "{most} in flight, {shards} shards");
        let waited = volumes.iter().map(|volume| volume.tree().status.unwrap().facts.pop().unwrap().1);
        assert!(waited.into_iter().all(|waited| waited != "0 requests"), "the disk was saturated");
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Wakes(AtomicU64);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The front on a shard goes, when there is no room for the next one behind it; and the room that comes is made on another shard.
#[test]
fn who_comes_to_the_front_without_room_hears_of_room_on_another_shard() {
    let (line, member) = (Line::default(), Arc::<Member>::default());
    line.set_depth(64);
    line.change(|members| members.push(Arc::clone(&member))).unwrap();
    let own = ShardSlot::claim();
    let mut flights: Vec<_> = (0..4).map(|_| line.go(&member, 4096)).collect();
    assert!(member.adjust(Some(1), 64) && member.limit() == Some(2));
    let steps = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _own = ShardSlot::claim();
            let wakes = [Arc::<Wakes>::default(), Arc::<Wakes>::default()];
            let wakers = wakes.clone().map(Waker::from);
            let (mut first, mut second) = (pin!(line.wait(&member, 4096)), pin!(line.wait(&member, 4096)));
            assert!(first.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
            assert!(second.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_pending());
            steps.wait();
            steps.wait();
            let Poll::Ready(flight) = first.as_mut().poll(&mut Context::from_waker(&wakers[0])) else {
                panic!("there is room for one");
            };
            member.adjust(Some(1), 64);
            drop(flight);
            steps.wait();
            steps.wait();
            let woken = wakes[1].0.load(Ordering::Relaxed) > 0;
            assert!(woken && second.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_ready(), "woken: {woken}");
        });
        steps.wait();
        flights.truncate(1);
        steps.wait();
        steps.wait();
        drop(flights);
        steps.wait();
    });
    drop(own);
}

#[test]
fn who_waits_on_a_shard_without_requests_for_ones_on_another_shard_is_not_forgotten() {
    let (line, member) = (Line::default(), Arc::<Member>::default());
    line.set_depth(64);
    line.change(|members| members.push(Arc::clone(&member))).unwrap();
    let own = ShardSlot::claim();
    let flight = line.go(&member, 4096);
    assert!(member.adjust(Some(1), 64) && member.limit() == Some(1), "it has all that it may have on the disk");
    let (waits, ended) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _own = ShardSlot::claim();
            let wakes = Arc::<Wakes>::default();
            let (waker, mut next) = (Waker::from(Arc::clone(&wakes)), pin!(line.wait(&member, 4096)));
            let mut cx = Context::from_waker(&waker);
            assert!(next.as_mut().poll(&mut cx).is_pending());
            waits.wait();
            ended.wait();
            let woken = wakes.0.load(Ordering::Relaxed) > 0;
            assert!(woken && next.as_mut().poll(&mut cx).is_ready(), "woken: {woken}");
        });
        waits.wait();
        drop(flight);
        ended.wait();
    });
    drop(own);
}
