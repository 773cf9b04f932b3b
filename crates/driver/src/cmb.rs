//! Memory in the controller that submission queues may lie in (Controller Memory Buffer, Base 8.2.1): the controller finds commands without
//! a read across the bus.
//!
//! ```text
//!   CMBLOC, CMBSZ ──► part of a BAR ──map──► entries are stored here ──sfence──► doorbell
//!   CMBMSC ◄── the same part's bus address: queues there are named by it, and nothing else is given these addresses
//! ```
//!
//! Whatever is not as it must be, queues lie in ordinary memory as without it.

use std::sync::{Arc, Mutex, PoisonError};

use millrace_memory::Mapping;
use millrace_nvme_spec::{
    Version, pci,
    registers::{BufferControl, BufferLocation, BufferSize, BufferStatus, offset},
};

use crate::{
    admin::CONFIG,
    controller::Controller,
    dma::{DmaRange, Free, PAGE_SIZE},
    error::{DriverError, during},
    shared::SharedRing,
    transport::MappedArea,
};

/// The most of it that is used: queues take no more.
const MOST: u64 = 64 << 20;

/// Where it is, by the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// Base Address Register.
    bar: u8,
    /// From its start.
    offset: u64,
    size: u64,
}

impl Place {
    /// `None`: there is none, none for submission queues, or what is said cannot be.
    fn new(location: BufferLocation, size: BufferSize) -> Option<Self> {
        let bar = location.bir();
        let unit = size.unit()?;
        if !size.sqs() || size.sz() == 0 || bar == 1 || bar > 5 {
            return None;
        }
        let offset = u64::from(location.ofst()).checked_mul(unit)?;
        let size = u64::from(size.sz()).checked_mul(unit)?;
        offset.checked_add(size)?;
        Some(Self { bar, offset, size })
    }
}

#[derive(Debug)]
struct Pool {
    mapping: Arc<Mapping>,
    /// Where it starts in the mapping.
    start: usize,
    /// And for the controller.
    address: u64,
    /// Which pages are free.
    free: Mutex<Free>,
}

/// The controller's memory. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ControllerMemory(Arc<Pool>);

impl ControllerMemory {
    /// The part of it that is mapped; `None`: none of it.
    fn new(place: Place, areas: &[MappedArea], address: u64) -> Option<Self> {
        let (mapping, start, room) = areas.iter().find_map(|area| {
            let start = place.offset.checked_sub(area.offset)?;
            let room = (area.mapping.len() as u64).checked_sub(start)?;
            Some((Arc::clone(&area.mapping), usize::try_from(start).ok()?, room))
        })?;
        let pages = usize::try_from(room.min(place.size).min(MOST)).ok()? / PAGE_SIZE;
        (pages > 0).then(|| Self(Arc::new(Pool { mapping, start, address, free: Mutex::new(Free::all_free(pages)) })))
    }

    /// All of a mapping, which the controller knows at `address`.
    #[cfg(test)]
    pub(crate) fn at(mapping: &Arc<Mapping>, address: u64) -> Self {
        let areas = [MappedArea { offset: 0, mapping: Arc::clone(mapping) }];
        Self::new(Place { bar: 0, offset: 0, size: mapping.len() as u64 }, &areas, address).expect("it has pages")
    }

    /// Takes at least `len` contiguous bytes, whole pages; `None`: there are not as many. Freed on drop.
    pub(crate) fn alloc(&self, len: usize) -> Option<ControllerPages> {
        let count = len.max(1).div_ceil(PAGE_SIZE);
        let (first, _) = self.0.free.lock().unwrap_or_else(PoisonError::into_inner).take(count)?;
        Some(ControllerPages { pool: Arc::clone(&self.0), first, count })
    }

    /// Whether what is stored there is there: a bridge or a reset may have left the addresses leading nowhere.
    fn holds(&self) -> bool {
        let Some(page) = self.alloc(PAGE_SIZE) else { return true };
        let Some(words) = page.ring::<u64>((PAGE_SIZE / 8) as u32) else { return false };
        let patterns = [0x0123_4567_89ab_cdef_u64, !0x0123_4567_89ab_cdef];
        patterns.iter().all(|pattern| {
            words.write_words(0, *pattern);
            words.load_word(0, 0) == *pattern
        })
    }
}

/// Contiguous pages of it.
#[derive(Debug)]
pub(crate) struct ControllerPages {
    pool: Arc<Pool>,
    first: usize,
    count: usize,
}

impl ControllerPages {
    /// All their addresses, as the controller knows them.
    pub(crate) fn range(&self) -> DmaRange {
        DmaRange { iova: self.pool.address + (self.first * PAGE_SIZE) as u64, len: self.count * PAGE_SIZE }
    }

    /// Their start as a ring of entries; `None` when they are more than fit.
    pub(crate) fn ring<T: Copy>(&self, entries: u32) -> Option<SharedRing<T>> {
        if size_of::<T>().checked_mul(entries as usize)? > self.count * PAGE_SIZE {
            return None;
        }
        SharedRing::new(&self.pool.mapping, self.pool.start + self.first * PAGE_SIZE, entries)
    }
}

impl Drop for ControllerPages {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).give_back(self.first, self.count);
    }
}

impl Controller {
    /// Switches the controller's memory on, where it has some that submission queues may lie in.
    pub(crate) fn find_controller_memory(&mut self) -> Result<(), DriverError> {
        let known = self.cmb.take();
        if !self.options.controller_memory {
            return Ok(());
        }
        let switched = self.capabilities().cmbs();
        if switched {
            self.control_memory(BufferControl::new().with_cre(true))?;
        } else if !(Version::V1_2..Version::V1_4).contains(&self.version()) {
            return Ok(());
        }
        let location = BufferLocation::from_bits(self.read32(offset::CMBLOC)?);
        let Some(place) = Place::new(location, BufferSize::from_bits(self.read32(offset::CMBSZ)?)) else { return Ok(()) };
        let address = self.bar_address(place.bar)?.and_then(|bar| bar.checked_add(place.offset));
        let Some(address) = address.filter(|at| at.is_multiple_of(PAGE_SIZE as u64)) else { return Ok(()) };
        let memory = match known.filter(|known| known.0.address == address) {
            Some(known) => Some(known),
            None => self.map_controller_memory(place, address)?,
        };
        let Some(memory) = memory else { return Ok(()) };
        if switched {
            let control = BufferControl::new().with_cre(true).with_cmse(true).with_cba(address >> 12);
            self.control_memory(control)?;
            if BufferStatus::from_bits(self.read32(offset::CMBSTS)?).cbai() {
                return Ok(());
            }
        }
        self.cmb = Some(memory).filter(ControllerMemory::holds);
        Ok(())
    }

    fn map_controller_memory(&self, place: Place, address: u64) -> Result<Option<ControllerMemory>, DriverError> {
        let own = self.memory.range();
        let Some(end) = address.checked_add(place.size) else { return Ok(None) };
        let Ok(len) = usize::try_from(place.size) else { return Ok(None) };
        if address < own.iova + own.len as u64 && own.iova < end {
            return Ok(None);
        }
        let mut transport = self.transport.get();
        // What the controller takes for its own memory must be nobody else's.
        if !transport.keep_free(DmaRange { iova: address, len }) {
            return Ok(None);
        }
        let areas = transport.map_region(place.bar.into()).map_err(during("mapping the controller's memory"))?;
        Ok(ControllerMemory::new(place, &areas, address))
    }

    /// The upper half first: the lower one takes effect, and some transports and controllers know no writes of 64 bits.
    fn control_memory(&self, control: BufferControl) -> Result<(), DriverError> {
        let bits = control.into_bits();
        self.write32(offset::CMBMSC + 4, (bits >> 32) as u32)?;
        self.write32(offset::CMBMSC, bits as u32)
    }

    /// What is written in a Base Address Register; `None`: it is not one of memory, or unset.
    fn bar_address(&self, bar: u8) -> Result<Option<u64>, DriverError> {
        let mut transport = self.transport.get();
        let mut read = |bar: u8| {
            let mut bytes = [0; 4];
            let at = (pci::offset::BAR0 + 4 * usize::from(bar)) as u64;
            transport.region_read(CONFIG, at, &mut bytes).map_err(during("reading a Base Address Register"))?;
            Ok::<_, DriverError>(u32::from_le_bytes(bytes))
        };
        let low = read(bar)?;
        let is_memory = low & 1 == 0;
        let is_64_bits = low & 6 == 4 && bar < 5;
        let high = if is_64_bits { read(bar + 1)? } else { 0 };
        let address = u64::from(high) << 32 | u64::from(low & !0xf);
        Ok(Some(address).filter(|address| is_memory && *address != 0))
    }
}

#[cfg(test)]
mod tests;
