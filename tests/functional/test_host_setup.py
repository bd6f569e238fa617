"""`forkd host setup` on a real host, and `undo`: the host is as it was, byte by byte.

Groups, units and files of this host are those of a root of its own, over this host's; settings of
the kernel are this host's own, for a moment.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd.host import tuning
from tests.support.docs import ROOT
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.systemd_root import SystemdRoot

pytestmark = [pytest.mark.needs("root", "systemd"), pytest.mark.timeout(180)]

SHARED = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
FORKD = f"{sys.executable} -m forkd.cli"

BAD = "vm.max_map_count=65000"
"""A value that set-up changes, and that is bad for nobody in the meantime."""


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """This host's settings; they are as before when the test ends, whatever it did."""
    paths = {each.name: tuning.ROOT / each.path for each in tuning.SETTINGS}
    before = {name: value for name in paths if (value := tuning.value(name)) is not None}
    yield
    for name, value in before.items():
        if tuning.value(name) != value:
            paths[name].write_text(value, encoding="ascii")


@pytest.fixture
def host() -> Iterator[SystemdRoot]:
    """A host with a user, a file of settings that was written by hand, and a bad value."""
    with (
        tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name,
        systemd_root(Path(name), SHARED) as host,
    ):
        parents = sorted({str(each) for path in SHARED for each in path.parents})
        host.run(
            f"mount -o remount,rw /sys && chmod a+rx {' '.join(parents)} &&"
            " useradd --create-home ada && mkdir -p /etc/sysctl.d &&"
            " printf '# mine\\nvm.swappiness = 60\\n' >/etc/sysctl.d/90-forkd.conf &&"
            f" chmod 640 /etc/sysctl.d/90-forkd.conf && sysctl -qw {BAD}"
        )
        yield host


def state(host: SystemdRoot) -> str:
    """Return what set-up may change: files with modes and owners, groups, settings."""
    return host.run(
        "find /etc /var/lib -xdev \\( -name 'group-' -o -name 'gshadow-' -o -name random-seed \\)"
        " -prune -o -printf '%p %y %m %u %g %l\\n' | sort &&"
        " find /etc /var/lib/forkd-host -xdev -type f"
        " ! -name 'group-' ! -name 'gshadow-' 2>/dev/null | sort | xargs sha256sum;"
        " cat /etc/group /etc/gshadow;"
        f" cat {' '.join(f'/{each.path}' for each in tuning.SETTINGS)} 2>/dev/null;"
        " stat -c '%n %a %u %g' /dev/kvm; cat /proc/self/mounts | grep cgroup2; true"
    )


def said(host: SystemdRoot, line: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(host.run(f"{FORKD} host {line} --json", check=False))


def test_a_host_is_as_it_was_before(host: SystemdRoot) -> None:
    before = state(host)

    checked = said(host, "check --user ada")
    done = said(host, "setup --yes --user ada")
    assert done["refused"] == {}
    assert done["done"] == [each["part"] for each in checked["changes"]]
    assert {"the group forkd", "ada in the group forkd"} <= set(done["done"])
    assert "forkd" in host.run("id -nG ada").split()
    assert said(host, "check --user ada")["ready"]
    assert said(host, "setup --yes --user ada")["changes"] == []
    assert state(host) != before

    undone = said(host, "undo --yes")
    assert (undone["refused"], undone["left"]) == ({}, {})
    assert state(host) == before
