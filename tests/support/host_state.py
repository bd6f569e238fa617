"""What setting a host up may change, as text, to be compared before and after."""

from __future__ import annotations

from forkd.host import tuning

VALUES = " ".join(f"/{each.path}" for each in tuning.SETTINGS)

STATE = f"""\
backups="-name passwd- -o -name shadow- -o -name group- -o -name gshadow-"
find /etc /var/lib -xdev -name random-seed -prune -o -name systemd -prune \\
    -o \\( $backups \\) -prune -o -printf '%p %y %m %U %G %l\\n' | sort
find /etc -xdev -type f ! \\( $backups \\) -exec sha256sum {{}} + | sort
cat /etc/group /etc/gshadow
head -n 1 {VALUES} 2>/dev/null
stat -c '%n %a %u %g' /dev/kvm 2>/dev/null
grep cgroup2 /proc/self/mounts || true
"""
"""Shell that prints files below /etc and /var/lib with modes, owners and contents, groups, settings
of the kernel, /dev/kvm, and how cgroups are mounted; not the backups that groupadd and its like
keep."""
