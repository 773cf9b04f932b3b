//! Asking a cell: one request, one connection, and no more patience than is told.

use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, Method, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use super::LOOK;
use crate::{Name, api::Problem, dirs::API_SOCKET};

/// Largest answer in bytes.
const ANSWER_LIMIT: usize = 64 << 20;

/// How long the successor of a worker may take to answer.
const SUCCESSOR_LIMIT: Duration = Duration::from_secs(2);

/// Why a cell said nothing that can be used.
#[derive(Debug, Error)]
pub(super) enum CellError {
    #[error("nobody answers there: {0}")]
    Connect(#[from] io::Error),
    #[error("it does not answer in time")]
    Silent,
    #[error("it broke off: {0}")]
    Http(#[from] hyper::Error),
    #[error("its answer cannot be understood: {0}")]
    Strange(String),
    /// It answered, and refused.
    #[error("{}", .0.detail)]
    Refused(Problem),
}

impl CellError {
    /// For the operator.
    pub(super) fn problem(self, cell: &Name) -> Problem {
        match self {
            Self::Refused(problem) => problem,
            error => {
                let advice = "what its guests do goes on if its worker lives; the log says more".to_owned();
                Problem::of_cell("worker-silent", format!("worker {cell}: {error}"), Some(advice))
            }
        }
    }
}

/// What a cell answered.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    kind: Option<HeaderValue>,
    body: Bytes,
}

impl Answer {
    /// A good answer, understood.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, CellError> {
        let strange = |error: serde_json::Error| CellError::Strange(error.to_string());
        if self.status.is_success() {
            return serde_json::from_slice(&self.body).map_err(strange);
        }
        Err(CellError::Refused(serde_json::from_slice(&self.body).map_err(strange)?))
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.body).into_response();
        response.headers_mut().remove(header::CONTENT_TYPE);
        if let Some(kind) = self.kind {
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
        response
    }
}

/// Asks the daemon whose run directory this is.
pub(super) async fn ask(
    run_dir: &Path,
    method: Method,
    path: &str,
    body: Bytes,
    limit: Duration,
) -> Result<Answer, CellError> {
    let answered = async {
        match exchange(run_dir, method.clone(), path, body.clone()).await {
            Err(CellError::Http(_)) if method == Method::GET => again(run_dir, path).await,
            answer => answer,
        }
    };
    timeout(limit, answered).await.map_err(|_| CellError::Silent)?
}

/// A worker that ended between a question and its answer, as in an upgrade that is called off, has a successor: it is asked.
async fn again(run_dir: &Path, path: &str) -> Result<Answer, CellError> {
    let deadline = Instant::now() + SUCCESSOR_LIMIT;
    loop {
        match exchange(run_dir, Method::GET, path, Bytes::new()).await {
            Err(CellError::Http(_) | CellError::Connect(_)) if Instant::now() < deadline => sleep(LOOK).await,
            answer => return answer,
        }
    }
}

async fn exchange(run_dir: &Path, method: Method, path: &str, body: Bytes) -> Result<Answer, CellError> {
    let stream = UnixStream::connect(run_dir.join(API_SOCKET)).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "millrace")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|error| CellError::Strange(error.to_string()))?;
    let answer = sender.send_request(request).await?;
    let (status, kind) = (answer.status(), answer.headers().get(header::CONTENT_TYPE).cloned());
    let body = Limited::new(answer.into_body(), ANSWER_LIMIT).collect().await;
    connection.abort();
    let body = body.map_err(|error| CellError::Strange(error.to_string()))?.to_bytes();
    Ok(Answer { status, kind, body })
}

/// Asks for something whose answer comes as it arises. `limit` is for its beginning; whoever drops the answer ends it.
pub(super) async fn stream(run_dir: &Path, path: &str, limit: Duration) -> Result<Response, CellError> {
    let begin = async {
        let stream = UnixStream::connect(run_dir.join(API_SOCKET)).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = Request::get(path).header(header::HOST, "millrace").body(Full::new(Bytes::new()));
        let request = request.map_err(|error| CellError::Strange(error.to_string()))?;
        Ok(sender.send_request(request).await?.map(Body::new))
    };
    timeout(limit, begin).await.map_err(|_| CellError::Silent)?
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixListener,
    };

    use super::*;

    /// A worker that hears so many questions and ends, each time, before it answers the next one.
    async fn deaf(listener: UnixListener, times: usize) {
        for heard in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            if heard >= times {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").await.unwrap();
            }
        }
    }

    async fn ask_deaf(method: Method, times: usize) -> Result<Answer, CellError> {
        let folder = tempfile::tempdir().unwrap();
        let worker = tokio::spawn(deaf(UnixListener::bind(folder.path().join(API_SOCKET)).unwrap(), times));
        let answer = ask(folder.path(), method, "/v1/devices", Bytes::new(), Duration::from_secs(30)).await;
        worker.abort();
        answer
    }

    #[tokio::test]
    async fn a_question_is_put_to_the_successor_and_a_change_is_not() {
        for times in [0, 1, 5] {
            let answer = ask_deaf(Method::GET, times).await.unwrap();
            assert_eq!(answer.json::<Vec<u32>>().unwrap(), [0; 0], "{times} workers ended before");
        }
        // It may have been made.
        assert!(matches!(ask_deaf(Method::POST, 1).await, Err(CellError::Http(_))));
        // Not for ever.
        assert!(matches!(ask_deaf(Method::GET, usize::MAX).await, Err(CellError::Http(_))));
    }
}
