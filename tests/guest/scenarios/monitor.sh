# shellcheck shell=sh
# A host of its own: a machine that runs Millrace and Cloud Hypervisor, which come on the disk vda with a kernel, this userland and KVM's
# modules (scripts/guest-programs), and in it a stock guest with an NVMe disk and a virtio disk (scenario `both`).
#   KILLS=N       the worker is killed so often under the guest's load, 3 unless told
#   UPGRADES=N    it is upgraded so often, 1 unless told
. /millrace/host.sh
said=$host/run/said

# Emulated twice, its guest may starve for seconds: that is not what it should tell of.
start_monitor() {
    chroot $host /bin/cloud-hypervisor -v --log-file /tmp/monitor.log --kernel /files/kernel-stable --initramfs /files/initramfs.cpio \
        --cmdline "console=ttyS0 quiet panic=-1 mitigations=off nowatchdog rcupdate.rcu_cpu_stall_suppress=1 millrace.scenario=both" \
        --cpus boot=1 --memory size=512M,shared=on --serial tty --console off \
        --user-device socket=/run/millrace/nvme.sock --disk vhost_user=on,socket=/run/millrace/virtio.sock \
        </dev/null >$said 2>&1 &
    monitor=$!
}

failed() {
    # What its threads wait for, if it is there.
    for task in /proc/"$monitor"/task/*/; do
        echo "$(cat "$task/comm" "$task/wchan" 2>/dev/null)" | tr '\n' ' '
    done
    millrace device show nvme
    millrace device show virtio
    tail -n 60 $said
    grep -vE 'API request|Booting VM from' $host/tmp/monitor.log | tail -n 20
    daemon_failed "$1"
}

turns() { grep -c "MILLRACE-MARK turn" $said || true; }
more_turns() { [ "$(turns)" -gt "$1" ] || grep -qE 'MILLRACE-(FAIL|EXIT)' $said; }

# Both disks have gone on since now: of two turns, one has begun later.
wait_turn() {
    before=$(turns)
    tries=0
    until eventually 30 more_turns $((before + 1)); do
        tries=$((tries + 1))
        [ $tries -lt 20 ] || failed "the guest's guest stands still"
        say "waiting since its '$(tail -n 1 $said)'"
    done
    if grep -E 'MILLRACE-(FAIL|EXIT)' $said; then failed "the guest's guest has ended"; fi
    say "$1: its guest goes on"
}

mount_programs
load_kvm
start_daemon
for kind in nvme virtio; do millrace volume create $kind --size 64M --backend memory || daemon_failed "no volume"; done
millrace device create nvme --nvme --volume nvme >/dev/null || daemon_failed "no controller"
millrace device create virtio --virtio-blk --volume virtio >/dev/null || daemon_failed "no virtio disk"
: >$said
start_monitor
wait_turn "started"
for kill in $(seq "${KILLS:-3}"); do
    pid=$(worker)
    kill -KILL "$pid" || failed "there is no worker to kill: '$pid'"
    wait_turn "worker killed $kill times"
done
for upgrade in $(seq "${UPGRADES:-1}"); do
    millrace upgrade --trial 1 || failed "no upgrade"
    wait_turn "upgraded $upgrade times"
done
millrace volume resize nvme 80M || failed "the disk cannot grow"
wait $monitor || failed "Cloud Hypervisor ended with $?"
grep -q "MILLRACE-EXIT 0" $said || failed "the guest's guest ended badly"
sed 's/^/its /' $said
say "Cloud Hypervisor connected again $(grep -c 'attempting reconnection' $host/tmp/monitor.log) times"
grep ERROR $host/tmp/monitor.log && failed "Cloud Hypervisor tells of errors"
if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
