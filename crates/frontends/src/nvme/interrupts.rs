//! Interrupts to the guest: vectors, masks, coalescing, the legacy pin.
//!
//! ```text
//!   post ──pend──► pending bits, counts ──flush, once a turn──► due? ──► eventfd ──► KVM, or the client
//!                        ▲                                       │
//!                        └──── masked, not wired, or not due ◄───┘
//! ```
//!
//! No wake-up is lost. Our side: the completion entry is stored, then (release, `Segment::publish`) its phase, then the pending
//! bit is set, and every turn ends with a look at all pending bits; a bit that cannot be delivered stays, and what makes it
//! deliverable (an unmask, a new eventfd, the time of coalescing) leads to another turn. The guest's side: it is interrupted,
//! then reads entries until the phase does not match. An entry that its last read missed was published after that read, so its
//! interrupt comes after too.
//!
//! Masks: a client tells us by `set_irqs`, and by the MSI-X function mask in configuration space. The vectors' own mask bits in
//! the MSI-X table are the client's to emulate (VFIO's convention); ours only read back.

use std::{
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant},
};

use millrace_vfio_user::{Errno, IrqAction, IrqData, IrqFlags, IrqInfo, IrqSet, Received, pci as irq};

use millrace_block::trace::Site;
use millrace_keeper::Kind;

use crate::eventfd::{Eventfd, HasBlocked};

use super::{
    controller::{Controller, Counters},
    keep::{Client, Wiring},
    state::{FeatureState, VECTORS},
};

const WORDS: usize = VECTORS / 64;

/// A bit per vector.
type Bits = [u64; WORDS];

fn set(bits: &mut Bits, vector: usize, on: bool) {
    if let Some(word) = bits.get_mut(vector / 64) {
        let bit = 1 << (vector % 64);
        *word = if on { *word | bit } else { *word & !bit };
    }
}

fn get(bits: &Bits, vector: usize) -> bool {
    bits.get(vector / 64).is_some_and(|word| word & 1 << (vector % 64) != 0)
}

/// One MSI-X vector.
#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<Eventfd>,
    /// Completions posted since the vector was last raised.
    count: u32,
    /// When the first of them was seen waiting for more.
    since: Option<Instant>,
}

/// The legacy pin, as VFIO has it: a level that masks itself when it is signalled, until the client unmasks it.
#[derive(Debug, Default)]
struct Pin {
    eventfd: Option<Eventfd>,
    masked: bool,
    /// A client's eventfd that unmasks it.
    unmask: Option<Eventfd>,
    /// Whether `unmask` is another than when it was last asked for.
    unmask_changed: bool,
}

/// The controller's interrupt wiring.
pub(crate) struct Interrupts {
    device: Box<str>,
    has_blocked: HasBlocked,
    vectors: Vec<Vector>,
    /// Vectors with completions that were not signalled.
    pending: Bits,
    /// Whether there may be any: one look instead of eight.
    any_pending: bool,
    /// Vectors with an eventfd that are not masked by `set_irqs`.
    open: Bits,
    /// Masked by `set_irqs`.
    masked: Bits,
    /// The MSI-X function mask.
    function_masked: bool,
    pin: Pin,
    deadline: Option<Instant>,
    /// Whether interrupts are recorded.
    pub(crate) trace: Site,
    /// Where the wiring is remembered, if it is to outlive this process.
    client: Option<Rc<Client>>,
}

/// When a vector's completions are signalled (FID 08h).
struct Coalescing<'a> {
    features: &'a FeatureState,
    threshold: u32,
    time: Duration,
}

impl<'a> Coalescing<'a> {
    /// `None` when it is off: no time, or a threshold of one completion (Base 5.1.25.1.5).
    fn of(features: &'a FeatureState) -> Option<Self> {
        let value = features.interrupt_coalescing.get();
        let (threshold_z, time) = (value & 0xff, value >> 8 & 0xff);
        let time = Duration::from_micros(u64::from(time) * 100);
        (threshold_z != 0 && !time.is_zero()).then_some(Self { features, threshold: threshold_z + 1, time })
    }

    /// The admin queue's vector is never coalesced, the others unless the guest said otherwise (FID 09h).
    fn applies(&self, vector: usize) -> bool {
        let disabled = self.features.coalescing_disabled.get(vector / 64);
        vector != 0 && disabled.is_none_or(|word| word.get() & 1 << (vector % 64) == 0)
    }
}

impl Interrupts {
    pub(crate) fn new(vectors: u16, device: &str) -> Self {
        Self {
            device: device.into(),
            has_blocked: HasBlocked::default(),
            vectors: (0..vectors).map(|_| Vector::default()).collect(),
            pending: [0; WORDS],
            any_pending: false,
            open: [0; WORDS],
            masked: [0; WORDS],
            function_masked: false,
            pin: Pin::default(),
            deadline: None,
            trace: Site::default(),
            client: None,
        }
    }

    /// From now on, wiring and masks are remembered for the client.
    pub(crate) fn remember(&mut self, client: Rc<Client>) {
        // Where this worker knows better than the one before.
        client.set_pin_masked(self.pin.masked);
        self.client = Some(client);
    }

    /// Goes on with the wiring of the worker before this one. What it had pended is not known, so that every vector is raised once:
    /// a guest takes no harm from an interrupt without completions.
    pub(crate) fn take_over(&mut self, wiring: Wiring) {
        self.masked = wiring.masked;
        for (index, eventfd) in wiring.vectors {
            if let Some(vector) = self.vectors.get_mut(index) {
                vector.eventfd = Some(Eventfd::known(eventfd, &self.device, &self.has_blocked));
                self.refresh_open(index);
                set(&mut self.pending, index, true);
                self.any_pending = true;
            }
        }
        let known = |fd: Option<OwnedFd>| fd.map(|fd| Eventfd::known(fd, &self.device, &self.has_blocked));
        let (eventfd, unmask) = (known(wiring.pin), known(wiring.unmask));
        let unmask_changed = unmask.is_some();
        // That worker may have read the eventfd empty, and ended before it said so. A level that is asserted may be signalled once more.
        let masked = wiring.pin_masked && unmask.is_none();
        self.pin = Pin { eventfd, masked, unmask, unmask_changed };
    }

    fn set_pin_masked(&mut self, masked: bool) {
        if let Some(client) = self.client.as_ref().filter(|_| self.pin.masked != masked) {
            client.set_pin_masked(masked);
        }
        self.pin.masked = masked;
    }

    fn wire_pin(&mut self, eventfd: Option<Eventfd>) {
        if let Some(client) = &self.client {
            client.set_pin(Kind::PIN, eventfd.as_ref());
        }
        self.pin.eventfd = eventfd;
    }

    fn wire_unmask(&mut self, eventfd: Option<Eventfd>) {
        if let Some(client) = &self.client {
            client.set_pin(Kind::PIN_UNMASK, eventfd.as_ref());
        }
        (self.pin.unmask, self.pin.unmask_changed) = (eventfd, true);
    }

    /// Completions were posted to a queue of this vector; the interrupt is raised at the turn's end.
    #[inline]
    pub(crate) fn pend(&mut self, vector: u16, count: u32) {
        if let Some(entry) = self.vectors.get_mut(usize::from(vector)) {
            entry.count = entry.count.saturating_add(count);
            self.any_pending = true;
            self.pending[usize::from(vector / 64)] |= 1 << (vector % 64);
        }
    }

    /// The first 32 vectors' masks, the function's among them.
    pub(crate) fn masked_vectors(&self) -> u32 {
        if self.function_masked { u32::MAX } else { self.masked[0] as u32 }
    }

    /// When a coalesced interrupt is due, if one waits.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The pending bit array as the guest reads it: 64 vectors from `word * 64` on.
    pub(crate) fn pending_word(&self, word: usize) -> u64 {
        self.pending.get(word).copied().unwrap_or(0)
    }

    /// A controller reset: nothing is pending. Wiring and masks are the client's, and stay.
    pub(crate) fn reset(&mut self) {
        self.pending = [0; WORDS];
        self.deadline = None;
        for vector in &mut self.vectors {
            (vector.count, vector.since) = (0, None);
        }
    }

    /// The client is gone, and its eventfds with it. Whoever traces the device goes on with the next one.
    pub(crate) fn disconnect(&mut self) {
        let (trace, has_blocked) = (self.trace, self.has_blocked.clone());
        *self = Self { has_blocked, trace, ..Self::new(self.vectors.len() as u16, &self.device) };
    }

    /// The MSI-X function mask changed.
    pub(crate) fn set_function_mask(&mut self, masked: bool) {
        self.function_masked = masked;
    }

    /// Raises what is pending and due: one decision per turn, not per completion.
    fn flush(&mut self, now: Instant, features: &FeatureState, counters: &mut Counters, coalesces: bool) {
        if !self.any_pending {
            return;
        }
        self.any_pending = self.pending != [0; WORDS];
        self.deadline = None;
        if self.function_masked || self.pending.iter().zip(&self.open).all(|(pending, open)| pending & open == 0) {
            return;
        }
        // A card has done it already.
        let coalescing = Coalescing::of(features).filter(|_| coalesces);
        for word in 0..WORDS {
            let mut ready = self.pending[word] & self.open[word];
            while ready != 0 {
                let vector = word * 64 + ready.trailing_zeros() as usize;
                ready &= ready - 1;
                self.signal(vector, now, coalescing.as_ref(), counters);
            }
        }
    }

    fn signal(&mut self, index: usize, now: Instant, coalescing: Option<&Coalescing<'_>>, counters: &mut Counters) {
        let Some(vector) = self.vectors.get_mut(index) else { return };
        if let Some(coalescing) = coalescing.filter(|coalescing| coalescing.applies(index)) {
            let due = *vector.since.get_or_insert(now) + coalescing.time;
            if vector.count < coalescing.threshold && now < due {
                self.deadline = Some(self.deadline.map_or(due, |known| known.min(due)));
                return;
            }
        }
        (vector.count, vector.since) = (0, None);
        if let Some(eventfd) = &vector.eventfd {
            self.trace.interrupted(index as u16);
            eventfd.ring();
            counters.interrupts += 1;
        }
        set(&mut self.pending, index, false);
    }

    /// What an interrupt type can do.
    pub(crate) fn info(&self, index: u32) -> IrqInfo {
        match index {
            irq::IRQ_INTX => {
                let flags = IrqFlags::EVENTFD | IrqFlags::MASKABLE | IrqFlags::AUTOMASKED;
                IrqInfo { flags, count: 1 }
            }
            irq::IRQ_MSIX => IrqInfo { flags: IrqFlags::EVENTFD, count: self.vectors.len() as u32 },
            // QEMU sets these up whatever we say; nothing ever signals them.
            irq::IRQ_ERR | irq::IRQ_REQ => IrqInfo { flags: IrqFlags::EVENTFD, count: 1 },
            _ => IrqInfo { flags: IrqFlags::NONE, count: 0 },
        }
    }

    /// Changes wiring or masks as the client says.
    pub(crate) fn set_irqs(&mut self, change: IrqSet<'_>) -> Result<(), Errno> {
        match change.index {
            irq::IRQ_INTX => self.set_pin(change),
            irq::IRQ_MSIX => self.set_vectors(change),
            irq::IRQ_ERR | irq::IRQ_REQ => match change.data {
                // They end here, which must not wait.
                IrqData::Eventfds(eventfds) => self.checked(eventfds).map(drop),
                _ => Ok(()),
            },
            _ => Err(Errno::INVAL),
        }
    }

    fn set_vectors(&mut self, change: IrqSet<'_>) -> Result<(), Errno> {
        let start = change.start as usize;
        let range = start..start + change.count as usize;
        match (change.action, change.data) {
            (IrqAction::Trigger, IrqData::None) if change.count == 0 => {
                // What is pending stays so: a client rewires all vectors by taking them away first.
                (0..self.vectors.len()).for_each(|vector| self.wire(vector, None));
            }
            (IrqAction::Trigger, IrqData::Eventfds(eventfds)) => {
                let eventfds = self.checked(eventfds)?;
                range.zip(eventfds).for_each(|(vector, eventfd)| self.wire(vector, Some(eventfd)));
            }
            (IrqAction::Trigger, IrqData::Deassign) => range.for_each(|vector| self.wire(vector, None)),
            (IrqAction::Trigger, data) => {
                let chosen = range.enumerate().filter(|(at, _)| is_chosen(&data, *at));
                let eventfds = chosen.filter_map(|(_, vector)| self.vectors.get(vector)?.eventfd.as_ref());
                eventfds.for_each(Eventfd::ring);
            }
            (_, IrqData::Eventfds(_) | IrqData::Deassign) => return Err(Errno::INVAL),
            (action, data) => {
                for (_, vector) in range.enumerate().filter(|(at, _)| is_chosen(&data, *at)) {
                    set(&mut self.masked, vector, action == IrqAction::Mask);
                    self.refresh_open(vector);
                }
                if let Some(client) = &self.client {
                    client.set_masked(&self.masked);
                }
            }
        }
        Ok(())
    }

    fn checked(&self, fds: Vec<Received>) -> Result<Vec<Eventfd>, Errno> {
        fds.into_iter().map(|fd| Eventfd::new(fd.into_inner(), &self.device, &self.has_blocked)).collect()
    }

    fn wire(&mut self, index: usize, eventfd: Option<Eventfd>) {
        if let Some(vector) = self.vectors.get_mut(index) {
            if let Some(client) = self.client.as_ref().filter(|_| vector.eventfd.is_some() || eventfd.is_some()) {
                client.set_vector(index, eventfd.as_ref());
            }
            vector.eventfd = eventfd;
            self.refresh_open(index);
        }
    }

    fn refresh_open(&mut self, vector: usize) {
        let wired = self.vectors.get(vector).is_some_and(|vector| vector.eventfd.is_some());
        let open = wired && !get(&self.masked, vector);
        set(&mut self.open, vector, open);
    }

    fn set_pin(&mut self, change: IrqSet<'_>) -> Result<(), Errno> {
        match (change.action, change.data) {
            (IrqAction::Trigger, IrqData::None) if change.count == 0 => {
                self.wire_pin(None);
                self.wire_unmask(None);
                self.set_pin_masked(false);
            }
            (IrqAction::Trigger, IrqData::Eventfds(eventfds)) => {
                let eventfds = self.checked(eventfds)?;
                self.wire_pin(eventfds.into_iter().next());
                self.set_pin_masked(false);
            }
            (IrqAction::Trigger, IrqData::Deassign) => self.wire_pin(None),
            (IrqAction::Trigger, data) if is_chosen(&data, 0) => self.pin.eventfd.iter().for_each(Eventfd::ring),
            (IrqAction::Unmask, IrqData::Eventfds(eventfds)) => {
                let eventfds = self.checked(eventfds)?;
                self.wire_unmask(eventfds.into_iter().next());
            }
            (IrqAction::Unmask, IrqData::Deassign) => self.wire_unmask(None),
            (IrqAction::Mask, IrqData::Eventfds(_) | IrqData::Deassign) => return Err(Errno::INVAL),
            (action, data) if is_chosen(&data, 0) => self.set_pin_masked(action == IrqAction::Mask),
            _ => {}
        }
        Ok(())
    }

    /// Whether [`Self::pin_unmask`] is another than at the last call.
    pub(crate) fn take_pin_change(&mut self) -> bool {
        std::mem::take(&mut self.pin.unmask_changed)
    }

    /// The client's eventfd that unmasks the pin: to be watched, and answered by [`Self::unmask_pin`].
    pub(crate) fn pin_unmask(&self) -> Option<&Eventfd> {
        self.pin.unmask.as_ref()
    }

    /// The client's eventfd for unmasking the pin was written.
    pub(crate) fn unmask_pin(&mut self) {
        // Another turn looks at the level again; a count that was read empty already changes nothing.
        if self.pin.unmask.as_ref().is_some_and(Eventfd::silence) {
            self.set_pin_masked(false);
        }
    }

    /// Whether interrupts go by the pin: it is wired, and no vector is.
    pub(crate) fn uses_pin(&self) -> bool {
        self.pin.eventfd.is_some() && self.open == [0; WORDS]
    }

    fn set_pin_level(&mut self, asserted: bool, counters: &mut Counters) {
        if let Some(eventfd) = self.pin.eventfd.as_ref().filter(|_| asserted && !self.pin.masked) {
            self.trace.interrupted(u16::MAX);
            eventfd.ring();
            self.set_pin_masked(true);
            counters.interrupts += 1;
        }
    }
}

impl Controller {
    /// Raises the interrupts that are due: the end of each turn.
    pub(crate) fn raise_interrupts(&mut self, now: Instant) {
        if self.interrupts.uses_pin() {
            let asserted = self.pin_is_asserted();
            self.set_pin_status(asserted);
            if asserted && self.pin_is_enabled() {
                self.interrupts.set_pin_level(true, &mut self.counters);
            }
        }
        self.interrupts.flush(now, &self.state.features, &mut self.counters, self.port.is_none());
    }

    /// The pin's level: whether a completion queue that interrupts, with an unmasked vector, holds entries that the guest has
    /// not consumed (Base 3.1.4.3, PCIe 3.5).
    fn pin_is_asserted(&mut self) -> bool {
        (0..=self.config.queues).any(|cqid| {
            if !self.cq_exists(cqid) || self.cq(cqid).interrupts.get() == 0 {
                return false;
            }
            let mask = self.state.registers.interrupt_mask.get();
            let masked = mask.checked_shr(u32::from(self.cq(cqid).vector.get())).is_some_and(|mask| mask & 1 != 0);
            !masked && self.consumed(cqid) != self.cq(cqid).tail()
        })
    }
}

fn is_chosen(data: &IrqData<'_>, at: usize) -> bool {
    match data {
        IrqData::None => true,
        IrqData::Bool(flags) => flags.get(at).is_some_and(|flag| *flag != 0),
        IrqData::Eventfds(_) | IrqData::Deassign => false,
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
