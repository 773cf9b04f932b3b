# shellcheck shell=sh disable=SC2154
# fio writes, reads back and checks every block: sequential and random, several depths and block
# sizes, with flushes, FUA writes and discards.
# FIO_SIZE=BYTES      of each run, default 32m
# COALESCE=TIME,THR   first sets interrupt coalescing: time in 100 µs, threshold 0's based
# SHADOW=1            the controller must offer shadow doorbells (the driver then uses them)
size=${FIO_SIZE:-32m}
file=/dev/$disk

coalesce() {
    time=${COALESCE%,*} threshold=${COALESCE#*,}
    value=$((time << 8 | threshold))
    nvme set-feature "$ctrl" -f 8 -V $value || die "interrupt coalescing was refused"
    nvme get-feature "$ctrl" -f 8 | tee /run/feature
    grep -qi "value:0x0*$(printf %x $value)\b" /run/feature || die "interrupt coalescing was not kept"
}

# Whether discarded blocks read as zeroes. A virtio disk cannot say; ours do.
reads_zeroes() {
    case $disk in
    vd*) true ;;
    *) [ "$(($(field ns dlfeat "$file") & 7))" = 1 ] ;;
    esac
}

discard_run() {
    bytes=$((16 << 20))
    dd if=/dev/urandom of=/run/pattern bs=1M count=16 2>/dev/null
    dd if=/run/pattern of="$file" bs=1M oflag=direct 2>/dev/null || die "writing the pattern failed"
    /usr/bin/blkdiscard -o $((4 << 20)) -l $((4 << 20)) "$file" || die "discard failed"
    /usr/bin/blkdiscard -z -o $((10 << 20)) -l $((1 << 20)) "$file" || die "write zeroes failed"
    dd if=/dev/zero of=/run/pattern bs=1M seek=10 count=1 conv=notrunc 2>/dev/null
    if reads_zeroes; then
        dd if=/dev/zero of=/run/pattern bs=1M seek=4 count=4 conv=notrunc 2>/dev/null
    else
        say "discarded blocks may read as anything on this controller"
        dd if="$file" of=/run/pattern bs=1M skip=4 seek=4 count=4 iflag=direct conv=notrunc 2>/dev/null
    fi
    dd if="$file" bs=1M count=16 iflag=direct 2>/dev/null | cmp - /run/pattern || die "the disk differs after discard and write zeroes"
    rm /run/pattern
    say "discard and write zeroes of parts of $bytes bytes: as expected"
}

wait_for_namespace "$disk"
[ "${SHADOW:-0}" = 0 ] || supports oacs 8 "shadow doorbells" || die "no shadow doorbells"
[ -z "${COALESCE-}" ] || coalesce
common="--filename=$file --size=$size --verify=crc32c --verify_fatal=1 --do_verify=1"
lba=$(cat "/sys/block/$disk/queue/logical_block_size")
# shellcheck disable=SC2086
{
    run_fio write-1m-qd4 $common --rw=write --bs=1m --iodepth=4
    run_fio write-64k-qd1 $common --rw=write --bs=64k --iodepth=1
    run_fio randwrite-4k-qd1 $common --rw=randwrite --bs=4k --iodepth=1 --io_size=4m
    run_fio randwrite-4k-qd32 $common --rw=randwrite --bs=4k --iodepth=32
    run_fio randwrite-4k-qd128-2jobs $common --rw=randwrite --bs=4k --iodepth=128 --numjobs=2 --offset_increment="$size"
    run_fio randwrite-mixed-sizes $common --rw=randwrite --bsrange="$lba-256k" --blockalign="$lba" --iodepth=16
    run_fio randrw-16k-qd16-flush $common --rw=randrw --bs=16k --iodepth=16 --fdatasync=8
    run_fio randwrite-4k-fua $common --rw=randwrite --bs=4k --iodepth=8 --sync=dsync --io_size=4m
    run_fio trimwrite-64k $common --rw=randtrimwrite --bs=64k --iodepth=1
    run_fio write-beside-trims $common --rw=randwrite --bs=8k --iodepth=16 --name=trims --filename="$file" \
        --offset=256m --size="$size" --rw=randtrim --bs=64k --iodepth=16 --ioengine=io_uring --direct=1 --thread
    run_fio read-128k-qd8 --filename="$file" --size="$size" --rw=read --bs=128k --iodepth=8
    run_fio randread-512k-qd8 --filename="$file" --size="$size" --rw=randread --bs=512k --iodepth=8
}
discard_run
no_kernel_errors
