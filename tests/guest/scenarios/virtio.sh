# shellcheck shell=sh disable=SC2154
# A virtio disk as the stock driver sees it: queues, limits, identity, each queue in use; then it grows and shrinks under load.
# DISK=vda        the disk
# QUEUES=N        the queues expected, 2 unless told
# SERIAL=TEXT     the serial number expected
# BLOCK=BYTES     the logical block size expected, 512 unless told
# READ_ONLY=1     the disk cannot be written; nothing is resized then
# RESIZES=N       how often the host sends "resized BYTES", 0 unless told
queues=${QUEUES:-2}
block=/sys/block/$disk

check_each_queue() {
    queue=0
    while [ "$queue" -lt "$queues" ]; do
        cpu=$(sed 's/[^0-9].*//' "$block/mq/$queue/cpu_list")
        before=$(awk -v name="req.$queue" '$NF ~ name "$" { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' /proc/interrupts)
        taskset -c "$cpu" dd if="/dev/$disk" of=/dev/null bs=4k count=64 iflag=direct 2>/run/dd.err || die "reading: $(cat /run/dd.err)"
        after=$(awk -v name="req.$queue" '$NF ~ name "$" { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' /proc/interrupts)
        [ "$after" -gt "$before" ] || die "queue $queue raised no interrupt while processor $cpu read"
        queue=$((queue + 1))
    done
}

check_read_only() {
    equal "read-only" "$(cat "$block/ro")" 1
    must_fail "a write to a read-only disk" dd if=/dev/zero of="/dev/$disk" bs=4k count=1 oflag=direct
}

# Larger or smaller: the guest sees it, the last block is there, and the load beside it sees no error.
resize_under_load() {
    fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randwrite --bs=4k --iodepth=8 \
        --size=16m --verify=crc32c --verify_fatal=1 --time_based --runtime=45 --thread --eta=never \
        >/run/load.log 2>&1 </dev/null &
    load=$!
    left=$RESIZES
    while [ "$left" -gt 0 ]; do
        await_host resized
        wait_for_size "$disk" "$answer"
        dd if="/dev/$disk" of=/dev/null bs=4096 skip=$((answer / 4096 - 1)) count=1 iflag=direct 2>/dev/null || die "the last block cannot be read"
        kill -0 $load 2>/dev/null || { cat /run/load.log; die "the load ended"; }
        left=$((left - 1))
    done
    # It ends by its own time: after a signal, fio may go on with what it verifies.
    wait $load || { cat /run/load.log; die "the load failed"; }
    grep -q 'err= 0' /run/load.log || { cat /run/load.log; die "the load saw errors"; }
}

wait_for_disk "$disk"
equal "hardware queues" "$(find "$block/mq" -mindepth 1 -maxdepth 1 | wc -l)" "$queues"
equal "logical block size" "$(cat "$block/queue/logical_block_size")" "${BLOCK:-512}"
# Whole pages, whatever the blocks are.
equal "physical block size" "$(cat "$block/queue/physical_block_size")" 4096
equal "least I/O size" "$(cat "$block/queue/minimum_io_size")" 4096
equal "write cache" "$(cat "$block/queue/write_cache")" "write back"
[ -z "${SERIAL-}" ] || equal "serial" "$(cat "$block/serial")" "$SERIAL"
if [ "${READ_ONLY:-0}" = 1 ]; then
    check_read_only
else
    equal "read-only" "$(cat "$block/ro")" 0
    [ "$(cat "$block/queue/discard_max_bytes")" -gt 0 ] || die "no discard"
    [ "$(cat "$block/queue/write_zeroes_max_bytes")" -gt 0 ] || die "no write zeroes"
    # The other mode of the write cache: writes are durable when they end, and the driver flushes no more.
    echo "write through" >"$block/cache_type" || die "the write cache mode cannot be set"
    equal "write cache" "$(cat "$block/queue/write_cache")" "write through"
    run_fio through --filename="/dev/$disk" --size=4m --rw=randwrite --bs=4k --iodepth=8 --verify=crc32c --verify_fatal=1
    echo "write back" >"$block/cache_type"
    check_each_queue
    [ "${RESIZES:-0}" = 0 ] || resize_under_load
fi
no_kernel_errors
