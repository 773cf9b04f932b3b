# shellcheck shell=sh disable=SC2154
# Every LBA format without metadata that the namespace offers: formatted, seen by the kernel with
# the new block size, emptied, and usable.
# FORMATS=N   how many there must be at least, default 1
supports oacs 1 format || exit 0
wait_for_namespace "$disk"
dev=/dev/$disk
bytes=$(size_of "$disk")

formats() { nvme id-ns "$dev" | awk '/^lbaf/ { split($4, ms, ":"); split($5, ds, ":"); if (ms[2] == 0 && ds[2] > 0) print $2 ":" ds[2] }'; }
block_size_is() { [ "$(blockdev --getss "$dev")" = "$1" ]; }

try_format() { # INDEX SHIFT
    block=$((1 << $2))
    dd if=/dev/urandom of="$dev" bs=64k count=16 oflag=direct 2>/dev/null
    nvme format "$dev" --lbaf="$1" --ses=0 --force || die "format $1"
    eventually 20 block_size_is $block || die "the kernel sees blocks of $(blockdev --getss "$dev") bytes, not $block"
    equal "size after format $1" "$(size_of "$disk")" "$bytes"
    dd if="$dev" bs=64k count=16 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero || lenient "format left old data"
    run_fio "format-$1" --filename="$dev" --rw=randwrite --bs=16k --size=4m --iodepth=8 --verify=crc32c
}

original=$(nvme id-ns "$dev" | awk '/in use/ { print $2 }')
count=0
for entry in $(formats); do
    try_format "${entry%:*}" "${entry#*:}"
    count=$((count + 1))
done
[ $count -ge "${FORMATS:-1}" ] || die "$count LBA formats, expected ${FORMATS:-1}"
must_fail_with "an LBA format that does not exist" "invalid format" nvme format "$dev" --lbaf=15 --force
nvme format "$dev" --lbaf="$original" --force || die "back to format $original"
if [ $(($(field ctrl fna "$ctrl") & 4)) = 0 ]; then
    nvme format "$dev" --lbaf="$original" --ses=1 --force || lenient "user data erase was refused"
else
    dd if=/dev/urandom of="$dev" bs=64k count=16 oflag=direct 2>/dev/null
    nvme format "$dev" --lbaf="$original" --ses=2 --force || die "cryptographic erase"
    dd if="$dev" bs=64k count=16 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero || die "cryptographic erase left data"
    run_fio "erased" --filename="$dev" --rw=randwrite --bs=16k --size=4m --iodepth=8 --verify=crc32c
fi
