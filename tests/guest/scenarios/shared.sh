# shellcheck shell=sh disable=SC2154
# Two guests share a namespace, with reservations between them. ROLE=a|b. The host sends the
# steps in this order, the next one only after the guest of the previous one asks for its next
# step or has ended:
#   a register, a acquire, b denied, b register, b data, a exclusive, b locked-out, b preempt,
#   a preempted, b release, a open, b done, a done
wait_for_namespace "$disk"
dev=/dev/$disk

write_word() { printf '%-4096s' "$1" | dd of="$dev" bs=4096 count=1 oflag=direct conv=fsync 2>/run/dd.err; }
read_word() { dd if="$dev" bs=4096 count=1 iflag=direct 2>/run/dd.err | sed 's/ *$//'; }
registrants() { nvme resv-report "$dev" | awk -F: '/regctl/ { gsub(/ /, "", $2); print $2; exit }'; }

role_a() {
    set_host_identifier guest-0A
    await_host register
    nvme resv-register "$dev" --nrkey=0xa --rrega=0 --cptpl=0 || die "register"
    equal "registrants" "$(registrants)" 1
    await_host acquire
    nvme resv-acquire "$dev" --crkey=0xa --rtype=1 --racqa=0 || die "acquire write exclusive"
    write_word "from a" || die "the holder cannot write: $(cat /run/dd.err)"
    await_host exclusive
    equal "registrants" "$(registrants)" 2
    nvme resv-release "$dev" --crkey=0xa --rtype=1 --rrela=0 || die "release"
    nvme resv-acquire "$dev" --crkey=0xa --rtype=2 --racqa=0 || die "acquire exclusive access"
    await_host preempted
    must_fail_with "a release by a preempted host" "conflict" nvme resv-release "$dev" --crkey=0xa --rtype=2 --rrela=0
    must_fail "a write by a preempted host" write_word "stale a"
    must_fail "a read by a preempted host" dd if="$dev" of=/dev/null bs=4096 count=1 iflag=direct
    await_host open
    equal "the shared block" "$(read_word)" "from b, preempting"
    write_word "from a, at last" || die "nobody holds a reservation, yet a cannot write"
    await_host "done"
}

role_b() {
    set_host_identifier guest-0B
    await_host denied
    must_fail "a write under another's reservation" write_word "b intrudes"
    equal "the shared block" "$(read_word)" "from a"
    must_fail_with "an acquire without registration" "conflict" nvme resv-acquire "$dev" --crkey=0xb --rtype=1 --racqa=0
    await_host register
    nvme resv-register "$dev" --nrkey=0xb --rrega=0 --cptpl=0 || die "register"
    await_host data
    must_fail "a write by a registrant under write exclusive" write_word "b intrudes"
    equal "the shared block" "$(read_word)" "from a"
    await_host locked-out
    must_fail "a read under exclusive access" dd if="$dev" of=/dev/null bs=4096 count=1 iflag=direct
    await_host preempt
    nvme resv-acquire "$dev" --crkey=0xb --prkey=0xa --rtype=2 --racqa=1 || die "preempt"
    equal "registrants" "$(registrants)" 1
    write_word "from b, preempting" || die "the new holder cannot write"
    await_host release
    nvme resv-release "$dev" --crkey=0xb --rtype=2 --rrela=0 || die "release"
    nvme resv-register "$dev" --crkey=0xb --rrega=1 --cptpl=0 || die "unregister"
    equal "registrants" "$(registrants)" 0
    await_host "done"
    equal "the shared block" "$(read_word)" "from a, at last"
}

supports oncs 5 reservations && "role_${ROLE:?}"
