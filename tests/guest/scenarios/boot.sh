# shellcheck shell=sh disable=SC2154
# The stock driver finds the controller, makes a queue for every processor, and each queue works.
# QUEUES=N   the I/O queues expected; default: one per processor
# IRQ=intx   booted with pci=nomsi: all queues share one interrupt line
queues=${QUEUES:-$(nproc)}
[ "${IRQ:-msix}" = msix ] || queues=1

read_disk() { # from processor $1, 256 direct reads of 4 KiB
    taskset -c "$1" dd if="/dev/$disk" of=/dev/null bs=4k count=256 iflag=direct 2>/run/dd.err || die "reading $disk failed: $(cat /run/dd.err)"
}

# Interrupts so far of queue $1; queue 0 is the admin queue.
interrupts() {
    awk -v name="nvme0q$1" '$NF == name { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' /proc/interrupts
}

check_each_queue() {
    queue=1
    while [ "$queue" -le "$queues" ]; do
        before=$(interrupts "$queue")
        # the CPU list of a hardware queue names who submits to it
        cpu=$(sed 's/[^0-9].*//' "$mq/$((queue - 1))/cpu_list")
        read_disk "$cpu"
        after=$(interrupts "$queue")
        [ "$after" -gt "$before" ] || die "queue $queue raised no interrupt while processor $cpu read"
        queue=$((queue + 1))
    done
}

wait_for_controller nvme0
wait_for_namespace "$disk"
nvme list
lsblk
equal "queues of the controller" "$(cat /sys/class/nvme/nvme0/queue_count)" $((queues + 1))
mq=$(queues_of "$disk")
equal "hardware queues of $disk" "$(find "$mq" -mindepth 1 -maxdepth 1 | wc -l)" "$queues"
if [ "${IRQ:-msix}" = msix ]; then
    check_each_queue
else
    grep -E 'IO-APIC.*nvme' /proc/interrupts || die "the controller uses no interrupt line"
    read_disk 0
fi
[ -z "${SIZE-}" ] || equal "size of $disk" "$(size_of "$disk")" "$SIZE"
no_kernel_errors
