# shellcheck shell=sh disable=SC2154
# A text on the first MiB of the disk.
# DO=write|read   writes it, or reads it and compares
# FIO_SIZE=BYTES  behind it, of random writes: verified when written, and when read
# BAD=N           a block of 4096 bytes that cannot be read, and all others can
wait_for_namespace "$disk"
dev=/dev/$disk
behind() { run_fio behind --filename="$dev" --offset=4m --size="$FIO_SIZE" --bs=4k --iodepth=16 --verify=crc32c --verify_fatal=1 "$@"; }

case ${DO:-read} in
write)
    write_text "$dev"
    [ -z "${FIO_SIZE-}" ] || behind --rw=randwrite --do_verify=1
    ;;
read)
    expect_text "$dev" "${BAD-}"
    [ -z "${FIO_SIZE-}" ] || behind --rw=read
    ;;
esac
