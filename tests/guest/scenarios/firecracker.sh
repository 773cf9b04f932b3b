# shellcheck shell=sh
# A host of its own: a machine that runs Millrace and Firecracker, which come on the disk vda as for the scenario `monitor`, and in it a stock
# guest with a file system on a virtio disk (scenario `filesystem`).
. /millrace/host.sh
said=$host/run/said

failed() {
    millrace device show virtio
    tail -n 60 $said
    daemon_failed "$1"
}

# Emulated twice, its guest may starve for seconds: that is not what it should tell of.
machine() {
    cat <<JSON
{
  "boot-source": {
    "kernel_image_path": "/files/kernel-stable",
    "initrd_path": "/files/initramfs.cpio",
    "boot_args": "console=ttyS0 quiet panic=-1 reboot=k mitigations=off nowatchdog rcupdate.rcu_cpu_stall_suppress=1 millrace.scenario=filesystem millrace.set=DISK=vda millrace.set=WORK_SECONDS=5 millrace.set=TRIM=0"
  },
  "machine-config": { "vcpu_count": 1, "mem_size_mib": 512 },
  "drives": [{ "drive_id": "disk", "is_root_device": false, "cache_type": "Writeback", "socket": "/run/millrace/virtio.sock" }]
}
JSON
}

mount_programs
load_kvm
start_daemon
millrace volume create virtio --size 256M --backend memory || daemon_failed "no volume"
millrace device create virtio --virtio-blk --volume virtio >/dev/null || daemon_failed "no virtio disk"
machine >$host/tmp/machine.json
chroot $host /bin/firecracker --no-api --enable-pci --config-file /tmp/machine.json </dev/null >$said 2>&1 &
monitor=$!
# Its guest cannot turn the machine off.
over() { grep -q MILLRACE-EXIT $said || ! kill -0 $monitor 2>/dev/null; }
eventually 500 over || failed "the guest's guest does not end"
grep -q "MILLRACE-EXIT 0" $said || failed "the guest's guest ended badly"
kill $monitor
wait $monitor || true
sed 's/^/its /' $said
if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
