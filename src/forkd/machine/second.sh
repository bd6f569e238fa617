#!/bin/busybox sh
# Second stage of the helper machine, process 1 over the host's root: mount what
# a Linux system has, attach the shares and the state disk, start the executor,
# and reap orphans until it ends.

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
cd /run/forkd-machine || exit 1
SHMEM_HUGE=/sys/kernel/mm/transparent_hugepage/shmem_enabled
FAULT_AROUND=/sys/kernel/debug/fault_around_bytes
NX_HUGE_PAGES=/sys/module/kvm/parameters/nx_huge_pages
MULTIHIT=/sys/devices/system/cpu/vulnerabilities/itlb_multihit
bb() { /run/forkd-machine/busybox "$@"; }
fail() { echo "failed: $*" >/dev/ttyS1; echo "forkd-machine: failed: $*"; bb sync; bb poweroff -f; }
. ./machine.conf

bb mkdir -p /dev/pts /dev/shm /run/lock /tmp /var/lib/forkd "/lib/modules/$RELEASE"
bb mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
bb mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# What the executor runs from stays visible when it lies below /tmp.
echo "$KEPT" | while IFS= read -r folder && [ -n "$folder" ]; do
    bb mkdir -p "/run/forkd-machine/kept$folder"
    bb mount -o bind "$folder" "/run/forkd-machine/kept$folder" || fail "keep $folder"
done
bb mount -t tmpfs -o mode=1777 tmpfs /tmp
echo "$KEPT" | while IFS= read -r folder && [ -n "$folder" ]; do
    bb mkdir -p "$folder"
    bb mount -o bind "/run/forkd-machine/kept$folder" "$folder" || fail "keep $folder"
done
# Else each fork waits for a grace period: docs/explanation/spawn.md.  Since Linux 6.0.
{ [ -n "$TUNED" ] && bb mount -t cgroup2 -o favordynmods cgroup2 /sys/fs/cgroup; } ||
    bb mount -t cgroup2 cgroup2 /sys/fs/cgroup || fail "mount cgroup2"
for controller in $(bb cat /sys/fs/cgroup/cgroup.controllers); do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
# A group that uses every controller, so that their switches, too, stay on: see
# hold_switches in executor.py.
bb mkdir /sys/fs/cgroup/machine-keep
echo "100000 100000" >/sys/fs/cgroup/machine-keep/cpu.max
bb ln -sf /proc/self/fd /dev/fd
bb ln -sf /proc/self/fd/0 /dev/stdin
bb ln -sf /proc/self/fd/1 /dev/stdout
bb ln -sf /proc/self/fd/2 /dev/stderr

bb mount -t 9p -o "$ROOT_OPTIONS" modules "/lib/modules/$RELEASE" || fail "mount the modules"
if [ -b /dev/vda ]; then
    bb mount -t ext4 -o noatime,discard /dev/vda /var/lib/forkd || fail "mount the state disk"
fi
# A layered share is the host's, unchanged, below what the machine writes to its own disk.
while IFS='	' read -r tag options layer target; do
    bb mkdir -p "$target"
    if [ "$layer" = - ]; then
        bb mount -t 9p -o "$options" "$tag" "$target" || fail "mount $target"
        continue
    fi
    bb mkdir -p "/run/forkd-machine/lower/$tag" "$layer/data" "$layer/work"
    bb mount -t 9p -o "$options" "$tag" "/run/forkd-machine/lower/$tag" || fail "mount $target"
    layers="lowerdir=/run/forkd-machine/lower/$tag,upperdir=$layer/data,workdir=$layer/work"
    bb mount -t overlay -o "$layers,xino=off" overlay "$target" || fail "overlay $target"
done <./shares

bb hostname forkd-machine
bb ip link set lo up
bb ip link set eth0 up
bb ip address add 10.0.2.15/24 dev eth0
bb ip route add default via 10.0.2.2
bb rm -f /etc/resolv.conf
echo "nameserver 10.0.2.3" >/etc/resolv.conf

# The host's modprobe unpacks compressed modules; busybox's does not.
for module in $MODULES; do
    modprobe "$module" || bb modprobe "$module" || echo "forkd-machine: no module $module"
done
[ -e /dev/kvm ] && bb chmod 666 /dev/kvm
# KVM then makes no thread for each guest.  Kernels that do not know the word refuse it.
if [ -n "$TUNED" ] && [ -e "$NX_HUGE_PAGES" ] && bb grep -q "Not affected" "$MULTIHIT"; then
    echo never 2>/dev/null >"$NX_HUGE_PAGES"
fi
bb mkdir -p /dev/net && [ -e /dev/net/tun ] && bb chmod 666 /dev/net/tun
for setting in $SYSCTLS; do
    echo "${setting#*=}" >"/proc/sys/${setting%%=*}"
done
# Snapshots are held in files in memory, in huge pages where they are asked for.
[ -e "$SHMEM_HUGE" ] && echo advise >"$SHMEM_HUGE"
# What the kernel maps around a page of a file that is asked for: KVM maps each page of a guest by
# itself, so these would only be copied by every branch.
bb mount -t debugfs -o mode=700 debugfs /sys/kernel/debug
[ -e "$FAULT_AROUND" ] && echo 4096 >"$FAULT_AROUND"
ulimit -n 1048576

"$PYTHON" -E -s -S "$EXECUTOR" 10.0.2.15 ./token /dev/ttyS1 &
executor=$!
while bb kill -0 "$executor"; do
    wait "$executor"
done
fail "the executor ended"
