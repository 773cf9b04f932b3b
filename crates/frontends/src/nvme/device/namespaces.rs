//! The namespaces of a device, as the daemon shows them to its guest.

use std::sync::Arc;

use millrace_block::Volume;

use super::{DeviceError, NvmeDevice};
use crate::nvme::{Namespace, namespace::Allocated};

impl NvmeDevice {
    /// Attaches a namespace, under the lowest free identifier when none is given; the guest is told by an event, where it still
    /// [waits](Self::resume) when it goes on.
    pub fn attach(&mut self, nsid: Option<u32>, namespace: Arc<Namespace>, read_only: bool) -> Result<u32, DeviceError> {
        self.show(nsid, namespace, read_only, Self::attach_allocated)
    }

    /// Makes a namespace exist that the guest had created by Namespace Management, attached or not: the daemon remembers them
    /// across restarts.
    pub fn restore(&mut self, nsid: u32, namespace: Arc<Namespace>, attached: bool) -> Result<(), DeviceError> {
        self.allocate(Some(nsid), Allocated { namespace, read_only: false, by_guest: true })?;
        self.attach_again(nsid, attached)
    }

    /// Makes a namespace exist that the operator attached, and that was attached when that was stored.
    pub fn restore_attached(&mut self, nsid: u32, namespace: Arc<Namespace>, read_only: bool) -> Result<(), DeviceError> {
        self.show(Some(nsid), namespace, read_only, |device, nsid| device.attach_again(nsid, true)).map(|_| ())
    }

    /// Makes a namespace exist that the operator attached and the guest detached from its controller.
    pub fn restore_detached(&mut self, nsid: u32, namespace: Arc<Namespace>, read_only: bool) -> Result<(), DeviceError> {
        self.allocate(Some(nsid), Allocated { namespace, read_only, by_guest: false })?;
        self.attach_again(nsid, false)
    }

    /// Makes a namespace of the operator's exist and attaches it so, or joins it to the first one as a replica.
    fn show(
        &mut self,
        nsid: Option<u32>,
        namespace: Arc<Namespace>,
        read_only: bool,
        attach: impl FnOnce(&mut Self, u32) -> Result<(), DeviceError>,
    ) -> Result<u32, DeviceError> {
        if let Some(nsid) = nsid.filter(|nsid| self.controller.is_for_replica(*nsid)) {
            let joined = self.controller.join_replica(nsid, &namespace);
            return joined.map(|()| nsid).map_err(|why| DeviceError::Card { device: self.name().to_owned(), why });
        }
        let fits = self.controller.check_first(&namespace);
        fits.map_err(|why| DeviceError::Card { device: self.name().to_owned(), why })?;
        let nsid = self.allocate(nsid, Allocated { namespace, read_only, by_guest: false })?;
        attach(self, nsid)?;
        Ok(nsid)
    }

    /// Attaches what was attached. What a guest attached or detached just before its worker's death may not have been stored: that is
    /// made up for.
    fn attach_again(&mut self, nsid: u32, stored: bool) -> Result<(), DeviceError> {
        let attached = self.controller.was_attached(nsid);
        if !self.waits {
            // Nobody was there: what is left of an attachment that was not stored, the next worker is not to find.
            self.controller.note_attached(nsid, attached && stored);
        } else if attached != stored {
            self.controller.host.attachment_changed(self.name(), nsid, attached);
        }
        let attaches = if self.waits { attached } else { stored };
        if attaches { self.attach_allocated(nsid) } else { Ok(()) }
    }

    fn allocate(&mut self, nsid: Option<u32>, allocated: Allocated) -> Result<u32, DeviceError> {
        let (device, largest) = (self.name().to_owned(), self.controller.namespaces.largest());
        let Some(nsid) = nsid.or_else(|| self.controller.namespaces.free_nsid()) else {
            return Err(DeviceError::Full { device, largest });
        };
        // A reset may have found it away: one of before, one that this worker ended before it had namespaces, one while it was detached.
        if !self.controller.cc().en() || self.controller.lifecycle.was_reset {
            self.controller.end_nameless(&allocated.namespace);
        }
        match self.controller.namespaces.allocate(nsid, allocated) {
            Ok(()) => Ok(nsid),
            Err(_) => Err(DeviceError::Nsid { device, nsid, largest }),
        }
    }

    fn attach_allocated(&mut self, nsid: u32) -> Result<(), DeviceError> {
        if self.controller.namespaces.attach(nsid).is_err() {
            return Err(DeviceError::Missing { device: self.name().to_owned(), nsid });
        }
        self.controller.note_attached(nsid, true);
        // A guest that waits is told of all that it has as it goes on.
        if !self.waits {
            self.controller.namespace_changed(nsid);
        }
        Ok(())
    }

    /// Takes a namespace away, attached or not: new commands no longer find it, those in flight finish
    /// ([`Self::is_detached`]), long ones with the piece that they are at, and the guest is told by an event.
    pub fn detach(&mut self, nsid: u32) -> Result<(), DeviceError> {
        if self.controller.remove_replica(nsid) {
            return Ok(());
        }
        let Some(allocated) = self.controller.namespaces.allocation(nsid) else {
            // Its creation has not come here yet.
            let coming = self.controller.withdraw_creation(nsid);
            return if coming { Ok(()) } else { Err(DeviceError::Missing { device: self.name().to_owned(), nsid }) };
        };
        let namespace = Arc::clone(&allocated.namespace);
        if let Some(attached) = self.controller.namespaces.detach(nsid) {
            self.controller.detach_from_card(&attached);
            self.controller.note_attached(nsid, false);
            self.controller.namespace_changed(nsid);
        }
        self.controller.namespaces.release(nsid);
        self.controller.end_registrations(&namespace);
        Ok(())
    }

    /// Has the guest's reads and writes go to a namespace's volume by way of another one, which leads there; `None`: straight. Those in
    /// flight end on the way that they went, and the guest notices nothing.
    pub fn lead(&mut self, nsid: u32, way: Option<Arc<dyn Volume>>) {
        self.controller.namespaces.lead(nsid, way);
    }

    /// Whether no command is in flight any more on namespaces that were detached from this identifier: then their volumes may go.
    pub fn is_detached(&self, nsid: u32) -> bool {
        let replica_leaves = self.controller.port.as_ref().is_some_and(|port| port.is_replica_leaving(nsid));
        !replica_leaves && self.controller.namespaces.left(nsid).next().is_none()
    }

    /// A namespace's volume has another size or shape now; the guest is told by an event.
    pub fn namespace_changed(&mut self, nsid: u32) {
        if let Some(attached) = self.controller.namespaces.get(nsid) {
            attached.geometry.set(attached.namespace.volume.geometry());
            self.controller.namespace_changed(nsid);
        } else {
            self.controller.replica_changed(nsid);
        }
    }

    /// The reservations of a namespace changed ([`Host::reservation_notice`](crate::nvme::Host::reservation_notice)): if this device
    /// shows it and its host is one of those to be told, the guest is told by an event.
    pub fn reservation_notice(&mut self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]) {
        self.controller.reservation_notice(namespace, notify);
    }
}
