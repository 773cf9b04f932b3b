//! The operator's side: status, commands, and the way out of a running volume.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use millrace_block::{TaskContext, Volume};

use super::{Cache, KIND, Mode, SLOW, format::PATIENCE, policy::Policy, table::Table};
use crate::{
    background::{LocalFuture, Task},
    legs::block_on,
    service::{Health, LegOrigin, Mount, Progress, Reason, Service, ServiceError, Status},
    settings::Settings,
};

impl Cache {
    /// Remembers what a leg said, for the status; logs it when it is news.
    pub(super) fn note(&self, text: String) {
        let mut trouble = self.trouble.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if trouble.as_ref() != Some(&text) {
            tracing::error!(cache = self.name, "{text}; it is tried again");
            *trouble = Some(text);
        }
    }

    /// Does something that waits, on the calling thread.
    pub(super) fn wait_for<T: 'static>(
        &self,
        work: impl for<'a> FnOnce(Arc<Self>, TaskContext<'a>) -> LocalFuture<'a, T>,
    ) -> Result<T, ServiceError> {
        let gone = || ServiceError::NotNow("the cache is going".to_owned());
        let me = self.me.upgrade().ok_or_else(gone)?;
        Ok(block_on(move |cx| work(me, cx))?)
    }

    /// Writes everything back, on the calling thread. Lines that became dirty again meanwhile are left.
    pub(super) fn drain_now(&self) -> Result<(), ServiceError> {
        let drained = self.wait_for(|me, cx| Box::pin(async move { me.drain(cx).await }))?;
        drained.map_err(|source| {
            let leg = format!("{} ({} lines are only on the fast leg)", self.fast.name(), self.dirty_lines());
            ServiceError::Leg { what: "write back what is dirty on", leg, source }
        })
    }

    /// What is dirty after everything was written back became so meanwhile.
    pub(super) fn all_is_written_back(&self) -> Result<(), ServiceError> {
        match self.dirty_lines() {
            0 => Ok(()),
            dirty => Err(ServiceError::NotNow(format!(
                "{dirty} lines are only on the fast leg ({}): they were in use, or became dirty again, while all were written back; try again when \
                 less is written",
                self.fast.name()
            ))),
        }
    }

    fn start_flush(&self) -> Result<String, ServiceError> {
        if self.core.get().is_none() {
            return Err(ServiceError::NotNow("the cache is not in force".to_owned()));
        }
        let dirty = self.dirty_lines();
        self.flushing.done.store(0, Ordering::Relaxed);
        self.flushing.total.store(dirty, Ordering::Relaxed);
        self.flushing.left.store(u32::MAX, Ordering::Release);
        Ok(format!("{dirty} dirty lines are being written back; \"volume show\" tells how far it is"))
    }

    /// After a change that failed, and could not be taken back: as when the volume is opened.
    fn come_back(&self) -> Result<String, ServiceError> {
        let _turns = self.stop_beside()?;
        let legs = vec![LegOrigin::Kept; 2];
        self.take_up(&Mount { reason: Reason::Open, legs, previous: None, reformat: false })?;
        let said = if self.is_broken() {
            "the volume answers again, without its cache: the fast leg is still not well"
        } else {
            "the fast leg is used again"
        };
        Ok(said.to_owned())
    }

    fn resume(&self) -> Result<String, ServiceError> {
        if self.is_void() {
            self.resume_empty()?;
            return Ok("the fast leg is used again, and begins empty".to_owned());
        }
        if !self.is_broken() {
            return Err(ServiceError::NotNow("the fast leg is in use".to_owned()));
        }
        if !self.is_in_force() {
            return self.come_back();
        }
        self.distrust()?;
        self.broken.store(false, Ordering::Relaxed);
        // The table there may call blocks dirty that were written to the slow leg meanwhile, and nothing else stores it before a flush. Only now:
        // who still took the leg for broken was acknowledged without.
        let stored = self.wait_for(|me, cx| Box::pin(async move { me.commit(cx).await }));
        if let Ok(Err(error)) = &stored
            && self.is_in_force()
            && !self.is_broken()
        {
            // The fast leg is well. Without it all that is written would go to a leg that makes nothing durable. Of what was written back to
            // that one, and is not trusted here any more, the guest is told at its next flush.
            return Ok(format!(
                "the fast leg is used again, but its table cannot be put right yet ({error}; \"volume show\" has the slow leg's trouble, where it is \
                 that): until a flush succeeds, the guest's or this cache's command \"flush\", blocks may be old after the daemon's death"
            ));
        }
        let stored = stored.and_then(|stored| stored.map_err(|source| self.leg_error("store the table on", source)));
        if let Err(error) = stored {
            self.broken.store(true, Ordering::Relaxed);
            return Err(error);
        }
        *self.trouble.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        Ok("the fast leg is used again".to_owned())
    }

    /// What is clean on a fast leg that comes again is taken from the slow one: it may never have been durable. Not to be called on a shard.
    fn distrust(&self) -> Result<(), ServiceError> {
        let Some(core) = self.core.get() else { return Ok(()) };
        let end = Instant::now() + PATIENCE;
        for slot in 0..core.table.len() {
            let place = core.table.slot(slot);
            // Who filled it before the leg failed may do so still.
            while let Some(line) = place.line() {
                if let Some(_range) = core.ranges.try_lock(core.line_bytes(line)) {
                    self.in_doubt(core, slot, u64::MAX);
                    break;
                }
                if Instant::now() > end {
                    return Err(ServiceError::NotNow("requests to the legs take too long: try again".to_owned()));
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        if !self.fast_unflushed.is_empty() && self.dirty_lines() > 0 {
            tracing::warn!(
                cache = self.name,
                leg = self.fast.name(),
                "it may have lost dirty data of which no flush told the guest that they \
                are durable; the guest's next flush fails"
            );
            self.failures.losses.add();
        }
        Ok(())
    }

    fn facts(&self, status: &mut Status) {
        let mut fact = |name: &str, value: String| status.facts.push((name.to_owned(), value));
        let mode = match self.plan.mode {
            Mode::Through => "write-through",
            Mode::Back => "write-back",
        };
        fact("mode", mode.to_owned());
        if let Some(core) = self.core.get() {
            let slots = u64::from(core.table.len());
            let free = core.policy.lock().unwrap_or_else(std::sync::PoisonError::into_inner).free() as u64;
            let line = 1_u64 << core.plan.line_shift;
            fact("lines", format!("{} of {slots} in use, {}K each", slots - free, line >> 10));
            let each = (Table::BYTES_PER_LINE + Policy::BYTES_PER_LINE) as u64;
            fact("memory", format!("{} KiB", (slots * each).div_ceil(1024)));
        }
        if self.may_be_dirty.load(Ordering::Relaxed) {
            fact("dirty lines", self.dirty_lines().to_string());
        }
        let count = |counter: fn(&super::Counters) -> &std::sync::atomic::AtomicU64| self.counters.sum(counter);
        let (hits, misses) = (count(|here| &here.read_hits), count(|here| &here.read_misses));
        let percent =
            |hits: u64, misses: u64| match (u128::from(hits) * 1000).checked_div(u128::from(hits) + u128::from(misses)) {
                Some(permille) => format!("{hits} of {} ({}.{} %)", hits + misses, permille / 10, permille % 10),
                None => "none yet".to_owned(),
            };
        fact("read hits", percent(hits, misses));
        fact("write hits", percent(count(|here| &here.write_hits), count(|here| &here.write_misses)));
        for (name, number) in [
            ("passed by", count(|here| &here.passed_by)),
            ("lines evicted", count(|here| &here.evicted)),
            ("lines written back", count(|here| &here.written_back)),
        ] {
            if number > 0 {
                fact(name, number.to_string());
            }
        }
    }
}

impl Service for Cache {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        let comes_back = mount.reason == Reason::Open && self.core.get().is_some();
        let taken = self.take_up(mount);
        if let Err(error) = &taken
            && comes_back
        {
            self.stay_out(error);
        }
        taken
    }

    fn may_mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        self.may_take_over(mount)
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.put_away()
    }

    fn leave(&self) -> Result<(), ServiceError> {
        self.leaving.store(true, Ordering::Relaxed);
        if !self.may_be_dirty.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.draining.store(true, Ordering::Relaxed);
        let drained = self.drain_now();
        self.draining.store(false, Ordering::Relaxed);
        if drained.is_err() {
            self.leaving.store(false, Ordering::Relaxed);
        }
        // Writes go through still: who asks once more finds less to do.
        drained.and_then(|()| self.all_is_written_back())
    }

    fn hurry(&self, on: bool) {
        if !on {
            // The change is over: whoever is still here goes on as before.
            self.leaving.store(false, Ordering::Relaxed);
        }
    }

    fn discard(&self, stored: bool) {
        if stored {
            self.say_left();
        }
    }

    fn has_untold(&self) -> bool {
        self.failures.losses.is_untold()
    }

    fn leg_is_whole(&self, leg: usize) -> bool {
        leg == SLOW && self.dirty_lines() == 0
    }

    fn status(&self) -> Status {
        let mut status = Status::good([]);
        self.facts(&mut status);
        if self.is_void() && !self.is_in_force() {
            status.health = Health::Failed;
            status.facts.push(("format".to_owned(), "ended half way: format once more, or resume".to_owned()));
        } else if self.is_broken() && !self.is_in_force() {
            status.health = Health::Failed;
            let what = "failed in a change, and requests are refused: bring it back, and resume";
            status.facts.push(("fast leg".to_owned(), what.to_owned()));
        } else if self.is_broken() {
            let dirty = self.dirty_lines();
            status.health = if dirty == 0 { Health::Degraded } else { Health::Failed };
            let what = match dirty {
                0 => "failed; the volume goes on without it".to_owned(),
                dirty => format!("failed; {dirty} dirty lines are only there"),
            };
            status.facts.push(("fast leg".to_owned(), what));
        }
        if let Some(damaged) = &*self.damaged.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
            status.facts.push(("superblock repaired".to_owned(), damaged.clone()));
        }
        if let Some(trouble) = &*self.trouble.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
            status.facts.push(("trouble".to_owned(), trouble.clone()));
        }
        if self.flushing.left.load(Ordering::Relaxed) > 0 {
            let total = self.flushing.total.load(Ordering::Relaxed);
            let done = self.flushing.done.load(Ordering::Relaxed).min(total);
            status.progress.push(Progress { what: "flush (lines)".to_owned(), done, total });
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        match command {
            "flush" => self.start_flush(),
            "resume" => self.resume(),
            _ => Err(ServiceError::no_command(&KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        self.leaving.store(false, Ordering::Relaxed);
        vec![Task::new("cache upkeep", move |cx, stop| Box::pin(self.upkeep(cx, stop)))]
    }
}
