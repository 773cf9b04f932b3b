//! What volumes get of a saturated disk, in simulated time: the disk does one request after the other.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use millrace_block::{
    BlockCount, BlockError, Geometry, IoOperation, Operation, Request, ShardSlot, Step, TaskContext, Usage, VolumeError,
    clock::{self, SimulatedTime},
    future_bytes,
};

use super::*;
use crate::{
    share::{
        line::{BY_WEIGHT, Line},
        member::{Member, Minimum, Terms},
    },
    testing::{Load, drive},
    throttle::{Caps, Group, Weight},
};

const SECOND: u64 = 1_000_000_000;
/// What a request takes the disk: it does 10,000 a second.
const SERVICE: u64 = 100_000;

/// A disk that does one read after the other.
#[derive(Default)]
struct Serial {
    /// When it has done all that came.
    free: AtomicU64,
}

impl Serial {
    async fn serve(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let end = self.free.load(Ordering::Relaxed).max(clock::now()) + SERVICE;
        self.free.store(end, Ordering::Relaxed);
        cx.io(IoOperation::Sleep(Duration::from_nanos(end - clock::now()))).await;
        Ok(())
    }
}

impl Volume for Serial {
    fn name(&self) -> &'static str {
        "serial"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BlockSize::B512, BlockCount(64 * (EXTENT >> 9)));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: true }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        // The table is read as zeroes, and everything else but reads of volumes is done at once.
        if request.operation != Operation::Read || request.lba.0 < EXTENT >> 9 {
            request.segments.iter().filter(|_| request.operation == Operation::Read).for_each(|segment| segment.fill(0));
            return Step::Done(Ok(()));
        }
        Step::Wait(cx.scratch.place_future(self.serve(cx, request)))
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::serve)
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

/// Volumes on such a disk, and a group for those that want one.
struct Volumes {
    _pool: Pool,
    _acme: Arc<Group>,
    all: Vec<Graph>,
}

impl Volumes {
    fn new(disk: &str, shares: &[&str]) -> Self {
        let leg: Arc<dyn Volume> = Arc::<Serial>::default();
        let pool = Pool::open(&leg, disk, Reason::Create).unwrap();
        let acme = Group::declare(&pool.shared, "acme", None, &Caps::default()).unwrap();
        let make = |(at, share): (usize, &&str)| {
            pool.volume(&format!("v{at}"), share, Some(EXTENT), Reason::Create).unwrap_or_else(|error| panic!("{error}"))
        };
        let all = shares.iter().enumerate().map(make).collect();
        Self { _pool: pool, _acme: acme, all }
    }

    fn load(&self, at: usize, depth: usize) -> Load {
        Load::new(self.all[at].volume(), depth, false, 8)
    }

    fn fact(&self, at: usize, name: &str) -> Option<String> {
        let facts = self.all[at].tree().status.unwrap().facts;
        facts.into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }
}

/// Within two percent.
fn assert_close(count: u64, due: u64) {
    assert!((due * 98..=due * 102).contains(&(count * 100)), "{count}, not {due}");
}

#[test]
fn weights_divide_the_disk() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let volumes = Volumes::new("disk(extent=16K, depth=4)", &["share(weight=3)", "share"]);
    let counts = drive(&time, &[volumes.load(0, 16), volumes.load(1, 64)], 4 * SECOND);
    assert_close(counts[0], 30_000);
    assert_close(counts[1], 10_000);
}

#[test]
fn a_guarantee_is_a_floor() {
    let _own = ShardSlot::claim();
    // By weight it would get a tenth; bytes count as operations do.
    for guarantee in ["min_iops=3000", "min_bandwidth=12288000", "min_iops=1, min_bandwidth=12288000"] {
        let time = SimulatedTime::new();
        let own = format!("share({guarantee})");
        let volumes = Volumes::new("disk(extent=16K, depth=4)", &[&own, "share(weight=9)"]);
        let loads = [volumes.load(0, 16), volumes.load(1, 64)];
        // What it did not ask for in the last tenth of a second is made up for.
        drive(&time, &loads, SECOND / 2);
        let counts = drive(&time, &loads, 4 * SECOND);
        assert_close(counts[0], 12_000);
        assert_close(counts[1], 28_000);
    }
    // What it had beyond it while nobody else wanted the disk takes nothing away from it.
    let time = SimulatedTime::new();
    let volumes = Volumes::new("disk(extent=16K, depth=4)", &["share(min_iops=3000)", "share(weight=9)"]);
    let loads = [volumes.load(0, 16), volumes.load(1, 64)];
    drive(&time, &loads[..1], 4 * SECOND);
    drive(&time, &loads, SECOND / 2);
    assert_close(drive(&time, &loads, 4 * SECOND)[0], 12_000);
    // Whose weight brings more gets more.
    let time = SimulatedTime::new();
    let volumes = Volumes::new("disk(extent=16K, depth=4)", &["share(min_iops=3000)", "share"]);
    let counts = drive(&time, &[volumes.load(0, 16), volumes.load(1, 64)], 4 * SECOND);
    assert_close(counts[0], 20_000);
}

/// However long a guarantee was not kept: time among those that share by weight went on.
#[test]
fn who_comes_late_beside_a_guarantee_that_is_not_kept_begins_at_the_present() {
    let _own = ShardSlot::claim();
    for group in ["", "group=acme"] {
        let time = SimulatedTime::new();
        let [own, other] =
            [format!("share({group}{}min_iops=20K)", if group.is_empty() { "" } else { ", " }), format!("share({group})")];
        let volumes = Volumes::new("disk(extent=16K, depth=4)", &[&own, &other, &other]);
        let loads = [volumes.load(0, 16), volumes.load(1, 16), volumes.load(2, 16)];
        drive(&time, &loads[..2], 4 * SECOND);
        let counts = drive(&time, &loads, 4 * SECOND);
        assert_close(counts[1], 2500);
        assert_close(counts[2], 2500);
    }
}

#[test]
fn who_needs_no_guarantee_leaves_it_to_others() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let volumes = Volumes::new("disk(extent=16K, depth=1)", &["share(min_iops=9K)", "share"]);
    // One at a time, behind another one each: it cannot ask for more.
    let counts = drive(&time, &[volumes.load(0, 1), volumes.load(1, 8)], 4 * SECOND);
    assert!(counts[0] > 18_000, "{counts:?}");
    assert_close(counts[0] + counts[1], 40_000);
}

#[test]
fn more_guarantees_than_the_disk_can_keep_starve_nobody() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let volumes = Volumes::new("disk(extent=16K, depth=4)", &["share(min_iops=20K)", "share(min_iops=20K)", "share"]);
    let counts = drive(&time, &[volumes.load(0, 16), volumes.load(1, 16), volumes.load(2, 4)], 4 * SECOND);
    assert_close(counts[2], 40_000 / BY_WEIGHT);
    assert_close(counts[0], 20_000 * (BY_WEIGHT - 1) / BY_WEIGHT);
}

#[test]
fn more_guarantees_than_the_disk_can_keep_are_kept_in_their_proportion() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let shares = ["share(min_iops=400K)", "share(min_iops=40K)", "share"];
    let volumes = Volumes::new("disk(extent=16K, depth=4)", &shares);
    let counts = drive(&time, &[volumes.load(0, 16), volumes.load(1, 16), volumes.load(2, 4)], 4 * SECOND);
    let guaranteed = 40_000 * (BY_WEIGHT - 1) / BY_WEIGHT;
    assert_close(counts[0], guaranteed * 10 / 11);
    assert_close(counts[1], guaranteed / 11);
    assert_close(counts[2], 40_000 / BY_WEIGHT);
}

/// Its turns would be later and later beside those of the others.
#[test]
fn a_guarantee_does_not_starve_its_group() {
    let _own = ShardSlot::claim();
    // By weight the group has half of what is left, in which both are alike; with all guaranteed to one, an eighth is left, and to others.
    for (guarantee, due) in [("min_iops=6000", [24_000, 16_000 / 3, 32_000 / 3]), ("min_iops=20K", [35_000, 2500, 2500])] {
        let time = SimulatedTime::new();
        let own = format!("share(group=acme, {guarantee})");
        let volumes = Volumes::new("disk(extent=16K, depth=4)", &[&own, "share(group=acme)", "share"]);
        let loads = [volumes.load(0, 16), volumes.load(1, 16), volumes.load(2, 16)];
        drive(&time, &loads, SECOND / 2);
        let counts = drive(&time, &loads, 4 * SECOND);
        counts.iter().zip(due).for_each(|(count, due)| assert_close(*count, due));
        // Nor does it lack anything when the guaranteed one has nothing to do.
        assert_close(drive(&time, &loads[1..], SECOND)[0], 5000);
    }
}

#[test]
fn a_target_of_another_volume_takes_no_guarantee_away() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    // No request of this disk is done within the target.
    let volumes = Volumes::new("disk(extent=16K)", &["share(min_iops=3000)", "share(latency=1us)"]);
    let loads = [volumes.load(0, 64), volumes.load(1, 16)];
    drive(&time, &loads, SECOND / 2);
    let counts = drive(&time, &loads, 4 * SECOND);
    assert!(volumes.fact(0, "limited for others' latency").is_some());
    assert_close(counts[0], 12_000);
    assert_close(counts[0] + counts[1], 40_000);
}

#[test]
fn a_missed_latency_target_makes_others_go_less_deep() {
    let _own = ShardSlot::claim();
    let time = SimulatedTime::new();
    let one = |share: &str| {
        let volumes = Volumes::new("disk(extent=16K)", &[share, "share"]);
        let counts = drive(&time, &[volumes.load(0, 1), volumes.load(1, 64)], 4 * SECOND);
        (volumes, counts)
    };
    let (_, without) = one("share");
    // Behind 64 others of 100 us each.
    assert_close(without[0], 4 * SECOND / (65 * SERVICE));
    let (volumes, with) = one("share(latency=2ms)");
    assert!(with[0] > 2 * without[0], "{with:?}");
    assert!(with[0] + with[1] > 39_000, "the disk is busy all the same: {with:?}");
    assert!(volumes.fact(0, "latency").unwrap().contains("took longer than 2ms"));
    assert!(volumes.fact(1, "limited for others' latency").is_some());
    assert_eq!(volumes.fact(0, "limited for others' latency"), None);
    // When the one with the target has nothing to do, the other one may go as deep as it wants again.
    drive(&time, &[volumes.load(1, 64)], 2 * SECOND);
    assert_eq!(volumes.fact(1, "limited for others' latency"), None);
}

#[test]
fn only_looser_targets_give_way() {
    let member = |latency: Option<u64>| {
        let member = Member::default();
        member.set(&Terms {
            weight: Weight::default(),
            minimum: Minimum::default(),
            latency: latency.map(Duration::from_nanos),
        });
        member
    };
    let (loose, tight, none) = (member(Some(5000)), member(Some(1000)), member(None));
    assert!(loose.adjust(Some(2000), 64) && none.adjust(Some(2000), 64));
    assert!(!tight.adjust(Some(2000), 64) && !tight.adjust(Some(1000), 64));
    assert!(none.adjust(None, 64), "by and by");
    assert_eq!((loose.limit(), none.limit()), (Some(1), Some(2)));
}

#[test]
fn no_more_is_guaranteed_than_the_disk_can_do() {
    let leg: Arc<dyn Volume> = Arc::<Serial>::default();
    let pool = Pool::open(&leg, "disk(extent=16K, iops=8000, bandwidth=8M)", Reason::Create).unwrap();
    let make = |name: &str, share: &str| pool.volume(name, share, Some(EXTENT), Reason::Create);
    let refused = |share: &str| make("x", share).map(|_| ()).unwrap_err().to_string();
    assert!(refused("share(min_iops=7001)").contains("of a disk that does 8000, 7000 can be"));
    assert!(refused("share(min_bandwidth=8M)").contains("bytes per second would be guaranteed"));
    let _a = make("a", "share(min_iops=6000)").unwrap();
    assert!(refused("share(min_iops=1001)").contains("7001 operations per second would be guaranteed in all"));
    let mut b = make("b", "share(min_iops=1000)").unwrap();
    assert_eq!(pool.fact("guaranteed").as_deref(), Some("7000 operations and 0 bytes per second"));
    b.discard(true);
    assert!(make("c", "share(min_iops=1000, min_bandwidth=7M)").is_ok());
    // The disk itself cannot promise less than it has.
    let line = Line::default();
    line.set_able(Minimum { iops: 100, bandwidth: 0 }, Err).unwrap();
    assert!(line.reserve(Minimum { iops: 89, bandwidth: 0 }, Err).is_err());
    // What somebody on its way has is nobody else's.
    let reserved = line.reserve(Minimum { iops: 88, bandwidth: 1 << 40 }, Err).unwrap_or_else(|why| panic!("{why}"));
    assert!(line.reserve(Minimum { iops: 1, bandwidth: 0 }, Err).is_err());
    drop(reserved);
    assert!(line.reserve(Minimum { iops: 1, bandwidth: 0 }, Err).is_ok());
    // What is not known is more than anything.
    let able = |iops, bandwidth| Minimum { iops, bandwidth };
    assert!(able(0, 5).is_able_as(able(100, 5)) && able(5, 5).is_able_as(able(4, 5)));
    assert!(!able(100, 5).is_able_as(able(0, 5)) && !able(5, 4).is_able_as(able(4, 5)));
}

/// Another volume got its guarantee while it was not there.
#[test]
fn a_volume_comes_back_whatever_is_guaranteed_by_then() {
    let leg: Arc<dyn Volume> = Arc::<Serial>::default();
    let stack = "disk(extent=16K, iops=8000)";
    let pool = Pool::open(&leg, stack, Reason::Create).unwrap();
    let share = "share(min_iops=6000)";
    let make = |pool: &Pool, name: &str, reason| pool.volume(name, share, Some(EXTENT), reason);
    let mut b = make(&pool, "b", Reason::Create).unwrap();
    b.unmount();
    let _c = make(&pool, "c", Reason::Create).unwrap();
    assert!(make(&pool, "d", Reason::Create).is_err(), "what is new is refused");
    b.mount(Reason::Open).unwrap();
    let shown = pool.fact("guaranteed").unwrap();
    assert!(shown.starts_with("12000 operations") && shown.contains("more than it can keep"), "{shown}");
    assert!(make(&pool, "d", Reason::Create).is_err());
}
