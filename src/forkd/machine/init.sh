#!/bin/busybox sh
# First stage of the helper machine, in its initramfs: load what is needed to
# reach the host's files, lay a throw-away layer over them, and hand over to
# second.sh there.  A failure says why on the ready line and powers off.

export PATH=/bin
fail() { echo "failed: $*" >/dev/ttyS1; echo "forkd-machine: failed: $*"; sync; poweroff -f; }

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
. /machine.conf

while read -r module; do
    insmod "/modules/$module" || fail "insmod $module"
done </modules/order

mkdir -p /lower /upper /newroot
mount -t 9p -o "$ROOT_OPTIONS" root /lower || fail "mount the host's root"
mount -t tmpfs -o mode=755 tmpfs /upper || fail "mount tmpfs"
mkdir -p /upper/data /upper/work
layers=lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work
mount -t overlay -o "$layers,xino=off" overlay /newroot || fail "mount overlay"

# Folders of the host's system, each with a throw-away layer of its own.
while IFS='	' read -r tag target; do
    mkdir -p "/lowers/$tag" "/upper/$tag/data" "/upper/$tag/work" "/newroot$target"
    mount -t 9p -o "$ROOT_OPTIONS" "$tag" "/lowers/$tag" || fail "mount the host's $target"
    layers="lowerdir=/lowers/$tag,upperdir=/upper/$tag/data,workdir=/upper/$tag/work"
    mount -t overlay -o "$layers,xino=off" overlay "/newroot$target" || fail "overlay $target"
done </system

mkdir -p /newroot/proc /newroot/sys /newroot/dev /newroot/run
mount -o move /proc /newroot/proc
mount -o move /sys /newroot/sys
mount -o move /dev /newroot/dev
mount -t tmpfs -o mode=755 tmpfs /newroot/run
mkdir -p /newroot/run/forkd-machine
cp /bin/busybox /second.sh /machine.conf /shares /token /newroot/run/forkd-machine/
exec switch_root /newroot /run/forkd-machine/busybox sh /run/forkd-machine/second.sh
