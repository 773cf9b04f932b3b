//! virtio disks on their shards, and what the manager asks of any device, whatever it speaks.
//!
//! As in `devices.rs`, every call is made on the device's shard and waited for here.

use std::{
    os::fd::AsFd,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, mpsc::Sender},
};

use millrace_block::{Asker, Volume, trace::Site};
use millrace_engine::{Device, DeviceKey, Shard, ShardContext, ShardHandle};
use millrace_frontends::{
    nvme::{CardSpec, Host, Namespace},
    virtio_blk::{DeviceError, DevicePhase, DeviceStatus, VirtioBlkDevice},
};
use millrace_keeper::{Key, Kind, Link};
use millrace_vfio_user::SocketPlace;

use crate::{
    Name,
    devices::{
        FENCED, LiveDevice, LiveStatus, Restored, StatusAnswer, Work, forget, listen, on_shard, on_shard_surely, wait_until,
        yes_or_not_yet,
    },
    error::ControlError,
    manager::DeviceCounters,
    model::DeviceKind,
    store::DeviceRecord,
};

/// The identifier under which a virtio disk's only volume is stored and shown.
pub(crate) const ONLY: u32 = 1;

/// A device of either kind that runs on a shard.
pub(crate) enum Live {
    Controller(LiveDevice),
    Disk(LiveDisk),
}

impl Live {
    /// Makes the device's socket, for a group too if there is one, and puts it on the shard.
    pub(crate) fn start(
        record: &DeviceRecord,
        socket: (PathBuf, Option<u32>),
        shard: &ShardHandle,
        host: Arc<dyn Host>,
        keeper: Option<&Arc<Link>>,
        card: Option<CardSpec>,
    ) -> Result<Self, ControlError> {
        match &record.spec.kind {
            DeviceKind::Nvme(_) => LiveDevice::start(record, socket, shard, host, keeper, card).map(Self::Controller),
            DeviceKind::VirtioBlk(_) => LiveDisk::start(record, socket, shard, keeper).map(Self::Disk),
        }
    }

    /// Has what the worker before this one had begun finished, as far as other devices must not come in between: a virtio disk has
    /// nothing of the kind.
    pub(crate) fn finish_pairs(&self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.finish_pairs(),
            Self::Disk(_) => Ok(()),
        }
    }

    /// The same while others are served ([`LiveDevice::begin_pairs`]).
    pub(crate) fn begin_pairs(&self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.begin_pairs(),
            Self::Disk(_) => Ok(()),
        }
    }

    /// All that could be restored is: goes on with the guest of the worker before this one, if there is one. A virtio disk's guest
    /// connects again by itself.
    pub(crate) fn resume(&self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.resume(),
            Self::Disk(_) => Ok(()),
        }
    }

    /// Has it take no more commands, for another worker is about to go on.
    pub(crate) fn hold(&self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.hold(),
            Self::Disk(disk) => disk.call(|device, _| device.hold()),
        }
    }

    /// Whether the commands of a device that is held have finished.
    pub(crate) fn is_held(&self) -> Result<bool, ControlError> {
        match self {
            Self::Controller(device) => device.is_held(),
            Self::Disk(disk) => disk.call(|device, cx| device.is_held(cx)),
        }
    }

    /// Leaves it to another worker, as one of this version of the state region understands it. A virtio disk's state is its machine's, which
    /// connects again.
    pub(crate) fn leave(&self, state_version: u16) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.leave(state_version),
            Self::Disk(_) => Ok(()),
        }
    }

    /// Nobody goes back to the worker before this one.
    pub(crate) fn settle(&self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.settle(),
            Self::Disk(_) => Ok(()),
        }
    }

    /// Where its guests connect.
    pub(crate) fn socket(&self) -> &PathBuf {
        match self {
            Self::Controller(device) => &device.socket,
            Self::Disk(disk) => &disk.socket,
        }
    }

    /// The shard's number.
    pub(crate) fn shard(&self) -> usize {
        match self {
            Self::Controller(device) => device.shard(),
            Self::Disk(disk) => disk.shard.index(),
        }
    }

    /// What its requests are counted under.
    pub(crate) fn asker(&self) -> Asker {
        match self {
            Self::Controller(device) => device.asker,
            Self::Disk(disk) => disk.asker,
        }
    }

    /// Shows a volume.
    pub(crate) fn attach(&self, nsid: u32, namespace: Arc<Namespace>, read_only: bool) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.attach(nsid, namespace, read_only),
            Self::Disk(disk) => disk.attach(&namespace, read_only),
        }
    }

    /// Brings back what the device had before a restart.
    pub(crate) fn restore(&self, was: Restored) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.restore(was),
            Self::Disk(disk) => disk.attach(&was.namespace, was.read_only),
        }
    }

    /// Its state, while its guest stands still.
    pub(crate) fn save(&self) -> Result<Vec<u8>, ControlError> {
        match self {
            Self::Controller(device) => device.save(),
            Self::Disk(disk) => Err(disk.has_no_state()),
        }
    }

    /// Gives it a saved state, before its guest connects.
    pub(crate) fn restore_saved(&self, saved: Vec<u8>) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.restore_saved(saved),
            Self::Disk(disk) => Err(disk.has_no_state()),
        }
    }

    /// Shows a volume no more, and waits for its commands.
    pub(crate) fn detach(&self, nsid: u32) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.detach(nsid),
            Self::Disk(disk) => disk.detach(),
        }
    }

    /// A volume that could not be shown again is not going to be.
    pub(crate) fn give_up(&self, nsid: u32) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.give_up(nsid),
            Self::Disk(disk) => disk.tell(VirtioBlkDevice::let_in),
        }
    }

    /// Has its reads and writes go to a volume by way of another one, which leads there; `None`: straight. No session is a virtio disk.
    pub(crate) fn lead(&self, nsid: u32, way: Option<Arc<dyn Volume>>) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.lead(nsid, way),
            Self::Disk(_) => Ok(()),
        }
    }

    /// Tells the guest that a volume has another size or format.
    pub(crate) fn namespace_changed(&self, nsid: u32) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.namespace_changed(nsid),
            Self::Disk(disk) => disk.tell(|device, _| device.volume_changed()),
        }
    }

    /// Passes a notice of another guest's reservation on; a virtio disk knows no reservations, and shares no volume with what does.
    pub(crate) fn reservation_notice(
        &self,
        namespace: Arc<Namespace>,
        notify: Vec<([u8; 16], u8)>,
    ) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.reservation_notice(namespace, notify),
            Self::Disk(_) => Ok(()),
        }
    }

    /// Has its guest's requests recorded, or no more.
    pub(crate) fn trace(&self, site: Site) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.trace(site),
            Self::Disk(disk) => disk.tell(move |device, _| device.trace(site)),
        }
    }

    /// What it is doing.
    pub(crate) fn status(&self) -> Result<LiveStatus, ControlError> {
        match self {
            Self::Controller(device) => device.status(),
            Self::Disk(disk) => disk.call(|device, _| device.status()).map(LiveStatus::from),
        }
    }

    /// Has it say what it is doing, when its shard comes to it.
    pub(crate) fn ask_status(&self, answers: Sender<StatusAnswer>) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.ask_status(answers),
            Self::Disk(disk) => disk.ask_status(answers),
        }
    }

    /// Has it say what it asks of its volumes, when its shard comes to it.
    pub(crate) fn ask_work(&self, answers: Sender<(Name, Vec<Work>)>) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.ask_work(answers),
            Self::Disk(disk) => disk.ask_work(answers),
        }
    }

    /// Its guest loses it, and nobody is let in any more. Waits for its commands; whether they have all finished.
    pub(crate) fn close(&self) -> Result<bool, ControlError> {
        match self {
            Self::Controller(device) => device.close(),
            Self::Disk(disk) => disk.close(),
        }
    }

    /// Whether all commands of a closed device have finished.
    pub(crate) fn is_idle(&self) -> Result<bool, ControlError> {
        match self {
            Self::Controller(device) => device.is_idle(),
            Self::Disk(disk) => disk.is_idle(),
        }
    }

    /// Takes it off its shard; its socket goes.
    pub(crate) fn remove(self) -> Result<(), ControlError> {
        match self {
            Self::Controller(device) => device.remove(),
            Self::Disk(disk) => disk.remove(),
        }
    }

    /// Has a disk's code fail.
    #[cfg(test)]
    pub(crate) fn fail_disk(&self) -> Result<(), ControlError> {
        let Self::Disk(disk) = self else { panic!("a virtio disk") };
        disk.call(|_, _| panic!("a fault of the test"))
    }
}

/// A virtio disk that runs on a shard.
pub(crate) struct LiveDisk {
    name: Name,
    shard: ShardHandle,
    key: DeviceKey,
    asker: Asker,
    socket: PathBuf,
    /// Who holds its socket while no worker does, and under what name.
    kept: Option<(Arc<Link>, [u8; 16])>,
    /// The socket's path goes with us: a shard removes no files.
    place: Mutex<Option<SocketPlace>>,
}

impl LiveDisk {
    fn has_no_state(&self) -> ControlError {
        ControlError::invalid("device", &self.name, "a virtio disk's state is saved by its machine's monitor".to_owned())
    }

    fn start(
        record: &DeviceRecord,
        (socket, group): (PathBuf, Option<u32>),
        shard: &ShardHandle,
        keeper: Option<&Arc<Link>>,
    ) -> Result<Self, ControlError> {
        let name = record.spec.name.clone();
        let kept = keeper.map(|link| (Arc::clone(link), record.uuid.into_bytes()));
        let mut listener =
            listen(&socket, group, kept.as_ref()).map_err(|source| ControlError::Socket { device: name.clone(), source })?;
        if let Some((link, owner)) = &kept
            && let Err(error) = link.put(Key::of(*owner, Kind::LISTENER), listener.as_fd())
        {
            tracing::warn!(device = %name, %error, "its socket is not kept: its machine may have to try more than once to connect again");
        }
        let place = listener.take_place();
        let (config, kind) = (record.spec.disk_config(), record.disk_kind.map(Into::into));
        // A guest that comes before its volume is back would see an empty disk.
        let hold = !record.namespaces.is_empty();
        let (key, asker) = on_shard(&name, shard, move |shard| {
            let mut asker = Asker::NOBODY;
            let key = shard.add_device_with(|cx| {
                asker = cx.asker();
                let device = VirtioBlkDevice::new(config, kind, listener, hold, cx)?;
                Ok::<_, DeviceError>(Box::new(device) as Box<dyn Device>)
            });
            key.map(|key| (key, asker))
        })??;
        Ok(Self { name, shard: shard.clone(), key, asker, socket, kept, place: Mutex::new(place) })
    }

    fn attach(&self, namespace: &Namespace, read_only: bool) -> Result<(), ControlError> {
        let (volume, modes) = (Arc::clone(&namespace.volume), Arc::clone(&namespace.write_modes));
        self.call(move |device, cx| device.attach(volume, modes, read_only, cx))??;
        Ok(())
    }

    fn detach(&self) -> Result<(), ControlError> {
        self.tell(|device, _| device.detach())?;
        if !wait_until(|| self.call(|device, _| device.is_detached()))? {
            tracing::warn!(device = %self.name, "requests are still in flight on a volume that was detached");
        }
        Ok(())
    }

    fn close(&self) -> Result<bool, ControlError> {
        let key = self.key;
        let close = move |shard: &mut Shard| shard.with_device(key, |device: &mut VirtioBlkDevice, cx| device.close(cx));
        let closed = on_shard_surely(&self.name, &self.shard, close);
        drop(self.place.lock().unwrap_or_else(PoisonError::into_inner).take());
        yes_or_not_yet(closed.and_then(|_| wait_until(|| self.is_idle())))
    }

    fn is_idle(&self) -> Result<bool, ControlError> {
        let key = self.key;
        let idle = move |shard: &mut Shard| shard.with_device(key, |device: &mut VirtioBlkDevice, cx| device.is_idle(cx));
        Ok(on_shard(&self.name, &self.shard, idle)?.unwrap_or(true))
    }

    fn remove(self) -> Result<(), ControlError> {
        let key = self.key;
        on_shard_surely(&self.name, &self.shard, move |shard| drop(shard.remove_device(key)))?;
        forget(&self.name, self.kept);
        Ok(())
    }

    fn ask_status(&self, answers: Sender<StatusAnswer>) -> Result<(), ControlError> {
        let (key, name) = (self.key, self.name.clone());
        let answer = move |shard: &mut Shard| {
            let status = shard.with_device(key, |device: &mut VirtioBlkDevice, _| device.status());
            let status = status.map(LiveStatus::from).ok_or_else(|| ControlError::Fenced { device: name.clone() });
            // Who asked may have waited for long enough.
            let _ = answers.send((name, status));
        };
        Ok(self.shard.call(answer)?)
    }

    fn ask_work(&self, answers: Sender<(Name, Vec<Work>)>) -> Result<(), ControlError> {
        let (key, name) = (self.key, self.name.clone());
        let answer = move |shard: &mut Shard| {
            let Some(status) = shard.with_device(key, |device: &mut VirtioBlkDevice, _| device.status()) else { return };
            let DeviceStatus { in_flight, counters, .. } = status;
            let begun = counters.read_commands + counters.write_commands + counters.other_commands;
            let work = Work { nsid: ONLY, in_flight, finished: begun.saturating_sub(in_flight.into()) };
            // Who asked may have waited for long enough.
            let _ = answers.send((name, vec![work]));
        };
        Ok(self.shard.call(answer)?)
    }

    fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut VirtioBlkDevice, &mut ShardContext<'_>) -> R + Send + 'static,
    ) -> Result<R, ControlError> {
        let key = self.key;
        let answer = on_shard(&self.name, &self.shard, move |shard| shard.with_device(key, call))?;
        answer.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }

    /// Tells it something that is so: it learns of it in any case.
    fn tell<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut VirtioBlkDevice, &mut ShardContext<'_>) -> R + Send + 'static,
    ) -> Result<R, ControlError> {
        let key = self.key;
        let answer = on_shard_surely(&self.name, &self.shard, move |shard| shard.with_device(key, call))?;
        answer.ok_or_else(|| ControlError::Fenced { device: self.name.clone() })
    }
}

impl From<DeviceStatus> for LiveStatus {
    fn from(status: DeviceStatus) -> Self {
        let counters = status.counters;
        Self {
            connected: status.connected,
            clients: 0,
            in_flight: status.in_flight,
            phase: match status.phase {
                DevicePhase::Stopped => "stopped",
                DevicePhase::Running => "running",
                DevicePhase::Failed => "failed",
            },
            fault: status.fenced.then_some(FENCED),
            state_layout: None,
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
