# shellcheck shell=sh disable=SC2154
# The stock driver on a controller whose I/O queues are an engine's: what it can do is offered and nothing else, each queue works, and
# fio writes, reads back and checks.
# FIO_SIZE=BYTES      of each run, default 4m
# SIZE=BYTES          of the disk, if it is to be looked at
# TAG=WORD            printed in a mark before the load: "MILLRACE-MARK load WORD"
size=${FIO_SIZE:-4m}
file=/dev/$disk

wait_for_controller nvme0
wait_for_namespace "$disk"
nvme list
queues=$(nproc)
[ "$queues" -le 4 ] || queues=4
equal "queues of the controller" "$(cat /sys/class/nvme/nvme0/queue_count)" $((queues + 1))
[ -z "${SIZE-}" ] || equal "size of $disk" "$(size_of "$disk")" "$SIZE"
equal "largest transfer in KiB" "$(cat "/sys/block/$disk/queue/max_hw_sectors_kb")" 128
equal "discards" "$(cat "/sys/block/$disk/queue/discard_max_bytes")" 0
for cpu in $(seq 0 $((queues - 1))); do
    taskset -c "$cpu" dd if="$file" of=/dev/null bs=4k count=64 iflag=direct 2>/run/dd.err || die "reading $disk failed: $(cat /run/dd.err)"
done
mark load "${TAG:-}"
common="--filename=$file --size=$size --verify=crc32c --verify_fatal=1 --do_verify=1"
# shellcheck disable=SC2086
{
    run_fio write-128k-qd4 $common --rw=write --bs=128k --iodepth=4
    run_fio randwrite-4k-qd1 $common --rw=randwrite --bs=4k --iodepth=1 --io_size=256k
    run_fio randwrite-4k-qd32 $common --rw=randwrite --bs=4k --iodepth=32
    run_fio randwrite-mixed-sizes $common --rw=randwrite --bsrange=512-128k --blockalign=512 --iodepth=16
    run_fio randrw-16k-qd16-flush $common --rw=randrw --bs=16k --iodepth=16 --fdatasync=8
    run_fio randwrite-4k-fua $common --rw=randwrite --bs=4k --iodepth=8 --sync=dsync --io_size=256k
    run_fio randwrite-4k-2jobs $common --rw=randwrite --bs=4k --iodepth=32 --numjobs=2 --offset_increment="$size"
}
/usr/bin/blkdiscard -z -o 0 -l $((1 << 20)) "$file" || die "write zeroes failed"
dd if="$file" bs=1M count=1 iflag=direct 2>/dev/null | cmp -n $((1 << 20)) - /dev/zero || die "the disk differs after write zeroes"
nvme flush "$file" || die "flush failed"
no_kernel_errors
