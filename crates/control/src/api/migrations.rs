//! Migrations of volumes, over the API.

use std::sync::Arc;

use axum::{Json, extract::State, http::StatusCode};

use super::{Answer, Body, Path, Problem, changing};
use crate::{
    manager::{Manager, Object, VolumeView},
    model::{MigrationChange, MigrationSpec},
};

#[utoipa::path(
    post, path = "/v1/volumes/{name}/migration", params(("name" = String, Path, description = "The volume")),
    request_body = MigrationSpec,
    responses(
        (status = 200, description = "The volume, whose migration has begun; it is over when the volume shows none", body = VolumeView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn migrate_volume(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(spec): Body<MigrationSpec>,
) -> Answer<VolumeView> {
    changing(manager, Object::volume(&name), move |manager| manager.migrate_volume(&name, &spec)).await.map(Json)
}

#[utoipa::path(
    patch, path = "/v1/volumes/{name}/migration", params(("name" = String, Path, description = "The volume")),
    request_body = MigrationChange,
    responses(
        (status = 200, description = "The volume, its migration going on at its new rate", body = VolumeView),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn change_migration(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    Body(change): Body<MigrationChange>,
) -> Answer<VolumeView> {
    changing(manager, Object::volume(&name), move |manager| manager.change_migration(&name, &change)).await.map(Json)
}

#[utoipa::path(
    delete, path = "/v1/volumes/{name}/migration", params(("name" = String, Path, description = "The volume")),
    responses(
        (status = 204, description = "The migration has ended, and the volume is where it was"),
        (status = "default", description = "Nothing has changed", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn cancel_migration(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
) -> Result<StatusCode, Problem> {
    changing(manager, Object::volume(&name), move |manager| manager.cancel_migration(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
