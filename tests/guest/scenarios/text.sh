# shellcheck shell=sh disable=SC2154
# A text on the first MiB of the disk.
# DO=write|read   writes it, or reads it and compares
# FIO_SIZE=BYTES  behind it, of random writes: verified when written, and when read
# BAD=N           a block of 4096 bytes that cannot be read, and all others can
wait_for_namespace "$disk"
dev=/dev/$disk
behind() { run_fio behind --filename="$dev" --offset=4m --size="$FIO_SIZE" --bs=4k --iodepth=16 --verify=crc32c --verify_fatal=1 "$@"; }
text() { yes "the guest's own words, line after line" | head -c 1048576; }

case ${DO:-read} in
write)
    text | dd of="$dev" bs=64k iflag=fullblock oflag=direct conv=fsync 2>/dev/null || die "writing the text"
    text | cmp -n 1048576 - "$dev" || die "the text is not there"
    [ -z "${FIO_SIZE-}" ] || behind --rw=randwrite --do_verify=1
    ;;
read)
    at=0
    while [ $at -lt 256 ]; do
        if dd if="$dev" of=/tmp/block bs=4096 skip=$at count=1 iflag=direct 2>/dev/null; then
            [ "$at" != "${BAD:-none}" ] || die "block $at was read, and should not be"
            text | dd bs=4096 skip=$at count=1 iflag=fullblock 2>/dev/null | cmp - /tmp/block || die "block $at has changed"
        else
            [ "$at" = "${BAD:-none}" ] || die "block $at cannot be read"
            say "block $at is refused, as it should be"
        fi
        at=$((at + 1))
    done
    [ -z "${FIO_SIZE-}" ] || behind --rw=read
    ;;
esac
