# shellcheck shell=sh disable=SC2154
# A verified load that runs while the host does something to the disk's daemon or to the machine, until it sends "enough".
# Every block is read back and checked; an error, or a request that does not come back, is a failure.
# LOAD_SIZE=BYTES   of the part of the disk in use, 32m unless told
# THROUGH=1         in write-through: the driver flushes nothing
# KEPT=BYTES        written before, from 64 MiB on, and verified in the end
# "full DISK"       that disk's medium has no room: the write is refused, and says why
# "room DISK"       it has again
kept() { run_fio kept --filename="/dev/$disk" --offset=64m --size="$KEPT" --bs=16k --iodepth=8 --verify=crc32c --verify_fatal=1 "$@"; }
words() { yes "words for which there may be no room" | head -c 16777216; }
write_words() { words | dd of="/dev/$1" bs=64k iflag=fullblock oflag=direct conv=fsync; }

wait_for_namespace "$disk"
[ -z "${THROUGH-}" ] || echo "write through" >"/sys/block/$disk/cache_type" || die "the write cache mode cannot be set"
[ -z "${KEPT-}" ] || kept --rw=write --do_verify=0
fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randrw --rwmixread=40 --bsrange=512-64k --blockalign=512 \
    --iodepth=16 --size="${LOAD_SIZE:-32m}" --verify=crc32c --verify_fatal=1 --verify_backlog=256 --time_based --runtime=1200 --thread \
    --eta=never >/run/load.log 2>&1 </dev/null &
load=$!
progress() { awk '{ print $1 + $5 }' "/sys/block/$disk/stat"; }
sleep 1
mark "loaded"
while :; do
    read -r word other || die "the host's side of the port closed"
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
    full)
        wait_for_namespace "$other"
        must_fail "a write for which there is no room" write_words "$other"
        grep -q "No space left" /run/must_fail.log || die "refused for another reason: $(cat /run/must_fail.log)"
        mark "full"
        ;;
    room)
        write_words "$other" 2>/run/dd.err || die "there is room, and yet: $(cat /run/dd.err)"
        words | cmp -n 16777216 - "/dev/$other" || die "the words are not there"
        mark "room"
        ;;
    *) die "unknown word $word" ;;
    esac
done
kill -INT $load
wait $load || true
grep -q 'err= 0' /run/load.log || { cat /run/load.log; die "the load saw errors"; }
say "load: $(grep -oE '(read|write): IOPS=[^ ,]+' /run/load.log | tr '\n' ' ')"
[ -z "${KEPT-}" ] || kept --rw=read
# From one end to the other with nothing else beside it.
run_fio after --filename="/dev/$disk" --size="${LOAD_SIZE:-32m}" --rw=randwrite --bs=4k --iodepth=16 --io_size=4m --verify=crc32c --verify_fatal=1
no_kernel_errors
