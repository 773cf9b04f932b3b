//! What a throttle promises, in simulated time: every request that goes is noted with its time.

use std::{
    pin::Pin,
    sync::{Barrier, Mutex},
    task::Context,
    thread,
};

use millrace_block::{
    Asker, Scratch, Step, Switch,
    clock::SimulatedTime,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;
use proptest::prelude::*;

use super::*;
use crate::{
    graph::{ChangeFailed, Terms, change},
    meter,
    testing::{Load, drive},
};

const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// A cap, and what went so far: never more than its rate and a bucket, or its largest request if that is more.
#[derive(Clone, Debug)]
struct Watch {
    cap: usize,
    rate: Rate,
    /// Tokens beyond the rate, times a second.
    excess: u128,
    last: u64,
    largest: u64,
    count: u64,
}

impl Watch {
    fn new(cap: usize, rate: Rate) -> Self {
        Self { cap, rate, excess: 0, last: clock::now(), largest: 0, count: 0 }
    }

    fn of(caps: &Caps) -> Vec<Self> {
        let rates = caps.rates.iter().enumerate();
        rates.filter_map(|(cap, rate)| Some(Self::new(cap, (*rate)?))).collect()
    }

    fn see(&mut self, writes: bool, bytes: u64) {
        let met = match self.cap {
            0 | 3 => true,
            1 | 4 => !writes,
            _ => writes,
        };
        let tokens = if counts_bytes(self.cap) { bytes } else { 1 };
        if !met {
            return;
        }
        let now = clock::now();
        let flown = u128::from(now - self.last) * u128::from(self.rate.per_second);
        self.excess = self.excess.saturating_sub(flown) + u128::from(tokens) * u128::from(SECOND);
        (self.last, self.count, self.largest) = (now, self.count + tokens, self.largest.max(tokens));
        let bucket = u128::from(self.rate.burst_ns) * u128::from(self.rate.per_second);
        let most = bucket.max(u128::from(self.largest) * u128::from(SECOND));
        assert!(self.excess <= most, "{self:?}: beyond its bucket at {now}");
    }
}

/// A leg that notes what goes.
struct Noted {
    watches: Mutex<Vec<Watch>>,
    /// Operations and bytes, of reads and of writes.
    moved: Mutex<[(u64, u64); 2]>,
    /// Sum of the times at which they went.
    times: Mutex<u128>,
    /// It cannot give blocks back: zeroes are written.
    writes_zeroes: bool,
}

impl Noted {
    fn new(watches: Vec<Watch>) -> Arc<Self> {
        Arc::new(Self {
            watches: Mutex::new(watches),
            moved: Mutex::default(),
            times: Mutex::default(),
            writes_zeroes: false,
        })
    }

    fn moved(&self) -> [(u64, u64); 2] {
        *self.moved.lock().unwrap()
    }

    fn all(&self) -> (u64, u64) {
        let [reads, writes] = self.moved();
        (reads.0 + writes.0, reads.1 + writes.1)
    }
}

impl Volume for Noted {
    fn name(&self) -> &'static str {
        "noted"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BlockSize::B512, BlockCount(1 << 30));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: !self.writes_zeroes }
    }

    fn submit<'a>(&'a self, _: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let (writes, bytes) = (request.operation.is_write(), request.count.0 << 9);
        self.watches.lock().unwrap().iter_mut().for_each(|watch| watch.see(writes, bytes));
        let moved = &mut self.moved.lock().unwrap()[usize::from(writes)];
        *moved = (moved.0 + 1, moved.1 + bytes);
        *self.times.lock().unwrap() += u128::from(clock::now());
        Step::Done(Ok(()))
    }

    fn scratch_bytes(&self) -> usize {
        0
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

/// A throttle over a leg that notes what goes.
fn noted(caps_text: &str) -> (Arc<Noted>, Graph) {
    let leg = Noted::new(Watch::of(&caps(caps_text)));
    let volume: Arc<dyn Volume> = Arc::<Noted>::clone(&leg);
    let stack = format!("throttle({caps_text}) | disk:0");
    (leg, sharing(&SharedObjects::default(), "v", &stack, volume).unwrap())
}

/// Within one percent.
fn assert_close(count: u64, due: u64, what: &str) {
    assert!((due * 99..=due * 101).contains(&(count * 100)), "{what}: {count}, not {due}");
}

#[test]
fn ten_seconds_of_operations_are_within_one_percent() {
    let _own = ShardSlot::claim();
    for rate in [1, 2, 10, 333, 12_345, 200_000, 1_000_000] {
        let time = SimulatedTime::new();
        let (_, graph) = noted(&format!("iops={rate}"));
        let counts = drive(&time, &[Load::new(graph.volume(), 8, false, 1)], 10 * SECOND);
        assert_close(counts[0], rate * 10, "operations");
    }
}

#[test]
fn ten_seconds_of_bytes_are_within_one_percent() {
    let _own = ShardSlot::claim();
    for (rate, blocks) in [(1, 1), (512, 1), (100_000, 8), (10 << 20, 2048), (10 << 20, 1), (1 << 30, 256), (7 << 30, 2048)]
    {
        let time = SimulatedTime::new();
        let (_, graph) = noted(&format!("write_bandwidth={rate}"));
        let counts = drive(&time, &[Load::new(graph.volume(), 4, true, blocks)], 10 * SECOND);
        if rate * 10 < blocks << 9 {
            assert_eq!(counts[0], 1, "the bucket was full for one");
        } else {
            assert_close(counts[0] * (blocks << 9), rate * 10, "bytes");
        }
    }
}

#[test]
fn the_tightest_cap_decides_and_what_others_save_is_not_used_at_once() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let (leg, graph) = noted("iops=1000, bandwidth=100M");
    // Small ones first, so that large ones wait behind a thousand: the watch sees whether bytes burst then.
    let (small, large) = (Load::new(graph.volume(), 1000, false, 8), Load::new(graph.volume(), 128, false, 2048));
    drive(&time, &[small, large], SECOND);
    let before = leg.all();
    drive(&time, &[Load::new(graph.volume(), 64, true, 8)], 10 * SECOND);
    assert_close(leg.all().0 - before.0 - 64, 10_000, "operations");
    let before = leg.all();
    drive(&time, &[Load::new(graph.volume(), 64, true, 2048)], 10 * SECOND);
    assert_close((leg.all().1 - before.1) - (64 << 20), 1000 << 20, "bytes");
}

/// Devices that share a volume: whatever one asks for, each gets its own, also across a change, and all together what their group may have.
#[test]
fn each_device_has_caps_of_its_own() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let devices = [Asker::new(), Asker::new(), Asker::new()];
    let loads = |graph: &Graph| {
        let load =
            |(at, asker): (usize, &Asker)| Load { asker: *asker, ..Load::new(graph.volume(), 1 << (2 * at), false, 1) };
        devices.iter().enumerate().map(load).collect::<Vec<_>>()
    };
    let shared = SharedObjects::default();
    let leg = || -> Arc<dyn Volume> { Noted::new(Vec::new()) };
    let graph = sharing(&shared, "v", "throttle(iops=1000, each=device) | disk:0", leg()).unwrap();
    for count in drive(&time, &loads(&graph), 10 * SECOND) {
        assert_close(count, 10_000, "operations of a device");
    }
    let _group = Group::declare(&shared, "all", None, &caps("iops=1500")).unwrap();
    let graph = sharing(&shared, "w", "throttle(iops=1000, each=device, group=all) | disk:0", leg()).unwrap();
    let counts = drive(&time, &loads(&graph), 10 * SECOND);
    assert_close(counts.iter().sum(), 15_000, "operations of the group");
    assert!(counts.iter().all(|count| *count > 4500), "they take turns: {counts:?}");
    // Nobody is a device here, and is one for all that.
    assert_close(drive(&time, &[Load::new(graph.volume(), 8, false, 1)], 10 * SECOND)[0], 10_000, "operations of nobody");
    for (stack, why) in [("each=device, group=all", "for all together"), ("iops=5, each=tenant", "\"device\" is possible")] {
        let refused = format!("throttle({stack}) | disk:0").parse::<Node>().unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

/// What waits for its turn ends at once where nobody waits for it any more; others' requests wait on, and no token is lost.
#[test]
fn what_is_called_off_does_not_wait_for_its_turn() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let (leg, graph) = noted("iops=1, burst=1s");
    let (io, buffers, memory) = (SyncIo::new(1, false), BufferPool::new(1).unwrap(), Memory::new(512));
    let segments = [memory.segment(0, 512)];
    let scratches: Vec<_> = (0..20).map(|_| Scratch::new(graph.volume().scratch_bytes())).collect();
    let [gone, stays] = [Asker::new(), Asker::new()];
    let asker = |at: usize| if at % 4 == 3 { stays } else { gone };
    let read = || Request { operation: Operation::Read, lba: Lba(0), count: BlockCount(1), segments: &segments };
    let submit = |scratch| Some(graph.volume().submit(TaskContext::new(scratch, &buffers, &io), read()));
    let mut steps: Vec<_> = scratches.iter().map(submit).collect();
    let mut poll = || -> Vec<_> {
        let mut ended = Vec::new();
        for (at, place) in steps.iter_mut().enumerate() {
            let before = asker(at).enter();
            if let Some(step) = place.as_mut()
                && let Poll::Ready(result) = Pin::new(step).poll(&mut Context::from_waker(Waker::noop()))
            {
                ended.push((asker(at) == stays, result));
                *place = None;
            }
            before.enter();
        }
        ended
    };
    assert_eq!(poll(), [(false, Ok(()))], "the first has the token");
    assert_eq!(poll(), []);
    graph.volume().call_off(gone);
    // Who is first sleeps a little.
    let mut ended = poll();
    time.advance_to(clock::now() + 5 * MS);
    ended.extend((0..3).flat_map(|_| poll()));
    assert_eq!(ended, [(false, Err(BlockError::CalledOff)); 14]);
    for _ in 0..5 {
        time.advance_to(clock::now() + SECOND);
        assert_eq!((0..3).flat_map(|_| poll()).collect::<Vec<_>>(), [(true, Ok(()))]);
    }
    assert_eq!(leg.all().0, 6);
}

#[test]
fn zeroes_that_are_written_take_bytes_and_what_is_given_back_does_not() {
    let _own = ShardSlot::claim();
    for writes_zeroes in [true, false] {
        let time = SimulatedTime::new();
        let leg = Noted::new(if writes_zeroes { Watch::of(&caps("bandwidth=10M")) } else { Vec::new() });
        let mut leg = Arc::into_inner(leg).unwrap();
        leg.writes_zeroes = writes_zeroes;
        let leg = Arc::new(leg);
        let volume: Arc<dyn Volume> = Arc::<Noted>::clone(&leg);
        let graph = sharing(&SharedObjects::default(), "v", "throttle(bandwidth=10M, iops=1000) | disk:0", volume).unwrap();
        let load = Load { zeroes: true, ..Load::new(graph.volume(), 8, true, 256) };
        let counts = drive(&time, &[load], 10 * SECOND);
        assert_close(counts[0], if writes_zeroes { 800 } else { 10_000 }, "erasures of 128 KiB");
    }
}

#[test]
fn reads_that_wait_do_not_keep_writes() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let (_, graph) = noted("read_iops=10, iops=1000");
    let loads = [Load::new(graph.volume(), 32, false, 1), Load::new(graph.volume(), 4, true, 1)];
    let counts = drive(&time, &loads, 10 * SECOND);
    assert_close(counts[0], 100, "reads");
    assert_close(counts[1], 9900, "writes");
}

#[test]
fn large_and_small_and_many_and_few_take_turns() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    // A megabyte is more than the bucket holds: it needs all of it, and the small ones would take it away for ever.
    let (_, graph) = noted("bandwidth=10M");
    let loads = [Load::new(graph.volume(), 1, false, 2048), Load::new(graph.volume(), 64, true, 8)];
    let counts = drive(&time, &loads, 30 * SECOND);
    let bytes = (counts[0] << 20) + (counts[1] << 12);
    assert_close(bytes, 300 << 20, "bytes");
    assert!(counts[0] > 200 && counts[1] > 200, "{counts:?}");
}

#[test]
fn volumes_of_a_group_take_turns_however_many_requests_they_have() {
    let _own = ShardSlot::claim();
    for (cap, burst, seconds) in [(1000, "10ms", 30), (1000, "1us", 30), (100_000, "10ms", 2), (3, "1s", 300)] {
        let time = SimulatedTime::new();
        let shared = SharedObjects::default();
        let group_caps = caps(&format!("iops={cap}, burst={burst}"));
        let leg = Noted::new(Watch::of(&group_caps));
        let _group = Group::declare(&shared, "gold", None, &group_caps).unwrap();
        let make = |name: &str| {
            let volume: Arc<dyn Volume> = Arc::<Noted>::clone(&leg);
            sharing(&shared, name, "throttle(group=gold) | disk:0", volume).unwrap()
        };
        let graphs = ["a", "b", "c"].map(make);
        let deep = [1, 8, 64];
        let loads: Vec<_> = graphs.iter().zip(deep).map(|(graph, deep)| Load::new(graph.volume(), deep, false, 1)).collect();
        let counts = drive(&time, &loads, seconds * SECOND);
        let sum: u64 = counts.iter().sum();
        assert_close(sum, cap * seconds, "all of the group");
        // When much flows in during the shortest sleep, whoever looks first has more of it.
        let least = if cap > 10_000 { sum / 20 } else { sum * 30 / 100 };
        assert!(counts.iter().all(|count| *count >= least), "{cap} {burst}: {counts:?}");
    }
}

#[test]
fn levels_hold_all_at_once() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let shared = SharedObjects::default();
    let tenant = Group::declare(&shared, "tenant", None, &caps("iops=5000")).unwrap();
    let _group = Group::declare(&shared, "gold", Some(&tenant), &caps("write_iops=500, bandwidth=4M")).unwrap();
    let make = |name: &str, stack: &str| {
        let leg = Noted::new(Vec::new());
        let volume: Arc<dyn Volume> = Arc::<Noted>::clone(&leg);
        sharing(&shared, name, stack, volume).unwrap()
    };
    let own = make("own", "throttle(iops=300, group=gold) | disk:0");
    let gold = make("gold", "throttle(group=gold) | disk:0");
    let beside = make("beside", "throttle(group=tenant) | disk:0");
    let loads = [
        Load::new(own.volume(), 4, false, 1),
        Load::new(gold.volume(), 16, true, 1),
        Load::new(beside.volume(), 16, false, 1),
    ];
    let counts = drive(&time, &loads, 10 * SECOND);
    assert_close(counts[0], 3000, "its own cap");
    assert_close(counts[1], 5000, "the group's cap of writes");
    assert_close(counts[2], 42_000, "what is left of the tenant's");
    assert!(tenant.held_back() > 0);
}

#[test]
fn a_group_changes_within_a_refill_period() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let shared = SharedObjects::default();
    let group = Group::declare(&shared, "gold", None, &caps("iops=1")).unwrap();
    let leg: Arc<dyn Volume> = Noted::new(Vec::new());
    let graph = sharing(&shared, "v", "throttle(group=gold) | disk:0", leg).unwrap();
    let load = [Load::new(graph.volume(), 1, false, 1)];
    let period = REFILL.as_nanos() as u64;
    assert_eq!(drive(&time, &load, SECOND), [1]);
    // What waits for a second hears of it, and so do leases of before.
    for (cap, due) in [(10_000, 10_000), (100, 100), (1_000_000, 1_000_000), (50, 50)] {
        let begun = clock::now();
        group.set(&caps(&format!("iops={cap}")));
        drive(&time, &load, period);
        assert!(clock::now() - begun <= period + SECOND / cap, "nobody waits as it was before");
        assert_close(drive(&time, &load, 10 * SECOND)[0], due * 10, "since the change");
    }
}

/// What shards have at hand stays theirs when caps are set as they are, or others are changed: it is not taken of the bucket again.
#[test]
fn what_is_at_hand_stays_when_other_caps_change() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let shared = SharedObjects::default();
    let group = Group::declare(&shared, "gold", None, &caps("iops=1M, write_iops=1K, burst=100ms")).unwrap();
    let leg: Arc<dyn Volume> = Noted::new(Vec::new());
    let graph = sharing(&shared, "v", "throttle(group=gold) | disk:0", leg).unwrap();
    let begun = clock::now();
    for others in ["write_iops=1K", "write_iops=1K", "write_iops=2K", "write_bandwidth=1G, write_iops=2K"].repeat(100) {
        group.set(&caps(&format!("iops=1M, {others}, burst=100ms")));
        assert_eq!(drive(&time, &[Load::new(graph.volume(), 1, false, 1).once()], SECOND), [1]);
    }
    // The bucket holds 100,000, and a lease is hundreds.
    assert_eq!(clock::now(), begun, "something had to wait");
}

/// Leases leave room beside a large request, and that is given back when none has come for some time.
#[test]
fn after_large_requests_there_are_leases_again() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let chain = Chain { own: Level::default(), above: Box::default(), hurry: AtomicBool::new(false) };
    let set = |text: &str| chain.own.set(&caps(text).rates, &[]);
    set("bandwidth=100M");
    let small = Cost { writes: false, bytes: 512 };
    let goes = |cost: Cost| {
        while let Err(wait) = chain.pass(cost, None, false) {
            time.advance_to(clock::now() + wait.as_nanos() as u64);
        }
    };
    let has_lease = || {
        // The bucket is full.
        time.advance_to(clock::now() + SECOND);
        goes(small);
        chain.at_once(small)
    };
    assert!(has_lease());
    let large = Cost { bytes: 4 << 20, ..small };
    goes(large);
    assert!(!has_lease(), "it is more than the bucket");
    for _ in 0..3 {
        time.advance_to(clock::now() + 8 * SECOND);
        goes(large);
        assert!(!has_lease(), "they come again and again");
    }
    for _ in 0..8 {
        time.advance_to(clock::now() + 8 * SECOND);
        goes(small);
    }
    assert!(has_lease());
    goes(large);
    assert!(!has_lease());
    set("bandwidth=200M");
    assert!(has_lease(), "another bucket, which has seen nothing yet");
}

/// In another bucket, or in that of who takes over.
#[test]
fn what_was_spent_at_hand_before_a_change_is_not_there_again() {
    have_had_shards(8);
    let _own = ShardSlot::claim();
    for takes_over in [false, true] {
        let time = SimulatedTime::new();
        let chain = || Chain { own: Level::default(), above: Box::default(), hurry: AtomicBool::new(false) };
        let (old, new) = (chain(), chain());
        old.own.set(&caps("iops=1M, burst=10ms").rates, &[]);
        let small = Cost { writes: false, bytes: 512 };
        time.advance_to(clock::now() + SECOND);
        assert_eq!(old.pass(small, None, false), Ok(()));
        // The bucket is full again, and some are at hand.
        time.advance_to(clock::now() + SECOND);
        let mut went = 0;
        while old.at_once(small) {
            went += 1;
        }
        assert!(went > 0, "nothing was at hand");
        let rates = caps("iops=1M, burst=11ms").rates;
        let (now, from) = if takes_over { (&new, vec![&old.own]) } else { (&old, vec![]) };
        now.own.set(&rates, &from);
        while now.pass(small, None, false).is_ok() {
            went += 1;
        }
        assert!(went <= 10_000, "{went}, and the bucket held ten thousand");
    }
}

/// However room for large requests is taken and given back: never more than a bucket, which holds just one of them.
#[test]
fn leases_that_come_again_are_within_the_bucket() {
    have_had_shards(8);
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let (leg, graph) = noted("bandwidth=100M, iops=1M");
    let go = |depth: usize, blocks: u64| {
        drive(&time, &[Load::new(graph.volume(), depth, false, blocks).once()], SECOND);
    };
    for pause in [11, 1, 25, 9, 40, 10, 21] {
        for (depth, blocks) in [(100, 1), (1, 2048), (1, 1), (1, 1024), (600, 1), (2, 2048)] {
            go(depth, blocks);
        }
        time.advance_to(clock::now() + pause * SECOND);
        // It fades, and all is at hand or in the bucket.
        go(1, 1);
        time.advance_to(clock::now() + SECOND);
        for (depth, blocks) in [(1500, 1), (1, 2048), (1, 1)] {
            go(depth, blocks);
        }
    }
    assert_eq!(leg.all().0, 7 * (705 + 1 + 1502));
}

#[test]
fn what_went_in_a_hurry_is_owed() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let leg: Arc<dyn Volume> = Noted::new(Vec::new());
    let graph = sharing(&SharedObjects::default(), "v", "throttle(iops=100) | disk:0", leg).unwrap();
    let (_, throttle) = graph.services("throttle").remove(0);
    throttle.hurry(true);
    let begun = clock::now();
    assert_eq!(drive(&time, &[Load::new(graph.volume(), 51, true, 1).once()], SECOND), [51]);
    assert!(clock::now() < begun + MS, "nobody waits");
    throttle.hurry(false);
    let next = Load::new(graph.volume(), 1, true, 1).once();
    drive(&time, &[next], SECOND);
    assert!((begun + SECOND / 2..begun + SECOND / 2 + 20 * MS).contains(&clock::now()), "what went before is owed");
}

#[test]
fn another_cap_of_a_volume_takes_over_what_is_owed() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let shared = SharedObjects::default();
    let leg: Arc<dyn Volume> = Noted::new(Vec::new());
    let mut old = sharing(&shared, "v", "throttle(iops=100) | disk:0", Arc::clone(&leg)).unwrap();
    let (_, throttle) = old.services("throttle").remove(0);
    throttle.hurry(true);
    assert_eq!(drive(&time, &[Load::new(old.volume(), 51, true, 1).once()], SECOND), [51]);
    let new = changed(&shared, &mut old, "throttle(iops=1000) | disk:0", leg, true).unwrap();
    // Fifty are owed, at the new rate.
    let begun = clock::now();
    let next = Load::new(new.volume(), 1, true, 1).once();
    drive(&time, &[next], SECOND);
    let took = clock::now() - begun;
    assert!((50 * MS..55 * MS).contains(&took), "{took}");
}

/// Another stack in the place of one, or not, when it cannot be stored.
fn changed(
    shared: &SharedObjects,
    old: &mut Graph,
    stack: &str,
    leg: Arc<dyn Volume>,
    stored: bool,
) -> Result<Graph, ChangeFailed> {
    let stack: Node = stack.parse().unwrap();
    let size = Some(leg.geometry().bytes());
    let plan = crate::graph::Plan { volume: "v", stack: &stack, size, block_size: BlockSize::B512 };
    let spawner: Arc<dyn crate::background::Spawner> = Arc::<Kept>::default();
    let mut new = Graph::build(&plan, &Disks(vec![leg]), shared, &spawner, Some(old))?;
    let switch = Switch::new("v", Arc::clone(old.volume()));
    let mut store = || if stored { Ok(()) } else { Err("no room".to_owned()) };
    let terms = Terms {
        patience: Duration::from_secs(5),
        reformat: false,
        scratch: 1 << 20,
        below: &[],
        store: &mut store,
        restore: None,
    };
    change(&switch, old, &mut new, terms)?;
    Ok(new)
}

/// Microseconds of throttled time that a volume's uppermost meter says.
fn metered(graph: &Graph) -> u64 {
    meter::read(&graph.services("meter")[0].1).unwrap().all.throttled_us
}

#[test]
fn what_requests_wait_is_what_the_meter_says() {
    let _own = ShardSlot::claim();
    let (time, shared) = (SimulatedTime::new(), SharedObjects::default());
    let _group = Group::declare(&shared, "gold", None, &caps("write_bandwidth=10M")).unwrap();
    for stack in [
        "meter | throttle(iops=1000) | disk:0",
        "throttle(iops=1000) | meter | disk:0",
        "throttle(iops=3000) | meter | throttle(iops=777, group=gold) | disk:0",
    ] {
        let leg = Noted::new(Vec::new());
        let volume: Arc<dyn Volume> = Arc::<Noted>::clone(&leg);
        let graph = sharing(&shared, "v", stack, volume).unwrap();
        let (begun, depth) = (clock::now(), 40);
        let loads = [Load::new(graph.volume(), depth, false, 1).once(), Load::new(graph.volume(), depth, true, 1).once()];
        drive(&time, &loads, SECOND);
        let waits = *leg.times.lock().unwrap() - u128::from(begun) * 2 * depth as u128;
        assert_eq!((leg.all().0, u128::from(metered(&graph))), (80, waits / 1000), "{stack}");
        // The bucket holds ten, and each of the others waits a millisecond longer than the one before.
        assert!(waits > u128::from(MS) * (69 * 70 / 2), "{stack}: {waits}");
    }
}

#[test]
fn nothing_is_held_back_below_the_caps_or_by_another_volumes() {
    let _own = ShardSlot::claim();
    let (time, shared) = (SimulatedTime::new(), SharedObjects::default());
    let make = |name: &str, stack: &str| sharing(&shared, name, stack, Noted::new(Vec::new())).unwrap();
    let capped = make("capped", "meter | throttle(iops=100) | disk:0");
    let graphs = [make("free", "meter | disk:0"), make("wide", "meter | throttle(iops=1M, burst=1s) | disk:0")];
    let mut loads: Vec<_> = graphs.iter().map(|graph| Load::new(graph.volume(), 64, true, 1).once()).collect();
    loads.push(Load::new(capped.volume(), 8, true, 1).once());
    drive(&time, &loads, SECOND);
    assert_eq!(graphs.each_ref().map(metered), [0, 0]);
    assert!(metered(&capped) > 0);
}

#[test]
fn what_was_held_back_is_on_one_meter_however_stacks_change() {
    let _own = ShardSlot::claim();
    let (time, shared) = (SimulatedTime::new(), SharedObjects::default());
    let leg: Arc<dyn Volume> = Noted::new(Vec::new());
    let waits = |graph: &Graph| {
        let before = throttle_of(graph);
        drive(&time, &[Load::new(graph.volume(), 30, true, 1).once()], SECOND);
        throttle_of(graph) - before
    };
    let mut below = sharing(&shared, "v", "meter | throttle(iops=1000) | disk:0", Arc::clone(&leg)).unwrap();
    let first = waits(&below);
    assert!(first > 0 && metered(&below) == first / 1000);
    // A change that comes to nothing changes nothing.
    let moved = "throttle(iops=1000) | meter | disk:0";
    assert!(changed(&shared, &mut below, moved, Arc::clone(&leg), false).is_err());
    let second = first + waits(&below);
    assert_eq!(metered(&below), second / 1000);
    // The meter has another place, and counts anew; what was in the old one knows only what it saw.
    let mut above = changed(&shared, &mut below, moved, Arc::clone(&leg), true).unwrap();
    assert_eq!(metered(&above), 0);
    let third = waits(&above);
    assert!(third > 0);
    assert_eq!((metered(&below), metered(&above)), (second / 1000, third / 1000));
    // Another tenant's in the same place goes on, and so do a throttle's with other caps.
    let tenants = "throttle(iops=500) | meter(tenant=b) | disk:0";
    let tenants = changed(&shared, &mut above, tenants, leg, true).unwrap();
    let fourth = waits(&tenants);
    assert_eq!(metered(&tenants), (third + fourth) / 1000);
}

/// Nanoseconds that a volume's first throttle has held requests back.
fn throttle_of(graph: &Graph) -> u64 {
    held_back(&graph.services("throttle")[0].1).unwrap().1
}

/// A random throttle, and where what comes is drawn from: pauses, arrivals, sizes.
fn story() -> impl Strategy<Value = (String, u64)> {
    let cap = |name: &'static str, least: u64, most: u64| {
        proptest::option::of((least..=most).prop_map(move |rate| format!("{name}={rate}")))
    };
    let caps = vec![
        cap("iops", 100, 100_000),
        cap("read_iops", 50, 2000),
        cap("write_iops", 1000, 2_000_000),
        cap("bandwidth", 20 << 20, 1 << 30),
        cap("read_bandwidth", 10 << 20, 20 << 20),
        cap("write_bandwidth", 30 << 20, 1 << 34),
    ];
    let text = |(caps, burst, seed): (Vec<Option<String>>, u64, u64)| {
        let set: Vec<_> = caps.into_iter().flatten().chain([format!("burst={burst}us")]).collect();
        (set.join(", "), seed)
    };
    (caps, 0..50_000_u64, any::<u64>()).prop_map(text).prop_filter("a cap", |(text, _)| text.contains(','))
}

/// Has had that many shards in the process. A bucket is divided by the most there ever were: a test beside this one that had more than
/// any before would divide it anew in the middle of a story, which a daemon, whose shards are there before its volumes, never does.
fn have_had_shards(count: usize) {
    while ShardSlot::most() < count {
        let together = Barrier::new(count);
        thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    let _own = ShardSlot::claim();
                    together.wait();
                });
            }
        });
    }
}

/// What comes by itself, in bursts and with pauses; the leg looks at every cap.
fn nothing_goes_beyond(text: &str, seed: u64, own: bool) {
    have_had_shards(8);
    let _own = own.then(ShardSlot::claim);
    let time = SimulatedTime::new();
    let (leg, graph) = noted(text);
    let mut random = Random::new(seed);
    let mut asked = 0;
    for _ in 0..20 {
        let mut load = |writes| {
            let most = 1 << random.below(12);
            let (depth, blocks) = (1 + random.below(8) as usize, 1 + random.below(most));
            asked += depth as u64;
            Load::new(graph.volume(), depth, writes, blocks).once()
        };
        let loads = [load(false), load(true)];
        let end = clock::now() + random.below(40 * MS);
        drive(&time, &loads, SECOND);
        time.advance_to(end);
    }
    // Nothing is lost on the way.
    assert_eq!(leg.all().0, asked);
}

#[test]
fn what_was_spent_at_hand_before_a_larger_request_is_not_there_again() {
    nothing_goes_beyond("bandwidth=121027123, burst=806us", 14_880_130_908_320_401_413, true);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    #[test]
    fn never_more_than_a_bucket_above_any_cap_whatever_comes((text, seed) in story(), own in any::<bool>()) {
        nothing_goes_beyond(&text, seed, own);
    }
}
