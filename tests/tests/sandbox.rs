//! Every promise of docs/sandbox.md: somebody tries to break it, and does not succeed.

use std::{
    collections::BTreeMap,
    fs,
    io::{ErrorKind, Read},
    ops::Range,
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use millrace_tests::{Daemon, OneDisk, PATIENCE, eventually, repository, skip, within};
use rustix::{
    process::{Gid, Signal, Uid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const ENOSYS: i32 = 38;
const NOBODY: u32 = 65534;

/// A directory with a file inside, a link from it to a file outside, and what an intruder made of them.
struct Intrusion {
    /// By thread and attempt.
    outcomes: BTreeMap<(String, String), i32>,
    /// By number.
    refused: BTreeMap<i64, u64>,
}

impl Intrusion {
    fn with(policy: &str) -> Self {
        let place = tempfile::tempdir().expect("a temporary folder");
        let (allowed, outside) = (place.path().join("allowed"), place.path().join("outside"));
        fs::create_dir(&allowed).expect("a folder");
        fs::write(&outside, "what is not for it").expect("a file");
        fs::write(allowed.join("inside"), "what is for it").expect("a file");
        symlink(&outside, allowed.join("link")).expect("a link");
        let output = Command::new(env!("CARGO_BIN_EXE_intruder"))
            .args([&allowed, &outside])
            .env("MILLRACE_SANDBOX", policy)
            .stdin(Stdio::null())
            .output()
            .expect("running the intruder");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
        let (mut outcomes, mut refused) = (BTreeMap::new(), BTreeMap::new());
        for line in said.lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["refused", number, count] => {
                    refused.insert(number.parse().unwrap(), count.parse().unwrap());
                }
                [thread, attempt, errno] => {
                    outcomes.insert((thread.to_owned(), attempt.to_owned()), errno.parse().unwrap());
                }
                _ => panic!("the system lacks a part of the sandbox, which this test needs: {line}"),
            }
        }
        Self { outcomes, refused }
    }

    fn expect(&self, thread: &str, attempts: &[&str], errno: i32) {
        for attempt in attempts {
            let found = self.outcomes.get(&(thread.to_owned(), (*attempt).to_owned()));
            assert_eq!(found, Some(&errno), "{thread}: {attempt}");
        }
    }
}

/// Attempts that no thread of a worker has a call for.
const NEVER: &[&str] = &[
    "chroot",
    "mount",
    "exec",
    "exec-at",
    "unshare",
    "ptrace",
    "read-process",
    "signal",
    "signal-thread",
    "open-process",
    "internet",
    "netlink",
    "bpf",
    "perf",
    "userfaults",
    "terminal",
    "become-root",
    "capabilities",
    "be-dumped",
    "raise-limit",
    "watch-calls",
    "map-code",
    "make-code",
    "search-keys",
];

#[test]
fn an_intruder_gets_nowhere() {
    let intrusion = Intrusion::with(r#"{ "mode": "auto", "allow": ["/nonexistent"] }"#);
    for thread in ["control", "shard"] {
        intrusion.expect(thread, NEVER, EPERM);
        intrusion.expect(thread, &["map", "yield"], 0);
    }
    intrusion.expect("shard", &["grow-and-shrink"], 0);
    // Control opens files, those that it may.
    let outside = ["open-outside", "write-outside", "cut-outside", "open-by-link", "list-outside", "open-memory"];
    intrusion.expect("control", &outside, EACCES);
    intrusion.expect("control", &["open-inside", "make-inside", "unix-socket", "ask-limit", "thread"], 0);
    // A shard opens none.
    intrusion.expect("shard", &outside, EPERM);
    intrusion.expect("shard", &["open-inside", "make-inside", "unix-socket", "ask-limit"], EPERM);
    // Threads are made by the older call, whose flags the filter sees; no process is.
    for thread in ["control", "shard"] {
        intrusion.expect(thread, &["namespaces"], ENOSYS);
    }
    intrusion.expect("shard", &["new-ring"], EPERM);
    intrusion.expect("control", &["fork"], EPERM);
    // Of all calls that there could be, few get through to the kernel. Some are allowed in forms only that are not tried.
    for (thread, most) in [("control", 40), ("shard", 29)] {
        let through = intrusion.outcomes[&(thread.to_owned(), "let-through".to_owned())];
        println!("  {thread}: {through} calls");
        assert!((20..=most).contains(&through), "{thread}: {through} calls");
    }
    // And the operator hears of it.
    for number in [libc::SYS_execve, libc::SYS_ptrace, libc::SYS_socket] {
        assert!(intrusion.refused.get(&number).is_some_and(|count| *count >= 2), "{number} in {:?}", intrusion.refused);
    }
}

#[test]
fn without_allowed_paths_files_are_open_and_all_else_is_closed() {
    let intrusion = Intrusion::with(r#"{ "mode": "auto" }"#);
    intrusion.expect("control", &["open-outside", "open-by-link", "list-outside", "make-inside"], 0);
    intrusion.expect("control", NEVER, EPERM);
    intrusion.expect("shard", NEVER, EPERM);
    intrusion.expect("shard", &["open-inside"], EPERM);
}

/// What the tests above are worth: without a sandbox the same attempts go through, or fail for other reasons.
#[test]
fn the_same_intruder_gets_through_without_a_sandbox() {
    let intrusion = Intrusion::with(r#"{ "mode": "off" }"#);
    for thread in ["control", "shard"] {
        let free = [
            "open-inside",
            "make-inside",
            "open-outside",
            "write-outside",
            "cut-outside",
            "open-by-link",
            "list-outside",
            "signal",
            "signal-thread",
            "open-process",
            "internet",
            "unix-socket",
            "be-dumped",
            "raise-limit",
            "map-code",
            "make-code",
        ];
        intrusion.expect(thread, &free, 0);
        intrusion.expect(thread, &["exec", "exec-at"], ENOENT);
        for attempt in ["new-ring", "terminal", "watch-calls", "search-keys", "namespaces", "unshare"] {
            let errno = intrusion.outcomes[&(thread.to_owned(), attempt.to_owned())];
            assert!(errno != EPERM && errno != ENOSYS, "{attempt}: {errno}");
        }
    }
    intrusion.expect("control", &["fork"], 0);
    assert!(intrusion.refused.is_empty());
}

/// A line of `/proc/PID/task/TID/status`, for every thread.
fn of_threads(pid: u32, field: &str) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let status = |task: &Path| fs::read_to_string(task.join("status")).unwrap_or_default();
    let of = |status: &str, field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    };
    let texts = tasks.flatten().map(|task| status(&task.path()));
    texts.filter_map(|text| Some((of(&text, "Name")?, of(&text, field)?))).collect()
}

#[test]
fn a_worker_gives_up_everything_and_so_does_the_next() {
    let daemon = Daemon::confined(&[]);
    daemon.disk("disk", &["--backend", "memory", "--size", "1M"], &[]);
    let first = eventually("a worker", || daemon.worker());
    let second = daemon.kill_worker(Signal::KILL);
    assert_ne!(first, second);
    expect_confined(second);
    daemon.finish();
}

/// No thread of the process has any right that it could give up.
fn expect_confined(pid: u32) {
    let all = |field: &str, expected: &str| {
        let values = of_threads(pid, field);
        assert!(values.len() >= 4, "{values:?}");
        for (thread, value) in values {
            assert_eq!(value, expected, "{field} of {thread}");
        }
    };
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        all(set, "0000000000000000");
    }
    if geteuid().is_root() {
        all("CapBnd", "0000000000000000");
    }
    all("NoNewPrivs", "1");
    all("Seccomp", "2");
    all("Seccomp_filters", "2");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("its limits");
    let limit =
        |name: &str| limits.lines().find(|line| line.starts_with(name)).map(|line| line[name.len()..].split_whitespace());
    assert_eq!(limit("Max core file size").unwrap().next(), Some("0"));
    for bounded in ["Max data size", "Max open files"] {
        let values: Vec<_> = limit(bounded).unwrap().take(2).collect();
        assert!(values[0] != "unlimited" && values[0] == values[1], "{bounded}: {values:?}");
    }
}

#[test]
fn one_disk_without_a_daemon_gives_up_the_same() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let socket = place.path().join("d.sock");
    for volume in ["memory,1M".to_owned(), format!("file:{},1M", place.path().join("disk.img").display())] {
        let (backend, size) = volume.split_once(',').expect("both");
        let mut server = OneDisk::start(&socket, backend, &["--size", size]);
        expect_confined(server.pid());
        // Nothing was allowed: it reaches what it was told to serve.
        assert!(server.log().contains("only allowed paths"), "{}", server.log());
        let mut bench = Command::new(Daemon::binary());
        bench.args(["bench", "--verify", "--rw", "randrw", "--time", "1", "--socket"]).arg(&socket);
        let output = bench.output().expect("running the client");
        assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), server.log());
        server.stop();
        assert!(!socket.exists(), "the socket stays behind");
    }
    if geteuid().is_root() {
        let mut command = Command::new(Daemon::binary());
        command.args(["nvme", "--sandbox", "on", "--volume", "memory", "--size", "1M", "--socket"]).arg(&socket);
        let said = String::from_utf8_lossy(&command.output().expect("running it").stderr).into_owned();
        assert!(said.contains("--user"), "{said}");
    }
}

#[test]
fn volumes_are_where_they_may_be() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let allowed = place.path().join("images");
    fs::create_dir(&allowed).expect("a folder");
    let outside = place.path().join("outside.img");
    fs::write(&outside, vec![0; 1 << 20]).expect("a file");
    symlink(&outside, allowed.join("link.img")).expect("a link");
    let mut daemon = Daemon::confined(&["--allow", allowed.to_str().unwrap()]);
    let create = |name: &str, path: &Path| {
        daemon.try_run(&["volume", "create", name, "--backend", &format!("file:{}", path.display()), "--size", "1M"])
    };
    create("inside", &allowed.join("a.img")).expect("a volume where it may be");
    for path in [&outside, &allowed.join("link.img"), &allowed.join("../outside.img"), Path::new("/etc/passwd")] {
        let error = create("outside", path).expect_err("a volume where it may not be");
        assert!(error.contains("Permission denied") && error.contains("--allow"), "{}: {error}", path.display());
    }
    // What was made stays within reach of the next worker, and of the next daemon.
    daemon.kill_worker(Signal::KILL);
    daemon.restart();
    let states = daemon.json(&["volume", "list"]);
    assert_eq!((states.as_array().unwrap().len(), &states[0]["state"]), (1, &serde_json::json!("ready")), "{states}");
    daemon.finish();
}

#[test]
fn who_has_the_same_user_cannot_look_into_the_daemon() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let root = geteuid().is_root();
    let mut options = vec![];
    if root {
        // Root may look into everything; somebody else is the daemon's user then.
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a public folder");
        options = vec!["--user", "nobody"];
    }
    let daemon = Daemon::start_in(place.path(), &options);
    let worker = eventually("a worker", || daemon.worker());
    if root {
        assert!(of_threads(worker, "Uid").iter().all(|(_, ids)| ids.split_whitespace().all(|id| id == NOBODY.to_string())));
    }
    let look = |pid: u32, file: &str| {
        let mut command = Command::new("head");
        command.args(["-c", "1", &format!("/proc/{pid}/{file}")]).stdin(Stdio::null());
        if root {
            as_nobody(&mut command);
        }
        command.output().expect("running head")
    };
    for file in ["mem", "maps", "environ", "smaps", "auxv"] {
        let output = look(worker, file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("Permission denied"), "{file}: {said}");
    }
    // What says that the looking itself is right.
    let mut sleeper = Command::new("sleep");
    sleeper.arg("1000").stdin(Stdio::null());
    if root {
        as_nobody(&mut sleeper);
    }
    let mut sleeper = sleeper.spawn().expect("a process of the same user");
    let seen = eventually("its program runs", || {
        let output = look(sleeper.id(), "maps");
        output.status.success().then_some(output.stdout)
    });
    assert!(!seen.is_empty());
    sleeper.kill().expect("ending it");
    sleeper.wait().expect("its end");
    daemon.finish();
}

fn as_nobody(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.uid(NOBODY).gid(NOBODY);
}

/// Where a process's mappings are, and what the system says of each: its flags, with spaces around them, at the end.
fn mappings(pid: u32) -> Vec<(Range<u64>, String)> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("its mappings");
    let (mut found, mut range, mut name) = (Vec::new(), 0..0, "");
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).expect("an address"));
            (range, name) = (start..end, line);
        }
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.push((range.clone(), format!("{name} flags {flags} ")));
        }
    }
    found
}

/// The mappings of a process in which something lies.
fn found_in_memory(pid: u32, needle: &[u8]) -> Vec<String> {
    let memory = fs::File::open(format!("/proc/{pid}/mem")).expect("its memory");
    let has_it = |range: &Range<u64>| {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("a size")];
        let read = memory.read_at(&mut bytes, range.start).unwrap_or(0);
        bytes[..read].windows(needle.len()).any(|window| window == needle)
    };
    let all = mappings(pid).into_iter();
    let readable = all.filter(|(range, flags)| flags.contains(" rd ") && range.end - range.start <= 1 << 30);
    readable.filter(|(range, _)| has_it(range)).map(|(_, flags)| flags).collect()
}

#[test]
fn keys_are_locked_and_in_no_dump() {
    // Without a sandbox, so that the memory can be looked at.
    let daemon = Daemon::confined(&["--sandbox", "off"]);
    let key: [u8; 32] = std::array::from_fn(|at| (at * 37 + 11) as u8 ^ 0x5a);
    let file = daemon.path("key");
    fs::write(&file, key).expect("a key");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("a private file");
    let stack = format!("crypt(key=file:{}) | memory", file.display());
    daemon.run(&["volume", "create", "secret", "--stack", &stack, "--size", "4M"]);
    let worker = eventually("a worker", || daemon.worker());
    // The search finds what is there.
    assert!(!found_in_memory(worker, file.to_str().unwrap().as_bytes()).is_empty());
    let mut places = found_in_memory(worker, &key);
    if places.is_empty() {
        // Where the system takes keys out of its own view, nobody finds one; but it names the memory that they are in.
        let all = mappings(worker).into_iter().map(|(_, mapping)| mapping);
        places = all.filter(|mapping| mapping.contains("secretmem")).collect();
    }
    assert!(!places.is_empty(), "the key is nowhere");
    for mapping in places {
        let has = |flag: &str| mapping.contains(&format!(" {flag} "));
        assert!(has("dd") && has("lo"), "a key in memory that is dumped or swapped: {mapping}");
    }
    // It is gone with its volume.
    daemon.run(&["volume", "delete", "secret"]);
    assert_eq!(found_in_memory(worker, &key), Vec::<String>::new());
    daemon.finish();
}

/// Puts a key into the session's keyring, which what is started from here has as well.
fn add_key(name: &str, key: &[u8]) -> bool {
    const SESSION_KEYRING: i64 = -3;
    let name = std::ffi::CString::new(name).expect("no zero in it");
    // SAFETY: two strings that end in zero, and the payload with its length.
    let id = unsafe {
        libc::syscall(libc::SYS_add_key, c"user".as_ptr(), name.as_ptr(), key.as_ptr(), key.len(), SESSION_KEYRING)
    };
    id >= 0
}

#[test]
fn keys_of_the_kernel_are_had_in_the_sandbox() {
    let name = format!("millrace-test-{}", std::process::id());
    // Before the daemon, for the keyring is often made only now.
    let has_key = add_key(&name, &[0x42; 32]);
    let mut daemon = Daemon::confined(&[]);
    let image = daemon.path("disk.img");
    let create = |daemon: &Daemon, key: &str| {
        let stack = format!("crypt(key=keyring:{key}, file:{})", image.display());
        daemon.try_run(&["volume", "create", "secret", "--stack", &stack, "--size", "4M"])
    };
    let refused = create(&daemon, "millrace-no-such-key").expect_err("there is no such key");
    assert!(refused.contains("the key cannot be had from keyring:millrace-no-such-key"), "{refused}");
    if !has_key {
        // Containers often refuse keyrings, and who reads a key there is told so: above.
        return skip("keys that the kernel has: it takes none here");
    }
    create(&daemon, &name).expect("a volume");
    // The next worker asks for it again, from within its sandbox as well, and so does the next daemon.
    daemon.kill_worker(Signal::KILL);
    assert_eq!(daemon.service("secret", "crypt")["health"], "good");
    daemon.restart();
    assert_eq!(daemon.service("secret", "crypt")["health"], "good");
    daemon.finish();
}

#[test]
fn a_daemon_that_is_aborted_leaves_no_picture_of_its_memory() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let pictures = || {
        let entries = fs::read_dir(place.path()).expect("the folder").flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("core")).count()
    };
    let aborted = |mode: &str| {
        let daemon = Daemon::start_dumping_in(place.path(), &["--sandbox", mode]);
        daemon.kill_worker(Signal::ABORT);
        daemon.finish();
        pictures()
    };
    assert_eq!(aborted("auto"), 0);
    // Where the system puts pictures beside the program, it would have made one.
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if !pattern.starts_with("core") {
        return skip("pictures of memory where they are made: the system puts them elsewhere");
    }
    assert!(aborted("off") > 0, "the test sees no picture where there is one");
}

#[test]
fn who_is_not_named_is_not_heard() {
    if !geteuid().is_root() {
        return skip("other users' commands: only root can give them");
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a public folder");
    let config = place.path().join("millrace.toml");
    let status = |daemon: &Daemon, uid: u32, gid: u32, groups: &str| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={uid}"), &format!("--regid={gid}"), groups]).arg(Daemon::binary()).arg("status");
        let output = command.env("MILLRACE_RUN_DIR", daemon.run_dir()).output().expect("running setpriv");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let open = |daemon: &Daemon| {
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(daemon.run_dir(), mode).expect("an open run directory");
    };
    // Nobody is named: the system itself keeps others away.
    let daemon = Daemon::start_in(place.path(), &[]);
    open(&daemon);
    let (heard, said) = status(&daemon, NOBODY, NOBODY, "--clear-groups");
    assert!(!heard && said.contains("another user's"), "{said}");
    // Even where it does not, the daemon does.
    let socket = daemon.run_dir().join("api.sock");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("an open socket");
    let (heard, said) = status(&daemon, NOBODY, NOBODY, "--clear-groups");
    assert!(!heard && said.contains("user 65534 may not use the API"), "{said}");
    assert!(status(&daemon, 0, 0, "--clear-groups").0);
    daemon.finish();
    fs::write(&config, format!("[[operator]]\nuid = {NOBODY}\n\n[[operator]]\ngid = 4242\n")).expect("a file");
    let daemon = Daemon::start_in(place.path(), &["--config", config.to_str().unwrap()]);
    open(&daemon);
    assert!(status(&daemon, NOBODY, NOBODY, "--clear-groups").0);
    assert!(status(&daemon, 12345, 4242, "--clear-groups").0);
    assert!(status(&daemon, 12345, 12345, "--groups=77,4242").0);
    let (heard, said) = status(&daemon, 12345, 12345, "--clear-groups");
    assert!(!heard && said.contains("user 12345 may not use the API"), "{said}");
    // Strangers who say nothing keep nobody else out.
    let _silent: Vec<UnixStream> =
        (0..50).map(|_| UnixStream::connect(daemon.run_dir().join("api.sock")).unwrap()).collect();
    assert!(status(&daemon, NOBODY, NOBODY, "--clear-groups").0);
    // Nor do they fill the log.
    let said = daemon.log().matches("may not use the API was turned away").count();
    assert!((1..25).contains(&said), "{said} times");
    daemon.finish();
}

#[test]
fn descriptors_have_an_end_and_so_has_their_want() {
    // One that was left open for every program that is started here: with a number beyond the limit.
    let stray = rustix::io::fcntl_dupfd_cloexec(fs::File::open("/dev/null").unwrap(), 200).expect("a descriptor");
    rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).expect("a flag less");
    let mut daemon = Daemon::confined(&["--file-limit", "100"]);
    let socket = daemon.run_dir().join("api.sock");
    let mut clients: Vec<UnixStream> = (0..200).map_while(|_| UnixStream::connect(&socket).ok()).collect();
    assert!(clients.len() > 100, "more come than can be heard: {}", clients.len());
    let worker = eventually("a worker", || daemon.worker());
    let open = || fs::read_dir(format!("/proc/{worker}/fd")).map_or(0, Iterator::count);
    eventually("it has what it may have", || (open() >= 99).then_some(()));
    let held = open();
    assert!(held <= 100, "{held} are open");
    for client in &mut clients {
        client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        // Whoever is heard waits, whoever is not does too: nobody is lied to.
        let _ = client.read(&mut [0; 1]);
    }
    drop(clients);
    eventually("it answers again", || daemon.try_run(&["status"]).ok());
    assert_eq!(daemon.worker(), Some(worker), "the same worker");
    daemon.expect_well();
    daemon.stop();
    drop(stray);
}

#[test]
fn commands_for_keys_run_where_the_sandbox_is_not_and_only_those_that_may() {
    let digits = "5a".repeat(32);
    let create = |daemon: &Daemon, name: &str, command: &str| {
        let stack = format!("crypt(key=\"command:{command}\") | memory");
        daemon.try_run(&["volume", "create", name, "--stack", &stack, "--size", "4M"])
    };
    let echo = format!("/bin/echo {digits}");
    let daemon = Daemon::confined(&[]);
    create(&daemon, "v", &echo).expect("a key from a command");
    let error = create(&daemon, "w", "/bin/cat /nonexistent/key").expect_err("no key");
    assert!(error.contains("/nonexistent/key: No such file"), "{error}");
    daemon.kill_worker(Signal::KILL);
    assert_eq!(daemon.json(&["volume", "show", "v"])["state"], "ready");
    daemon.finish();
    let daemon = Daemon::confined(&["--key-command", "/bin/echo"]);
    create(&daemon, "v", &echo).expect("a key from a command that may run");
    let error = create(&daemon, "w", &format!("/usr/bin/printf {digits}")).expect_err("another command");
    assert!(error.contains("Permission denied"), "{error}");
    daemon.finish();
    // Paths are named, programs are not: none may run.
    let daemon = Daemon::confined(&["--allow", "/tmp"]);
    create(&daemon, "v", &echo).expect_err("no command may run");
    daemon.finish();
}

#[test]
fn all_of_it_or_nothing() {
    let place = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a public folder");
    if geteuid().is_root() {
        let mut command = Command::new(Daemon::binary());
        command.args(["serve", "--sandbox", "on", "--state-dir"]).arg(place.path().join("s")).arg("--run-dir");
        let output = command.arg(place.path().join("r")).stdin(Stdio::null()).output().expect("running the daemon");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("--user"), "{said}");
    }
    let mut options = vec!["--sandbox", "on"];
    if geteuid().is_root() {
        options.extend(["--user", "nobody"]);
    }
    let daemon = Daemon::start_in(place.path(), &options);
    assert!(daemon.log().contains("only allowed paths"), "{}", daemon.log());
    let file = format!("file:{}", daemon.path("x.img").display());
    let error =
        daemon.try_run(&["volume", "create", "x", "--backend", &file, "--size", "1M"]).expect_err("nothing is allowed");
    assert!(error.contains("Permission denied"), "{error}");
    daemon.run(&["volume", "create", "m", "--backend", "memory", "--size", "1M"]);
    daemon.finish();
}

#[test]
fn the_list_of_calls_is_as_the_docs_say() {
    let docs = fs::read_to_string(repository().join("docs/sandbox.md")).expect("the docs");
    let calls = fs::read_to_string(repository().join("crates/sandbox/src/calls.rs")).expect("the lists");
    let names = |list: &str| -> Vec<String> {
        let rest = calls.split(&format!("pub(crate) const {list}:")).nth(1).expect("the list");
        let lines = rest.split("];").next().expect("its end").split("SYS_").skip(1);
        lines.map(|line| line.split([')', ',']).next().unwrap_or_default().to_owned()).collect()
    };
    let (shard, control) = (names("SHARD"), names("CONTROL"));
    assert!((20..=40).contains(&(shard.len() + control.len())), "{} and {}", shard.len(), control.len());
    assert!(docs.contains(&format!("That is {}.", shard.len())), "{}", shard.len());
    assert!(docs.contains(&format!("That is {}.", shard.len() + control.len())), "{}", control.len());
    for name in shard.iter().chain(&control) {
        assert!(docs.contains(&format!("`{name}`")), "docs/sandbox.md does not name {name}");
    }
}

/// Where the daemon's memory has an end.
#[test]
fn a_worker_that_takes_too_much_memory_is_replaced() {
    let daemon = Daemon::confined(&["--memory-limit", "300M"]);
    let first = eventually("a worker", || daemon.worker());
    let greedy = || daemon.try_run(&["volume", "create", "greedy", "--stack", GREEDY, "--size", "1G"]);
    let error = greedy().expect_err("more memory than there may be");
    println!("  {error}");
    let second = eventually("another worker", || daemon.worker().filter(|worker| *worker != first));
    eventually("it answers", || daemon.try_run(&["status"]).ok());
    assert_ne!(first, second);
    assert!(PathBuf::from(format!("/proc/{second}")).exists());
}

/// What a volume in memory has in huge pages, in kB, while a load writes it; `None` when it gets none for so long.
fn huge(daemon: &Daemon, limit: Duration) -> Option<u64> {
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "16M"], &[]);
    let worker = eventually("a worker", || daemon.worker());
    let mapped = || -> Option<u64> {
        let sums = fs::read_to_string(format!("/proc/{worker}/smaps_rollup")).expect("its mappings");
        let line = sums.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).map(str::to_owned);
        line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).filter(|kilobytes| *kilobytes > 0)
    };
    // They come beside the load, and are the worker's when it touches them again.
    within(limit, || {
        let mut bench = daemon.client();
        bench.args(["bench", "--rw", "write", "--bs", "128k", "--time", "1", "--socket"]).arg(&socket);
        assert!(bench.output().expect("running the client").status.success());
        mapped()
    })
}

/// They are made by calls on the process's own memory, which nobody makes for it.
#[test]
fn huge_pages_are_made_in_the_sandbox_too() {
    if !geteuid().is_root() {
        return skip("huge pages in the sandbox: only root can look at what a process there has");
    }
    let found = |options: &[&str], limit| {
        let daemon = Daemon::confined(options);
        let found = huge(&daemon, limit);
        daemon.finish();
        found
    };
    let Some(free) = found(&["--sandbox", "off"], Duration::from_secs(60)) else {
        return skip("huge pages in the sandbox: without it this system gives none either");
    };
    let confined = found(&[], PATIENCE).expect("huge pages in the sandbox, as there are without it");
    println!("  {free} kB of huge pages without a sandbox, {confined} in it");
}

/// Its table of lines takes more than a gigabyte.
const GREEDY: &str = "cache(mode=through, line=4K, memory(size=64G)) | memory";

/// A guest's memory may be larger than what the daemon may have, and may be cut under it: what is put in its place is not the daemon's.
#[test]
fn a_guest_that_cuts_more_memory_than_the_daemon_may_have_costs_it_none() {
    use millrace_driver::{Controller, DmaMemory, Options, QueueOptions, spec::NamespaceId};
    let daemon = Daemon::confined(&["--memory-limit", "300M"]);
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "16M"], &[]);
    let worker = daemon.worker();
    let options = Options { memory_size: 16 << 20, ..Options::default() };
    let mut controller = Controller::open(&socket, &options).expect("a connection");
    controller.start().expect("a controller");
    let namespace = controller.namespace(NamespaceId(1)).expect("a namespace");
    let mut queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue");
    let large = DmaMemory::new(1 << 40, 1 << 30).expect("memory");
    controller.transport().dma_map(large.range(), large.fd(), 0).expect("a map");
    let buffer = large.alloc(16 << 10).expect("memory");
    rustix::fs::ftruncate(large.fd(), 0).expect("cutting it");
    let read = namespace.read(millrace_block::Lba(0), buffer.slice(0, 16 << 10)).expect("in range");
    queue.submit(&read).expect("room");
    queue.ring().expect("ringing");
    eventually("the command ends, or the device fails", || {
        let failed = controller.status().map_or(true, |status| status.cfs());
        (failed || queue.next_completion().expect("a completion").is_some()).then_some(())
    });
    drop((queue, controller));
    assert_eq!(daemon.worker(), worker, "the same worker");
    daemon.finish();
}

/// A user of machines' monitors, and the group that they have.
const MONITOR: u32 = 12345;
const MONITORS: u32 = 4242;

/// What comes of connecting to a socket as a user of one group and no other.
fn connect_as(uid: u32, group: u32, socket: &Path) -> Result<(), ErrorKind> {
    // Of that thread alone.
    let connect = || {
        let (uid, group) = (Uid::from_raw(uid), Gid::from_raw(group));
        set_thread_groups(&[]).expect("groups less");
        set_thread_res_gid(group, group, group).expect("another group");
        set_thread_res_uid(uid, uid, uid).expect("another user");
        UnixStream::connect(socket).map(drop).map_err(|error| error.kind())
    };
    thread::scope(|scope| scope.spawn(connect).join().expect("a thread"))
}

/// Those of the group connect to all devices; others do not, and to the API none does.
fn expect_group(daemon: &Daemon, sockets: &[PathBuf], group: u32) {
    for socket in sockets {
        let found = fs::symlink_metadata(socket).expect("a socket");
        assert_eq!((found.gid(), found.mode() & 0o7777), (group, 0o660), "{}", socket.display());
        let name = socket.display();
        assert_eq!(connect_as(MONITOR, group, socket), Ok(()), "{name}\n{}", daemon.log());
        assert_eq!(connect_as(MONITOR, MONITOR, socket), Err(ErrorKind::PermissionDenied), "{name}");
    }
    let door = daemon.run_dir().join("api.sock");
    assert_eq!(connect_as(MONITOR, group, &door), Err(ErrorKind::PermissionDenied));
}

#[test]
fn monitors_of_one_group_connect_to_devices_and_to_nothing_else() {
    if !geteuid().is_root() {
        return skip("monitors of other users: only root can be one");
    }
    let memory = &["--backend", "memory", "--size", "16M"];
    let kinds: [&[&str]; 4] =
        [&[], &["--sandbox", "off"], &["--sandbox", "on", "--user", "nobody"], &["--isolation", "device"]];
    for options in kinds {
        println!("  {options:?}");
        let place = tempfile::tempdir().expect("a temporary folder");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a public folder");
        let mut daemon = Daemon::start_in(place.path(), &[options, &["--socket-group", "4242"]].concat());
        let run = fs::metadata(daemon.run_dir()).expect("the run directory");
        assert_eq!((run.gid(), run.mode() & 0o7777), (MONITORS, 0o710));
        let elsewhere = daemon.run_dir().join("of-its-own");
        let given = ["--socket", elsewhere.to_str().expect("a path in UTF-8")];
        daemon.disk("given", memory, &given);
        let sockets = [daemon.disk("nvme", memory, &[]), daemon.virtio_disk("virtio", memory, &[]), elsewhere.clone()];
        expect_group(&daemon, &sockets, MONITORS);
        daemon.kill_worker(Signal::KILL);
        expect_group(&daemon, &sockets, MONITORS);
        daemon.restart();
        expect_group(&daemon, &sockets, MONITORS);
        daemon.finish();
    }
}

#[test]
fn the_group_of_sockets_is_what_the_daemon_was_started_with() {
    if !geteuid().is_root() {
        return skip("monitors of other users: only root can be one");
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("a public folder");
    let mut daemon = Daemon::start_in(place.path(), &["--socket-group", "4242"]);
    let socket = daemon.disk("nvme", &["--backend", "memory", "--size", "16M"], &[]);
    expect_group(&daemon, std::slice::from_ref(&socket), MONITORS);
    daemon.restart_with(&[]);
    assert_eq!(fs::symlink_metadata(&socket).expect("a socket").mode() & 0o7777, 0o600);
    assert_eq!(connect_as(MONITOR, MONITORS, &socket), Err(ErrorKind::PermissionDenied));
    // Another one, by the file. What is there of the run directory stays as it is, which is told.
    let config = place.path().join("millrace.toml");
    fs::write(&config, format!("socket_group = \"{}\"\n", MONITORS + 1)).expect("a file");
    daemon.restart_with(&["--config", config.to_str().expect("a path in UTF-8")]);
    assert_eq!(connect_as(MONITOR, MONITORS + 1, &socket), Err(ErrorKind::PermissionDenied));
    assert!(daemon.log().contains("group 4243 cannot come to devices' sockets"), "{}", daemon.log());
    chown(daemon.run_dir(), None, Some(MONITORS + 1)).expect("the group's run directory");
    expect_group(&daemon, std::slice::from_ref(&socket), MONITORS + 1);
    // The file is read when the daemon starts, and not by its next worker.
    fs::write(&config, "").expect("a file");
    daemon.kill_worker(Signal::KILL);
    expect_group(&daemon, std::slice::from_ref(&socket), MONITORS + 1);
    daemon.finish();
}

#[test]
fn a_group_that_sockets_cannot_be_given_to_is_told_at_once() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let told = |group: &str, stranger: bool| {
        let mut command = Command::new(Daemon::binary());
        command.args(["serve", "--socket-group", group, "--state-dir"]).arg(place.path().join("s")).arg("--run-dir");
        command.arg(place.path().join("r")).stdin(Stdio::null());
        if stranger && geteuid().is_root() {
            as_nobody(&mut command);
        }
        let output = command.output().expect("running the daemon");
        assert!(!output.status.success(), "{group}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = told("no-such-group", false);
    assert!(said.contains("--socket-group no-such-group: there is no such group"), "{said}");
    // Nobody is in root's group by chance.
    let said = told("root", true);
    assert!(said.contains("is not in group root") && said.contains("usermod -aG root"), "{said}");
    assert!(!place.path().join("r").exists(), "nothing was made");
}
