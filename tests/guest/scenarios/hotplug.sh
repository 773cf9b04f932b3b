# shellcheck shell=sh disable=SC2154
# Namespaces come, grow, shrink and go while the disk is under load. The host does it through
# Millrace and sends, when done:
#   attached DEVICE BYTES     resized DEVICE BYTES (twice: larger, smaller)     detached DEVICE
# DEVICE is the new one, such as nvme0n2. The load runs on the first disk throughout and must
# see no error; a second load runs on the new one while it goes, and may only fail, not hang.
wait_for_namespace "$disk"
say "async events the controller reports: $(field ctrl oaes "$ctrl")"
fio --name=load --filename="/dev/$disk" --ioengine=io_uring --direct=1 --rw=randwrite --bs=4k --iodepth=8 \
    --size=16m --verify=crc32c --verify_fatal=1 --time_based --runtime=600 --thread --eta=never \
    --trigger-file=/run/stop-load --trigger=true >/run/load.log 2>&1 </dev/null &
load=$!

still_loaded() { kill -0 $load 2>/dev/null || { cat /run/load.log; die "the load on $disk ended: $1"; }; }

use_new() { # DEVICE: a short verified load on it
    run_fio "on-$1" --filename="/dev/$1" --rw=randwrite --bs=4k --iodepth=8 --size=8m --verify=crc32c --verify_fatal=1
}

await_host attached
new=${answer% *} bytes=${answer#* }
wait_for_namespace "$new"
wait_for_size "$new" "$bytes"
use_new "$new"
still_loaded "attach"

for step in grow shrink; do
    await_host resized
    bytes=${answer#* }
    wait_for_size "$new" "$bytes"
    # the last block is there, and the one behind it is not
    dd if="/dev/$new" of=/dev/null bs=4096 skip=$((bytes / 4096 - 1)) count=1 iflag=direct 2>/dev/null || die "the last block cannot be read after $step"
    equal "blocks behind the end after $step" "$(dd if="/dev/$new" bs=4096 skip=$((bytes / 4096)) count=1 iflag=direct 2>/dev/null | wc -c)" 0
    use_new "$new"
    still_loaded "$step"
done

fio --name=doomed --filename="/dev/$new" --ioengine=io_uring --direct=1 --rw=randrw --bs=4k --iodepth=8 --thread \
    --size=8m --time_based --runtime=600 --eta=never --allow_file_create=0 >/run/doomed.log 2>&1 </dev/null &
doomed=$!
io_count() { awk '{ print $1 + $5 }' "/sys/block/$new/stat"; }
before=$(io_count)
is_working() { [ "$(io_count)" -gt $((before + 100)) ]; }
eventually 30 is_working || die "the second load does not begin: $(cat /run/doomed.log)"
await_host detached
wait_for_no_namespace "$new"
ended() { ! kill -0 $doomed 2>/dev/null; }
eventually 30 ended || {
    cat /run/doomed.log
    for task in /proc/$doomed/task/*; do echo "$task: $(cat "$task/comm"): $(cat "$task/wchan")"; done
    grep . /sys/block/nvme*/inflight /sys/block/nvme*/stat
    die "I/O to a detached namespace hangs"
}
still_loaded "detach"

kill -INT $load
wait $load || true
grep -q 'err= 0' /run/load.log || { cat /run/load.log; die "the load on $disk saw errors"; }
dmesg | grep "$disk" | grep -E 'I/O error|timeout' && die "the kernel logged errors of $disk"
say "load: $(grep -oE 'write: IOPS=[^ ,]+' /run/load.log)"
