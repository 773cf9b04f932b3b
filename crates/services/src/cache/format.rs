//! A format: both legs are erased, and an empty cache comes into force.
//!
//! ```text
//!   slow leg ─► fast leg ─► an empty table ─► as before
//!    │ fails      │ fails     └ fails: the volume goes on without its cache
//!    │            └ the slow leg gets its old block size back, and an empty table is made all the same
//!    └ nothing happened, as when the fast leg takes no writes before
//! ```
//!
//! From when the slow leg is erased, what the fast one holds is void. Until that leg says so itself the cache is marked, and `resume` makes an
//! empty table. Where the fast leg may still call blocks dirty nothing is written meanwhile: after a crash they would replace it.

use std::{
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use millrace_block::{BlockError, BlockSize, TaskContext, Volume, VolumeError};

use super::{
    Cache, Core,
    disk::{State, Superblock},
    unflushed::{BESIDE, WRITTEN},
};
use crate::{
    locks::{Taken, Turn},
    service::ServiceError,
};

/// How long an operator waits for requests, and for a line that is being written back.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Takes a turn, waiting for it as long as an operator does.
fn take_soon<'a>(turn: &'a Turn, why_not: &str) -> Result<Taken<'a>, ServiceError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match turn.try_take() {
            Some(taken) => return Ok(taken),
            None if Instant::now() > end => return Err(ServiceError::NotNow(why_not.to_owned())),
            None => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

impl Cache {
    /// Waits until nobody writes dirty lines back or changes the table on the fast leg. Not to be called on a shard.
    pub(super) fn stop_beside(&self) -> Result<[Taken<'_>; 2], ServiceError> {
        // In the order in which who writes lines back takes them.
        let moving = take_soon(&self.moving, "dirty lines are being written back, slowly: try again")?;
        let committing = take_soon(&self.commits.turn, "what was written is being made durable, slowly: try again")?;
        Ok([moving, committing])
    }

    /// Whether a format erased the slow leg, and the fast one does not say so.
    #[inline]
    pub(super) fn is_void(&self) -> bool {
        self.void.load(Ordering::Relaxed)
    }

    /// Erases both legs and gives them a block size. No request is in flight, and the calling thread may wait.
    pub(super) fn format_legs(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let failed = |error: ServiceError| self.format_failed(&error);
        let core = self.core.get().ok_or_else(|| failed(ServiceError::NotNow("it is not in force".to_owned())))?;
        self.check_format(core, block_size)?;
        let _turns = self.stop_beside().map_err(failed)?;
        self.try_fast().map_err(failed)?;
        let before = self.slow.geometry().block_size;
        if let Err(error) = self.slow.format(block_size) {
            if self.slow.geometry().block_size != before {
                self.cease(core, &error);
            }
            return Err(error);
        }
        let formatted = self.fast.format(block_size);
        if formatted.is_err()
            && let Err(error) = self.slow.format(before)
        {
            tracing::error!(cache = self.name, leg = self.slow.name(), %error, "its block size is not what it was");
        }
        self.look_again();
        let same = self.fast.geometry().block_size == self.slow.geometry().block_size;
        let apart = || ServiceError::Legs("its legs have blocks of different sizes now".to_owned());
        let begun = if same { self.begin_anew() } else { Err(apart()) };
        let Err(error) = begun else { return formatted };
        // Of a leg that was formatted, or never had anything of its own, nothing can come back.
        let harmless = formatted.is_ok() || !self.superblock().as_ref().is_some_and(|(known, _)| known.may_be_dirty);
        if same && harmless {
            self.go_on_without(core, &error);
            return formatted;
        }
        self.cease(core, &error);
        formatted.and(Err(failed(error)))
    }

    /// Everything that is wrong beforehand.
    fn check_format(&self, core: &Core, block_size: BlockSize) -> Result<(), VolumeError> {
        let bad = |why| VolumeError::BadBlockSize { volume: self.name.clone(), block_size: block_size.bytes(), why };
        if core.plan.line_shift > block_size.shift() + 6 {
            return Err(bad("a line of the cache would have more than 64 blocks"));
        }
        if self.bytes >> block_size.shift() == 0 {
            return Err(bad("the volume is smaller than one block"));
        }
        Ok(())
    }

    /// Stores the superblock once more: while nothing is erased or out of force yet, a fast leg that takes no writes costs nothing. No request
    /// is in flight.
    pub(super) fn try_fast(&self) -> Result<(), ServiceError> {
        let mut stored = self.superblock();
        let Some((superblock, generation)) = stored.as_mut().filter(|_| !self.is_void()) else { return Ok(()) };
        *generation = superblock.store(&self.fast, *generation)?;
        Ok(())
    }

    fn format_failed(&self, error: &ServiceError) -> VolumeError {
        VolumeError::Io {
            volume: self.name.clone(),
            action: "format",
            path: self.fast.name().into(),
            source: std::io::Error::other(error.to_string()),
        }
    }

    /// An empty cache comes into force. Nobody writes dirty lines back meanwhile.
    fn begin_anew(&self) -> Result<(), ServiceError> {
        let generation = self.superblock().as_ref().map_or(0, |(_, generation)| *generation);
        self.prepare(generation)
    }

    /// The fast leg holds nothing that counts, and cannot be used: the volume goes on as with one that fails at any time.
    fn go_on_without(&self, core: &Core, error: &ServiceError) {
        self.forget_everything(core);
        let generation = self.superblock().as_ref().map_or(0, |(_, generation)| *generation);
        *self.superblock() = Some((self.empty(core), generation));
        self.slow_unflushed.add(WRITTEN | BESIDE);
        // One that had failed before is told of again.
        self.broken.store(false, Ordering::Relaxed);
        self.fast_failed("an empty table after a format", error);
        self.in_force.store(true, Ordering::Relaxed);
    }

    /// Nothing can be believed of the legs before they are formatted again.
    fn cease(&self, core: &Core, error: &dyn std::fmt::Display) {
        self.in_force.store(false, Ordering::Relaxed);
        self.forget_everything(core);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("a format ended half way: {error}"));
        tracing::error!(cache = self.name, %error, "a format ended half way, and the volume cannot be used: format it once more, or bring \
            the fast leg back, then \"volume command VOLUME cache resume\"");
    }

    fn forget_everything(&self, core: &Core) {
        self.void.store(true, Ordering::Relaxed);
        self.fill_table(core, &[], false).expect("no entry is wrong where there is none");
    }

    /// What `resume` does after a format that could not make a table: the fast leg gets an empty one.
    pub(super) fn resume_empty(&self) -> Result<(), ServiceError> {
        let _turns = self.stop_beside()?;
        let (fast, slow) = (self.fast.geometry().block_size, self.slow.geometry().block_size);
        if fast != slow {
            let (fast, slow) = (fast.bytes(), slow.bytes());
            return Err(ServiceError::NotNow(format!(
                "blocks of the fast leg have {fast} bytes and those of the slow one {slow}: format the volume once more"
            )));
        }
        self.look_again();
        self.begin_anew()
    }

    /// Says on the fast leg that it holds nothing, so that the volume opens again after a restart.
    pub(super) async fn say_void(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let _turn = self.moving.take(cx).await;
        let is_empty = |(known, _): &(Superblock, u64)| self.is_void() && known.state == State::Left;
        let Some((empty, generation)) = self.superblock().clone().filter(is_empty) else { return Ok(()) };
        let (region, content) = (empty.region(), empty.encode());
        for generation in [generation + 1, generation + 2] {
            region.store_in(cx.with_scratch(&cx.scratch.carve_rest()), &*self.fast, generation, &content).await?;
        }
        Ok(())
    }
}
