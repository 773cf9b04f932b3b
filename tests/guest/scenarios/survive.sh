# shellcheck shell=sh disable=SC2154
# A verified load of depth 32, with flushes, until the host says "stop": what happens to the daemon meanwhile must not be
# noticed here. No error, no mismatch, no command that hangs.
# FIO_SIZE=BYTES   of each round, default 16m
file=/dev/$disk
size=${FIO_SIZE:-16m}

rounds() {
    round=0
    while [ ! -e /run/stop ]; do
        round=$((round + 1))
        run_fio "round-$round" --filename="$file" --size="$size" --rw=randrw --bs=4k --iodepth=32 --fdatasync=64 \
            --randseed=$round --verify=crc32c --verify_fatal=1 --do_verify=1
        echo $round >/run/rounds
    done
    touch /run/well
}

wait_for_namespace "$disk"
# longer than any pause, shorter than the driver's patience: what hangs is an error
for timeout in /sys/module/nvme_core/parameters/io_timeout; do
    say "the driver's patience: $(cat $timeout) s"
done
rounds &
await_host stop
touch /run/stop
wait $!
[ -e /run/well ] || die "the load ended badly"
say "rounds of verified I/O: $(cat /run/rounds)"
# a second look at what the last round left, through the page cache this time
run_fio last --filename="$file" --size="$size" --rw=randread --bs=64k --iodepth=8
no_kernel_errors
