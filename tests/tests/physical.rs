//! A physical controller under our driver and back end: in a nested machine with an IOMMU, where QEMU's controller is the physical one.
//! docs/nvme-driver.md

use std::{fs::File, path::PathBuf};

use millrace_tests::{Boot, Daemon, Kernel, Monitor, Programs, seats};
use serde_json::json;
use tempfile::TempDir;

/// Bytes of each disk.
const DISK: u64 = 128 << 20;

/// A machine with two controllers, of which the first can be unplugged, and programs to give them to.
struct Machine {
    folder: TempDir,
    programs: Programs,
    /// More options of the disks behind the controllers.
    disks: String,
}

impl Machine {
    fn new() -> Self {
        let folder = TempDir::with_prefix("millrace-physical-").expect("a temporary folder");
        let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary(), nested()], &[]);
        Self { folder, programs, disks: String::new() }
    }

    /// Each disk carries out so many commands a second.
    fn slow(rate: u32) -> Self {
        Self { disks: format!(",throttling.iops-total={rate}"), ..Self::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An empty disk, as a drive of QEMU's.
    fn drive(&self, name: &str) -> String {
        let path = self.path(&format!("{name}.img"));
        let file = File::create(&path).expect("a file");
        file.set_len(DISK).expect("a sparse file");
        format!("id={name},file={},if=none,format=raw,discard=unmap{}", path.display(), self.disks)
    }

    /// With more options of QEMU's first controller. The checks find the controllers in the order of their ports.
    fn boot(&self, checks: &str, options: &str) -> Boot {
        let port = |n: usize| format!("pcie-root-port,id=port{n},chassis={}", n + 1);
        let controller = |id: &str, drive: &str, n: usize, options: &str| {
            format!("nvme,id={id},serial={id},drive={drive},bus=port{n},max_ioqpairs=8,msix_qsize=9{options}")
        };
        let boot = Boot::scenario("physical")
            .iommu()
            .memory(1024)
            .monitor(&self.path("qmp"))
            .set("CHECKS", checks.replace(' ', ","))
            .qemu(&["-device", &port(0), "-device", &port(1)])
            .qemu(&["-drive", &self.drive("disk"), "-device", &controller("physical", "disk", 0, options)])
            .qemu(&["-drive", &self.drive("beside"), "-device", &controller("second", "beside", 1, "")]);
        self.programs.on(boot)
    }
}

/// The program with the checks: cargo builds it with the tests.
fn nested() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let program = test.ancestors().nth(2).expect("cargo's folder").join("examples/nvme-nested");
    assert!(program.exists(), "{} is missing: cargo test --workspace builds it", program.display());
    program
}

/// Our client had the first disk to itself. The daemon had both under a verified load, and the first as a virtio disk, and as a program's.
fn expect_served(said: &[String]) {
    let alone = said.iter().any(|line| line.starts_with("guest: client: ") && line.contains("checked_blocks"));
    assert!(alone, "no load by our client alone in\n{}", said.join("\n"));
    for device in ["vm", "second"] {
        let start = format!("guest: load on {device}: ");
        let verified = said.iter().any(|line| line.starts_with(&start) && line.contains("checked_blocks"));
        assert!(verified, "no load on {device} in\n{}", said.join("\n"));
    }
    for check in ["virtio", "fastpath"] {
        assert!(said.contains(&format!("{check}: well")), "{check} is missing in\n{}", said.join("\n"));
    }
}

#[test]
fn a_physical_controller_and_its_second_namespace_pass_the_suite() {
    let machine = Machine::new();
    let boot = machine.boot("refused bind driver conform namespaces", "");
    let drive = machine.drive("namespace");
    let boot = boot.qemu(&["-drive", &drive, "-device", "nvme-ns,drive=namespace,bus=physical,nsid=2"]);
    let said = boot.run(&seats(1));
    for check in ["refused", "driver", "conform", "namespaces"] {
        assert!(said.contains(&format!("{check}: well")), "{check} is missing in\n{}", said.join("\n"));
    }
    for line in ["driver: by group", "driver: submission queues out of the controller"] {
        assert!(said.contains(&line.to_owned()), "{line} is missing in\n{}", said.join("\n"));
    }
}

#[test]
fn a_controller_is_opened_by_itself_where_the_kernel_has_iommufd() {
    let machine = Machine::new();
    let boot = machine.boot("refused bind driver conform direct shards reset unplug", "").kernel(Kernel::Own);
    let mut guest = boot.start(&seats(1));
    guest.wait_mark("busy");
    let mut monitor = Monitor::open(&machine.path("qmp"));
    monitor.execute("device_del", &json!({ "id": "physical" }));
    let said = guest.finish();
    for check in ["refused", "driver", "conform", "direct", "shards", "reset", "unplug"] {
        assert!(said.contains(&format!("{check}: well")), "{check} is missing in\n{}", said.join("\n"));
    }
    assert!(said.contains(&"driver: by iommufd".to_owned()), "{}", said.join("\n"));
}

#[test]
fn a_daemon_in_its_sandbox_has_iommufd() {
    let machine = Machine::slow(1000);
    let boot = machine.boot("bind client daemon virtio fastpath", "").kernel(Kernel::Own);
    let said = boot.set("SECONDS_OF_LOAD", 10).set("KILLS", 1).run(&seats(1));
    expect_served(&said);
    assert!(said.iter().any(|line| line.contains("by=\"iommufd\"")), "{}", said.join("\n"));
}

#[test]
fn submission_queues_lie_in_the_controller_where_it_has_memory() {
    // As version 1.4 has it, and as the versions before.
    for scheme in ["", ",legacy-cmb=on"] {
        let machine = Machine::new();
        let said = machine.boot("bind driver direct reset", &format!(",cmb_size_mb=2{scheme}")).run(&seats(1));
        for check in ["driver", "direct", "reset"] {
            assert!(said.contains(&format!("{check}: well")), "{scheme}: {check} is missing in\n{}", said.join("\n"));
        }
        let inside = said.contains(&"driver: submission queues in the controller".to_owned());
        assert!(inside, "{scheme}: {}", said.join("\n"));
    }
}

#[test]
fn data_go_directly_in_huge_pages_too_on_several_shards_under_resets_and_an_unplugged_disk_ends_in_errors() {
    let machine = Machine::new();
    let mut guest = machine.boot("bind direct huge shards reset unplug", "").start(&seats(1));
    guest.wait_mark("busy");
    let mut monitor = Monitor::open(&machine.path("qmp"));
    monitor.execute("device_del", &json!({ "id": "physical" }));
    let said = guest.finish();
    for check in ["direct", "huge", "shards", "reset", "unplug"] {
        assert!(said.contains(&format!("{check}: well")), "{check} is missing in\n{}", said.join("\n"));
    }
}

#[test]
fn commands_that_take_long_complete_by_interrupt() {
    let machine = Machine::slow(100);
    let mut guest = machine.boot("bind waits silent waits reset unplug", "").start(&seats(1));
    guest.wait_mark("busy");
    let mut monitor = Monitor::open(&machine.path("qmp"));
    monitor.execute("device_del", &json!({ "id": "physical" }));
    let said = guest.finish();
    for check in ["waits", "silent", "reset", "unplug"] {
        assert!(said.contains(&format!("{check}: well")), "{check} is missing in\n{}", said.join("\n"));
    }
    for check in ["reset", "unplug"] {
        let slept = said.iter().any(|line| line.starts_with(check) && line.contains("by interrupt"));
        assert!(slept, "{check} has not slept:\n{}", said.join("\n"));
    }
}

#[test]
fn a_daemon_serves_two_physical_disks_its_worker_may_die_and_one_disk_may_go() {
    // So that it sleeps for commands, too.
    let machine = Machine::slow(1000);
    let boot = machine.boot("bind client daemon virtio fastpath unplugged", "").set("SECONDS_OF_LOAD", 15).set("KILLS", 2);
    let mut guest = boot.start(&seats(1));
    guest.wait_mark("busy");
    let mut monitor = Monitor::open(&machine.path("qmp"));
    monitor.execute("device_del", &json!({ "id": "physical" }));
    let said = guest.finish();
    expect_served(&said);
    assert!(said.contains(&"guest: unplugged: well".to_owned()), "{}", said.join("\n"));
}

#[test]
fn a_namespace_that_changes_its_size_is_followed() {
    let machine = Machine::new();
    // A controller of our own in the machine is one whose namespaces change their size.
    let mut daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let boot = Boot::scenario("physical").iommu().processors(1).memory(1024).set("CHECKS", "bind,sizes").socket(&socket);
    let mut guest = machine.programs.on(boot).start(&seats(1));
    for mib in [96, 32] {
        guest.wait_mark(&format!("await {mib}"));
        daemon.run(&["volume", "resize", "disk", "--size", &format!("{mib}M"), "--shrink"]);
    }
    let said = guest.finish();
    assert!(said.contains(&"sizes: well".to_owned()), "{}", said.join("\n"));
    daemon.expect_well();
}
