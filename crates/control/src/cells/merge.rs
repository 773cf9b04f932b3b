//! What is about all cells, put together.

use std::sync::Arc;

use axum::{
    Json,
    body::{Bytes, to_bytes},
    http::Method,
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Cells, Kind, LIST_LIMIT, MAIN, client::CellError, front::Call, sessions::is_reserved};
use crate::{
    Name,
    api::{Problem, metrics},
    manager::{Status, WorkerView},
};

/// What a good answer says.
pub(super) async fn read<T: DeserializeOwned>(response: Response) -> Result<T, Response> {
    if !response.status().is_success() {
        return Err(response);
    }
    let bytes = to_bytes(response.into_body(), usize::MAX).await.map_err(|_| Problem::panicked().into_response())?;
    serde_json::from_slice(&bytes).map_err(|_| Problem::panicked().into_response())
}

impl Cells {
    /// What all places have, by name. Of a cell that does not answer: what it said last, as failed.
    async fn views(self: &Arc<Self>, kind: Kind, here: Vec<Value>) -> Vec<Value> {
        self.refresh_all().await;
        let mut all = here;
        for (cell, known) in self.known().iter() {
            all.extend(known.of(kind).values().filter(|view| !is_reserved(view)).cloned().map(|mut view| {
                if let (Some(why), Some(object)) = (&known.silent, view.as_object_mut()) {
                    object.insert("state".to_owned(), json!("failed"));
                    object.insert("reason".to_owned(), json!(format!("worker {cell}: {why}")));
                }
                view
            }));
        }
        all.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
        all
    }

    pub(super) async fn all(self: &Arc<Self>, kind: Kind, call: Call) -> Response {
        match read(call.here().await).await {
            Ok(here) => Json(self.views(kind, here).await).into_response(),
            Err(response) => response,
        }
    }

    async fn status_of(&self, cell: &Name) -> Result<Status, CellError> {
        self.ask(cell, (Method::GET, "/v1/status"), Bytes::new(), LIST_LIMIT).await?.json()
    }

    /// The daemon's status: `own`, and the cells' added.
    async fn sum(self: &Arc<Self>, mut own: Status) -> Status {
        let mut asked = JoinSet::new();
        for cell in self.names() {
            let cells = Arc::clone(self);
            asked.spawn(async move { (cells.status_of(&cell).await, cell) });
        }
        let mut answers = asked.join_all().await;
        answers.sort_by(|(_, a), (_, b)| a.cmp(b));
        for (answer, cell) in answers {
            let (workers, failed, degraded) = match answer {
                Ok(status) => (status.workers, status.failed, status.degraded),
                Err(error) => (vec![self.last_known(&cell)], vec![format!("worker {cell}: {error}")], Vec::new()),
            };
            // Whatever it says of itself, it is this one.
            let workers = workers.into_iter().take(1).map(|worker| WorkerView { name: cell.to_string(), ..worker });
            own.workers.extend(workers);
            own.failed.extend(failed);
            own.degraded.extend(degraded);
        }
        for (cell, known) in self.known().iter() {
            let said = |why: &str| format!("worker {cell}: what the configuration file declares may not be there: {why}");
            own.failed.extend(known.lacks().map(said));
        }
        let sum = |of: fn(&WorkerView) -> usize| own.workers.iter().map(of).sum();
        (own.volumes, own.devices, own.connected) =
            (sum(|worker| worker.volumes), sum(|worker| worker.devices), sum(|worker| worker.connected));
        own
    }

    fn last_known(&self, cell: &Name) -> WorkerView {
        let known = self.known();
        let count = |kind| known.get(cell).map_or(0, |known| known.of(kind).len());
        let (volumes, devices) = (count(Kind::Volumes), count(Kind::Devices));
        WorkerView { name: cell.to_string(), pid: 0, shards: Vec::new(), volumes, devices, connected: 0 }
    }

    pub(super) async fn status(self: &Arc<Self>, call: Call) -> Response {
        match read(call.here().await).await {
            Ok(own) => Json(self.sum(own).await).into_response(),
            Err(response) => response,
        }
    }

    pub(super) async fn metrics(self: &Arc<Self>, call: Call) -> Response {
        drop(call);
        let manager = Arc::clone(&self.manager);
        let own = move || {
            let held_back = (manager.throttles(), manager.groups(), manager.users_held_back());
            let (volumes, devices) = (manager.volumes(), manager.devices());
            (manager.status_with(&volumes, &devices), volumes, devices, manager.copies(), held_back)
        };
        let Ok((status, mut volumes, mut devices, mut copies, mut held_back)) = tokio::task::spawn_blocking(own).await
        else {
            return Problem::panicked().into_response();
        };
        let status = self.sum(status).await;
        self.add_members(&mut held_back.1).await;
        held_back.2.extend(self.others().held_back);
        for (kind, name) in [(Kind::Volumes, "volumes"), (Kind::Devices, "devices"), (Kind::Copies, "copies")] {
            for view in self.views(kind, Vec::new()).await {
                // One that another version made and this one does not understand is left out.
                let understood = match kind {
                    Kind::Volumes => serde_json::from_value(view).map(|view| volumes.push(view)),
                    Kind::Devices => serde_json::from_value(view).map(|view| devices.push(view)),
                    Kind::Copies => serde_json::from_value(view).map(|view| copies.push(view)),
                };
                if let Err(error) = understood {
                    tracing::debug!(%error, "one of the {name} is not among the metrics");
                }
            }
        }
        metrics::response(&status, &devices, &volumes, &copies, &held_back)
    }
}

/// Whether a worker is the daemon's own.
pub(crate) fn is_main(worker: &WorkerView) -> bool {
    worker.name == MAIN
}
