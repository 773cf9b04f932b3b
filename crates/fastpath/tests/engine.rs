//! Spaces that are an engine's own (docs/hardware.md, "FastPath"): the software engine, or with the feature `sim` the hardware's own text,
//! simulated cycle by cycle. What is asked of both is the same.

use std::{fs, time::Duration};

use millrace::{Completion, Error, FastPath, Options};
use millrace_tests::{Daemon, eventually};
use rustix::{io::Errno, process::Signal};

const ENGINE: &str = if cfg!(feature = "sim") { "--engine=fvm-sim" } else { "--engine=fvm-soft:cores=2,ssds=2" };
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn on(daemon: &Daemon) -> Options {
    Options { run_dir: Some(daemon.run_dir()), engine: true, buffer: 4 * MIB, timeout: PATIENCE, ..Options::default() }
}

fn start(volume: &[&str]) -> Daemon {
    let daemon = Daemon::start_with(&[ENGINE]);
    let backend = format!("file:{}", daemon.path("v.img").display());
    daemon.run(&[&["volume", "create", "v", "--size", "16M", "--backend", &backend], volume].concat());
    daemon
}

/// Bytes that say where they are.
fn pattern(offset: u64, len: usize, seed: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..len as u64 / 8).flat_map(|at| word(offset / 8 + at)).collect()
}

/// Opens a space once one is free: what was dropped is given back by the daemon, in its time.
fn open(daemon: &Daemon) -> FastPath {
    eventually("a free space", || FastPath::open("v", &on(daemon)).ok())
}

/// From one block to more than the front makes one command of, at offsets that are no multiple of a page.
fn check_data(daemon: &Daemon, block: usize) {
    let space = FastPath::open("v", &Options { statistics: true, ..on(daemon) }).unwrap();
    // The same volume beside it by a queue, on the same engine.
    let queue = FastPath::open("v", &Options { engine: false, ..on(daemon) }).unwrap();
    let mut image = vec![0; 16 * MIB];
    for (seed, (offset, len)) in
        [(0, block), (block * 7, block * 9), (4 * KIB, 128 * KIB), (block * 3, 128 * KIB + block), (8 * MIB, 3 * MIB)]
            .into_iter()
            .enumerate()
    {
        let at = offset as u64;
        let bytes = pattern(at, len, seed as u64);
        space.write(at, &bytes, seed % 2 == 0).unwrap();
        let mut back = vec![0; len];
        queue.read(at, &mut back).unwrap();
        assert!(back == bytes, "{len} bytes at {offset} by copies");
        // From the buffer, at an odd place there, in one request; and back by the other way.
        let other = pattern(at, len, seed as u64 + 1000);
        space.fill(4, &other);
        space.begin_write(9, at, 4..4 + len, false).unwrap();
        let mut done = [Completion::default()];
        assert_eq!(space.wait(&mut done, PATIENCE), 1);
        assert_eq!((done[0].tag, done[0].errno, done[0].bytes), (9, 0, len as u64));
        queue.read(at, &mut back).unwrap();
        assert!(back == other, "{len} bytes at {offset} from the buffer");
        queue.write(at, &bytes, true).unwrap();
        space.fill(0, &vec![0xee; len + 8]);
        space.begin_read(10, at, 4..4 + len).unwrap();
        assert_eq!(space.wait(&mut done, PATIENCE), 1);
        assert_eq!((done[0].tag, done[0].errno), (10, 0));
        let mut direct = vec![0; len + 8];
        space.take(0, &mut direct);
        assert!(direct[4..4 + len] == bytes && direct[..4] == [0xee; 4] && direct[4 + len..] == [0xee; 4]);
        image[offset..offset + len].copy_from_slice(&bytes);
    }
    space.write_zeroes(9 * MIB as u64, MIB as u64).unwrap();
    image[9 * MIB..10 * MIB].fill(0);
    space.flush().unwrap();
    let failed = space.deallocate(0, block as u64).unwrap_err();
    assert_eq!(failed.errno(), Errno::OPNOTSUPP.raw_os_error(), "{failed}");
    let taken = space.statistics().unwrap();
    assert_eq!((taken.reads.requests, taken.writes.requests), (5, 10));
    drop((space, queue));
    assert!(fs::read(daemon.path("v.img")).unwrap() == image, "the volume's file");
}

#[test]
fn a_program_reaches_the_engines_own_front() {
    let daemon = start(&[]);
    check_data(&daemon, 512);
    eventually("the sessions' devices are gone", || {
        daemon.json(&["device", "list"]).as_array().is_some_and(Vec::is_empty).then_some(())
    });
    daemon.finish();
}

#[test]
fn blocks_of_4096_bytes() {
    let daemon = start(&["--block-size", "4096"]);
    check_data(&daemon, 4096);
    daemon.finish();
}

/// As many requests as there are tags, of two programs, again and again.
#[test]
fn full_spaces_go_round() {
    let daemon = start(&[]);
    let spaces = [open(&daemon), open(&daemon)];
    let refused = FastPath::open("v", &on(&daemon)).err().expect("there are two spaces");
    assert!(matches!(refused, Error::NoEngine(_)) && refused.to_string().contains("others have all"), "{refused}");
    let rounds = if cfg!(feature = "sim") { 3 } else { 50 };
    for round in 0..rounds {
        for (number, space) in spaces.iter().enumerate() {
            for tag in 0..32_usize {
                let at = (number * 32 + tag) * 4096;
                space.fill(tag * 4096, &pattern(at as u64, 4096, round));
                space.begin_write(tag as u64, at as u64, tag * 4096..(tag + 1) * 4096, false).unwrap();
            }
            assert!(matches!(space.begin_flush(99), Err(Error::Full)));
        }
        for space in &spaces {
            let (mut done, mut seen) = ([Completion::default(); 32], 0_u32);
            while seen != u32::MAX {
                let taken = space.wait(&mut done, PATIENCE);
                assert!(taken > 0, "round {round}: {seen:#x} have ended");
                for completion in &done[..taken] {
                    assert_eq!((completion.errno, seen >> completion.tag & 1), (0, 0), "tag {}", completion.tag);
                    seen |= 1 << completion.tag;
                }
            }
        }
        let mut back = vec![0; 64 * 4096];
        spaces[0].read(0, &mut back).unwrap();
        assert!(back == pattern(0, 64 * 4096, round), "round {round}");
    }
    drop(spaces);
    daemon.finish();
}

/// Requests of more commands than the space was opened for.
#[test]
fn a_space_may_hold_fewer_than_the_engine() {
    let daemon = start(&[]);
    for depth in [1, 4, 31, 1023] {
        let space = eventually("a free space", || FastPath::open("v", &Options { depth, ..on(&daemon) }).ok());
        let bytes = pattern(0, 6 * MIB, depth.into());
        space.write(0, &bytes, false).unwrap();
        space.fill(0, &bytes[..4 * MIB]);
        space.begin_write(5, 8 << 20, 0..4 * MIB, false).unwrap();
        let mut done = [Completion::default()];
        assert_eq!((space.wait(&mut done, PATIENCE), done[0].errno), (1, 0), "depth {depth}");
        let mut back = vec![0; bytes.len()];
        space.read(0, &mut back).unwrap();
        assert!(back == bytes, "depth {depth}");
    }
    daemon.finish();
}

/// A program that ends with requests in progress leaves nothing behind; neither does one whose worker ends.
#[test]
fn spaces_come_back() {
    let daemon = start(&[]);
    for round in 0..6_u64 {
        let space = open(&daemon);
        for tag in 0..16 {
            space.begin_write(tag, tag * MIB as u64, 0..MIB, round % 2 == 0).unwrap();
        }
        drop(space);
    }
    let space = open(&daemon);
    space.write(0, &[1; 512], false).unwrap();
    daemon.kill_worker(Signal::KILL);
    // The next one has no engine like it: the program is told, and opens another space.
    let failed = space.read(0, &mut [0; 512]).expect_err("its engine is gone");
    assert_eq!(failed.errno(), Errno::NODEV.raw_os_error(), "{failed}");
    drop(space);
    let mut back = [0; 512];
    open(&daemon).read(0, &mut back).unwrap();
    assert_eq!(back, [1; 512]);
    daemon.finish();
}

/// A queue on an engine ends with it as well: whoever waits there is told, and has another one.
#[test]
fn queues_on_an_engine_end_with_it() {
    let daemon = start(&[]);
    for events in [false, true] {
        let options = || Options { engine: false, events, ..on(&daemon) };
        let space = FastPath::open("v", &options()).unwrap();
        for tag in 0..16 {
            space.begin_write(tag, tag * MIB as u64, 0..MIB, false).unwrap();
        }
        daemon.kill_worker(Signal::KILL);
        let lost = Errno::NODEV.raw_os_error();
        let (mut done, mut ended) = ([Completion::default(); 16], 0);
        while ended < 16 {
            let taken = space.wait(&mut done, PATIENCE);
            assert!(taken > 0, "{ended} of 16 have ended");
            for completion in &done[..taken] {
                assert!([0, lost].contains(&completion.errno), "{completion:?}");
            }
            ended += taken;
        }
        let failed = space.read(0, &mut [0; 512]).expect_err("its engine is gone");
        assert_eq!(failed.errno(), lost, "{failed}");
        drop(space);
        FastPath::open("v", &options()).unwrap().read(0, &mut [0; 512]).unwrap();
    }
    daemon.finish();
}

#[test]
fn without_an_engine_there_is_no_front() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "v", "--size", "16M", "--backend", "memory"]);
    let refused = FastPath::open("v", &on(&daemon)).err().expect("no engine");
    assert_eq!(refused.errno(), Errno::OPNOTSUPP.raw_os_error());
    assert!(refused.to_string().contains("--engine"), "{refused}");
    let events = FastPath::open("v", &Options { events: true, ..on(&daemon) }).err().expect("no events");
    assert_eq!(events.errno(), Errno::INVAL.raw_os_error());
    daemon.finish();
}
