//! Calls that a worker has its broker make, and what each of their arguments leads to. One table for both ends: the worker sends what
//! arguments lead to, the broker makes the call on its own copies.
//!
//! These are the calls that open, name, make or remove something, and questions that another process of the same user is answered alike.

#![allow(clippy::wildcard_imports, reason = "nearly all of it is the system's names")]

use Arg::{Both, Dir, Fd, In, Num, Out, OutOf, OutUpTo, Text};
use Gives::{Descriptor, Number, Two};
use When::{Always, Among, Bits, Null, Option as SocketOption};
use libc::*;

use crate::calls::When;

/// Arguments of a call.
pub(crate) const ARGS: usize = 6;
/// Longest text, its zero included.
pub(crate) const TEXT: usize = PATH_MAX as usize;
/// Most bytes that an argument leads to. What is longer is cut where the call may do less than it was asked for, and refused elsewhere.
pub(crate) const MOST: usize = 48 << 10;

/// What the broker's own list says of a call that it does not allow so. No call says it for a reason of its own.
pub(crate) const REFUSED: c_int = ENOANO;

/// What an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arg {
    /// A number, or nothing.
    Num,
    /// An open descriptor.
    Fd,
    /// One, or the working directory.
    Dir,
    /// A text that ends in zero: a path mostly. A descriptor's own name in `/proc/self/fd` becomes that descriptor.
    Text,
    /// As many bytes as another argument says, to be read.
    In(u8),
    /// As many bytes, to be written.
    Out(u16),
    /// As many bytes as another argument says, to be written.
    OutOf(u8),
    /// As many bytes as the number says that another argument leads to, to be written.
    OutUpTo(u8),
    /// As many bytes, to be read and written.
    Both(u16),
}

/// What a call returns when it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gives {
    Number,
    /// A new descriptor.
    Descriptor,
    /// Two new descriptors, in what an argument leads to.
    Two(u8),
}

/// How a call is made by somebody else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) number: c_long,
    pub(crate) args: &'static [Arg],
    pub(crate) gives: Gives,
    /// What the broker's own list demands.
    pub(crate) when: When,
    /// A shard may ask for it: it waits for no disk.
    pub(crate) of_shards: bool,
}

impl Form {
    const fn opens(self) -> Self {
        Self { gives: Descriptor, ..self }
    }

    const fn when(self, when: When) -> Self {
        Self { when, ..self }
    }

    const fn shards_too(self) -> Self {
        Self { of_shards: true, ..self }
    }
}

const fn form(number: c_long, args: &'static [Arg]) -> Form {
    Form { number, args, gives: Number, when: Always, of_shards: false }
}

/// The form of a call, if there is one.
pub(crate) fn of(number: c_long) -> Option<&'static Form> {
    FORMS.iter().find(|form| form.number == number)
}

const UNIX: When = Among(0, &[AF_UNIX as u32]);
/// Which rights a mode may give: none beyond reading, writing and searching.
pub(crate) const MODES: c_int = !0o777;
/// In place of a new owner.
pub(crate) const NOBODY: u32 = u32::MAX;
/// Who the other end is, whether something went wrong, how long to wait, and how much to keep. Options that lead elsewhere are not among them.
const OPTIONS: &[u32] = &[
    SO_ERROR as u32,
    SO_TYPE as u32,
    SO_DOMAIN as u32,
    SO_ACCEPTCONN as u32,
    SO_PEERCRED as u32,
    SO_PEERGROUPS,
    SO_SNDBUF as u32,
    SO_RCVBUF as u32,
    SO_SNDTIMEO as u32,
    SO_RCVTIMEO as u32,
];
/// The same on all machines that we know.
const SO_PEERGROUPS: u32 = 59;

pub(crate) const FORMS: &[Form] = &[
    // Paths. Landlock says which.
    form(SYS_openat, &[Dir, Text, Num, Num]).opens(),
    form(SYS_newfstatat, &[Dir, Text, Out(size_of::<stat>() as u16), Num]),
    form(SYS_statx, &[Dir, Text, Num, Num, Out(size_of::<statx>() as u16)]),
    form(SYS_statfs, &[Text, Out(size_of::<statfs>() as u16)]),
    form(SYS_faccessat, &[Dir, Text, Num]),
    form(SYS_readlinkat, &[Dir, Text, OutOf(3), Num]).shards_too(),
    form(SYS_getcwd, &[OutOf(1), Num]),
    form(SYS_unlinkat, &[Dir, Text, Num]),
    form(SYS_mkdirat, &[Dir, Text, Num]).when(Bits(2, MODES, 0)),
    form(SYS_renameat2, &[Dir, Text, Dir, Text, Num]),
    form(SYS_fchmodat, &[Dir, Text, Num]).when(Bits(2, MODES, 0)),
    // To a group: nothing is given to another user.
    form(SYS_fchownat, &[Dir, Text, Num, Num, Num]).when(Among(2, &[NOBODY])),
    // What is open.
    form(SYS_fchmod, &[Fd, Num]).when(Bits(1, MODES, 0)),
    form(SYS_fstatfs, &[Fd, Out(size_of::<statfs>() as u16)]).shards_too(),
    form(SYS_getdents64, &[Fd, OutOf(2), Num]),
    form(SYS_lseek, &[Fd, Num, Num]).shards_too(),
    form(SYS_ftruncate, &[Fd, Num]).shards_too(),
    form(SYS_fsync, &[Fd]),
    form(SYS_fdatasync, &[Fd]),
    form(SYS_fallocate, &[Fd, Num, Num, Num]),
    form(SYS_copy_file_range, &[Fd, Both(8), Fd, Both(8), Num, Num]),
    form(SYS_flock, &[Fd, Num]),
    // New descriptors that nobody can name.
    form(SYS_memfd_create, &[Text, Num]).opens().shards_too(),
    form(SYS_memfd_secret, &[Num]).opens().shards_too(),
    form(SYS_epoll_create1, &[Num]).opens(),
    form(SYS_eventfd2, &[Num, Num]).opens(),
    Form { gives: Two(0), ..form(SYS_pipe2, &[Out(8), Num]) },
    // Sockets of this machine.
    form(SYS_socket, &[Num, Num, Num]).opens().when(UNIX),
    Form { gives: Two(3), ..form(SYS_socketpair, &[Num, Num, Num, Out(8)]) }.when(UNIX),
    form(SYS_bind, &[Fd, In(2), Num]),
    form(SYS_listen, &[Fd, Num]),
    form(SYS_connect, &[Fd, In(2), Num]),
    form(SYS_accept4, &[Fd, OutUpTo(2), Both(4), Num]).opens().shards_too(),
    form(SYS_shutdown, &[Fd, Num]),
    form(SYS_getsockname, &[Fd, OutUpTo(2), Both(4)]),
    form(SYS_getpeername, &[Fd, OutUpTo(2), Both(4)]),
    form(SYS_getsockopt, &[Fd, Num, Num, OutUpTo(4), Both(4)]).when(SocketOption(OPTIONS)),
    form(SYS_setsockopt, &[Fd, Num, Num, In(4), Num]).when(SocketOption(OPTIONS)),
    // Questions.
    form(SYS_getuid, &[]),
    form(SYS_geteuid, &[]),
    form(SYS_getgid, &[]),
    form(SYS_getegid, &[]),
    form(SYS_uname, &[Out(size_of::<utsname>() as u16)]),
    form(SYS_sysinfo, &[Out(size_of::<sysinfo>() as u16)]),
    form(SYS_clock_getres, &[Num, Out(16)]),
    form(SYS_sched_getaffinity, &[Num, Num, OutOf(1)]),
    form(SYS_prlimit64, &[Num, Num, Num, Out(16)]).when(Null(2)),
    // A key's number; what is in it goes to the worker alone.
    form(SYS_request_key, &[Text, Text, Num, Num]).when(Null(2)),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::calls::{ABSENT, CONTROL, SHARD};

    #[test]
    fn every_call_is_made_in_one_way() {
        let here: BTreeSet<_> = FORMS.iter().map(|form| form.number).collect();
        assert_eq!(here.len(), FORMS.len());
        for call in [SHARD, CONTROL, ABSENT].into_iter().flatten() {
            assert!(!here.contains(&call.number), "call {}", call.number);
        }
    }

    #[test]
    fn lengths_are_numbers_and_what_is_written_has_room() {
        for form in FORMS {
            assert!(form.args.len() <= ARGS);
            for arg in form.args {
                match *arg {
                    In(at) | OutOf(at) => assert_eq!(form.args[at as usize], Num, "call {}", form.number),
                    OutUpTo(at) => assert_eq!(form.args[at as usize], Both(4), "call {}", form.number),
                    Out(len) | Both(len) => assert!((1..=MOST).contains(&(len as usize)), "call {}", form.number),
                    Num | Fd | Dir | Text => {}
                }
            }
            if let Two(at) = form.gives {
                assert_eq!(form.args[at as usize], Out(8));
            }
        }
    }
}
