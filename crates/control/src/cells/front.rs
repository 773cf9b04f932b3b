//! The API of a daemon with cells: each request goes to whoever has what it is about, and what is about all of them is put together.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use serde_json::Value;
use tokio::{
    sync::{Mutex, MutexGuard, oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use uuid::Uuid;

use super::{
    CHANGE_LIMIT, Cells, HEARD_LIMIT, Kind, LIST_LIMIT, MAIN, Place, START_LIMIT,
    client::{Answer, CellError, ask, stream},
    door, folder,
};
use crate::{
    Name,
    api::{Problem, STATE_LIMIT, changing},
    error::ControlError,
    manager::{Manager, Object},
    model::{AttachSpec, CopySpec, DeviceSpec, VolumeSpec},
};

/// The API of this worker, with the cells' in it.
pub(crate) fn front(own: Router, cells: &Arc<Cells>) -> Router {
    own.layer(from_fn_with_state(Arc::clone(cells), answer))
}

/// A request, and who answers it here.
pub(super) struct Call {
    parts: Parts,
    pub(super) body: Bytes,
    next: Next,
    /// Comes to an end with whoever asked.
    pub(super) gone: oneshot::Receiver<()>,
}

impl Call {
    pub(super) fn path(&self) -> &str {
        self.parts.uri.path_and_query().map_or("/", |path| path.as_str())
    }

    /// This worker's answer.
    pub(super) async fn here(self) -> Response {
        self.next.run(Request::from_parts(self.parts, Body::from(self.body))).await
    }

    /// As [`Self::at`], of a change that others' changes wait for: one that hangs would leave it lying.
    async fn change_at(self, cells: &Cells, place: &Place) -> Response {
        match cells.check_heard(place).await {
            Ok(()) => self.at(cells, place).await,
            Err(problem) => problem.into_response(),
        }
    }

    /// That of whoever is in a place, within the time that others' changes wait.
    async fn at(self, cells: &Cells, place: &Place) -> Response {
        let Place::Cell(cell) = place else { return ended_within(CHANGE_LIMIT, self.here()).await };
        cells.asked(cell, (self.parts.method.clone(), self.path()), self.body.clone(), CHANGE_LIMIT).await
    }

    /// The same, for what nobody else's change waits for: it takes as long as it takes.
    async fn at_length(self, cells: &Cells, place: &Place) -> Response {
        let Place::Cell(cell) = place else { return self.here().await };
        if self.parts.method == Method::GET {
            return self.at(cells, place).await;
        }
        let asked = (self.parts.method.clone(), self.path());
        match cells.ask_while_heard(cell, asked, self.body.clone(), HEARD_LIMIT, CHANGE_LIMIT).await {
            Ok(answer) => answer.into_response(),
            Err(error) => error.problem(cell).into_response(),
        }
    }
}

async fn answer(State(cells): State<Arc<Cells>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let body = match to_bytes(body, STATE_LIMIT).await {
        Ok(body) => body,
        Err(error) => return Problem::bad_body(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string()).into_response(),
    };
    // What was begun is brought to its end, also when the one who asked for it is gone: then `_asker` goes.
    let (_asker, gone) = oneshot::channel();
    let answered = tokio::spawn(route(cells, Call { parts, body, next, gone })).await;
    answered.unwrap_or_else(|_| Problem::panicked().into_response())
}

async fn route(cells: Arc<Cells>, call: Call) -> Response {
    let (method, path) = (call.parts.method.clone(), call.parts.uri.path().to_owned());
    let words: Vec<&str> = path.split('/').skip(1).collect();
    match (&method, &words[..]) {
        (&Method::GET, ["v1", "volumes"]) => cells.all(Kind::Volumes, call).await,
        (&Method::GET, ["v1", "devices"]) => cells.all(Kind::Devices, call).await,
        (&Method::GET, ["v1", "copies"]) => cells.all(Kind::Copies, call).await,
        (&Method::POST, ["v1", "copies"]) => cells.create_copy(call).await,
        (_, ["v1", "copies", name, ..]) => cells.pass(Kind::Copies, name, call).await,
        (&Method::GET, ["v1", "groups"]) => cells.groups(call).await,
        (&Method::GET, ["v1", "groups", _]) => cells.show_group(call).await,
        (&Method::PATCH, ["v1", "groups", name]) => cells.change_group(name, call).await,
        (&Method::DELETE, ["v1", "groups", name]) => cells.delete_group(name, call).await,
        (_, ["v1", "apps", ..]) => cells.apps(call).await,
        (&Method::GET, ["v1", "status"]) => cells.status(call).await,
        (&Method::GET, ["metrics"]) => cells.metrics(call).await,
        (&Method::GET, ["v1", "usage"]) => cells.usage(call).await,
        (&Method::GET, ["v1", "upgrade"]) => cells.show_upgrade(call).await,
        (&Method::POST, ["v1", "upgrade"]) => cells.begin_upgrade(call).await,
        (&Method::POST, ["v1", "volumes"]) => cells.create_volume(call).await,
        (&Method::POST, ["v1", "devices"]) => cells.create_device(call).await,
        (&Method::POST, ["v1", "devices", name, "namespaces"]) => cells.attach(name, call).await,
        (&Method::DELETE, ["v1", "volumes", name]) => cells.delete(Kind::Volumes, name, call).await,
        (&Method::DELETE, ["v1", "devices", name]) => cells.delete(Kind::Devices, name, call).await,
        (&Method::GET, ["v1", "volumes", name, "trace"]) => cells.trace(Kind::Volumes, name, call).await,
        (&Method::GET, ["v1", "devices", name, "trace"]) => cells.trace(Kind::Devices, name, call).await,
        (_, ["v1", "volumes", name, ..]) => cells.pass(Kind::Volumes, name, call).await,
        (_, ["v1", "devices", name, ..]) => cells.pass(Kind::Devices, name, call).await,
        _ => call.here().await,
    }
}

impl Call {
    /// The body, if it is what it should be; otherwise this worker's own answer says what is wrong with it.
    pub(super) fn body<T: serde::de::DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.body).ok()
    }
}

impl Cells {
    /// To whoever has it. What nobody has, this worker says.
    async fn pass(self: &Arc<Self>, kind: Kind, name: &str, call: Call) -> Response {
        match self.place_or_main(kind, name).await {
            Ok(place) => call.at_length(self, &place).await,
            Err(problem) => problem.into_response(),
        }
    }

    /// A cell's answer. What it has not ended by then it goes on with, if it hears at all.
    async fn asked(&self, cell: &Name, asked: (Method, &str), body: Bytes, limit: Duration) -> Response {
        match self.answered(cell, asked, body, limit).await {
            Ok(answer) => answer.into_response(),
            Err(error) => error.problem(cell).into_response(),
        }
    }

    /// The same, and whether it has answered: where it has not, nobody knows what it has done or will do, unless it was not even asked
    /// ([`CellError::Connect`]).
    async fn answered(
        &self,
        cell: &Name,
        (method, path): (Method, &str),
        body: Bytes,
        limit: Duration,
    ) -> Result<Answer, CellError> {
        let is_change = method != Method::GET;
        let answered = self.ask(cell, (method, path), body, limit).await;
        if is_change && matches!(answered, Err(CellError::Silent)) && self.hear(cell).await.is_ok() {
            return Err(CellError::Refused(Problem::still_under_way(cell.as_str())));
        }
        answered
    }

    /// As [`Self::ask`], with the limit for a cell that does not hear. Whether it does is looked every so often.
    async fn ask_while_heard(
        &self,
        cell: &Name,
        asked: (Method, &str),
        body: Bytes,
        every: Duration,
        limit: Duration,
    ) -> Result<Answer, CellError> {
        let silence = async {
            let mut heard = Instant::now();
            while heard.elapsed() < limit {
                sleep(every).await;
                if self.hear(cell).await.is_ok() {
                    heard = Instant::now();
                }
            }
        };
        tokio::select! {
            answer = self.ask(cell, asked, body, Duration::MAX) => answer,
            () = silence => Err(CellError::Silent),
        }
    }

    /// As [`Self::pass`], for an answer that comes as it arises.
    async fn trace(self: &Arc<Self>, kind: Kind, name: &str, call: Call) -> Response {
        let cell = match self.place_or_main(kind, name).await {
            Ok(Place::Main) => return call.here().await,
            Ok(Place::Cell(cell)) => cell,
            Err(problem) => return problem.into_response(),
        };
        match stream(&folder(&self.run_dir, &cell), call.path(), CHANGE_LIMIT).await {
            Ok(answer) => answer,
            Err(error) => error.problem(&cell).into_response(),
        }
    }

    /// A turn at [`Self::change`].
    pub(super) async fn turn(&self, call: &mut Call) -> Result<MutexGuard<'_, ()>, Problem> {
        turn((&self.change, &self.exchanged), &mut call.gone, CHANGE_LIMIT).await
    }

    /// Looks at what a change in this worker looks at, before others' changes wait for it: a file system that does not answer keeps whoever names it
    /// waiting, and nobody else.
    async fn look_first(&self, object: Object, look: impl FnOnce(&Manager) + Send + 'static) -> Result<(), Problem> {
        let look = move |manager: &Manager| {
            look(manager);
            Ok(())
        };
        changing(Arc::clone(&self.manager), object, look).await
    }

    /// The same for a volume that is to go, if this worker has it.
    async fn look_at_volume(&self, volume: &str) -> Result<(), Problem> {
        if !self.is_here(Kind::Volumes, volume).await {
            return Ok(());
        }
        let volume = volume.to_owned();
        self.look_first(Object::volume(&volume), move |manager| manager.measure_now(&volume)).await
    }

    async fn create_volume(self: &Arc<Self>, mut call: Call) -> Response {
        let Some(spec) = call.body::<VolumeSpec>() else { return call.here().await };
        let looked_at = spec.clone();
        let look = move |manager: &Manager| drop(manager.look_before_creation(&looked_at));
        if let Err(problem) = self.look_first(Object::volume(&spec.name), look).await {
            return problem.into_response();
        }
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        match self.place(Kind::Volumes, spec.name.as_str()).await {
            Ok(None) => {}
            // It will say that it has it.
            Ok(Some(place)) => return call.change_at(self, &place).await,
            Err(problem) => return problem.into_response(),
        }
        let mut places: Vec<(&str, Place)> = Vec::new();
        for leaf in spec.stack.leaves().into_iter().filter_map(millrace_services::Leaf::volume) {
            match self.place_or_main(Kind::Volumes, leaf).await {
                Ok(place) => places.push((leaf, place)),
                Err(problem) => return problem.into_response(),
            }
        }
        let (first, place) = places.first().cloned().unwrap_or(("", Place::Main));
        if let Some((other, there)) = places.iter().find(|(_, there)| *there != place) {
            let why = format!("worker {} has volume {first}, and worker {} volume {other}", place.name(), there.name());
            return Problem::from(&ControlError::NotMovable { volume: spec.name, why }).into_response();
        }
        if let Err(problem) = self.check_uuid("volume", &spec.name, spec.uuid, &place).await {
            return problem.into_response();
        }
        let answer = call.change_at(self, &place).await;
        self.heard(&place).await;
        answer
    }

    async fn create_device(self: &Arc<Self>, mut call: Call) -> Response {
        let Some(spec) = call.body::<DeviceSpec>() else { return call.here().await };
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        match self.place(Kind::Devices, spec.name.as_str()).await {
            Ok(None) => {}
            Ok(Some(place)) => return call.change_at(self, &place).await,
            Err(problem) => return problem.into_response(),
        }
        let (cell, uuid) = (self.mode.cell_of(&spec), spec.kind.nvme().and_then(|nvme| nvme.uuid));
        let there = cell.clone().map_or(Place::Main, Place::Cell);
        if let Err(problem) = self.check_uuid("device", &spec.name, uuid, &there).await {
            return problem.into_response();
        }
        let Some(cell) = cell else { return call.at(self, &there).await };
        // No process for what cannot be.
        if let Err(error) = check_cell(&cell, &spec).and_then(|()| spec.validate(usize::MAX)) {
            return Problem::from(&error).into_response();
        }
        let is_new = !self.known().contains_key(&cell);
        // One that has ended is waited for, and one that hangs is not.
        if !is_new && let Err(error @ CellError::Silent) = self.hear(&cell).await {
            return error.problem(&cell).into_response();
        }
        if let Err(problem) = self.start(&cell, START_LIMIT).await {
            // One that was there before has guests, which wait for it.
            if is_new {
                let _ = self.keeper.stop_cell(cell.as_str());
                self.known().remove(&cell);
            }
            return problem.into_response();
        }
        let asked = (call.parts.method.clone(), call.path());
        let answered = self.answered(&cell, asked, call.body.clone(), CHANGE_LIMIT).await;
        self.refresh(&cell).await;
        match answered {
            Ok(answer) => {
                if !answer.status.is_success() {
                    self.retire(&cell).await;
                }
                answer.into_response()
            }
            Err(error) => {
                // One that was asked may be making the device yet: that it has nothing now is no reason to end it.
                if matches!(error, CellError::Connect(_)) {
                    self.retire(&cell).await;
                }
                error.problem(&cell).into_response()
            }
        }
    }

    async fn attach(self: &Arc<Self>, device: &str, mut call: Call) -> Response {
        // It may have to go elsewhere.
        if let Some(spec) = call.body::<AttachSpec>()
            && let Err(problem) = self.look_at_volume(spec.volume.as_str()).await
        {
            return problem.into_response();
        }
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        if self.has_unfinished().await {
            self.finish_moves().await;
        }
        let there = match self.place(Kind::Devices, device).await {
            Ok(Some(there)) => there,
            Ok(None) => return call.here().await,
            Err(problem) => return problem.into_response(),
        };
        if let Err(problem) = self.check_heard(&there).await {
            return problem.into_response();
        }
        let Some(spec) = call.body::<AttachSpec>() else { return call.at(self, &there).await };
        let volume = spec.volume.as_str();
        match self.place(Kind::Volumes, volume).await {
            Err(problem) => return problem.into_response(),
            Ok(Some(from)) if from != there => {
                if let Err(problem) = self.check_heard(&from).await {
                    return problem.into_response();
                }
                if let Err(problem) = self.move_volume(volume, &from, &there).await {
                    let detail = format!(
                        "volume {volume} is served by worker {}, and device {device} by worker {}: {}",
                        from.name(),
                        there.name(),
                        problem.detail
                    );
                    return Problem { detail, ..problem }.into_response();
                }
                if let Place::Cell(cell) = &from {
                    self.retire(cell).await;
                }
            }
            Ok(_) => {}
        }
        let answer = call.at(self, &there).await;
        self.heard(&there).await;
        answer
    }

    /// A copy is where its volumes are. What is apart comes together, if it can.
    async fn create_copy(self: &Arc<Self>, mut call: Call) -> Response {
        let Some(mut spec) = call.body::<CopySpec>() else { return call.here().await };
        if let Err(problem) = self.look_at_volume(spec.target.as_str()).await {
            return problem.into_response();
        }
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        let name = match spec.name.take() {
            Some(name) => Some(name),
            None => self.free_copy_name().await,
        };
        match self.place(Kind::Copies, name.as_ref().map_or("", Name::as_str)).await {
            Ok(None) => {}
            Ok(Some(place)) => return call.change_at(self, &place).await,
            Err(problem) => return problem.into_response(),
        }
        let (source, target) = (spec.source.clone(), spec.target.clone());
        let (from, mut to) = match self.places_of([&source, &target]).await {
            Ok([from, to]) => (from, to),
            Err(problem) => return problem.into_response(),
        };
        if from != to {
            for place in [&from, &to] {
                if let Err(problem) = self.check_heard(place).await {
                    return problem.into_response();
                }
            }
            // Nobody may use the target of a copy: so it is what can go.
            if let Err(problem) = self.move_volume(target.as_str(), &to, &from).await {
                let places = (from.name(), to.name());
                let detail =
                    format!("volume {source} is served by worker {}, and volume {target} by worker {}", places.0, places.1);
                return Problem { detail: format!("{detail}: {}", problem.detail), ..problem }.into_response();
            }
            to = from;
        }
        call.body = serde_json::to_vec(&CopySpec { name, ..spec }).expect("a copy is text").into();
        let answer = call.change_at(self, &to).await;
        self.heard(&to).await;
        answer
    }

    async fn places_of(self: &Arc<Self>, [one, other]: [&Name; 2]) -> Result<[Place; 2], Problem> {
        let one = self.place_or_main(Kind::Volumes, one.as_str()).await?;
        Ok([one, self.place_or_main(Kind::Volumes, other.as_str()).await?])
    }

    /// The accounts are files, which this worker reads. Who writes them is told before: what he writes then is in no time that may be billed.
    async fn usage(self: &Arc<Self>, call: Call) -> Response {
        expect_usage(&self.run_dir, self.names()).await;
        call.here().await
    }

    /// Who may have sessions is said here, about volumes and sessions that are everywhere.
    async fn apps(self: &Arc<Self>, mut call: Call) -> Response {
        let is_question = call.parts.method == Method::GET;
        let turn = if is_question { None } else { Some(self.turn(&mut call).await) };
        let _change = match turn.transpose() {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        self.refresh_all().await;
        call.parts.extensions.insert(self.others());
        let answer = call.here().await;
        if !is_question && answer.status().is_success() {
            self.end_all_forbidden().await;
        }
        answer
    }

    /// A name that no place has for a copy: each would choose its own.
    async fn free_copy_name(self: &Arc<Self>) -> Option<Name> {
        self.refresh_all().await;
        for number in 1..=u16::MAX {
            let name = format!("copy{number}");
            let known = self.known_place(Kind::Copies, &name).is_some();
            if !known && self.manager.copy(&name).is_err() {
                return name.parse().ok();
            }
        }
        None
    }

    async fn delete(self: &Arc<Self>, kind: Kind, name: &str, mut call: Call) -> Response {
        if kind == Kind::Volumes
            && let Err(problem) = self.look_at_volume(name).await
        {
            return problem.into_response();
        }
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        let place = match self.place_or_main(kind, name).await {
            Ok(place) => place,
            Err(problem) => return problem.into_response(),
        };
        let answer = call.change_at(self, &place).await;
        let Place::Cell(cell) = &place else { return answer };
        if !answer.status().is_success() {
            return answer;
        }
        self.clear(cell).await;
        answer
    }

    /// Whether a cell hears at all.
    async fn hear(&self, cell: &Name) -> Result<(), CellError> {
        self.ask(cell, (Method::GET, Kind::Copies.path()), Bytes::new(), HEARD_LIMIT).await.map(drop)
    }

    /// Whether whoever is in a place does.
    async fn check_heard(&self, place: &Place) -> Result<(), Problem> {
        let Place::Cell(cell) = place else { return Ok(()) };
        self.hear(cell).await.map_err(|error| error.problem(cell))
    }

    /// Whether nothing elsewhere is known by a UUID that is asked for. Who is to have it looks at its own.
    async fn check_uuid(
        self: &Arc<Self>,
        kind: &'static str,
        name: &Name,
        uuid: Option<Uuid>,
        there: &Place,
    ) -> Result<(), Problem> {
        let Some(uuid) = uuid else { return Ok(()) };
        if *there != Place::Main {
            let (manager, wanted) = (Arc::clone(&self.manager), name.clone());
            let looked = tokio::task::spawn_blocking(move || manager.check_unused(kind, &wanted, uuid)).await;
            looked.map_err(|_| Problem::panicked())?.map_err(|error| Problem::from(&error))?;
        }
        self.refresh_all().await;
        let text = uuid.to_string();
        // A controller's subsystem is named after it.
        let has = |view: &Value| {
            view["uuid"] == text.as_str() || view["subnqn"].as_str().is_some_and(|subsystem| subsystem.ends_with(&text))
        };
        for (cell, known) in self.known().iter().filter(|(cell, _)| cell.as_str() != there.name()) {
            let mut views = known.volumes.iter().chain(&known.devices);
            let said = views.find(|(_, view)| has(view)).map(|(other, _)| other.as_str());
            let is_stored = known.stored.as_ref().is_some_and(|stored| stored.uuids.contains(&text));
            if let Some(other) = said.or(is_stored.then_some("something")) {
                let why = format!("{other} has the UUID {uuid} already, in worker {cell}");
                return Err(Problem::from(&ControlError::untimely(kind, name, why)));
            }
        }
        Ok(())
    }

    /// Something has changed there.
    pub(super) async fn heard(&self, place: &Place) {
        if let Place::Cell(cell) = place {
            self.refresh(cell).await;
        }
    }
}

/// The turn of a request to change what is where. Who has waited for too long is told so, or that this worker is being exchanged, and for who has gone
/// meanwhile nothing is done.
async fn turn<'a>(
    (change, exchanged): (&'a Mutex<()>, &watch::Sender<bool>),
    gone: &mut oneshot::Receiver<()>,
    limit: Duration,
) -> Result<MutexGuard<'a, ()>, Problem> {
    let mut exchanged = exchanged.subscribe();
    let exchanged = async move { drop(exchanged.wait_for(|is_exchanged| *is_exchanged).await) };
    tokio::select! {
        biased;
        _ = gone => Err(Problem::change_under_way()),
        // Its turn is the next worker's to give. The upgrade has it as long as this is so: who gets one has no exchange beside it.
        () = exchanged => Err(Problem::from(&ControlError::Upgrading)),
        turn = timeout(limit, change.lock()) => turn.map_err(|_| Problem::change_under_way()),
    }
}

/// This worker's answer. What it has not ended by then it goes on with.
async fn ended_within(limit: Duration, answer: impl Future<Output = Response> + Send + 'static) -> Response {
    match timeout(limit, tokio::spawn(answer)).await {
        Ok(answer) => answer.unwrap_or_else(|_| Problem::panicked().into_response()),
        Err(_) => Problem::still_under_way(MAIN).into_response(),
    }
}

/// Tells cells that their accounts are about to be read. One that does not answer has what it has written: nobody's bills wait for it.
async fn expect_usage(run_dir: &Path, cells: Vec<Name>) {
    let mut told = JoinSet::new();
    for cell in cells {
        let run_dir = folder(run_dir, &cell);
        told.spawn(async move {
            let answer = ask(&run_dir, Method::POST, door::USAGE, Bytes::new(), LIST_LIMIT).await;
            let why = match answer {
                Ok(answer) if answer.status.is_success() => return,
                Ok(answer) => answer.status.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(worker = %cell, why, "the account is read, and the worker that writes a part of it was not told");
        });
    }
    told.join_all().await;
}

/// Whether a device can have a cell of this name.
pub(super) fn check_cell(cell: &Name, device: &DeviceSpec) -> Result<(), ControlError> {
    if cell.as_str() == MAIN {
        return Err(ControlError::invalid(
            "device",
            &device.name,
            "its worker would be called main, as the daemon's own is; choose another name",
        ));
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
