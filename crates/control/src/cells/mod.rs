//! Cells: keepers with workers of their own, each for the devices of one tenant or for one device (docs/isolation.md).
//!
//! ```text
//!   operator ── RUN_DIR/api.sock ──► front ─┬─► this worker's own API                      (its keeper starts the cells' keepers)
//!                                           └─► RUN_DIR/cells/NAME/api.sock ── cell: keeper, worker, STATE_DIR/cells/NAME
//! ```
//!
//! Invariants:
//! * A cell needs nobody: while the daemon's own worker is dead, or hangs, its guests do not notice, and it brings its devices back by
//!   itself.
//! * What is where is the cells' to say: it is asked for, and only remembered for when one does not answer. As long as one has not said what it
//!   has, and nobody knows by its state, no name is free that nobody else has.
//! * A device and all that it shows are in one place. A volume that nobody uses goes where it is attached.
//! * One change of what is where at a time. What may have to wait for a file system in this worker is done before its turn comes; who waits for a turn is
//!   told "no" in the end, and then nothing of it is done.

mod arrange;
mod begin;
mod client;
mod door;
mod front;
mod groups;
mod merge;
mod sessions;
mod upgrade;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::Method};
use millrace_keeper::Link;
use serde_json::Value;
use tokio::{task::JoinSet, time::timeout};
use uuid::Uuid;

pub(crate) use self::{
    arrange::{ArrangeError, Arranged, arrange, part_of},
    begin::BeginError,
    door::door,
    front::front,
};
use self::{
    begin::Found,
    client::{Answer, CellError, ask},
};
use crate::{
    Name,
    api::Problem,
    config::IsolationMode,
    dirs::is_locked,
    manager::{ChangePlace, Manager, State, Step},
    store::{self, VolumeRecord},
};

/// The daemon's own worker.
pub(crate) const MAIN: &str = "main";

/// Where cells have their folders, in the daemon's run and state directories.
pub(crate) const DIR: &str = "cells";

/// How long a cell may take to tell what it has, to show that it hears before it is given a change that others wait for, to do something (so long
/// waits a change for its turn, too), and to start or end.
const LIST_LIMIT: Duration = Duration::from_secs(2);
const HEARD_LIMIT: Duration = Duration::from_secs(5);
const CHANGE_LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(5);

/// A cell's folder.
pub(crate) fn folder(base: &Path, cell: &Name) -> PathBuf {
    base.join(DIR).join(cell.as_str())
}

/// The cells that have a state.
pub(crate) fn stored(state_dir: &Path) -> io::Result<BTreeSet<Name>> {
    let entries = match fs::read_dir(state_dir.join(DIR)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let name = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let names: BTreeSet<Name> = entries.filter_map(Result::ok).filter_map(name).collect();
    Ok(names.into_iter().filter(|name| folder(state_dir, name).join(store::FILE).exists()).collect())
}

/// Where something is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Main,
    Cell(Name),
}

impl Place {
    fn name(&self) -> &str {
        match self {
            Self::Main => MAIN,
            Self::Cell(name) => name.as_str(),
        }
    }
}

/// What there may be in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Volumes,
    Devices,
    Copies,
}

impl Kind {
    fn path(self) -> &'static str {
        match self {
            Self::Volumes => "/v1/volumes",
            Self::Devices => "/v1/devices",
            Self::Copies => "/v1/copies",
        }
    }
}

/// What is in a cell, or is to be, though it has not said so: names, and those UUIDs that are known.
#[derive(Clone, Debug, Default)]
struct Unsaid {
    names: BTreeSet<(Kind, String)>,
    uuids: BTreeSet<String>,
}

impl Unsaid {
    fn note(&mut self, kind: Kind, name: &Name, uuid: Option<Uuid>) {
        self.names.insert((kind, name.to_string()));
        self.uuids.extend(uuid.map(|uuid| uuid.to_string()));
    }
}

/// Why a cell may lack something that the configuration file declares for it.
#[derive(Clone, Debug)]
struct LeftOut {
    why: String,
    /// Where it was not asked: once it says that it has these, it lacks nothing.
    names: BTreeSet<(Kind, String)>,
}

/// What a cell said last.
#[derive(Clone, Debug, Default)]
struct Known {
    volumes: BTreeMap<String, Value>,
    devices: BTreeMap<String, Value>,
    copies: BTreeMap<String, Value>,
    /// It has answered since this worker began.
    is_heard: bool,
    /// Why it does not answer.
    silent: Option<String>,
    /// What its state had when the daemon started, until it is heard. `None`: nobody knows.
    stored: Option<Unsaid>,
    /// What it is making of the configuration file.
    coming: Unsaid,
    left_out: Option<LeftOut>,
}

impl Known {
    /// Before it is heard.
    fn supposed(cell: &Name, arranged: &Arranged) -> Self {
        Self { stored: arranged.stored.get(cell).cloned(), ..Self::default() }
    }

    /// One that is new.
    fn nothing() -> Self {
        Self { stored: Some(Unsaid::default()), ..Self::default() }
    }

    /// Whether nobody can say what it has.
    fn is_unknown(&self) -> bool {
        !self.is_heard && self.stored.is_none()
    }

    /// Why it may lack something that the configuration file declares for it.
    fn lacks(&self) -> Option<&str> {
        let LeftOut { why, names } = self.left_out.as_ref()?;
        let has_all = !names.is_empty() && names.iter().all(|(kind, name)| self.of(*kind).contains_key(name));
        (!has_all).then_some(why.as_str())
    }

    /// The names of what it has, or is to have, and has not told.
    fn unsaid(&self, kind: Kind) -> impl Iterator<Item = &String> {
        let all = self.stored.iter().chain([&self.coming]);
        all.flat_map(|unsaid| &unsaid.names).filter(move |(of, _)| *of == kind).map(|(_, name)| name)
    }

    fn of(&self, kind: Kind) -> &BTreeMap<String, Value> {
        match kind {
            Kind::Volumes => &self.volumes,
            Kind::Devices => &self.devices,
            Kind::Copies => &self.copies,
        }
    }

    fn is_empty(&self) -> bool {
        let has_nothing = self.volumes.is_empty() && self.devices.is_empty() && self.coming.names.is_empty();
        // One that lacks its part is shown for as long.
        self.silent.is_none() && has_nothing && self.lacks().is_none()
    }

    /// Whether a volume of this identity may be there, as far as can be told of a cell that does not answer.
    fn may_have(&self, uuid: &str) -> bool {
        self.silent.is_some() && (!self.is_heard || self.volumes.values().any(|view| view["uuid"] == uuid))
    }
}

/// The cells of a daemon, for its own worker.
pub(crate) struct Cells {
    mode: IsolationMode,
    run_dir: PathBuf,
    state_dir: PathBuf,
    keeper: Arc<Link>,
    manager: Arc<Manager>,
    known: Mutex<BTreeMap<Name, Known>>,
    /// Cells whose sessions are looked after.
    watched: Mutex<BTreeSet<Name>>,
    /// The operator's: programs have their sessions without it, for it may be held while a cell is waited for.
    change: tokio::sync::Mutex<()>,
    /// Who gets a session is decided about one after the other: no user has more than he may have.
    admission: tokio::sync::Mutex<()>,
    /// This worker's trial is over.
    settled: tokio::sync::Notify,
    /// This worker is being exchanged: no change begins any more.
    exchanged: tokio::sync::watch::Sender<bool>,
}

impl Cells {
    pub(crate) fn new(
        mode: IsolationMode,
        (run_dir, state_dir): (PathBuf, PathBuf),
        keeper: &Arc<Link>,
        manager: &Arc<Manager>,
        arranged: &Arranged,
    ) -> Arc<Self> {
        let known = arranged.cells.iter().map(|name| (name.clone(), Known::supposed(name, arranged))).collect();
        let (keeper, manager) = (Arc::clone(keeper), Arc::clone(manager));
        Arc::new(Self {
            mode,
            run_dir,
            state_dir,
            keeper,
            manager,
            known: Mutex::new(known),
            watched: Mutex::default(),
            change: tokio::sync::Mutex::new(()),
            admission: tokio::sync::Mutex::new(()),
            settled: tokio::sync::Notify::new(),
            exchanged: tokio::sync::watch::Sender::new(false),
        })
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Name, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> Vec<Name> {
        self.known().keys().cloned().collect()
    }

    /// Asks a cell.
    async fn ask(
        &self,
        cell: &Name,
        (method, path): (Method, &str),
        body: Bytes,
        limit: Duration,
    ) -> Result<Answer, CellError> {
        ask(&folder(&self.run_dir, cell), method, path, body, limit).await
    }

    /// What a cell has, in its own words.
    async fn list(&self, cell: &Name) -> Result<Known, CellError> {
        let mut known = Known { is_heard: true, ..Known::default() };
        let Known { volumes, devices, copies, .. } = &mut known;
        for (kind, list) in [(Kind::Volumes, volumes), (Kind::Devices, devices), (Kind::Copies, copies)] {
            let answer = self.ask(cell, (Method::GET, kind.path()), Bytes::new(), LIST_LIMIT).await?;
            let views: Vec<Value> = answer.json()?;
            let named = |mut view: Value| {
                // Whatever it says of itself, it is this one.
                if let Some(worker) = view.get_mut("worker").and_then(Value::as_object_mut) {
                    worker.insert("name".to_owned(), cell.to_string().into());
                }
                Some((view["name"].as_str()?.to_owned(), view))
            };
            *list = views.into_iter().filter_map(named).collect();
        }
        Ok(known)
    }

    /// Asks a cell what it has.
    async fn refresh(&self, cell: &Name) {
        let listed = self.list(cell).await;
        let mut known = self.known();
        let Some(entry) = known.get_mut(cell) else { return };
        match listed {
            Ok(now) => entry.replace(now),
            Err(error) => entry.silent = Some(error.to_string()),
        }
    }

    /// Asks all of them.
    async fn refresh_all(self: &Arc<Self>) {
        let mut asked = JoinSet::new();
        for cell in self.names() {
            let cells = Arc::clone(self);
            asked.spawn(async move { cells.refresh(&cell).await });
        }
        asked.join_all().await;
    }

    fn known_place(&self, kind: Kind, name: &str) -> Option<Place> {
        cell_with(&self.known(), kind, name).map(|cell| Place::Cell(cell.clone()))
    }

    /// The cell that is making this of the configuration file, and whether it has said that it has it.
    fn maker(&self, kind: Kind, name: &str) -> Option<(Name, bool)> {
        let (known, wanted) = (self.known(), (kind, name.to_owned()));
        let (cell, making) = known.iter().find(|(_, known)| known.coming.names.contains(&wanted))?;
        Some((cell.clone(), making.of(kind).contains_key(name)))
    }

    /// Whether this worker has something of this name.
    async fn is_here(&self, kind: Kind, name: &str) -> bool {
        let (manager, wanted) = (Arc::clone(&self.manager), name.to_owned());
        let here = tokio::task::spawn_blocking(move || match kind {
            Kind::Volumes => manager.has_volume(&wanted),
            Kind::Devices => manager.has_device(&wanted),
            Kind::Copies => manager.copy(&wanted).is_ok(),
        });
        here.await.unwrap_or(false)
    }

    /// Where something of this name is. What nobody has who has been heard may be where nobody has: its name is not free.
    async fn place(self: &Arc<Self>, kind: Kind, name: &str) -> Result<Option<Place>, Problem> {
        if self.is_here(kind, name).await {
            return Ok(Some(Place::Main));
        }
        if let Some((cell, false)) = self.maker(kind, name) {
            return Err(being_made(&cell, name));
        }
        if let Some(place) = self.known_place(kind, name) {
            return Ok(Some(place));
        }
        // A guest may have made it.
        self.refresh_all().await;
        match (self.known_place(kind, name), self.unknown()) {
            (None, Some(problem)) => Err(problem),
            (place, _) => Ok(place),
        }
    }

    /// As [`Self::place`]; what nobody has is for this worker to speak of.
    async fn place_or_main(self: &Arc<Self>, kind: Kind, name: &str) -> Result<Place, Problem> {
        self.place(kind, name).await.map(|place| place.unwrap_or(Place::Main))
    }

    /// A cell that may have anything.
    fn unknown(&self) -> Option<Problem> {
        let known = self.known();
        let (cell, unknown) = known.iter().find(|(_, known)| known.is_unknown())?;
        let why = unknown.silent.as_deref().unwrap_or("it was not asked yet");
        let detail = format!("worker {cell} has not said yet what it has, and may have this: {why}");
        let advice = "give the command again when it answers (\"millrace status\" says who does); if it does not, end its \
                      process, and its keeper starts another (docs/isolation.md), or restart the daemon";
        Some(Problem::of_cell("worker-silent", detail, Some(advice.to_owned())))
    }

    /// Has a cell run, and waits until it answers.
    async fn start(&self, cell: &Name, limit: Duration) -> Result<(), Problem> {
        let failed = |why: String| {
            let detail = format!("worker {cell} does not start, or does not answer: {why}");
            Problem::of_cell("worker-failed", detail, Some("the log says more".to_owned()))
        };
        self.known().entry(cell.clone()).or_insert_with(Known::nothing);
        self.keeper.start_cell(cell.as_str()).map_err(|error| failed(error.to_string()))?;
        let deadline = Instant::now() + limit;
        loop {
            match self.list(cell).await {
                Ok(known) => {
                    self.known().entry(cell.clone()).or_default().replace(known);
                    return Ok(());
                }
                Err(error) if Instant::now() >= deadline => return Err(failed(error.to_string())),
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// A cell has lost something: volumes that nobody is shown there come back, and one that has nothing left ends.
    async fn clear(self: &Arc<Self>, cell: &Name) {
        self.refresh(cell).await;
        let left: Vec<String> = {
            let known = self.known();
            // One that does not answer keeps what it has: nobody waits for it to let go.
            let cell = known.get(cell).filter(|known| known.silent.is_none() && known.devices.is_empty());
            let cell = cell.filter(|known| known.coming.names.is_empty());
            cell.map(|known| known.volumes.keys().cloned().collect()).unwrap_or_default()
        };
        for volume in left {
            // Nobody is served there any more; what cannot go keeps its worker.
            if let Err(problem) = self.move_volume(&volume, &Place::Cell(cell.clone()), &Place::Main).await {
                tracing::debug!(volume, worker = %cell, "the volume stays: {}", problem.detail);
            }
        }
        self.retire(cell).await;
    }

    /// Ends a cell that has nothing.
    async fn retire(&self, cell: &Name) {
        self.refresh(cell).await;
        if !self.known().get(cell).is_some_and(Known::is_empty) {
            return;
        }
        if let Err(error) = self.keeper.stop_cell(cell.as_str()) {
            tracing::warn!(worker = %cell, %error, "a worker that has nothing goes on");
            return;
        }
        let deadline = Instant::now() + CHANGE_LIMIT;
        while is_locked(&folder(&self.run_dir, cell)) {
            if Instant::now() >= deadline {
                tracing::warn!(worker = %cell, "a worker that has nothing does not end");
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
        self.known().remove(cell);
        forget(&self.state_dir, cell);
        tracing::info!(worker = %cell, "the worker had nothing left, and has ended");
    }

    async fn step(&self, place: &Place, step: Step, held: Option<&Held>) -> Result<Vec<VolumeRecord>, StepError> {
        match place {
            Place::Main => {
                let (manager, held) = (Arc::clone(&self.manager), held.cloned());
                let done = tokio::task::spawn_blocking(move || {
                    // As long as the thread is: nobody waits for it for ever.
                    let _held = held;
                    manager.step(&step)
                });
                // As of a cell: others' changes wait for it.
                let done = timeout(CHANGE_LIMIT, done).await.map_err(|_| StepError::Unheard(silent_main()))?;
                let done = done.map_err(|_| StepError::Unheard(Problem::panicked()))?;
                done.map_err(|error| StepError::Refused(Problem::from(&error)))
            }
            Place::Cell(cell) => {
                let body = serde_json::to_vec(&step).expect("steps have text for keys and nothing that JSON lacks");
                let answer = self.ask(cell, (Method::POST, door::MOVE), body.into(), CHANGE_LIMIT).await;
                answer.and_then(|answer| answer.json()).map_err(|error| match error {
                    CellError::Refused(problem) => StepError::Refused(problem),
                    error => StepError::Unheard(error.problem(cell)),
                })
            }
        }
    }

    /// A place in this worker for all of a move, if it has a part in it: no step of one that was begun is refused for want of one.
    async fn place_for_move(&self, from: &Place, to: &Place) -> Result<Option<Held>, Problem> {
        if *from != Place::Main && *to != Place::Main {
            return Ok(None);
        }
        let place = self.manager.places().of_move().await.map_err(|why| Problem::no_place(&why))?;
        Ok(Some(Arc::new(place)))
    }

    /// Takes a volume that nobody uses, and what goes with it, to another place.
    async fn move_volume(self: &Arc<Self>, volume: &str, from: &Place, to: &Place) -> Result<(), Problem> {
        let place = self.place_for_move(from, to).await?;
        let held = place.as_ref();
        let mut records = self.step(from, Step::Look { volume: volume.to_owned() }, held).await?;
        let volumes: Vec<Name> = records.iter().map(|record| record.spec.name.clone()).collect();
        // It would be made once more where it was.
        if let Some((cell, _)) = volumes.iter().find_map(|name| self.maker(Kind::Volumes, name.as_str())) {
            return Err(being_made(&cell, volume));
        }
        let was_open = !self.has_failed(volume, from).await;
        self.step(to, Step::Receive { records: records.clone() }, held).await?;
        let closed = match self.step(from, Step::release_looked(&records, CHANGE_LIMIT), held).await {
            Ok(closed) => closed,
            Err(StepError::Refused(problem)) => {
                self.step(to, Step::release(&volumes, CHANGE_LIMIT), held).await?;
                return Err(problem);
            }
            Err(StepError::Unheard(problem)) => {
                // It may have let go: what was received stays until it says, now or later.
                self.finish_moves().await;
                return Err(problem);
            }
        };
        // They may have found out, when they were closed, what their next guests are to be told.
        let closed: Vec<_> = closed.into_iter().filter(|record| !records.contains(record)).collect();
        for record in &mut records {
            if let Some(closed) = closed.iter().find(|closed| closed.uuid == record.uuid) {
                record.clone_from(closed);
            }
        }
        let mut opened = self.step(to, Step::Open { volumes: volumes.clone(), closed }, held).await;
        if was_open && let Err(StepError::Refused(problem)) = opened {
            // Where it was, it can be used.
            let back = self.move_back(records, volumes, (from, to), held).await;
            if let Err(error) = back {
                tracing::error!(volume, worker = to.name(), "the volume does not go back: {}", Problem::from(error).detail);
            }
            opened = Err(StepError::Refused(problem));
        }
        for place in [from, to] {
            self.heard(place).await;
        }
        opened?;
        tracing::info!(volume, from = from.name(), to = to.name(), "volume moved");
        Ok(())
    }

    async fn has_failed(&self, volume: &str, place: &Place) -> bool {
        match place {
            Place::Cell(cell) => self
                .known()
                .get(cell)
                .is_some_and(|known| known.volumes.get(volume).is_some_and(|view| view["state"] == "failed")),
            Place::Main => {
                let (manager, volume) = (Arc::clone(&self.manager), volume.to_owned());
                let view = tokio::task::spawn_blocking(move || manager.volume(&volume)).await;
                matches!(view, Ok(Ok(view)) if view.state == State::Failed)
            }
        }
    }

    /// Undoes a move of what does not open where it went.
    async fn move_back(
        &self,
        records: Vec<VolumeRecord>,
        volumes: Vec<Name>,
        (from, to): (&Place, &Place),
        held: Option<&Held>,
    ) -> Result<(), StepError> {
        self.step(from, Step::Receive { records }, held).await?;
        match self.step(to, Step::release(&volumes, CHANGE_LIMIT), held).await {
            Err(StepError::Refused(problem)) => {
                self.step(from, Step::release(&volumes, CHANGE_LIMIT), held).await?;
                return Err(StepError::Refused(problem));
            }
            released => released?,
        };
        self.step(from, Step::Open { volumes, closed: Vec::new() }, held).await?;
        Ok(())
    }
}

/// The cell that has something of this name. Of two that have a volume, it is on its way to the one that waits.
fn cell_with<'a>(known: &'a BTreeMap<Name, Known>, kind: Kind, name: &str) -> Option<&'a Name> {
    let found = known.iter().filter_map(|(cell, known)| Some((cell, Found::of(known.of(kind).get(name)?))));
    let said = found.min_by_key(|(_, found)| *found == Found::Waits).map(|(cell, _)| cell);
    let has_unsaid = |known: &Known| known.unsaid(kind).any(|unsaid| unsaid == name);
    said.or_else(|| known.iter().find(|(_, known)| has_unsaid(known)).map(|(cell, _)| cell))
}

/// The place that a move has in this worker.
type Held = Arc<ChangePlace>;

/// Why a part of a move was not done.
enum StepError {
    /// Nothing was done.
    Refused(Problem),
    /// It may have been done: nobody has said.
    Unheard(Problem),
}

impl From<StepError> for Problem {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Refused(problem) | StepError::Unheard(problem) => problem,
        }
    }
}

/// Whose a name is, is seen when a cell has made what is declared for it.
fn being_made(cell: &Name, name: &str) -> Problem {
    let detail = format!("worker {cell} is making what the configuration file declares for it, {name} among it");
    let advice = "give the command again when it has (\"millrace status\" says whether); if it does not come to its end, end its \
                  process, and its keeper starts another (docs/isolation.md)";
    Problem::of_cell("worker-silent", detail, Some(advice.to_owned()))
}

/// This worker's own step has not come to its end.
fn silent_main() -> Problem {
    CellError::Silent.problem(&MAIN.parse().expect("it is a name"))
}

/// A cell is no more; its account stays.
fn forget(state_dir: &Path, cell: &Name) {
    let file = folder(state_dir, cell).join(store::FILE);
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %file.display(), %error, "the state of a worker that has nothing stays behind");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_on_its_way_is_where_it_was() {
        let (x, y): (Name, Name) = ("x".parse().unwrap(), "y".parse().unwrap());
        let waits = json!({ "name": "v", "state": "failed", "reason": crate::manager::RECEIVED });
        let open = json!({ "name": "v", "state": "ready" });
        let with = |view: &Value| Known { volumes: [("v".to_owned(), view.clone())].into(), ..Known::default() };
        let in_both = BTreeMap::from([(x.clone(), with(&waits)), (y.clone(), with(&open))]);
        assert_eq!(cell_with(&in_both, Kind::Volumes, "v"), Some(&y));
        let in_one = BTreeMap::from([(x.clone(), with(&waits)), (y, Known::default())]);
        assert_eq!(cell_with(&in_one, Kind::Volumes, "v"), Some(&x));
        assert_eq!(cell_with(&in_one, Kind::Devices, "v"), None);
    }
}
