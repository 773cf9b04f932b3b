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

use millrace_block::{Asker, ShardSlot};
use millrace_memory::{BufferPool, taker};
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};

use crate::{
    config::{Polling, ShardConfig, nap_after},
    core::Core,
    device::{Account, Device, DeviceKey, ShardContext},
    devices::{Devices, Entry},
    error::EngineError,
    foresight::{Foresight, Rest},
    mailbox::{Message, ShardHandle},
    naps::Naps,
    poller::{Events, Poller, Source},
    remote::Remotes,
    ring::Ring,
    slots::Slots,
    stages::{self, Stage},
    stats::{Clock, Counters, ShardStats},
};

/// How often a busy shard looks at its mailbox and descriptors: one system call each time.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// How often the statistics are published.
const PUBLISH_EVERY: Duration = Duration::from_millis(1);
/// Messages handled before the devices get their turn again.
const MESSAGES_PER_LOOK: usize = 64;
/// How long a stopping shard waits for I/O in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 5 });
/// How long a shard sleeps at most while the kernel refuses operations.
const RETRY_AFTER: Duration = Duration::from_millis(1);
/// How long a thread without a loop looks again at once: about what a disk takes.
const SPIN_FOR_OWN: Duration = Duration::from_micros(100);
/// Key of the shard's own tasks.
const OWN_KEY: DeviceKey = DeviceKey { index: u16::MAX, generation: u16::MAX };

/// One shard. It belongs to the thread that made it.
pub struct Shard {
    core: Rc<Core>,
    /// Account of tasks that belong to no device.
    own: Rc<Account>,
    devices: Devices,
    mail: Receiver<Message>,
    stats: Arc<ShardStats>,
    events: Events,
    polling: Polling,
    stop: bool,
    naps: Naps,
    foresight: Foresight,
    clock: Clock,
    last_work: Instant,
    last_look: Instant,
    /// Mailbox and descriptors are to be looked at in the next pass.
    due: bool,
    last_publish: Instant,
    /// The thread's place in what every shard has its own of.
    _slot: ShardSlot,
    /// When cold devices were last looked at, and when devices last went cold.
    last_cold: Instant,
    last_cool: Instant,
}

impl Shard {
    /// Makes a shard of the calling thread, which is bound to the shard's core.
    pub fn new(config: &ShardConfig) -> Result<Self, EngineError> {
        let shard = config.index;
        let setup = |what| move |source: io::Error| EngineError::Setup { shard, what, source };
        if let Some(core) = config.core {
            pin(core).map_err(|source| EngineError::Pin { shard, core, source })?;
        }
        let ring = Ring::new(config.ring_entries, config.tasks, config.turns, config.witness.as_deref())
            .map_err(|source| EngineError::Ring { shard, source })?;
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
            tasks_spare: Cell::new(0),
            task_share: Cell::new(0),
            ring_failing: Cell::new(false),
        };
        Ok(Self {
            core: Rc::new(core),
            own: Account::new(OWN_KEY, Asker::NOBODY),
            devices: Devices::default(),
            mail,
            stats,
            events: Events::new(),
            polling: config.polling,
            stop: false,
            naps: Naps::default(),
            foresight: Foresight::default(),
            clock: Clock::default(),
            last_work: now,
            last_look: now,
            due: true,
            last_publish: now,
            _slot: if config.turns { ShardSlot::claim() } else { ShardSlot::claim_in_passing() },
            last_cold: now,
            last_cool: now,
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
        let account = self.devices.reserve();
        let mut cx = ShardContext::new(&self.core, &account);
        let device = match make(&mut cx) {
            Ok(device) => device,
            Err(error) => {
                cx.unregister_all();
                return Err(error);
            }
        };
        let key = account.key;
        self.devices.insert(device, account);
        self.share_slots();
        // New work may be there before anything rings for it.
        self.last_work = Instant::now();
        Ok(key)
    }

    /// Takes a device off the shard. Its tasks that still wait go on by themselves.
    pub fn remove_device(&mut self, key: DeviceKey) -> Option<Box<dyn Device>> {
        let Entry { device, account, .. } = self.devices.remove(key)?;
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
        let entry = self.devices.wake(&core, key)?;
        if !(&*entry.device as &dyn Any).is::<D>() {
            return None;
        }
        entry.call(&core, |device, cx| (device as &mut dyn Any).downcast_mut::<D>().map(|device| call(device, cx)))?
    }

    /// Whether a device was fenced after a panic; `None` when there is no such device.
    pub fn is_fenced(&mut self, key: DeviceKey) -> Option<bool> {
        self.devices.get(key).map(|entry| entry.fenced)
    }

    /// Keys of the devices on the shard.
    pub fn devices(&self) -> impl Iterator<Item = DeviceKey> + '_ {
        self.devices.iter().map(|entry| entry.account.key)
    }

    #[cfg(test)]
    pub(crate) fn core_for_tests(&self) -> &Core {
        &self.core
    }

    /// Changes what the shard does when there is no work.
    #[cfg(test)]
    pub(crate) fn set_polling_for_tests(&mut self, polling: Polling) {
        self.polling = polling;
    }

    /// A pass that finds work when it has rested for so long, as its loop makes it; how long pauses are that it has learnt.
    #[cfg(test)]
    pub(crate) fn work_after_for_tests(&mut self, pause: Duration) -> Option<Duration> {
        self.look_at_clock();
        self.last_work = self.core.now.get().checked_sub(pause).expect("the machine runs for longer");
        self.foresight.rest(pause, Duration::ZERO, false);
        assert!(self.pass(false) > 0, "there is work");
        self.worked();
        self.foresight.common_for_tests()
    }

    /// What its loop does when it has found nothing for a while.
    #[cfg(test)]
    pub(crate) fn rest_for_tests(&mut self) {
        self.sleep(Duration::ZERO, None);
    }

    /// Slots and bounce buffers have [shares](taker::shares) for devices.
    fn share_slots(&mut self) {
        let devices = self.devices().count();
        let (spare, share) = taker::shares(self.core.slots.len(), devices);
        self.core.tasks_spare.set(spare);
        self.core.task_share.set(share);
        self.core.buffers.share_among(devices);
    }

    /// One pass over everything, mailbox and descriptors included. Never sleeps; returns the work done. For tests, and for
    /// threads that have a loop of their own.
    pub fn turn(&mut self) -> usize {
        self.pass(true)
    }

    /// One pass over everything; after a while with nothing to do, a sleep until there is. For threads without a loop, where something
    /// is under way that they wait for.
    pub fn turn_or_sleep(&mut self) {
        if self.turn() > 0 {
            self.last_work = self.core.now.get();
        } else if self.idle() < SPIN_FOR_OWN {
            std::hint::spin_loop();
        } else {
            self.sleep(SPIN_FOR_OWN, None);
        }
    }

    /// One pass as [`Self::run`] makes them: mailbox and descriptors are looked at only when it is time. For benchmarks.
    pub fn poll(&mut self) -> usize {
        self.pass(false)
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        crate::watch::join();
        // The default slack of 50 µs would more than double a nap.
        if let Err(error) = set_current_timer_slack(std::num::NonZeroU64::new(1)) {
            tracing::warn!(%error, "timer slack cannot be set: naps will be longer than configured");
        }
        while !self.stop {
            if self.pass(false) > 0 {
                self.worked();
            } else if self.clock.passes == 0 {
                // The time was looked at in this pass.
                self.rest();
            }
        }
    }

    /// There was something to do, up to now.
    fn worked(&mut self) {
        self.foresight.work(self.idle());
        self.last_work = self.core.now.get();
        self.naps.interrupt();
    }

    fn idle(&self) -> Duration {
        self.core.now.get().duration_since(self.last_work)
    }

    /// There was nothing to do: looks again at once, or sleeps.
    fn rest(&mut self) {
        if let Polling::Adaptive { spin, nap, idle_nap, budget, foresight } = self.polling {
            let idle = self.idle();
            let rest = match foresight {
                true => self.foresight.rest(idle, spin, self.core.slots.waiting() > 0),
                false if idle < spin => Rest::Look,
                false => Rest::AtWill,
            };
            match rest {
                Rest::Look => {}
                Rest::Until(sleep) => {
                    // Devices that nothing but a look serves are looked at as often as without foresight.
                    let longest = self.naps.longest(nap, idle_nap, budget);
                    self.sleep(sleep.min(longest), Some(sleep));
                    // What follows is no nap.
                    return self.naps.interrupt();
                }
                Rest::AtWill => {
                    let longest = self.naps.longest(nap, idle_nap, budget);
                    return self.sleep(nap_after(idle, nap, longest), None);
                }
            }
        }
        std::hint::spin_loop();
    }

    fn pass(&mut self, look: bool) -> usize {
        let turns = &self.core.counters.turns;
        turns.set(turns.get() + 1);
        let on_time = look || self.due || self.clock.is_due(|| self.core.awaits_time());
        if on_time {
            let unseen = self.clock.worked > 0;
            self.look_at_clock();
            if unseen {
                // What passes that were not looked at have taken is no part of a pause.
                self.last_work = self.core.now.get();
            }
        }
        self.clock.passes += 1;
        stages::enter(Stage::Other);
        let core = &*self.core;
        // Doorbells.
        let mut work = self.devices.poll_warm(core);
        if on_time {
            let now = core.now.get();
            work += self.devices.poll_cold(core, now.duration_since(self.last_cold));
            self.last_cold = now;
        }
        // The ring: what was started since the last turn goes out in one system call.
        if !core.ring.is_idle() {
            submit(core);
            work += core.ring.reap();
            work += core.ring.fire_timers(core.now.get());
        } else if on_time {
            // The kernel may still hold the file of a request that has ended: where a thread of its own was the last to have the request,
            // letting go is deferred work as well.
            submit(core);
        }
        work += core.slots.run_ready();
        work += self.fence_faulty();
        if on_time {
            self.clock.passes = 0;
            let now = self.core.now.get();
            if look || self.due {
                (self.last_look, self.due) = (now, false);
                work += self.listen();
            }
            // Who turns the shard by hand has every device looked at each time.
            if !look && now.duration_since(self.last_cool) >= PUBLISH_EVERY {
                self.last_cool = now;
                self.devices.cool(&self.core, now);
            }
        }
        // Where a pause ends, it is to be known when.
        if work > 0 && (self.clock.work(work, || self.core.awaits_time()) || look || self.foresight.is_resting()) {
            self.look_at_clock();
        }
        work
    }

    /// Takes the time, and books the time since the last look.
    fn look_at_clock(&mut self) {
        let now = Instant::now();
        let past = now.duration_since(self.core.now.replace(now)).as_nanos() as u64;
        let (busy, idle) = self.clock.book(past);
        let counters = &self.core.counters;
        counters.busy_ns.set(counters.busy_ns.get() + busy);
        counters.idle_ns.set(counters.idle_ns.get() + idle);
        self.due = now.duration_since(self.last_look) >= LOOK_EVERY;
        if now.duration_since(self.last_publish) >= PUBLISH_EVERY {
            self.last_publish = now;
            self.publish();
        }
    }

    fn publish(&self) {
        let slots = &self.core.slots;
        let (held_up, tasks) = (self.core.ring.held_up(), (slots.started(), slots.waiting()));
        self.stats.publish(&self.core.counters, held_up, tasks, self.devices().count());
    }

    /// Fences the devices of tasks that panicked.
    fn fence_faulty(&mut self) -> usize {
        let mut count = 0;
        while let Some(account) = self.core.slots.take_fault() {
            count += 1;
            let core = Rc::clone(&self.core);
            if let Some(entry) = self.devices.get(account.key) {
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
                    if let Some(entry) = self.devices.wake(&core, key).filter(|entry| !entry.fenced) {
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

    /// Sleeps until something happens; `nap` at most while a device can only be served by looking, and `foreseen` in any case.
    fn sleep(&mut self, nap: Duration, foreseen: Option<Duration>) {
        let core = Rc::clone(&self.core);
        self.events.clear();
        let (now, began, mut slept) = (Instant::now(), self.idle(), false);
        if let Some(deadline) = self.devices.arm(&core, now, nap) {
            let foreseen = foreseen.map(|sleep| now + sleep);
            // Whatever an arming device started must be with the kernel before we sleep. No task can become ready after the
            // check: only this thread wakes tasks. Messages, descriptors and the ring's bell are level-triggered.
            submit(&core);
            let retry = core.ring.is_refused().then(|| now + RETRY_AFTER);
            let deadline = [deadline, foreseen, retry].into_iter().flatten().min();
            if core.slots.ready() == 0 && core.ring.arm() {
                self.doze(deadline);
                slept = true;
            }
            core.ring.disarm();
        }
        self.devices.disarm(&core);
        let events = self.dispatch();
        self.look_at_clock();
        // Only who has slept has heard what there was: a device that is busy keeps the shard from it, and may do nothing all the same.
        if slept {
            (self.last_look, self.due) = (core.now.get(), false);
            self.foresight.slept(began, self.idle(), events > 0);
        }
        if events > 0 {
            self.worked();
        }
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
        if let Some(deadline) = deadline {
            self.naps.count();
            if self.events.len() == 0 {
                self.foresight.overslept(deadline.elapsed());
            }
        }
    }

    /// Lets tasks in flight finish, without their devices; returns how many could not.
    fn drain(&mut self) -> usize {
        let core = Rc::clone(&self.core);
        for entry in self.devices.iter() {
            ShardContext::new(&core, &entry.account).unregister_all();
        }
        // Messages are not handled any more: they must not keep the loop below from sleeping. If that fails, it only spins.
        let _ = core.poller.remove(core.handle.bell());
        let limit = Instant::now() + DRAIN_LIMIT;
        while core.slots.waiting() > 0 {
            submit(&core);
            let now = Instant::now();
            let work = core.ring.reap() + core.ring.fire_timers(now) + core.slots.run_ready();
            // Also where there is always something to do: a long piece of work, or a task that looks for somebody who is gone.
            if now >= limit {
                break;
            }
            if work > 0 {
                continue;
            }
            // What waits for neither the kernel nor a timer waits for somebody who will not come any more.
            let timer = core.ring.next_timer();
            if core.ring.in_flight() == 0 && timer.is_none() {
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
