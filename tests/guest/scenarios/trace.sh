# shellcheck shell=sh disable=SC2154
# A fio job of known requests, traced by the guest's kernel as well; the trace goes to the disk of OUTBOX bytes.
wait_for_namespace "$disk"
outbox=
find_outbox() {
    for path in /sys/block/nvme*n1; do
        if [ "$(($(cat "$path/size") * 512))" = "$OUTBOX" ]; then outbox=$(basename "$path") && return; fi
    done
    return 1
}
eventually 30 find_outbox || die "there is no disk of $OUTBOX bytes: $(ls /sys/block)"
find_outbox

# Of two NVMe disks either may be found first.
find_disk() {
    for path in /sys/block/nvme*n1; do
        if [ "$(basename "$path")" != "$outbox" ]; then disk=$(basename "$path") && return; fi
    done
    return 1
}
case $disk in
nvme*)
    eventually 30 find_disk || die "there is no other disk than $outbox: $(ls /sys/block)"
    find_disk
    ;;
esac

tracing=/sys/kernel/tracing
mount -t tracefs tracefs $tracing || die "the guest's kernel has no tracefs"
echo 4096 >$tracing/buffer_size_kb
echo mono >$tracing/trace_clock
# A request is to stay what fio asked for.
echo 2 >"/sys/block/$disk/queue/nomerges"
await_host traced
for event in block_rq_issue block_rq_complete; do
    echo 1 >"$tracing/events/block/$event/enable" || die "the guest's kernel has no event $event"
done
run_fio reads --filename="/dev/$disk" --rw=read --bs=16k --size=4M --iodepth=1
run_fio writes --filename="/dev/$disk" --rw=randwrite --bs=4k --io_size=2M --size=32M --iodepth=4
echo 0 >$tracing/tracing_on
await_host done
grep block_rq_ $tracing/trace >/run/guest.txt
dd if=/run/guest.txt of="/dev/$outbox" bs=64k conv=sync oflag=direct 2>/dev/null || die "the trace does not fit into the disk"
say "$(wc -l </run/guest.txt) events"
