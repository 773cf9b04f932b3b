//! Cloud Hypervisor as the machine monitor of a stock guest, with an NVMe disk over vfio-user and a virtio disk over vhost-user. It needs KVM,
//! which few machines for tests have: so all of it runs in a machine of its own, where QEMU emulates what KVM needs. docs/clients.md

#[test]
#[ignore = "no package of Debian has cloud-hypervisor: scripts/test runs it where MILLRACE_CLOUD_HYPERVISOR names one or PATH has one"]
fn its_guest_notices_neither_killed_workers_nor_an_upgrade() {
    let said = millrace_tests::run_monitor("MILLRACE_CLOUD_HYPERVISOR", "cloud-hypervisor", "monitor");
    assert!(said.iter().any(|line| line.contains("connected again")), "{}", said.join("\n"));
}
