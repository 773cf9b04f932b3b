//! The door for applications: a socket on which a process asks for a session on a volume (docs/fastpath.md).
//!
//! ```text
//!   application ── {"volume": …} ──► RUN_DIR/apps.sock ── uid, from the kernel ──► Manager::open_session
//!               ◄── {"device": …} and a connection to that device, as a descriptor ──┴── Cells::open_session, where another worker has it
//! ```
//!
//! Who may reach the socket is the run directory's to say, who may have which volume the configuration's and the API's ([`AppUser`]).

mod line;
mod users;

use std::{
    fs,
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    os::{
        fd::AsFd,
        unix::{fs::PermissionsExt, net::UnixStream},
    },
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use millrace_keeper::{Key, Kind, Link};
use rustix::{
    io::Errno,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use serde::{Deserialize, Serialize};
use tokio::{net::UnixListener, runtime::Handle};

use crate::{
    Name,
    api::Problem,
    cells::Cells,
    dirs::{DirError, failed},
    error::{ControlError, TOO_MANY_SESSIONS},
    manager::{Asker, Elsewhere, Manager, RECEIVED, SessionSpec},
};

use self::line::Line;
pub use users::{AppChange, AppUser};
pub(crate) use users::{invalid, name};

/// The door's socket in the run directory.
pub const APPS_SOCKET: &str = "apps.sock";

/// Longest request in bytes.
const REQUEST: usize = 4096;

/// How long an application may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a volume that is on its way to this worker is waited for, and how soon it is asked for again.
const ARRIVAL: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);

/// What an application sends, in one line.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    volume: String,
    #[serde(default)]
    read_only: bool,
}

/// What it gets, in one line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    /// The session's device. Its connection comes along.
    Device(Name),
    /// Why there is none.
    Error { errno: i32, problem: Problem },
}

/// Tells of volumes that the configuration file names for users and that nobody has: they may come, or a name is misspelt.
pub(crate) fn tell_missing(manager: &Manager, cells: Option<&Arc<Cells>>) {
    let others = cells.map(|cells| cells.others()).unwrap_or_default();
    for (uid, volume) in manager.volumes_missing_of_apps(&others) {
        tracing::warn!(uid, volume, "[[app]] in the configuration file names a volume that does not exist");
    }
}

/// Binds the door, and has it kept: who knocks between two workers waits. Everyone whom the run directory lets through may knock.
pub(crate) fn bind(run_dir: &Path, keeper: &Link) -> Result<UnixListener, DirError> {
    let (path, hidden) = (run_dir.join(APPS_SOCKET), run_dir.join("apps.new"));
    match fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&hidden, "remove it")(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&hidden).map_err(failed(&hidden, "make the applications' socket"))?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o666)).map_err(failed(&hidden, "open it to all"))?;
    fs::rename(&hidden, &path).map_err(failed(&path, "put the applications' socket in place"))?;
    if let Err(error) = keeper.put(Key::of_daemon(Kind::APPS), listener.as_fd()) {
        tracing::warn!(%error, "the applications' socket is not kept");
    }
    Ok(listener)
}

/// Answers until it is dropped.
pub(crate) async fn serve(listener: UnixListener, manager: Arc<Manager>, cells: Option<Arc<Cells>>) {
    let line = Line::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "an application could not be heard");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = stream.peer_cred() else { continue };
        let Some(place) = line.join(peer.uid()) else {
            tracing::debug!(uid = peer.uid(), "too many applications wait, of one user or of all: one is turned away");
            turn_away(stream);
            continue;
        };
        let (manager, cells) = (Arc::clone(&manager), cells.clone());
        tokio::spawn(async move {
            let Some(heard) = place.turn().await else { return };
            let answering = tokio::task::spawn_blocking(move || {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                answer(&manager, cells.as_ref(), Asker { uid: peer.uid() }, &stream)
            });
            if let Ok(Err(error)) = answering.await {
                tracing::debug!(%error, "an application left before its answer");
            }
            drop(heard);
        });
    }
}

/// Says why nobody is heard. The socket's buffer is empty, and nobody waits for it.
fn turn_away(stream: tokio::net::UnixStream) {
    let answer = Answer::Error { errno: Errno::AGAIN.raw_os_error(), problem: Problem::crowded() };
    // Who has left already need not know.
    let _ = stream.into_std().and_then(|stream| send(&stream, &answer, None));
}

fn answer(manager: &Manager, cells: Option<&Arc<Cells>>, asker: Asker, stream: &UnixStream) -> io::Result<()> {
    let result = match request(stream)? {
        Ok(wanted) => open(manager, cells, asker, &SessionSpec { volume: wanted.volume, read_only: wanted.read_only }),
        Err(error) => Err(Problem::bad_session(&error.to_string())),
    };
    match result {
        Ok((device, connection)) => send(stream, &Answer::Device(device), Some(&connection)),
        Err(problem) => send(stream, &refusal(problem), None),
    }
}

/// A session of this worker, or of the one that has the volume. Who may not have it does not learn where it is.
fn open(
    manager: &Manager,
    cells: Option<&Arc<Cells>>,
    asker: Asker,
    spec: &SessionSpec,
) -> Result<(Name, UnixStream), Problem> {
    let here = |elsewhere: &dyn Fn() -> Elsewhere| manager.open_session(asker, spec, elsewhere);
    let Some(cells) = cells else { return here(&Elsewhere::new).map_err(|error| Problem::from(&error)) };
    let runtime = Handle::current();
    runtime.block_on(cells.hear_of_sessions(asker));
    let deadline = Instant::now() + ARRIVAL;
    loop {
        let mut made = here(&|| cells.sessions());
        if matches!(made, Err(ControlError::NoVolume { .. })) {
            if let Some(session) = runtime.block_on(cells.open_session(asker, spec))? {
                return Ok(session);
            }
            // It may have come here meanwhile.
            made = here(&|| cells.sessions());
        }
        let is_on_its_way = matches!(&made, Err(ControlError::VolumeFailed { reason, .. }) if reason == RECEIVED);
        if !is_on_its_way || Instant::now() >= deadline {
            return made.map_err(|error| Problem::from(&error));
        }
        thread::sleep(AGAIN);
    }
}

/// Reads the request's line. The time is for all of it: who sends byte after byte keeps others from the door no longer.
fn request(mut stream: &UnixStream) -> io::Result<Result<Wanted, serde_json::Error>> {
    let deadline = Instant::now() + PATIENCE;
    let (mut line, mut room) = (Vec::new(), [0; 512]);
    while !line.ends_with(b"\n") && line.len() < REQUEST {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut room)? {
            0 => break,
            count => line.extend_from_slice(&room[..count]),
        }
    }
    Ok(serde_json::from_slice(&line))
}

/// Problems may come from another worker, where errors have become text: the status is what is left of them.
fn refusal(problem: Problem) -> Answer {
    let errno = match (problem.code.as_str(), StatusCode::from_u16(problem.status)) {
        (TOO_MANY_SESSIONS, _) => Errno::DQUOT,
        (_, Ok(StatusCode::NOT_FOUND)) => Errno::NOENT,
        (_, Ok(StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)) => Errno::INVAL,
        (_, Ok(StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE)) => Errno::BUSY,
        (_, Ok(StatusCode::FORBIDDEN)) => Errno::ACCESS,
        (_, Ok(StatusCode::INSUFFICIENT_STORAGE)) => Errno::NOSPC,
        _ => Errno::IO,
    };
    Answer::Error { errno: errno.raw_os_error(), problem }
}

/// Sends the answer in one piece: it is short, and the socket's buffer is empty.
fn send(stream: &UnixStream, answer: &Answer, connection: Option<&UnixStream>) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = connection.map(|connection| [connection.as_fd()]);
    if let Some(fds) = &fds {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the control buffer holds one descriptor");
    }
    sendmsg(stream, &[IoSlice::new(&line)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use millrace_block::VolumeError;

    use super::*;

    /// A program that may try again is told so, and what the system below did is no fault of what it asked for.
    #[test]
    fn the_errno_says_whose_failure_it_is() {
        let name: Name = "v".parse().unwrap();
        let io = |errno: Errno| {
            let (volume, path) = (name.to_string(), "/srv/v.img".into());
            ControlError::Volume(VolumeError::Io { volume, action: "open", path, source: errno.into() })
        };
        for (error, errno) in [
            (ControlError::NoVolume { name: name.to_string() }, Errno::NOENT),
            (ControlError::invalid("volume", &name, "it is a disk"), Errno::INVAL),
            (ControlError::untimely("volume", &name, "it is being resized"), Errno::BUSY),
            (ControlError::Stopping, Errno::BUSY),
            (io(Errno::NOSPC), Errno::NOSPC),
            (io(Errno::MFILE), Errno::IO),
        ] {
            let Answer::Error { errno: told, .. } = refusal(Problem::from(&error)) else { panic!("{error}") };
            assert_eq!(told, errno.raw_os_error(), "{error}");
        }
    }
}
