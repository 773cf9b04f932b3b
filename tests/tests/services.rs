//! Stock Linux guests on disks made of services, which change while the guests write.

use std::{
    path::PathBuf,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use millrace_tests::{
    Boot, Daemon, Guest, Load, LoopDevice, PATIENCE, SharingFiles, SmallFiles, Work, eventually, repository, seats, skip,
    unless_heavy,
};
use rustix::process::Signal;

fn health(daemon: &Daemon, service: &str) -> String {
    daemon.service("disk", service)["health"].as_str().expect("a service's health").to_owned()
}

/// What the service says of something, if it does.
fn fact(daemon: &Daemon, service: &str, name: &str) -> Option<String> {
    let status = daemon.service("disk", service);
    let fact = status["facts"].as_array()?.iter().find(|fact| fact[0] == name)?;
    fact[1].as_str().map(str::to_owned)
}

/// The guest's load, in which every block is verified, goes on.
fn alive(guest: &mut Guest) {
    guest.send("alive");
    guest.wait_mark("alive");
}

fn key(daemon: &Daemon) -> PathBuf {
    let key = daemon.path("disk.key");
    std::fs::write(&key, "5a".repeat(32)).expect("a key file");
    key
}

/// A leg is lost and replaced, services are put in and taken out, and the worker dies again and again: the guest writes on.
#[test]
fn a_guest_does_not_notice_what_becomes_of_its_services() {
    let daemon = Daemon::start();
    let [a, b, c] = ["a", "b", "c"].map(|leg| format!("file:{}", daemon.path(leg).display()));
    let stack = format!("throttle(iops=100K) | crypt(key=file:{}) | mirror({a}, {b})", key(&daemon).display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    let mut guest = Boot::scenario("load").socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    alive(&mut guest);

    daemon.run(&["volume", "command", "disk", "mirror", "fail", "leg=0"]);
    assert_eq!(health(&daemon, "mirror"), "degraded");
    alive(&mut guest);
    daemon.run(&["volume", "replace", "disk", &a, &c]);
    for round in 0..unless_heavy(45, 200) {
        sleep(Duration::from_millis(100 + round * 79 % 400));
        daemon.kill_worker(Signal::KILL);
    }
    alive(&mut guest);
    eventually("the new leg is full", || (health(&daemon, "mirror") == "good").then_some(()));

    daemon.run(&["volume", "insert", "disk", "meter(tenant=acme)"]);
    daemon.run(&["volume", "remove", "disk", "throttle"]);
    daemon.run(&["volume", "command", "disk", "mirror", "fail", "leg=1"]);
    alive(&mut guest);
    guest.send("enough");
    guest.finish();
    eventually("the account has the tenant", || {
        let bill = daemon.run(&["usage", "--by", "tenant", "--csv"]);
        bill.lines().any(|line| line.starts_with("acme,")).then_some(())
    });
    daemon.finish();
}

/// What the README says under `title`, up to the next text: one command of the shell after another.
fn of_the_readme(title: &str) -> Vec<String> {
    let text = std::fs::read_to_string(repository().join("README.md")).expect("the README");
    let lines = text.lines().skip_while(|line| !line.starts_with(title)).skip(1);
    let block = lines.skip_while(|line| line.is_empty()).take_while(|line| line.starts_with("    "));
    let block: Vec<_> = block.map(str::trim).collect();
    let commands: Vec<_> = block.join("\n").replace("\\\n", "").lines().map(str::to_owned).collect();
    assert!(!commands.is_empty(), "the README has no commands under {title:?}");
    commands
}

/// A command of the README, with files in the daemon's own directory.
fn as_the_readme_says(daemon: &Daemon, command: &str) {
    let command = command.replace("/etc/", "/srv/").replace("/srv/", &format!("{}/", daemon.path("").display()));
    println!("  $ {command}");
    let script = format!("millrace() {{ '{}' \"$@\"; }}\n{command}", Daemon::binary().display());
    let mut shell = Command::new("sh");
    shell.args(["-ec", &script]).env("MILLRACE_RUN_DIR", daemon.run_dir());
    assert!(shell.status().expect("a shell").success(), "{command}");
}

/// What the README tells a new user to do gives a running guest an enciphered, mirrored, throttled disk, and pulls a leg under a load in
/// which every block is verified.
#[test]
fn a_running_guest_gets_the_disk_of_the_readme_and_does_not_notice_that_a_leg_is_pulled() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "data", "--backend", "memory", "--size", "64M"]);
    daemon.run(&["device", "create", "vm1", "--nvme"]);
    daemon.run(&["device", "attach", "vm1", "data"]);
    let mut guest = Boot::scenario("load").set("DISK", "nvme0n2").socket(&daemon.socket("vm1")).start(&seats(1));
    eventually("the guest reads its first disk", || (commands(&daemon, ["vm1"]) > [0]).then_some(()));
    let health = || daemon.service("safe", "mirror")["health"].as_str().expect("a service's health").to_owned();
    let mut pulled = 0;
    for command in of_the_readme("An enciphered, mirrored, throttled disk is one line") {
        as_the_readme_says(&daemon, &command);
        if command.contains(" device attach ") {
            guest.wait_mark("loaded");
            alive(&mut guest);
        } else if command.contains(" mirror fail ") {
            assert_eq!(health(), "degraded");
            pulled += 1;
            alive(&mut guest);
        } else if command.contains(" mirror rebuild ") {
            eventually("the leg is full again", || (health() == "good").then_some(()));
            alive(&mut guest);
        }
    }
    assert_eq!(pulled, 1, "the README pulls one leg");
    guest.send("enough");
    guest.finish();
    daemon.finish();
}

/// The worker dies again and again under a load in which every block is verified: of no block that was being written is lost what is kept with
/// it, be it its tag, its checksum or its metadata.
#[test]
fn a_guest_does_not_notice_that_the_worker_of_a_disk_that_keeps_something_with_each_block_dies() {
    for (service, settings) in [
        ("crypt", "mode=authenticated, save-after=200ms, key=file:KEY, "),
        ("integrity", "close-after=200ms, "),
        // Its kernel has them checked, too: they are protection information.
        ("metadata", ""),
    ] {
        let daemon = Daemon::start();
        let settings = settings.replace("KEY", &key(&daemon).display().to_string());
        let stack = format!("{service}({settings}file:{})", daemon.path("a").display());
        let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
        let mut guest = Boot::scenario("load").socket(&socket).start(&seats(1));
        guest.wait_mark("loaded");
        alive(&mut guest);
        for round in 0..unless_heavy(15, 100) {
            sleep(Duration::from_millis(100 + round * 79 % 400));
            daemon.kill_worker(Signal::KILL);
        }
        alive(&mut guest);
        guest.send("enough");
        guest.finish();
        assert_eq!(health(&daemon, service), "good");
        daemon.finish();
    }
}

/// Re-keyings of a volume, if any is going on.
fn rekeyings(daemon: &Daemon) -> usize {
    daemon.service("disk", "crypt")["progress"].as_array().map_or(0, Vec::len)
}

/// A disk of either mode gets another key, slowly, so that the worker dies on the way, under a load in which every block is verified.
#[test]
fn a_guest_does_not_notice_that_its_disk_is_re_keyed() {
    for mode in ["xts", "authenticated"] {
        let daemon = Daemon::start();
        let (key, leg) = (key(&daemon), daemon.path("a"));
        let stack = |rate: &str| {
            format!("crypt(mode={mode}, rekey-rate={rate}, key=file:{}, file:{})", key.display(), leg.display())
        };
        let socket = daemon.disk("disk", &["--stack", &stack("256K"), "--size", "256M"], &[]);
        let mut guest = Boot::scenario("load").socket(&socket).start(&seats(1));
        guest.wait_mark("loaded");
        alive(&mut guest);
        daemon.run(&["volume", "command", "disk", "crypt", "rekey"]);
        for round in 0..unless_heavy(5, 50) {
            sleep(Duration::from_millis(100 + round * 79 % 400));
            daemon.kill_worker(Signal::KILL);
            if round == 0 {
                // Later the load may have written everything anew, which is as good.
                assert_eq!(rekeyings(&daemon), 1, "{mode}: it goes on");
            }
        }
        alive(&mut guest);
        daemon.run(&["volume", "change", "disk", "--stack", &stack("0")]);
        eventually("everything has the new key", || (rekeyings(&daemon) == 0).then_some(()));
        alive(&mut guest);
        guest.send("enough");
        guest.finish();
        assert_eq!(health(&daemon, "crypt"), "good");
        daemon.finish();
    }
}

/// As many legs of a volume with parity as there is redundancy are pulled, and one of them comes back as another one; then others are pulled
/// and come back. The worker dies while there is no redundancy: the guest writes on, and the parity fits.
fn legs_beside_parity_are_lost(redundancy: usize) {
    let daemon = Daemon::start();
    let [a, b, c, d, new] = ["a", "b", "c", "d", "new"].map(|leg| format!("file:{}", daemon.path(leg).display()));
    let legs = [&a, &b, &c, &d].map(String::as_str)[..redundancy + 2].join(", ");
    let stack = format!("parity(redundancy={redundancy}, {legs})");
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    let mut guest = Boot::scenario("load").socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    alive(&mut guest);
    let command = |command: &str, leg: &usize| {
        daemon.run(&["volume", "command", "disk", "parity", command, &format!("leg={leg}")]);
    };
    let fail = |legs: &[usize]| {
        for leg in legs {
            command("fail", leg);
        }
        assert_eq!(health(&daemon, "parity"), "degraded");
    };
    let are_full = || eventually("the legs are full", || (health(&daemon, "parity") == "good").then_some(()));

    let lost = &[1, 2][..redundancy];
    fail(lost);
    alive(&mut guest);
    for round in 0..unless_heavy(5, 50) {
        sleep(Duration::from_millis(100 + round * 79 % 400));
        daemon.kill_worker(Signal::KILL);
    }
    alive(&mut guest);
    // Parity that a killed worker left behind is made right first; until then no leg is exchanged.
    eventually("a leg is exchanged", || daemon.try_run(&["volume", "replace", "disk", &b, &new]).ok());
    lost[1..].iter().for_each(|leg| command("rebuild", leg));
    alive(&mut guest);
    are_full();

    let lost = &[0, 3][..redundancy];
    fail(lost);
    alive(&mut guest);
    for leg in lost {
        command("rebuild", leg);
    }
    are_full();
    alive(&mut guest);
    guest.send("enough");
    guest.finish();

    daemon.run(&["volume", "command", "disk", "parity", "scrub"]);
    let found = eventually("the parity was checked", || {
        let is_over = daemon.service("disk", "parity")["progress"].as_array().is_none_or(Vec::is_empty);
        fact(&daemon, "parity", "scrub").filter(|_| is_over)
    });
    assert!(found.contains(" 0 blocks do not fit, 0 rows unreadable"), "{found}");
    daemon.finish();
}

#[test]
fn a_guest_does_not_notice_that_a_leg_beside_parity_is_lost() {
    legs_beside_parity_are_lost(1);
}

#[test]
fn a_guest_does_not_notice_that_two_legs_beside_two_parities_are_lost() {
    legs_beside_parity_are_lost(2);
}

/// How much is done of how much, of what goes on in a service; `None` when nothing does.
fn progress(daemon: &Daemon, service: &str, what: &str) -> Option<(u64, u64)> {
    let status = daemon.service("disk", service);
    let progress = status["progress"].as_array()?.first()?;
    assert_eq!(progress["what"], what, "{status}");
    let number = |name: &str| progress[name].as_u64().unwrap_or_else(|| panic!("{status}"));
    Some((number("done"), number("total")))
}

/// Watches what goes on in a service for three steps: what is done only grows, and what there is stays the same.
fn expect_steps(daemon: &Daemon, service: &str, what: &str) {
    let mut seen: Vec<(u64, u64)> = Vec::new();
    eventually(what, || {
        let now = progress(daemon, service, what).unwrap_or_else(|| panic!("{service}: it is over, after {seen:?}"));
        seen.push(now);
        seen.dedup();
        (seen.len() > 3).then_some(())
    });
    println!("  {service}: {what}: {seen:?}");
    let total = seen[0].1;
    assert!(seen.is_sorted() && seen.iter().all(|(done, all)| done <= all && *all == total), "{service}: {what}: {seen:?}");
}

/// A scrub and filling a leg tell how far they are.
#[test]
fn progress_is_told_of_a_scrub_and_of_a_leg_that_is_filled() {
    let daemon = Daemon::start();
    let legs = ["a", "b", "c", "d"].map(|leg| format!("file:{}", daemon.path(leg).display()));
    let [a, b, c, d] = legs.each_ref();
    for (service, what) in [("mirror", "resync (regions)"), ("parity", "rebuild (regions)")] {
        // So slow that it goes on for longer than it is looked at, however long a look takes.
        let stack = |rate: &str, second: &str| format!("{service}(rate={rate}, region=256K, {a}, {second}, {c})");
        daemon.run(&["volume", "create", "disk", "--stack", &stack("512K", b), "--size", "32M"]);
        daemon.run(&["volume", "command", "disk", service, "scrub"]);
        expect_steps(&daemon, service, "scrub");
        daemon.run(&["volume", "command", "disk", service, "stop"]);
        assert_eq!(progress(&daemon, service, "scrub"), None, "{service}");

        daemon.run(&["volume", "replace", "disk", b, d]);
        expect_steps(&daemon, service, what);
        daemon.run(&["volume", "change", "disk", "--stack", &stack("1G", d)]);
        eventually("the leg is full", || (health(&daemon, service) == "good").then_some(()));
        assert_eq!(progress(&daemon, service, what), None, "{service}");
        daemon.run(&["volume", "delete", "disk"]);
        for leg in ["a", "b", "c", "d"] {
            let _ = std::fs::remove_file(daemon.path(leg));
        }
    }
    daemon.finish();
}

/// A volume goes from file to file, to a block device and on to a share of a disk, and the worker dies meanwhile; then what it was on is gone,
/// and the guest, every block of which is verified, writes on.
#[test]
fn a_guest_does_not_notice_that_its_volume_goes_elsewhere() {
    let daemon = Daemon::start();
    let [a, b, pool] = ["a", "b", "pool"].map(|name| format!("file:{}", daemon.path(name).display()));
    let stack = format!("crypt(key=file:{}) | {a}", key(&daemon).display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    daemon.run(&["disk", "create", "pool", &pool, "--size", "320M"]);
    let mut guest = Boot::scenario("load").socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    alive(&mut guest);

    let moves = |guest: &mut Guest, to: &str| {
        // So slowly that the worker dies on the way, however long each death takes.
        daemon.run(&["volume", "migrate", "disk", "--to", to, "--rate", "128K"]);
        for round in 0..unless_heavy(5, 50) {
            sleep(Duration::from_millis(100 + round * 79 % 400));
            daemon.kill_worker(Signal::KILL);
        }
        let view = daemon.json(&["volume", "show", "disk"]);
        assert!(view["migration"].is_object(), "it goes on: {view}");
        daemon.run(&["volume", "migrate", "disk", "--rate", "0", "--wait"]);
        alive(guest);
    };
    let is_gone = |old: &str| std::fs::remove_file(daemon.path(old)).expect("the old place is nobody's");
    moves(&mut guest, &b);
    is_gone("a");
    let device = LoopDevice::over(&daemon.path("device"), 320);
    match &device {
        Ok(device) => {
            moves(&mut guest, &format!("file:{}", device.path().display()));
            is_gone("b");
        }
        Err(why) => skip(&format!("a move to a block device: {why}")),
    }
    moves(&mut guest, "share | volume:pool");
    match device {
        Ok(device) => {
            device.end();
            eventually("a device that is nobody's", || (!device.is_there()).then_some(()));
        }
        Err(_) => is_gone("b"),
    }
    let stack = daemon.json(&["volume", "show", "disk"])["stack"].as_str().expect("a stack").to_owned();
    assert!(stack.ends_with("| share | volume:pool"), "{stack}");
    daemon.kill_worker(Signal::KILL);
    alive(&mut guest);
    // Under the volume on it.
    daemon.run(&["volume", "migrate", "pool", "--to", &a, "--wait"]);
    std::fs::remove_file(daemon.path("pool")).expect("the old place is nobody's");
    alive(&mut guest);
    guest.send("enough");
    guest.finish();
    daemon.finish();
}

/// A volume is copied to an enciphered mirror while its guest writes on, with the worker dying and the copy standing still on the way. Another
/// guest finds on the copy whatever the first one had flushed before it began.
#[test]
fn a_guest_does_not_notice_that_its_volume_is_copied() {
    let daemon = Daemon::start();
    let [disk, first, second] = ["disk", "first", "second"].map(|name| format!("file:{}", daemon.path(name).display()));
    let socket = daemon.disk("disk", &["--backend", &disk, "--size", "320M"], &[]);
    let stack = format!("crypt(key=file:{}) | mirror({first}, {second})", key(&daemon).display());
    daemon.run(&["volume", "create", "copy", "--stack", &stack, "--size", "320M"]);
    let seats = seats(1);
    let mut writer = Boot::scenario("killed").set("ROLE", "writer").socket(&socket).start(&seats);
    let flushed = (0..8).map(|_| writer.wait_mark("flushed")).last().expect("a round");
    let goes_on = || all_go_on(&daemon, ["disk"], 50);

    let state = || daemon.json(&["copy", "show", "job"])["state"].as_str().expect("a state").to_owned();
    // What the guest has written takes longer than all that is done meanwhile.
    daemon.run(&["copy", "disk", "copy", "--name", "job", "--rate", "64K"]);
    for round in 0..unless_heavy(3, 30) {
        sleep(Duration::from_millis(100 + round * 79 % 400));
        daemon.kill_worker(Signal::KILL);
    }
    daemon.run(&["copy", "pause", "job"]);
    daemon.kill_worker(Signal::KILL);
    goes_on();
    assert_eq!(state(), "paused", "it stays so, and the guest writes");
    daemon.run(&["copy", "resume", "job", "--rate", "0"]);
    eventually("the end of the copy", || (state() == "done").then_some(()));
    goes_on();
    writer.kill();

    daemon.run(&["device", "create", "copy", "--nvme"]);
    daemon.run(&["device", "attach", "copy", "copy"]);
    let checker = Boot::scenario("killed").set("ROLE", "checker").set("ROUNDS", &flushed);
    checker.socket(&daemon.socket("copy")).run(&seats);
    daemon.finish();
}

/// Where files can share blocks the system copies: nothing is read or written, and the copy takes no room. What is written to it then is its
/// own.
#[test]
fn a_copy_on_a_file_system_that_shares_blocks_takes_no_room() {
    const BYTES: u64 = 128 << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("files");
    std::fs::create_dir(&place).expect("an empty folder");
    let files = match SharingFiles::mount(&folder.path().join("device"), &place, 512) {
        Ok(files) => files,
        Err(why) => return skip(&format!("a copy that shares blocks: {why}")),
    };
    let [data, copy] = ["data", "copy"].map(|name| place.join(name));
    // No word of it is zero, and no page is like another one.
    let text: Vec<u8> = (0..BYTES / 8).flat_map(|word| (word << 20 | 1).to_le_bytes()).collect();
    std::fs::write(&data, &text).expect("room for the data");
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "data", "--backend", &format!("file:{}", data.display())]);
    let backend = format!("file:{}", copy.display());
    daemon.run(&["volume", "create", "copy", "--backend", &backend, "--size", &BYTES.to_string()]);
    let before = files.used();
    daemon.run(&["copy", "data", "copy", "--name", "job", "--wait"]);
    let view = daemon.json(&["copy", "show", "job"]);
    let done = ["offloaded", "moved", "skipped"].map(|part| view[part].as_u64());
    assert_eq!(done, [Some(BYTES), Some(0), Some(0)], "{view}");
    let more = files.used().saturating_sub(before);
    assert!(more < BYTES / 10, "{BYTES} bytes were copied, and the copy takes {more}");
    let is_like_it = || std::fs::read(&copy).expect("the copy") == text;
    assert!(is_like_it(), "the copy is not what was copied");

    daemon.run(&["device", "create", "copy", "--nvme"]);
    daemon.run(&["device", "attach", "copy", "copy"]);
    let load = Load::start(&daemon.socket("copy"), &Work::default());
    all_go_on(&daemon, ["copy"], 1000);
    assert!(load.finish() > 0);
    assert!(!is_like_it(), "the copy was written");
    assert!(std::fs::read(&data).expect("the data") == text, "the data are no longer what they were");
    daemon.finish();
}

/// The worker dies while most of what a guest wrote is only on the fast leg; then the cache is taken out and its fast leg is gone. What the guest wrote
/// before all that is verified in the end.
#[test]
fn a_guest_does_not_notice_that_its_cache_is_taken_out() {
    let daemon = Daemon::start();
    let [fast, slow] = ["fast", "slow"].map(|leg| format!("file:{}", daemon.path(leg).display()));
    // Two lines a second: what is kept alone is more than what goes back while the worker dies.
    let stack = format!("cache(mode=back, rate=64K, {fast}(size=64M)) | {slow}");
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    let mut guest = Boot::scenario("load").set("KEPT", "8m").socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    alive(&mut guest);
    let dirty = || fact(&daemon, "cache", "dirty lines").and_then(|lines| lines.parse::<u64>().ok());
    assert!(dirty().is_some_and(|lines| lines > 100), "it writes back later: {:?}", dirty());
    for round in 0..unless_heavy(3, 50) {
        sleep(Duration::from_millis(100 + round * 79 % 400));
        daemon.kill_worker(Signal::KILL);
    }
    assert!(dirty().is_some_and(|lines| lines > 100), "still so: {:?}", dirty());
    alive(&mut guest);
    daemon.run(&["volume", "remove", "disk", "cache"]);
    assert_eq!(daemon.json(&["volume", "show", "disk"])["stack"], slow.as_str());
    std::fs::remove_file(daemon.path("fast")).expect("the fast leg is nobody's");
    alive(&mut guest);
    daemon.kill_worker(Signal::KILL);
    alive(&mut guest);
    guest.send("enough");
    guest.finish();
    daemon.finish();
}

/// A file system becomes full, under one leg of a guest's mirror and under another disk of the guest's: of the leg the guest does not notice,
/// of the disk it is told that there is no room. When there is, both go on.
#[test]
fn a_full_file_system_costs_a_leg_or_is_told_to_the_guest() {
    let folder = tempfile::tempdir().expect("a folder");
    let small = match SmallFiles::mount(folder.path(), 12) {
        Ok(small) => small,
        Err(why) => return skip(&format!("a full file system: {why}")),
    };
    let daemon = Daemon::start();
    let [leg, full] = ["leg", "full"].map(|name| folder.path().join(name).display().to_string());
    let stack = format!("mirror(file:{leg}, file:{})", daemon.path("other").display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    daemon.run(&["volume", "create", "full", "--backend", &format!("file:{full}"), "--size", "64M"]);
    let mut guest = Boot::scenario("load").set("KEPT", "8m").socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    eventually("the leg has failed", || (health(&daemon, "mirror") == "degraded").then_some(()));
    let legs = ["leg 0", "leg 1"].map(|leg| fact(&daemon, "mirror", leg).expect("a leg's state"));
    assert_eq!(legs, ["failed", "good"]);
    let log = daemon.log();
    let says = |what: &str, path: &str| log.lines().any(|line| line.contains(what) && line.contains(path));
    assert!(says("No space left on device", &leg) && log.contains("a leg failed and is out of use"), "{log}");
    alive(&mut guest);

    daemon.run(&["device", "attach", "disk", "full", "--nsid", "2"]);
    guest.send("full nvme0n2");
    guest.wait_mark("full");
    let log = daemon.log();
    let told = |line: &&str| line.contains("No space left on device") && line.contains(&full);
    assert!(log.lines().any(|line| told(&line)), "{log}");
    small.grow(512);
    guest.send("room nvme0n2");
    guest.wait_mark("room");
    daemon.run(&["volume", "command", "disk", "mirror", "rebuild", "leg=0"]);
    eventually("the leg is full again", || (health(&daemon, "mirror") == "good").then_some(()));
    daemon.run(&["volume", "command", "disk", "mirror", "fail", "leg=1"]);
    alive(&mut guest);
    guest.send("enough");
    guest.finish();
    daemon.finish();
}

/// Reads, bytes read, writes and bytes written, as the tenant's account has them.
fn account(daemon: &Daemon, tenant: &str) -> Option<[u64; 4]> {
    let rows = daemon.json(&["usage", "--by", "tenant"]);
    let row = rows.as_array()?.iter().find(|row| row["name"] == tenant)?;
    Some(["reads", "read_bytes", "writes", "written_bytes"].map(|count| row[count].as_u64().expect("a count")))
}

/// The same as the meter has them now.
fn metered(daemon: &Daemon) -> [u64; 4] {
    let numbers = |name: &str| -> Vec<u64> {
        let said = fact(daemon, "meter", name).expect("what it counted");
        said.split(' ').filter_map(|word| word.parse().ok()).collect()
    };
    [numbers("read"), numbers("written")].concat().try_into().expect("requests and bytes")
}

/// What a guest gets through a cap in some seconds is the cap, at most; and on the account is what the guest says to have done, exactly.
#[test]
fn a_cap_is_held_and_the_account_is_right() {
    let daemon = Daemon::start();
    let stack = "meter(tenant=acme) | throttle(read_iops=400, write_bandwidth=2M) | memory";
    let socket = daemon.disk("disk", &["--stack", stack, "--size", "256M"], &[]);
    let mut guest = Boot::scenario("capped").set("READS", 400).set("WRITTEN", 2 << 20).socket(&socket).start(&seats(1));
    guest.wait_mark("await begin");
    // Its kernel has looked for partitions.
    let before = metered(&daemon);
    guest.send("begin");
    let said = guest.wait_mark("did");
    guest.finish();
    let did: Vec<u64> = said.split(' ').map(|number| number.parse().expect("a number")).collect();
    let [read, written] = did[..] else { panic!("{said}") };
    assert!(read > 0 && written > 0, "{said}");
    let expected = [read / 4096, read, written / 4096, written];
    let expected = std::array::from_fn(|at| before[at] + expected[at]);
    assert_eq!(metered(&daemon), expected, "{said} after {before:?}");
    eventually("the account has it all", || (account(&daemon, "acme") == Some(expected)).then_some(()));
    daemon.finish();
}

/// The whole daemon is killed while a client writes, again and again: what the meter had counted two lines before is on the account
/// afterwards, and what comes to it from then on is what was done from then on.
#[test]
fn the_account_outlives_the_daemon_and_charges_nothing_twice() {
    let mut daemon = Daemon::start();
    let stack = format!("meter(tenant=acme) | file:{}", daemon.path("a").display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "64M"], &[]);
    let requests = |daemon: &Daemon| account(daemon, "acme").map_or(0, |[reads, _, writes, _]| reads + writes);
    let by_meter = |daemon: &Daemon| {
        let [reads, _, writes, _] = metered(daemon);
        reads + writes
    };
    for _ in 0..3 {
        let (before, begun) = (requests(&daemon), by_meter(&daemon));
        let load = Load::start(&socket, &Work::default());
        let now = eventually("it is metered", || Some(by_meter(&daemon)).filter(|now| *now > begun));
        // The first line may be of a reading before this one, the second is not.
        for _ in 0..2 {
            let before = requests(&daemon);
            eventually("the account grows", || (requests(&daemon) > before).then_some(()));
        }
        daemon.crash_and_restart();
        load.kill();
        let (kept, least) = (requests(&daemon), before + now - begun);
        assert!(kept >= least, "{kept} are on the account, and the meter had counted {least} two lines before");
    }
    // Of the client that was killed last nothing comes any more.
    let before = requests(&daemon);
    let load = Load::start(&socket, &Work::default());
    eventually("it is metered", || (metered(&daemon)[2] > 1000).then_some(()));
    let counted = load.finish();
    let done = by_meter(&daemon);
    // What was under way when the client was told to end is done as well.
    assert!((counted..=counted + 16).contains(&done), "the meter has begun anew with the daemon: {counted} and {done}");
    eventually("the account has it all", || (requests(&daemon) == before + done).then_some(()));
    daemon.finish();
}

/// Commands that devices have finished, all at one time.
fn commands<const N: usize>(daemon: &Daemon, devices: [&str; N]) -> [u64; N] {
    eventually("all devices answer", || {
        let list = daemon.json(&["device", "list"]);
        let finished = |name: &&str| {
            let device = list.as_array()?.iter().find(|device| device["name"] == *name)?;
            // Of one that has not answered in time the numbers are zeroes.
            (device["state"] == "ready").then_some(())?;
            Some(device["counters"]["read_commands"].as_u64()? + device["counters"]["write_commands"].as_u64()?)
        };
        devices.iter().map(finished).collect::<Option<Vec<_>>>()?.try_into().ok()
    })
}

/// Waits until each of the devices has finished so many commands more; how many they have finished together meanwhile.
fn all_go_on<const N: usize>(daemon: &Daemon, devices: [&str; N], more: u64) -> u64 {
    let before = commands(daemon, devices);
    eventually("all go on", || {
        let now = commands(daemon, devices);
        let go_on = now.iter().zip(before).all(|(now, before)| *now >= before + more);
        go_on.then(|| now.iter().sum::<u64>() - before.iter().sum::<u64>())
    })
}

/// How many commands each of the devices finishes until all together have finished so many.
fn parts<const N: usize>(daemon: &Daemon, devices: [&str; N], count: u64) -> [u64; N] {
    let before = commands(daemon, devices);
    eventually("so many commands of all", || {
        let now = commands(daemon, devices);
        let done: [u64; N] = std::array::from_fn(|at| now[at] - before[at]);
        (done.iter().sum::<u64>() >= count).then_some(done)
    })
}

/// Two volumes want more of a disk than there is: both go on, and the cap of the disk's group is held, and changed under them. How much each
/// gets is a matter of simulated time: `crates/services/src/share/tests/`.
#[test]
fn volumes_that_saturate_a_disk_go_on_and_its_groups_cap_is_held() {
    const CAP: u64 = 100;
    let daemon = Daemon::start();
    daemon.run(&["group", "create", "slow", "--iops", &CAP.to_string()]);
    daemon.run(&["disk", "create", "pool", "throttle(group=slow) | memory", "--size", "64M", "--depth", "4"]);
    let volume = |stack| ["--size", "16M", "--stack", stack];
    let heavy = daemon.disk("heavy", &volume("share(weight=3) | volume:pool"), &[]);
    let light = daemon.disk("light", &volume("share | volume:pool"), &[]);
    // Deep enough that the disk has something to do while a client waits for a processor.
    let loads = [heavy, light].map(|socket| Load::start(&socket, &Work { depth: 200, ..Work::default() }));
    all_go_on(&daemon, ["heavy", "light"], 1);
    // Counted from before the first look to after the last one: a slow machine makes it longer only.
    let begun = Instant::now();
    let done = all_go_on(&daemon, ["heavy", "light"], 100);
    let time = begun.elapsed();
    // What was saved up, and what was on its way at the first look.
    let most = CAP * time.as_millis() as u64 / 1000 + 50;
    assert!(done <= most, "{done} in {time:?}, and the cap is {CAP} a second");

    daemon.run(&["group", "change", "slow", "--iops", "100K"]);
    // More than the first cap allows in all the time that is waited for it.
    all_go_on(&daemon, ["heavy", "light"], CAP * PATIENCE.as_secs());
    let refused = daemon.try_run(&["group", "delete", "slow"]).expect_err("it is in use");
    assert!(refused.contains("group slow is in use: volume pool"), "{refused}");
    for load in loads {
        assert!(load.finish() > 0);
    }
    daemon.finish();
}

/// Two guests want more of a disk than there is, all the time, and each gets half of what is done. How near to half is a matter of simulated
/// time: `crates/services/src/share/tests/`.
#[test]
fn a_saturated_disk_gives_two_guests_equal_turns() {
    let daemon = Daemon::start();
    // So little that any guest wants more, however slowly it runs.
    daemon.run(&["group", "create", "slow", "--iops", "40"]);
    daemon.run(&["disk", "create", "pool", "throttle(group=slow) | memory", "--size", "160M", "--depth", "4"]);
    let names = ["one", "two"];
    let sockets = names.map(|name| daemon.disk(name, &["--size", "64M", "--stack", "share | volume:pool"], &[]));
    let seats = seats(2);
    let mut guests = sockets.map(|socket| Boot::scenario("load").socket(&socket).start(&seats));
    for guest in &mut guests {
        guest.wait_mark("loaded");
    }
    // By now both have begun.
    all_go_on(&daemon, names, 50);
    let done = parts(&daemon, names, 1000);
    println!("  commands while both wrote: {done:?}");
    let all: u64 = done.iter().sum();
    assert!(done.iter().all(|one| (all * 2 / 5..=all * 3 / 5).contains(one)), "{done:?}");
    daemon.run(&["group", "change", "slow", "--iops", "100K"]);
    for mut guest in guests {
        guest.send("enough");
        guest.finish();
    }
    daemon.finish();
}

/// Of a saturated disk a volume gets what is guaranteed to it, where its weight gives it one command in a hundred, as it gives another one that
/// has no guarantee. How near to it is a matter of simulated time: `crates/services/src/share/tests/`.
#[test]
fn a_volume_gets_what_is_guaranteed_to_it_of_a_saturated_disk() {
    let daemon = Daemon::start();
    daemon.run(&["group", "create", "slow", "--iops", "200"]);
    daemon.run(&["disk", "create", "pool", "throttle(group=slow) | memory", "--size", "64M", "--depth", "4"]);
    let names = ["heavy", "floor", "light"];
    let shares = ["share(weight=1000)", "share(weight=10, min_iops=150)", "share(weight=10)"];
    let sockets = [0, 1, 2].map(|at| {
        let stack = format!("{} | volume:pool", shares[at]);
        daemon.disk(names[at], &["--size", "16M", "--stack", &stack], &[])
    });
    // As deep as the disk has work for a second, so that there is some while a client waits for a processor.
    let loads = sockets.map(|socket| Load::start(&socket, &Work { depth: 200, ..Work::default() }));
    all_go_on(&daemon, names, 1);
    let done = parts(&daemon, names, 800);
    println!("  commands beside each other: {done:?}");
    let (all, [_, floor, light]) = (done.iter().sum::<u64>(), done);
    // Three quarters are due to it. A disk that is slower than it should be gives it more of what it does, not less.
    assert!(floor * 5 >= all * 3, "{floor} of {all} for who has 150 of 200 guaranteed: {done:?}");
    assert!(light * 20 <= all, "{light} of {all} by weight: {done:?}");
    daemon.run(&["group", "change", "slow", "--iops", "100K"]);
    for load in loads {
        assert!(load.finish() > 0);
    }
    daemon.finish();
}

/// The weight of a group is changed under its volumes, and they go on, as one does that is in none. How much each gets is a matter of simulated
/// time: `crates/services/src/share/tests/`.
#[test]
fn a_groups_weight_is_changed_under_its_volumes() {
    let daemon = Daemon::start();
    daemon.run(&["group", "create", "slow", "--iops", "1K"]);
    daemon.run(&["group", "create", "acme"]);
    daemon.run(&["disk", "create", "pool", "throttle(group=slow) | memory", "--size", "64M", "--depth", "4"]);
    let volume = |stack| ["--size", "16M", "--stack", stack];
    let names = ["one", "two", "alone"];
    let stacks = ["share(group=acme) | volume:pool", "share(group=acme) | volume:pool", "share | volume:pool"];
    let sockets = [0, 1, 2].map(|at| daemon.disk(names[at], &volume(stacks[at]), &[]));
    let loads = sockets.map(|socket| Load::start(&socket, &Work { depth: 200, ..Work::default() }));
    all_go_on(&daemon, names, 300);
    let said = daemon.run(&["group", "change", "acme", "--weight", "4"]);
    assert!(said.contains("group acme: -; weight 4"), "{said}");
    all_go_on(&daemon, names, 300);
    let shown = daemon.run(&["volume", "show", "one"]);
    assert!(shown.contains("acme (weight 4)"), "{shown}");
    let refused = daemon.try_run(&["group", "delete", "acme"]).expect_err("it is in use");
    assert!(refused.contains("group acme is in use: volume one, volume two"), "{refused}");
    let refused = daemon.try_run(&["volume", "change", "alone", "--stack", "share(group=iron) | volume:pool"]);
    assert!(refused.unwrap_err().contains("there is no group iron"));
    for load in loads {
        assert!(load.finish() > 0);
    }
    daemon.finish();
}

/// Chunks that go round over unequal legs, and one volume after the other.
#[test]
fn fio_on_aggregated_legs() {
    let daemon = Daemon::start();
    let [a, b, c] = ["a", "b", "c"].map(|leg| format!("file:{}", daemon.path(leg).display()));
    // fio works from the first byte on: the zones of the stripe meet at 4064 KiB and the two volumes at 5152 KiB, each within a request.
    let stack = format!("concat(stripe(chunk=16K, {a}(size=3120K), {b}(size=2032K)), {c}(size=400M))");
    let socket = daemon.disk("disk", &["--stack", &stack], &[]);
    Boot::scenario("fio").set("FIO_SIZE", unless_heavy("8m", "64m")).socket(&socket).run(&seats(1));
    daemon.finish();
}
