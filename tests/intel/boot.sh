#!/bin/busybox sh
# First stage of the Intel machine, in its initramfs: find the disk and hand over to job.sh there.

export PATH=/bin
fail() { echo "failed: $*" >/dev/ttyS1; sync; poweroff -f; }

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do
    insmod "/modules/$module" || fail "insmod $module"
done </modules/order

# The kernel looks for disks beside us.
waited=0
until [ -b /dev/sda1 ] && [ -b /dev/sdb ]; do
    [ "$waited" -lt 100 ] || fail "there are no disks"
    waited=$((waited + 1))
    usleep 100000
done
# A machine that crashed begins anew; it must not run the tests again.
[ "$(dd if=/dev/sdb bs=8 count=1 2>/dev/null)" != "started " ] || poweroff -f
echo "started " >/dev/sdb

mkdir -p /newroot
mount -t ext4 -o noatime /dev/sda1 /newroot || fail "mount the disk"
mount -o move /proc /newroot/proc
mount -o move /sys /newroot/sys
mount -o move /dev /newroot/dev
mount -t tmpfs -o mode=755 tmpfs /newroot/run
mkdir -p /newroot/run/intel
cp /bin/busybox /job.sh /job /machine.conf /newroot/run/intel/
exec switch_root /newroot /run/intel/busybox sh /run/intel/job.sh
