//! Waits: for a slow volume, for a daemon that ends, and for one that does not answer.

use std::{
    io::{BufRead, BufReader, ErrorKind, Write},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    time::{Duration, Instant},
};

use millrace::{Completion, Error, FastPath, Options};
use millrace_tests::{Daemon, PATIENCE, eventually};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

fn options(daemon: &Daemon) -> Options {
    Options { run_dir: Some(daemon.run_dir()), events: true, timeout: PATIENCE, ..Options::default() }
}

/// What a descriptor tells now, or within a time.
fn told(fd: impl AsFd, flags: PollFlags, within: Duration) -> PollFlags {
    let mut fds = [PollFd::new(&fd, flags)];
    rustix::event::poll(&mut fds, Some(&Timespec::try_from(within).unwrap())).unwrap();
    fds[0].revents()
}

/// A volume that takes four requests a second, of which the first have been made.
fn slow(daemon: &Daemon) -> FastPath {
    daemon.run(&["volume", "create", "slow", "--size", "1M", "--stack", "throttle(iops=4) | memory"]);
    let space = FastPath::open("slow", &options(daemon)).unwrap();
    for tag in 0..4 {
        space.begin_read(tag, 0, 0..512).unwrap();
    }
    let mut done = [Completion::default(); 4];
    let mut ended = 0;
    while ended < 4 {
        let taken = space.wait(&mut done, PATIENCE);
        assert!(taken > 0, "{ended} of 4 have ended");
        ended += taken;
    }
    space
}

/// Reads until nothing is there.
fn empty(space: &FastPath) {
    let _ = rustix::io::read(space.events().unwrap(), &mut [0; 8]);
}

#[test]
fn a_wait_leaves_the_event_of_what_ended_beside_it() {
    let daemon = Daemon::start();
    let space = slow(&daemon);
    for round in 0..3 {
        empty(&space);
        space.begin_read(7, 0, 0..512).unwrap();
        // It ends later than the one before, which nobody has taken.
        space.read(0, &mut [0; 512]).unwrap();
        assert_eq!(told(space.events().unwrap(), PollFlags::IN, Duration::ZERO), PollFlags::IN, "round {round}");
        let mut done = [Completion::default(); 2];
        assert_eq!((space.poll(&mut done), done[0].tag), (1, 7));
        // As many as there is room for, and one is left.
        empty(&space);
        space.begin_read(8, 0, 0..512).unwrap();
        space.begin_read(9, 0, 0..512).unwrap();
        let mut one = [Completion::default()];
        assert_eq!(space.wait(&mut one, PATIENCE), 1);
        while told(space.events().unwrap(), PollFlags::IN, PATIENCE) == PollFlags::IN && space.poll(&mut one) == 0 {
            empty(&space);
        }
    }
    drop(space);
    daemon.finish();
}

/// One thread waits for long, another sleeps for what ends before that.
#[test]
fn a_long_wait_keeps_no_event_to_itself() {
    let daemon = Daemon::start();
    let space = slow(&daemon);
    empty(&space);
    std::thread::scope(|scope| {
        // One after the other, four a second: the last one's turn is far away.
        for tag in 0..100 {
            space.begin_read(tag, 0, 0..512).unwrap();
        }
        let long = scope.spawn(|| space.read(0, &mut [0; 512]).unwrap());
        let (mut done, mut ended) = ([Completion::default(); 4], 0);
        while ended < 4 {
            assert_eq!(told(space.events().unwrap(), PollFlags::IN, PATIENCE), PollFlags::IN);
            empty(&space);
            ended += space.poll(&mut done);
        }
        assert!(!long.is_finished(), "the first was told of only when the last had ended");
        daemon.run(&["volume", "change", "slow", "--stack", "throttle(iops=1M) | memory"]);
        long.join().unwrap();
    });
    drop(space);
    daemon.finish();
}

/// Where it sleeps for the event, no sleep is longer than what is left.
#[test]
fn a_short_wait_is_as_short_as_it_is_asked_to_be() {
    let daemon = Daemon::start();
    let space = slow(&daemon);
    empty(&space);
    for tag in 0..100 {
        space.begin_read(tag, 0, 0..512).unwrap();
    }
    let is_short = || {
        let begun = Instant::now();
        space.wait(&mut [Completion::default()], Duration::from_millis(1)) == 0 && begun.elapsed() < Duration::from_millis(8)
    };
    // One is enough: others have to do with what else the machine does.
    assert!((0..200).any(|_| is_short()));
    daemon.run(&["volume", "change", "slow", "--stack", "throttle(iops=1M) | memory"]);
    drop(space);
    daemon.finish();
}

#[test]
fn who_only_looks_now_and_then_learns_that_the_daemon_has_ended() {
    let mut daemon = Daemon::start();
    let space = slow(&daemon);
    for tag in 0..100 {
        space.begin_read(tag, 0, 0..512).unwrap();
    }
    daemon.stop();
    let (mut done, mut ended, begun) = ([Completion::default(); 16], Vec::new(), Instant::now());
    while ended.len() < 100 {
        assert!(begun.elapsed() < PATIENCE, "{} of 100 have ended", ended.len());
        told(space.events().unwrap(), PollFlags::IN, Duration::from_millis(20));
        empty(&space);
        let taken = space.poll(&mut done);
        ended.extend_from_slice(&done[..taken]);
    }
    assert_eq!(ended.last().unwrap().errno, Errno::NODEV.raw_os_error());
}

#[test]
fn who_only_sleeps_learns_it_too() {
    let mut daemon = Daemon::start();
    let space = slow(&daemon);
    for tag in 0..100 {
        space.begin_read(tag, 0, 0..512).unwrap();
    }
    assert_eq!(told(space.connection(), PollFlags::RDHUP, Duration::ZERO), PollFlags::empty());
    // A worker's death is none of its business.
    daemon.kill_worker(rustix::process::Signal::KILL);
    space.read(0, &mut [0; 512]).unwrap();
    assert_eq!(told(space.connection(), PollFlags::RDHUP, Duration::ZERO), PollFlags::empty());
    daemon.stop();
    assert!(told(space.connection(), PollFlags::RDHUP, PATIENCE).contains(PollFlags::HUP));
    let (mut done, mut ended, begun) = ([Completion::default(); 100], 0, Instant::now());
    while ended < 100 {
        assert!(begun.elapsed() < PATIENCE, "{ended} of 100 have ended");
        ended += space.poll(&mut done);
    }
    assert_eq!(space.read(0, &mut [0; 512]).unwrap_err().errno(), Errno::NODEV.raw_os_error());
}

/// A door behind which nobody answers.
#[test]
fn a_daemon_that_says_nothing_is_not_waited_for_longer_than_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("apps.sock")).unwrap();
    let options = Options { run_dir: Some(dir.path().into()), timeout: Duration::from_millis(200), ..Options::default() };
    let silent = FastPath::open("v", &options).err().expect("nobody answers");
    assert_eq!(silent.errno(), Errno::TIMEDOUT.raw_os_error(), "{silent}");
    // Nor where nobody takes connections, and there is no room for more that wait.
    rustix::net::listen(&listener, 0).unwrap();
    let full = (0..3).map(|_| FastPath::open("v", &options).err().expect("nobody answers").errno());
    assert_eq!(full.collect::<Vec<_>>(), [Errno::TIMEDOUT.raw_os_error(); 3]);
}

/// Someone who asks at a door.
fn asker(listener: &UnixListener) -> UnixStream {
    let (stream, _) = listener.accept().unwrap();
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    assert!(line.contains("\"v\""), "{line}");
    stream
}

/// A door whose worker ends with what was asked in its hands, again and again; another one follows, or none.
#[test]
fn who_is_cut_off_asks_again() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("apps.sock")).unwrap();
    let options = Options { run_dir: Some(dir.path().into()), timeout: PATIENCE, ..Options::default() };
    let open = || FastPath::open("v", &options).err().expect("nobody gives it").errno();
    std::thread::scope(|scope| {
        let opened = scope.spawn(open);
        for _ in 0..3 {
            drop(asker(&listener));
        }
        asker(&listener).write_all(b"{\"error\": {\"errno\": 42, \"problem\": {\"detail\": \"asked in vain\"}}}\n").unwrap();
        assert_eq!(opened.join().unwrap(), 42);

        let opened = scope.spawn(open);
        drop((asker(&listener), listener));
        assert_eq!(opened.join().unwrap(), Errno::CONNREFUSED.raw_os_error());
    });
    // Until there is no more time: nobody has answered, and no medium has failed.
    let cut_off = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
    for source in cut_off.map(std::io::Error::from) {
        let error = Error::Door { path: dir.path().into(), source };
        assert_eq!(error.errno(), Errno::CONNREFUSED.raw_os_error(), "{error}");
    }
}

#[test]
fn an_event_that_blocks_is_its_owners_loss() {
    let daemon = Daemon::start_with(&["--shards", "1"]);
    daemon.run(&["volume", "create", "m", "--size", "1M", "--backend", "memory"]);
    let bystander = FastPath::open("m", &options(&daemon)).unwrap();
    let space = FastPath::open("m", &options(&daemon)).unwrap();
    for round in 0..3 {
        // The next to signal it waits until somebody reads it, which nobody does.
        let event = space.events().unwrap();
        empty(&space);
        rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(event, rustix::fs::OFlags::empty()).unwrap();
        space.begin_read(round, 0, 0..512).unwrap();
        bystander.write(0, &[7; 512], false).unwrap();
        let mut done = [Completion::default()];
        assert_eq!((space.wait(&mut done, PATIENCE), done[0].errno, done[0].tag), (1, 0, round));
        // It is signalled after that, and before the shard comes to the next request: who emptied it meanwhile would wait for ever.
        bystander.write(0, &[7; 512], false).unwrap();
    }
    let blocks = || daemon.log().matches("has made an eventfd block").count();
    eventually("a line that tells of it", || (blocks() > 0).then_some(()));
    assert_eq!(blocks(), 1, "{}", daemon.log());
}

/// One byte a second: after the first read the next one's turn is many minutes away.
#[test]
fn who_finds_no_room_for_as_long_as_he_may_wait_is_told_that_nothing_was_begun() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "slow", "--size", "1M", "--stack", "throttle(bandwidth=1) | memory"]);
    let space = FastPath::open("slow", &Options { depth: 1, timeout: Duration::from_secs(1), ..options(&daemon) }).unwrap();
    space.read(0, &mut [0; 512]).unwrap();
    space.begin_read(7, 0, 0..512).unwrap();
    let error = space.read(0, &mut [0; 512]).unwrap_err();
    assert_eq!(error.errno(), Errno::TIMEDOUT.raw_os_error(), "{error}");
    assert!(error.to_string().contains("nothing of it was begun"), "{error}");
    // Who does not wait is told at once.
    assert_eq!(space.begin_read(8, 0, 0..512).unwrap_err().errno(), Errno::AGAIN.raw_os_error());
    daemon.run(&["volume", "change", "slow", "--stack", "throttle(iops=1M) | memory"]);
    drop(space);
    daemon.finish();
}

/// 64 bytes a second, and what is larger than that is owed: room is there after eight seconds, the end would be there many minutes later.
#[test]
fn the_wait_for_room_is_a_part_of_a_requests_time() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "slow", "--size", "1M", "--stack", "throttle(bandwidth=64) | memory"]);
    let space = FastPath::open("slow", &Options { depth: 1, timeout: Duration::from_secs(9), ..options(&daemon) }).unwrap();
    space.read(0, &mut [0; 512]).unwrap();
    space.begin_read(7, 0, 0..65536).unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| space.read(0, &mut [0; 512]).expect_err("its time is over"));
        // Who began to wait anew when there was room would wait for eight seconds more, and be made now.
        while !waits.is_finished() && begun.elapsed() < Duration::from_secs(16) {
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon.run(&["volume", "change", "slow", "--stack", "throttle(iops=1M) | memory"]);
        let error = waits.join().unwrap();
        assert_eq!(error.errno(), Errno::TIMEDOUT.raw_os_error(), "{error}");
    });
    drop(space);
    daemon.finish();
}
