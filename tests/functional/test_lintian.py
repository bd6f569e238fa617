"""Debian's own checker finds no error and no warning in the Debian packages.

Exceptions are in packaging/debian/lintian-overrides, each with its reason.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support import fresh_root
from tests.support.debs import built_for

pytestmark = [
    pytest.mark.needs("root", "mmdebstrap", "network", "deb", "deb13"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1800),
]

LINTIAN = "lintian --allow-root --fail-on none --show-overrides --tag-display-limit 0"


@pytest.mark.parametrize(("release", "mark"), [("bookworm", "deb12"), ("trixie", "deb13")])
def test_a_package_has_no_errors(release: str, mark: str) -> None:
    package = built_for(mark)
    lower = fresh_root.made(f"{release}-lintian", ("lintian", "python3"), release)
    with (
        tempfile.TemporaryDirectory(prefix="fk-root-", dir="/tmp") as name,
        fresh_root.fresh_root(lower, layer=Path(name, "layer"), shared=(package.parent,)) as root,
    ):
        said = root.check(f"{LINTIAN} {package}")

    assert [line for line in said.splitlines() if line.startswith(("E:", "W:"))] == []
    assert "O: forkd: " in said, "it reads the exceptions"
