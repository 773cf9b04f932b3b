//! Firecracker as the machine monitor of a stock guest, with a virtio disk over vhost-user. As for Cloud Hypervisor (`cloud_hypervisor.rs`), all
//! of it runs in a machine of its own, where QEMU emulates what KVM needs. docs/clients.md

use millrace_tests::{Boot, Daemon, Programs, guest_root, program, repository, seats};
use tempfile::TempDir;

#[test]
#[ignore = "no package of Debian has firecracker: scripts/test runs it where MILLRACE_FIRECRACKER names one or PATH has one"]
fn its_guest_has_a_file_system_on_the_disk() {
    let monitor = program("MILLRACE_FIRECRACKER", "firecracker");
    let monitor = monitor.expect("no firecracker on PATH, and MILLRACE_FIRECRACKER names none");
    let folder = TempDir::with_prefix("millrace-firecracker-").expect("a temporary folder");
    let boot = guest_root().join("boot");
    let mut files = vec![boot.join("kernel-stable"), repository().join("target/guest/initramfs.cpio")];
    files.extend(["kvm", "kvm-amd", "kvm-intel"].map(|name| boot.join(format!("modules-stable/{name}.ko"))));
    let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary(), monitor], &files);
    let said = programs.on(Boot::scenario("firecracker").memory(2048)).run(&seats(1));
    assert!(said.iter().any(|line| line.contains("files are as they were")), "{}", said.join("\n"));
}
