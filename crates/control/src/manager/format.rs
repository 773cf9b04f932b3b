//! Formats that guests ask for. Erasing a large device takes minutes: it is done beside everything else, in a thread of its own.
//!
//! ```text
//!   guest ─► begin: checks, marks the volume, stores ─► thread: NewFormat::apply ─► finish: unmarks, stores what is ─► guest
//! ```
//!
//! While a volume is marked, and with it those that it is made of, it is neither resized nor attached nor deleted.

use std::{
    sync::{Arc, Weak},
    thread,
};

use millrace_block::{BlockSize, VolumeError};
use millrace_frontends::nvme::{HostReply, Namespace, NewFormat, Status};

use super::{Inner, Manager, host::status_of, shapes::formatted};
use crate::{
    Name,
    error::ControlError,
    store::{Changes, VolumeRecord},
};

/// Formats at once; a guest that asks for one more is told to ask again.
const MOST: usize = 32;

/// A format under way.
pub(super) struct Formatting {
    name: Name,
    /// It, and what it is made of.
    marked: Vec<Name>,
}

impl Manager {
    /// Formats a namespace, and answers when that is done.
    pub(super) fn format(
        self: &Arc<Self>,
        device: &str,
        namespace: Arc<Namespace>,
        format: NewFormat,
        reply: HostReply<()>,
    ) {
        let formatting = match self.begin_format(device, &namespace, format.block_size) {
            Ok(formatting) => formatting,
            Err(status) => return reply.send(Err(status)),
        };
        let (manager, name, marked) = (Arc::downgrade(self), formatting.name.clone(), formatting.marked.clone());
        let work = move || {
            let result = format.apply(&*namespace.volume);
            reply.send(Weak::upgrade(&manager).map_or(Err(Status::INTERNAL_ERROR), |manager| {
                namespace.measure();
                manager.finish_format(formatting, result)
            }));
        };
        if let Err(error) = thread::Builder::new().name("millrace-format".to_owned()).spawn(work) {
            // The reply went with the closure, which the guest is told as a failure.
            tracing::warn!(volume = %name, %error, "no thread for a guest's format");
            self.unmark(&mut self.peek(), &marked, &name);
        }
    }

    /// The volumes can be changed again.
    fn unmark(&self, inner: &mut Inner, marked: &[Name], name: &Name) {
        inner.formatting.retain(|name| !marked.contains(name));
        self.follow_shapes(inner, name.as_str());
    }

    /// Stores what the volume is going to be: a crash from now on leaves old data under a new block size, as a format that is
    /// cut short may.
    pub(super) fn begin_format(
        &self,
        device: &str,
        namespace: &Namespace,
        block_size: BlockSize,
    ) -> Result<Formatting, Status> {
        let mut inner = self.lock().map_err(|error| status_of(&error))?;
        let before = inner.idle_volume(namespace.volume.name()).map_err(|error| status_of(&error))?.record.clone();
        inner.check_not_copied(&before.spec.name).map_err(|error| status_of(&error))?;
        let name = before.spec.name.clone();
        inner.check_below_idle(name.as_str()).map_err(|error| status_of(&error))?;
        let users: Vec<_> = inner.users(name.as_str()).map(|(user, _)| user.record.spec.name.as_str()).collect();
        if users != [device] {
            // The operator has taken it away meanwhile; or the blocks would change their size under other guests' commands.
            return Err(Status::OPERATION_DENIED.do_not_retry());
        }
        if inner.formatting.len() >= MOST {
            return Err(Status::NAMESPACE_NOT_READY);
        }
        if let Err(error) = inner.check_format(&name, block_size) {
            tracing::warn!(volume = %name, %error, "a guest's format is refused: the volume would not open again");
            return Err(Status::INVALID_FORMAT.do_not_retry());
        }
        let after = formatted(&before, block_size, namespace.volume.geometry().bytes());
        if let Err(error) = self.put(&after) {
            tracing::warn!(volume = %name, %error, "a guest's format could not be stored");
            return Err(Status::INTERNAL_ERROR);
        }
        if let Some(volume) = inner.volumes.get_mut(&name) {
            volume.record = after;
        }
        let marked: Vec<_> = inner.below(name.as_str()).into_iter().chain([name.clone()]).collect();
        inner.formatting.extend(marked.iter().cloned());
        Ok(Formatting { name, marked })
    }

    /// The volume has been erased, or not.
    pub(super) fn finish_format(&self, formatting: Formatting, result: Result<(), VolumeError>) -> Result<(), Status> {
        let Formatting { name, marked } = formatting;
        let mut inner = self.peek();
        self.unmark(&mut inner, &marked, &name);
        // The guest does not go on before it has its answer: all that it asks for then has other blocks.
        self.retrace_all(&inner);
        drop(inner);
        let Err(error) = result else { return Ok(()) };
        tracing::warn!(volume = %name, %error, "a guest's format failed");
        Err(status_of(&error.into()))
    }

    fn put(&self, record: &VolumeRecord) -> Result<(), crate::store::StoreError> {
        self.store.apply(&Changes { put_volumes: vec![record], ..Changes::default() })
    }
}

impl Inner {
    /// Whether a volume is opened again with blocks of this size, and whatever it is made of.
    fn check_format(&self, name: &Name, block_size: BlockSize) -> Result<(), ControlError> {
        self.below(name.as_str()).iter().chain([name]).try_for_each(|name| {
            let Some((record, graph)) = self.volumes.get(name).map(|volume| (&volume.record, &volume.graph)) else {
                return Ok(());
            };
            let Some(live) = graph else { return Ok(()) };
            let sizes = [record.block_size().0, block_size];
            let checked = live.graph.check_format(record.size().0, record.own_size, sizes);
            checked.map_err(|source| ControlError::Graph { name: name.clone(), source })
        })
    }

    /// A disk that is being changed gives a volume no room meanwhile, nor takes any back: it would wait for that while its volumes' guests wait
    /// for it, or is not in force.
    pub(super) fn check_disk_idle(&self, name: &str) -> Result<(), ControlError> {
        match self.changing.keys().find(|by| by.as_str() != name && self.is_over(name, by.as_str())) {
            Some(by) => Err(ControlError::Changing { name: by.clone() }),
            None => Ok(()),
        }
    }

    /// The other way round: a volume that is made on a disk, or that a change puts there or takes away, has its table meanwhile, or waits for the
    /// disk's own change. Nothing else is done to the disk that would wait for that.
    pub(super) fn check_shares_idle(&self, disk: &str) -> Result<(), ControlError> {
        match self.changing.keys().find(|by| by.as_str() != disk && self.is_over(by.as_str(), disk)) {
            Some(by) => Err(ControlError::Changing { name: by.clone() }),
            None => Ok(()),
        }
    }

    /// A volume, for a change that it cannot take while it is being formatted, or changed, or copied to, or while it, or what it is made
    /// of, or what is made of it, is being resized.
    pub(super) fn idle_volume(&self, name: &str) -> Result<&super::Volume, ControlError> {
        if let Some((name, _)) = self.creating.get_key_value(name) {
            return Err(ControlError::Changing { name: name.clone() });
        }
        let volume = self.volume(name)?;
        if let Some(name) = self.commanded.get(name) {
            return Err(ControlError::Commanded { name: name.clone() });
        }
        match (self.formatting.get(name), self.changing.get_key_value(name), self.copy_to(name)) {
            (Some(name), _, _) => Err(ControlError::Formatting { name: name.clone() }),
            (_, Some((name, _)), _) => Err(ControlError::Changing { name: name.clone() }),
            (_, _, Some(copy)) => Err(ControlError::Copying { name: volume.record.spec.name.clone(), copy: copy.clone() }),
            (None, None, None) => {
                let concerns = |by: &&Name| self.is_over(by.as_str(), name) || self.is_over(name, by.as_str());
                match self.resizing.iter().find(concerns) {
                    Some(by) => Err(ControlError::Resizing { name: volume.record.spec.name.clone(), by: by.clone() }),
                    None => Ok(volume),
                }
            }
        }
    }
}
