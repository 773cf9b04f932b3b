//! A shard's devices, and which of them it looks at when.
//!
//! ```text
//!            work, an event, a call                    nothing for a while: armed
//!   warm ◄──────────────────────────── cold, parked ◄──────────────────────────── warm
//!   on every pass                      cold: one every few microseconds, in turn; parked: never, it will be woken
//! ```
//!
//! So that a thousand idle devices cost a shard about a hundredth of its core, whether it is busy or not. An idle device stays
//! armed; one that is warm is armed for each sleep.
#![forbid(unsafe_code)]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    time::{Duration, Instant},
};

use millrace_block::Asker;

use crate::{
    core::Core,
    device::{Account, Device, DeviceKey, Readiness, ShardContext},
};

/// How long a device without work stays warm.
const WARM_FOR: Duration = Duration::from_millis(50);
/// The time that passes for each look at a cold device.
const LOOK_SPACING: Duration = Duration::from_micros(2);
/// One look of so many at a cold device is a whole turn.
const WHOLE_TURN: u8 = 16;

/// How a device is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heat {
    Warm,
    Cold,
    Parked,
}

/// One device.
pub(crate) struct Entry {
    pub(crate) device: Box<dyn Device>,
    pub(crate) account: Rc<Account>,
    pub(crate) fenced: bool,
    armed: bool,
    heat: Heat,
    /// It had work since `last_work` was set.
    worked: bool,
    last_work: Instant,
    /// Looks at it since its last whole turn, while it is cold.
    looks: u8,
}

impl Entry {
    /// Calls the device; a panic fences it.
    #[inline]
    pub(crate) fn call<R>(
        &mut self,
        core: &Core,
        call: impl FnOnce(&mut dyn Device, &mut ShardContext<'_>) -> R,
    ) -> Option<R> {
        let mut cx = ShardContext::new(core, &self.account);
        let device = &mut *self.device;
        let before = self.account.asker.enter();
        // Unwind safety: after a panic the device is fenced, so nobody relies on its broken state.
        let result = catch_unwind(AssertUnwindSafe(|| call(device, &mut cx)));
        before.enter();
        if result.is_err() {
            self.fence(core);
        }
        result.ok()
    }

    #[cold]
    pub(crate) fn fence(&mut self, core: &Core) {
        if std::mem::replace(&mut self.fenced, true) {
            return;
        }
        let mut cx = ShardContext::new(core, &self.account);
        let device = &mut self.device;
        let name = catch_unwind(AssertUnwindSafe(|| device.name().to_owned())).unwrap_or_default();
        tracing::error!(device = name, "a fault of ours in this device or one of its requests was contained: it is fenced");
        if catch_unwind(AssertUnwindSafe(|| device.fence(&mut cx))).is_err() {
            tracing::error!(device = name, "the device could not even be fenced in an orderly way");
        }
        cx.unregister_all();
    }

    fn poll(&mut self, core: &Core) -> usize {
        if self.fenced {
            return 0;
        }
        let work = self.call(core, Device::poll).unwrap_or(1);
        self.worked |= work > 0;
        work
    }

    /// Polls a cold device, if a look at it says that this may be worth it.
    fn look(&mut self, core: &Core) -> usize {
        self.looks = if self.looks + 1 < WHOLE_TURN { self.looks + 1 } else { 0 };
        let may_have_work =
            self.looks == 0 || self.fenced || self.call(core, |device, _| device.may_have_work()) != Some(false);
        if may_have_work { self.poll(core) } else { 0 }
    }

    fn arm(&mut self, core: &Core) -> Option<Readiness> {
        self.armed = true;
        self.call(core, Device::arm)
    }

    fn disarm(&mut self, core: &Core) {
        if std::mem::take(&mut self.armed) && !self.fenced {
            self.call(core, |device, _| device.disarm());
        }
    }
}

#[derive(Default)]
struct Place {
    generation: u16,
    entry: Option<Entry>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Devices {
    places: Vec<Place>,
    /// Places of the warm devices.
    warm: Vec<u16>,
    /// The one that is looked at first: it moves on with every pass, so that scarce slots are shared.
    first: usize,
    cold: Vec<u16>,
    next_cold: usize,
    /// Time that has passed for looks at cold devices.
    credit: Duration,
}

impl Devices {
    /// Finds a place for a new device.
    ///
    /// # Panics
    /// When there are 65535 devices already.
    pub(crate) fn reserve(&mut self) -> Rc<Account> {
        let index = self.places.iter().position(|place| place.entry.is_none()).unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        assert!(index < usize::from(u16::MAX), "too many devices on one shard");
        let place = &mut self.places[index];
        place.generation = place.generation.wrapping_add(1);
        Account::new(DeviceKey { index: index as u16, generation: place.generation }, Asker::new())
    }

    /// Puts a device in its reserved place.
    pub(crate) fn insert(&mut self, device: Box<dyn Device>, account: Rc<Account>) {
        let index = account.key.index;
        let (heat, last_work) = (Heat::Warm, Instant::now());
        let entry = Entry { device, account, fenced: false, armed: false, heat, worked: false, last_work, looks: 0 };
        self.places[usize::from(index)].entry = Some(entry);
        self.warm.push(index);
    }

    /// Takes a device away.
    pub(crate) fn remove(&mut self, key: DeviceKey) -> Option<Entry> {
        self.get(key)?;
        self.warm.retain(|index| *index != key.index);
        self.cold.retain(|index| *index != key.index);
        self.places[usize::from(key.index)].entry.take()
    }

    /// A device by its key.
    pub(crate) fn get(&mut self, key: DeviceKey) -> Option<&mut Entry> {
        let entry = self.places.get_mut(usize::from(key.index))?.entry.as_mut()?;
        (entry.account.key == key).then_some(entry)
    }

    /// A device by its key, which something has happened to: it is looked at on every pass from now on.
    pub(crate) fn wake(&mut self, core: &Core, key: DeviceKey) -> Option<&mut Entry> {
        if self.get(key)?.heat != Heat::Warm {
            self.cold.retain(|index| *index != key.index);
            self.warm.push(key.index);
        }
        let entry = self.get(key)?;
        entry.heat = Heat::Warm;
        entry.worked = true;
        entry.disarm(core);
        Some(entry)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.places.iter().filter_map(|place| place.entry.as_ref())
    }

    /// Looks at every warm device. Returns the work done.
    #[inline]
    pub(crate) fn poll_warm(&mut self, core: &Core) -> usize {
        let count = self.warm.len();
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        let mut work = 0;
        let mut at = self.first;
        for _ in 0..count {
            let place = self.warm.get(at).and_then(|index| self.places.get_mut(usize::from(*index)));
            if let Some(entry) = place.and_then(|place| place.entry.as_mut()) {
                work += entry.poll(core);
            }
            at = if at + 1 < count { at + 1 } else { 0 };
        }
        work
    }

    /// Looks at as many cold devices as are due after some more time. Returns the work done.
    pub(crate) fn poll_cold(&mut self, core: &Core, passed: Duration) -> usize {
        let mut work = 0;
        self.credit += passed;
        for _ in 0..self.cold.len() {
            if self.credit < LOOK_SPACING {
                return work;
            }
            self.credit -= LOOK_SPACING;
            self.next_cold = if self.next_cold + 1 < self.cold.len() { self.next_cold + 1 } else { 0 };
            let Some(index) = self.cold.get(self.next_cold).copied() else { continue };
            let Some(entry) = self.places.get_mut(usize::from(index)).and_then(|place| place.entry.as_mut()) else {
                continue;
            };
            let found = entry.look(core);
            if found > 0 {
                let key = entry.account.key;
                self.wake(core, key);
            }
            work += found;
        }
        // All were looked at.
        self.credit = Duration::ZERO;
        work
    }

    /// Lets devices go cold that have had nothing to do for a while. To be called about once a millisecond.
    pub(crate) fn cool(&mut self, core: &Core, now: Instant) {
        let Self { places, warm, cold, .. } = self;
        warm.retain(|index| {
            let Some(entry) = places.get_mut(usize::from(*index)).and_then(|place| place.entry.as_mut()) else {
                return false;
            };
            if std::mem::take(&mut entry.worked) {
                entry.last_work = now;
            }
            let busy = now.duration_since(entry.last_work) < WARM_FOR || entry.account.waiting.get() > 0;
            if busy || entry.fenced {
                return true;
            }
            match entry.arm(core) {
                Some(Readiness::Nap) => {
                    entry.heat = Heat::Cold;
                    cold.push(*index);
                }
                Some(Readiness::Block) => entry.heat = Heat::Parked,
                Some(Readiness::Until(_) | Readiness::Busy) | None => {
                    entry.disarm(core);
                    return true;
                }
            }
            false
        });
    }

    /// Arms every warm device before a sleep. `None` when one is busy; else the instant to wake at, `nap` from now at the latest
    /// while some device can only be served by looking.
    #[allow(clippy::option_option)]
    pub(crate) fn arm(&mut self, core: &Core, now: Instant, nap: Duration) -> Option<Option<Instant>> {
        let mut deadline = core.ring.next_timer();
        let mut sooner = |at: Instant| deadline = Some(deadline.map_or(at, |known| known.min(at)));
        if !self.cold.is_empty() {
            sooner(now + nap);
        }
        for index in &self.warm {
            let place = self.places.get_mut(usize::from(*index));
            let Some(entry) = place.and_then(|place| place.entry.as_mut()).filter(|entry| !entry.fenced) else { continue };
            match entry.arm(core) {
                Some(Readiness::Nap) => sooner(now + nap),
                Some(Readiness::Until(at)) => sooner(at),
                Some(Readiness::Block) => {}
                Some(Readiness::Busy) | None => return None,
            }
        }
        Some(deadline)
    }

    /// The sleep is over.
    pub(crate) fn disarm(&mut self, core: &Core) {
        for index in &self.warm {
            if let Some(entry) = self.places.get_mut(usize::from(*index)).and_then(|place| place.entry.as_mut()) {
                entry.disarm(core);
            }
        }
    }
}
