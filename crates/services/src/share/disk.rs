//! The disk that shares are made of: it keeps the table in its leg's first extent and shows what is behind it, to shares only.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError,
    future_bytes,
};

use super::{member::Minimum, space::Space};
use crate::{
    background::Task,
    legs::{Leg, resize_leg},
    pieces::{fit_legs, give_back},
    service::{Build, Keeps, Kind, Layout, Mount, Plan, Reason, Room, Service, ServiceError, Status, Word},
    settings::{SettingError, Settings},
    throttle::Weight,
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "disk",
    help: "a back end that any number of volumes share (share | volume:DISK); stands at the top of its own volume",
    legs: 1..=1,
    settings: &[
        Word { name: "extent", help: "what volumes are given room in: a power of two from 16K to 1G, fixed for ever [1M]" },
        Word { name: "depth", help: "requests that the leg has at most; the others wait for their volume's turn [256]" },
        Word { name: "iops", help: "operations per second that the leg can do: guarantees beyond that are refused" },
        Word { name: "bandwidth", help: "bytes per second that the leg can do: guarantees beyond that are refused" },
    ],
    commands: &[Word { name: "release", help: "name=VOLUME: gives up a volume in the table that nothing uses" }],
    shares_legs: false,
    is_disk: true,
    samples: &[],
    plan,
};

/// Sizes an extent may have.
const EXTENTS: std::ops::RangeInclusive<u64> = 16 << 10..=1 << 30;
/// Largest depth.
const DEPTH: std::ops::RangeInclusive<u64> = 1..=1 << 20;

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let extent = settings.size("extent")?.unwrap_or(1 << 20);
    if !extent.is_power_of_two() || !EXTENTS.contains(&extent) {
        return Err(SettingError::new("extent", "a power of two from 16K to 1G is possible"));
    }
    let depth = settings.count("depth")?.unwrap_or(256);
    if !DEPTH.contains(&depth) {
        return Err(SettingError::new("depth", "1 to 1048576 requests are possible"));
    }
    let able = Minimum { iops: settings.count("iops")?.unwrap_or(0), bandwidth: settings.size("bandwidth")?.unwrap_or(0) };
    Ok(Box::new(DiskPlan { extent, depth, able }))
}

#[derive(Debug)]
struct DiskPlan {
    extent: u64,
    depth: u64,
    able: Minimum,
}

impl Plan for DiskPlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Own(format!("disk {}", self.extent))
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        stated.iter().map(|stated| (*stated).max(Some(size.saturating_add(self.extent)))).collect()
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let leg = build.only_leg();
        let (has, extent) = (leg.geometry().bytes(), self.extent);
        let room = (has / extent).saturating_sub(1).saturating_mul(extent);
        let size = build.size.unwrap_or(room);
        if size > has.saturating_sub(extent) || room == 0 {
            return Err(ServiceError::Legs(format!(
                "its leg has {has} bytes; it needs an extent of {extent} for its table beside the {} that are asked for",
                build.size.unwrap_or(extent)
            )));
        }
        let space = build.shared.get(&space_key(&build.name), Space::default);
        let (stated, keeps) = (build.stated_of(0), build.sizing_of(0).keeps);
        let (name, depth, able, size) = (build.name, self.depth, self.able, AtomicU64::new(size));
        let shift = leg.geometry().block_size.shift();
        Ok(Arc::new(Disk { name, leg, stated, keeps, extent, depth, able, shift, size, space }))
    }
}

/// The name under which the shares of a disk find what they have together: that of the disk's node.
pub(super) fn space_key(leg: &str) -> String {
    // The root of volume POOL is named "POOL/disk", and the volume as others see it "POOL".
    let node = leg.strip_suffix("/disk").unwrap_or(leg);
    format!("disk/{node}")
}

/// A size for the operator.
fn text(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{bytes} bytes") }
}

/// See the module.
pub(super) struct Disk {
    name: String,
    leg: Leg,
    /// Bytes that stand at the leg in the stack.
    stated: u64,
    /// Whether the leg opens with a smaller size than it had.
    keeps: Keeps,
    extent: u64,
    depth: u64,
    /// What its leg can do, as far as that is known.
    able: Minimum,
    /// Power of two of the leg's blocks: it is not formatted while it is a disk's.
    shift: u32,
    /// Bytes behind the table.
    size: AtomicU64,
    space: Arc<Space>,
}

impl Disk {
    /// Blocks before what it shows.
    #[inline]
    fn offset(&self) -> u64 {
        self.extent >> self.shift
    }

    fn refused(&self, error: &ServiceError) -> VolumeError {
        VolumeError::Refused { volume: self.name.clone(), why: error.to_string() }
    }

    /// Here, and not in the share: who has the disk's turn must not stand before a switch, where requests wait while the disk's stack changes and
    /// its table is flushed, which needs the turn.
    async fn flush(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let flushes = &self.space.flushes;
        flushes.flush(cx, &*self.leg, flushes.failed()).await
    }
}

impl Volume for Disk {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let leg = self.leg.geometry();
        Geometry { blocks: BlockCount(self.size.load(Ordering::Relaxed) >> leg.block_size.shift()), ..leg }
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, mut request: Request<'a>) -> Step<'a> {
        let (blocks, offset) = (self.size.load(Ordering::Relaxed) >> self.shift, self.offset());
        let count = request.count.0;
        let inside = |lba: Lba| lba.0.checked_add(count).is_some_and(|end| end <= blocks);
        match &mut request.operation {
            Operation::Flush => return Step::Wait(cx.scratch.place_future(self.flush(cx, request))),
            Operation::Copy { source } if inside(*source) => source.0 += offset,
            Operation::Copy { .. } => return Step::Done(Err(BlockError::OutOfRange)),
            _ => {}
        }
        if !inside(request.lba) {
            return Step::Done(Err(BlockError::OutOfRange));
        }
        // In its place: see `Request`.
        request.lba.0 += offset;
        self.leg.submit(cx, request)
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let (blocks, offset) = (self.size.load(Ordering::Relaxed) >> self.shift, self.offset());
        let inside = |request: &Request<'_>| request.lba.0.checked_add(request.count.0).is_some_and(|end| end <= blocks);
        let mut end = 0;
        while let Some(request) = requests.get_mut(end).filter(|request| inside(request)) {
            request.lba.0 += offset;
            end += 1;
        }
        self.leg.submit_many(&mut requests[..end])
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        lba.0.checked_add(self.offset()).is_some_and(|lba| self.leg.prefetch(Lba(lba), count))
    }

    fn settles_late(&self) -> bool {
        self.leg.settles_late()
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::flush) + self.leg.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let (size, before) = (blocks.0.saturating_mul(1 << self.shift), self.size.load(Ordering::Relaxed));
        if size < self.extent {
            let why = "it has no room for one extent";
            return Err(VolumeError::BadSize { volume: self.name.clone(), size, why });
        }
        let (leg, has) = (BlockCount(blocks.0.saturating_add(self.offset())), self.leg.geometry().blocks);
        let legs = std::slice::from_ref(&self.leg);
        if leg <= has {
            fit_legs(&self.name, legs, &[(0, self.keeps, leg)])?;
        } else {
            self.leg.resize(leg)?;
        }
        if let Err(error) = self.space.resize(size) {
            if self.keeps != Keeps::Nothing {
                give_back(&self.name, legs, &[(0, has)]);
            }
            return Err(self.refused(&error));
        }
        self.size.store(size, Ordering::Relaxed);
        if size < before
            && self.keeps == Keeps::Nothing
            && let Err(error) = resize_leg(&self.leg, leg, self.stated)
        {
            tracing::debug!(volume = self.name, %error, "the leg of a disk stays longer than it need be");
        }
        Ok(())
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name.clone(), what: "formatting" })
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }
}

impl Service for Disk {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        // In a change, what is below shows what was there; only a disk that is new may have no table yet.
        let new = match mount.reason {
            Reason::Create => true,
            Reason::Open => false,
            Reason::Change => mount.previous.is_none(),
        };
        // What can do as much as before, or comes back, is not refused for what is guaranteed: the volumes on it have that already.
        let is_less = mount.previous::<Self>().is_none_or(|before| !self.able.is_able_as(before.able));
        let excess = |why: String| if mount.reason != Reason::Open && is_less { Err(why) } else { Ok(()) };
        self.space.line.set_able(self.able, excess).map_err(ServiceError::NotNow)?;
        self.space.open(&self.leg, self.extent, self.size.load(Ordering::Relaxed), new)?;
        self.space.line.set_depth(self.depth);
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.space.close();
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Err(ServiceError::NotNow("a disk cannot be taken out: its leg alone shows no volume".to_owned()))
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        // No leg shows what it does.
        false
    }

    fn status(&self) -> Status {
        let Some(room) = self.space.room() else { return Status::default() };
        let bytes = |extents: u64| text(extents * room.extent);
        let mut facts = vec![
            ("extent", room.extent.to_string()),
            ("free", format!("{} of {}", bytes(room.free), bytes(room.extents))),
            ("in flight", format!("{} of {}", self.space.line.in_flight(), self.depth)),
        ];
        let guaranteed = self.space.line.guaranteed();
        let excess = if self.space.line.exceeds() { ", more than it can keep: each gets its part of that" } else { "" };
        facts.extend((!guaranteed.is_none()).then(|| ("guaranteed", format!("{guaranteed}{excess}"))));
        facts.extend(room.damage.map(|damage| ("table", format!("{damage}; written anew from the other copy"))));
        let in_bytes = Room { free: room.free * room.extent, total: room.extents * room.extent };
        let mut status = Status { room: Some(in_bytes), ..Status::good(facts) };
        let volume = |(name, size, used): (String, u64, bool)| {
            (name, format!("{}{}", text(size), if used { "" } else { ", not in use" }))
        };
        let group = |(name, (weight, volumes)): (String, (Weight, usize))| {
            (format!("group {name}"), format!("weight {weight}, volumes in it: {volumes}"))
        };
        status.facts.extend(self.space.line.groups().into_iter().map(group));
        status.facts.extend(room.volumes.into_iter().map(volume).map(|(name, text)| (format!("volume {name}"), text)));
        status
    }

    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError> {
        if command != "release" {
            return Err(ServiceError::no_command(&KIND, command));
        }
        let name = arguments.required("name")?;
        let size = self.space.release(name)?;
        Ok(format!("volume {name} of {size} bytes is given up"))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
