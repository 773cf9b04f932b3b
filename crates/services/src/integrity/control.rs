//! What the operator and the layer ask of it: coming into force, going, status, scrub.

use std::{
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use millrace_block::{BlockError, TaskContext, Volume as _, clock};
use millrace_cipher::random;

use super::{
    KIND,
    page::{BLOCKS, OFFSET, REGION},
    scrub::Scrub,
    table::MOST_BLOCKS,
    upkeep::Means,
    volume::Integrity,
};
use crate::{
    background::{LocalFuture, Pace, Stop, Task, own_buffers, scrub_ended},
    legs,
    record::Found,
    service::{Health, Mount, Progress, Reason, Service, ServiceError, Status},
    settings::Settings,
};

/// Bytes of the header's content.
const CONTENT: usize = 40;
/// Where in it the phase is.
const PHASE: usize = 32;
/// Bytes at either end of a leg that must be zeroes before it is taken for one that can be erased.
const LOOKED_AT: u64 = 1 << 20;

/// How long the background task sleeps before it looks whether there is a scrub to do.
const NAP: Duration = Duration::from_millis(100);

/// What is known beside the path of requests.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// Tells this volume's pages from those of others.
    pub(super) uuid: [u8; 16],
    pub(super) generation: u64,
    damaged: Option<String>,
    pub(super) scrub: Option<Scrub>,
    /// What the last scrub found.
    pub(super) scrubbed: Option<String>,
}

/// What the header says of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Phase {
    /// The groups are as their pages say.
    InUse = 0,
    /// The groups are to be erased before anything else.
    Erasing = 1,
}

impl Integrity {
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work that waits for the leg, on a thread that may wait.
    pub(super) fn block_on(
        &self,
        what: &'static str,
        work: impl for<'a> FnOnce(&'a Self, TaskContext<'a>) -> LocalFuture<'a, Result<(), BlockError>> + 'static,
    ) -> Result<(), ServiceError> {
        let volume = self.me.upgrade().ok_or_else(|| ServiceError::NotNow("it is being closed".to_owned()))?;
        let result = legs::block_on(move |cx| Box::pin(async move { work(&volume, cx).await }))?;
        result.map_err(|source| ServiceError::Leg { what, leg: self.leg.name().to_owned(), source })
    }

    fn wrong(&self, what: impl Into<String>) -> ServiceError {
        ServiceError::Content { leg: self.leg.name().to_owned(), what: what.into() }
    }

    fn content(&self, uuid: &[u8; 16], phase: Phase) -> Vec<u8> {
        let numbers = [1, self.block_size().bytes(), BLOCKS as u32, OFFSET as u32, phase as u32, 0].map(u32::to_le_bytes);
        [&uuid[..], &numbers.concat()].concat()
    }

    /// Prepares a leg that holds nothing, or nothing that is still wanted.
    fn prepare(&self, overwrite: bool) -> Result<(), ServiceError> {
        let uuid = random().map_err(|error| ServiceError::NotNow(error.to_string()))?;
        if self.leg.usage().allocated == 0 {
            self.control().uuid = uuid;
            self.store(Phase::InUse)?;
            self.blank.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let bytes = self.leg.geometry().bytes();
        let len = LOOKED_AT.min(bytes >> 12 << 12);
        for at in [0, (bytes >> 12 << 12) - len] {
            if !overwrite && !legs::is_zero(&legs::read(&self.leg, at, len as usize)?) {
                return Err(self.wrong(
                    "it has no integrity header, and holds something else; erase it first (blkdiscard, or a new file) if that can go",
                ));
            }
        }
        self.control().uuid = uuid;
        self.erase_blocks()
    }

    /// Replaces both copies of the header.
    pub(super) fn store(&self, phase: Phase) -> Result<(), ServiceError> {
        let (uuid, generation) = {
            let control = self.control();
            (control.uuid, control.generation)
        };
        let content = self.content(&uuid, phase);
        for generation in [generation + 1, generation + 2] {
            self.flushes.store(&self.leg, &REGION, generation, &content)?;
            self.control().generation = generation;
        }
        Ok(())
    }

    /// Takes over what the header says.
    fn open_header(&self, found: &Found) -> Result<(), ServiceError> {
        let uuid: Option<[u8; 16]> = found.content.get(..16).and_then(|uuid| uuid.try_into().ok());
        let Some(uuid) = uuid.filter(|_| found.content.len() == CONTENT) else {
            return Err(self.wrong(format!("its header has {} bytes and not {CONTENT}", found.content.len())));
        };
        let number = |at: usize| found.content[at..at + 4].iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let (algorithm, block_size, phase, wanted) = (number(16), number(20), number(PHASE), self.block_size().bytes());
        if algorithm != 1 {
            return Err(self.wrong(format!("its checksums are of kind {algorithm}, which this program does not know")));
        }
        if block_size != wanted {
            return Err(self.wrong(format!("it has blocks of {block_size} bytes, and the volume of {wanted}")));
        }
        if u64::from(number(24)) != BLOCKS || u64::from(number(28)) != OFFSET || phase > Phase::Erasing as u32 {
            return Err(self.wrong("its groups are laid out in a way that this program does not know"));
        }
        *self.control() = Control { uuid, generation: found.generation, ..Control::default() };
        let read_only = self.geometry().read_only;
        if phase == Phase::Erasing as u32 {
            if read_only {
                return Err(self.wrong("it was being erased, and cannot be written now: make it writable"));
            }
            if let Some(damaged) = &found.damaged {
                // That copy may be the newer one, and say that the erasure was completed.
                return Err(self.wrong(format!(
                    "{damaged}, and the other one says that everything is to be erased, which may be of long ago: bring that copy back, or \
                     create the volume again if it was being formatted"
                )));
            }
            tracing::info!(volume = self.name, leg = self.leg.name(), "an erasure that was cut short is completed");
            return self.erase_blocks();
        }
        let damaged = found.wrong_copy();
        if let Some(damaged) = &damaged {
            tracing::warn!(volume = self.name, leg = self.leg.name(), "{damaged}; the other copy is used");
        }
        if !read_only {
            // A page that a dead process wrote may not be durable yet: the next one goes over the page that is. Before anything else that
            // flushes: the leg tells once.
            self.block_on("flush", |volume, cx| Box::pin(volume.flushes.flush_alone(cx, &*volume.leg)))?;
        }
        // Also one that is of before a crash: alone, it would have the volume erased.
        if !read_only
            && !found.is_even()
            && let Err(error) = self.store(Phase::InUse)
        {
            tracing::warn!(
                volume = self.name,
                %error,
                "a copy of its header cannot be replaced; it is tried when the volume is opened again"
            );
        }
        self.control().damaged = damaged;
        Ok(())
    }

    /// The background task.
    async fn run(&self, cx: TaskContext<'_>, stop: Stop) {
        // While it closes a group, writers wait for it, and they may have all of the shard's buffers.
        let own = match own_buffers() {
            Ok(own) => own,
            Err(error) => {
                tracing::error!(volume = self.name, %error, "no memory to write checksums with");
                return;
            }
        };
        let mut cx = cx;
        cx.buffers = &own;
        let (mut failing, mut seen, mut pace) = (false, None, Pace::new(self.plan.rate));
        let mut rest = self.plan.close_after;
        while !stop.is_set() {
            let began = clock::now();
            let scrubbed = {
                let buffer = cx.buffers.take().await;
                let _turn = self.turn.take(cx).await;
                let means = Means { cx: cx.deeper(), buffer: &buffer };
                if rest.is_zero() {
                    let result = self.close_idle(means, &stop, false).await;
                    if let Err(error) = result
                        && !failing
                    {
                        let (volume, leg) = (&self.name, self.leg.name());
                        tracing::error!(volume, leg, %error, "checksums cannot be written; it is tried again");
                    }
                    (failing, rest) = (result.is_err(), self.plan.close_after);
                }
                self.scrub_some(means, &mut seen).await
            };
            let past = if scrubbed > 0 {
                pace.spend(cx, &stop, scrubbed).await;
                Duration::from_nanos(scrubbed.saturating_mul(1_000_000_000) / self.plan.rate)
            } else {
                let nap = rest.min(NAP);
                stop.sleep(cx, nap).await;
                nap
            };
            // A leg that is slow takes longer than it is meant to.
            rest = rest.saturating_sub(past.max(Duration::from_nanos(clock::now().saturating_sub(began))));
        }
    }

    /// Records what was written since groups were opened.
    fn close_groups(&self) -> Result<(), ServiceError> {
        if self.geometry().read_only || self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.block_on("write checksums to", |volume, cx| {
            Box::pin(async move {
                let buffer = cx.buffers.take().await;
                volume.close_idle(Means { cx: cx.deeper(), buffer: &buffer }, &Stop::default(), true).await
            })
        })
    }

    /// Finds, or makes, what it needs on its leg.
    fn begin(&self, mount: &Mount) -> Result<(), ServiceError> {
        if self.blocks.load(Ordering::Relaxed) > MOST_BLOCKS {
            return Err(ServiceError::Legs(format!("it has more than {MOST_BLOCKS} blocks: use larger blocks")));
        }
        let is_new = mount.is_new_leg(0);
        match REGION.load(&self.leg)? {
            Some(found) if is_new && mount.reformat => {
                // What the old header says counts no more, also if this is cut short.
                self.control().generation = found.generation;
                self.prepare(true)
            }
            Some(found) => self.open_header(&found),
            None if mount.reason == Reason::Create => self.prepare(false),
            None if is_new => self.prepare(true),
            None => Err(self.wrong(
                "it has no integrity header: it is not what the volume was made on, or was erased (if a format to another block \
                 size was cut short, create the volume again)",
            )),
        }
    }
}

impl Service for Integrity {
    fn has_erasure(&self) -> bool {
        let erasing = (Phase::Erasing as u32).to_le_bytes();
        matches!(REGION.load(&self.leg), Ok(Some(found)) if found.content.get(PHASE..PHASE + 4) == Some(&erasing[..]))
    }

    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.flushes.take_over(&previous.flushes);
        }
        self.forget_all();
        // Without a header nobody is answered: what was acknowledged would not be found again.
        self.closed.store(true, Ordering::Relaxed);
        let begun = self.begin(mount);
        self.closed.store(begun.is_err(), Ordering::Relaxed);
        begun
    }

    fn settle(&self) {
        if let Err(error) = self.close_groups() {
            tracing::warn!(volume = self.name, %error, "checksums could not be written yet; it is tried once more");
        }
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.close_groups()
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // Its leg never shows the data: the layer knows by the layout.
        Ok(())
    }

    fn has_untold(&self) -> bool {
        self.flushes.is_untold()
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        false
    }

    fn status(&self) -> Status {
        let control = self.control();
        let mismatches = self.mismatches.load(Ordering::Relaxed);
        let mut status = Status::good([
            ("checksum", "CRC-32C and generation".to_owned()),
            ("reads that found a mismatch", mismatches.to_string()),
            ("blocks taken as they were after a crash", self.adopted.load(Ordering::Relaxed).to_string()),
        ]);
        let unread = self.unread.load(Ordering::Relaxed);
        if unread > 0 {
            // Since it came into force: nobody counts which of them are written.
            let what = "blocks that could not be read after a crash (unchecked until written)";
            status.facts.push((what.to_owned(), unread.to_string()));
        }
        if let Some(damaged) = &control.damaged {
            status.facts.push(("header repaired".to_owned(), damaged.clone()));
        }
        if let Some(scrubbed) = &control.scrubbed {
            status.facts.push(("last scrub".to_owned(), scrubbed.clone()));
        }
        if let Some(scrub) = control.scrub {
            let total = self.blocks.load(Ordering::Relaxed);
            status.progress.push(Progress { what: "scrub".to_owned(), done: scrub.at.min(total), total });
        }
        if mismatches > 0 {
            status.health = Health::Degraded;
        }
        if self.closed.load(Ordering::Relaxed) {
            status.health = Health::Failed;
            let what = "a format, an erasure or a change of the stack ended half-way: open the volume again, or format it";
            status.facts.push(("closed".to_owned(), what.to_owned()));
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        let mut control = self.control();
        match command {
            "scrub" if self.closed.load(Ordering::Relaxed) => {
                Err(ServiceError::NotNow("it answers no request: volume show says why".to_owned()))
            }
            "scrub" if control.scrub.is_some() => Err(ServiceError::NotNow("it is being scrubbed already".to_owned())),
            "scrub" => {
                control.scrub = Some(Scrub::default());
                Ok("the scrub has begun; volume show tells how far it is".to_owned())
            }
            "stop" => {
                let was = control.scrub.take().map(|scrub| scrub.at);
                Ok(scrub_ended(was, self.blocks.load(Ordering::Relaxed)))
            }
            _ => Err(ServiceError::no_command(&KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        vec![Task::new("checksums", move |cx, stop| Box::pin(async move { self.run(cx, stop).await }))]
    }
}
