//! What the operator decides about a controller.

use millrace_memory::GuestMemory;

use super::card::{CardSpec, StorageFunctions};

/// How a guest's doorbell writes reach us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DoorbellMode {
    /// The doorbell page is memory that guest and daemon share: ringing costs no exit, and we poll.
    #[default]
    Shared,
    /// Doorbell writes arrive as messages; shadow doorbells (Doorbell Buffer Config) keep them rare, and an idle controller
    /// costs no CPU at all.
    Messages,
}

/// What a guest may create for itself by Namespace Management.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceQuota {
    /// Bytes of all namespaces the guest created, together. 0: the guest may not manage namespaces.
    pub bytes: u64,
}

/// A controller's fixed properties.
#[derive(Clone, Debug)]
pub struct Config {
    /// The operator's name for the device.
    pub name: String,
    /// Serial number (Identify Controller SN), at most 20 ASCII characters.
    pub serial: String,
    /// Model number (MN), at most 40 ASCII characters.
    pub model: String,
    /// Subsystem NQN.
    pub subnqn: String,
    /// Controller identifier (CNTLID).
    pub cntlid: u16,
    /// I/O queue pairs, 1 to [`Config::MAX_QUEUES`].
    pub queues: u16,
    /// Entries a queue may have, 2 to 65,536 (CAP.MQES + 1).
    pub queue_entries: u32,
    /// MSI-X vectors, 1 to [`Config::MAX_VECTORS`].
    pub vectors: u16,
    /// Largest namespace identifier (NN), 1 to [`Config::MAX_NAMESPACES`].
    pub namespaces: u32,
    /// Largest transfer as a power of two of 4 KiB pages (MDTS), 1 to [`Config::MAX_MDTS`]; 8 is 1 MiB. A controller with 0 would say that it
    /// has no limit.
    pub mdts: u8,
    /// How doorbells arrive.
    pub doorbells: DoorbellMode,
    /// What the guest may create.
    pub quota: NamespaceQuota,
    /// The client may read and write the controller's state, and have the pages that it writes logged.
    pub migration: bool,
    /// The card that takes the I/O queues, if one does.
    pub card: Option<CardSpec>,
    /// What the card does for this device.
    pub functions: StorageFunctions,
    /// The client is a program with one connection, not a guest: its reservations end with it.
    pub session: bool,
}

impl Config {
    /// Most I/O queue pairs: their doorbells fill one page.
    pub const MAX_QUEUES: u16 = 256;
    /// Most MSI-X vectors.
    pub const MAX_VECTORS: u16 = 257;
    /// Largest NN.
    pub const MAX_NAMESPACES: u32 = 1024;

    /// Largest MDTS: 2 MiB.
    pub const MAX_MDTS: u8 = 9;

    /// A controller of the usual size.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            serial: format!("MR-{name}").chars().filter(char::is_ascii).take(20).collect(),
            model: "Millrace NVMe".to_owned(),
            subnqn: format!("nqn.2026-11.dev.millrace:{name}"),
            cntlid: 1,
            queues: 16,
            queue_entries: 1024,
            vectors: 17,
            namespaces: 256,
            mdts: 8,
            doorbells: DoorbellMode::default(),
            quota: NamespaceQuota::default(),
            migration: false,
            card: None,
            functions: StorageFunctions::default(),
            session: false,
        }
    }

    /// What is out of its range, if anything is.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let ascii =
            |text: &str, longest: usize| text.len() <= longest && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        let rules = [
            ((1..=Self::MAX_QUEUES).contains(&self.queues), "I/O queue pairs must be 1 to 256"),
            ((2..=65_536).contains(&self.queue_entries), "queue entries must be 2 to 65536"),
            ((1..=Self::MAX_VECTORS).contains(&self.vectors), "interrupt vectors must be 1 to 257"),
            ((1..=Self::MAX_NAMESPACES).contains(&self.namespaces), "namespaces must be 1 to 1024"),
            ((1..=Self::MAX_MDTS).contains(&self.mdts), "the largest transfer (MDTS) must be 1 to 9: 8 KiB to 2 MiB"),
            (ascii(&self.serial, 20), "the serial number must be at most 20 printable ASCII characters"),
            (ascii(&self.model, 40), "the model number must be at most 40 printable ASCII characters"),
            (ascii(&self.subnqn, 223), "the subsystem's NQN must be at most 223 printable ASCII characters"),
            (
                self.card.is_none() || !self.migration,
                "a device on an engine cannot be migrated: its queues are in the engine",
            ),
            (self.functions == StorageFunctions::default() || self.card.is_some(), "storage functions need an engine"),
            (self.cntlid < 0xfff0, "the controller identifier must be less than FFF0h"),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }

    /// What a client has mapped that has just come.
    pub(crate) fn new_memory(&self) -> GuestMemory {
        if self.session { GuestMemory::for_program() } else { GuestMemory::new() }
    }

    /// Largest transfer in bytes.
    pub fn max_transfer(&self) -> u64 {
        4096 << self.mdts
    }

    /// Scratch bytes that a command takes in its task at most, beside what its volume's requests take: the segments of the
    /// largest transfer, a page each, those of its metadata, and its own future.
    pub fn scratch_bytes(&self) -> usize {
        ((self.max_transfer() >> 12) as usize + 5) * size_of::<millrace_memory::Segment>() + super::io::TASK_BYTES
    }
}
