//! Firecracker as the machine monitor of a stock guest, with a virtio disk over vhost-user. As for Cloud Hypervisor (`cloud_hypervisor.rs`), all
//! of it runs in a machine of its own, where QEMU emulates what KVM needs. docs/clients.md

#[test]
#[ignore = "no package of Debian has firecracker: scripts/test runs it where MILLRACE_FIRECRACKER names one or PATH has one"]
fn its_guest_has_a_file_system_on_the_disk() {
    let said = millrace_tests::run_monitor("MILLRACE_FIRECRACKER", "firecracker", "firecracker");
    assert!(said.iter().any(|line| line.contains("files are as they were")), "{}", said.join("\n"));
}
