//! Share: any number of volumes on one disk.
//!
//! ```text
//!   volume a: share ─┐                                   ┌ extent 0: table (two copies)
//!   volume b: share ─┼─► line (saturated? by turns) ─► disk ─► leg
//!   volume c: share ─┘   extents of the volume             └ extents 1, 2, 3 …
//! ```
//!
//! `disk` keeps the table (`table.rs`, `space.rs`) and shows what is behind it; `share` is a volume of it: a list of extents, looked
//! up per request. The line (`line.rs`) bounds what the disk has in flight, and gives turns by weight (`turns.rs`) while volumes wait.
//!
//! Invariants:
//! * An extent belongs to one volume at most, in memory, on the disk, and after a crash. It is given to another one only when no
//!   request of the one before is under way.
//! * What a volume has not written reads as zeroes: extents are cleared, durably, before the table gives them away.
//! * The list of a request's extents stays as it is until the request has ended (`Epochs`). The disk's memory is not reached through it
//!   (`Volume::reach`): when whoever did so had ended would not be known.
//! * A flush that the disk refuses is told, once, to every volume that had written something since its last one: the disk's next flush
//!   succeeds, whoever asks for it. So there is one at a time, the table's own among them, and one that was refused is counted before the
//!   next one begins.
//! * Who waits in the line may hold buffers of what is above the share. So whoever has a turn needs none of these: all that goes to
//!   the disk has the disk's own (`BufferPool::of`).
//!
//! It does not give room on the first write: a volume has all of its extents from the beginning.

mod disk;
mod line;
mod member;
mod space;
mod table;
#[cfg(test)]
mod tests;
mod turns;

use std::{
    iter::successors,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Epochs, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Visit, Volume,
    VolumeError, check, future_bytes, placed_bytes,
};

pub(crate) use self::disk::KIND as DISK;
use self::{
    disk::space_key,
    line::{Flight, Reserved},
    member::{Member, Minimum, Terms},
    space::{Claim, Space},
    turns::Tier,
};
use crate::{
    background::Task,
    legs::{self, ERASED_AT_ONCE, Leg, block_on, writes_zeroes},
    pieces::{Map, Mapped, Place},
    service::{Build, Kind, Layout, Mount, Plan, Reason, Service, ServiceError, Status, Word},
    settings::{SettingError, Settings},
    shared::SharedObjects,
    throttle::{Group, Weight},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "share",
    help: "a part of a disk: room of its own, and its turns while the disk is saturated",
    legs: 1..=1,
    settings: &[
        Word { name: "weight", help: "its part of a saturated disk, beside the others' weights: 1 to 1000 [1]" },
        Word { name: "group", help: "a group (millrace group create --weight N): the disk is divided between groups first" },
        Word { name: "min_iops", help: "operations per second that it gets at least of a saturated disk" },
        Word { name: "min_bandwidth", help: "bytes per second that it gets at least of a saturated disk: 20M" },
        Word {
            name: "latency",
            help: "how long the disk shall take for its requests; others go less deep if it takes longer: 2ms",
        },
        Word { name: "existing", help: "true: takes what the disk has under the volume's name; it must be there [false]" },
    ],
    commands: &[],
    shares_legs: true,
    is_disk: false,
    samples: &[
        "share | disk(extent=16K, depth=3) | ?",
        "share(weight=7) | disk(extent=64K) | ?",
        "share(min_iops=100, min_bandwidth=1M, latency=1us) | disk(extent=16K, depth=2) | ?",
    ],
    plan,
};

/// Latency targets that there may be.
const LATENCIES: RangeInclusive<Duration> = Duration::from_micros(1)..=Duration::from_secs(10);
/// How long the requests of a volume that goes are waited for: others may be waiting to go, too.
const PATIENCE: Duration = Duration::from_secs(2);
/// Extents that are looked at for one piece of a request.
const MERGED: usize = 64;

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let weight = settings.parsed("weight", "a number")?.map_or_else(|| Ok(Weight::default()), Weight::new)?;
    let [iops, bandwidth] = [("min_iops", settings.count("min_iops")?), ("min_bandwidth", settings.size("min_bandwidth")?)]
        .map(|(name, minimum)| match minimum {
            Some(0) => Err(SettingError::new(name, "1 at least is possible; leave it out to guarantee nothing")),
            minimum => Ok(minimum.unwrap_or(0)),
        });
    let latency = settings.duration("latency")?;
    if latency.is_some_and(|latency| !LATENCIES.contains(&latency)) {
        return Err(SettingError::new("latency", "1us to 10s is possible"));
    }
    let terms = Terms { weight, minimum: Minimum { iops: iops?, bandwidth: bandwidth? }, latency };
    let group = settings.text("group").map(str::to_owned);
    Ok(Box::new(SharePlan { terms, group, existing: settings.flag("existing")? }))
}

#[derive(Debug)]
struct SharePlan {
    terms: Terms,
    group: Option<String>,
    existing: bool,
}

impl Plan for SharePlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Own("share".to_owned())
    }

    fn leg_sizes(&self, _: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        // The disk's size is its own.
        stated.to_vec()
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let leg = build.only_leg();
        let geometry = leg.geometry();
        let space: Arc<Space> = build.shared.get(&space_key(leg.name()), Space::default);
        // Without a size: what it has, or all of a disk that is empty.
        let size = build.size.or_else(|| space.size_of(build.volume)).unwrap_or(geometry.bytes());
        let blocks = size >> geometry.block_size.shift();
        if blocks == 0 || blocks > geometry.blocks.0 {
            let has = geometry.bytes();
            return Err(ServiceError::Legs(format!("the disk has {has} bytes in all; {size} are asked for")));
        }
        let map = ShareMap { blocks: AtomicU64::new(blocks), extents: Epochs::new(Extents::default()) };
        let mapped = Mapped::new(build.name, vec![Arc::clone(&leg)], map, geometry.block_size);
        let group = self.group.as_ref().map(|name| Group::find(build.shared, name)).transpose()?;
        let member = Arc::new(Member::new(tiers(build.shared, leg.name(), group.as_ref())));
        let volume = build.volume.to_owned();
        let (terms, existing, made, written) = (self.terms, self.existing, AtomicBool::new(false), AtomicU64::new(0));
        Ok(Arc::new(Share {
            volume,
            leg,
            space,
            member,
            terms,
            existing,
            made,
            lost: AtomicBool::default(),
            written,
            mapped,
        }))
    }
}

/// The places on a disk of a group and of those that it is in, each in the one before it.
fn tiers(shared: &SharedObjects, disk: &str, group: Option<&Arc<Group>>) -> Box<[Arc<Tier>]> {
    let groups = successors(group, |group| group.within());
    let tier = |group: &Arc<Group>| {
        shared.get(&format!("share/{}/{}", space_key(disk), group.name()), || Tier::new(Arc::clone(group)))
    };
    let mut tiers: Vec<_> = groups.map(tier).collect();
    tiers.reverse();
    tiers.into()
}

/// The extents of a volume, for its requests.
#[derive(Clone, Debug, Default)]
struct Extents {
    /// Blocks that it shows: the list may be longer. None while it is not in force.
    blocks: u64,
    /// Power of two of the blocks in an extent.
    shift: u32,
    list: Box<[u32]>,
}

impl Extents {
    /// Where a block is on the disk, and how many follow it there: all that are wanted, if so many do.
    #[inline]
    fn locate(&self, lba: u64, wanted: u64) -> (u64, u64) {
        let (mut at, within) = ((lba >> self.shift) as usize, lba & ((1 << self.shift) - 1));
        let first = self.list[at];
        let mut run = (1 << self.shift) - within;
        while run < wanted && self.list.get(at + 1) == Some(&(self.list[at] + 1)) {
            run += 1 << self.shift;
            at += 1;
        }
        // What the disk shows begins behind its table.
        (u64::from(first - 1) << self.shift | within, run)
    }

    /// Why a request is refused, of which the check says this.
    #[cold]
    fn refusal(&self, error: BlockError) -> BlockError {
        if self.blocks == 0 { BlockError::NotReady } else { error }
    }
}

struct ShareMap {
    blocks: AtomicU64,
    extents: Epochs<Extents>,
}

impl Map for ShareMap {
    fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    fn locate(&self, lba: u64) -> Place {
        // Called within a visit of the share's. What replaced the list meanwhile begins like it and is no shorter.
        let extents = self.extents.visit();
        let (lba, run) = extents.locate(lba, (MERGED as u64) << extents.shift);
        Place { leg: 0, lba, run }
    }

    fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    fn capacity(&self, _: &[Leg]) -> u64 {
        self.blocks()
    }

    fn enlarge(&self, name: &str, _: &[Leg], _: u64) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: name.to_owned(), what: "growing without the disk's table" })
    }

    fn formatted(&self, _: &[Leg], _: BlockSize) {}
}

/// See the module.
struct Share {
    /// The volume's name: the one it has in the disk's table.
    volume: String,
    leg: Leg,
    space: Arc<Space>,
    member: Arc<Member>,
    terms: Terms,
    existing: bool,
    /// It was not on the disk before its mount.
    made: AtomicBool,
    /// What is to be told is of before its mount.
    lost: AtomicBool,
    /// Something was written since its last flush began, the first of that when the disk had refused so many flushes, and one; 0: nothing was.
    written: AtomicU64,
    mapped: Mapped<ShareMap>,
}

/// A share with a write's note of what its disk had refused before.
type Noted<'a> = (&'a Share, Option<u64>);

/// A request that is on the disk. The last parameter is dropped first.
async fn follow<'a>(
    _visit: Visit<'a, Extents>,
    _flight: Flight<'a>,
    (share, writes): Noted<'a>,
    step: Step<'a>,
) -> Result<(), BlockError> {
    let result = step.await;
    share.note_written(writes);
    result
}

/// Scratch bytes that a future of [`follow`] takes.
fn follow_bytes<'a, F: Future + 'a>(_: fn(Visit<'a, Extents>, Flight<'a>, Noted<'a>, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

impl Share {
    fn extents(&self) -> &Epochs<Extents> {
        &self.mapped.map().extents
    }

    /// Shows the volume's blocks in these extents, and waits until nobody sees the ones before.
    fn show(&self, extents: Extents) -> Result<(), ServiceError> {
        let blocks = extents.blocks;
        let retired = self.extents().replace(extents).map_err(|error| ServiceError::NotNow(error.to_string()))?;
        self.mapped.map().set_blocks(blocks);
        retired.wait();
        Ok(())
    }

    /// Goes out of sight: who comes from now on is refused. Waits until nobody who came before is on the disk, or in line for it.
    fn hide(&self) -> Result<(), ServiceError> {
        // The list stays: requests in pieces are at it.
        let nothing = Extents { blocks: 0, ..self.extents().visit().clone() };
        let retired = self.extents().replace(nothing).map_err(|error| ServiceError::NotNow(error.to_string()))?;
        let deadline = Instant::now() + PATIENCE;
        while !retired.is_free() || self.member.waiting.load(Ordering::Relaxed) > 0 {
            if Instant::now() > deadline {
                return Err(ServiceError::NotNow(format!(
                    "{} has not answered requests of volume {} for {PATIENCE:?}: what the volume has there can be released after a \
                     restart",
                    self.leg.name(),
                    self.volume
                )));
            }
            thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// What this volume had on this disk just before.
    fn previous(&self, mount: &Mount) -> Option<Arc<Self>> {
        mount.previous::<Self>().filter(|previous| Arc::ptr_eq(&previous.space, &self.space))
    }

    /// Takes its part of what the disk can guarantee. What a volume was promised it has: no number keeps data from a guest.
    fn reserve(&self, mount: &Mount) -> Result<Reserved<'_>, ServiceError> {
        let minimum = self.terms.minimum;
        let had_it = || self.previous(mount).is_some_and(|previous| previous.terms.minimum.covers(minimum));
        let is_promised = mount.reason == Reason::Open || had_it();
        let excess = |why: String| {
            if !is_promised {
                return Err(why);
            }
            tracing::warn!(volume = self.volume, disk = self.leg.name(), "more is guaranteed than the disk can keep: {why}");
            Ok(())
        };
        self.space.line.reserve(minimum, excess).map_err(ServiceError::NotNow)
    }

    fn shift(&self) -> u32 {
        self.leg.geometry().block_size.shift()
    }

    /// Power of two of the blocks in an extent.
    fn extent_shift(&self) -> u32 {
        self.space.room().map_or(0, |room| room.extent.trailing_zeros() - self.shift())
    }

    /// What a request has on the disk: the disk's buffers.
    #[inline]
    fn below<'a>(&self, cx: TaskContext<'a>) -> TaskContext<'a> {
        cx.with_buffers(cx.buffers.of(&self.space.buffers))
    }

    /// To the disk, with the extents that are visited. `request` was checked.
    #[inline]
    fn pass<'a>(&'a self, cx: TaskContext<'a>, extents: &Extents, mut request: Request<'a>) -> Step<'a> {
        let cx = self.below(cx);
        if request.operation.has_data() && request.count.0 > 0 {
            let (lba, run) = extents.locate(request.lba.0, request.count.0);
            if request.count.0 <= run {
                request.lba = Lba(lba);
                return self.leg.submit(cx, request);
            }
        }
        self.mapped.submit(cx, request)
    }

    /// Bytes that a request moves.
    #[inline]
    fn bytes(&self, operation: Operation, count: BlockCount) -> u64 {
        match operation {
            Operation::WriteZeroes { .. } if writes_zeroes(operation, &*self.leg) => count.0 << self.shift(),
            Operation::WriteZeroes { .. } | Operation::Deallocate => 0,
            _ => count.0 << self.shift(),
        }
    }

    /// A request that waits for its turn.
    async fn queue(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let _flight = self.space.line.wait(&self.member, self.bytes(request.operation, request.count)).await;
        // The volume may have another size by now, or be gone.
        let visit = self.extents().visit();
        check(&self.geometry_of(&visit), &request).map_err(|error| visit.refusal(error))?;
        let writes = self.failed_before(request.operation);
        let result = self.pass(cx, &visit, request).await;
        self.note_written(writes);
        result
    }

    /// How many flushes the disk has refused, before something is written; of what writes nothing it need not be known.
    #[inline]
    fn failed_before(&self, operation: Operation) -> Option<u64> {
        operation.is_write().then(|| self.space.flushes.failed())
    }

    /// Something was written. Only now, and before anybody is told: a flush that began meanwhile need not have made it durable.
    #[inline]
    fn note_written(&self, failed: Option<u64>) {
        // SeqCst: whoever finds it noted was here before the flush that takes the note away, and so before that is the disk's.
        let Some(failed) = failed else { return };
        // The one that began first counts, whichever ends first; 0, that there is none, comes behind all.
        let is_older = |known: u64| known.wrapping_sub(1) > failed;
        if is_older(self.written.load(Ordering::SeqCst)) {
            let note = |known| is_older(known).then_some(failed + 1);
            let _ = self.written.fetch_update(Ordering::SeqCst, Ordering::SeqCst, note);
        }
    }

    /// A flush of the disk, and an error as well where the disk has refused another volume's since something was written here.
    async fn flush(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let flushes = &self.space.flushes;
        let failed = self.written.swap(0, Ordering::SeqCst).checked_sub(1).unwrap_or_else(|| flushes.failed());
        // One that was refused before this one was the disk's is counted by now: they take turns there.
        legs::flush(self.below(cx), &*self.leg).await?;
        flushes.check(failed)
    }

    /// It goes, and its guest was not told yet of what was lost before it came: who comes next tells it.
    fn hand_back_loss(&self) {
        if self.lost.swap(false, Ordering::Relaxed) && self.has_untold() {
            self.space.note_loss(&self.volume);
        }
    }

    #[inline]
    fn geometry_of(&self, extents: &Extents) -> Geometry {
        Geometry { blocks: BlockCount(extents.blocks), ..self.mapped.geometry() }
    }

    fn refused(&self, error: &ServiceError) -> VolumeError {
        VolumeError::Refused { volume: self.volume.clone(), why: error.to_string() }
    }

    fn out_of_force(&self) -> VolumeError {
        VolumeError::Refused { volume: self.volume.clone(), why: "it is not in force on its disk".to_owned() }
    }

    fn shrink(&self, blocks: u64) -> Result<(), VolumeError> {
        let before = self.extents().visit().clone();
        // From here on nobody comes to what goes, and when this returns nobody is there.
        self.show(Extents { blocks, ..before.clone() }).map_err(|error| self.refused(&error))?;
        match self.space.shrink(&self.volume, blocks << self.shift()) {
            Ok(list) => self.show(Extents { blocks, list, ..before }).map_err(|error| self.refused(&error)),
            Err(error) => {
                let error = self.refused(&error);
                self.show(before).map_err(|error| self.refused(&error))?;
                Err(error)
            }
        }
    }

    fn grow(&self, blocks: u64) -> Result<(), VolumeError> {
        let Extents { blocks: shown, shift, .. } = *self.extents().visit();
        let [shown, size] = [shown, blocks].map(|blocks| blocks << self.shift());
        let list = self.space.grow(&self.volume, shown, size).map_err(|error| self.refused(&error))?;
        self.show(Extents { blocks, shift, list }).map_err(|error| self.refused(&error))
    }
}

impl Volume for Share {
    fn name(&self) -> &str {
        self.mapped.name()
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.mapped.geometry()
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if request.operation == Operation::Flush {
            return Step::Wait(cx.scratch.place_future(self.flush(cx, request)));
        }
        let visit = self.extents().visit();
        if let Err(error) = check(&self.geometry_of(&visit), &request) {
            return Step::Done(Err(visit.refusal(error)));
        }
        if !self.space.line.is_open(&self.member) {
            drop(visit);
            return Step::Wait(cx.scratch.place_future(self.queue(cx, request)));
        }
        let (operation, count, writes) = (request.operation, request.count, self.failed_before(request.operation));
        match self.pass(cx, &visit, request).at_once() {
            Ok(done) | Err(done @ Step::Done(_)) => {
                self.note_written(writes);
                done
            }
            Err(step) => {
                let flight = self.space.line.go(&self.member, self.bytes(operation, count));
                Step::Wait(cx.scratch.place_future(follow(visit, flight, (self, writes), step)))
            }
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let visit = self.extents().visit();
        if !self.space.line.is_open(&self.member) {
            return 0;
        }
        let geometry = self.geometry_of(&visit);
        let mut end = 0;
        while let Some(request) = requests.get_mut(end).filter(|request| check(&geometry, request).is_ok()) {
            let (lba, run) = visit.locate(request.lba.0, request.count.0);
            if request.count.0 > run {
                break;
            }
            request.lba = Lba(lba);
            end += 1;
        }
        let failed = self.space.flushes.failed();
        let done = self.leg.submit_many(&mut requests[..end]);
        if requests[..done].iter().any(|request| request.operation.is_write()) {
            self.note_written(Some(failed));
        }
        done
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let visit = self.extents().visit();
        if lba.0 >= visit.blocks {
            return false;
        }
        let (at, run) = visit.locate(lba.0, count.0);
        self.leg.prefetch(Lba(at), BlockCount(run.min(count.0)))
    }

    fn settles_late(&self) -> bool {
        // A visit that ends says that extents may be given away. Who does that waits for copies that are not settled yet: `Retired::is_free`.
        self.leg.settles_late()
    }

    fn scratch_bytes(&self) -> usize {
        self.mapped.scratch_bytes() + future_bytes(Self::queue).max(future_bytes(Self::flush)).max(follow_bytes(follow))
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let geometry = self.geometry();
        let size = blocks.0.saturating_mul(u64::from(geometry.block_size.bytes()));
        let bad = |why| Err(VolumeError::BadSize { volume: self.volume.clone(), size, why });
        match blocks.0 {
            _ if self.extents().visit().blocks == 0 => Err(self.out_of_force()),
            0 => bad("it is empty"),
            _ if size > self.leg.geometry().bytes() => bad("it is larger than its disk"),
            more if more > geometry.blocks.0 => self.grow(more),
            less if less < geometry.blocks.0 => self.shrink(less),
            _ => Ok(()),
        }
    }

    /// Erases what the volume has, durably. The block size is the disk's.
    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let geometry = self.geometry();
        if block_size != geometry.block_size {
            let (volume, why) = (self.volume.clone(), "it is that of its disk");
            return Err(VolumeError::BadBlockSize { volume, block_size: block_size.bytes(), why });
        }
        // Until the end, so that what is erased is not given away meanwhile.
        let visit = self.extents().visit();
        if visit.blocks == 0 {
            return Err(self.out_of_force());
        }
        let (leg, extents, blocks, shift) = (Arc::clone(&self.leg), visit.clone(), visit.blocks, self.shift());
        let flushes = Arc::clone(&self.space.flushes);
        let erased = block_on(move |cx| {
            Box::pin(async move {
                let (mut at, failed) = (0, flushes.failed());
                while at < blocks {
                    let (lba, run) = extents.locate(at, (MERGED as u64) << extents.shift);
                    let count = run.min(blocks - at).min(ERASED_AT_ONCE >> shift);
                    legs::clear(cx, &*leg, lba << shift, count << shift).await?;
                    at += count;
                }
                legs::flush(cx, &*leg).await?;
                flushes.check(failed)
            })
        });
        let failed = |why: String| VolumeError::Refused { volume: self.volume.clone(), why };
        erased.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(format!("cannot erase it: {error}")))
    }

    fn usage(&self) -> Usage {
        let visit = self.extents().visit();
        Usage { allocated: (visit.list.len() as u64) << (visit.shift + self.shift()) }
    }
}

impl Service for Share {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        let how = match mount.reason {
            Reason::Open => Claim::Own,
            Reason::Change if mount.previous.is_some() => Claim::Own,
            Reason::Create if self.existing => Claim::There,
            Reason::Change if self.existing => Claim::Either,
            _ => Claim::New,
        };
        let blocks = self.geometry().blocks.0;
        // Until it is in the line, or is not.
        let _reserved = self.reserve(mount)?;
        if let Some(previous) = self.previous(mount) {
            self.written.store(previous.written.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        let made = self.space.size_of(&self.volume).is_none();
        let list = self.space.claim(&self.volume, blocks << self.shift(), how)?;
        self.made.store(made, Ordering::Relaxed);
        if self.space.take_loss(&self.volume) {
            // As one that had written before the disk refused anything.
            self.written.store(1, Ordering::SeqCst);
            self.lost.store(true, Ordering::Relaxed);
        }
        self.member.set(&self.terms);
        let shown = self.show(Extents { blocks, shift: self.extent_shift(), list });
        let member = Arc::clone(&self.member);
        let shown = shown.and_then(|()| {
            let entered = self.space.line.change(|members| members.push(member));
            entered.map_err(|error| ServiceError::NotNow(error.to_string()))
        });
        shown.inspect_err(|_| {
            self.hand_back_loss();
            self.space.leave(&self.volume);
            self.discard(false);
        })
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        // On error it stays in use, and what it has its own: something of it is on the disk.
        self.hide()?;
        let left = self.space.line.change(|members| members.retain(|member| !Arc::ptr_eq(member, &self.member)));
        self.hand_back_loss();
        self.space.leave(&self.volume);
        left.map_err(|error| ServiceError::NotNow(error.to_string()))
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn discard(&self, stored: bool) {
        if !stored && !self.made.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.space.release(&self.volume) {
            tracing::warn!(volume = self.volume, disk = self.leg.name(), %error, "the disk still has a volume that is gone");
        }
    }

    fn has_untold(&self) -> bool {
        let written = self.written.load(Ordering::SeqCst);
        written > 0 && self.space.flushes.failed() >= written
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        // The disk shows all volumes, this one's blocks among others.
        false
    }

    fn status(&self) -> Status {
        let pieces = {
            let visit = self.extents().visit();
            1 + visit.list.windows(2).filter(|two| two[0] + 1 != two[1]).count()
        };
        let Terms { weight, minimum, latency } = self.terms;
        let mut facts = vec![("weight", weight.to_string()), ("pieces on the disk", pieces.to_string())];
        let tiers = self.member.tiers().iter().rev();
        let groups: Vec<_> = tiers.map(|tier| format!("{} (weight {})", tier.group.name(), tier.group.weight())).collect();
        facts.extend((!groups.is_empty()).then(|| ("group", groups.join(" in "))));
        facts.extend((!minimum.is_none()).then(|| ("guaranteed", minimum.to_string())));
        if let Some(latency) = latency {
            let (seen, late) = self.member.lateness();
            facts.push(("latency", format!("{late} of {seen} requests took longer than {latency:?}")));
        }
        facts.extend(self.member.limit().map(|limit| ("limited for others' latency", format!("{limit} requests at once"))));
        facts.push(("waited for a turn", format!("{} requests", self.member.waited())));
        Status::good(facts)
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
