//! What a cell answers to its daemon, beside the API: its socket is in a folder that only the daemon's user enters.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, thread, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    routing::{delete, post},
};
use serde::{Deserialize, Serialize};

use super::{Kind, Unsaid};
use crate::{
    Name,
    api::{Body, Problem, blocking},
    config::Declared,
    manager::{Granted, Limit, Manager, Step},
    store::VolumeRecord,
};

pub(super) const MOVE: &str = "/cell/move";
pub(super) const SESSION: &str = "/cell/session";
pub(super) const LIMIT: &str = "/cell/limit";
pub(super) const DECLARE: &str = "/cell/declare";
pub(super) const UPGRADE: &str = "/cell/upgrade";
pub(super) const SETTLE: &str = "/cell/settle";
pub(super) const USAGE: &str = "/cell/usage";

/// Largest move in bytes: a family of volumes with their histories.
const MOVE_LIMIT: usize = 16 << 20;

/// The part of the configuration file that is this cell's.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) volumes: BTreeSet<Name>,
    pub(super) devices: BTreeSet<Name>,
}

impl Part {
    /// Its names, which nothing else may have until it is made.
    pub(super) fn unsaid(&self) -> Unsaid {
        let mut unsaid = Unsaid::default();
        for (kind, names) in [(Kind::Volumes, &self.volumes), (Kind::Devices, &self.devices)] {
            for name in names {
                unsaid.note(kind, name, None);
            }
        }
        unsaid
    }
}

#[derive(Clone)]
struct Door {
    manager: Arc<Manager>,
    /// The configuration file as it was when this worker began: it is out of reach in the sandbox.
    declared: Option<Arc<Declared>>,
}

/// The routes of a cell's own.
pub(crate) fn door(manager: &Arc<Manager>, declared: Option<Declared>) -> Router {
    Router::new()
        .route(MOVE, post(take_step).layer(DefaultBodyLimit::max(MOVE_LIMIT)))
        .route(SESSION, post(make_session))
        .route(LIMIT, post(limit))
        .route(DECLARE, post(declare))
        .route(UPGRADE, delete(call_off))
        .route(SETTLE, post(settle))
        .route(USAGE, post(expect_usage))
        .with_state(Door { manager: Arc::clone(manager), declared: declared.map(Arc::new) })
}

async fn take_step(State(door): State<Door>, Body(step): Body<Step>) -> Result<Json<Vec<VolumeRecord>>, Problem> {
    // The daemon's own worker does one at a time, and its move has a place there.
    blocking(door.manager, move |manager| manager.step(&step)).await.map(Json)
}

async fn make_session(State(door): State<Door>, Body(granted): Body<Granted>) -> Result<Json<PathBuf>, Problem> {
    blocking(door.manager, move |manager| manager.receive_session(&granted)).await.map(Json)
}

async fn limit(State(door): State<Door>, Body(limit): Body<Limit>) -> Result<StatusCode, Problem> {
    blocking(door.manager, move |manager| manager.receive_limit(&limit)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn declare(State(door): State<Door>, Body(part): Body<Part>) -> Result<StatusCode, Problem> {
    let Door { manager, declared } = door;
    let failed = |why: String| Problem::of_cell("config", why, None);
    let Some(all) = declared else {
        return Err(failed("it has no configuration file; the log says why".to_owned()));
    };
    let own = all.part(&part.volumes, &part.devices);
    if (own.volumes.len(), own.devices.len()) != (part.volumes.len(), part.devices.len()) {
        return Err(failed("the configuration file was changed while the daemon started".to_owned()));
    }
    let declared = blocking(manager, move |manager| Ok(manager.declare(&own))).await?;
    declared.map(|()| StatusCode::NO_CONTENT).map_err(|error| failed(error.to_string()))
}

/// The binary before this one is to serve again, if it may still be asked to: its keeper starts it when this one ends.
async fn call_off(State(door): State<Door>) -> StatusCode {
    if door.manager.call_off_upgrade() {
        return StatusCode::ACCEPTED;
    }
    if !door.manager.is_on_trial() {
        return StatusCode::NO_CONTENT;
    }
    tracing::warn!("the upgrade is called off: the binary before this one takes over again");
    thread::spawn(|| {
        // The answer first.
        thread::sleep(Duration::from_millis(20));
        std::process::exit(1);
    });
    StatusCode::ACCEPTED
}

/// The daemon is about to read this cell's account.
async fn expect_usage(State(door): State<Door>) -> Result<StatusCode, Problem> {
    blocking(door.manager, Manager::expect_usage).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn settle(State(door): State<Door>) -> Result<StatusCode, Problem> {
    door.manager.settle_upgrade().map_err(|error| Problem::from(&error))?;
    Ok(StatusCode::NO_CONTENT)
}
