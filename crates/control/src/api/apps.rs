//! Users whose applications may open volumes.

use std::sync::Arc;

use axum::{Extension, Json, extract::State, http::StatusCode};

use super::{Answer, Body, Created, Path, Problem, blocking, changing};
use crate::{
    apps::{AppChange, AppUser},
    manager::{AppView, Manager, Object, Others},
};

/// What other workers have; nothing where there are none.
type Beside = Option<Extension<Others>>;

fn known(beside: Beside) -> Others {
    beside.map(|Extension(others)| others).unwrap_or_default()
}

/// A user's number in a path; text that is none is nobody.
fn uid(text: &str) -> Result<u32, Problem> {
    text.parse().map_err(|_| Problem::bad_uid(text))
}

#[utoipa::path(
    get, path = "/v1/apps",
    responses((status = 200, description = "All users whose applications may open volumes", body = Vec<AppView>))
)]
pub(super) async fn list_apps(State(manager): State<Arc<Manager>>, beside: Beside) -> Answer<Vec<AppView>> {
    blocking(manager, move |manager| Ok(manager.apps(&known(beside)))).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/apps", request_body = AppUser,
    responses(
        (status = 201, description = "The user, whose applications may open these volumes from now on", body = AppView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn create_app(
    State(manager): State<Arc<Manager>>,
    beside: Beside,
    Body(app): Body<AppUser>,
) -> Created<AppView> {
    let view =
        changing(manager, Object::new("user", &app.uid), move |manager| manager.create_app(&app, &known(beside))).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/apps/{uid}", params(("uid" = u32, Path, description = "The user's number")),
    responses(
        (status = 200, description = "The user", body = AppView),
        (status = "default", description = "Nothing is said of it", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn show_app(
    State(manager): State<Arc<Manager>>,
    beside: Beside,
    Path(text): Path<String>,
) -> Answer<AppView> {
    let uid = uid(&text)?;
    blocking(manager, move |manager| manager.app(uid, &known(beside))).await.map(Json)
}

#[utoipa::path(
    patch, path = "/v1/apps/{uid}", params(("uid" = u32, Path, description = "The user's number")), request_body = AppChange,
    responses(
        (status = 200, description = "The user; sessions that it may not have any more have ended", body = AppView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn change_app(
    State(manager): State<Arc<Manager>>,
    beside: Beside,
    Path(text): Path<String>,
    Body(change): Body<AppChange>,
) -> Answer<AppView> {
    let uid = uid(&text)?;
    let object = Object::new("user", &uid);
    changing(manager, object, move |manager| manager.change_app(uid, &change, &known(beside))).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/apps/{uid}", params(("uid" = u32, Path, description = "The user's number")),
    responses(
        (status = 204, description = "Its applications may open nothing any more, and their sessions have ended"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn delete_app(
    State(manager): State<Arc<Manager>>,
    Path(text): Path<String>,
) -> Result<StatusCode, Problem> {
    let uid = uid(&text)?;
    blocking(manager, move |manager| manager.delete_app(uid)).await?;
    Ok(StatusCode::NO_CONTENT)
}
