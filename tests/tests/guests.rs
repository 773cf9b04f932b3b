//! Stock Linux guests on disks served by the daemon: what the whole is for.

use std::{
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
    process::Command,
};

use millrace_tests::{Boot, Daemon, Kernel, OneDisk, eventually, repository, seats, unless_heavy};

const MEMORY: [&str; 4] = ["--backend", "memory", "--size", "1G"];

/// A daemon that is to give back what a guest had: the guest runs between the two.
fn with_daemon(options: &[&str], work: impl FnOnce(&Daemon)) {
    let daemon = Daemon::start_with(options);
    work(&daemon);
    daemon.finish();
}

/// One scenario on a disk of its own, then the daemon must hold what it held before.
fn one(boot: Boot, volume: &[&str], device: &[&str]) -> Vec<String> {
    let mut lines = Vec::new();
    with_daemon(&[], |daemon| {
        let socket = daemon.disk("disk", volume, device);
        let before = daemon.usage();
        lines = boot.socket(&socket).run(&seats(1));
        daemon.expect_back_to(&before);
    });
    lines
}

fn file_backend(path: &Path) -> String {
    format!("file:{}", path.display())
}

// (a) The stock driver finds the controller and uses every queue.

#[test]
fn boot_linux_6_12() {
    let lines = one(Boot::scenario("boot").processors(4).set("SIZE", 1u64 << 30), &MEMORY, &[]);
    assert!(lines.iter().any(|line| line.contains("Millrace")), "the disk does not name its maker: {lines:?}");
}

#[test]
fn boot_newer_linux() {
    one(Boot::scenario("boot").kernel(Kernel::Newer).processors(4).set("SIZE", 1u64 << 30), &MEMORY, &[]);
}

#[test]
fn boot_with_one_interrupt_line() {
    one(Boot::scenario("boot").append("pci=nomsi").set("IRQ", "intx"), &MEMORY, &[]);
}

#[test]
fn boot_with_fewer_queues_than_processors() {
    one(Boot::scenario("boot").processors(4).set("QUEUES", 2), &MEMORY, &["--queues", "2", "--vectors", "3"]);
}

// (b) A file system, used hard.

#[test]
fn filesystem_on_a_file() {
    with_daemon(&[], |daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let socket = daemon.disk("disk", &["--backend", &backend, "--size", "1G"], &[]);
        let seconds = unless_heavy(10, 120);
        Boot::scenario("filesystem").set("WORK_SECONDS", seconds).socket(&socket).run(&seats(1));
    });
}

#[test]
fn filesystem_on_blocks_of_4096_bytes() {
    let boot = Boot::scenario("filesystem").kernel(Kernel::Newer).set("WORK_SECONDS", unless_heavy(5, 120));
    one(boot, &["--backend", "memory", "--size", "1G", "--block-size", "4096"], &[]);
}

// (c) Verified reads and writes, and (i) the same with everything that changes how they are signalled.

fn fio() -> Boot {
    Boot::scenario("fio").set("FIO_SIZE", unless_heavy("8m", "64m"))
}

#[test]
fn fio_on_memory() {
    one(fio(), &MEMORY, &[]);
}

#[test]
fn fio_on_a_file_of_4096_byte_blocks() {
    with_daemon(&[], |daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let volume = ["--backend", &backend, "--size", "1G", "--block-size", "4096"];
        let socket = daemon.disk("disk", &volume, &[]);
        fio().kernel(Kernel::Newer).socket(&socket).run(&seats(1));
    });
}

#[test]
fn fio_with_interrupts_coalesced() {
    one(fio().set("COALESCE", "1,7"), &MEMORY, &[]);
}

#[test]
fn fio_with_shadow_doorbells() {
    one(fio().set("SHADOW", 1), &MEMORY, &["--doorbells", "messages"]);
}

#[test]
fn fio_with_both_and_a_file() {
    with_daemon(&[], |daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let socket = daemon.disk("disk", &["--backend", &backend, "--size", "1G"], &["--doorbells", "messages"]);
        fio().set("SHADOW", 1).set("COALESCE", "5,15").socket(&socket).run(&seats(1));
    });
}

// (d) The nvme tool: what a controller tells, does and refuses.

#[test]
fn admin_commands() {
    one(Boot::scenario("admin"), &MEMORY, &[]);
}

#[test]
fn admin_commands_by_messages() {
    one(Boot::scenario("admin"), &MEMORY, &["--doorbells", "messages"]);
}

#[test]
fn io_commands() {
    one(Boot::scenario("commands"), &MEMORY, &[]);
}

#[test]
fn io_commands_on_a_file_of_4096_byte_blocks() {
    with_daemon(&[], |daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let volume = ["--backend", &backend, "--size", "1G", "--block-size", "4096"];
        let socket = daemon.disk("disk", &volume, &[]);
        Boot::scenario("commands").kernel(Kernel::Newer).socket(&socket).run(&seats(1));
    });
}

#[test]
fn format_every_block_size() {
    one(Boot::scenario("format").set("FORMATS", 2), &["--backend", "memory", "--size", "256M"], &[]);
}

/// A cryptographic erase is one: not a piece of the sealed key is left in the file.
#[test]
fn format_of_enciphered_disks() {
    for (mode, key_at) in [("xts", 32 + 56), ("authenticated", 32 + 48)] {
        let daemon = Daemon::start();
        let (key, image) = (daemon.path("disk.key"), daemon.path("disk.img"));
        std::fs::write(&key, "5a".repeat(32)).expect("a key file");
        let stack = format!("crypt(mode={mode}, key=file:{}, file:{})", key.display(), image.display());
        let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
        let socket = daemon.disk("disk", &volume, &[]);
        let header = || std::fs::read(&image).expect("the file")[..32 << 10].to_vec();
        let before = header();
        Boot::scenario("format").set("FORMATS", 2).socket(&socket).run(&seats(1));
        let after = header();
        let is_left = before[key_at..key_at + 92].chunks(12).any(|piece| after.windows(12).any(|window| window == piece));
        assert!(!is_left, "{mode}: the key is left");
        daemon.finish();
    }
}

#[test]
fn namespaces_made_by_the_guest() {
    let boot = Boot::scenario("namespaces").set("NS_BYTES", 16 << 20).set("LARGE_BYTES", 1u64 << 30);
    one(boot, &["--backend", "memory", "--size", "256M"], &["--ns-quota", "64M"]);
}

#[test]
fn reservations_of_one_host() {
    one(Boot::scenario("reservations"), &MEMORY, &[]);
}

#[test]
fn resets_under_load() {
    one(Boot::scenario("resets").set("RESETS", unless_heavy(3, 20)), &MEMORY, &[]);
}

// (e) Namespaces come, grow, shrink and go under load.

#[test]
fn hotplug_under_load() {
    with_daemon(&[], |daemon| {
        let socket = daemon.disk("disk", &MEMORY, &[]);
        let before = daemon.usage();
        daemon.run(&["volume", "create", "second", "--backend", "memory", "--size", "64M"]);
        let mut guest = Boot::scenario("hotplug").socket(&socket).start(&seats(1));
        guest.wait_mark("await attached");
        daemon.run(&["device", "attach", "disk", "second", "--nsid", "2"]);
        guest.send(&format!("attached nvme0n2 {}", 64 << 20));
        for mib in [128, 32] {
            guest.wait_mark("await resized");
            daemon.run(&["volume", "resize", "second", "--size", &format!("{mib}M"), "--shrink"]);
            guest.send(&format!("resized nvme0n2 {}", mib << 20));
        }
        guest.wait_mark("await detached");
        daemon.run(&["device", "detach", "disk", "2"]);
        guest.send("detached nvme0n2");
        guest.finish();
        daemon.run(&["volume", "delete", "second"]);
        daemon.expect_back_to(&before);
    });
}

// (f) A real disk boots, by BIOS and by UEFI, with no other disk and no kernel handed in.

fn boots_from_disk(firmware: &str, block_size: &str) {
    with_daemon(&[], |daemon| {
        let image = daemon.path("boot.img");
        let built = Command::new(repository().join("scripts/disk-image")).arg(&image).output().expect("scripts/disk-image");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let backend = file_backend(&image);
        let socket = daemon.disk("boot", &["--backend", &backend, "--block-size", block_size], &[]);
        for count in 1..=unless_heavy(2, 5) {
            let lines = Boot::firmware(firmware).socket(&socket).run(&seats(1));
            let expected = format!("MILLRACE-BOOTED nvme0n1p3 {firmware} boot {count}");
            assert!(lines.contains(&expected), "expected '{expected}': {lines:?}");
            assert!(lines.iter().any(|line| line.trim_end() == "MILLRACE-DISKS nvme0n1"), "other disks: {lines:?}");
        }
    });
}

#[test]
fn boot_from_disk_by_seabios() {
    boots_from_disk("bios", "512");
}

#[test]
fn boot_from_disk_by_ovmf() {
    boots_from_disk("uefi", "512");
}

// (g) Two guests, one namespace, reservations between them.

#[test]
fn two_guests_share_a_namespace() {
    with_daemon(&[], |daemon| {
        daemon.run(&["volume", "create", "shared", "--backend", "memory", "--size", "256M"]);
        for name in ["a", "b"] {
            daemon.run(&["device", "create", name, "--nvme"]);
            daemon.run(&["device", "attach", name, "shared"]);
        }
        let before = daemon.usage();
        let seats = seats(2);
        let start = |role: &str| Boot::scenario("shared").set("ROLE", role).socket(&daemon.socket(role)).start(&seats);
        let (mut a, mut b) = (start("a"), start("b"));
        let order = "a register, a acquire, b denied, b register, b data, a exclusive, b locked-out, b preempt, \
                     a preempted, b release, a open, b done, a done";
        // Each step is over when its guest asks for the next one.
        a.wait_mark("await register");
        b.wait_mark("await denied");
        let steps: Vec<(&str, &str)> = order.split(", ").map(|step| step.split_once(' ').expect("who and what")).collect();
        for (at, (who, step)) in steps.iter().enumerate() {
            let guest = if *who == "a" { &mut a } else { &mut b };
            guest.send(step);
            if let Some((_, next)) = steps[at + 1..].iter().find(|(other, _)| other == who) {
                guest.wait_mark(&format!("await {next}"));
            }
        }
        b.finish();
        a.finish();
        daemon.expect_back_to(&before);
    });
}

/// Each has its part of one disk, which is saturated all the time.
#[test]
fn fio_of_two_guests_on_one_disk() {
    with_daemon(&[], |daemon| {
        let disk = file_backend(&daemon.path("disk.img"));
        daemon.run(&["disk", "create", "pool", &disk, "--size", "600M", "--depth", "4"]);
        for name in ["a", "b"] {
            daemon.run(&["volume", "create", name, "--size", "256M", "--stack", "share | volume:pool"]);
            daemon.run(&["device", "create", name, "--nvme"]);
            daemon.run(&["device", "attach", name, name]);
        }
        let before = daemon.usage();
        let seats = seats(2);
        let [a, b] = ["a", "b"].map(|name| fio().socket(&daemon.socket(name)).start(&seats));
        a.finish();
        b.finish();
        daemon.expect_back_to(&before);
    });
}

// (h) What a guest had flushed outlives its sudden death, and the daemon's.

fn kill_rounds() -> usize {
    let wanted = std::env::var("MILLRACE_KILL_ROUNDS").ok();
    wanted.map_or(unless_heavy(2, 20), |rounds| rounds.parse().expect("MILLRACE_KILL_ROUNDS is a number"))
}

#[test]
fn killed_guests_keep_what_they_flushed() {
    let mut daemon = Daemon::start();
    let backend = file_backend(&daemon.path("disk.img"));
    let socket = daemon.disk("disk", &["--backend", &backend, "--size", "1G"], &[]);
    let seats = seats(1);
    for round in 1..=kill_rounds() {
        // The guest before this one may just be leaving.
        let before = daemon.usage_at_rest();
        let mut writer = Boot::scenario("killed").set("ROLE", "writer").socket(&socket).start(&seats);
        let mut flushed = String::new();
        for _ in 0..10 + 7 * round {
            flushed = writer.wait_mark("flushed");
        }
        writer.kill();
        daemon.expect_back_to(&before);
        if round % 2 == 0 {
            daemon.crash_and_restart();
        }
        let checker = Boot::scenario("killed").set("ROLE", "checker").set("ROUNDS", &flushed);
        checker.socket(&socket).run(&seats);
    }
    daemon.expect_well();
    daemon.stop();
}

/// A guest that panics under load: the kernel stops in the middle of its I/O, QEMU resets the machine and ends.
#[test]
fn panicking_guests_cost_nothing() {
    with_daemon(&[], |daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let socket = daemon.disk("disk", &["--backend", &backend, "--size", "1G"], &[]);
        let seats = seats(1);
        let before = daemon.usage();
        let script = daemon.path("panic.sh");
        std::fs::write(&script, PANIC).expect("writing the scenario");
        for _ in 0..unless_heavy(2, 20) {
            let handed = Boot::scenario(script.to_str().expect("UTF-8")).socket(&socket).start(&seats);
            handed.expect_crash();
            daemon.expect_back_to(&before);
        }
        Boot::scenario("boot").socket(&socket).run(&seats);
    });
}

const PANIC: &str = r#"
wait_for_namespace "$disk"
fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randrw --bs=16k --iodepth=32 --thread \
    --time_based --runtime=600 --eta=never >/run/load.log 2>&1 </dev/null &
sleep 1
echo c >/proc/sysrq-trigger
"#;

// The daemon's own restarts.

#[test]
fn restarted_daemon_serves_the_same_disks() {
    let mut daemon = Daemon::start();
    let backend = file_backend(&daemon.path("disk.img"));
    let socket = daemon.disk("disk", &["--backend", &backend, "--size", "1G"], &["--queues", "3"]);
    daemon.run(&["volume", "create", "second", "--backend", "memory", "--size", "64M", "--block-size", "4096"]);
    daemon.run(&["device", "attach", "disk", "second", "--nsid", "7", "--read-only"]);
    let seats = seats(1);
    let script = daemon.path("write.sh");
    std::fs::write(&script, WRITE).expect("writing the scenario");
    let shown = |daemon: &Daemon| (daemon.json(&["volume", "list"]), stable(daemon.json(&["device", "list"])));
    Boot::scenario(script.to_str().expect("UTF-8")).socket(&socket).run(&seats);
    let held = || std::fs::metadata(daemon.path("disk.img")).expect("the volume's file").blocks() * 512;
    let told = || daemon.json(&["volume", "show", "disk"])["allocated"].as_u64().expect("a number");
    eventually("what the file holds is measured", || (told() == held()).then_some(()));
    let before = shown(&daemon);
    daemon.restart();
    assert_eq!(shown(&daemon), before, "a restart changed what there is");
    daemon.crash_and_restart();
    assert_eq!(shown(&daemon), before, "a crash changed what there is");
    std::fs::write(&script, READ).expect("writing the scenario");
    Boot::scenario(script.to_str().expect("UTF-8")).processors(4).socket(&socket).run(&seats);
    daemon.expect_well();
    daemon.stop();
}

/// A device list without what counts and changes.
fn stable(mut devices: serde_json::Value) -> serde_json::Value {
    for device in devices.as_array_mut().into_iter().flatten() {
        if let Some(device) = device.as_object_mut() {
            device.retain(|key, _| !matches!(key.as_str(), "connected" | "phase" | "counters" | "worker"));
        }
    }
    devices
}

const WRITE: &str = r#"
wait_for_namespace "$disk"
wait_for_namespace nvme0n2
disk=$(device_of 1)
second=/dev/$(device_of 7)
yes "written before the restart" | head -c 1048576 | dd of="/dev/$disk" bs=64k iflag=fullblock oflag=direct conv=fsync 2>/dev/null
equal "blocks of the second disk" "$(blockdev --getss "$second")" 4096
equal "the second disk is read-only" "$(blockdev --getro "$second")" 1
"#;

const READ: &str = r#"
wait_for_namespace "$disk"
wait_for_namespace nvme0n2
disk=$(device_of 1)
second=/dev/$(device_of 7)
yes "written before the restart" | head -c 1048576 | cmp -n 1048576 - "/dev/$disk" || die "the data are gone"
equal "queues" "$(cat /sys/class/nvme/nvme0/queue_count)" 4
equal "blocks of the second disk" "$(blockdev --getss "$second")" 4096
equal "the second disk is read-only" "$(blockdev --getro "$second")" 1
"#;

/// `millrace nvme`: one disk without a daemon, as the demo's last lines say.
#[test]
fn one_disk_in_the_foreground() {
    let dir = tempfile::tempdir().expect("a folder");
    let (image, socket) = (dir.path().join("disk.img"), dir.path().join("disk.sock"));
    std::fs::File::create(&image).and_then(|file| file.set_len(512 << 20)).expect("an image");
    let volume = file_backend(&image);
    let mut server = OneDisk::start(&socket, &volume, &[]);
    Boot::scenario("boot").set("SIZE", 512 << 20).socket(&socket).run(&seats(1));
    // Again, for a guest that comes after the first.
    Boot::scenario("commands").socket(&socket).run(&seats(1));
    server.stop();
    assert!(!socket.exists(), "the socket stays behind");
}

// Services.

#[test]
fn an_enciphered_disk_needs_its_key() {
    let mut daemon = Daemon::start();
    let (key, image) = (daemon.path("disk.key"), daemon.path("disk.img"));
    std::fs::write(&key, "5a".repeat(32)).expect("a key file");
    let stack = format!("crypt(key=file:{}, file:{})", key.display(), image.display());
    let socket = daemon.disk("disk", &["--stack", &stack, "--size", "64M"], &[]);
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    // What lies in the file is not the guest's text.
    let medium = std::fs::read(&image).expect("the file");
    assert!(medium[256 << 10..(256 << 10) + (1 << 20)].iter().any(|byte| *byte != 0));
    assert!(!medium.windows(11).any(|window| window == b"guest's own"), "plain text in the file");
    // With another key nothing is shown, and the daemon says why; with its own the text is there.
    std::fs::write(&key, "a5".repeat(32)).expect("a key file");
    daemon.restart();
    assert!(daemon.log().contains("does not open it"), "{}", daemon.log());
    std::fs::write(&key, "5a".repeat(32)).expect("a key file");
    daemon.restart();
    Boot::scenario("text").set("DO", "read").socket(&socket).run(&seats(1));
    // Neither key is in the log, as digits, as numbers or as text.
    let log = daemon.log();
    for piece in ["5a", "5A", "Z", "90, ", "165, "] {
        assert!(!log.contains(&piece.repeat(6)), "a key is in the log: {log}");
    }
    daemon.finish();
}

/// Flips a bit of the block of this number, of 4096 bytes, in an image of the integrity or the metadata service.
fn flip_bit(image: &Path, block: u64) {
    // In the first group, after the header and the group's two pages.
    flip_bit_at(image, (64 << 10) + 8192 + block * 4096 + 1000);
}

fn flip_bit_at(image: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).expect("the file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte of the text");
    file.write_all_at(&[byte[0] ^ 1], at).expect("another one");
}

#[test]
fn a_flipped_bit_is_told_to_the_guest() {
    let mut daemon = Daemon::start();
    let image = daemon.path("disk.img");
    let stack = format!("integrity(file:{})", image.display());
    let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
    let socket = daemon.disk("disk", &volume, &[]);
    let boot = || Boot::scenario("text").set("FIO_SIZE", unless_heavy("8m", "32m")).socket(&socket);
    boot().set("DO", "write").run(&seats(1));
    daemon.stop();
    flip_bit(&image, 77);
    daemon.start_again();
    boot().set("BAD", 77).run(&seats(1));
    let log = daemon.log();
    assert!(log.contains("does not match its checksum") && log.contains("lba=77"), "{log}");
    daemon.finish();
}

/// In the first group of an image of crypt's authenticated mode, after header, log and the pages of three levels.
fn sealed_block(block: u64) -> u64 {
    (1 << 20) + 3 * 8192 + block * 4096
}

#[test]
fn a_block_that_was_changed_or_put_back_is_told_to_the_guest() {
    let mut daemon = Daemon::start();
    let (key, image) = (daemon.path("disk.key"), daemon.path("disk.img"));
    std::fs::write(&key, "5a".repeat(32)).expect("a key file");
    let stack = format!("crypt(mode=authenticated, key=file:{}, file:{})", key.display(), image.display());
    let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
    let socket = daemon.disk("disk", &volume, &[]);
    let read_block = |block: u64| {
        let mut bytes = vec![0; 4096];
        let file = std::fs::File::open(&image).expect("the file");
        file.read_exact_at(&mut bytes, sealed_block(block)).expect("a block of the text");
        bytes
    };
    let write_block = |block: u64, bytes: &[u8]| {
        let file = std::fs::OpenOptions::new().write(true).open(&image).expect("the file");
        file.write_all_at(bytes, sealed_block(block)).expect("another block");
    };
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    daemon.stop();
    let old = read_block(77);
    daemon.start_again();
    // The same text once more: what lies in the file is other bytes, and those before are of an earlier time.
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    daemon.stop();
    let new = read_block(77);
    assert_ne!(old, new);
    let mut flipped = new.clone();
    flipped[1000] ^= 1;
    for bad in [&old, &flipped] {
        write_block(77, bad);
        daemon.start_again();
        Boot::scenario("text").set("BAD", 77).socket(&socket).run(&seats(1));
        let log = daemon.log();
        assert!(log.contains("it is not what was written there last") && log.contains("lba=77"), "{log}");
        daemon.stop();
    }
    write_block(77, &new);
    daemon.start_again();
    Boot::scenario("text").set("DO", "read").socket(&socket).run(&seats(1));
    let medium = std::fs::read(&image).expect("the file");
    assert!(!medium.windows(11).any(|window| window == b"guest's own"), "plain text in the file");
    daemon.finish();
}

#[test]
fn a_leg_that_was_put_back_as_a_whole_is_refused_until_the_operator_accepts_it() {
    let mut daemon = Daemon::start();
    let [key, image, backup, place] = ["disk.key", "disk.img", "backup.img", "disk.root"].map(|name| daemon.path(name));
    std::fs::write(&key, "5a".repeat(32)).expect("a key file");
    let make = |daemon: &Daemon, accept: &str| {
        let (key, place, image) = (key.display(), place.display(), image.display());
        let stack = format!("crypt(mode=authenticated, {accept}key=file:{key}, file:{place}) | file:{image}");
        daemon.disk("disk", &["--stack", &stack, "--size", "64M", "--block-size", "4096"], &[])
    };
    let put_back = || std::fs::copy(&backup, &image).expect("the backup put back");
    // What the daemon says of a leg that was put back, and the word by which it is accepted.
    let refused = |daemon: &Daemon| {
        let log = daemon.log();
        assert!(log.contains("all of it was put back to what it was at save"), "{log}");
        let (_, rest) = log.rsplit_once("accept=").expect("it says how");
        rest.split([' ', '"', ';']).next().expect("a word").to_owned()
    };
    let socket = make(&daemon, "");
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    daemon.stop();
    std::fs::copy(&image, &backup).expect("a backup");
    daemon.start_again();
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    daemon.stop();
    put_back();
    daemon.start_again();
    let first = refused(&daemon);
    daemon.run(&["device", "delete", "disk"]);
    daemon.run(&["volume", "delete", "disk"]);
    assert_eq!(std::fs::read(&image).expect("the file"), std::fs::read(&backup).expect("the backup"), "nothing was changed");
    let socket = make(&daemon, &format!("accept={first}, "));
    Boot::scenario("text").set("DO", "read").socket(&socket).run(&seats(1));
    daemon.restart();
    Boot::scenario("text").set("DO", "read").socket(&socket).run(&seats(1));
    // The word was good once: the same backup is refused from then on.
    daemon.stop();
    put_back();
    daemon.start_again();
    assert_ne!(refused(&daemon), first);
    daemon.finish();
}

#[test]
fn a_flipped_bit_below_a_mirror_is_made_good() {
    let mut daemon = Daemon::start();
    let images = ["one.img", "two.img"].map(|name| daemon.path(name));
    let leg = |image: &Path| format!("integrity(file:{})", image.display());
    let stack = format!("mirror(read=0, {}, {})", leg(&images[0]), leg(&images[1]));
    let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
    let socket = daemon.disk("disk", &volume, &[]);
    Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
    daemon.stop();
    flip_bit(&images[0], 77);
    flip_bit(&images[1], 78);
    daemon.start_again();
    Boot::scenario("text").socket(&socket).run(&seats(1));
    let log = daemon.log();
    assert!(log.contains("lba=77") && log.contains("was given the data of another one"), "{log}");
    daemon.finish();
}

/// With one parity chunk it is not known what is wrong: the guest and the log are told. With two it is, and made good.
#[test]
fn a_flipped_bit_below_parity_is_told_or_made_good() {
    for legs in [3, 4] {
        let mut daemon = Daemon::start();
        let images: Vec<_> = (0..legs).map(|leg| daemon.path(&format!("leg{leg}.img"))).collect();
        let files: Vec<_> = images.iter().map(|image| format!("file:{}", image.display())).collect();
        // The text is in the first chunk: what lies beside it on other legs is nobody's.
        let stack = format!("parity(safe=true, chunk=1M, redundancy={}, {})", legs - 2, files.join(", "));
        let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
        let socket = daemon.disk("disk", &volume, &[]);
        Boot::scenario("text").set("DO", "write").socket(&socket).run(&seats(1));
        daemon.stop();
        // Parity chunks lie on the last leg, and on the first if there are two.
        flip_bit_at(&images[legs - 3], 77 * 4096 + 1000);
        daemon.start_again();
        let boot = Boot::scenario("text").socket(&socket);
        let (boot, told, health) = if legs == 3 {
            (boot.set("BAD", 77), "lba=77 stripe=0 leg_lba=77", "degraded")
        } else {
            (boot, "did not fit", "good")
        };
        boot.run(&seats(1));
        let log = daemon.log();
        assert!(log.contains(told), "no {told} in {log}");
        assert_eq!(daemon.service("disk", "parity")["health"], health);
        daemon.finish();
    }
}

/// Kernels use protection information of this type by themselves, and a bit that flips below is told to whoever reads the block.
fn protected(kind: u8) {
    let mut daemon = Daemon::start();
    let image = daemon.path("disk.img");
    let stack = format!("metadata(protection={kind}, file:{})", image.display());
    let volume = ["--stack", &stack, "--size", "64M", "--block-size", "4096"];
    let socket = daemon.disk("disk", &volume, &[]);
    let boot = || Boot::scenario("protection").set("TYPE", kind).socket(&socket);
    boot().set("DO", "write").set("FIO_SIZE", unless_heavy("8m", "32m")).run(&seats(1));
    daemon.stop();
    flip_bit(&image, 33);
    daemon.start_again();
    for kernel in [Kernel::Stable, Kernel::Newer] {
        boot().kernel(kernel).set("BAD", 33).run(&seats(1));
    }
    daemon.finish();
}

#[test]
fn a_disk_with_protection_information() {
    protected(1);
}

/// Its reference tags are the application's: kernels check guards alone.
#[test]
fn a_disk_with_protection_information_of_type_3() {
    protected(3);
}
