//! The engine of docs/hardware.md as programs see it: one trait, several engines behind it.
//!
//! ```text
//!            doorbells, registers                      around it
//!   card ─────────────────────────► Engine ──Around──► host memory, interrupts, the disks' doorbells
//!        ◄────────────────────────         ◄────────── the disks: chip reads, chip writes
//!                                     ├── soft/   a model without cycles
//!                                     └── sim/    the hardware's own text, cycle by cycle (feature `sim`)
//! ```
//!
//! Whoever has an engine is the control processor of the contract: it writes registers ([`map`]), passes on doorbells, and lets the
//! engine [`run`](Engine::run) while it is busy. What the engine asks of the world comes as calls of [`Around`] from inside these calls.
//!
//! It does not know guests, controllers or volumes.

pub mod map;
#[cfg(feature = "sim")]
mod sim;
mod soft;
#[doc(hidden)]
pub mod testing;

#[cfg(feature = "sim")]
pub use sim::SimEngine;
pub use soft::SoftEngine;

/// What an engine was built with (docs/hardware.md, "Numbers fixed by parameters").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Functions of the engine.
    pub functions: u16,
    /// Its cores.
    pub cores: u8,
    /// Its disks.
    pub ssds: u8,
    /// Functions a core can serve (`LF`).
    pub local_functions: u8,
    /// I/O queue pairs of a function (`QP`).
    pub queue_pairs: u8,
    /// Commands in flight in a core.
    pub slots: u8,
    /// Pages of 2 MiB in a function's table.
    pub pages: u16,
    /// Translated PRP lists in flight in a core.
    pub lists: u8,
    /// Spaces of FastPath.
    pub spaces: u8,
}

impl Shape {
    /// The parameters' defaults, with so many cores and disks.
    ///
    /// # Panics
    /// When there are not 1 to 16 of both.
    pub fn new(cores: u8, ssds: u8) -> Self {
        assert!((1..=16).contains(&cores) && (1..=16).contains(&ssds), "an engine has 1 to 16 cores and disks");
        Self { functions: 16, cores, ssds, local_functions: 16, queue_pairs: 4, slots: 64, pages: 512, lists: 16, spaces: 0 }
    }

    /// The same with so many spaces of FastPath.
    ///
    /// # Panics
    /// When there are more than 16.
    #[must_use]
    pub fn with_spaces(self, spaces: u8) -> Self {
        assert!(spaces <= 16, "an engine has at most 16 spaces");
        Self { spaces, ..self }
    }

    /// Entries of a core's queue on one disk.
    pub fn disk_entries(&self) -> u16 {
        64 / u16::from(self.ssds)
    }
}

/// The host address could not be reached: nothing is mapped there, or not for this access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostError;

/// What is around an engine.
pub trait Around {
    /// Reads host memory: all of `out`, or nothing.
    fn read_host(&mut self, address: u64, out: &mut [u8]) -> Result<(), HostError>;

    /// Writes 1 to 16 bytes of host memory; what cannot be reached is lost, as on a bus.
    fn write_host(&mut self, address: u64, data: &[u8]);

    /// A function's interrupt. What was written before is visible.
    fn interrupt(&mut self, function: u8, vector: u8);

    /// The doorbell of a core's queue pair on a disk: the tail of its submission queue, or the head of its completion queue.
    fn disk_doorbell(&mut self, disk: u8, core: u8, completion: bool, value: u16);
}

/// An engine: the ports of `hw/rtl/engine.sv`, a call each. Calls that take time let the clock run, and may call `around` meanwhile.
pub trait Engine {
    /// What it was built with.
    fn shape(&self) -> Shape;

    /// Writes a register; addresses are [`map`]'s.
    fn write(&mut self, address: u32, value: u64, around: &mut dyn Around);

    /// Reads a register.
    fn read(&mut self, address: u32, around: &mut dyn Around) -> u64;

    /// A guest's write to its doorbell page, at this offset from the page's start; from [`map::fastpath::PAGE`] on, a program's word.
    fn doorbell(&mut self, function: u8, offset: u16, value: u32, around: &mut dyn Around);

    /// A disk reads 1 to 16 beats of 16 bytes of the chip.
    fn read_chip(&mut self, disk: u8, address: u32, out: &mut [u8], around: &mut dyn Around);

    /// A disk writes one beat of the chip.
    fn write_chip(&mut self, disk: u8, address: u32, data: &[u8; 16], around: &mut dyn Around);

    /// Lets the clock run for at most so many cycles, while something is pending inside.
    fn run(&mut self, cycles: u64, around: &mut dyn Around);

    /// Lets so many cycles pass, whether something is pending or not.
    fn pass(&mut self, cycles: u64, around: &mut dyn Around);

    /// Whether something is pending inside: while not, the clock may stand still.
    fn is_busy(&self) -> bool;

    /// Cores that have a fault to be read, a bit each.
    fn faults(&self) -> u16;

    /// Cycles since it was made.
    fn now(&self) -> u64;
}

#[cfg(test)]
mod tests;
