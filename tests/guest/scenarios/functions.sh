# shellcheck shell=sh
# A guest with several functions of one engine: each is a controller with a disk of its own, all are used at once, each finds its own data.
# FUNCTIONS=N         how many, default 4
# FIO_SIZE=BYTES      of each disk's run, default 1m
count=${FUNCTIONS:-4}
size=${FIO_SIZE:-1m}

functions=$(seq 0 $((count - 1)))
for number in $functions; do
    wait_for_controller "nvme$number"
    wait_for_namespace "nvme${number}n1"
done
nvme list
equal "controllers" "$(find /sys/class/nvme -name 'nvme[0-9]*' | wc -l)" "$count"
equal "PCI functions that they are" "$(cat /sys/class/nvme/nvme*/address | sort -u | wc -l)" "$count"
equal "serial numbers" "$(cat /sys/class/nvme/nvme*/serial | sort -u | wc -l)" "$count"
# A first block that tells whose it is.
for number in $functions; do
    printf '%-4096s' "function $number" | dd of="/dev/nvme${number}n1" bs=4096 count=1 oflag=direct 2>/run/dd.err || die "writing: $(cat /run/dd.err)"
done
{
    printf '%s\n' '[global]' ioengine=io_uring direct=1 thread rw=randwrite bsrange=4k-64k iodepth=16 offset=4k "size=$size" \
        verify=pattern verify_fatal=1 do_verify=1
    for number in $functions; do
        printf '%s\n' "[function$number]" "filename=/dev/nvme${number}n1" "verify_pattern=0xf$number"
    done
} >/run/functions.fio
fio --output=/run/fio.log --eta=never /run/functions.fio >/run/fio.err 2>&1 || {
    cat /run/fio.log /run/fio.err
    die "fio on $count disks at once failed"
}
say "fio: $(grep -hoE '(read|write): IOPS=[^ ,]+' /run/fio.log | tr '\n' ' ')"
for number in $functions; do
    found=$(dd if="/dev/nvme${number}n1" bs=4096 count=1 iflag=direct 2>/run/dd.err | sed 's/ *$//')
    equal "what function $number's disk says" "$found" "function $number"
done
no_kernel_errors
