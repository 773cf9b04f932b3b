# shellcheck shell=sh disable=SC2154
# The caps of the disk's throttle hold: READS a second, WRITTEN bytes a second. That something comes through is all that can be said from
# below on a machine of unknown speed. The host waits for "await begin" and "did READ WRITTEN", in bytes.
wait_for_namespace "$disk"
# Each request is one on the disk, and whoever looked for partitions has done so.
for file in /sys/block/nvme*/queue/nomerges; do echo 2 >"$file" 2>/dev/null || true; done
sleep 1
seconds=10

# within WHAT FOUND CAP
within() {
    [ "$2" -le $(($3 * 102 / 100)) ] || die "$1: $2 a second, and the cap is $3"
    [ "$2" -ge $(($3 / 64)) ] || die "$1: $2 a second, where $3 may be had"
    say "$1: $2 a second of $3"
}

# rate RW: what fio did in a second, requests and KiB; and in all, KiB.
rate() {
    fio --name="$1" --filename="/dev/$disk" --direct=1 --rw="$1" --bs=4k --ioengine=io_uring --iodepth=8 --time_based \
        --runtime=$seconds --output-format=terse --terse-version=3 >/run/terse || die "fio: $(cat /run/terse)"
    # Fields 6 to 8: total KiB, KiB/s, IOPS of reads; 47 to 49 of writes.
    awk -F';' -v write="$([ "$1" = randwrite ] && echo 1 || echo 0)" '{ print write ? $49 " " $48 " " $47 : $8 " " $7 " " $6 }' /run/terse
}

await_host begin
set -- $(rate randread)
read=$(($3 * 1024))
within "reads" "$1" "$READS"
set -- $(rate randwrite)
within "bytes written" $(($2 * 1024)) "$WRITTEN"
mark "did $read $(($3 * 1024))"
no_kernel_errors
