# shellcheck shell=sh
# A host of its own, with a disk that takes few requests at once and is slow: a file on it beside a volume in memory, both served by one
# shard. While a load fills the file's disk, the one in memory is measured.
. /millrace/host.sh

# The value of a counter, of all its labels together.
metric() { millrace metrics | awk -v name="$1" 'index($1, name) == 1 { sum += $2 } END { printf "%d", sum }'; }

bench() { # NAME ARGUMENT...
    name=$1
    shift
    in_host /bin/millrace bench --json --bs 4k --socket "/run/millrace/$name.sock" "$@"
}

commands() { grep -oE '"commands": *[0-9]+' "$1" | head -n 1 | grep -oE '[0-9]+'; }

mount_programs
wait_for_namespace nvme0n1
echo 4 >/sys/block/nvme0n1/queue/nr_requests
mkdir -p $host/tmp/data
mkfs.ext4 -q -F -O ^has_journal /dev/nvme0n1 || die "no file system"
mount -t ext4 /dev/nvme0n1 $host/tmp/data || die "it cannot be mounted"
dd if=/dev/zero of=$host/tmp/data/v.img bs=1M count=4 conv=fsync 2>/dev/null || die "no file"
start_daemon
millrace volume create slow --backend file:/tmp/data/v.img --size 4M || daemon_failed "no volume on the file"
millrace volume create fast --backend memory --size 4M || daemon_failed "no volume in memory"
for name in slow fast; do millrace device create $name --nvme --volume $name || daemon_failed "no device $name"; done
[ "$(metric millrace_shard_held_up_total)" = 0 ] || die "something was held up before anything happened"

bench slow --rw randread --qd 64 --time "${SECONDS_OF_LOAD:-12}" >$host/tmp/slow.json 2>$host/tmp/slow.err &
load=$!
sleep 2
bench fast --rw randread --qd 1 --time "${SECONDS_BESIDE:-6}" >$host/tmp/fast.json 2>&1 || daemon_failed "$(cat $host/tmp/fast.json)"
wait $load || daemon_failed "$(cat $host/tmp/slow.err)"
say "beside $(commands $host/tmp/slow.json) reads of the slow disk $(commands $host/tmp/fast.json) of memory; held up $(metric millrace_shard_held_up_total)"
if grep -E 'panicked|a system call was refused' $host/tmp/daemon.log; then daemon_failed "the daemon is unwell"; fi
