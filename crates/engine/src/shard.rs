//! A shard: one thread's devices, tasks, ring and mailbox, and the loop over them.
#![forbid(unsafe_code)]

use std::{
    any::Any,
    cell::Cell,
    convert::Infallible,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};

use millrace_block::ShardSlot;
use millrace_memory::BufferPool;
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};

use crate::{
    config::{Polling, ShardConfig, nap_after},
    core::Core,
    device::{Account, Device, DeviceKey, Readiness, ShardContext},
    error::EngineError,
    mailbox::{Message, ShardHandle},
    poller::{Events, Poller, Source},
    remote::Remotes,
    ring::Ring,
    slots::Slots,
    stats::{Counters, ShardStats},
};

/// How often a busy shard looks at its mailbox and descriptors: one system call each time.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// How often the statistics are published.
const PUBLISH_EVERY: Duration = Duration::from_millis(1);
/// Messages handled before the devices get their turn again.
const MESSAGES_PER_LOOK: usize = 64;
/// How long a stopping shard waits for I/O in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// Key of the shard's own tasks.
const OWN_KEY: DeviceKey = DeviceKey { index: u16::MAX, generation: u16::MAX };

struct Entry {
    device: Box<dyn Device>,
    account: Rc<Account>,
    fenced: bool,
    armed: bool,
}

impl Entry {
    /// Calls the device; a panic fences it.
    #[inline]
    fn call<R>(&mut self, core: &Core, call: impl FnOnce(&mut dyn Device, &mut ShardContext<'_>) -> R) -> Option<R> {
        let mut cx = ShardContext::new(core, &self.account);
        let device = &mut *self.device;
        // Unwind safety: after a panic the device is fenced, so nobody relies on its broken state.
        let result = catch_unwind(AssertUnwindSafe(|| call(device, &mut cx)));
        if result.is_err() {
            self.fence(core);
        }
        result.ok()
    }

    fn fence(&mut self, core: &Core) {
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
}

#[derive(Default)]
struct Place {
    generation: u16,
    entry: Option<Entry>,
}

/// One shard. It belongs to the thread that made it.
pub struct Shard {
    core: Rc<Core>,
    /// Account of tasks that belong to no device.
    own: Rc<Account>,
    devices: Vec<Place>,
    /// The device that is polled first: it moves on every turn, so that scarce slots are shared.
    first: usize,
    mail: Receiver<Message>,
    stats: Arc<ShardStats>,
    events: Events,
    polling: Polling,
    stop: bool,
    /// Whether the last turn found work.
    worked: bool,
    last_work: Instant,
    last_look: Instant,
    last_publish: Instant,
    /// The thread's place in what every shard has its own of.
    _slot: ShardSlot,
}

impl Shard {
    /// Makes a shard of the calling thread, which is bound to the shard's core.
    pub fn new(config: &ShardConfig) -> Result<Self, EngineError> {
        let shard = config.index;
        let setup = |what| move |source: io::Error| EngineError::Setup { shard, what, source };
        if let Some(core) = config.core {
            pin(core).map_err(|source| EngineError::Pin { shard, core, source })?;
        }
        let ring = Ring::new(config.ring_entries, config.tasks).map_err(|source| EngineError::Ring { shard, source })?;
        let stats = Arc::new(ShardStats::default());
        let (handle, mail) = ShardHandle::new(shard, Arc::clone(&stats)).map_err(setup("no eventfd for the mailbox"))?;
        let poller = Poller::new().map_err(setup("no epoll set"))?;
        poller.add_mailbox(handle.bell()).map_err(setup("the mailbox cannot be polled"))?;
        poller.add_ring(ring.bell()).map_err(setup("the ring cannot be polled"))?;
        let now = Instant::now();
        let core = Core {
            slots: Slots::new(config.tasks, config.scratch_bytes),
            ring,
            buffers: BufferPool::new(config.buffers).map_err(setup("no memory for buffers"))?,
            poller,
            remotes: Remotes::default(),
            handle,
            counters: Counters::default(),
            now: Cell::new(now),
            task_cap: Cell::new(config.tasks),
            ring_failing: Cell::new(false),
        };
        Ok(Self {
            core: Rc::new(core),
            own: Account::new(OWN_KEY),
            devices: Vec::new(),
            first: 0,
            mail,
            stats,
            events: Events::new(),
            polling: config.polling,
            stop: false,
            worked: false,
            last_work: now,
            last_look: now,
            last_publish: now,
            _slot: ShardSlot::claim(),
        })
    }

    /// The shard's address, for other threads.
    pub fn handle(&self) -> &ShardHandle {
        &self.core.handle
    }

    /// A context for tasks that belong to no device.
    pub fn context(&mut self) -> ShardContext<'_> {
        ShardContext::new(&self.core, &self.own)
    }

    /// Changes what the shard does when there is no work.
    pub fn set_polling(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// Puts a device on the shard.
    ///
    /// # Panics
    /// When the shard has 65535 devices already.
    pub fn add_device(&mut self, device: Box<dyn Device>) -> DeviceKey {
        let added: Result<_, Infallible> = self.add_device_with(|_| Ok(device));
        match added {
            Ok(key) => key,
        }
    }

    /// Makes a device and puts it on the shard; `make` may register descriptors.
    ///
    /// # Panics
    /// When the shard has 65535 devices already.
    pub fn add_device_with<E>(
        &mut self,
        make: impl FnOnce(&mut ShardContext<'_>) -> Result<Box<dyn Device>, E>,
    ) -> Result<DeviceKey, E> {
        let index = self.devices.iter().position(|place| place.entry.is_none()).unwrap_or_else(|| {
            self.devices.push(Place::default());
            self.devices.len() - 1
        });
        assert!(index < usize::from(u16::MAX), "too many devices on one shard");
        let place = &mut self.devices[index];
        place.generation = place.generation.wrapping_add(1);
        let account = Account::new(DeviceKey { index: index as u16, generation: place.generation });
        let mut cx = ShardContext::new(&self.core, &account);
        let device = match make(&mut cx) {
            Ok(device) => device,
            Err(error) => {
                cx.unregister_all();
                return Err(error);
            }
        };
        let key = account.key;
        place.entry = Some(Entry { device, account, fenced: false, armed: false });
        self.share_slots();
        // New work may be there before anything rings for it.
        self.last_work = Instant::now();
        Ok(key)
    }

    /// Takes a device off the shard. Its tasks that still wait go on by themselves.
    pub fn remove_device(&mut self, key: DeviceKey) -> Option<Box<dyn Device>> {
        self.entry(key)?;
        let Entry { device, account, .. } = self.devices[usize::from(key.index)].entry.take()?;
        ShardContext::new(&self.core, &account).unregister_all();
        self.share_slots();
        Some(device)
    }

    /// Calls a device by its own type. `None` when there is no such device, it has another type, or the call panicked (which
    /// fences it).
    pub fn with_device<D: Device, R>(
        &mut self,
        key: DeviceKey,
        call: impl FnOnce(&mut D, &mut ShardContext<'_>) -> R,
    ) -> Option<R> {
        let core = Rc::clone(&self.core);
        let entry = self.entry(key)?;
        if !(&*entry.device as &dyn Any).is::<D>() {
            return None;
        }
        entry.call(&core, |device, cx| (device as &mut dyn Any).downcast_mut::<D>().map(|device| call(device, cx)))?
    }

    /// Whether a device was fenced after a panic; `None` when there is no such device.
    pub fn is_fenced(&mut self, key: DeviceKey) -> Option<bool> {
        self.entry(key).map(|entry| entry.fenced)
    }

    /// Keys of the devices on the shard.
    pub fn devices(&self) -> impl Iterator<Item = DeviceKey> + '_ {
        self.devices.iter().filter_map(|place| place.entry.as_ref()).map(|entry| entry.account.key)
    }

    #[cfg(test)]
    pub(crate) fn core_for_tests(&self) -> &Core {
        &self.core
    }

    fn entry(&mut self, key: DeviceKey) -> Option<&mut Entry> {
        let entry = self.devices.get_mut(usize::from(key.index))?.entry.as_mut()?;
        (entry.account.key == key).then_some(entry)
    }

    /// One device may use all slots; several leave each other a quarter.
    fn share_slots(&mut self) {
        let slots = self.core.slots.len();
        let cap = if self.devices().count() > 1 { (slots * 3 / 4).max(1) } else { slots };
        self.core.task_cap.set(cap);
    }

    /// One pass over everything, mailbox and descriptors included. Never sleeps; returns the work done. For tests, and for
    /// threads that have a loop of their own.
    pub fn turn(&mut self) -> usize {
        self.pass(true)
    }

    /// One pass as [`Self::run`] makes them: mailbox and descriptors are looked at only when it is time. For benchmarks.
    pub fn poll(&mut self) -> usize {
        self.pass(false)
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        // The default slack of 50 µs would more than double a nap.
        if let Err(error) = set_current_timer_slack(std::num::NonZeroU64::new(1)) {
            tracing::warn!(%error, "timer slack cannot be set: naps will be longer than configured");
        }
        while !self.stop {
            let work = self.pass(false);
            let now = self.core.now.get();
            if work > 0 {
                self.last_work = now;
                continue;
            }
            match self.polling {
                Polling::Adaptive { spin, nap, idle_nap } => {
                    let idle = now.duration_since(self.last_work);
                    if idle < spin {
                        std::hint::spin_loop();
                    } else {
                        self.sleep(nap_after(idle, nap, idle_nap));
                    }
                }
                Polling::Spin => std::hint::spin_loop(),
            }
        }
    }

    fn pass(&mut self, look: bool) -> usize {
        let now = self.begin();
        let core = &*self.core;
        let mut work = 0;
        // Doorbells.
        let first = if self.first + 1 < self.devices.len() { self.first + 1 } else { 0 };
        self.first = first;
        let (before, after) = self.devices.split_at_mut(first);
        for entry in after.iter_mut().chain(before).filter_map(|place| place.entry.as_mut()) {
            if !entry.fenced {
                work += entry.call(core, Device::poll).unwrap_or(1);
            }
        }
        // The ring: what was started since the last turn goes out in one system call.
        submit(core);
        work += core.ring.reap();
        work += core.ring.fire_timers(now);
        work += core.slots.run_ready();
        work += self.fence_faulty();
        if look || now.duration_since(self.last_look) >= LOOK_EVERY {
            self.last_look = now;
            work += self.listen();
        }
        self.worked = work > 0;
        work
    }

    /// Starts a turn: takes the time, and books the time since the last turn.
    fn begin(&mut self) -> Instant {
        let now = Instant::now();
        let counters = &self.core.counters;
        let past = now.duration_since(self.core.now.replace(now)).as_nanos() as u64;
        let book = if self.worked { &counters.busy_ns } else { &counters.idle_ns };
        book.set(book.get() + past);
        counters.turns.set(counters.turns.get() + 1);
        if now.duration_since(self.last_publish) >= PUBLISH_EVERY {
            self.last_publish = now;
            self.publish();
        }
        now
    }

    fn publish(&self) {
        let slots = &self.core.slots;
        self.stats.publish(&self.core.counters, slots.started(), slots.waiting(), self.devices().count());
    }

    /// Fences the devices of tasks that panicked.
    fn fence_faulty(&mut self) -> usize {
        let mut count = 0;
        while let Some(account) = self.core.slots.take_fault() {
            count += 1;
            let core = Rc::clone(&self.core);
            if let Some(entry) = self.entry(account.key) {
                entry.fence(&core);
            } else {
                tracing::error!("a task without a device panicked; the panic was contained");
            }
        }
        count
    }

    /// Looks at mailbox and descriptors without waiting.
    fn listen(&mut self) -> usize {
        self.wait(Some(Duration::ZERO));
        self.dispatch()
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if let Err(error) = self.core.poller.wait(&mut self.events, timeout) {
            // Only a broken process gets here (a closed epoll descriptor): devices are still polled.
            tracing::error!(%error, "epoll failed");
        }
    }

    /// Handles the events of the last wait; returns their number.
    fn dispatch(&mut self) -> usize {
        let core = Rc::clone(&self.core);
        let mut work = 0;
        for at in 0..self.events.len() {
            match self.events.get(at) {
                Some(Source::Mailbox) => {
                    core.handle.silence();
                    work += self.take_messages();
                }
                Some(Source::Device(key, token)) => {
                    if let Some(entry) = self.entry(key).filter(|entry| !entry.fenced) {
                        entry.call(&core, |device, cx| device.event(cx, token));
                        work += 1;
                    }
                }
                Some(Source::Ring) => {
                    core.ring.silence();
                    work += 1;
                }
                None => {}
            }
        }
        work
    }

    fn take_messages(&mut self) -> usize {
        for count in 0..MESSAGES_PER_LOOK {
            match self.mail.try_recv() {
                Ok(message) => self.handle_message(message),
                Err(_) => return count,
            }
        }
        // There may be more, and the bell is silent: ring it for the next look.
        self.core.handle.ring();
        MESSAGES_PER_LOOK
    }

    fn handle_message(&mut self, message: Message) {
        match message {
            // Unwind safety: devices are guarded one by one (`with_device`); what the shard itself changes, it changes last.
            Message::Call(call) => {
                if catch_unwind(AssertUnwindSafe(|| call(self))).is_err() {
                    tracing::error!(shard = self.core.handle.index(), "a call to the shard panicked");
                }
            }
            Message::Answer(id) => self.core.remotes.wake(id),
            Message::Stop => self.stop = true,
        }
    }

    /// Sleeps until something happens; `nap` at most while a device can only be served by looking.
    fn sleep(&mut self, nap: Duration) {
        let core = Rc::clone(&self.core);
        if let Some(deadline) = self.arm(&core, nap) {
            // Whatever an arming device started must be with the kernel before we sleep. No task can become ready after the
            // check: only this thread wakes tasks. Messages, descriptors and the ring's bell are level-triggered.
            submit(&core);
            if core.slots.ready() == 0 && core.ring.arm() {
                self.doze(deadline);
            }
            core.ring.disarm();
        }
        for entry in self.devices.iter_mut().filter_map(|place| place.entry.as_mut()) {
            if std::mem::take(&mut entry.armed) && !entry.fenced {
                entry.call(&core, |device, _| device.disarm());
            }
        }
        let events = self.dispatch();
        self.last_look = Instant::now();
        if events > 0 {
            self.last_work = self.last_look;
        }
    }

    /// Arms every device. `None` when one is busy; else the instant to wake at.
    #[allow(clippy::option_option)]
    fn arm(&mut self, core: &Core, nap: Duration) -> Option<Option<Instant>> {
        self.events.clear();
        let now = Instant::now();
        let mut deadline = core.ring.next_timer();
        let mut sooner = |at: Instant| deadline = Some(deadline.map_or(at, |known| known.min(at)));
        for entry in self.devices.iter_mut().filter_map(|place| place.entry.as_mut()) {
            if entry.fenced {
                continue;
            }
            entry.armed = true;
            match entry.call(core, Device::arm) {
                Some(Readiness::Nap) => sooner(now + nap),
                Some(Readiness::Until(at)) => sooner(at),
                Some(Readiness::Block) => {}
                Some(Readiness::Busy) | None => return None,
            }
        }
        Some(deadline)
    }

    fn doze(&mut self, deadline: Option<Instant>) {
        let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if timeout.is_none_or(|timeout| timeout >= PUBLISH_EVERY) {
            // Nobody will publish for a while.
            self.publish();
        }
        let sleeps = &self.core.counters.sleeps;
        sleeps.set(sleeps.get() + 1);
        self.wait(timeout);
    }

    /// Lets tasks in flight finish, without their devices; returns how many could not.
    fn drain(&mut self) -> usize {
        let core = Rc::clone(&self.core);
        for place in &self.devices {
            if let Some(entry) = &place.entry {
                ShardContext::new(&core, &entry.account).unregister_all();
            }
        }
        // Messages are not handled any more: they must not keep the loop below from sleeping. If that fails, it only spins.
        let _ = core.poller.remove(core.handle.bell());
        let limit = Instant::now() + DRAIN_LIMIT;
        while core.slots.waiting() > 0 {
            submit(&core);
            let now = Instant::now();
            let work = core.ring.reap() + core.ring.fire_timers(now) + core.slots.run_ready();
            if work > 0 {
                continue;
            }
            // What waits for neither the kernel nor a timer waits for somebody who will not come any more.
            let timer = core.ring.next_timer();
            if now >= limit || (core.ring.in_flight() == 0 && timer.is_none()) {
                break;
            }
            let until = timer.map_or(limit, |at| at.min(limit));
            if core.ring.arm() {
                self.wait(Some(until.saturating_duration_since(now).min(Duration::from_millis(10))));
                core.ring.silence();
            }
            core.ring.disarm();
        }
        core.slots.waiting()
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        let stuck = self.drain();
        if stuck > 0 {
            tracing::warn!(shard = self.core.handle.index(), stuck, "requests were still waiting when the shard stopped");
            // The kernel may go on writing to their memory: it must stay as it is.
            std::mem::forget(Rc::clone(&self.core));
        }
    }
}

fn submit(core: &Core) {
    match core.ring.submit() {
        Ok(()) => core.ring_failing.set(false),
        // The operations stay queued: there is no errno for which giving them up would be right, for the kernel may have some.
        Err(error) if !core.ring_failing.replace(true) => {
            tracing::error!(shard = core.handle.index(), %error, "the ring does not take operations: they are tried again");
        }
        Err(_) => {}
    }
}

fn pin(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}
