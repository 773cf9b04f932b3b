//! Sessions: controllers that belong to an application, not to a guest. Each shows one volume to one process, and goes with its connection.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{Device, Inner, Manager};
use crate::{
    Name,
    error::ControlError,
    model::{AttachSpec, DeviceKind, DeviceSpec, GroupCaps, NvmeSpec},
    store::{Changes, DeviceRecord, SessionRecord, StoreError},
};

/// Sessions that one user may have at a time, unless another number is said.
pub(crate) const SESSIONS: usize = 64;

/// I/O queue pairs of a session's controller.
const QUEUES: u16 = 4;

/// How long a connection that was made may wait to be taken by the device's shard.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);

/// What an application asks for.
#[derive(Clone, Debug)]
pub(crate) struct SessionSpec {
    /// The volume's name.
    pub(crate) volume: String,
    /// It will not write.
    pub(crate) read_only: bool,
}

/// A session that is granted, and only has to be made.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Granted {
    /// The name that its device will have: no worker has one of that name.
    pub(crate) name: Name,
    /// Whose it is.
    pub(crate) uid: u32,
    /// The volume's name.
    pub(crate) volume: String,
    /// It will not write.
    pub(crate) read_only: bool,
    /// The caps that its user has.
    #[serde(default, skip_serializing_if = "GroupCaps::is_empty")]
    pub(crate) caps: GroupCaps,
}

/// The sessions that other workers have, by name: whose each is.
pub(crate) type Elsewhere = BTreeMap<String, u32>;

/// Who asks, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    /// The user.
    pub(crate) uid: u32,
}

impl Asker {
    /// The names that the user's sessions may have.
    pub(crate) fn session_names(self) -> impl Iterator<Item = Name> {
        (1..=u16::MAX).map(move |number| format!("app-{}-{number}", self.uid).parse().expect("numbers make a name"))
    }

    /// Root and the daemon's own user may open every volume.
    pub(crate) fn may_all(self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }

    /// There is no such name left.
    pub(crate) fn has_too_many(self) -> ControlError {
        ControlError::TooManySessions { uid: self.uid, limit: usize::from(u16::MAX) }
    }
}

impl Manager {
    /// Makes a controller that shows the volume, and connects to it in the application's place.
    ///
    /// `elsewhere` is asked while nothing else is made here: so no name is given twice.
    pub(crate) fn open_session(
        &self,
        asker: Asker,
        spec: &SessionSpec,
        elsewhere: &dyn Fn() -> Elsewhere,
    ) -> Result<(Name, UnixStream), ControlError> {
        self.reach_all();
        let mut inner = self.lock()?;
        let elsewhere = elsewhere();
        self.may_open(&inner, asker, spec, &elsewhere)?;
        let is_free = |name: &Name| !inner.devices.contains_key(name) && !elsewhere.contains_key(name.as_str());
        let name = asker.session_names().find(is_free).ok_or_else(|| asker.has_too_many())?;
        let SessionSpec { volume, read_only } = spec.clone();
        let granted = Granted { name, uid: asker.uid, volume, read_only, caps: self.caps_of(&inner, asker.uid) };
        let socket = self.make_session(&mut inner, &granted)?;
        match UnixStream::connect(&socket) {
            Ok(stream) => Ok((granted.name, stream)),
            Err(source) => {
                inner.forget_session(self, &granted.name);
                Err(ControlError::SessionLost { device: granted.name, source })
            }
        }
    }

    /// Whether the user may have such a session, wherever the volume is, and the caps that hold for it.
    pub(crate) fn admit_session(
        &self,
        asker: Asker,
        spec: &SessionSpec,
        elsewhere: &Elsewhere,
    ) -> Result<GroupCaps, ControlError> {
        let inner = self.lock()?;
        self.may_open(&inner, asker, spec, elsewhere)?;
        Ok(self.caps_of(&inner, asker.uid))
    }

    /// Makes a session that the daemon's own worker has granted; the socket on which it waits to be connected to.
    ///
    /// The user's caps may have changed since it was granted: what his sessions here obey by now holds for this one as well.
    pub(crate) fn receive_session(&self, granted: &Granted) -> Result<PathBuf, ControlError> {
        self.reach_all();
        let mut inner = self.lock()?;
        let caps = inner.caps_of_sessions(granted.uid).unwrap_or_else(|| granted.caps.clone());
        self.make_session(&mut inner, &Granted { caps, ..granted.clone() })
    }

    fn make_session(&self, inner: &mut Inner, granted: &Granted) -> Result<PathBuf, ControlError> {
        let name = &granted.name;
        if inner.devices.contains_key(name) {
            return Err(ControlError::DeviceExists { name: name.clone() });
        }
        let volume = inner.volume(&granted.volume)?;
        // One that is on its way is asked for again and again.
        volume.live()?;
        let volume = volume.record.spec.name.clone();
        self.limit(inner, granted.uid, &granted.caps)?;
        let nvme = NvmeSpec { queues: QUEUES, namespaces: 1, ..NvmeSpec::default() };
        let device =
            DeviceSpec { name: name.clone(), kind: DeviceKind::Nvme(nvme), socket: None, shard: None, tenant: None };
        let disk = inner.disk(&volume);
        let session = SessionRecord { uid: granted.uid, caps: granted.caps.clone() };
        let device = self.make_device(inner, &device, Some(session), disk)?;
        let socket = self.socket(&device.record.spec);
        self.settle_volume(inner, volume.as_str());
        inner.devices.insert(name.clone(), device);
        let attach = AttachSpec { volume, nsid: None, read_only: granted.read_only };
        let made = inner.make_attachment(name.as_str(), &attach).and_then(|_| {
            let record = &inner.device(name.as_str())?.record;
            // Stored first: the worker that comes after a crash must know whose device it is.
            Ok(self.store.apply(&Changes { put_devices: vec![record], ..Changes::default() })?)
        });
        if let Err(error) = made {
            inner.forget_session(self, name);
            return Err(error);
        }
        self.retrace(inner, attach.volume.as_str());
        tracing::info!(device = %name, volume = %attach.volume, uid = granted.uid, "session opened");
        Ok(socket)
    }

    /// Whether the user may have the session.
    fn may_open(&self, inner: &Inner, asker: Asker, spec: &SessionSpec, elsewhere: &Elsewhere) -> Result<(), ControlError> {
        let app = self.app_of(inner, asker.uid);
        // A stranger does not learn which volumes there are.
        if !asker.may_all() && !app.is_some_and(|(app, _)| app.allows(&spec.volume, spec.read_only)) {
            return Err(ControlError::NotAllowed { uid: asker.uid, volume: spec.volume.clone() });
        }
        let limit = app.map_or(SESSIONS, |(app, _)| app.sessions);
        if inner.sessions_of(asker.uid, elsewhere) >= limit {
            return Err(ControlError::TooManySessions { uid: asker.uid, limit });
        }
        Ok(())
    }

    /// Forgets the sessions of a daemon before this one. One that was killed has left their sockets, too, and who gets such a name next may
    /// be long in coming.
    pub(super) fn forget_over(&self, over: &[DeviceRecord]) -> Result<(), StoreError> {
        if over.is_empty() {
            return Ok(());
        }
        // A cell's name may be another worker's by now: such names are given while cells start.
        let own = if self.settings.cell.is_none() { over } else { &[] };
        for record in own {
            let socket = self.socket(&record.spec);
            if let Err(error) = remove_socket(&socket) {
                tracing::warn!(socket = %socket.display(), %error, "the socket of a session that is over stays behind");
            }
        }
        let remove_devices = over.iter().map(|device| &device.spec.name).collect();
        self.store.apply(&Changes { remove_devices, ..Changes::default() })
    }

    /// Deletes the devices of applications that are gone, and those that have failed: where a guest's kernel has a timeout after which it
    /// resets its controller, a program would wait for ever.
    pub(super) fn end_sessions(&self) {
        let asked = Instant::now();
        let answers = self.ask(|device| device.record.session.is_some());
        let mut inner = self.peek();
        if inner.stopping {
            return;
        }
        for (name, status) in answers {
            let is_late = |device: &Device| asked.duration_since(device.since) > TAKEN_WITHIN;
            let is_over = |device: &Device| match &status {
                // One that is not at rest is not waited for, and counts until it is.
                Ok(status) if status.in_flight > 0 => false,
                Ok(status) => status.has_failed() || !status.connected && (status.clients > 0 || is_late(device)),
                // Its shard may come to it yet.
                Err(ControlError::Silent { .. }) => false,
                // It has failed: nobody is served there.
                Err(_) => is_late(device),
            };
            // One of that name that was made since then was not asked.
            if inner.devices.get(&name).is_some_and(|device| device.since <= asked && is_over(device)) {
                tracing::info!(device = %name, "session ended");
                inner.forget_session(self, &name);
            }
        }
    }
}

/// Removes a socket, if one is there. Nobody hears it: the run directory is this daemon's.
fn remove_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Inner {
    /// How many sessions the user has, here and elsewhere.
    pub(super) fn sessions_of(&self, uid: u32, elsewhere: &Elsewhere) -> usize {
        let of = |device: &&Device| device.record.session.as_ref().is_some_and(|session| session.uid == uid);
        self.devices.values().filter(of).count() + elsewhere.values().filter(|other| **other == uid).count()
    }

    /// The caps that the user's sessions here obey, if he has any.
    fn caps_of_sessions(&self, uid: u32) -> Option<GroupCaps> {
        let mut sessions = self.devices.values().filter_map(|device| device.record.session.as_ref());
        sessions.find(|session| session.uid == uid).map(|session| session.caps.clone())
    }

    fn forget_session(&mut self, manager: &Manager, name: &Name) {
        if let Err(error) = manager.store.apply(&Changes { remove_devices: vec![name], ..Changes::default() }) {
            // A start forgets the sessions of daemons before it.
            tracing::warn!(device = %name, %error, "the session's end could not be stored");
        }
        manager.settle_account(self, name);
        if let Some(device) = self.devices.remove(name) {
            self.retire(device);
        }
        manager.retrace_all(self);
    }
}
