"""Debian's own checker finds no error and no warning in the Debian packages.

Exceptions are in packaging/debian/lintian-overrides, each with its reason.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.support import fresh_root
from tests.support.debs import built_for

pytestmark = [
    pytest.mark.needs("root", "mmdebstrap", "network", "deb", "deb13"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1800),
]

LINTIAN = (
    "lintian --allow-root --fail-on none --show-overrides --display-info --tag-display-limit 0"
)

RELEASES = (("bookworm", "deb12"), ("trixie", "deb13"))


@cache
def reported(release: str, mark: str) -> list[str]:
    """Return the lines that a release's lintian has for its package."""
    package = built_for(mark)
    lower = fresh_root.made(f"{release}-lintian", ("lintian", "python3"), release)
    with (
        tempfile.TemporaryDirectory(prefix="fk-root-", dir="/tmp") as name,
        fresh_root.fresh_root(lower, layer=Path(name, "layer"), shared=(package.parent,)) as root,
    ):
        return root.check(f"{LINTIAN} {package}").splitlines()


@pytest.mark.parametrize(("release", "mark"), RELEASES)
def test_a_package_has_no_errors(release: str, mark: str) -> None:
    said = reported(release, mark)

    assert [line for line in said if line.startswith(("E:", "W:"))] == []
    assert any(line.startswith("O: forkd: ") for line in said), "it reads the exceptions"


def test_every_exception_is_needed_in_some_release() -> None:
    unused = [
        {
            line.split()[3]
            for line in reported(*each)
            if line.startswith("I: forkd: unused-override")
        }
        for each in RELEASES
    ]

    assert set.intersection(*unused) == set()
