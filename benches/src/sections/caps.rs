//! What a cap lets through at any time: the most commands that end between any two instants, beyond what the rate allows for the time between them.
//!
//! ```text
//!   client ── reads, a rest in which the bucket fills, reads … ──► throttle ──► memory
//!      look  look  look  look     the most of: commands between two looks − rate × the time between them
//! ```

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use millrace_driver::{
    Command, Controller, DriverError, Options, QueueError, QueueOptions,
    spec::{NamespaceId, NvmOpcode},
};

use crate::{error::Failure, gate};

/// Commands in flight.
pub(super) const DEPTH: u32 = 32;
/// Bytes of a read, and its blocks of 512 as a command counts them, from 0.
const BYTES: usize = 4096;
const BLOCKS: u32 = 7;
/// What a bucket holds, as time at the full rate: the throttle's own setting where nothing is said.
const BURST: Duration = Duration::from_millis(10);
/// Milliseconds from one rest to the next, and those of them before the rest: what is in flight ends and the bucket fills in the others.
const PERIOD: u128 = 300;
const WORK: u128 = 200;

/// The most that a device's cap on operations was exceeded by, in buckets.
pub(super) fn most_above(socket: &Path, cap: u32, core: usize, seconds: f64) -> Result<f64, Failure> {
    let measure = || {
        gate::pin(core);
        watch(socket, cap, Duration::from_secs_f64(seconds))
    };
    let most = thread::scope(|scope| scope.spawn(measure).join().expect("a measurement does not panic"))?;
    Ok(most / (f64::from(cap) * BURST.as_secs_f64()))
}

/// The same in commands.
fn watch(socket: &Path, cap: u32, time: Duration) -> Result<f64, DriverError> {
    let options = Options { memory_size: 1 << 20, io_queues: 1, max_transfer: BYTES, ..Options::default() };
    let mut controller = Controller::connect(socket, &options)?;
    // One entry of a queue stays free.
    let mut queue = controller.create_queue_pair(&QueueOptions { entries: DEPTH + 1, ..QueueOptions::default() })?;
    let buffer = controller.memory().alloc(BYTES)?;
    let mut read = Command::nvm(NvmOpcode::READ).with_data(buffer.slice(0, BYTES));
    read.sqe.nsid = NamespaceId(1);
    read.sqe.cdw12 = BLOCKS;
    let (mut beyond, start) = (Beyond::new(cap), Instant::now());
    loop {
        let before = start.elapsed();
        let mut ended = 0;
        while let Some(cqe) = queue.next_completion()? {
            let status = cqe.status();
            if !status.is_success() {
                return Err(QueueError::Failed { qid: queue.id(), opcode: read.sqe.opcode, cqe, status }.into());
            }
            ended += 1;
        }
        let after = start.elapsed();
        beyond.look(before, after, ended);
        if after >= time {
            return Ok(beyond.most);
        }
        if after.as_millis() % PERIOD < WORK {
            while queue.in_flight() < DEPTH as usize {
                queue.submit(&read)?;
            }
        }
        queue.ring()?;
    }
}

/// How far commands have got beyond a rate, seen from the instant from which that is most.
struct Beyond {
    rate: f64,
    /// Commands so far.
    ended: f64,
    /// The least that they were ahead of the rate at any look.
    least: f64,
    /// The most that they have got ahead since such a look.
    most: f64,
}

impl Beyond {
    fn new(rate: u32) -> Self {
        Self { rate: rate.into(), ended: 0.0, least: 0.0, most: 0.0 }
    }

    /// So many were found ended by a look that began and ended at these times: later ones find what ended after it had begun.
    fn look(&mut self, before: Duration, after: Duration, ended: u32) {
        self.ended += f64::from(ended);
        self.most = self.most.max(self.ended - self.rate * after.as_secs_f64() - self.least);
        self.least = self.least.min(self.ended - self.rate * before.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_a_rate_is_seen_from_the_worst_instant() {
        let ms = Duration::from_millis;
        let mut beyond = Beyond::new(1000);
        // A bucket of ten, then the rate; nothing for 100 ms; then as many as before, and five more at once.
        for (before, after, ended, most) in
            [(0, 0, 10, 10.0), (10, 10, 10, 10.0), (110, 110, 0, 10.0), (110, 111, 10, 10.0), (111, 111, 5, 14.0)]
        {
            beyond.look(ms(before), ms(after), ended);
            assert!((beyond.most - most).abs() < 1e-6, "{} at {after} ms", beyond.most);
        }
    }
}
