//! Cloud Hypervisor as the machine monitor of a stock guest, with an NVMe disk over vfio-user and a virtio disk over vhost-user. It needs KVM,
//! which few machines for tests have: so all of it runs in a machine of its own, where QEMU emulates what KVM needs. docs/clients.md

use millrace_tests::{Boot, Daemon, Programs, guest_root, program, repository, seats};
use tempfile::TempDir;

#[test]
#[ignore = "no package of Debian has cloud-hypervisor: scripts/test runs it where MILLRACE_CLOUD_HYPERVISOR names one or PATH has one"]
fn its_guest_notices_neither_killed_workers_nor_an_upgrade() {
    let monitor = program("MILLRACE_CLOUD_HYPERVISOR", "cloud-hypervisor");
    let monitor = monitor.expect("no cloud-hypervisor on PATH, and MILLRACE_CLOUD_HYPERVISOR names none");
    let folder = TempDir::with_prefix("millrace-cloud-").expect("a temporary folder");
    let boot = guest_root().join("boot");
    let mut files = vec![boot.join("kernel-stable"), repository().join("target/guest/initramfs.cpio")];
    files.extend(["kvm", "kvm-amd", "kvm-intel"].map(|name| boot.join(format!("modules-stable/{name}.ko"))));
    let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary(), monitor], &files);
    let said = programs.on(Boot::scenario("monitor").memory(2048)).run(&seats(1));
    assert!(said.iter().any(|line| line.contains("connected again")), "{}", said.join("\n"));
}
