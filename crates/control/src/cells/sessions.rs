//! Programs' sessions on volumes that cells have. Granted here, made there, and connected to from here: requests go from the program to the cell.

use std::{
    collections::BTreeSet,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    body::Bytes,
    http::{Method, StatusCode},
};
use serde_json::{Value, json};

use super::{CHANGE_LIMIT, Cells, Kind, Known, Place, door};
use crate::{
    Name,
    api::Problem,
    error::ControlError,
    manager::{Asker, Elsewhere, Granted, Others, SessionSpec},
};

/// How often is looked whether a cell's sessions have ended: it may have nothing else to go on for.
const LOOK: Duration = Duration::from_secs(1);

/// Of a session that is about to be.
const RESERVED: &str = "reserved";

/// Whose session a device is.
fn session_of(view: &Value) -> Option<u32> {
    view["session_of_uid"].as_u64().and_then(|uid| uid.try_into().ok())
}

/// What a session shows to whom.
struct Shown {
    name: String,
    uid: u32,
    volume: String,
    read_only: bool,
}

impl Known {
    /// What its sessions show. Those that it is about to have show nothing yet.
    fn shown(&self) -> Vec<Shown> {
        let of = |(name, view): (&String, &Value)| {
            let namespace = view["namespaces"].get(0)?;
            let (name, uid, volume) = (name.clone(), session_of(view)?, namespace["volume"].as_str()?.to_owned());
            Some(Shown { name, uid, volume, read_only: namespace["read_only"].as_bool()? })
        };
        self.devices.iter().filter_map(of).collect()
    }

    /// What a cell says now takes the place of what it said before. What it is about to have stays.
    pub(super) fn replace(&mut self, now: Self) {
        let before = std::mem::replace(self, now);
        for (name, view) in before.devices.into_iter().filter(|(_, view)| view[RESERVED] == true) {
            self.devices.entry(name).or_insert(view);
        }
    }

    fn has_sessions(&self) -> bool {
        self.devices.values().any(|view| session_of(view).is_some())
    }
}

impl Cells {
    /// The sessions that cells have, and those that they are about to have.
    pub(crate) fn sessions(&self) -> Elsewhere {
        let known = self.known();
        let devices = known.values().flat_map(|known| &known.devices);
        devices.filter_map(|(name, view)| Some((name.clone(), session_of(view)?))).collect()
    }

    /// What cells have, for who is asked about applications here.
    pub(crate) fn others(&self) -> Others {
        let volumes = self.known().values().flat_map(|known| known.volumes.keys().cloned()).collect();
        Others { sessions: self.sessions(), volumes }
    }

    /// Ends a cell's sessions that their users may not have any more. One that does not answer is asked again by [`Self::watch`].
    pub(super) async fn end_forbidden(&self, cell: &Name) {
        let mut found = self.known().get(cell).filter(|known| known.silent.is_none()).map(Known::shown).unwrap_or_default();
        if found.is_empty() {
            return;
        }
        let manager = Arc::clone(&self.manager);
        let looked = tokio::task::spawn_blocking(move || {
            found.retain(|shown| !manager.may_keep(shown.uid, &shown.volume, shown.read_only));
            found
        });
        for Shown { name, uid, .. } in looked.await.unwrap_or_default() {
            let path = format!("{}/{name}", Kind::Devices.path());
            match self.ask(cell, (Method::DELETE, &path), Bytes::new(), CHANGE_LIMIT).await {
                Ok(answer) if answer.status.is_success() => {
                    tracing::info!(device = name, uid, worker = %cell, "session ended: its user may not have it any more");
                }
                // It may have ended by itself.
                Ok(answer) if answer.status == StatusCode::NOT_FOUND => {}
                Ok(answer) => {
                    tracing::error!(device = name, worker = %cell, status = %answer.status, "the session does not end");
                }
                Err(error) => {
                    tracing::warn!(device = name, worker = %cell, %error, "the session goes on until the worker answers");
                }
            }
        }
        self.refresh(cell).await;
    }

    /// Asks those that have sessions of this user, or may have, whether they do.
    pub(crate) async fn hear_of_sessions(&self, asker: Asker) {
        let is_theirs = |known: &Known| known.devices.values().any(|view| session_of(view) == Some(asker.uid));
        // Of one that has not been heard since this worker began, nobody knows yet.
        let may_be = |known: &Known| !known.is_heard || is_theirs(known);
        let cells: Vec<Name> =
            self.known().iter().filter(|(_, known)| may_be(known)).map(|(cell, _)| cell.clone()).collect();
        for cell in cells {
            self.refresh(&cell).await;
        }
    }

    /// A session where the volume is; `None` where no cell has it.
    pub(crate) async fn open_session(
        self: &Arc<Self>,
        asker: Asker,
        spec: &SessionSpec,
    ) -> Result<Option<(Name, UnixStream)>, Problem> {
        let _change = self.change.lock().await;
        let Some(Place::Cell(cell)) = self.place(Kind::Volumes, &spec.volume).await else { return Ok(None) };
        let name = self.reserve(&cell, asker).await?;
        let made = self.make_session(&cell, &name, asker, spec).await;
        match &made {
            Err(_) => self.forget_session(&cell, &name),
            // What is said now takes the reservation's place.
            Ok(_) => self.end_reservation(&cell, &name),
        }
        self.refresh(&cell).await;
        if made.is_ok() {
            self.watch(cell);
        }
        made.map(|stream| Some((name, stream)))
    }

    /// A name for the user's next session, that nobody gives to another one meanwhile.
    async fn reserve(&self, cell: &Name, asker: Asker) -> Result<Name, Problem> {
        for name in asker.session_names() {
            let is_known = |known: &Known| known.devices.contains_key(name.as_str());
            {
                let mut known = self.known();
                if known.values().any(is_known) {
                    continue;
                }
                let view = json!({ "name": name, "session_of_uid": asker.uid, RESERVED: true });
                known.entry(cell.clone()).or_default().devices.insert(name.to_string(), view);
            }
            // This worker's own sessions are named while it looks at what is reserved: who comes second sees the first.
            if !self.is_here(Kind::Devices, name.as_str()).await {
                return Ok(name);
            }
            self.forget_session(cell, &name);
        }
        Err(Problem::from(&asker.has_too_many()))
    }

    fn end_reservation(&self, cell: &Name, name: &Name) {
        let mut known = self.known();
        let view = known.get_mut(cell).and_then(|known| known.devices.get_mut(name.as_str()));
        if let Some(Value::Object(view)) = view {
            view.remove(RESERVED);
        }
    }

    fn forget_session(&self, cell: &Name, name: &Name) {
        if let Some(known) = self.known().get_mut(cell) {
            known.devices.remove(name.as_str());
        }
    }

    async fn make_session(&self, cell: &Name, name: &Name, asker: Asker, spec: &SessionSpec) -> Result<UnixStream, Problem> {
        let mut others = self.sessions();
        others.remove(name.as_str());
        let (manager, wanted) = (Arc::clone(&self.manager), spec.clone());
        let admitted = tokio::task::spawn_blocking(move || manager.admit_session(asker, &wanted, &others)).await;
        admitted.map_err(|_| Problem::panicked())?.map_err(|error| Problem::from(&error))?;
        let SessionSpec { volume, read_only } = spec.clone();
        let granted = Granted { name: name.clone(), uid: asker.uid, volume, read_only };
        let body = serde_json::to_vec(&granted).expect("names and numbers are text");
        let answer = self.ask(cell, (Method::POST, door::SESSION), body.into(), CHANGE_LIMIT).await;
        let socket: PathBuf = answer.and_then(|answer| answer.json()).map_err(|error| error.problem(cell))?;
        // Nobody is waited for: it listens. A session that nobody connects to ends by itself.
        let lost = |source| Problem::from(&ControlError::SessionLost { device: name.clone(), source });
        UnixStream::connect(socket).map_err(lost)
    }

    /// Looks after a cell until its sessions have ended: then it may have nothing left.
    pub(super) fn watch(self: &Arc<Self>, cell: Name) {
        if !self.watched().insert(cell.clone()) {
            return;
        }
        let cells = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                cells.refresh(&cell).await;
                cells.end_forbidden(&cell).await;
                if cells.has_sessions(&cell) {
                    continue;
                }
                let _change = cells.change.lock().await;
                // One may have come before the lock.
                cells.refresh(&cell).await;
                if !cells.has_sessions(&cell) {
                    cells.watched().remove(&cell);
                    cells.clear(&cell).await;
                    return;
                }
            }
        });
    }

    /// Those of the worker before this one are looked after, too.
    pub(super) fn watch_all(self: &Arc<Self>) {
        for cell in self.names() {
            if self.has_sessions(&cell) {
                self.watch(cell);
            }
        }
    }

    fn has_sessions(&self, cell: &Name) -> bool {
        self.known().get(cell).is_some_and(Known::has_sessions)
    }

    fn watched(&self) -> MutexGuard<'_, BTreeSet<Name>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
