//! What the operator and the layer ask of it: coming into force, going, status.

use std::sync::{Arc, MutexGuard, PoisonError, atomic::Ordering};

use millrace_block::{BlockError, Metadata, MetadataFormat, TaskContext, Volume as _, VolumeError};
use millrace_cipher::random;

use super::{
    KIND,
    page::{BLOCKS, OFFSET, REGION},
    table::MOST_BLOCKS,
    volume::Tagged,
};
use crate::{
    background::{LocalFuture, Task},
    legs,
    record::Found,
    service::{Health, Mount, Reason, Service, ServiceError, Status},
    settings::Settings,
};

/// Bytes of the header's content.
const CONTENT: usize = 40;
/// Where in it the phase is.
const PHASE: usize = 28;
/// And the form of the metadata.
const SHOWN: usize = 32;
/// Bytes at either end of a leg that must be zeroes before it is taken for one that can be erased.
const LOOKED_AT: u64 = 1 << 20;
/// In the header: metadata are not shown.
const HIDDEN: u32 = 0xff;

/// What is known beside the path of requests.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// Tells this volume's pages from those of others.
    pub(super) uuid: [u8; 16],
    pub(super) generation: u64,
    damaged: Option<String>,
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

/// A format in words.
fn describe(metadata: Metadata) -> String {
    let Metadata::Shown(MetadataFormat { protection, extended, first }) = metadata else {
        return "not shown: the last format was one without them".to_owned();
    };
    let what = match protection {
        0 => "8 bytes of the guest's own".to_owned(),
        kind => format!("protection information of type {kind}, in the {} bytes", if first { "first" } else { "last" }),
    };
    format!("{what}, {}", if extended { "at the end of each block" } else { "in a separate buffer" })
}

impl Tagged {
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
        result.map_err(|source| ServiceError::Leg { what, leg: self.leg().name().to_owned(), source })
    }

    fn wrong(&self, what: impl Into<String>) -> ServiceError {
        ServiceError::Content { leg: self.leg().name().to_owned(), what: what.into() }
    }

    fn content(&self, uuid: &[u8; 16], phase: Phase, shown: u8) -> Vec<u8> {
        let numbers = [self.block_size().bytes(), BLOCKS as u32, OFFSET as u32, phase as u32, u32::from(shown), 0];
        [&uuid[..], &numbers.map(u32::to_le_bytes).concat()].concat()
    }

    /// Prepares a leg that holds nothing, or nothing that is still wanted.
    fn prepare(&self, overwrite: bool) -> Result<(), ServiceError> {
        let uuid = random().map_err(|error| ServiceError::NotNow(error.to_string()))?;
        self.shown.store(self.plan.format.bits(), Ordering::Relaxed);
        if self.leg().usage().allocated == 0 {
            self.control().uuid = uuid;
            self.store(Phase::InUse)?;
            self.blank.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let bytes = self.leg().geometry().bytes();
        let len = LOOKED_AT.min(bytes >> 12 << 12);
        for at in [0, (bytes >> 12 << 12) - len] {
            if !overwrite && !legs::is_zero(&legs::read(self.leg(), at, len as usize)?) {
                return Err(self.wrong(
                    "it has no metadata header, and holds something else; erase it first (blkdiscard, or a new file) if that can go",
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
        let content = self.content(&uuid, phase, self.shown.load(Ordering::Relaxed));
        for generation in [generation + 1, generation + 2] {
            self.flushes.store(self.leg(), &REGION, generation, &content)?;
            self.control().generation = generation;
        }
        Ok(())
    }

    /// From now on metadata are shown in this form.
    pub(super) fn show(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        let before = self.shown.swap(format.map_or(Self::HIDDEN, MetadataFormat::bits), Ordering::Relaxed);
        self.store(Phase::InUse).map_err(|error| {
            self.shown.store(before, Ordering::Relaxed);
            self.put_back();
            self.failed("format", &error)
        })
    }

    /// A header could not be stored, and may be there all the same: the next start would find it. What counts takes its place.
    fn put_back(&self) {
        let (uuid, before) = {
            let control = self.control();
            (control.uuid, control.generation)
        };
        let Err(error) = self.store(Phase::InUse) else { return };
        let content = self.content(&uuid, Phase::InUse, self.shown.load(Ordering::Relaxed));
        let stays = || matches!(REGION.load(self.leg()), Ok(Some(found)) if found.content == content);
        // One copy is enough, as the newest.
        if self.control().generation == before && !stays() {
            self.closed.store(true, Ordering::Relaxed);
            let (volume, leg) = (self.name(), self.leg().name());
            tracing::error!(volume, leg, %error, "a format ended half-way: no request is answered until one succeeds");
        }
    }

    /// Takes over what the header says.
    fn open_header(&self, found: &Found) -> Result<(), ServiceError> {
        let uuid: Option<[u8; 16]> = found.content.get(..16).and_then(|uuid| uuid.try_into().ok());
        let Some(uuid) = uuid.filter(|_| found.content.len() == CONTENT) else {
            return Err(self.wrong(format!("its header has {} bytes and not {CONTENT}", found.content.len())));
        };
        let number = |at: usize| found.content[at..at + 4].iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let (block_size, phase, shown, wanted) = (number(16), number(PHASE), number(SHOWN), self.block_size().bytes());
        if block_size != wanted {
            return Err(self.wrong(format!("it has blocks of {block_size} bytes, and the volume of {wanted}")));
        }
        if u64::from(number(20)) != BLOCKS || u64::from(number(24)) != OFFSET || phase > Phase::Erasing as u32 {
            return Err(self.wrong("its groups are laid out in a way that this program does not know"));
        }
        let shown = u8::try_from(shown).ok().filter(|shown| *shown < 16 || u32::from(*shown) == HIDDEN);
        let shown = shown.ok_or_else(|| self.wrong("its metadata have a form that this program does not know"))?;
        self.shown.store(shown, Ordering::Relaxed);
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
            tracing::info!(volume = self.name(), leg = self.leg().name(), "an erasure that was cut short is completed");
            return self.erase_blocks();
        }
        let damaged = found.wrong_copy();
        if let Some(damaged) = &damaged {
            tracing::warn!(volume = self.name(), leg = self.leg().name(), "{damaged}; the other copy is used");
        }
        if !read_only {
            // What a process that died had written may not be durable yet, and from here on counts as if it were. Before anything else that
            // flushes: the leg tells once.
            self.block_on("flush", |volume, cx| Box::pin(volume.flushes.flush_alone(cx, &**volume.leg())))?;
        }
        // Also one that is of before a crash: alone, it would have the volume erased.
        if !read_only
            && !found.is_even()
            && let Err(error) = self.store(Phase::InUse)
        {
            tracing::warn!(
                volume = self.name(),
                %error,
                "a copy of its header cannot be replaced; it is tried when the volume is opened again"
            );
        }
        self.control().damaged = damaged;
        Ok(())
    }

    /// Whether a header is another's than the one this was in force with. A format and an erasure leave the volume's number as it is.
    fn is_anothers(&self, found: &Found) -> bool {
        let own = self.control().uuid;
        own != [0; 16] && found.content.len() == CONTENT && found.content[..16] != own
    }

    /// Why it does not come back over such a header. Guests know the form of before, and so will whoever opens what is there now.
    fn erased(&self, found: &Found) -> ServiceError {
        let mut content = found.content.clone();
        content[SHOWN..SHOWN + 4].copy_from_slice(&u32::from(self.shown.load(Ordering::Relaxed)).to_le_bytes());
        for generation in [found.generation + 1, found.generation + 2] {
            // What is stored later must be newer all the same.
            self.control().generation = generation;
            if let Err(error) = self.flushes.store(self.leg(), &REGION, generation, &content) {
                let (volume, leg) = (self.name(), self.leg().name());
                tracing::error!(volume, leg, %error, "the form of its metadata is not put back: after a restart it is another one");
            }
        }
        self.wrong(
            "a change that failed has erased it, and all that the volume had: restore that, or format it to go on empty",
        )
    }

    /// Finds what is on the leg, or prepares it.
    fn come_into_force(&self, mount: &Mount) -> Result<(), ServiceError> {
        if self.blocks() > MOST_BLOCKS {
            return Err(ServiceError::Legs(format!("it has more than {MOST_BLOCKS} blocks: use larger blocks")));
        }
        // Another form of metadata, by the operator's wish, and what they were can go.
        let other = mount.previous::<Self>().is_some_and(|previous| previous.plan.format != self.plan.format);
        let is_new = mount.is_new_leg(0);
        match REGION.load(self.leg())? {
            Some(found) if other || is_new && mount.reformat => {
                // What the old header says counts no more, also if this is cut short.
                self.control().generation = found.generation;
                self.prepare(true)
            }
            _ if other => self.prepare(true),
            Some(found) if mount.reason == Reason::Open && self.is_anothers(&found) => Err(self.erased(&found)),
            Some(found) => self.open_header(&found),
            None if mount.reason == Reason::Create => self.prepare(false),
            None if is_new => self.prepare(true),
            None => Err(self.wrong(
                "it has no metadata header: it is not what the volume was made on, or was erased (if a format to another block \
                 size was cut short, create the volume again)",
            )),
        }
    }
}

impl Service for Tagged {
    fn has_erasure(&self) -> bool {
        let erasing = (Phase::Erasing as u32).to_le_bytes();
        matches!(REGION.load(self.leg()), Ok(Some(found)) if found.content.get(PHASE..PHASE + 4) == Some(&erasing[..]))
    }

    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        self.forget_all();
        if let Some(previous) = mount.previous::<Self>() {
            self.flushes.take_over(&previous.flushes);
        }
        // On the way back from a change, too: what is acknowledged without a header is found by nobody.
        self.closed.store(true, Ordering::Relaxed);
        let done = self.come_into_force(mount);
        self.closed.store(done.is_err(), Ordering::Relaxed);
        done
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        if self.geometry().read_only || self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.block_on("write metadata to", |volume, cx| Box::pin(volume.close_all(cx)))
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // Its leg never shows the data: the layer knows by the layout.
        Ok(())
    }

    fn hurry(&self, on: bool) {
        self.hurried.store(on, Ordering::Relaxed);
    }

    fn has_untold(&self) -> bool {
        self.flushes.is_untold()
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        false
    }

    fn status(&self) -> Status {
        let mut status = Status::good([("metadata", describe(self.metadata()))]);
        let lost = self.lost.load(Ordering::Relaxed);
        if lost > 0 {
            status.health = Health::Degraded;
            status.facts.push(("blocks whose metadata are lost".to_owned(), lost.to_string()));
        }
        if let Some(damaged) = &self.control().damaged {
            status.facts.push(("header repaired".to_owned(), damaged.clone()));
        }
        if self.closed.load(Ordering::Relaxed) {
            status.health = Health::Failed;
            let what = "a format, an erasure or a change of the stack ended half-way: open the volume again, or format it";
            status.facts.push(("closed".to_owned(), what.to_owned()));
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
