//! Meter: counts what a volume's users did, for the account.
//!
//! Each shard counts for itself; whoever keeps the account sums up. Counts go on across changes of the stack, as long as the meter
//! stays in its place.

#[cfg(test)]
mod tests;

use std::{
    any::Any,
    sync::{Arc, Weak, atomic::AtomicU64},
};

use millrace_block::{BlockSize, Operation, PerShard, Request};
use serde::{Deserialize, Serialize};

use crate::{
    background::Task,
    gate::{Gate, Gated},
    service::{Build, Kind, Layout, Mount, Plan, Service, ServiceError, Status, Word},
    settings::{SettingError, Settings},
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

    fn leg_sizes(&self, size: u64, _: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        vec![Some(size)]
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let counters = build.shared.get(&format!("meter/of/{}", build.name), PerShard::default);
        let meter = Meter { tenant: self.tenant.clone(), counters };
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

/// The gate.
struct Meter {
    tenant: String,
    counters: Arc<PerShard<Counters>>,
}

/// What a meter has counted since its volume was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Whose account it is; empty: nobody's.
    pub tenant: String,
    /// Reads and compares.
    pub reads: u64,
    /// Writes and copies.
    pub writes: u64,
    /// Flushes and erasures.
    pub others: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// Reads a meter; `None` when the service is none. With what it says comes what it counts with, which the meter that follows it in a change
/// has from it: with others, counting has begun anew.
pub fn read(service: &Arc<dyn Service>) -> Option<(Reading, Weak<dyn Any + Send + Sync>)> {
    let any: Arc<dyn Any + Send + Sync> = Arc::<dyn Service>::clone(service);
    let meter = any.downcast::<Gated<Meter>>().ok()?;
    let counters: Weak<PerShard<Counters>> = Arc::downgrade(&meter.gate().counters);
    Some((meter.gate().read(), counters))
}

impl Meter {
    fn read(&self) -> Reading {
        let sum = |counter: fn(&Counters) -> &AtomicU64| self.counters.sum(counter);
        Reading {
            tenant: self.tenant.clone(),
            reads: sum(|counters| &counters.reads),
            writes: sum(|counters| &counters.writes),
            others: sum(|counters| &counters.others),
            read_bytes: sum(|counters| &counters.read_bytes),
            written_bytes: sum(|counters| &counters.written_bytes),
        }
    }
}

impl Gate for Meter {
    #[inline]
    fn look(&self, request: &Request<'_>, shift: u32) {
        let bytes = request.count.0 << shift;
        let counters = &self.counters;
        match request.operation {
            Operation::Read | Operation::Compare => {
                counters.add_all(|counters| [&counters.reads, &counters.read_bytes], [1, bytes]);
            }
            Operation::Write { .. } | Operation::Copy { .. } => {
                counters.add_all(|counters| [&counters.writes, &counters.written_bytes], [1, bytes]);
            }
            Operation::Flush | Operation::WriteZeroes { .. } | Operation::Deallocate => {
                counters.add(|counters| &counters.others, 1);
            }
        }
    }

    #[inline]
    fn look_at_all(&self, requests: &[Request<'_>], shift: u32) {
        let sum = |writes: bool| {
            let alike = requests.iter().filter(|request| request.operation.is_write() == writes);
            alike.fold([0, 0], |[count, blocks], request| [count + 1, blocks + request.count.0])
        };
        let ([reads, read], [writes, written]) = (sum(false), sum(true));
        self.counters.add_all(
            |counters| [&counters.reads, &counters.read_bytes, &counters.writes, &counters.written_bytes],
            [reads, read << shift, writes, written << shift],
        );
    }
}

impl Service for Gated<Meter> {
    fn mount(&self, _: &Mount) -> Result<(), ServiceError> {
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        true
    }

    fn status(&self) -> Status {
        let Reading { reads, writes, others, read_bytes, written_bytes, .. } = self.gate().read();
        let moved = |count: u64, bytes: u64| format!("{count} requests, {bytes} bytes");
        Status::good([
            ("read", moved(reads, read_bytes)),
            ("written", moved(writes, written_bytes)),
            ("flushed and erased", format!("{others} requests")),
        ])
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
