//! Asking the daemon for a session (docs/fastpath.md has the protocol).

use std::{
    env, fs,
    io::{self, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags,
        SocketType, recvmsg, socket_with,
    },
};
use serde_json::{Value, json};

use crate::error::Error;

/// The door's socket in the daemon's run directory.
const SOCKET: &str = "apps.sock";

/// How soon it is tried again to connect, or to ask.
const AGAIN: Duration = Duration::from_millis(5);

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
    runtime.map_or_else(|| temporary_run_dir(user()), |dir| dir.join("millrace"))
}

fn user() -> u32 {
    rustix::process::getuid().as_raw()
}

fn temporary_run_dir(user: u32) -> PathBuf {
    env::temp_dir().join(format!("millrace-{user}"))
}

/// Whether the run directory is where anyone could have made it before this user's daemon, and somebody else may have. The daemon refuses
/// such a one, too (`control/src/dirs.rs`).
///
/// # Errors
/// It cannot be seen: then nobody is to be asked there, for whoever can rename it may have it back in the next moment.
fn is_anothers(run_dir: &Path, user: u32) -> io::Result<bool> {
    if run_dir != temporary_run_dir(user) {
        return Ok(false);
    }
    let found = fs::symlink_metadata(run_dir)?;
    Ok(!found.is_dir() || found.uid() != user || found.mode() & 0o022 != 0)
}

/// A connection to a controller of our own that shows the volume.
pub(crate) fn ask(run_dir: &Path, volume: &str, read_only: bool, timeout: Duration) -> Result<UnixStream, Error> {
    let path = run_dir.join(SOCKET);
    let failed = |source: io::Error| Error::Door { path: path.clone(), source };
    if is_anothers(run_dir, user()).map_err(failed)? {
        return Err(Error::NotOurs { path: run_dir.to_owned() });
    }
    let request = format!("{}\n", json!({ "volume": volume, "read_only": read_only }));
    let since = Instant::now();
    let (line, connection) = loop {
        let left = timeout.saturating_sub(since.elapsed()).max(AGAIN);
        match exchange(&path, &request, left) {
            // A worker has ended with the request in its hands: the next one is asked. A session that was made for it ends, since nobody
            // takes it.
            Err(error) if is_cut_off(&error) && since.elapsed() < timeout => std::thread::sleep(AGAIN),
            answer => break answer.map_err(failed)?,
        }
    };
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

/// Whether who was asked has hung up without an answer.
pub(crate) fn is_cut_off(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// One request and its answer: a line, and the descriptor that came with it.
fn exchange(path: &Path, request: &str, timeout: Duration) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    // The socket's own word for a time that is over is another's for "try again".
    let late = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "the daemon does not answer"),
        _ => error,
    };
    let mut stream = connect(path, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    match stream.write_all(request.as_bytes()) {
        // Who is turned away is told why before he has said anything.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.map_err(late)?,
    }
    receive(&stream, timeout).map_err(late)
}

/// A connection to the door. The system would wait for ever where nobody takes connections and too many wait.
fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    let since = Instant::now();
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if since.elapsed() < timeout => std::thread::sleep(AGAIN),
            Err(Errno::AGAIN) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the daemon takes no connections")),
            Err(errno) => return Err(errno.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// What [`exchange`] returns.
fn receive(stream: &UnixStream, timeout: Duration) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut fd, since) = (Vec::new(), None, Instant::now());
    loop {
        let mut room = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut rooms = [IoSliceMut::new(&mut room)];
        // A socket with a time limit is interrupted whatever the handler of a signal asks for.
        let received = match recvmsg(stream, &mut rooms, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) if since.elapsed() < timeout => continue,
            Err(Errno::INTR) => return Err(io::ErrorKind::WouldBlock.into()),
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fd = rights.into_iter().next().or(fd);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // The kernel had no number for it in this process.
            return Err(Errno::MFILE.into());
        }
        line.extend_from_slice(room.get(..received.bytes).unwrap_or_default());
        if line.last() == Some(&b'\n') {
            return Ok((line, fd));
        }
        if line.len() > ANSWER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_that_is_not_there_is_nobodys_to_believe() {
        // No user has this number.
        let nobody = u32::MAX - 7;
        let unseen = is_anothers(&temporary_run_dir(nobody), nobody).unwrap_err();
        assert_eq!(unseen.kind(), io::ErrorKind::NotFound);
        assert!(!is_anothers(Path::new("/nowhere"), nobody).unwrap(), "it was named");
    }
}
