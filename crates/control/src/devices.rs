//! Devices on their shards: the one place that calls controllers.
//!
//! Every call is made on the device's shard and waited for here, but where an answer is sent; the data path waits for nothing. A shard that
//! hangs is waited for once: then the call is taken back, and nothing of it is done, or it is one that must be done, and is when the shard is
//! back.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{RecvTimeoutError, Sender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{Asker, Volume, trace::Site};
use millrace_engine::{Device, DeviceKey, EngineError, Shard, ShardHandle};
use millrace_frontends::nvme::{
    CardSpec, Config, DeviceError, DevicePhase, DeviceStatus, Host, Kept, Namespace, NamespaceStatus, NvmeDevice,
    SavedStateError,
};
use millrace_keeper::{Key, Kind, Link};
use millrace_vfio_user::{Listener, ListenerError, SocketPlace};

use crate::{Name, api::explain, error::ControlError, manager::DeviceCounters, store::DeviceRecord};

/// How long commands in flight are waited for before a device goes without its memory, or a namespace's volume is let go.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often is looked whether they have finished.
const LOOK: Duration = Duration::from_millis(1);

/// How long a shard may take to come to a call, on a busy machine, too.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// A controller that runs on a shard.
pub(crate) struct LiveDevice {
    name: Name,
    shard: ShardHandle,
    key: DeviceKey,
    /// What its requests are counted under.
    pub(crate) asker: Asker,
    /// Where its guests connect.
    pub(crate) socket: PathBuf,
    /// The keeper, and what the device is called there.
    kept: Option<(Arc<Link>, [u8; 16])>,
    /// The socket's path goes with us: a shard removes no files.
    place: Mutex<Option<SocketPlace>>,
}

/// A namespace to be shown again.
pub(crate) struct Restored {
    pub(crate) nsid: u32,
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) read_only: bool,
    pub(crate) by_guest: bool,
    pub(crate) attached: bool,
}

/// What a device does, as the operator is told.
pub(crate) struct LiveStatus {
    pub(crate) connected: bool,
    /// Clients that have ever connected here; of a virtio disk nobody wants to know.
    pub(crate) clients: u64,
    /// Commands that have not finished.
    pub(crate) in_flight: u32,
    pub(crate) phase: &'static str,
    /// Why it is out of service, by a fault of ours.
    pub(crate) fault: Option<&'static str>,
    /// Version of the state region's layout, where there is one.
    pub(crate) state_layout: Option<u32>,
    pub(crate) counters: DeviceCounters,
}

/// Why a device does nothing any more after a panic of its code.
pub(crate) const FENCED: &str =
    "a fault of ours in it was contained, and its guest is served no more (see the log): delete it and create it again";

/// Why an NVMe device is not served that has ended workers.
const OUT_OF_SERVICE: &str = "two workers in a row ended by faults of ours while they worked for it (see the log): it is served again when \
                              its machine is started anew";

/// The phase of an NVMe controller that does nothing until it is reset.
const FAILED: &str = "failed";

impl LiveStatus {
    /// Whether it is an NVMe controller that has reported a fatal error.
    pub(crate) fn has_failed(&self) -> bool {
        self.phase == FAILED
    }
}

/// What a device says of itself.
pub(crate) type StatusAnswer = (Name, Result<LiveStatus, ControlError>);

/// What a device asks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    /// The namespace; 1 of a virtio disk.
    pub(crate) nsid: u32,
    /// Commands that wait for the volume.
    pub(crate) in_flight: u32,
    /// Commands that have waited for it, and do no more.
    pub(crate) finished: u64,
}

impl LiveDevice {
    /// Makes the device's socket and puts it on the shard.
    pub(crate) fn start(
        record: &DeviceRecord,
        (socket, group): (PathBuf, Option<u32>),
        shard: &ShardHandle,
        host: Arc<dyn Host>,
        keeper: Option<&Arc<Link>>,
        card: Option<CardSpec>,
    ) -> Result<Self, ControlError> {
        let name = record.spec.name.clone();
        let kept = keeper.map(|link| (Arc::clone(link), record.uuid.into_bytes()));
        let mut listener =
            listen(&socket, group, kept.as_ref()).map_err(|source| ControlError::Socket { device: name.clone(), source })?;
        let place_of_socket = listener.take_place();
        let session = record.session.is_some();
        let config = Config { card, session, ..record.spec.controller_config(record.cntlid, record.uuid) };
        let place = kept.clone().map(|(link, owner)| Kept::new(link, owner));
        let (key, asker) = on_shard(&name, shard, move |shard| {
            let mut asker = Asker::NOBODY;
            let key = shard.add_device_with(|cx| {
                asker = cx.asker();
                let device = match &place {
                    Some(place) => NvmeDevice::kept(config, listener, host, place, cx)?,
                    None => NvmeDevice::new(config, listener, host, cx)?,
                };
                Ok::<_, DeviceError>(Box::new(device) as Box<dyn Device>)
            });
            key.map(|key| (key, asker))
        })??;
        Ok(Self { name, shard: shard.clone(), key, asker, socket, kept, place: Mutex::new(place_of_socket) })
    }

    /// Has what the worker before this one had begun finished, as far as other devices must not come in between. Waits for it.
    ///
    /// For the shard to begin with it, without a limit: a guest that went on before could write between a pair's Compare, which has succeeded,
    /// and its Write, and be overwritten. Once begun, a pair keeps others from its blocks itself.
    pub(crate) fn finish_pairs(&self) -> Result<(), ControlError> {
        let key = self.key;
        let finish = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, cx| device.finish_pairs(cx));
        let done = || {
            let (reply, answer) = sync_channel(1);
            self.shard.call(move |shard| {
                // Who asks waits for it.
                let _ = reply.send(finish(shard));
            })?;
            let done = match answer.recv_timeout(ANSWER) {
                Err(RecvTimeoutError::Timeout) => {
                    let (device, shard) = (&self.name, self.shard.index());
                    tracing::error!(%device, shard, "all guests wait for its shard, which does not answer, to finish what was begun");
                    answer.recv().ok()
                }
                answered => answered.ok(),
            };
            let done = done.ok_or(EngineError::NoAnswer { shard: self.shard.index() })?;
            done.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
        };
        if !wait_until(done)? {
            tracing::warn!(device = %self.name, "what the worker before this one had begun is not finished yet");
        }
        Ok(())
    }

    /// The same while others are served. Neither the end of a pair is waited for, nor a shard that hangs: then nothing has begun, and it is to be
    /// asked again.
    pub(crate) fn begin_pairs(&self) -> Result<(), ControlError> {
        let key = self.key;
        let begin = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, cx| device.finish_pairs(cx));
        let begun = on_shard(&self.name, &self.shard, begin)?;
        begun.map(|_| ()).ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }

    /// All that could be restored is: goes on with the guest of the worker before this one, if there is one. Where its shard does not answer,
    /// it does so when that is back.
    pub(crate) fn resume(&self) -> Result<(), ControlError> {
        let key = self.key;
        let resume = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, cx| device.resume(cx));
        on_shard_surely(&self.name, &self.shard, resume)?.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }

    /// While its guest waits to go on: which of these namespaces the guest had. `None`: it does not wait.
    pub(crate) fn misses(&self, nsids: Vec<u32>) -> Result<Option<Vec<u32>>, ControlError> {
        self.call(move |device| device.misses(&nsids))
    }

    /// Has it take no more commands, for another worker is about to go on.
    pub(crate) fn hold(&self) -> Result<(), ControlError> {
        self.call(NvmeDevice::hold)
    }

    /// Whether the commands of a device that is held have finished.
    pub(crate) fn is_held(&self) -> Result<bool, ControlError> {
        self.call(|device| device.is_held())
    }

    /// Leaves it to another worker, as one of this version of the state region understands it.
    pub(crate) fn leave(&self, state_version: u16) -> Result<(), ControlError> {
        self.call(move |device| device.leave(state_version))
    }

    /// Nobody goes back to the worker before this one.
    pub(crate) fn settle(&self) -> Result<(), ControlError> {
        self.call(NvmeDevice::settle)
    }

    /// The shard's number.
    pub(crate) fn shard(&self) -> usize {
        self.shard.index()
    }

    /// Shows a volume under an identifier.
    pub(crate) fn attach(&self, nsid: u32, namespace: Arc<Namespace>, read_only: bool) -> Result<(), ControlError> {
        self.call(move |device| device.attach(Some(nsid), namespace, read_only))??;
        Ok(())
    }

    /// Brings back what the device had before a restart.
    pub(crate) fn restore(&self, was: Restored) -> Result<(), ControlError> {
        self.call(move |device| match was {
            Restored { by_guest: true, nsid, namespace, attached, .. } => device.restore(nsid, namespace, attached),
            Restored { attached: true, nsid, namespace, read_only, .. } => {
                device.restore_attached(nsid, namespace, read_only)
            }
            Restored { nsid, namespace, read_only, .. } => device.restore_detached(nsid, namespace, read_only),
        })??;
        Ok(())
    }

    /// Shows a namespace no more, and waits for its commands.
    pub(crate) fn detach(&self, nsid: u32) -> Result<(), ControlError> {
        self.tell(move |device| device.detach(nsid))??;
        if !wait_until(|| self.call(move |device| device.is_detached(nsid)))? {
            tracing::warn!(device = %self.name, nsid, "commands are still in flight on a namespace that was detached");
        }
        Ok(())
    }

    /// A namespace that could not be shown again is not going to be.
    pub(crate) fn give_up(&self, nsid: u32) -> Result<(), ControlError> {
        self.tell(move |device| device.give_up(nsid))
    }

    /// Has its reads and writes go to a namespace's volume by way of another one, which leads there; `None`: straight.
    pub(crate) fn lead(&self, nsid: u32, way: Option<Arc<dyn Volume>>) -> Result<(), ControlError> {
        self.tell(move |device| device.lead(nsid, way))
    }

    /// Tells the guest that a namespace has another size or format.
    pub(crate) fn namespace_changed(&self, nsid: u32) -> Result<(), ControlError> {
        self.tell(move |device| device.namespace_changed(nsid))
    }

    /// Passes a notice of another guest's reservation on; the device knows whether its own host is meant.
    pub(crate) fn reservation_notice(
        &self,
        namespace: Arc<Namespace>,
        notify: Vec<([u8; 16], u8)>,
    ) -> Result<(), ControlError> {
        self.call(move |device| device.reservation_notice(&namespace, &notify))
    }

    /// Has its guest's requests recorded, or no more.
    pub(crate) fn trace(&self, site: Site) -> Result<(), ControlError> {
        self.tell(move |device| device.trace(site))
    }

    /// Its state. Waits for a while until its guest stands still.
    pub(crate) fn save(&self) -> Result<Vec<u8>, ControlError> {
        let mut answer = Err(SavedStateError::Running);
        wait_until(|| {
            answer = self.call(NvmeDevice::save_state)?;
            Ok(answer != Err(SavedStateError::Running))
        })?;
        answer.map_err(|source| ControlError::SavedState { device: self.name.clone(), source })
    }

    /// Gives it a saved state, before its guest connects.
    pub(crate) fn restore_saved(&self, saved: Vec<u8>) -> Result<(), ControlError> {
        let taken = self.call(move |device| device.restore_state(&saved))?;
        taken.map_err(|source| ControlError::SavedState { device: self.name.clone(), source })
    }

    /// What it is doing.
    pub(crate) fn status(&self) -> Result<LiveStatus, ControlError> {
        self.call(|device| device.status()).map(LiveStatus::from)
    }

    /// Has it say what it is doing, when its shard comes to it.
    pub(crate) fn ask_status(&self, answers: Sender<StatusAnswer>) -> Result<(), ControlError> {
        let (key, name) = (self.key, self.name.clone());
        let answer = move |shard: &mut Shard| {
            let status = shard.with_device(key, |device: &mut NvmeDevice, _| device.status());
            let status = status.map(LiveStatus::from).ok_or_else(|| ControlError::Fenced { device: name.clone() });
            // Who asked may have waited for long enough.
            let _ = answers.send((name, status));
        };
        Ok(self.shard.call(answer)?)
    }

    /// Has it say what it asks of its volumes, when its shard comes to it.
    pub(crate) fn ask_work(&self, answers: Sender<(Name, Vec<Work>)>) -> Result<(), ControlError> {
        let (key, name) = (self.key, self.name.clone());
        let answer = move |shard: &mut Shard| {
            let Some(status) = shard.with_device(key, |device: &mut NvmeDevice, _| device.status()) else { return };
            let work = |n: &NamespaceStatus| Work { nsid: n.nsid, in_flight: n.in_flight, finished: n.finished };
            // Who asked may have waited for long enough.
            let _ = answers.send((name, status.namespaces.iter().map(work).collect()));
        };
        Ok(self.shard.call(answer)?)
    }

    /// Its guest loses it, and nobody is let in any more. Waits for its commands; whether they have all finished.
    pub(crate) fn close(&self) -> Result<bool, ControlError> {
        let key = self.key;
        let close = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, cx| device.close(cx));
        let closed = on_shard_surely(&self.name, &self.shard, close);
        // Commands may take their time to finish; a device that comes in this one's place need not wait for them.
        drop(self.place.lock().unwrap_or_else(PoisonError::into_inner).take());
        yes_or_not_yet(closed.and_then(|_| wait_until(|| self.is_idle())))
    }

    /// Whether all commands of a closed device have finished.
    pub(crate) fn is_idle(&self) -> Result<bool, ControlError> {
        let key = self.key;
        // One that a fault of ours fenced answers nothing any more, and is as idle as it will be.
        let idle = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, _| device.is_idle());
        Ok(on_shard(&self.name, &self.shard, idle)?.unwrap_or(true))
    }

    /// Takes it off its shard; its socket goes.
    pub(crate) fn remove(self) -> Result<(), ControlError> {
        let key = self.key;
        on_shard_surely(&self.name, &self.shard, move |shard| drop(shard.remove_device(key)))?;
        forget(&self.name, self.kept);
        Ok(())
    }

    /// Asks it for something that it does in time, or never.
    fn call<R: Send + 'static>(&self, call: impl FnOnce(&mut NvmeDevice) -> R + Send + 'static) -> Result<R, ControlError> {
        let key = self.key;
        let call = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, _| call(device));
        on_shard(&self.name, &self.shard, call)?.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }

    /// Tells it something that is so: it learns of it in any case.
    fn tell<R: Send + 'static>(&self, call: impl FnOnce(&mut NvmeDevice) -> R + Send + 'static) -> Result<R, ControlError> {
        let key = self.key;
        let call = move |shard: &mut Shard| shard.with_device(key, |device: &mut NvmeDevice, _| call(device));
        on_shard_surely(&self.name, &self.shard, call)?.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }
}

/// Has a shard do something for a device, and waits for that: it is done then, or never will be.
pub(crate) fn on_shard<R: Send + 'static>(
    device: &Name,
    shard: &ShardHandle,
    call: impl FnOnce(&mut Shard) -> R + Send + 'static,
) -> Result<R, ControlError> {
    shard.call_within(ANSWER, call).map_err(|error| match error {
        EngineError::Silent { shard } => {
            ControlError::Silent { device: device.clone(), shard, millis: ANSWER.as_millis() as u64 }
        }
        error => error.into(),
    })
}

/// The same of what is done in any case: by a shard that does not answer, when it is back.
pub(crate) fn on_shard_surely<R: Send + 'static>(
    device: &Name,
    shard: &ShardHandle,
    call: impl FnOnce(&mut Shard) -> R + Send + 'static,
) -> Result<R, ControlError> {
    let (reply, answer) = sync_channel(1);
    shard.call(move |shard| {
        // Who asked may have waited for long enough.
        let _ = reply.send(call(shard));
    })?;
    // A shard takes its messages in turn: when it has come to this one, that one is done.
    on_shard(device, shard, |_| ())?;
    answer.try_recv().map_err(|_| EngineError::NoAnswer { shard: shard.index() }.into())
}

/// What a shard that does not answer has not done yet.
pub(crate) fn yes_or_not_yet(done: Result<bool, ControlError>) -> Result<bool, ControlError> {
    match done {
        Err(ControlError::Silent { .. }) => Ok(false),
        done => done,
    }
}

/// The socket that the worker before this one listened on, or a new one; the group may connect, too.
pub(crate) fn listen(
    socket: &Path,
    group: Option<u32>,
    kept: Option<&(Arc<Link>, [u8; 16])>,
) -> Result<Listener, ListenerError> {
    let held = kept.and_then(|(link, owner)| link.take(Key::of(*owner, Kind::LISTENER)));
    match held.map(|held| Listener::resume(held.fd, socket)) {
        Some(Ok(listener)) => {
            // Whoever has connected already goes on.
            if let Some(Err(error)) = group.map(|group| listener.open_to(group)) {
                let why = explain(&error);
                tracing::error!(%why, "a device's socket stays as the last worker left it");
            }
            Ok(listener)
        }
        // Its path is gone, or is another's.
        Some(Err(_)) | None => Listener::bind_for(socket, group),
    }
}

/// A device is gone for good: nothing of it is kept.
pub(crate) fn forget(device: &Name, kept: Option<(Arc<Link>, [u8; 16])>) {
    if let Some((link, owner)) = kept
        && let Err(error) = link.drop_owner(owner)
    {
        tracing::warn!(%device, %error, "the keeper could not be told that the device is gone");
    }
}

/// Asks until the answer is yes; `false` when patience has an end.
pub(crate) fn wait_until(mut done: impl FnMut() -> Result<bool, ControlError>) -> Result<bool, ControlError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if done()? {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(LOOK);
    }
}

impl From<DeviceStatus> for LiveStatus {
    fn from(status: DeviceStatus) -> Self {
        let counters = status.counters;
        Self {
            connected: status.connected,
            clients: status.clients,
            in_flight: status.in_flight,
            phase: match status.phase {
                DevicePhase::Disabled => "disabled",
                DevicePhase::Ready => "ready",
                DevicePhase::Resetting => "resetting",
                DevicePhase::ShutDown => "shut down",
                DevicePhase::Failed => FAILED,
            },
            fault: match (status.fenced, status.out_of_service) {
                (true, _) => Some(FENCED),
                (false, true) => Some(OUT_OF_SERVICE),
                (false, false) => None,
            },
            state_layout: Some(status.state_layout),
            counters: DeviceCounters {
                read_commands: counters.read_commands,
                write_commands: counters.write_commands,
                other_commands: counters.other_commands,
                bytes_read: counters.bytes_read,
                bytes_written: counters.bytes_written,
                errors: counters.errors,
                media_errors: counters.media_errors,
                interrupts: counters.interrupts,
            },
        }
    }
}
