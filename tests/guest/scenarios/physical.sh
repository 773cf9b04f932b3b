# shellcheck shell=sh
# A host of its own: a machine with an IOMMU, whose NVMe controllers are taken from the kernel and given to programs that come on the disk
# vda (scripts/guest-programs).
#   CHECKS=NAME,...    what is done, in this order: checks of nvme-nested, on the first controller, or one of the functions below
. /millrace/host.sh

# By their addresses, in that order.
find_controllers() {
    for dir in /sys/bus/pci/devices/*; do
        [ "$(cat "$dir/class")" != 0x010802 ] || basename "$dir"
    done
}

# What the driver's own advice says, for each controller.
bind() {
    for controller in $address $second; do
        dir=/sys/bus/pci/devices/$controller
        # The kernel looks at several at a time, and may not have come to this one yet.
        eventually 30 test -e "$dir/driver" || die "$controller has no driver"
        echo vfio-pci >"$dir/driver_override"
        echo "$controller" >"$dir/driver/unbind"
        echo "$controller" >/sys/bus/pci/drivers_probe
        group=$(basename "$(readlink "$dir/iommu_group")")
        # Kernels with iommufd may have no groups.
        [ -e "/dev/vfio/$group" ] || [ -d "$dir/vfio-dev" ] || die "vfio-pci did not take $controller"
    done
}

# Waits until workers have taken controllers so many times.
await_opened() {
    for _ in $(seq 600); do
        opened=$(grep -c 'an NVMe controller is ours' $host/tmp/daemon.log)
        [ "$opened" -lt "$1" ] || return 0
        sleep 0.1
    done
    daemon_failed "controllers were opened $opened times"
}

# Times that a guest's memory was mapped for a disk.
mapped() { grep -c "a guest's memory is mapped for a disk" $host/tmp/daemon.log || true; }

expect_well() {
    # One that was late three times in a row, on a machine that stood still, is no sign of a fault; all of them are.
    given_up=$(grep -c 'without interrupts' $host/tmp/daemon.log || true)
    [ "$given_up" -lt "$(grep -c 'an NVMe controller is ours' $host/tmp/daemon.log)" ] || daemon_failed "interrupts do not come"
    if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
}

# begin_load DEVICE SECONDS [DEPTH]: a verified load by our own client, in the background, as process $load.
begin_load() {
    in_host /bin/millrace bench --verify --json --time "$2" --rw randrw --bs 4k --qd "${3:-16}" --range 16m --socket "/run/millrace/$1.sock" \
        >"$host/tmp/load-$1.json" 2>"$host/tmp/load-$1.err" &
    load=$!
}

# end_load DEVICE PROCESS: waits for its good end.
end_load() {
    wait "$2" || {
        cat "$host/tmp/load-$1.err"
        daemon_failed "the load on $1 failed"
    }
    say "load on $1: $(grep -oE '"(commands|checked_blocks)": *[0-9]+' "$host/tmp/load-$1.json" | tr '\n' ' ')"
}

# Our own client on the first controller itself, which it writes to when that is said, and not else.
client() {
    must_fail_with "a load that writes" "would overwrite.*$address.*--overwrite" millrace bench --device "$address" --rw randwrite --time 1
    millrace bench --lean --device "$address" --time 1 || die "no reads by the lean client"
    said=$(millrace bench --device "$address" --rw randrw --verify --overwrite --range 4m --time 2 --json) || die "no verified load: $said"
    echo "$said" | grep -q '"checked_blocks": *[1-9]' || die "nothing was checked: $said"
    say "client: $(echo "$said" | grep -oE '"(commands|checked_blocks)": *[0-9]+' | tr '\n' ' ')"
}

# A daemon in its sandbox with a device on each disk; a verified load on both; the worker is killed in the middle of it.
daemon() {
    [ -n "$second" ] || die "there is no second NVMe controller"
    start_daemon
    millrace volume create disk --backend "nvme:$address" || daemon_failed "no volume"
    must_fail "a second volume on the namespace" millrace volume create other --backend "nvme:$address/1"
    must_fail_with "a client beside the daemon" "$address is in use" millrace bench --device "$address" --time 1
    millrace volume create second --backend "nvme:$second" || daemon_failed "no volume on the second controller"
    millrace device create vm --nvme --volume disk || daemon_failed "no device"
    millrace device create second --nvme --volume second || daemon_failed "no device on the second controller"
    begin_load vm "${SECONDS_OF_LOAD:-10}"
    on_first=$load
    begin_load second "${SECONDS_OF_LOAD:-10}"
    on_second=$load
    if [ "${KILLS:-0}" -gt 0 ]; then
        for kill in $(seq "$KILLS"); do
            sleep 3
            await_opened $((2 * kill))
            pid=$(worker)
            kill -KILL "$pid" || daemon_failed "there is no worker to kill: '$pid'"
            say "killed worker $pid, $kill"
        done
    fi
    end_load vm "$on_first"
    end_load second "$on_second"
    [ "$(mapped)" -ge 2 ] || daemon_failed "the guests' memory was never mapped"
    await_opened $((2 * (${KILLS:-0} + 1)))
    grep 'an NVMe controller is ours.* interrupts=[1-9]' $host/tmp/daemon.log || daemon_failed "they have no interrupts"
    if grep 'an NVMe controller is ours.* interrupts=0' $host/tmp/daemon.log; then daemon_failed "one has no interrupts"; fi
    expect_well
}

# The disk of `daemon` as a virtio disk: its guest's memory is mapped for the controller where that was said to be safe, and only there. Then
# its NVMe device again.
virtio() {
    millrace device delete vm || daemon_failed "its NVMe device cannot be deleted"
    millrace device create v --virtio-blk --volume disk || daemon_failed "no virtio disk"
    before=$(mapped)
    in_host /bin/nvme-nested virtio /run/millrace/v.sock || daemon_failed "virtio by way of buffers failed"
    [ "$(mapped)" -eq "$before" ] || daemon_failed "memory that a guest may give back was mapped"
    millrace device delete v || daemon_failed "the virtio disk cannot be deleted"
    millrace device create v --virtio-blk --pin-memory --volume disk || daemon_failed "no virtio disk whose memory may be mapped"
    in_host /bin/nvme-nested virtio /run/millrace/v.sock || daemon_failed "virtio failed"
    [ "$(mapped)" -gt "$before" ] || daemon_failed "no memory of virtio's guests was mapped"
    expect_well
    millrace device delete v || daemon_failed "the virtio disk cannot be deleted"
    millrace device create vm --nvme --volume disk || daemon_failed "no device any more"
}

# The disk of `daemon` for a program without a machine, beside its NVMe device: data go straight to and from the program's buffer.
fastpath() {
    before=$(mapped)
    in_host /bin/nvme-nested fastpath disk || daemon_failed "fastpath failed"
    [ "$(mapped)" -gt "$before" ] || daemon_failed "no memory of a program's was mapped"
    expect_well
}

# The first controller is pulled out under the daemon's load: that ends in errors. The worker lives, and whatever else it serves goes on: a
# disk on the other controller, and one in memory.
unplugged() {
    millrace volume create spare --backend memory --size 16M || daemon_failed "no spare volume"
    millrace device create other --nvme --volume spare || daemon_failed "no spare device"
    begin_load vm 300
    on_first=$load
    begin_load second 15 2
    on_second=$load
    begin_load other 15 2
    on_memory=$load
    pid=$(worker)
    sleep 2
    kill -0 "$on_first" || daemon_failed "the load ended too early: $(cat $host/tmp/load-vm.err)"
    mark "busy"
    if wait "$on_first"; then daemon_failed "a load on a disk that is gone saw no error"; fi
    say "unplugged: $(tail -n 1 $host/tmp/load-vm.err)"
    end_load second "$on_second"
    end_load other "$on_memory"
    # They may have ended before the disk was gone.
    begin_load second 2
    end_load second "$load"
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
# shellcheck disable=SC2046
set -- $(find_controllers)
address=${1:-} second=${2:-}
[ -n "$address" ] || die "there is no NVMe controller"
for check in $(echo "${CHECKS:?}" | tr , " "); do
    say "$check"
    case $check in
    bind | client | daemon | virtio | fastpath | unplugged) $check ;;
    *) in_host /bin/nvme-nested "$check" "$address" || die "$check failed" ;;
    esac
    # It has had its controller read to memory that was never mapped.
    [ "$check" != driver ] || dmesg | grep 'DMAR:.*fault addr 0x800000000' || die "the IOMMU has let a transfer to nowhere through"
done
