//! Coming and going: what the fast leg holds, and what follows from it.

use std::sync::{MutexGuard, PoisonError, atomic::Ordering};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume};

use super::{
    Cache, Core, FAST, Mode, SLOW, USUAL_LINE, disk,
    disk::{State, Superblock, decode_page},
    table::{Entry, set_bits},
    unflushed::{BESIDE, WRITTEN},
};
use crate::{
    legs,
    record::Found,
    service::{LegOrigin, Mount, Reason, ServiceError},
    settings::SettingError,
};

/// Bytes of the table that are read or written together; a multiple of a page.
const CHUNK: usize = 1 << 20;
/// Clean lines that are compared with the slow leg, to see that it is still the same.
const SAMPLES: u32 = 16;
/// Bytes that are erased at once.
const ERASED_AT_ONCE: u64 = 16 << 20;
/// What was tried where the fast leg has refused what its opening flushes.
const FLUSH: &str = "flush";
/// What helps where write-through is none: the fast leg is in memory.
const OUT_AND_IN: &str =
    "take the cache out (\"volume remove\"), which writes them back, and put it in again as it is to be";

impl Cache {
    /// Comes into force.
    pub(super) fn take_up(&self, mount: &Mount) -> Result<(), ServiceError> {
        if self.is_in_force() {
            // It could not be put away, and memory has more than the table on the fast leg.
            return Ok(());
        }
        if let Some(previous) = mount.previous::<Self>() {
            self.failures.losses.take_over(&previous.failures.losses);
        }
        let error = match self.take_up_legs(mount) {
            Err(error @ (ServiceError::Leg { .. } | ServiceError::Content { .. })) => error,
            other => return other,
        };
        // A fast leg that failed in a running volume, with nothing on it that the slow one lacks, may stay so through a change.
        let previous = mount.previous::<Self>().filter(|_| mount.legs.get(FAST) == Some(&LegOrigin::Kept));
        let before = match mount.reason {
            Reason::Open => Some(self),
            Reason::Change => previous.as_deref(),
            Reason::Create => None,
        };
        let known = before.filter(|before| before.is_spent()).and_then(|before| before.superblock().clone());
        // What the superblock there says of dirty lines stays as it is: it cannot be told.
        let known = known.filter(|(superblock, _)| superblock.may_be_dirty || self.plan.mode == Mode::Through);
        let Some(known) = known else {
            if matches!(error, ServiceError::Leg { what: FLUSH, .. }) {
                // The leg tells once.
                self.failures.losses.add();
            }
            return Err(error);
        };
        self.stay_without(known, &error)
    }

    /// Whether the fast leg failed, and neither memory nor its own table has anything that counts.
    fn is_spent(&self) -> bool {
        let Some(core) = self.core.get().filter(|_| self.is_broken() && !self.is_void()) else { return false };
        (0..core.table.len()).all(|slot| core.table.slot(slot).is_clean())
    }

    /// In force without the fast leg, as it was before.
    fn stay_without(&self, known: (Superblock, u64), error: &ServiceError) -> Result<(), ServiceError> {
        tracing::warn!(cache = self.name, leg = self.fast.name(), %error, "the fast leg is still not well; the volume goes on without its cache");
        let core = self.core.get_or_init(|| Core::new(known.0.plan));
        self.fill_table(core, &[], false)?;
        self.take_force(known);
        self.stay_out(error);
        Ok(())
    }

    /// Is not well, for this reason: the status says so. What is not in force, after a change that failed, `resume` tries once more.
    pub(super) fn stay_out(&self, error: &ServiceError) {
        self.broken.store(true, Ordering::Relaxed);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
    }

    /// Comes into force by what the legs hold.
    fn take_up_legs(&self, mount: &Mount) -> Result<(), ServiceError> {
        self.look_again();
        let is_replaced = mount.previous.is_some();
        let origin = |leg: usize| mount.legs.get(leg).copied().unwrap_or(LegOrigin::New);
        let fast_is_ours = match mount.reason {
            Reason::Open => true,
            Reason::Create => false,
            Reason::Change => is_replaced && origin(FAST) == LegOrigin::Kept,
        };
        self.may_take_over(mount)?;
        match Superblock::load(&self.fast)? {
            // A change that failed has put something else there. What this one had there lies on the slow leg, too.
            None if mount.reason == Reason::Open && matches!(*self.left(), Some((_, false))) => self.prepare(0),
            None if mount.reason == Reason::Open && self.was_emptied()? => {
                tracing::info!(cache = self.name, leg = self.fast.name(), "the fast leg is in memory and was emptied: the cache begins empty");
                self.prepare(0)
            }
            None if mount.reason == Reason::Open => Err(self.wrong(
                "it holds no cache: it is not the fast leg that the volume had. What that one has and the slow leg lacks would be lost: bring it back",
            )),
            None if !legs::is_zero(&legs::read(&self.fast, 0, disk::TABLE as usize)?) => Err(self.wrong(
                "it holds something else; erase its first 16 KiB if it may be the fast leg (the slow one, whose data stay, stands right of the bar)",
            )),
            None => self.prepare(0),
            Some((superblock, found)) => {
                let left = *self.left();
                match left.filter(|(id, _)| mount.reason == Reason::Open && *id != superblock.id) {
                    Some((_, true)) => return Err(self.erased()),
                    // Another one had the leg meanwhile. What this one had there lies on the slow leg, too.
                    Some((_, false)) => return self.prepare(found.generation),
                    None => {}
                }
                // Of a volume that is made again from its legs, by its name, everything counts.
                let again = mount.reason == Reason::Create && superblock.may_be_dirty && superblock.label == self.label;
                let ours = fast_is_ours || again;
                if !ours && superblock.may_be_dirty && !mount.reformat {
                    return Err(self.anothers(&superblock.label, mount.reason));
                }
                if !ours {
                    return self.prepare(found.generation);
                }
                let same_slow = mount.reason == Reason::Open || origin(SLOW) == LegOrigin::Kept;
                self.open(superblock, &found, same_slow)
            }
        }
    }

    /// Whether what the cache before has only on its fast leg, or in memory, does not get lost by this mount.
    pub(super) fn may_take_over(&self, mount: &Mount) -> Result<(), ServiceError> {
        let Some(previous) = mount.previous::<Self>().filter(|_| mount.reason == Reason::Change) else { return Ok(()) };
        let fast_is_ours = mount.legs.get(FAST) == Some(&LegOrigin::Kept);
        if !fast_is_ours && previous.dirty_lines() > 0 {
            let what_to_do = if previous.forgets {
                OUT_AND_IN
            } else {
                "set mode=through, let \"volume command\" flush them, and then change it"
            };
            return Err(ServiceError::NotNow(format!(
                "{} dirty lines are on the fast leg that is to go ({}): {what_to_do}",
                previous.dirty_lines(),
                previous.fast.name()
            )));
        }
        if fast_is_ours && previous.is_in_force() {
            return Err(ServiceError::NotNow(
                "what the cache has in memory could not be stored: the log says why; it goes on as before".to_owned(),
            ));
        }
        if self.forgets && self.plan.mode == Mode::Through && previous.dirty_lines() > 0 {
            // See `was_emptied`.
            return Err(ServiceError::NotNow(format!(
                "{} dirty lines are only on the fast leg ({}), which is in memory, and with mode=through nobody would miss them after the daemon's \
                 stop: {OUT_AND_IN}",
                previous.dirty_lines(),
                previous.fast.name()
            )));
        }
        Ok(())
    }

    /// Whether the daemon's stop has emptied the fast leg, and the slow one has everything: with write-through, nothing dirty is ever in memory
    /// alone.
    fn was_emptied(&self) -> Result<bool, ServiceError> {
        let may_be = self.forgets && self.plan.mode == Mode::Through && self.core.get().is_none();
        Ok(may_be && legs::is_zero(&legs::read(&self.fast, 0, disk::TABLE as usize)?))
    }

    /// How this one went out of force.
    fn left(&self) -> MutexGuard<'_, Option<([u8; 16], bool)>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it does not come back then.
    fn erased(&self) -> ServiceError {
        self.wrong(&format!(
            "a change that failed has erased it, and with it {} lines that were not written back: what the slow leg ({}) has in their places is \
             older. Restore the volume: make it anew over the slow leg",
            self.dirty_lines(),
            self.slow.name()
        ))
    }

    /// Why a fast leg that may have what no other has is not taken.
    fn anothers(&self, label: &str, reason: Reason) -> ServiceError {
        if reason == Reason::Change && label == self.label {
            // It could not be told when it went, or the volume never knew of it: the slow leg was written without it since.
            return self.wrong(&format!(
                "it is the cache of volume {label:?} and holds data that were not written back. If it was this volume's (it failed and was taken out, or \
                 the power failed while it was put in), they are older than the slow leg: --reformat begins an empty one, and the volume made anew from \
                 it would have old blocks. If it is another's of this name, open that one and flush it"
            ));
        }
        self.wrong(&format!(
            "it is the cache of volume {label:?} and holds data that were not written back; open that volume and flush it. If nothing of it is \
             needed (the power failed while it was put in, say), --reformat begins an empty one"
        ))
    }

    fn wrong(&self, what: &str) -> ServiceError {
        ServiceError::Content { leg: self.fast.name().to_owned(), what: what.to_owned() }
    }

    /// The cache that is there comes into force again, or, when it has nothing to lose and does not fit, an empty one.
    fn open(&self, superblock: Superblock, found: &Found, same_slow: bool) -> Result<(), ServiceError> {
        let damaged = found.wrong_copy();
        if let Some(damaged) = &damaged {
            tracing::warn!(cache = self.name, leg = self.fast.name(), "{damaged}; the other copy is used");
        }
        *self.damaged.lock().unwrap_or_else(PoisonError::into_inner) = damaged;
        let misfit = self.misfit(&superblock);
        if superblock.may_be_dirty
            && let Some(misfit) = misfit
        {
            return Err(misfit);
        }
        if misfit.is_some() || superblock.state == State::Left {
            return self.prepare(found.generation);
        }
        // A page that a dead process wrote may not be durable yet: what it says must not go back when its slots have been given to others.
        let flushed = self.wait_for(|me, cx| Box::pin(async move { legs::flush(cx, &*me.fast).await }))?;
        flushed.map_err(|source| self.leg_error(FLUSH, source))?;
        let entries = self.load_table(&superblock)?;
        let same = !same_slow || superblock.state != State::Closed || self.compare_samples(&superblock, &entries)?;
        if !same && superblock.may_be_dirty {
            return Err(self.wrong(&format!(
                "it is the cache of volume {:?}, and the slow leg ({}) holds other data than were there: it is another leg, or was written \
                 without its cache. Bring back the right one; to go on without what only the fast leg has, make the volume anew over the slow leg",
                superblock.label,
                self.slow.name()
            )));
        }
        if !same {
            tracing::warn!(
                cache = self.name,
                slow = self.slow.name(),
                "the slow leg was written without its cache, which begins empty"
            );
            return self.prepare(found.generation);
        }
        // Of lines that are only in the cache because they are on the slow leg, nobody knows when that is another one.
        let keep_clean = superblock.state == State::Closed && same_slow;
        let core = self.core.get_or_init(|| Core::new(superblock.plan));
        let dirty = self.fill_table(core, &entries, keep_clean)?;
        self.begin(superblock, found.generation, dirty)
    }

    /// Why the cache that is there cannot be this one.
    fn misfit(&self, superblock: &Superblock) -> Option<ServiceError> {
        let now = self.shape().block_size;
        if superblock.block_size != now {
            let (then, now) = (superblock.block_size.bytes(), now.bytes());
            return Some(self.wrong(&format!("its blocks have {then} bytes and those of the volume {now}")));
        }
        if superblock.bytes >> 12 != self.bytes >> 12 {
            return Some(self.wrong(&format!(
                "it is the cache of volume {:?} of {} bytes, and holds data that were not written back; the slow leg here ({}) is of a \
                 volume of {} bytes",
                superblock.label,
                superblock.bytes,
                self.slow.name(),
                self.bytes
            )));
        }
        let line_shift = self.core.get().map(|core| core.plan.line_shift).or(self.plan.line_shift);
        if line_shift.is_some_and(|line_shift| line_shift != superblock.plan.line_shift) {
            let had = (1_u64 << superblock.plan.line_shift) >> 10;
            let why = format!(
                "the cache has lines of {had}K and dirty ones among them: write line={had}K, or flush it before the change"
            );
            return Some(SettingError::new("line", why).into());
        }
        let table = |plan: disk::Plan| (plan.slots, plan.per_page(superblock.block_size));
        self.core
            .get()
            .is_some_and(|core| table(core.plan) != table(superblock.plan))
            .then(|| self.wrong("its table has another size than before"))
    }

    /// An empty cache comes into force.
    pub(super) fn prepare(&self, generation: u64) -> Result<(), ServiceError> {
        let line_shift = self.plan.line_shift.unwrap_or(USUAL_LINE);
        let too_small = || {
            let (name, line) = (self.fast.name(), (1_u64 << line_shift) >> 10);
            ServiceError::Legs(format!("the fast leg ({name}) is too small for 8 lines of {line}K: set a smaller line"))
        };
        let plan = disk::Plan::for_leg(self.fast.geometry().bytes(), line_shift).ok_or_else(too_small)?;
        let core = self.core.get_or_init(|| Core::new(plan));
        let superblock = self.empty(core);
        // While the table is made, no superblock names it.
        let generation = superblock.store(&self.fast, generation)?;
        let erased = self.wait_for({
            let bytes = disk::TABLE..core.plan.data_start();
            |me, cx| Box::pin(async move { me.erase_table(cx, bytes).await })
        })?;
        erased.map_err(|source| self.leg_error("erase", source))?;
        self.fill_table(core, &[], false)?;
        self.begin(superblock, generation, false)
    }

    /// What says of the fast leg that it holds nothing.
    pub(super) fn empty(&self, core: &Core) -> Superblock {
        Superblock {
            id: *uuid::Uuid::new_v4().as_bytes(),
            bytes: self.bytes,
            block_size: self.shape().block_size,
            plan: core.plan,
            state: State::Left,
            may_be_dirty: false,
            label: self.label.clone(),
        }
    }

    pub(super) fn leg_error(&self, what: &'static str, source: BlockError) -> ServiceError {
        ServiceError::Leg { what, leg: self.fast.name().to_owned(), source }
    }

    async fn erase_table(&self, cx: TaskContext<'_>, bytes: std::ops::Range<u64>) -> Result<(), BlockError> {
        let shift = self.shape().block_size.shift();
        let operation = Operation::WriteZeroes { fua: false, deallocate: true };
        let mut at = bytes.start;
        while at < bytes.end {
            let len = ERASED_AT_ONCE.min(bytes.end - at);
            let request = Request { operation, lba: Lba(at >> shift), count: BlockCount(len >> shift), segments: &[] };
            self.fast.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await?;
            at += len;
        }
        legs::flush(cx, &*self.fast).await
    }

    /// From now on the table on the fast leg is not whole: a crash shows by this.
    fn begin(&self, superblock: Superblock, generation: u64, dirty: bool) -> Result<(), ServiceError> {
        let may_be_dirty = dirty || self.plan.mode == Mode::Back;
        let superblock = Superblock { state: State::InForce, may_be_dirty, ..superblock };
        let generation = superblock.store(&self.fast, generation)?;
        self.take_force((superblock, generation));
        Ok(())
    }

    fn take_force(&self, known: (Superblock, u64)) {
        self.may_be_dirty.store(known.0.may_be_dirty, Ordering::Relaxed);
        *self.superblock() = Some(known);
        *self.left() = None;
        for flag in [&self.void, &self.broken, &self.leaving] {
            flag.store(false, Ordering::Relaxed);
        }
        self.flushing.left.store(0, Ordering::Relaxed);
        self.fast_unflushed.take();
        self.slow_unflushed.add(WRITTEN | BESIDE);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.look_again();
        self.in_force.store(true, Ordering::Relaxed);
    }

    /// What the table on the fast leg says.
    fn load_table(&self, superblock: &Superblock) -> Result<Vec<(u32, Entry)>, ServiceError> {
        let mut entries = Vec::new();
        if superblock.state != State::Closed && !superblock.may_be_dirty {
            return Ok(entries);
        }
        let (plan, block_size) = (superblock.plan, superblock.block_size);
        let (page_bytes, count) = (block_size.bytes() as usize, plan.per_page(block_size));
        let part = plan.part(page_bytes);
        let pages = plan.pages(block_size);
        let together = (CHUNK / page_bytes) as u32;
        for first in (0..pages).step_by(together as usize) {
            let bytes = (pages - first).min(together) as usize * page_bytes;
            let chunk = legs::read(&self.fast, disk::TABLE + u64::from(first) * page_bytes as u64, bytes)?;
            for (number, page) in (first..).zip(chunk.chunks(page_bytes)) {
                let Some(found) = decode_page(page, part, number, superblock.mark()) else {
                    if superblock.may_be_dirty {
                        return Err(self.wrong(&format!(
                            "page {number} of its table is damaged, and with it where {count} lines are that may be only here. To go on without \
                             what was not written back, make the volume anew over the slow leg ({})",
                            self.slow.name()
                        )));
                    }
                    tracing::warn!(
                        cache = self.name,
                        page = number,
                        "a page of the table is damaged; its lines are read from the slow leg"
                    );
                    continue;
                };
                let slots = (number * count..plan.slots).zip(found);
                entries.extend(slots.filter(|(_, entry)| entry.line != 0));
            }
        }
        let clean = superblock.state == State::Closed;
        entries.retain(|(_, entry)| entry.dirty != 0 || (clean && entry.valid != 0));
        entries.iter().try_for_each(|(slot, entry)| self.check_entry(plan, *slot, *entry))?;
        Ok(entries)
    }

    /// Whether an entry names blocks that exist.
    fn check_entry(&self, plan: disk::Plan, slot: u32, entry: Entry) -> Result<(), ServiceError> {
        let shift = self.shape().block_size.shift();
        let blocks = self.bytes >> shift;
        let per_line = 1_u64 << (plan.line_shift - shift);
        let first = (entry.line - 1).checked_mul(per_line).filter(|first| *first < blocks);
        let last = 63 - u64::from((entry.dirty | entry.valid).leading_zeros().min(63));
        if first.is_some_and(|first| last < per_line && first + last < blocks) {
            return Ok(());
        }
        Err(self
            .wrong(&format!("its table says that slot {slot} has line {}, which lies outside the volume", entry.line - 1)))
    }

    /// Puts lines into the table; whether any of them is dirty.
    pub(super) fn fill_table(&self, core: &Core, entries: &[(u32, Entry)], keep_clean: bool) -> Result<bool, ServiceError> {
        core.table.clear();
        let mut dirty_lines = 0;
        for (slot, entry) in entries {
            let valid = if keep_clean { entry.valid | entry.dirty } else { entry.dirty };
            let line = entry.line - 1;
            if valid == 0 {
                continue;
            }
            if core.table.find(line).is_some() {
                return Err(self.wrong(&format!("its table has line {line} in two places: it is damaged")));
            }
            if !core.table.put_in(line, *slot) {
                if entry.dirty != 0 {
                    return Err(self.wrong(&format!("its table has more lines like line {line} than can be: it is damaged")));
                }
                continue;
            }
            let place = core.table.slot(*slot);
            set_bits(&place.valid, valid);
            set_bits(&place.dirty, entry.dirty);
            set_bits(&place.stored, entry.dirty);
            set_bits(&place.durable, entry.dirty);
            dirty_lines += u64::from(entry.dirty != 0);
        }
        let slots = core.table.len();
        let held = |slot: u32| core.table.slot(slot).line().is_some();
        core.policy.lock().unwrap_or_else(PoisonError::into_inner).reset(slots, held);
        let before = self.counters.sum(|here| &here.dirty_lines);
        self.counters.add(|here| &here.dirty_lines, dirty_lines.wrapping_sub(before));
        Ok(dirty_lines > 0)
    }

    /// Whether some clean blocks are on the slow leg as they are in the cache.
    fn compare_samples(&self, superblock: &Superblock, entries: &[(u32, Entry)]) -> Result<bool, ServiceError> {
        let shift = superblock.block_size.shift();
        let clean: Vec<_> = entries.iter().filter(|(_, entry)| entry.valid & !entry.dirty != 0).collect();
        let step = (clean.len() / SAMPLES as usize).max(1);
        for (slot, entry) in clean.into_iter().step_by(step) {
            let block = u64::from((entry.valid & !entry.dirty).trailing_zeros());
            let (at, len) = (block << shift, 1 << shift);
            let cached = legs::read(&self.fast, superblock.plan.data(*slot) + at, len);
            let slow = legs::read(&self.slow, ((entry.line - 1) << superblock.plan.line_shift) + at, len);
            // A bad sector tells nothing.
            let is_bad =
                |read: &Result<_, _>| matches!(read, Err(ServiceError::Leg { source: BlockError::ReadFault { .. }, .. }));
            if !is_bad(&cached) && !is_bad(&slow) && cached? != slow? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Goes out of force: what is in memory goes to the table, so that the next mount finds it. It stays in force when that fails.
    pub(super) fn put_away(&self) -> Result<(), ServiceError> {
        let Ok(core) = self.core() else { return Ok(()) };
        // Nothing changes any more that is stored now.
        self.in_force.store(false, Ordering::Relaxed);
        let left = self.wait_for(|me, cx| Box::pin(async move { me.store_everything(cx).await }));
        let left = left.and_then(|left| left.map_err(|source| self.leg_error("store the table on", source)));
        if left.is_err() {
            self.in_force.store(true, Ordering::Relaxed);
            return left;
        }
        if self.is_void() {
            // Without it the next mount would look for what was formatted away.
            if let Err(error) = self.wait_for(|me, cx| Box::pin(async move { me.say_void(cx).await }))? {
                tracing::error!(cache = self.name, leg = self.fast.name(), %error, "the fast leg cannot be told that it holds nothing");
            }
            return Ok(());
        }
        // Where memory has nothing of its own the next mount does without the leg.
        if !self.is_spent()
            && let Err(error) = self.try_fast()
        {
            // The next mount would not come into force, nor would this one again.
            self.fast_failed("the superblock", &error);
            self.in_force.store(true, Ordering::Relaxed);
            return Err(error);
        }
        if self.is_broken() {
            // What is on it cannot be vouched for: the next mount takes it for a crash.
            return Ok(());
        }
        let dirty = self.dirty_lines() > 0;
        let state = if self.leaving.load(Ordering::Relaxed) && !dirty { State::Left } else { State::Closed };
        let Some((superblock, generation)) = self.superblock().take() else { return Ok(()) };
        let block_size = superblock.block_size;
        debug_assert_eq!(
            (core.plan.slots, core.plan.per_page(block_size)),
            (superblock.plan.slots, superblock.plan.per_page(block_size))
        );
        let closed = Superblock { state, may_be_dirty: dirty, ..superblock.clone() };
        let Err(error) = closed.store(&self.fast, generation) else {
            *self.left() = Some((superblock.id, dirty));
            return Ok(());
        };
        self.fast_failed("the superblock", &error);
        // One copy may call it closed: to go on then would make old blocks of the table count after a crash.
        if let Ok(generation) = superblock.store(&self.fast, generation + 2) {
            *self.superblock() = Some((superblock, generation));
            self.in_force.store(true, Ordering::Relaxed);
        }
        Err(error)
    }

    /// Gone for good. A fast leg that had failed could not be told before, and what it still calls dirty is older than what the slow leg has.
    pub(super) fn say_left(&self) {
        let is_elsewhere = self.dirty_lines() == 0 && self.slow_unflushed.is_empty();
        let known = self.superblock().clone().filter(|_| self.is_broken() && is_elsewhere);
        let Some((superblock, _)) = known else { return };
        let told = Superblock::load(&self.fast).and_then(|there| {
            // The new stack may have the leg for something else, and have stored its own there: nothing of the cache comes back then.
            let ours = there.filter(|(now, found)| now.id == superblock.id && !found.lacks_copy());
            let Some((_, found)) = ours else { return Ok(()) };
            let left = Superblock { state: State::Left, may_be_dirty: false, ..superblock };
            left.store(&self.fast, found.generation).map(drop)
        });
        if let Err(error) = told {
            tracing::error!(cache = self.name, leg = self.fast.name(), %error, "the fast leg is no cache of this volume any more, and cannot be told: \
                it may call blocks dirty that are older than those of the slow leg. Erase its first 16 KiB before it is used again");
        }
    }

    /// Makes all data durable and then stores the whole table.
    async fn store_everything(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let core = self.core.get().ok_or(BlockError::NotReady)?;
        self.slow_unflushed.add(WRITTEN);
        self.fast_unflushed.add(WRITTEN);
        self.commit_of(cx, core).await?;
        if self.is_broken() || self.leaving.load(Ordering::Relaxed) && self.dirty_lines() == 0 {
            // Who comes after one that was left begins anew.
            return Ok(());
        }
        let (block_size, mark) = (self.shape().block_size, self.mark()?);
        let bytes = block_size.bytes() as usize;
        let pages = core.plan.pages(block_size);
        let together = (millrace_memory::BUFFER_SIZE / bytes) as u32;
        let buffer = cx.buffers.take().await;
        let cx = cx.deeper();
        for first in (0..pages).step_by(together as usize) {
            let count = (pages - first).min(together);
            let segments = [buffer.segment(count as usize * bytes)];
            for at in 0..count {
                let page = segments[0].part(at as usize * bytes, bytes).expect("a part of the buffer");
                Self::copy_page(core, mark, first + at, page);
            }
            let lba = Lba((disk::TABLE >> block_size.shift()) + u64::from(first));
            let operation = Operation::Write { fua: false };
            let write = Request { operation, lba, count: BlockCount(u64::from(count)), segments: &segments };
            self.fast.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await?;
        }
        legs::flush(cx, &*self.fast).await
    }
}
