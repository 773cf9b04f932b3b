//! Devices: create, delete, attach, detach.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
    time::Instant,
};

use millrace_engine::{DiskKey, Placement, ShardHandle, ShardLoad, place};
use millrace_frontends::nvme::{Host, Namespace};
use millrace_sandbox::Group;
use uuid::Uuid;

use super::{Device, DeviceView, Inner, Manager, NamespaceView, volumes::FileIdentity};
use crate::{
    Name, Size,
    devices::{ANSWER, forget, on_shard},
    dirs::tell_closed,
    disks::{Live, ONLY},
    error::ControlError,
    model::{AttachSpec, DeviceKind, DeviceSpec},
    store::{Changes, DeviceRecord, NamespaceRecord, SessionRecord},
};

/// Largest controller identifier (Base 5.1.13.2.1: FFF0h to FFFFh are reserved).
const MAX_CNTLID: u16 = 0xffef;

impl Manager {
    /// Creates a device with its socket.
    pub fn create_device(&self, spec: &DeviceSpec) -> Result<DeviceView, ControlError> {
        // What it looks at may be on a file system that does not answer: once while nothing is locked.
        spec.validate(self.shards.len())?;
        self.reach_all();
        let mut inner = self.lock()?;
        let device = self.make_device(&inner, spec, None, None)?;
        if let Err(error) = self.store.apply(&Changes { put_devices: vec![&device.record], ..Changes::default() }) {
            inner.retire(device);
            return Err(error.into());
        }
        tracing::info!(device = %spec.name, socket = %self.socket(spec).display(), "device created");
        inner.devices.insert(spec.name.clone(), device);
        drop(inner);
        self.device_within(ANSWER, spec.name.as_str())
    }

    /// Deletes a device. Its guest loses it; its volumes stay, those that its guest created as well.
    pub fn delete_device(&self, name: &str) -> Result<(), ControlError> {
        self.reach(name)?;
        let mut inner = self.lock()?;
        let name = inner.device(name)?.record.spec.name.clone();
        let mut orphans: Vec<_> = inner
            .volumes
            .values()
            .filter(|volume| volume.record.created_by.as_ref() == Some(&name))
            .map(|volume| volume.record.clone())
            .collect();
        for record in &mut orphans {
            // What is being changed is stored as it was, with its owner.
            inner.idle_volume(record.spec.name.as_str())?;
            record.created_by = None;
        }
        let (put_volumes, remove_devices) = (orphans.iter().collect(), vec![&name]);
        self.store.apply(&Changes { put_volumes, remove_devices, ..Changes::default() })?;
        self.settle_account(&inner, &name);
        if let Some(device) = inner.devices.remove(&name) {
            let cntlid = device.record.cntlid;
            inner.retire(device);
            inner.forget_controller(cntlid, &*self.host);
        }
        self.retrace_all(&inner);
        for record in orphans {
            inner.adopt(record);
        }
        tracing::info!(device = %name, "device deleted");
        Ok(())
    }

    /// A controller's state, while its guest stands still (docs/migration.md).
    pub fn save_device_state(&self, name: &str) -> Result<Vec<u8>, ControlError> {
        self.reach(name)?;
        let inner = self.lock()?;
        let saved = inner.device(name)?.live()?.save()?;
        tracing::info!(device = name, bytes = saved.len(), "the device's state was saved");
        Ok(saved)
    }

    /// Gives a controller that has no guest yet the state of another, with which its next guest goes on.
    pub fn restore_device_state(&self, name: &str, saved: Vec<u8>) -> Result<(), ControlError> {
        self.reach(name)?;
        let inner = self.lock()?;
        inner.device(name)?.live()?.restore_saved(saved)?;
        tracing::info!(device = name, "the device waits for its guest with the state that was restored");
        Ok(())
    }

    /// Shows a volume to a device's guest, at once.
    pub fn attach(&self, device: &str, spec: &AttachSpec) -> Result<NamespaceView, ControlError> {
        self.reach(device)?;
        let mut inner = self.lock()?;
        inner.check_goes_on(device)?;
        self.settle(&mut inner, device, spec)?;
        self.settle_volume(&inner, spec.volume.as_str());
        let (before, nsid) = (inner.device(device)?.record.clone(), inner.make_attachment(device, spec)?);
        let after = &inner.device(device)?.record;
        if let Err(error) = self.store.apply(&Changes { put_devices: vec![after], ..Changes::default() }) {
            inner.take_attachment(device, nsid);
            if let Some(device) = inner.devices.get_mut(device) {
                device.record = before;
            }
            return Err(error.into());
        }
        self.retrace(&inner, spec.volume.as_str());
        tracing::info!(device, volume = %spec.volume, nsid, "volume attached");
        inner.namespace_view(device, nsid)
    }

    /// Shows a namespace no more, at once. A namespace that the guest had created becomes an ordinary volume.
    pub fn detach(&self, device: &str, nsid: u32) -> Result<(), ControlError> {
        self.reach(device)?;
        let mut inner = self.lock()?;
        let entry = inner.device(device)?;
        let Some(namespace) = entry.record.namespaces.iter().find(|namespace| namespace.nsid == nsid).cloned() else {
            return Err(ControlError::NotAttached { device: entry.record.spec.name.clone(), nsid });
        };
        let mut record = entry.record.clone();
        record.namespaces.retain(|namespace| namespace.nsid != nsid);
        if let Ok(shown) = inner.namespace_of(&namespace.volume) {
            // It may have another stack than when it was attached.
            record.note_kind(&shown.volume.geometry(), namespace.read_only);
        }
        let orphan = inner.volumes.get(&namespace.volume).filter(|volume| volume.record.created_by.is_some());
        if orphan.is_some() {
            inner.idle_volume(namespace.volume.as_str())?;
        }
        let orphan = orphan.map(|volume| super::VolumeRecord { created_by: None, ..volume.record.clone() });
        let (put_volumes, put_devices) = (orphan.iter().collect(), vec![&record]);
        self.store.apply(&Changes { put_volumes, put_devices, ..Changes::default() })?;
        inner.take_attachment(device, nsid);
        self.settle_account(&inner, &record.spec.name);
        if let Some(entry) = inner.devices.get_mut(device) {
            entry.record = record;
        }
        if let Some(record) = orphan {
            inner.adopt(record);
        }
        self.retrace_all(&inner);
        tracing::info!(device, volume = %namespace.volume, nsid, "volume detached");
        Ok(())
    }

    /// Waits until the shard of a device answers, while nothing is locked: one that hangs keeps nobody else waiting, and its devices as they
    /// are.
    fn reach(&self, device: &str) -> Result<(), ControlError> {
        let placed = self.peek().devices.get_key_value(device).map(|(name, device)| {
            let shard = device.live.as_ref().ok().map(Live::shard);
            (name.clone(), self.shards.iter().find(|handle| Some(handle.index()) == shard))
        });
        // What else is wrong with it, what follows tells.
        let Some((name, Some(shard))) = placed else { return Ok(()) };
        match on_shard(&name, shard, |_| ()) {
            Err(silent @ ControlError::Silent { .. }) => Err(silent),
            _ => Ok(()),
        }
    }

    /// The same for all shards. Those that hang are known afterwards, and not waited for with what exists locked.
    pub(super) fn reach_all(&self) {
        for shard in &self.shards {
            let _ = shard.call_within(ANSWER, |_| ());
        }
    }

    /// The same for the shards of the devices that show a volume.
    pub(super) fn reach_users(&self, volume: &str) {
        let inner = self.peek();
        let users = inner.users(volume).filter_map(|(device, _)| Some(device.live.as_ref().ok()?.shard()));
        let shards: BTreeSet<usize> = users.collect();
        drop(inner);
        for shard in self.shards.iter().filter(|shard| shards.contains(&shard.index())) {
            let _ = shard.call_within(ANSWER, |_| ());
        }
    }

    /// Lets go of deleted devices whose commands have finished by now.
    pub(super) fn bury(&self) {
        if self.peek().retiring.is_empty() {
            return;
        }
        self.reach_all();
        self.peek().bury();
    }

    /// Makes a device, without telling anyone but the file system (its socket).
    pub(super) fn make_device(
        &self,
        inner: &Inner,
        spec: &DeviceSpec,
        session: Option<SessionRecord>,
        disk: Option<DiskKey>,
    ) -> Result<Device, ControlError> {
        spec.validate(self.shards.len())?;
        if let Some(functions) = spec.kind.nvme().and_then(|nvme| nvme.functions) {
            functions.0.check().map_err(|why| ControlError::invalid("device", &spec.name, why))?;
        }
        if inner.devices.contains_key(&spec.name) {
            return Err(ControlError::DeviceExists { name: spec.name.clone() });
        }
        let socket = self.socket(spec);
        if let Some(other) = inner.devices.values().find(|other| self.socket(&other.record.spec) == socket) {
            let other = &other.record.spec.name;
            let why = format!("its socket {} is that of device {other}: choose another --socket", socket.display());
            return Err(ControlError::untimely("device", &spec.name, why));
        }
        let taken = |cntlid: &u16| inner.devices.values().any(|device| device.record.cntlid == *cntlid);
        let cntlid = (1..=MAX_CNTLID).find(|cntlid| !taken(cntlid));
        let cntlid = cntlid.ok_or_else(|| ControlError::untimely("device", &spec.name, "there are too many devices"))?;
        let mut spec = spec.clone();
        let given = spec.kind.nvme().and_then(|nvme| nvme.uuid);
        if let Some(uuid) = given {
            inner.check_unused("device", &spec.name, uuid)?;
        }
        let mut uuid = given.unwrap_or_else(Uuid::new_v4);
        if inner.stateless && given.is_none() {
            // The same socket is the same disk to a guest.
            uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, socket.as_os_str().as_bytes());
            let serial = || Some(format!("MR-{:.12}", uuid.simple().to_string()));
            match &mut spec.kind {
                DeviceKind::Nvme(nvme) => nvme.serial = nvme.serial.take().or_else(serial),
                DeviceKind::VirtioBlk(disk) => disk.serial = disk.serial.take().or_else(serial),
            }
        }
        inner.forget_controller(cntlid, &*self.host);
        let record = DeviceRecord { spec, cntlid, uuid, namespaces: Vec::new(), session, disk_kind: None };
        let live = self.start_device(inner, &record, disk).inspect_err(|_| {
            // The keeper may have its socket already.
            forget(&record.spec.name, self.settings.keeper.clone().map(|keeper| (keeper, uuid.into_bytes())));
        })?;
        Ok(Device { record, live: Ok(live), failed: BTreeMap::new(), since: Instant::now() })
    }

    /// Puts a device on its shard.
    pub(super) fn start_device(
        &self,
        inner: &Inner,
        record: &DeviceRecord,
        disk: Option<DiskKey>,
    ) -> Result<Live, ControlError> {
        let shard = self.shard_for(inner, &record.spec, disk);
        let (socket, host) = (self.socket(&record.spec), Arc::clone(&self.host));
        // To a session we connect ourselves.
        let group = self.settings.socket_group.as_ref().filter(|_| record.session.is_none());
        if let (Some(group), Some(folder)) = (group, record.spec.socket.as_deref().and_then(Path::parent)) {
            tell_closed(folder, group);
        }
        let socket = (socket, group.map(Group::gid));
        // An engine knows no user's caps.
        let card = self.settings.card.filter(|_| !record.is_limited());
        Live::start(record, socket, shard, host, self.settings.keeper.as_ref(), card)
    }

    /// Where a device's guests connect.
    pub(super) fn socket(&self, spec: &DeviceSpec) -> PathBuf {
        spec.socket.clone().unwrap_or_else(|| self.settings.run_dir.join(format!("{}.sock", spec.name)))
    }

    fn shard_for(&self, inner: &Inner, spec: &DeviceSpec, disk: Option<DiskKey>) -> &ShardHandle {
        let chosen = spec.shard.or_else(|| place(self.settings.placement, &self.shard_loads(inner), disk));
        chosen.and_then(|shard| self.shards.get(shard)).unwrap_or_else(|| &self.shards[0])
    }

    fn shard_loads(&self, inner: &Inner) -> Vec<ShardLoad> {
        let busy = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let load = |(shard, load): (&ShardHandle, &super::Load)| {
            // One that hangs does nothing, and is no place for anybody.
            let busy_permille = if shard.is_silent() { u32::MAX } else { load.busy_permille };
            ShardLoad { busy_permille, ..ShardLoad::default() }
        };
        let mut loads: Vec<_> = self.shards.iter().zip(busy.iter()).map(load).collect();
        let at: HashMap<usize, usize> = self.shards.iter().enumerate().map(|(at, shard)| (shard.index(), at)).collect();
        for device in inner.devices.values() {
            let Ok(live) = &device.live else { continue };
            let Some(load) = at.get(&live.shard()).and_then(|&at| loads.get_mut(at)) else { continue };
            load.devices += 1;
            if self.settings.placement == Placement::Disk {
                load.disks.extend(device.record.namespaces.iter().filter_map(|namespace| inner.disk(&namespace.volume)));
            }
        }
        loads
    }

    /// Where disks have their shards, a device goes to its first volume's before any guest has seen it.
    fn settle(&self, inner: &mut Inner, name: &str, spec: &AttachSpec) -> Result<(), ControlError> {
        if self.settings.placement != Placement::Disk {
            return Ok(());
        }
        let device = inner.device(name)?;
        let (Ok(live), Some(disk)) = (&device.live, inner.disk(&spec.volume)) else { return Ok(()) };
        let wanted = self.shard_for(inner, &device.record.spec, Some(disk)).index();
        if !device.record.namespaces.is_empty() || wanted == live.shard() || live.status()?.connected {
            return Ok(());
        }
        // What is left of it would take with it what the keeper has of the new one.
        if !live.is_idle()? {
            return Ok(());
        }
        let record = device.record.clone();
        let Some(device) = inner.devices.remove(name) else { return Ok(()) };
        inner.retire(device);
        let live = if inner.retiring.iter().any(|(uuid, ..)| *uuid == record.uuid) {
            Err(ControlError::untimely("device", &record.spec.name, "the shard that it was on does not let go of it"))
        } else {
            self.start_device(inner, &record, Some(disk))
        };
        let (live, result) = match live {
            Ok(live) => (Ok(live), Ok(())),
            Err(error) => (Err(error.to_string()), Err(error)),
        };
        let device = Device { record, live, failed: BTreeMap::new(), since: Instant::now() };
        inner.devices.insert(device.record.spec.name.clone(), device);
        result
    }
}

impl Inner {
    /// Whether a device may write to a volume all that it writes to its first one, if that is what it does.
    fn check_replica(&self, entry: &Device, volume: &super::Volume, read_only: bool) -> Result<(), ControlError> {
        let functions = entry.record.spec.kind.nvme().and_then(|nvme| nvme.functions);
        let Some(functions) = functions.filter(|functions| functions.0.replicate) else { return Ok(()) };
        let (device, name) = (&entry.record.spec.name, &volume.record.spec.name);
        let refused = |why: String| Err(ControlError::invalid("volume", name, why));
        if read_only {
            return refused(format!("device {device} writes everything to it as well: it cannot be read-only there"));
        }
        let first = entry.record.namespaces.iter().find(|namespace| namespace.nsid == 1);
        let Some(first) = first.and_then(|first| self.volumes.get(&first.volume)) else { return Ok(()) };
        let block = u64::from(first.record.block_size().0.bytes());
        let seen = functions.0.window.map_or(u64::MAX, |(start, blocks)| start.saturating_add(blocks).saturating_mul(block));
        let seen = Size(first.record.size().0.min(seen));
        if volume.record.size() < seen {
            return refused(format!("device {device} writes everything to it as well, up to {seen}: it is smaller"));
        }
        Ok(())
    }

    /// Attaches a volume and notes it, without storing it. Returns the identifier.
    pub(super) fn make_attachment(&mut self, device: &str, spec: &AttachSpec) -> Result<u32, ControlError> {
        let entry = self.device(device)?;
        let nsid = free_nsid(&entry.record, spec.nsid)?;
        let volume = self.idle_volume(spec.volume.as_str())?;
        self.check_not_below(&volume.record.spec.name)?;
        if volume.record.spec.stack.is_disk() {
            let name = &volume.record.spec.name;
            let why = format!("it is a disk, which no guest sees: attach a volume of it (share | volume:{name})");
            return Err(ControlError::invalid("volume", name, why));
        }
        let (device_name, volume_name) = (entry.record.spec.name.clone(), volume.record.spec.name.clone());
        if let Some(here) = entry.record.namespaces.iter().find(|namespace| namespace.volume == volume_name) {
            return Err(ControlError::AttachedAlready { device: device_name, volume: volume_name, nsid: here.nsid });
        }
        if let Some(owner) = &volume.record.created_by {
            let why = format!("the guest of device {owner} created it for itself; detach it there first");
            return Err(ControlError::untimely("volume", &volume_name, why));
        }
        if nsid > 1 {
            self.check_replica(entry, volume, spec.read_only)?;
        }
        let kind = std::mem::discriminant(&entry.record.spec.kind);
        let other = self
            .users(volume_name.as_str())
            .map(|(user, _)| &user.record.spec)
            .find(|user| std::mem::discriminant(&user.kind) != kind)
            .map(|user| user.name.clone());
        if let Some(other) = other {
            return Err(ControlError::OtherKind { volume: volume_name, other });
        }
        let shown = Arc::clone(volume.live()?);
        let geometry = shown.volume.geometry();
        entry.live()?.attach(nsid, shown, spec.read_only)?;
        let record = NamespaceRecord { nsid, volume: volume_name, read_only: spec.read_only, attached: true };
        if let Some(entry) = self.devices.get_mut(device) {
            entry.record.namespaces.push(record);
            entry.record.note_kind(&geometry, spec.read_only);
            entry.record.namespaces.sort_by_key(|namespace| namespace.nsid);
        }
        self.lead_limited(self.device(device)?);
        Ok(nsid)
    }

    /// Takes a namespace from its device. A device that has failed shows nothing.
    pub(super) fn take_attachment(&mut self, device: &str, nsid: u32) {
        let Some(device) = self.devices.get_mut(device) else { return };
        let was_shown = device.failed.remove(&nsid).is_none();
        let Ok(live) = &device.live else { return };
        let gone = if was_shown { live.detach(nsid) } else { live.give_up(nsid) };
        if let Err(error) = gone {
            tracing::warn!(device = %device.record.spec.name, nsid, %error, "a namespace could not be detached");
        }
    }

    /// A device goes, at once or when its commands have finished.
    pub(super) fn retire(&mut self, device: Device) {
        let (uuid, name) = (device.record.uuid, device.record.spec.name.clone());
        self.late.forget(&name);
        if device.live.is_err() {
            // Its guest was kept for a worker that brings it back.
            let kept = self.keeper.clone().map(|keeper| (keeper, uuid.into_bytes()));
            forget(&name, kept);
        }
        self.retiring.extend(stop(device).map(|live| (uuid, name, live)));
    }

    /// No device has this controller identifier: what its last one's guest had reserved by it alone goes, so that the next one's does not have it.
    fn forget_controller(&self, cntlid: u16, host: &dyn Host) {
        for namespace in self.volumes.values().filter_map(|volume| volume.live.as_ref().ok()) {
            namespace.forget_controller(cntlid, host);
        }
    }

    /// The same for volumes that were opened: devices may have gone while they were not, here or in a worker before this one, and others have
    /// their controller identifiers by now. Those did not get what was not there.
    pub(super) fn forget_late<'a>(&self, opened: impl IntoIterator<Item = &'a Name>, host: &dyn Host) {
        for (name, volume) in opened.into_iter().filter_map(|name| self.volumes.get_key_value(name)) {
            if let Ok(namespace) = &volume.live {
                namespace.forget_other_controllers(|cntlid| self.has_volume(cntlid, name), host);
            }
        }
    }

    /// Whether the device with this controller identifier shows the volume, or is to.
    fn has_volume(&self, cntlid: u16, volume: &Name) -> bool {
        let device = self.devices.values().find(|device| device.record.cntlid == cntlid);
        device.is_some_and(|device| device.record.namespaces.iter().any(|at| at.volume == *volume))
    }

    /// Lets go of devices whose commands have finished by now.
    pub(super) fn bury(&mut self) {
        for (uuid, name, live) in std::mem::take(&mut self.retiring) {
            match live.is_idle() {
                Ok(false) | Err(ControlError::Silent { .. }) => self.retiring.push((uuid, name, live)),
                idle => {
                    if let Err(error) = idle.and_then(|_| live.remove()) {
                        tracing::error!(device = %name, %error, "a device could not be taken off its shard");
                    }
                }
            }
        }
    }

    /// A volume that a guest had created is the operator's now.
    fn adopt(&mut self, record: super::VolumeRecord) {
        if let Some(volume) = self.volumes.get_mut(&record.spec.name) {
            if let Ok(live) = &volume.live {
                live.share();
            }
            volume.record = record;
        }
    }

    /// The disk below a volume: that of its first file, which is its own or that of what it is made of.
    pub(super) fn disk(&self, volume: &Name) -> Option<DiskKey> {
        self.disk_of(volume.as_str())
    }

    /// As it was when the file was opened: a file system that does not answer now is not asked.
    fn disk_of(&self, volume: &str) -> Option<DiskKey> {
        let volume = self.volumes.get(volume)?;
        volume.record.spec.stack.leaves().into_iter().find_map(|leaf| match leaf.file() {
            Some(path) => volume.graph.as_ref()?.files.get(path).copied().map(FileIdentity::disk),
            None => self.disk_of(leaf.volume()?),
        })
    }

    /// The volume of this name as guests see it.
    pub(super) fn namespace_of(&self, volume: &Name) -> Result<Arc<Namespace>, ControlError> {
        self.volume(volume.as_str())?.live().map(Arc::clone)
    }
}

/// Takes a device off its shard. It comes back when commands are in flight that do not finish: their memory must stay.
pub(super) fn stop(device: Device) -> Option<Live> {
    let name = device.record.spec.name;
    let live = device.live.ok()?;
    match live.close() {
        Ok(true) => {}
        Ok(false) => {
            tracing::error!(
                device = %name,
                "its commands do not finish, or its shard does not answer; it stays there until they do"
            );
            return Some(live);
        }
        Err(error) => {
            tracing::error!(device = %name, %error, "the device could not be stopped");
            return None;
        }
    }
    if let Err(error) = live.remove() {
        tracing::error!(device = %name, %error, "the device could not be taken off its shard");
    }
    None
}

/// The identifier that is asked for if it is free, or the lowest free one.
pub(super) fn free_nsid(record: &DeviceRecord, wanted: Option<u32>) -> Result<u32, ControlError> {
    let device = record.spec.name.clone();
    let DeviceKind::Nvme(nvme) = &record.spec.kind else {
        return match (wanted, record.namespaces.first()) {
            (Some(_), _) => Err(ControlError::NoNamespaces { device }),
            (None, Some(there)) => Err(ControlError::DiskTaken { device, volume: there.volume.clone() }),
            (None, None) => Ok(ONLY),
        };
    };
    let largest = nvme.namespaces;
    let holder = |nsid: u32| record.namespaces.iter().find(|namespace| namespace.nsid == nsid);
    match wanted {
        Some(nsid) if !(1..=largest).contains(&nsid) => Err(ControlError::NsidRange { device, nsid, largest }),
        Some(nsid) => match holder(nsid) {
            Some(holder) => Err(ControlError::NsidTaken { device, nsid, volume: holder.volume.clone() }),
            None => Ok(nsid),
        },
        None => (1..=largest).find(|&nsid| holder(nsid).is_none()).ok_or(ControlError::NoNsidFree { device, largest }),
    }
}
