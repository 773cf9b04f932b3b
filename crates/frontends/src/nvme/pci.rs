//! PCI configuration space and the MSI-X table: what a client reads and writes of the function (PCIe 3.8).
//!
//! Most of it is emulated by the client (QEMU, Cloud Hypervisor), which passes writes on; so only what has an effect on the
//! controller has one here: function level reset, the MSI-X function mask, INTx disable.

use millrace_nvme_spec::pci::{
    BAR_MEMORY_64, BASE_CLASS, CapabilityId, Command, DeviceCapabilities, DeviceControl, DeviceStatus, EXTENDED_CONFIG_SIZE,
    Header, MsixCapability, MsixControl, MsixLocation, PROGRAMMING_INTERFACE, PciExpressCapability, PowerControl,
    PowerManagementCapability, SUB_CLASS,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    controller::Controller,
    registers::Reset,
    state::{self, VECTORS},
};

/// "RM" as bytes in configuration space. No vendor has the number, and no guest driver has a quirk for it: controllers are found
/// by their class.
pub(crate) const VENDOR_ID: u16 = 0x4d52;
/// The first device of that vendor.
pub(crate) const DEVICE_ID: u16 = 0x0001;
/// Subsystem vendor, also in Identify Controller's SSVID.
pub(crate) const SUBSYSTEM_VENDOR_ID: u16 = VENDOR_ID;

/// Bytes of configuration space. The extended part is empty: it reads as zero, which says that there is no extended capability.
/// It must be there: a PCI Express function has it, and Cloud Hypervisor waits forever after a read of it that is refused.
pub(crate) const CONFIG_SIZE: u64 = EXTENDED_CONFIG_SIZE as u64;
/// Bytes of BAR0: a page of registers, a page of doorbells.
pub(crate) const BAR0_SIZE: u64 = 0x2000;
/// The BAR of the MSI-X table and pending bits.
pub(crate) const MSIX_BAR: u8 = 4;
/// Bytes of that BAR.
pub(crate) const BAR4_SIZE: u64 = 0x4000;
/// Where the pending bits are in it; the table is at its start.
const PBA: u64 = 0x2000;

const POWER_MANAGEMENT: usize = 0x40;
const MSIX: usize = 0x50;
const PCI_EXPRESS: usize = 0x60;

pub(crate) const MSIX_CONTROL_HIGH: usize = MSIX + 3;
const DEVICE_CONTROL_HIGH: usize = PCI_EXPRESS + 9;
const STATUS_LOW: usize = 0x06;
const COMMAND: usize = 0x04;

const _: () = assert!(VECTORS * 16 <= PBA as usize && PBA + VECTORS as u64 / 8 <= BAR4_SIZE, "table and bits fit");

/// The bits of a byte of configuration space that a client may change.
pub(crate) fn writable(at: usize) -> u8 {
    const BAR0: u32 = !(BAR0_SIZE as u32 - 1);
    const BAR4: u32 = !(BAR4_SIZE as u32 - 1);
    match at {
        // Memory space, bus master, parity error response; SERR#, interrupt disable.
        0x04 => 0x46,
        0x05 => 0x05,
        0x10..=0x13 => BAR0.to_le_bytes()[at - 0x10],
        0x20..=0x23 => BAR4.to_le_bytes()[at - 0x20],
        // Cache line size and interrupt line (for software's use), upper halves of the BARs, device control: error reporting,
        // relaxed ordering, payload.
        0x0c | 0x3c | 0x14..=0x17 | 0x24..=0x27 | 0x68 => 0xff,
        // Power state: D0 or D3hot, see `config_write`.
        0x44 => 0x03,
        MSIX_CONTROL_HIGH => 0xc0,
        // Device control: tags, no snoop, read request size.
        DEVICE_CONTROL_HIGH => 0x79,
        // Link control: ASPM, common clock, extended synch.
        0x70 => 0xc3,
        _ => 0,
    }
}

fn header() -> Header {
    let mut header = Header::new_zeroed();
    header.vendor_id = VENDOR_ID;
    header.device_id = DEVICE_ID;
    header.status = DeviceStatus::new().with_capabilities_list(true);
    header.revision_id = 1;
    header.programming_interface = PROGRAMMING_INTERFACE;
    header.sub_class = SUB_CLASS;
    header.base_class = BASE_CLASS;
    header.bars = [BAR_MEMORY_64, 0, 0, 0, BAR_MEMORY_64, 0];
    header.subsystem_vendor_id = SUBSYSTEM_VENDOR_ID;
    header.subsystem_id = DEVICE_ID;
    header.capabilities = POWER_MANAGEMENT as u8;
    header.interrupt_pin = 1;
    header
}

fn capabilities(vectors: u16) -> (PowerManagementCapability, MsixCapability, PciExpressCapability) {
    let power = PowerManagementCapability {
        id: CapabilityId::POWER_MANAGEMENT,
        next: MSIX as u8,
        pmc: 3,
        pmcs: PowerControl::new().with_no_soft_reset(true),
        data: [0; 2],
    };
    let place = |offset| MsixLocation::at(MSIX_BAR, offset).expect("a place in a BAR");
    let msix = MsixCapability {
        id: CapabilityId::MSI_X,
        next: PCI_EXPRESS as u8,
        control: MsixControl::new().with_table_size_z(vectors.saturating_sub(1)),
        table: place(0),
        pba: place(PBA as u32),
    };
    // A link of 4 lanes at 16 GT/s that is up; guests only print it.
    let link = 4 << 4 | 4;
    let mut express = PciExpressCapability::new_zeroed();
    express.id = CapabilityId::PCI_EXPRESS;
    express.capabilities = 2;
    express.device_capabilities =
        DeviceCapabilities::new().with_max_payload(1).with_role_based_error_reporting(true).with_function_level_reset(true);
    express.device_control = DeviceControl::new().with_max_read_request(2);
    express.link_capabilities = link;
    express.link_status = link as u16;
    (power, msix, express)
}

/// The offsets of an access's bytes.
pub(crate) fn offsets(from: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(from), |at| at.checked_add(1))
}

impl Controller {
    /// Configuration space and MSI-X table as after power-on.
    pub(crate) fn reset_config_space(&mut self) {
        let (power, msix, express) = capabilities(self.config.vectors);
        self.state.pci.iter().for_each(|byte| byte.set(0));
        self.store_config(0, header().as_bytes());
        self.store_config(POWER_MANAGEMENT, power.as_bytes());
        self.store_config(MSIX, msix.as_bytes());
        self.store_config(PCI_EXPRESS, express.as_bytes());
        for [address_low, address_high, data, control] in &self.state.msix {
            address_low.set(0);
            address_high.set(0);
            data.set(0);
            control.set(1);
        }
        self.interrupts.set_function_mask(false);
    }

    fn store_config(&self, at: usize, bytes: &[u8]) {
        self.state.pci.iter().skip(at).zip(bytes).for_each(|(cell, byte)| cell.set(*byte));
    }

    fn config_byte(&self, at: usize) -> u8 {
        self.state.pci.get(at).map_or(0, state::Cell::get)
    }

    /// Reads configuration space.
    pub(crate) fn config_read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in offsets(offset).zip(out) {
            *byte = usize::try_from(at).map_or(0, |at| self.config_byte(at));
        }
    }

    /// Writes configuration space: the bits that may change do.
    pub(crate) fn config_write(&mut self, offset: u64, data: &[u8]) {
        let mut function_reset = false;
        for (at, &byte) in offsets(offset).zip(data) {
            let Some((at, cell)) = usize::try_from(at).ok().and_then(|at| Some((at, self.state.pci.get(at)?))) else {
                break;
            };
            let mask = writable(at);
            // D1 and D2 do not exist: such a write leaves the power state alone.
            if at == POWER_MANAGEMENT + 4 && matches!(byte & 3, 1 | 2) {
                continue;
            }
            cell.set(cell.get() & !mask | byte & mask);
            function_reset |= at == DEVICE_CONTROL_HIGH && byte & 0x80 != 0;
        }
        state::commit();
        let control = self.config_byte(MSIX_CONTROL_HIGH);
        self.interrupts.set_function_mask(control & 0xc0 == 0xc0);
        // A machine that is restored resets its devices before it knows their states.
        if function_reset && !self.awaits_guest() {
            self.reset(Reset::Function);
        }
    }

    /// Whether the command register lets the function assert INTx.
    pub(crate) fn pin_is_enabled(&self) -> bool {
        let command = u16::from_le_bytes([self.config_byte(COMMAND), self.config_byte(COMMAND + 1)]);
        !Command::from_bits(command).interrupt_disable()
    }

    /// Shows the INTx level in the status register.
    pub(crate) fn set_pin_status(&self, asserted: bool) {
        if let Some(status) = self.state.pci.get(STATUS_LOW) {
            let bit = DeviceStatus::new().with_interrupt(true).into_bits() as u8;
            status.set(if asserted { status.get() | bit } else { status.get() & !bit });
        }
    }

    /// Reads the MSI-X table and pending bits (BAR4).
    pub(crate) fn msix_read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in offsets(offset).zip(out) {
            *byte = match at.checked_sub(PBA) {
                None => self.msix_word(at).map_or(0, |word| word.get().to_le_bytes()[(at & 3) as usize]),
                Some(at) => self.interrupts.pending_word((at / 8) as usize).to_le_bytes()[(at & 7) as usize],
            };
        }
    }

    /// Writes the MSI-X table; a client that emulates it itself never does. Only whole words count (PCI 6.8.2).
    pub(crate) fn msix_write(&mut self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) {
            return;
        }
        for (at, word) in (offset..PBA).step_by(4).zip(data.as_chunks::<4>().0) {
            let value = u32::from_le_bytes(*word);
            if let Some(cell) = self.msix_word(at) {
                cell.set(if at % 16 == 12 { value & 1 } else { value });
            }
        }
    }

    fn msix_word(&self, at: u64) -> Option<&state::Cell<u32>> {
        let entry = (at / 16) as usize;
        if entry >= usize::from(self.config.vectors) {
            return None;
        }
        self.state.msix.get(entry)?.get((at % 16 / 4) as usize)
    }
}

#[cfg(test)]
mod tests;
