//! Spaces on volumes of a real daemon.

use std::{
    fs,
    io::{IoSliceMut, Write},
    mem::MaybeUninit,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use millrace::{Completion, Direct, FastPath, Operation, Options};
use millrace_driver::{
    Controller, QueueError, QueueOptions, QueuePair, VfioUser,
    spec::{NamespaceId, Status, reservation::ReservationType},
};
use millrace_tests::{Daemon, eventually, skip};
use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::{Pid, Signal, Uid, kill_process},
};

const MIB: usize = 1 << 20;

fn options(daemon: &Daemon) -> Options {
    Options { run_dir: Some(daemon.run_dir()), ..Options::default() }
}

fn volume(daemon: &Daemon, name: &str, arguments: &[&str]) {
    daemon.run(&[&["volume", "create", name], arguments].concat());
}

/// Devices that there are.
fn devices(daemon: &Daemon) -> Vec<String> {
    let listed = daemon.json(&["device", "list"]);
    let names = listed.as_array().expect("a list").iter();
    names.map(|device| device["name"].as_str().expect("a name").to_owned()).collect()
}

fn eventually_no_device(daemon: &Daemon) {
    eventually("the sessions' devices are gone", || devices(daemon).is_empty().then_some(()));
}

/// Bytes that say where they are.
fn pattern(offset: u64, len: usize, seed: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..len as u64 / 8).flat_map(|at| word(offset / 8 + at)).collect()
}

#[test]
fn what_is_written_is_read_whatever_its_size_and_way() {
    let mut daemon = Daemon::start();
    let image = daemon.path("f.img");
    volume(&daemon, "f", &["--size", "32M", "--backend", &format!("file:{}", image.display())]);
    let space = FastPath::open("f", &Options { buffer: 8 * MIB, statistics: true, ..options(&daemon) }).unwrap();
    assert_eq!((space.size(), space.block_size()), (32 << 20, 512));
    // From one block to far more than one command, at offsets that are no multiple of a page.
    for (seed, (offset, len)) in [
        (0, 512),
        (512 * 7, 512 * 9),
        (4096, 128 << 10),
        (512, (128 << 10) + 512),
        (512 * 3, 5 * MIB + 512),
        (24 << 20, 8 * MIB),
    ]
    .into_iter()
    .enumerate()
    {
        let bytes = pattern(offset, len, seed as u64);
        space.write(offset, &bytes, seed % 2 == 0).unwrap();
        let mut back = vec![0; len];
        space.read(offset, &mut back).unwrap();
        assert!(back == bytes, "{len} bytes at {offset} by copies");
        // The other way: from the buffer, at an odd place there, in one request.
        let len = len.min(7 * MIB);
        let other = pattern(offset, len, seed as u64 + 1000);
        space.fill(4, &other);
        space.begin_write(9, offset, 4..4 + len, false).unwrap();
        let mut done = [Completion::default()];
        assert_eq!(space.wait(&mut done, Duration::from_secs(60)), 1);
        assert_eq!((done[0].tag, done[0].errno, done[0].bytes), (9, 0, len as u64));
        space.read(offset, &mut back[..len]).unwrap();
        assert!(back[..len] == other, "{len} bytes at {offset} from the buffer");
        space.fill(0, &vec![0xee; 8 * MIB]);
        space.begin_read(10, offset, 4..4 + len).unwrap();
        assert_eq!(space.wait(&mut done, Duration::from_secs(60)), 1);
        assert_eq!((done[0].tag, done[0].errno), (10, 0));
        let mut direct = vec![0; len + 8];
        space.take(0, &mut direct);
        assert!(direct[4..4 + len] == other && direct[..4] == [0xee; 4] && direct[4 + len..] == [0xee; 4]);
    }
    space.flush().unwrap();
    let last = pattern(24 << 20, 7 * MIB, 1005);
    assert!(fs::read(&image).unwrap()[24 << 20..31 << 20] == last, "the file has it");
    space.write_zeroes(24 << 20, 1 << 20).unwrap();
    space.deallocate(25 << 20, 1 << 20).unwrap();
    let mut back = vec![1; 2 * MIB];
    space.read(24 << 20, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "zeroes, and what is not needed reads as zeroes from a file");
    let statistics = space.statistics().unwrap();
    assert_eq!((statistics.writes.requests, statistics.writes.errors, statistics.others.requests), (12, 0, 3));
    assert!(statistics.reads.min > 0 && statistics.reads.permille(500) <= statistics.reads.max);
    drop(space);
    eventually_no_device(&daemon);
    daemon.expect_well();
}

#[test]
fn what_cannot_be_is_refused_and_costs_nothing() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let space = FastPath::open("m", &Options { buffer: 4096, depth: 2, ..options(&daemon) }).unwrap();
    let errno = |error: millrace::Error| error.errno();
    let mut block = [0; 512];
    assert_eq!(errno(space.read(1, &mut block).unwrap_err()), 22);
    assert_eq!(errno(space.read(0, &mut block[..100]).unwrap_err()), 22);
    assert_eq!(errno(space.read(0, &mut []).unwrap_err()), 22);
    assert_eq!(errno(space.read(1 << 20, &mut block).unwrap_err()), 6);
    assert_eq!(errno(space.read(u64::MAX - 511, &mut block).unwrap_err()), 6);
    assert_eq!(errno(space.begin_read(1, 0, 3584..4608).unwrap_err()), 22, "past the buffer");
    assert_eq!(errno(space.begin_read(1, 0, 1..513).unwrap_err()), 22, "at an odd place");
    space.begin_read(1, 0, 0..512).unwrap();
    space.begin_read(2, 0, 0..512).unwrap();
    assert_eq!(errno(space.begin_read(3, 0, 0..512).unwrap_err()), 11, "two are in progress, or wait to be taken");
    let mut done = [Completion::default(); 4];
    eventually("both end", || {
        let taken = space.wait(&mut done, Duration::from_secs(1));
        (taken == 2 || (taken == 1 && space.wait(&mut done, Duration::from_secs(60)) == 1)).then_some(())
    });
    space.begin_read(3, 0, 0..512).unwrap();
    // The volume shrinks: what is past its end now is the controller's to refuse.
    daemon.run(&["volume", "resize", "m", "512K", "--shrink"]);
    assert_eq!(errno(space.read(768 << 10, &mut block).unwrap_err()), 6);
    assert_eq!(space.refresh().unwrap(), 512 << 10);
    // It grows: what is new may be used by those who have asked how large it is.
    daemon.run(&["volume", "resize", "m", "2M"]);
    assert_eq!(errno(space.read(1 << 20, &mut block).unwrap_err()), 6);
    assert_eq!(space.refresh().unwrap(), 2 << 20);
    space.read(1 << 20, &mut block).unwrap();
    for (name, read_only, errno) in [("none", false, 2), ("", false, 2), ("m\n", true, 2)] {
        let error = FastPath::open(name, &Options { read_only, ..options(&daemon) }).map(drop).unwrap_err();
        assert_eq!(error.errno(), errno, "{error}");
    }
    let looking = FastPath::open("m", &Options { read_only: true, ..options(&daemon) }).unwrap();
    looking.read(0, &mut block).unwrap();
    assert_eq!(errno(looking.write(0, &block, false).unwrap_err()), 30);
}

#[test]
fn threads_and_spaces_work_beside_each_other() {
    let mut daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "64M", "--backend", "memory"]);
    // Beside a guest's own device.
    daemon.run(&["device", "create", "guest", "--nvme"]);
    daemon.run(&["device", "attach", "guest", "m"]);
    let shared = FastPath::open("m", &Options { depth: 4, events: true, ..options(&daemon) }).unwrap();
    let own = || FastPath::open("m", &Options { depth: 32, ..options(&daemon) }).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let shared = &shared;
            scope.spawn(move || {
                let space = (thread >= 4).then(own);
                let space = space.as_ref().unwrap_or(shared);
                for round in 0..200u64 {
                    let (offset, len) = ((thread * 8 + round % 8) << 20, 512 * (1 + (round as usize * 7) % 600));
                    let bytes = pattern(offset, len, thread * 1000 + round);
                    space.write(offset, &bytes, false).unwrap();
                    let mut back = vec![0; len];
                    space.read(offset, &mut back).unwrap();
                    assert!(back == bytes, "thread {thread}, round {round}");
                }
            });
        }
    });
    drop(shared);
    eventually("only the guest's device is left", || (devices(&daemon) == ["guest"]).then_some(()));
    daemon.expect_well();
}

#[test]
fn many_are_in_flight_and_each_ends_once() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "16M", "--backend", "memory"]);
    let space = FastPath::open("m", &Options { buffer: 64 * 4096, depth: 64, events: true, ..options(&daemon) }).unwrap();
    let (mut begun, mut ended, mut seen) = (0u64, 0u64, vec![false; 20_000]);
    let mut done = [Completion::default(); 16];
    let mut place: Vec<usize> = (0..64).collect();
    let mut at = vec![0; 20_000];
    while ended < 20_000 {
        while begun < 20_000
            && let Some(free) = place.pop()
        {
            at[begun as usize] = free;
            space.begin_write(begun, (begun % 4096) * 4096, free * 4096..(free + 1) * 4096, false).unwrap();
            begun += 1;
        }
        let taken = space.wait(&mut done, Duration::from_secs(60));
        assert!(taken > 0, "{begun} begun, {ended} ended");
        for completion in &done[..taken] {
            let tag = completion.tag as usize;
            assert!(!std::mem::replace(&mut seen[tag], true) && completion.errno == 0, "{completion:?}");
            place.push(at[tag]);
            ended += 1;
        }
    }
    assert_eq!(space.poll(&mut done), 0);
}

#[test]
fn several_are_begun_at_once_as_many_as_there_is_room_for() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let space = FastPath::open("m", &Options { buffer: 8 * 4096, depth: 4, ..options(&daemon) }).unwrap();
    let request = |operation, tag: u64, offset: u64| {
        let at = tag as usize * 4096;
        Direct { operation, tag, offset, part: at..at + 4096, durable: false }
    };
    // One by one: those that have ended meanwhile are kept.
    let ended = |count: usize| {
        let (mut done, mut tags) = ([Completion::default()], Vec::new());
        while tags.len() < count && space.wait(&mut done, Duration::from_secs(60)) == 1 {
            assert_eq!((done[0].errno, done[0].bytes), (0, 4096));
            tags.push(done[0].tag);
        }
        assert_eq!(space.wait(&mut done, Duration::from_secs(60)), 0, "nothing else is in progress");
        tags.sort_unstable();
        tags
    };
    let mut bytes = pattern(0, 6 * 4096, 5);
    space.fill(0, &bytes);
    let writes: Vec<_> = (0..6).map(|tag| request(Operation::Write, tag, tag * 4096)).collect();
    assert_eq!(space.begin_many(&writes).unwrap(), 4);
    assert_eq!(space.begin_many(&writes[4..]).unwrap_err().errno(), Errno::AGAIN.raw_os_error());
    assert_eq!(ended(4), [0, 1, 2, 3]);
    assert_eq!(space.begin_many(&writes[4..]).unwrap(), 2);
    assert_eq!(ended(2), [4, 5]);
    let mut back = vec![0; bytes.len()];
    space.read(0, &mut back).unwrap();
    assert!(back == bytes);
    // One that cannot be is the end of it, and the first one's reason is told.
    let (zeroes, past) = (request(Operation::WriteZeroes, 6, 0), request(Operation::Write, 7, 1 << 20));
    assert_eq!(space.begin_many(&[zeroes.clone(), past.clone(), writes[1].clone()]).unwrap(), 1);
    assert_eq!(ended(1), [6]);
    assert_eq!(space.begin_many(&[past, zeroes]).unwrap_err().errno(), Errno::NXIO.raw_os_error());
    assert_eq!(space.begin_many(&[]).unwrap(), 0);
    assert!(ended(0).is_empty());
    bytes[..4096].fill(0);
    space.read(0, &mut back).unwrap();
    assert!(back == bytes);
    drop(space);
    daemon.finish();
}

#[test]
fn a_worker_that_dies_is_replaced_unnoticed_and_a_daemon_that_stops_is_noticed() {
    let mut daemon = Daemon::start();
    let image = daemon.path("f.img");
    volume(&daemon, "f", &["--size", "16M", "--backend", &format!("file:{}", image.display())]);
    let space = FastPath::open("f", &options(&daemon)).unwrap();
    let rounds = AtomicU64::new(0);
    let stopped = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            loop {
                let round = rounds.load(Ordering::Relaxed);
                let offset = (round % 16) << 20;
                let bytes = pattern(offset, 64 << 10, round);
                let mut back = vec![0; bytes.len()];
                let result = space.write(offset, &bytes, false).and_then(|()| space.read(offset, &mut back));
                if let Err(error) = result {
                    return error;
                }
                assert!(back == bytes, "round {round}");
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let some_rounds = || {
            let before = rounds.load(Ordering::Relaxed);
            eventually("the load goes on", || (rounds.load(Ordering::Relaxed) > before + 20).then_some(()));
        };
        some_rounds();
        daemon.kill_worker(Signal::KILL);
        some_rounds();
        assert_eq!(devices(&daemon).len(), 1, "the session is the same");
        // Sessions are not what a daemon brings back.
        daemon.restart();
        load.join().unwrap()
    });
    assert_eq!(stopped.errno(), 19, "{stopped}");
    assert!(devices(&daemon).is_empty());
    let again = FastPath::open("f", &options(&daemon)).unwrap();
    again.read(0, &mut [0; 512]).unwrap();
}

/// The sessions that there are, and the workers that serve them.
fn sessions(daemon: &Daemon) -> Vec<(String, String)> {
    let listed = daemon.json(&["device", "list"]);
    let sessions = listed.as_array().expect("a list").iter().filter(|device| device["session_of_uid"].is_number());
    let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
    sessions.map(|device| (text(&device["name"]), text(&device["worker"]["name"]))).collect()
}

fn pid_of(daemon: &Daemon, device: &str) -> u32 {
    let pid = daemon.json(&["device", "show", device])["worker"]["pid"].as_u64().expect("a process");
    pid.try_into().expect("a process")
}

#[test]
fn volumes_of_other_workers_are_reached_and_their_spaces_are_counted_together() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("millrace.toml");
    let uid = rustix::process::geteuid().as_raw();
    fs::write(&config, format!("[[app]]\nuid = {uid}\nvolumes = [\"*\"]\nsessions = 2\n")).unwrap();
    let daemon = Daemon::start_with(&["--isolation", "device", "--config", config.to_str().unwrap()]);
    volume(&daemon, "a", &["--size", "16M", "--backend", &format!("file:{}", daemon.path("a.img").display())]);
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    daemon.run(&["device", "create", "vm", "--nvme", "--volume", "a"]);
    let there = FastPath::open("a", &options(&daemon)).unwrap();
    let here = FastPath::open("m", &options(&daemon)).unwrap();
    let listed = sessions(&daemon);
    assert!(listed.len() == 2 && listed[0].0 != listed[1].0, "{listed:?}");
    assert!(["vm", "main"].iter().all(|worker| listed.iter().any(|(_, is)| is == worker)), "{listed:?}");
    for name in ["a", "m"] {
        let refused = FastPath::open(name, &options(&daemon)).err().expect("two are as many as there may be");
        assert_eq!(refused.errno(), rustix::io::Errno::DQUOT.raw_os_error(), "{refused}");
    }
    assert_eq!(FastPath::open("none", &options(&daemon)).err().unwrap().errno(), 122, "who has too many learns nothing");
    drop(here);
    eventually("another one may be opened", || FastPath::open("m", &options(&daemon)).ok());

    // The other worker's death is a pause.
    let bytes = pattern(0, 128 << 10, 7);
    there.write(0, &bytes, true).unwrap();
    let old = pid_of(&daemon, "vm");
    rustix::process::kill_process(rustix::process::Pid::from_raw(old.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let mut back = vec![0; bytes.len()];
    there.read(0, &mut back).unwrap();
    assert!(back == bytes);
    let new = pid_of(&daemon, "vm");
    assert_ne!(old, new);

    // When the guest's disk goes, the volume stays there for the space's sake; with the space's end all of it comes back.
    daemon.run(&["device", "delete", "vm"]);
    there.read(0, &mut back).unwrap();
    assert_eq!(sessions(&daemon).iter().filter(|(_, worker)| worker == "vm").count(), 1);
    drop(there);
    eventually("the worker that has nothing left ends", || (!fs::exists(format!("/proc/{new}")).unwrap()).then_some(()));
    let again = FastPath::open("a", &options(&daemon)).unwrap();
    again.read(0, &mut back).unwrap();
    assert!(back == bytes);
    assert!(sessions(&daemon).iter().all(|(_, worker)| worker == "main"));
    daemon.finish();
}

/// Opens a volume as another user: the kernel says of a connection who the thread was that made it.
fn open_as(uid: u32, daemon: &Daemon, volume: &str, read_only: bool) -> Result<FastPath, millrace::Error> {
    let open = || {
        let uid = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root may be anybody");
        FastPath::open(volume, &Options { read_only, ..options(daemon) })
    };
    std::thread::scope(|scope| scope.spawn(open).join().unwrap())
}

#[test]
fn who_may_open_volumes_is_said_while_the_daemon_runs() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        // The daemon's own unit tests ask in other users' names.
        return skip("volumes that other users open: only root can ask as one");
    }
    let mut daemon = Daemon::start_with(&["--isolation", "device"]);
    volume(&daemon, "a", &["--size", "1M", "--backend", &format!("file:{}", daemon.path("a.img").display())]);
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    // So the one volume is another worker's.
    daemon.run(&["device", "create", "vm", "--nvme", "--volume", "a"]);
    for path in [daemon.run_dir().parent().unwrap(), &daemon.run_dir()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o711)).unwrap();
    }
    let refused = |volume: &str| open_as(USER, &daemon, volume, false).err().map(|error| error.errno());
    let (denied, too_many) = (Some(Errno::ACCESS.raw_os_error()), Some(Errno::DQUOT.raw_os_error()));
    assert_eq!((refused("a"), refused("m")), (denied, denied));
    let wrong = |arguments: &[&str], why: &str| {
        let error = daemon.try_run(&[&["app"], arguments].concat()).expect_err("it is refused");
        assert!(error.contains(why), "{error}");
    };
    wrong(&["create", "65534", "--volume", "a", "--volume", "none"], "volume none does not exist");
    wrong(&["create", "no such user", "--volume", "a"], "there is no such user");
    wrong(&["create", "65534", "--volume", "a", "--sessions", "0"], "sessions: 1 to 65535 are possible");
    wrong(&["create", "65534"], "which volumes?");
    daemon.run(&["app", "create", "65534", "--volume", "m", "--volume", "a", "--sessions", "2"]);
    wrong(&["create", "65534", "--all-volumes"], "user 65534 has been given volumes already");
    let (here, there) = (open_as(USER, &daemon, "m", false).unwrap(), open_as(USER, &daemon, "a", false).unwrap());
    let workers: Vec<_> = sessions(&daemon).into_iter().map(|(_, worker)| worker).collect();
    assert!(["main", "vm"].iter().all(|worker| workers.contains(&(*worker).to_owned())), "{workers:?}");
    assert_eq!((refused("a"), refused("m")), (too_many, too_many));
    assert_eq!(daemon.json(&["app", "show", "65534"])["open"], 2);

    // The worker that comes after it knows what was said.
    daemon.kill_worker(Signal::KILL);
    let (bytes, mut back) = (pattern(0, 4096, 3), [0; 4096]);
    for space in [&here, &there] {
        space.write(0, &bytes, false).unwrap();
    }
    assert_eq!(refused("m"), too_many, "the other worker's sessions count from the first one on");
    daemon.run(&["app", "change", "65534", "--volume", "m"]);
    let gone = |space: &FastPath, back: &mut [u8]| space.read(0, back).err().map(|error| error.errno());
    assert_eq!(gone(&there, &mut back), Some(Errno::NODEV.raw_os_error()), "it was taken back from who had it open");
    here.read(0, &mut back).unwrap();
    assert!(back[..] == bytes[..]);
    assert_eq!((refused("a"), daemon.json(&["app", "list"])[0]["open"].as_u64()), (denied, Some(1)));
    daemon.run(&["app", "delete", "65534"]);
    assert_eq!((gone(&here, &mut back), refused("m")), (Some(Errno::NODEV.raw_os_error()), denied));
    assert!(sessions(&daemon).is_empty());
    FastPath::open("a", &options(&daemon)).unwrap().read(0, &mut back).unwrap();
    assert!(back[..] == bytes[..], "what it wrote is there for others");

    daemon.run(&["app", "create", "65534", "--all-volumes", "--read-only"]);
    daemon.restart();
    assert_eq!(open_as(USER, &daemon, "a", false).err().map(|error| error.errno()), denied, "it would write");
    open_as(USER, &daemon, "a", true).unwrap().read(0, &mut back).unwrap();
    daemon.expect_well();
}

#[test]
fn a_users_caps_hold_in_each_worker_for_what_is_open_and_for_nobody_else() {
    const USER: u32 = 65534;
    const OTHER: u32 = 65533;
    if !rustix::process::geteuid().is_root() {
        // The daemon's own unit tests ask in other users' names.
        return skip("caps of other users: only root can ask as one");
    }
    let mut daemon = Daemon::start_with(&["--isolation", "device"]);
    volume(&daemon, "a", &["--size", "1M", "--backend", &format!("file:{}", daemon.path("a.img").display())]);
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    // So the one volume is another worker's.
    daemon.run(&["device", "create", "vm", "--nvme", "--volume", "a"]);
    for path in [daemon.run_dir().parent().unwrap(), &daemon.run_dir()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o711)).unwrap();
    }
    for user in ["65534", "65533"] {
        daemon.run(&["app", "create", user, "--all-volumes"]);
    }
    let refused = daemon.try_run(&["app", "create", "0", "--all-volumes", "--iops", "5"]).expect_err("root has no caps");
    assert!(refused.contains("only the number of its sessions can be said"), "{refused}");
    let (here, there) = (open_as(USER, &daemon, "m", false).unwrap(), open_as(USER, &daemon, "a", false).unwrap());
    let other = open_as(OTHER, &daemon, "m", false).unwrap();
    let begin = |space: &FastPath, count: u64| {
        (0..count).for_each(|tag| space.begin_write(tag, 512 * tag, 0..512, false).unwrap());
    };
    let end = |space: &FastPath, mut count: usize| {
        let mut done = [Completion::default(); 8];
        while count > 0 {
            let ended = space.wait(&mut done, Duration::from_secs(60));
            assert!(ended > 0 && done[..ended].iter().all(|done| done.errno == 0), "{:?}", &done[..ended]);
            count -= ended;
        }
    };
    let held_back = || daemon.json(&["app", "show", "65534"])["held_back"].as_u64().unwrap();
    for space in [&here, &there] {
        begin(space, 8);
        end(space, 8);
    }

    // One write may go in each worker, and is paid for until long after this test.
    daemon.run(&["app", "change", "65534", "--bandwidth", "1"]);
    for space in [&here, &there] {
        begin(space, 1);
        end(space, 1);
        begin(space, 1);
    }
    eventually("one that is held in each worker", || (held_back() == 2).then_some(()));
    begin(&other, 8);
    end(&other, 8);

    // The worker that comes after it knows the caps of what is open; what was held goes first, and is paid for anew.
    daemon.kill_worker(Signal::KILL);
    end(&here, 1);
    begin(&here, 1);
    eventually("one that is held by the next worker", || (held_back() == 2).then_some(()));
    daemon.run(&["app", "change", "65534", "--bandwidth", "1G"]);
    for space in [&here, &there] {
        end(space, 1);
    }
    daemon.run(&["app", "change", "65534", "--no-caps"]);
    let shown = daemon.json(&["app", "show", "65534"]);
    assert_eq!((shown["held_back"].as_u64(), shown["open"].as_u64()), (Some(0), Some(2)));
    assert!(shown["caps"].is_null(), "{shown}");
    for space in [&here, &there] {
        begin(space, 8);
        end(space, 8);
    }
    drop((here, there, other));
    daemon.expect_well();
}

#[test]
fn the_door_is_not_closed_by_those_who_never_finish_their_words() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let door = daemon.run_dir().join("apps.sock");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            let mut stream = UnixStream::connect(&door).unwrap();
            let is_over = &is_over;
            scope.spawn(move || {
                // Until it is shown the door.
                while !is_over.load(Ordering::Relaxed) && stream.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(500));
                }
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        let opened = FastPath::open("m", &Options { timeout: Duration::from_secs(30), ..options(&daemon) });
        is_over.store(true, Ordering::Relaxed);
        opened.unwrap().read(0, &mut [0; 512]).unwrap();
    });
    daemon.finish();
}

#[test]
fn who_waits_for_a_request_need_not_wait_until_others_are_reaped() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let space = FastPath::open("m", &Options { buffer: 4096, depth: 2, ..options(&daemon) }).unwrap();
    for tag in [1, 2] {
        space.begin_read(tag, 0, 0..512).unwrap();
    }
    for byte in [7, 8] {
        space.write(512, &[byte; 512], false).expect("it leaves no completion that needs room");
    }
    let mut block = [0; 512];
    space.read(512, &mut block).unwrap();
    assert!(block == [8; 512]);
    assert_eq!(space.begin_read(3, 0, 0..512).unwrap_err().errno(), Errno::AGAIN.raw_os_error(), "two wait to be taken");
    let (mut done, mut tags) = ([Completion::default()], Vec::new());
    while space.wait(&mut done, Duration::from_secs(60)) == 1 {
        tags.push(done[0].tag);
    }
    tags.sort_unstable();
    assert_eq!(tags, [1, 2]);
    drop(space);
    daemon.finish();
}

/// The answer of a worker that stands still is long in coming.
#[test]
fn who_asks_for_the_size_keeps_no_other_thread_waiting() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let space = FastPath::open("m", &options(&daemon)).unwrap();
    let worker = Pid::from_raw(daemon.worker().expect("a worker").cast_signed()).expect("a process");
    let asks = AtomicBool::new(false);
    kill_process(worker, Signal::STOP).unwrap();
    // Until all of its threads stand still, one may answer.
    let is_still = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
    };
    let tasks = format!("/proc/{}/task", worker.as_raw_nonzero());
    eventually("a worker that stands still", || {
        fs::read_dir(&tasks).unwrap().all(|task| is_still(task.unwrap())).then_some(())
    });
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            asks.store(true, Ordering::Relaxed);
            space.refresh()
        });
        eventually("a thread that asks", || asks.load(Ordering::Relaxed).then_some(()));
        let mut begun = 0;
        eventually("requests beside it", || {
            space.begin_read(begun, 0, 0..512).unwrap();
            begun += 1;
            (begun == 20).then_some(())
        });
        assert!(!asked.is_finished(), "they have waited for the answer");
        kill_process(worker, Signal::CONT).unwrap();
        assert_eq!(asked.join().unwrap().unwrap(), 1 << 20);
    });
    let (mut done, mut ended) = ([Completion::default(); 20], 0);
    while ended < 20 {
        let taken = space.wait(&mut done, Duration::from_secs(60));
        assert!(taken > 0 && done[..taken].iter().all(|done| done.errno == 0), "{ended} of 20 have ended");
        ended += taken;
    }
    drop(space);
    daemon.finish();
}

/// Nobody serves between two workers, and who asks for a volume then waits for the next one.
#[test]
fn the_door_stays_open_between_two_workers() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let process = |pid: u32| Pid::from_raw(pid.cast_signed()).expect("a process");
    let (keeper, worker) = (process(daemon.pid()), daemon.worker().expect("a worker"));
    // The next one comes when the keeper goes on.
    kill_process(keeper, Signal::STOP).unwrap();
    kill_process(process(worker), Signal::KILL).unwrap();
    let stat = || fs::read_to_string(format!("/proc/{worker}/stat")).expect("nobody has waited for it");
    eventually("the worker's end", || stat().rsplit(')').next()?.trim_start().starts_with('Z').then_some(()));
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| FastPath::open("m", &options(&daemon)).map(|space| space.size()));
        let knocked = UnixStream::connect(daemon.run_dir().join("apps.sock"));
        kill_process(keeper, Signal::CONT).unwrap();
        knocked.expect("the door is there");
        assert_eq!(opened.join().unwrap().unwrap(), 1 << 20);
    });
    eventually_no_device(&daemon);
    daemon.finish();
}

#[test]
fn who_finds_too_many_at_the_door_is_told_so() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let door = daemon.run_dir().join("apps.sock");
    // Who says nothing is sent away in the end: then there is another crowd.
    let mut crowd = Vec::new();
    let refused = eventually("as many of this user wait as may", || {
        crowd = (0..300).map(|_| UnixStream::connect(&door).unwrap()).collect();
        let opened = FastPath::open("m", &Options { timeout: Duration::from_secs(1), ..options(&daemon) });
        opened.err().filter(|error| error.errno() == Errno::AGAIN.raw_os_error())
    });
    assert!(refused.to_string().contains("too many"), "{refused}");
    drop(crowd);
    let space = eventually("they have gone", || FastPath::open("m", &options(&daemon)).ok());
    space.read(0, &mut [0; 512]).unwrap();
    daemon.finish();
}

/// A program that speaks to its controller itself.
fn raw(daemon: &Daemon, read_only: bool) -> (Controller, QueuePair) {
    let mut stream = UnixStream::connect(daemon.run_dir().join("apps.sock")).unwrap();
    stream.write_all(format!("{{\"volume\": \"m\", \"read_only\": {read_only}}}\n").as_bytes()).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&stream, &mut [IoSliceMut::new(&mut [0; 4096])], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let rights = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    let timeout = Duration::from_secs(30);
    let transport = VfioUser::from_stream(rights.expect("a connection").into(), timeout).unwrap();
    let mut controller = Controller::attach(transport, &millrace_driver::Options { timeout, ..Default::default() }).unwrap();
    controller.start().unwrap();
    let queue = controller.create_queue_pair(&QueueOptions::default()).unwrap();
    (controller, queue)
}

/// Registers with the key 7, then holds the volume with nobody beside it.
fn shut_others_out((controller, queue): &mut (Controller, QueuePair)) -> Result<(), QueueError> {
    let ns = controller.namespace(NamespaceId(1)).unwrap();
    let buffer = controller.memory().alloc(4096).unwrap();
    queue.execute(&ns.register(7, &buffer).unwrap())?;
    queue.execute(&ns.acquire(ReservationType::EXCLUSIVE_ACCESS, 7, &buffer).unwrap())?;
    Ok(())
}

#[test]
fn a_program_keeps_others_out_for_no_longer_than_it_is_there() {
    let mut daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let space = FastPath::open("m", &options(&daemon)).unwrap();
    let busy = |space: &FastPath| space.read(0, &mut [0; 512]).err().map(|error| error.errno());
    let mut reader = raw(&daemon, true);
    let refused = shut_others_out(&mut reader).expect_err("it only reads").status().map(Status::code);
    assert_eq!(refused, Some(Status::NAMESPACE_WRITE_PROTECTED));
    for kills in [false, true] {
        let mut writer = raw(&daemon, false);
        shut_others_out(&mut writer).unwrap();
        assert_eq!(busy(&space), Some(Errno::BUSY.raw_os_error()));
        if kills {
            daemon.kill_worker(Signal::KILL);
            assert_eq!(busy(&space), Some(Errno::BUSY.raw_os_error()), "it is there yet");
        }
        drop(writer);
        eventually("the volume is everybody's again", || busy(&space).is_none().then_some(()));
    }
    drop((space, reader));
    eventually_no_device(&daemon);
    daemon.expect_well();
}

/// Six of 1 TiB are more than programs with much memory have together. Nothing is used of it.
#[test]
fn who_finds_no_room_for_his_buffer_is_told_so() {
    let daemon = Daemon::start();
    volume(&daemon, "m", &["--size", "1M", "--backend", "memory"]);
    let large = || FastPath::open("m", &Options { buffer: 1 << 40, ..options(&daemon) });
    let spaces: Vec<_> = (0..5).map(|_| large().expect("room for five")).collect();
    let error = large().err().expect("a sixth one has no room");
    assert_eq!(error.errno(), Errno::NOSPC.raw_os_error(), "{error}");
    FastPath::open("m", &options(&daemon)).expect("a small one has").read(0, &mut [0; 512]).unwrap();
    drop(spaces);
    eventually_no_device(&daemon);
    daemon.finish();
}
