//! What is about all cells, put together.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    body::{Bytes, to_bytes},
    http::Method,
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Cells, Kind, Known, LIST_LIMIT, client::CellError, front::Call, sessions::is_reserved};
use crate::{
    Name,
    api::{
        Problem,
        metrics::{self, HeldBack},
    },
    manager::{GroupView, Status, WorkerView},
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

    /// What cells' groups, which are given, and users' caps there have held back.
    fn held_back(&self, mut groups: BTreeMap<Name, Vec<GroupView>>) -> Vec<HeldBack> {
        let in_cell = |(cell, known): (&Name, &Known)| HeldBack {
            worker: cell.to_string(),
            throttles: Vec::new(),
            groups: groups.remove(cell).unwrap_or_default(),
            users: known.held_back().into_iter().collect(),
        };
        self.known().iter().map(in_cell).collect()
    }

    pub(super) async fn metrics(self: &Arc<Self>, call: Call) -> Response {
        drop(call);
        let manager = Arc::clone(&self.manager);
        let own = move || {
            let held_back = HeldBack::here(&manager);
            let (volumes, devices) = (manager.volumes(), manager.devices());
            (manager.status_with(&volumes, &devices), volumes, devices, manager.copies(), held_back)
        };
        let Ok((status, mut volumes, mut devices, mut copies, held_back)) = tokio::task::spawn_blocking(own).await else {
            return Problem::panicked().into_response();
        };
        let status = self.sum(status).await;
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
        let groups = if held_back.groups.is_empty() { Vec::new() } else { self.groups_elsewhere().await };
        let groups = groups.into_iter().filter_map(|(groups, cell)| Some((cell, groups.ok()?))).collect();
        let mut everywhere = vec![held_back];
        everywhere.extend(self.held_back(groups));
        metrics::response(&status, &devices, &volumes, &copies, &everywhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cells::{
        Arranged,
        front::tests::{Rig, nothing},
    };

    /// Sums would become less with each worker that ends.
    #[tokio::test]
    async fn what_each_worker_holds_back_is_told_apart() {
        let names: [Name; 2] = ["x", "y"].map(|name| name.parse().unwrap());
        let rig = Rig::of(&Arranged::of(names.into()), 0);
        for (name, count) in [("x", 7), ("y", 9)] {
            rig.cell(name, move |_, path| match path {
                "/v1/groups" => {
                    let caps = json!({ "iops": 1000 });
                    let group =
                        json!({ "name": "g", "caps": caps, "weight": 1, "volumes": [], "groups": [], "held_back": count });
                    Json(json!([group])).into_response()
                }
                "/v1/devices" => {
                    let session = json!({ "name": name, "session_of_uid": 5, "session_held_back": count, "namespaces": [] });
                    Json(json!([session])).into_response()
                }
                _ => nothing(),
            });
        }
        rig.post("/v1/groups", &json!({ "name": "g", "caps": { "iops": 1000 } })).await;
        let text = rig.get("/metrics").await;
        for sample in [
            "group_held_back_total{group=\"g\"} 0",
            "group_held_back_total{group=\"g\",worker=\"x\"} 7",
            "group_held_back_total{group=\"g\",worker=\"y\"} 9",
            "app_held_back_total{user=\"5\",worker=\"x\"} 7",
            "app_held_back_total{user=\"5\",worker=\"y\"} 9",
        ] {
            assert!(text.lines().any(|line| line.strip_prefix("millrace_") == Some(sample)), "{sample}: {text}");
        }
    }
}
