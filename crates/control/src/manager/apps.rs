//! Who may open volumes as an application. What commands say of a user is stored, and holds over what the configuration file says of it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Asker, Elsewhere, Inner, Manager, limits};
use crate::{
    Name,
    apps::{self, AppChange, AppUser, invalid},
    error::ControlError,
    model::GroupCaps,
    store::{Changes, StoreError},
};

/// What other workers of the daemon have, as far as it matters here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Others {
    pub(crate) sessions: Elsewhere,
    pub(crate) volumes: BTreeSet<String>,
    /// Requests that users' caps have held back there.
    pub(crate) held_back: BTreeMap<u32, u64>,
}

/// Who said it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AppSource {
    /// The configuration file.
    File,
    /// A command.
    Command,
}

/// A user whose applications may open volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AppView {
    /// The user's number.
    pub uid: u32,
    /// Names of volumes; `*` means all.
    pub volumes: Vec<String>,
    /// It may only read.
    pub read_only: bool,
    /// How many sessions it may have at a time.
    pub sessions: usize,
    /// How many it has.
    pub open: usize,
    /// Caps that hold for all its sessions together, in each worker.
    #[serde(default, skip_serializing_if = "GroupCaps::is_empty")]
    pub caps: GroupCaps,
    /// Requests that they were the first to hold back, in all workers that have sessions of it. From nothing when it gets caps.
    #[serde(default)]
    pub held_back: u64,
    /// Who said so.
    pub source: AppSource,
}

impl Manager {
    /// All users of whom something is said.
    pub(crate) fn apps(&self, others: &Others) -> Vec<AppView> {
        let inner = self.peek();
        let uids: BTreeSet<u32> = self.settings.apps.iter().map(|app| app.uid).chain(inner.apps.keys().copied()).collect();
        uids.into_iter().filter_map(|uid| self.app_view(&inner, uid, others).ok()).collect()
    }

    /// What is said of a user.
    pub(crate) fn app(&self, uid: u32, others: &Others) -> Result<AppView, ControlError> {
        self.app_view(&self.peek(), uid, others)
    }

    /// Lets a user's applications open volumes.
    pub(crate) fn create_app(&self, app: &AppUser, others: &Others) -> Result<AppView, ControlError> {
        self.reach_all();
        let mut inner = self.lock()?;
        if self.app_of(&inner, app.uid).is_some() {
            return Err(ControlError::AppExists { uid: app.uid });
        }
        check(&inner, app, app.named(), others)?;
        self.check_caps(app)?;
        self.say_of_app(&mut inner, app)?;
        self.app_view(&inner, app.uid, others)
    }

    /// Lets a user's applications have something else from now on. Sessions that they may not have any more end.
    pub(crate) fn change_app(&self, uid: u32, change: &AppChange, others: &Others) -> Result<AppView, ControlError> {
        self.reach_all();
        let mut inner = self.lock()?;
        let (before, _) = self.app_of(&inner, uid).ok_or(ControlError::NoApp { uid })?;
        if *change == AppChange::default() {
            return Err(invalid(uid, "say which volumes, which use of them, how many sessions or which caps it shall have"));
        }
        let app = before.clone().changed(change);
        // Volumes that were named before may have gone since.
        let new = app.named().filter(|name| !before.volumes.iter().any(|before| before == name));
        check(&inner, &app, new, others)?;
        // What is stored of him already is known to whoever may take over.
        if change.caps.is_some() || !inner.apps.contains_key(&uid) {
            self.check_caps(&app)?;
        }
        self.say_of_app(&mut inner, &app)?;
        self.app_view(&inner, uid, others)
    }

    /// Lets a user's applications open nothing any more, and ends their sessions.
    pub(crate) fn delete_app(&self, uid: u32) -> Result<(), ControlError> {
        self.reach_all();
        let mut inner = self.lock()?;
        self.app_of(&inner, uid).ok_or(ControlError::NoApp { uid })?;
        self.say_of_app(&mut inner, &AppUser::shut_out(uid))
    }

    /// Whether a session that there is may go on.
    pub(crate) fn may_keep(&self, uid: u32, volume: &str, read_only: bool) -> bool {
        Asker { uid }.may_all() || self.app_of(&self.peek(), uid).is_some_and(|(app, _)| app.allows(volume, read_only))
    }

    /// What counts of what is said of a user.
    pub(super) fn app_of<'a>(&'a self, inner: &'a Inner, uid: u32) -> Option<(&'a AppUser, AppSource)> {
        match inner.apps.get(&uid) {
            Some(app) if app.volumes.is_empty() => None,
            Some(app) => Some((app, AppSource::Command)),
            None => Some((self.in_file(uid)?, AppSource::File)),
        }
    }

    /// Brings back what commands said. A start of the daemon forgets what says no more than the file.
    pub(super) fn restore_apps(&self, inner: &mut Inner, go_on: bool) -> Result<(), StoreError> {
        let stored = self.store.load_apps()?;
        let (needless, stored): (Vec<_>, Vec<_>) = stored.into_iter().partition(|app| !go_on && self.is_needless(app));
        if !needless.is_empty() {
            let remove_apps = needless.iter().map(|app| app.uid).collect();
            // It says no more than the file: that it is there still is no reason not to start.
            if let Err(error) = self.store.apply(&Changes { remove_apps, ..Changes::default() }) {
                tracing::warn!(%error, "what is said of users twice could not be removed from the state; the next start does it");
            }
        }
        for app in stored {
            if self.in_file(app.uid).is_some() {
                tracing::info!(
                    uid = app.uid,
                    "the configuration file's [[app]] of this user is left aside: a command said otherwise"
                );
            }
            inner.apps.insert(app.uid, app);
        }
        Ok(())
    }

    /// Volumes that the configuration file names for users and that nobody has, with the users.
    pub(crate) fn volumes_missing_of_apps(&self, others: &Others) -> Vec<(u32, String)> {
        let inner = self.peek();
        let is_missing = |name: &&str| !inner.volumes.contains_key(*name) && !others.volumes.contains(*name);
        let of = |app: &AppUser| -> Vec<(u32, String)> {
            app.named().filter(is_missing).map(|name| (app.uid, name.to_owned())).collect()
        };
        // What a command said of a user counts in the place of the file's word.
        self.settings.apps.iter().filter(|app| !inner.apps.contains_key(&app.uid)).flat_map(of).collect()
    }

    fn in_file(&self, uid: u32) -> Option<&AppUser> {
        self.settings.apps.iter().find(|app| app.uid == uid)
    }

    /// Whether it says no more than the configuration file.
    fn is_needless(&self, app: &AppUser) -> bool {
        match self.in_file(app.uid) {
            Some(there) => there == app,
            None => app.volumes.is_empty(),
        }
    }

    /// Stores what is said of a user now, with the end of the sessions that it does not leave.
    fn say_of_app(&self, inner: &mut Inner, app: &AppUser) -> Result<(), ControlError> {
        let (uid, caps) = (app.uid, limits::read(app.uid, &app.caps)?);
        let may_all = Asker { uid }.may_all();
        let over = inner.sessions_where(uid, |record, session| {
            let mut shown = record.namespaces.iter();
            let is_allowed = !app.volumes.is_empty() && shown.all(|at| app.allows(at.volume.as_str(), at.read_only));
            !may_all && (!is_allowed || self.is_past_caps(session, &app.caps))
        });
        let records = inner.with_caps(uid, &app.caps, &over);
        let (remove_devices, put_devices) = (over.iter().collect(), records.iter().collect());
        let mut changes = Changes { put_devices, remove_devices, ..Changes::default() };
        let is_needless = self.is_needless(app);
        if is_needless {
            changes.remove_apps.push(uid);
        } else {
            changes.put_apps.push(app);
        }
        self.store.apply(&changes)?;
        if is_needless {
            inner.apps.remove(&uid);
        } else {
            inner.apps.insert(uid, app.clone());
        }
        let AppUser { volumes, read_only, sessions, .. } = app;
        let said = app.caps.settings();
        tracing::info!(uid, ?volumes, read_only, sessions, caps = ?said, "what a user's applications may have has changed");
        self.end_over(inner, uid, over);
        inner.obey(uid, &caps, records);
        Ok(())
    }

    /// Ends sessions whose end is stored.
    pub(super) fn end_over(&self, inner: &mut Inner, uid: u32, over: Vec<Name>) {
        for name in over {
            tracing::info!(device = %name, uid, "session ended: its user may not have it any more in this way");
            self.settle_account(inner, &name);
            if let Some(device) = inner.devices.remove(&name) {
                inner.retire(device);
            }
        }
    }

    /// What the binary before this one may not understand waits until nobody goes back to it.
    fn check_caps(&self, app: &AppUser) -> Result<(), ControlError> {
        if app.caps.is_empty() || !self.is_on_trial() {
            return Ok(());
        }
        let why = "caps: an upgrade is not settled, and who may take over again may know none; try again later";
        Err(ControlError::untimely("user", &apps::name(app.uid), why))
    }

    fn app_view(&self, inner: &Inner, uid: u32, others: &Others) -> Result<AppView, ControlError> {
        let (app, source) = self.app_of(inner, uid).ok_or(ControlError::NoApp { uid })?;
        let AppUser { volumes, read_only, sessions, caps, .. } = app.clone();
        let open = inner.sessions_of(uid, &others.sessions);
        let held_back = inner.held_back_of(uid) + others.held_back.get(&uid).copied().unwrap_or(0);
        Ok(AppView { uid, volumes, read_only, sessions, open, caps, held_back, source })
    }
}

/// Whether it can be said of a user that names these volumes anew.
fn check<'a>(
    inner: &Inner,
    app: &AppUser,
    mut new: impl Iterator<Item = &'a str>,
    others: &Others,
) -> Result<(), ControlError> {
    app.validate()?;
    if (Asker { uid: app.uid }).may_all() && !app.is_unlimited() {
        let why = "it may open every volume, and only the number of its sessions can be said: volumes \"*\", to read and \
                   write, no caps";
        return Err(invalid(app.uid, why));
    }
    match new.find(|name| !inner.volumes.contains_key(*name) && !others.volumes.contains(*name)) {
        Some(name) => Err(ControlError::NoVolume { name: name.to_owned() }),
        None => Ok(()),
    }
}
