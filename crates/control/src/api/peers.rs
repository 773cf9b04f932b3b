//! Who may use the API: root, the daemon's own user, and whom the configuration names. The kernel says who connects.

use std::{
    os::{fd::AsFd, unix::fs::PermissionsExt},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{http::StatusCode, serve::Listener};
use millrace_sandbox::groups_of_peer;
use serde::{Deserialize, Serialize};
use tokio::{
    net::{UnixListener, UnixStream, unix::SocketAddr},
    sync::Semaphore,
};

use super::Problem;
use crate::dirs::{DirError, failed};

/// How long somebody who is turned away may take to say what he wanted.
const PATIENCE: Duration = Duration::from_secs(1);
/// Those who are told why at a time; more are only cut off.
const TOLD: usize = 8;
/// How often the log speaks of them.
const SAID_EVERY: Duration = Duration::from_secs(10);
/// Bytes of a request that are read before the answer.
const HEARD: usize = 64 << 10;

/// Somebody beside root and the daemon's own user who may use the API: a user, or a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Form", into = "Form")]
pub enum Operator {
    /// The user of this number.
    Uid(u32),
    /// Everybody who was in the group of this number when he connected.
    Gid(u32),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    uid: Option<u32>,
    gid: Option<u32>,
}

impl From<Operator> for Form {
    fn from(operator: Operator) -> Self {
        match operator {
            Operator::Uid(uid) => Self { uid: Some(uid), gid: None },
            Operator::Gid(gid) => Self { uid: None, gid: Some(gid) },
        }
    }
}

impl TryFrom<Form> for Operator {
    type Error = &'static str;

    fn try_from(form: Form) -> Result<Self, &'static str> {
        match (form.uid, form.gid) {
            (Some(uid), None) => Ok(Self::Uid(uid)),
            (None, Some(gid)) => Ok(Self::Gid(gid)),
            _ => Err("an operator is a uid or a gid"),
        }
    }
}

/// The API's socket, and who is heard there.
pub(crate) struct Door {
    listener: UnixListener,
    operators: Vec<Operator>,
    told: Arc<Semaphore>,
    strangers: Strangers,
}

/// Those who were turned away, for the log: they come as often as they like, and what others have to say there is not to be lost among them.
#[derive(Default)]
struct Strangers {
    /// When the log spoke of them last, and how many have come since.
    said: Option<Instant>,
    since: u64,
}

impl Strangers {
    /// One more has come; how many there are to speak of, when it is time to.
    fn note(&mut self, now: Instant) -> Option<u64> {
        self.since += 1;
        if self.said.is_some_and(|said| now.saturating_duration_since(said) < SAID_EVERY) {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.since))
    }
}

impl Door {
    pub(crate) fn new(listener: UnixListener, operators: Vec<Operator>) -> Self {
        Self { listener, operators, told: Arc::new(Semaphore::new(TOLD)), strangers: Strangers::default() }
    }

    /// Lets those connect to the socket at a path who may be heard: the system cannot tell them apart, so others are turned away.
    pub(crate) fn open(path: &Path, operators: &[Operator]) -> Result<(), DirError> {
        let mode = if operators.is_empty() { 0o600 } else { 0o666 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed(path, "say who may connect"))
    }

    /// Who it is, if he may not be heard.
    fn stranger(&self, stream: &UnixStream) -> Option<u32> {
        // Somebody who cannot be told is nobody.
        let Ok(peer) = stream.peer_cred() else { return Some(u32::MAX) };
        let own = peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw();
        let groups = || groups_of_peer(stream.as_fd()).unwrap_or_default();
        let named = |operator: &Operator| match *operator {
            Operator::Uid(uid) => uid == peer.uid(),
            Operator::Gid(gid) => gid == peer.gid() || groups().contains(&gid),
        };
        (!own && !self.operators.iter().any(named)).then_some(peer.uid())
    }
}

impl Listener for Door {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let Some(uid) = self.stranger(&stream) else { return (stream, address) };
            if let Some(connections) = self.strangers.note(Instant::now()) {
                tracing::warn!(uid, connections, "somebody who may not use the API was turned away");
            }
            if let Ok(permit) = Arc::clone(&self.told).try_acquire_owned() {
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(PATIENCE, turn_away(stream, uid)).await;
                    drop(permit);
                });
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Says no, after the request's head has come: nothing of it is understood.
async fn turn_away(stream: UnixStream, uid: u32) -> std::io::Result<()> {
    let mut came = Vec::new();
    while came.len() < HEARD && !came.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut piece = [0; 4096];
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => break,
            Ok(len) => came.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    let body = serde_json::to_string(&Problem::not_an_operator(uid))?;
    let status = StatusCode::FORBIDDEN;
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.writable().await?;
    // It fits into the socket's buffer, or the peer does not read.
    stream.try_write(answer.as_bytes()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_speaks_of_strangers_now_and_then() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        assert_eq!(strangers.note(start), Some(1));
        for _ in 0..1000 {
            assert_eq!(strangers.note(start + SAID_EVERY / 2), None);
        }
        assert_eq!(strangers.note(start + SAID_EVERY), Some(1001), "with how many there were");
        assert_eq!(strangers.note(start + SAID_EVERY), None);
    }
}
