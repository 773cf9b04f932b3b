//! Traces: an answer that comes as it arises.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Query, State, rejection::QueryRejection},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::body::Frame;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::{Path, Problem, blocking};
use crate::manager::{Manager, Target};

/// How long a trace lasts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TraceQuestion {
    /// Until it is told to end, when this is left out.
    seconds: Option<u64>,
}

/// The blocks of a trace, as they come.
struct Blocks(mpsc::Receiver<Vec<u8>>);

impl HttpBody for Blocks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|block| Some(Ok(Frame::data(block?.into()))))
    }
}

type Question = Result<Query<TraceQuestion>, QueryRejection>;

async fn begin(manager: Arc<Manager>, target: Target, question: Question) -> Result<Response, Problem> {
    let Query(question) = question.map_err(|rejection| Problem::bad_body(rejection.status(), &rejection.body_text()))?;
    let blocks = blocking(manager, move |manager| manager.start_trace(&target, question.seconds)).await?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], Body::new(Blocks(blocks))).into_response())
}

async fn end(manager: Arc<Manager>, target: Target) -> Result<StatusCode, Problem> {
    blocking(manager, move |manager| manager.stop_trace(&target)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(
    get, path = "/v1/devices/{name}/trace",
    params(
        ("name" = String, Path, description = "The device"),
        ("seconds" = Option<u64>, Query, description = "How long; until it is told to end, when this is left out")
    ),
    responses(
        (status = 200, description = "What becomes of its requests, as it happens (docs/formats/trace.md)", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "default", description = "There is none, or another trace is made", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn trace_device(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    question: Question,
) -> Result<Response, Problem> {
    begin(manager, Target::Device(name), question).await
}

#[utoipa::path(
    get, path = "/v1/volumes/{name}/trace",
    params(
        ("name" = String, Path, description = "The volume"),
        ("seconds" = Option<u64>, Query, description = "How long; until it is told to end, when this is left out")
    ),
    responses(
        (status = 200, description = "What becomes of all guests' requests for it, as it happens (docs/formats/trace.md)", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "default", description = "There is none, or another trace is made", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn trace_volume(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
    question: Question,
) -> Result<Response, Problem> {
    begin(manager, Target::Volume(name), question).await
}

#[utoipa::path(
    delete, path = "/v1/devices/{name}/trace", params(("name" = String, Path, description = "The device")),
    responses(
        (status = 204, description = "Its trace ends; whoever listens gets the rest"),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn end_device_trace(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
) -> Result<StatusCode, Problem> {
    end(manager, Target::Device(name)).await
}

#[utoipa::path(
    delete, path = "/v1/volumes/{name}/trace", params(("name" = String, Path, description = "The volume")),
    responses(
        (status = 204, description = "Its trace ends; whoever listens gets the rest"),
        (status = "default", description = "There is none", body = Problem, content_type = "application/problem+json")
    )
)]
pub(super) async fn end_volume_trace(
    State(manager): State<Arc<Manager>>,
    Path(name): Path<String>,
) -> Result<StatusCode, Problem> {
    end(manager, Target::Volume(name)).await
}
