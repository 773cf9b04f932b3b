//! The host as the engine reaches it: guests' memory by host addresses, interrupts; and what the engine says to its disks.

use std::collections::VecDeque;

use millrace_engine_model::{Around, HostError};
use millrace_memory::{Access, GuestAddress, GuestMemory, Loan, MAX_REGIONS, MapError};
use millrace_nvme_spec::command::Cqe;
use zerocopy::FromBytes;

/// Bits of a guest's address.
const GUEST_BITS: u32 = 40;

/// The host address of a guest's; `None` beyond what a function has.
pub(super) fn host_address(function: u8, address: u64) -> Option<u64> {
    (address >> GUEST_BITS == 0).then(|| (u64::from(function) + 1) << GUEST_BITS | address)
}

/// The function that a host address belongs to.
pub(super) fn function_of(address: u64) -> Option<u8> {
    u8::try_from((address >> GUEST_BITS).checked_sub(1)?).ok()
}

/// A disk's doorbell was rung.
#[derive(Debug)]
pub(super) struct Bell {
    pub(super) disk: u8,
    pub(super) core: u8,
    pub(super) completion: bool,
    pub(super) value: u16,
}

/// What happened for a function that its controller has yet to see.
#[derive(Clone, Debug, Default)]
pub(crate) struct News {
    /// Vectors that were raised, a bit each.
    pub(super) vectors: u64,
    /// Commands that were completed, and those of them with an error.
    pub(super) completed: u64,
    pub(super) errors: u64,
    /// A completion had nowhere to go.
    pub(super) lost: bool,
    /// Commands that disks were given which read and which write, and their bytes.
    pub(super) reads: (u64, u64),
    pub(super) writes: (u64, u64),
}

impl News {
    pub(super) fn is_empty(&self) -> bool {
        self.vectors == 0 && self.completed == 0
    }
}

/// See the module.
pub(super) struct HostSide {
    memory: GuestMemory,
    bells: VecDeque<Bell>,
    news: Vec<News>,
    interrupts: u64,
}

impl HostSide {
    pub(super) fn new(functions: u16) -> Self {
        Self {
            memory: GuestMemory::with_room(usize::from(functions) * MAX_REGIONS),
            bells: VecDeque::new(),
            news: vec![News::default(); functions.into()],
            interrupts: 0,
        }
    }

    pub(super) fn has_bells(&self) -> bool {
        !self.bells.is_empty()
    }

    pub(super) fn next_bell(&mut self) -> Option<Bell> {
        self.bells.pop_front()
    }

    pub(super) fn news(&mut self, function: u8) -> Option<&mut News> {
        self.news.get_mut(usize::from(function))
    }

    pub(super) fn has_news(&self, function: u8) -> bool {
        self.news.get(usize::from(function)).is_some_and(|news| !news.is_empty())
    }

    /// Interrupts that there were so far.
    pub(super) fn interrupts(&self) -> u64 {
        self.interrupts
    }

    /// Makes a region reachable by host addresses.
    pub(super) fn map(&mut self, address: u64, loan: &Loan) -> Result<(), MapError> {
        self.memory.map_lent(GuestAddress(address), loan)
    }

    /// Makes a region unreachable. The engine's accesses end within its calls.
    pub(super) fn unmap(&mut self, address: u64, size: u64) {
        // A region without a file was never mapped here.
        let _ = self.memory.unmap(GuestAddress(address), size);
        // SAFETY: segments of this memory live only within `read_host` and `write_host`.
        drop(unsafe { self.memory.reclaim() });
    }
}

impl Around for HostSide {
    fn read_host(&mut self, address: u64, out: &mut [u8]) -> Result<(), HostError> {
        self.memory.read(GuestAddress(address), out).map_err(|_| HostError)
    }

    fn write_host(&mut self, address: u64, data: &[u8]) {
        let address = GuestAddress(address);
        let entry = <[u8; Cqe::SIZE]>::try_from(data).ok();
        let translated = self.memory.translate(address, data.len() as u64, Access::Write);
        if let Some(news) = entry.and_then(|_| self.news.get_mut(usize::from(function_of(address.0)?))) {
            news.completed += 1;
            let failed =
                entry.and_then(|entry| Cqe::read_from_bytes(&entry).ok()).is_some_and(|cqe| !cqe.status().is_success());
            news.errors += u64::from(failed);
            news.lost |= translated.is_err();
        }
        match (entry, translated) {
            // The guest looks at the phase tag: it comes last.
            (Some(entry), Ok(segment)) => segment.publish(0, &entry, 12),
            // As on a bus: nobody is there.
            _ => drop(self.memory.write(address, data)),
        }
    }

    fn interrupt(&mut self, function: u8, vector: u8) {
        self.interrupts += 1;
        if let Some(news) = self.news(function) {
            news.vectors |= 1_u64.checked_shl(vector.into()).unwrap_or(0);
        }
    }

    fn disk_doorbell(&mut self, disk: u8, core: u8, completion: bool, value: u16) {
        self.bells.push_back(Bell { disk, core, completion, value });
    }
}
