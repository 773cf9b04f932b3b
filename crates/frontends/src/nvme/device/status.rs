//! What the operator sees of a device.

use crate::nvme::{controller::Counters, registers::Phase};

use super::{Link, NvmeDevice};

/// What a device is doing, for the operator.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// A client (a virtual machine) is connected.
    pub connected: bool,
    /// Clients that have connected, or were connected when this worker took over.
    pub clients: u64,
    /// Where the controller stands.
    pub phase: DevicePhase,
    /// A fault of ours in it was contained: it does nothing any more.
    pub fenced: bool,
    /// Two workers in a row ended while they worked for it, by faults of ours: it is not served before its client has left.
    pub out_of_service: bool,
    /// I/O submission queues that the guest has created.
    pub queues: u32,
    /// Commands accepted and not completed.
    pub in_flight: u32,
    /// What it has done since it was made.
    pub counters: DeviceCounters,
    /// Namespaces that exist for it, in order of their identifiers.
    pub namespaces: Vec<NamespaceStatus>,
    /// Version of its state region's layout.
    pub state_layout: u32,
    /// Regions of memory that the client shares.
    pub memory_regions: usize,
    /// Their size together in bytes.
    pub memory_bytes: u64,
}

/// Where a controller stands, for the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePhase {
    /// The guest has not enabled it.
    Disabled,
    /// In use.
    Ready,
    /// A reset waits for the commands in flight.
    Resetting,
    /// The guest shut it down; volumes are flushed, or being flushed.
    ShutDown,
    /// Controller fatal status: the guest must reset it.
    Failed,
}

/// What a device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Commands that read.
    pub read_commands: u64,
    /// Commands that wrote.
    pub write_commands: u64,
    /// All other commands.
    pub other_commands: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Commands that ended with an error.
    pub errors: u64,
    /// Of these, for the medium's fault.
    pub media_errors: u64,
    /// Interrupts signalled to the guest.
    pub interrupts: u64,
}

impl From<Counters> for DeviceCounters {
    fn from(counters: Counters) -> Self {
        Self {
            read_commands: counters.read_commands,
            write_commands: counters.write_commands,
            other_commands: counters.other_commands,
            bytes_read: counters.bytes_read,
            bytes_written: counters.bytes_written,
            errors: counters.errors,
            media_errors: counters.media_errors,
            interrupts: counters.interrupts,
        }
    }
}

/// A namespace of a device, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceStatus {
    /// Namespace identifier.
    pub nsid: u32,
    /// The volume's name.
    pub volume: String,
    /// The guest sees it; it may exist without.
    pub attached: bool,
    /// The guest may not write it.
    pub read_only: bool,
    /// The guest created it by Namespace Management.
    pub by_guest: bool,
    /// Commands in flight on it.
    pub in_flight: u32,
    /// Commands that were in flight on it and have finished, since it was attached.
    pub finished: u64,
}

impl NvmeDevice {
    /// What the device is doing.
    pub fn status(&self) -> DeviceStatus {
        let controller = &self.controller;
        let namespaces = controller.namespaces.allocated().map(|(nsid, allocated)| {
            let attached = controller.namespaces.get(nsid);
            NamespaceStatus {
                nsid,
                volume: allocated.namespace.volume.name().to_owned(),
                attached: attached.is_some(),
                read_only: allocated.read_only,
                by_guest: allocated.by_guest,
                in_flight: attached.map_or(0, |attached| attached.in_flight.get()),
                finished: attached.map_or(0, |attached| attached.finished.get()),
            }
        });
        DeviceStatus {
            connected: matches!(self.link, Link::Connected(_)),
            clients: self.clients,
            phase: match controller.phase {
                Phase::Disabled => DevicePhase::Disabled,
                Phase::Ready => DevicePhase::Ready,
                Phase::Resetting => DevicePhase::Resetting,
                Phase::ShuttingDown => DevicePhase::ShutDown,
                Phase::Failed => DevicePhase::Failed,
            },
            fenced: matches!(self.link, Link::Fenced),
            out_of_service: controller.is_out_of_service(),
            queues: (1..=controller.config.queues).filter(|&sqid| controller.sq_exists(sqid)).count() as u32,
            in_flight: controller.in_flight,
            counters: controller.counters.into(),
            namespaces: namespaces.collect(),
            state_layout: controller.state.version.get(),
            memory_regions: controller.memory.regions().count(),
            memory_bytes: controller.memory.regions().map(|(_, size, ..)| size).sum(),
        }
    }
}
