//! The controller on a shard and on a socket: `millrace_engine::Device` over `millrace_vfio_user`.
//!
//! ```text
//!   Listening ──accept──► Connected ──closed, garbage, flood──► Draining ──nothing in flight──► Listening
//!                          (reset to power-on, memory out of reach, eventfds dropped)
//! ```
//!
//! One client at a time. Another one that connects meanwhile is let in and closed at once, so that it fails instead of waiting;
//! but while the last client's commands drain it waits in the backlog, so that a guest that was killed can be started again at
//! once.

mod error;
mod function;
mod namespaces;
mod status;

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::trace::Site;
use millrace_engine::{Readiness, ShardContext, closer};
use millrace_vfio_user::{Connection, ConnectionError, Listener, Progress, Resumed};

pub use error::DeviceError;
pub use status::{DeviceCounters, DevicePhase, DeviceStatus, NamespaceStatus};

use self::function::{Function, Waiting};
use super::{
    Config, DoorbellMode, Host,
    controller::Controller,
    keep::{Client as KeptClient, Kept, TakenClient},
    migration::SavedStateError,
    registers::{Lifecycle, Phase, Reset},
};
use crate::{hangup::is_gone, log_limit::LogLimit};

/// Messages of one client handled in one turn, so that a flood of them leaves the shard to others.
const MESSAGES: usize = 32;
/// Clients turned away in one turn.
const REFUSALS: usize = 16;
/// How soon output that a client does not take is tried again, and accepting after an error of the system.
const RETRY: Duration = Duration::from_millis(1);
const RETRY_ACCEPT: Duration = Duration::from_millis(200);

const LISTENER: u32 = 0;
const CLIENT: u32 = 1;
const PIN: u32 = 2;

/// Closes what clients hand in, and their sockets, which may have such things in them: no shard waits for that.
fn close_elsewhere(fd: OwnedFd) {
    drop(closer::Received::from(fd));
}

/// The connected client.
struct Client {
    connection: Connection,
    /// What the client waits for while commands are in flight.
    waiting: Option<Waiting>,
    /// Messages may wait inside the connection.
    more: bool,
    /// Whether the shard watches the socket.
    watched: bool,
}

/// Who is on the other side.
enum Link {
    Listening,
    Connected(Box<Client>),
    /// The client is gone; its commands are not.
    Draining,
    /// Nobody is let in any more.
    Closed,
    /// A fault of ours: what the controller says of itself cannot be trusted.
    Fenced,
}

/// An NVMe controller with its listening socket and, at most, one client.
///
/// It belongs to its shard's thread; the control plane reaches it there.
pub struct NvmeDevice {
    controller: Controller,
    listener: Listener,
    link: Link,
    /// When a client's socket is looked at again that is not to be watched.
    try_again: Option<Instant>,
    /// When accepting is tried again after the system could not.
    accept_again: Option<Instant>,
    /// Whether the guest was asked to ring.
    armed: bool,
    /// A turn has something to do at some time, doorbells apart: of when the device was armed.
    has_alarm: bool,
    /// Clients that have connected, or were taken over.
    clients: u64,
    /// It goes on from another worker's state, and waits until its namespaces are there.
    waits: bool,
    /// It was left to another worker: whatever comes is that one's.
    left: bool,
    log: LogLimit,
}

impl NvmeDevice {
    /// A device that waits for its guest.
    pub fn new(
        config: Config,
        listener: Listener,
        host: Arc<dyn Host>,
        cx: &mut ShardContext<'_>,
    ) -> Result<Self, DeviceError> {
        Self::check(&config)?;
        let device = config.name.clone();
        let mut controller = Controller::new(config.limited(), host)
            .map_err(|source| DeviceError::Memory { device: device.clone(), source })?;
        controller.join_card().map_err(|why| DeviceError::Card { device, why })?;
        Self::over(controller, listener, cx)
    }

    /// A device that outlives its process, and goes on where the worker before this one left it. Its namespaces are to be restored,
    /// then it is to be told to [`resume`](Self::resume).
    pub fn kept(
        config: Config,
        listener: Listener,
        host: Arc<dyn Host>,
        kept: &Kept,
        cx: &mut ShardContext<'_>,
    ) -> Result<Self, DeviceError> {
        Self::check(&config)?;
        let device = config.name.clone();
        kept.put(millrace_keeper::Kind::LISTENER, std::os::fd::AsFd::as_fd(&listener));
        let (controller, taken) =
            Controller::kept(config.limited(), host, kept).map_err(|source| DeviceError::Memory { device, source })?;
        let mut made = Self::over(controller, listener, cx)?;
        match taken {
            Some(taken) => made.take_over(taken),
            // The guest that is still to come has namespaces, too, and must not find them gone.
            None => made.waits = made.controller.awaits_guest(),
        }
        Ok(made)
    }

    fn check(config: &Config) -> Result<(), DeviceError> {
        config.check().map_err(|what| DeviceError::Config { device: config.name.clone(), what })
    }

    fn over(controller: Controller, listener: Listener, cx: &mut ShardContext<'_>) -> Result<Self, DeviceError> {
        cx.register(std::os::fd::AsFd::as_fd(&listener), LISTENER)
            .map_err(|source| DeviceError::Socket { device: controller.config.name.clone(), source })?;
        Ok(Self {
            clients: 0,
            controller,
            listener,
            link: Link::Listening,
            try_again: None,
            accept_again: None,
            armed: false,
            has_alarm: false,
            waits: false,
            left: false,
            log: LogLimit::default(),
        })
    }

    fn take_over(&mut self, (client, socket, resumed): TakenClient) {
        self.clients += 1;
        let stream = std::os::unix::net::UnixStream::from(socket);
        match Connection::kept(stream, client, resumed) {
            Ok(connection) => {
                let connection = connection.closing_with(close_elsewhere);
                let client = Client { connection, waiting: None, more: true, watched: false };
                (self.link, self.waits) = (Link::Connected(Box::new(client)), true);
            }
            Err(error) => self.connection_failed(&error),
        }
    }

    /// Every namespace of every device that can be restored is: finishes the pairs that the worker before this one had begun to
    /// write. The answer is `false` until they are, and no device may be [resumed](Self::resume) before.
    pub fn finish_pairs(&mut self, cx: &mut ShardContext<'_>) -> bool {
        if self.waits {
            self.controller.redo_pairs(cx);
        }
        cx.waiting_tasks() == 0
    }

    /// Every namespace that can be restored is: serves the guest of the worker before this one.
    pub fn resume(&mut self, cx: &mut ShardContext<'_>) {
        if std::mem::take(&mut self.waits) {
            if matches!(self.link, Link::Connected(_)) {
                tracing::info!(device = self.name(), phase = ?self.controller.phase, "goes on with its guest");
            }
            self.controller.tell_changes();
            self.serve(cx);
        }
    }

    /// While it waits to be told to [go on](Self::resume) with the guest of the worker before this one: which of these namespaces that guest
    /// had, or the one that a restored state waits for. `None`: it does not wait, or that guest is gone.
    pub fn misses(&self, nsids: &[u32]) -> Option<Vec<u32>> {
        let has_guest = match &self.link {
            Link::Connected(client) => !is_gone(&client.connection),
            Link::Listening => self.controller.awaits_guest(),
            Link::Draining | Link::Closed | Link::Fenced => false,
        };
        let misses = || nsids.iter().copied().filter(|nsid| self.controller.was_attached(*nsid)).collect();
        (self.waits && has_guest).then(misses)
    }

    /// A namespace that could not be restored is not going to be; a guest that had it is told by an event.
    pub fn give_up(&mut self, nsid: u32) {
        if self.controller.was_attached(nsid) && self.controller.namespaces.allocation(nsid).is_none() {
            self.controller.note_attached(nsid, false);
            self.controller.namespace_changed(nsid);
        }
    }

    /// Takes no more commands: another worker is about to go on. Those in flight finish.
    pub fn hold(&mut self) {
        self.controller.lifecycle.held = true;
    }

    /// Whether every command that was taken is completed, but for those that wait for something to happen.
    pub fn is_held(&self) -> bool {
        self.controller.lifecycle.held && self.controller.is_quiet() && !self.controller.sink.has_results()
    }

    /// Leaves everything as it is to another worker, whose state regions have this version. What is still in flight it will carry out
    /// again.
    pub fn leave(&mut self, state_version: u16) {
        self.controller.convert_state(Some(state_version));
        self.left = true;
    }

    /// The worker before this one does not take over again: the state may have the newest layout.
    pub fn settle(&mut self) {
        if self.controller.kept.is_some() {
            self.controller.convert_state(None);
        }
    }

    /// The device's settings.
    pub fn config(&self) -> &Config {
        &self.controller.config
    }

    fn name(&self) -> &str {
        &self.controller.config.name
    }

    /// Records its guest's requests from now on, or no more.
    pub fn trace(&mut self, site: Site) {
        (self.controller.trace, self.controller.interrupts.trace) = (site, site);
    }

    /// The controller's state, while its guest stands still. It goes on as before.
    pub fn save_state(&mut self) -> Result<Vec<u8>, SavedStateError> {
        if self.controller.port.is_some() {
            return Err(SavedStateError::Engine);
        }
        if !matches!(self.link, Link::Connected(_)) {
            return Err(SavedStateError::NoGuest);
        }
        if self.waits || !self.controller.is_at_rest() { Err(SavedStateError::Running) } else { Ok(self.controller.save()) }
    }

    /// Takes a saved state, before a guest connects. It goes on with it once the guest's memory is there.
    pub fn restore_state(&mut self, saved: &[u8]) -> Result<(), SavedStateError> {
        if self.controller.port.is_some() {
            return Err(SavedStateError::Engine);
        }
        if !matches!(self.link, Link::Listening) {
            return Err(SavedStateError::Connected);
        }
        self.controller.hold_saved(saved)
    }

    /// Lets the client go and nobody in any more: before the device is removed. Commands in flight finish.
    pub fn close(&mut self, cx: &mut ShardContext<'_>) {
        if matches!(self.link, Link::Connected(_)) {
            self.disconnect(cx);
        }
        // Whatever the worker before this one left.
        self.controller.end_all_registrations();
        self.unwatch(cx, LISTENER);
        // Commands may take their time to finish; a device that comes in this one's place need not wait for them.
        self.listener.withdraw();
        self.link = Link::Closed;
    }

    /// Whether no command is in flight: a closed device that is idle may be removed from its shard.
    pub fn is_idle(&self) -> bool {
        self.controller.is_quiet() && !self.controller.memory.has_retired()
    }

    // ---- clients ----------------------------------------------------------------------------------------------------

    fn unwatch(&self, cx: &ShardContext<'_>, token: u32) {
        if let Err(error) = cx.unregister(token) {
            tracing::error!(device = self.name(), token, %error, "a descriptor cannot be unwatched");
        }
    }

    /// Lets the client go if it has gone already.
    fn let_gone_client_go(&mut self, cx: &mut ShardContext<'_>) {
        if let Link::Connected(client) = &self.link
            && is_gone(&client.connection)
        {
            self.disconnect(cx);
        }
    }

    fn accept(&mut self, cx: &mut ShardContext<'_>) {
        self.let_gone_client_go(cx);
        for _ in 0..REFUSALS {
            if !matches!(self.link, Link::Listening | Link::Connected(_)) {
                return;
            }
            match self.listener.accept() {
                Ok(Some(stream)) => {
                    // The one before may have come and gone while both waited for us.
                    self.let_gone_client_go(cx);
                    if matches!(self.link, Link::Listening) {
                        self.connect(cx, stream);
                    } else {
                        close_elsewhere(stream.into());
                        self.warn("a second client was turned away: one guest uses a device at a time");
                    }
                }
                Ok(None) => return,
                Err(error) => return self.accept_failed(cx, &error),
            }
        }
    }

    fn accept_failed(&mut self, cx: &ShardContext<'_>, error: &(dyn std::error::Error + 'static)) {
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(device = self.name(), suppressed, error, "clients cannot be accepted now");
        }
        // Out of descriptors, most likely: the socket stays readable, which must not keep the shard busy.
        self.unwatch(cx, LISTENER);
        self.accept_again = Some(cx.now() + RETRY_ACCEPT);
    }

    fn connect(&mut self, cx: &mut ShardContext<'_>, stream: std::os::unix::net::UnixStream) {
        let connection = match &self.controller.kept {
            None => Connection::new(stream),
            Some(kept) => match KeptClient::begin(kept, std::os::fd::AsFd::as_fd(&stream)) {
                Ok(client) => {
                    self.controller.remember(&client);
                    Connection::kept(stream, client, Resumed::default())
                }
                Err(error) => {
                    // What it has sent already may lie in it.
                    close_elsewhere(stream.into());
                    return self.accept_failed(cx, &error);
                }
            },
        };
        self.clients += 1;
        match connection {
            Ok(connection) => {
                tracing::debug!(device = self.name(), "a client connected");
                let connection = connection.closing_with(close_elsewhere);
                self.link = Link::Connected(Box::new(Client { connection, waiting: None, more: false, watched: false }));
                self.serve(cx);
            }
            Err(error) => self.connection_failed(&error),
        }
    }

    /// Handles what the client sent, within the budget of a turn.
    fn serve(&mut self, cx: &mut ShardContext<'_>) {
        let Link::Connected(client) = &mut self.link else { return };
        let mut function =
            Function { controller: &mut self.controller, waiting: &mut client.waiting, log: &mut self.log, again: false };
        let progress = function.serve(&mut client.connection, MESSAGES);
        if let Some(rejection) = client.connection.take_rejection()
            && let Some(suppressed) = self.log.admit()
        {
            tracing::warn!(device = self.controller.config.name, suppressed, error = %rejection, "a malformed request");
        }
        match progress {
            Ok(progress) => {
                client.more = progress == Progress::More;
                if progress == Progress::Idle {
                    // Nothing is left that may belong to an unmap (the maps of the memory's other pieces); for what is not sent yet there is
                    // `maps_until`.
                    self.controller.lifecycle.paused = self.controller.lifecycle.stopped;
                }
                self.watch(cx);
            }
            Err(error) => {
                self.connection_failed(&error);
                self.disconnect(cx);
            }
        }
    }

    fn connection_failed(&mut self, error: &ConnectionError) {
        if error.is_closed() {
            tracing::debug!(device = self.name(), "the client is gone");
        } else if let Some(suppressed) = self.log.admit() {
            let error = error as &dyn std::error::Error;
            tracing::warn!(device = self.name(), suppressed, error, "the client's connection is broken");
        }
    }

    fn warn(&mut self, message: &'static str) {
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(device = self.name(), suppressed, "{message}");
        }
    }

    /// Has the shard watch what matters now: a socket that is not to be read must not keep it awake.
    fn watch(&mut self, cx: &mut ShardContext<'_>) {
        let Link::Connected(client) = &mut self.link else { return };
        // While part of a message is there the socket is readable all the time, and is looked at by the clock.
        let wants = client.connection.wants_read() && !client.connection.has_part();
        let mut result = match (wants, client.watched) {
            (true, false) => cx.register(std::os::fd::AsFd::as_fd(&client.connection), CLIENT),
            (false, true) => cx.unregister(CLIENT),
            _ => Ok(()),
        };
        client.watched = wants;
        if self.controller.interrupts.take_pin_change() {
            result = result.and(match self.controller.interrupts.pin_unmask() {
                Some(fd) => cx.register(std::os::fd::AsFd::as_fd(fd), PIN),
                None => cx.unregister(PIN),
            });
        }
        if let Err(error) = result {
            tracing::error!(device = self.name(), %error, "the client's socket cannot be watched");
            self.disconnect(cx);
        }
    }

    /// The client is gone: the controller goes back to power-on, and its memory goes once nothing in flight can touch it.
    fn disconnect(&mut self, cx: &mut ShardContext<'_>) {
        self.unwatch(cx, CLIENT);
        self.unwatch(cx, PIN);
        // Clients that come now wait in the backlog.
        self.unwatch(cx, LISTENER);
        (self.link, self.waits) = (Link::Draining, false);
        // While the client is on record: otherwise a worker that ends here would leave them for ever.
        self.controller.end_all_registrations();
        self.controller.forget_client();
        self.controller.state.survival.strikes.set(0);
        self.accept_again = None;
        self.controller.interrupts.disconnect();
        self.controller.leave_migration();
        self.controller.memory.unmap_all();
        self.controller.caches.forget_translations();
        self.controller.reset(Reset::PowerOn);
        self.go_on_draining(cx);
    }

    fn go_on_draining(&mut self, cx: &mut ShardContext<'_>) {
        self.controller.call_off(cx);
        if !self.controller.is_quiet() || self.accept_again.is_some_and(|at| cx.now() < at) {
            return;
        }
        if let Some(port) = &mut self.controller.port {
            port.unmap_all();
        }
        self.controller.drained();
        // A new client's memory is not poisoned by what the last one did to its own, and its doorbells are not the page that the
        // last one may still have mapped.
        self.controller.memory = self.controller.config.new_memory();
        if let Err(error) = self.controller.renew_doorbells() {
            self.accept_failed(cx, &error);
            return;
        }
        self.link = Link::Listening;
        self.listen(cx);
    }

    fn listen(&mut self, cx: &ShardContext<'_>) {
        self.accept_again = None;
        if let Err(error) = cx.register(std::os::fd::AsFd::as_fd(&self.listener), LISTENER) {
            if let Some(suppressed) = self.log.admit() {
                tracing::error!(device = self.name(), suppressed, %error, "the socket cannot be watched");
            }
            self.accept_again = Some(cx.now() + RETRY_ACCEPT);
        }
    }

    // ---- turns ------------------------------------------------------------------------------------------------------

    /// What the socket's side needs beside events. Returns work done.
    fn attend(&mut self, cx: &mut ShardContext<'_>) -> usize {
        match &mut self.link {
            Link::Connected(client) => {
                if client.waiting.is_some() {
                    return self.finish_waiting(cx);
                }
                let waits = client.connection.wants_write() || client.connection.has_part();
                if client.more || waits && self.try_again.is_none_or(|at| cx.now() >= at) {
                    // By the clock: a client that does not go on costs others nothing.
                    self.try_again = Some(cx.now() + RETRY);
                    let more = usize::from(client.more);
                    self.serve(cx);
                    return more;
                }
            }
            Link::Draining => self.go_on_draining(cx),
            Link::Listening | Link::Closed | Link::Fenced => {}
        }
        let open = matches!(self.link, Link::Listening | Link::Connected(_));
        if open && self.accept_again.is_some_and(|at| cx.now() >= at) {
            self.listen(cx);
        }
        0
    }

    /// Answers the client that waits for commands in flight, once there are none.
    fn finish_waiting(&mut self, cx: &mut ShardContext<'_>) -> usize {
        let Link::Connected(client) = &mut self.link else { return 0 };
        let waiting = client.waiting.as_mut();
        let Some(result) = waiting.and_then(|waiting| waiting.finish(&mut self.controller, cx)) else { return 0 };
        client.waiting = None;
        match client.connection.finish_deferred(result) {
            // What was pipelined behind (maps behind unmaps) is handled before any further command is taken.
            Ok(()) => self.serve(cx),
            Err(error) => {
                self.connection_failed(&error);
                self.disconnect(cx);
            }
        }
        1
    }

    fn count_commands(&mut self, cx: &ShardContext<'_>) {
        let controller = &mut self.controller;
        let total = controller.counters.commands();
        if total != controller.counted {
            cx.count_commands(total - controller.counted);
            controller.counted = total;
            controller.counters.store(&controller.state.counters);
        }
    }

    /// Until when the shard may sleep, apart from commands.
    fn alarm(&self) -> Option<Instant> {
        let is_stuck = |client: &Client| client.connection.wants_write() || client.connection.has_part();
        let stuck = matches!(&self.link, Link::Connected(client) if is_stuck(client));
        let retry = stuck.then(|| Instant::now() + RETRY);
        let waiting = if let Link::Connected(client) = &self.link { client.waiting } else { None };
        let due = waiting.and_then(Waiting::due);
        let Lifecycle { call_off_again, maps_until, .. } = self.controller.lifecycle;
        let interrupts = self.controller.interrupts.next_deadline();
        [interrupts, retry, self.accept_again, due, call_off_again, maps_until].into_iter().flatten().min()
    }

    /// What a device on a card has to say beside others: while anything of its is in flight there, the shard naps and no longer, for
    /// what its card waits for need not wake this device.
    fn arm_card(&mut self, takes: bool) -> Option<Readiness> {
        if self.controller.has_card_work(takes) || takes && self.controller.can_take() {
            return Some(Readiness::Busy);
        }
        self.has_alarm = self.alarm().is_some();
        (takes || !self.controller.is_card_quiet()).then_some(Readiness::Nap)
    }

    fn is_busy(&self) -> bool {
        let more = matches!(&self.link, Link::Connected(client) if client.more);
        more || self.controller.sink.has_results() || self.controller.has_answers()
    }
}

impl millrace_engine::Device for NvmeDevice {
    fn name(&self) -> &str {
        self.name()
    }

    fn poll(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if self.waits || self.left {
            return 0;
        }
        let busy = &self.controller.state.survival.busy;
        busy.set(1);
        let work = self.controller.turn(cx);
        if work > 0 {
            self.count_commands(cx);
        }
        let work = work + self.attend(cx);
        self.controller.state.survival.busy.set(0);
        work
    }

    fn event(&mut self, cx: &mut ShardContext<'_>, token: u32) {
        if self.left {
            return;
        }
        self.controller.state.survival.busy.set(1);
        match token {
            LISTENER if !self.waits => self.accept(cx),
            LISTENER => {
                // Until it goes on, others wait in the backlog, and the shard must not look at them all the time.
                self.unwatch(cx, LISTENER);
                self.accept_again = Some(cx.now());
            }
            CLIENT => self.serve(cx),
            PIN => self.controller.interrupts.unmask_pin(),
            _ => {}
        }
        self.controller.state.survival.busy.set(0);
    }

    fn arm(&mut self, _: &mut ShardContext<'_>) -> Readiness {
        if self.waits || self.left {
            return Readiness::Block;
        }
        if self.is_busy() {
            return Readiness::Busy;
        }
        let takes = self.controller.lifecycle.takes();
        if self.controller.port.is_some()
            && let Some(readiness) = self.arm_card(takes && self.controller.phase == Phase::Ready)
        {
            return readiness;
        }
        if self.controller.phase == Phase::Ready && takes {
            let shared = self.controller.config.doorbells == DoorbellMode::Shared;
            if !shared {
                self.armed = self.controller.arm_event_indexes();
            }
            if self.controller.can_take() {
                return Readiness::Busy;
            }
            if shared {
                self.has_alarm = self.alarm().is_some() || self.controller.waits_for_turns();
                return Readiness::Nap;
            }
        }
        if self.controller.waits_for_turns() {
            self.has_alarm = true;
            return Readiness::Nap;
        }
        self.alarm().map_or(Readiness::Block, Readiness::Until)
    }

    fn may_have_work(&mut self) -> bool {
        // Whatever else a turn may find was not there when the device was armed, and what brings it wakes the device.
        self.has_alarm || self.controller.has_news() || self.controller.has_card_work(true)
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.controller.relax_event_indexes();
        }
    }

    fn fence(&mut self, _: &mut ShardContext<'_>) {
        if self.controller.kept.is_some() {
            // The next worker begins with a state that it can trust. A device that ends that one too is fenced there.
            self.controller.state.survival.busy.set(1);
            tracing::error!(
                device = self.name(),
                "a fault of ours in this device: the worker ends, and another one goes on"
            );
            std::process::abort();
        }
        self.controller.fail("a fault of ours; the device is out of service");
        self.link = Link::Fenced;
    }
}

impl Drop for NvmeDevice {
    fn drop(&mut self) {
        // Otherwise the memory stays mapped for ever: tasks that are under way may still use it.
        if !matches!(self.link, Link::Fenced) && self.controller.is_quiet() {
            self.controller.memory.unmap_all();
            self.controller.drained();
        }
    }
}

#[cfg(test)]
mod tests;
