# shellcheck shell=sh
# An NVMe disk and a virtio disk in one machine: found, written, checked, with a file system; the controller is reset. Then a verified
# load on both, in turns: at the end of each, "turn", both have gone on. Its host's monitor may read no input for it: the load ends when the
# NVMe disk has grown.
# VIRTIO=vda       the virtio disk
# LOAD_SIZE=BYTES  of the part of each disk under load, 8m unless told
disks="nvme0n1 ${VIRTIO:-vda}"
size=${LOAD_SIZE:-8m}

file_system() { # DISK
    mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 "/dev/$1" || die "mkfs.ext4 failed on $1"
    mount -t ext4 "/dev/$1" /mnt || die "$1 cannot be mounted"
    cp /usr/bin/fio /usr/bin/busybox /mnt/ || die "copying to $1"
    umount /mnt || die "umount of $1"
    e2fsck -f -n "/dev/$1" >/run/fsck 2>&1 || { cat /run/fsck; die "e2fsck found errors on $1"; }
    mount -t ext4 -o ro "/dev/$1" /mnt || die "$1 cannot be mounted again"
    cmp /mnt/fio /usr/bin/fio || die "a file on $1 has changed"
    umount /mnt
    say "$1: a file system"
}

load() { # DISK
    fio --name=load --filename="/dev/$1" --ioengine=io_uring --direct=1 --rw=randrw --bsrange=512-32k --blockalign=512 --iodepth=16 \
        --size="$size" --verify=crc32c --verify_fatal=1 --verify_backlog=128 --time_based --runtime=3600 --thread --eta=never \
        >"/run/load.$1" 2>&1 </dev/null &
    eval "load_$1=\$!"
}

pid_of() { eval "echo \$load_$1"; }
progress() { awk '{ print $1 + $5 }' "/sys/block/$1/stat"; }
moves() { [ "$(progress "$1")" -gt "$2" ]; }

goes_on() { # DISK
    before=$(progress "$1")
    eventually 240 moves "$1" $((before + 50)) || die "$1 stands still: $(cat "/sys/block/$1/inflight") in flight; $(cat "/run/load.$1")"
    kill -0 "$(pid_of "$1")" 2>/dev/null || { cat "/run/load.$1"; die "the load on $1 ended"; }
}

for disk in $disks; do
    wait_for_namespace "$disk"
    run_fio "$disk" --filename="/dev/$disk" --size="$size" --rw=randwrite --bs=4k --iodepth=16 --verify=crc32c --verify_fatal=1
    file_system "$disk"
done
nvme list
grep -E 'nvme|virtio' /proc/interrupts
no_kernel_errors
nvme reset /dev/nvme0 || die "the controller cannot be reset: $(dmesg | tail -n 3)"
wait_for_controller nvme0
# The kernel tells of this one, and shall tell of no other.
dmesg -c >/dev/null
run_fio reset --filename=/dev/nvme0n1 --size=1m --rw=randread --bs=4k --iodepth=16
bytes=$(size_of nvme0n1)
for disk in $disks; do load "$disk"; done
until [ "$(size_of nvme0n1)" != "$bytes" ]; do
    for disk in $disks; do goes_on "$disk"; done
    mark "turn"
done
for disk in $disks; do
    pid=$(pid_of "$disk")
    kill -INT "$pid"
    wait "$pid" || true
    grep -q 'err= 0' "/run/load.$disk" || { cat "/run/load.$disk"; die "the load on $disk saw errors"; }
    say "load on $disk: $(grep -oE '(read|write): IOPS=[^ ,]+' "/run/load.$disk" | tr '\n' ' ')"
done
no_kernel_errors
