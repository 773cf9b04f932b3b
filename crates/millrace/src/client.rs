//! A client of the daemon's API: one request per connection. A question (GET) is put again where the process that would have
//! answered ended first, for another takes its place; what changes something is not, for nobody knows whether it was done.

use std::{
    io,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use millrace_control::{API_SOCKET, DirError, Problem, default_run_dir, trust_run_dir};
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;
use tokio::{
    net::UnixStream,
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::timeout,
};

/// How often a question is put when who would answer it ends.
const QUESTION_ATTEMPTS: u32 = 4;
/// Before it is put again.
const BEFORE_NEXT_ATTEMPT: Duration = Duration::from_millis(50);
/// How long an answer to a question may take before who asked is told that there is none.
const SLOW: Duration = Duration::from_secs(5);
/// Where a daemon that is the system's own has its sockets.
const SYSTEM_RUN_DIR: &str = "/run/millrace";
/// A pipe that has any room takes so much at once, as pipe(7) promises.
const PART: usize = 4096;

/// Why the daemon did not do it.
#[derive(Debug, Error)]
pub(crate) enum ClientError {
    /// Nobody listens.
    #[error("no daemon answers on {}; {}", path.display(), advice(elsewhere.as_deref()))]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// The run directory of the system's daemon, where nobody has said another one and this is it.
        elsewhere: Option<PathBuf>,
    },
    /// Whoever answers need not be the daemon.
    #[error(transparent)]
    NotTrusted(DirError),
    /// Not for us.
    #[error(
        "{} is another user's: root and the user that runs the daemon may use it, and whom [[operator]] in its configuration names \
         (docs/sandbox.md)",
        path.display()
    )]
    NotAllowed {
        /// The socket.
        path: PathBuf,
    },
    /// Nothing has an empty name, and a path without it would lead elsewhere.
    #[error("the name of the {kind} is empty; \"millrace {kind} list\" shows what there is")]
    NoName {
        /// "volume", "device", "group" or "copy".
        kind: &'static str,
    },
    /// The connection failed.
    #[error("{}: {source}", path.display())]
    Connection {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The daemon went away, or speaks something else.
    #[error("{}: the daemon did not answer: {source}", path.display())]
    Http {
        /// The socket.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: hyper::Error,
    },
    /// What the daemon sends cannot be written, or signals not be watched.
    #[error(transparent)]
    Output {
        /// What the system said.
        source: io::Error,
    },
    /// The daemon refused.
    #[error("{}{}", .0.detail, .0.advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default())]
    Refused(Problem),
    /// The daemon's answer makes no sense to us.
    #[error("the daemon's answer ({status}) cannot be understood; is it another version of millrace? {source}")]
    Answer {
        /// The HTTP status.
        status: u16,
        /// What is wrong with the body.
        #[source]
        source: serde_json::Error,
    },
}

impl ClientError {
    /// For who waits for the end of `what`, which `show` shows: where only the daemon has ended it has not failed, and goes on.
    pub(crate) fn while_waiting(self, what: &str, show: &str) -> Box<dyn std::error::Error> {
        let is_daemons_end = match &self {
            Self::NotRunning { .. } | Self::Http { .. } => true,
            Self::Refused(problem) => problem.code == "stopping",
            _ => false,
        };
        if is_daemons_end {
            let goes_on = format!("{what} goes on when it is back (\"{show}\" tells)");
            format!("the daemon has ended, or does not answer; {goes_on}: {self}").into()
        } else {
            self.into()
        }
    }
}

/// A daemon to talk to.
pub(crate) struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

impl Client {
    pub(crate) fn new(run_dir: &Path) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { socket: run_dir.join(API_SOCKET), runtime })
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        decode(self.ask(path)?)
    }

    pub(crate) fn get_text(&self, path: &str) -> Result<Bytes, ClientError> {
        Ok(self.ask(path)?.1)
    }

    pub(crate) fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        decode(self.request(Method::POST, path, encode(body))?)
    }

    pub(crate) fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        decode(self.request(Method::PATCH, path, encode(body))?)
    }

    /// Sends bytes as they are.
    pub(crate) fn put_bytes(&self, path: &str, body: Vec<u8>) -> Result<(), ClientError> {
        self.request(Method::PUT, path, body).map(|_| ())
    }

    pub(crate) fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.request(Method::DELETE, path, Vec::new()).map(|_| ())
    }

    fn ask(&self, path: &str) -> Result<(u16, Bytes), ClientError> {
        for _ in 1..QUESTION_ATTEMPTS {
            match self.request(Method::GET, path, Vec::new()) {
                Err(ClientError::Http { .. } | ClientError::Connection { .. }) => std::thread::sleep(BEFORE_NEXT_ATTEMPT),
                answered => return answered,
            }
        }
        self.request(Method::GET, path, Vec::new())
    }

    /// The answer's status and body, if it is a good one.
    fn request(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(u16, Bytes), ClientError> {
        let (status, body) = self.runtime.block_on(async {
            // What changes something may take its time.
            let is_question = method == Method::GET;
            let exchange = self.exchange(method, path, body);
            if is_question { patiently(exchange, SLOW, tell_silence).await } else { exchange.await }
        })?;
        if status.is_success() {
            return Ok((status.as_u16(), body));
        }
        match serde_json::from_slice(&body) {
            Ok(problem) => Err(ClientError::Refused(problem)),
            Err(source) => Err(ClientError::Answer { status: status.as_u16(), source }),
        }
    }

    /// Gets an answer that comes as it arises, piece by piece. Ctrl-C has the daemon end it (`DELETE` of `end`), the rest included; a
    /// second one breaks off, also while there is no room for the next piece. Whether it came to its end.
    pub(crate) fn stream(
        &self,
        path: &str,
        end: &str,
        has_room: Option<&dyn Fn() -> bool>,
        take: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<bool, ClientError> {
        self.runtime.block_on(async {
            let answer = self.send(Method::GET, path, Vec::new()).await?;
            let mut interrupts = signal(SignalKind::interrupt()).map_err(|source| ClientError::Output { source })?;
            let status = answer.status();
            let mut body = answer.into_body();
            if !status.is_success() {
                let http = |source| ClientError::Http { path: self.socket.clone(), source };
                let problem = body.collect().await.map_err(http)?.to_bytes();
                return Err(match serde_json::from_slice(&problem) {
                    Ok(problem) => ClientError::Refused(problem),
                    Err(source) => ClientError::Answer { status: status.as_u16(), source },
                });
            }
            let mut told = false;
            loop {
                let frame = tokio::select! {
                    frame = body.frame() => frame,
                    _ = interrupts.recv() => {
                        if self.is_broken_off(&mut told, end).await {
                            return Ok(false);
                        }
                        continue;
                    }
                };
                let Some(frame) = frame else { return Ok(true) };
                let Ok(frame) = frame else { return Ok(false) };
                let part = has_room.map_or(usize::MAX, |_| PART);
                for bytes in frame.data_ref().into_iter().flat_map(|bytes| bytes.chunks(part)) {
                    while has_room.is_some_and(|has_room| !has_room()) {
                        tokio::select! {
                            // `has_room` has waited.
                            () = tokio::task::yield_now() => {}
                            _ = interrupts.recv() => {
                                if self.is_broken_off(&mut told, end).await {
                                    return Ok(false);
                                }
                            }
                        }
                    }
                    take(bytes).map_err(|source| ClientError::Output { source })?;
                }
            }
        })
    }

    /// Ctrl-C: the first one has the daemon end what it answers.
    async fn is_broken_off(&self, told: &mut bool, end: &str) -> bool {
        if std::mem::replace(told, true) {
            return true;
        }
        // If that fails, the end is the connection's.
        let _ = self.send(Method::DELETE, end, Vec::new()).await;
        false
    }

    async fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(hyper::StatusCode, Bytes), ClientError> {
        let http = |source| ClientError::Http { path: self.socket.clone(), source };
        let answer = self.send(method, path, body).await?;
        let status = answer.status();
        Ok((status, answer.into_body().collect().await.map_err(http)?.to_bytes()))
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Incoming>, ClientError> {
        let http = |source| ClientError::Http { path: self.socket.clone(), source };
        if let Some(kind) = unnamed(path) {
            return Err(ClientError::NoName { kind });
        }
        trust_run_dir(self.run_dir()).map_err(|error| self.untrusted(error))?;
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "millrace")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .expect("names are escaped, so the path is one");
        sender.send_request(request).await.map_err(http)
    }

    fn run_dir(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new(""))
    }

    fn untrusted(&self, error: DirError) -> ClientError {
        match error {
            DirError::Io { source, .. } => self.unreachable(source),
            error => ClientError::NotTrusted(error),
        }
    }

    fn unreachable(&self, source: io::Error) -> ClientError {
        let path = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                let elsewhere = elsewhere(self.run_dir(), &default_run_dir(), Path::new(SYSTEM_RUN_DIR));
                ClientError::NotRunning { path, elsewhere }
            }
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed { path },
            _ => ClientError::Connection { path, source },
        }
    }
}

/// The system's daemon, where one is that a user may have meant who has not said which.
fn elsewhere(asked: &Path, default: &Path, system: &Path) -> Option<PathBuf> {
    (asked == default && asked != system && system.join(API_SOCKET).exists()).then(|| system.to_owned())
}

fn advice(elsewhere: Option<&Path>) -> String {
    match elsewhere {
        None => "start one with \"millrace serve\", or say where it is with --run-dir or MILLRACE_RUN_DIR".to_owned(),
        Some(dir) => {
            let dir = dir.display();
            format!("the daemon of the system is at {dir}: say --run-dir {dir}, or set MILLRACE_RUN_DIR={dir}")
        }
    }
}

/// Waits for its end however long that takes, and tells when it takes long.
async fn patiently<T>(work: impl Future<Output = T>, slow: Duration, tell: impl FnOnce()) -> T {
    let mut work = pin!(work);
    if let Ok(done) = timeout(slow, work.as_mut()).await {
        return done;
    }
    tell();
    work.await
}

fn tell_silence() {
    let silent = SLOW.as_secs();
    eprintln!("millrace: no answer for {silent} s: the daemon's worker hangs or is busy (docs/survival.md); still waiting");
}

fn encode(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).expect("requests have text for keys and nothing that JSON lacks")
}

fn decode<T: DeserializeOwned>((status, body): (u16, Bytes)) -> Result<T, ClientError> {
    serde_json::from_slice(&body).map_err(|source| ClientError::Answer { status, source })
}

/// What a path has of an empty name.
fn unnamed(path: &str) -> Option<&'static str> {
    let kinds = [("volumes", "volume"), ("devices", "device"), ("groups", "group"), ("copies", "copy")];
    let mut words = path.split('/').skip(2);
    let (kind, name) = (words.next()?, words.next()?);
    let (_, kind) = kinds.into_iter().find(|(plural, _)| *plural == kind)?;
    name.is_empty().then_some(kind)
}

/// A name as a part of a path: what is no name cannot lead anywhere else.
pub(crate) fn segment(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
        thread,
    };

    use serde_json::{Value, json};

    use super::*;

    /// One who ends as often while it has a request, and answers the next; how many it got, once one more connects.
    fn ends_first(folder: &Path, times: u32) -> thread::JoinHandle<u32> {
        let listener = UnixListener::bind(folder.join(API_SOCKET)).unwrap();
        thread::spawn(move || {
            let mut requests = 0;
            loop {
                let (mut stream, _) = listener.accept().unwrap();
                if stream.read(&mut [0; 1024]).unwrap() == 0 {
                    return requests;
                }
                requests += 1;
                if requests > times {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
                }
            }
        })
    }

    fn asked(times: u32, ask: impl FnOnce(&Client) -> Result<Value, ClientError>) -> (Result<Value, ClientError>, u32) {
        let folder = tempfile::tempdir().unwrap();
        let listener = ends_first(folder.path(), times);
        let said = ask(&Client::new(folder.path()).unwrap());
        drop(std::os::unix::net::UnixStream::connect(folder.path().join(API_SOCKET)).unwrap());
        (said, listener.join().unwrap())
    }

    #[test]
    fn an_empty_name_is_no_path() {
        for (path, kind) in [("/v1/volumes/", "volume"), ("/v1/devices//namespaces/1", "device"), ("/v1/copies/", "copy")] {
            assert_eq!(unnamed(path), Some(kind), "{path}");
        }
        for path in ["/v1/volumes", "/v1/volumes/a", "/v1/devices/d/namespaces", "/v1/usage?by=volume", "/metrics"] {
            assert_eq!(unnamed(path), None, "{path}");
        }
        let folder = tempfile::tempdir().unwrap();
        let refused = Client::new(folder.path()).unwrap().get::<Value>("/v1/volumes/").unwrap_err().to_string();
        assert_eq!(refused, "the name of the volume is empty; \"millrace volume list\" shows what there is");
    }

    #[test]
    fn who_has_not_said_which_daemon_is_told_of_the_systems() {
        let folder = tempfile::tempdir().unwrap();
        let (own, system) = (folder.path().join("own"), folder.path().join("system"));
        let said = |asked: &Path, default: &Path| {
            let elsewhere = elsewhere(asked, default, &system);
            ClientError::NotRunning { path: asked.join(API_SOCKET), elsewhere }.to_string()
        };
        let start = "start one with \"millrace serve\"";
        assert!(said(&own, &own).contains(start), "there is none");
        std::fs::create_dir(&system).unwrap();
        drop(UnixListener::bind(system.join(API_SOCKET)).unwrap());
        let told = said(&own, &own);
        assert!(told.contains(&format!("say --run-dir {}", system.display())) && !told.contains("millrace serve"), "{told}");
        assert!(said(&own, &folder.path().join("other")).contains(start), "another one was meant");
        assert!(said(&system, &system).contains(start), "it is the one that does not answer");
    }

    /// What is told is what ends the work here, which waits for nothing else.
    #[test]
    fn a_silence_is_told_and_nothing_is_given_up() {
        let client = Client::new(Path::new("run")).unwrap();
        let (tell, told) = tokio::sync::oneshot::channel();
        let answer = client.runtime.block_on(patiently(told, Duration::ZERO, || tell.send("it was told").unwrap()));
        assert_eq!(answer, Ok("it was told"));
        let at_once = client.runtime.block_on(patiently(async { 7 }, Duration::ZERO, || panic!("it was there")));
        assert_eq!(at_once, 7);
    }

    #[test]
    fn a_question_is_put_again_and_no_change_is() {
        let (said, requests) = asked(QUESTION_ATTEMPTS - 1, |client| client.get("/v1/x"));
        assert_eq!((said.unwrap(), requests), (json!({}), QUESTION_ATTEMPTS));
        let (said, requests) = asked(QUESTION_ATTEMPTS, |client| client.get("/v1/x"));
        assert!(matches!(said, Err(ClientError::Http { .. })), "{said:?}");
        assert_eq!(requests, QUESTION_ATTEMPTS);
        let (said, requests) = asked(1, |client| client.post("/v1/x", &json!({})));
        assert!(matches!(said, Err(ClientError::Http { .. })), "{said:?}");
        assert_eq!(requests, 1);
    }
}
