//! Which system calls a worker's threads have. What is not here does not reach the kernel: it is made in another form
//! ([`instead`](crate::instead)), by the broker ([`forms`](crate::forms)), or fails.
//!
//! Here is what nobody else can do for a thread — its memory, its waiting, its signals, its rings —, and what is done so often that asking
//! somebody else would be felt. A call comes in when [`refused`](crate::refused) shows that it is missing, and only in another one's place:
//! the list has its end at [`MOST_CALLS`](crate::MOST_CALLS).

#![allow(clippy::wildcard_imports, reason = "nearly all of it is the system's names")]

use When::{Among, Bits, OwnProcess};
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
    /// The second argument names a socket's own options, and the third is one of these.
    Option(&'static [u32]),
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
const BLKSSZGET: u32 = 0x1268;
const BLKGETSIZE64: u32 = 0x8008_1272;
/// Linux's VFIO: a physical controller that is ours, as the driver uses it (`_IO(';', 100)` and on).
const VFIO: u32 = 0x3b64;
/// Linux's iommufd: that controller's addresses (`_IO(';', 0x80)` and on).
const IOMMUFD: u32 = 0x3b80;
const IOCTLS: &[u32] = &[
    FIONBIO,
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
/// What may be asked and set of a descriptor: not who gets signals from it, and no lock that is waited for.
const FCNTLS: &[u32] = &[
    F_DUPFD as u32,
    F_DUPFD_CLOEXEC as u32,
    F_GETFD as u32,
    F_SETFD as u32,
    F_GETFL as u32,
    F_SETFL as u32,
    F_ADD_SEALS as u32,
    F_GET_SEALS as u32,
    F_OFD_GETLK as u32,
    F_OFD_SETLK as u32,
];

/// Memory is never made executable.
const NO_EXEC: When = Bits(2, PROT_EXEC, 0);

/// What shards have: the data path, guests' messages, and what the allocator and a panic need.
pub(crate) const SHARD: &[Call] = &[
    // Disks, and waiting.
    always(SYS_io_uring_enter),
    always(SYS_epoll_pwait2),
    always(SYS_epoll_ctl),
    always(SYS_futex),
    always(SYS_ppoll),
    // Where the kernel's own page does not tell the time.
    always(SYS_clock_gettime),
    // Whether a submission that took long has slept for a disk.
    when(SYS_getrusage, Among(0, &[RUSAGE_THREAD.cast_unsigned()])),
    // Guests: eventfds, messages with descriptors, the memory that they hand over.
    always(SYS_read),
    always(SYS_write),
    always(SYS_recvmsg),
    always(SYS_sendmsg),
    always(SYS_close),
    when(SYS_fcntl, Among(1, FCNTLS)),
    always(SYS_fstat),
    // Memory.
    when(SYS_mmap, NO_EXEC),
    when(SYS_mprotect, NO_EXEC),
    always(SYS_munmap),
    always(SYS_madvise),
    // What of a volume's memory is there: of files on tmpfs, and for huge pages.
    always(SYS_mincore),
    always(SYS_brk),
    always(SYS_mlock),
    always(SYS_membarrier),
    always(SYS_getrandom),
    // Signals, and the thread's end.
    always(SYS_rt_sigaction),
    always(SYS_rt_sigprocmask),
    always(SYS_rt_sigreturn),
    always(SYS_sigaltstack),
    always(SYS_gettid),
    when(SYS_tgkill, OwnProcess(0)),
    always(SYS_exit),
];

/// What the other threads have beside that.
pub(crate) const CONTROL: &[Call] = &[
    // Files and sockets that are open: reading and writing, in the two forms that all others can be made of.
    always(SYS_preadv2),
    always(SYS_pwritev2),
    // Disks' sizes, and physical disks, whose maps are the process's own memory.
    when(SYS_ioctl, Among(1, IOCTLS)),
    // Disks, where control itself reads and writes: what a service mounts is read by a ring of the thread's own.
    always(SYS_io_uring_setup),
    always(SYS_io_uring_register),
    // Threads.
    when(SYS_clone, Bits(0, CLONE_THREAD, CLONE_THREAD)),
    always(SYS_rseq),
    when(SYS_prctl, Among(0, &[PR_SET_NAME as u32, PR_SET_TIMERSLACK as u32])),
    // Keys: into locked memory, without anybody between.
    when(SYS_keyctl, Among(0, &[KEYCTL_READ])),
    always(SYS_exit_group),
];

/// What there is none of, says the kernel itself: the C library asks for these with all signals held back, and does without.
///
/// `clone3` has its flags in memory, where no filter sees them; `clone` does. `set_robust_list` is for locks between processes.
pub(crate) const ABSENT: &[Call] = &[always(SYS_clone3), always(SYS_set_robust_list)];

/// What the broker has beside the calls that it makes for others: its lanes, its threads, its memory.
pub(crate) const BROKER: &[Call] = &[
    always(SYS_recvmsg),
    always(SYS_sendmsg),
    always(SYS_write),
    always(SYS_close),
    always(SYS_fstat),
    always(SYS_futex),
    when(SYS_mmap, NO_EXEC),
    when(SYS_mprotect, NO_EXEC),
    always(SYS_munmap),
    always(SYS_mremap),
    always(SYS_madvise),
    always(SYS_brk),
    always(SYS_getrandom),
    when(SYS_clone, Bits(0, CLONE_THREAD, CLONE_THREAD)),
    always(SYS_rseq),
    when(SYS_prctl, Among(0, &[PR_SET_NAME as u32])),
    always(SYS_rt_sigaction),
    always(SYS_rt_sigprocmask),
    always(SYS_rt_sigreturn),
    always(SYS_sigaltstack),
    always(SYS_getpid),
    always(SYS_gettid),
    when(SYS_tgkill, OwnProcess(0)),
    always(SYS_exit),
    always(SYS_exit_group),
];

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
    use crate::{MOST_CALLS, forms::FORMS};

    fn numbers(calls: &[Call]) -> BTreeSet<c_long> {
        calls.iter().map(|call| call.number).collect()
    }

    #[test]
    fn the_list_is_short_and_no_call_is_listed_twice() {
        assert!(SHARD.len() + CONTROL.len() <= MOST_CALLS, "{} calls", SHARD.len() + CONTROL.len());
        let (shard, control) = (numbers(SHARD), numbers(CONTROL));
        assert_eq!(shard.len() + control.len(), SHARD.len() + CONTROL.len());
        assert!(shard.is_disjoint(&control) && numbers(ABSENT).is_disjoint(&shard) && numbers(ABSENT).is_disjoint(&control));
    }

    #[test]
    fn nobody_may_start_programs_look_into_processes_or_change_who_he_is() {
        let brokered = FORMS.iter().map(|form| form.number);
        let all: BTreeSet<_> = [SHARD, CONTROL].into_iter().flat_map(numbers).chain(brokered).collect();
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
            SYS_linkat,
            SYS_symlinkat,
            SYS_mknodat,
            SYS_landlock_restrict_self,
            SYS_seccomp,
        ];
        for number in never {
            assert!(!all.contains(&number), "call {number}");
        }
    }

    #[test]
    fn a_worker_opens_nothing() {
        let all: BTreeSet<_> = [SHARD, CONTROL].into_iter().flat_map(numbers).collect();
        for number in [
            SYS_openat,
            SYS_openat2,
            SYS_socket,
            SYS_connect,
            SYS_bind,
            SYS_unlinkat,
            SYS_renameat2,
            SYS_mkdirat,
            SYS_newfstatat,
            SYS_statx,
        ] {
            assert!(!all.contains(&number), "call {number}");
        }
        assert!(SHARD.iter().all(|call| ![SYS_clone, SYS_io_uring_setup, SYS_ioctl].contains(&call.number)));
    }
}
