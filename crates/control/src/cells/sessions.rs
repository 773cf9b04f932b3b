//! Programs' sessions on volumes that cells have. Granted here, made there, and connected to from here: requests go from the program to the cell.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::Bytes,
    http::{Method, StatusCode},
};
use serde_json::{Value, json};

use super::{CHANGE_LIMIT, Cells, Kind, Known, Place, client::CellError, door};
use crate::{
    Name,
    api::Problem,
    error::ControlError,
    manager::{Asker, Elsewhere, Granted, Limit, Others, RECEIVED, SessionSpec},
    model::GroupCaps,
};

/// How often is looked whether a cell's sessions have ended: it may have nothing else to go on for.
const LOOK: Duration = Duration::from_secs(1);

/// How long a cell may take to make a session, and how soon it is asked again when it was being replaced, or the volume was on its way.
const SESSION_LIMIT: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(20);

/// Of a session that is about to be.
const RESERVED: &str = "reserved";

/// Whether a device is a session that is about to be: there is nothing to show of it.
pub(super) fn is_reserved(view: &Value) -> bool {
    view[RESERVED] == true
}

/// Whether a cell refuses because the volume has come there and is not open yet: it may be by now.
fn is_on_its_way(error: &CellError) -> bool {
    matches!(error, CellError::Refused(problem) if problem.detail.contains(RECEIVED))
}

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
    caps: GroupCaps,
}

impl Known {
    /// What its sessions show. Those that it is about to have show nothing yet.
    fn shown(&self) -> Vec<Shown> {
        let of = |(name, view): (&String, &Value)| {
            let namespace = view["namespaces"].get(0)?;
            let (name, uid, volume) = (name.clone(), session_of(view)?, namespace["volume"].as_str()?.to_owned());
            // Absent: none.
            let caps = serde_json::from_value(view["session_caps"].clone()).unwrap_or_default();
            Some(Shown { name, uid, volume, read_only: namespace["read_only"].as_bool()?, caps })
        };
        self.devices.iter().filter_map(of).collect()
    }

    /// Requests that users' caps have held back there: each of a user's sessions says what is of all of them.
    pub(super) fn held_back(&self) -> BTreeMap<u32, u64> {
        let of = |view: &Value| Some((session_of(view)?, view["session_held_back"].as_u64()?));
        self.devices.values().filter_map(of).collect()
    }

    /// What a cell says now takes the place of what it said before. What it is about to have stays, and what it was left without.
    pub(super) fn replace(&mut self, now: Self) {
        let before = std::mem::replace(self, now);
        (self.coming, self.left_out) = (before.coming, before.left_out);
        for (name, view) in before.devices.into_iter().filter(|(_, view)| is_reserved(view)) {
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
        let named = |known: &Known| known.volumes.keys().chain(known.unsaid(Kind::Volumes)).cloned().collect::<Vec<_>>();
        let volumes = self.known().values().flat_map(named).collect();
        let mut held_back = BTreeMap::new();
        for (uid, count) in self.known().values().flat_map(Known::held_back) {
            *held_back.entry(uid).or_insert(0) += count;
        }
        Others { sessions: self.sessions(), volumes, held_back }
    }

    /// Ends a cell's sessions that their users may not have any more, and has the others obey the caps that their users have now. One that
    /// does not answer is asked again by [`Self::watch`].
    pub(super) async fn end_forbidden(&self, cell: &Name) {
        let found = self.known().get(cell).filter(|known| known.silent.is_none()).map(Known::shown).unwrap_or_default();
        if found.is_empty() {
            return;
        }
        let manager = Arc::clone(&self.manager);
        let looked = tokio::task::spawn_blocking(move || {
            let is_kept = |shown: &Shown| manager.may_keep(shown.uid, &shown.volume, shown.read_only);
            let (kept, over): (Vec<Shown>, Vec<Shown>) = found.into_iter().partition(is_kept);
            let limit = |shown: Shown| {
                let caps = manager.caps_of_user(shown.uid);
                (caps != shown.caps).then_some((shown.uid, caps))
            };
            (over, kept.into_iter().filter_map(limit).collect::<BTreeMap<u32, GroupCaps>>())
        });
        let (over, limits) = looked.await.unwrap_or_default();
        for (uid, caps) in limits {
            self.tell_limit(cell, &Limit { uid, caps }, CHANGE_LIMIT).await;
        }
        for Shown { name, uid, .. } in over {
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

    async fn tell_limit(&self, cell: &Name, limit: &Limit, within: Duration) {
        let (uid, body) = (limit.uid, serde_json::to_vec(limit).expect("caps are numbers and text"));
        match self.ask(cell, (Method::POST, door::LIMIT), body.into(), within).await {
            Ok(answer) if answer.status.is_success() => {
                tracing::info!(uid, worker = %cell, "the user's sessions there obey other caps");
            }
            Ok(answer) => tracing::error!(uid, worker = %cell, status = %answer.status, "the user's caps do not hold there"),
            Err(error) => tracing::warn!(uid, worker = %cell, %error, "the user's caps do not hold there until it answers"),
        }
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
    ///
    /// The operator's changes go on meanwhile: a program is anybody's, and comes as often as it likes. What is reserved keeps the cell.
    pub(crate) async fn open_session(
        self: &Arc<Self>,
        asker: Asker,
        spec: &SessionSpec,
    ) -> Result<Option<(Name, UnixStream)>, Problem> {
        let deadline = Instant::now() + SESSION_LIMIT;
        loop {
            let Some(Place::Cell(cell)) = self.place(Kind::Volumes, &spec.volume).await? else { return Ok(None) };
            let Some(granted) = self.admit(&cell, asker, spec).await? else { continue };
            let error = match self.make_session(&cell, &granted).await {
                Ok(stream) => {
                    self.obey_caps(&cell, &granted).await;
                    self.watch(cell);
                    return Ok(Some((granted.name, stream)));
                }
                Err(error) => error,
            };
            let is_there = self.known_place(Kind::Volumes, &spec.volume) == Some(Place::Cell(cell.clone()));
            let is_cut_off = matches!(error, CellError::Connect(_) | CellError::Http(_));
            let may_be_made = !is_there || is_on_its_way(&error) || is_cut_off;
            if !may_be_made || Instant::now() >= deadline {
                return Err(error.problem(&cell));
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Says the user's caps to a cell where a session that was just made obeys others: they have changed since it was granted, and who changed
    /// them did not see it yet.
    async fn obey_caps(&self, cell: &Name, granted: &Granted) {
        let made = |known: &Known| known.shown().into_iter().find(|shown| shown.name == granted.name.as_str());
        let Some(Shown { uid, caps: obeyed, .. }) = self.known().get(cell).and_then(made) else { return };
        let manager = Arc::clone(&self.manager);
        let Ok(caps) = tokio::task::spawn_blocking(move || manager.caps_of_user(uid)).await else { return };
        if caps != obeyed {
            // The program waits for it; where the cell does not answer, whoever watches it says them again.
            self.tell_limit(cell, &Limit { uid, caps }, SESSION_LIMIT).await;
        }
    }

    /// A reservation for a session that the user may have; `None`: the cell has ended.
    async fn admit(self: &Arc<Self>, cell: &Name, asker: Asker, spec: &SessionSpec) -> Result<Option<Granted>, Problem> {
        let _admission = self.admission.lock().await;
        let Some(name) = self.reserve(cell, asker).await? else { return Ok(None) };
        let mut others = self.sessions();
        others.remove(name.as_str());
        let (manager, wanted) = (Arc::clone(&self.manager), spec.clone());
        let admitted = tokio::task::spawn_blocking(move || manager.admit_session(asker, &wanted, &others)).await;
        let admitted = admitted.map_err(|_| Problem::panicked());
        match admitted.and_then(|admitted| admitted.map_err(|error| Problem::from(&error))) {
            Ok(caps) => {
                let SessionSpec { volume, read_only } = spec.clone();
                Ok(Some(Granted { name, uid: asker.uid, volume, read_only, caps }))
            }
            Err(problem) => {
                self.forget_session(cell, &name);
                self.give_up(cell);
                Err(problem)
            }
        }
    }

    /// A name for the user's next session, that nobody gives to another one meanwhile.
    async fn reserve(self: &Arc<Self>, cell: &Name, asker: Asker) -> Result<Option<Name>, Problem> {
        for name in asker.session_names() {
            let is_known = |known: &Known| known.devices.contains_key(name.as_str());
            {
                let mut known = self.known();
                if known.values().any(is_known) {
                    continue;
                }
                let Some(here) = known.get_mut(cell) else { return Ok(None) };
                let view = json!({ "name": name, "session_of_uid": asker.uid, RESERVED: true });
                here.devices.insert(name.to_string(), view);
            }
            // This worker's own sessions are named while it looks at what is reserved: who comes second sees the first.
            if !self.is_here(Kind::Devices, name.as_str()).await {
                return Ok(Some(name));
            }
            self.forget_session(cell, &name);
        }
        self.give_up(cell);
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

    /// A reservation has come to nothing: it may have been all that kept the cell.
    fn give_up(self: &Arc<Self>, cell: &Name) {
        let has_none = |known: &Known| known.silent.is_none() && known.devices.is_empty();
        if !self.known().get(cell).is_some_and(has_none) {
            return;
        }
        // The program does not wait for the operator.
        let (cells, cell) = (Arc::clone(self), cell.clone());
        tokio::spawn(async move {
            let _change = cells.change.lock().await;
            cells.clear(&cell).await;
        });
    }

    /// Has the cell make a session that is reserved.
    async fn make_session(self: &Arc<Self>, cell: &Name, granted: &Granted) -> Result<UnixStream, CellError> {
        let (name, made) = (&granted.name, self.ask_session(cell, granted).await);
        if made.is_err() {
            self.forget_session(cell, name);
            // It may have been too late for us alone, and then the cell has a session; and if not, nothing may be left there.
            self.watch(cell.clone());
            self.refresh(cell).await;
        } else {
            // What is said now takes the reservation's place, which stays until then: another list may be older than the session.
            self.refresh(cell).await;
            self.end_reservation(cell, name);
        }
        made
    }

    async fn ask_session(&self, cell: &Name, granted: &Granted) -> Result<UnixStream, CellError> {
        let body = serde_json::to_vec(granted).expect("names and numbers are text");
        let answer = self.ask(cell, (Method::POST, door::SESSION), body.into(), SESSION_LIMIT).await?;
        let socket: PathBuf = answer.json()?;
        // Nobody is waited for: it listens. A session that nobody connects to ends by itself.
        let device = granted.name.clone();
        let lost = |source| CellError::Refused(Problem::from(&ControlError::SessionLost { device, source }));
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
                if cells.is_silent(&cell) || cells.has_sessions(&cell) {
                    continue;
                }
                let _change = cells.change.lock().await;
                // One may have come before the lock.
                cells.refresh(&cell).await;
                if !cells.is_silent(&cell) && cells.end_watch(&cell) {
                    cells.clear(&cell).await;
                    return;
                }
            }
        });
    }

    fn is_silent(&self, cell: &Name) -> bool {
        self.known().get(cell).is_some_and(|known| known.silent.is_some())
    }

    /// Whether nothing is left to look after. A session that comes after this look has the cell watched again.
    fn end_watch(&self, cell: &Name) -> bool {
        let mut watched = self.watched();
        let is_over = !self.has_sessions(cell);
        if is_over {
            watched.remove(cell);
        }
        is_over
    }

    /// Those of the worker before this one are looked after, too. What a cell has that does not answer is seen when it does.
    pub(super) fn watch_all(self: &Arc<Self>) {
        for cell in self.names() {
            if self.has_sessions(&cell) || self.is_silent(&cell) {
                self.watch(cell);
            }
        }
    }

    /// What is said of users has changed: ends what they may not have any more, now or as soon as a cell answers.
    pub(super) async fn end_all_forbidden(self: &Arc<Self>) {
        for cell in self.names() {
            if self.is_silent(&cell) {
                if self.known().get(&cell).is_some_and(|known| !known.is_heard || known.has_sessions()) {
                    tracing::warn!(worker = %cell, "sessions there that their users may not have any more end when the worker answers");
                }
                self.watch(cell);
            } else {
                self.end_forbidden(&cell).await;
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

#[cfg(test)]
mod tests {
    use axum::{
        Json,
        response::{IntoResponse, Response},
    };
    use tokio::{sync::mpsc::unbounded_channel, time::timeout};

    use super::*;
    use crate::{
        cells::{
            Arranged,
            front::tests::{Rig, nothing},
        },
        manager::tests::PATIENCE,
    };

    /// A user whom nothing is said of.
    const STRANGER: u32 = 4_000_000_000;

    /// A user is shut out while a cell does not answer that has a session of his.
    #[tokio::test]
    async fn what_a_silent_cell_has_ends_when_it_answers() {
        let x: Name = "x".parse().unwrap();
        for by_command in [false, true] {
            let rig = Rig::of(&Arranged::of([x.clone()].into()), 0);
            rig.cells.refresh_all().await;
            if by_command {
                rig.cells.end_all_forbidden().await;
            } else {
                rig.cells.watch_all();
            }
            let (tell, mut told) = unbounded_channel();
            rig.cell("x", move |method, path| -> Response {
                if *method == Method::DELETE {
                    let _ = tell.send(path.to_owned());
                    return StatusCode::NO_CONTENT.into_response();
                }
                if path != Kind::Devices.path() {
                    return nothing();
                }
                let shows = json!([{ "volume": "v", "read_only": false }]);
                Json(json!([{ "name": "s", "session_of_uid": STRANGER, "namespaces": shows }])).into_response()
            });
            let ended = timeout(PATIENCE, told.recv()).await.expect("the session's end");
            assert_eq!(ended.as_deref(), Some("/v1/devices/s"));
        }
    }

    /// What the cell says of a session that was granted when its user had caps, which he has no more.
    #[tokio::test]
    async fn a_session_obeys_what_was_said_of_its_user_while_it_was_made() {
        let x: Name = "x".parse().unwrap();
        let rig = Rig::of(&Arranged::of([x.clone()].into()), 0);
        let (tell, mut told) = unbounded_channel();
        rig.cell("x", move |method, path| -> Response {
            if *method == Method::POST {
                let _ = tell.send(path.to_owned());
                return StatusCode::NO_CONTENT.into_response();
            }
            if path != Kind::Devices.path() {
                return nothing();
            }
            let shows = json!([{ "volume": "v", "read_only": false }]);
            let session = |name: &str| json!({ "name": name, "session_of_uid": STRANGER, "namespaces": shows });
            let (mut old, new) = (session("old"), session("new"));
            old["session_caps"] = json!({ "iops": 5 });
            Json(json!([old, new])).into_response()
        });
        rig.cells.refresh_all().await;
        let granted = |name: &str| {
            let (name, volume) = (name.parse().unwrap(), "v".to_owned());
            Granted { name, uid: STRANGER, volume, read_only: false, caps: GroupCaps::default() }
        };
        for name in ["new", "gone", "old"] {
            rig.cells.obey_caps(&x, &granted(name)).await;
        }
        assert_eq!(timeout(PATIENCE, told.recv()).await.expect("caps").as_deref(), Some(door::LIMIT));
        assert!(told.try_recv().is_err(), "the others obey what he has");
    }

    #[test]
    fn who_comes_while_a_volume_is_on_its_way_is_not_turned_away() {
        let name: Name = "v".parse().unwrap();
        let refused = |reason: &str| {
            let error = ControlError::VolumeFailed { name: name.clone(), reason: reason.to_owned() };
            CellError::Refused(Problem::from(&error))
        };
        assert!(is_on_its_way(&refused(RECEIVED)));
        assert!(!is_on_its_way(&refused("its file is gone")));
    }
}
