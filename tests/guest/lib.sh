# shellcheck shell=sh
# What scenarios use. They run in busybox's shell with errors ending them; every check that
# fails says what was expected.
set -eu

# Tells the host that the scenario reached a point: the host waits for the line.
mark() { echo "MILLRACE-MARK $*"; }

say() { echo "guest: $*"; }

die() {
    echo "MILLRACE-FAIL $*" >&2 # where a command substitution does not swallow it
    exit 1
}

# Reads a line that the host sends, and fails unless its first word is $1. The rest is in $answer.
await_host() {
    mark "await $1"
    read -r word answer || die "the host's side of the port closed while waiting for '$1'"
    [ "$word" = "$1" ] || die "waited for '$1' from the host, got '$word $answer'"
}

# The longest wait before a hang is called one: far longer than anything takes on a busy machine under emulation.
patience=180

# eventually SECONDS COMMAND...: until the command succeeds, or fails after that long.
eventually() {
    limit=$(($(uptime_ms) + $1 * 1000))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$(uptime_ms)" -lt "$limit" ] || return 1
        usleep 50000
    done
}

uptime_ms() { awk '{ printf "%d", $1 * 1000 }' /proc/uptime; }

# Waits for controller $1 (nvme0) to be ready for I/O.
wait_for_controller() {
    eventually $patience grep -q live "/sys/class/nvme/$1/state" || die "controller $1 did not come up: $(cat "/sys/class/nvme/$1/state" 2>&1)"
}

# Waits for namespace device $1 (nvme0n1).
wait_for_namespace() {
    case $1 in vd*) wait_for_disk "$1" ;; esac
    eventually $patience test -b "/dev/$1" || die "namespace $1 did not appear; there is: $(echo /dev/nvme*)"
}

# Waits for virtio disk $1 (vda).
wait_for_disk() {
    [ -d /sys/module/virtio_blk ] || die "there is no module virtio_blk: run scripts/guest-root on the host again"
    eventually $patience test -b "/dev/$1" || die "disk $1 did not appear; there is: $(echo /dev/vd*)"
}

# The device of namespace identifier $1: the kernel numbers devices as it finds them.
device_of() {
    for file in /sys/block/nvme*/nsid; do
        if [ "$(cat "$file")" = "$1" ]; then basename "$(dirname "$file")" && return; fi
    done
    die "no device has namespace $1"
}

no_namespace() { [ ! -e "/dev/$1" ]; }
wait_for_no_namespace() { eventually $patience no_namespace "$1" || die "namespace $1 did not go away"; }

# Size of a block device in bytes.
size_of() { blockdev --getsize64 "/dev/$1"; }
size_is() { [ "$(size_of "$1")" = "$2" ]; }
wait_for_size() { eventually $patience size_is "$1" "$2" || die "$1 has $(size_of "$1") bytes, expected $2"; }

# equal WHAT ACTUAL EXPECTED
equal() { [ "$2" = "$3" ] || die "$1: got '$2', expected '$3'"; }

# The folder of a disk's hardware queues. A namespace that may be shared is a disk over a hidden one
# for each path to it (nvme0n1 over nvme0c0n1); the queues are the hidden one's.
queues_of() {
    for dir in "/sys/block/$1/mq" "/sys/class/nvme/nvme0/nvme0c"*"n${1##*n}/mq"; do
        if [ -d "$dir" ]; then echo "$dir" && return; fi
    done
    die "$1 has no hardware queues in /sys"
}

# must_fail WHAT COMMAND...: the command must be refused.
must_fail() {
    what=$1
    shift
    if "$@" >/run/must_fail.log 2>&1; then die "$what was accepted: $(cat /run/must_fail.log)"; fi
}

# must_fail_with WHAT STATUS COMMAND...: refused by the device with a status that nvme-cli names so.
must_fail_with() {
    what=$1 status=$2
    shift 2
    if "$@" >/run/must_fail.log 2>&1; then die "$what was accepted: $(cat /run/must_fail.log)"; fi
    grep -qiE "$status" /run/must_fail.log || die "$what: expected status $status, got: $(cat /run/must_fail.log)"
}

# A field of identify, as nvme-cli prints it: field ctrl|ns NAME DEVICE
field() { nvme "id-$1" "$3" | awk -F: -v name="$2" '{ k = $1; gsub(/[ \t]/, "", k) } k == name { v = $2; gsub(/^[ \t]+|[ \t]+$/, "", v); print v; exit }'; }

# Tells the controller of $ctrl which host it serves: 16 bytes, of which the first 8 are text. Reports
# of reservations are in the extended form then, as nvme-cli asks for it by itself.
set_host_identifier() {
    printf '%s%s' "$1" "$1" >/run/hostid
    nvme set-feature "$ctrl" -f 0x81 -V 1 -l 16 -d /run/hostid >/dev/null || lenient "the host identifier is not settable"
}

# supports WORD BIT NAME: whether identify's field has the bit. With LENIENT=1 (a controller that
# is not ours) a scenario may go on without it; otherwise its absence is a failure.
supports() {
    value=$(($(field ctrl "$1" "$ctrl")))
    if [ $((value >> $2 & 1)) = 1 ]; then return 0; fi
    [ "${LENIENT:-0}" = 1 ] || die "the controller does not support $3 ($1 is $value, bit $2)"
    say "skipped: $3 is not supported by this controller"
    return 1
}

# lenient TEXT: a failure, except with a controller that is not ours (LENIENT=1).
lenient() {
    [ "${LENIENT:-0}" = 1 ] || die "$1"
    say "accepted of this controller: $1"
}

# fio with what every run needs. Fails with fio's own words; prints a line per run.
run_fio() {
    name=$1
    shift
    fio --name="$name" --ioengine=io_uring --direct=1 --thread --randrepeat=1 --norandommap=0 \
        --output=/run/fio.log --output-format=normal --eta=never "$@" >/run/fio.err 2>&1 || {
        cat /run/fio.log /run/fio.err
        die "fio $name failed"
    }
    say "fio $name: $(grep -hoE '(read|write|trim): IOPS=[^ ,]+' /run/fio.log | tr '\n' ' ')"
}

# Names of the errors that the kernel logged about NVMe or its block devices since boot.
no_kernel_errors() {
    errors='I/O error|nvme.*(timeout|Abort|disabled|fatal|reset)|EXT4-fs error|BUG:'
    # A processor that its host starves is told of with a trace.
    dmesg | grep -qE 'rcu:.*(stall|starved)' || errors="$errors|Call Trace"
    if dmesg | grep -E "$errors" >/run/kernel-errors; then
        cat /run/kernel-errors
        die "the kernel logged errors"
    fi
}

# shellcheck disable=SC2034
disk=${DISK:-nvme0n1}
ctrl=/dev/${CTRL:-nvme0}

# A text for the first MiB of a disk.
text() { yes "the guest's own words, line after line" | head -c 1048576; }

write_text() { # DEVICE
    text | dd of="$1" bs=64k iflag=fullblock oflag=direct conv=fsync 2>/dev/null || die "writing the text"
    text | cmp -n 1048576 - "$1" || die "the text is not there"
}

# expect_text DEVICE [BAD]: the text's blocks of 4096 bytes are there, but for number BAD, which cannot be read. They are read one by
# one, but not by a program for each, which takes an emulated guest half a minute more.
expect_text() {
    bad=${2:-256}
    text_part "$1" 0 "$bad"
    [ "$bad" -lt 256 ] || return 0
    must_fail "a read of block $bad" dd if="$1" of=/run/block bs=4096 skip="$bad" count=1 iflag=direct
    say "block $bad is refused, as it should be: $(cat /run/must_fail.log)"
    text_part "$1" $((bad + 1)) $((255 - bad))
}

text_part() { # DEVICE FIRST COUNT
    dd if="$1" of=/run/part bs=4096 skip="$2" count="$3" iflag=direct 2>/run/why || die "one of $3 blocks from $2 on: $(cat /run/why)"
    text | dd bs=4096 skip="$2" count="$3" iflag=fullblock 2>/dev/null | cmp - /run/part || die "one of $3 blocks from $2 on has changed"
}
