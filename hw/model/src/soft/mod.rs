//! The engine without cycles: the same registers, checks, statuses and rules of order, each step done as a whole.
//!
//! ```text
//!   doorbell ─► queues.rs ──fetch──► command.rs: decode, place, translate ──► disk.rs ──doorbell──► disk
//!                  ▲                    (those that wait keep their order)        │
//!                  └──── core.rs: join, post, interrupts.rs ◄─── phase tags ◄─────┘
//! ```
//!
//! Time: eight cycles for a command, the hardware's aim, and leaps to where the next thing is due. It says nothing of how long the
//! hardware takes; everything that a guest or a disk can observe but times is the hardware's.

mod command;
mod core;
mod disk;
mod fastpath;
mod interrupts;
mod queues;

use self::{core::Core, fastpath::FastPath};
use crate::{
    Around, Engine, Shape,
    map::{self, Place},
};

/// Cycles that a command takes of a core's time.
const CYCLES_PER_COMMAND: u64 = 8;

/// See the module.
pub struct SoftEngine {
    shape: Shape,
    /// Where each function's doorbells go.
    places: Vec<Place>,
    refused: u32,
    cores: Vec<Core>,
    fastpath: FastPath,
    now: u64,
    busy: bool,
}

impl SoftEngine {
    /// An engine after reset.
    pub fn new(shape: Shape) -> Self {
        let cores = (0..shape.cores).map(|number| Core::new(number, &shape)).collect();
        let places = vec![Place::new(); usize::from(shape.functions)];
        Self { shape, places, refused: 0, cores, fastpath: FastPath::new(&shape), now: 0, busy: false }
    }

    fn front(&self, word: u32) -> u64 {
        match word {
            map::REFUSED => u64::from(self.refused),
            map::FRONT_IDENTITY => {
                let shape = &self.shape;
                u64::from(shape.cores) | u64::from(shape.functions) << 16 | u64::from(shape.ssds) << 32
            }
            _ => self.place_of(word).map_or(0, |function| self.places[function].into_bits()),
        }
    }

    /// The function whose place a word is.
    fn place_of(&self, word: u32) -> Option<usize> {
        let function = word.checked_sub(map::place(0))? as usize;
        (function < self.places.len()).then_some(function)
    }
}

impl Engine for SoftEngine {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn write(&mut self, address: u32, value: u64, _: &mut dyn Around) {
        if address >= map::place(0) {
            self.fastpath.write(address, value);
            if let Some(function) = self.place_of(address) {
                self.places[function] = Place::from_bits(value);
            }
        } else if let Some(core) = self.cores.get_mut((address >> 16) as usize) {
            core.write(address & 0xffff, value);
            self.busy = true;
        }
    }

    fn read(&mut self, address: u32, _: &mut dyn Around) -> u64 {
        if address >= map::place(0) {
            return self.fastpath.read(address).unwrap_or_else(|| self.front(address));
        }
        let now = self.now;
        self.cores.get_mut((address >> 16) as usize).map_or(0, |core| core.read(address & 0xffff, now))
    }

    fn doorbell(&mut self, function: u8, offset: u16, value: u32, _: &mut dyn Around) {
        if self.fastpath.doorbell(function, offset, value, self.now) {
            self.busy = true;
            return;
        }
        let place = self.places.get(usize::from(function)).copied().filter(Place::enabled);
        let (queue, completion) = (offset / 8, offset & 4 != 0);
        let is_queue = offset.is_multiple_of(4) && (1..=u16::from(self.shape.queue_pairs)).contains(&queue);
        let core = place.filter(|_| is_queue).and_then(|place| self.cores.get_mut(usize::from(place.core())));
        let Some((core, place)) = core.zip(place) else {
            self.refused = self.refused.wrapping_add(1);
            return;
        };
        let queue = u16::from(place.local()) * u16::from(self.shape.queue_pairs) + queue - 1;
        // As wide as the port: what does not fit is no position of any queue.
        core.doorbell(queue, completion, u16::try_from(value).unwrap_or(u16::MAX));
        self.busy = true;
    }

    fn read_chip(&mut self, disk: u8, address: u32, out: &mut [u8], _: &mut dyn Around) {
        out.fill(0);
        let core = self.cores.get(usize::try_from(address / map::chip::WINDOW).unwrap_or(usize::MAX));
        if let Some(core) = core {
            core.read_chip(disk, address % map::chip::WINDOW, out);
        }
    }

    fn write_chip(&mut self, _disk: u8, address: u32, data: &[u8; 16], _: &mut dyn Around) {
        let core = self.cores.get_mut(usize::try_from(address / map::chip::WINDOW).unwrap_or(usize::MAX));
        if let Some(core) = core {
            core.write_chip(address % map::chip::WINDOW, data);
            self.busy = true;
        }
    }

    fn run(&mut self, cycles: u64, around: &mut dyn Around) {
        let end = self.now.saturating_add(cycles);
        while self.busy && self.now < end {
            let mut commands = 0;
            let mut worked = self.fastpath.step(&mut self.cores, self.now, around);
            for core in &mut self.cores {
                let done = core.step(self.now, &self.places, &mut self.fastpath.through(self.now, around));
                commands = commands.max(done.commands);
                worked |= done.worked;
            }
            if worked {
                self.now += (commands * CYCLES_PER_COMMAND).max(1);
            } else {
                let due = self.cores.iter().filter_map(Core::next_due).min();
                self.busy = due.is_some();
                self.now = due.map_or(self.now, |due| due.clamp(self.now + 1, end));
            }
        }
    }

    fn pass(&mut self, cycles: u64, around: &mut dyn Around) {
        let end = self.now.saturating_add(cycles);
        self.run(cycles, around);
        self.now = self.now.max(end);
    }

    fn is_busy(&self) -> bool {
        self.busy
    }

    fn faults(&self) -> u16 {
        self.cores.iter().enumerate().fold(0, |bits, (at, core)| bits | u16::from(core.has_fault()) << at)
    }

    fn now(&self) -> u64 {
        self.now
    }
}
