# shellcheck shell=sh disable=SC2154
# A verified load that runs while the host does something to the disk's daemon or to the machine, until it sends "enough".
# Every block is read back and checked; an error, or a request that does not come back, is a failure.
# LOAD_SIZE=BYTES   of the part of the disk in use, 32m unless told
wait_for_namespace "$disk"
fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randrw --rwmixread=40 --bsrange=512-64k --blockalign=512 \
    --iodepth=16 --size="${LOAD_SIZE:-32m}" --verify=crc32c --verify_fatal=1 --verify_backlog=256 --time_based --runtime=1200 --thread \
    --eta=never >/run/load.log 2>&1 </dev/null &
load=$!
progress() { awk '{ print $1 + $5 }' "/sys/block/$disk/stat"; }
sleep 1
mark "loaded"
while :; do
    read -r word _ || die "the host's side of the port closed"
    case $word in
    enough) break ;;
    # The load goes on: so many requests after the host asked.
    alive)
        before=$(progress)
        moves() { [ "$(progress)" -gt $((before + 50)) ]; }
        eventually 120 moves || die "the load stands still: $(cat "/sys/block/$disk/inflight") in flight; $(cat /run/load.log)"
        kill -0 $load 2>/dev/null || { cat /run/load.log; die "the load ended"; }
        mark "alive"
        ;;
    *) die "unknown word $word" ;;
    esac
done
kill -INT $load
wait $load || true
grep -q 'err= 0' /run/load.log || { cat /run/load.log; die "the load saw errors"; }
say "load: $(grep -oE '(read|write): IOPS=[^ ,]+' /run/load.log | tr '\n' ' ')"
# From one end to the other with nothing else beside it.
run_fio after --filename="/dev/$disk" --size="${LOAD_SIZE:-32m}" --rw=randwrite --bs=4k --iodepth=16 --io_size=4m --verify=crc32c --verify_fatal=1
no_kernel_errors
