//! The C interface: a program in C, compiled here against the header, on volumes of a real daemon; and programs that behave badly.

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use millrace_tests::{Daemon, eventually, repository, skip};

/// Where cargo has put the library for this test.
fn library_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    test.parent().expect("tests are in a folder").to_path_buf()
}

/// Compiles the client; against the shared library, or with the whole library in it.
fn compile(to: &Path, whole: bool) {
    let (crate_dir, libraries) = (repository().join("crates/fastpath"), library_dir());
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-I"]).arg(crate_dir.join("include"));
    command.arg(crate_dir.join("tests/c/client.c")).arg("-o").arg(to);
    if whole {
        command.arg(libraries.join("libmillrace.a")).args(["-lpthread", "-ldl", "-lm", "-lgcc_s"]);
    } else {
        // As it is installed: a program asks for the library by the name that it was given.
        let folder = to.parent().expect("a folder");
        symlink(libraries.join("libmillrace.so"), folder.join("libmillrace.so.0")).expect("a link");
        command.arg("-L").arg(&libraries).arg(format!("-Wl,-rpath,{}", folder.display())).args(["-lmillrace", "-lpthread"]);
    }
    let output = command.output().expect("running cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A daemon with a volume of this stack, and the client.
fn client_on(stack: &str) -> (Daemon, PathBuf) {
    let daemon = Daemon::start();
    let program = daemon.path("client");
    compile(&program, false);
    daemon.run(&["volume", "create", "v", "--size", "16M", "--stack", stack]);
    (daemon, program)
}

fn client(daemon: &Daemon, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("MILLRACE_RUN_DIR", daemon.run_dir()).env("MILLRACE_VOLUME", "v").stdin(Stdio::null());
    command
}

fn must_succeed(mut command: Command) {
    let output = command.output().expect("running the client");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
}

fn sessions(daemon: &Daemon) -> usize {
    let listed = daemon.json(&["device", "list"]);
    listed.as_array().expect("a list").iter().filter(|device| device["session_of_uid"].is_number()).count()
}

fn eventually_no_sessions(daemon: &Daemon) {
    eventually("the session's device is gone", || (sessions(daemon) == 0).then_some(()));
}

/// Starts a client that goes on and on, and waits until it does.
fn started(mut command: Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("starting the client");
    let mut line = String::new();
    let said = child.stdout.as_mut().expect("its output");
    BufReader::new(said).read_line(&mut line).expect("a line");
    assert_eq!(line, "loaded\n");
    child
}

#[test]
fn a_program_in_c_reads_what_it_wrote() {
    let mut daemon = Daemon::start();
    let program = daemon.path("client");
    compile(&program, false);
    let image = daemon.path("f.img");
    daemon.run(&["volume", "create", "v", "--size", "16M", "--backend", &format!("file:{}", image.display())]);
    must_succeed(client(&daemon, &program, &["verify"]));
    eventually_no_sessions(&daemon);
    daemon.run(&["volume", "delete", "v"]);
    daemon.run(&["volume", "create", "v", "--size", "16M", "--block-size", "4096", "--backend", "memory"]);
    must_succeed(client(&daemon, &program, &["blocks"]));
    eventually_no_sessions(&daemon);
    let error = client(&daemon, &program, &["open"]).env_remove("MILLRACE_VOLUME").output().expect("running the client");
    assert_eq!(error.status.code(), Some(22));
    assert!(String::from_utf8_lossy(&error.stderr).contains("MILLRACE_VOLUME"));
    daemon.expect_well();
}

#[test]
fn requests_are_made_and_ended_without_calls_of_the_system() {
    let (mut daemon, program) = client_on("memory");
    must_succeed(client(&daemon, &program, &["silent"]));
    eventually_no_sessions(&daemon);
    daemon.expect_well();
}

#[test]
fn what_is_not_waited_for_any_longer_is_told_of_once() {
    let (mut daemon, program) = client_on("throttle(iops=2) | memory");
    must_succeed(client(&daemon, &program, &["late"]));
    daemon.expect_well();
}

#[test]
fn a_wait_leaves_the_event_of_what_had_ended_before_it_began() {
    let (mut daemon, program) = client_on("throttle(iops=1, burst=2s) | memory");
    must_succeed(client(&daemon, &program, &["before"]));
    daemon.expect_well();
}

#[test]
fn who_has_too_few_descriptors_is_told_so() {
    let (mut daemon, program) = client_on("memory");
    must_succeed(client(&daemon, &program, &["few"]));
    eventually_no_sessions(&daemon);
    daemon.expect_well();
}

#[test]
fn a_space_is_given_back_though_what_was_forked_goes_on() {
    let (mut daemon, program) = client_on("memory");
    let mut child = started(client(&daemon, &program, &["fork"]));
    eventually_no_sessions(&daemon);
    daemon.run(&["volume", "delete", "v"]);
    child.kill().expect("it sleeps");
    child.wait().expect("the child");
    daemon.expect_well();
}

#[test]
fn threads_that_share_a_position_leave_nothing_out() {
    let (mut daemon, program) = client_on("memory");
    must_succeed(client(&daemon, &program, &["append"]));
    daemon.expect_well();
}

/// A door whose answer takes its time, and a program with a timer.
#[test]
fn signals_do_not_end_the_wait_for_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("client");
    compile(&program, false);
    let door = UnixListener::bind(dir.path().join("apps.sock")).unwrap();
    let mut command = Command::new(&program);
    command.args(["open", "with signals"]).env("MILLRACE_RUN_DIR", dir.path()).env("MILLRACE_VOLUME", "v");
    let child = command.stderr(Stdio::piped()).spawn().expect("starting the client");
    let (mut stream, _) = door.accept().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    stream.write_all(b"{\"error\": {\"errno\": 42, \"problem\": {\"detail\": \"asked in vain\"}}}\n").unwrap();
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(42), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Where anybody may have made the run directory before the daemon did, who listens there is not asked.
#[test]
fn a_run_directory_that_others_may_write_to_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("client");
    compile(&program, false);
    let run_dir = dir.path().join(format!("millrace-{}", rustix::process::getuid().as_raw()));
    fs::create_dir(&run_dir).unwrap();
    let door = UnixListener::bind(run_dir.join("apps.sock")).unwrap();
    door.set_nonblocking(true).unwrap();
    let code = |mode| {
        fs::set_permissions(&run_dir, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(&program);
        command.arg("open").env("TMPDIR", dir.path()).env("MILLRACE_RUN_DIR", &run_dir).env("MILLRACE_VOLUME", "v");
        let output = command.output().expect("running the client");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (refused, said) = code(0o777);
    assert_eq!(refused, Some(13), "{said}");
    assert!(said.contains("others may write to it"), "{said}");
    assert_eq!(door.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "it was asked");
    drop(door);
    let (own, said) = code(0o711);
    assert_eq!(own, Some(111), "its own is asked, and nobody answers: {said}");
}

/// Without a daemon: each call is an error.
#[test]
fn errors_are_told_while_a_thread_ends_and_while_the_program_does() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("client");
    compile(&program, false);
    let mut command = Command::new(&program);
    command.arg("end").env("MILLRACE_RUN_DIR", dir.path());
    must_succeed(command);
}

#[test]
fn a_program_in_c_asks_an_engine() {
    let mut daemon = Daemon::start_with(&["--engine=fvm-soft"]);
    let program = daemon.path("client");
    compile(&program, false);
    daemon.run(&["volume", "create", "v", "--size", "16M", "--backend", "memory"]);
    must_succeed(client(&daemon, &program, &["engine"]));
    eventually_no_sessions(&daemon);
    daemon.expect_well();
}

#[test]
fn a_program_in_python_reads_what_it_wrote() {
    let mut daemon = Daemon::start();
    daemon.run(&["volume", "create", "v", "--size", "1M", "--backend", "memory"]);
    let crate_dir = repository().join("crates/fastpath");
    let mut command = client(&daemon, Path::new("python3"), &[]);
    command.arg(crate_dir.join("tests/python/use.py")).env("PYTHONPATH", crate_dir.join("python"));
    command.env("MILLRACE_LIBRARY", library_dir().join("libmillrace.so")).env("PYTHONDONTWRITEBYTECODE", "1");
    must_succeed(command);
    eventually_no_sessions(&daemon);
    daemon.expect_well();
}

#[test]
fn programs_that_die_or_scribble_harm_only_themselves() {
    let (mut daemon, program) = client_on("memory");
    daemon.run(&["volume", "create", "w", "--size", "16M", "--backend", "memory"]);
    let options = millrace::Options { run_dir: Some(daemon.run_dir()), ..millrace::Options::default() };
    let bystander = millrace::FastPath::open("w", &options).unwrap();
    bystander.write(0, &[7; 4096], false).unwrap();
    let before = daemon.usage();
    for _ in 0..5 {
        let mut child = started(client(&daemon, &program, &["load"]));
        child.kill().expect("killing it");
        child.wait().expect("its end");
    }
    for _ in 0..3 {
        let mut child = started(client(&daemon, &program, &["noise"]));
        child.wait().expect("its end");
    }
    eventually("only the bystander is left", || (sessions(&daemon) == 1).then_some(()));
    let mut back = [0; 4096];
    bystander.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    daemon.expect_back_to(&before);
    daemon.expect_well();
}

#[test]
fn users_get_what_the_configuration_allows() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        // The daemon's own unit tests ask in other users' names.
        return skip("other users' programs: only root can start them");
    }
    let files = tempfile::tempdir().unwrap();
    let config = files.path().join("millrace.toml");
    let volume = |name: &str| format!("[[volume]]\nname = \"{name}\"\nsize = \"1M\"\nbackend = \"memory\"\n");
    let app = format!("[[app]]\nuid = {NOBODY}\nvolumes = [\"v\"]\nsessions = 1\n");
    fs::write(&config, format!("{app}{}{}", volume("v"), volume("w"))).unwrap();
    let mut daemon = Daemon::start_with(&["--config", &config.display().to_string()]);
    let program = daemon.path("client");
    compile(&program, true);
    let as_nobody = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={NOBODY}"), "--clear-groups"]).arg(&program).args(arguments);
        command.env("MILLRACE_RUN_DIR", daemon.run_dir()).env("MILLRACE_VOLUME", "v").stdin(Stdio::null());
        command
    };
    let code = |mut command: Command| command.output().expect("running setpriv").status.code();
    let folder = program.parent().expect("its folder");
    fs::set_permissions(folder, fs::Permissions::from_mode(0o711)).unwrap();
    // Whom the run directory does not let through, the daemon does not even hear.
    assert_eq!(code(as_nobody(&["open"])), Some(13));
    fs::set_permissions(daemon.run_dir(), fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(code(as_nobody(&["open"])), Some(0));
    eventually_no_sessions(&daemon);
    let mut other = as_nobody(&["open"]);
    other.env("MILLRACE_VOLUME", "w");
    let other = other.output().expect("running setpriv");
    assert_eq!(other.status.code(), Some(13));
    assert!(String::from_utf8_lossy(&other.stderr).contains("user 65534 may not open volume w"));
    let mut holder = as_nobody(&["open", "and stay"]).spawn().expect("starting the client");
    eventually("it has its session", || (sessions(&daemon) == 1).then_some(()));
    assert_eq!(code(as_nobody(&["open"])), Some(122), "EDQUOT");
    holder.kill().expect("killing it");
    holder.wait().expect("its end");
    eventually_no_sessions(&daemon);
    assert_eq!(code(as_nobody(&["open"])), Some(0));
    // The API itself stays the owner's.
    let api = fs::metadata(daemon.run_dir().join("api.sock")).unwrap().permissions().mode();
    assert_eq!(api & 0o777, 0o600);
    daemon.expect_well();
}
