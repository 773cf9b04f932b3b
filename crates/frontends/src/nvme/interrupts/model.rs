//! A model of the race between posting a batch and a guest that goes to sleep: every interleaving, both sides.
//!
//! ```text
//!   we:     post entries (phase last) ─► pend ─► one look: pending and open? ─► clear pending, write the eventfd
//!   guest:  handler: clear the line ─► consume entries until the phase does not match ─► wait for the line
//!   client: masks and unmasks the vector at any moment; an unmask leads to another look
//! ```
//!
//! Lost is a wake-up when everybody has finished, the vector is open, entries are left and the line is silent. The model has the
//! order of steps that `Batch::settle`, `Interrupts::flush` and the turn have; the tests beside it show that they do. Two changed
//! orders have to be found wanting, or the search finds nothing.

use std::collections::HashSet;

/// Batches that we post, and how often the client masks and unmasks.
const BATCHES: u8 = 3;
const MASKINGS: u8 = 2;

/// What the model can have wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The interrupt is decided before the entries are visible.
    DecideFirst,
    /// A vector that is masked loses its pending bit.
    ForgetMasked,
    /// The guest clears the line after it has looked at the entries.
    ClearLast,
}

/// A step that comes next.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Ours {
    Post,
    Pend,
    Look,
    Ring,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Guests {
    Asleep,
    Clear,
    Consume,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct World {
    ours: Ours,
    batches: u8,
    guest: Guests,
    /// Entries posted and not consumed: none, or some.
    entries: bool,
    pending: bool,
    line: bool,
    masked: bool,
    maskings: u8,
}

impl World {
    fn start(fault: Fault) -> Self {
        let ours = if fault == Fault::DecideFirst { Ours::Pend } else { Ours::Post };
        let (guest, maskings) = (Guests::Asleep, MASKINGS);
        Self { ours, batches: BATCHES, guest, entries: false, pending: false, line: false, masked: false, maskings }
    }

    /// Our next step. A shard goes on looking at what is pending: `Look` comes again after the last batch.
    fn we(mut self, fault: Fault) -> Self {
        match self.ours {
            Ours::Post => {
                self.entries = true;
                self.ours = if fault == Fault::DecideFirst { self.next_batch(fault) } else { Ours::Pend };
            }
            Ours::Pend => (self.pending, self.ours) = (true, Ours::Look),
            Ours::Look if self.pending && !self.masked => (self.pending, self.ours) = (false, Ours::Ring),
            Ours::Look => {
                self.pending &= fault != Fault::ForgetMasked;
                self.ours = self.after_look(fault);
            }
            Ours::Ring => (self.line, self.ours) = (true, self.after_look(fault)),
        }
        self
    }

    fn after_look(&mut self, fault: Fault) -> Ours {
        if fault == Fault::DecideFirst && self.batches > 0 { Ours::Post } else { self.next_batch(fault) }
    }

    fn next_batch(&mut self, fault: Fault) -> Ours {
        self.batches = self.batches.saturating_sub(1);
        match (self.batches, fault) {
            (0, _) => Ours::Look,
            (_, Fault::DecideFirst) => Ours::Pend,
            _ => Ours::Post,
        }
    }

    /// The guest's next step: a line that was written is delivered even if it is cleared and written again meanwhile.
    fn guest(mut self, fault: Fault) -> Self {
        let clear_last = fault == Fault::ClearLast;
        match self.guest {
            Guests::Asleep if self.line => self.guest = if clear_last { Guests::Consume } else { Guests::Clear },
            Guests::Asleep => {}
            Guests::Clear => {
                self.line = false;
                self.guest = if clear_last { Guests::Asleep } else { Guests::Consume };
            }
            Guests::Consume => {
                self.entries = false;
                self.guest = if clear_last { Guests::Clear } else { Guests::Asleep };
            }
        }
        self
    }

    fn client(mut self) -> Self {
        if self.masked {
            self.masked = false;
        } else if self.maskings > 0 {
            (self.masked, self.maskings) = (true, self.maskings - 1);
        }
        self
    }
}

/// Looks at every state that can be reached. `Some`: one from which nobody gets on, with entries left.
fn lost(fault: Fault) -> Option<World> {
    let (mut seen, mut open) = (HashSet::new(), vec![World::start(fault)]);
    while let Some(world) = open.pop() {
        if !seen.insert(world) {
            continue;
        }
        let next = [world.we(fault), world.guest(fault), world.client()];
        // A masked vector is quiet by right; the client's own step is no progress of an interrupt.
        if next[..2].iter().all(|next| *next == world) && !world.masked && world.entries {
            return Some(world);
        }
        open.extend(next);
    }
    assert!(seen.len() > 100, "only {} states: the model does not move", seen.len());
    None
}

#[test]
fn no_interleaving_loses_an_interrupt() {
    assert_eq!(lost(Fault::None), None);
}

#[test]
fn the_search_finds_lost_interrupts() {
    for fault in [Fault::DecideFirst, Fault::ForgetMasked, Fault::ClearLast] {
        assert!(lost(fault).is_some());
    }
}
