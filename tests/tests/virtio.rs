//! Stock Linux guests on virtio disks: QEMU's vhost-user-blk-pci in front, the daemon behind.

use std::{fs::File, path::Path, process::Command, thread::sleep, time::Duration};

use millrace_block::trace::EventOperation;
use millrace_tests::{Boot, Daemon, Guest, Kernel, Monitor, Seats, eventually, repository, seats, unless_heavy};
use millrace_trace::Trace;
use rustix::process::Signal;

const MEMORY: [&str; 4] = ["--backend", "memory", "--size", "1G"];

fn file_backend(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn with_daemon(work: impl FnOnce(&Daemon)) {
    let daemon = Daemon::start();
    work(&daemon);
    daemon.finish();
}

/// One scenario on a virtio disk of its own, then the daemon must hold what it held before.
fn one(boot: Boot, volume: &[&str], device: &[&str], options: &str) {
    with_daemon(|daemon| {
        let socket = daemon.virtio_disk("disk", volume, device);
        let before = daemon.usage();
        boot.set("DISK", "vda").disk(&socket, options).run(&seats(1));
        daemon.expect_back_to(&before);
    });
}

fn fio() -> Boot {
    Boot::scenario("fio").set("FIO_SIZE", unless_heavy("8m", "64m"))
}

#[test]
fn fio_on_a_split_ring() {
    one(fio(), &MEMORY, &[], "num-queues=2");
}

#[test]
fn fio_on_a_packed_ring_and_a_file() {
    with_daemon(|daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        let socket = daemon.virtio_disk("disk", &["--backend", &backend, "--size", "1G"], &[]);
        fio().kernel(Kernel::Newer).set("DISK", "vda").disk(&socket, "num-queues=2,packed=on").run(&seats(1));
    });
}

#[test]
fn filesystem_on_blocks_of_4096_bytes() {
    let boot = Boot::scenario("filesystem").set("WORK_SECONDS", unless_heavy(5, 120));
    one(boot, &["--backend", "memory", "--size", "1G", "--block-size", "4096"], &["--queues", "1"], "num-queues=1");
}

/// The sizes are in MiB; it begins with 256.
fn resized_under_load(daemon: &Daemon, stack: &str, sizes: [u64; 2]) {
    let volume = ["--stack", stack, "--size", "256M"];
    let socket = daemon.virtio_disk("disk", &volume, &["--queues", "4", "--serial", "MY-DISK"]);
    let boot = Boot::scenario("virtio").processors(4).set("QUEUES", 4).set("SERIAL", "MY-DISK").set("RESIZES", 2);
    let mut guest = boot.set("DISK", "vda").disk(&socket, "num-queues=4").start(&seats(1));
    for mib in sizes {
        guest.wait_mark("await resized");
        daemon.run(&["volume", "resize", "disk", "--size", &format!("{mib}M"), "--shrink"]);
        guest.send(&format!("resized {}", mib << 20));
    }
    guest.finish();
}

#[test]
fn a_disk_is_what_the_driver_sees_and_resizes() {
    with_daemon(|daemon| {
        let backend = file_backend(&daemon.path("disk.img"));
        resized_under_load(daemon, &backend, [512, 128]);
    });
}

#[test]
fn an_enciphered_mirror_grows() {
    with_daemon(|daemon| {
        let key = daemon.path("disk.key");
        std::fs::write(&key, "5a".repeat(32)).expect("a key file");
        let [a, b] = ["a", "b"].map(|leg| daemon.path(leg));
        let stack = format!("crypt(key=file:{}) | mirror(file:{}, file:{})", key.display(), a.display(), b.display());
        resized_under_load(daemon, &stack, [512, 1024]);
        let length = |leg: &Path| std::fs::metadata(leg).expect("a leg").len();
        assert!(length(&a) > 1 << 30 && length(&a) == length(&b));
    });
}

#[test]
fn a_read_only_disk() {
    with_daemon(|daemon| {
        daemon.run(&["volume", "create", "disk", "--backend", "memory", "--size", "64M", "--block-size", "4096"]);
        daemon.run(&["device", "create", "disk", "--virtio-blk"]);
        daemon.run(&["device", "attach", "disk", "disk", "--read-only"]);
        let boot = Boot::scenario("virtio").set("BLOCK", 4096).set("READ_ONLY", 1).set("DISK", "vda");
        boot.disk(&daemon.socket("disk"), "num-queues=2").run(&seats(1));
    });
}

fn boots_from_disk(firmware: &str) {
    with_daemon(|daemon| {
        let image = daemon.path("boot.img");
        let built = Command::new(repository().join("scripts/disk-image")).arg("--virtio").arg(&image).output();
        let built = built.expect("scripts/disk-image");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let socket = daemon.virtio_disk("boot", &["--backend", &file_backend(&image)], &[]);
        for count in 1..=unless_heavy(2, 5) {
            let lines = Boot::firmware(firmware).disk(&socket, "").run(&seats(1));
            let expected = format!("MILLRACE-BOOTED vda3 {firmware} boot {count}");
            assert!(lines.contains(&expected), "expected '{expected}': {lines:?}");
        }
    });
}

#[test]
fn boot_from_disk_by_seabios() {
    boots_from_disk("bios");
}

#[test]
fn boot_from_disk_by_ovmf() {
    boots_from_disk("uefi");
}

/// The daemon is killed under load and comes again, over and over: the guest notices nothing but a pause, and a service that its disk is
/// made of is in good health when all is over.
fn killed_under_load(service: &str, stack: impl Fn(&Daemon) -> String, options: &str, kernel: Kernel) {
    let mut daemon = Daemon::start();
    let stack = stack(&daemon);
    let socket = daemon.virtio_disk("disk", &["--stack", &stack, "--size", "256M"], &[]);
    let seats = seats(1);
    let boot = Boot::scenario("load").kernel(kernel).set("DISK", "vda").disk(&socket, options);
    let mut guest = boot.start(&seats);
    guest.wait_mark("loaded");
    for round in 1..=28 {
        guest.send("alive");
        guest.wait_mark("alive");
        match round % 7 {
            // One that is told to end is no different.
            0 => daemon.restart(),
            // The worker alone, and the next ones: the keeper starts another each time.
            1 => {
                for kill in 0..9 {
                    daemon.kill_worker(Signal::KILL);
                    sleep(Duration::from_millis(50 + kill * 79 % 400));
                }
            }
            _ => daemon.crash_and_restart(),
        }
    }
    guest.send("alive");
    guest.wait_mark("alive");
    guest.send("enough");
    guest.finish();
    eventually("it is in good health", || (daemon.service("disk", service)["health"] == "good").then_some(()));
    daemon.finish();
}

#[test]
fn killed_60_times_under_load_on_an_enciphered_mirror_of_shares_by_split_rings() {
    let stack = |daemon: &Daemon| {
        for pool in ["one", "other"] {
            daemon.run(&["disk", "create", pool, &file_backend(&daemon.path(pool)), "--size", "320M"]);
        }
        let key = daemon.path("disk.key");
        std::fs::write(&key, "5a".repeat(32)).expect("a key file");
        format!("crypt(key=file:{}) | mirror(share(volume:one), share(volume:other))", key.display())
    };
    killed_under_load("mirror", stack, "num-queues=2", Kernel::Stable);
}

#[test]
fn killed_60_times_under_load_on_a_cache_over_a_mirror_by_packed_rings() {
    let stack = |daemon: &Daemon| {
        let [fast, one, other] = ["fast", "one", "other"].map(|leg| file_backend(&daemon.path(leg)));
        // Slowly written back, so that there is always something to lose.
        format!("cache(mode=back, rate=1M, {fast}(size=64M)) | mirror({one}, {other})")
    };
    killed_under_load("cache", stack, "num-queues=2,packed=on", Kernel::Newer);
}

/// Another worker of the same binary takes over under load, over and over: what the old one had taken it finishes first.
#[test]
fn upgraded_20_times_under_load() {
    let daemon = Daemon::start();
    let backend = file_backend(&daemon.path("disk.img"));
    let socket = daemon.virtio_disk("disk", &["--backend", &backend, "--size", "256M"], &[]);
    let boot = Boot::scenario("load").set("DISK", "vda").disk(&socket, "num-queues=2");
    let mut guest = boot.start(&seats(1));
    guest.wait_mark("loaded");
    let mut pauses = Vec::new();
    for _ in 0..20 {
        guest.send("alive");
        guest.wait_mark("alive");
        pauses.push(daemon.upgrade(&Daemon::binary(), 0).expect("an upgrade"));
    }
    guest.send("alive");
    guest.wait_mark("alive");
    guest.send("enough");
    guest.finish();
    pauses.sort_unstable();
    println!("  20 upgrades; nobody served: median {} µs, longest {} µs", pauses[10], pauses[19]);
    daemon.finish();
}

/// Starts one end of a migration: the machine itself, or the QEMU that waits for it.
fn end(daemon: &Daemon, device: &str, options: &str, incoming: bool, seats: &Seats) -> Guest {
    let boot =
        Boot::scenario("load").set("DISK", "vda").set("THROUGH", "1").memory(384).disk(&daemon.socket(device), options);
    let boot = boot.monitor(&daemon.path(&format!("{device}.qmp")));
    if incoming { boot.incoming(&daemon.path("stream")).start(seats) } else { boot.start(seats) }
}

/// All writes that the volume gets for a second, or until there are some, are durable when they end: the guest sends no flush.
fn writes_are_durable(daemon: &Daemon) {
    let file = daemon.path("disk.trace");
    let mut count = 0;
    eventually("more than ten writes", || {
        daemon.run(&["trace", "disk", "--volume", "--seconds", "1", "--out", file.to_str().expect("a path")]);
        let trace = Trace::read(File::open(&file).expect("the trace")).expect("a trace");
        for write in trace.requests.iter().filter(|request| request.operation.base() == EventOperation::WRITE) {
            assert!(write.operation.fua(), "{write:?}");
            count += 1;
        }
        (count > 10).then_some(())
    });
}

/// A machine moves between two QEMU processes and back, under a verified load: what the disk reads into its memory meanwhile must be
/// copied, and no request may be lost or done twice. Its driver has chosen write-through, which nobody tells the other end.
fn migrated_under_load(options: &str) {
    with_daemon(|daemon| {
        daemon.run(&["volume", "create", "disk", "--backend", "memory", "--size", "256M"]);
        for device in ["here", "there"] {
            daemon.run(&["device", "create", device, "--virtio-blk", "--volume", "disk"]);
        }
        let seats = seats(2);
        let mut source = end(daemon, "here", options, false, &seats);
        source.wait_mark("loaded");
        writes_are_durable(daemon);
        for (from, to) in [("here", "there"), ("there", "here")] {
            let mut target = end(daemon, to, options, true, &seats);
            // It listens from its start on.
            let mut waiting = Monitor::open(&daemon.path(&format!("{to}.qmp")));
            waiting.execute("query-status", &serde_json::json!({}));
            Monitor::open(&daemon.path(&format!("{from}.qmp"))).migrate(&daemon.path("stream"));
            source.kill();
            target.send("alive");
            target.wait_mark("alive");
            writes_are_durable(daemon);
            source = target;
        }
        source.send("enough");
        source.finish();
    });
}

/// One of QEMU's tools on a disk, by libblkio; what it said, if it was content.
fn by_libblkio(tool: &str, arguments: &[&str], socket: &Path) -> Result<String, String> {
    let disk = format!("driver=virtio-blk-vhost-user,cache.direct=on,path={}", socket.display());
    let mut command = Command::new(repository().join("scripts/in-root"));
    let out = command.arg(tool).args(arguments).args(["--image-opts", &disk]).output().expect(tool);
    let said = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if out.status.success() { Ok(said) } else { Err(said) }
}

/// QEMU's block layer as the guest: programs without a machine, one after the other.
#[test]
fn libblkio_reads_what_it_wrote() {
    with_daemon(|daemon| {
        let image = daemon.path("disk.img");
        let socket = daemon.virtio_disk("disk", &["--backend", &file_backend(&image), "--size", "64M"], &["--queues", "2"]);
        let io = |commands: &[&str]| {
            let arguments: Vec<_> = commands.iter().flat_map(|command| ["-c", command]).collect();
            by_libblkio("qemu-io", &arguments, &socket)
        };
        io(&["write -P 0x5a 4096 65536", "write -P 0x77 1M 3M", "flush"]).expect("writes");
        io(&["read -P 0x5a 4096 65536", "read -P 0x77 1M 3M", "read -P 0 0 4096"]).expect("what was written");
        let other = io(&["read -P 0x11 4096 512"]).expect_err("it holds something else");
        assert!(other.contains("Pattern verification failed"), "{other}");
        io(&["write -z 1M 1M", "discard 2M 1M", "read -P 0 1M 1M", "read -P 0x77 3M 1M"]).expect("zeroes");
        // Many at a time, from the beginning on.
        let load = ["bench", "-w", "--pattern=34", "-c", "16000", "-d", "64", "-s", "4096"];
        by_libblkio("qemu-img", &load, &socket).expect("a load");
        io(&["read -P 0x22 0 65536000", "read -P 0 65536000 4096"]).expect("what the load wrote");
        let bytes = std::fs::read(&image).expect("the file");
        assert!(bytes.len() == 64 << 20 && bytes[..65_536_000].iter().all(|byte| *byte == 0x22));
    });
}

#[test]
fn migrated_there_and_back_on_split_rings() {
    migrated_under_load("num-queues=2");
}

#[test]
fn migrated_there_and_back_on_packed_rings() {
    migrated_under_load("num-queues=2,packed=on");
}
