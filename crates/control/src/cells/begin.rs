//! The daemon's own worker begins: its cells are there, or come.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use axum::{body::Bytes, http::Method};
use serde_json::Value;
use thiserror::Error;
use tokio::{task::JoinSet, time::timeout};

use super::{CHANGE_LIMIT, Cells, Kind, LeftOut, Place, START_LIMIT, Unsaid, arrange::Arranged, door};
use crate::{
    Name,
    api::Problem,
    manager::{RECEIVED, Step},
    upgrade::leave_words,
};

/// How often is looked whether a cell's new binary has failed.
const TRIAL_LOOK: Duration = Duration::from_secs(1);

/// How long what is declared for a cell may take to be made: nobody waits for it for so long.
const DECLARE_LIMIT: Duration = Duration::from_secs(3600);

/// How a volume is in one of the places that have it; the first of these is whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    Open,
    /// It could not be opened where it is.
    Failed,
    /// It has come from another place, and was not opened.
    Waits,
}

impl Found {
    pub(super) fn of(view: &Value) -> Self {
        match (view["state"].as_str(), view["reason"].as_str()) {
            (_, Some(RECEIVED)) => Self::Waits,
            (Some("ready"), _) => Self::Open,
            _ => Self::Failed,
        }
    }
}

/// A cell refuses what was declared for it.
#[derive(Debug, Error)]
#[error("worker {cell}: {}", problem.detail)]
pub struct BeginError {
    cell: Name,
    problem: Box<Problem>,
}

/// Where volumes are, by what tells one from another. A move gives none another name: what has another is another volume, though both be known
/// by one UUID.
type Places = BTreeMap<(String, Name), Vec<(Place, Found)>>;

/// What finishes moves: in each place, the volumes that are to be opened there (`true`), and those that are to go. `may_be_elsewhere` says of a
/// UUID whether a cell that does not answer may have it.
fn unfinished(places: Places, may_be_elsewhere: impl Fn(&str) -> bool) -> BTreeMap<(Place, bool), Vec<Name>> {
    let mut to_do: BTreeMap<(Place, bool), Vec<Name>> = BTreeMap::new();
    for ((uuid, name), mut places) in places {
        let is_moving = places.len() > 1 || places.iter().any(|(_, found)| *found == Found::Waits);
        if is_moving && may_be_elsewhere(&uuid) {
            tracing::warn!(uuid, "a move is not finished: a worker that may have the volume does not answer");
            continue;
        }
        // The first one stays.
        places.sort_by_key(|(_, found)| *found);
        for (at, (place, found)) in places.into_iter().enumerate() {
            if at > 0 || found == Found::Waits {
                to_do.entry((place, at == 0)).or_default().push(name.clone());
            }
        }
    }
    to_do
}

impl Cells {
    /// After a start of the daemon: waits for all cells, and has them make sure of what the configuration file declares. Who is late is waited for
    /// no longer, and left without.
    pub(crate) async fn begin(self: &Arc<Self>, arranged: &Arranged) -> Result<(), BeginError> {
        self.begin_within(arranged, (START_LIMIT, CHANGE_LIMIT)).await
    }

    async fn begin_within(self: &Arc<Self>, arranged: &Arranged, limits: (Duration, Duration)) -> Result<(), BeginError> {
        let mut begun = JoinSet::new();
        for cell in self.names() {
            let part = arranged.parts.get(&Some(cell.clone()));
            let part = part.map(|part| (part.unsaid(), serde_json::to_vec(part).expect("names are text")));
            let cells = Arc::clone(self);
            begun.spawn(async move { (cells.begin_one(&cell, part, limits).await, cell) });
        }
        for (result, cell) in begun.join_all().await {
            result.map_err(|problem| BeginError { cell, problem: Box::new(problem) })?;
        }
        Ok(())
    }

    /// `Err`: it refuses what is declared for it. What else fails while a daemon starts is shown, and costs nothing else.
    async fn begin_one(
        self: &Arc<Self>,
        cell: &Name,
        part: Option<(Unsaid, Vec<u8>)>,
        (to_start, to_declare): (Duration, Duration),
    ) -> Result<(), Problem> {
        let late = self.start(cell, to_start).await.err();
        if let Some(problem) = &late {
            tracing::error!(worker = %cell, "{}", problem.detail);
        }
        let Some((names, body)) = part else { return Ok(()) };
        if late.is_some() {
            let why = "it did not answer when the daemon started; make it by commands, or restart the daemon when it does";
            self.leave_out(cell, why.to_owned(), names.names);
            return Ok(());
        }
        self.leave_out(cell, "the worker is making it still".to_owned(), BTreeSet::new());
        if let Some(known) = self.known().get_mut(cell) {
            known.coming = names;
        }
        let declared = tokio::spawn(Arc::clone(self).declare(cell.clone(), body.into()));
        // It goes on.
        let declared = timeout(to_declare, declared).await.inspect_err(|_| {
            tracing::error!(worker = %cell, "the worker is making still what the configuration file declares");
        });
        declared.map_or(Ok(()), |declared| declared.unwrap_or_else(|_| Err(Problem::panicked())))
    }

    fn leave_out(&self, cell: &Name, why: String, names: BTreeSet<(Kind, String)>) {
        if let Some(known) = self.known().get_mut(cell) {
            known.left_out = Some(LeftOut { why, names });
        }
    }

    /// Has a cell make sure of what is declared for it. `Err`: it refuses. It is asked once: where its worker dies of it, the next one would, too, and
    /// what is where may be another by then.
    async fn declare(self: Arc<Self>, cell: Name, part: Bytes) -> Result<(), Problem> {
        let answer = self.ask(&cell, (Method::POST, door::DECLARE), part, DECLARE_LIMIT).await;
        let (declared, why) = match answer {
            Ok(answer) if answer.status.is_success() => (Ok(()), None),
            Ok(answer) => {
                let problem = answer.json::<Value>().err().map_or_else(Problem::panicked, |error| error.problem(&cell));
                let why = problem.detail.clone();
                (Err(problem), Some(why))
            }
            Err(error) => (Ok(()), Some(format!("{error}; make it by commands, or restart the daemon"))),
        };
        if let Some(why) = &why {
            tracing::error!(worker = %cell, "what the configuration file declares may not be there: {why}");
        }
        if let Some(known) = self.known().get_mut(&cell) {
            // What it may have made has its names until it says what it has.
            let made = std::mem::take(&mut known.coming);
            // Who refuses may have others of these names.
            let names = if declared.is_ok() { made.names.clone() } else { BTreeSet::new() };
            known.stored.get_or_insert_default().names.extend(made.names);
            known.left_out = why.map(|why| LeftOut { why, names });
        }
        self.refresh(&cell).await;
        declared
    }

    /// After a worker's end: finishes what it had begun.
    ///
    /// `on_trial`: this worker began on trial, whatever has become of that since.
    pub(crate) async fn go_on(self: Arc<Self>, on_trial: bool) {
        if on_trial {
            // A trial may last for a day: neither volumes on their way nor users who were shut out wait for its end.
            tokio::join!(self.stand_trial(), self.take_up());
        } else {
            self.call_off().await;
            self.take_up().await;
        }
    }

    async fn take_up(self: &Arc<Self>) {
        self.refresh_all().await;
        self.watch_all();
        let _change = self.change.lock().await;
        self.finish_moves().await;
        for cell in self.names() {
            self.retire(&cell).await;
        }
    }

    /// The keeper's word that this worker's trial is over.
    pub(crate) fn note_settled(&self) {
        self.settled.notify_one();
    }

    /// While this worker's new binary is on trial, the cells' are as well; then they go on.
    async fn stand_trial(self: &Arc<Self>) {
        while self.keeper.is_on_trial() {
            tokio::select! {
                () = tokio::time::sleep(TRIAL_LOOK) => {}
                // At once: a worker that ended before it had told them would find them on trial, and call them off.
                () = self.settled.notified() => break,
            }
            if let Some((cell, why)) = self.failed_cell().await {
                // They were asked one after the other: it may be over by now.
                if !self.keeper.is_on_trial() {
                    tracing::error!(worker = %cell, "the new binary failed there, and the upgrade is over everywhere else: {why}");
                    break;
                }
                tracing::error!(worker = %cell, "the new binary failed there; the upgrade is called off");
                leave_words(&self.run_dir, &format!("worker {cell}: {why}"));
                std::process::exit(1);
            }
        }
        self.settle().await;
    }

    /// Whether a volume is known to be on its way, though nothing moves it.
    pub(super) async fn has_unfinished(&self) -> bool {
        let waits = |view: &Value| Found::of(view) == Found::Waits;
        if self.known().values().any(|known| known.volumes.values().any(waits)) {
            return true;
        }
        let manager = Arc::clone(&self.manager);
        tokio::task::spawn_blocking(move || manager.has_received()).await.unwrap_or(false)
    }

    /// Volumes that were on their way when a worker ended or was not heard. One that may also be in a cell that does not answer now stays
    /// as it is: whether that has it open, only that can say.
    pub(super) async fn finish_moves(self: &Arc<Self>) {
        self.refresh_all().await;
        let manager = Arc::clone(&self.manager);
        let (here, opening) =
            tokio::task::spawn_blocking(move || (manager.volumes(), manager.opening())).await.unwrap_or_default();
        let mut places = Places::new();
        let mut note = |place: Place, view: &Value| {
            let text = |key: &str| view[key].as_str().unwrap_or_default().to_owned();
            let Ok(name) = text("name").parse() else { return };
            places.entry((text("uuid"), name)).or_default().push((place, Found::of(view)));
        };
        for view in here.iter().filter_map(|view| serde_json::to_value(view).ok()) {
            note(Place::Main, &view);
        }
        for (cell, known) in self.known().iter() {
            known.of(Kind::Volumes).values().for_each(|view| note(Place::Cell(cell.clone()), view));
        }
        let mut to_do = unfinished(places, |uuid| self.known().values().any(|known| known.may_have(uuid)));
        if let Some(volumes) = to_do.get_mut(&(Place::Main, true)) {
            // What hangs as it is opened here is asked for once.
            volumes.retain(|name| !opening.contains(name));
        }
        to_do.retain(|_, volumes| !volumes.is_empty());
        let places: BTreeSet<Place> = to_do.keys().map(|(place, _)| place.clone()).collect();
        for ((place, opens), volumes) in to_do {
            let step =
                if opens { Step::Open { volumes, closed: Vec::new() } } else { Step::release(&volumes, CHANGE_LIMIT) };
            if let Err(error) = self.step(&place, step, None).await {
                tracing::error!(worker = place.name(), "a move is not finished: {}", Problem::from(error).detail);
            }
        }
        for place in &places {
            self.heard(place).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::{
        Json, Router,
        extract::Request,
        http::StatusCode,
        response::{IntoResponse, Response},
    };
    use serde_json::json;
    use tokio::{
        net::UnixListener,
        sync::{mpsc::unbounded_channel, watch},
    };
    use uuid::Uuid;

    use super::*;
    use crate::{
        cells::{
            LOOK,
            client::ask,
            door::Part,
            folder,
            front::tests::{Rig, nothing},
        },
        dirs::API_SOCKET,
        manager::tests::PATIENCE,
        upgrade::{UpgradeSpec, UpgradeView},
    };

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn cell(text: &str) -> Place {
        Place::Cell(name(text))
    }

    fn in_places(volumes: &[(&str, &str, Place, Found)]) -> Places {
        let mut places = Places::new();
        for (uuid, volume, place, found) in volumes {
            places.entry(((*uuid).to_owned(), name(volume))).or_default().push((place.clone(), *found));
        }
        places
    }

    /// A cell that something is declared for.
    fn declared() -> Arranged {
        let part = Part { volumes: BTreeSet::new(), devices: [name("d")].into() };
        Arranged { parts: [(Some(name("x")), part)].into(), ..Arranged::of([name("x")].into()) }
    }

    /// What the status says of what is not as it should be.
    async fn failed(rig: &Rig) -> String {
        let status = ask(&rig.cells.run_dir, Method::GET, "/v1/status", Bytes::new(), PATIENCE).await.unwrap();
        status.json::<Value>().unwrap()["failed"].to_string()
    }

    #[tokio::test]
    async fn a_cell_that_is_late_keeps_nobody_from_starting_and_is_left_without_its_part() {
        let arranged = declared();
        let rig = Rig::of(&arranged, 0);
        assert!(rig.cells.begin_within(&arranged, (Duration::ZERO, PATIENCE)).await.is_ok());
        let said = failed(&rig).await;
        assert!(said.contains("may not be there") && said.contains("restart the daemon"), "{said}");
        let has_it = || Json(json!([{ "name": "d" }])).into_response();
        rig.cell("x", move |_, path| if path == Kind::Devices.path() { has_it() } else { nothing() });
        rig.cells.refresh_all().await;
        let said = failed(&rig).await;
        assert!(!said.contains("may not be there"), "it has it from before: {said}");
    }

    #[tokio::test]
    async fn what_a_cell_takes_long_to_make_it_is_asked_for_once() {
        let arranged = declared();
        let rig = Rig::of(&arranged, 0);
        let ((tell, mut told), (release, held)) = (unbounded_channel(), watch::channel(()));
        let own = folder(&rig.cells.run_dir, &name("x"));
        std::fs::create_dir_all(&own).unwrap();
        let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
        let answer = move |request: Request| {
            let (tell, mut held) = (tell.clone(), held.clone());
            async move {
                if *request.method() == Method::GET {
                    return nothing();
                }
                let _ = tell.send(request.uri().path().to_owned());
                let _ = held.changed().await;
                StatusCode::NO_CONTENT.into_response()
            }
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        assert!(rig.cells.begin_within(&arranged, (PATIENCE, Duration::ZERO)).await.is_ok());
        assert_eq!(told.recv().await.as_deref(), Some(door::DECLARE));
        let device = json!({ "name": "d", "nvme": {} });
        assert_eq!(rig.post("/v1/devices", &device).await, StatusCode::SERVICE_UNAVAILABLE, "it is to be there");
        let spec = UpgradeSpec { binary: "/bin/true".into(), trial_seconds: None };
        assert!(rig.cells.upgrade_all(&spec).await.unwrap_err().contains("worker x is making"));
        release.send(()).unwrap();
        let is_over = || rig.cells.known().values().all(|known| known.left_out.is_none() && known.stored.is_none());
        let over = async {
            while !is_over() {
                tokio::time::sleep(LOOK).await;
            }
        };
        timeout(PATIENCE, over).await.expect("its end");
        assert_eq!(rig.post("/v1/devices", &device).await, StatusCode::CREATED, "it says that it has none");
        assert!(told.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_cell_that_ends_by_what_is_declared_keeps_nobody_from_starting() {
        let arranged = declared();
        let rig = Rig::of(&arranged, 0);
        rig.cell("x", |method, _| if *method == Method::GET { nothing() } else { panic!("its worker dies") });
        assert!(rig.cells.begin_within(&arranged, (PATIENCE, PATIENCE)).await.is_ok());
        let said = failed(&rig).await;
        assert!(said.contains("may not be there") && said.contains("it broke off"), "{said}");
    }

    #[tokio::test]
    async fn a_cell_that_refuses_what_is_declared_has_the_start_fail() {
        let arranged = declared();
        let rig = Rig::of(&arranged, 0);
        let refuse = || Problem::of_cell("config", "no".to_owned(), None).into_response();
        rig.cell("x", move |method, _| if *method == Method::GET { nothing() } else { refuse() });
        let refused = rig.cells.begin_within(&arranged, (PATIENCE, PATIENCE)).await.unwrap_err();
        assert_eq!(refused.to_string(), "worker x: no");
    }

    #[tokio::test]
    async fn an_upgrade_that_is_over_when_a_cell_fails_is_not_called_off() {
        let mut rig = Rig::of(&Arranged::of([name("x")].into()), Rig::ON_TRIAL);
        let (keeper, link) = (Arc::new(rig.keeper()), Arc::clone(&rig.cells.keeper));
        let said = Arc::new(Mutex::new(false));
        rig.cell("x", move |method, path| -> Response {
            if *method != Method::GET || path != "/v1/upgrade" {
                return StatusCode::NO_CONTENT.into_response();
            }
            // The trial ends while it is asked.
            if !std::mem::replace(&mut *said.lock().unwrap(), true) {
                Rig::say_settled(&keeper);
                link.listen().unwrap();
            }
            Json(UpgradeView::failed(Uuid::new_v4(), None, "it died".to_owned())).into_response()
        });
        assert!(rig.cells.keeper.is_on_trial());
        // Otherwise this process would end.
        timeout(PATIENCE, rig.cells.stand_trial()).await.expect("the end of the trial");
        assert!(!rig.cells.keeper.is_on_trial());
    }

    #[test]
    fn a_move_is_finished_and_its_like_is_left_alone() {
        let nobody = |_: &str| false;
        // One volume in two places: whoever has it open keeps it.
        let moved = || in_places(&[("1", "a", Place::Main, Found::Waits), ("1", "a", cell("x"), Found::Open)]);
        assert_eq!(unfinished(moved(), nobody), [((Place::Main, false), vec![name("a")])].into());
        assert!(unfinished(moved(), |uuid| uuid == "1").is_empty(), "a worker that does not answer may have it");
        let alone = in_places(&[("1", "a", cell("x"), Found::Waits)]);
        assert_eq!(unfinished(alone, nobody), [((cell("x"), true), vec![name("a")])].into());
        // Two that were given one UUID are no move.
        let twins = in_places(&[("1", "a", Place::Main, Found::Open), ("1", "b", cell("x"), Found::Open)]);
        assert!(unfinished(twins, nobody).is_empty());
    }
}
