# shellcheck shell=sh disable=SC2154
# Controller, function-level and subsystem resets under verified I/O, then the driver taken off
# and put back. The load must finish without one error.
# RESETS=N   of each kind, default 5
wait_for_namespace "$disk"
resets=${RESETS:-5}
pci=$(basename "$(readlink -f /sys/class/nvme/nvme0/device)")

start_load() {
    fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randwrite --bs=4k --iodepth=16 --size=16m \
        --verify=crc32c --verify_fatal=1 --time_based --runtime=600 --thread --eta=never >/run/load.log 2>&1 </dev/null &
    load=$!
    sleep 1
}

end_load() {
    kill -0 $load 2>/dev/null || { cat /run/load.log; die "the load ended during $1"; }
    kill -INT $load
    wait $load || true
    grep -q 'err= 0' /run/load.log || { cat /run/load.log; die "the load saw errors during $1"; }
    say "$1: $(grep -oE 'write: IOPS=[^ ,]+' /run/load.log)"
}

controller_reset() { nvme reset "$ctrl"; }
function_reset() { echo 1 >"/sys/bus/pci/devices/$pci/reset"; }
subsystem_reset() { nvme subsystem-reset "$ctrl"; }

under_load() { # KIND
    start_load
    n=0
    while [ $n -lt "$resets" ]; do
        "$1" || die "$1 failed: $(dmesg | tail -n 3)"
        wait_for_controller nvme0
        usleep 300000
        n=$((n + 1))
    done
    end_load "$1"
}

under_load controller_reset
if [ -e "/sys/bus/pci/devices/$pci/reset" ]; then
    under_load function_reset
else
    lenient "the function cannot be reset"
fi
if nvme subsystem-reset "$ctrl" >/run/nssr 2>&1; then
    eventually 30 grep -q live /sys/class/nvme/nvme0/state || echo 1 >/sys/class/nvme/nvme0/reset_controller
    wait_for_controller nvme0
    say "subsystem reset: done"
else
    say "subsystem reset: $(cat /run/nssr)"
fi

n=0
while [ $n -lt "$resets" ]; do
    echo "$pci" >/sys/bus/pci/drivers/nvme/unbind
    wait_for_no_namespace "$disk"
    echo "$pci" >/sys/bus/pci/drivers/nvme/bind
    eventually 30 test -b "/dev/$disk" || die "the disk did not come back after unbind $n: $(dmesg | tail -n 3)"
    n=$((n + 1))
done
run_fio after-resets --filename="/dev/$disk" --rw=randwrite --bs=4k --size=8m --iodepth=16 --verify=crc32c
dmesg | grep -E 'I/O error|timeout|Abort' && die "the kernel logged errors"
say "$resets resets of each kind"
