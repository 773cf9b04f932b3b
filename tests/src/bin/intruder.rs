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
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::channel,
    },
    thread,
};

use millrace_sandbox::{Grant, Mode, Policy, broker, help, refused, this_is_a_shard};

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

/// Calls that the kernel has seen and nobody made.
static STOPPED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_stopped(_: libc::c_int) {
    STOPPED.fetch_add(1, Ordering::Relaxed);
}

/// Tries every call that there could be; how many get through to the kernel's own code, whatever it says of these arguments.
fn let_through() -> usize {
    // SAFETY: all-zero actions are valid values, the pointers are valid, and the handler touches an atomic.
    let before = unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        action.sa_sigaction = on_stopped as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGSYS, &raw const action, &raw mut before), 0);
        before
    };
    let gets_through = |number: Number, argument: usize| {
        let stopped = STOPPED.load(Ordering::Relaxed);
        // SAFETY: with these arguments, what a sandbox lets through reads, writes, waits for and ends nothing.
        let result = unsafe { libc::syscall(number, argument, argument, argument, argument, argument, argument) };
        let is_there = result >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOSYS);
        is_there && STOPPED.load(Ordering::Relaxed) == stopped
    };
    // These would end us, or wait forever: they count as if they had got through.
    let not_tried = [libc::SYS_exit, libc::SYS_exit_group, libc::SYS_rt_sigreturn, libc::SYS_ppoll];
    // The kernel's own ways back from probes: no filter sees them, and who makes them himself is ended.
    let never_ours = [335, 336];
    let numbers = (0..1024).filter(|number| !not_tried.contains(number) && !never_ours.contains(number));
    // What is not looked at in every form gets through in one of these.
    let through = numbers.filter(|number| [0, usize::MAX].into_iter().any(|argument| gets_through(*number, argument)));
    let count = through.count() + not_tried.len();
    // SAFETY: the pointer is valid, and the action was there before.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSYS, &raw const before, std::ptr::null_mut()) }, 0);
    count
}

fn main() {
    let mut words = std::env::args_os().skip(1).map(PathBuf::from);
    let first = words.next().expect("a directory");
    match first.to_str() {
        Some("help") => return help(io::stdin().as_fd(), None).expect("helping"),
        Some("broker") => return broker(io::stdin().as_fd()).expect("making calls"),
        _ => {}
    }
    let outside = words.next().expect("a file");
    let policy = std::env::var("MILLRACE_SANDBOX").expect("MILLRACE_SANDBOX");
    let policy: Policy = serde_json::from_str(&policy).expect("a policy");
    let own = |word: &str| {
        let mut command = Command::new("/proc/self/exe");
        command.arg(word);
        command
    };
    let is_closed = policy.mode != Mode::Off;
    let mut sandbox = policy.enter(&[], own("broker"), Some(own("help"))).unwrap_or_else(|error| panic!("{error}"));
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
    let ((go, closed), (ready, is_shard), (done, finished), paths_of_shard) = (channel(), channel(), channel(), paths());
    let shard = thread::spawn(move || {
        this_is_a_shard();
        ready.send(()).expect("somebody waits");
        closed.recv().expect("a word");
        // First, while nothing else was refused.
        let mut outcomes = vec![("grow-and-shrink", grow_and_shrink())];
        outcomes.extend(attempts(&paths_of_shard));
        done.send((outcomes, if is_closed { let_through() } else { 0 })).expect("the outcomes");
    });
    is_shard.recv().expect("a shard");
    sandbox.close(vec![Grant::Use(first.clone())]).unwrap_or_else(|error| panic!("{error}"));
    go.send(()).expect("the shard waits");
    for missing in sandbox.missing() {
        println!("missing: {missing}");
    }
    let (outcomes, of_shard) = finished.recv().expect("the outcomes");
    print("shard", &outcomes);
    shard.join().expect("the shard's thread");
    print("control", &attempts(&paths()));
    println!("control fork {}", fork());
    println!("control thread {}", i32::from(thread::spawn(|| ()).join().is_err()));
    for call in refused() {
        println!("refused {} {}", call.number, call.count);
    }
    if is_closed {
        println!("shard let-through {of_shard}");
        println!("control let-through {}", let_through());
    }
}
