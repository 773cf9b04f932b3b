//! Which system calls threads have. What is not here fails.
//!
//! Every call has a reason to be here: it is made by the code that runs on such threads, by the standard library for it, or by the C
//! library for those two. A call is added when [`refused`](crate::refused) shows that it is missing, and taken out with what needed it.

#![allow(clippy::wildcard_imports, reason = "nearly all of it is the system's names")]

use When::{Among, Bits, Null, OwnProcess};
use libc::*;

/// A call, and when it is allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) number: c_long,
    pub(crate) when: When,
}

/// What an argument must be. The filter sees numbers only: what a pointer leads to may change after it has looked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum When {
    Always,
    /// These bits of an argument have this value.
    Bits(u8, c_int, c_int),
    /// An argument is one of these numbers.
    Among(u8, &'static [u32]),
    /// An argument is no pointer.
    Null(u8),
    /// An argument is this process.
    OwnProcess(u8),
}

const fn always(number: c_long) -> Call {
    Call { number, when: When::Always }
}

const fn when(number: c_long, when: When) -> Call {
    Call { number, when }
}

const FIONBIO: u32 = 0x5421;
const FIOCLEX: u32 = 0x5451;
const BLKSSZGET: u32 = 0x1268;
const BLKGETSIZE64: u32 = 0x8008_1272;
/// Linux's VFIO: a physical controller that is ours, as the driver uses it (`_IO(';', 100)` and on).
const VFIO: u32 = 0x3b64;
/// Linux's iommufd: that controller's addresses (`_IO(';', 0x80)` and on).
const IOMMUFD: u32 = 0x3b80;
const IOCTLS: &[u32] = &[
    FIONBIO,
    FIOCLEX,
    BLKSSZGET,
    BLKGETSIZE64,
    // API version, extension, IOMMU, group status, container; device of a group, its description, regions, interrupts (twice), reset;
    // IOMMU's description, map, unmap; a device's binding to iommufd and its address space.
    VFIO,
    VFIO + 1,
    VFIO + 2,
    VFIO + 3,
    VFIO + 4,
    VFIO + 6,
    VFIO + 7,
    VFIO + 8,
    VFIO + 9,
    VFIO + 10,
    VFIO + 11,
    VFIO + 12,
    VFIO + 13,
    VFIO + 14,
    VFIO + 18,
    VFIO + 19,
    // An address space, what of it may be used, map, unmap.
    IOMMUFD + 1,
    IOMMUFD + 4,
    IOMMUFD + 5,
    IOMMUFD + 6,
];
const KEYCTL_READ: u32 = 11;

/// Memory is never made executable.
const NO_EXEC: When = Bits(2, PROT_EXEC, 0);

/// What shards have: the data path, guests' messages, and what the allocator and a panic need.
pub(crate) const SHARD: &[Call] = &[
    // Disks, and waiting.
    always(SYS_io_uring_enter),
    always(SYS_epoll_pwait2),
    always(SYS_epoll_ctl),
    always(SYS_futex),
    // The standard library's channels, while whoever sends is off its processor in the middle of it.
    always(SYS_sched_yield),
    always(SYS_clock_gettime),
    always(SYS_ppoll),
    // Whether a submission that took long has slept for a disk.
    when(SYS_getrusage, Among(0, &[RUSAGE_THREAD.cast_unsigned()])),
    // Guests: eventfds, messages with descriptors, the memory that they hand over.
    always(SYS_read),
    always(SYS_write),
    always(SYS_recvmsg),
    always(SYS_sendmsg),
    always(SYS_accept4),
    always(SYS_close),
    always(SYS_fcntl),
    always(SYS_fstat),
    always(SYS_fstatfs),
    always(SYS_lseek),
    always(SYS_readlinkat),
    always(SYS_memfd_create),
    always(SYS_ftruncate),
    // Memory.
    when(SYS_mmap, NO_EXEC),
    when(SYS_mprotect, NO_EXEC),
    always(SYS_munmap),
    always(SYS_mremap),
    always(SYS_madvise),
    always(SYS_brk),
    always(SYS_memfd_secret),
    always(SYS_mlock),
    always(SYS_membarrier),
    always(SYS_getrandom),
    // Signals, and the thread's end.
    always(SYS_rt_sigaction),
    always(SYS_rt_sigprocmask),
    always(SYS_rt_sigreturn),
    always(SYS_sigaltstack),
    always(SYS_getpid),
    always(SYS_gettid),
    when(SYS_tgkill, OwnProcess(0)),
    always(SYS_exit),
];

/// What all threads but shards have, beside what shards have.
pub(crate) const CONTROL: &[Call] = &[
    // Files: Landlock says which.
    always(SYS_openat),
    always(SYS_newfstatat),
    always(SYS_statx),
    always(SYS_statfs),
    always(SYS_faccessat),
    always(SYS_getdents64),
    always(SYS_getcwd),
    always(SYS_pread64),
    always(SYS_pwrite64),
    always(SYS_readv),
    always(SYS_writev),
    always(SYS_preadv),
    always(SYS_pwritev),
    always(SYS_preadv2),
    always(SYS_pwritev2),
    always(SYS_fsync),
    always(SYS_fdatasync),
    always(SYS_fallocate),
    always(SYS_copy_file_range),
    always(SYS_fadvise64),
    always(SYS_flock),
    always(SYS_unlinkat),
    always(SYS_mkdirat),
    always(SYS_renameat),
    always(SYS_renameat2),
    always(SYS_fchmod),
    always(SYS_fchmodat),
    when(SYS_ioctl, Among(1, IOCTLS)),
    // What of a volume's memory is there, for huge pages.
    always(SYS_mincore),
    // Sockets of this machine.
    when(SYS_socket, Among(0, &[AF_UNIX as u32])),
    when(SYS_socketpair, Among(0, &[AF_UNIX as u32])),
    always(SYS_sendto),
    always(SYS_recvfrom),
    always(SYS_shutdown),
    always(SYS_bind),
    always(SYS_listen),
    always(SYS_connect),
    always(SYS_getsockname),
    always(SYS_getpeername),
    always(SYS_getsockopt),
    always(SYS_setsockopt),
    // Disks, where control itself reads and writes: what a service mounts is read by a ring of the thread's own.
    always(SYS_io_uring_setup),
    always(SYS_io_uring_register),
    // Waiting.
    always(SYS_epoll_create1),
    always(SYS_epoll_pwait),
    always(SYS_eventfd2),
    always(SYS_pipe2),
    always(SYS_dup),
    always(SYS_dup3),
    always(SYS_nanosleep),
    always(SYS_clock_nanosleep),
    always(SYS_restart_syscall),
    // Threads: none of the newer call, whose flags no filter can see (it says that there is none such).
    when(SYS_clone, Bits(0, CLONE_THREAD, CLONE_THREAD)),
    always(SYS_clone3),
    always(SYS_set_robust_list),
    always(SYS_rseq),
    when(SYS_prctl, Among(0, &[PR_SET_NAME as u32, PR_SET_TIMERSLACK as u32, PR_SET_NO_NEW_PRIVS as u32])),
    // A list can only be made shorter; a flag could have others ask for our calls.
    when(SYS_seccomp, Among(1, &[0])),
    always(SYS_sched_getaffinity),
    always(SYS_getcpu),
    always(SYS_exit_group),
    // Questions.
    always(SYS_getppid),
    always(SYS_getuid),
    always(SYS_geteuid),
    always(SYS_getgid),
    always(SYS_getegid),
    always(SYS_clock_getres),
    always(SYS_uname),
    always(SYS_sysinfo),
    when(SYS_prlimit64, Null(2)),
    // Keys.
    always(SYS_munlock),
    always(SYS_request_key),
    when(SYS_keyctl, Among(0, &[KEYCTL_READ])),
];

/// Older names for the same, which only this kind of machine has.
#[cfg(target_arch = "x86_64")]
pub(crate) const OLDER: &[Call] = &[
    always(SYS_open),
    always(SYS_stat),
    always(SYS_lstat),
    always(SYS_access),
    always(SYS_readlink),
    always(SYS_unlink),
    always(SYS_mkdir),
    always(SYS_rmdir),
    always(SYS_rename),
    always(SYS_chmod),
    always(SYS_poll),
    always(SYS_epoll_wait),
    always(SYS_time),
];
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const OLDER: &[Call] = &[];

/// What operators may have heard of and ask for: names for messages.
const NAMES: &[(c_long, &str)] = &[
    (SYS_execve, "execve"),
    (SYS_execveat, "execveat"),
    (SYS_ptrace, "ptrace"),
    (SYS_process_vm_readv, "process_vm_readv"),
    (SYS_process_vm_writev, "process_vm_writev"),
    (SYS_socket, "socket"),
    (SYS_openat, "openat"),
    (SYS_openat2, "openat2"),
    (SYS_mount, "mount"),
    (SYS_unshare, "unshare"),
    (SYS_setns, "setns"),
    (SYS_clone, "clone"),
    (SYS_clone3, "clone3"),
    (SYS_kill, "kill"),
    (SYS_bpf, "bpf"),
    (SYS_perf_event_open, "perf_event_open"),
    (SYS_userfaultfd, "userfaultfd"),
    (SYS_io_uring_setup, "io_uring_setup"),
    (SYS_io_uring_register, "io_uring_register"),
    (SYS_mmap, "mmap"),
    (SYS_mprotect, "mprotect"),
    (SYS_ioctl, "ioctl"),
    (SYS_prctl, "prctl"),
    (SYS_setuid, "setuid"),
    (SYS_capset, "capset"),
    (SYS_keyctl, "keyctl"),
];

/// A call's name, where it has one here.
pub(crate) fn name(number: i64) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::MOST_SHARD_CALLS;

    fn numbers(calls: &[Call]) -> BTreeSet<c_long> {
        calls.iter().map(|call| call.number).collect()
    }

    #[test]
    fn shards_have_few_calls_and_no_call_is_listed_twice() {
        assert!(SHARD.len() <= MOST_SHARD_CALLS, "{} calls", SHARD.len());
        let (shard, control, older) = (numbers(SHARD), numbers(CONTROL), numbers(OLDER));
        assert_eq!(shard.len() + control.len() + older.len(), SHARD.len() + CONTROL.len() + OLDER.len());
        assert!(shard.is_disjoint(&control) && shard.is_disjoint(&older) && control.is_disjoint(&older));
    }

    #[test]
    fn nobody_may_start_programs_look_into_processes_or_change_who_he_is() {
        let all: BTreeSet<_> = [SHARD, CONTROL, OLDER].into_iter().flat_map(numbers).collect();
        let never = [
            SYS_execve,
            SYS_execveat,
            SYS_ptrace,
            SYS_process_vm_readv,
            SYS_process_vm_writev,
            SYS_mount,
            SYS_unshare,
            SYS_setns,
            SYS_bpf,
            SYS_perf_event_open,
            SYS_userfaultfd,
            SYS_setuid,
            SYS_setresuid,
            SYS_capset,
            SYS_kill,
            SYS_pidfd_getfd,
            SYS_pidfd_send_signal,
            SYS_add_key,
            SYS_open_by_handle_at,
        ];
        for number in never {
            assert!(!all.contains(&number), "call {number}");
        }
    }

    #[test]
    fn shards_open_nothing() {
        let shard = numbers(SHARD);
        for number in [
            SYS_openat,
            SYS_openat2,
            SYS_socket,
            SYS_connect,
            SYS_bind,
            SYS_clone,
            SYS_clone3,
            SYS_unlinkat,
            SYS_io_uring_setup,
        ] {
            assert!(!shard.contains(&number), "call {number}");
        }
    }
}
