//! A card in the guests' place: an engine (docs/hardware.md) takes their I/O queues, disks of its own carry the commands out.
//!
//! ```text
//!   guest ── admin queue, registers ──► Controller ── queues, memory, namespace ──► port.rs ─┐ registers
//!     │                                     ▲ faults, interrupts                             ▼
//!     └─ doorbells ─────────────────────────┼─────────────────────────────────────────► Engine (software, or Verilated)
//!                                           └──────────── host.rs ◄── reads, writes, ────────┤
//!                                                       guests' memory  interrupts           ▼ chip reads and writes
//!                                                                ▲────── data ─────── disk.rs: a Controller ──► volume
//! ```
//!
//! The controller is the card's control processor for its function: it keeps configuration space, registers, the admin queue and
//! namespaces, and programs the engine through its register map. All devices of a shard that ask for the same card share it; each is a
//! function. Whichever of them has its turn lets the engine and the disks go on.
//!
//! Host addresses: guest address `a` of function `f` is `(f + 1) << 40 | a`. The engine's tables hold 2 MiB pages; a page is present
//! when any of it is mapped, and what of it is not is found out here, at every access: nothing unmapped is ever touched. Guest addresses
//! beyond the table (1 GiB as built) cannot be reached: commands that name them end with Data Transfer Error.
//!
//! The clock parks when nothing is pending, and never runs ahead of [`CLOCK`] cycles in a second.

mod controller;
mod disk;
mod functions;
mod host;
mod port;
mod show;
mod space;
#[cfg(test)]
mod tests;

use std::{
    cell::RefCell,
    fmt,
    rc::{Rc, Weak},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_engine::ShardContext;
use millrace_engine_model::{Engine, Shape, map};

pub use self::functions::{ParseFunctionsError, StorageFunctions};
use self::{disk::Disk, host::HostSide};
pub(crate) use self::{
    port::Port,
    space::{QUEUE as SPACE_QUEUE, RING as SPACE_RING, SpaceError},
};
use super::namespace::Namespace;

/// Cycles in a second that the engine is meant for.
pub const CLOCK: u64 = 125_000_000;
/// Cycles that the engine and its disks go on for in one turn at most: other devices wait meanwhile.
const TURN: u64 = 8192;
/// Cycles between two looks at the disks.
const LOOK: u64 = 64;

/// Spaces of FastPath that a card's engine has: those of the simulated ones.
const SPACES: u8 = 2;

/// How far the clock may be behind: what was missed beyond it is lost.
const LAG: Duration = Duration::from_millis(1);

/// Makes an engine, or says why it cannot be had.
pub type MakeEngine = fn(Shape) -> Result<Box<dyn Engine>, String>;

/// What a card is built of.
#[derive(Clone, Copy)]
pub struct CardSpec {
    /// What its engine is called on the command line.
    pub engine: &'static str,
    /// Makes the engine.
    pub make: MakeEngine,
    /// Cores, 1 to 16.
    pub cores: u8,
    /// Disks, 1 to 16.
    pub ssds: u8,
    /// Cycles from the fetch of a command by a disk to its completion, at least.
    pub latency: u64,
}

impl PartialEq for CardSpec {
    fn eq(&self, other: &Self) -> bool {
        let of = |spec: &Self| (spec.engine, spec.cores, spec.ssds, spec.latency);
        of(self) == of(other)
    }
}

impl fmt::Debug for CardSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engine, cores, ssds, latency, make: _ } = self;
        write!(f, "{engine}:cores={cores},ssds={ssds},latency={latency}")
    }
}

/// See the module.
pub(crate) struct Card {
    spec: CardSpec,
    engine: Box<dyn Engine>,
    host: HostSide,
    disks: Vec<Disk>,
    /// Functions that are taken.
    functions: Vec<bool>,
    /// Spaces of FastPath that are taken.
    spaces: Vec<bool>,
    /// Faults that were read and belong to some function, with their cores.
    faults: Vec<(u8, map::Fault)>,
    /// Until when the clock may have run.
    clock: Instant,
}

thread_local! {
    /// The cards of this shard.
    static CARDS: RefCell<Vec<Weak<RefCell<Card>>>> = const { RefCell::new(Vec::new()) };
}

impl Card {
    /// This shard's card of that kind.
    pub(crate) fn of_shard(spec: &CardSpec) -> Result<Rc<RefCell<Self>>, String> {
        CARDS.with_borrow_mut(|cards| {
            cards.retain(|card| card.strong_count() > 0);
            let known = cards.iter().filter_map(Weak::upgrade).find(|card| card.borrow().spec == *spec);
            if let Some(card) = known {
                return Ok(card);
            }
            let card = Rc::new(RefCell::new(Self::new(*spec)?));
            cards.push(Rc::downgrade(&card));
            Ok(card)
        })
    }

    fn new(spec: CardSpec) -> Result<Self, String> {
        let engine = (spec.make)(Shape::new(spec.cores, spec.ssds).with_spaces(SPACES))?;
        let shape = engine.shape();
        let disks = (0..shape.ssds).map(|number| Disk::new(number, &shape, spec.latency)).collect::<Result<_, _>>();
        let disks = disks.map_err(|error| format!("the disks' memory cannot be made: {error}"))?;
        let (functions, spaces) = (vec![false; shape.functions.into()], vec![false; shape.spaces.into()]);
        let host = HostSide::new(shape.functions);
        let mut card = Self { spec, engine, host, disks, functions, spaces, faults: Vec::new(), clock: Instant::now() };
        for core in 0..shape.cores {
            (0..shape.ssds).for_each(|ssd| card.write(map::core(core, map::disk(ssd)), 1));
        }
        Ok(card)
    }

    fn write(&mut self, address: u32, value: u64) {
        self.engine.write(address, value, &mut self.host);
    }

    fn read(&mut self, address: u32) -> u64 {
        self.engine.read(address, &mut self.host)
    }

    /// The disk that a namespace lies on: the one that has it, or one that is free.
    fn disk_for(&mut self, namespace: &Arc<Namespace>, function: u8) -> Option<u8> {
        let has = |disk: &Disk| disk.namespace().is_some_and(|known| Arc::ptr_eq(known, namespace));
        let at =
            self.disks.iter().position(has).or_else(|| self.disks.iter().position(|disk| disk.namespace().is_none()))?;
        self.disks[at].give(namespace, function);
        Some(at as u8)
    }

    /// Whether a turn finds something to do.
    fn has_work(&self) -> bool {
        self.engine.is_busy() || self.host.has_bells() || self.disks.iter().any(Disk::has_work)
    }

    /// Lets engine and disks go on. Returns the work done.
    fn turn(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if !self.has_work() {
            self.clock = cx.now();
            // A disk may have something to do that does not come from the engine: commands for which it had no task, above all.
            return self.disks.iter_mut().map(|disk| disk.turn(cx, &mut *self.engine, &mut self.host)).sum();
        }
        // Time that was not used is left for the next turn.
        self.clock = self.clock.max(cx.now().checked_sub(LAG).unwrap_or_else(|| cx.now()));
        let passed = cx.now().saturating_duration_since(self.clock);
        let begin = self.engine.now();
        let end = begin + (passed.as_nanos() as u64 * CLOCK / 1_000_000_000).clamp(LOOK, TURN);
        let work = self.go_on(end, cx);
        self.clock += Duration::from_nanos((self.engine.now() - begin) * 1_000_000_000 / CLOCK);
        work
    }

    /// Lets engine and disks go on until then, or until a guest is to be interrupted. Returns the work done.
    fn go_on(&mut self, end: u64, cx: &mut ShardContext<'_>) -> usize {
        let (mut work, interrupts) = (0, self.host.interrupts());
        loop {
            self.engine.run(LOOK, &mut self.host);
            while let Some(bell) = self.host.next_bell() {
                self.disks[usize::from(bell.disk)].ring(&bell, &mut *self.engine, &mut self.host);
                work += 1;
            }
            let mut next = None;
            for disk in &mut self.disks {
                work += disk.turn(cx, &mut *self.engine, &mut self.host);
                next = [next, disk.next_due()].into_iter().flatten().min();
            }
            let now = self.engine.now();
            if now >= end || self.host.interrupts() != interrupts {
                return work.max(1);
            }
            if !self.engine.is_busy() && !self.host.has_bells() {
                match next {
                    Some(due) => self.engine.pass(due.clamp(now + 1, end) - now, &mut self.host),
                    // What is left is in volumes' hands.
                    None => return work,
                }
            }
        }
    }
}
