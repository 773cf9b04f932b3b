//! Programs that print keys: a worker runs none, but has a small process that does, which was there before the worker gave that up.
//!
//! ```text
//!   worker ── line, output, errors, answer (descriptors) ──► helper ── runs it ──► output ──► worker
//!          ◄── how it ended ─────────────────────────────────┘
//!              closed: nobody waits any more ──────────────► kills it
//! ```
//!
//! The key goes from the program's output into the worker's locked memory; the helper does not see it. It is the worker's user without
//! capabilities. Which programs it runs is told when it starts: a worker that somebody has taken over may ask for others.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
    process::{Pid, Signal, kill_process_group},
};

/// Longest command line in bytes.
const LINE: usize = 4096;
/// How it ended: 0 and the exit status, or 1 and why it did not begin.
const ENDED: i32 = 0;
const FAILED: i32 = 1;
/// How often is looked whether a program has ended.
const LOOK: Duration = Duration::from_millis(5);
/// How long after an answer's end a helper that has ended may still hold its socket.
const AT_END: Duration = Duration::from_secs(1);

/// Waits for a program's end, until then; `None`: it has not ended. Dropped, it has the program killed.
type Running = Box<dyn FnOnce(Instant) -> io::Result<Option<ExitStatus>> + Send>;

/// The worker's end. The helper ends with it.
#[derive(Debug)]
pub struct Helper(Arc<OwnedFd>);

impl Helper {
    /// Starts the helper: a program that calls [`help`] with its standard input.
    pub(crate) fn start(mut command: Command) -> io::Result<Self> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Nobody waits for it: it ends after us.
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Self(Arc::new(ours)))
    }

    /// Has a program run: its words are separated by spaces. The caller closes its own ends. A helper that has ended does not come back:
    /// `gone` makes the error then, if it returns.
    ///
    /// # Errors
    /// The helper is gone, or the line is too long.
    pub fn run(&self, line: &str, output: &OwnedFd, errors: &OwnedFd, gone: fn() -> io::Error) -> io::Result<Running> {
        if line.is_empty() || line.len() > LINE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (mut answer, theirs) = io::pipe()?;
        let fds = [output.as_fd(), errors.as_fd(), theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(fits, "the control buffer holds three descriptors");
        match sendmsg(&*self.0, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET | Errno::CONNREFUSED | Errno::NOTCONN) => return Err(gone()),
            sent => sent?,
        };
        let helper = Arc::clone(&self.0);
        Ok(Box::new(move |deadline| {
            if !is_ready(answer.as_fd(), PollFlags::IN, deadline)? {
                return Ok(None);
            }
            let mut bytes = [0; 8];
            if let Err(error) = answer.read_exact(&mut bytes) {
                let is_unsaid = error.kind() == io::ErrorKind::UnexpectedEof;
                // A helper that goes on had no room for what was sent.
                let is_gone = is_unsaid && is_ready(helper.as_fd(), PollFlags::empty(), Instant::now() + AT_END)?;
                return Err(if is_gone { gone() } else { error });
            }
            let [kind, value] = [0, 4].map(|at| i32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte])));
            if kind == ENDED { Ok(Some(ExitStatus::from_raw(value))) } else { Err(io::Error::from_raw_os_error(value)) }
        }))
    }
}

/// Runs programs for the worker at the other end of `socket` until it is gone: those of `allowed`, or any.
pub fn help(socket: BorrowedFd<'_>, allowed: Option<&[PathBuf]>) -> io::Result<()> {
    loop {
        let mut line = [0; LINE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut line)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes == 0 => return Ok(()),
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let Ok([output, errors, answer]) = <[OwnedFd; 3]>::try_from(fds) else { continue };
        let words = words(&line[..received.bytes]);
        let program = words.first().map(Path::new);
        let is_allowed =
            program.is_some_and(|program| allowed.is_none_or(|allowed| allowed.iter().any(|path| path == program)));
        let work = move || {
            let mut answer = File::from(answer);
            let ended = start(&words, is_allowed, output, errors).and_then(|mut child| wait(&mut child, answer.as_fd()));
            let (kind, value) = match ended {
                Ok(status) => (ENDED, status.into_raw()),
                Err(error) => (FAILED, error.raw_os_error().unwrap_or(libc::EIO)),
            };
            let bytes: Vec<u8> = [kind, value].iter().flat_map(|number| number.to_le_bytes()).collect();
            // A worker that is gone does not ask any more.
            let _ = answer.write_all(&bytes);
        };
        // Where there can be no more threads nothing is started, the answer ends unsaid, and this one alone has failed.
        drop(thread::Builder::new().spawn(work));
    }
}

fn start(words: &[OsString], is_allowed: bool, output: OwnedFd, errors: OwnedFd) -> io::Result<Child> {
    match words {
        [program, words @ ..] if is_allowed => {
            Command::new(program).args(words).stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0).spawn()
        }
        _ => Err(Errno::ACCESS.into()),
    }
}

/// Waits for a program's end. When nobody hears the answer any more it is killed, with what it has started.
fn wait(child: &mut Child, answer: BorrowedFd<'_>) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if is_ready(answer, PollFlags::empty(), Instant::now() + LOOK)? {
            if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                kill_process_group(group, Signal::KILL)?;
            }
            return child.wait();
        }
    }
}

/// Waits until there is something to read, or the other end is closed; whether that came before the deadline.
fn is_ready(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::from_borrowed_fd(fd, events)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn words(line: &[u8]) -> Vec<OsString> {
    use std::os::unix::ffi::OsStringExt;
    line.split(|byte| *byte == b' ').filter(|word| !word.is_empty()).map(|word| OsString::from_vec(word.to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: &str = "the helper is gone";

    fn gone() -> io::Error {
        io::Error::other(GONE)
    }

    /// What a command says, and how it ends.
    fn run(helper: &Helper, line: &str) -> io::Result<(String, ExitStatus)> {
        let ((mut output, theirs), (_errors, their_errors)) = (io::pipe()?, io::pipe()?);
        let wait = helper.run(line, &theirs.into(), &their_errors.into(), gone)?;
        let mut said = String::new();
        output.read_to_string(&mut said)?;
        let status = wait(Instant::now() + Duration::from_secs(60))?;
        Ok((said, status.expect("it ends")))
    }

    fn helper(allowed: Option<Vec<PathBuf>>) -> Helper {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair of sockets");
        thread::spawn(move || help(theirs.as_fd(), allowed.as_deref()));
        Helper(Arc::new(ours))
    }

    #[test]
    fn a_program_that_nobody_waits_for_is_killed() {
        let helper = helper(None);
        let ((mut output, theirs), (_errors, their_errors)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let wait = helper.run("/bin/sleep 1000", &theirs.into(), &their_errors.into(), gone).unwrap();
        assert!(wait(Instant::now()).unwrap().is_none());
        // Its end of the pipe is closed with it.
        assert_eq!(output.read_to_string(&mut String::new()).unwrap(), 0);
    }

    #[test]
    fn the_end_of_a_helper_is_known_from_any_other_failure() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair of sockets");
        let helper = Helper(Arc::new(ours));
        let ((_output, to), (_errors, errors_to)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let (to, errors_to) = (OwnedFd::from(to), OwnedFd::from(errors_to));
        let asked = helper.run("/bin/echo", &to, &errors_to, gone).unwrap();
        // What was sent and not read goes with it.
        drop(theirs);
        assert_eq!(asked(Instant::now() + Duration::from_secs(60)).unwrap_err().to_string(), GONE);
        for _ in 0..2 {
            let error = helper.run("/bin/echo", &to, &errors_to, gone).err().expect("nobody hears it");
            assert_eq!(error.to_string(), GONE);
        }
    }

    #[test]
    fn the_helper_runs_what_it_may() {
        let any = helper(None);
        let (said, status) = run(&any, "/bin/echo two  words").unwrap();
        assert_eq!((said.as_str(), status.success()), ("two words\n", true));
        assert!(!run(&any, "/bin/false").unwrap().1.success());
        assert_eq!(run(&any, "/nonexistent").unwrap_err().raw_os_error(), Some(libc::ENOENT));
        let some = helper(Some(vec!["/bin/echo".into()]));
        assert!(run(&some, "/bin/echo").unwrap().1.success());
        for line in ["/bin/cat /etc/passwd", "echo", "/bin/../bin/echo", "", " "] {
            let error = run(&some, line).unwrap_err();
            assert!(error.raw_os_error() == Some(libc::EACCES) || line.is_empty(), "{line}: {error}");
        }
    }
}
