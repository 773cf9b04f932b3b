//! Asking the daemon for a session (docs/fastpath.md has the protocol).

use std::{
    env,
    io::{self, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::error::Error;

/// The door's socket in the daemon's run directory.
const SOCKET: &str = "apps.sock";

/// Longest answer.
const ANSWER: usize = 64 << 10;

/// Where the daemon's sockets are unless told otherwise: `MILLRACE_RUN_DIR`, or where the daemon of this user puts them.
pub fn default_run_dir() -> PathBuf {
    if let Some(dir) = env::var_os("MILLRACE_RUN_DIR") {
        return dir.into();
    }
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/run/millrace");
    }
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let temporary = || env::temp_dir().join(format!("millrace-{}", rustix::process::getuid().as_raw()));
    runtime.map_or_else(temporary, |dir| dir.join("millrace"))
}

/// A connection to a controller of our own that shows the volume.
pub(crate) fn ask(run_dir: &Path, volume: &str, read_only: bool, timeout: Duration) -> Result<UnixStream, Error> {
    let path = run_dir.join(SOCKET);
    let failed = |source: io::Error| Error::Door { path: path.clone(), source };
    let mut stream = UnixStream::connect(&path).map_err(failed)?;
    stream.set_read_timeout(Some(timeout)).map_err(failed)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    let request = format!("{}\n", json!({ "volume": volume, "read_only": read_only }));
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let (line, connection) = receive(&stream).map_err(failed)?;
    let odd = || failed(io::Error::new(io::ErrorKind::InvalidData, "the answer is none that is known"));
    let answer: Value = serde_json::from_slice(&line).map_err(|_| odd())?;
    if let Some(refused) = answer.get("error") {
        let errno = refused.get("errno").and_then(Value::as_i64).and_then(|errno| i32::try_from(errno).ok());
        let problem = refused.get("problem");
        let text = |key| problem.and_then(|problem| problem.get(key)).and_then(Value::as_str);
        let detail = text("detail").unwrap_or("no reason was given").to_owned();
        let detail = text("advice").map_or(detail.clone(), |advice| format!("{detail}; {advice}"));
        return Err(Error::Refused { volume: volume.to_owned(), errno: errno.unwrap_or(5), detail });
    }
    connection.map(UnixStream::from).ok_or_else(odd)
}

/// The answer's line, and the descriptor that came with it.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut fd) = (Vec::new(), None);
    loop {
        let mut room = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut room)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fd = rights.into_iter().next().or(fd);
            }
        }
        line.extend_from_slice(room.get(..received.bytes).unwrap_or_default());
        if line.last() == Some(&b'\n') {
            return Ok((line, fd));
        }
        if received.bytes == 0 || line.len() > ANSWER {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
