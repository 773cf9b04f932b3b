# shellcheck shell=sh disable=SC2154
# A disk with protection information (metadata in a separate buffer), which the kernel uses by itself.
# TYPE=1|3        its type
# DO=write|read   writes a text with it, and verified I/O; or reads the text and compares
# BAD=N           a block of 4096 bytes whose guard does not match
# FIO_SIZE=BYTES  of the verified I/O, default 8m
wait_for_namespace "$disk"
dev=/dev/$disk
format=$(cat "/sys/block/$disk/integrity/format")
[ "$format" = "T10-DIF-TYPE${TYPE:?}-CRC" ] || die "the kernel sees $format, and not protection information of type $TYPE"
for way in read_verify write_generate; do
    [ "$(cat "/sys/block/$disk/integrity/$way")" = 1 ] || die "the kernel does not $way"
done

case ${DO:-read} in
write)
    write_text "$dev"
    run_fio protected --filename="$dev" --offset=16m --size="${FIO_SIZE:-8m}" --rw=randwrite --bsrange=4k-128k --blockalign=4k \
        --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1
    # Blocks that were given back, and those that were made zeroes, have nothing to check, or the right thing.
    /usr/bin/blkdiscard -o 25165824 -l 1048576 "$dev" || die "blkdiscard"
    /usr/bin/blkdiscard -z -o 26214400 -l 1048576 "$dev" || die "blkdiscard -z"
    dd if="$dev" bs=64k skip=384 count=32 iflag=direct 2>/dev/null | cmp -n 2097152 - /dev/zero || die "no zeroes"
    ;;
read)
    expect_text "$dev" "${BAD-}"
    ;;
esac
