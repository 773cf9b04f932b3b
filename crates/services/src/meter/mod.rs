//! Meter: counts what a volume's users did, for the account.
//!
//! Each shard counts for itself, and apart for each device that asks; whoever keeps the account sums up. Counts go on across changes of the stack, as long as the meter
//! stays in its place: one that follows another there counts with what that one did, and no two in one stack do.
//!
//! How long requests were held back the volume's [throttles](crate::throttle) count, wherever they stand; the meter has what they counted
//! while it was in force.

#[cfg(test)]
mod tests;

use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, atomic::AtomicU64},
    time::Duration,
};

use millrace_block::{BlockSize, Operation, PerShard, Request, Volume, clock};
use serde::{Deserialize, Serialize};

use crate::{
    apart::{Apart, PLACES},
    background::Task,
    gate::{Gate, Gated},
    legs::writes_zeroes,
    service::{Build, Kind, Layout, Mount, Plan, Service, ServiceError, Status, Word, of_type},
    settings::{SettingError, Settings},
    throttle::{self, HeldTime},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "meter",
    help: "counts operations and bytes for the account (millrace usage)",
    legs: 1..=1,
    settings: &[Word { name: "tenant", help: "whose account it is" }],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["meter | ?"],
    plan,
};

/// Longest name of a tenant in characters.
const LONGEST: usize = 64;

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let tenant = settings.text("tenant").unwrap_or_default();
    if tenant.chars().count() > LONGEST || tenant.chars().any(char::is_control) {
        return Err(SettingError::new("tenant", format!("a name of at most {LONGEST} characters is possible")));
    }
    Ok(Box::new(MeterPlan { tenant: tenant.to_owned() }))
}

#[derive(Debug)]
struct MeterPlan {
    tenant: String,
}

impl Plan for MeterPlan {
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
        let held = throttle::held_in(build.shared, build.volume);
        let meter = Meter { tenant: self.tenant.clone(), held, counted: OnceLock::new(), last: Mutex::default() };
        Ok(Arc::new(Gated::new(build.name.clone(), build.only_leg(), meter)))
    }
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    others: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Counters {
    fn transfers(&self) -> [&AtomicU64; 4] {
        [&self.reads, &self.read_bytes, &self.writes, &self.written_bytes]
    }
}

/// What the meters that follow each other in one place count with.
struct Counted {
    requests: PerShard<[Counters; PLACES]>,
    apart: Apart,
    /// What was counted in each place when its device began; held while one takes it.
    before: Mutex<[Count; PLACES]>,
    held: Arc<HeldTime>,
    span: Mutex<Span>,
}

/// While a meter is in force, what throttles hold back is its own. Two that take turns in other places of a volume have nothing twice.
#[derive(Default)]
struct Span {
    /// Nanoseconds of earlier times in force.
    before: u64,
    /// What throttles had counted when it came into force; `None`: it is not.
    since: Option<u64>,
    /// When it first came into force.
    begun: Option<u64>,
}

/// What was counted in one place.
#[derive(Clone, Copy, Default)]
struct Count {
    reads: u64,
    writes: u64,
    others: u64,
    read_bytes: u64,
    written_bytes: u64,
}

impl Count {
    fn each(self, other: Self, change: fn(u64, u64) -> u64) -> Self {
        Self {
            reads: change(self.reads, other.reads),
            writes: change(self.writes, other.writes),
            others: change(self.others, other.others),
            read_bytes: change(self.read_bytes, other.read_bytes),
            written_bytes: change(self.written_bytes, other.written_bytes),
        }
    }

    fn reading(self, tenant: &str) -> Reading {
        let Self { reads, writes, others, read_bytes, written_bytes } = self;
        Reading { tenant: tenant.to_owned(), reads, writes, others, read_bytes, written_bytes, throttled_us: 0 }
    }
}

/// What was counted by some moment.
#[derive(Clone, Default)]
struct Sums {
    all: Count,
    /// Of each device, by its number.
    apart: Vec<(u32, Count)>,
    /// How long throttles have held requests back meanwhile.
    held_back: Duration,
}

impl Counted {
    fn new(held: &Arc<HeldTime>) -> Self {
        Self {
            requests: PerShard::default(),
            apart: Apart::default(),
            before: Mutex::default(),
            held: Arc::clone(held),
            span: Mutex::default(),
        }
    }

    /// Where the calling thread's requests are counted.
    #[inline]
    fn place(&self) -> usize {
        self.apart.place(|apart, asker| {
            let mut before = self.before();
            let place = apart.claim(asker)?;
            before[place] = self.at(place);
            Some(place)
        })
    }

    fn before(&self) -> MutexGuard<'_, [Count; PLACES]> {
        self.before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, place: usize) -> Count {
        let sum = |counter: fn(&Counters) -> &AtomicU64| self.requests.sum(|places| counter(&places[place]));
        Count {
            reads: sum(|counters| &counters.reads),
            writes: sum(|counters| &counters.writes),
            others: sum(|counters| &counters.others),
            read_bytes: sum(|counters| &counters.read_bytes),
            written_bytes: sum(|counters| &counters.written_bytes),
        }
    }

    fn read(&self) -> Sums {
        let before = self.before();
        let places: [Count; PLACES] = std::array::from_fn(|place| self.at(place));
        let all = places.iter().fold(Count::default(), |all, place| all.each(*place, u64::wrapping_add));
        let of = |(place, asker): (usize, u32)| (asker, places[place].each(before[place], u64::wrapping_sub));
        Sums { all, apart: self.apart.taken().map(of).collect(), held_back: self.held_back() }
    }

    fn span(&self) -> (MutexGuard<'_, Span>, u64) {
        (self.span.lock().unwrap_or_else(PoisonError::into_inner), self.held.sum(|nanoseconds| nanoseconds))
    }

    fn begin(&self) {
        let (mut span, now) = self.span();
        span.since.get_or_insert(now);
        span.begun.get_or_insert_with(clock::now);
    }

    fn end(&self) {
        let (mut span, now) = self.span();
        span.before += span.since.take().map_or(0, |since| now.wrapping_sub(since));
    }

    fn held_back(&self) -> Duration {
        let (span, now) = self.span();
        Duration::from_nanos(span.before + span.since.map_or(0, |since| now.wrapping_sub(since)))
    }
}

/// The gate.
struct Meter {
    tenant: String,
    /// What the volume's throttles count in.
    held: Arc<HeldTime>,
    /// What it counts with, from the moment on when it first comes into force: only then it is known which meter it follows. By its name alone
    /// it would be taken for one that stays and has got another above it.
    counted: OnceLock<Arc<Counted>>,
    /// While it is out of force, what was counted until then: whoever follows it counts on.
    last: Mutex<Option<Sums>>,
}

impl Meter {
    fn last(&self) -> MutexGuard<'_, Option<Sums>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: it was never in force.
    fn sums(&self) -> Option<Sums> {
        let last = self.last().clone();
        last.or_else(|| Some(self.counted.get()?.read()))
    }
}

/// What a meter has counted since its volume was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Whose account it is; empty: nobody's.
    pub tenant: String,
    /// Reads and compares.
    pub reads: u64,
    /// Writes, copies, and zeroes that are or may be written.
    pub writes: u64,
    /// Flushes, and other erasures.
    pub others: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Microseconds that throttles held requests back, over all requests; 0 in what was written before they were counted.
    #[serde(default)]
    pub throttled_us: u64,
}

/// What a meter says; out of force, what it did to its end.
pub struct Meters {
    /// Of all together.
    pub all: Reading,
    /// Of devices apart, by their numbers ([`Asker::number`](millrace_block::Asker::number)), without throttled time; those that were too many, and who is no device, only
    /// count in `all`.
    pub apart: Vec<(u32, Reading)>,
    /// What it counts with, which the meter that follows it in a change has from it: with others, counting has begun anew.
    pub counted: Weak<dyn Any + Send + Sync>,
}

/// Reads a meter; `None` when the service is none, or was never in force.
pub fn read(service: &Arc<dyn Service>) -> Option<Meters> {
    let meter = of_type::<Gated<Meter>>(service)?;
    let Meter { tenant, counted, .. } = meter.gate();
    let Sums { all, apart, held_back } = meter.gate().sums()?;
    let throttled_us = u64::try_from(held_back.as_micros()).unwrap_or(u64::MAX);
    let all = Reading { throttled_us, ..all.reading(tenant) };
    let apart = apart.into_iter().map(|(asker, count)| (asker, count.reading(tenant))).collect();
    let counted: Weak<Counted> = Arc::downgrade(counted.get()?);
    Some(Meters { all, apart, counted })
}

/// How long ago the first meter that counts with this ([`Meters::counted`]) came into force; `None`: it is gone, or none has.
pub fn age(counted: &Weak<dyn Any + Send + Sync>) -> Option<Duration> {
    let counted = counted.upgrade()?.downcast::<Counted>().ok()?;
    let begun = counted.span().0.begun?;
    Some(Duration::from_nanos(clock::now().saturating_sub(begun)))
}

impl Gate for Meter {
    #[inline]
    fn look(&self, request: &Request<'_>, shift: u32, leg: &dyn Volume) {
        let Some(counted) = self.counted.get() else { return };
        let bytes = request.count.0 << shift;
        let (counters, place) = (&counted.requests, counted.place());
        match request.operation {
            Operation::Read | Operation::Compare => {
                counters.add_all(|places| [&places[place].reads, &places[place].read_bytes], [1, bytes]);
            }
            Operation::Write { .. } | Operation::Copy { .. } => {
                counters.add_all(|places| [&places[place].writes, &places[place].written_bytes], [1, bytes]);
            }
            erasure if writes_zeroes(erasure, leg) => {
                counters.add_all(|places| [&places[place].writes, &places[place].written_bytes], [1, bytes]);
            }
            Operation::Flush | Operation::WriteZeroes { .. } | Operation::Deallocate => {
                counters.add(|places| &places[place].others, 1);
            }
        }
    }

    #[inline]
    fn look_at_all(&self, requests: &[Request<'_>], shift: u32) {
        let Some(counted) = self.counted.get() else { return };
        let sum = |writes: bool| {
            let alike = requests.iter().filter(|request| request.operation.is_write() == writes);
            alike.fold([0, 0], |[count, blocks], request| [count + 1, blocks + request.count.0])
        };
        let ([reads, read], [writes, written]) = (sum(false), sum(true));
        let place = counted.place();
        let counts = [reads, read << shift, writes, written << shift];
        counted.requests.add_all(|places| places[place].transfers(), counts);
    }
}

impl Service for Gated<Meter> {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        let meter = self.gate();
        // One that stood elsewhere counted something else.
        let previous = mount.previous::<Self>().filter(|previous| previous.name() == self.name());
        let before = previous.and_then(|previous| previous.gate().counted.get().cloned());
        let counted = meter.counted.get_or_init(|| before.unwrap_or_else(|| Arc::new(Counted::new(&meter.held))));
        counted.begin();
        *meter.last() = None;
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        let meter = self.gate();
        if let Some(counted) = meter.counted.get() {
            counted.end();
            *meter.last() = Some(counted.read());
        }
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        true
    }

    fn status(&self) -> Status {
        let Sums { all, held_back: held, .. } = self.gate().sums().unwrap_or_default();
        let Count { reads, writes, others, read_bytes, written_bytes } = all;
        let moved = |count: u64, bytes: u64| format!("{count} requests, {bytes} bytes");
        Status::good([
            ("read", moved(reads, read_bytes)),
            ("written", moved(writes, written_bytes)),
            ("flushed and erased", format!("{others} requests")),
            ("held back by throttles", format!("{:.3} s together", held.as_secs_f64())),
        ])
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
