//! Users' caps: what holds for all sessions of one user in this worker together.
//!
//! ```text
//!   session of a user without caps ───────────────────────► volume ─► …
//!   session of one with caps ─► way, takes of his group ──► volume ─► …
//! ```
//!
//! A session is led another way when its user gets caps, or loses all. So a request looks for none where there are none.

use std::sync::Arc;

use millrace_services::throttle::{self, Caps, Group};
use serde::{Deserialize, Serialize};

use super::{Asker, Device, Inner, Manager};
use crate::{
    Name,
    apps::invalid,
    error::ControlError,
    model::GroupCaps,
    store::{Changes, DeviceRecord, SessionRecord},
};

/// A user's caps, as the daemon's own worker says them to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Limit {
    pub(crate) uid: u32,
    pub(crate) caps: GroupCaps,
}

/// Caps, understood.
pub(super) fn read(uid: u32, caps: &GroupCaps) -> Result<Caps, ControlError> {
    caps.read().map_err(|error| invalid(uid, error.to_string()))
}

impl DeviceRecord {
    /// Whether it is a session whose user has caps.
    pub(super) fn is_limited(&self) -> bool {
        self.session.as_ref().is_some_and(|session| !session.caps.is_empty())
    }
}

impl Manager {
    /// What is said of a user's caps; those who may open all have none.
    pub(crate) fn caps_of_user(&self, uid: u32) -> GroupCaps {
        self.caps_of(&self.peek(), uid)
    }

    pub(super) fn caps_of(&self, inner: &Inner, uid: u32) -> GroupCaps {
        let app = if (Asker { uid }).may_all() { None } else { self.app_of(inner, uid) };
        app.map(|(app, _)| app.caps.clone()).unwrap_or_default()
    }

    /// Requests that users' caps have held back here.
    pub(crate) fn users_held_back(&self) -> Vec<(u32, u64)> {
        self.peek().limits.iter().map(|(uid, group)| (*uid, group.held_back())).collect()
    }

    /// Has the user's sessions here obey these caps, as the daemon's own worker says.
    pub(crate) fn receive_limit(&self, limit: &Limit) -> Result<(), ControlError> {
        self.reach_all();
        self.limit(&mut *self.lock()?, limit.uid, &limit.caps)
    }

    /// Has the user's sessions here obey these caps from now on, those that are open as well.
    pub(super) fn limit(&self, inner: &mut Inner, uid: u32, caps: &GroupCaps) -> Result<(), ControlError> {
        let read = read(uid, caps)?;
        let over = inner.sessions_where(uid, |_, session| self.is_past_caps(session, caps));
        let records = inner.with_caps(uid, caps, &over);
        if !over.is_empty() || !records.is_empty() {
            let (remove_devices, put_devices) = (over.iter().collect(), records.iter().collect());
            self.store.apply(&Changes { put_devices, remove_devices, ..Changes::default() })?;
        }
        self.end_over(inner, uid, over);
        inner.obey(uid, &read, records);
        Ok(())
    }

    /// Whether a session cannot go on with these caps: an engine serves it, which knows none.
    pub(super) fn is_past_caps(&self, session: &SessionRecord, caps: &GroupCaps) -> bool {
        self.settings.card.is_some() && session.caps.is_empty() && !caps.is_empty()
    }
}

impl Inner {
    /// The user's sessions of which something is so.
    pub(super) fn sessions_where(&self, uid: u32, is_so: impl Fn(&DeviceRecord, &SessionRecord) -> bool) -> Vec<Name> {
        let records = self.devices.values().map(|device| &device.record);
        let found = records.filter(|record| {
            let session = record.session.as_ref().filter(|session| session.uid == uid);
            session.is_some_and(|session| is_so(record, session))
        });
        found.map(|record| record.spec.name.clone()).collect()
    }

    /// The records of the user's sessions that have other caps, with these; without those that are over.
    pub(super) fn with_caps(&self, uid: u32, caps: &GroupCaps, over: &[Name]) -> Vec<DeviceRecord> {
        let other = |record: &&DeviceRecord| {
            let session = record.session.as_ref();
            session.is_some_and(|session| session.uid == uid && session.caps != *caps) && !over.contains(&record.spec.name)
        };
        let session = || Some(SessionRecord { uid, caps: caps.clone() });
        let records = self.devices.values().map(|device| &device.record).filter(other);
        records.map(|record| DeviceRecord { session: session(), ..record.clone() }).collect()
    }

    /// Has the user's sessions obey these caps, which are in the records that change.
    pub(super) fn obey(&mut self, uid: u32, caps: &Caps, records: Vec<DeviceRecord>) {
        self.set_limit(uid, caps);
        for record in records {
            let name = record.spec.name.clone();
            let Some(device) = self.devices.get_mut(&name) else { continue };
            let was_limited = device.record.is_limited();
            device.record = record;
            let device = &self.devices[&name];
            if was_limited != device.record.is_limited() {
                self.lead(device);
            }
        }
    }

    /// Who waits for caps that are no more goes on.
    fn set_limit(&mut self, uid: u32, caps: &Caps) {
        if let Some(group) = self.limits.get(&uid) {
            group.set(caps);
        }
        if caps.is_empty() {
            self.limits.remove(&uid);
        } else {
            self.limits.entry(uid).or_insert_with(|| Group::alone(&format!("user {uid}"), caps));
        }
    }

    /// Has a session's device go to its volumes as its user's caps say.
    fn lead(&self, device: &Device) {
        let (Some(session), Ok(live)) = (&device.record.session, &device.live) else { return };
        let group = self.limits.get(&session.uid);
        for at in device.record.namespaces.iter().filter(|at| !device.failed.contains_key(&at.nsid)) {
            let way = |group: &Arc<Group>| Some(throttle::limited(&self.namespace_of(&at.volume).ok()?.volume, group));
            if let Err(error) = live.lead(at.nsid, group.and_then(way)) {
                let device = &device.record.spec.name;
                tracing::warn!(%device, nsid = at.nsid, %error, "the session could not be told its user's caps now");
            }
        }
    }

    /// The same of a device that shows something new, where that is not what a device does anyway.
    pub(super) fn lead_limited(&self, device: &Device) {
        if device.record.is_limited() {
            self.lead(device);
        }
    }

    /// Brings back the caps of a session's user.
    pub(super) fn restore_limit(&mut self, name: &Name) {
        let record = self.devices.get(name).map(|device| &device.record).filter(|record| record.is_limited());
        let Some(SessionRecord { uid, caps }) = record.and_then(|record| record.session.clone()) else { return };
        match read(uid, &caps) {
            Ok(caps) => {
                self.set_limit(uid, &caps);
                self.lead(&self.devices[name]);
            }
            Err(error) => tracing::error!(device = %name, uid, %error, "the caps of a session could not be restored"),
        }
    }

    /// Requests that the user's caps have held back here.
    pub(super) fn held_back_of(&self, uid: u32) -> u64 {
        self.limits.get(&uid).map_or(0, |group| group.held_back())
    }
}
