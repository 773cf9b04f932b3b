//! Mirror (RAID 1): every leg has all of the volume's data.
//!
//! ```text
//!   write ─► range locked ─► region marked? ─► copied once ─► all legs, wait for all ─┬─ all have it: done
//!              (no: the bitmap is stored first)                                       └─ one failed: recorded on the others, done
//!   read ──► one leg, by policy ─► failed? another one, and the first is rewritten
//!   upkeep ► stale regions are copied ─► idle marks are taken away ─► scrub
//!
//!   leg:     data, from its first byte on … │ members (two copies) │ bitmap (two copies)   the last 64 KiB
//! ```
//!
//! Invariants:
//! * A write is acknowledged when every leg either has it or is durably recorded as failed on those that do.
//! * Before any leg is written, the region's mark is durable on all legs: after a crash the legs differ only in marked regions.
//! * In a region where legs may differ, reads go to one leg, always the same.
//! * The last good leg is never dropped.
//!
//! It does not guess: legs that differ without a majority or a read error to tell which is right are reported, not repaired.

mod balance;
mod command;
mod path;
mod repair;
mod scrub;
#[cfg(test)]
mod tests;
mod upkeep;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU8, AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockSize, Geometry, Volume};

use self::{
    balance::{Balance, Policy},
    scrub::Scrub,
};
use crate::{
    legs::{Leg, common_geometry},
    members::{
        Members, Rules, TABLES, check_legs,
        intent::Intent,
        region_setting, region_shift,
        state::{MOST_LEGS, Masks},
    },
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "mirror",
    help: "every leg has all data (RAID 1): one good leg is enough",
    legs: 1..=MOST_LEGS,
    settings: &[
        Word { name: "read", help: "which leg is read: round-robin, shortest-queue, or the number of a leg [round-robin]" },
        Word {
            name: "stable",
            help: "data are copied once before they go to the legs, so that these are equal whatever the guest does meanwhile [true]",
        },
        Word {
            name: "region",
            help: "what one bit of the write-intent bitmap stands for: a power of two from 64K [4M, more for large volumes]",
        },
        Word { name: "rate", help: "bytes per second at most for resync and scrub [256M]" },
    ],
    commands: &[
        Word { name: "fail", help: "leg=N: takes a leg out of use" },
        Word { name: "rebuild", help: "leg=N: fills a failed leg again, with only what it missed where possible" },
        Word { name: "scrub", help: "compares all legs; repairs what a majority or a read error decides, reports the rest" },
        Word { name: "stop", help: "ends a scrub" },
    ],
    shares_legs: false,
    is_disk: false,
    samples: &["mirror(region=64K, ?, ?)", "mirror(region=64K, read=shortest-queue, stable=false, ?, ?, ?)"],
    plan,
};

const RULES: Rules = Rules {
    service: "mirror",
    table_magic: *b"MRMIRROR",
    page_magic: *b"MRINTENT",
    area: TABLES,
    least: 1,
    placed: false,
    form: [0; 4],
    form_settings: [""; 4],
    note_magic: Some(*b"MRMOVING"),
};
/// Bytes per second of resync and scrub where none are set.
const USUAL_RATE: u64 = 256 << 20;

#[derive(Clone, Copy, Debug)]
struct MirrorPlan {
    policy: Policy,
    stable: bool,
    region_shift: Option<u32>,
    rate: u64,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let policy = match settings.text("read") {
        None | Some("round-robin") => Policy::RoundRobin,
        Some("shortest-queue") => Policy::ShortestQueue,
        Some(leg) => {
            let leg = leg.parse().ok().filter(|leg| *leg < MOST_LEGS);
            Policy::Prefer(leg.ok_or_else(|| {
                SettingError::new("read", "round-robin, shortest-queue, or the number of a leg, counted from 0")
            })?)
        }
    };
    let region_shift = region_setting(settings)?;
    let rate = settings.size("rate")?.unwrap_or(USUAL_RATE);
    if rate < 4096 {
        return Err(SettingError::new("rate", "at least 4K a second"));
    }
    let stable = settings.parsed("stable", "true or false")?.unwrap_or(true);
    Ok(Box::new(MirrorPlan { policy, stable, region_shift, rate }))
}

impl Plan for MirrorPlan {
    fn layout(&self, legs: usize) -> Layout {
        Layout::Same((0..legs).collect())
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        stated.iter().map(|stated| Some(stated.unwrap_or(0).max(RULES.leg_bytes(size)))).collect()
    }

    fn goes_without_others(&self) -> bool {
        true
    }

    fn keeps_size(&self) -> bool {
        true
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let block_size = build.block_size;
        check_legs(&build.legs)?;
        if let Policy::Prefer(leg) = self.policy
            && leg >= build.legs.len()
        {
            return Err(SettingError::new("read", format!("there is no leg {leg}")).into());
        }
        let least = build.legs.iter().map(|leg| leg.geometry().bytes()).min().unwrap_or(0);
        let bytes = build.size.unwrap_or_else(|| (least >> 12 << 12).saturating_sub(RULES.area));
        if bytes < u64::from(block_size.bytes()) || least < bytes {
            return Err(ServiceError::Legs(format!(
                "the smallest leg has {least} bytes; a mirror of {bytes} bytes needs {} on each",
                RULES.leg_bytes(bytes)
            )));
        }
        let region_shift = region_shift(self.region_shift, bytes)?;
        Ok(Mirror::new(build, *self, block_size, bytes, region_shift))
    }
}

/// What went wrong so far.
#[derive(Debug, Default)]
struct Counters {
    read_errors: AtomicU64,
    repaired: AtomicU64,
}

/// See the module.
pub(crate) struct Mirror {
    name: String,
    members: Arc<Members>,
    legs: Vec<Leg>,
    plan: MirrorPlan,
    /// Block size and abilities.
    shape: AtomicU8,
    balance: Balance,
    counters: Counters,
    scrub: Mutex<Scrub>,
}

fn pack(geometry: &Geometry) -> u8 {
    u8::from(geometry.block_size == BlockSize::B4096)
        | u8::from(geometry.volatile_cache) << 1
        | u8::from(geometry.deallocate) << 2
}

impl Mirror {
    fn new(build: Build<'_>, plan: MirrorPlan, block_size: BlockSize, bytes: u64, region_shift: u32) -> Arc<Self> {
        let geometry = common_geometry(&build.legs, block_size, BlockCount(bytes >> block_size.shift()));
        Arc::new(Self {
            name: build.name.clone(),
            legs: build.legs.clone(),
            members: Members::new(RULES, build, bytes, region_shift),
            plan,
            shape: AtomicU8::new(pack(&geometry)),
            balance: Balance::new(plan.policy),
            counters: Counters::default(),
            scrub: Mutex::default(),
        })
    }

    /// Its shape now.
    #[inline]
    fn shape(&self) -> Geometry {
        let shape = self.shape.load(Ordering::Relaxed);
        let block_size = if shape & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
        let blocks = BlockCount(self.members.bytes() >> block_size.shift());
        Geometry { block_size, blocks, read_only: false, volatile_cache: shape & 2 != 0, deallocate: shape & 4 != 0 }
    }

    /// Asks the legs again what they can.
    fn look_again(&self, block_size: BlockSize) {
        let blocks = BlockCount(self.members.bytes() >> block_size.shift());
        self.shape.store(pack(&common_geometry(&self.legs, block_size, blocks)), Ordering::Relaxed);
    }

    #[inline]
    fn masks(&self) -> Masks {
        self.members.masks()
    }

    /// The bitmap; there is none before the first mount.
    #[inline]
    fn intent(&self) -> Option<&Intent> {
        self.members.intent()
    }

    fn scrub(&self) -> MutexGuard<'_, Scrub> {
        self.scrub.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
