//! Throttle: caps on operations and bytes per second.
//!
//! ```text
//!   request ─► tokens leased by this shard? ─ yes ─► leg
//!                 │ no
//!                 └─► take a lease from each bucket (atomic) ─► wait until its time ─► leg
//!   buckets: of this volume, or of a group that several volumes are in; levels are throttles over throttles
//! ```
//!
//! A shard leases the tokens of a millisecond at a time, so that most requests look at their own shard's counter only: no clock, no
//! shared line. Slow buckets (below a token a millisecond) have no leases. Waiting requests have their turn already
//! (`bucket::take`): they sleep until it comes, in parts, so that a change of the stack finds them.

mod bucket;
#[cfg(test)]
mod tests;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use millrace_block::{BlockSize, Operation, PerShard, Request};

use self::bucket::{Rate, take};
use crate::{
    background::Task,
    gate::{Gate, Gated, Pass},
    service::{Build, Kind, Layout, Mount, Plan, Service, ServiceError, Status, Word},
    settings::{SettingError, Settings},
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
        Word { name: "group", help: "a name: all throttles of this name share their caps" },
    ],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["throttle(iops=1000000) | ?", "throttle(write_bandwidth=1G, read_iops=1M) | ?"],
    plan,
};

/// Longest sleep of a waiting request before it looks whether it may go on.
const LOOK: Duration = Duration::from_millis(3);
/// Parts of a second that a shard leases at a time.
const LEASES: u64 = 1000;

/// The caps that there are.
const CAPS: [&str; 6] = ["iops", "read_iops", "write_iops", "bandwidth", "read_bandwidth", "write_bandwidth"];
/// Caps that reads meet, and writes: the first are of operations, the others of bytes.
const OF_READS: [usize; 4] = [0, 1, 3, 4];
const OF_WRITES: [usize; 4] = [0, 2, 3, 5];

fn counts_bytes(cap: usize) -> bool {
    cap >= 3
}

#[derive(Debug)]
struct ThrottlePlan {
    rates: [Option<Rate>; 6],
    group: Option<String>,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let burst = settings.duration("burst")?.unwrap_or(Duration::from_millis(10));
    if burst > Duration::from_secs(3600) {
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
    if rates.iter().all(Option::is_none) {
        return Err(SettingError::new("iops", "a throttle needs a cap, this one or another"));
    }
    Ok(Box::new(ThrottlePlan { rates, group: settings.text("group").map(str::to_owned) }))
}

impl Plan for ThrottlePlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Same(vec![0])
    }

    fn leg_sizes(&self, size: u64, _: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        vec![Some(size)]
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let key = self
            .group
            .as_ref()
            .map_or_else(|| format!("throttle/of/{}", build.name), |group| format!("throttle/group/{group}"));
        let buckets = build.shared.get(&key, Buckets::default);
        let throttle = Throttle { buckets, rates: self.rates, waits: PerShard::default() };
        Ok(Arc::new(Gated::new(build.name.clone(), build.only_leg(), throttle)))
    }
}

/// A bucket.
#[derive(Default)]
struct Bucket {
    /// 0: there is no cap.
    per_second: AtomicU64,
    burst_ns: AtomicU64,
    /// See [`bucket::Grant::filled`].
    filled: AtomicU64,
    leases: PerShard<Lease>,
}

/// Tokens that a shard has taken and not used.
#[derive(Default)]
struct Lease {
    tokens: AtomicU64,
    /// When they may be used; 0: already.
    from: AtomicU64,
}

impl Lease {
    /// When the tokens may be used.
    #[inline]
    fn when(&self) -> u64 {
        let from = self.from.load(Ordering::Relaxed);
        if from == 0 {
            return 0;
        }
        if from <= now() {
            self.from.store(0, Ordering::Relaxed);
            return 0;
        }
        from
    }
}

/// What a volume's throttle, or a group of them, has.
#[derive(Default)]
struct Buckets {
    all: [Bucket; 6],
    /// A change is under way: nobody waits.
    hurry: AtomicBool,
}

/// Nanoseconds since the first look at this clock, and an hour: a bucket's history begins before it.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 3_600_000_000_000
}

impl Bucket {
    fn rate(&self) -> Option<Rate> {
        let per_second = self.per_second.load(Ordering::Relaxed);
        (per_second > 0).then(|| Rate { per_second, burst_ns: self.burst_ns.load(Ordering::Relaxed) })
    }

    fn set(&self, rate: Option<Rate>) {
        let rate = rate.unwrap_or(Rate { per_second: 0, burst_ns: 0 });
        if self.per_second.swap(rate.per_second, Ordering::Relaxed) != rate.per_second {
            // What was owed at the old rate is forgiven: the new one counts from now.
            self.filled.store(0, Ordering::Relaxed);
        }
        self.burst_ns.store(rate.burst_ns, Ordering::Relaxed);
    }

    /// Takes tokens; the time at which they may be used, 0 if at once.
    #[inline]
    fn take(&self, tokens: u64) -> u64 {
        let Some(rate) = self.rate() else { return 0 };
        let (lease, own) = self.leases.here();
        if own {
            let left = lease.tokens.load(Ordering::Relaxed);
            if left >= tokens {
                lease.tokens.store(left - tokens, Ordering::Relaxed);
                return lease.when();
            }
        }
        self.refill(tokens, rate, own.then_some(lease))
    }

    #[cold]
    fn refill(&self, tokens: u64, rate: Rate, lease: Option<&Lease>) -> u64 {
        let extra = lease.map_or(0, |_| rate.per_second / LEASES);
        let now = now();
        let mut filled = self.filled.load(Ordering::Relaxed);
        let grant = loop {
            let grant = take(filled, now, tokens.saturating_add(extra), rate);
            match self.filled.compare_exchange_weak(filled, grant.filled, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break grant,
                Err(other) => filled = other,
            }
        };
        let start = if grant.start <= now { 0 } else { grant.start };
        if let Some(lease) = lease {
            // What was left of the last lease was for this moment as well.
            let left = lease.tokens.load(Ordering::Relaxed).min(extra);
            lease.tokens.store(left + extra, Ordering::Relaxed);
            lease.from.store(start, Ordering::Relaxed);
        }
        start
    }
}

/// What waiting has cost.
#[derive(Default)]
struct Waits {
    requests: AtomicU64,
    nanoseconds: AtomicU64,
}

/// The gate.
struct Throttle {
    buckets: Arc<Buckets>,
    rates: [Option<Rate>; 6],
    waits: PerShard<Waits>,
}

impl Gate for Throttle {
    #[inline]
    fn look(&self, request: &Request<'_>, shift: u32) -> Option<Pass> {
        let caps = match request.operation {
            Operation::Flush => return None,
            Operation::Read | Operation::Compare => OF_READS,
            _ => OF_WRITES,
        };
        let bytes = match request.operation {
            // Nothing moves.
            Operation::WriteZeroes { .. } | Operation::Deallocate => 0,
            _ => request.count.0 << shift,
        };
        let mut until = 0;
        for cap in caps {
            until = until.max(self.buckets.all[cap].take(if counts_bytes(cap) { bytes } else { 1 }));
        }
        if until == 0 || self.buckets.hurry.load(Ordering::Relaxed) {
            return None;
        }
        let wait = Duration::from_nanos(until.saturating_sub(now()));
        self.waits.add(|waits| &waits.requests, 1);
        self.waits.add(|waits| &waits.nanoseconds, wait.as_nanos() as u64);
        Some(Pass { until, sleep: wait.min(LOOK) })
    }

    fn left(&self, pass: &Pass) -> Option<Duration> {
        let left = Duration::from_nanos(pass.until.saturating_sub(now()));
        (!left.is_zero() && !self.buckets.hurry.load(Ordering::Relaxed)).then(|| left.min(LOOK))
    }
}

impl Throttle {
    fn caps(&self) -> impl Iterator<Item = (&'static str, u64)> {
        CAPS.into_iter().zip(&self.rates).filter_map(|(name, rate)| Some((name, rate.as_ref()?.per_second)))
    }
}

impl Service for Gated<Throttle> {
    fn mount(&self, _: &Mount) -> Result<(), ServiceError> {
        let throttle = self.gate();
        for (bucket, rate) in throttle.buckets.all.iter().zip(throttle.rates) {
            bucket.set(rate);
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
        self.gate().buckets.hurry.store(on, Ordering::Relaxed);
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        true
    }

    fn status(&self) -> Status {
        let throttle = self.gate();
        let waited = throttle.waits.sum(|waits| &waits.requests);
        let time = Duration::from_nanos(throttle.waits.sum(|waits| &waits.nanoseconds));
        let facts = throttle.caps().map(|(name, rate)| (name, rate.to_string()));
        let waits = ("held back", format!("{waited} requests, {:.3} s together", time.as_secs_f64()));
        Status::good(facts.chain([waits]))
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
