# shellcheck shell=sh disable=SC2154
# A file system on the disk: made, used hard by many processes, trimmed, checked, and every
# byte of a known tree of files found again after unmounting.
# WORK_SECONDS=N   how long the stressors run, default 15
# TRIM=0           the machine's monitor offers no discard
wait_for_namespace "$disk"
mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 "/dev/$disk" || die "mkfs.ext4 failed"
mount -t ext4 -o discard "/dev/$disk" /mnt || die "mount failed"

mkdir /mnt/known
cp -r /usr/lib /usr/bin/fio /mnt/known/
(cd /mnt/known && find . -type f | sort | xargs sha256sum) >/run/manifest

# The hdd stressor's direct I/O is aligned to 512 bytes, whatever the disk's blocks are.
direct=direct,
[ "$(cat "/sys/block/$disk/queue/logical_block_size")" = 512 ] || direct=

mkdir /mnt/work
stress-ng --temp-path /mnt/work --timeout "${WORK_SECONDS:-15}" --verify --metrics-brief \
    --hdd 1 --hdd-bytes 16m --hdd-opts ${direct}fsync,wr-rnd,rd-rnd --iomix 1 --iomix-bytes 32m \
    --metamix 1 --rename 1 --fallocate 1 --fallocate-bytes 32m --fpunch 1 --dentry 1 --symlink 1 \
    --xattr 1 --copy-file 1 --copy-file-bytes 128m >/run/stress.log 2>&1 || {
    cat /run/stress.log
    die "stress-ng found a fault"
}
grep -E 'passed|failed|skipped' /run/stress.log
rm -rf /mnt/work
[ "${TRIM:-1}" = 0 ] || fstrim /mnt || die "fstrim failed"
sync
umount /mnt || die "umount failed"

e2fsck -f -n "/dev/$disk" || die "e2fsck found errors"
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 -o ro "/dev/$disk" /mnt || die "mount after the check failed"
(cd /mnt/known && sha256sum -c /run/manifest >/run/sums 2>&1) || {
    grep -v ': OK$' /run/sums
    die "files changed"
}
say "$(wc -l </run/manifest) files are as they were"
umount /mnt
no_kernel_errors
