# shellcheck shell=sh disable=SC2154
# A disk with protection information (type 1, metadata in a separate buffer), which the kernel uses by itself.
# DO=write|read   writes a text with it, and verified I/O; or reads the text and compares
# BAD=N           a block of 4096 bytes whose guard does not match, of the first 64
# FIO_SIZE=BYTES  of the verified I/O, default 8m
wait_for_namespace "$disk"
dev=/dev/$disk
text() { yes "the guest's own words, line after line" | head -c 1048576; }
format=$(cat "/sys/block/$disk/integrity/format")
[ "$format" = T10-DIF-TYPE1-CRC ] || die "the kernel sees $format, and not protection information of type 1"
for way in read_verify write_generate; do
    [ "$(cat "/sys/block/$disk/integrity/$way")" = 1 ] || die "the kernel does not $way"
done

case ${DO:-read} in
write)
    text | dd of="$dev" bs=64k iflag=fullblock oflag=direct conv=fsync 2>/dev/null || die "writing the text"
    text | cmp -n 1048576 - "$dev" || die "the text is not there"
    run_fio protected --filename="$dev" --offset=16m --size="${FIO_SIZE:-8m}" --rw=randwrite --bsrange=4k-128k --blockalign=4k \
        --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1
    # Blocks that were given back, and those that were made zeroes, have nothing to check, or the right thing.
    /usr/bin/blkdiscard -o 25165824 -l 1048576 "$dev" || die "blkdiscard"
    /usr/bin/blkdiscard -z -o 26214400 -l 1048576 "$dev" || die "blkdiscard -z"
    dd if="$dev" bs=64k skip=384 count=32 iflag=direct 2>/dev/null | cmp -n 2097152 - /dev/zero || die "no zeroes"
    ;;
read)
    at=0
    while [ $at -lt 64 ]; do
        if dd if="$dev" of=/tmp/block bs=4096 skip=$at count=1 iflag=direct 2>/tmp/why; then
            [ "$at" != "${BAD:-none}" ] || die "block $at was read, and should not be"
            text | dd bs=4096 skip=$at count=1 iflag=fullblock 2>/dev/null | cmp - /tmp/block || die "block $at has changed"
        else
            [ "$at" = "${BAD:-none}" ] || die "block $at cannot be read: $(cat /tmp/why)"
            say "block $at is refused, as it should be: $(cat /tmp/why)"
        fi
        at=$((at + 1))
    done
    ;;
esac
