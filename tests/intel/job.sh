#!/bin/busybox sh
# Second stage of the Intel machine, process 1 over the disk: mount what a Linux system has, switch
# virtualisation on, run the job, leave what it wrote on the second disk, and power off.

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
cd /run/intel || exit 1
bb() { /run/intel/busybox "$@"; }
fail() { echo "failed: $*" >/dev/ttyS1; bb sync; bb poweroff -f; }
. ./machine.conf

bb stty -F /dev/ttyS1 115200 -onlcr
bb mkdir -p /dev/pts /dev/shm /run/lock /tmp /var/lib/forkd
bb mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
bb mount -t tmpfs -o mode=1777 tmpfs /dev/shm
bb mount -t cgroup2 cgroup2 /sys/fs/cgroup || fail "mount cgroup2"
for controller in $(bb cat /sys/fs/cgroup/cgroup.controllers); do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
bb ln -sf /proc/self/fd /dev/fd
bb ln -sf /proc/self/fd/0 /dev/stdin
bb ln -sf /proc/self/fd/1 /dev/stdout
bb ln -sf /proc/self/fd/2 /dev/stderr
bb mkdir -p /lib/modules
bb ln -sfn "$KERNEL_MODULES" "/lib/modules/$RELEASE"
bb hostname forkd-intel
bb ip link set lo up

# The host's modprobe unpacks compressed modules; busybox's does not.
load() { modprobe "$@" || bb modprobe "$@"; }
# Bochs delivers virtual interrupts wrongly when a page is missing on the way.
load kvm_intel enable_apicv=0 || fail "modprobe kvm_intel"
for module in $MODULES; do
    load "$module" || echo "forkd-intel: no module $module"
done
[ -e /dev/kvm ] || fail "there is no /dev/kvm"
bb chmod 666 /dev/kvm
bb mkdir -p /dev/net && [ -e /dev/net/tun ] && bb chmod 666 /dev/net/tun
for setting in $SYSCTLS; do
    echo "${setting#*=}" >"/proc/sys/${setting%%=*}"
done
echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled
bb mount -t debugfs -o mode=700 debugfs /sys/kernel/debug
ulimit -n 1048576

bb mkdir -p "$RESULTS"
cd "$WORKING_FOLDER" || fail "there is no $WORKING_FOLDER"
/bin/sh /run/intel/job </dev/null >/dev/ttyS1 2>&1
echo $? >"$RESULTS/status"
bb tar -cf /dev/sdb -C "$RESULTS" . || fail "what the job left does not fit"
bb sync
bb poweroff -f
