//! Throttle: caps on operations and bytes per second.
//!
//! ```text
//!   request ─► nobody waits here, and this shard has tokens of every level at hand? ─ yes ─► leg
//!                 │ no
//!                 └─► queue of its kind on its shard ─ first ─► buckets of every level have enough? ─ yes ─► leg
//!                                                                 │ no
//!                                                                 └─► sleeps until they should, looks again
//!   levels: the volume's own ─► its group ─► the group that that one is in ─► …
//! ```
//!
//! With `each=device` all this is there once for each device, but for the groups.
//!
//! `bucket.rs` decides, `level.rs` keeps what is decided about, `groups.rs` is what the control plane declares, `limit.rs` is of some of
//! those who ask a volume. Reads wait for reads, and writes for writes; who waits sleeps in parts, so that a change finds it.

mod bucket;
mod groups;
mod level;
mod limit;
#[cfg(test)]
mod tests;

use std::{
    cell::Cell,
    future::poll_fn,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Poll, Waker},
    time::Duration,
};

use millrace_block::{
    Asker, BlockCount, BlockError, BlockSize, Extent, Geometry, IoOperation, Lba, Metadata, MetadataFormat, Operation,
    PerShard, Request, Step, TaggedRequest, TaskContext, Usage, Volume, VolumeError, clock, future_bytes, tagged_bytes,
};

pub(crate) use self::bucket::time_of;
use self::{
    bucket::Rate,
    level::{CAPS, Chain, Cost, Front, Level, Rates, Sum, counts_bytes},
};
pub use self::{
    groups::{Group, Weight, groups_of},
    limit::limited,
};
use crate::{
    apart::{Apart, PLACES},
    background::Task,
    legs::{Leg, writes_zeroes},
    queue::Queue,
    service::{Build, Kind, Layout, Mount, Plan, Service, ServiceError, Status, Word, of_type},
    settings::{SettingError, Settings},
    shared::SharedObjects,
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "throttle",
    help: "caps on operations and bytes per second",
    legs: 1..=1,
    settings: &[
        Word { name: "iops", help: "operations per second" },
        Word { name: "read_iops", help: "reads per second" },
        Word { name: "write_iops", help: "writes per second" },
        Word { name: "bandwidth", help: "bytes per second: 100M" },
        Word { name: "read_bandwidth", help: "bytes read per second" },
        Word { name: "write_bandwidth", help: "bytes written per second" },
        Word { name: "burst", help: "what may be saved up while idle, as time at the full rate [10ms]" },
        Word { name: "each", help: "device: its own caps hold for each device that shows the volume, not for all together" },
        Word { name: "group", help: "a group (millrace group create) whose caps hold as well" },
    ],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["throttle(iops=1000000) | ?", "throttle(write_bandwidth=1G, read_iops=1M, burst=1s, each=device) | ?"],
    plan,
};

/// A bucket's refill period: who waits looks at least so often whether caps have changed, or nobody shall wait any more.
const REFILL: Duration = Duration::from_millis(5);
/// Shortest sleep of who waits. What flows in meanwhile is there for all who wait then.
const NAP: Duration = Duration::from_micros(20);
/// The leg is asked for its blocks' size each time: it may get another one without this throttle's knowing.
const ASKED: u32 = 0;
/// Longest burst.
const LONGEST_BURST: Duration = Duration::from_secs(3600);

/// Caps as they are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    rates: Rates,
}

impl Caps {
    /// Understands the settings `iops`, `read_iops`, `write_iops`, `bandwidth`, `read_bandwidth`, `write_bandwidth` and `burst`.
    ///
    /// # Errors
    /// The setting that cannot be, and why.
    pub fn read(settings: &Settings) -> Result<Self, SettingError> {
        let burst = settings.duration("burst")?.unwrap_or(Duration::from_millis(10));
        if burst > LONGEST_BURST {
            return Err(SettingError::new("burst", "an hour at most is possible"));
        }
        let mut rates = [None; 6];
        for (cap, name) in CAPS.iter().enumerate() {
            let rate = if counts_bytes(cap) { settings.size(name)? } else { settings.count(name)? };
            if rate == Some(0) {
                return Err(SettingError::new(name, "1 at least is possible; detach the volume to stop it"));
            }
            rates[cap] = rate.map(|per_second| Rate { per_second, burst_ns: burst.as_nanos() as u64 });
        }
        Ok(Self { rates })
    }

    /// Whether nothing is capped.
    pub fn is_empty(&self) -> bool {
        self.rates.iter().all(Option::is_none)
    }
}

#[derive(Debug)]
struct ThrottlePlan {
    caps: Caps,
    each: bool,
    group: Option<String>,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let (caps, group) = (Caps::read(settings)?, settings.text("group").map(str::to_owned));
    if caps.is_empty() && group.is_none() {
        return Err(SettingError::new("iops", "a throttle needs a cap, this one or another, or a group"));
    }
    if caps.is_empty() && settings.text("burst").is_some() {
        return Err(SettingError::new("burst", "it is of caps, and there are none: the group has its own"));
    }
    let each = match settings.text("each") {
        None => false,
        Some("device") if !caps.is_empty() => true,
        Some("device") => {
            return Err(SettingError::new("each", "it is of caps, and there are none: a group's are for all together"));
        }
        Some(_) => return Err(SettingError::new("each", "\"device\" is possible")),
    };
    Ok(Box::new(ThrottlePlan { caps, each, group }))
}

impl Plan for ThrottlePlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Same(vec![0])
    }

    fn keeps_nothing(&self) -> bool {
        true
    }

    fn leg_sizes(&self, size: u64, _: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        vec![Some(size)]
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let group = self.group.as_ref().map(|name| Group::find(build.shared, name)).transpose()?;
        let above: Box<[Arc<Level>]> = group.map_or_else(Box::default, |group| group.levels().into());
        let lane = |_| Lane {
            chain: Chain { own: Level::default(), above: above.clone(), hurry: AtomicBool::new(false) },
            queues: PerShard::default(),
        };
        let leg = build.only_leg();
        let of_volume = held_in(build.shared, build.volume);
        Ok(Arc::new(Throttle {
            shift: AtomicU32::new(leg.geometry().block_size.shift()),
            lanes: (0..if self.each { PLACES } else { 1 }).map(lane).collect(),
            // The one that follows it in a change has its devices in the same places.
            apart: build.shared.get(&format!("throttle/apart/{}", build.name), Apart::default),
            name: build.name,
            leg,
            caps: self.caps,
            group: self.group.clone(),
            waits: PerShard::default(),
            of_volume,
        }))
    }
}

/// What waiting has cost.
#[derive(Default)]
struct Waits {
    requests: AtomicU64,
    nanoseconds: AtomicU64,
}

/// Caps, and who waits for them.
struct Lane {
    chain: Chain,
    /// Reads and writes that wait.
    queues: PerShard<[Queue; 2]>,
}

impl Lane {
    fn queue(&self, cost: Cost) -> &Queue {
        &self.queues.here().0[usize::from(cost.writes)]
    }

    fn waiting(&self, cost: Cost) -> &AtomicU64 {
        &self.chain.own.leases.here().0.waiting[usize::from(cost.writes)]
    }
}

/// See the module.
struct Throttle {
    leg: Leg,
    /// Power of two of the leg's blocks, or [`ASKED`].
    shift: AtomicU32,
    /// One, or one for each place of a device.
    lanes: Box<[Lane]>,
    apart: Arc<Apart>,
    name: String,
    caps: Caps,
    group: Option<String>,
    waits: PerShard<Waits>,
    of_volume: Arc<HeldTime>,
}

/// A request's place in a queue; dropping it leaves.
struct Place<'a> {
    lane: &'a Lane,
    cost: Cost,
    number: u64,
    /// It is first and may have claims.
    front: Cell<Option<Front>>,
}

impl<'a> Place<'a> {
    fn take(lane: &'a Lane, cost: Cost) -> Self {
        let number = lane.queue(cost).lock().enter();
        lane.waiting(cost).fetch_add(1, Ordering::Relaxed);
        Self { lane, cost, number, front: Cell::new(None) }
    }

    /// Waits until it is first.
    fn poll_first(&self, waker: &Waker) -> Poll<Result<(), BlockError>> {
        let own = self.lane.queues.here().1;
        let mut queue = self.lane.queue(self.cost).lock();
        if queue.is_called_off(self.number) {
            return Poll::Ready(Err(BlockError::CalledOff));
        }
        if queue.is_first(self.number) {
            return Poll::Ready(Ok(()));
        }
        if own {
            queue.waits(self.number, waker);
        } else {
            waker.wake_by_ref();
        }
        Poll::Pending
    }

    /// It is the first in its queue, and waits for tokens.
    async fn wait(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let front = Front { since: clock::now(), queue: ptr::from_ref(self.lane.queue(self.cost)).addr() };
        self.front.set(Some(front));
        let mut first = true;
        while let Err(time) = self.lane.chain.pass(self.cost, Some(front), first) {
            first = false;
            cx.io(IoOperation::Sleep(time.clamp(NAP, REFILL))).await;
            if self.lane.queue(self.cost).lock().is_called_off(self.number) {
                return Err(BlockError::CalledOff);
            }
        }
        // It went, and its claims with it.
        self.front.set(None);
        Ok(())
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(front) = self.front.get() {
            self.lane.chain.forget(front);
        }
        let mut queue = self.lane.queue(self.cost).lock();
        queue.leave(self.number);
        let next = queue.first();
        drop(queue);
        self.lane.waiting(self.cost).fetch_sub(1, Ordering::Relaxed);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// Requests that a throttle has held back since its volume was opened or changed, and nanoseconds that they waited together; `None` when
/// the service is none.
pub fn held_back(service: &Arc<dyn Service>) -> Option<(u64, u64)> {
    Some(of_type::<Throttle>(service)?.held_back())
}

/// Nanoseconds that requests of a volume waited in its throttles, together. Of all throttles that it has and had, for its
/// [meter](crate::meter).
pub(crate) type HeldTime = PerShard<AtomicU64>;

/// What the throttles of this volume count in.
pub(crate) fn held_in(shared: &SharedObjects, volume: &str) -> Arc<HeldTime> {
    shared.get(&format!("throttle/held/{volume}"), HeldTime::default)
}

impl Throttle {
    fn held_back(&self) -> (u64, u64) {
        (self.waits.sum(|waits| &waits.requests), self.waits.sum(|waits| &waits.nanoseconds))
    }

    /// The caps that hold for who asks.
    #[inline]
    fn lane(&self) -> &Lane {
        match &self.lanes[..] {
            [all] => all,
            lanes => &lanes[self.apart.place(Apart::claim)],
        }
    }

    #[inline]
    fn shift(&self) -> u32 {
        match self.shift.load(Ordering::Relaxed) {
            ASKED => self.leg.geometry().block_size.shift(),
            shift => shift,
        }
    }

    /// What a request takes; `None`: nothing.
    #[inline]
    fn cost(&self, request: &Request<'_>) -> Option<Cost> {
        let moved = || request.count.0 << self.shift();
        let (writes, bytes) = match request.operation {
            Operation::Flush => return None,
            Operation::Read | Operation::Compare => (false, moved()),
            Operation::Write { .. } | Operation::Copy { .. } => (true, moved()),
            operation if writes_zeroes(operation, &*self.leg) => (true, moved()),
            // Nothing moves.
            Operation::WriteZeroes { .. } | Operation::Deallocate => (true, 0),
        };
        Some(Cost { writes, bytes })
    }

    /// What reads and writes take together.
    #[inline]
    fn sum(&self, requests: &[Request<'_>]) -> Sum {
        let (mut count, mut blocks) = ([0; 2], [0_u64; 2]);
        for request in requests {
            let kind = usize::from(request.operation.is_write());
            count[kind] += 1;
            blocks[kind] = blocks[kind].saturating_add(request.count.0);
        }
        let block = 1 << self.shift();
        Sum { requests: count, bytes: blocks.map(|blocks| blocks.saturating_mul(block)) }
    }

    #[inline]
    fn goes(&self, request: &Request<'_>) -> bool {
        self.cost(request).is_none_or(|cost| {
            let lane = self.lane();
            lane.chain.at_once(cost) || self.may_go(lane, request, cost)
        })
    }

    /// Whether a request may go on now, of which there are not enough tokens at hand.
    #[cold]
    fn may_go(&self, lane: &Lane, request: &Request<'_>, cost: Cost) -> bool {
        // A range that the leg will refuse costs nothing: its length may be anything.
        let within = self.leg.geometry().byte_range(request.lba, request.count).is_some();
        !within || (lane.chain.own.leases.here().0.is_free(cost) && lane.chain.pass(cost, None, false).is_ok())
    }

    #[cold]
    fn hold_back<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        Step::Wait(cx.scratch.place_future(self.hold(cx, request)))
    }

    /// A request that waits.
    async fn hold(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        self.turn(cx, &request).await?;
        self.leg.submit(cx, request).await
    }

    /// One with metadata.
    async fn hold_tagged(&self, cx: TaskContext<'_>, request: TaggedRequest) -> Result<(), BlockError> {
        self.turn(cx, &untagged(&request)).await?;
        self.leg.submit_tagged(cx, request).await
    }

    /// Waits until there are tokens for it, and those that came before have theirs.
    ///
    /// # Errors
    /// It is called off meanwhile.
    async fn turn(&self, cx: TaskContext<'_>, request: &Request<'_>) -> Result<(), BlockError> {
        let Some(cost) = self.cost(request) else { return Ok(()) };
        let (start, lane) = (clock::now(), self.lane());
        let place = Place::take(lane, cost);
        poll_fn(|cx| place.poll_first(cx.waker())).await?;
        let at_hand = {
            let (leases, own) = lane.chain.own.leases.here();
            own && lane.chain.spend(leases, cost)
        };
        if !at_hand {
            place.wait(cx).await?;
        }
        drop(place);
        let waited = clock::now().saturating_sub(start);
        self.waits.add_all(|waits| [&waits.requests, &waits.nanoseconds], [1, waited]);
        self.of_volume.add(|nanoseconds| nanoseconds, waited);
        Ok(())
    }
}

/// What a request with metadata takes of the caps: its blocks.
fn untagged(request: &TaggedRequest) -> Request<'_> {
    let TaggedRequest { operation, lba, count, data, .. } = request;
    Request { operation: *operation, lba: *lba, count: *count, segments: std::slice::from_ref(data) }
}

impl Volume for Throttle {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.leg.geometry()
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.goes(&request) { self.leg.submit(cx, request) } else { self.hold_back(cx, request) }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let (sum, lane) = (self.sum(requests), self.lane());
        if !lane.chain.all_at_once(&sum) {
            return 0;
        }
        let done = self.leg.submit_many(requests);
        if done < requests.len() {
            lane.chain.give_back(&self.sum(&requests[done..]));
        }
        done
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.leg.prefetch(lba, count)
    }

    fn call_off(&self, asker: Asker) {
        for queue in self.lanes.iter().flat_map(|lane| lane.queues.here().0.iter()) {
            queue.lock().call_off(asker);
        }
        self.leg.call_off(asker);
    }

    fn settles_late(&self) -> bool {
        self.leg.settles_late()
    }

    fn metadata(&self) -> Metadata {
        self.leg.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        if self.goes(&untagged(&request)) {
            return self.leg.submit_tagged(cx, request);
        }
        Step::Wait(cx.scratch.place_future(self.hold_tagged(cx, request)))
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.leg.format_metadata(format)
    }

    fn scratch_bytes(&self) -> usize {
        self.leg.scratch_bytes() + future_bytes(Self::hold).max(tagged_bytes(Self::hold_tagged))
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.leg.extent(lba)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.leg.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.leg.format(block_size)?;
        if self.shift.load(Ordering::Relaxed) != ASKED {
            self.shift.store(self.leg.geometry().block_size.shift(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }

    fn erases_by_key(&self) -> bool {
        self.leg.erases_by_key()
    }
}

impl Service for Throttle {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        let previous = mount.previous::<Self>();
        let before: Vec<&Level> = previous.iter().flat_map(|old| old.lanes.iter().map(|lane| &lane.chain.own)).collect();
        for (at, lane) in self.lanes.iter().enumerate() {
            // Of other devices, or of all together: what was owed to any of them.
            let before = if before.len() == self.lanes.len() { &before[at..=at] } else { &before[..] };
            lane.chain.own.set(&self.caps.rates, before);
        }
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn hurry(&self, on: bool) {
        self.lanes.iter().for_each(|lane| lane.chain.hurry.store(on, Ordering::Relaxed));
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        true
    }

    fn status(&self) -> Status {
        let caps = CAPS.into_iter().zip(&self.caps.rates);
        let mut facts: Vec<_> =
            caps.filter_map(|(name, rate)| Some((name, rate.as_ref()?.per_second.to_string()))).collect();
        facts.extend((self.lanes.len() > 1).then(|| ("each", "device".to_owned())));
        facts.extend(self.group.clone().map(|group| ("group", group)));
        let (waited, time) = self.held_back();
        let time = Duration::from_nanos(time);
        facts.push(("held back", format!("{waited} requests, {:.3} s together", time.as_secs_f64())));
        Status::good(facts)
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
