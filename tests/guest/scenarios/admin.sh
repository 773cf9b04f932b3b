# shellcheck shell=sh disable=SC2154
# The nvme tool reads everything a controller tells about itself: identify, logs, features; and
# sets the features that can be set.

identify() {
    nvme id-ctrl "$ctrl"
    for name in sn mn fr subnqn; do
        [ -n "$(field ctrl $name "$ctrl")" ] || die "identify controller: $name is empty"
    done
    [ $(($(field ctrl ver "$ctrl"))) -ge $((0x10400)) ] || die "the version is below 1.4"
    nvme list-ns "$ctrl" | grep -q ':0x1$' || die "namespace 1 is not in the list of active namespaces"
    nvme list-ns "$ctrl" -a | grep -q ':0x1$' || die "namespace 1 is not in the list of allocated namespaces"
    nvme list-ctrl "$ctrl" >/dev/null || die "list of controllers"
    nvme list-ctrl "$ctrl" -n 1 >/dev/null || die "list of the namespace's controllers"
    nvme id-ns "$ctrl" -n 1 || die "identify namespace"
    nvme ns-descs "$ctrl" -n 1 | tee /run/descs
    grep -qE '^(uuid|nguid|eui64)' /run/descs || lenient "the namespace has no durable identifier"
    nvme nvm-id-ctrl "$ctrl" >/dev/null || die "identify controller of the NVM command set"
    nvme id-iocs "$ctrl" >/dev/null || lenient "no list of I/O command sets"
    nvme cmdset-ind-id-ns "$ctrl" -n 1 >/dev/null || die "independent identify namespace"
    must_fail "identify of namespace FFFFFFF0h" nvme id-ns "$ctrl" -n 0xfffffff0
    equal "size of the missing namespace 77" "$(($(nvme id-ns "$ctrl" -n 77 --force | awk '/^nsze/ { print $3 }')))" 0
    must_fail_with "identify with CNS FFh" "invalid field" \
        nvme admin-passthru "$ctrl" --opcode=6 --cdw10=0xff --data-len=4096 --read
}

smart() { nvme smart-log "$ctrl" | awk -v name="$1" '$1 == name { sub(/^[^:]*: */, ""); print $1 + 0; exit }'; }

logs() {
    nvme smart-log "$ctrl" || die "SMART log"
    before=$(smart host_read_commands)
    dd if="/dev/$disk" of=/dev/null bs=4k count=100 iflag=direct 2>/dev/null
    equal "read commands counted for 100 reads" $(($(smart host_read_commands) - before)) 100
    before=$(smart host_write_commands)
    dd if=/dev/zero of="/dev/$disk" bs=4k count=50 oflag=direct 2>/dev/null
    equal "write commands counted for 50 writes" $(($(smart host_write_commands) - before)) 50
    nvme error-log "$ctrl" -e 1 >/dev/null || die "error log"
    nvme fw-log "$ctrl" || die "firmware slot log"
    nvme changed-ns-list-log "$ctrl" || die "changed namespace list"
    # without --csi the tool maps the registers, which a kernel that is strict about device memory refuses
    nvme effects-log "$ctrl" --csi=0 >/run/effects || lenient "no commands supported and effects log"
    grep -qi 'ACS6' /run/effects || lenient "the effects log does not list identify"
    must_fail_with "log page BFh" "invalid (log page|field)" nvme get-log "$ctrl" --log-id=0xbf --log-len=512
    must_fail "log page 2 at an offset behind its end" nvme get-log "$ctrl" --log-id=2 --log-len=512 --lpo=0x100000
}

# feature ID [MORE...]: the current value, decimal
feature() {
    id=$1
    shift
    nvme get-feature "$ctrl" -f "$id" "$@" >/run/feature || die "get feature $id"
    echo $((0x$(sed -n 's/.*[Vv]alue:\(0x\)\{0,1\}\([0-9a-fA-F]\{8\}\).*/\2/p' /run/feature | head -n 1)))
}

# set_and_read ID VALUE [MORE...]: sets, reads back (with the options given), sets to what it was
set_and_read() {
    id=$1 value=$2
    shift 2
    old=$(feature "$id" "$@")
    nvme set-feature "$ctrl" -f "$id" -V "$value" >/dev/null || { lenient "set feature $id to $value" && return; }
    equal "feature $id after setting it" "$(feature "$id" "$@")" $((value))
    nvme set-feature "$ctrl" -f "$id" -V "$old" >/dev/null || die "set feature $id back to $old"
}

features() {
    for id in 1 2 4 6 7 8 9 0xa 0xb; do say "feature $id is $(feature $id)"; done
    nvme get-feature "$ctrl" -f 5 -n 1 || die "get feature 5"
    nvme get-feature "/dev/$disk" -f 7 || die "get feature 7, which is the controller's, by a namespace"
    nvme get-feature "$ctrl" -f 0xe || die "get feature 0Eh"
    nvme get-feature "$ctrl" -f 0x16 >/dev/null || die "get feature 16h"
    set_and_read 1 $((0x03020103))
    set_and_read 4 $((0x150))
    set_and_read 8 $((0x0203))
    set_and_read 9 $((0x10001)) --cdw11=1 # of vector 1
    set_and_read 0xb $((0x100))
    if [ $(($(field ctrl vwc "$ctrl") & 1)) = 1 ]; then set_and_read 6 0; fi
    printf '\000\000\000\000\001\000\000\000' >/run/time
    nvme set-feature "$ctrl" -f 0xe -l 8 -d /run/time >/dev/null || die "set the timestamp"
    must_fail_with "setting the number of queues after queues exist" "sequence|permission denied" nvme set-feature "$ctrl" -f 7 -V 0x10001
    must_fail_with "an unknown feature" "invalid field" nvme get-feature "$ctrl" -f 0x7a
    must_fail_with "setting an unknown feature" "invalid field|not changeable" nvme set-feature "$ctrl" -f 0x7a -V 1
}

errors() {
    must_fail_with "a reserved admin opcode" "invalid command opcode" nvme admin-passthru "$ctrl" --opcode=0x7e
    must_fail_with "a reserved I/O opcode" "invalid command opcode" nvme io-passthru "/dev/$disk" --opcode=0x7e --namespace-id=1
    must_fail_with "deleting queue 99" "invalid queue" nvme admin-passthru "$ctrl" --opcode=0 --cdw10=99
    must_fail_with "creating queue 99 without memory" "invalid|offset" nvme admin-passthru "$ctrl" --opcode=5 --cdw10=99 --cdw11=1
}

wait_for_namespace "$disk"
identify
logs
features
errors
