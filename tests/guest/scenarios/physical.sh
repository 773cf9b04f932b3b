# shellcheck shell=sh
# A host of its own: a machine with an IOMMU, whose NVMe controller is taken from the kernel and given to programs that come on the disk
# vda (scripts/guest-programs).
#   CHECKS=NAME,...    what is done, in this order: checks of nvme-nested, or one of the functions below
. /millrace/host.sh

find_controller() {
    for dir in /sys/bus/pci/devices/*; do
        if [ "$(cat "$dir/class")" = 0x010802 ]; then basename "$dir" && return; fi
    done
    die "there is no NVMe controller"
}

# What the driver's own advice says.
bind() {
    echo vfio-pci >"/sys/bus/pci/devices/$address/driver_override"
    echo "$address" >"/sys/bus/pci/devices/$address/driver/unbind"
    echo "$address" >/sys/bus/pci/drivers_probe
    group=$(basename "$(readlink "/sys/bus/pci/devices/$address/iommu_group")")
    # Kernels with iommufd may have no groups.
    [ -e "/dev/vfio/$group" ] || [ -d "/sys/bus/pci/devices/$address/vfio-dev" ] || die "vfio-pci did not take $address"
}

# Waits until workers have taken the controller so many times.
await_opened() {
    for _ in $(seq 600); do
        opened=$(grep -c 'an NVMe controller is ours' $host/tmp/daemon.log)
        [ "$opened" -lt "$1" ] || return 0
        sleep 0.1
    done
    daemon_failed "the controller was opened $opened times"
}

# A daemon in its sandbox with a device on the disk; a verified load by our own client; the worker is killed in the middle of it.
daemon() {
    start_daemon
    millrace volume create disk --backend "nvme:$address" || daemon_failed "no volume"
    must_fail "a second volume on the namespace" millrace volume create other --backend "nvme:$address/1"
    millrace device create vm --nvme --volume disk || daemon_failed "no device"
    in_host /bin/millrace bench --verify --json --time "${SECONDS_OF_LOAD:-10}" --rw randrw --bs 4k --qd 16 --range 16m --socket /run/millrace/vm.sock \
        >$host/tmp/load.json 2>$host/tmp/load.err &
    load=$!
    if [ "${KILLS:-0}" -gt 0 ]; then
        for kill in $(seq "$KILLS"); do
            sleep 3
            await_opened "$kill"
            pid=$(worker)
            kill -KILL "$pid" || daemon_failed "there is no worker to kill: '$pid'"
            say "killed worker $pid, $kill"
        done
    fi
    wait $load || {
        cat $host/tmp/load.err
        daemon_failed "the load failed"
    }
    say "$(grep -oE '"(commands|checked_blocks)": *[0-9]+' $host/tmp/load.json | tr '\n' ' ')"
    grep -q "a guest's memory is mapped for a disk" $host/tmp/daemon.log || daemon_failed "the guest's memory was never mapped"
    await_opened $((${KILLS:-0} + 1))
    grep 'an NVMe controller is ours.* interrupts=[1-9]' $host/tmp/daemon.log || daemon_failed "it has no interrupts"
    if grep 'without interrupts' $host/tmp/daemon.log; then daemon_failed "they do not come"; fi
    if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
}

# The controller is pulled out under the daemon's load: that ends in errors. The worker lives, and whatever else it serves goes on.
unplugged() {
    millrace volume create spare --backend memory --size 16M || daemon_failed "no spare volume"
    millrace device create other --nvme --volume spare || daemon_failed "no spare device"
    in_host /bin/millrace bench --verify --json --time 300 --rw randrw --bs 4k --qd 16 --range 16m --socket /run/millrace/vm.sock \
        >$host/tmp/load.json 2>$host/tmp/load.err &
    load=$!
    in_host /bin/millrace bench --verify --json --time 15 --rw randrw --bs 4k --qd 2 --socket /run/millrace/other.sock >$host/tmp/other.json 2>&1 &
    other=$!
    pid=$(worker)
    sleep 2
    kill -0 $load || daemon_failed "the load ended too early: $(cat $host/tmp/load.err)"
    mark "busy"
    if wait $load; then daemon_failed "a load on a disk that is gone saw no error"; fi
    say "unplugged: $(tail -n 1 $host/tmp/load.err)"
    wait $other || daemon_failed "the disk beside it: $(cat $host/tmp/other.json)"
    [ "$(worker)" = "$pid" ] || daemon_failed "worker $pid is gone"
    if grep 'panicked' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
    millrace device delete vm && millrace volume delete disk || daemon_failed "what is gone cannot be deleted"
    millrace volume create disk --backend "nvme:$address" 2>$host/tmp/refused && daemon_failed "a volume on a controller that is gone"
    say "unplugged: $(cat $host/tmp/refused)"
    say "unplugged: well"
}

[ -d /sys/module/vfio_pci ] || load_modules irqbypass vfio vfio_iommu_type1 vfio-pci-core vfio-pci
[ -d /sys/module/vfio_pci ] || die "there is no module vfio-pci: run scripts/guest-root on the host again"
mount_programs
address=$(find_controller)
for check in $(echo "${CHECKS:?}" | tr , " "); do
    say "$check"
    case $check in
    bind | daemon | unplugged) $check ;;
    *) in_host /bin/nvme-nested "$check" "$address" || die "$check failed" ;;
    esac
    # It has had its controller read to memory that was never mapped.
    [ "$check" != driver ] || dmesg | grep 'DMAR:.*fault addr 0x800000000' || die "the IOMMU has let a transfer to nowhere through"
done
