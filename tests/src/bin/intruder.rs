//! Goes into the sandbox as a worker does, and tries to get out. For the tests.
//!
//! `intruder ALLOWED OUTSIDE`: ALLOWED is a directory that it may use, with a file `inside` and a link `link` to OUTSIDE, a file that
//! it may not. What it gives up is in `MILLRACE_SANDBOX`, as for workers. For each thread and attempt it prints one line: the thread,
//! the attempt, and the number of the error, 0 for none.

use std::{
    ffi::CString,
    hint::black_box,
    io,
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    process::Command,
    ptr::null,
    sync::mpsc::channel,
    thread,
};

use millrace_sandbox::{Grant, Policy, help, refused};

type Number = libc::c_long;

struct Paths {
    /// No path, but as needful: who started us.
    parent: usize,
    inside: CString,
    outside: CString,
    link: CString,
    new: CString,
}

fn text(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path")
}

/// Makes a call; the number of its error.
fn call(number: Number, arguments: [usize; 6]) -> i32 {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    // SAFETY: every attempt below passes numbers, null, or strings that live on; memory that is mapped or unmapped is nobody else's.
    let result = unsafe { libc::syscall(number, first, second, third, fourth, fifth, sixth) };
    if result < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(-1) } else { 0 }
}

/// A number as a register holds it.
fn word(number: i32) -> usize {
    number.cast_unsigned() as usize
}

fn open(path: &CString, flags: i32) -> i32 {
    call(libc::SYS_openat, [word(libc::AT_FDCWD), path.as_ptr() as usize, word(flags), 0o600, 0, 0])
}

/// Every attempt, by name, with its outcome.
fn attempts(paths: &Paths) -> Vec<(&'static str, i32)> {
    let plain = |number: Number, a: usize, b: usize, c: usize| call(number, [a, b, c, 0, 0, 0]);
    let parent = paths.parent;
    let missing = c"/nonexistent/program".as_ptr() as usize;
    let (anonymous, page) = ((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize, 4096);
    let (readable, executable) = (libc::PROT_READ as usize, (libc::PROT_READ | libc::PROT_EXEC) as usize);
    let map = |prot: usize| call(libc::SYS_mmap, [0, page, prot, anonymous, usize::MAX, 0]);
    let own = (&raw const *paths) as usize & !(page - 1);
    let mut limit = [0_u64; 2];
    let limits = (&raw mut limit) as usize;
    vec![
        // What any thread of a worker may do.
        ("map", map(readable)),
        ("yield", plain(libc::SYS_sched_yield, 0, 0, 0)),
        // Files.
        ("open-inside", open(&paths.inside, libc::O_RDWR)),
        ("make-inside", open(&paths.new, libc::O_RDWR | libc::O_CREAT)),
        ("open-outside", open(&paths.outside, libc::O_RDONLY)),
        ("write-outside", open(&paths.outside, libc::O_WRONLY)),
        ("cut-outside", open(&paths.outside, libc::O_RDWR | libc::O_TRUNC)),
        ("open-by-link", open(&paths.link, libc::O_RDONLY)),
        ("list-outside", open(&text(Path::new("/etc")), libc::O_RDONLY | libc::O_DIRECTORY)),
        ("open-memory", open(&text(Path::new(&format!("/proc/{parent}/mem"))), libc::O_RDONLY)),
        ("chroot", plain(libc::SYS_chroot, missing, 0, 0)),
        ("mount", call(libc::SYS_mount, [0, missing, c"tmpfs".as_ptr() as usize, 0, 0, 0])),
        // Programs and processes.
        ("exec", plain(libc::SYS_execve, missing, null::<u8>() as usize, null::<u8>() as usize)),
        ("exec-at", call(libc::SYS_execveat, [usize::MAX, missing, 0, 0, 0, 0])),
        ("namespaces", plain(libc::SYS_clone3, 0, 0, 0)),
        ("unshare", plain(libc::SYS_unshare, 0x1000_0000, 0, 0)),
        ("ptrace", plain(libc::SYS_ptrace, libc::PTRACE_SEIZE as usize, parent, 0)),
        ("read-process", call(libc::SYS_process_vm_readv, [parent, 0, 0, 0, 0, 0])),
        ("signal", plain(libc::SYS_kill, parent, 0, 0)),
        ("signal-thread", plain(libc::SYS_tgkill, parent, parent, 0)),
        ("open-process", plain(libc::SYS_pidfd_open, parent, 0, 0)),
        // The network, and the kernel's other doors.
        ("internet", plain(libc::SYS_socket, libc::AF_INET as usize, libc::SOCK_STREAM as usize, 0)),
        ("netlink", plain(libc::SYS_socket, libc::AF_NETLINK as usize, libc::SOCK_RAW as usize, 0)),
        ("unix-socket", plain(libc::SYS_socket, libc::AF_UNIX as usize, libc::SOCK_STREAM as usize, 0)),
        ("new-ring", plain(libc::SYS_io_uring_setup, 1, 0, 0)),
        ("bpf", plain(libc::SYS_bpf, 0, 0, 0)),
        ("perf", plain(libc::SYS_perf_event_open, 0, 0, 0)),
        ("userfaults", plain(libc::SYS_userfaultfd, 1, 0, 0)),
        ("terminal", plain(libc::SYS_ioctl, 0, libc::TIOCSTI as usize, 0)),
        // Who one is, and what one gave up.
        ("become-root", plain(libc::SYS_setresuid, 0, 0, 0)),
        ("capabilities", plain(libc::SYS_capset, 0, 0, 0)),
        ("be-dumped", plain(libc::SYS_prctl, libc::PR_SET_DUMPABLE as usize, 1, 0)),
        ("raise-limit", call(libc::SYS_prlimit64, [0, libc::RLIMIT_CORE as usize, limits, 0, 0, 0])),
        ("ask-limit", call(libc::SYS_prlimit64, [0, libc::RLIMIT_CORE as usize, 0, limits, 0, 0])),
        ("watch-calls", plain(libc::SYS_seccomp, 1, 8, 0)),
        // Code that nobody wrote.
        ("map-code", map(executable)),
        ("make-code", plain(libc::SYS_mprotect, own, page, executable | libc::PROT_WRITE as usize)),
        // Keys of others.
        ("search-keys", call(libc::SYS_keyctl, [10, usize::MAX, c"user".as_ptr() as usize, c"x".as_ptr() as usize, 0, 0])),
    ]
}

fn print(thread: &str, outcomes: &[(&str, i32)]) {
    for (attempt, errno) in outcomes {
        println!("{thread} {attempt} {errno}");
    }
}

/// Memory as the allocator gives it to a thread, and takes it back: whether anything of that was refused.
fn grow_and_shrink() -> i32 {
    drop(black_box([(); 256].map(|()| vec![1_u8; 64 << 10])));
    if refused().is_empty() { 0 } else { libc::EPERM }
}

/// A process of its own, made and gone: the C library's way, which asks for the newer call first.
fn fork() -> i32 {
    // SAFETY: the child does nothing but end.
    match unsafe { libc::fork() } {
        // SAFETY: as above.
        0 => unsafe { libc::_exit(0) },
        child if child < 0 => io::Error::last_os_error().raw_os_error().unwrap_or(-1),
        child => {
            // SAFETY: our own child, and no place for its status.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            0
        }
    }
}

fn main() {
    let mut words = std::env::args_os().skip(1).map(PathBuf::from);
    let first = words.next().expect("a directory");
    if first == Path::new("help") {
        help(io::stdin().as_fd(), None).expect("helping");
        return;
    }
    let outside = words.next().expect("a file");
    let policy = std::env::var("MILLRACE_SANDBOX").expect("MILLRACE_SANDBOX");
    let policy: Policy = serde_json::from_str(&policy).expect("a policy");
    let mut helper = Command::new("/proc/self/exe");
    helper.arg("help");
    let mut sandbox = policy.enter(&[], Some(helper)).unwrap_or_else(|error| panic!("{error}"));
    let parent = rustix::process::getppid().expect("a parent").as_raw_pid();
    let parent = word(parent);
    let paths = || Paths {
        parent,
        inside: text(&first.join("inside")),
        outside: text(&outside),
        link: text(&first.join("link")),
        new: text(&first.join("new")),
    };
    // As in a worker, the shard's thread is there before the process is closed.
    let ((give, filter), (done, finished), paths_of_shard) =
        (channel::<millrace_sandbox::ShardFilter>(), channel(), paths());
    let shard = thread::spawn(move || {
        if let Ok(filter) = filter.recv() {
            filter.apply().expect("the list of shards");
        }
        // First, while nothing else was refused.
        let mut outcomes = vec![("grow-and-shrink", grow_and_shrink())];
        outcomes.extend(attempts(&paths_of_shard));
        done.send(outcomes).expect("the outcomes");
    });
    if let Some(filter) = sandbox.close(vec![Grant::Use(first.clone())]).unwrap_or_else(|error| panic!("{error}")) {
        give.send(filter).expect("the shard waits");
    }
    drop(give);
    for missing in sandbox.missing() {
        println!("missing: {missing}");
    }
    print("shard", &finished.recv().expect("the outcomes"));
    shard.join().expect("the shard's thread");
    print("control", &attempts(&paths()));
    println!("control fork {}", fork());
    println!("control thread {}", i32::from(thread::spawn(|| ()).join().is_err()));
    for call in refused() {
        println!("refused {} {}", call.number, call.count);
    }
}
