# shellcheck shell=sh disable=SC2154
# The nvme tool sends every I/O command, and what it leaves on the disk is checked.
wait_for_namespace "$disk"
dev=/dev/$disk
lba=$(cat "/sys/block/$disk/queue/logical_block_size")
size=$((8 * lba)) # eight blocks, the unit of everything below
for name in a b zero; do head -c $size /dev/urandom >/run/$name; done
head -c $size /dev/zero >/run/zero

put() { nvme write "$dev" -s "$1" -c 7 -z $size -d "/run/$2" >/dev/null || die "write at $1"; }
holds() { # START FILE
    nvme read "$dev" -s "$1" -c 7 -z $size -d /run/got >/dev/null || die "read at $1"
    cmp "/run/$2" /run/got || die "the blocks at $1 are not what is expected ($2)"
}

basic() {
    put 0 a
    holds 0 a
    nvme write "$dev" -s 8 -c 7 -z $size -d /run/b --force-unit-access >/dev/null || die "FUA write"
    holds 8 b
    nvme flush "$dev" -n 1 || die "flush"
    last=$(($(size_of "$disk") / lba))
    must_fail_with "a read across the end" "lba out of range" nvme read "$dev" -s $((last - 4)) -c 7 -z $size -d /run/got
    must_fail_with "a write behind the end" "lba out of range" nvme write "$dev" -s $last -c 7 -z $size -d /run/a
    must_fail_with "a read at the largest address" "lba out of range" nvme read "$dev" -s 0xffffffffffffffff -c 7 -z $size -d /run/got
}

compare() {
    nvme compare "$dev" -s 0 -c 7 -z $size -d /run/a || die "compare of equal data"
    must_fail_with "compare of unequal data" "compare failure" nvme compare "$dev" -s 0 -c 7 -z $size -d /run/b
}

copy() {
    if [ "$(field ns mssrl "$dev")" = 0 ]; then lenient "copy has no room" && return; fi
    nvme copy "$dev" --sdlba=100 --slbs=0 --blocks=7 || die "copy of one range"
    holds 100 a
    if [ "$(field ns msrc "$dev")" -ge 1 ]; then
        nvme copy "$dev" --sdlba=200 --slbs=8,0 --blocks=7,7 || die "copy of two ranges"
        holds 200 b
        holds 208 a
    fi
    must_fail_with "a copy from behind the end" "lba out of range" nvme copy "$dev" --sdlba=0 --slbs=$last --blocks=7
    must_fail_with "a copy to behind the end" "lba out of range" nvme copy "$dev" --sdlba=$last --slbs=0 --blocks=7
}

zeroes() {
    put 300 a
    put 308 b
    nvme write-zeroes "$dev" -s 300 -c 7 || die "write zeroes"
    holds 300 zero
    holds 308 b
    must_fail_with "write zeroes across the end" "lba out of range" nvme write-zeroes "$dev" -s $((last - 4)) -c 7
}

deallocate() {
    put 400 a
    put 408 b
    put 416 a
    nvme dsm "$dev" --ad --slbs=400,416 --blocks=8,8 || die "dataset management"
    holds 408 b
    if [ $(($(field ns dlfeat "$dev") & 7)) = 1 ]; then
        holds 400 zero
        holds 416 zero
    else
        nvme read "$dev" -s 400 -c 7 -z $size -d /run/got >/dev/null || die "deallocated blocks must be readable"
    fi
}

verify() { nvme verify "$dev" -s 0 -c 15 || die "verify"; }

uncorrectable() {
    put 500 a
    nvme write-uncor "$dev" -s 502 -c 1 || die "write uncorrectable"
    must_fail_with "a read of an uncorrectable block" "unrecovered read error" nvme read "$dev" -s 500 -c 7 -z $size -d /run/got
    must_fail_with "a verify of an uncorrectable block" "unrecovered read error" nvme verify "$dev" -s 500 -c 7
    put 500 b
    holds 500 b
}

basic
! supports oncs 0 compare || compare
! supports oncs 8 copy || copy
! supports oncs 3 "write zeroes" || zeroes
! supports oncs 2 "dataset management" || deallocate
! supports oncs 7 verify || verify
! supports oncs 1 "write uncorrectable" || uncorrectable
