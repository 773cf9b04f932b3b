//! The control API: HTTP and JSON on a unix socket.
//!
//! ```text
//!   request ─► body limit ─► JSON, unknown fields refused ─► handler ─► a blocking thread: Manager ─► JSON, or a problem
//! ```

mod apps;
mod groups;
pub(crate) mod metrics;
mod migrations;
mod peers;
mod problem;
mod traces;

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{
        DefaultBodyLimit, FromRequest, FromRequestParts, Query, Request, State,
        rejection::{JsonRejection, QueryRejection},
    },
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use serde::de::DeserializeOwned;
use utoipa::OpenApi;

pub(crate) use peers::Door;
pub use peers::Operator;
pub use problem::{Problem, explain};

use crate::{
    error::ControlError,
    manager::{
        ChangePlace, CopyView, DeviceView, HistoryEntry, Manager, NamespaceView, NoPlace, Object, Status, VolumeView,
    },
    model::{
        AttachSpec, CopyChange, CopySpec, DeviceForm, DeviceSpec, ServiceAnswer, ServiceCommand, VolumeChange, VolumeSpec,
    },
    upgrade::{UpgradeSpec, UpgradeView},
    usage::{UsageQuestion, UsageRow},
};

#[cfg(test)]
mod tests;

/// Largest request in bytes.
const BODY_LIMIT: usize = 64 << 10;

/// Largest saved state of a device in bytes.
pub(crate) const STATE_LIMIT: usize = 4 << 20;

/// Everything the API answers.
pub(crate) fn router(manager: Arc<Manager>) -> Router {
    Router::new()
        .route("/v1/volumes", get(list_volumes).post(create_volume))
        .route("/v1/volumes/{name}", get(show_volume).patch(change_volume).delete(delete_volume))
        .route("/v1/volumes/{name}/history", get(show_history))
        .route("/v1/volumes/{name}/commands", post(command_service))
        .route(
            "/v1/volumes/{name}/migration",
            post(migrations::migrate_volume).patch(migrations::change_migration).delete(migrations::cancel_migration),
        )
        .route("/v1/volumes/{name}/trace", get(traces::trace_volume).delete(traces::end_volume_trace))
        .route("/v1/devices/{name}/trace", get(traces::trace_device).delete(traces::end_device_trace))
        .route("/v1/copies", get(list_copies).post(create_copy))
        .route("/v1/copies/{name}", get(show_copy).patch(change_copy).delete(delete_copy))
        .route("/v1/groups", get(groups::list_groups).post(groups::create_group))
        .route("/v1/groups/{name}", get(groups::show_group).patch(groups::change_group).delete(groups::delete_group))
        .route("/v1/apps", get(apps::list_apps).post(apps::create_app))
        .route("/v1/apps/{uid}", get(apps::show_app).patch(apps::change_app).delete(apps::delete_app))
        .route("/v1/devices", get(list_devices).post(create_device))
        .route("/v1/devices/{name}", get(show_device).delete(delete_device))
        .route("/v1/devices/{name}/namespaces", get(list_namespaces).post(attach))
        .route("/v1/devices/{name}/namespaces/{nsid}", delete(detach).get(show_namespace))
        .route("/v1/devices/{name}/state", get(save_device).put(restore_device).layer(DefaultBodyLimit::max(STATE_LIMIT)))
        .route("/v1/usage", get(usage))
        .route("/v1/upgrade", get(show_upgrade).post(upgrade))
        .route("/v1/status", get(status))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(async || Json(openapi())))
        .fallback(async |request: Request| Problem::no_route(request.method(), request.uri().path()))
        .method_not_allowed_fallback(async |request: Request| Problem::no_method(request.method(), request.uri().path()))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(manager)
}

/// The API's description.
pub fn openapi() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Millrace control API", description = "Volumes and devices of a running daemon, on RUN_DIR/api.sock."),
    paths(
        list_volumes,
        create_volume,
        show_volume,
        change_volume,
        show_history,
        command_service,
        migrations::migrate_volume,
        migrations::change_migration,
        migrations::cancel_migration,
        delete_volume,
        list_copies,
        create_copy,
        show_copy,
        change_copy,
        delete_copy,
        groups::list_groups,
        groups::create_group,
        groups::show_group,
        groups::change_group,
        groups::delete_group,
        apps::list_apps,
        apps::create_app,
        apps::show_app,
        apps::change_app,
        apps::delete_app,
        list_devices,
        create_device,
        show_device,
        delete_device,
        list_namespaces,
        attach,
        show_namespace,
        detach,
        save_device,
        restore_device,
        traces::trace_volume,
        traces::end_volume_trace,
        traces::trace_device,
        traces::end_device_trace,
        usage,
        upgrade,
        show_upgrade,
        status,
        metrics
    )
)]
struct Description;

/// A request's body; what is wrong with it becomes a problem.
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T> FromRequest<S> for Body<T>
where
    Json<T>: FromRequest<S, Rejection = JsonRejection>,
{
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        match Json::from_request(request, state).await {
            Ok(Json(value)) => Ok(Self(value)),
            Err(rejection) => Err(Problem::bad_body(rejection.status(), &rejection.body_text())),
        }
    }
}

/// Names in a request's path; what is wrong with them becomes a problem.
struct Path<T>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Path::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(Problem::bad_body(rejection.status(), &rejection.body_text())),
        }
    }
}

/// Runs what may wait (for a shard, a file, the store) beside the runtime.
pub(crate) async fn blocking<T: Send + 'static>(
    manager: Arc<Manager>,
    call: impl FnOnce(&Manager) -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::task::spawn_blocking(move || call(&manager)).await {
        Ok(result) => result.map_err(|error| Problem::from(&error)),
        Err(_) => Err(Problem::panicked()),
    }
}

/// As [`blocking`], for what changes an object. It may wait for a file system for ever, so there is an end to how many do at a time.
pub(crate) async fn changing<T: Send + 'static>(
    manager: Arc<Manager>,
    object: Object,
    call: impl FnOnce(&Manager) -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Problem> {
    let place = manager.places().of(object).await;
    in_place(manager, place, call).await
}

/// As [`changing`], for what is right to take long.
async fn changing_for_long<T: Send + 'static>(
    manager: Arc<Manager>,
    object: Object,
    call: impl FnOnce(&Manager) -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Problem> {
    let place = manager.places().of_long(object).await;
    in_place(manager, place, call).await
}

/// As [`changing`], for an upgrade: it looks at files, and it may be what helps where others hang.
pub(crate) async fn upgrading<T: Send + 'static>(
    manager: Arc<Manager>,
    call: impl FnOnce(&Manager) -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Problem> {
    let place = manager.places().of_remedy(Object::binary()).await;
    in_place(manager, place, call).await
}

async fn in_place<T: Send + 'static>(
    manager: Arc<Manager>,
    place: Result<ChangePlace, NoPlace>,
    call: impl FnOnce(&Manager) -> Result<T, ControlError> + Send + 'static,
) -> Result<T, Problem> {
    let place = place.map_err(|why| Problem::no_place(&why))?;
    let call = move |manager: &Manager| {
        // As long as the thread is: whoever asked may have gone.
        let _place = place;
        call(manager)
    };
    blocking(manager, call).await
}

type Answer<T> = Result<Json<T>, Problem>;
type Created<T> = Result<(StatusCode, Json<T>), Problem>;

#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, description = "All volumes", body = Vec<VolumeView>)))]
async fn list_volumes(State(manager): State<Arc<Manager>>) -> Answer<Vec<VolumeView>> {
    blocking(manager, |manager| Ok(manager.volumes())).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/volumes", request_body = VolumeSpec,
    responses(
        (status = 201, description = "The volume", body = VolumeView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn create_volume(State(manager): State<Arc<Manager>>, Body(spec): Body<VolumeSpec>) -> Created<VolumeView> {
    let view = changing(manager, Object::volume(&spec.name), move |manager| manager.create_volume(&spec)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/volumes/{name}", params(("name" = String, Path, description = "The volume")),
    responses(
        (status = 200, description = "The volume", body = VolumeView),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_volume(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<VolumeView> {
    blocking(manager, move |manager| manager.volume(&name)).await.map(Json)
}

#[utoipa::path(
    patch, path = "/v1/volumes/{name}", params(("name" = String, Path, description = "The volume")),
    request_body = VolumeChange,
    responses(
        (status = 200, description = "The volume, resized (guests have been told) or with its new stack in force", body = VolumeView),
        (
            status = 409,
            description = "Nothing has changed: its stack is not \"from\" (changed-meanwhile), it is being migrated elsewhere (migrating), \
                           the size is smaller and \"shrink\" is not said (would-shrink), …",
            body = Problem, content_type = "application/problem+json"
        ),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn change_volume(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(change): Body<VolumeChange>,
) -> Answer<VolumeView> {
    changing_for_long(manager, Object::volume(&name), move |manager| manager.change_volume(&name, &change)).await.map(Json)
}

#[utoipa::path(
    get, path = "/v1/volumes/{name}/history", params(("name" = String, Path, description = "The volume")),
    responses(
        (status = 200, description = "The stacks that it had, the latest last", body = Vec<HistoryEntry>),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_history(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<Vec<HistoryEntry>> {
    blocking(manager, move |manager| manager.volume_history(&name)).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/volumes/{name}/commands", params(("name" = String, Path, description = "The volume")),
    request_body = ServiceCommand,
    responses(
        (status = 200, description = "What the service answered", body = ServiceAnswer),
        (status = "default", description = "It was not done", body = Problem, content_type = "application/problem+json")
    )
)]
async fn command_service(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(command): Body<ServiceCommand>,
) -> Answer<ServiceAnswer> {
    let object = Object::volume(&name);
    changing_for_long(manager, object, move |manager| manager.command_service(&name, &command)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/volumes/{name}", params(("name" = String, Path, description = "The volume")),
    responses(
        (status = 204, description = "It is gone; its file stays, unless a guest's own namespace brought it"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn delete_volume(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Result<StatusCode, Problem> {
    changing(manager, Object::volume(&name), move |manager| manager.delete_volume(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(get, path = "/v1/copies", responses((status = 200, description = "All copies", body = Vec<CopyView>)))]
async fn list_copies(State(manager): State<Arc<Manager>>) -> Answer<Vec<CopyView>> {
    blocking(manager, |manager| Ok(manager.copies())).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/copies", request_body = CopySpec,
    responses(
        (status = 201, description = "The copy, which has begun", body = CopyView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn create_copy(State(manager): State<Arc<Manager>>, Body(spec): Body<CopySpec>) -> Created<CopyView> {
    let view = changing(manager, Object::volume(&spec.target), move |manager| manager.create_copy(&spec)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/copies/{name}", params(("name" = String, Path, description = "The copy")),
    responses(
        (status = 200, description = "The copy", body = CopyView),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_copy(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<CopyView> {
    blocking(manager, move |manager| manager.copy(&name)).await.map(Json)
}

#[utoipa::path(
    patch, path = "/v1/copies/{name}", params(("name" = String, Path, description = "The copy")),
    request_body = CopyChange,
    responses(
        (status = 200, description = "The copy, paused or going on, at its new rate", body = CopyView),
        (
            status = 409,
            description = "Its present step has not ended yet: what was asked for is done then (copy-ending)",
            body = Problem, content_type = "application/problem+json"
        ),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn change_copy(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(change): Body<CopyChange>,
) -> Answer<CopyView> {
    blocking(manager, move |manager| manager.change_copy(&name, &change)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/copies/{name}", params(("name" = String, Path, description = "The copy")),
    responses(
        (status = 204, description = "It has ended and is forgotten; what it had copied stays on the target"),
        (
            status = 409,
            description = "Its present step has not ended yet: what was asked for is done then (copy-ending)",
            body = Problem, content_type = "application/problem+json"
        ),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn delete_copy(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Result<StatusCode, Problem> {
    blocking(manager, move |manager| manager.delete_copy(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(get, path = "/v1/devices", responses((status = 200, description = "All devices", body = Vec<DeviceView>)))]
async fn list_devices(State(manager): State<Arc<Manager>>) -> Answer<Vec<DeviceView>> {
    blocking(manager, |manager| Ok(manager.devices())).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/devices", request_body = DeviceForm,
    responses(
        (status = 201, description = "The device; its socket listens", body = DeviceView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn create_device(State(manager): State<Arc<Manager>>, Body(spec): Body<DeviceSpec>) -> Created<DeviceView> {
    let view = changing(manager, Object::new("device", &spec.name), move |manager| manager.create_device(&spec)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/devices/{name}", params(("name" = String, Path, description = "The device")),
    responses(
        (status = 200, description = "The device", body = DeviceView),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_device(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<DeviceView> {
    blocking(manager, move |manager| manager.device(&name)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/devices/{name}", params(("name" = String, Path, description = "The device")),
    responses(
        (status = 204, description = "It is gone; its guest has lost it"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn delete_device(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Result<StatusCode, Problem> {
    blocking(manager, move |manager| manager.delete_device(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(
    get, path = "/v1/devices/{name}/namespaces", params(("name" = String, Path, description = "The device")),
    responses(
        (status = 200, description = "Its namespaces", body = Vec<NamespaceView>),
        (status = "default", description = "There is no such device", body = Problem, content_type = "application/problem+json")
    )
)]
async fn list_namespaces(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<Vec<NamespaceView>> {
    blocking(manager, move |manager| manager.device(&name).map(|device| device.namespaces)).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/devices/{name}/namespaces", params(("name" = String, Path, description = "The device")),
    request_body = AttachSpec,
    responses(
        (status = 201, description = "The namespace; the guest has been told", body = NamespaceView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn attach(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(spec): Body<AttachSpec>,
) -> Created<NamespaceView> {
    let view = changing(manager, Object::volume(&spec.volume), move |manager| manager.attach(&name, &spec)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

/// A namespace identifier in a path; text that is none names no namespace.
fn nsid(text: &str) -> Result<u32, Problem> {
    text.parse().map_err(|_| Problem::bad_nsid(text))
}

#[utoipa::path(
    get, path = "/v1/devices/{name}/namespaces/{nsid}",
    params(("name" = String, Path, description = "The device"), ("nsid" = u32, Path, description = "The identifier")),
    responses(
        (status = 200, description = "The namespace", body = NamespaceView),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_namespace(
    State(manager): State<Arc<Manager>>,
    Path((name, id)): Path<(String, String)>,
) -> Answer<NamespaceView> {
    let id = nsid(&id)?;
    blocking(manager, move |manager| manager.namespace(&name, id)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/devices/{name}/namespaces/{nsid}",
    params(("name" = String, Path, description = "The device"), ("nsid" = u32, Path, description = "The identifier")),
    responses(
        (status = 204, description = "It is detached; the guest has been told"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn detach(
    State(manager): State<Arc<Manager>>,
    Path((name, id)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    let id = nsid(&id)?;
    blocking(manager, move |manager| manager.detach(&name, id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(
    get, path = "/v1/devices/{name}/state", params(("name" = String, Path, description = "The device")),
    responses(
        (status = 200, description = "The controller's state", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "default", description = "Its machine runs, or there is none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn save_device(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Result<Response, Problem> {
    let saved = blocking(manager, move |manager| manager.save_device_state(&name)).await?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], saved).into_response())
}

#[utoipa::path(
    put, path = "/v1/devices/{name}/state", params(("name" = String, Path, description = "The device")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 204, description = "The next machine that connects goes on with this state"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn restore_device(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    saved: Bytes,
) -> Result<StatusCode, Problem> {
    let object = Object::new("device", &name);
    changing(manager, object, move |manager| manager.restore_device_state(&name, saved.into())).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(
    get, path = "/v1/usage",
    params(
        ("from" = Option<u64>, Query, description = "What was written after this second since 1970"),
        ("to" = Option<u64>, Query, description = "What was written up to this one; where it is still to come, what is written until then is in no period that begins with it, either"),
        ("by" = Option<String>, Query, description = "What is summed up: volume (when left out), tenant or device")
    ),
    responses(
        (status = 200, description = "What metered volumes did", body = Vec<UsageRow>),
        (status = "default", description = "The question or the account cannot be read", body = Problem, content_type = "application/problem+json")
    )
)]
async fn usage(
    State(manager): State<Arc<Manager>>,
    question: Result<Query<UsageQuestion>, QueryRejection>,
) -> Answer<Vec<UsageRow>> {
    let Query(question) = question.map_err(|rejection| Problem::bad_body(rejection.status(), &rejection.body_text()))?;
    if question.from.zip(question.to).is_some_and(|(from, to)| from > to) {
        return Err(Problem::bad_body(StatusCode::UNPROCESSABLE_ENTITY, "from is later than to"));
    }
    let place = manager.places().of_sum().await;
    in_place(manager, place, move |manager| manager.usage(&question)).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/upgrade", request_body = UpgradeSpec,
    responses(
        (status = 202, description = "The new binary is being started; GET tells how it goes, answered by whoever serves then", body = UpgradeView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
async fn upgrade(State(manager): State<Arc<Manager>>, Body(spec): Body<UpgradeSpec>) -> Created<UpgradeView> {
    // The file systems that it looks at may answer when whoever asked has gone: then `asker` is gone, too.
    let asker = Arc::new(());
    let asked = Arc::downgrade(&asker);
    let view = upgrading(manager, move |manager| manager.upgrade(&spec, || asked.strong_count() > 0)).await?;
    Ok((StatusCode::ACCEPTED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/upgrade",
    responses(
        (status = 200, description = "The last upgrade", body = UpgradeView),
        (status = "default", description = "There was none", body = Problem, content_type = "application/problem+json")
    )
)]
async fn show_upgrade(State(manager): State<Arc<Manager>>) -> Answer<UpgradeView> {
    blocking(manager, Manager::last_upgrade).await.map(Json)
}

#[utoipa::path(get, path = "/v1/status", responses((status = 200, description = "The daemon", body = Status)))]
async fn status(State(manager): State<Arc<Manager>>) -> Answer<Status> {
    blocking(manager, |manager| Ok(manager.status())).await.map(Json)
}

#[utoipa::path(
    get, path = "/metrics",
    responses((status = 200, description = "Metrics in the OpenMetrics text format", body = String, content_type = metrics::CONTENT_TYPE))
)]
async fn metrics(State(manager): State<Arc<Manager>>) -> Result<Response, Problem> {
    let render = |manager: &Manager| {
        let held_back = [metrics::HeldBack::here(manager)];
        let (volumes, devices) = (manager.volumes(), manager.devices());
        let status = manager.status_with(&volumes, &devices);
        Ok(metrics::response(&status, &devices, &volumes, &manager.copies(), &held_back))
    };
    blocking(manager, render).await
}
