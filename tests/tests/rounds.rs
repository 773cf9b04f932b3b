//! Stock guests and QEMU itself that end badly, over and over: what one round leaves behind is small, what many leave shows.
//! Our own client does the same more often, and at more instants: lifecycle.rs.

use std::{
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::Duration,
};

use millrace_tests::{Boot, Daemon, GuestMemory, Monitor, Usage, eventually, repository, seats, unless_heavy};
use serde_json::{Value, json};

/// Private memory that worker and keeper may have more of at the end.
const GROWTH: u64 = 1 << 20;

/// A daemon with disks in files.
struct House {
    daemon: Daemon,
    sockets: Vec<PathBuf>,
    before: Usage,
}

impl House {
    fn new(image: impl FnOnce(&Path)) -> Self {
        let daemon = Daemon::start();
        let file = daemon.path("disk.img");
        image(&file);
        let size = if file.exists() { &[][..] } else { &["--size", "256M"] };
        Self::over(daemon, &["disk".into()], size)
    }

    /// Disks whose machine ends take their end at once: a machine of many tries as many ends.
    fn with_disks(disks: usize) -> Self {
        let names: Vec<_> = (0..disks).map(|n| format!("disk{n}")).collect();
        Self::over(Daemon::start(), &names, &["--size", "64M"])
    }

    fn over(daemon: Daemon, names: &[String], size: &[&str]) -> Self {
        let disk = |name: &String| {
            let backend = format!("file:{}", daemon.path(&format!("{name}.img")).display());
            daemon.disk(name, &[&["--backend", &backend], size].concat(), &[])
        };
        let sockets = names.iter().map(disk).collect();
        let before = daemon.usage();
        Self { daemon, sockets, before }
    }

    /// The machine with all its disks.
    fn plug(&self, boot: Boot) -> Boot {
        self.sockets.iter().fold(boot, |boot, socket| boot.socket(socket))
    }

    /// Commands that the device has carried out, since its machine was started.
    fn commands(&self) -> u64 {
        let shown = self.daemon.try_run(&["device", "show", "disk", "--json"]).expect("the device");
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        shown["counters"]["read_commands"].as_u64().expect("a number")
    }

    fn finish(self) {
        self.daemon.expect_back_to(&self.before);
        self.daemon.finish();
    }
}

/// QEMU goes at any instant between its start and the guest's work: 20 times with 5 disks, 100 ends of a disk's machine.
#[test]
fn machines_killed_at_any_instant_of_their_start() {
    let house = House::with_disks(5);
    let seats = seats(1);
    let rounds = unless_heavy(20, 100);
    let mut warm = None;
    for round in 0..rounds {
        let machine = house.plug(Boot::scenario("boot")).start(&seats);
        // Some 4 seconds: firmware, kernel, driver.
        sleep(Duration::from_millis(round * 1733 % 4000));
        machine.kill();
        if round == 4 {
            house.daemon.expect_back_to(&house.before);
            warm = Some(house.daemon.usage_at_rest());
        }
    }
    house.daemon.expect_within(&warm.expect("more rounds"), GROWTH);
    house.plug(Boot::scenario("boot")).run(&seats);
    println!("  {rounds} times {} disks", house.sockets.len());
    house.finish();
}

fn bootable(file: &Path) {
    let built = Command::new(repository().join("scripts/disk-image")).arg(file).output().expect("scripts/disk-image");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// The reset button, while firmware and boot loader read the disk, and then the machine boots.
fn reset_in_the_middle_of_the_boot(memory: &GuestMemory, rounds: u64) {
    let house = House::new(bootable);
    let control = house.daemon.path("machine.qmp");
    let boot = house.plug(Boot::firmware("bios").memory(MACHINE)).monitor(&control);
    let boot = if memory.are_set_aside() { boot.huge_pages() } else { boot };
    let seats = seats(1);
    let machine = boot.start(&seats);
    let mut monitor = Monitor::open(&control);
    // The machine would end otherwise.
    monitor.execute("set-action", &json!({ "reboot": "reset" }));
    let mut warm = None;
    for round in 0..rounds {
        let (read, more) = (house.commands(), 1 + round * 7 % 60);
        eventually("the machine reads its disk", || (house.commands() >= read + more).then_some(()));
        monitor.execute("system_reset", &json!({}));
        monitor.wait_event("RESET");
        if round == rounds / 10 {
            warm = Some(house.daemon.usage_at_rest());
        }
    }
    let now = house.daemon.usage_at_rest();
    let warm = warm.expect("more rounds");
    assert!(now.private <= warm.private + GROWTH && now.keeper <= warm.keeper + GROWTH, "before {warm:?}, now {now:?}");
    // It powers off when it has booted.
    let lines = machine.finish();
    assert!(lines.iter().any(|line| line.starts_with("MILLRACE-BOOTED nvme0n1p3")), "{lines:?}");
    println!("  {rounds} resets");
    house.finish();
}

/// MiB of such a machine.
const MACHINE: usize = 128;

#[test]
fn a_machine_is_reset_in_the_middle_of_its_boot() {
    reset_in_the_middle_of_the_boot(&GuestMemory::small(), unless_heavy(100, 1000));
}

#[test]
fn machines_of_huge_pages_reset_in_the_middle_of_their_boot() {
    reset_in_the_middle_of_the_boot(&GuestMemory::huge_of(MACHINE), unless_heavy(20, 1000));
}

/// The guest panics in the middle of its I/O and boots again, within one QEMU: 10 times with 10 disks, all of them busy.
#[test]
fn guests_panic_and_boot_again() {
    let house = House::with_disks(10);
    let (control, script) = (house.daemon.path("machine.qmp"), house.daemon.path("panic.sh"));
    std::fs::write(&script, PANIC).expect("writing the scenario");
    let boot =
        house.plug(Boot::scenario(script.to_str().expect("UTF-8"))).set("DISKS", house.sockets.len()).monitor(&control);
    let mut guest = boot.start(&seats(1));
    Monitor::open(&control).execute("set-action", &json!({ "reboot": "reset" }));
    let rounds = unless_heavy(10, 100);
    let mut warm = None;
    for round in 0..=rounds {
        guest.wait_mark("await orders");
        if round == 1 {
            warm = Some(house.daemon.usage_at_rest());
        }
        if round == rounds {
            house.daemon.expect_within(&warm.expect("more rounds"), GROWTH);
        }
        guest.send(if round < rounds { "orders panic" } else { "orders end" });
    }
    guest.finish();
    println!("  {rounds} panics with {} disks", house.sockets.len());
    house.finish();
}

const PANIC: &str = r#"
all() { [ "$(ls /dev/nvme*n1 | wc -l)" = "$DISKS" ]; }
eventually 60 all || die "not all disks came: $(echo /dev/nvme*n1)"
files=$(echo /dev/nvme*n1 | tr ' ' :)
run_fio verified --filename="$files" --rw=randwrite --bs=16k --size=8m --iodepth=32 --verify=crc32c --verify_fatal=1
await_host orders
if [ "$answer" = panic ]; then
    fio --name=load --filename="$files" --ioengine=io_uring --direct=1 --rw=randrw --bs=16k --iodepth=64 --thread \
        --time_based --runtime=600 --eta=never >/run/load.log 2>&1 </dev/null &
    sleep 1
    echo c >/proc/sysrq-trigger
fi
"#;

/// What is done to a disk in the guest by its kernel: the function goes in the middle of its work, and is found again.
#[test]
fn functions_removed_under_load_and_found_again() {
    let house = House::new(|_| {});
    let script = house.daemon.path("remove.sh");
    std::fs::write(&script, format!("{WORKS}{REMOVE}")).expect("writing the scenario");
    let boot = house.plug(Boot::scenario(script.to_str().expect("UTF-8")));
    let rounds = unless_heavy(100, 1000);
    let mut guest = boot.set("ROUNDS", rounds).start(&seats(1));
    guest.wait_mark("warm");
    let warm = house.daemon.usage_at_rest();
    guest.answer("go on");
    guest.wait_mark("await enough");
    house.daemon.expect_within(&warm, GROWTH);
    guest.send("enough now");
    guest.finish();
    println!("  {rounds} times removed");
    house.finish();
}

/// What both guests below begin with.
const WORKS: &str = r#"
there() { ls /sys/block/ | grep -q '^nvme\|^vd'; }
away() { ! there; }
done_so_far() { cat /sys/block/nvme*n1/stat /sys/block/vd*/stat 2>/dev/null | awk '{ n += $1 + $5 } END { print n + 0 }'; }
works() { [ "$(done_so_far)" -gt 20 ]; }
# Leaves a load on the disk that is there, which works.
begin() {
    eventually 60 there || die "the disk did not come: $(dmesg | tail -n 5)"
    disk=$(ls /sys/block | grep '^nvme.*n1$\|^vd')
    eventually 60 test -b "/dev/$disk" || die "no /dev/$disk"
    dd if="/dev/$disk" of=/dev/null bs=4k iflag=direct 2>/dev/null &
    eventually 60 works || die "the disk does not work: $(dmesg | tail -n 5)"
}
end() {
    wait
    eventually 60 away || die "the disk stays: $(dmesg | tail -n 5)"
}
"#;

const REMOVE: &str = r#"
n=0
while [ $n -lt "$ROUNDS" ]; do
    begin
    if [ $n = 10 ]; then mark "warm"; await_host go; fi
    echo 1 >"$(readlink -f /sys/class/nvme/nvme*/device)/remove"
    end
    echo 1 >/sys/bus/pci/rescan
    n=$((n + 1))
done
begin
await_host enough
"#;

/// A virtio disk is unplugged by its machine's monitor, under a load, and plugged in again, while one guest runs. (QEMU 11.1 ends by an
/// assertion of its own when a vfio-user device is unplugged.)
#[test]
fn disks_unplugged_under_load_and_plugged_in_again() {
    let daemon = Daemon::start();
    let backend = format!("file:{}", daemon.path("disk.img").display());
    let socket = daemon.virtio_disk("disk", &["--backend", &backend, "--size", "256M"], &[]);
    let before = daemon.usage();
    let (control, script) = (daemon.path("machine.qmp"), daemon.path("plug.sh"));
    std::fs::write(&script, format!("{WORKS}{PLUG}")).expect("writing the scenario");
    let boot = Boot::scenario(script.to_str().expect("UTF-8")).monitor(&control);
    let mut guest = boot.qemu(&["-device", "pcie-root-port,id=slot1,chassis=1"]).start(&seats(1));
    let mut monitor = Monitor::open(&control);
    let address = json!({ "type": "unix", "data": { "path": socket.to_str().expect("UTF-8") } });
    let line = json!({ "id": "line", "backend": { "type": "socket", "data": { "addr": address, "server": false } } });
    let device = json!({ "driver": "vhost-user-blk-pci", "id": "disk", "bus": "slot1", "chardev": "line", "num-queues": 2 });
    let rounds = unless_heavy(100, 1000);
    let mut warm = None;
    for round in 0..rounds {
        guest.wait_mark("await plugged");
        if round == rounds / 10 {
            warm = Some(daemon.usage_at_rest());
        }
        monitor.execute("chardev-add", &line);
        monitor.execute("device_add", &device);
        guest.send("plugged in");
        guest.wait_mark("await unplugged");
        monitor.execute("device_del", &json!({ "id": "disk" }));
        // In use until the last of the device has gone.
        eventually("the end of the device", || monitor.try_execute("chardev-remove", &json!({ "id": "line" })).ok());
        guest.send("unplugged now");
    }
    guest.wait_mark("await plugged");
    daemon.expect_within(&warm.expect("more rounds"), GROWTH);
    guest.send("plugged never");
    guest.finish();
    println!("  {rounds} times unplugged");
    daemon.expect_back_to(&before);
    daemon.finish();
}

const PLUG: &str = r#"
while :; do
    await_host plugged
    [ "$answer" = in ] || break
    begin
    await_host unplugged
    end
done
"#;
