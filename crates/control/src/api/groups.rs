//! Groups.

use std::sync::Arc;

use axum::{Json, extract::State, http::StatusCode};

use super::{Answer, Body, Created, Path, Problem, blocking, changing};
use crate::{
    manager::{GroupView, Manager, Object},
    model::{GroupChange, GroupSpec},
};

#[utoipa::path(get, path = "/v1/groups", responses((status = 200, description = "All groups", body = Vec<GroupView>)))]
pub(super) async fn list_groups(State(manager): State<Arc<Manager>>) -> Answer<Vec<GroupView>> {
    blocking(manager, |manager| Ok(manager.groups())).await.map(Json)
}

#[utoipa::path(
    post, path = "/v1/groups", request_body = GroupSpec,
    responses(
        (status = 201, description = "The group", body = GroupView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn create_group(State(manager): State<Arc<Manager>>, Body(spec): Body<GroupSpec>) -> Created<GroupView> {
    let view = changing(manager, Object::new("group", &spec.name), move |manager| manager.create_group(&spec)).await?;
    Ok((StatusCode::CREATED, Json(view)))
}

#[utoipa::path(
    get, path = "/v1/groups/{name}", params(("name" = String, Path, description = "The group")),
    responses(
        (status = 200, description = "The group", body = GroupView),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn show_group(State(manager): State<Arc<Manager>>, Path(name): Path<String>) -> Answer<GroupView> {
    blocking(manager, move |manager| manager.group(&name)).await.map(Json)
}

#[utoipa::path(
    patch, path = "/v1/groups/{name}", params(("name" = String, Path, description = "The group")), request_body = GroupChange,
    responses(
        (status = 200, description = "The group, with these caps in the place of all that it had, and this weight", body = GroupView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn change_group(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(change): Body<GroupChange>,
) -> Answer<GroupView> {
    changing(manager, Object::new("group", &name), move |manager| manager.change_group(&name, &change)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/groups/{name}", params(("name" = String, Path, description = "The group")),
    responses(
        (status = 204, description = "It is gone"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn delete_group(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
) -> Result<StatusCode, Problem> {
    changing(manager, Object::new("group", &name), move |manager| manager.delete_group(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
