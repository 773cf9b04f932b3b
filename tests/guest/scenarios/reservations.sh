# shellcheck shell=sh disable=SC2154
# One host's reservations, every type; what two hosts do to each other is in shared.sh.
supports oncs 5 reservations || exit 0
wait_for_namespace "$disk"
dev=/dev/$disk

report() { nvme resv-report "$dev" | awk -F: -v name="$1" '{ k = $1; gsub(/[ \t]/, "", k) } k == name { gsub(/[ \t]/, "", $2); print $2; exit }'; }

set_host_identifier guest-01
equal "registrants at first" "$(report regctl)" 0
must_fail_with "an acquire without registration" "conflict" nvme resv-acquire "$dev" --crkey=1 --rtype=1 --racqa=0
# As the kernel does it for whoever reserves by its block layer: it always asks for persistence, which there is not.
nvme resv-register "$dev" --nrkey=1 --rrega=0 --cptpl=3 || die "register"
equal "registrants" "$(report regctl)" 1
equal "persistence" "$(report ptpls)" 0
must_fail_with "registering again with another key" "conflict" nvme resv-register "$dev" --nrkey=5 --rrega=0 --cptpl=0
must_fail_with "replacing a wrong key" "conflict" nvme resv-register "$dev" --crkey=9 --nrkey=2 --rrega=2 --cptpl=0
nvme resv-register "$dev" --crkey=1 --nrkey=2 --rrega=2 --cptpl=0 || die "replace the key"
must_fail_with "an acquire with the old key" "conflict" nvme resv-acquire "$dev" --crkey=1 --rtype=1 --racqa=0
generation=$(report gen)
for type in 1 2 3 4 5 6; do
    nvme resv-acquire "$dev" --crkey=2 --rtype=$type --racqa=0 || die "acquire type $type"
    equal "reservation type" "$(report rtype)" $type
    dd if=/dev/zero of="$dev" bs=4k count=1 oflag=direct 2>/dev/null || die "the holder cannot write under type $type"
    must_fail_with "releasing another type" "invalid field" nvme resv-release "$dev" --crkey=2 --rtype=$((type % 6 + 1)) --rrela=0
    nvme resv-release "$dev" --crkey=2 --rtype=$type --rrela=0 || die "release type $type"
    equal "reservation type after release" "$(report rtype)" 0
done
equal "generation after acquires and releases" "$(report gen)" "$generation"
must_fail "reservation type 7" nvme resv-acquire "$dev" --crkey=2 --rtype=7 --racqa=0
nvme resv-release "$dev" --crkey=2 --rrela=1 || die "clear"
equal "registrants after clear" "$(report regctl)" 0
nvme resv-register "$dev" --crkey=2 --nrkey=3 --rrega=2 --cptpl=3 --iekey || die "register by a key that is ignored"
equal "registrants after that" "$(report regctl)" 1
nvme resv-register "$dev" --rrega=1 --cptpl=0 --iekey || die "unregister by a key that is ignored"
equal "registrants at last" "$(report regctl)" 0
