# shellcheck shell=sh disable=SC2154
# What "make run" shows: the disk as a stock guest sees it, and a little work on it.
wait_for_namespace "$disk"
echo
echo "Linux $(uname -r) sees:"
nvme list
lsblk -o NAME,MODEL,SIZE,LOG-SEC "/dev/$disk"
echo
fio --name=demo --filename="/dev/$disk" --ioengine=io_uring --direct=1 --thread --rw=randread --bs=4k --iodepth=32 \
    --time_based --runtime=3 --eta=never | grep -E 'IOPS=|lat.*avg'
