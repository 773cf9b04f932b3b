//! A real keeper with real workers, which are `examples/roles.rs`.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// How long something may take that happens.
const PATIENCE: Duration = Duration::from_secs(60);

/// A keeper as another process.
struct Running {
    child: Child,
    dir: PathBuf,
}

impl Running {
    fn start(name: &str, play: &str, may_have_cells: bool) -> Self {
        let dir = std::env::temp_dir().join(format!("millrace-keeper-{}-{name}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        // Beside the tests, and built with them.
        let tests = std::env::current_exe().unwrap();
        let mut command = Command::new(tests.ancestors().nth(2).unwrap().join("examples/roles"));
        command.env("MILLRACE_TEST_PLAY", play).env("MILLRACE_TEST_PLACE", &dir).process_group(0);
        if play == "full" {
            command.env("MILLRACE_TEST_FILES", "256");
        }
        if may_have_cells {
            command.env("MILLRACE_TEST_CELLS", "");
        }
        Self { child: command.spawn().unwrap(), dir }
    }

    fn wait_for_mark(&mut self, name: &str) {
        let end = Instant::now() + PATIENCE;
        while !self.has(name) {
            assert!(self.child.try_wait().unwrap().is_none(), "the keeper ended before {name}");
            assert!(Instant::now() < end, "no {name}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn has(&self, name: &str) -> bool {
        self.dir.join(name).exists()
    }

    fn children(&self) -> usize {
        let id = self.child.id();
        fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap().split_whitespace().count()
    }

    fn tell_to_stop(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the keeper does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn only_who_may_have_cells_starts_them() {
    let mut keeper = Running::start("cells", "cells", true);
    keeper.wait_for_mark("cell");
    drop(keeper);
    let mut keeper = Running::start("no-cells", "cells", false);
    keeper.wait_for_mark("had-its-turn");
    assert_eq!(keeper.children(), 1, "the worker is alone");
    keeper.tell_to_stop();
    assert!(keeper.wait().success());
    assert!(!keeper.has("cell"));
}

/// It puts nothing in order itself: who was to follow does, so that nothing is said to have stopped that only stood still.
#[test]
fn who_is_stopped_while_it_lets_go_is_stopped_by_the_next_one() {
    let mut keeper = Running::start("let-go", "let-go", false);
    let status = keeper.wait();
    assert!(keeper.has("second-in-order"), "the second worker was not told to stop: {status}");
    assert!(status.success(), "{status}");
}

#[test]
fn a_worker_that_never_ends_its_speech_is_stopped_all_the_same() {
    let mut keeper = Running::start("flood", "flood", false);
    keeper.wait_for_mark("flooding");
    keeper.tell_to_stop();
    assert!(keeper.wait().success());
}

#[test]
fn what_clients_hand_in_leaves_volumes_their_room_and_what_is_not_held_is_told() {
    let mut keeper = Running::start("full", "full", false);
    keeper.wait_for_mark("held");
    keeper.tell_to_stop();
    assert!(keeper.wait().success());
}

/// Whether a file is there tells that it was looked for, which may wait for its file system.
#[test]
fn programs_are_looked_for_only_where_they_may_take_over_from() {
    let mut keeper = Running::start("programs", "programs", false);
    keeper.wait_for_mark("named");
    let said = fs::read_to_string(keeper.dir.join("said")).unwrap();
    let mut expected = vec!["NotAllowed"; 5];
    expected.push("CannotRun(2)");
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
    keeper.tell_to_stop();
    assert!(keeper.wait().success());
}
