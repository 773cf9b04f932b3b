//! A shard's settings.
#![forbid(unsafe_code)]

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use crate::error::ShardsError;

/// Highest core number, and most shards, that a list may name.
const MAX_CORES: usize = 1023;

/// Settings of one shard.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Its number, in messages, thread names and metrics.
    pub index: usize,
    /// The core its thread is bound to; `None` leaves that to the system.
    pub core: Option<usize>,
    /// Task slots: requests that may wait at once on this shard.
    pub tasks: usize,
    /// Scratch bytes of each slot: the largest [`scratch_bytes`](millrace_block::Volume::scratch_bytes) of its volumes, and
    /// what the front end itself places. Too small is slow, never wrong.
    pub scratch_bytes: usize,
    /// Operations in flight on the ring at most (rounded up to a power of two). Others wait, first come, first served: more than the
    /// tasks of one device have as a rule, or its slow disk would hold up what others ask of theirs.
    pub ring_entries: u32,
    /// Bounce buffers of [`BUFFER_SIZE`](millrace_memory::BUFFER_SIZE) bytes.
    pub buffers: usize,
    /// What the shard does when there is no work.
    pub polling: Polling,
    /// Whether its thread turns it all the time. A thread that does so only while it waits for something is interrupted by the kernel
    /// instead: what the kernel still holds of requests that have ended (their files) is let go then, not at the thread's next turn.
    pub turns: bool,
    /// What its ring is to hold on to. The kernel lets go of it when the ring is gone and its last operation has ended, which may be long after
    /// the process's end. No operation uses it.
    pub witness: Option<Arc<OwnedFd>>,
}

impl ShardConfig {
    /// Scratch bytes that a request to a volume may need, by the default settings: a plain back end needs below 1 KiB, a deep stack of
    /// services most of this: a cache over two mirrors 60. Memory that requests do not use is never touched.
    pub const VOLUME_SCRATCH: usize = 96 << 10;

    /// Default settings for a shard.
    pub fn new(index: usize, core: Option<usize>) -> Self {
        // And an NVMe front end's at its default transfer size (a task and the segments of 1 MiB in 4 KiB pages, 5.6 KiB).
        let scratch_bytes = Self::VOLUME_SCRATCH + 8192;
        let polling = Polling::default();
        let (tasks, ring_entries, buffers) = (1024, 2048, 32);
        Self { index, core, tasks, scratch_bytes, ring_entries, buffers, polling, turns: true, witness: None }
    }

    /// A small shard for a thread without a loop, which turns it while it waits for something.
    #[must_use]
    pub fn of_thread() -> Self {
        Self { tasks: 4, buffers: 4, ring_entries: 64, turns: false, ..Self::new(usize::MAX, None) }
    }
}

/// What a shard does while there is no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Polling {
    /// Looks again at once, for ever: lowest latency, one whole core.
    Spin,
    /// Looks again at once for a while, then sleeps.
    Adaptive {
        /// How long to go on looking after the last work, where nothing is foreseen.
        spin: Duration,
        /// Sleep between two looks while some device can only be served by looking at its memory. When every device can be
        /// woken by a file descriptor, the sleep has no end of its own.
        nap: Duration,
        /// Longest such sleep. Naps grow to it with the time since the last work, and never beyond a 64th of that: what
        /// napping adds to a request's latency is small against the pause before it.
        idle_nap: Duration,
        /// What napping may cost, in thousandths of a core: where naps are cheap, they do not grow to `idle_nap` but only until
        /// they cost less than this.
        budget: u32,
        /// Whether a sleep ends before the work that should come next, where that can be told from what came before.
        foresight: bool,
    },
}

impl Polling {
    /// Sleeps as soon as there is nothing to do: least processor time, and each request that comes alone is late by what waking up takes.
    #[must_use]
    pub fn interrupt() -> Self {
        let [spin, nap, idle_nap] = [0, 45, 400].map(Duration::from_micros);
        Self::Adaptive { spin, nap, idle_nap, budget: 40, foresight: false }
    }
}

impl Default for Polling {
    fn default() -> Self {
        let [spin, nap, idle_nap] = [20, 45, 400].map(Duration::from_micros);
        Self::Adaptive { spin, nap, idle_nap, budget: 40, foresight: true }
    }
}

/// How long to nap when the last work was so long ago.
pub(crate) fn nap_after(idle: Duration, nap: Duration, idle_nap: Duration) -> Duration {
    (idle / 64).min(idle_nap).max(nap)
}

/// Understands a setting of shards: either their number (`2`: two shards, not bound to cores), or a list of cores with one
/// bound shard each (`0,2,4-6`; a single core is `3-3`). Each element of the answer is one shard's core.
pub fn parse_shards(text: &str) -> Result<Vec<Option<usize>>, ShardsError> {
    let text = text.trim();
    if let Ok(count) = text.parse::<usize>() {
        return match count {
            0 => Err(ShardsError::None),
            count if count > MAX_CORES => Err(ShardsError::TooLarge(count, MAX_CORES)),
            count => Ok(vec![None; count]),
        };
    }
    let mut cores = Vec::new();
    for part in text.split(',').map(str::trim) {
        let syntax = || ShardsError::Syntax(part.to_owned());
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().map_err(|_| syntax())?;
        let last: usize = last.trim().parse().map_err(|_| syntax())?;
        if first > last {
            return Err(syntax());
        }
        if last > MAX_CORES {
            return Err(ShardsError::TooLarge(last, MAX_CORES));
        }
        for core in first..=last {
            if cores.contains(&Some(core)) {
                return Err(ShardsError::Twice(core));
            }
            cores.push(Some(core));
        }
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_counts_and_a_list_names_cores() {
        assert_eq!(parse_shards("2"), Ok(vec![None, None]));
        assert_eq!(parse_shards("3-3"), Ok(vec![Some(3)]));
        assert_eq!(parse_shards(" 0, 2,4-6 "), Ok([0, 2, 4, 5, 6].map(Some).to_vec()));
    }

    #[test]
    fn naps_grow_with_the_pause() {
        let micros = Duration::from_micros;
        let nap = |idle| nap_after(micros(idle), micros(45), micros(400));
        assert_eq!(nap(20), micros(45));
        assert_eq!(nap(6_400), micros(100));
        assert_eq!(nap(10_000_000), micros(400));
        assert_eq!(nap_after(micros(10_000_000), micros(45), micros(1)), micros(45));
    }

    #[test]
    fn nonsense_is_named() {
        assert_eq!(parse_shards("0"), Err(ShardsError::None));
        assert_eq!(parse_shards(""), Err(ShardsError::Syntax(String::new())));
        assert_eq!(parse_shards("1,"), Err(ShardsError::Syntax(String::new())));
        assert_eq!(parse_shards("6-4"), Err(ShardsError::Syntax("6-4".to_owned())));
        assert_eq!(parse_shards("-1"), Err(ShardsError::Syntax("-1".to_owned())));
        assert_eq!(parse_shards("1,x"), Err(ShardsError::Syntax("x".to_owned())));
        assert_eq!(parse_shards("1-3,2"), Err(ShardsError::Twice(2)));
        assert_eq!(parse_shards("0,1024"), Err(ShardsError::TooLarge(1024, MAX_CORES)));
        assert_eq!(parse_shards("5000"), Err(ShardsError::TooLarge(5000, MAX_CORES)));
        assert_eq!(parse_shards("0-18446744073709551615"), Err(ShardsError::TooLarge(usize::MAX, MAX_CORES)));
    }
}
