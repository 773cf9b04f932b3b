# shellcheck shell=sh disable=SC2154
# What a guest flushed is there after the guest was killed.
# ROLE=writer            writes rounds of 64 stamped blocks, flushes each round and marks
#                        "flushed ROUND"; a random load runs beside it. It never ends by itself.
# ROLE=checker ROUNDS=N  finds every block of rounds 1 to N as it was written
wait_for_namespace "$disk"
dev=/dev/$disk
rounds_on_disk=512 blocks=64

make_round() {
    awk -v round="$1" -v blocks=$blocks 'BEGIN { for (b = 0; b < blocks; b++) printf "%-4095s\n", "round " round " block " b }'
}
place() { echo $(($1 % rounds_on_disk * blocks)); } # in blocks

writer() {
    fio --name=load --filename="$dev" --offset=256m --size=64m --ioengine=io_uring --direct=1 --rw=randrw --bs=4k \
        --iodepth=16 --thread --time_based --runtime=3600 --eta=never >/run/load.log 2>&1 </dev/null &
    round=1
    while :; do
        make_round $round | dd of="$dev" bs=262144 seek=$(($(place $round) * 4096)) oflag=direct,seek_bytes iflag=fullblock conv=fsync,notrunc 2>/run/dd.err ||
            die "round $round: $(cat /run/dd.err)"
        mark "flushed $round"
        round=$((round + 1))
        # the load beside it must be a load
        kill -0 $! || { cat /run/load.log; die "the load ended"; }
    done
}

checker() {
    first=1
    [ "$ROUNDS" -le $rounds_on_disk ] || first=$((ROUNDS - rounds_on_disk + 2))
    round=$first
    while [ $round -le "$ROUNDS" ]; do
        make_round $round >/run/expected
        dd if="$dev" bs=4096 skip="$(place $round)" count=$blocks iflag=direct 2>/dev/null | cmp - /run/expected ||
            die "round $round was flushed and is not there"
        round=$((round + 1))
    done
    say "rounds $first to $ROUNDS are there"
    no_kernel_errors
}

"${ROLE:?}"
