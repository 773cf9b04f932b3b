//! The disk on a shard and on a socket: `millrace_engine::Device` over vhost-user.
//!
//! ```text
//!   Listening ──accept──► Connected ──closed, garbage, failure──► Draining ──nothing in flight──► Listening
//!       ▲ a volume                        (requests in flight end as ever, or are left on record)
//!   Holding
//! ```
//!
//! One front end at a time; another one waits in the backlog. A disk whose volume should be there and is not lets nobody in
//! ([`VirtioBlkDevice::hold`]): its guest waits instead of seeing an empty disk.

use std::{
    error::Error as _,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::{Volume, trace::Site};
use millrace_engine::{Readiness, ShardContext};
use millrace_vfio_user::Listener;
use thiserror::Error;

use super::{
    Config, KICKS, Kind,
    config::acceptable,
    disk::{Counters, Disk, Fault},
    modes::WriteModes,
    session::{Progress, Session, SessionError, unwatch},
    transport::{Transport, TransportError},
};
use crate::{hangup::is_gone, log_limit::LogLimit};

/// Messages of one front end handled in one turn, so that a flood of them leaves the shard to others.
const MESSAGES: usize = 32;
/// How soon output that a front end does not take is tried again, and accepting after an error of the system.
const RETRY: Duration = Duration::from_millis(1);
const RETRY_ACCEPT: Duration = Duration::from_millis(200);
/// How soon what a front end that is gone had asked for is called off again: a long request's next piece may have to wait as well. And how
/// soon it is seen that one is gone whose message waits.
const CALL_OFF: Duration = Duration::from_millis(50);

const LISTENER: u32 = 0;
const CLIENT: u32 = 1;

/// Why a device could not be made or changed: told to the operator.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A setting is out of its range.
    #[error("device {device}: {what}")]
    Config {
        /// The device's name.
        device: String,
        /// Which, and its range.
        what: &'static str,
    },
    /// The socket cannot be watched.
    #[error("device {device}: cannot watch its socket: {source}")]
    Socket {
        /// The device's name.
        device: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A guest is connected that was told of another disk.
    #[error(
        "device {device}: its guest runs with a disk of another kind (block size or read-only differ); stop the guest \
         first, or attach a volume of the same kind"
    )]
    OtherKind {
        /// The device's name.
        device: String,
    },
}

/// Where a disk stands, as the operator is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePhase {
    /// No front end, or one whose guest has not started a queue.
    Stopped,
    /// Queues run.
    Running,
    /// The guest or its front end broke the rules: only a reset helps.
    Failed,
}

/// What a disk has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceCounters {
    /// Read requests.
    pub read_commands: u64,
    /// Write requests.
    pub write_commands: u64,
    /// Other requests.
    pub other_commands: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Errors of the medium.
    pub media_errors: u64,
    /// Interrupts raised.
    pub interrupts: u64,
}

/// What a disk is doing.
#[derive(Clone, Copy, Debug)]
pub struct DeviceStatus {
    /// Whether a front end is connected.
    pub connected: bool,
    /// Where it stands.
    pub phase: DevicePhase,
    /// A fault of ours in it was contained: it does nothing any more.
    pub fenced: bool,
    /// Queues that run.
    pub queues: usize,
    /// Requests under way.
    pub in_flight: u32,
    /// What it has done.
    pub counters: DeviceCounters,
}

/// Who is on the other side.
enum Link {
    /// The volume is missing: nobody is let in.
    Holding,
    Listening,
    Connected(Box<Client>),
    /// The front end is gone; its requests are not.
    Draining,
    /// Nobody is let in any more.
    Closed,
    /// A fault of ours.
    Fenced,
}

/// The connected front end.
struct Client {
    session: Session,
    /// Messages may wait.
    more: bool,
    /// Whether the shard watches the socket.
    watched: bool,
}

/// A virtio disk with its listening socket and, at most, one front end.
///
/// It belongs to its shard's thread; the control plane reaches it there.
pub struct VirtioBlkDevice {
    disk: Disk,
    listener: Listener,
    link: Link,
    /// Nobody is let in before a volume comes.
    hold: bool,
    /// When accepting is tried again after the system could not.
    accept_again: Option<Instant>,
    /// When a client's socket is looked at again that is not to be watched.
    try_again: Option<Instant>,
    /// When requests that a front end has left are called off again, and, while a message waits, whether its front end is there is looked at.
    look_again: Option<Instant>,
    log: LogLimit,
}

impl VirtioBlkDevice {
    /// A disk that waits for its guest. With `hold` it lets nobody in before a volume is attached. `kind` is what the volume was that it
    /// showed last, if it did: until it has one again, it stays that.
    pub fn new(
        config: Config,
        kind: Option<Kind>,
        listener: Listener,
        hold: bool,
        cx: &mut ShardContext<'_>,
    ) -> Result<Self, DeviceError> {
        let device = config.name.clone();
        config.check().map_err(|what| DeviceError::Config { device: device.clone(), what })?;
        let link = if hold { Link::Holding } else { Link::Listening };
        if !hold {
            cx.register(listener.as_fd(), LISTENER).map_err(|source| DeviceError::Socket { device, source })?;
        }
        Ok(Self {
            disk: Disk::new(config, kind),
            listener,
            link,
            hold,
            try_again: None,
            accept_again: None,
            look_again: None,
            log: LogLimit::default(),
        })
    }

    /// The disk's settings.
    pub fn config(&self) -> &Config {
        &self.disk.core.config
    }

    fn name(&self) -> &str {
        &self.disk.core.config.name
    }

    /// Shows a volume from now on; a guest that is connected is told by a change of the configuration. `modes` is the volume's, the same
    /// for all disks that show it.
    pub fn attach(
        &mut self,
        volume: Arc<dyn Volume>,
        modes: Arc<WriteModes>,
        read_only: bool,
        cx: &mut ShardContext<'_>,
    ) -> Result<(), DeviceError> {
        if let Link::Connected(client) = &self.link {
            let kind = Kind::new(&volume.geometry(), read_only);
            let known = self.disk.kind();
            let features = |kind| self.disk.core.config.features(kind);
            // A guest that connects again was offered features by an earlier connection.
            let offered = client.session.offered().or_else(|| known.map(features));
            let is_offered = offered.is_none_or(|offered| acceptable(offered) == acceptable(features(kind)));
            if !is_offered || known.is_some_and(|known| known.block_size != kind.block_size) {
                return Err(DeviceError::OtherKind { device: self.name().to_owned() });
            }
        }
        self.disk.attach(volume, modes, read_only);
        self.let_in(cx);
        self.volume_changed();
        Ok(())
    }

    /// Waits for no volume any more: a guest that comes has what there is, a disk without blocks where none was attached.
    pub fn let_in(&mut self, cx: &mut ShardContext<'_>) {
        self.hold = false;
        if matches!(self.link, Link::Holding) {
            self.link = Link::Listening;
            self.listen(cx);
        }
    }

    /// Shows the volume no more: its guest has a disk without blocks. Requests in flight finish ([`Self::is_detached`]).
    pub fn detach(&mut self) {
        if self.disk.detach() {
            self.volume_changed();
        }
    }

    /// Whether no request is in flight any more on volumes that were detached: then they may go.
    pub fn is_detached(&mut self) -> bool {
        self.disk.is_detached()
    }

    /// Takes no more requests: another worker is about to go on, to which the front end will connect. Those under way finish.
    pub fn hold(&mut self) {
        self.disk.held = true;
    }

    /// Whether every request that was taken has ended, and its guest can see that.
    pub fn is_held(&self, cx: &ShardContext<'_>) -> bool {
        self.disk.held && self.is_idle(cx)
    }

    /// Records its guest's requests from now on, or no more.
    pub fn trace(&mut self, site: Site) {
        self.disk.core.trace = site;
    }

    /// The volume has another size now; the guest is told.
    pub fn volume_changed(&mut self) {
        if let Link::Connected(client) = &mut self.link {
            client.session.config_changed();
        }
    }

    /// What it is doing.
    pub fn status(&self) -> DeviceStatus {
        let Counters {
            read_commands,
            write_commands,
            other_commands,
            bytes_read,
            bytes_written,
            errors,
            media_errors,
            interrupts,
        } = self.disk.core.counters;
        let queues = self.disk.running();
        let fenced = matches!(self.link, Link::Fenced);
        DeviceStatus {
            connected: matches!(self.link, Link::Connected(_)),
            phase: match (self.disk.failed || fenced, queues) {
                (true, _) => DevicePhase::Failed,
                (false, 0) => DevicePhase::Stopped,
                (false, _) => DevicePhase::Running,
            },
            fenced,
            queues,
            in_flight: self.disk.under_way(),
            counters: DeviceCounters {
                read_commands,
                write_commands,
                other_commands,
                bytes_read,
                bytes_written,
                errors,
                media_errors,
                interrupts,
            },
        }
    }

    /// Lets the front end go and nobody in any more: before the device is removed. Requests in flight finish.
    pub fn close(&mut self, cx: &mut ShardContext<'_>) {
        if matches!(self.link, Link::Connected(_)) {
            self.disconnect(cx);
        }
        self.unwatch(cx, LISTENER);
        // Commands may take their time to finish; a device that comes in this one's place need not wait for them.
        self.listener.withdraw();
        self.disk.forget_mode();
        // Requests in flight end as ever; then `is_idle`.
        if !matches!(self.link, Link::Fenced) {
            self.link = Link::Closed;
        }
    }

    /// Whether nothing is in flight: a closed device that is idle may be removed from its shard.
    pub fn is_idle(&self, cx: &ShardContext<'_>) -> bool {
        // Nobody looks at the results of one that is fenced, and a task that has panicked leaves none.
        if matches!(self.link, Link::Fenced) { cx.waiting_tasks() == 0 } else { self.disk.is_quiet() }
    }

    // ---- the front end --------------------------------------------------------------------------------------------------

    fn unwatch(&self, cx: &ShardContext<'_>, token: u32) {
        if let Err(error) = cx.unregister(token) {
            tracing::error!(device = self.name(), token, %error, "a descriptor cannot be unwatched");
        }
    }

    fn accept(&mut self, cx: &mut ShardContext<'_>) {
        if !matches!(self.link, Link::Listening) {
            return;
        }
        match self.listener.accept() {
            Ok(Some(stream)) => self.connect(cx, stream),
            Ok(None) => {}
            Err(error) => self.accept_failed(cx, &error),
        }
    }

    fn accept_failed(&mut self, cx: &ShardContext<'_>, error: &(dyn std::error::Error + 'static)) {
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(device = self.name(), suppressed, error, "front ends cannot be accepted now");
        }
        // Out of descriptors, most likely: the socket stays readable, which must not keep the shard busy.
        self.unwatch(cx, LISTENER);
        self.accept_again = Some(cx.now() + RETRY_ACCEPT);
    }

    fn connect(&mut self, cx: &mut ShardContext<'_>, stream: UnixStream) {
        match Transport::new(stream) {
            Ok(transport) => {
                tracing::debug!(device = self.name(), "a front end connected");
                // The next one waits in the backlog.
                self.unwatch(cx, LISTENER);
                self.disk.paused = false;
                let session = Session::new(transport);
                self.link = Link::Connected(Box::new(Client { session, more: false, watched: false }));
                self.serve(cx);
            }
            Err(error) => self.accept_failed(cx, &error),
        }
    }

    /// Handles what the front end has sent.
    fn serve(&mut self, cx: &mut ShardContext<'_>) {
        let Link::Connected(client) = &mut self.link else { return };
        let progress = client.session.serve(&mut self.disk, cx, MESSAGES);
        if let Some(refusal) = client.session.refusal.take()
            && let Some(suppressed) = self.log.admit()
        {
            tracing::warn!(device = self.disk.core.config.name, suppressed, error = %refusal, "a message was refused");
        }
        match progress {
            Ok(progress) => {
                client.more = progress == Progress::More;
                self.watch(cx, progress != Progress::Waiting);
            }
            Err(error) => {
                self.connection_failed(&error);
                self.disconnect(cx);
            }
        }
    }

    fn connection_failed(&mut self, error: &SessionError) {
        if matches!(error, SessionError::Transport(TransportError::Closed)) {
            tracing::debug!(device = self.name(), "the front end is gone");
        } else if let Some(suppressed) = self.log.admit() {
            let source = error.source().map(ToString::to_string);
            tracing::warn!(device = self.name(), suppressed, %error, source, "the front end's connection ends");
        }
    }

    /// Has the shard watch the socket, or not: one that is not to be read must not keep it awake.
    fn watch(&mut self, cx: &mut ShardContext<'_>, wants: bool) {
        let Link::Connected(client) = &mut self.link else { return };
        let result = match (wants, client.watched) {
            (true, false) => cx.register(client.session.transport.as_fd(), CLIENT),
            (false, true) => cx.unregister(CLIENT),
            _ => Ok(()),
        };
        client.watched = wants;
        if let Err(error) = result {
            tracing::error!(device = self.name(), %error, "the front end's socket cannot be watched");
            self.disconnect(cx);
        }
    }

    /// The front end is gone: nothing new is taken, and what it had given us goes once nothing in flight can touch it.
    fn disconnect(&mut self, cx: &mut ShardContext<'_>) {
        self.unwatch(cx, CLIENT);
        (0..self.disk.queues.len()).for_each(|queue| unwatch(cx, queue));
        self.disk.paused = true;
        self.link = Link::Draining;
        self.look_again = None;
        self.go_on_draining(cx);
    }

    /// Whether it is time to look; then it is the next time a while later.
    fn is_due(&mut self, cx: &ShardContext<'_>) -> bool {
        let due = self.look_again.is_none_or(|at| cx.now() >= at);
        if due {
            self.look_again = Some(cx.now() + CALL_OFF);
        }
        due
    }

    /// Lets the front end go if it has gone while one of its messages waits for rest: nobody reads its socket then, and what is held back
    /// would not be called off. What it has sent behind that message means nothing. Returns whether it was so.
    fn let_gone_go(&mut self, cx: &mut ShardContext<'_>) -> bool {
        if !self.is_waiting() || !self.is_due(cx) {
            return false;
        }
        let gone = matches!(&self.link, Link::Connected(client) if is_gone(&client.session.transport));
        if gone {
            tracing::debug!(device = self.name(), "the front end is gone");
            self.disconnect(cx);
        }
        gone
    }

    /// Whether a message waits for rest.
    fn is_waiting(&self) -> bool {
        matches!(&self.link, Link::Connected(client) if client.session.is_waiting())
    }

    /// Of what nobody waits for any more, what only waits for its turn ends at once.
    fn call_off(&mut self, cx: &ShardContext<'_>) {
        // Not in every turn: that looks at everybody who waits on this shard.
        if !self.disk.is_quiet() && self.is_due(cx) {
            self.disk.call_off(cx.asker());
        }
    }

    fn go_on_draining(&mut self, cx: &mut ShardContext<'_>) {
        if !self.disk.is_quiet() {
            self.call_off(cx);
            return;
        }
        self.disk.forget_front_end();
        self.disk.core.trace.reset();
        if self.hold {
            self.link = Link::Holding;
            return;
        }
        self.link = Link::Listening;
        self.listen(cx);
    }

    fn listen(&mut self, cx: &ShardContext<'_>) {
        self.accept_again = None;
        if let Err(error) = cx.register(self.listener.as_fd(), LISTENER) {
            if let Some(suppressed) = self.log.admit() {
                tracing::error!(device = self.name(), suppressed, %error, "the socket cannot be watched");
            }
            self.accept_again = Some(cx.now() + RETRY_ACCEPT);
        }
    }

    // ---- turns ----------------------------------------------------------------------------------------------------------

    /// The guest or its front end broke the rules.
    fn fail(&mut self, cx: &mut ShardContext<'_>, fault: &Fault) {
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(device = self.name(), suppressed, error = %fault, "the guest's disk has failed; it must reset it");
        }
        self.disk.fail();
        let tells = matches!(&self.link, Link::Connected(client) if client.session.tells_status());
        if matches!(fault, Fault::Poisoned) || !tells {
            if matches!(self.link, Link::Connected(_)) {
                self.disconnect(cx);
            }
        } else {
            // The front end reads the status when it looks; this makes it look.
            self.volume_changed();
        }
    }

    /// What the socket's side needs beside events. Returns work done.
    fn attend(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if self.let_gone_go(cx) {
            return 1;
        }
        match &mut self.link {
            Link::Connected(client) => {
                let waiting = client.session.is_waiting();
                let stuck = client.session.is_stuck() && self.try_again.is_none_or(|at| cx.now() >= at);
                if client.more || waiting || stuck {
                    // By the clock: a client that does not go on costs others nothing.
                    self.try_again = Some(cx.now() + RETRY);
                    let more = client.more;
                    self.serve(cx);
                    let over = matches!(&self.link, Link::Connected(client) if !client.session.is_waiting());
                    return usize::from(more || (waiting && over));
                }
            }
            Link::Draining => self.go_on_draining(cx),
            Link::Closed => self.call_off(cx),
            Link::Holding | Link::Listening | Link::Fenced => {}
        }
        if matches!(self.link, Link::Listening) && self.accept_again.is_some_and(|at| cx.now() >= at) {
            self.listen(cx);
        }
        0
    }

    /// Until when the shard may sleep, apart from requests.
    fn alarm(&self) -> Option<Instant> {
        let stuck = matches!(&self.link, Link::Connected(client) if client.session.is_stuck());
        let retry = stuck.then(|| Instant::now() + RETRY);
        let looks = match self.link {
            Link::Connected(_) => self.is_waiting(),
            Link::Draining | Link::Closed => !self.disk.is_quiet(),
            Link::Holding | Link::Listening | Link::Fenced => false,
        };
        let look = looks.then(|| self.look_again.unwrap_or_else(Instant::now));
        [retry, self.accept_again, look].into_iter().flatten().min()
    }

    fn is_busy(&self) -> bool {
        let more = matches!(&self.link, Link::Connected(client) if client.more);
        more || !self.disk.sink.results.borrow().is_empty()
    }
}

impl millrace_engine::Device for VirtioBlkDevice {
    fn name(&self) -> &str {
        self.name()
    }

    fn poll(&mut self, cx: &mut ShardContext<'_>) -> usize {
        let work = match self.disk.turn(cx) {
            Ok(work) => work,
            Err(fault) => {
                self.fail(cx, &fault);
                1
            }
        };
        work + self.attend(cx)
    }

    fn event(&mut self, cx: &mut ShardContext<'_>, token: u32) {
        match token {
            LISTENER => self.accept(cx),
            CLIENT => self.serve(cx),
            kick => {
                let queue = kick.checked_sub(KICKS).and_then(|index| self.disk.queues.get(index as usize));
                // The poll that follows takes what is there.
                if let Some(kick) = queue.and_then(|queue| queue.kick.as_ref())
                    && !kick.silence()
                    && kick.is_given_up()
                {
                    // It would be readable for ever.
                    let _ = cx.unregister(token);
                }
            }
        }
    }

    fn arm(&mut self, _: &mut ShardContext<'_>) -> Readiness {
        if self.is_busy() {
            return Readiness::Busy;
        }
        if matches!(self.link, Link::Connected(_)) {
            if self.disk.arm() {
                return Readiness::Busy;
            }
            if self.disk.must_look() {
                return Readiness::Nap;
            }
        }
        self.alarm().map_or(Readiness::Block, Readiness::Until)
    }

    fn disarm(&mut self) {
        self.disk.disarm();
    }

    fn fence(&mut self, cx: &mut ShardContext<'_>) {
        // Its state cannot be trusted: the front end only sees the connection end.
        self.unwatch(cx, CLIENT);
        self.link = Link::Fenced;
    }
}

impl Drop for VirtioBlkDevice {
    fn drop(&mut self) {
        // Otherwise the memory stays mapped for ever: tasks that are under way may still use it.
        if !matches!(self.link, Link::Fenced) && self.disk.is_quiet() {
            self.disk.forget_front_end();
        }
    }
}
