//! Errors as the API's clients get them (RFC 9457).

use axum::{
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    error::{Class, ControlError},
    manager::{CHANGES, CHANGES_OF_ONE, NoPlace, SUMS},
};

/// Why a request failed. Nothing has changed; of a copy that is ending (copy-ending), what was asked for is done when it has, and of a change that
/// a worker has not ended (still-under-way) it may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A word for programs, for example "volume-attached".
    pub code: String,
    /// The HTTP status, again.
    pub status: u16,
    /// What happened, to which object, and why.
    pub detail: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Problem {
    fn new(status: StatusCode, code: &str, detail: String) -> Self {
        Self { code: code.to_owned(), status: status.as_u16(), detail, advice: None }
    }

    pub(super) fn no_route(method: &Method, path: &str) -> Self {
        let detail = format!("there is nothing at {path} ({method})");
        Self {
            advice: Some("/openapi.json says what there is".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, "no-route", detail)
        }
    }

    pub(super) fn no_method(method: &Method, path: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "no-method", format!("{path} does not know {method}"))
    }

    /// About a cell.
    pub(crate) fn of_cell(code: &str, detail: String, advice: Option<String>) -> Self {
        Self { advice, ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, detail) }
    }

    pub(crate) fn bad_body(status: StatusCode, text: &str) -> Self {
        Self::new(status, "bad-request", text.to_owned())
    }

    pub(crate) fn bad_session(text: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", format!("not a request for a session: {text}"))
    }

    /// Of an application that is not heard at all.
    pub(crate) fn crowded() -> Self {
        let detail = "too many applications stand at the daemon's door, of this user or of all".to_owned();
        let advice = Some("ask again in a moment".to_owned());
        Self { advice, ..Self::new(StatusCode::TOO_MANY_REQUESTS, "too-many-at-the-door", detail) }
    }

    /// Of a request that finds no place among those of its kind.
    pub(crate) fn no_place(why: &NoPlace) -> Self {
        let (status, code, changes) = match why {
            NoPlace::Sums => {
                let sums = format!("{SUMS} sums of the account");
                (StatusCode::SERVICE_UNAVAILABLE, "too-many-sums", sums)
            }
            NoPlace::Any => {
                let changes = format!("{CHANGES} requests that change something");
                (StatusCode::SERVICE_UNAVAILABLE, "too-many-changes", changes)
            }
            NoPlace::Of(object) => {
                (StatusCode::CONFLICT, "too-many-of-one", format!("{CHANGES_OF_ONE} requests that change {object}"))
            }
        };
        let detail = format!("{changes} are under way, as many as may be at a time");
        let advice = "try again when they have ended. If they do not, they are at work for long, or a file system that they name does not answer: \
                      lists, \"millrace status\" and metrics go on, and the log says more";
        Self { advice: Some(advice.to_owned()), ..Self::new(status, code, detail) }
    }

    /// Of a request that has waited for its turn to change what is where.
    pub(crate) fn change_under_way() -> Self {
        let detail = "another change is under way, and has not come to its end; nothing was done".to_owned();
        let advice = "try again when it has: a worker, or a file system that it needs, may not answer (\"millrace status\" and the log say more)";
        Self { advice: Some(advice.to_owned()), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "change-under-way", detail) }
    }

    /// Of a change that a worker has begun, and has not ended in the time that others' changes wait.
    pub(crate) fn still_under_way(worker: &str) -> Self {
        let detail = format!("worker {worker} is at it still, and may come to its end yet: what was asked for may be done");
        let advice = "look whether it is before giving the command again; if it takes too long, a file system or a disk may not answer \
                      (the log says more)";
        Self::of_cell("still-under-way", detail, Some(advice.to_owned()))
    }

    pub(super) fn not_an_operator(uid: u32) -> Self {
        let detail = format!("user {uid} may not use the API");
        Self {
            advice: Some(
                "root and the daemon's user may, and whom [[operator]] in the daemon's configuration names".to_owned(),
            ),
            ..Self::new(StatusCode::FORBIDDEN, "not-allowed", detail)
        }
    }

    pub(super) fn bad_nsid(text: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", format!("{text:?} is not a namespace identifier"))
    }

    pub(super) fn bad_uid(text: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", format!("{text:?} is not a user's number"))
    }

    pub(crate) fn panicked() -> Self {
        let detail = "a fault of ours: the request could not be finished; the log says more".to_owned();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
    }
}

impl From<&ControlError> for Problem {
    fn from(error: &ControlError) -> Self {
        let status = match error.class() {
            Class::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            Class::Missing => StatusCode::NOT_FOUND,
            Class::Conflict => StatusCode::CONFLICT,
            Class::Failed => StatusCode::INTERNAL_SERVER_ERROR,
            Class::NoRoom => StatusCode::INSUFFICIENT_STORAGE,
            Class::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Class::Denied => StatusCode::FORBIDDEN,
        };
        Self { advice: error.advice(), ..Self::new(status, error.code(), explain(error)) }
    }
}

/// An error with its causes, those left out that it already names.
#[must_use]
pub fn explain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_string(&self).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}
