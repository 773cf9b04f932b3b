//! Sessions: controllers that belong to an application, not to a guest. Each shows one volume to one process, and goes with its connection.

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use super::{Device, Inner, Manager};
use crate::{
    Name,
    error::ControlError,
    model::{AttachSpec, DeviceKind, DeviceSpec, NvmeSpec},
    store::{Changes, SessionRecord},
};

/// Sessions that one user may have at a time, unless the configuration says another number.
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

/// Who asks, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    /// The user.
    pub(crate) uid: u32,
}

impl Manager {
    /// Makes a controller that shows the volume, and connects to it in the application's place.
    pub(crate) fn open_session(&self, asker: Asker, spec: &SessionSpec) -> Result<(Name, UnixStream), ControlError> {
        let mut inner = self.lock()?;
        let volume = self.may_open(&inner, asker, spec)?;
        let name = inner.session_name(asker).ok_or(ControlError::TooManySessions { uid: asker.uid, limit: usize::MAX })?;
        let nvme = NvmeSpec { queues: QUEUES, namespaces: 1, ..NvmeSpec::default() };
        let device =
            DeviceSpec { name: name.clone(), kind: DeviceKind::Nvme(nvme), socket: None, shard: None, tenant: None };
        let disk = inner.disk(&volume);
        let mut device = self.make_device(&inner, &device, disk)?;
        device.record.session = Some(SessionRecord { uid: asker.uid });
        let socket = self.socket(&device.record.spec);
        inner.devices.insert(name.clone(), device);
        let attach = AttachSpec { volume, nsid: None, read_only: spec.read_only };
        let made = inner.make_attachment(name.as_str(), &attach).and_then(|_| {
            let record = &inner.device(name.as_str())?.record;
            // Stored first: the worker that comes after a crash must know whose device it is.
            self.store.apply(&Changes { put_devices: vec![record], ..Changes::default() })?;
            UnixStream::connect(&socket).map_err(|source| ControlError::SessionLost { device: name.clone(), source })
        });
        match made {
            Ok(stream) => {
                tracing::info!(device = %name, volume = %attach.volume, uid = asker.uid, "session opened");
                Ok((name, stream))
            }
            Err(error) => {
                inner.forget_session(self, &name);
                Err(error)
            }
        }
    }

    /// Whether the user may have the session; the volume's name.
    fn may_open(&self, inner: &Inner, asker: Asker, spec: &SessionSpec) -> Result<Name, ControlError> {
        let own = asker.uid == 0 || asker.uid == rustix::process::geteuid().as_raw();
        let entry = self.settings.apps.iter().find(|app| app.uid == asker.uid);
        let denied = || ControlError::NotAllowed { uid: asker.uid, volume: spec.volume.clone() };
        // A stranger does not learn which volumes there are.
        if !own && !entry.is_some_and(|app| app.allows(&spec.volume, spec.read_only)) {
            return Err(denied());
        }
        let limit = entry.map_or(SESSIONS, |app| app.sessions);
        let of = |device: &&Device| device.record.session.as_ref().is_some_and(|session| session.uid == asker.uid);
        if inner.devices.values().filter(of).count() >= limit {
            return Err(ControlError::TooManySessions { uid: asker.uid, limit });
        }
        Ok(inner.volume(&spec.volume)?.record.spec.name.clone())
    }

    /// Deletes the devices of applications that are gone.
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
                Ok(status) => !status.connected && (status.clients > 0 || is_late(device)),
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

impl Inner {
    /// A free name for a user's session.
    fn session_name(&self, asker: Asker) -> Option<Name> {
        let name = |number: u32| format!("app-{}-{number}", asker.uid).parse().ok();
        (1..=u32::from(u16::MAX)).filter_map(name).find(|name: &Name| !self.devices.contains_key(name))
    }

    fn forget_session(&mut self, manager: &Manager, name: &Name) {
        if let Err(error) = manager.store.apply(&Changes { remove_devices: vec![name], ..Changes::default() }) {
            // A start forgets the sessions of daemons before it.
            tracing::warn!(device = %name, %error, "the session's end could not be stored");
        }
        if let Some(device) = self.devices.remove(name) {
            self.retire(device);
        }
    }
}
