# shellcheck shell=sh disable=SC2154
# One guest, several NVMe disks, the same fio on each in turn: a line per pattern and disk.
# BENCH_SECONDS=N   of each measurement, default 3
# DISKS=N           how many to wait for
seconds=${BENCH_SECONDS:-3}
all_there() { [ "$(find /sys/block -name 'nvme*n1' | wc -l)" -ge "${DISKS:-1}" ]; }
eventually 30 all_there || die "expected ${DISKS:-1} disks: $(ls /sys/block)"

measure() { # NAME RW BS DEPTH
    for path in /sys/block/nvme*n1; do
        device=$(basename "$path")
        fio --name=bench --filename="/dev/$device" --ioengine=io_uring --direct=1 --thread --rw="$2" --bs="$3" --iodepth="$4" \
            --norandommap=1 --time_based --ramp_time=1 --runtime="$seconds" --eta=never --output-format=terse --terse-version=3 >/run/bench.out 2>&1 ||
            die "fio on $device failed: $(cat /run/bench.out)"
        # terse fields: 7 and 48 bandwidth KiB/s, 8 and 49 IOPS, 40 and 81 mean latency in µs
        awk -F';' -v what="$1" -v disk="$(sed 's/ *$//' "$path/device/model") ($(sed 's/ *$//' "$path/device/serial"))" '
            NF > 80 { printf "MILLRACE-BENCH %-24s %-36s %9d IOPS %8.1f MiB/s %9.1f us\n", what, disk, $8 + $49, ($7 + $48) / 1024, ($40 > $81 ? $40 : $81) }' /run/bench.out
    done
}

measure "randread 4k qd1" randread 4k 1
measure "randread 4k qd32" randread 4k 32
measure "randwrite 4k qd32" randwrite 4k 32
measure "read 128k qd8" read 128k 8
measure "write 128k qd8" write 128k 8
