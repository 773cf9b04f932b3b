//! The operator's place for the root: which state of the volume was the last one, kept on a leg of its own, where those who can write to
//! the medium cannot. So a medium that was put back as a whole is found when the volume is opened.
//!
//! ```text
//!   save:  pages ─► header, durable ─► place: epoch, durable
//!   open:  header's epoch ─┬─ before the place's ─► put back: refused, unless the operator accepts just this
//!                          └─ the same, or later (it crashed in between) ─► opened, and the place is told
//! ```
//!
//! Epochs of a volume never go back, not by an erasure either. What is accepted goes on behind all epochs that there ever were, so that
//! nothing of before fits any more.
//! docs/formats/crypt.md.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};

use millrace_block::{BlockError, TaskContext, Volume};

use super::{header::Header, page::Uuid, volume::Authenticated};
use crate::{
    legs,
    legs::Leg,
    record::Region,
    service::{Mount, ServiceError},
};

/// Where it is on its leg.
pub(super) const PLACE: Region = Region { magic: *b"MILLROOT", version: 1, offset: 0, len: 8 << 10 };
/// Bytes of its content.
const LEN: usize = 24;
/// Epochs that may have been in use when the place knew one: the header is stored before it, and the log may be one ahead of the header.
const AHEAD: u64 = 3;

/// What the place says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) uuid: Uuid,
    /// Of the last save that it knows.
    pub(super) epoch: u64,
}

#[derive(Debug, Default)]
struct Stored {
    generation: u64,
    known: Option<Known>,
}

/// See the module.
pub(super) struct Anchor {
    leg: Leg,
    stored: Mutex<Stored>,
}

impl Known {
    fn encode(self) -> Vec<u8> {
        [&self.uuid[..], &self.epoch.to_le_bytes()].concat()
    }

    fn decode(content: &[u8]) -> Option<Self> {
        let content: &[u8; LEN] = content.try_into().ok()?;
        let (uuid, epoch) = content.split_at(16);
        Some(Self { uuid: uuid.try_into().ok()?, epoch: u64::from_le_bytes(epoch.try_into().ok()?) })
    }
}

impl Authenticated {
    /// Whether the header is the last one that there was, as far as is known. For an old one that the operator accepts, the epoch that the
    /// place knows is the answer.
    pub(super) fn check_root(&self, mount: &Mount, header: &Header, content: &[u8]) -> Result<Option<u64>, ServiceError> {
        let Some(anchor) = &self.anchor else { return Ok(None) };
        let (known, place, has) = (anchor.load()?, anchor.name(), header.name(content));
        let wrong = |leg: &str, what: String| ServiceError::Content { leg: leg.to_owned(), what };
        let is_accepted = |token: &String| self.settled.accept.as_ref() == Some(token);
        let Some(known) = known else {
            let token = format!("{has}-none");
            // New beside a volume that is in use.
            if mount.previous::<Self>().is_some() || is_accepted(&token) {
                return Ok(None);
            }
            return Err(wrong(
                self.leg.name(),
                format!(
                    "{place} has no root of it, so that nobody can tell whether it was put back: bring the place back as it was, or, if that \
                     is lost, open the volume with accept={token} among crypt's settings, once{}",
                    self.said_of_token()
                ),
            ));
        };
        if known.uuid != header.uuid {
            let what =
                "it has the root of another volume: give the root of this one a place of its own, a new file for instance";
            return Err(wrong(place, what.to_owned()));
        }
        if header.epoch >= known.epoch {
            return Ok(None);
        }
        let (then, now) = (header.epoch, known.epoch);
        let token = format!("{has}-{now}");
        if is_accepted(&token) {
            let (volume, leg) = (&self.name, self.leg.name());
            tracing::warn!(volume, leg, place, token, "a leg that was put back is accepted, as the operator says");
            return Ok(Some(now));
        }
        Err(wrong(
            self.leg.name(),
            format!(
                "all of it was put back to what it was at save {then}, and {place} knows of save {now}: do not trust it, unless you put it \
                 back yourself (a backup); then open the volume with accept={token} among crypt's settings, once{}",
                self.said_of_token()
            ),
        ))
    }

    /// What is to be said of a token that is set and does not count.
    fn said_of_token(&self) -> String {
        match self.settled.accept.as_deref() {
            None => String::new(),
            Some(given) if is_token(given) => format!("; what is set now, {given}, is for another leg or another time"),
            Some(given) => format!("; what is set now, {given}, is malformed: it is SAVE-CODE-SAVE, or SAVE-CODE-none"),
        }
    }

    /// What is on the leg is in force and durable: the place is told. What was accepted goes on behind all that there was.
    pub(super) fn confirm_root(&self, uuid: Uuid, accepted: Option<u64>) -> Result<(), ServiceError> {
        let Some(anchor) = &self.anchor else { return Ok(()) };
        if self.geometry().read_only {
            return Ok(());
        }
        if let Some(known) = accepted {
            self.block_on("save tags to", move |volume, cx| {
                Box::pin(async move {
                    if volume.log.epoch().0 > volume.rooted.load(Ordering::SeqCst) {
                        // Recovery has put it off: neither half of the log is free before.
                        volume.save_giving_up(cx, true).await?;
                    }
                    volume.log.reset(beyond(known, volume.rooted.load(Ordering::SeqCst)), 0);
                    volume.save_giving_up(cx, true).await
                })
            })?;
        }
        anchor.store(uuid, self.rooted.load(Ordering::SeqCst))
    }
}

/// Whether text looks like what the operator is told to accept.
fn is_token(text: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = text.split('-').collect();
    let [then, code, now] = parts[..] else { return false };
    let is_code = code.len() == 8 && code.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number(then) && is_code && (now == "none" || is_number(now))
}

/// The first epoch that nobody can have anything of, when the place knows one and the leg has another. Its half of the log is not the one
/// that the leg's epoch uses.
pub(super) fn beyond(known: u64, rooted: u64) -> u64 {
    let epoch = known.max(rooted).saturating_add(AHEAD);
    epoch.saturating_add(u64::from(epoch % 2 == rooted % 2))
}

impl Anchor {
    /// A place on this leg, beside the volume's own.
    pub(super) fn new(leg: &Leg, data: &Leg) -> Result<Self, ServiceError> {
        let (has, name) = (leg.geometry().bytes(), leg.name());
        if Arc::ptr_eq(leg, data) {
            return Err(ServiceError::Legs(format!(
                "{name} stands there twice: the root must be elsewhere than what it is of"
            )));
        }
        if has < PLACE.len {
            return Err(ServiceError::Legs(format!(
                "the place for the root ({name}) has {has} bytes, and {} are needed",
                PLACE.len
            )));
        }
        if leg.geometry().read_only && !data.geometry().read_only {
            return Err(ServiceError::Legs(format!("the place for the root ({name}) is read-only")));
        }
        Ok(Self { leg: Arc::clone(leg), stored: Mutex::default() })
    }

    pub(super) fn name(&self) -> &str {
        self.leg.name()
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        self.leg.scratch_bytes()
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn known(&self) -> Option<Known> {
        self.stored().known
    }

    /// Looks at the place.
    pub(super) fn load(&self) -> Result<Option<Known>, ServiceError> {
        let wrong = |what: &str| ServiceError::Content { leg: self.name().to_owned(), what: what.to_owned() };
        let Some(found) = PLACE.load(&self.leg)? else {
            if !legs::is_zero(&legs::read(&self.leg, 0, PLACE.len as usize)?) {
                return Err(wrong(
                    "it holds something else than a root: give the root a place of its own, a new file for instance",
                ));
            }
            *self.stored() = Stored::default();
            return Ok(None);
        };
        let known = Known::decode(&found.content).ok_or_else(|| wrong("its record is none of a root"))?;
        if let Some(damaged) = found.damaged {
            tracing::warn!(leg = self.name(), "{damaged}; the other copy is used");
        }
        *self.stored() = Stored { generation: found.generation, known: Some(known) };
        Ok(Some(known))
    }

    /// Refuses a place that has a root already: the volume is new.
    pub(super) fn expect_none(&self) -> Result<(), ServiceError> {
        let Some(_) = self.load()? else { return Ok(()) };
        let what = "it has the root of a volume: give that of the new one a place of its own, or delete the file if that volume is gone";
        Err(ServiceError::Content { leg: self.name().to_owned(), what: what.to_owned() })
    }

    /// What is to be stored, and as which generation; `None` when the place knows it, or something later.
    fn next(&self, uuid: Uuid, epoch: u64) -> Option<(Known, u64)> {
        let stored = self.stored();
        let is_later = |known: &Known| known.uuid == uuid && known.epoch >= epoch;
        (!stored.known.as_ref().is_some_and(is_later)).then_some((Known { uuid, epoch }, stored.generation + 1))
    }

    fn note(&self, known: Known, generation: u64) {
        *self.stored() = Stored { generation, known: Some(known) };
    }

    /// The header of this epoch is durable.
    pub(super) fn store(&self, uuid: Uuid, epoch: u64) -> Result<(), ServiceError> {
        let Some((known, generation)) = self.next(uuid, epoch) else { return Ok(()) };
        PLACE.store(&self.leg, generation, &known.encode())?;
        let is_first = self.known().is_none();
        self.note(known, generation);
        if is_first {
            // So that there are two copies from the beginning.
            PLACE.store(&self.leg, generation + 1, &known.encode())?;
            self.note(known, generation + 1);
        }
        Ok(())
    }

    /// [`Self::store`] within a task.
    pub(super) async fn store_in(&self, cx: TaskContext<'_>, uuid: Uuid, epoch: u64) -> Result<(), BlockError> {
        let Some((known, generation)) = self.next(uuid, epoch) else { return Ok(()) };
        PLACE.store_in(cx, &*self.leg, generation, &known.encode()).await?;
        self.note(known, generation);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_known_reads_back(uuid: [u8; 16], epoch: u64, len in 0..40_usize) {
            let known = Known { uuid, epoch };
            prop_assert_eq!(Known::decode(&known.encode()), Some(known));
            let mut other = known.encode();
            other.resize(len, 7);
            prop_assert_eq!(Known::decode(&other).is_some(), len == LEN);
        }

        #[test]
        fn what_is_accepted_is_behind_all_that_there_was(known in 0..u64::MAX / 2, rooted in 0..u64::MAX / 2) {
            let epoch = beyond(known, rooted);
            prop_assert!(epoch > known + 2 && epoch > rooted + 2 && epoch % 2 != rooted % 2);
        }
    }
}
