//! Another binary for all cells and this worker: the cells one after the other, then this worker; all of them or none.
//!
//! Each keeper does for its own worker what an upgrade is (docs/adr/0010-upgrade.md). The cells stay on trial until this worker's is over,
//! and go back when it fails: this worker's old binary, which begins then, calls theirs off.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json,
    body::{Bytes, to_bytes},
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use millrace_keeper::{UpgradeResult, Upgraded};
use serde::de::IgnoredAny;
use tokio::{sync::oneshot::error::TryRecvError, time::timeout};
use uuid::Uuid;

use super::{CHANGE_LIMIT, Cells, Known, LIST_LIMIT, LOOK, client::CellError, door, front::Call};
use crate::{
    Name,
    api::{Problem, upgrading},
    upgrade::{UpgradeSpec, UpgradeState, UpgradeView},
};

/// How long a cell's trial lasts unless this worker ends it: longer than anybody's.
const CELL_TRIAL_SECONDS: u64 = 24 * 3600;

/// How soon a cell is told again that its trial is over.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a cell may take to go back to its old binary.
const CALL_OFF_LIMIT: Duration = Duration::from_secs(10);

const PATH: &str = "/v1/upgrade";

impl Cells {
    pub(super) async fn begin_upgrade(self: &Arc<Self>, call: Call) -> Response {
        let Some(spec) = call.body::<UpgradeSpec>() else { return call.here().await };
        let id = Uuid::new_v4();
        // It looks at files that are open, on file systems that may not answer.
        let (manager, wanted, mut gone) = (Arc::clone(&self.manager), spec.clone(), call.gone);
        let is_asked = move || gone.try_recv() == Err(TryRecvError::Empty);
        let view = match upgrading(manager, move |manager| manager.prepare_upgrade(&wanted, id, is_asked)).await {
            Ok(view) => view,
            Err(problem) => return problem.into_response(),
        };
        let cells = Arc::clone(self);
        tokio::spawn(async move {
            let Ok(_change) = timeout(CHANGE_LIMIT, cells.change.lock()).await else {
                return cells.manager.fail_upgrade(id, Problem::change_under_way().detail);
            };
            let result = match cells.upgrade_all(&spec).await {
                Ok(()) => cells.manager.begin_upgrade(&spec, id).map_err(|error| error.to_string()),
                Err(why) => Err(why),
            };
            match result {
                // A cell that began now would be the old binary's, and a move would be cut off.
                // So who waits for a turn is told, as long as there is somebody to tell it.
                Ok(()) => {
                    cells.exchanged.send_replace(true);
                    cells.until_upgraded(CHANGE_LIMIT).await;
                    cells.exchanged.send_replace(false);
                }
                Err(why) => {
                    cells.call_off().await;
                    cells.manager.fail_upgrade(id, why);
                }
            }
        });
        (StatusCode::ACCEPTED, Json(view)).into_response()
    }

    /// Waits until this worker's own upgrade is over, which in the good case is its end.
    async fn until_upgraded(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline && self.is_upgrading() {
            tokio::time::sleep(LOOK).await;
        }
    }

    fn is_upgrading(&self) -> bool {
        self.manager.last_upgrade().is_ok_and(|view| view.state == UpgradeState::Running)
    }

    pub(super) async fn upgrade_all(&self, spec: &UpgradeSpec) -> Result<(), String> {
        let is_making = |(_, known): &(&Name, &Known)| !known.coming.names.is_empty();
        let making = self.known().iter().find(is_making).map(|(cell, _)| cell.clone());
        if let Some(cell) = making {
            // Nobody asks another worker for the rest.
            let why = "is making what the configuration file declares for it; try again when it has, or end its process";
            return Err(format!("worker {cell} {why} (docs/isolation.md)"));
        }
        let spec = UpgradeSpec { trial_seconds: Some(CELL_TRIAL_SECONDS), ..spec.clone() };
        let body = serde_json::to_vec(&spec).map_err(|error| error.to_string())?;
        for cell in self.names() {
            self.upgrade_one(&cell, body.clone().into()).await.map_err(|why| format!("worker {cell}: {why}"))?;
        }
        Ok(())
    }

    async fn upgrade_one(&self, cell: &Name, body: Bytes) -> Result<(), String> {
        let before = self.upgrade_of(cell).await.map(|view| view.id);
        // It looks at files and fetches keys first, which has an end of its own.
        let begun = self.ask(cell, (Method::POST, PATH), body, CHANGE_LIMIT).await;
        let id = match begun.and_then(|answer| answer.json::<UpgradeView>()) {
            Ok(view) => Some(view.id),
            // A new binary that was quick: the old worker let go before it had answered.
            Err(CellError::Http(_)) => None,
            Err(error) => return Err(error.to_string()),
        };
        let is_ours = |view: &UpgradeView| id.as_ref().map_or(before.as_ref() != Some(&view.id), |id| view.id == *id);
        let deadline = Instant::now() + CHANGE_LIMIT;
        while Instant::now() < deadline {
            tokio::time::sleep(LOOK).await;
            match self.upgrade_of(cell).await {
                Some(view) if is_ours(&view) && view.state == UpgradeState::Done => return Ok(()),
                Some(view) if is_ours(&view) && view.state == UpgradeState::Failed => {
                    return Err(view.reason.unwrap_or_default());
                }
                _ => {}
            }
        }
        Err("it does not say how the upgrade ended".to_owned())
    }

    async fn upgrade_of(&self, cell: &Name) -> Option<UpgradeView> {
        self.ask(cell, (Method::GET, PATH), Bytes::new(), LIST_LIMIT).await.ok()?.json().ok()
    }

    /// This worker's upgrade has ended. When it failed, the cells' have.
    pub(crate) async fn note_upgraded(self: Arc<Self>, upgraded: Upgraded) {
        if !matches!(upgraded.result, UpgradeResult::Done(_)) {
            self.call_off().await;
        }
        self.manager.note_upgraded(&upgraded);
    }

    /// Cells that are on trial go back to the binary before, and those whose new binary is starting stay with theirs.
    pub(super) async fn call_off(&self) {
        for cell in self.names() {
            let deadline = Instant::now() + CALL_OFF_LIMIT;
            loop {
                match self.ask(&cell, (Method::DELETE, door::UPGRADE), Bytes::new(), LIST_LIMIT).await {
                    Ok(answer) if answer.status != StatusCode::ACCEPTED => break,
                    // It is about to end, or ended meanwhile: whoever follows may be the new binary, and is asked as well.
                    Ok(_) | Err(CellError::Http(_) | CellError::Connect(_)) if Instant::now() < deadline => {
                        tokio::time::sleep(LOOK).await;
                    }
                    answer => {
                        let error = answer.err().map(|error| error.to_string());
                        tracing::warn!(worker = %cell, error, "whether its upgrade is called off the worker does not say");
                        break;
                    }
                }
            }
        }
    }

    /// The trial of this worker is over, and so is theirs. A cell that does not hear it is told again until it does: to whoever follows this
    /// worker it would be on trial, and be sent back.
    pub(super) async fn settle(self: &Arc<Self>) {
        let mut untold = Vec::new();
        for cell in self.names() {
            if let Err(error) = self.settle_one(&cell).await {
                tracing::warn!(worker = %cell, %error, "the worker was not told yet that its trial is over");
                untold.push(cell);
            }
        }
        if !untold.is_empty() {
            tokio::spawn(Arc::clone(self).settle_late(untold));
        }
    }

    async fn settle_one(&self, cell: &Name) -> Result<(), CellError> {
        let answer = self.ask(cell, (Method::POST, door::SETTLE), Bytes::new(), LIST_LIMIT).await?;
        if answer.status.is_success() { Ok(()) } else { answer.json::<IgnoredAny>().map(|_| ()) }
    }

    async fn settle_late(self: Arc<Self>, mut untold: Vec<Name>) {
        while !untold.is_empty() {
            tokio::time::sleep(AGAIN).await;
            if self.is_upgrading() {
                // What they may be on now is another trial.
                continue;
            }
            let names = self.names();
            for cell in std::mem::take(&mut untold).into_iter().filter(|cell| names.contains(cell)) {
                match self.settle_one(&cell).await {
                    Ok(()) => tracing::info!(worker = %cell, "the worker was told that its trial is over"),
                    Err(_) => untold.push(cell),
                }
            }
        }
    }

    /// A cell whose new binary failed while this worker is on trial: this one's has failed as well.
    pub(super) async fn failed_cell(&self) -> Option<(Name, String)> {
        for cell in self.names() {
            let failed = self.upgrade_of(&cell).await.filter(|view| view.state == UpgradeState::Failed);
            if let Some(view) = failed {
                return Some((cell, view.reason.unwrap_or_default()));
            }
        }
        None
    }

    /// The last upgrade; its pause is the longest of all.
    pub(super) async fn show_upgrade(self: &Arc<Self>, call: Call) -> Response {
        let answer = call.here().await;
        if !answer.status().is_success() {
            return answer;
        }
        let bytes = to_bytes(answer.into_body(), usize::MAX).await.unwrap_or_default();
        let Ok(mut view) = serde_json::from_slice::<UpgradeView>(&bytes) else {
            return Problem::panicked().into_response();
        };
        if view.state == UpgradeState::Done {
            for cell in self.names() {
                let theirs = self.upgrade_of(&cell).await.and_then(|view| view.pause_micros);
                view.pause_micros = view.pause_micros.max(theirs);
            }
        }
        Json(view).into_response()
    }
}
