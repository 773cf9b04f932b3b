# shellcheck shell=sh
# What scenarios share whose guest is a host: programs of the host's come on the disk vda (scripts/guest-programs), Millrace among them.
host=/run/host

# load_modules NAME...: from the guest's own image, or from the disk's files.
load_modules() {
    for module in "$@"; do
        file=/usr/lib/modules/$(uname -r)/$module.ko
        [ -e "$file" ] || file=$host/files/$module.ko
        # Some kernels have it built in.
        insmod "$file" || say "no module $module"
    done
}

# The programs with their libraries, over the machine's own devices.
mount_programs() {
    wait_for_disk vda
    mkdir -p $host
    mount -t ext4 -o ro /dev/vda $host || die "vda is no image of scripts/guest-programs"
    for dir in dev proc sys; do mount -o bind /$dir $host/$dir; done
    mount -o bind /dev/shm $host/dev/shm
    for dir in run tmp; do mount -t tmpfs tmpfs $host/$dir; done
}

# For a monitor of machines among the programs; the modules are among the files.
load_kvm() {
    load_modules irqbypass kvm
    if grep -qw vmx /proc/cpuinfo; then load_modules kvm-intel; else load_modules kvm-amd; fi
    [ -c /dev/kvm ] || die "this machine cannot run machines: $(dmesg | grep -i kvm | tail -n 3)"
}

in_host() { chroot $host "$@"; }

millrace() { in_host /bin/millrace --run-dir /run/millrace "$@"; }

start_daemon() {
    (cd $host/tmp && exec chroot $host /bin/millrace --run-dir /run/millrace serve --state-dir /tmp/state \
        --log warn,${LOG:-millrace_control=info,millrace_backends=info}) >$host/tmp/daemon.log 2>&1 &
    eventually 30 millrace status || daemon_failed "the daemon did not come up"
}

# The last lines of the daemon's log are what a failure needs.
daemon_failed() {
    tail -n 30 $host/tmp/daemon.log
    die "$1"
}

# The worker of the daemon's keeper.
worker() {
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' '\n' <"$file" 2>/dev/null | grep -qx worker; then basename "$(dirname "$file")"; fi
    done
}
