# shellcheck shell=sh
# A host of its own, with a disk that takes few requests at once and is slow, and one that is neither: a file on each beside a volume in
# memory, all served by one shard. While a load fills the slow disk, the others are measured.
. /millrace/host.sh

# The value of a counter, of all its labels together.
metric() { millrace metrics | awk -v name="$1" 'index($1, name) == 1 { sum += $2 } END { printf "%d", sum }'; }

bench() { # NAME ARGUMENT...
    name=$1
    shift
    in_host /bin/millrace bench --json --bs 4k --socket "/run/millrace/$name.sock" "$@"
}

commands() { grep -oE '"commands": *[0-9]+' "$1" | head -n 1 | grep -oE '[0-9]+'; }

# The disk with a serial number: the kernel numbers them as it finds them.
disk_of() {
    for dir in /sys/block/nvme[0-9]n1; do
        if grep -qx "$1 *" "$dir/device/serial"; then basename "$dir" && return; fi
    done
    die "no disk has the serial number $1"
}

# A file on the disk with this serial number.
file_on() {
    disk=/dev/$(disk_of "$1")
    mkdir -p "$host/tmp/$1"
    mkfs.ext4 -q -F -O ^has_journal "$disk" || die "no file system on $1"
    mount -t ext4 "$disk" "$host/tmp/$1" || die "$1 cannot be mounted"
    dd if=/dev/zero of="$host/tmp/$1/v.img" bs=1M count=4 conv=fsync 2>/dev/null || die "no file on $1"
}

mount_programs
wait_for_namespace nvme0n1
wait_for_namespace nvme1n1
echo 4 >"/sys/block/$(disk_of slow)/queue/nr_requests"
file_on slow
file_on other
start_daemon
for name in slow other; do
    millrace volume create $name --backend file:/tmp/$name/v.img --size 4M || daemon_failed "no volume on the file of $name"
done
millrace volume create fast --backend memory --size 4M || daemon_failed "no volume in memory"
for name in slow other fast; do millrace device create $name --nvme --volume $name || daemon_failed "no device $name"; done
[ "$(metric millrace_shard_held_up_total)" = 0 ] || die "something was held up before anything happened"

bench slow --rw randread --qd 64 --time "${SECONDS_OF_LOAD:-18}" >$host/tmp/slow.json 2>$host/tmp/slow.err &
load=$!
sleep 2
for name in fast other; do
    bench $name --rw randread --qd 1 --time "${SECONDS_BESIDE:-6}" >$host/tmp/$name.json 2>&1 || daemon_failed "$(cat $host/tmp/$name.json)"
done
wait $load || daemon_failed "$(cat $host/tmp/slow.err)"
say "beside $(commands $host/tmp/slow.json) reads of the slow disk $(commands $host/tmp/fast.json) of memory and $(commands $host/tmp/other.json) of the other disk; held up $(metric millrace_shard_held_up_total)"
if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
