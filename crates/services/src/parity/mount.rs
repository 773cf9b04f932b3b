//! Coming into force and going out of it: the journal is carried out again, and voided.

use std::sync::{Arc, atomic::Ordering};

use millrace_block::{BlockError, BlockSize};

use super::{
    Parity,
    journal::{Entry, HAS_TO_STAY},
};
use crate::{
    legs,
    members::{decide::Shape, state::legs_of},
    service::{Mount, Reason, ServiceError},
};

impl Parity {
    /// Comes into force.
    pub(super) fn take_up(&self, mount: &Mount) -> Result<(), ServiceError> {
        let block_size = self.shape().block_size;
        // What did not fill a larger block may have been a stripe of its own.
        let is_cut = block_size == BlockSize::B4096 && self.bytes().is_multiple_of(self.layout.width());
        let more = if is_cut { self.layout.chunk } else { 0 };
        self.members.take_up(mount, Shape { block_size, more })?;
        let set = self.members.on_legs().as_ref().map(|on_legs| on_legs.table.set).unwrap_or_default();
        self.journal.name(set);
        // A leg that is to be filled was out of use for a while: what it has may be older than what the others have.
        let legs =
            legs_of(self.members.masks().readable).map(|leg| (leg, Arc::clone(&self.legs[leg]), self.journal_of(leg)));
        let entries = self.journal.load(legs, set, self.members.bytes(), |leg, source| self.do_without(leg, source))?;
        if !entries.is_empty() {
            tracing::info!(name = self.name, entries = entries.len(), "the journal is carried out again");
            self.counters.replayed.fetch_add(entries.len() as u64, Ordering::Relaxed);
            self.carry_out(&entries)?;
        }
        // Those that failed meanwhile are out of it.
        let masks = self.members.masks();
        let behind = masks.writable & !masks.readable;
        for leg in legs_of(behind) {
            match self.journal.forget(leg, &self.legs[leg], self.journal_of(leg)) {
                Err(ServiceError::Leg { source, .. }) => self.do_without(leg, source)?,
                result => result?,
            }
        }
        // Within a change whoever was in force before has voided what it had, and the legs have been flushed since: the pause is shorter.
        let is_voided = mount.reason == Reason::Change && entries.is_empty();
        self.void_journal_on(if is_voided { 0 } else { self.members.masks().writable & !behind })?;
        self.members.unflushed.forget(u8::MAX);
        self.stopped.store(false, Ordering::Relaxed);
        self.look_again(block_size);
        Ok(())
    }

    /// Writes what entries say, in their order, on all legs in use; when it returns, it is durable.
    fn carry_out(&self, entries: &[(Entry, Vec<u8>)]) -> Result<(), ServiceError> {
        for leg in legs_of(self.members.masks().writable) {
            let mut writes = Vec::new();
            for (entry, payload) in entries {
                let at = entry.stripe * self.layout.chunk + u64::from(entry.row);
                for (part, bytes) in entry.parts(&self.layout).zip(payload.chunks_exact(entry.len as usize)) {
                    if self.layout.leg(entry.stripe, part) == leg {
                        writes.push((at, bytes.to_vec()));
                    }
                }
            }
            if writes.is_empty() {
                continue;
            }
            let volume = Arc::clone(&self.legs[leg]);
            let result = legs::block_on(move |cx| {
                Box::pin(async move {
                    for (at, bytes) in writes {
                        legs::write_bytes(cx, &*volume, at, bytes).await?;
                    }
                    legs::flush(cx, &*volume).await
                })
            })?;
            if let Err(source) = result {
                self.do_without(leg, source)?;
            }
        }
        Ok(())
    }

    /// Goes on without a leg that cannot be written while the service comes into force.
    fn do_without(&self, leg: usize, source: BlockError) -> Result<(), ServiceError> {
        if self.members.masks().writable >> leg & 1 == 0 {
            // It failed together with another one.
            return Ok(());
        }
        let name = self.members.leg_name(leg).to_owned();
        match self.members.take_out(leg) {
            Ok(()) => {
                tracing::error!(name = self.name, leg, error = %source, "a leg cannot be used");
                Ok(())
            }
            Err(ServiceError::NotNow(_)) => Err(ServiceError::Leg { what: HAS_TO_STAY, leg: name, source }),
            Err(error) => Err(error),
        }
    }

    /// Tells all legs in use that no entry of the journal is of any more use. Everything is durable in its place, and no request
    /// is in flight.
    pub(super) fn void_journal(&self) -> Result<(), ServiceError> {
        self.void_journal_on(self.members.masks().writable)
    }

    /// Like [`Self::void_journal`], where all but these legs know it.
    fn void_journal_on(&self, on: u8) -> Result<(), ServiceError> {
        let stores = legs_of(on).map(|leg| {
            let volume = &self.legs[leg];
            (volume, self.journal.voiding_stores(leg, volume, self.journal_of(leg)))
        });
        for (leg, result) in legs_of(on).zip(legs::store_on_all(stores)?) {
            match result {
                Err(ServiceError::Leg { source, .. }) => self.do_without(leg, source)?,
                result => result?,
            }
        }
        for ring in self.journal.rings() {
            ring.restart();
        }
        Ok(())
    }

    /// Goes out of force.
    pub(super) fn put_away(&self) -> Result<(), ServiceError> {
        // Legs that refused a flush and had to stay may have lost what nobody will flush again.
        let lost = || self.members.unflushed.legs() & self.members.masks().writable;
        if lost() != 0
            && self.is_healthy(self.members.masks())
            && let Some(intent) = self.members.intent()
        {
            // The next mount makes the parity fit.
            intent.suspect_marked();
        }
        // Flushes the legs.
        self.members.put_away()?;
        let legs = lost();
        if legs != 0 && !self.is_healthy(self.members.masks()) {
            // What is missing is known by the others together: the next mount carries the journal out, and they fit again.
            let leg = self.members.leg_name(legs.trailing_zeros() as usize).to_owned();
            let source = BlockError::WriteFault { errno: 0 };
            return Err(ServiceError::Leg { what: "make durable what was written to", leg, source });
        }
        self.void_journal()
    }
}
