//! The daemon's own worker begins: its cells are there, or come.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use axum::http::Method;
use serde_json::Value;
use thiserror::Error;
use tokio::task::JoinSet;

use super::{CHANGE_LIMIT, Cells, Kind, Place, arrange::Arranged, door};
use crate::{
    Name,
    api::Problem,
    manager::{RECEIVED, Step},
    upgrade::leave_words,
};

/// How often is looked whether a cell's new binary has failed.
const TRIAL_LOOK: Duration = Duration::from_secs(1);

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

/// A cell that something was declared for is not there, or refuses it.
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
    /// After a start of the daemon: waits for all cells, and has them make sure of what the configuration file declares.
    pub(crate) async fn begin(self: &Arc<Self>, arranged: &Arranged) -> Result<(), BeginError> {
        let mut begun = JoinSet::new();
        for cell in self.names() {
            let part = arranged.parts.get(&Some(cell.clone()));
            let part = part.map(|part| serde_json::to_vec(part).expect("names are text"));
            let cells = Arc::clone(self);
            begun.spawn(async move { (cells.begin_one(&cell, part.clone()).await, part.is_some(), cell) });
        }
        for (result, is_declared, cell) in begun.join_all().await {
            match result {
                Ok(()) => {}
                Err(problem) if is_declared => return Err(BeginError { cell, problem: Box::new(problem) }),
                // What fails while a daemon starts is shown, and costs nothing else.
                Err(problem) => tracing::error!(worker = %cell, "{}", problem.detail),
            }
        }
        Ok(())
    }

    async fn begin_one(&self, cell: &Name, part: Option<Vec<u8>>) -> Result<(), Problem> {
        self.start(cell).await?;
        let Some(part) = part else { return Ok(()) };
        match self.ask(cell, (Method::POST, door::DECLARE), part.into(), CHANGE_LIMIT).await {
            Ok(answer) if answer.status.is_success() => {}
            Ok(answer) => {
                return Err(answer.json::<Value>().err().map_or_else(Problem::panicked, |error| error.problem(cell)));
            }
            Err(error) => return Err(error.problem(cell)),
        }
        self.refresh(cell).await;
        Ok(())
    }

    /// After a worker's end: finishes what it had begun.
    ///
    /// `on_trial`: this worker began on trial, whatever has become of that since.
    pub(crate) async fn go_on(self: Arc<Self>, on_trial: bool) {
        if on_trial {
            self.stand_trial().await;
        } else {
            self.call_off().await;
        }
        let _change = self.change.lock().await;
        self.finish_moves().await;
        for cell in self.names() {
            self.retire(&cell).await;
        }
        self.watch_all();
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
    use super::*;

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
