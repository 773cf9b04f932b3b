//! Groups: each worker has those that its volumes are in, with buckets of its own. What they are is one thing everywhere: what is said of one is
//! said to all, and the daemon's own worker is who knows it.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::Value;
use tokio::task::JoinSet;

use super::{
    Cells, HEARD_LIMIT, LIST_LIMIT,
    client::{Answer, CellError},
    front::Call,
    merge::read,
};
use crate::{Name, api::Problem, error::ControlError, manager::GroupView};

const PATH: &str = "/v1/groups";

/// Adds to a group what is in it elsewhere.
fn add(group: &mut GroupView, elsewhere: &[GroupView]) {
    let Some(there) = elsewhere.iter().find(|there| there.name == group.name) else { return };
    group.volumes.extend(there.volumes.iter().cloned());
    group.groups.extend(there.groups.iter().cloned());
    for names in [&mut group.volumes, &mut group.groups] {
        names.sort();
        names.dedup();
    }
    group.held_back += there.held_back;
}

/// Some have not done what the others did.
fn unfinished(name: &str, what: &str, failed: &[String]) -> Response {
    let advice = "give the command again when they answer (\"millrace status\" says who does)".to_owned();
    let detail = format!("group {name} is not {what} everywhere: {}", failed.join(", "));
    Problem::of_cell("worker-silent", detail, Some(advice)).into_response()
}

impl Cells {
    async fn groups_of(&self, cell: &Name) -> Result<Vec<GroupView>, CellError> {
        self.ask(cell, (Method::GET, PATH), Bytes::new(), LIST_LIMIT).await?.json()
    }

    /// What cells say of their groups.
    pub(super) async fn groups_elsewhere(self: &Arc<Self>) -> Vec<(Result<Vec<GroupView>, CellError>, Name)> {
        let mut asked = JoinSet::new();
        for cell in self.names() {
            let cells = Arc::clone(self);
            asked.spawn(async move { (cells.groups_of(&cell).await, cell) });
        }
        asked.join_all().await
    }

    /// Adds to the daemon's own worker's groups what is in them elsewhere, but for cells that do not answer.
    pub(super) async fn add_members(self: &Arc<Self>, groups: &mut [GroupView]) {
        if groups.is_empty() {
            return;
        }
        for (theirs, cell) in self.groups_elsewhere().await {
            match theirs {
                Ok(theirs) => {
                    for group in &mut *groups {
                        add(group, &theirs);
                    }
                }
                Err(error) => tracing::debug!(worker = %cell, %error, "what is in groups there is left out"),
            }
        }
    }

    pub(super) async fn groups(self: &Arc<Self>, call: Call) -> Response {
        match read::<Vec<GroupView>>(call.here().await).await {
            Ok(mut groups) => {
                self.add_members(&mut groups).await;
                Json(groups).into_response()
            }
            Err(response) => response,
        }
    }

    pub(super) async fn show_group(self: &Arc<Self>, call: Call) -> Response {
        match read::<GroupView>(call.here().await).await {
            Ok(mut group) => {
                self.add_members(std::slice::from_mut(&mut group)).await;
                Json(group).into_response()
            }
            Err(response) => response,
        }
    }

    /// Has all cells do the same with a group; what those say that did not. One that has no such group has nothing to do.
    async fn tell_cells(self: &Arc<Self>, method: &Method, path: &str, body: &Bytes) -> Vec<String> {
        let mut told = JoinSet::new();
        for cell in self.names() {
            let (cells, method, path, body) = (Arc::clone(self), method.clone(), path.to_owned(), body.clone());
            told.spawn(async move {
                let is_done = |answer: &Answer| answer.status.is_success() || answer.status == StatusCode::NOT_FOUND;
                let failed = match cells.ask(&cell, (method, &path), body, HEARD_LIMIT).await {
                    Ok(answer) if is_done(&answer) => None,
                    Ok(answer) => answer.json::<Value>().err(),
                    Err(error) => Some(error),
                };
                failed.map(|error| format!("worker {cell}: {error}"))
            });
        }
        told.join_all().await.into_iter().flatten().collect()
    }

    /// The daemon's own worker first: what cannot be, it refuses. What a cell does not hear, it is told by the next start.
    pub(super) async fn change_group(self: &Arc<Self>, name: &str, mut call: Call) -> Response {
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        let (path, body) = (call.path().to_owned(), call.body.clone());
        let mut group = match read::<GroupView>(call.here().await).await {
            Ok(group) => group,
            Err(response) => return response,
        };
        let failed = self.tell_cells(&Method::PATCH, &path, &body).await;
        if !failed.is_empty() {
            return unfinished(name, "changed", &failed);
        }
        self.add_members(std::slice::from_mut(&mut group)).await;
        Json(group).into_response()
    }

    /// The daemon's own worker last: as long as it has the group, the others' can be changed and deleted.
    pub(super) async fn delete_group(self: &Arc<Self>, name: &str, mut call: Call) -> Response {
        let _change = match self.turn(&mut call).await {
            Ok(change) => change,
            Err(problem) => return problem.into_response(),
        };
        let (manager, wanted) = (Arc::clone(&self.manager), name.to_owned());
        // What it would refuse, the others are not told.
        let own = tokio::task::spawn_blocking(move || manager.group_to_delete(&wanted)).await;
        let mut group = match own {
            Ok(Ok(group)) => group,
            Ok(Err(error)) => return Problem::from(&error).into_response(),
            Err(_) => return Problem::panicked().into_response(),
        };
        for (theirs, cell) in self.groups_elsewhere().await {
            match theirs {
                Ok(theirs) => add(&mut group, &theirs),
                Err(error) => return error.problem(&cell).into_response(),
            }
        }
        if !group.volumes.is_empty() || !group.groups.is_empty() {
            let GroupView { name, volumes, groups, .. } = group;
            return Problem::from(&ControlError::GroupInUse { name, volumes, groups }).into_response();
        }
        let failed = self.tell_cells(&Method::DELETE, call.path(), &Bytes::new()).await;
        if failed.is_empty() { call.here().await } else { unfinished(name, "deleted", &failed) }
    }
}
