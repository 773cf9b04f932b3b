# shellcheck shell=sh disable=SC2154
# The guest makes, attaches, uses, detaches and deletes a namespace of its own.
# NS_BYTES=N   its size, default 16 MiB; the operator's quota must allow at least that and not
#              LARGE_BYTES (default 1 PiB)
supports oacs 3 "namespace management" || exit 0
wait_for_namespace "$disk"
bytes=${NS_BYTES:-16777216}
blocks=$((bytes / 512))
id=$(field ctrl cntlid "$ctrl")
unallocated() { field ctrl unvmcap "$ctrl"; }

create() { nvme create-ns "$ctrl" --nsze="$1" --ncap="$1" --flbas="${2:-0}"; }

if ! create $blocks >/run/created 2>&1; then
    cat /run/created
    lenient "create namespace was refused"
    exit 0
fi
cat /run/created
nsid=$(sed -n 's/.*nsid:\([0-9]*\).*/\1/p' /run/created)
[ "$nsid" -gt 1 ] || die "the new namespace has the identifier '$nsid'"
new=nvme0n$nsid
nvme list-ns "$ctrl" -a | grep -q ":0x$(printf %x "$nsid")$" || die "the new namespace is not allocated"
nvme list-ns "$ctrl" | grep -q ":0x$(printf %x "$nsid")$" && die "the new namespace is active before it was attached"

nvme attach-ns "$ctrl" -n "$nsid" -c "$id" || die "attach"
must_fail_with "a second attach" "already attached" nvme attach-ns "$ctrl" -n "$nsid" -c "$id"
wait_for_namespace "$new"
wait_for_size "$new" "$bytes"
run_fio own-namespace --filename="/dev/$new" --rw=randwrite --bs=4k --size=4m --iodepth=8 --verify=crc32c

nvme detach-ns "$ctrl" -n "$nsid" -c "$id" || die "detach"
must_fail_with "a second detach" "not attached" nvme detach-ns "$ctrl" -n "$nsid" -c "$id"
wait_for_no_namespace "$new"
nvme delete-ns "$ctrl" -n "$nsid" || die "delete"
must_fail_with "a second delete" "invalid (namespace|field)" nvme delete-ns "$ctrl" -n "$nsid"
must_fail_with "a namespace larger than the quota" "insufficient capacity|capacity exceeded" create $((${LARGE_BYTES:-1125899906842624} / 512))
must_fail_with "an LBA format that does not exist" "invalid format" create $blocks 15
wait_for_namespace "$disk"
no_kernel_errors
