//! What a front end's messages do to the disk.
//!
//! Some must wait until nothing touches the guest's memory (`must_wait`); meanwhile nothing new is taken, and no further message is
//! looked at.

use std::os::fd::OwnedFd;

use millrace_engine::{ShardContext, closer::Received};
use millrace_memory::MapError;
use rustix::io::Errno;
use thiserror::Error;
use zerocopy::IntoBytes;

use super::{
    KICKS,
    config::{Space, acceptable, feature},
    dirty::DirtyLog,
    disk::Disk,
    inflight::{InflightError, InflightRegion},
    memory::MAX_SLOTS,
    message::{ConfigHead, Header, Inflight, LogBase, Message, Region, StateTransfer, VringFd, VringState, protocol},
    ring::{MAX_SIZE, RingError, feature as ring_feature},
    state::{StateError, Transfer},
    transport::{BackendChannel, Frame, Transport, TransportError},
};
use crate::eventfd::{Eventfd, is_socket};

/// Bits of the device status.
const NEEDS_RESET: u8 = 0x40;

/// Why a message was not carried out. The front end gets word of it where it asked to, otherwise the connection ends.
#[derive(Debug, Error)]
pub(crate) enum Refusal {
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("the ring's layout cannot change while a queue runs")]
    Running,
    #[error("protocol features {0:#x} were not offered")]
    ProtocolFeatures(u64),
    #[error("message {0} needs a protocol feature that was not negotiated")]
    NotNegotiated(u32),
    #[error("there is no queue {0}")]
    NoQueue(u32),
    #[error("queue {0} runs")]
    QueueRuns(u32),
    #[error("memory: {0}")]
    Memory(#[from] MapError),
    #[error("a descriptor that is no eventfd: {0}")]
    Eventfd(#[from] Errno),
    #[error("a channel that is no socket")]
    NoSocket,
    #[error("watching a queue's kicks: {0}")]
    Watch(#[source] std::io::Error),
    #[error("queue: {0}")]
    Ring(#[from] RingError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
    #[error("configuration: {len} bytes at {offset} cannot be written")]
    Config { offset: u32, len: usize },
    #[error("the disk's state: {0}")]
    State(#[from] StateError),
}

/// What a message is answered with.
enum Answer {
    /// Whether it was carried out, if the front end asked.
    Ack,
    Word(u64),
    State(VringState),
    Config(ConfigHead, Vec<u8>),
    Log(LogBase),
    Inflight(OwnedFd, Inflight),
    /// Where the device's state is read, or written.
    Channel(OwnedFd),
}

/// Why a connection cannot go on.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("message {request}: {source}")]
    Refused {
        request: u32,
        #[source]
        source: Refusal,
    },
}

/// How far the messages of one call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// None is left.
    Idle,
    /// There may be more.
    More,
    /// One waits for rest, or for the front end to read an answer.
    Waiting,
}

/// A message that was understood.
struct Pending {
    header: Header,
    message: Message,
    fds: Vec<Received>,
}

/// One front end's connection.
pub(crate) struct Session {
    pub(crate) transport: Transport,
    /// It waits for rest.
    pending: Option<Pending>,
    protocol: u64,
    offered: u64,
    status: u8,
    backend: Option<BackendChannel>,
    /// The configuration may be another one than the front end knows: it has not asked since the last change, or not this process, and an earlier
    /// one may have ended between a change and word of it.
    is_behind: bool,
    /// The device's state is on its way.
    transfer: Option<Transfer>,
    /// A refusal that the front end was told of: for the log.
    pub(crate) refusal: Option<Refusal>,
}

impl Session {
    pub(crate) fn new(transport: Transport) -> Self {
        let (protocol, offered, status) = (0, 0, 0);
        let (pending, backend, transfer, refusal) = (None, None, None, None);
        Self { transport, pending, protocol, offered, status, backend, is_behind: true, transfer, refusal }
    }

    /// Whether a message waits for rest.
    pub(crate) fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether the front end can read of a failure in the device status.
    pub(crate) fn tells_status(&self) -> bool {
        self.protocol & protocol::STATUS != 0
    }

    /// Whether the front end, and through it the guest, was told what it is offered.
    pub(crate) fn offered(&self) -> Option<u64> {
        (self.offered != 0).then_some(self.offered)
    }

    /// The configuration has changed: the front end is told, now and, until it has asked, when its guest starts.
    pub(crate) fn config_changed(&mut self) {
        self.is_behind = true;
        self.tell_change();
    }

    /// Tells the front end that the configuration has changed, if it listens.
    fn tell_change(&mut self) {
        if let Some(backend) = &mut self.backend
            && backend.config_changed().is_err()
        {
            self.backend = None;
        }
    }

    /// Tries again what the front end could not be told.
    pub(crate) fn retry(&mut self) -> Result<(), TransportError> {
        if let Some(backend) = &mut self.backend
            && backend.retry().is_err()
        {
            self.backend = None;
        }
        self.transport.flush()
    }

    /// Whether the front end must be told something as soon as it reads.
    pub(crate) fn is_stuck(&self) -> bool {
        self.transport.is_stuck() || self.backend.as_ref().is_some_and(BackendChannel::is_owed)
    }

    /// Carries out what the front end has sent, `most` messages at most.
    pub(crate) fn serve(&mut self, disk: &mut Disk, cx: &ShardContext<'_>, most: usize) -> Result<Progress, SessionError> {
        self.retry()?;
        for _ in 0..most {
            if self.transport.is_stuck() {
                return Ok(Progress::Waiting);
            }
            let pending = match self.pending.take() {
                Some(pending) => pending,
                None => match self.next()? {
                    Some(pending) => pending,
                    None => return Ok(Progress::Idle),
                },
            };
            if must_wait(disk, &pending.message) {
                self.pending = Some(pending);
                return Ok(Progress::Waiting);
            }
            disk.paused = false;
            self.carry_out(disk, cx, pending)?;
        }
        Ok(Progress::More)
    }

    fn next(&mut self) -> Result<Option<Pending>, SessionError> {
        let Some(Frame { header, payload, fds }) = self.transport.receive()? else { return Ok(None) };
        let message = Message::parse(&header, &payload, fds.len()).map_err(TransportError::from)?;
        Ok(Some(Pending { header, message, fds }))
    }

    fn carry_out(&mut self, disk: &mut Disk, cx: &ShardContext<'_>, pending: Pending) -> Result<(), SessionError> {
        let Pending { header, message, fds } = pending;
        let request = header.request;
        let acknowledges = header.needs_reply() && self.protocol & protocol::REPLY_ACK != 0;
        let missing = message.feature() & !self.protocol;
        let result = if missing == 0 { self.handle(disk, cx, message, fds) } else { Err(Refusal::NotNegotiated(request)) };
        let send = |transport: &mut Transport, payload: &[u8], fd| Ok(transport.send(request, payload, fd)?);
        let transport = &mut self.transport;
        match result {
            Ok(Answer::Ack) if acknowledges => send(transport, 0_u64.as_bytes(), None),
            Ok(Answer::Ack) => Ok(()),
            Ok(Answer::Word(word)) => send(transport, word.as_bytes(), None),
            Ok(Answer::State(state)) => send(transport, state.as_bytes(), None),
            Ok(Answer::Config(head, bytes)) => send(transport, &[head.as_bytes(), &bytes].concat(), None),
            Ok(Answer::Log(base)) => send(transport, base.as_bytes(), None),
            Ok(Answer::Inflight(fd, what)) => send(transport, what.as_bytes(), Some(fd)),
            Ok(Answer::Channel(fd)) => send(transport, 0_u64.as_bytes(), Some(fd)),
            Err(source) if acknowledges => {
                self.refusal = Some(source);
                send(transport, 1_u64.as_bytes(), None)
            }
            Err(source) => Err(SessionError::Refused { request, source }),
        }
    }

    fn handle(
        &mut self,
        disk: &mut Disk,
        cx: &ShardContext<'_>,
        message: Message,
        fds: Vec<Received>,
    ) -> Result<Answer, Refusal> {
        match message {
            Message::GetFeatures => {
                self.offered = disk.offered();
                return Ok(Answer::Word(self.offered));
            }
            Message::GetProtocolFeatures => return Ok(Answer::Word(disk.protocol())),
            Message::GetQueueNum => return Ok(Answer::Word(disk.queues.len() as u64)),
            Message::GetMaxMemSlots => return Ok(Answer::Word(MAX_SLOTS)),
            Message::GetStatus => {
                let failed = if disk.failed { NEEDS_RESET } else { 0 };
                return Ok(Answer::Word((self.status | failed).into()));
            }
            Message::GetConfig(head) => return Ok(self.get_config(disk, head)),
            Message::GetInflightFd(wanted) => return get_inflight(disk, &wanted),
            Message::SetFeatures(features) => self.set_features(disk, features)?,
            Message::SetProtocolFeatures(features) => {
                if features & !disk.protocol() != 0 {
                    return Err(Refusal::ProtocolFeatures(features & !disk.protocol()));
                }
                self.protocol = features;
            }
            // One owner is all there can be, and the old word for a reset means nothing any more.
            Message::SetOwner | Message::ResetOwner | Message::SetLogFd => {}
            Message::SetBackendReqFd => self.set_backend(fds)?,
            Message::SetStatus(status) => {
                self.status = status as u8;
                if status == 0 {
                    reset(disk, cx);
                }
            }
            Message::ResetDevice => {
                self.status = 0;
                reset(disk, cx);
            }
            Message::SetConfig(head, bytes) => self.set_config(disk, head, &bytes)?,
            Message::SetMemTable(regions) => set_memory(disk, &regions, fds)?,
            Message::AddMemReg(region) => {
                let fd = fds.into_iter().next().ok_or(MapError::BadRange { addr: region.guest, size: region.size })?;
                disk.core.memory.add(region, fd)?;
                disk.memory_came();
            }
            Message::RemMemReg(region) => {
                disk.core.memory.remove(&region)?;
                // It is gone, whatever lay there.
                let _ = disk.memory_changed();
            }
            Message::SetLogBase(base) => {
                let fd = fds.into_iter().next().ok_or(MapError::BadRange { addr: base.offset, size: base.size })?;
                disk.set_log(DirtyLog::map(&base, &fd)?);
                // It is answered always. QEMU takes an answer of any length, rust-vmm's front end waits for as much as it sent.
                return Ok(Answer::Log(base));
            }
            Message::SetInflightFd(what) => {
                let fd = fds.into_iter().next().ok_or(InflightError::Garbled("it is missing"))?;
                disk.set_inflight(InflightRegion::open(&what, &fd)?);
            }
            Message::SetDeviceStateFd(what) => return Ok(self.begin_transfer(disk, what)),
            Message::CheckDeviceState => return Ok(self.end_transfer(disk)),
            queue => return self.serve_queue(disk, cx, queue, fds),
        }
        Ok(Answer::Ack)
    }

    fn get_config(&mut self, disk: &mut Disk, head: ConfigHead) -> Answer {
        disk.tell_kind();
        // What may change while a guest runs, the capacity, comes first.
        self.is_behind &= head.offset > 0;
        let space = disk.core.config.space(&disk.geometry(), disk.core.write_cache);
        Answer::Config(head, space.read(head.offset as usize, head.size as usize))
    }

    /// A message that belongs to one queue.
    fn serve_queue(
        &mut self,
        disk: &mut Disk,
        cx: &ShardContext<'_>,
        message: Message,
        fds: Vec<Received>,
    ) -> Result<Answer, Refusal> {
        let ran = disk.running() > 0;
        let answer = handle_queue(disk, cx, message, fds)?;
        // QEMU passes over word that comes while its device has not begun, or has stopped.
        if self.is_behind && !ran && disk.running() > 0 {
            self.tell_change();
        }
        Ok(answer)
    }

    /// The device's state is to go or to come. The front end is told of a refusal always.
    fn begin_transfer(&mut self, disk: &Disk, what: StateTransfer) -> Answer {
        self.transfer = None;
        match Transfer::begin(disk, what) {
            Ok((transfer, channel)) => {
                self.transfer = Some(transfer);
                Answer::Channel(channel)
            }
            Err(error) => {
                self.refusal = Some(error.into());
                Answer::Word(StateTransfer::REFUSED)
            }
        }
    }

    /// The front end has read or written all of the device's state, and wants to know whether it is good.
    fn end_transfer(&mut self, disk: &mut Disk) -> Answer {
        let transfer = self.transfer.take().ok_or(StateError::NotBegun);
        match transfer.and_then(|transfer| transfer.end(disk)) {
            Ok(()) => Answer::Word(0),
            Err(error) => {
                self.refusal = Some(error.into());
                Answer::Word(1)
            }
        }
    }

    fn set_backend(&mut self, fds: Vec<Received>) -> Result<(), Refusal> {
        let fd = fds.into_iter().next().filter(|fd| is_socket(fd).unwrap_or(false)).ok_or(Refusal::NoSocket)?;
        self.backend = Some(BackendChannel::new(fd));
        Ok(())
    }

    fn set_features(&mut self, disk: &mut Disk, features: u64) -> Result<(), Refusal> {
        let offered = acceptable(if self.offered == 0 { disk.offered() } else { self.offered });
        if features & !offered != 0 {
            return Err(Refusal::Features(features & !offered));
        }
        let rings = ring_feature::PACKED | ring_feature::EVENT_IDX | ring_feature::INDIRECT;
        if (features ^ disk.core.features) & rings != 0 && disk.queues.iter().any(|queue| queue.ring.is_some()) {
            return Err(Refusal::Running);
        }
        disk.set_features(features);
        if features & feature::PROTOCOL_FEATURES == 0 {
            // Who does not speak the protocol's extension cannot enable queues: they begin so.
            disk.queues.iter_mut().for_each(|queue| queue.enabled = true);
        }
        Ok(())
    }

    fn set_config(&self, disk: &mut Disk, head: ConfigHead, bytes: &[u8]) -> Result<(), Refusal> {
        let wrong = Refusal::Config { offset: head.offset, len: head.size as usize };
        let at = (Space::WRITE_BACK_AT.checked_sub(head.offset)).ok_or(wrong)?;
        // A monitor passes on what a guest writes before it starts its queues, and tells the features no sooner than that.
        let features = if disk.core.features == 0 { self.offered } else { disk.core.features };
        // A front end may write more than the one byte that can change; the rest must stay as it is.
        let wrong = Refusal::Config { offset: head.offset, len: head.size as usize };
        match bytes.get(at as usize) {
            Some(&mode @ 0..=1) if at < head.size && features & feature::CONFIG_WCE != 0 => {
                disk.set_write_cache(mode == 1);
                Ok(())
            }
            _ => Err(wrong),
        }
    }
}

/// Whether a message must wait until nothing touches the guest's memory. While it waits, nothing new is taken.
fn must_wait(disk: &mut Disk, message: &Message) -> bool {
    match message {
        // QEMU disables a queue before it asks for its base. Cloud Hypervisor pauses a machine so, and then saves its memory: nothing may be
        // written to it any more.
        Message::GetVringBase(index) | Message::SetVringEnable(VringState { index, num: 0 }) => must_rest(disk, *index),
        Message::SetFeatures(features) => {
            let changes = (features ^ disk.core.features) & feature::LOG_ALL != 0;
            changes && pause(disk)
        }
        // With the feature chosen already, the log begins here.
        Message::SetLogBase(_) => disk.core.has(feature::LOG_ALL) && disk.core.log.is_none() && pause(disk),
        Message::SetMemTable(_)
        | Message::RemMemReg(_)
        | Message::SetInflightFd(_)
        | Message::ResetDevice
        | Message::SetStatus(0) => pause(disk),
        _ => false,
    }
}

/// Has a queue take nothing new; whether something of it is still under way. What an earlier process had taken counts where it can be done:
/// who goes on from here elsewhere does not know of it.
fn must_rest(disk: &mut Disk, index: u32) -> bool {
    let Some(queue) = disk.queues.get_mut(index as usize) else { return false };
    queue.stopping = true;
    let wait = !queue.is_quiet() && !disk.failed;
    wait || queue.waiting > 0 || !queue.done.is_empty()
}

fn pause(disk: &mut Disk) -> bool {
    let wait = !disk.is_quiet();
    disk.paused = wait;
    wait
}

fn reset(disk: &mut Disk, cx: &ShardContext<'_>) {
    disk.reset();
    (0..disk.queues.len()).for_each(|index| unwatch(cx, index));
}

fn get_inflight(disk: &Disk, wanted: &Inflight) -> Result<Answer, Refusal> {
    let fits = usize::from(wanted.queues) <= disk.queues.len() && u32::from(wanted.queue_size) <= MAX_SIZE;
    if wanted.queues == 0 || wanted.queue_size == 0 || !fits {
        return Err(InflightError::Garbled("for so many queues, or such long ones, there is none").into());
    }
    let (fd, what) = InflightRegion::create(wanted.queues, wanted.queue_size)?;
    Ok(Answer::Inflight(fd, what))
}

/// All of the memory is other memory now.
fn set_memory(disk: &mut Disk, regions: &[Region], fds: Vec<Received>) -> Result<(), Refusal> {
    let replaced = disk.core.memory.replace(regions, fds);
    let changed = disk.memory_changed();
    disk.memory_came();
    // Where there is no memory, no queue finds its parts either: that is not the reason.
    replaced?;
    Ok(changed?)
}

/// Messages that belong to one queue.
fn handle_queue(disk: &mut Disk, cx: &ShardContext<'_>, message: Message, fds: Vec<Received>) -> Result<Answer, Refusal> {
    let (device, has_blocked) = (&disk.core.config.name, &disk.has_blocked);
    let fd = || fds.into_iter().next().map(|fd| Eventfd::new(fd, device, has_blocked)).transpose();
    match message {
        Message::SetVringNum(VringState { index, num }) => {
            stopped(disk, index)?.size = num;
        }
        Message::SetVringBase(VringState { index, num }) => {
            stopped(disk, index)?.base = num;
        }
        Message::SetVringAddr(addr) => {
            disk.queues.get(addr.index as usize).ok_or(Refusal::NoQueue(addr.index))?;
            disk.set_addr(addr)?;
        }
        Message::SetVringEnable(VringState { index, num }) => {
            let queue = disk.queues.get_mut(index as usize).ok_or(Refusal::NoQueue(index))?;
            (queue.enabled, queue.stopping) = (num != 0, false);
        }
        Message::SetVringKick(VringFd { index, .. }) => {
            let fd = fd()?;
            set_kick(disk, cx, index, fd)?;
        }
        Message::SetVringCall(VringFd { index, .. }) => {
            let fd = fd()?;
            disk.queues.get_mut(index as usize).ok_or(Refusal::NoQueue(index))?.set_call(fd);
        }
        Message::SetVringErr(VringFd { index, .. }) => {
            let fd = fd()?;
            disk.queues.get_mut(index as usize).ok_or(Refusal::NoQueue(index))?.set_err(fd);
        }
        Message::GetVringBase(index) => {
            let num = disk.stop_queue(index as usize).ok_or(Refusal::NoQueue(index))?;
            unwatch(cx, index as usize);
            return Ok(Answer::State(VringState { index, num }));
        }
        other => unreachable!("{other:?} belongs to no queue"),
    }
    Ok(Answer::Ack)
}

/// A queue that does not run, whose size and base may change.
fn stopped(disk: &mut Disk, index: u32) -> Result<&mut super::queue::Queue, Refusal> {
    let queue = disk.queues.get_mut(index as usize).ok_or(Refusal::NoQueue(index))?;
    if queue.ring.is_some() { Err(Refusal::QueueRuns(index)) } else { Ok(queue) }
}

/// The descriptor of a queue's kicks; with it the queue starts.
fn set_kick(disk: &mut Disk, cx: &ShardContext<'_>, index: u32, fd: Option<Eventfd>) -> Result<(), Refusal> {
    disk.queues.get(index as usize).ok_or(Refusal::NoQueue(index))?;
    disk.start_queue(index as usize)?;
    match &fd {
        Some(fd) => cx.register(std::os::fd::AsFd::as_fd(fd), KICKS + index).map_err(Refusal::Watch)?,
        None => unwatch(cx, index as usize),
    }
    if let Some(queue) = disk.queues.get_mut(index as usize) {
        queue.kick = fd;
    }
    Ok(())
}

pub(crate) fn unwatch(cx: &ShardContext<'_>, queue: usize) {
    if let Err(error) = cx.unregister(KICKS + queue as u32) {
        tracing::error!(queue, %error, "a queue's kicks cannot be unwatched");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::{
        super::{config::Config, message::VringAddr},
        *,
    };

    const SIZE: u64 = 0x1_0000;

    fn region() -> Region {
        Region { guest: 0x10_0000, size: SIZE, user: 0x20_0000, offset: 0 }
    }

    fn table(disk: &mut Disk, file: &File) -> Result<(), Refusal> {
        let fd = OwnedFd::from(file.try_clone().expect("a descriptor"));
        set_memory(disk, &[region()], vec![fd.into()])
    }

    /// The operator is told what is wrong with the memory, and not that a queue was in it.
    #[test]
    fn a_memory_table_that_is_refused_under_a_running_queue_says_why() {
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd"));
        memory.set_len(SIZE).expect("room for the guest");
        let null = File::open("/dev/null").expect("/dev/null");
        let mut disk = Disk::new(Config::new("disk"), None);
        table(&mut disk, &memory).expect("memory");
        disk.queues[0].size = 16;
        let Region { user, .. } = region();
        let addr = VringAddr { desc: user, avail: user + 0x1000, used: user + 0x2000, ..VringAddr::default() };
        disk.set_addr(addr).expect("within the memory");
        disk.start_queue(0).expect("a queue");
        let refusal = table(&mut disk, &null).expect_err("it is no memory");
        assert!(matches!(refusal, Refusal::Memory(MapError::NotMemory { .. })), "{refusal}");
        assert!(disk.queues[0].is_displaced());
        // A table in which the queue is not is told as that.
        let elsewhere = Region { user: region().user + SIZE, ..region() };
        let fd = OwnedFd::from(memory.try_clone().expect("a descriptor"));
        table(&mut disk, &memory).expect("memory");
        assert!(disk.queues[0].ring.is_some(), "it goes on");
        let refusal = set_memory(&mut disk, &[elsewhere], vec![fd.into()]).expect_err("no queue there");
        assert!(matches!(refusal, Refusal::Ring(_)), "{refusal}");
        disk.forget_front_end();
    }
}
