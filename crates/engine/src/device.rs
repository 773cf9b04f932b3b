//! What lives on a shard, and what it may ask of it.
#![forbid(unsafe_code)]

use std::{
    any::Any,
    cell::{Cell, RefCell},
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
    rc::Rc,
    time::Instant,
};

use millrace_block::Asker;
use millrace_memory::BufferPool;

use crate::{core::Core, mailbox::ShardHandle, slots::TaskSlot};

/// How a device can be woken while its shard sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Work came while it was arming: the shard must not sleep.
    Busy,
    /// Only looking at memory finds its work: the shard may nap.
    Nap,
    /// A registered descriptor or a task will wake it: the shard may sleep as long as it likes.
    Block,
    /// As `Block`, but it wants to be polled at this instant at the latest.
    Until(Instant),
}

/// What lives on a shard: a controller with its socket.
///
/// Every call is made by the shard's own thread. A panic in any of them is caught and fences this device only.
pub trait Device: Any {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// One turn: takes doorbells, posts completions. Returns units of work done; 0 means that there was nothing.
    fn poll(&mut self, cx: &mut ShardContext<'_>) -> usize;

    /// A registered descriptor is readable, or its peer has hung up. Repeated until the descriptor has been read empty or
    /// unregistered.
    fn event(&mut self, cx: &mut ShardContext<'_>, token: u32);

    /// The shard is about to sleep: arms the device's wake-ups and looks once more for work (in this order, or a wake-up is
    /// lost). Says how the device can be woken.
    fn arm(&mut self, cx: &mut ShardContext<'_>) -> Readiness;

    /// Whether a turn would find anything: asked of an armed device that can only be served by looking ([`Readiness::Nap`]), often and of
    /// many in a row, so it must be cheap. A yes may be wrong. A no may be so only for what can wait some hundredths of a second: now
    /// and then such a device is polled whatever it says.
    fn may_have_work(&mut self) -> bool {
        true
    }

    /// The shard no longer sleeps. Called once after each `arm`, whatever that said.
    fn disarm(&mut self);

    /// A panic in this device or one of its tasks was caught, so that its state cannot be trusted: makes its guest see a
    /// fatal status and lets its peer go. It is called once; after it the device is not called any more, its descriptors
    /// are unregistered, and it stays on the shard until it is removed.
    fn fence(&mut self, cx: &mut ShardContext<'_>);
}

/// Names a device on its shard; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceKey {
    pub(crate) index: u16,
    pub(crate) generation: u16,
}

impl fmt::Display for DeviceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// What the shard knows of one device while it or one of its tasks lives.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) key: DeviceKey,
    /// What its requests are counted under.
    pub(crate) asker: Asker,
    /// Its tasks that wait.
    pub(crate) waiting: Cell<usize>,
    /// Descriptors that wake it. Duplicates of our own: whatever the device does with its own, removing these from the epoll
    /// set cannot hit a stranger that was given the same number.
    pub(crate) sources: RefCell<Vec<(u32, OwnedFd)>>,
}

impl Account {
    pub(crate) fn new(key: DeviceKey, asker: Asker) -> Rc<Self> {
        Rc::new(Self { key, asker, waiting: Cell::new(0), sources: RefCell::default() })
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.asker.leave();
    }
}

/// A device's access to its shard during one call.
pub struct ShardContext<'a> {
    core: &'a Core,
    account: &'a Rc<Account>,
}

impl<'a> ShardContext<'a> {
    pub(crate) fn new(core: &'a Core, account: &'a Rc<Account>) -> Self {
        Self { core, account }
    }

    pub(crate) fn core(&self) -> &'a Core {
        self.core
    }

    /// Takes a free task slot. `None` is back-pressure: leave the command in the guest's queue and try on a later turn. Devices
    /// that share a shard leave a quarter of the slots to those among them that have few.
    #[inline]
    pub fn reserve(&self) -> Option<TaskSlot<'a>> {
        TaskSlot::reserve(self.core, self.account)
    }

    /// This device's tasks that have not finished: 0 means that nothing of its touches guest memory any more.
    pub fn waiting_tasks(&self) -> usize {
        self.account.waiting.get()
    }

    /// The time when it was last looked at: some passes ago at most.
    #[inline]
    pub fn now(&self) -> Instant {
        self.core.now.get()
    }

    /// This device's name on the shard.
    pub fn key(&self) -> DeviceKey {
        self.account.key
    }

    /// What this device's requests are counted under.
    pub fn asker(&self) -> Asker {
        self.account.asker
    }

    /// The shard's address, for other threads.
    pub fn handle(&self) -> &'a ShardHandle {
        &self.core.handle
    }

    /// The shard's bounce buffers.
    pub fn buffers(&self) -> &'a BufferPool {
        &self.core.buffers
    }

    /// Counts finished commands, for the shard's statistics.
    #[inline]
    pub fn count_commands(&self, count: u64) {
        let commands = &self.core.counters.commands;
        commands.set(commands.get() + count);
    }

    /// Has `event` called with `token` whenever the descriptor is readable or its peer has hung up. The shard keeps a duplicate
    /// of it: a socket is closed for its peer only after [`Self::unregister`]. A token names one descriptor of the device at a
    /// time.
    pub fn register(&self, fd: BorrowedFd<'_>, token: u32) -> io::Result<()> {
        self.unregister(token)?;
        let fd = fd.try_clone_to_owned()?;
        self.core.poller.add(&fd, self.account.key, token)?;
        self.account.sources.borrow_mut().push((token, fd));
        Ok(())
    }

    /// Ends the registration of a token's descriptor, if there is one.
    pub fn unregister(&self, token: u32) -> io::Result<()> {
        let mut sources = self.account.sources.borrow_mut();
        let Some(at) = sources.iter().position(|(known, _)| *known == token) else { return Ok(()) };
        let (_, fd) = sources.swap_remove(at);
        self.core.poller.remove(&fd)
    }

    pub(crate) fn unregister_all(&self) {
        for (_, fd) in self.account.sources.borrow_mut().drain(..) {
            if let Err(error) = self.core.poller.remove(&fd) {
                tracing::error!(%error, device = %self.account.key, "a descriptor could not be taken out of the epoll set");
            }
        }
    }
}
